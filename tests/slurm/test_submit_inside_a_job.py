"""A job that submits a job, as a notebook on a cluster does: it runs inside a job of its own.

The new job is as if it came from a login node: nothing of the outer job's memory, cores or binding.
"""

import re
import sys
from pathlib import Path

import pytest

# what a batch script finds set that sbatch and srun of another job would take for options
OUTER = """\
#!/bin/bash
#SBATCH --nodes=1 --ntasks=1 --cpus-per-task=3 --mem-per-cpu=50 --time=5
#SBATCH --output=outer.out --job-name=outer
export SLURM_CPU_BIND=cores SLURM_EXPORT_ENV=ALL SBATCH_TIMELIMIT=1 SBATCH_MEM_PER_CPU=17
export SLURM_NTASKS_PER_NODE=7 PMI_RANK=5 PMIX_RANK=5 SBATCH_QOS=normal
{command}
"""
INNER = """\
#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --time=3 --output=inner.out
env | grep -E '^(SLURM|SBATCH|PMI)' | sort
srun --cpus-per-task=1 sh -c 'echo task $SLURM_PROCID of $SLURM_NTASKS'
"""
OF_THE_OUTER_JOB = (
    "SLURM_MEM_PER_CPU=",
    "SLURM_CPU_BIND=",
    "SLURM_EXPORT_ENV=",
    "SBATCH_TIMELIMIT=",
    "SBATCH_MEM_PER_CPU=",
    "SLURM_NTASKS_PER_NODE=7",
    "PMI_RANK=",
    "PMIX_RANK=",
)


def run_outer(cluster, command):
    """What the outer job's command printed."""
    Path("outer.sh").write_text(OUTER.format(command=command))
    cluster.exec(["sbatch", "--wait", "outer.sh"], timeout_s=120, check=False)
    return Path("outer.out").read_text()


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_that_a_job_submits_sees_nothing_of_that_job(cluster2, here):
    Path("inner.sh").write_text(INNER)
    python = "from labcode.slurm.run.client import Client; from pathlib import Path; "
    python += f"client = Client.find('local', {cluster2.name!r}); "
    python += "print('number', client.submit(Path('inner.sh'), '--wait'))"
    said = run_outer(cluster2, f'srun {sys.executable} -c "{python}"')
    assert re.search(r"^number \d+$", said, re.MULTILINE), said
    inner = Path("inner.out").read_text()
    assert "task 0 of 2" in inner and "task 1 of 2" in inner, inner
    assert "SBATCH_QOS=normal" in inner  # a user's own choice for all jobs
    for text in OF_THE_OUTER_JOB:
        assert f"\n{text}" not in f"\n{inner}", inner


@pytest.mark.release
def test_a_training_that_a_job_submits_runs_on_two_nodes(cluster2, here):
    submit = f"{sys.executable} -m labcode.slurm submit gpt_tiny --site local"
    size = f"--cluster {cluster2.name} --nodes 2 --ranks-per-node 1 --minutes 3 --no-requeue"
    said = run_outer(cluster2, f"srun {submit} {size} --train.steps 3 --train.sample_tokens 0")
    assert "2 ranks on 2 nodes (n1: 0; n2: 1)" in said, said
    assert re.search(r"job \d+ COMPLETED", said), said
