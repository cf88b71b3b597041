"""What several unit tests share."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from faults import waiting

from labcode.runtime import processes


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: a second thread only waits, for long where the cores are busy."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def living() -> Callable[[Path], list[str]]:
    """Asks what works in a folder: the command of each living process but this one."""

    def find(folder: Path) -> list[str]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.pid == os.getpid() or process.cwd() != str(folder):
                    continue
                if processes.alive(process):
                    found.append(" ".join(process.cmdline()))
            except psutil.Error:
                continue
        return found

    return find


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    """Waits until something is true; the limit is for a test that hangs, not for a busy machine."""
    return waiting.until
