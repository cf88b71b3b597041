"""Bytes and seconds of a step under DiLoCo against PyTorch's DDP, on one machine's own link.

    python benchmarks/local_updates.py [--rounds 8] [--every 10] [--batch 4] [--tokens 64]

Both train the same GPT on two ranks, one thread each. A round is `every` steps: forward, backward,
AdamW, and what travels; under DiLoCo the weights are averaged once in it. Contestants take turns in
changing order; the slowest rank's time counts, and the ratio is the median over the rounds of
DiLoCo / DDP within it. Bytes are counted in a round of their own and must be those of the formula:
2 (p-1)/p times the weights, each step under DDP and each round under DiLoCo. gloo on one machine is
fast, so what is saved here is little; over a slow link, emulated in lesson 06, it is nearly all.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write

from course.pool.ranks import Ranks
from labcode.config import GPTConfig, OptimConfig

RESULT = Path(__file__).parent / "results" / "local_updates_cpu.json"
RANKS = 2
OURS = "DiLoCo"
PEER = "DDP"


def rounds_of(
    who: str, config: GPTConfig, batch: int, every: int
) -> tuple[Callable[[], None], int]:
    """(A function that trains one round on this rank, bytes of the weights)."""
    import torch.distributed as dist

    from labcode.models import gpt
    from labcode.models.layers import initialize
    from labcode.parallel.local import LocalReplica, OuterOptimizer
    from labcode.parallel.torch_data import TorchDataParallel
    from labcode.train.optim import make_optimizer

    torch.set_num_threads(1)
    module = initialize(gpt.GPT(config), 0)
    outer = None
    if who == OURS:
        model = LocalReplica(module)
        outer = OuterOptimizer(module.parameters(), dist.group.WORLD)
    else:
        model = TorchDataParallel(module, dist.group.WORLD)
    inner = make_optimizer(module.parameters(), OptimConfig())
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (batch, config.context_length + 1)
    tokens = torch.randint(config.vocab_size, size, generator=generator)

    def one_round() -> None:
        for _ in range(every):
            gpt.loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            model.finish_gradient_sync()
            inner.step()
            inner.zero_grad()
        if outer is not None:
            outer.step()

    return one_round, sum(param.nbytes for param in module.parameters())


def times(
    rank: int, config: GPTConfig, batch: int, every: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, int], int]:
    """({contestant: seconds of a step}, {contestant: bytes reduced in a round}, weight bytes)."""

    from labcode.comm.counting import counted

    field = {}
    reduced = {}
    weight_bytes = 0
    for who in (OURS, PEER):
        one_round, weight_bytes = rounds_of(who, config, batch, every)
        one_round()
        with counted() as calls:
            one_round()
        reduced[who] = sum(call.num_bytes for call in calls if call.kind == "all_reduce")
        field[who] = one_round
    found = taking_turns(field, rounds, lambda run: seconds_together(run) / every)
    return found, reduced, weight_bytes


def main() -> None:
    given = options(__doc__, rounds=8, every=10, batch=4, tokens=64).parse_args()
    config = GPTConfig(
        vocab_size=512,
        context_length=given.tokens,
        num_layers=4,
        num_heads=4,
        hidden_size=192,
        positions="rotary",
        tie_embeddings=False,
    )
    with Ranks(RANKS, timeout_s=120) as ranks:
        answers = ranks.run(times, config, given.batch, given.every, given.rounds)
    _, reduced, weight_bytes = answers[0]
    expected = {OURS: weight_bytes, PEER: given.every * weight_bytes}
    assert reduced == expected, f"reduced in a round: {reduced}, by the formula {expected}"
    sent_a_step = {}
    for who, num_bytes in reduced.items():
        sent_a_step[who] = 2 * (RANKS - 1) / RANKS * num_bytes / given.every
        print(f"{who} sends {sent_a_step[who] / 1e6:.3f} MB a step from each rank")
    print(HEAD)
    rows = report(f"one of {given.every} steps", [found for found, _, _ in answers])
    record = {"machine": machine(), "setup": vars(given), "weight_bytes": weight_bytes}
    write(RESULT, record | {"sent_bytes_a_step": sent_a_step, "results": rows})


if __name__ == "__main__":
    main()
