"""Checks of lesson 17, surviving failures. The text of each assertion is a hint."""

import contextlib
import hashlib
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from labcode.perf.failures import daly_interval_s, young_interval_s
from labcode.teach import tracebacks
from labcode.teach.check import Exercise, due
from labcode.teach.exercises.in_notebook import without
from labcode.teach.labs import l17_plan, l17_run
from labcode.teach.labs.l17_boxes import Box, block, columns, rows, tiles
from labcode.teach.labs.l17_disk import Killed, Seen, operations
from labcode.teach.labs.l17_run import CHECKSUMS, STATE, Training

# ---- 17.1

HOUR_S = 3600.0
NEAR = 0.01  # the minimum is flat
SAVES_AND_MTBFS = ((60.0, 3 * HOUR_S), (5.0, 3 * HOUR_S), (30.0, 400 * HOUR_S), (1.0, 50.0))


def best_interval(best_interval_s: Callable[[float, float], float]) -> None:
    """The learner's `best_interval_s(save_s, mtbf_s)`."""
    for save_s, mtbf_s in SAVES_AND_MTBFS:
        with without(young_interval_s, daly_interval_s):
            found = due(best_interval_s(save_s, mtbf_s))
        assert isinstance(found, int | float), f"{found!r}: give a number of seconds"
        case = f"C = {save_s:g} s, M = {mtbf_s:g} s: "
        expected = young_interval_s(save_s, mtbf_s)
        ratio = found / expected
        assert not math.isclose(ratio, math.sqrt(0.5), rel_tol=NEAR), (
            case + f"{found:.4g} s is too short: how much of an interval does a failure undo, all "
            "of it or half of it?"
        )
        assert not math.isclose(found, expected**2, rel_tol=NEAR), (
            case + "your number is in seconds squared"
        )
        if math.isclose(ratio, 1, rel_tol=NEAR):
            continue
        assert not math.isclose(found, daly_interval_s(save_s, mtbf_s), rel_tol=NEAR), (
            case + "that is Daly's interval, which counts more than the formula above; here the T "
            "is meant at which C/T + T/(2M) is lowest"
        )
        assert found > 0, case + f"{found!r} s: an interval is above 0"
        other = "longer" if ratio < 1 else "shorter"
        raise AssertionError(
            case + f"with T = {found:.4g} s, C/T + T/(2M) is "
            f"{save_s / found + found / (2 * mtbf_s):.3g}, and a {other} T costs less"
        )


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


def _damage(folder: Path, step: int) -> str:
    """What is wrong with the checkpoint of a step; "" if nothing is."""
    path = folder / _named(step)
    if not path.is_dir():
        return f"there is no folder {path.name}"
    files = _files(step)
    for name, content in files.items():
        if not (path / name).is_file():
            return f"{path.name} has no {name}"
        size = (path / name).stat().st_size
        if size != len(content):
            return f"{path.name}/{name} has {size} of {len(content)} bytes"
        if (path / name).read_bytes() != content:
            return f"{path.name}/{name} has another content than it was given"
    return _damage_of_checksums(path, files)


def _damage_of_checksums(path: Path, files: Files) -> str:
    if not (path / CHECKSUMS).is_file():
        return f"{path.name} has no {CHECKSUMS}"
    try:
        checksums = json.loads((path / CHECKSUMS).read_text())
    except ValueError:
        return f"{path.name}/{CHECKSUMS} is not JSON"
    if not isinstance(checksums, dict):
        return f"{path.name}/{CHECKSUMS} is not a dictionary"
    for name, content in files.items():
        expected = hashlib.sha256(content).hexdigest()
        if checksums.get(name) != expected:
            return (
                f"{path.name}/{CHECKSUMS} has {str(checksums.get(name))[:12]} for {name}; its "
                f"sha256, in hexadecimal digits, begins with {expected[:8]}"
            )
    more = sorted(set(checksums) - set(files))
    if more:
        return f"{path.name}/{CHECKSUMS} names {more[0]}, which it was not given"
    return ""


def save_atomically(save: Save) -> None:
    """The learner's `save(folder, step, files, keep)`."""
    with without(l17_run.save, l17_run.write):
        _saves_and_keeps(save)
        _orders_its_work(save)
        _survives_kills(save)
        _clears_up_before(save)


