"""FP8 on grids: it trains as on one process, and ranks that share scales have the same."""

import signal
import statistics
from functools import partial

import pytest
import torch
from faults import fixtures, forks
from faults.injection import at_step, die

from course.labs import l18_gpt as lab
from labcode import recipes
from labcode.measure import metrics
from labcode.precision.fp8 import reduced_amaxes
from labcode.runtime import combinations

STEPS = 6
CONFIG = recipes.with_changes(
    recipes.gpt_tiny(),
    {
        "model.num_heads": 4,
        "model.hidden_size": 64,
        "model.num_layers": 2,
        "model.context_length": 32,
        "optim.warmup_steps": 2,
        "train.steps": STEPS,
        "train.global_batch": 8,
        "train.dtype": "fp8",
        "train.eval_every": 3,
        "train.eval_batches": 1,
        "train.log_every": 1,
        "train.sample_tokens": 0,
    },
)
OURS = {"parallel.data_parallel": "labcode"}
GRIDS = {
    "dp": {},
    "dp, ours": OURS,
    "ZeRO-3, ours": OURS | {"parallel.zero_stage": 3},
    "FSDP2": {"parallel.zero_stage": 3},
    "tp": {"parallel.tp": 2},
    "tp, sequence parallel": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "cp": {"parallel.cp": 2},
    "pp": {"parallel.pp": 2, "train.micro_batch": 4},
    "pp, zero bubble": {
        "parallel.pp": 2,
        "parallel.pipeline_schedule": "zero_bubble",
        "train.micro_batch": 4,
    },
    "activation checkpointing": {"parallel.activation_checkpointing": "full"},
}


def fit(config):
    """(the losses of a run, its last validation loss, {operand of a layer: its history})."""
    from trained import built

    from labcode.run import run

    training = built(config)
    rows = run.train(training)
    losses = [row["loss"] for row in rows if "loss" in row]
    validation = [row["val_loss"] for row in rows if "val_loss" in row][-1]
    histories = {name: scaling.history.tolist() for name, scaling in training.fp8.scalings()}
    return losses, validation, histories


@pytest.fixture(scope="module")
def alone(ranks1):
    made = {}

    def of(recipe):
        if recipe not in made:
            made[recipe] = ranks1.run(fit, with_recipe(recipe))[0]
        return made[recipe]

    return of


def with_recipe(recipe, **changes):
    return recipes.with_changes(CONFIG, {"fp8.recipe": recipe} | changes)


