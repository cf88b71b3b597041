"""Checks of lesson 15, hybrid training. The text of each assertion is a hint."""

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from labcode import recipes
from labcode.config import GPTConfig
from labcode.perf.alpha_beta import Link, time_s
from labcode.perf.flops import training_flops_per_sample
from labcode.perf.step import ClusterModel, iteration_parts
from labcode.slurm.script.job import Job
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import without
from labcode.teach.labs.l15_hybrid import FIELDS, RECIPE, SHORT, SIZE, Submitted, job
from labcode.topology import GridShape

# ---- 15.1

FITS = (  # world, tp, pp, global batch, micro-batch
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


Layout = Callable[[int, int, int, int, int], tuple[int, int, int]]


def layout(my_layout: Layout) -> None:
    """The learner's arithmetic of a world size, and what it refuses.

    Args:
        my_layout: `my_layout(world, tp, pp, global_batch, micro_batch)`
            -> (dp, local batch, micro-batches).
    """
    for numbers in FITS:
        _check_layout(numbers, due(my_layout(*numbers)))
    texts = []
    for numbers, what in REFUSED.items():
        texts.append(_check_refusal(my_layout, numbers, what))
    of_ranks, *of_samples = texts
    assert of_ranks not in of_samples, (
        "what does not fit are once the ranks and once the samples, and both errors have the same "
        "text: let each say which it is"
    )


def _check_layout(numbers: tuple[int, int, int, int, int], found: Any) -> None:
    world, tp, pp, global_batch, micro = numbers
    case = f"world {world}, tp {tp}, pp {pp}, global batch {global_batch}, micro-batch {micro}: "
    assert isinstance(found, (tuple, list)) and len(found) == 3, (
        case + f"{found}: give (dp, local batch, micro-batches)"
    )
    dp, local, count = due(*found)
    assert all(isinstance(value, int) for value in found), (
        case + f"{found}: give whole numbers, // makes them"
    )
    assert dp == world // (tp * pp), case + (f"dp = {dp}, but {dp}*{tp}*{pp} ranks are not {world}")
    assert local == global_batch // dp, case + (
        f"local batch {local}: {dp} copies of tp*pp ranks share the {global_batch} samples"
    )
    assert count == local // micro, case + (
        f"{count} micro-batches of {micro} are not the {local} samples of a copy"
    )


def _check_refusal(my_layout: Layout, numbers: tuple[int, int, int, int, int], what: str) -> str:
    """The text of the error, without the numbers in it."""
    try:
        found = my_layout(*numbers)
    except ValueError as error:
        text = str(error)
        assert text.strip(), f"{what}: the ValueError has no text: say in it what does not fit"
        return re.sub(r"[\d.]+", "", text)
    except NotImplementedError:
        raise
    except Exception as error:
        raise AssertionError(
            f"{what}: your function raises {_article(type(error).__name__)}: raise a ValueError"
        ) from None
    raise AssertionError(
        f"{what}: your function gives {found}, and should raise a ValueError, as a remainder is "
        "left"
    )


def _article(name: str) -> str:
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


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


Iteration = Callable[[GPTConfig, GridShape, int, int, ClusterModel], float]
DEEP = replace(MODEL, num_layers=8, num_heads=8)
WIDE_NODES = replace(CLUSTER, ranks_per_node=4)
OTHER_SIZES = replace(MODEL, context_length=48, hidden_size=32, num_layers=4)

ITERATIONS = (  # model, shape, global batch, micro-batch, cluster
    (MODEL, GridShape(), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=4), 8, 2, CLUSTER),
    # 3 samples and 2 bytes in place of 4 are different mistakes; of 2 samples they were the same
    (MODEL, GridShape(pp=2), 12, 3, CLUSTER),
    (MODEL, GridShape(tp=2), 8, 1, CLUSTER),
    (MODEL, GridShape(tp=2, pp=2), 8, 2, CLUSTER),
    (MODEL, GridShape(tp=2, pp=2, order="pp-dp-cp-tp"), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=2), 8, 2, CLUSTER),
    (MODEL, GridShape(dp=2, pp=2), 8, 2, CLUSTER),
    (OTHER_SIZES, GridShape(tp=2, pp=2), 8, 2, CLUSTER),
    (OTHER_SIZES, GridShape(dp=4, pp=2, tp=2), 48, 3, CLUSTER),
    (DEEP, GridShape(dp=2, pp=4, tp=4), 32, 4, WIDE_NODES),
)


