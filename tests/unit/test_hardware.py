"""Peaks of devices, and the utilisation that follows from them."""

import platform

import pytest

from labcode import hardware


def test_mfu_is_a_fraction_of_a_known_peak_and_never_a_guess():
    assert hardware.mfu(989e12 / 2, "NVIDIA H200", "bfloat16") == pytest.approx(0.5)
    assert hardware.mfu(1e12, "NVIDIA H200", "int4") is None
    # a slower card than the H100 of the table
    assert hardware.mfu(1e12, "NVIDIA H100 PCIe", "bfloat16") is None
    # tensor cores, eight times as fast as without them
    assert hardware.mfu(78e12, "NVIDIA A100-SXM4-80GB", "tf32") == pytest.approx(0.5)
    assert all(device.source for device in hardware.DEVICES.values())


def test_the_name_of_the_cpu_is_what_linux_calls_it_and_elsewhere_what_python_does(tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU @ 2.60GHz\nmodel\t\t: 167\n")
    assert hardware.cpu_name(cpuinfo) == "Some CPU @ 2.60GHz"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert hardware.cpu_name(cpuinfo) in (platform.processor(), platform.machine())
    assert hardware.cpu_name(tmp_path / "none")
