"""The local cluster is what it says: real hosts, a real scheduler, and nothing left of it afterwards."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest

from labcode.minislurm import Cluster, Spec, Unavailable, needs, running
from labcode.minislurm.cli import main
from labcode.minislurm.hosts import outers
from labcode.minislurm.place import base
from labcode.minislurm.processes import alive, wait

ROOT = Path(__file__).resolve().parents[2]
CLI = [str(ROOT / "slurm/cluster")]


def leftovers(name):
    """What there still is of a cluster: its folder, processes, mounts; interfaces go with their host's last process."""
    folder, found = base() / name, []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += (
                [file]
                if os.fsencode(folder) in file.read_bytes() and alive(int(file.parent.name))
                else []
            )
    mounts = [
        line for line in Path("/proc/self/mounts").read_text().splitlines() if str(folder) in line
    ]
    links = [
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if re.match(r" *(n\d+|br0):", line)
    ]
    return found + mounts + links + ([folder] if folder.exists() else [])


def until(true, seconds=60):
    wait(true, seconds, lambda: "it did not happen")


# ------------------------------------------------------------------------------------------------------ hosts and jobs


def test_each_node_is_a_host_of_its_own(cluster2):
    script = "hostname; hostname -i; readlink /proc/self/ns/pid /proc/self/ns/net; cat /proc/1/cmdline | tr '\\0' ' '"
    told = [cluster2.node(node, ["sh", "-c", script]).stdout.splitlines() for node in ("n1", "n2")]
    assert [lines[:2] for lines in told] == [["n1", "10.77.0.11"], ["n2", "10.77.0.12"]]
    assert not set(told[0]) & set(told[1])
    assert all("tini" in lines[-1] for lines in told)

    cluster2.node("n1", ["touch", "/dev/shm/of-n1"])
    assert cluster2.node("n2", ["ls", "/dev/shm"]).stdout == ""
    assert cluster2.node("n1", ["ls", "/sys/class/net"]).stdout.split() == ["docker0", "eth0", "lo"]


