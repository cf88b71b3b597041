"""Files that are there whole or not at all."""

import os
import uuid
from pathlib import Path


def write_atomically(path: Path, *parts) -> None:
    """Writes buffers one after another beside the target and renames: a full disk or a kill leaves the old file, or none.

    Several processes may write the same path at once; one of them wins, whole.

    Args:
        parts: bytes or contiguous arrays.
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(unfinished, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())  # on network disks "no space left" may come only here
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
