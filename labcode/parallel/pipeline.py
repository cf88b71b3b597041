"""Pipeline parallelism written out: one short runner that executes any schedule.

The layers are cut into stages, one or several on each rank of a group; a batch is cut into
micro-batches. A stage hands its output to the next one and gets the gradient of it back. Which rank
does what in which order is data (`labcode.schedules`), and so is what travels: every rank works out
the same table of ticks, and after tick t it sends what others wait for of that tick's results and
begins to receive what it will need itself. Both ends of a message so agree on its place in the
order, whatever the schedule is, and no ranks can wait for each other in a circle.

The first ticks of rank 1 of 3, with 1F1B and two micro-batches (`PipelinePlan.programs[1]`):

    tick   computes   then begins to receive          and to send
    0      -          input of 1F0, from rank 0       -
    1      1F0        input of 1F1, from rank 0       output of 1F0, to rank 2
    2      1F1        -                               output of 1F1, to rank 2
    3      -          gradient for 1B0, from rank 2   -
    4      1B0        -                               gradient for 0B0, to rank 0

Source: Huang et al. 2018 (arXiv:1811.06965) and Narayanan et al. 2021 (arXiv:2104.04473), section
    2, for the schedules.
Held by: tests/ranks/test_pipeline.py
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

from labcode.parallel.deferred import DeferredGradient, WeightGradientStore, finish
from labcode.schedules import Action, Message, PipelinePlan, evaluation_plan

Stage = Callable[[torch.Tensor | None, torch.Tensor], torch.Tensor]
OnAction = Callable[[Action, float, float], None]
Ranges = Callable[[str], AbstractContextManager]  # names what runs in its block


def unnamed(part: str) -> AbstractContextManager:
    """The `Ranges` of a step whose parts are not named."""
    return contextlib.nullcontext()


class StageError(RuntimeError):
    """A stage failed; the message says which one, at what, and why."""


class Pipeline:
    """This rank's stages, and the order in which it runs them.

    A stage is called `stage(x, inputs)`: x is the output of the stage before (None for the first),
    inputs the micro-batch as the data gives it.

    Communicates: for each micro-batch and each boundary between two ranks one message forward and
        one backward, each of the size of `boundary`.

    Args:
        stages: This rank's stages, `{number: stage}`.
        plan: The plan of the whole pipeline, from `labcode.schedules.plan_pipeline`, or from
            `make_plan` for a schedule written by hand. It was checked when it was made, and is used
            at every step.
        group: The ranks of the pipeline, in order.
        loss: `loss(output, targets) -> scalar` of one micro-batch, called on the last stage.
        boundary: `boundary(inputs) -> tensor` of the shape, dtype and device of what a stage hands
            on; its values are overwritten.
    """

    def __init__(
        self,
        stages: Mapping[int, Stage],
        plan: PipelinePlan,
        group: dist.ProcessGroup,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        boundary: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.stages = stages
        self.plan = plan
        self.group = group
        self.loss = loss
        self.boundary = boundary
        self.store = WeightGradientStore()

    def step(
        self,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | float] | None = None,
        on_action: OnAction | None = None,
        ranges: Ranges = unnamed,
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients are added to `.grad`.

        Args:
            inputs, targets: One entry per micro-batch; every rank has them, though only some stages
                look at them.
            weights: What the loss of each micro-batch counts; None: 1/m each.
            on_action: Called as `on_action(action, started_s, stopped_s)` after each action, with
                times of `time.perf_counter`. An action starts when its input is there: the time in
                which a rank waits for another one lies between two actions.
            ranges: Named forward, backward and communication, the last when a rank waits for a
                message or begins to send one.

        Returns:
            The mean loss of the micro-batches on the rank of the last stage, 0 on the others.

        Raises:
            StageError: An action failed on this rank.
        """
        if weights is None:
            weights = [1 / self.plan.num_microbatches] * self.plan.num_microbatches
        run = _Run(self, self.plan, inputs, targets, weights, on_action, ranges)
        run.all_ticks()
        run.require_nothing_left()
        # Zeros on all ranks but the last stage's, so that a sum over pp gives the loss to everyone.
        total = torch.zeros((), dtype=torch.float64, device=run.losses.device)
        for value, weight in zip(run.losses, weights):
            total += value * weight
        return total

    @torch.no_grad()
    def evaluate(
        self, inputs: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """The loss of each micro-batch without gradients.

        Returns:
            [micro-batches] float64; 0 on ranks that do not have the last stage.
        """
        plan = evaluation_plan(self.plan.stage_ranks, len(inputs))
        run = _Run(self, plan, inputs, targets, weights=None, on_action=None)
        run.all_ticks()
        return run.losses


class _Run:
    """One pass of some micro-batches through a pipeline, and all that is under way in it.

    Attributes:
        losses: [micro-batches] float64.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        plan: PipelinePlan,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        weights: Sequence[torch.Tensor | float] | None,
        on_action: OnAction | None,
        ranges: Ranges = unnamed,
    ) -> None:
        self.pipeline = pipeline
        self.plan = plan
        self.inputs = inputs
        self.targets = targets
        self.weights = weights
        self.on_action = on_action
        self.ranges = ranges
        self.rank = pipeline.group.rank()
        device = pipeline.boundary(inputs[0]).device
        self.losses = torch.zeros(len(inputs), dtype=torch.float64, device=device)
        # by (stage, micro-batch): input and output of a forward whose backward is still to come.
        # The output holds the graph, and so all activations of the stage: what 1F1B bounds is the
        # length of this dict.
        self._live: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        # by (stage, micro-batch): gradients of weights that an I has left to its W
        self._deferred: dict[tuple[int, int], list[DeferredGradient]] = {}
        # by (what it is, stage that needs it, micro-batch): tensors made here, and on their way
        self._ready: dict[tuple[str, int, int], torch.Tensor] = {}
        self._arriving: dict[tuple[str, int, int], tuple[dist.Work, torch.Tensor]] = {}
        # sends under way, the oldest first; the memory must not be used for anything else before
        # the bytes have left
        self._leaving: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._started_s = 0.0

    def all_ticks(self) -> None:
        """Run this rank's program to its end."""
        for action, due in self.plan.programs[self.rank]:
            if action is not None:
                with self.ranges("forward" if action.kind == "F" else "backward"):
                    self._act(action)
            with self.ranges("communication"):
                self._exchange(due)
        with self.ranges("communication"):
            self._let_go_of_sent(but_for=0)

    def require_nothing_left(self) -> None:
        """Check that every forward had its backward, and every I its W."""
        assert not self._live, f"no backward for {sorted(self._live)}"
        assert not self._deferred, f"no W for {sorted(self._deferred)}"

    def _act(self, action: Action) -> None:
        # Kept in self, these bound methods would be a reference cycle: the tensors of a step would
        # stay until Python's garbage collector runs, instead of going with the last reference.
        actions = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_input,
            "W": self._backward_weight,
        }
        self._started_s = time.perf_counter()
        try:
            actions[action.kind](action.stage, action.microbatch)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise StageError(f"stage {action.stage} failed at {action}: {reason}") from error
        if self.on_action is not None:
            if self.losses.is_cuda:
                # Or the clock would stop when the work is queued, not when it is done. It costs
                # the overlap of actions, and is paid only by those who ask for times.
                torch.cuda.synchronize()
            self.on_action(action, self._started_s, time.perf_counter())

    def _forward(self, stage: int, number: int) -> None:
        x = None
        if stage > 0:
            x = self._take("activation", stage, number)
            if torch.is_grad_enabled():
                # A leaf of this rank's graph: backward leaves its gradient in x.grad, which is the
                # message to the stage before.
                x.requires_grad_()
        with self._watching():
            y = self.pipeline.stages[stage](x, self.inputs[number])
            if self._is_last(stage):
                y = self.pipeline.loss(y, self.targets[number])
        if self._is_last(stage):
            self.losses[number] = y.detach()
        else:
            # The detached tensor shares the memory of y, which stays in `_live` until the backward.
            # Backward needs the graph of y and not its values, so Megatron-LM can free them after
            # the send (`deallocate_pipeline_outputs`). That would save one boundary tensor for each
            # micro-batch under way, and needs a call of autograd's engine that skips its checks.
            self._ready["activation", stage + 1, number] = y.detach().contiguous()
        if torch.is_grad_enabled():
            self._live[stage, number] = (x, y)

    def _backward(self, stage: int, number: int) -> None:
        x, y = self._live.pop((stage, number))  # with y the activations go at the end of this call
        if self._is_last(stage):
            assert self.weights is not None
            (y * self.weights[number]).backward()
        else:
            # Taken in any case: the message belongs to the plan, whose ticks count on it.
            gradient = self._take("gradient", stage, number)
            if y.requires_grad:  # only a first stage that is frozen as a whole has a y without
                torch.autograd.backward(y, gradient)
        if x is not None:
            # x asked for it itself, so it is there even if no weight of this stage is trained.
            assert x.grad is not None
            self._ready["gradient", stage - 1, number] = x.grad.contiguous()

    def _backward_input(self, stage: int, number: int) -> None:
        # The same backward. The linear layers hand their dW to the store instead of computing it,
        # each with the two matrices that it needs, which therefore stay until W.
        with self.pipeline.store.later() as deferred:
            self._backward(stage, number)
        self._deferred[stage, number] = deferred

    def _backward_weight(self, stage: int, number: int) -> None:
        finish(self._deferred.pop((stage, number)))

    def _is_last(self, stage: int) -> bool:
        return stage == self.plan.num_stages - 1

    def _watching(self) -> AbstractContextManager:
        """Around a forward: with a schedule that splits the backward, dW can be put off."""
        if self.plan.splits_backward:
            return self.pipeline.store.watching()
        return contextlib.nullcontext()

    def _take(self, kind: str, stage: int, number: int) -> torch.Tensor:
        """A tensor that a stage needs: from another rank, or from a stage of this one."""
        what = (kind, stage, number)
        if what not in self._arriving:
            return self._ready.pop(what)  # made by another stage of this rank: nothing was sent
        work, tensor = self._arriving.pop(what)
        with self.ranges("communication"):
            work.wait()
        self._started_s = time.perf_counter()  # the action starts when its input is there
        return tensor

    def _exchange(self, due: Sequence[Message]) -> None:
        """Begin to send and receive what belongs to this tick; none of it is waited for here."""
        operations = []
        received = []  # (place in operations, what it is)
        for message in due:
            what = (message.kind, message.stage, message.microbatch)
            if message.from_rank == self.rank:
                operations.append(self._send(what, message.to_rank))
            elif message.to_rank == self.rank:
                received.append((len(operations), what))
                operations.append(self._receive(what, message.from_rank))
        if not operations:
            return
        # One batch, so that NCCL starts the messages of a tick together: one by one, two ranks that
        # send to each other could each wait for the other's receive. Not all ranks of the group
        # take part in a tick, which NCCL allows only when its communicator exists already. It does:
        # `bootstrap` names the device, and so groups are connected when they are made.
        works = dist.batch_isend_irecv(operations)
        if len(works) < len(operations):
            works = works * len(operations)  # NCCL makes one work of them all
        for place, what in received:
            self._arriving[what] = (works[place], operations[place].tensor)
        for work, operation in zip(works, operations):
            if operation.op is dist.isend:
                self._leaving.append((work, operation.tensor))
        self._let_go_of_sent(but_for=2 * self.pipeline.group.size())

    def _send(self, what: tuple[str, int, int], to_rank: int) -> dist.P2POp:
        tensor = self._ready.pop(what)
        return dist.P2POp(dist.isend, tensor, group=self.pipeline.group, group_peer=to_rank)

    def _receive(self, what: tuple[str, int, int], from_rank: int) -> dist.P2POp:
        _, _, number = what
        # A buffer for each message, not one for each link: several wait here for their turn.
        buffer = self.pipeline.boundary(self.inputs[number])
        return dist.P2POp(dist.irecv, buffer, group=self.pipeline.group, group_peer=from_rank)

    def _let_go_of_sent(self, but_for: int) -> None:
        """Wait for all sends but the latest, and free what they have sent.

        With 2p left out, no ranks wait for each other in a circle. A rank sends once in a tick, so
        the send that it waits for is of an earlier tick. The other end begins to receive at the end
        of that tick, whatever happens in later ones. In all schedules but GPipe, whose first ranks
        run ahead, the message has arrived already: this rank has received what came after it.

        Held by: tests/ranks/test_pipeline.py::test_sent_tensors_are_let_go_of_within_a_step,
            tests/unit/test_schedules.py::test_all_but_the_last_messages_of_a_rank_have_arrived
        """
        # only wait() tells: with gloo the is_completed() of a send stays false before it
        while len(self._leaving) > but_for:
            work, _ = self._leaving.popleft()
            work.wait()
