"""Answers to the exercises of lesson 19, debugging precision across ranks."""

import math
import re
from collections import defaultdict

import torch
import torch.distributed as dist
import yaml
from answers import Answers, changed
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import api_method

from labcode.debug.feature import Feature

# ---- 19.1 combine


def from_both_sides(a, b):
    n = a[0] + b[0]
    if not n:
        return 0, 0.0, 0.0
    mean = (a[0] * a[1] + b[0] * b[1]) / n
    squares = 0.0
    for count, part_mean, part_squares in (a, b):
        squares += part_squares + count * (part_mean - mean) ** 2
    return [n, mean, squares]


def empty_first(a, b):
    if a[0] == 0:
        return b
    if b[0] == 0:
        return a
    weight = b[0] / (a[0] + b[0])
    distance = b[1] - a[1]
    return (
        a[0] + b[0],
        a[1] + weight * distance,
        a[2] + b[2] + distance**2 * a[0] * weight,
    )


LABCODES_SUM = """both = moments.Moments(*a) + moments.Moments(*b)
    return both.count, both.mean, both.squares"""

M2_OF_BOTH = "m2_a + m2_b + d * d * n_a * n_b / n"
BY_DIFFERENCE = (
    "m2_a + n_a * mean_a**2 + m2_b + n_b * mean_b**2 - (n_a * mean_a + n_b * mean_b) ** 2 / n"
)

COMBINE = Answers(
    solves="combine",
    takes_ranks=False,
    right={"from the new mean": from_both_sides, "empty first": empty_first},
    wrong={
        "the mean of the means": (
            changed("mean_a + d * n_b / n => (mean_a + mean_b) / 2"),
            "the middle between the two means",
        ),
        "a difference of squares": (
            changed(f"{M2_OF_BOTH} => {BY_DIFFERENCE}"),
            "a difference of two large numbers",
        ),
        "M2 is added": (changed(" + d * d * n_a * n_b / n => "), "whose means differ"),
        "not divided by n": (changed("n_a * n_b / n => n_a * n_b"), "compare your last term"),
        "d for d squared": (changed("d * d * => d *"), "compare your last term"),
        "the std": (
            changed(f"{M2_OF_BOTH} => math.sqrt(({M2_OF_BOTH}) / (n - 1))"),
            "this is the std of both",
        ),
        "the other sign": (changed("+ d * d => - d * d"), "is never negative"),
        "empty parts": (changed("if n == 0 => if False"), "it divides by zero"),
        "the weights of the other": (changed("d * n_b / n => d * n_a / n"), "from a's mean"),
        "n of the larger one": (changed("return n => return max(n_a, n_b)"), "there are 6 values"),
        "n forgotten": (changed("return n, => return"), "return three numbers"),
        "labcode's own": (
            changed(f"d = mean_b - mean_a => {LABCODES_SUM}"),
            "labcode's own answer",
        ),
    },
)

# ---- 19.2 statistics over a group


def without_a_loop(x, kept, group):
    wide = x.double().flatten()
    empty = len(wide) == 0
    own = torch.zeros(6, dtype=torch.float64)
    own[0] = len(wide)
    own[1] = 0.0 if empty else wide.mean()
    own[2] = (wide - own[1]).square().sum()
    own[3] = math.inf if empty else wide.min()
    own[4] = -math.inf if empty else wide.max()
    own[5] = torch.count_nonzero(x) - torch.count_nonzero(kept)
    table = torch.empty(group.size(), 6, dtype=torch.float64)
    dist.all_gather(list(table), own, group=group)
    n = table[:, 0].sum()
    mean = (table[:, 0] * table[:, 1]).sum() / n
    squares = table[:, 2].sum() + (table[:, 0] * (table[:, 1] - mean).square()).sum()
    least = table[:, 3].min()
    most = table[:, 4].max()
    found = [mean, (squares / (n - 1)).sqrt(), least, most, torch.maximum(-least, most)]
    found.append(100 * table[:, 5].sum() / n)
    return {name: value.item() for name, value in zip(NAMES, found)}


