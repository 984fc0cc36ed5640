"""The thread of a transport, and the lock of its owner.

One lock guards the owner and the movers. The owner thread holds it while it takes commands and steps, not while it
pauses. ``post`` moves small reads under it at once, on the calling thread, if the lock is free and there is nothing
else to do: a hand-over to another thread and back takes longer than such a read. It never waits for the lock.
"""

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transfer.requests import RankRead, ReadEnded
from kvflow.transport.base import INLINE_S_MAX, PeerAddress, Program, Published, Sink, StagingUse
from kvflow.transport.commands import CancelReads, Command, PostReads, RemovePeer, ResetReader
from kvflow.transport.mover import MoverFactory
from kvflow.transport.owner import Owner
from kvflow.transport.planes import open_planes
from kvflow.transport.serving import SERVES_NOTHING, Serving
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


LOOK_S = 1.0
"""What is in flight over sockets has deadlines: how often they are looked at while nothing happens."""


class Bell:
    """What ends a pause of the owner thread: a command, or news on a mover's descriptor."""

    def __init__(self) -> None:
        # A bare lock, because an Event takes three times as long to wake. Not SimpleQueue.get(timeout=...): preempted
        # between two of its instructions, CPython 3.11 takes the rest of a short timeout, below zero, for no timeout.
        self._silent = threading.Lock()  # held while nobody has rung since the last pause
        self._silent.acquire()
        self._waiting = False  # on the descriptors
        self._event = -1
        self._epoll: select.epoll | None = None

    def ring(self) -> None:
        """End the pause, or the next one if there is none now. Thread: any."""
        with suppress(RuntimeError):  # rung already
            self._silent.release()
        if self._waiting:
            with suppress(OSError):  # closed meanwhile
                os.eventfd_write(self._event, 1)

    def watch(self, descriptor: int) -> None:
        """Let pauses end when a descriptor is readable, too; -1: there is none."""
        if descriptor >= 0:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            for each in (self._event, descriptor):
                self._epoll.register(each, select.EPOLLIN)

    def wait(self, pause_s: float) -> None:
        """Pause for some seconds, or for ever if they are negative. A pause below ``LOOK_S`` minds no descriptor."""
        if self._epoll is None or 0 <= pause_s < LOOK_S:
            self._silent.acquire(blocking=pause_s != 0, timeout=pause_s if pause_s > 0 else -1)
            return
        self._waiting = True  # first: who rings from here on writes to the event
        if not self._silent.acquire(blocking=False):
            ready = self._epoll.poll(pause_s)
            self._silent.acquire(blocking=False)
            if any(descriptor == self._event for descriptor, _ in ready):
                os.eventfd_read(self._event)
        self._waiting = False

    def close(self) -> None:
        """Close what ``watch`` has opened. Nobody waits then."""
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._event)
            self._epoll = None


