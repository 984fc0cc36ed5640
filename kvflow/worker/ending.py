"""End every pull here and write one record for each call, however early it failed and for whatever reason."""

import asyncio
import math
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
from msgspec import UNSET, Struct, UnsetType

from kvflow.cache.blocks import Ids
from kvflow.cache.tickets import Member, Ticket
from kvflow.clock import Clock
from kvflow.errors import DeadlineExceeded, KvflowError, StaleLease
from kvflow.observability.logs import Reporter
from kvflow.rendezvous.dialer import LeaseEnd
from kvflow.transfer.bind_plan import AnyBinding
from kvflow.transfer.events import TransferCompleted, TransferFailed, TransferQuiesced
from kvflow.transfer.pairs import UnitPairs
from kvflow.transfer.report import TransferReport
from kvflow.transfer.requests import RankRead, ReadEnded
from kvflow.worker.failures import as_ours
from kvflow.worker.handle import PullHandle
from kvflow.worker.leases_held import HeldLease
from kvflow.worker.peers import PeerPool
from kvflow.worker.programs import Route

EXPLAIN_S = 0.5
"""How long a pull that was stale waits to be told why. The answer takes a round trip, about a millisecond; a producer
that is too busy for that must not keep the caller from recomputing."""


UNCONNECTED = Route((), (), "", "")


class Call(Struct, eq=False):
    """One call of ``pull``, from its first line to its end.

    Attributes:
        pull_id: the pull.
        ticket: None if something else was passed.
        request_id: the producer's name of the request; empty if there is no ticket to read it from.
        local_request_id: the caller's own name of the request.
        called_at: when.
        handle: what its caller has.
        phase: where it is, until it is submitted to the scheduler.
        peer: the source rank concerned, as far as that is known.
        submitted_at: when its reads were made; infinite before.
        route: how its ranks are read; says nothing before the peers are connected.
        leases: of every rank that the ticket names; likewise.
        held: these leases, if they are renewed until the end.
        targets: our checked block ids of each group; empty before they are checked.
        given: binding and pairs of each group that a source rank gives; likewise.
        reads: one of each source rank that gives something; likewise.
        nbytes: that are to be moved; likewise.
        failure: what the scheduler says of its failure, if it has failed there.
        quiesced: that nothing writes now, if that was found before the failure was told.
        submitted: whether the scheduler has taken it: it was not over when it was posted.
        told: whether its record was written.
    """

    pull_id: int
    ticket: Ticket | None
    request_id: str
    local_request_id: str
    called_at: float
    handle: PullHandle
    phase: str = "check"
    peer: str = ""
    submitted_at: float = math.inf
    route: Route = UNCONNECTED
    leases: Sequence[HeldLease] = ()
    held: Sequence[HeldLease] = ()
    targets: Sequence[Ids] = ()
    given: Sequence[tuple[AnyBinding, UnitPairs]] = ()
    reads: Sequence[RankRead] = ()
    nbytes: int = 0
    failure: TransferFailed | None = None
    quiesced: TransferQuiesced | None = None
    submitted: bool = False
    told: bool = False

    def member(self, name: str) -> Member | None:
        """Return the rank of that name, ``engine/rank/incarnation``; None if the ticket names none."""
        members = () if self.ticket is None else self.ticket.members()
        return next((member for member in members if str(member.peer) == name), None)

    def context(self) -> dict[str, object]:
        """Return what a record of it says beside its event: under the names that vLLM's operators know."""
        if self.ticket is None:
            return {}
        grant = self.ticket.grants[0]
        context: dict[str, object] = {
            "remote_engine_id": grant.engine_id,
            "remote_endpoint": grant.ranks[0].endpoint,
            "num_remote_blocks": sum(map(len, grant.block_ids)),
        }
        if self.targets:
            context["num_local_blocks"] = sum(map(len, self.targets))
        return context

    def timings_s(self, now: float) -> dict[str, float]:
        """Return the seconds of the phases that the scheduler does not know, so far, and of all together."""
        total_s = {"total": now - self.called_at}
        if self.phase == "check":
            return total_s
        return {"handshake": min(now, self.submitted_at) - self.called_at} | total_s

    def ticket_age_s(self, wall_s: float) -> float | None:
        """Return how old the ticket is; None if it does not tell.

        Args:
            wall_s: seconds since 1970 on the clock of the producer, as far as that is known.
        """
        issued_at = UNSET if self.ticket is None else self.ticket.grants[0].issued_at
        return None if isinstance(issued_at, UnsetType) else wall_s - issued_at


