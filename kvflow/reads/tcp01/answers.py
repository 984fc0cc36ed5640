"""Answers of the TCP exporter: bytes of the cache, then the values of the epoch slots after all bytes were copied.

An answer is sent piece by piece, as its socket takes it. Before each piece the epochs of its leases are compared. Once
a lease has ended, zeros replace the rest of its bytes, and the end of the answer says so.
"""

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvflow.layout.component import Region
from kvflow.reads.contract import Piece
from kvflow.reads.device import PORTION_BYTES, portions
from kvflow.reads.staging import memory_at
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.channel import ByteStream

Integers = list[int] | npt.NDArray[np.int64] | npt.NDArray[np.uint16]

_ZEROS = memoryview(bytes(1 << 20))
_BUFFERS_MAX = 1024  # buffers of one system call
_AT_ONCE_BYTES = 2 << 20  # bytes of one system call: a socket rarely has room for more
_NO_LEASE = -1


class HostMemory:
    """Registered memory of this process in DRAM, as buffers."""

    def __init__(self, regions: Sequence[Region]) -> None:
        held: list[tuple[int, int]] = []
        for first, stop in sorted(
            (each.address, each.address + each.nbytes) for each in regions if each.memory == "DRAM"
        ):
            # Neighbors are joined across regions, so regions that touch share one buffer.
            if held and first <= held[-1][1]:
                held[-1] = (held[-1][0], max(stop, held[-1][1]))
            else:
                held.append((first, stop))
        self._starts = [first for first, _ in held]
        self._views = [memory_at(first, stop - first).data for first, stop in held]

    def stretches(self, addresses: Iterable[int], lengths: Iterable[int]) -> list[memoryview]:
        """Return the bytes at these checked addresses."""
        pairs = zip(addresses, lengths, strict=True)
        if len(self._views) == 1:
            view, first = self._views[0], self._starts[0]
            return [view[at - first : at - first + n] for at, n in pairs]
        found = []
        for at, nbytes in pairs:
            number = bisect_right(self._starts, at) - 1
            first = at - self._starts[number]
            found.append(self._views[number][first : first + nbytes])
        return found


@dataclass(slots=True, eq=False)
class Words:
    """An answer, or a part of the opening, that is complete."""

    data: bytes
    sent: int = 0

    @property
    def waiting(self) -> int:
        """How many stretches have no buffer yet: none."""
        return 0

    def send(self, channel: ByteStream) -> bool | None:
        """Send what there is room for. True: all of it was sent; None: there is no room now."""
        count = channel.send([memoryview(self.data)[self.sent :]])
        self.sent += count
        return self.sent == len(self.data) or (None if not count else False)


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
            # The table gets a lease before its slot does. So if only the slot matches, the lease was not admitted yet.
            self.other = value if value != self.epoch else self.epoch - 1 if self.epoch else 1


