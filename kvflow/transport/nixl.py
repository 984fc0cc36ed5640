"""NIXL as a mover: two agents, prepared strided lists, and NIXL's exceptions in our words.

The exporter has a progress thread, which serves peers between our calls. The reader has none by default: the thread
that posts also polls, and a second thread would compete with it for the lock of the UCX worker.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from types import ModuleType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow.errors import TransportUnavailable
from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.memory.mapping import map_bytes
from kvflow.transfer.requests import LeaseName
from kvflow.transport.base import INLINE_S_MAX, UNFIT, UNKNOWN_CARRIER, Carrier, PeerAddress, Sink
from kvflow.transport.envelope import Envelope, seal, unseal
from kvflow.transport.mover import SPAN_MAX, Chunk, Flight, MoveFailed, MoverFactory, Plane, Prepared
from kvflow.transport.nixl_binding import Agent, error_types, load_binding, may_copy_from, published_settings
from kvflow.transport.nixl_metadata import Exported, carrier_between, difference, inspect
from kvflow.transport.staging import StagingMemory
from kvflow.transport.threaded import ThreadedTransport

_logger = logging.getLogger(__name__)

_SPANS = 1024
"""Where checks land: 4 MiB. A peer has at most eight checks in flight, so this is enough for 128 hung peers."""

_NOTHING: list[int] = []

_KEPT_MAX = 64
"""Connections to peers that were removed, in case they come again. A dead one's kernel closes its own by itself."""

_MOVING = {
    "nixlRemoteDisconnectError": "peer_lost",
    # NIXL forgets a peer at its first endpoint error; everything else of that peer is then not found.
    "nixlNotFoundError": "peer_lost",
}
_ADDING = {
    "nixlRemoteDisconnectError": "peer_lost",
    "nixlBackendError": "peer_lost",  # connecting to a process that is gone
    "nixlInvalidParamError": "metadata_invalid",
    "nixlMismatchError": "metadata_invalid",
    "nixlNotFoundError": "metadata_invalid",
}
_PREPARING = {
    "nixlNotFoundError": "bounds",  # not within what the peer registered
    "nixlInvalidParamError": "bounds",
}
"""Names of NIXL's exceptions to our codes; every other exception is a ``transport_error``."""


@dataclass(slots=True, eq=False)
class _Peer:
    """Whom we read from.

    Attributes:
        agent: its exporter's name.
        blob: its exporter's metadata.
        epochs: prepared list of its epoch table.
        programs: number of a program -> prepared lists, of the source and the target.
        failed: whether its connection may have.
    """

    agent: str
    blob: bytes
    epochs: int
    programs: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: bool = False


class _Kept(NamedTuple):
    """A connection that may be used again: whose, and to what metadata."""

    peer: PeerId
    blob: bytes


@dataclass(slots=True, eq=False)
class _Posted(Flight):
    """What was not done on return.

    Attributes:
        handle: of the read; 0 if nothing can tell when it ends.
        peer: whose memory is read.
        span: number of the scratch span that it writes to, or -1.
        count: how many slots of it are asked for.
        failure: what to report once it is over.
    """

    handle: int
    peer: _Peer
    span: int = -1
    count: int = 0
    failure: MoveFailed | None = None


class _Reader:
    """An agent that reads, and the scratch memory that its checks land in, span by span.

    Args:
        binding: from ``load_binding``.
        name: of the agent.
        regions: what reads may write to.
        progress, connects: as ``Agent`` says.
    """

    def __init__(
        self, binding: ModuleType, name: str, regions: Sequence[Region], *, progress: bool, connects: bool
    ) -> None:
        self.scratch = map_bytes(8 * _SPANS * SPAN_MAX).view(np.uint64)
        self.free_spans = list(range(_SPANS))
        self.numbers = np.arange(self.scratch.size, dtype=np.int32)  # of slots, of which checks take slices
        rows = np.array([[self.scratch.ctypes.data, 8, 0, 8, self.scratch.size]], dtype=np.int64)
        with ExitStack() as undo:
            self.agent = Agent(binding, name, progress=progress, connects=connects)
            undo.callback(self.agent.destroy)
            self.agent.register([*regions, Region(self.scratch.ctypes.data, self.scratch.nbytes)])
            self.scratch_list = self.agent.prepare_local(rows, "DRAM")
            undo.pop_all()


