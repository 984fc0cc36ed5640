"""Pulls from ticket to report, by real workers of one process, and over a data plane that fails as a test says."""

import asyncio

import msgspec
import pytest

from kvflow import events
from kvflow.errors import (
    ArgumentInvalid,
    BlockIdsInvalid,
    CapacityExceeded,
    ContentMismatch,
    DeadlineExceeded,
    LayoutMismatch,
    PeerLost,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    WorkerClosed,
    WorkerDraining,
)
from kvflow.events import PeerConnected, PeerDropped, TransferRetried
from kvflow.leases.tickets import MAC_BYTES, LeaseName, join_tickets
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker import open_pulls
from kvflow.worker.peers import PeerPool
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently

from .helpers import PATIENCE_S, SECRET, cache_of
from .pulling import awaiting, config, failure, opened

BLOCK_BYTES = 2 * 2 * 2 * 4 * 8  # of one layer
RELEASED, REVOKED = "released", "revoked"


@pytest.fixture
async def threaded():
    """A world whose consumer posts nothing on the event loop."""
    async with opened(inline_s_max=0, num_blocks=32) as world:
        yield world


async def ended(world, request_id="request-1"):
    """Return how each rank's lease has ended."""
    async with asyncio.timeout(PATIENCE_S):
        return [await producer.wait_offer(request_id) for producer in world.producers]


async def test_a_pull_delivers_reports_and_releases(world):
    report = await world.pull(local_request_id="ours")
    assert world.holds((1, 2), (3, 4))
    assert (report.request_id, report.transport, report.plane) == ("request-1", "loopback", "loopback")
    assert (report.nbytes, report.read_bytes, report.reads) == (4 * BLOCK_BYTES, 4 * BLOCK_BYTES, 1)
    assert (report.descriptors, report.merged) == (1, 0.5)  # 3 and 4 to 1 and 2: neighbors on both sides
    assert (report.early, report.early_bytes) == (0, 0)
    record = await world.record()
    assert (record.report, record.local_request_id) == (report, "ours")
    assert await ended(world) == [RELEASED]
    assert (world.consumer.snapshot().pulls, world.consumer.snapshot().quarantined) == (0, ())


@pytest.mark.parametrize("inline_s_max", [0.0, 60.0])
async def test_the_phases_of_a_pull_add_up_to_its_time(inline_s_max):
    async with opened(inline_s_max=inline_s_max) as world:
        for number in range(3):
            timings_s = dict((await world.pull(world.ticket(f"r{number}"))).timings_s)
            total_s = timings_s.pop("total")
            assert timings_s.keys() == {"handshake", "queue", "bind", "post", "wire", "scatter", "fence", "deliver"}
            assert min(timings_s.values()) >= 0.0
            assert sum(timings_s.values()) == pytest.approx(total_s, rel=0.01)


async def test_a_pull_that_nobody_awaits_is_carried_out(world):
    handle = world.start()
    assert await ended(world) == [RELEASED]
    assert (handle.done(), handle.exception()) == (True, None)
    assert world.holds((1, 2), (3, 4))
    async with asyncio.timeout(PATIENCE_S):
        assert await handle is await handle
        await handle.quiesced()


async def test_a_pull_of_connected_peers_is_handed_over_in_the_call(world):
    await world.connect()
    before = len(world.faults.batches)
    handle = world.start(priority=3)
    ((read,),) = world.faults.batches[before:]
    assert (read.priority, read.check_first) == (3, False)
    assert (str(read.peer), len(read.parts)) == (f"prefill-0/0/{world.producer.incarnation}", 1)
    assert handle.done() == (world.of(events.TransferStarted) == [])
    await patiently(handle)


async def test_a_small_pull_of_connected_peers_is_over_before_the_call_returns():
    async with opened(inline_s_max=60.0) as world:
        await world.connect()
        async with asyncio.timeout(PATIENCE_S):
            for number in range(10_000):  # the read thread may just be leaving the last one
                handle = world.start(world.ticket(f"r{number}"))
                if handle.done():
                    break
                await handle
        assert world.holds((1, 2), (3, 4))
        await handle.quiesced()
        assert (await handle).nbytes == 4 * BLOCK_BYTES
        assert handle.id not in {event.pull_id for event in world.of(events.TransferStarted)}


