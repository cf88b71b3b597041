"""Answers to the exercises of lesson 17, surviving failures."""

import collections
import contextlib
import hashlib
import json
import math
import os
import shutil
import tempfile
from pathlib import Path

import torch
from answers import Answers, changed

from course.labs import l17_by_hand, l17_run
from labcode.runtime.files import sync_folder, write_atomically

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


ROOT = "(2 * save_s * mtbf_s) ** 0.5"

YOUNG = Answers(
    solves="best_interval_s",
    takes_ranks=False,
    right={
        "math.sqrt": lambda save_s, mtbf_s: math.sqrt(2 * save_s * mtbf_s),
        "tensor": changed(f"{ROOT} => torch.tensor(2 * save_s * mtbf_s).double().sqrt().item()"),
        "search": as_a_search,
        "rounded": changed(f"{ROOT} => round({ROOT})"),
        "cut off": changed(f"{ROOT} => int({ROOT})"),
    },
    wrong={
        "all of the interval is lost": (changed("(2 * save_s => (save_s"), "too short: how much"),
        "no root": (changed(f"{ROOT} => 2 * save_s * mtbf_s"), "in seconds squared"),
        "inverted": (changed("save_s * mtbf_s => save_s / mtbf_s"), "T costs less"),
        "minutes": (changed(f"{ROOT} => {ROOT} / 60"), "T costs less"),
        "text": (changed(f"{ROOT} => f'{{{ROOT}:.0f}} s'"), "give a number"),
        "cut off to nothing": (
            changed(f"{ROOT} => int((2 * save_s / mtbf_s) ** 0.5)"),
            "an interval is above 0",
        ),
        "Daly's": (
            changed(
                "return => half = save_s / mtbf_s / 2\n    return",
                f"{ROOT} => {ROOT} * (1 + half**0.5 / 3 + half / 9) - save_s",
            ),
            "that is Daly's interval",
        ),
        "labcode's own": (
            changed(f"{ROOT} => failures.young_interval_s(save_s, mtbf_s)"),
            "young_interval_s",
        ),
        "forgets to return": (changed("return => pass; "), "it returned None"),
    },
)

# ---- 17.2 an atomic checkpoint


def keep_newest(folder, keep):
    whole = [path for path in folder.glob("step-*") if path.suffix == ""]
    for old in sorted(whole)[:-keep]:
        shutil.rmtree(old)


def checksums_of(files):
    found = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    return json.dumps(found).encode()


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
    descriptor = os.open(new, os.O_RDONLY)
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


PARTIAL = 'folder / f"step-{step:08d}.partial"'
CLEARING = "    if partial.exists():\n        shutil.rmtree(partial)\n"
OPEN = 'open(partial / name, "wb")'
FSYNC = "            os.fsync(file.fileno())\n"
ROOM = "    if final.exists():\n        shutil.rmtree(final)\n"
NAMES = "    sync_folder(partial)\n"
RENAME = "    os.replace(partial, final)\n"
SYNC = "    sync_folder(folder)\n"
WHOLE = '    whole = [path for path in folder.glob("step-*") if path.suffix == ""]\n'
OLD = "    for old in sorted(whole)[:-keep]:\n"
REMOVE = "        shutil.rmtree(old)\n"

