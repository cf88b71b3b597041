"""Our schedules as PyTorch's: actions of torch.distributed.pipelining, checked by its validator.

PyTorch writes an action as we do ("1F3"), but keeps its action class and its validator private, so
they are looked up here and nowhere else. No process group is needed.

Held by: tests/unit/test_schedules.py
"""

from typing import Any

import torch
from torch.distributed.pipelining import schedules

from labcode.schedules import Actions


def to_torch(actions: Actions) -> dict[int, list]:
    """The schedule as PyTorch's `{rank: [_Action]}`.

    It holds the computation only; PyTorch adds its own communication.
    """
    action_type = _private("_Action")
    kind_type = _private("_ComputationType")
    lowered = {}
    for rank, order in actions.items():
        lowered[rank] = [
            action_type(action.stage, kind_type(action.kind), action.microbatch) for action in order
        ]
    return lowered


def validate(actions: Actions, num_stages: int, num_microbatches: int) -> dict[int, list]:
    """Put the schedule through PyTorch's own checks and return it with sends and receives.

    Two checks: the validator of the schedule (complete, and each stage on one rank), then the pass
    that places the messages (no action waits for something that never comes).

    Raises:
        ValueError: PyTorch refuses the schedule; the first line of its reason.
    """
    orders = to_torch(actions)
    validate_schedule = _private("_validate_schedule")
    add_send_recv = _private("_add_send_recv")
    try:
        stage_to_rank = validate_schedule(orders, len(orders), num_stages, num_microbatches)
        # the pass empties the lists that it is given
        copies = {rank: list(order) for rank, order in orders.items()}
        return add_send_recv(copies, stage_to_rank=stage_to_rank.__getitem__, num_stages=num_stages)
    except (AssertionError, KeyError) as error:
        lines = str(error).splitlines() or ["no reason given"]
        raise ValueError(
            f"PyTorch refuses the schedule: {type(error).__name__}: {lines[0]}"
        ) from None


def _private(name: str) -> Any:
    try:
        return getattr(schedules, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {schedules.__name__}.{name}: "
            "use a version from 2.11 to 2.15"
        ) from None
