"""torch.distributed's tables of groups, one set for each rank.

What is touched of torch, all of it alike in 2.11 to 2.14: `distributed_c10d._world` and
`_new_process_group_helper`, the methods that torch calls of `ProcessGroup` and `Work`,
`_register_process_group` and the isolation of threads in its C++ table, and `Future.wait`.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle.cloudpickle as pickle
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from course.exercises.simulated import baton
from course.exercises.simulated.baton import Rank
from course.exercises.simulated.events import Event, Mismatch
from course.exercises.simulated.group import Group
from course.pool import wire

c10d: Any = _distributed_c10d  # whose types do not say all that it has


class _Worlds:
    """Stands for `distributed_c10d._world`: in the thread of a rank it is that rank's own."""

    def __init__(self, plain: Any) -> None:
        self.__dict__["_plain"] = plain

    def _own(self) -> Any:
        rank = baton.current()
        return self.__dict__["_plain"] if rank is None else rank.world

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._own(), name, value)


def join_world(rank: Rank) -> None:
    """Give a rank the group of all."""
    _join(rank, tuple(range(len(rank.run.ranks))), "0", "default_pg")


def _join(rank: Rank, ranks: tuple[int, ...], name: str, desc: str) -> Group:
    """Make a group for a rank, and enter it where torch looks for it."""
    group = Group(rank, ranks, name, desc)
    world = rank.world
    world.pg_map[group] = ("gloo", rank.run.store)
    world.pg_names[group] = name
    world.pg_backend_config[group] = "cpu:gloo"
    world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    world.pg_to_tag[group] = f"ptd:{name}"
    for tag in ("", f"ptd:{name}"):
        world.tags_to_pg.setdefault(tag, []).append(group)
    c10d._register_process_group(name, group)
    world.default_pg = world.default_pg or group
    return group


def _new_group(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In place of `_new_process_group_helper`, which connects the ranks of a group."""
    rank = baton.current()
    if rank is None:
        return plain(*args, **kwargs)
    ranks = tuple(args[2])
    name = args[5]
    at = rank.run.tick()
    event = Event("new_group", rank.number, at, rank.in_block, baton.where(), ranks, name)
    rank.made.append(event)
    if name.isdigit():  # made by all ranks of the world; other names are those of the members
        _check_order(rank, ranks)
    if rank.number not in ranks:
        return dist.GroupMember.NON_GROUP_MEMBER, None
    return _join(rank, ranks, name, kwargs.get("group_desc") or "undefined"), rank.run.store


def _check_order(rank: Rank, ranks: tuple[int, ...]) -> None:
    """All ranks make the same groups in the same order."""
    made = rank.run.made
    if rank.num_groups == len(made):
        made.append(ranks)
    if made[rank.num_groups] != ranks:
        raise Mismatch(
            f"rank {rank.number} makes a group of {list(ranks)} where another rank has made one of "
            f"{list(made[rank.num_groups])} ({baton.where()})"
        )
    rank.num_groups += 1


def _wait_for_future(plain: Callable[..., Any], future: Any) -> Any:
    """In place of `Future.wait`, which blocks in C++ and would keep the baton."""
    rank = baton.current()
    if rank is not None:
        rank.wait_for_future(future)
    return plain(future)


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Within it the threads of ranks find their own groups; all others find what was there."""
    torch_side: Any = distributed_c10d
    future: Any = torch._C.Future
    world = torch_side._world
    helper = torch_side._new_process_group_helper
    wait = future.wait
    own = baton.own_state()
    torch_side._world = _Worlds(world)
    torch_side._new_process_group_helper = functools.partial(_new_group, helper)
    future.wait = lambda self: _wait_for_future(wait, self)
    c10d._set_thread_isolation_mode(True)
    try:
        yield
    finally:
        c10d._set_thread_isolation_mode(False)
        torch_side._world = world
        torch_side._new_process_group_helper = helper
        future.wait = wait
        baton.set_own_state(own)


def copies(size: int, fn: Callable[..., Any], args: tuple) -> list[Callable[[], Any]]:
    """The call as each rank gets it: with functions, classes and tensors of its own.

    cloudpickle gives a class of a notebook back as the one that it knows already; ranks must not
    share what is written into it, so its memory is put aside.
    """
    packed = wire.pack_call(fn, args, {})
    known = pickle._DYNAMIC_CLASS_TRACKER_BY_ID
    calls = []
    try:
        for rank in range(size):
            pickle._DYNAMIC_CLASS_TRACKER_BY_ID = weakref.WeakValueDictionary()
            own_fn, own_args, _ = wire.loads(packed)
            calls.append(functools.partial(own_fn, rank, *own_args))
    finally:
        pickle._DYNAMIC_CLASS_TRACKER_BY_ID = known
    return calls
