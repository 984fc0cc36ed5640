"""Pulls of tickets whose leases are admitted later, or never: real workers of two ranks on virtual time."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvflow.errors import BlockIdsInvalid, StaleLease
from kvflow.rendezvous.issuer import TicketMint
from tests.unit.kvflow.worker.helpers import SECRET
from tests.unit.kvflow.worker.virtual import LONG_S, virtual

from .caches import thoroughly

SOON_S = 0.05
"""Some round trips."""

LATER_S = 1.05
"""Within which a rank that is read hears from the others that a lease is void."""

READERS = {"whole": (0, 1), "left": (0,), "right": (1,)}
"""Each reader, and the ranks that it reads: one reads all, and two ranks of another engine read one each."""


class Early:
    """A ticket of both ranks. ``pulls``: reader -> the task of its pull."""

    def __init__(self, ticket, grant):
        self.ticket, self.grant = ticket, grant
        self.admitted, self.revoked, self.pulls = set(), set(), {}


async def delivered(handle):
    return await handle


class AdmissionsMachine(RuleBasedStateMachine):
    """Leases are admitted and revoked rank by rank, in any order, while readers wait for them."""

    def __init__(self):
        super().__init__()
        self.context = virtual(ranks=2, fence_s=LONG_S)
        self.world = self.context.__enter__()
        self.lives = {"whole": self.world.consumer}
        for rank, reader in enumerate(("left", "right")):
            self.lives[reader] = self.world.open("decode-1", rank=rank, ranks=2, fence_s=LONG_S)
        addresses = [each.worker.rank_address for each in self.world.producers]
        self.mint = TicketMint("prefill-0", addresses, cluster_secret=SECRET, lease_s=LONG_S)
        self.early, self.count = [], 0
        for readers in (["whole"], ["left", "right"]):  # so that each is connected
            self.sign(readers, 1)
            for rank in (0, 1):
                self.admit(0, rank)

    @rule(readers=st.sampled_from((["whole"], ["left", "right"], ["right", "left"])), count=st.integers(1, 4))
    def sign(self, readers, count):
        """Sign tickets, and start their pulls in one turn."""
        begun = []
        for _ in range(count):
            self.count += 1
            block = 1 + self.count % 63
            ticket, grant = self.mint.offer(f"request-{self.count}", block_ids=[[block]], num_tokens=4)
            begun.append((Early(ticket, grant), block))
        for reader in readers:
            worker, process = self.lives[reader].worker, self.lives[reader].process
            items = [(each.ticket, [[block]]) for each, block in begun]
            handles = self.world.do(lambda: worker.pull_many(items), life=self.lives[reader])  # noqa: B023
            for (each, _), handle in zip(begun, handles, strict=True):
                each.pulls[reader] = process.create_task(delivered(handle), name="drive a pull")
        self.early += [each for each, _ in begun]
        self.world.pass_time(SOON_S)

    def on(self, rank, call):
        life = self.world.producers[rank]
        return self.world.do(lambda: call(life.worker), life=life)

    @rule(which=st.integers(0, 9), rank=st.integers(0, 1))
    def admit(self, which, rank):
        if not self.early:
            return
        each = self.early[which % len(self.early)]
        if rank in each.admitted | each.revoked:
            with pytest.raises(BlockIdsInvalid):
                self.on(rank, lambda worker: worker.admit(each.grant))
            return
        self.on(rank, lambda worker: worker.admit(each.grant))
        each.admitted.add(rank)
        self.look(SOON_S)

    @rule(which=st.integers(0, 9), rank=st.integers(0, 1), is_void=st.booleans())
    def revoke(self, which, rank, is_void):
        if not self.early:
            return
        each = self.early[which % len(self.early)]
        grant = each.grant if is_void else None
        ended = self.on(rank, lambda worker: worker.revoke(each.grant.request_id, grant))
        if ended or (is_void and rank not in each.admitted):
            each.revoked.add(rank)
        self.look(LATER_S)

    @rule(seconds=st.sampled_from((0.3, 1.0, 5.0)))
    def time_passes(self, seconds):
        self.look(seconds)

    def look(self, seconds):
        """Let time pass; then each pull has been delivered, has failed, or waits, as it must."""
        self.world.pass_time(seconds)
        for each in list(self.early):
            for reader, pull in list(each.pulls.items()):
                if each.admitted >= set(READERS[reader]):
                    assert pull.done(), (reader, each.grant.request_id)
                    assert pull.result().early <= len(READERS[reader]), "each rank is read again once"
                    del each.pulls[reader]
                elif each.revoked:
                    assert isinstance(pull.exception(), StaleLease)
                    assert pull.exception().ended_by == "revoked"
                    del each.pulls[reader]
                else:
                    assert not pull.done(), (reader, pull.exception())
            if not each.pulls:
                self.early.remove(each)

    def teardown(self):
        self.world.do(self.lives["whole"].worker.check)
        self.context.__exit__(None, None, None)


AdmissionsMachine.TestCase.settings = thoroughly(100, stateful_step_count=15)
TestAdmissions = AdmissionsMachine.TestCase
