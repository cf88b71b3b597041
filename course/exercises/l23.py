"""Checks of lesson 23: parameters of a mixture, router, bias, and the way through the experts."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from course.answer import Exercise, Hint, due
from course.exercises.expect import diagnose, distance, refuse, tensor, with_gaps
from course.exercises.in_notebook import without
from course.labs import l23_experts as lab
from labcode.models import moe
from labcode.runtime.units import type_in_words

ROUNDED = 1e-9  # float64, added in another order
IN_FLOAT32 = 1e-6  # a count divided by a count is float32
CHANGED = "a tensor that was given has changed: work on new ones"


@contextmanager
def _float64() -> Iterator[None]:
    """New tensors of an answer are float64, as those that it is given: fractions of counts too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# ---- 23.1


def total_and_active(answer: Callable[..., Any]) -> None:
    """The learner's `total_and_active(model)`."""
    draw = random.Random(23)
    for shared in (0, 0, 1, 3):
        experts = draw.randint(5, 60)
        model = lab.Mixture(
            moe_layers=draw.randint(3, 50),
            hidden_size=draw.randint(100, 900),
            expert_ffn=draw.randint(100, 900),
            experts=experts,
            top_k=draw.randint(1, experts - 2),
            shared=shared,
            others=draw.randint(10**6, 10**8),
        )
        sizes = ", ".join(f"{field} = {size:,}" for field, size in model._asdict().items())
        case = f"with {sizes}: "
        with without(lab.total_and_active):
            found = due(answer(model))
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise Hint(f"return two numbers, not {type(found).__name__}")
        total, active = due(*found)
        _count(f"{case}the total is {{found:,.0f}}: ", total, model, model.experts)
        _count(f"{case}active are {{found:,.0f}}: ", active, model, model.top_k)


def _count(case: str, found: Any, model: lab.Mixture, used: int) -> None:
    """See that a count is that of a model with `used` of its experts."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise Hint(f"return two numbers, not {type_in_words(found)}")
    one = 3 * model.hidden_size * model.expert_ffn
    layers = model.moe_layers
    always = model.others + model.shared * layers * one
    other = model.top_k if used == model.experts else model.experts
    if used == model.experts:
        of_shared = "the parameters of the shared experts count too, in each layer"
    else:
        of_shared = "every token goes through the shared experts too"
    mistakes = {
        "that is the other of the two": float(always + layers * other * one),
        "what is not in the experts is missing": float(layers * (used + model.shared) * one),
        "an expert has three matrices": float(
            model.others + layers * (used + model.shared) * one / 3
        ),
        "an expert has three matrices, not two": float(
            model.others + layers * (used + model.shared) * one * 2 / 3
        ),
        "the router is counted too: leave it out": float(
            always + layers * (used * one + model.hidden_size * model.experts)
        ),
        "each layer has experts of its own": float(model.others + (used + model.shared) * one),
        of_shared: model.shared > 0 and float(found) == float(model.others + layers * used * one),
        "the shared experts stand in each layer as well": model.shared > 0
        and float(found) == float(model.others + (layers * used + model.shared) * one),
    }
    truth = float(always + layers * used * one)
    otherwise = f"expected is {truth:,.0f}"
    diagnose(case.format(found=found), float(found), truth, mistakes, otherwise)


# ---- 23.2


def _draw(*shape: int, seed: int) -> Tensor:
    """Random numbers in float64, every second one of a larger tensor: not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    return with_gaps(torch.randn(*shape, generator=generator, dtype=torch.float64))


def _to_route() -> dict[str, tuple[Tensor, Tensor, int]]:
    favoured = _draw(5, 4, seed=3)
    return {
        "11 tokens, 5 experts, k = 2": (_draw(11, 4, seed=1), _draw(5, 4, seed=2), 2),
        "k = 1": (_draw(9, 6, seed=4), _draw(4, 6, seed=5), 1),
        "k = 3 of 7": (_draw(6, 3, seed=6), _draw(7, 3, seed=7), 3),
        "all tokens alike": (favoured[2].repeat(8, 1), favoured, 2),
        "more experts than rows": (_draw(3, 4, seed=8), _draw(9, 4, seed=9), 2),
        "large logits": (30 * _draw(7, 4, seed=10), _draw(5, 4, seed=11), 2),
        "all experts": (_draw(5, 4, seed=12), _draw(3, 4, seed=13), 3),
        "equal logits": (torch.zeros(4, 6, dtype=torch.float64), _draw(5, 6, seed=14), 2),
    }


