"""What lesson 17 is built on: the disk on which a program dies, the small run, the cluster."""

import os
from pathlib import Path

import pytest
import torch

from course.labs import l17_faulty, l17_plan, l17_run, l17_silent
from course.labs.l17_disk import killed_in_the_middle, operations
from labcode.runtime.files import sync_folder

FILES = {"a.bin": b"a" * 100, "b.bin": b"b" * 10}


def save_two(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)


# ---- the disk


def test_a_program_dies_before_the_operation_that_is_named(tmp_path):
    assert killed_in_the_middle(save_two, tmp_path, FILES, at=1) == "open b.bin"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.bin"]


def test_a_program_that_makes_fewer_operations_lives(tmp_path):
    assert killed_in_the_middle(save_two, tmp_path, FILES, at=2) == ""
    assert len(list(tmp_path.iterdir())) == 2


def test_a_dead_program_tidies_nothing_up(tmp_path):
    def tidy(folder):
        try:
            (folder / "new").mkdir()
            (folder / "new" / "file").write_bytes(b"")
        finally:
            (folder / "new").rmdir()

    assert killed_in_the_middle(tidy, tmp_path, at=1) == "open file"
    assert (tmp_path / "new").is_dir()


def test_a_rename_knows_which_files_were_synced(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    with operations(tmp_path) as seen:
        with open(new / "synced", "wb") as file:
            file.write(b"12")
            file.flush()
            os.fsync(file.fileno())
        with open(new / "early", "wb") as file:
            os.fsync(file.fileno())
            file.write(b"12")
        (new / "never").write_bytes(b"12")
        os.replace(new, tmp_path / "final")
    assert seen.renames[0].unsynced == [("early", True), ("never", False)]
    assert seen.folder_syncs == []


def test_a_rename_knows_which_names_were_synced(tmp_path):
    new = tmp_path / "new"
    new.mkdir()
    with operations(tmp_path) as seen:
        (new / "before").write_bytes(b"")
        sync_folder(new)
        (new / "after").write_bytes(b"")
        os.replace(new, tmp_path / "final")
    assert seen.renames[0].unsynced_names == ["after"]


def test_a_sync_of_the_folder_knows_what_was_there_by_then(tmp_path):
    (tmp_path / "old").write_bytes(b"")
    (tmp_path / "new").write_bytes(b"")
    with operations(tmp_path) as seen:
        sync_folder(tmp_path)
        os.replace(tmp_path / "new", tmp_path / "final")
        sync_folder(tmp_path)
        (tmp_path / "old").unlink()
        sync_folder(tmp_path)
    assert [(sync.after_renames, sorted(sync.files)) for sync in seen.folder_syncs] == [
        (0, ["new", "old"]),
        (1, ["final", "old"]),
        (1, ["final"]),
    ]


def test_nobody_is_watched_afterwards(tmp_path):
    with operations(tmp_path) as seen:
        pass
    (tmp_path / "file").write_bytes(b"")
    assert seen.names == []


# ---- the run


def test_two_runs_without_kills_are_the_same():
    first = l17_run.Training()
    losses = [first.step() for _ in range(3)]
    second = l17_run.Training()
    assert losses == [second.step() for _ in range(3)]
    assert len(set(losses)) == 3


def test_a_state_is_read_as_it_was_written_and_the_newest_are_kept(tmp_path):
    for step in (4, 8, 12):
        l17_run.write(tmp_path, step, {"weight": torch.ones(3) * step})
    names = [path.name for path in l17_run.checkpoints(tmp_path)]
    assert names == ["step-00000008", "step-00000012"]
    state = l17_run.read(tmp_path / "step-00000012")
    assert state["weight"].tolist() == [12, 12, 12]


@pytest.mark.parametrize("damage", ["shorter", "missing", "without checksums"])
def test_damage_is_told(tmp_path, damage):
    l17_run.save(tmp_path, 4, FILES, keep=1)
    folder: Path = tmp_path / "step-00000004"
    if damage == "shorter":
        (folder / "a.bin").write_bytes(b"a")
    elif damage == "missing":
        (folder / "a.bin").unlink()
    else:
        (folder / l17_run.CHECKSUMS).unlink()
    with pytest.raises(l17_run.DamagedError, match="step-00000004: "):
        l17_run.read(folder)


# ---- what the ranks say

OUTPUT = """\
[rank 0] 2 ranks on 1 node, gloo on cpu; grid dp 2 x pp 1 x cp 1 x tp 1; 16 samples a step
[rank 0] step 1/3 | loss 4.4 | gradient norm 3.2
[rank 0] step 2/3 | loss 4.2 | gradient norm 3.1
[rank 0] resuming from runs/x/checkpoints/step-00000001
[rank 1] hang: no progress for 5 s: rank 1 has not come to all_reduce #44 of one number: it is in \
read (x.py, line 5); rank 0 waits in all_reduce #44 of one number among ranks 0 and 1
[rank 0] step 2/3 | loss 4.2 | gradient norm 3.1
[rank 0] step 3/3 | validation loss 4.1
[rank 0] and the sample text
"""


def test_the_output_of_ranks_is_read():
    assert l17_faulty.resumed_from(OUTPUT) == 1
    assert l17_faulty.losses(OUTPUT) == [(1, "4.4"), (2, "4.2"), (2, "4.2")]
    assert l17_faulty.who_waits(OUTPUT) == (0, 1)
    told = l17_faulty.told(OUTPUT).splitlines()
    assert told[:2] == ["2 ranks on 1 node, gloo on cpu", "step 1/3 | loss 4.4"]
    assert told[4].startswith("[rank 1] hang: no progress")
    assert told[-1] == "step 2/3 | loss 4.2"


def test_of_many_steps_in_a_row_the_first_and_the_last_are_told():
    output = "\n".join(f"[rank 0] step {step}/9 | loss {step}.5 | more" for step in range(1, 10))
    assert l17_faulty.told(output).splitlines() == [
        "step 1/9 | loss 1.5",
        "    ... 6 more steps ...",
        "step 8/9 | loss 8.5",
        "step 9/9 | loss 9.5",
    ]


def test_a_watch_that_is_silent_is_told():
    with pytest.raises(ValueError, match="no line begins"):
        l17_faulty.who_waits("step 1/3 | loss 4.4")


# ---- the rank that computes wrongly


def checksum_and_norm(batch, broken):
    def flip(module, inputs, output):
        output = output.clone()
        output.data.view(torch.int32)[0, 3, 5] ^= 1 << 22
        return output

    model = l17_silent.small_gpt()
    if broken:
        model.get_submodule("blocks.1.mlp.up").register_forward_hook(flip)
    l17_silent.backward(model, batch)
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients).item()
    return l17_silent.checksum(gradients), norm


