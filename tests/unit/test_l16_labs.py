"""Lesson 16: a training that gets only so much memory, and how a choice of settings is judged."""

import json
import math
from dataclasses import asdict, replace

import pytest

from course.labs import l16_limited, l16_plan
from course.labs.l16_by_hand import at_peak
from course.labs.l16_limited import Outcome, Settings, show_log, train_within
from course.labs.l16_memory import list_changes, recorded_step
from labcode.models import gpt, layers
from labcode.perf.training_memory import training_memory

SMALL = l16_plan.CASES[0].model
DEEP = replace(SMALL, num_layers=8)


@pytest.mark.release
@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_training_fits_into_its_predicted_peak_and_not_into_three_quarters_of_it(kind):
    settings = Settings(micro_batch=16, activation_checkpointing=kind)
    predicted = training_memory(
        DEEP, micro_batch=16, activation_checkpointing=kind, data_parallel="none"
    )
    enough = train_within(DEEP, settings, predicted.total)
    assert enough.fits, enough.log
    assert enough.step_ms > 0
    # the process has SPARE_BYTES on top of the room that it is given
    too_little = train_within(DEEP, settings, 0.75 * predicted.total - l16_limited.SPARE_BYTES)
    assert not too_little.fits
    assert too_little.exit_status == 1
    # of a tensor mostly; now and then Python's own allocation is the one too many
    by_torch = "RuntimeError" in too_little.log and "you tried to allocate" in too_little.log
    assert by_torch or "MemoryError" in too_little.log
    assert "step 1:" not in too_little.log


def test_a_system_without_a_limit_trains_and_says_so(monkeypatch, capsys, tmp_path):
    asked = {
        "model": asdict(l16_plan.CASES[0].model),
        "settings": asdict(Settings(1)),
        "room_bytes": 2**20,
        "num_steps": 1,
    }
    monkeypatch.setattr(l16_limited, "STATUS", tmp_path / "status")
    monkeypatch.setattr("sys.argv", ["l16_limited", json.dumps(asked)])
    l16_limited.main()
    log = capsys.readouterr().out
    assert "memory: 1 MiB for tensors, which this system cannot enforce: Linux can" in log
    assert "step 0: loss" in log


@pytest.mark.parametrize(("micro_batch", "count"), [(16, 1), (4, 4)])
def test_a_recorded_step_has_the_peak_of_the_formula(micro_batch, count):
    model = layers.initialize(gpt.GPT(SMALL), 0)
    timeline = recorded_step(model, micro_batch, count)
    predicted = training_memory(
        SMALL, micro_batch=micro_batch, num_micro_batches=count, data_parallel="none"
    )
    assert sum(timeline.peak()[1].values()) == pytest.approx(predicted.total, rel=0.03)
    assert [name for name, _, _ in timeline.parts] == ["forward", "backward"] * count + [
        "optimizer"
    ]


def test_the_list_of_changes_has_the_peak_of_its_timeline():
    model = layers.initialize(gpt.GPT(SMALL), 0)
    timeline = recorded_step(model, 4, 2)
    _, parts = timeline.peak()
    assert at_peak(list_changes(timeline)) == {name: size for name, size in parts.items() if size}


def test_of_a_traceback_the_error_is_shown_and_the_calls_are_folded(monkeypatch):
    shown = []
    monkeypatch.setattr("course.show.say", lambda *both: shown.append(both))
    calls = '  File "a.py", line 1, in <module>\n    run(x<y)\n'
    log = f"step 0\nTraceback (most recent call last):\n{calls}RuntimeError: no room\n"
    show_log(Outcome(log, 1, math.nan))
    ((plain, rich),) = shown
    assert plain == (
        "step 0\nTraceback (most recent call last): 2 lines, not shown here\nRuntimeError: no room"
    )
    inside = rich.partition("<details>")[2].partition("</details>")[0]
    assert "run(x&lt;y)" in inside
    assert "no room" in rich
    assert "no room" not in inside


def test_a_log_without_a_traceback_is_printed(capsys):
    show_log(Outcome("step 0: loss 6.0, 9 ms\n", 0, 9.0))
    assert capsys.readouterr().out == "step 0: loss 6.0, 9 ms\n"


def test_a_training_without_an_end_is_one_line(monkeypatch):
    monkeypatch.setattr(l16_limited, "LIMIT_S", 0.5)
    with pytest.raises(TimeoutError, match=r"took longer than .*: try it with fewer samples"):
        train_within(SMALL, Settings(1), 2**30, num_steps=1_000_000)


@pytest.mark.parametrize("case", l16_plan.CASES, ids=lambda case: case.about)
def test_the_best_settings_fit_and_no_others_that_fit_are_faster(case):
    best = l16_plan.best(case)
    assert l16_plan.peak_bytes(case, best) <= case.room_bytes
    tried = list(l16_plan.candidates(case))
    assert len(tried) == len(set(tried))
    for settings in tried:
        assert settings.micro_batch * settings.num_micro_batches == case.global_batch
        if l16_plan.fits(case, settings):
            assert l16_plan.step_s(case, settings) >= l16_plan.step_s(case, best)


def test_seconds_are_products_at_their_rate_and_one_launch_for_each_micro_batch():
    case = replace(l16_plan.CASES[0], flops_per_s={"float32": 1e9}, launch_s=0.5, global_batch=4)
    tokens = 4 * SMALL.context_length
    whole = 6 * SMALL.num_parameters * tokens / 1e9
    assert l16_plan.step_s(case, Settings(4)) == pytest.approx(whole + 0.5)
    assert l16_plan.step_s(case, Settings(2, 2)) == pytest.approx(whole + 1.0)
    twice = l16_plan.step_s(case, Settings(4, activation_checkpointing="full"))
    assert twice == pytest.approx(4 / 3 * whole + 0.5)


def test_a_room_in_which_nothing_fits_is_one_line():
    case = replace(l16_plan.CASES[0], room_bytes=2**20)
    with pytest.raises(ValueError, match=f"^{case.about}: nothing fits in 1 MiB$"):
        l16_plan.best(case)
