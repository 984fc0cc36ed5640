"""What a newcomer does wrong is answered with the thing, the value, what it must be, and what to do.

What is wrong in a deployment rather than in a call is in ``misconfigurations.py``.
"""

import asyncio
import re
from contextlib import asynccontextmanager
from inspect import isawaitable
from typing import NamedTuple

import pytest
import torch

import kvflow
from kvflow import errors
from tests.helpers.loops import looped
from tests.helpers.settings import flat_config

SECRET = "a secret of the tests, long enough"
SPEC = {"block_size": 16, "num_kv_heads": 4, "head_size": 8, "dtype": "bfloat16"}
REFERENCE = "[config_invalid] See docs/reference/config.md for the settings and their bounds."
LISTS = "Give one list of block ids per group, each id in [0, num_blocks), targets without duplicates."
TOKENS = "Give one number of tokens, at least 1, or one per group."
OWN_ADDRESS = "[config_invalid] Give an address of this host, or a wildcard."
RENEW = "[stale_lease] Ask the producer for a new ticket, or recompute the prompt."


class Row(NamedTuple):
    """One misuse: what is done, and the message, in which ``*`` stands for anything; a code of ours is in it."""

    misuse: str
    does: object
    said: str
    kind: type[Exception] = errors.KvflowError


def specs(**fields):
    return {name: kvflow.FullAttention(**SPEC | fields) for name in ("layers.0", "layers.1")}


def cache(**fields):
    return kvflow.allocate(specs(**fields), num_blocks=32, layout="LBNHC")


def config(**settings):
    return flat_config(**{"engine_id": "p", "cluster_secret": SECRET, "transport": "loopback"} | settings)


@asynccontextmanager
async def pair():
    """Open a worker that offers, and one that pulls."""
    async with (
        kvflow.open_worker(config(), cache()) as source,
        kvflow.open_worker(config(engine_id="c"), cache()) as target,
    ):
        yield source, target


def opens(given=None, memory=None, hooks=(), **settings):
    """Open a worker with these settings, or with whatever is given for them and for its cache."""

    async def does():
        async with kvflow.open_worker(given or config(**settings), memory or cache(), hooks=hooks):
            pass

    return does


async def done(made):
    """Await what a call has made, if it can be."""
    return await made if isawaitable(made) else made


def at_a_worker(call):
    """Do something with a worker that is open."""

    async def does():
        async with kvflow.open_worker(config(), cache()) as source:
            await done(call(source))

    return does


def pulls(block_ids=((1, 2),), *, offered=((3, 4),), num_tokens=32, change=None):
    """Offer blocks on one worker and pull them on another."""

    async def does():
        async with pair() as (source, target):
            ticket = source.offer("r", block_ids=offered, num_tokens=num_tokens)
            await target.pull(change(ticket) if change else ticket, block_ids=block_ids)

    return does


async def pulls_what_was_revoked():
    async with pair() as (source, target):
        ticket = source.offer("r", block_ids=[[3, 4]], num_tokens=32)
        source.revoke("r")
        await target.pull(ticket, block_ids=[[1, 2]])


async def pulls_the_same_blocks_at_once():
    async with pair() as (source, target):
        one = source.offer_progressive("one", block_ids=[[3, 4]], num_tokens=32)  # whose pull lasts until its seal
        other = source.offer("other", block_ids=[[3, 4]], num_tokens=32)
        first = target.start_pull(one.ticket, block_ids=[[1, 2]])
        second = target.start_pull(other, block_ids=[[1, 2]])
        try:
            await second
        finally:
            one.seal()
            await first


async def offers_one_block_in_two_groups():
    layers = specs() | {"layers.1": kvflow.SlidingWindow(**SPEC, window=64)}
    async with kvflow.open_worker(config(), kvflow.allocate(layers, num_blocks=32, layout="BLHNC")) as source:
        source.offer("r", block_ids=[[3], [3]], num_tokens=16)


async def pulls_on_another_event_loop():
    async with pair() as (source, target):
        ticket = source.offer("r", block_ids=[[3, 4]], num_tokens=32)

        async def elsewhere():
            await target.pull(ticket, block_ids=[[1, 2]])

        await asyncio.to_thread(asyncio.run, elsewhere())


async def async_hook(event):
    pass


def offers(digests):
    return at_a_worker(lambda source: source.offer("r", block_ids=[[3, 4]], num_tokens=32, digests=digests))


def joins_a_ticket_with_itself(source):
    ticket = source.offer("r", block_ids=[[3, 4]], num_tokens=32)
    kvflow.join_tickets([ticket, ticket])


def allocates(**arguments):
    return lambda: kvflow.allocate(specs(), **arguments)


