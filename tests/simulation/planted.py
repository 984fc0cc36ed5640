"""Bugs that are planted on purpose, each by patching one decision of the library.

The simulator must find every one of them. Each is what a careless change might do: nothing else is disturbed, and the
code around it is the real one.
"""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np

from kvflow.leases.blocks import BlockAccount
from kvflow.leases.held import Lease
from kvflow.leases.issuer import Issuer
from kvflow.leases.table import LeaseTable
from kvflow.reads import lanes
from kvflow.reads.core import ReadCore
from kvflow.reads.lanes import NO_BUFFER, Check, Lanes
from kvflow.reads.scheduler import Scheduler
from kvflow.rendezvous import dialer
from kvflow.worker import producer
from kvflow.worker.answers import Answers
from kvflow.worker.destinations import DestinationTable, ReaderResetPolicy
from kvflow.worker.environment import Environment
from kvflow.worker.following import Following
from kvflow.worker.open_pulls import OpenPulls, PullHandle
from kvflow.worker.peers import PeerPool
from kvflow.worker.renewals import LeaseRenewer
from tests.simulation import engines, scenario

LATE_S = 5e-3
NEVER_S = 1e6
INCARNATION_BITS = 128


def epoch_raised_after_the_free(patch):
    """The blocks of a lease go back to the engine, and a moment later its epoch is raised."""
    end = LeaseTable._end

    def end_first(self, leases, outcome, now):
        epochs, raises = self._epochs, []
        self._epochs = SimpleNamespace(raise_all=raises.extend)
        try:
            events = end(self, leases, outcome, now)
        finally:
            self._epochs = epochs

        def raise_late():
            for slot, epoch in raises:
                if epoch > epochs[slot]:
                    epochs.raise_all([(slot, epoch)])

        asyncio.get_running_loop().call_later(LATE_S, raise_late)
        return events

    patch.setattr(LeaseTable, "_end", end_first)


def epoch_of_a_kept_lease_raised_late(patch):
    """The same as ``epoch_raised_after_the_free``, only where something is kept."""
    patch.setattr(scenario, "KEEPING_SHARE", 1.0)
    end = LeaseTable._end
    epoch_raised_after_the_free(patch)
    end_late = LeaseTable._end

    def end_some_late(self, leases, outcome, now):
        late = [lease for lease in leases if not lease.ends_by_readers]
        in_time = [lease for lease in leases if lease.ends_by_readers]
        return [*(end_late(self, late, outcome, now) if late else ()), *end(self, in_time, outcome, now)]

    patch.setattr(LeaseTable, "_end", end_some_late)


def release_ends_a_kept_lease(patch):
    """The first reader that gives back what is kept ends it."""
    patch.setattr(scenario, "KEEPING_SHARE", 1.0)
    release = LeaseTable.release

    def release_all(self, leases, reader, now, **how):
        answers, ended = release(self, leases, reader, now, **how)
        kept = [lease for key in leases if (lease := self.held(*key)) and not lease.ends_by_readers]
        return answers, ended + (self._end(kept, "revoked", now) if kept else [])

    patch.setattr(LeaseTable, "release", release_all)


def newest_that_is_kept_leaves_its_slot(patch):
    """An offer that finds no slot takes that of the kept lease that was just begun."""
    patch.setattr(scenario, "KEEPING_SHARE", 1.0)
    issue = Issuer.issue

    def issue_to_the_newest(self, *about, **how):
        before, self._kept = [*self._kept], dict(reversed(self._kept.items()))
        try:
            return issue(self, *about, **how)
        finally:
            self._kept = {name: self._kept[name] for name in [*before, *self._kept] if name in self._kept}

    patch.setattr(Issuer, "issue", issue_to_the_newest)


def what_is_told_counts_as_settled(patch):
    """A block of an open lease is read from the moment on in which it is told, while it is still written."""
    patch.setattr(scenario, "OPENING_SHARE", 1.0)
    settled = Answers._settled

    def settled_early(self, lease, known, most):
        if isinstance(lease, Lease) and not lease.sealed:
            told = self._groups.tokens_of([len(ids) for ids in lease.blocks])
            before = min(told, lease.grant.num_tokens[0] - 1)
            lease = SimpleNamespace(grant=lease.grant, blocks=lease.blocks, sealed=False, settled=before)
        return settled(self, lease, known, most)

    patch.setattr(Answers, "_settled", settled_early)


