"""What questions cost a worker: room while they wait, the loop while they are answered; and to whom it tells what."""

import asyncio
import tracemalloc
from collections import Counter
from functools import partial

import pytest

from kvflow.errors import CapacityExceeded
from kvflow.leases.table import Reader
from kvflow.leases.tickets import MAC_BYTES, LeaseName
from kvflow.rendezvous.issuer import TicketMint, draw_pair
from kvflow.rendezvous.questions import (
    LEASES_ASKED_MAX,
    AskHeld,
    AskSettled,
    NoRoom,
    Settled,
    Withdraw,
    decode_question,
    encode,
)
from kvflow.worker import answers
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import until

from .asking import ASKER, LONG_MS, OTHER, Asked, answered, chain, held, named, settled, settled_of
from .helpers import PATIENCE_S, SECRET, Clock, cache_of, lease_of, turns
from .pulling import config, failure, opened
from .virtual import virtual

KIB = 1 << 10


def digests_of(number, count, nbytes=16):
    """Return digests that no other number has."""
    return tuple((number << 32 | at).to_bytes(nbytes) for at in range(count))


def early_lease(number):
    """Return the name of a lease that never comes."""
    return LeaseName(number % 200, (1 << 62) + number, bytes(MAC_BYTES))


def waiting(worker):
    """Return how many questions wait, and bytes of all of them as they are counted."""
    asked = worker._leases.answers
    return sum(map(len, asked._of.values())), asked._sizes.total()


def give_back(worker, ticket, reader=ASKER):
    """Release a ticket that was not read; return the worker's answer."""
    (answer,) = worker._leases.on_release([lease_of(ticket)], reader, read=False)
    return answer


@pytest.fixture
async def producer():
    async with open_worker(config(lease_slots=256), cache_of(40)) as producer:
        yield producer
        producer.check()


@pytest.fixture
def room(monkeypatch):
    """Have workers keep this many bytes of questions, and so many of each connection whatever the others take."""

    def limit(nbytes, reserved=0):
        monkeypatch.setattr(answers, "WAITING_BYTES_MAX", nbytes)
        monkeypatch.setattr(answers, "RESERVED_BYTES", reserved)

    return limit


# --- room ---


@pytest.mark.parametrize(
    "make",
    [
        lambda number: AskHeld(digests_of(number, 2400), LONG_MS, 1),
        lambda number: AskHeld(digests_of(number, 4096, 9), LONG_MS, 1),
        lambda number: AskHeld(digests_of(number, 2), LONG_MS, 1),
        lambda number: AskSettled((early_lease(number),), (1 << 20,) * 256, 1, LONG_MS),
        lambda number: AskSettled(tuple([early_lease(number + at) for at in range(LEASES_ASKED_MAX)]), (), 1, LONG_MS),
    ],
    ids=["48 KiB", "the most digests", "short", "the most groups", "the most leases"],
)
async def test_a_question_that_waits_costs_what_it_is_counted_for(producer, make):
    questions, said = [encode(make(number)) for number in range(100)], []
    assert max(map(len, questions)) <= 48 * KIB
    tracemalloc.start()
    try:
        for nonce, question in enumerate(questions):
            answer = partial(said.append, nonce)
            producer._leases.answers.ask("key", decode_question(question, peer="a member"), ASKER, answer, nonce)
        traced, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    count, counted = waiting(producer)
    assert (count, said) == (100, [])
    assert traced <= counted


@pytest.mark.parametrize("own_keys", [False, True])
async def test_room_is_shared_by_connections_or_by_keys(room, own_keys):
    private, public = draw_pair()
    keys = {"private_key": private, "allowed_keys": (public,)} if own_keys else {}
    async with open_worker(config(**keys), cache_of(40)) as producer:
        held(producer, chain(0), key="first")
        room(8 * waiting(producer)[1])
        mine = [held(producer, chain(number), key="first") for number in range(1, 9)]
        assert sum(each.answers == [] for each in mine) == 3, "half of the room"
        newcomers = [
            held(producer, chain(9), key="second", reader=ASKER),
            held(producer, chain(9), key="third", reader=OTHER),
        ]
        assert [each.answers != [] for each in newcomers] == [own_keys, False]


