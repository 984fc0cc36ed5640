"""Draining a worker: nothing new is begun, what has begun is finished, and what is left is reported."""

import asyncio
from collections.abc import Callable

from msgspec import Struct

from kvflow.cache.destinations import Quarantined
from kvflow.clock import Clock
from kvflow.observability.events import WorkerDrained
from kvflow.worker.consumer import Consumer
from kvflow.worker.offers import Offers
from kvflow.worker.producer import LeaseKeeper


class DrainReport(Struct, frozen=True, kw_only=True):
    """What a worker still holds when its draining has ended; closing it now ends all of that.

    Attributes:
        leases: requests whose leases are held: their readers would get ``StaleLease``.
        pulls: requests whose pulls are open or draining: they would be cancelled.
        quarantined: destinations that something may still write into.
        waited_s: seconds that it took.
    """

    leases: tuple[str, ...]
    pulls: tuple[str, ...]
    quarantined: tuple[Quarantined, ...]
    waited_s: float

    @property
    def complete(self) -> bool:
        """Whether nothing is left."""
        return not (self.leases or self.pulls or self.quarantined)


class Drain:
    """Draining of one worker.

    Thread: the event loop.
    """

    def __init__(
        self, keeper: LeaseKeeper, offers: Offers, consumer: Consumer, clock: Clock, report: Callable[[Struct], None]
    ) -> None:
        self._keeper = keeper
        self._offers = offers
        self._consumer = consumer
        self._clock = clock
        self._report = report

    async def run(self, deadline_s: float) -> DrainReport:
        """Begin nothing new, and wait for what has begun. See ``Worker.drain``."""
        started = self._clock()
        self._keeper.drain()
        self._consumer.drain()
        self._offers.serve()  # whoever waits for a slot is refused now
        try:
            async with asyncio.timeout(deadline_s):
                await self._keeper.wait_idle()
                await self._consumer.wait_idle()
        except TimeoutError:
            pass  # the report says what is left
        report = DrainReport(
            leases=self._keeper.requests(),
            pulls=self._consumer.requests(),
            quarantined=tuple(self._consumer.quarantined()),
            waited_s=self._clock() - started,
        )
        self._report(WorkerDrained(len(report.leases), len(report.pulls), len(report.quarantined), report.waited_s))
        return report
