"""``open_worker``: the runtime of one rank, from its first socket to its last goodbye."""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.destinations import DestinationLedger
from kvflow.cache.epochs import EPOCH_BITS, EpochTable
from kvflow.cache.leases import LeaseTable
from kvflow.cache.mint import Mint
from kvflow.cache.quarantine import LastResort
from kvflow.cache.tickets import RankAddress
from kvflow.config import WorkerConfig
from kvflow.ids import agent_name, worker_name
from kvflow.layout.manifest import Identity, Manifest
from kvflow.layout.region import Region
from kvflow.layout.tracks import tracks_of
from kvflow.observability import events
from kvflow.observability.logs import EventLog, Hook, Reporter
from kvflow.rendezvous.introduction import OurSide, introduce, security_of
from kvflow.rendezvous.listener import open_listener
from kvflow.rendezvous.mint import TicketKey, draw_head_start
from kvflow.rendezvous.publication import Advertisement
from kvflow.transfer.pulls import Budgets
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport.base import Transport
from kvflow.transport.device import device_memory_of
from kvflow.transport.serving import Serving
from kvflow.worker.calibration import Staging
from kvflow.worker.consumer import Consumer
from kvflow.worker.drain import Drain
from kvflow.worker.home import Home
from kvflow.worker.inbox import Inbox
from kvflow.worker.offers import Offers
from kvflow.worker.peers import PeerPool
from kvflow.worker.producer import LeaseKeeper, order_stores
from kvflow.worker.surroundings import REAL, Surroundings
from kvflow.worker.trust import Trust
from kvflow.worker.worker import Worker

logger = logging.getLogger("kvflow")


