"""What bounds a table of leases, and orders that are rare. The machines in tests/properties play all others."""

import pytest
from msgspec.structs import replace

from kvflow.errors import BlockIdsInvalid, CapacityExceeded
from kvflow.events import LeaseEnded
from kvflow.leases.epochs import EpochTable
from kvflow.leases.table import READERS_MAX, LeaseTable, PastLease, Reader

from .helpers import BASE, SLOTS, address, mint_of

ALONE = Reader("decode-0", 0, 1)


@pytest.fixture
def epochs():
    return EpochTable(SLOTS, BASE)


@pytest.fixture
def leases(epochs):
    return LeaseTable(epochs, num_blocks=8, unread_s=100.0)


def grant_of(mint=None, request_id="r"):
    return (mint or mint_of()).offer(request_id, block_ids=[[1]], num_tokens=1)[1]


def released(leases, key, reader, now, **how):
    """Release one lease; return what became of it, and how it has ended if it did now."""
    (answer,), ended = leases.release([key], reader, now, **how)
    return answer, ended[0] if ended else None


def test_the_mac_of_a_lease_is_computed_once_whatever_is_presented(leases):
    grant, signed = grant_of(), []

    def macs_of(which):
        signed.append(which)
        return (b"ours", b"of the second secret")

    def has(mac, slot=grant.slot, epoch=grant.epoch):
        return leases.has_mac(slot, epoch, mac, macs_of)

    assert not has(b"ours")
    leases.admit(grant, now=1.0)
    assert [has(mac) for mac in (b"wrong", b"ours", b"", b"of the second secret", b"wrong")] == [0, 1, 0, 1, 0]
    assert not has(b"ours", epoch=grant.epoch + 1)
    assert not has(b"ours", slot=grant.slot + 1)
    assert signed == [grant]
    leases.revoke("r", 2.0)
    assert not has(b"ours")
    assert signed == [grant]


def test_one_message_releases_many_leases_and_each_once(leases, epochs):
    mint = mint_of()
    grants = [grant_of(mint, name) for name in "abc"]
    a, b, c = [(grant.slot, grant.epoch) for grant in grants]
    for grant in grants[:2]:
        leases.admit(grant, now=1.0)
    answers, ended = leases.release([a, c, b, a, (b[0], BASE)], ALONE, 3.0, read=True)
    assert answers == ["ended", "unknown", "ended", "ended", "unknown"]
    assert ended == [LeaseEnded("a", "released", 2.0), LeaseEnded("b", "released", 2.0)]
    assert [epochs[slot] for slot, _ in (a, b)] == [a[1] + 1, b[1] + 1]
    assert leases.past(*a) == leases.past(*b) == PastLease("used", 3.0)
    assert leases.next_deadline() is None


def test_leases_of_several_durations_run_out_in_time(leases):
    mint = mint_of()
    short, long, last = (replace(grant_of(mint, name), lease_ms=ms) for name, ms in (("a", 10), ("b", 40), ("c", 10)))
    for grant, now in ((long, 0.0), (short, 0.005), (last, 0.01)):
        leases.admit(grant, now)
    assert leases.next_deadline() == 0.015
    assert leases.renew([(short.slot, short.epoch)], 0.012) == ["held"]
    assert [end.request_id for end in leases.expire(0.02)] == ["c"]
    assert leases.next_deadline() == 0.022
    assert {end.request_id for end in leases.expire(0.05)} == {"a", "b"}
    assert leases.next_deadline() is None


