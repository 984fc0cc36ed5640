"""What a worker answers to the questions of members, at once or when there is something to say.

A question waits under places: a request id (until that lease advances, is sealed or ends), a slot (until a grant of it
is admitted or void), a digest (until a lease has it), or ``KEPT`` (until what is kept changes). One that finds no room
to wait is refused.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from threading import Lock

from msgspec.structs import astuple, replace

from kvflow.ids import Clock
from kvflow.leases.held import Lease, OpenGroups
from kvflow.leases.table import LeaseTable, Reader
from kvflow.leases.tickets import Grant, LeaseName, Ticket
from kvflow.rendezvous.questions import (
    IDS_MAX,
    AnswerHeld,
    AnswerKept,
    AnswerSettled,
    AskHeld,
    AskKept,
    AskSettled,
    NoRoom,
    PeerAnswer,
    PeerQuestion,
    Settled,
    Withdraw,
    decode_question,
    encode,
)

WAITING_BYTES_MAX = 64 << 20
"""Bytes of all questions that wait. Those of one connection, or key, take no more than they leave free for others."""

RESERVED_BYTES = 64 << 10
"""Bytes of each connection, or key, whatever the others take: the longest question, or thirty short ones."""

WAITING_BYTES = 1 << 10  # of each, beside what it says
PLACE_BYTES = 512  # likewise, for each place

KEPT = object()
"""The place of questions for what is kept."""

BATCH_S = 0.001  # of the event loop, in which answers are made; then others have their turn

Vouches = Callable[[int, int, bytes], bool]
"""Slot, epoch and MAC -> whether the lease is held and the MAC is that of its ticket."""

_Question = AskHeld | AskSettled | AskKept

_Reply = PeerAnswer | tuple[Lease, int] | None
"""An answer, or the lease that was found and how many digests of the question lead to it; None: nothing yet."""


@dataclass(slots=True, eq=False)
class _OpenQuestion:
    """A question; ``answer`` returns whether the connection has taken the answer."""

    connection: Hashable
    nonce: int
    answer: Callable[[PeerAnswer | None], bool]
    account: Hashable
    encoded: bytes = b""  # while it waits: much smaller than its digests
    places: tuple[Hashable, ...] = ()
    last: bool = False  # it has waited for as long as it said
    timer: asyncio.TimerHandle = field(init=False)

    @property
    def nbytes(self) -> int:
        return len(self.encoded) + WAITING_BYTES + PLACE_BYTES * len(self.places)


class Answers:
    """The questions of members. ``lock`` guards ``leases`` and this object; ``sign`` signs a ticket again.

    ``found`` and ``not_held``: how many questions for content were answered with a ticket, and how many with nothing.
    Thread: the event loop; ``note`` from any thread that holds the lock.
    """

    def __init__(
        self,
        leases: LeaseTable,
        groups: OpenGroups,
        lock: Lock,
        *,
        sign: Callable[[Grant], Ticket],
        vouches: Vouches,
        clock: Clock,
        keys_differ: bool,
        tells: bool,
    ) -> None:
        self._leases = leases
        self._groups = groups
        self._lock = lock
        self._sign = sign
        self._vouches = vouches
        self._clock = clock
        self._keys_differ = keys_differ
        self._tells = tells  # ends of what is kept
        self._loop = asyncio.get_running_loop()
        self.at: dict[Hashable, dict[_OpenQuestion, None]] = {}  # those that wait, by place
        self._of: dict[Hashable, dict[_OpenQuestion, None]] = {}  # by connection, the oldest first
        self._sizes: Counter[Hashable] = Counter()  # in bytes, by connection, or by key if keys differ
        self._changed: dict[Hashable, None] = {}  # places of questions to look at next
        self._due: deque[_OpenQuestion] = deque()  # questions to look at now
        self._told = leases.ends.number  # the change of what is kept of which those were told that wait for one
        self.found = self.not_held = 0

    def ask(
        self,
        connection: Hashable,
        question: PeerQuestion,
        reader: Reader,
        answer: Callable[[PeerAnswer | None], bool],
        nonce: int,
    ) -> None:
        """Answer a question once, now or later. ``nonce``: its number on the connection."""
        if isinstance(question, Withdraw):
            for gone in self.forget(connection, question.nonce):
                gone.answer(AnswerHeld())
            answer(AnswerHeld())
            return
        if isinstance(question, AskKept) and not self._tells:
            answer(None)
            return
        if isinstance(question, AskHeld):  # a shorter prefix is of no use
            question = replace(question, digests=question.digests[max(0, question.at_least - 1) :])
        asked = _OpenQuestion(connection, nonce, answer, reader.public_key if self._keys_differ else connection)
        self._prove(question)
        with self._lock:
            found = self._try(asked, question, last=not question.wait_ms)
            if found is None and question.wait_ms:
                # A copy: the encoder's memory is up to twice as large.
                asked.encoded, asked.places = bytes(memoryview(encode(question))), self._places_of(question)
                room = max(RESERVED_BYTES, WAITING_BYTES_MAX - self._sizes.total())
                if self._sizes[asked.account] + asked.nbytes <= room:
                    asked.timer = self._loop.call_later(question.wait_ms / 1000, self._end, asked)
                    self._add(asked)
                    return
                found = NoRoom(limit=WAITING_BYTES_MAX)
        self._say(asked, question, found)

    def forget(self, connection: Hashable, nonce: int | None = None) -> list[_OpenQuestion]:
        """Forget the questions of a connection that has ended, or that with a nonce; return those that waited.

        If that one was answered, its answer reaches nobody, so that others may find what it has found.
        """
        with self._lock:
            gone = [each for each in self._of.get(connection, ()) if nonce in (None, each.nonce)]
            for waiting in gone:
                waiting.timer.cancel()
                self._remove(waiting)
            self.note(self._leases.give_back((connection, nonce)))
        return gone

    def note(self, places: Iterable[Hashable]) -> None:
        """Answer what waits at these places on the loop, soon, for something has changed there."""
        found = [place for place in places if place in self.at]
        if KEPT in self.at and self._leases.ends.number != self._told:
            self._told = self._leases.ends.number
            found.append(KEPT)
        if found and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._look_at, found)

    def _end(self, waiting: _OpenQuestion) -> None:
        """Answer a question that waits no longer with what there is."""
        waiting.last = True
        self._look_at((), (waiting,))

    def _look_at(self, places: Iterable[Hashable], ended: Iterable[_OpenQuestion] = ()) -> None:
        """Look again at the questions that wait at these places, and at those that wait no longer."""
        is_busy = bool(self._changed or self._due)
        self._changed.update(dict.fromkeys(places))
        self._due.extend(ended)
        if not is_busy:
            self._loop.call_soon(self._answer_some)

    def _answer_some(self) -> None:
        until = self._clock() + BATCH_S
        try:
            while self._changed or self._due:
                if not self._due:
                    places, self._changed = self._changed, {}
                    self._due.extend([each for place in places for each in self.at.get(place, ())])
                else:
                    self._answer_one(self._due.popleft())
                if self._clock() >= until:
                    break
        finally:
            if self._changed or self._due:
                self._loop.call_soon(self._answer_some)

    def _answer_one(self, waiting: _OpenQuestion) -> None:
        """Answer a question if there is something to say, and it is not answered yet."""
        if waiting not in self._of.get(waiting.connection, ()):
            return
        question = decode_question(waiting.encoded, peer="")
        assert not isinstance(question, Withdraw | None)
        self._prove(question)
        with self._lock:
            found = self._try(waiting, question, last=waiting.last)
            if found is None and not waiting.last:
                if (places := self._places_of(question)) != waiting.places:
                    self._remove(waiting)
                    waiting.places = places
                    self._add(waiting)
                return
            self._remove(waiting)
        waiting.timer.cancel()
        self._say(waiting, question, found)

    def _add(self, waiting: _OpenQuestion) -> None:
        for place in waiting.places:
            self.at.setdefault(place, {})[waiting] = None
        self._of.setdefault(waiting.connection, {})[waiting] = None
        self._sizes[waiting.account] += waiting.nbytes

    def _remove(self, waiting: _OpenQuestion) -> None:
        for held, key in [(self.at, place) for place in waiting.places] + [(self._of, waiting.connection)]:
            del held[key][waiting]
            if not held[key]:
                del held[key]
        self._sizes[waiting.account] -= waiting.nbytes
        if not self._sizes[waiting.account]:
            del self._sizes[waiting.account]

    def _places_of(self, question: _Question) -> tuple[Hashable, ...]:
        if isinstance(question, AskKept):
            return (KEPT,)
        if isinstance(question, AskHeld):
            # A lease that has more than enough has the first of these, too.
            return tuple(dict.fromkeys((*question.digests[:1], *question.digests[-1:])))
        held = [(name.slot, self._leases.held(name.slot, name.epoch)) for name in question.leases]
        return tuple(dict.fromkeys(slot if lease is None else lease.grant.request_id for slot, lease in held))

    def _prove(self, question: _Question) -> None:
        """Sign the grants that a question names before the lock is taken, if nobody has: engines wait for the lock."""
        until = self._clock() + BATCH_S
        for name in question.leases if isinstance(question, AskSettled) else ():
            if self._clock() < until:
                self._vouches(*astuple(name))

    def _try(self, asked: _OpenQuestion, question: _Question, *, last: bool) -> _Reply:
        """Return what there is to say. ``last``: it waits no more."""
        if isinstance(question, AskKept):
            is_news = last or question.since != self._leases.ends.number
            return AnswerKept(*self._leases.ends.after(question.since, question.begun)) if is_news else None
        if isinstance(question, AskHeld):
            return self._leases.find(question.digests, (asked.connection, asked.nonce) if question.wait_ms else None)
        states: list[Lease | str] = []
        until, is_news = self._clock() + BATCH_S, False
        for name in question.leases:  # what is found no more in this time is told when it is asked for again
            states.append("" if is_news and self._clock() >= until else self._state(name))
            is_news = is_news or self._is_news(states[-1], question.above)
        if not (last or is_news):
            return None
        most = IDS_MAX // len(states)
        return AnswerSettled(tuple([self._settled(each, question.known, most) for each in states]))

    def _state(self, name: LeaseName) -> Lease | str:
        """Return a lease that is held, to who has the MAC of its ticket; otherwise how it has ended, if it has."""
        held = self._leases.held(name.slot, name.epoch)
        if held is not None:
            return held if self._vouches(*astuple(name)) else "unknown"
        past = self._leases.past(name.slot, name.epoch)
        if past is not None:
            return past.ended_by
        return "" if self._leases.may_come(name.slot, name.epoch) else "unknown"

    def _is_news(self, state: Lease | str, above: int) -> bool:
        """Return whether a question that waits for so many tokens waits no more."""
        if isinstance(state, str):
            return state != ""
        return state.sealed or self._groups.whole(state.settled) >= above

    def _say(self, asked: _OpenQuestion, question: _Question, found: _Reply) -> None:
        """Send the answer. If the connection takes none, make no more of them, and let others find what it found."""
        if isinstance(found, tuple):
            lease, count = found
            self.found += 1
            lease.text = lease.text or self._sign(lease.grant).to_params()["kvflow"]  # too slow for the lock
            found = AnswerHeld(ticket=lease.text, count=count + max(0, getattr(question, "at_least", 0) - 1))
        self.not_held += found is None
        if not asked.answer(found or AnswerHeld()):
            self.forget(asked.connection)
            self.forget(asked.connection, asked.nonce)

    def _settled(self, lease: Lease | str, known: tuple[int, ...], most: int) -> Settled:
        """Return what has settled. What is more than so many block ids comes with the next answer."""
        if isinstance(lease, str):
            return Settled(ended=lease)
        blocks, sealed = lease.blocks, lease.sealed
        known = (*known, *(0 for _ in blocks))[: len(blocks)]
        tokens = lease.settled if sealed else self._groups.whole(lease.settled)
        lists = [each[begin:] for each, begin in zip(blocks, known, strict=True)]
        if sum(map(len, lists)) > most:
            room = most // len(blocks)
            sealed, tokens = False, min(tokens, self._groups.tokens_of([each + room for each in known]))
        if not sealed:
            ends = self._groups.counts(tokens)
            lists = [each[begin:end] for each, begin, end in zip(blocks, known, ends, strict=True)]
        return Settled(num_tokens=tokens, block_ids=tuple(lists), sealed=sealed)
