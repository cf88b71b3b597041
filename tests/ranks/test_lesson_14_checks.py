"""The checks of lesson 14 pass right answers, and give plausible wrong ones their own hint."""

import re
from pathlib import Path

import pytest

from labcode.doctor import nccl_log as nccl
from labcode.slurm.lint.linter import lint
from labcode.slurm.script.site import load
from labcode.teach.exercises import l14
from labcode.teach.labs import l14_nccl_example

# ---- 14.1

MENDED = """\
#!/bin/bash
#SBATCH --job-name=my-first
#SBATCH --nodes=2
#SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=1:30:00
#SBATCH --output=%x-%j.log
#SBATCH --mem=4G
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --kill-on-bad-exit=1 python -m labcode.train gpt_tiny --train.out "runs/$SLURM_JOB_ID"
"""
SCRIPTS = {
    "right": (MENDED, None),
    "ninety minutes": (MENDED.replace("1:30:00", "90"), None),
    "nothing done": (l14.BAD, "9 left; line 4: S01"),
    "fixed port": (re.sub(r"PORT=.*", "PORT=29500", MENDED), "S26"),
    "fixed address": (re.sub(r"ADDR=.*", "ADDR=n1", MENDED), "S25"),
    "the time that no rule sees": (
        MENDED.replace("1:30:00", "1:30"),
        "the time limit is 1.5 minutes",
    ),
    "no memory": (MENDED.replace("#SBATCH --mem=4G\n", ""), "--mem=4G was meant"),
    "no GPUs": (MENDED.replace("#SBATCH --gpus-per-node=2\n", ""), "--gpus-per-node=2 was meant"),
    "one node": (MENDED.replace("nodes=2", "nodes=1"), "--nodes=2 was meant"),
    "nothing runs": (
        MENDED.partition("srun")[0] + "srun --kill-on-bad-exit=1 hostname\n",
        "no srun starts",
    ),
}


@pytest.mark.parametrize("answer", SCRIPTS)
def test_a_mended_script(judged, answer):
    script, hint = SCRIPTS[answer]
    assert judged(lambda: l14.mended(script), hint)


def test_the_bad_script_has_the_faults_that_the_lesson_speaks_of():
    assert [problem.rule for problem in lint(l14.BAD, load("local"))] == [
        "S01", "S10", "S20", "S30", "S02", "S25", "S26", "S21", "S33",
    ]  # fmt: skip
    lesson = (
        Path(__file__).resolve().parents[2] / "solutions/14_slurm_and_multi_node.py"
    ).read_text()
    assert "".join(f"# {line}\n" for line in l14.BAD.splitlines()) in lesson


# ---- 14.2

ATLAS = """
account: bio42
partition: gpu
max_minutes: 1440
gpus: {per_node: 4, request: gres, type: a100}
cpus: {per_node: 64}
modules: [cuda/12.4]
scratch: $SCRATCH
env:
  NCCL_SOCKET_IFNAME: {value: ib0, reason: the network}
  GLOO_SOCKET_IFNAME: {value: ib0, reason: the network}
"""
PROFILES = {
    "right": (ATLAS, None),
    "more than asked for": (ATLAS + "about: mine\nlauncher: srun\n", None),
    "unknown field": (ATLAS.replace("partition", "partiton"), "line 3"),
    "hours for minutes": (ATLAS.replace("1440", "24"), "24 x 60"),
    "request forgotten": (ATLAS.replace(" request: gres,", ""), "request: gres"),
    "type forgotten": (ATLAS.replace(", type: a100", ""), "gpus.type is None"),
    "home for scratch": (ATLAS.replace("$SCRATCH", "runs"), "scratch is 'runs'"),
    "other interface": (ATLAS.replace("ib0", "eth0"), "eth0"),
    "gloo forgotten": (ATLAS[: ATLAS.index("  GLOO")], "GLOO_SOCKET_IFNAME"),
    "no account": (ATLAS.replace("account: bio42\n", ""), "account is None"),
    "not YAML": ("gpus: {per_node: 4", "this is not YAML"),
}


@pytest.mark.parametrize("answer", PROFILES)
def test_a_site_in_ten_lines(judged, answer):
    profile, hint = PROFILES[answer]
    assert judged(lambda: l14.site_profile(profile), hint)


# ---- 14.3


