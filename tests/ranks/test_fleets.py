"""Two fleets in one job: a grid over some ranks, and weights that go from one to the other."""

import itertools

import pytest
import torch
import torch.distributed as dist

from course.pool.answers import RankError
from labcode.comm.counting import counted, totals
from labcode.comm.grid import Grid, group_of
from labcode.config import GPTConfig, ParallelConfig
from labcode.models.gpt import GPT
from labcode.models.layers import initialize
from labcode.models.parallelize import parallelize
from labcode.parallel import reshard
from labcode.topology import AXES, GridShape

COMBINATIONS = [axes for count in range(5) for axes in itertools.combinations(AXES, count)]
FLEETS_OF_4 = [
    (GridShape(dp=2), GridShape(tp=2)),
    (GridShape(pp=3), GridShape()),
    (GridShape(), GridShape(dp=3)),
    (GridShape(), GridShape(tp=2), GridShape()),
    (GridShape(dp=2, tp=2),),
]


def members(rank, arrangements):
    """For each arrangement: this rank's fleet, and ranks and sum of each of its groups."""
    seen = []
    for shapes in arrangements:
        number, grid = Grid.fleets(*shapes)
        assert grid.shape == shapes[number]
        groups = []
        for axes in COMBINATIONS:
            group = grid.group(*axes)
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group)
            groups.append((dist.get_process_group_ranks(group), total.item()))
        mesh = grid.mesh.mesh.flatten().tolist()
        seen.append((number, groups, mesh))
    return seen


def test_every_group_of_a_fleet_has_its_ranks(ranks4):
    # Twice, and a grid of the whole job between: what was made is found by all ranks or by none.
    arrangements = [*FLEETS_OF_4, *FLEETS_OF_4[::-1]]
    for rank, seen in enumerate(ranks4.run(members, arrangements)):
        for shapes, (number, groups, mesh) in zip(arrangements, seen, strict=True):
            first = sum(shape.world_size for shape in shapes[:number])
            shape = shapes[number]
            assert mesh == list(range(first, first + shape.world_size))
            for axes, (group_ranks, total) in zip(COMBINATIONS, groups, strict=True):
                (own,) = [group for group in shape.groups(*axes) if rank - first in group]
                expected = [first + place for place in own]
                assert (group_ranks, total) == (expected, sum(expected)), (shapes, axes)


def threads_of(rank, shapes):
    import psutil

    for _ in range(3):
        Grid.fleets(*shapes)
    return psutil.Process().num_threads()


def test_groups_of_fleets_are_made_once(ranks4):
    before = ranks4.run(threads_of, FLEETS_OF_4[0])
    assert ranks4.run(threads_of, FLEETS_OF_4[0]) == before


def refused(rank, shapes, axis):
    _, grid = Grid.fleets(*shapes)
    grid.split(axis, 2)


def test_fleets_that_do_not_fill_the_job_and_parts_of_a_fleet_are_refused(ranks8):
    with pytest.raises(RankError, match=r"fleets of 2 \+ 4 = 6 ranks but WORLD_SIZE is 8"):
        ranks8.run(refused, (GridShape(dp=2), GridShape(tp=4)), "dp")
    with pytest.raises(RankError, match="a fleet cannot split an axis"):
        ranks8.run(refused, (GridShape(dp=4), GridShape(dp=4)), "dp")


# ---- weights from one fleet to the other

TIED = GPTConfig(
    vocab_size=23,  # not divisible by any number of ranks here
    context_length=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=1,  # of which both ranks of tp hold a copy
    hidden_size=16,
    ffn_size=10,
)
UNTIED = GPTConfig(
    vocab_size=23,
    context_length=16,
    num_layers=2,
    num_heads=2,
    hidden_size=8,
    tie_embeddings=False,
    positions="rotary",
    norm="rms",
    mlp="swiglu",
    bias=False,
)
OURS = ParallelConfig(data_parallel="labcode")
FSDP = ParallelConfig(data_parallel="labcode", zero_stage=3)
LEARNERS = {
    "tp 2, dp 2, copies of a head": (GridShape(tp=2, dp=2), OURS, TIED),
    "fsdp 4, tied": (GridShape(dp=4), FSDP, TIED),
    "tp 2, fsdp 2": (GridShape(tp=2, dp=2), FSDP, UNTIED),
    "pp 2, tp 2, tied": (GridShape(pp=2, tp=2), OURS, TIED),
    "pp 2, dp 2": (GridShape(pp=2, dp=2), OURS, UNTIED),
    "FSDP2 of PyTorch": (
        GridShape(dp=4),
        ParallelConfig(data_parallel="ddp", zero_stage=3),
        UNTIED,
    ),
}
GENERATOR = GridShape(tp=2, dp=2)


