"""NCCL's INFO log in the forms that its versions print, and the drawing of what was read."""

import random

import pytest

from labcode.doctor.nccl_log import Communicator, Interface, Link, Rank, TreeNode, parse
from labcode.teach.figures import plot


def two_nodes(network="NET/IB/{nic}/GDRDMA", prefix=""):
    """Two nodes of two GPUs, NCCL 2.21 as torch 2.6 has it: a ring over all, P2P inside a node."""
    lines = ["NCCL version 2.21.5+cuda12.4"]
    for rank in range(4):
        node, gpu = divmod(rank, 2)
        process, thread = 700 + gpu, 900 + rank
        head = f"gpu0{node + 1}:{process}:{process} [{gpu}] NCCL INFO "
        line = f"gpu0{node + 1}:{process}:{thread} [{gpu}] NCCL INFO "
        comm = f"ncclCommInitRank comm 0x55{rank:04x} rank {rank} nranks 4 cudaDev {gpu} nvmlDev {gpu} busId {gpu + 1}a000"
        lines += [
            head + "NCCL_SOCKET_IFNAME set by environment to hsn0",
            head + f"Bootstrap : Using hsn0:10.0.0.{node + 1}<0>",
            line
            + f"NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB hsn0:10.0.0.{node + 1}<0>",
            line + "Using network IB",
            line + comm + " commId 0xabc - Init START",
            line
            + f"Trees [0] {(rank + 1) % 4 or -1}/-1/-1->{rank}->{rank - 1} [1] -1/-1/-1->{rank}->-1",
        ]
        if rank == 0:
            lines += [line + f"Channel 0{c}/02 :    0   1   2   3" for c in range(2)]
        for channel in range(2):
            link = f"Channel 0{channel}/0 : "
            after, before = (rank + 1) % 4, (rank - 1) % 4
            over = "[{way}] via " + network.format(nic=gpu)
            if gpu == 0:
                lines.append(
                    line + link + f"{before}[1] -> {rank}[0] " + over.format(way="receive")
                )
                lines.append(line + link + f"{rank}[0] -> {after}[1] via P2P/CUMEM/read")
            else:
                lines.append(line + link + f"{rank}[1] -> {after}[0] " + over.format(way="send"))
        lines += [line + "Connected all rings", line + comm + " commId 0xabc - Init COMPLETE"]
    return "\n".join(prefix + line for line in lines)


def test_version_ranks_hosts_and_gpus():
    log = parse(two_nodes())
    assert (log.version, log.cuda) == ("2.21.5", "12.4")
    comm = log.main
    assert (comm.id, comm.size, comm.hosts) == ("0xabc", 4, {"gpu01": [0, 1], "gpu02": [2, 3]})
    assert [(r.gpu, r.bus_id, r.pid) for r in comm.ranks.values()] == [
        (0, "1a000", 700),
        (1, "2a000", 701),
    ] * 2


def test_links_are_counted_once_though_both_ends_print_them():
    comm = parse(two_nodes()).main
    inside, between = {"P2P": 2}, {"NET/IB": 2}
    assert comm.pairs() == {(0, 1): inside, (1, 2): between, (2, 3): inside, (3, 0): between}
    assert (comm.transports(between_hosts=True), comm.transports(between_hosts=False)) == (
        {"NET/IB"},
        {"P2P"},
    )
    link = next(link for link in comm.links if link.source == 1)
    assert (link.detail, link.gpu_direct, link.nic) == ("NET/IB/1/GDRDMA", True, 1)


def test_chosen_interfaces_devices_and_settings():
    log = parse(two_nodes())
    assert (
        Interface("gpu02", "bootstrap", "hsn0", "10.0.0.2") in log.interfaces
        and len(log.interfaces) == 4
    )
    assert log.nics["gpu01"] == [("mlx5_0", "IB"), ("mlx5_1", "RoCE")]
    assert log.networks == {"gpu01": "IB", "gpu02": "IB"} and log.settings == {
        "NCCL_SOCKET_IFNAME": "hsn0"
    }


def test_rings_and_trees():
    comm = parse(two_nodes()).main
    assert comm.rings == {0: (0, 1, 2, 3), 1: (0, 1, 2, 3)}
    assert TreeNode(0, 0, None, (1,)) in comm.trees and TreeNode(0, 3, 2, ()) in comm.trees


@pytest.mark.parametrize(
    "prefix", ["[rank 3] ", "12: ", "[1,0]<stdout>:", "[default0]:", "(Worker pid=7) "]
)
def test_what_a_launcher_writes_before_a_line_does_not_matter(prefix):
    assert parse(two_nodes(prefix=prefix)) == parse(two_nodes())


