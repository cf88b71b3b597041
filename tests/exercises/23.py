"""Answers to the exercises of lesson 23: a mixture of experts."""

import torch
import torch.nn.functional as F
from answers import Answers, changed

# ---- 23.1 total and active


def in_a_list(model):
    counts = []
    for used in (model.experts, model.top_k):
        matrices = 3 * (used + model.shared) * model.moe_layers
        counts.append(model.others + matrices * model.hidden_size * model.expert_ffn)
    return counts


def layer_by_layer(model):
    expert = sum(model.hidden_size * model.expert_ffn for _ in range(3))
    total = active = model.others
    for _ in range(model.moe_layers):
        total += (model.experts + model.shared) * expert
        active += (model.top_k + model.shared) * expert
    return total, active


def less_what_is_idle(model):
    one = 3 * model.hidden_size * model.expert_ffn * model.moe_layers
    total = model.others + one * (model.experts + model.shared)
    return total, total - (model.experts - model.top_k) * one


ONE = "one = model.moe_layers * 3 * model.hidden_size * model.expert_ffn"
ALWAYS = "always = model.others + model.shared * one"

COUNTS = Answers(
    solves="total_and_active",
    takes_ranks=False,
    right={
        "a list": in_a_list,
        "layer by layer": layer_by_layer,
        "less the idle": less_what_is_idle,
    },
    wrong={
        "exchanged": (
            changed(
                "model.experts * one => model.top_k * one + 0",
                "model.top_k * one => model.experts * one",
            ),
            "the other of the two",
        ),
        "no others": (changed(f"{ALWAYS} => always = model.shared * one"), "not in the experts"),
        "one matrix": (changed("moe_layers * 3 * => moe_layers *"), "three matrices"),
        "two matrices": (changed("moe_layers * 3 => moe_layers * 2"), "not two"),
        "one layer": (changed("model.moe_layers * 3 => 3"), "experts of its own"),
        "no shared": (
            changed(f"{ALWAYS} => always = model.others"),
            "of the shared experts count too",
        ),
        "the router too": (
            changed(
                f"{ALWAYS} => {ALWAYS}\n"
                "    always += model.moe_layers * model.hidden_size * model.experts"
            ),
            "router is counted too",
        ),
        "shared once": (
            changed("model.shared * one => model.shared * one // model.moe_layers"),
            "in each layer as well",
        ),
        "one number": (
            changed(
                "return always + model.experts * one, => return always + model.experts * one #"
            ),
            "return two numbers",
        ),
    },
)

# ---- 23.2 the router


def softmax_of_the_chosen(x, weight, top_k):
    """The largest logits, and the softmax of these."""
    logits = F.linear(x, weight)
    values, experts = torch.topk(logits, top_k)
    scores = logits.softmax(1)
    chosen = F.one_hot(experts, len(weight)).to(x.dtype)  # [T, k, E]
    f = chosen.mean((0, 1))
    return values.softmax(-1), experts, len(weight) * torch.dot(f, scores.mean(0))


def with_scatter(x, weight, top_k):
    scores = torch.softmax(torch.einsum("th,eh->te", x, weight), 1)
    experts = scores.argsort(dim=1, descending=True)[:, :top_k]
    picked = torch.gather(scores, 1, experts)
    weights = picked / picked.sum(1).unsqueeze(1)
    is_chosen = torch.zeros_like(scores, requires_grad=False).detach().scatter(1, experts, 1.0)
    f = is_chosen.sum(0) / is_chosen.sum()
    p = scores.sum(0) / len(x)
    return weights, experts, (f * p).sum() * weight.shape[0]


def in_loops(x, weight, top_k):
    weights, numbers, means = [], [], 0
    rows = [0] * len(weight)
    for token in x:
        scores = (weight @ token).softmax(0)
        means = means + scores / len(x)
        best, places = scores.topk(top_k)
        weights.append(best / best.sum())
        numbers.append(places)
        for place in places.tolist():
            rows[place] += 1
    loss = sum(count / (len(x) * top_k) * mean for count, mean in zip(rows, means))
    return torch.stack(weights), torch.stack(numbers), loss * len(weight)