NAMES = ("mean", "std", "min", "max", "amax", "underflows%")
ROWS = "rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]"
ALL_GATHER = "dist.all_gather(rows, own, group=group)"
END = "/ count,\n    }"
SLOTS = """rows = torch.zeros(group.size(), 6, dtype=torch.float64)
    rows[dist.get_rank(group)] = own.clamp(-1e300, 1e300)"""
MEAN_OF_ALL = f"""{END}
    together = torch.tensor(list(found.values())) / group.size()
    dist.all_reduce(together, group=group)
    return dict(zip(found, together.tolist()))"""
FIRST_LINE = "mean /= count\n    "
BY_SQUARES = """mean /= count
    squares = max(squares - count * mean**2, 0.0)
    least = min"""
PADDED = """padding = torch.zeros(4096 - x.numel(), dtype=torch.float64)
    own = torch.cat([own, wide.flatten(), padding])
    rows ="""
NOTHING = f"""if x.numel() == 0:
        return dict.fromkeys({NAMES}, 0.0)
    wide ="""

STATISTICS = Answers(
    solves="statistics",
    right={
        "without a loop": without_a_loop,
        "into one tensor": changed(f"{ROWS} => rows = list(torch.empty(group.size(), 6).double())"),
        "a sum of slots": changed(
            f"{ROWS} => {SLOTS}", f"{ALL_GATHER} => dist.all_reduce(rows, group=group)"
        ),
    },
    wrong={
        "own part": (changed(f"{ALL_GATHER} => rows = [own]"), "this rank's part alone"),
        "the world": (
            changed("get_world_size(group) => get_world_size()", ", group=group => "),
            "in the group of ranks",
        ),
        "means of statistics": (
            changed(
                f"{ALL_GATHER} => rows = [own]", "return { => found = {", f"{END} => {MEAN_OF_ALL}"
            ),
            "mean of the values of the parts",
        ),
        "several collectives": (
            changed(f"{ALL_GATHER} => {ALL_GATHER}; dist.all_reduce(own, group=group)"),
            "one is enough",
        ),
        "std by n": (changed("(count - 1) => count"), "by which number does torch.std divide"),
        "zeros count as lost": (
            changed("(kept == 0) & (x != 0) => kept == 0"),
            "was 0 before the cast",
        ),
        "a share": (changed("100 * sum => sum"), "percent are asked for"),
        "amax is max": (changed("max(-least, most) => most"), "may be a negative number"),
        "an empty part": (changed("if x.numel() > 0 => if True"), "min()"),
        "squares in float32": (
            changed(
                "own[1] = wide.mean() => own[1] = x.sum()",
                "(wide - wide.mean()).square() => x.square()",
                "mean += distance * n / total => mean += part_mean",
                " + distance**2 * count * n / total => ",
                f"least = min => {BY_SQUARES}",
            ),
            "In which precision",
        ),
        "squares in float64": (
            changed(
                "(wide - wide.mean()).square() => wide.square()",
                "distance * n / total => (part_mean - mean) * n / total",
                " + distance**2 * count * n / total => ",
                f"least = min => {BY_SQUARES.removeprefix(FIRST_LINE)}",
            ),
            "a difference of large numbers",
        ),
        "0 for an empty part": (
            changed("math.inf, -math.inf => 0.0, 0.0"),
            "One of the parts may be empty",
        ),
        "1000 for an empty part": (
            changed("math.inf, -math.inf => 1000.0, -1000.0"),
            "One of the parts may be empty",
        ),
        "rounded values count as lost": (
            changed("(kept == 0) & (x != 0) => kept != x"),
            "rounded to another one is not lost",
        ),
        "the tensors themselves": (changed(f"rows = => {PADDED}"), "few numbers of each part"),
        "tensors in the dict": (
            changed(": mean, => : torch.tensor(mean),"),
            "is to be a Python number",
        ),
        "a list": (
            changed("return { => return list({", f"{END} => {END}.values())"),
            "return a dict",
        ),
        "amax forgotten": (changed('"amax": max(-least, most), => '), "amax is missing"),
        "nothing sent where nothing is": (changed(f"wide = => {NOTHING}"), "rank 0 has finished"),
        "labcode's own": (
            changed("wide = => moments.measure(x)\n    wide ="),
            "labcode's own answer",
        ),
    },
)

