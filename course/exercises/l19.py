"""Checks of lesson 19, debugging precision across ranks."""

import copy
import inspect
import itertools
import math
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from course.answer import Exercise, Hint, due, reason
from course.exercises.expect import (
    Table,
    careless,
    confirm_in_group,
    diagnose,
    in_groups,
    own_answers,
    plural,
    refuse,
    run,
)
from course.exercises.in_notebook import LOOP, bounded, without
from course.exercises.simulated import Outcome
from course.labs import l19_runs as lab
from course.pool.answers import RankError
from course.pool.ranks import Ranks
from labcode.debug import bisect, debug_config, moments, on_layers
from labcode.debug.debug_config import ConfigBlock
from labcode.runtime.units import type_in_words
from labcode.topology import GridShape

# ---- 19.1

Triple = tuple[float, float, float]


def _triple(values: Sequence[float]) -> Triple:
    if not values:
        return (0, 0.0, 0.0)
    mean = math.fsum(values) / len(values)
    return (len(values), mean, math.fsum((value - mean) ** 2 for value in values))


FAR = "values far from zero"
PARTS = {
    "two parts of the same size": ([1.0, 2.0, 3.0], [11.0, 12.0, 13.0]),
    "a part of one value and one of four": ([5.0], [1.0, 2.0, 2.5, 9.0]),
    "parts with equal means": ([1.0, 3.0], [0.0, 4.0, 2.0]),
    "negative values": ([-7.0, -1.0, 4.0], [-2.0, -30.0]),
    "an empty part a": ([], [1.0, 2.0, 6.0]),
    "an empty part b": ([1.0, 2.0, 6.0], []),
    "two empty parts": ([], []),
    FAR: ([1e6, 1e6 + 1], [1e6 + 2, 1e6 + 3, 1e6 + 5]),
}


def combine(answer: Callable[..., Any]) -> None:
    """The learner's `combine(a, b)`."""
    for name, (first, second) in PARTS.items():
        a = _triple(first)
        b = _triple(second)
        case = f"{name}, a = {_shown(a)}, b = {_shown(b)}: "
        with without(moments.Moments.__add__, moments.combined):
            try:
                found = due(answer(a, b))
            except ZeroDivisionError:
                raise Hint(f"{case}it divides by zero, which values are there?") from None
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise Hint(f"{case}return three numbers (n, mean, M2), not {found!r}")
        n, mean, squares = map(float, due(*found))
        truth = _triple([*first, *second])
        refuse({f"n is {n:g}, and there are {truth[0]:g} values": n != truth[0]}, case)
        told = f"{case}the mean is {mean:g}, expected is {truth[1]:g}: "
        mistakes = {
            "this is the middle between the two means, whatever the sizes of the parts are": (
                (a[1] + b[1]) / 2
            )
        }
        otherwise = "how far is it from a's mean, on the way to b's?"
        diagnose(told, mean, truth[1], mistakes, otherwise, tolerance=1e-12)
        told = f"{case}M2 is {squares:.9g}, expected is {truth[2]:.9g}: "
        mistakes = {
            "this is the sum of the two; what do two parts add whose means differ?": a[2] + b[2],
            "a sum of squares is never negative": squares < 0,
            "this is the std of both; M2 is the sum of squares before it is divided": (
                math.sqrt(truth[2] / (truth[0] - 1)) if truth[0] > 1 else math.nan
            ),
        }
        otherwise = "compare your last term with the formula"
        if name == FAR:
            otherwise = "the text below says why a difference of two large numbers is no good"
        diagnose(told, squares, truth[2], mistakes, otherwise)


def _shown(triple: Triple) -> str:
    return f"({triple[0]:g}, {triple[1]:.9g}, {triple[2]:g})"


# ---- 19.2

Part = tuple[Tensor, Tensor]  # of x, and what is left of it after the cast
STATISTICS = ("mean", "std", "min", "max", "amax", "underflows%")


CASES = (
    "parts of one size",
    "parts of different sizes, one of them empty",
    "far from 0",
    "far above 0, one part empty",
    "far below 0, one part empty",
    "very far from 0, x in float64",
)
FEW_BYTES = 1024  # of the numbers of all ranks together; the tensors of the check have more
ABOUT = {  # what to ask of a statistic that is wrong in no known way
    "amax": "The largest |x| may be a negative number",
    "std": "What comes of n, mean and M2 of all parts? In which precision is it computed, and is "
    "it a difference of large numbers?",
}