class ThreadedTransport:
    """A ``Transport`` out of movers. See ``transport/base.py`` for the contract.

    Args:
        name: of the choice of planes.
        factories: name of each data plane -> what opens its mover, the preferred one first. Called on the owner thread,
            as is all of the movers.
        sink: called on the owner thread.
        staging: buffers for staged programs.
        required: planes without which the transport does not start. Of all planes one has to start.
        inline_s_max: how long a post may take on the calling thread, in seconds; 0: none is made there. A test that
            holds a copy until the calling thread goes on needs 0.
    """

    def __init__(
        self,
        name: str,
        factories: Mapping[str, MoverFactory],
        sink: Sink,
        staging: StagingMemory,
        *,
        required: frozenset[str] = frozenset(),
        inline_s_max: float = INLINE_S_MAX,
    ) -> None:
        self._name = name
        self._staging = staging
        self._open_planes = partial(open_planes, dict(factories), required)
        self._sink = sink
        self._commands: deque[Command | None] = deque()
        self._bell = Bell()
        self._published: Future[Published] = Future()
        self._lock = threading.Lock()
        self._closed = False
        self._inline_s_max = inline_s_max
        self._guard = threading.Lock()  # of the owner
        self._owner: Owner | None = None
        self._threads: list[threading.Thread] = []  # one after start

    @property
    def name(self) -> str:
        """See ``Transport.name``."""
        return self._name

    def start(self, regions: Sequence[Region], epochs: Region, serving: Serving = SERVES_NOTHING) -> None:
        """See ``Transport.start``. A transport starts once, also if that failed."""
        with self._lock:
            assert not self._threads, "a transport starts once"
            assert not self._closed, "a closed transport does not start"
            # A daemon: a foreign library that hangs must not keep the process from ending.
            given = (tuple(regions), epochs, serving)
            thread = threading.Thread(target=self._run, args=given, name=f"kvflow-{self._name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._published.result()

    def staging(self) -> StagingUse:
        """See ``Transport.staging``."""
        return self._staging.use

    def published(self) -> Published:
        """See ``Transport.published``."""
        assert self._published.done(), "start comes first"
        return self._published.result()

    def add_peer(self, address: PeerAddress) -> None:
        """See ``Transport.add_peer``."""
        self._command(address)

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """See ``Transport.remove_peer``."""
        self._command(RemovePeer(peer, gone))

    def prepare(self, program: Program) -> None:
        """See ``Transport.prepare``."""
        self._command(program)

    def post(self, reads: Sequence[RankRead]) -> list[ReadEnded]:
        """See ``Transport.post``."""
        if self._inline_s_max and self._guard.acquire(blocking=False):
            try:
                # What is queued was commanded before, and is taken under the guard: nothing is in between.
                owner = None if self._commands or self._closed else self._owner
                answers = None if owner is None else owner.post_inline(reads, self._inline_s_max)
                if answers is not None:
                    if len(answers) < len(reads):
                        self._bell.ring()  # the owner thread sees to the rest
                    return answers
            finally:
                self._guard.release()
        self._command(PostReads(tuple(reads)))
        return []

    def cancel(self, read_ids: Sequence[int]) -> None:
        """See ``Transport.cancel``."""
        self._command(CancelReads(tuple(read_ids)))

    def reset_reader(self) -> None:
        """See ``Transport.reset_reader``."""
        self._command(ResetReader())

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
        self._bell.ring()

    def _run(self, regions: Sequence[Region], epochs: Region, serving: Serving) -> None:
        try:
            mover = self._open_planes(regions=regions, epochs=epochs, serving=serving)
        except BaseException as error:  # noqa: BLE001 - start raises it, in the caller's thread
            self._published.set_exception(error)
            return
        owner = Owner(mover, regions, self._sink, time.monotonic, self._staging)
        self._owner = owner
        self._bell.watch(mover.fileno())
        self._published.set_result(mover.published)
        self._serve(owner)
        with self._guard:
            self._owner = None
            owner.begin_close()
        self._drain(owner, time.monotonic() + CLOSE_GRACE_S)
        self._bell.close()
        owner.end_close()

    def _serve(self, owner: Owner) -> None:
        """Take commands and step in turn until told to close."""
        pause_s = 0.0
        while True:
            self._bell.wait(pause_s)
            with self._guard:
                for command in self._take():
                    if command is None:
                        return
                    owner.handle(command)
                if owner.step():
                    pause_s = 0.0
                elif owner.must_poll:
                    pause_s = min(max(PAUSE_S_MIN, pause_s * 2), PAUSE_S_MAX)
                else:
                    pause_s = LOOK_S if owner.in_flight else -1.0

    def _drain(self, owner: Owner, deadline: float) -> None:
        while owner.in_flight and time.monotonic() < deadline:
            if not owner.step():
                time.sleep(PAUSE_S_MAX)

    def _take(self) -> list[Command | None]:
        """Take all commands that are there."""
        return [self._commands.popleft() for _ in range(len(self._commands))]
