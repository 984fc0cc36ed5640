"""A producer lists every block that the next token needs, or -1 for one that is absent; a consumer may list fewer."""

import asyncio
from types import SimpleNamespace

import pytest

import kvflow
from kvflow.errors import BlockIdsInvalid
from kvflow.events import OfferRefused
from kvflow.layout.manifest import Layer, ManifestGroup
from kvflow.leases.held import OpenGroups
from kvflow.rendezvous.issuer import TicketMint
from kvflow.worker.runtime import open_worker
from kvflow.worker.threaded import run_worker
from tests.helpers.waiting import patiently

from .helpers import SECRET
from .pulling import config, opened

SHAPE = {"num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
SPECS = {
    "full": kvflow.FullAttention(block_size=16, **SHAPE),
    "window": kvflow.SlidingWindow(block_size=16, window=20, **SHAPE),
    "state": kvflow.Mamba(block_size=16, states=(kvflow.State("conv_x", (2, 3), "float16", shard_axis=0),)),
}
TOKENS = 48  # three blocks; the next token needs tokens 29 to 47 of the window
WHOLE = ((1, 2, 3), (4, 5), (6,))
REMEDY = "List each of these blocks; -1 stands for one that is absent."

SHORT = {
    "full, one": (((2, 3), (4, 5), (6,)), 0, 2, 3),
    "full, all": (((), (4, 5), (6,)), 0, 0, 3),
    "window, one": (((1, 2, 3), (5,), (6,)), 1, 1, 2),
    "window, all": (((1, 2, 3), (), (6,)), 1, 0, 2),
    "state": (((1, 2, 3), (4, 5), ()), 2, 0, 1),
}
"""Lists that lack blocks; the group, how many it has, and how many it needs."""


def cache_of(specs=SPECS):
    return kvflow.allocate(specs, num_blocks=16, layout="BLHNC", groups=groups_of(specs))


def groups_of(specs):
    return tuple(kvflow.Group((name,), spec.kind, 16, spec.window) for name, spec in specs.items())


def digests_of(block_ids):
    return [[bytes([block + 1]) if block >= 0 else b"" for block in ids] for ids in block_ids]


def mint_of(worker):
    return TicketMint("prefill-0", [worker.rank_address], cluster_secret=SECRET, block_sizes=[16, 16, 0])


def offer(worker, block_ids):
    worker.offer("r", block_ids, TOKENS)


async def offer_when_possible(worker, block_ids):
    await worker.offer_when_possible("r", block_ids, TOKENS)


def keep(worker, block_ids):
    worker.keep("r", block_ids, TOKENS, digests_of(block_ids))


def admit(worker, block_ids):
    worker.admit(mint_of(worker).offer("r", block_ids=block_ids, num_tokens=TOKENS)[1])


def admit_kept(worker, block_ids):
    digests = digests_of(block_ids)
    worker.admit(mint_of(worker).keep("r", block_ids=block_ids, num_tokens=TOKENS, digests=digests)[1], digests)


DOORS = [offer, offer_when_possible, keep, admit, admit_kept]


@pytest.fixture
async def worker(reports):
    async with open_worker(config(), cache_of(), hooks=[reports]) as worker:
        yield worker
        worker.check()


async def called(door, worker, block_ids):
    found = door(worker, block_ids)
    if asyncio.iscoroutine(found):
        await found


def refused(caught, short):
    _, group, count, needed = SHORT[short]
    fault = f"group {group}: {count} blocks for {TOKENS} tokens, and the next token needs the last {needed}"
    assert (caught.value.message, caught.value.remedy, caught.value.group) == (fault, REMEDY, group)


@pytest.mark.parametrize("short", SHORT)
@pytest.mark.parametrize("door", DOORS)
async def test_too_few_blocks_are_refused(worker, reports, door, short):
    with pytest.raises(BlockIdsInvalid) as caught:
        await called(door, worker, SHORT[short][0])
    refused(caught, short)
    assert [each.code for each in reports.of(OfferRefused)] == ["block_ids_invalid"]
    assert worker.snapshot().leases == 0


@pytest.mark.parametrize(
    "block_ids",
    [WHOLE, ((-1, 2, 3), (-1, 5), (-1,)), ((-1, -1, -1), (-1, -1), (6,)), ((1, 2, 3), (7, 4, 5), (6,))],
    ids=["whole", "absent", "all absent", "before the window"],
)
@pytest.mark.parametrize("door", DOORS)
async def test_a_list_may_name_absent_blocks_and_those_before_a_window(worker, door, block_ids):
    await called(door, worker, block_ids)
    assert worker.snapshot().leases == 1


@pytest.mark.parametrize("minted", [False, True])
@pytest.mark.parametrize("short", SHORT)
async def test_too_few_blocks_do_not_seal(worker, short, minted):
    block_ids, group, count, needed = SHORT[short]
    if minted:
        worker.admit(mint_of(worker).offer_progressive("r", [[], [], []], TOKENS)[1])
    else:
        worker.offer_progressive("r", [[], [], []], TOKENS)
    with pytest.raises(BlockIdsInvalid) as caught:
        worker.seal("r", block_ids)
    most = 1 if group == 2 else 3
    assert (
        caught.value.message
        == f"group {group}: {count} blocks are told, and {needed} to {most} would hold these tokens"
    )
    (state,) = worker.snapshot().held_leases
    assert state.num_blocks == 0
    worker.check()
    worker.seal("r", ((-1, 2, 3), (-1, 5), (6,)))
    assert worker.snapshot().held_leases[0].num_blocks == 6


async def test_a_consumer_may_list_fewer_and_reads_no_absent_block():
    async with opened(sources=[cache_of()], target=cache_of()) as world:
        first, ticket = (world.producer.offer(name, ((-1, 2, 3), (-1, 5), (6,)), TOKENS) for name in "rs")
        world.consumer.start_pull(first, ((3,), (5,), (6,)))
        await world.records()
        await patiently(world.consumer.pull(ticket, ((2, 3), (5,), ())))
        with pytest.raises(BlockIdsInvalid, match="group"):
            await world.consumer.pull(ticket, ((1, 2, 3), (5,), ()))


def test_a_chunk_that_has_just_begun_needs_no_block():
    specs = {"full": SPECS["full"], "chunk": kvflow.ChunkedLocal(block_size=16, chunk=16, **SHAPE)}
    with run_worker(config(), cache_of(specs)) as worker:
        worker.offer("r", ((1, 2, 3), ()), TOKENS)
        with pytest.raises(BlockIdsInvalid, match=r"group 1: 0 blocks for 49 tokens, .* the last 1"):
            worker.offer("s", ((1, 2, 3, 4), ()), TOKENS + 1)


def test_a_group_needs_what_the_widest_of_its_layers_needs():
    def least(*windows):
        layers = tuple(Layer(str(window), "sliding" if window else "full", window, ()) for window in windows)
        manifest = SimpleNamespace(groups=(ManifestGroup("mixed", 16, layers),), aliases=(0,))
        return OpenGroups.of(manifest).least(0, 160)

    assert [least(20), least(20, 60), least(20, 0), least()] == [2, 4, 10, 0]
