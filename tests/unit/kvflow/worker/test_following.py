"""Pulls of open offers: real workers of one process, and a producer that answers as a test says, right or wrong."""

import asyncio
import random
from collections import Counter

import msgspec
import pytest

from kvflow.errors import (
    BlockIdsInvalid,
    BlockRangeMismatch,
    CapacityExceeded,
    ContentMismatch,
    DeadlineExceeded,
    KvflowError,
    PeerLost,
    ProtocolViolation,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
)
from kvflow.events import PeerDropped, PullFailed, TransferStarted
from kvflow.leases.tickets import Content, Ticket
from kvflow.reads.scheduler import LeaseEarly
from kvflow.rendezvous import questions
from kvflow.rendezvous.dialer import Link
from kvflow.rendezvous.issuer import TicketKey
from kvflow.rendezvous.questions import AnswerSettled, AskSettled, Settled
from tests.fakes import FabricFaults
from tests.helpers.waiting import patiently, until

from .helpers import PATIENCE_S, turns
from .pulling import config, failure, opened
from .virtual import virtual

BLOCK_BYTES = 2 * 2 * 2 * 2 * 4 * 8  # of both layers
SOURCES = (10, 12, 11, 13, 20, 21, 22, 23)
TARGETS = (1, 2, 3, 4, 5, 6, 7, 9)
TOKENS = 4 * len(SOURCES)
_asked = msgspec.msgpack.Decoder(AskSettled)


def encoded(*settled):
    """Return an answer about these leases as it travels."""
    return questions.encode(AnswerSettled(settled))


