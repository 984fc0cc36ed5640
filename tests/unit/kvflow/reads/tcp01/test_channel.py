"""Channels over real sockets: the same contract for plain and for TLS, then what only TLS must keep."""

import contextlib
import random
import select
import signal
import socket
import ssl
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import ConfigInvalid
from kvflow.reads.tcp01 import channel as tcp_channel
from kvflow.reads.tcp01.channel import FFDHE3072, IOV_MAX, ChannelClosed, PlainChannel, TlsChannel, check_tls

PATIENCE_S = 60


def tcp_pair(buffer_bytes=0):
    """Two connected sockets: the one that connected, the one that was accepted."""
    with socket.socket() as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = socket.socket()
        if buffer_bytes:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                client.setsockopt(socket.SOL_SOCKET, option, buffer_bytes)
        client.connect(listener.getsockname())
        server = listener.accept()[0]
        if buffer_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return client, server


def unix_pair(buffer_bytes=0):
    pair = socket.socketpair()
    if buffer_bytes:
        for sock in pair:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return pair


def wait_until(channel, event):
    """Wait as the plane does: by a level-triggered epoll, and only for what the channel does not have itself."""
    with select.epoll() as epoll:
        epoll.register(channel.fileno(), event | (select.EPOLLOUT if channel.wants_write else 0))
        assert epoll.poll(PATIENCE_S), "nothing has happened"


def shake(*channels):
    """Finish the handshakes of both ends."""
    while open_ones := [channel for channel in channels if not channel.handshake()]:
        wait_until(open_ones[0], select.EPOLLIN | select.EPOLLOUT)


class Ends:
    """Makes pairs of channels, client first, and closes them."""

    def __init__(self, kind, pair):
        self.kind, self.pair, self.made = kind, pair, []

    def sockets(self, buffer_bytes=0):
        socks = self.pair(buffer_bytes)
        self.made += socks
        return socks

    def wrap(self, sock, *, server):
        return TlsChannel(sock, server=server) if self.kind == "tls" else PlainChannel(sock)

    def connect(self, buffer_bytes=0):
        client, server = self.sockets(buffer_bytes)
        channels = self.wrap(client, server=False), self.wrap(server, server=True)
        shake(*channels)
        return channels

    def close(self):
        for made in self.made:
            made.close()


@pytest.fixture(params=["plain", "tls"])
def kind(request):
    return request.param


@pytest.fixture(params=[tcp_pair, unix_pair], ids=["tcp", "unix"])
def ends(request, kind):
    made = Ends(kind, request.param)
    yield made
    made.close()


@pytest.fixture
def tls():
    made = Ends("tls", tcp_pair)
    yield made
    made.close()


@pytest.fixture
def local():
    """TLS where what was sent is there at once: without a network in between."""
    made = Ends("tls", unix_pair)
    yield made
    made.close()


def receive_one(channel, nbytes=1 << 16):
    """Wait for bytes and take them."""
    buffer = memoryview(bytearray(nbytes))
    while (count := channel.receive([buffer])) == 0:
        if not channel.pending:
            wait_until(channel, select.EPOLLIN)
    return bytes(buffer[:count])


def receive_end(channel):
    """Wait for the end and give its reason; whatever comes before is dropped."""
    with pytest.raises(ChannelClosed) as caught:  # noqa: PT012 - the call that ends is one of many
        while True:
            receive_one(channel)
    return str(caught.value)


def carry(sender, receiver, sent, buffers):
    """Move all bytes of ``sent`` into ``buffers``, in one thread, both ends in turn."""
    sent, buffers = list(sent), list(buffers)
    while any(len(buffer) for buffer in buffers):
        moved = took = sender.send(sent)
        while sent and took >= len(sent[0]):
            took -= len(sent.pop(0))
        if took:
            sent[0] = sent[0][took:]
        count = receiver.receive(buffers)
        moved += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]
        if not moved and not receiver.pending and not sender.wants_write:
            wait_until(receiver, select.EPOLLIN)
    assert not any(len(buffer) for buffer in sent)


def cut(view, sizes):
    places = [0]
    for size in sizes:
        places.append(places[-1] + size)
    return [view[first:last] for first, last in zip(places, [*places[1:], len(view)], strict=True)]


SIZES = st.lists(
    st.one_of(st.just(0), st.integers(0, 40), st.integers(0, 20_000), st.sampled_from([16384, 16385, 262144, 300_001])),
    max_size=12,
)


