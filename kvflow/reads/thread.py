"""The read thread of a transport, and the lock of its core.

One lock guards the core and the backends. The read thread holds it while it takes commands and steps, but not while it
pauses. If the lock is free and there is nothing else to do, ``post`` takes it and moves small reads at once, on the
calling thread, because switching threads takes longer than such a read. ``post`` never waits for the lock.
"""

import logging
import os
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from kvflow.config import WorkerConfig
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendFactory
from kvflow.reads.contract import (
    SERVES_NOTHING,
    TURN_S_MAX,
    CancelReads,
    PeerAddress,
    PreparedList,
    Published,
    RankRead,
    ReadEnded,
    Serving,
    Sink,
    StagingUse,
    Transport,
)
from kvflow.reads.core import PostReads, ReadCommand, ReadCore, RemovePeer, ResetReader
from kvflow.reads.loopback import LoopbackBackend
from kvflow.reads.nixl.backend import Uses, nixl_factory
from kvflow.reads.planes import open_planes
from kvflow.reads.staging import StagingMemory
from kvflow.reads.tcp.backend import TcpBackend

_logger = logging.getLogger(__name__)

PAUSE_S_MIN = 20e-6
PAUSE_S_MAX = 1e-3
"""The pause between two polls. It doubles while nothing happens. A small TCP read takes 25 to 70 us, and polling
without a pause takes the CPU that moves the bytes. A command ends the pause at once."""

HANGS_S = 10.0  # after which ``close`` logs what it waits for
CLOSE_GRACE_S = 2.0  # in which work in flight may end before ``close`` destroys the agents
IDLE_PROGRESS_S = 1.0  # between two checks of the deadlines of work over sockets


class Bell:
    """Ends a pause of the read thread, on a command or when a backend's descriptor is readable."""

    def __init__(self) -> None:
        # A bare lock, because an Event takes three times as long to wake. Not SimpleQueue.get(timeout=...): preempted
        # between two of its instructions, CPython 3.11 takes the rest of a short timeout, below zero, for no timeout.
        self._silent = threading.Lock()  # held until the next ring
        self._silent.acquire()
        self._waiting = False  # whether ``wait`` polls the descriptors
        self._event = -1
        self._epoll: select.epoll | None = None

    def ring(self) -> None:
        """End the current pause, or the next one. Thread: any."""
        with suppress(RuntimeError):  # rung before
            self._silent.release()
        if self._waiting:
            os.eventfd_write(self._event, 1)

    def watch(self, descriptor: int) -> None:
        """End pauses also when a descriptor is readable; -1: there is none."""
        if descriptor >= 0:
            self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._epoll = select.epoll()
            for each in (self._event, descriptor):
                self._epoll.register(each, select.EPOLLIN)

    @property
    def watches(self) -> bool:
        """Whether a descriptor ends pauses, too."""
        return self._epoll is not None

    def wait(self, pause_s: float) -> None:
        """Pause for ``pause_s`` seconds, or until the next ring if that is negative.

        A pause below ``IDLE_PROGRESS_S`` ignores the descriptor.
        """
        if self._epoll is None or 0 <= pause_s < IDLE_PROGRESS_S:
            self._silent.acquire(blocking=pause_s != 0, timeout=pause_s if pause_s > 0 else -1)
            return
        self._waiting = True  # first: every ring from here on writes to the event
        if not self._silent.acquire(blocking=False):
            ready = self._epoll.poll(pause_s)
            self._silent.acquire(blocking=False)
            if any(descriptor == self._event for descriptor, _ in ready):
                os.eventfd_read(self._event)
        self._waiting = False

    def close(self) -> None:
        """Close what ``watch`` opened. No thread may wait or ring then."""
        if self._epoll is not None:
            self._epoll.close()
            os.close(self._event)
            self._epoll = None