def nobody_hears_of_the_seal(patch):
    """A question that waits for the last block is not answered when that comes."""
    patch.setattr(scenario, "OPENING_SHARE", 1.0)
    note = Answers.note

    def note_others(self, places):
        sealed = {lease.grant.request_id for lease in self._leases._by_slot.values() if lease.sealed}
        note(self, [place for place in places if place not in sealed])

    patch.setattr(Answers, "note", note_others)


def open_offers_are_computed_for_ever(patch):
    """A pull waits without end for an offer that is never sealed."""
    patch.setattr(scenario, "OPENING_SHARE", 1.0)
    init = Following.__init__

    def init_patiently(self, *args):
        *others, budgets = args
        init(self, *others, msgspec.structs.replace(budgets, compute_s=1e6))

    patch.setattr(Following, "__init__", init_patiently)


def sealed_offers_are_open(patch):
    """An offer is advanced and sealed again after its seal."""
    patch.setattr(scenario, "OPENING_SHARE", 1.0)
    patch.setattr(LeaseTable, "unsealed", lambda self, request_id: self._by_request[request_id])


def quarantine_skipped(patch):
    """The blocks of a pull that failed are free at once, whatever may still write into them."""

    def free(self, pull_id, reason, now):
        ids = self._open[pull_id]
        self._account.end_receipt(ids)
        self._open[pull_id] = ((),) * len(ids)

    async def do_not_wait(self, request_id=None):
        return

    patch.setattr(DestinationTable, "quarantine", free)
    patch.setattr(OpenPulls, "quiesced", do_not_wait)
    _tell_at_the_failure(patch)


def release_counted_twice(patch):
    """A rank that releases once more stands for another one that has not."""
    release = LeaseTable.release

    def release_again(self, leases, reader, now, **how):
        answers, ended = [], []
        for slot, epoch in leases:
            lease, another = self.held(slot, epoch), reader
            reading = (lease.readers or {}).get((reader.engine_id, reader.num_ranks)) if lease else None
            released = reading.released if reading else ()
            if reader.rank in released:
                other = next(rank for rank in range(reader.num_ranks) if rank not in released)
                another = msgspec.structs.replace(reader, rank=other)
            answer, end = release(self, [(slot, epoch)], another, now, **how)
            answers += answer
            ended += end
        return answers, ended

    patch.setattr(LeaseTable, "release", release_again)


def lease_renewed_after_its_end(patch):
    """A lease that has ended is held again when a reader renews it."""
    end, renew = LeaseTable._end, LeaseTable.renew
    ended = {}

    def end_and_keep(self, leases, outcome, now):
        for lease in leases:
            ended[id(self), lease.grant.slot, lease.grant.epoch] = lease
        return end(self, leases, outcome, now)

    def revive(self, leases, now, reader=None):
        for slot, epoch in leases:
            lease = ended.get((id(self), slot, epoch))
            if lease is not None and slot not in self._by_slot:
                self._by_slot[slot] = self._by_request[lease.grant.request_id] = lease
                self._ends[lease.grant.lease_ms][slot] = lease
        return renew(self, leases, now, reader)

    patch.setattr(LeaseTable, "_end", end_and_keep)
    patch.setattr(LeaseTable, "renew", revive)


def completion_of_a_dead_incarnation_accepted(patch):
    """What was in flight from a peer that died counts as complete."""
    fail = ReadCore._fail

    def land(self, work, reason):
        if reason.code != "peer_lost":
            fail(self, work, reason)
        else:
            held = [0] * (work.last - work.first + 1) if isinstance(work, Check) else 0
            for opened in work.reads if isinstance(work, Check) else ():
                held[opened.read.lease.slot - work.first] = opened.read.lease.epoch
            self._on_over(work, held, None)

    patch.setattr(ReadCore, "_fail", land)


def another_incarnation_taken_for_the_one_that_died(patch):
    """A worker that answers at an address is taken for the one of the ticket, and epochs begin where they always do."""

    def environment(**given):
        draw_bits = given["draw_bits"]
        return Environment(**given | {"draw_bits": lambda bits: draw_bits(bits) if bits == INCARNATION_BITS else 0})

    patch.setattr(dialer, "_who_else", lambda *_: "")
    patch.setattr(engines, "Environment", environment)


def failed_chunk_stays_in_flight(patch):
    """A chunk that fails keeps its place among those in flight, so that its peer never drains."""
    failed = Lanes.failed

    def keep_place(self, work, reason):
        if not isinstance(work, Check):
            work.lane.chunks_in_flight += 1
        failed(self, work, reason)

    patch.setattr(Lanes, "failed", keep_place)


def first_check_left_out(patch):
    """What was read counts if the lease is held afterwards, no matter when it was admitted."""
    admit = Lanes.admit

    def admit_unchecked(self, read, prepared_lists):
        read.check_first = False
        admit(self, read, prepared_lists)

    patch.setattr(Lanes, "admit", admit_unchecked)


