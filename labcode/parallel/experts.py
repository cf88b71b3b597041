"""Expert parallelism: each rank keeps some of the experts, and rows travel to them and back.

The ranks of ep are neighbours of dp: each has tokens of its own, and all of them need all experts.
Rank r keeps the experts `r E/ep .. (r+1) E/ep - 1`. A layer sends each row to the rank that keeps
its expert, and what the expert makes of it back:

    sort by expert -> all-to-all -> sort by expert again -> MLPs -> the way back -> weighted sum

Both all-to-alls are uneven: how many rows go where is known only when the router has chosen, so a
first one of E numbers tells each rank how many to expect for each of its experts. An expert's
gradient is complete where the expert is kept, over the tokens of all ranks of ep; it is averaged
over the replicas of the expert, dp/ep ranks of dp, while all other weights are averaged over all of
dp.

tp cuts the features inside each expert, as in an MLP. The weights of the rows meet a partial sum
there, so that their gradient is a partial sum too: they enter by the same gate as the tokens,
`copy_to`, or under sequence parallelism `all_gather`. The router itself looks at a rank's own
tokens, before the gate: behind an all-gather each rank of tp would hold the whole gradient of all
tokens, and the sum over tp would be tp times too large.

Shapes: B samples, S tokens, H hidden features, E experts, k experts of a token, F features inside
one expert, R rows of this rank, R' rows that its experts get.

Source: Lepikhin et al. 2020 (arXiv:2006.16668), section 3.2; Rajbhandari et al. 2022
    (arXiv:2201.05596), section 5, for experts with tp.
Held by: tests/ranks/test_experts.py
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from labcode.comm.collectives import all_gather, copy_to, reduce_from, reduce_scatter
from labcode.parallel.sequence import SEQUENCE_DIM
from labcode.parallel.sharding import Shard

MLPs = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def exchange_rows(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    """Send `sent[i]` rows to rank i of the group, and get `received[i]` rows from it.

    Communicates: an uneven all-to-all each way; backward the gradients take the way back.

    Args:
        rows: [R, H], the rows for rank 0 first.
        sent: Number of rows for each rank; the sum is R.
        received: Number of rows from each rank; the sum is R'.
        group: The ranks of ep.

    Returns:
        [R', H], the rows from rank 0 first.
    """
    return _Exchange.apply(rows, sent, received, group)


class _Exchange(torch.autograd.Function):
    """An uneven all-to-all; backward the one with sent and received exchanged."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        ctx.sent = sent
        ctx.received = received
        ctx.group = group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grad, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(
    rows: torch.Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> torch.Tensor:
    if group.size() == 1:
        return rows.view_as(rows)
    out = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
    return out


def summed(counts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum of counts over the ranks that hold other tokens of the same sequences.

    Communicates: an all-reduce of `B E` numbers; nothing if this rank holds whole sequences.
    """
    if group.size() == 1:
        return counts
    total = counts.clone()
    dist.all_reduce(total, group=group)
    return total


class Travel:
    """Brings rows to the ranks that keep their experts, and back.

    Communicates: forward over ep the counts and then two all-to-alls of rows, backward two more:
        each of `R H` numbers, of which those for experts of this rank stay.

    Args:
        ep: The ranks over which the experts are divided.
    """

    def __init__(self, ep: dist.ProcessGroup) -> None:
        self.ep = ep

    def __call__(self, rows: torch.Tensor, counts: torch.Tensor, mlps: MLPs) -> torch.Tensor:
        """What each row's expert makes of it, wherever it is kept.

        Args:
            rows: [R, H], sorted by expert.
            counts: [E], rows of each expert.
            mlps: This rank's experts, `mlps(rows, counts)`.

        Returns:
            [R, H]
        """
        by_rank = counts.view(self.ep.size(), -1)  # [E] -> [ep, E/ep], by the rank that keeps them
        theirs = torch.empty_like(by_rank)  # [ep, E/ep], rows that arrive, by sender and expert
        dist.all_to_all_single(theirs, by_rank.contiguous(), group=self.ep)
        # Two lists of Python numbers, for which a GPU has to be waited for: the sizes of messages
        # are arguments of the call, and no tensor can be allocated before they are known. Filling
        # all experts up to one capacity avoids the wait, and computes rows of zeros instead.
        sent = by_rank.sum(1).tolist()
        received = theirs.sum(1).tolist()
        arrived = exchange_rows(rows, sent, received, self.ep)  # [R', H]
        # Rows arrive sender by sender, and within a sender by expert. The MLPs want all rows of an
        # expert together: with ep = 2 and experts a, b of this rank, a0 b0 a1 b1 -> a0 a1 b0 b1.
        order = _by_expert(theirs)
        done = mlps(arrived[order], theirs.sum(0))
        return exchange_rows(done[_inverse(order)], received, sent, self.ep)


def _by_expert(theirs: torch.Tensor) -> torch.Tensor:
    """[R']: the rows that lie by sender and expert, in the order of experts alone."""
    # [ep, E/ep] -> [ep * E/ep], the expert of each count; then of each row. A stable sort keeps the
    # senders of an expert in order, so that sums come out the same at every step.
    number = torch.arange(theirs.shape[1], device=theirs.device).repeat(theirs.shape[0])
    return number.repeat_interleave(theirs.flatten()).argsort(stable=True)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def divide_experts(
    experts: Any, ep: dist.ProcessGroup, tp: dist.ProcessGroup, sequence: bool = False
) -> nn.Module:
    """Leave this rank its part of the experts, and let rows travel to them and back.

    Communicates: what `Travel` does over ep; over tp what an MLP sends, and the weights of the
        rows.

    Args:
        experts: A `models.moe.Experts`; it is changed in place, and keeps the names of its weights.
        ep: The ranks over which the experts are divided.
        tp: The ranks that share each expert.
        sequence: Whether a rank of tp holds `[B, S/tp, H]` between the layers.

    Raises:
        ValueError: ep does not divide the experts, or tp their features.
    """
    num_experts, _, ffn_size = experts.down.shape
    if num_experts % ep.size():
        raise ValueError(
            f"{num_experts} experts cannot be divided over ep = {ep.size()}: choose a divisor of "
            "their number"
        )
    if ffn_size % tp.size():
        raise ValueError(
            f"an expert's {ffn_size} features cannot be cut over tp = {tp.size()}: choose a "
            "divisor of them"
        )
    gated = experts.up.shape[1] == 2 * ffn_size
    features = {
        "up": Shard(1, sections=(ffn_size, ffn_size) if gated else None),
        "down": Shard(2),
    }
    experts.shards = {}
    for name, shard in features.items():
        whole = getattr(experts, name)
        here = Shard(0).take(whole.detach(), ep.rank(), ep.size())  # [E, ..] -> [E/ep, ..]
        part = shard.take(here, tp.rank(), tp.size())
        setattr(experts, name, nn.Parameter(part, requires_grad=whole.requires_grad))
        experts.shards[name] = {"ep": Shard(0), "tp": shard}
    experts.travel = Travel(ep)
    experts.enter = _Enter(tp, sequence)
    experts.leave = _Leave(tp, sequence)
    return experts


class _Enter:
    """Tokens, weights and numbers of their experts, before computations that differ by rank of tp.

    The weights are multiplied with partial sums, so they pass the same gate as the tokens.
    """

    def __init__(self, tp: dist.ProcessGroup, sequence: bool) -> None:
        self.tp = tp
        self.sequence = sequence

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if not self.sequence:
            return copy_to(x, self.tp), copy_to(weights, self.tp), experts
        return (
            all_gather(x, self.tp, SEQUENCE_DIM),
            all_gather(weights, self.tp, SEQUENCE_DIM),
            all_gather(experts, self.tp, SEQUENCE_DIM),
        )


class _Leave:
    """The sum over tp, whole or this rank's part of the sequence."""

    def __init__(self, tp: dist.ProcessGroup, sequence: bool) -> None:
        self.tp = tp
        self.sequence = sequence

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.sequence:
            return reduce_scatter(x, self.tp, SEQUENCE_DIM)
        return reduce_from(x, self.tp)


# ---- how even the load is


@dataclass(frozen=True)
class Routed:
    """What the routers and experts of a rank counted in one step.

    Args:
        loads: [E] of each layer, rows of this rank's tokens.
        losses: Router loss of each layer, the mean over its micro-batches.
        num_rows, num_dropped: Number of rows, and of those that found no room, over all layers.
    """

    loads: tuple[torch.Tensor, ...] = ()
    losses: tuple[torch.Tensor, ...] = ()
    num_rows: int = 0
    num_dropped: int = 0


def take_routed(routers: Iterable[Any], experts: Iterable[Any]) -> Routed:
    """What has been counted; the counts begin anew. Nothing is read from the device."""
    loads = []
    losses = []
    for router in routers:
        if router.load is not None:  # a frozen model has no backward
            loads.append(router.load)
            losses.append(torch.stack(router.losses).mean())
        router.load = None
        router.losses = []
    num_rows = 0
    num_dropped = 0
    for each in experts:
        num_rows += each.num_rows
        num_dropped += each.num_dropped
        each.num_rows = 0
        each.num_dropped = 0
    return Routed(tuple(loads), tuple(losses), num_rows, num_dropped)


def load_of(
    routed: Routed,
    tokens: dist.ProcessGroup,
    stages: dist.ProcessGroup,
    *,
    copies: int,
    device: torch.device,
) -> dict[str, float]:
    """How the routers of all layers spread the rows of all ranks; all of them call it.

        expert_load     the largest over layers of   rows of the fullest expert / (all rows / E)
        dropped_share   rows that found no room / all rows
        router_loss     sum over layers of the losses, as they are added to the loss

    A load of 1 is even, of E / k the collapse to the same k experts for all tokens.

    Communicates: one all-reduce over `tokens`, two over `stages`.

    Args:
        routed: What this rank has routed.
        tokens: The ranks that hold other tokens of the same batch.
        stages: The ranks that hold other layers.
        copies: How many ranks of `tokens` hold whole sequences, dp: their losses are averaged,
            while the others add up.
        device: Device of the counts.

    Held by: tests/ranks/test_experts.py
    """
    numbers = [routed.num_rows, routed.num_dropped]
    total = torch.tensor([*numbers, 0.0], dtype=torch.float64, device=device)
    loads = [load.double() for load in routed.loads]
    if loads:
        total[2] = torch.stack(routed.losses).double().sum() / copies
    total = torch.cat((total, *loads))
    dist.all_reduce(total, group=tokens)
    fullest = total.new_zeros(())
    if loads:
        of_layers = total[3:].view(len(loads), -1)  # [layers, E]
        fullest = (of_layers.amax(1) / of_layers.mean(1)).amax()
    sums = total[:3].clone()
    dist.all_reduce(fullest, dist.ReduceOp.MAX, group=stages)
    dist.all_reduce(sums, group=stages)
    num_rows, num_dropped, loss = sums.tolist()
    if not num_rows or not fullest:
        return {}
    return {
        "expert_load": fullest.item(),
        "dropped_share": num_dropped / num_rows,
        "router_loss": loss,
    }
