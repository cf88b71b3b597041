"""Answers to the exercises of lesson 17, surviving failures."""

import contextlib
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from answers import Answers

from labcode.files import sync_folder, write_atomically
from labcode.perf.failures import young_interval_s
from labcode.teach.labs import l17_plan, l17_run

# ---- 17.1 Young's interval


def as_a_search(save_s, mtbf_s):
    """By halving, for who does not trust derivatives."""
    low, high = 1e-6, 1e9
    for _ in range(200):
        middle = math.sqrt(low * high)
        if save_s / middle > middle / (2 * mtbf_s):
            low = middle
        else:
            high = middle
    return middle


YOUNG = Answers(
    solves="best_interval_s",
    takes_ranks=False,
    real=True,
    right={
        "square root": lambda save_s, mtbf_s: math.sqrt(2 * save_s * mtbf_s),
        "power": lambda save_s, mtbf_s: (2 * save_s * mtbf_s) ** 0.5,
        "tensor": lambda save_s, mtbf_s: torch.tensor(2 * save_s * mtbf_s).double().sqrt().item(),
        "search": as_a_search,
        "rounded": lambda save_s, mtbf_s: round(math.sqrt(2 * save_s * mtbf_s)),
        "cut off": lambda save_s, mtbf_s: int((2 * save_s * mtbf_s) ** 0.5),
    },
    wrong={
        "all of the interval is lost": (lambda c, m: math.sqrt(c * m), "too short: how much"),
        "no root": (lambda c, m: 2 * c * m, "in seconds squared"),
        "arithmetic mean": (lambda c, m: (c + m) / 2, "T costs less"),
        "inverted": (lambda c, m: math.sqrt(2 * c / m), "T costs less"),
        "rate for time": (lambda c, m: math.sqrt(2 * c / (1 / m)) / m, "T costs less"),
        "forgets to return": (lambda c, m: None, "it returned None"),
        "text": (lambda c, m: f"{math.sqrt(2 * c * m):.0f} s", "give a number"),
        "minutes": (lambda c, m: math.sqrt(2 * c * m) / 60, "T costs less"),
        "Daly's": (
            lambda c, m: math.sqrt(2 * c * m) * (1 + math.sqrt(c / m / 2) / 3 + c / m / 18) - c,
            "that is Daly's interval",
        ),
        "zero": (lambda c, m: 0, "an interval is above 0"),
        "labcode's own": (young_interval_s, "young_interval_s"),
    },
)

# ---- 17.2 an atomic checkpoint


