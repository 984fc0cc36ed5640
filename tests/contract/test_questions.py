"""What a producer answers to the questions of members, over a modeled wire and on virtual time.

Each question has one answer: at once if there is something to say, when there is, or when it has waited for as long as
it said. It says what the leases hold then, and to whom it may be said.
"""

from functools import partial

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from handshake import ClusterSecurity
from handshake.client import open_client
from handshake.messages import Answered, Ask, Identity, LeaseRef, Release
from kvflow.leases.tickets import MAC_BYTES, LeaseName
from kvflow.rendezvous.questions import (
    AnswerHeld,
    AnswerKept,
    AnswerSettled,
    AskHeld,
    AskKept,
    AskSettled,
    NoRoom,
    Settled,
    Withdraw,
    encode,
)
from kvflow.worker import answers
from tests.fakes import Process
from tests.fakes.network import SimulatedNetwork
from tests.unit.kvflow.worker.helpers import SECRET
from tests.unit.kvflow.worker.virtual import LONG_S, virtual

BLOCK = 4  # tokens, of the caches of the virtual world
LEASE_S = 3600.0
SOON_S, WAIT_MS = 0.02, 80_000_000
IDS_MAX = 4
ROOM, RESERVED = 9_000, 2_500
OTHERS = msgspec.msgpack.Decoder(AnswerHeld | AnswerSettled | AnswerKept | NoRoom)
contents = st.lists(st.integers(1, 2), min_size=1, max_size=3)


def chained(content):
    """Return digests of blocks that cover all before."""
    return tuple(bytes(content[:end]) for end in range(1, len(content) + 1))


class Member:
    """One client of a producer, in a process of its own."""

    def __init__(self, world, number):
        self.number, self.answers, self.nonces, self.client = number, {}, 0, None
        self.process = Process(world._world, f"member {number}", f"10.9.0.{number}", began_s=1.0, skew_s=0.0)
        self._world, self._left = world, self.process.create_future()
        self._task = self.process.create_task(self._live(world.producers[0].worker.endpoint), name="life")
        assert world._world.run(lambda: self.client is not None, LONG_S)

    async def _live(self, endpoint):
        identity = Identity(
            engine_id=f"decode-{self.number}",
            rank=0,
            num_ranks=1,
            incarnation=f"{self.number:032}",
            role="decode",
            software="1",
        )
        async with open_client(
            endpoint,
            identity=identity,
            security=ClusterSecurity.from_secret(SECRET),
            on_event=self._on_event,
            network=SimulatedNetwork(self._world.wires, self.process),
        ) as self.client:
            await self._left

    def _on_event(self, event):
        if isinstance(event, Answered):
            assert event.nonce not in self.answers
            self.answers[event.nonce] = OTHERS.decode(event.answer) if event.answer else None

    def do(self, call):
        async def called():
            call()

        task = self.process.create_task(called(), name="drive a member")
        assert self._world._world.run(task.done, LONG_S + self._world.now)
        task.result()

    def ask(self, question):
        self.nonces += 1
        self.do(partial(self.client.send, Ask(nonce=self.nonces, question=encode(question))))
        return self.nonces

    def release(self, name, *, read):
        self.do(partial(self.client.send, Release(read=read, leases=(LeaseRef(slot=name.slot, epoch=name.epoch),))))

    def leave(self):
        self._left.set_result(None)


class Lease:
    """What is known of one."""

    def __init__(self, kind, ticket, blocks, content):
        (grant,), (signed,) = ticket.grants, ticket.signed
        self.kind, self.content, self.request_id = kind, tuple(content), grant.request_id
        self.name = LeaseName(grant.slot, grant.epoch, signed[:MAC_BYTES])
        self.blocks = blocks  # told so far
        self.settled, self.sealed = (0, False) if kind == "open" else (grant.num_tokens[0], True)
        self.most = grant.num_tokens[0]
        self.found_by, self.ended = None, ""

    @property
    def whole(self):
        return self.settled - self.settled % BLOCK


