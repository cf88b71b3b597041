"""The checklist for DDP: its sections exist, PyTorch has its arguments, its numbers hold."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from labcode.perf.cluster import load_cluster
from labcode.perf.estimate import estimate
from labcode.perf.settings import Settings
from labcode.perf.transformer import load_model
from labcode.topology import GridShape
from tools import course_map

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "book" / "guide" / "ddp.md").read_text(encoding="utf-8")
WORK_S = 0.046  # of GPT-2 with 16 sequences on an H100, as the planner has it
ETHERNET_BYTES_PER_S = 25e9 / 8
GRADIENT_BYTES = 4 * 124.4e6


def test_every_section_that_it_names_exists():
    known = {}
    for lesson in course_map.lessons():
        known[lesson.number] = {section.number for section in lesson.sections}
    named = re.findall(r"\b(\d\db?) §(\d+(?:(?:, | and | to )\d+\b(?! §))*)", PAGE)
    assert len(named) > 40
    for lesson, sections in named:
        assert {int(number) for number in re.findall(r"\d+", sections)} <= known[lesson], lesson


def test_ddp_has_the_arguments_and_has_no_timeout():
    arguments = set(inspect.signature(DistributedDataParallel.__init__).parameters)
    assert {"device_ids", "static_graph", "find_unused_parameters", "broadcast_buffers"} < arguments
    assert "gradient_as_bucket_view" in arguments
    assert "timeout" not in arguments
    if torch.__version__ >= "2.13":
        assert "forward_sync_buffers" in arguments


def rows():
    """{GPUs: [A, B, C]} of the table of efficiencies, in per cent."""
    found = {}
    for line in re.findall(r"(?m)^\| \d+ \|.*$", PAGE):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found[int(cells[0])] = [int(cell.removesuffix(" %")) for cell in cells[2:]]
    return found


@pytest.mark.parametrize("gpus", [2, 4, 8, 16])
def test_the_efficiencies_are_computed_as_it_says(gpus):
    steps_s = []
    for dp in (1, gpus):
        settings = Settings(global_batch=16 * dp, micro_batch=16)
        one = estimate(
            load_model("gpt2-124m"), GridShape(dp=dp), load_cluster("dgx-h100"), settings
        )
        steps_s.append(one.step_s)
    assert steps_s[0] == pytest.approx(WORK_S, rel=0.01)
    message_s = 2 * (gpus - 1) / gpus * GRADIENT_BYTES / ETHERNET_BYTES_PER_S
    expected = [
        steps_s[0] / steps_s[1],
        WORK_S / (WORK_S + message_s),
        16 * WORK_S / (16 * WORK_S + message_s),
    ]
    assert rows()[gpus] == [round(100 * share) for share in expected]
