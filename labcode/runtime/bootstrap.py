"""From a started process to a rank: who am I, which device, which backend.

This is the one place that reads the environment.

    launcher  rank          world size            local rank     local world size           meet at
    torchrun  RANK          WORLD_SIZE            LOCAL_RANK     LOCAL_WORLD_SIZE           MASTER_*
    srun      SLURM_PROCID  SLURM_STEP_NUM_TASKS  SLURM_LOCALID  SLURM_STEP_TASKS_PER_NODE  MASTER_*
    single    0             1                     0              1                          nowhere

MASTER_* are MASTER_ADDR and MASTER_PORT. How the ranks meet there is in `meeting`. They wait for
each other for LABCODE_MEET_TIMEOUT_S. A single process keeps its store in its own memory.
"""

import contextlib
import json
import os
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from labcode.runtime.agreement import SharedError
from labcode.runtime.files import write_atomically
from labcode.runtime.hardware import usable_cores
from labcode.runtime.meeting import MeetingError, Patience, meet, store_of_agent
from labcode.runtime.place import Place

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# without the local ones, which a hand-made launch may leave out
_REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# SLURM numbers real steps from 0; the batch script and the like have reserved numbers from here on
_RESERVED_STEPS = 0xFFFFFFF0
_MAX_RANKS = 2**20
_CPU = "cpu"
_REFUSED = re.compile(r"Connection refused, remote=\[[^\]]*\](:\d+)?")  # of gloo
# How long ranks wait for each other, unless LABCODE_MEET_TIMEOUT_S says so.
MEET_BY_HAND_S = 45.0
MEET_LAUNCHED_S = 300.0
_LEAVE_TIMEOUT_S = 15.0  # how long to wait for ranks that still import torch
RECORDED_COLLECTIVES = "2000"  # of each rank, by torch's flight recorder
_EXIT_S = 0.5  # how long a process with torch needs to end


class DeviceError(SharedError, ValueError):
    """The ranks cannot compute on the devices that they have; they compared them, and all know."""


@dataclass(frozen=True)
class World:
    """A connected process.

    Args:
        place: Where it stands among its peers.
        device: What it computes on.
        backend: What it communicates over, "nccl" or "gloo".
    """

    place: Place
    device: torch.device
    backend: str

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def world_size(self) -> int:
        return self.place.world_size

    @property
    def local_rank(self) -> int:
        return self.place.local_rank


# ---- who am I


def read_environment(env: Mapping[str, str] | None = None) -> Place:
    """This process's place, as torchrun or srun describes it; a single process if neither does.

    Args:
        env: The environment variables; None is the process's own environment.

    Raises:
        ValueError: The description is incomplete, is not a number, or contradicts itself.

    Source: docs.pytorch.org/docs/stable/elastic/run.html (torchrun);
        slurm.schedmd.com/srun.html (output environment variables).
    """
    if env is None:
        env = os.environ
    _check_threads(env)
    # torchrun first: it may itself have been started by srun, once a node, and its ranks then have
    # the variables of both.
    if any(name in env for name in TORCHRUN[:4]):
        return _from_torchrun(env)
    if _num_step_tasks(env) > 1:
        return _from_slurm(env)
    return Place()


def _from_torchrun(env: Mapping[str, str]) -> Place:
    missing = [name for name in _REQUIRED if not env.get(name)]
    if missing:
        found = ", ".join(f"{name}={env[name]}" for name in TORCHRUN if name in env)
        raise ValueError(
            f"half-set environment: {found} but no {', '.join(missing)}: "
            "start with torchrun, or unset them for one process"
        )
    rank = _number(env, "RANK")
    world_size = _number(env, "WORLD_SIZE")
    local_rank = _number(env, "LOCAL_RANK", default=rank)
    local_world_size = _number(env, "LOCAL_WORLD_SIZE", default=world_size)
    _check_ranks(("RANK", rank), ("WORLD_SIZE", world_size))
    _check_ranks(("LOCAL_RANK", local_rank), ("LOCAL_WORLD_SIZE", local_world_size))
    if local_world_size > world_size:
        raise ValueError(
            f"LOCAL_WORLD_SIZE={local_world_size} of WORLD_SIZE={world_size}: a node has no more "
            "ranks than the job; start with torchrun, or unset LOCAL_WORLD_SIZE"
        )
    agent_has_store = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run_id = env.get("TORCHELASTIC_RUN_ID")
    return Place(
        rank,
        world_size,
        local_rank,
        local_world_size,
        launcher="torchrun",
        address=_address(env),
        hosts_store=rank == 0 and not agent_has_store,
        attempt=_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        has_agent=run_id is not None,
        job=f"torchrun's job {run_id}" if run_id else "",
    )