def write_synced(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def keep_newest(folder, keep):
    whole = [path for path in folder.glob("step-*") if path.suffix == ""]
    for old in sorted(whole)[:-keep]:
        shutil.rmtree(old)


def checksums_of(files):
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return json.dumps(found).encode()


def straight(folder, step, files, keep):
    final = folder / f"step-{step:08d}"
    partial = folder / f"step-{step:08d}.partial"
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        write_synced(partial / name, content)
    if final.exists():
        shutil.rmtree(final)
    os.replace(partial, final)
    sync_folder(folder)
    keep_newest(folder, keep)


def with_low_level_calls(folder, step, files, keep):
    final = os.path.join(folder, f"step-{step:08d}")
    new = os.path.join(folder, f".new-{step}")
    shutil.rmtree(new, ignore_errors=True)
    os.mkdir(new)
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        descriptor = os.open(os.path.join(new, name), os.O_CREAT | os.O_WRONLY, 0o644)
        os.write(descriptor, content)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(final, ignore_errors=True)
    os.rename(new, final)
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    names = sorted(name for name in os.listdir(folder) if name.startswith("step-"))
    for name in names[: max(0, len(names) - keep)]:
        shutil.rmtree(os.path.join(folder, name))


def with_a_random_name(folder, step, files, keep):
    for leftover in folder.glob("unfinished-*"):
        shutil.rmtree(leftover)
    temporary = Path(tempfile.mkdtemp(prefix="unfinished-", dir=folder))
    for name, content in files.items():
        write_atomically(temporary / name, content)
    write_atomically(temporary / "checksums.json", checksums_of(files))
    final = folder / f"step-{step:08d}"
    if final.is_dir():
        final.rename(folder / f"unfinished-{final.name}")
    temporary.rename(final)
    sync_folder(folder)
    for leftover in folder.glob("unfinished-*"):
        shutil.rmtree(leftover)
    keep_newest(folder, keep)


def with_sync_of_all(folder, step, files, keep):
    """One call for all that was written."""
    partial = folder / f"tmp.{step}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, content in files.items():
        (partial / name).write_bytes(content)
    (partial / "checksums.json").write_bytes(checksums_of(files))
    os.sync()
    shutil.rmtree(folder / f"step-{step:08d}", ignore_errors=True)
    partial.replace(folder / f"step-{step:08d}")
    os.sync()
    keep_newest(folder, keep)


def into_its_final_name(folder, step, files, keep):
    final = folder / f"step-{step:08d}"
    final.mkdir(exist_ok=True)
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        write_synced(final / name, content)
    sync_folder(folder)
    keep_newest(folder, keep)


def each_file_atomically(folder, step, files, keep):
    """Every file is whole, and the checkpoint is not."""
    final = folder / f"step-{step:08d}"
    final.mkdir(exist_ok=True)
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        write_atomically(final / name, content)
    sync_folder(folder)
    keep_newest(folder, keep)


def changed(old, new):
    """`straight` with another text in one place."""
    import inspect

    source = inspect.getsource(straight)
    assert old in source
    scope = dict(globals())
    exec(source.replace(old, new), scope)
    return scope["straight"]


def removes_first(folder, step, files, keep):
    """Makes room before there is something new."""
    whole = sorted(path for path in folder.glob("step-*") if path.suffix == "")
    for old in whole[: len(whole) - keep + 1]:
        shutil.rmtree(old)
    straight(folder, step, files, keep)


def without_sync(folder, step, files, keep):
    partial = folder / f"step-{step:08d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        (partial / name).write_bytes(content)
    final = folder / f"step-{step:08d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    sync_folder(folder)
    keep_newest(folder, keep)


def syncs_too_early(folder, step, files, keep):
    partial = folder / f"step-{step:08d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        with open(partial / name, "wb") as file:
            file.write(content[:5])
            os.fsync(file.fileno())
            file.write(content[5:])
    final = folder / f"step-{step:08d}"
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    sync_folder(folder)
    keep_newest(folder, keep)


def elsewhere(folder, step, files, keep):
    """On another disk, for all one knows."""
    temporary = Path(tempfile.mkdtemp())
    for name, content in {**files, "checksums.json": checksums_of(files)}.items():
        write_synced(temporary / name, content)
    final = folder / f"step-{step:08d}"
    shutil.rmtree(final, ignore_errors=True)
    shutil.move(temporary, final)
    sync_folder(folder)
    keep_newest(folder, keep)


def by_age(folder, step, files, keep):
    """Sorted by name without zeros in front: step-100 comes before step-12."""
    straight(folder, step, files, 99)
    whole = [path for path in folder.glob("step-*") if path.suffix == ""]
    for old in sorted(whole, key=lambda path: path.name.lstrip("step-0"))[:-keep]:
        shutil.rmtree(old)


def removes_as_labcode_does(folder, step, files, keep):
    """The old one loses its name first; of that nobody has to be sure."""
    straight(folder, step, files, 99)
    whole = sorted(path for path in folder.glob("step-*") if path.suffix == "")
    for old in whole[:-keep]:
        doomed = old.with_suffix(".partial")
        os.replace(old, doomed)
        shutil.rmtree(doomed)


REMOVAL = "    sync_folder(folder)\n    keep_newest(folder, keep)\n"
NO_CLEARING = "    if partial.exists():\n        shutil.rmtree(partial)\n"
NO_ROOM = "    if final.exists():\n        shutil.rmtree(final)\n"

SAVE = Answers(
    solves="save",
    takes_ranks=False,
    real=True,
    right={
        "straight": straight,
        "with the calls of the system": with_low_level_calls,
        "under a random name": with_a_random_name,
        "one sync for all": with_sync_of_all,
        "removes under another name": removes_as_labcode_does,
    },
    wrong={
        "into its final name": (into_its_final_name, "had this name while its files were still"),
        "each file by itself": (each_file_atomically, "had this name while its files were still"),
        "removes before it writes": (removes_first, "What has to come first?"),
        "no sync": (without_sync, "are on the disk (it was never synced)"),
        "sync before the end": (syncs_too_early, "synced before all its bytes had left"),
        "no sync of the folder": (
            changed("    sync_folder(folder)\n", ""),
            "the name step-00000008 itself is not on the disk",
        ),
        "sync of the folder at the end": (
            changed(REMOVAL, "    keep_newest(folder, keep)\n    sync_folder(folder)\n"),
            "is removed before the name step-00000008 is on the disk",
        ),
        "sync only after a removal": (
            changed(
                REMOVAL,
                "    if len(list(folder.glob('step-*'))) > keep:\n"
                "        sync_folder(folder)\n"
                "        keep_newest(folder, keep)\n",
            ),
            "nothing had to be removed, and the name step-00000004",
        ),
        "on another disk": (elsewhere, "only within one file system"),
        "a leftover is in the way": (changed(NO_CLEARING, ""), "What does the killed attempt"),
        "a leftover is filled up": (
            changed(NO_CLEARING + "    partial.mkdir()", "    partial.mkdir(exist_ok=True)"),
            "rank7.bin, which an earlier attempt had left",
        ),
        "no room for a second one": (changed(NO_ROOM, ""), "Directory not empty"),
        "keeps all": (changed("    keep_newest(folder, keep)\n", ""), "is still there"),
        "keeps one too few": (
            changed("keep_newest(folder, keep)", "keep_newest(folder, keep - 1 or 1)"),
            "is gone",
        ),
        "keeps the largest name": (by_age, "there is no folder step-00000012"),
        "no checksums": (
            changed('{**files, "checksums.json": checksums_of(files)}', "files"),
            "has no checksums.json",
        ),
        "checksum of the name": (
            changed("checksums_of(files)", "checksums_of({name: name.encode() for name in files})"),
            "its sha256, in hexadecimal digits",
        ),
        "labcode's own": (l17_run.save, "l17_run.save"),
    },
)


# ---- 17.4 a resharding loader


def by_hand(box, written):
    own = torch.empty(box.sizes)
    for theirs, read in written:
        in_own = []
        in_theirs = []
        for dim in range(len(box.sizes)):
            first = max(box.offsets[dim], theirs.offsets[dim])
            own_end = box.offsets[dim] + box.sizes[dim]
            their_end = theirs.offsets[dim] + theirs.sizes[dim]
            last = min(own_end, their_end)
            if last <= first:
                break
            in_own.append(slice(first - box.offsets[dim], last - box.offsets[dim]))
            in_theirs.append(slice(first - theirs.offsets[dim], last - theirs.offsets[dim]))
        else:
            own[tuple(in_own)] = read()[tuple(in_theirs)]
    return own


def with_narrow(box, written):
    own = torch.zeros(box.sizes)
    for theirs, read in written:
        starts = [max(a, b) for a, b in zip(box.offsets, theirs.offsets)]
        ends = [
            min(a + m, b + n)
            for a, m, b, n in zip(box.offsets, box.sizes, theirs.offsets, theirs.sizes)
        ]
        if any(end <= start for start, end in zip(starts, ends)):
            continue
        source = read()
        target = own
        for dim, (start, end) in enumerate(zip(starts, ends)):
            source = source.narrow(dim, start - theirs.offsets[dim], end - start)
            target = target.narrow(dim, start - box.offsets[dim], end - start)
        target.copy_(source)
    return own


def with_indices(box, written):
    """Sets of indices in place of ends."""
    own = torch.full(box.sizes, float("nan"))
    for theirs, read in written:
        common = []
        for a, m, b, n in zip(box.offsets, box.sizes, theirs.offsets, theirs.sizes):
            common.append(sorted(set(range(a, a + m)) & set(range(b, b + n))))
        if not all(common):
            continue
        mine = [torch.tensor(c) - a for c, a in zip(common, box.offsets)]
        other = [torch.tensor(c) - b for c, b in zip(common, theirs.offsets)]
        own[torch.meshgrid(*mine, indexing="ij")] = read()[torch.meshgrid(*other, indexing="ij")]
    return own


def variant(old, new):
    """`by_hand` with another text in one place."""
    import inspect

    source = inspect.getsource(by_hand)
    assert old in source
    scope = dict(globals())
    exec(source.replace(old, new), scope)
    return scope["by_hand"]


def reads_all(box, written):
    """Puts the whole together, and cuts."""
    ends = [[o + s for o, s in zip(b.offsets, b.sizes)] for b, _ in written]
    whole = torch.empty([max(end) for end in zip(*ends)])
    for theirs, read in written:
        place = [slice(o, o + s) for o, s in zip(theirs.offsets, theirs.sizes)]
        whole[tuple(place)] = read()
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]


