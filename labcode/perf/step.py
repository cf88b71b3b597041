"""How long a training step should take, from the shapes of model and grid alone.

On a cluster: the plainest model there is. m micro-batches go through pp equal stages; each stage
computes, takes part in all-reduces and sends; nothing overlaps but, where it is asked for, the
messages of data parallelism. Nothing is run here:
`course.labs.emulate` runs such a step and measures it.

On one device (`device_step`): three numbers of the device. Matrix products take their FLOPs at the
rate that such products reach, all else the bytes that it reads and writes at the memory's
bandwidth, and each operation the time of its launch. Whichever part is the largest says what would
make the step faster.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labcode.config import GPTConfig, ViTConfig
from labcode.perf import alpha_beta
from labcode.perf.alpha_beta import Link
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.pipeline import Bar, StageTimes, Timeline, simulate
from labcode.perf.two_level import Placement, link_over
from labcode.schedules import schedule
from labcode.topology import GridShape

VALUE_BYTES = 4  # float32
BACKWARD = 2 / 3  # its share of the FLOPs


@dataclass(frozen=True)
class ClusterModel:
    """Nodes full of devices; ranks fill them in order.

    Args:
        flops_per_s: FLOP/s of one device, in matrix products; everything else takes no time.
        inside: A link inside a node.
        between: A link between two nodes.
        ranks_per_node: Devices of a node.
    """

    flops_per_s: float
    inside: Link
    between: Link
    ranks_per_node: int = 2

    def link(self, members: Sequence[int]) -> Link:
        """How fast these global ranks are as a group, by the rule of two levels."""
        of_nodes = Counter(rank // self.ranks_per_node for rank in members)
        return link_over(self.inside, self.between, Placement(len(members), max(of_nodes.values())))

    def message_link(self, members: Sequence[int]) -> Link:
        """The slowest link from one of these global ranks to the next."""
        links = [self.link(pair) for pair in itertools.pairwise(members)]
        return max(links, key=_slowness, default=self.inside)


DataParallel = Literal["plain", "overlapped", "sharded"]


def iteration_parts(
    model: GPTConfig,
    shape: GridShape,
    global_batch: int,
    micro_batch: int,
    cluster: ClusterModel,
    data_parallel: DataParallel = "plain",
) -> dict[str, float]:
    """The seconds of a step by the plain model, as {"compute", "tp", "pp", "bubble", "dp"}.

        a micro-batch on one stage   c = flops / (tp pp rate)
                                     t = (4 L + 2)/pp all-reduces of act over tp
                                     s = one message of act to the next stage, or back   (pp > 1)
        step                         (m + pp - 1) (c + t + s) + one all-reduce of the gradients
                                                                over dp
        act                          micro-batch * tokens * hidden * 4 bytes

    What of the all-reduce over dp is left of its own time depends on `data_parallel`:

        plain        all of it
        overlapped   what is longer than 2/3 c, the backward of the last micro-batch
        sharded      in each micro-batch, what two all-gathers of the weights and a reduce-scatter
                     of the gradients need beyond c + t                               (pp = 1)

    The bubble is the share of pp - 1 in it. Embedding and head make the 2, one on the first and one
    on the last stage, so it is exact for pp up to 2. The loss and its small messages are left out.

    Args:
        model: Untied embeddings; tied ones would be one more message.
        shape: Grid of dp, pp and tp.
        global_batch: Samples of a step over all ranks.
        micro_batch: Samples that go through the pipeline at once.
        cluster: Speeds of the cluster; ranks fill its nodes in order.
        data_parallel: How the ranks of dp share the work: see above.

    Raises:
        ValueError: Sharded in a pipeline, where the weights would travel in each micro-batch, or a
            mixture of experts.
    """
    if model.num_experts:
        raise ValueError(
            f"model.num_experts={model.num_experts}: the plainest model knows no experts and no "
            "all-to-all; ask perf.estimate"
        )
    if data_parallel == "sharded" and shape.pp > 1:
        raise ValueError(
            f'pp={shape.pp} and "sharded": the weights would be gathered for each micro-batch; '
            'take pp=1, or "overlapped"'
        )
    num_microbatches = global_batch // (micro_batch * shape.dp)
    act = micro_batch * model.context_length * model.hidden_size * VALUE_BYTES
    model_ranks = shape.tp * shape.pp

    flops = training_flops_per_sample(model) * micro_batch
    compute_s = flops / model_ranks / cluster.flops_per_s

    tp_link = cluster.link(shape.groups("tp")[0])
    all_reduces = (4 * model.num_layers + 2) / shape.pp
    tp_s = all_reduces * alpha_beta.time_s("all_reduce", shape.tp, act, tp_link)

    pp_s = 0.0
    if shape.pp > 1:
        pp_s = alpha_beta.time_s("send", 2, act, cluster.message_link(shape.groups("pp")[0]))

    own_bytes = model.num_parameters / model_ranks * VALUE_BYTES
    dp_link = cluster.link(shape.groups("dp")[0])
    reduce_s = alpha_beta.time_s("all_reduce", shape.dp, own_bytes, dp_link)
    if data_parallel == "plain":
        dp_s = reduce_s
    elif data_parallel == "overlapped":
        dp_s = max(0.0, reduce_s - BACKWARD * compute_s)
    else:
        # two all-gathers and a reduce-scatter, half an all-reduce each
        dp_s = num_microbatches * max(0.0, 1.5 * reduce_s - compute_s - tp_s)

    return {
        "compute": num_microbatches * compute_s,
        "tp": num_microbatches * tp_s,
        "pp": num_microbatches * pp_s,
        "bubble": (shape.pp - 1) * (compute_s + tp_s + pp_s),
        "dp": dp_s,
    }


def time_line(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> Timeline:
    """The time line of a step with 1F1B by the same plain model, with one row of bars per stage.

    A sender is kept from its work while its message is under way, as in the emulated cluster; a bar
    ends when the message begins.

    Args:
        All as in `iteration_parts`.
    """
    num_microbatches = global_batch // (micro_batch * shape.dp)
    parts = iteration_parts(model, shape, global_batch, micro_batch, cluster)
    # of what a stage does for one micro-batch, a third is the forward and two thirds the backward
    third_s = (parts["compute"] + parts["tp"]) / num_microbatches / 3
    message_s = parts["pp"] / num_microbatches
    last = shape.pp - 1

    def send_s(kind: str, stage: int) -> float:
        """Seconds of the message after an F or a B: the first and the last stage have an end."""
        end = last if kind == "F" else 0
        return 0.0 if stage == end else message_s

    # The simulator knows no busy senders, so the messages count as work first and are then cut off.
    times = []
    for stage in range(shape.pp):
        forward_s = third_s + send_s("F", stage)
        weight_s = third_s + send_s("B", stage)
        times.append(StageTimes(forward_s, third_s, weight_s))
    bars: list[Bar] = []
    for bar in simulate(schedule("1f1b", shape.pp, num_microbatches), times).rows:
        stop_s = bar.stop_s - send_s(bar.action.kind, bar.action.stage)
        bars.append(bar._replace(stop_s=stop_s))
    return Timeline(tuple(bars))


def _slowness(link: Link) -> float:
    return link.alpha_s + 1 / link.beta_bytes_per_s


# ---- one device

WIDE_BYTES = 4  # of a weight, a gradient, a residual, and of the loss


@dataclass(frozen=True)
class DeviceSpeed:
    """What one device can do; `measure.device_speed.device_speed` measures it.

    Args:
        flops_per_s: FLOP/s in matrix products.
        bytes_per_s: Read and written by operations that compute little, such as an addition.
        launch_s: Seconds that an operation takes however small it is.
    """

    flops_per_s: float
    bytes_per_s: float
    launch_s: float


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, by what they are spent on.

    Args:
        matmul_s: Seconds in matrix products, attention among them.
        memory_s: Reading and writing, in all other operations.
        launch_s: Launching operations.
    """

    matmul_s: float
    memory_s: float
    launch_s: float

    @property
    def step_s(self) -> float:
        """All of it: one operation comes after the other."""
        return self.matmul_s + self.memory_s + self.launch_s