class QuestionsMachine(RuleBasedStateMachine):
    """Two members and one producer."""

    @initialize()
    def begin(self):
        self.patch = pytest.MonkeyPatch()
        for module, name, value in (
            (answers, "IDS_MAX", IDS_MAX),
            (answers, "WAITING_BYTES_MAX", ROOM),
            (answers, "RESERVED_BYTES", RESERVED),
        ):
            self.patch.setattr(module, name, value)
        self.context = virtual(lease_s=LEASE_S, theirs={"lease_slots": 16, "tell": False})
        self.world = self.context.__enter__()
        self.worker = self.world.producers[0].worker
        self.members = [Member(self.world, number) for number in (1, 2)]
        self.leases, self.count, self.order = [], 0, 0
        self.waiting = {}  # member and nonce -> question, deadline; in the order in which they came
        self.expected = {member: {} for member in self.members}

    def at_producer(self, call):
        return self.world.do(call, life=self.world.producers[0])

    def of(self, *kinds):
        return [each for each in self.leases if not each.ended and each.kind in kinds]

    # What is to be expected.

    def state(self, lease, mac, known, most):
        if lease.ended:
            return Settled(ended=lease.ended)
        if mac != lease.name.mac:
            return Settled(ended="unknown")
        tokens, sealed = (lease.settled, True) if lease.sealed else (lease.whole, False)
        ids = lease.blocks[known:]
        if len(ids) > most:
            sealed, tokens = False, min(tokens, (known + most) * BLOCK)
        if not sealed:
            ids = lease.blocks[known : tokens // BLOCK]
        return Settled(num_tokens=tokens, block_ids=(tuple(ids),), sealed=sealed)

    def is_news(self, lease, mac, above):
        return bool(lease.ended) or mac != lease.name.mac or lease.sealed or lease.whole >= above

    def answer(self, asker, question, *, last):
        """Return what is answered now, or None."""
        if isinstance(question, AskSettled):
            about = [next(each for each in self.leases if each.name.epoch == name.epoch) for name in question.leases]
            pairs = [(lease, name.mac) for lease, name in zip(about, question.leases, strict=True)]
            if not last and not any(self.is_news(*pair, question.above) for pair in pairs):
                return None
            most = IDS_MAX // len(pairs)
            return AnswerSettled(tuple(self.state(*pair, sum(question.known), most) for pair in pairs))
        digests = question.digests[max(0, question.at_least - 1) :]
        behind = len(question.digests) - len(digests)
        offers = [
            (digests.index(each.content[-1]), -each.offered_at, each)
            for each in self.of("offer")
            if question.wait_ms and each.found_by is None and each.content[-1] in digests
        ]
        if offers:
            at, _, lease = max(offers, key=lambda offer: offer[:2])
            lease.found_by = asker
            return lease, behind + at + 1
        counts = [
            (max([at for at, digest in enumerate(digests, 1) if digest in each.content], default=0), each)
            for each in self.of("kept")
        ]
        longest = max([count for count, _ in counts], default=0)
        if longest:
            return [lease for count, lease in counts if count == longest], behind + longest
        return AnswerHeld() if last else None

    def nbytes(self, question):
        if isinstance(question, AskHeld):
            digests = question.digests[max(0, question.at_least - 1) :]
            question = msgspec.structs.replace(question, digests=digests)
            places = {*digests[:1], *digests[-1:]}
        else:
            places = {name.epoch for name in question.leases}
        return len(encode(question)) + answers.WAITING_BYTES + answers.PLACE_BYTES * len(places)

    def look(self):
        """Answer what waits and can be answered, and compare with what members have heard."""
        for (member, nonce), question in list(self.waiting.items()):
            if (found := self.answer((member, nonce), question, last=False)) is not None:
                del self.waiting[member, nonce]
                self.expected[member][nonce] = found
        self.world.pass_time(SOON_S)
        for member in self.members:
            assert member.answers.keys() == self.expected[member].keys()
            for nonce, found in list(self.expected[member].items()):
                answer = member.answers[nonce]
                if isinstance(found, tuple):
                    lease, count = found
                    any_of = lease if isinstance(lease, list) else [lease]
                    text = {msgspec.msgpack.encode(each.ticket.to_params()["kvflow"]): each for each in any_of}
                    assert answer.count == count
                    assert msgspec.msgpack.encode(answer.ticket) in text
                    self.expected[member][nonce] = answer
                else:
                    assert answer == found

    # What happens.

    def add(self, kind, ticket, blocks, content=()):
        lease = Lease(kind, ticket, blocks, chained(content))
        lease.ticket = ticket
        self.order += 1
        lease.offered_at = self.order
        self.leases.append(lease)
        self.look()

    def new_name(self):
        self.count += 1
        return f"request-{self.count}"

    @rule(content=contents, is_kept=st.booleans())
    def hold(self, content, is_kept):
        if len(self.of("open", "offer", "kept")) < 6:
            name, ids = self.new_name(), list(range(1, 1 + len(content)))
            door = self.worker.keep if is_kept else self.worker.offer
            given = name, [ids], BLOCK * len(ids)
            ticket = self.at_producer(lambda: door(*given, digests=[list(chained(content))]))
            self.add("kept" if is_kept else "offer", ticket, ids, content)

    @rule(
        which=st.integers(0, 2),
        num_tokens=st.sampled_from((6, 12, 24)),
        steps=st.lists(st.tuples(st.integers(0, 9), st.sampled_from((False, False, True))), max_size=3),
        ask=st.sampled_from(((), ((0, 1, 4), (1, 0, 9)), ((0, 0, 25), (0, 2, 6)))),
    )
    def compute(self, which, num_tokens, steps, ask):
        """A producer computes one of its open offers, or a new one; members ask what has settled of it, and wait."""
        leases = [each for each in self.of("open") if not each.sealed]
        if which >= len(leases) and len(self.of("open", "offer", "kept")) < 6:
            name = self.new_name()
            offer = self.at_producer(lambda: self.worker.offer_progressive(name, [[]], num_tokens))
            self.add("open", offer.ticket, [])
            self.leases[-1].offer = offer
            leases.append(self.leases[-1])
        if leases:
            lease = leases[which % len(leases)]
            for who, known, above in ask:
                self.ask(self.members[who], AskSettled((lease.name,), (known,), above, WAIT_MS))
            for tokens, seals in steps:
                if not lease.sealed:
                    self.advance(lease, tokens, seals=seals)

    def advance(self, lease, tokens, *, seals):
        settled = min(lease.most, lease.settled + tokens)
        end = -(-lease.most // BLOCK) if seals else settled // BLOCK
        new = [list(range(len(lease.blocks) + 1, end + 1))]
        if seals:
            self.at_producer(lambda: lease.offer.seal(new))
            lease.settled, lease.sealed = lease.most, True
        else:
            self.at_producer(lambda: lease.offer.advance(settled, new))
            lease.settled = settled
        lease.blocks = lease.blocks + new[0]
        self.look()

    @precondition(lambda self: self.of("open", "offer", "kept"))
    @rule(which=st.integers(0, 9))
    def revoke(self, which):
        leases = self.of("open", "offer", "kept")
        lease = leases[which % len(leases)]
        assert self.at_producer(lambda: self.worker.revoke(lease.request_id))
        lease.ended = "revoked"
        self.look()

    def ask(self, member, question):
        nonce = member.ask(question)
        found = self.answer((member, nonce), question, last=not question.wait_ms)
        if found is not None:
            self.expected[member][nonce] = found
        else:
            sizes = {
                each: sum(self.nbytes(asked) for (asker, _), asked in self.waiting.items() if asker is each)
                for each in self.members
            }
            room = max(RESERVED, ROOM - sum(sizes.values()))
            if sizes[member] + self.nbytes(question) > room:
                self.expected[member][nonce] = NoRoom(limit=ROOM)
            else:
                self.waiting[member, nonce] = question
        self.look()

    @precondition(lambda self: self.of("open", "offer", "kept"))
    @rule(
        who=st.integers(0, 1),
        which=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        right=st.sampled_from((True, True, True, False)),
        known=st.integers(0, 2),
        above=st.sampled_from((1, 4, 5, 9, 25)),
        waits=st.booleans(),
    )
    def ask_what_has_settled(self, who, which, right, *, known, above, waits):
        leases = [self.leases[-1 - each % min(4, len(self.leases))] for each in which]
        names = tuple(
            each.name if right else LeaseName(*msgspec.structs.astuple(each.name)[:2], bytes(32)) for each in leases
        )
        self.ask(self.members[who], AskSettled(names, (known,), above, WAIT_MS * waits))

    @rule(who=st.integers(0, 1), content=contents, waits=st.booleans(), at_least=st.integers(0, 2))
    def ask_who_holds(self, who, content, waits, at_least):
        waiting = [each for each in self.waiting.values() if isinstance(each, AskHeld)]
        if waits and any(each.at_least != at_least for each in waiting):
            return  # which of them is answered first is not promised
        if at_least <= len(content):
            self.ask(self.members[who], AskHeld(chained(content), WAIT_MS * waits, at_least))

    @rule(content=contents)
    def offer_what_may_be_found(self, content):
        """An open offer is found by one question, by the digest of its last block."""
        if len(self.of("open", "offer", "kept")) < 6:
            name, num_tokens = self.new_name(), BLOCK * len(content)
            offer = self.at_producer(
                lambda: self.worker.offer_progressive(name, [[]], num_tokens, digests=[list(chained(content))])
            )
            self.at_producer(lambda: offer.seal([list(range(1, len(content) + 1))]))
            self.add("offer", offer.ticket, list(range(1, len(content) + 1)), content)

    @rule(who=st.integers(0, 1), which=st.integers(0, 99))
    def withdraw(self, who, which):
        """A question ends with nothing; if its answer was on the way, what it has found is left to others."""
        member = self.members[who]
        if not member.nonces:
            return
        nonce = 1 + which % member.nonces
        withdrawn = member.ask(Withdraw(nonce))
        self.expected[member][withdrawn] = AnswerHeld()
        if self.waiting.pop((member, nonce), None) is not None:
            self.expected[member][nonce] = AnswerHeld()
        for lease in self.of("offer"):
            if lease.found_by == (member, nonce):
                self.order += 1
                lease.found_by, lease.offered_at = None, self.order
        self.look()

    @rule(who=st.integers(0, 1))
    def ask_what_is_kept(self, who):
        """This worker must not tell it."""
        member = self.members[who]
        self.expected[member][member.ask(AskKept(wait_ms=WAIT_MS))] = None
        self.look()

    def teardown(self):
        if hasattr(self, "context"):
            try:
                for member in self.members:
                    member.leave()
                self.world.pass_time(1.0)
                self.at_producer(self.worker.check)
            finally:
                self.context.__exit__(None, None, None)
                self.patch.undo()


QuestionsMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestQuestions = QuestionsMachine.TestCase
