"""The TCP data plane as a backend: it requests bytes from peers, and receives them directly into the target.

Non-blocking sockets do all of this. A peer has several connections. Each answers in order, and a chunk goes to the
connection that owes the fewest bytes. If a connection ends, its requests are sent once more over another one, unless a
byte of the answer has arrived. To cancel a read is to close the connections that owe its bytes.

Each read of a chunk has a request of its own, so the exporter refuses each alone. At the end of each answer, the
exporter sends what the lease's epoch slot held after the bytes were read. So a fence needs no request.
"""

import select
import time
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from kvflow.addresses import place_of
from kvflow.config import TcpSettings
from kvflow.errors import FailureCode
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import (
    Backend,
    BackendError,
    Cause,
    CheckedList,
    Chunk,
    Envelope,
    PostedWork,
    Share,
    decode_envelope,
    encode_envelope,
    share_numbers,
)
from kvflow.reads.bounds import Places
from kvflow.reads.contract import Carrier, PeerAddress, Serving
from kvflow.reads.device import landing
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.reads.tcp.connection import MakeRequest, Question, SourceConnection, ToldEpochs
from kvflow.reads.tcp.exporter import TcpExporter
from kvflow.reads.tcp.opening import Opening, introduction
from kvflow.reads.tcp.runs import SourceList
from kvflow.reads.tcp.stream import ByteRows, ChannelClosed, rows_of

NAME = "tcp"

_CANCELLED = Cause(FailureCode.CANCELLED, "cancelled by the caller")


@dataclass(eq=False)
class _Asked(PostedWork):
    """A chunk or slots that were requested from a peer."""

    polled = False  # the epoll of the connections tells

    missing: int = 0
    values: list[int] = field(default_factory=list)
    failure: BackendError | None = None
    unheld: set[tuple[int, int]] = field(default_factory=set)
    refused: dict[int, Cause] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _PreparedList:
    """A prepared list."""

    request: MakeRequest
    places: Places
    device: int | None  # device of the target; None: host memory


@dataclass(slots=True, eq=False)
class _DialedPeer:
    """A peer that we read from."""

    address: PeerAddress
    place: tuple[str, int]
    layout: wire.Layout
    connections: list[SourceConnection] = field(default_factory=list)
    prepared_lists: dict[int, _PreparedList] = field(default_factory=dict)


