"""A member asks a worker what it keeps, and believes only what the cluster has signed, of this worker, of this kind."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import msgspec
import pytest

from handshake import Answer, open_client
from handshake.limits import QUESTIONS_MAX, Limits
from handshake.messages import ANSWER_BYTES_MAX, QUESTION_BYTES_MAX, Answered, Ask, ConnectionFailed
from handshake.rates import Allowance, Bucket
from kvflow.errors import (
    ArgumentInvalid,
    CapacityExceeded,
    DeadlineExceeded,
    ProtocolViolation,
)
from kvflow.leases.tickets import RankAddress
from kvflow.rendezvous import dialer, questions
from kvflow.rendezvous.dialer import open_asker
from kvflow.rendezvous.endpoint import READER
from kvflow.rendezvous.issuer import TicketMint
from kvflow.rendezvous.listener import Listener
from kvflow.rendezvous.questions import AnswerHeld, AskHeld
from kvflow.worker.answers import Answers
from tests.helpers.loops import looped

from .helpers import INCARNATION, OURS, PATIENCE_S, SECRET, SECURITY, config, linked, producing

DIGESTS = tuple(bytes([number]) * 16 for number in range(1, 4))


def minted(kind="keep", *, engine_id="prefill-0", secret=SECRET):
    """Return the text of a ticket, signed with a secret."""
    ranks = [RankAddress(0, INCARNATION, "tcp://127.0.0.1:1", slots=8)]
    mint = TicketMint(engine_id, ranks, cluster_secret=secret, block_sizes=[4])
    given = {"digests": [DIGESTS]} if kind == "keep" else {}
    ticket, _ = getattr(mint, kind)("r", block_ids=[[1, 2, 3]], num_tokens=12, **given)
    return ticket.to_params()["kvflow"]


@pytest.fixture
def answers(monkeypatch):
    """Return what workers answer, one after the other, and what they were asked."""
    said, asked = [], []

    def ask(_self, _key, question, reader, answer, _nonce):
        asked.append((question, reader))
        found = said.pop(0) if said else AnswerHeld()
        answer(found() if callable(found) else found)

    monkeypatch.setattr(Answers, "ask", ask)
    return said, asked


@pytest.fixture
def mute(monkeypatch):
    """Have workers answer no question; return those that they were asked."""
    asked = asyncio.Queue()
    monkeypatch.setattr(Listener, "answer", lambda self, key, nonce, held: asked.put_nowait((self, key, nonce)))
    return asked


@asynccontextmanager
async def asking(producer, **settings):
    async with open_asker(producer.endpoint, config(engine_id="decode-0", **settings)) as asker:
        yield asker


async def test_a_worker_that_keeps_nothing_says_so():
    async with producing() as producer, asking(producer) as asker:
        assert (asker.identity.engine_id, asker.wire_version) == ("prefill-0", 2)
        for _ in range(3):
            assert await asker.held(DIGESTS, PATIENCE_S) == (None, 0)


async def test_the_ticket_of_a_kept_lease_is_verified_and_read(answers):
    said, asked = answers
    said.append(AnswerHeld(ticket=minted(), count=2))
    async with producing() as producer, asking(producer) as asker:
        ticket, count = await asker.held(list(DIGESTS), PATIENCE_S)
        assert (ticket.request_id, ticket.grants[0].kind, count) == ("r", "kept", 2)
        ((question, reader),) = asked
        assert question == AskHeld(digests=DIGESTS, at_least=1)
        assert (reader.engine_id, reader.public_key) == ("decode-0", SECURITY.client.public_key)


@pytest.mark.parametrize(
    ("held", "about"),
    [
        (AnswerHeld(ticket=minted(secret="another secret of the tests"), count=1), "bad ticket"),
        (AnswerHeld(ticket=minted()[:-4] + "AAAA", count=1), "bad ticket"),
        (AnswerHeld(ticket="kvf3.", count=1), "bad ticket"),
        (AnswerHeld(ticket=minted(engine_id="prefill-1"), count=1), "another question"),
        (AnswerHeld(ticket=minted("offer"), count=1), "another question"),
        (AnswerHeld(ticket=minted(), count=0), "another question"),
        (AnswerHeld(ticket=minted(), count=4), "another question"),
    ],
)
async def test_an_answer_that_cannot_be_one_is_a_violation(answers, held, about):
    answers[0].append(held)
    async with producing() as producer, asking(producer) as asker:
        with pytest.raises(ProtocolViolation, match=about) as caught:
            await asker.held(DIGESTS, PATIENCE_S)
        assert caught.value.peer == producer.endpoint
        assert await asker.held(DIGESTS, PATIENCE_S) == (None, 0), "the connection goes on"


async def test_a_connection_to_read_from_asks_too(answers):
    held = AnswerHeld(ticket=minted(), count=3)
    answers[0].append(held)
    async with producing() as producer, linked(producer) as link:
        answer = await link.ask(questions.encode(AskHeld(digests=DIGESTS)), PATIENCE_S)
        assert questions.decode_answer(answer, peer="somebody") == held


async def test_a_late_answer_is_nobodys(mute):
    async with producing() as producer, asking(producer) as asker:
        with pytest.raises(DeadlineExceeded) as caught:
            await asker.held(DIGESTS, 0.01)
        assert caught.value.peer == producer.endpoint
        patient = asyncio.ensure_future(asker.held(DIGESTS, PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            (listener, *late), _, (_, *current) = [await mute.get() for _ in range(3)]  # the second one is withdrawn
        for asked, count in ((late, 1), (current, 2)):
            encoded = questions.encode(AnswerHeld(ticket=minted(), count=count))
            listener._server.send(asked[0], Answer(nonce=asked[1], answer=encoded))
        assert (await patient)[1] == 2
        assert asker._awaited._waiting == {}


async def test_a_question_that_is_cancelled_is_forgotten_and_gets_no_offer():
    async with producing() as producer, asking(producer) as asker:
        waiting = producer._leases.answers._of
        gone, stays = (asyncio.ensure_future(asker.held(DIGESTS, PATIENCE_S, wait_s=PATIENCE_S)) for _ in range(2))
        for number in (2, 1):
            await asyncio.sleep(0)  # what they send is answered in order
            await asker.held([b"other"], PATIENCE_S)
            assert [len(each) for each in waiting.values()] == [number]
            gone.cancel()
        producer.offer_progressive("r", [()], 12, digests=[DIGESTS])
        assert (await stays)[1] == len(DIGESTS)


async def test_only_so_many_questions_wait_and_the_next_is_refused_here(mute):
    async with producing() as producer, asking(producer) as asker:
        waiting = [asyncio.ensure_future(asker.held(DIGESTS, PATIENCE_S)) for _ in range(QUESTIONS_MAX)]
        await asyncio.sleep(0)
        with pytest.raises(CapacityExceeded):
            await asker.held(DIGESTS, PATIENCE_S)
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert (await asker.ping())[0] >= 0.0, "it was not refused"


async def test_who_asks_faster_than_a_worker_takes_waits_and_is_not_refused(monkeypatch):
    slow = msgspec.structs.replace(Limits(), questions_per_s_max=100.0)
    monkeypatch.setattr(dialer, "Limits", lambda **_: slow)
    begin = Allowance.__init__
    monkeypatch.setattr(Allowance, "__init__", lambda self, _limits, now: begin(self, slow, now))
    async with producing() as producer, asking(producer) as asker:
        for _ in range(130):
            assert await asker.held(DIGESTS, PATIENCE_S) == (None, 0)


async def test_who_waits_for_the_pace_waits_no_longer_than_said(mute):
    async with producing() as producer, asking(producer) as asker:
        asker._pace = Bucket(1e-9, asker._now())
        with pytest.raises(DeadlineExceeded):
            await asker.held(DIGESTS, 0.01)
        assert mute.empty()


async def test_a_question_that_is_too_long_is_refused_here(answers):
    async with producing() as producer, asking(producer) as asker:
        with pytest.raises(ArgumentInvalid):
            await asker.ask(bytes(QUESTION_BYTES_MAX + 1), PATIENCE_S)
        assert await asker.held(DIGESTS[:1] * 2000, PATIENCE_S, wait_s=1.0) == (None, 0)
        ((question, _),) = answers[1]
        assert len(question.digests) == 2000


@pytest.mark.parametrize(
    ("total", "size", "room"), [(2001, 16, 2000), (5000, 21, 2000), (901, 64, 729), (40_000, 9, 2000)]
)
async def test_of_many_digests_all_at_the_end_and_some_before_are_asked_for(answers, total, size, room):
    said, asked = answers
    digests = [number.to_bytes(size) for number in range(total)]
    last = room // 4
    async with producing() as producer, asking(producer) as asker:
        assert await asker.held(digests, PATIENCE_S, wait_s=1.0) == (None, 0)
        ((first, _),) = asked
        sent = first.digests
        places = [int.from_bytes(each) for each in sent]
        assert last < len(sent) <= room
        assert places[-last:] == list(range(total - last, total))
        (step,) = {after - before for before, after in pairwise([-1, *places[:-last]])}
        assert (total - last) % step == total - last - 1 - places[-last - 1]
        for count in (1, len(sent) - last, len(sent)):
            said.append(AnswerHeld(ticket=minted(), count=count))
            wanted = places[count - 1] + 1
            assert (await asker.held(digests, PATIENCE_S, wait_s=1.0, at_least=wanted))[1] == wanted
            assert asked[-1][0].at_least == count


async def test_the_longest_prefix_is_found_in_few_short_questions(answers):
    said, asked = answers
    digests = [number.to_bytes(16) for number in range(8192)]
    async with producing() as producer, asking(producer) as asker:
        for held in (0, 1, 2, 127, 128, 129, 4000, 8000, 8190, 8191, 8192):
            asked.clear()
            kept = set(digests[:held])
            ticket = minted()

            def answer_next(kept=kept, ticket=ticket):
                count = sum(each in kept for each in asked[-1][0].digests)
                return AnswerHeld(ticket=ticket, count=count) if count else AnswerHeld()

            said[:] = [answer_next] * 9
            found, count = await asker.held(digests, PATIENCE_S)
            assert (count, found is None) == (held, not held)
            assert 1 <= len(asked) <= 2
            assert max(len(each.digests) for each, _ in asked) <= 128


async def test_an_answer_tells_what_was_not_asked_for(answers):
    said, _ = answers
    question = dialer.ContentQuestion([number.to_bytes(16) for number in range(1000)])
    async with producing() as producer, asking(producer) as asker:
        for count in (0, 1, len(question.places)):
            said.append(AnswerHeld(ticket=minted() if count else "", count=count))
            claim = await asker.claim(question, PATIENCE_S)
            assert claim.count == ([0] + [place + 1 for place in question.places])[count]
            assert claim.rest == range(claim.count, [*question.places, 1000][count])


async def test_a_question_that_waits_is_answered_with_any_lease(answers):
    said, asked = answers
    said += [AnswerHeld(ticket=minted("offer"), count=3)] * 2
    async with producing() as producer, asking(producer) as asker:
        ticket, count = await asker.held(DIGESTS, PATIENCE_S, wait_s=2.5, at_least=2)
        assert (ticket.grants[0].kind, count) == ("offer", 3)
        await asker.held(DIGESTS, PATIENCE_S, wait_s=1e9)
    assert [question for question, _ in asked] == [
        AskHeld(digests=DIGESTS, wait_ms=2500, at_least=2),
        AskHeld(digests=DIGESTS, wait_ms=86_400_000, at_least=1),
    ]


LEASE = {"slot": 1, "epoch": 1, "mac": b"x" * 32}
MALFORMED = [
    b"",
    b"\xc1",
    b"\x91" * 40_000,
    msgspec.msgpack.encode({}),
    msgspec.msgpack.encode({"type": 7}),
    msgspec.msgpack.encode({"type": "ask_settled", "digests": []}),
    msgspec.msgpack.encode({"type": "ask_held"}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [b""]}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [b"x" * 65]}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [b"x"] * 4097}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": ["\ud7ff"]}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [b"x"], "wait_ms": -1}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [b"x"], "at_least": 1 << 40}),
    msgspec.msgpack.encode({"type": "ask_held", "digests": [[b"x"]]}),  # as before: a list for each group
    msgspec.msgpack.encode({"type": "ask_settled", "leases": [], "known": [0]}),
    msgspec.msgpack.encode({"type": "ask_settled", "leases": [LEASE] * 65, "known": [0]}),
    msgspec.msgpack.encode({"type": "ask_settled", "leases": [LEASE | {"mac": b"x" * 33}], "known": [0]}),
    msgspec.msgpack.encode({"type": "ask_settled", "leases": [LEASE | {"slot": 1 << 25}], "known": [0]}),
    msgspec.msgpack.encode({"type": "ask_settled", "leases": [LEASE], "known": [0] * 257}),
]
NEWER = msgspec.msgpack.encode({"type": "ask_of_a_newer_release", "digests": 7})


async def asked_raw(producer, encoded):
    """Ask a worker whatever this is; return its answer, or how it ended the connection."""
    heard = asyncio.Queue()
    async with (
        open_client(
            producer.endpoint, identity=OURS.identity, publication=READER, security=SECURITY, on_event=heard.put_nowait
        ) as client,
        asyncio.timeout(PATIENCE_S),
    ):
        client.send(Ask(nonce=1, question=encoded))
        while not isinstance(event := await heard.get(), Answered | ConnectionFailed):
            pass
    return event


async def test_a_malformed_question_ends_its_connection_and_harms_nobody(answers):
    async with producing() as producer, asking(producer) as asker:
        for encoded in MALFORMED:
            failed = await asked_raw(producer, encoded)
            assert (failed.code, failed.refused) == ("protocol_violation", True)
            assert "what the peer asks" in failed.reason
        assert await asker.held([b"x"], PATIENCE_S) == (None, 0)


async def test_a_question_of_a_newer_release_is_answered_with_nothing(answers):
    later = msgspec.msgpack.encode({"type": "ask_held", "digests": [b"x"], "of a newer release": 1})
    async with producing() as producer:
        assert (await asked_raw(producer, NEWER)).answer == b""
        assert answers[1] == []
        assert (await asked_raw(producer, later)).answer == questions.encode(AnswerHeld())
    assert len(answers[1]) == 1


@looped(
    "encoded",
    [
        b"\xc1",
        b"\x91" * 2000,
        questions.encode(AskHeld(digests=(b"x",))),
        msgspec.msgpack.encode({"type": "held", "ticket": 7}),
        msgspec.msgpack.encode({"type": "held", "count": -1}),
        msgspec.msgpack.encode({"type": "held", "ticket": "x" * (ANSWER_BYTES_MAX + 1)}),
    ],
)
def test_what_is_no_answer_is_a_violation(encoded):
    with pytest.raises(ProtocolViolation) as caught:
        questions.decode_answer(encoded, peer="somebody")
    assert caught.value.peer == "somebody"


def test_a_worker_that_does_not_know_the_question_holds_nothing():
    assert questions.decode_answer(b"", peer="somebody") == AnswerHeld()
    assert questions.decode_kept(b"", peer="somebody") is None


@looped(
    "answer",
    [{"new": b"x" * 12}, {"gone": b"x" * 7}, {"new": bytes(8 * 4097)}, {"until": -1}, {"begun": 1 << 63}],
    ids=["new", "gone", "too many", "before all", "behind all"],
)
def test_ends_that_cannot_be_are_a_violation(answer):
    with pytest.raises(ProtocolViolation):
        questions.decode_kept(msgspec.msgpack.encode({"type": "kept", **answer}), peer="somebody")


async def test_a_ticket_too_long_to_be_sent_is_as_good_as_none(answers):
    answers[0].append(AnswerHeld(ticket="x" * ANSWER_BYTES_MAX, count=1))
    async with producing() as producer, asking(producer) as asker:
        assert await asker.held(DIGESTS, PATIENCE_S) == (None, 0)