def by_regex(log, node=r"([\w.-]+): ([\d, ]+)", end=r"\((.+?)\)", number=int):
    inside = re.search(rf"ranks? on \d+ nodes {end}", log)[1]
    return {
        name: [number(rank) for rank in ranks.split(",")]
        for name, ranks in re.findall(node, inside)
    }


READERS = {
    "right": (by_regex, None),
    "greedy": (lambda log: by_regex(log, end=r"\((.+)\)(?s:.*)"), None),
    "text in place of numbers": (lambda log: by_regex(log, number=str.strip), "whole numbers"),
    "nodes called n only": (lambda log: by_regex(log, node=r"(n\d+): ([\d, ]+)"), "the line names"),
    "a list": (lambda log: ["n1", "n2"], "give a dictionary"),
    "one rank for each node": (
        lambda log: {k: v[:1] for k, v in by_regex(log).items()},
        "the line says",
    ),
}


@pytest.mark.parametrize("answer", READERS)
def test_who_is_where(judged, answer):
    reader, hint = READERS[answer]
    assert judged(lambda: l14.ranks_by_node(reader), hint)


# ---- 14.4


def between(comm, differ=lambda a, b: a != b, kind=set):
    host = {rank: place.host for rank, place in comm.ranks.items()}
    return kind(
        link.transport for link in comm.links if differ(host[link.source], host[link.target])
    )


BETWEEN = {
    "right": (between, None),
    "a list": (lambda comm: between(comm, kind=list), None),
    "inside": (lambda comm: between(comm, differ=lambda a, b: a == b), "connect ranks of one host"),
    "all links": (
        lambda comm: {link.transport for link in comm.links},
        "connect ranks of one host",
    ),
    "a name alone": (lambda comm: "NET/IB", "give a set"),
    "always the same": (lambda comm: {"NET/IB"}, "between the hosts there is"),
    "the first only": (lambda comm: set(sorted(between(comm))[:1]), "between the hosts there is"),
}


@pytest.mark.parametrize("answer", BETWEEN)
def test_transports_between_nodes(judged, answer):
    fn, hint = BETWEEN[answer]
    assert judged(lambda: l14.between(fn), hint)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("rdma", [True, False])
def test_the_example_log_is_a_ring_over_two_nodes(rdma, gpus):
    log = nccl.parse(l14_nccl_example.two_nodes(rdma, gpus))
    comm, size = log.main, 2 * gpus
    assert list(comm.pairs()) == sorted((rank, (rank + 1) % size) for rank in range(size))
    assert all(sum(counts.values()) == 2 for counts in comm.pairs().values())
    assert comm.transports(between_hosts=True) == {"NET/IB" if rdma else "NET/Socket"}
    assert comm.transports(between_hosts=False) == ({"P2P"} if gpus > 1 else set())
    assert set(log.networks.values()) == {"IB" if rdma else "Socket"} and bool(log.nics) == rdma


# ---- 14.5

RIGHT = dict(l14.FAULTS)
DIAGNOSES = {
    "right": (RIGHT, None),
    "another order": (dict(reversed(RIGHT.items())), None),
    "two swapped": (RIGHT | {"A": "interface", "D": "name"}, "A is not 'interface'"),
    "the last wrong": (RIGHT | {"E": "port"}, "who says no"),
    "one forgotten": (
        {letter: fault for letter, fault in RIGHT.items() if letter != "C"},
        "for each of",
    ),
    "a word of one's own": (RIGHT | {"B": "firewall"}, "none of the five"),
}


@pytest.mark.parametrize("answer", DIAGNOSES)
def test_from_symptom_to_cause(judged, answer):
    answers, hint = DIAGNOSES[answer]
    assert judged(lambda: l14.diagnosis(answers), hint)


def test_what_is_missing_is_not_done_yet():
    tests = (
        lambda: l14.mended(...),
        lambda: l14.site_profile(...),
        lambda: l14.ranks_by_node(lambda log: ...),
        lambda: l14.between(lambda comm: ...),
        lambda: l14.diagnosis(RIGHT | {"A": ...}),
    )
    for test in tests:
        with pytest.raises(NotImplementedError):
            test()


def test_a_forgotten_return_is_named():
    """It once counted as not done, and the learner looked for the fault elsewhere."""
    with pytest.raises(AssertionError, match="it returned None"):
        l14.ranks_by_node(lambda log: None)
