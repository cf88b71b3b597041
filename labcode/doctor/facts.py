"""What one rank notes of a training loop, and one finding of the doctor."""

import dataclasses
from dataclasses import dataclass, field

from labcode.runtime.units import ranks_text


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        name: Short name, such as "same data".
        what: What is wrong, in one sentence.
        ranks: The ranks on which it was seen.
        evidence: The number that shows it.
        unit: What the number counts.
        cure: What to change.
        is_hint: Nothing is wrong in what is learnt; it costs time, or is not what one may expect.
    """

    name: str
    what: str
    ranks: tuple[int, ...]
    evidence: float
    unit: str
    cure: str
    is_hint: bool = False

    def __str__(self) -> str:
        who = ranks_text(self.ranks)
        return (
            f"{self.name}: {self.what} [{who}; {self.evidence:.4g} {self.unit}]; cure: {self.cure}"
        )


class FindingError(RuntimeError):
    """A collective that would hang was stopped before it began."""


@dataclass
class Facts:
    """Plain numbers of one rank; they travel as JSON.

    Args:
        rank: Rank that they are from.
        ranks: Number of ranks that train together; the facts of some may be missing.
        device: Device of the parameters, "node cpu" or "node GPU-uuid".
        inputs: A checksum of the inputs of each of the first forward passes.
        drops_out: Whether the model has a Dropout, so that equal inputs give unequal gradients.
        foreign_inputs: Forward passes whose inputs are all on another device than the weights.
        epochs: `sampler.epoch` of each pass through a shuffling DistributedSampler that was trained
            on for more than one step.
        seeds: Seeds of these samplers.
        start: Sum of absolute weights before the first forward pass.
        end: The same when the block ends.
        statistics: Sum of BatchNorm's running means and variances, before the forward pass of some
            steps, the same steps on all ranks.
        taken: Steps of the first optimizer.
        syncs: How many backward passes of one loss sent gradients in each step of the first
            optimizer.
        steps: What reached the gradient of each step that was really taken, one list for each
            optimizer (`watch_gradient`): its backward passes, each with the factor in front of its
            loss, the number of values in it, and a `key` that passes have in common whose losses
            are micro-batches of one: same line of code, same weights reached.
        unknown: Parameters that DistributedDataParallel has not seen when it was built.
        unfrozen: Parameters that need a gradient only since then.
        moved: Parameters that are no longer on the device for which it was built.
        unused: Parameters without a gradient after some backward that sent.
        unused_names: Some of them.
        foreign: Whether no optimizer of the block holds a parameter of the model.
        forgotten: Trained parameters that no optimizer holds, where one holds an old copy.
        evaluated: For each pass through a DistributedSampler that was not trained on, [samples of
            the data set, samples that this rank drew, ranks of the sampler, 1 if the ranks added
            something up afterwards, 1 if that may have been counted exactly].
        finds_unused: Whether find_unused_parameters is set; None without DDP, and where DDP learns
            the graph by itself (static_graph).
        gradient_bytes: Bytes of one message with all gradients.
        saved: Files that torch.save wrote, as node and absolute path.
        seconds: Seconds of each phase in each step, without waiting for other ranks
            (`watch_clock`).
        draws: What the augmentation of a loader drew, by worker and batch: for each generator that
            moved a number that stands for its state before (`watch_draws`).
        call: What was found at a collective: the name of the finding, what, and the cure.
        differs: The ranks that did otherwise than the others there, if that is known.
        reducer: What an error of DDP itself means: the name of the finding, what, and the cure.
        failed: Whether the block ended in an error.
    """

    rank: int
    ranks: int = 1
    device: str = ""
    inputs: list[int] = field(default_factory=list)
    drops_out: bool = False
    foreign_inputs: int = 0
    epochs: list[int] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    start: float | None = None
    end: float | None = None
    statistics: list[float] = field(default_factory=list)
    taken: int = 0
    syncs: list[int] = field(default_factory=list)
    steps: list[list[dict]] = field(default_factory=list)
    unknown: int = 0
    unfrozen: int = 0
    moved: int = 0
    unused: int = 0
    unused_names: list[str] = field(default_factory=list)
    foreign: bool = False
    forgotten: int = 0
    evaluated: list[list[int]] = field(default_factory=list)
    finds_unused: bool | None = None
    gradient_bytes: int = 0
    saved: list[str] = field(default_factory=list)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    draws: list[list[list[int]]] = field(default_factory=list)
    call: list[str] = field(default_factory=list)
    differs: list[int] = field(default_factory=list)
    reducer: list[str] = field(default_factory=list)
    failed: bool = False

    def plain(self) -> dict:
        """The facts as a dict that JSON can carry."""
        return dataclasses.asdict(self)
