"""Decide what a reader of the TCP exporter may get: check its lists once, and its reads against leases. Pure.

A reader names block ranges by descriptors of a prepared list. A descriptor is served only if our own lease table
says that its lease holds the block now.
"""

import weakref
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from kvflow.reads.bounds import FEW, OutOfBounds, joined, joined_few
from kvflow.reads.contract import Serving
from kvflow.reads.serving import LeasedBlocks
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.answers import Answer, Bytes, FetchedBytes, HostMemory, Integers, ReadLease, Words, not_held
from kvflow.reads.tcp01.served import ServedList, Tracks

ROWS_OF_ONE_MAX = 1 << 17
"""Most rows of all prepared lists of one connection: 5 MiB."""


@dataclass(slots=True, eq=False)
class PreparedLists:
    """The prepared lists of one connection: number -> list, or why it was refused; and the rows of all."""

    known: dict[int, ServedList | str] = field(default_factory=dict)
    rows: int = 0


class Desk:
    """Answer requests of readers. Thread: one only."""

    def __init__(self, serving: Serving, memory: HostMemory, epochs: memoryview) -> None:
        self._memory = memory
        self._device_memory = serving.device_memory
        self._epochs = epochs
        self._leased = LeasedBlocks(serving)
        self._tracks = [Tracks(tracks) for tracks in serving.tracks]
        self._known: weakref.WeakValueDictionary[bytes, ServedList] = weakref.WeakValueDictionary()

    def answer(self, prepared_lists: PreparedLists, request: wire.RequestHeader, body: bytes) -> Answer | None:
        """Return the answer to one request of a connection; None for a prepared list.

        Raises:
            BadFrame: the request contradicts itself, or there are too many prepared lists.
        """
        if request.kind == wire.PROGRAM:
            self._learn(prepared_lists, request, body)
            return None
        try:
            return (
                self._read(prepared_lists, request, body) if request.kind == wire.READ else self._epoch(request.number)
            )
        except OutOfBounds as error:
            detail = str(error).encode()[: wire.DETAIL_BYTES_MAX]
            return Words(wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, len(detail)) + detail)

    def _learn(self, prepared_lists: PreparedLists, request: wire.RequestHeader, body: bytes) -> None:
        """Check a prepared list once, and store it. A read with it reports what is wrong. Raises: BadFrame."""
        prepared_lists.rows += request.units
        if len(prepared_lists.known) >= wire.LISTS_MAX or prepared_lists.rows > ROWS_OF_ONE_MAX:
            raise wire.BadFrame(
                f"{len(prepared_lists.known)} prepared lists of {prepared_lists.rows} rows are too many"
            )
        if request.number in prepared_lists.known:
            raise wire.BadFrame(f"prepared list {request.number} is there already")
        # All readers of one layout ask for the same rows, over any number of connections.
        digest = sha256(request.few.to_bytes(2, "little") + body).digest()
        prepared_list = self._known.get(digest)
        if prepared_list is None:
            try:
                if request.few >= len(self._tracks):
                    raise OutOfBounds(f"there is no group {request.few}")
                prepared_list = ServedList(wire.decode_rows(body), self._tracks[request.few], request.few)
            except OutOfBounds as error:
                prepared_lists.known[request.number] = str(error)
                return
            self._known[digest] = prepared_list
        prepared_lists.known[request.number] = prepared_list

    def _epoch(self, slot: int) -> Answer:
        if slot >= len(self._epochs):
            raise OutOfBounds(f"there is no epoch slot {slot}")
        value = wire.EPOCH_VALUE.pack(self._epochs[slot])
        return Words(wire.ANSWER.pack(wire.DONE, 0, 0, 0, len(value)) + value)

    def _read(self, prepared_lists: PreparedLists, request: wire.RequestHeader, body: bytes) -> Answer:
        """Return the answer to a read. Raises: OutOfBounds, BadFrame."""
        prepared_list = prepared_lists.known.get(request.number)
        if not isinstance(prepared_list, ServedList):
            raise OutOfBounds(prepared_list or f"prepared list {request.number} is not known")
        if request.few == 1 and request.units <= FEW:
            return self._read_few(prepared_list, request, body)
        named, index, lease_of = wire.decode_read(request, body)
        resolved = prepared_list.resolve(index)
        leases = [ReadLease(slot, epoch) for slot, epoch, _ in named]
        shares = _shares(resolved.block, lease_of, len(leases))
        for lease, blocks, (_, _, mac) in zip(leases, shares, named, strict=True):
            self._check(lease, prepared_list.group, blocks, mac)
        if not any(lease.held for lease in leases):
            return not_held(leases)
        address, nbytes, first = joined(resolved.address, resolved.nbytes, lease_of)
        owner = np.zeros(len(first), np.uint16) if lease_of is None else lease_of[first]
        return self._bytes(prepared_list, leases, address, nbytes, owner)

    def _read_few(self, prepared_list: ServedList, request: wire.RequestHeader, body: bytes) -> Answer:
        """Do the same for a few descriptors of one lease, one by one: arrays would take three times as long."""
        slot, epoch, mac = wire.LEASE.unpack_from(body)
        lease = ReadLease(slot, epoch)
        places = prepared_list.few(wire.decode_few(request, body))
        if lease.slot >= len(self._epochs):
            raise OutOfBounds(f"there is no epoch slot {lease.slot}")
        ids = self._leased.ids(slot, epoch, prepared_list.group, mac=mac)
        lease.compare(self._epochs[lease.slot], known=ids is not None)
        if ids is None or not lease.held:
            return not_held([lease])
        for _, _, block in places:
            if block not in ids:
                raise OutOfBounds(
                    f"block {block} of group {prepared_list.group} is not one of the lease in slot {lease.slot}"
                )
        starts, lengths = joined_few((address, nbytes) for address, nbytes, _ in places)
        return self._bytes(prepared_list, [lease], starts, lengths, [0] * len(starts))

    def _bytes(
        self, prepared_list: ServedList, leases: list[ReadLease], address: Integers, nbytes: Integers, owner: Integers
    ) -> Answer:
        """Return the answer with these stretches. Raises: OutOfBounds."""
        if prepared_list.memory == "DRAM":
            return Bytes(leases, self._memory, address, nbytes, owner, epochs=self._epochs)
        if self._device_memory is None or prepared_list.device is None:
            raise OutOfBounds("the TCP data plane does not reach the memory of these devices")
        fetch = partial(self._device_memory.fetch, prepared_list.device)
        return FetchedBytes(leases, fetch, address, nbytes, owner, epochs=self._epochs)

    def _check(self, lease: ReadLease, group: int, blocks: npt.NDArray[np.int64], mac: bytes) -> None:
        """Check that a lease of a read is held, and that the blocks are those of the lease."""
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
    """Return the blocks that are read under each lease."""
    if lease_of is None:
        return [blocks]
    order = np.argsort(lease_of, kind="stable")
    return np.split(blocks[order], lease_of[order].searchsorted(np.arange(1, leases)))
