"""torch.compile changes no number; "aot_eager" traces and cuts as "inductor" does, and is quick."""

import pytest
import torch

from labcode.config import GPTConfig, ParallelConfig
from labcode.topology import GridShape

ROTARY = GPTConfig(
    vocab_size=24,
    context_length=8,
    num_layers=3,
    num_heads=4,
    hidden_size=16,
    num_kv_heads=2,
    positions="rotary",
)


def trained(rank, shape, options, compiled, compiler="aot_eager"):
    """(loss, gradient norm, validation loss) of two micro-batches; graphs that were compiled."""
    from torch._dynamo.utils import counters

    from labcode.comm.grid import Grid
    from labcode.models.gpt import GPT
    from labcode.models.parallelize import parallelize

    torch._dynamo.reset()
    counters.clear()
    with torch.device("meta"):
        model = GPT(ROTARY)
    grid = Grid.create(shape)
    model = parallelize(
        model,
        grid,
        ParallelConfig(**options),
        seed=0,
        dtype=torch.float64,
        compiled=compiled,
        compiler=compiler,
    )
    generator = torch.Generator().manual_seed(grid.coord("dp"))
    tokens = torch.randint(24, (4, 9), generator=generator)
    batches = [(part[:, :-1], part[:, 1:]) for part in tokens.chunk(2)]
    loss = model.forward_backward(batches)
    norm = model.gradient_norm()
    model.eval()
    found = [loss.item(), norm.item(), model.losses(batches).sum().item()]
    return found, counters["stats"].get("unique_graphs", 0), len(counters["graph_break"])


def check(pool, shape, options, compiled, compiler="aot_eager"):
    expected = pool.run(trained, shape, options, "none")
    for (plain, no_graphs, _), (found, graphs, breaks) in zip(
        expected, pool.run(trained, shape, options, compiled, compiler)
    ):
        assert found == pytest.approx(plain, abs=1e-12)
        assert no_graphs == 0 < graphs
        if compiled == "block":
            # of one layer for all, with gradients and without: nothing in a layer breaks a graph
            assert (graphs, breaks) == (2, 0)


def test_compiled_layers_give_the_same_numbers_in_one_graph(ranks1):
    check(ranks1, GridShape(), {}, "block")


@pytest.mark.release
@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ({}, "block"),
        ({}, "model"),
        ({"data_parallel": "labcode"}, "block"),
        ({"data_parallel": "labcode", "zero_stage": 2}, "block"),
    ],
    ids=str,
)
def test_compiled_copies_give_the_same_numbers(ranks2, options, compiled):
    check(ranks2, GridShape(dp=2), options, compiled)


@pytest.mark.release
@pytest.mark.timeout(300)  # half a minute where nobody else computes
def test_the_compiler_of_c_code_gives_the_same_numbers(ranks1):
    check(ranks1, GridShape(), {}, "block", "inductor")
