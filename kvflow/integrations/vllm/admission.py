"""A channel from the scheduler's side to its ranks, so that they hold a lease as soon as its ticket is signed.

A reset takes the same way, and waits for the answers of the ranks.

All commands for leases also arrive with the next step of the engine, which may be late or never happen. So the
scheduler's side calls a rank in its own process directly, and sends to a rank in another process of the same host over
a socket. A rank on another host waits for the step.

The socket is in a folder that only this user can enter. A message is a MAC and a command; the answer to a reset is the
MAC of its MAC. Only the rank and its own scheduler know the key of the MAC: the rank generates it
and sends it inside the engine.
"""

import errno
import hmac
import os
import secrets
import shutil
import socket as sockets
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec
import zmq
from msgspec import Struct

from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Ordered, Reset

MAC_BYTES = 32
MESSAGE_BYTES_MAX = (12 << 20) + MAC_BYTES
"""Largest message. No consumer reads a ticket of more than 8 MiB, and block ids take less in a message."""
QUEUE_MAX = 128
"""Messages in the queue on either side of a socket. Further messages are dropped: the command of the step follows."""


RESET_WAIT_S = 10.0  # longest time to wait for the answers to a reset: twice that of one rank


_commands = msgspec.msgpack.Decoder(Ordered | Reset)


class Admits(Protocol):
    """A rank that takes commands before their step."""

    def take(self, commands: Sequence[Ordered]) -> None:
        """Execute commands for leases, in order, when their steps have written. Those that have come are skipped."""
        ...

    def reset(self, request_ids: Sequence[str]) -> bool:
        """End the leases and pulls of requests; return whether nothing reads or writes their blocks."""
        ...


class Contact(Struct, frozen=True):
    """How the scheduler's side reaches one rank. It is secret and stays inside the engine."""

    name: str  # of the rank in its process
    endpoint: str  # ``ipc://`` and a path on this host; empty if the rank has no socket
    key: bytes  # of the MAC of messages to the rank: 32 bytes

    def __repr__(self) -> str:
        return f"Contact({self.name!r}, {self.endpoint!r})"


_ranks: "WeakValueDictionary[str, Admits]" = WeakValueDictionary()
"""Ranks in this process, by the name of their contact."""


@contextmanager
def reachable(rank: Admits, *, apart: bool) -> Iterator[Contact]:
    """Yield the contact of a rank while the context is open. ``apart``: the scheduler's side may be another process."""
    name, key = secrets.token_hex(16), secrets.token_bytes(32)
    listener = _listen(rank, key) if apart else None
    _ranks[name] = rank
    try:
        yield Contact(name, listener.endpoint if listener else "", key)
    finally:
        _ranks.pop(name, None)
        if listener is not None:
            listener.close()


def _listen(rank: Admits, key: bytes) -> "GrantReceiver | None":
    try:
        return GrantReceiver(rank, key)
    except (OSError, zmq.ZMQError) as error:
        logger.warning("kvflow: the rank holds each lease a step later, because its socket cannot be opened: %s", error)
        return None


def _remove_leftovers() -> None:
    """Remove the sockets of ranks that were killed: those to which nobody listens after a minute."""
    for path in Path(tempfile.gettempdir()).glob("kvflow-*/admissions"):
        with suppress(OSError), sockets.socket(sockets.AF_UNIX) as probe:
            probe.setblocking(False)
            old = time.time() - path.stat().st_mtime > 60.0
            if old and probe.connect_ex(str(path)) == errno.ECONNREFUSED:
                shutil.rmtree(path.parent, ignore_errors=True)


