"""What the guide of Transformer Engine says of its debug tools on several ranks, line by line.

Each test begins with the sentence that it holds; `test_debug.py` has the numbers behind them.

Source: Transformer Engine, user guide, "Precision debug tools", "Distributed training".
"""

import pytest
from faults.forks import train
from test_debug import CHANGES, FP8, STATS, YAML, compare, logged

from labcode import recipes
from labcode.debug.debug_config import GEMMS

ON_2_X_2 = {"parallel.dp": 2, "parallel.tp": 2}


def block(feature, **settings):
    lines = [
        "change:",
        "  enabled: True",
        "  layers:",
        "    layer_name_regex_pattern: blocks",
        "  transformer_engine:",
        f"    {feature}:",
        "      enabled: True",
    ]
    lines += [f"      {key}: [{', '.join(names)}]" for key, names in settings.items()]
    return "\n".join(lines)


# ---- features that change what a layer computes


def losses(changes, text, folder):
    """The losses of three steps, with the features of a YAML."""
    from pathlib import Path

    import torch.distributed as dist
    from trained import built

    from labcode.debug import on_layers
    from labcode.run import run

    rank = dist.get_rank()
    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | {"train.steps": 3} | changes)
    training = built(config)
    debugger = None
    if text:
        path = Path(folder) / f"debug-{rank}.yaml"
        path.write_text(text)
        chosen = on_layers.chosen_layers(training.model, path)
        debugger = on_layers.Debugger(training.model, chosen, Path(folder))
    rows = run.train(training)
    if debugger is not None:
        debugger.close()
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.parametrize("grid", [{"parallel.dp": 2}, {"parallel.tp": 2}], ids=["dp", "tp"])
def test_without_fp8_a_layer_is_that_of_bfloat16_on_a_grid_as_on_one_process(
    ranks2, tmp_path, grid
):
    """DisableFP8GEMM and DisableFP8Layer function similarly to the single-GPU case."""
    changes = FP8 | grid | {"train.log_every": 1}
    without = ranks2.run(losses, changes | {"train.dtype": "bfloat16"}, "", str(tmp_path))
    in_fp8 = ranks2.run(losses, changes, "", str(tmp_path))
    layer = ranks2.run(losses, changes, block("DisableFP8Layer"), str(tmp_path))
    gemms = block("DisableFP8GEMM", gemms=GEMMS)
    assert layer == ranks2.run(losses, changes, gemms, str(tmp_path))
    for own, other, eight_bits in zip(layer, without, in_fp8):
        assert own == pytest.approx(other, rel=1e-4)
        assert own != eight_bits


def scales(folder):
    """(The scale of a weight with PerTensorScaling, that of delayed scaling) on each rank of tp."""
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.config import ParallelConfig
    from labcode.debug import on_layers
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.precision.formats import E4M3, scale_for
    from labcode.precision.fp8 import DelayedScaling, Fp8

    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | {"model.vocab_size": 17})
    grid = Grid.create(ParallelConfig(tp=2).shape(2))
    in_fp8 = Fp8(DelayedScaling(), grid.group("tp"))
    model = parallelize(GPT(config.model), grid, seed=0, fp8=in_fp8)
    path = Path(folder) / f"scaling-{dist.get_rank()}.yaml"
    path.write_text(block("PerTensorScaling", tensors=["weight"], gemms=["fprop"]))
    debugger = on_layers.Debugger(model, on_layers.chosen_layers(model, path), Path(folder))
    layer = model.module.get_submodule("blocks.1.mlp.up")
    layer(torch.ones(2, 4, 16)).sum().backward()
    in_fp8.finish_step()
    product = layer.product
    made = product.cast("weight", layer.weight, False)
    own = product.operand("fprop", "weight", layer.weight, made)
    debugger.close()
    amax = layer.weight.detach().abs().amax()
    assert own.scale == scale_for(amax, E4M3)
    return own.scale.item(), made.scale.item()


def test_scales_per_tensor_are_those_of_each_shard_and_delayed_ones_are_synchronised(
    ranks2, tmp_path
):
    """PerTensorScaling and FakeQuant: scaling factors are computed separately for each of the
    tensor shards. This is not the case for delayed scaling, whose factors are synchronised."""
    (own, delayed), (other, delayed_there) = ranks2.run(scales, str(tmp_path))
    assert own != other
    assert delayed == delayed_there == min(own, other)  # the largest amax of both


# ---- reduction groups


@pytest.mark.parametrize("weights", [True, False], ids=["together", "apart"])
def test_without_a_reduction_group_weights_alone_are_synchronised_unless_that_is_off(
    ranks4, tmp_path, weights
):
    """Every node prints the same statistics for weights (which are still synchronised within TP
    groups), but those of activations and gradients are not. With
    set_weight_tensor_tp_group_reduce(False) every node logs stats for its shard of the weight."""
    answers = ranks4.run(logged, ON_2_X_2, YAML, str(tmp_path), [], weights)
    of_ranks = [found for found, _ in answers]

    def different(name):
        return len({found[f"blocks.0.mlp.down_{name}_std", 0] for found in of_ranks})

    assert different("weight") == (1 if weights else 2)
    assert different("activation") == 4
    assert different("gradient") > 1
    assert different("wgrad") == 4


# ---- micro-batches


def test_weights_count_once_and_all_else_accumulates_over_micro_batches(ranks1, tmp_path):
    """Multiple forward() calls for each debug_api.step(): for weight tensors the stats remain the
    same, for other tensors they are accumulated."""
    found = {}
    for size in (4, 2, 1):
        answers = ranks1.run(logged, {"train.micro_batch": size}, YAML, str(tmp_path), [])
        found[size] = answers[0][0]
    tensors = ["weight", "activation", "output", "gradient", "dgrad"]
    assert compare(found[1], found[4], tensors) == 2 * 9 * 5 * len(STATS)
    assert compare(found[2], found[4], tensors) == 2 * 9 * 5 * len(STATS)


# ---- files and TensorBoard


def test_one_rank_of_each_stage_writes_to_tensorboard(tmp_path):
    """If certain nodes are given a TensorBoard writer, only those nodes will log to TensorBoard. To
    log all stats, pass a writer to one process in each pipeline parallel group."""
    (tmp_path / "debug.yaml").write_text(YAML)
    args = ["gpt_tiny", "--parallel.tp=2", "--parallel.pp=2", "--train.out=run"]
    args += ["--debug.config=debug.yaml", "--debug.reduce_over", "tp", "--debug.tensorboard"]
    args += [f"--{name}={value}" for name, value in (CHANGES | {"train.steps": 1}).items()]
    args += ["--parallel.pipeline_schedule=gpipe"]
    done = train(args, cwd=tmp_path, ranks=4)
    assert done.codes == [0, 0, 0, 0], done.err
    folder = tmp_path / "run" / "debug" / "tensorboard"
    files = sorted(path.relative_to(folder).parts[0] for path in folder.rglob("events.*"))
    assert files == ["stage-0", "stage-1"]
    logs = tmp_path / "run" / "debug" / "nvdlfw_inspect_statistics_logs"
    texts = [(logs / f"nvdlfw_inspect_globalrank-{rank}.log").read_text() for rank in range(4)]
    assert texts[0] == texts[1] != texts[2] == texts[3]  # identical within a reduction group
