"""The interface of a data plane: how to reach a peer, and how to move bytes; and the form of what it publishes.

One thread at a time calls a backend. The caller does the accounting: it posts only for peers that were added, and
removes a peer only when nothing of that peer is in flight. All calls except ``post`` and ``post_check`` come from the
thread that created the backend.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta, Struct

from kvflow.errors import FailureCode
from kvflow.ids import PeerId
from kvflow.layout.component import METADATA_BYTES_MAX, Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.bounds import CheckedRows, CheckedScatter
from kvflow.reads.contract import Carrier, PeerAddress, PreparedList, Serving
from kvflow.reads.reach import HostFacts
from kvflow.reads.staging import Scatterer

NO_BUFFER = -1  # the buffer number of a chunk that is read directly into the target


class Cause(Struct, frozen=True):
    """Why something failed: a code of the contract, an explanation, and what to do; empty: nothing need be done."""

    code: FailureCode
    detail: str
    remedy: str = ""


class BackendError(Exception):
    """A call failed. It will not write to memory. The code ``bounds`` means one list or read; others the whole peer."""

    def __init__(self, code: FailureCode, detail: str, remedy: str = "") -> None:
        super().__init__(f"{code}: {detail}")
        self.reason = Cause(code, detail, remedy)


class Share(NamedTuple):
    """Consecutive unit pairs of a portion, at least one, that belong to one read."""

    read_id: int
    lease: LeaseName
    pairs: int


class Portion(Struct, frozen=True, eq=False, gc=False):
    """Pairs of units of one prepared list that were bound together: part of one read, or several small reads.

    Attributes:
        source_index: int32, shape (n,): descriptors of the source list; for a staged list, unit numbers.
        target_index: int32, shape (n,): the same for the target list.
        cuts: int64, ascending, first 0, last n: chunk ``c`` is ``[cuts[c], cuts[c + 1])``.
        nbytes: bytes that it fills.
        shares: the reads that the pairs belong to, in the order of the pairs. With ``P`` pairs in all, ``n`` is a
            multiple of ``P`` and index ``k`` belongs to pair ``k % P``: a plain list has its indices run by run, and
            within each run pair by pair. A staged list has one index for each pair.
    """

    peer: PeerId
    list_id: int
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
    """Return the share of each descriptor of a chunk, uint16, shape (descriptors,); None if the portion has one."""
    shares = chunk.portion.shares
    if len(shares) == 1:
        return None
    of_pair = np.repeat(np.arange(len(shares), dtype=np.uint16), [share.pairs for share in shares])
    of_descriptor: npt.NDArray[np.uint16] = of_pair[np.arange(chunk.first, chunk.stop) % len(of_pair)]
    return of_descriptor


class Staged(Struct, frozen=True, eq=False):
    """The checked copies of a staged list, and what runs them."""

    checked: CheckedScatter
    scatterer: Scatterer


class CheckedList(Struct, frozen=True, eq=False, gc=False):
    """A prepared list whose rows are checked.

    Attributes:
        target: its target rows; for a staged list, those of all staging buffers, one after the other.
        source_units: how many the source has, and ``target_units`` the target.
        pair_bytes: bytes that one pair of units fills.
        pair_s: estimated seconds that one pair adds to a post.
        portion_pairs: most pairs of one read that are bound together.
        chunk_pairs: most pairs of several reads that share a chunk; 0: no reads share one.
    """

    prepared_list: PreparedList
    source: CheckedRows
    target: CheckedRows
    staged: Staged | None = None
    source_units: int = 0
    target_units: int = 0
    pair_bytes: int = 0
    pair_s: float = 0.0
    portion_pairs: int = 1
    chunk_pairs: int = 0


class PostedWork:
    """Work that was not done when its post returned. Each backend derives a class.

    Attributes:
        polled: whether only ``poll`` detects its end; otherwise the backend's descriptor becomes readable.
        unheld: for a chunk that has ended: slot and epoch of each lease under which the exporter refused bytes.
        refused: for a chunk that has ended: id of each read that the exporter refused -> why. The others have arrived.
    """

    __slots__ = ()
    polled = True
    unheld: AbstractSet[tuple[int, int]] = frozenset()
    refused: Mapping[int, Cause] = MappingProxyType({})


class Backend(Protocol):
    """Move bytes over one data plane. Creating a backend registers the memory. Derived classes inherit the defaults.

    Attributes:
        metadata: what a peer needs to read from us over this plane.
        data_endpoint: where the plane listens, as peers reach it; empty if it does not listen.
        certificate: with which it encrypts, both ways; empty if it does not.
    """

    metadata: bytes = b""
    data_endpoint: str = ""
    certificate: bytes = b""

    def fileno(self) -> int:
        """Return a file descriptor that is readable while ``progress`` has work; -1 if there is none."""
        return -1

    def progress(self) -> None:
        """Advance what is in flight, without waiting. The default does nothing, because ``poll`` advances it."""
        return

    def add(self, address: PeerAddress) -> Carrier:
        """Prepare to read from a peer that publishes this plane and whose epoch table was checked. Return its carrier.

        Raises:
            BackendError: the peer was not added. With code ``plane_unfit`` the peer answers, but this plane cannot
                serve the pair.
        """
        ...

    def of(self, peer: PeerId) -> "Backend":
        """Return the backend that reads from a peer that was added. A core with one plane asks that plane itself."""
        return self

    def remove(self, peer: PeerId, *, gone: bool) -> None:
        """Forget a peer and its prepared lists, if it is known. If ``gone`` is false, it may be added again soon."""
        ...

    def cancel(self, read_ids: Collection[int]) -> None:
        """End what is in flight of these reads soon, without ending other reads; ``poll`` then reports it."""
        return

    def leave(self, peer: PeerId) -> None:
        """End what is in flight from a peer that is being removed, if possible; ``poll`` then reports it."""
        return

    def reset(self) -> None:
        """Destroy the reader and create a new one, which knows no peer. Nothing that was in flight writes after this.

        Raises:
            BackendError: there is no reader now; each ``add`` tries to create one.
        """
        ...

    def close(self) -> None:
        """Destroy the reader, then the exporter. Nothing that was in flight writes after this."""
        ...

    def ends_at_once(self, peer: PeerId) -> bool:
        """Return whether most posts have ended when they return, or are short requests: only then are they inline."""
        return False

    def chunk_descriptors(self, peer: PeerId) -> int:
        """Return the most descriptors of one post for a peer whose posts are asynchronous.

        0 keeps chunks small and few: right if a post is the copy, or if posted work advances only in polls.
        """
        return 0

    def prepare(self, prepared: CheckedList) -> None:
        """Prepare to read with a prepared list. Raises BackendError: the prepared list cannot be used."""
        ...

    def post(self, chunk: Chunk) -> PostedWork | int:
        """Start to move a chunk of checked reads. Return 0 if all of it has arrived.

        If an exporter serves the reads, it may refuse some: the ``PostedWork`` of such a backend has them.

        Raises:
            BackendError: as the class says.
        """
        ...

    def post_check(
        self, peer: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Start to read the epoch slots from ``first`` to ``last`` of an added peer, at most ``SPAN_MAX`` slots.

        ``reads`` are ids and leases of the reads that are checked; their slots are in this range. ``fence``: whether
        all bytes of these reads have arrived. Otherwise nothing of them was posted.

        Returns:
            The values of the slots in order, if they are known already. Values of slots that no read has are undefined.

        Raises:
            BackendError: as the class says.
        """
        ...

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        """Ask about work in flight. Return None if it has not ended; otherwise see ``post`` and ``post_check``.

        Of work that is not ``polled`` it says the same when it is asked again.

        Raises:
            BackendError: as the class says; the work has ended.
        """
        ...