async def test_many_connections_that_take_all_they_can_leave_room_for_one_more(producer, room):
    room(1 << 20, 64 * KIB)
    for key in range(50):
        while held(producer, chain(key), key=key).answers == []:
            pass
    assert waiting(producer)[1] <= (1 << 20) + 50 * 64 * KIB
    assert held(producer, digests_of(1, 2400), key="newcomer").answers == []
    assert await held(producer, digests_of(1, 2400), key="newcomer").answer() == NoRoom(limit=1 << 20)


async def test_200_honest_finds_of_32k_tokens_wait_and_none_is_lost():
    async with opened(theirs={"lease_slots": 512}) as world:
        producer, endpoint = world.producer, world.producer.endpoint
        finds = [
            asyncio.ensure_future(world.consumer.find(endpoint, list(digests_of(number, 2000)), PATIENCE_S))
            for number in range(200)
        ]
        await until(lambda: waiting(producer)[0] == 200)
        for number in range(66):  # of somebody else
            assert held(producer, digests_of(1 << 20 | number, 4096, 9), key="other", nonce=number).answers == []
        assert not any(find.done() for find in finds)
        for number in range(200):
            producer.offer_progressive(str(number), [[]], 8000, digests=[list(digests_of(number, 2000))])
        async with asyncio.timeout(PATIENCE_S):
            assert [(ticket.request_id, count) for ticket, count in await asyncio.gather(*finds)] == [
                (str(number), 2000) for number in range(200)
            ]


async def test_who_finds_no_room_hears_what_to_do(room):
    room(1)
    async with opened() as world:
        error = await failure(world.consumer.find(world.producer.endpoint, chain(1), PATIENCE_S))
        assert isinstance(error, CapacityExceeded)
        where = f"bytes of questions that wait at {world.producer.endpoint}"
        assert (error.code, error.resource, error.limit) == ("capacity_exceeded", where, 1)
        assert str(error) == (
            f"no room for more {where}: the limit is 1 [capacity_exceeded] Ask again in a moment. "
            "A question that needs at_least so many digests waits with those from there on only."
        )
        assert await world.consumer.find(world.producer.endpoint, chain(1)) == (None, 0), (
            "what does not wait is answered"
        )
        offer = world.producer.offer_progressive("r", [[3]], 8)
        error = await failure(world.pull(offer.ticket))
        assert (error.code, error.resource) == ("capacity_exceeded", where)


# --- who is told ---


async def test_an_answer_is_made_for_no_more_than_a_millisecond(producer, monkeypatch):
    """Signing a grant of a long prompt takes some 0.1 ms. The asker asks again for the others."""
    clock, asked = Clock(), producer._leases.answers
    vouches = asked._vouches

    def sign(*name):
        clock.now += 0.0006
        return vouches(*name)

    monkeypatch.setattr(asked, "_clock", clock)
    monkeypatch.setattr(asked, "_vouches", sign)
    leases = tuple([named(producer.offer(f"r{at}", [[at + 1]], 4)) for at in range(5)])
    answer = await Asked(producer, AskSettled(leases, (9,), 0, LONG_MS)).answer()
    assert answer.leases == (*[Settled(4, ((),), sealed=True)] * 2, *[Settled()] * 3)


async def test_a_question_about_many_leases_waits_for_one_of_them(producer):
    mint = TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, block_sizes=[4])
    signed = [mint.offer(f"r{at}", block_ids=[[at + 1]], num_tokens=4) for at in range(3)]
    signed.append(mint.offer_progressive("open", [[30]], 8))
    producer.admit(signed[3][1])
    leases = [named(ticket) for ticket, _ in signed]
    asked = Asked(producer, AskSettled(tuple(leases), (9,), 4, LONG_MS))
    assert waiting(producer)[0] == 1
    assert asked.answers == []
    producer.admit(signed[2][1])
    comes, open_, admitted = Settled(), Settled(0, ((),)), Settled(4, ((),), sealed=True)
    assert (await asked.answer()).leases == (comes, comes, admitted, open_)
    assert waiting(producer) == (0, 0)


async def test_a_lease_that_comes_later_is_told_to_who_has_the_ticket(producer):
    mint = TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, block_sizes=[4])
    ticket, grant = mint.offer_progressive("r", [[5]], 8)
    liar = Asked(producer, AskSettled((named(ticket, bytes(MAC_BYTES)),), (0,), 4, LONG_MS))
    honest = settled(producer, ticket, 0, above=4)
    producer.admit(grant)
    assert await liar.answer() == answered(ended="unknown")
    assert honest.answers == []
    producer.advance("r", 4)
    assert await honest.answer() == answered(4, ((5,),))


