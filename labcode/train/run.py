"""From a config to a finished run: set-up, training, and one line for whatever goes wrong."""

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from labcode.comm import bootstrap
from labcode.comm.grid import Grid
from labcode.comm.together import PeerError, on_every_rank, on_first_rank
from labcode.config import Config
from labcode.files import write_atomically
from labcode.train.loop import Diverged, Trainer
from labcode.train.tasks import make_task

FAILED, INTERRUPTED = 2, 130  # 130 is what a shell reports for a program ended by Ctrl-C


@record
def run(config: Config) -> int:
    """Train as `config` says, as one rank of whatever job this process was started in; returns the exit code."""
    rank = 0
    try:
        place = bootstrap.read_environment()
        rank = place.rank
        shape = config.check(place.world_size)
        world = bootstrap.start(place, share_gpus=config.train.share_gpus)
        trainer = set_up(config, world, Grid.create(shape))
    except KeyboardInterrupt:
        return _say(rank, "interrupted before the first step: nothing was written", INTERRUPTED)
    except (ValueError, OSError, PeerError) as error:  # of set-up: what the user can mend; a bug keeps its traceback
        bootstrap.stop()
        return _say(rank, f"error: {_text(error)}", FAILED)
    try:
        trainer.fit()
    except KeyboardInterrupt:
        return _say(rank, f"interrupted after step {trainer.steps_done}: its metrics are in {trainer.out}", INTERRUPTED)
    except (Diverged, OSError, PeerError) as error:
        return _say(rank, f"error: after step {trainer.steps_done}: {_text(error)}", FAILED)
    finally:
        with contextlib.suppress(OSError):  # after an error that has been told, or a second time: it says nothing new
            trainer.close()
        bootstrap.stop()
    return 0


def set_up(config: Config, world: bootstrap.World, grid: Grid) -> Trainer:
    """Data, model and output folder, with every error that can be found before the first step.

    Raises:
        ValueError, OSError: On the rank that found it. PeerError: on the others.
    """
    # one rank of a node prepares the token file, the others find it made
    task = on_every_rank(lambda: make_task(config) if world.local_rank == 0 else None)
    task = on_every_rank(lambda: task or make_task(config))
    out = on_first_rank(lambda: make_folder(config))
    return on_every_rank(lambda: Trainer(config, world, grid, task, out))


def make_folder(config: Config) -> Path:
    """The output folder, new and with `config.json` in it.

    Raises:
        ValueError: `train.out` exists and `train.overwrite` is not set.
        OSError: It cannot be made.
    """
    if config.train.out is None:
        folders = (Path("runs") / f"{config.name}-{number:03d}" for number in range(1, 1000))
        out = next(folder for folder in folders if not folder.exists())
    else:
        out = Path(config.train.out)
        if out.exists() and not config.train.overwrite:
            raise ValueError(f"{out} exists already: choose another train.out, or replace it with --train.overwrite")
        if out.exists() and not (out / "config.json").is_file():
            raise ValueError(f"{out} is not the folder of a run: nothing was removed, choose another train.out")
        shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    write_atomically(out / "config.json", json.dumps(dataclasses.asdict(config), indent=2).encode())
    return out


def _text(error) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror.lower()}" if error.filename else error.strerror.lower()
    return str(error)


def _say(rank, message, code) -> int:
    """One message for the job, from rank 0; every rank returns the code."""
    if rank == 0:
        print(message, file=sys.stderr, flush=True)
    return code
