"""Top operations by their own time, and how a GPU was kept busy, on traces made by hand."""

import pytest
from made_traces import MadeTrace

from labcode.perf.operations import elementwise_share, launches, top_operations


def test_an_operation_has_the_time_that_it_does_not_spend_in_others():
    trace = MadeTrace().step(1, 0, 100)
    trace.operation("aten::linear", 0, 50).operation("aten::addmm", 10, 40)
    trace.operation("aten::copy_", 12, 14).operation("aten::addmm", 60, 80)
    trace.operation("aten::addmm", 200, 300)  # after the step
    found = top_operations(trace.trace())
    assert [(one.name, one.calls) for one in found] == [
        ("aten::addmm", 2),
        ("aten::linear", 1),
        ("aten::copy_", 1),
    ]
    assert [one.self_ms for one in found] == pytest.approx([0.048, 0.020, 0.002])
    assert [one.share for one in found] == pytest.approx([0.48, 0.20, 0.02])
    assert len(top_operations(trace.trace(), rows=1)) == 1


def test_elementwise_operations_without_those_of_the_optimizer():
    trace = MadeTrace().step(1, 0, 100).part("optimizer", 80, 100)
    trace.operation("aten::mm", 0, 30).operation("aten::gelu", 30, 50)
    trace.operation("aten::add_", 50, 60).operation("aten::mul_", 80, 100)
    assert elementwise_share(trace.trace()) == pytest.approx(0.30)


def test_elementwise_kernels():
    trace = MadeTrace().step(1, 0, 100)
    trace.add("optimizer", "gpu_user_annotation", 80, 100, (0, 7))
    trace.kernel("sm90_xmma_gemm", 0, 0, 30)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4, GeluFunctor>", 10, 30, 50)
    trace.kernel("void at::native::multi_tensor_apply_kernel_elementwise", 60, 80, 100)
    assert elementwise_share(trace.trace()) == pytest.approx(0.20)


def test_streams_and_launches_of_a_gpu():
    trace = MadeTrace().step(1, 0, 1000)
    for start in range(0, 600, 100):
        trace.kernel("small", start, start + 10, start + 20)  # 5 us after its launch returned
    trace.kernel("queued", 600, 700, 800)
    trace.kernel("ncclDevKernel_AllGather_RING_LL", 600, 750, 900, stream=16)
    trace.wait(900, 960)
    found = launches(trace.trace())
    assert found.kernels == 8
    assert found.kernel_us == pytest.approx((60 + 100 + 150) / 8)
    assert found.idle == pytest.approx(1 - 0.060 - 0.200)
    assert found.at_once == pytest.approx(6 / 7)
    assert found.host_waits == pytest.approx(60 / 740)
    assert found.by_stream[7] == (7, pytest.approx(0.160), pytest.approx(0.160))
    assert found.by_stream[16] == (1, pytest.approx(0.150), pytest.approx(0.150))


def test_without_a_gpu_there_are_no_launches():
    assert launches(MadeTrace().step(1, 0, 10).operation("aten::mm", 0, 10).trace()) is None
