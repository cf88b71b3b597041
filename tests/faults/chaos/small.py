"""A small training that is disturbed by `python -m tests.faults chaos`, for tests of the rig."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from .account import Account, read

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "--model.num_layers=2",
    "--model.hidden_size=32",
    "--model.num_heads=2",
    "--model.context_length=32",
    "--train.global_batch=4",
    "--train.steps=40",
)


def disturbed(words: Sequence[str], folder: Path) -> tuple[Account, str]:
    """What its faults have cost, and what it printed; it fails if the command does.

    Args:
        words: Which faults, as on the command line.
        folder: An existing one, to run in; the account is written there.
    """
    result = folder / "result.json"
    command = [sys.executable, "-m", "tests.faults", "chaos", "gpt_tiny", *SMALL]
    done = subprocess.run(
        [*command, f"--result={result}", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return read(result), done.stdout
