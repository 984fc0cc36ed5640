"""``open_worker``: build one rank's worker from its settings and its cache, and close it in order."""

import asyncio
import logging
import os
import resource
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import NoReturn, Protocol

import msgspec

from kvflow import events
from kvflow.config import WorkerConfig
from kvflow.errors import ArgumentInvalid
from kvflow.events import Hook
from kvflow.forks import Origin
from kvflow.ids import agent_name, worker_name
from kvflow.layout.component import Region
from kvflow.layout.manifest import Manifest, Provenance
from kvflow.layout.tracks import tracks_of
from kvflow.leases.blocks import BlockAccount
from kvflow.leases.epochs import EPOCH_BITS, EpochTable
from kvflow.leases.issuer import Issuer
from kvflow.leases.table import LeaseTable
from kvflow.leases.tickets import RankAddress
from kvflow.observability.logs import EventLog, Reporter, check_hooks
from kvflow.reads.contract import Serving, Transport, TransportEvent
from kvflow.reads.device import device_memory_of
from kvflow.reads.serving import order_memory
from kvflow.rendezvous.endpoint import Advertisement, LocalEndpoint, build_local_endpoint, files_wanted, security_of
from kvflow.rendezvous.issuer import TicketKey, draw_head_start
from kvflow.rendezvous.listener import open_listener
from kvflow.worker.consumer import Consumer
from kvflow.worker.environment import PRODUCTION, Environment, Lifecycle, Shared
from kvflow.worker.producer import LeaseManager
from kvflow.worker.worker import Worker

logger = logging.getLogger("kvflow")

FEW_FILES = (
    "kvflow: this process may open %d files, and a worker with %d peers (peers_max) needs %d. Raise the limit with "
    "ulimit -n or LimitNOFILE= of systemd, or lower peers_max. Each peer takes up to 5 files."
)


class Cache(Protocol):
    """What a worker needs from a cache. ``kvflow.KVCache`` implements it."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the cache's memory per block."""
        ...

    def manifest(self) -> Manifest:
        """Return the description of the cache. Its memory must live until the worker is closed."""
        ...


class Unopened:
    """A worker that is not open yet: only entering the context manager opens it."""

    call = ""
    statement = ""

    def __getattr__(self, name: str) -> NoReturn:
        """Refuse to be used as a worker, with an AttributeError that says how to open it."""
        raise AttributeError(
            f"{self.call} returns a context manager, which has no {name!r}: the worker is not open. "
            f"Write: {self.statement}(config, cache) as worker:",
            name=name,
            obj=self,
        )


class _UnopenedWorker(Unopened, AbstractAsyncContextManager["Worker"]):
    call, statement = "open_worker", "async with kvflow.open_worker"

    def __init__(self, manager: AbstractAsyncContextManager[Worker]) -> None:
        self._manager = manager

    async def __aenter__(self) -> Worker:
        return await self._manager.__aenter__()

    async def __aexit__(self, *failure: object) -> bool | None:
        return await self._manager.__aexit__(*failure)  # type: ignore[arg-type]


def open_worker(
    config: WorkerConfig, cache: Cache, *, hooks: Sequence[Hook] = (), environment: Environment = PRODUCTION
) -> AbstractAsyncContextManager[Worker]:
    """Open a worker on the running event loop: ``async with kvflow.open_worker(config, cache) as worker:``.

    Leaving the block revokes every lease at once, cancels every pull, says goodbye to peers, and destroys the
    transport's agents. After that nothing reads or writes the cache, and its memory may be freed.

    A child that is forked inside the block must not leave it: end the child with ``os._exit`` or ``exec``, as
    ``multiprocessing`` and ``subprocess`` do. A child that leaves the block is ended at once, with the status of its
    ``SystemExit``, or 1.

    Args:
        config: the settings.
        cache: the cache; its memory must outlive the worker.
        hooks: plain functions that get every event, in addition to the log. They run on the event loop, or on the
            thread whose call caused the event.
        environment: clock, network, data plane and staging; a simulator passes its own.

    Raises:
        ArgumentInvalid: ``config`` or ``cache`` has the wrong type.
        ConfigInvalid: a setting is missing, malformed or unsafe, or a hook is not a plain function.
        SpecInvalid: the cache's manifest contradicts itself.
        TransportUnavailable: the data plane cannot start here.
        CapacityExceeded: this process may open no more files.
        AttributeError: the returned object is used as a worker, without ``async with``.
    """
    return _UnopenedWorker(_opened(config, cache, hooks, environment))


