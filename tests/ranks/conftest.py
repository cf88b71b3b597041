"""Pools of ranks that the tests of a session share, each started when first asked for; how answers are judged."""

import shutil
import subprocess

import pytest

from labcode.pool.ranks import Ranks


def _pool(n):
    @pytest.fixture(scope="session", name=f"ranks{n}")
    def ranks():
        with Ranks(n) as pool:
            yield pool

    return ranks


ranks1, ranks2, ranks4 = _pool(1), _pool(2), _pool(4)


@pytest.fixture(scope="session")
def judged():
    """`judged(check, hint)`: a lesson's check passes, for a hint of None, or fails with words that hold the hint."""

    def judged(check, hint, also=()):
        try:
            check()
        except (AssertionError, *also) as error:
            if hint is None:
                raise
            assert hint in str(error)
            return True
        return hint is None

    return judged


UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


@pytest.fixture
def on_small_disk(tmp_path):
    """`on_small_disk(size, *command)`: a command with a disk of that size at tmp_path/disk; run/ on it is copied away."""
    if not (
        shutil.which("unshare")
        and subprocess.run([*UNSHARE, "true"], capture_output=True).returncode == 0
    ):
        pytest.skip(
            "a small disk needs unshare with user namespaces, which this system does not allow"
        )
    disk = tmp_path / "disk"
    disk.mkdir()

    def run(size, *command):
        script = f'mount -t tmpfs -o size={size} tmpfs "$0" && "$@"; code=$?; cp -r "$0"/run "$0"/.. ; exit $code'
        command = [*UNSHARE, "sh", "-c", script, str(disk), *command]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
        )

    return run
