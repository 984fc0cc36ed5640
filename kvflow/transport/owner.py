"""Everything a transport decides, without a thread: commands in, steps, events out.

The owner joins the lanes (what is next, what has ended) with a mover (how bytes move) and keeps the peers and
programs. It is driven by ``transport/threaded.py``; a test can drive it by hand.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from kvflow.cache.epochs import judge
from kvflow.ids import PeerId
from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.transfer.requests import RankRead, ReadEnded
from kvflow.transport.base import (
    RESET_DRAIN_S,
    Carrier,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    Program,
    ReaderReset,
    Sink,
    TransportEvent,
)
from kvflow.transport.bounds import EPOCH_MAX, OutOfBounds, check_pairs
from kvflow.transport.commands import CancelReads, Command, PostReads, RemovePeer, ResetReader
from kvflow.transport.lanes import Lanes
from kvflow.transport.mover import NO_BUFFER, Chunk, Flight, MoveFailed, Mover, Movers, Prepared, Reason, Share
from kvflow.transport.open_reads import Carried, Check, Work
from kvflow.transport.post_costs import BYTE_S, DESCRIPTOR_S, POST_S, READ_S, PostCosts
from kvflow.transport.programs import bind_portion, check_program, fetching
from kvflow.transport.staging import StagingMemory

_logger = logging.getLogger(__name__)

WEIGHT_MAX = 64
"""Chunks of one turn of a peer, at most."""

REMOVED = Reason("cancelled", "the peer was removed")
CLOSING = Reason("cancelled", "the transport is closing")
RESET = Reason("peer_lost", "it did not answer, and the reader was reset to end its reads")


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer that was added.

    Attributes:
        mover: what reads from it.
        slots: of its epoch table.
        costs: of posts for it; None: they have not ended when they return, so that none is made inline.
        met: whether it was read from over its present connection.
        leaving: whether it only drains.
        gone: whether it never comes again.
        again: what to add when it has drained, unless it is gone.
    """

    address: PeerAddress
    carrier: Carrier
    mover: Mover
    slots: int
    costs: PostCosts | None
    met: bool = False
    programs: dict[int, Prepared | Reason] = field(default_factory=dict)
    leaving: bool = False
    gone: bool = False
    again: PeerAddress | None = None


@dataclass(slots=True, eq=False)
class _Flying:
    """Work in flight. When ``stuck`` nobody knows when it ends: it ends with the agents."""

    work: Work
    flight: Flight
    stuck: bool = False


