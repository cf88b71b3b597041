"""The doctor's watch: it names each patient's bug and no other, and nothing in its healthy twin."""

import os

import pytest

from course.labs import l07_patients
from labcode.doctor.facts import Facts
from labcode.doctor.judge import judge


def examined(name, healthy, folder):
    """Names of the findings on this rank, and what ended the script early."""
    from labcode import doctor

    seen = []

    def watch(*args, **kwargs):
        seen.append(doctor.watch(*args, quiet=True, limit_s=3, **kwargs))
        return seen[0]

    before = os.getcwd()
    os.chdir(folder)
    error = ""
    number = None
    try:
        number = l07_patients.patient(name).run(healthy, watch)
    except RuntimeError as caught:
        error = str(caught)
    finally:
        os.chdir(before)
    names = [finding.name for finding in seen[0].findings]
    if name != "slow_node":
        # where another program takes one of the cores, a rank is slow indeed
        names = [found for found in names if found != "slow rank"]
    return names, error, number


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "runs").mkdir()
    return str(tmp_path)


@pytest.mark.parametrize("name", l07_patients.NAMES)
def test_the_doctor_names_exactly_the_bug(name, ranks2, folder):
    broken = ranks2.run(examined, name, False, folder)
    healthy = ranks2.run(examined, name, True, folder)
    for findings, error, _ in broken:
        assert findings == [l07_patients.patient(name).FINDING], error
    for findings, error, _ in healthy:
        assert (findings, error) == ([], "")
    symptoms = [(error, number) for _, error, number in broken]
    assert symptoms != [(error, number) for _, error, number in healthy]


def test_the_complaints_are_backed_by_what_the_scripts_show(ranks2):
    def symptoms(healthy):
        from course.labs.l07_patients import same_order, slow_node

        return same_order.symptom(healthy), slow_node.run(healthy)

    broken = ranks2.run(symptoms, False)
    healthy = ranks2.run(symptoms, True)
    for (bumps, _), (other_bumps, _) in zip(broken, healthy):
        assert bumps > 0.9 > other_bumps
    waiting, slow = broken[0][1], broken[1][1]
    assert waiting < 0.5 < slow


def test_a_correct_loop_of_our_data_parallel_has_no_findings(ranks2):
    def trained():
        import torch
        import torch.distributed as dist

        from labcode import doctor
        from labcode.parallel.data import DataParallel

        torch.manual_seed(dist.get_rank())
        model = DataParallel(torch.nn.Linear(4, 4), dist.group.WORLD, bucket_mb=1e-5)
        optimizer = torch.optim.AdamW(model.parameters())
        with doctor.watch(model, optimizer, quiet=True) as watched:
            for _ in range(4):
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward()
                model.finish_gradient_sync()
                optimizer.step()
                optimizer.zero_grad()
        num_steps = len(watched.facts.seconds["forward"])
        return num_steps, [str(finding) for finding in watched.findings]

    assert ranks2.run(trained) == [(4, [])] * 2


def test_outside_the_block_nothing_is_patched(ranks1):
    def untouched():
        import torch
        import torch.distributed as dist

        from labcode import doctor

        def patched():
            return [dist.all_reduce, torch.save, torch.Tensor.backward]

        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = patched()
        with doctor.watch(model, optimizer):
            inside = patched()
        return before == patched(), before == inside

    assert ranks1.run(untouched) == [(True, False)]


def late_in(phase):
    """A correct loop in which rank 1 sleeps in one phase."""
    import time

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, Dataset, DistributedSampler

    from labcode import doctor

    def sleep_in(place):
        time.sleep(0.004)
        if place == phase and dist.get_rank() == 1:
            time.sleep(0.03)

    class Samples(Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, number):
            if number % 2 == dist.get_rank():
                sleep_in("data loading")
            return torch.full((4,), float(number))

    class Slow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x):
            sleep_in("forward")
            y = self.linear(x)
            y.register_hook(lambda _: sleep_in("backward"))
            return y

    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            sleep_in("optimizer")
            return super().step(closure)

    data = Samples()
    model = DistributedDataParallel(Slow())
    optimizer = SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=False))
    with doctor.watch(model, optimizer, loader=loader, quiet=True) as watched:
        for x in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return watched.findings


@pytest.mark.parametrize("phase", ["data loading", "forward", "backward", "optimizer"])
def test_a_rank_that_is_late_is_named_with_its_phase(phase, ranks2):
    for findings in ranks2.run(late_in, phase):
        # rank 0 may be late in another phase, where another program takes its core
        (finding,) = (finding for finding in findings if finding.ranks == (1,))
        assert finding.name == "slow rank"
        assert finding.what.startswith("it spends ")
        assert f" ms of a step in {phase}, the others " in finding.what
        assert finding.unit == f"times the others' time in {phase}"
        assert finding.evidence > 2


def called(case):
    """A correct loop, but for what the ranks call after each step; the findings."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from labcode import doctor
    from labcode.doctor.facts import FindingError

    rank = dist.get_rank()
    numbers = torch.ones(3)

    def total():
        dist.all_reduce(numbers)

    def that_of_rank_0():
        dist.broadcast(numbers, src=0)

    def names():
        dist.all_gather_object([None, None], f"rank {rank}")

    calls_after = {
        "another order": [[total, that_of_rank_0], [that_of_rank_0, total]],
        "objects of rank 0 alone": [[names], []],
        "the same": [[total, names], [total, names]],
    }
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = doctor.watch(model, optimizer, quiet=True, limit_s=3)
    try:
        with watched:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 4) * rank).square().mean().backward()
                optimizer.step()
                for call in calls_after[case][rank]:
                    call()
    except FindingError:
        pass
    return [(finding.name, finding.what) for finding in watched.findings]


CALLED = {
    "another order": ("calls do not match", "rank 0 calls all_reduce [3] float32"),
    "objects of rank 0 alone": ("skipped call", "rank 0 calls all_gather_object"),
}


@pytest.mark.parametrize("case", CALLED)
def test_calls_that_do_not_match_are_named(case, ranks2):
    name, what = CALLED[case]
    for findings in ranks2.run(called, case):
        ((found, told),) = findings
        assert found == name
        assert what in told


def test_ranks_that_call_the_same_have_no_findings(ranks2):
    assert ranks2.run(called, "the same") == [[], []]


def test_ranks_on_one_gpu_are_found():
    facts = [Facts(0, device="n1 GPU-a"), Facts(1, device="n1 GPU-a"), Facts(2, device="n1 GPU-b")]
    (finding,) = judge(facts)
    assert finding.name == "one GPU for all"
    assert finding.ranks == (0, 1)


def test_a_finding_is_one_line_with_evidence_and_cure():
    (finding,) = judge([Facts(0, foreign_inputs=3), Facts(1)])
    assert str(finding).startswith("data elsewhere: ")
    assert "[rank 0; 3 forward passes]; cure: move" in str(finding)
