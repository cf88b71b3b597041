"""Checks of lesson 21, the capstone."""

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from course.answer import Exercise, Hint, due
from course.exercises.expect import diagnose, refuse
from course.exercises.in_notebook import LOOP, bounded, without
from course.labs import l20_plan
from course.labs import l21_capstone as lab
from course.labs.l20_plan import Found, Layout
from course.labs.l21_capstone import Brief
from labcode.perf import estimate as perf_estimate
from labcode.perf import plan as perf_plan
from labcode.perf.alpha_beta import Link
from labcode.perf.cluster import Cluster, load_cluster
from labcode.perf.estimate import Estimate
from labcode.runtime.units import GIB

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
        found = bounded(LOOP, answer, *args)
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
        "the brief, 5 s a step": (
            lab.H100,
            5.0,
            "how many steps are in the budget, and what could all GPUs have done in one?",
        ),
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
        if not is_pair or not all(_is_number(value) for value in found):
            raise Hint("return two numbers, (days, mfu)")
        days, mfu = found
        right_days, right_mfu = lab.days_and_mfu(brief, step_s)
        is_swapped = _close(days, right_mfu) and _close(mfu, right_days)
        refuse({"days come first, and then MFU": is_swapped})
        mistakes = {
            "these are seconds; how many has a day?": right_days * lab.DAY_S,
            "these are hours": right_days * 24,
            "the budget is in tokens, and a step has samples: how many tokens?": (
                right_days * brief.shape.tokens
            ),
            "a step has more than one sample": right_days * brief.global_batch,
        }
        said = f"{case}: {days:.4g} days, expected are {right_days:.4g}: "
        diagnose(said, days, right_days, mistakes, hint, ROUNDED)
        mistakes = {
            "a share, not percent": right_mfu * 100,
            "the peak is that of one GPU, and the FLOPs are those of all": right_mfu * brief.gpus,
            "the FLOPs of all samples of a step count": right_mfu / brief.global_batch,
            "flops(shape, samples) has forward and backward in it already": right_mfu * 3,
        }
        said = f"{case}: the days are right. An MFU of {mfu:.4g}, expected is {right_mfu:.4g}: "
        diagnose(said, mfu, right_mfu, mistakes, hint, ROUNDED)


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


def broken_rules(answer: Callable[..., Any]) -> None:
    """The learner's `broken_rules(layout, brief)`."""
    cases = sorted(_rule_cases(), key=_num_faults)  # one fault alone names its rule
    for what, layout, brief in (*cases, *_same_faults_elsewhere()):
        case = f"{what}, {layout}: "
        truth = lab.broken_rules(layout, brief)
        found = _asked_of_rules(answer, case, layout, brief, truth)
        if not isinstance(found, Iterable) or isinstance(found, str | Mapping):
            raise Hint(f"return a list of names, not {type(found).__name__}")
        names = list(found)
        mistakes = {}
        for name in names:
            mistakes[f"{name!r} is no name of the table: {', '.join(RULES)}"] = name not in RULES
            mistakes[f"you name {name!r} twice"] = names.count(name) > 1
        some = (
            f"it breaks {len(truth)} rules, and you name {len(names)} of them: does your function "
            "go on after the first that is broken?"
        )
        mistakes[some] = bool(names) and set(names) < set(truth)
        for name, rule in RULES.items():
            is_missing = name in truth and name not in names
            mistakes[f"this breaks a rule that you miss: {rule}"] = is_missing
        for name, rule in RULES.items():
            why = rule
            if name == "memory" and truth:
                why = "memory is asked only where nothing else is wrong"
            is_too_much = name in names and name not in truth
            mistakes[f"you find {name!r}, which it does not break: {why}"] = is_too_much
        refuse(mistakes, case)


def _asked_of_rules(
    answer: Callable[..., Any], case: str, layout: Layout, brief: Brief, truth: Sequence[str]
) -> Any:
    """What the learner's function returns; it may not ask for the memory of what cannot run."""
    try:
        return _asked("21.2", answer, layout, brief)
    except ValueError as error:
        if truth in ([], ["memory"]):  # it can run, so that this error is not the estimate's
            raise
        raise Hint(
            f"{case}labcode refuses to estimate this layout ({error}). Ask for the memory last, "
            f"and only where no other rule is broken. Here one is: {RULES[truth[0]]}"
        ) from None