TABLE = (
    Row(
        "bind without tcp://",
        opens(bind="127.0.0.1:4000"),
        f"bind must be tcp://HOST:PORT, not '127.0.0.1:4000' {REFERENCE}",
    ),
    Row(
        "bind to a name that does not exist",
        opens(bind="tcp://no-such-host:4000"),
        f"cannot listen on tcp://no-such-host:4000: no-such-host is not an address of this host {OWN_ADDRESS}",
    ),
    Row(
        "a number as text",
        opens(lease_s="30"),
        f"lease_s must be a number of seconds above 0 and at most 86400, not '30' {REFERENCE}",
    ),
    Row(
        "a rank that the engine does not have",
        opens(rank=1),
        "rank is 1, but num_ranks is 1 [config_invalid] Ranks count from 0: give one from 0 to 0, or raise num_ranks.",
    ),
    Row(
        "a setting that does not exist",
        lambda: config(lease=30),
        "WorkerConfig has no field 'lease'. Did you mean lease_s? Known are advertise, *, wire_s.",
        TypeError,
    ),
    Row(
        "a dictionary as config",
        opens({"engine_id": "p"}),
        "config must be a WorkerConfig, not dict [argument_invalid] Pass kvflow.WorkerConfig(engine_id=..., "
        "cluster_secret=...).",
    ),
    Row(
        "a tensor as cache",
        opens(memory=torch.ones(1)),
        "cache must be a KVCache, not Tensor [argument_invalid] Pass what kvflow.allocate or kvflow.adopt returned.",
    ),
    Row(
        "a worker without async with",
        lambda: kvflow.open_worker(config(), cache()).offer("r", block_ids=[[3]], num_tokens=16),
        "open_worker returns a context manager, which has no 'offer': the worker is not open. Write: async with "
        "kvflow.open_worker(config, cache) as worker:",
        AttributeError,
    ),
    Row(
        "a threaded worker without with",
        lambda: kvflow.run_worker(config(), cache()).offer("r", block_ids=[[3]], num_tokens=16),
        "run_worker returns a context manager, which has no 'offer': the worker is not open. Write: with "
        "kvflow.run_worker(config, cache) as worker:",
        AttributeError,
    ),
    Row(
        "a negative deadline",
        at_a_worker(lambda source: source.drain(-1.0)),
        "deadline_s must be a number of seconds, 0 or more, not -1.0 [argument_invalid] Pass seconds as a number, "
        "such as 30.0.",
    ),
    Row(
        "a digest too few",
        offers([[b"one"]]),
        "digests[0] must be 2 digests, one per block, not a list of length 1 [argument_invalid] Pass one list per "
        "group, with one digest (bytes) for each of its blocks.",
    ),
    Row(
        "digests of no group",
        offers(7),
        "digests must be 1 list, one per group, not 7 [argument_invalid] Pass one list per group, with one digest "
        "(bytes) for each of its blocks.",
    ),
    Row(
        "text as a digest",
        offers([[b"one", "two"]]),
        "digests[0][1] must be bytes, not str [argument_invalid] Pass one list per group, with one digest (bytes) for "
        "each of its blocks.",
    ),
    Row(
        "an empty digest",
        offers([[b"one", b""]]),
        "digests[0][1] must be 1 to 64 bytes, not empty [argument_invalid] Pass empty bytes for absent blocks (-1) "
        "only.",
    ),
    Row(
        "a digest that is too long",
        offers([[b"one", b"x" * 65]]),
        "a ticket cannot hold the offer: contents[0].digests[1] must be bytes of at most 64 in length, not b'xxx* "
        "[block_ids_invalid] Pass shorter digests, such as those of SHA-256.",
    ),
    Row(
        "a ticket joined with itself",
        at_a_worker(joins_a_ticket_with_itself),
        "rank 0 is in two of the tickets [ticket_invalid] Join one ticket per rank, all from offers of one engine "
        "with the same request_id and num_tokens.",
    ),
    Row(
        "workers in place of their addresses",
        at_a_worker(lambda source: kvflow.TicketMint("p", [source], cluster_secret=SECRET)),
        "ranks[0] must be a RankAddress, not Worker [argument_invalid] Pass the rank_address of every worker of the "
        "engine.",
    ),
    Row(
        "a mint without a secret",
        at_a_worker(lambda source: kvflow.TicketMint("p", [source.rank_address], cluster_secret="")),
        "the cluster secret is not set [config_invalid] Set cluster_secret or KVFLOW_CLUSTER_SECRET to the same "
        "long random string on every worker. Draw one with kvflow keys secret.",
    ),
    Row(
        "no blocks",
        allocates(num_blocks=0),
        "num_blocks is 0: expected at least 1 [spec_invalid] Give at least one block.",
    ),
    Row(
        "memory for less than one block",
        allocates(memory_bytes=100),
        "memory_bytes is 100, but one block needs * bytes [spec_invalid] Give memory for at least one block.",
    ),
    Row(
        "neither blocks nor memory",
        allocates(),
        "found neither of num_blocks and memory_bytes: expected exactly one [spec_invalid] Give num_blocks, or "
        "memory_bytes to fill a budget.",
    ),
    Row(
        "a rank above the number of ranks",
        lambda: kvflow.Shard(tp_rank=2, tp_size=2),
        "shard.tp_rank is 2, but tp_size is 2 [spec_invalid] Ranks count from 0: give one from 0 to 1.",
    ),
    Row(
        "numbers in place of tensors",
        lambda: kvflow.adopt({"layers.0": [1, 2]}, {"layers.0": specs()["layers.0"]}),
        "layers.0[0]: found int; expected a torch tensor [spec_invalid] Pass the tensors of the engine's cache, which "
        "hold its memory.",
    ),
    Row(
        "an async hook",
        opens(hooks=[async_hook]),
        "*hook* [config_invalid] *",
    ),
    Row(
        "the parameters in place of a ticket",
        pulls(change=lambda ticket: ticket.to_params()),
        "ticket must be a Ticket, not dict [argument_invalid] Pass worker.read_ticket(params).",
    ),
    Row(
        "a block beyond the pool",
        pulls([[99, 2]]),
        f"group 0: block 99 is not in [0, 32) [block_ids_invalid] {LISTS}",
    ),
    Row(
        "block -2 in an offer",
        pulls(offered=[[-2, 4]]),
        f"group 0: block -2 is not in [0, 2147483648) [block_ids_invalid] {LISTS}",
    ),
    Row(
        "block 2**70 in an offer",
        pulls(offered=[[1 << 70, 4]]),
        "group 0: block ids must be a flat list of integers, not [1180591620717411303424, 4] "
        f"[block_ids_invalid] {LISTS}",
    ),
    Row(
        "num_tokens=16.0",
        pulls(num_tokens=16.0),
        f"num_tokens must be an integer, not 16.0 [block_ids_invalid] {TOKENS}",
    ),
    Row(
        "num_tokens=0",
        pulls(num_tokens=0),
        f"num_tokens must be at least 1, not 0 [block_ids_invalid] {TOKENS}",
    ),
    Row(
        "two numbers of tokens for one group",
        pulls(num_tokens=[32, 32]),
        f"num_tokens has 2 numbers for 1 group [block_ids_invalid] {TOKENS}",
    ),
    Row(
        "fewer tokens than blocks",
        pulls(offered=[[1, 2, 3]], num_tokens=16),
        "group 0: 3 blocks for 16 tokens, which at most 1 can hold [block_ids_invalid] The last block of a list "
        "must hold the last token: leave out blocks behind it.",
    ),
    Row(
        "a flat list of ids in an offer",
        pulls(offered=[3, 4]),
        f"group 0: block ids must be a flat list of integers, not 3 [block_ids_invalid] {LISTS}",
    ),
    Row(
        "a flat list of ids in a pull",
        pulls([3, 4]),
        f"block_ids must be one list per group, not [3, 4] [block_ids_invalid] {LISTS}",
    ),
    Row(
        "a list too many in a pull",
        pulls([[1, 2], [3]]),
        f"block_ids has 2 lists for 1 group [block_ids_invalid] {LISTS}",
    ),
    Row(
        "text as a block id",
        pulls([["a", 2]]),
        f"group 0: block ids must be a flat list of integers, not ['a', 2] [block_ids_invalid] {LISTS}",
    ),
    Row(
        "one target twice",
        pulls([[1, 1]]),
        f"block 1 is a target twice [block_ids_invalid] {LISTS}",
    ),
    Row(
        "one block in two groups",
        offers_one_block_in_two_groups,
        "block 3 is in groups 0 and 1, whose pages share their bytes [block_ids_invalid] List a block in the one "
        "group whose pages it holds.",
    ),
    Row(
        "one target of two pulls at once",
        pulls_the_same_blocks_at_once,
        "group 0: block 1 is still the target of another pull [block_ids_invalid] Wait for quiesced() of that pull "
        "before reusing its blocks.",
    ),
    Row(
        "a ticket that was revoked",
        pulls_what_was_revoked,
        f"request 'r': the lease ended before the read was complete; the producer revoked it * s ago {RENEW}",
    ),
    Row(
        "a pull on another event loop",
        pulls_on_another_event_loop,
        "* [wrong_event_loop] *run_worker*",
    ),
    Row(
        "a field of a spec that does not exist",
        lambda: kvflow.FullAttention(block_size=16, num_heads=4),
        "FullAttention has no field 'num_heads'. Did you mean num_kv_heads? Known are block_size, dtype, *.",
        TypeError,
    ),
    Row(
        "no heads",
        lambda: cache(num_kv_heads=0),
        "layers.0: num_kv_heads must be an integer from 1 to 16777216, not 0 [spec_invalid] *",
    ),
    Row(
        "a dtype by its short name",
        lambda: cache(dtype="bf16"),
        "layers.0: dtype must be one of 'bfloat16', *, 'uint8', not 'bf16'; did you mean 'bfloat16'? [spec_invalid] *",
    ),
)


def pattern(text):
    return ".*".join(map(re.escape, text.split("*")))


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.misuse)
async def test_a_misuse_is_answered_with_what_is_wrong_and_what_to_do(row, monkeypatch):
    monkeypatch.delenv("KVFLOW_CLUSTER_SECRET", raising=False)
    with pytest.raises(row.kind) as caught:
        async with asyncio.timeout(30):
            await done(row.does())
    assert re.fullmatch(pattern(row.said), str(caught.value)), str(caught.value)


@looped("row", TABLE)
def test_no_message_shows_the_inside_of_a_validator(row):
    assert not re.search(r"Expected `|`\$|regex|\[Errno|epoch", row.said)
