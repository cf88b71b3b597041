"""The reasons for the time of a step, on traces made by hand: each microsecond has one."""

import pytest
from made_traces import MadeTrace

from labcode.perf.breakdown import REASONS, breakdown, mean


def on_cpu():
    """A step of 100 us: data 10, computing 40, communication under way 50, of it 20 hidden."""
    trace = MadeTrace().step(4, 1000, 1100)
    trace.part("data", 1000, 1010).operation("aten::index", 1002, 1008)
    trace.part("forward", 1010, 1030).operation("aten::linear", 1010, 1030)
    trace.operation("aten::addmm", 1012, 1028)
    trace.part("backward", 1030, 1080)
    # a node of autograd that calls others and waits counts for nothing itself
    trace.operation("autograd::engine::evaluate_function: MmBackward0", 1030, 1070)
    trace.operation("aten::mm", 1030, 1050).operation("c10d::allreduce_", 1030, 1031)
    trace.collective("gloo:all_reduce", 1030, 1080)
    trace.part("optimizer", 1085, 1100)
    return trace


def test_each_microsecond_of_a_cpu_has_one_reason():
    (times,) = breakdown(on_cpu().trace())
    assert times.step == 4
    assert times.total_ms == pytest.approx(0.100)
    assert times.computing_ms == pytest.approx(0.040)
    assert times.communication_ms == pytest.approx(0.030)
    assert times.data_ms == pytest.approx(0.010)
    assert times.other_ms == pytest.approx(0.020)
    assert times.overlap == pytest.approx(0.4)
    assert times.parts_ms == pytest.approx(
        {"data": 0.010, "forward": 0.020, "backward": 0.050, "optimizer": 0.015}
    )
    assert sum(times.share(reason) for reason in REASONS) == pytest.approx(1)


def test_a_message_inside_forward_is_communication():
    trace = MadeTrace().step(1, 0, 100).part("forward", 0, 100)
    trace.operation("aten::mm", 0, 30).operation("c10d::allreduce_", 30, 32)
    trace.collective("gloo:all_reduce", 31, 70).operation("aten::mm", 70, 100)
    (times,) = breakdown(trace.trace())
    assert times.communication_ms == pytest.approx(0.040)
    assert times.computing_ms == pytest.approx(0.060)
    assert times.overlap == 0


def test_what_only_waits_in_the_range_of_that_name_is_communication():
    trace = MadeTrace().step(1, 0, 100).part("communication", 20, 60)
    trace.operation("aten::copy_", 50, 60)
    (times,) = breakdown(trace.trace())
    assert times.communication_ms == pytest.approx(0.030)
    assert times.computing_ms == pytest.approx(0.010)
    assert times.overlap is None


def test_a_part_inside_another_one_is_taken_out_of_it():
    trace = MadeTrace().step(1, 0, 100).part("forward", 0, 60).part("communication", 10, 30)
    trace.part("forward", 70, 80)
    (times,) = breakdown(trace.trace())
    assert times.parts_ms == pytest.approx({"forward": 0.050, "communication": 0.020})


def test_the_loader_of_pytorch_is_data_too():
    name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    (times,) = breakdown(MadeTrace().step(1, 0, 100).part(name, 0, 30).trace())
    assert times.data_ms == pytest.approx(0.030)


def on_gpu():
    """A step of 200 us: kernels 90, NCCL 60 of which 20 hidden, a copy 15, 45 of nothing."""
    trace = MadeTrace().step(2, 0, 200).part("data", 0, 12)
    trace.copy(0, 5, 20)
    trace.kernel("sm90_xmma_gemm_bf16bf16", 20, 30, 90)
    trace.kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 40, 70, 130, stream=16)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4>", 120, 140, 170)
    return trace


def test_each_microsecond_of_a_gpu_has_one_reason():
    (times,) = breakdown(on_gpu().trace())
    assert times.computing_ms == pytest.approx(0.090)
    assert times.communication_ms == pytest.approx(0.040)
    # the host reads for 12 us, the copy goes on to 20
    assert times.data_ms == pytest.approx(0.020)
    assert times.other_ms == pytest.approx(0.050)
    assert times.overlap == pytest.approx(20 / 60)


def test_a_gpu_that_computes_while_the_host_reads_does_not_wait_for_data():
    trace = MadeTrace().step(1, 0, 100).part("data", 0, 50).kernel("gemm", 0, 0, 40)
    (times,) = breakdown(trace.trace())
    assert times.data_ms == pytest.approx(0.010)
    assert times.computing_ms == pytest.approx(0.040)


def test_the_mean_of_two_steps():
    trace = MadeTrace().step(1, 0, 100).operation("aten::mm", 0, 60)
    trace.step(2, 100, 300).operation("aten::mm", 100, 120).part("optimizer", 280, 300)
    one = mean(breakdown(trace.trace()))
    assert one.step == 2
    assert one.total_ms == pytest.approx(0.150)
    assert one.computing_ms == pytest.approx(0.040)
    assert one.parts_ms == pytest.approx({"optimizer": 0.010})