def _rule_cases() -> list[tuple[str, Layout, Brief]]:
    base = lab.H100
    good = Layout(64, 4, 4, 1, 1, "none")
    six = dataclasses.replace(base.cluster, gpus_per_node=6)
    half = dataclasses.replace(base, gpus=512)
    needed = lab.predicted(good, base).memory_bytes
    return [
        ("a sound layout", good, base),
        ("another sound layout", Layout(32, 8, 4, 0, 1, "none"), base),
        ("too few ranks", good._replace(dp=32), base),
        ("tp=16 on nodes of 8", Layout(16, 4, 16, 1, 1, "none"), base),
        ("tp=4 on nodes of 6", good, dataclasses.replace(base, cluster=six)),
        ("2 key/value heads", good, _with_shape(kv_heads=2)),
        ("6 key/value heads", good, _with_shape(kv_heads=6)),
        ("an MLP of 44,034 features", good, _with_shape(ffn=44034)),
        ("32 stages for 80 layers", Layout(8, 32, 4, 1, 1, "none"), base),
        ("8 stages for 60 layers", Layout(32, 8, 4, 1, 1, "none"), _with_shape(layers=60)),
        ("a sound layout for 512 GPUs", good._replace(dp=32), half),
        ("512 GPUs", good, half),
        ("a batch of 992", good, dataclasses.replace(base, global_batch=992)),
        ("micro-batches of 3", good._replace(micro_batch=3), base),
        ("micro-batches of 32", good._replace(micro_batch=32), base),
        ("no ZeRO", good._replace(zero=0), base),
        ("a GPU that it fills by 95 %", good, _with_memory(needed / 0.95)),
        ("a GPU that it fills by 85 %", good, _with_memory(needed / 0.85)),
        ("two faults at once", Layout(32, 32, 4, 1, 1, "none"), base),
        ("three faults at once", Layout(48, 3, 16, 1, 1, "none"), base),
        ("too few ranks, and too full", Layout(8, 1, 1, 0, 1, "none"), base),
    ]


def _num_faults(case: tuple[str, Layout, Brief]) -> int:
    _, layout, brief = case
    return len(lab.broken_rules(layout, brief))


def _same_faults_elsewhere() -> Iterator[tuple[str, Layout, Brief]]:
    """Each fault once more beside other choices, on which it does not depend."""
    for what, layout, brief in _rule_cases():
        if set(lab.broken_rules(layout, brief)) <= {"memory"}:
            continue
        for zero, checkpointing in itertools.product((0, 3), ("none", "full")):
            other = layout._replace(zero=zero, checkpointing=checkpointing)
            yield f"{what}, with other choices beside it", other, brief


def _with_shape(**sizes: int) -> Brief:
    """The first brief with another model."""
    return dataclasses.replace(lab.H100, shape=dataclasses.replace(lab.GPT_70B, **sizes))


def _with_memory(memory_bytes: float) -> Brief:
    """The first brief with other GPUs."""
    cluster = lab.H100.cluster
    gpu = dataclasses.replace(cluster.gpu, memory_bytes=memory_bytes)
    return dataclasses.replace(lab.H100, cluster=dataclasses.replace(cluster, gpu=gpu))


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
    for what, chosen, found in cases:
        case = f"{what}: "
        given = list(found)
        mine = _asked("21.3", answer, chosen, given)
        if not isinstance(mine, Mapping):
            raise Hint(f"return a dict, not {type(mine).__name__}")
        refuse({"your function changes the list that it was given": given != found}, case)
        truth = lab.rivals(chosen, found)
        for kind, rival in mine.items():
            if kind not in lab.KINDS:
                kinds = ", ".join(lab.KINDS)
                raise Hint(f"{case}{kind!r} is no kind of change: {kinds} (dp is what is left)")
            if rival is not None:
                _check_strongest(case, chosen, kind, rival, truth)
        for kind in truth:
            missing = (
                f"there is a candidate that differs in {kind} alone, and you have none under this "
                "name"
            )
            refuse({missing: mine.get(kind) is None}, case)


def _check_strongest(
    case: str, chosen: Layout, kind: str, rival: Any, truth: Mapping[str, Found]
) -> None:
    """What the learner gives for a kind is the fastest candidate that changes this alone."""
    is_triple = isinstance(rival, tuple | list) and len(rival) == 3
    if not is_triple or not isinstance(rival[2], tuple):
        raise Hint(
            f"{case}the rival of kind {kind} is to be an entry of the list: (seconds, bytes, "
            "layout)"
        )
    step_s, _, layout = rival
    changed = lab.changed(chosen, _layout(layout))
    mistakes = {
        "the chosen layout itself": not changed,
        f"{layout}, which has the same {kind} as the chosen one": kind not in changed,
        f"{layout}, which differs in {' and '.join(changed)}: only one choice may change (and dp "
        "with it)": changed != [kind],
    }
    refuse(mistakes, f"{case}under {kind} you give ")
    best = truth[kind]
    if step_s > best.step_s + SAME_S:
        raise Hint(
            f"{case}under {kind} you give one that takes {step_s:.4g} s, and there is a stronger "
            f"rival of this kind, with {best.step_s:.4g} s, whether it fits or not"
        )


