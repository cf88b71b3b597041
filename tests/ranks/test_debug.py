"""Debug features on layers that ranks share: whose statistics, of what, and in which file."""

import pytest
import torch
from faults.forks import train

from labcode import recipes

CHANGES = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 8,
    "train.global_batch": 4,
    "train.micro_batch": 2,
    "train.eval_batches": 1,
    "train.steps": 2,
    "train.dtype": "float64",
}
STATS = ["min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"]
YAML = f"""
stats:
  enabled: True
  layers:
    layer_types: [all]
  transformer_engine:
    LogTensorStats:
      enabled: True
      tensors: [activation, weight, output, gradient, dgrad, wgrad]
      stats: [{", ".join(STATS)}]
"""
FAKE = """
fake:
  enabled: True
  layers:
    layer_types: [mlp.up]
  transformer_engine:
    FakeQuant:
      enabled: True
      tensors: [activation, weight, gradient]
      gemms: [fprop, dgrad, wgrad]
      quant_format: FP8E4M3
"""
FEATURE = """
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import Registry, api_method

from labcode.debug.feature import Feature


@Registry.register_feature(namespace="transformer_engine")
class CountZeros(Feature):
    @api_method
    def inspect_tensor(self, config, layer_name, *, tensor_name, tensor, iteration, **_):
        if tensor_name == "weight":
            MetricLogger.log_scalar(f"{layer_name}_zeros", int((tensor == 0).sum()), iteration)
"""


def logged(changes, text, folder, over, weights=True):
    """What each rank has written after two steps that do not change the weights, and its file."""
    from pathlib import Path

    import torch.distributed as dist
    from trained import built

    from labcode.debug import on_layers

    rank = dist.get_rank()
    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | changes)
    training = built(config)
    path = Path(folder) / f"debug-{rank}.yaml"
    path.write_text(text)
    chosen = on_layers.chosen_layers(training.model, path)
    reduction = on_layers.Reduction(tuple(over), weights)
    debugger = on_layers.Debugger(training.model, chosen, Path(folder), reduction)
    for step in range(2):
        training.model.forward_backward(training.loader.take(step))
        training.optimizer.zero_grad()
        debugger.step()
    debugger.close()
    training.close()
    file = Path(folder) / on_layers.STATISTICS / f"nvdlfw_inspect_globalrank-{rank}.log"
    return on_layers.read_statistics(Path(folder), rank), file.read_bytes()


@pytest.fixture(scope="module")
def whole(ranks1, tmp_path_factory):
    ((found, _),) = ranks1.run(logged, {}, YAML, str(tmp_path_factory.mktemp("whole")), [])
    return found


def compare(found, whole, tensors, factor=1.0):
    """Statistics of some tensors are those of one process, gradients `factor` times as large."""
    compared = 0
    for (name, step), value in whole.items():
        for each in tensors:
            if f"_{each}_" not in name:
                continue
            compared += 1
            if "dynamic_range" in name and each not in ("activation", "weight", "output"):
                continue  # the smallest number of a gradient may be the rounding of a zero
            grows = 1.0 if "dynamic_range" in name else factor
            assert found[name, step] == pytest.approx(grows * value, rel=1e-9, abs=1e-12), name
    return compared


def test_parts_of_a_2_x_2_grid_have_the_statistics_of_one_process(ranks4, whole, tmp_path):
    grid = {"parallel.dp": 2, "parallel.tp": 2}
    answers = ranks4.run(logged, grid, YAML, str(tmp_path), ["dp", "tp"])
    files = [file for _, file in answers]
    assert files == files[:1] * 4
    found = answers[0][0]
    assert found.keys() == whole.keys()
    assert compare(found, whole, ["activation", "weight", "output"]) == 2 * 9 * 3 * len(STATS)
    # the loss of a rank is the mean over its own samples
    assert compare(found, whole, ["gradient", "dgrad"], factor=2.0) == 2 * 9 * 2 * len(STATS)


