"""The trainings of `benchmarks/on_a_gpu.py` are possible ones: it is run where no test is."""

import itertools
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labcode.runtime import combinations
from labcode.runtime.command import parse

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "on_a_gpu.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        return runpy.run_path(str(SCRIPT))
    finally:
        sys.path.remove(str(SCRIPT.parent))


@pytest.mark.parametrize("small", [False, True])
def test_each_run_is_one_that_the_training_program_takes(script, small, tmp_path):
    runs = [*script["MFU"], *script["MFU_LARGE"], *script["ladder"](), *script["GRAPHS"]]
    runs += script["TRACED"]
    assert len(runs) >= 14
    for run in runs:
        config = parse(script["command"](run, small, tmp_path / "run"))
        assert combinations.check(config, 1).world_size == 1


def test_the_models_have_the_size_that_their_names_say(script):
    sizes = {}
    for run in (*script["MFU"], *script["MFU_LARGE"]):
        config = parse(script["command"](run, False, Path("run")))
        sizes[run.name] = config.model.num_parameters / 1e6
    assert sizes["GPT 124M"] == pytest.approx(124, rel=0.02)
    assert sizes["GPT 1.3B"] == pytest.approx(1300, rel=0.05)


def test_each_rung_adds_to_those_below_it(script):
    rungs = [dict(run.changes) for run in script["ladder"]()]
    for lower, upper in itertools.pairwise(rungs):
        changed = {name for name in upper if upper[name] != lower.get(name)}
        assert len(changed) == 1 and lower.keys() <= upper.keys()


HERE = {"device": "a GPU", "torch": "2.13.0"}


def test_the_next_piece_is_the_first_without_a_result_on_this_device(script):
    next_part = script["next_part"]
    names = list(script["PARTS"])
    done = {name: {"on": HERE, "results": []} for name in names}
    assert next_part({}, HERE) == names[0]
    assert next_part(done, HERE) is None
    assert next_part(done, {**HERE, "torch": "2.14.0"}) == names[0]
    for results in ({"failed": "late"}, {"code": 1, "last_lines": []}, [{"failed": "no word"}]):
        some_failed = {**done, names[2]: {"on": HERE, "results": results}}
        assert next_part(some_failed, HERE) == names[2]
        del some_failed[names[5]]
        assert next_part(some_failed, HERE) == names[5]  # what was not tried comes first
    assert next_part({name: done[name] for name in names[:4]}, HERE) == names[4]


def test_a_trace_that_is_too_large_is_told_and_not_kept(script, tmp_path, monkeypatch):
    keep_traces = script["keep_traces"]
    scope = keep_traces.__globals__
    monkeypatch.setitem(scope, "TRACES", tmp_path / "traces")
    monkeypatch.setattr(scope["torch"].cuda, "is_available", lambda: True)
    run = script["TRACED"][0]
    folder = tmp_path / "run" / "profile"
    folder.mkdir(parents=True)
    assert keep_traces(run, tmp_path / "run") == []
    (folder / "host_0.pt.trace.json.gz").write_bytes(b"x" * 100)
    assert keep_traces(run, tmp_path / "run") == ["gpt_tiny.pt.trace.json.gz"]
    assert (tmp_path / "traces" / "gpt_tiny.pt.trace.json.gz").stat().st_size == 100
    monkeypatch.setitem(scope, "MOST_BYTES", 99)
    assert keep_traces(run, tmp_path / "run") == ["not kept: 100 bytes"]


@pytest.mark.parametrize("name", ["gpt_loss", "fp8_by_tokens"])
def test_the_programs_of_a_piece_run_to_the_end_on_a_cpu(name, tmp_path):
    words = {"gpt_loss": ["--rounds=1"], "fp8_by_tokens": ["--rounds=2", "--features=64"]}[name]
    words += ["--tokens=32"] if name == "fp8_by_tokens" else []
    program = SCRIPT.with_name(f"{name}.py")
    done = subprocess.run(
        [sys.executable, program, *words],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()[2:]]
    assert len(rows) == 3
    if name == "gpt_loss":
        losses = [float(row[-1].rstrip(" |")) for row in rows]
        assert losses == pytest.approx([losses[0]] * 3, rel=1e-3)
    else:
        errors = [float(row[-1].rstrip(" |")) for row in rows]
        assert errors[0] == 0 and 0 < errors[1] == errors[2] < 0.06


def test_a_piece_that_takes_too_long_is_ended_and_the_next_one_runs(script, tmp_path, monkeypatch):
    main = script["main"]
    scope = main.__globals__
    slow = scope["Run"]("slow", "gpt_tiny", {})

    def measure(run, small):
        if run is slow:
            subprocess.run([sys.executable, "-c", "import time; time.sleep(60)"], check=False)
        return {"name": run.name, "step_s": 1.0, "samples_per_s": 1.0, "memory_bytes": 1}

    quick = scope["Run"]("quick", "gpt_tiny", {})
    parts = {"first": scope["measured"]((quick, slow)), "second": scope["measured"]((quick,))}
    monkeypatch.setitem(scope, "measure", measure)
    monkeypatch.setitem(scope, "PARTS", parts)
    monkeypatch.setitem(scope, "LIMIT_S", 1)
    out = tmp_path / "record.json"
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", "--small", "--out", str(out)])
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert main() == 0
    finally:
        signal.signal(signal.SIGALRM, before)
    record = json.loads(out.read_text())
    first = record["first"]["results"]
    assert [row["name"] for row in first] == ["quick", "slow"]
    assert first[1]["failed"] == "took more than 1 s"
    assert [row["name"] for row in record["second"]["results"]] == ["quick"]