class Cache(Protocol):
    """What a worker needs of a cache; ``kvflow.KVCache`` is one."""

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the backing allocation per block."""
        ...

    def manifest(self) -> Manifest:
        """Return the canonical KV metadata; the memory it names lives until the worker is closed."""
        ...


@asynccontextmanager
async def open_worker(
    config: WorkerConfig, cache: Cache, *, hooks: Sequence[Hook] = (), surroundings: Surroundings = REAL
) -> AsyncIterator[Worker]:
    """Open a worker on the running event loop.

    Leaving revokes every lease at once, cancels every pull, says goodbye, and destroys the transport's agents:
    after that nothing reads or writes the cache any more, and its memory may be freed.

    A child that is forked meanwhile must not leave: end it with ``os._exit`` or ``exec``, as ``multiprocessing`` and
    ``subprocess`` do. If it leaves all the same it is ended at once, with the status of its ``SystemExit``, or 1.

    Args:
        config: the settings.
        cache: the memory; it must outlive the worker.
        hooks: take every event, beside the log; on the event loop, or on the thread whose call the event is of.
        surroundings: what it runs in; a simulator gives its own.

    Raises:
        ConfigInvalid: a setting is missing, malformed or unsafe.
        SpecInvalid: the cache's manifest contradicts itself.
        TransportUnavailable: the data plane cannot start here.
    """
    config.check()
    manifest = cache.manifest()
    manifest.check()
    security = security_of(config)
    incarnation = f"{surroundings.draw_bits(128):032x}"
    manifest = msgspec.structs.replace(manifest, identity=_identity(config, incarnation))
    epochs = EpochTable(config.lease_slots, surroundings.draw_bits(EPOCH_BITS), order_stores)
    leases = LeaseTable(epochs)
    pass_key = surroundings.draw_bits(256).to_bytes(32)
    devices = device_memory_of(manifest.regions)
    serving = Serving(
        tracks=tracks_of(manifest),
        blocks_of=leases.blocks_of,
        admits=security.admits,
        pass_key=pass_key,
        vouches=partial(_vouches, leases, TicketKey(security)),
        device_memory=devices,
    )
    inbox = Inbox(asyncio.get_running_loop())
    name = agent_name(worker_name(config.engine_id, config.rank, incarnation), security.server.public_key)
    staging = surroundings.staging(config, manifest)
    make = partial(surroundings.open_transport, config, name, inbox.put)
    if staging.nbytes:
        make = partial(surroundings.open_transport, config, name, inbox.put, staging.nbytes)
    async with _started_transport(make, manifest, epochs, serving, inbox) as transport:
        published = transport.published()
        advertisement = Advertisement(
            manifest=manifest,
            epochs=_region(epochs),
            planes=published.planes,
            data_endpoint=published.data_endpoint,
            tcp_encryption=config.tcp_encryption,
        )
        advertisement.check()
        ours = introduce(config, incarnation, advertisement, security, surroundings.network, pass_key=pass_key)
        log = EventLog(engine_id=config.engine_id, rank=config.rank, incarnation=incarnation)
        report = Reporter(log, hooks)
        parts = _Parts(config, cache, manifest, ours, leases, epochs, transport, inbox, report, surroundings, staging)
        async with _opened(parts) as worker:
            yield worker


def _vouches(leases: LeaseTable, key: TicketKey, slot: int, epoch: int, mac: bytes) -> bool:
    """Tell whether a MAC is that of the ticket of a lease that is held. Thread: any."""
    grant = leases.grant_of(slot, epoch)
    return grant is not None and grant.has_mac(mac, key.verifies)


class _Parts(NamedTuple):
    """What a worker is wired from."""

    config: WorkerConfig
    cache: Cache
    manifest: Manifest
    ours: OurSide
    leases: LeaseTable
    epochs: EpochTable
    transport: Transport
    inbox: Inbox
    report: Reporter
    surroundings: Surroundings
    staging: Staging


@asynccontextmanager
async def _opened(parts: _Parts) -> AsyncIterator[Worker]:
    """Wire both sides of a worker together, listen, and take them down in order."""
    config, cache, manifest, ours, _, epochs, transport, inbox, report, surroundings, staging = parts
    key = TicketKey(ours.security)
    account = BlockAccount(manifest.aliases, manifest.num_blocks, threading.Lock())
    keeper = _keeper_of(parts, account)
    failure: BaseException | None = None
    async with open_listener(bind=config.bind, ours=ours, keeper=keeper, report=report) as server:
        address = _address(config, ours, epochs, server.endpoint)
        mint = _mint_of_offers(config, address, key, manifest, surroundings)
        async with asyncio.TaskGroup() as tasks:
            pool = PeerPool(
                ours=ours,
                manifest=manifest,
                transport=transport,
                tasks=tasks,
                clock=surroundings.clock,
                report=report,
                # Nothing is dropped before something was met, and that takes the consumer of the next line.
                on_dropped=lambda *dropped: consumer.on_peer_dropped(*dropped),  # noqa: PLW0108
                plans=surroundings.make_plans(),
                draw=surroundings.network.draw,
                tcp_encryption=config.tcp_encryption,
                weights=config.peer_weights,
                staging=staging,
            )
            consumer = Consumer(
                pool=pool,
                scheduler=Scheduler(surroundings.pulls_max),
                ledger=DestinationLedger(account),
                last_resort=LastResort(config, cache.bytes_per_block),
                transport=transport,
                manifest=manifest,
                budgets=Budgets(queue_s=config.queue_s, wire_s=config.wire_s, fence_s=config.fence_s),
                verify=key.check,
                tasks=tasks,
                clock=surroundings.clock,
                wall=surroundings.network.wall,
                report=report,
            )
            inbox.connect(consumer.on_transport_event)
            for_ever = (keeper.expire_leases, consumer.tick_while_busy)
            background = [tasks.create_task(work()) for work in for_ever]
            offers = Offers(mint, keeper, asyncio.get_running_loop())
            drain = Drain(keeper, offers, consumer, surroundings.clock, report)
            home = Home(asyncio.get_running_loop())
            worker = Worker(address, keeper, offers, consumer, drain, trust=Trust(ours, server, pool), home=home)
            planes = transport.published()
            report(events.WorkerOpened(worker.endpoint, planes.names, manifest.num_blocks, cache.bytes_per_block))
            for plane, detail in planes.missing.items():
                report(events.PlaneOmitted(plane, detail))
            if staging.ignored is not None:
                report(staging.ignored)
            try:
                yield worker
            except BaseException as error:  # noqa: BLE001  # raised again below, not inside a group of exceptions
                failure = error
            if home.origin.is_elsewhere:
                _end_child(failure)
            closed = events.WorkerClosed(leases_revoked=keeper.close(), pulls_cancelled=consumer.close())
            offers.serve()  # those in line are refused
            pool.close()
            for task in background:
                task.cancel()
    report(closed)
    if failure is not None:
        raise failure


def _keeper_of(parts: _Parts, account: BlockAccount) -> LeaseKeeper:
    """Make the producer's side of a worker."""
    config, manifest = parts.config, parts.manifest
    return LeaseKeeper(
        leases=parts.leases,
        account=account,
        num_blocks=manifest.num_blocks,
        block_sizes=[group.tokens_per_id for group in manifest.groups],
        lease_s=config.lease_s,
        name=worker_name(config.engine_id, config.rank, parts.ours.identity.incarnation),
        clock=parts.surroundings.clock,
        loop=asyncio.get_running_loop(),
        report=parts.report,
    )


