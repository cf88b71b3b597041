"""The rates of hardware that lessons say are those of one table, or have their source here."""

import re
from pathlib import Path

import jupytext
import pytest

from labcode.perf.cluster import cluster_names, gpu_names, load_cluster, load_gpu
from labcode.runtime import hardware

ROOT = Path(__file__).resolve().parents[2]
LESSONS = sorted((ROOT / "solutions").glob("*.py"))
FLOPS = re.compile(r"([0-9][0-9,.]*) TFLOP/s")
BYTES = re.compile(r"([0-9][0-9,.]*) GB/s")
NAMES = re.compile(r"NVLink|InfiniBand|A100|H100|H200|B200|NVL72")

# {lesson: {number: where it is from}}, for what is no rate of a device in the table
OTHER_FLOPS = {
    "00": {141: "Narayanan et al. 2021, table 2"},
    "02": {500: "the worked product of lesson 00"},
    "03": {
        827: "labcode/assets/on_a_gpu.json: the large product",
        190: "labcode/assets/on_a_gpu.json: attention",
    },
    "03b": {
        827: "labcode/assets/on_a_gpu.json: the large product",
        52: "labcode/assets/on_a_gpu.json: the large product in float32",
    },
    "15": {153: "Narayanan et al. 2021, table 2"},
    "20": {230: "0.869 * 0.85 * 312, the rate of the planner's products"},
    "23": {827: "labcode/assets/on_a_gpu.json: the large product"},
}
DATASHEETS = {  # GB/s each way or in all: NVIDIA's datasheets of A100, H100, GB200 NVL72
    300: "NVLink of an A100, each way",
    450: "NVLink of an H100, each way",
    900: "NVLink of an H100 both ways together, of a GB200 each way",
}
OTHER_BYTES = {
    "08": {381.8: "Bekman, network: four nodes of 8 B200"},
    "09": {400: "eight adapters of 50 GB/s"},
    "10": {1555: "memory of an A100", 2039: "memory of an A100"},
    "14": {48: "46 to 48 GB/s of 50, NVIDIA's developers in nccl-tests"},
    "16": {
        31.5: "PCIe 4.0 with 16 lanes, each way, after its encoding",
        63: "PCIe 5.0 with 16 lanes, each way, after its encoding",
        25: "nvbandwidth issue 53: an A100 and its host, either way alone",
    },
}


def number(text):
    return float(text.rstrip(",.").replace(",", ""))


def prose(source):
    """Sentences of a lesson's text cells."""
    for cell in jupytext.reads(source, fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            for paragraph in cell.source.split("\n\n"):
                yield from re.split(r"(?<=[.?!]) ", " ".join(paragraph.split()))


def rates_of_gpus():
    """TFLOP/s of the table: peaks, large products, layers, attention."""
    found = set()
    for device in hardware.DEVICES.values():
        found |= {round(peak / 1e12) for peak in device.peak_flops_per_s.values()}
    for name in gpu_names():
        gpu = load_gpu(name)
        for dtype, peak in gpu.peak_flops_per_s.items():
            for shares in (gpu.matmul_share, gpu.layer_share):
                if dtype in shares:
                    found.add(round(peak * shares[dtype] / 1e12))
            for share in gpu.attention_share.values():
                found.add(round(peak * share / 1e12))
    return found


def rates_of_links():
    """GB/s of the table's links, inside and between nodes."""
    found = set(DATASHEETS)
    for name in cluster_names():
        cluster = load_cluster(name)
        for link in (cluster.inside, cluster.between):
            found.add(round(link.beta_bytes_per_s / 1e9, 2))
    return found


@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_a_rate_in_prose_is_that_of_the_table_or_has_its_source(path):
    lesson = path.stem.partition("_")[0]
    flops = rates_of_gpus() | set(OTHER_FLOPS.get(lesson, ()))
    links = rates_of_links() | set(OTHER_BYTES.get(lesson, ()))
    unknown = []
    for sentence in prose(path.read_text(encoding="utf-8")):
        for text in FLOPS.findall(sentence):
            if number(text) not in flops:
                unknown.append(f"{text} TFLOP/s: {sentence}")
        if NAMES.search(sentence):
            for text in BYTES.findall(sentence):
                if number(text) not in links:
                    unknown.append(f"{text} GB/s: {sentence}")
    assert unknown == []


def test_another_number_is_found():
    assert 396 not in rates_of_gpus() and 594 not in rates_of_gpus()
    assert {312, 989, 692} <= rates_of_gpus()
    assert {365, 50, 220, 6.25} <= rates_of_links()