# ---- 19.3 who writes the same file


def by_loops(tp, dp, pp, over):
    found = {}
    for p in range(pp):
        for d in range(dp):
            for t in range(tp):
                key = (p, 0 if "dp" in over else d, 0 if "tp" in over else t)
                found.setdefault(key, []).append((p * dp + d) * tp + t)
    return [found[key] for key in sorted(found)]


def by_reshape(tp, dp, pp, over):
    ranks = torch.arange(tp * dp * pp).view(pp, dp, tp)
    if "dp" not in over and "tp" not in over:
        groups = ranks.reshape(-1, 1)
    elif "dp" not in over:
        groups = ranks.reshape(-1, tp)
    elif "tp" not in over:
        groups = ranks.transpose(1, 2).reshape(-1, dp)
    else:
        groups = ranks.reshape(pp, -1)
    return groups.tolist()


PLACE_IN_STAGE = '"tp": rank % tp, "dp": rank // tp % dp'
GROUPS = "list(groups.values())"

SAME_FILE = Answers(
    solves="same_file",
    takes_ranks=False,
    right={"loops": by_loops, "reshape": by_reshape},
    wrong={
        "pp forgotten": (changed(', "pp": rank // (tp * dp) => '), "different layers"),
        "dp varies fastest": (
            changed(f'{PLACE_IN_STAGE} => "dp": rank % dp, "tp": rank // dp % tp'),
            "tp varies fastest",
        ),
        "inside out": (changed("not in over => in over"), "in which axes"),
        "one axis alone": (changed("in over => in over[:1]"), "in which axes"),
        "the first stage alone": (changed("tp * dp * pp => tp * dp"), "belongs to one group"),
        "one rank of each": (
            changed(f"{GROUPS} => [group[0] for group in groups.values()]"),
            "each group is a list",
        ),
        "the dict": (changed(f"{GROUPS} => groups"), "return a list of lists"),
        "labcode's own": (
            changed("groups = {} => return GridShape(tp=tp, dp=dp, pp=pp).groups(*over)"),
            "labcode's own answer",
        ),
    },
)

# ---- 19.4 the YAML that mends the run

SCALING = """PerTensorScaling:
      enabled: True
      tensors: [activation, weight]
      gemms: [fprop, dgrad, wgrad]
"""
TWO_BLOCKS = """
{0}:
  enabled: True
  layers: {{layer_name_regex_pattern: {0}}}
  transformer_engine:
    {1}"""