def _num_step_tasks(env: Mapping[str, str]) -> int:
    """How many tasks the srun that started this process has; 1 if no srun did.

    SLURM_PROCID and SLURM_NTASKS tell nothing: a batch script has both, of the whole job, and a
    program that it starts without srun would wait for ranks that nobody has started. Only a step
    has variables of the step.
    """
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    if "SLURM_STEP_NUM_TASKS" in env:
        name = "SLURM_STEP_NUM_TASKS"
    elif step.isdecimal() and int(step) < _RESERVED_STEPS:
        name = "SLURM_NTASKS"
    else:
        return 1
    num_tasks = _number(env, name, default=1)
    if num_tasks < 1:
        raise ValueError(f"{name}={num_tasks}: a step has 1 task or more; start with srun")
    return num_tasks


def _from_slurm(env: Mapping[str, str]) -> Place:
    world_size = _num_step_tasks(env)
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing:
        raise ValueError(
            f"srun started {world_size} tasks but {' and '.join(missing)} are not set: "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
            "and a free MASTER_PORT before srun"
        )
    rank = _number(env, "SLURM_PROCID")
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    _check_ranks(("SLURM_PROCID", rank), (tasks, world_size))
    local_rank = _number(env, "SLURM_LOCALID")
    _check_ranks(("SLURM_LOCALID", local_rank), (tasks, world_size))
    return Place(
        rank,
        world_size,
        local_rank,
        local_world_size=_tasks_on_this_node(env, world_size),
        launcher="slurm",
        address=_address(env),
        hosts_store=rank == 0,
        job=_slurm_job(env),
    )


def _slurm_job(env: Mapping[str, str]) -> str:
    """What SLURM calls this step; "" if it has no number."""
    number = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID")
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID", ""))
    return f"SLURM's job {number}.{step}" if number else ""


def _tasks_on_this_node(env: Mapping[str, str], world_size: int) -> int:
    """This node's entry of a list such as "2(x3),1": two tasks on each of three nodes, one on a
    fourth.
    """
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE")
    name = next((name for name in names if env.get(name)), "")
    if not name:
        return world_size
    node = _number(env, "SLURM_NODEID", default=0)
    if node < 0:
        raise ValueError(f"SLURM_NODEID={node}: nodes count from 0; unset it, or start with srun")
    count = 0
    nodes = 0
    for part in env[name].split(","):
        entry = re.fullmatch(r"(\d{1,7})(?:\(x(\d{1,7})\))?", part.strip(), re.ASCII)
        if entry is None:
            raise ValueError(
                f"{name}={env[name]!r} is no list of tasks such as 2(x3),1: "
                "unset it, or start with srun"
            )
        count = int(entry[1])
        nodes += int(entry[2] or 1)
        if node < nodes:
            break
    return count


def _check_ranks(rank: tuple[str, int], size: tuple[str, int]) -> None:
    """Check that a rank is below the number of ranks; each comes with the name of its variable."""
    name, number = rank
    if not 0 <= number < size[1]:
        raise ValueError(
            f"{name}={number} of {size[0]}={size[1]}: ranks count from 0; "
            "start with torchrun or srun"
        )
    if size[1] > _MAX_RANKS:
        raise ValueError(f"{size[0]}={size[1]}: no job has more than {_MAX_RANKS} ranks")


def _address(env: Mapping[str, str]) -> tuple[str, int]:
    port = _number(env, "MASTER_PORT")
    if not 1 <= port <= 65535:
        raise ValueError(f"MASTER_PORT={port}: set it to a free port, a number from 1 to 65535")
    return env["MASTER_ADDR"], port


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = env.get(name)
    if value is None and default is not None:
        return default
    # int() would take "1_0" too, and other scripts' digits
    if value is None or not re.fullmatch(r"\s*[+-]?\d{1,18}\s*", value, re.ASCII):
        raise ValueError(
            f"{name}={value!r} is not a whole number: start with torchrun or srun, or unset it"
        )
    return int(value)


def _check_threads(env: Mapping[str, str]) -> None:
    """OMP_NUM_THREADS is a number, or one for each nesting level; OpenMP would ignore the rest."""
    threads = env.get("OMP_NUM_THREADS", "")
    if threads and not re.fullmatch(r"\s*0*[1-9]\d{0,8}\s*(,\s*\d{1,9}\s*)*", threads, re.ASCII):
        raise ValueError(
            f"OMP_NUM_THREADS={threads!r} is no number of threads: set it to 1 or more, or unset it"
        )


