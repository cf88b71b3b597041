"""All rules about batch scripts: about directives, about commands, and here about numbers.

The last compare numbers with each other, with the site and with the job. The table of all:
`python -m labcode.slurm lint --rules`
"""

import math
import re

from labcode.slurm.lint import rules_commands, rules_directives
from labcode.slurm.lint.parse import Command, Script
from labcode.slurm.lint.rule import Facts, Found, Rule, collector
from labcode.topology import AXES

_COMPARED, rule = collector()
_TWO = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node={}\n"
_OFF = (
    "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
    "NCCL_SHM_DISABLE",
    "NCCL_NET_DISABLE",
    "CUDA_LAUNCH_BLOCKING",
)


@rule(
    "S40",
    "more ranks than GPUs on a node",
    "NCCL refuses two ranks on one GPU",
    _TWO.format(4) + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
    _TWO.format(2) + "#SBATCH --gpus-per-node=2\nsrun -K python train.py\n",
)
def _ranks_over_gpus(script: Script, facts: Facts) -> Found:
    ranks, gpus = script.ranks_per_node, _gpus(script)
    if ranks and gpus and ranks > gpus and not script.found(r"--parallel\.share_gpus\b"):
        yield _where(script, "ntasks-per-node"), f"{ranks} ranks, {gpus} GPUs"


def _gpus(script: Script) -> int | None:
    """GPUs of a node; None where each task asks for its own besides."""
    twice = script.option("gres") or script.option("gpus-per-node")
    return None if script.option("gpus-per-task") and twice else script.gpus_per_node


@rule(
    "S41",
    "GPUs that no rank uses",
    "they are paid for and idle: one rank uses one GPU",
    _TWO.format(2) + "#SBATCH --gpus-per-node=4\nsrun -K python train.py\n",
    _TWO.format(4) + "#SBATCH --gpus-per-node=4\nsrun -K python train.py\n",
    warning=True,
)
def _idle_gpus(script: Script, facts: Facts) -> Found:
    ranks, gpus = script.ranks_per_node, _gpus(script)
    # one process can use several GPUs or start more processes; several of them do not
    several = script.torchruns or (ranks or 1) > 1
    if several and ranks and gpus and ranks < gpus:
        yield _where(script, "gpus-per-node", "gres", "gpus"), f"{ranks} ranks, {gpus} GPUs"


@rule(
    "S42",
    "nodes x ranks per node is not what the grid needs",
    "the run ends before its first step: dp * pp * cp * tp must be the number of ranks",
    _TWO.format(2) + "srun -K python -m labcode.train gpt_tiny --parallel.tp 8\n",
    _TWO.format(2) + "srun -K python -m labcode.train gpt_tiny --parallel.tp 2\n",
)
def _grid(script: Script, facts: Facts) -> Found:
    world_size = script.world_size or facts.world_size
    if not world_size:
        return
    for command in script.found(r"--parallel\.(dp|pp|cp|tp)\b"):
        sizes = _sizes(command)
        product = math.prod(sizes.values())
        # without dp it takes the ranks that are left, so the others have to divide all
        fits = product == world_size if "dp" in sizes else world_size % max(1, product) == 0
        if sizes and not fits:
            yield command.line, f"{'*'.join(sizes)} = {product}, {world_size} ranks"


def _sizes(command: Command) -> dict[str, int]:
    """`{axis: size}` of the axes of the grid that the command names."""
    sizes = {}
    for axis in AXES:
        size = re.search(rf"--parallel\.{axis}[= ]['\"]?(\d+)", command.text)
        if size:
            sizes[axis] = int(size[1])
    return sizes


@rule(
    "S43",
    "the script starts another number of ranks than the job says",
    "half of the ranks wait for peers that nobody starts",
    _TWO.format(2) + "srun -K python train.py\n",
    _TWO.format(4) + "srun -K python train.py\n",
    facts=Facts(world_size=8),
)
def _world(script: Script, facts: Facts) -> Found:
    if facts.world_size and script.world_size and script.world_size != facts.world_size:
        yield _where(script, "nodes"), f"{script.world_size} ranks, the job says {facts.world_size}"


@rule(
    "S44",
    "NCCL is told its network interface, gloo is not: export GLOO_SOCKET_IFNAME as well",
    "gloo carries all CPU tensors and picks the interface of the host's own name, on Debian "
    "127.0.1.1: the launch fails",
    _TWO.format(1) + "export NCCL_SOCKET_IFNAME=ib0\n",
    _TWO.format(1) + "export NCCL_SOCKET_IFNAME=ib0\nexport GLOO_SOCKET_IFNAME=ib0\n",
    warning=True,
)
def _interfaces(script: Script, facts: Facts) -> Found:
    told = script.found(r"\bNCCL_SOCKET_IFNAME=")
    if script.multi_node and told and not script.found(r"\bGLOO_SOCKET_IFNAME="):
        yield told[0].line, told[0].text