class Owner:
    """Serve the commands of one transport. Thread: one at a time.

    Args:
        mover: opened already.
        regions: what targets may lie in.
        sink: where events go.
        now: seconds of a monotonic clock.
        staging: buffers for staged programs.
    """

    def __init__(
        self,
        mover: Movers,
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
        self._outbox: list[TransportEvent] = []
        self._lanes = Lanes(self._tell, now, len(self._staging.buffers))
        self._peers: dict[PeerId, _Peer] = {}
        self._leaving = 0
        self._flying: list[_Flying] = []
        self._resetting_since: float | None = None

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
                case PostReads(reads):
                    for read in reads:
                        self._admit(read)
                case CancelReads(read_ids):
                    self._lanes.cancel(read_ids)
                case PeerAddress():
                    self._add(command)
                case Program():
                    self._prepare(command)
                case RemovePeer(peer, gone):
                    self._remove(peer, gone=gone)
                case ResetReader():
                    self._begin_reset()
            self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - the thread outlives our own defects, and tells of them
            self._rescue(command, error)
        self._publish()

    def step(self) -> bool:
        """Post one chunk at most and the checks that are due, then ask about all in flight. False: nothing changed.

        What the step caused is published at its end: a first check, its chunk and the fence wake the event loop once,
        and the loop does not fight this thread for the interpreter in between.
        """
        try:
            posted = self._post_next()
            before = len(self._flying)
            self._mover.progress()
            for flying in tuple(self._flying):
                self._poll(flying)
            changed = self._reset_if_drained() or posted or len(self._flying) < before
            if changed:
                self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - as above
            self._rescue(None, error)
            return True
        finally:
            self._publish()
        return changed

    def post_inline(self, reads: Sequence[RankRead], within_s: float) -> list[ReadEnded] | None:
        """Move reads at once, if nothing else is open and they are expected to take no longer than ``within_s``.

        Returns:
            The answers that are known by now; the others follow by steps. None: nothing was done.
        """
        if self._flying or self._lanes.reads or self._leaving or self._resetting_since is not None:
            return None
        found = self._fits_inline(reads, within_s)
        if found is None:
            return None
        try:
            if len(found) == 1 == len(reads):
                ended = self._move(*found[0])
                if ended is not None:
                    return [ended]
            else:
                for read in reads:
                    self._admit(read)
            while self._lanes.reads and self._post_next():
                pass
            self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - as above
            self._rescue(PostReads(tuple(reads)), error)
        events, self._outbox = self._outbox, []
        answers = [event for event in events if type(event) is ReadEnded]
        if len(answers) < len(events):
            self._outbox = [event for event in events if type(event) is not ReadEnded]
            self._publish()
        return answers

    def _fits_inline(
        self, reads: Sequence[RankRead], within_s: float
    ) -> list[tuple[RankRead, _Peer, PostCosts, list[Prepared]]] | None:
        """Return what is known of those reads whose parts are a chunk each; None if some do not fit."""
        known = []
        for read in reads:
            peer = self._peers.get(read.peer)
            if peer is None or peer.costs is None or not peer.met:
                return None
            programs, work_s, whole = [], 0.0, not read.check_first
            for part in read.parts:
                program, pairs = peer.programs.get(part.program_id), len(part.pairs.source)
                if type(program) is not Prepared or program.staged is not None:
                    return None
                programs.append(program)
                work_s += POST_S + pairs * program.pair_s
                whole = whole and pairs <= program.chunk_pairs
            within_s -= READ_S + peer.costs.ratio * work_s
            if within_s < 0:
                return None
            if whole:
                known.append((read, peer, peer.costs, programs))
        return known

    def _move(self, read: RankRead, peer: _Peer, costs: PostCosts, programs: Sequence[Prepared]) -> ReadEnded | None:
        """Post and fence the only open read, whose parts are a chunk each.

        Returns:
            Its answer. None: it goes on by steps, because something of it did not end at once, or has failed.
        """
        peer_id, read_id, lease, now, mover = read.peer, read.read_id, read.lease, self._now, peer.mover
        posts, nbytes, bind_s, post_s = 0, 0, 0.0, 0.0
        read.started_at = started_at = arrived_at = now()
        outcome: Flight | Sequence[int] | int
        try:
            _check_lease(read, peer)
            for part, program in zip(read.parts, programs, strict=True):
                check_pairs(part.pairs, program.source_units, program.target_units)
                pairs = len(part.pairs.source)
                portion = bind_portion(program, part.pairs, (Share(read_id, lease, pairs),))
                bound_at = now()
                outcome = mover.post(Chunk(portion, 0, len(portion.source_index)))
                if outcome != 0:
                    break
                bind_s += bound_at - arrived_at
                arrived_at = now()
                post_s += arrived_at - bound_at
                costs.learn(arrived_at - bound_at, POST_S + pairs * program.pair_s)
                nbytes += portion.nbytes
                posts += 1
            else:
                slot = lease.slot
                outcome = mover.post_check(peer_id, slot, slot, ((read_id, lease),), fence=True)
        except OutOfBounds as error:
            self._refuse(read, Reason("bounds", str(error)))
        except Exception as error:  # noqa: BLE001 - told, or raised again
            self._fall(self._enter(read, programs, posts), error)
        else:
            if not isinstance(outcome, Flight):
                assert not isinstance(outcome, int)
                (observed,) = outcome
                return ReadEnded(
                    read_id=read_id,
                    verdict=judge(lease.epoch, observed),
                    observed=observed,
                    nbytes=nbytes,
                    chunks=posts,
                    started_at=started_at,
                    arrived_at=arrived_at,
                    bind_s=bind_s,
                    post_s=post_s,
                    fence_s=now() - arrived_at,
                )
            self._flying.append(_Flying(self._enter(read, programs, posts), outcome))
        return None

    def _enter(self, read: RankRead, programs: Sequence[Prepared], posts: int) -> Work:
        """Enter a read into the lanes after so many of its posts have ended, and return what was posted after them."""
        lanes = self._lanes
        lanes.admit(read, programs)
        for _ in range(posts):
            carried = lanes.take_chunk()
            assert carried is not None
            lanes.arrived(carried)
        work = lanes.take_check() or lanes.take_chunk()
        assert work is not None
        return work

    def _post_next(self) -> bool:
        """Post all checks that are due, one chunk, and the fences that it leads to; False: there was nothing."""
        posted = False
        carried = None
        while True:
            while (check := self._lanes.take_check()) is not None:
                self._post(check)
                posted = True
            if carried is not None or self._resetting_since is not None:
                return posted
            carried = self._lanes.take_chunk()
            if carried is None:
                return posted
            self._post(carried)
            posted = True

    def begin_close(self) -> None:
        """Drop everything that is not posted. Steps may go on until nothing is in flight."""
        self._resetting_since = None
        for peer in tuple(self._peers):
            self._leave(peer, CLOSING)
        self._publish()

    def end_close(self) -> None:
        """Destroy the agents, then report what was still in flight: now nothing of it writes any more."""
        self._mover.close()
        for flying in self._flying:
            self._lanes.failed(flying.work, CLOSING)
        self._flying.clear()
        self._publish()

    def _begin_reset(self) -> None:
        if self._resetting_since is None:
            self._resetting_since = self._now()
        self._reset_if_drained()

    def _reset_if_drained(self) -> bool:
        """Reset the reader once the peers that were not given up have nothing in flight, or have had their time for it.

        False: no reset was asked for, or it has to wait.
        """
        since = self._resetting_since
        if since is None:
            return False
        now = self._now()
        healthy = any(not flying.stuck and flying.work.lane.closed is None for flying in self._flying)
        if healthy and now - since < RESET_DRAIN_S:
            return False
        self._resetting_since = None
        ended = len(self._flying)
        if ended:
            self._reset()
        self._tell(ReaderReset(ended, drain_s=now - since, reset_s=self._now() - now))
        return True

    def _reset(self) -> None:
        """Destroy the reader, end all that is in flight, and give the next reader the peers that are left."""
        with suppress(MoveFailed):  # then no peer can be added below, and each says why
            self._mover.reset()
        flying, self._flying = self._flying, []
        for each in flying:
            self._fail(each.work, RESET)
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving:
                continue
            peer.met = False
            try:
                peer.carrier = self._mover.add(peer.address)
                peer.mover = self._mover.of(peer_id)
                for program in peer.programs.values():
                    if isinstance(program, Prepared):
                        peer.mover.prepare(program)
            except MoveFailed as failure:
                self._lose(peer_id, Reason("peer_lost", failure.reason.detail))

    def _admit(self, read: RankRead) -> None:
        """Check a read before anything of it is posted. If it cannot be served, it ends alone."""
        try:
            peer = self._peers.get(read.peer)
            if peer is None or peer.leaving:
                raise MoveFailed("peer_lost", f"{read.peer} is not added")
            _check_lease(read, peer)
            programs = []
            for part in read.parts:
                program = peer.programs.get(part.program_id)
                if not isinstance(program, Prepared):
                    raise _unusable(program, part.program_id, read.peer)
                check_pairs(part.pairs, program.source_units, program.target_units)
                programs.append(program)
        except MoveFailed as failure:
            self._refuse(read, failure.reason)
        except OutOfBounds as error:
            self._refuse(read, Reason("bounds", str(error)))
        else:
            self._lanes.admit(read, programs)

    def _refuse(self, read: RankRead, reason: Reason) -> None:
        self._tell(ReadEnded(read.read_id, "failed", reason.code, reason.detail, phase="queue"))

    def _prepare(self, program: Program) -> None:
        peer = self._peers.get(program.peer)
        if peer is None or peer.leaving:
            return  # its reads fail as those of a peer that is not there
        assert program.program_id not in peer.programs, f"program id {program.program_id} is used twice"
        try:
            prepared = check_program(program, self._regions, self._staging)
            peer.mover.prepare(prepared)
        except OutOfBounds as error:
            peer.programs[program.program_id] = Reason("bounds", str(error))
        except MoveFailed as failure:
            peer.programs[program.program_id] = failure.reason
        else:
            peer.programs[program.program_id] = prepared

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
                self._tell(PeerFailed(address.peer, failure.reason.code, failure.reason.detail))
                return
            mover = self._mover.of(address.peer)
            costs = PostCosts() if mover.ends_at_once(address.peer) else None
            peer = self._peers[address.peer] = _Peer(address, carrier, mover, address.epochs.nbytes // 8, costs)
            self._lanes.open(address.peer, min(max(address.weight, 1), WEIGHT_MAX))
        self._tell(PeerAdded(address.peer, peer.carrier))

    def _remove(self, peer_id: PeerId, *, gone: bool) -> None:
        peer = self._peers.get(peer_id)
        if peer is None and gone:
            self._mover.remove(peer_id, gone=True)  # it was removed before, and only now is known not to come again
        if peer is not None and peer.again is not None:
            peer.again = None
            self._tell(PeerFailed(peer_id, "peer_lost", "removed before it could be added again"))
        if peer is not None:
            peer.gone = gone
            self._leave(peer_id, REMOVED)

    def _leave(self, peer_id: PeerId, reason: Reason) -> bool:
        """Stop using a peer; it is removed once nothing of it is in flight. False: it was leaving already."""
        peer = self._peers[peer_id]
        if peer.leaving:
            return False
        peer.leaving = True
        self._leaving += 1
        self._lanes.abandon(peer_id, reason)
        peer.mover.leave(peer_id)
        return True

    def _finish_leaving(self) -> None:
        if not self._leaving:
            return
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving and self._lanes.drained(peer_id):
                del self._peers[peer_id]
                self._leaving -= 1
                self._mover.remove(peer_id, gone=peer.gone)
                if peer.again is not None:
                    self._add(peer.again)

    def _lose(self, peer_id: PeerId, reason: Reason) -> None:
        """Stop using a peer whose connection has failed, and the peers that share it."""
        lost = self._peers.get(peer_id)
        for each, peer in self._peers.items():
            shares = lost is not None and peer.address.agent is not None and peer.address.agent == lost.address.agent
            if (peer is lost or shares) and self._leave(each, reason):
                self._tell(PeerFailed(each, reason.code, reason.detail))

    def _post(self, work: Work) -> None:
        try:
            outcome = self._post_check(work) if isinstance(work, Check) else self._post_chunk(work)
        except Exception as error:  # noqa: BLE001 - told, or raised again
            self._fall(work, error)
        else:
            if isinstance(outcome, Flight):
                self._flying.append(_Flying(work, outcome))
            else:
                self._land(work, outcome, None)

    def _fall(self, work: Work, error: Exception) -> None:
        """Take what a post has raised."""
        if isinstance(error, MoveFailed):
            self._fail(work, error.reason)
            return
        if isinstance(work, Check):
            self._fail(work, Reason("transport_error", repr(error)))
        else:
            # It may have begun to write: only the end of the agents proves that it does not.
            self._flying.append(_Flying(work, Flight(), stuck=True))
        raise error

    def _post_check(self, check: Check) -> Flight | Sequence[int]:
        reads = [(opened.read.read_id, opened.read.lease) for opened in check.reads]
        peer = check.lane.peer
        return self._peers[peer].mover.post_check(peer, check.first, check.last, reads, fence=check.fence)

    def _post_chunk(self, carried: Carried) -> Flight | int:
        chunk, staged = carried.chunk, carried.program.staged
        peer = self._peers[carried.lane.peer]
        started = self._now()
        outcome = peer.mover.post(chunk if staged is None else fetching(chunk, staged.checked))
        carried.post_s = self._now() - started
        if peer.costs is not None:
            work_s = (chunk.stop - chunk.first) * DESCRIPTOR_S + carried.nbytes * BYTE_S
            peer.costs.learn(carried.post_s, POST_S + work_s)
        return outcome

    def _poll(self, flying: _Flying) -> None:
        if flying.stuck:
            return
        try:
            outcome = self._peers[flying.work.lane.peer].mover.poll(flying.flight)
        except MoveFailed as failure:
            self._flying.remove(flying)
            self._fail(flying.work, failure.reason)
        except Exception:
            flying.stuck = True
            raise
        else:
            if outcome is not None:
                self._flying.remove(flying)
                self._land(flying.work, outcome, flying.flight)

    def _land(self, work: Work, outcome: int | Sequence[int], flight: Flight | None) -> None:
        self._peers[work.lane.peer].met = True
        if isinstance(work, Check):
            assert not isinstance(outcome, int)
            self._lanes.checked(work, outcome)
            return
        if work.chunk.buffer != NO_BUFFER and work.wanted:
            self._scatter(work)
        if flight is not None:
            self._lanes.arrived(work, flight.unheld, flight.refused)
        else:
            self._lanes.arrived(work)

    def _scatter(self, carried: Carried) -> None:
        """Copy a chunk that has arrived from its buffer to where it belongs."""
        chunk, staged = carried.chunk, carried.program.staged
        assert staged is not None
        started = self._now()
        try:
            content = self._staging.content(chunk.buffer)
            staged.scatterer.run(content, chunk.portion.target_index[chunk.first : chunk.stop])
        except Exception as error:
            # Half of it may be there, but nothing writes any more: the read ends before the defect is told.
            self._lanes.failed(carried, Reason("transport_error", repr(error)))
            raise
        carried.scatter_s = self._now() - started

    def _fail(self, work: Work, reason: Reason) -> None:
        self._lanes.failed(work, reason)
        if reason.code != "bounds":
            self._lose(work.lane.peer, reason)

    def _rescue(self, command: Command | None, error: Exception) -> None:
        """Fail everything after a defect of our own: nobody may wait for ever."""
        _logger.error("kvflow.transport: unexpected error; all reads fail", exc_info=error)
        reason = Reason("transport_error", repr(error))
        if isinstance(command, PeerAddress) and command.peer not in self._peers:
            self._tell(PeerFailed(command.peer, reason.code, reason.detail))
        if isinstance(command, PostReads):
            told = {event.read_id for event in self._outbox if isinstance(event, ReadEnded)}
            for read in command.reads:
                if read.read_id not in self._lanes.reads and read.read_id not in told:
                    self._refuse(read, reason)
        for peer_id in tuple(self._peers):
            self._lose(peer_id, reason)

    def _tell(self, event: TransportEvent) -> None:
        self._outbox.append(event)

    def _publish(self) -> None:
        if self._staging.buffers:
            self._staging.note(*self._lanes.staging(), self._lanes.waiting_for_buffer())
        if not self._outbox:
            return
        events, self._outbox = self._outbox, []
        for event in events:
            try:
                self._sink(event)
            except Exception:
                _logger.exception("kvflow.transport: the sink raised; %r is lost", event)


def _unusable(program: Reason | None, program_id: int, peer: PeerId) -> MoveFailed:
    """Return why a read cannot use a program that is not prepared."""
    if program is None:
        return MoveFailed("program_unknown", f"program {program_id} of {peer} was not prepared")
    return MoveFailed(program.code, program.detail)


def _check_lease(read: RankRead, peer: _Peer) -> None:
    """Refuse a lease that the peer's epoch table cannot hold, and a read of nothing. Raises ``OutOfBounds``."""
    slot, epoch, _ = read.lease
    if not (0 <= slot < peer.slots and 0 <= epoch <= EPOCH_MAX):
        raise OutOfBounds(f"{read.peer} has {peer.slots} epoch slots, and not {slot} for epoch {epoch}")
    if not read.parts:
        raise OutOfBounds("a read without parts")


def _check_epochs(epochs: Region) -> None:
    aligned = epochs.memory == "DRAM" and epochs.address % 8 == 0 and epochs.nbytes % 8 == 0
    if not aligned or epochs.nbytes > ADDRESS_MAX - epochs.address:
        raise MoveFailed("metadata_invalid", f"not a table of epochs: {epochs}")
