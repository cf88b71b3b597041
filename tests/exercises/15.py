"""Answers to the exercises of lesson 15, hybrid training."""

import itertools
from pathlib import Path

from answers import Answers, changed

from labcode.perf import alpha_beta, step
from labcode.perf.flops import training_flops_per_sample
from labcode.slurm.run.outcome import Outcome
from labcode.teach.labs import l15_hybrid
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


DP = "divmod(world, tp * pp)"
LOCAL = "divmod(global_batch, dp)"
RANKS_LEFT = "if left_over:"
SAMPLES_LEFT = "if left_over or local_batch % micro_batch:"
OF_RANKS = 'f"{world} ranks are not a multiple of tp*pp = {tp * pp}"'
OF_SAMPLES = 'f"{global_batch} samples do not divide by dp={dp} and micro={micro_batch}"'
NUMBERS = "return dp, local_batch, local_batch // micro_batch"

LAYOUT = Answers(
    solves="layout",
    takes_ranks=False,
    right={
        "remainders first": layout_with_remainders,
        "small steps, as a list": layout_in_small_steps,
    },
    wrong={
        "every rank a copy": (changed(f"{DP} => world, 0"), "ranks are not"),
        "only tp taken out": (changed(f"{DP} => divmod(world, tp)"), "ranks are not"),
        "local batch of the whole": (
            changed(f"{LOCAL} => global_batch, 0"),
            "copies of tp*pp ranks share",
        ),
        "samples of a rank": (
            changed(f"{LOCAL} => divmod(global_batch, world)"),
            "copies of tp*pp ranks share",
        ),
        "micro-batches of all": (
            changed("local_batch // micro_batch => global_batch // micro_batch"),
            "are not the",
        ),
        "floats": (changed("local_batch // => local_batch /"), "whole numbers"),
        "only dp": (changed(f"{NUMBERS} => return dp"), "give (dp, local batch"),
        "refuses nothing": (
            changed(f"{RANKS_LEFT} => if False:", f"{SAMPLES_LEFT} => if False:"),
            "6 ranks over tp*pp = 4",
        ),
        "refuses ranks only": (
            changed(f"{SAMPLES_LEFT} => if False:"),
            "511 samples over dp = 2",
        ),
        "refuses no micro-batch": (
            changed(f"{SAMPLES_LEFT} => {RANKS_LEFT}"),
            "16 samples over micro*dp = 6",
        ),
        "micro-batches of the global batch": (
            changed("local_batch % => global_batch %"),
            "12 samples over micro*dp = 8: your function gives (4, 3, 1)",
        ),
        "one text for both": (
            changed(f'{OF_RANKS} => "no such layout"', f'{OF_SAMPLES} => "no such layout"'),
            "has the same text as one about the samples",
        ),
        "no text": (changed(f"{OF_RANKS} => "), "the ValueError has no text"),
        "assert": (
            changed(f"{RANKS_LEFT}\n        raise ValueError({OF_RANKS}) => assert not left_over"),
            "raises AssertionError: raise a ValueError",
        ),
    },
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


TURNS = "(m + shape.pp - 1)"
TURN = "(compute_s + tp_s + pp_s)"
TOTAL = f"{TURNS} * {TURN} + dp_s"
ALL_REDUCES = "(4 * model.num_layers + 2) / shape.pp"
TP_LINK = 'cluster.link(shape.groups("tp")[0])'
PP_LINK = 'cluster.message_link(shape.groups("pp")[0])'
DP_LINK = 'cluster.link(shape.groups("dp")[0])'
PARTS = "step.iteration_parts(model, shape, global_batch, micro_batch, cluster)"

ITERATION = Answers(
    solves="iteration_s",
    takes_ranks=False,
    right={"in a loop": iteration_from_the_last, "without alpha_beta": iteration_by_hand},
    wrong={
        "FLOPs of one sample": (
            changed("_sample(model) * micro_batch => _sample(model)"),
            "has more samples than one",
        ),
        "computing not shared": (
            changed("flops / model_ranks => flops"),
            "ranks of a copy share it",
        ),
        "all all-reduces on each stage": (
            changed(f"{ALL_REDUCES} => 4 * model.num_layers + 2"),
            "point 2, tp: a stage has only its share",
        ),
        "no embedding and head": (
            changed("4 * model.num_layers + 2 => 4 * model.num_layers"),
            "the embedding and the head",
        ),
        "one all-reduce more on each stage": (
            changed(f"{ALL_REDUCES} => 4 * model.num_layers / shape.pp + 1"),
            "is right for pp = 2",
        ),
        "one more, or both on the only stage": (
            changed(f"{ALL_REDUCES} => 4 * model.num_layers / shape.pp + 1 + (shape.pp == 1)"),
            "is right for pp = 2",
        ),
        "no tp": (changed(f"{TURN} => (compute_s + pp_s)"), "the all-reduces are missing"),
        "tp inside, always": (
            changed(f"{TP_LINK} => cluster.inside"),
            "point 2, tp: not every tp group",
        ),
        "tp between, always": (
            changed(f"{TP_LINK} => cluster.between"),
            "point 2, tp: some tp groups",
        ),
        "tp by one link": (
            changed(f"{TP_LINK} => cluster.message_link(shape.groups('tp')[0])"),
            "point 2, tp: a collective uses all adapters",
        ),
        "a message by all adapters": (
            changed(f"{PP_LINK} => cluster.link(shape.groups('pp')[0])"),
            "from one rank to one other",
        ),
        "gradients by one link": (
            changed(f"{DP_LINK} => cluster.message_link(shape.groups('dp')[0])"),
            "point 5, dp: a collective uses all adapters",
        ),
        "no message": (
            changed(f"{TURN} => (compute_s + tp_s)"),
            "does not get longer by the message",
        ),
        "messages that overlap": (
            changed(f"{TURN} => max(compute_s + tp_s, pp_s)"),
            "nothing overlaps here",
        ),
        "a message with one stage": (
            changed("if shape.pp > 1 => if True"),
            "with pp = 1 there is no message",
        ),
        "two messages": (
            changed("pp_s = alpha_beta => pp_s = 2 * alpha_beta"),
            "is charged one message",
        ),
        "pp inside, always": (
            changed(f"{PP_LINK} => cluster.inside"),
            "point 3, pp: not every pipeline",
        ),
        "pp between, always": (
            changed(f"{PP_LINK} => cluster.between"),
            "point 3, pp: some pipelines",
        ),
        "act without its bytes": (
            changed("hidden_size * 4 => hidden_size"),
            "act counts numbers here",
        ),
        "act cut by tp": (
            changed('"all_reduce", shape.tp, act, => "all_reduce", shape.tp, act / shape.tp,'),
            "it is not cut by tp",
        ),
        "a whole number of all-reduces": (
            changed(
                "(4 * model.num_layers + 2) / shape.pp => (4 * model.num_layers + 2) // shape.pp"
            ),
            "is there a `//`?",
        ),
        "act in bf16": (
            changed("hidden_size * 4 => hidden_size * 2"),
            "a number of act takes 2 bytes here",
        ),
        "sizes of the lesson": (
            changed("model.context_length * model.hidden_size => 32 * 64"),
            "act depends on the model's tokens",
        ),
        "act of one sample": (
            changed("act = micro_batch * => act ="),
            "act has all samples of a micro-batch",
        ),
        "no bubble": (changed(f"{TURNS} => m"), "in your function no stage waits"),
        "one turn too many": (
            changed(f"{TURNS} => (m + shape.pp)"),
            "point 4, turns: one too many",
        ),
        "m of all copies": (
            changed("(micro_batch * shape.dp) => micro_batch"),
            "point 4, turns: m counts the micro-batches of one copy",
        ),
        "no gradients": (changed(f"{TURN} + dp_s => {TURN}"), "the gradients are missing"),
        "gradients each turn": (
            changed(f"{TURN} + dp_s => (compute_s + tp_s + pp_s + dp_s)"),
            "once a step, not in each turn",
        ),
        "gradients for each micro-batch": (
            changed("+ dp_s => + m * dp_s"),
            "once a step, not in each turn",
        ),
        "gradients of the whole model": (
            changed("num_parameters / model_ranks => num_parameters"),
            "only its part of the parameters",
        ),
        "gradients of 2 bytes": (
            changed("4 * model.num_parameters => 2 * model.num_parameters"),
            "each gradient has 4 bytes",
        ),
        "gradients without their bytes": (
            changed("4 * model.num_parameters => model.num_parameters"),
            "the gradients are counted as numbers",
        ),
        "gradients inside, always": (
            changed(f"{DP_LINK} => cluster.inside"),
            "point 5, dp: not every dp group",
        ),
        "gradients between, always": (
            changed(f"{DP_LINK} => cluster.between"),
            "point 5, dp: some dp groups",
        ),
        "milliseconds": (changed(f"{TOTAL} => 1000 * ({TOTAL})"), "give seconds"),
        "the parts themselves": (changed(f"{TOTAL} => {TURN}, dp_s"), "give one number"),
        "labcode's parts": (changed(f"{TOTAL} => sum({PARTS}.values())"), "write yours"),
        "two mistakes": (
            changed("if shape.pp > 1 => if True", f"{TURNS} => (m + shape.pp)"),
            "the points that count here give 1 compute",
        ),
    },
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


OF_BATCH = "global_batch % (dp * micro_batch)"
OF_ROOM = "16 * model.num_parameters / parts_of_model > room_bytes"

BEST = Answers(
    solves="best_layout",
    takes_ranks=False,
    right={
        "over all divisors": best_over_divisors,
        "sorted": best_by_sorting,
        "with an own time": best_with_own_time,
    },
    wrong={
        "the slowest": (
            changed('float("inf") => 0.0', "< best_s => > best_s"),
            "which fits,",
        ),
        "always dp": (
            changed('return best => return GridShape(dp=world), "overlapped"'),
            "a rank needs",
        ),
        "always sharded": (
            changed('return best => return GridShape(dp=world), "sharded"'),
            "which fits,",
        ),
        "never sharded": (
            changed('in ("overlapped", "sharded") => in ("overlapped",)'),
            "little room: dp 1, pp 2, tp 2",
        ),
        "plain time": (
            changed("micro_batch, cluster, how => micro_batch, cluster"),
            "which fits,",
        ),
        "too few ranks": (
            changed('return best => return GridShape(tp=2), "overlapped"'),
            "there are 4",
        ),
        "heads not looked at": (
            changed("or model.num_heads % tp or => or"),
            "does not divide 1 head",
        ),
        "layers not looked at": (
            changed("or model.num_layers % pp => "),
            "does not divide",
        ),
        "batch not looked at": (changed(f"{OF_BATCH} => False"), "cannot be cut"),
        "micro-batch not looked at": (
            changed(f"{OF_BATCH} => global_batch % dp"),
            "cannot be cut",
        ),
        "the rest of the local batch": (
            changed(f"{OF_BATCH} => global_batch // dp % micro_batch"),
            "cannot be cut",
        ),
        "room not looked at": (changed(f"{OF_ROOM} => False"), "a rank needs"),
        "room shared over everything": (
            changed("tp * (dp if how == => tp * dp * pp if True else (dp if how =="),
            "a rank needs",
        ),
        "room for the whole model": (
            changed("parameters / parts_of_model => parameters"),
            "which rule is too strict",
        ),
        "18 bytes": (changed("16 * model => 18 * model"), "which rule is too strict"),
        "sizes of 1, 2 and 4": (
            changed(", 8, 16, 32, 64) => )"),
            "room for an eighth: dp 1, pp 4, tp 2",
        ),
        "a shape alone": (changed("return best => return best[0]"), "return two things"),
        "another word": (
            changed('return best => return best[0], "fsdp"'),
            'neither "overlapped" nor "sharded"',
        ),
        "sizes": (
            changed("return best => return best[0].dp, best[1]"),
            "is no GridShape",
        ),
    },
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
    wrong={
        "all ranks on one node": (
            changed('"nodes": 2 => "nodes": 1', 'per_node": 2 => per_node": 4'),
            "4 ranks per node: a node has 2 GPUs",
        ),
        "a node for each rank": (
            changed('"nodes": 2 => "nodes": 4', 'per_node": 2 => per_node": 1'),
            "4 nodes: there are 2",
        ),
        "one node": (changed('"nodes": 2 => "nodes": 1'), "leave GPUs idle"),
        "larger batch": (
            changed('global_batch": 16 => global_batch": 32'),
            "the learning rate of the recipe",
        ),
        "the hybrid of section 2": (changed('tp": 1 => tp": 2'), "cuts through the layers"),
        "a layer too few": (changed('pp": 2 => pp": 4'), "each stage needs a layer"),
        "not cut": (changed('pp": 2 => pp": 1'), "each rank holds the whole model"),
        "no stage at all": (changed('pp": 2 => pp": 0'), "pp"),
        "not a divisor": (changed('micro_batch": 1 => micro_batch": 3'), "is not a multiple"),
        "the two copies forgotten": (
            changed('micro_batch": 1 => micro_batch": 2'),
            "a copy has 4 micro-batches in a step",
        ),
        "negative": (changed('micro_batch": 1 => micro_batch": -2'), "micro_batch"),
        "text": (changed('pp": 2 => pp": "2"'), "whole numbers"),
        "a field forgotten": (
            changed('"train.micro_batch": 1, => '),
            "the form has no train.micro_batch",
        ),
        "a field too many": (
            changed('"parallel.tp": 1, => "parallel.tp": 1, "parallel.dp": 2,'),
            "no blank for parallel.dp",
        ),
        "None": (None, "my_form is None"),
        "a list": ([2, 2, 1, 2, 1, 16], "is a list, not a dict"),
    },
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
    wrong={
        "the global batch is the micro-batch": (
            changed('global_batch": 16 => global_batch": 2'),
            "the learning rate of the recipe",
        ),
        "one micro-batch": (changed('micro_batch": 2 => micro_batch": 16'), "m = 1"),
        "too large a bubble": (
            changed('micro_batch": 2 => micro_batch": 4'),
            "the bubble is 1/4 of the work, and 1/8 is allowed",
        ),
        "too many messages": (
            changed('micro_batch": 2 => micro_batch": 1'),
            "Larger ones are allowed",
        ),
        "the form of 15.4": (
            changed('tp": 2 => tp": 1', 'micro_batch": 2 => micro_batch": 1'),
            "a rank holds 1/2 of the model",
        ),
        "tp alone, over both nodes": (
            changed('tp": 2 => tp": 4', 'pp": 2 => pp": 1'),
            "two stages of layers are asked for",
        ),
        "no cut": (changed('tp": 2 => tp": 1', 'pp": 2 => pp": 1'), "1/1 of the model"),
        "pp of four": (changed('tp": 2 => tp": 1', 'pp": 2 => pp": 4'), "each stage needs a layer"),
        "one node": (changed('"nodes": 2 => "nodes": 1'), "leave GPUs idle"),
        "a field forgotten": (changed('"parallel.tp": 2, => '), "the form has no parallel.tp"),
        "None": (None, "my_hybrid is None"),
        "a list": ([2, 2, 2, 2, 2, 16], "is a list, not a dict"),
    },
)

ANSWERS = {
    "15.1": LAYOUT,
    "15.2": ITERATION,
    "15.3": BEST,
    "15.4": SCRIPT,
    "15.5": HYBRID,
}