def test_each_stage_of_a_pipeline_writes_its_own_layers(ranks4, whole, tmp_path):
    grid = {"parallel.pp": 2, "parallel.tp": 2, "parallel.pipeline_schedule": "gpipe"}
    answers = ranks4.run(logged, grid, YAML, str(tmp_path), ["tp"])
    files = [file for _, file in answers]
    assert files[0] == files[1] and files[2] == files[3]
    first, last = answers[0][0], answers[2][0]
    assert not first.keys() & last.keys()
    both = first | last
    assert both.keys() == whole.keys()
    tensors = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
    assert compare(both, whole, tensors) == len(whole)


@pytest.mark.release
def test_on_a_2_x_2_x_2_grid_each_stage_has_the_statistics_of_one_process(ranks8, whole, tmp_path):
    grid = {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 2}
    schedule = {"parallel.pipeline_schedule": "gpipe", "train.micro_batch": 1}
    answers = ranks8.run(logged, grid | schedule, YAML, str(tmp_path), ["dp", "tp"])
    files = [file for _, file in answers]
    first, last = files[0], files[-1]
    assert first != last
    assert files == [first] * 4 + [last] * 4  # pp is the outermost axis
    both = answers[0][0] | answers[-1][0]
    assert both.keys() == whole.keys()
    assert compare(both, whole, ["activation", "weight", "output"]) == 2 * 9 * 3 * len(STATS)
    assert compare(both, whole, ["gradient", "dgrad"], factor=2.0) == 2 * 9 * 2 * len(STATS)


def test_a_group_over_dp_leaves_ranks_of_tp_apart_and_weights_together(ranks4, whole, tmp_path):
    grid = {"parallel.dp": 2, "parallel.tp": 2}
    answers = ranks4.run(logged, grid, YAML, str(tmp_path), ["dp"])
    files = [file for _, file in answers]
    assert files[0] == files[2] and files[1] == files[3]
    assert files[0] != files[1]
    assert compare(answers[1][0], whole, ["weight"]) > 0


@pytest.mark.parametrize("sequence", [False, True])
def test_parts_over_tp_have_the_statistics_of_one_process(ranks2, whole, tmp_path, sequence):
    grid = {"parallel.tp": 2, "parallel.sequence_parallel": sequence}
    answers = ranks2.run(logged, grid, YAML, str(tmp_path), ["tp"])
    tensors = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
    assert compare(answers[1][0], whole, tensors) == len(whole)


def test_without_a_group_each_rank_writes_its_own(ranks2, whole, tmp_path):
    answers = ranks2.run(logged, {"parallel.tp": 2}, YAML, str(tmp_path), [], False)
    first, second = (found for found, _ in answers)
    name = "blocks.0.mlp.up_weight_l2_norm"
    assert first[name, 0] != second[name, 0]
    together = (first[name, 0] ** 2 + second[name, 0] ** 2) ** 0.5
    assert together == pytest.approx(whole[name, 0], rel=1e-9)


def test_sharded_weights_are_seen_whole_and_their_gradients_before_the_reduce_scatter(
    ranks2, tmp_path
):
    """Under ZeRO-3 each rank logs what it logs under ZeRO-0; no weight is reduced over dp."""
    found = {}
    for stage in (0, 3):
        changes = {"parallel.dp": 2, "parallel.zero_stage": stage}
        folder = tmp_path / str(stage)
        folder.mkdir()
        found[stage] = ranks2.run(logged, changes, YAML, str(folder), [])
    for (own, _), (sharded, _) in zip(found[0], found[3]):
        assert compare(sharded, own, ["weight", "wgrad", "activation"]) == 2 * 9 * 3 * len(STATS)
    (first, _), (second, _) = found[3]
    assert first["blocks.0.mlp.up_weight_std", 0] == second["blocks.0.mlp.up_weight_std", 0]
    assert first["blocks.0.mlp.up_wgrad_std", 0] != second["blocks.0.mlp.up_wgrad_std", 0]


FP8 = {"model.hidden_size": 64, "train.dtype": "fp8", "fp8.recipe": "current"}
FP8_STATS = ["underflows%", "scale_inv_min", "scale_inv_max", "mse", "mxfp8_underflows%"]
FP8_YAML = f"""
stats:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
    LogFp8TensorStats:
      enabled: True
      tensors: [activation, weight, gradient]
      stats: ['{"', '".join(FP8_STATS)}']
"""


