"""Checks of lesson 15, hybrid training."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labcode import combinations, recipes
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link, time_s
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.step import ClusterModel, DataParallel, iteration_parts
from labcode.slurm.script.job import Job
from labcode.teach.check import Exercise, Hint, due, is_stub
from labcode.teach.exercises.expect import diagnose, refuse
from labcode.teach.exercises.in_notebook import LOOP, bounded, without
from labcode.teach.labs.l15_hybrid import (
    FIELDS,
    RECIPE,
    RECORDED,
    SHORT,
    SIZE,
    Submitted,
    job,
)
from labcode.topology import GridShape

# ---- 15.1

Numbers = tuple[int, int, int, int, int]  # world, tp, pp, global batch, micro-batch
FITS = (
    (4, 2, 2, 16, 2),
    (64, 8, 4, 512, 4),
    (16, 1, 1, 32, 1),
    (384, 8, 12, 1536, 1),
)
REFUSED = {
    (6, 2, 2, 16, 2): "6 ranks over tp*pp = 4",
    (64, 8, 4, 511, 1): "511 samples over dp = 2",
    (64, 8, 4, 16, 3): "16 samples over micro*dp = 6",
    (4, 1, 1, 12, 2): "12 samples over micro*dp = 8",  # both divide 12, and their product does not
}


def layout(my_layout: Callable[..., Any]) -> None:
    """The learner's arithmetic of a world size, and what it refuses.

    Args:
        my_layout: `my_layout(world, tp, pp, global_batch, micro_batch)`
            -> (dp, local batch, micro-batches).
    """
    for numbers in FITS:
        _is_layout(numbers, due(my_layout(*numbers)))
    of_ranks, *of_samples = [_refusal(my_layout, *refused) for refused in REFUSED.items()]
    alike = (
        "the error about the ranks has the same text as one about the samples: let each say what "
        "does not fit"
    )
    refuse({alike: of_ranks in of_samples})


def _is_layout(numbers: Numbers, found: Any) -> None:
    world, tp, pp, global_batch, micro = numbers
    case = f"world {world}, tp {tp}, pp {pp}, global batch {global_batch}, micro-batch {micro}: "
    if not isinstance(found, (tuple, list)) or len(found) != 3:
        raise Hint(f"{case}{found}: give (dp, local batch, micro-batches)")
    dp, local, count = due(*found)
    right_dp = world // (tp * pp)
    right_local = global_batch // right_dp
    mistakes = {
        f"{found}: give whole numbers, // makes them": (
            not all(isinstance(value, int) for value in found)
        ),
        f"dp = {dp}, but {dp}*{tp}*{pp} ranks are not {world}": dp != right_dp,
        f"local batch {local}: dp = {dp}, and that many copies of tp*pp ranks share the "
        f"{global_batch} samples": local != right_local,
        f"{count} micro-batches of {micro} are not the {local} samples of a copy": (
            count != right_local // micro
        ),
    }
    refuse(mistakes, case)


def _refusal(my_layout: Callable[..., Any], numbers: Numbers, what: str) -> str:
    """The text of the error, without the numbers in it."""
    try:
        found = my_layout(*numbers)
    except ValueError as error:
        text = str(error).strip()
        refuse({"the ValueError has no text: say in it what does not fit": not text}, f"{what}: ")
        return re.sub(r"[\d.]+", "", text)
    except Exception as error:
        if is_stub(error):
            raise
        name = type(error).__name__
        raise Hint(f"{what}: your function raises {name}: raise a ValueError") from None
    raise Hint(
        f"{what}: your function gives {found}; a division leaves a remainder, so it should raise a "
        "ValueError"
    )


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


def iteration(my_iteration: Callable[..., Any]) -> None:
    """The learner's time of a step, against the sum of the parts of `perf.step`.

    Args:
        my_iteration: `my_iteration(model, shape, global_batch, micro_batch, cluster)` -> seconds.
    """
    for arguments in ITERATIONS:
        model, shape, global_batch, micro_batch, _ = arguments
        with without(iteration_parts):
            found = due(my_iteration(*arguments))
        order = "" if shape.order == GridShape().order else f", order {shape.order}"
        case = (
            f"dp {shape.dp}, pp {shape.pp}, tp {shape.tp}{order}, {model.num_layers} layers, "
            f"global batch {global_batch}, micro-batch {micro_batch}: "
        )
        if not isinstance(found, (int, float)):
            raise Hint(f"{case}give one number, the seconds of an iteration")
        parts = iteration_parts(*arguments)
        shown = [f"{POINTS[name]} {part:.3f}" for name, part in parts.items() if part]
        otherwise = (
            f"your function gives {found:.3f} s; over the whole step the points that count here "
            f"give {', '.join(shown)} s"
        )
        mistakes = _mistaken_s(*arguments)
        diagnose(case, found, sum(parts.values()), mistakes, otherwise, tolerance=1e-6)


POINTS = {
    "compute": "1 compute",
    "tp": "2 tp",
    "pp": "3 pp",
    "bubble": "4 turns in which a stage waits",
    "dp": "5 dp",
}


def _mistaken_s(
    model: GPTConfig, shape: GridShape, global_batch: int, micro_batch: int, cluster: ClusterModel
) -> dict[str, float]:
    """{hint: seconds that a function with this mistake gives}; for some layouts it is harmless."""
    m = global_batch // (micro_batch * shape.dp)
    model_ranks = shape.tp * shape.pp
    flops = micro_batch * training_flops_per_sample(model)
    right_compute_s = flops / model_ranks / cluster.flops_per_s
    right_act = 4 * micro_batch * model.context_length * model.hidden_size
    of_layers = 4 * model.num_layers / shape.pp
    right_all_reduces = of_layers + 2 / shape.pp
    right_messages = 1 if shape.pp > 1 else 0
    right_turns = m + shape.pp - 1
    right_gradients = 4 * model.num_parameters / model_ranks
    first = {axis: shape.groups(axis)[0] for axis in ("tp", "pp", "dp")}
    right_link = {
        "tp": cluster.link(first["tp"]),
        "pp": cluster.message_link(first["pp"]),
        "dp": cluster.link(first["dp"]),
    }

    def seconds(
        compute_s: float = right_compute_s,
        act: float = right_act,
        all_reduces: float = right_all_reduces,
        tp_link: Link = right_link["tp"],
        messages: float = right_messages,
        pp_link: Link = right_link["pp"],
        turns: float = right_turns,
        act_of_tp: float | None = None,
        averages: float = 1,
        gradients: float = right_gradients,
        dp_link: Link = right_link["dp"],
    ) -> float:
        tp_s = all_reduces * time_s("all_reduce", shape.tp, act_of_tp or act, tp_link)
        pp_s = messages * time_s("send", 2, act, pp_link)
        dp_s = averages * time_s("all_reduce", shape.dp, gradients, dp_link)
        return turns * (compute_s + tp_s + pp_s) + dp_s

    return {
        "point 1, compute: a micro-batch has more samples than one": seconds(
            compute_s=right_compute_s / micro_batch
        ),
        "point 1, compute: the tp * pp ranks of a copy share it": seconds(
            compute_s=right_compute_s * model_ranks
        ),
        "point 2, tp: a stage has only its share of the all-reduces": seconds(
            all_reduces=right_all_reduces * shape.pp
        ),
        "point 2, tp: the whole of act is all-reduced, it is not cut by tp": seconds(
            act_of_tp=right_act / shape.tp
        ),
        "point 2, tp: (4 L + 2)/pp need not be a whole number: is there a `//`?": seconds(
            all_reduces=(4 * model.num_layers + 2) // shape.pp
        ),
        "point 2, tp: the embedding and the head have all-reduces too": seconds(
            all_reduces=of_layers
        ),
        "point 2, tp: one all-reduce more on each stage is right for pp = 2; how many are there in "
        "the whole model, whatever pp is?": seconds(all_reduces=of_layers + 1),
        "point 2, tp: the all-reduces are missing": seconds(all_reduces=0),
        "point 2, tp: a collective uses all adapters of its group, and not one link alone": seconds(
            tp_link=cluster.message_link(first["tp"])
        ),
        "point 2, tp: not every tp group sits on one node": seconds(tp_link=cluster.inside),
        "point 2, tp: some tp groups sit on one node": seconds(tp_link=cluster.between),
        "point 3, pp: a turn does not get longer by the message; nothing overlaps here": seconds(
            messages=0
        ),
        "point 3, pp: with pp = 1 there is no message": seconds(messages=1),
        "point 3, pp: each micro-batch is charged one message": seconds(
            messages=2 * right_messages
        ),
        "point 3, pp: a message goes from one rank to one other, over one link": seconds(
            pp_link=cluster.link(first["pp"])
        ),
        "point 3, pp: not every pipeline sits on one node": seconds(pp_link=cluster.inside),
        "point 3, pp: some pipelines sit on one node": seconds(pp_link=cluster.between),
        "points 2 and 3: act counts numbers here, and time_s takes bytes": seconds(
            act=right_act / 4
        ),
        "points 2 and 3: a number of act takes 2 bytes here: how many has a float32?": seconds(
            act=right_act / 2
        ),
        "points 2 and 3: act depends on the model's tokens and hidden size": seconds(
            act=4 * micro_batch * MODEL.context_length * MODEL.hidden_size
        ),
        "points 2 and 3: act has all samples of a micro-batch": seconds(
            act=right_act / micro_batch
        ),
        "point 4, turns: in your function no stage waits; it waits for pp - 1 turns": seconds(
            turns=m
        ),
        "point 4, turns: one too many, a stage waits for pp - 1": seconds(turns=right_turns + 1),
        "point 4, turns: m counts the micro-batches of one copy, and there are dp copies": seconds(
            turns=m * shape.dp + shape.pp - 1
        ),
        "point 5, dp: the gradients are missing": seconds(averages=0),
        "point 5, dp: gradients are averaged once a step, not in each turn": seconds(
            averages=right_turns
        ),
        "point 5, dp: a rank holds only its part of the parameters": seconds(
            gradients=right_gradients * model_ranks
        ),
        "point 5, dp: each gradient has 4 bytes, not 2": seconds(gradients=right_gradients / 2),
        "point 5, dp: the gradients are counted as numbers, and time_s takes bytes": seconds(
            gradients=right_gradients / 4
        ),
        "point 5, dp: a collective uses all adapters of its group, and not one link alone": seconds(
            dp_link=cluster.message_link(first["dp"])
        ),
        "point 5, dp: not every dp group sits on one node": seconds(dp_link=cluster.inside),
        "point 5, dp: some dp groups sit on one node": seconds(dp_link=cluster.between),
        "the unit is off: give seconds": 1e3 * seconds(),
    }


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


Layout = tuple[GridShape, DataParallel]


def best_layout(answer: Callable[..., Any]) -> None:
    """The learner's choice of a layout, in several cases.

    Args:
        answer: `answer(model, world, global_batch, micro_batch, cluster, room_bytes)`
            -> (GridShape, "overlapped" or "sharded").
    """
    returned = False
    for about, choice in CHOICES.items():
        case = f"{about}: "
        found = bounded(LOOP, answer, *choice)
        none = (
            "your function finds no layout that keeps the rules, and there is one: which rule is "
            "too strict, or which size is never tried?"
        )
        refuse({none: found is None and returned}, case)
        returned = True
        shape, how = _as_layout(case, due(found))
        case += f"{_named(shape, how)}: "
        refuse({"cp is not asked for": shape.cp > 1, **_broken_rules(shape, how, choice)}, case)
        own_s = _seconds(shape, how, choice)
        best, best_how = min(_possible(choice), key=lambda layout: _seconds(*layout, choice))
        best_s = _seconds(best, best_how, choice)
        slow = (
            f"an iteration takes {1e3 * own_s:.0f} ms, and one of {_named(best, best_how)}, which "
            f"fits, {1e3 * best_s:.0f} ms"
        )
        other_order = f"its order is {shape.order}, not the default"
        is_slow = own_s > best_s * (1 + 1e-9)
        refuse({other_order: is_slow and shape.order != GridShape().order, slow: is_slow}, case)


def _as_layout(case: str, found: Any) -> Layout:
    """What the learner returned, as a shape and a word."""
    if not isinstance(found, (tuple, list)) or len(found) != 2:
        raise Hint(f'{case}{found!s:.40}: return two things, (GridShape, "overlapped")')
    shape, how = due(found[0]), due(found[1])
    if not isinstance(shape, GridShape):
        raise Hint(f"{case}{shape!s:.40} is no GridShape")
    if how not in ("overlapped", "sharded"):
        raise Hint(f'{case}{how!r:.40} is neither "overlapped" nor "sharded"')
    return shape, how


def _named(shape: GridShape, how: str) -> str:
    return f"dp {shape.dp}, pp {shape.pp}, tp {shape.tp}, {how}"


def _broken_rules(shape: GridShape, how: str, choice: Choice) -> dict[str, bool]:
    """The five rules, as rows of a table."""
    model, world, global_batch, micro_batch, _, room_bytes = choice
    heads = "1 head" if model.num_heads == 1 else f"{model.num_heads} heads"
    parts = shape.tp * (shape.dp if how == "sharded" else shape.pp)
    needed = 16 * model.num_parameters / parts
    return {
        f"it has {shape.world_size} ranks, and there are {world}": shape.world_size != world,
        f"tp = {shape.tp} does not divide {heads}": model.num_heads % shape.tp > 0,
        f"pp = {shape.pp} does not divide {model.num_layers} layers": (
            model.num_layers % shape.pp > 0
        ),
        f"{global_batch} samples cannot be cut over dp = {shape.dp} into micro-batches of "
        f"{micro_batch}": global_batch % (shape.dp * micro_batch) > 0,
        "sharded means pp = 1 here": how == "sharded" and shape.pp > 1,
        f"a rank needs {needed / 1e6:.2f} MB and has {room_bytes / 1e6:.2f} MB": (
            needed > room_bytes
        ),
    }


def _possible(choice: Choice) -> list[Layout]:
    """The layouts that keep the rules."""
    found: list[Layout] = []
    for dp, pp, tp in itertools.product((1, 2, 4, 8, 16), repeat=3):
        shape = GridShape(dp=dp, pp=pp, tp=tp)
        for how in ("overlapped", "sharded"):
            if not any(_broken_rules(shape, how, choice).values()):
                found.append((shape, how))
    return found


def _seconds(shape: GridShape, how: DataParallel, choice: Choice) -> float:
    model, _, global_batch, micro_batch, cluster, _ = choice
    parts = iteration_parts(model, shape, global_batch, micro_batch, cluster, how)
    return sum(parts.values())


# ---- 15.4

_FIRST = re.compile(
    r"^(?P<world>\d+) ranks? on (?:1 node|\d+ nodes \((?P<nodes>.*?)\)), .*; "
    r"grid dp (?P<dp>\d+) x pp (?P<pp>\d+) x cp \d+ x tp (?P<tp>\d+); "
    r"(?P<samples>\d+) samples a step = "
    r"dp \d+ x (?P<count>\d+) micro-batches of (?P<micro>\d+)",
    re.MULTILINE,
)
_STEP = re.compile(r"step (\d+)/\d+ \| loss ([\d.]+)")


def form(form: Any, nodes: int = 2, ranks_per_node: int = 2) -> None:
    """The learner's numbers for gpt_tiny on a small cluster, cut between the layers.

    Args:
        form: {"nodes": .., "ranks_per_node": .., "parallel.tp": .., ...}.
        nodes, ranks_per_node: Of the cluster.
    """
    shape, count = _filled_in(form, "my_form", nodes, ranks_per_node)
    mistakes = {
        f"tp={shape.tp} cuts through the layers, and the cut is to go between them": shape.tp != 1,
        "each rank holds the whole model, and there is room for half of it": shape.pp == 1,
        _bubble(shape, count): (shape.pp - 1) / count > MOST_BUBBLE,
    }
    refuse(mistakes)


def hybrid_form(form: Any, nodes: int = 2, ranks_per_node: int = 2) -> None:
    """The same for a model that is cut between its layers and through them."""
    shape, count = _filled_in(form, "my_hybrid", nodes, ranks_per_node)
    parts = shape.tp * shape.pp
    mistakes = {
        f"tp={shape.tp} x pp={shape.pp}: a rank holds 1/{parts} of the model, and there is room "
        "for a quarter": parts < nodes * ranks_per_node,
        f"pp={shape.pp}: two stages of layers are asked for": shape.pp != nodes,
        f"tp={shape.tp}: each layer is to be shared by the {ranks_per_node} ranks of a node": (
            shape.tp != ranks_per_node
        ),
        "m = 1: there is one micro-batch in a step, so while a stage works the other one waits, "
        "half of the time": count == 1,
        _bubble(shape, count): (shape.pp - 1) / count > MOST_BUBBLE,
        f"with micro-batches of {form['train.micro_batch']} the bubble is {shape.pp - 1}/{count} "
        "of the work. Larger ones are allowed, and make fewer messages": (
            (shape.pp - 1) / count <= MOST_BUBBLE / 2
        ),
    }
    refuse(mistakes)


MOST_BUBBLE = 1 / 8  # of the work


def _bubble(shape: GridShape, count: int) -> str:
    return (
        f"a copy has {count} micro-batches in a step: the bubble is {shape.pp - 1}/{count} of the "
        "work, and 1/8 is allowed"
    )


def _filled_in(form: Any, name: str, nodes: int, ranks_per_node: int) -> tuple[GridShape, int]:
    """(The grid of a form, micro-batches of a copy); all GPUs are used, by the right batch."""
    refuse({f"{name} is None: give it the dict with your six numbers": form is None})
    if not isinstance(due(form), Mapping):
        raise Hint(f"{name} is a {type(form).__name__}, not a dict")
    missing = [name for name in SIZE + FIELDS if name not in form]
    unknown = [str(name) for name in form if name not in SIZE + FIELDS]
    mistakes = {
        f"the form has no {', '.join(missing)}": missing,
        f"the script has no blank for {', '.join(unknown)}": unknown,
    }
    refuse(mistakes)
    values = [form[name] for name in SIZE + FIELDS]
    if any(value is ... for value in values):
        raise NotImplementedError("exercise")
    if not all(isinstance(value, int) for value in values):
        raise Hint("all six are whole numbers")
    asked, per_node, _, _, micro, global_batch = values
    world = nodes * ranks_per_node
    right_batch = RECIPE.train.global_batch
    mistakes = {
        f"{per_node} ranks per node: a node has {ranks_per_node} GPUs, one for each rank": (
            per_node > ranks_per_node
        ),
        f"{asked} nodes: there are {nodes}, and the job would wait forever": asked > nodes,
        f"nodes x ranks_per_node = {asked} x {per_node} leave GPUs idle: there are {world}": (
            asked * per_node != world
        ),
        f"global batch {global_batch}: the learning rate of the recipe was chosen for "
        f"{right_batch}": global_batch != right_batch,
    }
    refuse(mistakes)
    try:
        changes = {name: form[name] for name in FIELDS}
        shape = combinations.check(recipes.with_changes(RECIPE, changes), world)
    except ValueError as error:
        raise Hint(str(error)) from None
    return shape, global_batch // (micro * shape.dp)


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
    """The same for 15.5; some steps of the job are recorded."""
    hybrid_form(blanks)
    _check_run(run(job({**blanks, **RECORDED})), blanks, reference)


def _check_run(
    done: Submitted, blanks: Mapping[str, Any], reference: Sequence[Mapping[str, float]]
) -> None:
    failed = f"the job ended as {done.outcome}: read {done.out}.log"
    refuse({failed: not done.outcome.ok})
    _says_the_form(done, blanks)
    _ends_with_the_loss(done, reference)


def _says_the_form(done: Submitted, blanks: Mapping[str, Any]) -> None:
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


def _ends_with_the_loss(done: Submitted, reference: Sequence[Mapping[str, float]]) -> None:
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
        praise="and what does not fit is refused before anything starts",
        hints=(
            "How many ranks hold one copy of the model?",
            "Which of the two batches is cut into micro-batches, the global or the local one?",
            "`divmod(a, b)` gives the quotient and the remainder at once.",
        ),
    ),
    "15.2": Exercise(
        check=iteration,
        praise="the parts, the turns, and the gradients once in a step",
        hints=(
            "Write one line for each of: m, act, compute, tp, pp, dp. Put them together last.",
            "Which of them happen once in each turn, and which once in a step?",
            "Which of them get smaller when the model is cut over more ranks?",
        ),
    ),
    "15.3": Exercise(
        check=best_layout,
        praise="the fastest layout that fits, in each of the cases",
        hints=(
            "Two loops, over tp and over pp; dp is what is left. Skip what breaks a rule.",
            "Each shape can be data parallel in two ways, which need different room.",
            "Remember the best so far and its time.",
        ),
    ),
    "15.4": Exercise(
        check=script,
        praise="two copies on two nodes, and the loss of plain dp",
        hints=(
            "First the nodes and the ranks on each; then tp and pp from the room of a rank.",
            "How many copies of the model are there, and how many samples of a step has each?",
        ),
    ),
    "15.5": Exercise(
        check=hybrid,
        praise="one copy in four parts, and the loss of plain dp",
        hints=(
            "Into how many parts does tp cut the model, and into how many pp? The product is the "
            "number of parts.",
            "There is one copy, so it gets all 16 samples. How many micro-batches keep the bubble "
            "at 1/8 of the work?",
        ),
    ),
}
