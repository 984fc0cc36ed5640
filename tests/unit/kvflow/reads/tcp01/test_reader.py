"""The reader of the wire of the release before, whose exporter is played by hand. A real one is in test_releases."""

import select
import socket
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest

from kvflow.config import TcpSettings
from kvflow.errors import FailureCode
from kvflow.ids import Credentials, PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, CheckedList, Chunk, Portion, Share
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import SERVES_NOTHING, LeaseName, PeerAddress, PreparedList
from kvflow.reads.tcp.connection import Told
from kvflow.reads.tcp.stream import ChannelClosed
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.backend import OldTcpBackend
from kvflow.reads.tcp01.channel import TlsChannel

PEER = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", "")
WHO = Credentials("ab" * 32, "reader", 0, "1" * 32, b"p" * 32)
EPOCH, BYTES = 7, bytes(range(64))
PATIENCE_S = 60.0


class OldExporter:
    """Lets one reader in, and answers each READ with what the test gives."""

    def __init__(self, *answers, pass_=WHO.pass_):
        self._answers, self._pass = answers, pass_
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        self._listener.settimeout(PATIENCE_S)
        sock, _ = self._listener.accept()
        with sock, sock.makefile("rb") as said:
            theirs = b"t" * wire.NONCE_BYTES
            sock.sendall(wire.MAGIC + theirs)
            hello = said.read(wire.HELLO_BYTES + len(WHO.engine_id))
            ours = hello[len(wire.MAGIC) :][: wire.NONCE_BYTES]
            assert hello == wire.encode_hello(WHO, theirs, ours, b"")
            sock.sendall(wire.proof_of_exporter(self._pass, theirs, ours, b""))
            for answer in self._answers:
                kind = wire.EPOCH
                while kind in (wire.EPOCH, wire.PROGRAM):
                    header = said.read(wire.HEADER.size)
                    if not header:
                        return
                    kind, *_, nbytes = wire.HEADER.unpack(header)
                    self.heard.append((kind, said.read(nbytes)))
                    if kind == wire.EPOCH:
                        break
                sock.sendall(answer)
            with suppress(ConnectionResetError):
                said.read()

    def close(self):
        self._listener.close()
        self._thread.join()


def done(data, epoch=EPOCH):
    return wire.ANSWER.pack(wire.DONE, 0, 1, 0, len(data)) + data + struct.pack("<Q", epoch)


@pytest.fixture
def read():
    """Returns a function that reads two blocks from an exporter, and returns what was posted and the target."""
    made = []

    def read_from(exporter):
        anywhere = "tcp://127.0.0.1:0"
        settings = TcpSettings(bind=anywhere, advertise=anywhere, connections=1, encryption="off")
        backend = OldTcpBackend(settings, SERVES_NOTHING, Told())
        made.extend((backend, exporter))
        backend.add(PeerAddress(PEER, {}, Region(8, 8), None, exporter.endpoint, WHO))
        target = np.zeros(128, np.uint8)
        rows = [check_rows(np.array([[address, 32, 0, 32, 4]])) for address in (1 << 20, target.ctypes.data)]
        prepared_list = PreparedList(1, PEER, rows[0].table, rows[1].table)
        backend.prepare(CheckedList(prepared_list, *rows))
        index = [np.array(each, np.int32) for each in ([0, 3], [2, 1])]
        share = Share(5, LeaseName(3, EPOCH, b"m" * 32), 2)
        posted = backend.post(Chunk(Portion(PEER, 1, *index, np.array([0, 2]), 64, (share,)), 0, 2))
        poll = select.poll()
        poll.register(backend.fileno(), select.POLLIN)
        while backend.poll(posted) is None:
            assert poll.poll(PATIENCE_S * 1e3)
            backend.progress()
        fence = backend.post_check(PEER, 3, 3, [(5, share.lease)], fence=True) if not posted.refused else None
        return posted, target, fence

    yield read_from
    for each in made:
        each.close()


def test_blocks_arrive_where_they_belong(read):
    exporter = OldExporter(done(BYTES))
    posted, target, fence = read(exporter)
    assert (posted.unheld, fence) == (set(), [EPOCH])
    assert target.tobytes() == bytes(32) + BYTES[32:] + BYTES[:32] + bytes(32)
    (program, rows), (kind, body) = exporter.heard
    assert (program, kind) == (wire.PROGRAM, wire.READ)
    assert struct.unpack("<5q", rows) == (1 << 20, 32, 0, 32, 4)
    assert body == wire.LEASE.pack(3, EPOCH, b"m" * 32) + struct.pack("<2i", 0, 3)


def test_a_lease_that_is_not_held_is_told(read):
    posted, target, fence = read(OldExporter(wire.ANSWER.pack(wire.NOT_HELD, 0, 1, 0, 0) + struct.pack("<Q", 9)))
    assert (posted.unheld, fence) == ({(3, EPOCH)}, [9])
    assert not target.any()


def test_a_refusal_is_told(read):
    posted, _, _ = read(OldExporter(wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, 3) + b"why"))
    assert [(reason.code, reason.detail) for reason in posted.refused.values()] == [(FailureCode.BOUNDS, "why")]


@pytest.mark.parametrize(
    "said",
    [
        done(BYTES[1:]),
        wire.ANSWER.pack(wire.NOT_HELD, 0, 1, 0, 0) + struct.pack("<Q", EPOCH),
        wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, wire.DETAIL_BYTES_MAX + 1),
        wire.ANSWER.pack(9, 0, 1, 0, 64),
    ],
    ids=range(4),
)
def test_an_answer_that_breaks_the_protocol_ends_the_connection_unwritten(read, said):
    with pytest.raises(BackendError, match=r"breaks the protocol|has closed|has reset|refused"):
        read(OldExporter(said))


def test_an_exporter_without_the_pass_is_not_believed(read):
    with pytest.raises(BackendError, match="has not proven that it is the producer"):
        read(OldExporter(pass_=b"x" * 32))


def test_what_is_no_tls_ends_the_handshake():
    near, far = socket.socketpair()
    channel = TlsChannel(near)
    assert not channel.handshake()
    far.sendall(b"kvftcp02" * 9)
    with pytest.raises(ChannelClosed, match="does not speak TLS"):
        channel.handshake()
    channel.close()
    far.close()