@pytest.mark.parametrize("kind", ["plain", "tls"])
@pytest.mark.parametrize("pair", [tcp_pair, unix_pair])
@given(st.tuples(SIZES, SIZES), st.sampled_from([0, 4096]), st.integers(0, 100))
@settings(max_examples=20)
def test_bytes_arrive_in_order_however_they_are_cut(kind, pair, sizes_of_both, buffer_bytes, more):
    sender_sizes, receiver_sizes = sizes_of_both
    total = sum(sender_sizes) + more
    data = random.Random(total).randbytes(total)
    filled = bytearray(total)
    client, server = Ends(kind, pair).connect(buffer_bytes)
    with contextlib.closing(client), contextlib.closing(server):
        sizes, room = [], total
        for size in receiver_sizes:
            sizes.append(min(size, room))
            room -= sizes[-1]
        carry(server, client, cut(memoryview(data), sender_sizes), cut(memoryview(filled), sizes))
        assert filled == data


def test_many_buffers_are_taken_in_several_calls(ends):
    client, server = ends.connect()
    count = 3 * IOV_MAX + 5
    data = random.Random(1).randbytes(count * 3)
    filled = bytearray(len(data))
    carry(client, server, cut(memoryview(data), [3] * count), cut(memoryview(filled), [3] * count))
    assert filled == data


def test_empty_buffers_are_neither_the_end_nor_in_the_way(ends):
    client, server = ends.connect()
    empty, buffer = memoryview(bytearray()), memoryview(bytearray(8))
    assert client.send([]) == client.send([b""]) == 0
    assert client.receive([]) == client.receive([empty] * 2000) == 0
    many = [b""] * (2 * IOV_MAX)
    assert client.send([*many, b"abc", b"", b"de"]) == 5
    wait_until(server, select.EPOLLIN)
    assert server.receive([]) == server.receive([empty]) == 0
    assert server.receive([*[empty] * (2 * IOV_MAX), buffer[:1], empty, buffer[1:]]) == 5
    assert bytes(buffer) == b"abcde\0\0\0"
    client.close()
    wait_until(server, select.EPOLLIN)
    assert server.receive([empty]) == 0
    assert "closed" in receive_end(server)


def test_nothing_yet_and_no_room_are_no_bytes(ends):
    client, server = ends.connect(4096)
    buffer = memoryview(bytearray(64))
    assert client.receive([buffer]) == server.receive([buffer]) == 0
    taken = {client: 0, server: 0}
    for end in (client, server):  # until both sides are full; a call that blocked would never return
        while count := end.send([bytes(1 << 16)]):
            taken[end] += count
    for end, other in ((server, client), (client, server)):  # and neither has lost a byte
        filled = memoryview(bytearray(b"x" * taken[other]))
        carry(other, end, [], [filled])
        assert bytes(filled) == bytes(taken[other])


def test_what_send_took_may_be_overwritten(ends):
    client, server = ends.connect(4096)
    source = bytearray(b"a" * 100_000)
    taken = client.send([memoryview(source)])
    assert 0 < taken <= len(source)
    source[:] = b"b" * len(source)
    filled = memoryview(bytearray(taken))
    carry(client, server, [], [filled])
    assert bytes(filled) == b"a" * taken


def test_bytes_before_an_orderly_end_arrive(ends):
    client, server = ends.connect()
    assert client.send([b"last bytes"]) == 10
    client.close()
    wait_until(server, select.EPOLLIN | select.EPOLLRDHUP)
    buffer = memoryview(bytearray(100))
    assert server.receive([buffer]) == 10
    assert bytes(buffer[:10]) == b"last bytes"
    assert receive_end(server) == "the other side has closed the connection"
    assert receive_end(server)


def test_a_half_closed_connection_still_takes_bytes(ends):
    client, server = ends.connect()
    with socket.socket(fileno=socket.dup(client.fileno())) as raw:
        raw.shutdown(socket.SHUT_WR)
    assert receive_end(server)
    assert server.send([b"still here"]) == 10
    assert receive_one(client) == b"still here"


def test_a_reset_is_named_on_both_calls(kind):
    client, server = Ends(kind, tcp_pair).connect()
    client.close(reset=True)
    wait_until(server, select.EPOLLIN)
    assert receive_end(server) == "the other side has reset the connection"
    with pytest.raises(ChannelClosed, match="closed"):
        server.send([b"x"])
    server.close()


