"""One block cut into the pieces that a map shows: ranges of bytes that belong to one layer."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from kvflow.layout.component import Component


class Part(NamedTuple):
    """One component's range in a piece, from its first byte to its last, and how many of these bytes are its own."""

    role: str
    start: int
    end: int
    nbytes: int


class Piece(NamedTuple):
    """A range of bytes that holds one layer's components, or a part of them, and little else."""

    start: int
    end: int
    parts: tuple[Part, ...]

    @property
    def interleaved(self) -> bool:
        """Whether the components take turns, rather than lie one behind the other."""
        ordered = sorted(self.parts, key=lambda part: part.start)
        return any(before.end > after.start for before, after in pairwise(ordered))


class _Tensor(NamedTuple):
    """A component, or one index of it, in a block: its axes as (extent, stride in bytes), and those of its items."""

    role: str
    offset: int
    axes: tuple[tuple[int, int], ...]
    item_bytes: int

    @property
    def nbytes(self) -> int:
        return math.prod(extent for extent, _ in self.axes) * self.item_bytes

    @property
    def part(self) -> Part:
        reach = sum((extent - 1) * stride for extent, stride in self.axes)
        return Part(self.role, self.offset, self.offset + reach + self.item_bytes, self.nbytes)


def pieces(components: Sequence[Component], block_size: int) -> list[Piece]:
    """Cut one layer's bytes of block 0 into dense ranges, as few as possible.

    Args:
        components: of the layer.
        block_size: tokens in one block.
    """
    tensors = []
    for part in components:
        axes = ((part.kernel_blocks(block_size), part.kernel_stride), *zip(part.extents, part.strides, strict=True))
        tensors.append(_Tensor(part.role, part.offset, tuple(axis for axis in axes if axis[0] > 1), part.item_bytes))
    return sorted(_cut(tensors))


def _cut(tensors: Sequence[_Tensor]) -> list[Piece]:
    parts = tuple(tensor.part for tensor in tensors)
    start, end = min(part.start for part in parts), max(part.end for part in parts)
    whole = Piece(start, end, parts)
    axes = {max(tensor.axes, key=lambda axis: axis[1], default=(1, 0)) for tensor in tensors}
    if end - start <= sum(tensor.nbytes for tensor in tensors):
        return [whole]
    if len(tensors) > 1 and (len(axes) > 1 or not whole.interleaved):
        return [piece for tensor in tensors for piece in _cut([tensor])]
    # Other layers lie in between: each index of the outermost axis is a range of its own, of all components.
    [(extent, stride)] = axes
    inner = [
        tensor._replace(axes=tuple(axis for axis in tensor.axes if axis != (extent, stride))) for tensor in tensors
    ]
    return [
        piece
        for index in range(extent)
        for piece in _cut([tensor._replace(offset=tensor.offset + index * stride) for tensor in inner])
    ]
