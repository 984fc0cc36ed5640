"""A model of the data plane for the scheduler, with books of its own: every effect is checked against them.

The model takes reads, moves them through their phases, and answers each once with any verdict and in any order.
"""

from dataclasses import dataclass, field

import numpy as np

from kvflow.config import Tuning
from kvflow.events import PullFailed, TransferQuiesced, TransferRetried
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import CancelReads, Outstanding, Part, RankRead, ReadEnded
from kvflow.reads.pulls import Pull
from kvflow.reads.scheduler import Delivered, LeaseEarly, Scheduler, StartReads

BUDGETS = Tuning(queue_s=4.0, wire_s=3.0, fence_s=2.0)
PULLS_MAX = 8
PEERS = ("p/0/a", "p/1/b", "q/0/c")
EPOCH = 1000
RANK_BYTES = 100


@dataclass(eq=False)
class Rank:
    """One source rank of one pull."""

    pull: "Story"
    first: RankRead
    state: str = "reading"  # waiting, held or over
    found: bool = False  # whether it may be read again: somebody said so, or bytes were refused
    asked: object = None  # the scheduler's own record, once its lease is to be asked for
    unserved: bool = False


@dataclass(eq=False)
class Story:
    """What was submitted, and everything that was told of it."""

    pull_id: int
    priority: int
    ranks: list = field(default_factory=list)
    told: list = field(default_factory=list)
    stale: bool = False
    early: int = 0  # how often a rank of it was
    early_bytes: int = 0  # that were read in vain

    @property
    def live(self):
        return not self.stale and not self.ended

    @property
    def ended(self):
        return any(kind in (Delivered, PullFailed) for kind in self.told)


