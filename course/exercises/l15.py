"""Checks of lesson 15, hybrid training."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from course.answer import Exercise, Hint, due
from course.exercises.contract import (
    Contract,
    Mistake,
    Seen,
    differs,
    elsewhere,
    no_number,
    not_things,
    tell,
)
from course.exercises.expect import refuse
from course.exercises.solution import Solution
from course.labs.l15_hybrid import FIELDS, RECIPE, RECORDED, SHORT, SIZE, Submitted, job
from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link
from labcode.perf.step import ClusterModel, DataParallel, iteration_parts
from labcode.runtime import combinations
from labcode.runtime.units import type_in_words
from labcode.slurm.script.job import Job
from labcode.topology import GridShape

# ---- 15.1

SAMPLES_LEFT = "if left_over or local_batch % micro_batch:"
OF_RANKS = 'f"{world} ranks are not a multiple of tp*pp = {tp * pp}"'
OF_SAMPLES = 'f"{global_batch} samples do not divide by dp={dp} and micro={micro_batch}"'
ALIKE = Mistake(
    "the error about the ranks has the same text as one about the samples: let each say what does "
    "not fit",
    (f'{OF_RANKS} => "no such layout"', f'{OF_SAMPLES} => "no such layout"'),
    when=elsewhere,
)


def _named(name: str, *cases: tuple) -> dict[str, tuple]:
    """Cases by a text with their arguments in it."""
    return {name.format(*case): case for case in cases}


def _not_whole(see: Seen) -> bool:
    return not all(isinstance(value, int) for value in due(*see.found))


LAYOUT = Contract(
    Solution("15", "layout"),
    cases={  # world, tp, pp, global batch, micro-batch
        **_named(
            "world {}, tp {}, pp {}, global batch {}, micro-batch {}: ",
            (4, 2, 2, 16, 2),
            (64, 8, 4, 512, 4),
            (16, 1, 1, 32, 1),
            (384, 8, 12, 1536, 1),
        ),
        "6 ranks over tp*pp = 4: ": (6, 2, 2, 16, 2),
        "511 samples over dp = 2: ": (64, 8, 4, 511, 1),
        "16 samples over micro*dp = 6: ": (64, 8, 4, 16, 3),
        # both divide 12, and their product does not
        "12 samples over micro*dp = 8: ": (4, 1, 1, 12, 2),
    },
    shape=[
        Mistake(
            "{found}: give (dp, local batch, micro-batches)",
            "return dp, local_batch, local_batch // micro_batch => return dp",
            when=not_things(3),
        )
    ],
    mistakes=[
        Mistake(
            "{found}: give whole numbers, // makes them",
            "local_batch // => local_batch /",
            when=_not_whole,
        ),
        Mistake(
            "dp = {found[0]}, but {found[0]}*{tp}*{pp} ranks are not {world}",
            "divmod(world, tp * pp) => world, 0",
            "divmod(world, tp * pp) => divmod(world, tp)",
            when=differs(0),
        ),
        Mistake(
            "local batch {found[1]}: dp = {found[0]}, and that many copies of tp*pp ranks share "
            "the {global_batch} samples",
            "divmod(global_batch, dp) => global_batch, 0",
            "divmod(global_batch, dp) => divmod(global_batch, world)",
            when=differs(1),
        ),
        Mistake(
            "{found[2]} micro-batches of {micro_batch} are not the {found[1]} samples of a copy",
            "local_batch // micro_batch => global_batch // micro_batch",
            when=differs(2),
        ),
        Mistake(
            "6 ranks over tp*pp = 4: your function gives",
            ("if left_over: => if False:", f"{SAMPLES_LEFT} => if False:"),
            when=elsewhere,
        ),
        Mistake("511 samples over dp = 2", f"{SAMPLES_LEFT} => if False:", when=elsewhere),
        Mistake("16 samples over mic", f"{SAMPLES_LEFT} => if left_over:", when=elsewhere),
        Mistake("gives (4, 3, 1)", "local_batch % => global_batch %", when=elsewhere),
        Mistake("the ValueError has no text", f"{OF_RANKS} => ", when=elsewhere),
        Mistake(
            "raises AssertionError: raise a ValueError",
            f"if left_over:\n        raise ValueError({OF_RANKS}) => assert not left_over",
            when=elsewhere,
        ),
        ALIKE,
    ],
    refuses="a division leaves a remainder",
)


def layout(my_layout: Callable[..., Any]) -> None:
    """The learner's arithmetic of a world size, and what it refuses.

    Args:
        my_layout: `my_layout(world, tp, pp, global_batch, micro_batch)`
            -> (dp, local batch, micro-batches).
    """
    seen = LAYOUT.judge(my_layout)
    refused = [see.found for see in seen if isinstance(see.found, Exception)]
    of_ranks, *of_samples = [re.sub(r"[\d.]+", "", str(error).strip()) for error in refused]
    refuse({ALIKE.hint: of_ranks in of_samples})


# ---- 15.2

MODEL = GPTConfig(
    vocab_size=64,
    context_length=32,
    num_layers=2,
    num_heads=4,
    hidden_size=64,
    positions="rotary",
    tie_embeddings=False,
)
CLUSTER = ClusterModel(0.075e9, inside=Link(2e-4, 4.5e6), between=Link(1e-3, 0.5e6))
DEEP = replace(MODEL, num_layers=8, num_heads=8)
WIDE_NODES = replace(CLUSTER, ranks_per_node=4)
OTHER_SIZES = replace(MODEL, context_length=48, hidden_size=32, num_layers=4)

ITERATIONS = (  # model, shape, global batch, micro-batch, cluster
    (MODEL, GridShape(), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=2), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=4), 8, 2, CLUSTER),
    # 3 samples and 2 bytes in place of 4 are different mistakes; of 2 samples they were the same
    (MODEL, GridShape(pp=2), 12, 3, CLUSTER),
    # act cut by tp and act in 2 bytes are different mistakes; without a pipeline they were the same
    (MODEL, GridShape(tp=2, pp=2), 12, 3, CLUSTER),
    (MODEL, GridShape(tp=2), 8, 1, CLUSTER),
    (MODEL, GridShape(tp=2, pp=2), 8, 2, CLUSTER),
    (MODEL, GridShape(tp=2, pp=2, order="pp-dp-cp-tp"), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=2, pp=2), 8, 2, CLUSTER),
    (OTHER_SIZES, GridShape(tp=2, pp=2), 8, 2, CLUSTER),
    (OTHER_SIZES, GridShape(dp=4, pp=2, tp=2), 48, 3, CLUSTER),
    (DEEP, GridShape(dp=2, pp=4, tp=4), 32, 4, WIDE_NODES),
    # two stages on each node; two ranks of tp on each node
    (DEEP, GridShape(pp=4), 12, 3, CLUSTER),
    (DEEP, GridShape(tp=4), 12, 3, CLUSTER),
)


def _named_iterations() -> dict[str, tuple]:
    found = {}
    for case in ITERATIONS:
        model, shape, global_batch, micro_batch, _ = case
        order = "" if shape.order == GridShape().order else f", order {shape.order}"
        text = (
            f"dp {shape.dp}, pp {shape.pp}, tp {shape.tp}{order}, {model.num_layers} layers, "
            f"global batch {global_batch}, micro-batch {micro_batch}: "
        )
        found[text] = case
    return found


POINTS = {
    "compute": "1 compute",
    "tp": "2 tp",
    "pp": "3 pp",
    "bubble": "4 turns in which a stage waits",
    "dp": "5 dp",
}


def _points(see: Any) -> None:
    """The parts of the time that the lesson's five points give."""
    parts = iteration_parts(see.model, see.shape, see.global_batch, see.micro_batch, see.cluster)
    shown = [f"{POINTS[name]} {part:.3f}" for name, part in parts.items() if part]
    see.points = ", ".join(shown)


