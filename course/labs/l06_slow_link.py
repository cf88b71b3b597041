"""Lesson 06: data parallelism and local SGD over a link as slow as one between two cities.

A small GPT learns Shakespeare on all ranks of a pool. What it sends goes over the slow link of
lesson 05, and whoever waits for it sleeps, so a training takes as long as it would over that link.
Every way sees the same samples in the same order; only how often the ranks meet differs.

    data parallel   gradients, at every step    2 (p-1)/p * weight bytes      a step
    local SGD, H    weights, every H steps      2 (p-1)/p * weight bytes / H  a step

Losses are those of the validation text, with the weights that all ranks share; the clock and the
counter stand still while they are measured.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from course.figures.local_updates import LossCurve
from course.labs.l05_slow_link import SlowLink
from course.pool.ranks import Ranks
from labcode.comm.counting import Collective
from labcode.config import GPTConfig, TextData
from labcode.data import sampler, text
from labcode.models import gpt, layers
from labcode.parallel.data import DataParallel
from labcode.parallel.local import LocalReplica, OuterOptimizer
from labcode.perf.alpha_beta import Link, bytes_sent

# 1000 km of fibre, and 40 Mbit/s of it for us
WIDE_AREA = Link(alpha_s=5e-3, beta_bytes_per_s=5e6)

EVAL_EVERY = 10  # steps, or a longer `Way.every`: only then all ranks share their weights
CONTEXT = 32  # tokens
SAMPLES = 4  # of each rank in a step
VALIDATION_SAMPLES = 16  # of each rank
LEARNING_RATE = 2e-3


@dataclass(frozen=True)
class Way:
    """How the ranks learn together.

    Args:
        every: Steps between two averages of weights; 0 averages gradients, at every step.
        outer_lr, outer_momentum: The rates of `OuterOptimizer`; DiLoCo's. With 1 and 0 it is local
            SGD.
        steps: Optimizer steps of the training.
    """

    every: int = 0
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    steps: int = 100


# An outer momentum is left out: with DiLoCo's rate 0.7 and 0.5 in place of its 0.9, H = 5 came to
# 2.87 after 120 steps, and H = 20 to 2.81; with plain averages it is 2.71 and 2.79.
# About as many steps as each can take in the same time over WIDE_AREA.
WAYS = {
    "data parallel": Way(steps=40),
    "local SGD, H = 5": Way(5, 1.0, 0.0, steps=160),
    "local SGD, H = 20": Way(20, 1.0, 0.0, steps=340),
}


def build() -> gpt.GPT:
    """The model, with the same weights at each call."""
    splits = text.load(TextData(), context_length=CONTEXT)
    config = GPTConfig(
        splits.tokenizer.vocab_size,
        num_layers=2,
        num_heads=4,
        hidden_size=48,
        context_length=CONTEXT,
    )
    return layers.initialize(gpt.GPT(config), seed=0)


def weight_bytes() -> int:
    """Bytes of the whole model: what an average of gradients or of weights is over."""
    return sum(param.nbytes for param in build().parameters())


def race(
    ranks: Ranks,
    ways: Mapping[str, Way] = WAYS,
    link: Link = WIDE_AREA,
) -> dict[str, LossCurve]:
    """Train in one way after the other, from the same weights.

    Args:
        ranks: All of them train.
        ways: {name: the way}.
        link: Link between any two ranks.

    Returns:
        {name: what rank 0 has seen}.

    Held by: tests/ranks/test_local_lab.py
    """
    return {name: ranks.run(train, way, link)[0] for name, way in ways.items()}


def train(rank: int, way: Way, link: Link = WIDE_AREA) -> LossCurve:
    """Train in one way; every rank calls it.

    Raises:
        ValueError: There are losses to measure while each rank has weights of its own.
    """
    if way.every and max(way.every, EVAL_EVERY) % way.every:
        raise ValueError(
            f"weights are averaged every {way.every} steps, and losses are measured every "
            f"{EVAL_EVERY}: give a divisor of {EVAL_EVERY}, or more"
        )
    return _Training(rank, way, link).run(way.steps)


class _CountingLink(SlowLink):
    """A slow link that knows how much a rank has sent over it on a ring.

    Attributes:
        sent_bytes: Bytes of the all-reduces so far.
    """

    def __init__(self, link: Link) -> None:
        super().__init__(link)
        self.sent_bytes = 0.0

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        """Count it and let it travel."""
        if call.name == "all_reduce":
            self.sent_bytes += bytes_sent(call.name, len(call.ranks), call.num_bytes)
        return super().on_collective(call, start)


class _Training:
    """One rank's part of a training over a slow link."""

    def __init__(self, rank: int, way: Way, link: Link) -> None:
        torch.set_num_threads(1)
        group = dist.group.WORLD
        assert group is not None
        self.rank = rank
        self.num_ranks = dist.get_world_size()
        self.every = way.every
        self.outer: OuterOptimizer | None = None
        module = build()
        if way.every:
            self.replica = LocalReplica(module)
            self.outer = OuterOptimizer(
                module.parameters(), group, lr=way.outer_lr, momentum=way.outer_momentum
            )
        else:
            self.replica = DataParallel(module, group)
        self.inner = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
        self.splits = text.load(TextData(), context_length=CONTEXT)
        self.batches = sampler.Batches(
            len(self.splits.train), SAMPLES * self.num_ranks, self.num_ranks, rank
        )
        self.link = _CountingLink(link)

    def run(self, steps: int) -> LossCurve:
        """All steps, with a point of the curve before the first one and more behind some steps."""
        at_steps = [0]
        at_seconds = [0.0]
        at_bytes = [0.0]
        losses = [self._validation_loss()]
        seconds = 0.0
        for step in range(1, steps + 1):
            inputs, targets = self.splits.train[self.batches.next_indices()]
            begin_s = time.perf_counter()
            self._step(step, inputs, targets)
            seconds += time.perf_counter() - begin_s
            if step % max(self.every, EVAL_EVERY) == 0:
                at_steps.append(step)
                at_seconds.append(seconds)
                at_bytes.append(self.link.sent_bytes)
                losses.append(self._validation_loss())
        return LossCurve(at_steps, at_seconds, at_bytes, losses)

    def _step(self, step: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        loss = gpt.loss(self.replica(inputs), targets)
        self.inner.zero_grad()
        with self.link:
            loss.backward()
            self.replica.finish_gradient_sync()
        self.link.wait()
        self.inner.step()
        if self.outer is not None and step % self.every == 0:
            with self.link:
                self.outer.step()
            self.link.wait()

    @torch.no_grad()
    def _validation_loss(self) -> float:
        """Loss over samples that are the same at each call; each rank computes a part of them."""
        first = self.rank * VALIDATION_SAMPLES
        inputs, targets = self.splits.val[range(first, first + VALIDATION_SAMPLES)]
        loss = gpt.loss(self.replica.module(inputs), targets)
        dist.all_reduce(loss)  # not over the slow link
        return loss.item() / self.num_ranks
