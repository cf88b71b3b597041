"""Our pipeline runner against torch.distributed.pipelining, and the bubble against (p-1)/(v m).

    python benchmarks/pipeline.py \\
        [--rounds 15] [--hidden 256] [--tokens 256] [--batch 2] [--stage-ms 150]

Speed: 1F1B and interleaved 1F1B on two ranks, one thread each, the same stages (layers of our GPT)
and micro-batches; a step is forward and backward of all micro-batches. Contestants take turns in
changing order, the slowest rank's time counts, the ratio is the median over the rounds of
ours / theirs. Before anything is timed, losses and gradients must agree.

Bubble: four ranks on two cores would wait for cores and not for each other, so here a stage sleeps
in place of computing, as long for every micro-batch. What remains is the order of the schedule and
the cost of the runner and its messages. It is about a millisecond for each action, which counts for
less the longer a stage takes (try --stage-ms 30).
"""

import copy
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write
from torch import nn

from course.pool.ranks import Ranks

RESULT = Path(__file__).parent / "results" / "pipeline_cpu.json"
MICROBATCHES = 8
SCHEDULES = {"1f1b": 1, "interleaved": 2}  # stages on each rank
BUBBLES = [  # schedule, v, m, on four ranks
    ("gpipe", 1, 8),
    ("1f1b", 1, 8),
    ("1f1b", 1, 16),
    ("interleaved", 2, 8),
]
Sizes = tuple[int, int, int, int]  # hidden, tokens, batch, layers
Step = Callable[[], tuple[float, list[torch.Tensor]]]  # (loss on the last rank, gradients)


class Stage(nn.Module):
    """Some layers, called as both runners like it."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor | None, inputs: torch.Tensor | None = None) -> torch.Tensor:
        return self.layers(inputs if x is None else x)


def contestants(schedule_name: str, sizes: Sizes) -> dict[str, Step]:
    """{implementation: function that runs one step}."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    from labcode.models.layers import Block
    from labcode.parallel.pipeline import Pipeline
    from labcode.schedules import plan_pipeline

    torch.set_num_threads(1)
    hidden, tokens, batch, num_layers = sizes
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_stages = ranks * SCHEDULES[schedule_name]
    torch.manual_seed(0)
    layers = [Block(hidden, 4, 4 * hidden, causal=True) for _ in range(num_layers)]
    per_stage = num_layers // num_stages
    own = {
        s: Stage(layers[s * per_stage : (s + 1) * per_stage])
        for s in range(rank, num_stages, ranks)
    }
    x, y = torch.randn(2, MICROBATCHES * batch, tokens, hidden)

    ours = copy.deepcopy(own)
    pipeline = Pipeline(
        ours,
        plan_pipeline(schedule_name, num_stages, MICROBATCHES, ranks),
        dist.group.WORLD,
        nn.functional.mse_loss,
        lambda inputs: torch.empty_like(inputs),
    )

    def step_of_ours() -> float:
        return pipeline.step(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)).item()

    stages = [
        pipelining.PipelineStage(module, s, num_stages, torch.device("cpu"))
        for s, module in own.items()
    ]
    if schedule_name == "1f1b":
        runner = pipelining.Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    else:
        runner = pipelining.ScheduleInterleaved1F1B(
            stages, MICROBATCHES, loss_fn=nn.functional.mse_loss
        )

    def step_of_theirs() -> float:
        losses = []
        last = {"target": y, "losses": losses} if rank == ranks - 1 else {}
        runner.step(*([x] if rank == 0 else []), **last)
        return sum(loss.item() for loss in losses) / MICROBATCHES

    def with_gradients(step: Callable[[], float], modules: dict[int, Stage]) -> Step:
        def run() -> tuple[float, list[torch.Tensor]]:
            for module in modules.values():
                module.zero_grad()
            loss = step()
            gradients = []
            for module in modules.values():
                gradients += [param.grad for param in module.parameters()]
            return loss, gradients

        return run

    return {
        "labcode": with_gradients(step_of_ours, ours),
        "torch": with_gradients(step_of_theirs, own),
    }


def times(rank: int, schedule_name: str, sizes: Sizes, rounds: int) -> dict[str, list[float]]:
    """{implementation: seconds of each round on this rank}."""
    field = contestants(schedule_name, sizes)
    (loss, grads), (other_loss, other_grads) = (run() for run in field.values())
    torch.testing.assert_close(loss, other_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads, other_grads, rtol=1e-4, atol=1e-6)
    return taking_turns(field, rounds, seconds_together)


class Sleep(torch.autograd.Function):
    """Takes its time forward, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        import time

        ctx.seconds = seconds
        time.sleep(seconds)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        import time

        time.sleep(2 * ctx.seconds)
        return grad, None


def bubble(rank: int, schedule_name: str, v: int, m: int, seconds: float) -> float:
    """Bubble over ideal time of one step with stages that sleep, the median of three.

    It is the same on every rank.
    """
    import time

    import torch.distributed as dist

    from labcode.parallel.pipeline import Pipeline
    from labcode.schedules import plan_pipeline

    ranks = dist.get_world_size()
    weight = torch.ones((), requires_grad=True)

    def stage(x: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
        return Sleep.apply((inputs if x is None else x) * weight, seconds / v)

    pipeline = Pipeline(
        dict.fromkeys(range(rank, ranks * v, ranks), stage),
        plan_pipeline(schedule_name, ranks * v, m, ranks),
        dist.group.WORLD,
        lambda out, target: out.mean(),
        lambda inputs: torch.empty_like(inputs),
    )
    data = [torch.ones(4)] * m
    found = []
    for _ in range(4):
        dist.barrier()
        start = time.perf_counter()
        pipeline.step(data, data)
        dist.barrier()
        found.append((time.perf_counter() - start) / (3 * seconds * m) - 1)
    return statistics.median(found[1:])


def main() -> None:
    sizes = {"hidden": 256, "tokens": 256, "batch": 2, "layers": 8}
    given = options(__doc__, rounds=15, stage_ms=150, **sizes).parse_args()
    sizes = (given.hidden, given.tokens, given.batch, given.layers)
    rows, bubbles = [], []
    print(HEAD)
    with Ranks(2, timeout_s=120) as ranks:
        for name in SCHEDULES:
            rows += report(name, ranks.run(times, name, sizes, given.rounds))
    print("\n| schedule, 4 ranks | v | m | (p-1)/(v m) | measured | measured / formula |")
    print("|---|---:|---:|---:|---:|---:|")
    with Ranks(4, timeout_s=120) as ranks:
        for name, v, m in BUBBLES:
            formula = 3 / (v * m)
            measured = max(ranks.run(bubble, name, v, m, given.stage_ms / 1e3))
            bubbles.append(
                {
                    "schedule": name,
                    "v": v,
                    "m": m,
                    "formula": formula,
                    "measured": round(measured, 4),
                }
            )
            numbers = f"{formula:.4f} | {measured:.4f} | {measured / formula:.3f}"
            print(f"| {name} | {v} | {m} | {numbers} |", flush=True)
    setup = {"machine": machine(), "setup": vars(given)}
    write(RESULT, setup | {"results": rows, "bubbles": bubbles})


if __name__ == "__main__":
    main()