class World:
    """The scheduler under test, a data plane, and all that is known of both."""

    def __init__(self, budgets=BUDGETS):
        self.pulls = {}
        self.scheduler = Scheduler(budgets)
        self.budgets = budgets
        self.now = 100.0
        self.stories = {}
        self.ranks = {}  # read id -> rank, of every read that there ever was
        self.plane = {}  # read id -> read, of those that the data plane has
        self.cancelled = set()
        self.outstanding = {peer: Outstanding() for peer in PEERS}

    def submit(self, peers, *, priority=0, check_first=False):
        """Open a pull with one rank of each of these peers."""
        story = Story(len(self.stories) + 1, priority)
        pairs = UnitPairs(np.arange(3), np.arange(3))
        reads = [
            RankRead(
                next(self.scheduler.read_ids), peer, LeaseName(slot, EPOCH), (Part(1, pairs),), check_first, priority
            )
            for slot, peer in enumerate(peers)
        ]
        nbytes = RANK_BYTES * len(reads)
        pull = Pull(story.pull_id, f"request-{story.pull_id}", self.now, reads, nbytes)
        self.pulls[story.pull_id] = pull
        self.scheduler.submit(pull)
        self.stories[story.pull_id] = story
        for read in reads:
            rank = Rank(story, read)
            story.ranks.append(rank)
            self._hand_over(rank, read)
        self.scheduler.check()

    def advance(self, read_id):
        """Let a read enter its next phase: taken, on the wire, arrived. A check that comes first ends in the queue."""
        read = self.plane[read_id]
        outstanding = self.outstanding[read.peer]
        if read.outstanding is None:
            read.since, read.outstanding = self.now, outstanding
        elif read.phase == "queue":
            read.phase, read.since, read.started_at = "wire", self.now, self.now
            outstanding.since = min(outstanding.since, self.now)
        elif read.phase == "wire":
            read.phase, read.since, read.nbytes = "fence", self.now, RANK_BYTES
            outstanding.since = self.now

    def answer(self, read_id, verdict, *, unserved=False):
        """End a read."""
        read, rank = self.plane.pop(read_id), self.ranks[read_id]
        self.cancelled.discard(read_id)
        live, others = rank.pull.live, self.reads_of(rank.pull)
        ended = ReadEnded(
            read_id,
            verdict,
            code="transport_error" if verdict == "failed" else "",
            phase=read.phase,
            unserved=unserved and verdict == "early",
            nbytes=read.nbytes,
            arrived_at=self.now if read.nbytes else 0.0,
        )
        if live:
            self._note_verdict(rank, ended, others)
        effects = self.scheduler.on_read_ended(ended, self.now)
        self.apply(effects)
        if not live and not others:
            assert TransferQuiesced in rank.pull.told

    def _note_verdict(self, rank, ended, others):
        if ended.verdict == "held":
            rank.state = "held"
        elif ended.verdict == "early" and not (ended.unserved and rank.unserved):
            rank.pull.early += 1
            rank.pull.early_bytes += 0 if ended.unserved else ended.nbytes
            rank.unserved |= ended.unserved
            rank.state, rank.found = "waiting", ended.unserved
        else:
            rank.state = "over"
            rank.pull.stale = ended.verdict == "stale" and bool(others)

    def tell(self, ranks):
        """Let somebody say that these leases are admitted, rightly or not, or that nothing is known of them."""
        waiting = [rank for rank in ranks if rank in self.waiting()]
        for rank in waiting:
            rank.found = True
        effects = self.scheduler.read_again([rank.asked for rank in ranks], self.now)
        assert bool(effects) == bool(waiting)
        self.apply(effects)
        assert not any(rank.found for rank in self.waiting()), "it is read again at once"

    def waiting(self):
        """Return the ranks that wait for an admission."""
        ranks = [rank for story in self.stories.values() if story.live for rank in story.ranks]
        return [rank for rank in ranks if rank.state == "waiting"]

    def asked(self):
        """Return the ranks that have been found early, whatever has become of them."""
        return [rank for story in self.stories.values() for rank in story.ranks if rank.asked is not None]

    def cancel(self, pull_id):
        """Give a pull up."""
        live = self.stories[pull_id].live
        effects = self.scheduler.cancel(pull_id, code="transfer_cancelled", detail="", now=self.now)
        assert live == bool(effects)
        self.apply(effects)
        assert not self.stories[pull_id].live

    def fail_peer(self, peer):
        """Lose a peer: it ends every pull that still needs it. What it has in flight ends later."""
        needing = [
            story
            for story in self.stories.values()
            if story.live and any(rank.first.peer == peer and rank.state != "held" for rank in story.ranks)
        ]
        others = [story for story in self.stories.values() if story.live and story not in needing]
        self.apply(self.scheduler.on_peer_failed(peer, code="peer_lost", detail="gone", now=self.now))
        assert not any(story.live for story in needing)
        assert all(story.live for story in others)

    def tick(self, seconds):
        """Let time pass."""
        self.now += seconds
        self.apply(self.scheduler.tick(self.now))

    def reads_of(self, story):
        """Return what the data plane has of a pull."""
        return [read for read_id, read in self.plane.items() if self.ranks[read_id].pull is story]

    def apply(self, effects):
        """Do what the scheduler says, in its order, and check it."""
        for effect in effects:
            match effect:
                case StartReads(reads=reads):
                    assert reads
                    for read in reads:
                        self._started_again(read)
                case LeaseEarly(rank=asked, again=again):
                    rank = self.ranks[asked.read.read_id]
                    assert rank.state == "waiting"
                    assert again == (rank.asked is asked)
                    rank.asked = asked
                case CancelReads(read_ids=read_ids):
                    for read_id in read_ids:
                        assert read_id in self.plane
                        assert not self.ranks[read_id].pull.live
                        assert read_id not in self.cancelled, "a read is cancelled once"
                        self.cancelled.add(read_id)
                case Delivered(pull=pull):
                    self._delivered(pull)
                    del self.pulls[pull.pull_id]
                case _:
                    self._told(effect)
        self.scheduler.check()
        self._check_cancelled()

    def _hand_over(self, rank, read):
        assert read.read_id not in self.ranks
        self.ranks[read.read_id] = rank
        self.plane[read.read_id] = read

    def _started_again(self, read):
        """What is read again is all that a rank must give, under the same lease, once that is found admitted."""
        (rank,) = [
            rank
            for story in self.stories.values()
            for rank in story.ranks
            if rank.first.lease == read.lease and rank.first.peer == read.peer and rank.first.parts is read.parts
        ]
        assert rank.pull.live
        assert rank.state == "waiting"
        assert rank.found
        assert read.priority == rank.pull.priority
        assert read.check_first != rank.unserved
        assert (read.phase, read.started_at, read.nbytes) == ("queue", 0.0, 0)
        rank.state, rank.found = "reading", False
        self._hand_over(rank, read)

    def _delivered(self, pull):
        """A pull is delivered when each of its ranks was found held, and is told of nothing else."""
        story = self.stories[pull.pull_id]
        assert story.live
        assert [rank.state for rank in story.ranks] == ["held"] * len(story.ranks)
        assert not self.reads_of(story)
        assert len(pull.ended) == len(story.ranks)
        assert pull.nbytes == RANK_BYTES * len(story.ranks)
        assert (pull.early, pull.early_bytes) == (story.early, story.early_bytes)
        story.told.append(Delivered)

    def _told(self, event):
        story = self.stories[event.pull_id]
        assert event.request_id == f"request-{story.pull_id}"
        match event:
            case TransferRetried(peer=peer):
                (rank,) = [rank for rank in story.ranks if rank.first.peer == peer]
                assert rank.state == "waiting"
                assert rank.asked is None, "it is told of once"
                assert story.live
            case PullFailed():
                assert not story.ended
                assert event.quarantined == bool(self.reads_of(story))
                assert event.code != "stale_lease" or not event.quarantined
                assert 0 <= self.pulls[event.pull_id].nbytes_arrived <= RANK_BYTES * len(story.ranks)
                story.told.append(PullFailed)
                for rank in story.ranks:
                    rank.state = "over"
            case TransferQuiesced():
                assert story.told == [PullFailed]
                assert not self.reads_of(story)
                story.told.append(TransferQuiesced)
                del self.pulls[event.pull_id]

    def _check_cancelled(self):
        """What the data plane has of a pull that has failed was cancelled."""
        for read_id in self.plane:
            assert self.ranks[read_id].pull.live == (read_id not in self.cancelled)

    def finish(self):
        """Let no more faults happen: everything must come to its end, and leave nothing behind."""
        for _ in range(10_000):
            if not self.scheduler.busy:
                break
            if self.plane:
                self.answer(min(self.plane), "held")
            elif waiting := self.waiting():
                self.tell(waiting)
            else:
                self.tick(0.5)
        assert not self.scheduler.busy
        assert not self.plane
        assert self.scheduler.tick(self.now + 1000.0) == []
        assert not self.scheduler._reads
        for story in self.stories.values():
            assert story.told in ([Delivered], [PullFailed, TransferQuiesced])