class GrantReceiver:
    """A thread that receives grants for one rank over a socket.

    Raises:
        OSError, zmq.ZMQError: the folder of the socket cannot be made, or its path is too long.
    """

    def __init__(self, rank: Admits, key: bytes) -> None:
        self._pid = os.getpid()
        self._rank = rank
        self._key = key
        self._told = False
        _remove_leftovers()
        self._folder = Path(tempfile.mkdtemp(prefix="kvflow-"))  # no other user can enter it
        self.endpoint = f"ipc://{self._folder}/admissions"
        self._context = zmq.Context()
        try:
            socket = self._context.socket(zmq.ROUTER)
            socket.set(zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX)
            socket.set(zmq.RCVHWM, QUEUE_MAX)
            socket.bind(self.endpoint)
        except BaseException:
            self._context.destroy(linger=0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        self._thread = threading.Thread(target=self._run, args=(socket,), name="kvflow-admissions", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop receiving and remove the socket; do nothing in a forked child."""
        if os.getpid() != self._pid or sys.is_finalizing():  # the thread does not run there
            return
        self._context.term()  # waits until the thread has closed the socket
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                sender, *messages = socket.recv_multipart()
                for message in messages:
                    try:
                        answer = self.take(message)
                    except Exception:  # the command of the step repeats a lost message
                        logger.exception("kvflow: a message to hold a lease failed")
                    else:
                        if answer is not None:
                            socket.send_multipart([sender, answer])

    def take(self, message: bytes) -> bytes | None:
        """Obey a message and return the answer to a reset; drop what the engine's own scheduler has not signed."""
        if not hmac.compare_digest(message[:MAC_BYTES], _mac(self._key, message[MAC_BYTES:])):
            if not self._told:
                self._told = True
                logger.warning("kvflow: dropped a message to hold a lease, because its signature is wrong")
            return None
        try:
            command = _commands.decode(message[MAC_BYTES:])
            if isinstance(command, Reset):
                return _mac(self._key, message[:MAC_BYTES]) if self._rank.reset(command.void) else b""
        except msgspec.DecodeError as error:
            logger.warning("kvflow: dropped a message to hold a lease: %s", error)
            return None
        self._rank.take((command,))
        return None


class EarlyAdmission:
    """The sending end of the channel. Thread: any."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a socket may be used by one thread at a time
        self._near: list[str] = []
        self._far: list[tuple[bytes, zmq.Socket[bytes]]] = []
        self._reaches_all = False
        self._resets = 0
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Connect to the ranks; their contacts replace earlier ones."""
        with self._lock:
            self.close()
            self._reaches_all = True
            for contact in contacts:
                if contact.name in _ranks:
                    self._near.append(contact.name)
                elif contact.endpoint and Path(contact.endpoint.removeprefix("ipc://")).exists():
                    self._far.append((contact.key, self._connect(contact.endpoint)))
                else:
                    self._reaches_all = False
                    logger.info("kvflow: a rank on another host, or without a socket, holds each lease a step later")

    def send(self, command: Ordered) -> None:
        """Give every reachable rank a command.

        Does not wait. A rank that has ended, or whose queue is full, raises nothing: the command of the step follows.
        """
        for name in tuple(self._near):
            rank = _ranks.get(name)
            if rank is not None:
                rank.take((command,))
        if not self._far:
            return
        text = msgspec.msgpack.encode(command)
        with self._lock:
            for key, socket in self._far:
                with suppress(zmq.Again):
                    socket.send(_mac(key, text) + text, zmq.NOBLOCK)

    def reset(self, request_ids: Sequence[str]) -> bool:
        """Have every rank end the leases and pulls of requests; wait, and return whether all have done so."""
        deadline = time.monotonic() + RESET_WAIT_S
        with self._lock:
            self._resets += 1
            text = msgspec.msgpack.encode(Reset(tuple(request_ids), self._resets))
            for key, socket in self._far:
                if socket.poll(_left_ms(deadline), zmq.POLLOUT):  # a connection may take a moment
                    socket.send(_mac(key, text) + text, zmq.NOBLOCK)
            near = [rank.reset(request_ids) for name in self._near if (rank := _ranks.get(name)) is not None]
            far = [_answered(socket, _mac(key, _mac(key, text)), deadline) for key, socket in self._far]
            return self._reaches_all and len(near) == len(self._near) and all([*near, *far])

    def close(self) -> None:
        """Close the channels to all ranks."""
        with self._lock:
            if self._context is not None:
                self._context.destroy(linger=0)
                self._context = None
            self._near.clear()
            self._far.clear()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.IMMEDIATE, 1)  # queues nothing for a rank that has ended
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.connect(endpoint)
        return socket


def _answered(socket: "zmq.Socket[bytes]", expected: bytes, deadline: float) -> bool:
    """Wait for the answer of a rank to a reset; return whether it is as expected."""
    while socket.poll(_left_ms(deadline)):
        if (answer := socket.recv()) in (expected, b""):  # another one is late, of an earlier reset
            return answer == expected
    return False


def _left_ms(deadline: float) -> int:
    return max(0, int((deadline - time.monotonic()) * 1e3))


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
