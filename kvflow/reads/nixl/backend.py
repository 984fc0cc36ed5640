"""NIXL as a data plane: two agents, prepared strided lists, and a code for each of NIXL's exceptions.

The exporter has a progress thread, which serves peers between our calls. The reader has one if a network card moves
bytes. Within a host it has none: the thread that posts also polls, a second one would compete with it for the lock of
the UCX worker, and UCX crashes if one without a device asks for the end of a GPU's copies (NIXL issue 2102).
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow.errors import FailureCode, TransportUnavailable
from kvflow.ids import Newest, PeerId
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.reads.backend import (
    Backend,
    BackendError,
    BackendFactory,
    CheckedList,
    Chunk,
    Envelope,
    PostedWork,
    decode_envelope,
    encode_envelope,
)
from kvflow.reads.contract import REQUIRED, SHARED_BYTES_MIN, UNKNOWN_CARRIER, Carrier, PeerAddress, Serving
from kvflow.reads.device import device_order_of
from kvflow.reads.nixl.binding import (
    ADDING,
    DEVICE,
    DEVICE_REMEDY,
    QUIET,
    REMEDIES,
    RESTART,
    SAME_NIXL,
    UCX_TELLS,
    Agent,
    error_types,
    failure_of,
    load_binding,
    may_copy_from,
    published_settings,
    words_of,
)
from kvflow.reads.nixl.copying import Helpers, Pieces, RemotePeer
from kvflow.reads.nixl.metadata import carrier_between, difference, inspect, inspect_own, is_within_a_host, renamed
from kvflow.reads.nixl.reading import SPANS, Posted, ReadingAgent
from kvflow.reads.reach import expects_more, host_facts, unreached
from kvflow.reads.staging import StagingMemory

if TYPE_CHECKING:
    from kvflow.memory.device import TorchDeviceOrder

_logger = logging.getLogger(__name__)

_QUEUED_DESCRIPTORS_MAX = 8192
_COPIED_DESCRIPTORS_MAX = 1024
"""Most descriptors of one post: a network card takes 0.1 to 0.3 us to queue each, and a GPU's driver 4 to 7 us to start
each copy. The figures come from sources and reports, and are not measured here."""

_HELPER_SPANS = 64  # scratch memory of a helper's agent, for pieces that have failed and not ended

_KEPT_MAX = 64
"""Connections to peers that were removed, in case they come again. The kernel of a dead peer closes its own."""


_LOADS_MAX = 8
"""How often metadata may fail under other names: each time NIXL keeps a connection, 40 KB within a host."""

_FAILED_MAX = 256  # metadata whose failures are remembered


class _IdleConnection(NamedTuple):
    """A connection that may be used again."""

    peer: PeerId
    blob: bytes


class Uses(NamedTuple):
    """What a worker does with its cache, as far as that decides what NIXL registers: its role, and ``Agent.sleeps``.

    A ``consumer`` exports its epoch table only. A ``producer`` registers its cache for reads only when it reads.
    """

    role: str = "both"
    sleeps: bool = False


USUAL = Uses()


class NixlBackend(Backend):
    """Move bytes with NIXL.

    Args:
        agent_name: unique per incarnation.
        regions: the cache.
        staging: memory that only the reader knows.
        known_only: refuse peers whose transport cannot be determined.
        reader_progress: run a progress thread at the reader, too: without it UCX passes on what a network card's queue
            could not hold only in our polls. None: if this host has a network that UCX uses.
        copy_threads: threads that copy a large chunk, if the post is the copy; all but one have agents of their own.
        params: ``WorkerConfig.nixl_backend_params``, for all agents.

    Raises:
        TransportUnavailable: NIXL cannot be loaded, UCX cannot start, or the memory is refused.
    """

    log_level = QUIET
    remedy = ""
    kept_max = _KEPT_MAX

    def __init__(
        self,
        agent_name: str,
        regions: Sequence[Region],
        epochs: Region,
        staging: Sequence[Region] = (),
        *,
        uses: Uses = USUAL,
        known_only: bool = False,
        reader_progress: bool | None = None,
        copy_threads: int = 1,
        params: Mapping[str, str] | None = None,
    ) -> None:
        binding = load_binding(self.log_level)
        self._make_agent = partial(Agent, binding, params=params, sleeps=uses.sleeps)
        self._uses = uses
        self._agent_name = agent_name
        self._regions = (*regions, *staging)
        self._settings = published_settings(binding, os.environ, params or {})
        self._known_only = known_only
        self._errors = error_types(binding)
        self._peers: dict[PeerId, RemotePeer] = {}
        self._kept: dict[str, _IdleConnection] = {}
        self._failed: Newest[bytes, int] = Newest(_FAILED_MAX)  # digest of metadata -> loads that have failed
        self._numbers = count()
        refusals: tuple[type[Exception], ...] = (ValueError, *self._errors)
        try:
            with ExitStack() as exporting:
                exporter = self._make_agent(exporter_name(agent_name), progress=True)
                exporting.callback(exporter.destroy)
                exporter.register([epochs] if uses.role == "consumer" else [*regions, epochs])
                on_device = any(region.memory == "VRAM" for region in regions)
                self._facts = host_facts(on_device=on_device, prefixes=("UCX_TLS",))
                envelope = Envelope("nixl", exporter_name(agent_name), exporter.metadata(), self._settings, self._facts)
                self.metadata = encode_envelope(envelope)
                self._ours = inspect_own(envelope, on_device=on_device)
                # Within a host it reads without a message to the exporter's process, in which nothing can then fail.
                self._connects = self._ours is None or self._ours.has_network
                self._progress = self._connects if reader_progress is None else reader_progress
                helpers = 0 if self._progress else max(0, copy_threads - 1)
                self._helpers = Helpers(partial(self._make_reader, _HELPER_SPANS), helpers, self._errors)
                self._reader_is_gone = uses.role == "producer"
                if not self._reader_is_gone:
                    self._reader = self._make_reader()
                self._exporting = exporting.pop_all()
        except refusals as error:
            set_here = [each for each in REMEDIES if each in os.environ]
            hint = "".join(f"; {each} is {os.environ[each]!r}" for each in set_here)
            hint += f"; nixl_backend_params is {params!r}" if params else ""
            advice = " ".join(REMEDIES[each] for each in set_here)
            remedy = self.remedy or (hint and f"{advice} {UCX_TELLS}".lstrip())
            name = binding.__name__.partition(".")[0]
            raise TransportUnavailable(f"NIXL cannot start: {words_of(error)}{hint} ({name})", remedy=remedy) from error

    def add(self, address: PeerAddress) -> Carrier:
        """Load the metadata of a peer's agent, or use a connection that was kept, and prepare to read its epoch table.

        Raises:
            BackendError: with code ``metadata_invalid`` the metadata is malformed, or another agent's; with
                ``plane_unfit`` the UCX of both sides do not fit, or the bytes may not go unencrypted; with others NIXL
                failed, or another peer on the same connection has.
        """
        try:
            agent = None if address.agent is None else exporter_name(address.agent)
            envelope = decode_envelope(address.planes["nixl"], transport="nixl", agent=agent)
            carrier = self._carrier_of(envelope, encrypted=address.encrypted)
        except ValueError as error:
            raise BackendError(FailureCode.METADATA_INVALID, str(error)) from error
        self._require_reader()
        epochs = address.epochs
        rows = np.array([[epochs.address, 8, 0, 8, epochs.nbytes // 8]], dtype=np.int64)
        sharing = self._sharing(envelope.agent)
        try:
            peer = self._share(sharing[0], envelope, rows) if sharing else self._connect(envelope, rows)
        except self._errors as error:
            if not sharing:
                self._forget(envelope.agent)
            raise failure_of(ADDING, error) from error
        peer.carrier = carrier.name
        self._peers[address.peer] = peer
        return carrier

    def remove(self, peer_id: PeerId, *, gone: bool) -> None:
        """Release a peer's lists. Its connection is kept, unless it failed or the peer is ``gone``."""
        peer = self._peers.pop(peer_id, None)
        if peer is None:
            if gone:
                self._drop_kept(peer_id)
            return
        for each in (peer, *peer.beside.values()):
            for handle in (each.epochs, *chain.from_iterable(each.handles.values())):
                each.reader.agent.release_list(handle)
        sharing = self._sharing(peer.agent)
        if sharing:  # the last of them closes the connection: before that, reads of another one may be in flight
            sharing[0].failed |= peer.failed or gone
            return
        if peer.failed or gone:
            self._forget(peer.agent)
            return
        # Over shared memory, too, UCX has a socket to each peer, and closing our end of it leaves both open for as long
        # as both processes live: the other agent still counts on it. So a peer that comes again gets the same one.
        self._kept[peer.agent] = _IdleConnection(peer_id, peer.blob)
        if len(self._kept) > self.kept_max:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._forget(oldest)

    def prepare(self, prepared: CheckedList) -> None:
        """Prepare both lists of a list, as rows of Nx5, at the reader. Raises BackendError: NIXL refuses them."""
        peer = self._peers[prepared.prepared_list.peer]
        self._reader.prepare(peer, prepared)
        peer.lists[prepared.prepared_list.list_id] = prepared

    def post(self, chunk: Chunk) -> PostedWork | int:
        """Post a chunk to the reader. A large one, whose post is the copy, is cut among the threads that copy."""
        peer = self._peers[chunk.portion.peer]
        post = self._reader.post if chunk.portion.nbytes < SHARED_BYTES_MIN else self._helpers.post
        return post(peer, chunk)

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Read the slots with NIXL. The values are known at once where the post is the copy."""
        return self._reader.check(self._peers[peer_id], first, last + 1 - first)

    def ends_at_once(self, peer_id: PeerId) -> bool:
        """Return True: over shared memory the post is the copy; over RDMA it is short, too."""
        return True

    def chunk_descriptors(self, peer_id: PeerId) -> int:
        """Return what a GPU or a network card takes at once; 0 where the post is the copy."""
        carrier = self._peers[peer_id].carrier
        if "cuda_ipc" in carrier:  # a GPU copies without our help
            return _COPIED_DESCRIPTORS_MAX
        if not self._reader.progress:
            return 0
        return _COPIED_DESCRIPTORS_MAX if carrier == UNKNOWN_CARRIER.name else _QUEUED_DESCRIPTORS_MAX

    def poll(self, posted: PostedWork) -> int | Sequence[int] | None:
        """Ask NIXL once about work in flight, all pieces of a chunk that was cut."""
        assert isinstance(posted, Posted | Pieces)
        return posted.poll()

    def reset(self) -> None:
        """Destroy the reader with all that is in flight, and make another.

        Raises:
            BackendError: NIXL makes none; each ``add`` tries again.
        """
        # The handles in flight are not released: that stops nothing, and only the end of their agent does.
        for known in (self._peers, self._kept, self._failed):
            known.clear()
        if not self._reader_is_gone:
            self._destroy_reader()
            self._reader_is_gone = True
        self._require_reader()

    def close(self) -> None:
        """Destroy the reader, then the exporter, even if destroying the reader fails."""
        with self._exporting:  # is destroyed after the reader, even if destroying that fails
            if not self._reader_is_gone:
                self._destroy_reader()

    def _destroy_reader(self) -> None:
        with ExitStack() as destroying:
            destroying.callback(self._reader.agent.destroy)
            self._helpers.close()

    def _connect(self, envelope: Envelope, epochs: npt.NDArray[np.int64]) -> RemotePeer:
        """Prepare to read an epoch table, over a kept connection if there is one that has not failed."""
        kept = self._kept.pop(envelope.agent, None)
        if kept is not None and kept.blob == envelope.blob:
            with suppress(*self._errors):
                prepared = self._reader.agent.prepare_remote(envelope.agent, epochs, "DRAM")
                return RemotePeer(self._reader, envelope.agent, prepared, blob=envelope.blob, rows=epochs)
        if kept is not None:
            self._forget(envelope.agent)
        agent, blob = self._load(envelope)
        prepared = self._reader.agent.prepare_remote(agent, epochs, "DRAM")
        return RemotePeer(self._reader, agent, prepared, blob=blob, rows=epochs)

    def _load(self, envelope: Envelope) -> tuple[str, bytes]:
        """Load the metadata of an exporter; return the name that our agent knows it by, and its metadata so named.

        If a load fails after it has connected, NIXL keeps the connection, and refuses the name until its agent is
        destroyed. So what it refuses is loaded under another name, a few times: a member that lies in the name of a
        peer keeps nobody from that peer.
        """
        load = self._reader.agent.add_remote
        try:
            agent = load(envelope.blob)
        except self._errors as error:
            if self._ours is None or failure_of(ADDING, error).reason.code != FailureCode.METADATA_INVALID:
                raise
            digest = hashlib.sha256(envelope.blob).digest()
            failures = self._failed.get(digest, 0)
            if failures >= _LOADS_MAX:
                detail = f"{envelope.agent!r} could not be connected {failures} times, and is not tried again"
                raise BackendError(FailureCode.PEER_LOST, detail, RESTART) from error
            blob = renamed(envelope.blob, envelope.agent, f"{envelope.agent}/{next(self._numbers)}")
            try:
                return load(blob), blob
            except self._errors:
                self._failed[digest] = failures + 1
                raise
        if agent != envelope.agent:
            if not self._sharing(agent):
                self._kept.pop(agent, None)
                self._forget(agent)  # never another peer's: its reads would go on writing, unseen
            raise BackendError(FailureCode.METADATA_INVALID, f"{envelope.agent!r} calls itself {agent!r}")
        return agent, envelope.blob

    def _carrier_of(self, envelope: Envelope, *, encrypted: bool) -> Carrier:
        """Return what carries a peer's bytes, if the peer need do nothing for it, and the bytes may be plain."""
        loud = expects_more(self._facts, envelope.facts)
        if differing := difference(self._settings, envelope.settings):
            raise BackendError(FailureCode.PLANE_UNFIT, differing, SAME_NIXL if loud else "")
        carrier: Carrier | None = UNKNOWN_CARRIER
        near = False
        if self._ours is not None:
            theirs = inspect(envelope.blob, envelope.agent)
            carrier = carrier_between(self._ours, theirs, may_copy_from)
            near = is_within_a_host(self._ours, theirs, may_copy_from)
        if encrypted and not near:
            raise BackendError(FailureCode.PLANE_UNFIT, f"{REQUIRED}, and NIXL does not encrypt between hosts")
        if carrier is None:
            raise BackendError(FailureCode.PLANE_UNFIT, *unreached(self._facts, envelope.facts))
        if self._known_only and carrier == UNKNOWN_CARRIER:
            detail = "the transports of UCX on both sides cannot be compared, and may need the other process"
            raise BackendError(FailureCode.PLANE_UNFIT, detail, SAME_NIXL if loud else "")
        return carrier

    def _sharing(self, agent: str) -> list[RemotePeer]:
        """Return the peers that are read over the connection to an exporter."""
        return [peer for peer in self._peers.values() if peer.agent == agent]

    def _share(self, known: RemotePeer, envelope: Envelope, epochs: npt.NDArray[np.int64]) -> RemotePeer:
        """Prepare to read an epoch table over a connection that another peer has: it is the same worker."""
        if known.blob != envelope.blob:
            raise BackendError(FailureCode.METADATA_INVALID, f"{envelope.agent!r} is another peer already")
        if any(peer.failed for peer in self._sharing(known.agent)):
            raise BackendError(FailureCode.PEER_LOST, f"the connection to {known.agent!r} failed; its reads still end")
        prepared = self._reader.agent.prepare_remote(known.agent, epochs, "DRAM")
        return RemotePeer(self._reader, known.agent, prepared, blob=known.blob, rows=epochs)

    def _make_reader(self, spans: int = SPANS) -> ReadingAgent:
        # Each has another name: peers that hang may still know an earlier one.
        make = partial(self._make_agent, f"{self._agent_name}/reader/{next(self._numbers)}", connects=self._connects)
        return ReadingAgent(make, self._regions, self._errors, progress=self._progress, spans=spans)

    def _require_reader(self) -> None:
        """Make a reader if there is none: a producer has none before it reads, or the last reset made none."""
        if self._reader_is_gone:
            try:
                self._reader = self._make_reader()
            except self._errors as error:
                raise BackendError(FailureCode.TRANSPORT_ERROR, f"no new reader: {words_of(error)}") from error
            self._reader_is_gone = False

    def _drop_kept(self, peer_id: PeerId) -> None:
        for agent in [agent for agent, kept in self._kept.items() if kept.peer == peer_id]:
            del self._kept[agent]
            self._forget(agent)

    def _forget(self, agent: str) -> None:
        self._helpers.forget(agent)
        with suppress(*self._errors):  # NIXL forgets a peer when its endpoint fails
            self._reader.agent.remove_remote(agent)


