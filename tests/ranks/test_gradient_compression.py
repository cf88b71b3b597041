"""What the communication hooks of PyTorch's DDP send, in bytes, and what becomes of gradients."""

import pytest
import torch
from faults import forks
from faults.cases import WEATHER
from torch import nn

from labcode import recipes
from labcode.config import ParallelConfig
from labcode.measure import metrics
from labcode.parallel.torch_data import PowerSGD, TorchDataParallel
from labcode.runtime import combinations

ROWS, COLUMNS = 40, 30
RANK = 2
EXACT_STEPS = 3
NUM_STEPS = 6
MATRICES = 2 * ROWS * COLUMNS  # of Linear(COLUMNS, ROWS) and Linear(ROWS, COLUMNS)
VECTORS = ROWS + COLUMNS


class AllReduces:
    """Lists the bytes of all-reduces that Python starts, in whichever thread.

    PowerSGD starts its second and third in the thread of gloo, where `counted` does not look.
    """

    def __init__(self):
        self.num_bytes = []

    def __enter__(self):
        import torch.distributed as dist

        self.original = dist.all_reduce

        def all_reduce(tensor, *args, **options):
            self.num_bytes.append(tensor.nbytes)
            return self.original(tensor, *args, **options)

        dist.all_reduce = all_reduce
        return self

    def __exit__(self, *error):
        import torch.distributed as dist

        dist.all_reduce = self.original


def steps(rank, options):
    """(bytes of the all-reduces of each step, relative error of each gradient, they are equal)."""
    import torch.distributed as dist

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, COLUMNS))
    model = TorchDataParallel(module, dist.group.WORLD, **options)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, COLUMNS, generator=generator)
    moved = []
    errors = []
    are_equal = []
    for _ in range(NUM_STEPS):
        module.zero_grad()
        module(x).square().mean().backward()  # of the whole batch
        exact = torch.cat([param.grad.flatten() for param in module.parameters()])
        module.zero_grad()
        with AllReduces() as spy:
            model(x.chunk(2)[rank]).square().mean().backward()
            model.finish_gradient_sync()
        found = torch.cat([param.grad.flatten() for param in module.parameters()])
        both = [torch.empty_like(found), torch.empty_like(found)]
        dist.all_gather(both, found)
        are_equal.append(torch.equal(*both))
        moved.append(spy.num_bytes)
        errors.append(((found - exact).norm() / exact.norm()).item())
    return moved, errors, are_equal


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_sixteen_bits_half_the_bytes_travel(ranks2, dtype):
    for moved, errors, are_equal in ranks2.run(steps, {"reduce_dtype": dtype}):
        assert moved == [[2 * (MATRICES + VECTORS)]] * NUM_STEPS
        assert all(are_equal)
        assert 0 < max(errors) < 2 * torch.finfo(dtype).eps


def test_powersgd_sends_two_thin_matrices_after_the_exact_steps(ranks2):
    """Vectors travel whole; then (n + m) r numbers of each matrix, as P and as Q."""
    options = {"powersgd": PowerSGD(RANK, EXACT_STEPS)}
    whole = 4 * (MATRICES + VECTORS)
    thin = 4 * (ROWS + COLUMNS) * RANK
    for moved, errors, are_equal in ranks2.run(steps, options):
        assert moved[:EXACT_STEPS] == [[whole]] * EXACT_STEPS
        assert moved[EXACT_STEPS:] == [[4 * VECTORS, thin, thin]] * (NUM_STEPS - EXACT_STEPS)
        assert all(are_equal)
        assert max(errors[:EXACT_STEPS]) < 1e-6
        assert 1e-3 < errors[EXACT_STEPS] < 1


def mean_error(rank, num_steps):
    """Distance of the mean of compressed gradients from the gradient, with nothing learned."""
    import torch.distributed as dist

    torch.manual_seed(0)
    module = nn.Linear(COLUMNS, ROWS, bias=False)
    model = TorchDataParallel(module, dist.group.WORLD, powersgd=PowerSGD(RANK, 2))
    torch.manual_seed(rank)
    x = torch.randn(64, COLUMNS)
    targets = torch.randn(64, ROWS)
    total = torch.zeros_like(module.weight)
    for number in range(2 + num_steps):
        module.zero_grad()
        nn.functional.mse_loss(model(x), targets).backward()
        if number == 0:
            exact = module.weight.grad.clone()
        if number >= 2:
            total += module.weight.grad
    return ((total / num_steps - exact).norm() / exact.norm()).item()


def test_error_feedback_sends_later_what_was_left_out(ranks2):
    once = max(ranks2.run(mean_error, 1))
    often = max(ranks2.run(mean_error, 100))
    assert often < 0.2 * once


