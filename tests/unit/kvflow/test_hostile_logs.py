"""What peers chose is never logged raw, nor at length: a log line is one line, and says what kvflow says."""

import asyncio
import logging
from types import SimpleNamespace

import pytest

from handshake.errors import ConnectionRefused
from kvflow.errors import KvflowError
from kvflow.ids import PeerId
from kvflow.reads.backend import BackendError, Cause
from kvflow.reads.contract import PeerAddress
from kvflow.reads.core import ReadCore
from kvflow.reads.nixl.copying import Helpers
from kvflow.reads.planes import _warn_of_failures
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.opening import Rejected
from kvflow.rendezvous.endpoint import as_kvflow_error
from kvflow.worker import askers, peers
from kvflow.worker.askers import PrefixReader
from tests.unit.handshake.helpers import Progress, Refuse, Role, connection_in, frames_of
from tests.unit.kvflow.reads.tcp.peers import Producer
from tests.unit.kvflow.reads.tcp.test_access import exporting, opened
from tests.unit.kvflow.reads.test_core import EPOCHS, MEMORY, ScriptedBackend
from tests.unit.kvflow.worker.pulling import failure
from tests.unit.kvflow.worker.pulling import opened as opened_world

CHOSEN = "Ж"  # no word of ours has it
NAME = "\x1b[2J\nkvflow: all is well\u202e\u2028" + CHOSEN * 220
"""A name that the wire allows: of less than 256 characters."""
PEER = PeerId(NAME, 3, "0" * 32, "tcp://127.0.0.1:1", "")


class Hashable(SimpleNamespace):
    __hash__ = object.__hash__


def tcp_newcomer():
    with exporting(tls=False, admits=lambda _key: False) as exporter, pytest.raises(Rejected):
        opened(exporter.reader(exporter.credentials(NAME)))


def tcp_reader():
    producer = Producer()
    reader = producer.reader(name=NAME)
    reader.say(bytes(wire.REQUEST.size))
    assert reader.ended()
    producer.put_away()


def plane():
    _warn_of_failures(PEER, "tcp", {"nixl": Cause("transport_error", NAME * 4)})


def sink():
    def refuse(_event):
        raise ValueError("the program above fails")

    core = ReadCore(ScriptedBackend(), [MEMORY], refuse, lambda: 0.0)
    core._backend.raising["add"] = BackendError("metadata_invalid", NAME * 4)
    core.handle(PeerAddress(PEER, {}, EPOCHS))


def helper_of_nixl():
    def add_remote(_blob):
        raise BackendError("metadata_invalid", NAME * 4)

    helper = Hashable(readers=[SimpleNamespace(agent=SimpleNamespace(add_remote=add_remote))], connected=set())
    peer = SimpleNamespace(beside={}, agent=NAME, blob=b"", lists={}, alone=False)
    chunk = SimpleNamespace(portion=SimpleNamespace(list_id=1))
    assert Helpers._beside(SimpleNamespace(_errors=(BackendError,)), peer, helper, chunk) is None


async def connecting(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(peers, "open_link", fail)
    async with opened_world(theirs={"engine_id": NAME}) as world:
        await failure(world.pull())


async def asker(monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(askers, "open_asker", fail)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(KvflowError):
            await PrefixReader(tasks, None)._connect("tcp://127.0.0.1:1#" + NAME)


DOORS = [tcp_newcomer, tcp_reader, plane, sink, helper_of_nixl, connecting, asker]


@pytest.mark.parametrize("door", DOORS, ids=[each.__name__ for each in DOORS])
async def test_what_a_peer_chose_is_quoted_and_cut(door, caplog, monkeypatch):
    with caplog.at_level(logging.DEBUG):
        given = [monkeypatch] if door.__code__.co_argcount else []
        found = door(*given)
        if found is not None:
            await found
    lines = [record.getMessage() for record in caplog.records]
    assert any(CHOSEN in line for line in lines), lines
    for line in lines:
        assert line.isprintable(), line
        assert line.count(CHOSEN) <= 256, line


@pytest.mark.parametrize("role", Role)
def test_no_more_than_the_begin_of_a_reason_or_remedy_is_passed_on(role):
    connection = connection_in(role, Progress.READY)
    connection.receive(frames_of(Refuse(code="no", reason=CHOSEN * 1024, remedy=CHOSEN * 1024)), 100.0)
    (ending,) = connection.take_events()
    assert (len(ending.reason), len(ending.remedy)) == (256, 256)
    error = as_kvflow_error(ConnectionRefused("no", ending.reason, remedy=ending.remedy), peer="p")
    assert str(error).count(CHOSEN) == 512
