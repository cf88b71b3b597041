"""Which part of the release tier a commit runs: four commits in a row run all of it."""

import subprocess
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Answers that simulated ranks judge are in every run, and no longer in this tier.
PARTS = 4


def of_this_commit() -> int | None:
    """The part of this commit, from 0 to PARTS - 1; None, which means all, without git."""
    command = ["git", "rev-list", "--count", "HEAD"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(said.stdout) % PARTS


def of_test(nodeid: str) -> int:
    """The part that a test belongs to, the same in every session.

    Args:
        nodeid: Pytest's name of the test, with its parameters.

    Returns:
        A number from 0 to PARTS - 1.
    """
    return zlib.crc32(nodeid.encode()) % PARTS
