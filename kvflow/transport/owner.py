"""Everything a transport decides, without a thread: commands in, steps, events out.

The owner joins the ledger (what is next, what has ended) with a mover (how bytes move) and keeps the peers and
programs. It is driven by ``transport/threaded.py``; a test can drive it by hand.
"""

import logging
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import Struct

from kvflow.ids import PeerId
from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.transport.base import (
    RENEWAL_DRAIN_S,
    Carrier,
    Fence,
    FenceFailed,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    Program,
    Read,
    RenewalEnded,
    Sink,
    TransportEvent,
)
from kvflow.transport.bounds import (
    OutOfBounds,
    check_inside,
    check_read,
    check_rows,
    check_scatter,
    check_staged_read,
)
from kvflow.transport.ledger import NO_BUFFER, Chunk, Ledger, Reason, Work
from kvflow.transport.mover import Flight, MoveFailed, Mover, Prepared, Staged
from kvflow.transport.staging import StagingMemory, fetching

_logger = logging.getLogger(__name__)

REMOVED = Reason("cancelled", "the peer was removed")
CLOSING = Reason("cancelled", "the transport is closing")
RENEWED = Reason("peer_lost", "it did not answer, and the reader was renewed to end its reads")


class RemovePeer(Struct, frozen=True):
    """``Transport.remove_peer``."""

    peer: PeerId
    gone: bool = False


class Look(Struct, frozen=True):
    """``Transport.look``."""

    peer: PeerId
    fence: Fence


class CancelReads(Struct, frozen=True):
    """``Transport.cancel``."""

    read_ids: tuple[int, ...]


class RenewReader(Struct, frozen=True):
    """``Transport.renew_reader``."""