def _check_interfaces(env: Mapping[str, str]) -> None:
    """The network interfaces that gloo is to use exist; its own error does not name them."""
    wanted = env.get("GLOO_SOCKET_IFNAME", "")
    existing = [name for _, name in socket.if_nameindex()]
    missing = [name for name in wanted.split(",") if name not in existing]
    if wanted and missing:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME={wanted}: {socket.gethostname()} has no interface {missing[0]!r}, "
            f"but {', '.join(existing)}: set it to one of these, or unset it"
        )


def _patience(place: Place, env: Mapping[str, str]) -> Patience:
    """How long this rank waits for the others.

    An agent or srun starts ranks on machines that may take minutes to load a container, and who
    gives up there loses its place in a queue. By hand, the ranks are typed into two terminals.
    """
    chosen = env.get("LABCODE_MEET_TIMEOUT_S")
    if not chosen:
        by_hand = place.launcher == "torchrun" and not place.has_agent
        return Patience(place, MEET_BY_HAND_S if by_hand else MEET_LAUNCHED_S)
    if not re.fullmatch(r"\d{1,9}(\.\d*)?", chosen, re.ASCII) or not float(chosen):
        raise ValueError(
            f"LABCODE_MEET_TIMEOUT_S={chosen!r} is no time: set it to seconds, such as 600"
        )
    return Patience(place, float(chosen), hopeless_s=float(chosen))


def job_id() -> str:
    """The number of the SLURM job that this process belongs to; "" outside a job."""
    return os.environ.get("SLURM_JOB_ID", "")


# ---- which device, which backend


def device_type() -> str:
    """Where this machine's ranks compute: "cuda" if it has a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() else "cpu"


def choose_device(place: Place) -> torch.device:
    """The device of this rank: one of the GPUs that it sees, else the CPU.

    Ranks that see all GPUs of their node take one each. With `srun --gpus-per-task=1` each rank
    sees one GPU, its own, and has to take number 0. The same rule serves both, and also ranks that
    outnumber the GPUs: whether two ranks have taken the same GPU is known only when they compare
    (`choose_backend`).
    """
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def choose_backend(devices: Sequence[str], share_gpus: bool = False) -> str:
    """The backend of a job: NCCL where each rank has a GPU of its own, else gloo.

    NCCL refuses two ranks on one GPU. Ranks that share one use gloo, which copies through host
    memory.

    Args:
        devices: The device of each rank, as `describe` says.
        share_gpus: Allow several ranks on one GPU.

    Raises:
        DeviceError: Several ranks on one GPU, and sharing was not asked for; or a rank without a
            GPU beside ranks with one.
    Held by: tests/unit/test_bootstrap.py::test_the_backend_follows_from_who_sits_on_which_gpu
    """
    # {device: ranks}; every rank works this out from the same list, so all choose alike
    ranks_on: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks_on.setdefault(device, []).append(rank)
    without_gpu = [rank for rank, device in enumerate(devices) if _uuid(device) == _CPU]
    num_with_gpu = len(devices) - len(without_gpu)
    if num_with_gpu == 0:
        return "gloo"
    if without_gpu:
        rank = without_gpu[0]
        raise DeviceError(
            f"rank {rank} on node {_node(devices[rank])} sees no GPU but {num_with_gpu} of "
            f"{len(devices)} ranks do: look at nvidia-smi and CUDA_VISIBLE_DEVICES there"
        )
    crowded = [device for device, ranks in ranks_on.items() if len(ranks) > 1]
    if not crowded:
        return "nccl"
    if share_gpus:
        return "gloo"
    node = _node(crowded[0])
    num_ranks = sum(_node(device) == node for device in devices)
    num_gpus = sum(_node(device) == node for device in ranks_on)
    raise DeviceError(
        f"{num_ranks} ranks on node {node} but {num_gpus} GPU(s): start {num_gpus} per node, "
        "or share them over gloo with --parallel.share_gpus"
    )


def describe(device: torch.device) -> str:
    """A device so that ranks can compare it: node and UUID, "n1 GPU-4e2f...", or "n1 cpu".

    The number of a GPU does not tell: what is 0 in this process may be 3 in another one.
    """
    uuid = _CPU
    if device.type == "cuda":
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{socket.gethostname()} {uuid}"


def _node(device: str) -> str:
    return device.split()[0]


def _uuid(device: str) -> str:
    return device.split()[1]


def exchange_devices(place: Place, device: torch.device, store: dist.Store) -> list[str]:
    """The devices of all ranks, as `describe` says.

    They travel over the store, because the backend must be known before the group is made. One
    request fetches them all: some 40 bytes a rank.
    """
    store.set(f"device/{place.rank}", describe(device))
    keys = [f"device/{rank}" for rank in range(place.world_size)]
    return [value.decode() for value in store.multi_get(keys)]


# ---- connected


def start(
    place: Place | None = None,
    *,
    share_gpus: bool = False,
    timeout_s: float = 600,
    store: dist.Store | None = None,
) -> World:
    """Connect this process with its peers and choose its device; a single process gets a group of
    size 1.

    Args:
        place: Where this process stands; None reads the environment.
        share_gpus: Allow several ranks on one GPU.
        timeout_s: How long a collective waits for a missing rank before it raises. How long the
            ranks wait for each other at first is LABCODE_MEET_TIMEOUT_S.
        store: Meeting point to use in place of the address, for processes that share a folder or a
            parent.

    Raises:
        DeviceError: Several ranks on one GPU, or a rank without one; on all ranks.
        ValueError: An incomplete environment, or ranks that do not find each other
            (`meeting.MeetingError`).
        RuntimeError: A process group exists already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group already: call bootstrap.stop() first")
    if place is None:
        place = read_environment()
    _check_interfaces(os.environ)
    device = choose_device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if store is None and place.address is None:
        store = dist.HashStore()
    elif store is None:
        store = meet(place, _patience(place, os.environ), timeout_s)
    timeout = timedelta(seconds=timeout_s)
    backend = choose_backend(exchange_devices(place, device, store), share_gpus)
    _share_cores(place, device, store)
    _record_collectives()
    _init_process_group(place, device, backend, store, timeout)
    return World(place, device, backend)


