"""What is trained on what: a GPT on text, a ViT on weather. The loop knows neither."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from labcode.config import Config, GPTConfig, TextData, ViTConfig, WeatherData
from labcode.data import text, weather
from labcode.data.sampler import check_batch_is_filled
from labcode.data.text import TextSplits
from labcode.data.tokenizer import AnyTokenizer
from labcode.data.weather import WeatherSplits
from labcode.models.gpt import GPT, generate
from labcode.models.vit import ViT, latitude_weights
from labcode.models.vit import loss as vit_loss


@dataclass(frozen=True)
class Task:
    """A model and its data, ready for the loop.

    Args:
        model_config: The config of the model, with every size filled in from the data.
        build: Makes the model.
        train: Dataset, `dataset[indices] -> (inputs [B, ..], targets [B, ..])`.
        val: The held-out dataset, of the same form.
        finish: After training, on one rank: `finish(model, num_tokens, seed) -> text to show`.
        data_sha256: Hash of the data, the same on every rank and in every attempt.
        loss_options: Tensors that the model's loss takes by name, beside outputs and targets.
        tokenizer: The tokenizer of a text; None for weather.
    """

    model_config: GPTConfig | ViTConfig
    build: Callable[[], nn.Module]
    train: Any
    val: Any
    finish: Callable[[nn.Module, int, int], str]
    data_sha256: str = ""
    loss_options: Mapping[str, torch.Tensor] = field(default_factory=dict)
    tokenizer: AnyTokenizer | None = None


def make_task(config: Config) -> Task:
    """The task of a config; reads the data, and prepares it where that has not been done.

    Raises:
        ValueError: Data that cannot be read or does not fill one batch, or a model that does not
            fit it.
    """
    if isinstance(config.model, GPTConfig) and isinstance(config.data, TextData):
        task = _text_task(config.model, config.data)
    elif isinstance(config.model, ViTConfig) and isinstance(config.data, WeatherData):
        task = _weather_task(config.model, config.data, config.train.seed)
    else:
        raise ValueError(
            f"{type(config.model).__name__} cannot learn from {type(config.data).__name__}: "
            "a GPT reads text, a ViT weather"
        )
    check_batch_is_filled(len(task.train), config.train.global_batch)
    return task


# ---- text


def _text_task(model_config: GPTConfig, data: TextData) -> Task:
    splits = text.load(data, model_config.context_length, data.cache_dir)
    num_tokens = splits.tokenizer.vocab_size
    if model_config.vocab_size is not None and model_config.vocab_size < num_tokens:
        raise ValueError(
            f"model.vocab_size={model_config.vocab_size} but the text has {num_tokens} tokens: "
            "raise it, or leave it out to take the tokenizer's"
        )
    # From here on every size of the model is known, so that its parameters can be counted before it
    # is built.
    sized = replace(model_config, vocab_size=model_config.vocab_size or num_tokens)
    return Task(
        sized,
        build=partial(GPT, sized),
        train=splits.train,
        val=splits.val,
        finish=partial(_sample_text, splits.tokenizer, _beginning(splits)),
        data_sha256=splits.sha256,
        tokenizer=splits.tokenizer,
    )


class _KnownTokens(nn.Module):
    """A GPT without the logits of tokens that the tokenizer does not have.

    A vocabulary may be larger than the tokenizer's, so that tp divides it. The additional tokens
    never occur in training, but their logits are not minus infinity: one of them is drawn
    sometimes, and has no text.
    """

    def __init__(self, model: nn.Module, num_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.config = model.config
        self.num_tokens = num_tokens
        self.train(model.training)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(tokens)[..., : self.num_tokens]


def _beginning(splits: TextSplits) -> list[int]:
    """The tokens that a sample begins with: a line break, or how a text without one begins."""
    try:
        return splits.tokenizer.encode("\n")
    except ValueError:  # not a character of this text
        return [int(splits.train.tokens[0])]


def _sample_text(
    tokenizer: AnyTokenizer,
    beginning: list[int],
    model: nn.Module,
    num_tokens: int,
    seed: int,
) -> str:
    """The text that the model writes after the tokens of `beginning`; "" for no tokens."""
    if num_tokens == 0:
        return ""
    device = next(model.parameters()).device
    start = torch.tensor([beginning], device=device)
    # of its own: how much of the run's random numbers training has used must not change the text
    generator = torch.Generator().manual_seed(seed)
    # cut before the softmax, so that the others share what these had
    known = _KnownTokens(model, tokenizer.vocab_size)
    tokens = generate(known, start, num_tokens, temperature=0.8, generator=generator)
    return tokenizer.decode(tokens[0].tolist()).strip("\n")


# ---- weather


def _weather_task(model_config: ViTConfig, data: WeatherData, seed: int) -> Task:
    splits = weather.load(data, seed)
    train = splits.train
    sizes = {
        "num_variables": len(train.variables),
        "num_forcings": len(train.forcings),
        "lat": train.sample_shape[0],
        "lon": train.sample_shape[1],
    }
    for name, size in sizes.items():
        asked = getattr(model_config, name)
        # None is "as the data has it"; a number is a promise that the data must keep
        if asked not in (None, size):
            raise ValueError(
                f"model.{name}={asked} but the data has {size}: leave it out to take the data's"
            )
    # From the data, and not from the config: a file says how many variables it has.
    sized = replace(model_config, **sizes)
    # crops lie anywhere, and each brings the weights of its own rows along
    weights = None if train.brings_weights else latitude_weights(train.lat)
    return Task(
        sized,
        build=partial(ViT, sized),
        train=train,
        val=splits.val,
        finish=partial(_skill_table, splits, weights),
        data_sha256=splits.sha256,
        loss_options={} if weights is None else {"weights": weights},
    )


@torch.no_grad()
def _skill_table(
    splits: WeatherSplits,
    weights: torch.Tensor | None,
    model: nn.Module,
    num_tokens: int,
    seed: int,
) -> str:
    """Error on the held-out times, beside that of persistence: "tomorrow will be like today".

    Args:
        splits: The data.
        weights: Weights of the latitudes, [Y]; None: each sample brings its own along.
        model: The whole model.
        num_tokens: For tasks that draw a sample; not used here.
        seed: Not used here either.
    """
    param = next(model.parameters())
    if weights is not None:
        weights = weights.to(param)
    num_variables = len(splits.train.variables)
    # sums of squared errors, one state at a time: all of a large file would not fit into memory
    model_errors = torch.zeros(num_variables, dtype=torch.float64)
    persistence_errors = torch.zeros(num_variables, dtype=torch.float64)
    for number in range(len(splits.val)):
        state, target = splits.val[[number]]
        state = state.to(param.device, param.dtype)
        target = target.to(param.device, param.dtype)
        prediction = model(state)
        for variable in range(num_variables):
            channel = slice(variable, variable + 1)
            # with the weights of its rows, if it brings them along
            truth = torch.cat([target[:, channel], target[:, num_variables:]], dim=1)
            model_errors[variable] += vit_loss(prediction[:, channel], truth, weights).item()
            persistence_errors[variable] += vit_loss(state[:, channel], truth, weights).item()
    lines = [f"{'normalised RMSE, held-out':28}{'model':>8}{'persistence':>13}"]
    model_rmse = (model_errors / len(splits.val)).sqrt().tolist()
    persistence_rmse = (persistence_errors / len(splits.val)).sqrt().tolist()
    for name, own, of_persistence in zip(splits.train.variables, model_rmse, persistence_rmse):
        lines.append(f"{name:28}{own:8.3f}{of_persistence:13.3f}")
    return "\n".join(lines)
