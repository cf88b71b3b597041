"""The first tensor of a step that is not finite is named: module, tensor, micro-batch, rank."""

import pytest
from faults.forks import train

from labcode import recipes

CHANGES = {
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 8,
    "train.global_batch": 4,
    "train.micro_batch": 1,
    "train.eval_batches": 1,
    "train.steps": 2,
}
CONFIG = recipes.with_changes(recipes.gpt_tiny(), CHANGES)


def found(changes, fault):
    """What each rank is told about one step with a `fault`: (rank, module, tensor, micro-batch).

    A product of the module gives NaN in one place, at one call; or the module's output.
    """
    import math
    from dataclasses import replace

    import torch.distributed as dist
    from trained import built

    from labcode.debug.record import Recorder

    rank = dist.get_rank()
    config = recipes.with_changes(CONFIG, changes)
    training = built(config)
    calls = []

    def plant(name, which, number):
        module = training.model.module.get_submodule(name)
        if which == "weight":
            module.weight.data.view(-1)[0] = math.nan
            return
        right = getattr(module.product, which)

        def wrong(*args):
            result = right(*args)
            if len(calls) == number:
                result = result.clone()
                result.view(-1)[0] = math.inf
            calls.append(which)
            return result

        module.product = replace(module.product, **{which: wrong})

    where, name, which, number = fault
    if rank == where:
        plant(name, which, number)
    batches = training.loader.take(0)
    recorder = Recorder(training.model)
    with recorder.step(1, batches):
        training.model.forward_backward(batches)
    finding = recorder.first_not_finite()
    training.close()
    if finding is None:
        return None
    return finding.line, finding.rank, finding.module, finding.tensor, finding.microbatch


TP = {"parallel.tp": 2}
UP = "blocks.1.mlp.up"
DOWN = "blocks.1.mlp.down"
CASES = {
    "forward on a rank of tp": (TP, (1, DOWN, "forward", 1), "own product", 1),
    "backward on a rank of tp": (TP, (1, UP, "grad_input", 2), "own gradient of the input", 2),
    "a weight's gradient on a rank of dp": (
        {"parallel.dp": 2},
        (1, UP, "grad_weight", 1),
        "gradient of the weight",
        1,
    ),
    "a weight": (TP, (1, UP, "weight", 0), "weight, its value before the step,", None),
    "behind a pipeline": (
        {"parallel.pp": 2, "parallel.pipeline_schedule": "gpipe"},
        (1, UP, "grad_input", 1),
        "own gradient of the input",
        1,
    ),
    "with sequence parallelism": (
        TP | {"parallel.sequence_parallel": True},
        (1, DOWN, "forward", 0),
        "own product",
        0,
    ),
    # of the calls the first and the second are micro-batch 0, in forward and once more in backward
    "with activation checkpointing": (
        {"parallel.dp": 2, "parallel.activation_checkpointing": "full"},
        (1, DOWN, "forward", 2),
        "own product",
        1,
    ),
    "with ZeRO-3": (
        {"parallel.zero_stage": 3, "parallel.data_parallel": "labcode"},
        (1, UP, "grad_input", 0),
        "own gradient of the input",
        0,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_name_the_same_tensor(ranks2, case):
    changes, fault, tensor, microbatch = CASES[case]
    first, second = ranks2.run(found, changes, fault)
    assert first == second
    line, rank, module, what, number = first
    assert (rank, module, what, number) == (1, fault[1], tensor, microbatch)
    assert line.startswith(f"the first tensor that is not finite: {tensor} of {fault[1]} (rank 1")


def test_four_ranks_name_the_one_of_four_and_what_went_in(ranks4):
    changes = {"parallel.dp": 2, "parallel.tp": 2}
    answers = ranks4.run(found, changes, (3, DOWN, "forward", 1))
    assert answers == answers[:1] * 4
    line, rank, module, tensor, microbatch = answers[0]
    assert (rank, module, tensor, microbatch) == (3, DOWN, "own product", 1)
    assert "1 of 128 values; into it went input: amax " in line
    assert line.endswith(", 0 % not finite")


def test_a_healthy_step_has_none(ranks2):
    assert ranks2.run(found, TP, (5, UP, "forward", 0)) == [None, None]


def break_at_step_2():
    """A weight of rank 1 is lost before step 2."""
    import math
    import os

    from labcode.train.step import TrainStep

    step = TrainStep.__call__

    def broken(self):
        training = self.training
        if training.steps_done == 1 and os.environ["RANK"] == "1":
            training.model.module.get_submodule(DOWN).weight.data[0, 0] = math.nan
        return step(self)

    TrainStep.__call__ = broken


def test_a_training_names_the_tensor_and_stops(tmp_path):
    args = ["gpt_tiny", "--parallel.tp", "2", "--debug.probe", "--train.out", "run"]
    for name, value in CHANGES.items():
        args += [f"--{name}", str(value)]
    done = train(args, cwd=tmp_path, ranks=2, patch=break_at_step_2)
    assert set(done.codes) != {0}
    told = [line for line in done.out[0].splitlines() if "the first tensor" in line]
    place = f"weight, its value before the step, of {DOWN} (rank 1), 1 of 512 values"
    assert len(told) == 1
    assert f"step 2: the first tensor that is not finite: {place}" in told[0]
    assert "the gradient norm is nan" in done.errors[0]