def route(answer: Callable[..., Any]) -> None:
    """The learner's `route(x, weight, top_k)`."""
    for name, (x, weight, top_k) in _to_route().items():
        case = f"{name}: "
        given = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        with _float64(), without(lab.route, moe.Router.forward, moe.Router.counts):
            result = due(answer(*given, top_k))
        found, experts, loss = _three(result, "weights, experts, loss")
        refuse({CHANGED: not torch.equal(given[0], x) or not torch.equal(given[1], weight)}, case)
        logits = x @ weight.T
        scores = logits.softmax(-1)
        _see_experts(case, experts, scores, top_k)
        _see_weights(case, found, logits, experts)
        _see_loss(case, loss, scores, experts)
        _see_gradients(case, given, found, experts, loss)


def _three(result: Any, names: str) -> tuple[Any, Any, Any]:
    if not isinstance(result, tuple | list):
        raise Hint(f"return three things, {names}, not {type(result).__name__}")
    if len(result) != 3:
        raise Hint(f"return three things, {names}; you return {len(result)}")
    one, two, three = due(*result)
    return one, two, three


def _see_experts(case: str, experts: Any, wanted: Tensor, top_k: int) -> None:
    """See that experts are the numbers of the k largest of each row."""
    tensor(experts, (len(wanted), top_k), what=f"{case}the experts are")
    mistakes = {
        f"the experts are {experts.dtype}, expected are their numbers, int64": (
            experts.dtype != torch.int64
        ),
    }
    refuse(mistakes, case)
    is_number = bool(((experts >= 0) & (experts < wanted.shape[1])).all())
    refuse({f"experts have the numbers 0 to {wanted.shape[1] - 1}": not is_number}, case)
    ordered = experts.sort(-1).values
    repeated = bool((ordered[:, 1:] == ordered[:, :-1]).any())
    chosen = wanted.gather(-1, experts)
    best = wanted.topk(top_k, -1).values
    worst = wanted.topk(top_k, -1, largest=False).values
    mistakes = {
        "a token has the same expert twice": repeated,
        "these are the experts with the smallest scores": distance(worst, chosen) < ROUNDED
        and distance(best, chosen) > ROUNDED,
        "these are not the experts with the largest scores of each token": (
            distance(chosen.sort(-1).values, best.sort(-1).values) > ROUNDED
        ),
    }
    refuse(mistakes, case)


def _see_weights(case: str, found: Any, logits: Tensor, experts: Tensor) -> None:
    """See that weights are the chosen scores, divided by their sum."""
    tensor(found, experts.shape, what=f"{case}the weights are")
    chosen = logits.softmax(-1).gather(-1, experts)
    truth = chosen / chosen.sum(-1, keepdim=True)
    sigmoids = logits.sigmoid().gather(-1, experts)
    of_one_logit = (
        "the scores are sigmoids, each of one logit alone: those of a token are a softmax over all "
        "experts"
    )
    is_sigmoid = distance(found, sigmoids) < ROUNDED
    is_sigmoid = is_sigmoid or distance(found, sigmoids / sigmoids.sum(-1, keepdim=True)) < ROUNDED
    mistakes = {
        of_one_logit: is_sigmoid,
        "the weights of a token do not add up to 1: what is missing after the choice?": chosen,
        "these are a softmax of scores that are a softmax already": chosen.softmax(-1),
        "these are the logits: which function makes weights of them?": chosen.log(),
        "the sum runs over the tokens, and not over the experts of one token": chosen
        / chosen.sum(0, keepdim=True),
        "the sum runs over all tokens": chosen / chosen.sum(),
    }
    otherwise = (
        f"the weights of token 0 are {_numbers(found[0])}, expected are {_numbers(truth[0])}, in "
        "the order of its experts"
    )
    diagnose(case, found, truth, mistakes, otherwise, tolerance=ROUNDED)


def _numbers(row: Tensor) -> str:
    return ", ".join(f"{value:.4g}" for value in row.tolist())