TURNS = "(m + shape.pp - 1)"
TURN = "(compute_s + tp_s + pp_s)"
TOTAL = f"{TURNS} * {TURN} + dp_s"
ALL_REDUCES = "(4 * model.num_layers + 2) / shape.pp"
LINK_TP = 'cluster.link(shape.groups("tp")[0])'
LINK_PP = 'cluster.message_link(shape.groups("pp")[0])'
LINK_DP = 'cluster.link(shape.groups("dp")[0])'
PARTS = "step.iteration_parts(model, shape, global_batch, micro_batch, cluster)"

ITERATION = Contract(
    Solution("15", "iteration_s"),
    cases=_named_iterations(),
    shape=[
        Mistake(
            "give one number, the seconds of an iteration",
            f"{TOTAL} => {TURN}, dp_s",
            when=no_number,
        )
    ],
    mistakes=[
        Mistake(
            "point 1, compute: a micro-batch has more samples than one",
            "_sample(model) * micro_batch => _sample(model)",
        ),
        Mistake(
            "point 1, compute: the tp * pp ranks of a copy share it", "flops / model_ranks => flops"
        ),
        Mistake(
            "point 2, tp: a stage has only its share of the all-reduces",
            f"{ALL_REDUCES} => 4 * model.num_layers + 2",
        ),
        Mistake(
            "point 2, tp: the whole of act is all-reduced, it is not cut by tp",
            '"all_reduce", shape.tp, act, => "all_reduce", shape.tp, act / shape.tp,',
        ),
        Mistake(
            "point 2, tp: (4 L + 2)/pp need not be a whole number: is there a `//`?",
            "2) / shape.pp => 2) // shape.pp",
        ),
        Mistake(
            "point 2, tp: the embedding and the head have all-reduces too",
            "4 * model.num_layers + 2 => 4 * model.num_layers",
        ),
        Mistake(
            "point 2, tp: one all-reduce more on each stage is right for pp = 2; how many are "
            "there in the whole model, whatever pp is?",
            f"{ALL_REDUCES} => 4 * model.num_layers / shape.pp + 1",
            f"{ALL_REDUCES} => 4 * model.num_layers / shape.pp + 1 + (shape.pp == 1)",
        ),
        Mistake("point 2, tp: the all-reduces are missing", f"{TURN} => (compute_s + pp_s)"),
        Mistake(
            "point 2, tp: a collective uses all adapters of its group, and not one link alone",
            f"{LINK_TP} => cluster.message_link(shape.groups('tp')[0])",
        ),
        Mistake("point 2, tp: not every tp group sits on one node", f"{LINK_TP} => cluster.inside"),
        Mistake("point 2, tp: some tp groups sit on one node", f"{LINK_TP} => cluster.between"),
        Mistake(
            "point 3, pp: a turn does not get longer by the message; nothing overlaps here",
            f"{TURN} => (compute_s + tp_s)",
            f"{TURN} => max(compute_s + tp_s, pp_s)",
        ),
        Mistake("point 3, pp: with pp = 1 there is no message", "if shape.pp > 1 => if True"),
        Mistake(
            "point 3, pp: each micro-batch is charged one message",
            "pp_s = alpha_beta => pp_s = 2 * alpha_beta",
        ),
        Mistake(
            "point 3, pp: a message goes from one rank to one other, over one link",
            f"{LINK_PP} => cluster.link(shape.groups('pp')[0])",
        ),
        Mistake("point 3, pp: not every pipeline sits on one node", f"{LINK_PP} => cluster.inside"),
        Mistake("point 3, pp: some pipelines sit on one node", f"{LINK_PP} => cluster.between"),
        Mistake(
            "points 2 and 3: act counts numbers here, and time_s takes bytes",
            "hidden_size * 4 => hidden_size",
        ),
        Mistake(
            "points 2 and 3: a number of act takes 2 bytes here: how many has a float32?",
            "hidden_size * 4 => hidden_size * 2",
        ),
        Mistake(
            "points 2 and 3: act depends on the model's tokens and hidden size",
            "model.context_length * model.hidden_size => 32 * 64",
        ),
        Mistake(
            "points 2 and 3: act has all samples of a micro-batch", "act = micro_batch * => act ="
        ),
        Mistake(
            "point 4, turns: in your function no stage waits; it waits for pp - 1 turns",
            f"{TURNS} => m",
        ),
        Mistake(
            "point 4, turns: one too many, a stage waits for pp - 1", f"{TURNS} => (m + shape.pp)"
        ),
        Mistake(
            "point 4, turns: m counts the micro-batches of one copy, and there are dp copies",
            "(micro_batch * shape.dp) => micro_batch",
        ),
        Mistake("point 5, dp: the gradients are missing", f"{TURN} + dp_s => {TURN}"),
        Mistake(
            "point 5, dp: gradients are averaged once a step, not in each turn",
            f"{TURN} + dp_s => (compute_s + tp_s + pp_s + dp_s)",
            "+ dp_s => + m * dp_s",
        ),
        Mistake(
            "point 5, dp: a rank holds only its part of the parameters",
            "num_parameters / model_ranks => num_parameters",
        ),
        Mistake(
            "point 5, dp: each gradient has 4 bytes, not 2",
            "4 * model.num_parameters => 2 * model.num_parameters",
        ),
        Mistake(
            "point 5, dp: the gradients are counted as numbers, and time_s takes bytes",
            "4 * model.num_parameters => model.num_parameters",
        ),
        Mistake(
            "point 5, dp: a collective uses all adapters of its group, and not one link alone",
            f"{LINK_DP} => cluster.message_link(shape.groups('dp')[0])",
        ),
        Mistake("point 5, dp: not every dp group sits on one node", f"{LINK_DP} => cluster.inside"),
        Mistake("point 5, dp: some dp groups sit on one node", f"{LINK_DP} => cluster.between"),
        Mistake("the unit is off: give seconds", f"{TOTAL} => 1000 * ({TOTAL})"),
        Mistake("write yours", f"{TOTAL} => sum({PARTS}.values())", when=elsewhere),
        Mistake(
            "the points that count here give 1 compute",
            ("if shape.pp > 1 => if True", f"{TURNS} => (m + shape.pp)"),
            when=elsewhere,
        ),
    ],
    otherwise="your function gives {found:.3f} s; over the whole step the points that count here "
    "give {points} s",
    look=_points,
    ready=(iteration_parts,),
    tolerance=1e-6,
)


