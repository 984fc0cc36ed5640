"""Leases under every order of admissions, releases, renewals, revocations and time.

The epoch is raised before an end is reported; each rank's release counts once; slots are conserved between the
mint, which allots them, and the table, which holds them.
"""

import math
import operator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvflow.errors import BlockIdsInvalid
from kvflow.leases.epochs import EpochTable, judge
from kvflow.leases.issuer import Issuer
from kvflow.leases.table import LeaseTable, Reader
from kvflow.leases.tickets import RankAddress

from .caches import thoroughly

SLOTS = 3
BASE = 500
LEASE_S = 10.0
SLOT_OUTSIDE = 99
names = st.sampled_from([f"request-{number}" for number in range(5)])
readers = st.builds(
    lambda engine, rank_of: Reader(engine, rank_of[0], rank_of[1]),
    st.sampled_from(("decode-a", "decode-b")),
    st.sampled_from(((0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 3))),
)


tokens = st.lists(st.integers(1, 2), min_size=1, max_size=6)


def chained(content):
    """Return digests of blocks of one token that cover all tokens before."""
    return tuple(bytes(content[:end]) for end in range(1, len(content) + 1))


class Promise:
    """What is known of a grant. ``content``: the tokens of one that is kept; ``offered``: by what others are found.

    ``found``: by what this one was.
    """

    def __init__(self, grant, now, content=()):
        self.grant = grant
        self.ends_at = math.inf if content else now + LEASE_S
        self.digests = chained(content)
        self.released_by = set()
        self.read = False
        self.offered = self.found = b""
        self.unsealed = grant.kind == "open"

    @property
    def key(self):
        return self.grant.slot, self.grant.epoch

    @property
    def released(self):
        return any(map(self.is_released_by, self.released_by))

    def is_released_by(self, reader):
        """Tell whether all ranks of a reader's engine have released it."""
        return len(self.ranks_of(reader)) == reader.num_ranks

    def ranks_of(self, reader):
        """Return the ranks of a reader's engine that have released it."""
        engine = reader.engine_id, reader.num_ranks
        return {one for one in self.released_by if (one.engine_id, one.num_ranks) == engine}


