"""Kept leases: the engine ends them, or an offer that needs a slot; readers and time do not."""

import asyncio

import pytest

from kvflow.config import WorkerConfig
from kvflow.errors import (
    ArgumentInvalid,
    AuthenticationFailed,
    BlockIdsInvalid,
    CapacityExceeded,
    ConfigInvalid,
    DeadlineExceeded,
    KvflowError,
    PeerLost,
    StaleLease,
    WorkerClosed,
    WorkerDraining,
)
from kvflow.events import LeaseEnded, OfferAdmitted
from kvflow.leases.table import Reader
from kvflow.rendezvous.issuer import TicketMint, draw_pair
from kvflow.rendezvous.questions import AskKept
from kvflow.worker.askers import open_reader
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import run_worker
from tests.helpers.waiting import patiently, until
from tests.ports import free_port

from .asking import LONG_MS, Asked
from .helpers import PATIENCE_S, SECRET, cache_of, lease_of, turns
from .pulling import FaultyNetwork, config, failure, opened
from .virtual import virtual

SLOTS = 3
ALONE = Reader("decode-0", 0, 1)


def chain(*blocks, of="a"):
    """Return a digest for each block that covers those before."""
    return [f"{of}: {blocks[:end]}".encode() for end in range(1, len(blocks) + 1)]


def keep(worker, name, *blocks, **how):
    return worker.keep(name, [list(blocks)], 4 * len(blocks), [chain(*blocks, **how)])


def held(worker):
    return {lease.request_id: lease.kind == "kept" for lease in worker.snapshot().held_leases}


@pytest.fixture
async def producer(reports):
    async with open_worker(config(lease_slots=SLOTS), cache_of(10), hooks=[reports]) as producer:
        yield producer
        producer.check()


async def test_the_oldest_that_is_kept_leaves_its_slot_to_an_offer(producer, reports):
    oldest = keep(producer, "oldest", 1)
    producer.offer("offer", [[2]], 4)
    keep(producer, "newer", 1)
    waiting = asyncio.ensure_future(producer.wait_offer("oldest"))
    await asyncio.sleep(0)
    offered = producer.offer("another", [[3]], 4)
    assert lease_of(offered)[0] == lease_of(oldest)[0]
    assert lease_of(offered)[1] > lease_of(oldest)[1]
    assert await asyncio.wait_for(waiting, PATIENCE_S) == "revoked"
    assert held(producer) == {"offer": False, "newer": True, "another": False}
    producer.check()
    keep(producer, "newest", 5)  # a slot of what is kept goes on to what is kept
    assert held(producer) == {"offer": False, "another": False, "newest": True}
    assert (await producer.offer_when_possible("third", [[6]], 4)).request_id == "third"
    for take in (lambda: producer.offer("fourth", [[7]], 4), lambda: keep(producer, "fourth", 7)):
        with pytest.raises(CapacityExceeded):
            take()
    ends = [(end.request_id, end.outcome, end.kind) for end in reports.of(LeaseEnded)]
    assert ends == [(name, "revoked", "kept") for name in ("oldest", "newer", "newest")]
    assert [(each.request_id, each.lease_s) for each in reports.of(OfferAdmitted)][:2] == [("oldest", 0), ("offer", 30)]


async def test_a_name_that_lost_its_slot_is_free_again(producer):
    for turn in range(3):
        keep(producer, "kept", 1, of=str(turn))
        for index in range(SLOTS):
            producer.offer(str(index), [[2]], 4)
        assert "kept" not in held(producer)
        producer.revoke("0")
        keep(producer, "kept", 1, of="in between")
        assert producer.revoke("kept")
        for index in range(1, SLOTS):
            producer.revoke(str(index))
    assert held(producer) == {}


