"""Experts divided over ranks, against the whole layer on one process, to 1e-12 in float64."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from labcode.comm.collectives import split_to
from labcode.comm.counting import counted
from labcode.comm.grid import Grid
from labcode.config import GPTConfig
from labcode.models.moe import MoE
from labcode.parallel.experts import divide_experts
from labcode.perf.traffic import step_traffic
from labcode.perf.transformer import Transformer
from labcode.topology import GridShape

HIDDEN, FFN, EXPERTS, SAMPLES, TOKENS = 6, 8, 8, 2, 12
LOADS = ("as it comes", "one expert has none", "one expert has all")


def made(load="as it comes", **options):
    """A layer that is the same everywhere."""
    torch.manual_seed(5)
    options = {"top_k": 2, "balance": 0.05, "z_loss": 0.01, "bias_rate": 0.1} | options
    top_k = options.pop("top_k")
    layer = MoE(HIDDEN, FFN, EXPERTS, top_k, **options).double()
    for param in layer.parameters():
        if param.requires_grad:
            torch.nn.init.normal_(param, std=0.7)
    if load == "one expert has none":
        layer.router.bias[3] = -100.0
    if load == "one expert has all":
        layer.router.bias[3] = 100.0
    return layer


def data(dp):
    """Inputs, and what the outputs are multiplied with: [dp*B, S, H]."""
    generator = torch.Generator().manual_seed(6)
    size = (2, dp * SAMPLES, TOKENS, HIDDEN)
    return torch.randn(size, generator=generator, dtype=torch.float64)


def alone(dp, load, options):
    """Output, gradients of input and weights, and rows of each expert, of one process."""
    layer = made(load, **options)
    x, factor = data(dp)
    x.requires_grad_()
    out = layer(x)
    (out * factor).sum().backward()
    grads = {name: param.grad for name, param in layer.named_parameters()}
    return out.detach(), x.grad, grads, layer.router.load


def off_by(rank, shape, ep, sequence, load, options):
    """How far this rank is from one process: output, gradients, rows of each expert."""
    grid = Grid.create(shape)
    dp, tp, cp = shape.dp, shape.tp, shape.cp
    own_experts, replicas = grid.split("dp", dp // ep)
    out, x_grad, grads, load_of_all = alone(dp, load, options)
    layer = made(load, **options)
    divide_experts(layer.experts, own_experts, grid.group("tp"), sequence)
    layer.router.loss_scale = 1 / dp  # what this rank's mean over its sequences counts
    parts = ("cp", "tp") if sequence else ("cp",)
    if grid.size(*parts) > 1:
        layer.router.sum_counts = lambda counts: summed(counts, grid.group(*parts))

    def own(whole):
        """This rank's samples, and its part of their tokens."""
        mine = whole.chunk(dp)[grid.coord("dp")].chunk(cp, 1)[grid.coord("cp")]
        return mine.chunk(tp, 1)[grid.coord("tp")] if sequence else mine

    x, factor = (own(each).clone() for each in data(dp))
    x.requires_grad_()
    result = layer(x)
    (result * factor).sum().backward()
    off = {"output": apart(result, own(out)), "input": apart(x.grad, own(x_grad))}
    over = ("dp", *parts)
    off["router"] = apart(
        summed(layer.router.weight.grad, grid.group(*over)), grads["router.weight"]
    )
    for name in ("up", "down"):
        grad = summed(getattr(layer.experts, name).grad, replicas)
        grad = summed(grad, grid.group("cp"))
        whole = grads[f"experts.{name}"].chunk(ep)[own_experts.rank()]
        off[name] = apart(grad, cut_features(name, whole, layer.experts.kind, grid))
    rows = summed(layer.router.load, grid.group(*over))
    off["rows"] = (rows - load_of_all).abs().max().item()
    return off


def cut_features(name, whole, kind, grid):
    """The part of tp of some experts' gradients."""
    tp, coord = grid.size("tp"), grid.coord("tp")
    if name == "down":
        return whole.chunk(tp, 2)[coord]
    sections = whole.chunk(2 if kind == "swiglu" else 1, 1)
    return torch.cat([section.chunk(tp, 1)[coord] for section in sections], 1)


def summed(tensor, group):
    out = tensor.clone()
    dist.all_reduce(out, group=group)
    return out


def apart(found, expected):
    assert found.shape == expected.shape
    return (found - expected).abs().max().item()