def iteration(my_iteration: Iteration) -> None:
    """The learner's time of a step, against the sum of the parts of `perf.step`.

    Args:
        my_iteration: `my_iteration(model, shape, global_batch, micro_batch, cluster)` -> seconds.
    """
    for case in ITERATIONS:
        with without(iteration_parts):
            found = my_iteration(*case)
        _check_iteration(case, due(found))


Case = tuple[GPTConfig, GridShape, int, int, ClusterModel]


def _check_iteration(case: Case, found: float) -> None:
    model, shape, global_batch, micro_batch, _ = case
    order = "" if shape.order == GridShape().order else f", order {shape.order}"
    text = (
        f"dp {shape.dp}, pp {shape.pp}, tp {shape.tp}{order}, {model.num_layers} layers, global "
        f"batch {global_batch}, micro-batch {micro_batch}: "
    )
    one_number = isinstance(found, (int, float)) and not isinstance(found, bool)
    assert one_number, text + "give one number, the seconds of an iteration"
    parts = iteration_parts(*case)
    right_s = sum(parts.values())
    if math.isclose(found, right_s, rel_tol=1e-6):
        return
    for mistake, hint in MISTAKES:
        mistaken_s = _mistaken_s(case, mistake)
        harmless = math.isclose(mistaken_s, right_s, rel_tol=1e-6)
        assert harmless or not math.isclose(found, mistaken_s, rel_tol=1e-6), text + hint
    shown = ", ".join(f"{POINTS[name]} {part:.3f}" for name, part in parts.items() if part)
    raise AssertionError(
        text + f"your function gives {found:.3f} s; the points that count here give {shown} s"
    )


POINTS = {
    "compute": "1 compute",
    "tp": "2 tp",
    "pp": "3 pp",
    "bubble": "4 turns in which a stage waits",
    "dp": "5 dp",
}

# What people write, with its hint. Some of these are right for some layouts.
MISTAKES = (
    ("samples", "point 1, compute: a micro-batch has more samples than one"),
    ("uncut", "point 1, compute: the tp * pp ranks of a copy share it"),
    ("all-reduces of all", "point 2, tp: a stage has only its share of the all-reduces"),
    ("4 L", "point 2, tp: the embedding and the head have all-reduces too"),
    (
        "one more on each stage",
        "point 2, tp: one all-reduce more on each stage is right for pp = 2; how many are there "
        "in the whole model, whatever pp is?",
    ),
    ("no tp", "point 2, tp: the all-reduces are missing"),
    ("tp inside", "point 2, tp: not every tp group sits on one node"),
    ("tp between", "point 2, tp: some tp groups sit on one node"),
    ("no message", "point 3, pp: a turn does not get longer by the message; nothing overlaps here"),
    ("always a message", "point 3, pp: with pp = 1 there is no message"),
    ("two messages", "point 3, pp: each micro-batch is charged one message"),
    ("pp inside", "point 3, pp: not every pipeline sits on one node"),
    ("pp between", "point 3, pp: some pipelines sit on one node"),
    ("numbers", "points 2 and 3: how many bytes has a number of act?"),
    ("act of 2 bytes", "points 2 and 3: how many bytes has a number of act?"),
    ("fixed act", "points 2 and 3: act depends on the model's tokens and hidden size"),
    ("act of one sample", "points 2 and 3: act has all samples of a micro-batch"),
    ("no turns", "point 4, turns: nobody waits here, and a stage waits for pp - 1 turns"),
    ("one turn more", "point 4, turns: one too many, a stage waits for pp - 1"),
    ("m of all", "point 4, turns: m counts the micro-batches of one copy, and there are dp copies"),
    ("no gradients", "point 5, dp: the gradients are missing"),
    ("gradients in each turn", "point 5, dp: gradients are averaged once a step, not in each turn"),
    ("gradients m times", "point 5, dp: gradients are averaged once a step, not in each turn"),
    ("all gradients", "point 5, dp: a rank holds only its part of the parameters"),
    ("gradients of 2 bytes", "point 5, dp: each gradient has 4 bytes"),
    ("gradient numbers", "point 5, dp: each gradient has 4 bytes"),
    ("dp inside", "point 5, dp: not every dp group sits on one node"),
    ("dp between", "point 5, dp: some dp groups sit on one node"),
    ("milliseconds", "the unit is off: give seconds"),
)


