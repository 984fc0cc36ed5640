"""Every pull that ends writes one record, however early it failed: what was wanted, how far it had come, and why."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest

import kvflow
from kvflow import errors
from kvflow.events import OfferRefused, PeerConnected, PullFailed, TransferCompleted, TransferStarted
from kvflow.worker import open_pulls
from tests.ports import free_port

from .conftest import OVER_TCP
from .consuming import PATIENCE_S, consuming, until, works
from .producing import SECRET, configured, minting, write_and_admit
from .shapes import Shape
from .strangers import ticket_to

BLOCKS = [[0, 1], [2, 3]]
NBYTES = 4 * 2 * 2 * 4 * 4 * 8 * 2  # blocks, layers, K and V, tokens, heads, head size, bfloat16


def the_failure(heard):
    """Return the record of the only pull that has ended, and forget it."""
    (ended,) = heard.of((TransferCompleted, PullFailed))
    assert type(ended) is PullFailed
    heard.clear()
    return ended


@contextmanager
def mute():
    """A listener that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def failed(heard, consumer, params, blocks=BLOCKS, **how):
    """Pull what cannot be pulled; return the error and its record, which must agree."""
    with pytest.raises(errors.KvflowError) as caught:
        await consumer.pull(params, blocks, local_request_id="ours", **how)
    record = the_failure(heard)
    error = caught.value
    assert (record.code, record.remedy, record.local_request_id) == (error.code, error.remedy, "ours")
    assert record.remedy
    assert record.detail in error.message
    assert record.quarantined == getattr(error, "quarantined", False)
    assert record.timings_s["total"] >= 0
    return error, record


def peer_of(params):
    (member,) = kvflow.Ticket.from_params(params).members()
    return str(member.peer)


async def test_a_peer_that_is_unreachable(near_world, heard):
    async with near_world.producing(bind=f"tcp://127.0.0.1:{free_port()}") as producer:
        params = await producer.offer("r", BLOCKS, 8)
    async with near_world.consuming(hooks=[heard]) as consumer:
        _, record = await failed(heard, consumer, params)
    assert (record.code, record.phase, record.peer) == ("peer_lost", "handshake", peer_of(params))
    assert (record.request_id, record.nbytes, record.nbytes_wanted, record.transport) == ("r", 0, 0, "")
    assert 0 <= record.ticket_age_s < PATIENCE_S
    assert record.timings_s.keys() == {"handshake", "total"}


async def test_a_peer_of_another_secret(near_world, heard):
    async with (
        near_world.producing(cluster_secret="the secret of another cluster") as stranger,
        near_world.consuming(hooks=[heard]) as us,
    ):
        params = ticket_to(stranger.endpoint)
        _, record = await failed(heard, us, params)
    assert (record.code, record.phase, record.peer) == ("authentication_failed", "handshake", peer_of(params))


async def test_a_peer_that_is_silent(near_world, heard):
    async with near_world.consuming(hooks=[heard], handshake_s=0.2) as consumer:
        with mute() as endpoint:
            params = ticket_to(endpoint)
            _, record = await failed(heard, consumer, params)
    assert (record.code, record.phase, record.peer) == ("deadline_exceeded", "handshake", peer_of(params))


async def test_a_cache_of_another_layout(near_world, heard):
    async with near_world.producing(Shape(head_size=16)) as producer, near_world.consuming(hooks=[heard]) as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        _, record = await failed(heard, consumer, params)
    assert (record.code, record.phase, record.peer) == ("layout_mismatch", "handshake", peer_of(params))
    assert "head_size differs" in record.detail


async def test_a_worker_that_takes_no_more_pulls(near_world, heard):
    async with near_world.producing() as producer:
        params = await producer.offer("r", BLOCKS, 8)
        async with near_world.consuming(hooks=[heard]) as consumer:
            await consumer.worker.drain(0)
            _, record = await failed(heard, consumer, params)
            assert (record.code, record.phase) == ("worker_draining", "check")
        _, record = await failed(heard, consumer, params)
        assert (record.code, record.phase) == ("worker_closed", "check")


async def test_a_pull_that_is_cancelled_while_it_is_read(near_world, heard, gate):
    async with near_world.producing() as producer, near_world.consuming(hooks=[heard]) as consumer:
        pull = asyncio.create_task(consumer.pull(await producer.offer("r", BLOCKS, 8), BLOCKS))
        await asyncio.to_thread(gate.reached.wait, PATIENCE_S)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
        record = the_failure(heard)
        assert (record.code, record.phase, record.quarantined) == ("transfer_cancelled", "wire", True)
        assert (record.nbytes, record.nbytes_wanted, record.transport) == (0, NBYTES, "loopback")
        assert record.timings_s.keys() == {"handshake", "bind", "queue", "post", "wire", "scatter", "fence", "total"}
        gate.open()


async def test_a_read_that_hangs(near_world, heard, gate):
    async with near_world.producing() as producer, near_world.consuming(hooks=[heard], wire_s=0.2) as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        _, record = await failed(heard, consumer, params)
        gate.open()
    assert (record.code, record.phase, record.peer) == ("deadline_exceeded", "wire", peer_of(params))
    assert (record.nbytes, record.nbytes_wanted) == (0, NBYTES)
    assert record.timings_s["wire"] > 0.1