def test_a_reset_in_the_middle_of_sending(ends):
    client, server = ends.connect(4096)
    while server.send([bytes(1 << 16)]):
        pass
    client.close(reset=True)
    with pytest.raises(ChannelClosed):  # noqa: PT012 - the kernel may take some bytes before it hears of it
        while True:
            server.send([bytes(1 << 16)])
            wait_until(server, select.EPOLLOUT)


def test_a_broken_connection_raises_no_signal(ends):
    """The process that embeds us may have SIGPIPE's default action, which is death."""
    client, server = ends.connect()
    caught = []
    before = signal.signal(signal.SIGPIPE, lambda *_: caught.append(True))
    try:
        client.close()
        for _ in range(3):
            with contextlib.suppress(ChannelClosed):
                server.send([b"x"])
            with contextlib.suppress(ChannelClosed):
                while True:
                    receive_one(server)
        server.close()
    finally:
        signal.signal(signal.SIGPIPE, before)
    assert not caught


@pytest.mark.parametrize("reset", [False, True])
def test_close_is_idempotent_and_later_calls_say_so(ends, reset):
    client, server = ends.connect(4096)
    while client.send([bytes(1 << 16)]):  # with bytes that wait
        pass
    for _ in range(2):
        client.close(reset=reset)
        client.close(reset=not reset)
    assert client.fileno() == -1
    for call in (lambda: client.receive([memoryview(bytearray(1))]), lambda: client.send([b"x"])):
        with pytest.raises(ChannelClosed, match="this side"):
            call()
    assert receive_end(server)


def test_a_closed_peer_does_not_keep_close_from_working(ends):
    client, server = ends.connect()
    client.close(reset=True)
    server.close()
    assert server.fileno() == -1


@pytest.mark.parametrize("number", [105, 12])  # ENOBUFS, ENOMEM
def test_a_kernel_without_memory_is_asked_again(number):
    class NoMemory:
        def setblocking(self, _):
            pass

        def sendmsg(self, *_):
            raise OSError(number, "no memory")

        recvmsg_into = sendmsg

    channel = PlainChannel(NoMemory())
    assert channel.send([b"x"]) == channel.receive([memoryview(bytearray(1))]) == 0


def test_a_plain_channel_has_no_binding():
    client, server = unix_pair()
    with client, server:
        channel = PlainChannel(client)
        assert channel.handshake()
        assert (channel.binding(), channel.wants_write, channel.pending) == (b"", False, False)


# --- TLS ---


def test_what_was_decrypted_is_pending_and_does_not_spin(tls):
    client, server = tls.connect()
    assert client.send([b"0123456789"]) == 10
    wait_until(server, select.EPOLLIN)
    buffer = memoryview(bytearray(4))
    assert server.receive([buffer]) == 4
    with select.epoll() as epoll:
        epoll.register(server.fileno(), select.EPOLLIN)
        assert not epoll.poll(0)  # the kernel has nothing left, so epoll would never return
    assert server.pending
    assert receive_one(server) == b"456789"
    while server.pending:
        assert server.receive([buffer]) == 0
    assert not server.pending


def test_the_end_behind_bytes_is_pending(local):
    client, server = local.connect()
    client.send([b"0123456789"])
    with socket.socket(fileno=socket.dup(client.fileno())):  # TLS ends, and the connection does not
        client.close()
        wait_until(server, select.EPOLLIN)
        assert server.receive([memoryview(bytearray(4))]) == 4
        assert server.receive([memoryview(bytearray(100))]) == 6
        assert server.pending
        with pytest.raises(ChannelClosed, match="closed"):
            server.receive([memoryview(bytearray(4))])


def test_one_call_has_an_end(local, monkeypatch):
    """A peer that sends, or takes, as fast as we work does not keep the thread from its other connections."""
    monkeypatch.setattr(tcp_channel, "PART_BYTES", 10_000)
    monkeypatch.setattr(tcp_channel, "PARTS_MAX", 3)
    client, server = local.connect()
    data = bytes(100_000)
    assert [client.send([data]), client.send([data])] == [30_000, 30_000]
    buffer = memoryview(bytearray(100_000))
    first = server.receive([buffer])
    assert 0 < first < 30_000  # three parts on the wire have fewer bytes of data
    assert first + len(receive_one(server)) > 30_000


