"""Answers to the exercises of lesson 03, one device, fast."""

import math

import torch
from answers import Answers, changed
from torch.optim.adamw import adamw as adamw_of_torch

from course.labs import l03_race
from course.labs.l03_race import Settings

# ---- 3.1 the roofline


def layer(tokens, inputs, outputs, number_bytes):
    numbers = inputs * outputs + tokens * (inputs + outputs)
    return tokens * outputs * inputs * 2, number_bytes * numbers


def shortest(flops, num_bytes, flops_per_s, bytes_per_s):
    compute_s = flops / flops_per_s
    memory_s = num_bytes / bytes_per_s
    return compute_s if compute_s > memory_s else memory_s


def by_searching(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    for tokens in range(1, 10_000):
        compute_s = 2 * tokens * inputs * outputs / flops_per_s
        numbers = tokens * (inputs + outputs) + inputs * outputs
        if compute_s >= numbers * number_bytes / bytes_per_s:
            return tokens
    return None


def by_intensity(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    ridge = flops_per_s / bytes_per_s
    most = 2 * inputs * outputs / ((inputs + outputs) * number_bytes)
    if most <= ridge:
        return None
    low, high = 0, 1
    while 2 * high * inputs * outputs < ridge * number_bytes * (
        high * (inputs + outputs) + inputs * outputs
    ):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        numbers = middle * (inputs + outputs) + inputs * outputs
        if 2 * middle * inputs * outputs >= ridge * number_bytes * numbers:
            high = middle
        else:
            low = middle
    return high


def searches_for_ever(inputs, outputs, number_bytes, flops_per_s, bytes_per_s):
    tokens = 1
    while (
        2 * tokens * inputs * outputs / flops_per_s
        < number_bytes * (tokens * (inputs + outputs) + inputs * outputs) / bytes_per_s
    ):
        tokens += 1
    return tokens


NUMBERS = "numbers = tokens * inputs + inputs * outputs + tokens * outputs"
LONGER = "max(flops / flops_per_s, num_bytes / bytes_per_s)"
LESS = "per_token_s -= (inputs + outputs) * number_bytes / bytes_per_s"
NONE = "if per_token_s <= 0:\n        return None"

ROOFLINE = Answers(
    solves=("linear_layer", "shortest_s", "tokens_at_the_ridge"),
    takes_ranks=False,
    right={
        "by searching": (layer, shortest, by_searching),
        "by intensity": (layer, shortest, by_intensity),
        "a list": (lambda *shape: list(layer(*shape)), shortest, by_searching),
    },
    wrong={
        "no additions": (changed("2 * tokens * inputs => tokens * inputs"), "the additions?"),
        "a whole step": (changed("2 * tokens * inputs => 6 * tokens * inputs"), "forward alone"),
        "no result": (changed(" + tokens * outputs => "), "has to be written as well"),
        "no x": (changed("tokens * inputs + inputs => inputs"), "x has to be read as well"),
        "W for each token": (
            changed("inputs * outputs + tokens => tokens * inputs * outputs + tokens"),
            "once, for all tokens together",
        ),
        "W alone": (changed(f"{NUMBERS} => numbers = inputs * outputs"), "the bytes of W alone"),
        "numbers": (changed("numbers * number_bytes\n => numbers\n"), "are numbers, not bytes"),
        "one number": (changed("return flops, numbers => return numbers"), "give two numbers"),
        "the sum": (
            changed(f"{LONGER} => flops / flops_per_s + num_bytes / bytes_per_s"),
            "do not add up",
        ),
        "the shorter": (changed("return max( => return min("), "when the slower of the two is"),
        "without x": (changed(f"{LESS} => pass"), "leaves out the bytes of x"),
        "rounded down": (changed("math.ceil => math.floor"), "is it rounded down?"),
        "without None": (changed(f"{NONE} => pass"), "no number of tokens is enough"),
        "always None": (changed("per_token_s <= 0 => True"), "it is None, and with enough tokens"),
        "not whole": (
            changed("math.ceil(weight_s / per_token_s) => weight_s / per_token_s"),
            "give a whole number",
        ),
        "without x, rounded": (
            changed(
                "math.ceil(weight_s / per_token_s) => "
                "1 + int(number_bytes * flops_per_s / bytes_per_s / 2)"
            ),
            "leaves out the bytes of x and of the result",
        ),
        "too short a search": (
            changed(
                "return math.ceil(weight_s / per_token_s) => "
                "found = math.ceil(weight_s / per_token_s)\n"
                "    return found if found < 1000 else None"
            ),
            "it is None, and with enough tokens",
        ),
        "for ever": ((layer, shortest, searches_for_ever), "10,000 tokens are far enough"),
        "without return": (changed(f"return {LONGER} => {LONGER}"), "is there a `return`?"),
    },
)

# ---- 3.2 FLOPs of a transformer


def flops_by_product(num_layers, width, tokens):
    of_layer = 0
    for inputs, outputs in [(width, 3 * width), (width, width), (width, 4 * width)]:
        of_layer += 2 * tokens * inputs * outputs
    of_layer += 2 * tokens * 4 * width * width
    core = 2 * tokens * width * tokens + 2 * tokens * tokens * width
    return num_layers * of_layer, num_layers * core


def mfu_by_seconds(with_weights, in_attention, samples_per_s, peak_flops_per_s):
    step_s = 1 / samples_per_s
    return (with_weights + in_attention + 2 * (with_weights + in_attention)) / (
        step_s * peak_flops_per_s
    )


def flops_by_token(num_layers, width, tokens):
    return [24 * width**2 * tokens * num_layers, 4 * tokens * width * tokens * num_layers]


def mfu_plainly(with_weights, in_attention, samples_per_s, peak_flops_per_s):
    flops_per_s = 3 * (with_weights + in_attention) * samples_per_s
    return flops_per_s / peak_flops_per_s


FLOPS = Answers(
    solves=("flops_of_forward", "mfu_of_run"),
    takes_ranks=False,
    right={
        "product by product": (flops_by_product, mfu_by_seconds),
        "token by token": (flops_by_token, mfu_plainly),
        "mixed": (flops_by_product, mfu_plainly),
    },
    wrong={
        "one product in attention": (
            changed("num_layers * 2 * scores => num_layers * scores"),
            "and this is one of them",
        ),
        "s, not its square": (changed("2 * tokens**2 * width => 2 * tokens * width"), "s tokens"),
        "no MLP": (changed("12 * width**2 => 4 * width**2"), "where is the MLP"),
        "an MLP of one weight": (changed("12 * width**2 => 8 * width**2"), "where is the"),
        "no additions": (changed("tokens * 2 * weights => tokens * weights"), "the additions?"),
        "one layer": (changed("num_layers * tokens * 2 => tokens * 2"), "that is one layer"),
        "one layer of attention": (
            changed("num_layers * 2 * scores => 2 * scores"),
            "the attention of one layer",
        ),
        "one token": (changed("num_layers * tokens * 2 => num_layers * 2"), "those of one token"),
        "a step": (
            changed("num_layers * tokens * 2 => 3 * num_layers * tokens * 2"),
            "here is forward alone",
        ),
        "forward alone": (changed("return 3 * (with => return (with"), "that is forward alone"),
        "6 N T": (
            changed("3 * (with_weights + in_attention) => 3 * with_weights"),
            "arithmetic that the model needs, too",
        ),
        "percent": (changed("return 3 * (with => return 300 * (with"), "give a fraction of 1"),
        "one number": (
            changed("return with_weights, in_attention => return with_weights + in_attention"),
            "give two numbers",
        ),
        "without return": (
            changed("return with_weights, in_attention => pass"),
            "is there a `return`?",
        ),
    },
)


# ---- 3.3 attention without the table


def in_two_passes(q, k, v, block):
    root = q.shape[1] ** 0.5
    parts = [(k[i : i + block], v[i : i + block]) for i in range(0, k.shape[0], block)]
    largest = torch.stack([(q @ keys.T / root).max(dim=1).values for keys, _ in parts]).amax(0)
    above = 0
    below = 0
    for keys, values in parts:
        weights = (q @ keys.T / root - largest[:, None]).exp()
        above = above + weights @ values
        below = below + weights.sum(1)
    return above / below[:, None]


def by_logsumexp(q, k, v, block):
    y = torch.zeros(len(q), v.shape[1], dtype=q.dtype)
    lse = torch.full((len(q),), -math.inf, dtype=q.dtype)
    for keys, values in zip(k.split(block), v.split(block)):
        scores = q @ keys.mT * q.shape[1] ** -0.5
        new = torch.logaddexp(lse, scores.logsumexp(1))
        y = y * (lse - new).exp()[:, None] + (scores - new[:, None]).exp() @ values
        lse = new
    return y


def query_by_query(q, k, v, block):
    rows = []
    for query in q:
        m, bottom, top = -math.inf, 0.0, torch.zeros(v.shape[1], dtype=v.dtype)
        for i in range(0, len(k), block):
            scores = k[i : i + block] @ query / math.sqrt(len(query))
            new = max(m, scores.max().item())
            w = torch.exp(scores - new)
            bottom = bottom * math.exp(m - new) + w.sum()
            top = top * math.exp(m - new) + w @ v[i : i + block]
            m = new
        rows.append(top / bottom)
    return torch.stack(rows)


def a_name_for_each(q, k, v, block):
    keys_first = k.T.contiguous()
    largest = torch.full((q.shape[0],), float("-inf"), dtype=q.dtype)
    bottom = torch.zeros_like(largest)
    top = torch.zeros(q.shape[0], v.shape[1], dtype=q.dtype)
    for i in range(0, k.shape[0], block):
        raw = q @ keys_first[:, i : i + block]
        scores = raw / q.shape[1] ** 0.5
        best = scores.max(dim=1).values
        new = torch.maximum(largest, best)
        shifted = scores - new[:, None]
        weights = shifted.exp()
        correction = (largest - new).exp()
        part = weights @ v[i : i + block]
        top = correction[:, None] * top + part
        bottom = correction * bottom + weights.sum(dim=1)
        largest = new
    return top / bottom[:, None]


def keeps_all_blocks(q, k, v, block):
    scores = [q @ part.T / math.sqrt(q.shape[1]) for part in k.split(block)]
    largest = torch.stack([part.amax(1) for part in scores]).amax(0)[:, None]
    weights = [torch.exp(part - largest) for part in scores]
    below = sum(part.sum(1, keepdim=True) for part in weights)
    return sum(part @ values for part, values in zip(weights, v.split(block))) / below


def the_table(q, k, v, block):
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), dim=1) @ v


