"""Leases as an engine sees them: effective on return, from any thread, and never a slot lost."""

import asyncio
import threading
from functools import partial

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.epochs import EpochTable
from kvflow.cache.leases import LeaseEnded, LeaseTable, Reader
from kvflow.cache.mint import Mint
from kvflow.cache.tickets import RankAddress
from kvflow.errors import BlockIdsInvalid, CapacityExceeded, RequestUnknown, WorkerClosed
from kvflow.ids import worker_name
from kvflow.observability.events import OfferAdmitted
from kvflow.observability.logs import EventLog, Reporter
from kvflow.transfer.pairs import FEW
from kvflow.worker.offers import Offers
from kvflow.worker.producer import ENDED_MAX, LeaseKeeper

from .helpers import PATIENCE_S, Clock, Reports, futures_left

ALONE = Reader("decode-0", 0, 1)
SLOTS = 3
ADDRESS = RankAddress(0, "0" * 32, "tcp://127.0.0.1:5000", "0", SLOTS)


def mint_of(address=ADDRESS, engine_id="prefill-0", **how):
    return Mint(engine_id, [address], sign=lambda payload: bytes(32), lease_s=30.0, **how)


class Producer:
    """A keeper and its offers, over a table that a test can look into."""

    def __init__(self, report=None, block_sizes=(4, 4)):
        self.clock = Clock()
        self.reports = Reports()
        self.epochs = EpochTable(SLOTS, 0)
        self.account = BlockAccount([0, 0], 10)
        self.keeper = LeaseKeeper(
            leases=LeaseTable(self.epochs),
            account=self.account,
            num_blocks=10,
            block_sizes=block_sizes,
            lease_s=30.0,
            name=worker_name("prefill-0", 0, ADDRESS.incarnation),
            clock=self.clock,
            loop=asyncio.get_running_loop(),
            report=Reporter(EventLog(), [report or self.reports]),
        )
        self.mint = mint_of()
        self.offers = Offers(self.mint, self.keeper, asyncio.get_running_loop())

    def offer(self, request_id="r", block_ids=((1, 2), (3,)), num_tokens=8):
        return self.offers.offer(request_id, block_ids, num_tokens).grants[0]


@pytest.fixture
async def producer():
    return Producer()


def key(grant):
    return grant.slot, grant.epoch_value


async def test_an_offer_is_held_on_return(producer):
    grant = producer.offer()
    assert producer.epochs[grant.slot] == grant.epoch_value
    assert producer.keeper.held() == 1
    assert producer.reports.events == [OfferAdmitted("r", 3, 30.0)]


async def test_a_block_in_two_groups_that_share_bytes_is_not_lent_and_costs_no_slot(producer):
    for number in range(2 * SLOTS):
        with pytest.raises(BlockIdsInvalid, match="block 3 is in groups 0 and 1"):
            producer.offer(f"r{number}", ((3,), (3,)), 4)
    assert producer.keeper.held() == 0
    assert producer.offer("r", ((3, 3), (4,)), 8), "twice in one group is for the reader to judge"
    producer.keeper.check()


async def test_a_revocation_is_effective_on_return_and_says_whether_there_was_one(producer):
    grant = producer.offer()
    assert producer.keeper.revoke("r")
    assert producer.epochs[grant.slot] > grant.epoch_value
    assert not producer.keeper.revoke("r")
    assert not producer.keeper.revoke("unknown")
    assert producer.reports.of(LeaseEnded) == [LeaseEnded("r", "revoked", 0.0)]


async def test_releases_are_answered_one_by_one(producer):
    one, other = producer.offer("a"), producer.offer("b")
    answers = producer.keeper.on_release([key(one), (one.slot, one.epoch_value + 99), key(other)], Reader("d", 0, 2))
    assert answers == ["counted", "unknown", "counted"]
    assert producer.keeper.on_release([key(one)], Reader("d", 1, 2)) == ["ended"]
    assert producer.keeper.held() == 1


async def test_a_lease_that_was_released_before_it_was_admitted_ends_on_admission(producer):
    """A rank of a reader that needs other ranks of the ticket only may be done with it before this one admits it."""
    _, grant = producer.mint.offer("r", block_ids=((1, 2), (3,)), num_tokens=8)
    assert producer.keeper.on_release([key(grant)], ALONE) == ["unknown"]
    producer.keeper.admit(grant)
    assert producer.reports.events == [OfferAdmitted("r", 3, 30.0), LeaseEnded("r", "released", 0.0)]
    assert producer.keeper.held() == 0
    producer.keeper.check()
    assert await producer.keeper.wait_offer("r") == "released"


