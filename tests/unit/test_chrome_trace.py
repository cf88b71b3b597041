"""Traces are read from files, runs and profiles; what is none is refused in one line."""

import gzip
import json

import pytest
import torch
from made_traces import MadeTrace
from torch.profiler import ProfilerActivity, profile, record_function

from labcode.perf.chrome_trace import Trace, read


def made(rank=0):
    return MadeTrace(rank).step(3, 0, 100).operation("aten::mm", 10, 60)


def test_a_file_plain_or_packed_or_in_a_run(tmp_path):
    plain = tmp_path / "some.json"
    plain.write_text(json.dumps(made().content()))
    packed = tmp_path / "profile" / "host_0.pt.trace.json.gz"
    packed.parent.mkdir()
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    other = tmp_path / "profile" / "host_10.pt.trace.json"
    other.write_text(json.dumps(made(rank=10).content()))
    for source in (plain, str(packed), tmp_path):
        assert read(source).events == made().trace().events
    assert read(tmp_path).rank == 0
    assert read(tmp_path, rank=10).rank == 10
    with pytest.raises(ValueError, match=r"no profile of rank 3: there are those of 0, 10$"):
        read(tmp_path, rank=3)


def test_a_profile_that_has_ended_is_read_once():
    with (
        profile(activities=[ProfilerActivity.CPU]) as recorded,
        record_function("ProfilerStep#7"),
    ):
        torch.ones(3) + 1
    trace = read(recorded)
    assert list(trace.steps()) == [7]
    assert {"aten::ones", "aten::add"} <= {event.name for event in trace.of("cpu_op")}
    assert not trace.has_gpu
    with pytest.raises(ValueError, match="read the file that it was exported to"):
        read(recorded)


def test_events_are_in_order_and_what_contains_others_comes_first():
    trace = MadeTrace().operation("inner", 5, 6).operation("outer", 5, 9).step(1, 0, 10).trace()
    assert [event.name for event in trace.events] == ["ProfilerStep#1", "outer", "inner"]


def test_without_steps_all_is_one_step():
    trace = MadeTrace().operation("a", 5, 6).operation("b", 8, 9).trace()
    (step,) = trace.steps().values()
    assert (step.start_us, step.stop_us) == (5, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    {
        "no json": ("{", "cannot be read as a trace"),
        "a list": ("[]", "is no trace of a profiler"),
        "something else": ('{"loss": 1}', "is no trace of a profiler"),
    }.values(),
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read(tmp_path / "x.json")
    with pytest.raises(ValueError, match=r"has no profile: train with --profile\.steps 10:13"):
        read(tmp_path)
    damaged = tmp_path / "x.json.gz"
    damaged.write_bytes(gzip.compress(b"{}" * 1000)[:20])
    with pytest.raises(ValueError, match="cannot be read"):
        read(damaged)
    with pytest.raises(ValueError, match="nothing was recorded"):
        Trace({"traceEvents": []}).steps()
