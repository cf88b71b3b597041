"""Which samples each rank takes at each step: a function of seed and step alone, so that a run can resume anywhere."""

import numpy as np


class Batches:
    """Global batches without end, and the slice of each that belongs to one data-parallel coordinate.

        epoch, place = divmod(step, num_samples // global_batch)
        global batch = permutation(seed, epoch)[place * global_batch :][: global_batch]
        slice        = the dp_coord-th of dp_size equal, contiguous parts of it

    The global batch does not depend on dp_size: its parts put one after another are the same batch for every number of
    ranks. No sample comes twice in an epoch. The `num_samples % global_batch` samples that do not fill a batch are left
    out of that epoch; with shuffling they are others each time. Any step is reached without going through those before
    it. Nothing is communicated: every rank computes the permutation for itself (8 bytes a sample).
    Held by: tests/unit/test_sampler.py::test_the_slices_of_all_ranks_are_the_global_batch_of_one

    Args:
        num_samples: Length of the dataset.
        global_batch: Samples per step over all ranks.
        dp_size, dp_coord: Size of the dp axis, and where this rank is on it.
        seed: Same on every rank.
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
    ):
        _check_dp(dp_size, dp_coord)
        if global_batch < 1 or global_batch % dp_size:
            raise ValueError(
                f"global_batch={global_batch} cannot be cut into dp_size={dp_size} equal parts: give a multiple of it"
            )
        if num_samples < global_batch:
            raise ValueError(
                f"{num_samples} samples do not fill one global batch of {global_batch}: give more data or a smaller batch"
            )
        self.num_samples, self.global_batch, self.seed, self.shuffle = (
            num_samples,
            global_batch,
            seed,
            shuffle,
        )
        self.dp_size, self.dp_coord = dp_size, dp_coord
        self._epoch_order = (
            None,
            None,
        )  # (epoch, its permutation): the one that was last asked for
        self.load_state_dict({"step": step})

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in one pass over the data."""
        return self.num_samples // self.global_batch

    @property
    def epoch(self) -> int:
        """The epoch of the next step, counted from 0."""
        return self.step // self.steps_per_epoch

    def global_indices(self, step: int) -> np.ndarray:
        """The whole batch of a step, all ranks together: [global_batch] int64."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._order(epoch)[
            place * self.global_batch : (place + 1) * self.global_batch
        ].copy()

    def indices(self, step: int) -> np.ndarray:
        """This rank's part of the batch of a step: [global_batch / dp] int64."""
        per_rank = self.global_batch // self.dp_size
        return self.global_indices(step)[self.dp_coord * per_rank : (self.dp_coord + 1) * per_rank]

    def next_indices(self) -> np.ndarray:
        """This rank's part of the next batch, and one step further: [global_batch / dp] int64."""
        indices = self.indices(self.step)
        self.step += 1
        return indices

    def __iter__(self):
        return self

    __next__ = next_indices

    def state_dict(self) -> dict[str, int]:
        """The position: all there is to save, the same on every rank."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]):
        """Goes to a saved position.

        Raises:
            ValueError: A step below 0.
        """
        if state["step"] < 0:
            raise ValueError(f"step={state['step']}: steps count from 0")
        self.step = int(state["step"])

    def _order(self, epoch):
        if self._epoch_order[0] != epoch:
            order = np.arange(self.num_samples, dtype=np.int64)
            if self.shuffle:
                np.random.Generator(np.random.PCG64([self.seed, epoch])).shuffle(order)
            self._epoch_order = (epoch, order)
        return self._epoch_order[1]


def validation_batches(
    num_samples: int,
    global_batch: int,
    dp_size: int = 1,
    dp_coord: int = 0,
    max_batches: int | None = None,
) -> list[np.ndarray]:
    """This rank's parts of the first `max_batches` batches in order: the same samples at every call, for every dp_size.

    All ranks get lists of the same length, so that they can communicate in step. The last batch may be smaller, and the
    parts of a batch may then differ by one sample or be empty: sum the losses and the counts over all ranks and divide
    once. A mean of means would weigh the samples by where they happened to land.
    Held by: tests/unit/test_sampler.py::test_validation_takes_the_first_samples_once_for_every_number_of_ranks

    Args:
        num_samples: Length of the dataset, at least 1; it need not fill a batch.
        global_batch, dp_size, dp_coord: As for `Batches`.
        max_batches: None: all samples.

    Raises:
        ValueError: No sample at all.
    """
    _check_dp(dp_size, dp_coord)
    if num_samples < 1 or global_batch < 1:
        raise ValueError(
            f"{num_samples} samples in batches of {global_batch}: validation needs at least 1 of each"
        )
    starts = range(0, num_samples, global_batch)[:max_batches]
    batches = (
        np.arange(start, min(start + global_batch, num_samples), dtype=np.int64) for start in starts
    )
    return [np.array_split(batch, dp_size)[dp_coord] for batch in batches]


def _check_dp(dp_size, dp_coord):
    if not 0 <= dp_coord < dp_size:
        raise ValueError(
            f"dp_coord={dp_coord} with dp_size={dp_size}: give a coordinate from 0 to dp_size - 1"
        )
