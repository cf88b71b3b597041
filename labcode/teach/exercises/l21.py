"""Checks of lesson 21, the capstone. The text of each assertion is a hint."""

import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from labcode.perf import estimate as perf_estimate
from labcode.perf import plan as perf_plan
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Cluster, load_cluster, load_gpu
from labcode.perf.estimate import Estimate
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import without
from labcode.teach.labs import l20_plan
from labcode.teach.labs import l21_capstone as lab
from labcode.teach.labs.l20_plan import Found, Layout
from labcode.teach.labs.l21_capstone import Brief
from labcode.units import GIB

ROUNDED = 0.01  # what a learner may round by, as a share
SAME_S = 1e-6  # layouts whose seconds differ by less are equally fast

PERF = (perf_estimate.estimate, perf_plan.plan)
READY = {  # what an answer may not call
    "21.1": (lab.days_and_mfu,),
    "21.2": (lab.broken_rules, lab.candidates, lab.fitting, l20_plan.legal, perf_plan.plan),
    "21.3": (lab.rivals, lab.changed),
    "21.4": (lab.verdict, lab.growth, *PERF),
}


def _asked(exercise: str, answer: Callable[..., Any], *args: Any) -> Any:
    """What the learner's function returns; finished versions may not be called."""
    with without(*READY[exercise]):
        found = answer(*args)
    return due(found)


def _layout(value: Any) -> Layout:
    """Six things as a layout; a plain tuple will do."""
    return Layout(*value)


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def _close(found: float, expected: float, share: float = ROUNDED) -> bool:
    return math.isclose(found, expected, rel_tol=share)


# ---- 21.1 days and MFU


def days_and_mfu(answer: Callable[..., Any]) -> None:
    """The learner's `days_and_mfu(brief, step_s)`."""
    shorter = dataclasses.replace(lab.GPT_70B, tokens=1024)
    cases: dict[str, tuple[Brief, float, str]] = {
        "the brief, 5 s a step": (lab.H100, 5.0, ""),
        "steps twice as long": (lab.H100, 10.0, "which of the two grows with the step?"),
        "half as many GPUs": (
            dataclasses.replace(lab.H100, gpus=512),
            5.0,
            "the same step on fewer GPUs: the days stay, and each GPU does more",
        ),
        "a batch of 256 samples": (
            dataclasses.replace(lab.H100, global_batch=256),
            2.0,
            "a smaller batch: more steps, and less work in each",
        ),
        "samples of 1,024 tokens": (
            dataclasses.replace(lab.H100, shape=shorter),
            2.0,
            "tokens of a step are samples times tokens of a sample (brief.shape.tokens)",
        ),
        "another GPU": (lab.TASK, 14.0, "its peak is brief.peak_flops_per_s"),
    }
    for case, (brief, step_s, hint) in cases.items():
        found = _asked("21.1", answer, brief, step_s)
        is_pair = isinstance(found, Sequence) and len(found) == 2
        assert is_pair and all(_is_number(value) for value in found), (
            "return two numbers, (days, mfu)"
        )
        days, mfu = found
        due_days, due_mfu = lab.days_and_mfu(brief, step_s)
        is_swapped = _close(days, due_mfu) and _close(mfu, due_days)
        assert not is_swapped, "days come first, and then MFU"
        assert _close(days, due_days), (
            f"{case}: {days:.4g} days, and {due_days:.4g} are due: "
            f"{_about_days(days / due_days) or hint}"
        )
        assert _close(mfu, due_mfu), (
            f"{case}: the days are right. An MFU of {mfu:.4g}, and {due_mfu:.4g} is due: "
            f"{_about_mfu(mfu / due_mfu, brief) or hint or BY_FLOPS}"
        )


BY_FLOPS = "`flops(shape, samples)` over what all GPUs could have done in the same time"


def _about_days(ratio: float) -> str:
    known = {
        lab.DAY_S: "these are seconds; how many has a day?",
        24: "these are hours",
        lab.H100.shape.tokens: "the budget is in tokens, and a step has samples: how many tokens?",
        lab.H100.global_batch: "a step has more than one sample",
    }
    for factor, hint in known.items():
        if _close(ratio, factor):
            return hint
    return ""


