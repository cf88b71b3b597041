"""Peaks of devices, and the utilisation that follows from them."""

import platform

import psutil
import pytest

from labcode.runtime import hardware


def test_mfu_is_a_fraction_of_a_known_peak_and_never_a_guess():
    assert hardware.mfu(989e12 / 2, "NVIDIA H200", "bfloat16") == pytest.approx(0.5)
    assert hardware.mfu(1e12, "NVIDIA H200", "int4") is None
    # a slower card than the H100 of the table
    assert hardware.mfu(1e12, "NVIDIA H100 PCIe", "bfloat16") is None
    # tensor cores, eight times as fast as without them
    assert hardware.mfu(78e12, "NVIDIA A100-SXM4-80GB", "tf32") == pytest.approx(0.5)
    assert all(device.source for device in hardware.DEVICES.values())


@pytest.mark.parametrize(
    ("name", "flops_per_s"),
    [
        ("Tesla V100-SXM2-32GB", 7.8e12),  # its tensor cores know no float64
        ("NVIDIA A100-SXM4-80GB", 19.5e12),
        ("NVIDIA H100 80GB HBM3", 67e12),
        ("NVIDIA H200", 67e12),
        ("AMD Instinct MI300X", 163.4e12),
    ],
)
def test_the_peak_in_float64_is_that_of_the_units_that_multiply_matrices(name, flops_per_s):
    assert hardware.mfu(flops_per_s, name, "float64") == pytest.approx(1.0)


def test_the_name_of_the_cpu_is_what_linux_calls_it_and_elsewhere_what_python_does(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.60GHz\nmodel\t\t: 167\n")
    assert hardware.cpu_name(cpuinfo) == "Some CPU @ 2.60GHz"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert hardware.cpu_name(cpuinfo) in (platform.processor(), platform.machine())
    assert hardware.cpu_name(tmp_path / "none")


# ---- what this process may use


def cgroups(monkeypatch, tmp_path, own, files):
    """This process is in the groups `own`, as /proc/self/cgroup says; their files have contents."""
    tree = tmp_path / "cgroup"
    for name, content in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(content)
    if own is not None:
        (tmp_path / "own").write_text(own)
    monkeypatch.setattr(hardware, "CGROUPS", tree)
    monkeypatch.setattr(hardware, "OWN_CGROUPS", tmp_path / "own")


RAM = psutil.virtual_memory().total
NESTED = "0::/system.slice/job_7/step_0"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        (
            NESTED,
            {
                "memory.max": "max",
                "system.slice/memory.max": "9000",
                "system.slice/job_7/memory.max": "5000\n",
                "system.slice/job_7/step_0/memory.max": "max",
            },
            5000,
        ),
        (
            "9:name=systemd:/x\n4:cpu,memory:/x/y\n0::/",
            {"memory/x/y/memory.limit_in_bytes": "7000", "memory/x/memory.limit_in_bytes": "??"},
            7000,
        ),
        ("0::/a/group/of/another/container", {"memory.max": "6000"}, 6000),
        ("0::/", {"memory.max": "max"}, RAM),
        ("", {}, RAM),
        (None, {}, RAM),
    ],
)
def test_the_machine_has_its_ram_or_what_its_cgroups_allow_and_its_swap(
    tmp_path, monkeypatch, own, files, limit
):
    cgroups(monkeypatch, tmp_path, own, files)
    assert hardware.memory_bytes() == limit + psutil.swap_memory().total


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            NESTED,
            {
                "system.slice/job_7/memory.max": "5000",
                "system.slice/job_7/memory.current": "4000\n",
                "system.slice/job_7/memory.stat": "anon 1000\nactive_file 700\ninactive_file 800\n",
                "system.slice/job_7/step_0/memory.max": "4500",
                "system.slice/job_7/step_0/memory.current": "100",
            },
        ),
        (
            "4:memory:/x",
            {
                "memory/x/memory.limit_in_bytes": "5000",
                "memory/x/memory.usage_in_bytes": "4000",
                "memory/x/memory.stat": "active_file 1\ntotal_active_file 1500\n",
            },
        ),
    ],
)
def test_the_fullest_cgroup_says_what_is_free_and_files_that_are_kept_in_memory_count_as_free(
    tmp_path, monkeypatch, own, files
):
    cgroups(monkeypatch, tmp_path, own, files)
    assert hardware.free_memory_bytes() == 5000 - (4000 - 1500)


def test_a_cgroup_that_uses_more_than_it_may_has_nothing_free(tmp_path, monkeypatch):
    cgroups(monkeypatch, tmp_path, "0::/", {"memory.max": "10", "memory.current": "11"})
    assert hardware.free_memory_bytes() == 0
