"""NCCL's INFO log in the forms that its versions print, and the drawing of what was read."""

import random

import numpy as np
import pytest
from matplotlib.patches import Circle, FancyArrowPatch

from course.figures import plot
from course.figures.style import Picture
from course.labs import l14_nccl_example
from labcode.doctor.nccl_log import Communicator, Interface, NcclLink, Rank, TreeNode, parse


def two_nodes(network: str = "NET/IB/{nic}/GDRDMA", prefix: str = "") -> str:
    """Two nodes of two GPUs, NCCL 2.21 as torch 2.6 has it: a ring over all, P2P inside a node."""
    lines = ["NCCL version 2.21.5+cuda12.4"]
    for rank in range(4):
        lines += lines_of_rank(rank, network)
    return "\n".join(prefix + line for line in lines)


def lines_of_rank(rank: int, network: str) -> list[str]:
    node, gpu = divmod(rank, 2)
    host = f"gpu0{node + 1}"
    process = 700 + gpu
    first_thread = f"{host}:{process}:{process} [{gpu}] NCCL INFO "
    thread = f"{host}:{process}:{900 + rank} [{gpu}] NCCL INFO "
    address = f"hsn0:10.0.0.{node + 1}<0>"
    comm = (
        f"ncclCommInitRank comm 0x55{rank:04x} rank {rank} nranks 4 "
        f"cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1}a000 commId 0xabc"
    )
    child = (rank + 1) % 4 or -1
    lines = [
        f"{first_thread}NCCL_SOCKET_IFNAME set by environment to hsn0",
        f"{first_thread}Bootstrap : Using {address}",
        f"{thread}NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB {address}",
        f"{thread}Using network IB",
        f"{thread}{comm} - Init START",
        f"{thread}Trees [0] {child}/-1/-1->{rank}->{rank - 1} [1] -1/-1/-1->{rank}->-1",
    ]
    if rank == 0:
        lines.append(f"{thread}Channel 00/02 :    0   1   2   3")
        lines.append(f"{thread}Channel 01/02 :    0   1   2   3")
    after = (rank + 1) % 4
    before = (rank - 1) % 4
    over = network.format(nic=gpu)
    for channel in range(2):
        link = f"{thread}Channel 0{channel}/0 : "
        if gpu == 0:
            lines.append(f"{link}{before}[1] -> {rank}[0] [receive] via {over}")
            lines.append(f"{link}{rank}[0] -> {after}[1] via P2P/CUMEM/read")
        else:
            lines.append(f"{link}{rank}[1] -> {after}[0] [send] via {over}")
    lines.append(f"{thread}Connected all rings")
    lines.append(f"{thread}{comm} - Init COMPLETE")
    return lines


def test_version_ranks_hosts_and_gpus() -> None:
    log = parse(two_nodes())
    assert (log.version, log.cuda) == ("2.21.5", "12.4")
    comm = log.main
    assert (comm.id, comm.size) == ("0xabc", 4)
    assert comm.hosts == {"gpu01": [0, 1], "gpu02": [2, 3]}
    of_a_node = [(0, "1a000", 700), (1, "2a000", 701)]
    assert [(rank.gpu, rank.bus_id, rank.pid) for rank in comm.ranks.values()] == of_a_node * 2


def test_links_are_counted_once_though_both_ends_print_them() -> None:
    comm = parse(two_nodes()).main
    inside = {"P2P": 2}
    between = {"NET/IB": 2}
    assert comm.pairs() == {(0, 1): inside, (1, 2): between, (2, 3): inside, (3, 0): between}
    assert comm.transports(between_hosts=True) == {"NET/IB"}
    assert comm.transports(between_hosts=False) == {"P2P"}
    first_of_rank_1 = next(link for link in comm.links if link.source == 1)
    assert first_of_rank_1.detail == "NET/IB/1/GDRDMA"


def test_chosen_interfaces_devices_and_settings() -> None:
    log = parse(two_nodes())
    assert Interface("gpu02", "bootstrap", "hsn0", "10.0.0.2") in log.interfaces
    assert len(log.interfaces) == 4
    assert log.nics["gpu01"] == [("mlx5_0", "IB"), ("mlx5_1", "RoCE")]
    assert log.networks == {"gpu01": "IB", "gpu02": "IB"}
    assert log.settings == {"NCCL_SOCKET_IFNAME": "hsn0"}


