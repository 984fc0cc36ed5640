"""All decisions of a transport, without a thread: it takes commands, makes steps, and returns events.

The core connects the lanes (what is next, what has ended) with a backend (how bytes move). It keeps the peers and the
prepared lists. ``reads.thread`` drives it; a test can drive it directly.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from msgspec import Struct

from kvflow.errors import FailureCode, quoted
from kvflow.ids import PeerId
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.leases.epochs import judge
from kvflow.reads.backend import (
    NO_BUFFER,
    Backend,
    BackendError,
    Cause,
    CheckedList,
    Chunk,
    PostedWork,
    Share,
)
from kvflow.reads.bounds import EPOCH_MAX, OutOfBounds, check_pairs
from kvflow.reads.contract import (
    RESET_DRAIN_S,
    SHARED_BYTES_MIN,
    ArrivedChunk,
    CancelReads,
    Carrier,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    PreparedList,
    RankRead,
    RateLearned,
    ReadEnded,
    ResetDone,
    Sink,
    TransportEvent,
)
from kvflow.reads.lanes import Check, Lanes, TakenChunk, Work
from kvflow.reads.pacing import REST_S_MAX, Gauge, Pace
from kvflow.reads.planes import PlaneBackends
from kvflow.reads.prepared import (
    BYTE_S,
    DESCRIPTOR_S,
    POST_S,
    READ_S,
    PostCosts,
    bind_whole,
    check_list,
    fetching,
)
from kvflow.reads.staging import StagingMemory

_logger = logging.getLogger(__name__)

WEIGHT_MAX = 64  # most chunks in one turn of a peer

REMOVED = Cause(FailureCode.CANCELLED, "the peer was removed")
CLOSING = Cause(FailureCode.CANCELLED, "the transport is closing")
RESET = Cause(FailureCode.PEER_LOST, "it did not answer, and the reader was reset to end its reads")


class RemovePeer(Struct, frozen=True):
    """Forget a peer."""

    peer: PeerId
    gone: bool = False


class PostReads(Struct, frozen=True):
    """Start reads, which the caller would have let take so long on its own thread."""

    reads: tuple[RankRead, ...]
    within_s: float = 0.0


class ResetReader(Struct, frozen=True):
    """End what is in flight from hung peers."""


ReadCommand = PeerAddress | RemovePeer | PreparedList | PostReads | CancelReads | ResetReader
"""The commands of a core. A ``PeerAddress`` adds its peer, and a ``PreparedList`` is prepared."""


@dataclass(slots=True, eq=False)
class _Peer:
    """A peer that was added."""

    address: PeerAddress
    carrier: Carrier
    backend: Backend
    slots: int  # of its epoch table
    costs: PostCosts | None  # None if posts do not end when they return: none is made inline
    met: bool = False  # whether it was read over its present connection
    gauge: Gauge | None = field(default_factory=Gauge)  # None once its rate has been measured
    prepared_lists: dict[int, CheckedList | Cause] = field(default_factory=dict)
    leaving: bool = False  # whether it only drains
    gone: bool = False  # whether it will never be added again
    again: PeerAddress | None = None  # added when it has drained, unless it is gone


@dataclass(slots=True, eq=False)
class _InFlight:
    """Work in flight."""

    work: Work
    posted: PostedWork
    orphaned: bool = False  # its end cannot be observed; it then ends when the agents are destroyed
    pace: Pace | None = None  # counts it, unless it is a check or the backend's descriptor shows its end


@dataclass(slots=True, eq=False)
class _AskedAlone:
    """The only open read, whose one chunk was asked for inline. The lanes do not know it until anything else comes."""

    read: RankRead
    peer: _Peer
    prepared_lists: Sequence[CheckedList]
    posted: PostedWork
    posted_at: float
    bind_s: float
    post_s: float
    nbytes: int
    descriptors: int


class ReadCore:
    """Process the commands of one transport over an open backend. Thread: one at a time.

    Targets lie in ``regions``, ``sink`` takes the events, and ``now`` returns seconds of a monotonic clock.
    """

    def __init__(
        self,
        backend: Backend | PlaneBackends,
        regions: Sequence[Region],
        sink: Sink,
        now: Callable[[], float],
        staging: StagingMemory | None = None,
    ) -> None:
        self._backend = backend
        self._regions = tuple(regions)
        self._sink = sink
        self._now = now
        self._staging = staging or StagingMemory(0)
        self._outbox: list[TransportEvent] = []
        self._lanes = Lanes(self._tell, now, len(self._staging.buffers))
        self._peers: dict[PeerId, _Peer] = {}
        self._leaving = 0
        self._in_flight: list[_InFlight] = []
        self._resetting_since: float | None = None
        self._asked: _AskedAlone | None = None
        self._within_s = 0.0  # of the reads that this step posts, if the core was idle

    @property
    def in_flight(self) -> bool:
        """Return whether something that was posted has not ended."""
        return bool(self._in_flight) or self._asked is not None

    @property
    def must_poll(self) -> bool:
        """Return whether only polling shows when something in flight has ended."""
        return any(entry.posted.polled for entry in self._in_flight)

    def rest_s(self) -> float:
        """Return the seconds until something that must be polled is expected to end; 0 if unknown."""
        now, rest_s = self._now(), REST_S_MAX
        oldest: set[Pace] = set()
        for entry in self._in_flight:
            pace = entry.pace
            if pace is not None and pace not in oldest:
                oldest.add(pace)
                rest_s = min(rest_s, self._expected_at(entry, pace) - now)
            elif pace is None and entry.posted.polled:
                return 0.0
        return max(rest_s, 0.0)

    def handle(self, command: ReadCommand) -> None:
        """Process one command. Its effects are reported as events."""
        try:
            self._enter_asked()
            match command:
                case PostReads(reads, within_s):
                    self._within_s = 0.0 if self._in_flight or self._lanes.reads else within_s
                    for read in reads:
                        self._admit(read)
                case CancelReads(read_ids):
                    self._lanes.cancel(read_ids)
                    self._backend.cancel(read_ids)
                case PeerAddress():
                    self._add(command)
                case PreparedList():
                    self._prepare(command)
                case RemovePeer(peer, gone):
                    self._remove(peer, gone=gone)
                case ResetReader():
                    self._begin_reset()
            self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - the thread outlives our own defects, and reports them
            self._fail_all(command, error)
        self._publish()

    def step(self) -> bool:
        """Post at most one chunk and the due checks, then poll what is in flight. Return False if nothing changed.

        Events are passed on at the end of the step. So a first check, its chunk and the fence wake the event loop once,
        and the loop does not compete with this thread for the interpreter in between.
        """
        try:
            posted = self._post_next()
            before = len(self._in_flight)
            self._backend.progress()
            self._poll_all()
            answered = self._asked is not None and self._poll_asked(self._asked)
            changed = self._reset_if_drained() or posted or answered or len(self._in_flight) < before
            if changed:
                self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_all(None, error)
            return True
        finally:
            self._within_s = 0.0
            self._publish()
        return changed

    def post_inline(self, reads: Sequence[RankRead], within_s: float) -> list[ReadEnded] | None:
        """Move reads at once, if nothing else is open and they are expected to take at most ``within_s``.

        Returns:
            The answers that are known now; the others follow in later steps. None: nothing was done.
        """
        if self.in_flight or self._lanes.reads or self._leaving or self._resetting_since is not None:
            return None
        found = self._fits_inline(reads, within_s)
        if found is None:
            return None
        try:
            if len(found) == 1 == len(reads):
                ended = self._move_inline(*found[0])
                if ended is not None:
                    return [ended]
            else:
                for read in reads:
                    self._admit(read)
            while self._lanes.reads and self._post_next():
                pass
            self._finish_leaving()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail_all(PostReads(tuple(reads)), error)
        events, self._outbox = self._outbox, []
        answers = [event for event in events if type(event) is ReadEnded]
        if len(answers) < len(events):
            self._outbox = [event for event in events if type(event) is not ReadEnded]
            self._publish()
        return answers

    def _fits_inline(
        self, reads: Sequence[RankRead], within_s: float
    ) -> list[tuple[RankRead, _Peer, PostCosts, list[CheckedList]]] | None:
        """Return the lists of reads whose parts are one chunk each; None if a read does not fit."""
        known = []
        for read in reads:
            peer = self._peers.get(read.peer)
            if peer is None or peer.costs is None or not peer.met:
                return None
            prepared_lists, work_s, whole = [], 0.0, not read.check_first
            for part in read.parts:
                prepared_list, pairs = peer.prepared_lists.get(part.list_id), len(part.pairs.source)
                if type(prepared_list) is not CheckedList or prepared_list.staged is not None:
                    return None
                prepared_lists.append(prepared_list)
                work_s += POST_S + pairs * prepared_list.pair_s
                whole = whole and pairs <= prepared_list.chunk_pairs
            within_s -= READ_S + peer.costs.ratio * work_s
            if within_s < 0:
                return None
            if whole:
                known.append((read, peer, peer.costs, prepared_lists))
        return known

    def _move_inline(
        self, read: RankRead, peer: _Peer, costs: PostCosts, prepared_lists: Sequence[CheckedList]
    ) -> ReadEnded | None:
        """Post and fence the only open read, whose parts are one chunk each. None: it continues in later steps."""
        peer_id, read_id, lease, now, backend = read.peer, read.read_id, read.lease, self._now, peer.backend
        posts, nbytes, bind_s, post_s = 0, 0, 0.0, 0.0
        read.started_at = started_at = arrived_at = now()
        outcome: PostedWork | Sequence[int] | int
        try:
            _check_lease(read, peer)
            for part, prepared_list in zip(read.parts, prepared_lists, strict=True):
                check_pairs(part.pairs, prepared_list.source_units, prepared_list.target_units)
                pairs = len(part.pairs.source)
                portion = bind_whole(prepared_list, part.pairs, Share(read_id, lease, pairs))
                bound_at, size = now(), len(portion.source_index)
                outcome = backend.post(Chunk(portion, 0, size))
                if outcome != 0:
                    break
                bind_s += bound_at - arrived_at
                arrived_at = now()
                post_s += arrived_at - bound_at
                costs.learn(arrived_at - bound_at, POST_S + pairs * prepared_list.pair_s)
                nbytes += portion.nbytes
                posts += 1
                if read.arrived is not None:
                    read.arrived.append(ArrivedChunk(part.list_id, bound_at, arrived_at, nbytes, size))
            else:
                slot = lease.slot
                outcome = backend.post_check(peer_id, slot, slot, ((read_id, lease),), fence=True)
        except OutOfBounds as error:
            self._refuse(read, Cause(FailureCode.BOUNDS, str(error)))
        except Exception as error:  # noqa: BLE001 - told, or raised again
            self._on_post_raised(self._admit_posted(read, prepared_lists, posts), error)
        else:
            if not isinstance(outcome, PostedWork):
                assert not isinstance(outcome, int)
                (observed,) = outcome
                read.phase, read.since, read.nbytes = "fence", arrived_at, nbytes
                return _fenced(read, observed, posts, (bind_s, post_s), arrived_at=arrived_at, now=now())
            if not (outcome.polled or posts) and len(read.parts) == 1:
                posted_at = now()
                self._lanes.hold(read, posted_at)
                times = posted_at, bound_at - started_at, posted_at - bound_at
                self._asked = _AskedAlone(read, peer, prepared_lists, outcome, *times, portion.nbytes, size)
                return None
            self._in_flight.append(self._entry(self._admit_posted(read, prepared_lists, posts), outcome))
        return None

    def _enter_asked(self, posts: int = 0) -> Work | None:
        """Enter the read that was asked for alone into the lanes. Return what was posted of it last, or is next."""
        asked, self._asked = self._asked, None
        if asked is None:
            return None
        asked.read.phase = "queue"
        work = self._admit_posted(asked.read, asked.prepared_lists, posts)
        if not posts:
            self._in_flight.append(self._entry(work, asked.posted))
        return work

    def _poll_asked(self, asked: _AskedAlone) -> bool:
        """Answer the read that was asked for alone, once it has arrived. Return False if nothing has ended."""
        read, lease, posted = asked.read, asked.read.lease, asked.posted
        try:
            if asked.peer.backend.poll(posted) is None:
                return False
            is_usual = not (posted.unheld or posted.refused)
        except Exception:  # noqa: BLE001 - the lanes poll it again, and tell
            is_usual = False
        if not is_usual:
            self._enter_asked()
            self._poll_all()
            return True
        arrived_at = self._now()
        asked.peer.met = True
        if asked.peer.gauge is not None:
            self._measure(asked.peer, asked.peer.gauge, asked.nbytes, asked.posted_at, asked.prepared_lists[0])
        if read.arrived is not None:
            list_id = read.parts[0].list_id
            read.arrived.append(ArrivedChunk(list_id, asked.posted_at, arrived_at, asked.nbytes, asked.descriptors))
        try:
            checked = ((read.read_id, lease),)
            outcome = asked.peer.backend.post_check(read.peer, lease.slot, lease.slot, checked, fence=True)
        except Exception as error:  # noqa: BLE001 - told, or raised again
            work = self._enter_asked(posts=1)
            assert work is not None
            self._on_post_raised(work, error)
            return True
        if isinstance(outcome, PostedWork):
            work = self._enter_asked(posts=1)
            assert work is not None
            self._in_flight.append(self._entry(work, outcome))
            return True
        self._asked = None
        self._lanes.let_go(read, arrived_at)
        read.nbytes = asked.nbytes
        self._tell(_fenced(read, outcome[0], 1, (asked.bind_s, asked.post_s), arrived_at=arrived_at, now=self._now()))
        return True

    def _admit_posted(self, read: RankRead, prepared_lists: Sequence[CheckedList], posts: int) -> Work:
        """Enter a read into the lanes after ``posts`` of its posts have ended. Return what was posted after them."""
        lanes = self._lanes
        lanes.admit(read, prepared_lists)
        traced, read.arrived = read.arrived, None  # it has these chunks already
        for _ in range(posts):
            carried = lanes.take_chunk()
            assert carried is not None
            lanes.arrived(carried)
        read.arrived = traced
        work = lanes.take_check() or lanes.take_chunk()
        assert work is not None
        return work

    def _post_next(self) -> bool:
        """Post all due checks, one chunk, and the fences that follow. Return False if there was nothing to post."""
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
        """Drop everything that is not posted. Steps may continue until nothing is in flight."""
        self._resetting_since = None
        self._enter_asked()
        for peer in tuple(self._peers):
            self._leave(peer, CLOSING)
        self._publish()

    def end_close(self) -> None:
        """Destroy the agents, then report what was still in flight. Nothing writes after this."""
        self._backend.close()
        for entry in self._in_flight:
            self._lanes.failed(entry.work, CLOSING)
        self._in_flight.clear()
        self._publish()

    def _begin_reset(self) -> None:
        if self._resetting_since is None:
            self._resetting_since = self._now()
        self._reset_if_drained()

    def _reset_if_drained(self) -> bool:
        """Reset the reader once the remaining peers have nothing in flight, or their time is over."""
        since = self._resetting_since
        if since is None:
            return False
        now = self._now()
        healthy = any(not entry.orphaned and entry.work.lane.closed is None for entry in self._in_flight)
        if healthy and now - since < RESET_DRAIN_S:
            return False
        self._resetting_since = None
        ended = len(self._in_flight)
        if ended:
            self._reset()
        self._tell(ResetDone(ended, drain_s=now - since, reset_s=self._now() - now))
        return True

    def _reset(self) -> None:
        """Destroy the reader, end everything in flight, and add the remaining peers to the next reader."""
        with suppress(BackendError):  # then no peer can be added below, and each add reports why
            self._backend.reset()
        ended, self._in_flight = self._in_flight, []
        for each in ended:
            self._fail(each.work, RESET)
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving:
                continue
            peer.met = False
            try:
                peer.carrier = self._backend.add(peer.address)
                peer.backend = self._backend.of(peer_id)
                for prepared_list in peer.prepared_lists.values():
                    if isinstance(prepared_list, CheckedList):
                        peer.backend.prepare(prepared_list)
            except BackendError as failure:
                self._lose(peer_id, Cause(FailureCode.PEER_LOST, failure.reason.detail))

    def _admit(self, read: RankRead) -> None:
        """Check a read before it is posted. If it cannot be served, only this read ends."""
        try:
            peer = self._peers.get(read.peer)
            if peer is None or peer.leaving:
                raise BackendError(FailureCode.PEER_LOST, f"{read.peer} is not added")
            _check_lease(read, peer)
            prepared_lists = []
            for part in read.parts:
                prepared_list = peer.prepared_lists.get(part.list_id)
                if not isinstance(prepared_list, CheckedList):
                    raise _unusable(prepared_list, part.list_id, read.peer)
                check_pairs(part.pairs, prepared_list.source_units, prepared_list.target_units)
                prepared_lists.append(prepared_list)
        except BackendError as failure:
            self._refuse(read, failure.reason)
        except OutOfBounds as error:
            self._refuse(read, Cause(FailureCode.BOUNDS, str(error)))
        else:
            self._lanes.admit(read, tuple(prepared_lists))

    def _refuse(self, read: RankRead, reason: Cause) -> None:
        self._tell(ReadEnded(read.read_id, "failed", reason.code, reason.detail, phase="queue"))

    def _prepare(self, prepared_list: PreparedList) -> None:
        peer = self._peers.get(prepared_list.peer)
        if peer is None or peer.leaving:
            return  # its reads fail like those of an unknown peer
        assert prepared_list.list_id not in peer.prepared_lists, f"list id {prepared_list.list_id} is used twice"
        try:
            prepared = check_list(prepared_list, self._regions, self._staging)
            peer.backend.prepare(prepared)
        except OutOfBounds as error:
            peer.prepared_lists[prepared_list.list_id] = Cause(FailureCode.BOUNDS, str(error))
        except BackendError as failure:
            peer.prepared_lists[prepared_list.list_id] = failure.reason
        else:
            peer.prepared_lists[prepared_list.list_id] = prepared

    def _add(self, address: PeerAddress) -> None:
        peer = self._peers.get(address.peer)
        if peer is not None and peer.leaving:
            peer.again = address
            return
        if peer is None:
            try:
                _check_epochs(address.epochs)
                carrier = self._backend.add(address)
            except BackendError as failure:
                self._tell(PeerFailed(address.peer, failure.reason.code, failure.reason.detail))
                return
            backend = self._backend.of(address.peer)
            costs = PostCosts() if backend.ends_at_once(address.peer) else None
            peer = self._peers[address.peer] = _Peer(address, carrier, backend, address.epochs.nbytes // 8, costs)
            self._lanes.open(address.peer, min(max(address.weight, 1), WEIGHT_MAX))
        self._tell(PeerAdded(address.peer, peer.carrier))

    def _remove(self, peer_id: PeerId, *, gone: bool) -> None:
        peer = self._peers.get(peer_id)
        if peer is None and gone:
            self._backend.remove(peer_id, gone=True)  # it was removed before, and now will never be added again
        if peer is not None and peer.again is not None:
            peer.again = None
            self._tell(PeerFailed(peer_id, FailureCode.PEER_LOST, "removed before it could be added again"))
        if peer is not None:
            peer.gone = gone
            self._leave(peer_id, REMOVED)

    def _leave(self, peer_id: PeerId, reason: Cause) -> bool:
        """Stop using a peer; it is removed once nothing of it is in flight. Return False if it was leaving already."""
        peer = self._peers[peer_id]
        if peer.leaving:
            return False
        peer.leaving = True
        self._leaving += 1
        self._lanes.abandon(peer_id, reason)
        peer.backend.leave(peer_id)
        return True

    def _finish_leaving(self) -> None:
        if not self._leaving:
            return
        for peer_id, peer in tuple(self._peers.items()):
            if peer.leaving and self._lanes.drained(peer_id):
                del self._peers[peer_id]
                self._leaving -= 1
                self._backend.remove(peer_id, gone=peer.gone)
                if peer.again is not None:
                    self._add(peer.again)

    def _lose(self, peer_id: PeerId, reason: Cause) -> None:
        """Stop using a peer whose connection has failed, and the peers that share the connection."""
        lost = self._peers.get(peer_id)
        for each, peer in self._peers.items():
            shares = lost is not None and peer.address.agent is not None and peer.address.agent == lost.address.agent
            if (peer is lost or shares) and self._leave(each, reason):
                self._tell(PeerFailed(each, reason.code, reason.detail))

    def _post(self, work: Work) -> None:
        try:
            outcome = self._post_check(work) if isinstance(work, Check) else self._post_chunk(work)
        except Exception as error:  # noqa: BLE001 - told, or raised again
            self._on_post_raised(work, error)
        else:
            if isinstance(outcome, PostedWork):
                self._in_flight.append(self._entry(work, outcome))
            else:
                self._on_over(work, outcome, None)

    def _entry(self, work: Work, posted: PostedWork) -> _InFlight:
        """Count work as in flight, at the pace of its peer if it is a chunk that must be polled."""
        lane = work.lane
        if isinstance(work, Check) or not posted.polled:
            return _InFlight(work, posted)
        if lane.pace is None:
            descriptors = self._peers[lane.peer].backend.chunk_descriptors(lane.peer)
            if not descriptors:
                return _InFlight(work, posted)
            lane.pace = Pace(descriptors)
        lane.pace.post(work.nbytes, self._now())
        return _InFlight(work, posted, pace=lane.pace)

    def _on_post_raised(self, work: Work, error: Exception) -> None:
        if isinstance(error, BackendError):
            self._fail(work, error.reason)
            return
        if isinstance(work, Check):
            self._fail(work, Cause(FailureCode.TRANSPORT_ERROR, repr(error)))
        else:
            # It may have begun to write. Only destroying the agents proves that it does not.
            self._in_flight.append(_InFlight(work, PostedWork(), orphaned=True))
        raise error

    def _post_check(self, check: Check) -> PostedWork | Sequence[int]:
        peer = check.lane.peer
        reads = [(opened.read.read_id, opened.read.lease) for opened in check.reads]
        return self._peers[peer].backend.post_check(peer, check.first, check.last, reads, fence=check.fence)

    def _post_chunk(self, carried: TakenChunk) -> PostedWork | int:
        chunk, staged = carried.chunk, carried.prepared_list.staged
        peer = self._peers[carried.lane.peer]
        started = carried.posted_at = self._now()
        outcome = peer.backend.post(chunk if staged is None else fetching(chunk, staged.checked))
        carried.post_s = self._now() - started
        if peer.costs is not None and carried.nbytes < SHARED_BYTES_MIN:  # several threads may have read a larger one
            work_s = (chunk.stop - chunk.first) * DESCRIPTOR_S + carried.nbytes * BYTE_S
            peer.costs.learn(carried.post_s, POST_S + work_s, self._within_s)
        return outcome

    def _poll_all(self) -> None:
        """Poll what is in flight. For an asynchronous peer, poll the oldest chunk first, when it may have ended.

        Each poll releases the interpreter lock. While another thread computes, getting it back takes milliseconds.
        """
        flying: set[Pace] = set()
        for entry in tuple(self._in_flight):
            pace = entry.pace
            if entry.orphaned or pace in flying:
                continue
            if pace is None or not pace.asynchronous:
                self._poll(entry)
            elif self._expected_at(entry, pace) > self._now():
                flying.add(pace)
            elif not self._poll(entry):
                pace.flies()
                flying.add(pace)

    def _expected_at(self, entry: _InFlight, pace: Pace) -> float:
        assert isinstance(entry.work, TakenChunk)
        return pace.expected_at(entry.work.nbytes)

    def _poll(self, entry: _InFlight) -> bool:
        """Poll work in flight, and handle its end. Return False if it has not ended."""
        try:
            outcome = self._peers[entry.work.lane.peer].backend.poll(entry.posted)
        except BackendError as failure:
            self._in_flight.remove(entry)
            if entry.pace is not None and isinstance(entry.work, TakenChunk):
                entry.pace.drop(entry.work.nbytes)
            self._fail(entry.work, failure.reason)
        except Exception:
            entry.orphaned = True
            raise
        else:
            if outcome is None:
                return False
            self._in_flight.remove(entry)
            if entry.pace is not None and isinstance(entry.work, TakenChunk):
                work, waits = entry.work, self._lanes.waits(entry.work.lane)
                entry.pace.end(work.nbytes, self._now(), posted_at=work.posted_at, post_s=work.post_s, waits=waits)
            self._on_over(entry.work, outcome, entry.posted)
        return True

    def _on_over(self, work: Work, outcome: int | Sequence[int], posted: PostedWork | None) -> None:
        peer = self._peers[work.lane.peer]
        peer.met = True
        if isinstance(work, Check):
            assert not isinstance(outcome, int)
            self._lanes.checked(work, outcome)
            return
        if peer.gauge is not None:
            self._measure(peer, peer.gauge, work.nbytes, work.posted_at, work.prepared_list)
        if work.chunk.buffer != NO_BUFFER and work.wanted:
            started = self._now()
            self._scatter(work)
            work.scatter_s = self._now() - started
        if posted is not None:
            self._lanes.arrived(work, posted.unheld, posted.refused)
        else:
            self._lanes.arrived(work)

    def _measure(self, peer: _Peer, gauge: Gauge, nbytes: int, posted_at: float, checked: CheckedList) -> None:
        """Count a chunk that has arrived, and report the peer's rate once enough were counted."""
        memories = checked.prepared_list.source_memory, checked.prepared_list.target_memory
        if gauge.add(nbytes, posted_at, self._now(), memories):
            peer.gauge = None
            self._tell(RateLearned(peer.address.peer, gauge.nbytes, gauge.busy_s, *memories))

    def _scatter(self, carried: TakenChunk) -> None:
        """Copy a chunk that has arrived from its buffer to the target."""
        chunk, staged = carried.chunk, carried.prepared_list.staged
        assert staged is not None
        try:
            content = self._staging.content(chunk.buffer)
            staged.scatterer.start(content, chunk.portion.target_index[chunk.first : chunk.stop])
        except Exception as error:
            # Half of it may have arrived, but nothing writes now: the read ends before the defect is reported.
            self._lanes.failed(carried, Cause(FailureCode.TRANSPORT_ERROR, repr(error)))
            raise

    def _fail(self, work: Work, reason: Cause) -> None:
        self._lanes.failed(work, reason)
        if reason.code != FailureCode.BOUNDS:
            self._lose(work.lane.peer, reason)

    def _fail_all(self, command: ReadCommand | None, error: Exception) -> None:
        """Fail all reads and peers after a defect of kvflow, so that no caller waits forever."""
        _logger.error("kvflow.reads: unexpected error; all reads fail", exc_info=error)
        self._enter_asked()
        reason = Cause(FailureCode.TRANSPORT_ERROR, repr(error))
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
                _logger.exception("kvflow.reads: the sink raised; %s is lost", quoted(repr(event), 256))