# ---- 15.3

Choice = tuple[GPTConfig, int, int, int, ClusterModel, float]
_NODES_OF_FOUR = replace(CLUSTER, ranks_per_node=4)
_NODES_OF_EIGHT = replace(CLUSTER, ranks_per_node=8)
_ODD = replace(DEEP, num_layers=3)  # which no pipeline of 2, 4 or 8 stages divides
_ONE_HEAD = replace(DEEP, num_heads=1)  # without the rule of the heads, tp would be fastest
CHOICES: dict[str, Choice] = {  # model, world, global batch, micro-batch, cluster, room_bytes
    "a small batch": (MODEL, 4, 8, 2, CLUSTER, 1e12),
    "a large batch": (MODEL, 4, 256, 2, CLUSTER, 1e12),
    "little room": (MODEL, 4, 256, 2, CLUSTER, 16 * MODEL.num_parameters / 3.9),
    "8 layers on 8 ranks": (DEEP, 8, 64, 1, _NODES_OF_FOUR, 16 * DEEP.num_parameters / 2),
    "16 ranks": (DEEP, 16, 32, 1, _NODES_OF_FOUR, 1e12),
    "16 ranks and a large batch": (MODEL, 16, 1024, 1, _NODES_OF_FOUR, 1e12),
    "room for an eighth": (DEEP, 8, 64, 1, CLUSTER, 16 * DEEP.num_parameters / 7.9),
    "3 layers on nodes of 8": (_ODD, 8, 64, 1, _NODES_OF_EIGHT, 16 * _ODD.num_parameters / 7.9),
    "a batch that few copies divide": (DEEP, 8, 10, 5, _NODES_OF_FOUR, 1e12),
    "12 samples in micro-batches of 4": (DEEP, 8, 12, 4, CLUSTER, 1e12),
    "10 samples in micro-batches of 2": (MODEL, 8, 10, 2, CLUSTER, 1e12),
    "a model with one head": (_ONE_HEAD, 8, 8, 2, _NODES_OF_FOUR, 1e12),
}


