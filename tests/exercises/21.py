"""Answers to the exercises of lesson 21, as people write them."""

import dataclasses
from types import SimpleNamespace

from answers import Answers

from labcode.teach.labs import l20_plan, l21_capstone
from labcode.teach.labs.l20_plan import Layout

lab = SimpleNamespace(**vars(l21_capstone) | {"flops": l20_plan.flops, "Layout": Layout})
GIB = 2**30
DAY_S = 24 * 3600

# ---- 21.1 days and MFU


def in_steps(brief, step_s):
    steps = brief.budget_tokens / (brief.global_batch * brief.shape.tokens)
    days = steps * step_s / DAY_S
    work = lab.flops(brief.shape, brief.global_batch)
    return days, work / (step_s * brief.gpus * brief.peak_flops_per_s)


def by_rates(brief, step_s):
    tokens_per_s = brief.global_batch * brief.shape.tokens / step_s
    flops_per_s = lab.flops(brief.shape, 1) * brief.global_batch / step_s
    share = flops_per_s / brief.gpus / brief.peak_flops_per_s
    return [brief.budget_tokens / tokens_per_s / 86400, share]


def rounded(brief, step_s):
    days, mfu = in_steps(brief, step_s)
    return round(days, 1), round(mfu, 3)


def changed_pair(change):
    def answer(brief, step_s):
        return change(*in_steps(brief, step_s), brief)

    return answer


DAYS = Answers(
    solves="days_and_mfu",
    takes_ranks=False,
    real=True,
    right={"in steps": in_steps, "by rates": by_rates, "rounded": rounded},
    wrong={
        "seconds": (changed_pair(lambda d, m, b: (d * DAY_S, m)), "how many has a day"),
        "hours": (changed_pair(lambda d, m, b: (d * 24, m)), "these are hours"),
        "samples for tokens": (
            changed_pair(lambda d, m, b: (d * b.shape.tokens, m)),
            "a step has samples",
        ),
        "one GPU": (changed_pair(lambda d, m, b: (d, m * b.gpus)), "that of one GPU"),
        "percent": (changed_pair(lambda d, m, b: (d, 100 * m)), "not percent"),
        "one sample": (changed_pair(lambda d, m, b: (d, m / b.global_batch)), "FLOPs of all"),
        "backward twice": (changed_pair(lambda d, m, b: (d, 3 * m)), "in it already"),
        "1,024 GPUs in the code": (
            changed_pair(lambda d, m, b: (d, m * b.gpus / 1024)),
            "half as many GPUs",
        ),
        "days alone": (changed_pair(lambda d, m, b: d), "two numbers"),
        "labcode's own": (l21_capstone.days_and_mfu, "labcode's own answer"),
    },
)

# ---- 21.2 the rules


def one_if_each(layout, brief):
    shape = brief.shape
    broken = []
    if layout.dp * layout.pp * layout.tp != brief.gpus:
        broken.append("gpus")
    if brief.cluster.gpus_per_node % layout.tp:
        broken.append("node")
    if shape.kv_heads % layout.tp:
        broken.append("heads")
    if shape.ffn % layout.tp:
        broken.append("ffn")
    if shape.layers % layout.pp:
        broken.append("layers")
    if brief.global_batch % (layout.dp * layout.micro_batch):
        broken.append("batch")
    if not broken:
        needed = lab.predicted(layout, brief).memory_bytes
        if needed > brief.room_bytes:
            broken.append("memory")
    return broken


def as_a_set(layout, brief):
    divided = {
        "node": (brief.cluster.gpus_per_node, layout.tp),
        "heads": (brief.shape.kv_heads, layout.tp),
        "ffn": (brief.shape.ffn, layout.tp),
        "layers": (brief.shape.layers, layout.pp),
        "batch": (brief.global_batch, layout.dp * layout.micro_batch),
    }
    broken = {name for name, (whole, parts) in divided.items() if whole % parts != 0}
    if layout.dp * layout.pp * layout.tp != brief.gpus:
        broken.add("gpus")
    if len(broken) == 0 and lab.predicted(layout, brief).memory_bytes > brief.room_bytes:
        return {"memory"}
    return broken


def with_try(layout, brief):
    broken = [name for name in one_if_each(layout, brief) if name != "memory"]
    try:
        fits = lab.predicted(layout, brief).memory_bytes <= brief.room_bytes
    except ValueError:
        fits = True
    return tuple(broken or ([] if fits else ["memory"]))


