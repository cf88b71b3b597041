"""Real runs that were built to have one fault each: the profile names it.

Faults are sleeps of a tenth of a second, beside which all else of these small steps is short.
"""

import time

import pytest
import torch
from faults import forks
from faults.cases import BASE
from torch.profiler import ProfilerActivity, profile, record_function

from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.ranges import StepRanges
from labcode.perf.advice import advice
from labcode.perf.breakdown import breakdown, mean
from labcode.perf.chrome_trace import read
from labcode.perf.operations import top_operations

pytestmark = pytest.mark.release

ARGS = (*BASE, "--train.steps=4", "--train.out=run", "--train.eval_every=0")
PROFILE = ("--profile.steps=3:5", "--train.global_batch=8", "--train.micro_batch=2")
SLEEP_S = 0.1
LATE_S = 0.5  # of one rank alone: the other waits less by what it is late itself


def later(function, ranks=("0", "1"), seconds=SLEEP_S):
    """A function that begins a while later, on some ranks."""
    import os

    def slow(*args, **options):
        if os.environ.get("RANK", "0") in ranks:
            time.sleep(seconds)
        return function(*args, **options)

    return slow


def slow_data():
    from labcode.data import loader

    loader.read = later(loader.read)


def slow_python():
    from labcode.models.gpt import GPT

    GPT.forward = later(GPT.forward)


def late_gradients():
    """Rank 1 sends its gradients late: to rank 0 it is a slow link."""
    from labcode.parallel.data import Bucket

    Bucket.send = later(Bucket.send, ranks=("1",), seconds=LATE_S)


def late_gradients_of_ddp():
    """The late gradients of PyTorch's DDP, whose messages leave while backward runs."""
    from torch.nn.parallel import DistributedDataParallel

    original = DistributedDataParallel.forward

    def forward(self, *args, **options):
        if "hooked" not in self.__dict__:
            self.hooked = True
            late = later(lambda grad: grad, ranks=("1",), seconds=LATE_S)
            parameter = next(param for param in self.parameters())
            parameter.register_hook(late)
        return original(self, *args, **options)

    DistributedDataParallel.forward = forward


def late_messages_of_tp():
    from labcode.comm import collectives

    collectives._all_reduce = later(collectives._all_reduce, ranks=("1",))
    collectives.dist.all_reduce = later(collectives.dist.all_reduce, ranks=("1",))


def late_stages():
    from labcode.parallel.pipeline import _Run

    _Run._forward = later(_Run._forward, ranks=("0",), seconds=LATE_S)


def found_by(folder, patch, *options, ranks=1, of=0):
    """The times of a step and what is advised, for rank `of`."""
    args = [*ARGS, *PROFILE, f"--profile.ranks={of}", *options]
    done = forks.train(args, cwd=folder, ranks=ranks, patch=patch)
    assert set(done.codes) == {0}, done.err
    return mean(breakdown(folder / "run")), advice(folder / "run")


def test_a_slow_data_set(tmp_path):
    times, lines = found_by(tmp_path, slow_data)
    assert times.data_ms >= 4 * SLEEP_S * 1e3  # four micro-batches
    assert lines[0].startswith("data wait ")
    assert "--loader.workers" in lines[0]


def test_slow_python_between_operations(tmp_path):
    times, lines = found_by(tmp_path, slow_python)
    assert times.other_ms >= 4 * SLEEP_S * 1e3
    assert times.parts_ms["forward"] >= 4 * SLEEP_S * 1e3
    assert "of the step lies between operations" in lines[0]


@pytest.mark.parametrize(
    ("patch", "options", "part"),
    [
        (late_gradients, ["--parallel.data_parallel=labcode"], "communication"),
        (late_gradients_of_ddp, [], "backward"),
        (late_messages_of_tp, ["--parallel.tp=2"], "forward"),
    ],
    ids=["ours", "ddp", "tp"],
)
def test_a_slow_link(tmp_path, patch, options, part):
    times, lines = found_by(tmp_path, patch, *options, ranks=2)
    assert times.communication_ms >= 0.9 * SLEEP_S * 1e3
    assert times.parts_ms[part] >= 0.9 * SLEEP_S * 1e3  # the clock of the host sees it there
    assert times.collectives_ms >= times.hidden_ms
    assert lines[0].startswith("exposed communication ")


def test_a_stage_that_waits_for_the_one_before(tmp_path):
    times, lines = found_by(tmp_path, late_stages, "--parallel.pp=2", ranks=2, of=1)
    assert times.communication_ms >= 0.9 * 4 * SLEEP_S * 1e3
    assert times.parts_ms["communication"] >= 0.9 * 4 * SLEEP_S * 1e3
    assert lines[0].startswith("exposed communication ")


def test_an_optimizer_that_takes_one_small_weight_after_the_other(tmp_path):
    many = ("--model.num_layers=40", "--train.global_batch=1", "--train.micro_batch=1")
    times, lines = found_by(tmp_path, None, *many, "--optim.implementation=for_loop")
    assert times.parts_ms["optimizer"] > 0.15 * times.total_ms
    (line,) = [line for line in lines if line.startswith("optimizer ")]
    assert "--optim.implementation fused" in line


def test_elementwise_operations():
    x = torch.randn(1000, 1000)
    small = torch.randn(64, 64)
    with (
        profile(activities=[ProfilerActivity.CPU]) as recorded,
        record_function("ProfilerStep#1"),
    ):
        for _ in range(30):
            x = torch.nn.functional.gelu(x) * 1.01 + 0.1
        small @ small
    trace = read(recorded)
    (line,) = [line for line in advice(trace) if line.startswith("elementwise operations ")]
    assert "--train.compile model" in line
    assert "aten::gelu" in {operation.name for operation in top_operations(trace, 3)}


def test_memory_is_counted_where_a_model_is_divided(tmp_path):
    from labcode.perf.memory_timeline import memory_timeline

    options = ("--profile.memory", "--parallel.zero_stage=1", "--parallel.data_parallel=labcode")
    found_by(tmp_path, None, *options, ranks=2)
    timeline = memory_timeline(tmp_path / "run")
    # each rank keeps the moments of half of the weights
    weights = timeline.most("parameters")
    assert timeline.most("optimizer") == pytest.approx(weights, rel=0.05)


def test_marks_and_ranges_are_not_there_without_a_profiler():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    marks = MemoryMarks([weight], optimizer)
    ranges = StepRanges()
    with profile(activities=[ProfilerActivity.CPU]) as recorded, ranges("forward"):
        (weight * 2).sum().backward()
    assert marks
    names = {event.name for event in read(recorded).events}
    assert not {name for name in names if name.startswith(("memory:", "forward"))}
