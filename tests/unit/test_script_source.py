"""The file of a learner's script: the names that it knows, and the line in which a rank failed."""

import pytest

from course.answer import Hint
from course.exercises import scripts
from course.exercises.scripts import missing_names
from labcode.runtime import launch

HEADER = "import torch\nfrom somewhere import build_model as make\n"
KNOWN = """
def main(folder):
    import math
    from time import sleep
    scale = 2

    def inner(x):
        return math.pi * x * scale

    with open(folder) as file, torch.no_grad():
        numbers = [inner(line) for line in file]
    try:
        make(numbers)
    except ValueError as error:
        print(error, __name__)
    sleep(0)
"""


def test_names_of_the_header_and_of_the_function_are_known():
    assert missing_names(KNOWN, HEADER) == []


def test_names_that_no_line_defines_are_missing():
    source = KNOWN.replace("sleep(0)", "setup(np.zeros(3))")
    assert missing_names(source, HEADER) == ["np", "setup"]


TRACEBACK = """on rank 1: Traceback (most recent call last):
  File "train.py", line 40, in <module>
    main(Path("."))
  File "train.py", line 12, in main
    dist.all_reduce(loss)
  File "/lib/torch/distributed/distributed_c10d.py", line 9, in all_reduce
    work.wait()
"""
FAILED = {
    "KeyError: 'x'": "on 2 ranks: rank 1 failed after 3.0 s: KeyError: 'x' "
    "(line 12 of train.py, in main: `dist.all_reduce(loss)`)",
    "RuntimeError: [../gloo/transport/unbound_buffer.cc:84] Timed out waiting 30000ms": (
        "on 2 ranks: the ranks wait for each other (line 12 of train.py, in main: "
        "`dist.all_reduce(loss)`): is there a collective that not all of them call?"
    ),
}


@pytest.mark.parametrize("error", FAILED)
def test_a_rank_that_failed_has_the_line_of_the_script(monkeypatch, tmp_path, error):
    def fail(*_, **__):
        failed = launch.LaunchError(f"rank 1 failed after 3.0 s: {error}", 1)
        failed.add_note(TRACEBACK)
        raise failed

    monkeypatch.setattr(launch, "run", fail)
    with pytest.raises(Hint) as told:
        scripts.run("on 2 ranks: ", tmp_path / "train.py", nproc=2)
    assert str(told.value) == FAILED[error]
