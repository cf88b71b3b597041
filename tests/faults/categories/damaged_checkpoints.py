"""Files of checkpoints that are cut, flipped, zeroed, exchanged, crafted: never used in silence."""

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from .. import fixtures
from ..cases import EITHER, Case, Room
from ..damage import append, cut, fill, flip, folder_instead, loop, noise, write
from ..fixtures import RESUME

NEWEST = "step-00000006"
OLDER = "step-00000004"
EVIL = "somebody-elses-code-ran"


def cases(rng: random.Random) -> list[Case]:
    made = []
    for ranks in (1, 2):
        files = ["tensors.json", "rank-0.bin", "run.json"]
        if ranks == 2:
            files = ["rank-1.bin", "tensors.json", "rank-0.bin"]
        for file in files:
            for what, damage in _damages(rng, file, few=ranks == 2).items():
                text = f"{file} of {ranks} ranks {what}"
                made.append(_case(text, partial(_to_newest, file, damage), ranks))
    for what, change in FOLDERS.items():
        made.append(_case(what, change, 1))
    for number in range(12):
        seed = rng.randrange(2**32)
        made.append(_case(f"several files, seed {number}", partial(_several, seed), 1))
    return made


def _case(what: str, change: Callable[[Path], object], ranks: int) -> Case:
    return Case(
        what,
        names=["checkpoint", "step-", "run.json", "tensors.json"],
        answer=EITHER,
        ranks=ranks,
        prepare=partial(_prepare, change, ranks),
        act=_resume,
        replaced=["run"],
    )


def _prepare(change: Callable[[Path], object], ranks: int, folder: Path) -> None:
    change(fixtures.put_killed_run(folder, ranks) / "checkpoints")


def _resume(room: Room) -> None:
    """Refused in one line, or gone on to the very same end."""
    done = room.train(*RESUME)
    if (room.folder / EVIL).exists():
        room.flag("wrong", "code from the checkpoint ran")
    if set(done.codes) == {0}:
        fixtures.compare_with_whole(room, room.folder / "run", room.case.ranks)
        text = "".join(done.out + done.err)
        if "resuming from" not in text:
            room.flag("wrong", "began again in silence")


# ---- one file


def _damages(rng: random.Random, file: str, few: bool) -> dict[str, Callable[[Path], object]]:
    damages: dict[str, Callable[[Path], object]] = {
        "removed": Path.unlink,
        "empty": partial(write, b""),
        "cut in half": partial(cut, 0.5),
        "one byte short": partial(cut, -1),
        "one byte long": append,
        "zeroed": partial(fill, b"\0"),
        "of an older step": _older,
        "a folder": folder_instead,
        "a link to the older one": _link,
        "a link to itself": loop,
    }
    if file != "run.json":
        damages |= {"all 0xff": partial(fill, b"\xff"), "noise": partial(noise, rng.random())}
    if few:
        kept = rng.sample(sorted(damages), 3)
        damages = {name: damages[name] for name in kept}
    flips = 3 if few else 10
    for _ in range(flips):
        place = rng.random()
        damages[f"with a bit flipped at {100 * place:.1f} %"] = partial(flip, place)
    return damages


def _to_newest(file: str, damage: Callable[[Path], object], checkpoints: Path) -> None:
    damage(checkpoints / NEWEST / file)


def _older(path: Path) -> None:
    shutil.copy(path.parent.parent / OLDER / path.name, path)


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(Path("..") / OLDER / path.name)


# ---- whole folders


def _files_of_older(checkpoints: Path) -> None:
    """The tensors of an older step under the newest run.json."""
    for name in ("tensors.json", "rank-0.bin"):
        _older(checkpoints / NEWEST / name)


def _data_of_older_and_sizes(checkpoints: Path) -> None:
    """The same as above, with run.json told so: what an attacker or a sync tool can do."""
    _files_of_older(checkpoints)
    _tell(checkpoints / NEWEST)


def _renamed_older(checkpoints: Path) -> None:
    shutil.rmtree(checkpoints / NEWEST)
    shutil.copytree(checkpoints / OLDER, checkpoints / NEWEST)


def _every(name: str, damage: Callable[[Path], object], checkpoints: Path) -> None:
    for folder in checkpoints.iterdir():
        damage(folder / name)


def _half_copied(checkpoints: Path) -> None:
    for path in (checkpoints / NEWEST).iterdir():
        if path.name != "run.json":
            path.unlink()


def _evil_tensors(checkpoints: Path) -> None:
    import torch

    for folder in checkpoints.iterdir():
        torch.save(_Evil(), folder / "rank-0.bin")
        _tell(folder)


class _Evil:
    def __reduce__(self) -> tuple:
        return os.system, (f"touch {EVIL}",)


def _tell(folder: Path) -> None:
    """Make run.json say what the files are now, sizes and checksums, as far as it names them."""
    about = json.loads((folder / "run.json").read_text())
    for name, entry in about["files"].items():
        content = (folder / name).read_bytes()
        about["files"][name] = _like(entry, content)
    (folder / "run.json").write_text(json.dumps(about))


def _like(entry: object, content: bytes) -> object:
    """The description of a file in the form of another one: size, sha256, or both."""
    if isinstance(entry, bool):
        return entry
    if isinstance(entry, int):
        return len(content)
    if isinstance(entry, str):
        return hashlib.sha256(content).hexdigest()
    if isinstance(entry, list):
        return [_like(part, content) for part in entry]
    if isinstance(entry, dict):
        return {name: _like(part, content) for name, part in entry.items()}
    return entry


def _stray(checkpoints: Path) -> None:
    (checkpoints / NEWEST / "rank-9.bin").write_bytes(b"x" * 100)
    (checkpoints / NEWEST / ".DS_Store").write_bytes(b"x")


def _partial_of_a_kill(checkpoints: Path) -> None:
    shutil.copytree(checkpoints / OLDER, checkpoints / "step-00000008.partial")
    (checkpoints / "step-00000008.partial" / "run.json").unlink()


FOLDERS: dict[str, Callable[[Path], object]] = {
    "both files of an older step": _files_of_older,
    "both files of an older step, described anew": _data_of_older_and_sizes,
    "the whole folder of an older step under the newest name": _renamed_older,
    "no tensors.json in any": partial(_every, "tensors.json", Path.unlink),
    "no run.json in any": partial(_every, "run.json", Path.unlink),
    "no tensors in any": partial(_every, "rank-0.bin", Path.unlink),
    "tensors zeroed in all": partial(_every, "rank-0.bin", partial(fill, b"\0")),
    "run.json empty in all": partial(_every, "run.json", partial(write, b"")),
    "run.json alone was copied": _half_copied,
    "tensors that run a command, described anew": _evil_tensors,
    "strange files beside": _stray,
    "what a kill left in a save": _partial_of_a_kill,
}


def _several(seed: int, checkpoints: Path) -> None:
    """Some files of some checkpoints, each damaged in some way."""
    rng = random.Random(seed)
    files = sorted(path for path in checkpoints.rglob("*") if path.is_file())
    for path in rng.sample(files, rng.randint(1, 4)):
        damages = _damages(rng, path.name, few=False)
        name = rng.choice(sorted(damages))
        if name not in ("of an older step", "a link to the older one"):
            damages[name](path)