def rows_only(box, written):
    own = torch.empty(box.sizes)
    for theirs, read in written:
        first = max(box.offsets[0], theirs.offsets[0])
        last = min(box.offsets[0] + box.sizes[0], theirs.offsets[0] + theirs.sizes[0])
        if first < last:
            part = read()[first - theirs.offsets[0] : last - theirs.offsets[0]]
            own[first - box.offsets[0] : last - box.offsets[0]] = part
    return own


def one_of_them(box, written):
    """The first that fits must hold it all."""
    for theirs, read in written:
        inside = []
        for a, m, b, n in zip(box.offsets, box.sizes, theirs.offsets, theirs.sizes):
            if not b <= a <= a + m <= b + n:
                break
            inside.append(slice(a - b, a - b + m))
        else:
            return read()[tuple(inside)]
    return torch.zeros(box.sizes)


def _holds(theirs, box):
    ends = zip(theirs.offsets, theirs.sizes, box.offsets, box.sizes)
    return all(b <= a <= a + m <= b + n for b, n, a, m in ends)


RESHARD = Answers(
    solves="reshard",
    takes_ranks=False,
    real=True,
    right={"slices": by_hand, "narrow": with_narrow, "sets of indices": with_indices},
    wrong={
        "reads all": (reads_all, "has nothing in common with it"),
        "reads before it looks": (
            variant("        in_own = []\n", "        in_own = []\n        found = read()\n"),
            "has nothing in common with it",
        ),
        "a neighbour is read": (variant("last <= first", "last < first"), "nothing in common"),
        "own place not subtracted": (
            variant("first - box.offsets[dim], last - box.offsets[dim]", "first, last"),
            "a vector of two ranks, read by three",
        ),
        "their place not subtracted": (
            variant("first - theirs.offsets[dim], last - theirs.offsets[dim]", "first, last"),
            "a vector of two ranks, read by three",
        ),
        "smaller begin": (variant("first = max(", "first = min("), "a vector of two ranks"),
        "larger end": (variant("last = min(", "last = max("), "a vector of two ranks"),
        "the first dim only": (rows_only, "rows to columns"),
        "from one box only": (one_of_them, "stay in memory for its own"),
        "a view of what was read": (
            lambda box, written: (
                one_of_them(box, written)
                if any(_holds(theirs, box) for theirs, _ in written)
                else by_hand(box, written)
            ),
            "stay in memory for its own",
        ),
        "half precision": (
            variant("torch.empty(box.sizes)", "torch.empty(box.sizes, dtype=torch.float16)"),
            "what was written is of torch.float32",
        ),
        "empties the list": (
            lambda box, written: by_hand(box, [written.pop() for _ in range(len(written))]),
            "it has changed",
        ),
        "the other's shape": (
            variant("torch.empty(box.sizes)", "torch.empty(written[0][0].sizes)"),
            "your tensor has the shape",
        ),
        "break leaves the loop": (
            variant("                break\n", "                return own\n"),
            "elements are wrong",
        ),
        "forgets to return": (variant("    return own\n", ""), "it returned None"),
    },
)