class Bytes:
    """The answer to a read with at least one held lease. Its buffers are made when they are needed.

    Args:
        leases: the leases that the read names.
        memory: the memory that is served.
        address: address of each stretch to send, in order.
        nbytes: length of each stretch.
        owner: number of each stretch's lease.
        epochs: our epoch table.
    """

    __slots__ = (
        *("_address", "_at", "_at_once", "_epochs", "_leases", "_memory", "_nbytes", "_next", "_owner", "_tail"),
        *("_owners", "_views"),
    )

    def __init__(
        self,
        leases: list[ReadLease],
        memory: HostMemory,
        address: Integers,
        nbytes: Integers,
        owner: Integers,
        *,
        epochs: memoryview,
    ) -> None:
        total = sum(nbytes) if isinstance(nbytes, list) else int(nbytes.sum())
        header = wire.ANSWER.pack(wire.DONE, 0, len(leases), 0, total)
        self._leases = leases
        self._memory = memory
        self._at_once = max(16, min(_BUFFERS_MAX, _AT_ONCE_BYTES * len(nbytes) // total))
        self._address, self._nbytes, self._owner = address, nbytes, owner
        self._epochs = epochs
        self._next = 0  # first stretch without a buffer
        self._views = [memoryview(header)]
        self._owners = [_NO_LEASE]  # the lease of each view
        self._at = 0
        self._tail: Words | None = None

    @property
    def waiting(self) -> int:
        """How many stretches have no buffer yet."""
        return len(self._address) - self._next

    def send(self, channel: ByteStream) -> bool | None:
        """Send what there is room for. True: all of it was sent; None: there is no room now."""
        if self._tail is not None:
            return self._tail.send(channel)
        self._compare()
        self._fill()
        count = channel.send(self._views[self._at : self._at + self._at_once])
        if not count:
            return None
        self._skip(count)
        if self._at < len(self._views) or self.waiting:
            return False
        # All bytes were copied out of the cache, so the present values of the slots are valid for all of them.
        order_memory()
        for lease in self._leases:
            lease.compare(self._epochs[lease.slot])
        self._tail = Words(told(self._leases))
        return self._tail.send(channel)

    def _fill(self) -> None:
        """Make the next buffers."""
        left = len(self._views) - self._at
        if left >= self._at_once or not self.waiting:
            return
        part = slice(self._next, self._next + self._at_once)
        self._next = min(part.stop, len(self._address))
        made = self._memory.stretches(_listed(self._address[part]), _listed(self._nbytes[part]))
        self._views = self._views[self._at :] + made
        self._owners = self._owners[self._at :] + _listed(self._owner[part])
        self._at = 0
        if not all(lease.held for lease in self._leases):
            self._blank()

    def _blank(self) -> None:
        """Replace the buffers of leases that are not held by zeros."""
        views: list[memoryview] = []
        owners: list[int] = []
        for owner, view in zip(self._owners[self._at :], self._views[self._at :], strict=True):
            held = owner == _NO_LEASE or self._leases[owner].held
            allowed = [view] if held else zeros_for(len(view), _ZEROS)
            views += allowed
            owners += [owner] * len(allowed)
        self._views, self._owners, self._at = views, owners, 0

    def _skip(self, count: int) -> None:
        views, at = self._views, self._at
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:
            views[at] = views[at][count:]
        self._at = at

    def _compare(self) -> None:
        """Replace the rest of leases that have ended by zeros."""
        ended = False
        for lease in self._leases:
            if lease.held:
                lease.compare(self._epochs[lease.slot])
                ended = ended or not lease.held
        if ended:
            self._blank()


def not_held(leases: list[ReadLease]) -> Words:
    """Return the answer to a read without a held lease."""
    return Words(wire.ANSWER.pack(wire.NOT_HELD, 0, len(leases), 0, 0) + told(leases))


def told(leases: list[ReadLease]) -> bytes:
    """Return the end of an answer: the value of each lease's slot."""
    return b"".join(wire.EPOCH_VALUE.pack(lease.epoch if lease.other is None else lease.other) for lease in leases)


class FetchedBytes:
    """The answer to a read of device memory: it fetches and sends one portion after the other.

    What the reader does not take at once waits in a buffer of this answer. A connection sends one answer at a time, so
    it has at most one such buffer.

    Args:
        leases: the leases that the read names.
        fetch: copies parts of device memory to a buffer.
        address: address of each part, in order.
        nbytes: length of each part.
        owner: number of each part's lease.
        epochs: our epoch table.
    """

    __slots__ = ("_epochs", "_leases", "_left", "_portions", "_unsent", "waiting")

    def __init__(
        self,
        leases: list[ReadLease],
        fetch: Callable[[Sequence[Piece], memoryview], None],
        address: Integers,
        nbytes: Integers,
        owner: Integers,
        *,
        epochs: memoryview,
    ) -> None:
        self.waiting = len(address)
        self._leases = leases
        self._epochs = epochs
        self._left = int(sum(nbytes))  # to fetch
        self._portions = self._fetched(fetch, address, nbytes, owner)
        self._unsent: list[memoryview] = []

    def send(self, channel: ByteStream) -> bool | None:
        """Send what there is room for. True: all of it was sent; None: there is no room now."""
        if not self._unsent:
            self._unsent = next(self._portions)
        count = channel.send(self._unsent)
        if not count:
            return None
        while self._unsent and count >= len(self._unsent[0]):
            count -= len(self._unsent.pop(0))
        if count:
            self._unsent[0] = self._unsent[0][count:]
        return not self._unsent and not self._left

    def _fetched(
        self,
        fetch: Callable[[Sequence[Piece], memoryview], None],
        address: Integers,
        nbytes: Integers,
        owner: Integers,
    ) -> Iterator[list[memoryview]]:
        """Yield what to send, one portion at a time, each in the same buffer.

        The epochs are compared after a portion was fetched, not when the socket takes it. A lease that is held after
        the fetch was held during it, so the bytes are right, and they do not change in our buffer. The same is true for
        the epochs at the end, because the cache is not read after them.
        """
        ready = [memoryview(wire.ANSWER.pack(wire.DONE, 0, len(self._leases), 0, self._left))]
        buffer = memoryview(bytearray(min(PORTION_BYTES, self._left)))
        owners = _listed(owner)
        for parts, numbers in portions(zip(_listed(address), _listed(nbytes), strict=True)):
            content = buffer[: sum(length for _, length in parts)]
            self._compare()
            if any(lease.held for lease in self._leases):
                fetch(parts, content)
            order_memory()
            self._compare()
            at = 0
            for (_, length), number in zip(parts, numbers, strict=True):
                if not self._leases[owners[number]].held:
                    content[at : at + length] = bytes(length)
                at += length
            self._left -= at
            self.waiting = len(owners) - numbers[-1] - 1
            ready.append(content)
            if not self._left:
                ready.append(memoryview(told(self._leases)))
            yield ready
            ready = []

    def _compare(self) -> None:
        for lease in self._leases:
            lease.compare(self._epochs[lease.slot])


Answer = Words | Bytes | FetchedBytes


def zeros_for(nbytes: int, zeros: memoryview) -> list[memoryview]:
    """Return ``nbytes`` zeros, as views."""
    whole, rest = divmod(nbytes, len(zeros))
    return [zeros] * whole + ([zeros[:rest]] if rest else [])


def order_memory() -> None:
    """Order this thread's loads before the call ahead of its loads after it, also on weakly ordered machines.

    Releasing a lock and then acquiring one is such a barrier on every machine that CPython runs on.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()


def _listed(numbers: Integers) -> list[int]:
    return numbers if isinstance(numbers, list) else numbers.tolist()