async def test_an_offer_that_fails_ends_nothing(producer):
    for name in ("a", "b", "c"):
        keep(producer, name, 1)
    for wrong in ([[99]], [["x"]], [[1, 1, 1, 1]]):
        with pytest.raises(BlockIdsInvalid):
            producer.offer("wrong", wrong, 4)
        assert list(held(producer)) == ["a", "b", "c"]
    assert producer.revoke("a")
    producer.offer("right", [[1]], 4)
    producer.check()


@pytest.mark.parametrize("digests", [None, [], [[]], [[b"one"]], [["text", b""]], [[b"", b""]]], ids=repr)
async def test_what_is_kept_has_a_digest_for_each_block(producer, digests):
    with pytest.raises(ArgumentInvalid):
        producer.keep("kept", [[1, 2]], 8, digests)
    assert held(producer) == {}


async def test_what_is_kept_is_found_and_read_while_its_worker_drains():
    async with opened(theirs={"drain_s": PATIENCE_S}) as world:
        keep(world.producer, "kept", 3, 4)
        offered = world.producer.offer("offered", [[5]], 4)
        draining = asyncio.ensure_future(world.producer.drain(PATIENCE_S))
        ticket, count = await find(world, chain(3, 4, 6))
        await world.pull(ticket)
        assert count == 2
        assert world.holds((1, 2), (3, 4))
        with pytest.raises(WorkerDraining):
            keep(world.producer, "late", 3)
        await world.pull(offered, (1,))
        assert not draining.done()
        assert world.producer.revoke("kept")  # the engine closes earlier
        assert (await draining).complete
        with pytest.raises(StaleLease):
            await world.pull(ticket)


@pytest.mark.parametrize(
    ("drain_s", "deadline_s", "ended_s"), [(10.0, 60.0, 10.0), (10.0, 3.0, 3.0), (10.0, 0.0, 0.0), (0.0, 60.0, 0.0)]
)
def test_what_is_kept_ends_after_drain_s_or_at_the_deadline(drain_s, deadline_s, ended_s):
    with virtual(theirs={"drain_s": drain_s}) as world:
        (producer,) = world.producers
        worker = producer.worker
        world.do(lambda: keep(worker, "kept", 1, 2), life=producer)
        report = world.do(lambda: worker.drain(deadline_s), life=producer)
        assert report.complete
        assert report.waited_s == pytest.approx(ended_s, abs=0.01)
        (end,) = producer.of(LeaseEnded)
        assert (end.request_id, end.outcome, round(end.held_s)) == ("kept", "revoked", ended_s)


def test_a_drain_that_is_given_up_ends_what_is_kept_all_the_same():
    with virtual(theirs={"drain_s": 10.0}) as world:
        (producer,) = world.producers
        world.do(lambda: keep(producer.worker, "kept", 1, 2), life=producer)
        draining = producer.process.create_task(producer.worker.drain(60.0), name="drive a drain")
        world.pass_time(5.0)
        draining.cancel()
        world.pass_time(4.0)
        assert world.do(lambda: held(producer.worker), life=producer) == {"kept": True}
        world.pass_time(2.0)
        assert world.do(lambda: held(producer.worker), life=producer) == {}


def test_with_nothing_kept_draining_does_not_wait():
    with virtual(theirs={"drain_s": 10.0}) as world:
        (producer,) = world.producers
        report = world.do(lambda: producer.worker.drain(60.0), life=producer)
        assert report.complete
        assert report.waited_s == pytest.approx(0.0, abs=0.01)


async def test_a_grant_ends_the_kept_lease_that_has_its_slot(producer):
    """The scheduler has forgotten what it kept, and its ranks have not heard of that yet."""
    mint = TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, block_sizes=[4])
    blocks = {"block_ids": [[1, 2]], "num_tokens": 8}
    grants = [mint.keep(str(index), **blocks, digests=[chain(1, 2)])[1] for index in range(SLOTS + 1)]
    grants.append(mint.offer("offer", **blocks)[1])
    assert not mint.retire("0")
    assert mint.retire("3")
    for grant in grants:
        producer.admit(grant, [chain(1, 2)] if grant.kind == "kept" else None)
        producer.check()
    assert held(producer) == {"2": True, "3": True, "offer": False}
    with pytest.raises(BlockIdsInvalid):
        producer.admit(grants[0])  # its slot has gone on
    with pytest.raises(ArgumentInvalid):
        producer.admit(mint.keep("4", **blocks, digests=[chain(1, 2)])[1], [[b"one"]])


