"""The cache of one simulated rank: real bytes at virtual addresses, and patterns that name where a byte comes from.

Every element says which content it belongs to, and which layer, role, head and token it is. A content is what one
prefill has written, or what a block was overwritten with when it was free: a number that is never used twice.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.layout.component import Component
from kvflow.layout.manifest import Manifest
from kvflow.layout.region import Region
from kvflow.testing.models import Shape, plan_of
from kvflow.transport.bounds import Rows

Int64s = npt.NDArray[np.int64]
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


class _Tensor:
    """One component as an array, and the part of its elements that is the same for all contents.

    Attributes:
        group: that it belongs to.
        has_tokens: whether its elements belong to tokens.
        array: its elements, by block.
        marks: the part that is the same for all contents and tokens.
        in_block: the same, and which token of the block it is.
    """

    def __init__(
        self, memory: npt.NDArray[np.uint8], component: Component, *, group: int, layer: int, blocks: int
    ) -> None:
        self.group = group
        self.has_tokens = component.token_axis >= 0
        self.array: UInt32s = np.ndarray(
            (blocks, *component.extents),
            np.uint32,
            memory,
            component.offset,
            (component.block_stride, *component.strides),
        )
        kind = layer << 14 | ROLES.index(component.role) << 12
        head = np.arange(component.extents[0]) + component.first
        if self.has_tokens:
            token, place = np.arange(component.extents[1]), np.arange(component.extents[2])
            marks = kind | head[:, None, None] << 10 | place
            in_block = marks | token[:, None] << TOKEN_SHIFT
        else:
            marks = in_block = kind | head[:, None] * component.extents[1] + np.arange(component.extents[1])
        self.marks: Int64s = np.asarray(marks, np.int64)
        self.in_block: Int64s = np.asarray(in_block, np.int64)


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
        self._manifest = plan.manifest(self.region)
        self._block_sizes = [group.block_size for group in plan.groups]
        layers = sorted({name for group in plan.groups for name in group.layers})
        self._tensors = [
            _Tensor(self.memory, component, group=index, layer=layers.index(layer.name), blocks=plan.num_blocks)
            for index, group in enumerate(self._manifest.groups)
            for layer in group.layers
            for component in layer.components
        ]
        self._blocks_at = _blocks_at(self._manifest, plan.nbytes)

    def manifest(self) -> Manifest:
        """Return the canonical KV metadata."""
        return self._manifest

    def write(self, block_ids: Sequence[Sequence[int]], written: Written) -> None:
        """Write what a request has, into lists that each end with the block of its last token."""
        for tensor, ids, tokens in self._parts(block_ids, written):
            tensor.array[ids] = tensor.marks + _contents(tensor, written, tokens)

    def overwrite(self, block_ids: Sequence[int], content: int) -> None:
        """Write something else into blocks that are free, in all groups."""
        ids = np.asarray(block_ids, np.int64)
        for tensor in self._tensors:
            tensor.array[ids] = tensor.in_block + (content << CONTENT_SHIFT)

    def wrong(self, block_ids: Sequence[Sequence[int]], written: Written) -> str:
        """Compare blocks with what a request has; return the first difference in words, or nothing."""
        for tensor, ids, tokens in self._parts(block_ids, written):
            expected = tensor.marks + _contents(tensor, written, tokens)
            differs = tensor.array[ids] != expected
            if tensor.has_tokens:
                differs &= (tokens < len(written.tokens))[:, None, :, None]  # bytes past the last token mean nothing
            if differs.any():
                at = tuple(int(index[0]) for index in differs.nonzero())
                found, wanted = int(tensor.array[ids][at]), int(expected[at])
                return f"block {ids[at[0]]} of group {tensor.group}: {describe(found)} where {describe(wanted)} belongs"
        return ""

    def blocks_of(self, rows: Rows, index: npt.NDArray[np.int32]) -> list[int]:
        """Return the blocks that descriptors of ours lie in."""
        row = rows.firsts.searchsorted(index, side="right") - 1
        address = rows.table[row, 0] + (index - rows.firsts[row]) * rows.table[row, 3]
        found: list[int] = np.unique(self._blocks_at[(address - self.region.address) >> 2]).tolist()
        return found

    def _parts(
        self, block_ids: Sequence[Sequence[int]], written: Written
    ) -> list[tuple[_Tensor, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Give each tensor with the blocks that are present, and the tokens that each of them holds."""
        placed = []
        for ids, size in zip(block_ids, self._block_sizes, strict=True):
            array = np.asarray(ids, np.int64)
            first = -(-len(written.tokens) // size) - len(array)
            tokens = (np.arange(len(array)) + first)[:, None] * size + np.arange(size)
            placed.append((array[array >= 0], tokens[array >= 0]))
        return [(tensor, *placed[tensor.group]) for tensor in self._tensors if len(placed[tensor.group][0])]


def describe(element: int) -> str:
    """Say what an element claims to be."""
    content, layer, role, rest = element >> 16, element >> 14 & 3, element >> 12 & 3, element & 0xFFF
    return f"content {content} layer {layer} role {ROLES[role] if role < len(ROLES) else role} element {rest:#05x}"


def _contents(tensor: _Tensor, written: Written, tokens: Int64s) -> Int64s:
    """Return the part of the elements that depends on the content, and on the token that they are."""
    if not tensor.has_tokens:
        return np.full((len(tokens), 1, 1), written.state << CONTENT_SHIFT, np.int64)
    known = np.minimum(tokens, len(written.tokens) - 1)
    said = written.places[known] if tensor.group == 0 else tokens
    contents: Int64s = written.tokens[known] << CONTENT_SHIFT | said << TOKEN_SHIFT
    return contents[:, None, :, None]


def _blocks_at(manifest: Manifest, nbytes: int) -> npt.NDArray[np.int32]:
    """Return the block that each element of the memory belongs to."""
    blocks = np.full(nbytes // 4, -1, np.int32)
    memory = blocks.view(np.uint8)
    for group in manifest.groups:
        for layer in group.layers:
            for part in layer.components:
                strides = (part.block_stride, *part.strides)
                shape = (manifest.num_blocks, *part.extents)
                view: npt.NDArray[np.int32] = np.ndarray(shape, np.int32, memory, part.offset, strides)
                view[...] = np.arange(manifest.num_blocks).reshape(-1, *(1 for _ in part.extents))
    return blocks
