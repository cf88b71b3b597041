"""What several unit tests share."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Tiny tensors: a second thread only waits, for long where the cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