def _about_mfu(ratio: float, brief: Brief) -> str:
    known = {
        100.0: "a share, not percent",
        float(brief.gpus): "the peak is that of one GPU, and the FLOPs are those of all",
        1 / brief.global_batch: "the FLOPs of all samples of a step count",
        3.0: "flops(shape, samples) has forward and backward in it already",
    }
    for factor, hint in known.items():
        if _close(ratio, factor):
            return hint
    return ""


# ---- 21.2 the rules

RULES = {
    "gpus": "dp * pp * tp must be the number of GPUs",
    "node": "a tp group must not cross from one node into the next, so tp divides the node's GPUs",
    "heads": "tp deals out key/value heads (kv_heads), not query heads",
    "ffn": "tp deals out the features of the MLP",
    "layers": "every stage has as many layers as the others",
    "batch": "dp ranks times their micro-batch must divide the global batch",
    "memory": "the estimate must leave the margin: brief.room_bytes, not all of the GPU",
}


class _Case(NamedTuple):
    what: str
    layout: Layout
    brief: Brief


def _rule_cases() -> list[_Case]:
    base = lab.H100
    good = Layout(64, 4, 4, 1, 1, "none")
    three = dataclasses.replace(base.cluster, gpus_per_node=6)
    heads = dataclasses.replace(lab.GPT_70B, kv_heads=2)
    six_heads = dataclasses.replace(lab.GPT_70B, kv_heads=6)
    features = dataclasses.replace(lab.GPT_70B, ffn=44034)
    shallow = dataclasses.replace(lab.GPT_70B, layers=60)
    half = dataclasses.replace(base, gpus=512)
    needed = lab.predicted(good, base).memory_bytes
    return [
        _Case("a sound layout", good, base),
        _Case("another sound layout", Layout(32, 8, 4, 0, 1, "none"), base),
        _Case("too few ranks", good._replace(dp=32), base),
        _Case("tp=16 on nodes of 8", Layout(16, 4, 16, 1, 1, "none"), base),
        _Case("tp=4 on nodes of 6", good, dataclasses.replace(base, cluster=three)),
        _Case("2 key/value heads", good, dataclasses.replace(base, shape=heads)),
        _Case("6 key/value heads", good, dataclasses.replace(base, shape=six_heads)),
        _Case("an MLP of 44,034 features", good, dataclasses.replace(base, shape=features)),
        _Case("32 stages for 80 layers", Layout(8, 32, 4, 1, 1, "none"), base),
        _Case(
            "8 stages for 60 layers",
            Layout(32, 8, 4, 1, 1, "none"),
            dataclasses.replace(base, shape=shallow),
        ),
        _Case("a sound layout for 512 GPUs", good._replace(dp=32), half),
        _Case("512 GPUs", good, half),
        _Case("a batch of 992", good, dataclasses.replace(base, global_batch=992)),
        _Case("micro-batches of 3", good._replace(micro_batch=3), base),
        _Case("micro-batches of 32", good._replace(micro_batch=32), base),
        _Case("no ZeRO", good._replace(zero=0), base),
        _Case("a GPU that it fills by 95 %", good, _with_memory(base, needed / 0.95)),
        _Case("a GPU that it fills by 85 %", good, _with_memory(base, needed / 0.85)),
        _Case("two faults at once", Layout(32, 32, 4, 1, 1, "none"), base),
        _Case("three faults at once", Layout(48, 3, 16, 1, 1, "none"), base),
        _Case("too few ranks, and too full", Layout(8, 1, 1, 0, 1, "none"), base),
    ]


def _why_refused(case: _Case) -> str:
    """A hint for who asked for the memory of a layout that cannot run."""
    broken = lab.broken_rules(case.layout, case.brief)
    text = "Ask for the memory last, and only where no other rule is broken"
    if broken and broken != ["memory"]:
        return f"{text}. Here one is: {RULES[broken[0]]}"
    return text


def _with_memory(brief: Brief, memory_bytes: float) -> Brief:
    gpu = dataclasses.replace(brief.cluster.gpu, memory_bytes=memory_bytes)
    return dataclasses.replace(brief, cluster=dataclasses.replace(brief.cluster, gpu=gpu))


