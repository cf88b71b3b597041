"""Ranks that do not find each other: real processes, and one line that says who and where."""

import os
import re
import signal
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial

import pytest
import torch.distributed as dist
from faults.forks import start, train
from faults.waiting import free_port, until

from labcode.runtime import bootstrap, meeting
from labcode.runtime.place import Place

LOOKING = "looking for the others"
TOGETHER = "together"
REFUSED = "refused"


def connect(patience_s=30.0, say_after_s=60.0, late_s=(), after_rank_0=False):
    """Stands in for the training: meet, and say so.

    Args:
        patience_s: How long to wait for the others.
        say_after_s: When to say for the first time who is missing; that goes to stdout, too.
        late_s: Seconds that each rank sleeps before it begins to look.
        after_rank_0: The other ranks begin to look when rank 0 has opened the port.
    """
    meeting.SAY_AFTER_S = say_after_s
    meeting.OPEN_S = 1.5
    meeting.READ_S = 0.8
    bootstrap.MEET_BY_HAND_S = patience_s
    bootstrap.MEET_LAUNCHED_S = patience_s
    say = meeting.Patience.say

    def say_twice(patience, what):
        print(what, flush=True)
        say(patience, what)

    meeting.Patience.say = say_twice
    place = bootstrap.read_environment()
    if late_s:
        time.sleep(late_s[place.rank])
    if after_rank_0 and place.rank > 0:
        until(lambda: listens(place.address))
    print(LOOKING, flush=True)
    bootstrap.start(place)
    dist.barrier()  # who leaves now would break off a rank that is still connecting
    print(TOGETHER, flush=True)
    bootstrap.stop()
    os._exit(0)


def listens(address):
    try:
        socket.create_connection(address, timeout=5).close()
    except OSError:
        return False
    return True


def meet_only(**chosen):
    """Like `connect`, with the errors that the training would print."""
    from labcode.run.failure import fail

    try:
        connect(**chosen)
    except ValueError as error:
        code = fail(bootstrap.read_environment(), error)
        print(REFUSED, flush=True)
        os._exit(code)


def by_hand(rank, port, world_size=2, host="127.0.0.1"):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def by_srun(rank, port, job):
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": str(job),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": None,
        "WORLD_SIZE": None,
        "LOCAL_RANK": None,
        "LOCAL_WORLD_SIZE": None,
    }


def until_text(running, rank, text):
    running.until(lambda: text in running.text(rank))


def the_error(done):
    """The only line of a job that ended in time with an error."""
    assert not done.hung
    assert done.tracebacks == 0
    text = "\n".join(done.err)
    assert "frame #" not in text, "the stack of torch's C++ code"
    assert len(done.errors) == 1, text
    return done.errors[0]


def test_one_process_of_two_says_who_is_missing_and_where_it_looked(tmp_path):
    port = free_port()
    patch = partial(meet_only, patience_s=1.0, say_after_s=0.3)
    done = train([], cwd=tmp_path, env=by_hand(0, port), patch=patch)
    assert done.codes == [2]
    waiting, error = done.err[0].splitlines()
    assert re.fullmatch(
        rf"waiting for rank 1 of 2 at 127.0.0.1:{port}; here: rank 0 "
        r"\(\d+ s so far, 1 s at most\)",
        waiting,
    )
    assert re.fullmatch(
        rf"error: rank 1 of 2 has not come to 127.0.0.1:{port} within \d+ s, rank 0 has: "
        "start every rank with this MASTER_ADDR and MASTER_PORT, or set LABCODE_MEET_TIMEOUT_S "
        "to wait longer; for one process unset RANK and WORLD_SIZE",
        error,
    )


def test_all_that_have_come_end_with_one_line(tmp_path):
    port = free_port()
    envs = [by_hand(rank, port, world_size=4) for rank in (0, 2)]
    # rank 2 gives up soon, and tells rank 0
    impatient = {"LABCODE_MEET_TIMEOUT_S": "1"}
    patch = partial(meet_only, after_rank_0=True)
    done = train([], cwd=tmp_path, ranks=2, env=[envs[0], envs[1] | impatient], patch=patch)
    assert done.codes == [2, 2]
    assert "error: ranks 1 and 3 of 4 have not come to" in the_error(done)


def test_without_rank_0_the_place_is_named(tmp_path):
    port = free_port()
    done = train(
        [],
        cwd=tmp_path,
        env=by_hand(1, port, host="localhost") | {"LABCODE_MEET_TIMEOUT_S": "0.5"},
        patch=meet_only,
    )
    error = the_error(done)
    assert error.startswith(f"error: rank 1: nobody answers at localhost:{port} (127.0.0.1")
    assert "(connection refused)" in error
    assert "start rank 0, which is to open it" in error


@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_does_not_resolve_is_named(tmp_path, rank):
    env = by_hand(rank, 29500, host="nowhere.invalid")
    done = train([], cwd=tmp_path, env=env, patch=partial(meet_only, patience_s=0.5))
    assert re.match(
        rf"error: rank {rank}: MASTER_ADDR=nowhere.invalid does not resolve on .*: "
        "set it to the host of rank 0",
        the_error(done),
    )


