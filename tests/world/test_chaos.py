"""A few seconds of chaos, and the parts it is made of; ``make chaos`` does it for minutes, with all that takes long."""

import asyncio
import signal

import pytest

from tests.integration.shapes import Shape
from tests.world.words import Words

from . import driver, interrupted, victims
from .driver import Until, run
from .engine import RIGHT
from .faults import OF_PROCESSES
from .interrupted import HAPPENS, Interrupted
from .ledger import Ledger
from .network import missing
from .proxy import proxy

PATIENT = {"wire_s": 20.0, "handshake_s": 20.0}
ROUNDS = 3
"""Each brief harm to a process once, and as many to a control channel."""


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(600)
async def test_whoever_is_harmed_gets_well_and_nobody_else_notices(tmp_path, monkeypatch):
    # No harm here is one that only a deadline ends: longer ones tell it from a machine that is busy.
    monkeypatch.setattr(driver, "SURVIVOR", driver.SURVIVOR | PATIENT)
    monkeypatch.setattr(victims, "BRIEF_LEASE_S", 12.0)
    processes = ["producer", "producer over TCP", "reader", "reader over TCP"]
    names = [*processes, "control channel", "data connections", "encrypted data"]
    record = await run(7, Until(rounds=ROUNDS), tmp_path, names=names)
    assert record.complaints == [], str(record)
    for victim in processes:
        done = {fault for (name, fault), row in record.rows.items() if name == victim and row.times}
        assert done == {fault.name for fault in OF_PROCESSES if fault.brief}
    assert len(record.beside) > 0
    assert record.ends()[RIGHT] > 0
    assert all(record.kinds[kind][RIGHT] for kind in victims.KINDS), record.kinds


@pytest.fixture
def brief(monkeypatch):
    """Wait less for what is interrupted than where many processes share a machine for minutes."""
    monkeypatch.setattr(driver, "SURVIVOR", driver.SURVIVOR | PATIENT)
    monkeypatch.setattr(interrupted, "LEASE_S", 4.0)
    monkeypatch.setattr(interrupted, "HANG_S", 0.5)
    monkeypatch.setattr(interrupted, "CUT_S", 4.0)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("name", ["interrupted", "interrupted over TCP", "interrupted, encrypted", "cut off"])
async def test_a_producer_survives_whatever_its_readers_do(tmp_path, name):
    # Without RDMA, only TCP notices a cut network: within a host NIXL copies from process to process.
    if name == "cut off" and (reason := missing()):
        pytest.skip(reason)
    happens = HAPPENS[3:] if name == "cut off" else HAPPENS[:3]
    record = await run(7, Until(rounds=2 * len(happens)), tmp_path, names=[name])
    assert record.complaints == [], str(record)
    done = {fault.split(",")[0]: row.ends for (_, fault), row in record.rows.items()}
    assert set(done) == set(happens)
    assert len(record.rows) == 2 * len(happens), "while it runs, and while it stands still"


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("brief")
async def test_a_producer_that_is_aborted_or_keeps_a_reader_is_seen(tmp_path, monkeypatch):
    disturb, harms = Interrupted._disturb, [signal.SIGABRT, None]

    async def harmed(self, reader, pull, *how, **more):
        if harm := harms.pop():
            self.node.process.send_signal(harm)
            return await disturb(self, reader, pull, *how, **more)
        self.chaos.kill = lambda node: None  # the reader stays
        await reader.pull_to_the_middle(*pull, 0, "cut")
        return (await reader.finish())[0]

    monkeypatch.setattr(Interrupted, "_disturb", harmed)
    monkeypatch.setattr(interrupted, "SILENCE_S", 0.5)
    monkeypatch.setattr(driver, "SILENCE_S", 0.5)
    record = await run(7, Until(rounds=2), tmp_path, names=["interrupted over TCP"])
    assert sum("leak of " in text for text in record.complaints) == 1, str(record)
    assert sum("producer crashed, signal 6" in text for text in record.complaints) == 1, str(record)