def a_row_at_a_time(q, k, v, block):
    return torch.stack([torch.softmax(k @ x / math.sqrt(len(x)), 0) @ v for x in q])


def by_sdpa(q, k, v, block):
    return torch.nn.functional.scaled_dot_product_attention(
        q[None, None], k[None, None], v[None, None]
    )[0, 0]


def mean_of_blocks(q, k, v, block):
    parts = [the_table(q, a, b, block) for a, b in zip(k.split(block), v.split(block))]
    return sum(parts) / len(parts)


FACTOR = "factor = torch.exp(largest - now)"

ATTENTION = Answers(
    solves="attention_in_blocks",
    takes_ranks=False,
    right={
        "in two passes": in_two_passes,
        "by logsumexp": by_logsumexp,
        "query by query": query_by_query,
        "a name for each": a_name_for_each,
    },
    wrong={
        "no root": (changed(" / math.sqrt(q.shape[1]) => "), "are not divided by the root"),
        "no root, only d": (changed("math.sqrt(q.shape[1]) => q.shape[1]"), "not by their root"),
        "no factor": (changed(f"{FACTOR} => factor = 1"), "which factor sets them right?"),
        "no factor above": (changed("numerator * factor => numerator"), "only the denominator is"),
        "no factor below": (
            changed("denominator * factor => denominator"),
            "only the numerator is",
        ),
        "the factor upside down": (
            changed(f"{FACTOR} => factor = torch.exp(now - largest)"),
            "Is the factor 0 then, or infinite?",
        ),
        "without the sum": (
            changed("numerator / denominator => numerator"),
            "what is it divided by?",
        ),
        "whole blocks": (
            changed("range(0, len(k), block) => range(0, len(k) // block * block, block)"),
            "the last block may be shorter",
        ),
        "nothing subtracted": (
            changed("scores - now => scores", f"{FACTOR} => factor = 1"),
            "What is subtracted from the scores first?",
        ),
        "begins at 0": (
            changed("q.new_full((len(q), 1), -math.inf) => q.new_zeros(len(q), 1)"),
            "With which number does the largest score begin?",
        ),
        "the first largest for ever": (
            changed(
                "now = torch.maximum(largest, scores.amax(dim=1, keepdim=True)) => "
                "now = scores.amax(dim=1, keepdim=True) if start == 0 else largest"
            ),
            "Is what you subtract still the largest so far?",
        ),
        "the largest of the block": (
            changed(
                "torch.maximum(largest, scores.amax(dim=1, keepdim=True)) => "
                "scores.amax(dim=1, keepdim=True)"
            ),
            "the largest so far, or that of the block?",
        ),
        "one largest for all queries": (
            changed("scores.amax(dim=1, keepdim=True) => scores.max()"),
            "Does each have a largest score of its own?",
        ),
        "the factor after adding": (
            changed(
                "denominator * factor + weights.sum(dim=1, keepdim=True) => "
                "(denominator + weights.sum(dim=1, keepdim=True)) * factor",
                "numerator * factor + weights @ v[start:stop] => "
                "(numerator + weights @ v[start:stop]) * factor",
            ),
            "what comes first?",
        ),
        "divides in each block": (
            changed(
                "largest = now\n => numerator = numerator / denominator\n        largest = now\n",
                "return numerator / denominator => return numerator",
            ),
            "the numerator is divided once",
        ),
        "a row at a time": (a_row_at_a_time, "that is a whole row of the table"),
        "mean of blocks": (mean_of_blocks, "must weigh more"),
        "sums begin anew": (
            changed("denominator * factor + => ", "numerator * factor + => "),
            "are the sums carried on?",
        ),
        "the table": (the_table, "does the next block of keys still need?"),
        "all blocks kept": (keeps_all_blocks, "does the next block of keys still need?"),
        "PyTorch's": (by_sdpa, "is PyTorch's own"),
        "without return": (
            changed("return numerator / denominator => numerator / denominator"),
            "is there a `return`?",
        ),
    },
)

