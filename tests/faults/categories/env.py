"""The environment: variables of torchrun and SLURM, addresses and ports, threads, folders."""

import contextlib
import random
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial

from ..cases import EITHER, REFUSED, TRAINS, Case, Room
from ..waiting import free_port

MEET_S = 45.0 + 30.0  # ranks wait 45 s for each other, and must have said why long before
ANY_PORT = "a free one"
TWO = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": ANY_PORT,
    "LABCODE_MEET_TIMEOUT_S": "45",  # not the minutes that nodes may take
}
# one process, with this environment: words of the line
ALONE: dict[str, tuple[dict, list[str]]] = {
    "RANK alone": ({"RANK": "0"}, ["WORLD_SIZE"]),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "1"}, ["RANK"]),
    "LOCAL_RANK alone": ({"LOCAL_RANK": "0"}, ["RANK"]),
    "no MASTER_ADDR": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}, ["MASTER_ADDR"]),
    "no MASTER_PORT": ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "h"}, ["MASTER_PORT"]),
    "RANK empty": ({**TWO, "RANK": "", "MASTER_PORT": "1"}, ["RANK"]),
}
# variable: values that must be refused by two ranks
BAD = {
    "RANK": ["abc", "-1", "2", "1.5", "", "99999999999999999999"],
    "WORLD_SIZE": ["abc", "0", "-2", "1.5", ""],
    "LOCAL_RANK": ["abc", "-1", "2", "1.5"],
    "LOCAL_WORLD_SIZE": ["abc", "0", "-1", "1.5"],
    "MASTER_PORT": ["abc", "-1", "0", "70000", "99999999999", "", "1.5", "http"],
    "MASTER_ADDR": [
        "",
        "no-such-host.invalid",
        "999.999.999.999",
        "a b",
        "http://127.0.0.1",
        "::g",
    ],
    "GLOO_SOCKET_IFNAME": ["nosuch0"],
    "TORCHELASTIC_RESTART_COUNT": ["abc"],
}
# srun's: one process of two
SLURM = {
    "SLURM_STEP_NUM_TASKS": ["abc", "", "0", "-1"],
    "SLURM_PROCID": ["abc", "", "-1", "7"],
    "SLURM_LOCALID": ["abc", "", "-1", "7"],
    "SLURM_NODEID": ["abc", "", "-9", "7"],
    "SLURM_STEP_TASKS_PER_NODE": ["", "abc", "(x2)", "0", "-1", "2(x", "99999999999999999999"],
    "MASTER_ADDR": ["", "no-such-host.invalid"],
    "MASTER_PORT": ["", "abc", "-1", "70000"],
}
# no number of threads: torch itself would take it in silence
THREADS = ["abc", "0", "-1"]
# what must not matter to one process
HARMLESS = {
    "OMP_NUM_THREADS": ["1", "99999"],
    "CUDA_VISIBLE_DEVICES": ["", "99", "abc"],
    "PYTHONIOENCODING": ["ascii", "utf-8"],
    "LANG": ["C", "xx_YY.UTF-99"],
    "COLUMNS": ["0", "abc"],
    "TERM": ["", "nosuch"],
    "HOME": [None, "", "/nowhere", "/dev/null"],
    "USER": [None, ""],
    "TZ": ["Nowhere/Land"],
    "SLURM_JOB_ID": ["7"],
    "SLURM_NTASKS": ["4", "abc"],
    "SLURM_PROCID": ["abc"],
    "MASTER_PORT": ["abc"],
    "MASTER_ADDR": ["no-such-host.invalid"],
    "NCCL_DEBUG": ["INFO"],
    "TORCH_DISTRIBUTED_DEBUG": ["DETAIL", "abc"],
}


def cases(rng: random.Random) -> list[Case]:
    made = []
    for what, (env, names) in ALONE.items():
        made.append(_alone(what, env, names))
    for name, values in BAD.items():
        for value in values:
            who = "both" if rng.random() < 0.6 else "the second"
            made.append(_two(name, value, who))
    for name, values in SLURM.items():
        for value in values:
            env = SRUN | {name: value}
            made.append(_alone(f"srun, {name}={value!r}", env, [name, "rank 1", *_others(name)]))
    for name in SRUN:
        if name not in ("SLURM_STEP_ID", "SLURM_NODEID", "LABCODE_MEET_TIMEOUT_S"):
            missing = SRUN | {name: None}
            answer = EITHER if name == "SLURM_STEP_NUM_TASKS" else REFUSED
            made.append(_alone(f"srun without {name}", missing, [name, "rank 1"], answer))
    for value in THREADS:
        name = "OMP_NUM_THREADS"
        made.append(_alone(f"{name}={value!r}", {name: value}, [name], EITHER))
    for name, values in HARMLESS.items():
        for value in values:
            made.append(_alone(f"{name}={value!r}", {name: value}, [], TRAINS))
    made += _meetings()
    return made


