"""A simulated exporter that serves: it sends only what its own lease table says is held, as the TCP data plane does."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvflow.layout.tracks import Track
from kvflow.reads.backend import CheckedList, Chunk, Share, share_numbers
from kvflow.reads.bounds import MergedDescriptor, merge
from kvflow.reads.serving import LeasedBlocks
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.runs import ServedGroup, SourceList
from tests.fakes.world import Violation


class Served:
    """A prepared list, as its exporter looks it up; ``group`` of the peer."""

    def __init__(self, prepared: CheckedList, tracks: Sequence[Track], group: int) -> None:
        layout = wire.decode_layout(wire.encode_layout([tracks]))
        memory = prepared.prepared_list.source_memory
        self.group = group
        self._list = SourceList(prepared.source, layout.groups[0], layout.num_blocks, memory)
        self._stretches = ServedGroup(tracks)

    def blocks(self, index: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
        """Return the blocks that descriptors lie in, in some order."""
        frame = wire.encode_read(self.group, 0, 0, self._list.runs(index))
        return np.array(self._stretches.resolve(frame[wire.REQUEST.size :]).blocks, np.int64)


@dataclass(slots=True, eq=False)
class ReadLease:
    """One lease of a read. ``other``: the first other value that its slot had; then none of its bytes is sent."""

    slot: int
    epoch: int
    other: int | None = None

    @property
    def held(self) -> bool:
        """Whether the lease was held at every comparison."""
        return self.other is None

    def compare(self, value: int, *, known: bool = True) -> None:
        """Compare with the value of the slot, and check that the lease table has the lease."""
        if self.other is None and (value != self.epoch or not known):
            self.other = value if value != self.epoch else self.epoch - 1 if self.epoch else 1


Part = tuple[MergedDescriptor, ReadLease | None]
"""Neighboring bytes, and the lease that they are sent under; None: of an exporter that is read without its help."""


class Answer:
    """What an exporter has to say to one chunk.

    Args:
        chunk: that is asked for.
        prepared: its prepared list.
        served: the same, as the exporter has checked it.
        leased: the blocks of the exporter's leases.

    Attributes:
        parts: of the chunk, in order.
        shares: of the portion that have descriptors in the chunk, and what becomes of their leases.
    """

    def __init__(self, chunk: Chunk, prepared: CheckedList, served: Served, leased: LeasedBlocks) -> None:
        portion = chunk.portion
        self._leased = leased
        self._group = served.group
        self._blocks: list[npt.NDArray[np.int64]] = []
        self._begun = False
        self.parts: list[Part] = []
        self.shares: list[tuple[Share, ReadLease]] = []
        source, target = (index[chunk.first : chunk.stop] for index in (portion.source_index, portion.target_index))
        numbers = share_numbers(chunk)
        for number, share in enumerate(portion.shares):
            of_share = np.full(len(source), number == 0) if numbers is None else numbers == number
            if of_share.any():
                held = ReadLease(share.lease.slot, share.lease.epoch)
                runs = merge(prepared.source, source[of_share], prepared.target, target[of_share])
                self.shares.append((share, held))
                self.parts += [(run, held) for run in runs]
                self._blocks.append(served.blocks(np.ascontiguousarray(source[of_share])))

    def compare(self, slot_value: npt.NDArray[np.uint64]) -> None:
        """Compare every lease with what its slot holds; the first time with the lease table, and the blocks, too.

        Raises:
            Violation: a block is read that its lease does not hold.
        """
        for (share, held), blocks in zip(self.shares, self._blocks, strict=True):
            inside = None
            if not self._begun:
                inside = self._leased.held(held.slot, held.epoch, self._group, blocks, mac=share.lease.mac)
            held.compare(int(slot_value[held.slot]), known=self._begun or inside is not None)
            if inside is not None and held.held and not inside.all():
                raise Violation(f"a read asks for block {blocks[np.argmin(inside)]}, which its lease does not hold")
        self._begun = True