MEND = Answers(
    solves="mend_yaml",
    takes_ranks=True,
    real=True,
    right={
        "two blocks": TWO_BLOCKS.format("mlp", SCALING) + TWO_BLOCKS.format("attention", SCALING),
        "each product with its own operands": changed(
            "tensors: [activation, weight] => gemms_struct:",
            "      gemms: [fprop, dgrad, wgrad] => "
            "        - {gemm: fprop, tensors: [activation, weight]}\n"
            "        - {gemm: dgrad, tensors: [weight]}\n"
            "        - {gemm: wgrad, tensors: [activation]}",
        ),
        "layer types, and all three tensors": changed(
            "layer_name_regex_pattern: blocks => layer_types: [qkv, proj, up, down]",
            "weight] => weight, gradient]",
        ),
    },
    wrong={
        "FP8 switched off": (
            changed(f"{SCALING} => DisableFP8Layer:\n      enabled: True\n"),
            "the reason to use FP8 is gone",
        ),
        "products switched off": (
            changed(f"{SCALING} => DisableFP8GEMM:\n      enabled: True\n      gemms: [fprop]\n"),
            "the reason to use FP8 is gone",
        ),
        "another feature that scales": (
            changed(
                "PerTensorScaling => FakeQuant", "wgrad] => wgrad]\n      quant_format: FP8E4M3"
            ),
            "out of FP8, and only rounds",
        ),
        "the weight alone": (changed("activation, => "), "the activation of"),
        "the activation alone": (changed(", weight] => ]"), "the weight of"),
        "forward alone": (changed(", dgrad, wgrad => "), "in the product wgrad"),
        "one block of the model": (changed("pattern: blocks => pattern: blocks.0"), "no block"),
        "not enabled": (
            changed("mend:\n  enabled: True => mend:\n  enabled: False"),
            "no block is enabled",
        ),
        "at the top level": (
            changed("  transformer_engine:\n => ", "    PerTensor =>   PerTensor"),
            "top level",
        ),
        "a margin": (changed("wgrad] => wgrad]\n      margin: 18"), "still learns less"),
        "a misspelled name": (changed("PerTensor => PerTensors"), "unknown feature"),
        "statistics alone": (
            changed(
                "PerTensorScaling => LogFp8TensorStats",
                'gemms: [fprop, dgrad, wgrad] => stats: ["underflows%"]',
            ),
            "its block has LogFp8TensorStats",
        ),
    },
)

# ---- 19.5 a feature


class ByLoop(Feature):
    @api_method
    def inspect_tensor(self, config, layer_name, *, tensor_name, tensor, iteration, **_):
        if iteration % config["freq"] == 0:
            rows = tensor.reshape(-1, tensor.shape[-1])
            dead = 0
            for unit in rows.unbind(1):
                if unit.abs().max() < config["below"]:
                    dead += 1
            name = layer_name + "_" + tensor_name + "_dead%"
            MetricLogger.log_scalar(name, dead / rows.shape[1] * 100, iteration)


class WithHelper(Feature):
    def share(self, tensor, below):
        alive = (tensor.abs() >= below).flatten(0, -2).any(0)
        return 100.0 - 100.0 * alive.double().mean().item()

    @api_method
    def inspect_tensor(self, config, layer_name, *, tensor_name, tensor, iteration, **_):
        if not iteration % config["freq"]:
            share = self.share(tensor, config["below"])
            MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_dead%", share, iteration)


LARGEST = "tensor.abs().flatten(0, -2).amax(0)"
IF_NOT_NOW = 'if iteration % config["freq"] != 0'

FEATURE = Answers(
    solves="DeadUnits",
    right={"a loop": ByLoop, "a method of its own": WithHelper},
    wrong={
        "values for units": (changed(f"{LARGEST} => tensor.abs()"), "at every token"),
        "every step": (changed(f"{IF_NOT_NOW} => if False"), "as well: what says"),
        "alive ones": (changed("largest < => largest >="), "units that are alive"),
        "without abs": (changed(f"{LARGEST} => tensor.flatten(0, -2).amin(0)"), "expected is"),
        "a share": (changed("100 * dead => dead"), "percent are asked for"),
        "the tensor is changed": (changed("tensor.abs() => tensor.abs_()"), "changes nothing"),
        "config.freq": (changed('config["freq"] => config.freq'), "`config` is a dict"),
        "one name for all layers": (
            changed('f"{layer_name}_{tensor_name}_dead%" => "dead%"'),
            "the log has",
        ),
        "a limit of its own": (changed('config["below"] => 1e-3'), "expected is"),
        "returned, not logged": (
            changed(
                f"{IF_NOT_NOW} => if False",
                "MetricLogger.log_scalar(name, share, iteration) => return share",
            ),
            "which nobody takes",
        ),
        "not an api_method": (changed("@api_method => # called by nobody"), "has no @api_method"),
        "an unknown key": (changed('config["below"] => config["limit"]'), "limit"),
    },
)

# ---- 19.6 the first tensor that departs


