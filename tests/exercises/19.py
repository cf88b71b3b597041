"""Answers to the exercises of lesson 19, debugging precision across ranks."""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from answers import Answers, changed
from nvdlfw_inspect.logging import MetricLogger
from nvdlfw_inspect.registry import api_method

from labcode.precision import moments
from labcode.precision.feature import Feature
from labcode.topology import GridShape

# ---- 19.1 combine


def by_chan(a, b):
    n_a, mean_a, m2_a = a
    n_b, mean_b, m2_b = b
    n = n_a + n_b
    if n == 0:
        return a
    d = mean_b - mean_a
    return n, mean_a + d * n_b / n, m2_a + m2_b + d * d * n_a * n_b / n


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


def mean_of_means(a, b):
    n, _, squares = by_chan(a, b)
    return n, (a[1] + b[1]) / 2, squares


def squares_alone(a, b):
    n, mean, _ = by_chan(a, b)
    return n, mean, a[2] + b[2]


def not_divided(a, b):
    n, mean, _ = by_chan(a, b)
    return n, mean, a[2] + b[2] + (b[1] - a[1]) ** 2 * a[0] * b[0]


def distance_not_squared(a, b):
    n, mean, _ = by_chan(a, b)
    return n, mean, a[2] + b[2] + (b[1] - a[1]) * a[0] * b[0] / max(n, 1)


def divides_by_zero(a, b):
    n = a[0] + b[0]
    d = b[1] - a[1]
    return n, a[1] + d * b[0] / n, a[2] + b[2] + d * d * a[0] * b[0] / n


def weights_swapped(a, b):
    n, _, squares = by_chan(a, b)
    return n, a[1] + (b[1] - a[1]) * a[0] / max(n, 1), squares


def larger_count(a, b):
    _, mean, squares = by_chan(a, b)
    return max(a[0], b[0]), mean, squares


def two_numbers(a, b):
    return by_chan(a, b)[1:]


def labcodes_moments(a, b):
    both = moments.Moments(*a) + moments.Moments(*b)
    return both.count, both.mean, both.squares


