"""All rules about batch scripts: those of the head, those of the body, and here those that compare numbers with each other,
with the site and with the job. The table of them: `python -m labcode.slurm lint --rules`."""

import re

from labcode.slurm.lint import rules_commands, rules_directives
from labcode.slurm.lint.rule import Facts, Rule, collector

_COMPARED, rule = collector()
_TWO = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node={}\n"
_OFF = (
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET_DISABLE",
    "CUDA_LAUNCH_BLOCKING",
)
_AXES = ("dp", "pp", "cp", "tp")


@rule(
    "S40",
    "more ranks than GPUs on a node",
    "NCCL refuses two ranks on one GPU",
    _TWO.format(4) + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
    _TWO.format(2) + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
)
def _ranks_over_gpus(script, facts):
    ranks, gpus = script.ranks_per_node, script.gpus_per_node
    if ranks and gpus and ranks > gpus and not script.found(r"--train\.share_gpus\b"):
        yield _where(script, "ntasks-per-node"), f"{ranks} ranks, {gpus} GPUs"


@rule(
    "S41",
    "GPUs that no rank uses",
    "they are paid for and idle: one rank uses one GPU",
    _TWO.format(2) + "#SBATCH --gpus-per-node=4\nsrun -K python train.py\n",
    _TWO.format(4) + "#SBATCH --gpus-per-node=4\nsrun -K python train.py\n",
    warning=True,
)
def _idle_gpus(script, facts):
    ranks, gpus = script.ranks_per_node, script.gpus_per_node
    started = script.torchruns or any(command.has("python") for command in script.sruns)
    if started and ranks and gpus and ranks < gpus:
        yield _where(script, "gpus-per-node", "gres", "gpus"), f"{ranks} ranks, {gpus} GPUs"


@rule(
    "S42",
    "nodes x ranks per node is not what the grid needs",
    "the run ends before its first step: dp * pp * cp * tp must be the number of ranks",
    _TWO.format(2) + "srun -K python -m labcode.train gpt_tiny --parallel.tp 8\n",
    _TWO.format(2) + "srun -K python -m labcode.train gpt_tiny --parallel.tp 2\n",
)
def _grid(script, facts):
    world_size = script.world_size or facts.world_size
    for command in script.found(r"--parallel\.(dp|pp|cp|tp)\b"):
        sizes = {
            axis: re.search(rf"--parallel\.{axis}[= ]['\"]?(\d+)", command.text) for axis in _AXES
        }
        said = {axis: int(size[1]) for axis, size in sizes.items() if size}
        product = 1
        for size in said.values():
            product *= size
        if (
            world_size
            and said
            and (product != world_size if "dp" in said else world_size % max(1, product))
        ):
            yield command.line, f"{'*'.join(said)} = {product}, {world_size} ranks"


@rule(
    "S43",
    "the script starts another number of ranks than the job says",
    "half of the ranks wait for peers that nobody starts",
    _TWO.format(2) + "srun -K python train.py\n",
    _TWO.format(4) + "srun -K python train.py\n",
    facts=Facts(world_size=8),
)
def _world(script, facts):
    if facts.world_size and script.world_size and script.world_size != facts.world_size:
        yield _where(script, "nodes"), f"{script.world_size} ranks, the job says {facts.world_size}"


@rule(
    "S44",
    "NCCL is told its network interface, gloo is not: export GLOO_SOCKET_IFNAME as well",
    "gloo carries all CPU tensors and picks the interface of the host's own name, on Debian 127.0.1.1: the launch fails",
    _TWO.format(1) + "export NCCL_SOCKET_IFNAME=ib0\n",
    _TWO.format(1) + "export NCCL_SOCKET_IFNAME=ib0\nexport GLOO_SOCKET_IFNAME=ib0\n",
    warning=True,
)
def _interfaces(script, facts):
    told = script.found(r"\bNCCL_SOCKET_IFNAME=")
    if script.multi_node and told and not script.found(r"\bGLOO_SOCKET_IFNAME="):
        yield told[0].line, told[0].text