def test_a_worker_on_its_thread_keeps_and_does_not_report_the_end():
    with run_worker(config(), cache_of(10)) as worker:
        keep(worker, "kept", 1)
        worker.offer("offered", [[2]], 4)
        assert worker.revoke("kept")
        assert worker.revoke("offered")
        assert [end.request_id for end in worker.finished()] == ["offered"]


async def find(world, digests, endpoint=None):
    return await patiently(world.consumer.find(endpoint or world.producer.endpoint, digests))


async def test_the_longest_prefix_is_found_and_read():
    async with opened() as world:
        kept = keep(world.producer, "kept", 3, 4)
        for asked, count in ((chain(3, 4), 2), (chain(3, 4, 5), 2), (chain(3), 1), (chain(3, 5), 1)):
            ticket, held_blocks = await find(world, asked)
            assert (ticket.to_params(), held_blocks) == (kept.to_params(), count)
            assert await find(world, [asked]) == (ticket, count)
            targets = [*(1, 2)[:count], *[-1] * (2 - count)]
            await world.pull(ticket, targets)
            assert world.holds(targets[:count], (3, 4)[:count])
        longer = keep(world.producer, "longer", 3, 4, 5)
        assert await find(world, chain(3)) == (longer, 1)
        world.producer.revoke("longer")
        assert await find(world, chain(3, 4, 5)) == (kept, 2)
        world.producer.revoke("kept")
        for nothing in (chain(3, 4), chain(7), [], [[]]):
            assert await find(world, nothing) == (None, 0)
        snapshot = world.producer.snapshot()
        assert (snapshot.found, snapshot.not_held) == (10, 2)  # an empty question is not sent


async def test_the_ticket_is_of_all_ranks_whichever_was_asked():
    async with opened(ranks=2) as world:
        ranks = [worker.rank_address for worker in world.producers]
        mint = TicketMint("prefill-0", ranks, cluster_secret=SECRET, block_sizes=[4])
        kept, grant = mint.keep("kept", block_ids=[[3, 4]], num_tokens=8, digests=[chain(3, 4)])
        first, second = world.producers
        first.admit(grant, [chain(3, 4)])
        assert await find(world, chain(3, 4), second.endpoint) == (None, 0)
        second.admit(grant, [chain(3, 4)])
        for worker in world.producers:
            ticket, count = await find(world, chain(3, 4), worker.endpoint)
            assert (ticket, count) == (kept, 2)
            await world.pull(ticket)
            assert world.holds((1, 2), (3, 4))


async def test_the_connection_that_was_used_longest_ago_is_closed():
    async with opened(ranks=2, network=(network := FaultyNetwork())) as world:
        world.consumer._consumer.prefixes._limit = 1
        first, second = (worker.endpoint for worker in world.producers)
        for endpoint in (first, second, second, first):
            assert await find(world, chain(3), endpoint) == (None, 0)
        assert network.dialed == [first, second, first]


