"""The one thread of a transport: it alone touches the owner and the mover."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transport.base import PeerAddress, Program, Read, Sink, StagingUse
from kvflow.transport.mover import MoverFactory
from kvflow.transport.owner import CancelReads, Command, Owner, RemovePeer, RenewReader
from kvflow.transport.staging import StagingMemory

_logger = logging.getLogger(__name__)

PAUSE_S_MIN = 20e-6
PAUSE_S_MAX = 1e-3
"""Between two polls; doubled while nothing happens. A small TCP read takes 25 to 70 us, and polling without
pause takes the core that the bytes need. A command ends the pause at once."""

HANGS_S = 10.0
"""After this long without a word, ``close`` says what it waits for."""

CLOSE_GRACE_S = 2.0
"""How long ``close`` lets what is in flight end by itself before it destroys the agents."""


class ThreadedTransport:
    """A ``Transport`` out of a mover. See ``transport/base.py`` for the contract.

    Args:
        name: of the kind of transport.
        open_mover: called on the owner thread, as is all of the mover.
        sink: called on the owner thread.
        staging: buffers for staged programs.
    """

    def __init__(self, name: str, open_mover: MoverFactory, sink: Sink, staging: StagingMemory) -> None:
        self._name = name
        self._staging = staging
        self._open_mover = open_mover
        self._sink = sink
        self._commands: deque[Command | None] = deque()
        self._wake = threading.Lock()  # held while there is nothing to look at
        self._wake.acquire()
        self._metadata: Future[bytes] = Future()
        self._lock = threading.Lock()
        self._closed = False
        self._threads: list[threading.Thread] = []  # one after start

    @property
    def name(self) -> str:
        """``nixl`` or ``loopback``."""
        return self._name

    def start(self, regions: Sequence[Region], epochs: Region) -> None:
        """See ``Transport.start``. A transport starts once, also if that failed."""
        with self._lock:
            assert not self._threads, "a transport starts once"
            assert not self._closed, "a closed transport does not start"
            # A daemon: a foreign library that hangs must not keep the process from ending.
            memory = (tuple(regions), epochs)
            thread = threading.Thread(target=self._run, args=memory, name=f"kvflow-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._metadata.result()

    def staging(self) -> StagingUse:
        """See ``Transport.staging``."""
        return self._staging.use

    def metadata(self) -> bytes:
        """See ``Transport.metadata``."""
        assert self._metadata.done(), "start comes first"
        return self._metadata.result()

    def add_peer(self, address: PeerAddress) -> None:
        """See ``Transport.add_peer``."""
        self._command(address)

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """See ``Transport.remove_peer``."""
        self._command(RemovePeer(peer, gone))

    def prepare(self, program: Program) -> None:
        """See ``Transport.prepare``."""
        self._command(program)

    def post(self, read: Read) -> None:
        """See ``Transport.post``."""
        self._command(read)

    def cancel(self, read_ids: Sequence[int]) -> None:
        """See ``Transport.cancel``."""
        self._command(CancelReads(tuple(read_ids)))

    def renew_reader(self) -> None:
        """See ``Transport.renew_reader``."""
        self._command(RenewReader())

    def close(self) -> None:
        """See ``Transport.close``. Blocks for about two seconds at most, unless a call into the library hangs.

        Then it says so again and again: the memory must not be freed before that call has returned.
        """
        with self._lock:
            if not self._closed:
                self._closed = True
                self._put(None)
        for thread in self._threads:
            thread.join(HANGS_S)
            while thread.is_alive():
                _logger.error("kvflow.transport: closing waits for a call into %s that does not return", self._name)
                thread.join(HANGS_S)

    def _command(self, command: Command) -> None:
        # The lock orders commands and the end of commands: what is queued is served.
        with self._lock:
            if not self._closed:
                self._put(command)

    def _put(self, command: Command | None) -> None:
        self._commands.append(command)
        with suppress(RuntimeError):  # released already: the thread has not looked since the last command
            self._wake.release()

    def _run(self, regions: Sequence[Region], epochs: Region) -> None:
        try:
            mover = self._open_mover(regions, epochs)
        except BaseException as error:  # noqa: BLE001 - start raises it, in the caller's thread
            self._metadata.set_exception(error)
            return
        owner = Owner(mover, regions, self._sink, time.monotonic, self._staging)
        self._metadata.set_result(mover.metadata)
        self._serve(owner)
        owner.begin_close()
        self._drain(owner, time.monotonic() + CLOSE_GRACE_S)
        owner.end_close()

    def _serve(self, owner: Owner) -> None:
        """Step and take commands in turn until told to close."""
        pause_s = PAUSE_S_MIN
        while True:
            if owner.step():
                pause_s = 0.0
            elif owner.in_flight:
                pause_s = min(max(PAUSE_S_MIN, pause_s * 2), PAUSE_S_MAX)
            else:
                pause_s = -1.0
            for command in self._take(pause_s):
                if command is None:
                    return
                owner.handle(command)

    def _drain(self, owner: Owner, deadline: float) -> None:
        while owner.in_flight and time.monotonic() < deadline:
            if not owner.step():
                time.sleep(PAUSE_S_MAX)

    def _take(self, pause_s: float) -> list[Command | None]:
        """Take all commands that are there; wait for the first, for ever if the pause is negative."""
        # A bare lock, because an Event takes three times as long to wake. Not SimpleQueue.get(timeout=...): preempted
        # between two of its instructions, CPython 3.11 takes the rest of a short timeout, below zero, for no timeout.
        if pause_s:
            self._wake.acquire(timeout=pause_s if pause_s > 0 else -1)
        else:
            self._wake.acquire(blocking=False)
        return [self._commands.popleft() for _ in range(len(self._commands))]
