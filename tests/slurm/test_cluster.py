"""The local cluster is what it says: real hosts, a real scheduler, and nothing left afterwards."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from faults.waiting import until

from labcode.minislurm import Cluster, Spec, Unavailable, names_up, needs, running
from labcode.minislurm.cli import main
from labcode.minislurm.commands import alive
from labcode.minislurm.hosts import _command_line, outers
from labcode.minislurm.place import base
from labcode.slurm.cli import main as jobs

ROOT = Path(__file__).resolve().parents[2]
CLI = [str(ROOT / "slurm/cluster")]
# The command takes .venv of the repository, or the first python3: let that be this one.
CLI_ENV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

# Runs some words, and returns the completed process.
Run = Callable[..., subprocess.CompletedProcess[str]]
Submit = Callable[[str], subprocess.CompletedProcess[str]]


def leftovers(name: str) -> list[object]:
    """What there still is of a cluster: its folder, its processes, its mounts, its interfaces."""
    folder = base() / name
    mounts = Path("/proc/self/mounts").read_text().splitlines()
    devices = Path("/proc/net/dev").read_text().splitlines()
    found: list[object] = []
    found += processes_of(folder)
    found += [line for line in mounts if str(folder) in line]
    found += [line for line in devices if re.match(r" *(n\d+|br0):", line)]
    if folder.exists():
        found.append(folder)
    return found


def processes_of(folder: Path) -> list[int]:
    """The processes with a cluster's folder in their command line."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            pid = int(file.parent.name)
            if os.fsencode(folder) in file.read_bytes() and alive(pid):
                found.append(pid)
    return found


def command_lines(cluster: Cluster) -> str:
    return cluster.exec(["ps", "-ww", "-eo", "args"]).stdout


# ----------------------------------------------------------------------------------- hosts and jobs


def test_each_node_is_a_host_of_its_own(cluster2: Cluster) -> None:
    script = (
        "hostname; hostname -i; readlink /proc/self/ns/pid /proc/self/ns/net; "
        "cat /proc/1/cmdline | tr '\\0' ' '"
    )
    first = cluster2.node("n1", ["sh", "-c", script]).stdout.splitlines()
    second = cluster2.node("n2", ["sh", "-c", script]).stdout.splitlines()
    assert first[:2] == ["n1", "10.77.0.11"]
    assert second[:2] == ["n2", "10.77.0.12"]
    assert not set(first) & set(second)
    assert "tini" in first[-1]
    assert "tini" in second[-1]

    cluster2.node("n1", ["touch", "/dev/shm/of-n1"])
    assert "of-n1" in cluster2.node("n1", ["ls", "/dev/shm"]).stdout.split()
    assert "of-n1" not in cluster2.node("n2", ["ls", "/dev/shm"]).stdout.split()
    assert cluster2.node("n1", ["ls", "/sys/class/net"]).stdout.split() == ["docker0", "eth0", "lo"]


def test_a_job_runs_on_both_nodes_with_their_gpus_and_this_file_system(
    cluster2: Cluster, tmp_path: Path
) -> None:
    show = 'echo "$(hostname) $SLURM_PROCID $CUDA_VISIBLE_DEVICES $(pwd)"'
    srun = ["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-node=2", "--chdir", tmp_path]
    lines = cluster2.exec([*srun, "sh", "-c", show]).stdout.splitlines()
    assert sorted(lines) == [
        f"n1 0 0,1 {tmp_path}",
        f"n1 1 0,1 {tmp_path}",
        f"n2 2 0,1 {tmp_path}",
        f"n2 3 0,1 {tmp_path}",
    ]


def test_with_a_gpu_for_each_task_a_task_sees_one(cluster2: Cluster) -> None:
    show = ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    said = cluster2.exec(["srun", "-n2", "-N1", "--gpus-per-task=1", *show]).stdout
    assert len(said.split()) == 2
    assert "," not in said


