"""One training step of a 6-layer GPT with tp=2 against DTensor's parallelize_module.

    python benchmarks/tensor_parallel.py [--rounds 15] [--batch 4] [--tokens 256] [--hidden 256]

Both run without and with sequence parallelism. A step is forward, loss, backward, gradient
synchronisation and AdamW. Contestants take turns on the same two ranks, one thread each, in
changing order. The slowest rank's time counts, the ratio is the median over the rounds of
ours / theirs within it. Before anything is timed, the losses of three steps must agree with one
process.

The peer is given its best: the same model code; the rows of the fused q | k | v in an order that
lets DTensor cut them into whole heads (with separate projections it sends the input's gradient
three times); and loss_parallel, so that it does not gather the logits either.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from course.pool.ranks import Ranks
from labcode.config import GPTConfig, OptimConfig

RESULT = Path(__file__).parent / "results" / "tensor_parallel_cpu.json"
TARGET = 1.0
WAYS = ("labcode", "DTensor")
LossOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of (tokens, targets)


def sharded(
    way: str, sequence: bool, config: GPTConfig
) -> tuple[nn.Module, LossOf, Callable[[], None]]:
    """(the model on this rank, a function loss(tokens, targets), what to call after backward)."""
    from labcode.comm.grid import Grid
    from labcode.config import ParallelConfig
    from labcode.models import gpt
    from labcode.models.layers import initialize
    from labcode.models.parallelize import parallelize
    from labcode.topology import GridShape

    model, grid = initialize(gpt.GPT(config), 0), Grid.create(GridShape(tp=2))
    if way == "labcode":
        model = parallelize(model, grid, ParallelConfig(sequence_parallel=sequence))
        return (
            model,
            lambda tokens, targets: model.loss(model(tokens), targets),
            model.finish_gradient_sync,
        )
    theirs(model, grid.mesh["tp"], sequence)
    return model, lambda tokens, targets: gpt.loss(model(tokens), targets), lambda: None


def theirs(model: nn.Module, mesh: DeviceMesh, sequence: bool) -> None:
    """The same cuts through DTensor, made as in PyTorch's tutorial on tensor parallelism."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    from labcode.parallel.sharding import Shard as OurShard

    for block in model.blocks:  # q0 k0 v0 | q1 k1 v1: DTensor cuts rows into equal runs only
        rows = block.attention.qkv.weight.shape[0] // 3
        for param in (block.attention.qkv.weight, block.attention.qkv.bias):
            split = OurShard(0, (rows, rows, rows))
            param.data = torch.cat([split.take(param.data, index, 2) for index in range(2)])
    between = Shard(1) if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for name in ("attention.qkv", "mlp.up"):
        plan[f"blocks.*.{name}"] = ColwiseParallel(input_layouts=between)
    for name in ("attention.proj", "mlp.down"):
        plan[f"blocks.*.{name}"] = RowwiseParallel(output_layouts=between)
    if sequence:
        plan |= {name: SequenceParallel() for name in ("blocks.*.norm1", "blocks.*.norm2", "norm")}
    parallelize_module(model, mesh, plan)


def stepper(way: str, sequence: bool, config: GPTConfig, batch: int) -> Callable[[], torch.Tensor]:
    """A function that trains one step on this rank and returns the loss."""
    import contextlib

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel

    from labcode.train.optim import make_optimizer

    torch.set_num_threads(1)
    model, loss_of, finish = sharded(way, sequence, config)
    optimizer = make_optimizer(model.parameters(), OptimConfig())
    # a fused kernel takes DTensors or plain tensors, not both
    for group in list(optimizer.param_groups):
        plain = [p for p in group["params"] if not isinstance(p, DTensor)]
        group["params"] = [p for p in group["params"] if isinstance(p, DTensor)]
        optimizer.add_param_group({**group, "params": plain})
    optimizer.param_groups = [group for group in optimizer.param_groups if group["params"]]
    tokens = torch.randint(
        config.vocab_size,
        (batch, config.context_length + 1),
        generator=torch.Generator().manual_seed(1),
    )

    def step() -> torch.Tensor:
        with loss_parallel() if way == "DTensor" else contextlib.nullcontext():
            loss = loss_of(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        return loss.full_tensor() if hasattr(loss, "full_tensor") else loss

    return step


def alone(config: GPTConfig, batch: int, steps: int) -> list[float]:
    """Losses of one process without any cut."""
    from labcode.models import gpt
    from labcode.models.layers import initialize
    from labcode.train.optim import make_optimizer

    model = initialize(gpt.GPT(config), 0)
    optimizer = make_optimizer(model.parameters(), OptimConfig())
    tokens = torch.randint(
        config.vocab_size,
        (batch, config.context_length + 1),
        generator=torch.Generator().manual_seed(1),
    )
    losses = []
    for _ in range(steps):
        loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def times(
    rank: int, config: GPTConfig, batch: int, rounds: int
) -> dict[tuple[str, bool], list[float]]:
    """{(way, sequence parallel): seconds of each round on this rank}."""
    field = {}
    for sequence in (False, True):
        for way in WAYS:
            field[way, sequence] = stepper(way, sequence, config, batch)
    expected = torch.tensor(alone(config, batch, 3))
    for step in field.values():
        torch.testing.assert_close(
            torch.stack([step().detach() for _ in range(3)]), expected, rtol=1e-4, atol=1e-4
        )
    return taking_turns(field, rounds, seconds_together)


def main() -> None:
    given = options(__doc__, rounds=15, batch=4, tokens=256, hidden=256).parse_args()
    config = GPTConfig(
        vocab_size=512,
        context_length=given.tokens,
        num_layers=6,
        num_heads=8,
        hidden_size=given.hidden,
        positions="rotary",
        tie_embeddings=False,
    )
    with Ranks(2, timeout_s=120) as ranks:
        found = ranks.run(times, config, given.batch, given.rounds)
    print(HEAD)
    rows = []
    for sequence in (False, True):
        of_layout = []
        for rank in found:
            of_layout.append({way: rank[way, sequence] for way in WAYS})
        rows += report("tp 2 + sequence" if sequence else "tp 2", of_layout)
    write(RESULT, {"machine": machine(), "setup": vars(given), "results": rows})


if __name__ == "__main__":
    main()
