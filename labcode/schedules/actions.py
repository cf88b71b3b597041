"""What a schedule is made of: actions, messages between them, and what each action waits for."""

import re
from typing import NamedTuple

KINDS = "FBIW"


class Action(NamedTuple):
    """One thing that a rank computes: F, B, I or W of one stage for one micro-batch.

    Stage 1's forward of micro-batch 3 is written 1F3, as PyTorch writes it.
    """

    kind: str
    stage: int
    microbatch: int

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The action that is written "1F3".

        Raises:
            ValueError: Text of another form.
        """
        match = re.fullmatch(rf"(\d+)([{KINDS}])(\d+)", text)
        if match is None:
            raise ValueError(
                f"{text!r} is no action: write stage, one of {', '.join(KINDS)}, micro-batch, "
                "as in '1F3'"
            )
        stage, kind, microbatch = match.groups()
        return cls(kind, int(stage), int(microbatch))


class Message(NamedTuple):
    """What one rank sends to another.

    Args:
        kind: "activation", the input of `stage`, or "gradient", that of its output.
    """

    from_rank: int
    to_rank: int
    kind: str
    stage: int
    microbatch: int


Actions = dict[int, list[Action]]


def stage_ranks(actions: Actions) -> dict[int, int]:
    """The rank of each stage, `{stage: rank}`.

    Raises:
        ValueError: A stage is on two ranks.
    """
    first_seen: dict[int, tuple[int, Action]] = {}
    for rank, order in sorted(actions.items()):
        for action in order:
            first_rank, first_action = first_seen.setdefault(action.stage, (rank, action))
            if first_rank != rank:
                raise ValueError(
                    f"stage {action.stage} is on ranks {first_rank} ({first_action}) "
                    f"and {rank} ({action}): give it one rank"
                )
    return {stage: rank for stage, (rank, _) in sorted(first_seen.items())}


def waits_for(action: Action, num_stages: int) -> list[Action]:
    """What has to be done before `action` can start; where it names an I, a B will do as well."""
    kind, stage, microbatch = action
    if kind == "F":
        if stage == 0:
            return []
        return [Action("F", stage - 1, microbatch)]
    if kind == "W":
        return [Action("I", stage, microbatch)]
    # B and I need the activations of their own forward, and the gradient from the stage after
    needs = [Action("F", stage, microbatch)]
    if stage < num_stages - 1:
        needs.append(Action("I", stage + 1, microbatch))
    return needs
