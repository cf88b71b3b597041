"""Checks of lesson 20, predict before you submit."""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from course.answer import Exercise, Hint, due
from course.exercises.contract import (
    ONE_NUMBER,
    Case,
    Contract,
    Mistake,
    Sign,
    alike,
    elsewhere,
)
from course.exercises.expect import plural, refuse
from course.exercises.in_notebook import LOOP, bounded, without
from course.exercises.solution import Solution
from course.labs import l20_plan as lab
from course.labs.l20_plan import Cluster, Found, Layout, Shape
from labcode.perf import estimate as perf_estimate
from labcode.perf import flops as perf_flops
from labcode.perf import layout_memory as perf_memory
from labcode.perf import plan as perf_plan
from labcode.perf import two_level
from labcode.perf.alpha_beta import Link
from labcode.perf.transformer import Transformer
from labcode.runtime.units import GIB, seconds

ROUNDING = 1e-6
CLOSE_BYTES = 4e-3  # biases and norms may count or not
CLOSE_SECONDS = 1e-4

LABCODES = (
    lab.by_labcode,
    lab.transformer,
    perf_flops.transformer_flops_per_sample,
    perf_memory.layout_memory,
    perf_estimate.step_parts,
    perf_estimate.step_seconds,
    perf_plan.plan,
    two_level.group_link,
    Transformer.of,
)
OF_A_MODEL = (lab.count_weights, lab.count_flops, lab.model)
OF_A_STEP = (lab.step_s, lab.step_parts, lab.losses, lab.search)
READY = {  # what an answer may not call besides LABCODES
    "20.1": (*OF_A_MODEL, lab.parameters),
    "20.2": (*OF_A_MODEL, lab.parameters, lab.flops),
    "20.3": (lab.memory, lab.memory_parts),
    "20.4": (lab.bus_bytes_per_s,),
    "20.5": OF_A_STEP,
}


