"""The TCP data plane as a mover: it asks peers for bytes, and receives them where they belong.

The owner thread does all of it, with sockets that never block. A peer has several connections, of which each answers
in order; a chunk goes to the one that owes least. What was asked over a connection that ends is asked once more over
another one, unless a byte of the answer has come.

The exporter tells at the end of each chunk what the epoch slots of its leases held after the chunk's bytes had been
read. So a fence needs no question of its own: each chunk of its reads has answered it.
"""

import select
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address

import numpy as np
import numpy.typing as npt

from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId
from kvflow.layout.region import Region
from kvflow.transfer.requests import LeaseShare
from kvflow.transport import tcp_wire as wire
from kvflow.transport.base import UNFIT, Carrier, Fence, PeerAddress
from kvflow.transport.bounds import Places
from kvflow.transport.device import landing
from kvflow.transport.envelope import Envelope, seal, unseal
from kvflow.transport.ledger import Chunk, lease_numbers
from kvflow.transport.mover import Flight, MoveFailed, Plane, Prepared
from kvflow.transport.serving import Serving
from kvflow.transport.tcp_answers import HostMemory
from kvflow.transport.tcp_channel import ChannelClosed
from kvflow.transport.tcp_connection import Connection, Known, Question
from kvflow.transport.tcp_exporter import TcpExporter

NAME = "tcp"

OPENING_S_MAX = 5.0
"""From the first packet to the proof of the exporter."""

PORT_MAX = (1 << 16) - 1

READS_MAX = 1 << 17
"""Reads of which it is remembered what their leases were: twice as many as a ledger remembers."""


@dataclass(eq=False)
class _Asked(Flight):
    """A chunk or a slot that a peer was asked for.

    Attributes:
        missing: answers that have not come.
        value: of the slot.
        failure: why it has failed.
        unheld: see ``Flight``.
    """

    missing: int = 0
    value: int = 0
    failure: MoveFailed | None = None
    unheld: set[tuple[int, int]] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Program:
    """A prepared program."""

    known: Known
    places: Places
    device: int | None  # that the target lies on; None: in host memory


@dataclass(slots=True, eq=False)
class _Peer:
    """Whom we read from."""

    address: PeerAddress
    place: tuple[str, int]
    who: Credentials
    connections: list[Connection] = field(default_factory=list)
    programs: dict[int, _Program] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Seen:
    """What the chunks of one read have told of its leases.

    Attributes:
        leases: that the read names, as slots and epochs.
        odd: what a slot held, if it was not the epoch of its lease.
    """

    leases: set[tuple[int, int]]
    odd: dict[tuple[int, int], int] = field(default_factory=dict)


