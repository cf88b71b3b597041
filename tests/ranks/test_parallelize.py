"""Putting a model on the grid: whose weights, which random numbers, and programs that train so."""

import pytest
import torch
import torch.distributed as dist

from labcode import recipes
from labcode.comm.grid import Grid
from labcode.config import GPTConfig, ParallelConfig, ViTConfig
from labcode.models.gpt import GPT
from labcode.models.layers import initialize
from labcode.models.parallelize import parallelize
from labcode.models.vit import ViT
from labcode.parallel.dropout import IsolatedRng, RngStream
from labcode.topology import GridShape

SMALL = GPTConfig(
    vocab_size=23, context_length=16, num_layers=1, num_heads=4, num_kv_heads=4, hidden_size=16
)
SHAPES = [GridShape(tp=4), GridShape(tp=2, cp=2), GridShape(dp=2, tp=2, order="dp-cp-tp-pp")]


def drawn(rank, shape, tie):
    """(weights, largest tensor made, numbers kept) of a model on the meta device.

    The weights are drawn as parts and put together again.
    """
    from dataclasses import replace

    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not out.is_meta:
                self.numbers = max(
                    self.numbers, out.untyped_storage().nbytes() // out.element_size()
                )
            return out

    with torch.device("meta"):
        model = GPT(replace(SMALL, tie_embeddings=tie))
    grid = Grid.create(shape)
    with Largest() as largest:
        # DDP makes buckets at once
        model = parallelize(
            model, grid, ParallelConfig(data_parallel="labcode"), seed=7, dtype=torch.float64
        )
    whole = {name: weight.clone() for name, weight in model.full_state_dict()}
    return whole, largest.numbers, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_are_drawn_as_the_whole_model_is_without_holding_it(ranks4, shape, tie):
    from dataclasses import replace

    expected = initialize(GPT(replace(SMALL, tie_embeddings=tie)), 7).double().state_dict()
    total = sum(p.numel() for p in GPT(replace(SMALL, tie_embeddings=tie)).parameters())
    for whole, largest, kept in ranks4.run(drawn, shape, tie):
        assert whole.keys() == expected.keys()
        assert all(torch.equal(whole[name], expected[name]) for name in expected)
        # one whole weight at most
        assert largest <= max(weight.numel() for weight in expected.values())
        assert kept < total * (0.75 if shape.tp == 2 else 0.5)


def cut_from_real_model(rank):
    torch.manual_seed(rank)  # the copies differ before, and agree after
    model = GPT(SMALL)
    model.blocks[0].requires_grad_(False)
    parallel = parallelize(model, Grid.create(GridShape(dp=2, tp=2)))
    frozen = [
        not p.requires_grad
        for name, p in parallel.module.named_parameters()
        if name.startswith("blocks.0")
    ]
    return {name: weight.clone() for name, weight in parallel.full_state_dict()}, all(
        frozen
    ) and len(frozen) > 4


def test_copies_start_equal_whatever_each_rank_drew_and_frozen_weights_stay_frozen(ranks4):
    results = ranks4.run(cut_from_real_model)
    for whole, frozen in results:
        assert frozen
        assert all(torch.equal(weight, results[0][0][name]) for name, weight in whole.items())


