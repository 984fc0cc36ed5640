"""A way of its own from the scheduler to its ranks: a lease is held as soon as its ticket is signed.

The order to hold a lease also travels with the engine's next step. That step may come late, or never, and a client may
read before it. So the scheduler's side tells each rank at once, and the order of the step does what has not been done.
A rank in the same process is called. Another process of this host is told over a socket. A rank on another host waits
for the step.

The socket lies in a folder that only this user can enter. A message is the text of a ticket behind its MAC. The key of
the MAC is known to the rank and to its own scheduler: the rank draws it, and tells it inside the engine.
"""

import hmac
import logging
import os
import secrets
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol
from weakref import WeakValueDictionary

import zmq
from msgspec import Struct

from kvflow import Grant, Ticket
from kvflow.errors import TicketInvalid

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

MAC_BYTES = 32
MESSAGE_BYTES_MAX = (8 << 20) + MAC_BYTES
"""No reader looks at a ticket of more than 8 MiB."""
QUEUE_MAX = 128
"""Messages that wait on either side of a socket. What finds no room waits for the step."""


class Admits(Protocol):
    """A rank, as far as it is told of leases."""

    def admit_early(self, grant: Grant) -> None:
        """Hold the lease of a grant, before the step that orders it."""
        ...


class Contact(Struct, frozen=True):
    """How the scheduler of an engine reaches one rank. Secret: it travels inside the engine only.

    Attributes:
        name: of the rank in its process.
        endpoint: ``ipc://`` and a path of this host; empty if the rank has none.
        key: 32 bytes, under which messages to the rank are signed.
    """

    name: str
    endpoint: str
    key: bytes

    def __repr__(self) -> str:
        return f"Contact({self.name!r}, {self.endpoint!r})"


_ranks: "WeakValueDictionary[str, Admits]" = WeakValueDictionary()
"""The ranks of this process, by the name of their contact."""


@contextmanager
def reachable(rank: Admits, *, apart: bool) -> Iterator[Contact]:
    """Let the scheduler reach a rank meanwhile.

    Args:
        rank: what it reaches.
        apart: whether the scheduler may be in another process.

    Yields:
        How: for the scheduler alone.
    """
    name, key = secrets.token_hex(16), secrets.token_bytes(32)
    listener = _listen(rank, key) if apart else None
    _ranks[name] = rank
    try:
        yield Contact(name, listener.endpoint if listener else "", key)
    finally:
        _ranks.pop(name, None)
        if listener is not None:
            listener.close()


def _listen(rank: Admits, key: bytes) -> "Listener | None":
    try:
        return Listener(rank, key)
    except (OSError, zmq.ZMQError) as error:
        logger.warning("kvflow: leases are held a step later than they could be: no socket for admissions: %s", error)
        return None


class Listener:
    """A thread that takes grants for one rank from a socket.

    Attributes:
        endpoint: of the socket.

    Raises:
        OSError, zmq.ZMQError: there is no folder for the socket, or its path is too long.
    """

    def __init__(self, rank: Admits, key: bytes) -> None:
        self._pid = os.getpid()
        self._rank = rank
        self._key = key
        self._told = False
        self._folder = Path(tempfile.mkdtemp(prefix="kvflow-"))  # that no other user can enter
        self.endpoint = f"ipc://{self._folder}/admissions"
        self._context = zmq.Context()
        try:
            socket = self._context.socket(zmq.PULL)
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
        """Take nothing further, and remove the socket; in a forked child do nothing."""
        if os.getpid() != self._pid or sys.is_finalizing():  # then the thread does not run
            return
        self._context.term()  # it waits until the thread has closed the socket
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                message = socket.recv()
                try:
                    self.take(message)
                except Exception:  # any exception costs this message: the order of the step does what it has not done
                    logger.exception("kvflow: a message to hold a lease was not carried out")

    def take(self, message: bytes) -> None:
        """Hold the lease of a message; one that our scheduler has not signed is dropped."""
        if not hmac.compare_digest(message[:MAC_BYTES], _mac(self._key, message[MAC_BYTES:])):
            if not self._told:
                self._told = True
                logger.warning("kvflow: dropped a message to hold a lease that our scheduler has not signed")
            return
        try:
            ticket = Ticket.from_params({"kvflow": message[MAC_BYTES:].decode("ascii")})
        except (UnicodeDecodeError, TicketInvalid) as error:
            logger.warning("kvflow: dropped a message to hold a lease: %s", error)
            return
        self._rank.admit_early(ticket.grants[0])


class EarlyAdmission:
    """The scheduler's side: tells the ranks to hold a lease. Thread: the scheduler's."""

    def __init__(self) -> None:
        self._near: list[str] = []
        self._far: list[tuple[bytes, zmq.Socket[bytes]]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Take how the ranks are reached, in place of what was known before."""
        self.close()
        for contact in contacts:
            if contact.name in _ranks:
                self._near.append(contact.name)
            elif contact.endpoint and Path(contact.endpoint.removeprefix("ipc://")).exists():
                self._far.append((contact.key, self._connect(contact.endpoint)))
            else:
                logger.info(
                    "kvflow: a rank on another host, or without a socket, holds leases with the engine's next step"
                )

    def admit(self, ticket: Ticket) -> None:
        """Have every rank that can be reached hold the lease of a ticket of a mint's; wait for none.

        Raises nothing for a rank that has ended, or whose queue is full: the order of the step is for them.
        """
        for name in self._near:
            rank = _ranks.get(name)
            if rank is not None:
                rank.admit_early(ticket.grants[0])
        text = ticket.to_params()["kvflow"].encode("ascii") if self._far else b""
        for key, socket in self._far:
            with suppress(zmq.Again):
                socket.send(_mac(key, text) + text, zmq.NOBLOCK)

    def close(self) -> None:
        """Reach no rank from here on; do nothing the second time."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._near.clear()
        self._far.clear()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.IMMEDIATE, 1)  # nothing is kept for a rank that has ended
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.connect(endpoint)
        return socket


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
