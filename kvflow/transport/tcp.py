"""The TCP data plane as a mover: it asks peers for bytes, and receives them where they belong.

The owner thread does all of it, with sockets that never block. A peer has several connections, of which each answers
in order; a chunk goes to the one that owes least. What was asked over a connection that ends is asked once more over
another one, unless a byte of the answer has come.

The exporter tells at the end of each chunk what the epoch slots of its leases held after the chunk's bytes had been
read. So a fence needs no question of its own: each chunk of its reads has answered it.

Small reads that share a chunk are asked for together. If the exporter refuses the request because of one of them, each
is asked for alone, so that the refusal fails that one only.
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
from kvflow.transfer.requests import LeaseName
from kvflow.transport import tcp_wire as wire
from kvflow.transport.base import UNFIT, Carrier, PeerAddress
from kvflow.transport.bounds import Places
from kvflow.transport.device import landing
from kvflow.transport.envelope import Envelope, seal, unseal
from kvflow.transport.mover import Chunk, Flight, MoveFailed, Plane, Prepared, Reason, Share, share_numbers
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
"""Reads whose slot values are kept until their fence. Only those of reads that end without a fence stay longer."""


@dataclass(eq=False)
class _Asked(Flight):
    """A chunk or slots that a peer was asked for.

    Attributes:
        missing: answers that have not come.
        values: of the slots.
        failure: why it has failed.
        unheld: see ``Flight``.
        refused: see ``Flight``.
    """

    missing: int = 0
    values: list[int] = field(default_factory=list)
    failure: MoveFailed | None = None
    unheld: set[tuple[int, int]] = field(default_factory=set)
    refused: dict[int, Reason] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Program:
    """A prepared program."""

    known: Known
    places: Places
    device: int | None  # that the target lies on; None: in host memory


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer that we read from."""

    address: PeerAddress
    place: tuple[str, int]
    who: Credentials
    connections: list[Connection] = field(default_factory=list)
    programs: dict[int, _Program] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Wanted:
    """Descriptors that one request asks for.

    Attributes:
        asked: the chunk that they belong to.
        peer: that is asked.
        program: of the descriptors.
        shares: whose they are; a request names the lease of each.
        numbers: uint16, shape (n,): the share of each descriptor; None: there is one.
        source: int32, shape (n,).
        target: int32, shape (n,).
    """

    asked: _Asked
    peer: _Peer
    program: _Program
    shares: Sequence[Share]
    numbers: npt.NDArray[np.uint16] | None
    source: npt.NDArray[np.int32]
    target: npt.NDArray[np.int32]

    def only(self, number: int) -> "_Wanted":
        """Return the descriptors of one share."""
        of_share = self.numbers == number
        one = (self.shares[number],)
        return _Wanted(self.asked, self.peer, self.program, one, None, self.source[of_share], self.target[of_share])