def _mistaken_s(case: Case, mistake: str) -> float:
    """What a function with one mistake gives."""
    model, shape, global_batch, micro_batch, cluster = case
    m = global_batch // (micro_batch * shape.dp)
    fixed_links = {"inside": cluster.inside, "between": cluster.between}
    links = {}
    for axis in ("tp", "pp", "dp"):
        links[axis] = cluster.link(shape.groups(axis)[0])
        for place, link in fixed_links.items():
            if mistake == f"{axis} {place}":
                links[axis] = link

    cut = shape.tp * shape.pp
    samples = 1 if mistake == "samples" else micro_batch
    compute_s = training_flops_per_sample(model) * samples / cluster.flops_per_s
    if mistake != "uncut":
        compute_s /= cut

    act = 4 * micro_batch * model.context_length * model.hidden_size
    if mistake == "numbers":
        act /= 4
    elif mistake == "act of 2 bytes":
        act /= 2
    elif mistake == "fixed act":
        act = 4 * micro_batch * MODEL.context_length * MODEL.hidden_size
    elif mistake == "act of one sample":
        act /= micro_batch

    all_reduces = 4 * model.num_layers + 2
    if mistake == "4 L":
        all_reduces -= 2
    if mistake == "one more on each stage":
        all_reduces += shape.pp - 2
    if mistake != "all-reduces of all":
        all_reduces /= shape.pp
    tp_s = all_reduces * time_s("all_reduce", shape.tp, act, links["tp"])
    if mistake == "no tp":
        tp_s = 0.0

    num_messages = 1 if shape.pp > 1 else 0
    num_messages = {
        "no message": 0,
        "always a message": 1,
        "two messages": 2 * num_messages,
    }.get(mistake, num_messages)
    pp_s = num_messages * time_s("send", 2, act, links["pp"])

    turns = m + shape.pp - 1
    if mistake == "no turns":
        turns = m
    elif mistake == "one turn more":
        turns += 1
    elif mistake == "m of all":
        turns = global_batch // micro_batch + shape.pp - 1

    gradient_bytes = 4 * model.num_parameters
    if mistake != "all gradients":
        gradient_bytes /= cut
    if mistake == "gradients of 2 bytes":
        gradient_bytes /= 2
    elif mistake == "gradient numbers":
        gradient_bytes /= 4
    times = {"no gradients": 0, "gradients in each turn": turns, "gradients m times": m}
    dp_s = time_s("all_reduce", shape.dp, gradient_bytes, links["dp"]) * times.get(mistake, 1)

    total_s = turns * (compute_s + tp_s + pp_s) + dp_s
    return 1e3 * total_s if mistake == "milliseconds" else total_s


# ---- 15.3


@dataclass(frozen=True)
class _Choice:
    """What a layout is chosen for."""

    about: str
    model: GPTConfig
    world: int
    global_batch: int
    micro_batch: int
    cluster: ClusterModel
    room_bytes: float


_NODES_OF_FOUR = replace(CLUSTER, ranks_per_node=4)
_NODES_OF_EIGHT = replace(CLUSTER, ranks_per_node=8)
_ODD = replace(DEEP, num_layers=3)  # which no pipeline of 2, 4 or 8 stages divides
_ONE_HEAD = replace(DEEP, num_heads=1)  # without the rule of the heads, tp would be fastest
CHOICES = (
    _Choice("a small batch", MODEL, 4, 8, 2, CLUSTER, 1e12),
    _Choice("a large batch", MODEL, 4, 256, 2, CLUSTER, 1e12),
    _Choice("little room", MODEL, 4, 256, 2, CLUSTER, 16 * MODEL.num_parameters / 3.9),
    _Choice("8 layers on 8 ranks", DEEP, 8, 64, 1, _NODES_OF_FOUR, 16 * DEEP.num_parameters / 2),
    _Choice("16 ranks", DEEP, 16, 32, 1, _NODES_OF_FOUR, 1e12),
    _Choice("16 ranks and a large batch", MODEL, 16, 1024, 1, _NODES_OF_FOUR, 1e12),
    _Choice("room for an eighth", DEEP, 8, 64, 1, CLUSTER, 16 * DEEP.num_parameters / 7.9),
    _Choice(
        "3 layers on nodes of 8", _ODD, 8, 64, 1, _NODES_OF_EIGHT, 16 * _ODD.num_parameters / 7.9
    ),
    _Choice("a batch that few copies divide", DEEP, 8, 10, 5, _NODES_OF_FOUR, 1e12),
    _Choice("12 samples in micro-batches of 4", DEEP, 8, 12, 4, CLUSTER, 1e12),
    _Choice("10 samples in micro-batches of 2", MODEL, 8, 10, 2, CLUSTER, 1e12),
    _Choice("a model with one head", _ONE_HEAD, 8, 8, 2, _NODES_OF_FOUR, 1e12),
)