def test_rings_and_trees() -> None:
    comm = parse(two_nodes()).main
    assert comm.rings == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    assert TreeNode(0, 0, None, (1,)) in comm.trees
    assert TreeNode(0, 3, 2, ()) in comm.trees


def test_a_tree_that_is_printed_in_both_directions_counts_once() -> None:
    comm = parse("h:1:2 [0] NCCL INFO Trees [0] 1/2/-1->0->-1|-1->0->1/2/-1").main
    assert comm.trees == [TreeNode(0, 0, None, (1, 2))]


@pytest.mark.parametrize(
    "prefix", ["[rank 3] ", "12: ", "[1,0]<stdout>:", "[default0]:", "(Worker pid=7) "]
)
def test_what_a_launcher_writes_before_a_line_does_not_matter(prefix: str) -> None:
    assert parse(two_nodes(prefix=prefix)) == parse(two_nodes())


def test_lines_of_ranks_may_be_mixed_as_long_as_each_rank_keeps_its_order() -> None:
    queues = {}
    for line in two_nodes().splitlines():
        queues.setdefault(line.split()[0], []).append(line)
    rng = random.Random(0)
    mixed = []
    while queues:
        name = rng.choice(sorted(queues))
        mixed.append(queues[name].pop(0))
        if not queues[name]:
            del queues[name]
    assert parse("\n".join(mixed)).main.pairs() == parse(two_nodes()).main.pairs()


def test_a_log_cut_in_any_place_is_read_as_far_as_it_goes() -> None:
    text = two_nodes()
    whole = parse(text).main.pairs()
    for cut in range(0, len(text), 97):
        log = parse(text[:cut])
        assert all(pair in whole for comm in log.communicators for pair in comm.pairs())


# what a line of each form says of a link: (text, (source, target, transport, detail))
LINKS = [
    (
        "[0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
        (0, 1, "P2P", "P2P/IPC"),
    ),
    (
        "[1] NCCL INFO Channel 07 : 13[5] -> 14[6] via SHM/direct/direct",
        (13, 14, "SHM", "SHM/direct/direct"),
    ),
    (
        "[3] NCCL INFO Channel 03/0 : 5[5] -> 12[4] [send] via NET/Socket/3",
        (5, 12, "NET/Socket", "NET/Socket/3"),
    ),
    (
        "[1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2(1)/GDRDMA",
        (1, 3, "NET/IB", "NET/IB/2(1)/GDRDMA"),
    ),
    (
        "[0] NCCL INFO Channel 02/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA",
        (0, 8, "NET/AWS Libfabric", "NET/AWS Libfabric/1/GDRDMA"),
    ),
    (
        "[0] NCCL INFO Channel 00 : 3[4a000] -> 6[44000] [send] via NET/IB/0/GDRDMA"
        " comm 0x7f nRanks 08",
        (3, 6, "NET/IB", "NET/IB/0/GDRDMA"),
    ),
    (
        "[0] NCCL INFO Channel 02 : 2[a000] -> 0[6000] via P2P/direct pointer",
        (2, 0, "P2P", "P2P/direct pointer"),
    ),
    (
        "[0] NCCL INFO Ring 00 : 45 -> 46 [send] via NET/Socket/0",
        (45, 46, "NET/Socket", "NET/Socket/0"),
    ),
    (
        "[0] NCCL INFO Ring 01 : 0[1b000] -> 7[41000] via direct shared memory",
        (0, 7, "SHM", "SHM/direct"),
    ),
]


@pytest.mark.parametrize("text, expected", LINKS)
def test_links_of_all_versions(text: str, expected: tuple[int, int, str, str]) -> None:
    (link,) = parse(f"h:1:2 {text}").main.links
    assert (link.source, link.target, link.transport, link.detail) == expected