def _saves_and_keeps(save: Save) -> None:
    with _folder() as folder:
        for step in (4, 8, 12, 100):
            save(folder, step, _files(step), 2)
            damage = _damage(folder, step)
            assert not damage, f"after save(folder, {step}, ...): {damage}"
        names = sorted(path.name for path in folder.iterdir())
        kept = [_named(12), _named(100)]
        left = [name for name in names if name not in kept]
        missing = [name for name in kept if name not in names]
        assert not missing, f"keep=2, after steps 4, 8, 12, 100: {missing[0]} is gone"
        assert not left, f"keep=2, after steps 4, 8, 12, 100: {left[0]} is still there"
        inside = sorted(path.name for path in (folder / _named(100)).iterdir())
        expected = sorted([*_files(100), CHECKSUMS])
        assert inside == expected, f"{_named(100)} holds {inside}; {expected} were meant"
        save(folder, 104, _files(104), 1)
        names = sorted(path.name for path in folder.iterdir())
        assert names == [_named(104)], f"keep=1, after step 104: the folder holds {names}"


def _orders_its_work(save: Save) -> None:
    """What a loss of power could undo: content that was renamed before it was on the disk."""
    with _folder() as folder:
        save(folder, 4, _files(4), 1)
        with operations(folder) as seen:
            save(folder, 8, _files(8), 1)
        renames = [rename for rename in seen.renames if rename.target == folder / _named(8)]
        assert renames, (
            f"nothing was renamed to {_named(8)}: it had this name while its files were still "
            "being written, and a reader could not know"
        )
        rename = renames[-1]
        assert rename.source.parent == folder, (
            f"what is renamed comes from {rename.source.parent.name}/, another folder, which may "
            "be on another disk; only within one file system does a rename move no bytes"
        )
        if rename.unsynced:
            name, synced_before = rename.unsynced[0]
            how = "it was never synced"
            if synced_before:
                how = "it was synced before all its bytes had left Python"
            raise AssertionError(
                f"{name} gets its final name before all its bytes are on the disk ({how}): after "
                "a loss of power the name would be there, and the bytes not"
            )
        _names_are_synced(seen, seen.renames.index(rename) + 1)
    with _folder() as folder:
        with operations(folder) as seen:
            save(folder, 4, _files(4), 3)
        _names_are_synced(seen, len(seen.renames), "nothing had to be removed, and ")


def _names_are_synced(seen: Seen, renames: int, case: str = "") -> None:
    """The new name is on the disk before the old checkpoint is touched.

    Args:
        seen: What was done.
        renames: How many names had been given when the checkpoint had its own.
        case: Begins the message.
    """
    later = [sync for sync in seen.folder_syncs if sync.after_renames >= renames]
    assert later, case + (
        f"the name {_named(8) if not case else _named(4)} itself is not on the disk when save "
        "returns: a name stands in the folder above it, and that has to be synced too"
    )
    if case:
        return
    old = {f"{_named(4)}/{name}" for name in _files(4)}
    assert old <= later[0].files, (
        f"{_named(4)} is removed before the name {_named(8)} is on the disk: after a loss of power "
        "in between neither of them is there. What has to come first?"
    )


def _survives_kills(save: Save) -> None:
    """Killed before each operation, with keep=1; then the run comes back and saves again."""
    at = 0
    while True:
        with _folder() as folder:
            save(folder, 4, _files(4), 1)
            with operations(folder, killed_at=at) as seen, contextlib.suppress(Killed):
                save(folder, 8, _files(8), 1)
            if len(seen.names) <= at:
                return
            _judge_kill(folder, f"killed before {seen.names[at]!r} of step 8: ")
            _comes_back(save, folder, f"killed before {seen.names[at]!r}, and then started again: ")
        at += 1
        assert at < 500, "one save makes more than 500 operations on the disk"


def _judge_kill(folder: Path, case: str) -> None:
    new = _damage(folder, 8)
    assert not new or not (folder / _named(8)).exists(), (
        case + f"{new}. Until it is whole it must not have this name"
    )
    old = _damage(folder, 4)
    assert not new or not old, (
        case + f"no checkpoint is left: {_named(8)} is not there yet, and {old}. When may the old "
        "one go?"
    )


