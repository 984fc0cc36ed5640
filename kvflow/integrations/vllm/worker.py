"""The worker's side: one rank's cache on the network, orders carried out, and what has ended.

Reads are posted, polled and fenced on kvflow's own thread; a step of the engine only hands orders over and collects
what has ended since the last one.
"""

import logging
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from kvflow import Finished, Grant, RankAddress, ThreadedWorker, Ticket, TransferReport, WorkerConfig, run_worker
from kvflow.errors import (
    AuthenticationFailed,
    DefectFound,
    KvflowError,
    PeerLost,
    PeerRefused,
    ReleaseMismatch,
    StaleLease,
    TicketInvalid,
    WorkerClosed,
)
from kvflow.integrations.vllm.admission import reachable
from kvflow.integrations.vllm.orders import Admit, Cancel, Fail, Keep, Order, Pull, Release
from kvflow.integrations.vllm.tally import Tally, count, count_end, empty_tally

if TYPE_CHECKING:
    from kvflow import KVCache  # it loads torch

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

NOT_RELEASED = (AuthenticationFailed, PeerLost, PeerRefused, ReleaseMismatch, StaleLease, TicketInvalid, WorkerClosed)
"""After these nobody would hear that the ticket is given back, or nobody needs to."""


class Results(Struct, frozen=True):
    """Requests that have ended since the last time.

    Attributes:
        sent: their leases have ended, so that the engine may reuse their blocks.
        received: their loads have ended, and nothing writes into their blocks any more.
        failed: those of ``received`` whose blocks were not loaded.
    """

    sent: frozenset[str]
    received: frozenset[str]
    failed: frozenset[str]


@dataclass(slots=True)
class _OpenPull:
    """One pull that has not ended."""

    ticket: Ticket
    future: "Future[TransferReport]"


class RankWorker:
    """One rank of an engine on the network.

    Thread: the engine's; ``admit_early`` from any.
    """

    def __init__(self, worker: ThreadedWorker) -> None:
        self._worker = worker
        self._pulls: dict[str, _OpenPull] = {}
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._tally = empty_tally()
        # Each grant comes twice, from ``admission`` and with a step. The first one is carried out.
        self._admitting = threading.Lock()
        self._early: dict[tuple[str, str], bool] = {}
        self._ordered: dict[str, int] = {}
        # Leases that came early and are not ordered yet. The end of one is reported after its order: ``MultiConnector``
        # learns with that step whether another connector still saves the blocks.
        self._unordered: set[str] = set()
        self._ended_unordered: set[str] = set()

    @property
    def address(self) -> RankAddress:
        """What the scheduler's mint must know of this rank."""
        return self._worker.rank_address

    def execute(self, orders: Iterable[Order]) -> None:
        """Carry out what the scheduler has ordered; nothing of it waits for the network."""
        for order in orders:
            try:
                self._carry_out(order)
            except Exception:  # any exception costs this order, and not the engine
                logger.exception("kvflow: an order of request %s was not carried out", order.request_id)

    def _carry_out(self, order: Order) -> None:
        match order:
            case Admit():
                self._admit(order)
            case Pull():
                self._pull(order)
            case Keep(request_id=request_id, ticket=ticket):
                self._keep(request_id, ticket)
            case Cancel(request_id=request_id):
                if request_id in self._pulls:
                    self._pulls[request_id].future.cancel()
            case Release(request_id=request_id, ticket=ticket):
                self._release(request_id, ticket)
            case Fail(request_id=request_id, code=code, reason=reason, remedy=remedy):
                count(self._tally, "failed", code)
                self._end_received(request_id, failed=True)
                self._worker.record_refusal(code, reason, remedy=remedy, local_request_id=request_id)

    def suspend(self) -> None:
        """Take the cache off the network. What was loaded and is not collected yet has failed: its bytes are gone."""
        try:
            self._worker.suspend()
        finally:
            self._take_ends(lost=True)

    def collect(self, wait_s: float = 0.0) -> Results:
        """Return what has ended since the last call.

        Args:
            wait_s: how long to wait until every open pull has ended, unless something else is to be reported.
        """
        self._take_ends()
        until = time.monotonic() + wait_s
        while wait_s and self._pulls and not (self._failed or self._sent):
            left_s = until - time.monotonic()
            if left_s <= 0 or not self._worker.wait_finished(left_s):
                break
            self._take_ends()
        results = Results(frozenset(self._sent), frozenset(self._received), frozenset(self._failed))
        self._sent, self._received, self._failed = set(), set(), set()
        return results

    def take_tally(self) -> Tally:
        """Return what was counted since the last call."""
        tally, self._tally = self._tally, empty_tally()
        return tally

    def admit_early(self, grant: Grant) -> None:
        """Hold the lease of a grant before the step that orders it; do nothing if that step was here already.

        The step that computed the blocks has ended by then, and on a CPU it has written all of them. On a GPU, what it
        writes late may still be on its way: an event that is recorded in ``wait_for_save`` is to be awaited here.

        Thread: any.
        """
        with self._admitting:
            # A mint counts its epochs up, and orders come in the order of the mint.
            if grant.epoch_value > self._ordered.get(_life(grant), -1) and _key(grant) not in self._early:
                self._early[_key(grant)] = False  # before anything is held that is not noted
                self._unordered.add(grant.request_id)
                self._early[_key(grant)] = self._hold(grant)

    def _admit(self, order: Admit) -> None:
        grant = order.grant
        with self._admitting:
            self._ordered[_life(grant)] = grant.epoch_value
            self._unordered.discard(grant.request_id)
            held = self._early.pop(_key(grant), None)
            if held is None:
                held = self._hold(grant)
        if not held:
            self._worker.revoke(grant.request_id)  # of an admission that was interrupted: the engine frees its blocks
            count(self._tally, "leases", "refused")
            self._sent.add(order.request_id)
        elif grant.request_id in self._ended_unordered:
            self._sent.add(grant.request_id)
        self._ended_unordered.discard(grant.request_id)

    def _hold(self, grant: Grant) -> bool:
        try:
            self._worker.admit(grant)
        except Exception as error:  # noqa: BLE001 - any exception costs this request, and not the engine
            logger.error("kvflow: request %s is not offered, its ticket is void: %s", grant.request_id, error)
            return False
        return True

    def _pull(self, order: Pull) -> None:
        try:
            future = self._worker.pull(order.ticket, order.block_ids, local_request_id=order.request_id)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("kvflow: loading request %s has failed: %s", order.request_id, error)
            count(self._tally, "failed", error.code if isinstance(error, KvflowError) else DefectFound.code)
            self._end_received(order.request_id, failed=True)
        else:
            self._pulls[order.request_id] = _OpenPull(order.ticket, future)

    def _take_ends(self, *, lost: bool = False) -> None:
        for end in self._worker.finished():
            count_end(self._tally, end)
            if end.side == "producer":
                with self._admitting:
                    ordered = end.request_id not in self._unordered
                (self._sent if ordered else self._ended_unordered).add(end.request_id)
            else:
                self._end_pull(end, lost=lost)

    def _end_pull(self, end: Finished, *, lost: bool) -> None:
        pull = self._pulls.pop(end.local_request_id, None)
        if pull is None:
            return
        if lost and end.error is None:
            logger.warning(
                "kvflow: request %s was loaded, and the engine sleeps before it is used", end.local_request_id
            )
        if end.error is not None:
            logger.warning(
                "kvflow: loading request %s, %s of engine %s, has failed: %s",
                end.local_request_id,
                end.request_id,
                pull.ticket.engine_id,
                end.error,
            )
            if not isinstance(end.error, NOT_RELEASED):
                self._release(end.local_request_id, pull.ticket)
        self._end_received(end.local_request_id, failed=lost or end.error is not None)

    def _end_received(self, request_id: str, *, failed: bool) -> None:
        self._received.add(request_id)
        if failed:
            self._failed.add(request_id)

    def _keep(self, request_id: str, ticket: Ticket) -> None:
        """Have a ticket's leases renewed while its request waits; one rank does it for all, on all that it names."""
        try:
            if self._worker.rank_address.rank == 0:
                self._worker.keep(ticket).add_done_callback(partial(_tell_failure, request_id, "is not kept"))
        except KvflowError as error:
            logger.info("kvflow: the ticket of request %s is not kept: %s", request_id, error)

    def _release(self, request_id: str, ticket: Ticket) -> None:
        """Give a ticket back, so that the producer has its blocks before the lease runs out; if not, it runs out."""
        try:
            self._worker.release(ticket).add_done_callback(partial(_tell_failure, request_id, "was not given back"))
        except KvflowError as error:
            logger.info("kvflow: the ticket of request %s was not given back: %s", request_id, error)


