"""What the tests with real ranks share: one pool of each size, and how answers are judged."""

import shutil
import subprocess

import pytest

from course.answer import Hint
from course.pool.ranks import Ranks


@pytest.fixture(scope="session")
def ranks1():
    with Ranks(1) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks2():
    with Ranks(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4():
    with Ranks(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks8():
    with Ranks(8) as pool:
        yield pool


@pytest.fixture(scope="session")
def judged():
    """`judged(check, hint)`: a lesson's check fails with the hint, or passes if it is None."""

    def judged(check, hint):
        try:
            check()
        except Hint as error:
            if hint is None:
                raise
            assert hint in str(error)
            return True
        return hint is None

    return judged


UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def may_unshare():
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture
def on_small_disk(tmp_path):
    """`on_small_disk(size, *command)` runs a command with a disk of that size at tmp_path/disk.

    The folder run/ of that disk is copied to tmp_path, as the disk goes with the command.
    """
    if not may_unshare():
        pytest.skip("a small disk needs unshare with user namespaces, which are not allowed here")
    disk = tmp_path / "disk"
    disk.mkdir()

    def run(size, *command):
        mount = f'mount -t tmpfs -o size={size} tmpfs "$0"'
        script = f'{mount} && "$@"; code=$?; cp -r "$0"/run "$0"/.. ; exit $code'
        command = [*UNSHARE, "sh", "-c", script, str(disk), *command]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False
        )

    return run
