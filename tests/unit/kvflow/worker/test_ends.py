"""Who waits for something of a lease hears of its end at once, also if it ends between the look and the wait."""

import pytest

from kvflow.errors import StaleLease
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.runtime import open_worker
from tests.helpers.waiting import patiently

from .asking import answered, settled
from .helpers import PATIENCE_S, SECRET, cache_of, turns
from .pulling import config

SLOTS = 2


class Releasing:
    """A lock that lets something happen as soon as it is free for the first time."""

    def __init__(self, lock, happen):
        self._lock, self._happen = lock, happen

    def __enter__(self):
        return self._lock.__enter__()

    def __exit__(self, *error):
        self._lock.__exit__(*error)
        happen, self._happen = self._happen, lambda: None
        happen()


@pytest.fixture
async def worker():
    async with open_worker(config(lease_slots=SLOTS), cache_of(10)) as worker:
        yield worker
        worker.check()


@pytest.fixture
def when_free(worker, monkeypatch):
    """Have something happen as soon as the lock of the leases is free."""

    def arrange(happen):
        lock = Releasing(worker._leases._lock, happen)
        monkeypatch.setattr(worker._leases, "_lock", lock)
        monkeypatch.setattr(worker._leases.answers, "_lock", lock)

    return arrange


def mint_of(worker):
    return TicketMint("prefill-0", [worker.rank_address], cluster_secret=SECRET, block_sizes=[4])


async def test_a_lease_that_ends_between_the_look_and_the_wait_is_heard_of(worker, when_free):
    worker.offer("r", [[1]], 4)
    when_free(lambda: worker.revoke("r"))
    assert await patiently(worker.wait_offer("r")) == "revoked"


async def test_a_drain_hears_of_a_lease_that_ends_as_it_looks(worker, when_free):
    worker.offer("r", [[1]], 4)
    when_free(lambda: worker.revoke("r"))
    assert (await patiently(worker.drain(PATIENCE_S))).complete


async def test_an_offer_hears_of_the_slot_that_is_freed_as_it_looks(worker, when_free):
    for number in range(SLOTS):
        worker.offer(str(number), [[1]], 4)
    when_free(lambda: worker.revoke("0"))
    assert (await patiently(worker.offer_when_possible("r", [[1]], 4))).request_id == "r"


@pytest.mark.parametrize("happens", ["admitted", "void", "later"])
async def test_a_question_hears_what_becomes_of_a_grant_as_it_is_asked(worker, when_free, happens):
    mint = mint_of(worker)
    ticket, grant = mint.offer("r", block_ids=[[1]], num_tokens=4)
    mint.retire("r")
    _, later = mint.offer("later", block_ids=[[2]], num_tokens=4)
    act = {
        "admitted": lambda: worker.admit(grant),
        "void": lambda: worker.revoke("r", grant),
        "later": lambda: worker.admit(later),
    }
    when_free(act[happens])
    assert await patiently(settled(worker, ticket, 0, above=4).answer()) == ANSWERS[happens]


ANSWERS = {
    "admitted": answered(num_tokens=4, block_ids=((1,),), sealed=True),
    "void": answered(ended="revoked"),
    "later": answered(ended="unknown"),
}
"""What is answered about a grant that is admitted, is void, or has lost its slot to a later one."""


@pytest.mark.parametrize("happens", ANSWERS)
async def test_who_waits_for_a_grant_hears_at_once_what_becomes_of_it(worker, happens):
    mint = mint_of(worker)
    ticket, grant = mint.offer("r", block_ids=[[1]], num_tokens=4)
    mint.retire("r")
    _, later = mint.offer("later", block_ids=[[2]], num_tokens=4)
    assert (later.slot, later.epoch > grant.epoch) == (grant.slot, True)
    asked = settled(worker, ticket, 0, above=4)
    await turns(5)
    assert asked.answers == []
    match happens:
        case "admitted":
            worker.admit(grant)
        case "void":
            worker.revoke("r", grant)
        case "later":
            worker.admit(later)
    await turns(5)
    assert asked.answers == [ANSWERS[happens]]


async def test_another_lease_of_the_slot_leaves_a_later_grant_awaited(worker):
    mint = mint_of(worker)
    first = mint.offer("first", block_ids=[[2]], num_tokens=4)[1]
    mint.retire("first")
    ticket, grant = mint.offer("r", block_ids=[[1]], num_tokens=4)
    asked = settled(worker, ticket, 0, above=4)
    worker.admit(first)
    worker.revoke("first")
    await turns(5)
    assert asked.answers == []
    worker.admit(grant)
    await turns(5)
    assert asked.answers == [ANSWERS["admitted"]]


async def test_who_reads_a_void_grant_learns_that_it_was_revoked(worker):
    mint = mint_of(worker)
    ticket, grant = mint.offer("r", block_ids=[[1]], num_tokens=4)
    worker.revoke("r", grant)
    async with open_worker(config("decode-0"), cache_of(10)) as consumer:
        with pytest.raises(StaleLease) as caught:
            await patiently(consumer.pull(ticket, [[1]]))
    assert caught.value.ended_by == "revoked"
