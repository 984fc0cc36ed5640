"""One consumer and the ranks of one producer: real workers of this process, over a loopback with faults."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from time import monotonic

import msgspec

from handshake.sockets import LinkEvent, ZeroMqNetwork
from kvflow.config import Tuning
from kvflow.events import PullFailed, TransferCompleted
from kvflow.layout.shards import Shard
from kvflow.leases.epochs import EPOCH_BITS
from kvflow.leases.tickets import Ticket, join_tickets
from kvflow.reads.backend import BackendError, PostedWork
from kvflow.reads.contract import TURN_S_MAX
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport
from kvflow.rendezvous.issuer import TicketKey, TicketMint
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.helpers.settings import flat_config
from tests.helpers.waiting import patiently, until

from .helpers import PATIENCE_S, SECRET, cache_of


def config(engine_id="prefill-0", **settings):
    """Return settings of a worker that waits for a peer for longer than a machine stalls."""
    usual = {"cluster_secret": SECRET, "transport": "loopback", "connect_s": PATIENCE_S, "handshake_s": PATIENCE_S}
    return flat_config(**{"engine_id": engine_id} | usual | settings)


MINT_SLOTS = 100
DATA_ENDPOINT = "tcp://node-7:5700"
"""Where faulty backends that stand for TCP say that they listen."""


class Faults:
    """What a data plane does wrong from now on, and what it was asked for.

    Attributes:
        hung: ranks whose chunks do not end.
        failing: rank -> code with which its chunks fail.
        stuck: cleared while calls into the data plane do not return.
        refused: code with which every peer is refused by the data plane.
        carriers: rank -> name of what carries its bytes.
        chunks: ids of the reads of each chunk that was posted.
        checks: ids of the reads of each first check.
        calls: what the event loop told the data plane, in order.
        busy: has a token for each chunk that began to hang, and each call that did not return.
    """

    def __init__(self):
        self.hung, self.failing = set(), {}
        self.refused, self.carriers = "", {}
        self.stuck = threading.Event()
        self.stuck.set()
        self.chunks, self.checks, self.calls = [], [], []
        self.busy = threading.Semaphore(0)

    @property
    def batches(self):
        """The reads that were handed over, one list for each call."""
        return [list(reads) for reads in self.called("post")]

    def heal(self):
        """Let everything end."""
        self.hung.clear()
        self.failing.clear()
        self.refused = ""
        self.stuck.set()

    def pass_by(self):
        """Pass on a call into the data plane, or keep it until ``heal``."""
        if not self.stuck.is_set():
            self.busy.release()
            assert self.stuck.wait(PATIENCE_S)

    def called(self, name):
        """Return what each call of a name was given."""
        return [given for each, given in self.calls if each == name]

    async def strike(self, count=1):
        """Wait until so many more chunks hang, or calls do not return."""
        for _ in range(count):
            assert await asyncio.to_thread(self.busy.acquire, timeout=PATIENCE_S)


class _Hung(PostedWork):
    """A chunk that does not end before its peer is healed."""

    def __init__(self, chunk):
        self.chunk = chunk


class FaultyBackend(LoopbackBackend):
    """The loopback, with faults, under the name of any data plane."""

    def __init__(self, faults, plane, agent_name, regions, epochs):
        self._faults, self._plane = faults, plane
        super().__init__(self._named(agent_name), regions, epochs)
        if plane == "tcp":
            self.data_endpoint = DATA_ENDPOINT

    def _named(self, agent_name):
        """Return the name of this plane's exporter: a worker may have several."""
        return agent_name if self._plane == "loopback" else f"{agent_name} over {self._plane}"

    def add(self, address):
        faults = self._faults
        faults.pass_by()
        if faults.refused:
            raise BackendError(faults.refused, "as the test says")
        planes = {"loopback": address.planes[self._plane]}
        carrier = super().add(msgspec.structs.replace(address, planes=planes, agent=self._named(address.agent)))
        return msgspec.structs.replace(carrier, name=faults.carriers.get(address.peer.rank, carrier.name))

    def ends_at_once(self, peer):
        return not self._faults.hung

    def post(self, chunk):
        faults, rank = self._faults, chunk.portion.peer.rank
        faults.chunks.append([share.read_id for share in chunk.portion.shares])
        faults.pass_by()
        if rank in faults.failing:
            raise BackendError(faults.failing[rank], "as the test says")
        if rank in faults.hung:
            faults.busy.release()
            return _Hung(chunk)
        return super().post(chunk)

    def post_check(self, peer_id, first, last, reads, *, fence):
        if not fence:
            self._faults.checks.append([read_id for read_id, _ in reads])
        return super().post_check(peer_id, first, last, reads, fence=fence)

    def poll(self, posted):
        faults, rank = self._faults, posted.chunk.portion.peer.rank
        if rank in faults.hung:
            return None
        if rank in faults.failing:
            raise BackendError(faults.failing[rank], "as the test says")
        return super().post(posted.chunk)


