"""Every call of ``pull`` ends in one record, whatever ended it, wherever it was; and the record says how far it was."""

import asyncio
import inspect

import msgspec
import pytest

from kvflow import errors
from kvflow.rendezvous.dialer import LeaseEnd
from kvflow.transfer.events import TransferCompleted, TransferFailed, TransferQuiesced
from kvflow.transfer.queues import Limits
from kvflow.transport.base import Carrier, FenceFailed, PeerFailed, ReadCompleted, ReadFailed
from kvflow.worker.programs import Peer

from .test_consumer import WALL_S, World, ended

MADE = {
    errors.ArgumentInvalid: ("ticket", "a Ticket", None),
    errors.RequestUnknown: ("r",),
    errors.ReleaseMismatch: ("the ticket", "ticket format", "kvf1", "kvf2"),
    errors.LayoutMismatch: ("dtype", "float16", "bfloat16"),
    errors.CapacityExceeded: ("open pulls", 1),
    errors.PeerRefused: ("version_unsupported", "too old"),
}
"""Errors that take more than a message."""
KNOWN = {errors.StaleLease: {"ended_by": "gone"}, errors.DeadlineExceeded: {"phase": "connect"}}
KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.KvflowError)]
OTHERS = [RuntimeError("a defect"), MemoryError(), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]


@pytest.fixture
async def world():
    return World()


def the_failure(world):
    """Return the only record of the only pull."""
    (record,) = world.reports.of((TransferCompleted, TransferFailed))
    assert isinstance(record, TransferFailed)
    return record


async def failing(world, kind, **how):
    with pytest.raises(kind) as caught:
        await ended(await world.pull(**how))
    return caught.value, the_failure(world)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_every_kind_of_error_is_one_record(world, kind):
    ticket = world.ticket()
    world.pool.lost = kind(*MADE.get(kind, ("what happened",)), **KNOWN.get(kind, {}))
    error, record = await failing(world, kind, ticket=ticket, local_request_id="ours")
    assert error is world.pool.lost
    assert (record.code, record.detail, record.remedy) == (kind.code, error.message, kind.default_remedy)
    assert (record.request_id, record.local_request_id) == ("request-1", "ours")
    phase = "connect" if kind is errors.DeadlineExceeded else "handshake"
    assert (record.phase, record.peer) == (phase, "prefill-0/0/" + "0" * 32)


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
async def test_what_is_no_error_of_ours_is_one_record_too(error):
    world = World()
    call = world.consumer.ending.begin(world.ticket(), "ours")
    world.consumer.ending.fail(call, error, quarantined=False)
    world.consumer.ending.fail(call, error, quarantined=False)
    record = the_failure(world)
    cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    assert record.code == ("transfer_cancelled" if cancelled else "transfer_failed")
    assert record.detail


async def test_a_defect_of_ours_is_a_record_and_the_defect_is_raised(world):
    def divide(peers):
        raise ZeroDivisionError("by zero")

    world.pool.legs = divide
    _, record = await failing(world, ZeroDivisionError)
    assert (record.code, record.phase, record.transport) == ("transfer_failed", "plan", "cma")
    assert "ZeroDivisionError: by zero" in record.detail


@pytest.mark.parametrize(
    ("kind", "phase", "how"),
    [
        (errors.ArgumentInvalid, "check", {"priority": "urgent"}),
        (errors.BlockIdsInvalid, "check", {"blocks": (8,)}),
        (errors.BlockRangeMismatch, "plan", {"blocks": (1, 2, 3)}),
    ],
)
async def test_a_call_that_cannot_be_carried_out(world, kind, phase, how):
    world.clock.now += 5.0
    _, record = await failing(world, kind, **how)
    assert (record.code, record.phase, record.nbytes_wanted) == (kind.code, phase, 0)
    assert record.timings_s.keys() == ({"total"} if phase == "check" else {"handshake", "total"})


async def test_what_is_no_ticket(world):
    with pytest.raises(errors.ArgumentInvalid):
        await world.consumer.pull({"a": 1}, [[1]], local_request_id=7)
    record = the_failure(world)
    assert (record.phase, record.request_id, record.local_request_id) == ("check", "", "7")
    assert record.ticket_age_s is None


async def test_the_age_of_a_ticket_is_by_the_clock_of_its_producer(world):
    ticket = world.ticket()
    issued = msgspec.structs.replace(ticket.grants[0], issued_ms=int(1000 * (WALL_S + world.clock.now - 10.0)))
    ticket = msgspec.structs.replace(ticket, grants=(issued,))
    (member,) = ticket.members()
    world.pool.links[member.peer].clock_offset = type("Offset", (), {"ahead_s": 2.5})
    world.invalid = errors.TicketInvalid("forged")
    _, record = await failing(world, errors.TicketInvalid, ticket=ticket)
    assert record.ticket_age_s == pytest.approx(10.0, abs=0.01)  # nobody was met: by our own clock
    world.invalid, world.reports.events = None, []
    _, record = await failing(world, errors.BlockRangeMismatch, ticket=ticket, blocks=(1, 2, 3))
    assert record.ticket_age_s == pytest.approx(12.5, abs=0.01)