def test_a_bracket_holds_a_gpu_or_in_old_versions_a_bus() -> None:
    new = parse("h:1:2 [5] NCCL INFO Channel 00/0 : 5[5] -> 4[4] via P2P/IPC").main.ranks[5]
    old = parse("h:1:2 [0] NCCL INFO Channel 00 : 3[4a000] -> 6[44000] via P2P/IPC").main.ranks[3]
    assert (new.gpu, new.bus_id) == (5, None)
    assert (old.gpu, old.bus_id) == (None, "4a000")


def test_a_job_with_groups_has_a_communicator_for_each() -> None:
    comm = "NCCL INFO comm 0x1 rank 0 nranks {} cudaDev 0 busId 1000 commId {} - Init START"
    lines = [
        "h:7:11 [0] " + comm.format(4, "0x4"),
        "h:7:12 [0] " + comm.format(2, "0x2"),
        "h:7:11 [0] NCCL INFO Channel 00/0 : 0[0] -> 3[1] via P2P/IPC",
        "h:7:12 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct",
    ]
    log = parse("\n".join(lines))
    assert {comm.size: comm.links for comm in log.communicators} == {
        4: [NcclLink(0, 0, 3, "P2P", "P2P/IPC")],
        2: [NcclLink(0, 0, 1, "SHM", "SHM/direct/direct")],
    }
    assert log.main.size == 4


def test_versions_that_name_the_communicator_last_and_without_a_number() -> None:
    comm = "NCCL INFO comm 0x7f30b0000d00 rank {} nranks 2 cudaDev 0 busId {} - Init COMPLETE"
    lines = [
        "a:1:2 [0] NCCL INFO Channel 00 : 0[6000] -> 1[7000] [send] via NET/Socket/0",
        "b:1:2 [0] NCCL INFO Channel 00 : 1[7000] -> 0[6000] [send] via NET/Socket/0",
        "a:1:2 [0] " + comm.format(0, 6000),
        "b:1:2 [0] " + comm.format(1, 7000),
    ]
    (found,) = parse("\n".join(lines)).communicators
    assert found.hosts == {"a": [0], "b": [1]}
    assert found.transports(between_hosts=True) == {"NET/Socket"}


def test_warnings_are_kept_and_a_log_without_nccl_is_refused() -> None:
    refused = "socketStartConnect: Connect to 10.0.0.2<5> failed : refused"
    log = parse(f"n1:5:9 [0] misc/socket.cc:538 NCCL WARN {refused}\n")
    assert log.warnings == [("n1", refused)]
    with pytest.raises(ValueError, match="NCCL_DEBUG=INFO"):
        _ = log.main


def test_newer_bootstrap_and_socket_lines() -> None:
    lines = [
        "n1:5:9 [0] NCCL INFO NCCL version 2.27.3+cuda12.9",
        "n1:5:9 [0] NCCL INFO Bootstrap: Using eth0:10.77.0.11<0>",
        "n1:5:9 [0] NCCL INFO NET/IB : No device found.",
        "n1:5:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.77.0.11<0> [1]eth1:fe80::1%eth1<0>",
    ]
    log = parse("\n".join(lines))
    assert log.version == "2.27.3"
    assert not log.nics
    assert log.interfaces == [
        Interface("n1", "bootstrap", "eth0", "10.77.0.11"),
        Interface("n1", "NET/Socket", "eth0", "10.77.0.11"),
        Interface("n1", "NET/Socket", "eth1", "fe80::1%eth1"),
    ]


# ------------------------------------------------------------------------------------- the drawing

ALT = "Two nodes of two ranks, joined by InfiniBand"


def gids(picture: Picture) -> list[str]:
    return [patch.get_gid() or "" for patch in picture.axes[0].patches]


def test_the_arrows_between_two_nodes_do_not_cross() -> None:
    picture = plot.transports(parse(l14_nccl_example.two_nodes()), alt=ALT)
    at = {
        patch.get_gid(): patch.center
        for patch in picture.axes[0].patches
        if (patch.get_gid() or "").startswith("rank")
    }
    for source, target in ((3, 4), (7, 0)):
        assert at[f"rank {source}"][1] == pytest.approx(at[f"rank {target}"][1])
    left, right = at["rank 0"][0], at["rank 4"][0]
    assert all(at[f"rank {rank}"][0] <= left + 1e-9 for rank in (0, 1, 2, 3))
    assert all(at[f"rank {rank}"][0] >= right - 1e-9 for rank in (4, 5, 6, 7))


