"""What tests wait with, and the ports that they take."""

import subprocess
import sys
from pathlib import Path

import pytest
from faults import waiting

ASK = "from faults import waiting; print(*(waiting.free_port() for _ in range(50)))"


def test_two_processes_are_never_given_the_same_port():
    asking = []
    for _ in range(2):
        asking.append(
            subprocess.Popen(
                [sys.executable, "-c", f"{ASK}; input()"],
                cwd=Path(waiting.__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    given = [int(word) for process in asking for word in process.stdout.readline().split()]
    for process in asking:
        process.communicate("\n")
    assert len(set(given)) == 100
    assert set(given) <= set(waiting.PORTS)


def test_what_does_not_become_true_fails_the_test():
    answers = iter([False, False, True])
    waiting.until(lambda: next(answers), every_s=0)
    assert next(answers, None) is None
    with pytest.raises(AssertionError, match="it did not become true"):
        waiting.until(lambda: False, within_s=0)
