"""The cache of one simulated rank: real bytes at virtual addresses, and patterns that name where a byte comes from.

Every element says which content it belongs to, and which layer, role, head and token it is. A content is what one
prefill has written, or what a block was overwritten with when it was free: a number that is never used twice.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.ids import Int64s
from kvflow.layout.component import Component, Region
from kvflow.layout.manifest import Manifest
from kvflow.reads.bounds import CheckedRows
from tests.fakes.models import Shape, plan_of

UInt32s = npt.NDArray[np.uint32]

CONTENT_SHIFT = 16
CONTENTS_MAX = 1 << 16
TOKEN_SHIFT = 2
"""An element: content 16 bits, layer 2, role 2, head 2, token 8, place in the content axis 2. Of a state: content 16
bits, layer 2, role 2, number 12."""

ROLES = ("k", "v", "ssm")


class Written(Struct, frozen=True, eq=False):
    """What one request has in its source: which content each of its tokens, and its state, belongs to.

    Attributes:
        tokens: int64, shape (num_tokens,).
        state: of the states, which belong to no token.
        places: int64, shape (num_tokens,): which token the first group's bytes of each token say that they are: itself,
            unless its block is listed twice.
    """

    tokens: Int64s
    state: int
    places: Int64s


class _Group(Struct, frozen=True, eq=False):
    """The elements of one group: those of all its components, which are of one shape.

    Attributes:
        has_tokens: whether they belong to tokens.
        at: shape (blocks, components, *extents): where each lies in the memory, in elements.
        marks: the part of each that is the same for all contents, blocks and tokens, to be added to.
        in_block: the same, and which token of the block it is.
    """

    has_tokens: bool
    at: npt.NDArray[np.intp]
    marks: UInt32s
    in_block: UInt32s


class SimulatedCache:
    """The cache of one rank. See ``kvflow.worker.runtime.Cache``.

    Attributes:
        region: its addresses.
        memory: its bytes.

    Args:
        shape: how it lies.
        rank: whose part it is.
        address: of its first byte.
    """

    def __init__(self, shape: Shape, rank: int, address: int) -> None:
        plan = plan_of(shape, rank)
        self.bytes_per_block = plan.bytes_per_block
        self.region = Region(address=address, nbytes=plan.nbytes)
        self.memory: npt.NDArray[np.uint8] = np.zeros(plan.nbytes, np.uint8)
        self.view = memoryview(self.memory.data)  # copies of a few bytes are faster through it
        self._elements: UInt32s = self.memory.view(np.uint32)
        self._manifest = plan.manifest(self.region)
        self._block_sizes = [group.block_size for group in plan.groups]
        self._groups, self._blocks_at = _places(shape, rank)

    def manifest(self) -> Manifest:
        """Return the canonical KV metadata."""
        return self._manifest

    def write(self, block_ids: Sequence[Sequence[int]], written: Written) -> None:
        """Write what a request has, into lists that each end with the block of its last token."""
        for number, ids, tokens in self._parts(block_ids, written):
            group = self._groups[number]
            self._elements[group.at[ids]] = group.marks + _contents(number, group, written, tokens)

    def overwrite(self, block_ids: Sequence[int], content: int) -> None:
        """Write something else into blocks that are free, in all groups."""
        ids = np.asarray(block_ids, np.intp)
        for group in self._groups:
            self._elements[group.at[ids]] = group.in_block + np.uint32(content << CONTENT_SHIFT)

    def wrong(self, block_ids: Sequence[Sequence[int]], written: Written) -> str:
        """Compare blocks with what a request has; return a sentence about the first difference, or an empty string."""
        for number, ids, tokens in self._parts(block_ids, written):
            group = self._groups[number]
            expected = group.marks + _contents(number, group, written, tokens)
            found = self._elements[group.at[ids]]
            differs = found != expected
            if group.has_tokens:
                differs &= (tokens < len(written.tokens))[:, None, None, :, None]  # past the last token all is right
            if differs.any():
                at = tuple(int(index[0]) for index in differs.nonzero())
                one, other = describe(int(found[at])), describe(int(expected[at]))
                return f"block {ids[at[0]]} of group {number}: {one} where {other} belongs"
        return ""

    def blocks_of(self, rows: CheckedRows, index: npt.NDArray[np.int32]) -> list[int]:
        """Return the blocks that descriptors of ours lie in."""
        row = rows.firsts.searchsorted(index, side="right") - 1
        address = rows.table[row, 0] + (index - rows.firsts[row]) * rows.table[row, 3]
        return sorted({*self._blocks_at[(address - self.region.address) >> 2].tolist()})

    def _parts(
        self, block_ids: Sequence[Sequence[int]], written: Written
    ) -> Iterator[tuple[int, npt.NDArray[np.intp], Int64s]]:
        """Give each group with the blocks that are present, and the tokens that each of them holds."""
        for number, (ids, size) in enumerate(zip(block_ids, self._block_sizes, strict=True)):
            end = -(-len(written.tokens) // size)
            present = np.asarray(ids, np.intp)
            blocks = np.arange(end - len(ids), end)
            if min(ids, default=0) < 0:
                present, blocks = present[present >= 0], blocks[present >= 0]
            if len(present):
                yield number, present, blocks[:, None] * size + np.arange(size)


def describe(element: int) -> str:
    """Say what an element claims to be."""
    content, layer, role, rest = element >> 16, element >> 14 & 3, element >> 12 & 3, element & 0xFFF
    return f"content {content} layer {layer} role {ROLES[role] if role < len(ROLES) else role} element {rest:#05x}"


def _contents(number: int, group: _Group, written: Written, tokens: Int64s) -> UInt32s:
    """Return the part of a group's elements that depends on the content, and on the token that they are."""
    if not group.has_tokens:
        return np.full((len(tokens), 1, 1, 1), written.state << CONTENT_SHIFT, np.uint32)
    known = np.minimum(tokens, len(written.tokens) - 1)
    said = written.places[known] if number == 0 else tokens
    contents = written.tokens[known] << CONTENT_SHIFT | said << TOKEN_SHIFT
    return contents.astype(np.uint32)[:, None, None, :, None]