# ---- 17.3 the restart loop


def plain(folder, num_steps, every):
    training = l17_run.Training()
    step = 0
    found = l17_run.checkpoints(folder)
    for path in reversed(found):
        try:
            state = l17_run.read(path)
        except l17_run.DamagedError:
            continue
        training.model.load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])
        training.batches.position = state["position"]
        torch.set_rng_state(state["random"])
        step = state["step"]
        break
    if found and step == 0:
        raise l17_run.DamagedError("none is whole")
    losses = {}
    while step < num_steps:
        losses[step + 1] = training.step()
        step += 1
        if step % every == 0:
            state = {
                "model": training.model.state_dict(),
                "optimizer": training.optimizer.state_dict(),
                "position": training.batches.position,
                "random": torch.get_rng_state(),
                "step": step,
            }
            l17_run.write(folder, step, state)
    return losses


def in_functions(folder, num_steps, every):
    """The step from the name of the folder, and the position from the step."""

    def newest():
        found = l17_run.checkpoints(folder)
        whole = [path for path in found if not l17_run.damage_of(path)]
        if found and not whole:
            raise l17_run.DamagedError(l17_run.damage_of(found[-1]))
        return whole[-1] if whole else None

    run = l17_run.Training()
    start = newest()
    first = 1
    if start is not None:
        weights, optimizer, random = l17_run.read(start)["all"]
        first = int(start.name[5:]) + 1
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(optimizer)
        run.batches.position = 16 * (first - 1)
        torch.random.set_rng_state(random)
    losses = {}
    for number in range(first, num_steps + 1):
        losses[number] = run.step()
        if number % every == 0:
            everything = [run.model.state_dict(), run.optimizer.state_dict()]
            l17_run.write(folder, number, {"all": [*everything, torch.random.get_rng_state()]})
    return losses