CASES = [  # shape, ep, sequence parallel, load, options of the layer
    (GridShape(dp=2), 2, False, LOADS[0], {}),
    (GridShape(dp=2), 2, False, LOADS[1], {"scoring": "sigmoid"}),
    (GridShape(dp=2), 2, False, LOADS[2], {"top_k": 1}),
    (GridShape(tp=2), 1, False, LOADS[0], {"scoring": "softmax_of_chosen"}),
    (GridShape(tp=2), 1, True, LOADS[1], {}),
    (GridShape(cp=2), 1, False, LOADS[0], {}),
    (GridShape(dp=4), 4, False, LOADS[2], {}),
    (GridShape(dp=4), 2, False, LOADS[0], {"capacity_factor": 1.0}),
    (GridShape(dp=4), 2, False, LOADS[2], {"capacity_factor": 1.25, "top_k": 3}),
    (GridShape(dp=2, tp=2), 2, False, LOADS[0], {"kind": "gelu"}),
    (GridShape(dp=2, tp=2), 2, True, LOADS[1], {"capacity_factor": 1.0}),
    (GridShape(dp=2, tp=2, order="dp-tp-cp-pp"), 2, True, LOADS[2], {"scoring": "sigmoid"}),
    (GridShape(dp=2, cp=2), 2, False, LOADS[0], {"scoring": "softmax_of_chosen"}),
    (GridShape(cp=2, tp=2), 1, True, LOADS[0], {}),
]
for sizes, sequence, load in itertools.product(
    [(4, 1, 2, 4), (2, 2, 2, 2), (4, 1, 2, 2), (8, 1, 1, 4)], (False, True), LOADS
):
    dp, cp, tp, ep = sizes
    shape = GridShape(dp=dp, cp=cp, tp=tp)
    CASES.append(pytest.param(shape, ep, sequence, load, {}, marks=pytest.mark.release))


@pytest.mark.parametrize(("shape", "ep", "sequence", "load", "options"), CASES, ids=str)
def test_divided_experts_give_output_and_gradients_of_one_process(
    request, shape, ep, sequence, load, options
):
    pool = request.getfixturevalue(f"ranks{shape.world_size}")
    for off in pool.run(off_by, shape, ep, sequence, load, options):
        assert off.pop("rows") == 0
        assert max(off.values()) < 1e-12, off


# ---- what is sent


def sent_bytes(rank):
    """(calls of a forward and backward, rows this rank sent away, rows that it got)."""
    layer = made(balance=0.0, z_loss=0.0)
    grid = Grid.create(GridShape(dp=4))
    divide_experts(layer.experts, grid.group("dp"), grid.group("tp"))
    x = data(4)[0].chunk(4)[rank].clone().requires_grad_()
    _, experts = layer.router(x)
    with counted() as calls:
        layer(x).sum().backward()
    rows = layer.router.counts(experts).sum(0).view(4, -1).sum(1)
    everybody = [torch.empty_like(rows) for _ in range(4)]
    dist.all_gather(everybody, rows)
    received = torch.stack(everybody)[:, rank]
    return [(call.kind, call.num_bytes) for call in calls], rows.tolist(), received.tolist()


def test_rows_travel_twice_each_way_and_nothing_else_does(ranks4):
    for calls, rows, received in ranks4.run(sent_bytes):
        row_bytes = 8 * HIDDEN
        there, back = sum(rows) * row_bytes, sum(received) * row_bytes
        assert [kind for kind, _ in calls] == ["all_to_all"] * 5
        assert [num_bytes for _, num_bytes in calls] == [8 * EXPERTS, there, back, there, back]


def counted_in_a_step(shape, config):
    """Bytes of all all-to-alls of rows in a step of two micro-batches."""
    from labcode.config import ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    with torch.device("meta"):
        model = GPT(config)
    model = parallelize(model, Grid.create(shape), ParallelConfig(), seed=0)
    tokens = torch.randint(config.vocab_size, (2, config.context_length))
    with counted() as calls:
        model.forward_backward([(tokens, tokens)] * 2)
    sizes = [call.num_bytes for call in calls if call.kind == "all_to_all"]
    counts = 8 * config.num_experts
    assert sizes.count(counts) == 2 * config.num_layers
    return sum(sizes) - counts * 2 * config.num_layers


