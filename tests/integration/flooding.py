"""A flood against one worker, in a process of its own, which imports little."""

import resource
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress

import zmq

import handshake
from handshake.codec import encode
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import WIRE_VERSION, Hello, Ping, Publish

QUIET_MS = 200
"""In which no more connections have come about: those that there will be are there."""

IDENTITY = handshake.Identity(engine_id="flood", rank=0, num_ranks=1, incarnation="f" * 32, role="decode")


def tcp(flood, words):
    """Connections that say these bytes and nothing more."""
    host, port = flood.endpoint.removeprefix("tcp://").split(":")
    held = []
    for _ in range(flood.count):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex((host, int(port)))  # one that finds no room waits in the kernel, and we do not
    poll = select.poll()
    for each in held:
        poll.register(each, select.POLLOUT)
    while through := poll.poll(QUIET_MS):  # some never are
        for number, _ in through:
            poll.unregister(number)
    for each in held:
        with suppress(OSError):
            each.sendall(words)
    return held


TURNING_MAX = 60_000
TURNING_S = 60.0
"""Connections and seconds after which a flood ends by itself."""
AT_ONCE = 50
EVERY_S = 0.02
RESETTING = struct.pack("ii", 1, 0)


def turning(flood, words):
    """As ``tcp``, over and over: the oldest connection goes, with a reset, when there are too many."""
    host, port = flood.endpoint.removeprefix("tcp://").split(":")
    held, ends_s = deque(), time.monotonic() + TURNING_S
    for number in range(TURNING_MAX):
        each = socket.socket()
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETTING)
        each.connect_ex((host, int(port)))
        held.append(each)
        if number % AT_ONCE == AT_ONCE - 1:
            is_over = flood.over.wait(EVERY_S)
            for new in list(held)[-AT_ONCE:]:
                with suppress(OSError):
                    new.sendall(words)
            if is_over or time.monotonic() > ends_s:
                break
        while len(held) > flood.count:
            held.popleft().close()
        if number == flood.count:
            flood.stands.set()
    return held


def client_hello():
    """Return how a TLS connection begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def dealers(flood, part, secret, frames=()):
    """ZeroMQ connections with keys of this secret, that say these messages: a part of the usual number."""
    count = flood.count // part
    security = handshake.ClusterSecurity.from_secret(secret)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4 * count + 8)
    held, poller = [], zmq.Poller()
    for _ in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.setsockopt(zmq.CURVE_SERVERKEY, security.server.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, security.client.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, security.client.private)
        monitor = dealer.get_monitor_socket(zmq.Event.CONNECTED)
        dealer.connect(flood.endpoint)
        for each in frames:
            dealer.send_multipart(each)
        held += [dealer, monitor]
        poller.register(monitor, zmq.POLLIN)
    while connected := poller.poll(QUIET_MS):  # nothing tells of those that are refused
        for monitor, _ in connected:
            poller.unregister(monitor)
    return held


def said(*messages):
    return [encode(message, DEFAULT_LIMITS.frame_bytes_max) for message in messages]


HELLO = Hello(version_min=WIRE_VERSION, version_max=WIRE_VERSION, identity=IDENTITY)
PUBLISH = Publish(publication=handshake.Publication.of(b"of a flood"))

FLOODS = {
    "connections that say nothing": lambda flood: tcp(flood, b""),
    "connections that are no ZeroMQ": lambda flood: tcp(flood, b"GET / HTTP/1.1\r\n\r\n" * 8),
    "half a greeting": lambda flood: tcp(flood, b"\xff" + bytes(8) + b"\x7f\x03"),
    "another secret": lambda flood: dealers(flood, 10, "another secret, as long"),
    "members that never say Hello": lambda flood: dealers(flood, 4, flood.secret),
    "members that only say Hello": lambda flood: dealers(flood, 10, flood.secret, said(HELLO)),
    "members that send rubbish": lambda flood: dealers(flood, 10, flood.secret, [[b"rubbish"]] * 50),
}

OF_DATA = {
    "only connections": lambda flood: turning(flood, b""),
    "halves of a hello": lambda flood: turning(flood, bytes(20)),
    "hellos of TLS": lambda flood: turning(flood, client_hello()),
}
"""Floods of a data port, which never stand: there are always new connections."""


def chatter(flood):
    """One member that is ready and then sends as much as it can, until it is ended."""
    dealer, _ = dealers(flood, flood.count, flood.secret, said(HELLO, PUBLISH))
    dealer.recv_multipart()
    flood.stands.set()
    (ping,) = said(Ping(nonce=1))
    while not flood.over.is_set():
        dealer.send_multipart(ping)


CHATTER = "a member that never stops talking"


class Flood:
    """A flood that stands, or goes on.

    Attributes:
        stands: set once it does.
        over: set when it is to end.
    """

    def __init__(self, kind, endpoint, count, secret):
        self.endpoint, self.count, self.secret = endpoint, count, secret
        self.stands, self.over = threading.Event(), threading.Event()
        self._flood = (FLOODS | OF_DATA | {CHATTER: chatter})[kind]
        self._is_of_data, self._held = kind in OF_DATA, None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_over(self):
        """Tell whether it has ended by itself."""
        return self._is_of_data and not self._thread.is_alive()

    def _run(self):
        self._held = self._flood(self)
        self.stands.set()


@contextmanager
def flooding(kind, endpoint, count, secret):
    """Flood a worker with so many connections, until the process is ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    flood = Flood(kind, endpoint, count, secret)
    flood.stands.wait()
    yield flood
