"""check and compare: one line each, never an exception, the same text at each run."""

import pytest

from labcode.teach.check import check, compare, due


def stub(*_):
    raise NotImplementedError("exercise: your code here")


def said(capsys, test, **options):
    check("1.2", test, **options)
    return capsys.readouterr().out


def fail(text):
    raise AssertionError(text)


def test_passes(capsys):
    assert said(capsys, lambda: None) == "[v] 1.2\n"
    assert said(capsys, lambda: None, praise="that is 94 %") == "[v] 1.2 that is 94 %\n"


def test_the_assertion_is_the_hint(capsys):
    assert said(capsys, lambda: fail("got 3, expected 4: count both directions\nlong diff")) == (
        "[x] 1.2 got 3, expected 4: count both directions\n"
    )


def test_an_assertion_without_text_shows_what_does_not_hold(capsys, tmp_path):
    # pytest rewrites the assertions of this module, but not of that one
    file = tmp_path / "exercise.py"
    file.write_text("def test():\n    total = 3\n    assert total == 4\n")
    names = {}
    exec(compile(file.read_text(), str(file), "exec"), names)
    assert said(capsys, names["test"]) == "[x] 1.2 this does not hold: total == 4\n"


def chained():
    try:
        stub()
    except NotImplementedError as error:
        raise RuntimeError("the ring failed") from error


RANK_STUB = "rank 0: NotImplementedError: exercise: your code here"
unfilled = ...
NOT_DONE = {
    "a stub": lambda: stub(),
    "a stub inside another error": chained,
    "a stub on a rank": lambda: (_ for _ in ()).throw(RuntimeError(RANK_STUB)),
    "a name still unset": lambda: fail("never reached") if unfilled else None,
    "an unset value in arithmetic": lambda: 1 + ...,
    "a value that is due": lambda: due(None),
    "an unset result": lambda: ...,
}


@pytest.mark.parametrize("case", NOT_DONE)
def test_not_done_yet(capsys, case):
    assert said(capsys, NOT_DONE[case]) == "[ ] 1.2 not done yet\n"


def test_a_closure_that_is_still_unset(capsys):
    answer = ...
    assert said(capsys, lambda: fail(f"{answer}")) == "[ ] 1.2 not done yet\n"


def test_due_returns_what_was_filled_in():
    assert due(3) == 3
    assert due(0, "b") == (0, "b")
    with pytest.raises(NotImplementedError):
        due(1, ...)


def test_errors_become_one_line(capsys):
    assert said(capsys, lambda: {}["x"]) == "[x] 1.2 KeyError: 'x'\n"
    assert said(capsys, lambda: int("a\nb")).count("\n") == 1
    assert said(capsys, lambda: exec("raise SystemExit(1)")) == "[x] 1.2 SystemExit: 1\n"
    rank_error = RuntimeError("rank 2: AssertionError: the sum is 3, expected 6")
    assert (
        said(capsys, lambda: (_ for _ in ()).throw(rank_error))
        == "[x] 1.2 on rank 2: the sum is 3, expected 6\n"
    )


def test_the_output_has_no_addresses(capsys):
    assert "0x" not in said(capsys, lambda: fail(f"got {object()}"))


def test_the_learners_own_line_is_named(capsys):
    code = compile("def ring(x):\n    y = 1\n    return y / x\n", "/tmp/ipykernel_12/34.py", "exec")
    names = {}
    exec(code, names)
    assert said(capsys, lambda: names["ring"](0)) == (
        "[x] 1.2 ZeroDivisionError: division by zero (line 3 of your cell, in ring)\n"
    )


def test_an_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check("1.2", interrupted)


def test_compare(capsys):
    compare("relative error of dX", 0.71, 0.7071)
    compare("bytes per rank", 3_000_000, 6_000_000, unit="B")
    compare("one step", 0.010, 0.0119, unit="s")
    compare("messages", 6, 6)
    compare("not guessed", ..., 0.25)
    compare("nothing at all", 0, 0)
    compare("something from nothing", 0, 1)
    out = capsys.readouterr().out.splitlines()
    found = " ".join(out[0].split())
    assert found == "relative error of dX predicted 0.71 measured 0.7071 ratio 1.00, within 25%"
    assert "3 MB" in out[1] and "6 MB" in out[1] and "ratio  2.00, NOT within 25%" in out[1]
    assert "10 ms" in out[2] and "11.9 ms" in out[2] and ", within" in out[2]
    assert out[3].count(" 6 ") == 2
    assert "nothing yet" in out[4] and "0.25" in out[4]
    assert ", within" in out[5] and "NOT within" in out[6]
    columns = {line.index("predicted") for line in out} | {line.index("measured") for line in out}
    assert len(columns) == 2  # aligned