@cache
def _places(shape: Shape, rank: int) -> tuple[list[_Group], npt.NDArray[np.int32]]:
    """Return where the elements of each group lie, and the block that each element of the memory belongs to."""
    plan = plan_of(shape, rank)
    layers = sorted({name for group in plan.groups for name in group.layers})
    everything = np.arange(plan.nbytes // 4, dtype=np.int32)
    blocks_at = np.full(len(everything), -1, np.int32)
    groups = []
    for group in plan.groups:
        at, marks, in_block = [], [], []
        for layer in group.layers:
            for part in plan.layers[layer].components:
                strides = (part.block_stride, *part.strides)
                at.append(np.ndarray((plan.num_blocks, *part.extents), np.int32, everything, part.offset, strides))
                same, placed = _marks(part, layers.index(layer))
                marks.append(same)
                in_block.append(placed)
        elements = np.stack(at, axis=1).astype(np.intp)
        blocks_at[elements] = np.arange(plan.num_blocks).reshape(-1, *(1 for _ in elements.shape[1:]))
        groups.append(_Group(part.token_axis >= 0, elements, np.stack(marks), np.stack(in_block)))
    return groups, blocks_at


def _marks(part: Component, layer: int) -> tuple[UInt32s, UInt32s]:
    """Return what is the same for all contents and blocks: without the token of the block, and with it."""
    kind = layer << 14 | ROLES.index(part.role) << 12
    head = np.arange(part.extents[0]) + part.first
    if part.token_axis < 0:
        state = (kind | head[:, None] * part.extents[1] + np.arange(part.extents[1])).astype(np.uint32)
        return state, state
    token, place = np.arange(part.extents[1]), np.arange(part.extents[2])
    marks = kind | head[:, None, None] << 10 | place
    return marks.astype(np.uint32), (marks | token[:, None] << TOKEN_SHIFT).astype(np.uint32)
