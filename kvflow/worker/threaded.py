"""``run_worker``: the same worker for an engine that is not asyncio, on a thread and event loop of its own.

Where the engine sleeps, the worker is suspended meanwhile: it has one life after the other, each with a registration,
an incarnation and a thread of its own (``worker.life``).
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Literal, TypeVar

import msgspec
from msgspec import Struct

from kvflow.cache.leases import LeaseEnded, Outcome
from kvflow.cache.tickets import Grant, RankAddress, Ticket
from kvflow.config import WorkerConfig
from kvflow.errors import KvflowError, WorkerClosed, WorkerSuspended
from kvflow.forks import Origin
from kvflow.observability.logs import Hook, OnlyEvents
from kvflow.transfer.report import TransferReport
from kvflow.worker.consumer import BlockLists, PullItem, open_item
from kvflow.worker.drain import DrainReport
from kvflow.worker.handle import PullHandle
from kvflow.worker.life import BeginLife, Life, begin_life
from kvflow.worker.offers import Digests
from kvflow.worker.runtime import Cache
from kvflow.worker.worker import Snapshot, Worker

T = TypeVar("T")

FINISHED_MAX = 65536
"""Ends that are kept for an engine which does not ask; the oldest go first."""


class Finished(Struct, frozen=True):
    """Something that has ended since the engine last asked; its blocks may be reused or used.

    Attributes:
        request_id: the producer's name of the request.
        side: ``producer``: a lease of ours has ended. ``consumer``: a pull of ours has.
        outcome: ``released``, ``expired``, ``revoked``; or ``completed``, ``failed``.
        report: of a completed pull.
        error: of a failed pull; its blocks are quiescent by now.
        local_request_id: the caller's own name of the request, if it gave one to ``pull``.
    """

    request_id: str
    side: Literal["producer", "consumer"]
    outcome: str
    report: TransferReport | None = None
    error: KvflowError | None = None
    local_request_id: str = ""


class ThreadedWorker:
    """A worker whose event loop runs on its own thread. Made by ``run_worker``.

    A failure of ``pull`` is reported only after quiescence, because an engine reuses blocks as soon as it
    hears of it.

    While it is suspended, whatever asks for something raises ``WorkerSuspended``; only ``revoke`` and ``finished`` tell
    of what was before.

    Args:
        config: the settings.
        hooks: take every event.
        cache: the memory.
        begin: begins each life; a simulator's runs on a loop that is there already.

    Raises:
        ForkedProcess: by every method that a forked child of the worker's process calls, but for ``close``: there is
            nothing in the child to close.

    Thread: any, but not from a hook: that is the worker's own.
    """

    def __init__(
        self, config: WorkerConfig, hooks: Sequence[Hook], cache: Cache, *, begin: BeginLife = begin_life
    ) -> None:
        self._origin = Origin("the worker")
        self._config = config
        self._begin = begin
        self._finished = _FinishedQueue()
        self._hooks: tuple[Hook, ...] = (*hooks, OnlyEvents(LeaseEnded, self._finished.on_event))
        self._changing = threading.Lock()
        self._stage: Literal["open", "suspended", "closed"] = "open"
        self._life = begin(config, cache, self._hooks)

    @property
    def endpoint(self) -> str:
        """Control endpoint as peers reach it; that of its last life, if it has none now."""
        return self._life.worker.endpoint

    @property
    def rank_address(self) -> RankAddress:
        """What a ``TicketMint`` in another process needs to know of this worker; ask anew after ``resume``.

        Raises:
            WorkerSuspended: nobody can be told where it is.
        """
        return self._awake().worker.rank_address

    def suspend(self) -> None:
        """Withdraw the cache: on return nothing reads or writes its memory any more, and the engine may unmap it.

        As leaving ``run_worker`` does it, and as slowly: every lease ends before the memory is let go, so that whoever
        still reads finds that out and delivers nothing; every pull is cancelled, and waited for until nothing writes;
        peers hear a goodbye; the transport is destroyed. Tickets of before are void for ever. What has ended is told by
        ``finished``, but what was read before is where the engine's memory was. Does nothing the second time.

        Raises:
            WorkerClosed: its block has been left.
            BaseException: what its loop had died of; nothing touches the memory then, either.
        """
        self._origin.require()  # before the lock, which a thread of the parent may have held
        with self._changing:
            self._withdraw()

    def resume(self, cache: Cache) -> None:
        """Register a cache and serve it, at whatever addresses it has now; suspends first what is not suspended.

        This is another incarnation under the same settings: it listens where ``bind`` says, peers meet it anew and
        plan again, and a mint in another process must be made again with its ``rank_address``.

        Args:
            cache: the same one if its memory is back where it was, or another.

        Raises:
            ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``; it stays suspended.
            WorkerClosed: its block has been left.
        """
        self._origin.require()
        with self._changing:
            self._withdraw()
            self._life = self._begin(self._config, cache, self._hooks)
            self._stage = "open"

    def offer(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
    ) -> Ticket:
        """Promise to keep blocks for a consumer. See ``Worker.offer``."""
        return self._awake().worker.offer(request_id, block_ids, num_tokens, digests=digests)

    def offer_when_possible(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int | Sequence[int],
        *,
        digests: Digests = None,
        timeout_s: float | None = None,
    ) -> "Future[Ticket]":
        """Wait until a lease slot is free, then offer. See ``Worker.offer_when_possible``."""
        life = self._awake()
        return life.bridge.submit(
            life.worker.offer_when_possible(request_id, block_ids, num_tokens, digests=digests, timeout_s=timeout_s),
            on_unwanted=lambda _: life.worker.revoke(request_id),
        )

    def admit(self, grant: Grant) -> None:
        """Hold the lease of a grant. See ``Worker.admit``."""
        self._awake().worker.admit(grant)

    def revoke(self, request_id: str) -> bool:
        """End a lease now. See ``Worker.revoke``."""
        return self._life.worker.revoke(request_id)

    def wait_offer(self, request_id: str) -> "Future[Outcome]":
        """Wait until a lease has ended. See ``Worker.wait_offer``."""
        life = self._awake()
        return life.bridge.submit(life.worker.wait_offer(request_id))

    def pull(
        self,
        ticket: Ticket,
        block_ids: Sequence[Sequence[int]],
        *,
        priority: int = 0,
        local_request_id: str = "",
        expected_digests: Digests = None,
    ) -> "Future[TransferReport]":
        """Read a ticket's blocks into ours. See ``Worker.pull``; cancelling the future cancels the pull."""
        item = (ticket, block_ids, local_request_id)
        (future,) = self._start([item], partial(_start_one, item, priority, expected_digests))
        return future

    def pull_many(self, items: Iterable[PullItem], *, priority: int = 0) -> "list[Future[TransferReport]]":
        """Read many tickets' blocks into ours as one batch. See ``Worker.pull_many``.

        The batch crosses to the worker's thread once. Cancelling a future cancels its pull.
        """
        batch = [open_item(item) for item in items]
        return self._start(batch, lambda worker: worker.pull_many(batch, priority=priority))

    def _start(
        self, batch: Sequence[tuple[Ticket, BlockLists, str]], start: Callable[[Worker], list[PullHandle]]
    ) -> "list[Future[TransferReport]]":
        futures: list[Future[TransferReport]] = [Future() for _ in batch]
        try:
            life = self._awake()
            life.bridge.call(partial(_run, life.worker, start, batch, futures, self._finished))
        except KvflowError as error:  # its loop did not take them, and so nothing else writes their records
            for ticket, _, name in batch:
                self.record_refusal(
                    error.code, error.message, remedy=error.remedy, ticket=ticket, local_request_id=name
                )
            raise
        return futures

    def record_refusal(
        self,
        code: str,
        detail: str,
        *,
        remedy: str = "",
        ticket: object = None,
        request_id: str = "",
        local_request_id: str = "",
    ) -> None:
        """Write the record of a pull that the engine refuses by itself. See ``Worker.record_refusal``."""
        self._life.worker.record_refusal(
            code, detail, remedy=remedy, ticket=ticket, request_id=request_id, local_request_id=local_request_id
        )

    def keep(self, ticket: Ticket) -> "Future[None]":
        """Renew a ticket's leases until it is pulled or released. See ``Worker.keep``."""
        life = self._awake()
        return life.bridge.ask(partial(life.worker.keep, ticket))

    def release(self, ticket: Ticket) -> "Future[None]":
        """Give a ticket back unread. See ``Worker.release``."""
        life = self._awake()
        return life.bridge.submit(life.worker.release(ticket))

    def drain(self, deadline_s: float) -> "Future[DrainReport]":
        """Begin nothing new, and wait for what has begun. See ``Worker.drain``."""
        life = self._awake()
        return life.bridge.submit(life.worker.drain(deadline_s))

    def allow_keys(self, keys: Iterable[str]) -> None:
        """Replace the list of allowed keys, also that of later lives. See ``Worker.allow_keys``."""
        self._origin.require()
        config = msgspec.structs.replace(self._config, allowed_keys=tuple(keys))
        with self._changing:
            if self._stage == "suspended":
                config.check()
            else:
                self._call(partial(self._life.worker.allow_keys, config.allowed_keys or ()))
            self._config = config

    def finished(self) -> list[Finished]:
        """Drain what has ended, and is quiescent, since the last call."""
        self._origin.require()
        return self._finished.drain()

    def wait_finished(self, timeout_s: float, *, at_least: int = 1) -> bool:
        """Wait until ``finished`` has so many ends to tell, at most this long; return whether it has.

        Args:
            timeout_s: how long.
            at_least: how many ends. The caller is woken once for all of them.

        Thread: any; if several wait, an end may wake only one of them.
        """
        self._origin.require()
        return self._finished.wait(timeout_s, at_least)

    def snapshot(self) -> Snapshot:
        """Return what is held at this moment."""
        return self._call(self._awake().worker.snapshot)

    def close(self) -> None:
        """End it for good, as leaving ``run_worker`` does.

        Raises:
            BaseException: what its loop had died of.
        """
        if self._origin.is_elsewhere:
            return
        with self._changing:
            self._stage = "closed"
            self._life.end()

    def _awake(self) -> Life:
        """Return the present life, or the last one, whose worker says by itself that it is closed.

        Raises:
            WorkerSuspended: there is none at present.
        """
        self._origin.require()
        if self._stage == "suspended":
            raise WorkerSuspended("the worker is suspended: its cache is withdrawn")
        return self._life

    def _withdraw(self) -> None:
        if self._stage == "closed":
            raise WorkerClosed("the worker is closed")
        self._stage = "suspended"
        self._life.end()

    def _call(self, function: Callable[[], T]) -> T:
        return self._life.bridge.ask(function).result()