def _share_cores(place: Place, device: torch.device, store: dist.Store) -> None:
    """Give a rank on the CPU its share of the cores of its node, as threads.

    torchrun sets OMP_NUM_THREADS, srun does not. Which cores each rank may run on, as srun or
    taskset has bound it, is known when they compare.
    """
    # one bit a core; two ranks share cores if their masks have a bit in common
    mask = sum(1 << core for core in usable_cores())
    store.set(f"cores/{place.rank}", f"{socket.gethostname()} {mask:x}")
    if place.world_size == 1 or device.type == "cuda" or os.environ.get("OMP_NUM_THREADS"):
        return
    keys = [f"cores/{rank}" for rank in range(place.world_size)]
    cores = [value.decode() for value in store.multi_get(keys)]
    torch.set_num_threads(num_threads(cores, place.rank))


def num_threads(cores: Sequence[str], rank: int) -> int:
    """How many threads a rank computes with: its cores, divided by the ranks that may run on them.

    Args:
        cores: For each rank its node, and its cores as the bits of a hexadecimal number: "n1 ff".
        rank: The rank in question.
    """
    node, mask = cores[rank].split()
    own = int(mask, 16)
    sharing = 0
    for described in cores:
        other_node, other_mask = described.split()
        if other_node == node and own & int(other_mask, 16):
            sharing += 1
    return max(1, own.bit_count() // sharing)


def _record_collectives() -> None:
    """Switch on torch's flight recorder, from which `doctor.standing` knows who waits in what.

    Torch reads its size when the first group is made; some versions record nothing by default.
    TORCH_NCCL_TRACE_BUFFER_SIZE is what it was called before 2.9.
    """
    if not os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"):
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED_COLLECTIVES)


