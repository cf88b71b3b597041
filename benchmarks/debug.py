"""What statistics of tensors cost a training step: every 10 steps, and switched off again.

    python benchmarks/debug.py [--rounds 9] [--steps 20]

Two ranks of dp, one thread each. Three copies of a model take turns in changing order, each for
some steps: one whose debugger logs six statistics of the tensors of all linear layers every 10
steps, over both ranks; one that has had a debugger and no longer has; one that never had one. In
bfloat16 these are LogTensorStats of six tensors, in FP8 LogFp8TensorStats of three. The slowest
rank's time counts, and the ratio is the median over the rounds of on / never and off / never.
"""

from pathlib import Path
from typing import Any

import torch
from side_by_side import HEAD, machine, options, report, taking_turns, write

from course.pool.ranks import Ranks
from labcode.runtime import combinations

RESULT = Path(__file__).parent / "results" / "debug_cpu.json"
TARGET = 1.10
RANKS = 2
NEVER = "never looked at"
ON = "every 10 steps"
OFF = "looked at before"
MODELS = {
    "gpt_tiny": {},
    "4 layers of 256": {"model.num_layers": 4, "model.hidden_size": 256},
}
FEATURES = {
    "bfloat16": (
        "LogTensorStats",
        "activation, weight, output, gradient, dgrad, wgrad",
        "min, max, mean, std, l1_norm, l2_norm",
    ),
    "fp8": (
        "LogFp8TensorStats",
        "activation, weight, gradient",
        '"underflows%", "overflows%", scale_inv_min, scale_inv_max, mse',
    ),
}
YAML = """
stats:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    {}:
      enabled: True
      tensors: [{}]
      stats: [{}]
      freq: 10
"""


def times(
    rank: int, changes: dict[str, Any], dtype: str, rounds: int, steps: int
) -> dict[str, list[float]]:
    """{contestant: seconds of a step in each round} of a rank."""
    import tempfile
    import time

    import torch.distributed as dist

    from labcode import recipes
    from labcode.comm.grid import Grid
    from labcode.debug import on_layers
    from labcode.runtime.bootstrap import Place, World
    from labcode.train.build import build
    from labcode.train.step import TrainStep
    from labcode.train.tasks import make_task

    torch.set_num_threads(1)
    size = dist.get_world_size()
    given = {"train.dtype": dtype, "train.steps": 10**6, "parallel.dp": size} | changes
    config = recipes.with_changes(recipes.gpt_tiny(), given)
    resolved = combinations.resolve(config, size)
    grid = Grid.create(resolved.shape)
    world = World(Place(rank, size, rank, size), torch.device("cpu"), "gloo")
    field = {}
    for who in (NEVER, ON, OFF):
        field[who] = TrainStep(build(resolved, world, grid, make_task(config)))
    folder = Path(tempfile.mkdtemp())
    file = folder / "stats.yaml"
    file.write_text(YAML.format(*FEATURES[dtype]))

    def run(who: str, looks: bool) -> float:
        """Seconds of a step, without those for opening and closing."""
        step = field[who]
        training = step.training
        debugger = None
        if looks:
            chosen = on_layers.chosen_layers(training.model, file)
            over = on_layers.Reduction(("dp",))
            done = training.steps_done
            debugger = on_layers.Debugger(training.model, chosen, folder, over, first_step=done)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(steps):
            step()
            if debugger is not None:
                debugger.step()
        seconds = time.perf_counter() - started
        if debugger is not None:
            debugger.close()
        return seconds / steps

    for who in field:
        run(who, looks=who != NEVER)
    found = taking_turns({who: who for who in field}, rounds, lambda who: run(who, looks=who == ON))
    for step in field.values():
        step.training.close()
    return found


def main() -> None:
    """Race with each model and precision, and write the record."""
    given = options(__doc__, rounds=9, steps=20).parse_args()
    print(HEAD.replace("ours / theirs", "ratio"))
    rows = []
    with Ranks(RANKS, timeout_s=120) as ranks:
        for name, changes in MODELS.items():
            for dtype in FEATURES:
                answers = ranks.run(times, changes, dtype, given.rounds, given.steps)
                for who in (ON, OFF):
                    pair = [{who: found[who], NEVER: found[NEVER]} for found in answers]
                    rows += report(f"{name}, {dtype}", pair)
    record = {"machine": machine(), "setup": vars(given), "results": rows}
    write(RESULT, record | {"target": TARGET})


if __name__ == "__main__":
    main()
