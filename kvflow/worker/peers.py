"""Producers that this worker reads from: connected once, kept connected, dropped when they fail.

One task runs each connection, and every caller that needs the peer waits for the same task. A restarted producer is
another peer, because its identity contains its incarnation.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import TypeVar

from handshake.rates import pause_s
from kvflow.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    FailureCode,
    KvflowError,
    LayoutMismatch,
    PeerLost,
    PeerRefused,
    TicketInvalid,
    TransferFailed,
    WorkerClosed,
    quoted,
)
from kvflow.events import PeerConnected, PeerDropped
from kvflow.ids import Newest, PeerId
from kvflow.leases.tickets import LeaseName, Member, Ticket
from kvflow.planning.match import count_unread_layers
from kvflow.reads.contract import Carrier, RateLearned
from kvflow.reads.reach import REACH_IT, judge_rate
from kvflow.rendezvous.dialer import FULL, Link, open_link
from kvflow.rendezvous.questions import COUNT_MAX, Settled
from kvflow.worker.connections import (
    Connection,
    PeerState,
    PlaneNegotiation,
    PlaneUnusable,
    Reachability,
    connection_error,
)
from kvflow.worker.environment import Shared
from kvflow.worker.prepared import PreparedTable, Route, Source, TicketRank

logger = logging.getLogger("kvflow")

ROUTES_MAX = 4096  # sets of ranks whose route is remembered. Connecting a forgotten one again sends no message.

ASKING_MAX = 256  # open questions about early leases, of one peer

FULL_S = 0.5  # longest pause before a full peer, where a dial waits for a place, is dialed again

T = TypeVar("T")

_RouteKey = tuple[object, ...]
_RANKS = attrgetter("ranks")

CLOSING = (FailureCode.CLOSING, "the worker is closing")


class PeerPool:
    """The connections to every producer that this worker reads from. ``drops`` counts those that were dropped, by code.

    Thread: the event loop.
    """

    def __init__(
        self, shared: Shared, tasks: asyncio.TaskGroup, on_dropped: Callable[[PeerId, str, str], None]
    ) -> None:
        self._manifest = shared.manifest
        self._tasks = tasks
        self._local = shared.local
        self._transport = shared.transport
        self._clock = shared.environment.clock
        self._report = shared.report
        self._on_dropped = on_dropped
        self._connections: dict[PeerId, Connection] = {}
        tuning = shared.config.tuning
        self._planes = PlaneNegotiation(
            shared.transport.published(),
            tuning.tcp_encryption,
            tuning.require_encryption,
            shared.local.network,
            shared.local.limits.handshake_s,
            tuning.peer_weights,
        )
        self._reachability = Reachability(clock=self._clock, draw=shared.environment.network.draw, report=shared.report)
        self._prepared = PreparedTable(shared)
        self._queue_s, self._draw = tuning.queue_s, shared.environment.network.draw
        self._closed = False
        self._routes = Newest[_RouteKey, Route](ROUTES_MAX)
        self.drops: Counter[str] = Counter()

    async def connect(self, member: Member) -> Link:
        """Return the control connection of a peer that a ticket names, whose cache can fill ours; dial it if necessary.

        Cancellation: safe; connecting goes on for other callers.

        Raises:
            KvflowError: of ``open_link``; ``LayoutMismatch`` if its cache cannot fill ours; ``PeerUnavailable`` or
                ``StaleLease`` at once if dialing it is useless; ``TicketInvalid`` if the peer has no such slot.
        """
        link = await (await self._connection(member)).require_readable()
        if member.grant.slot >= link.advertisement.num_slots:  # the first check of a read that others share would fail
            raise TicketInvalid(f"{member.peer} has no epoch slot {member.grant.slot}")
        return link

    async def connect_link(self, member: Member) -> Link:
        """Return the control connection of a peer, also if it cannot be read from. Cancellation: safe."""
        return await (await self._connection(member)).require_link()

    async def settled(self, peer: PeerId, leases: Sequence[LeaseName], wait_s: float) -> Sequence[Settled]:
        """Ask a peer which of these leases are admitted or have ended; empty if it does not answer. Cancellation: safe.

        The answer waits for one of them, at most ``wait_s``.
        """
        connection = self._connections.get(peer)
        if connection is None or connection.link is None or connection.num_asking >= ASKING_MAX:
            return ()
        known = [COUNT_MAX] * len(connection.link.advertisement.manifest.groups)  # the answer lists no block
        within_s = self._local.limits.handshake_s
        connection.num_asking += 1
        try:
            return await connection.link.settled(leases, known=known, above=0, wait_s=wait_s, within_s=within_s)
        except KvflowError:  # it is lost, or refuses the question
            return ()
        finally:
            connection.num_asking -= 1

    def start_connecting(self, member: Member) -> None:
        """Start to connect a trusted peer that has no connection. Raises as ``connect`` if it is useless."""
        if member.peer not in self._connections and not self._closed and self._local.trusts(member.peer):
            self._start(member)

    async def _connection(self, member: Member) -> Connection:
        """Return the connection of a peer; start one if there is none, or once a dropped one has ended."""
        while (found := self._connections.get(member.peer)) is not None and found.state == "dropped":
            await found.change()
        if self._closed:
            raise WorkerClosed("the worker is closing")
        if found is None:
            return self._start(member)
        self._reachability.saw(member.peer, member.grant.issued_ms)
        return found

    def _start(self, member: Member) -> Connection:
        """Start to connect a peer, unless dialing it is useless."""
        self._reachability.require(member)
        connection = self._connections[member.peer] = Connection(member, self._clock())
        connection.task = self._tasks.create_task(self._run(connection), name=f"peer {member.peer}")
        connection.task.add_done_callback(partial(self._end_unstarted, connection))
        return connection

    def _end_unstarted(self, connection: Connection, _task: asyncio.Task[None]) -> None:
        """End a connection whose task was cancelled before its first step: its ``finally`` has not run."""
        if connection.state != "closed":
            self._forget(connection, *CLOSING)

    def route(self, ticket: Ticket) -> Route | None:
        """Return how the ranks of a ticket are read; None if ``connect_ticket`` must connect them first."""
        grants = ticket.grants
        return self._routes.get((grants[0].engine_id, *map(_RANKS, grants)))

    async def connect_ticket(self, ticket: Ticket, blame: Callable[[Member], object]) -> Route:
        """Link every rank that a ticket names, divide our cache among them, and connect those that are read.

        ``blame`` is called with the only rank before it is connected, or with each rank that could not be connected.

        Cancellation: safe; connecting goes on for other pulls that need the peers.

        Raises:
            KvflowError: of ``connect``, or of a rank that our transport cannot read from.
            PeerLost: one of the ranks was dropped while others were being connected.
            LayoutMismatch: the ranks together cannot fill our cache.
            CapacityExceeded: a plan would be too large, or a rank is read with too many different sets of others.
        """
        # The order of the ranks in a ticket does not matter: the same ranks are divided and prepared once.
        owners = (at for at, grant in enumerate(ticket.grants) for _ in grant.ranks)
        found = sorted(zip(ticket.members(), owners, strict=True), key=lambda pair: pair[0].address.rank)
        members = [member for member, _ in found]
        if len(members) == 1:
            blame(members[0])
        until = self._clock() + self._queue_s
        linking = (_or_blame(self._connect_until(each, until), each, blame) for each in members)
        links = await asyncio.gather(*linking)
        self._require_current(links)
        shares = await self._prepared.shares(tuple(links))
        self._require_current(links)
        read = [members[share.member] for share in shares]
        attaching = (_or_blame(self._connections[each.peer].require_peer(), each, blame) for each in read)
        peers = await asyncio.gather(*attaching)
        self._require_current(links)
        for link in links:
            self._reachability.on_answered(link.peer.endpoint)
        ranks = tuple((member.peer, at) for member, at in found)
        sources = tuple(
            TicketRank(peer, ranks[share.member][1], self._prepared.lists(peer.link.peer, share))
            for peer, share in zip(peers, shares, strict=True)
        )
        transport = "+".join(dict.fromkeys(peer.carrier.name for peer in peers))
        plane = "+".join(dict.fromkeys(peer.carrier.plane for peer in peers))
        route = Route(ranks, sources, transport, plane)
        self._routes[_route_key(ticket)] = route
        return route

    async def _connect_until(self, member: Member, until: float) -> Link:
        """Connect a rank as ``connect`` does; dial one that is full again until then, as others may leave it."""
        while True:
            try:
                return await self.connect(member)
            except PeerRefused as refused:
                rest_s = pause_s(0, FULL_S, FULL_S, self._draw())
                if refused.refusal != FULL or self._clock() + rest_s >= until:
                    raise
            await asyncio.sleep(rest_s)

    def _require_current(self, links: Sequence[Link]) -> None:
        """Refuse peers whose connections have ended: lists that are prepared for them now would be lost or stale."""
        for link in links:
            peer_id = link.peer
            if self.link(peer_id) is not link or self._connections[peer_id].state == "dropped":
                message = f"{peer_id} was lost while other ranks of its engine were being connected"
                raise PeerLost(message, peer=str(peer_id))

    def listed(self, limit: int) -> tuple[PeerState, ...]:
        """Return the producers that are connected or are being connected, at most ``limit``."""
        return tuple(
            PeerState(
                name=str(peer),
                state=each.state,
                software="" if each.link is None else each.link.identity.software,
                transport="" if each.carrier is None else each.carrier.name,
            )
            for peer, each in islice(self._connections.items(), limit)
        )

    def link(self, peer: PeerId) -> Link | None:
        """Return the control connection of a peer; None if it is not ready."""
        connection = self._connections.get(peer)
        return None if connection is None else connection.link

    def on_added(self, peer: PeerId, carrier: Carrier) -> None:
        """Note that the transport has connected to a peer."""
        connection = self._connections.get(peer)
        if connection is not None and connection.state == "linked":
            connection.carrier = carrier
            connection.advance("attached")

    def on_measured(self, rate: RateLearned) -> None:
        """Report the rate at which the transport reads from a peer."""
        connection = self._connections.get(rate.peer)
        if connection is not None and connection.carrier is not None:
            for event in judge_rate(rate, connection.carrier):
                self._report(event)

    def on_failed(self, peer: PeerId, code: str, detail: str) -> None:
        """Note that the transport can no longer read from a peer, or never could."""
        connection = self._connections.get(peer)
        waiting = connection is not None and connection.state in {"dialing", "linked"} and not connection.unusable
        if code == FailureCode.PLANE_UNFIT and connection is not None and waiting:
            connection.unusable = detail
            connection.wake()
        else:
            self.drop(peer, code, self.located(peer, code, detail))

    def located(self, peer: PeerId, code: str, detail: str) -> str:
        """Return why a peer was lost, with the address of its data plane if that is TCP."""
        connection = self._connections.get(peer)
        return detail if connection is None else connection.located(code, detail)

    def drop(self, peer: PeerId, code: str, detail: str) -> None:
        """End the connection to a peer; the next pull that needs the peer connects it again."""
        connection = self._connections.get(peer)
        if connection is not None and connection.drop is None:
            connection.drop = (code, detail)
            connection.advance("dropped")
            self._forget_routes(peer)

    def _forget_routes(self, peer: PeerId) -> None:
        for key in [key for key, route in self._routes.items() if any(each == peer for each, _ in route.ranks)]:
            del self._routes[key]

    def drop_distrusted(self) -> None:
        """Drop every peer whose key is no longer allowed, after the list of allowed keys was replaced."""
        for peer in list(self._connections):
            if not self._local.trusts(peer):
                self.drop(peer, FailureCode.KEY_REMOVED, "its public key is no longer among our allowed keys")

    def close(self) -> None:
        """Drop every peer and connect no other; do not wait for a peer that is being connected."""
        self._closed = True
        for peer, connection in list(self._connections.items()):
            self.drop(peer, *CLOSING)
            if connection.is_connecting:
                connection.fail(connection_error(str(peer), *CLOSING))
                assert connection.task is not None
                connection.task.cancel()

    async def _run(self, connection: Connection) -> None:
        """Link a peer, connect our transport once the peer is to be read, and end the connection when it is dropped."""
        peer_id = connection.member.peer
        code: str = PeerLost.code
        detail = ""
        try:
            if rest_s := self._reachability.redial_in_s(peer_id.endpoint):
                await asyncio.sleep(rest_s)
            started = self._clock()
            ended, first = partial(self.drop, peer_id), self._reachability.last_address(peer_id)
            async with open_link(peer_id, local=self._local, on_ended=ended, first=first) as link:
                connection.link, connection.linked_at = link, self._clock()
                connection.advance("linked")
                self._reachability.saw(peer_id, None, link.address)
                self._reachability.abandon(peer_id.endpoint)  # it may stay unread
                self._drop_predecessors(link, connection.begun_at)
                try:
                    await self._prepared.require_readable(link.advertisement.manifest)
                    self._prepared.begin(peer_id)
                    connection.readable = True
                    connection.wake()
                    idle_since = self._clock()
                    if await connection.settle():
                        started += self._clock() - idle_since
                        peer = connection.peer = await self._attach(link, connection)
                        connection.advance("connected")
                        self._report(self._connected(peer, self._clock() - started))
                except (LayoutMismatch, CapacityExceeded) as error:
                    connection.fail(error)  # its leases can be released nevertheless
                    connection.advance("unreadable")
                self._reachability.on_answered(link.peer.endpoint)
                code, detail = await connection.dropped()
        except asyncio.CancelledError:
            code, detail = CLOSING
            raise
        except KvflowError as error:
            code, detail = error.code, error.message
            self._note_failure(connection, error)
            connection.fail(error)
        except Exception as error:  # a defect in kvflow ends this peer only, and the worker goes on
            logger.exception("connecting %s failed", quoted(str(peer_id)))
            code, detail = TransferFailed.code, repr(error)
            self._note_failure(connection, error)
            connection.fail(TransferFailed(f"connecting {peer_id} failed: {error!r}", peer=str(peer_id)))
        finally:
            self._forget(connection, code, detail)

    async def _attach(self, link: Link, connection: Connection) -> Source:
        """Connect the transport."""
        address = await self._planes.address(link)
        connection.data_endpoint = address.data_endpoint
        self._transport.add_peer(address)
        budget_s = self._local.limits.handshake_s
        try:
            async with asyncio.timeout(budget_s):
                carrier = await connection.require_carrier()
        except PlaneUnusable as unusable:
            self._planes.refuse(link.advertisement, str(unusable))
        except TimeoutError:
            # Reads of an earlier connection to it are still in flight, or the transport is busy for too long.
            message = f"connecting the transport to {link.peer} took longer than {budget_s} s"
            raise DeadlineExceeded(message, phase="handshake", peer=str(link.peer)) from None
        return Source(link, carrier)

    def _note_failure(self, connection: Connection, error: Exception) -> None:
        if connection.is_connecting:
            self._reachability.on_failed(connection.member, error)

    def _drop_predecessors(self, successor: Link, begun_at: float) -> None:
        """Drop the incarnation that was connected at this address before; its end may not have been noticed yet.

        One that was connected before we began to dial is a predecessor. If two were dialed at the same time, their
        order is unknown: the last messages of the one that died may come after the first of its successor. A peer of
        the same name is the same worker, which one ticket names with its key and another one without. A name that has
        other addresses proves nothing, and at another address both may live.
        """
        rank = successor.peer.engine_id, successor.peer.rank
        for peer, connection in list(self._connections.items()):
            before = connection.linked_at is not None and connection.linked_at <= begun_at
            is_there = connection.link is not None and connection.link.address == successor.address
            is_another = (peer.engine_id, peer.rank) == rank and str(peer) != str(successor.peer)
            if before and is_there and is_another and successor.is_only:
                self._reachability.on_superseded(connection.member, f"{successor.peer} answers at its address")
                self.drop(peer, PeerLost.code, f"{successor.peer} answers at its address")

    def _forget(self, connection: Connection, code: str, detail: str) -> None:
        """Remove a connection that has ended, and report it."""
        member = connection.member
        peer = member.peer
        del self._connections[peer]
        self._forget_routes(peer)
        if connection.peer is not None:
            self._reachability.saw(peer, connection.peer.issued_ms)
        if code == PeerLost.code and connection.link is not None:
            self._reachability.on_lost(peer.endpoint)
        if code == FailureCode.PEER_CLOSED:
            self._reachability.on_goodbye(member)
        self._transport.remove_peer(peer, gone=self._reachability.is_closed(member))
        self._prepared.forget(peer)
        connection.fail(PeerLost(f"connecting {peer} was interrupted", peer=str(peer)))
        connection.advance("closed")
        self.drops[code] += 1
        self._report(PeerDropped(str(peer), code, detail))
        self._on_dropped(peer, code, detail)

    def _connected(self, peer: Source, handshake_s: float) -> PeerConnected:
        link, carrier = peer.link, peer.carrier
        offset = link.clock_offset
        peer_id, ours = link.peer, self._manifest
        on_devices = all(any(each.memory == "VRAM" for each in side.regions) for side in (ours, peer.manifest))
        return PeerConnected(
            str(peer_id),
            peer_id.endpoint,
            handshake_s,
            offset.ahead_s,
            offset.error_s,
            transport=carrier.name,
            transport_known_by=carrier.known_by,
            plane=carrier.plane,
            model=peer.manifest.identity.model if ours.identity.model else "",
            missing_layers=count_unread_layers(peer.manifest, ours),
            passed_over=carrier.passed_over,
            remedy=carrier.remedy or (REACH_IT if carrier.passed_over and on_devices else ""),
        )


async def _or_blame(work: Awaitable[T], member: Member, blame: Callable[[Member], object]) -> T:
    try:
        return await work
    except BaseException:
        blame(member)
        raise


def _route_key(ticket: Ticket) -> _RouteKey:
    """Return a key that is equal for all tickets of the same ranks."""
    return (ticket.engine_id, *map(_RANKS, ticket.grants))
