"""Every profile's script before a real SLURM that looks like its site.

That is, it has the site's partition, GPUs, features, qos and memory.
"""

import re
from dataclasses import replace

import pytest

from labcode.minislurm import Cluster
from labcode.slurm.script.job import Job
from labcode.slurm.script.render import render
from labcode.slurm.script.site import Gpus, Site, load, names

ACCOUNT = "course"


@pytest.fixture(scope="module", params=names())
def emulated(request, slurm, tmp_path_factory):
    """(site, its emulated cluster of two nodes, a folder)."""
    site = load(request.param, account=ACCOUNT)
    gpus = site.gpus.per_node
    memory = int(re.fullmatch(r"(\d+)G", site.memory)[1]) * 1024 if site.memory else 4000
    with Cluster.up(
        nodes=2,
        cpus=site.cpus.per_node or site.cpus_per_rank * max(1, gpus),
        memory_mb=memory,
        gpus=gpus,
        gpu_type=site.gpus.type,
        partitions={site.partition or "main": {"MaxTime": site.max_minutes or "INFINITE"}},
        features=(site.constraint,) if site.constraint else None,
        accounts=(ACCOUNT,),
        qos=(site.qos,) if site.qos else None,
        name=slurm(f"site-{site.name}"),
    ) as cluster:
        yield site, cluster, tmp_path_factory.mktemp("site")


def full(site, **changes):
    """A job that fills two nodes."""
    size = {"nodes": 2, "ranks_per_node": site.gpus.per_node or 2, **changes}
    return Job(
        "gpt_tiny", ("--train.global_batch", str(size["nodes"] * size["ranks_per_node"])), **size
    )


def sbatch_says(cluster, folder, text):
    """What `sbatch --test-only` says: "" for yes, else its complaint."""
    path = folder / "job.sbatch"
    path.write_text(text, encoding="utf-8")
    done = cluster.exec(["sbatch", "--test-only", str(path)], check=False)
    return "" if done.returncode == 0 else done.stderr.strip() or "refused"


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
@pytest.mark.parametrize("requeue", [True, False], ids=["requeue", "once"])
def test_the_script_is_accepted(emulated, launcher, requeue):
    site, cluster, folder = emulated
    assert (
        sbatch_says(
            cluster, folder, render(full(site, requeue=requeue), replace(site, launcher=launcher))
        )
        == ""
    )


def test_a_wrong_script_is_refused(emulated):
    site, cluster, folder = emulated
    one_gpu_more = replace(
        site,
        gpus=replace(site.gpus, per_node=site.gpus.per_node + 1),
        cpus=replace(site.cpus, per_rank=1),
    )
    wrong = {
        "invalid partition specified": render(full(site), replace(site, partition="nowhere")),
        "Invalid account": render(full(site), replace(site, account="nobody")),
        "Invalid feature specification": render(full(site), replace(site, constraint="h900")),
        "More processors requested than permitted|Node count": render(
            full(site, nodes=4), replace(site, max_nodes=None)
        ),
        "Requested node configuration": render(full(one_gpu_more), one_gpu_more),
    }
    if site.qos:
        wrong["Invalid qos"] = render(full(site), replace(site, qos="nothing"))
    if site.gpus.type is None:
        other = replace(site, gpus=replace(site.gpus, type="h900"))
        wrong["Invalid generic resource|Requested node configuration"] = render(full(other), other)
    if site.max_minutes:
        wrong["Requested time limit is invalid"] = render(
            full(site, minutes=site.max_minutes + 1), replace(site, max_minutes=None)
        )
    said = {message: sbatch_says(cluster, folder, text) for message, text in wrong.items()}
    assert {message: text for message, text in said.items() if not re.search(message, text)} == {}


@pytest.fixture(scope="module")
def shown(cluster2, tmp_path_factory):
    """`shown(job, site)`: what SLURM has understood, as {field: value}; the job never runs."""
    folder = tmp_path_factory.mktemp("shown")

    def ask(job, site):
        path = folder / "job.sbatch"
        path.write_text(render(job, site), encoding="utf-8")
        number = cluster2.exec(["sbatch", "--hold", "--parsable", str(path)]).stdout.strip()
        try:
            lines = cluster2.exec(["scontrol", "show", "job", number]).stdout.splitlines()
        finally:
            cluster2.exec(["scancel", number])
        # the name may hold anything, and is alone with the number
        first = dict([lines[0].split(" ", 1)[1].split("=", 1)])
        whole = {
            key: value
            for line in lines
            for key, value in [line.strip().partition("=")[::2]]
            if key in ("StdOut", "Command")
        }
        return (
            dict(re.findall(r"(\S+?)=(\S*)", " ".join(lines[1:])))
            | first
            | whole
            | {"JobId": number}
        )

    return ask


@pytest.mark.parametrize(
    "name",
    [
        "a b",
        "it's",
        'say "hi"',
        "back\\slash",
        "a\\",
        "hash # tag",
        "#x",
        "$(touch owned)",
        "`id`",
        "; ls",
        "ünï✓",
        "%x",
        "-n",
    ],
)
def test_a_name_arrives_as_it_was_given(shown, name):
    assert shown(Job("gpt_tiny", name=name), Site())["JobName"] == name


def test_slurm_understands_what_the_job_asks_for(shown):
    job = Job("gpt_tiny", nodes=2, minutes=90, dependency="after:1", name="n")
    found = shown(job, Site(gpus=Gpus(2), logs="some where"))
    asked = {
        name: found[name]
        for name in ("NumNodes", "TimeLimit", "Requeue", "CPUs/Task", "TresPerNode")
    }
    assert asked == {
        "NumNodes": "2-2",
        "TimeLimit": "01:30:00",
        "Requeue": "1",
        "CPUs/Task": "2",
        "TresPerNode": "gres:gpu:2",
    }
    assert found["StdOut"].endswith(f"/some where/n-{found['JobId']}.log")
    assert shown(Job("gpt_tiny", requeue=False), Site())["Requeue"] == "0"
