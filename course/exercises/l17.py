"""Checks of lesson 17, surviving failures."""

import contextlib
import functools
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from course.answer import Exercise, Hint, due, is_stub, reason
from course.exercises.expect import diagnose, refuse, tensor
from course.exercises.in_notebook import without
from course.labs import l17_by_hand, l17_plan, l17_run
from course.labs.l17_boxes import Box, block, columns, rows, tiles
from course.labs.l17_disk import Killed, operations
from course.labs.l17_run import CHECKSUMS, STATE, Training
from labcode.perf.failures import daly_interval_s, young_interval_s

# ---- 17.1

HOUR_S = 3600.0
NEAR = 0.01  # the minimum is flat
SAVES_AND_MTBFS = ((60.0, 3 * HOUR_S), (5.0, 3 * HOUR_S), (30.0, 400 * HOUR_S), (1.0, 50.0))


def best_interval(best_interval_s: Callable[[float, float], float]) -> None:
    """The learner's `best_interval_s(save_s, mtbf_s)`."""
    for save_s, mtbf_s in SAVES_AND_MTBFS:
        with without(young_interval_s, daly_interval_s):
            found = due(best_interval_s(save_s, mtbf_s))
        if not isinstance(found, int | float):
            raise Hint(f"{found!r}: give a number of seconds")
        case = f"C = {save_s:g} s, M = {mtbf_s:g} s: "
        refuse({f"{found!r} s: an interval is above 0": found <= 0}, case)
        truth = young_interval_s(save_s, mtbf_s)
        mistakes = {
            f"{found:.4g} s is too short: how much of an interval does a failure undo, all of it "
            "or half of it?": truth * math.sqrt(0.5),
            "your number is in seconds squared": truth**2,
            "that is Daly's interval, which counts more than the formula above; here the T is "
            "meant at which C/T + T/(2M) is lowest": daly_interval_s(save_s, mtbf_s),
        }
        cost = save_s / found + found / (2 * mtbf_s)
        other = "longer" if found < truth else "shorter"
        otherwise = (
            f"with T = {found:.4g} s, C/T + T/(2M) is {cost:.3g}, and a {other} T costs less"
        )
        diagnose(case, found, truth, mistakes, otherwise, NEAR)


# ---- 17.2

Files = dict[str, bytes]
Save = Callable[..., Any]


def _files(step: int) -> Files:
    """What a checkpoint of a step holds; the contents of two steps differ everywhere."""
    files = {}
    for number, size in enumerate((40_000, 3, 9_000)):
        files[f"rank{number}.bin"] = bytes([step]) * size
    return files


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="l17-") as name:
        folder = Path(name).resolve() / "checkpoints"
        folder.mkdir()
        yield folder


def _named(step: int) -> str:
    return f"step-{step:08d}"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextlib.contextmanager
def _without_a_disk() -> Iterator[None]:
    """No sync waits: what is judged is when it is called, and a busy disk takes its time."""

    def sync_file(file: Any) -> None:
        os.fstat(file if isinstance(file, int) else file.fileno())  # an error where fsync has one

    with (
        mock.patch.object(os, "fsync", sync_file),
        mock.patch.object(os, "fdatasync", sync_file, create=True),
        mock.patch.object(os, "sync", lambda: None, create=True),
    ):
        yield


def _damage(folder: Path, step: int) -> str:
    """What is wrong with the checkpoint of a step; "" if nothing is."""
    path = folder / _named(step)
    if not path.is_dir():
        return f"there is no folder {path.name}"
    files = _files(step)
    for name in (*files, CHECKSUMS):
        if not (path / name).is_file():
            return f"{path.name} has no {name}"
    for name, content in files.items():
        found = (path / name).read_bytes()
        if len(found) != len(content):
            return f"{path.name}/{name} has {len(found)} of {len(content)} bytes"
        if found != content:
            return f"{path.name}/{name} has another content than it was given"
    wrong = _wrong_checksum((path / CHECKSUMS).read_bytes(), files)
    return f"{path.name}/{CHECKSUMS} {wrong}" if wrong else ""


def _wrong_checksum(content: bytes, files: Files) -> str:
    try:
        checksums = json.loads(content)
    except ValueError:
        return "is not JSON"
    if not isinstance(checksums, dict):
        return "is not a dictionary"
    for name, whole in files.items():
        truth = hashlib.sha256(whole).hexdigest()
        if checksums.get(name) != truth:
            return (
                f"has {str(checksums.get(name))[:12]} for {name}; its sha256, in hexadecimal "
                f"digits, begins with {truth[:8]}"
            )
    for name in checksums:
        if name not in files:
            return f"names {name}, which it was not given"
    return ""


