"""From a started process to a rank: who am I, which device, which backend. The one place that reads the environment.

launcher     rank            world size     local rank       local world size        rendezvous
torchrun     RANK            WORLD_SIZE     LOCAL_RANK       LOCAL_WORLD_SIZE        MASTER_ADDR, MASTER_PORT
srun         SLURM_PROCID    SLURM_NTASKS   SLURM_LOCALID    SLURM_NTASKS_PER_NODE   MASTER_ADDR, MASTER_PORT
single       0               1              0                1                       none (a store in memory)
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_NEEDED = TORCHRUN[:2] + TORCHRUN[4:]  # a hand-made launch may leave the local ones out


@dataclass(frozen=True)
class Place:
    """Where a process stands among its peers, before anything is connected.

    Args:
        rank: Global rank, 0 to `world_size` - 1.
        world_size: Number of processes in the job.
        local_rank: Rank within this node.
        local_world_size: Number of processes on this node.
        launcher: "torchrun", "slurm", "single", or "pool" for the engines of `comm.ranks`.
        address: Host and port of the store where the ranks meet; None when no rendezvous over TCP is needed.
        hosts_store: Whether this process opens that store; torchrun's agent may have opened it already.
        attempt: How many times torchrun has restarted the job; each life meets under keys of its own.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launcher: str = "single"
    address: tuple[str, int] | None = None
    hosts_store: bool = False
    attempt: int = 0


@dataclass(frozen=True)
class World:
    """A connected process: its place, the device it computes on and the backend it talks over ("nccl" or "gloo")."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    device: torch.device
    backend: str


def read_environment(env: Mapping[str, str] | None = None) -> Place:
    """This process's place, as torchrun or srun describes it in environment variables; one process if neither does.

    Args:
        env: The variables; None is the process's own environment.

    Raises:
        ValueError: The description is half there, is not a number, or contradicts itself.

    Source: docs.pytorch.org/docs/stable/elastic/run.html (torchrun); slurm.schedmd.com/srun.html (output environment).
    """
    env = os.environ if env is None else env
    if any(name in env for name in TORCHRUN[:4]):
        return _from_torchrun(env)
    if (
        "SLURM_PROCID" in env
        and int(env.get("SLURM_STEP_NUM_TASKS", env.get("SLURM_NTASKS", "1"))) > 1
    ):
        return _from_slurm(env)
    return Place()


def _from_torchrun(env) -> Place:
    missing = [name for name in _NEEDED if not env.get(name)]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in TORCHRUN if name in env)
        raise ValueError(
            f"half-set environment: {found} but no {', '.join(missing)}: start with torchrun, or unset them for one process"
        )
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", default=rank)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=world_size)
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size):
        raise ValueError(
            f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of {local_world_size}: ranks count from 0"
        )
    address = (env["MASTER_ADDR"], _number(env, "MASTER_PORT"))
    hosts_store = rank == 0 and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", default=0)
    return Place(
        rank, world_size, local_rank, local_world_size, "torchrun", address, hosts_store, attempt
    )


def _from_slurm(env) -> Place:
    rank = _number(env, "SLURM_PROCID")
    world_size = _number(
        env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    )
    local_rank = _number(env, "SLURM_LOCALID")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ValueError(
            f"srun started {world_size} tasks but {' and '.join(missing)} are not set: export MASTER_ADDR=$(scontrol show "
            f'hostnames "$SLURM_JOB_NODELIST" | head -n 1) and a free MASTER_PORT before srun'
        )
    # "2(x3)" is two tasks on each of three nodes, "2,1" is an uneven step: this node's own entry counts
    per_node = (
        env.get("SLURM_STEP_TASKS_PER_NODE")
        or env.get("SLURM_TASKS_PER_NODE")
        or env.get("SLURM_NTASKS_PER_NODE", "1")
    )
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node)
        for _ in range(int(times or 1))
    ]
    local_world_size = counts[min(_number(env, "SLURM_NODEID", default=0), len(counts) - 1)]
    address = (env["MASTER_ADDR"], _number(env, "MASTER_PORT"))
    return Place(
        rank, world_size, local_rank, local_world_size, "slurm", address, hosts_store=rank == 0
    )


def _number(env, name, default=None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name}={value!r} is not a whole number: start with torchrun or srun, or unset it"
        ) from None


def device_type() -> str:
    """Where this machine's ranks compute: "cuda" if it has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"


def choose_device(place: Place, share_gpus: bool = False) -> tuple[torch.device, str]:
    """The device of this rank and the backend of the job: a GPU each and NCCL, else the CPU and gloo.

    NCCL refuses two ranks on one GPU, so ranks that share one talk over gloo, which copies through host memory.

    Args:
        share_gpus: Allow more local ranks than GPUs.

    Raises:
        ValueError: More local ranks than GPUs, and sharing not asked for.
    """
    if device_type() == "cpu":
        return torch.device("cpu"), "gloo"
    gpus = torch.cuda.device_count()
    if place.local_world_size <= gpus:
        return torch.device("cuda", place.local_rank), "nccl"
    if share_gpus:
        return torch.device("cuda", place.local_rank % gpus), "gloo"
    raise ValueError(
        f"{place.local_world_size} ranks on this node but {gpus} GPU(s): start {gpus} per node, or share them over gloo "
        f"with --parallel.share_gpus"
    )


def start(
    place: Place | None = None,
    *,
    share_gpus: bool = False,
    timeout_s: float = 600,
    store: dist.Store | None = None,
) -> World:
    """Connect this process with its peers and choose its device; for one process alone a group of size 1.

    Args:
        place: Where this process stands; None reads the environment.
        share_gpus: See `choose_device`.
        timeout_s: How long a collective waits for a missing rank before it raises.
        store: Meeting point to use in place of the address, for processes that share a folder or a parent.

    Raises:
        ValueError: A half-set environment, too few GPUs, or a rendezvous port that another program holds.
        RuntimeError: A process group exists already.
    """
    place = place or read_environment()
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already: call bootstrap.stop() first")
    device, backend = choose_device(place, share_gpus)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif place.local_world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // place.local_world_size))
    timeout = timedelta(seconds=timeout_s)
    store = store if store is not None else _meet(place, timeout)
    # both backends for a GPU job: objects and CPU tensors travel over gloo, CUDA tensors over NCCL
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    bound = {"device_id": device} if backend == "nccl" else {}
    dist.init_process_group(
        backends,
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
        **bound,
    )
    return World(
        place.rank, place.world_size, place.local_rank, place.local_world_size, device, backend
    )


def _meet(place, timeout) -> dist.Store:
    """The key-value store through which the ranks find each other."""
    if place.address is None:
        return dist.HashStore()
    host, port = place.address
    try:
        store = dist.TCPStore(host, port, place.world_size, place.hosts_store, timeout)
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"rank {place.rank} cannot meet the others at {host}:{port}: {_reason(error)}"
        ) from error
    return dist.PrefixStore(f"labcode/attempt_{place.attempt}", store)


def _reason(error) -> str:
    text = str(error)
    if "EADDRINUSE" in text or "address already in use" in text.lower():
        return "the port is in use: set MASTER_PORT to another one"
    return text.splitlines()[0]


def stop() -> None:
    """Leave the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