def test_who_has_no_ticket_does_not_keep_a_lease():
    with virtual(lease_s=10.0) as world:
        (producer,) = world.producers
        worker, said = producer.worker, []
        offer = world.do(lambda: worker.offer_progressive("r", [[3]], 8), life=producer)
        ask = AskSettled((named(offer.ticket, bytes(MAC_BYTES)),), (0,), 8, 60_000)
        world.do(lambda: worker._leases.answers.ask("key", ask, ASKER, said.append, 0), life=producer)
        world.pass_time(11.0)
        assert world.do(worker.snapshot, life=producer).held_leases == ()
        assert said == [answered(ended="unknown")]


# --- turns of the loop ---


class Turns:
    """How many answers were made in each turn of the loop, where each takes ``each_s`` of a clock."""

    def __init__(self, worker, monkeypatch, each_s):
        self.made = Counter()
        self._turn, self._each_s = 0, each_s
        self._answers, self._lock = worker._leases.answers, worker._leases._lock
        self._clock = self._answers._clock = Clock()
        make = self._answers._settled
        monkeypatch.setattr(self._answers, "_settled", lambda *lease: self._count() or make(*lease))
        self._next()

    def _next(self):
        self._turn += 1
        asyncio.get_running_loop().call_soon(self._next)

    def _count(self):
        self.made[self._turn] += 1
        self._clock.now += self._each_s


@pytest.mark.parametrize("ends", ["sealed", "in time"])
async def test_no_turn_of_the_loop_makes_answers_for_more_than_a_millisecond(producer, monkeypatch, ends):
    offer = producer.offer_progressive("r", [[3]], 8)
    made = Turns(producer, monkeypatch, 0.0004).made
    asked = [settled(producer, offer.ticket, 0, above=8, wait_ms=LONG_MS, nonce=nonce) for nonce in range(100)]
    if ends == "sealed":
        offer.seal([[4]])
    else:
        for each in list(producer._leases.answers._of["connection"]):
            asyncio.get_running_loop().call_soon(producer._leases.answers._end, each)
    for each in asked:
        assert (await settled_of(each)).sealed == (ends == "sealed")
    assert (max(made.values()), made.total()) == (3, 100)
    assert waiting(producer) == (0, 0)


async def test_between_two_answers_engines_get_the_lock(producer):
    offer, seen = producer.offer_progressive("r", [[3]], 8), []

    def take(_answer):
        seen.append(producer._leases._lock.locked())
        return True

    ask = settled(producer, offer.ticket, 0, wait_ms=0)
    assert (await settled_of(ask)).ended == ""
    for nonce in range(5):
        question = AskSettled((named(offer.ticket),), (0,), 8, LONG_MS)
        producer._leases.answers.ask("connection", question, ASKER, take, nonce)
    offer.seal([[4]])
    await until(lambda: seen)
    assert seen == [False] * 5


async def test_what_comes_while_questions_are_looked_at_is_seen(producer, monkeypatch):
    offer = producer.offer_progressive("r", [[3, 4]], 8)
    Turns(producer, monkeypatch, 0.0015)
    few = [settled(producer, offer.ticket, 0, above=4, nonce=nonce) for nonce in range(10)]
    many = [settled(producer, offer.ticket, 0, above=8, nonce=nonce) for nonce in range(10, 20)]
    offer.advance(4)
    await turns(3)
    offer.seal()
    for each in (*few, *many):
        assert (await settled_of(each)).ended == ""
    assert waiting(producer) == (0, 0)


async def test_a_connection_that_takes_no_answer_is_made_no_more(producer, monkeypatch):
    offer = producer.offer_progressive("r", [[3]], 8)
    made = Turns(producer, monkeypatch, 0.0004).made
    full = [settled(producer, offer.ticket, 0, above=8, key="full", nonce=at, takes=at < 5) for at in range(50)]
    other = [settled(producer, offer.ticket, 0, above=8, key="other", nonce=at) for at in range(5)]
    offer.seal([[4]])
    for each in other:
        assert (await settled_of(each)).sealed
    assert [len(each.answers) for each in full] == [1] * 6 + [0] * 44
    assert made.total() == 11
    assert waiting(producer) == (0, 0)


