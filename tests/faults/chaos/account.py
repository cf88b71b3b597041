"""What faults have cost a training: steps and bytes; as JSON, and as a table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from labcode.runtime.files import write_atomically

from .job import Seen
from .plan import KINDS

COLUMNS = ("fault", "injected", "survived", "steps lost", "most in one", "bytes lost")


@dataclass(frozen=True)
class Outcome:
    """What became of one fault.

    Args:
        number: Number of the fault.
        kind: Kind of the fault.
        round: Number of the training, of those that come to their end, that it happened in.
        survived: The run went on, or ended as it should; nothing hung.
        step: The last step that was done when it came.
        resumed_from: Where the run went on.
        steps_lost: Steps that had to be done again.
        bytes_lost: Bytes of whole checkpoints and of rows of metrics that were there and are gone.
        seconds: From the fault to the first step after it.
        why: What was wrong, if it was not survived.
    """

    number: int
    kind: str
    round: int
    survived: bool
    step: int
    resumed_from: int
    steps_lost: int
    bytes_lost: int
    seconds: float
    why: str = ""


def bytes_lost(
    before: Mapping[int, int],
    after: Seen,
    resumed_from: int,
    now: Sequence[tuple[int, bytes]],
) -> int:
    """Bytes of results that a fault has cost.

    Args:
        before: {step: bytes} of the checkpoints that were complete before it, without one that the
            fault itself has damaged.
        after: What lay in the folder when the processes had gone.
        resumed_from: The step from which the run went on.
        now: The rows of metrics since it went on.

    Returns:
        Bytes of checkpoints that were whole, and neither they nor later ones were resumed from; and
        of the rows of metrics up to that step that are gone or have changed.
    """
    lost = 0
    whole = dict(before) | after.checkpoints
    for step, size in whole.items():
        if step > resumed_from:
            lost += size
    kept = set(now)
    for row in after.rows:
        if row[0] <= resumed_from and row not in kept:
            lost += len(row[1])
    return lost


@dataclass(frozen=True)
class Account:
    """All faults of a chaos run.

    Args:
        recipe: What was trained, with its options.
        ranks: On how many ranks.
        seed: Seed of the plan.
        every: Steps between checkpoints.
        rounds: Trainings that came to their end.
        rounds_equal: Those whose losses and weights were, bit for bit, those of the training that
            nobody disturbed.
        unplanned: Attempts that ended without a fault of the plan.
        left_out: What could not be done on this machine, and why.
        outcomes: Outcome of each fault.
        versions: Versions of Python and torch.
        nodes: Number of nodes of a local SLURM cluster; 0: under torchrun on one machine.
    """

    recipe: str
    ranks: int
    seed: int
    every: int
    rounds: int
    rounds_equal: int
    unplanned: int
    left_out: list[str]
    outcomes: list[Outcome]
    versions: dict[str, str]
    nodes: int = 0

    @property
    def good(self) -> bool:
        """Nothing was lost beyond one checkpoint interval, and all ended as if undisturbed."""
        return not self.complaints()

    def complaints(self) -> list[str]:
        """What must not be, a line each."""
        found = []
        for outcome in self.outcomes:
            what = f"fault {outcome.number} ({outcome.kind}, at step {outcome.step})"
            if not outcome.survived:
                found.append(f"{what} was not survived: {outcome.why}")
            if outcome.steps_lost > self.every:
                found.append(f"{what} cost {outcome.steps_lost} steps")
            if outcome.bytes_lost:
                found.append(f"{what} cost {outcome.bytes_lost} bytes")
        differing = self.rounds - self.rounds_equal
        if differing:
            found.append(f"{differing} of {self.rounds} trainings ended otherwise than undisturbed")
        return found

    def write(self, path: Path) -> None:
        """Write all of it as JSON."""
        write_atomically(path, f"{json.dumps(asdict(self), indent=1)}\n".encode())


def read(path: Path) -> Account:
    """What `Account.write` has written.

    Raises:
        ValueError: It is something else.
    """
    try:
        tree: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        tree["outcomes"] = [Outcome(**outcome) for outcome in tree["outcomes"]]
        return Account(**tree)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no account of faults: {error}") from None


def table(account: Account) -> str:
    """A row for each kind of fault and one for all, as Markdown."""
    lines = [_line(COLUMNS), _line(["---", *["---:"] * (len(COLUMNS) - 1)])]
    for kind, what in KINDS.items():
        of_kind = [outcome for outcome in account.outcomes if outcome.kind == kind]
        if of_kind:
            lines.append(_row(what, of_kind))
    lines.append(_row("**all**", account.outcomes))
    return "\n".join(lines)


def summary(account: Account) -> str:
    """In a sentence, what the numbers belong to."""
    trainings = "1 training" if account.rounds == 1 else f"{account.rounds:,} trainings"
    where = f" on {account.nodes} nodes of a local SLURM cluster" if account.nodes else ""
    return (
        f"`{account.recipe}` on {account.ranks} ranks{where}, a checkpoint every {account.every} "
        f"steps, seed {account.seed}: {len(account.outcomes):,} faults in {trainings}; "
        f"{account.rounds_equal:,} of them ended with the losses and the weights of a training "
        "that nobody disturbed, bit for bit."
    )


def _row(what: str, outcomes: Sequence[Outcome]) -> str:
    survived = sum(outcome.survived for outcome in outcomes)
    steps = [outcome.steps_lost for outcome in outcomes]
    lost = sum(outcome.bytes_lost for outcome in outcomes)
    numbers = [len(outcomes), survived, sum(steps), max(steps, default=0), lost]
    return _line([what, *[f"{number:,}" for number in numbers]])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
