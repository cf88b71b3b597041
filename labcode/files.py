"""Files that exist whole or not at all."""

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


def write_atomically(path: Path, *parts: "Buffer") -> None:
    """Writes a file beside `path` and renames it, so that `path` is never half written.

    A full disk or a kill leaves the old file, or none if there was none.
    Several processes may write the same path at once; one of them wins, with a whole file.

    Args:
        path: The file; its folder exists.
        parts: bytes or contiguous arrays, written one after another.
    """
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(unfinished, "xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            # on network disks "no space left" may come only here, before the rename
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
