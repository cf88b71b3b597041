"""A mistake on a command line is one line that says what exists."""

import subprocess
import sys
from pathlib import Path

import pytest

from labcode.runtime.arguments import Parser, UsageError, count, factor, new_file

ROOT = Path(__file__).resolve().parents[2]
# of a command that measures or predicts; neither is needed to read its options
HEAVY = ("torch", "numpy", "matplotlib")


def parser():
    one = Parser(prog="prog")
    commands = one.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run")
    run.add_argument("--steps", type=count, required=True)
    run.add_argument("-s", "--scale", type=factor)
    run.add_argument("--kind", choices=("small", "large"))
    run.add_argument("--whole", type=int)
    run.add_argument("--out", type=new_file)
    return one


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rnu", "unknown command 'rnu': did you mean run? there are run"),
        ("run", "--steps missing: prog run --help says what they are"),
        # a slip of the keyboard is told before what it leaves out
        ("run --stpes 3", "unknown option --stpes: did you mean --steps?"),
        ("run --steps 3 --kind smal", "--kind: unknown value 'smal': did you mean small?"),
        ("run --steps", "--steps: expected one argument"),
        ("run --steps 0", "--steps: '0' is not a whole number above 0"),
        ("run --steps 1e3", "--steps: '1e3' is not a whole number above 0"),
        ("run --steps 3 --whole 1.5", "--whole: '1.5' is not a whole number"),
        ("run --steps 3 --scale nan", "--scale: 'nan' is not a number above 0"),
        ("run --steps 3 more", "what is 'more'? prog run --help says what can be given"),
        ("run --steps 3 -q", "what is '-q'?"),
        ("--stpes 3", "unknown option --stpes: there are --help"),
        ("--run", "--run is a command and no option: prog run"),
        ("--steps 3", "--steps stands behind a command: prog run --steps"),
        ("run --steps 3 --out /nowhere/at/all.png", "--out: there is no folder /nowhere/at"),
        ("run --steps 3 --out /", "--out: '/' is a folder: name a file in it"),
    ],
)
def test_a_mistake_is_one_line(words, message):
    with pytest.raises(UsageError) as error:
        parser().parse_args(words.split())
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_right_words_are_read_as_argparse_reads_them():
    options = parser().parse_args(["run", "--steps=3", "-s", "0.5", "--ki", "large"])
    assert (options.steps, options.scale, options.kind) == (3, 0.5, "large")


@pytest.mark.parametrize("words", [["plan", "--modle", "x"], ["fits", "--help"], ["estimat"]])
def test_the_planner_reads_its_options_before_anything_heavy_is_imported(words):
    told = (
        "import sys\n"
        "from labcode.perf.cli import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        "    pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", told], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