def _see_loss(case: str, loss: Any, scores: Tensor, experts: Tensor) -> None:
    """See that the balance loss is E sum f P."""
    tensor(loss, what=f"{case}the loss is")
    if loss.numel() != 1:
        raise Hint(f"{case}the loss is of shape {list(loss.shape)}, expected is one number")
    number = scores.shape[1]
    top_k = experts.shape[1]
    rows = torch.bincount(experts.flatten(), minlength=number).double()
    first = torch.bincount(experts[:, 0], minlength=number).double()
    f = rows / rows.sum()
    mean = scores.mean(0)
    own = torch.zeros_like(scores).scatter(-1, experts, scores.gather(-1, experts))
    normed = own / own.sum(-1, keepdim=True)
    truth = number * (f * mean).sum()
    mistakes = {
        "the factor E is missing": (f * mean).sum(),
        "it is k times as large: f is a fraction of all choices, and a token has k of them": (
            top_k > 1 and distance(loss.reshape(()), top_k * truth) < IN_FLOAT32
        ),
        "f counts choices: divide by how many there are in all": number * (rows * mean).sum(),
        "only first choices are counted in f": number * (first / first.sum() * mean).sum(),
        "P is the mean of all scores of an expert, and not only where it was chosen": number
        * (f * own.mean(0)).sum(),
        "P is made of the scores before the choice": number * (f * normed.mean(0)).sum(),
        "that is a mean over the experts, and not E times the sum": (f * mean).mean(),
        "that is the sum of squares of f: where is P?": number * (f * f).sum(),
        "that is the sum of squares of P: where is f?": number * (mean * mean).sum(),
        "P is a mean over tokens, and not a sum": number * (f * scores.sum(0)).sum(),
    }
    otherwise = (
        f"the loss is {loss.item():.6g}, expected is {truth.item():.6g} = E * (sum of f * P)"
    )
    diagnose(case, loss.reshape(()), truth, mistakes, otherwise, tolerance=IN_FLOAT32)


def _see_gradients(
    case: str, given: list[Tensor], found: Tensor, experts: Tensor, loss: Tensor
) -> None:
    """See that both results have the gradients of their definitions."""
    fresh = [one.detach().clone().requires_grad_() for one in given]
    scores = (fresh[0] @ fresh[1].T).softmax(-1)
    chosen = scores.gather(-1, experts)
    truth = chosen / chosen.sum(-1, keepdim=True)
    number = scores.shape[1]
    rows = torch.bincount(experts.flatten(), minlength=number).double()
    wanted_loss = number * (rows / rows.sum() * scores.mean(0)).sum()
    toward = torch.linspace(1, 2, truth.numel(), dtype=torch.float64).view_as(truth)
    for what, own, wanted in (
        ("weights", found, (truth * toward).sum()),
        ("loss", loss, wanted_loss),
    ):
        if not own.requires_grad:
            raise Hint(
                f"{case}no gradient reaches the router from the {what}: was something detached, "
                "or computed without autograd?"
            )
        value = (own * toward).sum() if what == "weights" else own.reshape(())
        has = torch.autograd.grad(value, given, retain_graph=True, allow_unused=True)
        needs = torch.autograd.grad(wanted, fresh, retain_graph=True)
        for name, one, two in zip(("x", "weight"), has, needs):
            is_zero = float(two.norm()) < IN_FLOAT32
            one = torch.zeros_like(two) if one is None else one
            is_right = (
                float((one - two).norm()) < IN_FLOAT32
                if is_zero
                else distance(one, two) < IN_FLOAT32
            )
            if not is_right:
                raise Hint(
                    f"{case}the {what} is right, and the gradient that it gives {name} is not: "
                    "through what does it have to flow?".replace("weights is", "weights are")
                )


# ---- 23.3