def first_check_of_a_served_read_left_out(patch):
    """The same as ``first_check_left_out``, where exporters serve and tell what they have not served.

    This bug does no damage: what was not served is read again. See ``unserved_bytes_are_delivered``.
    """
    patch.setattr(scenario, "SERVES", ("reads",))
    first_check_left_out(patch)


def unserved_bytes_are_delivered(patch):
    """What a serving exporter has not served counts as read, and there was no first check."""
    first_check_of_a_served_read_left_out(patch)
    arrived = Lanes.arrived
    patch.setattr(Lanes, "arrived", lambda self, carried, unheld=(), *refused: arrived(self, carried, (), *refused))


def fence_posted_with_the_last_chunk(patch):
    """A fence is posted together with the last chunk of its read, and may read the slot before the bytes are read."""
    take, leave, checked = Lanes._take, Lanes._leave, Lanes.checked
    values = {}  # of each read whose fence was posted too soon; None while it is in flight

    def take_with_fences(self, reads, *about):
        carried = take(self, reads, *about)
        for opened in reads:
            if not opened.waits:
                values[opened] = None
                opened.lane.fences.append(opened)
                self._due[opened.lane] = None
        return carried

    def leave_unfenced(self, carried, opened, now):
        phase, opened.read.phase = opened.read.phase, "wire"
        leave(self, carried, opened, now)
        if opened.read.phase != "fence" or opened.read.read_id not in self.reads:
            opened.read.phase = phase
            return
        opened.lane.fences.pop()
        if opened not in opened.lane.fences and values[opened] is not None:  # otherwise it is still to come
            self._end(opened, "held" if values[opened] == opened.read.lease.epoch else "stale", values[opened])

    def check_early(self, check, found):
        soon = [opened for opened in check.reads if check.fence and opened.in_flight]
        for opened in soon:
            values[opened] = found[opened.read.lease.slot - check.first]
        check.reads = [opened for opened in check.reads if opened not in soon]
        checked(self, check, found)

    patch.setattr(Lanes, "_take", take_with_fences)
    patch.setattr(Lanes, "_leave", leave_unfenced)
    patch.setattr(Lanes, "checked", check_early)


def read_ends_before_its_chunk(patch):
    """A read that is cancelled ends at once, although a chunk that has some of its bytes is in flight."""
    fail = Lanes._fail_read

    def end_at_once(self, opened, reason):
        opened.in_flight, in_flight = 0, opened.in_flight
        fail(self, opened, reason)
        opened.in_flight = in_flight

    patch.setattr(Lanes, "_fail_read", end_at_once)


def peer_lost_while_others_are_met_is_used(patch):
    """A pull of several ranks uses one that was removed while the others were being met. So it was once."""
    patch.setattr(PeerPool, "_require_current", lambda self, peer: None)


def only_the_first_renewal_is_sent(patch):
    """A lease is renewed once, and never again."""
    patch.setattr(LeaseRenewer, "_again_at", lambda self, peer, member, now: now + NEVER_S)


def renewal_lasts_half(patch):
    """A renewed lease lasts half as long as its readers are told."""
    renew = LeaseTable.renew

    def renew_half(self, leases, now, reader=None):
        answers = renew(self, leases, now, reader)
        for lease in filter(None, (self.held(*key) for key in leases)):
            lease.ends_at -= lease.grant.lease_s / 2
        return answers

    patch.setattr(LeaseTable, "renew", renew_half)


def kept_tickets_are_not_renewed(patch):
    """Kept tickets are forgotten."""
    patch.setattr(LeaseRenewer, "hold_ticket", lambda self, members, name: None)


def shared_chunk_cancelled_with_one_pull(patch):
    """A pull that ends early takes along the reads that share a chunk with it."""
    take, cancel = Lanes._take, Lanes.cancel
    sharing = {}  # read -> ids of those that have shared a chunk with it

    def take_and_note(self, reads, *about):
        for opened in reads:
            sharing.setdefault(opened, set()).update(each.read.read_id for each in reads)
        return take(self, reads, *about)

    def cancel_all(self, read_ids):
        opened = [self.reads[read_id] for read_id in read_ids if read_id in self.reads]
        cancel(self, read_ids)
        for read_id in sorted({each for one in opened for each in sharing.get(one, ())} & self.reads.keys()):
            self._fail_read(self.reads[read_id], lanes.Cause("cancelled", "it has shared a chunk"))

    patch.setattr(Lanes, "_take", take_and_note)
    patch.setattr(Lanes, "cancel", cancel_all)