def test_lines_of_ranks_may_be_mixed_as_long_as_each_rank_keeps_its_order():
    queues = {}
    for line in two_nodes().splitlines():
        queues.setdefault(line.split()[0], []).append(line)
    rng, mixed = random.Random(0), []
    while queues:
        name = rng.choice(sorted(queues))
        mixed.append(queues[name].pop(0))
        if not queues[name]:
            del queues[name]
    assert parse("\n".join(mixed)).main.pairs() == parse(two_nodes()).main.pairs()


def test_a_log_cut_in_any_place_is_read_as_far_as_it_goes():
    text = two_nodes()
    whole = parse(text).main.pairs()
    for cut in range(0, len(text), 97):
        log = parse(text[:cut])
        assert all(pair in whole for comm in log.communicators for pair in comm.pairs())


# one line of each form, and what it says: (source, target, transport, NIC, GPU direct)
LINES = {
    "h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC": (0, 1, "P2P", None, False),
    "h:1:2 [1] NCCL INFO Channel 07 : 13[5] -> 14[6] via SHM/direct/direct": (13, 14, "SHM", None, False),
    "h:1:2 [3] NCCL INFO Channel 03/0 : 5[5] -> 12[4] [send] via NET/Socket/3": (5, 12, "NET/Socket", 3, False),
    "h:1:2 [1] NCCL INFO Channel 00/0 : 1[1] -> 3[1] [receive] via NET/IB/2(1)/GDRDMA": (1, 3, "NET/IB", 2, True),
    "h:1:2 [0] NCCL INFO Channel 02/0 : 0[0] -> 8[0] [send] via NET/AWS Libfabric/1/GDRDMA": (
        0, 8, "NET/AWS Libfabric", 1, True,
    ),
    "h:1:2 [0] NCCL INFO Channel 00 : 3[4a000] -> 6[44000] [send] via NET/IB/0/GDRDMA comm 0x7f nRanks 08": (
        3, 6, "NET/IB", 0, True,
    ),
    "h:1:2 [0] NCCL INFO Channel 02 : 2[a000] -> 0[6000] via P2P/direct pointer": (2, 0, "P2P", None, False),
    "h:1:2 [0] NCCL INFO Ring 00 : 45 -> 46 [send] via NET/Socket/0": (45, 46, "NET/Socket", 0, False),
    "h:1:2 [0] NCCL INFO Ring 01 : 0[1b000] -> 7[41000] via direct shared memory": (0, 7, "SHM", None, False),
}  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_links_of_all_versions(line):
    (link,) = parse(line).main.links
    assert (link.source, link.target, link.transport, link.nic, link.gpu_direct) == LINES[line]


def test_a_bracket_holds_a_gpu_or_in_old_versions_a_bus():
    new = parse("h:1:2 [5] NCCL INFO Channel 00/0 : 5[5] -> 4[4] via P2P/IPC").main
    old = parse("h:1:2 [0] NCCL INFO Channel 00 : 3[4a000] -> 6[44000] via P2P/IPC").main
    assert (new.ranks[5].gpu, new.ranks[5].bus_id) == (5, None) and (
        old.ranks[3].gpu,
        old.ranks[3].bus_id,
    ) == (
        None,
        "4a000",
    )


def test_a_job_with_groups_has_a_communicator_for_each():
    both = "h:7:{0} [0] NCCL INFO comm 0x{0} rank 0 nranks {1} cudaDev 0 busId 1000 commId 0x{1} - Init START\n"
    link = "h:7:{} [0] NCCL INFO Channel 00/0 : 0[0] -> {}[1] via {}\n"
    text = (
        both.format(11, 4)
        + both.format(12, 2)
        + link.format(11, 3, "P2P/IPC")
        + link.format(12, 1, "SHM/direct/direct")
    )
    log = parse(text)
    assert {comm.size: comm.links for comm in log.communicators} == {
        4: [Link(0, 0, 3, "P2P", "P2P/IPC")],
        2: [Link(0, 0, 1, "SHM", "SHM/direct/direct")],
    }
    assert log.main.size == 4


def test_versions_that_name_the_communicator_last_and_without_a_number():
    text = (
        "a:1:2 [0] NCCL INFO Channel 00 : 0[6000] -> 1[7000] [send] via NET/Socket/0\n"
        "b:1:2 [0] NCCL INFO Channel 00 : 1[7000] -> 0[6000] [send] via NET/Socket/0\n"
        "a:1:2 [0] NCCL INFO comm 0x7f30b0000d00 rank 0 nranks 2 cudaDev 0 busId 6000 - Init COMPLETE\n"
        "b:1:2 [0] NCCL INFO comm 0x7f30b0000d00 rank 1 nranks 2 cudaDev 0 busId 7000 - Init COMPLETE\n"
    )
    (comm,) = parse(text).communicators
    assert comm.hosts == {"a": [0], "b": [1]} and comm.transports(between_hosts=True) == {
        "NET/Socket"
    }