@pytest.mark.parametrize("name", GRIDS)
def test_a_grid_trains_like_one_process(ranks2, alone, name):
    """Not to 1e-9: sums in another order round other numbers of 8 bits up or down."""
    losses, validation, histories = alone("delayed")
    config = recipes.with_changes(CONFIG, GRIDS[name])
    found = ranks2.run(fit, config)
    mean = torch.tensor([result[0] for result in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=0.01, atol=0)
    for _, other_validation, other in found:
        assert other_validation == pytest.approx(validation, rel=0.01)
        # The amaxes of the first step are those of the whole tensors, whoever has a part of them.
        # Those of gradients are not compared: a rank of dp divides by its own samples alone.
        for operand, history in other.items():
            if not operand.endswith("gradient"):
                assert history[STEPS - 1] == pytest.approx(histories[operand][STEPS - 1], rel=0.01)


@pytest.mark.release
def test_a_2_x_2_x_2_grid_trains_like_one_process(ranks8, alone):
    losses, validation, _ = alone("delayed")
    grid = {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 2, "train.micro_batch": 2}
    found = ranks8.run(fit, recipes.with_changes(CONFIG, grid))
    mean = torch.tensor([result[0] for result in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=0.01, atol=0)
    for _, other_validation, _ in found:
        assert other_validation == pytest.approx(validation, rel=0.01)


@pytest.mark.parametrize("recipe", ["current", "block"])
@pytest.mark.parametrize("name", ["dp", "tp, sequence parallel", "pp, zero bubble"])
def test_the_other_recipes_train_like_one_process_too(ranks2, alone, recipe, name):
    """Within 2 %: with current scaling each micro-batch has scales of its own."""
    losses, validation, _ = alone(recipe)
    found = ranks2.run(fit, recipes.with_changes(with_recipe(recipe), GRIDS[name]))
    mean = torch.tensor([result[0] for result in found]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=0.02, atol=0)
    assert found[0][1] == pytest.approx(validation, rel=0.02)


def test_shared_scales_stay_equal_and_others_do_not(ranks4):
    """On dp 2 x tp 2: one scale for all, one for each group of tp, or one for each rank."""
    grid = {"parallel.dp": 2, "parallel.tp": 2}
    differ = {}
    for share in ("all", "tp", "none"):
        config = recipes.with_changes(CONFIG, grid | {"fp8.share": share})
        of_ranks = [result[2] for result in ranks4.run(fit, config)]
        differ[share] = {
            pair: of_ranks[pair[0]] != of_ranks[pair[1]] for pair in ((0, 1), (2, 3), (0, 2))
        }
    # ranks 0 and 1 are one group of tp, ranks 2 and 3 the other
    assert differ == {
        "all": {(0, 1): False, (2, 3): False, (0, 2): False},
        "tp": {(0, 1): False, (2, 3): False, (0, 2): True},
        "none": {(0, 1): True, (2, 3): True, (0, 2): True},
    }


def test_scales_on_a_grid_are_those_of_who_shares_them(ranks4):
    for share, count in (("none", 4), ("tp", 2), ("all", 1)):
        assert len(set(ranks4.run(lab.scale_on_a_grid, share))) == count


def in_ddp_of_pytorch(shared):
    """(the scale of every operand, the gradients) of a rank, after steps of plain PyTorch."""
    import torch.distributed as dist
    from torch import nn

    from labcode.precision.fp8 import DelayedScaling, Fp8

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    ddp = nn.parallel.DistributedDataParallel(model)
    fp8 = Fp8(DelayedScaling(), dist.group.WORLD if shared else None, skip=())
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):
        model.zero_grad()
        with fp8.autocast(model):
            loss = ddp(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        fp8.finish_step()
    scales = {name: scaling.scale.item() for name, scaling in fp8.scalings()}
    return scales, [param.grad.tolist() for param in model.parameters()]


def test_autocast_around_pytorchs_ddp_needs_the_group_for_equal_scales(ranks2):
    """The data-parallel group must also be passed to the context manager."""
    (scales, grads), (other_scales, other_grads) = ranks2.run(in_ddp_of_pytorch, True)
    assert scales == other_scales
    assert grads == other_grads
    (scales, _), (other_scales, _) = ranks2.run(in_ddp_of_pytorch, False)
    differ = {name for name, scale in scales.items() if scale != other_scales[name]}
    assert differ == {"0.input", "0.gradient", "2.input", "2.gradient"}  # weights are copies


def count_calls():
    """The collectives that one step's end makes."""
    import torch.distributed as dist
    from torch import nn

    from labcode.comm.counting import counted, totals
    from labcode.precision.fp8 import DelayedScaling, Fp8

    fp8 = Fp8(DelayedScaling(), dist.group.WORLD, skip=())
    model = fp8.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)))
    with counted() as calls:
        model(torch.ones(2, 8)).sum().backward()
        during = totals(calls)
        fp8.finish_step()
    return during, totals(calls)


def test_delayed_scaling_communicates_once_a_step(ranks2):
    for during, after in ranks2.run(count_calls):
        assert during == {}
        assert after == {"all_reduce": (1, 2 * 3 * 4)}  # 2 layers, 3 operands, 4 bytes


def count_current_scaling():
    """The collectives of a forward on rank 0 alone without gradients, of one with, and backward."""
    import torch.distributed as dist
    from torch import nn

    from labcode.comm.counting import counted, totals
    from labcode.precision.fp8 import CurrentScaling, Fp8

    model = Fp8(CurrentScaling(), dist.group.WORLD, skip=()).convert(nn.Sequential(nn.Linear(8, 4)))
    with counted() as calls:
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.ones(2, 8))
        alone = totals(calls)
        y = model(torch.ones(2, 8))
        forward = totals(calls)
        y.sum().backward()
    return alone, forward, totals(calls)


