"""The index of a checkpoint says where its tensors are, and nothing else gets through."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp

from labcode.train import tensor_index

TENSORS = {
    "step": torch.tensor(3),
    "model/embed.weight": torch.arange(6.0, dtype=torch.float64).reshape(2, 3),
    "model/none": torch.empty(0, 4),
    "rank0/random/cpu": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "short": torch.ones(3, dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, index, sizes of its files) of a checkpoint of TENSORS."""
    folder = tmp_path_factory.mktemp("step-00000003")
    metadata = dcp.save(TENSORS, storage_writer=tensor_index.Writer(folder), no_dist=True)
    sizes = {path.name: path.stat().st_size for path in folder.glob("*.distcp")}
    return folder, tensor_index.to_tree(metadata), sizes


@pytest.mark.filterwarnings("ignore")
def test_what_was_written_is_read_without_the_pickle(saved, monkeypatch):
    folder, tree, sizes = saved
    (folder / ".metadata").unlink()
    index = tensor_index.to_metadata(tree, sizes)
    found = {name: torch.empty_like(tensor) for name, tensor in TENSORS.items()}
    dcp.load(found, storage_reader=tensor_index.Reader(folder, index), no_dist=True)
    for name, tensor in TENSORS.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype


@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_several_ranks_wrote_in_pieces_is_put_together(saved):
    folder, tree, sizes = saved
    whole = tree["model/embed.weight"]["chunks"][0]
    piece = {**whole, "offsets": [2, 0]}
    twice = {"dtype": "float64", "size": [4, 3], "chunks": [whole, piece]}
    index = tensor_index.to_metadata({"both": twice}, sizes)
    found = {"both": torch.empty(4, 3, dtype=torch.float64)}
    dcp.load(found, storage_reader=tensor_index.Reader(folder, index), no_dist=True)
    assert torch.equal(found["both"], torch.cat([TENSORS["model/embed.weight"]] * 2))


ODD = [None, 3, 2.5, True, "text", [], ["text"], [[]], {}, {"a": 1}, -1, 2**70, "../x", "/x", "\0"]
PLACES = [
    ["embed"],
    ["embed", "dtype"],
    ["embed", "size"],
    ["embed", "size", 0],
    ["embed", "chunks"],
    ["embed", "chunks", 0],
    ["embed", "chunks", 0, "offsets"],
    ["embed", "chunks", 0, "sizes"],
    ["embed", "chunks", 0, "sizes", 1],
    ["embed", "chunks", 0, "file"],
    ["embed", "chunks", 0, "start"],
    ["embed", "chunks", 0, "bytes"],
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: ".".join(map(str, place)))
def test_whatever_stands_in_it_is_refused_in_one_line(saved, place):
    _, tree, sizes = saved
    for value in ODD:
        odd = {"embed": copy.deepcopy(tree["model/embed.weight"])}
        target = odd
        for key in place[:-1]:
            target = target[key]
        if value == target[place[-1]] or (place[-1] == "start" and value == 3):
            continue  # it might be so
        target[place[-1]] = value
        with pytest.raises(ValueError, match="embed") as error:
            tensor_index.to_metadata(odd, sizes)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("tree", [None, 3, "text", [], [1]])
def test_json_that_is_no_index_is_refused(tree):
    with pytest.raises(ValueError, match="the index is a "):
        tensor_index.to_metadata(tree, {})


def test_a_tensor_larger_than_its_file_is_refused(saved):
    _, tree, sizes = saved
    entry = copy.deepcopy(tree["model/embed.weight"])
    entry["size"] = entry["chunks"][0]["sizes"] = [2**31, 2**30]
    with pytest.raises(ValueError, match="chunk 0 of huge needs 18446744073709551616 bytes"):
        tensor_index.to_metadata({"huge": entry}, sizes)
    entry = copy.deepcopy(tree["model/embed.weight"])
    entry["chunks"][0]["bytes"] = 10**9
    with pytest.raises(ValueError, match=r"ends at byte \d+ of __0_0.distcp, which has"):
        tensor_index.to_metadata({"long": entry}, sizes)
