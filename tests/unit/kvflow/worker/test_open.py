"""Open offers: blocks are told and settle while a lease is held, and questions about it wait for that."""

import asyncio
from functools import partial

import numpy as np
import pytest

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, WorkerDraining
from kvflow.events import LeaseEnded, OfferAdmitted
from kvflow.layout.specs import FullAttention, Mamba, SlidingWindow, State
from kvflow.leases.tickets import LeaseName
from kvflow.reads.contract import Serving
from kvflow.reads.serving import LeasedBlocks
from kvflow.rendezvous.issuer import TicketMint
from kvflow.rendezvous.questions import AskSettled
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import run_worker

from .asking import ASKER, Asked, answered, chain, held, named, settled, settled_of
from .helpers import PATIENCE_S, SECRET, cache_of, lease_of, turns
from .pulling import config, opened
from .virtual import virtual

SPECS = {
    "full": FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16"),
    "window": SlidingWindow(block_size=4, num_kv_heads=2, head_size=8, dtype="float16", window=8),
    "state": Mamba(block_size=4, states=(State("ssm", (4, 8), "float16", shard_axis=0),)),
}


@pytest.fixture
async def producer(reports):
    async with open_worker(config(lease_slots=4), cache_of(40), hooks=[reports]) as producer:
        yield producer
        producer.check()


@pytest.fixture
async def hybrid():
    async with open_worker(config(), cache_of(40, SPECS)) as producer:
        yield producer
        producer.check()


async def test_blocks_are_told_lent_and_settled_one_after_another(producer, reports):
    offer = producer.offer_progressive("r", [[3]], 17)
    grant = offer.ticket.grants[0]
    assert (grant.kind, grant.block_ids, grant.num_tokens, grant.contents) == ("open", ((3,),), (17,), None)
    blocks_of = partial(producer._leases._leases.blocks_of, *lease_of(offer.ticket))
    assert blocks_of() == ((),)
    first = await settled(producer, offer.ticket, 0, wait_ms=0).answer()
    assert first == answered(num_tokens=0, block_ids=((),))
    waiting = settled(producer, offer.ticket, 0, above=8)
    offer.advance(4)
    producer.check()
    offer.advance(7, [[5]])  # the second block is not whole
    assert blocks_of() == ((3,),)
    await turns(4)
    assert waiting.answers == []
    offer.advance(11, [[7, 9]])
    assert await waiting.answer() == answered(num_tokens=8, block_ids=((3, 5),))
    (state,) = producer.snapshot().held_leases
    assert (state.kind, state.num_blocks) == ("open", 4)
    last = settled(producer, offer.ticket, 2, above=17)
    offer.seal([[2]])
    assert await last.answer() == answered(num_tokens=17, block_ids=((7, 9, 2),), sealed=True)
    assert blocks_of() == ((3, 5, 7, 9, 2),)
    producer.check()
    producer._leases.on_release([lease_of(offer.ticket)], ASKER, read=True)
    assert await producer.wait_offer("r") == "released"
    (end,) = reports.of(LeaseEnded)
    assert (end.kind, [tokens for _, tokens in end.advances]) == ("open", [4, 7, 11, 17])
    assert [event.kind for event in reports.of(OfferAdmitted)] == ["open"]
    assert blocks_of() is None


