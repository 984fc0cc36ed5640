"""Open offers between unlike caches: real workers of one process, whose ranks settle apart. Every byte is compared."""

import asyncio
import itertools
import random

import pytest
import torch

import kvflow
from kvflow.errors import BlockRangeMismatch, StaleLease
from kvflow.layout.shards import Shard
from kvflow.leases.tickets import join_tickets
from tests.helpers.waiting import until

from .helpers import PATIENCE_S, cache_of
from .pulling import failure, opened

TOKENS = 150
HEADS, SIZE = 4, 8


def specs(block_size, *, window=False, state=False):
    """Return a layer of full attention, with one of a sliding window and one with a state if they are wanted."""
    shape = {"num_kv_heads": HEADS, "head_size": SIZE, "dtype": "float16"}
    found = {"full": kvflow.FullAttention(block_size=block_size, **shape)}
    if window:
        found["window"] = kvflow.SlidingWindow(block_size=block_size, window=20, **shape)
    if state:
        states = (kvflow.State("conv_x", (HEADS, 3), "float16", shard_axis=0),)
        found["state"] = kvflow.Mamba(block_size=block_size, states=states)
    return found


class Contents:
    """What the caches must hold: drawn for each token, head and state."""

    def __init__(self, layers):
        draw = torch.Generator().manual_seed(1)
        self.tokens = {
            (layer, role): torch.randn((TOKENS, HEADS, SIZE), generator=draw).half()
            for layer in layers
            if layer != "state"
            for role in ("k", "v")
        }
        self.state = torch.randn((HEADS, 3), generator=draw).half()

    def places(self, cache, lists):
        """Yield each token of each block that is listed, as a view of the cache and what must be there."""
        for group, ids in zip(cache.groups, lists, strict=True):
            for layer in group.layers:
                if layer == "state":
                    first, count, _ = cache.held(layer, "conv_x")
                    for block in ids:
                        yield cache.component(layer, "conv_x")[block], self.state[first : first + count], TOKENS
                    continue
                last = -(-TOKENS // group.block_size)
                for role in ("k", "v"):
                    first, count, _ = cache.held(layer, role)
                    view, wanted = cache.component(layer, role), self.tokens[layer, role]
                    for number, block in enumerate(ids, last - len(ids)):
                        start = number * group.block_size
                        here = wanted[start : start + group.block_size, first : first + count].transpose(0, 1)
                        if block >= 0:
                            yield view[block][:, : here.shape[1]], here, start + here.shape[1]

    def write(self, cache, lists):
        for place, wanted, _ in self.places(cache, lists):
            place.copy_(wanted)

    def check(self, cache, lists):
        places = list(self.places(cache, lists))
        assert places
        for place, wanted, end in places:
            assert torch.equal(place, wanted), f"wrong bytes before token {end}"


def block_lists(cache, draw):
    """Return scattered blocks for every group, with only those that a window reaches."""
    free = draw.sample(range(cache.num_blocks), cache.num_blocks)
    lists = []
    for group in cache.groups:
        count = -(-TOKENS // group.block_size)
        if group.kind == "sliding":
            count = kvflow.window_blocks(group, TOKENS)
        lists.append([free.pop() for _ in range(1 if group.kind == "mamba" else count)])
    return lists


def settling(cache, lists, num_tokens):
    """Return the blocks that hold so many tokens, of the groups that settle."""
    return [
        ids[: num_tokens // group.block_size] if group.kind == "full" else []
        for group, ids in zip(cache.groups, lists, strict=True)
    ]


def padded(cache, settled):
    """Return lists of all blocks, of which only those that are settled are there."""
    return [
        each + [-1] * (-(-TOKENS // group.block_size) - len(each)) if group.kind == "full" else []
        for group, each in zip(cache.groups, settled, strict=True)
    ]


CASES = {
    "alike": (16, 16, 1, 1, {}),
    "larger blocks": (16, 64, 1, 1, {}),
    "smaller blocks": (64, 16, 1, 1, {}),
    "2 to 1": (16, 16, 2, 1, {}),
    "1 to 2": (16, 16, 1, 2, {}),
    "2 to 1, larger blocks": (16, 64, 2, 1, {"window": True}),
    "windows": (16, 16, 1, 1, {"window": True}),
    "states": (16, 16, 1, 1, {"state": True}),
    "windows and states, 2 to 1": (16, 16, 2, 1, {"window": True, "state": True}),
}


def caches(theirs, ours, ranks, readers, how):
    sources = [cache_of(64, specs(theirs, **how), shard=Shard(tp_rank=at, tp_size=ranks)) for at in range(ranks)]
    return sources, cache_of(64, specs(ours, **how), shard=Shard(tp_rank=readers - 1, tp_size=readers))


@pytest.mark.parametrize("hit", [0, 70], ids=["whole", "behind a prefix"])
@pytest.mark.parametrize("case", CASES)
async def test_every_byte_arrives_whatever_the_caches(case, hit):
    draw = random.Random(case)
    sources, target = caches(*CASES[case])
    contents = Contents(specs(16, **CASES[case][4]))
    async with opened(sources=sources, target=target, follow_bytes_min=1) as world:
        lists = [block_lists(source, draw) for source in sources]
        ours = block_lists(target, draw)
        for group, ids in zip(target.groups, ours, strict=True):
            for at in range(hit // group.block_size if group.kind == "full" else 0):
                ids[at] = -1  # a prefix that we have already
        offers = [
            producer.offer_progressive("r", [[] for _ in source.groups], TOKENS)
            for producer, source in zip(world.producers, sources, strict=True)
        ]
        pull = world.consumer.start_pull(join_tickets([offer.ticket for offer in offers]), ours)
        told = [0] * len(sources)
        step = CASES[case][0]
        for _, (rank, source) in itertools.product(range(TOKENS // step), enumerate(sources)):
            before, told[rank] = told[rank], min(told[rank] + step * draw.choice((0, 1, 2)), TOKENS // step * step)
            now = settling(source, lists[rank], told[rank])
            contents.write(source, padded(source, now))
            new = [ids[len(known) :] for ids, known in zip(now, settling(source, lists[rank], before), strict=True)]
            offers[rank].advance(told[rank], new)
            await asyncio.sleep(draw.choice((0, 0.002)))  # any interleaving must do
        for offer, source, mine, settled in zip(offers, sources, lists, told, strict=True):
            contents.write(source, mine)
            known = settling(source, mine, settled)
            offer.seal([ids[len(each) :] for ids, each in zip(mine, known, strict=True)])
        report = await asyncio.wait_for(pull, PATIENCE_S)
        contents.check(target, ours)
        assert report.ranges >= 1
        for producer in world.producers:
            assert await asyncio.wait_for(producer.wait_offer("r"), PATIENCE_S) == "released"
            producer.check()


async def test_an_aborted_offer_is_stale_for_who_reads_it_or_comes_later():
    sources, target = caches(16, 16, 1, 1, {})
    draw, contents = random.Random(1), Contents(("full",))
    async with opened(sources=sources, target=target, follow_bytes_min=1) as world:
        (mine,), ours = block_lists(sources[0], draw), block_lists(target, draw)
        contents.write(sources[0], [mine])
        offer = world.producer.offer_progressive("r", [mine[:2]], TOKENS)
        offer.advance(32)
        pull = world.consumer.start_pull(offer.ticket, ours)
        await until(lambda: any(state.nbytes for state in world.consumer.snapshot().open_pulls))
        assert offer.abort()
        for _ in range(2):
            error = await failure(pull)
            assert isinstance(error, StaleLease)
            assert (error.ended_by, error.quarantined) == ("revoked", False)
            await pull.quiesced()
            pull = world.consumer.start_pull(offer.ticket, ours)
        world.producer.check()


async def test_a_block_that_the_producer_does_not_have_is_named():
    sources, target = caches(16, 16, 1, 1, {})
    draw = random.Random(1)
    async with opened(sources=sources, target=target) as world:
        (mine,), ours = block_lists(sources[0], draw), block_lists(target, draw)
        offer = world.producer.offer_progressive("r", [[-1, *mine[1:2]]], TOKENS)
        pull = world.consumer.start_pull(offer.ticket, ours)
        offer.seal([mine[2:]])
        assert isinstance(await failure(pull), BlockRangeMismatch)
        await world.consumer.release(offer.ticket)
