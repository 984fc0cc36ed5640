"""Two releases of kvflow side by side refuse what they cannot read, and say why."""

import msgspec
import pytest

from kvflow.errors import ReleaseMismatch
from kvflow.events import ConsumerRejected
from kvflow.leases.tickets import FORMAT

from .consuming import consuming, works
from .earlier import Earlier, unpack
from .producing import producing
from .shapes import Shape

pytestmark = [pytest.mark.nixl, pytest.mark.processes]

BLOCKS = [[0, 1], [2, 3]]
NUM_TOKENS = 8
NIXL = {"transport": "nixl"}
THE_LAST = "cd0c377"
"""A commit of the release before, whose tickets are ``kvf2``. Its own workers are tried."""


@pytest.fixture
def start(tmp_path):
    """Start a module of the last release."""
    folder, children = unpack(THE_LAST, tmp_path), []

    def start_module(module):
        children.append(Earlier(folder, module))
        return children[-1]

    yield start_module
    for child in children:
        child.go()


async def consuming_there(child):
    """Open a consumer in a process of an earlier commit; return what pulls a ticket and says how that ended."""
    settings = {"engine_id": "decode-0", **NIXL}
    await child.ask("open", shape=msgspec.to_builtins(Shape()), settings=settings)

    async def pull(params):
        (outcome,) = await child.ask("pull", pulls=[["r", params, BLOCKS, NUM_TOKENS]])
        return outcome

    return pull


async def test_this_release_refuses_the_tickets_of_the_last_one(start):
    async with start("producer_process").producing(Shape(), **NIXL) as producer, consuming(**NIXL) as consumer:
        params = await producer.ask("offer", name="it", request="r", block_ids=BLOCKS, num_tokens=NUM_TOKENS)
        with pytest.raises(ReleaseMismatch) as caught:
            await consumer.pull(params, BLOCKS)
        error = caught.value
        assert (error.what, error.theirs, error.ours) == ("ticket format", "kvf2", FORMAT)
        assert str(error).endswith("Install the same release of kvflow on the prefill and the decode side.")
        consumer.at_rest()
        consumer.untouched()
        assert await producer.ask("held", name="it") == ["r"]
        async with producing(Shape(), **NIXL) as ours:
            await works(ours, consumer)


async def test_the_last_release_refuses_the_tickets_of_this_one(start, heard):
    pull = await consuming_there(start("consumer_process"))
    async with producing(Shape(), hooks=[heard], **NIXL) as producer, consuming(**NIXL) as consumer:
        assert await pull(await producer.offer("r", BLOCKS, NUM_TOKENS)) == "release_mismatch"
        assert not heard.of(ConsumerRejected), "it cannot read the ticket, and so has no peer to ask"
        assert await producer.held() == ("r",)
        assert await producer.revoke("r")
        await works(producer, consumer)
