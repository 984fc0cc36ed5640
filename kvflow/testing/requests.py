"""The way of one simulated request: prefilled, offered, routed, pulled by the ranks of other engines, released.

A request ends when every rank that reads it knows how its pull ended, and every lease that was held for it has ended.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from kvflow.cache.leases import LeaseEnded
from kvflow.cache.tickets import MAC_BYTES, Grant, Ticket, join_tickets
from kvflow.errors import CapacityExceeded, WorkerClosed
from kvflow.rendezvous.mint import TicketMint
from kvflow.testing.engines import SECRET, Engine, Rank
from kvflow.testing.memory import Written
from kvflow.testing.readings import Reading
from kvflow.testing.tickets import damage, forge, grants_of
from kvflow.testing.world import World

SLACK_S = 1e-6


class Plan(Struct, frozen=True, kw_only=True):
    """What is going to be done with one request.

    Attributes:
        num_tokens: of the prompt.
        admit_s: mean delay of an admission.
        prefix_of: the request whose first blocks it shares, as far as they are still there; or None.
        readers: engines that read it.
        readings: pulls of each rank of a reader: more than one is a program that asks again.
        route_s: mean time on the way through the router.
        skipped: blocks at the beginning that the reader has already.
        priority: of the pulls.
        patience_s: how long its offers wait for a free slot; 0 for not at all.
        cancel_s: for each pull, when it is cancelled; None for never.
        revoke_s: when the lease is revoked; None for never.
        forged: whether the ticket is changed on its way.
        unread: whether the reader gives the ticket back unread.
        keep_s: mean time that a reader uses what it has read.
    """

    num_tokens: int
    admit_s: float
    prefix_of: "Request | None"
    readers: tuple[int, ...]
    readings: int
    route_s: float
    skipped: int
    priority: int
    patience_s: float
    cancel_s: float | None
    revoke_s: float | None
    forged: bool
    unread: bool
    keep_s: float


class Request:
    """One request, as its engines and the router know it.

    Attributes:
        name: its own.
        plan: what is going to be done.
        source: the engine that prefills it.
        outcomes: how each pull ended.
    """

    def __init__(self, world: World, name: str, plan: Plan, source: Engine, engines: Callable[[int], Engine]) -> None:
        self.name = name
        self.plan = plan
        self.source = source
        self.outcomes: list[str] = []
        self.written = Written(np.zeros(0, np.int64), 0)
        self.block_ids: list[list[int]] = []
        self._world = world
        self._engines = engines
        self._blocks: list[int] = []
        self._unsettled = 0  # ranks of the source that are still to offer it
        self._tickets: list[Ticket] = []
        self._open = 0  # pulls that have not ended
        self._routed = False
        self._revoked = False
        self._gave_back: dict[str, set[int]] = {}
        self._taken_back: list[Rank] = []  # whose lease ended before all ranks had offered

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be done, held or waited for."""
        held = self.source.alive and (self._unsettled or any(self.name in rank.held for rank in self.source.ranks))
        return not held and not self._open and (self._routed or not self.source.alive)

    def begin(self) -> None:
        """Prefill it: claim blocks, then write and offer it on every rank."""
        source, plan = self.source, self.plan
        if not source.open:
            self._refuse("source not open")
            return
        counts = [1 if group.kind == "mamba" else -(-plan.num_tokens // group.block_size) for group in source.groups]
        prefix = self._prefix()
        fresh = source.claim(sum(counts) - len(prefix))
        if fresh is None:
            self._refuse("no blocks")
            return
        source.claim_also(prefix)
        fresh = [*prefix, *fresh]
        self.block_ids = [[fresh.pop(0) for _ in range(number)] for number in counts]
        self._blocks = [block for ids in self.block_ids for block in ids]
        content = source.setting.content
        tokens = np.full(plan.num_tokens, content(), np.int64)
        if prefix and plan.prefix_of is not None:
            shared = len(prefix) * source.groups[0].block_size
            tokens[:shared] = plan.prefix_of.written.tokens[:shared]
        self.written = Written(tokens, content())
        for rank in source.ranks:
            for block in self._blocks:
                rank.uses[block] += 1
        self._unsettled = len(source.ranks)
        grant = self._mint() if source.minted else None
        if source.minted and grant is None:
            return
        for rank in source.ranks:
            self._on(rank, self._world.delay(plan.admit_s) if grant else 0.0, self._offer, rank, grant)
        if grant is not None:
            self._route()
        if plan.revoke_s is not None:
            for rank in source.ranks:
                self._on(rank, plan.revoke_s, self._revoke, rank)

    def wrong_end(self, rank: Rank, event: LeaseEnded, since: float) -> str:
        """Say what is wrong with the end of a lease, or nothing."""
        lasted = rank.process.time() - since
        lease_s = rank.engine.setting.settings.lease_s
        match event.outcome:
            case "expired" if lasted < lease_s - SLACK_S:
                return f"after {lasted:.6f} s of {lease_s:.6f}"
            case "released" if not any(self._released_by(name) for name in self._gave_back):
                return f"no reader has given it back on every rank: {self._gave_back}"
            # An offer that waited is taken back by the worker itself if its turn and the end of its time come together.
            case "revoked" if not self._revoked and rank.worker is not None and not self._unsettled:
                return "nobody has revoked it"
        return ""

    def on_lease_ended(self, rank: Rank) -> None:
        """Reuse the blocks of a lease that has ended: on its rank at once, and for all when it was the last."""
        rank.drop_use(self._blocks)
        if self._unsettled:
            self._taken_back.append(rank)
        self._settle()

    def _prefix(self) -> list[int]:
        """Return the blocks that it shares with an earlier request, if those are safe on every rank."""
        earlier = self.plan.prefix_of
        if earlier is None or earlier.source is not self.source or not earlier.block_ids:
            return []
        if not all(earlier.name in rank.held for rank in self.source.ranks):
            return []
        whole = min(earlier.plan.num_tokens, self.plan.num_tokens - 1) // self.source.groups[0].block_size
        return earlier.block_ids[0][:whole]

    def _mint(self) -> Grant | None:
        try:
            ticket, grant = self.source.mint(self._make_mint).offer(
                self.name, block_ids=self.block_ids, num_tokens=self.plan.num_tokens
            )
        except CapacityExceeded:
            self._withdraw("mint full")
            return None
        self._tickets = [ticket]
        return grant

    def _make_mint(self) -> TicketMint:
        return TicketMint(
            self.source.name,
            [rank.worker.rank_address for rank in self.source.ranks if rank.worker is not None],
            cluster_secret=SECRET,
            lease_s=self.source.setting.settings.lease_s,
            draw_bits=self._world.chance.getrandbits,
            wall_clock=self.source.ranks[0].process.wall,  # the engine's scheduler runs beside its first rank
        )

    def _on(self, rank: Rank, delay_s: float, call: Callable[..., object], *arguments: object) -> None:
        """Do something in the process of a rank, some time from now."""
        self._world.after(delay_s, rank.process.call_soon, call, *arguments)

    def _offer(self, rank: Rank, grant: Grant | None) -> None:
        """Offer it on one rank, or admit what the mint has signed."""
        rank.process.create_task(self._drive(rank, grant), name=f"drive offer of {self.name}")

    async def _drive(self, rank: Rank, grant: Grant | None) -> None:
        worker, tokens = rank.worker, self.plan.num_tokens
        rank.offered[self.name] = self
        try:
            if worker is None:
                raise WorkerClosed("not open")
            # Not before: the ticket of a mint may be out by now, and whoever reads too early must find other bytes.
            rank.cache.write(self.block_ids, self.written)
            if grant is not None:
                worker.admit(grant)
            elif self.plan.patience_s:
                patience_s = self.plan.patience_s
                ticket = await worker.offer_when_possible(self.name, self.block_ids, tokens, timeout_s=patience_s)
                self._tickets.append(ticket)
            else:
                self._tickets.append(worker.offer(self.name, self.block_ids, tokens))
        except (CapacityExceeded, WorkerClosed) as error:
            if grant is not None and isinstance(error, CapacityExceeded):
                self._world.fail(f"{rank.name}: the mint's slot {grant.slot} is not free: {error}")
            self._world.note(rank.name, "refused", self.name, error.code)
            self._give_up(rank)
        except asyncio.CancelledError:
            return
        except Exception as error:  # noqa: BLE001 - whatever else it is, the call was right
            self._world.fail(error)
        self._unsettled -= 1
        self._settle()
        if not self._unsettled and grant is None:
            if len(self._tickets) == len(self.source.ranks):
                self._route()
            else:
                self._refuse("lease table full")
                for other in self.source.ranks:
                    self._on(other, 0.0, self._revoke, other)

    def _give_up(self, rank: Rank) -> None:
        """Need the blocks no more on a rank that does not hold the lease, or holds it no more."""
        if rank not in self._taken_back:
            rank.drop_use(self._blocks)

    def _revoke(self, rank: Rank) -> None:
        if rank.worker is not None:
            self._revoked = True
            rank.worker.revoke(self.name)

    def _settle(self) -> None:
        """Give the blocks back when no rank needs them any more, and the mint its slot."""
        if not self._unsettled and not any(self.name in rank.held for rank in self.source.ranks):
            self.source.give_back(self._blocks)
            if self.source.minted:
                self.source.mint(self._make_mint).retire(self.name)

    def _withdraw(self, reason: str) -> None:
        for rank in self.source.ranks:
            rank.drop_use(self._blocks)
        self._unsettled = 0
        self.source.give_back(self._blocks)
        self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._world.note(self.name, "refused", reason)
        self.outcomes.append("refused")
        self._routed = True

    def _route(self) -> None:
        self._world.after(self._world.delay(self.plan.route_s), self._arrive)

    def _arrive(self) -> None:
        """Let the ticket arrive at its readers, as JSON."""
        self._routed = True
        params = json.loads(json.dumps(join_tickets(self._tickets).to_params()))
        if self.plan.forged:
            params = _forged(params, self._world)
        for number in self.plan.readers:
            engine = self._engines(number)
            if engine.open:
                for reading in range(self.plan.readings):
                    Reading(self._world, self, engine, params, reading).begin()
            else:
                self.outcomes.append("reader not open")

    def begun(self) -> None:
        """Note that a pull is open."""
        self._open += 1

    def over(self, outcome: str) -> None:
        """Note how a pull ended."""
        self._open -= 1
        self.outcomes.append(outcome)

    def gave_back(self, rank: Rank) -> None:
        """Note that one rank of a reader has told the source that it needs the lease no more."""
        self._gave_back.setdefault(rank.engine.name, set()).add(rank.rank)

    def stale(self) -> bool:
        """Tell whether it may rightly be found stale: its lease has ended somewhere."""
        return not self.source.alive or any(
            self.name not in rank.held or rank.worker is None for rank in self.source.ranks
        )

    def _released_by(self, name: str) -> bool:
        ranks = self._gave_back[name]
        return any(
            engine.name == name and len(ranks) == engine.shape.num_ranks
            for engine in map(self._engines, self.plan.readers)
        )


def _forged(params: dict[str, Any], world: World) -> dict[str, Any]:
    """Return parameters with one field of one grant changed, or its MAC; all of it is signed."""

    def change(grant: dict[str, Any]) -> None:
        match kind:
            case 0:
                grant["slot"] += 1
            case 1:
                grant["epoch"] = str(int(grant["epoch"]) + 2)
            case _:
                grant["lease_ms"] += 1000

    which = world.chance.randrange(len(grants_of(params)))
    kind = world.chance.randrange(4)
    if kind == 3:
        return damage(params, lambda sealed: bytes(MAC_BYTES) + sealed[MAC_BYTES:], grant=which)
    return forge(params, change, grant=which)