async def brief(producer, request):
    """Offer a request whose lease is short."""
    mint = await minting(producer, lease_s=0.2)
    ticket, grant = mint.offer(request, block_ids=BLOCKS, num_tokens=8)
    await write_and_admit(grant, producer)
    return ticket.to_params()


@pytest.mark.parametrize("how", ["expired", "revoked", "used", "released"])
async def test_a_stale_lease_says_how_it_had_ended(world, heard, how, monkeypatch):
    monkeypatch.setattr(open_pulls, "EXPLAIN_S", PATIENCE_S)
    async with world.producing() as producer, world.consuming(hooks=[heard]) as consumer:
        if how == "expired":
            params = await brief(producer, "r")
        else:
            await works(producer, consumer)
            params = await producer.offer("r", BLOCKS, 8)
        match how:
            case "revoked":
                await producer.revoke("r")
            case "used":
                await consumer.pull(params, BLOCKS)
            case "released":
                await consumer.worker.release(kvflow.Ticket.from_params(params))
        assert await producer.outcome("r") == ("released" if how == "used" else how)
        await until(lambda: len(heard.of(TransferCompleted)) == {"used": 2, "expired": 0}.get(how, 1))
        heard.clear()
        error, record = await failed(heard, consumer, params)
    assert (record.code, record.phase, record.peer) == ("stale_lease", "fence", peer_of(params))
    assert (record.lease_ended_by, error.ended_by) == (how, how)
    assert 0 <= record.lease_ended_s < PATIENCE_S
    assert abs(record.ticket_age_s) < PATIENCE_S  # by the producer's clock, which a busy machine measures to some ms
    assert record.lease_ended_s == error.ended_s
    assert "s ago" in record.detail


async def test_a_ticket_of_a_producer_that_was_restarted(near_world, heard):
    bind = f"tcp://127.0.0.1:{free_port()}"
    async with near_world.producing(bind=bind) as producer:
        params = await producer.offer("r", BLOCKS, 8)
    async with near_world.producing(bind=bind), near_world.consuming(hooks=[heard]) as consumer:
        error, record = await failed(heard, consumer, params)
        assert (record.code, record.phase, record.lease_ended_by) == ("stale_lease", "handshake", "gone")
        assert error.ended_by == "gone"


@pytest.mark.nixl
@pytest.mark.processes
async def test_a_producer_that_is_killed_while_it_is_read(spawn, heard):
    doomed = spawn()
    large = Shape(num_blocks=4096, block_size=16, heads=8, head_size=128)
    started = threading.Event()

    def on_event(event):
        heard(event)
        if isinstance(event, TransferStarted):
            started.set()

    async with doomed.producing(large, **OVER_TCP) as victim, consuming(large, hooks=[on_event]) as consumer:
        blocks = [list(range(4080)), []]
        params = await victim.offer_as_is("r", blocks, 4080 * 16)
        pull = asyncio.create_task(failed(heard, consumer, params, blocks))
        await asyncio.to_thread(started.wait, PATIENCE_S)
        doomed.kill()
        _, record = await pull
    assert (record.code, record.peer) == ("peer_lost", peer_of(params))
    assert record.nbytes < record.nbytes_wanted
    assert record.transport == "tcp"


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize(
    ("settings", "transport", "known_by"), [({}, "cma", "addresses"), (OVER_TCP, "tcp", "kind")], ids=["auto", "tcp"]
)
async def test_the_record_names_what_carries_the_bytes(elsewhere, heard, settings, transport, known_by):
    async with elsewhere.producing(Shape(), **settings) as producer, consuming(hooks=[heard]) as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        report = await consumer.pull(params, BLOCKS)
    (met,) = heard.of(PeerConnected)
    assert (met.transport, met.transport_known_by) == (transport, known_by)
    assert report.transport == transport
    assert [event.report.transport for event in heard.of(TransferCompleted)] == [transport]


async def test_an_offer_that_is_refused_has_a_record(near_world, heard):
    cache = Shape().build()
    config = configured("prefill-0", transport="loopback", lease_slots=1)
    async with kvflow.open_worker(config, cache, hooks=[heard]) as worker:
        mint = kvflow.TicketMint("prefill-0", [worker.rank_address], cluster_secret=SECRET)
        _, grant = mint.offer("minted", block_ids=BLOCKS, num_tokens=8)
        worker.offer("r", BLOCKS, 8)
        for request_id, offer in {
            "r": lambda: worker.offer("r", BLOCKS, 8),
            "other": lambda: worker.offer("other", BLOCKS, 8),
            "minted": lambda: worker.admit(grant),
        }.items():
            with pytest.raises(errors.KvflowError) as caught:
                offer()
            (record,) = heard.of(OfferRefused)
            heard.clear()
            assert (record.request_id, record.code, record.remedy) == (
                request_id,
                caught.value.code,
                caught.value.remedy,
            )
        with pytest.raises(errors.CapacityExceeded):
            await worker.offer_when_possible("waits", BLOCKS, 8, timeout_s=0.01)
        assert [event.request_id for event in heard.of(OfferRefused)] == ["waits"]
