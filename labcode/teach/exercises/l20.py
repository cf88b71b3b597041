"""Checks of lesson 20, predict before you submit. The text of each assertion is a hint."""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from labcode.perf import estimate as perf_estimate
from labcode.perf import flops as perf_flops
from labcode.perf import layout_memory as perf_memory
from labcode.perf import plan as perf_plan
from labcode.perf import two_level
from labcode.perf.alpha_beta import Link
from labcode.perf.transformer import Transformer
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import without
from labcode.teach.labs import l20_plan as lab
from labcode.teach.labs.l20_plan import Cluster, Found, Layout, Shape
from labcode.units import GIB, seconds

CLOSE = 4e-3  # biases and norms may count or not

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


def _asked(exercise: str, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What the learner's function returns; finished versions may not be called."""
    with without(*READY[exercise], *LABCODES):
        found = answer(*args, **kwargs)
    return due(found)


def _number(exercise: str, answer: Callable[..., Any], *args: Any, **kwargs: Any) -> float:
    found = _asked(exercise, answer, *args, **kwargs)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    assert is_number, f"return one number, not {type(found).__name__}"
    assert math.isfinite(found), f"it returned {found}"
    return float(found)


# ---- 20.1 parameters

PLAIN = Shape(layers=3, hidden=48, heads=4, kv_heads=4, ffn=192, vocab=100, tokens=64)


def parameters(answer: Callable[..., Any]) -> None:
    """The learner's `parameters(shape)`."""
    changes = {
        "one word more in the vocabulary": (
            replace(PLAIN, vocab=101),
            "the embedding grows; is the head a second table, or the same one?",
        ),
        "one token more in a sample": (
            replace(PLAIN, tokens=65),
            "which table has a row for each position?",
        ),
        "one feature more inside the MLP": (
            replace(PLAIN, ffn=193),
            "two matrices of each layer have it as a side, and one bias has its length",
        ),
        "two key/value heads in place of four": (
            replace(PLAIN, kv_heads=2),
            "keys and values have fewer outputs then, and queries as many as before",
        ),
        "one layer more": (
            replace(PLAIN, layers=4),
            "matrices, biases and two norms of a block: which of them is miscounted?",
        ),
    }
    base = _number("20.1", answer, PLAIN)
    due_base = lab.count_weights(PLAIN)
    for what, (shape, hint) in changes.items():
        grown = _number("20.1", answer, shape) - base
        expected = lab.count_weights(shape) - due_base
        assert grown == expected, (
            f"{what} changes your number by {grown:,.0f}, and that of a real model by "
            f"{expected:,}: {hint}"
        )
    assert base == due_base, (
        f"each change of a size is right, but a model of {due_base:,} weights gets {base:,.0f}: "
        "what lies behind the last block?"
    )
    for shape in (lab.SMALL, lab.GPT3, replace(PLAIN, hidden=80, heads=5, kv_heads=1)):
        found = _number("20.1", answer, shape)
        assert found == lab.count_weights(shape), (
            f"{shape} has {lab.count_weights(shape):,} weights, and you get {found:,.0f}: is a "
            "size fixed in your code, or one taken for another?"
        )


# ---- 20.2 FLOPs


def flops(answer: Callable[..., Any]) -> None:
    """The learner's `flops(shape, samples, causal, checkpointing)`."""
    small = replace(PLAIN, vocab=50)
    _of_flops(answer, "the plain case, one sample", small, 1, {}, _about_plain_flops)
    _of_flops(answer, "three samples", small, 3, {}, "three samples are three times as much as one")
    _of_flops(
        answer,
        "two key/value heads, and another MLP",
        lab.SMALL,
        2,
        {},
        "lab.products(shape) knows them; is 12 h^2 in your code, or 4 h?",
    )
    _of_flops(
        answer,
        "a causal mask",
        small,
        1,
        {"causal": True},
        "half of the table of scores is left; nothing else gets less",
    )
    _of_flops(
        answer,
        "checkpointing",
        small,
        1,
        {"checkpointing": "full"},
        "one more forward, and of the layers alone: the head is not checkpointed",
    )
    _of_flops(
        answer,
        "checkpointing with a causal mask",
        small,
        2,
        {"causal": True, "checkpointing": "full"},
        "the forward that is repeated has the mask too",
    )
    counted = lab.count_flops(lab.SMALL, 2)
    found = _number("20.2", answer, lab.SMALL, 2)
    assert math.isclose(found, counted), f"PyTorch counts {counted:,}, and you get {found:,.0f}"


def _of_flops(
    answer: Callable[..., Any],
    case: str,
    shape: Shape,
    samples: int,
    options: Mapping[str, Any],
    hint: str | Callable[[Shape, float], str],
) -> None:
    found = _number("20.2", answer, shape, samples, **options)
    expected = lab.flops(shape, samples, **options)
    if math.isclose(found, expected, rel_tol=1e-9):
        return
    text = hint if isinstance(hint, str) else hint(shape, found)
    raise AssertionError(f"{case}: {found:,.0f} FLOPs, and {expected:,.0f} are due: {text}")


def _about_plain_flops(shape: Shape, found: float) -> str:
    tokens = shape.tokens
    layers = 2 * tokens * shape.layers * lab.products(shape)
    attention = shape.layers * 4 * tokens**2 * shape.hidden
    head = 2 * tokens * shape.vocab * shape.hidden
    known = {
        "this is a forward alone": layers + attention + head,
        "a multiply and an add are two FLOPs": 1.5 * (layers + attention + head),
        "the products of attention, which have no weights, are missing": 3 * (layers + head),
        "the head is missing": 3 * (layers + attention),
        "of attention one of its two products is missing": 3 * (layers + attention / 2 + head),
        "the formula 6 x weights x tokens counts tables that are looked up, and no attention": (
            6 * tokens * lab.parameters(shape)
        ),
    }
    for hint, value in known.items():
        if math.isclose(found, value, rel_tol=1e-6):
            return hint
    return "products of the layers, two products of attention, the head; backward is twice forward"


# ---- 20.3 memory

ONE = lab.GPT_7B
WORDS = replace(ONE, vocab=2_000_000)
FEW_WORDS = replace(ONE, vocab=512)
MEMORY_CASES = (
    ("one rank, one sample", ONE, Layout(), 1, "which of the three terms is it?"),
    (
        "two samples at once, four micro-batches",
        ONE,
        Layout(micro_batch=2),
        8,
        "without a pipeline one micro-batch is done before the next one begins",
    ),
    (
        "four ranks of dp, no ZeRO",
        ONE,
        Layout(dp=4),
        8,
        "each rank has a whole copy, and works on its own micro-batch",
    ),
    ("ZeRO-1 on four ranks", ONE, Layout(dp=4, zero=1), 8, "stage 1 cuts the optimizer alone"),
    ("ZeRO-2 on four ranks", ONE, Layout(dp=4, zero=2), 8, "stage 2 cuts the gradients too"),
    ("ZeRO-3 on four ranks", ONE, Layout(dp=4, zero=3), 8, "stage 3 cuts everything that stays"),
    (
        "four ranks of tp",
        ONE,
        Layout(tp=4),
        2,
        "with sequence parallelism tp cuts weights, activations and logits alike",
    ),
    (
        "four stages, 16 micro-batches",
        ONE,
        Layout(pp=4),
        16,
        "a stage has a part of the layers; how many micro-batches are under way on the first one?",
    ),
    (
        "four stages, 2 micro-batches",
        ONE,
        Layout(pp=4),
        2,
        "no more micro-batches can be under way than there are",
    ),
    (
        "four stages, two replicas, 8 samples, 2 at once",
        ONE,
        Layout(dp=2, pp=4, micro_batch=2),
        8,
        "how many micro-batches does one replica have? dp and the samples at once count in it",
    ),
    (
        "four stages, a vocabulary of two millions",
        WORDS,
        Layout(pp=4),
        16,
        "then the last stage is the fullest: it has the logits, and one micro-batch under way",
    ),
    (
        "full checkpointing",
        WORDS,
        Layout(micro_batch=2, checkpointing="full"),
        2,
        "a layer keeps its input alone; the logits are as large as before",
    ),
    (
        "full checkpointing, few words",
        FEW_WORDS,
        Layout(micro_batch=8, checkpointing="full"),
        8,
        "while a layer is computed again, what it keeps without checkpointing is there for a "
        "moment, its input once; that or the logits, whichever is more",
    ),
    (
        "all together",
        ONE,
        Layout(dp=2, pp=4, tp=2, zero=1, micro_batch=2, checkpointing="full"),
        64,
        "each part alone was right: which of them meet in a wrong place?",
    ),
)
MEMORY_NAMES = {
    "states": "weights, gradients and optimizer",
    "activations": "what the layers keep",
    "passing": "what passes: logits, or a layer that is computed again",
}


def memory(answer: Callable[..., Any]) -> None:
    """The learner's `memory(shape, layout, global_batch)`."""
    for case, shape, layout, batch, hint in MEMORY_CASES:
        found = _number("20.3", answer, shape, layout, batch)
        parts = lab.memory_parts(shape, layout, batch)
        expected = sum(parts.values())
        if math.isclose(found, expected, rel_tol=CLOSE):
            continue
        missing = _missing(found, parts, MEMORY_NAMES)
        if found < expected / 100:
            missing = "bytes are due, for all weights of the rank"
        raise AssertionError(
            f"{case}: {found / 1e9:.2f} GB, and {expected / 1e9:.2f} GB are due: {missing or hint}"
        )


def _missing(found: float, parts: Mapping[str, float], names: Mapping[str, str]) -> str:
    """Which parts are left out, if the sum of the others is what was found."""
    used = [name for name, value in parts.items() if value > 0]
    total = sum(parts.values())
    for count in range(1, len(used)):
        for left_out in itertools.combinations(used, count):
            rest = total - sum(parts[name] for name in left_out)
            if math.isclose(found, rest, rel_tol=1e-4):
                text = " and ".join(names[name] for name in left_out)
                return f"the rest is right, and this is missing: {text}"
    return ""


# ---- 20.4 the rule of two levels

BUS_CLUSTER = Cluster("check", 1e14, 80e9, 8, Link(5e-6, 200e9), Link(8e-6, 20e9))
BUS_CASES = (
    (8, 1, "one node: nothing crosses the network"),
    (4, 2, "neighbours that are two apart, four of them, are one node of eight"),
    (2, 8, "one rank in each of two nodes: its own share of the adapters"),
    (2, 16, "two ranks are in two nodes at most, however far apart they are"),
    (16, 8, "one rank in each node: every message crosses, and the rule gives the adapter's share"),
    (64, 1, "eight ranks in each node share the crossing: who sends how much over it?"),
    (512, 1, "eight ranks in each node share the crossing: who sends how much over it?"),
    (64, 2, "four ranks of the group share a node: they cross together, eight would be too many"),
    (16, 1, "two full nodes: the rule gives more than the link inside has, which is the limit"),
    (20, 1, "a node that is half full is a node too"),
)


def bus(answer: Callable[..., Any]) -> None:
    """The learner's `bus_bytes_per_s(cluster, ranks, stride)`."""
    for ranks, stride, hint in BUS_CASES:
        found = _number("20.4", answer, BUS_CLUSTER, ranks, stride)
        expected = lab.bus_bytes_per_s(BUS_CLUSTER, ranks, stride)
        assert math.isclose(found, expected, rel_tol=1e-6), (
            f"{ranks} ranks, {stride} apart, 8 in a node, 200 GB/s inside and 20 GB/s between: "
            f"{found / 1e9:.2f} GB/s, and {expected / 1e9:.2f} GB/s are due: {hint}"
        )
    for other in (
        replace(BUS_CLUSTER, gpus_per_node=4),
        replace(BUS_CLUSTER, between=Link(8e-6, 5e9)),
        replace(BUS_CLUSTER, inside=Link(5e-6, 90e9)),
    ):
        found = _number("20.4", answer, other, 32, 1)
        expected = lab.bus_bytes_per_s(other, 32, 1)
        assert math.isclose(found, expected, rel_tol=1e-6), (
            f"on another cluster ({other.gpus_per_node} GPUs in a node) it gives "
            f"{found / 1e9:.2f} GB/s, and {expected / 1e9:.2f} GB/s are due: is a number of the "
            "first cluster in your code?"
        )


# ---- 20.5 the step

FAST = Cluster("check", 2e14, 80e9, 8, Link(5e-6, 200e9), Link(8e-6, 20e9))
SLOW = replace(FAST, between=Link(8e-6, 1e9))
STEP_CASES = (
    ("one GPU, one sample", Layout(), 1, FAST, "FLOPs of the samples over the rate of a GPU"),
    (
        "two samples at once, four micro-batches",
        Layout(micro_batch=2),
        8,
        FAST,
        "how many micro-batches does a replica work on, one after the other?",
    ),
    (
        "full checkpointing",
        Layout(checkpointing="full"),
        2,
        FAST,
        "the forward that is repeated takes time too",
    ),
    (
        "tp = 8",
        Layout(tp=8),
        4,
        FAST,
        "all-reduces of a micro-batch's activations: two forward and two backward in each layer",
    ),
    (
        "tp = 8, full checkpointing",
        Layout(tp=8, checkpointing="full"),
        4,
        FAST,
        "a forward that is repeated has its two all-reduces again",
    ),
    (
        "pp = 4, 16 micro-batches",
        Layout(pp=4),
        16,
        FAST,
        "m micro-batches and pp - 1 of the bubble, each with the time of one stage and two "
        "messages",
    ),
    (
        "pp = 4 over nodes, tp = 8",
        Layout(pp=4, tp=8, micro_batch=2),
        16,
        FAST,
        "a stage has a part of the layers' all-reduces, and a rank of tp sends its part",
    ),
    (
        "dp = 8 in a node",
        Layout(dp=8),
        16,
        FAST,
        "each replica has its share of the samples; one all-reduce of all gradients, 2 bytes each",
    ),
    (
        "dp = 2, tp = 8",
        Layout(dp=2, tp=8),
        16,
        FAST,
        "the ranks of dp are tp apart, and each has a part of the gradients",
    ),
    (
        "dp = 4, pp = 4, tp = 2",
        Layout(4, 4, 2, 1),
        64,
        FAST,
        "each part alone was right: where do they meet? The gradients of a rank are those of its "
        "stage; ZeRO-1 sends as much as no ZeRO",
    ),
    (
        "ZeRO-3 on 8 ranks, all hidden",
        Layout(dp=8, zero=3, micro_batch=2),
        16,
        FAST,
        "1.5 all-reduces a micro-batch, hidden; the hidden part costs 15 % of its time, and "
        "nothing is left to do at the end",
    ),
    (
        "ZeRO-3 over a slow network",
        Layout(dp=16, zero=3),
        32,
        SLOW,
        "only as much can hide as there is to compute in a micro-batch; the rest counts whole, "
        "in every micro-batch",
    ),
    (
        "ZeRO-3 with tp = 2",
        Layout(dp=16, tp=2, zero=3),
        32,
        FAST,
        "weights travel behind the products and behind tp's communication as well",
    ),
    (
        "ZeRO-3 with tp = 2, over a slow network",
        Layout(dp=16, tp=2, zero=3),
        32,
        SLOW,
        "weights travel behind the products and behind tp's all-reduces: how much is hidden then?",
    ),
)
STEP_NAMES = {
    "product": "the products",
    "tp": "the all-reduces of tp",
    "fsdp": "what ZeRO-3 gathers and scatters",
    "pp": "the messages between stages",
    "bubble": "the bubble",
    "dp": "the all-reduce of the gradients",
}


def step(answer: Callable[..., Any]) -> None:
    """The learner's `step_s(shape, layout, global_batch, cluster)`."""
    for case, layout, batch, cluster, hint in STEP_CASES:
        found = _number("20.5", answer, ONE, layout, batch, cluster)
        parts = lab.step_parts(ONE, layout, batch, cluster)
        expected = sum(parts.values())
        if math.isclose(found, expected, rel_tol=1e-4):
            continue
        text = _missing(found, parts, STEP_NAMES) or hint
        raise AssertionError(f"{case}: {found:.5g} s, and {expected:.5g} s are due: {text}")


# ---- 20.6 the search

NARROW = replace(lab.GPT_7B, kv_heads=4, layers=30)
SEARCH_CASES = (
    ("selene", lab.GPT_7B, 16, 32),
    ("perlmutter", lab.GPT_7B, 16, 24),
    ("selene", NARROW, 48, 96),
    ("selene", replace(NARROW, ffn=11006), 8, 8),  # 4 divides the heads, and not the MLP
)


@contextlib.contextmanager
def _asked_for_memory_first(case: str, gpus: int) -> Iterator[None]:
    """In this block `lab.step_s` refuses a layout that does not fit.

    Raises:
        AssertionError: The time of such a layout was asked for.
    """
    step_s = lab.step_s

    def of_what_fits(shape: Shape, layout: Layout, global_batch: int, cluster: Cluster) -> float:
        needed = lab.memory(shape, layout, global_batch)
        if needed + lab.RESERVED_BYTES > cluster.memory_bytes:
            reason = _why_not(shape, cluster, gpus, global_batch, layout)
            raise AssertionError(
                f"{case}: you compute the time of {layout}, which is to be left out before: "
                f"{reason}"
            )
        return step_s(shape, layout, global_batch, cluster)

    lab.step_s = of_what_fits
    try:
        yield
    finally:
        lab.step_s = step_s


def search(answer: Callable[..., Any]) -> None:
    """The learner's `search(shape, cluster, gpus, global_batch)`."""
    for name, shape, gpus, batch in SEARCH_CASES:
        cluster = lab.cluster(name)
        case = f"{gpus} GPUs of {name}, batch {batch}"
        forbidden = (lab.search, lab.legal, perf_plan.plan, lab.by_labcode)
        with _asked_for_memory_first(case, gpus), without(*forbidden):
            found = answer(shape, cluster, gpus, batch)
        found = _entries(due(found), case)
        expected = lab.search(shape, cluster, gpus, batch)
        layouts = [entry.layout for entry in found]
        wanted = {entry.layout: entry for entry in expected}
        for layout in layouts:
            if layout not in wanted:
                reason = _why_not(shape, cluster, gpus, batch, layout)
                raise AssertionError(f"{case}: {layout} is in your list: {reason}")
        assert len(set(layouts)) == len(layouts), f"{case}: a layout is in your list twice"
        missing = [layout for layout in wanted if layout not in set(layouts)]
        if missing:
            text = _what_is_missing(missing, layouts)
            raise AssertionError(
                f"{case}: {len(layouts)} layouts, and {len(wanted)} are due: {text}"
            )
        for entry in found:
            right = wanted[entry.layout]
            assert math.isclose(entry.step_s, right.step_s, rel_tol=1e-6), (
                f"{case}: {entry.layout} has {entry.step_s:.4g} as its first number, and "
                f"{right.step_s:.4g} s is due: seconds come first"
            )
            assert math.isclose(entry.memory_bytes, right.memory_bytes, rel_tol=1e-6), (
                f"{case}: {entry.layout} has {entry.memory_bytes:.4g} as its second number, and "
                f"{right.memory_bytes:.4g} bytes are due: without what is reserved"
            )
        times = [entry.step_s for entry in found]
        assert times == sorted(times), f"{case}: the fastest layout comes first, the slowest last"


def _entries(found: Any, case: str) -> list[Found]:
    assert isinstance(found, Sequence) and not isinstance(found, str), (
        f"{case}: return a list, not {type(found).__name__}"
    )
    assert found, f"{case}: your list is empty, and there are layouts that fit"
    entries = []
    for entry in found:
        is_triple = isinstance(entry, tuple | list) and len(entry) == 3
        assert is_triple, (
            f"{case}: each entry is (seconds, bytes, layout), and one of yours is "
            f"{type(entry).__name__}"
        )
        step_s, memory_bytes, layout = entry
        assert isinstance(layout, tuple) and len(layout) == 6, (
            f"{case}: the third of an entry is a Layout, and one of yours is {layout!r}"
        )
        entries.append(Found(step_s, memory_bytes, Layout(*layout)))
    return entries


def _why_not(shape: Shape, cluster: Cluster, gpus: int, batch: int, layout: Layout) -> str:
    dp, pp, tp, zero, micro_batch, _ = layout
    rules = (
        (dp * pp * tp == gpus, f"dp * pp * tp is {dp * pp * tp}, and there are {gpus} GPUs"),
        (tp <= cluster.gpus_per_node, "a tp group must stay in one node"),
        (shape.kv_heads % tp == 0, "tp must divide the key/value heads"),
        (shape.ffn % tp == 0, "tp must divide the features of the MLP"),
        (shape.layers % pp == 0, "every stage must have as many layers as the others"),
        (batch % (dp * micro_batch) == 0, "dp and micro-batches must divide the batch"),
        (zero in lab.stages_of_zero(dp, pp), "that stage of ZeRO is not among those of the task"),
    )
    for holds, hint in rules:
        if not holds:
            return hint
    needed = lab.memory(shape, layout, batch)
    if needed <= cluster.memory_bytes:
        return "it fits alone, but not beside what is reserved (lab.RESERVED_BYTES)"
    return f"it needs {needed / GIB:.0f} GiB of {cluster.memory_bytes / GIB:.0f}"


def _what_is_missing(missing: Iterable[Layout], layouts: Iterable[Layout]) -> str:
    """A value of one choice that no layout of the learner's has."""
    there = list(layouts)
    lacking = list(missing)
    for name in ("tp", "pp", "zero", "micro_batch", "checkpointing", "dp"):
        place = Layout._fields.index(name)
        seen = {layout[place] for layout in there}
        for layout in lacking:
            if layout[place] not in seen:
                return f"none of yours has {name} = {layout[place]!r}"
    return f"for example {lacking[0]} is missing"


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
    assert isinstance(layout, tuple) and len(layout) == 6, "`layout` is to be a lab.Layout"
    layout = Layout(*layout)
    cluster = lab.cluster(TASK["cluster"])
    gpus = TASK["gpus"]
    batch = TASK["global_batch"]
    if layout not in lab.legal(TASK_SHAPE, cluster, gpus, batch):
        reason = _why_not(TASK_SHAPE, cluster, gpus, batch, layout)
        raise AssertionError(f"legal: no. {reason}")
    needed = lab.memory(TASK_SHAPE, layout, batch)
    room = cluster.memory_bytes - lab.RESERVED_BYTES - SPARE_BYTES
    assert needed <= room, (
        f"legal: yes. Fits: no. It needs {needed / GIB:.1f} GiB, and beside what is reserved and "
        f"{SPARE_BYTES / GIB:.0f} GiB to spare there are {room / GIB:.1f} GiB"
    )
    fitting = lab.search(TASK_SHAPE, cluster, gpus, batch)
    best = min(entry.step_s for entry in fitting if entry.memory_bytes <= room)
    step_s = lab.step_s(TASK_SHAPE, layout, batch, cluster)
    regret = step_s / best - 1
    assert regret <= MOST_REGRET, (
        f"legal: yes. Fits: yes. Fast: no. It takes {regret:.0%} longer than another one that "
        "fits with as much to spare"
    )
    assert isinstance(memory_gib, int | float), "`memory_gib` is to be a number"
    assert math.isclose(memory_gib, needed / GIB, rel_tol=0.02), (
        f"legal, fits, fast: yes. Memory: you say {memory_gib:.4g} GiB, and this layout needs "
        "another amount. In GiB (2**30 bytes), and without what is reserved?"
    )
    lost = lab.losses(TASK_SHAPE, layout, batch, cluster)
    names = ", ".join(lost)
    assert limit in lost, f"`limit` is one of {names}, and not {limit!r}"
    largest = max(lost, key=lost.__getitem__)
    assert limit == largest, (
        f"legal, fits, fast, memory: yes. Limit: no. {limit} costs {seconds(lost[limit])}, and "
        "something else costs more"
    )
    assert isinstance(lost_share, int | float), "`lost_share` is to be a number"
    share = lost[largest] / step_s
    assert math.isclose(lost_share, share, abs_tol=0.01), (
        f"all but one line: yes. Share: {limit} takes another part of this step than "
        f"{lost_share:.4g} (1 is all of it)"
    )


EXERCISES = {
    "20.1": Exercise(
        check=parameters,
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
        check=memory,
        praise="every term, on the fullest stage, for every layout",
        hints=(
            "Begin with one rank. Three terms: states, activations of all layers, what passes.",
            "Then go through the arguments of the layout one by one: which of the three terms does "
            "each of them cut?",
            "Compute the first and the last stage, and return the larger of the two.",
        ),
    ),
    "20.4": Exercise(
        check=bus,
        praise="the rule of two levels, wherever the ranks of a group sit",
        hints=(
            "How many ranks of the group share a node? Their neighbours are `stride` ranks apart.",
            "The ring leaves a node once for each node that it touches. Which of the two links is "
            "the slower one then?",
        ),
    ),
    "20.5": Exercise(
        check=step,
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
