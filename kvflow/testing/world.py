"""Virtual time: everything that is going to happen, in one order, drawn from one seed.

Nothing in a world waits, and nothing in it reads a real clock. Two runs of one seed are therefore the same run, and a
minute of a world lasts as long as its events take to compute.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count

STEPS_MAX = 300_000
"""Events of one world. A healthy scenario needs some thousands; whoever needs this many goes round in circles."""


class Violation(Exception):
    """A promise was broken: what a checker found, in words."""


class Event:
    """Something that is going to happen, unless it is cancelled."""

    __slots__ = ("arguments", "call", "cancelled")

    def __init__(self, call: Callable[..., object], arguments: tuple[object, ...]) -> None:
        self.call = call
        self.arguments = arguments
        self.cancelled = False

    def cancel(self) -> None:
        """Let it not happen."""
        self.cancelled = True


class World:
    """Virtual time, chance, the record of what happened, and the first promise that was broken.

    Attributes:
        now: seconds since the world began.
        chance: the only source of random numbers.
        record: one line per event, if it is kept.
        violation: the first, or None.
        over: whether the scenario has ended, so that nothing is a violation any more.

    Args:
        seed: of all chance.
        recording: whether ``note`` keeps its lines; it changes nothing else.
    """

    def __init__(self, seed: int, *, recording: bool = False) -> None:
        self.now = 0.0
        self.chance = random.Random(seed)  # noqa: S311 - replayable by intent
        self.recording = recording
        self.record: list[str] = []
        self.violation: Violation | None = None
        self.over = False
        self._agenda: list[tuple[float, int, Event]] = []
        self._order = count()
        self._steps = 0

    def after(self, delay_s: float, call: Callable[..., object], *arguments: object) -> Event:
        """Let something happen ``delay_s`` from now; things of one moment happen in the order of these calls."""
        return self.at(self.now + delay_s, call, *arguments)

    def at(self, moment: float, call: Callable[..., object], *arguments: object) -> Event:
        """Let something happen at a moment, or now if that has passed."""
        event = Event(call, arguments)
        heapq.heappush(self._agenda, (max(self.now, moment), next(self._order), event))
        return event

    def run(self, until: Callable[[], bool], deadline_s: float) -> bool:
        """Let time pass until something holds; False if a promise was broken, or it did not hold in time."""
        while self.violation is None:
            if until():
                return True
            if not self._agenda or self._agenda[0][0] > deadline_s:
                self.now = max(self.now, min(deadline_s, self._agenda[0][0]) if self._agenda else self.now)
                return False
            self.now, _, event = heapq.heappop(self._agenda)
            if not event.cancelled:
                self._steps += 1
                if self._steps > STEPS_MAX:
                    self.fail(f"{STEPS_MAX} events, and no end: something goes round in circles")
                event.call(*event.arguments)
        return False

    def fail(self, what: str | BaseException) -> None:
        """Note that a promise was broken; the first one stops the world."""
        if self.violation is None and not self.over:
            self.violation = Violation(str(what) if isinstance(what, str) else f"{type(what).__name__}: {what}")
            if isinstance(what, BaseException):
                self.violation.__cause__ = what
            self.note("world", "violation", str(self.violation))

    def note(self, who: str, what: str, *about: object) -> None:
        """Keep one line of what happened, if anybody wants to read it."""
        if self.recording:
            told = " ".join(str(part) for part in about)
            self.record.append(f"{self.now:.9f} {who} {what} {told}".rstrip())

    def happens(self, probability: float) -> bool:
        """Draw whether something happens."""
        return self.chance.random() < probability

    def delay(self, mean_s: float) -> float:
        """Draw a delay: most are short, a few are long."""
        return self.chance.expovariate(1.0 / mean_s) if mean_s > 0 else 0.0