def _life(grant: Grant) -> str:
    """Return which life of the engine a grant is of: each life has a mint of its own."""
    return grant.ranks[0].incarnation


def _key(grant: Grant) -> tuple[str, str]:
    return _life(grant), grant.epoch


def _tell_failure(request_id: str, what: str, done: "Future[None]") -> None:
    error = None if done.cancelled() else done.exception()
    if error is not None:
        logger.info("kvflow: the ticket of request %s %s: %s", request_id, what, error)


class RankRuntime:
    """A rank's worker, from the registration of its cache to the engine's end. Thread: the engine's.

    Attributes:
        rank: carries out orders.
        contact: how the scheduler reaches it between steps.
    """

    def __init__(self, config: WorkerConfig, cache: "KVCache", *, apart: bool = False) -> None:
        """Open the worker.

        Args:
            config: of the worker.
            cache: the memory.
            apart: whether the scheduler may be in another process.

        Raises:
            ConfigInvalid, SpecInvalid, TransportUnavailable: see ``kvflow.open_worker``.
        """
        self._stack = ExitStack()
        self._cache = cache
        self._worker = self._stack.enter_context(run_worker(config, cache))
        self._asleep = False
        self.rank = RankWorker(self._worker)
        self.contact = self._stack.enter_context(reachable(self.rank, apart=apart))

    def suspend(self) -> None:
        """Revoke every lease, cancel every pull, and let go of the memory until ``resume``."""
        self._asleep = True
        self.rank.suspend()

    def resume(self) -> None:
        """Serve the cache again, if it was suspended; its memory is where it was.

        Raises:
            ConfigInvalid, TransportUnavailable: see ``kvflow.open_worker``; it stays suspended.
        """
        if self._asleep:
            self._worker.resume(self._cache)
            self._asleep = False
            logger.info("kvflow: awake, and at %s", self.rank.address.endpoint)

    def close(self) -> None:
        """Revoke every lease, cancel every pull, and let go of the memory."""
        self._stack.close()