def _end_child(failure: BaseException | None) -> NoReturn:
    """End a forked child that leaves the block of its parent's worker.

    The child shares the parent's epoll: if it closed its loop, the parent would no longer hear of its sockets. And its
    ZeroMQ waits for threads that it does not have. ``multiprocessing`` ends the children that it forks in the same way.
    """
    message = "kvflow: a forked child left the block of open_worker, which belongs to its parent: it ends here"
    logger.critical(message, exc_info=failure)
    status = failure.code if isinstance(failure, SystemExit) else 1
    os._exit(status if isinstance(status, int) else int(status is not None))


def _address(config: WorkerConfig, ours: OurSide, epochs: EpochTable, endpoint: str) -> RankAddress:
    """Say where this worker is for its peers."""
    return RankAddress(
        rank=config.rank,
        incarnation=ours.identity.incarnation,
        endpoint=config.advertise or endpoint,
        epoch_base=str(epochs.base),
        slots=len(epochs),
        public_key=ours.public_key,
    )


def _mint_of_offers(
    config: WorkerConfig, address: RankAddress, key: TicketKey, manifest: Manifest, surroundings: Surroundings
) -> Mint:
    """Make the mint of a worker's own offers, of which none gives its ticket away before the lease is held."""
    head_start = draw_head_start(surroundings.draw_bits)
    return Mint(
        config.engine_id,
        [address],
        sign=key.sign,
        lease_s=config.lease_s,
        head_start=head_start,
        wall_clock=surroundings.network.wall,
        admitted=True,
        block_sizes=[group.tokens_per_id for group in manifest.groups],
    )


@asynccontextmanager
async def _started_transport(
    make: Callable[[], Transport], manifest: Manifest, epochs: EpochTable, serving: Serving, inbox: Inbox
) -> AsyncIterator[Transport]:
    """Start the data plane, and destroy it whatever happens: it may write to memory until then."""
    # Loading NIXL and creating agents takes half a second; other tasks of the engine's loop go on meanwhile.
    transport = await asyncio.to_thread(make)
    try:
        await asyncio.to_thread(transport.start, manifest.regions, _region(epochs), serving)
        yield transport
    finally:
        await _finish(_close(transport))
        inbox.drain()


async def _close(transport: Transport) -> None:
    """Close the transport, beside the loop if the interpreter still lets a thread do it."""
    try:
        closed = asyncio.get_running_loop().run_in_executor(None, transport.close)
    except RuntimeError:  # an engine that closes when the interpreter is ending; nobody else needs this loop by then
        transport.close()
    else:
        await closed


async def _finish(work: Coroutine[None, None, None]) -> None:
    """Await work that must not be left half done: a cancellation waits for its end."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()


def _identity(config: WorkerConfig, incarnation: str) -> Identity:
    return Identity(
        model=config.model,
        revision=config.model_revision,
        dtype=config.model_dtype,
        engine_id=config.engine_id,
        rank=config.rank,
        num_ranks=config.num_ranks,
        incarnation=incarnation,
    )


def _region(epochs: EpochTable) -> Region:
    return Region(address=epochs.array.ctypes.data, nbytes=epochs.array.nbytes)
