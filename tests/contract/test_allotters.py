"""One issuer allots the slots of a worker: its own offers, or a mint. No message speaks of a limit not reached."""

import asyncio
from functools import partial

import msgspec
import pytest

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, ConfigInvalid
from kvflow.events import LeaseEnded, OfferAdmitted, OfferRefused
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import run_worker
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, Reports, cache_of
from tests.unit.kvflow.worker.pulling import config
from tests.unit.kvflow.worker.virtual import virtual

SLOTS = 3
REMEDY = "Offer and keep with the worker only, or with the mint only. A resumed worker may do the other."
OWN_FIRST = "this worker makes its own offers, the first for 'own', so it never takes the grants of a mint"
MINT_FIRST = "this worker takes the grants of a mint, the first for 'minted', so it never makes its own offers"
TOO_LATE = "Admit each grant once, in this incarnation of the worker, and only those of the newest mint."
BOTH = ": both allot the same slots"


def mint_of(worker, **named):
    return TicketMint("prefill-0", [worker.rank_address], cluster_secret=SECRET, block_sizes=[4], **named)


def digests_of(blocks):
    return [[bytes([block + 1]) for block in blocks]]


OWN = {
    "offer": lambda worker, name: worker.offer(name, [[1]], 4),
    "keep": lambda worker, name: worker.keep(name, [[1]], 4, digests_of([1])),
    "offer_progressive": lambda worker, name: worker.offer_progressive(name, [[]], 4),
    "offer_when_possible": lambda worker, name: worker.offer_when_possible(name, [[1]], 4),
}
"""Each door of a worker's own offers."""

MINTED = {
    "offer": lambda mint, name: mint.offer(name, block_ids=[[1]], num_tokens=4)[1],
    "keep": lambda mint, name: mint.keep(name, block_ids=[[1]], num_tokens=4, digests=digests_of([1]))[1],
    "offer_progressive": lambda mint, name: mint.offer_progressive(name, [[]], 4)[1],
}
"""Each kind of grant."""


@pytest.fixture
def reports():
    return Reports()


@pytest.fixture
async def worker(reports):
    async with open_worker(config(lease_slots=SLOTS), cache_of(10), hooks=[reports]) as worker:
        yield worker
        worker.check()


async def called(door, worker, name):
    """Call a door of the asyncio worker."""
    found = OWN[door](worker, name)
    return await found if asyncio.iscoroutine(found) else found


def called_on_thread(door, worker, name):
    """Call a door of the threaded worker."""
    found = OWN[door](worker, name)
    return found.result(PATIENCE_S) if door == "offer_when_possible" else found


def refused(caught, message):
    assert (caught.value.message, caught.value.remedy) == (message + BOTH, REMEDY)


@pytest.mark.parametrize("minted", MINTED)
@pytest.mark.parametrize("door", OWN)
async def test_a_worker_that_offers_by_itself_takes_no_grants(worker, reports, door, minted):
    await called(door, worker, "own")
    grant = MINTED[minted](mint_of(worker), "minted")
    for ended in (False, True):
        if ended:
            assert worker.revoke("own")
        with pytest.raises(ConfigInvalid) as caught:
            worker.admit(grant)
        refused(caught, OWN_FIRST)
    assert [(each.request_id, each.code) for each in reports.of(OfferRefused)] == [("minted", "config_invalid")] * 2
    for number in range(SLOTS):
        await called(door, worker, f"all slots {number}")


@pytest.mark.parametrize("minted", MINTED)
@pytest.mark.parametrize("door", OWN)
async def test_a_worker_that_takes_grants_never_offers_by_itself(worker, reports, door, minted):
    mint = mint_of(worker)
    worker.admit(MINTED[minted](mint, "minted"))
    for ended in (False, True):
        if ended:
            assert worker.revoke("minted")
        for _ in range(SLOTS + 1):  # it costs neither a slot nor a place in line
            with pytest.raises(ConfigInvalid) as caught:
                await called(door, worker, "own")
            refused(caught, MINT_FIRST)
    assert {(each.request_id, each.code) for each in reports.of(OfferRefused)} == {("own", "config_invalid")}
    mint.retire("minted")
    for number in range(SLOTS):
        worker.admit(MINTED["offer"](mint, f"all slots {number}"))