# ---- 21.4 verdict


def verdict(answer: Callable[..., Any]) -> None:
    """The learner's `verdict(chosen, rival, room_bytes)`."""
    made = _made((5.0, 2.0, 1.0), (30, 10))
    both = _made((9.0, 2.0, 1.0), (31, 29))
    cases: list[tuple[str, Estimate, Estimate, float]] = [
        ("a made-up rival that fits", made, _made((5.1, 1.0, 3.5), (20, 12)), 50 * GIB),
        ("one that does not fit", made, _made((4.0, 2.0, 1.0), (31, 29)), 50 * GIB),
        ("one that is slower and does not fit", made, both, 50 * GIB),
        ("the same with more room", made, both, 70 * GIB),
        ("a rival that just fits", made, both, both.memory_bytes),
        ("a rival that is faster", made, _made((4.0, 2.5, 1.0), (20, 12)), 50 * GIB),
        ("a rival whose products take longer", made, _made((5.5, 2.4, 1.0), (20, 12)), 50 * GIB),
    ]
    brief = lab.H100
    chosen = lab.predicted(Layout(64, 4, 4, 1, 1, "none"), brief)
    for what, layout in {
        "more stages": Layout(32, 8, 4, 1, 1, "none"),
        "tp=8": Layout(32, 4, 8, 1, 1, "none"),
        "no ZeRO": Layout(64, 4, 4, 0, 1, "none"),
        "full checkpointing": Layout(64, 4, 4, 1, 1, "full"),
        "tp=2": Layout(128, 4, 2, 1, 1, "none"),
        "two samples at once": Layout(64, 4, 4, 1, 2, "none"),
    }.items():
        cases.append((what, chosen, lab.predicted(layout, brief), brief.room_bytes))
    for what, one, other, room_bytes in cases:
        found = _asked("21.4", answer, one, other, room_bytes)
        if not isinstance(found, Sequence) or isinstance(found, str) or len(found) != 3:
            raise Hint("return three things: (amount, unit, part)")
        _check_verdict(f"{what}: ", found, one, other, room_bytes)


def _made(step: tuple[float, float, float], memory_gib: tuple[float, float]) -> Estimate:
    """An estimate: seconds of the products, tp and dp; GiB of the weights and activations."""
    return Estimate(
        parts=dict(zip(("product", "tp", "dp"), step)),
        memory_parts={"weights": memory_gib[0] * GIB, "activations": memory_gib[1] * GIB},
        model_flops=1e18,
        peak_flops_per_s=1e18,
        memory_limit_bytes=80 * GIB,
    )


def _check_verdict(
    case: str, found: Sequence[Any], chosen: Estimate, rival: Estimate, room_bytes: float
) -> None:
    """Amount, unit and part of a verdict are right."""
    amount, unit, part = found
    right_amount, right_unit, right_part = lab.verdict(chosen, rival, room_bytes)
    fits = right_unit == "s"
    mistakes = {
        f'the unit is "s" or "GiB", and not {unit!r}': unit not in ("s", "GiB"),
        f"this rival {'fits' if fits else 'does not fit'} into {room_bytes / GIB:.1f} GiB, so it "
        f"does not lose by {unit}": unit != right_unit,
        "the first of the three is a number": not _is_number(amount),
    }
    refuse(mistakes, case)
    if not math.isclose(amount, right_amount, rel_tol=ROUNDED, abs_tol=0.006):
        beyond_chosen = (rival.memory_bytes - chosen.memory_bytes) / GIB
        mistakes = {
            f"you say {amount:.4g}: this rival is faster than the chosen layout. Then it loses by "
            "less than nothing, and the number says so": right_amount < 0,
            "a rival that loses has a positive amount: which one is subtracted?": -right_amount,
            "how much is that in GiB (2**30 bytes)?": (
                _close(amount, right_amount * GIB) or _close(amount, right_amount * GIB / 1e9)
            ),
            "how much does it need beyond the room that there is, not beyond the chosen layout?": (
                beyond_chosen
            ),
            f"you say {amount:.4g}, and it loses by another amount than that": True,
        }
        refuse(mistakes, case, amount, ROUNDED)
    name = "parts" if fits else "memory_parts"
    before: Mapping[str, float] = getattr(chosen, name)
    after: Mapping[str, float] = getattr(rival, name)
    if part not in before:
        names = ", ".join(before)
        raise Hint(f"{case}{part!r} is none of `{name}` of the estimate: {names}")
    growth = lab.growth(before, after)
    is_largest = part == max(after, key=after.__getitem__)
    extra = " (it is its largest part, in both)" if is_largest else ""
    too_little = f"amount and unit are right; another part has grown more than {part!r}{extra}"
    refuse({too_little: growth[part] < 0.98 * growth[right_part]}, case)