def test_a_step_above_its_memory_is_killed_and_the_log_says_so(
    cluster2: Cluster, tmp_path: Path
) -> None:
    grow = "import os, time; kept = os.urandom(1) * 600_000_000; time.sleep(60)"
    script = tmp_path / "grow.sbatch"
    script.write_text(
        "#!/bin/bash\n"
        f"#SBATCH --mem=200M --output={tmp_path}/log\n"
        "set -e\n"
        f'srun python3 -c "{grow}"\n'
    )
    job = cluster2.exec(["sbatch", "--parsable", script]).stdout.strip()

    def state() -> str:
        said = cluster2.exec(["scontrol", "show", "job", job]).stdout
        return re.findall(r"JobState=(\w+)", said)[0]

    until(lambda: state() not in ("PENDING", "RUNNING", "COMPLETING"))
    assert state() == "FAILED"
    assert "exceeded memory limit" in (tmp_path / "log").read_text()


# --------------------------------------------------------------------------------------------- exec


def test_exec_keeps_folder_and_environment_and_tells_of_failure(
    cluster2: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MARK", "a b")
    said = cluster2.exec(["sh", "-c", 'pwd; echo "$MARK"; echo $0', "$(id)"]).stdout
    assert said == f"{tmp_path}\na b\n$(id)\n"
    assert cluster2.node("n2", ["cat"], input="hello").stdout == "hello"
    assert cluster2.exec(["sh", "-c", "exit 3"], check=False).returncode == 3
    failed = r"sbatch --wrap=true -p nope on head failed with exit code 1: .*partition"
    with pytest.raises(RuntimeError, match=failed):
        cluster2.exec(["sbatch", "--wrap=true", "-p", "nope"])
    with pytest.raises(ValueError, match=r"there is no node 'n9' .* it has n1, n2"):
        cluster2.node("n9", ["true"])


def test_a_late_command_is_ended_even_if_it_ignores_signals(
    cluster2: Cluster, tmp_path: Path
) -> None:
    began = tmp_path / "began"
    script = f"trap '' TERM; touch {began}; while :; do sleep 0.1; done"
    with pytest.raises(TimeoutError, match="did not end within 2 s"):
        cluster2.exec(["sh", "-c", script], timeout_s=2)
    assert began.exists()
    assert str(began) not in command_lines(cluster2)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_prefix_works_from_any_process_and_the_command_ends_with_it(
    cluster2: Cluster, how: signal.Signals
) -> None:
    argv = [*cluster2.exec_prefix, "sh", "-c", "hostname; exec sleep 98765"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"head\n"
    process.send_signal(how)
    until(lambda: "98765" not in command_lines(cluster2))
    process.communicate()


# --------------------------------------------------------------------------------- break and repair

SLURMD_PORT = 6818
CONNECT = """
import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=float(sys.argv[3]))
"""


def reaches(cluster: Cluster, start: str, end: str, timeout_s: float = 20) -> bool:
    argv = ["python3", "-c", CONNECT, end, SLURMD_PORT, timeout_s]
    return cluster.node(start, argv, check=False).returncode == 0


def test_a_node_without_its_cable_is_reached_by_nobody(breakable2: Cluster) -> None:
    assert reaches(breakable2, "n1", "n2")
    breakable2.netdown("n2")
    assert not reaches(breakable2, "n1", "n2", timeout_s=1)
    breakable2.netup("n2")
    assert reaches(breakable2, "n1", "n2")


def test_a_closed_port_is_reached_by_nobody(breakable2: Cluster) -> None:
    assert reaches(breakable2, "n1", "n2")
    breakable2.block("n2", SLURMD_PORT)
    assert not reaches(breakable2, "n1", "n2", timeout_s=1)
    breakable2.unblock("n2", SLURMD_PORT)
    assert reaches(breakable2, "n1", "n2")
    with pytest.raises(ValueError, match="port 'ssh': give a number or a range"):
        breakable2.block("n2", "ssh")


MESSAGE_BYTES = 2_000_000
RATE_BITS_PER_S = 20e6
SEND = f"""
import socket, time
peer = socket.create_connection(("n2", 5000), timeout=30)
start = time.monotonic()
peer.sendall(bytes({MESSAGE_BYTES}))
peer.recv(1)
print(time.monotonic() - start)
"""
RECEIVE = f"""
import socket
server = socket.create_server(("", 5000))
print("ready", flush=True)
peer = server.accept()[0]
left = {MESSAGE_BYTES}
while left:
    left -= len(peer.recv(min(left, 1 << 20)))
peer.sendall(b"x")
"""


def seconds_for_a_message(cluster: Cluster) -> float:
    """From n1 to n2, until n2 says that it has all of it."""
    argv = cluster.host("n2").command(["python3", "-c", RECEIVE])
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == b"ready\n"
        return float(cluster.node("n1", ["python3", "-c", SEND]).stdout)


def test_a_slow_link_takes_at_least_as_long_as_its_rate_says(breakable2: Cluster) -> None:
    wire_s = 8 * MESSAGE_BYTES / RATE_BITS_PER_S
    breakable2.slow("n2", "20mbit")
    limited_s = seconds_for_a_message(breakable2)
    breakable2.slow("n2", "off")
    free_s = min(seconds_for_a_message(breakable2) for _ in range(3))
    assert limited_s > 0.9 * wire_s
    assert limited_s > 2 * free_s


def test_a_slow_link_is_slow_at_both_ends_and_off_undoes_both(breakable2: Cluster) -> None:
    limits = breakable2.exec(["tc", "qdisc"]).stdout.count("tbf")
    breakable2.slow("n2", "1gbit")
    breakable2.slow("n2", "500kbit")
    assert "rate 500Kbit" in breakable2.node("n2", ["tc", "qdisc", "show", "dev", "eth0"]).stdout
    assert "rate 500Kbit" in breakable2.exec(["tc", "qdisc", "show", "dev", "n2"]).stdout
    breakable2.slow("n2", "off")
    assert "tbf" not in breakable2.node("n2", ["tc", "qdisc"]).stdout
    assert breakable2.exec(["tc", "qdisc"]).stdout.count("tbf") == limits
    with pytest.raises(ValueError, match="rate 'fast': write it as 100mbit"):
        breakable2.slow("n2", "fast")


def test_a_node_without_power_comes_back_as_new(breakable2: Cluster) -> None:
    (breakable2.folder / "n2/hosts").write_text("127.0.1.1 n2\n")
    assert breakable2.node("n2", ["hostname", "-i"]).stdout == "127.0.1.1\n"
    breakable2.kill("n2")
    with pytest.raises(RuntimeError, match="n2 is powered off"):
        breakable2.node("n2", ["true"])
    breakable2.boot("n2")
    assert breakable2.exec(["srun", "-w", "n2", "hostname", "-i"]).stdout == "10.77.0.12\n"


# -------------------------------------------------------------------------------------- up and down


def test_up_again_is_the_same_cluster_and_another_shape_is_refused(cluster2: Cluster) -> None:
    hosts = ("head", "n1", "n2")
    pids = [cluster2.host(name).pid for name in hosts]
    again = Cluster.up(name=cluster2.name)
    assert [again.host(name).pid for name in hosts] == pids
    refused = "is up with nodes=2, not nodes=4: take it down first, or give the new one a name"
    with pytest.raises(ValueError, match=refused):
        Cluster.up(nodes=4, name=cluster2.name)


@pytest.mark.release
@pytest.mark.parametrize("daemon", ["slurmctld", "munged"])
def test_up_starts_a_daemon_again_that_has_died_and_status_says_which(
    breakable2: Cluster, daemon: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert breakable2.dead() == []
    breakable2.exec(["pkill", "-KILL", "-x", daemon], root=True)
    until(lambda: daemon in breakable2.dead())
    assert main(["status", "--name", breakable2.name]) == 0
    said = capsys.readouterr().out
    assert f"{daemon} does not answer: `slurm/cluster up --name {breakable2.name}` starts" in said
    Cluster.up(name=breakable2.name)
    assert breakable2.dead() == []
    assert breakable2.exec(["srun", "-w", "n2", "hostname"]).stdout == "n2\n"
    # The word that the job has ended may be lost if it comes just when a daemon starts; SLURM asks
    # again after minutes, and the next tests want an empty queue.
    breakable2.exec(["scancel", "--user=root"], check=False)
    until(lambda: breakable2.exec(["squeue", "--noheader"], check=False).stdout == "")


def test_an_up_that_fails_says_why_and_keeps_the_logs(slurm: Callable[[str], str]) -> None:
    name = slurm("wrong")
    with pytest.raises(
        RuntimeError, match=r"unrecognized key: NoSuchKey; their logs: .*"
    ) as caught:
        Cluster.up(nodes=1, name=name, settings={"NoSuchKey": "1"})
    logs = Path(str(caught.value).rpartition("their logs: ")[2])
    assert "Parsing error at unrecognized key: NoSuchKey" in logs.read_text()
    assert leftovers(name) == []
    assert main(["down", "--name", name]) == 0
    assert not logs.exists()


def test_a_folder_with_a_space_is_refused(tmp_path: Path, slurm: Callable[[str], str]) -> None:
    folder = tmp_path / "two words"
    folder.mkdir()
    done = subprocess.run(
        [*CLI, "up", "1", "--name", slurm("space")],
        cwd=ROOT,
        env={**CLI_ENV, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "has a space, which slurm.conf cannot hold: set TMPDIR to a folder" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(folder.iterdir()) == []


def test_who_names_no_cluster_that_is_up_reads_which_ones_are(
    cluster2: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster2.name in names_up()
    assert main(["status", "--name", "no-such"]) == 1
    assert cluster2.name in capsys.readouterr().err.partition("; up: ")[2]
    assert jobs(["status", "--cluster", "no-such"]) == 2
    said = capsys.readouterr().err
    assert "no cluster 'no-such' is up here: choose " in said
    assert cluster2.name in said


@pytest.mark.parametrize("name", ["..", "/", "a/b", "x" * 40])
def test_down_takes_names_and_never_paths(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    (tmp_path / "kept").touch()
    (tmp_path / "temp").mkdir()
    assert main(["down", "--name", name]) == 1
    assert "cluster name" in capfd.readouterr().err
    assert (tmp_path / "kept").exists()
    assert (tmp_path / "temp").exists()


def cli(*words: str, cwd: Path | str = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLI, *words], cwd=cwd, env=CLI_ENV, capture_output=True, text=True)


def test_it_outlives_the_process_that_started_it_and_down_leaves_nothing(
    slurm: Callable[[str], str], capfd: pytest.CaptureFixture[str]
) -> None:
    name = slurm("cli")
    done = cli("up", "1", "--name", name, "--gpus", "0")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "each 4 CPUs, 16000 MiB, 0 fake GPUs" in done.stdout
    cluster = running(name)
    assert cluster is not None
    assert cluster.states() == {"n1": "idle"}
    assert leftovers(name) != []
    assert main(["exec", "--name", "no-such", "sinfo"]) == 1
    assert "no cluster 'no-such' is up" in capfd.readouterr().err
    done = cli("--name", name, "exec", "sh", "-c", "hostname; pwd; exit 4", cwd="/usr")
    assert (done.returncode, done.stdout) == (4, "head\n/usr\n")
    assert main(["down", "--name", name]) == 0
    assert leftovers(name) == []
    assert running(name) is None
    assert main(["down", "--name", name]) == 0


@pytest.mark.parametrize(
    "moment",
    ["spec.json", "head/outer", "head/ready", "n3/outer", "head/slurmctld.log", "n2/slurmd.log"],
)
def test_down_also_removes_what_a_killed_up_has_left(
    slurm: Callable[[str], str], moment: str
) -> None:
    name = slurm("half")
    up = subprocess.Popen(
        [*CLI, "up", "3", "--name", name],
        cwd=ROOT,
        env=CLI_ENV,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    until((base() / name / moment).exists, every_s=0.001)
    os.killpg(up.pid, signal.SIGKILL)
    up.wait()
    Cluster(name).down()
    assert leftovers(name) == []


def test_a_process_that_becomes_another_program_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = tmp_path / "4237"
    process.mkdir()
    (process / "cmdline").touch()
    with pytest.raises(FileNotFoundError):  # it has ended, or is a thread of the kernel
        _command_line(process)
    (process / "exe").symlink_to("/bin/sh")
    monkeypatch.setattr(time, "sleep", lambda _: (process / "cmdline").write_bytes(b"sh\0init\0"))
    assert _command_line(process) == [b"sh", b"init"]


def test_down_finds_hosts_whose_folder_is_gone(slurm: Callable[[str], str]) -> None:
    cluster = Cluster.up(nodes=1, name=slurm("lost"))
    shutil.rmtree(cluster.folder)
    cluster.down()
    assert outers(cluster.folder) == {}
    assert leftovers(cluster.name) == []


# ---------------------------------------------------------------------- what it needs, and who may


def copy_of_minislurm(folder: Path) -> None:
    """The command and what it imports of this repository, and nothing else."""
    (folder / "labcode").mkdir(parents=True)
    (folder / "slurm").mkdir()
    shutil.copy(ROOT / "slurm/cluster", folder / "slurm/cluster")
    shutil.copy(ROOT / "labcode/__init__.py", folder / "labcode/__init__.py")
    shutil.copytree(ROOT / "labcode/minislurm", folder / "labcode/minislurm")


def test_without_psutil_the_command_says_in_one_line_what_is_missing(tmp_path: Path) -> None:
    copy_of_minislurm(tmp_path / "repository")
    # -S: a Python that sees no installed package.
    python = tmp_path / "bin/python3"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "repository/slurm/cluster", "up"],
        env={"PATH": f"{python.parent}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    message = r"slurm/cluster: \S+ lacks the Python package psutil: run `make setup`, .*\n"
    assert re.fullmatch(message, done.stderr), done.stderr


ORDINARY_USER = 12345


@pytest.fixture
def as_ordinary_user() -> Iterator[Run]:
    """`as_ordinary_user(*words)`: `python -m labcode.minislurm` run as a user who is not root.

    The repository may lie where only root may look, and so may its Python: it runs a copy of the
    sources with the system's Python.
    """
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if not python:
        pytest.skip("no python3 that an ordinary user may run")
    copy = Path("/tmp", f"minislurm-copy-{os.getpid()}")
    user = ["setpriv", f"--reuid={ORDINARY_USER}", f"--regid={ORDINARY_USER}", "--clear-groups"]
    env = {
        "PATH": "/usr/bin:/bin",
        "TMPDIR": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(copy),
    }

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        argv = [*user, python, *words]
        return subprocess.run(
            argv, cwd="/tmp", env=env, capture_output=True, text=True, timeout=280
        )

    def cluster(*words: str) -> subprocess.CompletedProcess[str]:
        return run("-m", "labcode.minislurm", *words)

    try:
        copy_of_minislurm(copy)
        shutil.copytree(Path(psutil.__file__).parent, copy / "psutil")
        subprocess.run(["chmod", "-R", "a+rX", copy], check=True)
        if run("-c", "import psutil").returncode:
            pytest.skip(f"{python} cannot import the psutil of {sys.executable}")
        yield cluster
        down = cluster("down")
        assert down.returncode == 0, down.stderr
    finally:
        shutil.rmtree(copy)


@pytest.mark.release
@pytest.mark.skipif(os.geteuid() != 0, reason="all other tests run as an ordinary user already")
def test_an_ordinary_user_gets_the_same_without_root(
    slurm: Callable[[str], str], as_ordinary_user: Run
) -> None:
    up = as_ordinary_user("up", "2")
    if "refuses Linux namespaces" in up.stderr:
        pytest.skip(up.stderr.strip())
    assert (up.returncode, up.stderr) == (0, "")
    show = ["sh", "-c", "echo $(hostname) $(id -u) $CUDA_VISIBLE_DEVICES"]
    job = as_ordinary_user("exec", "srun", "-N2", "--gpus-per-node=1", *show)
    assert sorted(job.stdout.splitlines()) == ["n1 12345 0", "n2 12345 0"], job.stderr
    assert as_ordinary_user("node", "--root", "n2", "id", "-u").stdout == "0\n"
    for words in ("netdown n2", "netup n2", "slow n2 1gbit", "kill n2", "boot n2", "down"):
        done = as_ordinary_user(*words.split())
        assert (done.returncode, done.stderr) == (0, ""), words
    assert not Path(f"/tmp/labcode-slurm-{ORDINARY_USER}").exists()


def test_missing_packages_are_named_all_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for command in ("unshare", "nsenter", "hostname", "ip", "tc", "sbatch"):
        (tmp_path / command).symlink_to("/bin/true")
    monkeypatch.setattr(needs, "PATH", str(tmp_path))
    message = r"apt-get install -y --no-install-recommends munge slurmctld slurmd tini$"
    with pytest.raises(Unavailable, match=message):
        needs.check()


# ----------------------------------------------------------------------------------- emulated sites

SITE = {
    "cpus": 96,
    "memory_mb": 1_000_000,
    "gpus": 8,
    "gpu_type": "h100",
    "features": ["gpu"],
    "accounts": ["m1", "m2"],
    "qos": ["long"],
    "partitions": {
        "gpu": {"MaxTime": "24:00:00"},
        "test": {"MaxTime": "30", "AllowAccounts": "m2"},
    },
    "settings": {"Licenses": "scratch:5"},
}
ACCEPTED = [
    "-N2 --gpus-per-node=8",
    "--gres=gpu:h100:8",
    "--ntasks-per-node=8 --gpus-per-task=1",
    "-C gpu",
    "-t 24:00:00",
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


@pytest.fixture(scope="module")
def submit_to_site(slurm: Callable[[str], str]) -> Iterator[Submit]:
    """`submit_to_site(options)`: what sbatch says to a job with these options at the site."""
    with Cluster.up(2, name=slurm("h100"), **SITE) as site:

        def submit(options: str) -> subprocess.CompletedProcess[str]:
            argv = ["sbatch", "--test-only", *options.split(), "--wrap", "true"]
            return site.exec(argv, check=False)

        yield submit


@pytest.mark.parametrize("options", ACCEPTED)
def test_an_emulated_site_accepts_what_the_site_would(submit_to_site: Submit, options: str) -> None:
    done = submit_to_site(options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("options", REFUSED)
def test_an_emulated_site_refuses_what_the_site_would(submit_to_site: Submit, options: str) -> None:
    done = submit_to_site(options)
    assert done.returncode != 0
    assert REFUSED[options] in done.stderr


@pytest.mark.parametrize(
    "given, message",
    [
        ({"nodes": 0}, "nodes=0: give a whole number from 1 to 64"),
        ({"gpu_type": "h 100"}, "'h 100' is no name for SLURM"),
        ({"partitions": {}}, "a cluster needs one at least"),
        ({"partitions": {"a": {"MaxTime": "1\nSlurmUser=x"}}}, "one name, one line"),
    ],
)
def test_an_impossible_site_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spec.of(**given)
