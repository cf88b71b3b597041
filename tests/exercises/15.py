"""Answers to the exercises of lesson 15, hybrid training."""

import functools
import itertools
import math
from pathlib import Path

from answers import Answers

from labcode.perf import alpha_beta, step
from labcode.perf.flops import training_flops_per_sample
from labcode.slurm.run.outcome import Outcome
from labcode.teach.labs import l15_hybrid
from labcode.topology import GridShape

# ---- 15.1 the form as a function


def layout(world, tp, pp, global_batch, micro, copies=None, refuse=True):
    dp = copies or world // (tp * pp)
    if refuse and world % (tp * pp):
        raise ValueError(f"{world} ranks do not divide by tp*pp = {tp * pp}")
    if refuse and global_batch % (micro * dp):
        raise ValueError(f"{global_batch} samples do not divide by micro*dp = {micro * dp}")
    return dp, global_batch // dp, global_batch // dp // micro


def layout_with_divmod(world, tp, pp, global_batch, micro_batch):
    dp, rest = divmod(world, tp * pp)
    if rest != 0:
        raise ValueError(f"{rest} ranks are left over")
    m, rest = divmod(global_batch, dp * micro_batch)
    if rest != 0:
        raise ValueError(f"{rest} samples are left over")
    return dp, m * micro_batch, m


def layout_in_small_steps(world, tp, pp, global_batch, micro_batch):
    ranks_of_a_copy = tp * pp
    if world / ranks_of_a_copy != int(world / ranks_of_a_copy):
        raise ValueError("ranks")
    dp = int(world / ranks_of_a_copy)
    local = global_batch / dp
    if local != int(local) or local / micro_batch != int(local / micro_batch):
        raise ValueError("samples")
    return [dp, int(local), int(local / micro_batch)]