async def test_renewals_say_how_long(producer):
    grant = producer.offer()
    producer.clock.now += 20
    assert producer.keeper.on_renew([key(grant), (0, 99)]) == (["held", "unknown"], 30.0)


async def test_whoever_waits_is_told_and_whoever_asks_later_is_too(producer):
    grant = producer.offer()
    waiters = [asyncio.ensure_future(producer.keeper.wait_offer("r")) for _ in range(2)]
    await asyncio.sleep(0)
    producer.keeper.on_release([key(grant)], ALONE)
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*waiters) == ["released", "released"]
        assert await producer.keeper.wait_offer("r") == "released"


async def test_a_waiter_that_gave_up_disturbs_nobody(producer):
    producer.offer()
    impatient = asyncio.ensure_future(producer.keeper.wait_offer("r"))
    patient = asyncio.ensure_future(producer.keeper.wait_offer("r"))
    await asyncio.sleep(0)
    impatient.cancel()
    producer.keeper.revoke("r")
    async with asyncio.timeout(PATIENCE_S):
        assert await patient == "revoked"
        with pytest.raises(asyncio.CancelledError):
            await impatient


@pytest.mark.parametrize("wait", ["wait_offer", "wait_idle"])
async def test_a_caller_that_gives_up_waiting_is_forgotten(producer, wait, monkeypatch):
    producer.offer()
    call = partial(producer.keeper.wait_offer, "r") if wait == "wait_offer" else producer.keeper.wait_idle
    patient = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    assert await futures_left(call, monkeypatch) == 0
    producer.keeper.revoke("r")
    async with asyncio.timeout(PATIENCE_S):
        assert await patient in ("revoked", None)


async def test_what_was_never_offered_is_unknown(producer):
    with pytest.raises(RequestUnknown) as caught:
        await producer.keeper.wait_offer("r")
    assert caught.value.request_id == "r"


async def test_a_name_that_is_offered_again_forgets_its_past(producer):
    producer.offer()
    producer.keeper.revoke("r")
    producer.offer()
    waiter = asyncio.ensure_future(producer.keeper.wait_offer("r"))
    await asyncio.sleep(0)
    assert not waiter.done()
    producer.keeper.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await waiter == "revoked"


async def test_outcomes_are_kept_for_a_while_only(producer, monkeypatch):
    assert ENDED_MAX > 1000
    monkeypatch.setattr("kvflow.worker.producer.ENDED_MAX", 2)
    for name in ("a", "b", "c"):
        producer.offer(name)
        producer.keeper.revoke(name)
    assert await producer.keeper.wait_offer("b") == "revoked"
    with pytest.raises(RequestUnknown):
        await producer.keeper.wait_offer("a")


async def test_leases_expire_by_the_clock_and_the_next_one_in_its_own_time(producer):
    producer.offer("early")
    producer.clock.now += 10
    producer.offer("late")
    producer.clock.now += 20
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        expiring = tasks.create_task(producer.keeper.expire_leases())
        assert await producer.keeper.wait_offer("early") == "expired"
        assert producer.keeper.held() == 1
        producer.clock.now += 10
        producer.offer("wakes the task")
        assert await producer.keeper.wait_offer("late") == "expired"
        expiring.cancel()
    assert producer.keeper.held() == 1


async def test_the_task_that_ends_leases_is_woken_for_the_first_to_end_only(producer, monkeypatch):
    woken = []
    loop = asyncio.get_running_loop()
    wake = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call, *given: (woken.append(call), wake(call, *given)))

    def offer(name, lease_s):
        _, grant = producer.mint.offer(name, block_ids=((1,), (2,)), num_tokens=4)
        producer.keeper.admit(replace(grant, lease_ms=1000 * lease_s))
        return len(woken)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        expiring = tasks.create_task(producer.keeper.expire_leases())
        await asyncio.sleep(0)
        assert offer("first", 30) == 1
        for _ in range(10):
            await asyncio.sleep(0)
        assert offer("later", 31) == 1, "nobody needs to know: the task looks before that"
        producer.keeper.revoke("first")
        assert offer("sooner", 20) == 2
        producer.clock.now += 20
        assert offer("overdue", 20) == 3
        assert await producer.keeper.wait_offer("sooner") == "expired"
        expiring.cancel()
    assert producer.keeper.requests() == ("later", "overdue")


