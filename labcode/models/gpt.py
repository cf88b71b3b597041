"""GPT: embedding, pre-norm blocks, final norm and head; knows nothing of ranks.

Shapes: B samples, S tokens, H hidden features, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from labcode.config import GPTConfig, require
from labcode.models.layers import Block, Rotary, initialize


class GPT(nn.Module):
    """A decoder-only transformer: `logits = head(norm(blocks(embed(tokens) + positions)))`.

    Weights are drawn from torch's global generator; `layers.initialize(model, seed)` draws them by name instead. Under
    `torch.device("meta")` nothing is allocated or drawn: continue with `model.to_empty(device=...)` and `initialize`.

    Source: Radford et al. 2019 (GPT-2); Press and Wolf 2016 (arXiv:1608.05859) for the tied embedding.

    Raises:
        ValueError: `config.vocab_size` is None.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        require(config, "vocab_size")
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = (
            nn.Embedding(config.context_length, config.hidden_size)
            if learned
            else Rotary(config.head_size)
        )
        self.dropout = nn.Dropout(config.dropout)
        sizes = (config.hidden_size, config.num_heads, config.ffn, config.kv_heads)
        self.blocks = nn.ModuleList(
            Block(*sizes, causal=True, dropout=config.dropout) for _ in range(config.num_layers)
        )
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()
        if not self.embed.weight.is_meta:
            initialize(self)

    def forward(self, tokens, positions=None, x=None, layers=None):
        """Logits of the next token at each position; or a part of the way there, for a model that is cut into stages.

        Args:
            tokens: [B, S] int64; S at most `context_length`.
            positions: [S] int64, where the tokens stand in the whole sequence; None: 0..S-1.
            x: [B, S, H], what the layer before `layers` gave; not looked at by the first.
            layers: The range of layers to run, with the embedding before the first and the head after the last one; None:
                all of them.

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
        learned, layers = (
            self.config.positions == "learned",
            layers or range(self.config.num_layers),
        )
        if layers.start == 0:
            x = self.embed(tokens)  # [B, S, H]
            x = self.dropout(x + self.positions(positions) if learned else x)
        rotation = None if learned else self.positions(positions, x.dtype)
        for number in layers:
            x = self.blocks[number](x, rotation)
        return self.head(self.norm(x)) if layers.stop == self.config.num_layers else x

    def tie_weights(self):
        """Makes `head` use the weight of `embed`, if the config says so; repeat it after `load_state_dict(assign=True)`."""
        both = hasattr(self.embed, "weight") and hasattr(
            self.head, "weight"
        )  # a stage has one of them, or none
        if self.config.tie_embeddings and both:
            self.head.weight = self.embed.weight

    def _apply(self, fn, recurse=True):
        # to_empty() and to() of a meta model make a new Parameter per module, and would part the tied two unnoticed.
        super()._apply(fn, recurse)
        self.tie_weights()
        return self


def loss(logits, targets):
    """Mean cross-entropy in nats per token, computed in float32 or wider; targets of -100 do not count.

    Args:
        logits: [B, S, V]
        targets: [B, S] int64, the token that follows each position.
    """
    logits = logits.flatten(0, -2)  # [B*S, V]
    return F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten()
    )


@torch.no_grad()
def generate(model, tokens, num_tokens: int, temperature: float = 1.0, generator=None):
    """Continues each sequence by `num_tokens` tokens, drawn one after the other from `softmax(logits / temperature)`.

    The whole context is computed anew for each token: simple, and S times the work of a version that keeps keys and values.
    Beyond `context_length` the oldest tokens are forgotten. Draws on the CPU, so that one seed gives one text on any device.

    Args:
        model: A GPT, or what wraps one and has its `config`.
        tokens: [B, S] int64, S at least 1.
        num_tokens: How many to add.
        temperature: 0 takes the likeliest token, 1 draws as the model predicts.
        generator: A CPU `torch.Generator`; None: torch's global one.

    Returns:
        [B, S + num_tokens]

    Raises:
        ValueError: An empty prompt, or a negative temperature.
    """
    if tokens.shape[1] == 0 or temperature < 0:
        raise ValueError(
            f"prompt of {tokens.shape[1]} tokens, temperature={temperature}: give at least 1 and at least 0"
        )
    was_training = model.training
    model.eval()
    try:
        for _ in range(num_tokens):
            logits = model(tokens[:, -model.config.context_length :])[:, -1].float().cpu()  # [B, V]
            if temperature == 0:
                following = logits.argmax(dim=-1, keepdim=True)
            else:
                following = torch.multinomial(
                    (logits / temperature).softmax(dim=-1), 1, generator=generator
                )
            tokens = torch.cat((tokens, following.to(tokens.device)), dim=1)
    finally:
        model.train(was_training)
    return tokens