def test_a_job_runs_on_both_nodes_with_their_gpus_and_this_file_system(cluster2, tmp_path):
    show = 'echo "$(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(pwd)"'
    command = [
        "srun",
        "-N2",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "--chdir",
        tmp_path,
        "sh",
        "-c",
        show,
    ]
    lines = sorted(cluster2.exec(command).stdout.splitlines())
    assert lines == [f"n{1 + rank // 2} {rank} 0,1 {tmp_path}" for rank in range(4)]
    one = cluster2.exec(
        ["srun", "-n2", "-N1", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    ).stdout
    assert len(one.split()) == 2 and "," not in one


def test_a_step_above_its_memory_is_killed_and_the_log_says_so(cluster2, tmp_path):
    grow = "import time; kept = [bytearray(os.urandom(1)) * 600_000_000 for os in [__import__('os')]]; time.sleep(60)"
    script = tmp_path / "grow.sbatch"
    script.write_text(
        f'#!/bin/bash\n#SBATCH --mem=200M --output={tmp_path}/log\nset -e\nsrun python3 -c "{grow}"\n'
    )
    job = cluster2.exec(["sbatch", "--parsable", script]).stdout.strip()

    def state():
        return re.search(r"JobState=(\w+)", cluster2.exec(["scontrol", "show", "job", job]).stdout)[
            1
        ]

    until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
    assert state() == "FAILED"
    assert "exceeded memory limit" in (tmp_path / "log").read_text()


# --------------------------------------------------------------------------------------------------------------- exec


def test_exec_keeps_folder_and_environment_and_tells_of_failure(cluster2, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", "a b")
    assert (
        cluster2.exec(["sh", "-c", 'pwd; echo "$MARK"; echo $0', "$(id)"]).stdout
        == f"{tmp_path}\na b\n$(id)\n"
    )
    assert cluster2.node("n2", ["cat"], input="hello").stdout == "hello"
    assert cluster2.exec(["sh", "-c", "exit 3"], check=False).returncode == 3
    with pytest.raises(
        RuntimeError,
        match=r"sbatch --wrap=true -p nope on head failed with exit code 1: .*partition",
    ):
        cluster2.exec(["sbatch", "--wrap=true", "-p", "nope"])
    with pytest.raises(ValueError, match=r"there is no node 'n9' .* it has n1, n2"):
        cluster2.node("n9", ["true"])


def test_a_late_command_is_ended_even_if_it_ignores_signals(cluster2, tmp_path):
    began = tmp_path / "began"
    with pytest.raises(TimeoutError, match="did not end within 2 s"):
        cluster2.exec(
            ["sh", "-c", f"trap '' TERM; touch {began}; while :; do sleep 0.1; done"], timeout_s=2
        )
    assert str(began) not in cluster2.exec(["ps", "-ww", "-eo", "args"]).stdout.replace(
        "ps -ww -eo args", ""
    )
    assert began.exists()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_prefix_works_from_any_process_and_the_command_ends_with_it(cluster2, how):
    process = subprocess.Popen(
        [*cluster2.exec_prefix, "sh", "-c", "hostname; exec sleep 98765"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"head\n"
    process.send_signal(how)
    until(lambda: "98765" not in cluster2.exec(["ps", "-ww", "-eo", "args"]).stdout)
    process.communicate()


# --------------------------------------------------------------------------------------------------- break and repair

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 6818), timeout=float(sys.argv[2]))"  # to slurmd


def reaches(cluster, start, end, seconds=20):
    return (
        cluster.node(start, ["python3", "-c", CONNECT, end, seconds], check=False).returncode == 0
    )


@pytest.mark.parametrize("pull, put", [("netdown", "netup"), ("block", "unblock")])
def test_a_node_without_network_is_reached_by_nobody_until_it_is_repaired(cluster2, pull, put):
    port = (6818,) if pull == "block" else ()
    assert reaches(cluster2, "n1", "n2")
    getattr(cluster2, pull)("n2", *port)
    try:
        assert not reaches(cluster2, "n1", "n2", seconds=1)
    finally:
        getattr(cluster2, put)("n2", *port)
    assert reaches(cluster2, "n1", "n2")


ASK = """
import socket, sys, time
peer = socket.create_connection(("n2", 5000), timeout=30)
for size in (1, 2_000_000):
    start = time.monotonic()
    peer.sendall(bytes(size))
    peer.recv(1)
    print(time.monotonic() - start)
"""
ANSWER = """
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
peer = server.accept()[0]
for size in (1, 2_000_000):
    while size:
        size -= len(peer.recv(min(size, 1 << 20)))
    peer.sendall(b"x")
"""


def seconds_for_a_byte_and_for_2_mb(cluster):
    with subprocess.Popen(
        cluster.host("n2").command(["python3", "-c", ANSWER]), stdout=subprocess.PIPE
    ) as answer:
        assert answer.stdout.readline() == b"ready\n"
        return [float(line) for line in cluster.node("n1", ["python3", "-c", ASK]).stdout.split()]


def test_a_slow_link_takes_as_long_as_its_rate_and_its_delay_say(cluster2):
    try:
        cluster2.slow("n2", "20mbit")
        limited = seconds_for_a_byte_and_for_2_mb(cluster2)
        cluster2.slow("n2", "20mbit", "100ms")
        delayed = seconds_for_a_byte_and_for_2_mb(cluster2)
    finally:
        cluster2.slow("n2", "off")
    free = min(seconds_for_a_byte_and_for_2_mb(cluster2) for _ in range(3))
    assert limited[1] > 0.9 * 16e6 / 20e6 > 2 * free[1]  # 2 MB are 16 Mbit
    assert delayed[0] >= 0.2 > 2 * free[0]  # there and back
    with pytest.raises(ValueError, match="rate 'fast': write it as 100mbit"):
        cluster2.slow("n2", "fast")
    with pytest.raises(ValueError, match="delay '5': write it as 5ms"):
        cluster2.slow("n2", "1gbit", "5")


def test_a_delay_ends_with_its_cable(cluster2):
    def programs():
        return cluster2.exec(["ps", "-ww", "-eo", "args"]).stdout.count("cluster/delay.py")

    cluster2.slow("n2", "1gbit", "1ms")
    cluster2.netdown("n2")
    assert not reaches(
        cluster2, "n1", "n2", seconds=1
    )  # its frames arrive at the program and are lost
    cluster2.netup("n2")
    assert reaches(cluster2, "n1", "n2") and programs() == 1
    cluster2.kill("n2")
    cluster2.boot("n2")
    assert reaches(cluster2, "n1", "n2")
    until(lambda: programs() == 0)


def test_a_node_without_power_comes_back_as_new(cluster2):
    (cluster2.folder / "n2/hosts").write_text("127.0.1.1 n2\n")
    assert cluster2.node("n2", ["hostname", "-i"]).stdout == "127.0.1.1\n"
    cluster2.kill("n2")
    with pytest.raises(RuntimeError, match="n2 is powered off"):
        cluster2.node("n2", ["true"])
    cluster2.boot("n2")
    assert cluster2.exec(["srun", "-w", "n2", "hostname", "-i"]).stdout == "10.77.0.12\n"


# -------------------------------------------------------------------------------------------------------- up and down


def test_up_again_is_the_same_cluster_and_another_shape_is_refused(cluster2):
    pids = [cluster2.host(name).pid for name in ("head", "n1", "n2")]
    again = Cluster.up(name=cluster2.name)
    assert [again.host(name).pid for name in ("head", "n1", "n2")] == pids
    with pytest.raises(
        ValueError,
        match="is up with nodes=2, not nodes=4: take it down first, or give the new one a name",
    ):
        Cluster.up(nodes=4, name=cluster2.name)


@pytest.mark.parametrize("name", ["..", "/", "a/b", "x" * 40])
def test_down_takes_names_and_never_paths(name, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "kept").touch()
    (tmp_path / "temp").mkdir()
    assert main(["down", "--name", name]) == 1
    assert "cluster name" in capfd.readouterr().err
    assert (tmp_path / "kept").exists() and (tmp_path / "temp").exists()


def test_it_outlives_the_process_that_started_it_and_down_leaves_nothing(slurm, capfd):
    name = slurm("cli")
    done = subprocess.run(
        [*CLI, "up", "1", "--name", name, "--gpus", "0"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    cluster = running(name)
    assert cluster.states() == {"n1": "idle"}
    assert leftovers(name) != []
    assert main(["exec", "--name", "no-such", "sinfo"]) == 1
    assert "no cluster 'no-such' is up" in capfd.readouterr().err
    done = subprocess.run(
        [*CLI, "exec", "--name", name, "sh", "-c", "hostname; pwd; exit 4"],
        cwd="/usr",
        capture_output=True,
    )
    assert (done.returncode, done.stdout) == (4, b"head\n/usr\n")
    assert main(["down", "--name", name]) == 0
    assert leftovers(name) == []
    assert running(name) is None
    assert main(["down", "--name", name]) == 0


@pytest.mark.parametrize(
    "moment",
    ["spec.json", "head/outer", "head/ready", "n3/outer", "head/slurmctld.log", "n2/slurmd.log"],
)
def test_down_also_removes_what_a_killed_up_has_left(slurm, moment):
    name = slurm("half")
    up = subprocess.Popen(
        [*CLI, "up", "3", "--name", name],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    until((base() / name / moment).exists)
    os.killpg(up.pid, signal.SIGKILL)
    up.wait()
    Cluster(name).down()
    assert leftovers(name) == []


def test_down_finds_hosts_whose_folder_is_gone(slurm):
    cluster = Cluster.up(nodes=1, name=slurm("lost"))
    shutil.rmtree(cluster.folder)
    cluster.down()
    assert outers(cluster.folder) == {} and leftovers(cluster.name) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run as an ordinary user already")
def test_an_ordinary_user_gets_the_same_without_root(tmp_path_factory):
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if not python:
        pytest.skip("no python3 that an ordinary user may run")
    copy = Path(
        "/tmp", f"labcode-copy-{os.getpid()}"
    )  # the repository may lie where only root may look
    user = ["setpriv", "--reuid=12345", "--regid=12345", "--clear-groups"]
    environment = {
        "PATH": "/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(copy),
    }

    def cluster(*words):
        command = [*user, python, "-m", "labcode.minislurm", *words]
        return subprocess.run(
            command, cwd="/tmp", env=environment, capture_output=True, text=True, timeout=60
        )

    try:
        (copy / "labcode").mkdir(parents=True)
        for part in ("__init__.py", "slurm/__init__.py"):
            (copy / "labcode" / part).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / "labcode" / part, copy / "labcode" / part)
        shutil.copytree(ROOT / "labcode/slurm/cluster", copy / "labcode/slurm/cluster")
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        up = cluster("up", "2")
        if "refuses Linux namespaces" in up.stderr:
            pytest.skip(up.stderr.strip())
        assert (up.returncode, up.stderr) == (0, "")
        job = cluster(
            "exec",
            "srun",
            "-N2",
            "--gpus-per-node=1",
            "sh",
            "-c",
            "echo $(hostname) $(id -u) $CUDA_VISIBLE_DEVICES",
        )
        assert sorted(job.stdout.splitlines()) == ["n1 12345 0", "n2 12345 0"], job.stderr
        assert cluster("node", "--root", "n2", "id", "-u").stdout == "0\n"
        for command in (
            ["netdown", "n2"],
            ["netup", "n2"],
            ["slow", "n2", "1gbit", "1ms"],
            ["kill", "n2"],
            ["boot", "n2"],
        ):
            done = cluster(*command)
            assert (done.returncode, done.stderr) == (0, ""), command
    finally:
        down = cluster("down")
        shutil.rmtree(copy)
    assert down.returncode == 0, down.stderr
    assert not Path("/tmp/labcode-slurm-12345").exists()


# ----------------------------------------------------------------------------------------------------- emulated sites

SITE = {
    "cpus": 96,
    "memory_mb": 1_000_000,
    "gpus": 8,
    "gpu_type": "h100",
    "features": ["gpu"],
    "accounts": ["m1", "m2"],
}
SITE |= {
    "partitions": {
        "gpu": {"MaxTime": "24:00:00"},
        "test": {"MaxTime": "30", "AllowAccounts": "m2"},
    },
    "qos": ["long"],
}
ACCEPTED = [
    "-N2 --gpus-per-node=8",
    "--gres=gpu:h100:8",
    "--ntasks-per-node=8 --gpus-per-task=1",
    "-C gpu",
    "-t 24:00:00",
]
ACCEPTED += [
    "-A m1 -q long",
    "--cpus-per-task=96",
    "--mem=900G",
    "-p test -A m2 -t 30",
    "-L scratch:1",
]
REFUSED = {
    "-N3": "Node count",
    "--gpus-per-node=9": "configuration",
    "--gres=gpu:a100:1": "configuration",
    "--cpus-per-task=97": "configuration",
    "--mem=1100G": "configuration",
    "-p nope": "partition",
    "-C foo": "feature",
    "-t 24:01:00": "time limit",
    "-A m3": "Invalid account: m3",
    "-q short": "Invalid qos: short",
    "-p test -A m1": "partition test does not take m1",
    "-p gpu,test": "partition test does not take none",
    "-L x": "license",
}


def test_an_emulated_site_accepts_and_refuses_as_the_site_would(slurm):
    with Cluster.up(2, name=slurm("h100"), settings={"Licenses": "scratch:5"}, **SITE) as site:

        def submit(options):
            return site.exec(
                ["sbatch", "--test-only", *options.split(), "--wrap", "true"], check=False
            )

        assert [options for options in ACCEPTED if submit(options).returncode] == []
        for options, reason in REFUSED.items():
            done = submit(options)
            assert done.returncode and reason in done.stderr, (options, done.stderr)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"nodes": 0}, "nodes=0: give a whole number from 1 to 64"),
        ({"gpu_type": "h 100"}, "'h 100' is no name for SLURM"),
        ({"partitions": {}}, "a cluster needs one at least"),
        ({"partitions": {"a": {"MaxTime": "1\nSlurmUser=x"}}}, "one name, one line"),
    ],
)
def test_an_impossible_site_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Spec.of(**given)


def test_missing_packages_are_named_all_at_once(monkeypatch, tmp_path):
    for command in ("unshare", "nsenter", "hostname", "ip", "tc", "sbatch"):
        (tmp_path / command).symlink_to("/bin/true")
    monkeypatch.setattr(needs, "PATH", str(tmp_path))
    with pytest.raises(
        Unavailable,
        match=r"apt-get install -y --no-install-recommends munge slurmctld slurmd tini$",
    ):
        needs.check()