def without_rule(*names):
    def answer(layout, brief):
        return [name for name in one_if_each(layout, brief) if name not in names]

    return answer


def memory_always(layout, brief):
    broken = without_rule("memory")(layout, brief)
    if lab.predicted(layout, brief).memory_bytes > brief.room_bytes:
        broken.append("memory")
    return broken


def memory_where_it_can(layout, brief):
    broken = without_rule("memory")(layout, brief)
    try:
        if lab.predicted(layout, brief).memory_bytes > brief.room_bytes:
            broken.append("memory")
    except ValueError:
        pass
    return broken


def up_to_a_node(layout, brief):
    broken = without_rule("node")(layout, brief)
    return [*broken, "node"] if layout.tp > brief.cluster.gpus_per_node else broken


def query_heads(layout, brief):
    broken = without_rule("heads")(layout, brief)
    return [*broken, "heads"] if brief.shape.heads % layout.tp else broken


def no_margin(layout, brief):
    broken = without_rule("memory")(layout, brief)
    if not broken and not lab.predicted(layout, brief).fits:
        broken.append("memory")
    return broken


def micro_batch_ignored(layout, brief):
    broken = without_rule("batch")(layout, brief)
    return [*broken, "batch"] if brief.global_batch % layout.dp else broken


def batch_apart(layout, brief):
    broken = without_rule("batch")(layout, brief)
    batch = brief.global_batch
    return [*broken, "batch"] if batch % layout.dp or batch % layout.micro_batch else broken


def fewer_heads(layout, brief):
    broken = without_rule("heads", "memory")(layout, brief)
    if layout.tp > brief.shape.kv_heads:
        broken.append("heads")
    if not broken and lab.predicted(layout, brief).memory_bytes > brief.room_bytes:
        broken.append("memory")
    return broken


def for_one_brief(**fixed):
    """The numbers of the first brief in place of those that were given."""

    def answer(layout, brief):
        return one_if_each(layout, dataclasses.replace(brief, **fixed))

    return answer


def first_alone(layout, brief):
    return one_if_each(layout, brief)[:1]


RULES = Answers(
    solves="broken_rules",
    takes_ranks=False,
    real=True,
    right={"one if each": one_if_each, "as a set": as_a_set, "with try": with_try},
    wrong={
        "memory always": (memory_always, "Ask for the memory last"),
        "memory where it can": (memory_where_it_can, "only where nothing else is wrong"),
        "tp up to a node": (up_to_a_node, "tp=4 on nodes of 6"),
        "query heads": (query_heads, "kv_heads"),
        "no margin": (no_margin, "room_bytes"),
        "the micro-batch ignored": (micro_batch_ignored, "times their micro-batch"),
        "batch divided by each": (batch_apart, "times their micro-batch"),
        "no more tp than heads": (fewer_heads, "deals out key/value heads"),
        "always 1,024 GPUs": (for_one_brief(gpus=1024), "number of GPUs"),
        "always 80 layers": (for_one_brief(shape=lab.GPT_70B), "breaks a rule that you miss"),
        "names twice": (lambda layout, brief: 2 * one_if_each(layout, brief), "twice"),
        "the first fault alone": (first_alone, "breaks a rule that you miss"),
        "the GPUs ignored": (without_rule("gpus"), "number of GPUs"),
        "the MLP ignored": (without_rule("ffn"), "features of the MLP"),
        "a truth value": (lambda layout, brief: not one_if_each(layout, brief), "list of names"),
        "other names": (lambda layout, brief: ["tp"], "is no name of the table"),
        "labcode's own": (l21_capstone.broken_rules, "labcode's own answer"),
    },
)

# ---- 21.3 rivals


def count_the_changes(chosen, candidates):
    best = {}
    for entry in candidates:
        step_s, _, layout = entry
        kinds = [kind for kind in lab.KINDS if getattr(layout, kind) != getattr(chosen, kind)]
        if len(kinds) != 1:
            continue
        kind = kinds[0]
        if kind not in best or step_s < best[kind][0]:
            best[kind] = entry
    return best


def kind_by_kind(chosen, candidates):
    found = {}
    for kind in lab.KINDS:
        alone = []
        for candidate in candidates:
            value = getattr(candidate.layout, kind)
            back = candidate.layout._replace(dp=chosen.dp, **{kind: getattr(chosen, kind)})
            if value != getattr(chosen, kind) and back == chosen:
                alone.append(candidate)
        if alone:
            found[kind] = min(alone)
    return found


