"""A simulated exporter that serves: it sends only what its own lease table says is held, as the TCP data plane does."""

import numpy as np
import numpy.typing as npt

from kvflow.testing.world import Violation
from kvflow.transfer.requests import LeaseShare
from kvflow.transport.bounds import Run, merge
from kvflow.transport.ledger import Chunk, lease_numbers
from kvflow.transport.mover import Prepared
from kvflow.transport.serving import LeasedBlocks, ServedProgram
from kvflow.transport.tcp_answers import Held

Part = tuple[Run, Held | None]
"""Neighboring bytes, and the lease that they are sent under; None: of an exporter that is read without its help."""


class Answer:
    """What an exporter has to say to one chunk.

    Args:
        chunk: that is asked for.
        prepared: its program.
        served: the same, as the exporter has checked it.
        leased: the blocks of the exporter's leases.

    Attributes:
        parts: of the chunk, in order.
        leases: that it names.
    """

    def __init__(self, chunk: Chunk, prepared: Prepared, served: ServedProgram, leased: LeasedBlocks) -> None:
        read = chunk.read
        self._leased = leased
        self._group = served.group
        self._blocks: list[npt.NDArray[np.int64]] = []
        self._macs: list[bytes] = []
        self._begun = False
        self.parts: list[Part] = []
        self.leases: list[Held] = []
        source, target = (index[chunk.first : chunk.stop] for index in (read.source_index, read.target_index))
        numbers = lease_numbers(chunk)
        for number, lease in enumerate(read.leases):
            of_lease = np.full(len(source), number == 0) if numbers is None else numbers == number
            if of_lease.any():
                self._add(lease, merge(prepared.source, source[of_lease], prepared.target, target[of_lease]))
                self._blocks.append(served.resolve(np.ascontiguousarray(source[of_lease])).block)
                self._macs.append(lease.mac)

    def compare(self, slot_value: npt.NDArray[np.uint64]) -> None:
        """Compare every lease with what its slot holds; the first time with the lease table, and the blocks, too.

        Raises:
            Violation: a block is read that its lease does not hold.
        """
        for held, blocks, mac in zip(self.leases, self._blocks, self._macs, strict=True):
            inside = None if self._begun else self._leased.held(held.slot, held.epoch, self._group, blocks, mac=mac)
            held.compare(int(slot_value[held.slot]), known=self._begun or inside is not None)
            if inside is not None and held.held and not inside.all():
                raise Violation(f"a read asks for block {blocks[np.argmin(inside)]}, which its lease does not hold")
        self._begun = True

    def _add(self, lease: LeaseShare, runs: list[Run]) -> None:
        held = Held(lease.slot, lease.epoch)
        self.leases.append(held)
        self.parts += [(run, held) for run in runs]


class Told:
    """What the answers to reads have told of their leases. A fence needs no question of its own then."""

    def __init__(self) -> None:
        self._odd: dict[int, dict[tuple[int, int], int]] = {}

    def note(self, read_id: int, leases: list[Held]) -> None:
        """Note the end of an answer."""
        odd = self._odd.setdefault(read_id, {})
        for held in leases:
            if held.other is not None:
                odd[held.slot, held.epoch] = max(held.other, odd.get((held.slot, held.epoch), held.other))

    def verdict(self, slot: int, epoch: int, after: frozenset[int]) -> int:
        """Return what the slot held when some reads ended; the worst, if they differ."""
        odd = [self._odd[read_id][slot, epoch] for read_id in after if (slot, epoch) in self._odd.get(read_id, {})]
        return max([value for value in odd if value > epoch], default=min(odd, default=epoch))
