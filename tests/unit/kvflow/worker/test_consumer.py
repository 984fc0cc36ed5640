"""A pull from ticket to report, over a data plane that only remembers what it was told to do.

Scheduler, ledger and planner are real. The test plays the transport: it says when reads complete and what
fences observe.
"""

import asyncio
import time
from types import SimpleNamespace

import msgspec
import pytest

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.destinations import DestinationLedger
from kvflow.cache.mint import Mint
from kvflow.cache.quarantine import LastResort
from kvflow.cache.tickets import RankAddress, join_tickets
from kvflow.config import QuarantineLimits
from kvflow.errors import (
    ArgumentInvalid,
    BlockIdsInvalid,
    BlockRangeMismatch,
    CapacityExceeded,
    DeadlineExceeded,
    LayoutMismatch,
    PeerLost,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    WorkerClosed,
)
from kvflow.layout.shards import Shard
from kvflow.observability.events import ReaderRenewed
from kvflow.rendezvous.dialer import LeaseEnd
from kvflow.transfer import events
from kvflow.transfer.bind import Binding
from kvflow.transfer.cover import share_out
from kvflow.transfer.plan import plan_transfer
from kvflow.transfer.queues import Limits
from kvflow.transfer.requests import Budgets
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport.base import (
    Carrier,
    FenceFailed,
    FenceJudged,
    PeerFailed,
    ReadCompleted,
    ReadFailed,
    RenewalEnded,
    StagingUse,
)
from kvflow.worker.consumer import Consumer
from kvflow.worker.ending import EXPLAIN_S
from kvflow.worker.programs import Leg, Peer
from kvflow.worker.releasing import RELEASE_PAUSE_S

from .helpers import PATIENCE_S, Clock, Reports, cache_of

WALL_S = 1.7e9
"""What the wall clock is ahead of the other."""

BUDGETS = Budgets(queue_s=4.0, wire_s=3.0, fence_s=2.0)


class Link:
    """A control connection that remembers."""

    def __init__(self, peer, manifest):
        self.peer = peer
        self.advertisement = SimpleNamespace(manifest=manifest)
        self.released = []
        self.renewed = []
        self.read = []
        self.messages = 0
        self.clock_offset = None
        self.asked = []
        self.end = LeaseEnd("expired", 2.5)
        self.answering = asyncio.Event()
        self.answering.set()

    async def ask_end(self, lease, *, within_s):
        assert within_s == EXPLAIN_S
        self.asked.append(lease)
        await self.answering.wait()
        return self.end

    def release(self, leases, *, read):
        self.messages += 1
        self.released += leases
        self.read.append(read)

    def renew(self, leases):
        self.renewed += leases


class Pool:
    """Producers that are met at once, or not at all."""

    def __init__(self, target):
        self._target = target
        self.bindings = {}
        self.links = {}
        self.peers = {}
        self.programs = {}
        self.lost = None
        self.dropped = []
        self.divided = set()

    def add(self, member, source):
        plan = plan_transfer(source, self._target)
        programs = []
        for group in plan.groups:
            binding = Binding(
                group,
                source_regions=source.regions,
                source_blocks=source.num_blocks,
                target_regions=self._target.regions,
                target_blocks=self._target.num_blocks,
            )
            programs.append((len(self.bindings), binding))
            self.bindings[len(self.bindings)] = binding
        self.links[member.peer] = Link(member.peer, source)
        self.peers[member.peer] = Peer(self.links[member.peer], Carrier("cma", "addresses", "nixl"))
        self.programs[member.peer] = tuple(programs)

    async def meet(self, member):
        if self.lost:
            raise self.lost
        return self.peers[member.peer]

    async def reach(self, member):
        if self.lost:
            raise self.lost
        return self.links[member.peer]

    async def legs(self, peers):
        self.divided.add(tuple(peer.link.peer for peer in peers))
        shares = share_out(self._target, [peer.manifest for peer in peers])
        return tuple(Leg(share.source, self.programs[peers[share.source].link.peer]) for share in shares)

    def link(self, peer):
        return self.links.get(peer)

    def on_failed(self, peer, code, detail):
        self.drop(peer, code, detail)

    def drop(self, peer, code, detail):
        self.dropped.append((peer, code))
        self.links.pop(peer, None)


