"""Read with one agent: prepared lists, posts, checks, and when what was posted has ended."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import numpy as np

from kvflow.errors import FailureCode
from kvflow.layout.component import Region
from kvflow.memory.mapping import map_bytes
from kvflow.reads.backend import BackendError, CheckedList, Chunk, PostedWork
from kvflow.reads.contract import SPAN_MAX
from kvflow.reads.nixl.binding import MOVING, PREPARING, Agent, failure_of

SPANS = 1024
"""Where checks land: 4 MiB. A peer has at most eight checks in flight, so this is enough for 128 hung peers."""

_DELAY_US = 2000
"""How long the progress thread sleeps, about 1 % of a core: UCX may not wake it, and a card's queue must not run dry
for longer."""


@dataclass(slots=True, eq=False)
class RemoteAgent:
    """A peer, as one agent of this worker reads from it."""

    reader: "ReadingAgent"
    agent: str  # its exporter's name
    epochs: int  # prepared list of its epoch table
    handles: dict[int, tuple[int, int]] = field(default_factory=dict)  # list id -> NIXL's lists of source and target
    failed: bool = False  # whether the connection of this agent may have failed


@dataclass(slots=True, eq=False)
class Posted(PostedWork):
    """A read that had not ended when its post returned."""

    handle: int  # 0: its end cannot be observed
    peer: RemoteAgent
    span: int = -1  # of scratch memory that it writes to
    count: int = 0  # slots of it that are read
    failure: BackendError | None = None  # reported when it has ended

    def poll(self) -> int | list[int] | None:
        """Ask once whether it has ended: see ``Backend.poll``."""
        reader = self.peer.reader
        values = reader.ask(self, reader.agent.poll) if self.handle else None
        return values if values is None or self.count else 0


class ReadingAgent:
    """An agent that reads, and the scratch memory that its checks land in, span by span. Thread: one at a time.

    ``errors`` are the exceptions of NIXL. The end of each chunk sets ``has_arrived``.
    """

    def __init__(
        self,
        make_agent: Callable[..., Agent],
        regions: Sequence[Region],
        errors: tuple[type[Exception], ...],
        *,
        progress: bool,
        spans: int = SPANS,
    ) -> None:
        self.progress = progress
        self.has_arrived = False
        self._errors = errors
        self.scratch = map_bytes(8 * spans * SPAN_MAX).view(np.uint64)
        self.free_spans = list(range(spans))
        self.numbers = np.arange(self.scratch.size, dtype=np.int32)  # of slots, of which checks take slices
        rows = np.array([[self.scratch.ctypes.data, 8, 0, 8, self.scratch.size]], dtype=np.int64)
        with ExitStack() as undo:
            self.agent = make_agent(progress=progress, delay_us=_DELAY_US)
            undo.callback(self.agent.destroy)
            self.agent.register([*regions, Region(self.scratch.ctypes.data, self.scratch.nbytes)])
            self.scratch_list = self.agent.prepare_local(rows, "DRAM")
            undo.pop_all()

    def prepare(self, peer: RemoteAgent, prepared: CheckedList) -> None:
        """Prepare to read with a list. Raises BackendError: it cannot be used."""
        prepared_list = prepared.prepared_list
        try:
            source = self.agent.prepare_remote(peer.agent, prepared.source.table, prepared_list.source_memory)
            try:
                target = self.agent.prepare_local(prepared.target.table, prepared_list.target_memory)
            except self._errors:
                self.agent.release_list(source)
                raise
        except self._errors as error:
            raise failure_of(PREPARING, error) from error
        peer.handles[prepared_list.list_id] = (source, target)

    def post(self, peer: RemoteAgent, chunk: Chunk) -> Posted | int:
        """Start to move a chunk: see ``Backend.post``."""
        portion = chunk.portion
        source, target = peer.handles[portion.list_id]
        source_index, target_index = portion.source_index, portion.target_index
        if chunk.stop - chunk.first < source_index.size:
            source_index, target_index = source_index[chunk.first : chunk.stop], target_index[chunk.first : chunk.stop]
        try:
            handle = self.agent.make_read(target, target_index, source, source_index)
        except self._errors as error:
            peer.failed = True
            raise failure_of(MOVING, error) from error
        outcome = self._begin(handle, peer)
        return outcome if isinstance(outcome, Posted) else 0

    def check(self, peer: RemoteAgent, first: int, count: int) -> Posted | list[int]:
        """Start to read ``count`` epoch slots, from the first on. Return their values if they are known already."""
        if not self.free_spans:
            raise BackendError(FailureCode.TRANSPORT_ERROR, "too many checks of hung peers are in flight")
        span = self.free_spans.pop()
        try:
            handle = self._make_check(peer, first, span, count)
        except self._errors as error:
            self.free_spans.append(span)
            peer.failed = True
            raise failure_of(MOVING, error) from error
        return self._begin(handle, peer, span, count)

    def _begin(self, handle: int, peer: RemoteAgent, span: int = -1, count: int = 0) -> Posted | list[int]:
        """Post a handle. If it has ended on return, return what has arrived in its span."""
        agent = self.agent
        try:
            done = agent.post(handle)
        except self._errors as error:
            posted = Posted(handle, peer, span, count)
            self._fall(posted, error)
            return posted
        if not done:
            return Posted(handle, peer, span, count)
        agent.release(handle)
        if count:
            return self._settle(span, count)
        self.has_arrived = True
        return []

    def ask(self, posted: Posted, question: Callable[[int], bool]) -> list[int] | None:
        """Post or poll a handle, and settle it if that ends it. None: it has not ended."""
        try:
            if not question(posted.handle):
                return None
        except self._errors as error:
            self._fall(posted, error)
            return None
        self.agent.release(posted.handle)
        values = self._settle(posted.span, posted.count)
        if posted.failure is not None:
            raise posted.failure
        return values

    def _fall(self, posted: Posted, error: Exception) -> None:
        """Handle what a handle has raised: raise its failure, unless something of it may still write."""
        self.agent.release(posted.handle)
        posted.peer.failed = True
        failure = failure_of(MOVING, error)
        if failure.reason.code == FailureCode.PEER_LOST:
            self._settle(posted.span, posted.count)
            raise (posted.failure or failure) from error
        # The endpoint lives, so descriptors that were posted before the failing one may still be arriving. NIXL ends
        # every post with a flush of the endpoint: a later read that completes proves that they have arrived.
        first = posted.failure is None
        posted.failure = posted.failure or failure
        posted.handle = 0
        if first and (posted.span >= 0 or self.free_spans):
            posted.span = posted.span if posted.span >= 0 else self.free_spans.pop()
            posted.count = 1
            with suppress(*self._errors):
                posted.handle = self._make_check(posted.peer, 0, posted.span, 1)
                self.ask(posted, self.agent.post)

    def _make_check(self, peer: RemoteAgent, first: int, span: int, count: int) -> int:
        """Make the handle that reads ``count`` slots, from the first on, into a span."""
        at, stop = span * SPAN_MAX, first + count
        remote = self.numbers[first:stop] if stop <= self.numbers.size else np.arange(first, stop, dtype=np.int32)
        return self.agent.make_read(self.scratch_list, self.numbers[at : at + count], peer.epochs, remote)

    def _settle(self, span: int, count: int) -> list[int]:
        """Give back the scratch span of something that has ended, and return what has arrived there."""
        if span < 0:
            self.has_arrived = True
            return []
        self.free_spans.append(span)
        at = span * SPAN_MAX
        values: list[int] = self.scratch[at : at + count].tolist()
        return values