async def test_an_end_disturbs_the_loop_only_for_those_who_wait(producer, monkeypatch):
    told = []
    loop = asyncio.get_running_loop()
    tell = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda call, *given: (told.append(call), tell(call, *given)))
    for name in ("a", "b"):
        producer.offer(name)
    told.clear()
    producer.keeper.revoke("a")
    assert not told
    waiting = asyncio.ensure_future(producer.keeper.wait_idle())
    await asyncio.sleep(0)
    producer.keeper.revoke("b")
    assert len(told) == 1
    async with asyncio.timeout(PATIENCE_S):
        await waiting


async def test_offers_and_ends_of_several_threads_lose_nothing(producer):
    """Two threads offer and revoke the same blocks, while the loop gives back what a third one offers."""
    rounds = 40

    def offer_and_revoke(name):
        for turn in range(rounds):
            grant = producer.offer(f"{name} {turn}", ((1, 2, 2, -1), (3,)), 16)
            assert producer.epochs[grant.slot] == grant.epoch_value
            assert producer.keeper.revoke(grant.request_id)
            assert producer.epochs[grant.slot] > grant.epoch_value

    async def offer_and_release():
        for turn in range(rounds):
            grant = await asyncio.to_thread(producer.offer, f"c {turn}")
            assert producer.keeper.on_release([key(grant)], ALONE) == ["ended"]

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(asyncio.to_thread(offer_and_revoke, "a"))
        tasks.create_task(asyncio.to_thread(offer_and_revoke, "b"))
        tasks.create_task(offer_and_release())
    assert producer.keeper.held() == 0
    producer.keeper.check()
    assert len(producer.reports.of(LeaseEnded)) == 3 * rounds


async def test_an_offer_that_is_refused_costs_no_slot(producer):
    for wrong in (((1,),), ((10,), (1,)), ((1,), (-2,))):
        for _ in range(SLOTS + 1):
            with pytest.raises(BlockIdsInvalid):
                producer.offer(block_ids=wrong)
    for index in range(SLOTS):
        producer.offer(str(index))
    with pytest.raises(CapacityExceeded):
        producer.offer("one too many")


@pytest.mark.parametrize(
    ("block_ids", "num_tokens", "group"),
    [(((1, 2, 3), (4,)), 8, 0), (((1,), (2, 3)), (4, 4), 1), (((1, 2), (3,)), 4, 0)],
)
async def test_more_blocks_than_tokens_are_refused(producer, block_ids, num_tokens, group):
    """The last block must hold the last token; a block behind it would shift everything by one."""
    with pytest.raises(BlockIdsInvalid, match="blocks for") as caught:
        producer.offer(block_ids=block_ids, num_tokens=num_tokens)
    assert caught.value.group == group
    assert producer.keeper.held() == 0


@pytest.mark.parametrize(
    "mint", [mint_of(engine_id="prefill-1"), mint_of(RankAddress(0, "1" * 32, "tcp://127.0.0.1:5000", "0", SLOTS))]
)
async def test_a_grant_for_another_worker_or_another_life_is_refused(producer, mint):
    grant = mint.offer("r", block_ids=[[1], [2]], num_tokens=4)[1]
    with pytest.raises(BlockIdsInvalid, match="does not name this worker"):
        producer.keeper.admit(grant)


async def test_a_new_mint_starts_above_what_was_held(producer):
    last = [producer.offer(str(index)).epoch_value for index in range(SLOTS)][-1]
    assert producer.keeper.highest_epoch() == last
    producer.keeper.revoke(str(SLOTS - 1))
    assert producer.keeper.highest_epoch() == last + 1


async def test_an_end_is_told_before_the_name_is_free_again():
    """Otherwise an engine could take it for the end of the next offer of that name, and reuse blocks that are held."""
    refused = []

    def hook(event):
        if isinstance(event, LeaseEnded):
            with pytest.raises(BlockIdsInvalid, match="on offer already") as caught:
                producer.offer(event.request_id)
            refused.append(caught.value)

    producer = Producer(hook)
    producer.offer("r")
    producer.keeper.revoke("r")
    assert len(refused) == 1
    producer.offer("r")


async def test_an_ended_lease_gives_its_slot_back_however_it_ended(producer):
    for index in range(3 * SLOTS):
        grant = producer.offer(str(index))
        match index % 3:
            case 0:
                producer.keeper.revoke(str(index))
            case 1:
                producer.keeper.on_release([key(grant)], ALONE)
            case _:
                producer.clock.now += 31
                await expired(producer, str(index))
    for index in range(SLOTS):
        producer.offer(f"again {index}")


