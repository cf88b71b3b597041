"""NCCL's log, told to a person: `python -m labcode.doctor nccl`."""

from pathlib import Path

import pytest

from labcode.doctor import __main__ as doctor
from labcode.doctor import nccl_story
from labcode.doctor.nccl_log import parse

VERSION = "NCCL version 2.21.5+cuda12.4\n"


def lines_of(rank: int, between: str, inside: str = "P2P/CUMEM/read", nodes: int = 2) -> str:
    """What rank `rank` of two on each node prints."""
    node, gpu = divmod(rank, 2)
    size = 2 * nodes
    write = f"gpu0{node + 1}:{700 + gpu}:{900 + rank} [{gpu}] NCCL INFO "
    network = "IB" if "IB" in between else "Socket"
    after = (rank + 1) % size
    over = inside if gpu == 0 else f"[send] via {between}"
    way = f"via {over}" if gpu == 0 else over
    return (
        f"{write}Bootstrap : Using hsn0:10.0.0.{node + 1}<0>\n"
        f"{write}Using network {network}\n"
        f"{write}ncclCommInitRank comm 0x5{rank} rank {rank} nranks {size} cudaDev {gpu} "
        f"busId {gpu + 1}a000 commId 0xabc - Init START\n"
        f"{write}Channel 00/0 : {rank}[{gpu}] -> {after}[{1 - gpu}] {way}\n"
    )


def told(text: str) -> str:
    return "\n".join(nccl_story.tell(parse(text)))


def test_hosts_links_and_transports_are_said() -> None:
    text = told(VERSION + "".join(lines_of(rank, "NET/IB/0/GDRDMA") for rank in range(4)))
    assert text == (
        "NCCL 2.21.5 for CUDA 12.4: 4 ranks on 2 hosts\n"
        "    gpu01: ranks 0 and 1, by hsn0 10.0.0.1; network IB\n"
        "    gpu02: ranks 2 and 3, by hsn0 10.0.0.2; network IB\n"
        "Inside a host ranks talk over P2P (GPU to GPU, over NVLink or PCIe).\n"
        "Between hosts ranks talk over NET/IB (InfiniBand or RoCE), and cards read the GPUs' "
        "memory."
    )


def test_hosts_are_said_before_a_communicator_exists() -> None:
    text = told(
        "gpu02: gpu02:70:90 [4] NCCL INFO NET/IB : Using [0]mlx5_5:1/IB/SHARP [RO]; "
        "OOB eth0:10.0.0.2<0>\n"
        "gpu01: gpu01:71:91 [1] NCCL INFO Using network IBext\n"
    )
    assert text == (
        "NCCL of an unknown version: no communicator was made\n"
        "    gpu02: by eth0 10.0.0.2; cards mlx5_5 (IB)\n"
        "    gpu01: network IBext"
    )


def test_the_library_of_amd_is_read_as_well() -> None:
    text = told("RCCL version 2.17.1+hip5.7 HEAD:cbbb3d8+\n" + lines_of(0, "NET/Socket/1"))
    assert text.startswith("NCCL 2.17.1: 4 ranks on 1 host\n")


def test_slow_ways_are_named() -> None:
    text = told("".join(lines_of(rank, "NET/Socket/0", "SHM/direct") for rank in range(4)))
    assert "over SHM (through the memory of the host, slower than P2P)" in text
    assert "over NET/Socket (TCP, several times slower than InfiniBand)" in text
    inside = told("".join(lines_of(rank, "NET/Socket/0", "NET/Socket/0") for rank in range(4)))
    assert "Inside a host the network is used: NVLink and shared memory are not." in inside


def test_settings_are_said_with_what_they_mean() -> None:
    settings = (
        "gpu01:700:700 [0] NCCL INFO NCCL_IB_DISABLE set by environment to 1.\n"
        "gpu01:700:700 [0] NCCL INFO NCCL_DEBUG_SUBSYS set by environment to NET\n"
    )
    text = told(settings + "".join(lines_of(rank, "NET/Socket/0") for rank in range(4)))
    assert "Set: NCCL_DEBUG_SUBSYS=NET, NCCL_IB_DISABLE=1\n" in text
    assert "NCCL_IB_DISABLE=1: nodes talk over TCP" in text
    assert "does nothing" not in text  # the log exists, so NCCL_DEBUG was INFO


def test_ranks_without_lines_are_named() -> None:
    assert "Of ranks 2 and 3 these files say nothing." in told(
        lines_of(0, "NET/IB/0") + lines_of(1, "NET/IB/0")
    )


def test_the_command_tells_what_failed_first_behind_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "nccl.log"
    path.write_text(
        "".join(lines_of(rank, "NET/IB/0") for rank in range(4))
        + "gpu02:701:990 [1] transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer "
        "10.0.0.1<33397> with status=12 opcode=0 len=0 vendor err 129 (Recv)\n"
        + "gpu01:700:991 [0] NCCL WARN socketProgress: Connection closed by remote peer gpu02<1>\n"
    )
    assert doctor.main(["nccl", str(path)]) == 1
    out = capsys.readouterr().out
    assert out.startswith("NCCL of an unknown version: 4 ranks on 2 hosts\n")
    assert "Failed first on gpu02: a message through the network did not arrive" in out
    assert "    another rank is gone: on gpu01" in out


def test_a_log_without_nccl_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.log"
    path.write_text("step 1 | loss 3.1\n")
    assert doctor.main(["nccl", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: no line of NCCL in {path}: run the job with NCCL_DEBUG=INFO, on GPUs (gloo writes "
        "no such log)\n"
    )