def broken_rules(answer: Callable[..., Any]) -> None:
    """The learner's `broken_rules(layout, brief)`."""
    for case in _rule_cases():
        try:
            found = _asked("21.2", answer, case.layout, case.brief)
        except ValueError as error:
            raise AssertionError(
                f"{case.what}, {case.layout}: labcode refuses to estimate this layout ({error}). "
                f"{_why_refused(case)}"
            ) from None
        assert isinstance(found, Iterable) and not isinstance(found, str | Mapping), (
            f"return a list of names, not {type(found).__name__}"
        )
        listed = list(found)
        names = set(listed)
        twice = [name for name in names if listed.count(name) > 1]
        assert not twice, f"{case.what}: you name {twice[0]!r} twice"
        unknown = [name for name in names if name not in RULES]
        assert not unknown, f"{unknown[0]!r} is no name of the table: {', '.join(RULES)}"
        expected = set(lab.broken_rules(case.layout, case.brief))
        about = f"{case.what}, {case.layout}"
        for name in RULES:
            if name in expected and name not in names:
                raise AssertionError(f"{about}: this breaks a rule that you miss: {RULES[name]}")
        for name in RULES:
            if name not in names or name in expected:
                continue
            hint = RULES[name]
            if name == "memory" and expected:
                hint = "memory is asked only where nothing else is wrong"
            raise AssertionError(f"{about}: you find {name!r}, which it does not break: {hint}")


# ---- 21.3 rivals


def rivals(answer: Callable[..., Any]) -> None:
    """The learner's `rivals(chosen, candidates)`."""
    small = dataclasses.replace(lab.H100, shape=lab.GPT_1B, gpus=16, global_batch=64)
    made = [
        Found(3.0, 1e9, Layout(4, 1, 4)),
        Found(1.0, 9e9, Layout(4, 2, 2, zero=1)),  # two choices at once
        Found(2.0, 2e9, Layout(8, 1, 2, zero=1)),
        Found(5.0, 3e9, Layout(16, 1, 1)),
        Found(4.0, 4e9, Layout(8, 1, 2)),
        Found(2.5, 5e9, Layout(8, 1, 2, micro_batch=2)),
        Found(1.5, 5e9, Layout(8, 1, 2, zero=3)),
        Found(2.2, 6e9, Layout(8, 1, 2, micro_batch=4, checkpointing="full")),
    ]
    cases = [
        ("eight made-up candidates", Layout(8, 1, 2), made),
        ("the same from behind", Layout(8, 1, 2), made[::-1]),
        ("the brief", Layout(64, 4, 4, 1, 1, "none"), lab.candidates(lab.H100)),
        (
            "the brief, the slowest first",
            Layout(32, 8, 4, 1, 1, "none"),
            lab.candidates(lab.H100)[::-1],
        ),
        ("1B on 16 GPUs", Layout(16, 1, 1, 0, 1, "none"), lab.candidates(small)),
    ]
    for case, chosen, found in cases:
        own = list(found)
        mine = _asked("21.3", answer, chosen, own)
        assert isinstance(mine, Mapping), f"return a dict, not {type(mine).__name__}"
        assert own == list(found), f"{case}: your function changes the list that it was given"
        _check_rivals(case, chosen, mine, found)


def _check_rivals(
    case: str, chosen: Layout, mine: Mapping[Any, Any], found: Sequence[Found]
) -> None:
    expected = lab.rivals(chosen, found)
    for kind, rival in mine.items():
        assert kind in lab.KINDS, (
            f"{case}: {kind!r} is no kind of change: {', '.join(lab.KINDS)} (dp is what is left)"
        )
        if rival is None:
            continue
        is_triple = isinstance(rival, tuple | list) and len(rival) == 3
        assert is_triple and isinstance(rival[2], tuple), (
            f"{case}: the rival of kind {kind} is to be an entry of the list: (seconds, bytes, "
            "layout)"
        )
        changed = lab.changed(chosen, _layout(rival[2]))
        assert changed, f"{case}: under {kind} you give the chosen layout itself"
        assert kind in changed, (
            f"{case}: under {kind} you give {rival[2]}, which has the same {kind} as the chosen one"
        )
        assert changed == [kind], (
            f"{case}: under {kind} you give {rival[2]}, which differs in {' and '.join(changed)}: "
            "only one choice may change (and dp with it)"
        )
        best = expected[kind]
        assert rival[0] <= best.step_s + SAME_S, (
            f"{case}: under {kind} you give one that takes {rival[0]:.4g} s, and there is a "
            f"stronger rival of this kind, with {best.step_s:.4g} s, whether it fits or not"
        )
    for kind in expected:
        assert mine.get(kind) is not None, (
            f"{case}: there is a candidate that differs in {kind} alone, and you have none under "
            "this name"
        )