async def test_a_reader_without_a_cache_finds_what_a_worker_holds(producer):
    kept = keep(producer, "kept", 3, 4)
    async with open_reader(config("scheduler")) as reader:
        assert await reader.find(producer.endpoint, chain(3, 4, 5)) == (kept, 2)
        assert await reader.find(producer.endpoint, [chain(4)]) == (None, 0)
        await reader.wait_settled(producer.endpoint, kept)
        manifest = await reader.read_manifest(producer.endpoint)
        assert manifest.identity.engine_id == "prefill-0"
        assert await reader.read_manifest(producer.endpoint) is manifest
        for wrong in ([b"", *chain(3)], [b"x" * 65], ["text"], 7):
            assert isinstance(await failure(reader.find(producer.endpoint, wrong)), ArgumentInvalid)
        assert isinstance(await failure(reader.find("nonsense", chain(3))), ConfigInvalid)
    await until(lambda: producer.snapshot().readers == ())


async def test_a_reader_waits_for_the_first_blocks_of_an_open_offer(producer):
    offers = [producer.offer_progressive(name, [[3]], 8, digests=[chain(3, 4, of=name)]) for name in ("told", "ended")]
    async with open_reader(config("scheduler")) as reader:
        found = [(await reader.find(producer.endpoint, chain(3, 4, of=name), 1.0))[0] for name in ("told", "ended")]
        waiting = [asyncio.create_task(reader.wait_settled(producer.endpoint, ticket)) for ticket in found]
        offers[0].advance(4, [[]])
        offers[1].abort()
        await waiting[0]
        assert isinstance(await failure(waiting[1]), StaleLease)


async def test_an_error_behind_a_reader_is_raised_as_it_is(producer):
    async def fail():
        async with open_reader(config("scheduler")) as reader:
            await reader.find(producer.endpoint, chain(3))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()


async def test_a_reader_needs_a_secret():
    with pytest.raises(ConfigInvalid):
        async with open_reader(WorkerConfig(engine_id="scheduler")):
            pass


async def test_a_worker_with_a_key_of_its_own_is_found_by_that_key():
    (private, public), (ours, our_public), (_, other) = draw_pair(), draw_pair(), draw_pair()
    theirs = config(private_key=private, allowed_keys=(our_public,))
    async with (
        open_worker(theirs, cache_of(10)) as producer,
        open_worker(config("decode-0", private_key=ours, allowed_keys=(public,)), cache_of(10)) as consumer,
    ):
        kept = keep(producer, "kept", 3)
        endpoint = f"{producer.endpoint}#{public}"
        assert await consumer.find(endpoint, chain(3)) == (kept, 1)
        await consumer.pull(kept, [[5]])
        for wrong in ("", f"#{other}", "#", "#nonsense"):
            error = await failure(consumer.find(producer.endpoint + wrong, chain(3)))
            assert isinstance(error, AuthenticationFailed)
            assert "Name the server's public key" in error.remedy
        consumer.allow_keys([other])
        assert isinstance(await failure(consumer.find(endpoint, chain(3))), AuthenticationFailed)
        consumer.allow_keys([public])
        assert await consumer.find(endpoint, chain(3)) == (kept, 1)


@pytest.mark.parametrize(
    "digests", [b"flat", "text", [b""], [bytes(65)], [[b"x", 7]], [b"y", [b"x"]], [7], None, 7], ids=repr
)
async def test_a_question_is_made_of_digests(digests):
    async with opened() as world:
        with pytest.raises(ArgumentInvalid):
            await find(world, digests)
        for wrong in ({"wait_s": -1.0}, *({"at_least": value} for value in (0, -1, "1", 1.5))):
            with pytest.raises(ArgumentInvalid):
                await world.consumer.find(world.producer.endpoint, chain(3), **wrong)


async def test_who_cannot_be_asked_is_named(producer):
    stranger = config("decode-1", cluster_secret="another secret of the tests, long enough")
    async with open_worker(stranger, cache_of()) as worker:
        for _ in range(2):
            assert isinstance(await failure(worker.find(producer.endpoint, chain(3))), AuthenticationFailed)
    async with open_worker(config("decode-0", connect_s=0.2), cache_of()) as worker:
        assert isinstance(await failure(worker.find("no endpoint", chain(3))), ConfigInvalid)
        closed = f"tcp://127.0.0.1:{free_port()}"
        assert isinstance(await failure(worker.find(closed, chain(3))), PeerLost | DeadlineExceeded)
        left = asyncio.ensure_future(worker.find(closed, chain(3)))
        await asyncio.sleep(0)
    assert isinstance(await failure(left), KvflowError)
    assert isinstance(await failure(worker.find(producer.endpoint, chain(3))), WorkerClosed)


