"""A simulated exporter that serves: it sends only what its own lease table says is held, as the TCP data plane does."""

import numpy as np
import numpy.typing as npt

from kvflow.reads.backend import CheckedList, Chunk, Share, share_numbers
from kvflow.reads.bounds import MergedDescriptor, merge
from kvflow.reads.serving import LeasedBlocks
from kvflow.reads.tcp01.answers import ReadLease
from kvflow.reads.tcp01.served import ServedList
from tests.fakes.world import Violation

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

    def __init__(self, chunk: Chunk, prepared: CheckedList, served: ServedList, leased: LeasedBlocks) -> None:
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
                self._blocks.append(served.resolve(np.ascontiguousarray(source[of_share])).block)

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