class NixlMover(Plane):
    """Move bytes with NIXL. See ``Mover`` for the contract.

    Args:
        agent_name: unique per incarnation.
        regions: the cache.
        epochs: our epoch table.
        staging: memory that only the reader knows.
        known_only: refuse peers whose transport cannot be determined.
        reader_progress: run a progress thread at the reader, too. RDMA needs one: what a network card's queue could not
            hold, UCX passes on while it makes progress, and without the thread it does so only in our polls. It costs
            a thread, for whose lock our calls may wait. Over shared memory the post is the copy, with or without it.

    Raises:
        TransportUnavailable: NIXL cannot be loaded, UCX cannot start, or the memory is refused.
    """

    def __init__(
        self,
        agent_name: str,
        regions: Sequence[Region],
        epochs: Region,
        staging: Sequence[Region] = (),
        *,
        known_only: bool = False,
        reader_progress: bool = False,
    ) -> None:
        binding = load_binding()
        self._binding = binding
        self._agent_name = agent_name
        self._regions = (*regions, *staging)
        self._settings = published_settings(binding, os.environ)
        self._known_only = known_only
        self._reader_progress = reader_progress
        self._errors = error_types(binding)
        self._peers: dict[PeerId, _Peer] = {}
        self._kept: dict[str, _Kept] = {}
        self._numbers = count()
        refusals: tuple[type[Exception], ...] = (ValueError, *self._errors)
        try:
            with ExitStack() as exporting:
                exporter = Agent(binding, exporter_name(agent_name), progress=True)
                exporting.callback(exporter.destroy)
                exporter.register([*regions, epochs])
                envelope = Envelope("nixl", exporter_name(agent_name), exporter.metadata(), self._settings)
                self.metadata = seal(envelope)
                self._ours = _inspected(envelope)
                self._reader = self._make_reader()
                self._reader_is_gone = False
                self._exporting = exporting.pop_all()
        except refusals as error:
            transports = os.environ.get("UCX_TLS")
            hint = "" if transports is None else f"; without tcp, UCX_TLS={transports} may leave too little"
            raise TransportUnavailable(f"NIXL cannot start: {_words(error)}{hint}") from error

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Mover.add``."""
        try:
            agent = None if address.agent is None else exporter_name(address.agent)
            envelope = unseal(address.planes["nixl"], transport="nixl", agent=agent)
            carrier = self._carrier_of(envelope)
        except ValueError as error:
            raise MoveFailed("metadata_invalid", str(error)) from error
        self._require_reader()
        epochs = address.epochs
        rows = np.array([[epochs.address, 8, 0, 8, epochs.nbytes // 8]], dtype=np.int64)
        sharing = self._sharing(envelope.agent)
        try:
            peer = self._share(sharing[0], envelope, rows) if sharing else self._connect(envelope, rows)
        except self._errors as error:
            if not sharing:
                self._forget(envelope.agent)
            raise _failure(_ADDING, error) from error
        if peer.agent != envelope.agent:
            self._reader.agent.release_list(peer.epochs)
            if not self._sharing(peer.agent):
                self._kept.pop(peer.agent, None)
                self._forget(peer.agent)  # never another peer's: its reads would go on writing, unseen
            raise MoveFailed("metadata_invalid", f"{envelope.agent!r} calls itself {peer.agent!r}")
        self._peers[address.peer] = peer
        return carrier

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """See ``Mover.remove``."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            if gone:
                self._drop_kept(peer_id)
            return
        for prepared in (peer.epochs, *(prepared for program in peer.programs.values() for prepared in program)):
            self._reader.agent.release_list(prepared)
        sharing = self._sharing(peer.agent)
        if sharing:  # the last of them closes the connection: before that, reads of another one may be in flight
            sharing[0].failed |= peer.failed or gone
            return
        if peer.failed or gone:
            self._forget(peer.agent)
            return
        # Over shared memory, too, UCX has a socket to each peer, and closing our end of it leaves both open for as long
        # as both processes live: the other agent still counts on it. So whoever comes again gets the same one.
        self._kept[peer.agent] = _Kept(peer_id, peer.blob)
        if len(self._kept) > _KEPT_MAX:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._forget(oldest)

    def prepare(self, prepared: Prepared) -> None:
        """See ``Mover.prepare``."""
        program = prepared.program
        peer = self._peers[program.peer]
        try:
            source = self._reader.agent.prepare_remote(peer.agent, prepared.source.table, program.source_memory)
            try:
                target = self._reader.agent.prepare_local(prepared.target.table, program.target_memory)
            except self._errors:
                self._reader.agent.release_list(source)
                raise
        except self._errors as error:
            raise _failure(_PREPARING, error) from error
        peer.programs[program.program_id] = (source, target)

    def post(self, chunk: Chunk) -> Flight | int:
        """See ``Mover.post``."""
        portion = chunk.portion
        peer = self._peers[portion.peer]
        source, target = peer.programs[portion.program_id]
        source_index, target_index = portion.source_index, portion.target_index
        if chunk.stop - chunk.first < source_index.size:
            source_index, target_index = source_index[chunk.first : chunk.stop], target_index[chunk.first : chunk.stop]
        try:
            handle = self._reader.agent.make_read(target, target_index, source, source_index)
        except self._errors as error:
            peer.failed = True
            raise _failure(_MOVING, error) from error
        outcome = self._begin(handle, peer)
        return outcome if isinstance(outcome, _Posted) else 0

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> Flight | Sequence[int]:
        """See ``Mover.post_check``."""
        peer, count = self._peers[peer_id], last + 1 - first
        if not self._reader.free_spans:
            raise MoveFailed("transport_error", "too many checks of hung peers are in flight")
        span = self._reader.free_spans.pop()
        try:
            handle = self._make_check(peer, first, span, count)
        except self._errors as error:
            self._reader.free_spans.append(span)
            peer.failed = True
            raise _failure(_MOVING, error) from error
        return self._begin(handle, peer, span, count)

    def ends_at_once(self, peer_id: PeerId) -> bool:
        """See ``Mover.ends_at_once``: over shared memory the post is the copy; over RDMA it is short, too."""
        return True

    def poll(self, flight: Flight) -> int | Sequence[int] | None:
        """See ``Mover.poll``."""
        assert isinstance(flight, _Posted)
        values = self._ask(flight, self._reader.agent.poll) if flight.handle else None
        return values if values is None or flight.count else 0

    def reset(self) -> None:
        """See ``Mover.reset``."""
        # The handles in flight are not released: that stops nothing, and only the end of their agent does.
        self._peers.clear()
        self._kept.clear()
        self._reader.agent.destroy()
        self._reader_is_gone = True
        self._require_reader()

    def close(self) -> None:
        """See ``Mover.close``."""
        with self._exporting:  # is destroyed after the reader, even if destroying that fails
            if not self._reader_is_gone:
                self._reader.agent.destroy()

    def _connect(self, envelope: Envelope, epochs: npt.NDArray[np.int64]) -> _Peer:
        """Get ready to read an epoch table, over the connection that was kept if there is one that has not failed."""
        kept = self._kept.pop(envelope.agent, None)
        if kept is not None and kept.blob == envelope.blob:
            with suppress(*self._errors):
                prepared = self._reader.agent.prepare_remote(envelope.agent, epochs, "DRAM")
                return _Peer(envelope.agent, envelope.blob, prepared)
        if kept is not None:
            self._forget(envelope.agent)
        agent = self._reader.agent.add_remote(envelope.blob)
        return _Peer(agent, envelope.blob, self._reader.agent.prepare_remote(agent, epochs, "DRAM"))

    def _carrier_of(self, envelope: Envelope) -> Carrier:
        """Return what carries a peer's bytes, if the peer need do nothing for it."""
        if differing := difference(self._settings, envelope.settings):
            raise MoveFailed(UNFIT, differing)
        carrier: Carrier | None = UNKNOWN_CARRIER
        if self._ours is not None:
            carrier = carrier_between(self._ours, inspect(envelope.blob, envelope.agent), may_copy_from)
        if carrier is None:
            raise MoveFailed(UNFIT, "neither shared memory nor RDMA reaches the peer's memory from here")
        if self._known_only and carrier == UNKNOWN_CARRIER:
            raise MoveFailed(UNFIT, "the transports of UCX on both sides cannot be compared")
        return carrier

    def _sharing(self, agent: str) -> list[_Peer]:
        """Return the peers that are read from over the connection to an exporter."""
        return [peer for peer in self._peers.values() if peer.agent == agent]

    def _share(self, known: _Peer, envelope: Envelope, epochs: npt.NDArray[np.int64]) -> _Peer:
        """Get ready to read an epoch table over a connection that another peer has: it is the same worker."""
        if known.blob != envelope.blob:
            raise MoveFailed("metadata_invalid", f"{envelope.agent!r} is another peer already")
        if any(peer.failed for peer in self._sharing(known.agent)):
            raise MoveFailed("peer_lost", f"the connection to {known.agent!r} has failed, and reads over it still end")
        return _Peer(known.agent, known.blob, self._reader.agent.prepare_remote(known.agent, epochs, "DRAM"))

    def _make_reader(self) -> _Reader:
        # A name of its own for each: peers that hang may still know an earlier one.
        # Within a host it reads without a word to the exporter's process, which nothing can then go wrong in.
        connects = self._ours is None or self._ours.has_network
        name = f"{self._agent_name}/reader/{next(self._numbers)}"
        return _Reader(self._binding, name, self._regions, progress=self._reader_progress, connects=connects)

    def _require_reader(self) -> None:
        """Make a reader if the last reset could not."""
        if self._reader_is_gone:
            try:
                self._reader = self._make_reader()
            except self._errors as error:
                raise MoveFailed("transport_error", f"the reader cannot be made anew: {_words(error)}") from error
            self._reader_is_gone = False

    def _begin(self, handle: int, peer: _Peer, span: int = -1, count: int = 0) -> _Posted | list[int]:
        """Post a handle. If it is over on return: what has arrived in its span."""
        agent = self._reader.agent
        try:
            done = agent.post(handle)
        except self._errors as error:
            posted = _Posted(handle, peer, span, count)
            self._fall(posted, error)
            return posted
        if not done:
            return _Posted(handle, peer, span, count)
        agent.release(handle)
        return self._settle(span, count)

    def _ask(self, posted: _Posted, question: Callable[[int], bool]) -> list[int] | None:
        """Post or poll a handle, and settle it if that ends it. None: it has not ended."""
        agent = self._reader.agent
        try:
            if not question(posted.handle):
                return None
        except self._errors as error:
            self._fall(posted, error)
            return None
        agent.release(posted.handle)
        values = self._settle(posted.span, posted.count)
        if posted.failure is not None:
            raise posted.failure
        return values

    def _fall(self, posted: _Posted, error: Exception) -> None:
        """Take what a handle has raised: raise its failure, unless something of it may still write."""
        self._reader.agent.release(posted.handle)
        posted.peer.failed = True
        failure = _failure(_MOVING, error)
        if failure.reason.code == "peer_lost":
            self._settle(posted.span, posted.count)
            raise (posted.failure or failure) from error
        # The endpoint lives, so descriptors that were posted before the failing one may still be arriving. NIXL ends
        # every post with a flush of the endpoint: a later read that completes proves that they have arrived.
        first = posted.failure is None
        posted.failure = posted.failure or failure
        posted.handle = 0
        if first and (posted.span >= 0 or self._reader.free_spans):
            posted.span = posted.span if posted.span >= 0 else self._reader.free_spans.pop()
            posted.count = 1
            with suppress(*self._errors):
                posted.handle = self._make_check(posted.peer, 0, posted.span, 1)
                self._ask(posted, self._reader.agent.post)

    def _make_check(self, peer: _Peer, first: int, span: int, count: int) -> int:
        """Make the handle that reads so many slots, from the first on, into a span."""
        reader, at, stop = self._reader, span * SPAN_MAX, first + count
        remote = reader.numbers[first:stop] if stop <= reader.numbers.size else np.arange(first, stop, dtype=np.int32)
        return reader.agent.make_read(reader.scratch_list, reader.numbers[at : at + count], peer.epochs, remote)

    def _settle(self, span: int, count: int) -> list[int]:
        """Give back the scratch span of something that is over, if it has one, and return what has arrived there."""
        if span < 0:
            return _NOTHING
        reader = self._reader
        reader.free_spans.append(span)
        at = span * SPAN_MAX
        values: list[int] = reader.scratch[at : at + count].tolist()
        return values

    def _drop_kept(self, peer_id: PeerId) -> None:
        for agent in [agent for agent, kept in self._kept.items() if kept.peer == peer_id]:
            del self._kept[agent]
            self._forget(agent)

    def _forget(self, agent: str) -> None:
        with suppress(*self._errors):  # NIXL forgets a peer by itself when its endpoint fails
            self._reader.agent.remove_remote(agent)