def foreign(words, request, block_ids):
    """Return what the ledger says of blocks."""
    ledger = Ledger()
    others = ledger.compare("wrong", words, request, block_ids)
    assert ledger.wrong == len(others)
    return ledger.take()["examples"]


def test_a_wrong_word_tells_whose_it_is():
    words = Words(cache := Shape(head_size=32).build())
    words.write(7, [[3, 5], [4, 6]])
    assert foreign(words, 7, [[3, 5], [4, 6]]) == []
    words.write(9, [[20], [1]])
    layer = cache.groups[1].layers[0]
    cells = cache.component(layer, "v")
    cells[6, 2, 1] = cells[1, 2, 1]
    text, *_, count = foreign(words, 7, [[3, 5], [4, 6]])
    number = layer.rpartition(".")[2]
    assert text == f"wrong: request 7 holds v of request 9, block 0, layer {number}, head 2, token 1"
    assert count.startswith("wrong: 8 such words of ")
    untouched = foreign(words, 7, [[0, 5], [4, 6]])
    assert untouched[0] == "wrong: request 7 holds nobody's: it was never written"


def test_a_torn_word_is_nobodys():
    words = Words(cache := Shape(head_size=32).build())
    words.write(7, [[3], [4]])
    cache.component(cache.groups[0].layers[0], "k").view(dtype=cache.backing.dtype)[3, 0, 0, 7] = 0xFF
    assert "is no word of a request" in foreign(words, 7, [[3], [4]])[0]


HARM = {
    "delay": (lambda wire: setattr(wire, "delay_s", 0.01), True),
    "trickle": (lambda wire: setattr(wire, "trickle", True), True),
    "garble": (lambda wire: setattr(wire, "garble", 1.0), False),
    "stall": (lambda wire: wire.stall(), False),
    "cut": (lambda wire: wire.cut(), False),
    "half close": (lambda wire: wire.half_close(0), False),
}
"""Name -> what is done, and whether all that is said arrives nevertheless."""
SAID = b"what a worker says to another" * 10
MOMENT_S = 0.3
PATIENCE_S = 60.0


async def echo(reader, writer):
    while piece := await reader.read(1 << 16):
        writer.write(piece)
    writer.close()


async def answer(port, patience_s=PATIENCE_S):
    """Yield a writer to say something through a proxy, then what has come back in time, or why nothing has."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield writer
    try:
        async with asyncio.timeout(patience_s):
            yield await reader.readexactly(len(SAID))
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        yield type(error).__name__
    finally:
        writer.close()


@pytest.mark.parametrize(("harm", "arrives"), HARM.values(), ids=HARM)
async def test_a_proxy_does_the_harm_that_it_is_told_to(harm, arrives):
    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        proxy(server.sockets[0].getsockname()[1]) as wire,
    ):
        port = int(wire.endpoint.rpartition(":")[2])
        conversation = answer(port, PATIENCE_S if arrives else MOMENT_S)
        writer = await anext(conversation)
        writer.write(SAID[:1])
        await writer.drain()
        while not wire.connections():  # noqa: ASYNC110 - nobody is told of them
            await asyncio.sleep(0)
        harm(wire)
        writer.write(SAID[1:])
        heard = await anext(conversation)
        assert (heard == SAID) is arrives, heard
        await conversation.aclose()
        wire.calm()
        wire.flow()
        again = answer(port)
        (await anext(again)).write(SAID)
        assert await anext(again) == SAID
        await again.aclose()


async def test_a_proxy_that_refuses_listens_again_at_the_same_address():
    async with (
        await asyncio.start_server(echo, "127.0.0.1", 0) as server,
        proxy(server.sockets[0].getsockname()[1]) as wire,
    ):
        before = wire.endpoint
        port = int(before.rpartition(":")[2])
        wire.refuse()
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", port)
        await wire.listen()
        assert wire.endpoint == before
        conversation = answer(port)
        (await anext(conversation)).write(SAID)
        assert await anext(conversation) == SAID
        await conversation.aclose()
