"""Our schedules in PyTorch's words: the actions of torch.distributed.pipelining, its validator, and the way back.

PyTorch writes an action as we do ("1F3"), but keeps its action class and its validator private, so they are looked up here
and nowhere else. No process is needed.

Held by: tests/unit/test_schedules.py
"""

import torch
from torch.distributed.pipelining import schedules

from labcode.schedules import KINDS, Action, Actions


def to_torch(actions: Actions) -> dict[int, list]:
    """The schedule as PyTorch's `{rank: [_Action]}`, computation only; PyTorch adds its own communication."""
    action_type, kind_type = _private("_Action"), _private("_ComputationType")
    return {
        rank: [
            action_type(action.stage, kind_type(action.kind), action.microbatch) for action in order
        ]
        for rank, order in actions.items()
    }


def from_torch(orders: dict[int, list]) -> Actions:
    """The computation in a schedule of PyTorch's; its gaps (None), messages, and actions of FSDP are left out.

    A forward and a backward that it runs overlapped become two actions, one after the other.
    """
    return {
        rank: [_ours(part) for action in order for part in _computation(action)]
        for rank, order in orders.items()
    }


def validate(actions: Actions, num_stages: int, num_microbatches: int) -> dict[int, list]:
    """Puts the schedule through PyTorch's own checks and returns it as PyTorch would run it, with sends and receives.

    First the validator of the schedule (complete, and each stage on one rank), then the pass that places the messages (no
    action waits for something that never comes).

    Raises:
        ValueError: PyTorch refuses the schedule; the first line of its reason.
    """
    orders = to_torch(actions)
    try:
        home = _private("_validate_schedule")(orders, len(orders), num_stages, num_microbatches)
        # the pass empties the lists that it is given
        copies = {rank: list(order) for rank, order in orders.items()}
        return _private("_add_send_recv")(
            copies, stage_to_rank=home.__getitem__, num_stages=num_stages
        )
    except (AssertionError, KeyError) as error:
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ValueError(
            f"PyTorch refuses the schedule: {type(error).__name__}: {reason}"
        ) from None


def _computation(action):
    """The actions in PyTorch's `action` that compute something: none, itself, or the parts of an overlapped one."""
    if action is None:
        return []
    parts = getattr(action, "sub_actions", None)
    if parts:
        return [part for action in parts for part in _computation(action)]
    return [action] if action.computation_type.value in tuple(KINDS) else []


def _ours(action):
    return Action(action.computation_type.value, action.stage_index, action.microbatch_index)


def _private(name):
    try:
        return getattr(schedules, name)
    except AttributeError:
        raise RuntimeError(
            f"torch {torch.__version__} has no {schedules.__name__}.{name}: use a version from 2.11 to 2.15"
        ) from None
