"""A reader with a pass that means harm: it has pulled as any other, and then opens connections of its own."""

import _ssl
import asyncio
import ctypes
import gc
import select
import ssl
import threading
import time
from contextlib import asynccontextmanager, suppress
from functools import partial

import msgspec

from kvflow.addresses import host_and_port
from kvflow.reads.tcp import wire
from kvflow.reads.tcp.certificates import TlsIdentity
from kvflow.reads.tcp.opening import Opening, introduction
from kvflow.reads.tcp.stream import ChannelClosed
from kvflow.reads.thread import create_transport
from kvflow.worker.environment import PRODUCTION

from .consuming import consuming, until

BLOCKS = [[0, 1], [2, 3]]
HARM_S = 60.0
OPENING_S = 5.0
EVERY_S = 0.001
PORTION = 64 << 10

_libssl = ctypes.CDLL(_ssl.__file__)  # whichever OpenSSL Python has
_libssl.SSL_key_update.argtypes = (ctypes.c_void_p, ctypes.c_int)
_libssl.SSL_do_handshake.argtypes = (ctypes.c_void_p,)
REQUESTED = 1
"""Source: SSL_key_update(3): the other side is to update its keys, too, and answers."""


class Tapped:
    """A transport that notes which peer it has got, and which reads it is asked for."""

    def __init__(self, *given):
        self._inner = create_transport(*given)
        self.address = None
        self.reads = []

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def add_peer(self, address):
        self.address = address
        return self._inner.add_peer(address)

    def post(self, reads, *turn):
        self.reads += reads
        return self._inner.post(reads, *turn)


def opened(address, identity):
    """Open one connection as a reader does."""
    host, port = host_and_port(address.data_endpoint)
    until = time.monotonic() + OPENING_S
    opening = Opening((host, port), introduction(address.credentials, identity), until)
    try:
        while True:
            stream = opening.advance()
            if stream is not None:
                return stream
            select.select([opening], [], [], max(0.0, min(opening.due - time.monotonic(), 0.05)))
    finally:
        opening.close()


class Harm:
    """Connections that do harm, over and over; one that is closed is opened again.

    Args:
        kind: a method of this class.
        dial: opens a connection.
        lease: that this reader may read.

    Attributes:
        done: bytes that were sent, or updates of keys; and connections that were opened.
    """

    def __init__(self, kind, dial, lease):
        self._do = getattr(self, kind)
        self._dial = dial
        self._shown = wire.encode_lease(lease.slot, lease.epoch, lease.mac)
        whole = [0, 0, 1, 0, 1, 0, 1]
        self._small = wire.encode_read(0, lease.slot, lease.epoch, [whole]) * 1000
        self._largest = wire.encode_read(0, lease.slot, lease.epoch, [whole] * wire.RUNS_MAX)
        self._heard = memoryview(bytearray(1))
        self._left = {}
        self._all_shown = set()
        self.done = {"sent": 0, "connections": 0}

    def turn(self, count):
        """Do a little on each of so many connections."""
        with suppress(ChannelClosed):  # it is not let in now
            if len(self._left) < count:
                self._left[self._dial()] = memoryview(self._shown)
                self.done["connections"] += 1
        for stream in list(self._left):
            try:
                self._do(stream)
            except ChannelClosed:
                stream.close(reset=True)
                del self._left[stream]

    def half_requests(self, stream):
        """Send the largest request but for its last byte."""
        if self._left[stream].obj is self._shown and not self._say(stream):
            self._left[stream] = memoryview(self._largest)[:-1]
        self._say(stream)
        stream.read(self._heard)  # tells if it was closed

    def answers_unread(self, stream):
        """Ask, and take no answer."""
        if not self._say(stream):
            self._left[stream] = memoryview(self._small)

    def openings(self, stream):
        """Leave at once, to open the next connection."""
        raise ChannelClosed

    def leases_shown(self, stream):
        """Show as many leases as a connection may, none of which there is."""
        if not self._say(stream) and stream not in self._all_shown:
            self._all_shown.add(stream)
            leases = [wire.encode_lease(number, number, bytes(32)) for number in range(1, wire.LEASES_MAX)]
            self._left[stream] = memoryview(b"".join(leases))
        stream.read(self._heard)

    def key_updates(self, stream):
        """Have OpenSSL ask the other side for new keys, and take no answer."""
        self._say(stream)
        for _ in range(1000):
            if not _libssl.SSL_key_update(ssl_of(stream), REQUESTED) or _libssl.SSL_do_handshake(ssl_of(stream)) != 1:
                break
            self.done["sent"] += 1

    def _say(self, stream):
        """Send what is left; return how much still is."""
        while self._left[stream]:
            count = stream.write(self._left[stream][:PORTION])
            if not count:
                break
            self.done["sent"] += count
            self._left[stream] = self._left[stream][count:]
        return len(self._left[stream])


def ssl_of(stream):
    """Return OpenSSL's object of a stream: the second member of Python's own. Source: Modules/_ssl.c of 3.11."""
    (sock,) = (each for each in vars(stream).values() if isinstance(each, ssl.SSLSocket))
    return ctypes.c_void_p.from_address(id(sock._sslobj) + object.__basicsize__ + ctypes.sizeof(ctypes.c_void_p)).value


def harm(kind, count, address, lease, begun, over):  # noqa: PLR0917
    """Do it until it is over; return what was done."""
    (identity,) = [each for each in gc.get_objects() if type(each) is TlsIdentity] or [None]
    harm = Harm(kind, partial(opened, address, identity), lease)
    harm.turn(1)
    begun.set()
    ends_s = time.monotonic() + HARM_S
    while not over.wait(EVERY_S) and time.monotonic() < ends_s:
        harm.turn(count)
    return harm.done


class Harming:
    """Harm that is being done."""

    def __init__(self, doing, over):
        self._doing, self._over = doing, over

    async def done(self):
        """Let it be over; return what was done."""
        self._over.set()
        return await self._doing


@asynccontextmanager
async def harming(kind, count, params, settings):
    """Begin: pull with a ticket, and do harm over so many connections."""
    made = []

    def make(*given):
        made.append(Tapped(*given))
        return made[0]

    environment = msgspec.structs.replace(PRODUCTION, open_transport=make)
    # Of two ranks that read the ticket, one never does: the lease goes on.
    settings = {"engine_id": "harm", "num_ranks": 2, **settings}
    async with consuming(environment=environment, **settings) as consumer:
        await consumer.pull(params, BLOCKS)
        lease, begun, over = made[0].reads[0].lease, threading.Event(), threading.Event()
        doing = asyncio.create_task(asyncio.to_thread(harm, kind, count, made[0].address, lease, begun, over))
        await until(lambda: begun.is_set() or doing.done())
        harm_done = Harming(doing, over)
        yield harm_done
        await harm_done.done()