def _to_choose() -> dict[str, tuple[Tensor, Tensor, int]]:
    zero = torch.zeros(5, dtype=torch.float64)
    pulled = torch.tensor([0.4, -0.3, 0.0, 0.9, -0.6], dtype=torch.float64)
    alike = torch.tensor([0.9, 0.8, 0.3, 0.2, 0.1], dtype=torch.float64).repeat(6, 1)
    even = torch.eye(5, dtype=torch.float64) * 0.5 + 0.1
    return {
        "a bias of zeros": (_draw(11, 5, seed=21).sigmoid(), zero, 2),
        "a bias that changes choices": (_draw(12, 5, seed=22).sigmoid(), pulled, 2),
        "k = 1": (_draw(9, 5, seed=23).sigmoid(), pulled, 1),
        "all tokens alike": (alike, zero, 2),
        "an even load": (even, zero, 1),
        "k = 4 of 5": (_draw(7, 5, seed=24).sigmoid(), pulled / 2, 4),
    }


def choose_with_bias(answer: Callable[..., Any]) -> None:
    """The learner's `choose_with_bias(scores, bias, top_k, rate)`."""
    for name, (scores, bias, top_k) in _to_choose().items():
        case = f"{name}: "
        rate = 0.9 if name == "k = 1" else 0.03
        given = [scores.clone().requires_grad_(), bias.clone()]
        before = given[0].detach().clone()
        ours = (lab.choose_with_bias, moe.Router.forward, moe.Router.move_of_bias)
        with _float64(), without(*ours):
            result = due(answer(*given, top_k, rate))
        found, experts, moved = _three(result, "weights, experts, the new bias")
        is_changed = not torch.equal(given[1], bias) or not torch.equal(given[0], before)
        refuse({CHANGED: is_changed}, case)
        tensor(experts, (len(scores), top_k), what=f"{case}the experts are")
        plain = scores.topk(top_k, -1).indices.sort(-1).values
        with_bias = (scores + bias).topk(top_k, -1).indices.sort(-1).values
        against = (scores - bias).topk(top_k, -1).indices.sort(-1).values
        own = experts.sort(-1).values
        is_wrong = not torch.equal(own, with_bias)
        mistakes = {
            "the choice does not know the bias": is_wrong and torch.equal(own, plain),
            "a larger bias must make an expert more likely": is_wrong and torch.equal(own, against),
        }
        refuse(mistakes, case)
        _see_experts(case, experts, scores + bias, top_k)
        _see_biased_weights(case, found, scores, bias, experts)
        _see_bias(case, moved, scores, bias, experts, rate)


def _see_biased_weights(
    case: str, found: Any, scores: Tensor, bias: Tensor, experts: Tensor
) -> None:
    tensor(found, experts.shape, what=f"{case}the weights are")
    chosen = scores.gather(-1, experts)
    biased = (scores + bias).gather(-1, experts)
    truth = chosen / chosen.sum(-1, keepdim=True)
    has_bias = bool(bias.any())
    mistakes = {
        "the weights contain the bias: it is for the choice alone": has_bias
        and (
            distance(found, biased / biased.sum(-1, keepdim=True)) < ROUNDED
            or distance(found, biased) < ROUNDED
        ),
        "the weights of a token do not add up to 1": chosen,
        "these are a softmax of the scores, and not the scores divided by their sum": (
            chosen.softmax(-1)
        ),
    }
    otherwise = f"the weights of token 0 are {_numbers(found[0])}, expected {_numbers(truth[0])}"
    diagnose(case, found, truth, mistakes, otherwise, tolerance=ROUNDED)
    refuse(
        {
            "no gradient reaches the scores from the weights: the router would never learn": (
                not found.requires_grad
            )
        },
        case,
    )