def saves_at_the_end_too(folder, num_steps, every):
    """And replays the data in place of setting the position."""
    run = l17_run.Training()
    done = 0
    for path in sorted(folder.glob("step-????????"), reverse=True):
        with contextlib.suppress(l17_run.DamagedError):
            state = l17_run.read(path)
            done = state["done"]
            for _ in range(done):
                run.batches.take()
            run.model.load_state_dict(state["model"])
            run.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["random"])
            break
    if not done:
        for path in l17_run.checkpoints(folder):
            l17_run.read(path)  # which raises
    losses = {}
    while done < num_steps:
        done += 1
        losses[done] = run.step()
        if done % every and done < num_steps:
            continue
        state = {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}
        state |= {"random": torch.get_rng_state(), "done": done}
        l17_run.write(folder, done, state, keep=3 if done == num_steps else 2)
    return losses


def loop(old, new):
    """`plain` with another text in one place."""
    import inspect

    source = inspect.getsource(plain)
    assert old in source
    scope = dict(globals())
    exec(source.replace(old, new), scope)
    return scope["plain"]


WHOLE_OR_NEXT = (
    "        try:\n            state = l17_run.read(path)\n"
    "        except l17_run.DamagedError:\n            continue\n"
)
STATE_OF_OPTIMIZER = '        training.optimizer.load_state_dict(state["optimizer"])\n'


def trusts_everything(folder, num_steps, every):
    """Reads the file itself, so that nobody looks at checksums."""
    newest = max(folder.glob("step-*"), default=None)
    if newest is not None:
        torch.load(io.BytesIO((newest / "state.pt").read_bytes()), weights_only=True)
    return plain(folder, num_steps, every)


RESTART = Answers(
    solves="train",
    takes_ranks=False,
    real=True,
    right={
        "plain": plain,
        "in functions": in_functions,
        "replays the data": saves_at_the_end_too,
    },
    wrong={
        "begins again": (loop("found = l17_run.checkpoints(folder)", "found = []"), "begins again"),
        "weights forgotten": (
            loop('        training.model.load_state_dict(state["model"])\n', ""),
            "the weights",
        ),
        "optimizer forgotten": (loop(STATE_OF_OPTIMIZER, ""), "the state of the optimizer"),
        "data forgotten": (
            loop('        training.batches.position = state["position"]\n', ""),
            "the position in the data",
        ),
        "random numbers forgotten": (
            loop('        torch.set_rng_state(state["random"])\n', ""),
            "torch's random numbers",
        ),
        "a step is done twice": (
            loop('        step = state["step"]\n', '        step = state["step"] - 1\n'),
            "counted from 1",
        ),
        "a step is left out": (
            loop('                "step": step,\n', '                "step": step + 1,\n'),
            "counted from 1",
        ),
        "stops at a damaged one": (
            loop(WHOLE_OR_NEXT, "        state = l17_run.read(path)\n"),
            "There is an older one, which is whole",
        ),
        "a damaged one ends the search": (
            loop("            continue\n", "            break\n"),
            "There is an older one, which is whole",
        ),
        "begins again where all are damaged": (
            loop("    if found and step == 0:\n", "    if False:\n"),
            "both checkpoints are damaged",
        ),
        "the oldest": (
            loop("reversed(found)", "found"),
            "not as it was",
        ),
        "no checksums": (trusts_everything, "Its name and its checksums say so"),
        "never saves": (loop("step % every == 0", "False"), "the folder holds []"),
        "saves each step": (loop("step % every == 0", "True"), "were meant, the two newest"),
        "all losses in a list": (
            loop("    return losses\n", "    return list(losses.values())\n"),
            "give a dictionary, step: loss",
        ),
        "forgets to return": (loop("    return losses\n", ""), "it returned None"),
    },
)