def save_atomically(save: Save) -> None:
    """The learner's `save(folder, step, files, keep)`."""
    with without(l17_run.save, l17_run.write), _without_a_disk():
        _check_save(save)
        _check_order(save)
        _check_kills(save)
        _check_cleared_before(save)


def _check_save(save: Save) -> None:
    with _folder() as folder:
        for step in (4, 8, 12, 100):
            save(folder, step, _files(step), 2)
            damage = _damage(folder, step)
            refuse({damage: damage}, f"after save(folder, {step}, ...): ")
        case = "keep=2, after steps 4, 8, 12, 100: "
        kept = [_named(12), _named(100)]
        names = _names(folder)
        refuse({f"{name} is gone": name not in names for name in kept}, case)
        refuse({f"{name} is still there": name not in kept for name in names}, case)
        inside = _names(folder / _named(100))
        truth = sorted([*_files(100), CHECKSUMS])
        refuse({f"{_named(100)} holds {inside}; expected is {truth}": inside != truth})
        save(folder, 104, _files(104), 1)
        names = _names(folder)
        only_one = names == [_named(104)]
        refuse({f"keep=1, after step 104: the folder holds {names}": not only_one})


def _check_order(save: Save) -> None:
    """What a loss of power could undo: names that were on the disk before their content."""
    with _folder() as folder:
        save(folder, 4, _files(4), 1)
        with operations(folder) as seen:
            save(folder, 8, _files(8), 1)
    renames = [rename for rename in seen.renames if rename.target == folder / _named(8)]
    if not renames:
        raise Hint(
            f"nothing was renamed to {_named(8)}: it had this name while its files were still "
            "being written, and a reader could not know"
        )
    last = renames[-1]
    if last.source.parent != folder:
        raise Hint(
            "what is renamed comes from another folder, which may be on another disk; only within "
            "one file system does a rename move no bytes"
        )
    if last.unsynced:
        name, synced_before = last.unsynced[0]
        how = "synced before all its bytes had left Python" if synced_before else "never synced"
        raise Hint(
            f"{name} gets its final name before all its bytes are on the disk (it was {how}): "
            "after a loss of power the name would be there, and the bytes not"
        )
    if last.unsynced_names:
        raise Hint(
            f"{last.unsynced_names[0]} is on the disk, but not its name: that stands in the folder "
            f"{last.source.name}, which was not synced after the file was made and before the "
            "rename. After a loss of power the folder could be there without the file"
        )
    has_name = seen.renames.index(last) + 1
    after = [sync for sync in seen.folder_syncs if sync.after_renames >= has_name]
    old = {f"{_named(4)}/{name}" for name in _files(4)}
    mistakes = {
        _unsynced_name(8): not after,
        f"{_named(4)} is removed before the name {_named(8)} is on the disk: after a loss of power "
        "in between neither of them is there. What has to come first?": (
            after and not old <= after[0].files
        ),
    }
    refuse(mistakes)
    with _folder() as folder, operations(folder) as seen:
        save(folder, 4, _files(4), 3)
    after = [sync for sync in seen.folder_syncs if sync.after_renames >= len(seen.renames)]
    refuse({_unsynced_name(4): not after}, "nothing had to be removed, and ")


def _unsynced_name(step: int) -> str:
    return (
        f"the name {_named(step)} itself is not on the disk when save returns: a name stands in "
        "the folder above it, and that has to be synced too"
    )


def _check_kills(save: Save) -> None:
    """Killed before each operation, with keep=1; then the run comes back and saves again."""
    for at in range(500):
        with _folder() as folder:
            save(folder, 4, _files(4), 1)
            with operations(folder, killed_at=at) as seen, contextlib.suppress(Killed):
                save(folder, 8, _files(8), 1)
            if len(seen.names) <= at:
                return
            killed = f"killed before {seen.names[at]!r}"
            _check_whole_one_left(folder, f"{killed} of step 8: ")
            _check_read_back(save, folder, f"{killed}, and then started again: ")
    raise Hint("one save makes more than 500 operations on the disk")


def _check_whole_one_left(folder: Path, case: str) -> None:
    new = _damage(folder, 8)
    old = _damage(folder, 4)
    mistakes = {
        f"{new}. Until it is whole it must not have this name": (
            new and (folder / _named(8)).exists()
        ),
        f"no checkpoint is left: {_named(8)} is not there yet, and {old}. When may the old one "
        "go?": new and old,
    }
    refuse(mistakes, case)