async def test_pulls_one_after_the_other_let_other_tasks_run():
    """Each may be over before it is awaited, and then nothing of it gives way to the loop."""
    async with opened(inline_s_max=60.0, theirs={"lease_slots": 4096}) as world:
        await world.connect()
        turns = 0

        async def count():
            nonlocal turns
            while turns < 20:
                await asyncio.sleep(0)
                turns += 1

        other, number = asyncio.ensure_future(count()), 0
        async with asyncio.timeout(PATIENCE_S):
            while not other.done():
                number += 1
                await world.consumer.pull(world.ticket(f"r{number}"), [[1, 2]])


async def test_the_first_pull_of_an_iteration_starts_at_once_the_rest_together(threaded):
    await threaded.connect()
    before = len(threaded.faults.batches)
    handles = [threaded.start(threaded.ticket(f"r{at}", (at,)), (at,)) for at in range(1, 9)]
    assert [len(reads) for reads in threaded.faults.batches[before:]] == [1]
    await patiently(asyncio.gather(*handles))
    assert [len(reads) for reads in threaded.faults.batches[before:]] == [1, 7]
    assert threaded.holds(range(1, 9), range(1, 9))


async def test_a_pull_that_is_cancelled_in_its_own_turn_is_not_posted(threaded):
    await threaded.connect()
    before = len(threaded.faults.batches)
    handles = [threaded.start(threaded.ticket(f"r{at}", (at,)), (at,)) for at in range(1, 4)]
    handles[1].cancel()
    again = threaded.start(threaded.ticket("again", (2,)), (2,))  # its block is free at once
    error = await failure(handles[1])
    assert isinstance(error, TransferCancelled)
    assert not error.quarantined
    await patiently(asyncio.gather(handles[0], handles[2], again, handles[1].quiesced()))
    assert [len(reads) for reads in threaded.faults.batches[before:]] == [1, 2]
    record = (await threaded.records(4))["r2"]
    assert (record.phase, record.nbytes, record.nbytes_wanted) == ("queue", 0, 2 * BLOCK_BYTES)


async def test_every_rank_is_read_and_released():
    async with opened(ranks=2) as world:
        report = await world.pull()
        assert world.holds((1, 2), (3, 4))
        assert (report.nbytes, report.reads) == (4 * BLOCK_BYTES, 2)
        assert await ended(world) == [RELEASED] * 2


async def test_each_rank_is_read_under_its_own_lease_as_soon_as_it_is_held():
    async with opened(ranks=2) as world:
        world.minted.add(1)
        await world.connect()
        early, admit = world.early(rank=1)
        ticket = join_tickets([world.producers[0].offer("request-1", [[3, 4]], 8), early])
        before = len(world.faults.batches)
        handle = world.start(ticket)
        await world.heard(TransferRetried)
        admit()
        await patiently(handle)
        assert world.holds((1, 2), (3, 4))
        assert [(each.lease, each.check_first) for each in world.faults.batches[before]] == [
            (LeaseName(grant.slot, grant.epoch, signed[:MAC_BYTES]), not grant.admitted)
            for grant, signed in zip(ticket.grants, ticket.signed, strict=True)
        ]
        assert [grant.admitted for grant in ticket.grants] == [True, False]


async def test_a_lease_that_has_ended_on_one_rank_fails_the_pull():
    """Both answers come at once, as soon as the data plane knows what its posts take."""
    async with opened(ranks=2, inline_s_max=PATIENCE_S) as world:
        for name in ("connect", "measure"):
            await world.pull(world.ticket(name, (0,)), (0,))
        await world.idle()
        ticket = world.ticket()
        world.producers[1].revoke("request-1")
        error = await failure(world.start(ticket))
        assert isinstance(error, StaleLease)
        assert error.peer == f"prefill-0/1/{world.producers[1].incarnation}"


async def test_ranks_are_divided_in_one_order_however_their_offers_were_joined():
    async with opened(ranks=2) as world:
        await world.connect()
        offers = [each.offer("turned", [[5]], 4) for each in world.producers]
        await world.pull(join_tickets(offers[::-1]), (6,))
        assert world.holds((6,), (5,))
        assert [name for name, _ in world.faults.calls].count("prepare") == 2


async def test_a_pull_of_absent_blocks_moves_nothing_and_releases(world):
    report = await world.pull(blocks=(-1, -1))
    assert (report.nbytes, report.reads, report.transport) == (0, 0, "loopback")
    assert report.timings_s.keys() == {"handshake", "total"}
    assert world.faults.batches == []
    assert await ended(world) == [RELEASED]