class ThreadedTransport:
    """A ``Transport`` of several backends.

    Args:
        name: name of the setting.
        factories: name of each data plane -> the function that opens its backend, the preferred one first. The
            factories and the backends are called on the read thread only.
        sink: called on the read thread.
        staging: buffers for staged lists.
        required: planes that must start. At least one of all planes must start.
        inline_s_max: most seconds that a post may take on the calling thread, whatever its caller says; 0: no post is
            made there.
    """

    def __init__(
        self,
        name: str,
        factories: Mapping[str, BackendFactory],
        sink: Sink,
        staging: StagingMemory,
        *,
        required: frozenset[str] = frozenset(),
        inline_s_max: float | None = None,
    ) -> None:
        self._name = name
        self._staging = staging
        self._open_planes = partial(open_planes, dict(factories), required)
        self._sink = sink
        self._commands: deque[ReadCommand | None] = deque()
        self._bell = Bell()
        self._published: Future[Published] = Future()
        self._lock = threading.Lock()
        self._closed = False
        self._inline_s_max = inline_s_max
        self._guard = threading.Lock()  # of the core
        self._core: ReadCore | None = None
        self._threads: list[threading.Thread] = []  # one after start

    @property
    def name(self) -> str:
        """The setting for data planes. Thread: any."""
        return self._name

    def start(self, regions: Sequence[Region], epochs: Region, serving: Serving = SERVES_NOTHING) -> None:
        """Open the planes on the read thread, and wait until they are open. Once only.

        Raises:
            TransportUnavailable: no data plane, or not a required one, can start.
        """
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
        """Return how many staging buffers are taken. Thread: any."""
        return self._staging.use

    def published(self) -> Published:
        """Return what a peer needs to read from us. Thread: any, after ``start``."""
        assert self._published.done(), "start comes first"
        return self._published.result()

    def add_peer(self, address: PeerAddress) -> None:
        """Connect to a peer's exporter, on the read thread; the sink gets the result. Thread: any."""
        self._command(address)

    def remove_peer(self, peer: PeerId, *, gone: bool = False) -> None:
        """Forget a peer, on the read thread. Thread: any."""
        self._command(RemovePeer(peer, gone))

    def prepare(self, prepared_list: PreparedList) -> None:
        """Prepare descriptor lists, on the read thread. Thread: any."""
        self._command(prepared_list)

    def post(self, reads: Sequence[RankRead], within_s: float = TURN_S_MAX / 2) -> list[ReadEnded]:
        """Start reads: on the calling thread if they are short and the plane is idle, otherwise on the read thread.

        Returns:
            The answers of reads that have ended already; the sink gets the others.

        Thread: one at a time; the worker's event loop. It never waits for the read thread.
        """
        if self._inline_s_max is not None:
            within_s = self._inline_s_max
        if within_s > 0 and self._guard.acquire(blocking=False):
            try:
                # Queued commands came before, and are processed under the lock, so nothing comes between.
                core = None if self._commands or self._closed else self._core
                answers = None if core is None else core.post_inline(reads, within_s)
                if answers is not None:
                    if len(answers) < len(reads) and (core is None or core.must_poll):
                        self._bell.ring()  # otherwise the read thread waits for the descriptor of the backend
                    return answers
            finally:
                self._guard.release()
        self._command(PostReads(tuple(reads), within_s))
        return []

    def cancel(self, read_ids: Sequence[int]) -> None:
        """Drop chunks that were not posted yet, on the read thread. Thread: any."""
        self._command(CancelReads(tuple(read_ids)))

    def reset_reader(self) -> None:
        """End what is in flight from hung peers, on the read thread; the sink gets ``ResetDone``. Thread: any."""
        self._command(ResetReader())

    def close(self) -> None:
        """Destroy the agents and join the read thread. Logs what it waits for while a call into a library hangs."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._put(None)
        for thread in self._threads:
            thread.join(HANGS_S)
            while thread.is_alive():
                _logger.error("kvflow.reads: closing waits for a call into %s that does not return", self._name)
                thread.join(HANGS_S)

    def _command(self, command: ReadCommand) -> None:
        # The lock orders commands and the end of commands, so everything that is queued is processed.
        with self._lock:
            if not self._closed:
                self._put(command)

    def _put(self, command: ReadCommand | None) -> None:
        self._commands.append(command)
        self._bell.ring()

    def _run(self, regions: Sequence[Region], epochs: Region, serving: Serving) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE})  # OpenSSL writes without MSG_NOSIGNAL
        try:
            backend = self._open_planes(regions=regions, epochs=epochs, serving=serving)
        except BaseException as error:  # noqa: BLE001 - start raises it, in the caller's thread
            self._published.set_exception(error)
            return
        core = ReadCore(backend, regions, self._sink, time.monotonic, self._staging)
        self._core = core
        self._bell.watch(backend.fileno())
        self._published.set_result(backend.published)
        self._serve(core)
        with self._guard:
            self._core = None
            core.begin_close()
        self._drain(core, time.monotonic() + CLOSE_GRACE_S)
        with self._lock:  # the call of close may still be ringing
            self._bell.close()
        core.end_close()

    def _serve(self, core: ReadCore) -> None:
        """Take commands and make steps until closed."""
        pause_s = backoff_s = 0.0
        while True:
            self._bell.wait(pause_s)
            with self._guard:
                for command in self._take():
                    if command is None:
                        return
                    core.handle(command)
                if core.step():
                    pause_s = backoff_s = 0.0
                elif core.must_poll:
                    rest_s = core.rest_s()
                    backoff_s = 0.0 if rest_s else min(max(PAUSE_S_MIN, backoff_s * 2), PAUSE_S_MAX)
                    pause_s = max(PAUSE_S_MIN, rest_s) if rest_s else backoff_s
                else:
                    pause_s = IDLE_PROGRESS_S if self._bell.watches or core.in_flight else -1.0

    def _drain(self, core: ReadCore, deadline: float) -> None:
        while core.in_flight and time.monotonic() < deadline:
            if not core.step():
                time.sleep(PAUSE_S_MAX)

    def _take(self) -> list[ReadCommand | None]:
        """Take all waiting commands."""
        return [self._commands.popleft() for _ in range(len(self._commands))]


PLANES = {"auto": ("nixl", "tcp"), "nixl": ("nixl",), "tcp": ("tcp",), "loopback": ("loopback",)}
"""The setting ``transport`` -> data planes, the preferred one first. NIXL comes first, because it reads without the
exporter's processor."""