class FaultyTransport(ThreadedTransport):
    """A transport of faulty backends that notes what it is told."""

    def __init__(self, faults, planes, agent_name, sink, inline_s_max):
        def factory(plane):
            return lambda regions, epochs, *_: FaultyBackend(faults, plane, agent_name, regions, epochs)

        factories = {plane: factory(plane) for plane in planes}
        super().__init__(planes[0], factories, sink, StagingMemory(0), inline_s_max=inline_s_max)
        self._faults = faults

    def post(self, reads, within_s=TURN_S_MAX / 2):
        self._faults.calls.append(("post", tuple(reads)))
        return super().post(reads, within_s)

    def cancel(self, read_ids):
        self._faults.calls.append(("cancel", tuple(read_ids)))
        super().cancel(read_ids)

    def prepare(self, prepared_list):
        self._faults.calls.append(("prepare", prepared_list))
        super().prepare(prepared_list)

    def add_peer(self, address):
        self._faults.calls.append(("add", address))
        super().add_peer(address)

    def remove_peer(self, peer, *, gone=False):
        self._faults.calls.append(("remove", (peer, gone)))
        super().remove_peer(peer, gone=gone)


def with_faults(faults, inline_s_max=None, planes=("loopback",)):
    """Return the environment of a worker with faulty data planes."""

    def open_transport(_config, agent_name, sink, _staging_bytes=0):
        return FaultyTransport(faults, planes, agent_name, sink, inline_s_max)

    return msgspec.structs.replace(PRODUCTION, open_transport=open_transport)


class FaultyNetwork(ZeroMqNetwork):
    """Real connections, with faults.

    Attributes:
        at: address -> where its dials lead, one after the other, and the last for good; otherwise to itself.
        names: address -> what it is resolved to, or the error.
        open_at: the address of several that accepts connections; None: the first.
        ahead_s: seconds that the wall clock is ahead.
        listening: address of each listener.
        dialed: each address that was dialed.
        held: address -> what its dials wait for.
        channels: address -> the socket that has dialed it last.
        leaving: cleared while connections that have ended are not left.
    """

    def __init__(self, ahead_s=0.0):
        self.at, self.names, self.open_at, self.ahead_s = {}, {}, None, ahead_s
        self.listening, self.dialed, self.held, self.channels = [], [], {}, {}
        self.leaving = asyncio.Event()
        self.leaving.set()
        self._cuts = {}

    def wall(self):
        return super().wall() + self.ahead_s

    async def resolve(self, endpoint):
        found = self.names.get(endpoint) or await super().resolve(endpoint)
        if isinstance(found, Exception):
            raise found
        return found

    async def first_open(self, endpoints, within_s):
        assert len(endpoints) > 1
        assert within_s > 0
        return self.open_at or endpoints[0]

    @asynccontextmanager
    async def open_listener(self, bind, security, limits):
        async with super().open_listener(bind, security, limits) as listener:
            self.listening.append(listener.endpoint)
            yield listener

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        self.dialed.append(endpoint)
        leads = self.at.get(endpoint, [endpoint])
        target = leads.pop(0) if len(leads) > 1 else leads[0]
        if endpoint in self.held:
            await self.held[endpoint].wait()
        async with super().open_dialer(target, security, limits) as channel:
            self.channels[endpoint] = channel
            channel.watch = partial(self._watch, endpoint, channel.watch)
            yield channel
            await self.leaving.wait()

    async def _watch(self, endpoint, watch, on_link):
        self._cuts[endpoint] = partial(on_link, LinkEvent.LOST)
        await watch(on_link)

    def hold(self, endpoint):
        """Keep the dials of an address waiting until ``let``."""
        self.held[endpoint] = asyncio.Event()

    def let(self, endpoint):
        """Let the dials of an address go on."""
        self.held.pop(endpoint).set()

    def cut(self, endpoint):
        """Cut the last connection to an address."""
        self._cuts.pop(endpoint)()

    async def heard(self, count):
        """Wait until so many dials were made."""
        await until(lambda: len(self.dialed) >= count)