SCORES = "scores = torch.softmax(x @ weight.T, dim=-1)"
WEIGHTS = "weights = largest / largest.sum(-1, keepdim=True)"
ROWS = "rows = torch.bincount(experts.flatten(), minlength=num_experts)"
LOSS = "loss = num_experts * (fraction * scores.mean(0)).sum()"

ROUTER = Answers(
    solves="route",
    takes_ranks=False,
    right={
        "a dot product": changed(
            "(fraction * scores.mean(0)).sum() => torch.dot(fraction, scores.mean(0))"
        ),
        "counted in a loop": changed(
            "rows = torch.bincount(experts.flatten(), minlength=num_experts) => "
            "rows = torch.zeros(num_experts)\n"
            "    for number in range(num_experts):\n"
            "        rows[number] = (experts == number).sum()",
            "(fraction * scores.mean(0)).sum() => fraction @ scores.mean(0)",
        ),
        "softmax of the chosen": softmax_of_the_chosen,
        "scatter": with_scatter,
        "loops": in_loops,
    },
    wrong={
        "not divided": (changed(f"{WEIGHTS} => weights = largest"), "do not add up to 1"),
        "sigmoids": (
            changed(f"{SCORES} => scores = torch.sigmoid(x @ weight.T)"),
            "sigmoids, each of one logit alone",
        ),
        "sigmoids that are not divided": (
            changed(
                f"{SCORES} => scores = torch.sigmoid(x @ weight.T)",
                f"{WEIGHTS} => weights = largest",
            ),
            "sigmoids, each of one logit alone",
        ),
        "softmax twice": (
            changed(f"{WEIGHTS} => weights = largest.softmax(-1)"),
            "softmax already",
        ),
        "over the tokens": (
            changed("largest.sum(-1, keepdim=True) => largest.sum(0, keepdim=True)"),
            "over the tokens",
        ),
        "over all": (changed("largest.sum(-1, keepdim=True) => largest.sum()"), "over all tokens"),
        "the smallest": (
            changed("scores.topk(top_k, dim=-1) => scores.topk(top_k, dim=-1, largest=False)"),
            "smallest scores",
        ),
        "no E": (changed("loss = num_experts * => loss ="), "factor E"),
        "by tokens": (
            changed("fraction = rows / rows.sum() => fraction = rows / len(x)"),
            "k times as large",
        ),
        "counts": (changed("fraction = rows / rows.sum() => fraction = rows"), "f counts choices"),
        "a mean over experts": (
            changed(
                "loss = num_experts * (fraction * scores.mean(0)).sum() "
                "=> loss = (fraction * scores.mean(0)).mean()"
            ),
            "mean over the experts",
        ),
        "first choices": (
            changed("experts.flatten(), min => experts[:, 0].contiguous(), min"),
            "only first choices",
        ),
        "P of the chosen": (
            changed(
                f"{LOSS} => own = torch.zeros_like(scores).scatter(-1, experts, largest)\n"
                "    loss = num_experts * (fraction * own.mean(0)).sum()"
            ),
            "not only where it was chosen",
        ),
        "f squared": (
            changed("fraction * scores.mean(0) => fraction * fraction"),
            "where is P",
        ),
        "P squared": (
            changed("fraction * scores.mean(0) => scores.mean(0) * scores.mean(0)"),
            "where is f",
        ),
        "detached P": (
            changed("fraction * scores.mean(0) => fraction * scores.detach().mean(0)"),
            "no gradient reaches the router from the loss",
        ),
        "detached weights": (
            changed(f"{WEIGHTS} => weights = (largest / largest.sum(-1, keepdim=True)).detach()"),
            "no gradient reaches the router from the weights",
        ),
        "half detached": (
            changed(
                "largest / largest.sum(-1, keepdim=True) => "
                "largest / largest.detach().sum(-1, keepdim=True)"
            ),
            "gradient that it gives",
        ),
        "softmax over tokens": (
            changed(f"{SCORES} => scores = torch.softmax(x @ weight.T, dim=0)"),
            "not the experts with the largest",
        ),
        "two things": (
            changed("return weights, experts, loss => return weights, experts"),
            "return three things",
        ),
    },
)

# ---- 23.3 the bias


def with_a_mask(scores, bias, top_k, rate):
    _, experts = torch.topk(scores + bias[None], top_k, dim=1)
    is_chosen = torch.zeros_like(scores).scatter(1, experts, 1.0)
    own = scores * is_chosen
    weights = (own / own.sum(1, keepdim=True)).gather(1, experts)
    load = is_chosen.detach().sum(0)
    return weights, experts, bias + rate * (load < load.mean()) - rate * (load > load.mean())


def by_comparison(scores, bias, top_k, rate):
    """Compares whole numbers: rows times experts with all rows."""
    order = (scores.detach() + bias).argsort(1, descending=True)
    experts = order[:, :top_k]
    chosen = torch.take_along_dim(scores, experts, 1)
    moved = bias.clone()
    for number in range(len(bias)):
        rows = int((experts == number).sum())
        if rows * len(bias) > experts.numel():
            moved[number] -= rate
        elif rows * len(bias) < experts.numel():
            moved[number] += rate
    return F.normalize(chosen, p=1, dim=1), experts, moved


def with_one_hot(scores, bias, top_k, rate):
    experts = torch.topk(scores + bias, top_k).indices
    chosen = scores[torch.arange(len(scores))[:, None], experts]
    load = F.one_hot(experts, scores.shape[1]).sum((0, 1)).float()
    even = experts.numel() / scores.shape[1]
    return chosen / chosen.sum(1)[:, None], experts, bias + rate * torch.sign(even - load)


EXPERTS = "experts = (scores + bias).topk(top_k, dim=-1).indices"
CHOSEN = "chosen = scores.gather(-1, experts)"
STEP = "step = rate * torch.sign(rows.mean() - rows)"

BIAS = Answers(
    solves="choose_with_bias",
    takes_ranks=False,
    right={"a mask": with_a_mask, "comparison": by_comparison, "one hot": with_one_hot},
    wrong={
        "by the next bias": (
            changed(
                "return weights, experts, bias + step => bias = bias + step\n"
                "    experts = (scores + bias).topk(top_k, dim=-1).indices\n"
                "    chosen = scores.gather(-1, experts)\n"
                "    return chosen / chosen.sum(-1, keepdim=True), experts, bias"
            ),
            "largest scores",
        ),
        "no bias": (changed("(scores + bias).topk => scores.topk"), "does not know the bias"),
        "minus": (changed("(scores + bias) => (scores - bias)"), "more likely"),
        "in the weights": (
            changed(f"{CHOSEN} => chosen = (scores + bias).gather(-1, experts)"),
            "for the choice alone",
        ),
        "not divided": (
            changed("weights = chosen / chosen.sum(-1, keepdim=True) => weights = chosen"),
            "add up to 1",
        ),
        "the wrong way": (changed("rows.mean() - rows => rows - rows.mean()"), "less likely"),
        "the gap": (
            changed("torch.sign(rows.mean() - rows) => (rows.mean() - rows)"),
            "by the rate",
        ),
        "no rate": (changed("rate * torch.sign => torch.sign"), "rate is not used"),
        "from zero": (changed("bias + step => step"), "goes on from 0"),
        "mean of tokens": (
            changed("rows.mean() - rows => len(scores) / len(bias) - rows"),
            "not of tokens",
        ),
        "first choices": (
            changed("experts.flatten(), min => experts[:, 0].contiguous(), min"),
            "only first choices",
        ),
        "scores for rows": (
            changed(
                "rows = torch.bincount(experts.flatten(), minlength=len(bias)).double() => "
                "rows = torch.zeros_like(scores).scatter(1, experts, chosen).sum(0).detach()"
            ),
            "not a sum of scores",
        ),
        "no third": (
            changed(f"{STEP} => step = rate * torch.where(rows > rows.mean(), -1.0, 1.0)"),
            "does not move",
        ),
        "in place": (changed("bias + step => bias.add_(step)"), "has changed"),
        "detached": (
            changed(f"{CHOSEN} => chosen = scores.detach().gather(-1, experts)"),
            "never learn",
        ),
    },
)

# ---- 23.4 to the experts and back


def with_index_add(x, weights, experts, mlps, num_experts):
    flat = experts.reshape(-1)
    _, order = torch.sort(flat, stable=True)
    tokens = torch.div(order, experts.shape[1], rounding_mode="floor")
    made = mlps(x.index_select(0, tokens), torch.bincount(flat, minlength=num_experts))
    made = made * weights.reshape(-1)[order].unsqueeze(1)
    return torch.zeros_like(x).index_add(0, tokens, made)


def with_nonzero(x, weights, experts, mlps, num_experts):
    """The rows of each expert are looked for."""
    places = [(experts == number).nonzero() for number in range(num_experts)]
    tokens, choices = torch.cat(places).unbind(1)
    counts = torch.tensor([len(one) for one in places])
    made = mlps(x[tokens], counts) * weights[tokens, choices, None]
    out = torch.zeros_like(x)
    return out.index_put((tokens,), made, accumulate=True)


def with_copies(x, weights, experts, mlps, num_experts):
    """Second choices after all first ones, and a scatter back."""
    tokens, top_k = experts.shape
    flat = experts.T.reshape(-1)
    order = flat.argsort()
    rows = x.repeat(top_k, 1)[order]
    counts = F.one_hot(flat, num_experts).sum(0)
    back = torch.empty_like(rows).index_copy(0, order, mlps(rows, counts))
    return (back.view(top_k, tokens, -1) * weights.T[..., None]).sum(0)


BACK = "back = done[order.argsort()]"
PARTS = "parts = back.view(len(x), top_k, -1) * weights[..., None]"

THERE_AND_BACK = Answers(
    solves="through_experts",
    takes_ranks=False,
    right={
        "added to new zeros": changed(
            "back = done[order.argsort()] => weighted = done * weights.flatten()[order, None]",
            "parts = back.view(len(x), top_k, -1) * weights[..., None] => y = torch.zeros(x.shape)",
            "return parts.sum(1) => return y.index_add(0, order // top_k, weighted)",
        ),
        "index_add": with_index_add,
        "nonzero": with_nonzero,
        "copies": with_copies,
    },
    wrong={
        "weighted before": (
            changed(
                "done = mlps(x[order // top_k], counts) => "
                "done = mlps(x[order // top_k] * weights.flatten()[order, None], counts)",
                "back.view(len(x), top_k, -1) * weights[..., None] => back.view(len(x), top_k, -1)",
            ),
            "weights come after the experts",
        ),
        "the mean": (changed("return parts.sum(1) => return parts.mean(1)"), "is no sum"),
        "not sorted": (
            changed("order = flat.argsort(stable=True) => order = torch.arange(len(flat))"),
            "not sorted by expert",
        ),
        "modulo": (changed("order // top_k => order % len(x)"), "belongs to token r // k"),
        "no minlength": (changed(", minlength=num_experts => "), "counts too, with 0"),
        "not back": (changed(f"{BACK} => back = done"), "have not come back"),
        "order again": (changed(f"{BACK} => back = done[order]"), "inverse of the order"),
        "no weights": (changed(" * weights[..., None] => "), "weights are not used"),
        "mean": (
            changed(
                f"{PARTS} => parts = back.view(len(x), top_k, -1)", "parts.sum(1) => parts.mean(1)"
            ),
            "no weighted sum",
        ),
        "weights not sorted": (
            changed(
                f"{BACK} => back = torch.zeros_like(x).index_add(0, order // top_k, "
                "done * weights.flatten()[:, None])",
                f"{PARTS} => parts = back[:, None]",
            ),
            "weighted as the tokens stand",
        ),
        "one row is left": (
            changed(
                f"{BACK} => back = torch.zeros_like(x)\n"
                "    back[order // top_k] += done * weights.flatten()[order, None]",
                f"{PARTS} => parts = back[:, None]",
            ),
            "only one row of each token",
        ),
        "first choices": (changed("parts.sum(1) => parts[:, 0]"), "second choices"),
        "experts of all": (
            changed("mlps(x[order // top_k], counts) => mlps(x, counts)"),
            "make",
        ),
        "detached": (
            changed("mlps(x[order // top_k] => mlps(x.detach()[order // top_k]"),
            "gradient of x",
        ),
        "values of the weights": (
            changed("weights[..., None] => weights.detach()[..., None]"),
            "gradient of weights",
        ),
        "twice": (
            changed(f"{BACK} => back = mlps(x[order // top_k], counts)[order.argsort()]"),
            "called 2 times",
        ),
        "three dims": (changed("return parts.sum(1) => return parts"), "shape"),
    },
)

ANSWERS = {
    "23.1": COUNTS,
    "23.2": ROUTER,
    "23.3": BIAS,
    "23.4": THERE_AND_BACK,
}
