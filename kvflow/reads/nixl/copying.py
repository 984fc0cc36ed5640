"""Copy a chunk with several threads. Within a host the kernel copies on the thread that posts: one core per agent.

The read thread and its helpers take pieces of a chunk until none is left, and each reads them with an agent of its own.
The post returns when all pieces have been read, as if one thread had read them. A helper that gets no core in time
reads nothing, and the read thread reads everything.
"""

import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvflow.errors import quoted
from kvflow.reads.backend import BackendError, CheckedList, Chunk, PostedWork
from kvflow.reads.contract import SHARED_BYTES_MIN, UNKNOWN_CARRIER
from kvflow.reads.nixl.reading import Posted, ReadingAgent, RemoteAgent

_logger = logging.getLogger(__name__)

_PIECE_BYTES = 1 << 20  # the last thread is late by one piece at most: 60 us at 17 GB/s

_LATE_S = 1e-3  # after which a helper may run on every core: another program may have taken the one that it waits for

_libc = ctypes.PyDLL(None)  # keeps the interpreter: the call takes less time than to give it up


@dataclass(slots=True, eq=False, kw_only=True)
class RemotePeer(RemoteAgent):
    """A peer that this worker reads from, as its first agent and those of helpers know it."""

    blob: bytes  # its exporter's metadata
    rows: npt.NDArray[np.int64]  # of its epoch table
    carrier: str = UNKNOWN_CARRIER.name
    lists: dict[int, CheckedList] = field(default_factory=dict)  # list id -> what was prepared
    beside: "dict[Helper, RemoteAgent]" = field(default_factory=dict)  # of the helpers that read from it
    alone: bool = False  # whether no helper reads from it