# ---- 21.4 verdict


def verdict(answer: Callable[..., Any]) -> None:
    """The learner's `verdict(chosen, rival, room_bytes)`."""
    brief = lab.H100
    chosen = lab.predicted(Layout(64, 4, 4, 1, 1, "none"), brief)
    room = brief.room_bytes
    made = _made(chosen, {"a": 5.0, "b": 2.0, "c": 1.0}, {"x": 30 * GIB, "y": 10 * GIB})
    slow = _made(chosen, {"a": 5.1, "b": 1.0, "c": 3.5}, {"x": 20 * GIB, "y": 12 * GIB})
    full = _made(chosen, {"a": 4.0, "b": 2.0, "c": 1.0}, {"x": 31 * GIB, "y": 29 * GIB})
    both = _made(chosen, {"a": 9.0, "b": 2.0, "c": 1.0}, {"x": 31 * GIB, "y": 29 * GIB})
    fast = _made(chosen, {"a": 4.0, "b": 2.5, "c": 1.0}, {"x": 20 * GIB, "y": 12 * GIB})
    products = {"a": 5.5, "b": 2.4, "c": 1.0}
    longer = _made(chosen, products, {"x": 20 * GIB, "y": 12 * GIB})
    made, slow, full, both, fast, longer = map(_named, (made, slow, full, both, fast, longer))
    cases: list[tuple[str, Estimate, Estimate, float]] = [
        ("a made-up rival that fits", made, slow, 50 * GIB),
        ("one that does not fit", made, full, 50 * GIB),
        ("one that is slower and does not fit", made, both, 50 * GIB),
        ("the same with more room", made, both, 70 * GIB),
        ("a rival that just fits", made, both, both.memory_bytes),
        ("a rival that is faster", made, fast, 50 * GIB),
        ("a rival whose products take longer", made, longer, 50 * GIB),
    ]
    for text, layout in {
        "more stages": Layout(32, 8, 4, 1, 1, "none"),
        "tp=8": Layout(32, 4, 8, 1, 1, "none"),
        "no ZeRO": Layout(64, 4, 4, 0, 1, "none"),
        "full checkpointing": Layout(64, 4, 4, 1, 1, "full"),
        "tp=2": Layout(128, 4, 2, 1, 1, "none"),
        "two samples at once": Layout(64, 4, 4, 1, 2, "none"),
    }.items():
        cases.append((text, chosen, lab.predicted(layout, brief), room))
    for case, one, other, room_bytes in cases:
        found = _asked("21.4", answer, one, other, room_bytes)
        is_triple = isinstance(found, Sequence) and not isinstance(found, str) and len(found) == 3
        assert is_triple, "return three things: (amount, unit, part)"
        missing = _about_verdict(tuple(found), one, other, room_bytes)
        assert not missing, f"{case}: {missing}"


def _named(made: Estimate) -> Estimate:
    """With names of real parts: a, b and c are the products, tp and dp."""
    names = {"a": "product", "b": "tp", "c": "dp"}
    parts = {names[name]: part_s for name, part_s in made.parts.items()}
    return dataclasses.replace(made, parts=parts)


def _made(like: Estimate, parts: Mapping[str, float], memory: Mapping[str, float]) -> Estimate:
    return dataclasses.replace(like, parts=parts, memory_parts=memory)