class NixlTransport(ThreadedTransport):
    """The data plane over NIXL and UCX: shared memory, RDMA, NVLink. See ``Transport`` for the contract.

    Args:
        agent_name: unique per incarnation.
        sink: called on the owner thread.
        staging_bytes: memory for staged programs; 0 for none.
        inline_s_max: as of ``ThreadedTransport``.
        reader_progress: as of ``NixlMover``.
    """

    def __init__(
        self,
        agent_name: str,
        sink: Sink,
        staging_bytes: int = 0,
        *,
        inline_s_max: float = INLINE_S_MAX,
        reader_progress: bool = False,
    ) -> None:
        staging = StagingMemory(staging_bytes)
        super().__init__(
            "nixl",
            {"nixl": nixl_factory(agent_name, staging, reader_progress=reader_progress)},
            sink,
            staging,
            inline_s_max=inline_s_max,
        )


def nixl_factory(
    agent_name: str, staging: StagingMemory, *, known_only: bool = False, reader_progress: bool = False
) -> MoverFactory:
    """Return what opens the NIXL plane of one worker; the options are those of ``NixlMover``."""
    # Peers read our memory by themselves: there is nothing to serve, and nothing to end a pause for.
    return lambda regions, epochs, *_: NixlMover(
        agent_name, regions, epochs, staging.regions, known_only=known_only, reader_progress=reader_progress
    )


def exporter_name(agent_name: str) -> str:
    """Return the name of the NIXL agent that peers of this worker read from."""
    return f"{agent_name}/exporter"


def _inspected(ours: Envelope) -> Exported | None:
    """Read our own metadata; None if this NIXL writes another form than the one that we know.

    Only then is the metadata of peers given to NIXL before we have read it.
    """
    try:
        return inspect(ours.blob, ours.agent)
    except ValueError as error:
        _logger.warning("metadata of peers is given to NIXL unread, since ours has an unknown form: %s", error)
        return None


def _failure(codes: Mapping[str, str], error: Exception) -> MoveFailed:
    return MoveFailed(codes.get(type(error).__name__, "transport_error"), _words(error))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
