"""What differs between the transports: how to reach a peer and how to move bytes.

A mover is called by one thread at a time, and does no accounting: its caller posts only for peers that were added,
and removes a peer only when nothing of that peer is in flight. All calls but ``post`` and ``post_check`` come from the
thread that has made it.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transfer.requests import LeaseName
from kvflow.transport.base import Carrier, PeerAddress, Program
from kvflow.transport.bounds import CheckedScatter, Rows
from kvflow.transport.serving import Serving
from kvflow.transport.staging import Scatterer

NO_BUFFER = -1
"""Of a chunk that arrives where it belongs."""

SPAN_MAX = 512
"""Epoch slots that one check reads: 4 KiB."""


class Reason(Struct, frozen=True):
    """Why something failed: a code of the contract, and words."""

    code: str
    detail: str


class MoveFailed(Exception):
    """A call failed, and nothing of it will write to memory any more.

    Attributes:
        reason: the code ``bounds`` blames one program or read, every other code the whole peer.
    """

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self.reason = Reason(code, detail)


class Share(NamedTuple):
    """Unit pairs of a portion that follow each other, and the read that they belong to.

    Attributes:
        read_id: the read.
        lease: what they are read under.
        pairs: how many, at least one.
    """

    read_id: int
    lease: LeaseName
    pairs: int


class Portion(Struct, frozen=True, eq=False, gc=False):
    """Pairs of units of one program that were bound together: part of one read, or several small reads.

    Attributes:
        peer: whose memory is read.
        program_id: prepared lists.
        source_index: int32, shape (n,): descriptors of the source list; of a staged program numbers of units.
        target_index: int32, shape (n,): likewise of the target list.
        cuts: int64, ascending, first 0, last n: chunk ``c`` is ``[cuts[c], cuts[c + 1])``.
        nbytes: that it fills.
        shares: whose pairs these are, in the order of the pairs. With ``P`` pairs in all, ``n`` is a multiple of ``P``
            and index ``k`` belongs to pair ``k % P``: a plain program lists its indices run by run, and within each run
            pair by pair. A staged program has one index for each pair.
    """

    peer: PeerId
    program_id: int
    source_index: npt.NDArray[np.int32]
    target_index: npt.NDArray[np.int32]
    cuts: npt.NDArray[np.int64]
    nbytes: int
    shares: tuple[Share, ...]


class Chunk(Struct, frozen=True, eq=False, gc=False):
    """Descriptors ``[first, stop)`` of a portion, or units if it has a staging ``buffer``."""

    portion: Portion
    first: int
    stop: int
    buffer: int = NO_BUFFER


def share_numbers(chunk: Chunk) -> npt.NDArray[np.uint16] | None:
    """Tell which share each descriptor of a chunk belongs to.

    Returns:
        uint16, shape (descriptors,): an index into ``chunk.portion.shares``. None: the portion has one share.
    """
    shares = chunk.portion.shares
    if len(shares) == 1:
        return None
    of_pair = np.repeat(np.arange(len(shares), dtype=np.uint16), [share.pairs for share in shares])
    of_descriptor: npt.NDArray[np.uint16] = of_pair[np.arange(chunk.first, chunk.stop) % len(of_pair)]
    return of_descriptor


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
        source_units: units of the source are in ``[0, source_units)``.
        target_units: likewise of the target.
        pair_bytes: bytes that one pair of units fills.
        pair_s: seconds that one pair adds to a post, by ``post_costs``.
        portion_pairs: pairs of one read that are bound together at most.
        chunk_pairs: pairs of several reads that share a chunk at most; 0: none do.
    """

    program: Program
    source: Rows
    target: Rows
    staged: Staged | None = None
    source_units: int = 0
    target_units: int = 0
    pair_bytes: int = 0
    pair_s: float = 0.0
    portion_pairs: int = 1
    chunk_pairs: int = 0


class Flight:
    """Something that was not done when its post returned. Each mover has its own kind.

    Attributes:
        polled: whether only ``poll`` finds out that it has ended; otherwise the mover's descriptor tells.
        unheld: of a chunk that is over: slot and epoch of each lease under which the exporter did not serve something.
        refused: of a chunk that is over: ids of the reads that the exporter refused to serve -> why. The others have
            arrived.
    """

    __slots__ = ()
    polled = True
    unheld: AbstractSet[tuple[int, int]] = frozenset()
    refused: Mapping[int, Reason] = MappingProxyType({})


class Movers(Protocol):
    """The movers of one worker, which share its peers. Thread: one at a time, see above."""

    def of(self, peer: PeerId) -> "Mover":
        """Return what moves the bytes of a peer that was added."""
        ...

    def fileno(self) -> int:
        """Return a descriptor that is readable while ``progress`` has something to do; -1: there is none."""
        return -1

    def progress(self) -> None:
        """Go on with what is in flight, as far as that is possible without waiting. By default, ``poll`` does that."""
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

    def reset(self) -> None:
        """Destroy the reader and make another, which knows no peer. What was in flight writes nothing after this.

        Raises:
            MoveFailed: there is no reader now; each ``add`` tries again to make one.
        """
        ...

    def close(self) -> None:
        """Destroy the reader, then the exporter. What was in flight writes nothing after this returns."""
        ...


class Mover(Movers, Protocol):
    """Move bytes. Making one registers the memory. Thread: one at a time, see above.

    A mover that is derived from this has the defaults.
    """

    def of(self, peer: PeerId) -> "Mover":
        """See ``Movers.of``."""
        return self

    def leave(self, peer: PeerId) -> None:
        """End what is in flight from a peer that is being removed, if that is possible; it shows when it is polled.

        By default it is not possible.
        """
        return

    def ends_at_once(self, peer: PeerId) -> bool:
        """Tell whether most posts for a peer that was added have ended when they return, so that nothing waits for it.

        Only then are reads posted inline. By default they have not.
        """
        return False

    def prepare(self, prepared: Prepared) -> None:
        """Get ready to read with a program.

        Raises:
            MoveFailed: the program cannot be used.
        """
        ...

    def post(self, chunk: Chunk) -> Flight | int:
        """Start to move a chunk of checked reads. An int, which is 0: it has arrived.

        A mover whose exporter serves it returns a flight, which tells what was not served.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def post_check(
        self, peer: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> Flight | Sequence[int]:
        """Start to read the epoch slots from ``first`` to ``last``, at most ``SPAN_MAX``.

        Args:
            peer: that was added.
            first: the lowest slot, in its epoch table.
            last: the highest slot, in its epoch table.
            reads: ids and leases of the reads that are checked; their slots are among these.
            fence: whether all bytes of these reads have arrived. Otherwise nothing of them was posted.

        Returns:
            What the slots held, the first one first, if that is known already. Values of other slots than those of
            ``reads`` mean nothing.

        Raises:
            MoveFailed: as the class says.
        """
        ...

    def poll(self, flight: Flight) -> int | Sequence[int] | None:
        """Ask once about something in flight. None: still flying. Otherwise: over; see ``post``, ``post_check``.

        Raises:
            MoveFailed: as the class says; the flight is over.
        """
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
