"""Checks of lesson 24, expert parallelism.

Answers run on simulated ranks: on four, on six, and on three of four.
"""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from course.answer import Exercise, Hint, due
from course.exercises.expect import (
    careless,
    check_causes,
    confirm,
    confirm_in_group,
    diagnose,
    in_groups,
    own_answers,
    refuse,
    run,
    sequence,
    tensor,
    times,
    with_gaps,
)
from course.exercises.simulated import Outcome, here
from course.labs import l24_by_hand as by_hand
from course.labs import l24_experts as lab
from course.pool.ranks import Ranks
from labcode.comm.grid import group_of
from labcode.parallel import experts
from labcode.topology import GridShape

CHANGED = "the call has changed {}: that belongs to the caller"


def _draw(seed: int, *shape: int) -> Tensor:
    """Normal random numbers in float64, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


# ---- 24.1

COUNTS = (
    ([3, 1, 0, 2, 1, 1, 0, 4], 4),
    ([3, 1, 0, 2, 1, 1, 0, 4], 2),
    ([5, 0, 7, 0, 0, 0, 2, 9, 1, 1, 4, 6], 4),
    ([5, 0, 7, 0, 0, 0, 2, 9, 1, 1, 4, 6], 6),
    ([2, 4, 3], 3),
    ([6, 8, 1, 1], 1),
)


def send_splits(answer: Callable[..., Any]) -> None:
    """The learner's `send_splits(counts, num_ranks)`."""
    for rows, num_ranks in COUNTS:
        counts = torch.tensor(rows)
        found = due(answer(counts, num_ranks))
        case = f"counts {rows}, {num_ranks} ranks: "
        refuse({CHANGED.format("counts"): counts.tolist() != rows}, case)
        sequence(found, "a list with a whole number for each rank")
        each = len(rows) // num_ranks
        pieces = [rows[first : first + each] for first in range(0, len(rows), each)]
        truth = [sum(piece) for piece in pieces]
        ends = [sum(truth[: number + 1]) for number in range(num_ranks)]
        starts = [end - own for end, own in zip(ends, truth)]
        given = list(found)
        mistakes = {
            f"{len(given)} numbers for {num_ranks} ranks: one for each rank": (
                len(given) != num_ranks
            ),
            "the numbers are tensors: `all_to_all_single` takes whole numbers of Python": any(
                isinstance(one, Tensor) for one in given
            ),
        }
        refuse(mistakes, case)
        if given == truth and all(isinstance(one, int) for one in given):
            continue
        in_turn = [sum(rows[rank::num_ranks]) for rank in range(num_ranks)]
        busy = [len(piece) - piece.count(0) for piece in pieces]
        means = [total / each for total in truth]
        firsts = [piece[0] for piece in pieces]
        largest = [max(piece) for piece in pieces]
        mistakes = {
            "the numbers are no whole numbers of Python: rows are counted": given == truth,
            "these are the experts that rank 0, rank 1 and so on would get if experts were dealt "
            "out in turn: a rank keeps neighbours": given == in_turn,
            "these are numbers of experts: how many rows go to them?": (
                given in ([each] * num_ranks, busy)
            ),
            "these are the places where the pieces end or begin: give their lengths": (
                given in (ends, starts)
            ),
            "that is the mean over the experts of a rank: all of their rows go there": (
                given == means
            ),
            "one expert of each rank is counted: a rank keeps several": given in (firsts, largest),
        }
        refuse(mistakes, case)
        raise Hint(f"{case}it returned {given}, and rank 0 should get {truth[0]} rows")


# ---- 24.2


class _Travelled(NamedTuple):
    """What went into the exchange on one rank, and what came out, forward and backward."""

    rows: Tensor
    y: Tensor
    grad_y: Tensor
    grad_rows: Tensor


def _splits(p: int) -> list[list[int]]:
    """Rows from each rank to each rank: all different, and number 1 of the group gets none."""
    matrix = []
    for source in range(p):
        row = [(3 * source + 5 * target + source * target) % 4 for target in range(p)]
        row[1] = 0
        row[0] += source
        matrix.append(row)
    return matrix