def test_the_binding_is_that_of_one_connection(tls):
    first, second = tls.connect(), tls.connect()
    assert first[0].binding() == first[1].binding()
    assert second[0].binding() == second[1].binding()
    assert first[0].binding() != second[0].binding()
    assert len(first[0].binding()) == 32


def test_the_handshake_has_keys_of_its_own_and_gcm(tls):
    client, server = tls.connect()
    for end in (client, server):
        assert end._tls.version() == "TLSv1.2"
        assert end._tls.cipher()[0] == "ADH-AES256-GCM-SHA384"
        assert not end._tls.session_reused
        assert end._tls.compression() is None


def test_what_is_sent_is_not_on_the_wire_in_plain(tls):
    client, server = tls.sockets()
    channels = TlsChannel(client, server=False), TlsChannel(server, server=True)
    shake(*channels)
    secret = b"the prompt of a user " * 10
    channels[0].send([secret])
    server.setblocking(True)
    server.settimeout(PATIENCE_S)
    wire = server.recv(1 << 16)
    assert len(wire) > len(secret)
    assert secret[:16] not in wire


def test_a_man_in_the_middle_gives_the_ends_different_bindings(tls):
    """He ends TLS on both sides and passes the bytes on: nothing but the binding tells."""
    client, middle_server = tls.connect()
    middle_client, server = tls.connect()
    client.send([b"hello"])
    middle_client.send([receive_one(middle_server)])
    assert receive_one(server) == b"hello"
    assert client.binding() != server.binding()


def test_equal_finished_messages_are_not_an_equal_binding(tls, monkeypatch):
    """``tls-unique`` has 12 bytes, which a man in the middle may make equal: the bytes that were sent differ still."""
    monkeypatch.setattr(ssl.SSLObject, "get_channel_binding", lambda *_: b"\0" * 12)
    (client, middle_server), (middle_client, server) = tls.connect(), tls.connect()
    assert client.binding() == middle_server.binding()
    assert client.binding() != server.binding()
    assert middle_client.binding() == server.binding()


class Middle:
    """Two ends with a relay between them, which changes each piece that it passes on; all in one thread."""

    def __init__(self, local, change=lambda _number, data: [data]):
        (client_sock, near), (far, server_sock) = local.sockets(), local.sockets()
        near.setblocking(False)
        far.setblocking(False)
        self.client, self.server = TlsChannel(client_sock, server=False), TlsChannel(server_sock, server=True)
        self._ways = ((near, far), (far, near))
        self._change, self._passed = change, 0

    def relay(self):
        for source, target in self._ways:
            with contextlib.suppress(BlockingIOError):
                data = source.recv(1 << 16)
                for piece in self._change(self._passed, data):
                    target.sendall(piece)
                    for end in (self.client, self.server):
                        end.handshake()
                self._passed += 1

    def shake(self):
        """Whether both handshakes are done; a handshake has four flights, and one may be refused."""
        for _ in range(6):
            self.client.handshake()
            self.relay()
        return self.client.handshake() and self.server.handshake()


def test_a_relay_that_cuts_the_records_otherwise_is_not_trusted(local):
    """TLS would accept it: the messages are the same. The bytes are not, so that the bindings differ."""

    def halve_first(number, data):
        body = data[5:] if number == 0 else b""
        half = len(body) // 2
        return [data[:3] + len(part).to_bytes(2, "big") + part for part in (body[:half], body[half:]) if part] or [data]

    middle = Middle(local, halve_first)
    assert middle.shake()
    assert middle.client.binding() != middle.server.binding()


def test_a_relay_that_changes_nothing_sees_equal_bindings(tls):
    """The binding is no test of the route: a router in between passes."""
    (client_sock, near), (far, server_sock) = tls.sockets(), tls.sockets()
    client, server = TlsChannel(client_sock, server=False), TlsChannel(server_sock, server=True)
    threads = [threading.Thread(target=pass_on, args=pair) for pair in ((near, far), (far, near))]
    for thread in threads:
        thread.start()
    shake(client, server)
    assert client.binding() == server.binding()
    client.close()
    server.close()
    for thread in threads:
        thread.join(PATIENCE_S)


