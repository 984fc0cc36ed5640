"""The contract within one process: peers are found in a registry, and a post is the copy.

It is for tests, demos and engines that share a process. Every post is done on return, as NIXL's is on shared
memory. What NIXL cannot know, it does not know either: a peer that is gone shows only when it is read from.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflow.errors import TransportUnavailable
from kvflow.ids import PeerId
from kvflow.layout.region import Region
from kvflow.transfer.requests import LeaseName
from kvflow.transport.base import INLINE_S_MAX, Carrier, PeerAddress, Sink
from kvflow.transport.bounds import OutOfBounds, check_inside, merge
from kvflow.transport.envelope import Envelope, seal, unseal
from kvflow.transport.mover import Chunk, Flight, MoveFailed, Plane, Prepared
from kvflow.transport.staging import StagingMemory
from kvflow.transport.threaded import ThreadedTransport


@dataclass(slots=True, eq=False)
class _Exporter:
    """Memory that peers may read. Whoever reads holds the lock, so that it is not freed meanwhile."""

    regions: tuple[Region, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False


_exporters: dict[str, _Exporter] = {}
_exporters_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Peer:
    exporter: _Exporter
    epochs: Region
    programs: dict[int, Prepared] = field(default_factory=dict)


class LoopbackMover(Plane):
    """Move bytes between transports of one process. See ``Mover`` for the contract.

    Args:
        agent_name: unique per incarnation.
        regions: the cache, in DRAM.
        epochs: our epoch table.

    Raises:
        TransportUnavailable: a region is not DRAM, or the name is taken.
    """

    def __init__(self, agent_name: str, regions: Sequence[Region], epochs: Region) -> None:
        self._agent_name = agent_name
        self._peers: dict[PeerId, _Peer] = {}
        self.metadata = seal(Envelope("loopback", agent_name, b""))
        if any(region.memory != "DRAM" for region in (*regions, epochs)):
            raise TransportUnavailable("loopback copies DRAM only", remedy="Use transport='nixl' for VRAM.")
        self._exporter = _Exporter((*regions, epochs))
        with _exporters_lock:
            if agent_name in _exporters:
                raise TransportUnavailable(f"there is an exporter {agent_name!r} already", remedy="Choose another.")
            _exporters[agent_name] = self._exporter

    def add(self, address: PeerAddress) -> Carrier:
        """See ``Mover.add``."""
        try:
            envelope = unseal(address.planes["loopback"], transport="loopback", agent=address.agent)
        except ValueError as error:
            raise MoveFailed("metadata_invalid", str(error)) from error
        with _exporters_lock:
            exporter = _exporters.get(envelope.agent)
        if exporter is None:
            raise MoveFailed("peer_lost", f"there is no exporter {envelope.agent!r} in this process")
        if address.epochs not in exporter.regions:
            raise MoveFailed("metadata_invalid", f"{envelope.agent!r} does not export {address.epochs}")
        self._peers[address.peer] = _Peer(exporter, address.epochs)
        return Carrier("loopback", "kind")

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """See ``Mover.remove``."""
        self._peers.pop(peer_id, None)

    def prepare(self, prepared: Prepared) -> None:
        """See ``Mover.prepare``."""
        peer = self._peers[prepared.program.peer]
        try:
            check_inside(prepared.source, peer.exporter.regions, prepared.program.source_memory)
        except OutOfBounds as error:
            raise MoveFailed("bounds", str(error)) from error
        peer.programs[prepared.program.program_id] = prepared

    def post(self, chunk: Chunk) -> Flight | int:
        """See ``Mover.post``."""
        portion = chunk.portion
        peer = self._peers[portion.peer]
        program = peer.programs[portion.program_id]
        part = slice(chunk.first, chunk.stop)
        runs = merge(program.source, portion.source_index[part], program.target, portion.target_index[part])
        with peer.exporter.lock:
            _require_open(peer.exporter)
            for run in runs:
                ctypes.memmove(run.target_address, run.source_address, run.nbytes)
        return 0

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> Flight | Sequence[int]:
        """See ``Mover.post_check``."""
        peer = self._peers[peer_id]
        with peer.exporter.lock:
            _require_open(peer.exporter)
            slots = (ctypes.c_uint64 * (last + 1 - first)).from_address(peer.epochs.address + 8 * first)
            return list(slots)

    def ends_at_once(self, peer: PeerId) -> bool:
        """See ``Mover.ends_at_once``: the post is the copy."""
        return True

    def poll(self, flight: Flight) -> int | Sequence[int] | None:
        """See ``Mover.poll``. Nothing ever flies."""
        raise NotImplementedError

    def reset(self) -> None:
        """See ``Mover.reset``. Nothing ever flies, so that there is nothing to destroy."""
        self._peers.clear()

    def close(self) -> None:
        """See ``Mover.close``. Returns when nobody reads from us any more."""
        with _exporters_lock:
            del _exporters[self._agent_name]
        with self._exporter.lock:
            self._exporter.closed = True


class LoopbackTransport(ThreadedTransport):
    """The data plane within one process. See ``Transport`` for the contract.

    Args:
        agent_name: unique per incarnation.
        sink: called on the owner thread.
        staging_bytes: memory for staged programs; 0 for none.
        inline_s_max: as of ``ThreadedTransport``.
    """

    def __init__(
        self, agent_name: str, sink: Sink, staging_bytes: int = 0, *, inline_s_max: float = INLINE_S_MAX
    ) -> None:
        # Peers read our memory by themselves: there is nothing to serve, and nothing to end a pause for.
        super().__init__(
            "loopback",
            {"loopback": lambda regions, epochs, *_: LoopbackMover(agent_name, regions, epochs)},
            sink,
            StagingMemory(staging_bytes),
            inline_s_max=inline_s_max,
        )


def _require_open(exporter: _Exporter) -> None:
    if exporter.closed:
        raise MoveFailed("peer_lost", "the exporter was closed")