@contextlib.contextmanager
def _splits_that_fit(block: str, about: str) -> Iterator[None]:
    """A hint in place of PyTorch's errors for splits that do not fit."""
    try:
        with here().block(block):
            yield
    except (RuntimeError, ValueError, IndexError) as error:
        text = str(error)
        rows = re.search(r"shape '\[(\d+), -1\]' is invalid for input of size (\d+)", text)
        number, parts = (rows[2], rows[1]) if rows else ("", "")
        mistakes = {
            f"{block}: {number} numbers do not make {parts} rows of the same length: if they are "
            "counts, has an expert without rows one too, of 0?": rows,
            f"{block}: the splits do not add up to the rows of the tensor that they cut: {about}": (
                "split_with_sizes" in text or "plit sizes" in text
            ),
            "backward gives a tensor of another size than `rows`: their gradients have to travel "
            "back to where they came from": "invalid gradient" in text,
            f"{block} stopped at numbers of rows that do not fit ({text}): {NUMBERS}": (
                "out of bounds" in text or "must match the size of tensor" in text
            ),
        }
        refuse(mistakes)
        raise


NUMBERS = (
    "a rank makes as many rows as it sends, computes as many as arrive, and adds up as many as "
    "come back. In which of the four steps does it take one for the other?"
)
IN_BACKWARD = "in backward this rank sends what it received, and receives what it sent"
IN_FORWARD = (
    "the sizes of the output stand before those of the input, and the output is what is received"
)


def _travel(group: dist.ProcessGroup, function: Any) -> _Travelled:
    number = group.rank()
    matrix = _splits(group.size())
    sent = matrix[number]
    received = [row[number] for row in matrix]
    rows = with_gaps(_draw(10 + number, sum(sent), 3))
    grad_y = with_gaps(_draw(30 + number, sum(received), 3))
    given = rows.clone().requires_grad_()
    lists = list(sent), list(received)
    with _splits_that_fit("forward", IN_FORWARD):
        y = due(function.apply(with_gaps(given), *lists, group))
    tensor(y)
    mistakes = {
        f"forward gives {list(y.shape)}, and {sum(received)} rows arrive: how many are received, "
        "and of how many numbers?": list(y.shape) != [sum(received), 3],
        CHANGED.format("a list of splits"): lists != (sent, received),
        CHANGED.format("rows"): not torch.equal(given, rows),
        "no gradient can flow back: forward does not give what came out of the all-to-all": (
            not y.requires_grad
        ),
    }
    refuse(mistakes)
    handed = grad_y.clone()
    with _splits_that_fit("backward", IN_BACKWARD):
        (grad,) = torch.autograd.grad(y, given, with_gaps(handed), allow_unused=True)
    refuse(
        {
            "no gradient comes back from backward: the first of the four is that of `rows`": (
                grad is None
            ),
            CHANGED.format("the gradient that backward is given"): not torch.equal(handed, grad_y),
        }
    )
    return _Travelled(rows, y.detach().clone(), grad_y, grad.clone())


def _exchanged(parts: Sequence[Tensor], matrix: Sequence[Sequence[int]], number: int) -> Tensor:
    """What arrives at a rank if each rank sends its rows in these pieces."""
    arrived = []
    for part, row in zip(parts, matrix):
        arrived.append(part.split(list(row))[number])
    return torch.cat(arrived)


def _check_travelled(
    results: Sequence[_Travelled], outcome: Outcome, members: Sequence[int]
) -> None:
    """Rows and gradients are those that were sent, in the order of the senders."""
    there = _splits(len(members))
    back = [list(column) for column in zip(*there)]
    for number, (rank, found) in enumerate(zip(members, results)):
        case = f"on rank {rank}: "
        refuse(careless(outcome.of(rank)), case)
        truth = _exchanged([one.rows for one in results], there, number)
        mistakes = {
            "forward: nothing was sent: which call is it that sends?": torch.zeros_like(truth),
            "forward: {times:.3g} times what was sent: rows only travel": times(truth),
        }
        otherwise = "forward: other rows arrive than were sent to this rank"
        diagnose(case, found.y, truth, mistakes, otherwise)
        truth = _exchanged([one.grad_y for one in results], back, number)
        mistakes = {
            "backward: {times:.3g} times the gradient of the rows: a gradient only travels, it is "
            "no sum and no mean": times(truth)
        }
        if found.grad_y.shape == truth.shape:
            own = "backward: that is the gradient of what arrived here; it has to travel back"
            mistakes = {own: found.grad_y} | mistakes
        otherwise = "backward: these are not the gradients of the rows that this rank has sent"
        diagnose(case, found.grad_rows, truth, mistakes, otherwise)


