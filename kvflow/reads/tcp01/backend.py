"""The TCP data plane as a backend: it requests bytes from peers, and receives them directly into the target.

The read thread does all of this, with non-blocking sockets. A peer has several connections. Each answers in order, and
a chunk goes to the connection that owes the fewest bytes. If a connection ends, its requests are sent once more over
another one, unless a byte of the answer has arrived.

At the end of each chunk, the exporter sends the values of the leases' epoch slots after the chunk's bytes were read. So
a fence needs no request: the chunks of its reads have brought the answer.

Small reads that share a chunk are requested together. If the exporter refuses the request because of one of them, each
is requested alone, so that the refusal fails only that read.
"""

import select
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvflow.addresses import place_of
from kvflow.config import TcpSettings
from kvflow.errors import FailureCode
from kvflow.ids import Credentials, PeerId
from kvflow.reads.backend import (
    Backend,
    BackendError,
    Cause,
    CheckedList,
    Chunk,
    PostedWork,
    Share,
    share_numbers,
)
from kvflow.reads.bounds import Places
from kvflow.reads.contract import Carrier, LeaseName, PeerAddress, Serving
from kvflow.reads.device import landing
from kvflow.reads.staging import memory_at
from kvflow.reads.tcp.connection import Told
from kvflow.reads.tcp.stream import ChannelClosed
from kvflow.reads.tcp.wire import BadFrame
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.connection import Known, OldQuestion, OldSourceConnection

NAME = "tcp"

OPENING_S_MAX = 5.0
"""Seconds from the first packet to the exporter's proof."""


READS_MAX = 1 << 17
"""How many reads' slot values are kept until their fence. Only those of reads that end without a fence stay longer."""


@dataclass(eq=False)
class _OldAsked(PostedWork):
    """A chunk or slots that were requested from a peer."""

    missing: int = 0
    values: list[int] = field(default_factory=list)
    failure: BackendError | None = None
    unheld: set[tuple[int, int]] = field(default_factory=set)
    refused: dict[int, Cause] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _OldPreparedList:
    """A prepared list."""

    known: Known
    places: Places
    device: int | None  # device of the target; None: host memory


@dataclass(slots=True, eq=False)
class _OldDialedPeer:
    """A peer that we read from."""

    address: PeerAddress
    place: tuple[str, int]
    who: Credentials
    connections: list[OldSourceConnection] = field(default_factory=list)
    prepared_lists: dict[int, _OldPreparedList] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Wanted:
    """Descriptors that one request asks for. ``numbers``: uint16, the share of each; None if there is one share."""

    asked: _OldAsked
    peer: _OldDialedPeer
    prepared_list: _OldPreparedList
    shares: Sequence[Share]
    numbers: npt.NDArray[np.uint16] | None
    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]

    def only(self, number: int) -> "_Wanted":
        """Return the descriptors of one share."""
        of_share = self.numbers == number
        one = (self.shares[number],)
        return _Wanted(
            self.asked, self.peer, self.prepared_list, one, None, self.source[of_share], self.target[of_share]
        )