def device_step(
    model: GPTConfig | ViTConfig,
    speed: DeviceSpeed,
    *,
    micro_batch: int,
    num_micro_batches: int = 1,
    value_bytes: int = 4,
) -> StepTime:
    """The seconds of one optimizer step on one device.

        matmul_s   FLOPs / rate
        memory_s   bytes read and written / bandwidth
        launch_s   operations * launch

    An operation of a real step takes the longer of its arithmetic and its memory traffic; here each
    counts for one of the two. Left out is whatever makes an operation slower than that: small
    products and attention do not reach the rate of a large product, and GELU computes more than it
    moves. So a prediction is mostly too short.

    Args:
        model: Every size filled in. No dropout and no activation checkpointing.
        speed: Measured speed of the device, in the dtype of the matrix products.
        micro_batch: Samples at once.
        num_micro_batches: How many of them make a step.
        value_bytes: Bytes of a number that a matrix product reads or writes; weights, gradients,
            residuals and the loss have 4.

    Source: Williams et al. 2009 (Roofline, doi:10.1145/1498765.1498785); the launch as a part of
        its own, as in He 2022, "Making Deep Learning Go Brrrr From First Principles".
    Held by: tests/unit/test_device_step.py; against measured steps by
        benchmarks/predicted_step.py, within a factor of 2 in float32; bfloat16 on a CPU is
        farther off, where attention's backward has no fast kernel
    """
    flops = micro_batch * training_flops_per_sample(model)
    tokens = micro_batch * model.sequence_length
    num_bytes = model.num_layers * _layer_bytes(model, tokens, value_bytes)
    num_bytes += _ends_bytes(model, tokens)
    optimizer_bytes = OPTIMIZER_PASSES * model.num_parameters * WIDE_BYTES
    launches = num_micro_batches * launches_per_micro_batch(model, value_bytes < WIDE_BYTES)
    return StepTime(
        matmul_s=num_micro_batches * flops / speed.flops_per_s,
        memory_s=(num_micro_batches * num_bytes + optimizer_bytes) / speed.bytes_per_s,
        launch_s=launches * speed.launch_s,
    )


