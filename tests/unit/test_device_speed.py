"""The rate of a large matrix product, which is what a CPU has in place of a datasheet."""

import time

import torch

from labcode.measure import device_speed

CPU = torch.device("cpu")


def test_the_rate_is_that_of_the_product_and_is_measured_once():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    first = device_speed.matmul_flops_per_s(CPU, torch.float32)
    assert 1e8 < first < 1e15
    assert torch.equal(torch.rand(4), expected), "the generator of the process was used"
    assert device_speed.matmul_flops_per_s(CPU, torch.float32) == first
    assert device_speed.matmul_flops_per_s(CPU, torch.float64) != first


def test_the_median_leaves_out_the_first_time_and_an_outlier():
    waits = iter([0.2, 0.01, 0.2, 0.01, 0.01, 0.2])
    found = device_speed.median_s(CPU, lambda: time.sleep(next(waits)), repeats=5)
    assert 0.01 <= found < 0.2
    assert next(waits, None) is None


def test_the_three_numbers_of_a_device_are_those_of_a_computer():
    speed = device_speed.device_speed(CPU, torch.float32)
    assert speed.flops_per_s == device_speed.matmul_flops_per_s(CPU, torch.float32)
    assert 1e8 < speed.bytes_per_s < 1e13
    assert 1e-7 < speed.launch_s < 1e-2
