"""What variables mean together: each rule fires on what its source describes, and on no right set.

The sources are NCCL's user guide and source (2.30), PyTorch's (2.13) and the manual page of srun.
"""

import re

import pytest

from labcode.slurm.variables import RULES, Where, judge

TWO_NODES = Where(nodes=2)
WITH_CARDS = Where(nodes=2, infiniband=("mlx5_0", "mlx5_1"))
SHELL = Where(is_shell=True, host="login1.cluster")
# (variables, where, words of the one finding)
BITE = {
    "lo on several nodes": ({"NCCL_SOCKET_IFNAME": "lo"}, TWO_NODES, "ends at its own machine"),
    "docker0 for gloo": ({"GLOO_SOCKET_IFNAME": "docker0"}, TWO_NODES, "ends at its own machine"),
    "InfiniBand switched off where it is": (
        {"NCCL_IB_DISABLE": "1"},
        WITH_CARDS,
        "there is mlx5_0, mlx5_1",
    ),
    "InfiniBand switched off": ({"NCCL_IB_DISABLE": "1"}, Where(), "over TCP"),
    "InfiniBand asked for and off": (
        {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"},
        WITH_CARDS,
        "Failed to initialize any NET plugin",
    ),
    "cards that sockets do not use": (
        {"NCCL_NET": "Socket", "NCCL_IB_HCA": "mlx5"},
        WITH_CARDS,
        "takes no InfiniBand card",
    ),
    "cards that are switched off": (
        {"NCCL_IB_DISABLE": "1", "NCCL_IB_HCA": "mlx5_0"},
        Where(),
        "not read: NCCL_IB_HCA",
    ),
    "nothing but sockets inside a node": (
        {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
        Where(),
        "neither NVLink nor shared memory",
    ),
    "a level that is not read": (
        {"NCCL_P2P_DISABLE": "1", "NCCL_P2P_LEVEL": "SYS"},
        Where(),
        "the second is not read",
    ),
    "subsystems without a log": ({"NCCL_DEBUG_SUBSYS": "NET"}, Where(), "it does nothing"),
    "subsystems of warnings": (
        {"NCCL_DEBUG_SUBSYS": "NET", "NCCL_DEBUG": "WARN"},
        Where(),
        "it does nothing",
    ),
    "a file without a log": ({"NCCL_DEBUG_FILE": "n.%p"}, Where(), "nothing is written"),
    "one file for all": (
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": "nccl.log"},
        Where(),
        "over the same file",
    ),
    "two ways to handle errors": (
        {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"},
        Where(),
        "there is no watchdog",
    ),
    "nobody handles errors": (
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"},
        Where(),
        "hangs until its time limit",
    ),
    "an old name": (
        {"NCCL_ASYNC_ERROR_HANDLING": "1"},
        Where(),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING; PyTorch reads the old one",
    ),
    "an old name of the recorder": (
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"},
        Where(),
        "TORCH_FR_BUFFER_SIZE",
    ),
    "both names": (
        {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20", "TORCH_FR_BUFFER_SIZE": "30"},
        Where(),
        "the new one counts: 30",
    ),
    "a time-out that nobody reads": ({"NCCL_TIMEOUT": "3600"}, Where(), "10 minutes"),
    "seconds for an exponent": ({"NCCL_IB_TIMEOUT": "600"}, Where(), "exponent of at most 31"),
    "kernels one by one": ({"CUDA_LAUNCH_BLOCKING": "1"}, Where(), "waits for each kernel"),
    "a list of GPUs and one for each task": (
        {"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"},
        Where(),
        "as number 0",
    ),
    "more threads than cores of a task": (
        {"OMP_NUM_THREADS": "64", "SLURM_CPUS_PER_TASK": "8"},
        Where(cores=128),
        "fewer cores than threads",
    ),
    "a prefix for gloo": ({"GLOO_SOCKET_IFNAME": "^docker0,lo"}, Where(), "takes a whole name"),
    "two networks": (
        {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib"},
        TWO_NODES,
        "go different ways",
    ),
    "a meeting place of each node": ({"MASTER_ADDR": "localhost"}, TWO_NODES, "meeting place"),
    "an algorithm for all sizes": ({"NCCL_ALGO": "Ring"}, Where(), "no longer chooses"),
    "an algorithm that there is not": ({"NCCL_ALGO": "Rings"}, Where(), "knows no such algorithm"),
    "no algorithm for a broadcast": (
        {"NCCL_ALGO": "Tree"},
        Where(),
        "available for function Broadcast",
    ),
    "a level that there is not": ({"NCCL_DEBUG": "DEBUG"}, Where(), "nothing is printed"),
    "a sign within the list": (
        {"NCCL_SOCKET_IFNAME": "eth0,^docker0"},
        Where(),
        "at the beginning alone",
    ),
    "AMD GPUs that are masked twice": (
        {"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "1"},
        Where(),
        "no GPU is found",
    ),
    "AMD GPUs that are masked twice, by the name of CUDA": (
        {"ROCR_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "2,3"},
        Where(),
        "counts among the GPUs",
    ),
    "a protocol that may corrupt": ({"NCCL_PROTO": "LL128"}, Where(), "wrong data"),
    "a variable that is gone": ({"NCCL_TREE_THRESHOLD": "0"}, Where(), "removed in 2.5"),
    "memory of another job": (
        {"SLURM_MEM_PER_CPU": "500", "SLURM_MEM_PER_NODE": "4000"},
        Where(),
        "mutually exclusive",
    ),
    "nothing is handed to tasks": ({"SLURM_EXPORT_ENV": "NONE"}, Where(), "none of your"),
    "a job of another machine": (
        {"SLURM_JOB_ID": "17", "SLURMD_NODENAME": "gpu07"},
        SHELL,
        "a job on another machine",
    ),
}
# right: of the documentation of NCCL, AWS (EFA), NERSC, torchtitan and Lightning
RIGHT = {
    "nothing": ({}, WITH_CARDS),
    "one node over lo": ({"NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "localhost"}, Where(nodes=1)),
    "a debug log of the network": (
        {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET", "NCCL_DEBUG_FILE": "n.%h.%p"},
        TWO_NODES,
    ),
    "cards by name": ({"NCCL_IB_HCA": "=mlx5_0,mlx5_1", "NCCL_NET": "IB"}, WITH_CARDS),
    "all but docker": (
        {"NCCL_SOCKET_IFNAME": "^docker,lo", "GLOO_SOCKET_IFNAME": "hsn0"},
        TWO_NODES,
    ),
    "EFA": ({"FI_PROVIDER": "efa", "NCCL_IB_DISABLE": "1"}, TWO_NODES),
    "a plugin of its own": ({"NCCL_NET": "AWS Libfabric", "NCCL_CROSS_NIC": "1"}, TWO_NODES),
    "off is not on": (
        {"NCCL_P2P_DISABLE": "0", "NCCL_SHM_DISABLE": "0", "NCCL_IB_DISABLE": "0"},
        WITH_CARDS,
    ),
    "a recorder": ({"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, TWO_NODES),
    "what torchrun sets": (
        {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OMP_NUM_THREADS": "1", "MASTER_ADDR": "n1"},
        Where(nodes=2, cores=16),
    ),
    "what SLURM sets in a task": (
        {
            "SLURM_JOB_ID": "17",
            "SLURMD_NODENAME": "gpu07",
            "SLURM_CPUS_PER_TASK": "8",
            "OMP_NUM_THREADS": "8",
            "SLURM_MEM_PER_NODE": "4000",
        },
        Where(nodes=2, cores=8, host="gpu07.cluster", is_shell=True),
    ),
    "AMD GPUs, each counted from 0": (
        {"ROCR_VISIBLE_DEVICES": "4,5", "CUDA_VISIBLE_DEVICES": "0,1"},
        Where(),
    ),
    "all but two interfaces, by beginnings": ({"NCCL_SOCKET_IFNAME": "^lo,docker"}, TWO_NODES),
    "all but one, by its whole name": ({"NCCL_SOCKET_IFNAME": "^=docker0"}, TWO_NODES),
    # torchtitan's script for EFA
    "one network for NCCL alone": (
        {"NCCL_SOCKET_IFNAME": "eth0,en,eth,em,bond", "NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa"},
        TWO_NODES,
    ),
    "a time-out of InfiniBand": ({"NCCL_IB_TIMEOUT": "22", "NCCL_IB_RETRY_CNT": "7"}, WITH_CARDS),
    "one network for both": (
        {"NCCL_SOCKET_IFNAME": "=hsn0,hsn1", "GLOO_SOCKET_IFNAME": "hsn0"},
        TWO_NODES,
    ),
    "the heartbeat": ({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "1200"}, TWO_NODES),
}


@pytest.mark.parametrize("name", BITE)
def test_what_variables_mean_together_is_said_once(name: str) -> None:
    env, where, words = BITE[name]
    found = judge(env, where)
    assert len(found) == 1, [one.text for one in found]
    assert words in found[0].text
    assert found[0].cure and found[0].source


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_set_is_not_blamed(name: str) -> None:
    env, where = RIGHT[name]
    assert [one.text for one in judge(env, where)] == []


def test_where_nothing_is_known_of_the_job_no_rule_asks_it() -> None:
    for env, where, _ in BITE.values():
        if where is TWO_NODES:
            several = {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "MASTER_ADDR"}
            assert not judge({name: env[name] for name in several & env.keys()}, Where())


def test_each_rule_names_only_variables_that_it_asks_for() -> None:
    for rule in RULES:
        known = {*rule.when, "found"}
        assert set(re.findall(r"(?<!{){(\w+)}", rule.means)) <= known, rule.means
        assert (
            rule.means[0] == rule.means[0].lower()
            or rule.means.split()[0].isupper()
            or (rule.means.startswith(("InfiniBand", "NCCL", "LL128", "SLURM", "GPUs", "NO_PROXY")))
        )
        assert rule.source