def _finds_none(see: Seen) -> bool:
    return see.found is None and not see.is_first


def _no_shape(see: Seen) -> bool:
    return not isinstance(due(see.found[0]), GridShape)


def _other_word(see: Seen) -> bool:
    return due(see.found[1]) not in ("overlapped", "sharded")


def _about_layout(see: Any) -> None:
    """What a rank of a layout needs, and the time of an iteration, its own and the best one's."""
    see.grid, see.how = see.found
    see.case += f"{_layout_text(*see.found)}: "
    heads = see.model.num_heads
    see.heads = "1 head" if heads == 1 else f"{heads} heads"
    parts = see.grid.tp * (see.grid.dp if see.how == "sharded" else see.grid.pp)
    see.needed_mb = 16 * see.model.num_parameters / parts / 1e6
    see.room_mb = see.room_bytes / 1e6
    see.best = _layout_text(*see.truth)


def _layout_text(shape: GridShape, how: str) -> str:
    return f"dp {shape.dp}, pp {shape.pp}, tp {shape.tp}, {how}"


def _is_slow(see: Any) -> bool:
    see.own_ms = _milliseconds(see, *see.found)
    see.best_ms = _milliseconds(see, *see.truth)
    return see.own_ms > see.best_ms * (1 + 1e-9)