@contextmanager
def stranger(answer):
    """A program at a port that is no store; b"" says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken = []

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            taken.append(connection)
            if answer:
                connection.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.close()
    for connection in taken:
        connection.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20, b""])
def test_a_stranger_at_the_port_is_told_from_rank_0(tmp_path, answer):
    with stranger(answer) as port:
        done = train(
            [], cwd=tmp_path, env=by_hand(1, port), patch=partial(meet_only, patience_s=1.0)
        )
    assert f"what listens at 127.0.0.1:{port} is not rank 0 of this job" in the_error(done)


def test_two_processes_of_the_same_rank_are_both_named(tmp_path):
    port = free_port()
    envs = [by_hand(rank, port, world_size=3) for rank in (0, 1, 1)]
    done = train([], cwd=tmp_path, ranks=3, env=envs, patch=meet_only)
    assert done.codes == [2, 2, 2]
    for error in done.errors:
        assert re.search(
            r"two processes have rank 1 of 3: on \S+, process \d+, and on \S+, process \d+ at "
            rf"127.0.0.1:{port}: give each a RANK of its own",
            error,
        )
    # rank 0, for all who know; and the one that came second, for itself
    assert len(done.errors) == 2


@pytest.mark.parametrize("different", ["job", "size"])
def test_ranks_of_two_jobs_at_one_port_do_not_train_together(tmp_path, different):
    port = free_port()
    envs = [by_hand(0, port, world_size=2), by_hand(1, port, world_size=3)]
    found = "a job of 2 ranks, and this is rank 1 of a job of 3 ranks"
    if different == "job":
        envs = [by_srun(0, port, job=17), by_srun(1, port, job=18)]
        found = "SLURM's job 17.0 of 2 ranks, and this is rank 1 of SLURM's job 18.0 of 2 ranks"
    patch = partial(meet_only, after_rank_0=True)
    with start([], cwd=tmp_path, ranks=2, env=envs, patch=patch) as running:
        until_text(running, 1, REFUSED)
        running.kill(0)  # it waits for its own rank 1
        done = running.wait()
    assert done.codes == [-signal.SIGKILL, 2]
    assert f"at 127.0.0.1:{port} meet the ranks of {found}: set MASTER_PORT" in the_error(done)


@pytest.mark.parametrize(
    ("host", "late_s"), [("localhost", (0.3, 0.0)), ("127.0.0.1", (0.0, 0.3)), ("::1", (0.0, 0.0))]
)
def test_ranks_that_start_at_different_times_meet(tmp_path, host, late_s):
    port = free_port()
    envs = [by_hand(rank, port, host=host) for rank in (0, 1)]
    done = train([], cwd=tmp_path, ranks=2, env=envs, patch=partial(connect, late_s=late_s))
    assert done.codes == [0, 0]
    assert done.out == [f"{LOOKING}\n{TOGETHER}\n"] * 2
    assert done.err == ["", ""]


def test_rank_0_on_another_machine_than_its_address_says_so(tmp_path):
    # reserved for documentation: no machine has it
    env = by_hand(0, free_port(), host="192.0.2.1")
    error = the_error(train([], cwd=tmp_path, env=env, patch=meet_only))
    assert f"rank 0 runs on {socket.gethostname()}, and cannot reach the port" in error
    assert "set MASTER_ADDR to the host of rank 0" in error


def test_rank_0_that_dies_while_others_wait_is_named(tmp_path):
    port = free_port()
    envs = [by_hand(rank, port, world_size=3) for rank in (0, 1)]
    patch = partial(meet_only, after_rank_0=True, say_after_s=0.0)
    with start([], cwd=tmp_path, ranks=2, env=envs, patch=patch) as running:
        until_text(running, 1, "here: ranks 0 and 1")
        running.kill(0)
        done = running.wait()
    assert done.codes == [-signal.SIGKILL, 2]
    error = the_error(done)
    assert error.startswith(f"error: rank 1: rank 0, whose store at 127.0.0.1:{port} all meet in,")


def test_whoever_waits_hears_ctrl_c(tmp_path):
    patch = partial(meet_only, say_after_s=0.0)
    with start([], cwd=tmp_path, env=by_hand(0, free_port()), patch=patch) as running:
        until_text(running, 0, "here: rank 0")
        running.signal(0, signal.SIGINT)
        done = running.wait()
    assert done.codes == [-signal.SIGINT]


def test_lines_of_other_threads_are_not_lost_while_a_run_asks_its_job(monkeypatch, capfd):
    opened = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    place = Place(1, 2, launcher="torchrun", address=("127.0.0.1", opened.port), has_agent=True)

    def connects_while_another_thread_writes(*arguments, **options):
        os.write(2, b"a worker of the loader has ended\n")
        return make(*arguments, **options)

    make = dist.TCPStore
    monkeypatch.setattr(dist, "TCPStore", connects_while_another_thread_writes)
    store = meeting.store_of_job(place, 30.0)
    store.set("folder", "run")
    assert store.get("folder") == b"run"
    assert capfd.readouterr().err == "a worker of the loader has ended\n"
