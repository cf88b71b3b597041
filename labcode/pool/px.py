"""`%%px` on a pool of ranks: ipyparallel's magic with the pool's care around it."""

import weakref
from typing import Any

from ipyparallel.client.magics import ParallelMagics

from labcode.pool.answers import print_outputs


class PxMagics(ParallelMagics):
    """`%%px`, `%px` and their options.

    Checks come before, outputs in rank order and at most one error after.

    Args:
        shell: The notebook's IPython shell.
        pool: The `Ranks` whose processes run the cells; it keeps `.view` up to date.
    """

    def __init__(self, shell: Any, pool: Any) -> None:
        super().__init__(shell, view=None)
        self.view: Any = None  # of all engines of the pool
        self.shell: Any = shell
        self._pool = weakref.ref(pool)

    def parallel_execute(
        self,
        cell: str,
        block: bool | None = None,
        groupby: str = "type",
        save_name: str | None = None,
        **_: Any,
    ) -> Any:
        """Run `cell` on the ranks and wait; with block=False return ipyparallel's reply."""
        pool = self._pool()
        if pool is None:
            raise RuntimeError("the pool of ranks is gone: make a new one with Ranks(n)")
        with pool._turn:
            return self._execute(pool, cell, block, groupby, save_name)

    def _execute(
        self, pool: Any, cell: str, block: bool | None, groupby: str, save_name: str | None
    ) -> Any:
        pool._ready()
        pool._ran_cells = True
        reply = self.view.execute(cell, silent=False, block=False)
        self.last_result = reply
        if save_name:
            self.shell.user_ns[save_name] = reply
        if block is None:
            block = self.view.block
        if not block:
            return reply
        try:
            pool._wait(reply)
        finally:
            _show(reply, groupby)
        pool._raise(reply)
        return None


def _show(reply: Any, groupby: str) -> None:
    """Show what the ranks printed, labelled as by `Ranks.run`, then their pictures and results."""
    complete = reply.ready() and reply.wait_for_output(10)  # text may arrive after the reply
    records = reply.metadata
    if isinstance(records, dict):  # of one target; of several a list
        records = [records]
    printed = {}
    for index, record in enumerate(records):
        rank = index if record["engine_id"] is None else record["engine_id"]
        printed[rank] = {"out": record["stdout"], "err": record["stderr"]}
        record["stdout"] = ""
        record["stderr"] = ""
    print_outputs(printed)
    if complete:
        reply.display_outputs(groupby)
