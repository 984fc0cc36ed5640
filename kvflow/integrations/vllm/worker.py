"""The worker's side: one rank's cache on the network, orders carried out, and what has ended.

Reads are posted, polled and fenced on kvflow's own thread; a step of the engine only hands orders over and collects
what has ended since the last one.
"""

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, cast

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
from kvflow.integrations.vllm.tally import Tally, count, count_ends, empty_tally

if TYPE_CHECKING:
    from kvflow import KVCache  # it loads torch

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

LOAD_WAIT_S = 0.004
"""How long a step that has nothing to compute waits for all open loads to end. vLLM takes such steps one after the
other, a millisecond apart, and holds the interpreter, which kvflow's threads need, for most of each. A thread that
waits here releases it, and hears of all ends at once. It waits for all loads, because a load that ends a moment after
the step waits for the whole next one, which computes for the others.
"""

LOADS_WAIT_S = 0.016
"""How long such a step waits while loads end: those of a burst end one after the other. A request that arrives
meanwhile waits that long at most.
"""

NOT_RELEASED = (AuthenticationFailed, PeerLost, PeerRefused, ReleaseMismatch, StaleLease, TicketInvalid, WorkerClosed)
"""After these no producer hears that the ticket is given back, or none needs to."""


class Results(NamedTuple):
    """Requests that have ended since the last time.

    Attributes:
        sent: their leases have ended, so that the engine may reuse their blocks.
        received: their loads have ended, and nothing writes into their blocks.
        failed: those of ``received`` whose blocks were not loaded.
    """

    sent: set[str]
    received: set[str]
    failed: set[str]


@dataclass(slots=True)
class _Early:
    """A grant that came before the step that orders it.

    Attributes:
        key: of the grant.
        held: whether its lease is held.
        ended: whether its lease has ended. That is reported after the order: ``MultiConnector`` learns with that step
            whether another connector still saves the blocks.
    """

    key: tuple[str, str]
    held: bool = False
    ended: bool = False


