"""Bugs that are planted on purpose, each by patching one decision of the library.

The simulator must find every one of them. Each is what a careless change might do: nothing else is disturbed, and the
code around it is the real one.
"""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np

from kvflow.cache.blocks import BlockAccount
from kvflow.cache.destinations import DestinationLedger
from kvflow.cache.leases import LeaseTable
from kvflow.cache.mint import Mint
from kvflow.cache.quarantine import LastResort
from kvflow.rendezvous import dialer
from kvflow.testing import engines, scenario
from kvflow.transfer.flights import Flights
from kvflow.transfer.requests import RenewLease
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport import ledger
from kvflow.transport.ledger import NO_BUFFER, Chunk, Ledger
from kvflow.transport.owner import Owner
from kvflow.worker import offers, threaded
from kvflow.worker.keeping import Keeping
from kvflow.worker.peers import PeerPool
from kvflow.worker.releasing import Releasing
from kvflow.worker.surroundings import Surroundings
from kvflow.worker.unsettled import Unsettled

LATE_S = 5e-3
INCARNATION_BITS = 128


def epoch_raised_after_the_free(patch):
    """The blocks of a lease go back to the engine, and a moment later its epoch is raised."""
    end = LeaseTable._end

    def end_first(self, lease, outcome, now):
        epochs, raises = self._epochs, []
        self._epochs = SimpleNamespace(raise_to=lambda slot, epoch: raises.append((slot, epoch)))
        try:
            event = end(self, lease, outcome, now)
        finally:
            self._epochs = epochs

        def raise_late():
            for slot, epoch in raises:
                if epoch > epochs[slot]:
                    epochs.raise_to(slot, epoch)

        asyncio.get_running_loop().call_later(LATE_S, raise_late)
        return event

    patch.setattr(LeaseTable, "_end", end_first)


def quarantine_skipped(patch):
    """The blocks of a pull that failed are free at once, whatever may still write into them."""

    def free(self, pull_id, reason, now):
        destination = self._open[pull_id]
        self._account.end_receipt(destination.ids)
        destination.ids = tuple(np.zeros(0, np.int64) for _ in destination.ids)

    async def quiesced(self, request_id):
        return

    patch.setattr(DestinationLedger, "quarantine", free)
    patch.setattr(Unsettled, "quiesced", quiesced)


def release_counted_twice(patch):
    """A rank that releases once more stands for another one that has not."""
    release = LeaseTable.release

    def release_again(self, slot, epoch, reader, now, **how):
        lease = self._find(slot, epoch)
        released = lease.released_by.get((reader.engine_id, reader.num_ranks), ()) if lease else ()
        if reader.rank in released:
            other = next(rank for rank in range(reader.num_ranks) if rank not in released)
            reader = msgspec.structs.replace(reader, rank=other)
        return release(self, slot, epoch, reader, now, **how)

    patch.setattr(LeaseTable, "release", release_again)


def lease_renewed_after_its_end(patch):
    """A lease that has ended is held again when a reader renews it."""
    end, renew = LeaseTable._end, LeaseTable.renew
    ended = {}

    def end_and_keep(self, lease, outcome, now):
        ended[id(self), lease.grant.slot, lease.grant.epoch_value] = lease
        return end(self, lease, outcome, now)

    def revive(self, slot, epoch, now):
        lease = ended.get((id(self), slot, epoch))
        if lease is not None and slot not in self._by_slot:
            self._by_slot[slot] = self._by_request[lease.grant.request_id] = lease
        return renew(self, slot, epoch, now)

    patch.setattr(LeaseTable, "_end", end_and_keep)
    patch.setattr(LeaseTable, "renew", revive)


def completion_of_a_dead_incarnation_accepted(patch):
    """What was in flight from a peer that died counts as complete."""
    fail = Owner._fail

    def land(self, work, reason):
        if reason.code != "peer_lost":
            fail(self, work, reason)
        else:
            self._land(work, 0 if isinstance(work, Chunk) else work.fence.epoch, 0.0)

    patch.setattr(Owner, "_fail", land)


def another_incarnation_taken_for_the_one_that_died(patch):
    """Whoever answers at an address is taken for whom the ticket names, and epochs begin where they always do."""

    def surroundings(**given):
        draw_bits = given["draw_bits"]
        return Surroundings(**given | {"draw_bits": lambda bits: draw_bits(bits) if bits == INCARNATION_BITS else 0})

    patch.setattr(dialer, "_require_peer", lambda *_: None)
    patch.setattr(engines, "Surroundings", surroundings)


def window_not_given_back_on_failure(patch):
    """A read that fails keeps its room in the windows."""
    failed = Scheduler.on_read_failed

    def keep_room(self, read_id, **about):
        self._flights._flights[read_id].counted = False
        return failed(self, read_id, **about)

    patch.setattr(Scheduler, "on_read_failed", keep_room)


def look_before_the_read_left_out(patch):
    """What was read counts if the lease is held afterwards, whenever it was admitted."""
    looked = Scheduler._on_looked

    def see_what_will_be(self, leg_id, observed, now):
        leg = self._legs[leg_id]
        return looked(self, leg_id, max(observed, leg.request.epoch), now)

    patch.setattr(Scheduler, "_on_looked", see_what_will_be)
    patch.setattr(ledger, "_not_held", lambda fence, observed: None)


def look_before_a_served_read_left_out(patch):
    """The same as ``look_before_the_read_left_out``, where exporters serve and tell what they have not served.

    No bug that does harm: what was not served is read again. See ``unserved_bytes_are_delivered``.
    """
    patch.setattr(scenario, "SERVES", ("reads",))
    look_before_the_read_left_out(patch)