class TcpBackend(Backend):
    """Move bytes over TCP.

    Args:
        agent_name: unique per incarnation.
        settings: settings of the plane.
        regions: the cache.
        epochs: our epoch table.
        serving: what readers may get.

    Raises:
        TransportUnavailable: the exporter cannot listen.
        ConfigInvalid: encryption is on, and ``cryptography`` is not installed.
    """

    def __init__(
        self, agent_name: str, settings: TcpSettings, regions: Sequence[Region], epochs: Region, serving: Serving
    ) -> None:
        self._settings = settings
        self._device_memory = serving.device_memory
        self._identity = draw_identity() if settings.encryption == "tls" else None
        self._peers: dict[PeerId, _DialedPeer] = {}
        self._connections: dict[int, tuple[SourceConnection, _DialedPeer]] = {}
        self._interest: dict[int, int] = {}
        self._opening: set[SourceConnection] = set()
        self._told = ToldEpochs()
        self._epoll = select.epoll()
        self._exporter = TcpExporter(settings, epochs, serving, self._identity)
        self.data_endpoint = self._exporter.endpoint
        self.certificate = b"" if self._identity is None else self._identity.certificate
        self.metadata = encode_envelope(Envelope(NAME, agent_name, wire.encode_layout(serving.tracks)))

    def fileno(self) -> int:
        """Return the epoll of all connections."""
        return self._epoll.fileno()

    def add(self, address: PeerAddress) -> Carrier:
        """Prepare to dial a peer's exporter; its first read connects."""
        try:
            envelope = decode_envelope(address.planes[NAME], transport=NAME, agent=address.agent)
            place = place_of(address.data_endpoint)
            layout = wire.decode_layout(envelope.blob)
        except (ValueError, msgspec.DecodeError) as error:
            raise BackendError(FailureCode.METADATA_INVALID, str(error)) from error
        if not address.credentials.pass_:
            raise BackendError(FailureCode.PLANE_UNFIT, "the producer has given us no pass for its TCP data plane")
        peer = _DialedPeer(address, place, layout)
        try:
            self._open(peer)
        except ChannelClosed as error:
            raise BackendError(FailureCode.PEER_LOST, str(error)) from error
        self._peers[address.peer] = peer
        return Carrier("tcp", "kind")

    def leave(self, peer_id: PeerId) -> None:
        """Close the connections: a closed socket writes nothing. After a reset the peer may be unknown."""
        peer = self._peers.get(peer_id)
        if peer is not None:
            removed = Cause(FailureCode.PEER_LOST, "the peer was removed")
            self._end(dict.fromkeys(peer.connections, removed), again=False)

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """Forget a peer."""
        del gone  # connecting is fast, so no connection is kept
        self.leave(peer_id)
        self._peers.pop(peer_id, None)

    def ends_at_once(self, peer: PeerId) -> bool:
        """Return True: a post sends a request only."""
        return True

    def prepare(self, prepared: CheckedList) -> None:
        """Find the rows of a list in the stretches of its peer."""
        prepared_list = prepared.prepared_list
        peer = self._peers[prepared_list.peer]
        device = None
        if prepared_list.target_memory == "VRAM":
            device = int(prepared.target.table[0, 2])
            if self._device_memory is None or (prepared.target.table[:, 2] != device).any():
                raise BackendError(FailureCode.BOUNDS, "the TCP data plane does not reach the memory of these devices")
        request = _requests_of(prepared, peer.layout)
        peer.prepared_lists[prepared_list.list_id] = _PreparedList(request, Places(prepared.target), device)

    def post(self, chunk: Chunk) -> PostedWork | int:
        """Request a chunk."""
        portion = chunk.portion
        peer = self._peers[portion.peer]
        prepared_list = peer.prepared_lists[portion.list_id]
        part = slice(chunk.first, chunk.stop)
        source, target, numbers = portion.source_index[part], portion.target_index[part], share_numbers(chunk)
        asked, questions = _Asked(), []
        for number, share in enumerate(portion.shares):
            mine = slice(None) if numbers is None else np.flatnonzero(numbers == number)
            here, there = source[mine], target[mine]
            for first in range(0, len(here), wire.RUNS_MAX):
                some = slice(first, first + wire.RUNS_MAX)
                questions.append(self._question(asked, prepared_list, share, here[some], there[some]))
        asked.missing = len(questions)
        self._ask(peer, questions)
        return asked

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Request slots. A fence sends nothing, because its values came with the chunks of its reads."""
        if fence:
            return self._told.verdicts(first, last, reads)
        peer, slots = self._peers[peer_id], sorted({lease.slot for _, lease in reads})
        asked = _Asked(missing=len(slots), values=[0] * (last - first + 1))
        answers = {slot: partial(self._on_value, asked, slot - first) for slot in slots}
        self._ask(peer, [Question(wire.encode_epoch(slot), answered) for slot, answered in answers.items()])
        return asked

    def progress(self) -> None:
        """Advance the connections that are ready."""
        now = time.monotonic()
        found = [self._connections.get(descriptor) for descriptor, _ in self._epoll.poll(0)]
        ready = [each[0] for each in found if each is not None]
        ready += [each for each in self._opening if each.due <= now and each not in ready]
        ended = {each: cause for each in ready if (cause := self._go_on(each)) is not None}
        if ended:
            self._end(ended)

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        """Return what has arrived."""
        assert isinstance(posted, _Asked)
        if posted.missing:
            return None
        if posted.failure is not None:
            raise posted.failure
        return posted.values or 0

    def cancel(self, read_ids: Collection[int]) -> None:
        """Close the connections that owe bytes of these reads, and request the other reads' again."""
        unwanted = frozenset(read_ids)
        found = [each for each, _ in self._connections.values() if any(owed.read_id in unwanted for owed in each.owed)]
        self._end(dict.fromkeys(found, _CANCELLED), unwanted=unwanted)

    def reset(self) -> None:
        """Close every connection."""
        for peer_id in [*self._peers]:
            self.remove(peer_id, gone=False)

    def close(self) -> None:
        """Close every connection, then the exporter."""
        self.reset()
        self._epoll.close()
        self._exporter.close()

    def _question(
        self,
        asked: _Asked,
        prepared_list: _PreparedList,
        share: Share,
        source: npt.NDArray[np.int32],
        target: npt.NDArray[np.int32],
    ) -> Question:
        """Return the request for descriptors of one read."""
        before, frame = prepared_list.request(share.lease, source)
        table = prepared_list.places.table(target)
        return Question(
            frame=frame,
            answered=partial(self._on_epoch, asked, share),
            epoch=share.lease.epoch,
            before=before,
            targets=partial(self._targets, prepared_list.device, table),
            nbytes=int(table[:, 1].sum()),
            read_id=share.read_id,
        )

    def _targets(self, device: int | None, table: npt.NDArray[np.int64]) -> Iterator[ByteRows]:
        """Return what an answer fills."""
        if device is None:
            return iter((ByteRows(table.copy()),))
        assert self._device_memory is not None
        parts: list[tuple[int, int]] = [(address, nbytes) for address, nbytes in table.tolist()]
        return map(rows_of, landing(partial(self._device_memory.store, device), parts))

    def _on_epoch(self, asked: _Asked, share: Share, value: int, failure: BackendError | None) -> None:
        """Record that bytes of a read have arrived or failed."""
        asked.missing -= 1
        if failure is None:
            self._told.note(share, value)
            if value != share.lease.epoch:
                asked.unheld.add((share.lease.slot, share.lease.epoch))
        elif failure.reason.code in (FailureCode.BOUNDS, FailureCode.CANCELLED):
            asked.refused[share.read_id] = failure.reason
        else:
            asked.failure = failure

    def _on_value(self, asked: _Asked, at: int, value: int, failure: BackendError | None) -> None:
        asked.missing -= 1
        asked.failure = asked.failure or failure
        asked.values[at] = value

    def _ask(self, peer: _DialedPeer, questions: Sequence[Question]) -> None:
        """Send requests over the connection that owes the fewest bytes, or over a new one if allowed."""
        try:
            connection = min(peer.connections, key=lambda each: each.owed_bytes, default=None) or self._open(peer)
            if connection.owed and len(peer.connections) < self._settings.connections:
                with suppress(ChannelClosed):  # then use this one
                    connection = self._open(peer)
        except ChannelClosed as error:
            for question in questions:
                question.answered(0, BackendError(FailureCode.PEER_LOST, str(error)))
            return
        try:
            connection.ask(questions)
        except ChannelClosed as error:  # no answer has arrived
            self._end({connection: Cause(FailureCode.PEER_LOST, str(error))})
            self._ask(peer, questions)
        else:
            self._watch(connection, peer)

    def _open(self, peer: _DialedPeer) -> SourceConnection:
        until = time.monotonic() + self._settings.handshake_s
        introduce = introduction(peer.address.credentials, self._identity)
        connection = SourceConnection(Opening(peer.place, introduce, until))
        peer.connections.append(connection)
        self._opening.add(connection)
        self._watch(connection, peer)
        return connection

    def _go_on(self, connection: SourceConnection) -> Cause | None:
        """Advance a connection that is ready. Return why it has ended, if it has."""
        descriptor = connection.descriptor
        _, peer = self._connections[descriptor]
        try:
            connection.on_ready()
        except ChannelClosed as error:
            return Cause(FailureCode.DEADLINE_EXCEEDED if connection.late else FailureCode.PEER_LOST, str(error))
        except wire.BadFrame as error:
            return Cause(FailureCode.PROTOCOL_VIOLATION, f"its TCP data plane breaks the protocol: {error}")
        finally:
            if connection.descriptor != descriptor:  # it has opened
                self._unwatch(descriptor)
                self._opening.discard(connection)
                self._watch(connection, peer)
        self._watch(connection, peer)
        return None

    def _watch(self, connection: SourceConnection, peer: _DialedPeer) -> None:
        descriptor, interest = connection.descriptor, connection.interest
        if descriptor not in self._connections:
            self._connections[descriptor] = connection, peer
            self._epoll.register(descriptor, interest)
        elif self._interest[descriptor] != interest:
            self._epoll.modify(descriptor, interest)
        self._interest[descriptor] = interest

    def _unwatch(self, descriptor: int) -> None:
        del self._connections[descriptor], self._interest[descriptor]
        with suppress(OSError):  # closing it was enough
            self._epoll.unregister(descriptor)

    def _end(
        self,
        ended: Mapping[SourceConnection, Cause],
        *,
        again: bool = True,
        unwanted: Collection[int] = frozenset(),
    ) -> None:
        """Close all of these connections. Then repeat their requests where that is safe, and fail the others.

        ``unwanted``: reads that are cancelled. What else their connections owe is requested again.
        """
        repeated: list[tuple[_DialedPeer, Question]] = []
        for connection, cause in ended.items():
            _, peer = self._connections[connection.descriptor]
            self._unwatch(connection.descriptor)
            self._opening.discard(connection)
            peer.connections.remove(connection)
            # A peer that has accepted no connection is lost.
            safe = again and (connection.open or any(each.open for each in peer.connections))
            repeatable = connection.close()
            for question in connection.owed:
                if question.read_id not in unwanted and (unwanted or (safe and question in repeatable)):
                    question.repeated = question.repeated or not unwanted
                    repeated.append((peer, question))
                else:
                    question.answered(0, BackendError(cause.code, cause.detail))
        for peer, question in repeated:
            self._ask(peer, [question])


def _requests_of(prepared: CheckedList, layout: wire.Layout) -> MakeRequest:
    """Return what makes the requests for descriptors of a list. Raises ``OutOfBounds``: its rows are not published."""
    prepared_list, group = prepared.prepared_list, prepared.prepared_list.group
    published = layout.groups[group] if group < len(layout.groups) else ()
    source = SourceList(prepared.source, published, layout.num_blocks, prepared_list.source_memory)
    return partial(_request, group, source)


def _request(
    group: int, source: SourceList, lease: LeaseName, index: npt.NDArray[np.int32]
) -> tuple[tuple[Hashable, bytes], bytes]:
    slot, epoch = lease.slot, lease.epoch
    shown = (slot, epoch), wire.encode_lease(slot, epoch, lease.mac)
    return shown, wire.encode_read(group, slot, epoch, source.runs(index))
