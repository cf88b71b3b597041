"""A task: what is trained on what, and what it shows at the end, for texts of every kind."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from labcode import recipes
from labcode.models.vit import loss as vit_loss
from labcode.train.tasks import make_task

SMALL = {
    "model.num_layers": 1,
    "model.hidden_size": 8,
    "model.num_heads": 2,
    "model.context_length": 16,
    "train.global_batch": 4,
}


def text_task(tmp_path, content, **changes):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    paths = {"data.path": str(path), "data.cache_dir": str(tmp_path / "cache")}
    return make_task(recipes.with_changes(recipes.gpt_tiny(), SMALL | paths | changes))


def never(model, tokens):
    raise AssertionError("nothing is drawn where nothing is asked for")


@pytest.mark.parametrize(
    ("content", "begins"),
    [
        (b"abcdefgh " * 100, "a"),  # no line break at all
        (b"zabc\r" * 100, "z"),  # those of old Macs
        (b"a" * 1000, "a"),
        (b"one\ntwo\n" * 100, ""),  # the line break that it begins with is not shown
    ],
)
def test_a_sample_begins_with_a_line_break_or_as_the_text_does(tmp_path, content, begins):
    task = text_task(tmp_path, content)
    sample = task.finish(task.build(), 5, 0)
    assert sample.startswith(begins) and set(sample) <= set(content.decode()) | set("<|endoftext>")


def test_a_sample_of_byte_pairs_needs_no_line_break(tmp_path):
    bpe = {"data.tokenizer": "bpe", "data.bpe_vocab_size": 300}
    task = text_task(tmp_path, b"abcdefgh " * 300, **bpe)
    assert task.finish(task.build(), 5, 0)


def test_no_sample_of_no_tokens(tmp_path, monkeypatch):
    task = text_task(tmp_path, b"abcdefgh " * 100)
    model = task.build()
    monkeypatch.setattr(type(model), "forward", never)
    assert task.finish(model, 0, 0) == ""


def test_data_that_does_not_fill_a_batch_is_refused_before_there_is_a_model(tmp_path):
    with pytest.raises(
        ValueError, match=r"^50 samples do not fill one global batch of 51: "
    ) as error:
        text_task(tmp_path, b"abcdefgh " * 100, **{"train.global_batch": 51})
    assert "a smaller train.global_batch" in str(error.value)


def test_the_data_of_a_task_has_a_name(tmp_path):
    one = text_task(tmp_path, b"abcdefgh " * 100).data_sha256
    other = text_task(tmp_path, b"abcdefgi " * 100).data_sha256
    assert len(one) == len(other) == 64 and one != other
    assert len(make_task(recipes.vit_tiny()).data_sha256) == 64


class _Half(nn.Module):
    """Predicts half of today."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, state):
        return self.scale * state[:, :4]


def test_the_skill_table_adds_up_one_state_at_a_time_what_all_give_together():
    task = make_task(recipes.vit_tiny())
    sizes = []
    read = type(task.val).__getitem__

    class Counted(type(task.val)):
        def __getitem__(self, indices):
            sizes.append(len(indices))
            return read(self, indices)

    state, target = task.val[list(range(len(task.val)))]
    weights = task.loss_options["weights"]
    task.val.__class__ = Counted
    rows = task.finish(_Half(), 0, 0).splitlines()[1:]
    assert sizes == [1] * len(task.val)
    for number, row in enumerate(rows):
        channel = slice(number, number + 1)
        half = vit_loss(0.5 * state[:, channel], target[:, channel], weights).sqrt()
        same = vit_loss(state[:, channel], target[:, channel], weights).sqrt()
        assert row.split()[1:] == [f"{half:.3f}", f"{same:.3f}"]


def test_a_model_that_does_not_fit_its_data_is_named():
    text = recipes.gpt_tiny()
    with pytest.raises(ValueError, match="GPTConfig cannot learn from WeatherData"):
        make_task(replace(text, data=recipes.vit_tiny().data))
