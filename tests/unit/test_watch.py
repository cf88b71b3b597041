"""Watching a run: what it shows, that it ends with the run, and that it disturbs nothing."""

import importlib
import json
import re
import subprocess
import sys

import pytest
from faults.forks import start
from faults.waiting import pause

from labcode.run import reference_runs, run_files, run_lock, watch
from labcode.run.run_files import look, newest_run, table, trend

ARGS = ["gpt_tiny", "--model.num_layers=1", "--model.hidden_size=16", "--model.num_heads=2"]
ARGS += ["--model.context_length=32", "--train.global_batch=4", "--train.log_every=1"]
ARGS += ["--train.eval_batches=1", "--train.sample_tokens=0", "--train.out=run"]
ARGS += ["--train.sample_device_s=0.02"]


def write_run(folder, steps=50, done=20, name="gpt_tiny"):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"name": name, "train": {"steps": steps}}))
    rows = []
    for step in range(10, done + 1, 10):
        rows.append({"step": step, "loss": 4.0 - step / 20, "tokens_per_s": 1000.0 * step})
    rows.append({"step": done, "val_loss": 2.5})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sample = {"step": done, "time_s": 1.0, "utilisation": 0.875, "memory_bytes": 2e9}
    (folder / "device.jsonl").write_text(json.dumps(sample) + "\n")
    return folder


# ---- what is seen


def test_a_table_has_the_last_numbers_and_those_of_the_reference_run(tmp_path):
    text = table(look(write_run(tmp_path / "run")))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "run: step 20/50, ended before its last step"
    at_20 = next(row["loss"] for row in reference_runs.rows("gpt_tiny") if row["step"] == 20)
    assert lines[1] == f"loss 3.0000 █▁ reference {at_20:.4f}"
    assert lines[2:] == [
        "validation loss 2.5000 ▁",
        "tokens/s 20,000 ▁█",
        "device busy 88% ▁",
        "memory 2 GB ▁",
    ]


def test_what_it_is_compared_with_can_be_chosen(tmp_path):
    own = write_run(tmp_path / "own", name="mine")
    other = write_run(tmp_path / "other")
    assert look(own).reference_rows == []
    assert look(other, over=None).reference_rows == []
    assert look(own, over="vit_tiny").reference_rows == reference_runs.rows("vit_tiny")
    assert look(own, over=other).reference_rows[0]["loss"] == 3.5