def weights(config, seed):
    return initialize(GPT(config), seed).double()


def built(shapes, config, parallel):
    """(number of this rank's fleet, its model); each fleet has drawn other weights."""
    number, grid = Grid.fleets(*shapes)
    own = parallel if number == 0 else OURS
    return number, parallelize(weights(config, seed=number), grid, own)


def off_from_slices(model, whole):
    """Names of the parts that are not, bit for bit, the slices of whole weights."""
    wrong = []
    for name, weight in model.weights.items():
        expected = model.shardings[name].own(whole[name], model.grid)
        if not torch.equal(weight.detach(), expected.to(weight.dtype)):
            wrong.append(name)
    return wrong


def exchanged(rank, shapes, config, parallel, dtype):
    """What is wrong on the generator after each way, and (predicted, counted) bytes of each."""
    number, model = built(shapes, config, parallel)
    is_source = number == 0
    world = dist.group.WORLD
    layouts = reshard.layouts_of_fleets(reshard.boxes_of_model(model), is_source, world)
    moves = reshard.plan(*layouts)
    with counted() as calls:
        version = reshard.exchange(moves, reshard.parts_of(model), 7 * is_source, world, dtype)
    sent = totals(calls).get("send", (0, 0))[1]
    received = totals(calls).get("recv", (0, 0))[1]
    measured = (sent, received)
    size = dtype.itemsize
    predicted = (reshard.send_bytes(moves, rank, size), reshard.recv_bytes(moves, rank, size))

    learned = {name: weight.to(dtype) for name, weight in weights(config, 0).state_dict().items()}
    wrong = [] if is_source else off_from_slices(model, learned)

    # the usual way, from the start
    number, model = built(shapes, config, parallel)
    first_of_others = shapes[0].world_size
    group = group_of([0, *range(first_of_others, dist.get_world_size())])
    with counted() as calls:
        reshard.gather_and_broadcast(model, is_source, group, dtype)
    wrong += [] if is_source else off_from_slices(model, learned)
    broadcast = totals(calls).get("broadcast", (0, 0))[1]
    return version, wrong, predicted, measured, broadcast


@pytest.mark.parametrize(("shape", "parallel", "config"), LEARNERS.values(), ids=LEARNERS)
def test_the_generator_gets_the_slices_of_the_whole_weights(ranks8, shape, parallel, config):
    found = ranks8.run(exchanged, (shape, GENERATOR), config, parallel, torch.float64)
    num_bytes = sum(weight.numel() * 8 for weight in GPT(config).parameters())
    for rank, (version, wrong, predicted, measured, broadcast) in enumerate(found):
        assert version == 7
        assert wrong == []
        assert measured == predicted
        if rank >= shape.world_size:
            # its part of each weight, where the usual way sends all of them
            assert broadcast == num_bytes
            assert measured[1] < 0.7 * broadcast


def test_weights_travel_in_the_dtype_of_the_generator(ranks4):
    shapes = (GridShape(dp=2), GridShape(tp=2))
    for _, wrong, predicted, measured, _ in ranks4.run(
        exchanged, shapes, TIED, FSDP, torch.bfloat16
    ):
        assert wrong == []
        assert measured == predicted


def torn(rank):
    """The learner's ranks have made different numbers of steps."""
    number, model = built((GridShape(dp=2), GridShape(tp=2)), TIED, FSDP)
    layouts = reshard.layouts_of_fleets(
        reshard.boxes_of_model(model), number == 0, dist.group.WORLD
    )
    moves = reshard.plan(*layouts)
    parts = reshard.parts_of(model)
    try:
        reshard.exchange(moves, parts, rank, dist.group.WORLD, torch.float64)
    except ValueError as error:
        return str(error)
    return None


def test_weights_of_different_versions_are_refused(ranks4):
    found = ranks4.run(torn)
    assert found[:2] == [None, None]
    for error in found[2:]:
        assert "of different versions, rank 0 version 0, rank 1 version 1" in error