def create_transport(config: WorkerConfig, agent_name: str, sink: Sink, staging_bytes: int = 0) -> Transport:
    """Construct a transport that has not started. ``agent_name`` is unique per incarnation.

    Raises:
        ConfigInvalid: there are no ``staging_bytes`` of memory for staged lists.
    """
    staging = StagingMemory(staging_bytes)
    # If TCP is available, NIXL reads only over transports that are known to need no help of the exporter's process.
    nixl = nixl_factory(
        agent_name,
        staging,
        uses=Uses(config.role, config.tuning.sleep_mode),
        known_only=config.transport == "auto",
        copy_threads=config.tuning.copy_threads or copy_threads_for(len(os.sched_getaffinity(0))),
        params=config.tuning.nixl_backend_params,
    )
    factories: dict[str, BackendFactory] = {
        "nixl": nixl,
        "tcp": partial(TcpBackend, agent_name, config.tcp),
        "loopback": lambda regions, epochs, _serving: LoopbackBackend(agent_name, regions, epochs),
    }
    return ThreadedTransport(
        config.transport,
        {name: factories[name] for name in PLANES[config.transport]},
        sink,
        staging,
        # A caller that names an address for the TCP plane requires it; without it some peers could not be read.
        required=frozenset() if config.tuning.tcp_bind is None else frozenset({"tcp"}),
    )


def copy_threads_for(cores: int) -> int:
    """Return the number of threads that copy. On two cores, a busy engine loses what a second thread gains."""
    return 2 if cores >= 4 else 1