def sorted_first(chosen, candidates):
    found = dict.fromkeys(lab.KINDS)
    for candidate in sorted(candidates, reverse=True):
        kinds = []
        for kind in lab.KINDS:
            if getattr(candidate.layout, kind) != getattr(chosen, kind):
                kinds.append(kind)
        if len(kinds) == 1:
            found[kinds[0]] = candidate
    return found


def any_difference(chosen, candidates):
    best = {}
    for candidate in sorted(candidates):
        for kind in lab.KINDS:
            if getattr(candidate.layout, kind) != getattr(chosen, kind):
                best.setdefault(kind, candidate)
    return best


def first_come(chosen, candidates):
    best = {}
    for candidate in candidates:
        kinds = [k for k in lab.KINDS if getattr(candidate.layout, k) != getattr(chosen, k)]
        if len(kinds) == 1:
            best.setdefault(kinds[0], candidate)
    return best


def dp_must_stay(chosen, candidates):
    same = [entry for entry in candidates if entry.layout.dp == chosen.dp]
    return count_the_changes(chosen, same)


def least_memory(chosen, candidates):
    by_memory = sorted(candidates, key=lambda entry: entry.memory_bytes)
    return first_come(chosen, by_memory)


def sorts_in_place(chosen, candidates):
    candidates.sort(key=lambda entry: -entry[0])
    return count_the_changes(chosen, candidates)


def layouts_alone(chosen, candidates):
    found = count_the_changes(chosen, candidates)
    return {kind: entry.layout for kind, entry in found.items()}


def fitting_alone(chosen, candidates):
    fitting = [entry for entry in candidates if entry.memory_bytes < 80e9]
    return count_the_changes(chosen, fitting)


def no_zero_3(chosen, candidates):
    return count_the_changes(chosen, [entry for entry in candidates if entry.layout.zero < 3])


RIVALS = Answers(
    solves="rivals",
    takes_ranks=False,
    real=True,
    right={
        "count the changes": count_the_changes,
        "kind by kind": kind_by_kind,
        "sorted first": sorted_first,
    },
    wrong={
        "any difference": (any_difference, "only one choice may change"),
        "first come": (first_come, "stronger rival"),
        "dp must stay": (dp_must_stay, "you have none under this name"),
        "least memory": (least_memory, "stronger rival"),
        "sorts in place": (sorts_in_place, "changes the list"),
        "layouts alone": (layouts_alone, "an entry of the list"),
        "ZeRO-3 left out": (no_zero_3, "stronger rival"),
        "those that fit": (fitting_alone, "whether it fits or not"),
        "a list": (lambda chosen, found: list(found)[:2], "return a dict"),
        "labcode's own": (l21_capstone.rivals, "labcode's own answer"),
    },
)

# ---- 21.4 verdict


def two_cases(chosen, rival, room_bytes):
    if rival.memory_bytes > room_bytes:
        amount = (rival.memory_bytes - room_bytes) / GIB
        unit = "GiB"
        before, after = chosen.memory_parts, rival.memory_parts
    else:
        amount = rival.step_s - chosen.step_s
        unit = "s"
        before, after = chosen.parts, rival.parts
    growth = {name: after[name] - before[name] for name in after}
    return amount, unit, max(growth, key=growth.get)


def by_loop(chosen, rival, room_bytes):
    over = rival.memory_bytes - room_bytes
    fits = over <= 0
    pair = (chosen.parts, rival.parts) if fits else (chosen.memory_parts, rival.memory_parts)
    worst = None
    for name, value in pair[1].items():
        grown = value - pair[0].get(name, 0)
        if worst is None or grown > worst[0]:
            worst = (grown, name)
    if fits:
        return [sum(rival.parts.values()) - sum(chosen.parts.values()), "s", worst[1]]
    return [over / 1024**3, "GiB", worst[1]]