def exchange(function: Any, ranks: Ranks | None = None) -> str:
    """The learner's Function, called as `apply(rows, sent, received, group)`."""
    ours = own_answers(experts.exchange_rows)
    outcome = in_groups(_travel, function, judge=_check_travelled, ours=ours)
    return confirm_in_group(ranks, outcome, _travel, function)


# ---- 24.3


class _Case(NamedTuple):
    """Sizes of a layer, and what is said first where it goes wrong.

    Args:
        each: Experts of a rank.
        k: Experts of a token.
        first: What is added to the first expert's score, and what to the last one's.
        about: Said before the hint.
        place: What is new in this case, said where no mistake is known.
    """

    each: int
    k: int
    first: tuple[float, float]
    about: str
    place: str


CASES = (
    _Case(
        1,
        1,
        (0.0, -2.0),  # some ranks have no row for the last expert
        "one expert on each rank, k = 1: ",
        "is what comes back in the order in which it left, and does each row find its token and, "
        "behind its expert, its weight?",
    ),
    _Case(
        1,
        2,
        (0.0, 0.0),
        "with k = 2: ",
        "k = 1 is right. Row r belongs to token order[r] // k and has its own weight, and a token "
        "is the sum of its rows (an assignment by index keeps one of them)",
    ),
    _Case(
        3,
        2,
        (0.0, 0.0),
        "with three experts on each rank: ",
        "one expert on each rank is right. What arrives is sorted by sender: where does an expert "
        "find all of its rows, and is that undone before they go back?",
    ),
    _Case(
        2,
        2,
        (-60.0, 0.0),
        "with an expert that gets no rows: ",
        "as long as all experts have rows it is right",
    ),
    _Case(
        2,
        1,
        (-60.0, 12.0),
        "with all tokens at the last expert: ",
        "as long as all ranks have rows it is right",
    ),
)
SIZES = (6, 5)  # H, F


class _Whole(NamedTuple):
    """The inputs of all ranks of a group, and the weights."""

    x: list[Tensor]
    factors: list[Tensor]
    router: Tensor
    up: Tensor
    down: Tensor


def _whole(p: int, case: _Case) -> _Whole:
    hidden, inside = SIZES
    num_experts = case.each * p
    router = _draw(1, hidden, num_experts) / 2
    router[0] = 0.0
    router[0, 0], router[0, -1] = case.first
    xs = []
    for number in range(p):
        x = _draw(10 + number, 7 + number, hidden)  # each rank has another number of tokens
        x[:, 0] = 1.0
        xs.append(x)
    return _Whole(
        xs,
        [_draw(30 + number, 7 + number, hidden) for number in range(p)],
        router,
        _draw(2, num_experts, hidden, inside),
        _draw(3, num_experts, inside, hidden),
    )


class _LayerStep(NamedTuple):
    """Output and gradients of a rank."""

    y: Tensor
    grads: dict[str, Tensor | None]


def _layer_step(group: dist.ProcessGroup, layer: Callable[..., Any], case: _Case) -> _LayerStep:
    number = group.rank()
    p = group.size()
    whole = _whole(p, case)
    mine = slice(number * case.each, (number + 1) * case.each)
    given = {
        "x": whole.x[number].clone(),
        "router": whole.router.clone(),
        "up": whole.up[mine].clone(),
        "down": whole.down[mine].clone(),
    }
    before = {name: value.clone() for name, value in given.items()}
    for value in given.values():
        value.requires_grad_()
    with _splits_that_fit("forward", "which counts are those that are sent, which received?"):
        y = due(layer(*given.values(), case.k, group))
    tensor(y, whole.x[number].shape)
    changed = [name for name, value in given.items() if not torch.equal(value, before[name])]
    refuse({CHANGED.format(" and ".join(changed)): changed})
    no_way_back = (
        "no gradient flows back from the output: is it detached, or does this rank leave before "
        "the exchange when it has no rows?"
    )
    refuse({no_way_back: not y.requires_grad})
    with here().block("backward"):
        y.backward(whole.factors[number])
    grads = {}
    for name, value in given.items():
        grads[name] = None if value.grad is None else value.grad.clone()
    return _LayerStep(y.detach().clone(), grads)