def pass_on(source, target):
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def test_a_session_is_not_resumed(tls):
    """A resumed session has no Diffie-Hellman shares of its own, so that equal bindings would prove nothing."""
    context = tcp_channel._context(server=False)

    def meet(session):
        client, server_sock = tls.sockets()
        server = TlsChannel(server_sock, server=True)
        made = []

        def dial():
            client.settimeout(PATIENCE_S)
            wrapped = context.wrap_socket(client, session=session)
            tls.made.append(wrapped)
            made.append((wrapped.session, wrapped.session_reused))

        dialer = threading.Thread(target=dial)
        dialer.start()
        while not server.handshake():
            wait_until(server, select.EPOLLIN)
        dialer.join(PATIENCE_S)
        return made[0]

    session, reused = meet(None)
    assert not reused
    assert session.id
    assert not meet(session)[1]


def test_a_resumed_session_is_refused(tls, monkeypatch):
    """Should OpenSSL ever resume, either end says no."""
    monkeypatch.setattr(ssl.SSLObject, "session_reused", property(lambda _: True))
    with pytest.raises(ChannelClosed, match="resumed"):
        tls.connect()


@pytest.mark.parametrize("server", [True, False])
@pytest.mark.parametrize(
    "junk",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(100),
        b"\xff" * 100,
        b"\x16\x03\x01\xff\xff" + bytes(100),
        b"\x16\x03\x01\x00\x05hello",
        b"\x17\x03\x03\x00\x05hello",
        b"\x15\x03\x03\x00\x02\x02\x28",
        b"\x16\x03\x03\x00\x00",
    ],
)
def test_junk_in_place_of_a_handshake_ends_the_channel(tls, server, junk):
    sock, peer = tls.sockets()
    channel = TlsChannel(sock, server=server)
    assert not channel.handshake()
    peer.sendall(junk)
    peer.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed) as caught:  # noqa: PT012 - the junk may come in parts
        while not channel.handshake():
            wait_until(channel, select.EPOLLIN)
    assert str(caught.value)
    for call in (channel.handshake, lambda: channel.receive([memoryview(bytearray(1))]), lambda: channel.send([b"x"])):
        with pytest.raises(ChannelClosed):
            call()


@given(st.binary(min_size=1, max_size=300), st.booleans())
@settings(max_examples=100)
def test_any_bytes_end_the_channel_or_wait(data, server):
    sock, peer = unix_pair()
    channel = TlsChannel(sock, server=server)
    with peer, contextlib.closing(channel):
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ChannelClosed):  # noqa: PT012
            while not channel.handshake():
                wait_until(channel, select.EPOLLIN)


@given(st.integers(0, 3), st.integers(0, 2000), st.integers(1, 255))
@settings(max_examples=40)
def test_a_changed_byte_of_the_handshake_never_gives_equal_bindings(flight, place, flip):
    """Change one byte of one flight: an end refuses it, or waits, or the bindings differ."""

    def change(number, data):
        changed = bytearray(data)
        if number == flight:
            changed[place % len(changed)] ^= flip
        return [changed]

    local = Ends("tls", unix_pair)
    with contextlib.closing(local), contextlib.suppress(ChannelClosed):
        middle = Middle(local, change)
        assert not middle.shake() or middle.client.binding() != middle.server.binding()


def test_a_relay_of_one_byte_at_a_time(local):
    """Handshake and data come a byte at a time, both ways."""
    middle = Middle(local, lambda _, data: [bytes([byte]) for byte in data])
    assert middle.shake()
    assert middle.client.binding() == middle.server.binding()
    buffer = memoryview(bytearray(100))
    for sender, receiver in ((middle.client, middle.server), (middle.server, middle.client)):
        assert sender.send([b"from one ", b"to the other"]) == 21
        source, target = middle._ways[sender is middle.server]
        got = b""
        for byte in source.recv(1 << 16):
            assert not got  # a record is given when it is whole
            target.sendall(bytes([byte]))
            got += bytes(buffer[: receiver.receive([buffer])])
            assert not receiver.pending
        assert got == b"from one to the other"


def test_an_endless_handshake_is_bounded(tls):
    """A ClientHello of 100 kB, in records of 1 kB, ends before we have stored it."""
    sock, peer = tls.sockets()
    channel = TlsChannel(sock, server=True)
    message = b"\x01" + (100_000).to_bytes(3, "big") + bytes(100_000)
    sent = 0
    with pytest.raises(ChannelClosed, match="has more than"):  # noqa: PT012
        for first in range(0, len(message), 1000):
            part = message[first : first + 1000]
            peer.sendall(b"\x16\x03\x03" + len(part).to_bytes(2, "big") + part)
            sent += len(part)
            wait_until(channel, select.EPOLLIN)
            channel.handshake()
    assert sent <= tcp_channel.HANDSHAKE_BYTES_MAX + 2000


