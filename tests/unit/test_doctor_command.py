"""Mistakes in the doctor's commands: one line, before torch is imported."""

import subprocess
import sys

import pytest

from labcode.doctor import __main__ as doctor

MISTAKES = {
    "hnag": "error: unknown command 'hnag': there are job, nccl; without one it checks this "
    "installation",
    "--job": "error: --job is a command and no option: python -m labcode.doctor job",
    "hang": "error: a run in which nothing moves says after a minute who waits for whom; ",
    "watch": "error: watch is for a loop of your own",
    ".": "error: . is a folder: python -m labcode.doctor job FILE... reads ",
    "hnag" + 300 * "g": "error: unknown command 'hnagggg",
    "no/such/run": "error: no/such/run does not exist: ",
    "job": "error: FILE missing: python -m labcode.doctor job --help says what they are",
    "job --waht x": "error: unknown option --waht: there are --help",
    "--no-rank --ou x y": "error: what is 'y'?",
    "--not-there": "error: unknown option --not-there: there are --help, --out, --no-ranks",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(MISTAKES[words]) and said.err.count("\n") == 1


def test_a_mistake_is_answered_before_torch_is_imported() -> None:
    code = (
        "import sys\n"
        "from labcode.doctor.__main__ import main\n"
        "codes = [main(words.split()) for words in sys.argv[1:]]\n"
        "assert codes == [2] * len(codes), codes\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *MISTAKES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
