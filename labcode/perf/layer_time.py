"""How long a layer takes on one rank: a roofline for each operation.

    product       2 m n k FLOPs       rate = what a large product reaches * the tiles' share
    attention     fused: its FLOPs at the rate that the kernel reaches; not fused: two products and
                  the passes over the scores
    elementwise   bytes read and written / what the memory reaches

An operation takes the longer of its arithmetic and its memory traffic. The host launches one after
the other: if that takes longer than the device computes, the device waits for it (`launch`). Where
the host is the device, on a CPU, it does the one and then the other.

The tiles' share: a product is cut into tiles, one for each multiprocessor at a time. The last wave
of tiles may be almost empty, and a tile may reach beyond the matrix ("wave and tile quantization").

Shapes: n tokens of a rank, H features, F of the MLP, N and K heads, t ranks of tp, c of cp.

Source: Williams et al. 2009 (doi:10.1145/1498765.1498785) for the roofline; NVIDIA, "Matrix
    Multiplication Background User's Guide", for the tiles; He 2022, "Making Deep Learning Go Brrrr
    From First Principles", for the launches.
Held by: tests/unit/test_layer_time.py; against published runs by benchmarks/planner.py
"""

import functools
import math
from typing import NamedTuple

from labcode.perf.cluster import Gpu
from labcode.perf.transformer import Transformer

# Seconds that the host needs for one operation in eager mode: Python, autograd, dispatcher, launch.
# In-sample: of the published runs of vTrain whose products are far too small to keep an A100 busy.
LAUNCH_S = 27e-6
LAYER_LAUNCHES = 31  # forward of a layer: 11 operations and 20 views; `step.LAYER_OPERATIONS`
HEAD_LAUNCHES = 10  # norm, head and loss, forward
COMPILED_LAUNCHES = 6  # a compiled layer: four products, attention, what is left between them

# Rows and columns of a tile, and what it reaches of the largest one's rate: it reads its factors
# m + n for m n of work, so that a smaller one waits more for the memory.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.9), (128, 64, 0.75), (64, 64, 0.6))
# Tensor cores take 16 bytes at a time. Products whose innermost size is no multiple of that are
# padded by the library where it can; the batched ones of an attention that is not fused leave the
# tensor cores and run at the rate of float32.
ALIGNED_BYTES = 16
# What products get within a training of the rate that the best shape gets alone: clocks sink under
# the power limit, operands come cold, other kernels share the memory.
# In-sample: one number for all published runs.
SUSTAINED = 0.85

# How often each number is read or written, forward and backward.
NORM = (2, 3)
RESIDUAL = (3, 3)
DROPOUT = (0.5, 2.5)  # the mask has one byte; forward is fused with the sum
GELU = (2, 3)
GATE = (3, 5)
JOIN = (2, 4)  # heads are put side by side; backward the gradients of q, k and v
ROTARY = (4, 4)
SOFTMAX = (2, 3)
SOFTMAX_DROPOUT = (2.5, 2.5)
BIAS = (0, 1)  # backward sums the gradient over all tokens
ROUTED = (4, 4)  # each expert's tokens are gathered, and its outputs weighted and summed
LOSS = (4, 3)  # passes over logits in 4 bytes
ATTENTION_KERNELS = ("unfused", "flash", "flash2", "flash3")


class Work(NamedTuple):
    """Seconds of some work on one device, by what limits it.

    Args:
        product: Matrix products.
        attention: The core of attention.
        elementwise: Everything else.
        launches: Operations that the host launches; a number, not seconds.
    """

    product: float
    attention: float
    elementwise: float
    launches: float

    @property
    def device_s(self) -> float:
        """Seconds in which the device computes."""
        return self.product + self.attention + self.elementwise

    def waits_s(self, launch_s: float, host_computes: bool = False) -> float:
        """Seconds in which the device waits for the host: all of them if it is the host."""
        if host_computes:
            return self.launches * launch_s
        return max(0.0, self.launches * launch_s - self.device_s)

    def times(self, factor: float) -> "Work":
        """The same work several times."""
        return Work(*(factor * value for value in self))

    def plus(self, other: "Work") -> "Work":
        """Both."""
        return Work(*(one + two for one, two in zip(self, other, strict=True)))


class Cut(NamedTuple):
    """What a rank has of a layer, and how it computes it.

    Args:
        micro_batch: Samples at once.
        tp, cp: Ranks that share the features, and the sequence.
        sequence_parallel: Whether tp cuts norms and residuals as well.
        dtype: Dtype of the products.
        attention: "unfused", "flash", "flash2" or "flash3".
        compiled: Whether a compiler has fused what is elementwise.
        ep: Ranks over which the experts are divided.
    """

    micro_batch: int
    tp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    dtype: str = "bfloat16"
    attention: str = "flash2"
    compiled: bool = False
    ep: int = 1