def _asked(exercise: str, answer: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What the learner's function returns; finished versions may not be called."""
    with without(*READY[exercise], *LABCODES):
        found = bounded(LOOP, functools.partial(answer, *args, **options))
    return due(found)


def _number(exercise: str, answer: Callable[..., Any], *args: Any, **options: Any) -> float:
    found = _asked(exercise, answer, *args, **options)
    if not _is_number(found):
        raise Hint(f"return one number, not {type(found).__name__}")
    if not math.isfinite(found):
        raise Hint(f"it returned {found}")
    return float(found)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _close(found: float, truth: float, share: float = ROUNDING) -> bool:
    return math.isclose(found, truth, rel_tol=share)


def _left_out(parts: Mapping[str, float], names: Mapping[str, str]) -> dict[str, float]:
    """{names of parts: what the sum is without them}."""
    there = [name for name, value in parts.items() if value > 0]
    total = sum(parts.values())
    table = {}
    for count in range(1, len(there)):
        for missing in itertools.combinations(there, count):
            text = " and ".join(names[name] for name in missing)
            rest = total - sum(parts[name] for name in missing)
            table[text] = rest
    return table


# ---- 20.1 parameters

PLAIN = Shape(layers=3, hidden=48, heads=4, kv_heads=4, ffn=192, vocab=100, tokens=64)
BIASES_OF_ATTENTION = "hidden * qkv + qkv + hidden * hidden + hidden"
BIASES_OF_MLP = "hidden * shape.ffn + shape.ffn + shape.ffn * hidden + hidden"
CHANGES = {
    "one word more in the vocabulary": Case(
        (replace(PLAIN, vocab=101),),
        "the embedding grows; is the head a second table, or the same one?",
        "(shape.vocab + shape.tokens) => (2 * shape.vocab + shape.tokens)",
    ),
    "one token more in a sample": Case(
        (replace(PLAIN, tokens=65),),
        "which table has a row for each position?",
        "(shape.vocab + shape.tokens) => shape.vocab",
    ),
    "one feature more inside the MLP": Case(
        (replace(PLAIN, ffn=193),),
        "two matrices of each layer have it as a side, and one bias has its length",
        "shape.layers * (attention + mlp + norms) => 12 * shape.layers * hidden**2",
        (
            f"{BIASES_OF_ATTENTION} => hidden * qkv + hidden * hidden",
            f"{BIASES_OF_MLP} => 2 * hidden * shape.ffn",
        ),
        "shape.ffn => 4 * hidden",
    ),
    "two key/value heads in place of four": Case(
        (replace(PLAIN, kv_heads=2),),
        "keys and values have fewer outputs then, and queries as many as before",
        "shape.kv_heads => shape.heads",
    ),
    "one layer more": Case(
        (replace(PLAIN, layers=4),),
        "matrices, biases and two norms of a block: which of them is miscounted?",
        "4 * hidden => 2 * hidden",
    ),
}


COUNTED = [
    *CHANGES.values(),
    Mistake("after the last block", "* hidden + 2 * hidden => * hidden", when=elsewhere),
    Mistake(
        "labcode's own answer",
        "hidden = shape.hidden => return lab.transformer(shape).num_parameters",
        when=elsewhere,
    ),
]


def parameters(answer: Callable[..., Any]) -> None:
    """The learner's `parameters(shape)`."""
    base = _number("20.1", answer, PLAIN)
    truth = lab.count_weights(PLAIN)
    for change, case in CHANGES.items():
        [shape] = case.args
        grown = _number("20.1", answer, shape) - base
        expected = lab.count_weights(shape) - truth
        if grown != expected:
            raise Hint(
                f"{change} changes your number by {grown:,.0f}, and that of a real model by "
                f"{expected:,}: {case.hint}"
            )
    if base != truth:
        raise Hint(
            f"each change of a size is right, but for a model of {truth:,} weights you get "
            f"{base:,.0f}: what comes after the last block?"
        )
    for shape in (lab.SMALL, lab.GPT3, replace(PLAIN, hidden=80, heads=5, kv_heads=1)):
        found = _number("20.1", answer, shape)
        truth = lab.count_weights(shape)
        if found != truth:
            raise Hint(
                f"{shape} has {truth:,} weights, and you get {found:,.0f}: is a size fixed in your "
                "code, or one taken for another?"
            )


# ---- 20.2 FLOPs

FEW_TOKENS = replace(PLAIN, vocab=50)
TOTAL_FLOPS = "forwards_of_layers * layers + 3 * head"
HALF = "attention = attention / 2"


def _in_flops(see: Any) -> None:
    see.case += f"{see.found:,.0f} FLOPs, expected are {see.truth:,.0f}: "


FLOPS = Contract(
    Solution("20", "flops"),
    ready=(*READY["20.2"], *LABCODES),
    loops=True,
    shape=[ONE_NUMBER],
    look=_in_flops,
    tolerance=ROUNDING,
    cases={
        "the plain case, one sample: ": Case(
            (FEW_TOKENS, 1),
            "products of the layers, two products of attention, the head; backward is twice "
            "forward",
        ),
        "three samples: ": Case(
            (FEW_TOKENS, 3),
            "three samples are three times as much as one",
            "samples * shape.tokens => shape.tokens",
        ),
        "two key/value heads, and another MLP: ": Case(
            (lab.SMALL, 2),
            "lab.products(shape) knows them; is 12 h^2 in your code, or 4 h?",
            "lab.products(shape) => 12 * shape.hidden**2",
        ),
        "a causal mask: ": Case(
            (FEW_TOKENS, 1, True),
            "half of the table of scores is left; nothing else gets less",
            f"{HALF} => pass",
            f"{HALF} => {HALF}\n        tokens = tokens / 2",
        ),
        "checkpointing: ": Case(
            (FEW_TOKENS, 1, False, "full"),
            "one more forward, and of the layers alone: the head is not checkpointed",
            "+ 3 * head => + forwards_of_layers * head",
            '4 if checkpointing == "full" else 3 => 3',
        ),
        "checkpointing with a causal mask: ": Case(
            (FEW_TOKENS, 2, True, "full"), "the forward that is repeated has the mask too"
        ),
    },
    mistakes=[
        Mistake("this is a forward alone", f"{TOTAL_FLOPS} => layers + head"),
        Mistake("a multiply and an add are two FLOPs", f"{TOTAL_FLOPS} => ({TOTAL_FLOPS}) / 2"),
        Mistake(
            "the products of attention, which have no weights, are missing",
            "4 * tokens * shape.tokens * shape.hidden => 0",
        ),
        Mistake("the head is missing", "layers + 3 * head => layers"),
        Mistake(
            "of attention one of its two products is missing",
            "4 * tokens => 2 * tokens",
        ),
        Mistake(
            "the formula 6 x weights x tokens counts tables that are looked up, and no attention",
            f"{TOTAL_FLOPS} => 6 * parameters(shape) * tokens",
        ),
        Mistake(
            "labcode's own answer",
            f"{TOTAL_FLOPS} => 6 * lab.parameters(shape) * tokens",
            when=elsewhere,
        ),
    ],
)


def flops(answer: Callable[..., Any]) -> None:
    """The learner's `flops(shape, samples, causal, checkpointing)`."""
    FLOPS(answer)
    found = _number("20.2", answer, lab.SMALL, 2)
    counted = lab.count_flops(lab.SMALL, 2)
    if not _close(found, counted):
        raise Hint(f"PyTorch counts {counted:,}, and you get {found:,.0f}")


# ---- 20.3 memory

ONE = lab.GPT_7B
WORDS = replace(ONE, vocab=2_000_000)
FEW_WORDS = replace(ONE, vocab=512)
MEMORY_NAMES = {
    "states": "weights, gradients and optimizer",
    "activations": "what the layers keep",
    "passing": "what passes: logits, or a layer that is computed again",
}


MICRO_BATCHES = "global_batch // (layout.dp * layout.micro_batch)"
UNDER_WAY = "min(layout.pp, micro_batches)"
FULLER = "max(first, last)"
FIRST = "first = layers * under_way * kept + again"
WITH_ITS_LOGITS = (
    "first = layers * under_way * kept + (max(logits, again) if layout.pp == 1 else again)"
)


def _in_gb(see: Any) -> None:
    parts = lab.memory_parts(see.shape, see.layout, see.global_batch)
    see.lacks = _left_out(parts, MEMORY_NAMES)
    see.case += f": {see.found / 1e9:.2f} GB, expected are {see.truth / 1e9:.2f} GB: "


def _lacks_parts(tolerance: float) -> Sign:
    """The sign that parts of the sum are missing; `missing` is their names."""

    def sign(see: Any) -> bool:
        for names, rest in see.lacks.items():
            see.missing = names
            if not see.is_right and alike(see.found, rest, tolerance):
                return True
        return False

    return sign


MEMORY = Contract(
    Solution("20", "memory"),
    ready=(*READY["20.3"], *LABCODES),
    loops=True,
    shape=[ONE_NUMBER],
    look=_in_gb,
    tolerance=CLOSE_BYTES,
    cases={
        "one rank, one sample": Case((ONE, Layout(), 1), "which of the three terms is it?"),
        "two samples at once, four micro-batches": Case(
            (ONE, Layout(micro_batch=2), 8),
            "without a pipeline one micro-batch is done before the next one begins",
            f"{UNDER_WAY} => micro_batches",
        ),
        "four ranks of dp, no ZeRO": Case(
            (ONE, Layout(dp=4), 8), "each rank has a whole copy, and works on its own micro-batch"
        ),
        "ZeRO-1 on four ranks": Case(
            (ONE, Layout(dp=4, zero=1), 8),
            "stage 1 cuts the optimizer alone",
            "layout.zero => 0",
            "layout.zero => 3 if layout.zero else 0",
        ),
        "ZeRO-2 on four ranks": Case(
            (ONE, Layout(dp=4, zero=2), 8), "stage 2 cuts the gradients too"
        ),
        "ZeRO-3 on four ranks": Case(
            (ONE, Layout(dp=4, zero=3), 8), "stage 3 cuts everything that stays"
        ),
        "four ranks of tp": Case(
            (ONE, Layout(tp=4), 2),
            "with sequence parallelism tp cuts weights, activations and logits alike",
            "/ layout.tp => / 1",
        ),
        "four stages, 16 micro-batches": Case(
            (ONE, Layout(pp=4), 16),
            "a stage has a part of the layers; how many micro-batches are under way on the first "
            "one?",
            "layout.pp => 1",
            f"{UNDER_WAY} => 1",
        ),
        "four stages, 2 micro-batches": Case(
            (ONE, Layout(pp=4), 2),
            "no more micro-batches can be under way than there are",
            f"{UNDER_WAY} => layout.pp",
        ),
        "four stages, two replicas, 8 samples, 2 at once": Case(
            (ONE, Layout(dp=2, pp=4, micro_batch=2), 8),
            "how many micro-batches does one replica have? dp and the samples at once count in it",
            f"{MICRO_BATCHES} => global_batch",
            f"{MICRO_BATCHES} => global_batch // layout.micro_batch",
            f"{MICRO_BATCHES} => global_batch // layout.dp",
        ),
        "four stages, a vocabulary of two millions": Case(
            (WORDS, Layout(pp=4), 16),
            "then the last stage is the fullest: it has the logits, and one micro-batch under way",
            (f"{FIRST} => {WITH_ITS_LOGITS}", f"{FULLER} => first"),
        ),
        "full checkpointing": Case(
            (WORDS, Layout(micro_batch=2, checkpointing="full"), 2),
            "a layer keeps its input alone; the logits are as large as before",
            'layout.checkpointing == "full" => False',
        ),
        "full checkpointing, few words": Case(
            (FEW_WORDS, Layout(micro_batch=8, checkpointing="full"), 8),
            "while a layer is computed again, what it keeps without checkpointing is there for a "
            "moment, its input once; that or the logits, whichever is more",
        ),
        "full checkpointing in four stages, few words": Case(
            (FEW_WORDS, Layout(pp=4, micro_batch=8, checkpointing="full"), 128),
            "on the first stage a layer is computed again as well, beside all that is under way",
        ),
        "all together": Case(
            (ONE, Layout(dp=2, pp=4, tp=2, zero=1, micro_batch=2, checkpointing="full"), 64),
            "each part alone was right: which of them meet in a wrong place?",
        ),
    },
    mistakes=[
        Mistake(
            "are these bytes, and those of all weights of the rank?",
            f"states + {FULLER} => (states + {FULLER}) / 2**30",
            when=lambda see: see.found < see.truth / 100,
        ),
        Mistake(
            "the rest is right, and this is missing: {missing}",
            f"states + {FULLER} => states",
            "10 * tokens * shape.vocab / layout.tp => 0.0",
            "again = whole - kept => again = 0.0",
            "under_way * kept + again => under_way * kept",
            when=_lacks_parts(CLOSE_BYTES),
        ),
    ],
)


# ---- 20.4 the rule of two levels

BUS_CLUSTER = Cluster("check", 1e14, 80e9, 8, Link(5e-6, 200e9), Link(8e-6, 20e9))
NODES = "math.ceil(ranks / per_node)"
ON_ANOTHER = "on another cluster "
IN_MY_CODE = "is a number of the first cluster in your code?"


def _in_gb_per_s(see: Any) -> None:
    found = f"{see.found / 1e9:.2f} GB/s, expected are {see.truth / 1e9:.2f} GB/s: "
    if see.cluster is BUS_CLUSTER:
        see.case += f"8 in a node, 200 GB/s inside and 20 GB/s between: {found}"
    else:
        see.case = f"{ON_ANOTHER}({see.cluster.gpus_per_node} GPUs in a node) it gives {found}"


BUS = Contract(
    Solution("20", "bus_bytes_per_s"),
    ready=(*READY["20.4"], *LABCODES),
    loops=True,
    shape=[ONE_NUMBER],
    look=_in_gb_per_s,
    tolerance=ROUNDING,
    cases={
        "8 ranks, 1 apart, ": Case((BUS_CLUSTER, 8, 1), "one node: nothing crosses the network"),
        "4 ranks, 2 apart, ": Case(
            (BUS_CLUSTER, 4, 2),
            "neighbours that are two apart, four of them, are one node of eight",
        ),
        "2 ranks, 8 apart, ": Case(
            (BUS_CLUSTER, 2, 8),
            "one rank in each of two nodes: its own share of the adapters",
            "nodes == 1 => True",
            "cluster.gpus_per_node // stride => cluster.gpus_per_node",
        ),
        "2 ranks, 16 apart, ": Case(
            (BUS_CLUSTER, 2, 16),
            "two ranks are in two nodes at most, however far apart they are",
            f"{NODES} => math.ceil(ranks * stride / cluster.gpus_per_node)",
        ),
        "16 ranks, 8 apart, ": Case(
            (BUS_CLUSTER, 16, 8),
            "one rank in each node: every message crosses, and the rule gives the adapter's share",
        ),
        "64 ranks, 1 apart, ": Case(
            (BUS_CLUSTER, 64, 1),
            "eight ranks in each node share the crossing: who sends how much over it?",
            " * (ranks - 1) / (nodes - 1) => ",
            "(ranks - 1) / (nodes - 1) => ranks / nodes",
        ),
        "512 ranks, 1 apart, ": Case(
            (BUS_CLUSTER, 512, 1),
            "eight ranks in each node share the crossing: who sends how much over it?",
        ),
        "64 ranks, 2 apart, ": Case(
            (BUS_CLUSTER, 64, 2),
            "four ranks of the group share a node: they cross together, eight would be too many",
        ),
        "16 ranks, 1 apart, ": Case(
            (BUS_CLUSTER, 16, 1),
            "two full nodes: the rule gives more than the link inside has, which is the limit",
            "min(inside, between) => between",
        ),
        "20 ranks, 1 apart, ": Case(
            (BUS_CLUSTER, 20, 1),
            "a node that is half full is a node too",
            f"{NODES} => max(1, ranks // per_node)",
        ),
        "fewer GPUs in a node: ": Case(
            (replace(BUS_CLUSTER, gpus_per_node=4), 32, 1),
            IN_MY_CODE,
            "cluster.gpus_per_node => 8",
        ),
        "a slow network: ": Case(
            (replace(BUS_CLUSTER, between=Link(8e-6, 5e9)), 32, 1), IN_MY_CODE
        ),
        "a slow link inside: ": Case(
            (replace(BUS_CLUSTER, inside=Link(5e-6, 90e9)), 32, 1), IN_MY_CODE
        ),
    },
)


# ---- 20.5 the step

FAST = Cluster("check", 2e14, 80e9, 8, Link(5e-6, 200e9), Link(8e-6, 20e9))
SLOW = replace(FAST, between=Link(8e-6, 1e9))
STEP_NAMES = {
    "product": "the products",
    "tp": "the all-reduces of tp",
    "fsdp": "what ZeRO-3 gathers and scatters",
    "pp": "the messages between stages",
    "bubble": "the bubble",
    "dp": "what is left of the gradients' travel",
}


HIDDEN = "min(box_s, 1.5 * dp_s)"
STEP_S = "(micro_batches + pp - 1) * box_s + dp_s"
MESSAGES = "box_s += 2 * lab.send_s(cluster, layout, act / tp)"


def _all_kinds_of_steps() -> Iterator[tuple[str, Case]]:
    """What the other cases have apart from each other, in all combinations."""
    hint = "each part alone was right. For which layouts does each of your conditions hold?"
    for zero in range(4):
        for dp, pp, tp in itertools.product((1, 8), (1, 2, 4), (1, 2)):
            for checkpointing, cluster in itertools.product(("none", "full"), (FAST, SLOW)):
                layout = Layout(dp, pp, tp, zero, checkpointing=checkpointing)
                speed = "a fast" if cluster is FAST else "a slow"
                yield (
                    f"{layout} over {speed} network: ",
                    Case((ONE, layout, 16 * dp, cluster), hint),
                )


def _in_seconds(see: Any) -> None:
    layout = see.layout
    see.boxes = see.global_batch // (layout.dp * layout.micro_batch) + layout.pp - 1
    parts = lab.step_parts(see.shape, layout, see.global_batch, see.cluster)
    see.lacks = _left_out(parts, STEP_NAMES)
    see.case += f"{see.found:.5g} s, expected are {see.truth:.5g} s: "


STEP = Contract(
    Solution("20", "step_s"),
    ready=(*READY["20.5"], *LABCODES),
    loops=True,
    shape=[ONE_NUMBER],
    look=_in_seconds,
    tolerance=CLOSE_SECONDS,
    cases={
        "one GPU, one sample: ": Case(
            (ONE, Layout(), 1, FAST), "FLOPs of the samples over the rate of a GPU"
        ),
        "two samples at once, four micro-batches: ": Case(
            (ONE, Layout(micro_batch=2), 8, FAST),
            "how many micro-batches does a replica work on, one after the other?",
            "global_batch // (dp * micro_batch) => 1",
        ),
        "full checkpointing: ": Case(
            (ONE, Layout(checkpointing="full"), 2, FAST),
            "the forward that is repeated takes time too",
            "checkpointing=checkpointing => checkpointing='none'",
        ),
        "tp = 8: ": Case(
            (ONE, Layout(tp=8), 4, FAST),
            "all-reduces of a micro-batch's activations: two forward and two backward in each "
            "layer",
        ),
        "tp = 8, full checkpointing: ": Case(
            (ONE, Layout(tp=8, checkpointing="full"), 4, FAST),
            "a forward that is repeated has its two all-reduces again",
            '6 if checkpointing == "full" else 4 => 4',
        ),
        "pp = 4, 16 micro-batches: ": Case(
            (ONE, Layout(pp=4), 16, FAST),
            "m micro-batches and pp - 1 of the bubble, each with the time of one stage and two "
            "messages",
        ),
        "pp = 4 over nodes, tp = 8: ": Case(
            (ONE, Layout(pp=4, tp=8, micro_batch=2), 16, FAST),
            "a stage has a part of the layers' all-reduces, and a rank of tp sends its part",
            "shape.layers / pp => shape.layers",
            "act / tp => act",
        ),
        "dp = 8 in a node: ": Case(
            (ONE, Layout(dp=8), 16, FAST),
            "each replica has its share of the samples; one all-reduce of all gradients, 2 bytes "
            "each, which the last backward can hide; what is hidden costs 15 % of its time",
            "dp_s += 0.15 * hidden_s - hidden_s => pass",
            "* box_s + dp_s => * box_s + micro_batches * dp_s",
        ),
        "dp = 16 over a slow network: ": Case(
            (ONE, Layout(dp=16), 32, SLOW),
            "the last backward hides no more than its own length, two thirds of the products of "
            "one micro-batch",
            "2 / 3 * products_s => 2 / 3 * products_s * micro_batches",
        ),
        "dp = 8 in a node, ZeRO-1: ": Case(
            (ONE, Layout(dp=8, zero=1), 16, FAST),
            "the reduce-scatter of ZeRO-1, half of the travel, can hide; the gather of new "
            "weights comes after the optimizer",
            "dp_s if zero == 0 else dp_s / 2 => dp_s",
        ),
        "dp = 2, tp = 8: ": Case(
            (ONE, Layout(dp=2, tp=8), 16, FAST),
            "the ranks of dp are tp apart, and each has a part of the gradients",
            "cluster, dp, tp, => cluster, dp, 1,",
            "lab.parameters(shape) / (tp * pp) => lab.parameters(shape)",
        ),
        "dp = 4, pp = 4, tp = 2: ": Case(
            (ONE, Layout(4, 4, 2, 1), 64, FAST),
            "each part alone was right: where do they meet? The gradients of a rank are those of "
            "its stage; ZeRO-1 sends as much as no ZeRO, and hides half of it",
        ),
        "ZeRO-3 on 8 ranks, all hidden: ": Case(
            (ONE, Layout(dp=8, zero=3, micro_batch=2), 16, FAST),
            "1.5 all-reduces a micro-batch, hidden; the hidden part costs 15 % of its time, and "
            "nothing is left to do at the end",
            "zero == 3 => False",
            f"{HIDDEN} => 0.0",
        ),
        "ZeRO-3 over a slow network: ": Case(
            (ONE, Layout(dp=16, zero=3), 32, SLOW),
            "only as much can hide as there is to compute in a micro-batch; the rest counts "
            "whole, in every micro-batch",
            f"{HIDDEN} => 1.5 * dp_s",
        ),
        "ZeRO-3 with tp = 2: ": Case(
            (ONE, Layout(dp=16, tp=2, zero=3), 32, FAST),
            "weights travel behind the products and behind tp's communication as well",
        ),
        "ZeRO-3 with tp = 2, over a slow network: ": Case(
            (ONE, Layout(dp=16, tp=2, zero=3), 32, SLOW),
            "weights travel behind the products and behind tp's all-reduces: how much is hidden "
            "then?",
            f"{HIDDEN} => min(products_s, 1.5 * dp_s)",
        ),
        **dict(_all_kinds_of_steps()),
    },
    mistakes=[
        Mistake(
            "the rest is right, and this is missing: {missing}",
            f"{STEP_S} => micro_batches * products_s",
            "micro_batches + pp - 1 => micro_batches",
            "dp_s += 0.15 * hidden_s - hidden_s => dp_s -= hidden_s",
            when=_lacks_parts(CLOSE_SECONDS),
        ),
        Mistake(
            "the step is one box too long: {boxes} boxes are all",
            "(micro_batches + pp - 1) => (micro_batches + pp)",
        ),
        Mistake(
            "the messages between stages are in it, and there is one stage only",
            "if pp > 1: => if True:",
        ),
        Mistake(
            "there are 6 all-reduces in each layer, and without checkpointing there are 4. "
            '`layout.checkpointing` is a text, and "none" counts as true in an `if`',
            'if checkpointing == "full" => if checkpointing',
        ),
        Mistake("pp=2, tp=1, zero=0", "if pp > 1: => if pp > 2:", when=elsewhere),
        Mistake("zero=2, micro_batch=1", "if zero == 3: => if zero >= 2:", when=elsewhere),
        Mistake(
            "each part alone was right",
            (
                f"    if pp > 1:\n        {MESSAGES}\n    return =>     return",
                "    dp_s = lab.all_reduce_s =>     if pp > 1:\n"
                f"        {MESSAGES}\n    dp_s = lab.all_reduce_s",
            ),
            when=elsewhere,
        ),
    ],
)


# ---- 20.6 the search

NARROW = replace(lab.GPT_7B, kv_heads=4, layers=30)
SEARCH_CASES = (
    ("selene", lab.GPT_7B, 16, 32),
    ("perlmutter", lab.GPT_7B, 16, 24),
    ("selene", NARROW, 48, 96),
    ("selene", replace(NARROW, ffn=11006), 8, 8),  # 4 divides the heads, and not the MLP
)


def search(answer: Callable[..., Any]) -> None:
    """The learner's `search(shape, cluster, gpus, global_batch)`."""
    for name, shape, gpus, batch in SEARCH_CASES:
        cluster = lab.cluster(name)
        case = f"{gpus} GPUs of {name}, batch {batch}: "
        ready = (lab.search, lab.legal, perf_plan.plan, lab.by_labcode)
        with _asked_for_memory_first(case, gpus), without(*ready):
            returned = bounded(LOOP, answer, shape, cluster, gpus, batch)
        found = _entries(due(returned), case)
        truth = {entry.layout: entry for entry in lab.search(shape, cluster, gpus, batch)}
        layouts = [entry.layout for entry in found]
        different = set(layouts)
        for layout in layouts:
            if layout not in truth:
                why_not = _why_not(shape, cluster, gpus, batch, layout)
                refuse(why_not, f"{case}{layout} is in your list: ")
        refuse({"a layout is in your list twice": len(different) < len(layouts)}, case)
        missing = [layout for layout in truth if layout not in different]
        number = f"{plural(len(layouts), 'layout')}, expected are {len(truth)}: "
        refuse(_about_missing(missing, layouts), case + number)
        for entry in found:
            right = truth[entry.layout]
            mistakes = {
                f"{entry.step_s:.4g} as its first number, expected are {right.step_s:.4g} s: "
                "seconds come first": not _close(entry.step_s, right.step_s),
                f"{entry.memory_bytes:.4g} as its second number, expected are "
                f"{right.memory_bytes:.4g} bytes: without what is reserved": (
                    not _close(entry.memory_bytes, right.memory_bytes)
                ),
            }
            refuse(mistakes, f"{case}{entry.layout} has ")
        times = [entry.step_s for entry in found]
        refuse({"the fastest layout comes first, the slowest last": times != sorted(times)}, case)


@contextlib.contextmanager
def _asked_for_memory_first(case: str, gpus: int) -> Iterator[None]:
    """In this block `lab.step_s` refuses a layout that does not fit.

    Raises:
        Hint: The time of such a layout was asked for.
    """
    step_s = lab.step_s

    def of_what_fits(shape: Shape, layout: Layout, global_batch: int, cluster: Cluster) -> float:
        needed = lab.memory(shape, layout, global_batch)
        if needed + lab.RESERVED_BYTES > cluster.memory_bytes:
            why_not = _why_not(shape, cluster, gpus, global_batch, layout)
            about = f"{case}you compute the time of {layout}, which is to be left out before that: "
            refuse(why_not, about)
        return step_s(shape, layout, global_batch, cluster)

    lab.step_s = of_what_fits
    try:
        yield
    finally:
        lab.step_s = step_s


def _entries(found: Any, case: str) -> list[Found]:
    """The learner's list, whatever its entries are made of."""
    if not isinstance(found, Sequence) or isinstance(found, str):
        raise Hint(f"{case}return a list, not {type(found).__name__}")
    if not found:
        raise Hint(f"{case}your list is empty, and there are layouts that fit")
    entries = []
    for entry in found:
        if not isinstance(entry, tuple | list) or len(entry) != 3:
            raise Hint(
                f"{case}each entry is (seconds, bytes, layout), and one of yours is "
                f"{type(entry).__name__}"
            )
        step_s, memory_bytes, layout = entry
        if not isinstance(layout, tuple) or len(layout) != 6:
            raise Hint(f"{case}the third of an entry is a Layout, and one of yours is {layout!r}")
        if not _is_number(step_s) or not _is_number(memory_bytes):
            raise Hint(f"{case}an entry begins with two numbers, and one of yours is {entry!r}")
        entries.append(Found(step_s, memory_bytes, Layout(*layout)))
    return entries


def _why_not(
    shape: Shape, cluster: Cluster, gpus: int, batch: int, layout: Layout
) -> dict[str, bool]:
    """Rows of a table: why a layout is none of those that are legal and fit."""
    dp, pp, tp, zero, micro_batch, checkpointing = layout
    needed = lab.memory(shape, layout, batch)
    return {
        f"dp * pp * tp is {dp * pp * tp}, and there are {gpus} GPUs": dp * pp * tp != gpus,
        "a tp group must stay in one node": tp > cluster.gpus_per_node,
        "tp must divide the key/value heads": shape.kv_heads % tp != 0,
        "tp must divide the features of the MLP": shape.ffn % tp != 0,
        "every stage must have as many layers as the others": shape.layers % pp != 0,
        "dp * micro_batch must divide the batch": batch % (dp * micro_batch) != 0,
        "that stage of ZeRO is not among those of the task": (
            zero not in lab.stages_of_zero(dp, pp)
        ),
        'checkpointing is "none" or "full"': checkpointing not in ("none", "full"),
        f"it needs {needed / GIB:.0f} GiB of {cluster.memory_bytes / GIB:.0f}": (
            needed > cluster.memory_bytes
        ),
        "it fits alone, but not beside what is reserved (lab.RESERVED_BYTES)": True,
    }


def _about_missing(missing: Sequence[Layout], layouts: Sequence[Layout]) -> dict[str, bool]:
    """Rows of a table: a value of one choice that no layout of the learner's has, or a layout."""
    table = {}
    for name in ("tp", "pp", "zero", "micro_batch", "checkpointing", "dp"):
        seen = {getattr(layout, name) for layout in layouts}
        for layout in missing:
            value = getattr(layout, name)
            table[f"none of yours has {name} = {value!r}"] = value not in seen
    for layout in missing[:1]:
        table[f"for example {layout} is missing"] = True
    return table


ASK = "needed = lab.memory(shape, layout, global_batch)"
TIME = "seconds = lab.step_s(shape, layout, global_batch, cluster)"
MICRO_BATCH_SIZES = "lab.divisors(global_batch // dp)"
POWERS = f"{{1, 2, 4, 8, 16}} & {{*{MICRO_BATCH_SIZES}}}"
SEARCHED = {  # a part of the hint: examples
    "must stay in one node": ["tp > cluster.gpus_per_node or shape => shape"],
    "divide the key/value heads": ["shape.kv_heads % tp or shape.ffn => shape.ffn"],
    "the features of the MLP": [" or shape.ffn % tp: => :"],
    "is to be left out before that": [f"{ASK} => {TIME}\n{24 * ' '}{ASK}"],
    "every stage must": ["shape.layers % pp or global => global"],
    "beside what is": ["needed + lab.RESERVED_BYTES => needed"],
    "left out before that: it needs": [
        "needed + lab.RESERVED_BYTES > cluster.memory_bytes => False"
    ],
    "is not among those": ["lab.stages_of_zero(dp, pp) => range(4)"],
    "none of yours has zero": ["lab.stages_of_zero(dp, pp) => (0,)"],
    "none of yours has micro_batch": [
        f"{MICRO_BATCH_SIZES} => [1]",
        f"{MICRO_BATCH_SIZES} => {POWERS}",
    ],
    "none of yours has checkpoint": ['"none", "full" => "none",'],
    "the fastest layout comes first": ["sorted(found) => found"],
    "seconds come first": ["(seconds, needed, layout) => (needed, seconds, layout)"],
    "each entry is (seconds, bytes, layout)": ["(seconds, needed, layout) => layout"],
    "1 layout, expected": ["sorted(found) => sorted(found)[:1]"],
}


# ---- 20.7 a plan

TASK = {"cluster": "jean-zay-a100", "gpus": 128, "global_batch": 512}
TASK_SHAPE = lab.GPT_39B
# Beside what is reserved. The fastest layout does not fit by 1.4 GiB, so that whoever forgets what
# is reserved, or takes GB for GiB, chooses it.
SPARE_BYTES = 22 * GIB
MOST_REGRET = 0.03


def proposal(layout: Any, memory_gib: Any, limit: Any, lost_share: Any) -> None:
    """The learner's plan for the task, and its defence."""
    layout, memory_gib, limit, lost_share = due(layout, memory_gib, limit, lost_share)
    limits = list(dict.fromkeys(lab.LIMITS.values()))
    is_layout = isinstance(layout, tuple) and len(layout) == 6
    mistakes = {
        "`layout` is to be a lab.Layout": not is_layout,
        "`memory_gib` is to be a number": not _is_number(memory_gib),
        f"`limit` is one of {', '.join(limits)}, and not {limit!r}": limit not in limits,
        "`lost_share` is to be a number": not _is_number(lost_share),
    }
    refuse(mistakes)
    layout = Layout(*layout)
    cluster = lab.cluster(TASK["cluster"])
    gpus = TASK["gpus"]
    batch = TASK["global_batch"]
    if layout not in lab.legal(TASK_SHAPE, cluster, gpus, batch):
        refuse(_why_not(TASK_SHAPE, cluster, gpus, batch, layout), "legal: no. ")
    needed = lab.memory(TASK_SHAPE, layout, batch)
    room = cluster.memory_bytes - lab.RESERVED_BYTES - SPARE_BYTES
    step_s = lab.step_s(TASK_SHAPE, layout, batch, cluster)
    fitting = lab.search(TASK_SHAPE, cluster, gpus, batch)
    best_s = min(entry.step_s for entry in fitting if entry.memory_bytes <= room)
    regret = step_s / best_s - 1
    lost = lab.losses(TASK_SHAPE, layout, batch, cluster)
    most_s = max(lost.values())
    mistakes = {
        f"legal: yes. Fits: no. It needs {needed / GIB:.1f} GiB, and beside what is reserved and "
        f"{SPARE_BYTES / GIB:.0f} GiB to spare there are {room / GIB:.1f} GiB": needed > room,
        f"legal: yes. Fits: yes. Fast: no. It takes {regret:.0%} longer than another one that fits "
        "with as much to spare": regret > MOST_REGRET,
        f"legal, fits, fast: yes. Memory: you say {memory_gib:.4g} GiB, and this layout needs "
        "another amount. In GiB (2**30 bytes), and without what is reserved?": (
            not _close(memory_gib, needed / GIB, 0.02)
        ),
        f"legal, fits, fast, memory: yes. Limit: no. {limit} costs {seconds(lost[limit])}, and "
        "something else costs more": lost[limit] < most_s,
        f"all but one line: yes. Share: {limit} takes another part of this step than "
        f"{lost_share:.4g} (1 is all of it)": abs(lost_share - most_s / step_s) > 0.01,
    }
    refuse(mistakes)


EXERCISES = {
    "20.1": Exercise(
        check=parameters,
        mistakes=COUNTED,
        praise="the number of weights of a real model, for every shape",
        hints=(
            "Go through a block in the order of the table: which matrices are there, and how many "
            "rows and columns has each?",
            "Every product has a bias with as many numbers as the product has outputs. A norm has "
            "a weight and a bias.",
            "What is outside of the blocks: two tables that are looked up, and a last norm. Is the "
            "head a matrix of its own?",
        ),
    ),
    "20.2": Exercise(
        check=flops,
        mistakes=FLOPS.rows,
        praise="equal to what PyTorch counts, and to the published formula",
        hints=(
            "A product of n tokens with a matrix of w weights takes 2 n w FLOPs. How many weights "
            "of the layers take part in one, and how many of the head?",
            "Attention has two products of its own in each layer, and no weights in them: "
            "tokens by tokens, for every feature.",
            "Which of the terms does a checkpointed backward compute once more?",
        ),
    ),
    "20.3": Exercise(
        check=MEMORY,
        mistakes=MEMORY.rows,
        praise="every term, on the fullest stage, for every layout",
        hints=(
            "Begin with one rank. Three terms: states, activations of all layers, what passes.",
            "Then go through the arguments of the layout one by one: which of the three terms does "
            "each of them cut?",
            "Compute the first and the last stage, and return the larger of the two.",
        ),
    ),
    "20.4": Exercise(
        check=BUS,
        mistakes=BUS.rows,
        praise="the rule of two levels, wherever the ranks of a group sit",
        hints=(
            "How many ranks of the group share a node? Their neighbours are `stride` ranks apart.",
            "The ring leaves a node once for each node that it touches. Which of the two links is "
            "the slower one then?",
        ),
    ),
    "20.5": Exercise(
        check=STEP,
        mistakes=STEP.rows,
        praise="each part of the step, and what hides behind what",
        hints=(
            "Write the time of one micro-batch on one stage first, as a sum of four terms.",
            "How many such times pass from the first forward to the last backward? Lesson 12 has "
            "the formula.",
            "With ZeRO-3 there is nothing to do after the last backward, but in every micro-batch.",
        ),
    ),
    "20.6": Exercise(
        check=search,
        mistakes=[Mistake(hint, *like, when=elsewhere) for hint, like in SEARCHED.items()],
        praise="every legal layout that fits, the fastest first",
        hints=(
            "Nested loops: tp, then pp, then what is left is dp. lab.divisors(n) gives the "
            "divisors of a number.",
            "Ask whether a layout fits before you compute its time.",
            "Compare your number of layouts with the one in the message: which loop is too short?",
        ),
    ),
    "20.7": Exercise(
        check=proposal,
        praise="it fits, it is fast, and you can say what it loses and where",
        hints=(
            "Your search gives a list. Which entries leave the memory that the task asks for?",
            "lab.losses(shape, layout, global_batch, cluster) gives seconds for each limit.",
        ),
    ),
}