async def test_what_is_refused_decides_nothing(worker):
    mint = mint_of(worker)
    with pytest.raises(BlockIdsInvalid):
        worker.offer("wrong", [[99]], 4)
    with pytest.raises(BlockIdsInvalid):
        worker.admit(mint.offer("wrong", block_ids=[[99]], num_tokens=4)[1])
    worker.offer("own", [[1]], 4)
    with pytest.raises(ConfigInvalid):
        worker.admit(MINTED["offer"](mint, "minted"))


async def test_a_grant_that_is_void_decides_too(worker):
    worker.revoke("minted", MINTED["offer"](mint_of(worker), "minted"))
    with pytest.raises(ConfigInvalid) as caught:
        worker.offer("own", [[1]], 4)
    refused(caught, MINT_FIRST)


async def test_voiding_a_grant_harms_no_own_lease_and_is_refused_by_name(worker, reports):
    for door in ("keep", "offer", "offer"):
        await called(door, worker, "own" if door == "keep" else f"own {len(worker.snapshot().held_leases)}")
    grant = MINTED["offer"](mint_of(worker), "own 1")
    with pytest.raises(ConfigInvalid) as caught:
        worker.revoke("own 1", grant)
    refused(caught, OWN_FIRST)
    assert [(end.request_id, end.outcome) for end in reports.of(LeaseEnded)] == [("own 1", "revoked")], "it ends first"
    assert await worker.wait_offer("own 1") == "revoked"
    worker.offer("own 1", [[1]], 4)


@pytest.mark.parametrize("door", OWN)
def test_a_worker_on_its_thread_has_one_door_until_it_is_resumed(door):
    with run_worker(config(lease_slots=SLOTS), cache_of(10)) as worker:
        called_on_thread(door, worker, "own")
        with pytest.raises(ConfigInvalid) as caught:
            worker.admit(MINTED["offer"](mint_of(worker), "minted"))
        refused(caught, OWN_FIRST)
        worker.suspend()
        worker.resume(cache_of(10))
        worker.admit(MINTED["offer"](mint_of(worker), "minted"))
        with pytest.raises(ConfigInvalid) as caught:
            called_on_thread(door, worker, "own")
        refused(caught, MINT_FIRST)
        worker.suspend()
        worker.resume(cache_of(10))
        called_on_thread(door, worker, "own")


async def test_a_new_mint_finds_the_leases_of_the_former_one_in_its_slots(worker):
    """A scheduler has started again, and its workers have not."""
    former = mint_of(worker)
    held = [MINTED[kind](former, kind) for kind in ("offer", "keep")]
    for grant in held:
        worker.admit(grant)
    new = mint_of(worker)
    grant = MINTED["offer"](new, "new")
    with pytest.raises(CapacityExceeded) as caught:
        worker.admit(grant)
    assert caught.value.message == "no room for more leases in slot 0: the limit is 1"
    assert caught.value.remedy == (
        "It holds that of 'offer'. Retire a request when its lease has ended on every rank. "
        "Before a new mint signs, let the leases of the former one end, or revoke them."
    )
    assert worker.revoke("offer")
    worker.admit(grant)
    worker.admit(MINTED["offer"](new, "in the slot of what was kept"))
    assert {lease.request_id for lease in worker.snapshot().held_leases} == {"new", "in the slot of what was kept"}


async def test_a_grant_that_comes_too_late_hears_what_has_become_of_its_slot(worker):
    former, new = (mint_of(worker, draw_bits=lambda _, start=start: start) for start in (0, 1 << 40))
    once, void, late = (MINTED["offer"](former, name) for name in ("once", "void", "late"))
    worker.admit(once)
    worker.revoke("once")
    worker.revoke("void", void)
    for name in "abc":
        worker.admit(MINTED["offer"](new, name))
    worker.revoke("a")
    worker.revoke("b", void)
    fate = ", which a later grant has had"
    for grant in (once, void, late):
        with pytest.raises(BlockIdsInvalid) as caught:
            worker.admit(grant)
        assert caught.value.message == f"the grant's epoch {grant.epoch} is not newer than slot {grant.slot}'s{fate}"
        assert caught.value.remedy == TOO_LATE