def _others(name: str) -> list[str]:
    """Names that a message may give as well: a count is wrong only against another one."""
    return ["SLURM_PROCID", "SLURM_LOCALID", "RANK"] if name.endswith("NUM_TASKS") else []


def _alone(what: str, env: dict, names: list[str], answer: str = REFUSED) -> Case:
    words = ["--train.out=out"]
    act = partial(_with_free_port, env) if env.get("MASTER_PORT") == ANY_PORT else None
    return Case(what, words, names, answer, env=env, waits=True, limit_s=MEET_S, act=act)


def _with_free_port(env: dict, room: Room) -> None:
    room.train(*room.case.args, env=env | {"MASTER_PORT": str(free_port())})
    if set(room.answer.codes if room.answer else []) != {0} and any(room.folder.iterdir()):
        room.flag("left behind", "a folder")


def _two(name: str, value: str, who: str) -> Case:
    changed = {name: value}
    envs = [changed if who == "both" else {}, changed]
    names = [name]
    if name in ("RANK", "WORLD_SIZE"):
        names += ["rank 0", "rank 1"]
    if name == "MASTER_ADDR" and value:
        names = [value]
    answer = EITHER if name == "TORCHELASTIC_RESTART_COUNT" or value == "0" else REFUSED
    words = ["--train.out=out"]
    return Case(
        f"{who} of 2 with {name}={value!r}",
        words,
        names,
        answer,
        2,
        envs,
        waits=True,
        limit_s=MEET_S,
        act=_one_line,
    )


def _one_line(room: Room) -> None:
    """Where ranks cannot meet, each of them says so: the line counts once a rank."""
    done = room.train(*room.case.args, env=room.case.env)
    per_rank = [[line for line in text.splitlines() if "error: " in line] for text in done.err]
    if not done.hung and not done.tracebacks and all(len(lines) <= 1 for lines in per_rank):
        # they have no connection over which to agree who speaks
        for rank in range(1, len(done.err)):
            if per_rank[0] and per_rank[rank]:
                done.err[rank] = done.err[rank].replace("error: ", "(also) ", 1)
    extra = [path.name for path in room.folder.iterdir()]
    if extra and set(done.codes) != {0}:
        room.flag("left behind", ", ".join(extra))


# ---- meetings


def _meetings() -> list[Case]:
    """Ranks that do not come, strangers at the port."""
    made = []
    alone = TWO | {"LOCAL_RANK": "0"}
    for rank in (0, 1):
        env = alone | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        names = ["rank", "127.0.0.1"]
        made.append(_meeting(f"rank {rank} of 2 comes alone", env, names, None))
    for what, serve in STRANGERS.items():
        for rank in (0, 1):
            env = alone | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            made.append(_meeting(f"rank {rank}: the port has {what}", env, ["127.0.0.1"], serve))
    both = [alone | {"RANK": "0"}, alone | {"RANK": "0"}]
    made.append(_several("both are rank 0", both))
    both = [alone | {"RANK": "0"}, alone | {"RANK": "1", "WORLD_SIZE": "3"}]
    made.append(_several("they disagree about WORLD_SIZE", both))
    both = [alone | {"RANK": "0"}, alone | {"RANK": "1", "MASTER_PORT": "1"}]
    made.append(_several("the second goes to another port", both))
    return made


def _meeting(what: str, env: dict, names: list[str], serve) -> Case:
    return Case(
        what, ["--train.out=out"], names, waits=True, limit_s=MEET_S, act=partial(_meet, env, serve)
    )


def _several(what: str, envs: list[dict]) -> Case:
    return Case(
        what, ["--train.out=out"], [], REFUSED, 2, envs, waits=True, limit_s=MEET_S, act=_one_line
    )


def _meet(env: dict, serve: Callable[[socket.socket], object] | None, room: Room) -> None:
    with _stranger(serve) as port:
        room.train(*room.case.args, env=env | {"MASTER_PORT": str(port)})
    if any(room.folder.iterdir()):
        room.flag("left behind", "a folder")


@contextlib.contextmanager
def _stranger(serve: Callable[[socket.socket], object] | None) -> Iterator[int]:
    """A port, with somebody at it who is no rank."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        if serve is None:
            server.close()
            yield port
            return
        server.listen()
        threading.Thread(target=_serve, args=(server, serve), daemon=True).start()
        yield port


def _serve(server: socket.socket, serve: Callable[[socket.socket], object]) -> None:
    kept = []  # a connection must not be closed because nobody holds it
    while True:
        try:
            connection = server.accept()[0]
        except OSError:
            return
        kept.append(connection)
        with contextlib.suppress(OSError):
            serve(connection)


def _silence(connection: socket.socket) -> None:
    """Take the connection and say nothing."""


def _close(connection: socket.socket) -> None:
    connection.close()


def _web(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
    connection.close()


def _ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")


STRANGERS = {
    "somebody who is silent": _silence,
    "somebody who hangs up": _close,
    "a web server": _web,
    "an SSH server": _ssh,
}
