"""Tensors cut over ranks, and put into one message."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from labcode.parallel.zero.cut import Cut, piece_of, rows_of

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)


def test_rows_are_cut_as_torch_cuts_them() -> None:
    for rows in range(12):
        for parts in range(1, 6):
            pieces = list(torch.arange(rows).chunk(parts))
            sizes = [len(piece) for piece in pieces] + [0] * (parts - len(pieces))
            own = [rows_of(rows, index, parts) for index in range(parts)]
            assert [last - first for first, last in own] == sizes


def test_the_picture_in_the_docstring() -> None:
    wholes = [torch.tensor([1.0, 2, 3, 4]), torch.tensor([5.0, 6, 7])]
    cut = Cut([whole.shape for whole in wholes], parts=2)
    message = cut.pack_all(wholes, torch.float32)
    assert message.tolist() == [1, 2, 5, 6, 3, 4, 7, 0]


@given(SHAPES, st.integers(1, 5))
def test_what_is_packed_is_unpacked(shapes: list[tuple[int, ...]], parts: int) -> None:
    wholes = [torch.randn(shape) for shape in shapes]
    cut = Cut(shapes, parts)
    message = cut.pack_all(wholes, torch.float32)
    assert message.numel() == parts * cut.length
    segments = []
    for index in range(parts):
        own = cut.pieces(wholes, index)
        segment = cut.pack(own, torch.float32)
        assert torch.equal(segment, message.view(parts, -1)[index])
        for piece, back in zip(own, cut.unpack(segment, index)):
            assert torch.equal(piece, back)
        segments.append(segment)
    found = [torch.full_like(whole, 9.0) for whole in wholes]
    cut.unpack_all(torch.cat(segments), found)
    for whole, back in zip(wholes, found):
        assert torch.equal(whole, back)


def test_a_piece_is_a_view() -> None:
    whole = torch.zeros(5, 2)
    piece_of(whole, 1, 2).fill_(1.0)
    assert whole.sum() == 4
    number = torch.tensor(3.0)
    assert piece_of(number, 0, 2).tolist() == [3.0]
    assert piece_of(number, 1, 2).tolist() == []
