"""What makes a run faster or smaller, and what each of it cannot be combined with."""

import pytest
import torch

from labcode import recipes
from labcode.config import TrainConfig
from labcode.runtime import combinations
from labcode.train.precision import check_device

BLOCK = {"train.compile": "block"}
MODEL = {"train.compile": "model"}
GRAPHS = {"train.cuda_graphs": True}
SELECTIVE = {"parallel.activation_checkpointing": "selective"}
FULL = {"parallel.activation_checkpointing": "full"}
ZERO_3 = {"parallel.zero_stage": 3}
OURS = {"parallel.data_parallel": "labcode"}


def config(*changes):
    made = {"model.vocab_size": 84}
    for change in changes:
        made |= change
    return recipes.with_changes(recipes.gpt_tiny(), made)


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ((BLOCK, {"parallel.tp": 2}), 2, "train.compile=block with pp 1, cp 1, tp 2: the collect"),
        ((MODEL, {"parallel.cp": 2}), 2, "train.compile=model with pp 1, cp 2, tp 1: the collect"),
        ((BLOCK, {"parallel.pp": 2}), 2, "train.compile=block with pp 2, cp 1, tp 1: the collect"),
        ((BLOCK, SELECTIVE), 1, "train.compile=block with parallel.activation_checkpointing=selec"),
        ((MODEL, SELECTIVE), 1, "train.compile=model with parallel.activation_checkpointing=selec"),
        ((MODEL, FULL), 1, "train.compile=model with parallel.activation_checkpointing=full, whic"),
        ((MODEL, ZERO_3, OURS), 2, "train.compile=model with parallel.zero_stage=3 by labcode, w"),
        ((GRAPHS,), 2, "train.cuda_graphs with 2 ranks: the graph is that of one rank, start one"),
        ((GRAPHS, BLOCK), 1, "train.cuda_graphs with train.compile=block: choose one of them"),
        ((GRAPHS, FULL), 1, "train.cuda_graphs with parallel.activation_checkpointing=full, which"),
        ((GRAPHS, {"model.dropout": 0.1}), 1, "train.cuda_graphs with model.dropout=0.1, whose r"),
        ((GRAPHS, ZERO_3), 1, "train.cuda_graphs with parallel.zero_stage=3: there is nothing to"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes, ranks, words):
    with pytest.raises(ValueError, match=r"^train\.") as found:
        combinations.check(config(*changes), ranks)
    assert str(found.value).startswith(words)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("changes", "ranks"),
    [
        ((BLOCK,), 1),
        ((MODEL,), 4),
        ((BLOCK, FULL), 2),
        ((BLOCK, ZERO_3, OURS), 2),
        ((BLOCK, {"train.dtype": "float16", "train.reduce_dtype": "float16"}), 2),
        ((GRAPHS,), 1),
        ((GRAPHS, {"train.micro_batch": 1, "train.dtype": "float16"}), 1),
        ((SELECTIVE, {"parallel.tp": 2, "model.dropout": 0.1}), 2),
        (({"optim.implementation": "for_loop"}, ZERO_3), 2),
    ],
)
def test_what_goes_together_is_let_through(changes, ranks):
    combinations.check(config(*changes), ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "tf32"}, r"^train\.dtype=tf32 on a cpu: only GPUs have TF32, use --train"),
        (
            {"cuda_graphs": True},
            r"^train\.cuda_graphs on a cpu: only GPUs have CUDA graphs, leave ",
        ),
    ],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(settings, message):
    with pytest.raises(ValueError, match=message):
        check_device(TrainConfig(**settings), torch.device("cpu"))
