"""The trainings of `benchmarks/on_a_gpu.py` are possible ones: it is run where no test is."""

import itertools
import runpy
import sys
from pathlib import Path

import pytest

from labcode import combinations
from labcode.command import parse

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
    runs = [*script["MFU"], *script["ladder"](), *script["GRAPHS"]]
    assert len(runs) >= 10
    for run in runs:
        config = parse(script["command"](run, small, tmp_path / "run"))
        assert combinations.check(config, 1).world_size == 1


def test_the_models_have_the_size_that_their_names_say(script):
    sizes = {}
    for run in script["MFU"]:
        config = parse(script["command"](run, False, Path("run")))
        sizes[run.name] = config.model.num_parameters / 1e6
    assert sizes["GPT 124M"] == pytest.approx(124, rel=0.02)
    assert sizes["GPT 1.3B"] == pytest.approx(1300, rel=0.05)


def test_each_rung_adds_to_those_below_it(script):
    rungs = [dict(run.changes) for run in script["ladder"]()]
    for lower, upper in itertools.pairwise(rungs):
        changed = {name for name in upper if upper[name] != lower.get(name)}
        assert len(changed) == 1 and lower.keys() <= upper.keys()
