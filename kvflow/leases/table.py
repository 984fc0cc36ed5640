"""The lease table: a producer's promises to keep blocks, and how they end.

A lease ends by release, expiry or revocation. Each end raises the epoch *before* the engine learns that the blocks are
free. A lease is released when all ranks of one consumer engine have released it; each rank counts once. An offer that
this engine has found by asking, and that none of its ranks has read, is found again instead. Offers without a sign of a
reader have half of the blocks: if they hold more, the oldest end, as ``unread``. A *kept* lease
ends only by revocation, or when another grant gets its slot. Peers find it by the digests of its blocks. The blocks of
an *open* lease are told and settle while it is held; what has settled is not written again before its end.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Container, Hashable, Sequence
from hmac import compare_digest
from itertools import islice, takewhile
from math import inf
from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

from msgspec import Meta, Struct

from kvflow.errors import BlockIdsInvalid, CapacityExceeded, ConfigInvalid
from kvflow.events import LeaseEnded, Outcome
from kvflow.ids import ABSENT, LeaseKey
from kvflow.leases.epochs import EpochTable
from kvflow.leases.held import ADVANCES_MAX, NAMELESS, Blocks, EngineReading, Index, Lease, Names
from kvflow.leases.tickets import Grant, Kind
from kvflow.leases.told import KeptEnds, ends_of
from kvflow.validation import Count, Name, Number

PAST_MAX = 16384  # four per slot of a worker

UNREAD_SHARE = 0.5  # of the blocks
UNREAD_PAUSE_S = 1.0  # between two counts of the blocks of unread offers: with many offers a count takes milliseconds

NOTHING: frozenset[int] = frozenset()

ReaderAnswer = Literal["held", "counted", "ended", "unknown"]


class PastLease(Struct, frozen=True, gc=False):
    """How a lease ended, and when on the clock of the leases.

    ``ended_by`` is ``expired``; ``unread``; ``revoked``; ``used`` if a reader released it after a read; otherwise
    ``released``.
    """

    ended_by: str
    ended_at: float


class Reader(Struct, frozen=True):
    """The rank of a consumer engine that releases a lease, and the key that its connection has proved to hold."""

    engine_id: str
    rank: int
    num_ranks: int
    public_key: str = ""


class LeaseReader(Struct, frozen=True, kw_only=True):
    """An engine that has renewed a lease, or has released it in part.

    Attributes:
        engine_id: name of the engine, as it states it.
        num_ranks: number of its ranks.
        released: number of its ranks that have released the lease.
    """

    engine_id: Name
    num_ranks: Count
    released: Count


READERS_LISTED_MAX = 16


class LeaseState(Struct, frozen=True, kw_only=True):
    """One lease that is held.

    Attributes:
        request_id: this producer's name of the request.
        age_s: seconds since the lease was admitted.
        expires_in_s: seconds until the lease expires unless it is renewed; 0 if it is kept.
        num_blocks: blocks that it keeps, of all groups together; if it is open, those told so far.
        readers: engines that have renewed it or released it in part, at most 16. A reader whose pull takes less than
            20 ms does neither. Over NIXL a producer does not see reads. Of a kept lease none is listed.
        kind: ``offer``; ``kept``: only the producer ends it; or ``open``: its blocks are told while they are computed.
    """

    request_id: Name
    age_s: Number
    expires_in_s: Number
    num_blocks: Count
    readers: Annotated[tuple[LeaseReader, ...], Meta(max_length=READERS_LISTED_MAX)]
    kind: Kind = "offer"


READERS_MAX = 1024  # engines that one lease counts: as many as a worker has peers


EARLY_MAX = 1 << 16  # releases before admission: sixteen per slot for 4,096 slots, about 20 MiB


def _ranks_of(lease: Lease, reader: Reader) -> set[int] | None:
    """Return the ranks of a reader's engine that have released; None if its key has named too many engines."""
    engine = (reader.engine_id, reader.num_ranks)
    readers = lease.readers = lease.readers or {}
    if len(readers) >= READERS_MAX and engine not in readers:
        [(most, _)] = Counter([each.named_by for each in readers.values()]).most_common(1)
        if most == reader.public_key:
            return None
        del readers[next(each for each in reversed(readers) if readers[each].named_by == most)]
    if engine not in readers:
        readers[engine] = EngineReading(set(), reader.public_key)
    return readers[engine].released