SAVE = Answers(
    solves="save",
    takes_ranks=False,
    right={
        "with the calls of the system": with_low_level_calls,
        "under a random name": with_a_random_name,
        "one sync for all": with_sync_of_all,
        # the old one loses its name first, as in labcode; of that nobody has to be sure
        "removes under another name": changed(
            f"{REMOVE} =>         doomed = old.with_suffix('.partial')\n"
            "        os.replace(old, doomed)\n"
            "        shutil.rmtree(doomed)\n"
        ),
    },
    wrong={
        "into its final name": (
            changed(f"{PARTIAL} => final", f"{ROOM}{RENAME} => "),
            "had this name while its files were still",
        ),
        "each file by itself": (  # every file is whole, and the checkpoint is not
            changed(
                f"{PARTIAL} => final",
                f"{ROOM}{RENAME} => ",
                f'{OPEN} => open(partial / f"{{name}}.new", "wb")',
                f"{FSYNC} => {FSYNC}"
                '        os.replace(partial / f"{name}.new", partial / name)\n',
            ),
            "had this name while its files were still",
        ),
        "removes before it writes": (
            changed(
                f"{WHOLE}{OLD}{REMOVE} => ",
                f"{RENAME} => {WHOLE}"
                f"    for old in sorted(whole)[: len(whole) - keep + 1]:\n{REMOVE}{RENAME}",
            ),
            "What has to come first?",
        ),
        "no sync": (changed(f"{FSYNC} => "), "are on the disk (it was never synced)"),
        "no flush": (
            changed("            file.flush()\n => "),
            "synced before all its bytes had left",
        ),
        "the names of the files are not synced": (
            changed(f"{NAMES} => "),
            "is on the disk, but not its name",
        ),
        "the names are synced before there are any": (
            changed(f"{NAMES} => ", "partial.mkdir() => partial.mkdir()\n    sync_folder(partial)"),
            "which was not synced after the file was made",
        ),
        "the names are synced after the rename": (
            changed(f"{NAMES} => ", f"{RENAME} => {RENAME}    sync_folder(final)\n"),
            "is on the disk, but not its name",
        ),
        "no sync of the folder": (
            changed(f"{SYNC} => "),
            "the name step-00000008 itself is not on the disk",
        ),
        "sync of the folder at the end": (
            changed(f"{SYNC} => ", f"{REMOVE} => {REMOVE}{SYNC}"),
            "is removed before the name step-00000008 is on the disk",
        ),
        "sync only before a removal": (
            changed(f"{SYNC} => ", f"{OLD} => {OLD}    {SYNC}"),
            "nothing had to be removed, and the name step-00000004",
        ),
        "in another folder": (
            changed(f'{PARTIAL} => Path(f"step-{{step:08d}}.partial")'),
            "only within one file system",
        ),
        "a leftover is in the way": (changed(f"{CLEARING} => "), "What does the killed attempt"),
        "a leftover is filled up": (
            changed(f"{CLEARING} => ", "partial.mkdir() => partial.mkdir(exist_ok=True)"),
            "rank7.bin, which an earlier attempt had left",
        ),
        "no room for a second one": (changed(f"{ROOM} => "), "Directory not empty"),
        "keeps all": (changed(f"{WHOLE}{OLD}{REMOVE} => "), "is still there"),
        "keeps one too few": (changed("[:-keep] => [: 1 - keep]"), "is gone"),
        "keeps the largest name": (  # without zeros in front step-100 comes before step-12
            changed("sorted(whole) => sorted(whole, key=lambda path: str(int(path.name[5:])))"),
            "there is no folder step-00000012",
        ),
        "counts temporary folders": (
            changed('if path.suffix == "" => if True'),
            "Which of the names are checkpoints?",
        ),
        "returns early": (
            changed(f"{ROOM} =>     if final.exists():\n        return\n"),
            "could not remove it, so this has to",
        ),
        "no checksums": (
            changed('{**files, "checksums.json": json.dumps(checksums).encode()} => files'),
            "has no checksums.json",
        ),
        "checksum of the name": (
            changed("sha256(content) => sha256(name.encode())"),
            "its sha256, in hexadecimal digits",
        ),
        "labcode's own": (l17_run.save, "l17_run.save"),
    },
)


# ---- 17.4 a resharding loader


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


def reads_all(box, written):
    """Puts the whole together, and cuts."""
    ends = [[o + s for o, s in zip(b.offsets, b.sizes)] for b, _ in written]
    whole = torch.empty([max(end) for end in zip(*ends)])
    for theirs, read in written:
        place = [slice(o, o + s) for o, s in zip(theirs.offsets, theirs.sizes)]
        whole[tuple(place)] = read()
    return whole[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes))]


EMPTY = "torch.empty(box.sizes)"
OWN_BEGIN = "own_begin = begin - box.offsets[dim]"
READ = "own[tuple(in_own)] = read()[tuple(in_theirs)]"