@asynccontextmanager
async def _opened(
    config: WorkerConfig, cache: Cache, hooks: Sequence[Hook], environment: Environment
) -> AsyncIterator[Worker]:
    parts = _Parts(config, cache, hooks, environment)
    origin, report = Origin("the worker"), parts.report
    async with parts.started_transport() as transport:
        local = parts.local_endpoint(transport)
        shared = parts.shared(local, transport)
        failure: BaseException | None = None
        async with (
            open_listener(
                bind=config.bind, local=local, open_leases=partial(parts.lease_manager, shared), report=report
            ) as (listener, leases),
            asyncio.TaskGroup() as tasks,
        ):
            consumer = Consumer(shared, tasks, parts.key)
            parts.inbox.connect(consumer.on_transport_event)
            background = [tasks.create_task(work()) for work in (leases.expire_leases, consumer.tick_while_busy)]
            address = parts.rank_address(local, listener.endpoint)
            worker = Worker(shared, address, leases, consumer, listener=listener, origin=origin)
            try:
                async with parts.served(worker, shared.lifecycle.is_open) as http:
                    parts.report_opened(worker.endpoint, transport, http)
                    try:
                        yield worker
                    finally:
                        if origin.is_elsewhere:
                            _end_child(sys.exception())
            except BaseException as error:  # noqa: BLE001 - raised below: the task group would wrap it
                failure = error
            closed = events.WorkerStopped(leases_revoked=leases.close(), pulls_cancelled=consumer.close())
            consumer.peers.close()
            for task in background:
                task.cancel()
        report(closed)
        consumer.pulls.flush()
        if failure is not None:
            raise failure