def refused(rank, options):
    import torch.distributed as dist

    try:
        TorchDataParallel(nn.Linear(2, 2), dist.group.WORLD, powersgd=PowerSGD(1, 2), **options)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("options", [{"num_shares": 1}, {"reduce_dtype": torch.bfloat16}])
def test_powersgd_with_another_sum_is_refused(ranks2, options):
    for message in ranks2.run(refused, options):
        assert message.startswith("PowerSGD with reduce_dtype=")


def on_a_grid(rank, options):
    from labcode.comm.grid import Grid
    from labcode.config import GPTConfig
    from labcode.models.gpt import GPT
    from labcode.models.layers import initialize
    from labcode.models.parallelize import parallelize

    shape = ParallelConfig(**options).shape(2)
    config = GPTConfig(vocab_size=24, context_length=8, num_layers=2, num_heads=4, hidden_size=16)
    model = initialize(GPT(config), 0)
    try:
        parallelize(model, Grid.create(shape), ParallelConfig(**options), powersgd=PowerSGD(1, 2))
    except ValueError as error:
        return str(error)


def test_parallelize_takes_powersgd_for_ddp_on_dp_alone(ranks2):
    assert ranks2.run(on_a_grid, {}) == [None, None]
    for options in ({"data_parallel": "labcode"}, {"zero_stage": 2}, {"tp": 2}):
        for message in ranks2.run(on_a_grid, options):
            assert message.startswith("PowerSGD is a hook of PyTorch's DDP")


LAST = {"train.powersgd_rank": 2}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"parallel.data_parallel": "labcode"}, "with parallel.data_parallel=labcode: it is a h"),
        ({"parallel.zero_stage": 1}, "with parallel.zero_stage=1: it is a hook"),
        ({"parallel.tp": 2}, "with pp 1, cp 1, tp 2: it averages whole gradients"),
        ({"parallel.cp": 2}, "with pp 1, cp 2, tp 1: it averages whole gradients"),
        ({"parallel.pp": 2}, "with pp 2, cp 1, tp 1: it averages whole gradients"),
        ({"train.reduce_dtype": "bfloat16"}, "with train.reduce_dtype=bfloat16: choose one"),
        ({"train.dtype": "float16"}, "with train.dtype=float16 and train.on_bad_step=stop: after"),
        ({"train.on_bad_step": "skip"}, "with train.dtype=auto and train.on_bad_step=skip: after"),
    ],
)
def test_what_powersgd_cannot_be_combined_with_is_refused_in_one_line(changes, words):
    made = {"model.vocab_size": 84, **LAST, **changes}
    with pytest.raises(ValueError, match="powersgd_rank") as found:
        combinations.check(recipes.with_changes(recipes.gpt_tiny(), made), 2)
    assert str(found.value).startswith(f"train.powersgd_rank=2 {words}")
    assert "\n" not in str(found.value)
    made.pop("train.powersgd_rank")
    combinations.check(recipes.with_changes(recipes.gpt_tiny(), made), 2)


def losses(folder):
    return {row["step"]: row["loss"] for row in metrics.read(folder / "run") if "loss" in row}


def test_a_training_compresses_its_gradients_and_says_when_it_resumes_that_it_begins_anew(tmp_path):
    args = [*WEATHER, "--train.out=run", "--train.log_every=1", "--train.dtype=float64"]
    powersgd = ["--train.powersgd_rank=1", "--train.powersgd_exact_steps=2", "--checkpoint.every=4"]
    found = {}
    for name, more in (("exact", []), ("compressed", powersgd)):
        folder = tmp_path / name
        folder.mkdir()
        done = forks.train([*args, "--train.steps=6", *more], cwd=folder, ranks=2)
        assert done.codes == [0, 0], done.err
        assert "PowerSGD" not in done.out[0]
        found[name] = losses(folder)
    for step in (1, 2, 3):  # the loss of step 3 is that after two exact updates
        assert found["compressed"][step] == pytest.approx(found["exact"][step], rel=1e-12)
    for step in (4, 5, 6):
        assert found["compressed"][step] != pytest.approx(found["exact"][step], rel=1e-9)
        assert found["compressed"][step] == pytest.approx(found["exact"][step], rel=0.2)
    more = ["--train.steps=8", "--checkpoint.resume"]
    done = forks.train([*args, *powersgd, *more], cwd=tmp_path / "compressed", ranks=2)
    assert done.codes == [0, 0], done.err
    assert done.out[0].count("PowerSGD begins anew: what it left out of gradients is not in") == 1
    assert "PowerSGD begins anew" not in done.out[1]
