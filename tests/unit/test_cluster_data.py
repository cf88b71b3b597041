"""GPUs and clusters as data: every number has a source, what is unknown stays unknown."""

import csv

import pytest

from labcode.perf import alpha_beta
from labcode.perf.cluster import cluster_names, gpu_names, load_cluster, load_gpu
from labcode.perf.transformer import HARDWARE_DATA
from labcode.runtime import hardware

MINE = """\
[mine]
gpu = "a100-80gb"
gpus_per_node = 4
inside_GB_per_s = 220
inside_latency_us = 6
between_GB_per_s = 12.5
between_latency_us = 7
source = "two 100 Gb/s adapters a node"
"""


def test_all_that_ships_can_be_read_and_says_where_it_is_from():
    assert {"v100-32gb", "a100-80gb", "h100-80gb", "h200", "b200", "mi300x"} <= {*gpu_names()}
    for name in gpu_names():
        assert load_gpu(name).source
    for name in cluster_names():
        assert load_cluster(name).source
    for name in ("published_runs.csv", "collective_bandwidth.csv"):
        with (HARDWARE_DATA / name).open(newline="") as file:
            assert all(row["source"] for row in csv.DictReader(file))


def test_the_peaks_are_those_of_the_one_table():
    gpu = load_gpu("a100-80gb")
    device = hardware.find("NVIDIA A100-SXM4-80GB")
    assert device is not None
    assert gpu.peak("bfloat16") == device.peak_flops_per_s["bfloat16"]
    assert gpu.matmul_flops_per_s("bfloat16") == pytest.approx(271.2e12, rel=1e-3)
    assert load_gpu("h100-80gb").matmul_flops_per_s("fp8") == pytest.approx(1402.6e12, rel=1e-3)


@pytest.mark.parametrize(
    ("cluster", "hardware_name", "gpus"),
    [
        ("selene", "A100 8xNVLink3", 8),
        ("b200-efa", "B200 8xNVLink5 + 8x400Gb EFAv4", 8),
    ],
)
def test_the_links_are_fitted_to_the_published_readings(cluster, hardware_name, gpus):
    sizes = []
    times = []
    with (HARDWARE_DATA / "collective_bandwidth.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if row["hardware"] != hardware_name or int(row["gpus"]) != gpus:
                continue
            size = float(row["size_bytes"])
            if size < 1e6:
                continue
            sizes.append(size)
            sent = alpha_beta.bytes_sent("all_reduce", gpus, size)
            times.append(sent / (float(row["busbw_GBps"]) * 1e9))
    link = alpha_beta.fit("all_reduce", gpus, sizes, times)
    inside = load_cluster(cluster).inside
    assert inside.alpha_s == pytest.approx(link.alpha_s, rel=0.02)
    assert inside.beta_bytes_per_s == pytest.approx(link.beta_bytes_per_s, rel=0.02)


def test_ten_lines_make_a_cluster(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(MINE)
    cluster = load_cluster(str(file))
    assert (cluster.name, cluster.gpu.name, cluster.gpus_per_node) == ("mine", "a100-80gb", 4)
    assert cluster.between.beta_bytes_per_s == 12.5e9
    own = "[gpu.x1]\npeak_tflops = { bfloat16 = 100 }\nmemory_GiB = 32\nmemory_TB_per_s = 1.5\n"
    file.write_text(MINE.replace("a100-80gb", "x1") + own)
    gpu = load_cluster(str(file)).gpu
    assert (gpu.peak("bfloat16"), gpu.memory_bytes) == (100e12, 32 * 2**30)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINE.replace("between_GB_per_s = 12.5\n", ""), r"\[mine\] needs between_GB_per_s"),
        (MINE.replace("gpus_per", "gpu_per"), "unknown field gpu_per_node: did you mean"),
        (MINE.replace("a100-80gb", "a100"), "unknown GPU 'a100'"),
        ("no = toml = here", "is no TOML"),
        ("", "0 clusters"),
        (
            MINE.replace("a100-80gb", "x") + "[gpu.x]\nmemory_GiB = 3\n",
            "needs driver_name, or peak_tflops",
        ),
        (MINE.replace("a100-80gb", "x") + '[gpu.x]\ndriver_name = "H100"\n', "driver_name"),
    ],
)
def test_a_file_that_is_wrong_is_one_line(tmp_path, text, words):
    file = tmp_path / "mine.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=words) as found:
        load_cluster(str(file))
    assert "\n" not in str(found.value)


def test_unknown_names_and_unknown_numbers():
    with pytest.raises(ValueError, match="did you mean selene"):
        load_cluster("selen")
    with pytest.raises(ValueError, match="there is no file"):
        load_cluster("nowhere.toml")
    with pytest.raises(ValueError, match="v100-16gb: matmul_share of float64 is unknown"):
        load_gpu("v100-16gb").matmul_flops_per_s("float64")
    with pytest.raises(ValueError, match="a100-80gb: peak_tflops of fp8 is unknown"):
        load_gpu("a100-80gb").peak("fp8")
    with pytest.raises(ValueError, match="memory_share is unknown"):
        _ = load_gpu("b200").stream_bytes_per_s
    with pytest.raises(ValueError, match="mi300x: attention_share of flash2 is unknown"):
        load_gpu("mi300x").attention_flops_per_s("flash2", "bfloat16")
