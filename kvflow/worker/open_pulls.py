"""Open pulls: what a caller has of each one, and the one record that is written when it ends."""

import asyncio
import math
from collections.abc import Callable, Generator, Sequence
from itertools import count
from typing import Any

import msgspec
from msgspec import Struct

from kvflow.errors import DeadlineExceeded, KvflowError, StaleLease
from kvflow.events import PullFailed, TransferCompleted, TransferQuiesced, TransferTraced
from kvflow.ids import Clock, Ids, PeerId
from kvflow.leases.tickets import Member, Ticket
from kvflow.observability.logs import Record, Reporter
from kvflow.reads.pulls import Pull, report_of, trace_of
from kvflow.rendezvous.dialer import LeaseEnd
from kvflow.report import TransferReport
from kvflow.worker.connections import as_ours
from kvflow.worker.following import Following
from kvflow.worker.peers import PeerPool
from kvflow.worker.prepared import Route
from kvflow.worker.renewals import HeldLease

NAME_MAX = 256  # characters of our name of a request in a record: clients of an engine may choose it
EXPLAIN_S = 0.5  # how long a pull whose lease has ended waits for the reason. An answer takes about a millisecond.

KEPT_BYTES_MAX = 1 << 20  # reports of more bytes are computed after the callers wake, and then keep no lists of blocks

KEPT_S = 0.02  # how long the record of a completed pull waits for others, with which it is written


