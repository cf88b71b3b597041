"""Solutions that cells of lesson 12 show and use; `make notebooks` writes this."""

from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models import layers
from labcode.teach.labs import l12_paced_pipeline as stages
from torch.distributed import pipelining
import torch
import torch.nn.functional as F


config = GPTConfig(
    vocab_size=83, context_length=32, num_layers=6, num_heads=4, hidden_size=64
)
generator = torch.Generator().manual_seed(0)
tokens = torch.randint(83, (5, 8, 2, 33), generator=generator)

# five steps of eight micro-batches of two samples; the target is the next token
batches = []
for step in tokens:
    batches.append([(part[:, :-1], part[:, 1:]) for part in step])

def build():
    """The GPT, the same in every process."""
    return layers.initialize(gpt.GPT(config), 0).double()


def theirs(rank, make, stages_per_rank, **options):
    """{stage: gradient} of this rank, by PyTorch's runner."""
    num_stages = 4 * stages_per_rank
    own = {number: stages.Stage(number) for number in range(rank, num_stages, 4)}
    wrapped = []
    for number, module in own.items():
        cpu = torch.device("cpu")
        wrapped.append(pipelining.PipelineStage(module, number, num_stages, cpu))
    given = wrapped if stages_per_rank > 1 else wrapped[0]
    runner = make(given, n_microbatches=8, loss_fn=F.mse_loss, **options)
    inputs, targets = stages.batches(8)
    if rank == 0:
        runner.step(inputs.flatten(0, 1))
    elif rank == 3:
        runner.step(target=targets.flatten(0, 1))
    else:
        runner.step()
    return {number: module.gradient() for number, module in own.items()}