def test_a_plain_and_a_tls_end_part(tls):
    sock, peer = tls.sockets()
    plain, channel = PlainChannel(peer), TlsChannel(sock, server=True)
    plain.send([b"kvflow hello, 32 bytes of protocol"])
    wait_until(channel, select.EPOLLIN)
    with pytest.raises(ChannelClosed, match="does not speak TLS"):
        channel.handshake()


@pytest.mark.parametrize("server", [True, False])
def test_a_peer_that_leaves_during_the_handshake(tls, server):
    sock, peer = tls.sockets()
    channel = TlsChannel(sock, server=server)
    channel.handshake()
    peer.shutdown(socket.SHUT_WR)
    wait_until(channel, select.EPOLLIN)
    with pytest.raises(ChannelClosed, match="during the TLS handshake"):
        channel.handshake()


def test_data_right_behind_the_handshake_is_not_lost_or_hashed(tls):
    """The server speaks first: its bytes come in one piece with the end of its handshake."""
    client, server = tls.sockets()
    client, server = TlsChannel(client, server=False), TlsChannel(server, server=True)
    while not server.handshake():
        client.handshake()
    assert server.send([b"first"]) == 5
    assert receive_one(client) == b"first"
    assert client.binding() == server.binding()


@pytest.mark.parametrize(
    "data", [b"plain text", b"\x17\x03\x03\x00\x20" + bytes(32), b"\x16\x03\x03\x00\x04" + bytes(4)]
)
def test_junk_after_the_handshake_ends_the_channel(tls, data):
    client, server = tls.connect()
    with socket.socket(fileno=socket.dup(client.fileno())) as raw:
        raw.sendall(data)
        raw.shutdown(socket.SHUT_WR)
    assert "TLS" in receive_end(server)


def test_a_changed_byte_of_the_data_ends_the_channel(local):
    middle = Middle(local)
    assert middle.shake()
    assert middle.client.send([bytes(1000)]) == 1000
    near, far = middle._ways[0]
    data = bytearray(near.recv(4096))
    data[-1] ^= 1
    far.sendall(data)
    assert "TLS failed" in receive_end(middle.server)


def test_bytes_before_a_broken_record_arrive(local):
    middle = Middle(local)
    assert middle.shake()
    near, far = middle._ways[0]
    middle.client.send([b"good"])
    middle.client.send([b"changed"])
    data = bytearray(near.recv(4096))
    data[-1] ^= 1
    far.sendall(data)
    far.close()
    buffer = memoryview(bytearray(100))
    assert middle.server.receive([buffer]) == 4
    assert middle.server.pending
    for _ in range(2):
        with pytest.raises(ChannelClosed):
            middle.server.receive([buffer])


def test_a_cut_connection_is_not_an_orderly_end(tls):
    """What a peer that dies leaves behind: the kernel ends the stream, TLS does not."""
    client, server = tls.connect()
    client._sock.close()
    assert "without close_notify" in receive_end(server)


def test_the_group_is_that_of_rfc_7919():
    """p = 2**3072 - 2**3008 + (floor(2**2942 * e) + 2625351) * 2**64 - 1, g = 2: no group of our own making."""
    der = ssl.PEM_cert_to_DER_cert(FFDHE3072.replace("DH PARAMETERS", "CERTIFICATE"))
    e, term, number = 0, 1 << 3200, 0
    while term:
        e, number = e + term, number + 1
        term //= number
    prime = 2**3072 - 2**3008 + ((e >> (3200 - 2942)) + 2625351) * 2**64 - 1
    assert prime.to_bytes(385, "big") in der
    assert der.endswith(b"\x02\x01\x02")
    assert len(der) == 4 + 4 + 385 + 3


def test_the_local_openssl_can_do_it():
    check_tls()


@pytest.mark.parametrize("cipher", ["NO-SUCH-CIPHER", "ADH-AES256-GCM-SHA384:@SECLEVEL=2"])
def test_an_openssl_that_cannot_is_a_typed_error(monkeypatch, cipher):
    """Either the suite is unknown, or it is known and the handshake fails."""
    monkeypatch.setattr(tcp_channel, "CIPHER", cipher)
    with pytest.raises(ConfigInvalid, match="tcp_encryption") as caught:
        check_tls()
    assert "OpenSSL" in caught.value.remedy