async def expired(producer, name):
    async with asyncio.timeout(PATIENCE_S):
        task = asyncio.ensure_future(producer.keeper.expire_leases())
        assert await producer.keeper.wait_offer(name) == "expired"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_closing_revokes_everything_and_refuses_the_rest(producer):
    for name in ("a", "b"):
        producer.offer(name)
    assert producer.keeper.close() == 2
    with pytest.raises(WorkerClosed):
        producer.offer("c")
    assert {event.outcome for event in producer.reports.of(LeaseEnded)} == {"revoked"}
    assert producer.keeper.close() == 0


async def test_one_message_gives_back_short_and_long_lists_and_blocks_that_stand_in_several(producer):
    few = [producer.offer(name, ((1, 2, 2, -1), (3,)), 16) for name in "ab"]
    producer.offer("c", ((1,) * (FEW + 1), (-1,)), 4 * (FEW + 1))
    waiting = [asyncio.ensure_future(producer.keeper.wait_offer(name)) for name in "abc"]
    await asyncio.sleep(0)
    assert producer.keeper.on_release([key(grant) for grant in few], ALONE) == ["ended"] * 2
    producer.keeper.check()
    few = [producer.offer(name, ((1, 2, 2, -1), (3,)), 16) for name in "ab"]
    assert producer.keeper.close() == 3
    producer.account.check(lent=[])
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*waiting) == ["released", "released", "revoked"]


async def test_a_hook_may_ask_and_act_when_it_hears_of_an_end():
    """A hook runs where the end happened; it must not wait for what its own thread holds."""
    heard = []

    def hook(event):
        if isinstance(event, LeaseEnded):
            heard.append((event.request_id, producer.keeper.held(), producer.keeper.revoke("b")))
            if event.request_id == "b":
                producer.offer("c")

    producer = Producer(hook)
    for name in ("a", "b"):
        producer.offer(name)
    thread = threading.Thread(target=producer.keeper.revoke, args=("a",), daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert sorted(heard) == [("a", 1, True), ("b", 0, False)]
    assert producer.keeper.held() == 1


async def test_threads_offer_and_revoke_at_once_and_every_slot_comes_back(producer):
    failures = []

    def engine(name):
        for index in range(200):
            try:
                producer.offer(f"{name}-{index}")
                assert producer.keeper.revoke(f"{name}-{index}")
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                failures.append(error)

    threads = [threading.Thread(target=engine, args=(name,)) for name in range(SLOTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert failures == []
    assert producer.keeper.held() == 0
    assert len({producer.offer(str(index)).slot for index in range(SLOTS)}) == SLOTS


async def test_blocks_are_lent_as_long_as_a_lease_lasts_and_to_as_many_as_ask(producer):
    grant = producer.offer("a", ((1, 2), (3,)))
    producer.offer("b", ((2,), (-1,)))
    producer.keeper.check()
    for ids in ([[1], []], [[], [1]], [[2], []], [[3], []]):
        with pytest.raises(BlockIdsInvalid, match="is on offer"):
            producer.account.receive([np.array(each, np.int64) for each in ids])
    producer.keeper.on_release([key(grant)], ALONE)
    producer.keeper.check()
    producer.account.receive([np.array([1, 3]), np.array([], np.int64)])
    with pytest.raises(BlockIdsInvalid, match="is on offer"):
        producer.account.receive([np.array([2]), np.array([], np.int64)])
    assert producer.keeper.revoke("b")
    producer.account.receive([np.array([2]), np.array([], np.int64)])
    producer.account.check(lent=[])


async def test_blocks_that_receive_are_not_offered_and_nothing_is_held_of_a_refused_offer(producer):
    ids = [np.array([2]), np.array([], np.int64)]
    producer.account.receive(ids)
    with pytest.raises(BlockIdsInvalid, match="group 0: block 2 cannot be offered") as caught:
        producer.offer("a", ((1, 2), (3,)))
    assert caught.value.remedy
    assert producer.keeper.held() == 0
    producer.account.end_receipt(ids)
    producer.offer("a", ((1, 2), (3,)))
    with pytest.raises(BlockIdsInvalid, match="on offer already"):
        producer.offer("a", ((4,), (5,)))
    producer.keeper.check()


async def test_a_request_has_one_state():
    keeper = Producer(block_sizes=[4, 0])
    keeper.offer("a", ((1, 2), (3,)))
    with pytest.raises(BlockIdsInvalid, match="group 1: 2 blocks for 8 tokens, which at most 1 can hold"):
        keeper.offer("b", ((1, 2), (3, 4)))