def _weighted(whole: _Whole, case: _Case, weighted: bool) -> Tensor:
    """The layer of one process on all tokens; without weights each chosen expert counts 1."""
    x = torch.cat(whole.x)
    weights, chosen = torch.softmax(x @ whole.router, -1).topk(case.k, -1)
    if not weighted:
        weights = torch.ones_like(weights)
    y = torch.zeros_like(x)
    for expert in range(len(whole.up)):
        weight = (weights * (chosen == expert)).sum(-1, keepdim=True)
        y = y + weight * (F.gelu(x @ whole.up[expert]) @ whole.down[expert])
    return y


def _truth(whole: _Whole, case: _Case) -> tuple[Tensor, dict[str, Tensor]]:
    """(output on all tokens, gradients) of one process."""
    leaves = whole._replace(
        x=[x.clone().requires_grad_() for x in whole.x],
        router=whole.router.clone().requires_grad_(),
        up=whole.up.clone().requires_grad_(),
        down=whole.down.clone().requires_grad_(),
    )
    y = _weighted(leaves, case, True)
    y.backward(torch.cat(whole.factors))
    grads = {"x": torch.cat([_grad(x) for x in leaves.x])}
    for name in ("router", "up", "down"):
        grads[name] = _grad(getattr(leaves, name))
    return y.detach(), grads


def _grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _check_layer(
    case: _Case, results: Sequence[_LayerStep], outcome: Outcome, members: Sequence[int]
) -> None:
    """Output and gradients are those of one process, and rows have travelled."""
    p = len(members)
    whole = _whole(p, case)
    y, grads = _truth(whole, case)
    lengths = [len(x) for x in whole.x]
    true_y = y.split(lengths)
    without_weights = _weighted(whole, case, False).split(lengths)
    for number, rank in enumerate(members):
        refuse(careless(outcome.of(rank)), case.about)
        refuse(_sent_otherwise(outcome, rank), f"{case.about}on rank {rank}: ")
        found = results[number].y
        truth = true_y[number]
        mistakes = {
            "{times:.3g} times the output: the sum of a token's rows, each with its weight": times(
                truth
            ),
            "the rows are added without their weights": without_weights[number],
            "the right outputs for the wrong tokens: which permutation undoes a sorting?": (
                _same_rows(found, truth)
            ),
        }
        about = f"{case.about}on rank {rank}: "
        otherwise = f"the output is wrong by {{off:.0%}}: {case.place}"
        diagnose(about, found, truth, mistakes, otherwise)
    _check_gradients(case, [one.grads for one in results], grads, lengths)


def _same_rows(found: Tensor, truth: Tensor) -> bool:
    """Whether two tensors have the same rows in any order."""
    if found.shape != truth.shape or len(truth) < 2:
        return False
    distances = torch.cdist(found, truth)
    return bool((distances.min(1).values < 1e-9).all() and (distances.min(0).values < 1e-9).all())


def _sent_otherwise(outcome: Outcome, rank: int) -> Mapping[str, Any]:
    """What a rank sends that is not two all-to-alls of rows each way."""
    calls = [one for one in outcome.of(rank) if one.dtype == "float64"]
    forward = sum(one.block == "forward" for one in calls)
    backward = sum(one.block == "backward" for one in calls)
    others = sorted({one.kind for one in calls if one.kind != "all_to_all"})
    return {
        f"{' and '.join(others)} of whole tensors: a row goes to the rank of its expert alone": (
            others
        ),
        "no row travels: the experts of this rank have worked on rows that are not theirs": (
            forward == 0
        ),
        f"rows travel {forward} times in forward: once there, and once back": (forward != 2),
        f"rows travel {backward} times in backward, expected are 2: which call cuts "
        "the graph? Use `exchange`": backward != 2,
    }


