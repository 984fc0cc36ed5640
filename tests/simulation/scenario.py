"""One scenario: engines, requests and faults from one seed; then peace, and everything must come to its end."""

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from tests.fakes.fabric import Fabric, Serves
from tests.fakes.models import NUM_BLOCKS, SHAPES
from tests.fakes.network import Wires
from tests.fakes.process import bury
from tests.fakes.world import World
from tests.simulation.engines import Engine, Setting
from tests.simulation.faults import Faults, Mischief, draw_calm, draw_faults, draw_settings, is_slow, pull_s_max
from tests.simulation.requests import Plan, Request

REQUESTS_MIN = 50
REQUESTS_MAX = 60

PEACE_S = 60.0
"""Virtual seconds that everything may take to end once nothing goes wrong: the longest silence that a connection bears
is half of it."""

CALM_SHARE = 0.2
"""Of the scenarios: what should not have ended as it did is seen best where nothing else goes wrong."""

SERVES: tuple[Serves, ...] = ("nothing", "nothing", "reads", "reads and fences")
"""What exporters do themselves; one of these is drawn."""

SLOWNESS = 400
"""How many pieces of a read one request is given, about."""

KEPT_LEASES = 1.5
"""For how many leases a ticket is kept, on average."""

KEEPING_SHARE = 0.25
"""Of the scenarios: those whose engines keep some of what they have computed, as readable as an offer."""

OPENING_SHARE = 0.3
"""Of the scenarios: those whose engines offer some of their requests before they have computed them."""

STUCK_SHARE = 0.05
"""Of these requests: those that are never computed to their end."""

ERRING_SHARE = 0.1
"""Of these requests: those of which their engine also says what is false."""

PROBE_S = 1.0
"""Virtual seconds between two attempts to be served again."""


class Outcome(Struct, frozen=True, kw_only=True):
    """How a scenario went.

    Attributes:
        seed: of all chance.
        violation: the first promise that was broken, in words; empty if none was.
        requests: how many there were.
        outcomes: how their pulls ended, and how often.
        virtual_s: how long it took, on its own clock.
        record: every event, line by line, if it was kept.
    """

    seed: int
    violation: str
    requests: int
    outcomes: dict[str, int]
    virtual_s: float
    record: tuple[str, ...] = ()


def simulate(seed: int, *, calm: bool = False, recording: bool = False) -> Outcome:
    """Run one scenario.

    Args:
        seed: decides everything: the same seed is the same run, event by event.
        calm: let nothing go wrong but what callers do, as in one of five scenarios anyhow: then every pull must be
            delivered whose caller wants it.
        recording: keep a record of every event.
    """
    world = World(seed, recording=recording)
    with _heard_errors(world):
        calm = world.happens(CALM_SHARE) or calm
        faults = draw_calm(world) if calm else draw_faults(world)
        # Of chance of its own, so that the rest of a scenario is the same with every kind of exporter.
        serves: Serves = random.Random(f"serves {seed}").choice(SERVES)
        # Likewise.
        keeping, opening = random.Random(f"keeps {seed}"), random.Random(f"opens {seed}")
        return Scenario(
            world,
            faults,
            serves,
            keeping if keeping.random() < KEEPING_SHARE else None,
            opening if opening.random() < OPENING_SHARE else None,
        ).run(seed)


