"""Two releases of kvflow side by side: one reads from the last; what it cannot read it refuses, and says why."""

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

import handshake
import kvflow
from kvflow.errors import ReleaseMismatch, StaleLease
from kvflow.events import ConsumerRejected
from kvflow.layout.manifest import MANIFEST_SCHEMA, STAGE_SCHEMA
from kvflow.leases.tickets import FORMAT, FORMAT_BEFORE

from .consuming import PATIENCE_S, consuming, works
from .earlier import EARLIER, child_of, unpack
from .producing import Producer, configured
from .shapes import Shape
from .strangers import IDENTITY, SECURITY, ticket_to
from .test_records import Heard

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

BLOCKS = [[0, 1], [2, 3]]
NUM_TOKENS = 8
NIXL = {"transport": "nixl"}
THE_LAST = "cd0c377"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folder of each earlier commit."""
    return {commit: unpack(commit, tmp_path_factory.mktemp(commit)) for commit in EARLIER}


@pytest.fixture(params=[commit for commit, earlier in EARLIER.items() if not earlier.is_read])
def commit(request):
    """Each earlier commit."""
    return request.param


@pytest.fixture
def start(folders, request):
    """Start a module of the earlier commit, or of the last release."""
    default = request.getfixturevalue("commit") if "commit" in request.fixturenames else THE_LAST
    children = []

    def start_module(module, commit=default):
        children.append(child_of(folders[commit], module))
        return children[-1]

    yield start_module
    for child in children:
        child.go()


@asynccontextmanager
async def producing_here(heard, **settings):
    """Open a producer of this release in this process, whose events are heard."""
    cache = Shape().build()
    async with kvflow.open_worker(configured("prefill-0", **settings or NIXL), cache, hooks=[heard]) as worker:
        yield Producer(worker, cache)


async def consuming_there(child, shape=Shape(), **settings):  # noqa: B008 - frozen
    """Open a consumer in a process of an earlier commit; return what pulls a ticket and says how that ended."""
    settings = {"engine_id": "decode-0", **(settings or NIXL)}
    await child.ask("open", shape=msgspec.to_builtins(shape), settings=settings)

    async def pull(params, request="r", blocks=BLOCKS, num_tokens=NUM_TOKENS):
        (outcome,) = await child.ask("pull", pulls=[[request, params, blocks, num_tokens]])
        return outcome

    return pull


async def test_this_release_reads_the_tickets_of_the_last_one(start):
    async with start("producer_process").producing(Shape(), **NIXL) as producer, consuming(**NIXL) as consumer:
        for request in ("first", "again"):
            with pytest.raises(ReleaseMismatch, match="wire version 1"):  # it knows no questions
                await consumer.worker.find(producer.endpoint, [b"x"])
            params = await producer.offer(request, BLOCKS, NUM_TOKENS)
            assert params["kvflow"].startswith("kvf2.")
            report = await consumer.pull(params, BLOCKS)
            assert report.plane == "nixl", report
            consumer.has(request, BLOCKS, NUM_TOKENS)
            assert await producer.outcome(request) == "released"
        await producer.offer("revoked", BLOCKS, NUM_TOKENS)
        assert await producer.revoke("revoked")
        params = await producer.offer("stale", BLOCKS, NUM_TOKENS)
        assert await producer.revoke("stale")
        with pytest.raises(StaleLease):
            await consumer.pull(params, BLOCKS)
        consumer.at_rest()


async def test_the_last_release_refuses_the_tickets_of_this_one(start):
    """So decode is upgraded first: until all of it is, nothing but prefill of the last release works with both."""
    heard = Heard()
    child, itself = start("consumer_process"), start("producer_process")
    pull = await consuming_there(child, **NIXL)
    async with (
        producing_here(heard, **NIXL) as producer,
        consuming(**NIXL) as consumer,
        itself.producing(Shape(), **NIXL) as theirs,
    ):
        assert await pull(await producer.offer("r", BLOCKS, NUM_TOKENS)) == EARLIER[THE_LAST].refuses
        assert not heard.of(ConsumerRejected), "it cannot read the ticket, and so has no peer to ask"
        assert await producer.held() == ("r",)
        assert await producer.revoke("r")
        await works(producer, consumer)
        assert await pull(await theirs.offer("of its own", BLOCKS, NUM_TOKENS), request="of its own") == "right"


async def test_an_earlier_release_reads_from_itself(start, commit):
    pull = await consuming_there(start("consumer_process"))
    async with start("producer_process").producing(Shape(), **NIXL) as producer:
        assert await pull(await producer.offer("r", BLOCKS, NUM_TOKENS)) == "right"
        assert await producer.outcome("r") == "released"


async def test_this_release_refuses_the_tickets_of_an_earlier_one(start, commit):
    earlier, heard = EARLIER[commit], Heard()
    producer_there = start("producer_process").producing(Shape(), **NIXL)
    async with producer_there as producer, consuming(hooks=[heard], **NIXL) as consumer:
        params = await producer.offer("r", BLOCKS, NUM_TOKENS)
        with pytest.raises(ReleaseMismatch) as caught:
            await consumer.pull(params, BLOCKS)
        error = caught.value
        if earlier.ticket not in (FORMAT, FORMAT_BEFORE):
            assert (error.what, error.theirs, error.ours) == ("ticket format", earlier.ticket, FORMAT)
        else:
            assert (error.what, error.theirs) == ("manifest schema", str(earlier.manifest))
            assert error.ours == f"{MANIFEST_SCHEMA} or {STAGE_SCHEMA}"
            assert "'kvflow 0.1.0'" in str(error), "it says what the other side runs"
            assert heard.the_failure().code == "release_mismatch"
        assert str(error).endswith("Install the same release of kvflow on the prefill and the decode side.")
        consumer.at_rest()
        consumer.untouched()
        assert await producer.held() == ["r"]
        async with producing_here(Heard()) as ours:
            await works(ours, consumer)


async def test_a_producer_of_another_release_is_told_why_it_is_left(near_world):
    ended = asyncio.get_running_loop().create_future()
    async with (
        near_world.consuming() as consumer,
        handshake.open_server(
            bind="tcp://127.0.0.1:0",
            identity=IDENTITY,
            publication=handshake.Publication.of(b"of the future", schema=STAGE_SCHEMA + 1),
            security=SECURITY,
            on_event=lambda _key, event: isinstance(event, handshake.ConnectionFailed) and ended.set_result(event),
        ) as server,
    ):
        with pytest.raises(ReleaseMismatch):
            await consumer.pull(ticket_to(server.endpoint), BLOCKS)
        async with asyncio.timeout(PATIENCE_S):
            told = await ended
        assert (told.code, told.refused) == ("release_mismatch", True)
        assert f"manifest schema {STAGE_SCHEMA + 1}" in told.reason


async def test_an_earlier_release_refuses_the_tickets_of_this_one(start, commit):
    earlier, heard = EARLIER[commit], Heard()
    pull = await consuming_there(start("consumer_process"))
    async with producing_here(heard) as producer, consuming(**NIXL) as consumer:
        assert await pull(await producer.offer("r", BLOCKS, NUM_TOKENS)) == earlier.refuses
        assert not heard.of(ConsumerRejected), "it cannot read the ticket, and so has no peer to ask"
        assert await producer.held() == ("r",)
        assert await producer.revoke("r")
        await works(producer, consumer)