class World:
    """The workers, their caches, and what the consumer reported.

    ``minted``: ranks for which a mint signs, from their first ticket on, as it must if one is to be admitted late.
    """

    def __init__(self, producers, consumer, target, faults, events):
        self.producers, self.consumer, self.target = producers, consumer, target
        self.faults, self.events = faults, events
        self._mints, self._num_mints = {}, 0
        self.minted = set()

    @property
    def producer(self):
        (producer,) = self.producers
        return producer

    def ticket(self, request_id="request-1", blocks=(3, 4), **how):
        """Have every rank hold a lease, and return its ticket."""
        given = request_id, [list(blocks)], 4 * len(blocks)
        tickets = []
        for rank, producer in enumerate(self.producers):
            if rank in self.minted:
                ticket, admit = self.early(request_id, blocks, rank=rank)
                admit()
            else:
                ticket = producer.offer(*given, **how)
            tickets.append(ticket)
        return join_tickets(tickets)

    def early(self, request_id="request-1", blocks=(3, 4), *, rank=0, **how):
        """Return a ticket whose lease is not held yet, and what admits it.

        Args:
            request_id, blocks, rank: of the ticket.
            how: settings of the mint that signs it; or what it says of the producer's address.
        """
        self.minted.add(rank)
        if how or rank not in self._mints:
            mint = self._new_mint(rank, **how)
            if not how:
                self._mints[rank] = mint
        else:
            mint = self._mints[rank]
        mint.retire(request_id)  # if the test offers it again
        ticket, grant = mint.offer(request_id, block_ids=[list(blocks)], num_tokens=4 * len(blocks))
        return ticket, lambda: self.producers[rank].admit(grant)

    def _new_mint(self, rank, lease_s=30.0, **named):
        """Return a mint that has slots of its own."""
        address = msgspec.structs.replace(self.producers[rank].rank_address, **named)
        mint = TicketMint("prefill-0", [address], cluster_secret=SECRET, lease_s=lease_s)
        for slot in range(MINT_SLOTS * self._num_mints):
            mint.offer(f"nobody's {slot}", block_ids=[[1]], num_tokens=1)
        self._num_mints += 1
        return mint

    def start(self, ticket=None, blocks=(1, 2), **how):
        return self.consumer.start_pull(ticket or self.ticket(), [list(blocks)], **how)

    async def pull(self, ticket=None, blocks=(1, 2), **how):
        return await patiently(self.start(ticket, blocks, **how))

    async def connect(self):
        """Read something, so that the next pull finds its peers connected. This may take long, whatever the budgets."""
        scheduler = self.consumer._consumer._scheduler
        budgets, scheduler._budgets = scheduler._budgets, Tuning()
        try:
            return await self.pull(self.ticket("connect", (0,)), (0,))
        finally:
            scheduler._budgets = budgets

    async def idle(self):
        """Wait until the consumer looks at no deadline, as it has nothing open."""
        await until(lambda: not self.consumer._consumer._busy.is_set())

    def holds(self, targets, sources):
        """Tell whether our blocks hold what the producer's held."""
        return all(
            bool((view[target] == source + 1).all())
            for view in self.target.views.values()
            for target, source in zip(targets, sources, strict=True)
        )

    def of(self, *kinds):
        """Return the consumer's events of these kinds, without those of ``connect``."""
        found = [event for event in self.events if isinstance(event, kinds)]
        return [event for event in found if getattr(event, "request_id", "") != "connect"]

    async def heard(self, kind, count=1):
        """Wait until the consumer has reported so many events of a kind; return them."""
        return await until(lambda: len(found := self.of(kind)) >= count and found)

    async def checked(self, count):
        """Wait until so many checks before the data were posted since they were last cleared."""
        await until(lambda: len(self.faults.checks) >= count)

    async def records(self, count=1):
        """Wait until so many pulls have their record; return them by the name of their request."""
        found = await until(lambda: len(found := self.of(TransferCompleted, PullFailed)) >= count and found)
        assert len(found) == count
        return {record.request_id: record for record in found}

    async def record(self):
        """Wait for the record of the only pull."""
        (record,) = (await self.records()).values()
        return record