def _milliseconds(see: Seen, shape: GridShape, how: DataParallel) -> float:
    parts = iteration_parts(see.model, shape, see.global_batch, see.micro_batch, see.cluster, how)
    return 1e3 * sum(parts.values())


RETURN = "return best => return"
OF_BATCH = "global_batch % (dp * micro_batch)"
OF_ROOM = "16 * model.num_parameters / parts_of_model > room_bytes"

BEST = Contract(
    Solution("15", "best_layout"),
    cases={f"{about}: ": choice for about, choice in CHOICES.items()},
    shape=[
        Mistake(
            "your function finds no layout that keeps the rules, and there is one: which rule is "
            "too strict, or which size is never tried?",
            "parameters / parts_of_model => parameters",
            "16 * model => 18 * model",
            when=_finds_none,
        ),
        Mistake(
            '{found!s:.40}: return two things, (GridShape, "overlapped")',
            f"{RETURN} best[0]",
            when=not_things(2),
        ),
        Mistake(
            "{found[0]!s:.40} is no GridShape", f"{RETURN} best[0].dp, best[1]", when=_no_shape
        ),
        Mistake(
            '{found[1]!r:.40} is neither "overlapped" nor "sharded"',
            f'{RETURN} best[0], "fsdp"',
            when=_other_word,
        ),
    ],
    look=_about_layout,
    mistakes=[
        Mistake("cp is not asked for", when=lambda see: see.grid.cp > 1),
        Mistake(
            "it has {grid.world_size} ranks, and there are {world}",
            f'{RETURN} GridShape(tp=2), "overlapped"',
            when=lambda see: see.grid.world_size != see.world,
        ),
        Mistake(
            "tp = {grid.tp} does not divide {heads}",
            "or model.num_heads % tp or => or",
            when=lambda see: see.model.num_heads % see.grid.tp,
        ),
        Mistake(
            "pp = {grid.pp} does not divide {model.num_layers} layers",
            "or model.num_layers % pp => ",
            when=lambda see: see.model.num_layers % see.grid.pp,
        ),
        Mistake(
            "{global_batch} samples cannot be cut over dp = {grid.dp} into micro-batches of "
            "{micro_batch}",
            f"{OF_BATCH} => False",
            f"{OF_BATCH} => global_batch % dp",
            f"{OF_BATCH} => global_batch // dp % micro_batch",
            when=lambda see: see.global_batch % (see.grid.dp * see.micro_batch),
        ),
        Mistake(
            "sharded means pp = 1 here",
            when=lambda see: see.how == "sharded" and see.grid.pp > 1,
        ),
        Mistake(
            "a rank needs {needed_mb:.2f} MB and has {room_mb:.2f} MB",
            f'{RETURN} GridShape(dp=world), "overlapped"',
            f"{OF_ROOM} => False",
            "tp * (dp if how == => tp * dp * pp if True else (dp if how ==",
            when=lambda see: see.needed_mb > see.room_mb,
        ),
        Mistake(
            "its order is {grid.order}, not the default",
            when=lambda see: _is_slow(see) and see.grid.order != GridShape().order,
        ),
        Mistake(
            "an iteration takes {own_ms:.0f} ms, and one of {best}, which fits, {best_ms:.0f} ms",
            ('float("inf") => 0.0', "< best_s => > best_s"),
            f'{RETURN} GridShape(dp=world), "sharded"',
            'in ("overlapped", "sharded") => in ("overlapped",)',
            "micro_batch, cluster, how => micro_batch, cluster",
            ", 8, 16, 32, 64) => )",
            when=_is_slow,
        ),
    ],
    otherwise="",  # of equally fast ones each is right
    loops=True,
)


