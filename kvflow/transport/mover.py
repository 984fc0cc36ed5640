"""What differs between the transports: how to reach a peer and how to move bytes.

A mover is called on one owner thread, and does no accounting: its caller posts only for peers that were added,
and removes a peer only when nothing of that peer is in flight.
"""

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transport.base import Carrier, Fence, PeerAddress, Program
from kvflow.transport.bounds import CheckedScatter, Rows
from kvflow.transport.ledger import Chunk, Reason
from kvflow.transport.serving import Serving
from kvflow.transport.staging import Scatterer


class MoveFailed(Exception):
    """A call failed, and nothing of it will write to memory any more.

    Attributes:
        reason: the code ``bounds`` blames one program or read, every other code the whole peer.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.reason = Reason(code, detail)


class Staged(Struct, frozen=True, eq=False):
    """What a staged program needs beside its rows.

    Attributes:
        checked: its copies.
        scatterer: carries them out.
    """

    checked: CheckedScatter
    scatterer: Scatterer


class Prepared(Struct, frozen=True, eq=False):
    """A program whose rows are checked.

    Attributes:
        program: as the caller gave it.
        source: its source rows.
        target: its target rows; of a staged program those of all staging buffers, one after the other.
        staged: of a staged program, how its units are fetched and scattered.
    """

    program: Program
    source: Rows
    target: Rows
    staged: Staged | None = None


class Flight:
    """Something that was not done when its post returned. Each mover has its own kind.

    Attributes:
        polled: whether only ``poll`` finds out that it has ended; otherwise the mover's descriptor tells.
        mover: whose it is, as ``PlanesMover`` notes it.
        unheld: of a chunk that is over: see ``ReadCompleted``.
    """

    __slots__ = ("mover",)
    polled = True
    unheld: AbstractSet[tuple[int, int]] = frozenset()
    mover: "Mover"


class Mover(Protocol):
    """Move bytes. Making one registers the memory. Thread: the owner's only.

    A mover that is derived from this has the defaults.
    """

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``progress`` has something to do; -1: there is none."""
        return -1

    def progress(self) -> None:
        """Go on with what is in flight, as far as that is possible without waiting. By default, ``poll`` does that."""
        return

    def leave(self, peer: PeerId) -> None:
        """End what is in flight from a peer that is being let go, if that is possible; it shows when it is polled.

        By default it is not possible.
        """
        return

    def add(self, address: PeerAddress) -> Carrier:
        """Get ready to read from a peer whose epoch table was checked, and return what will carry its bytes.

        The peer publishes this plane.

        Raises:
            MoveFailed: nothing of the peer is kept. The code ``plane_unfit`` says that the peer answers, and that this
                plane cannot serve the pair.
        """
        ...

    def remove(self, peer: PeerId, *, gone: bool) -> None:
        """Forget a peer and its programs, if it is known; unless it is gone, it may come again soon."""
        ...

    def prepare(self, prepared: Prepared) -> None:
        """Get ready to read with a program.

        Raises:
            MoveFailed: the program cannot be used.
        """
        ...

    def post(self, chunk: Chunk) -> Flight | int:
        """Start to move a chunk of a checked read. An int: it has arrived; 1: not all, as a lease was not held.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def post_fence(self, peer: PeerId, fence: Fence, after: frozenset[int]) -> Flight | int:
        """Start to read an epoch slot. An int: its value.

        Args:
            peer: that was added.
            fence: names the slot, which is in its epoch table.
            after: ids of the reads that the fence judges, all of them complete; empty for a look.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def poll(self, flight: Flight) -> int | None:
        """Ask once about something in flight. None: still flying. An int: over; see ``post``, ``post_fence``.

        Raises:
            MoveFailed: as the class says; the flight is over.
        """
        ...

    def renew(self) -> None:
        """Destroy the reader and make another, which knows no peer. Nothing that was in flight writes any more.

        Raises:
            MoveFailed: there is no reader now; each ``add`` tries again to make one.
        """
        ...

    def close(self) -> None:
        """Destroy the reader, then the exporter. On return nothing that was in flight writes any more."""
        ...


class Plane(Mover, Protocol):
    """A mover of one data plane.

    Attributes:
        metadata: what a peer needs to read from us over this plane.
        data_endpoint: where the plane listens, as peers reach it; empty if it does not.
    """

    metadata: bytes
    data_endpoint: str = ""


MoverFactory = Callable[[Sequence[Region], Region, Serving], Plane]
"""Makes the mover of one plane from the regions, the epoch table and what it is to serve. Raises
``TransportUnavailable``, and leaves nothing behind."""