def by_mean_squares(rows, bound):
    for row in rows:
        scale = row.whole.double().square().mean().sqrt()
        wrong = []
        for rank in sorted(row.parts):
            where, part = row.parts[rank]
            error = (part.double() - row.whole[where].double()).square().mean().sqrt()
            if not bool(error <= bound * scale):
                wrong.append(rank)
        if wrong:
            return [row.name, wrong]
    return None


def departs(row, rank, bound):
    where, part = row.parts[rank]
    if not part.isfinite().all():
        return True
    allowed = bound * row.whole.norm() * (part.numel() / row.whole.numel()) ** 0.5
    return bool((part - row.whole[where]).norm() > allowed)


def a_set_of_ranks(rows, bound):
    for row in rows:
        wrong = {rank for rank in row.parts if departs(row, rank, bound)}
        if wrong:
            return row.name, wrong
    return None


def divided(rows, bound):
    for name, whole, parts in rows:
        wrong = []
        for rank, (where, part) in parts.items():
            size = whole.norm() * math.sqrt(part.numel() / whole.numel())
            if not (part - whole[where]).norm() / size <= bound:
                wrong.append(rank)
        if wrong:
            return name, wrong
    return None


SIZE = "whole.norm().item() * math.sqrt(part.numel() / whole.numel())"
WITHIN = "difference <= bound * size"
FOUND = "return name, to_blame"

DEPARTURE = Answers(
    solves="first_departure",
    takes_ranks=False,
    right={"mean squares": by_mean_squares, "a set": a_set_of_ranks},
    wrong={
        "absolute": (changed(f"{SIZE} => 1.0"), "it returned None, and output of layer 0 departs"),
        "no share": (
            changed(" * math.sqrt(part.numel() / whole.numel()) => "),
            "it returned None, and output of layer 0 departs",
        ),
        "no root": (changed("math.sqrt => float"), "within the bound of section 8"),
        "std": (changed(f"{SIZE} => whole.std().item()"), "by what is the error divided"),
        "zeros are always right": (
            changed(f"{WITHIN} => size == 0 or {WITHIN}"),
            "is not zero: it returned None",
        ),
        "in place": (changed("(part - whole[where]) => part.sub_(whole[where])"), "have changed"),
        "rows taken away": (
            changed(
                "for name, whole, parts in rows: => "
                "while rows:\n        name, whole, parts = rows.pop(0)"
            ),
            "have changed",
        ),
        "nan compared": (changed(f"{WITHIN} => not difference > bound * size"), "nan on rank 2"),
        "measured by the own part": (
            changed(f"{SIZE} => whole[where].norm().item()"),
            "by the size of the whole",
        ),
        "the last one": (
            changed(
                "for name, => found = None\n    for name,",
                f"{FOUND} => found = name, to_blame",
                "return None => return found",
            ),
            "departs before it",
        ),
        "one rank alone": (changed(f"{FOUND} => {FOUND}[:1]"), "hold what is wrong"),
        "all ranks": (changed(f"{FOUND} => return name, list(parts)"), "hold what is wrong"),
        "equal or not": (changed(f"{WITHIN} => difference == 0"), "no tensor departs"),
        "the row": (
            changed(
                "for name, whole, parts in rows: => "
                "for row in rows:\n        name, whole, parts = row",
                f"{FOUND} => return row, to_blame",
            ),
            "must be the name",
        ),
        "the name alone": (changed(f"{FOUND} => return name"), "return (name, list of ranks)"),
        "the rank alone": (changed(f"{FOUND} => {FOUND}[0]"), "give a list of ranks"),
        "divides by zero": (changed(f"{WITHIN} => difference / size <= bound"), "divides by zero"),
        "divides tensors by zero": (divided, "what is 0 divided by 0 in torch"),
    },
)

# ---- 19.7 the diagnosis


def lost_in(found):
    last = max(step for _, step in found)
    lost = defaultdict(list)
    for (name, step), percent in found.items():
        match = re.fullmatch(r"(.*)_(\w+?)_underflows%", name)
        if match and step == last and percent > 5:
            lost[match[1]].append(match[2])
    return lost