@pytest.mark.parametrize(
    "advance",
    [
        lambda offer: offer.advance(7),
        lambda offer: offer.advance(-1),
        lambda offer: offer.advance(18),
        lambda offer: offer.advance(1 << 70),
        lambda offer: offer.advance("8"),
        lambda offer: offer.advance(8.0),
        lambda offer: offer.advance(12),  # not told
        lambda offer: offer.advance(12, [[3]]),  # told before
        lambda offer: offer.advance(12, [[7, 7]]),
        lambda offer: offer.advance(12, [[40]]),
        lambda offer: offer.advance(12, [[-2]]),
        lambda offer: offer.advance(12, [["x"]]),
        lambda offer: offer.advance(12, [[7], [8]]),
        lambda offer: offer.advance(12, [7]),
        lambda offer: offer.advance(12, [[7, 8, 9, 10]]),  # more than the tokens need
        lambda offer: offer.advance(12, [[7]], digests=[chain(*range(6))]),
        lambda offer: offer.advance(12, [[7]], digests=[[7]]),
        lambda offer: offer.seal([[7, 8]]),
        lambda offer: offer.seal([[7, 8, 9, 10]]),
        lambda offer: offer.seal(),
    ],
)
async def test_what_cannot_have_settled_is_refused_and_changes_nothing(producer, advance):
    offer = producer.offer_progressive("r", [[3, 5]], 17)
    offer.advance(8)
    before = producer.snapshot().held_leases[0]
    with pytest.raises((BlockIdsInvalid, ArgumentInvalid)):
        advance(offer)
    producer.check()
    after = producer.snapshot().held_leases[0]
    assert (after.num_blocks, after.kind) == (before.num_blocks, "open")
    answer = await settled(producer, offer.ticket, 0, wait_ms=0).answer()
    assert answer == answered(num_tokens=8, block_ids=((3, 5),))
    offer.seal([[7, 8, 9]])
    for late in (lambda: offer.advance(17), offer.seal):
        with pytest.raises(BlockIdsInvalid, match="not open"):
            late()


async def test_a_plane_that_serves_reads_gives_what_has_settled_and_no_more(producer):
    leases, blocks = producer._leases._leases, np.arange(10)
    leased = LeasedBlocks(Serving((), leases.blocks_of, lambda key: True, b""))
    offer = producer.offer_progressive("r", [[3]], 12)

    def served():
        held = leased.held(*lease_of(offer.ticket), 0, blocks)
        ids = leased.ids(*lease_of(offer.ticket), 0)
        assert ids is None if held is None else sorted(ids) == blocks[held].tolist()
        return None if held is None else blocks[held].tolist()

    assert served() == []
    offer.advance(7, [[5]])  # the second block is still written
    assert served() == [3]
    offer.advance(8)
    assert served() == [3, 5]
    with pytest.raises(BlockIdsInvalid):
        offer.advance(4, [[6]])
    offer.advance(11, [[1]])
    assert served() == [3, 5]
    offer.seal()
    assert served() == [1, 3, 5]
    offer.abort()
    assert served() is None


async def test_a_block_that_receives_cannot_be_told(producer):
    offer = producer.offer_progressive("r", [[]], 8)
    producer._shared.account.receive([(4,)])
    with pytest.raises(BlockIdsInvalid, match="target of a pull"):
        offer.advance(8, [[3, 4]])
    producer._shared.account.end_receipt([(4,)])
    offer.advance(8, [[3, 4]])  # it was not noted as told


async def test_only_an_open_offer_that_is_held_is_advanced(producer):
    producer.offer("offered", [[1]], 4)
    with pytest.raises(BlockIdsInvalid, match="not open"):
        producer.advance("offered", 4)
    assert not producer.seal("nobody")
    offer = producer.offer_progressive("r", [[2]], 4)
    assert offer.abort()
    assert not offer.abort()
    assert not offer.advance(4)
    offer = producer.offer_progressive("again", [[2]], 8)
    assert offer.advance(4)
    assert offer.seal([[3]])


@pytest.mark.parametrize("blocks", [[[1] * 6], [[3, 3]], [[40]], [], [[1], [2]]], ids=repr)
async def test_an_open_offer_that_does_not_fit_is_refused(producer, blocks):
    with pytest.raises(BlockIdsInvalid):
        producer.offer_progressive("r", blocks, 17)
    producer.check()
    producer.offer_progressive("r", [[]], 17)


async def test_windows_and_states_are_told_with_the_seal(hybrid):
    kinds = [group.kind for group in hybrid._shared.manifest.groups]
    assert sorted(kinds) == ["full", "mamba", "sliding"]

    def lists(**of):
        return [of.get(kind, []) for kind in kinds]

    offer = hybrid.offer_progressive("r", lists(full=[1]), 10)
    for early in ("sliding", "mamba"):
        with pytest.raises(BlockIdsInvalid, match="written again"):
            offer.advance(4, lists(**{early: [9]}))
    offer.advance(8, lists(full=[2]))
    answer = await settled(hybrid, offer.ticket, 0, 0, 0, above=1).answer()
    assert answer == answered(num_tokens=8, block_ids=tuple(map(tuple, lists(full=[1, 2]))))
    with pytest.raises(BlockIdsInvalid):
        offer.seal(lists(full=[3], sliding=[4, 5, 7], mamba=[6, 8]))
    offer.seal(lists(full=[3], sliding=[4, 5, 7], mamba=[6]))
    answer = await settled(hybrid, offer.ticket, *[2 * (kind == "full") for kind in kinds]).answer()
    assert answer == answered(
        num_tokens=10, block_ids=tuple(map(tuple, lists(full=[3], sliding=[4, 5, 7], mamba=[6]))), sealed=True
    )


