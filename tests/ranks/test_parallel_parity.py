"""Every grid against one process, to 1e-9 in float64.

Losses, gradient norms, validation and final weights are the same.
"""

import contextlib
import dataclasses
import itertools
import math

import pytest
import torch
from covering import covering

from labcode import recipes

SMALL = {
    "model.num_heads": 4,
    "model.hidden_size": 24,
    "model.ffn_size": 40,
    "optim.warmup_steps": 2,
    "optim.weight_decay": 0.3,
    "train.steps": 5,
    "train.global_batch": 8,
    "train.dtype": "float64",
    "train.eval_every": 5,
    "train.eval_batches": 1,
    "train.log_every": 1,
    "train.sample_tokens": 0,
}
# clip norms lie below the norms of the first steps, so that clipping happens
GPT = SMALL | {"model.num_layers": 2, "model.context_length": 32, "optim.clip_norm": 0.5}
VIT = SMALL | {"model.num_layers": 1, "model.patch_size": 15, "optim.clip_norm": 0.003}
GPT, VIT = (
    recipes.with_changes(recipes.gpt_tiny(), GPT),
    recipes.with_changes(recipes.vit_tiny(), VIT),
)
MODELS = {
    "gpt, tied, odd vocabulary": GPT,
    "gpt, untied, rotary, grouped queries": recipes.with_changes(
        GPT,
        {
            "model.hidden_size": 32,
            "model.num_heads": 8,
            "model.num_kv_heads": 4,
            "model.tie_embeddings": False,
            "model.positions": "rotary",
            "model.vocab_size": 91,
            # which makes it a Llama
            "model.norm": "rms",
            "model.mlp": "swiglu",
            "model.bias": False,
        },
    ),
    "vit": VIT,
}
SIZES = (1, 2, 4)
# dp, cp, tp
GRIDS = [
    grid for grid in itertools.product(SIZES, repeat=3) if grid[0] * grid[1] * grid[2] in SIZES
]
LARGE = [(2, 2, 2, "tp-cp-dp-pp"), (1, 2, 4, "dp-cp-tp-pp"), (1, 4, 2, "cp-dp-tp-pp")]


def fit(config, forget=()):
    """What one run in this pool gives.

    It is (loss and gradient norm of each step, validation loss, whole final weights, own weights).
    """
    import torch.distributed as dist
    from trained import built

    from labcode.run import run

    rank = dist.get_rank()
    torch.manual_seed(rank)  # ranks are seeded differently: nothing may depend on it
    training = built(config)
    for name, axis in forget:
        if axis == "tp":
            sharding = training.model.shardings[name]
            training.model.shardings[name] = dataclasses.replace(sharding, partial_over=("cp",))
    # the sum over cp travels with the average over dp
    forget_cp = any(axis == "cp" for _, axis in forget)
    with training.model.no_sync() if forget_cp else contextlib.nullcontext():
        rows = run.train(training)
    steps = torch.tensor(
        [(row["loss"], row["grad_norm"]) for row in rows if "loss" in row], dtype=torch.float64
    )
    validation = [row["val_loss"] for row in rows if "val_loss" in row]
    whole = {name: tensor.clone() for name, tensor in training.model.full_state_dict()}
    own = {name: param.detach().clone() for name, param in training.model.module.named_parameters()}
    return steps, validation, whole, own


def changes(dp, cp, tp, sequence_parallel=False, context="ring", order="tp-cp-dp-pp", **others):
    grid = {"parallel.dp": dp, "parallel.cp": cp, "parallel.tp": tp, "parallel.order": order}
    return (
        grid
        | {"parallel.sequence_parallel": sequence_parallel, "parallel.context_attention": context}
        | others
    )