def _check_gradients(
    case: _Case,
    of_ranks: Sequence[Mapping[str, Tensor | None]],
    grads: Mapping[str, Tensor],
    lengths: Sequence[int],
) -> None:
    for number, own in enumerate(of_ranks):
        missing = [name for name, grad in own.items() if grad is None]
        where = "the router: are its weights detached, or left out?"
        if missing and missing[0] != "router":
            where = f"{' and '.join(missing)}: does every rank call its experts, also without rows?"
        refuse({f"no gradient reaches {where}": missing}, case.about)
        xs = grads["x"].split(list(lengths))[number]
        diagnose(
            case.about,
            lab.there(own["x"]),
            xs,
            {"the gradient of x is {times:.3g} times too long": times(xs)},
            "the gradient of x is wrong: it comes through the router and through each of the rows",
        )
        for name in ("up", "down"):
            mine = grads[name].chunk(len(of_ranks))[number]
            diagnose(
                case.about,
                lab.there(own[name]),
                mine,
                {f"the gradient of {name} is {{times:.3g}} times too long": times(mine)},
                f"the gradient of {name} is wrong",
            )
    router = torch.stack([lab.there(own["router"]) for own in of_ranks]).sum(0)
    diagnose(
        case.about,
        router,
        grads["router"],
        {"the gradient of the router is {times:.3g} times too long": times(grads["router"])},
        "the gradient of the router is wrong: does each weight meet its own row?",
    )


