"""Leases and their readers, as one rank sees them: who finds a lease, who has read it, who keeps it, and who follows.

Compared with a model that has one record per lease and computes every answer from the records.
"""

import math
from contextlib import nullcontext

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvflow.errors import ArgumentInvalid, BlockIdsInvalid, CapacityExceeded
from kvflow.ids import ABSENT
from kvflow.leases import table, told
from kvflow.leases.epochs import EpochTable, judge
from kvflow.leases.issuer import Issuer
from kvflow.leases.table import UNREAD_PAUSE_S, LeaseReader, LeaseTable, PastLease, Reader
from kvflow.leases.tickets import RankAddress

from .caches import thoroughly
from .test_leases import chained

SLOTS, BASE, NUM_BLOCKS = 4, 500, 12
UNREAD_S = 4.0
DURATIONS_MS = (6_000, 10_000, 16_000)
READERS_MAX, READERS_LISTED_MAX = 3, 2
KEYS = ("a" * 64, "b" * 64)
MAC, WRONG_MAC = b"m" * 32, b"w" * 32

contents = st.lists(st.integers(1, 2), min_size=1, max_size=4)
readers = st.builds(
    lambda engine, rank_of, key: Reader(engine, *rank_of, key),
    st.sampled_from("vwxyz"),
    st.sampled_from(((0, 1), (0, 2), (1, 2))),
    st.sampled_from(KEYS),
)
few_readers = readers.filter(lambda reader: reader.engine_id in "vw")


def issuer_of(num_ranks=1, **more):
    addresses = [
        RankAddress(rank, f"{rank:032}", f"tcp://127.0.0.1:{rank + 1}", BASE, SLOTS) for rank in range(num_ranks)
    ]
    more = {"block_sizes": [1], "lease_s": 10.0} | more
    return Issuer("prefill", addresses, sign=lambda payload: bytes(32), **more)


class Promise:
    """All that is known of a lease."""

    def __init__(self, grant, now, content, whole):
        self.grant, self.content, self.whole = grant, content, whole
        self.is_kept = grant.kind == "kept"
        self.admitted_at = self.renewed_at = now
        self.engines = {}  # engine and number of ranks -> ranks that have released it, and the key that named it
        self.read = self.shown = False
        self.question = None  # by which it was found
        self.signed = 0

    @property
    def key(self):
        return self.grant.slot, self.grant.epoch

    @property
    def ends_at(self):
        return math.inf if self.is_kept else self.renewed_at + self.grant.lease_ms / 1000

    @property
    def is_unread(self):
        return not (self.is_kept or self.shown or self.engines)

    def ranks_of(self, reader):
        """Return the ranks that have released; None if the reader's key has named too many engines."""
        engine = reader.engine_id, reader.num_ranks
        if engine not in self.engines and len(self.engines) >= READERS_MAX:
            keys = [key for _, key in self.engines.values()]
            greedy = max(dict.fromkeys(keys), key=keys.count)
            if greedy == reader.public_key:
                return None
            del self.engines[[name for name, (_, key) in self.engines.items() if key == greedy][-1]]
        return self.engines.setdefault(engine, (set(), reader.public_key))[0]