def test_a_key_that_names_a_thousand_engines_harms_only_itself(leases):
    grant = grant_of()
    leases.admit(grant, now=1.0)
    key = (grant.slot, grant.epoch)
    honest = [Reader("decode-0", rank, 2, "its key") for rank in range(2)]
    assert released(leases, key, honest[0], 2.0) == ("counted", None)
    for number in range(READERS_MAX + 5):
        released(leases, key, Reader(f"engine {number}", 0, 2, "one key"), 2.0)
    late = [Reader("decode-1", rank, 2, f"key {rank}") for rank in range(2)]
    assert released(leases, key, late[0], 3.0) == ("counted", None)
    (lease,) = leases._by_slot.values()
    assert len(lease.readers) == READERS_MAX
    assert released(leases, key, Reader("one more", 0, 2, "one key"), 3.0) == ("unknown", None)
    assert released(leases, key, honest[1], 3.0)[0] == "ended"


def test_voiding_ends_no_other_lease_but_a_kept_one_of_the_slot(leases, epochs):
    """The issuer has given the slot of the kept lease to the grant."""
    mint = mint_of(address(slots=1), block_sizes=(1,))
    kept = mint.keep("kept", block_ids=[[1]], num_tokens=1, digests=[[b"1"]])[1]
    leases.admit(kept, 0.0, (b"1",))
    first = grant_of(mint)
    assert leases.void(kept, 1.0) == []
    assert leases.void(first, 1.0) == [LeaseEnded("kept", "revoked", 1.0, kind="kept")]
    assert (leases.find((b"1",)), leases.past(kept.slot, kept.epoch)) == (None, PastLease("revoked", 1.0))
    mint.retire("r")
    second = grant_of(mint)
    leases.admit(second, 2.0)
    assert leases.void(first, 3.0) == leases.void(second, 3.0) == []
    assert epochs[second.slot] == second.epoch


def test_a_lease_held_before_its_ticket_was_out_has_no_early_release(leases):
    grant = replace(grant_of(), admitted=True)
    released(leases, (grant.slot, grant.epoch), ALONE, 0.0)  # somebody guesses
    assert leases.admit(grant, now=1.0) == []


def test_slots_that_are_taken_or_not_there_are_refused(leases):
    leases.admit(grant_of(), now=0.0)
    with pytest.raises(CapacityExceeded, match="no room for more leases in slot 0: the limit is 1") as caught:
        leases.admit(grant_of(request_id="another mint, the same slot"), now=0.0)
    assert "It holds that of 'r'." in caught.value.remedy
    small = LeaseTable(EpochTable(1, BASE), num_blocks=8, unread_s=100.0)
    mint = mint_of()
    small.admit(grant_of(mint, "a"), now=0.0)
    with pytest.raises(BlockIdsInvalid, match="the grant has slot 1, and this worker has 1"):
        small.admit(grant_of(mint, "b"), now=0.0)


def test_of_ended_leases_the_latest_are_remembered(leases, monkeypatch):
    monkeypatch.setattr("kvflow.leases.table.PAST_MAX", 2)
    mint, keys = mint_of(), []
    for name in ("a", "b", "c"):
        grant = grant_of(mint, name)
        keys.append((grant.slot, grant.epoch))
        leases.admit(grant, now=0.0)
        leases.revoke(name, 1.0)
    assert [leases.past(*key) is None for key in keys] == [True, False, False]


def test_leases_that_have_ended_are_not_kept_until_they_would_have_run_out(leases):
    mint = mint_of()
    for number in range(1000):
        grant = grant_of(mint, f"r{number}")
        leases.admit(grant, now=0.0)
        leases.renew([(grant.slot, grant.epoch)], 1.0)
        leases.revoke(grant.request_id, 2.0)
        mint.retire(grant.request_id)
    assert leases.next_deadline() is None
    assert (len(leases), leases._ends) == (0, {})


def test_a_release_looks_at_its_own_engine_only(leases):
    """A member may claim to be a thousand engines, and release one lease again and again."""
    grant = grant_of()
    leases.admit(grant, now=0.0)
    key = (grant.slot, grant.epoch)
    for number in range(READERS_MAX):
        assert released(leases, key, Reader(f"e{number}", 0, 2), 1.0) == ("counted", None)
    by_engine = leases._by_slot[grant.slot].readers

    class Watched(dict):
        def items(self):
            raise AssertionError("every engine was looked at")

    leases._by_slot[grant.slot].readers = Watched(by_engine)
    assert released(leases, key, Reader("e7", 0, 2), 1.0) == ("counted", None)
    assert released(leases, key, Reader("e7", 1, 2), 1.0)[0] == "ended"


