"""Lesson 16: one step of training with a recording of its memory, by what it is for."""

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labcode.config import GPTConfig
from labcode.measure.memory_marks import MemoryMarks
from labcode.measure.ranges import StepRanges
from labcode.models import gpt
from labcode.perf.memory_timeline import MemoryTimeline, memory_timeline


def recorded_step(
    model: torch.nn.Module, micro_batch: int, num_micro_batches: int = 1
) -> MemoryTimeline:
    """The memory of a GPT over a step on random tokens: the second one, when AdamW has its moments.

    Held by: tests/unit/test_l16_labs.py
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ranges = StepRanges()
    _step(model, optimizer, ranges, 1, 1)
    marks = MemoryMarks(model.parameters(), optimizer)
    ranges.marked = True
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        record_function("ProfilerStep#2"),
        marks.watch(),
    ):
        _step(model, optimizer, ranges, micro_batch, num_micro_batches)
    return memory_timeline(recorded)


def list_changes(timeline: MemoryTimeline) -> list[tuple[str, int]]:
    """A step's memory as a list of (purpose, bytes), in order; what is given back is negative.

    It begins with what was there before the step.
    """
    found = [(name, used[0]) for name, used in timeline.used_bytes.items() if used[0]]
    for place in range(1, len(timeline.time_ms)):
        for name, used in timeline.used_bytes.items():
            num_bytes = used[place] - used[place - 1]
            if num_bytes:
                found.append((name, num_bytes))
    return found


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ranges: StepRanges,
    micro_batch: int,
    num_micro_batches: int,
) -> None:
    config: GPTConfig = model.config  # type: ignore[assignment]
    assert config.vocab_size is not None
    for _ in range(num_micro_batches):
        tokens = torch.randint(config.vocab_size, (micro_batch, config.context_length + 1))
        with ranges("forward"):
            loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:]) / num_micro_batches
        with ranges("backward"):
            loss.backward()
        del loss
    with ranges("optimizer"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