class PullHandle:
    """One pull, as ``Worker.start_pull`` and ``Worker.pull_many`` return it.

    ``await`` the handle to get the report, or the error that ended the pull: see ``Worker.pull``. Cancelling the await
    cancels the pull. Several tasks may await one handle. The log has every failure, including one that no task awaits.

    Attributes:
        id: number of the pull, unique in its worker.

    Thread: the worker's event loop.
    """

    _report: TransferReport | None = None
    _error: KvflowError | None = None
    _quiescent = False
    _waiters: "tuple[asyncio.Future[None], ...]" = ()
    _on_quiesced: "Sequence[Callable[[PullHandle], object]]" = ()

    def __init__(self, pull_id: int, cancel: Callable[[int], None]) -> None:
        self.id = pull_id
        self._cancel = cancel

    def __await__(self) -> Generator[Any, None, TransferReport]:
        """Wait for the report."""
        if self._report is not None:
            return self._report
        if self._error is None:
            waiter = self._add_waiter()
            try:
                yield from waiter
            except asyncio.CancelledError:
                self._drop_waiter(waiter)
                self.cancel()
                raise
        return self.result()

    def __repr__(self) -> str:
        """Return the number of the pull and its state."""
        state = "open" if not self.done() else "completed" if self._error is None else self._error.code
        return f"<PullHandle {self.id}: {state}{'' if self._quiescent or not self.done() else ', quarantined'}>"

    def done(self) -> bool:
        """Return whether the pull has completed or failed."""
        return self._report is not None or self._error is not None

    def result(self) -> TransferReport:
        """Return the report of a pull that is done.

        Raises:
            KvflowError: the error that ended the pull; see ``Worker.pull``.
            asyncio.InvalidStateError: the pull is not done.
        """
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise asyncio.InvalidStateError("the pull is not done")
        return self._report

    def exception(self) -> KvflowError | None:
        """Return the error that ended a pull that is done; None if the pull has completed.

        Raises:
            asyncio.InvalidStateError: the pull is not done.
        """
        if not self.done():
            raise asyncio.InvalidStateError("the pull is not done")
        return self._error

    def cancel(self) -> None:
        """Cancel the pull; do nothing if it is done. Its blocks may be reused after ``quiesced``."""
        if not self.done():
            self._cancel(self.id)

    async def quiesced(self) -> None:
        """Wait until the pull is done and nothing writes into its blocks.

        Cancellation: safe; the pull goes on.
        """
        while not self._quiescent:
            waiter = self._add_waiter()
            try:
                await waiter
            finally:
                self._drop_waiter(waiter)

    def on_quiesced(self, callback: Callable[["PullHandle"], object]) -> None:
        """Call ``callback`` once the pull is done and nothing writes into its blocks; now if that is already true."""
        if self._quiescent:
            callback(self)
        else:
            self._on_quiesced = [*self._on_quiesced, callback]

    def complete(self, report: TransferReport) -> None:
        """Record that the pull has completed. The worker calls it."""
        self._report, self._quiescent = report, True
        if self._waiters or self._on_quiesced:
            self.quiesce()
        if report.nbytes > KEPT_BYTES_MAX:
            asyncio.get_running_loop().call_soon(report.compute)

    def fail(self, error: KvflowError) -> None:
        """Record that the pull has failed; something may still write into its blocks. The worker calls it."""
        self._error = error
        self._wake()

    def quiesce(self) -> None:
        """Record that the pull is done and nothing writes into its blocks. The worker calls it once."""
        self._quiescent = True
        self._wake()
        callbacks, self._on_quiesced = self._on_quiesced, ()
        for callback in callbacks:
            try:
                callback(self)
            except Exception as error:  # noqa: BLE001 - the pulls that are completed with this one go on
                context = {"message": f"a callback of {self!r} failed", "exception": error}
                asyncio.get_running_loop().call_exception_handler(context)

    def _add_waiter(self) -> "asyncio.Future[None]":
        """Return a future that is done when the pull ends, or when nothing writes into its blocks if it has ended."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = (*self._waiters, waiter)
        return waiter

    def _drop_waiter(self, waiter: "asyncio.Future[None]") -> None:
        """Forget the future of a caller that was cancelled: one that waits repeatedly must not fill memory."""
        self._waiters = tuple([each for each in self._waiters if each is not waiter])

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, ()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


UNCONNECTED = Route((), (), "", "")


class OpenPull(Struct, eq=False):
    """One call of ``pull``, from its start until nothing writes into its blocks. Times: the data plane's clock."""

    pull_id: int
    request_id: str
    called_at: float
    ticket: Ticket | None  # None if the caller passed something else
    local_request_id: str
    handle: PullHandle
    step: str = "check"  # the phase that it is in while the scheduler has nothing of it
    submitted_at: float = math.inf  # when its peers were connected and its blocks paired; infinite before
    nbytes: int = 0  # bytes to move; of an open offer without windows and states, until it is sealed
    ranges: tuple[Pull, ...] = ()  # what is read, in order: of a ticket one, of an open offer ``TokenRange``s
    following: Following | None = None  # of an open offer that is read
    sealed_at: float = math.inf  # likewise: when the last rank has said that everything is settled
    priority: int = 0
    expected: Sequence[Sequence[bytes]] | None = None  # the digests that the blocks must have, group by group
    peer: str = ""  # the source rank that failed, as far as it is known
    route: Route = UNCONNECTED
    held: Sequence[HeldLease] = ()  # the leases that are renewed for it
    targets: Sequence[Ids] = ()  # our checked block ids of each group; empty until they are checked
    failure: PullFailed | None = None  # the failure that the scheduler reported
    # the event that nothing writes now, if it came before the failure was recorded
    quiesced: TransferQuiesced | None = None
    submitted: bool = False  # whether the scheduler has its last range: not all reads were answered when posted
    recorded: bool = False  # whether the record of its failure was written

    @property
    def phase(self) -> str:
        """Where it stands."""
        return self.ranges[-1].phase if self.submitted else self.step

    @property
    def nbytes_arrived(self) -> int:
        """Bytes that have certainly arrived."""
        return sum(each.nbytes_arrived for each in self.ranges)

    @property
    def leases(self) -> list[HeldLease]:
        """The leases of every rank that the ticket names; empty until the peers are connected."""
        grants = () if self.ticket is None else self.ticket.grants
        return [(peer, grants[at].slot, grants[at].epoch) for peer, at in self.route.ranks]

    def member(self, name: str) -> Member | None:
        """Return the rank of this name; None if the ticket does not name it."""
        members = () if self.ticket is None else self.ticket.members()
        return next((member for member in members if str(member.peer) == name), None)

    def others(self, peer: PeerId) -> list[PeerId]:
        """Return the ranks that hold the same lease as this one."""
        members = () if self.ticket is None else tuple(self.ticket.members())
        grants = [each.grant for each in members if each.peer == peer]
        return [each.peer for each in members if each.grant in grants and each.peer != peer]

    def context(self, wall_s: float) -> dict[str, object]:
        """Return the fields that a record has in addition to its event, under the names that vLLM's operators know."""
        called_at = int((wall_s + self.called_at) * 1e6 + 0.5) / 1e6
        if self.ticket is None:
            return {"called_at": called_at}
        grant = self.ticket.grants[0]
        context: dict[str, object] = {
            "called_at": called_at,
            "remote_endpoint": grant.ranks[0].endpoint,
            "num_remote_blocks": sum(map(len, grant.block_ids)),
        }
        if grant.issued_at is not None:
            context["issued_at"] = grant.issued_at
        if self.targets:
            context["num_local_blocks"] = sum(map(len, self.targets))
        return context

    @property
    def engine_id(self) -> str:
        """The producer; empty without a ticket."""
        return "" if self.ticket is None else self.ticket.grants[0].engine_id

    @property
    def traceparent(self) -> str:
        """The W3C trace context of the request; empty if the ticket has none."""
        return "" if self.ticket is None else self.ticket.grants[0].trace

    def timings_s(self, now: float) -> dict[str, float]:
        """Return the seconds of the phases before the scheduler, and of the whole call so far."""
        total_s = {"total": now - self.called_at}
        if self.step == "check":
            return total_s
        waiting_s = {"queue": now - self.submitted_at} if self.step == "compute" else {}
        return {"handshake": min(now, self.submitted_at) - self.called_at} | waiting_s | total_s

    def ticket_age_s(self, wall_s: float) -> float | None:
        """Return the age of the ticket by the producer's clock, in seconds since 1970; None without a time of issue."""
        issued_at = None if self.ticket is None else self.ticket.grants[0].issued_at
        return None if issued_at is None else wall_s - issued_at


