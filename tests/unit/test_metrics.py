"""The rows of a run: whole after a kill, cut at a resume, and told apart from anything else."""

import contextlib
import json
import os
import sys
import threading

import pytest

from labcode.measure import metrics

ROWS = [{"step": step, "loss": 3.0 - step / 10} for step in range(1, 5)]


def text_of(rows):
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    whole = text_of(ROWS)
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        found = metrics.read(tmp_path)
        assert found == ROWS[: len(found)]
    # after a loss of power a file may end with zeros, or in the middle of a letter
    for end in (b"\0" * 100, b"\xc3", b"3", b"[]"):
        path.write_bytes(whole + end)
        assert metrics.read(path) == ROWS


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[]", "a row of metrics but of type list"),
        (b"3", "a row of metrics but of type int"),
        (b"null", "a row of metrics but of type NoneType"),
        (b'"text"', "a row of metrics but of type str"),
        (b"{}", "a row of metrics, as it has no step"),
        (b'{"loss": 3.0}', "a row of metrics, as it has no step"),
        (b'{"step": "4"}', "a row of metrics, as it has no step"),
        (b'{"step": 4.5}', "a row of metrics, as it has no step"),
        (b'{"step": true}', "a row of metrics, as it has no step"),
        (b'{"step": 3, "loss": "3.0"}', "a row of metrics, as loss is no number"),
        (b'{"step": 3, "loss": null}', "a row of metrics, as loss is no number"),
        (b"\0\0\0", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"9" * 5000, "is not JSON"),
    ],
)
def test_a_line_that_is_no_row_is_named_and_left_as_it_is(tmp_path, line, message):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(text_of(ROWS[:2]) + line + b"\n" + text_of(ROWS[2:]))
    before = path.read_bytes()
    for use in (lambda: metrics.read(path), lambda: metrics.MetricsWriter(tmp_path, after_step=3)):
        with pytest.raises(ValueError, match=r"line 3 is not ") as error:
            use()
        assert message in str(error.value)
        assert "\n" not in str(error.value) and len(str(error.value)) < 400 + len(str(tmp_path))
    assert path.read_bytes() == before


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match=r"metrics\.jsonl is not a file"):
        metrics.MetricsWriter(tmp_path, after_step=3)


def test_a_resumed_run_keeps_the_lines_up_to_its_step_as_they_were(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step":1,  "loss": NaN}\n\n' + text_of(ROWS[1:]) + b'{"step": 5, "lo')
    writer = metrics.MetricsWriter(tmp_path, after_step=2)
    writer.write({"step": 3, "loss": 1.0})
    writer.close()
    assert path.read_bytes() == b'{"step":1,  "loss": NaN}\n' + text_of([ROWS[1]]) + text_of(
        [{"step": 3, "loss": 1.0}]
    )


class Line(bytes):
    """A line that notes how many bytes stand before it when it is appended to them."""

    copied = 0

    def __add__(self, other):
        return Line(bytes(self) + other)

    def __radd__(self, other):
        Line.copied += len(other)
        return other + bytes(self)


def test_what_is_kept_of_many_rows_is_not_copied_again_with_each_of_them(tmp_path, monkeypatch):
    path = tmp_path / metrics.FILE_NAME
    path.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, 101)))
    before = path.read_bytes()
    read = metrics._rows
    monkeypatch.setattr(
        metrics, "_rows", lambda path: ((Line(line), row) for line, row in read(path))
    )
    metrics.RowFile(path, after_step=100).close()
    assert path.read_bytes() == before
    assert Line.copied <= len(before)


def test_a_failed_write_of_tensorboard_is_raised_and_not_printed_too(tmp_path, monkeypatch):
    from tensorboard.summary.writer.event_file_writer import _AsyncWriter
    from tensorboard.summary.writer.record_writer import RecordWriter

    told = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    before = threading.excepthook
    with contextlib.closing(metrics.MetricsWriter(tmp_path)), open("/dev/full", "wb", 0) as full:
        board = _AsyncWriter(RecordWriter(full))
        board.write(b"what has no room")
        board._worker.join()
        with pytest.raises(OSError, match="No space left"):
            board.write(b"what comes after it")
        assert not told
        other = threading.Thread(target=int, args=("no number",))
        other.start()
        other.join()
    assert [failure.exc_type for failure in told] == [ValueError]
    assert threading.excepthook == before


def test_the_last_line_of_a_run_says_where_its_time_went_and_what_share_of_the_peak_it_reached():
    slow = {"step": 10, "step_s": 0.3, "data_s": 0.2, "forward_s": 0.1, "matmul_share": 0.1}
    fast = {"step": 20, "step_s": 0.1, "data_s": 0.0, "forward_s": 0.08, "matmul_share": 0.3}
    rows = [slow, {"step": 15, "val_loss": 3.0}, fast]
    assert metrics.where_time_went(rows) == (
        "200 ms a step: 50% data, 45% forward, 5% other; 15% of the matmul rate"
    )
    on_gpu = [row | {"mfu": 0.4} for row in (slow, fast)]
    assert metrics.where_time_went(on_gpu).endswith("40% of the datasheet's peak (MFU)")
    assert metrics.where_time_went([{"step": 1, "step_s": 1.0}]) == "1 s a step: 100% other"
    assert metrics.where_time_went([{"step": 1, "val_loss": 3.0}]) == ""


def test_on_a_terminal_both_losses_stand_beside_the_full_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    log = metrics.Log(tmp_path, "run", steps=1, steps_done=0)
    with log.bar():
        log.write({"step": 1, "loss": 2.5})
        log.write({"step": 1, "val_loss": 2.75})
        log.advance()
    log.close()
    last = capsys.readouterr().err.splitlines()[-1]
    assert "1/1" in last and "loss=2.500, val_loss=2.750" in last