async def test_a_forged_ticket_connects_nobody(world):
    async with open_worker(config(cluster_secret="another secret of the tests"), cache_of()) as stranger:
        ticket = stranger.offer("request-1", [[3, 4]], 8)
        assert isinstance(await failure(world.start(ticket)), TicketInvalid)
        with pytest.raises(TicketInvalid):
            await world.consumer.release(ticket)
    assert world.of(PeerConnected, PeerDropped) == []


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("ticket", {"ticket": {"kvflow": {}}}),
        ("priority", {"priority": 1.5}),
        ("priority", {"priority": "high"}),
        ("priority", {"priority": 10**400}),
        ("expected_digests[0]", {"expected_digests": [[b"one"]]}),
    ],
)
async def test_arguments_of_a_wrong_type_are_named_by_the_handle(world, name, how):
    error = await failure(world.start(**how))
    assert isinstance(error, ArgumentInvalid)
    assert error.name == name
    assert (await world.record()).code == "argument_invalid"


@pytest.mark.parametrize("connected", [True, False])
async def test_a_ticket_that_names_no_slot_of_its_producer_is_invalid(world, connected):
    if connected:
        await world.connect()
    address = world.producer.rank_address
    lying = TicketMint("prefill-0", [msgspec.structs.replace(address, slots=address.slots + 8)], cluster_secret=SECRET)
    for number in range(address.slots):
        lying.offer(f"r{number}", block_ids=[[1]], num_tokens=1)
    ticket, grant = lying.offer("request-1", block_ids=[[3, 4]], num_tokens=8)
    assert grant.slot >= address.slots
    assert isinstance(await failure(world.start(ticket)), TicketInvalid)
    await world.pull(world.ticket("right"))


async def test_one_rank_of_two_is_not_enough():
    async with opened(ranks=2) as world:
        half = world.producers[0].offer("request-1", [[3, 4]], 8)
        error = await failure(world.start(half))
        assert isinstance(error, LayoutMismatch)
        assert "source has 'head 0 of 2'" in str(error)


async def test_pulls_that_connect_or_drain_are_bounded_too():
    async with opened(pulls_max=2) as world:
        connecting, other = world.start(world.ticket("a"), (1, 2)), world.start(world.ticket("b"), (3, 4))
        error = await failure(world.start(world.ticket("c"), (5, 6)))
        assert isinstance(error, CapacityExceeded)
        assert error.limit == 2
        async with asyncio.timeout(PATIENCE_S):
            await connecting
            await other
        world.faults.hung.add(0)
        draining = [world.start(world.ticket(name), (at,)) for name, at in (("d", 1), ("e", 2))]
        await world.faults.strike()
        draining[0].cancel()
        assert (await failure(draining[0])).quarantined
        assert isinstance(await failure(world.start(world.ticket("f"), (5, 6))), CapacityExceeded)
        world.faults.heal()
        async with asyncio.timeout(PATIENCE_S):
            await draining[0].quiesced()
            await draining[1]
        await world.pull(world.ticket("g"), (5, 6))


async def test_a_stale_pull_is_quiescent_and_releases_nothing(world, monkeypatch):
    monkeypatch.setattr(open_pulls, "EXPLAIN_S", PATIENCE_S)
    world.faults.hung.add(0)
    handle = world.start()
    await world.faults.strike()
    world.producer.revoke("request-1")
    world.faults.heal()
    error = await failure(handle)
    assert isinstance(error, StaleLease)
    assert not error.quarantined
    assert (error.request_id, error.ended_by) == ("request-1", REVOKED)
    await patiently(handle.quiesced())
    record = await world.record()
    assert (record.code, record.phase, record.quarantined) == ("stale_lease", "fence", False)
    assert (record.nbytes, record.nbytes_wanted) == (4 * BLOCK_BYTES, 4 * BLOCK_BYTES)
    assert record.lease_ended_by == REVOKED
    assert [type(event) for event in world.events][-2:] == [events.PullFailed, events.TransferQuiesced]


