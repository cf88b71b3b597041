"""What `doctor.watch` sees on a GPU alone; two ranks on one GPU are themselves a finding."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def examined(rank, inputs_on):
    """(Names of the findings, the error that ended the training) of a plain loop with DDP."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from labcode import doctor

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    error = ""
    with doctor.watch(model, optimizer, quiet=True, limit_s=20) as watched:
        try:
            for _ in range(6):
                loss = model(torch.randn(4, 8).to(inputs_on)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        except RuntimeError as caught:
            error = str(caught)
    # with a handful of steps of microseconds, anything may look slow
    return [found.name for found in watched.findings if found.name != "slow rank"], error


def test_a_correct_loop_over_nccl_has_no_findings(alone):
    assert alone.run(examined, "cuda") == [([], "")]


def test_ranks_that_share_a_gpu_are_told(pair):
    crowd = ["one GPU for all"] if torch.cuda.device_count() < 2 else []
    assert pair.run(examined, "cuda") == [(crowd, "")] * 2


def test_inputs_that_stayed_on_the_cpu_are_named(alone):
    ((findings, error),) = alone.run(examined, "cpu")
    assert findings == ["data elsewhere"]
    assert "same device" in error