async def test_without_full_attention_nothing_settles_before_the_seal():
    async with open_worker(config(), cache_of(9, {"state": SPECS["state"]})) as producer:
        offer = producer.offer_progressive("r", [[]], 10)
        waiting = settled(producer, offer.ticket, 0, above=1)
        offer.advance(8)
        offer.seal([[4]])
        assert await waiting.answer() == answered(num_tokens=10, block_ids=((4,),), sealed=True)


@pytest.mark.parametrize("how", ["revoked", "expired", "released", "closed"])
async def test_the_end_of_the_lease_answers_what_waits(how):
    async with open_worker(config(lease_s=0.05 if how == "expired" else 60.0), cache_of()) as producer:
        offer = producer.offer_progressive("r", [[3]], 8)
        waiting = settled(producer, offer.ticket, 0, above=8)
        if how == "revoked":
            offer.abort()
        elif how == "released":
            producer._leases.on_release([lease_of(offer.ticket)], ASKER)
        elif how == "expired":
            producer._leases.answers.forget("connection")  # otherwise it never runs out
            assert await producer.wait_offer("r") == "expired"
            waiting = settled(producer, offer.ticket, 0, above=8)
        else:
            producer._leases.close()
        ended = "revoked" if how == "closed" else how
        assert await waiting.answer() == answered(ended=ended)
        assert await settled(producer, offer.ticket).answer() == answered(ended=ended)


def test_time_ends_what_nobody_advances_or_asks_about():
    with virtual(lease_s=10.0) as world:
        (producer,) = world.producers
        worker = producer.worker
        offers = world.do(
            lambda: [worker.offer_progressive(name, [[3]], 8) for name in ("left", "advanced", "asked", "sealed")],
            life=producer,
        )
        said = []
        ask = AskSettled((named(offers[2].ticket),), (0,), 8, 35_000)
        world.do(lambda: worker._leases.answers.ask("connection", ask, ASKER, said.append, 0), life=producer)
        world.do(lambda: offers[3].seal([[4]]), life=producer)

        def left():
            return [lease.request_id for lease in world.do(worker.snapshot, life=producer).held_leases]

        world.pass_time(8.0)
        world.do(lambda: offers[1].advance(0), life=producer)
        world.pass_time(4.0)
        assert left() == ["advanced", "asked"]
        world.pass_time(10.0)
        assert left() == ["asked"]
        assert said == []
        world.pass_time(20.0)  # the question has waited for long enough
        assert said == [answered(num_tokens=0, block_ids=((),))]
        world.pass_time(12.0)
        assert left() == []
        world.do(worker.check, life=producer)


async def test_a_question_waits_for_a_lease_that_is_not_admitted_yet(producer):
    mint = TicketMint("prefill-0", [producer.rank_address], cluster_secret=SECRET, block_sizes=[4])
    ticket, grant = mint.offer_progressive("r", [[]], 9, [chain(1, 2, 3)])
    assert [content.digests for content in ticket.grants[0].contents] == [(chain(1, 2, 3)[-1],)]
    waiting = settled(producer, ticket, 0, above=4)
    early = settled(producer, ticket, 0, above=4, wait_ms=1)
    assert await early.answer() == answered()
    producer.admit(grant, [chain(1, 2, 3)])
    producer.advance("r", 5, [[6, 7]])
    assert await waiting.answer() == answered(num_tokens=4, block_ids=((6,),))
    producer.seal("r", [[8]])
    with pytest.raises(BlockIdsInvalid):
        producer.admit(grant)
    unknown = LeaseName(99, grant.epoch, bytes(32))
    asked = Asked(producer, AskSettled((unknown,), known=(), wait_ms=9))
    assert (await settled_of(asked)).ended == "unknown"