class OpenPulls:
    """The open pulls of one worker, and the record of each pull that ends, however early it fails.

    Attributes:
        completed: pulls of whose end hooks and logs do not know yet, with their events, whether the log takes them, and
            whether a file keeps their records.
        by_id: every pull that is connecting, waiting, open or draining. A pull that is answered at once never gets in.
        traced: whether a log or a hook takes ``TransferTraced``. A new log level counts from the second pull after it,
            or after ``KEPT_S``.

    Thread: the event loop; ``begin`` and ``refuse`` from any thread.
    """

    def __init__(
        self,
        *,
        pool: PeerPool,
        clock: Clock,
        wall: Clock,
        report: Reporter,
        cancel: Callable[[int], None],
        log_every: int = 1,
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._wall = wall
        self._report = report
        self._cancel = cancel
        self._log_every = log_every
        self._ids = count(1)
        self.by_id: dict[int, OpenPull] = {}
        self._is_logged = report.is_logged[TransferCompleted]
        self._hooks = report.hooks[TransferCompleted]
        self._flushes = False  # whether a timer will call ``flush``
        self.completed: list[tuple[OpenPull, TransferCompleted, bool, bool]] = []
        self.traced = report.wants(TransferTraced)

    def begin(self, ticket: object, local_request_id: str) -> OpenPull:
        """Return a new pull; ``ticket`` may be of any type."""
        pull_id, name = next(self._ids), str(local_request_id)
        handle = PullHandle(pull_id, self._cancel)
        if not isinstance(ticket, Ticket):
            return OpenPull(pull_id, "", self._clock(), None, name, handle)
        return OpenPull(pull_id, ticket.grants[0].request_id, self._clock(), ticket, name, handle)

    def __len__(self) -> int:
        return len(self.by_id)

    def requests(self) -> tuple[str, ...]:
        """Return the producer's name of the request of each pull."""
        return tuple(pull.request_id for pull in self.by_id.values())

    async def quiesced(self, request_id: str | None = None) -> None:
        """Wait until nothing may write into the blocks of the pulls of one name, or of all pulls if it is None.

        Pulls of the same name that start meanwhile are waited for too. Cancellation: safe; the pulls go on.
        """
        while pull := next((each for each in self.by_id.values() if request_id in {None, each.request_id}), None):
            await pull.handle.quiesced()

    def refuse(
        self, code: str, detail: str, remedy: str, *, ticket: object, request_id: str, local_request_id: str
    ) -> None:
        """Write the record of a pull that was refused before it started."""
        pull = self.begin(ticket, local_request_id)
        name = pull.request_id or request_id
        failed = PullFailed(pull.pull_id, name, code, pull.step, "", detail, quarantined=False, remedy=remedy)
        self._write(pull, failed)

    def complete(self, pull: OpenPull, turn_until: float | None = None) -> TransferReport:
        """Return the report of a pull. A file of JSON lines keeps its record; hooks and other logs take it later.

        ``turn_until``: not None if the caller calls ``write_completed`` in the next iteration of the loop.
        """
        route, ended_at = pull.route, self._clock()
        times = pull.called_at, pull.submitted_at, ended_at
        report = report_of(pull.request_id, pull.nbytes, pull.ranges, times, pull.sealed_at)
        report.transport, report.plane = route.transport, route.plane
        logged = (pull.pull_id - 1) % self._log_every == 0 and self._is_logged()
        if not logged and not self.traced and not self._hooks:
            return report
        names = pull.local_request_id[:NAME_MAX], pull.engine_id, pull.traceparent
        event, wall_s = TransferCompleted(pull.pull_id, pull.request_id, report, *names), self._wall()
        kept = logged and self._report.keep(event, wall_s, self._context, (pull, wall_s - ended_at))
        if kept and not self._flushes:
            self._flushes = True
            asyncio.get_running_loop().call_later(KEPT_S, self.flush)
        if not kept or self.traced or self._hooks:
            if turn_until is None and not self.completed:
                asyncio.get_running_loop().call_soon(self.write_completed)
            self.completed.append((pull, event, logged, kept))
        return report

    def flush(self) -> None:
        """Write the records that are kept. A worker calls it when it has closed."""
        self._flushes = False
        self._report.flush()
        self.traced = self._report.wants(TransferTraced)

    def write_completed(self) -> None:
        """Give the pulls that have completed since the last call to the hooks, and to logs that keep no records."""
        completed, self.completed = self.completed, []
        for pull, event, logged, kept in completed:
            traces = self._trace(pull)
            if logged:
                told = [] if kept else [(event, self._context(pull, self._wall() - self._clock()))]
                self._report.write_all([*told, *traces])
            for each, _ in ((event, {}), *traces):
                self._report.tell(each)
        self.traced = self._report.wants(TransferTraced)

    def _context(self, pull: OpenPull, wall_s: float) -> dict[str, object]:
        """Return the fields that the record of a completed pull has in addition to its event."""
        context = pull.context(wall_s)
        if self._log_every > 1:
            context["log_every"] = self._log_every
        return context

    def _trace(self, pull: OpenPull) -> list[Record]:
        """Return the record of what a pull has read, if it is traced."""
        if not pull.ranges or pull.ranges[0].reads[0].arrived is None:
            return []
        return [(trace_of(pull.ranges, pull.called_at), {})]

    def fail(self, pull: OpenPull, error: BaseException) -> None:
        """End a pull with an error, and write its record; do nothing if its failure is recorded already."""
        if pull.recorded:
            return
        ours = as_ours(error, pull.request_id)
        self._write(pull, _failure(pull, ours))
        pull.handle.fail(ours)
        if pull.quiesced is not None:
            self._report(pull.quiesced)
            pull.handle.quiesce()

    def quiesce(self, pull: OpenPull, event: TransferQuiesced) -> None:
        """Quiesce a failed pull into whose blocks nothing writes now; the record of its failure comes first."""
        if pull.recorded:
            self._report(event)
            pull.handle.quiesce()
        else:
            pull.quiesced = event

    async def explain(self, pull: OpenPull, error: StaleLease) -> StaleLease:
        """Return the error of a lease that a fence found ended, with the reason that the producer gives.

        Cancellation: safe.
        """
        member, end = pull.member(error.peer), LeaseEnd()
        link = None if member is None else self._pool.link(member.peer)
        if member is not None and link is not None:
            end = await link.ask_end((member.grant.slot, member.grant.epoch), within_s=EXPLAIN_S)
        if error.ended_by and end == LeaseEnd():
            end = LeaseEnd(error.ended_by)  # the producer said so, and is gone
        return StaleLease(
            f"{error.message}; {end.words}",
            ended_by=end.ended_by,
            ended_s=end.ended_s,
            request_id=error.request_id,
            peer=error.peer,
            remedy=end.remedy or error.remedy,
        )

    def _write(self, pull: OpenPull, failed: PullFailed) -> None:
        pull.recorded = True
        now, member = self._clock(), pull.member(failed.peer)
        link = None if member is None else self._pool.link(member.peer)
        offset = None if link is None else link.clock_offset
        record = msgspec.structs.replace(
            failed,
            local_request_id=pull.local_request_id[:NAME_MAX],
            transport=pull.route.transport,
            plane=pull.route.plane,
            ticket_age_s=pull.ticket_age_s(self._wall() + (0.0 if offset is None else offset.ahead_s)),
            timings_s=pull.timings_s(now) | failed.timings_s,
            remote_engine_id=pull.engine_id,
            traceparent=pull.traceparent,
        )
        self._report(record, **pull.context(self._wall() - now))
        for event, _ in self._trace(pull):
            self._report(event)


def _failure(pull: OpenPull, error: KvflowError) -> PullFailed:
    """Return the event of a failed pull, from the caller's error and from what the scheduler reported, if anything."""
    known = pull.failure or PullFailed(
        pull_id=pull.pull_id,
        request_id=pull.request_id,
        code=error.code,
        phase=error.phase if isinstance(error, DeadlineExceeded) else pull.step,
        peer=pull.peer or getattr(error, "peer", ""),
        detail=error.message,
        quarantined=False,
    )
    stale = error if isinstance(error, StaleLease) else None
    return msgspec.structs.replace(
        known,
        code=error.code,
        peer=known.peer or pull.peer,
        cause=known.code if known.code != error.code else "",
        detail=error.message.removeprefix(f"request {pull.request_id!r}: "),
        remedy=error.remedy,
        nbytes=pull.nbytes_arrived,
        nbytes_wanted=pull.nbytes,
        lease_ended_by="" if stale is None else stale.ended_by or "unknown",
        lease_ended_s=None if stale is None else stale.ended_s,
    )