def _comes_back(save: Save, folder: Path, case: str) -> None:
    try:
        save(folder, 8, _files(8), 1)
    except OSError as error:
        raise AssertionError(
            case + f"{type(error).__name__}: {error.strerror}. What does the killed attempt leave "
            "behind?"
        ) from error
    damage = _damage(folder, 8)
    assert not damage, case + damage
    left = []
    for path in sorted(folder.iterdir()):
        is_of_old_step = path.name.startswith(_named(4)) and path.name != _named(4)
        if path.name != _named(8) and not is_of_old_step:
            left.append(path.name)
    assert not left, case + f"{left[0]} is still there. At 840 GB each, such leftovers fill a disk"


def _clears_up_before(save: Save) -> None:
    """Leftovers of another attempt, and a damaged checkpoint of the same step."""
    with _folder() as folder:
        with operations(folder) as seen:
            save(folder, 4, _files(4), 2)
        source = seen.renames[-1].source
        stale = folder / source.name.replace(_named(4), _named(8))
        if stale.name != source.name or stale.name == "":
            stale.mkdir(exist_ok=True)
            (stale / "rank7.bin").write_bytes(b"of an attempt with more ranks")
            save(folder, 8, _files(8), 2)
            assert not (folder / _named(8) / "rank7.bin").exists(), (
                f"{_named(8)} holds rank7.bin, which an earlier attempt had left under the "
                "temporary name"
            )
        damaged = folder / _named(12)
        damaged.mkdir()
        (damaged / "rank0.bin").write_bytes(b"too short")
        try:
            save(folder, 12, _files(12), 2)
        except OSError as error:
            raise AssertionError(
                f"a damaged {_named(12)} is there already, from which the run could not resume: "
                f"{type(error).__name__}: {error.strerror}"
            ) from error
        damage = _damage(folder, 12)
        assert not damage, f"a damaged {_named(12)} was there already: now {damage}"


# ---- 17.4


class _Case(NamedTuple):
    """A tensor that one grid has written and another one reads.

    Args:
        what: In words.
        shape: Of the whole.
        written: By the one.
        wanted: By the other.
    """

    what: str
    shape: tuple[int, ...]
    written: list[Box]
    wanted: list[Box]


def _cases() -> list[_Case]:
    matrix = (6, 8)
    cube = (5, 4, 3)
    inner = [Box((1, 1, 0), (3, 2, 2)), Box((4, 0, 1), (1, 4, 2))]
    return [
        _Case("a vector of two ranks, read by three", (7,), rows((7,), 2), rows((7,), 3)),
        _Case("a matrix, rows to rows", matrix, rows(matrix, 2), rows(matrix, 3)),
        _Case("a matrix, rows to columns", matrix, rows(matrix, 3), columns(matrix, 4)),
        _Case("a matrix, tiles to other tiles", matrix, tiles(matrix, 2, 3), tiles(matrix, 3, 2)),
        _Case("a matrix, four ranks to one", matrix, tiles(matrix, 2, 2), tiles(matrix, 1, 1)),
        _Case("a matrix that one rank has written", matrix, tiles(matrix, 1, 1), rows(matrix, 4)),
        _Case("a tensor of three dims", cube, rows(cube, 3), inner),
        _Case("more ranks than rows", (2, 3), rows((2, 3), 1), rows((2, 3), 3)),
    ]


def reshard(reshard: Callable[..., Any]) -> None:
    """The learner's `reshard(box, written)`."""
    for case in _cases():
        whole = torch.arange(1.0, 1 + math.prod(case.shape)).reshape(case.shape)
        for box in case.wanted:
            _check_box(reshard, case, whole, box)


