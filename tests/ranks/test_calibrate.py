"""This machine, measured into a cluster file that the planner reads."""

import math

import pytest

from labcode.comm.grid import Grid
from labcode.perf.cluster import Gpu, load_cluster
from labcode.perf.estimate import estimate
from labcode.perf.plan import plan
from labcode.perf.settings import Settings
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

SETTINGS = Settings(
    8, dtype="float32", weight_bytes=4, optimizer_bytes=8, gathered_bytes=4, reserved_bytes=0
)


def measured_here():
    from trained import world

    from labcode.run.calibrate import measure

    return measure(world(), Grid.create(GridShape(dp=2)), 4 * 2**30)


@pytest.mark.release
def test_this_machine_becomes_a_cluster_that_can_be_planned(ranks2, tmp_path):
    from labcode.run.calibrate import cluster_file

    first, second = ranks2.run(measured_here)
    assert cluster_file(first, 2, "x") == cluster_file(second, 2, "x")
    assert set(first.links) == {"all_reduce", "all_gather", "reduce_scatter", "send"}
    for link in first.links.values():
        assert link.alpha_s >= 0
        assert link.beta_bytes_per_s > 1e6
    file = tmp_path / "here.toml"
    file.write_text(cluster_file(first, 2, "some processor"))
    cluster = load_cluster(str(file))
    assert math.isclose(cluster.gpu.peak("float32"), first.gpu.peak("float32"), rel_tol=1e-3)
    assert cluster.gpu.memory_bytes == 4 * 2**30
    assert 0 < cluster.gpu.memory_share <= 1
    assert cluster.host_computes
    assert set(cluster.collectives) == set(first.links)
    model = Transformer(2, 64, 4, 128, 84)
    found = estimate(model, GridShape(dp=2), cluster, SETTINGS)
    assert 1e-4 < found.step_s < 10
    assert plan(model, cluster, gpus=2, global_batch=8, settings=SETTINGS).ranked


def test_one_rank_has_no_links_and_a_file_all_the_same(tmp_path):
    from labcode.run.calibrate import Measured, cluster_file

    file = tmp_path / "alone.toml"
    shares = {"flash2": 0.5, "flash2_causal": 0.25}
    gpu = Gpu("mine", {"float32": 1e11}, 2**30, 1e10, {"float32": 1.0}, 0.5, shares, None, "a test")
    file.write_text(cluster_file(Measured(gpu, 5e-6, False, 1e-3, {}), 1, "x"))
    cluster = load_cluster(str(file))
    assert cluster.gpus_per_node == 1
    assert cluster.collectives == {}
    assert cluster.launch_s == pytest.approx(5e-6)
    assert not cluster.host_computes
    assert cluster.once_s == pytest.approx(1e-3)
    assert cluster.gpu.attention_flops_per_s("flash2", "float32") == 5e10
    assert cluster.gpu.attention_flops_per_s("flash2_causal", "float32") == 2.5e10
    assert cluster.gpu.stream_bytes_per_s == 5e9