async def test_equal_prompts_at_once_are_given_one_offer_each(producer):
    waiting = [held(producer, chain(1, 2), at_least=2) for _ in range(3)]
    tickets = [producer.offer(str(number), [[1, 2]], 8, digests=[chain(1, 2)]) for number in range(2)]
    found = [await each.answer() for each in waiting[:2]]
    assert [each.ticket for each in found] == [ticket.to_params()["kvflow"] for ticket in tickets]
    assert waiting[2].answers == []
    kept = producer.keep("kept", [[1, 2]], 8, [chain(1, 2)])
    assert (await waiting[2].answer()).ticket == kept.to_params()["kvflow"]
    for _ in range(2):
        assert (await held(producer, chain(1, 2)).answer()).ticket == kept.to_params()["kvflow"]


async def test_an_offer_is_found_once_though_its_digests_come_again(producer):
    offer = producer.offer_progressive("r", [[]], 9, digests=[chain(1, 2, 3)])
    assert (await held(producer, chain(1, 2, 3)).answer()).count == 3
    waiting = held(producer, chain(1, 2, 3))
    offer.advance(4, [[3]], digests=[chain(1, 2, 3)])
    offer.seal([[4, 5]], digests=[chain(1, 2, 3)])
    await turns(4)
    assert waiting.answers == []
    other = producer.offer("other", [[1, 2, 6]], 9, digests=[chain(1, 2, 3)])
    assert (await waiting.answer()).ticket == other.to_params()["kvflow"]


async def test_digests_may_come_while_it_is_computed(producer):
    waiting = held(producer, chain(1, 2, 3), at_least=3)
    offer = producer.offer_progressive("r", [[]], 9, digests=[chain(1)])
    assert offer.ticket.grants[0].contents is None
    offer.advance(4, [[3]], digests=[chain(1, 2)])
    await turns(4)
    assert waiting.answers == []
    offer.advance(8, [[4]], digests=[chain(1, 2, 3)])
    assert (await waiting.answer()).count == 3
    offer.abort()
    assert producer._leases._leases._index._for_one == {}


async def test_a_connection_that_ends_takes_its_questions_with_it(producer):
    offer = producer.offer_progressive("r", [[3]], 8)
    gone = [settled(producer, offer.ticket, 0, above=8, key="gone"), held(producer, chain(1), key="gone")]
    stays = settled(producer, offer.ticket, 0, above=8)
    producer._leases.answers.forget("gone")
    producer._leases.answers.forget("unknown")
    offer.seal([[4]])
    assert (await settled_of(stays)).sealed
    producer.keep("kept", [[1]], 4, [chain(1)])
    await turns(4)
    assert [each.answers for each in gone] == [[], []]
    waiting = producer._leases.answers
    assert (waiting.at, waiting._of, waiting._sizes) == ({}, {}, {})


async def test_while_a_worker_drains_open_offers_go_on():
    async with opened() as world:
        offer = world.producer.offer_progressive("r", [[3]], 8)
        draining = asyncio.ensure_future(world.producer.drain(PATIENCE_S))
        await asyncio.sleep(0)
        with pytest.raises(WorkerDraining):
            world.producer.offer_progressive("late", [[3]], 8)
        waiting = settled(world.producer, offer.ticket, 0, above=8)
        offer.seal([[4]])
        assert (await settled_of(waiting)).sealed
        world.producer._leases.on_release([lease_of(offer.ticket)], ASKER, read=True)
        assert (await draining).complete


def test_a_worker_on_its_thread_offers_what_is_computed():
    with run_worker(config(), cache_of(10)) as worker:
        offer = worker.offer_progressive("r", [[3]], 12)
        offer.advance(4)
        worker.advance("r", 8, [[4]])
        worker.seal("r", [[5]])
        with pytest.raises(BlockIdsInvalid):
            offer.seal()
        another = worker.offer_progressive("another", [[3]], 12)
        worker.suspend()
        assert {(end.request_id, end.outcome) for end in worker.finished()} == {
            ("r", "revoked"),
            ("another", "revoked"),
        }
        assert not another.advance(4)
        assert not another.abort()