def bytes_of_a_shared_chunk_are_swapped(patch):
    """Of reads that share a chunk, each gets the bytes of the next one."""
    bind = lanes._bind

    def swap(reads, prepared_list):
        portion = bind(reads, prepared_list)
        if len(portion.shares) < 2:
            return portion
        first, *others = portion.target_index.tolist()
        return msgspec.structs.replace(portion, target_index=np.array([*others, first], np.int32))

    patch.setattr(lanes, "_bind", swap)


def slot_freed_twice(patch):
    """A slot of a mint is free once when its lease has ended, and once more when its name is."""
    vacate = Issuer.vacate

    def vacate_and_remember(self, request_ids):
        slots = {name: slot for name in request_ids if (slot := self._slots.get(name)) is not None}
        vacate(self, request_ids)
        self._slots.update(slots)

    patch.setattr(Issuer, "vacate", vacate_and_remember)


def loan_of_a_repeated_block_ended_once(patch):
    """A block that a request lists twice is lent twice, and given back once."""
    end_loan = BlockAccount.end_loan
    patch.setattr(BlockAccount, "end_loan", lambda self, ids: end_loan(self, [sorted(set(each)) for each in ids]))


def offered_block_taken_as_a_target(patch):
    """A block that peers may be reading is written into."""
    refuse = BlockAccount._refuse

    def refuse_receiving(self, present, is_busy, words, remedy):
        if "on offer" not in words:
            refuse(self, present, is_busy, words, remedy)

    patch.setattr(BlockAccount, "_refuse", refuse_receiving)


def last_resort_never_comes(patch):
    """What a host that hangs has in flight keeps its blocks."""
    patch.setattr(ReaderResetPolicy, "due", lambda self, entries, now, starved=False: False)


def cancelled_offer_stays(patch):
    """An offer that was cancelled in the moment in which its turn came is held, and is in no book."""
    patch.setattr(producer, "_has_ticket", lambda waiting: False)


def failure_told_before_quiescence(patch):
    """An engine of threads hears of a failed pull while something may still write into its blocks."""
    _tell_at_the_failure(patch)


def staging_buffer_given_back_when_posted(patch):
    """A staging buffer is free for another chunk as soon as its own is posted."""
    post, over = ReadCore._post_chunk, Lanes._chunk_is_over

    def post_and_give_back(self, carried):
        outcome = post(self, carried)
        if carried.chunk.buffer != NO_BUFFER:
            self._lanes._buffers.give_back(carried.chunk.buffer)
        return outcome

    def over_without_buffer(self, carried, now):
        carried.chunk = msgspec.structs.replace(carried.chunk, buffer=NO_BUFFER)
        over(self, carried, now)

    patch.setattr(ReadCore, "_post_chunk", post_and_give_back)
    patch.setattr(Lanes, "_chunk_is_over", over_without_buffer)


def budgets_never_run_out(patch):
    """A peer that hangs is waited for without end."""

    def wait(self, rank, now):
        self._reads[rank.read.read_id] = self._reads.pop(rank.read.read_id)
        rank.deadline_check_at = now + 1.0
        return []

    patch.setattr(Scheduler, "_check_deadlines", wait)


def release_is_forgotten(patch):
    """What was read is never given back."""
    patch.setattr(LeaseRenewer, "release", lambda self, members, **_how: self.stop(members))


def first_of_two_ranks_is_released_alone(patch):
    """A pull gives back only one rank of those that a ticket names."""
    release = LeaseRenewer.release

    def release_one(self, members, **how):
        first, *others = members
        release(self, [first], **how)
        self.stop(others)

    patch.setattr(LeaseRenewer, "release", release_one)


def lease_runs_out_late(patch):
    """A lease that is not renewed is held for longer than it lasts."""
    expire = LeaseTable.expire
    patch.setattr(LeaseTable, "expire", lambda self, now, awaited: expire(self, now - LATE_S, awaited))


def release_before_its_lease_is_lost(patch):
    """A release that comes before its lease is admitted counts for nothing. So it was once."""
    patch.setattr(LeaseTable, "_release_early", lambda self, slot, epoch, reader, read: "unknown")


def _tell_at_the_failure(patch):
    """Have the callbacks of a pull that fails called at once."""
    fail = PullHandle.fail

    def fail_and_tell(self, error):
        fail(self, error)
        callbacks, self._on_quiesced = self._on_quiesced, []
        for callback in callbacks:
            callback(self)

    patch.setattr(PullHandle, "fail", fail_and_tell)
