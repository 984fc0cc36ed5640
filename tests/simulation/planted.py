"""Bugs that are planted on purpose, each by patching one decision of the library.

The simulator must find every one of them. Each is what a careless change might do: nothing else is disturbed, and the
code around it is the real one.
"""

import asyncio
from types import SimpleNamespace

import msgspec
import numpy as np

from kvflow.cache.destinations import DestinationLedger
from kvflow.cache.leases import LeaseTable
from kvflow.rendezvous import dialer
from kvflow.testing import engines
from kvflow.transfer.scheduler import Scheduler
from kvflow.transport.ledger import Chunk
from kvflow.transport.owner import Owner
from kvflow.worker.peers import PeerPool
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


def peer_lost_while_others_are_met_is_used(patch):
    """A pull of several ranks uses one that was let go while the others were being met. So it was once."""
    patch.setattr(PeerPool, "_require_current", lambda self, peer: None)
