"""Answers to the exercises of lesson 15, hybrid training."""

import itertools
from pathlib import Path

from answers import Answers, changed, of_the_check

from course.labs import l15_hybrid
from labcode.perf import alpha_beta, step
from labcode.perf.flops import training_flops_per_sample
from labcode.slurm.run.outcome import Outcome
from labcode.topology import GridShape

# ---- 15.1 the form as a function


def layout_with_remainders(world, tp, pp, global_batch, micro_batch):
    if world % (tp * pp) != 0:
        raise ValueError(f"{world % (tp * pp)} ranks are left over")
    dp = world // (tp * pp)
    if global_batch % (micro_batch * dp) != 0:
        raise ValueError(f"{global_batch} samples do not divide by {micro_batch * dp}")
    m = global_batch // (dp * micro_batch)
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


LAYOUT = Answers(
    solves="layout",
    takes_ranks=False,
    right={
        "remainders first": layout_with_remainders,
        "small steps, as a list": layout_in_small_steps,
    },
    wrong=of_the_check("15.1"),
)


# ---- 15.2 the time of an iteration


def iteration_from_the_last(model, shape, global_batch, micro_batch, cluster):
    """Takes all layers' all-reduces one by one."""
    value_bytes = 4
    act = value_bytes * micro_batch * model.hidden_size * model.context_length
    links = {axis: cluster.link(shape.groups(axis)[-1]) for axis in ("tp", "dp")}
    links["pp"] = cluster.message_link(shape.groups("pp")[-1])
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
        link = cluster.message_link(shape.groups("pp")[-1])
        turn_s += link.alpha_s + act / link.beta_bytes_per_s
    turns = global_batch // shape.dp // micro_batch - 1 + shape.pp
    return turn_s * turns + ring_s("dp", 4 * model.num_parameters / shape.size("tp", "pp"))


ITERATION = Answers(
    solves="iteration_s",
    takes_ranks=False,
    right={"in a loop": iteration_from_the_last, "without alpha_beta": iteration_by_hand},
    wrong=of_the_check("15.2"),
)


# ---- 15.3 choose the layout


def best_over_divisors(model, world, global_batch, micro_batch, cluster, room_bytes):
    times = {}
    for dp in range(1, world + 1):
        for pp in range(1, world + 1):
            tp = world // (dp * pp)
            if dp * pp * tp != world or model.num_layers % pp or model.num_heads % max(tp, 1):
                continue
            if global_batch % (micro_batch * dp):
                continue
            shape = GridShape(dp, pp, 1, tp)
            case = (model, shape, global_batch, micro_batch, cluster)
            if 16 * model.num_parameters <= room_bytes * tp * pp:
                times[shape, "overlapped"] = sum(step.iteration_parts(*case, "overlapped").values())
            if pp == 1 and 16 * model.num_parameters <= room_bytes * tp * dp:
                times[shape, "sharded"] = sum(step.iteration_parts(*case, "sharded").values())
    return min(times, key=lambda layout: times[layout])


def best_by_sorting(model, world, global_batch, micro_batch, cluster, room_bytes):
    """All that is thinkable, and then what breaks no rule."""
    found = []
    powers = [2**k for k in range(world.bit_length())]
    for tp, pp, how in itertools.product(powers, powers, ["sharded", "overlapped"]):
        dp = world // (tp * pp)
        if dp < 1 or model.num_heads % tp or model.num_layers % pp:
            continue
        if global_batch % (dp * micro_batch) or (how == "sharded" and pp > 1):
            continue
        parts = tp * (pp if how == "overlapped" else dp)
        if 16 * model.num_parameters / parts <= room_bytes:
            shape = GridShape(dp=dp, pp=pp, tp=tp)
            seconds = step.iteration_parts(model, shape, global_batch, micro_batch, cluster, how)
            found.append((sum(seconds.values()), len(found), shape, how))
    _, _, shape, how = sorted(found)[0]
    return [shape, how]


