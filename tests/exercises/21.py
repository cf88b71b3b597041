"""Answers to the exercises of lesson 21, the capstone."""

from answers import Answers, changed

from course.labs import l21_capstone as lab
from course.labs.l20_plan import flops

# ---- 21.1 days and MFU


def by_rates(brief, step_s):
    tokens_per_s = brief.global_batch * brief.shape.tokens / step_s
    flops_per_s = flops(brief.shape, 1) * brief.global_batch / step_s
    share = flops_per_s / brief.gpus / brief.peak_flops_per_s
    return [brief.budget_tokens / tokens_per_s / 86400, share]


DAYS = Answers(
    solves="days_and_mfu",
    takes_ranks=False,
    right={
        "by rates": by_rates,
        "rounded": changed("return days, mfu => return round(days, 1), round(mfu, 3)"),
    },
    wrong={
        "seconds": (changed("/ DAY_S => / 1"), "how many has a day"),
        "hours": (changed("DAY_S => 3600"), "these are hours"),
        "samples for tokens": (changed(" * brief.shape.tokens => "), "a step has samples"),
        "one sample a step": (
            changed("(brief.global_batch * brief.shape.tokens) => brief.shape.tokens"),
            "a step has more than one sample",
        ),
        "one GPU": (changed(" * brief.gpus => "), "that of one GPU"),
        "percent": (changed("return days, mfu => return days, 100 * mfu"), "not percent"),
        "FLOPs of one sample": (
            changed("flops(brief.shape, brief.global_batch) => flops(brief.shape, 1)"),
            "FLOPs of all",
        ),
        "backward twice": (changed("work = flops => work = 3 * flops"), "in it already"),
        "1,024 GPUs in the code": (changed("brief.gpus => 1024"), "half as many GPUs"),
        "MFU first": (changed("return days, mfu => return mfu, days"), "days come first"),
        "days alone": (changed("return days, mfu => return days"), "two numbers"),
        "labcode's own": (lab.days_and_mfu, "labcode's own answer"),
    },
)

# ---- 21.2 the rules


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


IF_SOUND = """if not broken:
        needed = lab.predicted(layout, brief).memory_bytes
        if needed"""
WITH_TRY = """try:
        needed = lab.predicted(layout, brief).memory_bytes
    except ValueError:
        needed = 0
    if needed"""

RULES = Answers(
    solves="broken_rules",
    takes_ranks=False,
    right={
        "as a set": as_a_set,
        "with try": changed(f"{IF_SOUND} => {WITH_TRY}", "if needed => if not broken and needed"),
    },
    wrong={
        "memory always": (changed("if not broken => if True"), "Ask for the memory last"),
        "memory where it can": (
            changed(f"{IF_SOUND} => {WITH_TRY}"),
            "only where nothing else is wrong",
        ),
        "tp up to a node": (
            changed(
                "brief.cluster.gpus_per_node % layout.tp => layout.tp > brief.cluster.gpus_per_node"
            ),
            "tp=4 on nodes of 6",
        ),
        "query heads": (changed("shape.kv_heads => shape.heads"), "kv_heads"),
        "no margin": (
            changed("needed > brief.room_bytes => needed > brief.cluster.gpu.memory_bytes"),
            "room_bytes",
        ),
        "the micro-batch ignored": (
            changed("(layout.dp * layout.micro_batch) => layout.dp"),
            "times their micro-batch",
        ),
        "batch divided by each": (
            changed(
                "% (layout.dp * layout.micro_batch) => "
                "% layout.dp or brief.global_batch % layout.micro_batch"
            ),
            "times their micro-batch",
        ),
        "no more tp than heads": (
            changed("shape.kv_heads % layout.tp => layout.tp > shape.kv_heads"),
            "deals out key/value heads",
        ),
        "always 1,024 GPUs": (changed("brief.gpus => 1024"), "number of GPUs"),
        "always 80 layers": (changed("shape.layers => 80"), "as many layers as the others"),
        "names twice": (changed("return broken => return broken + broken"), "twice"),
        "the first fault alone": (
            changed("return broken => return broken[:1]"),
            "rules, and you name 1 of them: does your function go on after the first",
        ),
        "the MLP ignored": (changed("shape.ffn % layout.tp => False"), "features of the MLP"),
        "a truth value": (changed("return broken => return not broken"), "list of names"),
        "another name": (changed('"node" => "tp"'), "is no name of the table"),
        "labcode's own": (lab.broken_rules, "labcode's own answer"),
        "asks of the layers only without ZeRO-3": (
            changed("if shape.layers % => if layout.zero != 3 and shape.layers %"),
            "with other choices beside it",
        ),
    },
)

# ---- 21.3 rivals


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


FASTER = "kind not in best or candidate.step_s < best[kind].step_s"