class DeviceNixlBackend(NixlBackend):
    """``NixlBackend`` for a cache in device memory. All calls come from the read thread, which enters the device."""

    log_level = DEVICE
    remedy = DEVICE_REMEDY
    kept_max = 0  # over cuda_ipc the memory of a peer is mapped, and its GPU does not free what is mapped

    def __init__(self, device: "TorchDeviceOrder", *arguments: Any, **options: Any) -> None:
        self._device = device
        device.enter()  # otherwise UCX may not know the device, and reach it over the wrong card or over TCP
        super().__init__(*arguments, **options)

    def ends_at_once(self, peer_id: PeerId) -> bool:
        """Return False: a device copies later, and only the read thread has entered it."""
        return False

    def post_check(
        self, peer_id: PeerId, first: int, last: int, reads: Sequence[tuple[int, LeaseName]], *, fence: bool
    ) -> PostedWork | Sequence[int]:
        """Read the slots; before a fence, make what has arrived visible to the kernels of the device.

        Raises:
            BackendError: the device failed, or as the class above says.
        """
        if fence and self._reader.has_arrived:  # once for all due fences: on ROCm it waits for the engine's step
            try:
                self._device.make_visible()
            except RuntimeError as error:  # of torch or the driver
                raise BackendError(FailureCode.TRANSPORT_ERROR, f"the device failed: {error}") from error
            self._reader.has_arrived = False
        return super().post_check(peer_id, first, last, reads, fence=fence)

    def _destroy_reader(self) -> None:
        # UCX destroys its streams without waiting, and CUDA continues the copies that are queued on them.
        super()._destroy_reader()
        try:
            self._device.settle()
        except RuntimeError:  # an error of torch: after it the device runs nothing of this process
            _logger.exception("kvflow.reads: the device failed while its last copies were awaited")


def nixl_factory(agent_name: str, staging: StagingMemory, **options: Any) -> BackendFactory:
    """Return the function that opens the NIXL plane of one worker. The options are those of ``NixlBackend``."""

    # Peers read our memory without our help, so there is nothing to serve and no descriptor to wait for.
    def open_nixl(regions: Sequence[Region], epochs: Region, _serving: Serving) -> NixlBackend:
        if all(region.memory == "DRAM" for region in regions):
            return NixlBackend(agent_name, regions, epochs, staging.regions, **options)
        options["copy_threads"] = 1  # a device copies without our help
        return DeviceNixlBackend(device_order_of(regions), agent_name, regions, epochs, staging.regions, **options)

    return open_nixl


def exporter_name(agent_name: str) -> str:
    """Return the name of the NIXL agent that peers of this worker read from."""
    return f"{agent_name}/exporter"