class RankWorker:
    """One rank of an engine on the network.

    Thread: the engine's; ``admit_early`` from any.
    """

    def __init__(self, worker: ThreadedWorker) -> None:
        self._worker = worker
        self._pulls: dict[str, tuple[Ticket, Future[TransferReport]]] = {}
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._tally: Tally | None = None
        # Each grant comes twice, from ``admission`` and with a step. The first one is carried out.
        self._admitting = threading.Lock()
        self._early: dict[str, _Early] = {}
        self._ordered: dict[str, int] = {}

    @property
    def address(self) -> RankAddress:
        """What the scheduler's mint must know of this rank."""
        return self._worker.rank_address

    def execute(self, orders: Iterable[Order]) -> None:
        """Carry out what the scheduler has ordered; nothing of it waits for the network."""
        for kind, run in groupby(orders, type):
            if kind is Pull:
                self._pull(cast("list[Pull]", list(run)))
                continue
            for order in run:
                try:
                    self._carry_out(order)
                except Exception:  # any exception costs this order, and not the engine
                    logger.exception("kvflow: an order of request %s was not carried out", order.request_id)

    def _carry_out(self, order: Order) -> None:
        match order:
            case Admit():
                self._admit(order)
            case Keep(request_id=request_id, ticket=ticket):
                self._keep(request_id, ticket)
            case Cancel(request_id=request_id):
                if request_id in self._pulls:
                    self._pulls[request_id][1].cancel()
            case Release(request_id=request_id, ticket=ticket):
                self._release(request_id, ticket)
            case Fail(request_id=request_id, code=code, reason=reason, remedy=remedy):
                count(self._counted(), "failed", code)
                self._fail(request_id)
                self._worker.record_refusal(code, reason, remedy=remedy, local_request_id=request_id)

    def suspend(self) -> None:
        """Take the cache off the network. What was loaded and is not collected yet has failed: its bytes are gone."""
        try:
            self._worker.suspend()
        finally:
            self._take_ends(lost=True)

    def collect(self, *, idle: bool = False) -> Results:
        """Return what has ended since the last call.

        Args:
            idle: whether the step has nothing to compute: then wait a little until every open pull has ended, unless
                something else is to be reported already.
        """
        self._take_ends()
        if idle and self._pulls and not (self._failed or self._sent):
            self._wait()
        results = Results(self._sent, self._received, self._failed)
        self._sent, self._received, self._failed = set(), set(), set()
        return results

    def _wait(self) -> None:
        """Wait for all open pulls, as long as some of them end."""
        until = time.monotonic() + LOADS_WAIT_S
        while open_pulls := len(self._pulls):
            wait_s = min(LOAD_WAIT_S, until - time.monotonic())
            if wait_s > 0:
                self._worker.wait_finished(wait_s, at_least=open_pulls)
            self._take_ends()
            if wait_s <= 0 or len(self._pulls) == open_pulls:
                return

    def take_tally(self) -> Tally | None:
        """Return what was counted since the last call, if anything was."""
        tally, self._tally = self._tally, None
        return tally

    def _counted(self) -> Tally:
        if self._tally is None:
            self._tally = empty_tally()
        return self._tally

    def admit_early(self, grant: Grant) -> None:
        """Hold the lease of a grant before the step that orders it; do nothing if that step was here already.

        The step that computed the blocks has ended by then, and on a CPU it has written all of them. On a GPU, what it
        writes late may still be on its way: an event that is recorded in ``wait_for_save`` is to be awaited here.

        Thread: any.
        """
        with self._admitting:
            known = self._early.get(grant.request_id)
            # A mint counts its epochs up, and orders come in the order of the mint.
            if grant.epoch_value <= self._ordered.get(_life(grant), -1) or (known and known.key == _key(grant)):
                return
            early = self._early[grant.request_id] = _Early(_key(grant))  # before anything is held that is not noted
            early.held = self._hold(grant)

    def _admit(self, order: Admit) -> None:
        grant = order.grant
        with self._admitting:
            self._ordered[_life(grant)] = grant.epoch_value
            early = self._early.pop(grant.request_id, None)
            if early is None or early.key != _key(grant):
                early = _Early(_key(grant), held=self._hold(grant))
        if not early.held:
            self._worker.revoke(grant.request_id)  # of an admission that was interrupted: the engine frees its blocks
            count(self._counted(), "leases", "refused")
        if early.ended or not early.held:
            self._sent.add(order.request_id)

    def _hold(self, grant: Grant) -> bool:
        try:
            self._worker.admit(grant)
        except Exception as error:  # noqa: BLE001 - any exception costs this request, and not the engine
            logger.error("kvflow: request %s is not offered, its ticket is void: %s", grant.request_id, error)
            return False
        return True

    def _pull(self, orders: Sequence[Pull]) -> None:
        """Begin the loads of a step as one batch; each of them fails alone, unless the worker takes none."""
        try:
            futures = self._worker.pull_many([(each.ticket, each.block_ids, each.request_id) for each in orders])
        except Exception as error:  # noqa: BLE001 - as above
            for order in orders:
                logger.warning("kvflow: loading request %s has failed: %s", order.request_id, error)
                count(self._counted(), "failed", error.code if isinstance(error, KvflowError) else DefectFound.code)
                self._fail(order.request_id)
        else:
            for order, future in zip(orders, futures, strict=True):
                self._pulls[order.request_id] = order.ticket, future

    def _take_ends(self, *, lost: bool = False) -> None:
        ends = self._worker.finished()
        if ends:
            count_ends(self._counted(), ends)
        for end in ends:
            if end.side == "producer":
                self._end_lease(end.request_id)
            else:
                self._end_pull(end, lost=lost)

    def _end_lease(self, request_id: str) -> None:
        with self._admitting:
            early = self._early.get(request_id)
            if early is not None:
                early.ended = True
        if early is None:
            self._sent.add(request_id)

    def _end_pull(self, end: Finished, *, lost: bool) -> None:
        request_id, error = end.local_request_id, end.error
        pull = self._pulls.pop(request_id, None)
        if pull is None:
            return
        self._received.add(request_id)
        if error is not None:
            self._failed.add(request_id)
            ticket = pull[0]
            named = request_id, end.request_id, ticket.engine_id
            logger.warning("kvflow: loading request %s, %s of engine %s, has failed: %s", *named, error)
            if not isinstance(error, NOT_RELEASED):
                self._release(request_id, ticket)
        elif lost:
            self._failed.add(request_id)
            logger.warning("kvflow: request %s was loaded, and the engine sleeps before it is used", request_id)

    def _fail(self, request_id: str) -> None:
        self._received.add(request_id)
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