@contextmanager
def run_worker(config: WorkerConfig, cache: Cache, *, hooks: Sequence[Hook] = ()) -> Iterator[ThreadedWorker]:
    """Open a worker on a thread of its own. See ``open_worker``.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``.

    Cancellation: Ctrl-C while it opens closes it as soon as it is open.
    """
    worker = ThreadedWorker(config, hooks, cache)
    try:
        yield worker
    finally:
        worker.close()


def _start_one(
    item: tuple[Ticket, BlockLists, str], priority: int, expected_digests: Digests, worker: Worker
) -> list[PullHandle]:
    ticket, block_ids, name = item
    handle = worker.start_pull(
        ticket, block_ids, priority=priority, local_request_id=name, expected_digests=expected_digests
    )
    return [handle]


def _run(
    worker: Worker,
    start: Callable[[Worker], list[PullHandle]],
    batch: Sequence[tuple[Ticket, BlockLists, str]],
    futures: "Sequence[Future[TransferReport]]",
    finished: "_FinishedQueue",
) -> None:
    """Start pulls. Their ends are told when nothing writes for them: an engine reuses blocks when it hears of them.

    All have ended when the worker is closed.
    """
    loop = asyncio.get_running_loop()
    for (ticket, _, name), handle, future in zip(batch, start(worker), futures, strict=True):
        request_id = getattr(ticket, "request_id", "")  # whatever was passed, its end is reported
        handle.on_settled(partial(finished.settle, request_id, name, future))
        if not handle.done():
            future.add_done_callback(partial(_cancel, loop, handle))


