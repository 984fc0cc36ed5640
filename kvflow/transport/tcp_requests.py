"""What a reader asks of the TCP exporter, and what it may have: programs are checked once, reads against leases. Pure.

A reader names block ranges by descriptors of a program. A descriptor is served only if it lies in a block that the
lease, under which it is asked for, holds now by our own lease table.
"""

import weakref
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvflow.layout.tracks import Tracks
from kvflow.transport import tcp_wire as wire
from kvflow.transport.bounds import FEW, OutOfBounds, joined, joined_few
from kvflow.transport.serving import LeasedBlocks, ServedProgram, Serving
from kvflow.transport.tcp_answers import Answer, Bytes, FetchedBytes, Held, HostMemory, Integers, Words, not_held

ROWS_OF_ONE_MAX = 1 << 17
"""Rows of all programs of one connection: 5 MiB."""


@dataclass(slots=True, eq=False)
class Programs:
    """What one connection has told of.

    Attributes:
        known: number -> program, or why it was refused.
        rows: of all programs.
    """

    known: dict[int, ServedProgram | str] = field(default_factory=dict)
    rows: int = 0


class Desk:
    """Answer requests. Thread: one only.

    Args:
        serving: what may be served.
        memory: where it is.
        epochs: our epoch table.
    """

    def __init__(self, serving: Serving, memory: HostMemory, epochs: memoryview) -> None:
        self._memory = memory
        self._device_memory = serving.device_memory
        self._epochs = epochs
        self._leased = LeasedBlocks(serving)
        self._tracks = [Tracks(tracks) for tracks in serving.tracks]
        self._known: weakref.WeakValueDictionary[bytes, ServedProgram] = weakref.WeakValueDictionary()

    def answer(self, programs: Programs, request: wire.Request, body: bytes) -> Answer | None:
        """Return the answer to one request of a connection; a program has none.

        Raises:
            BadFrame: the request contradicts itself, or there are too many programs.
        """
        if request.kind == wire.PROGRAM:
            self._learn(programs, request, body)
            return None
        try:
            return self._read(programs, request, body) if request.kind == wire.READ else self._epoch(request.number)
        except OutOfBounds as error:
            detail = str(error).encode()[: wire.DETAIL_BYTES_MAX]
            return Words(wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, len(detail)) + detail)

    def _learn(self, programs: Programs, request: wire.Request, body: bytes) -> None:
        """Check a program once, and remember it; what is wrong with it is said when it is read with.

        Raises:
            BadFrame: there are too many.
        """
        programs.rows += request.units
        if len(programs.known) >= wire.PROGRAMS_MAX or programs.rows > ROWS_OF_ONE_MAX:
            raise wire.BadFrame(f"{len(programs.known)} programs of {programs.rows} rows are too many")
        if request.number in programs.known:
            raise wire.BadFrame(f"program {request.number} is there already")
        # Readers of one layout ask for the same rows, whatever their number and their connections.
        digest = sha256(request.few.to_bytes(2, "little") + body).digest()
        program = self._known.get(digest)
        if program is None:
            try:
                if request.few >= len(self._tracks):
                    raise OutOfBounds(f"there is no group {request.few}")
                program = ServedProgram(wire.decode_rows(body), self._tracks[request.few], request.few)
            except OutOfBounds as error:
                programs.known[request.number] = str(error)
                return
            self._known[digest] = program
        programs.known[request.number] = program

    def _epoch(self, slot: int) -> Answer:
        if slot >= len(self._epochs):
            raise OutOfBounds(f"there is no epoch slot {slot}")
        value = wire.EPOCH_VALUE.pack(self._epochs[slot])
        return Words(wire.ANSWER.pack(wire.DONE, 0, 0, 0, len(value)) + value)

    def _read(self, programs: Programs, request: wire.Request, body: bytes) -> Answer:
        """Return the answer to a read.

        Raises:
            OutOfBounds: it asks for something that its leases do not promise.
            BadFrame: its body contradicts itself.
        """
        program = programs.known.get(request.number)
        if not isinstance(program, ServedProgram):
            raise OutOfBounds(program or f"program {request.number} is not known")
        if request.few == 1 and request.units <= FEW:
            return self._read_few(program, request, body)
        named, index, lease_of = wire.decode_read(request, body)
        resolved = program.resolve(index)
        leases = [Held(slot, epoch) for slot, epoch, _ in named]
        shares = _shares(resolved.block, lease_of, len(leases))
        for lease, blocks, (_, _, mac) in zip(leases, shares, named, strict=True):
            self._check(lease, program.group, blocks, mac)
        if not any(lease.held for lease in leases):
            return not_held(leases)
        address, nbytes, first = joined(resolved.address, resolved.nbytes, lease_of)
        owner = np.zeros(len(first), np.uint16) if lease_of is None else lease_of[first]
        return self._bytes(program, leases, address, nbytes, owner)

    def _read_few(self, program: ServedProgram, request: wire.Request, body: bytes) -> Answer:
        """Do the same for a few descriptors of one lease, one by one: arrays would take three times as long."""
        slot, epoch, mac = wire.LEASE.unpack_from(body)
        lease = Held(slot, epoch)
        places = program.few(wire.decode_few(request, body))
        if lease.slot >= len(self._epochs):
            raise OutOfBounds(f"there is no epoch slot {lease.slot}")
        ids = self._leased.ids(slot, epoch, program.group, mac=mac)
        lease.compare(self._epochs[lease.slot], known=ids is not None)
        if ids is None or not lease.held:
            return not_held([lease])
        for _, _, block in places:
            if block not in ids:
                raise OutOfBounds(
                    f"block {block} of group {program.group} is not one of the lease in slot {lease.slot}"
                )
        starts, lengths = joined_few((address, nbytes) for address, nbytes, _ in places)
        return self._bytes(program, [lease], starts, lengths, [0] * len(starts))

    def _bytes(
        self, program: ServedProgram, leases: list[Held], address: Integers, nbytes: Integers, owner: Integers
    ) -> Answer:
        """Return the answer that has these stretches.

        Raises:
            OutOfBounds: they lie where we cannot read.
        """
        if program.memory == "DRAM":
            return Bytes(leases, self._memory, address, nbytes, owner, epochs=self._epochs)
        if self._device_memory is None or program.device is None:
            raise OutOfBounds("the TCP data plane does not reach the memory of these devices")
        fetch = partial(self._device_memory.fetch, program.device)
        return FetchedBytes(leases, fetch, address, nbytes, owner, epochs=self._epochs)

    def _check(self, lease: Held, group: int, blocks: npt.NDArray[np.int64], mac: bytes) -> None:
        """Compare a lease of a read with what is held, and the blocks that are read with those of the lease."""
        if lease.slot >= len(self._epochs):
            raise OutOfBounds(f"there is no epoch slot {lease.slot}")
        inside = self._leased.held(lease.slot, lease.epoch, group, blocks, mac=mac)
        lease.compare(self._epochs[lease.slot], known=inside is not None)
        if inside is not None and lease.held and not inside.all():
            block = int(blocks[np.argmin(inside)])
            raise OutOfBounds(f"block {block} of group {group} is not one of the lease in slot {lease.slot}")


def _shares(
    blocks: npt.NDArray[np.int64], lease_of: npt.NDArray[np.uint16] | None, leases: int
) -> list[npt.NDArray[np.int64]]:
    """Return the blocks that each lease is named for."""
    if lease_of is None:
        return [blocks]
    order = np.argsort(lease_of, kind="stable")
    return np.split(blocks[order], lease_of[order].searchsorted(np.arange(1, leases)))