def _about_verdict(
    found: tuple[Any, ...], chosen: Estimate, rival: Estimate, room_bytes: float
) -> str:
    """What is wrong with a verdict; "" for nothing."""
    amount, unit, part = found
    due_amount, due_unit, due_part = lab.verdict(chosen, rival, room_bytes)
    if unit not in ("s", "GiB"):
        return f'the unit is "s" or "GiB", and not {unit!r}'
    if unit != due_unit:
        fits = "fits" if due_unit == "s" else "does not fit"
        return f"this rival {fits} into {room_bytes / GIB:.1f} GiB, so it does not lose by {unit}"
    if not _is_number(amount):
        return "the first of the three is a number"
    if not math.isclose(amount, due_amount, rel_tol=ROUNDED, abs_tol=0.006):
        return _about_amount(amount, due_amount, chosen, rival)
    parts = chosen.parts if due_unit == "s" else chosen.memory_parts
    if part not in parts:
        what = "parts" if due_unit == "s" else "memory_parts"
        return f"{part!r} is none of `{what}` of the estimate: {', '.join(parts)}"
    after = rival.parts if due_unit == "s" else rival.memory_parts
    grown = after[part] - parts[part]
    most = after[due_part] - parts[due_part]
    if grown < 0.98 * most:
        largest = max(after, key=after.__getitem__)
        extra = " (it is its largest part, in both)" if part == largest else ""
        return f"amount and unit are right; another part has grown more than {part!r}{extra}"
    return ""


def _about_amount(amount: float, due_amount: float, chosen: Estimate, rival: Estimate) -> str:
    if due_amount < 0:
        return (
            f"you say {amount:.4g}: this rival is faster than the chosen layout. Then it loses by "
            "less than nothing, and the number says so"
        )
    if math.isclose(amount, -due_amount, rel_tol=ROUNDED):
        return "a rival that loses has a positive amount: which one is subtracted?"
    if _close(amount, due_amount * GIB) or _close(amount, due_amount * GIB / 1e9):
        return "how much is that in GiB (2**30 bytes)?"
    beyond = (rival.memory_bytes - chosen.memory_bytes) / GIB
    if _close(amount, beyond):
        return "how much does it need beyond the room that there is, not beyond the chosen layout?"
    return f"you say {amount:.4g}, and it loses by another amount than that"


# ---- 21.5 a cluster of your own

FACULTY = {
    "nodes of": 4,
    "inside": Link(6e-6, 200e9),
    "between": Link(8e-6, 6.25e9),
    "gpu": "a100-40gb",
}


def own_cluster(text: Any) -> None:
    """The learner's text of a cluster file."""
    text = due(text)
    assert isinstance(text, str), f"give the text of the file, not {type(text).__name__}"
    assert text != lab.CLUSTER_TEXT, "this is labcode's own file: write yours"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.toml"
        path.write_text(text)
        try:
            found = load_cluster(str(path))
        except (ValueError, TypeError, AttributeError) as error:
            message = str(error).replace(f"{path}", "my.toml")
            raise AssertionError(f"labcode cannot read it: {message}") from None
    _check_cluster(found)


def _check_cluster(found: Cluster) -> None:
    wanted = load_gpu(FACULTY["gpu"])
    assert found.gpu.memory_bytes == wanted.memory_bytes and _close(
        found.gpu.peak("bfloat16"), wanted.peak("bfloat16")
    ), f"gpu: {found.gpu.name} is not the GPU of the description; `gpu_names()` lists them"
    assert isinstance(found.gpus_per_node, int), "gpus_per_node: a number stands without quotes"
    assert found.gpus_per_node == FACULTY["nodes of"], (
        f"gpus_per_node: {found.gpus_per_node}, and that is not how many share a node"
    )
    for name in ("inside", "between"):
        link: Link = getattr(found, name)
        right: Link = FACULTY[name]
        rate = link.beta_bytes_per_s / 1e9
        assert _close(link.alpha_s, right.alpha_s), (
            f"{name}_latency_us: {link.alpha_s * 1e6:.4g} microseconds are not what is said of it"
        )
        if _close(link.beta_bytes_per_s, right.beta_bytes_per_s):
            continue
        raise AssertionError(f"{name}_GB_per_s: {rate:.4g}: {_about_rate(name, rate)}")
    assert found.source.strip() and found.source != "...", "source: say where the numbers are from"


def _about_rate(name: str, rate: float) -> str:
    if name == "inside":
        return "what did nccl-tests measure on one node?"
    known = {
        50.0: "adapters are sold in bits a second, and the file has bytes",
        200.0: "adapters are sold in bits a second, and their GPUs share them",
        25.0: "that is a whole node's share, and the file has that of each GPU",
        12.5: "that is one adapter, or half of the GPUs: how many of each has a node?",
        3.125: "a node has two adapters",
        1.5625: "the nodes do not share their adapters with each other",
    }
    for value, hint in known.items():
        if _close(rate, value):
            return hint
    return "all adapters of a node together, in bytes, shared by its GPUs"


