"""What GPT and ViT are made of: attention, MLP and pre-norm block, and how weights are drawn.

No layer here knows of ranks. Each is a plain module of plain modules, so that a sharded version can
replace any of them: `attention.qkv`, `attention.core`, `attention.proj`, `mlp.up`, `mlp.down`,
`norm1`, `norm2`.

Shapes: B samples, S tokens (or patches), H hidden features, N query heads, K key/value heads, D
features of one head (H = N*D), F features inside the MLP. An attention that holds a part of the
heads has a part of N and of K.
"""

import fnmatch
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from labcode.config import GPTConfig, ViTConfig

INITIAL_STD = 0.02
# the weights whose output is added to the residual stream
LAST_OF_A_BRANCH = (
    "attention.proj.weight",
    "mlp.down.weight",
    "mlp.shared.down.weight",
    "mlp.experts.down",
)

LORA_A = "lora_a"  # the weights of an adapter (`models.lora`)
LORA_B = "lora_b"

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos and sin of `Rotary`, each [S, D/2]
Model = TypeVar("Model", bound=nn.Module)


class CoreAttention(nn.Module):
    """Attention between the projections, `softmax(q k^T / sqrt(D)) v`, in PyTorch's fused kernel.

    It has no weights and treats each head separately. To cut the sequence, replace this module
    alone.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), eq. 1; Ainslie et al. 2023 (arXiv:2305.13245)
        for K < N.
    """

    def __init__(self, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal = causal
        self.dropout = dropout

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Query head n reads key/value head n // (N/K).

        Args:
            q: [B, N, S, D]
            k, v: [B, K, S, D]; K divides N.

        Returns:
            [B, N, S, D]
        """
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
            # asked for only where it is needed: not every GPU kernel has it
            enable_gqa=q.shape[1] != k.shape[1],
        )


class Attention(nn.Module):
    """Multi-head attention: `proj(core(q, k, v))` with `q | k | v = qkv(x)`.

    The rows of `qkv.weight` are all query heads, then all key heads, then all value heads. Their
    number is read from the output of `qkv`: a `qkv` that holds half of the rows of each kind makes
    this an attention of half the heads.

    Args:
        hidden_size: H
        num_heads: N
        num_kv_heads: K; None: as many as query heads.
        causal: Token s sees tokens 0..s only.
        dropout: Probability, on the attention weights and on the output.
        bias: Whether both linear layers have one.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        num_kv_heads = num_kv_heads or num_heads
        self.head_size = hidden_size // num_heads
        self.queries_per_kv = num_heads // num_kv_heads
        rows = (num_heads + 2 * num_kv_heads) * self.head_size
        self.qkv = nn.Linear(hidden_size, rows, bias)
        self.core = CoreAttention(causal, dropout)
        self.proj = nn.Linear(hidden_size, hidden_size, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """Args: x [B, S, H]; rotation: cos and sin of `Rotary`, or None. Returns [B, S, H]."""
        qkv = self.qkv(x)  # [B, S, (N+2K)*D]
        # The sizes are not those of x: a sharded qkv may gather the sequence and has fewer heads.
        batch, length, width = qkv.shape
        qkv = qkv.view(batch, length, width // self.head_size, self.head_size)  # [B, S, N+2K, D]
        heads = qkv.shape[2]
        kv_heads = heads // (self.queries_per_kv + 2)
        query_heads = heads - 2 * kv_heads
        assert heads == kv_heads * (self.queries_per_kv + 2), (
            f"{heads} heads are no whole groups of q, k and v"
        )
        if rotation is None:
            q, k, v = qkv.split((query_heads, kv_heads, kv_heads), dim=2)
        else:
            # q and k are neighbours in memory, so one call rotates both
            qk, v = qkv.split((query_heads + kv_heads, kv_heads), dim=2)
            q, k = rotate(qk, rotation).split((query_heads, kv_heads), dim=2)
        # Split first, transpose after: backward then joins the three gradients in the memory order
        # of qkv, in one copy.
        out = self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))  # [B, N, S, D]
        # [B, S, N*D]: no copy, because the kernel writes its output in this order
        out = out.transpose(1, 2).flatten(2)
        return self.dropout(self.proj(out))


class MLP(nn.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` with both products in one.

    The rows of `up.weight` are then all of the gate, then all of up, so that one product reads x
    once, and a shard has a part of each.

    Args:
        hidden_size: H
        ffn_size: F
        dropout: Probability, on the output.
        kind: "gelu" is its tanh form, which GPT-2 has, "gelu_erf" the exact one, "swiglu" Llama's.
        bias: Whether the linear layers have one.

    Source: Hendrycks and Gimpel 2016 (arXiv:1606.08415), section 2; Shazeer 2020
        (arXiv:2002.05202), eq. 6, for SwiGLU.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_size: int,
        dropout: float = 0.0,
        kind: str = "gelu",
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.kind = kind
        rows = 2 * ffn_size if kind == "swiglu" else ffn_size
        self.up = nn.Linear(hidden_size, rows, bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, S, H] -> [B, S, H], through [B, S, F]."""
        return self.dropout(self.down(activation(self.up(x), self.kind)))


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The function between the two products of an `MLP`, [.., F] to [.., F].

    For "swiglu" its input is [.., 2F], the gate and then up.
    """
    if kind == "swiglu":
        gate, up = x.chunk(2, dim=-1)  # [.., 2F] -> two of [.., F]
        return F.silu(gate) * up
    return F.gelu(x, approximate="tanh" if kind == "gelu" else "none")


def norm_layer(hidden_size: int, kind: str, epsilon: float, bias: bool) -> nn.Module:
    """A LayerNorm, or for "rms" an RMSNorm, of the last dim.

    Source: Ba et al. 2016 (arXiv:1607.06450); Zhang and Sennrich 2019 (arXiv:1910.07467).
    """
    if kind == "rms":
        return nn.RMSNorm(hidden_size, eps=epsilon)
    return nn.LayerNorm(hidden_size, eps=epsilon, bias=bias)


class Block(nn.Module):
    """One pre-norm layer: `x = x + attention(norm1(x)); x = x + mlp(norm2(x))`.

    Source: Radford et al. 2019 (GPT-2), section 2.3; Xiong et al. 2020 (arXiv:2002.04745) for why
        the norm goes first.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_size: int,
        num_kv_heads: int | None = None,
        *,
        causal: bool,
        dropout: float = 0.0,
        norm: str = "layer",
        norm_epsilon: float = 1e-5,
        mlp: str = "gelu",
        bias: bool = True,
        experts: Callable[[], nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.norm1 = norm_layer(hidden_size, norm, norm_epsilon, bias)
        self.attention = Attention(
            hidden_size, num_heads, num_kv_heads, causal=causal, dropout=dropout, bias=bias
        )
        self.norm2 = norm_layer(hidden_size, norm, norm_epsilon, bias)
        # experts: makes what stands in place of the MLP
        self.mlp = experts() if experts else MLP(hidden_size, ffn_size, dropout, mlp, bias)

    def forward(self, x: torch.Tensor, rotation: Rotation | None = None) -> torch.Tensor:
        """[B, S, H] -> [B, S, H]."""
        x = x + self.attention(self.norm1(x), rotation)
        return x + self.mlp(self.norm2(x))


class Rotary(nn.Module):
    """Angles by which rotary positions turn queries and keys.

        angle(s, i) = s * base**(-2i/D), i = 0..D/2-1

    The table is no buffer: it takes microseconds, is made once for all layers, and so survives the
    meta device and casts.

    Source: Su et al. 2021 (arXiv:2104.09864), eq. 15.
    """

    def __init__(self, head_size: int, base: float = 10000.0) -> None:
        super().__init__()
        self.head_size = head_size
        self.base = base

    def forward(self, positions: torch.Tensor, dtype: torch.dtype = torch.float32) -> Rotation:
        """Compute the angles of some positions.

        Args:
            positions: [S] integers.
            dtype: The dtype of the activations.

        Returns:
            cos and sin, each [S, D/2], float32 or wider.
        """
        # Made in float64: at position 100 000 a float32 angle is already off by 0.008.
        device = positions.device
        features = torch.arange(0, self.head_size, 2, device=device, dtype=torch.float64)  # [D/2]
        frequencies = self.base ** -(features / self.head_size)
        angles = positions.to(torch.float64)[:, None] * frequencies  # [S, D/2]
        wide = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Turn feature pairs (i, i + D/2) of each token by its angles.

        (a, b) -> (a cos - b sin, b cos + a sin)

    The two features of a pair are half a head apart, as in GPT-NeoX and Llama. The paper pairs
    neighbours, which is the same with the features in another order.

    Args:
        x: [B, S, heads, D]
        rotation: cos and sin, each [S, D/2].
    """
    cos, sin = rotation
    cos = cos[:, None]  # [S, 1, D/2]: the same for all heads
    sin = sin[:, None]
    a, b = x.chunk(2, dim=-1)  # each [B, S, heads, D/2]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def freeze(model: nn.Module, names: Sequence[str] | None) -> None:
    """Freeze some weights of a whole model; a tied weight is one weight under both its names.

    Args:
        model: The model before it is put on a grid, whose layers keep frozen what is frozen.
        names: Names of weights or modules; a * stands for any part of a name, as in `blocks.*.mlp`;
            None: none.

    Raises:
        ValueError: A name is that of no weight, or nothing is left to train.

    Held by: tests/ranks/test_parallel_parity.py::test_frozen_weights_train_like_one_process
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    names = names or ()
    for pattern in names:
        chosen = fnmatch.filter(weights, pattern) + fnmatch.filter(weights, f"{pattern}.*")
        if not chosen:
            modules = dict.fromkeys(name.partition(".")[0] for name in weights)
            raise ValueError(
                f"train.freeze={pattern} names no weight of this model: its weights are in "
                f"{', '.join(modules)}, and a layer is blocks.0 or blocks.*"
            )
        for name in chosen:
            weights[name].requires_grad_(False)
    if names and not any(weight.requires_grad for weight in weights.values()):
        raise ValueError(
            f"train.freeze={','.join(names)} leaves nothing to train: name fewer modules"
        )


def initial_value(
    name: str, shape: Sequence[int], config: GPTConfig | ViTConfig, seed: int | None = None
) -> torch.Tensor:
    """The first value of one parameter: float32 on the CPU, a function of seed and name alone.

    Weights are normal with standard deviation 0.02, divided by `sqrt(2*num_layers)` for the two
    projections of each layer that add to the residual stream. Norms are the identity; biases and
    the head of a ViT are zero. Of an adapter (`models.lora`) A is uniform and B zero. The generator
    is seeded with a hash of seed and name, so that order, device, dtype and the presence of other
    parameters do not matter: a rank that holds one shard of one layer draws the values that a whole
    model would have.

    Args:
        name: Dotted name in the whole model, such as `blocks.3.mlp.down.weight`.
        shape: Shape of the whole parameter.
        config: The config of the whole model.
        seed: None draws from torch's global generator instead.

    Source: Radford et al. 2019 (GPT-2), section 2.3.
    """
    module, _, kind = name.rpartition(".")
    is_head_of_vit = name == "head.weight" and isinstance(config, ViTConfig)
    if kind in ("bias", LORA_B) or is_head_of_vit:
        return torch.zeros(shape, device="cpu")
    if module.rpartition(".")[2].startswith("norm"):
        return torch.ones(shape, device="cpu")
    std = INITIAL_STD
    if name.endswith(LAST_OF_A_BRANCH):
        std = INITIAL_STD / math.sqrt(2 * config.num_layers)
    # Drawn in float64: the float32 sampler has one version per instruction set, and two CPUs
    # disagree in the last bits. Rounded to float32 at once, so that a float64 model starts from
    # exactly the values of a float32 one.
    value = torch.empty(shape, dtype=torch.float64, device="cpu")
    if kind == LORA_A:
        bound = 1 / math.sqrt(shape[1])
        return value.uniform_(-bound, bound, generator=_generator_of(name, seed)).float()
    return value.normal_(0.0, std, generator=_generator_of(name, seed)).float()


def _generator_of(name: str, seed: int | None) -> torch.Generator | None:
    """A generator for one parameter; None, which is torch's global one, without a seed."""
    if seed is None:
        return None
    # Not hash(): Python salts it differently in every process, and the ranks would disagree.
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    # 63 bits: manual_seed does not take all of 64
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def initialize(model: Model, seed: int | None = None) -> Model:
    """Draw every parameter of a GPT or ViT (`initial_value`), in place, and return the model.

    Costs about 40 ns per parameter: 4 s for 100 million. Tied weights are drawn once, under their
    first name.

    Args:
        model: A whole GPT or ViT on any device, in any dtype.
        seed: None draws from torch's global generator, as `nn` modules do.

    Raises:
        ValueError: Parameters are still on the meta device.
    """
    config = cast(GPTConfig | ViTConfig, model.config)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device, which holds no values: "
                "call model.to_empty(device=...) first"
            )
        parameter.copy_(initial_value(name, parameter.shape, config, seed))
    return model