async def test_a_grant_that_was_admitted_or_is_void_is_not_called_too_old(worker):
    mint = mint_of(worker)
    once, void = (MINTED["offer"](mint, name) for name in ("once", "void"))
    worker.admit(once)
    worker.revoke("once")
    worker.revoke("void", void)
    for grant in (once, void):
        with pytest.raises(BlockIdsInvalid) as caught:
            worker.admit(grant)
        fate = "it was admitted before, or is void"
        assert caught.value.message == f"the grant's epoch {grant.epoch} is not newer than slot {grant.slot}'s: {fate}"
        assert caught.value.remedy == TOO_LATE


def test_a_slot_that_the_worker_has_not_is_named():
    with run_worker(config(lease_slots=1), cache_of()) as worker:
        larger = msgspec.structs.replace(worker.rank_address, slots=2)
        mint = TicketMint("prefill-0", [larger], cluster_secret=SECRET, block_sizes=[4])
        MINTED["offer"](mint, "fits")
        with pytest.raises(BlockIdsInvalid, match="the grant has slot 1, and this worker has 1") as caught:
            worker.admit(MINTED["offer"](mint, "minted"))
        assert caught.value.remedy == "Make a new mint with the rank_address of every worker."


@pytest.mark.parametrize("door", ["offer", "keep", "offer_progressive"])
async def test_an_offer_hears_of_the_limit_only_when_it_is_reached(worker, door):
    """A slot was freed, and the loop has not served yet those that wait: one slot is theirs, and another is not."""
    for number in range(SLOTS):
        worker.offer(str(number), [[1]], 4)
    with pytest.raises(CapacityExceeded, match=f"no room for more leases: the limit is {SLOTS}") as caught:
        worker.offer("too many", [[1]], 4)
    assert caught.value.remedy == "Wait for a lease to end, or raise lease_slots."
    waiting = asyncio.ensure_future(worker.offer_when_possible("waits", [[1]], 4))
    await asyncio.sleep(0)
    for free in range(2):
        message = f"no room for more leases beside the offers that wait: the limit is {SLOTS}"
        with pytest.raises(CapacityExceeded, match=message) as caught:
            await called(door, worker, "too many")
        assert caught.value.remedy == "Wait for a slot in turn with offer_when_possible, or raise lease_slots."
        worker.revoke(str(free))
    await called(door, worker, "beside")
    assert not waiting.done()
    assert (await waiting).request_id == "waits"
    if door == "keep":
        worker.offer("in its slot", [[1]], 4)
    with pytest.raises(CapacityExceeded):
        worker.offer("too many", [[1]], 4)


async def test_an_offer_that_was_served_waits_no_longer():
    """A hook hears of the lease before its caller does, and offers what fits beside it."""

    def on_admitted(event):
        if isinstance(event, OfferAdmitted) and event.request_id == "first":
            for number in range(SLOTS - 1):
                worker.offer(str(number), [[1]], 4)

    async with open_worker(config(lease_slots=SLOTS), cache_of(), hooks=[on_admitted]) as worker:
        await worker.offer_when_possible("first", [[1]], 4)
        assert worker.snapshot().leases == SLOTS


def test_an_offer_whose_turn_does_not_come_says_so():
    """Slots were freed while it waited, for those before it."""
    with virtual(theirs={"lease_slots": 1}) as world:
        (life,) = world.producers
        worker = life.worker
        world.do(partial(worker.offer, "held", [[1]], 4), life=life)
        before = life.process.create_task(worker.offer_when_possible("before", [[1]], 4), name="drive the first")
        waiting = life.process.create_task(
            worker.offer_when_possible("r", [[1]], 4, timeout_s=5.0), name="drive the other"
        )
        world.pass_time(1.0)
        world.do(partial(worker.revoke, "held"), life=life)
        world.pass_time(4.5)
        assert before.result().request_id == "before"
        error = waiting.exception()
        assert error.message == "no room for more leases: the limit is 1"
        assert error.remedy == "Its turn did not come within 5.0 s: wait for longer, or raise lease_slots."


def test_a_mint_hears_of_the_limit_when_every_slot_is_allotted():
    with run_worker(config(lease_slots=SLOTS), cache_of()) as worker:
        mint = mint_of(worker)
        for number in range(SLOTS):
            MINTED["offer"](mint, str(number))
        for sign in MINTED.values():
            with pytest.raises(CapacityExceeded, match=f"no room for more leases: the limit is {SLOTS}") as caught:
                sign(mint, "too many")
            assert caught.value.remedy == "Wait for a lease to end, or raise lease_slots."
        mint.retire("0")
        MINTED["offer"](mint, "fits")
