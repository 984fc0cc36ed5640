"""Producers that this worker reads from: met once, kept connected, dropped when they fail.

Each peer has one task for its whole life. Meeting it is a single flight: whoever needs it awaits the same end.
A restarted producer is another peer, because its identity holds its incarnation.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import msgspec
from msgspec import Struct

from kvflow.cache.tickets import Member, Ticket
from kvflow.clock import Clock
from kvflow.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KvflowError,
    LayoutMismatch,
    PeerLost,
    TicketInvalid,
    TransferFailed,
    WorkerClosed,
)
from kvflow.ids import PeerId
from kvflow.layout.manifest import Manifest
from kvflow.observability.events import PeerConnected, PeerDropped
from kvflow.rendezvous.dialer import Link, Restarted, open_link
from kvflow.rendezvous.introduction import OurSide
from kvflow.transfer.plan import PlanCache
from kvflow.transport.base import UNFIT, Carrier, Transport
from kvflow.worker.calibration import NEVER, Staging
from kvflow.worker.dialling import DiallingRecord
from kvflow.worker.failures import meeting_error
from kvflow.worker.negotiation import OurPlanes, Unfit
from kvflow.worker.programs import Peer, ProgramTable, Route, RouteLeg
from kvflow.worker.redial import redial

logger = logging.getLogger("kvflow")

GOODBYE = "peer_closed"
"""Code of a peer that has left: a worker says goodbye once, at its end."""

DISTRUSTED = "key_removed"
"""Code of a peer whose key was taken off the list: it is not dialled again by itself."""

REDIALLING_MAX = 256
"""Peers that are dialled again in the background; when a whole cluster is lost, the rest is met when it is needed."""

ROUTES_MAX = 4096
"""Sets of ranks whose route is remembered. One that was forgotten is connected again, which costs no message."""

_RouteKey = tuple[object, ...]
_RANKS = attrgetter("ranks")

CLOSING = ("closing", "the worker is closing")
"""Code and detail of a peer that is let go because we leave."""


@dataclass(slots=True)
class _Entry:
    """The life of one peer.

    Attributes:
        member: who it is, and where.
        linked: resolves when its control connection is ready, or cannot be.
        met: resolves when it can be read from, or cannot.
        added: resolves when the transport has connected, with what carries the bytes.
        dropped: resolves with a code and a detail when it must be let go.
        gone: resolves when it has been let go, and can be met anew.
        begun_at: when it was begun to be dialled.
        linked_at: when its control connection was ready; None before.
        unasked: nobody has asked for it by a ticket; it was found where another peer had been.
    """

    member: Member
    linked: asyncio.Future[Link]
    met: asyncio.Future[Peer]
    added: asyncio.Future[Carrier]
    dropped: asyncio.Future[tuple[str, str]]
    gone: asyncio.Future[None]
    begun_at: float
    linked_at: float | None = None
    unasked: bool = False


class PeerPool:
    """Every producer that is met or being met.

    Attributes:
        drops: how many peers were let go since the start, by code.

    Thread: the event loop.
    """

    def __init__(
        self,
        *,
        ours: OurSide,
        manifest: Manifest,
        transport: Transport,
        tasks: asyncio.TaskGroup,
        clock: Clock,
        report: Callable[[Struct], None],
        on_dropped: Callable[[PeerId, str, str], None],
        plans: PlanCache,
        draw: Callable[[], float],
        tcp_encryption: str = "off",
        weights: Mapping[str, int] | None = None,
        staging: Staging = NEVER,
    ) -> None:
        self._ours = ours
        self._planes = OurPlanes(
            transport.published(), tcp_encryption, ours.network, ours.limits.handshake_s, weights or {}
        )
        self._transport = transport
        self._tasks = tasks
        self._clock = clock
        self._report = report
        self._on_dropped = on_dropped
        self._entries: dict[PeerId, _Entry] = {}
        self._lives: dict[PeerId, asyncio.Task[None]] = {}
        self._redials: dict[PeerId, asyncio.Task[None]] = {}
        self._draw = draw
        self._record = DiallingRecord(clock=clock, draw=draw, report=report)
        self._programs = ProgramTable(
            manifest=manifest, turn=ours.identity.rank, transport=transport, plans=plans, staging=staging
        )
        self._closed = False
        self._routes: dict[_RouteKey, Route] = {}
        self.drops: Counter[str] = Counter()

    async def meet(self, member: Member) -> Peer:
        """Return the peer that a ticket names, meeting it first if need be.

        Cancellation: safe; the meeting goes on for whoever else needs the peer.

        Raises:
            KvflowError: see ``open_link`` and ``Link.require_held``; ``LayoutMismatch`` if its cache cannot fill ours;
                ``PeerUnavailable`` or ``StaleLease`` at once if nothing can come of dialling it; ``TicketInvalid`` if
                it has no such slot.
        """
        entry = await self._entry(member)
        peer = await asyncio.shield(entry.met)
        if member.grant.slot >= peer.num_slots:  # a read that others share would fail with its look
            raise TicketInvalid(f"{member.peer} has no epoch slot {member.grant.slot}")
        await peer.link.require_held(member.grant, within_s=self._ours.limits.handshake_s)
        return peer

    async def reach(self, member: Member) -> Link:
        """Return the control connection of the peer that a ticket names, whether it can be read from or not.

        Cancellation: safe.

        Raises:
            KvflowError: see ``open_link``.
        """
        entry = await self._entry(member)
        return await asyncio.shield(entry.linked)

    def begin(self, member: Member) -> None:
        """Begin to meet the peer that a ticket names, unless it is met or being met already; wait for nothing.

        Raises:
            StaleLease, PeerUnavailable: nothing can come of dialling it now.
        """
        if member.peer not in self._entries and not self._closed:
            self._begin(member)

    async def _entry(self, member: Member) -> _Entry:
        """Return the life of a peer, begun now if need be; one that is being let go is waited for."""
        while (entry := self._entries.get(member.peer)) is not None and entry.dropped.done():
            await asyncio.shield(entry.gone)
        if self._closed:
            raise WorkerClosed("the worker is closing")
        return self._begin(member) if entry is None else entry

    def _begin(self, member: Member) -> _Entry:
        """Begin the life of a peer, unless nothing can come of it."""
        self._record.require(member)
        create = asyncio.get_running_loop().create_future
        entry = _Entry(
            member,
            linked=create(),
            met=create(),
            added=create(),
            dropped=create(),
            gone=create(),
            begun_at=self._clock(),
        )
        self._entries[member.peer] = entry
        life = self._tasks.create_task(self._live(member, entry), name=f"peer {member.peer}")
        self._lives[member.peer] = life
        life.add_done_callback(partial(self._end_unbegun, member.peer, entry))
        return entry

    def _end_unbegun(self, peer: PeerId, entry: _Entry, _life: asyncio.Task[None]) -> None:
        """End a life that was cancelled before its first step: its own end has not been run."""
        if not entry.gone.done():
            self._forget(peer, entry, *CLOSING)

    def route(self, ticket: Ticket) -> Route | None:
        """Return how the ranks of a ticket are read, if all of them are connected; ``connect`` it otherwise."""
        grants = ticket.grants
        return self._routes.get((grants[0].engine_id, *map(_RANKS, grants)))

    async def connect(self, ticket: Ticket, blame: Callable[[Member], object]) -> Route:
        """Meet every rank that a ticket names, divide our cache among them, and prepare to read what they give.

        Cancellation: safe; meetings go on for other pulls that need the peers.

        Args:
            ticket: verified.
            blame: takes the rank that is about to be met, or that could not be met.

        Raises:
            KvflowError: as ``meet``.
            PeerLost: one of the ranks was dropped while others were being met.
            LayoutMismatch: together they cannot fill our cache.
            CapacityExceeded: a plan would be too large, or a rank is read with too many different sets of others.
        """
        # However they were joined: ranks in another order are the same ranks, divided and prepared once.
        owners = (at for at, grant in enumerate(ticket.grants) for _ in grant.ranks)
        found = sorted(zip(ticket.members(), owners, strict=True), key=lambda pair: pair[0].address.rank)
        members = [member for member, _ in found]
        if len(members) == 1:
            blame(members[0])
            peers = [await self.meet(members[0])]
        else:
            peers = list(await asyncio.gather(*(self._meet_or_blame(member, blame) for member in members)))
        for peer in peers:
            self._require_current(peer)
        legs = await self._programs.legs(tuple(peers))
        for peer in peers:
            self._require_current(peer)
        transport = "+".join(dict.fromkeys(peer.carrier.name for peer in peers))
        plane = "+".join(dict.fromkeys(peer.carrier.plane for peer in peers))
        ranks = tuple((peer, at) for peer, (_, at) in zip(peers, found, strict=True))
        route = Route(ranks, tuple(RouteLeg(*ranks[leg.member], leg.programs) for leg in legs), transport, plane)
        if len(self._routes) >= ROUTES_MAX:
            del self._routes[next(iter(self._routes))]
        self._routes[_route_key(ticket)] = route
        return route

    async def _meet_or_blame(self, member: Member, blame: Callable[[Member], object]) -> Peer:
        try:
            return await self.meet(member)
        except BaseException:
            blame(member)
            raise

    def _require_current(self, peer: Peer) -> None:
        """Refuse a peer whose life has ended: what is prepared for it now would be lost, or belong to its next life."""
        peer_id = peer.link.peer
        if self.link(peer_id) is not peer.link or self._entries[peer_id].dropped.done():
            raise PeerLost(f"{peer_id} was lost while others of its engine were met", peer=str(peer_id))

    def link(self, peer: PeerId) -> Link | None:
        """Return the control connection of a peer, if it is ready."""
        entry = self._entries.get(peer)
        if entry is None or not entry.linked.done() or entry.linked.exception() is not None:
            return None
        return entry.linked.result()

    def on_added(self, peer: PeerId, carrier: Carrier) -> None:
        """Note that the transport has connected."""
        entry = self._entries.get(peer)
        if entry is not None and not entry.added.done():
            entry.added.set_result(carrier)

    def on_failed(self, peer: PeerId, code: str, detail: str) -> None:
        """Note that the transport can no longer read from a peer, or never could."""
        entry = self._entries.get(peer)
        if code == UNFIT and entry is not None and not entry.added.done():
            entry.added.set_exception(Unfit(detail))
            entry.added.exception()  # retrieved: nobody may be waiting for it
        else:
            self.drop(peer, code, detail)

    def drop(self, peer: PeerId, code: str, detail: str) -> None:
        """Let a peer go; it is met anew when it is needed."""
        entry = self._entries.get(peer)
        if entry is None or entry.dropped.done():
            return
        entry.dropped.set_result((code, detail))
        self._forget_routes(peer)
        if not entry.added.done():
            entry.added.set_exception(meeting_error(str(peer), code, detail))
            entry.added.exception()  # retrieved: it may still be dialling, and then nobody awaits it

    def _forget_routes(self, peer: PeerId) -> None:
        self._routes = {
            key: route for key, route in self._routes.items() if all(each.link.peer != peer for each, _ in route.ranks)
        }

    def drop_distrusted(self) -> None:
        """Let every peer go whose key is not allowed any more, after the list of allowed keys was replaced."""
        for peer in list(self._entries):
            if not self._ours.trusts(peer):
                self.drop(peer, DISTRUSTED, "its public key is not among our allowed keys any more")

    def close(self) -> None:
        """Let every peer go and meet no one any more; a peer that is still being met is not waited for."""
        self._closed = True
        for task in self._redials.values():
            task.cancel()
        for peer, entry in list(self._entries.items()):
            self.drop(peer, *CLOSING)
            if not entry.met.done():
                _fail(entry, meeting_error(str(peer), *CLOSING))
                self._lives[peer].cancel()

    async def _live(self, member: Member, entry: _Entry) -> None:
        started = self._clock()
        code, detail = "peer_lost", ""
        try:
            ended = partial(self.drop, member.peer)
            async with open_link(member.peer, ours=self._ours, on_ended=ended) as link:
                entry.linked.set_result(link)
                entry.linked_at = self._clock()
                self._drop_predecessors(link.peer, entry.begun_at)
                try:
                    peer = await self._connect(link, entry)
                    entry.met.set_result(peer)
                    self._report(_connected(peer, self._clock() - started))
                except (LayoutMismatch, CapacityExceeded) as error:
                    # It cannot be read from in this life, but what it offers can be given back.
                    _fail(entry, error)
                self._record.on_answered(link.peer.endpoint)
                code, detail = await entry.dropped
        except asyncio.CancelledError:
            code, detail = CLOSING
            raise
        except KvflowError as error:
            code, detail = error.code, error.message
            self._note_failure(entry, error)
            _fail(entry, error)
        except Exception as error:  # a defect of ours ends this peer, and not the worker with all the others
            logger.exception("meeting %s failed", member.peer)
            code, detail = TransferFailed.code, repr(error)
            self._note_failure(entry, error)
            _fail(entry, TransferFailed(f"meeting {member.peer} failed: {error!r}", peer=str(member.peer)))
        finally:
            self._forget(member.peer, entry, code, detail)

    async def _connect(self, link: Link, entry: _Entry) -> Peer:
        """Plan, connect the transport, and prepare descriptor lists."""
        theirs = link.advertisement
        address = await self._planes.address(link)
        await self._programs.require_readable(theirs.manifest)
        self._transport.add_peer(address)
        budget_s = self._ours.limits.handshake_s
        try:
            async with asyncio.timeout(budget_s):
                carrier = await asyncio.shield(entry.added)
        except Unfit as unfit:
            self._planes.refuse(theirs, str(unfit))
        except TimeoutError:
            # Reads of an earlier connection to it are still in flight, or the transport is busy for too long.
            message = f"connecting the transport to {link.peer} took longer than {budget_s} s"
            raise DeadlineExceeded(message, phase="handshake", peer=str(link.peer)) from None
        self._programs.begin(link.peer)
        return Peer(link, carrier)

    def _note_failure(self, entry: _Entry, error: Exception) -> None:
        """Learn from a meeting that has failed."""
        if entry.met.done():
            return
        self._record.on_failed(entry.member, error)
        # Only one step: an address that answers with another name each time is not followed for ever.
        if isinstance(error, Restarted) and not entry.unasked and not self._closed:
            address = msgspec.structs.replace(entry.member.address, incarnation=error.incarnation)
            successor = msgspec.structs.replace(entry.member, address=address)
            # The tickets that come next are its own: its first pull shall not pay for the meeting.
            if successor.peer not in self._entries:
                with suppress(KvflowError):
                    self._begin(successor).unasked = True

    def _drop_predecessors(self, successor: PeerId, begun_at: float) -> None:
        """Let go of whoever lived at this address before; its end may not have been noticed yet.

        Whoever was connected before we began to dial lived before. Of two that were dialled side by side nobody knows:
        the last words of the one that died may come after the first of its successor. A peer of the same name is no
        predecessor: it is the same worker, which one ticket names with its key and another one without.
        """
        for peer, entry in list(self._entries.items()):
            before = entry.linked_at is not None and entry.linked_at <= begun_at
            if before and peer.endpoint == successor.endpoint and str(peer) != str(successor):
                self._record.on_elsewhere(entry.member, f"{successor} answers at its address")
                self.drop(peer, PeerLost.code, f"{successor} answers at its address")

    def _redial_later(self, member: Member) -> None:
        peer = member.peer
        if not self._closed and peer not in self._redials and len(self._redials) < REDIALLING_MAX:
            task = self._tasks.create_task(redial(self.meet, member, self._draw), name=f"redial {peer}")
            self._redials[peer] = task
            task.add_done_callback(lambda _: self._redials.pop(peer, None))

    def _forget(self, peer: PeerId, entry: _Entry, code: str, detail: str) -> None:
        del self._entries[peer], self._lives[peer]
        self._forget_routes(peer)
        if code == GOODBYE:
            self._record.on_goodbye(entry.member)
        gone = self._record.is_gone(entry.member)
        self._transport.remove_peer(peer, gone=gone)
        was_read = self._programs.forget(peer)
        _fail(entry, PeerLost(f"meeting {peer} was cut short", peer=str(peer)))
        entry.gone.set_result(None)
        if code not in (GOODBYE, DISTRUSTED, CLOSING[0]) and was_read:
            self._redial_later(entry.member)  # it was in use, and whoever used it goes on
        self.drops[code] += 1
        self._report(PeerDropped(str(peer), code, detail))
        self._on_dropped(peer, code, detail)


def _connected(peer: Peer, handshake_s: float) -> PeerConnected:
    link, carrier = peer.link, peer.carrier
    offset = link.clock_offset
    ahead_s, error_s = (None, None) if offset is None else (offset.ahead_s, offset.error_s)
    peer_id = link.peer
    return PeerConnected(
        str(peer_id),
        peer_id.endpoint,
        handshake_s,
        ahead_s,
        error_s,
        transport=carrier.name,
        transport_known_by=carrier.known_by,
        plane=carrier.plane,
    )


def _fail(entry: _Entry, error: KvflowError) -> None:
    """Tell whoever waits for the peer, or for its connection alone, that it is not to be had."""
    for future in (entry.linked, entry.met):
        if not future.done():
            future.set_exception(error)
            future.exception()  # retrieved: whoever waited may have been cancelled meanwhile


def _route_key(ticket: Ticket) -> _RouteKey:
    """Return what two tickets of the same ranks have in common."""
    return (ticket.engine_id, *map(_RANKS, ticket.grants))