# ---- 21.6 the plan

MOST_REGRET = 0.05
KEYS = ("step_s", "memory_gib", "days", "rivals")
POINTS: tuple[str, ...] = (
    "legal",
    "fits",
    "fast",
    "step_s",
    "memory_gib",
    "days",
    "rival 1",
    "rival 2",
    "two kinds",
)


def plan(answer: Callable[..., Any]) -> None:
    """The learner's `my_plan(task)`: nine points, judged one by one."""
    found = due(answer(lab.TASK))
    is_pair = isinstance(found, Sequence) and len(found) == 2
    assert is_pair and isinstance(found[1], Mapping), "return two things: (layout, defence)"
    layout, defence = due(*found)
    judged = rubric(layout, defence)
    missing = {name: why for name, why in judged.items() if why}
    done = [name for name, why in judged.items() if not why]
    if missing:
        texts = [f"{name}: {why}" for name, why in missing.items()]
        if len(texts) > 3:
            more = ", ".join(list(missing)[3:])
            texts = [*texts[:3], f"and then {more}"]
        raise AssertionError(
            f"{len(done)} of {len(POINTS)} points. Done: {', '.join(done) or 'none'}. "
            f"Missing: {'; '.join(texts)}"
        )


def rubric(layout: Any, defence: Mapping[str, Any]) -> dict[str, str]:
    """{point: what is missing, "" if it is done}."""
    assert isinstance(layout, tuple) and len(layout) == 6, "`layout` is to be a lab.Layout"
    absent = [key for key in KEYS if key not in defence]
    assert not absent, f"`defence` has no {absent[0]!r}: it needs {', '.join(KEYS)}"
    due(*[value for value in defence.values() if value is not None])
    layout = _layout(layout)
    for field in ("dp", "pp", "tp", "micro_batch"):
        value = getattr(layout, field)
        assert type(value) is int and value > 0, f"`{field}` of your layout is {value!r}"
    assert layout.zero in (0, 1, 2, 3), f"`zero` of your layout is {layout.zero!r}: 0, 1, 2 or 3"
    brief = lab.TASK
    broken = lab.broken_rules(layout, brief)
    illegal = [RULES[name] for name in broken if name != "memory"]
    if layout.zero not in l20_plan.stages_of_zero(layout.dp, layout.pp) and not illegal:
        illegal = [
            "it is none of lab.candidates(task): ZeRO-2, and ZeRO-3 with a pipeline, are not among "
            "them"
        ]
    if layout.checkpointing not in ("none", "full") and not illegal:
        illegal = ['checkpointing is "none" or "full"']
    if illegal:
        judged = dict.fromkeys(POINTS, "not judged before the layout is legal")
        return judged | {"legal": illegal[0]}
    about = lab.predicted(layout, brief)
    judged = dict.fromkeys(POINTS, "")
    if "memory" in broken:
        judged["fits"] = (
            f"it needs {about.memory_bytes / GIB:.1f} GiB, and the margin leaves "
            f"{brief.room_bytes / GIB:.1f}"
        )
    best = lab.fitting(brief)[0]
    if about.step_s > (1 + MOST_REGRET) * best.step_s:
        regret = about.step_s / best.step_s - 1
        judged["fast"] = f"it takes {regret:.1%} longer than another one that fits"
    days, _ = lab.days_and_mfu(brief, about.step_s)
    numbers = {
        "step_s": (about.step_s, "lab.predicted has another number for this layout"),
        "memory_gib": (about.memory_bytes / GIB, "of the fullest rank, in GiB (2**30 bytes)"),
        "days": (days, "of this brief, with its budget of tokens and this step"),
    }
    for name, (right, hint) in numbers.items():
        said = defence[name]
        if not _is_number(said):
            judged[name] = "give a number"
        elif not _close(said, right):
            judged[name] = f"you say {said:.4g}: {hint}"
    _judge_rivals(judged, layout, about, defence["rivals"])
    return judged


