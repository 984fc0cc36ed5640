"""Engines whose ranks have some of the layers each: what fits is read, what does not is refused before a byte is."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from msgspec.structs import replace

import kvflow
from kvflow import errors

from .consuming import Consumer
from .producing import Producer, configured
from .shapes import UNTOUCHED

COMMON = {"block_size": 4, "num_kv_heads": 4, "head_size": 8, "dtype": "bfloat16"}
KINDS = [kvflow.FullAttention(**COMMON), kvflow.SlidingWindow(**COMMON, window=8)]
SPECS = {f"layers.{layer}": KINDS[layer % 2] for layer in range(4)}
"""Those of ``Shape()``: two groups of two layers."""
GROUPS = kvflow.plan_groups(SPECS, layout="BLHNC")
FULL, SLIDING = ("layers.0", "layers.2"), ("layers.1", "layers.3")
BLOCKS, NUM_TOKENS = [[0, 1], [2, 3]], 8


def stage_of(layers, shard=None):
    """Allocate the cache of a stage; it has every group of the model, some without layers."""
    groups = [replace(group, layers=tuple(name for name in group.layers if name in layers)) for group in GROUPS]
    specs = {name: SPECS[name] for name in layers}
    return kvflow.allocate(specs, num_blocks=32, layout="BLHNC", groups=groups, shard=shard)


def states_of(channels, tp_rank, tp_size=2):
    """Allocate what a rank has of the states of a recurrent layer."""
    conv = kvflow.State("conv_x", (channels, 3), "bfloat16", shard_axis=0)
    states = (conv, kvflow.State("ssm", (4, 8), "float32", shard_axis=0))
    shard = kvflow.Shard(tp_rank=tp_rank, tp_size=tp_size)
    return kvflow.allocate({"layers.0": kvflow.Mamba(block_size=4, states=states)}, num_blocks=32, shard=shard)


@asynccontextmanager
async def engine(*caches, num_ranks=(), hooks=(), transport="loopback"):
    """Open a producer for each rank of one engine; yield them."""
    async with AsyncExitStack() as stack:
        producers = []
        for rank, cache in enumerate(caches):
            size = num_ranks[rank] if num_ranks else len(caches)
            config = configured("prefill-0", rank=rank, num_ranks=size, transport=transport)
            worker = await stack.enter_async_context(kvflow.open_worker(config, cache, hooks=hooks))
            producers.append(Producer(worker, cache))
        yield producers


@asynccontextmanager
async def consumer_of(cache):
    cache.backing.fill_(UNTOUCHED)
    async with kvflow.open_worker(configured("decode-0", transport="loopback"), cache) as worker:
        yield Consumer(worker, cache)


async def ticket_of(producers, blocks=BLOCKS):
    """Offer a request on every rank, and return one ticket that names them all."""
    offers = [await producer.offer("r", blocks, NUM_TOKENS) for producer in producers]
    return kvflow.join_tickets([kvflow.Ticket.from_params(params) for params in offers]).to_params()


async def refused(world, caches, error, match, *, num_ranks=()):
    """Assert that a ticket of these ranks is refused by name, that nothing is read, and that others are read then."""
    async with engine(*caches, num_ranks=num_ranks) as producers, world.consuming() as consumer:
        params = await ticket_of(producers)
        for _ in range(2):  # the second time, too
            with pytest.raises(error, match=match) as caught:
                await consumer.pull(params, BLOCKS)
            assert caught.value.remedy
        consumer.untouched()
        consumer.at_rest()
        async with world.producing(engine_id="prefill-1") as another:
            await consumer.pull(await another.offer("other", BLOCKS, NUM_TOKENS), BLOCKS)
            consumer.has("other", BLOCKS, NUM_TOKENS)


@pytest.mark.parametrize("layers", [FULL, SLIDING], ids=["full", "sliding"])
def test_stages_whose_ranks_divide_tokens_have_groups_without_layers(layers):
    manifest = stage_of(layers, kvflow.Shard(tp_size=4, dcp_size=2)).manifest()
    manifest.check()
    assert sorted(layer.name for group in manifest.groups for layer in group.layers) == sorted(layers)
    assert [group.stripe.size for group in manifest.groups] == [2, 1]


async def test_a_peer_with_fewer_stages_than_its_ticket_names(near_world):
    caches = [stage_of(FULL), stage_of(SLIDING)]
    match = r"the ticket names prefill-0/1/\w+, but prefill-0/0/\w+ has 1 ranks"
    await refused(near_world, caches, errors.TicketInvalid, match, num_ranks=(1, 2))


async def test_a_stage_whose_layers_overlap_those_of_another(near_world):
    caches = [stage_of(FULL), stage_of((*SLIDING, FULL[0]))]
    await refused(near_world, caches, errors.TicketInvalid, r"prefill-0/1/\w+ has some layers of prefill-0/0/\w+, but")


@pytest.mark.parametrize(
    ("caches", "field"),
    [
        ([states_of(8, 0), states_of(12, 1)], r"layers.0.conv_x.shape\[0\] differs"),
        ([states_of(8, 0), states_of(8, 0)], "layers.0.conv_x differs: source has 'slices 0-3 of 8'"),
        ([states_of(12, 0, 1), states_of(12, 0, 1)], r"layers.0.conv_x.shape\[0\] differs"),
    ],
    ids=["unlike totals", "a part that no rank has", "another total"],
)
async def test_parts_of_a_state_that_do_not_add_up(caches, field):
    ours = states_of(8, 0, 1)
    async with engine(*caches) as producers, consumer_of(ours) as consumer:
        tickets = [kvflow.Ticket.from_params(await each.offer_as_is("r", [[3]], NUM_TOKENS)) for each in producers]
        with pytest.raises(errors.LayoutMismatch, match=field):
            await consumer.worker.pull(kvflow.join_tickets(tickets), [[5]])
        assert (ours.backing == UNTOUCHED).all()
        consumer.at_rest()