# ---- 15.4

_FIRST = re.compile(
    r"^(?P<world>\d+) ranks? on (?:1 node|\d+ nodes \((?P<nodes>.*?)\)), .*; "
    r"grid dp (?P<dp>\d+) x pp (?P<pp>\d+) x cp \d+ x tp (?P<tp>\d+); "
    r"(?P<samples>\d+) samples a step = "
    r"dp \d+ x (?P<count>\d+) micro-batches of (?P<micro>\d+)",
    re.MULTILINE,
)
_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+)")


NODES = 2
RANKS_PER_NODE = 2
WORLD = NODES * RANKS_PER_NODE
MOST_BUBBLE = 1 / 8  # of the work
ANY_FORM = [
    Mistake("the form has no {missing}", '"parallel.pp": 2, => ', when=attrgetter("missing")),
    Mistake(
        "the script has no blank for {unknown}",
        '"parallel.pp": 2, => "parallel.pp": 2, "parallel.dp": 2,',
        when=attrgetter("unknown"),
    ),
    Mistake("all six are whole numbers", 'pp": 2 => pp": "2"', when=elsewhere),
]
ANY_NUMBERS = [
    Mistake(
        f"{{per_node}} ranks per node: a node has {RANKS_PER_NODE} GPUs, one for each rank",
        ('"nodes": 2 => "nodes": 1', 'per_node": 2 => per_node": 4'),
        when=lambda see: see.per_node > RANKS_PER_NODE,
    ),
    Mistake(
        f"{{nodes}} nodes: there are {NODES}, and the job would wait forever",
        ('"nodes": 2 => "nodes": 4', 'per_node": 2 => per_node": 1'),
        when=lambda see: see.nodes > NODES,
    ),
    Mistake(
        f"nodes x ranks_per_node = {{nodes}} x {{per_node}} leave GPUs idle: there are {WORLD}",
        '"nodes": 2 => "nodes": 1',
        when=lambda see: see.nodes * see.per_node != WORLD,
    ),
    Mistake(
        "global batch {samples}: the learning rate of the recipe was chosen for "
        f"{RECIPE.train.global_batch}",
        'global_batch": 16 => global_batch": 32',
        'global_batch": 16 => global_batch": 2',
        when=lambda see: see.samples != RECIPE.train.global_batch,
    ),
    Mistake("parallel.pp=0: give a number", 'pp": 2 => pp": 0', when=elsewhere),
]
BUBBLE = (
    "a copy has {count} micro-batches in a step: the bubble is {idle}/{count} of the work, and 1/8 "
    "is allowed"
)
NUMBERS = [
    Mistake(
        "tp={grid.tp} cuts through the layers, and the cut is to go between them",
        'tp": 1 => tp": 2',
        when=lambda see: see.grid.tp != 1,
    ),
    Mistake(
        "each rank holds the whole model, and there is room for half of it",
        'pp": 2 => pp": 1',
        when=lambda see: see.grid.pp == 1,
    ),
    Mistake(
        BUBBLE,
        'micro_batch": 1 => micro_batch": 2',
        when=lambda see: see.bubble > MOST_BUBBLE,
    ),
    Mistake("each stage needs a layer", 'pp": 2 => pp": 4', when=elsewhere),
    Mistake("is not a multiple", 'micro_batch": 1 => micro_batch": 3', when=elsewhere),
    Mistake("train.micro_batch=-2", 'micro_batch": 1 => micro_batch": -2', when=elsewhere),
]
HYBRID_NUMBERS = [
    Mistake(
        "tp={grid.tp} x pp={grid.pp}: a rank holds 1/{parts} of the model, and there is room for a "
        "quarter",
        ('tp": 2 => tp": 1', 'micro_batch": 2 => micro_batch": 1'),
        ('tp": 2 => tp": 1', 'pp": 2 => pp": 1'),
        when=lambda see: see.parts < WORLD,
    ),
    Mistake(
        "pp={grid.pp}: two stages of layers are asked for",
        ('tp": 2 => tp": 4', 'pp": 2 => pp": 1'),
        when=lambda see: see.grid.pp != NODES,
    ),
    Mistake(
        f"tp={{grid.tp}}: each layer is to be shared by the {RANKS_PER_NODE} ranks of a node",
        when=lambda see: see.grid.tp != RANKS_PER_NODE,
    ),
    Mistake(
        "m = 1: there is one micro-batch in a step, so while a stage works the other one waits, "
        "half of the time",
        'micro_batch": 2 => micro_batch": 16',
        when=lambda see: see.count == 1,
    ),
    Mistake(
        BUBBLE,
        'micro_batch": 2 => micro_batch": 4',
        when=lambda see: see.bubble > MOST_BUBBLE,
    ),
    Mistake(
        "with micro-batches of {micro} the bubble is {idle}/{count} of the work. Larger ones are "
        "allowed, and make fewer messages",
        'micro_batch": 2 => micro_batch": 1',
        when=lambda see: see.bubble <= MOST_BUBBLE / 2,
    ),
    Mistake("each stage needs a layer", ('tp": 2 => tp": 1', 'pp": 2 => pp": 4'), when=elsewhere),
]