def best_with_own_time(model, world, global_batch, micro_batch, cluster, room_bytes):
    """The parts without dp, and what of dp is left."""
    best = None
    least_s = float("inf")
    tp = 1
    while tp <= world and model.num_heads % tp == 0:
        pp = 1
        while tp * pp <= world and model.num_layers % pp == 0:
            shape = GridShape(world // (tp * pp), pp, tp=tp)
            for how, cut in (("overlapped", tp * pp), ("sharded", tp * shape.dp)):
                fits = 16 * model.num_parameters / cut <= room_bytes
                fits = fits and global_batch % (micro_batch * shape.dp) == 0
                if not fits or (how == "sharded" and pp != 1):
                    continue
                seconds = own_time(model, shape, global_batch, micro_batch, cluster, how)
                if seconds < least_s:
                    best, least_s = (shape, how), seconds
            pp *= 2
        tp *= 2
    return best


def own_time(model, shape, global_batch, micro_batch, cluster, how):
    m = global_batch // (micro_batch * shape.dp)
    link = cluster.link(shape.groups("dp")[0])
    num_bytes = 4 * model.num_parameters / shape.size("tp", "pp")
    reduce_s = alpha_beta.time_s("all_reduce", shape.dp, num_bytes, link)
    whole_s = iteration_by_hand(model, shape, global_batch, micro_batch, cluster) - reduce_s
    flops = micro_batch * training_flops_per_sample(model)
    compute_s = flops / cluster.flops_per_s / shape.size("tp", "pp")
    if how == "overlapped":
        return whole_s + max(0, reduce_s - compute_s * 2 / 3)
    return whole_s + m * max(0, 3 * reduce_s / 2 - whole_s / m)


BEST = Answers(
    solves="best_layout",
    takes_ranks=False,
    right={
        "over all divisors": best_over_divisors,
        "sorted": best_by_sorting,
        "with an own time": best_with_own_time,
    },
    wrong=of_the_check("15.3"),
)


# ---- 15.4 the script

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
    return answer, run_in_no_time, [{"step": 12, "loss": 3.31152}]


NO_FORMS = {
    "None": (None, "is None: give it the dict"),
    "a list": ([2, 2, 1, 2, 1, 16], "is a list, not a dict"),
}

SCRIPT = Answers(
    solves="my_form",
    takes_ranks=False,
    cell=on_paper,
    right={
        "from pairs": dict(
            zip(l15_hybrid.SIZE + l15_hybrid.FIELDS, (2, 2, 1, 2, 1, 16), strict=True)
        ),
        "in another order": {
            "train.global_batch": 16,
            "train.micro_batch": 1,
            "parallel.pp": 2,
            "parallel.tp": 1,
            "ranks_per_node": 2,
            "nodes": 2,
        },
    },
    wrong=of_the_check("15.4") | NO_FORMS,
)

# ---- 15.5 both cuts

HYBRID_LOG = (
    "4 ranks on 2 nodes (n1: 0, 1; n2: 2, 3), gloo on cpu; grid dp 1 x pp 2 x cp 1 x tp 2; "
    "16 samples a step = dp 1 x 8 micro-batches of 2\n"
    "step 12/12 | loss 3.3115 | lr 1e-3\n"
)


def run_the_hybrid(job):
    """What the cluster would answer to the right form."""
    assert "--profile.steps" in job.overrides
    return l15_hybrid.Submitted(Outcome("COMPLETED"), HYBRID_LOG, Path("runs/hybrid-8"), True)


def hybrid_on_paper(answer, ranks):
    """The check cell, with a cluster that runs nothing."""
    return answer, run_the_hybrid, [{"step": 12, "loss": 3.31152}]


HYBRID = Answers(
    solves="my_hybrid",
    takes_ranks=False,
    cell=hybrid_on_paper,
    right={
        "from pairs": dict(
            zip(l15_hybrid.SIZE + l15_hybrid.FIELDS, (2, 2, 2, 2, 2, 16), strict=True)
        ),
        "computed": changed('micro_batch": 2 => micro_batch": 16 // 8'),
        "in another order": {
            "train.global_batch": 16,
            "train.micro_batch": 2,
            "parallel.pp": 2,
            "parallel.tp": 2,
            "ranks_per_node": 2,
            "nodes": 2,
        },
    },
    wrong=of_the_check("15.5") | NO_FORMS,
)

ANSWERS = {
    "15.1": LAYOUT,
    "15.2": ITERATION,
    "15.3": BEST,
    "15.4": SCRIPT,
    "15.5": HYBRID,
}