# ---- 3.4 AdamW


@torch.no_grad()
def without_in_place(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    new = torch._foreach_add(torch._foreach_mul(means, beta1), torch._foreach_mul(grads, 1 - beta1))
    torch._foreach_copy_(means, new)
    grad_squares = torch._foreach_mul(grads, grads)
    torch._foreach_copy_(
        squares,
        torch._foreach_add(
            torch._foreach_mul(squares, beta2), torch._foreach_mul(grad_squares, 1 - beta2)
        ),
    )
    roots = torch._foreach_sqrt(torch._foreach_div(squares, 1 - beta2**step))
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(weights, 1 - lr * decay)
    update = torch._foreach_div(torch._foreach_div(means, 1 - beta1**step), roots)
    torch._foreach_add_(weights, update, alpha=-lr)


@torch.no_grad()
def by_the_step_size(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    torch._foreach_mul_(means, beta1)
    torch._foreach_add_(means, grads, alpha=1 - beta1)
    torch._foreach_lerp_(squares, torch._foreach_pow(grads, 2), 1 - beta2)
    root = math.sqrt(1 - beta2**step)
    # eps is scaled with the rest
    denominators = torch._foreach_add(torch._foreach_sqrt(squares), eps * root)
    torch._foreach_mul_(weights, 1 - lr * decay)
    torch._foreach_addcdiv_(weights, means, denominators, value=-lr * root / (1 - beta1**step))


@torch.no_grad()
def a_loop(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    for weight, grad, mean, square in zip(weights, grads, means, squares):
        weight.mul_(1 - lr * decay)
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt() + eps
        weight.addcdiv_(mean, root, value=-lr / (1 - beta1**step))


@torch.no_grad()
def by_torch(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    steps = [torch.tensor(float(step - 1)) for _ in weights]
    adamw_of_torch(
        weights, grads, means, squares, [], steps, foreach=True, amsgrad=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
    )  # fmt: skip


@torch.no_grad()
def by_one_fused(
    weights, grads, means, squares, step, lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, decay=0.1
):
    steps = [torch.tensor(float(step)) for _ in weights]
    torch._fused_adamw_(
        weights, grads, means, squares, [], steps, amsgrad=False,
        beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=eps, maximize=False,
    )  # fmt: skip


SHRINK = "torch._foreach_mul_(weights, 1 - lr * decay)"
ROOTS = "roots = torch._foreach_sqrt(squares)"
CORRECT = "torch._foreach_div_(roots, math.sqrt(1 - beta2**step))"
ADD_EPS = "torch._foreach_add_(roots, eps)"
MOVE = "torch._foreach_addcdiv_(weights, means, roots, -lr / (1 - beta1**step))"
CORRECTED = "torch._foreach_div(squares, 1 - beta2**step)"

ADAMW = Answers(
    solves="adamw",
    takes_ranks=False,
    right={"copies": without_in_place, "by the step size": by_the_step_size},
    wrong={
        "a loop": (a_loop, "without a loop"),
        "decay in the gradient": (
            changed(f"{SHRINK} => grads = torch._foreach_add(grads, weights, alpha=decay)"),
            "AdamW shrinks the weight itself",
        ),
        "no decay": (changed(f"{SHRINK} => pass"), "where is the decay?"),
        "decay last": (
            changed(f"{SHRINK} => pass", f"{MOVE} => {MOVE}\n    {SHRINK}"),
            "comes before the update",
        ),
        "decay without lr": (changed("lr * decay => decay"), "multiplied by the learning rate"),
        "no correction": (
            changed(f"{CORRECT} => pass", "-lr / (1 - beta1**step) => -lr"),
            "divided by 1 - beta**step",
        ),
        "means not corrected": (
            changed("-lr / (1 - beta1**step) => -lr"),
            "divided by 1 - beta1**step",
        ),
        "squares not corrected": (changed(f"{CORRECT} => pass"), "divided by 1 - beta2**step"),
        "eps under the root": (
            changed(
                f"{ROOTS} => roots = {CORRECTED}",
                f"{CORRECT}\n    {ADD_EPS} => {ADD_EPS}\n    torch._foreach_sqrt_(roots)",
            ),
            "eps is added to the root, not under it",
        ),
        "eps uncorrected": (
            changed(f"{CORRECT}\n    {ADD_EPS} => {ADD_EPS}\n    {CORRECT}"),
            "after that was corrected",
        ),
        "no root of the correction": (
            changed("math.sqrt(1 - beta2**step) => 1 - beta2**step"),
            "sqrt(1 - beta2**step)",
        ),
        "no eps": (
            changed(f"{ADD_EPS} => pass"),
            "all is right but eps: it was called with eps=0.001",
        ),
        "eps of its own": (
            changed("roots, eps => roots, 1e-8"),
            "the weights are those of eps=1e-08",
        ),
        "uphill": (changed("-lr / => lr /"), "uphill"),
        "beta for 1 - beta": (
            changed("grads, 1 - beta1 => grads, beta1"),
            "which weight keeps beta1 of a?",
        ),
        "squares the gradients": (
            changed(
                "torch._foreach_addcmul_(squares, grads, grads, 1 - beta2) => "
                "torch._foreach_mul_(grads, grads)\n"
                "    torch._foreach_add_(squares, grads, alpha=1 - beta2)"
            ),
            "the gradients have changed",
        ),
        "root in place": (
            changed(f"{ROOTS} => torch._foreach_sqrt_(squares)\n    roots = squares"),
            "the next step needs the squares",
        ),
        "means not in place": (
            changed("torch._foreach_lerp_( => means = torch._foreach_lerp("),
            "`means` are as before",
        ),
        "weights not in place": (
            changed("torch._foreach_addcdiv_( => weights = torch._foreach_addcdiv("),
            "the first weight is",
        ),
        "PyTorch's own": (by_torch, "PyTorch's answer"),
        "PyTorch's fused": (by_one_fused, "PyTorch's whole step"),
    },
)

# ---- 3.5 the race, with a clock that always says the same

STEPS = {4: None, 8: 22, 16: 20, 32: 28}
FACTORS = {"bfloat16": 0.66, "float16": 1.17, "fused": 0.89, "foreach": 0.98, "math": 1.0}


def seconds_of_a_step(settings):
    """As a processor with a unit for bfloat16 takes them, in parts of the baseline's."""
    factors = [FACTORS.get(settings.dtype, 1.0), FACTORS.get(settings.optimizer, 1.0)]
    return settings.batch / 32 * math.prod(factors)


def seconds_without_a_unit(settings):
    """Where the optimizer alone can gain."""
    return seconds_of_a_step(settings) * (1.8 if settings.dtype == "bfloat16" else 1.0)


def raced(answer, ranks):
    """The check cell, with another clock if the answer names one."""
    settings, predicted, *clock = answer
    seconds = clock[0] if clock else seconds_of_a_step

    def pretended(settings):
        return l03_race.race(
            settings,
            lambda one: STEPS[one.batch],
            lambda *several: tuple(map(seconds, several)),
        )

    return settings, predicted, pretended


RACE = Answers(
    solves=("settings", "predicted_speedup"),
    cell=raced,
    takes_ranks=False,
    solution=False,  # it asks the processor, and not the clock of these tests
    right={
        "the solution where there is a unit": (Settings(8, "bfloat16", "fused"), 6.0),
        "with math attention": (
            Settings(batch=16, dtype="bfloat16", optimizer="fused", attention="math"),
            3.0,
        ),
        "bfloat16 alone": (Settings(batch=8, dtype="bfloat16"), 7),
        "a tensor": (Settings(batch=8, dtype="bfloat16"), torch.tensor(6.0)),
        "float32 where there is no unit": (
            Settings(batch=8, optimizer="fused"),
            5,
            seconds_without_a_unit,
        ),
    },
    wrong={
        "the baseline": ((Settings(), 2.0), "the settings of the baseline: change"),
        "the batch alone": ((Settings(batch=8), 4), "beside the batch of 8"),
        "the batch and slow rungs": (
            (Settings(8, "float16", "for_loop", "math"), 3.5),
            "your step takes 17% longer",
        ),
        "without bfloat16": (
            (Settings(batch=8, optimizer="fused"), 5),
            "saves 11% of the baseline's time by the other three fields, and 41% can be saved",
        ),
        "too small a batch": ((Settings(batch=4, dtype="bfloat16"), 4.0), "too many of them"),
        "too large a batch": (
            (Settings(dtype="bfloat16", optimizer="fused"), 2.0),
            "28 steps where the baseline takes 28, each 0.59 times as long",
        ),
        "bfloat16 without a unit": (
            (Settings(8, "bfloat16", "fused"), 4.0, seconds_without_a_unit),
            "which of the three have you measured",
        ),
        "a guess far off": ((Settings(batch=8, dtype="bfloat16"), 20.0), "more than a factor of 2"),
        "no guess": ((Settings(batch=8, dtype="bfloat16"), None), "predicted_speedup is None"),
        "no settings": ((None, 4.0), "settings is None: give l03_race.Settings"),
        "a dictionary": (({"batch": 8}, 2.0), "give l03_race.Settings"),
        "a wrong field": ((Settings(8, "bf16"), 4), "dtype='bf16' is not known: choose one of"),
    },
)

ANSWERS = {"3.1": ROOFLINE, "3.2": FLOPS, "3.3": ATTENTION, "3.4": ADAMW, "3.5": RACE}
