"""The pipeline's runner against one process, for every schedule, with small and uneven stages."""

import weakref

import pytest
import torch
from covering import covering
from torch import nn

from course.pool.ranks import RankError
from labcode.schedules import make_plan, plan_pipeline, schedule

WIDTH, BATCH, LAYERS = 6, 3, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1}  # stages per rank
CASES = [
    (name, ranks, ranks * v, m)
    for ranks in (1, 2, 4)
    for name, v in SCHEDULES.items()
    for m in (4, 8)
]


def make_layers():
    torch.manual_seed(0)
    return [
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH)).double()
        for _ in range(LAYERS)
    ]


def make_batches(m):
    torch.manual_seed(1)
    return list(torch.randn(m, BATCH, WIDTH, dtype=torch.float64)), list(
        torch.randn(m, BATCH, WIDTH, dtype=torch.float64)
    )


class Stage(nn.Module):
    """Some of the layers; the first stage reads the inputs."""

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x, inputs):
        return self.layers(inputs if x is None else x)


def cut(num_stages):
    """Where the layers are cut: unevenly, the last stages get one more."""
    sizes = [len(part) for part in torch.arange(LAYERS).tensor_split(num_stages)][::-1]
    starts = [sum(sizes[:i]) for i in range(num_stages)]
    return [range(start, start + size) for start, size in zip(starts, sizes)]


def piped(rank, name, num_stages, m, fail=None):
    """(loss, {layer: gradients}) of this rank after two steps without an optimizer between."""
    import torch.distributed as dist

    from labcode.parallel.pipeline import Pipeline

    ranks = dist.get_world_size()
    layers, parts = make_layers(), cut(num_stages)
    own = {
        stage: Stage([layers[i] for i in parts[stage]]) for stage in range(rank, num_stages, ranks)
    }
    if fail in own:
        own[fail].register_forward_pre_hook(lambda *_: 1 / 0)
    pipeline = Pipeline(
        own,
        plan_pipeline(name, num_stages, m, ranks),
        dist.group.WORLD,
        nn.functional.mse_loss,
        lambda inputs: torch.empty(BATCH, WIDTH, dtype=torch.float64),
    )
    inputs, targets = make_batches(m)
    losses = [pipeline.step(inputs, targets).item() for _ in range(2)]
    assert losses[0] == losses[1]
    return losses[0], {
        i: [p.grad for p in layers[i].parameters()] for stage in own for i in parts[stage]
    }


@pytest.mark.parametrize(
    ("name", "ranks", "num_stages", "m"), covering(CASES), ids=lambda value: str(value)
)
def test_every_schedule_gives_the_gradients_of_one_process(request, name, ranks, num_stages, m):
    layers, (inputs, targets) = make_layers(), make_batches(m)
    loss = (
        sum(nn.functional.mse_loss(nn.Sequential(*layers)(x), y) for x, y in zip(inputs, targets))
        / m
    )
    (2 * loss).backward()
    results = request.getfixturevalue(f"ranks{ranks}").run(piped, name, num_stages, m)
    assert sum(own_loss for own_loss, _ in results) == pytest.approx(loss.item(), abs=1e-12)
    grads = {i: of_layer for _, own in results for i, of_layer in own.items()}
    assert len(grads) == LAYERS
    for i, layer in enumerate(layers):
        torch.testing.assert_close(
            grads[i], [p.grad for p in layer.parameters()], rtol=0, atol=1e-12
        )


def most_under_way(rank, name, num_stages, m):
    """How many tensors that this rank has sent are in memory at once, at most."""
    import torch.distributed as dist

    sent, held, start = weakref.WeakSet(), [0], dist.batch_isend_irecv

    def start_and_count(operations):
        works = start(operations)
        sent.update(each.tensor for each in operations if each.op is dist.isend)
        held.append(len(sent))
        return works

    dist.batch_isend_irecv = start_and_count
    try:
        piped(rank, name, num_stages, m)
    finally:
        dist.batch_isend_irecv = start
    return max(held)


@pytest.mark.parametrize("name", SCHEDULES)
def test_sent_tensors_are_let_go_of_within_a_step(ranks2, name):
    most = [max(ranks2.run(most_under_way, name, 2 * SCHEDULES[name], m)) for m in (8, 32)]
    assert most[0] == most[1] <= 2 * 2 + 1