# ---- 21.5 a cluster of your own

ABOUT_RATE: dict[str, tuple[dict[str, float], str]] = {  # {mistake: its GB/s}, and any other
    "inside": ({}, "what did nccl-tests measure on one node?"),
    "between": (
        {
            "adapters are sold in bits a second, and the file has bytes": 50.0,
            "adapters are sold in bits a second, and their GPUs share them": 200.0,
            "that is a whole node's share, and the file has that of each GPU": 25.0,
            "that is one adapter, or half of the GPUs: how many of each has a node?": 12.5,
            "a node has two adapters": 3.125,
            "the nodes do not share their adapters with each other": 1.5625,
        },
        "all adapters of a node together, in bytes, shared by its GPUs",
    ),
}


def own_cluster(text: Any) -> None:
    """The learner's text of a cluster file."""
    text = due(text)
    if not isinstance(text, str):
        raise Hint(f"give the text of the file, not {type(text).__name__}")
    refuse({"this is labcode's own file: write yours": text == lab.CLUSTER_TEXT})
    found = _read(text)
    truth = _read(lab.CLUSTER_TEXT)
    is_gpu = found.gpu.memory_bytes == truth.gpu.memory_bytes and _close(
        found.gpu.peak("bfloat16"), truth.gpu.peak("bfloat16")
    )
    mistakes = {
        f"gpu: {found.gpu.name} is not the GPU of the description; `gpu_names()` lists them": (
            not is_gpu
        ),
        "gpus_per_node: a number stands without quotes": not isinstance(found.gpus_per_node, int),
        f"gpus_per_node: {found.gpus_per_node}, and that is not how many share a node": (
            found.gpus_per_node != truth.gpus_per_node
        ),
    }
    refuse(mistakes)
    for name, (of_rate, otherwise) in ABOUT_RATE.items():
        link: Link = getattr(found, name)
        right: Link = getattr(truth, name)
        latency = f"{link.alpha_s * 1e6:.4g} microseconds are not what is said of it"
        refuse({f"{name}_latency_us: {latency}": not _close(link.alpha_s, right.alpha_s)})
        rate = link.beta_bytes_per_s / 1e9
        case = f"{name}_GB_per_s: {rate:.4g}: "
        diagnose(case, rate, right.beta_bytes_per_s / 1e9, of_rate, otherwise, ROUNDED)
    source = found.source.strip()
    refuse({"source: say where the numbers are from": source in ("", "...")})


