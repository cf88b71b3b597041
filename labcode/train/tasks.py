"""What is trained on what: a GPT on text, a ViT on weather. The loop knows neither."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from labcode.config import Config, GPTConfig, TextData, ViTConfig, WeatherData
from labcode.data import text, weather
from labcode.models.gpt import GPT, generate
from labcode.models.vit import ViT, latitude_weights
from labcode.models.vit import loss as vit_loss


@dataclass(frozen=True)
class Task:
    """A model and its data, ready for the loop.

    Args:
        model_config: With every size filled in from the data.
        build: Makes the model.
        train, val: Datasets, `dataset[indices] -> (inputs [B, ..], targets [B, ..])`.
        loss: Mean loss over a batch, `loss(criterion, output, targets) -> scalar tensor`, with `ParallelModel.loss` for
            criterion.
        finish: After training, on one rank: `finish(model, num_tokens, seed) -> text to show`.
    """

    model_config: GPTConfig | ViTConfig
    build: Callable[[], nn.Module]
    train: Any
    val: Any
    loss: Callable[[Callable, torch.Tensor, torch.Tensor], torch.Tensor]
    finish: Callable[[nn.Module, int, int], str]


def make_task(config: Config) -> Task:
    """The task of a config; reads the data, and prepares it where that has not been done.

    Raises:
        ValueError: Data that cannot be read, or a model that does not fit it.
    """
    if isinstance(config.model, GPTConfig) and isinstance(config.data, TextData):
        return _text_task(config.model, config.data)
    if isinstance(config.model, ViTConfig) and isinstance(config.data, WeatherData):
        return _weather_task(config.model, config.data)
    raise ValueError(
        f"{type(config.model).__name__} cannot learn from {type(config.data).__name__}: a GPT reads text, a ViT weather"
    )


def _text_task(model_config, data) -> Task:
    splits = text.load(data, model_config.context_length, data.cache_dir)
    tokenizer = splits.tokenizer
    if model_config.vocab_size is not None and model_config.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size={model_config.vocab_size} but the text has {tokenizer.vocab_size} tokens: "
            f"raise it, or leave it out to take the tokenizer's"
        )
    sized = replace(model_config, vocab_size=model_config.vocab_size or tokenizer.vocab_size)

    def batch_loss(criterion, logits, targets):
        return criterion(logits, targets)

    def sample(model, num_tokens, seed):
        device = next(model.parameters()).device
        start = torch.tensor([tokenizer.encode("\n")], device=device)
        generator = torch.Generator().manual_seed(seed)
        tokens = generate(model, start, num_tokens, temperature=0.8, generator=generator)
        return tokenizer.decode(tokens[0].tolist()).strip("\n")

    return Task(sized, lambda: GPT(sized), splits.train, splits.val, batch_loss, sample)


def _weather_task(model_config, data) -> Task:
    splits = weather.load(data)
    train = splits.train
    sizes = {"num_variables": len(train.variables), "num_forcings": len(train.forcings)}
    sizes |= {"lat": len(train.lat), "lon": len(train.lon)}
    for name, size in sizes.items():
        if getattr(model_config, name) not in (None, size):
            raise ValueError(
                f"model.{name}={getattr(model_config, name)} but the data has {size}: leave it out to take the data's"
            )
    sized = replace(model_config, **sizes)
    weights = latitude_weights(train.lat)

    def batch_loss(criterion, prediction, target):
        return criterion(prediction, target, weights.to(target))

    @torch.no_grad()
    def skill(model, num_tokens, seed):
        return _skill_table(model, splits, weights)

    return Task(sized, lambda: ViT(sized), train, splits.val, batch_loss, skill)


def _skill_table(model, splits, weights) -> str:
    """Error on the held-out times beside that of persistence, "tomorrow is like today", which costs nothing."""
    param = next(model.parameters())
    state, target = (
        x.to(param.device, param.dtype) for x in splits.val[list(range(len(splits.val)))]
    )
    rows = [f"{'normalised RMSE, held-out':28}{'model':>8}{'persistence':>13}"]
    prediction = model(state)
    for number, name in enumerate(splits.train.variables):
        channel = slice(number, number + 1)
        model_error, persistence = (
            vit_loss(guess[:, channel], target[:, channel], weights.to(param)).sqrt().item()
            for guess in (prediction, state)
        )
        rows.append(f"{name:28}{model_error:8.3f}{persistence:13.3f}")
    return "\n".join(rows)