BackendFactory = Callable[[Sequence[Region], Region, Serving], Backend]
"""Regions, epoch table, what to serve -> the backend of one plane, or ``TransportUnavailable`` and nothing remains."""

_Short = Annotated[str, Meta(max_length=64)]


class Envelope(Struct, frozen=True):
    """One exporter.

    Attributes:
        transport: name of the plane, which readers must use, too.
        agent: the exporter's name, unique per incarnation.
        blob: what the plane's library needs.
        settings: what must be equal on both sides; None if the peer did not state it, as for the next.
        facts: what explains which carriers reach the exporter.
    """

    transport: Annotated[str, Meta(max_length=32)]
    agent: Annotated[str, Meta(min_length=1, max_length=512)]
    blob: bytes
    settings: Annotated[dict[_Short, _Short], Meta(max_length=32)] | None = None
    facts: HostFacts | None = None


_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode an envelope. Raises ValueError: the result would be larger than ``METADATA_BYTES_MAX``."""
    encoded = msgspec.msgpack.encode(envelope)
    if len(encoded) > METADATA_BYTES_MAX:
        raise ValueError(f"{len(encoded)} bytes of metadata; the limit is {METADATA_BYTES_MAX}")
    return encoded


def decode_envelope(encoded: bytes, *, transport: str, agent: str | None = None) -> Envelope:
    """Decode the result of ``encode_envelope`` for the same transport, from this agent; None accepts any.

    It has no digest: that of the ``Publication`` which brings it covers it.

    Raises:
        ValueError: it is too large, malformed, or from another agent or transport.
    """
    if len(encoded) > METADATA_BYTES_MAX:
        raise ValueError(f"{len(encoded)} bytes of metadata; the limit is {METADATA_BYTES_MAX}")
    envelope = _decoder.decode(encoded)
    if envelope.transport != transport:
        raise ValueError(f"the peer's transport is {envelope.transport!r}, ours is {transport!r}")
    if agent is not None and envelope.agent != agent:
        # A peer that uses the name of another one would prevent reads from it.
        raise ValueError(f"the metadata is that of {envelope.agent!r}, not of {agent!r}")
    return envelope