class Teller:
    """What each rank says of its open offer; ranks that nobody sets say the same.

    Attributes:
        said: rank -> what it answers once it is asked for no more than this.
        asked: the questions of all ranks, in order.
        hasty: whether the next answer comes though too little is settled, as when a question has waited for long.
    """

    def __init__(self, monkeypatch):
        self.said, self.asked, self.hasty = {}, [], False
        self._changed = asyncio.Event()
        monkeypatch.setattr(Link, "ask", lambda link, *question: self._ask(link.peer.rank, *question))

    async def _ask(self, rank, question, within_s):
        asked = _asked.decode(question)
        assert within_s * 1000 > asked.wait_ms
        self.asked.append(asked)
        self._changed.set()
        try:
            async with asyncio.timeout(asked.wait_ms / 1000):
                while (answer := self._answer(rank, asked)) is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            self.hasty = True
            answer = self._answer(rank, asked)
        return answer

    def _answer(self, rank, asked):
        said = self.said.get(rank, self.said.get(None))
        if isinstance(said, bytes | None):
            return said
        lists = tuple(ids[count:] for ids, count in zip(said.block_ids, asked.known, strict=False))
        enough = said.num_tokens >= asked.above or said.sealed or said.ended or self.hasty
        self.hasty = False
        return encoded(msgspec.structs.replace(said, block_ids=lists)) if enough else None

    def say(self, num_tokens, blocks=None, *, rank=None, sealed=False, ended="", lists=None):
        """Settle so many tokens, in blocks that are all told."""
        told = SOURCES[: num_tokens // 4 if blocks is None else blocks]
        self.said[rank] = Settled(num_tokens, lists or (told,), sealed, ended)
        self._changed.set()

    def babble(self, answer):
        self.said[None] = answer
        self._changed.set()

    async def heard(self, count):
        """Wait until so many questions were asked."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.asked) < count:
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
def teller(monkeypatch):
    return Teller(monkeypatch)


@pytest.fixture
async def world():
    async with opened(num_blocks=32, follow_bytes_min=1) as world:
        yield world


def as_open(ticket, **named):
    """Return the ticket of an ordinary offer as that of an open one, of which nothing is told."""
    key = TicketKey.of(config())
    grants = tuple(
        msgspec.structs.replace(grant, kind="open", **{"block_ids": ((),) * len(grant.block_ids)} | named)
        for grant in ticket.grants
    )
    return Ticket(grants=grants, signed=tuple(grant.signed(key.sign, key.fingerprint) for grant in grants))


def open_ticket(world, name="request-1", **named):
    return as_open(world.ticket(name, SOURCES), **named)


async def reading(world, teller):
    """Return a pull whose first range hangs."""
    await world.connect()
    world.faults.hung.add(0)
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(8)
    await world.faults.strike()
    return pull


async def waiting(world, blocks):
    """Wait until the only pull has read so many blocks, and waits for its producer."""

    def is_waiting():
        (state,) = world.consumer.snapshot().open_pulls
        return (state.phase, state.nbytes) == ("compute", blocks * BLOCK_BYTES)

    await until(is_waiting)


async def test_what_is_settled_is_read_before_the_rest_is_computed(world, teller):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(8)
    await teller.heard(2)
    assert [asked.above for asked in teller.asked] == [4, 12]
    assert teller.asked[1].known == (2,)
    teller.say(TOKENS)
    await teller.heard(3)
    assert teller.asked[2].above == TOKENS + 1, "only the seal is news"
    await waiting(world, len(SOURCES))
    assert world.holds(TARGETS, SOURCES)
    assert not pull.done()
    assert world.consumer.snapshot().open_pulls[0].nbytes_wanted == len(SOURCES) * BLOCK_BYTES
    teller.say(TOKENS, sealed=True)
    report = await asyncio.wait_for(pull, PATIENCE_S)
    assert (report.ranges, report.nbytes, report.reads) == (2, len(SOURCES) * BLOCK_BYTES, 2)
    assert 0.0 <= report.seal_s < report.timings_s["total"]
    phases = dict(report.timings_s)
    total_s = phases.pop("total")
    assert sum(phases.values()) == pytest.approx(total_s, rel=0.01)
    assert min(phases.values()) >= 0.0
    assert await asyncio.wait_for(world.producer.wait_offer("request-1"), PATIENCE_S) == "released"
    assert (await world.record()).report is report
    assert len(world.of(TransferStarted)) <= 1


async def test_a_read_has_so_many_bytes_unless_all_is_settled(teller):
    async with opened(num_blocks=32, follow_bytes_min=3 * BLOCK_BYTES) as world:
        pull = world.start(open_ticket(world), TARGETS)
        await teller.heard(1)
        assert teller.asked[0].above == 12
        teller.hasty = True
        teller.say(8)
        await teller.heard(2)
        assert teller.asked[1].known == (2,)
        assert world.faults.batches == []
        teller.say(16)
        await teller.heard(3)
        teller.say(TOKENS, sealed=True)
        assert (await asyncio.wait_for(pull, PATIENCE_S)).ranges == 2
        assert world.holds(TARGETS, SOURCES)


async def test_of_a_block_that_is_half_computed_nothing_is_read(world, teller):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(10, blocks=3)
    await teller.heard(2)
    teller.say(TOKENS, sealed=True)
    report = await asyncio.wait_for(pull, PATIENCE_S)
    assert (report.ranges, report.nbytes) == (2, len(SOURCES) * BLOCK_BYTES)
    assert world.holds(TARGETS, SOURCES)


async def test_of_several_ranks_the_least_settled_counts(teller):
    async with opened(ranks=2, num_blocks=32, follow_bytes_min=1) as world:
        pull = world.start(open_ticket(world), TARGETS)
        teller.say(TOKENS, rank=0, sealed=True)
        await teller.heard(2)
        teller.say(8, rank=1)
        await waiting(world, 2)
        teller.say(TOKENS, rank=1, sealed=True)
        report = await asyncio.wait_for(pull, PATIENCE_S)
        assert (report.ranges, report.nbytes) == (2, len(SOURCES) * BLOCK_BYTES)
        assert world.holds(TARGETS, SOURCES)
        for producer in world.producers:
            assert await asyncio.wait_for(producer.wait_offer("request-1"), PATIENCE_S) == "released"


@pytest.mark.parametrize(("targets", "above"), [((5, 6, 7), 24), ((-1, -1, -1, 4, 5, 6, 7, 9), 16), ((-1,) * 8, 32)])
async def test_what_we_have_already_is_not_read(world, teller, targets, above):
    pull = world.start(open_ticket(world), targets)
    await teller.heard(1)
    assert teller.asked[0].above == above
    teller.say(TOKENS, sealed=True)
    report = await asyncio.wait_for(pull, PATIENCE_S)
    wanted = [(target, source) for target, source in zip(targets[::-1], SOURCES[::-1], strict=False) if target >= 0]
    assert report.nbytes == len(wanted) * BLOCK_BYTES
    if wanted:
        assert world.holds(*zip(*wanted, strict=True))


async def test_the_last_block_may_be_partly_filled(world, teller):
    ticket = as_open(
        world.producer.offer("request-1", [list(SOURCES)], TOKENS - 3) and world.ticket("r", SOURCES),
    )
    pull = world.start(as_open(ticket, num_tokens=(TOKENS - 3,)), TARGETS)
    teller.say(TOKENS - 4)
    await teller.heard(2)
    teller.say(TOKENS - 3, len(SOURCES), sealed=True)
    assert (await asyncio.wait_for(pull, PATIENCE_S)).ranges == 2
    assert world.holds(TARGETS, SOURCES)
    world.producer.revoke("request-1")


@pytest.mark.parametrize(
    ("first", "then", "words"),
    [
        ((8, 2), {"num_tokens": 4, "blocks": 2}, "after 8"),
        ((8, 2), {"num_tokens": TOKENS + 4, "blocks": 2}, "settled"),
        ((8, 2), {"num_tokens": 12, "blocks": 3, "sealed": True}, "sealed"),
        ((8, 2), {"num_tokens": TOKENS, "blocks": 3, "sealed": True}, "3 blocks"),
        ((8, 2), {"num_tokens": 12, "lists": ((10, 12, 99),)}, "not in"),
        ((8, 2), {"num_tokens": 12, "lists": ((10, 12, 10),)}, "told twice"),
        ((8, 2), {"num_tokens": 16, "lists": ((10, 12, 11, 11),)}, "twice"),
        ((8, 2), {"num_tokens": 12, "lists": ((10, 12, 11), (3,))}, "2 lists"),
        ((8, 2), {"num_tokens": TOKENS, "lists": ((*SOURCES, 30),)}, "9 blocks are told"),
        ((8, 2), {"num_tokens": 16, "blocks": 3}, "3 blocks are told"),
        ((8, 2), b"", "invalid"),
        ((8, 2), b"\xc1", "invalid"),
    ],
)
async def test_a_wrong_answer_fails_the_pull_and_nobody_else(world, teller, first, then, words):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(*first)
    await teller.heard(2)
    await waiting(world, 2)
    if isinstance(then, bytes):
        teller.babble(then)
    else:
        answer = {"num_tokens": 0, "sealed": False, "lists": (SOURCES[: then.get("blocks", 0)],)} | then
        known = teller.asked[1].known[0]
        lists = (answer["lists"][0][known:], *answer["lists"][1:])
        teller.babble(encoded(Settled(answer["num_tokens"], lists, answer["sealed"])))
    error = await failure(pull)
    assert isinstance(error, ProtocolViolation)
    assert words in error.message
    assert not error.quarantined
    await patiently(pull.quiesced())
    (failed,) = await world.heard(PullFailed)
    assert (failed.code, failed.phase, failed.nbytes) == ("protocol_violation", "compute", 2 * BLOCK_BYTES)
    await world.pull(world.ticket("another", (14,)), (1,))
    assert world.holds((1,), (14,))


class Liar(Teller):
    """Answers each question at once; half of the prompts get an answer that cannot be true, somewhere."""

    def __init__(self, monkeypatch):
        super().__init__(monkeypatch)
        self.rng, self.told = random.Random(35), []

    def _answer(self, _rank, asked):
        rng, told = self.rng, self.told
        ids = list(SOURCES[len(told) : len(told) + rng.randint(0, 3)])
        settled, ended = 4 * (len(told) + len(ids)), ""
        sealed, more = settled == TOKENS, []
        match rng.randrange(20):
            case 0:
                ids.append(rng.choice((*SOURCES, 30, 99, -1, -9, 1 << 40)))
            case 1:
                settled += rng.choice((-400, -4, -1, 1, 4, 400, 1 << 60))
            case 2:
                sealed = not sealed
            case 3:
                more = rng.choice(([[]], [[5]]))
            case 4:
                ids = ids[::-1] or [*told[:1]]
            case 5:
                ended = rng.choice(("revoked", "expired", "nonsense"))
        told += ids
        return encoded(Settled(settled, (tuple(ids), *map(tuple, more)), sealed, ended))


async def test_whatever_a_producer_says_its_pull_fails_or_has_what_was_told(world, monkeypatch):
    liar, ends = Liar(monkeypatch), Counter()
    for number in range(60):
        liar.told = []
        pull = world.start(open_ticket(world, f"request-{number}"), TARGETS)
        try:
            await asyncio.wait_for(pull, PATIENCE_S)
        except KvflowError as error:
            ends[error.code] += 1
        else:
            ends["completed"] += 1
            assert world.holds(TARGETS, liar.told)
        await patiently(pull.quiesced())
        world.producer.revoke(f"request-{number}")
        world.consumer.check()
    assert min(ends["completed"], ends["protocol_violation"], ends["stale_lease"]) > 5, ends
    assert set(ends) <= {"completed", "protocol_violation", "stale_lease", "block_range_mismatch"}, ends


async def test_a_range_whose_fence_is_late_is_stale_and_nothing_more_is_read(world, teller):
    ticket = open_ticket(world)
    await world.connect()
    world.producer.revoke("request-1")
    pull = world.start(ticket, TARGETS)
    teller.say(8)
    error = await failure(pull)
    assert isinstance(error, StaleLease)
    assert error.ended_by == "revoked"
    teller.say(TOKENS, sealed=True)
    await patiently(pull.quiesced())
    assert len(world.of(PullFailed)) == 1


async def test_a_producer_that_never_seals_is_given_up(teller):
    async with opened(num_blocks=32, follow_bytes_min=1, compute_s=0.2) as world:
        teller.say(8)
        error = await failure(world.start(open_ticket(world), TARGETS))
        assert isinstance(error, DeadlineExceeded)
        assert (error.phase, error.quarantined) == ("compute", False)
        assert "compute_s" in error.remedy
        world.producer.revoke("request-1")


@pytest.mark.parametrize("sealed", [True, False])
def test_the_time_of_reads_does_not_count_if_the_producer_has_sealed(sealed):
    with virtual(compute_s=1.0, follow_bytes_min=1, wire_s=60.0, fence_s=60.0, lease_s=60.0) as world:
        world.fabric.faults = FabricFaults(at_once=0.0, piece_s=3.0, pieces_max=1)
        (producer,) = world.producers
        offer = world.do(lambda: producer.worker.offer_progressive("request-1", [[1]], 16), life=producer)
        pull = world.start(offer.ticket, (4, 5, 6, 7))
        world.do(lambda: offer.advance(4), life=producer)
        world.pass_time(0.3)
        world.do(lambda: offer.advance(8, [[2]]), life=producer)  # no question waits while this is to be read
        world.pass_time(0.3)
        if sealed:
            world.do(lambda: offer.seal([[3, 8]]), life=producer)
        world.pass_time(0.4)
        assert world.fabric.in_flight()  # and the budget has run out
        world.pass_time(120.0)
        if sealed:
            assert pull.result().ranges == 3
        else:
            assert (type(pull.exception()), pull.exception().phase) == (DeadlineExceeded, "compute")


@pytest.mark.parametrize("sealed", [True, False])
def test_only_the_rest_of_a_seal_is_told_after_the_time_to_compute(sealed, monkeypatch):
    for module in ("answers", "following"):
        monkeypatch.setattr(f"kvflow.worker.{module}.IDS_MAX", 8)
    with virtual(compute_s=1.0, follow_bytes_min=1, wire_s=600.0, fence_s=600.0, lease_s=600.0) as world:
        world.fabric.faults = FabricFaults(at_once=0.0, piece_s=3.0, pieces_max=1)
        (producer,) = world.producers
        offer = world.do(lambda: producer.worker.offer_progressive("request-1", [[0]], 96), life=producer)
        pull = world.start(offer.ticket, range(24))
        world.do(lambda: offer.advance(4), life=producer)
        world.pass_time(0.3)
        if sealed:
            world.do(lambda: offer.seal([range(1, 24)]), life=producer)
            world.pass_time(600.0)
            assert pull.result().ranges == 4
            return
        for count in range(2, 24):  # a block while each range is read
            world.do(lambda count=count: offer.advance(4 * count, [[count]]), life=producer)
            world.pass_time(4.0)
        assert (type(pull.exception()), pull.exception().phase) == (DeadlineExceeded, "compute")


async def test_cancelling_while_it_computes_frees_our_blocks_at_once(world, teller):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(8)
    await teller.heard(2)
    await waiting(world, 2)
    with pytest.raises(BlockIdsInvalid, match="target of another pull"):
        await world.start(world.ticket("other", (14,)), (TARGETS[-1],))  # taken from the start
    pull.cancel()
    error = await failure(pull)
    assert isinstance(error, TransferCancelled)
    assert not error.quarantined
    await patiently(pull.quiesced())
    await world.pull(world.ticket("another", (15,)), (TARGETS[-1],))
    world.consumer.check()
    world.producer.revoke("request-1")


async def test_a_cancelled_second_range_tells_of_all_that_has_arrived(world, teller):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(8)
    await teller.heard(2)
    await waiting(world, 2)
    world.faults.hung.add(0)
    teller.say(16)
    await world.faults.strike()
    pull.cancel()
    assert (await failure(pull)).quarantined
    (failed,) = await world.heard(PullFailed)
    assert (failed.nbytes, failed.nbytes_wanted) == (2 * BLOCK_BYTES, len(SOURCES) * BLOCK_BYTES)
    world.faults.heal()
    await patiently(pull.quiesced())
    world.producer.revoke("request-1")


async def test_an_error_of_the_answers_waits_for_the_range_that_is_read(world, teller):
    pull = await reading(world, teller)
    await teller.heard(2)
    teller.babble(b"")
    await turns(20)
    was_done = pull.done()
    world.faults.heal()
    error = await failure(pull)
    assert not was_done
    assert (type(error), error.quarantined) == (ProtocolViolation, False)
    world.producer.revoke("request-1")


@pytest.mark.parametrize("steps", range(8))
async def test_cancelling_at_the_instant_of_a_wrong_answer_leaves_no_task(teller, steps):
    async with opened(num_blocks=32, follow_bytes_min=1, ranks=2) as world:
        pull = await reading(world, teller)
        await teller.heard(4)
        teller.said[0] = b""  # the other rank has not answered: a cancellation must not be lost between the two
        teller._changed.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        pull.cancel()
        await failure(pull)
        world.faults.heal()
        await patiently(pull.quiesced())
        names = {task.get_coro().__name__ for task in asyncio.all_tasks()}
        assert "_read_on" not in names


async def test_a_range_may_arrive_before_its_early_rank_is_asked_for(world, teller, monkeypatch):
    """The task that asks runs once the pull has no ranks: an error in it would end the worker."""
    pull = await reading(world, teller)
    scheduler, asked = world.consumer._consumer._scheduler, []
    on_read_ended = scheduler.on_read_ended

    async def ask(peer, leases, _wait_s):
        asked.append((peer.rank, len(leases)))
        return ()

    def retry_first(ended, now):
        monkeypatch.setattr(scheduler, "on_read_ended", on_read_ended)
        (followed,) = world.consumer._consumer.pulls.by_id.values()
        return [LeaseEarly(followed.ranges[-1].ranks[0], again=False), *on_read_ended(ended, now)]

    monkeypatch.setattr(world.consumer._consumer.peers, "settled", ask)
    monkeypatch.setattr(scheduler, "on_read_ended", retry_first)
    world.faults.heal()
    await waiting(world, 2)
    assert asked == [], "it waits no longer"
    pull.cancel()
    await failure(pull)


async def test_a_peer_that_is_lost_ends_the_pull_that_waits_for_it(world, teller):
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(8)
    await teller.heard(2)
    await waiting(world, 2)
    (peer,) = {read.peer for batch in world.faults.batches for read in batch}
    world.consumer._consumer.peers.drop(peer, "peer_lost", "as the test says")
    error = await failure(pull)
    assert isinstance(error, PeerLost)
    await patiently(pull.quiesced())
    (failed,) = await world.heard(PullFailed)
    assert (failed.phase, failed.nbytes) == ("compute", 2 * BLOCK_BYTES)
    phases = dict(failed.timings_s)
    assert phases.pop("total") == pytest.approx(sum(phases.values()))
    world.producer.revoke("request-1")


async def read_of_the_first(world, teller, *, settled):
    """Return a pull of two ranks, a range of which has arrived from the first; and its peer. The second hangs."""
    await world.connect()
    world.faults.hung.add(1)
    pull = world.start(open_ticket(world), TARGETS)
    teller.say(TOKENS, rank=0, sealed=True)
    teller.say(settled, rank=1, sealed=settled == TOKENS)
    await world.faults.strike()
    (followed,) = world.consumer._consumer.pulls.by_id.values()
    await until(lambda: followed.ranges[-1].ranks[0].state == "delivered")
    return pull, followed.ranges[-1].ranks[0].read.peer


async def test_a_rank_lost_between_two_ranges_ends_the_pull_at_once(teller):
    """Its next read would be of a list that is prepared no more."""
    async with opened(ranks=2, num_blocks=32, follow_bytes_min=1) as world:
        pull, peer = await read_of_the_first(world, teller, settled=8)
        world.consumer._consumer.peers.drop(peer, "peer_lost", "as the test says")
        assert isinstance(await failure(pull), PeerLost)
        world.faults.heal()
        await patiently(pull.quiesced())
        for producer in world.producers:
            producer.revoke("request-1")


async def test_a_rank_lost_behind_all_of_its_bytes_ends_no_pull(teller):
    async with opened(ranks=2, num_blocks=32, follow_bytes_min=1) as world:
        pull, peer = await read_of_the_first(world, teller, settled=TOKENS)
        world.consumer._consumer.peers.drop(peer, "peer_lost", "as the test says")
        await world.heard(PeerDropped)
        world.faults.heal()
        assert (await asyncio.wait_for(pull, PATIENCE_S)).nbytes == len(SOURCES) * BLOCK_BYTES
        assert world.holds(TARGETS, SOURCES)
        world.producers[0].revoke("request-1")  # if its release was lost with its connection


async def test_a_pull_that_waits_for_its_producer_counts_as_open(teller):
    async with opened(num_blocks=32, follow_bytes_min=1, pulls_max=1) as world:
        pull = world.start(open_ticket(world), TARGETS)
        await teller.heard(1)
        assert isinstance(await failure(world.start(world.ticket("another", (14,)), (10,))), CapacityExceeded)
        teller.say(TOKENS, sealed=True)
        await asyncio.wait_for(pull, PATIENCE_S)
        await world.pull(world.ticket("a third", (15,)), (10,))


async def test_draining_waits_for_it_and_closing_cancels_it(teller):
    async with opened(num_blocks=32, follow_bytes_min=1) as world:
        pull = world.start(open_ticket(world), TARGETS)
        await teller.heard(1)
        assert (await world.consumer.drain(0.0)).pulls == ("request-1",)
        assert not pull.done()
        assert world.consumer._consumer.close() == 1
        error = await failure(pull)
        assert isinstance(error, TransferCancelled)
        await patiently(pull.quiesced())


@pytest.mark.parametrize("wrong", ["digests", "unknown", "slot", "before", "mixed", "tokens", "told"])
async def test_what_is_wrong_from_the_start_is_refused_before_anything_is_asked(world, teller, wrong):
    contents = (Content(4, (b"a digest",)),)
    ticket, targets, how, kind = open_ticket(world), TARGETS, {}, TicketInvalid
    match wrong:
        case "digests":
            ticket, how = as_open(ticket, contents=contents), {"expected_digests": [[b""] * 7 + [b"another"]]}
            kind = ContentMismatch
        case "unknown":
            how, kind = {"expected_digests": [[b""] * 7 + [b"another"]]}, ContentMismatch
        case "slot":
            ticket = as_open(ticket, slot=1 << 20)
        case "before":
            targets, kind = (*TARGETS, 0), BlockRangeMismatch
        case "told":
            ticket = as_open(ticket, block_ids=((3, 3),))
        case "mixed" | "tokens":
            pass
    if wrong in ("mixed", "tokens"):
        async with opened(ranks=2, num_blocks=32) as two:
            one, other = (each.offer("r", [list(SOURCES)], TOKENS) for each in two.producers)
            other = other if wrong == "mixed" else as_open(other, num_tokens=(TOKENS + 4,))
            grants = *as_open(one).grants, *other.grants
            joined = Ticket(grants=grants, signed=(*as_open(one).signed, *other.signed))
            for ordered in (joined, Ticket(grants=joined.grants[::-1], signed=joined.signed[::-1])):
                assert isinstance(await failure(two.start(ordered, TARGETS)), TicketInvalid)
            for producer in two.producers:
                producer.revoke("r")
    else:
        assert isinstance(await failure(world.start(ticket, targets, **how)), kind)
        await world.pull(world.ticket("another", (14,)), (1,))
        world.consumer.check()
    assert teller.asked == []
    world.producer.revoke("request-1")


async def test_expected_digests_are_compared_before_blocks_are_known(world, teller):
    ticket = open_ticket(world, contents=(Content(4, (b"a digest",)),))
    pull = world.start(ticket, TARGETS, expected_digests=[[b""] * 7 + [b"a digest"]])
    teller.say(TOKENS, sealed=True)
    assert (await asyncio.wait_for(pull, PATIENCE_S)).ranges == 1