def _init_process_group(
    place: Place, device: torch.device, backend: str, store: dist.Store, timeout: timedelta
) -> None:
    # both backends for a GPU job: objects and CPU tensors travel over gloo, CUDA tensors over NCCL
    backends = "cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo"
    try:
        dist.init_process_group(
            backends,
            store=store,
            rank=place.rank,
            world_size=place.world_size,
            timeout=timeout,
            # with a device NCCL connects now, and each later group when it is made, not at the
            # first collective: a fault shows up here, and send/recv of a few ranks is allowed
            device_id=device if backend == "nccl" else None,
        )
    except RuntimeError as error:
        # the address that a rank has given leads elsewhere: the rank itself is not lost
        refused = _REFUSED.search(str(error))
        if is_lost_peer(error) and not refused:
            raise MeetingError(lost_peer_message(error)) from None
        reason = refused.group() if refused else str(error).splitlines()[0]
        raise MeetingError(
            f"{backend} could not connect the ranks: {reason}; look at the network interfaces, "
            "and at GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from None


def pretend(rank: int, world_size: int) -> None:
    """Make this process one rank of a job of which no other rank exists: nothing is ever sent.

    For dry runs, which need groups of any size; `stop` ends it.

    Args:
        rank: The rank that this process plays.
        world_size: The number of ranks of the job.

    Raises:
        RuntimeError: A process group exists already.

    Held by: tests/ranks/test_dry_run.py
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("this process has a process group already: call bootstrap.stop() first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def hand_to_agent(line: str) -> None:
    """Let torchrun, if it has started this rank, say why the rank fails in its own last words.

    Source: docs.pytorch.org/docs/stable/elastic/errors.html (the file of an error); the fields are
        those that `ProcessFailure` of torch 2.13 reads.
    Held by: tests/unit/test_failure.py::test_the_line_is_handed_to_torchrun_which_repeats_it
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            write_atomically(Path(path), json.dumps({"message": message}).encode())


def leave_together(place: Place, code: int) -> int:
    """The exit code of this rank, where all ranks are about to end with the same error.

    torchrun prints eight lines about each process that fails and nine about each that it has to
    end, so that an error that every rank finds fills the screen: 99 lines from 8 ranks. Here one
    rank of each node fails, so that its torchrun notices; it waits until the others have gone with
    code 0. That leaves the 35 lines that torchrun prints about a single failure.

    Args:
        place: Where this process stands.
        code: The exit code of the job.
    """
    if not place.has_agent or place.world_size == 1:
        return code
    with contextlib.suppress(ValueError, RuntimeError):  # a rank that never comes, or has gone
        _wait_until_all_have_come(place)
    if place.local_rank > 0:
        return 0
    time.sleep(_EXIT_S)
    return code


def _wait_until_all_have_come(place: Place) -> None:
    if dist.is_initialized():
        dist.barrier()
        return
    store = store_of_agent(place, _LEAVE_TIMEOUT_S)
    if store.add("leaving", 1) == place.world_size:
        store.set("all leave", "")
    store.wait(["all leave"], timedelta(seconds=_LEAVE_TIMEOUT_S))


# ---- a peer that is gone

# What gloo, NCCL and the store of torch 2.13 say when the other end of a connection is gone. NCCL
# says so of a peer that died; one that only hangs is found by the time-outs below.
_GONE = re.compile(
    r"connection (was likely )?(closed|reset|refused)|broken pipe|transport endpoint is not connec"
    r"|ncclRemoteError|remote process exited|communicator was aborted"
    r"|failed to (recv|send), got",
    re.IGNORECASE,
)
# A rank that did not come in time may live: it may be slow, stopped, or in another collective.
_LATE = re.compile(
    r"timed out waiting \d+\s*ms|application timeout|wait timeout after|socket timeout"
    r"|(read|write|connect) timeout|collective operation timeout|failed to pass monitoredbarrier"
    r"|timed out after \d+ seconds waiting for clients",
    re.IGNORECASE,
)


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error of a collective, or of the store, says that another rank is gone or does not
    come.

    The cause is known to that rank alone, or to nobody if it was killed. None of the errors has a
    class of its own in every backend: gloo raises plain RuntimeErrors, so that the text decides.

    Source: the texts of torch 2.13 with gloo, and of NCCL 2.21 to 2.28 (github.com/NVIDIA/nccl,
        issues 795, 1928 and 2076).
    Held by: tests/faults/test_lost_peers.py
    """
    if not isinstance(error, RuntimeError | ConnectionError):
        return False
    text = str(error)
    return bool(_GONE.search(text) or _LATE.search(text))


def lost_peer_message(error: BaseException, hang: str = "") -> str:
    """The line for an error that `is_lost_peer`: what happened, and where to look.

    Args:
        error: An error of a collective, or of the store.
        hang: Which rank waited for which, if that is known.
    """
    if _GONE.search(str(error)):
        return (
            "the connection to another rank was lost: it was killed or has crashed; look for its "
            "own last lines, and for 'out of memory' in the log of its machine"
        )
    if hang:
        return f"a collective has timed out: {hang}"
    return (
        "another rank did not answer in time: it hangs, or waits somewhere else; look for its own "
        "last lines, and with `py-spy dump --pid` where it is"
    )


def stop() -> None:
    """Leave the process group; does nothing if there is none."""
    if dist.is_initialized():
        dist.destroy_process_group()
