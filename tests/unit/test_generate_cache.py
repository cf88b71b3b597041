"""Generation with a cache against the whole context computed again for each token."""

from dataclasses import replace

import pytest
import torch

from labcode.config import GPTConfig
from labcode.models import gpt
from labcode.models.generate import CachedAttention, generate
from labcode.models.layers import initialize

SMALL = GPTConfig(vocab_size=23, context_length=16, num_layers=2, num_heads=4, hidden_size=16)
LLAMA = replace(SMALL, num_kv_heads=2, positions="rotary", norm="rms", mlp="swiglu", bias=False)


def drawn(config: GPTConfig) -> tuple[gpt.GPT, torch.Tensor]:
    model = initialize(gpt.GPT(config), 3).double()
    with torch.no_grad():
        for param in model.parameters():
            param *= 8  # logits that differ, as those of a trained model
    prompts = torch.randint(23, (5, 4), generator=torch.Generator().manual_seed(1))
    return model, prompts


@pytest.mark.parametrize("config", [SMALL, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_cache_changes_neither_tokens_nor_log_probs(
    config: GPTConfig, temperature: float
) -> None:
    model, prompts = drawn(config)
    random = torch.Generator().manual_seed(2)
    found = generate(model, prompts, 9, temperature=temperature, generator=random)
    again = prompts
    random = torch.Generator().manual_seed(2)
    for number in range(9):
        scores = (model(again)[:, -1].detach() / (temperature or 1)).log_softmax(-1)
        new = scores.argmax(-1, keepdim=True)
        if temperature:
            new = torch.multinomial(scores.exp(), 1, generator=random)
        off = found.log_probs[:, number] - scores.gather(-1, new).squeeze(-1)
        assert off.abs().max() < 1e-12
        again = torch.cat((again, new), 1)
    assert torch.equal(found.tokens, again)
    assert found.counts.all()
    assert model.training
    assert not any(isinstance(module, CachedAttention) for module in model.modules())


def test_what_follows_the_end_does_not_count() -> None:
    model, prompts = drawn(SMALL)
    plain = generate(model, prompts, 6, temperature=0)
    end = int(plain.tokens[0, 6])  # the third new token of the first text
    found = generate(model, prompts, 6, temperature=0, end=end)
    for row, counts, log_probs in zip(plain.tokens[:, 4:], found.counts, found.log_probs):
        places = (row == end).nonzero().flatten().tolist()
        length = places[0] + 1 if places else 6
        assert counts.tolist() == [True] * length + [False] * (6 - length)
        assert (log_probs[length:] == 0).all()
        assert (log_probs[:length] < 0).all()