def assert_same(results, reference):
    steps, validation, weights, _ = reference
    for other_steps, other_validation, other_weights, _ in results:
        torch.testing.assert_close(other_steps, steps, rtol=0, atol=1e-9)
        torch.testing.assert_close(other_validation, validation, rtol=0, atol=1e-9)
        torch.testing.assert_close(other_weights, weights, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def reference():
    """What one process gets without the sharded layers, by the plain models and AdamW alone."""
    made = {}

    def of(name):
        if name not in made:
            made[name] = plain_run(MODELS[name])
        return made[name]

    return of


def plain_run(config):
    """The same training written with PyTorch alone, on the whole model."""
    from labcode.data.sampler import Batches, validation_batches
    from labcode.models import gpt, vit
    from labcode.models.layers import freeze, initialize
    from labcode.models.lora import add_adapters
    from labcode.train.optim import learning_rate, make_optimizer
    from labcode.train.tasks import make_task

    task, batch = make_task(config), config.train.global_batch
    model = initialize(task.build(), config.train.seed).double()
    if config.lora.rank:
        add_adapters(model, config.lora, config.train.seed)
    freeze(model, config.train.freeze)
    optimizer = make_optimizer(model.parameters(), config.optim)
    batches = Batches(len(task.train), batch, dp_size=1, dp_coord=0, seed=config.train.seed)

    def loss_of(data, indices):
        inputs, targets = (x.double() if x.is_floating_point() else x for x in data[indices])
        if isinstance(model, gpt.GPT):
            return gpt.loss(model(inputs), targets)
        return vit.loss(model(inputs), targets, vit.latitude_weights(task.train.lat).double())

    steps = []
    for step in range(config.train.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config.train.steps, config.optim)
        loss = loss_of(task.train, batches.next_indices())
        loss.backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        # clip_grad_norm_ does the same, but adds 1e-6 to the norm
        if norm > config.optim.clip_norm:
            torch._foreach_mul_(grads, config.optim.clip_norm / norm)
        optimizer.step()
        optimizer.zero_grad()
        for router in routers_of(model):
            router.bias += router.move_of_bias(router.load)
            router.load = None
        steps.append((loss.item(), norm.item()))
    (held_out,) = validation_batches(len(task.val), batch, dp_size=1, dp_coord=0, max_batches=1)
    with torch.no_grad():
        validation = loss_of(task.val, held_out).item()
    steps = torch.tensor(steps, dtype=torch.float64)
    assert (steps[:, 1] > config.optim.clip_norm).any(), (
        "no step was clipped: the test would not see a wrong norm"
    )
    return steps, [validation], model.state_dict(), None


def routers_of(model):
    """Those of a mixture of experts whose biases even their load out."""
    return [module for module in model.modules() if getattr(module, "bias_rate", 0)]


def name_of(value):
    """The id of a grid; models and schedules name themselves."""
    return "-".join(map(str, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("grid", "name"),
    covering(list(itertools.product(GRIDS, MODELS)), lambda grid, name: (*grid, name)),
    ids=name_of,
)
def test_every_grid_trains_like_one_process(request, reference, grid, name):
    pool = request.getfixturevalue(f"ranks{grid[0] * grid[1] * grid[2]}")
    dp, cp, tp = grid
    variants = [changes(*grid)]
    # ours, with many small buckets, and gradients added up over micro-batches
    if dp > 1 or dp * cp * tp == 1:
        ours = {
            "parallel.data_parallel": "labcode",
            "parallel.bucket_mb": 1e-3,
            "train.micro_batch": 1,
        }
        variants.append(changes(*grid, **ours))
    if tp > 1:
        variants.append(changes(*grid, sequence_parallel=True))
    if cp > 1:
        variants.append(changes(*grid, context="all_gather", **{"train.micro_batch": 2}))
    for variant in variants:
        assert_same(pool.run(fit, recipes.with_changes(MODELS[name], variant)), reference(name))


@pytest.mark.release
def test_chosen_grids_of_eight_ranks_train_like_one_process(ranks8, reference):
    for name, (dp, cp, tp, order) in zip(MODELS, LARGE):
        config = recipes.with_changes(
            MODELS[name], changes(dp, cp, tp, sequence_parallel=True, order=order)
        )
        assert_same(ranks8.run(fit, config), reference(name))


@pytest.mark.parametrize(
    "axis, weight",
    [
        ("cp", "blocks.0.mlp.up.weight"),
        ("tp", "blocks.1.norm1.weight"),
        ("tp", "blocks.0.mlp.down.bias"),
    ],
)
def test_a_shared_weight_whose_gradient_is_not_summed_drifts_apart(ranks2, reference, axis, weight):
    grid = changes(1, 2, 1) if axis == "cp" else changes(1, 1, 2, sequence_parallel=True)
    name = "gpt, tied, odd vocabulary"
    results = ranks2.run(fit, recipes.with_changes(MODELS[name], grid), forget=[(weight, axis)])
    first, second = (own for _, _, _, own in results)
    assert (first[weight] - second[weight]).abs().max() > 1e-4
    with pytest.raises(AssertionError):
        assert_same(results, reference(name))


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # stages per rank
PIPED = {  # (dp, pp, cp, tp): the model, and what else is switched on
    (1, 2, 1, 1): ("gpt, tied, odd vocabulary", {"uneven": True}),
    (1, 4, 1, 1): ("gpt, tied, odd vocabulary", {}),
    (2, 2, 1, 1): ("vit", {}),
    (1, 2, 2, 1): ("gpt, untied, rotary, grouped queries", {}),
    (1, 2, 1, 2): (
        "gpt, tied, odd vocabulary",
        {"parallel.sequence_parallel": True, "parallel.activation_checkpointing": "full"},
    ),
    (2, 4, 1, 1): ("gpt, tied, odd vocabulary", {}),
    (1, 4, 2, 1): ("gpt, tied, odd vocabulary", {}),
    (1, 4, 1, 2): ("gpt, untied, rotary, grouped queries", {"parallel.sequence_parallel": True}),
    (1, 2, 2, 2): (
        "gpt, tied, odd vocabulary",
        {"parallel.sequence_parallel": True, "parallel.order": "tp-pp-cp-dp"},
    ),
    (2, 2, 1, 2): ("vit", {"parallel.sequence_parallel": True}),
}


def piped(grid, schedule):
    """(the reference's config, that of the grid)."""
    dp, pp, cp, tp = grid
    name, extra = PIPED[grid]
    base = recipes.with_changes(MODELS[name], {"model.num_layers": 8})
    extra = dict(extra)
    if extra.pop("uneven", False):
        extra["parallel.layers_per_stage"] = (3, 5) if SCHEDULES[schedule] == 1 else (1, 2, 4, 1)
    extra |= {
        "parallel.pipeline_schedule": schedule,
        "parallel.stages_per_rank": SCHEDULES[schedule],
    }
    extra |= {
        "parallel.pp": pp,
        "parallel.cp": cp,
        "parallel.tp": tp,
        "train.micro_batch": 2 // dp,  # 4 micro-batches
    }
    return base, recipes.with_changes(base, extra)


@pytest.fixture(scope="module")
def deep_reference():
    """What one process gets from the models with eight layers."""
    made = {}

    def of(config):
        if config not in made:
            made[config] = plain_run(config)
        return made[config]

    return of


ON_FOUR = [grid for grid in PIPED if math.prod(grid) <= 4]
ON_EIGHT = [grid for grid in PIPED if math.prod(grid) > 4]
CASES = covering(
    list(itertools.product(SCHEDULES, ON_FOUR)), lambda schedule, grid: (schedule, *grid)
)
for each in itertools.product(SCHEDULES, ON_EIGHT):
    CASES.append(pytest.param(*each, marks=pytest.mark.release))


@pytest.mark.parametrize(("schedule", "grid"), CASES, ids=name_of)
def test_every_schedule_on_every_grid_trains_like_one_process(
    request, deep_reference, schedule, grid
):
    pool = request.getfixturevalue(f"ranks{math.prod(grid)}")
    base, config = piped(grid, schedule)
    assert_same(pool.run(fit, config), deep_reference(base))


TIED, GROUPED, WEATHER = MODELS
ZERO = [  # (stage, whose, dp, pp, cp, tp): the model, and what else is switched on
    ((1, "labcode", 2, 1, 1, 1), TIED, {"parallel.bucket_mb": 1e-3, "train.micro_batch": 1}),
    ((2, "labcode", 4, 1, 1, 1), TIED, {"train.micro_batch": 1}),
    ((3, "labcode", 4, 1, 1, 1), TIED, {"train.micro_batch": 1}),
    ((3, "labcode", 2, 1, 1, 1), WEATHER, {"parallel.activation_checkpointing": "full"}),
    ((1, "ddp", 2, 1, 1, 1), TIED, {"train.micro_batch": 2}),
    ((2, "ddp", 2, 1, 1, 1), WEATHER, {}),
    ((3, "ddp", 4, 1, 1, 1), TIED, {"train.micro_batch": 1}),
    ((3, "ddp", 2, 1, 2, 1), GROUPED, {}),
    ((3, "labcode", 2, 1, 1, 2), TIED, {"parallel.sequence_parallel": True}),
    ((3, "labcode", 2, 1, 2, 1), GROUPED, {"train.micro_batch": 2}),
    ((2, "labcode", 2, 1, 1, 2), WEATHER, {"parallel.sequence_parallel": True}),
    ((2, "labcode", 2, 1, 2, 1), GROUPED, {}),
    ((3, "ddp", 2, 1, 1, 2), GROUPED, {"parallel.sequence_parallel": True}),
    ((3, "labcode", 2, 2, 1, 1), TIED, {"train.micro_batch": 1}),
    ((2, "labcode", 2, 2, 1, 1), WEATHER, {"train.micro_batch": 1}),
    (
        (1, "labcode", 2, 2, 1, 1),
        TIED,
        {"train.micro_batch": 1, "parallel.pipeline_schedule": "zero_bubble"},
    ),
    ((3, "labcode", 4, 1, 1, 1), GROUPED, {"parallel.zero_replicas": 2}),
    ((2, "labcode", 4, 1, 1, 1), TIED, {"parallel.zero_replicas": 2}),
    ((3, "ddp", 4, 1, 1, 1), WEATHER, {"parallel.zero_replicas": 2}),
    ((3, "ddp", 2, 1, 1, 1), TIED, {"parallel.zero_replicas": 2}),
    (
        (3, "labcode", 2, 2, 1, 2),
        TIED,
        {"train.micro_batch": 1, "parallel.sequence_parallel": True},
    ),
    pytest.param(
        (3, "labcode", 4, 1, 2, 1),
        GROUPED,
        {"parallel.zero_replicas": 2},
        marks=pytest.mark.release,
    ),
]


@pytest.mark.parametrize(("grid", "name", "extra"), ZERO, ids=name_of)
def test_every_zero_stage_trains_like_one_process(request, reference, grid, name, extra):
    stage, whose, dp, pp, cp, tp = grid
    pool = request.getfixturevalue(f"ranks{dp * pp * cp * tp}")
    chosen = {"parallel.zero_stage": stage, "parallel.data_parallel": whose, "parallel.pp": pp}
    config = recipes.with_changes(MODELS[name], changes(dp, cp, tp, **(chosen | extra)))
    if pp > 1:
        config = recipes.with_changes(config, {"model.num_layers": 2})
        alone = recipes.with_changes(MODELS[name], {"model.num_layers": 2})
        assert_same(pool.run(fit, config), plain_run(alone))
    else:
        assert_same(pool.run(fit, config), reference(name))


def validated(config):
    """Mean loss over all validation data of a model as it begins."""
    from trained import built

    from labcode.train.observers.validation import validate

    return validate(built(config))


@pytest.mark.parametrize(
    ("fraction", "changed"),
    [
        (0.2, {"parallel.zero_stage": 3}),
        (0.2, {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"}),
        (0.2, {"parallel.pp": 2}),
        (0.04, {"parallel.zero_stage": 2}),  # FSDP2 keeps weights whole after the first batch
    ],
)
def test_a_rank_without_a_sample_takes_part_in_the_forward_of_validation(
    ranks1, ranks2, fraction, changed
):
    """The last batch, or the only one, has one sample, for four micro-batches."""
    few = {"train.global_batch": 4, "train.micro_batch": 1, "train.eval_batches": 9}
    config = recipes.with_changes(
        MODELS[WEATHER], {**few, "model.num_layers": 2, "data.val_fraction": fraction}
    )
    (alone,) = ranks1.run(validated, config)
    for loss in ranks2.run(validated, recipes.with_changes(config, changed)):
        assert loss == pytest.approx(alone, rel=0, abs=1e-9)


def diverge(config):
    from labcode.train.finite import Diverged

    try:
        fit(config)
    except Diverged as error:
        return str(error)
    return None


@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_a_run_that_diverges_stops_on_every_rank_with_one_line(ranks2, axis):
    wild = {"optim.lr": 1e300, "optim.min_lr": 1e300, "optim.clip_norm": 0, f"parallel.{axis}": 2}
    messages = set(ranks2.run(diverge, recipes.with_changes(GPT, wild)))
    assert len(messages) == 1
    assert "lower optim.lr" in messages.pop()


REPEATED = [  # (dp, pp, cp, tp): the model, and what else is switched on
    ((1, 1, 1, 1), WEATHER, {}),
    ((2, 1, 1, 1), TIED, {"parallel.data_parallel": "labcode", "parallel.zero_stage": 3}),
    ((2, 1, 1, 1), WEATHER, {"parallel.zero_stage": 3}),
    ((1, 1, 1, 2), GROUPED, {"parallel.sequence_parallel": True}),
    ((1, 1, 2, 1), GROUPED, {}),
    ((1, 1, 2, 1), TIED, {"parallel.context_attention": "all_gather"}),
    ((1, 2, 1, 1), TIED, {"train.micro_batch": 2}),
    (
        (1, 2, 1, 1),
        TIED,
        {"train.micro_batch": 2, "parallel.pipeline_schedule": "zero_bubble"},
    ),
    ((1, 2, 2, 1), TIED, {"train.micro_batch": 4}),
    ((1, 1, 2, 2), GROUPED, {"parallel.sequence_parallel": True}),
]


@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.parametrize(("grid", "name", "extra"), REPEATED, ids=name_of)
def test_activation_checkpointing_trains_like_one_process(
    request, reference, grid, name, extra, kind
):
    dp, pp, cp, tp = grid
    pool = request.getfixturevalue(f"ranks{dp * pp * cp * tp}")
    chosen = {"parallel.pp": pp, "parallel.activation_checkpointing": kind}
    config = recipes.with_changes(MODELS[name], changes(dp, cp, tp, **(chosen | extra)))
    assert_same(pool.run(fit, config), reference(name))


FRONT = ("embed", "blocks.0", "blocks.1")  # all of the first of two stages
FROZEN = [  # (dp, pp, cp, tp): what is frozen, the model, and what else is switched on
    ((1, 1, 1, 1), ("blocks.*.mlp",), TIED, {}),
    ((1, 2, 1, 1), FRONT, GROUPED, {}),
    ((1, 2, 1, 1), FRONT, GROUPED, {"parallel.pipeline_schedule": "zero_bubble"}),
    ((1, 2, 1, 1), FRONT, GROUPED, {"parallel.activation_checkpointing": "full"}),
    ((1, 2, 1, 1), ("blocks.2", "blocks.3", "norm", "head"), GROUPED, {}),
    ((1, 2, 1, 1), ("blocks.*",), TIED, {}),
    ((1, 4, 1, 1), ("embed", "blocks.0", "blocks.1", "blocks.2"), GROUPED, {}),
    ((1, 2, 1, 2), FRONT, GROUPED, {"parallel.sequence_parallel": True}),
    ((1, 2, 2, 1), FRONT, GROUPED, {}),
    ((2, 2, 1, 1), FRONT, GROUPED, {"parallel.zero_stage": 1, "parallel.data_parallel": "labcode"}),
    ((2, 2, 1, 1), FRONT, GROUPED, {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"}),
    ((2, 2, 1, 1), ("embed",), TIED, {"parallel.data_parallel": "labcode"}),
    ((2, 1, 1, 1), ("blocks.0", "blocks.*.norm1"), TIED, {"parallel.data_parallel": "ddp"}),
    ((2, 1, 1, 1), FRONT, GROUPED, {"parallel.zero_stage": 3, "parallel.data_parallel": "ddp"}),
    ((4, 1, 1, 1), FRONT, GROUPED, {"parallel.zero_stage": 2, "parallel.data_parallel": "ddp"}),
    ((4, 1, 1, 1), FRONT, GROUPED, {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"}),
    ((1, 1, 1, 4), ("blocks.*.norm1", "head"), GROUPED, {"parallel.sequence_parallel": True}),
    ((1, 1, 4, 1), ("blocks.*",), WEATHER, {}),
]


@pytest.mark.parametrize(("grid", "frozen", "name", "extra"), FROZEN, ids=name_of)
def test_frozen_weights_train_like_one_process(request, deep_reference, grid, frozen, name, extra):
    """A stage that is frozen as a whole has nothing to do in backward, and is no special case."""
    dp, pp, cp, tp = grid
    pool = request.getfixturevalue(f"ranks{dp * pp * cp * tp}")
    base = recipes.with_changes(
        MODELS[name], {"model.num_layers": 4, "train.freeze": frozen, "optim.clip_norm": 0.002}
    )
    chosen = {"parallel.pp": pp, "train.micro_batch": 2}
    config = recipes.with_changes(base, changes(dp, cp, tp, **(chosen | extra)))
    assert_same(pool.run(fit, config), deep_reference(base))


MIXTURE = recipes.with_changes(
    MODELS[GROUPED],
    {
        "model.num_layers": 4,
        "model.num_experts": 4,
        "model.expert_ffn_size": 12,
        "model.shared_ffn_size": 8,
        "model.router": "sigmoid",
        "model.router_z_loss": 0.01,
        "model.router_bias_rate": 0.01,
    },
)
DROPS = recipes.with_changes(
    MIXTURE,
    {
        "model.router": "softmax",
        "model.expert_capacity": 1.0,
        "model.router_bias_rate": 0.0,
        "model.router_balance": 0.1,
        "model.experts_per_token": 3,
        "model.shared_ffn_size": 0,
    },
)
SEQUENCE = {"parallel.sequence_parallel": True}
EXPERTS = [  # (dp, ep, pp, cp, tp): the model, and what else is switched on
    ((1, 1, 1, 1, 1), MIXTURE, {"train.micro_batch": 2}),
    ((2, 1, 1, 1, 1), MIXTURE, {"train.micro_batch": 1}),
    ((2, 2, 1, 1, 1), MIXTURE, {"train.micro_batch": 2}),
    ((2, 2, 1, 1, 1), DROPS, {"parallel.bucket_mb": 1e-3}),
    ((2, 2, 1, 1, 1), MIXTURE, {"parallel.activation_checkpointing": "full"}),
    ((1, 1, 1, 1, 2), MIXTURE, {}),
    ((1, 1, 1, 1, 2), MIXTURE, SEQUENCE),
    ((1, 1, 1, 2, 1), MIXTURE, {}),
    ((1, 1, 2, 1, 1), MIXTURE, {"train.micro_batch": 2}),
    ((4, 2, 1, 1, 1), MIXTURE, {"train.micro_batch": 1}),
    ((4, 4, 1, 1, 1), DROPS, {}),
    ((2, 2, 1, 1, 2), MIXTURE, {**SEQUENCE, "train.micro_batch": 2}),
    ((2, 2, 1, 1, 2), DROPS, {"parallel.order": "dp-tp-cp-pp"}),
    ((2, 2, 1, 2, 1), MIXTURE, {}),
    ((2, 2, 2, 1, 1), MIXTURE, {"train.micro_batch": 1}),
    (
        (2, 2, 2, 1, 1),
        MIXTURE,
        {"train.micro_batch": 1, "parallel.pipeline_schedule": "zero_bubble"},
    ),
    ((1, 1, 1, 2, 2), MIXTURE, {**SEQUENCE, "parallel.context_attention": "all_gather"}),
]
for stage, whose in ((1, "labcode"), (2, "labcode"), (3, "labcode"), (2, "ddp"), (3, "ddp")):
    zero = {"parallel.zero_stage": stage, "parallel.data_parallel": whose, "train.micro_batch": 1}
    EXPERTS.append(((2, 2, 1, 1, 1), MIXTURE, zero))
    EXPERTS.append(((4, 2, 1, 1, 1), MIXTURE, zero))
ZERO_3 = {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode", "train.micro_batch": 1}
EXPERTS += [
    ((2, 1, 1, 1, 1), DROPS, ZERO_3),
    ((2, 2, 1, 1, 2), MIXTURE, {**ZERO_3, **SEQUENCE}),
    ((2, 2, 1, 2, 1), MIXTURE, {**ZERO_3, "train.micro_batch": 2}),
    ((2, 2, 2, 1, 1), DROPS, ZERO_3),
    ((2, 2, 1, 2, 1), MIXTURE, {"parallel.zero_stage": 3, "parallel.data_parallel": "ddp"}),
]
ON_EIGHT_EXPERTS = [
    ((4, 2, 1, 1, 2), MIXTURE, {**ZERO_3, **SEQUENCE}),
    ((4, 2, 1, 2, 1), MIXTURE, {"parallel.zero_stage": 2, "parallel.data_parallel": "labcode"}),
    ((4, 2, 1, 2, 1), MIXTURE, {"parallel.zero_stage": 3, "parallel.data_parallel": "ddp"}),
    ((8, 4, 1, 1, 1), MIXTURE, {}),
    ((4, 2, 1, 1, 2), MIXTURE, SEQUENCE),
    ((2, 2, 2, 1, 2), MIXTURE, {**SEQUENCE, "train.micro_batch": 1}),
    ((4, 4, 1, 2, 1), MIXTURE, {"train.micro_batch": 1}),
    ((2, 2, 1, 2, 2), MIXTURE, SEQUENCE),
    ((4, 2, 2, 1, 1), DROPS, {"train.micro_batch": 1}),
]
for each in ON_EIGHT_EXPERTS:
    EXPERTS.append(pytest.param(*each, marks=pytest.mark.release))


def id_of(value):
    """The id of a grid or a model of experts."""
    if isinstance(value, tuple):
        return "-".join(map(str, value))
    return {id(MIXTURE): "mixture", id(DROPS): "with drops"}.get(id(value))


@pytest.mark.parametrize(("grid", "model", "extra"), EXPERTS, ids=id_of)
def test_every_grid_of_experts_trains_like_one_process(request, deep_reference, grid, model, extra):
    """Losses, norms and weights, the biases of the routers among them."""
    dp, ep, pp, cp, tp = grid
    pool = request.getfixturevalue(f"ranks{dp * pp * cp * tp}")
    chosen = {"parallel.pp": pp, "parallel.ep": ep, "parallel.data_parallel": "labcode"}
    config = recipes.with_changes(model, changes(dp, cp, tp, **(chosen | extra)))
    assert_same(pool.run(fit, config), deep_reference(model))
