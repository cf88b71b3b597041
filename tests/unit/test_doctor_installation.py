"""`python -m labcode.doctor`: each fault is planted, and found; what is right is not blamed."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import run

from labcode.doctor import __main__ as doctor
from labcode.doctor import machine, software
from labcode.doctor.checked import RIGHT, WARNING, WRONG
from labcode.doctor.variables import check_variables

INTERFACES = ("lo", "eth0")


def versions(**installed):
    return lambda package: installed.get(package)


# ---- software


def test_a_python_that_is_too_old_is_wrong():
    assert software.check_python("3.10.14", ">=3.11").level == WRONG
    assert software.check_python("3.13.0rc1", ">=3.11").level == RIGHT


def test_packages_are_compared_with_what_the_project_asks_for():
    asked = ("torch>=2.11,<2.16", "numpy", "absent; platform_system == 'Plan9'")
    assert software.check_packages(asked, versions(torch="2.13.0+cpu", numpy="2")).level == RIGHT
    old = software.check_packages(asked, versions(torch="2.4.1", numpy="2"))
    assert old.level == WRONG and "torch 2.4.1 is not <2.16,>=2.11" in old.found
    missing = software.check_packages(asked, versions(torch="2.13.0"))
    assert missing.level == WRONG and missing.found == "numpy is not installed"
    assert "pip install" in missing.cure


def test_what_is_really_installed_is_what_the_project_asks_for():
    wanted = software.wanted()
    assert any(text.startswith("torch>=") for text in wanted.packages)
    assert software.check_packages(wanted.packages).level == RIGHT
    with_one_more = (*wanted.packages, "no-such-package-of-labcode")
    assert "no-such-package-of-labcode" in software.check_packages(with_one_more).found


def test_a_wheel_without_pyproject_asks_for_the_same(tmp_path):
    of_wheel = software.wanted(tmp_path)
    assert of_wheel.python == software.wanted().python
    assert {"weather", "dali", "hf"} <= set(of_wheel.extras)
    assert any(text.startswith("torch") for text in of_wheel.packages)
    assert not any("xarray" in text for text in of_wheel.packages)


def test_an_extra_that_is_there_in_part_is_a_warning():
    extras = {"weather": ("xarray", "zarr>=3"), "hf": ("transformers",), "dali": ("dali",)}
    found = software.check_extras(extras, versions(xarray="1", zarr="2.9", transformers="5"))
    assert found.level == WARNING and "weather (zarr 2.9 is not >=3)" in found.found
    assert "there: hf; not installed: dali" in found.found and "[weather]" in found.cure
    assert software.check_extras(extras, versions()).level == RIGHT


def test_torch_that_cannot_be_imported_is_wrong(tmp_path, monkeypatch):
    assert software.check_torch().level == RIGHT
    (tmp_path / "torch_without_its_library.py").write_text("raise OSError('libc10.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("no_such_torch", "torch_without_its_library"):
        found = software.check_torch(module)
        assert found.level == WRONG and f"import {module} fails" in found.found


@pytest.mark.parametrize(
    ("driver_gpus", "torch_gpus", "for_cuda", "level", "words"),
    [
        (0, 0, False, RIGHT, "over gloo"),
        (1, 1, True, RIGHT, "--parallel.share_gpus"),
        (4, 2, True, RIGHT, "2 GPUs of 4"),
        (2, 0, False, WRONG, "built for CPUs alone"),
        (2, 0, True, WRONG, "torch sees none"),
    ],
)
def test_gpus_that_torch_does_not_see_are_wrong(driver_gpus, torch_gpus, for_cuda, level, words):
    found = software.check_devices(driver_gpus, torch_gpus, for_cuda)
    assert found.level == level and words in found.found


def test_two_real_ranks_all_reduce():
    found = software.check_two_ranks()
    assert found.level == RIGHT and "all-reduce of 1.00 MiB over " in found.found, str(found)


@pytest.mark.release
def test_ranks_that_cannot_talk_are_wrong(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    found = software.check_two_ranks()
    assert found.level == WRONG and "no interface 'nosuch0'" in found.found


# ---- the machine


def test_an_occupied_port_is_a_warning_only_where_jobs_of_several_nodes_run():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        found = machine.check_master_port(True, port)
        assert found.level == WARNING and f"somebody listens at {port}" in found.found
        assert "--master-port" in found.cure
        found = machine.check_master_port(False, port)
        assert found.level == RIGHT and f"somebody listens at {port}" in found.found
    assert machine.check_master_port(True, port).level == RIGHT


def test_torchrun_takes_the_port_for_several_nodes_only(monkeypatch):
    launched = []
    monkeypatch.setattr(
        run, "elastic_launch", lambda config, entrypoint: lambda *args: launched.append(config)
    )
    several = "--nnodes=2 --node-rank=0 --master-addr=node1"
    for words in ("--standalone", several, f"{several} --master-port=1234"):
        run.run(run.parse_args([*words.split(), "--nproc-per-node=1", "x.py"]))
    endpoints = [config.rdzv_endpoint for config in launched]
    assert endpoints == ["localhost:0", f"node1:{machine.TORCHRUN_PORT}", "node1:1234"]


def test_a_host_that_cannot_be_bound_or_resolved_is_wrong():
    assert machine.check_ports().level == RIGHT
    for host in ("203.0.113.1", "no-such-host.invalid"):
        found = machine.check_ports(host)
        assert found.level == WRONG and f"{host} cannot be reached" in found.found


def test_a_host_without_loopback_is_wrong():
    code = "from labcode.doctor.machine import check_ports; print(check_ports())"
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no network namespace can be made here: {done.stderr.strip()}")
    assert done.stdout.startswith(WRONG) and "cannot be reached" in done.stdout


def test_the_host_name_must_lead_here_and_from_other_nodes_too():
    unknown = machine.check_host_name("no-such-host.invalid", several_nodes=False)
    assert unknown.level == WARNING and "does not resolve" in unknown.found
    assert machine.check_host_name("127.0.0.1", several_nodes=False).level == RIGHT
    loopback = machine.check_host_name("127.0.0.1", several_nodes=True)
    assert loopback.level == WARNING and "other nodes cannot reach" in loopback.found
    strange = machine.check_host_name("203.0.113.1", several_nodes=True)
    assert strange.level == WARNING and "no address of this machine" in strange.found


@pytest.fixture
def full_disk(tmp_path):
    """A disk of 1 MiB that is full; only root can mount one."""
    folder = tmp_path / "full"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        (folder / "taken").write_bytes(bytes(900_000))
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_a_full_disk_and_full_shared_memory_are_wrong(full_disk):
    disk = machine.check_output(full_disk / "runs" / "deep")
    assert disk.level == WRONG and "No space left" in disk.found
    shared = machine.check_shared_memory(full_disk)
    assert shared.level == WRONG and "No space left" in shared.found
    assert [path.name for path in full_disk.iterdir()] == ["taken"]


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path):
    assert machine.check_output(tmp_path / "runs").level != WRONG
    assert not list(tmp_path.iterdir())
    (tmp_path / "runs").write_text("a file")
    assert "is a file" in machine.check_output(tmp_path / "runs").found
    if sys.platform == "linux":
        assert "cannot be written" in machine.check_output(Path("/proc/runs")).found
        assert machine.check_output(Path("/proc/runs")).level == WRONG


def test_slurm_in_part_or_without_an_answer_is_found(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    none = machine.check_slurm(machine.find_cluster())
    assert none.level == RIGHT and "no sinfo, no sbatch" in none.found
    (tmp_path / "sbatch").symlink_to(sys.executable)
    half = machine.check_slurm(machine.find_cluster())
    assert half.level == WARNING and "sinfo is not" in half.found
    (tmp_path / "sinfo").symlink_to(sys.executable)
    script = tmp_path / "scontrol"
    script.write_text(
        "#!/bin/sh\necho 'Unable to contact slurm controller (connect)' >&2\nexit 1\n"
    )
    script.chmod(0o755)
    mute = machine.check_slurm(machine.find_cluster())
    script.write_text(
        "#!/bin/sh\n"
        "echo 'scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host' >&2\n"
        "echo 'scontrol: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    idle = machine.check_slurm(machine.find_cluster())
    assert idle.level == RIGHT and "but no cluster" in idle.found
    assert mute.level == WRONG and "Unable to contact" in mute.found


# ---- variables


@pytest.mark.parametrize(
    ("env", "level", "words"),
    [
        ({"NCCL_DEBUG": "INFO"}, WARNING, "NCCL_DEBUG=INFO"),
        ({"NCCL_P2P_DISABLE": "1"}, WARNING, "slowly"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, WARNING, "collective"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, WARNING, "flight recorder"),
        ({"PYTHONOPTIMIZE": "1"}, WARNING, "asserts are gone"),
        ({"OMP_NUM_THREADS": "many"}, WRONG, "no number of threads"),
        ({"OMP_NUM_THREADS": "0"}, WRONG, "no number of threads"),
        ({"OMP_NUM_THREADS": "64"}, WARNING, "64: each rank"),
        ({"GLOO_SOCKET_IFNAME": "lo,ib0"}, WRONG, "no interface ib0, but lo, eth0"),
        ({"NCCL_SOCKET_IFNAME": "=eth"}, WRONG, "no interface eth, but"),
        ({"WORLD_SIZE": "4", "RANK": "0"}, WRONG, "RANK=0, WORLD_SIZE=4"),
        ({"HTTP_PROXY": "http://proxy:3128", "no_proxy": "localhost"}, WARNING, "NO_PROXY"),
    ],
)
def test_a_variable_that_bites_is_named(env, level, words):
    (found,) = check_variables(env, INTERFACES, num_cores=8)
    assert found.level == level and words in found.found and found.cure


def test_what_may_be_set_is_not_blamed():
    env = {
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_DISABLE": "0",
        "OMP_NUM_THREADS": "2,1",
        "GLOO_SOCKET_IFNAME": "lo,eth0",
        "NCCL_SOCKET_IFNAME": "eth",
        "https_proxy": "http://proxy:3128",
        "NO_PROXY": "localhost, 127.0.0.1,.example.org",
    }
    (found,) = check_variables(env, INTERFACES, num_cores=8)
    assert found.level == RIGHT
    (found,) = check_variables({"NCCL_SOCKET_IFNAME": "^docker,lo"}, INTERFACES, num_cores=8)
    assert found.level == RIGHT


# ---- the command


def test_the_command_prints_a_line_for_each_check_and_ends_with_1_if_one_is_wrong(
    tmp_path, capsys, monkeypatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert doctor.main(["--no-ranks", "--out", str(tmp_path / "file")]) == 1
    lines = capsys.readouterr().out.splitlines()
    wrong = [line for line in lines if line.startswith(WRONG)]
    assert any("nosuch0" in line for line in wrong)
    assert any("is a file" in line for line in wrong)
    assert lines[-1].endswith(f" with a warning, {len(wrong)} wrong")
    assert {line.split()[1] for line in lines[:-1]} >= {"python", "packages", "disk", "slurm"}


def test_a_machine_on_which_nothing_is_wrong_gives_0(tmp_path):
    found = list(doctor.examine(tmp_path, {}, with_ranks=False))
    assert all(checked.level != WRONG or checked.name == "slurm" for checked in found), found
    assert len(found) == 12


def test_a_package_that_the_doctor_itself_needs_is_named_in_one_line(tmp_path):
    (tmp_path / "psutil.py").write_text("raise ModuleNotFoundError('gone', name='psutil')")
    path = os.pathsep.join([str(tmp_path), str(software.CHECKOUT)])
    done = subprocess.run(
        [sys.executable, "-m", "labcode.doctor", "--no-ranks", "--out", str(tmp_path)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and not done.stderr
    assert "psutil is not installed" in done.stdout and "right    disk" in done.stdout
