"""What the other ranks are told when a rank dies: real processes, killed in every kind of wait."""

import os
import signal
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from faults.forks import start
from faults.waiting import until

from labcode.runtime import bootstrap


def all_reduce():
    dist.all_reduce(torch.ones(100))


def gather_objects():
    dist.all_gather_object([None, None], "text")


def send():
    dist.send(torch.ones(10_000_000), 1 - dist.get_rank())


def receive():
    dist.recv(torch.ones(100), 1 - dist.get_rank())


def read_from_the_store():
    store = dist.distributed_c10d._get_default_store()
    store.get("a key that nobody writes")


def wait_for_the_slow():
    """The other rank lives, and does not take part; the time-out is short from here on."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5))
    work = dist.all_reduce(torch.ones(100), async_op=True)
    work.wait()


def wait(work, doomed):
    """Stands in for the training: one rank dies, the other one waits for it in `work`."""
    rank = bootstrap.start(timeout_s=120.0).rank
    dist.barrier()
    print("connected", flush=True)
    if rank == doomed:
        time.sleep(600)
    try:
        work()
    except Exception as error:
        print(bootstrap.is_lost_peer(error), bootstrap.lost_peer_message(error), flush=True)
    os._exit(0)


def ended(running, doomed, number):
    """What the other rank said, after one was killed."""
    running.until(lambda: "connected" in running.text(doomed))
    running.signal(doomed, number)
    until(lambda: len(running.text(1 - doomed).splitlines()) >= 2)
    return running.text(1 - doomed).splitlines()[-1]


@pytest.mark.parametrize(
    ("work", "doomed", "number"),
    [
        (all_reduce, 1, signal.SIGKILL),
        (all_reduce, 0, signal.SIGSEGV),
        (gather_objects, 1, signal.SIGKILL),
        (send, 1, signal.SIGKILL),
        (receive, 1, signal.SIGKILL),
        (read_from_the_store, 0, signal.SIGKILL),
    ],
)
def test_a_rank_whose_peer_was_killed_knows_it_at_once(tmp_path, work, doomed, number):
    with start([], cwd=tmp_path, ranks=2, patch=partial(wait, work, doomed)) as running:
        said = ended(running, doomed, number)
    assert said.startswith("True the connection to another rank was lost: it was killed or has")


def test_a_peer_that_is_stopped_is_late(tmp_path):
    patch = partial(wait, wait_for_the_slow, 1)
    with start([], cwd=tmp_path, ranks=2, patch=patch) as running:
        said = ended(running, 1, signal.SIGSTOP)
    assert said.startswith("True another rank did not answer in time: it hangs, or waits")


@pytest.mark.parametrize(
    "text",
    [
        # NCCL, as issues of its repository quote them
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process "
        "exited or there was a network error, NCCL version 2.21.5\nncclRemoteError: A call failed",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=42, OpType=",
    ],
)
def test_what_nccl_says_of_a_lost_peer_is_recognized(text):
    assert bootstrap.is_lost_peer(dist.DistBackendError(text))


def test_an_error_of_ones_own_is_no_lost_peer():
    assert not bootstrap.is_lost_peer(RuntimeError("The size of tensor a (3) must match 4"))
    assert not bootstrap.is_lost_peer(dist.DistBackendError("NCCL error: invalid usage"))
    assert not bootstrap.is_lost_peer(ValueError("connection closed: a text of a config"))
    assert not bootstrap.is_lost_peer(KeyboardInterrupt())