class Ending:
    """Ends of one worker's pulls.

    Args:
        pool: of the peers.
        clock: of the pulls.
        wall: seconds since 1970.
        report: takes the records.
        cancel: gives up the pull of a number; does nothing for one that has ended.

    Thread: the event loop; ``begin`` and ``refuse`` from any thread.
    """

    def __init__(
        self, *, pool: PeerPool, clock: Clock, wall: Clock, report: Reporter, cancel: Callable[[int], None]
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._wall = wall
        self._report = report
        self._cancel = cancel
        self._ids = count(1)
        self._completed: list[tuple[Call, TransferReport]] = []

    def begin(self, ticket: object, local_request_id: str) -> Call:
        """Begin the book of one call, whatever was passed.

        Args:
            ticket: as the caller passed it.
            local_request_id: likewise.
        """
        pull_id, local_request_id = next(self._ids), str(local_request_id)
        handle = PullHandle(pull_id, self._cancel)
        if not isinstance(ticket, Ticket):
            return Call(pull_id, None, "", local_request_id, self._clock(), handle)
        return Call(pull_id, ticket, ticket.grants[0].request_id, local_request_id, self._clock(), handle)

    def refuse(
        self, code: str, detail: str, remedy: str, *, ticket: object, request_id: str, local_request_id: str
    ) -> None:
        """Write the record of a pull that was refused before it was called. See ``Worker.record_refusal``."""
        call = self.begin(ticket, local_request_id)
        name = call.request_id or request_id
        failed = TransferFailed(call.pull_id, name, code, call.phase, "", detail, quarantined=False, remedy=remedy)
        self._write(call, failed)

    def complete(self, call: Call, ended: Sequence[ReadEnded], early: int = 0, early_bytes: int = 0) -> TransferReport:
        """Return the report of a pull; its record follows when its caller has had a turn of the loop.

        Args:
            call: the pull.
            ended: the answers of all source ranks; none if nothing was to be moved.
            early: how often a lease was found not to be admitted yet.
            early_bytes: that were read in vain.
        """
        route = call.route
        report = TransferReport.of(
            call.request_id,
            call.nbytes,
            call.given,
            ended,
            (call.called_at, call.submitted_at, self._clock()),
            transport=route.transport,
            plane=route.plane,
            early=early,
            early_bytes=early_bytes,
        )
        if self._report.wants(TransferCompleted):
            if not self._completed:
                asyncio.get_running_loop().call_soon(self._write_completed)
            self._completed.append((call, report))
        return report

    def _write_completed(self) -> None:
        completed, self._completed = self._completed, []
        self._report.take_all(
            [
                (TransferCompleted(call.pull_id, call.request_id, report, call.local_request_id), call.context())
                for call, report in completed
            ]
        )

    def fail(self, call: Call, error: BaseException) -> None:
        """End a pull that has failed, and write its record; does nothing if it has ended.

        Args:
            call: the pull.
            error: what has ended it.
        """
        if call.told:
            return
        ours = as_ours(error, call.request_id)
        self._write(call, _failure(call, ours))
        call.handle.fail(ours)
        if call.quiesced is not None:
            self._report(call.quiesced)
            call.handle.settle()

    def quiesce(self, call: Call, event: TransferQuiesced) -> None:
        """Note that nothing writes for a failed pull now; that is not told before its failure is."""
        if call.told:
            self._report(event)
            call.handle.settle()
        else:
            call.quiesced = event

    async def explain(self, call: Call, error: StaleLease) -> StaleLease:
        """Return the error of a lease that a fence has found ended, with how it has, if its producer says so in time.

        Cancellation: safe.
        """
        member, end = call.member(error.peer), LeaseEnd()
        link = None if member is None else self._pool.link(member.peer)
        if member is not None and link is not None:
            end = await link.ask_end((member.grant.slot, member.grant.epoch_value), within_s=EXPLAIN_S)
        return StaleLease(
            f"{error.message}; {end.words}",
            ended_by=end.ended_by,
            ended_s=end.ended_s,
            request_id=error.request_id,
            peer=error.peer,
            remedy=error.remedy,
        )

    def _write(self, call: Call, failed: TransferFailed) -> None:
        call.told = True
        now, member = self._clock(), call.member(failed.peer)
        link = None if member is None else self._pool.link(member.peer)
        offset = None if link is None else link.clock_offset
        record = msgspec.structs.replace(
            failed,
            local_request_id=call.local_request_id,
            transport=call.route.transport,
            plane=call.route.plane,
            ticket_age_s=call.ticket_age_s(self._wall() + (0.0 if offset is None else offset.ahead_s)),
            timings_s=call.timings_s(now) | failed.timings_s,
        )
        self._report(record, **call.context())


def _failure(call: Call, error: KvflowError) -> TransferFailed:
    """Return how a pull has failed: what its caller is told, and what the scheduler says, if it came so far."""
    known = call.failure or TransferFailed(
        pull_id=call.pull_id,
        request_id=call.request_id,
        code=error.code,
        phase=error.phase if isinstance(error, DeadlineExceeded) else call.phase,
        peer=call.peer or getattr(error, "peer", ""),
        detail=error.message,
        quarantined=False,
        nbytes_wanted=call.nbytes,
    )
    stale = error if isinstance(error, StaleLease) else None
    return msgspec.structs.replace(
        known,
        code=error.code,
        peer=known.peer or call.peer,
        cause=known.code if known.code != error.code else "",
        detail=error.message.removeprefix(f"request {call.request_id!r}: "),
        remedy=error.remedy,
        lease_ended_by="" if stale is None else stale.ended_by or "unknown",
        lease_ended_s=None if stale is None else stale.ended_s,
    )