async def test_a_failure_keeps_its_blocks_until_the_data_plane_is_done():
    async with opened(ranks=2) as world:
        world.faults.hung |= {0, 1}
        handle = world.start()
        await world.faults.strike(2)
        world.faults.failing[0] = "bounds"
        world.faults.hung.remove(0)
        error = await failure(handle)
        assert (error.code, error.quarantined) == ("protocol_violation", True)
        (kept,) = world.consumer.snapshot().quarantined
        assert (kept.reason, kept.num_blocks) == ("bounds", 2)
        record = await world.record()
        assert (record.code, record.cause, record.phase) == ("protocol_violation", "bounds", "wire")
        assert record.peer == f"prefill-0/0/{world.producers[0].incarnation}"
        quiet = asyncio.ensure_future(handle.quiesced())
        world.faults.failing.clear()
        assert isinstance(await failure(world.start(world.ticket("again"), (1, 2))), BlockIdsInvalid)
        assert not quiet.done()
        world.faults.heal()
        await patiently(quiet)
        await world.pull(world.ticket("once more"))


async def test_a_cancelled_pull_says_so_to_everyone_who_awaits_it(world):
    world.faults.hung.add(0)
    handle = world.start()
    await world.faults.strike()
    tasks = [await awaiting(handle.quiesced()), await awaiting(failure(handle))]
    handle.cancel()
    handle.cancel()
    error = await failure(handle)
    assert isinstance(error, TransferCancelled)
    assert error.quarantined
    assert handle.exception() is await tasks[1] is error
    assert repr(handle) == f"<PullHandle {handle.id}: transfer_cancelled, quarantined>"
    assert not tasks[0].done()
    world.faults.heal()
    await patiently(tasks[0])
    assert repr(handle) == f"<PullHandle {handle.id}: transfer_cancelled>"
    await world.records(1)


async def test_a_pull_canceled_while_its_peers_connect_is_quiescent_at_once(world):
    handle = world.start()
    await asyncio.sleep(0)
    handle.cancel()
    await handle.quiesced()
    assert isinstance(await failure(handle), TransferCancelled)
    record = await world.record()
    assert (record.code, record.phase, record.quarantined) == ("transfer_cancelled", "handshake", False)
    assert record.timings_s.keys() == {"handshake", "total"}
    await world.pull(world.ticket("again"))
    assert await ended(world, "again") == [RELEASED]


async def test_a_pull_that_is_cancelled_before_anything_of_it_has_run_ends(world):
    handle = world.start()
    handle.cancel()
    assert isinstance(await failure(handle), TransferCancelled)
    assert world.consumer.snapshot().pulls == 0


async def test_quiesced_waits_for_every_pull_of_the_request(world):
    world.minted.add(0)
    await world.connect()
    ticket, admit = world.early()
    first, last = world.start(ticket, (1, 2)), world.start(ticket, (5, 6))
    quiet = await awaiting(world.consumer.quiesced("request-1"))
    first.cancel()
    assert isinstance(await failure(first), TransferCancelled)
    async with asyncio.timeout(PATIENCE_S):
        await first.quiesced()
        await awaiting(last.quiesced())
        assert not quiet.done()
        admit()
        await asyncio.gather(last, quiet)


async def test_a_peer_that_hangs_is_found_by_its_deadline_and_let_go():
    async with opened(wire_s=0.2) as world:
        await world.connect()
        world.faults.hung.add(0)
        handle = world.start()
        error = await failure(handle)
        assert isinstance(error, DeadlineExceeded)
        assert (error.phase, error.quarantined) == ("wire", True)
        (dropped,) = await world.heard(PeerDropped)
        assert (dropped.code, dropped.peer) == ("deadline_exceeded", error.peer)
        world.faults.heal()
        await patiently(handle.quiesced())
        assert world.consumer.snapshot().dropped == {"deadline_exceeded": 1}


@pytest.mark.parametrize("inline_s_max", [0.0, 60.0])
@pytest.mark.parametrize("connected", [True, False])
async def test_a_ticket_that_is_admitted_late_is_read_once(connected, inline_s_max):
    async with opened(inline_s_max=inline_s_max) as world:
        if connected:
            first, admit = world.early("connect")
            admit()
            await world.pull(first)
            await world.idle()
        ticket, admit = world.early()
        world.faults.chunks.clear()
        world.faults.checks.clear()
        handle = world.start(ticket)
        (retried,) = await world.heard(events.TransferRetried)
        assert retried.pull_id == handle.id
        await world.checked(1)
        assert world.faults.chunks == [], "a byte was read in vain"
        admit()
        report = await patiently(handle)
        assert world.holds((1, 2), (3, 4))
        assert report.early == 1
        assert world.of(events.TransferRetried) == [retried], "told once"
        assert (report.early_bytes, report.nbytes, len(world.faults.chunks)) == (0, 4 * BLOCK_BYTES, 1)
        assert (await world.record()).report == report