# ---- 17.5 a plan

DAY_S = 24 * 3600


def planned(site, kind="background", keep=None, hardware_alone=False, **changes):
    """A plan by the formulas of the lesson."""
    save_s = site.checkpoint_bytes / site.write_bytes_per_s
    ends_per_s = site.gpus / site.gpu_mtbf_s
    if save_s > site.notice_s and not hardware_alone:
        ends_per_s += site.preemptions_per_day / DAY_S
    write_s = 1.5 * save_s if kind == "background" else save_s
    pause_s = 4 if kind == "background" else save_s
    standstill_s = 4 + 0.1 * write_s if kind == "background" else save_s
    young_s = math.sqrt(2 * standstill_s / ends_per_s)
    interval_s = max(young_s, write_s / site.max_writing - pause_s)
    lost = (interval_s / 2 + (write_s if kind == "background" else 0)) * ends_per_s
    answer = {
        "kind": kind,
        "interval_s": interval_s,
        "keep": keep or math.floor(site.quota_bytes / site.checkpoint_bytes) - 1,
        "mtbf_s": 1 / ends_per_s,
        "overhead": standstill_s / interval_s + lost + site.restart_s * ends_per_s,
    }
    for key, change in changes.items():
        answer[key] = change(answer[key]) if callable(change) else change
    return answer


def plan_with(**changes):
    return lambda site: planned(site, **changes)


def both_times_added(site):
    hardware_s = site.gpu_mtbf_s / site.gpus
    preemption_s = DAY_S / site.preemptions_per_day if site.preemptions_per_day else 0
    return planned(site, mtbf_s=hardware_s + preemption_s)


def asks_the_lab(site):
    kind, interval_s, cost = l17_plan.best(site)
    return planned(site, kind=kind, interval_s=interval_s, overhead=cost.total)


GOOD = {
    "kind": "background",
    "interval_s": 1300,
    "keep": 3,
    "mtbf_s": 8.08 * 3600,
    "overhead": 0.064,
}
PLAN = Answers(
    solves="make_plan",
    takes_ranks=False,
    real=True,
    right={
        "by the formulas": planned,
        "a longer interval": plan_with(interval_s=lambda T: 1.1 * T, overhead=lambda x: 1.01 * x),
        "two are kept": plan_with(keep=2),
        "rounded": plan_with(mtbf_s=lambda M: round(M, -3), overhead=lambda x: round(x, 3)),
    },
    wrong={
        "best for itself alone": (
            plan_with(interval_s=lambda T: 0.6 * T),
            "the site allows 5%",
        ),
        "stands still": (plan_with(kind="blocking"), "there is one for less"),
        "every two hours": (plan_with(interval_s=7200, overhead=0.2), "done again is the"),
        "hardware alone": (plan_with(hardware_alone=True), "that is the hardware alone"),
        "times added": (both_times_added, "the times or the rates"),
        "of the paper": (plan_with(mtbf_s=3.09 * 3600), "ends a day"),
        "restarts forgotten": (
            plan_with(overhead=lambda x: x / 2),
            "which one do you see differently",
        ),
        "in percent": (plan_with(overhead=lambda x: 100 * x), "you expect an overhead of 6"),
        "no room": (plan_with(keep=4), "there are 5 checkpoints"),
        "one only": (plan_with(keep=1), "begins again at step 1"),
        "unknown kind": (plan_with(kind="async"), "choose blocking or background"),
        "text": (plan_with(interval_s="20 min"), "give a number"),
        "a list": (lambda site: list(GOOD.values()), "give a dictionary"),
        "a key is missing": (lambda site: {"kind": "background"}, "does not say 'interval_s'"),
        "constants": (lambda site: GOOD, "On another cluster (8,192 GPUs, no preemptions"),
        "a plan in place of the function": (GOOD, "give the function itself"),
        "labcode's own": (asks_the_lab, "l17_plan.best is labcode's own answer"),
        "labcode's MTBF": (
            lambda site: planned(site, mtbf_s=l17_plan.mtbf_s(site)),
            "l17_plan.mtbf_s is labcode's own answer",
        ),
        "forgets to return": (lambda site: None, "found None"),
    },
)


ANSWERS = {"17.1": YOUNG, "17.2": SAVE, "17.4": RESHARD, "17.3": RESTART, "17.5": PLAN}
