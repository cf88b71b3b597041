"""Which samples each rank takes at each step.

It is a function of seed and step alone, so that a run can resume anywhere.
"""

from collections.abc import Iterator

import numpy as np


class Batches:
    """Global batches without end, and the slice of each that belongs to one data-parallel
    coordinate.

        epoch, place = divmod(step, num_samples // global_batch)
        global batch = permutation(seed, epoch)[place * global_batch :][: global_batch]
        slice        = part number dp_coord of dp_size equal, contiguous parts of it

    The global batch does not depend on dp_size: the parts in order are the same batch for every
    number of ranks. No sample comes twice in an epoch. The `num_samples % global_batch` samples
    that do not fill a batch are left out of that epoch; with shuffling they are different ones each
    time. Any step is reached without going through those before it. Nothing is communicated: every
    rank computes the permutation for itself (8 bytes a sample).

    Held by: tests/unit/test_sampler.py::test_the_slices_of_all_ranks_are_the_global_batch_of_one

    Args:
        num_samples: Length of the dataset.
        global_batch: Samples per step over all ranks.
        dp_size: Size of the dp axis.
        dp_coord: This rank's coordinate on it.
        seed: The same on every rank.
        shuffle: False takes the samples in their order.
        step: The step to begin with.

    Raises:
        ValueError: Too few samples for one batch, or a batch that dp_size does not divide.
    """

    def __init__(
        self,
        num_samples: int,
        global_batch: int,
        dp_size: int = 1,
        dp_coord: int = 0,
        seed: int = 0,
        shuffle: bool = True,
        step: int = 0,
    ) -> None:
        _check_dp(dp_size, dp_coord)
        if global_batch < 1 or global_batch % dp_size:
            raise ValueError(
                f"global_batch={global_batch} cannot be cut into dp_size={dp_size} equal parts: "
                "give a multiple of it"
            )
        check_batch_is_filled(num_samples, global_batch)
        self.num_samples = num_samples
        self.global_batch = global_batch
        self.dp_size = dp_size
        self.dp_coord = dp_coord
        self.seed = seed
        self.shuffle = shuffle
        # the epoch last asked for, and its permutation
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)
        self.load_state_dict({"step": step})

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one pass over the data."""
        return self.num_samples // self.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self.epoch_of(self.step)

    def epoch_of(self, step: int) -> int:
        """The epoch that a step belongs to, counted from 0."""
        return step // self.steps_per_epoch

    def global_indices(self, step: int) -> np.ndarray:
        """The whole batch of a step, all ranks together: [global_batch] int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self.global_batch
        return self._order_of(epoch)[start : start + self.global_batch].copy()

    def indices(self, step: int) -> np.ndarray:
        """This rank's part of the batch of a step: [global_batch / dp] int64."""
        per_rank = self.global_batch // self.dp_size
        start = self.dp_coord * per_rank
        return self.global_indices(step)[start : start + per_rank]

    def next_indices(self) -> np.ndarray:
        """This rank's part of the next batch, [global_batch / dp] int64; advances by one step."""
        indices = self.indices(self.step)
        self.advance()
        return indices

    def advance(self) -> None:
        """Go on to the next step."""
        self.step += 1

    def __iter__(self) -> Iterator[np.ndarray]:
        return self

    def __next__(self) -> np.ndarray:
        return self.next_indices()

    def state_dict(self) -> dict[str, int]:
        """The position: all there is to save, the same on every rank."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a saved position.

        Raises:
            ValueError: A step below 0.
        """
        if state["step"] < 0:
            raise ValueError(f"step={state['step']}: steps count from 0")
        self.step = int(state["step"])

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._epoch != epoch:
            order = np.arange(self.num_samples, dtype=np.int64)
            if self.shuffle:
                generator = np.random.Generator(np.random.PCG64([self.seed, epoch]))
                generator.shuffle(order)
            self._epoch = epoch
            self._order = order
        return self._order


def validation_batches(
    num_samples: int,
    global_batch: int,
    dp_size: int = 1,
    dp_coord: int = 0,
    max_batches: int | None = None,
) -> list[np.ndarray]:
    """This rank's parts of the first `max_batches` batches, in order.

    They are the same samples at every call and for every dp_size. All ranks get lists of the same
    length. The last batch may be smaller, and the parts of a batch may then differ by one sample or
    be empty; a rank with an empty part must still take part in what a forward communicates. Sum
    the losses and the counts over all ranks and divide once. A mean of means would give samples in
    small parts more weight.

    Held by:
    tests/unit/test_sampler.py::test_validation_takes_the_first_samples_once_for_every_number_of_ranks

    Args:
        num_samples: Length of the dataset, at least 1; it need not fill a batch.
        global_batch: As for `Batches`.
        dp_size: As for `Batches`.
        dp_coord: As for `Batches`.
        max_batches: None takes all samples.

    Raises:
        ValueError: No sample at all.
    """
    _check_dp(dp_size, dp_coord)
    if num_samples < 1 or global_batch < 1:
        raise ValueError(
            f"{num_samples} samples in batches of {global_batch}: "
            "validation needs at least 1 of each"
        )
    parts = []
    for start in range(0, num_samples, global_batch)[:max_batches]:
        stop = min(start + global_batch, num_samples)
        batch = np.arange(start, stop, dtype=np.int64)
        parts.append(np.array_split(batch, dp_size)[dp_coord])
    return parts


def check_batch_is_filled(num_samples: int, global_batch: int) -> None:
    """Refuse a global batch that is larger than the data; no model and no grid is needed to know.

    Raises:
        ValueError: Too few samples for one batch.
    """
    if num_samples < global_batch:
        raise ValueError(
            f"{num_samples} samples do not fill one global batch of {global_batch}: "
            "give more data or a smaller train.global_batch"
        )


def _check_dp(dp_size: int, dp_coord: int) -> None:
    if not 0 <= dp_coord < dp_size:
        raise ValueError(
            f"dp_coord={dp_coord} with dp_size={dp_size}: give a coordinate from 0 to dp_size - 1"
        )
