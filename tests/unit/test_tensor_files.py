"""Tensors in the files of a checkpoint: written once, read in any layout, nothing odd let in."""

import copy
import json

import pytest
import torch

from labcode.parallel.boxes import Box
from labcode.train.checkpoint import tensors as tensor_files
from labcode.train.checkpoint.tensors import DamagedError, Part, whole

TENSORS = {
    "step": torch.tensor(3),
    "model/embed.weight": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "model/none": torch.empty(0, 4),
    "rank0/random/cpu": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "short": torch.ones(3, dtype=torch.bfloat16),
}


def save(folder, *of_ranks):
    """Writes what each rank holds; returns the index, as a reader finds it, and its JSON."""
    index = tensor_files.plan([tensor_files.held(parts) for parts in of_ranks])
    sizes = {}
    for rank, parts in enumerate(of_ranks):
        stored = tensor_files.write(folder, rank, parts, index)
        if stored is not None:
            sizes[tensor_files.file_of(rank)] = stored.size_bytes
    tensor_files.write_index(folder, index)
    tree = json.loads((folder / "tensors.json").read_text())
    assert tensor_files.to_index(tree, sizes) == index
    return index, tree, sizes


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, index, its JSON, sizes of its files) of a checkpoint of TENSORS."""
    folder = tmp_path_factory.mktemp("step-00000003")
    parts = {name: whole(tensor) for name, tensor in TENSORS.items()}
    return folder, *save(folder, parts)


def test_what_was_written_is_read(saved):
    folder, index, _, _ = saved
    for name, tensor in TENSORS.items():
        found = tensor_files.read_whole(folder, index, name)
        assert torch.equal(found, tensor)
        assert found.dtype == tensor.dtype


WHOLE = torch.arange(48.0).reshape(6, 8)


def rows(first, count):
    box = Box((first, 0), (0, 0), (count, 8))
    return Part(WHOLE[first : first + count].clone(), (6, 8), [box])


def columns(first, count):
    box = Box((0, first), (0, 0), (6, count))
    return Part(WHOLE[:, first : first + count].clone(), (6, 8), [box])


def in_two_boxes():
    """Rows 1 and 4, as a rank of two has them of a weight of two sections."""
    boxes = [Box((1, 0), (0, 0), (1, 8)), Box((4, 0), (1, 0), (1, 8))]
    return Part(WHOLE[[1, 4]], (6, 8), boxes)


LAYOUTS = {
    "one": [rows(0, 6)],
    "rows": [rows(0, 2), rows(2, 3), rows(5, 1)],
    "columns": [columns(0, 3), columns(3, 5)],
}


@pytest.mark.parametrize("written", LAYOUTS)
def test_a_tensor_is_read_in_another_layout_than_that_in_which_it_was_written(tmp_path, written):
    index, _, _ = save(tmp_path, *[{"weight": part} for part in LAYOUTS[written]])
    for part in [*LAYOUTS["one"], *LAYOUTS["rows"], *LAYOUTS["columns"], in_two_boxes()]:
        found = part._replace(own=torch.full_like(part.own, -1))
        tensor_files.read_into(tmp_path, index, "weight", found)
        assert torch.equal(found.own, part.own)


def test_what_several_ranks_hold_one_of_them_writes_and_they_share_the_work(tmp_path):
    both = {"a": rows(0, 6), "b": rows(0, 6), "own": whole(torch.ones(3))}
    other = {"a": rows(0, 6), "b": rows(0, 6)}
    index, _, sizes = save(tmp_path, both, other)
    assert [len(index[name].boxes) for name in ("a", "b")] == [1, 1]
    assert {index[name].boxes[0].file for name in ("a", "b")} == {"rank-0.bin", "rank-1.bin"}
    assert sizes["rank-1.bin"] == WHOLE.nbytes


def test_only_the_rows_that_are_wanted_are_read(tmp_path):
    index, _, _ = save(tmp_path, {"weight": rows(0, 6)})
    path = tmp_path / "rank-0.bin"
    path.write_bytes(path.read_bytes()[: 2 * 8 * 4])  # the first two rows
    part = rows(0, 2)
    tensor_files.read_into(tmp_path, index, "weight", part._replace(own=torch.empty(2, 8)))
    with pytest.raises(DamagedError, match=r"rank-0.bin ends too early"):
        tensor_files.read_into(tmp_path, index, "weight", rows(1, 2))
    path.unlink()
    with pytest.raises(DamagedError, match=r"rank-0.bin is missing"):
        tensor_files.read_into(tmp_path, index, "weight", part)


def test_boxes_that_lie_over_each_other_are_damage(tmp_path):
    _, tree, sizes = save(tmp_path, {"weight": rows(0, 3)}, {"weight": rows(3, 3)})
    tree["weight"]["boxes"][1]["offsets"] = [0, 0]
    with pytest.raises(ValueError, match="the boxes of weight are not 48 values, each once"):
        tensor_files.to_index(tree, sizes)
    tree["weight"]["boxes"][1]["offsets"] = [2, 0]
    index = tensor_files.to_index(tree, sizes)
    with pytest.raises(DamagedError, match="its boxes of weight do not hold each value once"):
        tensor_files.read_into(tmp_path, index, "weight", rows(5, 1))


ODD = [None, 3, 2.5, True, "text", [], ["text"], [[]], {}, {"a": 1}, -1, 2**70, "../x", "/x", "\0"]
PLACES = [
    ["embed"],
    ["embed", "dtype"],
    ["embed", "size"],
    ["embed", "size", 0],
    ["embed", "boxes"],
    ["embed", "boxes", 0],
    ["embed", "boxes", 0, "offsets"],
    ["embed", "boxes", 0, "sizes"],
    ["embed", "boxes", 0, "sizes", 1],
    ["embed", "boxes", 0, "file"],
    ["embed", "boxes", 0, "start"],
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_whatever_stands_in_it_is_refused_in_one_line(saved, place):
    _, _, tree, sizes = saved
    for value in ODD:
        odd = {"embed": copy.deepcopy(tree["model/embed.weight"])}
        target = odd
        for key in place[:-1]:
            target = target[key]
        if value == target[place[-1]] or (place[-1] == "start" and value == 3):
            continue  # it might be so
        target[place[-1]] = value
        with pytest.raises(ValueError, match="embed") as error:
            tensor_files.to_index(odd, sizes)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tree", [None, 3, "text", [], [1]])
def test_json_that_is_no_index_is_refused(tree):
    with pytest.raises(ValueError, match=r"the index is an? "):
        tensor_files.to_index(tree, {})


def test_a_tensor_larger_than_its_file_is_refused(saved):
    _, _, tree, sizes = saved
    entry = copy.deepcopy(tree["model/embed.weight"])
    entry["size"] = entry["boxes"][0]["sizes"] = [2**31, 2**30]
    with pytest.raises(ValueError, match=r"box 0 of huge ends at byte \d+ of rank-0.bin"):
        tensor_files.to_index({"huge": entry}, sizes)
