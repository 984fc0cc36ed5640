"""What each peer gives, and the prepared lists that read it: planned, bound and prepared once for each share.

Planning for the largest manifest takes a good part of a second. So a thread plans and binds, one plan at a time. What
is prepared already is found without leaving the event loop.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, ParamSpec, TypeVar

from kvflow.errors import (
    BlockIdsInvalid,
    CapacityExceeded,
    ContentMismatch,
    DeadlineExceeded,
    PeerLost,
    TicketInvalid,
)
from kvflow.ids import Ids, Newest, PeerId
from kvflow.layout.manifest import Manifest
from kvflow.leases.blocks import block_ends, check_block_ids
from kvflow.leases.tickets import Grant
from kvflow.planning.assignment import assign_sources
from kvflow.planning.bind import AnyBinding, bind_plan
from kvflow.planning.match import (
    ComponentName,
    HeadRange,
    HeadRanges,
    have_common_layer,
    omitted_layers,
    require_same_model,
)
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import TransferPlan
from kvflow.reads.contract import UNKNOWN_CARRIER, Carrier, Part, PreparedList
from kvflow.rendezvous.dialer import Link
from kvflow.worker.environment import Shared

DIVISIONS_MAX = 4096  # sets of ranks whose division is remembered

SHARES_MAX = 64
"""Different shares of our cache that are prepared for one peer. A ticket normally names all ranks, so one or two do."""


@dataclass(slots=True, eq=False)
class Source:
    """A producer rank that can be read from; ``num_slots`` of its epoch table.

    ``issued_ms``: when the newest ticket was signed that was read from it.
    """

    link: Link
    carrier: Carrier = UNKNOWN_CARRIER
    manifest: Manifest = field(init=False)
    num_slots: int = field(init=False)
    issued_ms: int = 0

    def __post_init__(self) -> None:
        self.manifest = self.link.advertisement.manifest
        self.num_slots = self.link.advertisement.num_slots


P = ParamSpec("P")
R = TypeVar("R")

PLANNING_S_MAX = 30.0
"""How long a peer waits for its plans, which are made one after the other: as long as a pull waits in the queue."""

PreparedGroups = tuple[tuple[int, AnyBinding], ...]  # id of the prepared list and binding of each group of a plan

Taken = tuple[tuple[ComponentName, HeadRange], ...]  # the pieces of our cache that one peer gives, in order


class TicketRank(NamedTuple):
    """A rank of a ticket that is read from, the number of its grant, and the prepared lists that read it."""

    peer: Source
    grant: int
    groups: PreparedGroups


class Route(NamedTuple):
    """How the ranks of one ticket are read: all of them are linked, and every list is prepared."""

    ranks: tuple[tuple[PeerId, int], ...]  # every rank that the ticket names, ascending, with the number of its grant
    sources: tuple[TicketRank, ...]  # the ranks that are read from
    transport: str  # what carries the bytes
    plane: str


class RankShare(NamedTuple):
    """The share of our cache that one peer gives. ``taken``: None for everything that both sides hold."""

    member: int
    taken: Taken | None
    bindings: tuple[AnyBinding, ...]


class PreparedTable:
    """The prepared lists of every connected peer. Thread: the event loop."""

    def __init__(self, shared: Shared) -> None:
        self._manifest = shared.manifest
        # Our rank chooses among peers that hold the same heads, so that all replicas are used.
        self._rotation = shared.local.identity.rank
        self._transport = shared.transport
        self._report = shared.report
        self._plans = shared.environment.make_plans()
        self._staging_bytes = shared.staging_bytes
        self._divisions = Newest[tuple[PeerId, ...], tuple[RankShare, ...]](DIVISIONS_MAX)
        self._prepared: dict[PeerId, dict[Taken | None, PreparedGroups]] = {}
        self._dividing = asyncio.Lock()
        self._thread_free = asyncio.Lock()
        self._last_id = 0

    async def require_readable(self, theirs: Manifest) -> None:
        """Refuse a cache that cannot fill ours, before any read.

        Raises:
            LayoutMismatch: it belongs to another model, or is divided in a way that cannot be read.
            CapacityExceeded, DeadlineExceeded: of ``shares``.
        """
        require_same_model(theirs, self._manifest)
        if have_common_layer(theirs, self._manifest):
            # A peer of another pipeline stage may have nothing for us.
            await self._in_time(self._in_thread(self._plan, theirs, None))

    def begin(self, peer: PeerId) -> None:
        """Accept lists of a peer whose cache can fill ours, until ``forget``."""
        self._prepared[peer] = {}

    async def shares(self, links: tuple[Link, ...]) -> tuple[RankShare, ...]:
        """Divide our cache among the ranks of one ticket, ascending, and bind the plans of those that are needed.

        Cancellation: safe. If that is done already, the call does not yield to the event loop.

        Raises:
            LayoutMismatch: the ranks together cannot fill our cache.
            CapacityExceeded: a plan would be too large.
            DeadlineExceeded: planning for other peers took too long.
            PeerLost: a rank was dropped meanwhile.
            TicketInvalid: the ranks are not those of one engine.
        """
        key = tuple(link.peer for link in links)
        if key not in self._divisions:
            before = [self._prepared[peer] for peer in key]
            manifests = [link.advertisement.manifest for link in links]
            shares = await self._in_time(self._divide(key, manifests, before))
            for peer, prepared in zip(key, before, strict=True):
                if self._prepared.get(peer) is not prepared:
                    raise PeerLost(f"{peer} was lost while its plan was made", peer=str(peer))
            if key not in self._divisions:
                self._divisions[key] = shares
                for event in omitted_layers(key[0].engine_id, manifests, self._manifest):
                    self._report(event)
        return self._divisions[key]

    async def _in_time(self, work: Coroutine[None, None, R]) -> R:
        """Await work that waits behind the work of other peers, for ``PLANNING_S_MAX`` at most."""
        try:
            async with asyncio.timeout(PLANNING_S_MAX):
                return await work
        except TimeoutError:
            message = f"planning to read from a peer took longer than {PLANNING_S_MAX} s, behind plans for other peers"
            raise DeadlineExceeded(message, phase="handshake") from None

    async def _divide(
        self,
        key: tuple[PeerId, ...],
        manifests: Sequence[Manifest],
        prepared: Sequence[dict[Taken | None, PreparedGroups]],
    ) -> tuple[RankShare, ...]:
        async with self._dividing:
            if key in self._divisions:
                return self._divisions[key]
            known = [frozenset(each) for each in prepared]
            return await self._in_thread(self._bind_shares, key, manifests, known)

    def _bind_shares(
        self, key: Sequence[PeerId], manifests: Sequence[Manifest], known: Sequence[frozenset[Taken | None]]
    ) -> tuple[RankShare, ...]:
        """Divide, plan and bind. Thread: any, one at a time."""
        _require_one_engine(key, manifests)
        shares = []
        for share in assign_sources(self._manifest, manifests, rotation=self._rotation):
            taken = None if share.head_ranges is None else tuple(sorted(share.head_ranges.items()))
            bindings: tuple[AnyBinding, ...] = ()
            # A peer with too many shares is refused: do not plan for it.
            if taken not in known[share.source] and len(known[share.source]) < SHARES_MAX:
                theirs = manifests[share.source]
                bindings = bind_plan(self._plan(theirs, share.head_ranges), theirs, self._manifest)
            shares.append(RankShare(share.source, taken, bindings))
        return tuple(shares)

    async def _in_thread(self, function: Callable[P, R], *arguments: P.args, **_: P.kwargs) -> R:
        """Run slow work in a thread, one call at a time; finish it even if the caller is cancelled."""
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

    def forget(self, peer: PeerId) -> None:
        """Forget the lists of a dropped peer."""
        self._prepared.pop(peer, None)
        for key in [key for key in self._divisions if peer in key]:
            del self._divisions[key]

    def _plan(self, theirs: Manifest, pieces: HeadRanges | None) -> TransferPlan:
        return self._plans.plan(theirs, self._manifest, pieces, staging_bytes=self._staging_bytes)

    def lists(self, peer: PeerId, share: RankShare) -> PreparedGroups:
        """Return the lists that read a share; prepare them unless the peer gives the same share with other ranks.

        Raises:
            CapacityExceeded: the peer is read with too many different sets of others.
        """
        prepared = self._prepared[peer]
        if share.taken not in prepared:
            if len(prepared) >= SHARES_MAX:
                remedy = "Join the offers of the same ranks into each ticket: of all ranks of the engine."
                raise CapacityExceeded(f"different shares that are read from {peer}", SHARES_MAX, remedy=remedy)
            prepared[share.taken] = tuple(self._prepare(peer, binding) for binding in share.bindings)
        return prepared[share.taken]

    def _prepare(self, peer: PeerId, binding: AnyBinding) -> tuple[int, AnyBinding]:
        self._last_id += 1
        self._transport.prepare(
            PreparedList(
                list_id=self._last_id,
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


def _require_one_engine(ranks: Sequence[PeerId], manifests: Sequence[Manifest]) -> None:
    """Check that an engine has all these ranks, and that two of them have equal layers, or none in common."""
    stages: dict[str, tuple[PeerId, frozenset[str]]] = {}
    for rank, manifest in zip(ranks, manifests, strict=True):
        if manifest.identity.num_ranks <= ranks[-1].rank:
            raise TicketInvalid(f"the ticket names {ranks[-1]}, but {rank} has {manifest.identity.num_ranks} ranks")
        own = rank, frozenset(manifest.layers)
        for other, layers in {stages.setdefault(name, own) for name in own[1]}:
            if layers != own[1]:
                raise TicketInvalid(f"{rank} has some layers of {other}, but not all: they are of no pipeline stage")


def parts_of(grant: Grant, peer: Source, groups: PreparedGroups, targets: Sequence[Ids]) -> tuple[Part, ...]:
    """Pair our checked blocks of each group with those of a ticket. Return the groups that are read.

    Raises:
        TicketInvalid: the ticket's lists do not fit the producer's own cache.
        BlockRangeMismatch: our blocks hold tokens that the ticket does not cover.
    """
    theirs = peer.manifest
    try:
        sources = check_block_ids(
            grant.block_ids, num_blocks=theirs.num_blocks, aliases=theirs.aliases, unique=False, decoded=True
        )
    except BlockIdsInvalid as error:
        raise TicketInvalid(f"the ticket of {peer.link.peer} does not fit its cache: {error.message}") from error
    parts = []
    for list_id, binding in groups:
        group = binding.group
        pairs = pair_units(
            group,
            sources[group.source_group],
            targets[group.target_group],
            num_tokens=grant.num_tokens[group.source_group],
        )
        if len(pairs.source):
            parts.append(Part(list_id, pairs, binding))
    return tuple(parts)


def require_content(grant: Grant, groups: PreparedGroups, ours: Manifest, expected: Sequence[Sequence[bytes]]) -> None:
    """Compare the digests of a ticket's blocks with the expected ones, group by group.

    Raises:
        ContentMismatch: a group differs; names it.
    """
    if grant.contents is None:
        raise ContentMismatch("the ticket does not say what its blocks hold")
    for _, binding in groups:
        source, target = binding.group.source_group, binding.group.target_group
        wanted = expected[target]
        if not any(wanted):
            continue
        content, num_tokens = grant.contents[source], grant.num_tokens[source]
        given = dict(zip(content.ends(num_tokens), content.digests, strict=True))
        ends = block_ends(len(wanted), ours.groups[target].tokens_per_id, num_tokens)
        compared = [(given[end], digest) for end, digest in zip(ends, wanted, strict=True) if digest and given.get(end)]
        if not compared or any(found != digest for found, digest in compared):
            raise ContentMismatch(f"group {target}: the ticket's blocks hold other contents", group=target)
