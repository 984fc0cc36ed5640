"""End every pull here and write one record for each call, however early it failed and for whatever reason."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec
from msgspec import UNSET, UnsetType

from kvflow.cache.tickets import Member, Ticket
from kvflow.clock import Clock
from kvflow.errors import DeadlineExceeded, KvflowError, StaleLease
from kvflow.rendezvous.dialer import LeaseEnd
from kvflow.transfer.events import TransferCompleted, TransferFailed, TransferQuiesced
from kvflow.transfer.report import TransferReport
from kvflow.worker.failures import as_ours, transfer_error
from kvflow.worker.peers import PeerPool

EXPLAIN_S = 0.5
"""How long a pull that was stale waits to be told why. The answer takes a round trip, about a millisecond; a producer
that is too busy for that must not keep the caller from recomputing."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of ``pull``, from its first line to its end.

    Attributes:
        pull_id: the pull.
        ticket: None if something else was passed.
        request_id: the producer's name of the request; empty if there is no ticket to read it from.
        local_request_id: the caller's own name of the request.
        called_at: when.
        phase: where it is, until it is submitted to the scheduler.
        peer: the source rank concerned, as far as that is known.
        handshake_s: seconds spent in reaching the peers; None before they are reached.
        bind_s: seconds spent in computing descriptor indices.
        transport: what carries the bytes; empty before the peers are reached.
        plane: the data planes that it belongs to; likewise.
        context: what the record says besides.
        result: of the scheduler; None before the pull is submitted.
        failure: what the scheduler says of its failure, if it has failed there.
        quiesced: that nothing writes now, if that was found before the failure was told.
        told: whether its record was written.
    """

    pull_id: int
    ticket: Ticket | None
    request_id: str
    local_request_id: str
    called_at: float
    phase: str = "check"
    peer: str = ""
    handshake_s: float | None = None
    bind_s: float = 0.0
    transport: str = ""
    plane: str = ""
    context: dict[str, object] = field(default_factory=dict)
    result: asyncio.Future[TransferReport] | None = None
    failure: TransferFailed | None = None
    quiesced: TransferQuiesced | None = None
    told: bool = False

    def members(self) -> tuple[Member, ...]:
        """Return every rank that the ticket names."""
        return () if self.ticket is None else tuple(self.ticket.members())

    def member(self, name: str) -> Member | None:
        """Return the rank of that name, ``engine/rank/incarnation``; None if the ticket names none."""
        return next((member for member in self.members() if str(member.peer) == name), None)

    def timings_s(self, now: float) -> dict[str, float]:
        """Return the seconds of the phases that the scheduler does not know, so far, and of all together."""
        total_s = now - self.called_at
        if self.phase == "check":
            return {"total": total_s}
        if self.handshake_s is None:
            return {"handshake": total_s, "total": total_s}
        return {"handshake": self.handshake_s, "bind": self.bind_s, "total": total_s}

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

    Thread: the event loop; ``begin`` and ``refuse`` from any thread.
    """

    def __init__(self, *, pool: PeerPool, clock: Clock, wall: Clock, report: Callable[..., None]) -> None:
        self._pool = pool
        self._clock = clock
        self._wall = wall
        self._report = report
        self._ids = count(1)

    def begin(self, ticket: object, local_request_id: str) -> Call:
        """Begin the book of one call, whatever was passed."""
        called_at, local_request_id = self._clock(), str(local_request_id)
        if not isinstance(ticket, Ticket):
            return Call(next(self._ids), None, "", local_request_id, called_at)
        context = _context(ticket)
        return Call(next(self._ids), ticket, ticket.request_id, local_request_id, called_at, context=context)

    def refuse(
        self, code: str, detail: str, remedy: str, *, ticket: object, request_id: str, local_request_id: str
    ) -> None:
        """Write the record of a pull that was refused before it was called. See ``Worker.record_refusal``."""
        call = self.begin(ticket, local_request_id)
        name = call.request_id or request_id
        failed = TransferFailed(call.pull_id, name, code, call.phase, "", detail, quarantined=False, remedy=remedy)
        self._write(call, failed)

    def complete(self, call: Call, report: TransferReport) -> TransferReport:
        """Complete the report of a pull; its record follows when its caller has had a turn of the loop."""
        timings = call.timings_s(self._clock()) | report.timings_s
        report = msgspec.structs.replace(report, transport=call.transport, plane=call.plane, timings_s=timings)
        call.told = True
        event = TransferCompleted(call.pull_id, call.request_id, report, call.local_request_id)
        asyncio.get_running_loop().call_soon(partial(self._report, event, **call.context))
        return report

    def fail(self, call: Call, error: BaseException, *, quarantined: bool) -> None:
        """Write the record of a pull that has failed, unless it is complete and its caller is gone.

        Args:
            call: the pull.
            error: what its caller gets.
            quarantined: whether something may still write into its blocks, if the scheduler has not said so.
        """
        if call.told:
            return
        if call.failure is not None and not isinstance(error, KvflowError):
            error = transfer_error(call.failure)
        self._write(call, _failure(call, as_ours(error, call.request_id), quarantined=quarantined))

    def quiesce(self, call: Call, event: TransferQuiesced) -> None:
        """Report that nothing writes for a failed pull now, but not before its failure is reported."""
        if call.told:
            self._report(event)
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
            transport=call.transport,
            plane=call.plane,
            ticket_age_s=call.ticket_age_s(self._wall() + (0.0 if offset is None else offset.ahead_s)),
            timings_s=call.timings_s(now) | failed.timings_s,
        )
        self._report(record, **call.context)
        if call.quiesced is not None:
            self._report(call.quiesced)


def empty_report(ticket: Ticket) -> TransferReport:
    """Report a pull that had nothing to move: every target block was absent."""
    return TransferReport(request_id=ticket.request_id, nbytes=0, descriptors=0, reads=0, timings_s={})


def _context(ticket: Ticket) -> dict[str, object]:
    """Return what a transfer's record says beside its event: under the names that vLLM's operators know."""
    grant = ticket.grants[0]
    return {
        "remote_engine_id": ticket.engine_id,
        "remote_endpoint": grant.ranks[0].endpoint,
        "num_remote_blocks": sum(len(ids) for ids in grant.block_ids),
    }


def _failure(call: Call, error: KvflowError, *, quarantined: bool) -> TransferFailed:
    """Return how a pull has failed: what its caller is told, and what the scheduler says, if it came so far."""
    known = call.failure or TransferFailed(
        pull_id=call.pull_id,
        request_id=call.request_id,
        code=error.code,
        phase=error.phase if isinstance(error, DeadlineExceeded) else call.phase,
        peer=call.peer or getattr(error, "peer", ""),
        detail=error.message,
        quarantined=quarantined,
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