@rule(
    "S45",
    "an interface that does not lead to the other nodes",
    "lo and docker0 end at this node, and a site's nodes know each other on the interface of its "
    "profile alone",
    _TWO.format(1) + "export GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo\n",
    _TWO.format(1) + "export GLOO_SOCKET_IFNAME=hsn0 NCCL_SOCKET_IFNAME=hsn0\n",
    facts=Facts(interfaces=("hsn0",)),
)
def _wrong_interface(script: Script, facts: Facts) -> Found:
    if not script.multi_node:
        return
    lead_away = set(facts.interfaces)
    for command in script.found(r"_SOCKET_IFNAME="):
        for name, value in re.findall(r"(\w+_SOCKET_IFNAME)=['\"]?([\w.,^=-]+)", command.text):
            asked = set(value.lstrip("=").split(","))
            if lead_away and not asked <= lead_away:
                has = ", ".join(facts.interfaces)
                yield command.line, f"{name}={value}, the site has {has}"
            elif value in ("lo", "docker0"):
                yield command.line, f"{name}={value}"


@rule(
    "S46",
    "a fast path is switched off",
    "left over from a search for a fault, it makes jobs several times slower; a site that needs "
    "it says so in its profile",
    _TWO.format(1) + "export NCCL_IB_DISABLE=1\n",
    _TWO.format(1) + "export NCCL_DEBUG=INFO\n",
    warning=True,
)
def _left_over(script: Script, facts: Facts) -> Found:
    by_libfabric = re.search(r"\bFI_PROVIDER=|\bFI_EFA", script.text)
    for name in _OFF:
        if name in facts.environment or (name == "NCCL_IB_DISABLE" and by_libfabric):
            continue
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
def _wall_time(script: Script, facts: Facts) -> Found:
    if facts.max_minutes and (script.minutes or 0) > facts.max_minutes:
        limit = f"the site's limit is {facts.max_minutes:g} minutes"
        yield _where(script, "time"), f"{script.value('time')}, {limit}"


@rule(
    "S48",
    "more GPUs than a node of the site has",
    "sbatch refuses the job: Requested node configuration is not available",
    "#!/bin/bash\n#SBATCH --gres=gpu:a100:8\n",
    "#!/bin/bash\n#SBATCH --gres=gpu:a100:4\n",
    facts=Facts(gpus_per_node=4),
)
def _site_gpus(script: Script, facts: Facts) -> Found:
    if facts.gpus_per_node and (script.gpus_per_node or 0) > facts.gpus_per_node:
        line = _where(script, "gpus-per-node", "gres", "gpus-per-task", "gpus")
        yield line, f"{script.gpus_per_node} asked for, a node has {facts.gpus_per_node}"


@rule(
    "S49",
    "more nodes than the site has",
    "sbatch refuses the job, or it waits for ever",
    "#!/bin/bash\n#SBATCH --nodes=16\n",
    "#!/bin/bash\n#SBATCH --nodes=4\n",
    facts=Facts(max_nodes=8),
)
def _site_nodes(script: Script, facts: Facts) -> Found:
    if facts.max_nodes and (script.number("nodes") or 1) > facts.max_nodes:
        limit = f"the site's limit is {facts.max_nodes}"
        yield _where(script, "nodes"), f"{script.value('nodes')} nodes, {limit}"


@rule(
    "S50",
    "another partition than the site's profile says",
    "limits and GPUs of the profile are those of its own partition; and one that does not exist "
    "is refused",
    "#!/bin/bash\n#SBATCH --partition=gpus\n",
    "#!/bin/bash\n#SBATCH --partition=gpu\n",
    facts=Facts(partitions=("gpu", "debug")),
    warning=True,
)
def _site_partition(script: Script, facts: Facts) -> Found:
    if not facts.partitions:
        return
    for name in (script.value("partition") or "").split(","):
        if name and name not in facts.partitions:
            known = ", ".join(facts.partitions)
            yield _where(script, "partition"), f"{name}, the profile says {known}"


def _where(script: Script, *names: str) -> int:
    """The line of the first of these directives that is there, else the first line."""
    for name in names:
        directive = script.option(name)
        if directive:
            return directive.line
    return 1


_ALL = (*rules_directives.RULES, *rules_commands.RULES, *_COMPARED)
RULES: tuple[Rule, ...] = tuple(sorted(_ALL, key=lambda rule: rule.number))
