"""Pipeline parallelism written out: one short runner that executes any schedule.

The layers are cut into stages, one or several on each rank of a group; a batch is cut into micro-batches. A stage hands
its output to the next one and gets the gradient of it back. Which rank does what in which order is data
(`labcode.schedules`), and so is what travels: every rank computes the same table of ticks, and after tick t it sends what
others wait for of that tick's results and begins to receive what it will need itself. Both ends of a message so agree on
its place in the order, whatever the schedule is, and nothing can wait in a circle.

Source: Huang et al. 2018 (arXiv:1811.06965) and Narayanan et al. 2021 (arXiv:2104.04473), section 2, for the schedules.
Held by: tests/ranks/test_pipeline.py
"""

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from labcode.parallel.deferred import WeightGradients, finish
from labcode.schedules import Action, check_schedule, messages, ticks


class StageError(RuntimeError):
    """A stage failed; the message says which one, at what, and why."""


class Pipeline:
    """This rank's stages, and the order in which it runs them.

    A stage is called `stage(x, inputs)`: x is the output of the stage before (None for the first), inputs the micro-batch
    as the data gives it.

    Communicates: for each micro-batch and each boundary between two ranks one message forward and one backward, each of
        the size of `boundary`.

    Args:
        stages: {number: module} of this rank.
        schedule: {rank: [Action]} of all ranks of the group, from `labcode.schedules.schedule` or written by hand.
        num_stages, num_microbatches: Of the whole pipeline.
        group: The ranks of the pipeline, in order.
        loss: `loss(output, targets) -> scalar` of one micro-batch, called on the last stage.
        boundary: `boundary(inputs) -> tensor` of the shape, dtype and device of what a stage hands on; its values are
            overwritten.
        recorded: A list into which (action, start, stop), in seconds, is written for each action; None: none. It starts when
            its input is there: the time in which a rank waits for another one lies between two actions.

    Raises:
        ValueError: The schedule is wrong: it would hang, or leave something out.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Mapping[int, Sequence[Action]],
        num_stages: int,
        num_microbatches: int,
        group: dist.ProcessGroup,
        loss: Callable,
        boundary: Callable,
        recorded: list[tuple[Action, float, float]] | None = None,
    ):
        check_schedule(schedule, num_stages, num_microbatches)
        self.stages, self.schedule, self.num_stages, self.group = (
            stages,
            schedule,
            num_stages,
            group,
        )
        self.num_microbatches, self.loss, self.boundary, self.recorded = (
            num_microbatches,
            loss,
            boundary,
            recorded,
        )
        self.store = WeightGradients()
        split = any(action.kind == "W" for actions in schedule.values() for action in actions)
        self._watching = self.store.watching if split else contextlib.nullcontext
        self._run = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
        }

    def step(self, inputs: Sequence, targets: Sequence) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are added to `.grad`.

        Args:
            inputs, targets: One entry per micro-batch; every rank has them, though only some stages look at them.

        Returns:
            The mean loss of the micro-batches on the rank of the last stage, 0 on the others.

        Raises:
            StageError: An action failed on this rank.
        """
        self._play(self.schedule, inputs, targets)
        assert not self._live and not self._waiting, "the schedule left work behind"
        return self._losses.sum() / self.num_microbatches

    @torch.no_grad()
    def evaluate(self, inputs: Sequence, targets: Sequence) -> torch.Tensor:
        """The loss of each micro-batch without gradients, [micro-batches]; 0 on ranks that do not have the last stage."""
        homes = {stage: rank for rank, actions in self.schedule.items() for _, stage, _ in actions}
        forward = {rank: [] for rank in self.schedule}
        for number in range(len(inputs)):
            for stage, rank in sorted(homes.items()):
                forward[rank].append(Action("F", stage, number))
        self._play(forward, inputs, targets)
        return self._losses

    def _play(self, schedule, inputs, targets):
        self.inputs, self.targets = inputs, targets
        self._live, self._waiting = (
            {},
            {},
        )  # by (stage, micro-batch): input and output; products that are left undone
        self._ready, self._arriving, self._leaving = (
            {},
            {},
            [],
        )  # by (kind, stage, micro-batch); sends under way
        self._losses = torch.zeros(
            len(inputs), dtype=torch.float64, device=self.boundary(inputs[0]).device
        )
        table = ticks(schedule, self.num_stages)
        for action, due in zip(table[self.group.rank()], messages(table, self.num_stages)):
            if action is not None:
                self._act(action)
            self._exchange(due)
        for work, _ in self._leaving:
            work.wait()

    def _act(self, action):
        self._since = time.perf_counter()
        try:
            self._run[action.kind](action.stage, action.microbatch)
        except Exception as error:
            raise StageError(
                f"stage {action.stage} failed at {action}: {type(error).__name__}: {error}"
            ) from error
        if self.recorded is not None:
            if self._losses.is_cuda:
                torch.cuda.synchronize()  # or the clock would stop when the work is queued, not when it is done
            self.recorded.append((action, self._since, time.perf_counter()))

    def _forward(self, stage, number):
        x = None if stage == 0 else self._take("activation", stage, number)
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_()
        with self._watching():
            y = self.stages[stage](x, self.inputs[number])
            if stage == self.num_stages - 1:
                y = self.loss(y, self.targets[number])
                self._losses[number] = y.detach()
            else:
                self._ready["activation", stage + 1, number] = y.detach().contiguous()
        if torch.is_grad_enabled():
            self._live[stage, number] = x, y

    def _backward(self, stage, number):
        x, y = self._live.pop((stage, number))
        if stage == self.num_stages - 1:
            (y / self.num_microbatches).backward()
        else:
            torch.autograd.backward(y, self._take("gradient", stage, number))
        if stage > 0:
            self._ready["gradient", stage - 1, number] = x.grad.contiguous()

    def _backward_input(self, stage, number):
        with self.store.later() as self._waiting[stage, number]:
            self._backward(stage, number)

    def _backward_weight(self, stage, number):
        finish(self._waiting.pop((stage, number)))

    def _take(self, *what):
        """A tensor that a stage needs: from another rank, or from a stage of this one."""
        if what in self._arriving:
            work, tensor = self._arriving.pop(what)
            work.wait()
            self._since = time.perf_counter()
            return tensor
        return self._ready.pop(what)

    def _exchange(self, due):
        """Begin to send and receive what belongs to this tick; nothing is waited for here."""
        me, operations, received = self.group.rank(), [], []
        for source, to, *what in due:
            if source == me:
                operations.append(
                    dist.P2POp(
                        dist.isend, self._ready.pop(tuple(what)), group=self.group, group_peer=to
                    )
                )
            elif to == me:
                received.append((len(operations), tuple(what)))
                buffer = self.boundary(self.inputs[what[-1]])
                operations.append(
                    dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source)
                )
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):  # NCCL makes one of them all
            works = works * len(operations)
        for place, what in received:
            self._arriving[what] = works[place], operations[place].tensor
        self._leaving = [
            (work, tensor) for work, tensor in self._leaving if not work.is_completed()
        ]
        self._leaving += [
            (work, op.tensor) for work, op in zip(works, operations) if op.op is dist.isend
        ]
