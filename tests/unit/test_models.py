"""GPT and ViT: what they compute, how they are initialised, counted and cut."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labcode import recipes
from labcode.config import GPTConfig, ViTConfig
from labcode.models import gpt, layers, vit
from labcode.models.gpt import GPT, generate
from labcode.models.layers import Attention, Rotary, initial_value, initialize, rotate
from labcode.models.vit import ViT, latitude_weights, patchify, unpatchify

SMALL = GPTConfig(vocab_size=17, context_length=12, num_layers=2, num_heads=4, hidden_size=32)
VARIANTS = {
    "learned": {},
    "rotary": {"positions": "rotary"},
    "untied": {"tie_embeddings": False},
    "grouped": {"num_kv_heads": 2, "positions": "rotary"},
    "one kv head": {"num_kv_heads": 1},
    "narrow mlp": {"ffn_size": 40},
}
WEATHER = ViTConfig(
    num_variables=3, lat=6, lon=10, patch_size=2, num_layers=2, num_heads=2, hidden_size=16
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def elsewhere():
    """What another process finds: the modules that the models bring, and one initial value."""
    code = """if True:
        import json, sys
        from labcode.config import GPTConfig
        import labcode.models.gpt, labcode.models.hub, labcode.models.vit
        from labcode.models.layers import initial_value
        modules = [m for m in sys.modules if m.startswith(("transformers", "labcode"))]
        value = initial_value("blocks.0.mlp.up.weight", (3, 5), GPTConfig(), 7)
        print(json.dumps({"modules": modules, "value": value.tolist()}))"""
    return json.loads(
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
    )


def small(variant="learned", **changes):
    return dataclasses.replace(SMALL, **VARIANTS[variant] | changes)


def tokens(config, batch=2, length=None, seed=0):
    shape = (batch, length or config.context_length)
    return torch.randint(config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


# ---- GPT


@pytest.mark.parametrize("variant", VARIANTS)
def test_gpt_maps_tokens_to_logits_and_every_parameter_learns(variant):
    config = small(variant)
    model = initialize(GPT(config), seed=0)
    for length in (1, 5, config.context_length):
        assert model(tokens(config, 3, length)).shape == (3, length, config.vocab_size)
    gpt.loss(model(tokens(config)), tokens(config, seed=1)).backward()
    idle = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    ]
    assert idle == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_later_token_does_not_change_earlier_logits(variant):
    config = small(variant)
    model = initialize(GPT(config).double(), seed=0)
    one = tokens(config)
    other = one.clone()
    other[:, 7] = (one[:, 7] + 1) % config.vocab_size
    before, after = model(one), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=0, atol=1e-12)
    assert (before[:, 7:] - after[:, 7:]).abs().amax(dim=(0, 2)).min() > 1e-9, (
        "later logits should see the change"
    )


@pytest.mark.parametrize("variant", ["learned", "rotary"])
def test_given_positions_say_where_tokens_stand(variant):
    config = small(variant)
    model = initialize(GPT(config), seed=0)
    some = tokens(config, length=4)
    torch.testing.assert_close(model(some, torch.arange(4)), model(some))
    shifted = model(some, torch.arange(4) + 5)
    if variant == "rotary":  # only differences of positions count
        torch.testing.assert_close(shifted, model(some), rtol=1e-5, atol=1e-6)
        assert (model(some, torch.tensor([0, 2, 4, 6])) - model(some)).abs().max() > 1e-5
    else:
        assert (shifted - model(some)).abs().max() > 1e-4


def test_tied_weights_share_storage_and_learn_as_one():
    model = initialize(GPT(small()), seed=0)
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())
    untied = GPT(small("untied"))
    untied.load_state_dict(model.state_dict())
    batch, targets = tokens(SMALL), tokens(SMALL, seed=1)
    for each in (model, untied):
        gpt.loss(each(batch), targets).backward()
    together = untied.embed.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(model.embed.weight.grad, together)
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.testing.assert_close(model.head.weight, untied.head.weight - together)


def test_tied_weights_stay_tied_through_the_meta_device_and_casts():
    with torch.device("meta"):
        model = GPT(small())
    model.to_empty(device="cpu")
    assert model.head.weight is model.embed.weight
    initialize(model, seed=3)
    for name, value in initialize(GPT(small()), seed=3).state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    assert model.double().head.weight is model.embed.weight


def test_loss_is_cross_entropy_in_nats_and_ignores_minus_100():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[0, 4, -100], [2, -100, 1]])
    by_hand = [
        -(logits[b, s].log_softmax(0)[targets[b, s]])
        for b in range(2)
        for s in range(3)
        if targets[b, s] >= 0
    ]
    torch.testing.assert_close(gpt.loss(logits, targets), torch.stack(by_hand).mean())
    assert gpt.loss(logits.bfloat16(), targets).dtype == torch.float32
    fresh = initialize(GPT(small()), seed=0)
    assert (
        abs(
            gpt.loss(fresh(tokens(SMALL)), tokens(SMALL, seed=1)).item()
            - math.log(SMALL.vocab_size)
        )
        < 0.1
    )


def test_gpt_learns_a_sequence_by_heart_and_generates_it():
    config = small(context_length=8)
    model = initialize(GPT(config), seed=0)
    text = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        value = gpt.loss(model(text[:, :-1]), text[:, 1:])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert value.item() < 0.05
    assert generate(model, text[:, :1], 8, temperature=0).tolist() == text.tolist()


def test_generate_is_seeded_keeps_the_mode_and_goes_beyond_the_context():
    model = initialize(GPT(small(dropout=0.5)), seed=0).train()
    prompt = tokens(SMALL, length=3)
    draw = lambda seed: generate(model, prompt, 15, 1.0, torch.Generator().manual_seed(seed))  # noqa: E731
    one = draw(1)
    assert one.shape == (2, 18) and torch.equal(one[:, :3], prompt) and torch.equal(one, draw(1))
    assert not torch.equal(one, draw(2))
    assert model.training
    with pytest.raises(
        ValueError, match=r"prompt of 0 tokens, temperature=1.0: give at least 1 and at least 0"
    ):
        generate(model, prompt[:, :0], 1)
    with pytest.raises(ValueError, match="temperature=-1"):
        generate(model, prompt, 1, -1)


def test_dropout_acts_in_training_only():
    model = initialize(GPT(small(dropout=0.3)), seed=0)
    assert not torch.equal(model(tokens(SMALL)), model(tokens(SMALL)))
    model.eval()
    assert torch.equal(model(tokens(SMALL)), model(tokens(SMALL)))
    plain = initialize(GPT(small()), seed=0)
    torch.testing.assert_close(model(tokens(SMALL)), plain(tokens(SMALL)))


def test_gpt_errors_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"vocab_size=None: set model.vocab_size to a number, or take it from the data",
    ):
        GPT(dataclasses.replace(SMALL, vocab_size=None))
    with pytest.raises(
        ValueError, match=r"13 tokens do not fit context_length=12: cut the sequence or raise"
    ):
        GPT(small())(tokens(SMALL, length=13))


# ---- attention and rotary positions


def test_attention_equals_softmax_written_out():
    attention = Attention(24, 6, 2, causal=True).double()
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).split((24, 8, 8), dim=-1)
    out = torch.empty(2, 5, 24, dtype=torch.float64)
    for head in range(6):
        mine, group = slice(4 * head, 4 * head + 4), slice(4 * (head // 3), 4 * (head // 3) + 4)
        scores = q[..., mine] @ k[..., group].transpose(1, 2) / math.sqrt(4)
        scores.masked_fill_(torch.ones(5, 5).triu(1).bool(), -math.inf)
        out[..., mine] = scores.softmax(-1) @ v[..., group]
    torch.testing.assert_close(attention(x), out @ attention.proj.weight.T + attention.proj.bias)


@pytest.mark.parametrize("rotary", [False, True])
def test_grouped_queries_equal_repeated_key_value_heads(rotary):
    """An attention with 4 query and 2 kv heads is one with 4 and 4 whose kv heads are there twice.

    Gradients of the two copies add up.
    """
    grouped, full = (
        Attention(32, 4, 2, causal=True).double(),
        Attention(32, 4, 4, causal=True).double(),
    )

    def repeated(rows):  # [q | k | v] with 2 kv heads -> with 4
        q, k, v = rows.split((32, 16, 16))
        return torch.cat(
            [q]
            + [part.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1) for part in (k, v)]
        )

    with torch.no_grad():
        full.qkv.weight.copy_(repeated(grouped.qkv.weight))
        full.qkv.bias.copy_(repeated(grouped.qkv.bias))
        full.proj.load_state_dict(grouped.proj.state_dict())
    x = torch.randn(3, 7, 32, dtype=torch.float64)
    rotation = Rotary(8)(torch.arange(7), x.dtype) if rotary else None
    torch.testing.assert_close(grouped(x, rotation), full(x, rotation))
    for each in (grouped, full):
        each(x, rotation).square().sum().backward()
    q, k, v = full.qkv.weight.grad.split((32, 32, 32))
    summed = torch.cat([q] + [part.unflatten(0, (2, 2, 8)).sum(1).flatten(0, 1) for part in (k, v)])
    torch.testing.assert_close(grouped.qkv.weight.grad, summed)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_of_a_part_of_the_heads(kv_heads):
    """Halves of q, k and v heads with the matching columns of proj add up to the whole.

    Tensor parallelism needs that.
    """
    whole = Attention(32, 4, kv_heads, causal=True).double()
    x = torch.randn(2, 6, 32, dtype=torch.float64)
    rotation = Rotary(8)(torch.arange(6), x.dtype)
    total = whole.proj.bias
    for half in range(2):
        part = Attention(32, 4, kv_heads, causal=True).double()
        q_k_v = torch.arange((4 + 2 * kv_heads) * 8).split((32, kv_heads * 8, kv_heads * 8))
        rows = torch.cat([rows.chunk(2)[half] for rows in q_k_v])
        part.qkv = torch.nn.Linear(32, len(rows)).double()
        part.proj = torch.nn.Linear(16, 32, bias=False).double()
        with torch.no_grad():
            part.qkv.weight.copy_(whole.qkv.weight[rows])
            part.qkv.bias.copy_(whole.qkv.bias[rows])
            part.proj.weight.copy_(whole.proj.weight.chunk(2, dim=1)[half])
        total = total + part(x, rotation)
    torch.testing.assert_close(total, whole(x, rotation))


def test_core_attention_can_be_replaced():
    class Means(torch.nn.Module):
        def forward(self, q, k, v):
            assert q.shape == (2, 4, 6, 8) and k.shape == v.shape == (2, 2, 6, 8)
            return v.mean(dim=2, keepdim=True).repeat_interleave(2, dim=1).expand_as(q)

    attention = Attention(32, 4, 2, causal=False)
    attention.core = Means()
    out = attention(torch.randn(2, 6, 32))
    torch.testing.assert_close(out, out[:, :1].expand_as(out))


def test_rotation_equals_multiplication_of_complex_numbers():
    x = torch.randn(2, 9, 3, 8, dtype=torch.float64)  # [B, S, heads, D]
    positions = torch.tensor([0, 1, 2, 3, 5, 8, 13, 100, 100_000])
    numbers = torch.complex(x[..., :4], x[..., 4:])
    turned = torch.empty_like(numbers)
    for s, position in enumerate(positions.tolist()):
        for i in range(4):
            angle = position / 10000 ** (2 * i / 8)
            turned[:, s, :, i] = numbers[:, s, :, i] * complex(math.cos(angle), math.sin(angle))
    ours = rotate(x, Rotary(8)(positions, x.dtype))
    torch.testing.assert_close(
        ours, torch.cat((turned.real, turned.imag), dim=-1), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        rotate(x.float(), Rotary(8)(positions)).double(), ours, rtol=0, atol=1e-5
    )
    assert rotate(x.bfloat16(), Rotary(8)(positions, torch.bfloat16)).dtype == torch.bfloat16


def test_rotated_products_depend_on_the_distance_alone():
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)
    at = lambda x, position: rotate(x, Rotary(16)(torch.tensor([position]), x.dtype)).flatten()  # noqa: E731
    reference = at(q, 7) @ at(k, 3)
    for shift in (1, 50, 4000):
        torch.testing.assert_close(at(q, 7 + shift) @ at(k, 3 + shift), reference)
    assert abs(at(q, 8) @ at(k, 3) - reference) > 1e-6
    torch.testing.assert_close(at(q, 9).norm(), q.norm())


# ---- initial values


def test_initial_values_depend_on_seed_and_name_alone():
    float32 = initialize(GPT(small("grouped")), 5)
    for dtype in (torch.float64, torch.bfloat16):
        other = initialize(GPT(small("grouped")).to(dtype), 5)
        for name, value in float32.named_parameters():
            assert torch.equal(value.to(dtype), other.get_parameter(name)), name
    for name, value in reversed(list(float32.named_parameters())):  # in another order, each alone
        assert torch.equal(initial_value(name, value.shape, small("grouped"), 5), value), name
    other = initialize(GPT(small("grouped")), 6)
    assert not torch.equal(other.embed.weight, float32.embed.weight)
    weights = [p for p in float32.parameters() if p.dim() == 2 and p.shape == (32, 32)]
    assert len(weights) == 2 and not torch.equal(*weights)


def test_initial_values_are_the_same_in_another_process(elsewhere):
    assert (
        elsewhere["value"]
        == initial_value("blocks.0.mlp.up.weight", (3, 5), GPTConfig(), 7).tolist()
    )


def test_initial_values_have_the_deviations_of_gpt2():
    config = GPTConfig(vocab_size=500, num_layers=8, hidden_size=128)
    values = {name: p.detach() for name, p in initialize(GPT(config), 0).named_parameters()}
    for name, value in values.items():
        if "norm" in name and name.endswith("weight"):
            assert (value == 1).all(), name
        elif name.endswith("bias"):
            assert (value == 0).all(), name
        else:
            residual = name.endswith(("proj.weight", "down.weight"))
            assert value.std().item() == pytest.approx(0.02 / 4 if residual else 0.02, rel=0.05), (
                name
            )
            assert abs(value.mean().item()) < 0.02 * 0.05, name


def test_a_new_model_draws_from_torchs_generator():
    torch.manual_seed(11)
    one, two = GPT(small()), GPT(small())
    torch.manual_seed(11)
    again = GPT(small())
    assert torch.equal(one.embed.weight, again.embed.weight)
    assert not torch.equal(one.embed.weight, two.embed.weight)
    assert one.embed.weight.std().item() == pytest.approx(0.02, rel=0.2)


def test_meta_parameters_cannot_be_initialised():
    with torch.device("meta"):
        model = GPT(small())
    with pytest.raises(
        ValueError,
        match=r"embed.weight is on the meta device, .* call model.to_empty\(device=...\) first",
    ):
        initialize(model, 0)


# ---- counting


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", recipes.GPT_SHAPES)
def test_every_shape_is_built_on_meta_with_the_predicted_number_of_parameters(name):
    config = recipes.gpt_shape(name)
    with torch.device("meta"):
        model = GPT(config)
        assert model(torch.empty(1, config.context_length, dtype=torch.int64)).shape[-1] == 50257
    assert count(model) == config.num_parameters


@pytest.mark.parametrize("variant", VARIANTS)
def test_num_parameters_of_every_variant(variant):
    assert count(GPT(small(variant))) == small(variant).num_parameters


def test_published_numbers_of_parameters():
    """Brown et al. 2020, table 2.1, to the digits printed there.

    GPT-2's own count is of context 1024.
    """
    assert recipes.gpt_shape("gpt_175b").num_parameters == pytest.approx(175.0e9, rel=0.005)
    assert recipes.gpt_shape("gpt_13b").num_parameters == pytest.approx(13.0e9, rel=0.02)
    assert recipes.gpt_shape("gpt_124m", context_length=1024).num_parameters == 124_439_808
    with pytest.raises(ValueError, match="vocab_size=None"):
        _ = GPTConfig().num_parameters
    with pytest.raises(ValueError, match="num_variables=None"):
        _ = ViTConfig().num_parameters


def test_num_parameters_of_a_vit():
    assert count(ViT(WEATHER)) == WEATHER.num_parameters
    with torch.device("meta"):
        config = dataclasses.replace(
            recipes.vit_tiny().model, num_variables=4, lat=90, lon=180, ffn_size=300
        )
        assert count(ViT(config)) == config.num_parameters


# ---- ViT


@pytest.mark.parametrize(
    "shape, patch", [((2, 3, 6, 10), 2), ((1, 1, 15, 5), 5), ((3, 4, 4, 12), 4), ((2, 2, 3, 7), 1)]
)
def test_patches_go_back_to_their_places(shape, patch):
    state = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    patches = patchify(state, patch)
    assert patches.shape == (shape[0], shape[2] * shape[3] // patch**2, shape[1] * patch**2)
    assert torch.equal(unpatchify(patches, *shape[1:], patch), state)
    # patch s is one square of all variables, counted along a latitude first
    for s in (0, patches.shape[1] - 1):
        y, x = divmod(s, shape[3] // patch)
        square = state[:, :, y * patch : (y + 1) * patch, x * patch : (x + 1) * patch]
        assert torch.equal(patches[:, s], square.flatten(1))


def test_an_untrained_vit_is_persistence_exactly_and_learns():
    model = initialize(ViT(WEATHER), 0)
    state = torch.randn(2, 3, 6, 10)
    assert torch.equal(model(state), state)
    # the wind blows it round the globe: no patch holds its own answer
    target = state.roll(2, dims=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = vit.loss(model(state), target).item()
    for _ in range(80):
        value = vit.loss(model(state), target)
        optimizer.zero_grad()
        value.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
    assert value.item() < 0.05 * first


def test_a_vit_looks_both_ways():
    model = initialize(ViT(WEATHER), 0).double()
    torch.nn.init.normal_(model.head.weight)
    state = torch.randn(1, 3, 6, 10, dtype=torch.float64)
    other = state.clone()
    other[..., -1, -1] += 1  # in the last patch
    changed = patchify((model(other) - other) - (model(state) - state), 2).abs().amax(dim=(0, 2))
    assert (changed > 1e-9).all()


def test_latitude_weights_follow_the_area_of_a_row():
    weights = latitude_weights(list(range(90, -90, -2)))
    assert weights.shape == (90,) and weights.dtype == torch.float32
    assert weights.mean().item() == pytest.approx(1)
    assert weights[0].item() == pytest.approx(0, abs=1e-6)  # the pole is a point
    # 60 degrees north against the equator
    assert (weights[15] / weights[45]).item() == pytest.approx(0.5)
    with pytest.raises(ValueError, match="latitudes reach 180: give degrees from -90 to 90"):
        latitude_weights([0, 180])


def test_weather_loss_weighs_rows():
    prediction, target = torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 4, 5)
    target[:, :, 1] = 2.0
    weights = torch.tensor([0.5, 1.5, 1.5, 0.5])
    assert vit.loss(prediction, target).item() == pytest.approx(4 / 4)
    assert vit.loss(prediction, target, weights).item() == pytest.approx(1.5 * 4 / 4)


def test_vit_errors_say_what_to_do():
    with pytest.raises(
        ValueError, match=r"lat=None: set model.lat to a number, or take it from the data"
    ):
        ViT(dataclasses.replace(WEATHER, lat=None))
    with pytest.raises(
        ValueError,
        match=r"state is \[2, 3, 10, 6\] but this model takes \[B, 3, 6, 10\]: change the data",
    ):
        ViT(WEATHER)(torch.zeros(2, 3, 10, 6))


def test_bfloat16_autocast_runs_every_variant():
    for variant in VARIANTS:
        model = initialize(GPT(small(variant)), 0)
        with torch.autocast("cpu", torch.bfloat16):
            value = gpt.loss(model(tokens(SMALL)), tokens(SMALL, seed=1))
        value.backward()
        exact = gpt.loss(model(tokens(SMALL)), tokens(SMALL, seed=1))
        assert value.dtype == torch.float32 and value.item() == pytest.approx(
            exact.item(), rel=1e-2
        )


def test_models_know_nothing_of_ranks(elsewhere):
    names = [name.partition(".")[2] for name in elsewhere["modules"]]
    rooms = {name for name in names if name and not name.startswith("models")}
    runtime = {"runtime", "runtime.fields", "runtime.files", "runtime.suggest", "runtime.units"}
    assert rooms <= {"config", "schedules", "topology", *runtime}
    assert "transformers" not in elsewhere["modules"]
    for module in (layers, gpt, vit):
        assert "distributed" not in Path(module.__file__).read_text()
