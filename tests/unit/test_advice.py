"""Each rule on a step made to have that fault, and the same step without it.

Steps of real runs with such faults are in tests/ranks/test_profiled_runs.py.
"""

import re

import pytest
from made_traces import MadeTrace

from labcode import recipes
from labcode.perf.advice import advice
from labcode.perf.summary import summary


def step_of(**spent):
    """A step of 1000 us on a CPU: matrix products, but for what is named in us."""
    trace = MadeTrace().step(1, 0, 1000)
    at = 0
    trace.part("data", at, at := at + spent.get("data", 0))
    trace.collective("gloo:all_reduce", at, at := at + spent.get("communication", 0))
    trace.operation("aten::gelu", at, at := at + spent.get("elementwise", 0))
    begin = at
    trace.operation("aten::_fused_adamw_", at, at := at + spent.get("optimizer", 0))
    trace.part("optimizer", begin, at)
    at += spent.get("nothing", 0)
    return trace.operation("aten::mm", at, 1000)


@pytest.mark.parametrize(
    ("spent", "line"),
    {
        "data": ({"data": 410}, r"data wait 41% of the step: .* \(--loader.workers 2\)"),
        "communication": (
            {"communication": 300},
            r"exposed communication 30% of the step \(0% of it hides behind computing\): .*",
        ),
        "optimizer": ({"optimizer": 200}, r"optimizer 20% of the step: .*implementation fused.*"),
        "elementwise": ({"elementwise": 350}, r"elementwise operations 35% .*--train.compile .*"),
        "nothing": ({"nothing": 250}, r"25% of the step lies between operations, .*"),
        "all is well": ({}, r"computing 100% of the step, and nothing else stands out: .*"),
        "less than worth a line": (
            {"data": 90, "communication": 140, "optimizer": 140, "nothing": 100},
            r"computing 67% of the step, and nothing else stands out: .*",
        ),
    }.values(),
)
def test_rules_of_a_cpu(spent, line):
    (found,) = advice(step_of(**spent).trace())
    assert re.fullmatch(line, found)


def test_the_largest_share_comes_first():
    found = advice(step_of(data=150, communication=300, optimizer=200).trace())
    assert [line.partition(" ")[0] for line in found] == ["exposed", "optimizer", "data"]


def gpu_step(gap=0, kernel=10, queued=0):
    """A step of 1000 us on a GPU: kernels of some us with gaps, launched so long before."""
    trace = MadeTrace().step(1, 0, 1000)
    for start in range(6, 1000, kernel + gap):
        trace.kernel("sm90_xmma_gemm", start - 6 - queued, start, min(1000, start + kernel))
    return trace


def test_launches_are_the_bottleneck():
    (found,) = advice(gpu_step(gap=6).trace())
    begin = "GPU idle 38% of the step, 63 kernels a step of 10 us each: launches are the bottleneck"
    assert found.startswith(begin)
    assert "--train.cuda_graphs" in found


def test_a_gpu_that_is_asked_for_numbers():
    (found,) = advice(gpu_step(gap=6).wait(0, 1000).trace())
    assert found.startswith("GPU idle 38% of the step, and the host waits for it meanwhile")


def test_kernels_that_are_queued_and_do_not_run():
    (found,) = advice(gpu_step(gap=6, queued=200).trace())
    assert found.startswith("GPU idle 38% of the step, though kernels are queued")


def test_a_busy_gpu():
    (found,) = advice(gpu_step().trace())
    assert found.startswith("computing 99% of the step, and nothing else stands out")


def test_the_other_rules_on_a_gpu():
    trace = gpu_step()
    trace.entries = []
    trace.step(1, 0, 1000).part("data", 0, 200).kernel("sm90_xmma_gemm", 190, 200, 300)
    trace.kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 190, 300, 500, stream=16)
    trace.kernel("void at::native::vectorized_elementwise_kernel<4>", 190, 500, 800)
    trace.kernel("multi_tensor_apply_kernel", 190, 800, 1000)
    trace.add("optimizer", "gpu_user_annotation", 800, 1000, (0, 7))
    found = advice(trace.trace())
    assert [line.partition(" ")[0] for line in found] == [
        "elementwise",
        "optimizer",
        "exposed",
        "data",
    ]


def test_a_summary_tells_all_of_it():
    on_cpu = summary(step_of(data=410).trace())
    assert "rank 0, CPU, steps 1" in on_cpu
    assert re.search(r"\n     1 +1\.00 +59\.0% +0\.0% +41\.0% +0\.0%\n", on_cpu)
    assert "aten::mm" in on_cpu
    assert on_cpu.splitlines()[-1].startswith("-> data wait 41%")
    on_gpu = summary(gpu_step(gap=6).trace())
    assert "; 63 kernels of 9.9 us, 100% of them began as soon as they were launched" in on_gpu
    assert "stream 7: 63 kernels and copies" in on_gpu


def options_named():
    """All options that some advice names."""
    traces = [gpu_step(gap=6), step_of()]
    for reason in ("data", "communication", "optimizer", "elementwise", "nothing"):
        traces.append(step_of(**{reason: 400}))
    text = "\n".join("\n".join(advice(trace.trace())) for trace in traces)
    return sorted(set(re.findall(r"--(\w+\.\w+)", text)))


@pytest.mark.parametrize("option", options_named())
def test_every_option_that_is_named_exists(option):
    section, _, field = option.partition(".")
    config = recipes.gpt_tiny()
    assert hasattr(getattr(config, section, None), field)
