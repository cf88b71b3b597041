"""A training on the nodes of a real cluster: the network is cut, a rank is killed."""

import pytest
from faults.chaos.small import disturbed


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_training_whose_network_is_cut_ends_as_the_one_that_nobody_disturbed(
    breakable2, tmp_path
):
    where = [f"--cluster={breakable2.name}", "--faults=2", "--seed=2"]
    found, _ = disturbed([*where, "--kinds", "cut", "kill"], tmp_path)
    assert sorted(outcome.kind for outcome in found.outcomes) == ["cut", "kill"]
    assert found.complaints() == [] and found.rounds_equal == found.rounds >= 1
    assert breakable2.exec(["squeue", "--noheader"]).stdout == ""