def test_a_run_that_has_just_begun_has_no_numbers_yet(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    (folder / "device.jsonl").unlink()
    assert table(look(folder)) == "run: step 0/50, ended before its last step"


def test_the_state_is_that_of_the_lock_and_of_the_last_step(tmp_path):
    folder = write_run(tmp_path / "run")
    lock = run_lock.RunLock(folder)
    lock.take()
    assert look(folder).state == "running"
    lock.release()
    assert look(folder).state == "ended before its last step"
    assert look(write_run(tmp_path / "whole", done=50)).state == "finished"


@pytest.mark.parametrize(
    "content", [None, "", "[]", '{"name": "x"}', '{"train": {"steps": "many"}}']
)
def test_what_is_no_run_is_refused_in_one_line(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match="is not the folder of a run: ") as caught:
        look(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_newest_run_is_the_one_that_was_written_last(tmp_path):
    with pytest.raises(ValueError, match="no run in"):
        newest_run(tmp_path)
    write_run(tmp_path / "b-001")
    pause(0.02)  # file systems keep the time of a file in steps of some milliseconds
    write_run(tmp_path / "a-001")
    assert newest_run(tmp_path).name == "a-001"


@pytest.mark.parametrize(
    ("values", "bars"),
    [([1.0], "▁"), ([1, 8], "▁█"), ([3, 3, 3], "▁▁▁"), (list(range(8)), "▁▂▃▄▅▆▇█")],
)
def test_a_trend_is_a_row_of_bars(values, bars):
    assert trend(values) == bars
    assert len(trend(range(1000))) == run_files.TREND


# ---- while it runs


def test_it_follows_a_run_and_ends_with_it(tmp_path, capsys):
    with start([*ARGS, "--train.steps=400"], cwd=tmp_path) as running:
        watch.watch(tmp_path / "run", every_s=0.05, wait=True)
        done = running.wait()
    assert done.codes == [0], done.err
    seen = re.findall(r"run: step (\d+)/400, (.*)", capsys.readouterr().out)
    assert seen[-1] == ("400", "finished")
    assert len(seen) > 1 and seen[0][1] == "running"
    steps = [int(step) for step, _ in seen]
    assert steps == sorted(steps)


def test_ctrl_c_ends_the_watching_and_not_the_run(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    lock = run_lock.RunLock(folder)
    lock.take()

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupt)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    watch.watch(folder)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    lock.release()


def test_in_a_notebook_one_figure_replaces_itself(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run")
    lock = run_lock.RunLock(folder)
    lock.take()
    shown = []

    class Handle:
        def update(self, picture):
            shown.append(picture)

    def display(picture, display_id):
        assert display_id
        shown.append(picture)
        return Handle()

    def goes_on(seconds):
        if lock._file is not None:
            lock.release()
            row = {"step": 50, "loss": 1.0}
            with open(folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")

    monkeypatch.setattr(watch, "_in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(watch.time, "sleep", goes_on)
    watch.watch(folder)
    assert [picture.seen.state for picture in shown] == ["running", "finished"]
    bundle = shown[-1]._repr_mimebundle_()
    assert 'alt="run is at step 50 of 50, finished, loss 1.0000, ' in bundle["text/html"]
    assert len(bundle["image/png"]) > 10_000 and "run: step 50/50" in bundle["text/plain"]


def test_the_program_shows_a_run_without_waiting_for_torch(tmp_path):
    write_run(tmp_path / "runs" / "run-001")
    code = "import sys, labcode.run.watch as w; code = w.main(sys.argv[1:]); "
    code += "print('torch' in sys.modules, code)"
    for arguments in ([], ["runs/run-001", "--over", "none"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.splitlines()[0] == "run-001: step 20/50, ended before its last step"
        assert done.stdout.splitlines()[-1] == "False 0", done.stderr


def test_the_program_says_in_one_line_what_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(watch, "BEGINS_WITHIN_S", 0.1)
    assert watch.main([str(tmp_path / "none"), "--wait"]) == 2
    waits, says = capsys.readouterr().err.splitlines()
    assert "does not exist yet: waiting" in waits and says.startswith("error: ")


def test_a_misspelled_run_is_answered_at_once_with_the_nearest_and_those_that_exist(
    tmp_path, monkeypatch, capsys
):
    def waited(seconds):
        raise AssertionError("it waits")

    monkeypatch.setattr(watch.time, "sleep", waited)
    monkeypatch.chdir(tmp_path)
    nothing = (
        "error: runs/nope does not exist: give the folder that a training printed; no run lies"
    )
    assert watch.main(["runs/nope"]) == 2
    assert capsys.readouterr().err.startswith(nothing)
    write_run(tmp_path / "runs" / "gpt_tiny-001")
    write_run(tmp_path / "notebooks" / "runs" / "vit_tiny-001")
    there = {
        "runs/gpt_tiny-01": "runs/gpt_tiny-01 does not exist: did you mean runs/gpt_tiny-001? ",
        "gpt_tiny-001": "gpt_tiny-001 does not exist: did you mean runs/gpt_tiny-001? ",
        "vit_tiny-001": "did you mean notebooks/runs/vit_tiny-001? there are ",
        "runs/nope": "runs/nope does not exist: there are ",
        "runs/" + 300 * "x": "does not exist: there are ",
        "runs": "runs is not the folder of a run: there are ",
    }
    for typed, words in there.items():
        assert watch.main([typed]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line and "runs/gpt_tiny-001" in line
        assert line.endswith("; --wait waits for a run that is about to begin") == (typed != "runs")


@pytest.mark.parametrize(
    "words",
    [
        "labcode.run.export runs/gpt_tiny-01 out",
        "labcode.measure.profile runs/gpt_tiny-01",
        "labcode.run.scaling runs/gpt_tiny-01",
        "labcode.debug.bisect runs/gpt_tiny-01 runs/gpt_tiny-001",
    ],
)
def test_every_command_that_takes_a_run_says_which_one_is_near(
    words, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "runs" / "gpt_tiny-001")
    module, *arguments = words.split()
    assert importlib.import_module(module).main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean runs/gpt_tiny-001?" in line