class Transport:
    """A data plane that remembers."""

    name = "loopback"

    def __init__(self):
        self.posted = []
        self.cancelled = []
        self.renewed = asyncio.Event()
        self.use = StagingUse()
        self.looked = asyncio.Event()

    def staging(self):
        self.looked.set()
        return self.use

    def renew_reader(self):
        assert not self.renewed.is_set(), "one renewal at a time"
        self.renewed.set()

    def post(self, read):
        self.posted.append(read)

    def cancel(self, read_ids):
        self.cancelled += read_ids


class World:
    """One consumer of one or two producer ranks."""

    def __init__(self, *, ranks=1, limits=Limits(), budgets=BUDGETS, num_blocks=8):  # noqa: B008 - frozen
        self.clock, self.reports, self.transport = Clock(), Reports(), Transport()
        self.manifest = cache_of(num_blocks).manifest()
        self.pool = Pool(self.manifest)
        self.ledger = DestinationLedger(BlockAccount(self.manifest.aliases, num_blocks))
        self.invalid = None
        self.consumer = Consumer(
            pool=self.pool,
            scheduler=Scheduler(limits),
            ledger=self.ledger,
            last_resort=LastResort(QuarantineLimits(quarantine_s_max=60.0), 1),
            transport=self.transport,
            manifest=self.manifest,
            budgets=budgets,
            verify=self._verify,
            clock=self.clock,
            wall=lambda: WALL_S + self.clock.now,
            report=self.reports,
        )
        self._mints = [
            Mint(
                "prefill-0",
                [RankAddress(rank, "0" * 32, f"tcp://127.0.0.1:{5000 + rank}", "0", 16)],
                sign=lambda payload: bytes(32),
                lease_s=30.0,
                admitted=True,
            )
            for rank in range(ranks)
        ]
        self._sources = [cache_of(shard=Shard(tp_rank=rank, tp_size=ranks)).manifest() for rank in range(ranks)]

    def _verify(self, ticket):
        if self.invalid:
            raise self.invalid

    def ticket(self, request_id="request-1", blocks=(3, 4)):
        ticket = join_tickets(
            [mint.offer(request_id, block_ids=[blocks], num_tokens=4 * len(blocks))[0] for mint in self._mints]
        )
        for member, source in zip(ticket.members(), self._sources, strict=True):
            if member.peer not in self.pool.peers:
                self.pool.add(member, source)
        return ticket

    async def pull(self, ticket=None, blocks=(1, 2), **how):
        """Start a pull; it runs as far as it can without the transport."""
        return await self.started(self.consumer.pull(ticket or self.ticket(), [list(blocks)], **how))

    async def started(self, pull):
        task = asyncio.create_task(pull)
        for _ in range(5):
            await asyncio.sleep(0)
        return task

    def say(self, event):
        self.consumer.on_transport_event(event)

    def complete(self, read):
        self.say(ReadCompleted(read.read_id, 0.25, 0.0))

    def judge(self, read, by=0):
        for fence in read.fences:
            self.say(FenceJudged(fence.fence_id, fence.epoch + by, 0.125))

    def deliver(self):
        for read in self.transport.posted:
            self.complete(read)
            self.judge(read)
        self.transport.posted.clear()

    def released(self):
        return {peer: link.released for peer, link in self.pool.links.items()}


@pytest.fixture
async def world():
    return World()


async def ended(task):
    async with asyncio.timeout(PATIENCE_S):
        return await task