def unserved_bytes_are_delivered(patch):
    """What a serving exporter has not served counts as read, and nobody has looked before."""
    look_before_a_served_read_left_out(patch)
    completed = Scheduler.on_read_completed

    def forget(self, read_id, *, unheld=False, **about):
        return completed(self, read_id, **about)

    patch.setattr(Scheduler, "on_read_completed", forget)


def peer_lost_while_others_are_met_is_used(patch):
    """A pull of several ranks uses one that was let go while the others were being met. So it was once."""
    patch.setattr(PeerPool, "_require_current", lambda self, peer: None)


def only_the_first_renewal_is_sent(patch):
    """A pull renews its lease when it begins, and never again."""
    tick = Scheduler.tick
    renewed = {}

    def tick_once(self, now, held_up=()):
        seen = renewed.setdefault(id(self), (self, set()))[1]
        effects = tick(self, now, held_up)
        again = [effect for effect in effects if isinstance(effect, RenewLease) and effect in seen]
        seen.update(effect for effect in effects if isinstance(effect, RenewLease))
        return [effect for effect in effects if effect not in again]

    patch.setattr(Scheduler, "tick", tick_once)


def renewal_lasts_half(patch):
    """A renewed lease lasts half as long as its readers are told."""
    renew = LeaseTable.renew

    def renew_half(self, slot, epoch, now):
        lease = self._find(slot, epoch)
        return renew(self, slot, epoch, now if lease is None else now - lease.grant.lease_s / 2)

    patch.setattr(LeaseTable, "renew", renew_half)


def kept_tickets_are_not_renewed(patch):
    """Kept tickets are forgotten."""
    patch.setattr(Keeping, "renew_due", lambda self: None)


def shared_batch_cancelled_with_one_pull(patch):
    """A pull that ends early takes along the reads that it shares with others."""
    give_up = Flights.give_up
    patch.setattr(Flights, "give_up", lambda self, read_id: give_up(self, read_id) or True)


def slot_freed_twice(patch):
    """A slot of a mint is free once when its lease has ended, and once more when its name is."""
    vacate = Mint.vacate

    def vacate_and_remember(self, request_id):
        slot = self._slots.get(request_id)
        vacate(self, request_id)
        if slot is not None:
            self._slots[request_id] = slot

    patch.setattr(Mint, "vacate", vacate_and_remember)


def loan_of_a_repeated_block_ended_once(patch):
    """A block that a request lists twice is lent twice, and given back once."""
    end_loan = BlockAccount.end_loan
    patch.setattr(BlockAccount, "end_loan", lambda self, ids: end_loan(self, [np.unique(each) for each in ids]))


def offered_block_taken_as_a_target(patch):
    """A block that peers may be reading is written into."""
    refuse = BlockAccount._refuse

    def refuse_receiving(self, ids, used, words, remedy):
        if used is not self._lent:
            refuse(self, ids, used, words, remedy)

    patch.setattr(BlockAccount, "_refuse", refuse_receiving)


def last_resort_never_comes(patch):
    """What a host that hangs has in flight keeps its blocks for ever."""
    patch.setattr(LastResort, "due", lambda self, entries, now, starved=False: False)


def cancelled_offer_stays(patch):
    """An offer that was cancelled in the moment in which its turn came is held, and nobody knows."""
    patch.setattr(offers, "_has_ticket", lambda waiting: False)


def failure_told_before_quiescence(patch):
    """An engine of threads hears of a failed pull while something may still write into its blocks."""

    async def do_not_wait(worker, request_id):
        return

    patch.setattr(threaded, "_wait_quiesced", do_not_wait)


def staging_buffer_given_back_when_posted(patch):
    """A staging buffer is free for another chunk as soon as its own is posted."""
    posted, leave = Ledger.posted, Ledger._leave_flight

    def post_and_give_back(self, chunk, started, ended):
        posted(self, chunk, started, ended)
        if chunk.buffer != NO_BUFFER:
            self._buffers.give_back(chunk.buffer)

    def leave_without_buffer(self, chunk, now):
        if chunk.buffer != NO_BUFFER:
            chunk = msgspec.structs.replace(chunk, buffer=NO_BUFFER)
        return leave(self, chunk, now)

    patch.setattr(Ledger, "posted", post_and_give_back)
    patch.setattr(Ledger, "_leave_flight", leave_without_buffer)


def budgets_never_run_out(patch):
    """A peer that hangs is waited for, for ever."""
    patch.setattr(Flights, "overdue", lambda self, leg, now: ("", now + 1.0))


def release_is_forgotten(patch):
    """What was read is never given back."""
    patch.setattr(Releasing, "add", lambda self, members, **_how: None)


def first_of_two_ranks_is_released_alone(patch):
    """A pull gives back only one rank of those that a ticket names."""
    add = Releasing.add
    patch.setattr(Releasing, "add", lambda self, members, **how: add(self, members[:1], **how))


def lease_runs_out_late(patch):
    """A lease that nobody renews is held for longer than it lasts."""
    expire = LeaseTable.expire
    patch.setattr(LeaseTable, "expire", lambda self, now: expire(self, now - LATE_S))


def release_before_its_lease_is_lost(patch):
    """A release that comes before its lease is admitted counts for nothing. So it was once."""
    patch.setattr(LeaseTable, "_release_early", lambda self, slot, epoch, reader: "unknown")
