"""Reading the environment: torchrun, SLURM, one process, and every half-set one in between."""

import os
import socket

import pytest
import torch
import torch.distributed as dist

from labcode.runtime import bootstrap
from labcode.runtime.bootstrap import Place, choose_backend, choose_device, read_environment

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
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
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


def test_only_a_rank_of_torchrun_has_an_agent_to_end_with():
    """A process started by hand lives on when the shell that started it is closed."""
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}).has_agent
    assert not read_environment(TORCHRUN).has_agent
    assert not read_environment(SLURM).has_agent
    assert not read_environment({}).has_agent


def test_an_uneven_slurm_step_gives_each_node_its_own_count():
    step = SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_STEP_NUM_TASKS": "4"}
    step |= {"SLURM_PROCID": "3"}
    assert read_environment(step | {"SLURM_NODEID": "0"}).local_world_size == 3
    assert read_environment(step | {"SLURM_NODEID": "1"}).local_world_size == 1


def test_torchrun_inside_an_allocation_wins_over_slurm():
    assert read_environment(SLURM | TORCHRUN).launcher == "torchrun"


BATCH_SCRIPT = {  # printed by a batch script of `#SBATCH --ntasks=4`, outside of any srun
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NPROCS": "4",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_TASKS_PER_NODE": "4",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "12345",
}


def test_a_batch_script_without_srun_is_one_process():
    assert read_environment(BATCH_SCRIPT) == Place()
    assert read_environment({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}) == Place()
    for step in ("batch", "4294967291", "4294967290"):  # of the batch script, of a shell by salloc
        assert read_environment(BATCH_SCRIPT | {"SLURM_STEP_ID": step}) == Place()


