"""Solutions that cells of lesson 13 show and use; `make notebooks` writes this."""

from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.config import OptimConfig
from labcode.config import ParallelConfig
from labcode.measure.steps import held_bytes
from labcode.models.gpt import GPT
from labcode.models.parallelize import parallelize
from labcode.topology import GridShape
from labcode.train.optim import make_optimizer
import torch


CONFIG = GPTConfig(
    vocab_size=512, context_length=16, num_layers=4, num_heads=4, hidden_size=64
)


def two_steps(rank, stage, library="labcode", replicas=1):
    """What this rank holds, and the collectives and the loss of the second step."""
    grid = Grid.create(GridShape(dp=4))
    how = ParallelConfig(
        zero_stage=stage, data_parallel=library, zero_replicas=replicas
    )
    with torch.device("meta"):  # shapes only: parallelize makes the weights
        whole = GPT(CONFIG)
    model = parallelize(whole, grid, how, seed=0)
    adamw = make_optimizer(model.weights.values(), OptimConfig())
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(512, (1, 16), generator=generator)
    for _ in range(2):
        adamw.zero_grad()
        with counted() as calls:
            loss = model.forward_backward([(tokens, tokens)])
            held = held_bytes(model, adamw)
            adamw.step()
            model.gather_parameters()
    # below 1000 bytes travel only numbers such as a count of tokens
    large = [call for call in calls if call.num_bytes >= 1000]
    return sum(held), large, loss.item()