def _check_box(reshard: Callable[..., Any], case: _Case, whole: torch.Tensor, box: Box) -> None:
    where = f"{case.what}: the box at {box.offsets} of sizes {box.sizes}: "
    reads: list[int] = []

    def reader(number: int) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            reads.append(number)
            return block(whole, case.written[number])

        return read

    written = []
    for number, theirs in enumerate(case.written):
        written.append((theirs, reader(number)))
    given = list(written)
    try:
        found = due(reshard(box, given))
    except NotImplementedError:
        raise
    except (RuntimeError, IndexError, TypeError) as error:
        text = str(error).partition("\n")[0]
        place = tracebacks.place_in_cells(error)
        raise AssertionError(where + f"{type(error).__name__}: {text[:160]}{place}") from error
    assert isinstance(found, torch.Tensor), where + f"give a tensor; found {type(found).__name__}"
    assert tuple(found.shape) == box.sizes, where + f"your tensor has the shape {list(found.shape)}"
    _check_content(where, found, block(whole, box), box)
    needed = [number for number, theirs in enumerate(case.written) if _meet(box, theirs)]
    more = sorted(set(reads) - set(needed))
    if more:
        theirs = case.written[more[0]]
        raise AssertionError(
            where + f"you read the box at {theirs.offsets} of sizes {theirs.sizes}, which has "
            "nothing in common with it: on a disk that is a file too much"
        )
    assert len(reads) == len(needed), where + "you read the same box more than once"
    assert found.dtype == whole.dtype, (
        where + f"your tensor is of {found.dtype}; what was written is of {whole.dtype}"
    )
    own_bytes = found.numel() * found.element_size()
    held_bytes = found.untyped_storage().nbytes()
    assert held_bytes <= own_bytes, (
        where
        + f"your tensor is a view: {held_bytes} bytes stay in memory for its own {own_bytes}. "
        "Of a large model the whole would not fit"
    )
    assert given == written, where + "the list `written` is not yours: it has changed"


def _check_content(where: str, found: torch.Tensor, expected: torch.Tensor, box: Box) -> None:
    wrong = (found != expected).nonzero().tolist()
    if not wrong:
        return
    place = wrong[0]
    value = found[tuple(place)].item()
    wanted = expected[tuple(place)].item()
    in_whole = [offset + index for offset, index in zip(box.offsets, place)]
    raise AssertionError(
        where + f"{len(wrong)} of {found.numel()} elements are wrong. The first is at {place}, "
        f"which is {in_whole} of the whole: {value:g} in place of {wanted:g}"
    )


def _meet(one: Box, other: Box) -> bool:
    for first, size, second, length in zip(one.offsets, one.sizes, other.offsets, other.sizes):
        if min(first + size, second + length) <= max(first, second):
            return False
    return True


# ---- 17.3

NUM_STEPS = 10
EVERY = 3


class _State(NamedTuple):
    """What a step reads that an earlier one has changed."""

    position: int
    weights: list[torch.Tensor]
    optimizer: list[torch.Tensor]
    random: torch.Tensor


NAMES = {  # field of _State: what it is called
    "position": "the position in the data",
    "weights": "the weights",
    "optimizer": "the state of the optimizer",
    "random": "the state of torch's random numbers (dropout draws from them)",
}


def _state_of(training: Training) -> _State:
    weights = [param.detach().clone() for param in training.model.parameters()]
    optimizer = []
    for param in training.model.parameters():
        for _, value in sorted(training.optimizer.state.get(param, {}).items()):
            optimizer.append(torch.as_tensor(value).clone())
    return _State(training.batches.position, weights, optimizer, torch.get_rng_state())


def _differs(one: _State, other: _State) -> str:
    """The field in which two states differ first; "" if they are the same."""
    for name in NAMES:
        first = getattr(one, name)
        second = getattr(other, name)
        if isinstance(first, list):
            same = len(first) == len(second) and all(map(torch.equal, first, second))
        elif isinstance(first, torch.Tensor):
            same = torch.equal(first, second)
        else:
            same = first == second
        if not same:
            return name
    return ""


def _undisturbed() -> tuple[list[_State], list[float]]:
    """(the state before each step and after the last, the losses)."""
    training = Training()
    states = []
    losses = []
    for _ in range(NUM_STEPS):
        states.append(_state_of(training))
        losses.append(training.step())
    states.append(_state_of(training))
    return states, losses


class _Attempt(NamedTuple):
    """What one attempt has done.

    Args:
        returned: By the learner's function; None if it was killed.
        began: The state before each of its steps.
    """

    returned: Any
    began: list[_State]


