"""One training step of a 6-layer GPT under our DataParallel against PyTorch's DDP.

    python benchmarks/data_parallel.py [--rounds 15] [--batch 4] [--tokens 128]

Both have the same four buckets, in the order that they learn in the first step. Ours closes a
bucket before the limit and DDP behind it, so each has a limit of its own. DDP runs twice, as it is
by default and with `gradient_as_bucket_view`, which is what ours does. A step is forward, loss,
backward, gradient synchronisation and AdamW. Contestants take turns on the same two ranks, one
thread each, in changing order. The slowest rank's time counts, the ratio is the median over the
rounds of ours / theirs within it. Before anything is timed, the losses of three steps must agree
with each other's, and the buckets must have the same bytes.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from side_by_side import HEAD, machine, options, report, seconds_together, taking_turns, write

from course.pool.ranks import Ranks
from labcode.config import GPTConfig, OptimConfig

RESULT = Path(__file__).parent / "results" / "data_parallel_cpu.json"
TARGET = 1.05
RANKS = 2
HIDDEN = 256
OUR_BUCKET_MB = 6.317
THEIR_BUCKET_MIB = 6.055e6 / 2**20
OURS = "labcode"
PEERS = {"DDP": False, "DDP, gradients as views": True}


def stepper(who: str, config: GPTConfig, batch: int) -> Callable[[], torch.Tensor]:
    """A function that trains one step on this rank and returns the loss."""
    import torch.distributed as dist

    from labcode.models import gpt
    from labcode.models.layers import initialize
    from labcode.parallel.data import DataParallel
    from labcode.parallel.torch_data import TorchDataParallel
    from labcode.train.optim import make_optimizer

    torch.set_num_threads(1)
    module = initialize(gpt.GPT(config), 0)
    if who == OURS:
        model = DataParallel(module, dist.group.WORLD, OUR_BUCKET_MB, first_bucket_mb=OUR_BUCKET_MB)
    else:
        model = TorchDataParallel(
            module,
            dist.group.WORLD,
            bucket_cap_mb=THEIR_BUCKET_MIB,
            gradient_as_bucket_view=PEERS[who],
        )
    optimizer = make_optimizer(module.parameters(), OptimConfig())
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (batch, config.context_length + 1)
    tokens = torch.randint(config.vocab_size, size, generator=generator)

    def step() -> torch.Tensor:
        loss = gpt.loss(model(tokens[:, :-1]), tokens[:, 1:])
        loss.backward()
        model.finish_gradient_sync()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def times(
    rank: int, config: GPTConfig, batch: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """({contestant: seconds of each round}, {contestant: bytes of each message}) of this rank."""
    from labcode.comm.counting import counted

    field = {}
    messages = {}
    expected = None
    for who in (OURS, *PEERS):
        step = stepper(who, config, batch)
        losses = torch.stack([step() for _ in range(3)])
        if expected is None:
            expected = losses
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
        with counted() as calls:
            step()
        messages[who] = [call.num_bytes for call in calls if call.kind == "all_reduce"]
        assert messages[who] == messages[OURS], f"the buckets differ: {messages}"
        field[who] = step
    found = taking_turns(field, rounds, seconds_together)
    return found, messages


def main() -> None:
    given = options(__doc__, rounds=15, batch=4, tokens=128).parse_args()
    config = GPTConfig(
        vocab_size=512,
        context_length=given.tokens,
        num_layers=6,
        num_heads=8,
        hidden_size=HIDDEN,
        positions="rotary",
        tie_embeddings=False,
    )
    with Ranks(RANKS, timeout_s=120) as ranks:
        answers = ranks.run(times, config, given.batch, given.rounds)
    messages = answers[0][1][OURS]
    print(f"bytes of each message: {messages}")
    print(HEAD)
    rows = []
    for peer in PEERS:
        pair = [{OURS: found[OURS], peer: found[peer]} for found, _ in answers]
        rows += report(f"against {peer}", pair)
    record = {"machine": machine(), "setup": vars(given), "messages": messages, "results": rows}
    write(RESULT, record | {"target": TARGET})


if __name__ == "__main__":
    main()
