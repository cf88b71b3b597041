"""Reading the environment: torchrun, SLURM, one process, and every half-set one in between."""

import socket

import pytest
import torch

from labcode.comm import bootstrap
from labcode.comm.bootstrap import Place, choose_device, read_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "12345",
}


def test_torchrun_slurm_and_a_single_process_are_told_apart():
    assert read_environment(TORCHRUN) == Place(3, 8, 1, 2, "torchrun", ("node0", 29500))
    assert read_environment(SLURM) == Place(5, 6, 1, 2, "slurm", ("n1", 12345), hosts_store=False)
    assert read_environment({}) == Place()


def test_the_store_is_opened_once_by_the_agent_or_by_rank_0():
    first = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}
    assert read_environment(first).hosts_store
    assert not read_environment(first | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).hosts_store
    assert read_environment(SLURM | {"SLURM_PROCID": "0"}).hosts_store
    assert read_environment(first | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == 2


def test_an_uneven_slurm_step_gives_each_node_its_own_count():
    step = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NTASKS": "4", "SLURM_PROCID": "3"}
    assert read_environment(step | {"SLURM_NODEID": "0"}).local_world_size == 3
    assert read_environment(step | {"SLURM_NODEID": "1"}).local_world_size == 1


def test_torchrun_inside_an_allocation_wins_over_slurm():
    assert read_environment(SLURM | TORCHRUN).launcher == "torchrun"


def test_a_batch_script_with_one_task_is_one_process():
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Place()


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_half_set_environment_names_what_is_missing(missing):
    env = {name: value for name, value in TORCHRUN.items() if name != missing}
    with pytest.raises(
        ValueError, match=f"half-set environment: .* but no {missing}: start with torchrun"
    ):
        read_environment(env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (TORCHRUN | {"RANK": "x"}, "RANK='x' is not a whole number"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 of WORLD_SIZE=8"),
        (
            {k: v for k, v in SLURM.items() if k != "MASTER_ADDR"},
            "srun started 6 tasks but MASTER_ADDR",
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(env, message):
    with pytest.raises(ValueError, match=message):
        read_environment(env)


@pytest.mark.parametrize(
    ("gpus", "local", "share", "expected"),
    [
        (0, 4, False, ("cpu", None, "gloo")),
        (4, 4, False, ("cuda", 3, "nccl")),
        (2, 4, True, ("cuda", 1, "gloo")),
    ],
)
def test_device_and_backend_follow_from_ranks_and_gpus(monkeypatch, gpus, local, share, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    device, backend = choose_device(Place(3, 4, 3, local), share_gpus=share)
    assert (device.type, device.index, backend) == expected


def test_more_local_ranks_than_gpus_is_an_error_that_says_how_to_share(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"4 ranks on this node but 1 GPU.*--parallel.share_gpus"):
        choose_device(Place(0, 4, 0, 4))


def test_a_rendezvous_port_in_use_is_one_line():
    with socket.socket() as holder:
        holder.bind(("", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(
            ValueError, match=f"{port}: the port is in use: set MASTER_PORT to another one"
        ):
            bootstrap.start(
                Place(0, 2, 0, 2, "slurm", ("localhost", port), hosts_store=True), timeout_s=3
            )
    assert not torch.distributed.is_initialized()


def test_one_process_gets_a_real_group_of_size_one():
    world = bootstrap.start(Place())
    try:
        assert (world.world_size, torch.distributed.get_world_size()) == (1, 1)
        with pytest.raises(RuntimeError, match="already"):
            bootstrap.start(Place())
    finally:
        bootstrap.stop()
