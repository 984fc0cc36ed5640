"""The reader of the wire of the release before, whose exporter is played by hand. A real one is in test_releases."""

import select
import socket
import ssl
import struct
import threading
import time
from contextlib import nullcontext, suppress
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from kvflow.config import TcpSettings
from kvflow.errors import FailureCode
from kvflow.ids import Credentials, PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, CheckedList, Chunk, Envelope, Portion, Share, seal
from kvflow.reads.bounds import OutOfBounds, check_rows
from kvflow.reads.contract import SERVES_NOTHING, LeaseName, PeerAddress, PreparedList
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.tcp.opening import Rejected
from kvflow.reads.tcp.stream import ByteRows
from kvflow.reads.tcp01 import opening, wire
from kvflow.reads.tcp01.opening import OldTlsStream

PEER = PeerId("producer", 0, "0" * 32, "tcp://127.0.0.1:1", "")
WHO = Credentials("ab" * 32, "reader", 0, "1" * 32, b"p" * 32)
EPOCH, BYTES = 7, bytes(range(64))
PATIENCE_S = 60.0


class OldExporter:
    """Lets one reader in, and answers each READ with what the test gives."""

    def __init__(self, *answers, pass_=WHO.pass_, magic=opening.MAGIC):
        self._answers, self._pass, self._magic = answers, pass_, magic
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heard = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        self._listener.settimeout(PATIENCE_S)
        sock, _ = self._listener.accept()
        with sock, sock.makefile("rb") as said, suppress(ConnectionResetError):
            theirs = b"t" * opening.NONCE_BYTES
            sock.sendall(self._magic + theirs)
            hello = said.read(opening.HELLO_BYTES + len(WHO.engine_id))
            nonces = theirs, hello[len(opening.MAGIC) :][: opening.NONCE_BYTES]
            if not hello:
                return
            assert hello == opening.encode_hello(WHO, nonces, b"")
            sock.sendall(opening.proof_of(replace(WHO, pass_=self._pass), "exporter", nonces, b""))
            for answer in self._answers:
                kind = wire.PROGRAM
                while kind == wire.PROGRAM:
                    header = said.read(wire.HEADER.size)
                    if not header:
                        return
                    kind, *_, nbytes = wire.HEADER.unpack(header)
                    self.heard.append((kind, said.read(nbytes)))
                sock.sendall(answer)
            said.read()

    def close(self):
        self._listener.close()
        self._thread.join()


def done(data, epoch=EPOCH):
    return wire.ANSWER.pack(wire.DONE, 0, 1, 0, len(data)) + data + struct.pack("<Q", epoch)


@pytest.fixture
def read():
    """Returns a function that reads two blocks from an exporter, and returns what was posted, target and fence.

    Without ``shares``, both blocks are those of one read. ``first``: ask for the slot of the lease before.
    """
    made = []

    def read_from(exporter, shares=((5, 2),), *, first=False):
        anywhere = "tcp://127.0.0.1:0"
        settings = TcpSettings(bind=anywhere, advertise=anywhere, connections=1, encryption="off")
        slots = np.zeros(1, np.uint64)
        backend = TcpBackend("reader", settings, [], Region(slots.ctypes.data, 8), SERVES_NOTHING)
        made.extend((backend, exporter))
        planes = {"tcp": seal(Envelope("tcp", "producer", b""))}
        backend.add(PeerAddress(PEER, planes, Region(8, 8), None, exporter.endpoint, WHO))
        target = np.zeros(128, np.uint8)
        rows = [check_rows(np.array([[address, 32, 0, 32, 4]])) for address in (1 << 20, target.ctypes.data)]
        prepared_list = PreparedList(1, PEER, rows[0].table, rows[1].table)
        backend.prepare(CheckedList(prepared_list, *rows))
        index = [np.array(each, np.int32) for each in ([0, 3], [2, 1])]
        lease = LeaseName(3, EPOCH, b"m" * 32)
        shares = tuple(Share(read_id, lease, pairs) for read_id, pairs in shares)

        def wait(posted):
            poll = select.poll()
            poll.register(backend.fileno(), select.POLLIN)
            until = time.monotonic() + PATIENCE_S
            while (value := backend.poll(posted)) is None:
                assert time.monotonic() < until
                backend.progress()
                poll.poll(100)
            return value

        if first:
            assert wait(backend.post_check(PEER, 3, 3, [(5, lease)], fence=False)) == [EPOCH]
        posted = backend.post(Chunk(Portion(PEER, 1, *index, np.array([0, 2]), 64, shares), 0, 2))
        wait(posted)
        reads = [(share.read_id, lease) for share in shares if share.read_id not in posted.refused]
        return posted, target, backend.post_check(PEER, 3, 3, reads, fence=True) if reads else None

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