# How often each number of some tensor is read or written in forward and backward together.
NORM_PASSES = 2 + 3  # forward: x, output; backward: x, gradient, new gradient
ADD_PASSES = 3 + 3  # forward: two terms and their sum; backward: the two gradients of a fork
GELU_PASSES = 2 + 3  # as a norm
GATE_PASSES = 3 + 5  # of a gated MLP: two factors, their product; the same again and two gradients
BIAS_PASSES = 1  # backward sums the gradient over all tokens
# forward: a row is gathered, joined with those of other experts, gathered and weighted; backward
# the same
ROUTED_PASSES = 8 + 8
ROUTER_PASSES = 9 + 5  # as the loss: a softmax over the experts
JOIN_PASSES = 2  # backward copies the gradients of q, k and v into one tensor
# forward: 4 products and 2 sums of halves, joined; the same in backward
ROTARY_PASSES = 9 + 9
SCORE_PASSES = 2 + 4  # the softmax is written and read, also where it never leaves the cache
CAST_PASSES = 2  # under autocast: read in one width, written in the other
LOSS_PASSES = 9 + 5  # forward: maximum, difference, exp, sum, quotient; backward: two copies
# the norm of the gradient reads it; AdamW reads weight, gradient and moments, and writes all but
# the gradient; the first backward writes the gradient, DDP copies it into a bucket and back
OPTIMIZER_PASSES = 1 + 7 + 1 + 4