class ReadersMachine(RuleBasedStateMachine):
    """A rank of an engine of one or two."""

    @initialize(num_ranks=st.integers(1, 2), has_windows=st.booleans(), unread_s=st.sampled_from((UNREAD_S, 1e6)))
    def begin(self, num_ranks, has_windows, unread_s):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(table, "READERS_MAX", READERS_MAX)
        self.patch.setattr(table, "READERS_LISTED_MAX", READERS_LISTED_MAX)
        self.now, self.count, self.has_windows, self.num_ranks = 0.0, 0, has_windows, num_ranks
        self.epochs = EpochTable(SLOTS, BASE)
        self.unread_s = unread_s
        self.leases = LeaseTable(self.epochs, num_blocks=NUM_BLOCKS, unread_s=unread_s)
        self.mint = issuer_of(num_ranks)
        self.held = {}  # the oldest first
        self.given_back_at = {}  # of equal offers the one that may be found for longest comes first
        self.past = {}

    def some(self, *, kept):
        return [name for name, each in self.held.items() if each.is_kept == kept]

    def ended(self, events, outcome, names):
        assert {event.request_id for event in events} == set(names)
        for event in events:
            promise = self.held.pop(event.request_id)
            is_used = promise.read and outcome == "released"
            assert (event.outcome, event.held_s) == (outcome, self.now - promise.admitted_at)
            assert self.leases.past(*promise.key) == PastLease("used" if is_used else outcome, self.now)
            assert judge(promise.grant.epoch, self.epochs[promise.grant.slot]) == "stale"
            self.mint.retire(event.request_id)
            self.past[promise.key] = promise

    @rule(
        content=contents,
        is_kept=st.booleans(),
        lease_ms=st.sampled_from(DURATIONS_MS),
        several=st.lists(st.sets(st.integers(0, NUM_BLOCKS - 1), min_size=2, max_size=5), min_size=1, max_size=3),
        whole=st.sets(st.integers(0, 3)),
        is_shown=st.sampled_from((False, False, True)),
    )
    def admit(self, content, several, *, is_kept, lease_ms, whole, is_shown):
        for blocks in several:
            if len(self.held) < SLOTS:
                self.admit_one(content, is_kept, lease_ms, blocks, whole)
                if is_shown:
                    self.show_a_ticket(len(self.held) - 1, MAC)

    def admit_one(self, content, is_kept, lease_ms, blocks, whole):
        self.now += 0.25
        self.count += 1
        name, digests, ids = f"request-{self.count}", chained(content), [sorted(blocks)]
        if is_kept:
            ids = [list(range(len(content)))]
            _, grant = self.mint.keep(name, block_ids=ids, num_tokens=len(content), digests=[digests])
        else:
            _, grant = self.mint.offer(name, block_ids=ids, num_tokens=len(blocks))
            grant = msgspec.structs.replace(grant, lease_ms=lease_ms)
        whole_digests = [digests[at] for at in sorted(whole) if at < len(digests)] if self.has_windows else None
        assert self.leases.admit(grant, self.now, digests, None, whole_digests and tuple(whole_digests)) == []
        if whole_digests == []:
            whole_digests = None if not is_kept else []
        self.held[name] = Promise(grant, self.now, digests, whole_digests)
        self.given_back_at[name] = self.count

    @rule(content=contents, waits=st.booleans())
    def find(self, content, waits):
        """One question finds an offer; all find what is kept: as much of the prompt as any lease holds."""
        self.count += 1
        digests, question = chained(content), self.count if waits else None
        offers = [
            (digests.index(each.content[-1]), -self.given_back_at[name], name)
            for name, each in self.held.items()
            if waits and not each.is_kept and each.question is None and each.content[-1] in digests
        ]
        found = self.leases.find(digests, question)
        if offers:
            last, _, name = max(offers)
            assert (found[0].grant.request_id, found[1]) == (name, last + 1)
            self.held[name].question = question
            return
        counts = {}
        for name in self.some(kept=True):
            each = self.held[name]
            marks = set(each.content if each.whole is None else each.whole)
            counts[name] = max([at for at, digest in enumerate(digests, 1) if digest in marks], default=0)
        longest = max(counts.values(), default=0)
        assert (found is None) == (not longest)
        if found is not None:
            assert found[1] == longest
            assert counts[found[0].grant.request_id] == longest

    @rule(which=st.integers(0, 9))
    def reach_nobody(self, which):
        """An answer that reaches nobody leaves the offer to the next question."""
        asked = [name for name, each in self.held.items() if each.question is not None]
        assert self.leases.give_back(-1) == ()
        if asked:
            name = asked[which % len(asked)]
            each = self.held[name]
            assert self.leases.give_back(each.question) == (each.content[-1],)
            self.let_find_again(name)

    def let_find_again(self, name):
        self.count += 1
        self.held[name].question, self.given_back_at[name] = None, self.count

    @precondition(lambda self: self.some(kept=False))
    @rule(which=st.integers(0, 9))
    def learn_the_digest_again(self, which):
        """The digest of a lease may come once more; who has found the lease keeps it."""
        offers = self.some(kept=False)
        name = offers[which % len(offers)]
        lease = self.leases.held(*self.held[name].key)
        self.leases.name(lease, self.held[name].content[-1])
        if self.held[name].question is None:
            self.let_find_again(name)

    @precondition(lambda self: self.held)
    @rule(
        which=st.integers(0, 9),
        releases=st.lists(st.tuples(few_readers, st.sampled_from((False, False, False, True))), min_size=1, max_size=5),
    )
    def release(self, which, releases):
        name = [*self.held][which % len(self.held)]
        for reader, read in releases:
            if name in self.held:
                self.release_one(name, reader, read)

    def release_one(self, name, reader, read):
        self.now += 0.25
        promise = self.held[name]
        answers, ended = self.leases.release([promise.key], reader, self.now, read=read)
        if promise.is_kept:
            assert (answers, ended) == (["held"], [])
            return
        alone = reader.num_ranks == 1
        if not alone:
            ranks = promise.ranks_of(reader)
            if ranks is None:
                assert (answers, ended) == (["unknown"], [])
                return
            ranks.add(reader.rank)
            if len(ranks) < reader.num_ranks:
                promise.read |= read
                assert (answers, ended) == (["counted"], [])
                return
        promise.read |= read
        is_found = promise.question is not None or self.num_ranks > 1
        if is_found and not (read if alone else promise.read):
            assert (answers, ended) == (["held"], []), "it was found, and nobody has read it: the next may"
            for (_, num_ranks), (released, _) in promise.engines.items():
                if len(released) == num_ranks:
                    released.clear()
            self.let_find_again(name)
        else:
            assert answers == ["ended"]
            self.ended(ended, "released", [name])

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), several=st.lists(st.one_of(st.none(), readers), min_size=1, max_size=6))
    def renew(self, which, several):
        promise = [*self.held.values()][which % len(self.held)]
        for reader in several:
            self.now += 0.25
            assert self.leases.renew([promise.key], self.now, reader) == ["held"]
            if not promise.is_kept:
                promise.renewed_at = self.now
                if reader is not None:
                    promise.ranks_of(reader)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 9), mac=st.sampled_from((MAC, WRONG_MAC)))
    def show_a_ticket(self, which, mac):
        """However a grant is shown, it is signed once, and only the right MAC counts as a sign of a reader."""
        promise = [*self.held.values()][which % len(self.held)]

        def macs_of(grant):
            assert grant is promise.grant
            promise.signed += 1
            return (MAC,)

        assert self.leases.has_mac(*promise.key, mac, macs_of) == (mac == MAC)
        assert not self.leases.has_mac(promise.grant.slot, promise.grant.epoch + 1, mac, macs_of)
        assert promise.signed <= 1
        promise.shown |= mac == MAC

    @precondition(lambda self: self.some(kept=False))
    @rule(which=st.integers(0, 9), ahead=st.integers(1, 3))
    def void_a_later_grant(self, which, ahead):
        """Nobody ends the lease that readers hold by giving up a grant that has come too early for its slot."""
        offers = self.some(kept=False)
        grant = self.held[offers[which % len(offers)]].grant
        later = msgspec.structs.replace(grant, request_id="void", epoch=grant.epoch + 1000 * ahead)
        assert self.leases.void(later, self.now) == []
        assert self.epochs[grant.slot] == grant.epoch

    @rule(which=st.integers(0, 9))
    def revoke(self, which):
        if self.held:
            name = [*self.held][which % len(self.held)]
            self.ended(self.leases.revoke(name, self.now), "revoked", [name])

    @rule(seconds=st.sampled_from((UNREAD_PAUSE_S, UNREAD_S, 6.0, 9.75)))
    def time_passes(self, seconds):
        """What has run out ends; and of what nobody has shown an interest in, the oldest beyond half of the blocks."""
        timed = self.some(kept=False)
        deadline = self.leases.next_deadline()
        assert (deadline is None) == (not timed)
        if timed:
            assert deadline <= min(self.held[name].ends_at for name in timed)
        self.now += seconds
        due = [name for name in timed if self.held[name].ends_at <= self.now]
        blocks, excess = set(), []
        unread = [name for name in timed if self.held[name].is_unread and name not in due]
        for name in sorted(unread, key=lambda name: -self.held[name].renewed_at):
            promise = self.held[name]
            blocks.update(*promise.grant.block_ids)
            if len(blocks) > NUM_BLOCKS // 2 and promise.renewed_at + self.unread_s <= self.now:
                excess.append(name)
                blocks.add(-2)  # nothing that is older fits either
        ended = self.leases.expire(self.now)
        for outcome, names in (("expired", due), ("unread", excess)):
            self.ended([each for each in ended if each.outcome == outcome], outcome, names)
        assert len(ended) == len(due) + len(excess)

    @invariant()
    def what_is_listed_is_what_is_held(self):
        listed = {lease.request_id: lease for lease in self.leases.listed(self.now, 100)}
        assert listed.keys() == self.held.keys()
        for name, promise in self.held.items():
            lease, ids = listed[name], promise.grant.block_ids
            assert lease.readers == tuple(
                LeaseReader(engine_id=engine, num_ranks=num_ranks, released=len(released))
                for (engine, num_ranks), (released, _) in [*promise.engines.items()][:READERS_LISTED_MAX]
            )
            left_s = 0.0 if promise.is_kept else promise.ends_at - self.now
            assert (lease.age_s, lease.expires_in_s) == (self.now - promise.admitted_at, left_s)
            assert (lease.kind, lease.num_blocks) == (promise.grant.kind, len(ids[0]))
            assert self.leases.blocks_of(*promise.key) == ids
            assert self.leases.past(*promise.key) is None
        for slot, epoch in self.past:
            assert self.leases.blocks_of(slot, epoch) is None

    def teardown(self):
        if hasattr(self, "patch"):
            self.patch.undo()