async def test_too_many_pulls():
    world = World(limits=Limits(pulls_max=1))
    first = await world.pull(world.ticket("a"), (1, 2))
    _, record = await failing(world, errors.CapacityExceeded, ticket=world.ticket("b"), blocks=(5, 6))
    assert (record.request_id, record.phase) == ("b", "plan")
    world.deliver()
    await ended(first)


async def test_of_several_peers_the_one_that_cannot_be_met_is_named():
    world = World(ranks=2)
    ticket = world.ticket()
    other = [member.peer for member in ticket.members()][1]
    meet = world.pool.meet

    async def meet_one(member):
        if member.peer == other:
            raise errors.PeerRefused("busy", "later")
        return await meet(member)

    world.pool.meet = meet_one
    _, record = await failing(world, errors.PeerRefused, ticket=ticket)
    assert (record.phase, record.peer) == ("handshake", str(other))


async def test_carriers_of_several_peers_are_joined():
    world = World(ranks=2)
    ticket = world.ticket()
    for member, name in zip(ticket.members(), ["cma", "tcp"], strict=True):
        world.pool.peers[member.peer] = Peer(world.pool.links[member.peer], Carrier(name, "addresses"))
    task = await world.pull(ticket)
    world.deliver()
    assert (await ended(task)).transport == "cma+tcp"


async def test_cancelled_while_its_peer_is_met(world):
    never = asyncio.get_running_loop().create_future()

    async def meet(member):
        await never

    ticket = world.ticket()
    world.pool.meet = meet
    task = await world.pull(ticket)
    world.clock.now += 2.0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    record = the_failure(world)
    assert (record.code, record.phase, record.quarantined) == ("transfer_cancelled", "handshake", False)
    assert record.timings_s == {"handshake": 2.0, "total": 2.0}


async def test_cancelled_before_it_was_dispatched():
    world = World(limits=Limits(batch_bytes=1, peer_bytes=1))
    first = await world.pull(world.ticket("a"), (1, 2))
    second = await world.pull(world.ticket("b"), (5, 6))
    world.clock.now += 2.0
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(second)
    record = the_failure(world)
    assert (record.request_id, record.phase, record.quarantined) == ("b", "queue", False)
    assert (record.nbytes, record.nbytes_wanted) == (0, 2 * 512)
    assert record.timings_s == {"handshake": 0.0, "bind": 0.0, "queue": 2.0, "total": 2.0}
    kinds = [type(event) for event in world.reports.events if getattr(event, "request_id", "") == "b"]
    assert kinds == [TransferFailed, TransferQuiesced], "first why, then that its blocks are free"
    first.cancel()


async def test_a_read_that_fails_says_how_much_had_arrived():
    world = World(limits=Limits(batch_bytes=1))  # a batch for each block
    task = await world.pull()
    one, other = world.transport.posted
    world.clock.now += 1.0
    world.say(ReadCompleted(one.read_id, 0.25, 0.0))
    world.clock.now += 2.0
    world.say(ReadFailed(other.read_id, "bounds", "not there"))
    with pytest.raises(errors.ProtocolViolation):
        await ended(task)
    record = the_failure(world)
    assert (record.code, record.cause, record.phase) == ("protocol_violation", "bounds", "wire")
    assert (record.nbytes, record.nbytes_wanted, record.transport) == (one.nbytes, one.nbytes + other.nbytes, "cma")
    assert record.timings_s["wire"] == 2.75
    assert record.timings_s["total"] == 3.0