def a_block_for_equals(found):
    together = defaultdict(list)
    for layer, tensors in lost_in(found).items():
        together[tuple(sorted(tensors))].append(layer)
    blocks = {}
    for tensors, layers in together.items():
        scaling = {
            "enabled": True,
            "tensors": list(tensors),
            "gemms": ["fprop", "dgrad", "wgrad"],
        }
        blocks["_".join(tensors)] = {
            "enabled": True,
            "layers": {"exact_layer_names": layers},
            "transformer_engine": {"PerTensorScaling": scaling},
        }
    return yaml.safe_dump(blocks) if blocks else ""


def with_patterns(found):
    text = ""
    for layer, tensors in lost_in(found).items():
        text += f"{layer.replace('.', '-')}:\n  enabled: True\n"
        text += f"  layers:\n    layer_name_regex_pattern: ^{re.escape(layer)}$\n"
        text += "  transformer_engine:\n    PerTensorScaling:\n      enabled: True\n"
        text += f"      tensors: [{', '.join(tensors)}]\n      gemms: [fprop, dgrad, wgrad]\n"
    return text


LAST = "max(step for _, step in found)"
TENSORS = """f"      tensors: [{', '.join(tensors)}]","""
GEMMS = '"      gemms: [fprop, dgrad, wgrad]",'
AS_TEXT = r'return "\n".join(lines)'

DIAGNOSE = Answers(
    solves="diagnose",
    takes_ranks=False,
    right={"a block for equal layers": a_block_for_equals, "patterns": with_patterns},
    wrong={
        "from 5 on": (changed("percent > 5 => percent >= 5"), "has lost no more than 5 %"),
        "more than 10": (changed("percent > 5 => percent > 10"), "the text is empty"),
        "a margin": (changed(f'{GEMMS} => {GEMMS} "      margin: 18",'), "has a margin"),
        "step 40": (changed(f"{LAST} => 40"), "and blocks.0.mlp.up loses values"),
        "the last that was written": (changed(f"{LAST} => list(found)[-1][1]"), "in the last step"),
        "the log is emptied": (
            changed(
                "for (name, step), percent in found.items(): => "
                "while found:\n        (name, step), percent = found.popitem()"
            ),
            "has changed",
        ),
        "an open pattern": (
            changed("exact_layer_names: [{layer}] => layer_name_regex_pattern: {layer}"),
            "gets a scale of its own",
        ),
        "all steps": (changed("step == last and => "), "in the last step"),
        "the first step": (changed("max(step => min(step"), "in the last step"),
        "overflows": (changed("underflows% => overflows%"), "in the last step"),
        "all tensors": (
            changed(f'{TENSORS} => "      tensors: [activation, weight, gradient]",'),
            "gets a scale of its own",
        ),
        "one tensor of each layer": (changed("', '.join(tensors) => tensors[0]"), "loses 5.3 %"),
        "cut at the first _": (changed("rpartition => partition"), "up_weight"),
        "one name for all blocks": (changed("mend_{number}: => mend:"), "second time"),
        "FP8 switched off": (
            changed("PerTensorScaling => DisableFP8Layer", f"{TENSORS} => ", f"{GEMMS} => "),
            "the reason to use FP8 is gone",
        ),
        "forward alone": (changed(", dgrad, wgrad => "), "in the product wgrad"),
        "no YAML": (changed(f"{AS_TEXT} => return lines"), "return text"),
        "text for nothing": (
            changed(f'{AS_TEXT} => {AS_TEXT} or "mend: none"'),
            "there is nothing to mend",
        ),
    },
)

ANSWERS = {
    "19.1": COMBINE,
    "19.2": STATISTICS,
    "19.3": SAME_FILE,
    "19.4": MEND,
    "19.5": FEATURE,
    "19.6": DEPARTURE,
    "19.7": DIAGNOSE,
}