def test_a_stage_that_fails_is_named_and_nobody_waits_for_it(ranks4):
    with pytest.raises(
        RankError, match=r"rank 2: StageError: stage 2 failed at 2F0: ZeroDivisionError"
    ):
        ranks4.run(piped, "1f1b", 4, 8, fail=2)
    assert len(ranks4.run(piped, "1f1b", 4, 4)) == 4  # and the ranks can be used again


def test_a_schedule_that_would_hang_is_refused_on_every_rank_before_it_starts(ranks2):
    def attempt(rank):
        import torch.distributed as dist

        from labcode.parallel.pipeline import Pipeline

        actions = schedule("1f1b", 2, 4)
        actions[0][0], actions[0][2] = actions[0][2], actions[0][0]  # a backward before its forward
        with pytest.raises(ValueError, match="cannot start"):
            Pipeline({}, make_plan(actions, 2, 4), dist.group.WORLD, None, None)
        return True

    assert ranks2.run(attempt) == [True, True]


def evaluated(rank, num_stages, m):
    import torch.distributed as dist

    from labcode.parallel.pipeline import Pipeline

    layers, parts, ranks = make_layers(), cut(num_stages), dist.get_world_size()
    own = {
        stage: Stage([layers[i] for i in parts[stage]]) for stage in range(rank, num_stages, ranks)
    }
    plan = plan_pipeline("interleaved", num_stages, ranks, ranks)
    boundary = lambda inputs: torch.empty(BATCH, WIDTH, dtype=torch.float64)  # noqa: E731
    pipeline = Pipeline(own, plan, dist.group.WORLD, nn.functional.mse_loss, boundary)
    return pipeline.evaluate(*make_batches(m)), [
        p.grad for layer in layers for p in layer.parameters()
    ]


def test_evaluating_takes_any_number_of_micro_batches_and_leaves_no_gradients(ranks2):
    inputs, targets = make_batches(3)
    whole = nn.Sequential(*make_layers())
    expected = torch.stack(
        [nn.functional.mse_loss(whole(x), y) for x, y in zip(inputs, targets)]
    ).detach()
    results = ranks2.run(evaluated, 4, 3)
    torch.testing.assert_close(results[0][0] + results[1][0], expected, rtol=0, atol=1e-12)
    assert all(grad is None for _, grads in results for grad in grads)


def test_a_deferred_weight_gradient_comes_with_finish_and_not_before():
    from labcode.parallel.deferred import WeightGradientStore, finish

    layers = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, store = torch.randn(2, 7, 4, dtype=torch.float64, requires_grad=True), WeightGradientStore()
    layers(x).square().sum().backward()
    expected, expected_dx = [p.grad.clone() for p in layers.parameters()], x.grad.clone()
    layers.zero_grad()
    x.grad = None
    for number in (1, 2):  # twice: gradients add up
        with store.watching():
            y = layers(x).square().sum()
        with store.later() as waiting:
            y.backward()
        assert len(waiting) == 2
        if number == 1:
            torch.testing.assert_close(x.grad, expected_dx)
            assert layers[0].weight.grad is None and layers[0].bias.grad is not None
        finish(waiting)
        torch.testing.assert_close(
            [p.grad for p in layers.parameters()], [number * grad for grad in expected]
        )
    with store.watching():
        y = layers(x).square().sum()
    y.backward()  # without `later` nothing is left undone
    torch.testing.assert_close(
        [p.grad for p in layers.parameters()], [3 * grad for grad in expected]
    )


def kept_with(rank, checkpointing):
    from labcode.comm.grid import Grid
    from labcode.config import GPTConfig, ParallelConfig
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize
    from labcode.perf.saved_bytes import saved_bytes
    from labcode.topology import GridShape

    model = GPT(
        GPTConfig(vocab_size=16, context_length=32, num_layers=4, hidden_size=32, num_heads=4)
    )
    model = parallelize(
        model, Grid.create(GridShape()), ParallelConfig(activation_checkpointing=checkpointing)
    )
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    with saved_bytes(model.module) as saved:
        loss = model.loss(model(tokens), tokens)
    found = sum(size for name, size in saved.by_module().items() if name.startswith("blocks"))
    loss.backward()
    return found


def test_activation_checkpointing_keeps_the_input_of_each_layer_alone(ranks1):
    number = 2 * 32 * 32 * 4  # bytes of [B, S, H]
    assert ranks1.run(kept_with, "full")[0] <= 4 * number
    assert ranks1.run(kept_with, "none")[0] > 4 * 15 * number
