"""The table of runs on more and more ranks."""

import json
import math

import pytest

from labcode.measure import metrics
from labcode.run import scaling


def write_run(folder, *, ranks, batch, samples_per_s, losses, recipe="vit_tiny", rows=3):
    """A run's folder as training leaves it: the first row is slow, and each has a validation."""
    folder.mkdir(parents=True)
    config = {"name": recipe, "train": {"global_batch": batch, "seed": 0}}
    (folder / "config.json").write_text(json.dumps(config))
    lines = []
    for number in range(1, rows + 1):
        rate = samples_per_s / 10 if number == 1 else samples_per_s
        row = {"step": 10 * number, "loss": 1.0, "lr": 1e-3 * number, "step_s": batch / rate}
        row |= {"samples_per_s": rate, "tokens_per_s": 8 * rate}
        row["tokens_per_s_per_rank"] = 8 * rate / ranks
        lines += [row, {"step": 10 * number, "val_loss": losses[number - 1]}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / metrics.FILE_NAME).write_text(text)
    return folder


@pytest.fixture
def folders(tmp_path):
    """One rank and four: four do 3.2 times the samples, and are behind after the same samples."""
    one = write_run(tmp_path / "one", ranks=1, batch=4, samples_per_s=100, losses=[0.5, 0.3, 0.1])
    four = write_run(
        tmp_path / "four", ranks=4, batch=16, samples_per_s=320, losses=[0.6, 0.4, 0.2]
    )
    return [four, one]


def test_a_run_is_read_without_its_slow_first_row(folders):
    run = scaling.read(folders[0])
    assert (run.row.devices, run.row.batch, run.row.steps, run.row.lr) == (4, 16, 30, 3e-3)
    assert run.samples_per_s == 320
    seconds, losses = zip(*run.seconds)
    assert seconds == pytest.approx((0.5, 1.0, 1.5))
    assert losses == (0.6, 0.4, 0.2)


def test_times_are_compared_at_a_loss_that_all_have_reached(folders):
    runs = [scaling.read(folder) for folder in folders]
    assert scaling.common_loss(runs) == 0.2
    assert runs[0].seconds_to(0.2) == pytest.approx(1.5)
    assert runs[1].seconds_to(0.2) == pytest.approx(25 * 4 / 100)  # halfway from step 20 to 30
    assert runs[0].seconds_to(0.1) is None


def test_a_run_without_validation_has_no_loss_to_compare(tmp_path, folders):
    lines = (folders[0] / metrics.FILE_NAME).read_text().splitlines(keepends=True)
    kept = [line for line in lines if "val_loss" not in line]
    (folders[0] / metrics.FILE_NAME).write_text("".join(kept))
    runs = [scaling.read(folder) for folder in folders]
    assert math.isinf(scaling.common_loss(runs))
    assert scaling.table(runs)[2].split()[6:] == ["-", "-", "-"]


def test_the_table_begins_with_the_smallest_run(folders, capsys):
    assert scaling.main([str(folder) for folder in folders]) == 0
    header, one, four = capsys.readouterr().out.splitlines()
    assert "s to 0.2000" in header
    assert one.split() == ["1", "4", "3.00e-03", "30", "100.0", "1.00", "0.1000", "1.0", "1.0"]
    assert four.split() == ["4", "16", "3.00e-03", "30", "320.0", "0.80", "0.2000", "1.5", "6.0"]


def test_the_loss_can_be_named(folders, capsys):
    assert scaling.main([*map(str, folders), "--loss", "0.15"]) == 0
    _, one, four = capsys.readouterr().out.splitlines()
    assert one.split()[-2:] == ["1.1", "1.1"]
    assert four.split()[-2:] == ["-", "-"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere holds no run: there are "),
        (["one", "--loss"], "--loss needs a number"),
        (["one", "--loss", "low"], "--loss needs a number"),
        (["--loss", "0.1"], "name the folders of the runs"),
        (["one", "short"], "short has 1 rows of metrics"),
        (["one", "text"], "these are runs of gpt_tiny and vit_tiny: compare runs of one recipe"),
        (["one", "broken"], "config.json"),
    ],
)
def test_what_cannot_be_compared_is_one_line(folders, words, said, capsys, monkeypatch):
    place = folders[0].parent
    monkeypatch.chdir(place)
    some = {"ranks": 1, "batch": 4, "samples_per_s": 9, "losses": [0.5, 0.3, 0.1]}
    write_run(place / "short", **some, rows=1)
    write_run(place / "text", **some, recipe="gpt_tiny")
    (write_run(place / "broken", **some) / "config.json").write_text('{"name": ')
    assert scaling.main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert said in error


def test_help_is_printed(capsys):
    assert scaling.main(["--help"]) == 0
    assert "usage: python -m labcode.run.scaling RUN RUN" in capsys.readouterr().out