def _fenced(
    read: RankRead, observed: int, chunks: int, spent_s: tuple[float, float], *, arrived_at: float, now: float
) -> ReadEnded:
    """Return the answer to a read whose fence has seen an epoch; ``spent_s``: on binding and on posting."""
    return ReadEnded(
        read_id=read.read_id,
        verdict=judge(read.lease.epoch, observed),
        observed=observed,
        nbytes=read.nbytes,
        chunks=chunks,
        started_at=read.started_at,
        arrived_at=arrived_at,
        bind_s=spent_s[0],
        post_s=spent_s[1],
        fence_s=now - arrived_at,
    )


def _unusable(prepared_list: Cause | None, list_id: int, peer: PeerId) -> BackendError:
    """Return why a read cannot use a list that is not prepared."""
    if prepared_list is None:
        return BackendError(FailureCode.PROGRAM_UNKNOWN, f"prepared list {list_id} of {peer} was not prepared")
    return BackendError(prepared_list.code, prepared_list.detail)


def _check_lease(read: RankRead, peer: _Peer) -> None:
    """Refuse a lease that the peer's epoch table cannot hold, and an empty read. Raises ``OutOfBounds``."""
    slot, epoch = read.lease.slot, read.lease.epoch
    if not (0 <= slot < peer.slots and 0 <= epoch <= EPOCH_MAX):
        raise OutOfBounds(f"{read.peer} has {peer.slots} epoch slots, and not {slot} for epoch {epoch}")
    if not read.parts:
        raise OutOfBounds("a read without parts")


def _check_epochs(epochs: Region) -> None:
    aligned = epochs.memory == "DRAM" and epochs.address % 8 == 0 and epochs.nbytes % 8 == 0
    if not aligned or epochs.nbytes > ADDRESS_MAX - epochs.address:
        raise BackendError(FailureCode.METADATA_INVALID, f"not a table of epochs: {epochs}")