async def released(world, count=1):
    """Return the releases by peer once there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while sum(map(len, world.released().values())) < count:  # noqa: ASYNC110 - the links only count
            await asyncio.sleep(RELEASE_PAUSE_S)
    return world.released()


async def test_a_pull_posts_reports_releases_and_gives_back(world):
    ticket = world.ticket()
    task = await world.pull(ticket, priority=3)
    (read,) = world.transport.posted
    assert (str(read.peer), read.priority, read.nbytes) == ("prefill-0/0/" + "0" * 32, 3, 2 * 2 * 2 * 2 * 4 * 8 * 2)
    assert read.source_index.tolist() == [3, 4]
    assert read.target_index.tolist() == [1, 2]
    grant = ticket.grants[0]
    assert [(fence.slot, fence.epoch, fence.after) for fence in read.fences] == [
        (grant.slot, grant.epoch_value, (read.read_id,))
    ]
    world.clock.now += 1
    world.deliver()
    report = await ended(task)
    assert (report.request_id, report.transport, report.nbytes, report.descriptors) == (
        "request-1",
        "cma",
        read.nbytes,
        1,  # 3 and 4 to 1 and 2: neighbours on both sides
    )
    assert report.timings_s.keys() == {"handshake", "bind", "queue", "post", "wire", "scatter", "fence", "total"}
    assert (report.timings_s["total"], report.timings_s["post"], report.timings_s["fence"]) == (1.0, 0.25, 0.125)
    assert await released(world) == {read.peer: [(grant.slot, grant.epoch_value)]}
    assert len(world.ledger) == world.consumer.open_pulls() == 0
    world.ledger.check()


async def test_the_record_has_report_and_context(world):
    task = await world.pull()
    world.deliver()
    report = await ended(task)
    (event,) = world.reports.of(events.TransferCompleted)
    assert event.report == report
    context = world.reports.contexts[world.reports.events.index(event)]
    assert (context["remote_engine_id"], context["num_remote_blocks"], context["num_local_blocks"]) == (
        "prefill-0",
        2,
        2,
    )


async def test_of_the_pulls_of_one_turn_the_first_goes_at_once_and_the_others_share_a_read(world):
    calls = {"a": [1, 2], "b": [5, 6], "c": [3]}
    pulls = [world.consumer.pull(world.ticket(name, blocks), [blocks]) for name, blocks in calls.items()]
    tasks = [asyncio.create_task(pull) for pull in pulls[:-1]] + [await world.started(pulls[-1])]
    assert [read.target_index.tolist() for read in world.transport.posted] == [[1, 2], [5, 6, 3]]
    assert [len(read.fences) for read in world.transport.posted] == [1, 2]
    vouching = [[(share.slot, share.epoch) for share in read.leases] for read in world.transport.posted]
    assert vouching == [[(fence.slot, fence.epoch) for fence in read.fences] for read in world.transport.posted]
    assert [[share.pairs for share in read.leases] for read in world.transport.posted] == [[2], [2, 1]]
    world.deliver()
    assert [(await ended(task)).request_id for task in tasks] == ["a", "b", "c"]
    await released(world, 3)


async def test_every_rank_is_released_whether_it_was_read_or_not():
    world = World(ranks=2)
    task = await world.pull()
    assert len(world.transport.posted) == 2
    world.deliver()
    await ended(task)
    assert [len(leases) for leases in (await released(world, 2)).values()] == [1, 1]


async def test_releases_of_one_moment_travel_together(world):
    one, other = world.ticket("a"), world.ticket("b")
    tasks = [await world.pull(one, (1, 2)), await world.pull(other, (5, 6))]
    world.deliver()
    assert list(world.released().values()) == [[]]
    for task in tasks:
        await ended(task)
    await released(world, 2)
    assert [(link.messages, len(link.released)) for link in world.pool.links.values()] == [(1, 2)]


async def test_no_release_overtakes_the_caller(world):
    first, second = await world.pull(world.ticket("a"), (1, 2)), await world.pull(world.ticket("b"), (5, 6))
    one, other = world.transport.posted
    world.complete(one)
    world.judge(one)
    await ended(first)
    heard = []
    second.add_done_callback(lambda _: heard.extend(world.released().values()))
    time.sleep(2 * RELEASE_PAUSE_S)  # noqa: ASYNC251 - by now the loop wants to send the first release
    asyncio.get_running_loop().call_soon(lambda: (world.complete(other), world.judge(other)))
    await ended(second)
    assert len(heard[0]) == 1
    await released(world, 2)


async def test_what_is_delivered_when_the_worker_closes_is_released(world):
    task = await world.pull()
    world.deliver()
    world.consumer.close()
    assert [len(leases) for leases in world.released().values()] == [1]
    await ended(task)


async def test_a_pull_of_absent_blocks_moves_nothing_and_releases(world):
    report = await ended(await world.pull(blocks=(-1, -1)))
    assert (report.nbytes, report.reads) == (0, 0)
    assert world.transport.posted == []
    assert [len(leases) for leases in (await released(world)).values()] == [1]
    assert len(world.ledger) == 0


@pytest.mark.parametrize(
    ("blocks", "error"), [((8,), BlockIdsInvalid), ((1, 1), BlockIdsInvalid), ((1, 2, 3), BlockRangeMismatch)]
)
async def test_wrong_blocks_take_nothing(world, blocks, error):
    with pytest.raises(error):
        await ended(await world.pull(blocks=blocks))
    assert len(world.ledger) == world.consumer.open_pulls() == 0
    assert world.transport.posted == []


async def test_a_forged_ticket_meets_nobody(world):
    ticket = world.ticket()
    world.pool.lost = AssertionError("somebody was dialled")
    world.invalid = TicketInvalid("forged")
    with pytest.raises(TicketInvalid):
        await ended(await world.pull(ticket))
    with pytest.raises(TicketInvalid):
        await world.consumer.release(ticket)


async def test_a_peer_that_cannot_be_met_fails_the_pull(world):
    ticket = world.ticket()
    world.pool.lost = PeerLost("nobody there")
    with pytest.raises(PeerLost):
        await ended(await world.pull(ticket))
    assert len(world.ledger) == 0


async def test_one_rank_of_two_is_not_enough():
    world = World(ranks=2)
    ticket = world.ticket()
    half = type(ticket)(grants=ticket.grants[:1], sealed=ticket.sealed[:1])
    with pytest.raises(LayoutMismatch, match="absent"):
        await ended(await world.pull(half))


async def test_a_block_is_the_target_of_one_pull(world):
    first = await world.pull(world.ticket("a"), (1, 2))
    with pytest.raises(BlockIdsInvalid, match="still the target"):
        await ended(await world.pull(world.ticket("b"), (2, 3)))
    world.deliver()
    await ended(first)
    second = await world.pull(world.ticket("c"), (2, 3))
    world.deliver()
    await ended(second)


async def test_too_many_pulls_leave_no_trace():
    world = World(limits=Limits(pulls_max=1))
    first = await world.pull(world.ticket("a"), (1, 2))
    with pytest.raises(CapacityExceeded):
        await ended(await world.pull(world.ticket("b"), (5, 6)))
    assert world.consumer.open_pulls() == 1
    world.deliver()
    await ended(first)
    world.ledger.check()


async def test_a_stale_fence_is_quiescent_and_releases_nothing(world):
    task = await world.pull()
    (read,) = world.transport.posted
    world.complete(read)
    world.judge(read, by=1)
    with pytest.raises(StaleLease) as caught:
        await ended(task)
    assert not caught.value.quarantined
    assert (caught.value.request_id, caught.value.peer) == ("request-1", str(read.peer))
    world.consumer.close()  # sends what is still to be released
    assert world.released() == {read.peer: []}
    assert len(world.ledger) == 0


async def test_a_failure_keeps_its_blocks_until_the_transport_is_done():
    world = World(ranks=2)
    task = await world.pull()
    one, other = world.transport.posted
    world.say(ReadFailed(one.read_id, "transport_error", "odd"))
    with pytest.raises(Exception, match="odd") as caught:
        await ended(task)
    assert caught.value.quarantined
    assert world.transport.cancelled == [other.read_id]
    (kept,) = world.consumer.quarantined()
    assert (kept.reason, kept.num_blocks) == ("transport_error", 2)
    waiting = asyncio.ensure_future(world.consumer.quiesced("request-1"))
    await asyncio.sleep(0)
    assert not waiting.done()
    with pytest.raises(BlockIdsInvalid):
        await ended(await world.pull(world.ticket("again"), (1, 2)))
    world.say(ReadFailed(other.read_id, "cancelled", ""))
    await ended(waiting)
    assert world.consumer.quarantined() == []
    await ended(asyncio.ensure_future(world.consumer.quiesced("request-1")))


async def test_cancelling_the_await_cancels_the_pull_and_quarantines(world):
    task = await world.pull()
    (read,) = world.transport.posted
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    assert world.transport.cancelled == [read.read_id]
    assert [entry.reason for entry in world.consumer.quarantined()] == ["transfer_cancelled"]
    world.complete(read)
    assert len(world.ledger) == 0
    assert [event.code for event in world.reports.of(events.TransferFailed)] == ["transfer_cancelled"]


async def test_quiesced_waits_for_every_pull_of_the_request(world):
    ticket = world.ticket(blocks=(3,))
    tasks = [await world.pull(ticket, (1,)), await world.pull(ticket, (5,))]
    waiting = asyncio.ensure_future(world.consumer.quiesced("request-1"))
    await asyncio.sleep(0)
    one, other = world.transport.posted
    world.complete(one)
    world.judge(one)
    await ended(tasks[0])
    assert not waiting.done()
    world.complete(other)
    world.judge(other)
    for task in (tasks[1], waiting):
        await ended(task)


async def test_whoever_gave_up_waiting_for_quiescence_disturbs_nobody(world):
    task = await world.pull()
    impatient = asyncio.ensure_future(world.consumer.quiesced("request-1"))
    await asyncio.sleep(0)
    impatient.cancel()
    world.deliver()
    await ended(task)


async def test_a_failed_fence_and_a_failed_peer_deliver_nothing(world):
    task = await world.pull(world.ticket("a"), (1, 2))
    (read,) = world.transport.posted
    world.complete(read)
    world.say(FenceFailed(read.fences[0].fence_id, "peer_lost", "gone"))
    with pytest.raises(PeerLost, match="gone"):
        await ended(task)
    task = await world.pull(world.ticket("b"), (5, 6))
    world.say(PeerFailed(read.peer, "metadata_invalid", "garbage"))
    with pytest.raises(Exception, match="garbage") as caught:
        await ended(task)
    assert caught.value.code == "protocol_violation"
    assert caught.value.quarantined
    assert read.peer not in world.pool.links


async def test_a_dropped_peer_ends_its_pulls(world):
    task = await world.pull()
    (read,) = world.transport.posted
    world.consumer.on_peer_dropped(read.peer, "peer_closed", "it left")
    with pytest.raises(PeerLost, match="it left"):
        await ended(task)


async def test_a_batch_whose_program_is_gone_fails_by_itself(world):
    ticket = world.ticket()
    world.pool.bindings.clear()
    with pytest.raises(PeerLost, match="dropped"):
        await ended(await world.pull(ticket))
    assert len(world.ledger) == 0


async def test_deadlines_and_renewals_are_driven_while_a_pull_is_open(world):
    ticking = asyncio.ensure_future(world.consumer.tick_while_busy())
    task = await world.pull()
    (read,) = world.transport.posted
    world.clock.now += 3.5
    with pytest.raises(DeadlineExceeded) as caught:
        await ended(task)
    assert (caught.value.phase, caught.value.quarantined) == ("wire", True)
    assert world.transport.cancelled == [read.read_id]
    assert world.pool.dropped == [(read.peer, "deadline_exceeded")]  # it hangs: to be met anew
    ticking.cancel()


@pytest.mark.parametrize("ended", [0, 2])
async def test_what_stays_in_quarantine_for_too_long_is_ended_by_renewing_the_reader(world, ended):
    ticking = asyncio.ensure_future(world.consumer.tick_while_busy())
    task = await world.pull()
    (read,) = world.transport.posted
    task.cancel()
    await asyncio.wait([task])
    world.clock.now += 60.5
    async with asyncio.timeout(PATIENCE_S):
        await world.transport.renewed.wait()
    assert world.consumer.quarantined()
    world.say(ReadFailed(read.read_id, "cancelled", ""))
    world.say(RenewalEnded(ended, 0.02, 0.06))
    assert world.consumer.quarantined() == []
    demanded = [ReaderRenewed("quarantine_s_max", 2, ended, 0.02, 0.06)] if ended else []
    assert world.reports.of(ReaderRenewed) == demanded
    ticking.cancel()


async def test_a_peer_that_waits_for_staging_buffers_is_not_blamed_and_the_reader_is_renewed():
    world = World(budgets=Budgets(queue_s=3.0, wire_s=3.0, fence_s=3.0))
    task = await world.pull()
    (read,) = world.transport.posted
    world.transport.use = StagingUse(
        buffers=8, buffer_bytes=4096, in_use=8, quarantined=8, waiting=frozenset([read.peer])
    )
    ticking = asyncio.ensure_future(world.consumer.tick_while_busy())
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(3):
            world.transport.looked.clear()
            await world.transport.looked.wait()
            world.clock.now += 4.0
        await world.transport.renewed.wait()
    world.transport.use = StagingUse(buffers=8, buffer_bytes=4096)
    world.say(RenewalEnded(8, 0.02, 0.06))
    world.deliver()
    await ended(task)
    assert world.pool.dropped == []
    assert world.reports.of(ReaderRenewed) == [ReaderRenewed("staging_bytes", 0, 8, 0.02, 0.06)]
    ticking.cancel()


async def test_leases_of_open_pulls_are_renewed():
    world = World(budgets=Budgets(queue_s=99.0, wire_s=99.0, fence_s=99.0))
    ticking, renewed = asyncio.ensure_future(world.consumer.tick_while_busy()), asyncio.Queue()
    ticket = world.ticket()
    (link,) = world.pool.links.values()
    link.renew = renewed.put_nowait
    task = await world.pull(ticket)
    lease = (ticket.grants[0].slot, ticket.grants[0].epoch_value)
    async with asyncio.timeout(PATIENCE_S):
        assert await renewed.get() == [lease]  # at once: the ticket may be old
        world.clock.now += 10.0
        assert await renewed.get() == [lease]
    world.deliver()
    await ended(task)
    assert renewed.empty()
    ticking.cancel()


async def test_leases_of_one_peer_are_renewed_in_one_message():
    world = World(num_blocks=16, budgets=Budgets(queue_s=99.0, wire_s=99.0, fence_s=99.0))
    renewed = asyncio.Queue()
    tickets = [world.ticket(f"r{index}") for index in range(3)]
    (link,) = world.pool.links.values()
    link.renew = renewed.put_nowait
    pulls = [await world.pull(ticket, blocks=(2 * index, 2 * index + 1)) for index, ticket in enumerate(tickets)]
    pulls.append(await world.pull(tickets[0], blocks=(8, 9)))  # its lease is renewed once for both
    ticking = asyncio.ensure_future(world.consumer.tick_while_busy())
    leases = [(ticket.grants[0].slot, ticket.grants[0].epoch_value) for ticket in tickets]
    async with asyncio.timeout(PATIENCE_S):
        assert await renewed.get() == leases
    world.deliver()
    await asyncio.gather(*pulls)
    assert renewed.empty()
    ticking.cancel()


async def test_a_ticket_can_be_given_back_unread(world):
    ticket = world.ticket()
    await world.consumer.release(ticket)
    await asyncio.sleep(0)
    grant = ticket.grants[0]
    assert list(world.released().values()) == [[(grant.slot, grant.epoch_value)]]


async def test_every_rank_that_can_be_reached_is_given_its_ticket_back():
    world = World(ranks=2)
    ticket = world.ticket()
    gone, there = world.pool.links
    reach = world.pool.reach

    async def reach_one(member):
        if member.peer == gone:
            raise PeerLost("nobody there")
        return await reach(member)

    world.pool.reach = reach_one
    with pytest.raises(PeerLost, match="nobody there"):
        await world.consumer.release(ticket)
    assert [len(leases) for leases in world.released().values()] == [0, 1]
    assert there in world.released()


@pytest.mark.parametrize(
    "how", [{"ticket": {"kvflow": {}}}, {"priority": 1.5}, {"priority": "high"}, {"priority": 10**400}]
)
async def test_arguments_of_a_wrong_type_are_named(world, how):
    with pytest.raises(ArgumentInvalid) as caught:
        await ended(await world.pull(**how))
    assert caught.value.name in how


async def test_closing_cancels_what_is_open_and_takes_no_more(world):
    task = await world.pull()
    assert world.consumer.close() == 1
    with pytest.raises(TransferCancelled, match="closing"):
        await ended(task)
    with pytest.raises(WorkerClosed):
        await ended(await world.pull(world.ticket("late")))
    with pytest.raises(WorkerClosed):
        await world.consumer.release(world.ticket("later"))
    assert world.consumer.open_pulls() == 1
    world.complete(world.transport.posted[0])
    assert world.consumer.open_pulls() == 0


async def test_ranks_are_divided_in_one_order_however_their_offers_were_joined():
    world = World(ranks=2)
    ticket = world.ticket()
    turned = msgspec.structs.replace(ticket, grants=ticket.grants[::-1])
    pulls = [await world.pull(each, blocks) for each, blocks in ((ticket, (1, 2)), (turned, (3, 4)))]
    assert [member.address.rank for member in turned.members()] == [1, 0]
    assert world.pool.divided == {tuple(member.peer for member in ticket.members())}
    world.consumer.close()
    await asyncio.gather(*pulls, return_exceptions=True)
