"""Forward and backward of a layer of experts on two ranks, against the same written plainly.

    python benchmarks/experts.py [--rounds 25] [--batch 4] [--tokens 256] [--hidden 256]

ep 1: each rank has all experts. The plain layer loops over them, picks the rows of each by a mask
and adds them up with `index_add`, as the mixtures of `transformers` do.
ep 2: each rank has half of them. The plain layer sorts rows by expert, sends them with PyTorch's
own `all_to_all_single_autograd`, loops over its experts by a mask, and sends the rows back.

Both have the same weights, tokens and routing, in float32 with one thread a rank. Contestants take
turns on the same two ranks, in changing order. The slowest rank's time counts, the ratio is the
median over the rounds of ours / theirs within it. Before anything is timed, outputs and gradients
must agree.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write

from course.pool.ranks import Ranks
from labcode.models.moe import MoE

RESULT = Path(__file__).parent / "results" / "experts_cpu.json"
EXPERTS = 8
TOP_K = 2
WAYS = ("labcode", "plain PyTorch")
Pass = Callable[[], list[torch.Tensor]]  # forward and backward: output and gradients


def layer_of(hidden: int) -> MoE:
    """A layer with experts of two hidden sizes, the same whole layer on every rank."""
    torch.manual_seed(0)
    layer = MoE(hidden, 2 * hidden, EXPERTS, TOP_K, scoring="softmax_of_chosen")
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=hidden**-0.5)
    return layer


def mlp(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """One expert."""
    gate, value = (rows @ up.T).chunk(2, -1)
    return (F.silu(gate) * value) @ down.T


def by_a_loop(
    rows: torch.Tensor, numbers: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """What the experts make of rows that belong to the experts `numbers`: [R, H]."""
    out = torch.zeros_like(rows)
    for expert in range(len(up)):
        places = (numbers == expert).nonzero().squeeze(1)
        out = out.index_add(0, places, mlp(rows[places], up[expert], down[expert]))
    return out


def there_and_back(
    rows: torch.Tensor, numbers: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same where each rank has only some of the experts."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    group = dist.group.WORLD
    assert group is not None
    order = numbers.argsort()
    counts = numbers.bincount(minlength=EXPERTS)
    theirs = torch.empty_like(counts)
    dist.all_to_all_single(theirs, counts)
    sent = counts.view(group.size(), -1).sum(1).tolist()
    by_sender = theirs.view(group.size(), -1)
    received = by_sender.sum(1).tolist()
    arrived = all_to_all_single_autograd(rows[order], received, sent, group)
    own = torch.arange(len(up)).repeat(group.size()).repeat_interleave(by_sender.flatten())
    done = by_a_loop(arrived, own, up, down)
    back = all_to_all_single_autograd(done, sent, received, group)
    return back[order.argsort()]


def plain(
    x: torch.Tensor, router: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The whole layer: [T, H] -> [T, H]."""
    logits, experts = (x @ router.T).topk(TOP_K)
    weights = logits.softmax(-1)
    token = torch.arange(len(x)).repeat_interleave(TOP_K)
    way = by_a_loop if len(up) == EXPERTS else there_and_back
    rows = way(x[token], experts.flatten(), up, down)
    return torch.zeros_like(x).index_add(0, token, rows * weights.view(-1, 1))


def passes(way: str, rank: int, ep: int, batch: int, tokens: int, hidden: int) -> Pass:
    """A function that runs the layer forward and backward on this rank's own tokens."""
    from labcode.comm.grid import Grid
    from labcode.parallel.experts import divide_experts
    from labcode.topology import GridShape

    torch.set_num_threads(1)
    layer = layer_of(hidden)
    if ep > 1:
        grid = Grid.create(GridShape(dp=2, ep=ep))
        divide_experts(layer.experts, grid.group("ep"), grid.group("tp"))
    weights = [layer.router.weight, layer.experts.up, layer.experts.down]
    generator = torch.Generator().manual_seed(1 + rank)
    x = torch.randn(batch, tokens, hidden, generator=generator).requires_grad_()

    def run() -> list[torch.Tensor]:
        flat = x.flatten(0, 1)
        out = layer(x) if way == "labcode" else plain(flat, *weights).view_as(x)
        gradients = torch.autograd.grad(out.square().sum(), [x, *weights])
        return [out.detach(), *gradients]

    return run


def times(
    rank: int, batch: int, tokens: int, hidden: int, rounds: int
) -> dict[tuple[str, int], list[float]]:
    """{(way, ep): seconds of each round on this rank}."""
    field = {}
    for ep in (1, 2):
        for way in WAYS:
            field[way, ep] = passes(way, rank, ep, batch, tokens, hidden)
        for ours, theirs in zip(*[field[way, ep]() for way in WAYS], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    return taking_turns(field, rounds, seconds_together)


def main() -> None:
    given = options(__doc__, rounds=25, batch=4, tokens=256, hidden=256).parse_args()
    with Ranks(2, timeout_s=300) as ranks:
        found = ranks.run(times, given.batch, given.tokens, given.hidden, given.rounds)
    print(HEAD)
    rows = []
    for ep in (1, 2):
        of_layout = []
        for rank in found:
            of_layout.append({way: rank[way, ep] for way in WAYS})
        rows += report(f"ep {ep}", of_layout)
    write(RESULT, {"machine": machine(), "setup": vars(given), "results": rows})


if __name__ == "__main__":
    main()
