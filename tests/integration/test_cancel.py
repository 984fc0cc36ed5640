"""Pulls that are given up, at every stage: nothing is leaked, and no block is used while it may be written to."""

import asyncio
import random
import socket

import pytest

import kvflow
from kvflow import errors
from kvflow.events import TransferRetried

from .conftest import ELSEWHERE
from .consuming import until, works
from .producing import SECRET
from .strangers import ticket_to

BLOCKS = [[0, 1], [2, 3]]
ROUNDS = 100


def tasks_besides(known):
    return {task for task in asyncio.all_tasks() if task not in known and not task.done()}


async def gives_up(pull):
    pull.cancel()
    with pytest.raises(asyncio.CancelledError):
        await pull


async def unadmitted(producer, request):
    """A ticket of a live producer whose lease it does not hold yet: a pull of it waits until it does."""
    mint = kvflow.TicketMint("prefill-0", [producer.worker.rank_address], cluster_secret=SECRET)
    ticket, _ = mint.offer(request, block_ids=BLOCKS, num_tokens=8)
    return ticket.to_params()


@pytest.fixture
def mute():
    """A listener that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.both_loops
async def test_while_meeting(near_world, mute):
    async with near_world.producing() as producer, near_world.consuming(handshake_s=60) as consumer:
        pull = asyncio.create_task(consumer.pull(ticket_to(mute), BLOCKS))
        await asyncio.sleep(0)
        await gives_up(pull)
        consumer.at_rest()
        await works(producer, consumer)  # and leaving does not wait for the mute one


@pytest.mark.both_loops
async def test_while_waiting_for_the_admission(near_world):
    retried = asyncio.Event()

    def notice(event):
        if isinstance(event, TransferRetried):
            retried.set()

    async with near_world.producing() as producer, near_world.consuming(hooks=[notice]) as consumer:
        pull = asyncio.create_task(consumer.pull(await unadmitted(producer, "r"), BLOCKS))
        await retried.wait()  # the leg is queued again
        await gives_up(pull)
        await consumer.worker.quiesced("r")
        consumer.at_rest()
        await works(producer, consumer)


@pytest.mark.both_loops
async def test_while_reading(near_world, gate):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        pull = asyncio.create_task(consumer.pull(params, BLOCKS))
        await until(gate.reached.is_set)
        await gives_up(pull)
        (entry,) = consumer.worker.snapshot().quarantined
        assert (entry.reason, entry.num_blocks) == ("transfer_cancelled", 4)
        with pytest.raises(errors.BlockIdsInvalid):
            await consumer.pull(params, BLOCKS)
        quiet = asyncio.create_task(consumer.worker.quiesced("r"))
        await asyncio.sleep(0)
        assert not quiet.done()
        gate.open()
        await quiet
        consumer.at_rest()
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        ("loopback", {}),
        pytest.param("nixl", {}, marks=ELSEWHERE),
        *(pytest.param("tcp", {"tcp_encryption": each}, marks=pytest.mark.processes) for each in ("off", "tls")),
    ],
    indirect=["world"],
)
async def test_at_any_turn_of_the_loop(world, settings):
    rng = random.Random(11)
    ends = {"cancelled": 0, "completed": 0}
    async with world.producing(**settings) as producer, world.consuming(**settings) as consumer:
        await works(producer, consumer)
        known = asyncio.all_tasks()
        for number in range(ROUNDS):
            request = f"r{number}"
            pull = asyncio.create_task(consumer.pull(await producer.offer(request, BLOCKS, 8), BLOCKS))
            for _ in range(rng.choice([0, 1, 2, 3, 5, 8, 13, 30, 60, 120, 250])):
                await asyncio.sleep(0)
            pull.cancel()
            await asyncio.wait([pull])
            ends["cancelled" if pull.cancelled() else "completed"] += 1
            await consumer.worker.quiesced(request)
            consumer.at_rest()
            assert tasks_besides(known) == set()
            await producer.revoke(request)
        await works(producer, consumer)
    assert ends["cancelled"] > 0


async def test_leaving_while_meeting(near_world, mute):
    async with near_world.consuming(handshake_s=60) as consumer:
        pull = asyncio.create_task(consumer.pull(ticket_to(mute), BLOCKS))
        await asyncio.sleep(0)
    with pytest.raises(errors.TransferCancelled) as caught:
        await pull
    assert caught.value.remedy
    consumer.at_rest()


async def test_leaving_while_waiting_for_the_admission(near_world):
    async with near_world.producing() as producer:
        async with near_world.consuming() as consumer:
            pull = asyncio.create_task(consumer.pull(await unadmitted(producer, "r"), BLOCKS))
            await until(lambda: consumer.worker.snapshot().pulls)
        with pytest.raises(errors.TransferCancelled):
            await pull
        consumer.at_rest()


@pytest.mark.both_loops
async def test_leaving_while_reading(near_world, gate):
    known = asyncio.all_tasks()
    async with near_world.producing() as producer:
        params = await producer.offer("r", BLOCKS, 8)
        async with near_world.consuming() as consumer:
            pull = asyncio.create_task(consumer.pull(params, BLOCKS))
            await until(gate.reached.is_set)
            # It hears of it at once, while its blocks may still be written to: leaving waits for that.
            pull.add_done_callback(lambda _: gate.open())
        with pytest.raises(errors.TransferCancelled) as caught:
            await pull
        assert caught.value.quarantined is True
        consumer.at_rest()
        await consumer.worker.quiesced("r")
        async with near_world.consuming() as another:
            await another.pull(params, BLOCKS)
            another.has("r", BLOCKS, 8)
    assert tasks_besides(known) == set()


async def test_an_error_of_the_engine_passes_through_unchanged(near_world):
    async def stumble():
        async with near_world.producing() as producer, near_world.consuming() as consumer:
            await works(producer, consumer)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await stumble()


async def test_canceling_the_engine_closes_its_worker(near_world):
    opened = asyncio.Event()

    async def engine():
        async with near_world.consuming() as consumer:
            engines.append(consumer)
            opened.set()
            await asyncio.Event().wait()

    engines = []
    known = asyncio.all_tasks()
    task = asyncio.create_task(engine())
    await opened.wait()
    await gives_up(task)
    with pytest.raises(errors.WorkerClosed):
        await engines[0].worker.pull(kvflow.Ticket.from_params(ticket_to("tcp://127.0.0.1:9")), BLOCKS)
    assert tasks_besides(known) == set()