def form(form: Any) -> None:
    """The learner's numbers for gpt_tiny on a small cluster, cut between the layers.

    Args:
        form: {"nodes": .., "ranks_per_node": .., "parallel.tp": .., ...}.
    """
    tell(NUMBERS, _filled_in(form, "my_form"))


def hybrid_form(form: Any) -> None:
    """The learner's numbers for a model that is cut between its layers and through them."""
    tell(HYBRID_NUMBERS, _filled_in(form, "my_hybrid"))


def _filled_in(form: Any, name: str) -> Seen:
    """The numbers of a form and what follows from them; all GPUs are used, by the right batch."""
    refuse({f"{name} is None: give it the dict with your six numbers": form is None})
    if not isinstance(due(form), Mapping):
        raise Hint(f"{name} is {type_in_words(form)}, not a dict")
    missing = [name for name in SIZE + FIELDS if name not in form]
    unknown = [str(name) for name in form if name not in SIZE + FIELDS]
    tell(ANY_FORM, Seen(missing=", ".join(missing), unknown=", ".join(unknown)))
    values = [form[name] for name in SIZE + FIELDS]
    if any(value is ... for value in values):
        raise NotImplementedError("exercise")
    if not all(isinstance(value, int) for value in values):
        raise Hint("all six are whole numbers")
    nodes, per_node, _, _, micro, samples = values
    see: Any = Seen(nodes=nodes, per_node=per_node, micro=micro, samples=samples)
    tell(ANY_NUMBERS, see)
    try:
        changes = {name: form[name] for name in FIELDS}
        see.grid = combinations.check(recipes.with_changes(RECIPE, changes), WORLD)
    except ValueError as error:
        raise Hint(str(error)) from None
    see.parts = see.grid.tp * see.grid.pp
    see.count = samples // (micro * see.grid.dp)
    see.idle = see.grid.pp - 1
    see.bubble = see.idle / see.count
    return see


def script(
    blanks: Mapping[str, Any],
    run: Callable[[Job], Submitted],
    reference: Sequence[Mapping[str, float]],
) -> None:
    """The learner's form for 15.4, submitted: what its log says.

    Args:
        blanks: The form.
        run: `Submit`, or another function that runs a job to its end.
        reference: Rows of metrics of the same training on another grid.
    """
    form(blanks)
    _check_run(run(job(blanks)), blanks, reference)


def hybrid(
    blanks: Mapping[str, Any],
    run: Callable[[Job], Submitted],
    reference: Sequence[Mapping[str, float]],
) -> None:
    """Check exercise 15.5 in the same way; some steps of the job are recorded."""
    hybrid_form(blanks)
    _check_run(run(job({**blanks, **RECORDED})), blanks, reference)