class LeaseMachine(RuleBasedStateMachine):
    """One engine of one rank, as a worker drives it: an end retires the mint's slot."""

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.epochs = EpochTable(SLOTS, BASE)
        self.leases = LeaseTable(self.epochs, num_blocks=8, unread_s=100.0)
        address = RankAddress(0, "0" * 32, "tcp://127.0.0.1:1", BASE, SLOTS)
        self.mint = Issuer("prefill", [address], sign=lambda payload: bytes(32), lease_s=LEASE_S, block_sizes=[1])
        self.held = {}
        self.past = []
        self.seen = [self.epochs[slot] for slot in range(SLOTS)]

    @property
    def kept(self):
        return [name for name, promise in self.held.items() if promise.digests]  # the oldest first

    @property
    def unsealed(self):
        return sorted(name for name, promise in self.held.items() if promise.unsealed)

    def can_admit(self, name):
        return name not in self.held and (len(self.held) < SLOTS or self.kept)

    def admit(self, grant, content=(), offered=(), told=None):
        """Admit a grant. If no slot was free, the oldest kept lease ends, and no other."""
        oldest = self.kept[0] if len(self.held) == SLOTS else None
        taken = {promise.grant.slot for name, promise in self.held.items() if name != oldest}
        assert grant.slot not in taken
        assert judge(grant.epoch, self.epochs[grant.slot]) == "early"
        ended = self.leases.admit(grant, self.now, chained(content or offered), told)
        if oldest is not None:
            self.ended(ended.pop(0), "revoked", retired=True)
        self.held[grant.request_id] = Promise(grant, self.now, content)
        return ended

    @rule(name=names)
    def offer(self, name):
        if self.can_admit(name):
            assert self.admit(self.mint.offer(name, block_ids=[[1]], num_tokens=1)[1]) == []

    @rule(name=names, content=tokens)
    def keep(self, name, content):
        if self.can_admit(name):
            ids = list(range(len(content)))
            _, grant = self.mint.keep(name, block_ids=[ids], num_tokens=len(ids), digests=[chained(content)])
            assert grant.contents[0].digests == chained(content)[-1:]
            assert self.admit(grant, content) == []

    @rule(name=names, content=tokens)
    def offer_what_is_computed(self, name, content):
        if self.can_admit(name):
            _, grant = self.mint.offer_progressive(name, [[]], len(content), [chained(content)])
            assert self.admit(grant, offered=content, told=set()) == []
            self.held[name].offered = chained(content)[-1]

    @rule(name=names, early=st.lists(readers, max_size=2))
    def void(self, name, early):
        """A grant that will not be admitted ends like a lease, and so does what was kept in its slot."""
        if not self.can_admit(name):
            return
        oldest = self.kept[0] if len(self.held) == SLOTS else None
        _, grant = self.mint.offer(name, block_ids=[[1]], num_tokens=1)
        for reader in early:
            assert self.leases.release([(grant.slot, grant.epoch)], reader, self.now) == (["unknown"], [])
        ended = self.leases.void(grant, self.now)
        assert [each.request_id for each in ended] == [oldest] * (oldest is not None)
        for each in ended:
            self.ended(each, "revoked", retired=True)
        with pytest.raises(BlockIdsInvalid):
            self.leases.admit(grant, self.now)
        assert judge(grant.epoch, self.epochs[grant.slot]) == "stale"
        assert self.leases.past(grant.slot, grant.epoch).ended_by == "revoked"
        self.past.append((grant.slot, grant.epoch))
        self.mint.retire(name)

    @precondition(lambda self: self.unsealed)
    @rule(data=st.data(), more=st.integers(0, 3), sealed=st.booleans())
    def advance(self, data, more, sealed):
        """What has settled is served, the lease is renewed, and a seal is the last word."""
        name = data.draw(st.sampled_from(self.unsealed))
        promise, lease = self.held[name], self.leases.unsealed(name)
        (told,) = lease.blocks
        blocks = (tuple(range(len(told) + more)),)
        settled = len(blocks[0]) if sealed else data.draw(st.integers(lease.settled, len(blocks[0])))
        served = (blocks[0][:settled],)
        self.leases.advance(lease, blocks, served, settled, self.now, sealed=sealed)
        assert self.leases.blocks_of(*promise.key) == served
        promise.ends_at, promise.unsealed = self.now + LEASE_S, not sealed
        if sealed:
            with pytest.raises(BlockIdsInvalid):
                self.leases.unsealed(name)

    @rule(content=tokens, at_least=st.integers(1, 6))
    def meet(self, content, at_least):
        """The offer that ends last in what is asked for is found, the oldest of equal ones, once."""
        ends = {
            name: len(promise.offered)
            for name, promise in self.held.items()
            if promise.offered and promise.offered in chained(content)
        }
        last = max(ends.values(), default=0)
        found = self.leases.find(chained(content)[at_least - 1 :], question=object())
        if last >= at_least:
            name = next(name for name in ends if ends[name] == last)
            assert (found[0].grant.request_id, found[1]) == (name, last - at_least + 1)
            self.held[name].found, self.held[name].offered = self.held[name].offered, b""
        else:
            assert found is None or found[0].names.for_all

    @rule(content=tokens)
    def find(self, content):
        """The answer is a lease with as long a prefix as any has."""
        shared = {name: sum(map(operator.eq, chained(content), self.held[name].digests)) for name in self.kept}
        longest = max(shared.values(), default=0)
        found = self.leases.find(chained(content))
        assert (found is None) == (not longest)
        if found is not None:
            lease, count = found
            assert count == longest == shared[lease.grant.request_id]

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), reader=readers)
    def speak_of_what_is_kept(self, data, reader):
        """Neither a release nor a renewal changes it."""
        key = self.held[data.draw(st.sampled_from(self.kept))].key
        assert self.leases.release([key], reader, self.now, read=True) == (["held"], [])
        assert self.leases.renew([key], self.now, reader) == ["held"]

    @precondition(lambda self: len(self.held) < SLOTS)
    @rule(name=names, early=st.lists(readers, max_size=4))
    def offer_to_readers_that_are_faster(self, name, early):
        """A release that comes before its lease counts as one that comes behind it."""
        if name in self.held:
            return
        _, grant = self.mint.offer(name, block_ids=[[1]], num_tokens=1)
        for reader in early:
            assert self.leases.release([(grant.slot, grant.epoch)], reader, self.now) == (["unknown"], [])
        promise = self.held[name] = Promise(grant, self.now)
        promise.released_by = set(early)
        ended = self.leases.admit(grant, self.now)
        assert bool(ended) == promise.released
        for one in ended:
            self.ended(one, "released")

    @precondition(lambda self: len(self.kept) < len(self.held))
    @rule(data=st.data(), reader=readers, read=st.booleans())
    def release(self, data, reader, read):
        """When the last rank has spoken, the lease ends; or it is found again, if it was found and not read."""
        name = data.draw(st.sampled_from(sorted({*self.held} - {*self.kept})))
        promise = self.held[name]
        answers, ended = self.leases.release([promise.key], reader, self.now, read=read)
        promise.released_by.add(reader)
        promise.read |= read
        if promise.is_released_by(reader) and promise.found and not (read if reader.num_ranks == 1 else promise.read):
            assert (answers, ended) == (["held"], [])
            promise.released_by -= promise.ranks_of(reader)
            promise.offered, promise.found = promise.found, b""
            self.held[name] = self.held.pop(name)  # the last of equal ones
        elif promise.is_released_by(reader):
            assert answers == ["ended"]
            self.ended(ended[0], "released")
        else:
            assert (answers, ended) == (["counted"], [])

    @precondition(lambda self: len(self.kept) < len(self.held))
    @rule(data=st.data())
    def renew(self, data):
        promise = self.held[data.draw(st.sampled_from(sorted({*self.held} - {*self.kept})))]
        assert self.leases.renew([promise.key], self.now) == ["held"]
        promise.ends_at = self.now + LEASE_S

    @rule(name=names)
    def revoke(self, name):
        ended = self.leases.revoke(name, self.now)
        assert len(ended) == (name in self.held)
        for each in ended:
            self.ended(each, "revoked")

    @rule(seconds=st.sampled_from((0.0, 1.0, 4.0, 5.0, 6.0, 10.0, 11.0)), awaited=st.sets(names))
    def let_time_pass(self, seconds, awaited):
        """Exactly the leases that have run out end, and the table asked to be woken in time for the first.

        Those that a question waits for are renewed instead.
        """
        self.now += seconds
        due = {name for name, promise in self.held.items() if promise.ends_at <= self.now}
        assert (self.leases.next_deadline() is None) == (len(self.kept) == len(self.held))
        if len(self.kept) < len(self.held):
            assert self.leases.next_deadline() <= min(promise.ends_at for promise in self.held.values())
        ended = self.leases.expire(self.now, awaited)
        for name in due & awaited:
            self.held[name].ends_at = self.now + LEASE_S
        assert {one.request_id for one in ended} == due - awaited
        for one in ended:
            self.ended(one, "expired")

    @precondition(lambda self: self.past)
    @rule(data=st.data(), reader=readers)
    def speak_of_the_past(self, data, reader):
        """A late or repeated word about a lease that has ended changes nothing, whoever holds the slot now."""
        slot, epoch = data.draw(st.sampled_from(self.past))
        assert self.leases.release([(slot, epoch)], reader, self.now) == (["ended"], [])
        assert self.leases.renew([(slot, epoch)], self.now) == ["ended"]

    @rule(reader=readers, slot=st.sampled_from((0, 1, 2, SLOT_OUTSIDE)), ahead=st.integers(1, 9))
    def speak_of_what_never_was(self, reader, slot, ahead):
        highest = max(self.epochs[slot] for slot in range(SLOTS))
        for epoch in (0, BASE, highest + 2 * ahead + 100):
            assert self.leases.release([(slot, epoch)], reader, self.now) == (["unknown"], [])
            assert self.leases.renew([(slot, epoch)], self.now) == ["unknown"]

    def ended(self, event, outcome, *, retired=False):
        """By the time anyone hears of an end, a fence finds the lease stale. ``retired``: the mint has ended it."""
        promise = self.held.pop(event.request_id)
        assert (event.outcome, event.kind) == (outcome, promise.grant.kind)
        assert judge(promise.grant.epoch, self.epochs[promise.grant.slot]) == "stale"
        self.past.append(promise.key)
        assert self.mint.retire(event.request_id) != retired
        assert not self.mint.retire(event.request_id)

    @invariant()
    def a_slot_holds_what_is_promised(self):
        assert len(self.leases) == len(self.held)
        for name, promise in self.held.items():
            assert name in self.leases
            assert self.epochs[promise.grant.slot] == promise.grant.epoch

    @invariant()
    def epochs_only_grow(self):
        seen = [self.epochs[slot] for slot in range(SLOTS)]
        assert all(now >= before for now, before in zip(seen, self.seen, strict=True))
        self.seen = seen

    def teardown(self):
        """Slots are conserved: once all leases have ended, every slot can be allotted again."""
        for ended in self.leases.revoke_all(self.now):
            self.ended(ended, "revoked")
        slots = {self.mint.offer(f"last-{index}", block_ids=[[1]], num_tokens=1)[1].slot for index in range(SLOTS)}
        assert slots == set(range(SLOTS))


TestLeases = LeaseMachine.TestCase
TestLeases.settings = thoroughly(150, least=100, stateful_step_count=40)