def test_a_batch_has_the_same_gradients_to_the_bit_unless_a_product_is_wrong():
    healthy, norm = checksum_and_norm(batch=2, broken=False)
    assert checksum_and_norm(batch=2, broken=False)[0] == healthy
    wrong, wrong_norm = checksum_and_norm(batch=2, broken=True)
    assert wrong != healthy
    assert wrong_norm == pytest.approx(norm, rel=1e-3)


def test_no_norm_of_the_lesson_shows_which_rank_is_broken():
    norms = [checksum_and_norm(batch, broken=batch == 2)[1] for batch in range(4)]
    assert min(norms) < norms[2] < max(norms)


# ---- the cluster

SITES = [l17_plan.SITE, l17_plan.OTHER_SITE]


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize(("kind", "interval_s"), [("blocking", 1560), ("background", 1300)])
def test_the_formula_foresees_what_a_plan_costs(site, kind, interval_s):
    found = l17_plan.simulated(site, kind, interval_s).total
    assert l17_plan.expected(site, kind, interval_s) == pytest.approx(found, rel=0.12)


@pytest.mark.parametrize("site", SITES)
def test_the_best_plan_is_one_that_the_site_allows(site):
    kind, interval_s, _ = l17_plan.best(site)
    assert l17_plan.writing(site, kind, interval_s) <= site.max_writing


def test_a_long_notice_makes_preemptions_harmless():
    patient = l17_plan.Site(notice_s=60)
    assert l17_plan.mtbf_s(patient) > 2 * l17_plan.mtbf_s(l17_plan.SITE)