class Inbox:
    """Events of the read thread that the event loop has not handled yet. Many events cause one wake-up.

    Thread: ``put`` from any thread; everything else on the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[TransportEvent] = deque()
        self._handler: Callable[[TransportEvent], None] | None = None  # the transport starts before its consumer
        self._woken = False

    def connect(self, handler: Callable[[TransportEvent], None]) -> None:
        """Pass every event to ``handler``, including those that wait already."""
        self._handler = handler
        self.drain()

    def put(self, event: TransportEvent) -> None:
        """Add an event. The loop wakes once for all events that arrive before it runs."""
        self._events.append(event)
        # A race here may cause an extra wake-up, but never loses one: ``drain`` clears the flag before it looks.
        if not self._woken and not self._loop.is_closed():
            self._woken = True
            self._loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """Handle the events that have arrived."""
        self._woken = False
        while self._handler is not None and self._events:
            self._handler(self._events.popleft())


def _check_arguments(config: WorkerConfig, cache: Cache, hooks: Sequence[Hook]) -> None:
    if not isinstance(config, WorkerConfig):
        remedy = "Pass kvflow.WorkerConfig(engine_id=..., cluster_secret=...)."
        raise ArgumentInvalid("config", "a WorkerConfig", config, remedy=remedy)
    if not callable(getattr(cache, "manifest", None)):
        remedy = "Pass what kvflow.allocate or kvflow.adopt returned."
        raise ArgumentInvalid("cache", "a KVCache", cache, remedy=remedy)
    config.check()
    check_hooks(hooks)


class _Parts:
    """The parts of one worker that need neither the transport nor the listener, and how the others are built."""

    def __init__(self, config: WorkerConfig, cache: Cache, hooks: Sequence[Hook], environment: Environment) -> None:
        _check_arguments(config, cache, hooks)
        manifest = cache.manifest()
        manifest.check()
        incarnation = f"{environment.draw_bits(128):032x}"
        self.config = config
        self.environment = environment
        self.security = security_of(config)
        self.key = TicketKey(self.security)
        self.incarnation = incarnation
        self.name = worker_name(config.engine_id, config.rank, incarnation)
        self.manifest = msgspec.structs.replace(manifest, identity=_identity(config, incarnation))
        self.bytes_per_block = cache.bytes_per_block
        self.epochs = EpochTable(config.tuning.lease_slots, environment.draw_bits(EPOCH_BITS), order_memory)
        self.leases = LeaseTable(self.epochs, num_blocks=self.manifest.num_blocks, unread_s=config.tuning.unread_s)
        self.pass_key = environment.draw_bits(256).to_bytes(32)
        self.staging_bytes = environment.staging(config, self.manifest)
        self.inbox = Inbox(asyncio.get_running_loop())
        self.pages = None
        if config.http is not None:
            from kvflow.observability.pages import WorkerPages  # noqa: PLC0415 - loads an HTTP server, which few need

            self.pages = WorkerPages(config.engine_id, config.rank)
        identity = {"engine_id": config.engine_id, "rank": config.rank, "incarnation": incarnation}
        log = EventLog(environment.network.wall, **identity)
        self.report = Reporter(log, [*hooks, *(() if self.pages is None else self.pages.hooks())])

    @asynccontextmanager
    async def started_transport(self) -> AsyncIterator[Transport]:
        """Start the data plane. Leaving always destroys it, because until then it may write to memory."""
        agent = agent_name(self.name, self.security.server.public_key)
        serving = Serving(
            tracks=tracks_of(self.manifest),
            blocks_of=self.leases.blocks_of,
            admits=self.security.admits,
            pass_key=self.pass_key,
            vouches=self.vouches,
            device_memory=device_memory_of(self.manifest.regions),
            keys_differ=self.security.allowed is not None,
        )
        # Loading NIXL and creating agents takes half a second. Other tasks of the engine's loop go on meanwhile.
        transport = await asyncio.to_thread(
            self.environment.open_transport, self.config, agent, self.inbox.put, self.staging_bytes
        )
        try:
            await asyncio.to_thread(transport.start, self.manifest.regions, _region(self.epochs), serving)
            yield transport
        finally:
            await _close(transport)
            self.inbox.drain()

    def vouches(self, slot: int, epoch: int, mac: bytes) -> bool:
        """Return whether the lease is held and the MAC is that of its ticket. Thread: any."""
        return self.leases.has_mac(slot, epoch, mac, self.key.macs)

    def local_endpoint(self, transport: Transport) -> LocalEndpoint:
        """Build what the worker sends to its peers."""
        published = transport.published()
        advertisement = Advertisement(
            manifest=self.manifest,
            epochs=_region(self.epochs),
            planes=published.planes,
            data_endpoint=published.data_endpoint,
            tcp_encryption=self.config.tuning.tcp_encryption,
            require_encryption=self.config.tuning.require_encryption,
        )
        advertisement.check()
        return build_local_endpoint(
            self.config,
            self.incarnation,
            advertisement,
            self.security,
            self.environment.network,
            pass_key=self.pass_key,
            certificate=published.certificate,
        )

    def rank_address(self, local: LocalEndpoint, endpoint: str) -> RankAddress:
        """Return the address of the worker for its peers; ``endpoint`` is where it listens."""
        return RankAddress(
            rank=self.config.rank,
            incarnation=self.incarnation,
            endpoint=self.config.advertise or endpoint,
            epoch_base=self.epochs.base,
            slots=len(self.epochs),
            public_key=local.public_key,
        )

    def lease_manager(self, shared: Shared, endpoint: str) -> LeaseManager:
        """Build the producer's side, with the issuer of the worker's own offers."""
        config, environment = self.config, self.environment
        issuer = Issuer(
            config.engine_id,
            [self.rank_address(shared.local, endpoint)],
            sign=self.key.sign,
            fingerprint=self.key.fingerprint,
            lease_s=config.lease_s,
            head_start=draw_head_start(environment.draw_bits),
            wall_clock=environment.network.wall,
            draw_trace=environment.draw_bits if config.tuning.trace_offers else None,
            admitted=True,  # no ticket is given away before its lease is held
            block_sizes=[group.tokens_per_id for group in self.manifest.groups],
        )
        return LeaseManager(shared, self.leases, issuer, self.vouches)

    def shared(self, local: LocalEndpoint, transport: Transport) -> Shared:
        """Return what the parts on the event loop share."""
        account = BlockAccount(self.manifest.aliases, self.manifest.num_blocks, threading.Lock())
        return Shared(
            config=self.config,
            environment=self.environment,
            lifecycle=Lifecycle(),
            manifest=self.manifest,
            bytes_per_block=self.bytes_per_block,
            account=account,
            local=local,
            transport=transport,
            staging_bytes=self.staging_bytes,
            report=self.report,
        )

    @asynccontextmanager
    async def served(self, worker: Worker, is_ready: Callable[[], bool]) -> AsyncIterator[str]:
        """Serve the worker's pages over HTTP if the settings ask for it; yield ``HOST:PORT``, or nothing."""
        if self.pages is None or self.config.http is None:
            yield ""
            return
        async with self.pages.served(self.config.http, snapshot=worker.snapshot, is_ready=is_ready) as found:
            yield found

    def report_opened(self, endpoint: str, transport: Transport, http: str) -> None:
        """Report that the worker is open, and which parts of its settings do not apply."""
        planes = transport.published()
        self.report(events.WorkerOpened(endpoint, planes.names, self.manifest.num_blocks, self.bytes_per_block, http))
        for omitted in planes.missing:
            self.report(omitted)
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # it belongs to the process, so a library leaves it alone
        peers = self.config.tuning.peers_max
        if files != resource.RLIM_INFINITY and files < files_wanted(peers):
            logger.warning(FEW_FILES, files, peers, files_wanted(peers))