def rounded_verdict(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    return round(amount, 2), unit, part


def seconds_always(chosen, rival, room_bytes):
    return two_cases(chosen, rival, 1e18)


def seconds_first(chosen, rival, room_bytes):
    room = 1e18 if rival.step_s > chosen.step_s else room_bytes
    return two_cases(chosen, rival, room)


def largest_part(chosen, rival, room_bytes):
    amount, unit, _ = two_cases(chosen, rival, room_bytes)
    parts = rival.parts if unit == "s" else rival.memory_parts
    return amount, unit, max(parts, key=parts.get)


def in_gb(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    return (amount * GIB / 1e9 if unit == "GiB" else amount), unit, part


def beyond_the_chosen(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    more = (rival.memory_bytes - chosen.memory_bytes) / GIB
    return (more if unit == "GiB" else amount), unit, part


def other_way_round(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    return -amount, unit, part


def whole_gpu(chosen, rival, room_bytes):
    return two_cases(chosen, rival, rival.memory_limit_bytes)


def part_of_time(chosen, rival, room_bytes):
    amount, unit, _ = two_cases(chosen, rival, room_bytes)
    _, _, part = two_cases(chosen, rival, 1e18)
    return amount, unit, part


def no_part(chosen, rival, room_bytes):
    return two_cases(chosen, rival, room_bytes)[:2]


def never_negative(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    return abs(amount), unit, part


def products_left_out(chosen, rival, room_bytes):
    amount, unit, part = two_cases(chosen, rival, room_bytes)
    if unit == "s":
        more = {}
        for name in rival.parts:
            if name != "product":
                more[name] = rival.parts[name] - chosen.parts[name]
        part = max(more, key=more.get)
    return amount, unit, part


VERDICT = Answers(
    solves="verdict",
    takes_ranks=False,
    real=True,
    right={"two cases": two_cases, "by loop": by_loop, "rounded": rounded_verdict},
    wrong={
        "seconds always": (seconds_always, "does not fit"),
        "seconds first": (seconds_first, "does not fit"),
        "the largest part": (largest_part, "has grown more"),
        "GB for GiB": (in_gb, "in GiB"),
        "beyond the chosen": (beyond_the_chosen, "beyond the room"),
        "the other way round": (other_way_round, "positive amount"),
        "the whole GPU": (whole_gpu, "does not lose by"),
        "a part of the time": (part_of_time, "none of `memory_parts`"),
        "no part": (no_part, "three things"),
        "never negative": (never_negative, "faster than the chosen"),
        "products left out": (products_left_out, "has grown more"),
        "labcode's own": (l21_capstone.verdict, "labcode's own answer"),
    },
)

# ---- 21.5 a cluster of your own

TEXT = l21_capstone.CLUSTER_TEXT.replace("nccl-tests; ", "nccl-tests of one node, ")
OTHER_ORDER = """
# the machine of the faculty
[ours]
source = "description"
between_latency_us = 8.0
between_GB_per_s = 6.25   # 2 * 100 / 8 / 4
inside_latency_us = 6.0
inside_GB_per_s = 200.0
gpus_per_node = 4
gpu = "a100-40gb"
"""
OWN_GPU = (
    TEXT.replace('"a100-40gb"', '"theirs"')
    + """
[gpu.theirs]
driver_name = "NVIDIA A100-SXM4-40GB"
memory_GiB = 39.4
matmul_share = { bfloat16 = 0.85 }
memory_share = 0.9
attention_share = { flash2 = 0.6 }
source = "measured"
"""
)


def with_rate(number):
    return TEXT.replace("6.25", str(number))


OWN = Answers(
    solves="my_cluster",
    takes_ranks=False,
    real=True,
    right={"ten lines": TEXT, "another order": OTHER_ORDER, "a GPU of its own": OWN_GPU},
    wrong={
        "bits": (with_rate(50), "sold in bits"),
        "labcode's own": (l21_capstone.CLUSTER_TEXT, "labcode's own file"),
        "a number in quotes": (TEXT.replace("node = 4", 'node = "4"'), "without quotes"),
        "a whole node": (with_rate(25), "that of each GPU"),
        "one adapter": (with_rate(12.5), "how many of each"),
        "shared by all": (with_rate(1.5625), "do not share"),
        "all GPUs in one node": (TEXT.replace("node = 4", "node = 16"), "share a node"),
        "seconds": (TEXT.replace("us = 8", "us = 8e-6"), "between_latency_us"),
        "another GPU": (TEXT.replace("40gb", "80gb"), "not the GPU of the description"),
        "no source": (TEXT.split("source")[0], "needs source"),
        "no table": (TEXT.replace("[faculty]", ""), "cannot read it"),
        "no TOML": (TEXT.replace("=", ":"), "is no TOML"),
        "a misspelt field": (TEXT.replace("inside_GB_", "inside_gb_"), "cannot read it"),
    },
)

# ---- 21.6 the plan


def defended(layout, *kinds):
    """The layout with what is true of it, and rivals of these kinds."""
    about = lab.predicted(layout, lab.TASK)
    strongest = lab.rivals(layout, lab.candidates(lab.TASK))
    entries = []
    for kind in kinds:
        rival = strongest[kind].layout
        found = lab.verdict(about, lab.predicted(rival, lab.TASK), lab.TASK.room_bytes)
        entries.append((rival, *found))
    days, _ = lab.days_and_mfu(lab.TASK, about.step_s)
    defence = {
        "step_s": about.step_s,
        "memory_gib": about.memory_bytes / GIB,
        "days": days,
        "rivals": entries,
    }
    return layout, defence


EIGHT = Layout(32, 8, 4, 1, 1, "none")


def with_change(**changes):
    layout, defence = defended(EIGHT, "tp", "pp")
    return layout, defence | changes


def with_rival(place, value):
    layout, defence = defended(EIGHT, "tp", "pp")
    entry = list(defence["rivals"][0])
    entry[place] = value
    return layout, defence | {"rivals": [entry, defence["rivals"][1]]}


def rounded_plan():
    layout, defence = defended(Layout(16, 16, 4, 1, 1, "none"), "checkpointing", "micro_batch")
    entries = [
        [rival, round(amount, 2), unit, part] for rival, amount, unit, part in defence["rivals"]
    ]
    return (
        tuple(layout),
        {
            "step_s": round(defence["step_s"], 1),
            "memory_gib": round(defence["memory_gib"], 1),
            "days": round(defence["days"], 1),
            "rivals": entries,
        },
    )


def said(answer):
    """`my_plan` of somebody who has worked this out beforehand."""
    return lambda task: answer


def worked_out(task):
    entry = lab.fitting(task)[0]
    layout, defence = defended(entry.layout, "micro_batch", "pp")
    assert layout == entry.layout
    return layout, defence


PLAN = Answers(
    solves="my_plan",
    takes_ranks=False,
    real=True,
    right={
        "worked out": worked_out,
        "rounded, 16 stages": said(rounded_plan()),
        "tp 8": said(defended(Layout(16, 8, 8, 1, 1, "none"), "checkpointing", "micro_batch")),
        "no ZeRO": said(list(defended(Layout(32, 8, 4, 0, 1, "none"), "micro_batch", "tp"))),
    },
    wrong={
        "that of the H100s": (
            said(defended(Layout(64, 4, 4, 1, 1, "none"), "tp", "checkpointing")),
            "8 of 9 points",
        ),
        "too full": (
            said(defended(Layout(64, 4, 4, 0, 1, "none"), "tp", "checkpointing")),
            "fits: it",
        ),
        "too few GPUs": (said((EIGHT._replace(dp=16), with_change()[1])), "number of GPUs"),
        "tp over nodes": (
            said((Layout(8, 8, 16, 1, 1, "none"), with_change()[1])),
            "legal: a tp group",
        ),
        "other seconds": (said(with_change(step_s=10.0)), "step_s: you say 10"),
        "GB for GiB": (said(with_change(memory_gib=46.1)), "in GiB"),
        "days of the other budget": (said(with_change(days=49.1)), "days: you say"),
        "one kind": (said(defended(EIGHT, "tp", "tp")), "both rivals change tp"),
        "two choices at once": (
            said(with_rival(0, Layout(16, 16, 4, 1, 2, "none"))),
            "changes 2 choices",
        ),
        "a weak rival": (
            said(with_rival(0, Layout(128, 8, 1, 1, 1, "none"))),
            "not the strongest",
        ),
        "a rival that wins": (
            said(defended(Layout(16, 8, 8, 1, 1, "none"), "tp", "checkpointing")),
            "it does not lose",
        ),
        "another part": (said(with_rival(3, "product")), "rival 1"),
        "no candidate": (
            said(with_rival(0, EIGHT._replace(checkpointing="selective"))),
            "none of lab.candidates",
        ),
        "no such stage of ZeRO": (said((EIGHT._replace(zero=9), with_change()[1])), "`zero`"),
        "no replicas": (said((EIGHT._replace(dp=0), with_change()[1])), "`dp`"),
        "no number": (said(with_change(step_s=None)), "step_s: give a number"),
        "no such key": (said((EIGHT, {"step_s": 1.0})), "`defence` has no 'memory_gib'"),
        "the layout alone": (said(EIGHT), "two things"),
    },
)

ANSWERS = {
    "21.1": DAYS,
    "21.2": RULES,
    "21.3": RIVALS,
    "21.4": VERDICT,
    "21.5": OWN,
    "21.6": PLAN,
}
