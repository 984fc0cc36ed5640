"""A channel from the scheduler's side to its ranks, so that they hold a lease as soon as its ticket is signed.

The command to hold a lease also arrives with the next step of the engine, which may be late or never happen. So the
scheduler's side calls a rank in its own process directly, and sends to a rank in another process of the same host over
a socket. A rank on another host waits for the step.

The socket is in a folder that only this user can enter. A message is a MAC, the number of the last step that wrote into
the blocks, and the text of a ticket. Only the rank and its own scheduler know the key of the MAC: the rank generates it
and sends it inside the engine.
"""

import hmac
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

import msgspec
import zmq
from msgspec import Struct

from kvflow import Grant, Ticket
from kvflow.errors import TicketInvalid
from kvflow.integrations.vllm.settings import logger

MAC_BYTES = 32
MESSAGE_BYTES_MAX = (12 << 20) + MAC_BYTES
"""Largest message. No consumer reads a ticket of more than 8 MiB, and block ids take less in a message."""
QUEUE_MAX = 128
"""Messages in the queue on either side of a socket. Further messages are dropped: the command of the step follows."""


class _TicketNotice(Struct, frozen=True, array_like=True):
    """A message after its MAC, with the text of the ticket."""

    step: int
    ticket: str


_early = msgspec.msgpack.Decoder(_TicketNotice)


class Admits(Protocol):
    """A rank that can hold leases early."""

    def admit_early(self, grant: Grant, step: int) -> None:
        """Hold the lease of a grant before its command arrives, if that step has written into its blocks."""
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
        self._folder = Path(tempfile.mkdtemp(prefix="kvflow-"))  # no other user can enter it
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
        """Stop receiving and remove the socket; do nothing in a forked child."""
        if os.getpid() != self._pid or sys.is_finalizing():  # the thread does not run there
            return
        self._context.term()  # waits until the thread has closed the socket
        self._thread.join()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self, socket: "zmq.Socket[bytes]") -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                message = socket.recv()
                try:
                    self.take(message)
                except Exception:  # the command of the step repeats a lost message
                    logger.exception("kvflow: a message to hold a lease failed")

    def take(self, message: bytes) -> None:
        """Hold the lease of a message; drop a message that the engine's own scheduler has not signed."""
        if not hmac.compare_digest(message[:MAC_BYTES], _mac(self._key, message[MAC_BYTES:])):
            if not self._told:
                self._told = True
                logger.warning("kvflow: dropped a message to hold a lease, because its signature is wrong")
            return
        try:
            early = _early.decode(message[MAC_BYTES:])
            ticket = Ticket.from_params({"kvflow": early.ticket})
        except (msgspec.DecodeError, TicketInvalid) as error:
            logger.warning("kvflow: dropped a message to hold a lease: %s", error)
            return
        self._rank.admit_early(ticket.grants[0], early.step)


class EarlyAdmission:
    """The sending end of the channel. Thread: the scheduler's."""

    def __init__(self) -> None:
        self._near: list[str] = []
        self._far: list[tuple[bytes, zmq.Socket[bytes]]] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Connect to the ranks; their contacts replace earlier ones."""
        self.close()
        for contact in contacts:
            if contact.name in _ranks:
                self._near.append(contact.name)
            elif contact.endpoint and Path(contact.endpoint.removeprefix("ipc://")).exists():
                self._far.append((contact.key, self._connect(contact.endpoint)))
            else:
                logger.info("kvflow: a rank on another host, or without a socket, holds each lease a step later")

    def admit(self, ticket: Ticket, step: int) -> None:
        """Ask every reachable rank to hold the lease of a new ticket; ``step`` was the last to write into its blocks.

        Does not wait. A rank that has ended, or whose queue is full, raises nothing: the command of the step follows.
        """
        for name in self._near:
            rank = _ranks.get(name)
            if rank is not None:
                rank.admit_early(ticket.grants[0], step)
        early = _TicketNotice(step, ticket.to_params()["kvflow"]) if self._far else None
        text = msgspec.msgpack.encode(early)
        for key, socket in self._far:
            with suppress(zmq.Again):
                socket.send(_mac(key, text) + text, zmq.NOBLOCK)

    def close(self) -> None:
        """Close the channels to all ranks."""
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
        self._near.clear()
        self._far.clear()

    def _connect(self, endpoint: str) -> "zmq.Socket[bytes]":
        self._context = self._context or zmq.Context()
        socket = self._context.socket(zmq.PUSH)
        socket.set(zmq.IMMEDIATE, 1)  # queues nothing for a rank that has ended
        socket.set(zmq.SNDHWM, QUEUE_MAX)
        socket.connect(endpoint)
        return socket


def _mac(key: bytes, text: bytes) -> bytes:
    return hmac.digest(key, text, "sha256")