def test_the_number_of_its_step_alone_shows_a_task_of_srun():
    step = BATCH_SCRIPT | {"SLURM_STEP_ID": "1", "SLURM_PROCID": "3", "SLURM_LOCALID": "3"}
    assert read_environment(step) == Place(3, 4, 3, 4, "slurm", ("n1", 12345))


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
        (TORCHRUN | {"MASTER_PORT": "-1"}, "MASTER_PORT=-1: set it to a free port, a number from"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000: set it to a free port"),
        (TORCHRUN | {"MASTER_PORT": "abc"}, "MASTER_PORT='abc' is not a whole number: start with"),
        (TORCHRUN | {"MASTER_PORT": "29_500"}, "MASTER_PORT='29_500' is not a whole number"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1 of LOCAL_WORLD_SIZE=2: ranks count"),
        (
            TORCHRUN | {"LOCAL_RANK": "2"},
            "LOCAL_RANK=2 of LOCAL_WORLD_SIZE=2: ranks count from 0",
        ),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "LOCAL_WORLD_SIZE=9 of WORLD_SIZE=8: a node has"),
        (TORCHRUN | {"WORLD_SIZE": "1" + 15 * "0"}, "WORLD_SIZE=1000000000000000: no job has more"),
        (TORCHRUN | {"WORLD_SIZE": "1" + 99 * "0"}, "WORLD_SIZE='10+' is not a whole number"),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x' is not a"),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"},
            "SLURM_STEP_TASKS_PER_NODE='two' is no list",
        ),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x"},
            r"SLURM_STEP_TASKS_PER_NODE='2\(x' is no list",
        ),
        (SLURM | {"SLURM_NODEID": "-9"}, "SLURM_NODEID=-9: nodes count from 0"),
        (SLURM | {"SLURM_LOCALID": "-1"}, "SLURM_LOCALID=-1 of SLURM_STEP_NUM_TASKS=6: ranks"),
        (SLURM | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6 of SLURM_STEP_NUM_TASKS=6: ranks"),
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "abc"},
            "SLURM_STEP_NUM_TASKS='abc' is not a whole number",
        ),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "abc"}, "SLURM_NTASKS='abc' is not a whole number"),
        (
            {"OMP_NUM_THREADS": "many"},
            "OMP_NUM_THREADS='many' is no number of threads: set it to 1",
        ),
        ({"OMP_NUM_THREADS": "0"}, "OMP_NUM_THREADS='0' is no number of threads"),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(env, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        read_environment(env)


def test_variables_that_are_empty_or_say_more_than_needed_are_taken_as_they_are_meant():
    step = {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_TASKS_PER_NODE": "4,2(x900000)"}
    assert read_environment(SLURM | step).local_world_size == 2
    nothing = {"SLURM_STEP_TASKS_PER_NODE": ""}
    assert read_environment(SLURM | nothing).local_world_size == 6
    assert read_environment({"OMP_NUM_THREADS": "4,2"}) == Place()
    assert read_environment({"OMP_NUM_THREADS": ""}) == Place()


def test_a_job_is_known_by_what_its_launcher_calls_it():
    """So that the ranks of two jobs at one port do not take each other for their own."""
    assert read_environment(TORCHRUN).job == ""
    assert read_environment(TORCHRUN | {"TORCHELASTIC_RUN_ID": "abc"}).job == "torchrun's job abc"
    assert read_environment(SLURM | {"SLURM_JOB_ID": "17"}).job == "SLURM's job 17.0"
    of_two_kinds = SLURM | {"SLURM_JOB_ID": "18", "SLURM_HET_JOB_ID": "17"}
    assert read_environment(of_two_kinds).job == "SLURM's job 17.0"


@pytest.mark.parametrize("chosen", ["soon", "-1", "0", "nan", "1e3", "inf"])
def test_a_time_to_wait_that_is_none_is_refused(monkeypatch, chosen):
    monkeypatch.setenv("LABCODE_MEET_TIMEOUT_S", chosen)
    place = Place(0, 2, 0, 2, "torchrun", ("localhost", 29500), hosts_store=True)
    with pytest.raises(ValueError, match=f"LABCODE_MEET_TIMEOUT_S='{chosen}' is no time: set it"):
        bootstrap.start(place)


def test_the_time_to_wait_for_the_others_is_not_that_of_a_collective(monkeypatch):
    patience = []

    def meet(place, given, timeout_s):
        patience.append(given.limit_s)
        raise bootstrap.MeetingError(f"later requests may take {timeout_s} s")

    monkeypatch.setattr(bootstrap, "meet", meet)
    monkeypatch.setenv("LABCODE_MEET_TIMEOUT_S", "500")
    with pytest.raises(ValueError, match="may take 20 s"):
        bootstrap.start(Place(0, 2, 0, 2, "torchrun", ("localhost", 29500)), timeout_s=20)
    assert patience == [500]


def test_an_interface_that_this_machine_does_not_have_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib9")
    with pytest.raises(
        ValueError,
        match=r"^GLOO_SOCKET_IFNAME=lo,ib9: .* has no interface 'ib9', but .*lo.*: set it to one",
    ):
        bootstrap.start(Place())


@pytest.mark.parametrize(
    ("gpus", "local_rank", "local_ranks", "expected"),
    [
        (0, 3, 4, torch.device("cpu")),
        (4, 3, 4, torch.device("cuda", 3)),  # each rank sees all GPUs of its node
        (1, 3, 4, torch.device("cuda", 0)),  # srun --gpus-per-task=1: each sees its own only
        (2, 3, 4, torch.device("cuda", 1)),
    ],
)
def test_a_rank_takes_one_of_the_gpus_that_it_sees(
    monkeypatch, gpus, local_rank, local_ranks, expected
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert choose_device(Place(local_rank, 8, local_rank, local_ranks)) == expected


A, B = "GPU-aaaa", "GPU-bbbb"


@pytest.mark.parametrize(
    ("devices", "share", "backend"),
    [
        (["n1 cpu", "n1 cpu"], False, "gloo"),
        ([f"n1 {A}", f"n1 {B}"], False, "nccl"),
        ([f"n1 {A}", f"n1 {B}"], True, "nccl"),  # allowed to share, but nobody does
        ([f"n1 {A}", f"n2 {B}", f"n2 {A}"], False, "nccl"),  # a UUID counts on its own node
        ([f"n1 {A}", f"n1 {B}", f"n1 {A}"], True, "gloo"),
    ],
)
def test_the_backend_follows_from_who_sits_on_which_gpu(devices, share, backend):
    assert choose_backend(devices, share) == backend


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (
            [f"n1 {A}"] * 4,
            r"4 ranks on node n1 but 1 GPU\(s\): start 1 per node, .*--parallel.share_gpus",
        ),
        ([f"n1 {A}", f"n2 {A}", f"n2 {B}", f"n2 {A}"], r"3 ranks on node n2 but 2 GPU\(s\)"),
        ([f"n1 {A}", f"n1 {B}", "n2 cpu"], "rank 2 on node n2 sees no GPU but 2 of 3 ranks do"),
    ],
)
def test_ranks_that_collide_on_a_gpu_are_refused_with_the_way_to_share(devices, message):
    with pytest.raises(ValueError, match=message):
        choose_backend(devices)


class FakeProperties:
    def __init__(self, uuid):
        self.uuid = uuid


def test_the_ranks_tell_each_other_the_uuid_of_their_gpu_over_the_store(monkeypatch):
    """Both ranks see one GPU as number 0: the same one, or one each, as srun binds them."""
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    device = torch.device("cuda", 0)

    def meet(first, second):
        store = dist.HashStore()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FakeProperties(second))
        store.set("device/1", bootstrap.describe(device))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: FakeProperties(first))
        return bootstrap.exchange_devices(Place(0, 2, 0, 2), device, store)

    assert choose_backend(meet("aaaa", "bbbb")) == "nccl"
    with pytest.raises(ValueError, match="2 ranks on node n1 but 1 GPU"):
        choose_backend(meet("aaaa", "aaaa"))