def layout_with_one_text(world, tp, pp, global_batch, micro):
    if world % (tp * pp) or global_batch % (micro * (world // (tp * pp))):
        raise ValueError(f"{world} and {global_batch} do not fit")
    return layout(world, tp, pp, global_batch, micro)


def layout_by_global_batch(world, tp, pp, global_batch, micro):
    """Asks whether dp and the micro-batch divide the samples, each by itself."""
    dp = world // (tp * pp)
    if world % (tp * pp):
        raise ValueError("ranks")
    if global_batch % dp or global_batch % micro:
        raise ValueError("samples")
    return dp, global_batch // dp, global_batch // dp // micro


def layout_without_text(*numbers):
    try:
        return layout(*numbers)
    except ValueError:
        raise ValueError from None


def layout_with_assert(world, tp, pp, global_batch, micro):
    assert world % (tp * pp) == 0, "ranks"
    return layout(world, tp, pp, global_batch, micro)


LAYOUT = Answers(
    solves="layout",
    takes_ranks=False,
    real=True,
    right={
        "one test": layout,
        "divmod": layout_with_divmod,
        "small steps, as a list": layout_in_small_steps,
    },
    wrong={
        "every rank a copy": (
            lambda world, *rest: layout(world, *rest, copies=world, refuse=False),
            "ranks are not",
        ),
        "only tp taken out": (
            lambda w, tp, pp, *rest: layout(w, tp, pp, *rest, copies=w // tp, refuse=False),
            "ranks are not",
        ),
        "local batch of the whole": (
            lambda w, tp, pp, b, micro: (w // (tp * pp), b, b // micro),
            "copies of tp*pp ranks share",
        ),
        "samples of a rank": (
            lambda w, tp, pp, b, micro: (w // (tp * pp), b // w, b // w // micro),
            "copies of tp*pp ranks share",
        ),
        "micro-batches of all": (
            lambda *args: (*layout(*args)[:2], args[3] // args[4]),
            "are not the",
        ),
        "floats": (
            lambda w, tp, pp, b, micro: (w / (tp * pp), b * tp * pp / w, b * tp * pp / w / micro),
            "whole numbers",
        ),
        "only dp": (lambda w, tp, pp, b, micro: w // (tp * pp), "give (dp, local batch"),
        "refuses nothing": (
            lambda *args: layout(*args, refuse=False),
            "6 ranks over tp*pp = 4",
        ),
        "one text for both": (layout_with_one_text, "let each say which it is"),
        "no text": (layout_without_text, "the ValueError has no text"),
        "assert": (layout_with_assert, "raises an AssertionError: raise a ValueError"),
        "micro-batches of the global batch": (
            layout_by_global_batch,
            "12 samples over micro*dp = 8: your function gives (4, 3, 1)",
        ),
        "refuses ranks only": (
            lambda *args: layout(*args, refuse=args[0] % (args[1] * args[2])),
            "511 samples over dp = 2",
        ),
    },
)


# ---- 15.2 the time of an iteration


def iteration(
    model,
    shape,
    global_batch,
    micro_batch,
    cluster,
    *,
    bubble=-1,
    gradients="once",
    copies=True,
    share=True,
    cut=True,
    samples=True,
    tp=True,
    pp=True,
    gradient_parts=True,
    value_bytes=4,
    gradient_bytes=4,
    ends=2,
    sizes=None,
    messages=1,
    always=False,
    overlap=False,
    ends_of_stage=None,
    samples_of_act=True,
    links=None,
    scale=1,
):
    """The sum of the lesson, or one with a mistake."""
    m = global_batch // (micro_batch * (shape.dp if copies else 1))
    flops = training_flops_per_sample(model) * (micro_batch if samples else 1)
    compute_s = flops / (shape.tp * shape.pp if cut else 1) / cluster.flops_per_s
    tokens, hidden = sizes or (model.context_length, model.hidden_size)
    act = (micro_batch if samples_of_act else 1) * tokens * hidden * value_bytes
    axes = {axis: cluster.link(shape.groups(axis)[0]) for axis in ("tp", "pp", "dp")}
    for axis, place in (links or {}).items():
        axes[axis] = getattr(cluster, place)
    number = (4 * model.num_layers + ends) / (shape.pp if share else 1)
    if ends_of_stage:
        number = 4 * model.num_layers / shape.pp + ends_of_stage(shape)
    turn_s = compute_s
    if tp:
        turn_s += number * alpha_beta.time_s("all_reduce", shape.tp, act, axes["tp"])
    if pp and (always or shape.pp > 1):
        message_s = messages * alpha_beta.time_s("send", 2, act, axes["pp"])
        turn_s = max(turn_s, message_s) if overlap else turn_s + message_s
    size = gradient_bytes * model.num_parameters / (shape.tp * shape.pp if gradient_parts else 1)
    dp_s = alpha_beta.time_s("all_reduce", shape.dp, size, axes["dp"])
    turns = m if bubble is None else m + shape.pp + bubble
    if gradients == "never":
        return turns * turn_s
    if gradients == "each turn":
        return turns * (turn_s + dp_s)
    return scale * (turns * turn_s + dp_s)


def iteration_from_the_last(model, shape, global_batch, micro_batch, cluster):
    """Takes all layers' all-reduces one by one."""
    value_bytes = 4
    act = value_bytes * micro_batch * model.hidden_size * model.context_length
    links = {axis: cluster.link(shape.groups(axis)[-1]) for axis in ("tp", "pp", "dp")}
    one = alpha_beta.time_s("all_reduce", shape.tp, act, links["tp"])
    seconds = 0
    for _ in range(model.num_layers):
        seconds += 4 * one / shape.pp
    seconds += 2 * one / shape.pp
    seconds += (
        micro_batch * training_flops_per_sample(model) / cluster.flops_per_s / (shape.tp * shape.pp)
    )
    if shape.pp != 1:
        seconds += alpha_beta.time_s("send", 2, act, links["pp"])
    m = global_batch / shape.dp / micro_batch
    own = model.num_parameters / shape.tp / shape.pp
    after = alpha_beta.time_s("all_reduce", shape.dp, value_bytes * own, links["dp"])
    return seconds * m + seconds * (shape.pp - 1) + after


def iteration_by_hand(model, shape, global_batch, micro_batch, cluster):
    """Without `alpha_beta`: a ring of p ranks sends 2 (p - 1) parts of the tensor."""

    def ring_s(axis, num_bytes):
        p = shape.size(axis)
        link = cluster.link(shape.groups(axis)[0])
        return 2 * (p - 1) * (link.alpha_s + num_bytes / p / link.beta_bytes_per_s)

    act = 4 * model.context_length * model.hidden_size * micro_batch
    flops = micro_batch * training_flops_per_sample(model)
    turn_s = flops / (cluster.flops_per_s * shape.size("tp", "pp"))
    turn_s += (2 + 4 * model.num_layers) * ring_s("tp", act) / shape.pp
    if shape.pp > 1:
        link = cluster.link(shape.groups("pp")[-1])
        turn_s += link.alpha_s + act / link.beta_bytes_per_s
    turns = global_batch // shape.dp // micro_batch - 1 + shape.pp
    return turn_s * turns + ring_s("dp", 4 * model.num_parameters / shape.size("tp", "pp"))


def wrong_iteration(**mistake):
    return functools.partial(iteration, **mistake)


ITERATION = Answers(
    solves="iteration_s",
    takes_ranks=False,
    real=True,
    right={
        "point by point": iteration,
        "in a loop": iteration_from_the_last,
        "without alpha_beta": iteration_by_hand,
    },
    wrong={
        "no bubble": (wrong_iteration(bubble=None), "point 4, turns: nobody waits here"),
        "one turn too many": (wrong_iteration(bubble=0), "point 4, turns: one too many"),
        "no gradients": (wrong_iteration(gradients="never"), "the gradients are missing"),
        "gradients each turn": (wrong_iteration(gradients="each turn"), "once a step"),
        "m of all copies": (
            wrong_iteration(copies=False),
            "point 4, turns: m counts the micro-batches of one copy",
        ),
        "all all-reduces on each stage": (
            wrong_iteration(share=False),
            "point 2, tp: a stage has only its share",
        ),
        "computing not shared": (wrong_iteration(cut=False), "ranks of a copy share it"),
        "FLOPs of one sample": (wrong_iteration(samples=False), "has more samples than one"),
        "no tp": (wrong_iteration(tp=False), "the all-reduces are missing"),
        "no message": (wrong_iteration(pp=False), "does not get longer by the message"),
        "messages that overlap": (wrong_iteration(overlap=True), "nothing overlaps here"),
        "act in bf16": (wrong_iteration(value_bytes=2), "how many bytes has a number of act"),
        "act of one sample": (
            wrong_iteration(samples_of_act=False),
            "act has all samples of a micro-batch",
        ),
        "one all-reduce more on each stage": (
            wrong_iteration(ends_of_stage=lambda shape: 1),
            "is right for pp = 2",
        ),
        "one more, or both on the only stage": (
            wrong_iteration(ends_of_stage=lambda shape: 1 + (shape.pp == 1)),
            "is right for pp = 2",
        ),
        "gradients of the whole model": (
            wrong_iteration(gradient_parts=False),
            "only its part of the parameters",
        ),
        "the parts themselves": (
            lambda *args: {"compute": iteration(*args)},
            "give one number",
        ),
        "text": (lambda *args: f"{iteration(*args)} s", "give one number"),
        "milliseconds": (wrong_iteration(scale=1000), "give seconds"),
        "labcode's parts": (
            lambda *args: math.fsum(step.iteration_parts(*args).values()),
            "write yours",
        ),
        "tp inside, always": (
            wrong_iteration(links={"tp": "inside"}),
            "point 2, tp: not every tp group",
        ),
        "tp between, always": (
            wrong_iteration(links={"tp": "between"}),
            "point 2, tp: some tp groups",
        ),
        "pp inside, always": (
            wrong_iteration(links={"pp": "inside"}),
            "point 3, pp: not every pipeline",
        ),
        "pp between, always": (
            wrong_iteration(links={"pp": "between"}),
            "point 3, pp: some pipelines",
        ),
        "gradients between, always": (
            wrong_iteration(links={"dp": "between"}),
            "point 5, dp: some dp groups",
        ),
        "gradients inside, always": (
            wrong_iteration(links={"dp": "inside"}),
            "point 5, dp: not every dp group",
        ),
        "sizes of the lesson": (
            wrong_iteration(sizes=(32, 64)),
            "act depends on the model's tokens",
        ),
        "act without its bytes": (
            wrong_iteration(value_bytes=1),
            "how many bytes has a number of act",
        ),
        "gradients of 2 bytes": (wrong_iteration(gradient_bytes=2), "each gradient has 4 bytes"),
        "no embedding and head": (wrong_iteration(ends=0), "the embedding and the head"),
        "two messages": (wrong_iteration(messages=2), "is charged one message"),
        "a message with one stage": (
            wrong_iteration(always=True),
            "with pp = 1 there is no message",
        ),
        "two mistakes": (
            wrong_iteration(always=True, bubble=0),
            "the points that count here give 1 compute",
        ),
    },
)


# ---- 15.3 choose the layout


def best(
    model,
    world,
    global_batch,
    micro_batch,
    cluster,
    room_bytes,
    *,
    heads=True,
    batch=True,
    room=True,
    cut=True,
    largest=False,
    layers=True,
    micro=True,
    whole=True,
    state_bytes=16,
    up_to=6,
):
    """The search of the lesson, or one with a mistake."""
    found = []
    for power in range(up_to):
        for other in range(up_to):
            tp, pp = 2**power, 2**other
            if world % (tp * pp):
                continue
            if (heads and model.num_heads % tp) or (layers and model.num_layers % pp):
                continue
            shape = GridShape(dp=world // tp // pp, pp=pp, tp=tp)
            if not whole:
                if (global_batch // shape.dp) % micro_batch:
                    continue
            elif batch and global_batch % (shape.dp * (micro_batch if micro else 1)):
                continue
            if room and state_bytes * model.num_parameters / (tp * pp if cut else 1) > room_bytes:
                continue
            parts = step.iteration_parts(model, shape, global_batch, micro_batch, cluster)
            found.append((sum(parts.values()), tp, pp))
    if not found and (state_bytes != 16 or up_to != 6):
        return None
    _, tp, pp = max(found) if largest else min(found)
    return GridShape(dp=world // tp // pp, pp=pp, tp=tp)


def best_over_divisors(model, world, global_batch, micro_batch, cluster, room_bytes):
    times = {}
    for dp in range(1, world + 1):
        for pp in range(1, world + 1):
            tp = world // (dp * pp)
            if dp * pp * tp != world or model.num_layers % pp or model.num_heads % max(tp, 1):
                continue
            if global_batch % (micro_batch * dp) == 0:
                shape = GridShape(dp, pp, 1, tp)
                if 16 * model.num_parameters <= room_bytes * tp * pp:
                    values = step.iteration_parts(
                        model, shape, global_batch, micro_batch, cluster
                    ).values()
                    times[shape] = sum(values)
    return min(times, key=times.get)


def best_with_own_time(model, world, global_batch, micro_batch, cluster, room_bytes):
    best_shape, best_s = None, math.inf
    tp = 1
    while tp <= world and model.num_heads % tp == 0:
        pp = 1
        while tp * pp <= world and model.num_layers % pp == 0:
            shape = GridShape(world // (tp * pp), pp, tp=tp)
            fits = 16 * model.num_parameters / (tp * pp) <= room_bytes
            if fits and global_batch % (micro_batch * shape.dp) == 0:
                seconds = iteration(model, shape, global_batch, micro_batch, cluster)
                if seconds < best_s:
                    best_shape, best_s = shape, seconds
            pp *= 2
        tp *= 2
    return best_shape


def best_of_small_sizes(model, world, global_batch, micro_batch, cluster, room_bytes):
    """Tries 1, 2 and 4 for all three sizes, and the first it finds if none of them fits."""
    sizes = (1, 2, 4)
    found = {}
    for dp, pp, tp in itertools.product(sizes, sizes, sizes):
        shape = GridShape(dp=dp, pp=pp, tp=tp)
        fits = 16 * model.num_parameters / (tp * pp) <= room_bytes
        if shape.world_size != world or model.num_layers % pp or model.num_heads % tp or not fits:
            continue
        if global_batch % (dp * micro_batch) == 0:
            found[shape] = iteration(model, shape, global_batch, micro_batch, cluster)
    return min(found, key=found.get)


BEST = Answers(
    solves="best_layout",
    takes_ranks=False,
    real=True,
    right={
        "a list and min": best,
        "over all divisors": best_over_divisors,
        "with an own time": best_with_own_time,
    },
    wrong={
        "the slowest": (functools.partial(best, largest=True), "another layout that fits takes"),
        "room not looked at": (functools.partial(best, room=False), "a rank needs"),
        "always dp": (
            lambda model, world, *rest: GridShape(dp=world),
            "another layout that fits takes",
        ),
        "micro-batch not looked at": (functools.partial(best, micro=False), "cannot be cut"),
        "the rest of the local batch": (functools.partial(best, whole=False), "cannot be cut"),
        "sizes of 1, 2 and 4": (
            functools.partial(best, up_to=3),
            "room for an eighth: dp 1, pp 4, tp 2",
        ),
        "sizes of 1, 2 and 4, dp too": (best_of_small_sizes, "16 ranks and a large batch"),
        "18 bytes": (functools.partial(best, state_bytes=18), "which rule is too strict"),
        "batch not looked at": (functools.partial(best, batch=False), "cannot be cut"),
        "heads not looked at": (
            functools.partial(best, heads=False),
            "does not divide 1 head",
        ),
        "layers not looked at": (
            functools.partial(best, layers=False),
            "does not divide 2 layers",
        ),
        "too few ranks": (lambda *_: GridShape(tp=2), "there are 4"),
        "a tuple": (lambda *_: (1, 2, 2), "is no GridShape"),
        "room for the whole model": (functools.partial(best, cut=False), "empty sequence"),
        "all tp": (
            lambda model, world, *rest: GridShape(tp=world),
            "another layout that fits takes",
        ),
    },
)


# ---- 15.4 the script


def form(tp, pp, micro, batch, nodes=2, ranks_per_node=2):
    fields = {
        "parallel.tp": tp,
        "parallel.pp": pp,
        "train.micro_batch": micro,
        "train.global_batch": batch,
    }
    return {"nodes": nodes, "ranks_per_node": ranks_per_node} | fields


LOG = (
    "4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 2 x pp 2 x cp 1 x tp 1; "
    "16 samples a step = dp 2 x 8 micro-batches of 1\n"
    "step 12/12 | loss 3.3115 | lr 1e-3\n"
)


def run_in_no_time(job):
    """What the cluster would answer to the right form."""
    return l15_hybrid.Submitted(Outcome("COMPLETED"), LOG, Path("runs/hybrid-7"), True)


def on_paper(answer, ranks):
    """The check cell, with a cluster that runs nothing."""
    filled = answer() if callable(answer) else answer
    return filled, run_in_no_time, [{"step": 12, "loss": 3.31152}]


SCRIPT = Answers(
    solves="my_form",
    takes_ranks=False,
    real=True,
    cell=on_paper,
    right={
        "a dict": form(1, 2, 1, 16),
        "in another order": dict(reversed(form(1, 2, 1, 16).items())),
        "from pairs": dict(
            zip(l15_hybrid.SIZE + l15_hybrid.FIELDS, (2, 2, 1, 2, 1, 16), strict=True)
        ),
    },
    wrong={
        "larger batch": (form(1, 2, 2, 32), "the learning rate of the recipe"),
        "tp": (form(2, 1, 8, 16), "cuts through the layers"),
        "the hybrid of section 2": (form(2, 2, 2, 16), "cuts through the layers"),
        "one layer too few": (form(1, 4, 1, 16), "each stage needs a layer"),
        "not cut": (form(1, 1, 4, 16), "each rank holds the whole model"),
        "not a divisor": (form(1, 2, 3, 16), "is not a multiple"),
        "does not fit": (form(1, 3, 1, 16), "change an axis"),
        "the two copies forgotten": (form(1, 2, 2, 16), "a copy has 4 micro-batches in a step"),
        "text": (form("1", "2", "1", "16"), "whole numbers"),
        "a field forgotten": (
            {"nodes": 2, "ranks_per_node": 2, "parallel.tp": 1, "parallel.pp": 2},
            "the form has no train.micro_batch",
        ),
        "a field too many": (
            form(1, 2, 1, 16) | {"parallel.dp": 2},
            "no blank for parallel.dp",
        ),
        "None": (lambda: None, "my_form is None"),
        "a list": ([2, 2, 1, 2, 1, 16], "is a list, not a dict"),
        "all ranks on one node": (form(1, 2, 1, 16, 1, 4), "4 ranks per node: a node has 2 GPUs"),
        "a node for each rank": (form(1, 2, 1, 16, 4, 1), "4 nodes: there are 2"),
        "one node": (form(1, 2, 1, 16, 1, 2), "leave GPUs idle"),
        "no stage at all": (form(1, 0, 1, 16), "pp"),
        "negative": (form(1, 2, -2, 16), "micro_batch"),
    },
)

ANSWERS = {"15.1": LAYOUT, "15.2": ITERATION, "15.3": BEST, "15.4": SCRIPT}