def _end_child(failure: BaseException | None) -> NoReturn:
    """End a forked child that leaves the block of its parent's worker, as ``multiprocessing`` ends its forked children.

    The child shares the parent's epoll: if it closed its loop, the parent would get no more events for its sockets.
    ZeroMQ in the child would wait for threads that do not exist there.
    """
    message = "kvflow: a forked child left the block of open_worker, which belongs to its parent; the child ends here"
    logger.critical(message, exc_info=failure)
    status = failure.code if isinstance(failure, SystemExit) else 1
    os._exit(status if isinstance(status, int) else int(status is not None))


async def _close(transport: Transport) -> None:
    """Close the transport on another thread, and wait for its end in spite of cancellations."""
    try:
        closed = asyncio.get_running_loop().run_in_executor(None, transport.close)
    except RuntimeError:  # the interpreter is ending and starts no thread; nothing else needs this loop then
        transport.close()
        return
    cancelled: asyncio.CancelledError | None = None
    while not closed.done():
        try:
            await asyncio.shield(closed)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    closed.result()


def _identity(config: WorkerConfig, incarnation: str) -> Provenance:
    return Provenance(
        model=config.model,
        revision=config.tuning.model_revision,
        dtype=config.tuning.model_dtype,
        engine_id=config.engine_id,
        rank=config.rank,
        num_ranks=config.num_ranks,
        incarnation=incarnation,
    )


def _region(epochs: EpochTable) -> Region:
    return Region(address=epochs.array.ctypes.data, nbytes=epochs.array.nbytes)