def expert_layer(layer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `expert_layer(x, router, up, down, k, group)`."""
    ours = own_answers(by_hand.expert_layer, experts.Travel.__call__)
    said = ""
    for case in CASES:
        judge = functools.partial(_check_layer, case)
        outcome = in_groups(_layer_step, layer, case, judge=judge, ours=ours)
        said = confirm_in_group(ranks, outcome, _layer_step, layer, case)
    return said


# ---- 24.4

SHAPES = (  # the first has the ranks of the lesson
    GridShape(dp=4, ep=2),
    GridShape(dp=6, ep=3),
    GridShape(dp=6, ep=2),
    GridShape(dp=4, ep=2, pp=2),
    GridShape(dp=4, ep=1),
    GridShape(dp=4, ep=4),  # no replicas: nothing to sum, and still a mean over dp
)
DENSE = ((5, 3), (4,))
OF_EXPERTS = ((2, 3, 4), (2, 4, 3))


def _local(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """What backward leaves on a rank: (of dense weights, of experts)."""
    dense = [_draw(100 + rank + 50 * place, *shape) for place, shape in enumerate(DENSE)]
    own = [_draw(300 + rank + 50 * place, *shape) for place, shape in enumerate(OF_EXPERTS)]
    return dense, own


def _groups(shape: GridShape, rank: int) -> list[dist.ProcessGroup]:
    """dp, ep and edp of a rank; every rank calls it."""
    found = []
    for axis in ("dp", "ep", "edp"):
        for members in shape.groups(axis):
            group = group_of(members)
            if rank in members:
                assert group is not None
                found.append(group)
    return found


class _Finished(NamedTuple):
    """What a rank has afterwards."""

    dense: list[Tensor]
    experts: list[Tensor]
    norm: Tensor


def _finish(rank: int, shape: GridShape, answer: Callable[..., Any]) -> _Finished:
    groups = _groups(shape, rank)
    lists = []
    for grads in _local(rank):
        params = []
        for grad in grads:
            param = torch.nn.Parameter(torch.ones_like(grad))
            param.grad = grad.clone()
            params.append(param)
        lists.append(params)
    with here().block("finish"):
        norm = due(answer(*lists, *groups))
    params = (*lists[0], *lists[1])
    changed = [param for param in params if not torch.equal(param, torch.ones_like(param))]
    without = [param for param in params if param.grad is None]
    mistakes = {
        "it returned None: is there a `return` of the norm?": norm is None,
        "the parameters themselves have changed: their gradients should": changed,
        "a parameter has no gradient any more": without,
    }
    refuse(mistakes)
    if not isinstance(norm, Tensor | float | int) or torch.as_tensor(norm).numel() != 1:
        raise Hint("return the norm of all gradients: one number")
    dense, own = (_grads_of(each) for each in lists)
    return _Finished(dense, own, torch.as_tensor(norm).detach().clone().double().reshape(()))


def _grads_of(params: Sequence[torch.nn.Parameter]) -> list[Tensor]:
    return [lab.there(param.grad).clone() for param in params]


def _mean(ranks: Sequence[int], which: int, place: int, num: int) -> Tensor:
    """The sum of a gradient over some ranks, divided by a number."""
    return torch.stack([_local(rank)[which][place] for rank in ranks]).sum(0) / num


def _members(shape: GridShape, axis: str, rank: int) -> list[int]:
    return next(members for members in shape.groups(axis) if rank in members)


def _check_finished(shape: GridShape, outcome: Outcome, case: str) -> None:
    for rank, found in enumerate(outcome.results):
        about = f"{case}on rank {rank}: "
        refuse(careless(outcome.of(rank)), about)
        dp, ep, edp = (_members(shape, axis, rank) for axis in ("dp", "ep", "edp"))
        for place, grad in enumerate(found.dense):
            local = _local(rank)[0][place]
            truth = _mean(dp, 0, place, len(dp))
            mistakes = {
                "the gradient of a dense weight is {times:.3g} times the mean over dp: by how many "
                "losses is it to be divided?": times(truth),
                "the gradient of a dense weight is this rank's own: it lacks the losses of the "
                "other ranks of dp": times(local),
                "the gradient of a dense weight is summed over edp: who has copies of it?": (
                    times(_mean(edp, 0, place, 1))
                ),
                "the gradient of a dense weight is summed over ep: who has copies of it?": (
                    times(_mean(ep, 0, place, 1))
                ),
                "the gradient of a dense weight is summed over the whole job: `dp` is the group": (
                    times(_mean(range(shape.world_size), 0, place, 1))
                ),
            }
            diagnose(about, grad, truth, mistakes, "the gradient of a dense weight is wrong")
        for place, grad in enumerate(found.experts):
            truth = _mean(edp, 1, place, len(dp))
            mistakes = {
                "the gradient of an expert is {times:.3g} times too long: it is that of a mean "
                "over all ranks of dp, whoever has its rows": times(truth),
                "the gradient of an expert is summed over dp: neighbours keep other experts": (
                    times(_mean(dp, 1, place, 1))
                ),
                "the gradient of an expert is summed over ep: these ranks keep other experts": (
                    times(_mean(ep, 1, place, 1))
                ),
                "the gradient of an expert lacks that of its replicas": times(
                    _local(rank)[1][place]
                ),
            }
            diagnose(about, grad, truth, mistakes, "the gradient of an expert is wrong")
    for rank, found in enumerate(outcome.results):
        about = f"{case}on rank {rank}: "
        _check_norm(shape, rank, outcome.results, found.norm, about)


def _check_norm(
    shape: GridShape, rank: int, results: Sequence[_Finished], norm: Tensor, about: str
) -> None:
    """The norm counts everything once."""
    dp, ep, edp = (_members(shape, axis, rank) for axis in ("dp", "ep", "edp"))
    dense = _squares(results[rank].dense)
    own = _squares(results[rank].experts)
    of_ep = torch.stack([_squares(results[other].experts) for other in ep])
    whole = of_ep.sum()
    truth = (dense + whole).sqrt()
    norms = dense.sqrt() + of_ep.sqrt().sum()
    local = _squares([*_local(rank)[0], *_local(rank)[1]]).sqrt()
    left_in_ep = torch.stack([_squares(_local(other)[1]) for other in ep]).sum()
    before = (_squares(_local(rank)[0]) + left_in_ep).sqrt()
    mistakes = {
        "the norm counts the experts of this rank alone": (dense + own).sqrt(),
        "the norm counts the weights that all ranks have once for each rank of ep": (
            len(ep) * dense + whole
        ).sqrt(),
        "the norm counts everything that is there several times as often": (
            len(dp) * dense + len(edp) * whole
        ).sqrt(),
        "the norm counts an expert once for each of its replicas": (
            dense + len(edp) * whole
        ).sqrt(),
        "the norm adds the experts of replicas in place of those of ep": (
            dense + len(edp) * own
        ).sqrt(),
        "that is the square of the norm": truth.square(),
        "norms were added up: what adds up are their squares": norms,
        "only the experts are counted": whole.sqrt(),
        "only the weights that all ranks have are counted": dense.sqrt(),
        "that is the norm of what backward left, before the sums": local,
        "the squares are those of gradients that are not summed yet": before,
    }
    off = f"the norm is {norm.item():.4g}, expected is {truth.item():.4g}"
    diagnose(about, norm, truth, mistakes, off, tolerance=1e-6)


def _squares(grads: Sequence[Tensor]) -> Tensor:
    return torch.stack([grad.square().sum() for grad in grads]).sum()


def finish_gradients(answer: Callable[..., Any], ranks: Ranks | None = None) -> str:
    """The learner's `finish_gradients(dense, experts, dp, ep, edp)`."""
    ours = own_answers(by_hand.finish_gradients)
    first = None
    for shape in SHAPES:
        stages = f", pp = {shape.pp}" if shape.pp > 1 else ""
        case = f"dp = {shape.dp}, ep = {shape.ep}{stages}: "
        outcome = run(_finish, shape, answer, size=shape.world_size, case=case, ours=ours)
        _check_finished(shape, outcome, case)
        first = first or outcome
    assert first is not None
    return confirm(ranks, first, _finish, SHAPES[0], answer)


# ---- 24.5

SIGNS = {
    "A": {
        "norm": "a norm that is wrong changes no gradient, and here gradients are too long",
        "detached": "the router has its gradient. Whose is too long, and by what?",
        "skipped": "a rank that is left out would lack a gradient; nobody lacks one",
    },
    "B": {
        "group": "nothing is too long, something is missing. On which ranks?",
        "norm": "a norm that is wrong changes no gradient, and here one is missing",
        "skipped": "is it a gradient of the experts that is missing, and does the load matter?",
    },
    "C": {
        "group": "nothing is too long. What is different between the two loads?",
        "norm": "a norm that is wrong changes no gradient, and here some are missing",
        "detached": "the router has its gradient. Which ranks lack one, and under which load?",
    },
}
DIAGNOSES = {"A": "group", "B": "detached", "C": "skipped"}
RULED_OUT = {
    "order": "rows in a wrong order would make the loss wrong, and it is right",
    "splits": "with wrong splits backward would not come to its end, and it did",
}


def diagnoses(given: Any) -> None:
    """The learner's {patient: cause}."""
    check_causes(given, DIAGNOSES, lab.CAUSES, SIGNS, RULED_OUT)


EXERCISES = {
    "24.1": Exercise(
        check=send_splits,
        praise="what lies in one piece needs one number",
        hints=(
            "Which experts does rank 0 keep, and how many rows do they get together?",
            "`counts.view(a, b)` puts neighbours into one row of a table. What are a and b?",
        ),
    ),
    "24.2": Exercise(
        check=exchange,
        praise="rows of any number, to any group, and their gradients find home",
        hints=(
            "How many rows does the output have? `sum` of which list?",
            "What does backward need to know that only forward is told?",
            "Who received 2 rows from rank 1 in forward, sends how many to rank 1 in backward?",
        ),
    ),
    "24.3": Exercise(
        check=expert_layer,
        praise="the same layer wherever its experts are, with idle ones and with crowded ones",
        hints=(
            "Print `theirs` on a rank: what does a row of it say, what a column?",
            "The number of the expert of each row that arrives: repeat each expert as often as "
            "`theirs` says, sender by sender. Its argsort brings an expert's rows together.",
            "Every permutation on the way there is undone on the way back, the last one first.",
        ),
    ),
    "24.4": Exercise(
        check=finish_gradients,
        praise="each gradient over its own group, and each number of the norm once",
        hints=(
            "Which losses are in an expert's gradient already when backward is done?",
            "A mean over the losses of dp: by what is every gradient divided?",
            "After the sums: which squares differ over ep, and which are the same there?",
        ),
    ),
    "24.5": Exercise(
        check=diagnoses,
        praise="none of the three shows in the loss",
        hints=(
            "Which causes would make the loss wrong, or keep backward from its end?",
            "Too long, missing everywhere, missing on some ranks under one load: which is which?",
        ),
    ),
}
