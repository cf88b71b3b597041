"""What a learner's code sends, calls and makes on a rank, and trials of it in several groups.

    run_trial(ranks, _trial, answer)      # AssertionError with the first hint of a rank

`_trial(group, answer)` runs on the ranks of each group and returns a hint, or "" where all is
right.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labcode.comm.counting import BARRIER, Collective, CollectiveSpy
from labcode.pool.ranks import Ranks
from labcode.teach.exercises.on_ranks import GROUPS, IMPORT_LIMIT_S, in_groups

MAX_CALLS = 100  # far above what any exercise needs on four ranks


class Watch(CollectiveSpy):
    """What this rank sends, calls and makes while it is active.

    A loop without an end that sends is ended: after `MAX_CALLS` calls an assertion fails.

    Attributes:
        calls: Messages and collectives, in order; no barriers.
        largest: Elements of the largest tensor that an operation has given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []
        self.largest = 0

    def on_collective(self, call: Collective, start: Callable[[], Any]) -> Any:
        if call.name == BARRIER:
            return start()
        self.calls.append(call)
        assert len(self.calls) <= MAX_CALLS, (
            f"it has made more than {MAX_CALLS} calls and goes on: does your loop end?"
        )
        return start()

    def on_operation(
        self, operation: torch._ops.OpOverload, args: tuple, kwargs: Mapping[str, Any]
    ) -> Any:
        result = operation(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result

    def count(self, name: str) -> int:
        """How many calls of one kind were made."""
        return sum(call.name == name for call in self.calls)

    def sent_bytes(self) -> int:
        """Bytes of all messages that this rank sent with `send` or `isend`."""
        return sum(call.num_bytes for call in self.calls if call.name == "send")

    def receivers(self) -> set[int]:
        """The ranks to which this one sent messages."""
        return {call.ranks[1] for call in self.calls if call.name == "send"}

    def collectives(self) -> list[str]:
        """The names of all calls that are not messages."""
        return [call.name for call in self.calls if call.name not in ("send", "recv")]


def run_trial(ranks: Ranks, trial: Callable[..., str], *args: Any) -> None:
    """Run `trial(group, *args)` on all ranks, and then on some of them.

    Args:
        ranks: Four of them.
        trial: Returns a hint, or "".
        args: What it is given besides the group.

    Raises:
        AssertionError: With the hint of the first rank that has one, and in which group it was.
    """
    # what the ranks import for the check does not count as the time of the learner's code
    ranks.run(_import, trial.__module__, limit_s=IMPORT_LIMIT_S)
    in_groups(ranks, GROUPS, _assert_no_hint, trial, *args)


def _import(module: str) -> None:
    importlib.import_module(module)


def _assert_no_hint(group: dist.ProcessGroup, trial: Callable[..., str], *args: Any) -> None:
    hint = trial(group, *args)
    assert not hint, hint


def draw(group: dist.ProcessGroup, seed: int, *shape: int) -> torch.Tensor:
    """Random numbers in float64: the same on all ranks of a group, others in another group."""
    first = min(dist.get_process_group_ranks(group))
    generator = torch.Generator().manual_seed(100 * seed + first)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def own_part(whole: torch.Tensor, group: dist.ProcessGroup, dim: int) -> torch.Tensor:
    """This rank's part along `dim`, in memory of its own."""
    return whole.chunk(group.size(), dim)[group.rank()].clone()


def far(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> bool:
    """Whether two tensors of one shape differ by more than rounding; nan is far from everything."""
    return not bool((a - b).abs().max() < tolerance)
