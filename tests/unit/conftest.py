"""What several unit tests share."""

import os

import psutil
import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Tiny tensors: a second thread only waits, for long where the cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def living():
    """Asks what works in a folder: the command of each living process but this one."""

    def find(folder):
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.cwd() == str(folder)
                    and process.pid != os.getpid()
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    return find
