"""Which part of the expensive tests a commit runs: a few commits together run all of them."""

import subprocess
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = 3


def of_this_commit() -> int | None:
    """The part of this commit, from 0 to PARTS - 1; None, which means all, where there is no git.

    It is drawn from the hash of the files, so that a change of any file may choose another part.
    """
    command = ["git", "rev-parse", "HEAD^{tree}"]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return int(said.stdout, 16) % PARTS


def of_test(nodeid: str) -> int:
    """The part that a test belongs to, the same in every session.

    Args:
        nodeid: Pytest's name of the test, with its parameters.

    Returns:
        A number from 0 to PARTS - 1.
    """
    return zlib.crc32(nodeid.encode()) % PARTS