@pytest.mark.parametrize("sequence", [False, True])
def test_what_casts_lose_is_counted_over_all_parts(ranks1, ranks2, tmp_path, sequence):
    ((whole, _),) = ranks1.run(logged, FP8, FP8_YAML, str(tmp_path), [])
    grid = {"parallel.tp": 2, "parallel.sequence_parallel": sequence}
    answers = ranks2.run(logged, FP8 | grid, FP8_YAML, str(tmp_path), ["tp"])
    found, file = answers[0]
    assert file == answers[1][1]
    assert found.keys() == whole.keys()
    assert len(found) == 2 * 8 * 3 * len(FP8_STATS)
    for (name, step), value in whole.items():
        if "_weight_" in name:
            assert found[name, step] == pytest.approx(value, rel=1e-6, abs=1e-12), name
        elif "activation" in name:  # bfloat16 rounds sums of another order to its neighbours
            assert found[name, step] == pytest.approx(value, rel=0.05, abs=0.1), name


def test_features_for_fp8_need_a_layer_in_fp8(ranks2, tmp_path):
    changes = {"parallel.tp": 2, "train.dtype": "float32"}
    with pytest.raises(Exception, match="LogFp8TensorStats is for layers that compute in FP8"):
        ranks2.run(logged, changes, FP8_YAML, str(tmp_path), [])


def quantized(folder, in_fp8):
    """Whether a layer of tp with FakeQuant computes with operands of 8 bits, and lets go of it."""
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.config import ParallelConfig
    from labcode.debug import on_layers
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.precision.formats import E4M3, cast, scale_for
    from labcode.precision.fp8 import DelayedScaling, Fp8

    def as_8_bits(x):
        scale = scale_for(x.abs().amax(), E4M3)
        return cast(x * scale, E4M3) / scale

    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | {"model.vocab_size": 17})
    grid = Grid.create(ParallelConfig(tp=2).shape(2))
    fp8 = Fp8(DelayedScaling(), grid.group("tp")) if in_fp8 else None
    model = parallelize(GPT(config.model), grid, seed=0, fp8=fp8)
    path = Path(folder) / f"fake-{dist.get_rank()}.yaml"
    path.write_text(FAKE)
    layer = model.module.get_submodule("blocks.1.mlp.up")
    before = layer.product
    debugger = on_layers.Debugger(model, on_layers.chosen_layers(model, path), Path(folder))
    x = torch.randn(2, 4, 16, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    wanted = as_8_bits(x) @ as_8_bits(layer.weight).T + layer.bias
    ones = torch.ones(8, 32)  # a number of 8 bits
    rows = as_8_bits(x).flatten(0, 1)
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(layer.weight.grad, ones.T @ rows)
    assert not torch.equal(y, x @ layer.weight.T + layer.bias)
    debugger.close()
    return layer.product is before


@pytest.mark.parametrize("in_fp8", [False, True], ids=["float32", "fp8"])
def test_fake_quantization_changes_operands_and_is_local(ranks2, tmp_path, in_fp8):
    """In a layer of FP8 the product is one in float32 all the same: FakeQuant turns FP8 off."""
    assert ranks2.run(quantized, str(tmp_path), in_fp8) == [True, True]


def test_tensors_are_dumped_before_and_after_their_cast(ranks2, tmp_path):
    text = FP8_YAML.replace("LogFp8TensorStats", "DumpTensors")
    text = text.replace("stats: ['" + "', '".join(FP8_STATS) + "']", "high_precision_tensor: True")
    text += "      quantized_tensor: True\n      freq: 2\n"
    ranks2.run(logged, FP8 | {"parallel.tp": 2}, text, str(tmp_path), [])
    for rank in range(2):
        (folder,) = tmp_path.rglob(f"tensor_dumps/rank_{rank}")
        assert [path.name for path in folder.iterdir()] == ["iter_000000"]
        assert len(list(folder.rglob("*.pt"))) == 8 * 3
        for tensor in ("activation", "weight", "gradient"):
            found = torch.load(folder / "iter_000000" / f"blocks_0_mlp_up_{tensor}.pt")
            before = found["high_precision"].flatten(0, -2).float()
            after = found["quantized"].float() / found["scale"]
            assert 0 < (after - before).norm() / before.norm() < 0.1


def watched_steps(folder, text):
    """In which of five steps a layer computes with other products than its own."""
    from pathlib import Path

    from labcode.comm.grid import Grid
    from labcode.config import ParallelConfig
    from labcode.debug import on_layers
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | {"model.vocab_size": 17})
    grid = Grid.create(ParallelConfig().shape(1))
    model = parallelize(GPT(config.model), grid, seed=0)
    path = Path(folder) / "debug.yaml"
    path.write_text(text)
    layer = model.module.get_submodule("blocks.1.mlp.up")
    before = layer.product
    debugger = on_layers.Debugger(model, on_layers.chosen_layers(model, path), Path(folder))
    steps = []
    for step in range(5):
        if layer.product is not before:
            steps.append(step)
        debugger.step()
    debugger.close()
    assert layer.product is before
    return steps


