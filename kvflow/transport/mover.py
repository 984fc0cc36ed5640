"""What differs between the transports: how to reach a peer and how to move bytes.

A mover is called on one owner thread, and does no accounting: its caller posts only for peers that were added,
and removes a peer only when nothing of that peer is in flight.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transport.base import Carrier, PeerAddress, Program
from kvflow.transport.bounds import CheckedScatter, Rows
from kvflow.transport.ledger import Chunk, Reason
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
    """Something that was not done when its post returned. Each mover has its own kind."""

    __slots__ = ()


class Mover(Protocol):
    """Move bytes. Making one registers the memory. Thread: the owner's only."""

    @property
    def metadata(self) -> bytes:
        """What a peer needs to read from us."""
        ...

    def add(self, address: PeerAddress) -> Carrier:
        """Get ready to read from a peer whose epoch table was checked, and return what will carry its bytes.

        Raises:
            MoveFailed: nothing of the peer is kept.
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
        """Start to move a chunk of a checked read. An int (0): all of it has arrived.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def post_fence(self, peer: PeerId, slot: int) -> Flight | int:
        """Start to read an epoch slot. An int: its value.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def poll(self, flight: Flight) -> int | None:
        """Ask once about something in flight. None: still flying. An int: over, and the slot's value if a fence.

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


MoverFactory = Callable[[Sequence[Region], Region], Mover]
"""Makes a mover from the regions and the epoch table. Raises ``TransportUnavailable``, and leaves nothing behind."""