def _judge_rivals(judged: dict[str, str], layout: Layout, about: Estimate, said: Any) -> None:
    is_list = isinstance(said, Sequence) and not isinstance(said, str)
    assert is_list and len(said) == 2, (
        "`rivals` is to be a list of two: (layout, amount, unit, part)"
    )
    strongest = lab.rivals(layout, lab.candidates(lab.TASK))
    kinds = []
    for number, entry in enumerate(said, 1):
        is_entry = isinstance(entry, Sequence) and len(entry) == 4
        assert is_entry and isinstance(entry[0], tuple) and len(entry[0]) == 6, (
            f"rival {number} is to be (layout, amount, unit, part), the first a lab.Layout"
        )
        rival = _layout(entry[0])
        changed = lab.changed(layout, rival)
        kinds.append(tuple(changed))
        judged[f"rival {number}"] = _about_rival(layout, about, entry, changed, strongest)
    if kinds[0] == kinds[1]:
        judged["two kinds"] = f"both rivals change {' and '.join(kinds[0]) or 'nothing'}"


def _about_rival(
    layout: Layout,
    about: Estimate,
    entry: Sequence[Any],
    changed: Sequence[str],
    strongest: Mapping[str, Found],
) -> str:
    """What is wrong with a rival; "" for nothing."""
    brief = lab.TASK
    rival = _layout(entry[0])
    if len(changed) != 1:
        return f"it changes {len(changed)} choices ({', '.join(changed) or 'none'}): one is due"
    illegal = [name for name in lab.broken_rules(rival, brief) if name != "memory"]
    if illegal or changed[0] not in strongest:
        return f"it is not legal: {RULES[illegal[0]] if illegal else 'not searched'}"
    if rival not in {candidate.layout for candidate in lab.candidates(brief)}:
        return "it is none of lab.candidates(task)"
    found = lab.predicted(rival, brief)
    best = strongest[changed[0]]
    if found.step_s > best.step_s + SAME_S:
        return (
            f"not the strongest of its kind: another {changed[0]} takes {best.step_s:.2f} s, and "
            f"this one {found.step_s:.2f} s"
        )
    if found.memory_bytes <= brief.room_bytes and found.step_s <= about.step_s:
        return "it fits and is as fast as your layout: it does not lose"
    return _about_verdict(tuple(entry[1:]), about, found, brief.room_bytes)


EXERCISES = {
    "21.1": Exercise(
        check=days_and_mfu,
        praise="days for whom pays, MFU for whom programs",
        hints=(
            "How many tokens does a step train on? How many steps are there then?",
            "MFU is a rate over a rate: the FLOPs that the model needs in a second, over those "
            "that all GPUs could do by their datasheet.",
        ),
    ),
    "21.2": Exercise(
        check=broken_rules,
        praise="every broken rule by its name, and memory asked last",
        hints=(
            "One `if` for each line of the table, which adds a name to a list.",
            "`a % b` is 0 where b divides a. Which of the two numbers is cut?",
            "lab.predicted raises an error for what cannot run. When is it safe to call it?",
        ),
    ),
    "21.3": Exercise(
        check=rivals,
        praise="one choice changed at a time, and the strongest of each kind",
        hints=(
            "For one candidate: in which of lab.KINDS does it differ from the chosen layout? "
            "`getattr(layout, kind)` reads a field by its name.",
            "Of those that differ in a single choice keep the fastest one for each kind.",
        ),
    ),
    "21.4": Exercise(
        check=verdict,
        praise="a number, a unit and a name: that is a defence",
        hints=(
            "Two cases: the rival does not fit, or it does. Which one has to be asked first?",
            "Not the largest part of the rival, but the one that has grown most.",
        ),
    ),
    "21.5": Exercise(
        check=own_cluster,
        praise="a cluster that labcode can plan for",
        hints=(
            "The list of fields is in the text above. Which lines of the description belong to "
            "which field?",
            "What does one GPU have of its node's adapters, and in bytes?",
        ),
    ),
    "21.6": Exercise(
        check=plan,
        praise="all nine points: your plan can be defended",
        hints=(
            "lab.fitting(lab.TASK) lists what leaves the margin, the fastest first.",
            "lab.rivals gives the rivals of a layout, lab.verdict what to say of each. Take two "
            "that lose.",
        ),
    ),
}