def _check_read_back(save: Save, folder: Path, case: str) -> None:
    try:
        save(folder, 8, _files(8), 1)
    except OSError as error:
        text = f"{type(error).__name__}: {error.strerror}"
        raise Hint(f"{case}{text}. What does the killed attempt leave behind?") from error
    damage = _damage(folder, 8)
    refuse({damage: damage}, case)
    for name in _names(folder):
        # of the old step it may be what a removal has left, under another name
        is_right = name == _named(8) or (name.startswith(_named(4)) and name != _named(4))
        still = f"{name} is still there. At 840 GB each, such leftovers fill a disk"
        if name == _named(4):
            still = f"{name} is still there: the killed attempt could not remove it, so this has to"
        refuse({still: not is_right}, case)


def _check_cleared_before(save: Save) -> None:
    """Leftovers of another attempt, and a damaged checkpoint of the same step."""
    with _folder() as folder:
        with operations(folder) as seen:
            save(folder, 4, _files(4), 2)
        temporary = seen.renames[-1].source.name
        if _named(4) in temporary:  # so that the name of the next one is known
            stale = folder / temporary.replace(_named(4), _named(8))
            stale.mkdir(exist_ok=True)
            (stale / "rank7.bin").write_bytes(b"of an attempt with more ranks")
            save(folder, 8, _files(8), 2)
            left = (
                f"{_named(8)} holds rank7.bin, which an earlier attempt had left under the "
                "temporary name"
            )
            refuse({left: (folder / _named(8) / "rank7.bin").exists()})
            (folder / temporary.replace(_named(4), _named(16))).mkdir()
            save(folder, 10, _files(10), 1)
            damage = _damage(folder, 10)
            case = "keep=1, and a killed attempt at step 16 has left its temporary folder: "
            lost = f"after save(folder, 10, ...) {damage}. Which of the names are checkpoints?"
            refuse({lost: damage}, case)
        damaged = folder / _named(12)
        damaged.mkdir()
        (damaged / "rank0.bin").write_bytes(b"too short")
        try:
            save(folder, 12, _files(12), 2)
        except OSError as error:
            raise Hint(
                f"a damaged {_named(12)} is there already, from which the run could not resume: "
                f"{type(error).__name__}: {error.strerror}"
            ) from error
        damage = _damage(folder, 12)
        refuse({damage: damage}, f"a damaged {_named(12)} was there already: now ")


# ---- 17.4

MATRIX = (6, 8)
CUBE = (5, 4, 3)
INNER = [Box((1, 1, 0), (3, 2, 2)), Box((4, 0, 1), (1, 4, 2))]
GRIDS: dict[str, tuple[tuple[int, ...], list[Box], list[Box]]] = {  # shape, written, wanted
    "a vector of two ranks, read by three": ((7,), rows((7,), 2), rows((7,), 3)),
    "a matrix, rows to rows": (MATRIX, rows(MATRIX, 2), rows(MATRIX, 3)),
    "a matrix, rows to columns": (MATRIX, rows(MATRIX, 3), columns(MATRIX, 4)),
    "a matrix, tiles to other tiles": (MATRIX, tiles(MATRIX, 2, 3), tiles(MATRIX, 3, 2)),
    "a matrix, four ranks to one": (MATRIX, tiles(MATRIX, 2, 2), tiles(MATRIX, 1, 1)),
    "a matrix that one rank has written": (MATRIX, tiles(MATRIX, 1, 1), rows(MATRIX, 4)),
    "a tensor of three dims": (CUBE, rows(CUBE, 3), INNER),
    "more ranks than rows": ((2, 3), rows((2, 3), 1), rows((2, 3), 3)),
}


def reshard(answer: Callable[..., Any]) -> None:
    """The learner's `reshard(box, written)`."""
    with without(l17_by_hand.reshard):
        for what, (shape, boxes, wanted) in GRIDS.items():
            whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
            for box in wanted:
                case = f"{what}: the box at {box.offsets} of sizes {box.sizes}: "
                _check_read(case, answer, whole, boxes, box)