def _possible(choice: _Choice) -> dict[GridShape, float]:
    """The layouts that keep the rules, with the seconds of an iteration."""
    found = {}
    for tp, pp in itertools.product((1, 2, 4, 8, 16), repeat=2):
        if _broken_rule(choice, GridShape(dp=max(1, choice.world // (tp * pp)), pp=pp, tp=tp)):
            continue
        shape = GridShape(dp=choice.world // (tp * pp), pp=pp, tp=tp)
        found[shape] = _seconds(choice, shape)
    return found


def _seconds(choice: _Choice, shape: GridShape) -> float:
    parts = iteration_parts(
        choice.model, shape, choice.global_batch, choice.micro_batch, choice.cluster
    )
    return sum(parts.values())


def _broken_rule(choice: _Choice, shape: GridShape) -> str:
    """Which rule a layout breaks; "" for none."""
    if shape.world_size != choice.world:
        return f"it has {shape.world_size} ranks, and there are {choice.world}"
    if choice.model.num_heads % shape.tp:
        heads = choice.model.num_heads
        counted = "1 head" if heads == 1 else f"{heads} heads"
        return f"tp = {shape.tp} does not divide {counted}"
    if choice.model.num_layers % shape.pp:
        return f"pp = {shape.pp} does not divide {choice.model.num_layers} layers"
    if choice.global_batch % (shape.dp * choice.micro_batch):
        return (
            f"{choice.global_batch} samples cannot be cut over dp = {shape.dp} into micro-batches "
            f"of {choice.micro_batch}"
        )
    needed = 16 * choice.model.num_parameters / (shape.tp * shape.pp)
    if needed > choice.room_bytes:
        return f"a rank needs {needed / 1e6:.2f} MB and has {choice.room_bytes / 1e6:.2f} MB"
    return ""


def best_layout(answer: Callable[..., GridShape]) -> None:
    """The learner's choice of a layout, in several cases.

    Args:
        answer: `answer(model, world, global_batch, micro_batch, cluster, room_bytes)`.
    """
    for choice in CHOICES:
        found = answer(
            choice.model,
            choice.world,
            choice.global_batch,
            choice.micro_batch,
            choice.cluster,
            choice.room_bytes,
        )
        case = f"{choice.about}: "
        if choice is not CHOICES[0]:  # it did return something before
            assert found is not None, (
                case + "your function finds no layout that keeps the rules, and there is one: "
                "which rule is too strict, or which size is never tried?"
            )
        found = due(found)
        assert isinstance(found, GridShape), case + f"{found!s:.40} is no GridShape"
        case += f"dp {found.dp}, pp {found.pp}, tp {found.tp}: "
        assert found.cp == 1, case + "cp is not asked for"
        broken = _broken_rule(choice, found)
        assert not broken, case + broken
        best_s = min(_possible(choice).values())
        assert _seconds(choice, found) <= best_s * (1 + 1e-9), (
            case + f"an iteration takes {1e3 * _seconds(choice, found):.0f} ms, and another layout "
            f"that fits takes {1e3 * best_s:.0f} ms"
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


def form(form: Mapping[str, Any], nodes: int = 2, ranks_per_node: int = 2) -> None:
    """The learner's numbers for gpt_tiny on a small cluster.

    Args:
        form: {"nodes": .., "ranks_per_node": .., "parallel.tp": .., ...}.
        nodes, ranks_per_node: Of the cluster.
    """
    assert form is not None, "my_form is None: give it the dict with your six numbers"
    assert isinstance(due(form), Mapping), f"my_form is a {type(form).__name__}, not a dict"
    missing = [name for name in SIZE + FIELDS if name not in form]
    assert not missing, f"the form has no {', '.join(missing)}"
    unknown = [str(name) for name in form if name not in SIZE + FIELDS]
    assert not unknown, f"the script has no blank for {', '.join(unknown)}"
    values = tuple(form[name] for name in SIZE + FIELDS)
    if any(value is ... for value in values):
        raise NotImplementedError("exercise")
    assert all(isinstance(value, int) for value in values), "all six are whole numbers"
    asked, per_node, tp, pp, micro, global_batch = values
    world = nodes * ranks_per_node
    assert per_node <= ranks_per_node, (
        f"{per_node} ranks per node: a node has {ranks_per_node} GPUs, one for each rank"
    )
    assert asked <= nodes, f"{asked} nodes: there are {nodes}, and the job would wait for ever"
    assert asked * per_node == world, (
        f"nodes x ranks_per_node = {asked} x {per_node} leave GPUs idle: there are {world}"
    )
    wanted_batch = RECIPE.train.global_batch
    assert global_batch == wanted_batch, (
        f"global batch {global_batch}: "
        f"the learning rate of the recipe was chosen for {wanted_batch}"
    )
    assert tp == 1, f"tp={tp} cuts through the layers, and the cut is to go between them"
    try:
        changes = {name: form[name] for name in FIELDS}
        shape = recipes.with_changes(RECIPE, changes).check(world)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    assert pp > 1, "each rank holds the whole model, and there is room for half of it"
    assert pp == 2, f"a rank holds 1/{pp} of the model, and has room for half of it: cut no further"
    count = global_batch // (micro * shape.dp)
    assert (pp - 1) / count <= 1 / 8, (
        f"a copy has {count} micro-batches in a step: the bubble is {pp - 1}/{count} of the work, "
        "and 1/8 is allowed"
    )


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
    done = run(job(blanks))
    assert done.outcome.ok, f"the job ended as {done.outcome}: read {done.out}.log"
    _check_first_line(blanks, done)
    _check_last_loss(done, reference)


def _check_first_line(blanks: Mapping[str, Any], done: Submitted) -> None:
    first = _FIRST.search(done.log)
    assert first, (
        f'{done.out}.log has no line "... ranks on ...; grid ...": '
        "no rank came as far as its first step"
    )
    world = int(first["world"])
    wanted = blanks["nodes"] * blanks["ranks_per_node"]
    assert world == wanted, (
        f"the log says {world} ranks, the form {wanted}: these are several jobs, not one"
    )
    if done.on_slurm:
        assert first["nodes"] == "n1: 0, 1; n2: 2, 3", (
            f"the ranks sit on {first['nodes'] or 'one node'}: they do not fill one node after the "
            "other"
        )
    same_pp = int(first["pp"]) == blanks["parallel.pp"]
    same_tp = int(first["tp"]) == blanks["parallel.tp"]
    assert same_pp and same_tp, (
        f"the log says pp {first['pp']} x tp {first['tp']}, and the form does not"
    )
    same_samples = int(first["samples"]) == blanks["train.global_batch"]
    same_micro = int(first["micro"]) == blanks["train.micro_batch"]
    assert same_samples and same_micro, (
        f"the log says {first['samples']} samples a step in micro-batches of {first['micro']} "
        f"(dp {first['dp']} x {first['count']}), and the form does not"
    )


def _check_last_loss(done: Submitted, reference: Sequence[Mapping[str, float]]) -> None:
    losses = {int(step): float(loss) for step, loss in _STEP.findall(done.log)}
    last_step = max(losses, default=0)
    steps = SHORT["train.steps"]
    assert last_step == steps, f"the log ends at step {last_step} of {steps}"
    loss = losses[last_step]
    right = [row["loss"] for row in reference if "loss" in row][-1]
    assert abs(loss - right) < 1e-3, (
        f"the last loss is {loss}, on another grid {right:.4f}: these trained something else"
    )


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
            "Remember the best so far and its time.",
            "GridShape(dp=..., pp=..., tp=...) in the default order.",
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
}