class TcpMover(Plane):
    """Move bytes over TCP. See ``Mover`` for the contract.

    Args:
        agent_name: unique per incarnation.
        settings: of the plane.
        regions: the cache.
        epochs: our epoch table.
        serving: what readers may have.
        staging: memory that only we write to.

    Raises:
        TransportUnavailable: the exporter cannot listen.
    """

    def __init__(
        self,
        agent_name: str,
        settings: TcpSettings,
        regions: Sequence[Region],
        epochs: Region,
        serving: Serving,
        *,
        staging: Sequence[Region] = (),
    ) -> None:
        self._settings = settings
        self._memory = HostMemory([*regions, *staging])
        self._device_memory = serving.device_memory
        self._peers: dict[PeerId, _Peer] = {}
        self._connections: dict[int, tuple[Connection, _Peer]] = {}
        self._interest: dict[int, int] = {}
        self._opening: dict[Connection, float] = {}
        self._seen: OrderedDict[int, _Seen] = OrderedDict()
        self._exporter = TcpExporter(settings, regions, epochs, serving)
        self._epoll = select.epoll()
        self.data_endpoint = self._exporter.endpoint
        self.metadata = seal(Envelope(NAME, agent_name, b""))

    def fileno(self) -> int:
        """See ``Mover.fileno``."""
        return self._epoll.fileno()

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Mover.add``."""
        try:
            unseal(address.planes[NAME], transport=NAME, agent=address.agent)
            place = _place(address.data_endpoint)
        except ValueError as error:
            raise MoveFailed("metadata_invalid", str(error)) from error
        if not address.credentials.pass_:
            raise MoveFailed(UNFIT, "the producer has given us no pass for its TCP data plane")
        peer = _Peer(address, place, address.credentials)
        try:
            self._open(peer)
        except ChannelClosed as error:
            raise MoveFailed("peer_lost", str(error)) from error
        self._peers[address.peer] = peer
        return Carrier("tcp", "kind")

    def leave(self, peer_id: PeerId) -> None:
        """See ``Mover.leave``: a socket that is closed writes nothing."""
        self._end(dict.fromkeys(self._peers[peer_id].connections, "the peer was removed"), again=False)

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """See ``Mover.remove``."""
        del gone  # a connection is made in no time, so none is kept
        if peer_id in self._peers:
            self.leave(peer_id)
            del self._peers[peer_id]

    def prepare(self, prepared: Prepared) -> None:
        """See ``Mover.prepare``."""
        program = prepared.program
        rows = prepared.source.table
        device = None
        if program.target_memory == "VRAM":
            device = int(prepared.target.table[0, 2])
            if self._device_memory is None or (prepared.target.table[:, 2] != device).any():
                raise MoveFailed("bounds", "the TCP data plane does not reach the memory of these devices")
        if len(rows) > wire.ROWS_MAX:
            raise MoveFailed("bounds", f"a program of {len(rows)} rows: the TCP data plane takes {wire.ROWS_MAX}")
        frame = wire.encode_program(program.program_id, program.group, rows)
        known = Known(program.program_id, frame)
        self._peers[program.peer].programs[program.program_id] = _Program(known, Places(prepared.target), device)

    def post(self, chunk: Chunk) -> Flight | int:
        """See ``Mover.post``."""
        read, peer = chunk.read, self._peers[chunk.peer]
        if not read.leases:
            raise MoveFailed("bounds", "a read over TCP names its leases")
        self._remember(read.read_id, read.leases)
        program = peer.programs[read.program_id]
        source, target = (index[chunk.first : chunk.stop] for index in (read.source_index, read.target_index))
        lease_of = lease_numbers(chunk)
        asked = _Asked()
        for part in _parts(len(source), lease_of):
            leases, frame = _named(
                read.leases, None if lease_of is None else lease_of[part], program.known, source[part]
            )
            starts, lengths = program.places.stretches(target[part])
            question = Question(
                frame=frame,
                answered=partial(self._on_epochs, asked, read.read_id, leases),
                program=program.known,
                leases=leases,
                nbytes=sum(lengths),
            )
            if program.device is None:
                question.target = self._memory.stretches(starts, lengths)
            else:
                assert self._device_memory is not None
                parts = list(zip(starts, lengths, strict=True))
                question.landing = landing(partial(self._device_memory.store, program.device), parts)
            asked.missing += 1
            self._ask(peer, question)
        return asked

    def post_fence(self, peer_id: PeerId, fence: Fence, after: frozenset[int]) -> Flight | int:
        """See ``Mover.post_fence``."""
        if after:
            return self._verdict(fence, after)
        asked = _Asked(missing=1)
        self._ask(self._peers[peer_id], Question(wire.encode_epoch(fence.slot), partial(self._on_value, asked)))
        return asked

    def progress(self) -> None:
        """See ``Mover.progress``."""
        now = time.monotonic()
        ready = [self._connections[descriptor][0] for descriptor, _ in self._epoll.poll(0)]
        ended = {each: detail for each in ready if (detail := self._go_on(each)) is not None}
        for connection, until in self._opening.items():
            if until < now:
                ended.setdefault(connection, f"connecting took longer than {OPENING_S_MAX:g} s")
        if ended:
            self._end(ended)

    def poll(self, flight: Flight) -> int | None:
        """See ``Mover.poll``."""
        assert isinstance(flight, _Asked)
        if flight.missing:
            return None
        if flight.failure is not None:
            raise flight.failure
        return flight.value

    def renew(self) -> None:
        """See ``Mover.renew``."""
        for peer_id in [*self._peers]:
            self.remove(peer_id, gone=False)

    def close(self) -> None:
        """See ``Mover.close``."""
        self.renew()
        self._epoll.close()
        self._exporter.close()

    def _verdict(self, fence: Fence, after: frozenset[int]) -> int:
        """Return what the chunks of the fenced reads have told of the lease; the worst, if they differ."""
        odd = []
        lease = (fence.slot, fence.epoch)
        for read_id in after:
            seen = self._seen.get(read_id)
            if seen is None or lease not in seen.leases:
                raise MoveFailed("bounds", f"read {read_id} did not name the lease in slot {fence.slot}")
            if lease in seen.odd:
                odd.append(seen.odd[lease])
        return max([value for value in odd if value > fence.epoch], default=min(odd, default=fence.epoch))

    def _remember(self, read_id: int, leases: Sequence[LeaseShare]) -> None:
        """Note the leases of a chunk; each chunk of a staged read has its own."""
        seen = self._seen.get(read_id)
        if seen is None:
            seen = self._seen[read_id] = _Seen(set())
            if len(self._seen) > READS_MAX:
                self._seen.popitem(last=False)
        seen.leases.update((lease.slot, lease.epoch) for lease in leases)

    def _on_epochs(
        self,
        asked: _Asked,
        read_id: int,
        leases: Sequence[LeaseShare],
        epochs: Sequence[int],
        failure: MoveFailed | None,
    ) -> None:
        """Note that a part of a chunk has arrived, or has failed."""
        asked.missing -= 1
        asked.failure = asked.failure or failure
        seen = self._seen.get(read_id)
        for lease, value in zip(leases, epochs, strict=True) if failure is None else ():
            if value != lease.epoch:
                key = (lease.slot, lease.epoch)
                asked.unheld.add(key)
                if seen is not None:
                    seen.odd[key] = max(value, seen.odd.get(key, value))

    def _on_value(self, asked: _Asked, epochs: Sequence[int], failure: MoveFailed | None) -> None:
        asked.missing = 0
        asked.failure = failure
        asked.value = epochs[0] if epochs else 0

    def _ask(self, peer: _Peer, question: Question) -> None:
        """Ask over the connection that owes least, or over another one while there may be more."""
        try:
            connection = min(peer.connections, key=lambda each: each.owed_bytes, default=None) or self._open(peer)
            if connection.owed and len(peer.connections) < self._settings.connections:
                with suppress(ChannelClosed):  # then over this one
                    connection = self._open(peer)
        except ChannelClosed as error:
            question.answered((), MoveFailed("peer_lost", str(error)))
            return
        try:
            connection.ask(question)
        except ChannelClosed as error:  # nobody has seen the question
            self._end({connection: str(error)})
            self._ask(peer, question)
        else:
            self._watch(connection)

    def _open(self, peer: _Peer) -> Connection:
        encrypted = self._settings.encryption == "tls"
        connection = Connection(peer.place, peer.who, encrypted=encrypted)
        peer.connections.append(connection)
        self._connections[connection.descriptor] = (connection, peer)
        self._opening[connection] = time.monotonic() + OPENING_S_MAX
        self._interest[connection.descriptor] = connection.interest
        self._epoll.register(connection.descriptor, connection.interest)
        return connection

    def _go_on(self, connection: Connection) -> str | None:
        """Go on with a connection that is ready; return why it has ended, if it has."""
        try:
            connection.on_ready()
        except ChannelClosed as error:
            return str(error)
        except wire.BadFrame as error:
            return f"its TCP data plane breaks the protocol: {error}"
        if connection.open:
            self._opening.pop(connection, None)
        self._watch(connection)
        return None

    def _watch(self, connection: Connection) -> None:
        interest = connection.interest
        if self._interest[connection.descriptor] != interest:
            self._interest[connection.descriptor] = interest
            self._epoll.modify(connection.descriptor, interest)

    def _end(self, ended: Mapping[Connection, str], *, again: bool = True) -> None:
        """Close connections; ask again what they owe if that is safe, and let the rest fail.

        Args:
            ended: connection -> why it has ended. All are closed before anything is asked over another one.
            again: whether to ask again at all.
        """
        repeated: list[tuple[_Peer, Question]] = []
        for connection, detail in ended.items():
            _, peer = self._connections.pop(connection.descriptor)
            del self._interest[connection.descriptor]
            self._opening.pop(connection, None)
            self._epoll.unregister(connection.descriptor)
            peer.connections.remove(connection)
            # A peer that has let nobody in is lost.
            safe = again and (connection.open or any(each.open for each in peer.connections))
            repeatable = connection.close()
            for question in connection.owed:
                if safe and question in repeatable:
                    question.repeated = True
                    repeated.append((peer, question))
                else:
                    question.answered((), MoveFailed("peer_lost", detail))
        for peer, question in repeated:
            self._ask(peer, question)


def _parts(count: int, lease_of: npt.NDArray[np.uint16] | None) -> list[slice]:
    """Divide descriptors into requests of which each is within the bounds of the protocol."""
    most = wire.DESCRIPTORS_MAX if lease_of is None else wire.LEASES_MAX
    if lease_of is not None and count <= wire.DESCRIPTORS_MAX and len(np.unique(lease_of)) <= wire.LEASES_MAX:
        most = wire.DESCRIPTORS_MAX
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _named(
    leases: Sequence[LeaseShare],
    lease_of: npt.NDArray[np.uint16] | None,
    program: Known,
    index: npt.NDArray[np.int32],
) -> tuple[Sequence[LeaseShare], bytes]:
    """Return the leases of some descriptors, and the request for them."""
    if lease_of is None:
        return leases[:1], wire.encode_read(program.number, leases[:1], index, None)
    numbers, renumbered = np.unique(lease_of, return_inverse=True)
    named = [leases[number] for number in numbers.tolist()]
    return named, wire.encode_read(program.number, named, index, renumbered.astype(np.uint16))


def _place(endpoint: str) -> tuple[str, int]:
    """Return host and port of an endpoint whose name has been resolved."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        address, number = ip_address(host.removeprefix("[").removesuffix("]")), int(port)
    except ValueError:
        number = 0
    if not 1 <= number <= PORT_MAX:
        raise ValueError(f"the peer serves TCP at no address: {endpoint!r}")
    return str(address), number
