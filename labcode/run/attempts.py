"""What the attempts of one job tell each other, where torchrun starts the ranks again.

    torchrun --max-restarts=3 --nproc-per-node=2 -m labcode.train RECIPE --checkpoint.every 5

When a rank dies, torchrun ends the others and starts all of them again with the same command. That
command may say that the folder of the run must be new, and the folder is not new any more. So an
attempt notes its folder in the store of torchrun, which outlives the ranks, and the next attempt
resumes in it. A folder that no attempt has noted belongs to another run, as without restarts.

Held by: tests/ranks/test_restarts.py
"""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

from labcode.config import Config
from labcode.runtime.agreement import on_first_rank
from labcode.runtime.meeting import store_of_job
from labcode.runtime.place import Place

STORE_S = 15.0  # how long the store of torchrun may take to answer
_FOLDER = "folder"  # its key


def resumed_config(config: Config, place: Place) -> Config:
    """The config of this attempt: it resumes in the folder that an earlier one has noted, if any.

    A run that writes no checkpoints begins again from its first step, in the same folder.

    Communicates: under torchrun, a broadcast of a path. Whether this is the first attempt is known
    only to the store: the agents of several nodes do not count alike.

    Args:
        config: The config of the command line.
        place: Where this process stands.
    """
    if not place.has_agent:
        return config
    noted = on_first_rank(_noted, place)
    if not noted:
        return config
    resumes = config.checkpoint.on
    train = replace(config.train, out=noted, overwrite=not resumes)
    checkpoint = replace(config.checkpoint, resume=resumes)
    return replace(config, train=train, checkpoint=checkpoint)


def note_folder(out: Path, place: Place) -> None:
    """On rank 0: from now on the folder is this job's own, also for the attempts to come.

    Args:
        out: The folder, which this run has claimed.
        place: Where this process stands.
    """
    with contextlib.suppress(ValueError, RuntimeError):  # torchrun has gone, and this rank goes too
        store = store_of_job(place, STORE_S)
        if store is not None:
            store.set(_FOLDER, str(out))


def is_said_before(line: str, place: Place) -> bool:
    """On rank 0: whether an earlier attempt has said the same line; this one counts from now on.

    Args:
        line: An error that every attempt meets again, such as a grid that does not fit.
        place: Where this process stands.
    """
    with contextlib.suppress(ValueError, RuntimeError):
        store = store_of_job(place, STORE_S)
        if store is not None:
            # a key of the store, which would otherwise be as long as the line
            digest = hashlib.sha256(line.encode()).hexdigest()
            return store.add(f"said/{digest}", 1) > 1
    return False


def _noted(place: Place) -> str:
    """The folder of the earlier attempts; "" if none came so far.

    Args:
        place: Where this process stands.

    Raises:
        MeetingError: Nobody answers where the attempts share what they know. To go on would be to
            train a second time, into another folder.
    """
    store = store_of_job(place, STORE_S)
    # `check` and not `get`, which would wait for a key that the first attempt does not find
    if store is None or not store.check([_FOLDER]):
        return ""
    return store.get(_FOLDER).decode()
