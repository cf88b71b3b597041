"""`python -m labcode.doctor hang JOB`: asked from the head node about ranks on two others."""

import re
import sys
from pathlib import Path

import pytest
from submitted import LONG, Submitted, job

from labcode.minislurm import Cluster


@pytest.mark.release
def test_the_ranks_of_a_job_answer_by_its_number(cluster2: Cluster, tmp_path: Path) -> None:
    submitted = Submitted(cluster2, tmp_path, job("asked", LONG, nodes=2, ranks_per_node=1))
    try:
        submitted.until(lambda each: each.steps())
        number = str(submitted.number)
        asks = [sys.executable, "-m", "labcode.doctor", "hang", number, "--apart", "1"]
        done = cluster2.exec(asks, check=False, timeout_s=120)
        unknown = cluster2.exec([*asks[:4], "999999"], check=False, timeout_s=120)
    finally:
        cluster2.exec(["scancel", str(submitted.number)])
        submitted.end()
    assert done.returncode == 0, done.stdout + done.stderr
    first, line = done.stdout.splitlines()[:2]
    assert first == f"{submitted.out}: 2 ranks were asked twice, 1 s apart"
    assert re.match(r"slow or well, not stuck: it moves on, by \d+ steps? in 1 s; now: ", line)
    hosts = set(re.findall(r"\d+ on (\w+)", done.stdout))
    assert len(hosts) == 2, done.stdout
    assert unknown.returncode == 2 and "999999" in unknown.stderr
    assert len(unknown.stderr.splitlines()) == 1
