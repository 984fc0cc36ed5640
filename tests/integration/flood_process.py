"""A flood against one worker: says when it stands, and holds it until its standard input is closed.

Arguments: the kind of flood, the worker's endpoint, how many connections, the cluster's secret.
"""

import os
import resource
import select
import socket
import ssl
import struct
import sys
import time
from collections import deque
from contextlib import suppress

import zmq

import handshake
from handshake.codec import encode
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import WIRE_VERSION, Hello, Ping, Publish

SECRET = sys.argv[4] if len(sys.argv) == 5 else ""
"""Of the cluster. Not imported: that would load torch."""

IDENTITY = handshake.Identity(engine_id="flood", rank=0, num_ranks=1, incarnation="f" * 32, role="decode")


def tcp(endpoint, count, words):
    """Connections that say these bytes and nothing more."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    held = []
    for _ in range(count):
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex((host, int(port)))  # whoever finds no room waits in the kernel, and we do not
    time.sleep(0.2)  # most are through by then; some never are, so that there is nothing to wait for
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


def turning(endpoint, count, words):
    """As ``tcp``, over and over: the oldest connection goes, with a reset, when there are too many."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    held, ends_s = deque(), time.monotonic() + TURNING_S
    for number in range(TURNING_MAX):
        each = socket.socket()
        each.setblocking(False)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESETTING)
        each.connect_ex((host, int(port)))
        held.append(each)
        if number % AT_ONCE == AT_ONCE - 1:
            ready, _, _ = select.select([sys.stdin], [], [], EVERY_S)
            for new in list(held)[-AT_ONCE:]:
                with suppress(OSError):
                    new.sendall(words)
            if ready or time.monotonic() > ends_s:
                break
        while len(held) > count:
            held.popleft().close()
        if number == count:
            tell()
    return held


def client_hello():
    """Return how a TLS connection begins."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def dealers(endpoint, count, secret, frames=()):
    """ZeroMQ connections with keys of this secret, that say these messages."""
    security = handshake.ClusterSecurity.from_secret(secret)
    context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, count + 8)
    held = []
    for _ in range(count):
        dealer = context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.setsockopt(zmq.CURVE_SERVERKEY, security.server.public)
        dealer.setsockopt(zmq.CURVE_PUBLICKEY, security.client.public)
        dealer.setsockopt(zmq.CURVE_SECRETKEY, security.client.private)
        dealer.connect(endpoint)
        for each in frames:
            dealer.send_multipart(each)
        held.append(dealer)
    return held


def said(*messages):
    return [encode(message, DEFAULT_LIMITS.frame_bytes_max) for message in messages]


HELLO = Hello(version_min=WIRE_VERSION, version_max=WIRE_VERSION, identity=IDENTITY)
PUBLISH = Publish(publication=handshake.Publication.of(b"of a flood"))

FLOODS = {
    "connections that say nothing": lambda endpoint, count: tcp(endpoint, count, b""),
    "connections that are no ZeroMQ": lambda endpoint, count: tcp(endpoint, count, b"GET / HTTP/1.1\r\n\r\n" * 8),
    "half a greeting": lambda endpoint, count: tcp(endpoint, count, b"\xff" + bytes(8) + b"\x7f\x03"),
    "another secret": lambda endpoint, count: dealers(endpoint, count // 10, "another secret, as long"),
    "members that never say Hello": lambda endpoint, count: dealers(endpoint, count // 4, SECRET),
    "members that only say Hello": lambda endpoint, count: dealers(endpoint, count // 10, SECRET, said(HELLO)),
    "members that send rubbish": lambda endpoint, count: dealers(endpoint, count // 10, SECRET, [[b"rubbish"]] * 50),
}

OF_DATA = {
    "only connections": lambda endpoint, count: turning(endpoint, count, b""),
    "halves of a hello": lambda endpoint, count: turning(endpoint, count, bytes(20)),
    "hellos of TLS": lambda endpoint, count: turning(endpoint, count, client_hello()),
}
"""Floods of a data port, which never stand: there are always new connections."""


def tell():
    sys.stdout.write("flooded\n")
    sys.stdout.flush()


def chatter(endpoint):
    """One member that is ready and then sends as much as it can, until it is ended."""
    (dealer,) = dealers(endpoint, 1, SECRET, said(HELLO, PUBLISH))
    dealer.recv_multipart()
    tell()
    (ping,) = said(Ping(nonce=1))
    while True:
        dealer.send_multipart(ping)


def main(kind, endpoint, count, _secret):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if kind == "a member that never stops talking":
        chatter(endpoint)
    held = (FLOODS | OF_DATA)[kind](endpoint, int(count))
    if kind not in OF_DATA:
        time.sleep(0.2)  # ZeroMQ connects behind our back, and nothing tells of connections that are refused
        tell()
        sys.stdin.read()
    os._exit(len(held) == 0)  # closing thousands of sockets one by one is nobody's concern


if __name__ == "__main__":
    main(*sys.argv[1:])