def test_each_read_has_a_request_and_a_list_is_announced_once(read):
    exporter = OldExporter(done(BYTES[:32]), wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, 3) + b"why")
    posted, target, fence = read(exporter, ((5, 1), (6, 1)))
    assert {read_id: reason.code for read_id, reason in posted.refused.items()} == {6: FailureCode.BOUNDS}
    assert fence == [EPOCH]
    assert target.tobytes() == bytes(64) + BYTES[:32] + bytes(32)
    assert [kind for kind, _ in exporter.heard] == [wire.PROGRAM, wire.READ, wire.READ]


def test_the_value_of_a_slot_is_asked_for(read):
    exporter = OldExporter(wire.ANSWER.pack(wire.DONE, 0, 0, 0, 8) + struct.pack("<Q", EPOCH), done(BYTES))
    assert read(exporter, first=True)[2] == [EPOCH]
    assert [kind for kind, _ in exporter.heard] == [wire.EPOCH, wire.PROGRAM, wire.READ]


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


def test_who_speaks_another_wire_is_not_read(read):
    with pytest.raises(BackendError, match="its greeting is b'kvftcp03', not b'kvftcp01'"):
        read(OldExporter(magic=b"kvftcp03"))


def test_what_is_no_tls_ends_the_handshake():
    near, far = socket.socketpair()
    with near, far:
        near.setblocking(False)
        shaking = OldTlsStream(near).shake()
        next(shaking)
        far.sendall(b"kvftcp02" * 9)
        with pytest.raises(Rejected, match="does not speak TLS"):
            next(shaking)


FFDHE3072 = """\
-----BEGIN DH PARAMETERS-----
MIIBiAKCAYEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEfz9zeNVs7ZRkDW7w09N75nAI4YbRvydbmyQd62R0mkff3
7lmMsPrBhtkcrv4TCYUTknC0EwyTvEN5RPT9RFLi103TZPLiHnH1S/9croKrnJ32
nuhtK8UiNjoNq8Uhl5sN6todv5pC1cRITgq80Gv6U93vPBsg7j/VnXwl5B0rZsYu
N///////////AgEC
-----END DH PARAMETERS-----
"""
"""The group of RFC 7919 that producers of the release before use."""


def test_bytes_arrive_both_ways_through_tls(tmp_path):
    (tmp_path / "group").write_text(FFDHE3072)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(opening.CIPHER)
    context.load_dh_params(tmp_path / "group")
    near, far = socket.socketpair()
    said, answer = bytes(range(256)) * 2000, bytes(range(255, -1, -1)) * 3000
    heard = []

    def serve():
        with far, context.wrap_socket(far, server_side=True) as tls, tls.makefile("rb") as words:
            heard.append(words.read(len(said)))
            tls.sendall(answer)
            words.read()

    thread = threading.Thread(target=serve)
    thread.start()
    with near:
        near.setblocking(False)
        stream = OldTlsStream(near)
        shaking = stream.shake()
        binding = None
        while binding is None:
            try:
                next(shaking)
                select.select([near], [], [], PATIENCE_S)
            except StopIteration as shaken:
                binding = shaken.value
        assert len(binding) == 32
        left = said
        while left:
            left = left[stream.write(left) :]
            select.select([], [near], [], PATIENCE_S)
        target = np.zeros(len(answer), np.uint8)
        cuts = [0, 5, 70_000, len(answer)]
        table = [(target.ctypes.data + first, end - first) for first, end in pairwise(cuts)]
        rows = ByteRows(np.array(table))
        while rows.left:
            if not stream.receive(rows) and not stream.pending:
                select.select([near], [], [], PATIENCE_S)
        assert target.tobytes() == answer
    thread.join()
    assert heard == [said]


@pytest.mark.parametrize("more", [0, 1])
def test_a_unit_that_one_request_cannot_ask_for_is_refused(more):
    binding = SimpleNamespace(unit_descriptors=wire.DESCRIPTORS_MAX + more)
    prepared = SimpleNamespace(
        prepared_list=SimpleNamespace(binding=binding, list_id=1, group=0),
        source=check_rows(np.array([[1 << 20, 32, 0, 32, 4]])),
    )
    with pytest.raises(OutOfBounds, match="65537 descriptors") if more else nullcontext():
        wire.requests_of(prepared)