def _count(lease: Lease, reader: Reader) -> bool | None:
    """Count a release. Return whether all ranks of the engine have released; None as ``_ranks_of``."""
    ranks = _ranks_of(lease, reader)
    if ranks is None:
        return None
    ranks.add(reader.rank)
    return len(ranks) >= reader.num_ranks


def _names_of(grant: Grant, digests: tuple[bytes, ...], whole: tuple[bytes, ...] | None) -> Names:
    """Return what peers find a lease by, of its digests and those up to which its windows are whole."""
    if grant.found_by_all:
        return Names(for_all=tuple(filter(None, digests)), whole=whole, ends=ends_of(digests, grant))
    return Names(for_one=tuple(filter(None, digests[-1:])))


class _EarlyRelease(NamedTuple):
    slot: int
    epoch: int
    reader: Reader


class LeaseTable:
    """The leases of one worker, which holds a lock around every call but ``blocks_of`` and ``has_mac``.

    One issuer allots its slots: the worker's own, or a mint elsewhere. The first lease decides which.

    ``num_blocks``: of the cache. ``unread_s``: an offer without a sign of a reader lasts at least so long.
    ``ends``: of what is kept.
    """

    def __init__(self, epochs: EpochTable, *, num_blocks: int, unread_s: float) -> None:
        self._unread_blocks, self._unread_s = int(num_blocks * UNREAD_SHARE), unread_s
        self._counted_at = -inf  # when the blocks of unread offers were counted last
        self._epochs = epochs
        self._slots = len(epochs)
        self._by_slot: dict[int, Lease] = {}
        self._index = Index()
        self.ends = KeptEnds()
        self._by_request: dict[str, Lease] = {}
        # Releases before admission: by slot, with whether the reader has read; and by key, the oldest first.
        self._early: dict[int, dict[_EarlyRelease, bool]] = {}
        self._early_of: dict[str, dict[_EarlyRelease, None]] = {}
        self._num_early = 0
        # The leases of one duration that time ends, in this order: the last admitted or renewed ends last.
        self._ends: defaultdict[int, OrderedDict[int, Lease]] = defaultdict(OrderedDict)
        self._past: OrderedDict[LeaseKey, PastLease] = OrderedDict()
        self._first: Grant | None = None  # of the issuer that allots the slots

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    @property
    def num_offers(self) -> int:
        """How many leases are held that leave their slots to no other."""
        return sum(map(len, self._ends.values()))

    @property
    def highest_epoch(self) -> int:
        """The highest epoch that any slot has held."""
        return self._epochs.highest

    def admit(
        self,
        grant: Grant,
        now: float,
        digests: tuple[bytes, ...] = (),
        told: set[int] | None = None,
        whole: tuple[bytes, ...] | None = None,
    ) -> list[LeaseEnded]:
        """Admit a grant: from now on the slot holds its epoch.

        ``digests``: those of its first group, by which peers find it; empty bytes for absent blocks.
        ``told``: see ``Lease``; None if no more blocks are told. ``whole``: likewise.

        Returns:
            The end of a lease that leaves its slot to this one; and that of this one if its readers released it before.

        Raises:
            ConfigInvalid: the other issuer allots the slots.
            BlockIdsInvalid: the request is on offer already, the slot is not in the table, or the grant's epoch is not
                newer than the slot's.
            CapacityExceeded: the slot is taken.
        """
        self._require_issuer(grant)
        request_id, slot, epoch, lease_ms = grant.request_id, grant.slot, grant.epoch, grant.lease_ms
        if request_id in self._by_request:
            raise BlockIdsInvalid(f"request {request_id!r} is on offer already", remedy="Revoke it first.")
        self._require_slot(slot, epoch)
        self._first = self._first or grant
        ended = self._end([self._by_slot[slot]], "revoked", now) if slot in self._by_slot else []
        sealed = told is None
        lease = Lease(
            grant=grant,
            epoch=epoch,
            admitted_at=now,
            ends_at=now + lease_ms / 1000 if grant.ends_by_readers else inf,
            blocks=grant.block_ids,
            served=grant.block_ids if sealed else ((),) * len(grant.block_ids),
            settled=grant.num_tokens[0] if sealed else 0,
            sealed=sealed,
            told=NOTHING if told is None else told,
            names=_names_of(grant, digests, whole) if digests else NAMELESS,
        )
        self._by_slot[slot] = self._by_request[request_id] = lease
        if lease.ends_by_readers:
            self._ends[lease_ms][slot] = lease
        self._epochs.raise_all(((slot, epoch),))
        if digests:
            self._index.add(lease)
        if lease.names.ends:
            self.ends.add(lease)
        for early, read in list(self._early[slot].items()) if slot in self._early else ():
            self._forget_early(early)
            if early.epoch == epoch and not grant.admitted:
                ended += self.release([(slot, epoch)], early.reader, now, read=read)[1]
        return ended

    def _require_slot(self, slot: int, epoch: int) -> None:
        """Refuse a slot that is not in the table, is taken, or has had this epoch or a later one."""
        if slot >= self._slots:
            raise BlockIdsInvalid(
                f"the grant has slot {slot}, and this worker has {self._slots}",
                remedy="Make a new mint with the rank_address of every worker.",
            )
        holder = self._by_slot.get(slot)
        if holder is not None and holder.ends_by_readers and holder.epoch <= epoch:
            raise CapacityExceeded(
                f"leases in slot {slot}",
                1,
                remedy=f"It holds that of {holder.grant.request_id!r}. Retire a request when its lease has ended on "
                "every rank. Before a new mint signs, let the leases of the former one end, or revoke them.",
            )
        if epoch <= self._epochs.numbers[slot]:
            later = self._epochs.numbers[slot] - epoch > 1
            raise BlockIdsInvalid(
                f"the grant's epoch {epoch} is not newer than slot {slot}'s"
                + (", which a later grant has had" if later else ": it was admitted before, or is void"),
                remedy="Admit each grant once, in this incarnation of the worker, and only those of the newest mint.",
            )

    def release(
        self, leases: Sequence[LeaseKey], reader: Reader, now: float, *, read: bool = False
    ) -> tuple[list[ReaderAnswer], list[LeaseEnded]]:
        """Count one reader's releases. A lease ends when the last rank of an engine releases it.

        A release may arrive before its lease is admitted, because a reader of some ranks of a ticket releases all of
        them. The answer is then ``unknown``, and it counts at the admission. ``read``: whether the blocks were read.

        Returns:
            One answer per lease, in order; and the leases that ended now.
        """
        answers: list[ReaderAnswer] = []
        done: dict[int, Lease] = {}
        alone = reader.num_ranks == 1
        for slot, epoch in leases:
            lease = self._by_slot.get(slot)
            if lease is None or lease.epoch != epoch:
                answers.append(self._release_early(slot, epoch, reader, read))
                continue
            if not lease.ends_by_readers:
                answers.append("held")
                continue
            complete = alone or _count(lease, reader)
            if complete is None:
                answers.append("unknown")  # the lease ends when it runs out
                continue
            if read:
                lease.read = True
            was_read = read if alone else lease.read
            if complete and (was_read or not self._given_back(lease)):
                done[slot] = lease
            answers.append("ended" if slot in done else "held" if complete else "counted")
        return answers, self._end(done.values(), "released", now) if done else []

    def renew(self, leases: Sequence[LeaseKey], now: float, reader: Reader | None = None) -> list[ReaderAnswer]:
        """Extend leases by their full duration from now; list the reader. Return one answer per lease."""
        answers: list[ReaderAnswer] = []
        for slot, epoch in leases:
            lease = self._by_slot.get(slot)
            if lease is None or lease.epoch != epoch:
                answers.append("ended" if self._is_past(slot, epoch) else "unknown")
                continue
            answers.append("held")
            if lease.ends_by_readers:
                lease_ms = lease.grant.lease_ms
                lease.ends_at = now + lease_ms / 1000
                self._ends[lease_ms].move_to_end(slot)
                if reader is not None:
                    _ranks_of(lease, reader)
        return answers

    def listed(self, now: float, limit: int) -> tuple[LeaseState, ...]:
        """Return the leases that are held, at most ``limit``; those that were admitted first come first."""
        return tuple(
            LeaseState(
                request_id=lease.grant.request_id,
                age_s=now - lease.admitted_at,
                expires_in_s=lease.ends_at - now if lease.ends_by_readers else 0.0,
                num_blocks=sum(map(len, lease.blocks)),
                readers=tuple(
                    LeaseReader(engine_id=engine_id, num_ranks=num_ranks, released=len(reading.released))
                    for (engine_id, num_ranks), reading in islice((lease.readers or {}).items(), READERS_LISTED_MAX)
                ),
                kind=lease.grant.kind,
            )
            for lease in islice(self._by_request.values(), limit)
        )

    def has_mac(self, slot: int, epoch: int, mac: bytes, macs_of: Callable[[Grant], Sequence[bytes]]) -> bool:
        """Return whether a lease is held and its ticket has this MAC. Thread: any, without a lock, as ``blocks_of``.

        ``macs_of`` signs the grant, once for each lease, whatever a peer presents.
        """
        lease = self.held(slot, epoch)
        if lease is None:
            return False
        if not lease.macs:
            lease.macs = macs_of(lease.grant)
        found = any(compare_digest(mac, each) for each in lease.macs)
        lease.shown = lease.shown or found
        return found

    def blocks_of(self, slot: int, epoch: int) -> Sequence[Sequence[int]] | None:
        """Return the block ids of each group that have settled while the lease is held; otherwise None.

        The epoch decides, and is raised before this method returns None. What settles of an open lease makes new lists.
        Thread: any, without a lock, because one dict lookup is atomic and no list changes.
        """
        lease = self.held(slot, epoch)
        return None if lease is None else lease.served

    def past(self, slot: int, epoch: int) -> PastLease | None:
        """Return how a lease ended; None if it is not remembered."""
        return self._past.get((slot, epoch))

    def find(self, digests: Sequence[bytes], question: Hashable = None) -> tuple[Lease, int] | None:
        """Return the lease with the longest prefix of chained digests, and its length; None if there is none.

        ``question``: one that waits. It prefers a lease all of which is among them, and which only it finds.
        """
        return self._index.find(digests, question)

    def name(self, lease: Lease, digest: bytes) -> None:
        """Let one peer find a lease by the digest of its last block; a question that has found it keeps it."""
        if lease.found_by is None:
            self._index.remove(lease)
        lease.names = Names(for_one=(digest,) if digest else ())
        self._index.add(lease)

    def give_back(self, question: Hashable) -> tuple[bytes, ...]:
        """Let others find the offer that a question has found, for its answer reaches nobody; return the digest."""
        lease = self._index.by_question.get(question)
        if lease is None:
            return ()
        self._index.give_back(lease)
        return lease.names.for_one

    def unsealed(self, request_id: str) -> Lease | None:
        """Return an open lease that is not sealed; None if it has ended. Raises ``BlockIdsInvalid`` for another."""
        lease = self._by_request.get(request_id)
        if lease is not None and lease.sealed:
            remedy = "Advance and seal what offer_progressive has offered, until it is sealed."
            raise BlockIdsInvalid(f"request {request_id!r} is not open: all of it is on offer", remedy=remedy)
        return lease

    def advance(self, lease: Lease, blocks: Blocks, served: Blocks, settled: int, now: float, *, sealed: bool) -> None:
        """Publish what an open lease was told, and renew it.

        ``served``: the blocks that are written; ``settled``: their tokens.
        """
        lease.blocks, lease.served = blocks, served  # first: a reader that learns of a block may read it
        lease.settled, lease.sealed = settled, sealed
        self.renew([(lease.grant.slot, lease.epoch)], now)
        lease.advances = (*lease.advances, (now - lease.admitted_at, settled))
        if len(lease.advances) > ADVANCES_MAX:
            lease.advances = (*lease.advances[:-1:2], lease.advances[-1])

    def held(self, slot: int, epoch: int) -> Lease | None:
        """Return a lease that is held. Thread: any, without a lock, as ``blocks_of``."""
        lease = self._by_slot.get(slot)
        return lease if lease is not None and lease.epoch == epoch else None

    def may_come(self, slot: int, epoch: int) -> bool:
        """Return whether a grant with this epoch can still be admitted."""
        return slot < self._slots and epoch > self._epochs[slot]

    def revoke(self, request_id: str, now: float) -> list[LeaseEnded]:
        """End a lease now, unless it is unknown or has ended."""
        return self._end([self._by_request[request_id]], "revoked", now) if request_id in self._by_request else []

    def void(self, grant: Grant, now: float) -> list[LeaseEnded]:
        """Never admit a grant: its readers find that it has ended. Return the end of a lease that left it its slot.

        Raises ``ConfigInvalid`` as ``admit``.
        """
        self._require_issuer(grant)
        slot, epoch = grant.slot, grant.epoch
        holder = self._by_slot.get(slot)
        if (holder is not None and holder.ends_by_readers) or not self.may_come(slot, epoch):
            return []
        self._past[slot, epoch] = PastLease("revoked", now)
        ended = self._end([] if holder is None else [holder], "revoked", now)
        self._epochs.raise_all(((slot, epoch + 1),))
        self._first = self._first or grant
        return ended

    def revoke_kept(self, now: float) -> list[LeaseEnded]:
        """End every lease that neither readers nor time end."""
        return self._end([lease for lease in self._by_slot.values() if not lease.ends_by_readers], "revoked", now)

    def revoke_all(self, now: float) -> list[LeaseEnded]:
        """End every lease now."""
        return self._end(list(self._by_slot.values()), "revoked", now)

    def expire(self, now: float, awaited: Container[object] = ()) -> list[LeaseEnded]:
        """End the leases that have run out, except those of ``awaited`` requests, which are renewed; and unread ones.

        The oldest unread offers end, of those that are older than ``unread_s``, while all together have more than half
        of the blocks.
        """
        due = [
            lease
            for leases in self._ends.values()
            for lease in takewhile(lambda lease: lease.ends_at <= now, leases.values())
        ]
        if due:
            self.renew([(lease.grant.slot, lease.epoch) for lease in due if lease.grant.request_id in awaited], now)
        ended = self._end([lease for lease in due if lease.ends_at <= now], "expired", now)
        return ended + self._end(self._excess(now), "unread", now)

    def next_deadline(self) -> float | None:
        """Return when the next lease runs out, or the blocks of unread offers are to be counted."""
        ends = [next(iter(leases.values())).ends_at for leases in self._ends.values()]
        return min([*ends, self._count_at()]) if ends else None

    def _count_at(self) -> float:
        oldest = min([next(iter(leases.values())).renewed_at for leases in self._ends.values()], default=inf)
        return max(oldest + self._unread_s, self._counted_at + UNREAD_PAUSE_S)

    def _excess(self, now: float) -> list[Lease]:
        """Return the unread offers that are old enough to end, and do not fit beside the newer ones."""
        if now < self._count_at():
            return []
        self._counted_at = now

        def is_old(lease: Lease) -> bool:
            return lease.renewed_at + self._unread_s <= now

        old = [lease for leases in self._ends.values() for lease in takewhile(is_old, leases.values())]
        if not any(lease.is_unread for lease in old):  # usually: what readers hold is about as old
            return []
        unread = [lease for leases in self._ends.values() for lease in leases.values() if lease.is_unread]
        blocks, excess = {ABSENT}, []
        for lease in sorted(unread, key=attrgetter("renewed_at"), reverse=True):
            if len(blocks) <= self._unread_blocks + 1:
                blocks.update(*lease.blocks)
            if len(blocks) > self._unread_blocks + 1 and is_old(lease):
                excess.append(lease)
        return excess

    def _require_issuer(self, grant: Grant) -> None:
        """Refuse a lease whose slot another issuer has allotted: neither knows which slots the other has taken."""
        first = self._first
        if first is None or first.admitted == grant.admitted:
            return
        ours, theirs = "makes its own offers", "takes the grants of a mint"
        has, wants = (ours, theirs) if first.admitted else (theirs, ours)
        raise ConfigInvalid(
            f"this worker {has}, the first for {first.request_id!r}, so it never {wants}: both allot the same slots",
            remedy="Offer and keep with the worker only, or with the mint only. A resumed worker may do the other.",
        )

    def _given_back(self, lease: Lease) -> bool:
        """Let the next question find an offer that was released unread. False: nobody has found it by asking."""
        # Of several ranks another one may be asked.
        if lease.found_by is None and not (lease.names.for_one and len(lease.grant.ranks) > 1):
            return False
        for (_, num_ranks), reading in (lease.readers or {}).items():
            if len(reading.released) >= num_ranks:
                reading.released.clear()  # the same engine may find it again
        self._index.give_back(lease)
        return True

    def _release_early(self, slot: int, epoch: int, reader: Reader, read: bool) -> ReaderAnswer:
        """Remember the release of a lease that may be admitted later."""
        if not self.may_come(slot, epoch):
            return "ended" if self._is_past(slot, epoch) else "unknown"
        early = _EarlyRelease(slot, epoch, reader)
        of_slot, of_key = self._early.setdefault(slot, {}), self._early_of.setdefault(reader.public_key, {})
        self._num_early += early not in of_slot
        of_slot[early] = read or of_slot.get(early, False)
        of_key[early] = None
        if self._num_early > EARLY_MAX:
            # Those of the key that has most, which therefore costs no other key its own. Half: searching is slow.
            largest = max(map(list, self._early_of.values()), key=len)
            for oldest in largest[: (len(largest) + 1) // 2]:
                self._forget_early(oldest)
        return "unknown"

    def _forget_early(self, early: _EarlyRelease) -> None:
        of_slot, of_key = self._early[early.slot], self._early_of[early.reader.public_key]
        del of_slot[early], of_key[early]
        if not of_slot:
            del self._early[early.slot]
        if not of_key:
            del self._early_of[early.reader.public_key]
        self._num_early -= 1

    def _is_past(self, slot: int, epoch: int) -> bool:
        return slot < self._slots and self._epochs.base < epoch < self._epochs[slot]

    def _end(self, leases: Collection[Lease], outcome: Outcome, now: float) -> list[LeaseEnded]:
        self._epochs.raise_all([(lease.grant.slot, lease.epoch + 1) for lease in leases])
        ended = []
        used, past = PastLease("used", now), PastLease(outcome, now)
        for lease in leases:
            grant = lease.grant
            slot, request_id = grant.slot, grant.request_id
            del self._by_request[request_id], self._by_slot[slot]
            if lease.names is not NAMELESS:
                self._index.remove(lease)
            if lease.names.ends:
                self.ends.remove(lease)
            if lease.ends_by_readers:
                same = self._ends[grant.lease_ms]
                del same[slot]
                if not same:
                    del self._ends[grant.lease_ms]
            self._past[slot, lease.epoch] = used if lease.read and outcome == "released" else past
            held_s, advances = now - lease.admitted_at, lease.advances
            ended.append(LeaseEnded(request_id, outcome, held_s, grant.trace, grant.kind, advances))
        while len(self._past) > PAST_MAX:
            self._past.popitem(last=False)
        return ended
