"""The schedules of a pipeline as plain data: who computes what, and in which order. No torch.

The model is cut into `num_stages` stages and the batch into `num_microbatches` micro-batches. A
schedule is `{rank: [Action, ...]}`: what each rank does, one action after the other. The
communication follows from it: the forward of a stage sends activations to the next stage, its
backward sends gradients to the stage before.

    F   forward                          needs F of the stage before
    B   full backward: I and W in one    needs its own F, and I or B of the stage after
    I   backward for the input only      needs the same; the stage before waits for it alone
    W   backward for the weights only    needs its own I; no action waits for it

    actions        Action, Message, and what an action waits for
    orders         the four schedules: gpipe, 1f1b, interleaved, zero_bubble
    simulation     when each action runs, and whether a schedule can run to its end at all
    pipeline_plan  the ticks and the messages of a schedule, worked out once for all steps of a run
"""

from labcode.schedules.actions import KINDS, Action, Actions, Message, stage_ranks, waits_for
from labcode.schedules.orders import NAMES, schedule
from labcode.schedules.pipeline_plan import (
    PipelinePlan,
    Tick,
    evaluation_plan,
    make_plan,
    messages,
    plan_pipeline,
    ticks,
)
from labcode.schedules.simulation import Span, check_schedule, simulate_order

__all__ = [
    "KINDS",
    "NAMES",
    "Action",
    "Actions",
    "Message",
    "PipelinePlan",
    "Span",
    "Tick",
    "check_schedule",
    "evaluation_plan",
    "make_plan",
    "messages",
    "plan_pipeline",
    "schedule",
    "simulate_order",
    "stage_ranks",
    "ticks",
    "waits_for",
]
