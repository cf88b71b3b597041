"""GPT against the GPT-2 of `transformers`: an independent implementation of the same function."""

import copy

import pytest
import torch

from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models.gpt import GPT
from labcode.models.hub import gpt_config, load

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[hf]'"
)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def hf():
    """A small GPT-2 with weights and biases that are all far from zero and from one another."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=61, n_positions=24, n_embd=48, n_layer=3, n_head=4,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture
def batch():
    return torch.randint(61, (2, 25), generator=torch.Generator().manual_seed(1))


def assert_same(found, model, atol):
    for name, parameter in model.named_parameters():
        difference = (found[name] - parameter).abs().max().item()
        assert difference <= atol, f"{name} differs by {difference}"


def test_same_logits_as_transformers(hf, batch):
    model = load(GPT(gpt_config(hf.config.to_dict())), hf.state_dict())
    tokens = batch[:, :-1]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), hf(tokens).logits, rtol=0, atol=1e-5)
        exact = copy.deepcopy(hf).double()
        torch.testing.assert_close(model.double()(tokens), exact(tokens).logits, rtol=0, atol=1e-12)


def test_same_gradients_and_the_same_weights_after_five_steps_of_adamw(hf, batch):
    hf = copy.deepcopy(hf).double().train()
    model = load(GPT(gpt_config(hf.config.to_dict())).double(), hf.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (model, hf)]
    tokens, targets = batch[:, :-1], batch[:, 1:]
    for step in range(5):
        ours = gpt.loss(model(tokens), targets)
        theirs = gpt.loss(hf(tokens).logits, targets)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        for optimizer, value in zip(optimizers, (ours, theirs)):
            optimizer.zero_grad()
            value.backward()
        if step == 0:
            grads = load(copy.deepcopy(model), {name: p.grad for name, p in hf.named_parameters()})
            assert_same({name: p.grad for name, p in model.named_parameters()}, grads, atol=1e-12)
        for optimizer in optimizers:
            optimizer.step()
    loaded = load(GPT(gpt_config(hf.config.to_dict())).double(), hf.state_dict())
    assert_same(dict(model.named_parameters()), loaded, atol=1e-9)


def test_same_loss_as_transformers_own(hf, batch):
    model = load(GPT(gpt_config(hf.config.to_dict())), hf.state_dict())
    short = batch[:, :24]
    with torch.no_grad():
        theirs = hf(short, labels=short).loss  # shifts inside
        torch.testing.assert_close(
            gpt.loss(model(short[:, :-1]), short[:, 1:]), theirs, rtol=0, atol=1e-5
        )


def test_loads_the_bare_model_and_old_state_dicts(hf):
    whole = load(GPT(gpt_config(hf.config.to_dict())), hf.state_dict()).state_dict()
    old = hf.transformer.state_dict() | {
        f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24).tril() for i in range(3)
    }
    bare = load(GPT(gpt_config(hf.config.to_dict())), old).state_dict()
    assert all(torch.equal(bare[name], value) for name, value in whole.items())


def test_an_untied_head_has_its_own_weight(hf, batch):
    weights = hf.state_dict() | {"lm_head.weight": hf.state_dict()["lm_head.weight"] + 1.0}
    untied = GPT(gpt_config(hf.config.to_dict(), tie_embeddings=False))
    load(untied, weights)
    assert torch.equal(untied.head.weight, weights["lm_head.weight"])
    assert torch.equal(untied.embed.weight, weights["transformer.wte.weight"])
    with pytest.raises(
        ValueError,
        match=r"lm_head.weight differs from the embedding: give --model.tie_embeddings False",
    ):
        load(GPT(gpt_config(hf.config.to_dict())), weights)


def test_an_untied_head_is_never_taken_from_the_embedding(hf):
    untied = GPT(gpt_config(hf.config.to_dict(), tie_embeddings=False))
    before = copy.deepcopy(untied.state_dict())
    with pytest.raises(ValueError) as caught:
        load(untied, hf.transformer.state_dict())
    assert str(caught.value) == (
        "there is no lm_head.weight but this GPT has a head of its own: take the weights of a "
        "model with a head, or give --model.tie_embeddings True"
    )
    assert all(torch.equal(before[name], value) for name, value in untied.state_dict().items())


def test_wrong_state_dicts_are_one_line_and_change_nothing(hf):
    model = GPT(gpt_config(hf.config.to_dict()))
    before = copy.deepcopy(model.state_dict())

    def error(weights, into=model):
        with pytest.raises(ValueError) as caught:
            load(into, weights)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    weights = hf.state_dict()
    fewer = {name: value for name, value in weights.items() if "h.1.mlp.c_fc" not in name}
    assert "missing h.1.mlp.c_fc.bias, h.1.mlp.c_fc.weight; unexpected none" in error(fewer)
    assert "missing none; unexpected h.0.extra" in error(
        weights | {"transformer.h.0.extra": torch.ones(1)}
    )
    assert "missing wte.weight" in error({k: v for k, v in weights.items() if "wte" not in k})
    everything = error({})
    assert (
        "missing h.0.attn.c_attn.bias, " in everything
        and "and 36 more; unexpected none" in everything
    )
    deeper = GPT(
        GPTConfig(vocab_size=61, context_length=24, num_layers=4, num_heads=4, hidden_size=48)
    )
    assert "missing h.3.attn.c_attn.bias" in error(weights, deeper)
    narrow = GPT(
        GPTConfig(
            vocab_size=61, context_length=24, num_layers=3, num_heads=4, hidden_size=48, ffn_size=50
        )
    )
    assert "blocks.0.mlp.up.weight the shape [192, 48] but the model has [50, 48]" in error(
        weights, narrow
    )
    rotary = GPT(gpt_config(hf.config.to_dict(), positions="rotary"))
    assert "missing embed_tokens.weight, " in error(weights, rotary)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"activation_function": "relu"},
            "activation_function='relu': GPT computes with 'gelu_pytorch_tanh' or 'gelu_new'",
        ),
        ({"add_cross_attention": True}, "add_cross_attention=True: GPT computes with False only"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (
            {"attn_pdrop": 0.2},
            "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.2: GPT has one dropout for all three",
        ),
    ],
)
def test_configs_that_gpt_cannot_express(changes, message):
    with pytest.raises(ValueError) as caught:
        gpt_config(transformers.GPT2Config(**changes).to_dict())
    assert message in str(caught.value)


def test_the_published_gpt2_config():
    config = gpt_config(transformers.GPT2Config().to_dict())
    assert config == GPTConfig(
        vocab_size=50257,
        context_length=1024,
        num_layers=12,
        num_heads=12,
        hidden_size=768,
        dropout=0.1,
    )
    assert gpt_config(transformers.GPT2Config(attn_pdrop=0.2).to_dict(), dropout=0.0).dropout == 0.0
    assert config.num_parameters == 124_439_808