def _check_read(
    case: str, reshard: Callable[..., Any], whole: Tensor, boxes: Sequence[Box], box: Box
) -> None:
    reads: list[Box] = []

    def read(theirs: Box) -> Tensor:
        reads.append(theirs)
        return block(whole, theirs)

    written = [(theirs, functools.partial(read, theirs)) for theirs in boxes]
    given = list(written)
    try:
        with mock.patch.object(torch, "empty", _filled_with_nan):
            found = due(reshard(box, given))
    except Exception as error:
        if is_stub(error):
            raise
        raise Hint(f"{case}{reason(error)}") from error
    tensor(found, box.sizes, f"{case}it returned")
    truth = block(whole, box)
    wrong = (found != truth).nonzero().tolist()
    if wrong:
        place = wrong[0]
        value = found[tuple(place)].item()
        shown = "nothing" if math.isnan(value) else f"{value:g}"
        in_whole = [offset + index for offset, index in zip(box.offsets, place)]
        raise Hint(
            f"{case}{len(wrong)} of {found.numel()} elements are wrong. The first is at {place}, "
            f"which is {in_whole} of the whole: {shown} in place of {truth[tuple(place)].item():g}"
        )
    for theirs in reads:
        needless = (
            f"you read the box at {theirs.offsets} of sizes {theirs.sizes}, which has nothing in "
            "common with it: on a disk that is one file too many"
        )
        refuse({needless: not _meet(box, theirs)}, case)
    held = found.untyped_storage().nbytes()
    mistakes = {
        "you read the same box more than once": len(reads) > len(set(reads)),
        f"your tensor is of {found.dtype}; what was written is of {whole.dtype}": (
            found.dtype != whole.dtype
        ),
        f"your tensor is a view: {held} bytes stay in memory for its own {found.nbytes}. Of a "
        "large model the whole would not fit": held > found.nbytes,
        "the list `written` is not yours: it has changed": given != written,
    }
    refuse(mistakes, case)


_empty = torch.empty


def _filled_with_nan(*args: Any, **options: Any) -> Tensor:
    """`torch.empty`, in which nothing looks like a value: the memory may hold that of the truth."""
    made = _empty(*args, **options)
    return made.fill_(math.nan) if made.is_floating_point() else made


def _meet(one: Box, other: Box) -> bool:
    for first, size, second, length in zip(one.offsets, one.sizes, other.offsets, other.sizes):
        if min(first + size, second + length) <= max(first, second):
            return False
    return True


# ---- 17.3

NUM_STEPS = 10
EVERY = 3

Train = Callable[..., Any]
State = dict[str, list[Tensor]]  # {its name: what a step reads that an earlier one has changed}
Truth = tuple[list[State], list[float]]

POSITION = "the position in the data"
WEIGHTS = "the weights"
OPTIMIZER = "the state of the optimizer"
RANDOM = "the state of torch's random numbers (dropout draws from them)"


def _state_of(training: Training) -> State:
    params = list(training.model.parameters())
    averages = []
    for param in params:
        for _, value in sorted(training.optimizer.state.get(param, {}).items()):
            averages.append(torch.as_tensor(value).clone())
    return {
        POSITION: [torch.tensor(float(training.batches.position))],
        WEIGHTS: [param.detach().clone() for param in params],
        OPTIMIZER: averages,
        RANDOM: [torch.get_rng_state()],
    }


def _are_equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _undisturbed() -> Truth:
    """(the state before each step and after the last, the losses)."""
    training = Training()
    states = []
    losses = []
    for _ in range(NUM_STEPS):
        states.append(_state_of(training))
        losses.append(training.step())
    states.append(_state_of(training))
    return states, losses