class Told:
    """Values of epoch slots that came with the chunks of reads, so that a fence asks the exporter nothing."""

    def __init__(self) -> None:
        self._values: OrderedDict[int, int] = OrderedDict()

    def note(self, share: Share, value: int) -> None:
        """Note what a slot held when a chunk had been read; of several chunks of one read the worst counts."""
        epoch = share.lease.epoch
        before = self._values.get(share.read_id, epoch)
        worst = max(before, value)
        self._values[share.read_id] = worst if worst > epoch else min(before, value)
        if len(self._values) > READS_MAX:
            self._values.popitem(last=False)

    def verdicts(self, first: int, last: int, reads: Sequence[tuple[int, LeaseName]]) -> list[int]:
        """Return what was told of the slots from ``first`` to ``last`` for reads whose fence is due, and forget it.

        Slots only grow: of several reads of one slot the highest value is the latest. If a read was told another value,
        ``unheld`` of its chunk names its lease.

        Raises:
            MoveFailed: no chunk of one of these reads has ended.
        """
        values = [0] * (last - first + 1)
        for read_id, lease in reads:
            value = self._values.pop(read_id, None)
            if value is None:
                raise MoveFailed("bounds", f"no chunk of read {read_id} has told of the lease in slot {lease.slot}")
            values[lease.slot - first] = max(values[lease.slot - first], value)
        return values


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
        self._told = Told()
        self._refused: list[_Wanted] = []
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
        """See ``Mover.leave``: a socket that is closed writes nothing. After a reset the peer may not be known."""
        peer, detail = self._peers.get(peer_id), "the peer was removed"
        if peer is None:
            return
        self._end(dict.fromkeys(peer.connections, detail), again=False)
        for wanted in self._refused:
            if wanted.peer is peer:
                wanted.asked.missing -= 1
                wanted.asked.failure = MoveFailed("peer_lost", detail)
        self._refused = [wanted for wanted in self._refused if wanted.peer is not peer]

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """See ``Mover.remove``."""
        del gone  # a connection is made in no time, so none is kept
        self.leave(peer_id)
        self._peers.pop(peer_id, None)

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
        portion = chunk.portion
        peer = self._peers[portion.peer]
        program = peer.programs[portion.program_id]
        part = slice(chunk.first, chunk.stop)
        source, target, numbers = portion.source_index[part], portion.target_index[part], share_numbers(chunk)
        asked = _Asked()
        for part in _parts(len(source), numbers):
            shares, renumbered = _named(portion.shares, None if numbers is None else numbers[part])
            self._want(_Wanted(asked, peer, program, shares, renumbered, source[part], target[part]))
        return asked

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> Flight | Sequence[int]:
        """See ``Mover.post_check``. A fence asks nothing: its values came with the chunks of its reads."""
        if fence:
            return self._told.verdicts(first, last, reads)
        slots = sorted({lease.slot for _, lease in reads})
        asked = _Asked(missing=len(slots), values=[0] * (last - first + 1))
        questions = [Question(wire.encode_epoch(slot), partial(self._on_value, asked, slot - first)) for slot in slots]
        self._ask(self._peers[peer_id], questions)
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
        refused, self._refused = self._refused, []
        for wanted in refused:
            wanted.asked.missing -= 1
            for number in range(len(wanted.shares)):
                self._want(wanted.only(number))

    def poll(self, flight: Flight) -> int | Sequence[int] | None:
        """See ``Mover.poll``."""
        assert isinstance(flight, _Asked)
        if flight.missing:
            return None
        if flight.failure is not None:
            raise flight.failure
        return flight.values or 0

    def reset(self) -> None:
        """See ``Mover.reset``."""
        for peer_id in [*self._peers]:
            self.remove(peer_id, gone=False)

    def close(self) -> None:
        """See ``Mover.close``."""
        self.reset()
        self._epoll.close()
        self._exporter.close()

    def _want(self, wanted: _Wanted) -> None:
        """Ask for descriptors."""
        program = wanted.program
        leases = [share.lease for share in wanted.shares]
        starts, lengths = program.places.stretches(wanted.target)
        question = Question(
            frame=wire.encode_read(program.known.number, leases, wanted.source, wanted.numbers),
            answered=partial(self._on_epochs, wanted),
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
        wanted.asked.missing += 1
        self._ask(wanted.peer, [question])

    def _on_epochs(self, wanted: _Wanted, epochs: Sequence[int], failure: MoveFailed | None) -> None:
        """Note that descriptors of a chunk have arrived, or have failed."""
        asked = wanted.asked
        if failure is None:
            asked.missing -= 1
            for share, value in zip(wanted.shares, epochs, strict=True):
                self._told.note(share, value)
                if value != share.lease.epoch:
                    asked.unheld.add((share.lease.slot, share.lease.epoch))
        elif failure.reason.code != "bounds":
            asked.missing -= 1
            asked.failure = failure
        elif len(wanted.shares) > 1:
            self._refused.append(wanted)  # the next step asks for each alone; until then one answer is missing
        else:
            asked.missing -= 1
            asked.refused[wanted.shares[0].read_id] = failure.reason

    def _on_value(self, asked: _Asked, at: int, epochs: Sequence[int], failure: MoveFailed | None) -> None:
        asked.missing -= 1
        asked.failure = asked.failure or failure
        asked.values[at] = epochs[0] if epochs else 0

    def _ask(self, peer: _Peer, questions: Sequence[Question]) -> None:
        """Ask over the connection that owes least, or over another one while there may be more."""
        try:
            connection = min(peer.connections, key=lambda each: each.owed_bytes, default=None) or self._open(peer)
            if connection.owed and len(peer.connections) < self._settings.connections:
                with suppress(ChannelClosed):  # then over this one
                    connection = self._open(peer)
        except ChannelClosed as error:
            for question in questions:
                question.answered((), MoveFailed("peer_lost", str(error)))
            return
        try:
            connection.ask(questions)
        except ChannelClosed as error:  # no answer has come
            self._end({connection: str(error)})
            self._ask(peer, questions)
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
            # A peer that has accepted no connection is lost.
            safe = again and (connection.open or any(each.open for each in peer.connections))
            repeatable = connection.close()
            for question in connection.owed:
                if safe and question in repeatable:
                    question.repeated = True
                    repeated.append((peer, question))
                else:
                    question.answered((), MoveFailed("peer_lost", detail))
        for peer, question in repeated:
            self._ask(peer, [question])


def _parts(count: int, numbers: npt.NDArray[np.uint16] | None) -> list[slice]:
    """Divide descriptors into requests of which each is within the bounds of the protocol."""
    few = numbers is None or (count <= wire.DESCRIPTORS_MAX and len(np.unique(numbers)) <= wire.LEASES_MAX)
    most = wire.DESCRIPTORS_MAX if few else wire.LEASES_MAX
    return [slice(first, min(first + most, count)) for first in range(0, count, most)]


def _named(
    shares: Sequence[Share], numbers: npt.NDArray[np.uint16] | None
) -> tuple[Sequence[Share], npt.NDArray[np.uint16] | None]:
    """Return the shares that some descriptors have, and number the descriptors by these."""
    if numbers is None:
        return shares, None
    found, renumbered = np.unique(numbers, return_inverse=True)
    return [shares[number] for number in found.tolist()], renumbered.astype(np.uint16) if len(found) > 1 else None


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