def dropped(rank, sequence_parallel, tp):
    """What dropout leaves of ones, and the generator's state after.

    What it leaves is (in the residual stream, inside attention).
    """
    from dataclasses import replace

    config = replace(SMALL, dropout=0.5)
    grid = Grid.create(GridShape(tp=tp, dp=dist.get_world_size() // tp))
    model = parallelize(
        GPT(config), grid, ParallelConfig(sequence_parallel=sequence_parallel), seed=3
    ).module.train()
    ones = torch.ones(2, 4, 64, 8)
    twice = [
        model.blocks[0].attention.core(ones, ones, ones).flatten()[:500].detach() for _ in range(2)
    ]
    assert not torch.equal(*twice)  # a stream goes on
    return model.blocks[0].mlp.dropout(torch.ones(500)), twice[0], torch.get_rng_state()


def test_dropout_draws_alike_where_replicated_and_apart_where_sharded(ranks4):
    for sequence_parallel in (False, True):
        (residual, heads, state), *others = ranks4.run(dropped, sequence_parallel, tp=4)
        for other_residual, other_heads, other_state in others:
            assert torch.equal(residual, other_residual) == (not sequence_parallel)
            assert not torch.equal(heads, other_heads)
            assert torch.equal(state, other_state)  # the process's own generator stays alike
    results = ranks4.run(dropped, False, tp=2)
    assert not torch.equal(results[0][0], results[2][0])  # other samples, other numbers


def test_a_stream_goes_on_where_it_stopped_and_leaves_the_generator_alone():
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)
    stream = RngStream(5, torch.device("cpu"))
    draw = IsolatedRng(torch.nn.Dropout(0.5), stream)
    first = torch.rand(2)
    apart = [draw(torch.ones(64)) for _ in range(2)]
    assert torch.equal(torch.cat((first, torch.rand(2))), expected)
    torch.manual_seed(5)
    assert all(torch.equal(x, torch.nn.functional.dropout(torch.ones(64), 0.5)) for x in apart)


def described(rank):
    vit = ViT(ViTConfig(num_variables=2, lat=10, lon=20, num_layers=1, hidden_size=16, ffn_size=32))
    return parallelize(
        vit, Grid.create(GridShape(tp=2)), ParallelConfig(sequence_parallel=True)
    ).describe()


def test_the_table_says_what_was_done(ranks2):
    text = ranks2.run(described)[0]
    for line in (
        "blocks.*.mlp.up           all-gather, then column-parallel",
        "blocks.0.mlp.up.weight          [32, 16] -> [16, 16]        gradient summed over: cp",
        "blocks.0.norm1.weight           [16] -> [16]                gradient summed over: cp, tp",
    ):
        assert line in text.splitlines()


def trained_bf16(rank):
    """Losses of a short run under autocast, all axes of two ranks in use one after the other."""
    from trained import built

    from labcode.run import run

    losses = []
    for axes in ({"tp": 1}, {"tp": 2}, {"tp": 2, "sequence": True}, {"cp": 2}):
        changes = {f"parallel.{axis}": size for axis, size in axes.items() if axis != "sequence"}
        small = {
            "model.num_layers": 1,
            "model.hidden_size": 32,
            "train.steps": 8,
            "train.log_every": 8,
            "train.global_batch": 8,
        }
        sequence = {
            "parallel.sequence_parallel": "sequence" in axes,
            "train.dtype": "bfloat16",
            "train.sample_tokens": 0,
        }
        config = recipes.with_changes(recipes.gpt_tiny(), changes | small | sequence)
        training = built(config)
        losses.append(run.train(training)[0]["loss"])
    return losses


def test_bfloat16_trains_on_every_axis(ranks2):
    alone, *others = ranks2.run(trained_bf16)[0]
    # every f forgotten: 0.9 %; sums of shared gradients forgotten: 0.14 %
    assert others == pytest.approx([alone] * 3, rel=5e-4)


def test_a_meta_model_without_a_seed_is_refused(ranks1):
    def attempt(rank):
        with torch.device("meta"):
            model = GPT(SMALL)
        with pytest.raises(ValueError, match="give the seed"):
            parallelize(model, Grid.create(GridShape()))
        return True

    assert ranks1.run(attempt) == [True]


def communicates_in_forward(rank, parallel):
    """Whether this rank talks to others of dp in the first forward after a step."""
    from labcode.comm.counting import counted

    model = parallelize(initialize(GPT(SMALL), 1), Grid.create(GridShape(dp=2)), parallel)
    batch = torch.zeros(2, 16, dtype=torch.int64)
    model.forward_backward([(batch, batch)])
    with counted() as calls, torch.no_grad():
        model(batch)
    return len(calls) > 0


@pytest.mark.parametrize("whose", ["ddp", "labcode"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_config_says_whether_weights_are_divided_and_gathered_in_forward(ranks2, stage, whose):
    parallel = ParallelConfig(zero_stage=stage, data_parallel=whose)
    assert ranks2.run(communicates_in_forward, parallel) == [parallel.divides_weights] * 2


def gradients(rank, shape, tokens, sequence_parallel, context, frozen, positions):
    """How far loss, gradients and gradient norm are from those of one process.

    Some targets are ignored, and lengths are odd.
    """
    from labcode.models import gpt

    config = GPTConfig(
        23, 32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_size=16, positions=positions
    )

    def build():
        model = initialize(GPT(config), 1).double()
        with torch.no_grad():  # far from the start: norms that scale, biases that are not zero
            for param in model.parameters():
                param.add_(torch.linspace(0.1, 0.3, param.numel()).view_as(param)).mul_(2)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        return model

    generator = torch.Generator().manual_seed(2)
    inputs, targets = torch.randint(23, (2, 4, tokens), generator=generator)
    targets[:, :3] = -100
    targets[0] = -100
    whole = build()
    expected = gpt.loss(whole(inputs), targets)
    expected.backward()
    model = parallelize(
        build(),
        Grid.create(shape),
        ParallelConfig(sequence_parallel=sequence_parallel, context_attention=context),
    )
    loss = model.loss(model(inputs), targets)
    loss.backward()
    model.finish_gradient_sync()
    off = [abs(loss - expected).item()]
    for name, param in model.module.named_parameters():
        grad = whole.get_parameter(name).grad
        assert (grad is None) == (param.grad is None)
        if grad is not None:
            off.append(
                (param.grad - model.shardings[name].own(grad, model.grid)).abs().max().item()
            )
    norm = torch.nn.utils.get_total_norm(
        [param.grad for param in whole.parameters() if param.grad is not None]
    )
    return max(off), abs(model.gradient_norm() - norm).item()


FROZEN = (
    "embed.weight",
    "blocks.0.norm1.weight",
    "blocks.0.attention.qkv.weight",
    "blocks.1.mlp.down.weight",
)


@pytest.mark.parametrize(
    ("shape", "tokens", "options"),
    [
        (GridShape(cp=2, tp=2), 13, (False, "ring", (), "rotary")),
        (GridShape(cp=2, tp=2), 13, (False, "all_gather", FROZEN, "learned")),
        (GridShape(cp=2, tp=2), 16, (True, "all_gather", FROZEN, "rotary")),
        (GridShape(cp=2, tp=2), 16, (True, "ring", FROZEN, "learned")),
        (GridShape(cp=4), 5, (False, "ring", (), "learned")),
        (GridShape(cp=4), 5, (False, "all_gather", (), "rotary")),
    ],
)
def test_frozen_weights_ignored_targets_and_uneven_sequences_give_the_right_gradients(
    ranks4, shape, tokens, options
):
    for off, norm_off in ranks4.run(gradients, shape, tokens, *options):
        assert max(off, norm_off) < 1e-9


def test_a_length_that_sequence_parallelism_cannot_cut_is_refused_on_every_rank(ranks4):
    def attempt(rank):
        model = parallelize(
            GPT(SMALL), Grid.create(GridShape(cp=2, tp=2)), ParallelConfig(sequence_parallel=True)
        )
        with pytest.raises(ValueError, match=r"13 tokens are not divisible by cp\*tp = 4"):
            model(torch.zeros(1, 13, dtype=torch.int64))
        return True

    assert ranks4.run(attempt) == [True] * 4


def test_a_token_outside_the_vocabulary_is_refused(ranks1):
    def attempt(rank):
        model = parallelize(GPT(SMALL), Grid.create(GridShape()))
        for tokens, targets in ((23, 0), (0, 23), (-1, 0)):
            with pytest.raises(RuntimeError, match="a token is outside 0 to 22"):
                model.loss(model(torch.full((1, 4), tokens)), torch.full((1, 4), targets))
        return True

    assert ranks1.run(attempt) == [True]


def sent_under_autocast(rank, sequence_parallel):
    from labcode.comm.counting import counted

    model = parallelize(
        GPT(SMALL),
        Grid.create(GridShape(tp=2)),
        ParallelConfig(sequence_parallel=sequence_parallel),
    )
    tokens = torch.zeros(3, 16, dtype=torch.int64)
    with counted() as calls, torch.autocast("cpu", torch.bfloat16):
        model(tokens).float().sum().backward()
    activation = 3 * 16 * SMALL.hidden_size
    return [call.num_bytes / activation for call in calls if call.group_size == 2]


def test_activations_travel_in_the_dtype_of_autocast(ranks2):
    # the embedding's output is float32, 4 bytes a number, and so is its gradient; qkv, proj, up,
    # down and head have 2
    for sequence_parallel, wide in ((False, 1), (True, 2)):
        sent = sorted(ranks2.run(sent_under_autocast, sequence_parallel)[0])
        assert sent == [2.0] * (len(sent) - wide) + [4.0] * wide and len(sent) > 5
