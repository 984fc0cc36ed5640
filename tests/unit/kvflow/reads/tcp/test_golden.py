"""Both ends of the TCP data plane say the recorded bytes of ``tests/golden/tcp.json``, and understand them."""

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from kvflow.errors import FailureCode
from kvflow.reads.tcp import access, opening
from tests.architecture.golden_bytes import BLOCK_BYTES, BLOCKS, HELD, NONCES, SLOT
from tests.unit.kvflow.reads.tcp.peers import EPOCH, PATIENCE_MS, Consumer, Leases, Producer

GOLDEN = json.loads((Path(__file__).parents[4] / "golden" / "tcp.json").read_text())
SAID = [(who, what, bytes.fromhex(content)) for who, what, content in GOLDEN if who != "producer"]
CACHE = np.arange(BLOCKS * BLOCK_BYTES, dtype=np.uint8).reshape(BLOCKS, BLOCK_BYTES)


@pytest.fixture(autouse=True)
def nonces(monkeypatch):
    """Both ends draw the recorded nonces."""
    for module, nonce in zip((access, opening), NONCES, strict=True):
        monkeypatch.setattr(module, "secrets", SimpleNamespace(token_bytes=lambda _count, nonce=nonce: nonce))


def hear(sock, what, expected):
    """Receive what the other end must say now."""
    heard = b""
    while len(heard) < len(expected) and (more := sock.recv(len(expected) - len(heard))):
        heard += more
    assert heard == expected, what


def play(sock, part):
    """Say the bytes of one end, and hear those of the other."""
    sock.settimeout(PATIENCE_MS / 1e3)
    for who, what, content in SAID:
        if who == part:
            sock.sendall(content)
        else:
            hear(sock, what, content)


def test_the_exporter_answers_the_recorded_bytes():
    producer = Producer(blocks=BLOCKS, block_bytes=BLOCK_BYTES)
    producer.cache[0] = CACHE
    try:
        assert producer.lease(SLOT, [1, 2], []) == HELD
        with socket.create_connection(producer.place) as sock:
            play(sock, "reader")
    finally:
        producer.put_away()


def test_the_reader_says_the_recorded_bytes_and_reads_the_answers():
    consumer, leases = Consumer(blocks=BLOCKS, block_bytes=BLOCK_BYTES, connections=1), Leases(BLOCKS, BLOCK_BYTES)
    heard_all = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            sock, _ = listener.accept()
            with sock:
                play(sock, "exporter")
                heard_all.append(True)
                with suppress(ConnectionResetError):  # so a reader closes
                    sock.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            peer = consumer.add(f"tcp://127.0.0.1:{listener.getsockname()[1]}", leases)
            consumer.prepare(peer, leases.rows())
            assert consumer.wait(consumer.check(peer, SLOT)) == [HELD]
            wanted, refused, ended = (
                consumer.read(peer, blocks, blocks, [(SLOT, epoch, len(blocks))], nbytes=BLOCK_BYTES)
                for blocks, epoch in (([1, 2], HELD), ([5], HELD), ([1], EPOCH))
            )
            consumer.wait(consumer.post(wanted))
            assert consumer.fence(peer, SLOT, wanted) == HELD
            assert consumer.target[1:3].tobytes() == CACHE[1:3].tobytes()
            assert consumer.failure(consumer.post(refused)).code == FailureCode.BOUNDS
            posted = consumer.post(ended)
            consumer.wait(posted)
            assert (posted.unheld, consumer.fence(peer, SLOT, ended)) == ({(SLOT, EPOCH)}, HELD)
        finally:
            consumer.close()
            thread.join()
    assert heard_all == [True]
