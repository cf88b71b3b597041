"""What `doctor.watch` costs a training step: on, and off again, beside a model never watched.

    python benchmarks/doctor.py [--rounds 9] [--steps 30]

A plain PyTorch loop (DDP, DataLoader, AdamW) on two ranks, one thread each. Three copies of it take
turns in changing order, each for some steps: one inside `doctor.watch`, one that has been watched
and no longer is, one that never was. The slowest rank's time counts, and the ratio is the median
over the rounds of on / never and off / never. Entering and leaving the block is timed apart: it
happens once in a run. A block is as short as a round here, so that the first steps, in which the
doctor looks at more, weigh more than in a real run.
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from side_by_side import HEAD, machine, options, report, taking_turns, write
from torch import nn

from course.pool.ranks import Ranks
from labcode.config import GPTConfig

RESULT = Path(__file__).parent / "results" / "doctor_cpu.json"
TARGET = 1.05
RANKS = 2
NEVER = "never watched"
ON = "watched"
OFF = "watched before"
GPTS = {"gpt_tiny": (2, 64), "GPT, 4 layers 128 wide": (4, 128)}  # layers, width
MODELS = (*GPTS, "ConvNet with BatchNorm")


def ingredients(
    name: str,
) -> tuple[nn.Module, torch.utils.data.TensorDataset, Callable[..., torch.Tensor], int]:
    """(model, samples, loss, batch size of a rank)."""
    from torch.utils.data import TensorDataset

    from labcode.models import gpt
    from labcode.models.layers import initialize

    generator = torch.Generator().manual_seed(0)
    if name in GPTS:
        num_layers, hidden_size = GPTS[name]
        config = GPTConfig(
            vocab_size=84,
            context_length=128,
            num_layers=num_layers,
            num_heads=4,
            hidden_size=hidden_size,
            positions="rotary",
        )
        tokens = torch.randint(84, (512, 129), generator=generator)
        data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
        return initialize(gpt.GPT(config), 0), data, gpt.loss, 8
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 32, 32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    images = torch.randn(512, 3, 32, 32, generator=generator)
    data = TensorDataset(images, torch.randint(10, (512,), generator=generator))
    return nn.Sequential(*layers), data, nn.functional.cross_entropy, 8


class Script:
    """One copy of the plain loop, which goes on where it has stopped."""

    def __init__(self, name: str) -> None:
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DataLoader, DistributedSampler

        torch.manual_seed(0)
        module, data, self.loss, batch = ingredients(name)
        self.model = DistributedDataParallel(module)
        self.optimizer = torch.optim.AdamW(module.parameters())
        self.sampler = DistributedSampler(data)
        self.loader = DataLoader(data, batch_size=batch, sampler=self.sampler)
        self.epoch = 0
        self.losses: list[float] = []

    def train(self, steps: int) -> None:
        """Run that many steps, over as many epochs as that takes."""
        done = 0
        while done < steps:
            self.sampler.set_epoch(self.epoch)
            self.epoch += 1
            for inputs, targets in self.loader:
                loss = self.loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.losses.append(loss.item())
                done += 1
                if done == steps:
                    break


def times(rank: int, name: str, rounds: int, steps: int) -> tuple[dict[str, list[float]], float]:
    """({contestant: seconds of a step in each round}, median seconds to enter and leave)."""
    import contextlib
    import time

    import torch.distributed as dist

    from labcode import doctor

    torch.set_num_threads(1)
    field = {who: Script(name) for who in (NEVER, ON, OFF)}
    before = (torch.Tensor.backward, dist.all_reduce, torch.save)
    for who, script in field.items():
        watch = contextlib.nullcontext()
        if who == OFF:
            watch = doctor.watch(script.model, script.optimizer, loader=script.loader)
        with watch:
            script.train(3)
    around_s = []

    def run(who: str) -> float:
        """Seconds of a step, without those for entering and leaving."""
        script = field[who]
        dist.barrier()
        entered = time.perf_counter()
        watch: Any = contextlib.nullcontext()
        if who == ON:
            watch = doctor.watch(script.model, script.optimizer, loader=script.loader)
        else:
            assert before == (torch.Tensor.backward, dist.all_reduce, torch.save)
        with watch:
            start = time.perf_counter()
            script.train(steps)
            seconds = time.perf_counter() - start
        if who == ON:
            around_s.append(time.perf_counter() - entered - seconds)
            assert watch.findings == [], watch.findings
        return seconds / steps

    found = taking_turns({who: who for who in field}, rounds, run)
    assert field[ON].losses == field[NEVER].losses == field[OFF].losses
    return found, statistics.median(around_s)


def main() -> None:
    given = options(__doc__, rounds=9, steps=30).parse_args()
    print(HEAD.replace("ours / theirs", "ratio"))
    rows = []
    with Ranks(RANKS, timeout_s=120) as ranks:
        for name in MODELS:
            answers = ranks.run(times, name, given.rounds, given.steps)
            around_ms = max(around_s for _, around_s in answers) * 1e3
            for who in (ON, OFF):
                pair = [{who: found[who], NEVER: found[NEVER]} for found, _ in answers]
                rows += report(name, pair)
            print(f"{name}: {around_ms:.1f} ms to enter and leave the block", flush=True)
            rows[-1]["enter_and_leave_ms"] = round(around_ms, 1)
    record = {"machine": machine(), "setup": vars(given), "results": rows}
    write(RESULT, record | {"target": TARGET})


if __name__ == "__main__":
    main()