def test_releases_that_come_early_are_bounded(leases, monkeypatch):
    """A member may release what was never admitted: what is remembered of it is bounded, and given back."""
    monkeypatch.setattr("kvflow.leases.table.EARLY_MAX", 8)
    mint = mint_of()
    grants = [grant_of(mint, f"r{number}") for number in range(SLOTS)]
    for grant in grants:
        for number in range(100):
            assert released(leases, (grant.slot, grant.epoch), Reader(f"e{number}", 0, 2), 0.0)[0] == "unknown"
            assert sum(map(len, leases._early.values())) <= 8
    for grant in grants:
        leases.admit(grant, now=1.0)
    assert (leases._early, leases._early_of, leases._num_early) == ({}, {}, 0)


def test_one_key_cannot_have_early_releases_of_another_forgotten(leases, monkeypatch):
    monkeypatch.setattr("kvflow.leases.table.EARLY_MAX", 8)
    grant = grant_of()
    key = (grant.slot, grant.epoch)
    for number in range(100):
        released(leases, (1, grant.epoch + number), Reader("flood", 0, 1, "key of one"), 0.0)
    released(leases, key, Reader("a", 0, 1, "key of another"), 1.0)
    for number in range(100):
        released(leases, (2, grant.epoch + number), Reader(f"flood-{number}", 0, 1, "key of one"), 2.0)
    assert leases.admit(grant, now=3.0) == [LeaseEnded("r", "released", 0.0)]


def test_a_repeated_early_release_takes_no_place(leases, monkeypatch):
    monkeypatch.setattr("kvflow.leases.table.EARLY_MAX", 2)
    grant = grant_of()
    key = (grant.slot, grant.epoch)
    for rank in (0, 1, 1, 1, 1):
        released(leases, key, Reader("a", rank, 2), 0.0)
    assert leases.admit(grant, now=1.0) == [LeaseEnded("r", "released", 0.0)]


def test_a_late_release_of_another_epoch_leaves_early_ones_counted(leases):
    """A request that was given up leaves a ticket that one rank never admitted. Its reader releases it late."""
    mint = mint_of()
    given_up = grant_of(mint, "given up")
    mint.retire("given up")
    grant = grant_of(mint)
    released(leases, (grant.slot, grant.epoch), ALONE, 0.0)
    released(leases, (given_up.slot, given_up.epoch), Reader("late", 0, 1), 1.0)
    assert leases.admit(grant, now=2.0) == [LeaseEnded("r", "released", 0.0)]


UNREAD_S = 10.0


class Unread:
    """A table of eight blocks, of which offers without a sign of a reader may hold four."""

    def __init__(self):
        self.leases = LeaseTable(EpochTable(SLOTS, BASE), num_blocks=8, unread_s=UNREAD_S)
        self.mint = mint_of(block_sizes=[1])

    def offer(self, name, *blocks, now=0.0, **how):
        _, grant = self.mint.offer(name, block_ids=[blocks], num_tokens=len(blocks))
        self.leases.admit(grant, now, **how)
        return grant.slot, grant.epoch

    def ends(self, until):
        """Let time pass as a worker does; return which leases have ended how, and when."""
        found = []
        while (now := self.leases.next_deadline()) is not None and now <= until:
            for end in self.leases.expire(now):
                self.mint.retire(end.request_id)
                found.append((end.request_id, end.outcome, now))
        return found


@pytest.fixture
def unread():
    return Unread()