class Pieces(PostedWork):
    """A chunk that several threads read in pieces."""

    def __init__(self, peer: RemotePeer, chunk: Chunk, nbytes: int) -> None:
        self._peer = peer
        step = max(1, _PIECE_BYTES * (chunk.stop - chunk.first) // nbytes)
        starts = range(chunk.first, chunk.stop, step)
        self._waiting = deque(Chunk(chunk.portion, first, min(first + step, chunk.stop)) for first in starts)
        self._count = len(self._waiting)
        self._outcomes: list[object] = []  # of each piece that was posted or dropped

    @property
    def in_flight(self) -> bool:
        """Whether a piece that was posted has not ended."""
        return any(isinstance(outcome, Posted) for outcome in self._outcomes)

    def read(self, peer: RemoteAgent) -> None:
        """Read pieces until none is left. After a failure the others are dropped. Thread: that of the peer's agent."""
        while (piece := self._take()) is not None:
            try:
                self._outcomes.append(peer.reader.post(peer, piece))
            except BackendError as failure:
                self._outcomes.append(failure)
                while self._take() is not None:
                    self._outcomes.append(None)

    def poll(self) -> int | None:
        """Ask once what is in flight, when no thread reads pieces: see ``Backend.poll``.

        Raises:
            BackendError: a piece has failed, and all have ended.
            RuntimeError: a thread has ended within a piece, which may still write.
        """
        if len(self._outcomes) != self._count:
            raise RuntimeError("a thread has ended while it read a piece of a chunk")
        for number, outcome in enumerate(self._outcomes):
            if isinstance(outcome, Posted):
                try:
                    self._outcomes[number] = outcome if outcome.poll() is None else 0
                except BackendError as failure:
                    self._outcomes[number] = failure
        if self.in_flight:
            return None
        for outcome in self._outcomes:
            if isinstance(outcome, BackendError):
                self._peer.failed = True
                raise outcome
        return 0

    def _take(self) -> Chunk | None:
        try:
            return self._waiting.popleft()
        except IndexError:
            return None


class Helper:
    """A thread with an agent, which it makes when it starts. It runs on another core than the thread that it helps.

    One thread at a time calls it, and does not touch its agent between ``start`` and ``finish``.
    """

    def __init__(self, make_reader: Callable[[], ReadingAgent]) -> None:
        self.readers: list[ReadingAgent] = []  # one when it is ready
        self.connected: set[str] = set()  # names of the exporters that its agent knows
        self._given: deque[Callable[[], None]] = deque()
        self._wake, self._done = threading.Lock(), threading.Lock()
        self._wake.acquire()
        self._done.acquire()
        self._closed = False
        self._avoided, self._is_apart = -1, False  # a core, and whether this thread cannot run there
        self._thread = threading.Thread(target=self._run, args=(make_reader,), name="kvflow-copy", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            _logger.warning("kvflow.reads: large reads have a thread less: %s", error)

    def is_ready(self) -> bool:
        """Return whether it has an agent, and another core than the calling thread."""
        core = _libc.sched_getcpu()
        if core != self._avoided and self.readers:
            self._avoided, self._is_apart = core, False
            # The kernel would wake it on the core of the thread that wakes it, where it gains nothing.
            with suppress(OSError):  # a core was taken away, or the process may not choose
                if (others := os.sched_getaffinity(0) - {core}) and self._thread.native_id is not None:
                    os.sched_setaffinity(self._thread.native_id, others)
                    self._is_apart = True
        return self._is_apart

    def start(self, work: Callable[[], None]) -> None:
        """Do work on this thread, unless ``finish`` comes before it begins."""
        self._given.append(work)
        self._ring()

    def finish(self) -> None:
        """Return when the work that was given has ended, or will not begin."""
        try:
            self._given.pop()
        except IndexError:
            if not self._done.acquire(timeout=_LATE_S):
                self._avoided = -1
                with suppress(OSError):
                    os.sched_setaffinity(self._thread.native_id or 0, os.sched_getaffinity(0))
                self._done.acquire()

    def close(self) -> None:
        """End the thread and destroy its agent: nothing writes after that."""
        self._closed = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join()
        for reader in self.readers:
            reader.agent.destroy()

    def _ring(self) -> None:
        with suppress(RuntimeError):  # rung before
            self._wake.release()

    def _run(self, make_reader: Callable[[], ReadingAgent]) -> None:
        try:
            self.readers.append(make_reader())
            while not self._closed:
                self._wake.acquire()
                try:
                    work = self._given.pop()
                except IndexError:  # taken back
                    continue
                try:
                    work()
                finally:
                    self._done.release()
        except Exception:
            _logger.exception("kvflow.reads: a thread that helps with large reads has ended; the others go on")


class Helpers:
    """The helpers of a read thread. They start with the first large chunk, so small reads need none.

    ``make_reader`` makes the agent of one, on its own thread; ``errors`` are the exceptions of NIXL.
    """

    def __init__(self, make_reader: Callable[[], ReadingAgent], count: int, errors: Sequence[type[Exception]]) -> None:
        self._make_reader, self._count = make_reader, count
        self._errors: tuple[type[Exception], ...] = (BackendError, *errors)
        self._helpers: list[Helper] = []

    def post(self, peer: RemotePeer, chunk: Chunk) -> PostedWork | int:
        """Post a chunk, in pieces if it is large and helpers are ready. Return when no helper uses its agent."""
        count = chunk.stop - chunk.first
        nbytes = chunk.portion.nbytes * count // max(1, len(chunk.portion.source_index))
        if not self._count or nbytes < SHARED_BYTES_MIN or count == 1 or peer.alone:
            return peer.reader.post(peer, chunk)
        if not self._helpers:
            self._helpers = [Helper(self._make_reader) for _ in range(self._count)]
        ready = [(helper, self._beside(peer, helper, chunk)) for helper in self._helpers if helper.is_ready()]
        helping = [(helper, remote) for helper, remote in ready if remote is not None]
        if not helping:
            return peer.reader.post(peer, chunk)
        pieces = Pieces(peer, chunk, nbytes)
        for helper, remote in helping:
            helper.start(partial(pieces.read, remote))
        try:
            pieces.read(peer)
        finally:
            for helper, _ in helping:
                helper.finish()
        peer.alone = pieces.in_flight  # its posts return before their bytes have arrived
        return pieces if pieces.poll() is None else 0

    def forget(self, agent: str) -> None:
        """Forget an exporter."""
        for helper in self._helpers:
            if agent in helper.connected:
                helper.connected.remove(agent)
                with suppress(*self._errors):
                    helper.readers[0].agent.remove_remote(agent)

    def close(self) -> None:
        """End the threads and destroy their agents, even if one of them fails."""
        with ExitStack() as closing:
            while self._helpers:
                closing.callback(self._helpers.pop().close)

    def _beside(self, peer: RemotePeer, helper: Helper, chunk: Chunk) -> RemoteAgent | None:
        """Return a peer as the agent of a helper knows it, ready to read a chunk. None: the helper cannot read it."""
        (reader,) = helper.readers
        remote, list_id = peer.beside.get(helper), chunk.portion.list_id
        try:
            if remote is None:
                if peer.agent not in helper.connected:
                    reader.agent.add_remote(peer.blob)
                    helper.connected.add(peer.agent)
                remote = RemoteAgent(reader, peer.agent, reader.agent.prepare_remote(peer.agent, peer.rows, "DRAM"))
                peer.beside[helper] = remote
            if list_id not in remote.handles:
                reader.prepare(remote, peer.lists[list_id])
        except self._errors as error:
            peer.alone = True
            who, why = quoted(peer.agent), quoted(repr(error), 256)
            _logger.warning("kvflow.reads: no thread helps with reads from %s: %s", who, why)
            return None
        return remote
