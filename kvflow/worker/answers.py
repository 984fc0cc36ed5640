"""What a worker answers to the questions of members, at once or when there is something to say.

A question waits under places: a request id (until that lease advances, is sealed or ends), a slot and an epoch (until
that lease is admitted), or a digest (until a lease has it).
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from threading import Lock

from kvflow.leases.held import Lease, OpenGroups
from kvflow.leases.table import LeaseTable, Reader
from kvflow.leases.tickets import Grant, Ticket
from kvflow.rendezvous.questions import (
    IDS_MAX,
    Answer,
    AnswerHeld,
    AnswerSettled,
    AskHeld,
    AskSettled,
    Question,
    Withdraw,
)

WAITING_MAX = 1 << 18
"""Digests of all questions that wait: about 20 MiB. Beyond it, one of the key that has most is answered at once."""


@dataclass(slots=True, eq=False)
class _WaitingQuestion:
    question: AskHeld | AskSettled
    connection: Hashable
    public_key: str
    answer: Callable[[Answer], None]
    nonce: int
    places: tuple[Hashable, ...] = ()
    timer: asyncio.TimerHandle = field(init=False)


class Answers:
    """The questions of members. ``lock`` guards ``leases`` and this object; ``seal`` signs a ticket again.

    ``found`` and ``not_held``: how many questions for content were answered with a ticket, and how many with nothing.
    Thread: the event loop; ``note`` from any thread that holds the lock.
    """

    def __init__(self, leases: LeaseTable, groups: OpenGroups, seal: Callable[[Grant], Ticket], lock: Lock) -> None:
        self._leases = leases
        self._groups = groups
        self._seal = seal
        self._lock = lock
        self._loop = asyncio.get_running_loop()
        self.at: dict[Hashable, dict[_WaitingQuestion, None]] = {}  # those that wait, by place
        self._of: dict[Hashable, dict[_WaitingQuestion, None]] = {}  # by connection, the oldest first
        self._sizes: Counter[str] = Counter()  # in digests, by public key
        self.found = self.not_held = 0

    def ask(
        self, connection: Hashable, question: Question, reader: Reader, answer: Callable[[Answer], None], nonce: int
    ) -> None:
        """Answer a question once, now or later. ``nonce``: its number on the connection."""
        if isinstance(question, Withdraw):
            for gone in self.forget(connection, question.nonce):
                gone.answer(AnswerHeld())
            answer(AnswerHeld())
            return
        with self._lock:
            found = self._try(question, last=not question.wait_ms)
            waits = found is None and question.wait_ms > 0
            if waits:
                waiting = _WaitingQuestion(question, connection, reader.public_key, answer, nonce)
                waiting.timer = self._loop.call_later(question.wait_ms / 1000, self._end, waiting)
                self._add(waiting)
        if not waits:
            answer(self._said(found))
        elif self._sizes.total() > WAITING_MAX:
            self._end(self._oldest_of_the_largest())

    def forget(self, connection: Hashable, nonce: int | None = None) -> list[_WaitingQuestion]:
        """Forget the questions of a connection that has ended, or that with a nonce; return those that waited."""
        with self._lock:
            gone = [each for each in self._of.get(connection, ()) if nonce in (None, each.nonce)]
            for waiting in gone:
                waiting.timer.cancel()
                self._remove(waiting)
        return gone

    def note(self, places: Iterable[Hashable]) -> None:
        """Answer what waits at these places on the loop, soon, for something has changed there."""
        found = [place for place in places if place in self.at] if self.at else ()
        if found and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._answer_at, found)

    def _answer_at(self, places: Iterable[Hashable]) -> None:
        done = []
        with self._lock:
            for waiting in {each: None for place in places for each in self.at.get(place, ())}:
                found = self._try(waiting.question, last=False)
                self._remove(waiting)
                if found is None:
                    self._add(waiting)  # perhaps at another place
                else:
                    waiting.timer.cancel()
                    done.append((waiting, found))
        for waiting, found in done:
            waiting.answer(self._said(found))

    def _end(self, waiting: _WaitingQuestion) -> None:
        """Answer a question that waits no longer with what there is."""
        waiting.timer.cancel()
        with self._lock:
            self._remove(waiting)
            found = self._try(waiting.question, last=True)
        waiting.answer(self._said(found))

    def _add(self, waiting: _WaitingQuestion) -> None:
        waiting.places = self._places_of(waiting.question)
        for place in waiting.places:
            self.at.setdefault(place, {})[waiting] = None
        self._of.setdefault(waiting.connection, {})[waiting] = None
        self._sizes[waiting.public_key] += _size_of(waiting.question)

    def _remove(self, waiting: _WaitingQuestion) -> None:
        for held, key in [(self.at, place) for place in waiting.places] + [(self._of, waiting.connection)]:
            del held[key][waiting]
            if not held[key]:
                del held[key]
        self._sizes[waiting.public_key] -= _size_of(waiting.question)
        if not self._sizes[waiting.public_key]:
            del self._sizes[waiting.public_key]

    def _oldest_of_the_largest(self) -> _WaitingQuestion:
        [(key, _)] = self._sizes.most_common(1)
        return next(each for waiting in self._of.values() for each in waiting if each.public_key == key)

    def _places_of(self, question: AskHeld | AskSettled) -> tuple[Hashable, ...]:
        if isinstance(question, AskHeld):
            # A lease that has more than enough has the first of these, too.
            enough = question.digests[0][max(question.at_least, 1) - 1 :]
            return tuple(dict.fromkeys((*enough[:1], *enough[-1:])))
        lease = self._leases.held(question.slot, question.epoch)
        return ((question.slot, question.epoch) if lease is None else lease.grant.request_id,)

    def _said(self, found: "Answer | tuple[Lease, int] | None") -> Answer:
        """Return the answer. To sign a ticket takes longer than engines should wait for the lock."""
        if not isinstance(found, tuple):
            self.not_held += found is None
            return found or AnswerHeld()
        lease, count = found
        self.found += 1
        lease.text = lease.text or self._seal(lease.grant).to_params()["kvflow"]
        return AnswerHeld(ticket=lease.text, count=count)

    def _try(self, question: AskHeld | AskSettled, *, last: bool) -> "Answer | tuple[Lease, int] | None":
        """Return the answer, or the lease that was found; None if there is none. ``last``: it waits no more."""
        if isinstance(question, AskHeld):
            return self._leases.find(question.digests[0], question.at_least, offers=question.wait_ms > 0)
        held = self._leases.held(question.slot, question.epoch)
        if held is None:
            if self._leases.may_come(question.slot, question.epoch):
                return AnswerSettled() if last else None
            past = self._leases.past(question.slot, question.epoch)
            return AnswerSettled(ended="unknown" if past is None else past.ended_by)
        if not (last or held.sealed) and self._groups.whole(held.settled) < question.above:
            return None
        return self._settled(held, question.known)

    def _settled(self, lease: Lease, known: tuple[int, ...]) -> AnswerSettled:
        """Return what has settled. What does not fit into one answer comes with the next one."""
        blocks, sealed = lease.blocks, lease.sealed
        known = (*known, *(0 for _ in blocks))[: len(blocks)]
        tokens = lease.grant.num_tokens[0] if sealed else self._groups.whole(lease.settled)
        lists = [each[begin:] for each, begin in zip(blocks, known, strict=True)]
        if sum(map(len, lists)) > IDS_MAX:
            room = IDS_MAX // len(blocks)
            sealed, tokens = False, min(tokens, self._groups.tokens_of([each + room for each in known]))
        if not sealed:
            ends = self._groups.counts(tokens)
            lists = [each[begin:end] for each, begin, end in zip(blocks, known, ends, strict=True)]
        return AnswerSettled(num_tokens=tokens, block_ids=tuple(lists), sealed=sealed)


def _size_of(question: AskHeld | AskSettled) -> int:
    return max(1, len(question.digests[0])) if isinstance(question, AskHeld) else 1
