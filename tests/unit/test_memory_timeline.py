"""The memory of one step, by what it is for: held to what autograd, and the run itself, count."""

import pytest
import torch
from made_traces import HOST, MadeTrace
from torch.profiler import ProfilerActivity, profile, record_function

from labcode.config import GPTConfig
from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.ranges import StepRanges
from labcode.models import gpt, layers
from labcode.perf.memory_timeline import CATEGORIES, mark_name, memory_timeline
from labcode.perf.saved_bytes import saved_bytes

CONFIG = GPTConfig(vocab_size=64, context_length=64, num_layers=3, num_heads=4, hidden_size=64)


@pytest.fixture(scope="module")
def model():
    return layers.initialize(gpt.GPT(CONFIG), 0)


def bytes_of(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.fixture(scope="module")
def steps(model):
    """Two recorded steps of training: in the first of them the optimizer makes its state."""
    tokens = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters())
    marks = MemoryMarks(model.parameters(), optimizer)
    ranges = StepRanges()
    ranges.marked = True
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        for number in (1, 2):
            with record_function(f"ProfilerStep#{number}"), marks.watch():
                with ranges("forward"):
                    loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
                with ranges("backward"):
                    loss.backward()
                with ranges("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            del loss
    from labcode.perf.chrome_trace import read

    trace = read(recorded)
    return [memory_timeline(trace, step=number) for number in (1, 2)]


def test_activations_are_what_autograd_saves(model, steps):
    tokens = torch.randint(64, (8, 65))
    with saved_bytes(model) as saved:
        loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
        expected = saved.total()
    del loss
    for timeline in steps:
        assert timeline.most("activations") == pytest.approx(expected, rel=0.03)


def test_gradients_and_optimizer_state_are_whole(model, steps):
    weights = bytes_of(model.parameters())
    first, second = steps
    for timeline in steps:
        assert set(timeline.used_bytes["parameters"]) == {weights}
        assert timeline.most("gradients") == weights
        assert timeline.used_bytes["gradients"][-1] == 0
    # two moments for each weight, and a count of steps for each tensor
    state = 2 * weights + 4 * len(list(model.parameters()))
    assert first.used_bytes["optimizer"][0] == 0
    assert first.used_bytes["optimizer"][-1] == state
    assert set(second.used_bytes["optimizer"]) == {state}


def test_forward_rises_and_backward_falls(steps):
    timeline = steps[1]
    activations = timeline.used_bytes["activations"]
    spans = {name: (start, stop) for name, start, stop in timeline.parts}
    assert list(spans) == ["forward", "backward", "optimizer"]

    def at(moment_ms):
        place = max(i for i, time_ms in enumerate(timeline.time_ms) if time_ms <= moment_ms)
        return activations[place]

    start, stop = spans["forward"]
    assert at(start) < 0.05 * timeline.most("activations")
    assert at(stop) > 0.95 * timeline.most("activations")
    assert at(spans["backward"][1]) < 0.05 * timeline.most("activations")
    at_ms, most = timeline.peak()
    # the logits and their gradient are there when the backward begins
    assert start < at_ms < spans["backward"][1]
    assert sum(most.values()) >= timeline.most("activations") + most["parameters"]


def test_all_that_was_allocated_in_a_step_has_a_category(steps):
    for timeline in steps:
        assert tuple(timeline.used_bytes) == CATEGORIES
        assert {len(values) for values in timeline.used_bytes.values()} == {len(timeline.time_ms)}
        assert timeline.time_ms == sorted(timeline.time_ms)
        assert min(min(values) for values in timeline.used_bytes.values()) >= 0
        assert timeline.used_bytes["temporary"][-1] < 1000


def with_memory(device):
    """A step in which an address is used twice, and something is there from before."""
    trace = MadeTrace().step(5, 0, 1000)

    def change(at, address, num_bytes, on=device):
        args = {"Device Type": on, "Device Id": 0, "Addr": address, "Bytes": num_bytes}
        entry = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
        trace.entries.append(entry | {"pid": HOST, "tid": HOST, "ts": at, "args": args})

    trace.part(f"before {mark_name('parameters', 7)} 400", 10, 10)
    change(20, 1, 100)
    change(30, 1, -100)
    change(40, 1, 60)
    trace.part(mark_name("activations", 1), 50, 50)
    change(60, 9, 5, on=0)
    change(70, 1, -60)
    change(80, 3, -999)  # it was allocated before the recording
    return memory_timeline(trace.trace())


def test_an_address_that_is_used_again_is_something_else():
    timeline = with_memory(device=1)
    assert timeline.step == 5
    assert timeline.time_ms == pytest.approx([0, 0.02, 0.03, 0.04, 0.07])
    assert timeline.used_bytes["temporary"] == [0, 100, 0, 0, 0]
    assert timeline.used_bytes["activations"] == [0, 0, 0, 60, 0]
    assert set(timeline.used_bytes["parameters"]) == {400}
    assert timeline.peak()[1]["temporary"] == 100


def test_on_a_gpu_the_memory_of_the_host_is_left_out():
    assert 5 not in with_memory(device=1).used_bytes["temporary"]
    assert 5 in with_memory(device=0).used_bytes["temporary"]


def test_a_trace_without_allocations_is_refused():
    with pytest.raises(ValueError, match=r"record it with --profile\.memory"):
        memory_timeline(MadeTrace().step(1, 0, 10).trace())
    with pytest.raises(ValueError, match=r"step 3 was not recorded: there are 1$"):
        memory_timeline(MadeTrace().step(1, 0, 10).trace(), step=3)
