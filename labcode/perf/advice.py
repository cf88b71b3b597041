"""What to do about the time of a step, in words, like TensorBoard's profiler tab. No torch.

Each rule is a finding with the number that it comes from, and the option to try. A rule is as good
as its threshold: try one option at a time, and measure.

Held by: tests/unit/test_advice.py, tests/ranks/test_profiled_runs.py
"""

from typing import Any

from labcode.perf.breakdown import StepTimes, breakdown, mean
from labcode.perf.chrome_trace import Trace, read
from labcode.perf.operations import elementwise_share, launches

# a smaller share of the step is not worth a line
DATA = 0.10
COMMUNICATION = 0.15
OPTIMIZER = 0.15
IDLE = 0.15
ELEMENTWISE = 0.25
AT_ONCE = 0.5  # of the kernels began as soon as they were launched: the GPU waits for launches
HOST_WAITS = 0.5  # of the idle time the host waited for the GPU


def advice(source: Any, rank: int | None = None) -> list[str]:
    """What stands out in the recorded steps, the largest share first; never empty.

    Args:
        source: What `chrome_trace.read` takes.
        rank: Rank whose trace of a run is read.
    """
    trace = read(source, rank)
    times = mean(breakdown(trace))
    found = [
        _data(times),
        _communication(times),
        _optimizer(times, trace),
        _elementwise(trace),
        _idle_gpu(times, trace) if trace.has_gpu else _idle_cpu(times),
    ]
    lines = sorted([finding for finding in found if finding], reverse=True)
    if not lines:
        computing = f"{times.share('computing'):.0%}"
        return [
            f"computing {computing} of the step, and nothing else stands out: a narrower type "
            "(--train.dtype bfloat16) where the device has it, or more devices"
        ]
    return [line for _, line in lines]


Finding = tuple[float, str] | None  # (share of the step, what to do)


def _data(times: StepTimes) -> Finding:
    share = times.share("data")
    if share < DATA:
        return None
    return share, (
        f"data wait {share:.0%} of the step: read ahead, in more workers (--loader.workers 2)"
    )


def _communication(times: StepTimes) -> Finding:
    share = times.share("communication")
    if share < COMMUNICATION:
        return None
    hidden = "" if times.overlap is None else f" ({times.overlap:.0%} of it hides behind computing)"
    return share, (
        f"exposed communication {share:.0%} of the step{hidden}: send less often (more samples a "
        "step, --train.global_batch) or less (--train.reduce_dtype bfloat16), overlap more "
        "(smaller --parallel.bucket_mb), or cut the model along a faster link (--parallel.order)"
    )


def _optimizer(times: StepTimes, trace: Trace) -> Finding:
    share = _optimizer_ms(times, trace) / times.total_ms
    if share < OPTIMIZER:
        return None
    return share, (
        f"optimizer {share:.0%} of the step: one kernel for many weights "
        "(--optim.implementation fused), or more samples a step"
    )


def _optimizer_ms(times: StepTimes, trace: Trace) -> float:
    if not trace.has_gpu:
        return times.parts_ms.get("optimizer", 0.0)
    ranges = [event for event in trace.of("gpu_user_annotation") if event.name == "optimizer"]
    return sum(event.duration_us for event in ranges) / 1e3 / len(trace.steps())


def _elementwise(trace: Trace) -> Finding:
    share = elementwise_share(trace)
    if share < ELEMENTWISE:
        return None
    where = "" if trace.has_gpu else ", which gains most on a GPU"
    return share, (
        f"elementwise operations {share:.0%} of the step, each of which reads and writes all of "
        f"its memory: let the compiler fuse them (--train.compile model){where}"
    )


def _idle_gpu(times: StepTimes, trace: Trace) -> Finding:
    share = times.share("other")
    kept = launches(trace)
    if share < IDLE or kept is None:
        return None
    idle = f"GPU idle {share:.0%} of the step"
    if kept.host_waits >= HOST_WAITS:
        return share, (
            f"{idle}, and the host waits for it meanwhile: it is asked for numbers too often "
            "(.item(), .cpu(), print of a tensor)"
        )
    if kept.at_once is not None and kept.at_once < AT_ONCE:
        return share, f"{idle}, though kernels are queued: look at the streams in Perfetto"
    return share, (
        f"{idle}, {kept.kernels / len(trace.steps()):.0f} kernels a step of "
        f"{kept.kernel_us:.0f} us each: launches are the bottleneck (--train.cuda_graphs, "
        "--train.compile model, or a larger --train.micro_batch)"
    )


def _idle_cpu(times: StepTimes) -> Finding:
    share = times.share("other")
    if share < IDLE:
        return None
    return share, (
        f"{share:.0%} of the step lies between operations, in Python and in autograd: larger "
        "operations (more samples in a micro-batch, --train.micro_batch)"
    )
