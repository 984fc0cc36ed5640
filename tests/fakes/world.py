"""Virtual time: everything that is going to happen, in one order, drawn from one seed.

Nothing in a world waits, and nothing in it reads a real clock. Two runs of one seed are therefore the same run, and a
minute of a world lasts as long as its events take to compute.
"""

import asyncio
import random
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from math import log
from typing import Any, Protocol

STEPS_MAX = 300_000
"""Events of one world. A healthy scenario needs some thousands; one that needs this many does not end."""


class Violation(Exception):
    """A promise was broken. The text says what a checker found."""


class Event(list[Any]):
    """Something that is going to happen: the moment, its place among those of one moment, a call and its arguments.

    A list, because lists compare and unpack fast: one scenario makes ten thousand of these.
    """

    __slots__ = ()

    def cancel(self) -> None:
        """Let it not happen."""
        self[2:] = None, ()


class Inhabitant(Protocol):
    """What a world knows of each process in it."""

    def pending(self) -> list["asyncio.Task[Any]"]:
        """Return the tasks that have not ended."""

    def unwind(self) -> None:
        """Let the remains of a process that has ended run again, for ``bury``."""


class World:
    """Virtual time, chance, the record of what happened, and the first promise that was broken.

    Attributes:
        now: seconds since the world began.
        chance: the only source of random numbers.
        record: one line per event, if it is kept.
        violation: the first, or None.
        over: whether the scenario has ended, so that nothing counts as a violation.
        processes: all that began in it, in this order.

    Args:
        seed: of all chance.
        recording: whether ``note`` keeps its lines; it changes nothing else.
    """

    def __init__(self, seed: int, *, recording: bool = False) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)
        self.recording = recording
        self.record: list[str] = []
        self.violation: Violation | None = None
        self.over = False
        self.processes: list[Inhabitant] = []
        self._agenda: list[Event] = []
        self._order = count()
        self._steps = 0
        self._draw = self.chance.random

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> Event:
        """Let something happen ``delay_s`` from now; things of one moment happen in the order of these calls."""
        event = Event((self.now + delay_s if delay_s > 0 else self.now, next(self._order), call, arguments))
        heappush(self._agenda, event)
        return event

    def at(self, moment: float, call: Callable[..., object], *arguments: object) -> Event:
        """Let something happen at a moment, or now if that has passed."""
        event = Event((max(self.now, moment), next(self._order), call, arguments))
        heappush(self._agenda, event)
        return event

    def run(self, until: Callable[[], bool], deadline_s: float) -> bool:
        """Let time pass until something holds; False if a promise was broken, or it did not hold in time."""
        agenda = self._agenda
        while self.violation is None:
            if until():
                return True
            if not agenda or agenda[0][0] > deadline_s:
                self.now = max(self.now, min(deadline_s, agenda[0][0]) if agenda else self.now)
                return False
            self.now, _, call, arguments = heappop(agenda)
            if call is not None:
                self._steps += 1
                if self._steps > STEPS_MAX:
                    self.fail(f"{STEPS_MAX} events, and no end: something is in a loop")
                call(*arguments)
        return False

    def spend(self, seconds: float) -> None:
        """Let time pass within a call, as slow code does: what becomes due meanwhile happens after the call."""
        self.now += seconds
        for event in self._agenda:
            event[0] = max(event[0], self.now)
        heapify(self._agenda)

    def fail(self, what: str | BaseException) -> None:
        """Note that a promise was broken; the first one stops the world."""
        if self.violation is None and not self.over:
            self.violation = Violation(str(what) if isinstance(what, str) else f"{type(what).__name__}: {what}")
            if isinstance(what, BaseException):
                self.violation.__cause__ = what
            self.note("world", "violation", str(self.violation))

    def later(self, mean_s: float, call: Callable[..., object], *arguments: object) -> Event:
        """Let something happen after a delay of ``mean_s`` on average, drawn as ``delay`` does."""
        moment = self.now
        if mean_s > 0:
            moment -= log(1.0 - self._draw()) / (1.0 / mean_s)
        event = Event((moment, next(self._order), call, arguments))
        heappush(self._agenda, event)
        return event

    def note(self, who: str, what: str, *about: object) -> None:
        """Record one line of what happened, if recording is on."""
        if self.recording:
            told = " ".join(str(part) for part in about)
            self.record.append(f"{self.now:.9f} {who} {what} {told}".rstrip())

    def happens(self, probability: float) -> bool:
        """Draw whether something happens."""
        return self._draw() < probability

    def delay(self, mean_s: float) -> float:
        """Draw a delay: most are short, a few are long."""
        return -log(1.0 - self._draw()) / (1.0 / mean_s) if mean_s > 0 else 0.0