BOUND_TO_ONE_CORE = ["n1 1", "n1 2"]


@pytest.mark.parametrize(
    ("cores", "threads"),
    [
        (["n1 ff", "n1 ff"], 4),  # nobody has bound the ranks: they share eight cores
        (["n1 ff", "n1 ff", "n2 ff"], 4),  # on another node are other cores
        (BOUND_TO_ONE_CORE, 1),
        (["n1 f", "n1 f0"], 4),  # as srun --cpu-bind=cores binds them
        (["n1 f", "n1 ff", "n1 f0"], 2),
        (["n1 1", "n1 1"], 1),
    ],
)
def test_ranks_share_the_cores_that_several_of_them_may_run_on(cores, threads):
    assert bootstrap.num_threads(cores, rank=0) == threads


@pytest.mark.parametrize(("chosen", "threads"), [("", [2]), ("7", [])])
def test_a_rank_on_the_cpu_computes_on_its_share_of_the_cores(monkeypatch, chosen, threads):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(bootstrap, "usable_cores", lambda: frozenset({0, 1, 2, 65}))
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    store = dist.HashStore()
    store.set("cores/1", "n1 2")
    bootstrap._share_cores(Place(0, 2, 0, 2), torch.device("cpu"), store)
    assert given == threads  # who has chosen a number himself gets no other
    assert store.get("cores/0") == b"n1 20000000000000007"  # for those who have not


@pytest.mark.parametrize(
    ("own", "kept"),
    [
        ({}, {"TORCH_FR_BUFFER_SIZE": "2000"}),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, {"TORCH_FR_BUFFER_SIZE": "0"}),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}, {"TORCH_NCCL_TRACE_BUFFER_SIZE": "9"}),
    ],
)
def test_the_flight_recorder_is_on_unless_somebody_has_chosen_otherwise(monkeypatch, own, kept):
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is taken back after the test
        monkeypatch.delenv(name)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    bootstrap.start(Place())
    assert {name: os.environ[name] for name in names if name in os.environ} == kept


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