@pytest.mark.parametrize("shape", [GridShape(dp=4, ep=4), GridShape(dp=2, ep=2, tp=2)], ids=str)
def test_a_step_sends_the_rows_that_the_planner_counts(ranks4, shape):
    """Two all-to-alls forward and two backward in each layer; on average, as experts differ."""
    config = GPTConfig(
        vocab_size=32,
        context_length=16,
        num_layers=2,
        num_heads=4,
        hidden_size=16,
        bias=False,
        num_experts=8,
        experts_per_token=3,
        expert_ffn_size=12,
    )
    found = sum(ranks4.run(counted_in_a_step, shape, config))
    sent = step_traffic(config, shape, global_batch=4 * shape.dp, value_bytes=4)["ep"]
    # what a rank has, of which it sends all but its own part
    assert sum(sent.values()) == found * (shape.ep - 1) / shape.ep


def sums_in_a_step(config):
    """All-reduces over tp as large as the activations, in a step of one micro-batch."""
    from labcode.config import ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    with torch.device("meta"):
        model = GPT(config)
    model = parallelize(model, Grid.create(GridShape(tp=2)), ParallelConfig(), seed=0)
    tokens = torch.zeros(3, config.context_length, dtype=torch.int64)
    with counted() as calls:
        model.forward_backward([(tokens, tokens)])
    act = 3 * config.context_length * config.hidden_size * 4
    return sum(call.kind == "all_reduce" and call.num_bytes == act for call in calls)


@pytest.mark.parametrize("shared", [0, 8])
def test_an_mlp_beside_the_experts_has_sums_of_its_own_over_tp(ranks2, shared):
    config = replace(MIXTURE, shared_ffn_size=shared, expert_capacity=0.0)
    of_layers = 2 * config.num_layers * Transformer.of(config).sums_over_tp
    # embedding and head have one each
    assert ranks2.run(sums_in_a_step, config) == [of_layers + 2] * 2


# ---- how even the load is


MIXTURE = GPTConfig(
    vocab_size=32,
    context_length=16,
    num_layers=2,
    num_heads=4,
    hidden_size=16,
    bias=False,
    num_experts=8,
    expert_ffn_size=12,
    expert_capacity=1.0,
    router_z_loss=0.1,
)


def load_of_a_step(shape, config, options):
    """What a rank says of the load of a step of 8 sequences in two micro-batches, and of none."""
    from labcode.config import ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    grid = Grid.create(shape)
    with torch.device("meta"):
        model = GPT(config)
    parallel = ParallelConfig(**options)
    model = parallelize(model, grid, parallel, seed=0, dtype=torch.float64)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(config.vocab_size, (8, config.context_length), generator=generator)
    own = tokens.chunk(shape.dp)[grid.coord("dp")]
    model.losses([(own, own)])  # an evaluation counts for nothing
    model.forward_backward([(part, part) for part in own.chunk(2)])
    model.rebalance()
    found = model.expert_load()
    model.rebalance()
    return found, model.expert_load()


LOADS_OF_GRIDS = {
    "ep 4": (GridShape(dp=4, ep=4), {}),
    "ep 2, tp 2": (GridShape(dp=2, ep=2, tp=2), {}),
    "ep 2, sequence parallel": (GridShape(dp=2, ep=2, tp=2), {"sequence_parallel": True}),
    "ep 2, pp 2": (GridShape(dp=2, ep=2, pp=2), {}),
    "checkpointing, ZeRO-3": (
        GridShape(dp=4, ep=2),
        {"activation_checkpointing": "full", "zero_stage": 3},
    ),
}


@pytest.mark.parametrize("layout", LOADS_OF_GRIDS)
def test_every_grid_tells_the_load_of_the_whole_batch(ranks1, ranks4, layout):
    ((expected, nothing),) = ranks1.run(load_of_a_step, GridShape(), MIXTURE, {})
    assert nothing == {}
    assert 1 < expected["expert_load"] <= 4
    assert 0 < expected["dropped_share"] < 1
    assert expected["router_loss"] > 0
    shape, options = LOADS_OF_GRIDS[layout]
    for found, after in ranks4.run(load_of_a_step, shape, MIXTURE, options):
        assert found == pytest.approx(expected, rel=1e-9)
        assert after == {}


def test_all_tokens_at_the_same_experts_are_seen(ranks2):
    """Tokens that are all alike: 8 experts of which 2 get all rows, 4 times an even share."""
    alike = replace(MIXTURE, vocab_size=1, positions="rotary", expert_capacity=1.0)
    for found, _ in ranks2.run(load_of_a_step, GridShape(dp=2, ep=2), alike, {}):
        assert found["expert_load"] == 4
        assert found["dropped_share"] == 0.75