def _read(text: str) -> Cluster:
    """The cluster of a file with this text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "my.toml"
        path.write_text(text)
        try:
            return load_cluster(str(path))
        except (ValueError, TypeError, AttributeError) as error:
            message = str(error).replace(str(path), "my.toml")
            raise Hint(f"labcode cannot read it: {message}") from None


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
    found = due(bounded(LOOP, answer, lab.TASK))
    is_pair = isinstance(found, Sequence) and len(found) == 2
    if not is_pair or not isinstance(found[1], Mapping):
        raise Hint("return two things: (layout, defence)")
    judged = rubric(*due(*found))
    done = [name for name, why in judged.items() if not why]
    missing = [name for name, why in judged.items() if why]
    if missing:
        texts = [f"{name}: {judged[name]}" for name in missing[:3]]
        if missing[3:]:
            texts.append(f"and then {', '.join(missing[3:])}")
        raise Hint(
            f"{len(done)} of {len(POINTS)} points. Done: {', '.join(done) or 'none'}. "
            f"Missing: {'; '.join(texts)}"
        )


def rubric(layout: Any, defence: Mapping[str, Any]) -> dict[str, str]:
    """{point: what is missing, "" if it is done}."""
    if not _has_length(layout, 6):
        raise Hint("`layout` is to be a lab.Layout")
    absent = [key for key in KEYS if key not in defence]
    if absent:
        raise Hint(f"`defence` has no {absent[0]!r}: it needs {', '.join(KEYS)}")
    due(*[value for value in defence.values() if value is not None])
    said = defence["rivals"]
    if not _has_length(said, 2):
        raise Hint("`rivals` is to be a list of two: (layout, amount, unit, part)")
    for number, entry in enumerate(said, 1):
        if not _has_length(entry, 4) or not _has_length(entry[0], 6):
            raise Hint(
                f"rival {number} is to be (layout, amount, unit, part), the first a lab.Layout"
            )
    layout = _layout(layout)
    brief = lab.TASK
    candidates = lab.candidates(brief)
    illegal = _hint_of(_check_legal, layout, candidates)
    if illegal:
        judged = dict.fromkeys(POINTS, "judged once the layout is legal")
        return judged | {"legal": illegal}
    about = lab.predicted(layout, brief)
    needed = about.memory_bytes
    too_full = (
        f"it needs {needed / GIB:.1f} GiB, and the margin leaves {brief.room_bytes / GIB:.1f}"
    )
    regret = about.step_s / lab.fitting(brief)[0].step_s - 1
    too_slow = f"it takes {regret:.1%} longer than another one that fits"
    days, _ = lab.days_and_mfu(brief, about.step_s)
    numbers = {
        "step_s": (about.step_s, "lab.predicted has another number for this layout"),
        "memory_gib": (needed / GIB, "of the fullest rank, in GiB (2**30 bytes)"),
        "days": (days, "of this brief, with its budget of tokens and this step"),
    }
    judged = {
        "legal": "",
        "fits": _hint_of(refuse, {too_full: needed > brief.room_bytes}),
        "fast": _hint_of(refuse, {too_slow: regret > MOST_REGRET}),
    }
    for name, (right, hint) in numbers.items():
        judged[name] = _hint_of(_check_number, defence[name], right, hint)
    kinds = []
    for number, entry in enumerate(said, 1):
        kinds.append(lab.changed(layout, _layout(entry[0])))
        judged[f"rival {number}"] = _hint_of(_check_loses, entry, layout, about, candidates)
    alike = f"both rivals change {' and '.join(kinds[0]) or 'nothing'}"
    judged["two kinds"] = _hint_of(refuse, {alike: kinds[0] == kinds[1]})
    return judged


def _has_length(value: Any, length: int) -> bool:
    return isinstance(value, tuple | list) and len(value) == length


def _hint_of(judge: Callable[..., None], *args: Any) -> str:
    """The hint that a judgement raises; "" if it raises none."""
    try:
        judge(*args)
    except Hint as hint:
        return str(hint)
    return ""


def _check_legal(layout: Layout, candidates: Sequence[Found]) -> None:
    """The layout is a candidate."""
    for field in ("dp", "pp", "tp", "micro_batch"):
        value = getattr(layout, field)
        if type(value) is not int or value < 1:
            raise Hint(f"its `{field}` is {value!r}")
    plain = layout._replace(zero=0, checkpointing="none")  # of any other, no memory may be known
    broken = lab.broken_rules(plain, lab.TASK)
    mistakes = {RULES[name]: name != "memory" for name in broken}
    not_searched = (
        "it is none of lab.candidates(task): there `zero` is 0, 1, or without a pipeline 3, and "
        '`checkpointing` is "none" or "full"'
    )
    mistakes[not_searched] = layout not in [found.layout for found in candidates]
    refuse(mistakes)


def _check_number(said: Any, right: float, hint: str) -> None:
    """A number of the defence is right."""
    if not _is_number(said):
        raise Hint("give a number")
    refuse({f"you say {said:.4g}: {hint}": not _close(said, right)})


def _check_loses(
    entry: Sequence[Any], layout: Layout, about: Estimate, candidates: Sequence[Found]
) -> None:
    """An entry is the strongest rival of its kind, and what is said of it is right."""
    brief = lab.TASK
    rival = _layout(entry[0])
    changed = lab.changed(layout, rival)
    if len(changed) != 1:
        choices = ", ".join(changed) or "none"
        raise Hint(f"it changes {len(changed)} choices ({choices}): one is expected")
    _check_legal(rival, candidates)
    found = lab.predicted(rival, brief)
    best = lab.rivals(layout, candidates)[changed[0]]
    fits = found.memory_bytes <= brief.room_bytes
    mistakes = {
        f"not the strongest of its kind: another {changed[0]} takes {best.step_s:.2f} s, and this "
        f"one {found.step_s:.2f} s": found.step_s > best.step_s + SAME_S,
        "it fits and is as fast as your layout: it does not lose": (
            fits and found.step_s <= about.step_s
        ),
    }
    refuse(mistakes)
    _check_verdict("", entry[1:], about, found, brief.room_bytes)


EXERCISES = {
    "21.1": Exercise(
        check=days_and_mfu,
        praise="days for whoever pays, MFU for whoever programs",
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