COMBINE = Answers(
    solves="combine",
    takes_ranks=False,
    right={"Chan": by_chan, "from the new mean": from_both_sides, "empty first": empty_first},
    wrong={
        "the mean of the means": (mean_of_means, "in the middle"),
        "M2 is added": (squares_alone, "whose means differ"),
        "not divided by n": (not_divided, "compare your last term"),
        "d for d squared": (distance_not_squared, "compare your last term"),
        "empty parts": (divides_by_zero, "it divides by zero"),
        "the weights of the other": (weights_swapped, "how far from a's mean"),
        "n of the larger one": (larger_count, "values"),
        "n forgotten": (two_numbers, "return three numbers"),
        "labcode's own": (labcodes_moments, "labcode's own answer"),
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
            "in which precision",
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


def by_key(tp, dp, pp, over):
    groups = defaultdict(list)
    for rank in range(tp * dp * pp):
        place = {"tp": rank % tp, "dp": rank // tp % dp, "pp": rank // (tp * dp)}
        key = tuple(place[axis] for axis in ("pp", "dp", "tp") if axis not in over)
        groups[key].append(rank)
    return list(groups.values())


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


def pp_forgotten(tp, dp, pp, over):
    groups = defaultdict(list)
    for rank in range(tp * dp * pp):
        place = {"tp": rank % tp, "dp": rank // tp % dp}
        groups[tuple(place[axis] for axis in place if axis not in over)].append(rank)
    return list(groups.values())


def dp_fastest(tp, dp, pp, over):
    groups = defaultdict(list)
    for rank in range(tp * dp * pp):
        place = {"dp": rank % dp, "tp": rank // dp % tp, "pp": rank // (tp * dp)}
        groups[tuple(place[axis] for axis in place if axis not in over)].append(rank)
    return list(groups.values())


def inside_out(tp, dp, pp, over):
    groups = defaultdict(list)
    for rank in range(tp * dp * pp):
        place = {"tp": rank % tp, "dp": rank // tp % dp, "pp": rank // (tp * dp)}
        groups[tuple(place[axis] for axis in place if axis in over)].append(rank)
    return list(groups.values())


def first_choice_alone(tp, dp, pp, over):
    return by_key(tp, dp, pp, over[:1])


def stage_zero_alone(tp, dp, pp, over):
    return by_key(tp, dp, 1, over)


def one_of_each(tp, dp, pp, over):
    return [group[0] for group in by_key(tp, dp, pp, over)]


def labcodes_groups(tp, dp, pp, over):
    return GridShape(tp=tp, dp=dp, pp=pp).groups(*over)


SAME_FILE = Answers(
    solves="same_file",
    takes_ranks=False,
    right={"a key": by_key, "loops": by_loops, "reshape": by_reshape},
    wrong={
        "pp forgotten": (pp_forgotten, "different layers"),
        "dp varies fastest": (dp_fastest, "tp varies fastest"),
        "inside out": (inside_out, "are due"),
        "one axis alone": (first_choice_alone, "in which axes"),
        "the first stage alone": (stage_zero_alone, "belongs to one group"),
        "one rank of each": (one_of_each, "each group is a list"),
        "labcode's own": (labcodes_groups, "labcode's own answer"),
    },
)

# ---- 19.4 the YAML that mends the run

FRAME = """
mend:
  enabled: True
  layers:
    layer_name_regex_pattern: blocks
  transformer_engine:
"""
GOOD = f"""{FRAME}    PerTensorScaling:
      enabled: True
      tensors: [activation, weight]
      gemms: [fprop, dgrad, wgrad]
"""
TWO_BLOCKS = GOOD.replace("mend:", "one:").replace("blocks", "mlp") + GOOD.replace(
    "mend:", "two:"
).replace("blocks", "attention")
BY_TYPE = GOOD.replace("layer_name_regex_pattern: blocks", "layer_types: [qkv, proj, up, down]")
SWITCHED_OFF = f"{FRAME}    DisableFP8Layer:\n      enabled: True\n"

MEND = Answers(
    solves="mend_yaml",
    takes_ranks=True,
    real=True,
    right={
        "a pattern": GOOD,
        "all three tensors": GOOD.replace("weight]", "weight, gradient]"),
        "two blocks": TWO_BLOCKS,
        "layer types": BY_TYPE,
    },
    wrong={
        "FP8 switched off": (SWITCHED_OFF, "the reason to use FP8 is gone"),
        "products switched off": (
            f"{FRAME}    DisableFP8GEMM:\n      enabled: True\n      gemms: [fprop]\n",
            "the reason to use FP8 is gone",
        ),
        "the weight alone": (GOOD.replace("activation, ", ""), "the activation of"),
        "the activation alone": (GOOD.replace(", weight]", "]"), "the weight of"),
        "forward alone": (GOOD.replace(", dgrad, wgrad", ""), "in the product dgrad"),
        "one block of the model": (GOOD.replace("blocks", "blocks.0"), "chosen by no block"),
        "the gradient": (GOOD.replace("activation, weight", "gradient"), "the activation of"),
        "not enabled": (GOOD.replace("True", "False", 1), "no block is enabled"),
        "at the top level": (
            GOOD.replace("  transformer_engine:\n", "").replace("    Per", "  Per"),
            "top level",
        ),
        "a margin": (GOOD + "      margin: 18\n", "still does not learn"),
        "a misspelled name": (GOOD.replace("PerTensor", "PerTensors"), "unknown feature"),
        "statistics alone": (
            f"{FRAME}    LogFp8TensorStats:\n      enabled: True\n      tensors: [weight]\n"
            '      stats: ["underflows%"]\n',
            "still has the scales",
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


def by_norms(rows, bound):
    for name, whole, parts in rows:
        wrong = []
        for rank, (where, part) in parts.items():
            wanted = whole[where]
            difference = (part - wanted).norm().item()
            size = whole.norm().item() * math.sqrt(wanted.numel() / whole.numel())
            if difference == 0:
                continue
            if size == 0 or not difference / size <= bound:
                wrong.append(rank)
        if wrong:
            return name, wrong
    return None


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


def _departs(row, rank, bound):
    where, part = row.parts[rank]
    if not part.isfinite().all():
        return True
    allowed = bound * row.whole.norm() * (part.numel() / row.whole.numel()) ** 0.5
    return bool((part - row.whole[where]).norm() > allowed)


def with_a_generator(rows, bound):
    for row in rows:
        wrong = {rank for rank in row.parts if _departs(row, rank, bound)}
        if wrong:
            return row.name, wrong
    return None


def nan_is_right(rows, bound):
    for name, whole, parts in rows:
        wrong = []
        for rank, (where, part) in parts.items():
            size = whole.norm() * math.sqrt(part.numel() / whole.numel())
            if (part - whole[where]).norm() > bound * size:
                wrong.append(rank)
        if wrong:
            return name, wrong
    return None


def by_own_part(rows, bound):
    for name, whole, parts in rows:
        wrong = []
        for rank, (where, part) in parts.items():
            if not (part - whole[where]).norm() <= bound * whole[where].norm():
                wrong.append(rank)
        if wrong:
            return name, wrong
    return None


def the_worst(rows, bound):
    worst = None
    for row in rows:
        wrong = [rank for rank in row.parts if _departs(row, rank, bound)]
        if wrong:
            worst = (row.name, wrong)
    return worst


def first_rank_alone(rows, bound):
    for row in rows:
        for rank in row.parts:
            if _departs(row, rank, bound):
                return row.name, [rank]
    return None


def means_cancel(rows, bound):
    for name, whole, parts in rows:
        error = 0.0
        for where, part in parts.values():
            error += (part.abs().sum() - whole[where].abs().sum()).item()
        if not abs(error) <= bound * whole.abs().sum().item():
            return name, list(parts)
    return None


def all_ranks(rows, bound):
    for row in rows:
        if any(_departs(row, rank, bound) for rank in row.parts):
            return row.name, list(row.parts)
    return None


def exactly_equal(rows, bound):
    for name, whole, parts in rows:
        wrong = [rank for rank, (where, part) in parts.items() if not part.equal(whole[where])]
        if wrong:
            return name, wrong
    return None


def the_row(rows, bound):
    for row in rows:
        wrong = [rank for rank in row.parts if _departs(row, rank, bound)]
        if wrong:
            return row, wrong
    return None


def name_alone(rows, bound):
    found = by_norms(rows, bound)
    return found and found[0]


def divides(rows, bound):
    for name, whole, parts in rows:
        wrong = []
        for rank, (where, part) in parts.items():
            error = (part - whole[where]).norm().item() / whole.norm().item()
            if not error <= bound:
                wrong.append(rank)
        if wrong:
            return name, wrong
    return None


def divided_by(size):
    """The first departure with another size to divide by: size(whole, part)."""

    def answer(rows, bound):
        for name, whole, parts in rows:
            wrong = []
            for rank, (where, part) in parts.items():
                difference = (part - whole[where]).norm().item()
                if not difference <= bound * size(whole, part):
                    wrong.append(rank)
            if wrong:
                return name, wrong
        return None

    return answer


def share(whole, part):
    return part.numel() / whole.numel()


def zeros_are_right(rows, bound):
    for row in rows:
        if row.whole.norm() == 0:
            continue
        wrong = [rank for rank in row.parts if _departs(row, rank, bound)]
        if wrong:
            return row.name, wrong
    return None


def in_place(rows, bound):
    found = by_norms(rows, bound)
    for _, whole, parts in rows:
        for where, part in parts.values():
            part.sub_(whole[where])
    return found


def pops(rows, bound):
    found = by_norms(rows, bound)
    rows.clear()
    return found


DEPARTURE = Answers(
    solves="first_departure",
    takes_ranks=False,
    right={"norms": by_norms, "mean squares": by_mean_squares, "a set": with_a_generator},
    wrong={
        "absolute": (divided_by(lambda whole, part: 1.0), "6"),
        "no share": (divided_by(lambda whole, part: whole.norm().item()), "departs"),
        "no root": (
            divided_by(lambda whole, part: whole.norm().item() * share(whole, part)),
            "within the bound of section 7",
        ),
        "inverted": (
            divided_by(lambda whole, part: whole.norm().item() / share(whole, part) ** 0.5),
            "departs",
        ),
        "rows for numbers": (
            divided_by(lambda whole, part: whole.norm().item() * (len(part) / len(whole)) ** 0.5),
            "departs",
        ),
        "std": (divided_by(lambda whole, part: whole.std().item()), "of section 7"),
        "the largest": (divided_by(lambda whole, part: whole.abs().max().item()), "section 7"),
        "twice as much": (
            divided_by(lambda whole, part: 2 * whole.norm().item() * share(whole, part) ** 0.5),
            "departs",
        ),
        "half of it": (
            divided_by(lambda whole, part: whole.norm().item() * share(whole, part) ** 0.5 / 2),
            "within the bound of section 7",
        ),
        "zeros are always right": (zeros_are_right, "that part is wrong"),
        "in place": (in_place, "have changed"),
        "rows taken away": (pops, "have changed"),
        "nan compared": (nan_is_right, "nan on rank 2"),
        "measured by the own part": (by_own_part, "by the size of the whole"),
        "the last one": (the_worst, "departs before it"),
        "one rank alone": (first_rank_alone, "hold what is wrong"),
        "sums cancel": (means_cancel, "hold what is wrong"),
        "all ranks": (all_ranks, "hold what is wrong"),
        "equal or not": (exactly_equal, "no tensor departs"),
        "the row": (the_row, "must be the name"),
        "the name alone": (name_alone, "return (name, list of ranks)"),
        "divides by zero": (divides, "divides by zero"),
    },
)

# ---- 19.7 the diagnosis


def _bad(found, most=5.0, end="_fp8_underflows%", step=None):
    last = max(step for _, step in found) if step is None else step
    bad = {}
    for (name, at), value in found.items():
        if at == last and name.endswith(end) and value > most:
            layer, _, tensor = name.removesuffix(end).rpartition("_")
            bad.setdefault(layer, []).append(tensor)
    return bad


def _as_yaml(bad, gemms="fprop, dgrad, wgrad"):
    lines = []
    for number, (layer, tensors) in enumerate(bad.items()):
        lines += [
            f"mend_{number}:",
            "  enabled: True",
            "  layers:",
            f"    exact_layer_names: [{layer}]",
            "  transformer_engine:",
            "    PerTensorScaling:",
            "      enabled: True",
            f"      tensors: [{', '.join(tensors)}]",
            f"      gemms: [{gemms}]",
        ]
    return "\n".join(lines)


def a_block_each(found):
    return _as_yaml(_bad(found))


def a_block_for_equals(found):
    import yaml

    together = defaultdict(list)
    for layer, tensors in _bad(found).items():
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
    import re

    text = ""
    for layer, tensors in _bad(found).items():
        text += f"{layer.replace('.', '-')}:\n  enabled: True\n"
        text += f"  layers:\n    layer_name_regex_pattern: ^{re.escape(layer)}$\n"
        text += "  transformer_engine:\n    PerTensorScaling:\n      enabled: True\n"
        text += f"      tensors: [{', '.join(tensors)}]\n      gemms: [fprop, dgrad, wgrad]\n"
    return text


def in_all_steps(found):
    bad = {}
    for step in {step for _, step in found}:
        for layer, tensors in _bad(found, step=step).items():
            bad[layer] = sorted({*bad.get(layer, []), *tensors})
    return _as_yaml(bad)


def in_the_first_step(found):
    return _as_yaml(_bad(found, step=0))


def overflows_too(found):
    bad = {}
    for end in ("_fp8_underflows%", "_fp8_overflows%"):
        for layer, tensors in _bad(found, end=end).items():
            bad[layer] = sorted({*bad.get(layer, []), *tensors})
    return _as_yaml(bad)


def all_tensors(found):
    return _as_yaml({layer: ["activation", "weight", "gradient"] for layer in _bad(found)})


def cut_at_the_first(found):
    bad = {}
    for layer, tensors in _bad(found).items():
        bad[layer.split("_")[0]] = tensors
    return _as_yaml(bad)


def one_name(found):
    import re

    return re.sub(r"mend_\d+", "mend", _as_yaml(_bad(found)))


def switched_off(found):
    text = ""
    for number, layer in enumerate(_bad(found)):
        text += f"off_{number}:\n  enabled: True\n  layers:\n    exact_layer_names: [{layer}]\n"
        text += "  transformer_engine:\n    DisableFP8Layer:\n      enabled: True\n"
    return text


def forward_alone(found):
    return _as_yaml(_bad(found), gemms="fprop")


def a_list_of_layers(found):
    return list(_bad(found))


def always_text(found):
    return _as_yaml(_bad(found)) or "mend:\n  enabled: False\n"


def of_most(most):
    def answer(found):
        return _as_yaml(_bad(found, most=most))

    return answer


def from_five_on(found):
    return _as_yaml(_bad(found, most=5.0 - 1e-9))


def with_a_margin(found):
    text = _as_yaml(_bad(found))
    return text.replace("dgrad, wgrad]", "dgrad, wgrad]\n      margin: 18")


def in_step_40(found):
    return _as_yaml(_bad(found, step=40))


def the_last_that_was_written(found):
    return _as_yaml(_bad(found, step=list(found)[-1][1]))


def the_last_as_text(found):
    return _as_yaml(_bad(found, step=int(max(str(step) for _, step in found))))


def takes_it_apart(found):
    text = a_block_each(found)
    found.clear()
    return text


def open_pattern(found):
    return (
        _as_yaml(_bad(found))
        .replace("exact_layer_names: [", "layer_name_regex_pattern: ")
        .replace("]\n  transformer_engine", "\n  transformer_engine")
    )


DIAGNOSE = Answers(
    solves="diagnose",
    takes_ranks=False,
    right={
        "a block for each layer": a_block_each,
        "a block for equal layers": a_block_for_equals,
        "patterns": with_patterns,
    },
    wrong={
        "from 5 on": (from_five_on, "has lost no more than 5 %"),
        "more than 10": (of_most(10), "the text is empty"),
        "more than 5.5": (of_most(5.5), "the text is empty"),
        "a margin": (with_a_margin, "has a margin"),
        "step 40": (in_step_40, ""),
        "the last that was written": (the_last_that_was_written, ""),
        "the last as text": (the_last_as_text, ""),
        "the log is emptied": (takes_it_apart, "has changed"),
        "an open pattern": (open_pattern, "gets a scale of its own"),
        "all steps": (in_all_steps, "in the last step"),
        "the first step": (in_the_first_step, "in the last step"),
        "overflows": (overflows_too, "in the last step"),
        "all tensors": (all_tensors, "gets a scale of its own"),
        "cut at the first _": (cut_at_the_first, "of blocks.0.mlp.gate gets"),
        "one name for all blocks": (one_name, "second time"),
        "FP8 switched off": (switched_off, "the reason to use FP8 is gone"),
        "forward alone": (forward_alone, "keeps its scale"),
        "no YAML": (a_list_of_layers, "return text"),
        "text for nothing": (always_text, "nothing to mend"),
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