class OldTcpBackend(Backend):
    """Read from peers of the release before.

    Args:
        settings: settings of the plane.
        serving: gives the copies to and from device memory.
    """

    def __init__(self, settings: TcpSettings, serving: Serving, told: Told) -> None:
        self._settings = settings
        self._device_memory = serving.device_memory
        self._peers: dict[PeerId, _OldDialedPeer] = {}
        self._connections: dict[int, tuple[OldSourceConnection, _OldDialedPeer]] = {}
        self._interest: dict[int, int] = {}
        self._opening: dict[OldSourceConnection, float] = {}
        self._told = told
        self._refused: list[_Wanted] = []
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the epoll of all connections."""
        return self._epoll.fileno()

    def add(self, address: PeerAddress) -> Carrier:
        """Prepare to dial the exporter of a peer that was checked; its first read connects."""
        place = place_of(address.data_endpoint)
        peer = _OldDialedPeer(address, place, address.credentials)
        try:
            self._open(peer)
        except ChannelClosed as error:
            raise BackendError(FailureCode.PEER_LOST, str(error)) from error
        self._peers[address.peer] = peer
        return Carrier("tcp", "kind")

    def leave(self, peer_id: PeerId) -> None:
        """Close the connections: a closed socket writes nothing. After a reset the peer may be unknown."""
        peer, detail = self._peers.get(peer_id), "the peer was removed"
        if peer is None:
            return
        self._end(dict.fromkeys(peer.connections, detail), again=False)
        for wanted in self._refused:
            if wanted.peer is peer:
                wanted.asked.missing -= 1
                wanted.asked.failure = BackendError(FailureCode.PEER_LOST, detail)
        self._refused = [wanted for wanted in self._refused if wanted.peer is not peer]

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """Forget a peer."""
        del gone  # connecting is fast, so no connection is kept
        self.leave(peer_id)
        self._peers.pop(peer_id, None)

    def prepare(self, prepared: CheckedList) -> None:
        """Prepare the request that announces a list."""
        prepared_list = prepared.prepared_list
        rows = prepared.source.table
        device = None
        if prepared_list.target_memory == "VRAM":
            device = int(prepared.target.table[0, 2])
            if self._device_memory is None or (prepared.target.table[:, 2] != device).any():
                raise BackendError(FailureCode.BOUNDS, "the TCP data plane does not reach the memory of these devices")
        if len(rows) > wire.ROWS_MAX:
            raise BackendError(
                FailureCode.BOUNDS, f"a prepared list of {len(rows)} rows: the TCP data plane takes {wire.ROWS_MAX}"
            )
        frame = wire.encode_list(prepared_list.list_id, prepared_list.group, rows)
        known = Known(prepared_list.list_id, frame)
        self._peers[prepared_list.peer].prepared_lists[prepared_list.list_id] = _OldPreparedList(
            known, Places(prepared.target), device
        )

    def post(self, chunk: Chunk) -> PostedWork | int:
        """Request a chunk."""
        portion = chunk.portion
        peer = self._peers[portion.peer]
        prepared_list = peer.prepared_lists[portion.list_id]
        part = slice(chunk.first, chunk.stop)
        source, target, numbers = portion.source_index[part], portion.target_index[part], share_numbers(chunk)
        asked = _OldAsked()
        for part in _parts(len(source), numbers):
            shares, renumbered = _named(portion.shares, None if numbers is None else numbers[part])
            self._want(_Wanted(asked, peer, prepared_list, shares, renumbered, source[part], target[part]))
        return asked

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Request slots. A fence sends nothing, because its values came with the chunks of its reads."""
        if fence:
            return self._told.verdicts(first, last, reads)
        slots = sorted({lease.slot for _, lease in reads})
        asked = _OldAsked(missing=len(slots), values=[0] * (last - first + 1))
        questions = [
            OldQuestion(wire.encode_epoch(slot), partial(self._on_value, asked, slot - first)) for slot in slots
        ]
        self._ask(self._peers[peer_id], questions)
        return asked

    def progress(self) -> None:
        """Advance the connections that are ready."""
        now = time.monotonic()
        ready = [self._connections[descriptor][0] for descriptor, _ in self._epoll.poll(0)]
        ended = {each: detail for each in ready if (detail := self._go_on(each)) is not None}
        for connection, until in self._opening.items():
            if until < now:
                ended.setdefault(connection, f"connecting took longer than {OPENING_S_MAX:g} s")
        if ended:
            self._end(ended)
        refused, self._refused = self._refused, []
        for wanted in refused:
            wanted.asked.missing -= 1
            for number in range(len(wanted.shares)):
                self._want(wanted.only(number))

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        """Return what has arrived."""
        assert isinstance(posted, _OldAsked)
        if posted.missing:
            return None
        if posted.failure is not None:
            raise posted.failure
        return posted.values or 0

    def reset(self) -> None:
        """Close every connection."""
        for peer_id in [*self._peers]:
            self.remove(peer_id, gone=False)

    def close(self) -> None:
        """Close every connection."""
        self.reset()
        self._epoll.close()

    def _want(self, wanted: _Wanted) -> None:
        """Request descriptors."""
        prepared_list = wanted.prepared_list
        leases = [share.lease for share in wanted.shares]
        starts, lengths = prepared_list.places.stretches(wanted.target)
        question = OldQuestion(
            frame=wire.encode_read(prepared_list.known.number, leases, wanted.source, wanted.numbers),
            answered=partial(self._on_epochs, wanted),
            prepared_list=prepared_list.known,
            leases=leases,
            nbytes=sum(lengths),
        )
        if prepared_list.device is None:
            question.target = [memory_at(at, nbytes).data for at, nbytes in zip(starts, lengths, strict=True)]
        else:
            assert self._device_memory is not None
            parts = list(zip(starts, lengths, strict=True))
            question.landing = landing(partial(self._device_memory.store, prepared_list.device), parts)
        wanted.asked.missing += 1
        self._ask(wanted.peer, [question])

    def _on_epochs(self, wanted: _Wanted, epochs: Sequence[int], failure: BackendError | None) -> None:
        """Record that descriptors of a chunk have arrived or failed."""
        asked = wanted.asked
        if failure is None:
            asked.missing -= 1
            for share, value in zip(wanted.shares, epochs, strict=True):
                self._told.note(share, value)
                if value != share.lease.epoch:
                    asked.unheld.add((share.lease.slot, share.lease.epoch))
        elif failure.reason.code != FailureCode.BOUNDS:
            asked.missing -= 1
            asked.failure = failure
        elif len(wanted.shares) > 1:
            self._refused.append(wanted)  # the next step requests each alone; until then one answer is missing
        else:
            asked.missing -= 1
            asked.refused[wanted.shares[0].read_id] = failure.reason

    def _on_value(self, asked: _OldAsked, at: int, epochs: Sequence[int], failure: BackendError | None) -> None:
        asked.missing -= 1
        asked.failure = asked.failure or failure
        asked.values[at] = epochs[0] if epochs else 0

    def _ask(self, peer: _OldDialedPeer, questions: Sequence[OldQuestion]) -> None:
        """Send requests over the connection that owes the fewest bytes, or over a new one if allowed."""
        try:
            connection = min(peer.connections, key=lambda each: each.owed_bytes, default=None) or self._open(peer)
            if connection.owed and len(peer.connections) < self._settings.connections:
                with suppress(ChannelClosed):  # then use this one
                    connection = self._open(peer)
        except ChannelClosed as error:
            for question in questions:
                question.answered((), BackendError(FailureCode.PEER_LOST, str(error)))
            return
        try:
            connection.ask(questions)
        except ChannelClosed as error:  # no answer has arrived
            self._end({connection: str(error)})
            self._ask(peer, questions)
        else:
            self._watch(connection)

    def _open(self, peer: _OldDialedPeer) -> OldSourceConnection:
        encrypted = self._settings.encryption == "tls"
        connection = OldSourceConnection(peer.place, peer.who, encrypted=encrypted)
        peer.connections.append(connection)
        self._connections[connection.descriptor] = (connection, peer)
        self._opening[connection] = time.monotonic() + OPENING_S_MAX
        self._interest[connection.descriptor] = connection.interest
        self._epoll.register(connection.descriptor, connection.interest)
        return connection

    def _go_on(self, connection: OldSourceConnection) -> str | None:
        """Advance a connection that is ready. Return why it has ended, if it has."""
        try:
            connection.on_ready()
        except ChannelClosed as error:
            return str(error)
        except BadFrame as error:
            return f"its TCP data plane breaks the protocol: {error}"
        if connection.open:
            self._opening.pop(connection, None)
        self._watch(connection)
        return None

    def _watch(self, connection: OldSourceConnection) -> None:
        interest = connection.interest
        if self._interest[connection.descriptor] != interest:
            self._interest[connection.descriptor] = interest
            self._epoll.modify(connection.descriptor, interest)

    def _end(self, ended: Mapping[OldSourceConnection, str], *, again: bool = True) -> None:
        """Close all of these connections. Then repeat their requests where that is safe, and fail the others."""
        repeated: list[tuple[_OldDialedPeer, OldQuestion]] = []
        for connection, detail in ended.items():
            _, peer = self._connections.pop(connection.descriptor)
            del self._interest[connection.descriptor]
            self._opening.pop(connection, None)
            self._epoll.unregister(connection.descriptor)
            peer.connections.remove(connection)
            # A peer that has accepted no connection is lost.
            safe = again and (connection.open or any(each.open for each in peer.connections))
            repeatable = connection.close()
            for question in connection.owed:
                if safe and question in repeatable:
                    question.repeated = True
                    repeated.append((peer, question))
                else:
                    question.answered((), BackendError(FailureCode.PEER_LOST, detail))
        for peer, question in repeated:
            self._ask(peer, [question])


def _parts(count: int, numbers: npt.NDArray[np.uint16] | None) -> list[slice]:
    """Divide descriptors into requests that are within the bounds of the protocol."""
    few = numbers is None or (count <= wire.DESCRIPTORS_MAX and len(np.unique(numbers)) <= wire.LEASES_MAX)
    most = wire.DESCRIPTORS_MAX if few else wire.LEASES_MAX
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _named(
    shares: Sequence[Share], numbers: npt.NDArray[np.uint16] | None
) -> tuple[Sequence[Share], npt.NDArray[np.uint16] | None]:
    """Return the shares of some descriptors, and the number of each descriptor's share."""
    if numbers is None:
        return shares, None
    found, renumbered = np.unique(numbers, return_inverse=True)
    return [shares[number] for number in found.tolist()], renumbered.astype(np.uint16) if len(found) > 1 else None
