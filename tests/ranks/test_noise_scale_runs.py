"""The noise scale of a run: the same for any division of the batch, and what it should be."""

import itertools

import pytest
import torch

from labcode import recipes

BASE = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.context_length": 16,
    "optim.warmup_steps": 2,
    "optim.clip_norm": 0.5,
    "train.steps": 6,
    "train.global_batch": 8,
    "train.micro_batch": 2,
    "train.dtype": "float64",
    "train.eval_batches": 1,
    "train.log_every": 1,
    "train.sample_tokens": 0,
    "train.noise_scale": True,
}
CONFIG = recipes.with_changes(recipes.gpt_tiny(), BASE)
KEYS = ("gradient_square", "gradient_variance")


def fit(config, out=None, start=None):
    """The rows of one run in this pool."""
    from trained import built

    from labcode.run import run

    training = built(config, start)
    return [row for row in run.train(training, out) if "loss" in row]


def measured(rows):
    return [[row[key] for key in KEYS] for row in rows]


@pytest.fixture(scope="module")
def of_one_process(ranks1):
    (rows,) = ranks1.run(fit, CONFIG)
    return rows


def test_it_is_that_of_the_gradients_of_the_micro_batches(ranks1, of_one_process):
    expected = ranks1.run(by_autograd, CONFIG)[0]
    assert measured(of_one_process)[0] == pytest.approx(expected, rel=1e-9)


def by_autograd(config):
    """(|G|^2, tr(Sigma)) at the first step, from each micro-batch's gradient alone."""
    from labcode.data.sampler import Batches
    from labcode.models import gpt
    from labcode.models.layers import initialize
    from labcode.train.tasks import make_task

    task = make_task(config)
    model = initialize(task.build(), config.train.seed).double()
    batches = Batches(len(task.train), 8, dp_size=1, dp_coord=0, seed=config.train.seed)
    inputs, targets = task.train[batches.next_indices()]
    gradients = []
    for part in range(4):
        own = slice(2 * part, 2 * part + 2)
        loss = gpt.loss(model(inputs[own]), targets[own])
        found = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
    gradients = torch.stack(gradients)
    # of 4 gradients: the unbiased covariance, whose trace is 1/2 of that of one sample
    variance = 2 * gradients.var(dim=0, unbiased=True).sum()
    square = gradients.mean(dim=0).square().sum() - variance / 8
    return [square.item(), variance.item()]


@pytest.mark.parametrize("by", ["labcode", "ddp"])
@pytest.mark.parametrize("size", [2, 4])
def test_any_layout_measures_the_same(request, of_one_process, size, by):
    config = recipes.with_changes(CONFIG, {"parallel.data_parallel": by})
    if by == "labcode":  # with many small buckets
        config = recipes.with_changes(config, {"parallel.bucket_mb": 1e-3})
    for rows in request.getfixturevalue(f"ranks{size}").run(fit, config):
        for row, expected in zip(measured(rows), measured(of_one_process), strict=True):
            assert row == pytest.approx(expected, rel=1e-9)


def test_it_changes_nothing_in_the_run(ranks2, of_one_process):
    without = recipes.with_changes(CONFIG, {"train.noise_scale": False})
    for row, expected in zip(ranks2.run(fit, without)[0], of_one_process, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], abs=1e-9)
        assert "gradient_square" not in row


def test_a_run_that_resumes_goes_on_smoothing(ranks2, of_one_process, tmp_path):
    saving = recipes.with_changes(CONFIG, {"checkpoint.every": 2})
    ranks2.run(fit, saving, tmp_path)
    start = tmp_path / "checkpoints" / "step-00000004"
    rows = ranks2.run(fit, saving, tmp_path, start)[0]
    assert [row["step"] for row in rows] == [5, 6]
    for row, expected in zip(measured(rows), measured(of_one_process)[4:], strict=True):
        assert row == pytest.approx(expected, rel=1e-9)


def test_the_size_of_the_micro_batch_leaves_the_mean_as_it_is(ranks1):
    """Both are estimates of the same two numbers, as long as the weights hardly move."""
    still = {"optim.lr": 1e-9, "optim.min_lr": 0.0, "train.steps": 40, "train.global_batch": 32}
    found = []
    for micro_batch in (1, 4):
        config = recipes.with_changes(CONFIG, still | {"train.micro_batch": micro_batch})
        (rows,) = ranks1.run(fit, config)
        found.append(measured(rows)[-1])
    for first, second in itertools.pairwise(found):
        assert first == pytest.approx(second, rel=0.1)