def test_a_run_tells_the_load_as_far_as_there_is_something_to_tell(ranks1):
    plain = replace(MIXTURE, expert_capacity=0.0, router_z_loss=0.0, router_balance=0.0)
    ((found, _),) = ranks1.run(load_of_a_step, GridShape(), plain, {})
    assert list(found) == ["expert_load"]
    dense = replace(MIXTURE, num_experts=0)
    assert ranks1.run(load_of_a_step, GridShape(), dense, {}) == [({}, {})]


# ---- the mistakes that other projects made


def router_after_the_gather(rank):
    """How many times too large the router's gradient is if all of tp route the whole sequence."""
    grid = Grid.create(GridShape(tp=2))
    tp = grid.group("tp")
    _, _, grads, _ = alone(1, "as it comes", {"balance": 0.0, "z_loss": 0.0})
    layer = made(balance=0.0, z_loss=0.0)
    divide_experts(layer.experts, grid.group("dp"), tp)  # without sequence parallelism
    whole, factor = data(1)
    routing = layer.router(whole)  # each rank of tp looks at all tokens
    out = layer.experts(whole, routing)
    (split_to(out, tp, 1) * factor.chunk(2, 1)[rank]).sum().backward()
    grad = summed(layer.router.weight.grad, tp)  # "partial over tp", which it is not
    return (grad / grads["router.weight"]).median().item()


def test_a_router_behind_the_gather_gets_its_gradient_tp_times(ranks2):
    for times in ranks2.run(router_after_the_gather):
        assert times == pytest.approx(2.0)


def weights_past_the_gate(rank):
    """How far the router's gradient is off if its weights do not pass the gate of tp."""
    grid = Grid.create(GridShape(tp=2))
    _, _, grads, _ = alone(1, "as it comes", {"balance": 0.0, "z_loss": 0.0})
    layer = made(balance=0.0, z_loss=0.0)
    divide_experts(layer.experts, grid.group("dp"), grid.group("tp"))
    gate = layer.experts.enter

    def enter(x, weights, experts):
        x, _, experts = gate(x, weights, experts)
        return x, weights, experts

    layer.experts.enter = enter
    x, factor = data(1)
    (layer(x) * factor).sum().backward()
    return apart(layer.router.weight.grad, grads["router.weight"])


def test_weights_that_do_not_pass_the_gate_give_the_router_a_part_of_its_gradient(ranks2):
    assert min(ranks2.run(weights_past_the_gate)) > 1e-2


def refused(rank):
    grid = Grid.create(GridShape(dp=4))
    messages = []
    for experts, ffn, group in ((6, 8, "dp"), (8, 6, "tp")):
        layer = MoE(4, ffn, experts, 1)
        ep = grid.group("dp") if group == "dp" else grid.group()
        tp = grid.group("dp") if group == "tp" else grid.group()
        try:
            divide_experts(layer.experts, ep, tp)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_sizes_that_do_not_divide_are_refused(ranks4):
    for messages in ranks4.run(refused):
        assert messages == [
            "6 experts cannot be divided over ep = 4: choose a divisor of their number",
            "an expert's 6 features cannot be cut over tp = 4: choose a divisor of them",
        ]


def biases_after_a_step(frozen):
    """Whether the biases of both routers have moved after a step of a model that is frozen in part.

    Args:
        frozen: How the names of the frozen weights begin.
    """
    from labcode.config import ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    config = replace(MIXTURE, router="sigmoid", router_bias_rate=0.1)
    with torch.device("meta"):
        model = GPT(config)
    for name, param in model.named_parameters():
        if name.startswith(frozen):
            param.requires_grad_(False)
    grid = Grid.create(GridShape())
    model = parallelize(model, grid, ParallelConfig(), seed=0, dtype=torch.float64)
    tokens = torch.randint(32, (4, 16), generator=torch.Generator().manual_seed(7))
    model.forward_backward([(tokens, tokens)])
    model.rebalance()
    return [bool(model.weights[f"{name}.bias"].any()) for name in model.routers]


@pytest.mark.parametrize(
    ("frozen", "moved"),
    [
        ((), [True, True]),
        (("embed", "positions", "blocks.0"), [False, True]),
        (("embed", "positions", "blocks"), [False, False]),
    ],
)
def test_the_bias_of_a_router_without_backward_stays(ranks1, frozen, moved):
    assert ranks1.run(biases_after_a_step, frozen) == [moved]