def _attempt(
    train: Train,
    folder: Path,
    num_steps: int = NUM_STEPS,
    die_before: int | None = None,
    die_in_save: int | None = None,
) -> tuple[Any, list[State]]:
    """Run the learner's function until its end, or until it is killed.

    Args:
        train: It.
        folder: Folder of the checkpoints.
        num_steps: Number of steps, the argument of the function.
        die_before: Number of its own steps that it may make; None: all.
        die_in_save: In which of its saves it is killed, from 0; None: in none.

    Returns:
        (what it returned, None if it was killed; the state before each of its steps)
    """
    began: list[State] = []
    saves = 0

    def before_step(training: Training) -> None:
        if die_before is not None and len(began) >= die_before:
            raise Killed
        if len(began) > num_steps:
            raise Hint(
                f"train(folder, {num_steps}, {EVERY}) goes on after {num_steps} steps: where does "
                "your loop count them?"
            )
        began.append(_state_of(training))

    write_synced = l17_run._write_synced

    def write_half(path: Path, content: bytes) -> None:
        nonlocal saves
        if path.name == STATE:
            saves += 1
            if saves - 1 == die_in_save:
                path.write_bytes(content[: len(content) // 2])
                raise Killed
        write_synced(path, content)

    returned = None
    with (
        _without_a_disk(),
        torch.random.fork_rng(devices=[]),
        mock.patch.object(l17_run, "before_step", before_step),
        mock.patch.object(l17_run, "_write_synced", write_half),
        contextlib.suppress(Killed),
    ):
        returned = train(folder, num_steps, EVERY)
    return returned, began


def _damage_newest(folder: Path, number: int) -> None:
    for path in l17_run.checkpoints(folder)[-number:]:
        content = (path / STATE).read_bytes()
        (path / STATE).write_bytes(content[:-100])


def restart_loop(train: Train) -> None:
    """The learner's `train(folder, num_steps, every)`, killed in several ways."""
    truth = _undisturbed()
    _check_two_saves(train, truth)
    _check_resumes("killed in step 8: ", train, truth, first=6, die_before=7)
    _check_resumes("killed in step 2: ", train, truth, first=0, die_before=1)
    _check_resumes("killed while it saved after step 6: ", train, truth, first=3, die_in_save=1)
    case = "the newest checkpoint is damaged: "
    _check_resumes(case, train, truth, first=3, damaged=1, die_before=7)
    _check_stops_if_none_is_whole(train)
    _check_killed_twice(train, truth)
    _check_nothing_to_do(train)


def _check_two_saves(train: Train, truth: Truth) -> None:
    with _folder() as folder:
        returned, _ = _attempt(train, folder)
        _check_losses("undisturbed: ", returned, truth, first=0)
        steps = [path.name for path in l17_run.checkpoints(folder)]
        newest = [_named(6), _named(9)]
        wrong = (
            f"undisturbed: after {NUM_STEPS} steps with every={EVERY} the folder holds {steps}; "
            f"expected are the two newest, {newest}"
        )
        refuse({wrong: steps[:2] != newest})


def _check_resumes(
    case: str, train: Train, truth: Truth, first: int, damaged: int = 0, **killed: int
) -> None:
    """Kill it once, start it again, and compare with the run that nobody has killed.

    Args:
        case: What happens.
        train: The learner's function.
        truth: States and losses of the undisturbed run.
        first: Steps that are done when it resumes.
        damaged: Number of the newest checkpoints that are cut off before it resumes.
        killed: When the first attempt dies, as `_attempt` takes it.
    """
    with _folder() as folder:
        _attempt(train, folder, **killed)
        if damaged:
            _damage_newest(folder, damaged)
        try:
            returned, began = _attempt(train, folder)
        except l17_run.DamagedError as error:
            said = str(error).replace(str(folder), folder.name)
            text = f"DamagedError: {said}. There is an older one, which is whole"
            raise Hint(f"{case}{text}") from error
        except Exception as error:
            is_whole = not damaged and "die_in_save" not in killed
            if is_whole or isinstance(error, Hint) or is_stub(error):
                raise
            raise Hint(
                f"{case}{reason(error)}. Is it known to be whole before it is used? Its name and "
                "its checksums say so"
            ) from error
        _check_continued(case, returned, began, truth, first)


def _check_continued(
    case: str, returned: Any, began: list[State], truth: Truth, first: int
) -> None:
    """The second attempt begins with the state that was saved, and makes the rest."""
    if not began:
        raise Hint(f"{case}the second attempt makes no step")
    states, _ = truth
    differs = {}
    for name, found in began[0].items():
        differs[name] = not _are_equal(found, states[first][name])
    is_fresh = _are_equal(began[0][WEIGHTS], states[0][WEIGHTS])
    for step in range(1, first):
        older = (
            f"the second attempt goes on from step {step}, and the newest checkpoint that is whole "
            f"is of step {first}"
        )
        refuse({older: _same_state(began[0], states[step])}, case)
    mistakes = {
        "the second attempt begins again with the weights of step 1: what does it look for, and "
        "where?": first > 0 and is_fresh and differs[POSITION],
    }
    for name, sign in differs.items():
        text = (
            f"the next step should be step {first + 1}. When the second attempt begins it, one "
            f"thing is not as it was: {name}. Is it in the checkpoint, and is it put back?"
        )
        if name == RANDOM:
            text += " And does nothing draw from it after that?"
        mistakes[text] = sign
    refuse(mistakes, case)
    _check_losses(case, returned, truth, first)


def _same_state(one: State, other: State) -> bool:
    return all(_are_equal(one[name], other[name]) for name in one)


def _check_losses(case: str, found: Any, truth: Truth, first: int) -> None:
    found = due(found)
    if not isinstance(found, Mapping):
        raise Hint(f"{case}give a dictionary, step: loss; found {type(found).__name__}")
    _, losses = truth
    right = {step: losses[step - 1] for step in range(first + 1, len(losses) + 1)}
    if found.keys() != right.keys():
        raise Hint(
            f"{case}you return the losses of the steps {_range(found)}; this attempt makes the "
            f"steps {_range(right)}, counted from 1"
        )
    for step, loss in right.items():
        wrong = f"the loss of step {step} is {found[step]}; undisturbed it is {loss}"
        refuse({wrong: found[step] != loss}, case)


def _range(steps: Mapping[Any, Any]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"


def _check_killed_twice(train: Train, truth: Truth) -> None:
    with _folder() as folder:
        _attempt(train, folder, die_before=4)
        _, began = _attempt(train, folder, die_before=4)
        refuse({"killed twice: the second attempt makes no fourth step": len(began) != 4})
        returned, began = _attempt(train, folder)
        _check_continued("killed in step 5, then in step 8: ", returned, began, truth, first=6)


def _check_stops_if_none_is_whole(train: Train) -> None:
    """All checkpoints are damaged: somebody has to look before they are overwritten."""
    with _folder() as folder:
        _attempt(train, folder, die_before=7)
        _damage_newest(folder, 2)
        try:
            _, began = _attempt(train, folder)
        except l17_run.DamagedError:
            return
        raise Hint(
            f"both checkpoints are damaged: the second attempt makes {len(began)} steps from "
            "step 1 on, and overwrites what may be weeks of work. Stop with a DamagedError"
        )


def _check_nothing_to_do(train: Train) -> None:
    with _folder() as folder:
        _attempt(train, folder, num_steps=2 * EVERY)
        returned, began = _attempt(train, folder, num_steps=2 * EVERY)
        mistakes = {
            f"all {2 * EVERY} steps are done and saved, and the run is started again: it makes "
            f"{len(began)} more": began,
            f"all steps are done: no loss is left to return; found {returned}": due(returned),
        }
        refuse(mistakes)


# ---- 17.5

Suspects = Callable[[Sequence[str], Sequence[str]], Any]
REPLAYS = {  # (ranks, {(rank, batch) of what comes out wrong}, the suspects)
    "4 ranks, and all agree": (4, set(), []),
    "4 ranks, rank 2 is broken": (4, {(2, 2), (2, 1)}, [2]),
    "4 ranks, rank 0 is broken": (4, {(0, 0), (0, 3)}, [0]),
    "5 ranks, rank 4 is broken": (5, {(4, 4), (4, 3)}, [4]),
    "3 ranks, rank 1 is broken": (3, {(1, 1), (1, 0)}, [1]),
    "4 ranks, rank 1 is wrong about its own batch only": (4, {(1, 1)}, [1, 2]),
    "4 ranks, rank 3 is wrong about its own batch only": (4, {(3, 3)}, [0, 3]),
    "4 ranks, rank 0 is wrong about the batch of rank 3 only": (4, {(0, 3)}, [0, 3]),
    "2 ranks, rank 1 is broken": (2, {(1, 1), (1, 0)}, [0, 1]),
}


def replay(suspects: Suspects) -> None:
    """The learner's `suspects(own, again)`."""
    if not callable(suspects):
        raise Hint("give the function itself: it is asked about several replays")
    with without(l17_by_hand.suspects):
        for what, (num_ranks, wrong, truth) in REPLAYS.items():
            own, again = _checksums(num_ranks, wrong)
            given = (list(own), list(again))
            try:
                found = due(suspects(*given))
            except Exception as error:
                if is_stub(error) or isinstance(error, Hint):
                    raise
                raise Hint(f"{what}: {reason(error)}") from error
            refuse({"it has changed one of the lists": given != (own, again)}, f"{what}: ")
            _check_suspected(f"{what}: own={own}, again={again}: ", found, truth, num_ranks)


def _checksums(num_ranks: int, wrong: set[tuple[int, int]]) -> tuple[list[str], list[str]]:
    """What the ranks have found: a letter for each batch, in capitals where it came out wrong."""

    def found(rank: int, batch: int) -> str:
        letter = "abcdefgh"[batch]
        return f"{letter.upper()}{rank}" if (rank, batch) in wrong else f"{letter}-"

    own = [found(rank, rank) for rank in range(num_ranks)]
    again = [found(rank, (rank - 1) % num_ranks) for rank in range(num_ranks)]
    return own, again


def _check_suspected(case: str, found: Any, truth: list[int], num_ranks: int) -> None:
    if isinstance(found, tuple | set | frozenset):
        raise Hint(f"{case}found {found!r}: give a list, in rising order")
    if not isinstance(found, list):
        raise Hint(f"{case}found {found!r}: give a list of ranks")
    everybody = list(range(num_ranks))
    mistakes = {
        "a list of ranks, which are whole numbers, was expected": any(
            not isinstance(rank, int) or isinstance(rank, bool) for rank in found
        ),
        "nobody disagrees, so nobody is suspected": not truth and found,
        "the ranks are right, but not each once and in rising order": (
            found != truth and truth and sorted(set(found)) == truth
        ),
        "ranks disagree about a batch, and nobody is suspected. Who computes the last batch a "
        "second time?": not found and truth,
        "every pair that disagrees is in your list. Which rank is in two of them?": (
            len(truth) == 1 and set(truth) < set(found) and len(found) == 3 and num_ranks > 3
        ),
        "every rank is suspected. `own[r]` and `again[r]` are of two batches; which two places "
        "are about the same batch?": found == everybody and truth != everybody,
        "only one of the two is suspected. They disagree about one batch, and nothing says which "
        "of them is right": len(truth) == 2 and set(found) < set(truth),
        f"found {found}. Which two ranks have computed each batch, and about which batches do "
        "they disagree?": found != truth,
    }
    refuse(mistakes, case)


# ---- 17.6

KEYS = ("kind", "interval_s", "keep", "mtbf_s", "overhead")
KINDS = ("blocking", "background")
WITHIN = 1.15  # of the cheapest plan's cost
CLOSE = 1.15  # of a prediction, as a factor
NEAR_MTBF = 0.05

HELP = (
    l17_plan.best,
    l17_plan.expected,
    l17_plan.simulated,
    l17_plan.mtbf_s,
    l17_plan.standstill_s,
    l17_plan.write_s,
)
Plan = Mapping[str, Any]

_simulated = functools.cache(l17_plan.simulated)
_best = functools.cache(l17_plan.best)


def plan(make_plan: Callable[..., Any]) -> None:
    """The learner's `make_plan(site)`, for the cluster of the lesson and for another one."""
    if not callable(make_plan):
        raise Hint("give the function itself: it is asked for two clusters")
    site = l17_plan.SITE
    answer = _plan_for(site, make_plan)
    cost = _simulated(site, answer["kind"], answer["interval_s"])
    print(f"your plan:      {_in_parts(cost)}")
    _judge(answer, cost, site)
    kind, interval_s, least = _best(site)
    print(f"labcode's plan: {_in_parts(least)}  ({kind}, every {interval_s:.0f} s)")
    for other in (l17_plan.OTHER_SITE, l17_plan.THIRD_SITE):
        _check_other_cluster(make_plan, other)


def _check_other_cluster(make_plan: Callable[..., Any], other: l17_plan.Site) -> None:
    try:
        answer = _plan_for(other, make_plan)
        _judge(answer, _simulated(other, answer["kind"], answer["interval_s"]), other)
    except Hint as hint:
        raise Hint(
            f"right here. On another cluster ({other.gpus:,} GPUs, {other.preemptions_per_day:g} "
            f"preemptions a day with a notice of {other.notice_s:g} s, checkpoints of "
            f"{other.checkpoint_bytes / 1e9:,.0f} GB, {other.write_bytes_per_s / 1e9:g} GB/s) take "
            f"every number from `site`: {hint}"
        ) from None


def _plan_for(site: l17_plan.Site, make_plan: Callable[..., Any]) -> Plan:
    """The learner's plan, with all its keys."""
    with without(*HELP):
        answer = due(make_plan(site))
    if not isinstance(answer, Mapping):
        raise Hint(f"give a dictionary; found {type(answer).__name__}")
    for key in KEYS:
        refuse({f"your plan does not say {key!r}": key not in answer})
    if any(value is ... for value in answer.values()):
        raise NotImplementedError("exercise")
    kind = answer["kind"]
    refuse({f"kind={kind!r}: choose {' or '.join(KINDS)}": kind not in KINDS})
    for key in KEYS[1:]:
        number = answer[key]
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if not is_number or not number > 0:
            raise Hint(f"{key}={number!r}: give a number above 0")
    return answer


def _in_parts(cost: l17_plan.Cost) -> str:
    return (
        f"saving {cost.saving:6.2%}  work done again {cost.lost:6.2%}  "
        f"restarts {cost.restarting:6.2%}  in all {cost.total:6.2%}"
    )


def _judge(answer: Plan, cost: l17_plan.Cost, site: l17_plan.Site) -> None:
    """A plan is allowed, knows how often the run ends, is cheap, and was foreseen."""
    keep = answer["keep"]
    writing = l17_plan.writing(site, answer["kind"], answer["interval_s"])
    mistakes = {
        f"keep={keep}: it is a number of checkpoints": keep % 1 != 0,
        "keep=1: if the only checkpoint turns out to be damaged, the run begins again at step 1": (
            keep < 2
        ),
        f"keep={keep}: while one more is written there are {keep + 1} checkpoints, of "
        f"{site.checkpoint_bytes / 1e9:.0f} GB each, in {site.quota_bytes / 1e9:.0f} GB": (
            keep + 1 > site.quota_bytes / site.checkpoint_bytes
        ),
        f"your job writes {writing:.1%} of the time; the site allows {site.max_writing:.0%}": (
            writing > site.max_writing * 1.001
        ),
    }
    refuse(mistakes)
    _check_mtbf(answer["mtbf_s"], site)
    kind, _, least = _best(site)
    largest = "saving" if cost.saving > cost.lost else "work that is done again"
    question = f"Of yours, {largest} is the larger part: what lowers it?"
    if answer["kind"] != kind:
        question = "What would the other kind of save cost here?"
    ratio = answer["overhead"] / cost.total
    mistakes = {
        f"your plan costs {cost.total:.2%}, and there is one for less than "
        f"{cost.total / WITHIN:.2%}. {question}": cost.total > WITHIN * least.total,
        f"you expect an overhead of {answer['overhead']:.2%}, and the simulation finds "
        f"{cost.total:.2%}: saving, work that is done again, restarts: which one do you see "
        "differently?": not 1 / CLOSE <= ratio <= CLOSE,
    }
    refuse(mistakes)


def _check_mtbf(mtbf_s: float, site: l17_plan.Site) -> None:
    """The mean time between what ends the run without a save."""
    truth = l17_plan.mtbf_s(site)
    hardware_s = site.gpu_mtbf_s / site.gpus
    preemption_s = l17_plan.DAY_S / site.preemptions_per_day if site.preemptions_per_day else 0
    mistakes = {
        "that is the hardware alone. Is there time to save before a preemption?": hardware_s,
        "two causes together are longer apart than each alone? Which of them adds up, the times or "
        "the rates?": hardware_s + preemption_s,
    }
    otherwise = (
        f"that is {l17_plan.DAY_S / mtbf_s:.3g} ends a day. How many come from the hardware, and "
        f"how many from other jobs? (Not {l17_plan.DAY_S / truth:.0f} exactly.)"
    )
    case = f"mtbf_s={mtbf_s:.4g} s, {mtbf_s / HOUR_S:.3g} h: "
    diagnose(case, mtbf_s, truth, mistakes, otherwise, NEAR_MTBF)


EXERCISES = {
    "17.1": Exercise(
        check=best_interval,
        praise="a square root: four times the cluster needs only twice as many checkpoints",
        hints=(
            "at the minimum a small change of T changes nothing: what is the derivative of "
            "C/T + T/(2M) with respect to T?",
        ),
    ),
    "17.2": Exercise(
        check=save_atomically,
        praise="killed before each of its operations, it has never lost the checkpoint before",
        hints=(
            "the name of a checkpoint is a promise: which of your lines gives it, and what has to "
            "be true by then?",
            "`write` gives the bytes to Python, `flush` gives them to the system, `os.fsync` gives "
            "them to the disk",
            "what an earlier, killed attempt has left under the temporary name is still there",
        ),
    ),
    "17.4": Exercise(
        check=reshard,
        praise="any grid from any other, and nothing is read that is not needed",
        hints=(
            "along one dim, two ranges [a, b) and [c, d) share what lies between the larger begin "
            "and the smaller end",
            "the same elements have two places: one in the tensor that you have read, counted from "
            "its own offsets, and one in yours",
        ),
    ),
    "17.3": Exercise(
        check=restart_loop,
        praise="the run ends with the losses of one that nobody has killed, to the last bit",
        hints=(
            "what does a step read that an earlier step has changed? There are four such things",
            "`for path in reversed(l17_run.checkpoints(folder))` looks at the newest first; what "
            "does it mean if this loop comes to its end, and the list was not empty?",
            "a checkpoint that is written after step 6 is of a run in which six steps are done: "
            "which step comes next?",
        ),
    ),
    "17.5": Exercise(
        check=replay,
        praise="the broken rank is found by its neighbours, though every number looks ordinary",
        hints=(
            "batch b is computed by rank b, as its own, and by one more rank: where in `again` is "
            "that result?",
            "count for each rank in how many disagreements it has a part",
        ),
    ),
    "17.6": Exercise(
        check=plan,
        praise="a plan that this cluster can keep, at a cost that you knew beforehand",
        hints=(
            "who ends your runs, besides the hardware, and does the notice suffice for a save? "
            "Rates add up: 1/M is a rate",
            "Young's formula wants what a checkpoint costs the training, in seconds. In the "
            "background that is the copy, and the part of its speed that it loses meanwhile",
            "if the best interval is not allowed, take the nearest that is",
        ),
    ),
}