def test_current_scaling_communicates_in_training_and_never_in_a_validation(ranks2):
    """Ranks of dp may have different numbers of validation batches, or one rank samples text."""
    for alone, forward, both in ranks2.run(count_current_scaling):
        assert alone == {}
        assert forward == {"all_reduce": (2, 2 * 4)}
        assert both == {"all_reduce": (3, 3 * 4)}


def reduce_own():
    import torch.distributed as dist

    rank = dist.get_rank()
    own = [torch.tensor(float(rank)), torch.tensor(float(-rank) + 5)]
    found = reduced_amaxes(own, dist.group.WORLD)
    return [amax.item() for amax in found], [amax.item() for amax in own]


def test_the_largest_of_each_amax_counts(ranks4):
    for rank, (found, own) in enumerate(ranks4.run(reduce_own)):
        assert found == [3, 5]
        assert own == [rank, 5 - rank]


def test_what_does_not_go_with_fp8_is_one_line():
    refused = {
        "train.compile=block": {"train.compile": "block"},
        "fp8.share=none and checkpoints": {"fp8.share": "none", "checkpoint.every": 2},
        "fp8.recipe=block with model.hidden_size / tp": {
            "fp8.recipe": "block",
            "parallel.tp": 4,
        },
    }
    for words, changes in refused.items():
        with pytest.raises(ValueError, match=words):
            combinations.check(recipes.with_changes(CONFIG, changes), 4)


def test_a_killed_run_resumes_with_its_histories_bit_for_bit(tmp_path):
    args = (
        "gpt_tiny",
        "--model.hidden_size=32",
        "--train.steps=8",
        "--train.global_batch=4",
        "--train.eval_batches=1",
        "--train.sample_tokens=0",
        "--train.dtype=fp8",
        "--checkpoint.every=3",
        "--checkpoint.keep=9",
        "--train.out=run",
    )
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    for folder in folders.values():
        folder.mkdir()
    done = forks.train(args, cwd=folders["whole"], ranks=2)
    assert done.codes == [0, 0], done.err
    killed = folders["killed"]
    done = forks.train(args, cwd=killed, ranks=2, patch=partial(at_step, 5, die))
    assert set(done.codes) == {-signal.SIGKILL}, done.err
    done = forks.train([*args, "--checkpoint.resume"], cwd=killed, ranks=2)
    assert done.codes == [0, 0], done.err
    assert fixtures.differs(killed / "run", folders["whole"] / "run") == ""


@pytest.mark.release
@pytest.mark.timeout(1800)  # a CPU without a unit for bfloat16 takes a second for a step
def test_in_100_steps_gpt_tiny_learns_in_fp8_as_well_as_in_bfloat16(tmp_path):
    """The mean loss of steps 51 to 100, which see the same batches: a single one is a draw."""
    found = {}
    for name, args in {
        "bfloat16": ["--train.dtype=bfloat16"],
        "delayed": ["--train.dtype=fp8"],
        "current": ["--train.dtype=fp8", "--fp8.recipe=current"],
        "block": ["--train.dtype=fp8", "--fp8.recipe=block"],
    }.items():
        common = ["gpt_tiny", "--train.steps=100", "--train.log_every=1", f"--train.out={name}"]
        common += ["--train.eval_every=0", "--train.eval_batches=1", "--train.sample_tokens=0"]
        done = forks.train([*common, *args], cwd=tmp_path, timeout_s=900)
        assert done.codes == [0], done.err
        losses = [row["loss"] for row in metrics.read(tmp_path / name) if "loss" in row]
        assert len(losses) == 100
        found[name] = statistics.mean(losses[50:])
    assert found["bfloat16"] < 2.6
    assert found["delayed"] == pytest.approx(found["bfloat16"], rel=0.01)
    assert found["current"] == pytest.approx(found["bfloat16"], rel=0.01)
    assert found["block"] == pytest.approx(found["bfloat16"], rel=0.01)