ReadersMachine.TestCase.settings = thoroughly(150, least=150, stateful_step_count=40)
TestReaders = ReadersMachine.TestCase


class FollowersMachine(RuleBasedStateMachine):
    """Who follows what a worker keeps, however seldom, knows the ends of its leases once that is said to be all."""

    def __init__(self):
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, small in {"STRIDE_TOKENS": 2, "PIECE_MAX": 3, "GONE_MAX": 2}.items():
            self.patch.setattr(told, name, small)
        self.leases = LeaseTable(EpochTable(8, BASE), num_blocks=99, unread_s=100.0)
        self.mint = Issuer(
            "prefill",
            [RankAddress(0, "0" * 32, "tcp://127.0.0.1:1", BASE, 8)],
            sign=lambda payload: bytes(32),
            lease_s=10.0,
            block_sizes=[1],
        )
        self.kept, self.count = {}, 0
        self.followers = [{"since": 0, "begun": 0, "ends": set()} for _ in range(3)]

    @initialize(room=st.sampled_from((6, 1000)))
    def begin(self, room):
        """``room``: how many ends are told."""
        self.patch.setattr(told, "ENDS_MAX", room)

    @rule(content=st.lists(st.integers(1, 2), min_size=1, max_size=6), is_kept=st.sampled_from((True, True, False)))
    def hold(self, content, is_kept):
        if len(self.leases) == 8:
            return
        self.count += 1
        name, digests = f"request-{self.count}", chained(content)
        ids = [list(range(len(content)))]
        if is_kept:
            _, grant = self.mint.keep(name, block_ids=ids, num_tokens=len(content), digests=[digests])
        else:
            _, grant = self.mint.offer(name, block_ids=ids, num_tokens=len(content), digests=[digests], chained=True)
        self.leases.admit(grant, 0.0, digests)
        ends = {len(content), *range(2, len(content) + 1, 2)} if is_kept else ()
        self.kept[name] = {told.shortened(digests[end - 1]) for end in ends}

    @precondition(lambda self: self.kept)
    @rule(which=st.integers(0, 9))
    def revoke(self, which):
        name = [*self.kept][which % len(self.kept)]
        assert len(self.leases.revoke(name, 0.0)) == 1
        self.mint.retire(name)
        del self.kept[name]

    @rule(which=st.integers(0, 2), rounds=st.sampled_from((1, 50)))
    def follow(self, which, rounds):
        follower = self.followers[which]
        for _ in range(rounds):
            number = self.leases.ends.number
            changes = self.leases.ends.after(follower["since"], follower["begun"])
            if follower["since"] and number - follower["since"] <= told.GONE_MAX:
                assert changes.begun == follower["begun"], "who keeps up is not told all again"
            if follower["since"] == number:
                assert not changes.new + changes.gone, "each change is told once"
            if changes.begun != follower["begun"]:
                follower["ends"].clear()
            new, gone = (
                {each[at : at + told.END_BYTES] for at in range(0, len(each), told.END_BYTES)}
                for each in (changes.new, changes.gone)
            )
            follower["ends"] = (follower["ends"] | new) - gone
            assert len(new) + len(gone) <= 3, "a piece at a time"
            follower["since"], follower["begun"] = changes.until, changes.begun
            everything = set().union(*self.kept.values())
            if changes.is_all:
                assert follower["ends"] == everything
                assert changes.until == number
            if changes.until == number:
                assert follower["ends"] <= everything, "what has gone is not taken for kept"
                return
        assert rounds == 1, "it comes to an end"

    def teardown(self):
        self.patch.undo()