def test_warnings_are_kept_and_a_log_without_nccl_is_refused():
    log = parse(
        "n1:5:9 [0] misc/socket.cc:538 NCCL WARN socketStartConnect: Connect to 10.0.0.2<5> failed : refused\n"
    )
    assert log.warnings == [("n1", "socketStartConnect: Connect to 10.0.0.2<5> failed : refused")]
    with pytest.raises(ValueError, match="NCCL_DEBUG=INFO"):
        _ = log.main


def test_newer_bootstrap_and_socket_lines():
    log = parse(
        "n1:5:9 [0] NCCL INFO NCCL version 2.27.3+cuda12.9\n"
        "n1:5:9 [0] NCCL INFO Bootstrap: Using eth0:10.77.0.11<0>\n"
        "n1:5:9 [0] NCCL INFO NET/IB : No device found.\n"
        "n1:5:9 [0] NCCL INFO NET/Socket : Using [0]eth0:10.77.0.11<0> [1]eth1:fe80::1%eth1<0>\n"
    )
    assert log.version == "2.27.3" and not log.nics
    assert [(i.use, i.name, i.address) for i in log.interfaces] == [
        ("bootstrap", "eth0", "10.77.0.11"),
        ("NET/Socket", "eth0", "10.77.0.11"),
        ("NET/Socket", "eth1", "fe80::1%eth1"),
    ]


# ------------------------------------------------------------------------------------------------------- the drawing

ALT = "Two nodes of two ranks, joined by InfiniBand"


def drawn(picture):
    return [patch.get_gid() for patch in picture.axes[0].patches]


def test_the_drawing_has_nodes_ranks_and_an_arrow_for_each_pair():
    picture = plot.transports(parse(two_nodes()), alt=ALT)
    assert {gid for gid in drawn(picture) if "->" not in gid} == {
        "node gpu01",
        "node gpu02",
        *(f"rank {r}" for r in range(4)),
    }
    arrows = [gid for gid in drawn(picture) if "->" in gid]
    assert arrows == ["0 -> 1 P2P", "1 -> 2 NET/IB", "2 -> 3 P2P", "3 -> 0 NET/IB"]
    texts = [text.get_text() for text in picture.axes[0].texts]
    assert (
        texts.count("2") == 4 + 1 and texts.count("GPU 1") == 2
    )  # channels of the arrows, and rank 2
    assert [text.get_text().split(":")[0] for text in picture.figure.legends[0].texts] == [
        "P2P",
        "NET/IB",
    ]
    assert picture.alt == ALT and picture.png()[:4] == b"\x89PNG"


def test_transports_differ_in_colour_and_in_dash_even_one_that_nobody_knows():
    log = parse(two_nodes(network="NET/Slingshot/0"))
    (known, other) = plot.transports(log, alt=ALT).figure.legends[0].get_lines()
    assert known.get_color() != other.get_color() and known.get_linestyle() != other.get_linestyle()


def test_no_arrow_runs_over_a_third_rank():
    comm = Communicator("", 8, {rank: Rank(rank, f"n{rank // 2}", rank % 2) for rank in range(8)})
    comm.links = [Link(0, rank, (rank + 1) % 8, "NET/Socket", "NET/Socket/0") for rank in range(8)]
    axes = plot.transports(comm, alt="Four nodes in a ring").axes[0]
    centres = {
        patch.get_gid(): patch.center
        for patch in axes.patches
        if (patch.get_gid() or "").startswith("rank")
    }
    assert len(centres) == 8
    for arrow in (patch for patch in axes.patches if "->" in (patch.get_gid() or "")):
        source, _, target, _ = arrow.get_gid().split()
        points = (
            arrow.get_transform()
            .inverted()
            .transform(arrow.get_transform().transform_path(arrow.get_path()).vertices)
        )
        for name, centre in centres.items():
            if name not in (f"rank {source}", f"rank {target}"):
                assert min(((points - centre) ** 2).sum(1)) > 0.3**2


def test_too_many_ranks_or_none_are_refused():
    many = Communicator("", 33, {rank: Rank(rank, "n") for rank in range(33)})
    with pytest.raises(ValueError, match="33 ranks are too many"):
        plot.transports(many, alt=ALT)
    with pytest.raises(ValueError, match="no ranks"):
        plot.transports(Communicator("", 2), alt=ALT)