def _see_bias(
    case: str, moved: Any, scores: Tensor, bias: Tensor, experts: Tensor, rate: float
) -> None:
    tensor(moved, bias.shape, what=f"{case}the new bias is")
    number = scores.shape[1]
    top_k = experts.shape[1]
    rows = torch.bincount(experts.flatten(), minlength=number).double()
    first = torch.bincount(experts[:, 0], minlength=number).double()
    gap = rows.mean() - rows
    sums = torch.zeros_like(scores).scatter(-1, experts, scores.gather(-1, experts)).sum(0)
    truth = bias + rate * gap.sign()
    old = moved.detach()
    steps = (old - bias) / rate
    is_right = distance(old + 1, truth + 1) < IN_FLOAT32
    mistakes = {
        "it goes on from 0, and not from the bias that was given": (old - (truth - bias)).norm()
        < IN_FLOAT32,
        "an expert with too many rows must become less likely, and yours becomes more likely": (
            (steps + gap.sign()).norm() < IN_FLOAT32
        ),
        "each bias moves by the rate, however far its load is from the mean": _is_multiple(
            steps, gap
        ),
        "the rate is not used": (old - (bias + gap.sign())).norm() < IN_FLOAT32,
        "the mean is that of rows, T k / E, and not of tokens, T / E": top_k > 1
        and (steps - (len(scores) / number - rows).sign()).norm() < IN_FLOAT32,
        "only first choices are counted": (steps - (first.mean() - first).sign()).norm()
        < IN_FLOAT32,
        "the load is a number of rows, and not a sum of scores": (
            steps - (sums.mean() - sums).sign()
        ).norm()
        < IN_FLOAT32,
        "an expert with exactly the mean load does not move": bool(
            ((gap == 0) & (steps != 0)).any()
        )
        and bool((steps == gap.sign())[gap != 0].all()),
    }
    if not is_right:
        refuse(mistakes, case)
        raise Hint(
            f"{case}the rows are {rows.long().tolist()}, and the bias moved by "
            f"{_numbers(old - bias)}; expected is {_numbers(truth - bias)}"
        )
    text = "the new bias hangs on the graph: no gradient is to reach it"
    refuse({text: moved.requires_grad}, case)


def _is_multiple(steps: Tensor, gap: Tensor) -> bool:
    """Whether steps are proportional to the gap, which is not even in size."""
    if len(gap.abs().unique()) < 2:
        return False
    factor = float((steps * gap).sum() / (gap * gap).sum())
    return factor > 0 and distance(steps, factor * gap) < 1e-6


# ---- 23.4


def _to_send() -> dict[str, tuple[Tensor, int]]:
    """{case: (experts [T, k], E)}."""
    generator = torch.Generator().manual_seed(31)

    def drawn(tokens: int, top_k: int, total: int) -> Tensor:
        return torch.rand(tokens, total, generator=generator).topk(top_k, -1).indices

    no_last = drawn(9, 2, 4)
    no_middle = drawn(9, 2, 4)
    no_middle = torch.where(no_middle >= 2, no_middle + 1, no_middle)
    return {
        "7 tokens, k = 2 of 4": (drawn(7, 2, 4), 4),
        "k = 1": (drawn(10, 1, 3), 3),
        "k = 3": (drawn(6, 3, 5), 5),
        "the last expert gets no token": (no_last, 5),
        "expert 2 gets no token": (no_middle, 5),
        "all tokens at one expert": (torch.full((6, 1), 2), 4),
        "one token": (drawn(1, 2, 4), 4),
        "all experts": (drawn(5, 3, 3), 3),
        "numbers that are not contiguous": (drawn(8, 4, 6)[:, ::2], 6),
    }


