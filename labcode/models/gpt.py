"""GPT: embedding, pre-norm blocks, final norm and head; knows nothing of ranks.

Shapes: B samples, S tokens, H hidden features, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Self, cast

import torch
import torch.nn.functional as F
from torch import nn

from labcode.config import GPTConfig, require
from labcode.models.layers import Block, Rotary, initialize, norm_layer
from labcode.models.moe import MoE


class GPT(nn.Module):
    """A decoder-only transformer: `logits = head(norm(blocks(embed(tokens) + positions)))`.

    Weights are drawn from torch's global generator; `layers.initialize(model, seed)` draws them by
    name instead. Under `torch.device("meta")` nothing is allocated or drawn: call
    `model.to_empty(device=...)` and then `initialize`.

    With rotary positions, RMS norms, SwiGLU and no biases it is a Llama (`models/hub.py`).

    Source: Radford et al. 2019 (GPT-2); Press and Wolf 2016 (arXiv:1608.05859) for the tied
        embedding.

    Raises:
        ValueError: `config.vocab_size` is None.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        require(config, "vocab_size")
        vocab_size = cast(int, config.vocab_size)
        self.config = config
        self.embed = nn.Embedding(vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.positions = nn.Embedding(config.context_length, config.hidden_size)
        else:
            self.positions = Rotary(config.head_size, config.rotary_base)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(_block(config) for _ in range(config.num_layers))
        self.norm = norm_layer(config.hidden_size, config.norm, config.norm_epsilon, config.bias)
        self.head = nn.Linear(config.hidden_size, vocab_size, bias=False)
        self.tie_weights()
        if not self.embed.weight.is_meta:
            initialize(self)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor | None = None,
        x: torch.Tensor | None = None,
        layers: range | None = None,
    ) -> torch.Tensor:
        """Logits of the next token at each position, or the output of some of the layers.

        The second form is for a model that is cut into stages.

        Args:
            tokens: [B, S] int64; S at most `context_length`.
            positions: [S] int64, where the tokens are in the whole sequence; None: 0..S-1.
            x: [B, S, H], the output of the layer before `layers`; the first layer ignores it.
            layers: The range of layers to run, with the embedding before the first and the head
                after the last one; None: all of them.

        Returns:
            [B, S, V]; [B, S, H] if the last layer is not among `layers`.

        Raises:
            ValueError: More tokens than `context_length`.
        """
        length = tokens.shape[1]
        if length > self.config.context_length:
            raise ValueError(
                f"{length} tokens do not fit context_length={self.config.context_length}: "
                "cut the sequence or raise model.context_length"
            )
        if positions is None:
            positions = torch.arange(length, device=tokens.device)
        learned = self.config.positions == "learned"
        layers = layers or range(self.config.num_layers)
        if layers.start == 0:
            x = self.embed(tokens)  # [B, S, H]
            if learned:
                x = x + self.positions(positions)
            x = self.dropout(x)
        assert x is not None, f"layers {layers} need the output of the layer before them"
        hidden = x
        rotation = None if learned else self.positions(positions, hidden.dtype)
        for number in layers:
            hidden = self.blocks[number](hidden, rotation)
        if layers.stop != self.config.num_layers:
            return hidden
        return self.head(self.norm(hidden))

    def tie_weights(self) -> None:
        """Make `head` use the weight of `embed`, if the config says so.

        Call it again after `load_state_dict(assign=True)`.
        """
        # a pipeline stage has only one of them, or none
        has_both = hasattr(self.embed, "weight") and hasattr(self.head, "weight")
        if self.config.tie_embeddings and has_both:
            self.head.weight = self.embed.weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # to_empty() and to() make a new Parameter per module of a meta model, which would untie the
        # two without anybody noticing
        super()._apply(fn, recurse)
        self.tie_weights()
        return self


def _block(config: GPTConfig) -> Block:
    return Block(
        config.hidden_size,
        config.num_heads,
        config.ffn,
        config.kv_heads,
        causal=True,
        dropout=config.dropout,
        norm=config.norm,
        norm_epsilon=config.norm_epsilon,
        mlp=config.mlp,
        bias=config.bias,
        experts=partial(_moe, config) if config.num_experts else None,
    )


def _moe(config: GPTConfig) -> MoE:
    return MoE(
        config.hidden_size,
        config.expert_ffn,
        config.num_experts,
        config.experts_per_token,
        shared_ffn_size=config.shared_ffn_size,
        kind=config.mlp,
        capacity_factor=config.expert_capacity,
        scoring=config.router,
        balance=config.router_balance,
        z_loss=config.router_z_loss,
        bias_rate=config.router_bias_rate,
    )


def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy in nats per token, in float32 or wider; targets of -100 do not count.

    Args:
        logits: [B, S, V]
        targets: [B, S] int64, the token that follows each position.
    """
    logits = logits.flatten(0, -2)  # [B, S, V] -> [B*S, V]
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), targets.flatten())


@torch.no_grad()
def generate(
    model: nn.Module,
    tokens: torch.Tensor,
    num_tokens: int,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Extend each sequence by `num_tokens` tokens, each drawn from `softmax(logits / temperature)`.

    The whole context is computed again for each token: this is simple, and S times the work of
    `models.generate`, which keeps keys and values. Tokens further back than `context_length` are
    forgotten. Draws on the CPU, so that one seed gives the same text on any device.

    Args:
        model: A GPT, or what wraps one and has its `config`.
        tokens: [B, S] int64, S at least 1.
        num_tokens: How many to add.
        temperature: 0 takes the most likely token, 1 draws as the model predicts.
        generator: A CPU `torch.Generator`; None: torch's global one.

    Returns:
        [B, S + num_tokens]

    Raises:
        ValueError: An empty prompt, or a negative temperature.
    """
    if tokens.shape[1] == 0 or temperature < 0:
        raise ValueError(
            f"prompt of {tokens.shape[1]} tokens, temperature={temperature}: "
            "give at least 1 and at least 0"
        )
    context_length = cast(GPTConfig, model.config).context_length
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits = model(tokens[:, -context_length:])  # [B, S, V]
            last = logits[:, -1].float().cpu()  # [B, V]
            if temperature == 0:
                following = last.argmax(dim=-1, keepdim=True)
            else:
                probabilities = (last / temperature).softmax(dim=-1)
                following = torch.multinomial(probabilities, 1, generator=generator)  # [B, 1]
            tokens = torch.cat((tokens, following.to(tokens.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens
