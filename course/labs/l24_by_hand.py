"""Solutions that cells of lesson 24 show and use; `make notebooks` writes this."""

from labcode.parallel.experts import exchange_rows
import torch
import torch.distributed as dist
import torch.nn.functional as F


def route(x, router, k):
    """Weights and numbers of the k experts of each token: [T, k] both."""
    return torch.softmax(x @ router, -1).topk(k, -1)

def apply_experts(rows, counts, up, down):
    """Each expert on its rows, which lie one after the other."""
    done = []
    for number, own in enumerate(rows.split(counts.tolist())):
        done.append(F.gelu(own @ up[number]) @ down[number])
    return torch.cat(done)

def sum_of_all(x, weights, chosen, up, down):
    """Every expert on all tokens, most of them with the weight zero."""
    y = torch.zeros_like(x)
    for number in range(len(up)):
        weight = (weights * (chosen == number)).sum(-1, keepdim=True)
        y = y + weight * (F.gelu(x @ up[number]) @ down[number])
    return y

def layer_alone(x, router, up, down, k):
    """[T, H] -> [T, H], with all experts on this rank."""
    weights, chosen = route(x, router, k)
    return sum_of_all(x, weights, chosen, up, down)


def expert_layer(x, router, up, down, k, group, exchange=exchange_rows):
    """[T, H] -> [T, H]: this rank's tokens, the experts of all ranks of the group."""
    num_experts = router.shape[1]
    p = group.size()
    weights, chosen = route(x, router, k)
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=num_experts).view(p, -1)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.sum(1).tolist()
    received = theirs.sum(1).tolist()
    arrived = exchange(x[order // k], sent, received, group)
    number = torch.arange(theirs.shape[1]).repeat(p)
    by_expert = number.repeat_interleave(theirs.flatten()).argsort(stable=True)
    done = apply_experts(arrived[by_expert], theirs.sum(0), up, down)
    done = done[by_expert.argsort()]
    back = exchange(done, received, sent, group)
    weighted = weights.flatten()[order, None] * back
    return torch.zeros_like(x).index_add(0, order // k, weighted)


def finish_gradients(dense, experts, dp, ep, edp):
    """Gradients of the mean loss in place; returns the norm of all of them."""
    for param in dense:
        dist.all_reduce(param.grad, group=dp)
        param.grad /= dp.size()
    for param in experts:
        dist.all_reduce(param.grad, group=edp)
        param.grad /= dp.size()
    squares = torch.zeros((), dtype=torch.float64)
    for param in experts:
        squares += param.grad.square().sum()
    dist.all_reduce(squares, group=ep)
    for param in dense:
        squares += param.grad.square().sum()
    return squares.sqrt()