class _Experts:
    """MLPs with weights of their own, which see that their rows are what they should be."""

    def __init__(self, case: str, x: Tensor, experts: Tensor, total: int) -> None:
        hidden = x.shape[1]
        self.case = case
        self.x = x.detach()
        self.experts = experts
        self.num_calls = 0
        self.up = _draw(total, hidden, 5, seed=41).contiguous().requires_grad_()
        self.down = _draw(total, 5, hidden, seed=42).contiguous().requires_grad_()

    def one(self, number: int) -> Callable[[Tensor], Tensor]:
        """An expert by its number."""

        def mlp(rows: Tensor) -> Tensor:
            return torch.tanh(rows @ self.up[number]) @ self.down[number]

        return mlp

    def all(self) -> list[Callable[[Tensor], Tensor]]:
        """All of them."""
        return [self.one(number) for number in range(len(self.up))]

    def __call__(self, rows: Any, counts: Any) -> Tensor:
        self.num_calls += 1
        total = len(self.up)
        num_rows = self.experts.numel()
        top_k = self.experts.shape[1]
        tensor(rows, what=f"{self.case}mlps is given rows that are")
        if rows.dim() != 2 or rows.shape[0] != num_rows:
            raise Hint(
                f"{self.case}mlps gets rows of shape {list(rows.shape)}, and {len(self.x)} tokens "
                f"with k = {top_k} make {num_rows} rows, all in one call"
            )
        if rows.dtype != self.x.dtype:
            raise Hint(f"{self.case}mlps gets rows in {rows.dtype}, and x is {self.x.dtype}")
        if isinstance(counts, list | tuple):
            counts = torch.tensor(counts)
        tensor(counts, what=f"{self.case}mlps is given counts that are")
        wanted = torch.bincount(self.experts.flatten(), minlength=total)
        if counts.shape != wanted.shape:
            raise Hint(
                f"{self.case}mlps gets {counts.numel()} counts, and there are {total} experts: an "
                "expert without rows counts too, with 0"
            )
        if not torch.equal(counts.long(), wanted):
            raise Hint(
                f"{self.case}the counts are {counts.tolist()}, expected is {wanted.tolist()}: rows "
                "of expert 0, of expert 1, ..."
            )
        self._see_rows(rows.detach(), wanted)
        pieces = rows.split(wanted.tolist())
        return torch.cat([self.one(number)(piece) for number, piece in enumerate(pieces)])

    def _see_rows(self, rows: Tensor, counts: Tensor) -> None:
        """See that each expert gets its tokens, in whatever order."""
        top_k = self.experts.shape[1]
        for number, piece in enumerate(rows.split(counts.tolist())):
            tokens = (self.experts == number).any(1).nonzero()[:, 0]
            if torch.equal(_sorted_rows(piece), _sorted_rows(self.x[tokens])):
                continue
            order = self.experts.flatten().argsort(stable=True)
            mistakes = {
                "the rows are not sorted by expert: they are as the tokens stand": torch.equal(
                    rows, self.x.repeat_interleave(top_k, 0)
                ),
                "row r of the flat choices belongs to token r // k; yours is taken as r % T, as if "
                "all first choices came before all second ones": torch.equal(
                    rows, self.x.repeat(top_k, 1)[order]
                ),
            }
            own = self.x[tokens]
            same_way = piece @ own.T / (piece.norm(dim=1)[:, None] * own.norm(dim=1))
            mistakes["the rows are tokens times a number: the weights come after the experts"] = (
                len(piece) == len(own) and bool((same_way.max(1).values > 1 - ROUNDED).all())
            )
            refuse(mistakes, self.case)
            raise Hint(
                f"{self.case}the rows of expert {number} are not its tokens {tokens.tolist()}: by "
                "what are the rows sorted, and which token does each belong to?"
            )


def _sorted_rows(rows: Tensor) -> Tensor:
    """The rows in the order of their first number."""
    return rows[rows[:, 0].argsort()]


def through_experts(answer: Callable[..., Any]) -> None:
    """The learner's `through_experts(x, weights, experts, mlps, num_experts)`."""
    for name, (experts, total) in _to_send().items():
        case = f"{name}: "
        tokens, top_k = experts.shape
        x = _draw(tokens, 4, seed=51)
        weights = _draw(tokens, top_k, seed=52).abs() + 0.1
        given = [x.clone().requires_grad_(), weights.clone().requires_grad_(), experts.clone()]
        kept = [one.detach().clone() for one in given]
        mlps = _Experts(case, x, experts, total)
        with _float64(), without(lab.through_experts, lab.in_a_loop, moe.dispatch, moe.combine):
            found = due(answer(*given, mlps, total))
        is_changed = any(not torch.equal(one, two) for one, two in zip(given, kept))
        refuse({CHANGED: is_changed}, case)
        calls = mlps.num_calls
        refuse(
            {
                "mlps was never called": calls == 0,
                f"mlps was called {calls} times: once is enough for all experts": calls > 1,
            },
            case,
        )
        tensor(found, (tokens, 4), what=f"{case}it returned")
        _see_output(case, found, given, mlps)