Command = PeerAddress | RemovePeer | Program | Read | Look | CancelReads | RenewReader


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer that was added. When ``leaving`` it only drains; ``again`` is what to add after that, unless ``gone``."""

    address: PeerAddress
    carrier: Carrier
    programs: dict[int, Prepared | Reason] = field(default_factory=dict)
    leaving: bool = False
    gone: bool = False
    again: PeerAddress | None = None


@dataclass(slots=True, eq=False)
class _Flying:
    """Work in flight. When ``stuck`` nobody knows when it ends: it ends with the agents."""

    work: Work
    flight: Flight
    posted_at: float
    stuck: bool = False


class Owner:
    """Serve the commands of one transport. Thread: one only.

    Args:
        mover: opened already.
        regions: what targets may lie in.
        sink: where events go.
        now: seconds of a monotonic clock.
        staging: buffers for staged programs.
    """

    def __init__(
        self,
        mover: Mover,
        regions: Sequence[Region],
        sink: Sink,
        now: Callable[[], float],
        staging: StagingMemory | None = None,
    ) -> None:
        self._mover = mover
        self._regions = tuple(regions)
        self._sink = sink
        self._now = now
        self._staging = staging or StagingMemory(0)
        self._ledger = Ledger(len(self._staging.buffers))
        self._peers: dict[PeerId, _Peer] = {}
        self._flying: list[_Flying] = []
        self._outbox: list[TransportEvent] = []
        self._renewing_since: float | None = None

    @property
    def in_flight(self) -> bool:
        """Tell whether something posted has not ended."""
        return bool(self._flying)

    @property
    def must_poll(self) -> bool:
        """Tell whether only asking again and again tells when something in flight has ended."""
        return any(flying.flight.polled for flying in self._flying)

    def handle(self, command: Command) -> None:
        """Take one command. Whatever it causes shows as events."""
        try:
            match command:
                case Read():
                    self._admit(command)
                case Look(peer, fence):
                    self._look(peer, fence)
                case CancelReads(read_ids):
                    self._emit(self._ledger.cancel(read_ids))
                case PeerAddress():
                    self._add(command)
                case Program():
                    self._prepare(command)
                case RemovePeer(peer, gone):
                    self._remove(peer, gone=gone)
                case RenewReader():
                    self._begin_renewal()
            self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - the thread outlives our own defects, and tells of them
            self._rescue(command, error)
        self._publish()

    def step(self) -> bool:
        """Post one chunk at most and the fences that are due, then ask about all in flight. False: nothing changed.

        What the step caused is published at its end: a look, its read and the fence wake the event loop once, and the
        loop does not fight this thread for the interpreter in between.
        """
        try:
            looked = self._post_fences()
            work = self._ledger.take() if self._renewing_since is None else None
            if work is not None:
                self._post(work)
            self._post_fences()
            before = len(self._flying)
            self._mover.progress()
            for flying in tuple(self._flying):
                self._poll(flying)
            landed = self._renew_if_drained() or len(self._flying) < before
            changed = looked or work is not None or landed
            if changed:
                self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - as above
            self._rescue(None, error)
            return True
        finally:
            self._publish()
        return changed

    def _post_fences(self) -> bool:
        """Post all fences that are due; False: there were none."""
        posted = False
        while self._ledger.fence_due and (fence := self._ledger.take()) is not None:
            self._post(fence)
            posted = True
        return posted

    def begin_close(self) -> None:
        """Drop everything that is not posted. Steps may go on until nothing is in flight."""
        self._renewing_since = None
        for peer in tuple(self._peers):
            self._leave(peer, CLOSING)
        self._publish()

    def end_close(self) -> None:
        """Destroy the agents, then report what was still in flight: now nothing of it writes any more."""
        self._mover.close()
        for flying in self._flying:
            self._emit(self._ledger.failed(flying.work, CLOSING))
        self._flying.clear()
        self._publish()

    def _begin_renewal(self) -> None:
        if self._renewing_since is None:
            self._renewing_since = self._now()
        self._renew_if_drained()

    def _renew_if_drained(self) -> bool:
        """Renew the reader once the peers that were not given up have landed, or have had their time for it.

        False: no renewal was asked for, or it has to wait.
        """
        since, now = self._renewing_since, self._now()
        if since is None:
            return False
        healthy = any(not flying.stuck and not self._peers[flying.work.peer].leaving for flying in self._flying)
        if healthy and now - since < RENEWAL_DRAIN_S:
            return False
        self._renewing_since = None
        ended = len(self._flying)
        if ended:
            self._renew()
        self._emit([RenewalEnded(ended, drain_s=now - since, renew_s=self._now() - now)])
        return True

    def _renew(self) -> None:
        """Destroy the reader, end all that is in flight, and give the next reader the peers that are left."""
        with suppress(MoveFailed):  # then no peer can be added below, and each says why
            self._mover.renew()
        flying, self._flying = self._flying, []
        for each in flying:
            self._fail(each.work, RENEWED)
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving:
                continue
            try:
                peer.carrier = self._mover.add(peer.address)
                for program in peer.programs.values():
                    if isinstance(program, Prepared):
                        self._mover.prepare(program)
            except MoveFailed as failure:
                self._lose(peer_id, Reason("peer_lost", failure.reason.detail))

    def _admit(self, read: Read) -> None:
        try:
            program = self._program_of(read)
            if program.staged is None:
                check_read(read, program.source, program.target)
            else:
                check_staged_read(read, program.staged.checked)
        except MoveFailed as failure:
            self._emit(self._ledger.refuse(read, failure.reason))
        except OutOfBounds as error:
            self._emit(self._ledger.refuse(read, Reason("bounds", str(error))))
        else:
            self._emit(self._ledger.admit(read, staged=program.staged is not None))

    def _look(self, peer_id: PeerId, fence: Fence) -> None:
        try:
            self._open(peer_id)
        except MoveFailed as failure:
            self._emit([FenceFailed(fence.fence_id, failure.reason.code, failure.reason.detail)])
        else:
            self._ledger.look(peer_id, fence)

    def _open(self, peer_id: PeerId) -> _Peer:
        peer = self._peers.get(peer_id)
        if peer is None or peer.leaving:
            raise MoveFailed("peer_lost", f"{peer_id} is not added")
        return peer

    def _program_of(self, read: Read) -> Prepared:
        peer = self._open(read.peer)
        program = peer.programs.get(read.program_id)
        if program is None:
            raise MoveFailed("program_unknown", f"program {read.program_id} of {read.peer} was not prepared")
        if isinstance(program, Reason):
            raise MoveFailed(program.code, program.detail)
        return program

    def _prepare(self, program: Program) -> None:
        peer = self._peers.get(program.peer)
        if peer is None or peer.leaving:
            return  # its reads fail as those of a peer that is not there
        assert program.program_id not in peer.programs, f"program id {program.program_id} is used twice"
        try:
            prepared = self._checked(program)
            self._mover.prepare(prepared)
        except OutOfBounds as error:
            peer.programs[program.program_id] = Reason("bounds", str(error))
        except MoveFailed as failure:
            peer.programs[program.program_id] = failure.reason
        else:
            peer.programs[program.program_id] = prepared

    def _checked(self, program: Program) -> Prepared:
        source, target = check_rows(program.source_rows), check_rows(program.target_rows)
        if program.scatter is None:
            check_inside(target, self._regions, program.target_memory)
            return Prepared(program, source, target)
        nbytes = self._staging.use.buffer_bytes
        checked = check_scatter(program, source, target, buffer_bytes=nbytes, regions=self._regions)
        return Prepared(program, source, self._staging.rows(target), Staged(checked, self._staging.scatterer(checked)))

    def _add(self, address: PeerAddress) -> None:
        peer = self._peers.get(address.peer)
        if peer is not None and peer.leaving:
            peer.again = address
            return
        if peer is None:
            try:
                _check_epochs(address.epochs)
                carrier = self._mover.add(address)
            except MoveFailed as failure:
                self._emit([PeerFailed(address.peer, failure.reason.code, failure.reason.detail)])
                return
            peer = self._peers[address.peer] = _Peer(address, carrier)
            self._ledger.open(address.peer)
        self._emit([PeerAdded(address.peer, peer.carrier)])

    def _remove(self, peer_id: PeerId, *, gone: bool) -> None:
        peer = self._peers.get(peer_id)
        if peer is None and gone:
            self._mover.remove(peer_id, gone=True)  # it was let go before, and only now is known not to come again
        if peer is not None and peer.again is not None:
            peer.again = None
            self._emit([PeerFailed(peer_id, "peer_lost", "removed before it could be added again")])
        if peer is not None:
            peer.gone = gone
            self._leave(peer_id, REMOVED)

    def _leave(self, peer_id: PeerId, reason: Reason) -> bool:
        """Stop using a peer; it is removed once nothing of it is in flight. False: it was leaving already."""
        peer = self._peers[peer_id]
        if peer.leaving:
            return False
        peer.leaving = True
        self._emit(self._ledger.abandon(peer_id, reason))
        self._mover.leave(peer_id)
        return True

    def _finish_leaving(self) -> None:
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving and self._ledger.drained(peer_id):
                del self._peers[peer_id]
                self._mover.remove(peer_id, gone=peer.gone)
                if peer.again is not None:
                    self._add(peer.again)

    def _lose(self, peer_id: PeerId, reason: Reason) -> None:
        """Stop using a peer whose connection has failed, and the peers that share it."""
        lost = self._peers.get(peer_id)
        for each, peer in self._peers.items():
            shares = lost is not None and peer.address.agent is not None and peer.address.agent == lost.address.agent
            if (peer is lost or shares) and self._leave(each, reason):
                self._emit([PeerFailed(each, reason.code, reason.detail)])

    def _post(self, work: Work) -> None:
        started = self._now()
        try:
            if isinstance(work, Chunk):
                staged = self._staged(work)
                outcome = self._mover.post(work if staged is None else fetching(work, staged.checked))
                self._ledger.posted(work, started, self._now())
            elif work.fence.slot in range(self._peers[work.peer].address.epochs.nbytes // 8):
                outcome = self._mover.post_fence(work.peer, work.fence, work.after)
            else:
                raise MoveFailed("bounds", f"{work.peer} has no epoch slot {work.fence.slot}")
        except MoveFailed as failure:
            self._fail(work, failure.reason)
        except Exception as error:
            if isinstance(work, Chunk):
                # Nobody knows whether it had begun to write: only the end of the agents proves that it does not.
                self._flying.append(_Flying(work, Flight(), started, stuck=True))
            else:
                self._fail(work, Reason("transport_error", repr(error)))
            raise
        else:
            if isinstance(outcome, Flight):
                self._flying.append(_Flying(work, outcome, started))
            else:
                self._land(work, outcome, started)

    def _poll(self, flying: _Flying) -> None:
        if flying.stuck:
            return
        try:
            outcome = self._mover.poll(flying.flight)
        except MoveFailed as failure:
            self._flying.remove(flying)
            self._fail(flying.work, failure.reason)
        except Exception:
            flying.stuck = True
            raise
        else:
            if outcome is not None:
                self._flying.remove(flying)
                self._land(flying.work, outcome, flying.posted_at, flying.flight.unheld)

    def _land(
        self, work: Work, value: int, posted_at: float, unheld: AbstractSet[tuple[int, int]] = frozenset()
    ) -> None:
        if isinstance(work, Chunk):
            self._scatter(work)
            self._emit(self._ledger.arrived(work, self._now(), unheld))
        else:
            self._emit(self._ledger.judged(work, value, self._now() - posted_at))

    def _staged(self, chunk: Chunk) -> Staged | None:
        """Return what a chunk's program needs to be staged; None if it is not."""
        if chunk.buffer == NO_BUFFER:
            return None
        program = self._peers[chunk.peer].programs[chunk.read.program_id]
        assert isinstance(program, Prepared)
        return program.staged

    def _scatter(self, chunk: Chunk) -> None:
        """Copy a chunk that has arrived from its buffer to where it belongs, unless nobody wants it any more."""
        staged = self._staged(chunk)
        if staged is None or not self._ledger.wanted(chunk):
            return
        started = self._now()
        try:
            content = self._staging.content(chunk.buffer)
            staged.scatterer.run(content, chunk.read.target_index[chunk.first : chunk.stop])
        except Exception as error:
            # Half of it may be there, but nothing writes any more: the read ends before the defect is told.
            self._emit(self._ledger.failed(chunk, Reason("transport_error", repr(error))))
            raise
        self._ledger.scattered(chunk, self._now() - started)

    def _fail(self, work: Work, reason: Reason) -> None:
        self._emit(self._ledger.failed(work, reason))
        if reason.code != "bounds":
            self._lose(work.peer, reason)

    def _rescue(self, command: Command | None, error: Exception) -> None:
        """Fail everything after a defect of our own: nobody may wait for ever."""
        _logger.error("kvflow.transport: unexpected error; all reads fail", exc_info=error)
        reason = Reason("transport_error", repr(error))
        if isinstance(command, PeerAddress) and command.peer not in self._peers:
            self._emit([PeerFailed(command.peer, reason.code, reason.detail)])
        if isinstance(command, Read) and command.read_id not in self._ledger.reads:
            self._emit(self._ledger.refuse(command, reason))
        for peer_id in tuple(self._peers):
            self._lose(peer_id, reason)

    def _emit(self, events: Sequence[TransportEvent]) -> None:
        self._outbox += events

    def _publish(self) -> None:
        self._staging.note(*self._ledger.staging(), self._ledger.waiting_for_buffer())
        events, self._outbox = self._outbox, []
        for event in events:
            try:
                self._sink(event)
            except Exception:
                _logger.exception("kvflow.transport: the sink raised; %r is lost", event)


def _check_epochs(epochs: Region) -> None:
    aligned = epochs.memory == "DRAM" and epochs.address % 8 == 0 and epochs.nbytes % 8 == 0
    if not aligned or epochs.nbytes > ADDRESS_MAX - epochs.address:
        raise MoveFailed("metadata_invalid", f"not a table of epochs: {epochs}")