def test_a_layer_is_watched_in_the_steps_that_are_logged(ranks1, tmp_path):
    every_second = YAML + "      freq: 2\n"
    assert ranks1.run(watched_steps, str(tmp_path), every_second) == [[0, 2, 4]]
    assert ranks1.run(watched_steps, str(tmp_path), FAKE) == [[0, 1, 2, 3, 4]]


def test_a_training_writes_what_its_yaml_asks_for(tmp_path):
    (tmp_path / "features").mkdir()
    (tmp_path / "features" / "zeros.py").write_text(FEATURE)
    text = (
        YAML.replace("[all]", "[mlp.up]") + "      freq: 2\n    CountZeros:\n      enabled: True\n"
    )
    (tmp_path / "debug.yaml").write_text(text)
    args = ["gpt_tiny", "--parallel.tp", "2", "--train.out", "run", "--debug.config", "debug.yaml"]
    args += ["--debug.feature_dir", "features", "--debug.tensorboard"]
    for name, value in (CHANGES | {"train.steps": 3}).items():
        args += [f"--{name}", str(value)]
    done = train(args, cwd=tmp_path, ranks=2)
    assert done.codes == [0, 0]
    from labcode.debug.on_layers import read_statistics

    found = read_statistics(tmp_path / "run" / "debug", 1)
    assert {step for name, step in found if name.endswith("_std")} == {0, 2}
    assert found["blocks.1.mlp.up_zeros", 1] == 0
    assert list((tmp_path / "run" / "debug" / "tensorboard" / "stage-0").iterdir())
    again = train(
        [*args, "--train.overwrite"], cwd=tmp_path, ranks=2
    )  # the folder is the run's own
    assert again.codes == [0, 0]


def chosen_by_own_file(texts):
    """What a rank is told about the layers that its own file chooses, or what was wrong."""
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    from labcode.comm.grid import Grid
    from labcode.config import ParallelConfig
    from labcode.debug import on_layers
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    config = recipes.with_changes(recipes.gpt_tiny(), CHANGES | {"model.vocab_size": 17})
    grid = Grid.create(ParallelConfig(dp=2).shape(2))
    model = parallelize(GPT(config.model), grid, seed=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "own.yaml"
        path.write_text(texts[dist.get_rank()])
        try:
            return sorted(on_layers.chosen_layers(model, path))
        except ValueError as error:
            return str(error).removeprefix(folder)


def test_all_ranks_must_read_the_same_yaml(ranks2):
    for other in (YAML.replace("all", "mlp"), YAML.replace("min, ", ""), YAML + FAKE):
        found = ranks2.run(chosen_by_own_file, [YAML, other])
        said = "/own.yaml of rank 1 is another than that of rank 0: give every rank the same file"
        assert found == [said, said]
    same, too = ranks2.run(chosen_by_own_file, [YAML, f"# a comment\n{YAML}"])
    assert same == too and "blocks.0.mlp.up" in same


def test_a_training_refuses_a_wrong_yaml_before_it_begins(tmp_path):
    (tmp_path / "debug.yaml").write_text(YAML.replace("stats: [", "type: ["))
    args = ["gpt_tiny", "--train.out", "run", "--debug.config", "debug.yaml"]
    done = train(args, cwd=tmp_path, ranks=2)
    assert done.codes == [2, 2]
    assert len(done.errors) == 1
    assert "debug.yaml, line 10: unknown key of LogTensorStats 'type'" in done.errors[0]
    assert not (tmp_path / "run").exists()