def test_a_worker_on_its_thread_finds():
    with run_worker(config(), cache_of(10)) as producer, run_worker(config("decode-0"), cache_of(10)) as consumer:
        kept = keep(producer, "kept", 3)
        assert consumer.find(producer.endpoint, chain(3, 4)).result(PATIENCE_S) == (kept, 1)
        consumer.pull(kept, [[5]]).result(PATIENCE_S)


# --- what is told of it ---


def long(*tokens):
    """Return digests that differ in their first bytes."""
    return [f"{hash(tokens[:end]):016x}".encode() for end in range(1, len(tokens) + 1)]


def keep_long(worker, name, *blocks):
    digests = long(*blocks)
    worker.keep(name, [list(blocks)], 4 * len(blocks), [digests])
    return digests[-1][:8]


class Following:
    """Follows what a worker keeps, and takes one answer at a time."""

    def __init__(self, reader, worker):
        self._told = reader.follow_kept(worker.endpoint)
        self.known = set()

    async def next(self):
        told = await patiently(anext(self._told))
        self.known = (set() if told.is_anew else self.known) - {*told.gone} | {*told.new}
        return told


async def test_who_follows_a_worker_is_told_what_it_keeps_and_no_more(producer):
    async with open_reader(config(engine_id="decode-0")) as reader:
        following = Following(reader, producer)
        told = await following.next()
        assert (told.is_anew, told.is_all, following.known) == (True, True, set())
        first, second = keep_long(producer, "kept:1", 1, 2), keep_long(producer, "kept:2", 1, 2, 3)
        producer.offer("offer", [[4]], 4, digests=[long(9)])
        while len(following.known) < 2:
            told = await following.next()
        assert (following.known, told.is_anew) == ({first, second}, False)
        producer.revoke("kept:2")
        await following.next()
        assert following.known == {first}
        other = Following(reader, producer)
        await other.next()
        assert other.known == {first}


async def test_a_question_for_what_is_kept_waits_until_that_changes(producer):
    first = Asked(producer, AskKept())
    known = (await first.answer()).until
    waiting = Asked(producer, AskKept(since=known, begun=known, wait_ms=LONG_MS))
    producer.offer("offer", [[4]], 4, digests=[chain(4)])
    producer.revoke("offer")
    await turns(20)
    assert waiting.answers == []
    end = keep_long(producer, "kept:1", 1, 2)
    assert (await waiting.answer()).new == end


async def test_a_question_for_what_is_kept_is_answered_when_its_time_is_over(producer):
    known = (await Asked(producer, AskKept()).answer()).until
    answer = await Asked(producer, AskKept(since=known, begun=known, wait_ms=1)).answer()
    assert (answer.new, answer.gone, answer.is_all) == (b"", b"", True)


async def test_a_worker_that_must_not_tell_tells_nothing():
    async with (
        open_worker(config(tell=False), cache_of(10)) as producer,
        open_reader(config(engine_id="decode-0")) as reader,
    ):
        keep_long(producer, "kept:1", 1, 2)
        assert [told async for told in reader.follow_kept(producer.endpoint)] == []
        assert (await reader.find(producer.endpoint, [long(1, 2)]))[1] == 2


async def test_who_follows_learns_that_the_link_has_ended():
    async with open_reader(config(engine_id="decode-0")) as reader:
        async with open_worker(config(), cache_of(10)) as producer:
            following = Following(reader, producer)
            await following.next()
        with pytest.raises(PeerLost):
            await following.next()