def _see_output(case: str, found: Tensor, given: list[Tensor], mlps: _Experts) -> None:
    """See that the output and all gradients are those of the loop over all experts."""
    x, weights, experts = given
    top_k = experts.shape[1]
    own_x = x.detach().clone().requires_grad_()
    own_weights = weights.detach().clone().requires_grad_()
    truth = lab.in_a_loop(own_x, own_weights, experts, mlps.all())
    order = experts.flatten().argsort(stable=True)
    with torch.no_grad():
        pieces = x[order // top_k].split(
            torch.bincount(experts.flatten(), minlength=len(mlps.up)).tolist()
        )
        done = torch.cat([mlps.one(number)(piece) for number, piece in enumerate(pieces)])
        back = done[order.argsort()]  # [T k, H]
        weighted = back * weights.flatten()[:, None]
        unsorted_weights = torch.zeros_like(x)
        unsorted_weights.index_add_(0, order // top_k, done * weights.flatten()[:, None])
        last = torch.zeros_like(x)
        last[order // top_k] = done * weights.flatten()[order][:, None]
        mistakes = {
            "the weights are not used": _per_token(back, top_k).sum(1),
            "the mean of a token's rows is no weighted sum": _per_token(back, top_k).mean(1),
            "the mean of the weighted rows is no sum": _per_token(weighted, top_k).mean(1),
            "the rows are weighted as the tokens stand, and lie sorted by expert": (
                unsorted_weights
            ),
            "the rows have not come back: they are added as they lie, sorted by expert": (
                _per_token(done * weights.flatten()[:, None], top_k).sum(1)
            ),
            "the way back is the inverse of the order, and not the order once more": _per_token(
                done[order] * weights.flatten()[:, None], top_k
            ).sum(1),
            "only one row of each token is left: `out[token] += row` and `out[token] = row` keep "
            "one of those with the same token": top_k > 1 and distance(found, last) < ROUNDED,
            "the rows of all second choices are missing": top_k > 1
            and distance(found, _per_token(weighted, top_k)[:, 0]) < ROUNDED,
        }
    otherwise = (
        "it is {off:.0%} away from the loop over all experts: which row goes back to which token, "
        "and with which weight?"
    )
    diagnose(case, found, truth, mistakes, otherwise, tolerance=ROUNDED)
    if not found.requires_grad:
        raise Hint(f"{case}the output is right and has no gradient: was something detached?")
    toward = torch.linspace(1, 2, truth.numel(), dtype=torch.float64).view_as(truth)
    parameters = [mlps.up, mlps.down]
    has = torch.autograd.grad((found * toward).sum(), [x, weights, *parameters], allow_unused=True)
    needs = torch.autograd.grad((truth * toward).sum(), [own_x, own_weights, *parameters])
    for name, one, two in zip(("x", "weights", "experts", "experts"), has, needs):
        if one is None or distance(one, two) > ROUNDED:
            state = "is missing" if one is None else "is not that of the loop over all experts"
            raise Hint(
                f"{case}the output is right, and the gradient of {name} {state}: was something "
                "detached, or copied by value?"
            )


def _per_token(rows: Tensor, top_k: int) -> Tensor:
    """[T k, H] -> [T, k, H]."""
    return rows.view(-1, top_k, rows.shape[-1])


EXERCISES = {
    "23.1": Exercise(
        check=total_and_active,
        praise="the total is what has to be stored, and the active part is what computes",
        hints=(
            "Count the parameters of one expert first, then those of one expert in every layer.",
            "Both results begin with what every token uses: `others` and the shared experts.",
        ),
    ),
    "23.2": Exercise(
        check=route,
        praise="weights with a gradient, and a loss of 1 where all experts are used alike",
        hints=(
            "`scores.topk(top_k, -1)` gives the largest scores and their places.",
            "The rows of each expert: torch.bincount(experts.flatten(), minlength=...).",
            "f has no gradient, since it was counted; P has one, since it is a mean of scores.",
        ),
    ),
    "23.3": Exercise(
        check=choose_with_bias,
        praise="the bias decides who is chosen and has no part in the weights",
        hints=(
            "Choose by scores + bias, and read the weights from the scores: `gather`.",
            "An expert with more rows than the mean moves down by the rate, one with fewer up.",
            "torch.sign gives -1, 0 or 1.",
        ),
    ),
    "23.4": Exercise(
        check=through_experts,
        praise="the same as the loop over all experts, gradients included",
        hints=(
            "Number the T k rows as experts.flatten() does: row r is choice r % k of token r // k.",
            "order = experts.flatten().argsort(stable=True) lists the rows sorted by expert.",
            "The way back: order.argsort() is the inverse permutation; or add to the tokens.",
        ),
    ),
}
