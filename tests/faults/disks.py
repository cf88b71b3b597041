"""Small disks: a tmpfs in a mount namespace of its own, which ranks enter before they train."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def allowed() -> bool:
    """Whether this machine lets us mount at all."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*UNSHARE, "true"], capture_output=True, check=False).returncode == 0


@dataclass(frozen=True)
class Disk:
    """A disk that goes with its keeper.

    Args:
        keeper: The process whose mount namespace has it.
        place: Where it is mounted there.
    """

    keeper: int
    place: Path

    def enter(self) -> None:
        """A patch: this process sees the disk from now on, and works in the folder above it."""
        here = os.getcwd()
        library = ctypes.CDLL(None, use_errno=True)
        for kind in ("user", "mnt"):
            descriptor = os.open(f"/proc/{self.keeper}/ns/{kind}", os.O_RDONLY)
            if library.setns(descriptor, 0) != 0:
                raise OSError(ctypes.get_errno(), f"setns {kind}")
            os.close(descriptor)
        os.chdir(here)

    def seen(self, path: Path) -> Path:
        """A path on the disk, as a process sees it that has not entered."""
        return Path(f"/proc/{self.keeper}/root{path}")

    def copy_to(self, folder: Path) -> None:
        """Copy all that is on the disk."""
        shutil.copytree(self.seen(self.place), folder, dirs_exist_ok=True)

    def remount(self, options: str) -> None:
        """Change its size, or make it read-only."""
        enter = [
            "nsenter",
            f"--target={self.keeper}",
            "--user",
            "--mount",
            "--preserve-credentials",
        ]
        command = [*enter, "mount", "-o", f"remount,{options}", str(self.place)]
        subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Disk]:
    """A disk at `place`, with options of tmpfs such as "size=64k" or "nr_inodes=5"."""
    place.mkdir(exist_ok=True)
    script = f'mount -t tmpfs -o {options} tmpfs "$0" && echo there && exec sleep 3600'
    keeper = subprocess.Popen(
        [*UNSHARE, "sh", "-c", script, str(place)], stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert keeper.stdout is not None
        line = keeper.stdout.readline()
        assert line, f"cannot mount a disk with {options}"
        yield Disk(keeper.pid, place)
    finally:
        keeper.kill()
        keeper.wait()
        if keeper.stdout is not None:
            keeper.stdout.close()