@rule(
    "S45",
    "an interface that does not lead to the other nodes",
    "lo and docker0 end at this node, and a site's nodes know each other on the interface of its profile alone",
    _TWO.format(1) + "export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo\n",
    _TWO.format(1) + "export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0\n",
    facts=Facts(interfaces=("hsn0",)),
)
def _wrong_interface(script, facts):
    for command in script.found(r"_SOCKET_IFNAME=") if script.multi_node else ():
        for name, value in re.findall(r"(\w+_SOCKET_IFNAME)=['\"]?([\w.,^=-]+)", command.text):
            unknown = facts.interfaces and not set(value.lstrip("=").split(",")) <= set(
                facts.interfaces
            )
            if value in ("lo", "docker0") or unknown:
                yield (
                    command.line,
                    f"{name}={value}"
                    + (f", the site has {', '.join(facts.interfaces)}" if unknown else ""),
                )


@rule(
    "S46",
    "a fast path is switched off",
    "left over from a search for a fault, it makes jobs several times slower; a site that needs it says so in its profile",
    _TWO.format(1) + "export NCCL_IB_DISABLE=1\n",
    _TWO.format(1) + "export NCCL_DEBUG=INFO\n",
    warning=True,
)
def _left_over(script, facts):
    for name in (name for name in _OFF if name not in facts.environment):
        for command in script.found(rf"\b{name}=['\"]?1\b"):
            yield command.line, f"{name}=1"


@rule(
    "S47",
    "longer than the site allows",
    "sbatch refuses the job, or it stays pending with PartitionTimeLimit",
    "#!/bin/bash\n#SBATCH --time=2-00:00:00\n",
    "#!/bin/bash\n#SBATCH --time=12:00:00\n",
    facts=Facts(max_minutes=24 * 60),
)
def _wall_time(script, facts):
    if facts.max_minutes and (script.minutes or 0) > facts.max_minutes:
        yield (
            script.option("time").line,
            f"{script.value('time')}, the site's limit is {facts.max_minutes:g} minutes",
        )


@rule(
    "S48",
    "more GPUs than a node of the site has",
    "sbatch refuses the job: Requested node configuration is not available",
    "#!/bin/bash\n#SBATCH --gres=gpu:a100:8\n",
    "#!/bin/bash\n#SBATCH --gres=gpu:a100:4\n",
    facts=Facts(gpus_per_node=4),
)
def _site_gpus(script, facts):
    if facts.gpus_per_node and (script.gpus_per_node or 0) > facts.gpus_per_node:
        yield (
            _where(script, "gpus-per-node", "gres", "gpus-per-task", "gpus"),
            f"{script.gpus_per_node} asked for, a node has {facts.gpus_per_node}",
        )


@rule(
    "S49",
    "more nodes than the site has",
    "sbatch refuses the job, or it waits for ever",
    "#!/bin/bash\n#SBATCH --nodes=16\n",
    "#!/bin/bash\n#SBATCH --nodes=4\n",
    facts=Facts(max_nodes=8),
)
def _site_nodes(script, facts):
    if facts.max_nodes and (script.number("nodes") or 1) > facts.max_nodes:
        yield (
            script.option("nodes").line,
            f"{script.value('nodes')} nodes, the site's limit is {facts.max_nodes}",
        )


@rule(
    "S50",
    "another partition than the site's profile says",
    "limits and GPUs of the profile are those of its own partition; and one that does not exist is refused",
    "#!/bin/bash\n#SBATCH --partition=gpus\n",
    "#!/bin/bash\n#SBATCH --partition=gpu\n",
    facts=Facts(partitions=("gpu", "debug")),
    warning=True,
)
def _site_partition(script, facts):
    asked = [name for name in (script.value("partition") or "").split(",") if name]
    for name in asked if facts.partitions else ():
        if name not in facts.partitions:
            yield (
                script.option("partition").line,
                f"{name}, the profile says {', '.join(facts.partitions)}",
            )


def _where(script, *names):
    """The line of the first of these directives that is there, else the first line."""
    return next((script.option(name).line for name in names if script.option(name)), 1)


RULES: tuple[Rule, ...] = (*rules_directives.RULES, *rules_commands.RULES, *_COMPARED)
