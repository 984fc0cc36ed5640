"""What a worker lists of its pulls and leases, in every phase, and for whom."""

import asyncio
import itertools

import pytest

from kvflow.worker.snapshot import LISTED_MAX
from tests.helpers.waiting import patiently, until

from .helpers import PATIENCE_S
from .pulling import opened


@pytest.fixture
async def world():
    async with opened(inline_s_max=0) as world:
        yield world


async def listed(world, phase):
    """Wait until the only pull is in a phase; return what is listed of it."""
    [found] = await until(lambda: [each for each in world.consumer.snapshot().open_pulls if each.phase == phase])
    assert world.consumer.snapshot().pulls == 1
    return found


async def test_a_pull_whose_bytes_do_not_move_is_listed_until_it_is_quiet(world):
    await world.connect()
    world.faults.hung.add(0)
    pull = world.start(local_request_id="ours")
    await world.faults.strike()
    state = await listed(world, "wire")
    assert (state.pull_id, state.request_id, state.local_request_id) == (pull.id, "request-1", "ours")
    assert (state.num_peers, state.nbytes, state.nbytes_wanted) == (1, 0, 2 * world.target.bytes_per_block)
    assert state.peer == f"prefill-0/0/{world.producer.incarnation}"
    assert (state.transport, state.plane) == ("loopback", "loopback")
    assert 0 <= state.age_s < PATIENCE_S

    pull.cancel()
    assert (await listed(world, "draining")).peer == state.peer
    world.faults.heal()
    await patiently(pull.quiesced())
    assert world.consumer.snapshot().open_pulls == ()


async def test_a_pull_that_waits_for_the_admission_says_so(world):
    world.minted.add(0)
    await world.connect()
    ticket, admit = world.early()
    pull = world.start(ticket)
    state = await listed(world, "admission")
    assert state.request_id == "request-1"
    admit()
    await patiently(pull)


async def test_a_pull_whose_peer_is_not_connected_yet_names_the_peer(world):
    pull = world.start()
    (state,) = world.consumer.snapshot().open_pulls
    assert (state.phase, state.num_peers, state.transport) == ("check", 0, "")
    assert state.peer == f"prefill-0/0/{world.producer.incarnation}"
    await patiently(pull)


@pytest.fixture
async def short_leases():
    async with opened(theirs={"lease_s": 6.0}) as world:
        yield world


async def test_a_lease_is_listed_with_the_reader_that_renews_it(short_leases):
    world = short_leases
    await world.connect()
    await patiently(world.producer.wait_offer("connect"))
    ticket = world.ticket()
    (before,) = world.producer.snapshot().held_leases
    assert (before.request_id, before.num_blocks, before.readers) == ("request-1", 2, ())
    assert before.age_s >= 0
    assert 0 < before.expires_in_s <= 6

    world.consumer.hold(ticket)
    readers = await until(lambda: world.producer.snapshot().held_leases[0].readers)
    assert [(reader.engine_id, reader.num_ranks, reader.released) for reader in readers] == [("decode-0", 1, 0)]
    await world.pull(ticket)
    await patiently(world.producer.wait_offer("request-1"))
    assert world.producer.snapshot().held_leases == ()


async def test_the_oldest_are_listed_and_all_are_counted(world):
    for at in range(1, 6):
        world.ticket(f"r{at}", (at,))
    snapshot = world.producer.snapshot(limit=2)
    assert (snapshot.leases, [each.request_id for each in snapshot.held_leases]) == (5, ["r1", "r2"])
    assert world.producer.snapshot(limit=0).held_leases == ()
    assert len(world.producer.snapshot().held_leases) == 5 <= LISTED_MAX
    for at in range(1, 6):
        world.producer.revoke(f"r{at}")


@pytest.mark.parametrize("inline_s_max", [PATIENCE_S, 0])
async def test_which_way_reads_went_is_counted(inline_s_max):
    async with opened(inline_s_max=inline_s_max) as world, asyncio.timeout(PATIENCE_S):
        for pulls in itertools.count(1):
            await world.pull(world.ticket(f"request {pulls}"))
            found = world.consumer.snapshot()
            assert found.posted_inline + found.posted_on_thread == pulls
            # The first read of a connection is left to the read thread, and any while that is not at rest.
            assert found.posted_on_thread > 0
            if pulls >= 4 and (found.posted_inline or not inline_s_max):
                break
        assert (found.posted_inline > 0) == (inline_s_max > 0)


async def test_a_hand_over_is_measured():
    async with opened(inline_s_max=0) as world:
        costs = world.consumer._consumer._handing_over
        costs.seconds = 0.0
        await world.pull()
        assert costs.seconds > 0
