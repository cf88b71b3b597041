"""The peak of resident memory that training logs on a CPU."""

import subprocess
import sys
from pathlib import Path

import pytest

ASK = "import torch; from labcode.measure.steps import peak_memory_bytes; "
ASK += "print(peak_memory_bytes(torch.device('cpu')))"


@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="elsewhere the system's own figure is taken"
)
def test_the_peak_is_that_of_the_process_and_not_of_the_one_that_started_it():
    ballast = bytearray(b"x") * (900 << 20)
    done = subprocess.run(
        [sys.executable, "-c", ASK], capture_output=True, text=True, check=True, timeout=280
    )
    assert 50e6 < int(done.stdout) < len(ballast)
