"""The parts of a step that the loop names, over every kind of layout: rows tell them, and a slow
part is the one that is slow.
"""

import time

import pytest
from covering import first
from faults import forks
from faults.cases import BASE

from labcode.measure import metrics
from labcode.perf.chrome_trace import PARTS

ARGS = (*BASE, "--train.global_batch=8", "--train.micro_batch=2", "--train.steps=2")
ONE_RANK = ("--train.log_every=1", "--train.out=run", "--train.eval_every=0")
LAYOUTS = {
    "ours": ("--parallel.data_parallel=labcode",),
    "ddp": (),
    "zero 2": ("--parallel.zero_stage=2", "--parallel.data_parallel=labcode"),
    "tp": ("--parallel.tp=2",),
    "pp": ("--parallel.pp=2",),
    "zero bubble": ("--parallel.pp=2", "--parallel.pipeline_schedule=zero_bubble"),
}


def slow_parts():
    """A patch: each part that is not a method of torch's takes 0.05 s longer."""
    from labcode.data import loader
    from labcode.models.gpt import GPT
    from labcode.parallel.model import ParallelModel

    def later(function):
        def slow(*args, **options):
            time.sleep(0.05)
            return function(*args, **options)

        return slow

    loader.read = later(loader.read)
    GPT.forward = later(GPT.forward)
    ParallelModel.gradient_norm = later(ParallelModel.gradient_norm)


@pytest.mark.parametrize("name", first(2, ["ours", "pp", "ddp", "zero 2", "tp", "zero bubble"]))
def test_rows_tell_the_parts_of_a_step(tmp_path, name):
    layout = LAYOUTS[name]
    args = [*ARGS, *ONE_RANK, *layout]
    done = forks.train(args, cwd=tmp_path, ranks=2, patch=slow_parts)
    assert done.codes == [0, 0], done.err
    rows = [row for row in metrics.read(tmp_path / "run") if "loss" in row]
    micro_batches = 4 if layout and layout[0] in ("--parallel.tp=2", "--parallel.pp=2") else 2
    for row in rows:
        seconds = [row[f"{part}_s"] for part in PARTS]
        assert sum(seconds) <= row["step_s"]
        assert row["data_s"] >= 0.05 * micro_batches
        assert row["forward_s"] >= 0.05 * micro_batches
        assert row["optimizer_s"] >= 0.05
        assert min(row["backward_s"], row["communication_s"]) > 0