def _check_run(
    done: Submitted, blanks: Mapping[str, Any], reference: Sequence[Mapping[str, float]]
) -> None:
    failed = f"the job ended as {done.outcome}: read {done.out}.log"
    refuse({failed: not done.outcome.ok})
    _check_form_line(done, blanks)
    _check_final_loss(done, reference)


def _check_form_line(done: Submitted, blanks: Mapping[str, Any]) -> None:
    """The first line of the log has the numbers of the form."""
    first = _FIRST.search(done.log)
    if first is None:
        raise Hint(
            f'{done.out}.log has no line "... ranks on ...; grid ...": no rank came as far as its '
            "first step"
        )
    world = blanks["nodes"] * blanks["ranks_per_node"]
    grid = (int(first["pp"]), int(first["tp"]))
    batches = (int(first["samples"]), int(first["micro"]))
    mistakes = {
        f"the log says {first['world']} ranks, the form {world}: these are several jobs, not one": (
            int(first["world"]) != world
        ),
        f"the ranks sit on {first['nodes'] or 'one node'}: they do not fill one node after the "
        "other": done.on_slurm and first["nodes"] != "n1: 0, 1; n2: 2, 3",
        f"the log says pp {first['pp']} x tp {first['tp']}, and the form does not": (
            grid != (blanks["parallel.pp"], blanks["parallel.tp"])
        ),
        f"the log says {first['samples']} samples a step in micro-batches of {first['micro']} "
        f"(dp {first['dp']} x {first['count']}), and the form does not": (
            batches != (blanks["train.global_batch"], blanks["train.micro_batch"])
        ),
    }
    refuse(mistakes)


def _check_final_loss(done: Submitted, reference: Sequence[Mapping[str, float]]) -> None:
    """The log comes to the last step, whose loss is that of another grid."""
    losses = {int(step): float(loss) for step, loss in _STEP.findall(done.log)}
    last_step = max(losses, default=0)
    steps = SHORT["train.steps"]
    refuse({f"the log ends at step {last_step} of {steps}": last_step != steps})
    loss = losses[last_step]
    right = [row["loss"] for row in reference if "loss" in row][-1]
    other = f"the last loss is {loss}, on another grid {right:.4f}: these trained something else"
    refuse({other: abs(loss - right) >= 1e-3})


EXERCISES = {
    "15.1": Exercise(
        check=layout,
        mistakes=LAYOUT.rows,
        praise="and what does not fit is refused before anything starts",
        hints=(
            "How many ranks hold one copy of the model?",
            "Which of the two batches is cut into micro-batches, the global or the local one?",
            "`divmod(a, b)` gives the quotient and the remainder at once.",
        ),
    ),
    "15.2": Exercise(
        check=ITERATION,
        mistakes=ITERATION.rows,
        praise="the parts, the turns, and the gradients once in a step",
        hints=(
            "Write one line for each of: m, act, compute, tp, pp, dp. Put them together last.",
            "Which of them happen once in each turn, and which once in a step?",
            "Which of them get smaller when the model is cut over more ranks?",
        ),
    ),
    "15.3": Exercise(
        check=BEST,
        mistakes=BEST.rows,
        praise="the fastest layout that fits, in each of the cases",
        hints=(
            "Two loops, over tp and over pp; dp is what is left. Skip what breaks a rule.",
            "Each shape can be data parallel in two ways, which need different room.",
            "Remember the best so far and its time.",
        ),
    ),
    "15.4": Exercise(
        check=script,
        mistakes=ANY_FORM + ANY_NUMBERS + NUMBERS,
        praise="two copies on two nodes, and the loss of plain dp",
        hints=(
            "First the nodes and the ranks on each; then tp and pp from the room of a rank.",
            "How many copies of the model are there, and how many samples of a step has each?",
        ),
    ),
    "15.5": Exercise(
        check=hybrid,
        mistakes=ANY_FORM + ANY_NUMBERS + HYBRID_NUMBERS,
        praise="one copy in four parts, and the loss of plain dp",
        hints=(
            "Into how many parts does tp cut the model, and into how many pp? The product is the "
            "number of parts.",
            "There is one copy, so it gets all 16 samples. How many micro-batches keep the bubble "
            "at 1/8 of the work?",
        ),
    ),
}
