"""The watch over a job that stands still: real ranks, one of which does not come."""

import re
from pathlib import Path

import pytest

from labcode.runtime import launch

pytestmark = pytest.mark.release

PROGRAM = """
import os
import time

import torch
import torch.distributed as dist

from labcode.runtime import bootstrap
from labcode.doctor.hang import HangWatch

LATE = os.environ["LATE"]


def read_slowly():
    time.sleep(7)


def disagree(rank):
    dist.all_reduce(torch.ones(4 if rank == 2 else 3))


world = bootstrap.start(timeout_s=9)
watch = HangWatch(9)
watch.start()
dist.all_reduce(torch.ones(2))
watch.step(1)
try:
    if LATE == "slow" and world.rank == 1:
        read_slowly()
    if LATE == "other":
        disagree(world.rank)
    dist.all_reduce(torch.ones(5))
    print("went on")
except RuntimeError:
    print(f"report of rank {world.rank}: {watch.report}")
    os._exit(0)
assert LATE == "slow"
watch.stop()
bootstrap.stop()
"""


def lines(folder: Path, late: str) -> list[str]:
    """What three ranks of the program print."""
    (folder / "standstill.py").write_text(PROGRAM)
    done = launch.run(
        "standstill",
        nproc=3,
        echo=False,
        env_extra={"LATE": late, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""},
    )
    return done.output.splitlines()


def test_a_rank_that_is_late_is_named_once_and_the_job_goes_on(tmp_path: Path) -> None:
    found = lines(tmp_path, "slow")
    told = [line for line in found if "hang: " in line]
    assert len(told) == 1, found
    assert re.search(
        r"hang: no progress for 3 s: rank 1 has not come to all_reduce #2 of \[5\]: it is in "
        r"read_slowly \(standstill\.py, line \d+\); "
        r"ranks 0 and 2 wait in all_reduce #2 of \[5\] among ranks 0-2$",
        told[0],
    ), told
    assert sum("went on" in line for line in found) == 3


def test_ranks_that_call_different_things_are_told_apart_and_all_know(tmp_path: Path) -> None:
    found = lines(tmp_path, "other")
    reports = [line for line in found if "report of rank" in line]
    assert len(reports) == 3, found
    for line in reports:
        assert "the ranks disagree: " in line, found
