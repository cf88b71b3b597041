"""Checks of lesson 14, SLURM and multi-node, with the texts that its exercises are about.

The text of each assertion is a hint.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from labcode.doctor.nccl_log import Communicator, parse
from labcode.minislurm import Cluster, Unavailable
from labcode.slurm.lint.linter import lint
from labcode.slurm.lint.parse import Script
from labcode.slurm.run.client import Client, SlurmError
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Site, load
from labcode.teach.check import Exercise, due
from labcode.teach.labs import l14_nccl_example

EXERCISES = {
    "14.1": Exercise("nothing left for the queue to find"),
    "14.2": Exercise("render, lint and, where there is SLURM, sbatch --test-only agree"),
    "14.3": Exercise("whatever the nodes are called"),
    "14.4": Exercise("the network is what you paid for"),
    "14.5": Exercise("five of five"),
}

# ---- 14.1

BAD = """\
#!/bin/bash
#SBATCH --job-name=my-first
#SBATCH --nodes=2
# SBATCH --gpus-per-node=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=1:30
#SBATCH --output=train.log
cd /home/ada/course
#SBATCH --mem=4G
export MASTER_ADDR=n1
export MASTER_PORT=29500
srun python -m labcode.train gpt_tiny --train.out /tmp/run
echo finished
"""
WANTED = {"nodes": "2", "ntasks-per-node": "2", "gpus-per-node": "2", "mem": "4G"}


def mended(text: str) -> None:
    """The learner's script: no fault left, and still the job that was meant.

    Args:
        text: Of the script.
    """
    text = due(text)
    problems = lint(text, load("local"))
    if problems:
        first = problems[0]
        raise AssertionError(
            f"{len(problems)} left; line {first.line}: {first.rule}: {first.message}"
        )
    script = Script(text)
    for option, value in WANTED.items():
        found = script.value(option)
        assert found == value, (
            "no fault is left, but the job is another one: "
            f"--{option}={value} was meant, it has {found}"
        )
    minutes = script.minutes
    assert minutes is not None and math.isclose(minutes, 90), (
        f"the time limit is {minutes} minutes; meant were 90: H:MM:SS"
    )
    trains = any(command.has(r"labcode\.train gpt_tiny\b") for command in script.sruns)
    assert trains, "no srun starts python -m labcode.train gpt_tiny: the job was meant to train"


# ---- 14.2

ATLAS = {
    "account": "bio42",
    "partition": "gpu",
    "gpus.per_node": 4,
    "gpus.request": "gres",
    "gpus.type": "a100",
    "cpus.per_node": 64,
    "max_minutes": 1440,
    "modules": ("cuda/12.4",),
    "scratch": "$SCRATCH",
}
HINTS = {
    "gpus.request": "the documentation writes --gres: request: gres",
    "gpus.type": "--gres names the type between gpu: and the number",
    "max_minutes": "a day has 24 x 60 minutes",
    "modules": "modules is a list, such as [name/version]",
    "scratch": "a $NAME is looked up by the job",
    "cpus.per_node": "hardware cores of a node, under cpus:",
}
# The nodes of a small SLURM that has the limits of Atlas.
ATLAS_NODES: dict[str, Any] = {
    "nodes": 2,
    "cpus": 64,
    "memory_mb": 100_000,
    "gpus": 4,
    "gpu_type": "a100",
    "accounts": ["bio42"],
    "partitions": {"gpu": {"MaxTime": "1-00:00:00"}},
}
TWO_NODES = Job(
    "gpt_tiny",
    ("--checkpoint.every", "100"),
    nodes=2,
    ranks_per_node=4,
    minutes=60,
    name="atlas",
)


def site_profile(text: str) -> None:
    """The learner's YAML for the made-up cluster Atlas: its values, and whether a script passes.

    Where this machine has SLURM, one that pretends to be Atlas is asked as well.

    Args:
        text: Of the profile.
    """
    site = _loaded(due(text))
    for name, value in ATLAS.items():
        found = _value(site, name)
        hint = HINTS.get(name, "the documentation says it")
        assert found == value, f"{name} is {found!r}, Atlas wants {value!r}: {hint}"
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        interface = site.env.get(name)
        assert interface is not None, (
            f"env has no {name}: the library would take the first interface that it finds"
        )
        assert interface.value == "ib0", (
            f"{name} is {interface.value!r}, the network between the nodes is ib0"
        )
    script = render(TWO_NODES, site)
    problems = lint(script, site, TWO_NODES)
    if problems:
        first = problems[0]
        raise AssertionError(f"the script for a job of 2 nodes: line {first.line}: {first.message}")
    refused = refusal(script)
    assert refused is None, f"a SLURM that pretends to be Atlas refuses the script: {refused}"


def _loaded(text: str) -> Site:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "atlas.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return load(path)
        except ValueError as error:
            raise AssertionError(str(error)) from None


def _value(site: Site, name: str) -> Any:
    """The field of a site by its path, such as "gpus.type"."""
    found: Any = site
    for part in name.split("."):
        found = getattr(found, part)
    return found


def refusal(script: str) -> str | None:
    """Why a SLURM that pretends to be Atlas refuses a script.

    Returns:
        Its message; None if it accepts the script, or where there is no SLURM.
    """
    name = f"lesson12-atlas-{os.getpid()}"
    with contextlib.suppress(Unavailable, RuntimeError), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "atlas.sbatch"
        path.write_text(script, encoding="utf-8")
        with Cluster.up(name=name, **ATLAS_NODES) as cluster:
            try:
                Client.of(cluster).test(path)
            except SlurmError as error:
                return str(error)
    return None


# ---- 14.3

# The line of a training log that names its ranks, and what a learner should read in it.
LOGS = {
    "2 ranks on 2 nodes (n1: 0; n2: 1), gloo on cpu; "
    "grid dp 2 x pp 1 x cp 1 x tp 1; 8 samples a step": {
        "n1": [0],
        "n2": [1],
    },
    "8 ranks on 2 nodes (gpu07: 0, 1, 2, 3; gpu11: 4, 5, 6, 7), nccl on cuda; "
    "grid dp 2 x pp 2 x cp 1 x tp 2": {
        "gpu07": [0, 1, 2, 3],
        "gpu11": [4, 5, 6, 7],
    },
    "4 ranks on 3 nodes (a-1.site: 0; b: 1, 2; c: 3), gloo on cpu; "
    "grid dp 4 x pp 1 x cp 1 x tp 1": {
        "a-1.site": [0],
        "b": [1, 2],
        "c": [3],
    },
}
BEFORE = "starting ...\n"
AFTER = "\nstep 1/80 | loss 4.1744 (nats: 1) | 0.1 s/step\n"


def ranks_by_node(ranks_by_node: Callable[[str], dict[str, list[int]]]) -> None:
    """The learner's reader of the first line of a training log.

    Args:
        ranks_by_node: `ranks_by_node(log)` -> {node: [ranks]}.
    """
    for line, expected in LOGS.items():
        found = due(ranks_by_node(BEFORE + line + AFTER))
        assert isinstance(found, dict), (
            f"{str(found)[:60]}: give a dictionary, node: list of its ranks"
        )
        assert list(found) == list(expected), (
            f"{line[:60]}...: nodes {list(found)}, the line names {list(expected)}"
        )
        for node, ranks in expected.items():
            mine = list(found[node])
            assert all(isinstance(rank, int) for rank in mine), (
                f"ranks of {node} are {mine}: make them whole numbers, int(...)"
            )
            assert mine == ranks, f"{line[:60]}...: ranks {mine} on {node}, the line says {ranks}"


# ---- 14.4


def between(between: Callable[[Communicator], set[str]]) -> None:
    """The learner's reader of a parsed NCCL log.

    Args:
        between: `between(comm)`: the transports of links whose two ranks are on different hosts.
    """
    logs = [
        l14_nccl_example.two_nodes(),
        l14_nccl_example.two_nodes(rdma=False),
        l14_nccl_example.two_nodes(gpus=1),
        _mixed_log(),
    ]
    for text in logs:
        comm = parse(text).main
        expected = comm.transports(between_hosts=True)
        found = due(between(comm))
        assert not isinstance(found, str), (
            f"{found!r}: give a set of transports, there may be several"
        )
        found = set(found)
        inside = found & comm.transports(between_hosts=False) - expected
        assert not inside, (
            f"{inside}: these connect ranks of one host; compare comm.ranks[...].host of both ends"
        )
        assert found == expected, f"{found or 'nothing'}: between the hosts there is {expected}"


def _mixed_log() -> str:
    """Two nodes, of whose two links one fell back to TCP."""
    text = l14_nccl_example.two_nodes(gpus=2)
    for end in ("send", "receive"):
        text = text.replace(
            f"2[0] [{end}] via NET/IB/0/GDRDMA",
            f"2[0] [{end}] via NET/Socket/0",
        )
    return text


# ---- 14.5

SYMPTOMS = {
    "A": "rank 6: RuntimeError: Gloo connectFullMesh failed with timed out connecting: "
    "SO_ERROR: Connection refused, remote=[127.0.1.1]:41877",
    "B": "rank 3: DistNetworkError: The client socket has timed out after 600000ms while trying "
    "to connect to (gpu07, 29500).\n"
    "rank 0: DistStoreError: Timed out after 601 seconds waiting for clients. 1/8 clients joined.",
    "C": "rank 0: what(): op.preamble.length <= op.nbytes. 4194304 vs 3145728. "
    "Received data size doesn't match expected size. "
    "Is there a distributed collective mismatch in your code?",
    "D": "gpu11:71:93 [0] misc/socket.cc NCCL WARN socketStartConnect: "
    "Connect to 172.17.0.1<39741> failed : Connection refused",
    "E": "JOBID  NAME ST NODELIST(REASON)\n"
    "  812 train PD (ReqNodeNotAvail, UnavailableNodes:gpu11)",
}
FAULTS = {"A": "name", "B": "port", "C": "code", "D": "interface", "E": "node"}
ASKS = {
    "A": "whose address is 127.0.1.1, and where does a rank learn its own address?",
    "B": "the name was found and nothing was refused: the packets got no answer at all",
    "C": "the ranks met; they do not agree on how long a tensor is",
    "D": "which interface has the address 172.17.0.1, and is it the one between the nodes?",
    "E": "no rank has started yet: who says no?",
}


def diagnosis(answers: Mapping[str, str]) -> None:
    """The learner's fault for each symptom.

    Args:
        answers: {symptom: fault}.
    """
    answers = due(answers)
    assert set(answers) == set(FAULTS), (
        f"name a fault for each of {', '.join(FAULTS)}; found {', '.join(map(str, answers))}"
    )
    due(*answers.values())
    faults = sorted(FAULTS.values())
    given = {str(fault) for fault in answers.values()}
    unknown = sorted(given.difference(faults))
    assert not unknown, f"{unknown[0]!r} is none of the five: {', '.join(faults)}"
    for symptom, fault in FAULTS.items():
        given_fault = answers[symptom]
        assert given_fault == fault, f"{symptom} is not {given_fault!r}: {ASKS[symptom]}"