RESHARD = Answers(
    solves="reshard",
    takes_ranks=False,
    right={"narrow": with_narrow, "sets of indices": with_indices},
    wrong={
        "reads all": (reads_all, "has nothing in common with it"),
        "reads before it looks": (
            changed(
                "in_own = [] => tensor = read()\n        in_own = []", "= read()[ => = tensor["
            ),
            "has nothing in common with it",
        ),
        "a neighbour is read": (
            changed("part.stop > part.start => part.stop >= part.start"),
            "nothing in common",
        ),
        "reads twice": (
            changed(f"{READ} => {READ}.to(read().dtype)"),
            "the same box more than once",
        ),
        "own place not subtracted": (
            changed(f"{OWN_BEGIN} => own_begin = begin"),
            "a vector of two ranks, read by three",
        ),
        "their place not subtracted": (
            changed("begin - theirs.offsets[dim] => begin"),
            "a vector of two ranks, read by three",
        ),
        "smaller begin": (changed("begin = max( => begin = min("), "a vector of two ranks"),
        "larger end": (changed("end = min( => end = max("), "a vector of two ranks"),
        "the first dim only": (changed("range(len(box.sizes)) => range(1)"), "rows to columns"),
        "a view of what was read": (
            changed(f"{READ} => own = read()[tuple(in_theirs)]"),
            "stay in memory for its own",
        ),
        "half precision": (
            changed(f"{EMPTY} => torch.empty(box.sizes, dtype=torch.float16)"),
            "what was written is of torch.float32",
        ),
        "empties the list": (
            changed(
                "for theirs, read in written: => while written:\n"
                "        theirs, read = written.pop()"
            ),
            "it has changed",
        ),
        "the other's shape": (
            changed(f"{EMPTY} => torch.empty(written[0][0].sizes)"),
            "it returned a tensor of shape [4], expected is [3]",
        ),
        "leaves the loop too early": (
            changed(
                f"{OWN_BEGIN} => if end <= begin:\n"
                f"                return own\n            {OWN_BEGIN}"
            ),
            "elements are wrong",
        ),
        "labcode's own": (l17_by_hand.reshard, "l17_by_hand.reshard is labcode's own"),
        "forgets to return": (changed("    return own\n => "), "it returned None"),
    },
)

# ---- 17.3 the restart loop


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


IF_WHOLE = """\
        try:
            state = l17_run.read(path)
        except l17_run.DamagedError:
            continue
"""
STOP = """\
    if found and step == 0:
        raise l17_run.DamagedError(f"no checkpoint in {folder} is whole")
"""
COUNT = "        step += 1\n"
STEP = "        losses[step] = training.step()\n"

RESTART = Answers(
    solves="train",
    takes_ranks=False,
    right={"in functions": in_functions, "replays the data": saves_at_the_end_too},
    wrong={
        "begins again": (changed("l17_run.checkpoints(folder) => []"), "begins again"),
        "weights forgotten": (
            changed('training.model.load_state_dict(state["model"]) => pass'),
            "the weights",
        ),
        "optimizer forgotten": (
            changed('training.optimizer.load_state_dict(state["optimizer"]) => pass'),
            "the state of the optimizer",
        ),
        "data forgotten": (
            changed('training.batches.position = state["position"] => pass'),
            "the position in the data",
        ),
        "random numbers forgotten": (
            changed('torch.set_rng_state(state["random"]) => pass'),
            "torch's random numbers",
        ),
        "a step is done twice": (
            changed('step = state["step"] => step = state["step"] - 1'),
            "counted from 1",
        ),
        "a step is left out": (changed('"step": step, => "step": step + 1,'), "counted from 1"),
        "counted from 0": (
            changed(f"{COUNT}{STEP} => {STEP}{COUNT}"),
            "the losses of the steps 0 to 9; this attempt makes the steps 1 to 10",
        ),
        "stops at a damaged one": (
            changed(f"{IF_WHOLE} =>         state = l17_run.read(path)\n"),
            "There is an older one, which is whole",
        ),
        "a damaged one ends the search": (
            changed("            continue =>             break"),
            "There is an older one, which is whole",
        ),
        "begins again where all are damaged": (
            changed(f"{STOP} => "),
            "both checkpoints are damaged",
        ),
        "the oldest": (changed("reversed(found) => found"), "goes on from step 3"),
        "no checksums": (
            changed('l17_run.read(path) => torch.load(path / "state.pt")'),
            "Its name and its checksums say so",
        ),
        "saves at the end only": (
            changed("step % every == 0 => step == num_steps"),
            "the folder holds ['step-00000010']",
        ),
        "saves each step": (changed("step % every == 0 => True"), "expected are the two newest"),
        "all losses in a list": (
            changed("return losses => return list(losses.values())"),
            "give a dictionary, step: loss",
        ),
        "forgets to return": (changed("    return losses\n => "), "it returned None"),
    },
)