def _layer_bytes(model: GPTConfig | ViTConfig, tokens: float, value_bytes: int) -> float:
    """Bytes that one layer moves outside of its matrix products, forward and backward."""
    hidden = model.hidden_size
    kv_heads = model.kv_heads if isinstance(model, GPTConfig) else model.num_heads
    qkv = (model.num_heads + 2 * kv_heads) * model.head_size
    wide = 2 * (NORM_PASSES + ADD_PASSES) * hidden
    narrow = GELU_PASSES * model.active_ffn + JOIN_PASSES * qkv
    if isinstance(model, ViTConfig) or model.bias:
        narrow += BIAS_PASSES * (qkv + 2 * hidden + model.ffn)
    if isinstance(model, GPTConfig) and model.gated:
        narrow += GATE_PASSES * model.active_ffn
    if isinstance(model, GPTConfig) and model.num_experts:
        narrow += ROUTED_PASSES * model.experts_per_token * hidden
        wide += ROUTER_PASSES * model.num_experts
    if isinstance(model, GPTConfig) and model.positions == "rotary":
        narrow += ROTARY_PASSES * (model.num_heads + kv_heads) * model.head_size
    if value_bytes < WIDE_BYTES:
        wide += 2 * CAST_PASSES * 2 * hidden
    scores = SCORE_PASSES * model.num_heads * model.sequence_length
    return tokens * (wide * WIDE_BYTES + narrow * value_bytes + scores * value_bytes)


def _ends_bytes(model: GPTConfig | ViTConfig, tokens: float) -> float:
    """Bytes of the embedding, the last norm and the loss."""
    outputs = model.patch_outputs if isinstance(model, ViTConfig) else model.vocab_size or 0
    return (
        tokens
        * WIDE_BYTES
        * ((NORM_PASSES + ADD_PASSES) * model.hidden_size + LOSS_PASSES * outputs)
    )


LAYER_VIEWS = (
    20  # another look at the same memory is launched as well: transposed, split, flattened
)
LAYER_OPERATIONS = (
    11 + LAYER_VIEWS
)  # two norms, four products, attention, GELU, two sums, a join of heads
ROUTING_OPERATIONS = 43  # beyond an MLP's: scores, top-k, balance loss, permutation and back
EXPERT_OPERATIONS = 9  # of one expert in a loop: its rows and weights, two products, activation
ROTARY_OPERATIONS = 7  # four products, two sums, a join
AUTOCAST_OPERATIONS = 12  # weights and biases of four products, and what goes in and out
END_OPERATIONS = 20  # embedding, positions, last norm, head, and the loss in single operations
# for each operation of forward there are two of backward, and a product has a sum for its bias
FORWARD_AND_BACKWARD = 3
LAYER_WEIGHTS = 12  # tensors: four matrices, two norms, each with a bias
END_WEIGHTS = 5
GRADIENT_OPERATIONS = 2  # each gradient is added to its weight's, and copied into a bucket


def launches_per_micro_batch(model: GPTConfig | ViTConfig, autocast: bool = False) -> int:
    """Operations of one forward and backward; the optimizer's few are left out."""
    layer = LAYER_OPERATIONS
    if isinstance(model, GPTConfig) and model.positions == "rotary":
        layer += ROTARY_OPERATIONS
    if isinstance(model, GPTConfig) and model.num_experts:
        layer += ROUTING_OPERATIONS + EXPERT_OPERATIONS * model.num_experts
    if autocast:
        layer += AUTOCAST_OPERATIONS
    products = FORWARD_AND_BACKWARD * (model.num_layers * layer + END_OPERATIONS)
    return products + GRADIENT_OPERATIONS * (model.num_layers * LAYER_WEIGHTS + END_WEIGHTS)