def test_unread_offers_of_half_of_the_blocks_last_as_long_as_their_leases(unread):
    unread.offer("a", 1, 2)
    unread.offer("b", 3, 4)
    unread.offer("c", 1, 4, now=1.0)  # shared blocks count once
    assert unread.ends(40.0) == [("a", "expired", 30.0), ("b", "expired", 30.0), ("c", "expired", 31.0)]


def test_beyond_half_of_the_blocks_the_oldest_unread_offers_end(unread):
    for at, name in enumerate("abcd"):
        unread.offer(name, 2 * at, 2 * at + 1, now=float(at))
    assert unread.ends(20.0) == [("a", "unread", 10.0), ("b", "unread", 11.0)]
    unread.offer("e", 0, 1, now=20.0)
    assert unread.ends(21.5) == [("c", "unread", 21.0)]  # it is old enough
    assert [name for name, *_ in unread.ends(60.0)] == ["d", "e"]


def test_kept_leases_do_not_count_among_unread_offers(unread):
    _, kept = unread.mint.keep("kept", block_ids=[range(8)], num_tokens=8, digests=[[bytes([at]) for at in range(8)]])
    unread.leases.admit(kept, 0.0)
    unread.offer("a", 1, 2, 3)
    assert unread.ends(60.0) == [("a", "expired", 30.0)]


@pytest.mark.parametrize("sign", ["ticket", "early release"])
def test_an_offer_with_a_sign_of_a_reader_does_not_end_unread(unread, sign):
    _, grant = unread.mint.offer("a", block_ids=[[1, 2, 3]], num_tokens=3)
    key = grant.slot, grant.epoch
    if sign == "early release":
        unread.leases.release([key], Reader("decode-0", 0, 2), 0.0)
    unread.leases.admit(grant, 0.0)
    unread.offer("b", 4, 5, 6, now=0.5)
    if sign == "ticket":
        assert unread.leases.has_mac(*key, b"mac", lambda grant: [b"mac"])
    assert {end[:2] for end in unread.ends(60.0)} == {("a", "expired"), ("b", "expired")}


def test_the_time_of_an_open_lease_begins_at_its_seal(unread):
    _, grant = unread.mint.offer_progressive("a", [()], 5, None, "")
    unread.leases.admit(grant, 0.0, (), set())
    lease = unread.leases.unsealed("a")
    for now in (9.0, 18.0, 27.0):
        unread.leases.advance(lease, (tuple(range(5)),), (tuple(range(4)),), 4, now, sealed=False)
        assert unread.ends(now + 9.0) == []
    unread.leases.advance(lease, (tuple(range(5)),), (tuple(range(5)),), 5, 36.0, sealed=True)
    assert unread.ends(60.0) == [("a", "unread", 46.0)]


def test_blocks_of_unread_offers_are_counted_once_a_second_at_most(unread):
    unread.offer("a", 1)
    times = []
    while (now := unread.leases.next_deadline()) is not None:
        times.append(now)
        unread.leases.expire(now)
    assert times == [*map(float, range(10, 31))]


@pytest.mark.parametrize(("slot", "epoch"), [(0, BASE + 99), (99, BASE + 1), (0, BASE), (0, 0)])
def test_what_never_was_is_unknown(leases, slot, epoch):
    leases.admit(grant_of(), now=0.0)
    assert released(leases, (slot, epoch), ALONE, 1.0) == ("unknown", None)
    assert leases.renew([(slot, epoch)], 1.0) == ["unknown"]


def test_a_question_keeps_what_it_has_found_when_its_digest_comes_again(leases):
    """Otherwise nobody finds the offer again if the answer reaches nobody."""
    grant = grant_of()
    leases.admit(grant, 0.0)
    lease = leases.held(grant.slot, grant.epoch)
    for digest in (b"1", b"2"):
        leases.name(lease, digest)
        assert leases.find((b"1", b"2"), question=7) == ((lease, 1) if digest == b"1" else None)
    assert leases.give_back(7) == (b"2",)
    assert leases.find((b"1", b"2"), question=8) == (lease, 2)