def _attempt(
    train: Callable[..., Any],
    folder: Path,
    die_before: int | None = None,
    num_steps: int = NUM_STEPS,
    die_in_save: int | None = None,
) -> _Attempt:
    """Run the learner's function until its end, or until it is killed.

    Args:
        train: It.
        folder: Of the checkpoints.
        die_before: Number of its own steps that it may make; None: all.
        num_steps: Its argument.
        die_in_save: In which of its saves it is killed, from 0; None: in none.
    """
    began: list[_State] = []
    saves = 0

    def before_step(training: Training) -> None:
        if die_before is not None and len(began) >= die_before:
            raise Killed
        assert len(began) <= num_steps, (
            f"train(folder, {num_steps}, {EVERY}) goes on after {num_steps} steps: where does your "
            "loop count them?"
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
        torch.random.fork_rng(devices=[]),
        mock.patch.object(l17_run, "before_step", before_step),
        mock.patch.object(l17_run, "_write_synced", write_half),
        contextlib.suppress(Killed),
    ):
        returned = train(folder, num_steps, EVERY)
    return _Attempt(returned, began)


def restart_loop(train: Callable[..., Any]) -> None:
    """The learner's `train(folder, num_steps, every)`, killed in several ways."""
    states, losses = _undisturbed()
    with _folder() as folder:
        whole = _attempt(train, folder)
        _check_returned("undisturbed: ", due(whole.returned), 0, losses)
        steps = [path.name for path in l17_run.checkpoints(folder)]
        expected = [_named(6), _named(9)]
        assert steps[:2] == expected, (
            f"undisturbed: after {NUM_STEPS} steps with every={EVERY} the folder holds {steps}; "
            f"{expected} were meant, the two newest"
        )
    _resumes("killed in step 8: ", train, states, losses, die_before=7, first=6)
    _resumes("killed in step 2: ", train, states, losses, die_before=1, first=0)
    _resumes("killed while it saved after step 6: ", train, states, losses, die_in_save=1, first=3)
    _resumes(
        "the newest checkpoint is damaged: ",
        train,
        states,
        losses,
        die_before=7,
        first=3,
        damaged=True,
    )
    _has_nothing_whole(train)
    _is_killed_twice(train, states, losses)
    _has_nothing_to_do(train)


def _resumes(
    case: str,
    train: Callable[..., Any],
    states: Sequence[_State],
    losses: Sequence[float],
    first: int,
    die_before: int | None = None,
    die_in_save: int | None = None,
    damaged: bool = False,
) -> None:
    """Kill it once, start it again, and compare with the run that nobody has killed.

    Args:
        case: What happens.
        train: The learner's function.
        states: Of the undisturbed run.
        losses: Of the undisturbed run.
        first: Steps that are done when it goes on.
        die_before: As of `_attempt`.
        die_in_save: As of `_attempt`.
        damaged: The newest checkpoint is cut off before it goes on.
    """
    with _folder() as folder:
        _attempt(train, folder, die_before, die_in_save=die_in_save)
        if damaged:
            newest = l17_run.checkpoints(folder)[-1] / STATE
            newest.write_bytes(newest.read_bytes()[:-100])
        try:
            again = _attempt(train, folder)
        except l17_run.DamagedError as error:
            raise AssertionError(
                case + f"DamagedError: {error}. There is an older one, which is whole"
            ) from error
        except (RuntimeError, ValueError, OSError, EOFError) as error:
            whole = not damaged and die_in_save is None
            if whole or isinstance(error, NotImplementedError):
                raise
            raise AssertionError(
                case + f"{type(error).__name__}: {error}. Is it known to be whole before it is "
                "used? Its name and its checksums say so"
            ) from error
        _check_goes_on(case, again, states, losses, first)


def _check_goes_on(
    case: str,
    again: _Attempt,
    states: Sequence[_State],
    losses: Sequence[float],
    first: int,
) -> None:
    assert again.began, case + "the second attempt makes no step"
    position = states[first].position
    found = again.began[0]
    size = states[1].position
    if found.position != position and found.position % size == 0:
        weights = [number for number, state in enumerate(states) if _same_weights(state, found)]
        done = weights[0] if weights else None
        assert done != 0 or first == 0, (
            case + "the second attempt begins again with the weights of step 1: what does it look "
            "for, and where?"
        )
    wrong = _differs(found, states[first])
    assert not wrong, (
        case + f"the next step should be step {first + 1}. When the second attempt begins it, "
        f"{NAMES.get(wrong)}: not as it was. Is it in the checkpoint, and is it put back?"
    )
    _check_returned(case, due(again.returned), first, losses)