WIDTHS = {"fp8": 2, "bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4, "float64": 8}


def tile_share(m: float, n: float, multiprocessors: int | None, count: float = 1) -> float:
    """The share of the rate that is left where tiles do not fill the device.

        the largest over tiles of    m n / (waves * multiprocessors * tile) * rate of the tile

    Args:
        m, n: Rows and columns of the product.
        multiprocessors: Number of multiprocessors of the device; None: unknown, and nothing is
            lost.
        count: Products of this size at once.

    Held by: tests/unit/test_layer_time.py::test_the_last_wave_of_tiles_may_be_almost_empty
    """
    if multiprocessors is None:
        return 1.0
    best = 0.0
    for rows, columns, rate in TILES:
        tiles = math.ceil(m / rows) * math.ceil(n / columns) * count
        waves = math.ceil(tiles / multiprocessors)
        filled = m * n * count / (waves * multiprocessors * rows * columns)
        best = max(best, filled * rate)
    return best


def product_s(
    gpu: Gpu, dtype: str, m: float, n: float, k: float, count: float = 1, value_bytes: int = 2
) -> float:
    """Seconds of `count` products of [m, k] with [k, n]."""
    rate = SUSTAINED * gpu.matmul_flops_per_s(dtype)
    rate *= tile_share(m, n, gpu.multiprocessors, count)
    arithmetic = 2 * m * n * k * count / rate
    traffic = (m * k + k * n + m * n) * count * value_bytes / gpu.stream_bytes_per_s
    return max(arithmetic, traffic)


def _both_ways(
    gpu: Gpu, dtype: str, m: float, n: float, k: float, count: float = 1
) -> tuple[float, float]:
    """Seconds of a product forward, and of the two that are its backward."""
    forward = product_s(gpu, dtype, m, n, k, count, WIDTHS[dtype])
    for_input = product_s(gpu, dtype, m, k, n, count, WIDTHS[dtype])
    for_weight = product_s(gpu, dtype, n, k, m, count, WIDTHS[dtype])
    return forward, for_input + for_weight


@functools.lru_cache(maxsize=4096)
def layer_work(model: Transformer, gpu: Gpu, cut: Cut) -> tuple[Work, Work]:
    """Forward and backward of one layer for one micro-batch on one rank.

    Args:
        model: Shape of the model.
        gpu: GPU that computes.
        cut: What of it.

    Raises:
        ValueError: An attention that does not exist, or a rate that nobody has measured.
    """
    tokens = cut.micro_batch * model.sequence_length / cut.cp
    hidden = model.hidden_size
    products = [
        (tokens, model.qkv / cut.tp, hidden, 1),
        (tokens, hidden, model.heads_size / cut.tp, 1),
    ]
    if model.experts:
        own = tokens / cut.tp if cut.sequence_parallel else tokens
        products.append((own, model.experts, hidden, 1))  # the router
    for rows, ffn, count in _mlps(model, tokens, cut.ep):
        products += [(rows, ffn / cut.tp, hidden, count)] * (model.mlp_matrices - 1)
        products.append((rows, hidden, ffn / cut.tp, count))
    forward_product = 0.0
    backward_product = 0.0
    for rows, columns, inner, count in products:
        forward, backward = _both_ways(gpu, cut.dtype, rows, columns, inner, count)
        forward_product += forward
        backward_product += backward
    attention = _attention(model, gpu, cut, tokens)
    passes = _passes(model, cut, tokens)
    bandwidth = gpu.stream_bytes_per_s
    launches = COMPILED_LAUNCHES if cut.compiled else LAYER_LAUNCHES
    return (
        Work(forward_product, attention[0], passes[0] / bandwidth, launches),
        Work(backward_product, attention[1], passes[1] / bandwidth, 2 * launches),
    )


def _mlps(model: Transformer, tokens: float, ep: int) -> list[tuple[float, int, int]]:
    """(Tokens of each, features inside, how many) of the MLPs of a layer on one rank.

    A router that spreads tokens evenly is taken for granted, and products of all experts at once:
    of a loop over experts each product has launches of its own. Over ep a rank has fewer experts,
    each with the tokens of all its ranks.
    """
    if not model.experts:
        return [(tokens, model.ffn, 1)]
    rows = ep * tokens * model.active_experts / model.experts
    found = [(rows, model.ffn, model.experts // ep)]
    if model.shared_size:
        found.append((tokens, model.shared_size, 1))
    return found


def _attention(model: Transformer, gpu: Gpu, cut: Cut, tokens: float) -> tuple[float, float]:
    """Seconds of the core of attention, forward and backward."""
    keys = model.sequence_length
    heads = model.num_heads / cut.tp
    # attention has no 8-bit kernel here
    dtype = "bfloat16" if cut.dtype == "fp8" else cut.dtype
    if cut.attention == "unfused":
        rows = keys / cut.cp
        count = cut.micro_batch * heads
        if model.head_size * WIDTHS[dtype] % ALIGNED_BYTES:
            dtype = "float32"
        scores = _both_ways(gpu, dtype, rows, keys, model.head_size, count)
        values = _both_ways(gpu, dtype, rows, model.head_size, keys, count)
        passes = _plus(SOFTMAX, SOFTMAX_DROPOUT) if model.dropout else SOFTMAX
        num_bytes = tokens * heads * keys * WIDTHS[cut.dtype] / gpu.stream_bytes_per_s
        return (
            scores[0] + values[0] + passes[0] * num_bytes,
            scores[1] + values[1] + passes[1] * num_bytes,
        )
    if cut.attention not in ATTENTION_KERNELS:
        raise ValueError(
            f"attention={cut.attention!r}: choose one of {', '.join(ATTENTION_KERNELS)}"
        )
    flops = 4 * tokens * keys * heads * model.head_size
    kernel = cut.attention
    if model.causal:
        flops /= 2  # blocks above the diagonal are left out
        if f"{kernel}_causal" in gpu.attention_share:
            kernel = f"{kernel}_causal"
    seconds = flops / gpu.attention_flops_per_s(kernel, dtype)
    return seconds, 2.5 * seconds  # backward computes the scores again: 5 products for 2


def _plus(one: tuple[float, float], two: tuple[float, float]) -> tuple[float, float]:
    return one[0] + two[0], one[1] + two[1]


def _passes(model: Transformer, cut: Cut, tokens: float) -> tuple[float, float]:
    """Bytes that everything but products and attention reads and writes, forward and backward."""
    hidden = model.hidden_size
    whole = hidden / cut.tp if cut.sequence_parallel else hidden
    heads = model.heads_size / cut.tp
    inside = model.active_ffn / cut.tp
    rotary = 0.0 if model.learned_positions else (model.num_heads + model.kv) * model.head_size
    terms = [
        (NORM, 2 * whole),
        (RESIDUAL, 2 * whole),
        (DROPOUT if model.dropout else (0, 0), 2 * whole),
        (GATE if model.gated else GELU, inside),
        ((0, 0) if cut.compiled else JOIN, heads),
        (ROTARY, rotary / cut.tp),
        (BIAS if model.biases else (0, 0), model.qkv / cut.tp + inside + 2 * whole),
        (ROUTED if model.experts else (0, 0), model.active_experts * hidden),
    ]
    forward = 0.0
    backward = 0.0
    for (there, back), features in terms:
        forward += there * features
        backward += back * features
    if cut.compiled:
        # a norm reads what the sum before it has just written
        forward -= 2 * whole
        backward -= 2 * whole
    width = WIDTHS[cut.dtype]
    if cut.dtype == "fp8":
        # what a product reads is read in 16 bits and written in 8, with its largest value sought
        read = model.qkv / cut.tp + 2 * whole + heads + inside
        forward += 1.5 * read
        backward += 1.5 * read
    return tokens * forward * width, tokens * backward * width


@functools.lru_cache(maxsize=4096)
def head_work(model: Transformer, gpu: Gpu, cut: Cut) -> tuple[Work, Work]:
    """Forward and backward of what comes after the last layer: norm, output head and loss."""
    tokens = cut.micro_batch * model.sequence_length / cut.cp
    outputs = model.outputs / cut.tp
    dtype = "bfloat16" if cut.dtype == "fp8" else cut.dtype
    forward, backward = _both_ways(gpu, dtype, tokens, outputs, model.hidden_size)
    whole = model.hidden_size / cut.tp if cut.sequence_parallel else model.hidden_size
    bandwidth = gpu.stream_bytes_per_s
    norm = tokens * whole * WIDTHS[dtype]
    logits = tokens * outputs * 4
    return (
        Work(forward, 0.0, (NORM[0] * norm + LOSS[0] * logits) / bandwidth, HEAD_LAUNCHES),
        Work(backward, 0.0, (NORM[1] * norm + LOSS[1] * logits) / bandwidth, 2 * HEAD_LAUNCHES),
    )
