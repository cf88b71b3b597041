"""Which samples a rank draws: passes through its loaders, to train or to evaluate.

A DistributedSampler fills the shares of all ranks up to the same length with samples that it gives
a second time. In training that is no matter; where results of an evaluation are added up over ranks
these samples count twice.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DistributedSampler

FEW = 16  # numbers of a tensor in which a count of samples is looked for
SUMS = ("all_reduce", "reduce")
GATHERS = ("all_gather", "all_gather_into_tensor", "gather")
OBJECTS = ("all_gather_object", "gather_object")


@dataclass
class Pass:
    """One pass through a loader.

    Args:
        sampler: Sampler of the loader, if it has one.
        num_samples: Number of samples in its data set; 0 if that is not known.
        num_drawn: Samples that the sampler gave this rank.
        epoch: What the sampler was told.
        batches: Number of batches that have come.
        ended: Whether there are no more.
        trained: Forward passes that train.
        evaluated: Other forward passes.
        smallest: Samples in the smallest batch that was evaluated.
        is_combined: Whether the ranks have added something up, or gathered a few numbers.
        may_be_cut: Whether they have gathered results that they can cut to the right length.
        counts: Numbers that came out of a sum over ranks.
    """

    sampler: Any
    num_samples: int
    num_drawn: int = 0
    epoch: int = 0
    batches: int = 0
    ended: bool = False
    trained: int = 0
    evaluated: int = 0
    smallest: int = 0
    is_combined: bool = False
    may_be_cut: bool = False
    counts: list[torch.Tensor] = field(default_factory=list)


class Passes:
    """All passes of one rank through its loaders."""

    def __init__(self) -> None:
        self._passes: list[Pass] = []
        self._latest: Pass | None = None
        self._drawn: dict[int, tuple[int, int]] = {}
        self._evaluations: list[Pass] = []  # since the last forward pass that trains
        self._trained_on: Any = None

    def __len__(self) -> int:
        return len(self._passes)

    @property
    def latest(self) -> Pass | None:
        """The one that has given the last batch."""
        return self._latest

    def begin(self, loader: Any) -> Pass:
        """A pass through a loader begins."""
        sampler = getattr(loader, "sampler", None)
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", sampler)
        dataset = getattr(loader, "dataset", None)
        size = len(dataset) if hasattr(dataset, "__len__") else 0  # pyright: ignore
        one = Pass(sampler, size)
        self._passes.append(one)
        return one

    def draws(self, sampler: DistributedSampler, num_drawn: int) -> None:
        """A sampler gives what it has drawn for one pass."""
        self._drawn[id(sampler)] = (num_drawn, sampler.epoch)

    def came(self, one: Pass) -> None:
        """A batch has come."""
        one.batches += 1
        one.num_drawn, one.epoch = self._drawn.get(id(one.sampler), (0, 0))
        self._latest = one

    def forward(self, trains: bool, batch: int) -> None:
        """A forward pass begins.

        Args:
            trains: In training mode, with gradients.
            batch: Samples in its inputs.
        """
        if trains:
            self._evaluations = []
        one = self._latest
        if one is None:
            return
        if trains:
            one.trained += 1
            return
        one.evaluated += 1
        one.smallest = min(one.smallest or batch, batch)
        if not any(one is other for other in self._evaluations):
            self._evaluations.append(one)

    def new_epoch(self, own: Any) -> tuple[int, int] | None:
        """(seed, epoch) of a shuffling sampler at the second step that is trained on it, else None.

        The first step may be a trial.

        Args:
            own: The only sampler that is looked at; None: the first that is trained on.
        """
        one = self._latest
        if one is None or one.trained != 2:
            return None
        if not isinstance(one.sampler, DistributedSampler) or not one.sampler.shuffle:
            return None
        if own is None:
            self._trained_on = self._trained_on or one.sampler
            own = self._trained_on
        return (one.sampler.seed, one.epoch) if one.sampler is own else None

    def collective(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A collective of the script is over: does it combine the results of an evaluation?"""
        if not self._evaluations:
            return
        if name in OBJECTS:
            for one in self._evaluations:
                one.may_be_cut = True
            return
        if name not in SUMS + GATHERS:
            return
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        given = min(tensors, key=torch.numel)  # the other one is what all give, where there is one
        for one in self._evaluations:
            if name in GATHERS and given.ndim and given.numel() >= one.smallest:
                one.may_be_cut = True
            else:
                one.is_combined = True
            if name in SUMS and given.numel() <= FEW:
                is_over = not kwargs.get("async_op")
                one.counts.append(given.detach().clone() if is_over else given)

    def plain(self) -> list[list[int]]:
        """`Facts.evaluated`."""
        found = []
        for one in self._passes:
            ranks = getattr(one.sampler, "num_replicas", 0)
            if one.evaluated and not one.trained and one.ended and one.num_drawn and ranks:
                is_exact = one.may_be_cut or _has(one.counts, one.num_samples)
                found.append(
                    [one.num_samples, one.num_drawn, ranks, int(one.is_combined), int(is_exact)]
                )
        return found


def _has(counts: list[torch.Tensor], number: int) -> bool:
    """Whether a sum over ranks is the number of samples: then each has counted once."""
    return any(bool((values == number).any()) for values in counts)