def _cancel(loop: asyncio.AbstractEventLoop, handle: PullHandle, future: "Future[TransferReport]") -> None:
    if future.cancelled() and not loop.is_closed():
        loop.call_soon_threadsafe(handle.cancel)


class _FinishedQueue:
    """What has ended and was not asked for yet. Thread: any."""

    def __init__(self) -> None:
        self._ends: deque[Finished] = deque(maxlen=FINISHED_MAX)
        self._awaited = 1  # ends that the last caller of wait needs
        self._arrived = threading.Lock()  # held until so many have come
        self._arrived.acquire()

    def put(self, end: Finished) -> None:
        self._ends.append(end)
        if len(self._ends) >= self._awaited and self._arrived.locked():
            with suppress(RuntimeError):  # another thread has released it
                self._arrived.release()

    def wait(self, timeout_s: float, at_least: int) -> bool:
        deadline = time.monotonic() + timeout_s
        self._awaited = at_least  # before the ends are counted: put counts them after it has added one
        while len(self._ends) < at_least:
            # What released the lock may have been drained before, hence the loop. An Event would take longer to wake.
            if not self._arrived.acquire(timeout=max(0.0, deadline - time.monotonic())):
                return len(self._ends) >= at_least
        return True

    def on_event(self, event: Struct) -> None:
        if isinstance(event, LeaseEnded):
            self.put(Finished(event.request_id, "producer", event.outcome))

    def settle(
        self, request_id: str, local_request_id: str, future: "Future[TransferReport]", handle: PullHandle
    ) -> None:
        """Tell of a pull that has ended, here first and then to those who wait for its future."""
        error = handle.exception()
        if error is None:
            report = handle.result()
            self.put(Finished(request_id, "consumer", "completed", report, local_request_id=local_request_id))
        else:
            self.put(Finished(request_id, "consumer", "failed", error=error, local_request_id=local_request_id))
        if not future.set_running_or_notify_cancel():
            return
        if error is None:
            future.set_result(report)
        else:
            future.set_exception(error)

    def drain(self) -> list[Finished]:
        return [self._ends.popleft() for _ in range(len(self._ends))]