RIVALS = Answers(
    solves="rivals",
    takes_ranks=False,
    right={"kind by kind": kind_by_kind, "sorted first": sorted_first},
    wrong={
        "any difference": (
            changed("len(changed) != 1 => not changed"),
            "only one choice may change",
        ),
        "first come": (changed(f"{FASTER} => kind not in best"), "stronger rival"),
        "dp must stay": (
            changed("in lab.KINDS => in (*lab.KINDS, 'dp')"),
            "you have none under this name",
        ),
        "least memory": (changed(".step_s => .memory_bytes"), "stronger rival"),
        "sorts in place": (
            changed("best = {} => best = {}\n    candidates.sort()"),
            "changes the list",
        ),
        "layouts alone": (
            changed(
                "return best => return {kind: entry.layout for kind, entry in best.items()}",
            ),
            "an entry of the list",
        ),
        "those that fit": (
            changed("len(changed) != 1 => len(changed) != 1 or candidate.memory_bytes > 80e9"),
            "whether it fits or not",
        ),
        "a list": (changed("return best => return list(best.values())"), "return a dict"),
        "labcode's own": (lab.rivals, "labcode's own answer"),
    },
)

# ---- 21.4 verdict


def by_loop(chosen, rival, room_bytes):
    over = rival.memory_bytes - room_bytes
    fits = over <= 0
    before = chosen.parts if fits else chosen.memory_parts
    after = rival.parts if fits else rival.memory_parts
    worst = (-1e30, "")
    for name, value in after.items():
        worst = max(worst, (value - before.get(name, 0), name))
    if fits:
        return [sum(after.values()) - sum(before.values()), "s", worst[1]]
    return [over / 2**30, "GiB", worst[1]]


DOES_NOT_FIT = "rival.memory_bytes > room_bytes"
SLOWER = "rival.step_s - chosen.step_s"

VERDICT = Answers(
    solves="verdict",
    takes_ranks=False,
    right={
        "by loop": by_loop,
        "rounded": changed("return amount => return round(amount, 2)"),
    },
    wrong={
        "seconds always": (changed(f"{DOES_NOT_FIT} => False"), "does not fit"),
        "seconds first": (
            changed(f"{DOES_NOT_FIT} => {DOES_NOT_FIT} and {SLOWER} <= 0"),
            "does not fit",
        ),
        "the largest part": (
            changed("after[name] - before[name] => after[name]"),
            "has grown more",
        ),
        "GB for GiB": (changed("/ GIB => / 1e9"), "in GiB"),
        "bytes": (changed(" / GIB => "), "in GiB"),
        "beyond the chosen": (
            changed(
                "(rival.memory_bytes - room_bytes) => (rival.memory_bytes - chosen.memory_bytes)"
            ),
            "beyond the room",
        ),
        "the other way round": (
            changed(f"{SLOWER} => chosen.step_s - rival.step_s"),
            "positive amount",
        ),
        "the whole GPU": (
            changed(f"{DOES_NOT_FIT} => not rival.fits"),
            "does not lose by",
        ),
        "a part of the time": (changed(".memory_parts => .parts"), "none of `memory_parts`"),
        "no part": (
            changed(", max(growth, key=growth.get) => "),
            "three things",
        ),
        "never negative": (changed(f"{SLOWER} => abs({SLOWER})"), "faster than the chosen"),
        "products left out": (
            changed('in after: => in set(after) - {"product"}:'),
            "has grown more",
        ),
        "labcode's own": (lab.verdict, "labcode's own answer"),
    },
)

# ---- 21.5 a cluster of your own

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
SOURCE = 'source = "nccl-tests of one node; two 100 Gb/s adapters a node"'
OWN_GPU = """
[gpu.theirs]
driver_name = "NVIDIA A100-SXM4-40GB"
memory_GiB = 39.4
matmul_share = { bfloat16 = 0.85 }
memory_share = 0.9
attention_share = { flash2 = 0.6 }
source = "measured"
"""

OWN = Answers(
    solves="my_cluster",
    takes_ranks=False,
    right={
        "another order": OTHER_ORDER,
        "a GPU of its own": changed('"a100-40gb" => "theirs"', f"{SOURCE} => {SOURCE}{OWN_GPU}"),
    },
    wrong={
        "bits": (changed("6.25 => 50"), "sold in bits"),
        "a whole node": (changed("6.25 => 25"), "that of each GPU"),
        "one adapter": (changed("6.25 => 12.5"), "how many of each"),
        "shared by all": (changed("6.25 => 1.5625"), "do not share"),
        "a number in quotes": (changed('node = 4 => node = "4"'), "without quotes"),
        "all GPUs in one node": (changed("node = 4 => node = 16"), "share a node"),
        "seconds": (changed("latency_us = 8 => latency_us = 8e-6"), "between_latency_us"),
        "another GPU": (changed("a100-40gb => a100-80gb"), "not the GPU of the description"),
        "no source": (changed(f"{SOURCE} => "), "needs source"),
        "no table": (changed("[faculty] => "), "cannot read it"),
        "no TOML": (changed("gpus_per_node = => gpus_per_node:"), "is no TOML"),
        "a misspelt field": (changed("inside_GB_ => inside_gb_"), "cannot read it"),
        "labcode's own": (lab.CLUSTER_TEXT, "labcode's own file"),
    },
)