def statistics(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `statistics(x, kept, group)`."""
    ours = own_answers(moments.measure, moments.combined)
    for case in CASES:
        judge = partial(_check_statistics, case=case)
        outcome = in_groups(_measure, answer, case, judge=judge, ours=ours)
    return confirm_in_group(ranks, outcome, _measure, answer, case)


def _measure(group: dist.ProcessGroup, answer: Callable[..., Any], case: str) -> dict[str, float]:
    x, kept = _parts(group.size(), case)[group.rank()]
    given = (x.clone(), kept.clone())
    found = _numbers(due(answer(*given, group)))
    unchanged = torch.equal(x, given[0]) and torch.equal(kept, given[1])
    refuse({f"{case}: the tensors that were given have changed": not unchanged})
    return found


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, Mapping):
        raise Hint(f"return a dict, not {type_in_words(found)}")
    for name in STATISTICS:
        if name not in found:
            raise Hint(f"{name} is missing in the dict: it has {', '.join(map(str, found))}")
        if not isinstance(found[name], int | float):
            raise Hint(f"{name} is to be a Python number, not {type(found[name]).__name__}")
    return {name: float(found[name]) for name in STATISTICS}


def _parts(num_ranks: int, case: str) -> list[Part]:
    """(x, what is left of it) of each rank."""
    parts = []
    generator = torch.Generator().manual_seed(len(case))
    for rank in range(num_ranks):
        rows = 6 if "one size" in case else 3 * rank
        x = (1 + rank) * torch.randn(rows, 5, generator=generator) + 3 * rank
        if "far" in case:
            rows = 100 * rank if "empty" in case else 2 + rank
            x = 3000 + 0.01 * torch.randn(rows, 5, generator=generator) + 0.01 * rank
            x = -x if "below" in case else x
            if "very" in case:
                x = 1e8 + x.double()
        else:
            x[:, 2] = 0.0  # a zero was no loss
            x[:1, 0] = -60.0 - rank  # the largest by its size
        rounded = (16 * x).round() / 16  # a cast rounds what it keeps
        kept = torch.where(x.abs() < 1.5, torch.zeros_like(x), rounded)
        parts.append((x, kept))
    return parts


def _expected(parts: Sequence[Part]) -> dict[str, float]:
    x = torch.cat([part.flatten() for part, _ in parts]).double()
    kept = torch.cat([part.flatten() for _, part in parts])
    return {
        "mean": x.mean().item(),
        "std": x.std().item(),
        "min": x.min().item(),
        "max": x.max().item(),
        "amax": x.abs().max().item(),
        "underflows%": _percent((kept == 0) & (x != 0)),
    }


def _check_statistics(
    results: list[dict[str, float]], outcome: Outcome, members: Sequence[int], case: str
) -> None:
    """Those of the whole tensor, by one collective of a few numbers."""
    parts = _parts(len(members), case)
    truth = _expected(parts)
    for place, rank in enumerate(members):
        start = f"on rank {rank}: {case}: "
        calls = outcome.of(rank)
        refuse(careless(calls), start)
        for name in STATISTICS:
            found = results[place][name]
            told = f"{start}{name} is {found:.6g}, expected is {truth[name]:.6g}. "
            otherwise = ABOUT.get(name, "Which of the numbers that travel is this made of?")
            mistakes = _mistakes(case, name, found, parts, parts[place])
            tolerance = 1e-4 if name == "std" and "far" in case else 1e-6
            diagnose(told, found, truth[name], mistakes, otherwise, tolerance)
        sent_bytes = sum(call.num_bytes for call in calls)
        mistakes = {
            "no collective was called": not calls,
            f"{len(calls)} collectives, and one is enough: put all numbers into one tensor "
            "(functions that send Python objects send their size first, which is one more)": (
                len(calls) > 1
            ),
            f"{sent_bytes:,} bytes travel, and the parts themselves are not to: which few numbers "
            "of each part are enough?": sent_bytes > FEW_BYTES,
        }
        refuse(mistakes, start)


def _mistakes(case: str, name: str, found: float, parts: Sequence[Part], own: Part) -> Table:
    """What an answer may have taken for a statistic."""
    filled = [part for part in parts if part[0].numel()]
    each = [_expected([part])[name] for part in filled]
    is_extreme = name in ("min", "max", "amax")
    is_of_empty = is_extreme and "far" in case and len(filled) < len(parts)
    mistakes: dict[str, Any] = {}
    if own[0].numel():
        mistakes["This is the value of this rank's part alone"] = _expected([own])[name]
    mistakes["This is the mean of the values of the parts"] = sum(each) / len(each)
    mistakes["One of the parts may be empty: which numbers does it send?"] = (
        is_of_empty or not math.isfinite(found)
    )
    x = torch.cat([x.flatten() for x, _ in parts])
    kept = torch.cat([kept.flatten() for _, kept in parts])
    if name == "std":
        divides_by_n = "It divides by n; by which number does torch.std divide?"
        mistakes[divides_by_n] = x.double().std(correction=0).item()
    if name == "underflows%":
        mistakes["A value that was 0 before the cast is not lost"] = _percent(kept == 0)
        mistakes["A value that was rounded to another one is not lost"] = _percent(kept != x)
        mistakes["This is a share, and percent are asked for"] = _expected(parts)[name] / 100
    return mistakes


def _percent(condition: Tensor) -> float:
    return 100 * condition.double().mean().item()


# ---- 19.3

SIZES = ((2, 2, 1), (2, 2, 2), (4, 2, 1), (2, 3, 2), (1, 4, 1), (3, 1, 2))  # tp, dp, pp
CHOICES = ((), ("tp",), ("dp",), ("tp", "dp"), ("dp", "tp"))


def same_file(answer: Callable[..., Any]) -> None:
    """The learner's `same_file(tp, dp, pp, over)`."""
    for (tp, dp, pp), over in itertools.product(SIZES, CHOICES):
        with without(GridShape.groups, GridShape.coords):
            found = due(bounded(LOOP, answer, tp, dp, pp, over))
        case = f"tp {tp}, dp {dp}, pp {pp}, over {over!r}: "
        _check_groups(case, GridShape(tp=tp, dp=dp, pp=pp), over, found)


def _check_groups(case: str, shape: GridShape, over: Sequence[str], found: Any) -> None:
    """The groups along these axes, in any order."""
    if not isinstance(found, list | tuple):
        raise Hint(f"{case}return a list of lists of ranks, not {found!r}")
    for group in found:
        if not isinstance(group, list | tuple | set):
            raise Hint(f"{case}each group is a list of ranks, and this is {group!r}")
    groups = sorted(sorted(group) for group in found)
    members = sorted(itertools.chain(*groups))
    all_ranks = list(range(shape.world_size))
    if members != all_ranks:
        raise Hint(
            f"{case}each of the {len(all_ranks)} ranks belongs to one group, and yours have "
            f"{members}"
        )
    expected = sorted(shape.groups(*over))
    is_other_number = len(groups) != len(expected)
    per_stage = shape.tp * shape.dp
    crosses_stages = any(
        group[0] // per_stage != group[-1] // per_stage for group in groups if group
    )
    mistakes = {
        "ranks of different stages have different layers, and never write the same": (
            is_other_number and crosses_stages
        ),
        f"you have {plural(len(groups), 'group')} and not {len(expected)}: in which axes do the "
        "ranks of a group agree?": is_other_number,
        f"{groups} is the right number of groups, but with other ranks in them: tp varies fastest, "
        "then dp, then pp": groups != expected,
    }
    refuse(mistakes, case)


# ---- 19.4

PRODUCTS = {  # that a tensor goes into
    "activation": ("fprop", "wgrad"),
    "weight": ("fprop", "dgrad"),
    "gradient": ("dgrad", "wgrad"),
}
LOST: Mapping[str, Sequence[str]] = dict.fromkeys(lab.LAYERS, ("activation", "weight"))
BROKEN = "--train.dtype fp8 --fp8.margin 18 --train.steps 50"
LEARNS = 2.85  # bfloat16 comes to 2.63, the run with margin 18 to 3.16


def mend(answer: Any, ranks: Ranks) -> None:
    """The learner's YAML, as text."""
    text = due(answer)
    if not isinstance(text, str):
        raise Hint(f"give the YAML as text, not {type_in_words(text)}")
    with tempfile.TemporaryDirectory(prefix="labcode-l19-") as folder:
        path = Path(folder) / "mend.yaml"
        chosen = _chosen_by(text, path, lab.LAYERS)
        _check_scales(LOST, chosen, "loses nearly everything (see the table of section 2)")
        options = f"{BROKEN} {lab.GRID} --debug.config {path}"
        found = ranks.run(lab.train, options, f"{folder}/run", limit_s=120)[0]
    if not found.val_loss < LEARNS:  # it may be nan
        raise Hint(
            f"after 50 steps the loss is {found.val_loss:.3f}: it still learns less than in "
            "bfloat16. Is there a margin in your scales, too?"
        )


def _chosen_by(
    text: str, path: Path, layers: Sequence[str], case: str = ""
) -> dict[str, ConfigBlock]:
    """{layer: its block} of a YAML that leaves every layer in FP8."""
    path.write_text(text)
    try:
        chosen = debug_config.choose(debug_config.read(path), layers, path)
    except ValueError as error:
        raise Hint(case + str(error).replace(f"{path}", "your YAML")) from None
    for layer, block in chosen.items():
        if "FakeQuant" in block.features:
            raise Hint(
                f"{case}FakeQuant takes the products of {layer} out of FP8, and only rounds their "
                "operands as FP8 would. Which feature leaves them in FP8 and changes their scales?"
            )
        for name in block.features:
            if name.startswith("Disable"):
                raise Hint(
                    f"{case}{name} takes {layer} out of FP8: then it learns, and the reason to use "
                    "FP8 is gone. Which feature leaves the layer in FP8 and changes its scales?"
                )
    return chosen


def _check_scales(
    lost: Mapping[str, Sequence[str]], chosen: Mapping[str, ConfigBlock], loses: str, case: str = ""
) -> None:
    """Each lost tensor has a scale of its own in every product that it goes into."""
    for layer, tensors in lost.items():
        if layer not in chosen:
            raise Hint(f"{case}{layer} loses values, and no block chooses it")
        features = chosen[layer].features
        if "PerTensorScaling" not in features:
            raise Hint(
                f"{case}{layer} still has the scales that lose values: its block has "
                f"{', '.join(features) or 'no feature'}"
            )
        scaled = []
        for entry in chosen[layer].entries("PerTensorScaling"):
            scaled.append((entry["gemm"], entry["tensor"]))
        for tensor in tensors:
            if tensor not in {scaled_tensor for _, scaled_tensor in scaled}:
                raise Hint(f"{case}the {tensor} of {layer} {loses}, and keeps its scale")
            for gemm in PRODUCTS[tensor]:
                if (gemm, tensor) not in scaled:
                    raise Hint(
                        f"{case}in the product {gemm} the {tensor} of {layer} keeps its scale"
                    )


# ---- 19.5

UNITS_YAML = """
units:
  enabled: True
  layers:
    layer_name_regex_pattern: {layers}
  transformer_engine:
    {name}:
      enabled: True
      tensors: [activation]
      below: {below}
      freq: {freq}
    Reference:
      enabled: True
      tensors: [activation]
      below: {below}
      freq: {freq}
"""
DUE = "_due"
REFERENCE = """Reference(Feature):
    @api_method
    def inspect_tensor(self, config, layer_name, *, tensor_name, tensor, iteration, **_):
        if iteration % config["freq"]:
            return
        largest = tensor.abs().flatten(0, -2).amax(0)
        share = 100 * (largest < config["below"]).float().mean().item()
        MetricLogger.log_scalar(f"{layer_name}_{tensor_name}_due", share, iteration)
"""
STUB = re.compile(r"raise NotImplementedError\(.exercise")
# A small run on one simulated rank: nvdlfw_inspect has one state for each process.
ALONE = "--parallel.dp 1 --parallel.tp 1 --model.context_length 16 --train.global_batch 2"
THREE_STEPS = "--train.steps 3 --train.eval_batches 1 --train.sample_tokens 0"
UNITS = (("mlp.down", 0.1, 2), ("mlp", 1.0, 1))  # layers, below, freq


class _Looked(NamedTuple):
    """What a feature leaves on one rank.

    Args:
        logged: {(name, step): value} that it has written.
        truth: The same as it should be.
        unchanged: Whether the losses are those of a run without it.
    """

    logged: dict[tuple[str, int], float]
    truth: dict[tuple[str, int], float]
    unchanged: bool


def feature(answer: Any, ranks: Ranks | None = None) -> str:
    """The learner's class with `inspect_tensor`: in a training on one rank, and on real ranks."""
    _check_feature(answer)
    with tempfile.TemporaryDirectory(prefix="labcode-l19-") as folder:
        lab.write_feature(answer, f"{folder}/features")
        (Path(folder) / "features" / "reference.py").write_text(lab.FEATURE_HEAD + REFERENCE)
        for layers, below, freq in UNITS:
            text = UNITS_YAML.format(layers=layers, name=answer.__name__, below=below, freq=freq)
            (Path(folder) / "units.yaml").write_text(text)
            case = f"below = {below:g}, freq = {freq}: "
            outcome = run(_look, ALONE, folder, size=1)
            _check_right_log(case, outcome.results[0])
        if ranks is None:
            return ""
        try:
            of_ranks = ranks.run(_look, lab.GRID, folder, limit_s=60)
        except RankError as error:
            raise Hint(f"on one rank it is right; on {ranks.n}: {reason(error)}") from None
        for rank, looked in enumerate(of_ranks):
            _check_right_log(f"with {ranks.n} ranks, on rank {rank}: {case}", looked)
    return f"and the same on {ranks.n} real ranks"


def _check_feature(answer: Any) -> None:
    due(answer)
    source = ""
    if callable(answer):
        source = inspect.getsource(getattr(answer, "inspect_tensor", answer))
    if STUB.search(source):
        raise NotImplementedError("exercise")
    method = getattr(answer, "inspect_tensor", None)
    mistakes = {
        "give the class itself": not isinstance(answer, type),
        "the class has no method inspect_tensor": method is None,
        "inspect_tensor has no @api_method above it, and so nobody calls it": (
            not getattr(method, "is_api", False)
        ),
    }
    refuse(mistakes)


def _look(rank: int, grid: str, folder: str) -> _Looked:
    """Train three steps without the feature and with it."""
    options = f"{grid} {THREE_STEPS}"
    features = f"--debug.config {folder}/units.yaml --debug.feature_dir {folder}/features"
    plain = lab.train(options, f"{folder}/plain").losses
    try:
        losses = lab.train(f"{options} {features}", f"{folder}/run").losses
    except SystemExit:
        raise Hint(
            "inspect_tensor raises an AttributeError, at which nvdlfw_inspect ends the process: "
            'which `.name` does not exist? `config` is a dict: config["freq"]'
        ) from None
    except AssertionError as error:
        if "Different Outputs" not in str(error):
            raise
        raise Hint(
            "inspect_tensor returns a value, which nobody takes: write it into the log, and "
            "return nothing"
        ) from None
    logged = {}
    truth = {}
    found = on_layers.read_statistics(Path(folder) / "run" / "debug", rank)
    for (name, step), value in found.items():
        if name.endswith(DUE):
            truth[name.removesuffix(DUE) + "_dead%", step] = value
        else:
            logged[name, step] = value
    unchanged = all(math.isclose(a, b, rel_tol=1e-6) for a, b in zip(plain, losses, strict=True))
    return _Looked(logged, truth, unchanged)


def _check_right_log(case: str, looked: _Looked) -> None:
    """Each number where it is expected, and no other."""
    logged = looked.logged
    mistakes = {
        "with your feature the losses are others. `tensor` is the one that the training goes on "
        "with: a feature looks, and changes nothing": not looked.unchanged,
        "nothing is in the log: is MetricLogger.log_scalar called?": not logged,
    }
    refuse(mistakes, case)
    names = sorted({name for name, _ in logged})
    otherwise = (
        "A unit, an entry of the last dim, is dead if |x| stays below the limit at every token"
    )
    for (name, step), truth in looked.truth.items():
        mistakes = {
            f"the log has {names[0]}, expected is {name}": name not in names,
            f"{name} is missing in step {step}, where freq says log": (name, step) not in logged,
        }
        refuse(mistakes, case)
        found = logged[name, step]
        told = f"{case}{name} in step {step} is {found:.4g}, expected is {truth:.4g}. "
        mistakes = {
            "These are the units that are alive": 100 - truth,
            "This is a share, and percent are asked for": truth / 100,
            "This is a number of units, or of something else": not 0 <= found <= 100,
        }
        diagnose(told, found, truth, mistakes, otherwise, tolerance=1e-4)
    for name, step in logged:
        needless = f"{name} is logged in step {step} as well: what says `freq`?"
        refuse({needless: (name, step) not in looked.truth}, case)


# ---- 19.6

BOUND = 1e-5
# {what is wrong: (faults, (number of the tensor that departs first, ranks to blame))}
FAULTS = {
    "tensor 3 of rank 1 wrong by one part in 1000": (((3, 1, 1.001),), (3, [1])),
    "ranks 1 and 3 wrong": (((4, 1, 1.01), (4, 3, 1.01)), (4, [1, 3])),
    "a small fault first, a large one later": (((2, 3, 1.001), (5, 2, 100.0)), (2, [3])),
    "opposite faults on two ranks": (((2, 1, 1.01), (2, 2, 0.99)), (2, [1, 2])),
    "nan on rank 2": (((3, 2, math.nan),), (3, [2])),
    "infinity on rank 1": (((0, 1, math.inf), (1, 2, 2.0)), (0, [1])),
    "a part twice as large": (((2, 2, 2.0),), (2, [2])),
    "a part that is half as large": (((2, 2, 0.5),), (2, [2])),
    "the last tensor wrong": (((5, 3, 1.01),), (5, [3])),
}
COARSE_BOUND = 0.01
WIDTHS = {"four equal parts": (4, 4, 4, 4), "parts of 1, 3, 4 and 8 columns": (1, 3, 4, 8)}


def first_departure(answer: Callable[..., Any]) -> None:
    """The learner's `first_departure(rows, bound)`."""
    case = "runs that differ by rounding: "
    rows = lab.made_up_rows(4)
    (zeros,) = [row for row in rows if not row.whole.any()]
    found = _departure_in(answer, rows, BOUND, case)
    if found is not None:
        told = f"{case}it names {found!r}, and no tensor departs: "
        if isinstance(found, tuple | list) and zeros.name in found:
            raise Hint(
                f"{told}this one is all zeros in both runs; what is 0 divided by 0 in torch?"
            )
        raise Hint(
            f"{told}by how much may a part differ? "
            "Section 8 measures it by the size of the whole tensor; one tensor is all zeros"
        )
    for name, (faults, expected) in FAULTS.items():
        case = f"{name}: "
        rows = lab.made_up_rows(4, faults)
        _check_departure(case, rows, expected, _departure_in(answer, rows, BOUND, case))
    _check_within_the_bound(answer)
    zeros = torch.zeros(8, 16)
    parts = {rank: (_columns((4, 4, 4, 4), rank), torch.zeros(8, 4)) for rank in range(4)}
    parts[2][1].fill_(1e-3)
    rows = [lab.Recorded("a tensor of zeros", zeros, parts)]
    case = "a tensor of zeros whose part on rank 2 is not zero: "
    _check_departure(case, rows, (0, [2]), _departure_in(answer, rows, BOUND, case))


def _check_within_the_bound(answer: Callable[..., Any]) -> None:
    """Errors a little inside and a little outside of the bound."""
    for (widths, columns), size in itertools.product(WIDTHS.items(), (0.02, 50.0)):
        for rank, share in itertools.product(range(4), (0.8, 1.25)):
            rows = [_row_with_error(columns, size, rank, share * COARSE_BOUND)]
            error = f"rank {rank} off by {share:g} times the bound"
            case = f"{widths}, values of about {size:g}, {error}: "
            found = _departure_in(answer, rows, COARSE_BOUND, case)
            if share > 1:
                _check_departure(case, rows, (0, [rank]), found)
                continue
            if found is not None:
                raise Hint(
                    f"{case}it names {found!r}, and this is within the bound of section 8: by what "
                    "is the error divided?"
                )


def _columns(widths: Sequence[int], rank: int) -> tuple[slice, slice]:
    start = sum(widths[:rank])
    return (slice(0, 8), slice(start, start + widths[rank]))


def _row_with_error(widths: Sequence[int], size: float, wrong: int, error: float) -> lab.Recorded:
    """A tensor whose part on one rank has this error, by the formula of section 8."""
    generator = torch.Generator().manual_seed(3)
    whole = size * torch.randn(8, sum(widths), generator=generator, dtype=torch.float64)
    parts = {}
    for rank in range(len(widths)):
        where = _columns(widths, rank)
        part = whole[where].clone()
        if rank == wrong:
            difference = torch.randn(part.shape, generator=generator, dtype=torch.float64)
            norm = error * whole.norm() * math.sqrt(part.numel() / whole.numel())
            part += difference * norm / difference.norm()
        parts[rank] = (where, part)
    return lab.Recorded("output of layer 0", whole, parts)


def _departure_in(
    answer: Callable[..., Any], rows: list[lab.Recorded], bound: float, case: str
) -> Any:
    """What the learner's function finds, which may be None; what it was given may not change."""
    given = copy.deepcopy(rows)
    with without(bisect.first_departure, bisect.compare):
        try:
            found = bounded(LOOP, answer, given, bound)
        except ZeroDivisionError:
            raise Hint(f"{case}it divides by zero") from None
    if _values_in(given) != _values_in(rows):
        raise Hint(
            f"{case}the rows that were given have changed: work on copies, a difference is a new "
            "tensor"
        )
    return found if found is None else due(found)


def _values_in(rows: Sequence[lab.Recorded]) -> list[Any]:
    """The numbers of all tensors, those that are not finite as well."""
    tensors = [leaf for leaf in tree_leaves(rows) if isinstance(leaf, Tensor)]
    return [tensor.nan_to_num().tolist() for tensor in tensors]


def _check_departure(
    case: str, rows: Sequence[lab.Recorded], expected: tuple[int, list[int]], found: Any
) -> None:
    """(name, ranks), as expected is (number of the tensor, ranks)."""
    names = [row.name for row in rows]
    number, ranks = expected
    if found is None:
        raise Hint(f"{case}it returned None, and {names[number]} departs")
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise Hint(f"{case}return (name, list of ranks), not {found!r}")
    name, blamed = found
    if name not in names:
        shown = repr(name) if isinstance(name, str) else type_in_words(name)
        raise Hint(f"{case}the first result must be the name of a tensor, not {shown}")
    if not isinstance(blamed, list | tuple | set):
        raise Hint(f"{case}give a list of ranks, not {blamed!r}")
    place = names.index(name)
    mistakes = {
        f"it names {name}, which differs by rounding alone: what is the error of a part measured "
        "by?": place < number,
        f"it names {name}, but {names[number]} departs before it": place > number,
        f"of {name} it blames ranks {sorted(blamed)}, and {ranks} hold what is wrong": (
            sorted(blamed) != ranks
        ),
    }
    refuse(mistakes, case)


# ---- 19.7

MOST_LOST = 5.0  # percent
JUST_LOST = 5.3  # percent
GATED = (
    "blocks.0.mlp.gate",
    "blocks.0.mlp.gate_up",
    "blocks.0.mlp.down",
    "blocks.11.mlp.gate_up",
    "blocks.1.mlp.down",
)
IN_ORDER = (0, 20, 40)
SEVERAL = {
    "blocks.0.attention.qkv": ["gradient"],
    "blocks.1.attention.qkv": ["gradient", "weight"],
    "blocks.1.mlp.up": ["activation"],
}
# {what is lost: ({layer: lost tensors}, layers, steps as they stand in the log)}
LOGS: dict[str, tuple[Mapping[str, Sequence[str]], Sequence[str], Sequence[int]]] = {
    "one tensor of one layer": ({"blocks.1.mlp.down": ["activation"]}, lab.LAYERS, IN_ORDER),
    "two tensors of one layer": (
        {"blocks.0.mlp.up": ["weight", "gradient"]},
        lab.LAYERS,
        (0, 5, 15),
    ),
    "different tensors of three layers": (SEVERAL, lab.LAYERS, (1000, 0, 500)),
    "all tensors of all layers": (dict.fromkeys(lab.LAYERS, lab.TENSORS), lab.LAYERS, IN_ORDER),
    "a layer with a _ in its name": ({"blocks.0.mlp.gate_up": ["weight"]}, GATED, (0, 100, 101)),
    "layer 1 beside layer 11": ({"blocks.1.mlp.down": ["weight"]}, GATED, IN_ORDER),
    "a layer whose name another one begins with": (
        {"blocks.0.mlp.gate": ["weight"]},
        GATED,
        IN_ORDER,
    ),
    "nothing is lost": ({}, lab.LAYERS, IN_ORDER),
}


def diagnosis(answer: Callable[..., Any]) -> None:
    """The learner's `diagnose(found)`: the text of a YAML."""
    for name, (lost, layers, steps) in LOGS.items():
        case = f"{name}: "
        log = _log(lost, layers, steps)
        given = dict(log)
        text = due(bounded(LOOP, answer, given))
        if not isinstance(text, str):
            raise Hint(f"{case}return text, not {type_in_words(text)}")
        mistakes = {
            "the log that was given has changed": given != log,
            f"the text is empty, and {next(iter(lost), '')} loses values": (
                lost and not text.strip()
            ),
            "there is nothing to mend, expected is an empty text": not lost and text.strip(),
        }
        refuse(mistakes, case)
        if lost:
            _check_cure(case, lost, layers, text)


def _log(lost: Mapping[str, Sequence[str]], layers: Sequence[str], steps: Sequence[int]) -> dict:
    """What a run has logged; `lost` is what is lost in the last step, by a little."""
    found = {}
    first = min(steps)
    last = max(steps)
    for step, layer, tensor in itertools.product(steps, layers, lab.TENSORS):
        # with delayed scaling the first step has the scale 1
        is_early = step == first or layer.endswith("up")
        value = 90.0 if is_early else 0.4
        if step == last:
            value = JUST_LOST if tensor in lost.get(layer, ()) else MOST_LOST
        found[f"{layer}_{tensor}_underflows%", step] = value
        found[f"{layer}_{tensor}_overflows%", step] = 50.0
    return found


def _check_cure(
    case: str, lost: Mapping[str, Sequence[str]], layers: Sequence[str], text: str
) -> None:
    """What is lost gets a scale of its own, and nothing else does."""
    with tempfile.TemporaryDirectory(prefix="labcode-l19-") as folder:
        chosen = _chosen_by(text, Path(folder) / "found.yaml", layers, case)
    for layer, block in chosen.items():
        for entry in block.entries("PerTensorScaling"):
            if entry.get("margin"):
                raise Hint(
                    f"{case}the scale of {layer} has a margin, and a margin is what loses values"
                )
            if entry["tensor"] not in lost.get(layer, ()):
                raise Hint(
                    f"{case}the {entry['tensor']} of {layer} gets a scale of its own, and has lost "
                    f"no more than {MOST_LOST:g} % in the last step"
                )
    _check_scales(lost, chosen, f"loses {JUST_LOST} %", case)


EXERCISES = {
    "19.1": Exercise(
        check=combine,
        praise="three numbers of each part are enough, however many parts there are",
        hints=(
            "Let d be the distance of the two means. Which share of d has the mean of both to go "
            "from a's mean, if b has a tenth of the values?",
            "M2 of both is more than the sum of the two: what two parts with no spread at all but "
            "different means have is missing.",
            "What does the division do if both parts are empty?",
        ),
    ),
    "19.2": Exercise(
        check=statistics,
        praise="the statistics of the whole tensor on every rank, by one message of a few numbers",
        hints=(
            "Which numbers of a part are needed so that all six statistics can be made of them? "
            "Put them into one tensor.",
            "dist.all_gather fills a list of empty tensors, one for each rank of the group. Then "
            "`combine` puts n, mean and M2 together, part by part.",
            "min() of an empty tensor raises an error. Which number is larger than every other, "
            "so that it does no harm in a minimum?",
        ),
    ),
    "19.3": Exercise(
        check=same_file,
        praise="for every grid and every choice: these ranks write the same lines",
        hints=(
            "`rank % tp` is the coordinate along tp. How do you get those along dp and pp from "
            "`rank // tp`?",
            "Two ranks are in one group if they agree in every axis that is not in `over`. What "
            "would be a good key of a dict?",
        ),
    ),
    "19.4": Exercise(
        check=mend,
        praise="it learns, and every product of every layer is still in FP8",
        hints=(
            "Which two columns of the table in section 2 have large numbers from top to bottom?",
            "The block has the same frame as the one for the statistics. Which of the features in "
            "the table gives a tensor a scale of its own?",
            "The activation is an operand of fprop and wgrad, the weight of fprop and dgrad.",
        ),
    ),
    "19.5": Exercise(
        check=feature,
        praise="any run of labcode can look with it now, by one YAML",
        hints=(
            "A unit is one entry of the last dim. `tensor.abs().flatten(0, -2)` has one row for "
            "each token.",
            "`.amax(0)` of that is the largest size of each unit.",
            "Your method is called in every step. What in `config` says in which steps you log?",
        ),
    ),
    "19.6": Exercise(
        check=first_departure,
        praise="the first tensor, and every rank that is to blame, with nan among the wrong ones",
        hints=(
            "`whole[where]` is what the part should be; `.norm()` is the root of the sum of "
            "squares.",
            "Compare what you get for nan: is `nan > bound` True? Is `nan <= bound`?",
            "The first row with a rank that departs is the answer, even if later rows are worse.",
        ),
    ),
    "19.7": Exercise(
        check=diagnosis,
        praise="a diagnosis that mends what is broken, and leaves alone what is not",
        hints=(
            "First find {layer: list of its bad tensors}, from the last step alone.",
            "`str.removesuffix` takes the end of a name away, `str.rpartition('_')` cuts what is "
            "left into layer and tensor.",
            "One block for each layer is good: `exact_layer_names: [blocks.0.mlp.up]`. Its name "
            "must be different from those of the others.",
        ),
    ),
}