class Scenario:
    """Engines, their requests, and what goes wrong."""

    def __init__(
        self,
        world: World,
        faults: Faults,
        serves: Serves,
        keeping: random.Random | None,
        opening: random.Random | None,
    ) -> None:
        chance = world.chance
        self._world = world
        self._faults = faults
        wires = Wires(world, faults.network)
        self._fabric = Fabric(world, wires, faults.fabric, serves)
        settings = draw_settings(world, faults)
        setting = Setting(
            world,
            self._fabric,
            settings,
            faults.calm,
            faults.skew_s,
            faults.hang_up_s,
            pull_s_max(settings, faults) + settings.compute_s * (opening is not None),
            count(1),
            count(1),
        )
        if not faults.calm and is_slow(settings, faults):
            wires.troubles.note("slow")
        model = chance.choice(sorted({shape.model for shape in SHAPES}))
        shapes = [shape for shape in SHAPES if shape.model == model]
        engines = [
            Engine(
                setting,
                f"engine{number}",
                number,
                shape=chance.choice(shapes),
                minted=chance.random() < 0.5,
                threaded=chance.random() < 0.5,
                staged=chance.random() < 0.5,
            )
            for number in range(chance.randint(2, 3))
        ]
        self._mischief = Mischief(world, self._fabric, faults, engines)
        self._requests: list[Request] = []
        self._open: list[Request] = []
        # As many requests for blocks as there are, whether reads are fast or last for several leases.
        self._duration_s = chance.uniform(0.3, 1.5) * (1.0 + SLOWNESS * faults.fabric.piece_s * faults.calm)
        self._total = chance.randint(REQUESTS_MIN, REQUESTS_MAX)
        self._numbers = count()
        self._keeping, self._opening = keeping, opening
        self._lease_s = settings.lease_s

    @property
    def engines(self) -> list[Engine]:
        """The engines as they are now."""
        return self._mischief.engines

    def run(self, seed: int) -> Outcome:
        """Let everything happen; see that it ends, that the world is well afterwards, and that nothing is left."""
        world = self._world
        if self._await("the engines are open", self._all_open):
            self._mischief.plan(self._duration_s)
            for _ in range(self._total):
                world.after(world.chance.uniform(0.0, self._duration_s), self._submit)
            world.run(lambda: len(self._requests) == self._total, world.now + 2 * self._duration_s)
            self._mischief.end()
            self._await("the engines are open again", self._all_open)
            if any(engine.hung for engine in self.engines):
                self._await("all is done that a host that hangs does not keep", self._all_idle)
                self._mischief.replace_hung()
                self._await("what has hung is open again", self._all_open)
            self._await("every request has ended", self._all_ended)
            self._probe()
            self._close()
        outcomes = Counter(outcome for request in self._requests for outcome in request.outcomes)
        violation, virtual_s = str(world.violation or ""), world.now
        for engine in [*self._mischief.gone, *self.engines]:
            engine.alive = False
        bury(world)
        return Outcome(
            seed=seed,
            violation=violation,
            requests=len(self._requests),
            outcomes=dict(sorted(outcomes.items())),
            virtual_s=virtual_s,
            record=tuple(world.record),
        )

    def _await(self, what: str, holds: Callable[[], bool]) -> bool:
        """Let time pass until something holds, which it must within ``PEACE_S``."""
        world = self._world
        if world.violation is None and not world.run(holds, world.now + PEACE_S) and world.violation is None:
            open_requests = [request.name for request in self._requests if not request.ended]
            world.fail(f"{PEACE_S} s of peace, and it does not hold that {what}; open: {open_requests[:5]}")
        return world.violation is None

    def _all_open(self) -> bool:
        return all(engine.open or engine.hung for engine in self.engines)

    def _all_idle(self) -> bool:
        """Tell whether every request has ended as far as it can while a host hangs."""
        return all(request.idle() for request in self._open)

    def _all_ended(self) -> bool:
        """Tell whether every request has ended: one that has does not begin again."""
        while self._open and self._open[-1].ended:
            self._open.pop()
        return not self._open

    def _submit(self, plan: Plan | None = None, source: int | None = None) -> Request:
        chance = self._world.chance
        number = chance.randrange(len(self.engines)) if source is None else source
        request = Request(
            self._world,
            f"request{next(self._numbers)}",
            plan or self._opened(self._kept(self._draw_plan(number))),
            self.engines[number],
            self.engines.__getitem__,
        )
        self._requests.append(request)
        self._open.append(request)
        self._world.note(request.name, "begins", request.source.name, request.source.life, request.plan.num_tokens)
        request.begin()
        return request

    def _kept(self, plan: Plan) -> Plan:
        """Let the engine keep a third of what it has computed for a while, if engines keep something here."""
        chance = self._keeping
        if chance is None or chance.random() < 2 / 3:
            return plan
        sought, revoke_s = chance.random() < 0.5, chance.uniform(0.0, self._lease_s)
        plan = replace(plan, keeps=True, abandoned=False, patience_s=0.0, revoke_s=revoke_s, sought=sought)
        return replace(plan, forged=False) if sought else plan

    def _opened(self, plan: Plan) -> Plan:
        """Let the engine offer a third of the rest before it is computed, if engines do that here."""
        chance = self._opening
        if chance is None or plan.keeps or chance.random() < 2 / 3:
            return plan
        part_s, sought = chance.choice((1e-3, 5e-3, 20e-3)), chance.random() < 0.5
        if chance.random() < 0.3:
            plan = replace(plan, revoke_s=chance.uniform(0.0, 5 * part_s))
        stuck, errs = chance.random() < STUCK_SHARE, chance.random() < ERRING_SHARE
        plan = replace(plan, part_s=part_s, repeated=False, patience_s=0.0, abandoned=False, sought=sought)
        plan = replace(plan, stuck=stuck, errs=errs)
        # What is given back unread is found again.
        found = replace(plan, forged=False, readers=plan.readers[:1], readings=2 if plan.unread else 1)
        return found if sought else plan

    def _draw_plan(self, source: int) -> Plan:
        world, chance, faults = self._world, self._world.chance, self._faults
        others = [number for number in range(len(self.engines)) if number != source]
        # When a caller thinks better of it: while it reads, however long that is.
        soon_s = 20e-3 + 10 * faults.fabric.piece_s
        return Plan(
            num_tokens=chance.randint(1, 48),
            admit_s=1e-3,
            prefix_of=chance.choice(self._requests[-8:]) if self._requests and chance.random() < 0.3 else None,
            repeated=chance.random() < 0.1,
            readers=tuple(chance.sample(others, 2 if len(others) > 1 and chance.random() < 0.15 else 1)),
            readings=chance.randint(2, 3) if chance.random() < 0.15 else 1,
            route_s=world.delay(5e-3),
            skipped=chance.randint(0, 3) if chance.random() < 0.3 else 0,
            priority=chance.randint(-1, 2),
            patience_s=world.delay(0.2) if chance.random() < 0.7 else 0.0,
            abandoned=chance.random() < 0.5,
            kept_s=world.delay(KEPT_LEASES * self._lease_s) if chance.random() < 0.15 else 0.0,
            cancel_s=world.delay(soon_s) if world.happens(faults.cancelled) else None,
            revoke_s=world.delay(soon_s) if world.happens(faults.revoked) else None,
            forged=world.happens(faults.forged),
            unread=chance.random() < 0.05,
            occupied=chance.random() < 0.05,
            keep_s=5e-3,
        )

    def _probe(self) -> None:
        """See that every engine can be read by another one now."""
        for number in range(len(self.engines)):
            reader = (number + 1) % len(self.engines)
            plan = Plan(num_tokens=9, admit_s=0.0, readers=(reader,), route_s=1e-3, keep_s=1e-3)
            until_s = self._world.now + PEACE_S
            while self._world.violation is None:  # what is known of earlier lives may have to be forgotten first
                request = self._submit(plan, number)
                self._await(f"{request.name} has ended", partial(_ended, request))
                if set(request.outcomes) == {"completed"}:
                    break
                if self._world.now > until_s:
                    self._world.fail(f"nothing goes wrong any more, and {request.name} ended with {request.outcomes}")
                self._world.run(lambda: False, self._world.now + PROBE_S)

    def _close(self) -> None:
        """Close every engine, and see that nothing is left."""
        if self._world.violation is not None:
            return
        for engine in self.engines:
            if engine.unclaimed() != NUM_BLOCKS:
                self._world.fail(f"{engine.name} has {engine.unclaimed()} free blocks of {NUM_BLOCKS}")
            self._world.after(self._world.delay(0.1), engine.leave, PROBE_S if self._world.happens(0.5) else 0.0)
        self._await("the engines are closed", lambda: all(rank.left for each in self.engines for rank in each.ranks))
        if left := self._fabric.in_flight():
            self._world.fail(f"every engine is closed, and {left} reads are in flight")


def _ended(request: Request) -> bool:
    return request.ended


class _Errors(logging.Handler):
    """Takes an error in the log for a broken promise: kvflow logs one only for a defect of its own."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if self._world.violation is None:
            self._world.fail(f"logged: {record.getMessage()}{f': {error!r}' if error else ''}")


@contextmanager
def _heard_errors(world: World) -> Iterator[None]:
    """Listen to the loggers of the library, and keep everything below an error from being made at all."""
    handler = _Errors(world)
    loggers = [logging.getLogger(name) for name in ("kvflow", "handshake")]
    before = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, before, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