# ---- 21.6 the plan


def worked_out(task):
    entry = lab.fitting(task)[0]
    strongest = lab.rivals(entry.layout, lab.candidates(task))
    mine = lab.predicted(entry.layout, task)
    rivals = []
    for rival in strongest.values():
        about = lab.predicted(rival.layout, task)
        said = lab.verdict(mine, about, task.room_bytes)
        if said[0] > 0:
            rivals.append([rival.layout, *said])
    defence = {
        "step_s": entry.step_s,
        "memory_gib": entry.memory_bytes / 2**30,
        "days": lab.days_and_mfu(task, entry.step_s)[0],
        "rivals": rivals[:2],
    }
    return [entry.layout, defence]


SIZES = "dp=32, pp=8, tp=4, zero=1"
KINDS = '("tp", "checkpointing")'
OTHER = "other = strongest[kind].layout"
WITHOUT_TP = """        if kind == "tp":
            other = layout._replace(dp=128, tp=1)"""
RETURN = "return layout, defence"

PLAN = Answers(
    solves="my_plan",
    takes_ranks=False,
    right={
        "worked out": worked_out,
        "rounded, 16 stages": changed(
            f"{SIZES} => dp=16, pp=16, tp=4, zero=1",
            f'{KINDS} => ("checkpointing", "micro_batch")',
            '"step_s": mine.step_s => "step_s": round(mine.step_s, 1)',
            "mine.memory_bytes / GIB => round(mine.memory_bytes / GIB, 1)",
            '"days": days => "days": round(days, 1)',
            "(other, amount => (other, round(amount, 2)",
            f"{RETURN} => return tuple(layout), defence",
        ),
        "tp 8": changed(
            f"{SIZES} => dp=16, pp=8, tp=8, zero=1",
            f'{KINDS} => ("checkpointing", "micro_batch")',
        ),
        "no ZeRO": changed(f"{SIZES} => dp=32, pp=8, tp=4, zero=0"),
    },
    wrong={
        "that of the H100s": (
            changed(f"{SIZES} => dp=64, pp=4, tp=4, zero=1"),
            "8 of 9 points",
        ),
        "too full": (changed(f"{SIZES} => dp=64, pp=4, tp=4, zero=0"), "fits: it"),
        "too few GPUs": (changed("dp=32 => dp=16"), "number of GPUs"),
        "tp over nodes": (
            changed(f"{RETURN} => return layout._replace(dp=8, tp=16), defence"),
            "legal: a tp group",
        ),
        "ZeRO-2": (
            changed(f"{RETURN} => return layout._replace(zero=2), defence"),
            "none of lab.candidates",
        ),
        "no replicas": (changed(f"{RETURN} => return layout._replace(dp=0), defence"), "`dp`"),
        "numbers of the H100s": (
            changed("lab.predicted(layout, task) => lab.predicted(layout, lab.H100)"),
            "step_s: you say",
        ),
        "GB for GiB": (changed("mine.memory_bytes / GIB => mine.memory_bytes / 1e9"), "in GiB"),
        "days of the other budget": (
            changed("days_and_mfu(task => days_and_mfu(lab.H100"),
            "days: you say",
        ),
        "one kind": (changed(f'{KINDS} => ("tp", "tp")'), "both rivals change tp"),
        "two choices at once": (
            changed(f"{OTHER} => {OTHER}._replace(micro_batch=2)"),
            "changes 2 choices",
        ),
        "a weak rival": (changed(f"{OTHER} => {OTHER}\n{WITHOUT_TP}"), "not the strongest"),
        "a rival that wins": (changed(f"{SIZES} => dp=16, pp=8, tp=8, zero=1"), "does not lose"),
        "another part": (changed("unit, part)) => unit, 'product'))"), "rival 1"),
        "no candidate": (
            changed(f'{OTHER} => other = layout._replace(checkpointing="selective")'),
            "none of lab.candidates",
        ),
        "no number": (changed('"step_s": mine.step_s => "step_s": None'), "step_s: give a number"),
        "no such key": (changed('"memory_gib" => "memory"'), "`defence` has no 'memory_gib'"),
        "the layout alone": (changed(f"{RETURN} => return layout"), "two things"),
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