FollowersMachine.TestCase.settings = thoroughly(100, least=60, stateful_step_count=40)
TestFollowers = FollowersMachine.TestCase


@given(st.lists(st.lists(readers, max_size=6), min_size=1, max_size=8))
def test_releases_that_come_early_are_counted_however_many_came_before(rounds):
    """At most so many wait at once: those that were counted take no room."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "EARLY_MAX", 6)
        mint, leases = issuer_of(), LeaseTable(EpochTable(SLOTS, BASE), num_blocks=9, unread_s=9.0)
        for number, early in enumerate(rounds):
            _, grant = mint.offer(f"request-{number}", block_ids=[[1]], num_tokens=1)
            for reader in early:
                assert leases.release([(grant.slot, grant.epoch)], reader, 0.0, read=True) == (["unknown"], [])
            ended = leases.admit(grant, 0.0)
            ranks = {(reader.engine_id, reader.num_ranks): set() for reader in early}
            for reader in early:
                ranks[reader.engine_id, reader.num_ranks].add(reader.rank)
            is_over = any(len(released) == num_ranks for (_, num_ranks), released in ranks.items())
            assert [each.outcome for each in ended] == ["released"] * is_over
            if is_over:
                assert leases.past(grant.slot, grant.epoch).ended_by == "used"
            else:
                leases.revoke(grant.request_id, 0.0)
            mint.retire(grant.request_id)


blocks_and_digests = st.tuples(st.sampled_from((ABSENT, 3)), st.sampled_from((b"", b"digest")))


@given(st.lists(st.lists(blocks_and_digests, min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_block_that_is_there_has_a_digest_and_no_other_needs_one(groups):
    mint = issuer_of(block_sizes=[1] * len(groups))
    block_ids, digests = ([[pair[side] for pair in group] for group in groups] for side in (0, 1))
    tokens = [len(group) for group in groups]
    lacks = any(block >= 0 and not digest for group in groups for block, digest in group)
    for number in range(SLOTS + 1):  # what is refused costs no slot
        refusal = (ArgumentInvalid, BlockIdsInvalid) if lacks else CapacityExceeded if number == SLOTS else None
        with pytest.raises(refusal) if refusal else nullcontext():
            mint.offer(f"request-{number}", block_ids=block_ids, num_tokens=tokens, digests=digests)