# ---- 17.5 the broken rank


def with_sets_of_pairs(own, again):
    """Each disagreement is a set; those that all of them share, where there are any."""
    num_ranks = len(own)
    pairs = []
    for rank in range(num_ranks):
        before = (rank - 1) % num_ranks
        if again[rank] != own[before]:
            pairs.append({before, rank})
    if not pairs:
        return []
    return sorted(set.intersection(*pairs))


def with_a_counter(own, again):
    found = collections.Counter()
    for first, mine in enumerate(own):
        second = first + 1 if first + 1 < len(own) else 0
        if mine != again[second]:
            found.update((first, second))
    return sorted(rank for rank in found if found[rank] == max(found.values()))


def with_lists_turned(own, again):
    """`again` turned by one place stands beside `own`."""
    turned = [*again[1:], again[0]]
    differs = [mine != theirs for mine, theirs in zip(own, turned)]
    # of rank r: its own batch, and the one before it
    counts = [differs[rank] + differs[rank - 1] for rank in range(len(own))]
    most = max(counts)
    return [rank for rank, count in enumerate(counts) if most and count == most]


SECOND = "(batch + 1) % num_ranks"
NOBODY = "    if most == 0:\n        return []\n"
MOST = "times_suspected[rank] == most"
SUSPECTS = Answers(
    solves="suspects",
    takes_ranks=False,
    right={
        "sets of pairs": with_sets_of_pairs,
        "a counter": with_a_counter,
        "lists turned": with_lists_turned,
    },
    wrong={
        "nobody is everybody": (changed(f"{NOBODY} => "), "so nobody is suspected"),
        "own and again of one rank": (changed(f"{SECOND} => batch"), "so nobody is suspected"),
        "the rank before": (changed(f"{SECOND} => (batch - 1) % num_ranks"), "so nobody is"),
        "no way round": (
            changed("range(num_ranks):\n        second => range(num_ranks - 1):\n        second"),
            "Which two ranks have computed each batch",
        ),
        "past the end": (changed(f"{SECOND} => batch + 1"), "IndexError"),
        "all that are in a pair": (changed(f"{MOST} => times_suspected[rank]"), "is in two"),
        "twice only": (changed(f"{MOST} => times_suspected[rank] == 2"), "nobody is suspected"),
        "the first of them": (
            changed(
                "return [rank for => found = [rank for", f"{MOST}] => {MOST}]\n    return found[:1]"
            ),
            "only one of the two is suspected",
        ),
        "own alone": (
            changed("            times_suspected[second] += 1\n => "),
            "Which two ranks have computed each batch",
        ),
        "a set": (
            changed("return [rank for => return {rank for", f"{MOST}] => {MOST}}}"),
            "give a list, in rising order",
        ),
        "a number": (
            changed("return [rank for => return max(rank for", f"{MOST}] => {MOST})"),
            "give a list of ranks",
        ),
        "falling": (
            changed(
                "return [rank for => return [rank for",
                "in range(num_ranks) if => in reversed(range(num_ranks)) if",
            ),
            "not each once and in rising order",
        ),
        "labcode's own": (
            changed("num_ranks = len(own) => return suspects_by_hand(own, again)"),
            "labcode's own answer",
        ),
        "forgets to return": (
            changed(f"{NOBODY} => ", "return [rank for => found = [rank for"),
            "it returned None",
        ),
    },
)

# ---- 17.6 a plan


def everything_from_the_site(site):
    """Compares both kinds, and looks whether the notice suffices."""
    blocking_s = site.checkpoint_bytes / site.write_bytes_per_s
    ends_per_s = site.gpus / site.gpu_mtbf_s
    if site.notice_s < blocking_s:
        ends_per_s += site.preemptions_per_day / (24 * 3600)
    plans = []
    for kind in ("blocking", "background"):
        write_s, pause_s, stands_s, lost_s = blocking_s, blocking_s, blocking_s, 0
        if kind == "background":
            write_s = site.background_write_factor * blocking_s
            pause_s = site.copy_s
            stands_s = site.copy_s + site.slowdown * write_s
            lost_s = write_s
        every_s = math.sqrt(2 * stands_s / ends_per_s)
        every_s = max(every_s, write_s / site.max_writing - pause_s)
        overhead = stands_s / every_s + (every_s / 2 + lost_s + site.restart_s) * ends_per_s
        plans.append((overhead, kind, every_s))
    overhead, kind, every_s = min(plans)
    return {
        "kind": kind,
        "interval_s": every_s,
        "keep": 2,
        "mtbf_s": 1 / ends_per_s,
        "overhead": overhead,
    }