def test_the_drawing_has_nodes_ranks_and_an_arrow_for_each_pair() -> None:
    picture = plot.transports(parse(two_nodes()), alt=ALT)
    others = {gid for gid in gids(picture) if "->" not in gid}
    assert others == {"node gpu01", "node gpu02", "rank 0", "rank 1", "rank 2", "rank 3"}
    arrows = [gid for gid in gids(picture) if "->" in gid]
    assert arrows == ["0 -> 1 P2P", "1 -> 2 NET/IB", "2 -> 3 P2P", "3 -> 0 NET/IB"]
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert texts.count("2") == 4 + 1  # channels of the arrows, and rank 2
    assert texts.count("GPU 1") == 2
    legend = [text.get_text() for text in picture.figure.legends[0].texts]
    assert [text.partition(":")[0] for text in legend] == ["P2P", "NET/IB"]
    assert picture.alt == ALT
    assert picture.png()[:4] == b"\x89PNG"


def test_transports_differ_in_colour_and_in_dash_even_one_that_nobody_knows() -> None:
    log = parse(two_nodes(network="NET/Slingshot/0"))
    known, other = plot.transports(log, alt=ALT).figure.legends[0].get_lines()
    assert known.get_color() != other.get_color()
    assert known.get_linestyle() != other.get_linestyle()


def test_no_arrow_runs_over_a_third_rank() -> None:
    comm = Communicator("", 8)
    for rank in range(8):
        comm.ranks[rank] = Rank(rank, f"n{rank // 2}", rank % 2)
        comm.links.append(NcclLink(0, rank, (rank + 1) % 8, "NET/Socket", "NET/Socket/0"))
    axes = plot.transports(comm, alt="Four nodes in a ring").axes[0]
    centres = {}
    arrows = []
    for patch in axes.patches:
        gid = patch.get_gid() or ""
        if isinstance(patch, Circle) and gid.startswith("rank"):
            centres[gid] = patch.center
        elif "->" in gid:
            arrows.append(patch)
    assert len(centres) == 8
    assert len(arrows) == 8
    for arrow in arrows:
        source, _, target, _ = arrow.get_gid().split()
        points = points_of(arrow)
        for name, centre in centres.items():
            if name not in (f"rank {source}", f"rank {target}"):
                assert min(((points - centre) ** 2).sum(1)) > 0.3**2


def points_of(arrow: FancyArrowPatch) -> np.ndarray:
    """The points of its curve, in the units of the axes."""
    transform = arrow.get_transform()
    on_screen = transform.transform_path(arrow.get_path()).vertices
    return transform.inverted().transform(on_screen)


def test_too_many_ranks_or_none_are_refused() -> None:
    many = Communicator("", 33, {rank: Rank(rank, "n") for rank in range(33)})
    with pytest.raises(ValueError, match="33 ranks are too many"):
        plot.transports(many, alt=ALT)
    with pytest.raises(ValueError, match="no ranks"):
        plot.transports(Communicator("", 2), alt=ALT)


@pytest.mark.parametrize("gpus", [1, 2, 4])
@pytest.mark.parametrize("rdma", [True, False])
def test_the_example_of_lesson_14_is_a_ring_over_two_nodes(rdma, gpus):
    log = parse(l14_nccl_example.two_nodes(rdma, gpus))
    comm = log.main
    size = 2 * gpus
    assert list(comm.pairs()) == sorted((rank, (rank + 1) % size) for rank in range(size))
    assert all(sum(counts.values()) == 2 for counts in comm.pairs().values())
    assert comm.transports(between_hosts=True) == {"NET/IB" if rdma else "NET/Socket"}
    assert comm.transports(between_hosts=False) == ({"P2P"} if gpus > 1 else set())
    assert set(log.networks.values()) == {"IB" if rdma else "Socket"}
    assert bool(log.nics) == rdma
