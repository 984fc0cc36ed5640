"""What each peer gives us, and the prepared lists that read it: planned, bound and prepared once for each part.

A manifest is a peer's, and planning for the largest takes a good part of a second. So it is planned and bound in a
thread, one plan at a time; what is prepared already is found without leaving the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from kvflow.cache.tickets import Ticket
from kvflow.errors import CapacityExceeded, DeadlineExceeded, PeerLost
from kvflow.ids import PeerId
from kvflow.layout.manifest import Manifest
from kvflow.rendezvous.dialer import Link
from kvflow.transfer.bind_plan import AnyBinding, bind_plan
from kvflow.transfer.cover import share_out
from kvflow.transfer.match import Piece, PieceName, Pieces, have_common_layer, require_same_model
from kvflow.transfer.plan import PlanCache, TransferPlan
from kvflow.transport.base import UNKNOWN_CARRIER, Carrier, Program, Transport
from kvflow.worker.calibration import NEVER, Staging

DIVISIONS_MAX = 4096
"""Sets of ranks that are remembered with what each rank gives. One that was forgotten is divided again, with the
programs that are there already."""

PROGRAMS_MAX = 64
"""Different parts of our cache that one peer is prepared to give: one for each set of ranks that it is read with, at
most. A ticket names all ranks of its engine, so that one or two are enough; who joins any sets at all is stopped."""


@dataclass(slots=True, eq=False)
class Peer:
    """A producer rank that can be read from.

    Attributes:
        link: its control connection.
        carrier: what carries the bytes that we read from it.
        manifest: of its cache.
        num_slots: slots of its epoch table.
    """

    link: Link
    carrier: Carrier = UNKNOWN_CARRIER
    manifest: Manifest = field(init=False)
    num_slots: int = field(init=False)

    def __post_init__(self) -> None:
        self.manifest = self.link.advertisement.manifest
        self.num_slots = self.link.advertisement.epochs.nbytes // 8


P = ParamSpec("P")
R = TypeVar("R")

PLANNING_S_MAX = 30.0
"""How long a peer, or a set of ranks, waits for its plans: as long as a pull waits in the queue. Plans are made one
after the other, the largest legal one in about a second, and one geometry is planned once."""

Programs = tuple[tuple[int, AnyBinding], ...]
"""Program id and binding for each group of a plan."""

Taken = tuple[tuple[PieceName, Piece], ...]
"""The pieces of our cache that one peer gives, in their order."""


class Leg(NamedTuple):
    """What one peer gives, and the prepared lists that read it."""

    member: int
    programs: Programs


class RouteLeg(NamedTuple):
    """What one rank of a ticket gives.

    Attributes:
        peer: the rank.
        grant: which grant of the ticket is its own.
        programs: the prepared lists that read it.
    """

    peer: Peer
    grant: int
    programs: Programs


class Route(NamedTuple):
    """How the ranks of one ticket are read: all of them are connected, and all that is read from them is prepared.

    Attributes:
        ranks: every rank that the ticket names, ascending, and which grant of the ticket is its own.
        legs: of those that are needed.
        transport: what carries the bytes.
        plane: the data planes that it belongs to.
    """

    ranks: tuple[tuple[Peer, int], ...]
    legs: tuple[RouteLeg, ...]
    transport: str
    plane: str

    def may_be_over(self, ticket: Ticket) -> bool:
        """Tell whether a producer is to be asked first whether a lease is still held, as its time seems to be up."""
        for peer, at in self.ranks:  # noqa: SIM110 - a generator takes twice as long
            if peer.link.may_be_over(ticket.grants[at]):
                return True
        return False


class _Part(NamedTuple):
    """What one peer gives, before it is prepared.

    Attributes:
        member: number of the peer.
        taken: its pieces; None: all that both sides hold.
        bindings: of its groups; empty if they are prepared already.
    """

    member: int
    taken: Taken | None
    bindings: tuple[AnyBinding, ...]


class ProgramTable:
    """Every program of the peers that are met.

    Args:
        manifest: of our cache.
        turn: which of several peers that hold the same gives it: our ranks take turns, so that replicas on the other
            side are all of use.
        transport: where programs are prepared.
        plans: shared by all peers of one layout.
        staging: on which terms units are staged.

    Thread: the event loop.
    """

    def __init__(
        self, *, manifest: Manifest, turn: int, transport: Transport, plans: PlanCache, staging: Staging = NEVER
    ) -> None:
        self._manifest = manifest
        self._turn = turn
        self._transport = transport
        self._plans = plans
        self._staging = staging
        self._divisions: dict[tuple[PeerId, ...], tuple[Leg, ...]] = {}
        self._prepared: dict[PeerId, dict[Taken | None, Programs]] = {}
        self._dividing = asyncio.Lock()
        self._thread_free = asyncio.Lock()
        self._last_id = 0

    async def require_readable(self, theirs: Manifest) -> None:
        """Refuse a cache that cannot fill ours, before anything is read of it.

        Raises:
            LayoutMismatch: it is that of another model, or cut in a way that cannot be read.
            CapacityExceeded: the plan would be too large.
            DeadlineExceeded: plans for other peers went first for too long.
        """
        require_same_model(theirs, self._manifest)
        if have_common_layer(theirs, self._manifest):
            # Another pipeline stage may have nothing for us.
            # Its plane is not known yet. If it is one without a calibration, the plan that counts is made later.
            await self._in_time(self._in_thread(self._plan, theirs, None, self._staging))

    def begin(self, peer: PeerId) -> None:
        """Take programs of a peer that can be read from, until it is forgotten."""
        self._prepared[peer] = {}

    async def legs(self, peers: tuple[Peer, ...]) -> tuple[Leg, ...]:
        """Divide our cache among the ranks of one ticket, and prepare to read from those that are needed.

        Cancellation: safe. Where all is prepared it does not give way to anybody.

        Args:
            peers: the ranks, begun and ascending: each order is a division of its own.

        Raises:
            LayoutMismatch: together they cannot fill our cache.
            CapacityExceeded: a plan would be too large, or a rank is read with too many different sets of others.
            DeadlineExceeded: plans for other peers went first for too long.
            PeerLost: a rank was let go meanwhile.
        """
        key = tuple(peer.link.peer for peer in peers)
        if key not in self._divisions:
            lives = [self._prepared[peer] for peer in key]
            parts = await self._in_time(self._divide(key, peers, lives))
            for peer, life in zip(key, lives, strict=True):
                if self._prepared.get(peer) is not life:
                    raise PeerLost(f"{peer} was lost while its plan was made", peer=str(peer))
            if key not in self._divisions:
                self._keep(key, tuple(Leg(part.member, self._programs(key[part.member], part)) for part in parts))
        return self._divisions[key]

    async def _in_time(self, work: Coroutine[None, None, R]) -> R:
        """Await work that stands in line behind that of other peers, of which each may be as much as is legal.

        Raises:
            DeadlineExceeded: its turn did not come in time.
        """
        try:
            async with asyncio.timeout(PLANNING_S_MAX):
                return await work
        except TimeoutError:
            message = f"planning to read from a peer took longer than {PLANNING_S_MAX} s, behind plans for others"
            raise DeadlineExceeded(message, phase="handshake") from None

    async def _divide(
        self, key: tuple[PeerId, ...], peers: tuple[Peer, ...], lives: Sequence[dict[Taken | None, Programs]]
    ) -> list[_Part]:
        async with self._dividing:
            if key in self._divisions:
                return []
            known = [frozenset(life) for life in lives]
            terms = [self._staging.over(peer.carrier.plane) for peer in peers]
            return await self._in_thread(self._parts, [peer.manifest for peer in peers], known, terms)

    def _parts(
        self, manifests: Sequence[Manifest], known: Sequence[frozenset[Taken | None]], terms: Sequence[Staging]
    ) -> list[_Part]:
        """Divide, plan and bind. Thread: any, one at a time."""
        parts = []
        for share in share_out(self._manifest, manifests, turn=self._turn):
            taken = None if share.pieces is None else tuple(sorted(share.pieces.items()))
            bindings: tuple[AnyBinding, ...] = ()
            # A peer with too many programs is refused: do not plan for it.
            if taken not in known[share.source] and len(known[share.source]) < PROGRAMS_MAX:
                theirs = manifests[share.source]
                bindings = bind_plan(self._plan(theirs, share.pieces, terms[share.source]), theirs, self._manifest)
            parts.append(_Part(share.source, taken, bindings))
        return parts

    async def _in_thread(self, function: Callable[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Run slow work in a thread, one piece at a time; finish it even if its caller is cancelled."""
        await self._thread_free.acquire()
        try:
            work = asyncio.get_running_loop().run_in_executor(None, function, *arguments)
        except BaseException:  # the interpreter is ending, and starts no thread
            self._thread_free.release()
            raise
        work.add_done_callback(self._on_thread_done)
        return await asyncio.shield(work)

    def _on_thread_done(self, work: asyncio.Future[R]) -> None:
        self._thread_free.release()
        if not work.cancelled():
            work.exception()  # retrieved: the caller may have been cancelled

    def _keep(self, key: tuple[PeerId, ...], legs: tuple[Leg, ...]) -> None:
        if len(self._divisions) >= DIVISIONS_MAX:
            del self._divisions[next(iter(self._divisions))]
        self._divisions[key] = legs

    def forget(self, peer: PeerId) -> bool:
        """Forget what a peer gives, as it was let go; tell whether anything was prepared."""
        prepared = self._prepared.pop(peer, {})
        self._divisions = {key: legs for key, legs in self._divisions.items() if peer not in key}
        return bool(prepared)

    def _plan(self, theirs: Manifest, pieces: Pieces | None, terms: Staging) -> TransferPlan:
        return self._plans.plan(theirs, self._manifest, pieces, costs=terms.calibration, staging_bytes=terms.nbytes)

    def _programs(self, peer: PeerId, part: _Part) -> Programs:
        """Return what reads a part, prepared now or before: the same part may be given beside other ranks."""
        prepared = self._prepared[peer]
        if part.taken not in prepared:
            if len(prepared) >= PROGRAMS_MAX:
                remedy = "Join the offers of the same ranks into each ticket: of all ranks of the engine."
                raise CapacityExceeded(f"different parts that are read from {peer}", PROGRAMS_MAX, remedy=remedy)
            prepared[part.taken] = tuple(self._prepare(peer, binding) for binding in part.bindings)
        return prepared[part.taken]

    def _prepare(self, peer: PeerId, binding: AnyBinding) -> tuple[int, AnyBinding]:
        self._last_id += 1
        self._transport.prepare(
            Program(
                program_id=self._last_id,
                peer=peer,
                source_rows=binding.source.table,
                target_rows=binding.target.table,
                source_memory=binding.source.memory,
                target_memory=binding.target.memory,
                scatter=binding.scatter,
                group=binding.group.source_group,
                binding=binding,
            )
        )
        return self._last_id, binding