async def test_what_is_read_again_is_counted_once():
    world = World(limits=Limits(batch_bytes=1))
    task = await world.pull()
    for read in world.transport.posted:
        (share,) = read.leases
        world.say(ReadCompleted(read.read_id, 0.0, 0.0, unheld=frozenset({(share.slot, share.epoch)})))
    nbytes = sum(read.nbytes for read in world.transport.posted)
    world.judge(world.transport.posted[-1])  # held, but not everything was served: all is read again
    assert len(world.transport.posted) == 4
    world.complete(world.transport.posted[2])
    world.consumer.on_peer_dropped(world.transport.posted[0].peer, "peer_lost", "gone")
    with pytest.raises(errors.PeerLost):
        await ended(task)
    record = the_failure(world)
    assert (record.nbytes, record.nbytes_wanted) == (nbytes // 2, nbytes)


async def test_a_peer_that_is_lost_before_anything_was_dispatched():
    world = World(limits=Limits(batch_bytes=1, peer_bytes=1))
    tasks = [await world.pull(world.ticket(name), blocks) for name, blocks in {"a": (1,), "b": (2,)}.items()]
    world.say(PeerFailed(world.transport.posted[0].peer, "peer_lost", "gone"))
    for task in tasks:
        with pytest.raises(errors.PeerLost):
            await ended(task)
    phases = {event.request_id: event.phase for event in world.reports.of(TransferFailed)}
    assert phases == {"a": "wire", "b": "queue"}


async def test_a_fence_that_fails(world):
    task = await world.pull()
    (read,) = world.transport.posted
    world.complete(read)
    world.clock.now += 0.5
    world.say(FenceFailed(read.fences[0].fence_id, "peer_lost", "gone"))
    with pytest.raises(errors.PeerLost):
        await ended(task)
    record = the_failure(world)
    assert (record.phase, record.nbytes, record.timings_s["fence"]) == ("fence", read.nbytes, 0.5)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (LeaseEnd("expired", 2.5), "it expired 2.500 s ago"),
        (LeaseEnd("used", 1.0), "it was used before, and released 1.000 s ago"),
        (LeaseEnd(), "it ended, reason unknown"),
    ],
)
async def test_of_a_stale_lease_the_producer_is_asked(world, end, words):
    ticket = world.ticket()
    (link,) = world.pool.links.values()
    link.end = end
    task = await world.pull(ticket)
    (read,) = world.transport.posted
    world.complete(read)
    world.judge(read, by=1)
    with pytest.raises(errors.StaleLease, match=words) as caught:
        await ended(task)
    grant = ticket.grants[0]
    assert link.asked == [(grant.slot, grant.epoch_value)]
    record = the_failure(world)
    assert (record.code, record.phase, record.nbytes) == ("stale_lease", "fence", read.nbytes)
    assert (record.lease_ended_by, record.lease_ended_s) == (end.ended_by, end.ended_s)
    assert (caught.value.ended_by, caught.value.ended_s) == (end.ended_by, end.ended_s)
    assert record.detail.endswith(words)
    assert [type(event) for event in world.reports.events][-2:] == [TransferFailed, TransferQuiesced]


async def test_a_stale_lease_of_a_producer_that_is_gone_is_not_asked_about(world):
    task = await world.pull()
    (read,) = world.transport.posted
    world.complete(read)
    world.pool.links.clear()
    world.judge(read, by=1)
    with pytest.raises(errors.StaleLease) as caught:
        await ended(task)
    assert caught.value.ended_by == the_failure(world).lease_ended_by == "unknown"


async def test_a_pull_that_is_cancelled_while_the_producer_is_asked_leaves_the_record_of_a_stale_lease(world):
    task = await world.pull()
    (link,) = world.pool.links.values()
    link.answering.clear()
    (read,) = world.transport.posted
    world.complete(read)
    world.judge(read, by=1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert link.asked
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    record = the_failure(world)
    assert (record.code, record.lease_ended_by) == ("stale_lease", "unknown")


async def test_what_is_known_already_is_not_asked_again(world):
    ticket = world.ticket()
    (link,) = world.pool.links.values()
    world.pool.lost = errors.StaleLease("it is gone", ended_by="gone")
    error, record = await failing(world, errors.StaleLease, ticket=ticket)
    assert error is world.pool.lost
    assert (record.lease_ended_by, link.asked) == ("gone", [])


async def test_a_caller_that_goes_when_its_pull_is_complete_leaves_one_record(world):
    task = await world.pull()
    world.deliver()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ended(task)
    await asyncio.sleep(0)
    assert len(world.reports.of(TransferCompleted)) == 1
    assert world.reports.of(TransferFailed) == []


async def test_a_pull_of_nothing_has_its_record(world):
    report = await ended(await world.pull(blocks=(-1, -1), local_request_id="ours"))
    await asyncio.sleep(0)
    (record,) = world.reports.of(TransferCompleted)
    assert (record.report, record.local_request_id) == (report, "ours")
    assert (report.nbytes, report.transport) == (0, "cma")
    assert report.timings_s.keys() == {"handshake", "bind", "total"}


async def test_a_worker_that_closes_ends_its_pulls_with_a_record_each(world):
    tasks = [await world.pull(world.ticket(name), blocks) for name, blocks in {"a": (1, 2), "b": (5, 6)}.items()]
    world.consumer.close()
    for task in tasks:
        with pytest.raises(errors.TransferCancelled, match="closing"):
            await ended(task)
    assert sorted(event.request_id for event in world.reports.of(TransferFailed)) == ["a", "b"]
    world.reports.events.clear()
    _, record = await failing(world, errors.WorkerClosed)
    assert record.phase == "check"


async def test_the_record_has_what_operators_look_for(world):
    _, record = await failing(world, errors.BlockRangeMismatch, blocks=(1, 2, 3))
    assert world.reports.contexts[world.reports.events.index(record)] == {
        "remote_engine_id": "prefill-0",
        "remote_endpoint": "tcp://127.0.0.1:5000",
        "num_remote_blocks": 2,
        "num_local_blocks": 3,
    }
