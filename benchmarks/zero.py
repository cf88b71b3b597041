"""One training step of a 6-layer GPT under ZeRO-1, 2 and 3 against PyTorch's own.

    python benchmarks/zero.py [--rounds 15] [--batch 4] [--tokens 128] [--hidden 256] [--lora 0]

The peers are ZeroRedundancyOptimizer with DDP (stage 1) and FSDP2 (stage 2: weights stay whole
until backward is done; stage 3: they are given back after forward). A step is forward, loss,
backward, gradient synchronisation, AdamW and whatever gives the ranks their new weights.
Contestants take turns on the same two ranks, one thread each, in changing order. The slowest rank's
time counts, the ratio is the median over the rounds of ours / theirs within it. Before anything is
timed, the losses of three steps must agree with those of plain DDP. The memory that each rank keeps
is compared with the formula of the paper. With `--lora 8` the model is frozen, and adapters of rank
8 train.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write

from course.pool.ranks import Ranks
from labcode.config import GPTConfig, LoraConfig, OptimConfig, ParallelConfig
from labcode.perf.layout_memory import layout_memory
from labcode.perf.settings import STATES, Settings
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

RESULTS = Path(__file__).parent / "results"
PEERS = {1: "ZeroRedundancyOptimizer", 2: "FSDP2, weights stay whole", 3: "FSDP2"}
RANKS = 2


def stepper(
    stage: int, whose: str, config: GPTConfig, batch: int, adapter_rank: int
) -> tuple[Callable[[], torch.Tensor], Callable[[], tuple[int, int, int]]]:
    """(a function that trains one step and returns the loss, one that returns the bytes kept)."""
    from labcode.comm.grid import Grid
    from labcode.measure.steps import held_bytes
    from labcode.models.gpt import GPT
    from labcode.models.lora import add_adapters
    from labcode.models.parallelize import parallelize
    from labcode.train.optim import make_optimizer

    torch.set_num_threads(1)
    parallel = ParallelConfig(zero_stage=stage, data_parallel=whose)
    grid = Grid.create(GridShape(dp=RANKS))
    with torch.device("meta"):
        model = GPT(config)
    if adapter_rank:
        add_adapters(model, LoraConfig(rank=adapter_rank))
    model = parallelize(model, grid, parallel, seed=0)
    group = grid.group("dp") if (stage, whose) == (1, "ddp") else None
    optimizer = make_optimizer(model.weights.values(), OptimConfig(), group)
    generator = torch.Generator().manual_seed(grid.coord("dp"))
    size = (batch, config.context_length + 1)
    tokens = torch.randint(config.vocab_size, size, generator=generator)
    batches = [(tokens[:, :-1], tokens[:, 1:])]

    def step() -> torch.Tensor:
        loss = model.forward_backward(batches)
        optimizer.step()
        optimizer.zero_grad()
        model.gather_parameters()
        return loss

    def kept() -> tuple[int, int, int]:
        model.forward_backward(batches)
        # ZeroRedundancyOptimizer keeps the state in an optimizer of its own
        found = held_bytes(model, getattr(optimizer, "optim", optimizer))
        optimizer.zero_grad()
        return found

    return step, kept


def times(
    rank: int, config: GPTConfig, batch: int, adapter_rank: int, rounds: int
) -> tuple[dict[tuple[int, str], list[float]], dict[tuple[int, str], tuple[int, int, int]]]:
    """({contestant: seconds of each round}, {contestant: bytes kept}) of this rank."""
    plain, _ = stepper(0, "ddp", config, batch, adapter_rank)
    expected = torch.stack([plain() for _ in range(3)])
    field = {}
    kept = {}
    for stage in PEERS:
        for whose in ("labcode", "ddp"):
            step, weigh = stepper(stage, whose, config, batch, adapter_rank)
            losses = torch.stack([step() for _ in range(3)])
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
            field[stage, whose] = step
            kept[stage, whose] = weigh()
    found = taking_turns(field, rounds, seconds_together)
    return found, kept


def main() -> None:
    given = options(__doc__, rounds=15, batch=4, tokens=128, hidden=256, lora=0).parse_args()
    config = GPTConfig(
        vocab_size=512,
        context_length=given.tokens,
        num_layers=6,
        num_heads=8,
        hidden_size=given.hidden,
        positions="rotary",
        tie_embeddings=False,
    )
    with Ranks(RANKS, timeout_s=120) as ranks:
        answers = ranks.run(times, config, given.batch, given.lora, given.rounds)
    print(HEAD)
    rows = []
    memory = []
    for stage, peer in PEERS.items():
        of_stage = []
        for found, _ in answers:
            of_stage.append({"labcode": found[stage, "labcode"], peer: found[stage, "ddp"]})
        rows += report(f"ZeRO-{stage}", of_stage)
        settings = Settings(2, zero_stage=stage, adapter_rank=given.lora, **STATES["float32"])
        parts = layout_memory(Transformer.of(config), GridShape(dp=RANKS), settings)
        predicted = parts["weights"] + parts["gradients"] + parts["optimizer"]
        for whose, name in (("labcode", "labcode"), ("ddp", peer)):
            largest = max(sum(kept[stage, whose]) for _, kept in answers)
            ratio = round(largest / predicted, 3)
            memory.append({"stage": stage, "implementation": name, "kept_over_formula": ratio})
    print("\n| stage | implementation | largest rank's memory / formula |\n|---|---|---:|")
    for row in memory:
        print(f"| {row['stage']} | {row['implementation']} | {row['kept_over_formula']:.3f} |")
    record = {"machine": machine(), "setup": vars(given), "results": rows, "memory": memory}
    name = "zero_lora_cpu.json" if given.lora else "zero_cpu.json"
    write(RESULTS / name, record)


if __name__ == "__main__":
    main()