INTERVAL = "max(young_s, allowed_s)"
KEEP = "int(site.quota_bytes // site.checkpoint_bytes) - 1"
MEAN = "DAY / ends_per_day"
SUM = "saving + lost + restarting"
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
    right={
        "everything from the site": everything_from_the_site,
        "a longer interval": changed(f"{INTERVAL} => 1.1 * {INTERVAL}"),
        "rounded": changed(
            f"{SUM} => round({SUM}, 3)", '"mtbf_s": mean_s => "mtbf_s": round(mean_s, -3)'
        ),
    },
    wrong={
        "best for itself alone": (changed(f"{INTERVAL} => young_s"), "the site allows 5%"),
        "stands still": (
            changed('"kind": "background" => "kind": "blocking"'),
            "What would the other kind of save cost here?",
        ),
        "every two hours": (changed(f"{INTERVAL} => 7200"), "done again is the"),
        "hardware alone": (
            changed("ends_per_day += site.preemptions_per_day => pass"),
            "that is the hardware alone",
        ),
        "every preemption": (
            changed("if site.notice_s < save_s: => if True:"),
            "8 preemptions a day with a notice of 600 s",
        ),
        "the copy alone": (
            changed("site.copy_s + site.slowdown * write_s => site.copy_s"),
            "On another cluster (4,096 GPUs",
        ),
        "counts at once": (
            changed("(interval_s / 2 + write_s) => (interval_s / 2)"),
            "which one do you see differently",
        ),
        "times added": (
            changed(
                f"{MEAN} => site.gpu_mtbf_s / site.gpus"
                " + DAY / (site.preemptions_per_day or math.inf)"
            ),
            "the times or the rates",
        ),
        "of the paper": (changed('"mtbf_s": mean_s => "mtbf_s": 3.09 * HOUR'), "ends a day"),
        "restarts forgotten": (
            changed(f"{SUM} => saving + lost"),
            "which one do you see differently",
        ),
        "in percent": (changed(f"{SUM} => 100 * ({SUM})"), "you expect an overhead of 6"),
        "no room": (changed(f"{KEEP} => {KEEP} + 1"), "there are 5 checkpoints"),
        "one only": (changed(f"{KEEP} => 1"), "begins again at step 1"),
        "a part of a checkpoint": (
            changed(f"{KEEP} => site.quota_bytes / site.checkpoint_bytes - 1"),
            "it is a number of checkpoints",
        ),
        "unknown kind": (
            changed('"kind": "background" => "kind": "async"'),
            "choose blocking or background",
        ),
        "text": (
            changed('"interval_s": interval_s => "interval_s": f"{interval_s:.0f} s"'),
            "give a number",
        ),
        "a list": (lambda site: list(GOOD.values()), "give a dictionary"),
        "a key is missing": (
            changed('        "mtbf_s": mean_s,\n => '),
            "does not say 'mtbf_s'",
        ),
        "constants": (lambda site: GOOD, "On another cluster (8,192 GPUs, 0 preemptions"),
        "a plan in place of the function": (GOOD, "give the function itself"),
        "labcode's own": (
            changed(f"{INTERVAL} => l17_plan.best(site)[1]"),
            "l17_plan.best is labcode's own answer",
        ),
        "labcode's MTBF": (
            changed(f"{MEAN} => l17_plan.mtbf_s(site)"),
            "l17_plan.mtbf_s is labcode's own answer",
        ),
        "forgets to return": (changed("return { => plan = {"), "it returned None"),
    },
)


ANSWERS = {
    "17.1": YOUNG,
    "17.2": SAVE,
    "17.4": RESHARD,
    "17.3": RESTART,
    "17.5": SUSPECTS,
    "17.6": PLAN,
}
