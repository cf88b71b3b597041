"""Peaks of devices, and the utilisation that follows from them."""

import pytest

from labcode import hardware


def test_mfu_is_a_fraction_of_a_known_peak_and_never_a_guess():
    assert hardware.mfu(989e12 / 2, "NVIDIA H200", "bfloat16") == pytest.approx(0.5)
    assert hardware.mfu(1e12, "NVIDIA H200", "int4") is None
    # a slower card than the H100 of the table
    assert hardware.mfu(1e12, "NVIDIA H100 PCIe", "bfloat16") is None
    assert all(device.source for device in hardware.DEVICES.values())
