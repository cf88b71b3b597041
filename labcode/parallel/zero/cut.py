"""How tensors are cut over the ranks of a group, and how all of them travel in one message.

Each tensor is cut along its first dim into one piece per rank, as `torch.chunk` cuts it: p ranks,
N rows, ceil(N / p) rows for each until none are left, so that the last ranks may get fewer or none.
A message for all ranks has one segment per rank, with that rank's piece of each tensor, one after
the other. Segments have one length, since all-gather and reduce-scatter want equal parts; what is
too long is filled with zeros:

    two tensors, of 4 and 3 rows, two ranks:   | a0 a1 b0 b1 | a2 a3 b2 0 |

A message carries `p L >= N` numbers; the difference is less than one row per tensor and rank.

Source: torch.distributed.fsdp (FSDP2) cuts and packs in the same way: Liang et al. 2024
    (TorchTitan, arXiv:2410.06511), section 2.1.
Held by: tests/unit/test_zero_cut.py
"""

from collections.abc import Iterable, Sequence

import torch

from labcode.parallel.sharding import rows_of


class Cut:
    """The pieces of some tensors, which travel together.

    Args:
        shapes: Shapes of the whole tensors; one without dims counts as one row.
        parts: Number of ranks.

    Attributes:
        length: Numbers in one segment: those of the first rank, which has the most.
    """

    def __init__(self, shapes: Iterable[Sequence[int]], parts: int) -> None:
        self.shapes = [torch.Size(shape) for shape in shapes]
        self.parts = parts
        self.length = sum(shape.numel() for shape in self.piece_shapes(0))

    def piece_shapes(self, index: int) -> list[torch.Size]:
        """The shapes of a rank's pieces; a piece always has a first dim, which may be 0."""
        shapes = []
        for shape in self.shapes:
            rows, *others = shape or [1]  # [N, ..] -> [ceil(N / p) or fewer, ..]
            first, last = rows_of(rows, index, self.parts)
            shapes.append(torch.Size([last - first, *others]))
        return shapes

    def pieces(self, wholes: Sequence[torch.Tensor], index: int) -> list[torch.Tensor]:
        """Views of what a rank has of each tensor."""
        return [piece_of(whole, index, self.parts) for whole in wholes]

    def pack(self, pieces: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """One segment, `[L]`, from a rank's pieces."""
        segment = pieces[0].new_empty(self.length, dtype=dtype)
        self._fill(segment, pieces)
        return segment

    def pack_all(self, wholes: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """A message for all ranks, `[p L]`, from whole tensors."""
        # A copy of all tensors: a reduce-scatter wants what goes to one rank in one piece, and a
        # rank's rows lie spread over the tensors. FSDP2 makes the same copy (`chunk_cat`).
        message = wholes[0].new_empty(self.parts, self.length, dtype=dtype)  # [p, L]
        for index, segment in enumerate(message):
            self._fill(segment, self.pieces(wholes, index))
        return message.view(-1)  # [p, L] -> [p L]

    def unpack(self, segment: torch.Tensor, index: int) -> list[torch.Tensor]:
        """Views of a rank's pieces in its segment, `[L]`."""
        shapes = self.piece_shapes(index)
        sizes = [shape.numel() for shape in shapes]
        used = segment[: sum(sizes)]  # the rest is filling
        return [flat.view(shape) for flat, shape in zip(used.split(sizes), shapes)]

    def unpack_all(self, message: torch.Tensor, wholes: Sequence[torch.Tensor]) -> None:
        """Fill whole tensors from the segments of all ranks, `[p L]`."""
        for index, segment in enumerate(message.view(self.parts, self.length)):
            for place, piece in zip(self.pieces(wholes, index), self.unpack(segment, index)):
                place.copy_(piece)

    def _fill(self, segment: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Copy a rank's pieces into its segment; what they leave is zero."""
        sizes = [piece.numel() for piece in pieces]
        used = segment[: sum(sizes)]
        for flat, piece in zip(used.split(sizes), pieces):
            flat.view(piece.shape).copy_(piece)
        segment[sum(sizes) :].zero_()


def piece_of(whole: torch.Tensor, index: int, parts: int) -> torch.Tensor:
    """A view of what a rank gets of a tensor; it may have no rows."""
    rows = whole if whole.dim() else whole.view(1)
    first, last = rows_of(len(rows), index, parts)
    return rows[first:last]
