"""The data plane within one process: a registry has the peers, and a post is the copy.

It is for tests, demos and engines that share a process. As with NIXL, only a read shows that a peer is gone.
"""

import ctypes
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvflow.errors import FailureCode, TransportUnavailable
from kvflow.ids import PeerId
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import (
    Backend,
    BackendError,
    CheckedList,
    Chunk,
    Envelope,
    PostedWork,
    decode_envelope,
    encode_envelope,
)
from kvflow.reads.bounds import OutOfBounds, check_inside, merge
from kvflow.reads.contract import Carrier, PeerAddress


@dataclass(slots=True, eq=False)
class _Exporter:
    """Memory that peers may read. A reader holds the lock, so the memory is not freed during a read."""

    regions: tuple[Region, ...]
    lock: threading.Lock = field(default_factory=threading.Lock)
    closed: bool = False


_exporters: dict[str, _Exporter] = {}
_exporters_lock = threading.Lock()


@dataclass(slots=True, eq=False)
class _Attachment:
    exporter: _Exporter
    epochs: Region
    prepared_lists: dict[int, CheckedList] = field(default_factory=dict)


class LoopbackBackend(Backend):
    """Move bytes between transports of one process. Raises TransportUnavailable for VRAM, or a name that is in use."""

    def __init__(self, agent_name: str, regions: Sequence[Region], epochs: Region) -> None:
        self._agent_name = agent_name
        self._peers: dict[PeerId, _Attachment] = {}
        self.metadata = encode_envelope(Envelope("loopback", agent_name, b""))
        if any(region.memory != "DRAM" for region in (*regions, epochs)):
            raise TransportUnavailable("loopback copies DRAM only", remedy="Use transport='nixl' for VRAM.")
        self._exporter = _Exporter((*regions, epochs))
        with _exporters_lock:
            if agent_name in _exporters:
                raise TransportUnavailable(f"there is an exporter {agent_name!r} already", remedy="Choose another.")
            _exporters[agent_name] = self._exporter

    def add(self, address: PeerAddress) -> Carrier:
        """Attach to an exporter of this process.

        Raises:
            BackendError: its metadata is malformed, there is no such exporter, or it does not export this epoch table.
        """
        try:
            envelope = decode_envelope(address.planes["loopback"], transport="loopback", agent=address.agent)
        except ValueError as error:
            raise BackendError(FailureCode.METADATA_INVALID, str(error)) from error
        with _exporters_lock:
            exporter = _exporters.get(envelope.agent)
        if exporter is None:
            raise BackendError(FailureCode.PEER_LOST, f"there is no exporter {envelope.agent!r} in this process")
        if address.epochs not in exporter.regions:
            raise BackendError(FailureCode.METADATA_INVALID, f"{envelope.agent!r} does not export {address.epochs}")
        self._peers[address.peer] = _Attachment(exporter, address.epochs)
        return Carrier("loopback", "kind")

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """Detach from a peer. No connection outlives it, whether it is ``gone`` or not."""
        self._peers.pop(peer_id, None)

    def prepare(self, prepared: CheckedList) -> None:
        """Keep a list for later posts. Raises BackendError: rows of the source lie outside of what the peer exports."""
        peer = self._peers[prepared.prepared_list.peer]
        try:
            check_inside(prepared.source, peer.exporter.regions, prepared.prepared_list.source_memory)
        except OutOfBounds as error:
            raise BackendError(FailureCode.BOUNDS, str(error)) from error
        peer.prepared_lists[prepared.prepared_list.list_id] = prepared

    def post(self, chunk: Chunk) -> PostedWork | int:
        """Copy the bytes of a chunk now, and return 0. Raises BackendError: the exporter has closed."""
        portion = chunk.portion
        peer = self._peers[portion.peer]
        prepared_list = peer.prepared_lists[portion.list_id]
        part = slice(chunk.first, chunk.stop)
        runs = merge(prepared_list.source, portion.source_index[part], prepared_list.target, portion.target_index[part])
        with peer.exporter.lock:
            _require_open(peer.exporter)
            for run in runs:
                ctypes.memmove(run.target_address, run.source_address, run.nbytes)
        return 0

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Return the values of the slots now. Raises BackendError: as ``post``."""
        peer = self._peers[peer_id]
        with peer.exporter.lock:
            _require_open(peer.exporter)
            slots = (ctypes.c_uint64 * (last + 1 - first)).from_address(peer.epochs.address + 8 * first)
            return list(slots)

    def ends_at_once(self, peer: PeerId) -> bool:
        """Return True: the post is the copy."""
        return True

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        """Raise ``NotImplementedError``: nothing is in flight after a post."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget every peer."""
        self._peers.clear()

    def close(self) -> None:
        """Withdraw the exporter: reads from it fail from now on."""
        with _exporters_lock:
            del _exporters[self._agent_name]
        with self._exporter.lock:
            self._exporter.closed = True


def _require_open(exporter: _Exporter) -> None:
    if exporter.closed:
        raise BackendError(FailureCode.PEER_LOST, "the exporter was closed")