async def test_a_defect_in_one_answer_costs_the_others_nothing(producer, monkeypatch):
    offer = producer.offer_progressive("r", [[3]], 8)
    asked = [settled(producer, offer.ticket, 0, above=8, nonce=nonce) for nonce in range(3)]
    monkeypatch.setattr(asked[0], "answers", None)
    seen = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: seen.append(context))
    offer.seal([[4]])
    for each in asked[1:]:
        assert (await settled_of(each)).sealed
    assert len(seen) == 1


# --- offers that were found and not read ---


async def test_an_offer_that_is_given_back_unread_is_read_by_the_next():
    """Else an aborted request of one client would cost another its equal prompt."""
    async with opened() as world:
        producer, consumer, endpoint = world.producer, world.consumer, world.producer.endpoint
        offer = producer.offer_progressive("r", [[3]], 8, digests=[chain(1, 2)])
        async with asyncio.timeout(PATIENCE_S):
            assert await consumer.find(endpoint, chain(1, 2), PATIENCE_S) == (offer.ticket, 2)
            victim = asyncio.ensure_future(consumer.find(endpoint, chain(1, 2), PATIENCE_S))
            await until(lambda: waiting(producer)[0] == 1)
            await consumer.release(offer.ticket)
            assert await victim == (offer.ticket, 2)
            offer.seal([[4]])
            await world.pull(offer.ticket)
            assert world.holds((1, 2), (3, 4))
            assert await producer.wait_offer("r") == "released"


async def test_ranks_that_gave_back_an_offer_count_anew(producer):
    ranks = [Reader("decode-0", rank, 2, "its key") for rank in range(2)]
    offer = producer.offer_progressive("r", [[3]], 8, digests=[chain(1, 2)])
    for _ in range(3):
        assert (await held(producer, chain(1, 2)).answer()).count == 2
        waits = held(producer, chain(1, 2), nonce=1)
        assert give_back(producer, offer.ticket, ranks[0]) == "counted"
        await turns(4)
        assert waits.answers == []
        assert give_back(producer, offer.ticket, ranks[1]) == "held"
        assert (await waits.answer()).count == 2
        assert give_back(producer, offer.ticket, ranks[1]) == "counted"
        assert give_back(producer, offer.ticket, ranks[0]) == "held"
    assert (await held(producer, chain(1, 2)).answer()).count == 2
    (first,) = producer._leases.on_release([lease_of(offer.ticket)], ranks[0], read=True)
    assert (first, give_back(producer, offer.ticket, ranks[1])) == ("counted", "ended"), "one of them has read"
    assert await producer.wait_offer("r") == "released"


@pytest.mark.parametrize("how", ["it is withdrawn", "its connection has ended"])
async def test_an_answer_that_reaches_nobody_leaves_the_offer_to_others(producer, how):
    gone = held(producer, chain(1, 2), nonce=7, key="gone", takes=how == "it is withdrawn")
    waits = held(producer, chain(1, 2))
    offer = producer.offer_progressive("r", [[3]], 8, digests=[chain(1, 2)])
    assert (await gone.answer()).count == 2
    if how == "it is withdrawn":
        assert waits.answers == []
        for nonce, connection in ((8, "gone"), (7, "other")):
            Asked(producer, Withdraw(nonce=nonce), key=connection, nonce=9)
        await turns(4)
        assert waits.answers == []
        Asked(producer, Withdraw(nonce=7), key="gone", nonce=9)
    assert (await waits.answer()).ticket == offer.ticket.to_params()["kvflow"]
    offer.abort()
    index = producer._leases._leases._index
    assert (index._for_one, index.by_question) == ({}, {})


async def test_the_number_of_a_question_may_be_used_again(producer):
    offers = [producer.offer_progressive(str(number), [[]], 8, digests=[chain(1, 2)]) for number in range(2)]
    for offer in offers:
        assert (await held(producer, chain(1, 2)).answer()).ticket == offer.ticket.to_params()["kvflow"]
    for offer in offers:
        assert give_back(producer, offer.ticket) == "held"
    assert [(await held(producer, chain(1, 2)).answer()).count for _ in offers] == [2, 2]
    for offer in offers:
        offer.abort()
    index = producer._leases._leases._index
    assert (index._for_one, index.by_question) == ({}, {})