def _same_weights(one: _State, other: _State) -> bool:
    return all(map(torch.equal, one.weights, other.weights))


def _check_returned(case: str, found: Any, first: int, losses: Sequence[float]) -> None:
    assert isinstance(found, Mapping), (
        case + f"give a dictionary, step: loss; found {type(found).__name__}"
    )
    expected = {step: losses[step - 1] for step in range(first + 1, len(losses) + 1)}
    assert list(found) == list(expected), (
        case + f"you return the losses of the steps {_range(list(found))}; this attempt makes the "
        f"steps {_range(list(expected))}, counted from 1"
    )
    for step, loss in expected.items():
        assert found[step] == loss, (
            case + f"the loss of step {step} is {found[step]}; undisturbed it is {loss}"
        )


def _range(steps: Sequence[Any]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"


def _is_killed_twice(
    train: Callable[..., Any], states: Sequence[_State], losses: Sequence[float]
) -> None:
    with _folder() as folder:
        _attempt(train, folder, die_before=4)
        second = _attempt(train, folder, die_before=4)
        assert len(second.began) == 4, "killed twice: the second attempt makes no fourth step"
        third = _attempt(train, folder)
        _check_goes_on("killed in step 5, then in step 8: ", third, states, losses, first=6)


def _has_nothing_whole(train: Callable[..., Any]) -> None:
    """All checkpoints are damaged: somebody has to look before they are overwritten."""
    with _folder() as folder:
        _attempt(train, folder, die_before=7)
        for path in l17_run.checkpoints(folder):
            content = (path / STATE).read_bytes()
            (path / STATE).write_bytes(content[:-100])
        try:
            again = _attempt(train, folder)
        except l17_run.DamagedError:
            return
        raise AssertionError(
            f"both checkpoints are damaged: the second attempt makes {len(again.began)} steps from "
            "step 1 on, and overwrites what may be weeks of work. Stop with a DamagedError"
        )


def _has_nothing_to_do(train: Callable[..., Any]) -> None:
    with _folder() as folder:
        _attempt(train, folder, num_steps=2 * EVERY)
        again = _attempt(train, folder, num_steps=2 * EVERY)
        assert not again.began, (
            f"all {2 * EVERY} steps are done and saved, and the run is started again: it makes "
            f"{len(again.began)} more"
        )
        found = due(again.returned)
        assert not found, f"all steps are done: no loss is left to return; found {found}"


# ---- 17.5

KEYS = ("kind", "interval_s", "keep", "mtbf_s", "overhead")
KINDS = ("blocking", "background")
WITHIN = 1.15  # of the cheapest plan's cost
CLOSE = 1.15  # of a prediction, as a factor


HELP = (
    l17_plan.best,
    l17_plan.expected,
    l17_plan.simulated,
    l17_plan.mtbf_s,
    l17_plan.standstill_s,
    l17_plan.write_s,
)


def plan(make_plan: Callable[..., Any]) -> None:
    """The learner's `make_plan(site)`, for the cluster of the lesson and for another one."""
    assert callable(make_plan), "give the function itself: it is asked for two clusters"
    site = l17_plan.SITE
    with without(*HELP):
        answer = make_plan(site)
    _check_plan(answer, site)
    other = l17_plan.OTHER_SITE
    with without(*HELP):
        answer = make_plan(other)
    case = (
        f"right here. On another cluster ({other.gpus:,} GPUs, no preemptions, checkpoints of "
        f"{other.checkpoint_bytes / 1e9:.0f} GB, a quota of {other.quota_bytes / 1e9:,.0f} GB): "
    )
    try:
        _check_plan(answer, other, quietly=True)
    except AssertionError as error:
        raise AssertionError(f"{case}{error} Take every number from `site`") from None


def _check_plan(answer: Any, site: l17_plan.Site, quietly: bool = False) -> None:
    """A plan for one cluster.

    Args:
        answer: Has `KEYS`.
        site: What it is for.
        quietly: Do not show what it costs.
    """
    if answer is ...:
        raise NotImplementedError("exercise")
    assert isinstance(answer, Mapping), "give a dictionary; found " + (
        "None" if answer is None else type(answer).__name__
    )
    if any(answer.get(key) is ... for key in KEYS):
        raise NotImplementedError("exercise")
    missing = [key for key in KEYS if key not in answer]
    assert not missing, f"your plan does not say {missing[0]!r}"
    kind = answer["kind"]
    assert kind in KINDS, f"kind={kind!r}: choose {' or '.join(KINDS)}"
    for key in KEYS[1:]:
        number = answer[key]
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        assert is_number and number > 0, f"{key}={number!r}: give a number above 0"
    cost = l17_plan.simulated(site, kind, answer["interval_s"])
    best_kind, best_s, best_cost = l17_plan.best(site)
    if not quietly:
        print(f"your plan:      {_in_parts(cost)}")
    _check_rules(answer, site)
    _check_mtbf(answer["mtbf_s"], site)
    _check_cost(answer, cost, best_cost)
    if not quietly:
        print(f"labcode's plan: {_in_parts(best_cost)}  ({best_kind}, every {best_s:.0f} s)")


def _in_parts(cost: l17_plan.Cost) -> str:
    return (
        f"saving {cost.saving:6.2%}  work done again {cost.lost:6.2%}  "
        f"restarts {cost.restarting:6.2%}  in all {cost.total:6.2%}"
    )


def _check_rules(answer: Mapping[str, Any], site: l17_plan.Site) -> None:
    """What the site allows."""
    keep = answer["keep"]
    room = site.quota_bytes / site.checkpoint_bytes
    assert keep == int(keep), f"keep={keep}: it is a number of checkpoints"
    assert keep >= 2, (
        "keep=1: if the only checkpoint turns out to be damaged, the run begins again at step 1"
    )
    assert keep + 1 <= room, (
        f"keep={keep}: while one more is written there are {keep + 1} checkpoints, of "
        f"{site.checkpoint_bytes / 1e9:.0f} GB each, in {site.quota_bytes / 1e9:.0f} GB"
    )
    writing = l17_plan.writing(site, answer["kind"], answer["interval_s"])
    assert writing <= site.max_writing * 1.001, (
        f"your job writes {writing:.1%} of the time; the site allows {site.max_writing:.0%}"
    )


def _check_mtbf(mtbf_s: float, site: l17_plan.Site) -> None:
    """The mean time between what ends the run without a save."""
    hardware_s = site.gpu_mtbf_s / site.gpus
    expected_s = l17_plan.mtbf_s(site)
    found = f"mtbf_s={mtbf_s:.4g} s, {mtbf_s / HOUR_S:.3g} h: "
    if math.isclose(mtbf_s, expected_s, rel_tol=0.05):
        return
    assert not math.isclose(mtbf_s, hardware_s, rel_tol=0.05), (
        found + "that is the hardware alone. Is there time to save before a preemption?"
    )
    preemption_s = l17_plan.DAY_S / site.preemptions_per_day if site.preemptions_per_day else 0
    assert not math.isclose(mtbf_s, hardware_s + preemption_s, rel_tol=0.05), (
        found + "two causes together are longer apart than each alone? Which of them adds up, the "
        "times or the rates?"
    )
    raise AssertionError(
        found + f"that is {l17_plan.DAY_S / mtbf_s:.3g} ends a day. How many come from the "
        f"hardware, and how many from other jobs? (Not {l17_plan.DAY_S / expected_s:.0f} exactly.)"
    )


def _check_cost(answer: Mapping[str, Any], cost: l17_plan.Cost, best: l17_plan.Cost) -> None:
    """As cheap as can be, and foreseen."""
    if cost.total > WITHIN * best.total:
        largest = "saving" if cost.saving > cost.lost else "work that is done again"
        raise AssertionError(
            f"your plan costs {cost.total:.2%}, and there is one for less than "
            f"{cost.total / WITHIN:.2%}. Of yours, {largest} is the larger part: what lowers it?"
        )
    ratio = answer["overhead"] / cost.total
    assert 1 / CLOSE <= ratio <= CLOSE, (
        f"you expect an overhead of {answer['overhead']:.2%}, and the simulation finds "
        f"{cost.total:.2%}: saving, work that is done again, restarts: which one do you see "
        "differently?"
    )


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
