"""A script for torchrun on simulated ranks: what they wait for, whether they join, what is kept."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from course.answer import Hint
from course.exercises.rehearsal import rehearse, tell

HEADER = """import os
from pathlib import Path
import torch
import torch.distributed as dist
NUMBER = 1
def main(folder, *args):
    init = dist.init_process_group
"""


@pytest.fixture
def played(tmp_path):
    """`played(body, ...)`: the outcome of a script with this body, and what is told of it."""

    def played(*lines, **names):
        path = tmp_path / "train.py"
        path.write_text(HEADER + "".join(f"    {line}\n" for line in lines))
        outcome = rehearse(path.read_text(), str(path), 2, "more", **names)
        try:
            tell("", path.name, outcome)
        except Hint as hint:
            return outcome, str(hint)
        return outcome, ""

    return played


def test_a_right_script_has_its_own_rank_group_and_folder(played):
    before = Path.cwd(), os.environ.get("RANK")
    outcome, said = played(
        "assert not dist.is_initialized()",
        "init('nccl' if torch.cuda.is_available() else 'gloo')",
        "x = torch.tensor([float(os.environ['RANK'])])",
        "dist.all_reduce(x)",
        "assert x == 1 and os.environ['RANK'] == str(dist.get_rank())",
        "assert dist.get_rank() == dist.get_node_local_rank()",
        "assert os.environ['WORLD_SIZE'] == '2' and NUMBER == 5 and args == ('more',)",
        "(folder / 'weights.pt').write_text('x')",
        "dist.destroy_process_group()",
        "assert not dist.is_initialized()",
        NUMBER=5,
    )
    assert (said, outcome.errors) == ("", {})
    assert (Path.cwd(), os.environ.get("RANK")) == before
    assert not Path("weights.pt").exists() and "WORLD_SIZE" not in os.environ


def test_a_collective_of_one_rank_is_told_with_its_line(played):
    _, said = played("init()", "if dist.get_rank() == 0:", "    dist.all_reduce(torch.ones(3))")
    assert "rank 0 waits in all_reduce of float32 [3] (main, line 10), rank 1 has finished" in said
    assert said.endswith("Is one of these calls inside an `if rank == 0`?")


def test_two_calls_that_do_not_match_are_told(played):
    _, said = played("init()", "dist.all_reduce(torch.ones(3 + dist.get_rank()))")
    assert "rank 0 calls all_reduce of float32 [3]" in said
    assert "rank 1 calls all_reduce of float32 [4]" in said


def test_a_script_that_joins_nobody_is_told(played):
    _, said = played("x = torch.ones(3)")
    assert said.startswith("no rank joins the others: without dist.init_process_group()")


def test_what_is_no_matter_of_ranks_is_left_to_the_real_ones(played):
    outcome, said = played("init()", "raise KeyError('x')")
    assert said == "" and isinstance(outcome.errors[0], KeyError)
    outcome, said = played("dist.all_reduce(torch.ones(3))")
    assert said == "" and isinstance(outcome.errors[0], ValueError)


def test_who_joins_twice_gets_pytorchs_error(played):
    outcome, _ = played("init()", "init()")
    assert "twice" in str(outcome.errors[0])
    assert not dist.is_initialized() and torch.get_default_dtype() == torch.float32