def issued_before(ticket, seconds):
    """Return a ticket as if it had been signed some seconds before."""
    issued_ms = ticket.grants[0].issued_ms - int(1000 * seconds)
    grant = msgspec.structs.replace(ticket.grants[0], issued_ms=issued_ms)
    key = TicketKey.of(config())
    return Ticket(grants=(grant,), signed=(grant.signed(key.sign, key.fingerprint),))


def not_admitted(producer, request_id="r"):
    """Return a ticket and its grant, which nobody has admitted: a pull of it waits, and reads again."""
    ahead = msgspec.structs.replace(producer.rank_address, epoch_base=2**EPOCH_BITS)
    mint = TicketMint("prefill-0", [ahead], cluster_secret=SECRET)
    return mint.offer(request_id, block_ids=[[1]], num_tokens=4)


async def failure(awaitable):
    """Wait for something that fails; return its error."""
    (error,) = await patiently(asyncio.gather(awaitable, return_exceptions=True))
    assert isinstance(error, BaseException), f"it ended with {error}"
    return error


async def awaiting(awaitable):
    """Start to await something."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


@asynccontextmanager
async def opened(
    *,
    ranks=1,
    num_blocks=8,
    sources=None,
    target=None,
    inline_s_max=None,
    pulls_max=PRODUCTION.pulls_max,
    clock=monotonic,
    network=PRODUCTION.network,
    planes=None,
    theirs=(),
    **ours,
):
    """Open a world; leaving it checks the laws, and that nothing is left.

    Args:
        ranks: of the producer, each with an equal share of the heads.
        num_blocks: of each cache.
        sources, target: the caches of the ranks and of the consumer, if they hold something else.
        inline_s_max: as of ``ThreadedTransport``.
        pulls_max, clock, network: as of ``Environment``, of the consumer.
        planes: those of the consumer and those of the producer, if they are others than the loopback.
        theirs: settings of the producer's workers.
        ours: settings of the consumer.
    """
    faults, events = Faults(), []
    our_planes, their_planes = planes or (("loopback",), None)
    environment = msgspec.structs.replace(
        with_faults(faults, inline_s_max, our_planes), pulls_max=pulls_max, clock=clock, network=network
    )
    their_environment = with_faults(Faults(), planes=their_planes) if their_planes else PRODUCTION
    sources = sources or [cache_of(num_blocks, shard=Shard(tp_rank=rank, tp_size=ranks)) for rank in range(ranks)]
    for source in sources:
        for view in source.views.values():
            for block in range(num_blocks if not isinstance(view, list) else 0):  # states stay as they are
                view[block].fill_(block + 1)
    target = target or cache_of(num_blocks)
    async with AsyncExitStack() as stack:
        producers = [
            await stack.enter_async_context(
                open_worker(
                    config(rank=rank, num_ranks=len(sources), **dict(theirs)), source, environment=their_environment
                )
            )
            for rank, source in enumerate(sources)
        ]
        consumer = await stack.enter_async_context(
            open_worker(config("decode-0", **ours), target, hooks=[events.append], environment=environment)
        )
        world = World(producers, consumer, target, faults, events)
        try:
            yield world
        finally:
            faults.heal()
        await until(lambda: not consumer.snapshot().pulls)  # a healed data plane ends them all
        consumer.check()
        assert consumer.snapshot().quarantined == ()