async def test_expected_content_is_read_and_other_content_is_given_back_unread(world):
    digests = [[b"three", b"four"]]
    await world.pull(world.ticket(digests=digests), expected_digests=digests)
    assert world.holds((1, 2), (3, 4))
    batches = len(world.faults.batches)
    ticket = world.ticket("other", digests=[[b"three", b"five"]])
    error = await failure(world.start(ticket, expected_digests=digests))
    assert isinstance(error, ContentMismatch)
    assert len(world.faults.batches) == batches
    assert await ended(world, "other") == [RELEASED]


async def test_every_rank_that_can_be_reached_is_given_its_ticket_back(monkeypatch):
    async with opened(ranks=2) as world:
        connect_link = PeerPool.connect_link

        async def connect_one(self, member):
            if member.address.rank == 0:
                raise PeerLost("as the test says")
            return await connect_link(self, member)

        monkeypatch.setattr(PeerPool, "connect_link", connect_one)
        with pytest.raises(PeerLost, match="as the test says"):
            await world.consumer.release(world.ticket())
        assert await patiently(world.producers[1].wait_offer("request-1")) == RELEASED


async def test_closing_cancels_what_is_open_and_takes_no_more(world):
    world.minted.add(0)
    async with open_worker(config("decode-1"), cache_of()) as other:
        await other.pull(world.ticket("first", (0,)), [[0]])
        ticket, _ = world.early()
        open_pull = other.start_pull(ticket, [[1, 2]])
        connecting = other.start_pull(world.ticket("connecting"), [[5, 6]])
    for handle in (open_pull, connecting):
        assert handle.done()
        await handle.quiesced()
    assert isinstance(open_pull.exception(), TransferCancelled)
    assert "closing" in str(open_pull.exception())
    assert isinstance(await failure(other.start_pull(world.ticket("late"), [[1, 2]])), WorkerClosed)
    with pytest.raises(WorkerClosed):
        await other.release(world.ticket("later"))


@pytest.mark.parametrize("connected", [True, False])
async def test_a_pull_ends_although_its_worker_is_cancelled_while_it_closes(world, connected, monkeypatch):
    """What went on with it is cut short, whether its producer is met or is asked how a lease has ended."""
    handles, entered, never = [], asyncio.Event(), asyncio.Event()

    async def wait(*_, **__):
        entered.set()
        await never.wait()

    async def live():
        async with open_worker(config("decode-1"), cache_of()) as other:
            ticket = world.ticket()
            if connected:
                await other.pull(world.ticket("first", (0,)), [[0]])
                monkeypatch.setattr("kvflow.rendezvous.dialer.Link.ask_end", wait)
                world.producer.revoke("request-1")
            else:
                monkeypatch.setattr("kvflow.worker.peers.PeerPool.connect_ticket", wait)
            handles.append(other.start_pull(ticket, [[1, 2]]))
            await entered.wait()

    life = asyncio.ensure_future(live())
    async with asyncio.timeout(PATIENCE_S):
        await entered.wait()
        for _ in range(100):  # it leaves, and waits for what goes on
            await asyncio.sleep(0)
        life.cancel()
        await asyncio.wait([life])
        (handle,) = handles
        assert isinstance(await failure(handle), StaleLease if connected else TransferCancelled)
        await handle.quiesced()


async def test_draining_waits_for_open_and_connecting_pulls_and_takes_no_more():
    async with opened() as world:
        ticket, admit = world.early("early")
        early = world.start(ticket, (5, 6))
        connecting = world.start(world.ticket("connecting"))
        drained = asyncio.ensure_future(world.consumer.drain(PATIENCE_S))
        await world.heard(events.TransferRetried)
        late = world.start(world.ticket("late"), (0, 3))
        assert isinstance(await failure(late), WorkerDraining)
        async with asyncio.timeout(PATIENCE_S):
            await connecting
            assert not drained.done()
            admit()
            await early
            report = await drained
        assert report.complete
