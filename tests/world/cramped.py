"""A victim that does it to itself: more to offer than its lease table takes."""

import asyncio
import time
from contextlib import asynccontextmanager

from .engine import RIGHT, engine
from .victims import KINDS, OFFERED, PATIENCE_S, Victim

LEASE_SLOTS = 4
"""Leases at once, of whoever has too few."""
TINY_LEASE_S = 1.0
BURST = 12


class Cramped(Victim):
    """A producer with fewer lease slots than it has requests to offer."""

    def __init__(self, chaos, name, faults):
        super().__init__(chaos, name, faults)
        self.node = None

    @asynccontextmanager
    async def living(self):
        self.node = self.chaos.start(self.name)
        await self.node.open(engine, self.name, num_offered=OFFERED, lease_s=TINY_LEASE_S, lease_slots=LEASE_SLOTS)
        yield self

    async def suffer(self, fault, rng):
        """Offer more than there is room for, some to wait and some not; pull some, leave some, revoke some."""
        row = self.chaos.record.row(self.name, fault.name)
        row.times += 1
        async with asyncio.TaskGroup() as offers:
            for _ in range(BURST):
                fate = rng.choice(["pulled", "left", "revoked"])
                offers.create_task(self._one(row, fate, rng.randint(1, 8), rng.choice([0.0, PATIENCE_S])))
        for end in set(row.ends) - fault.ends:
            self.chaos.record.complain(f"{self.name}: a pull ended with {end}")
        over_s = time.monotonic()
        await self.recover()
        row.recovery_s = max(row.recovery_s, time.monotonic() - over_s)

    async def _one(self, row, fate, num_blocks, patience_s):
        number, successor = self.chaos.numbers.take(), self.chaos.numbers.take()
        computing = not patience_s
        params = await self.node.offer(number, successor, num_blocks, patience_s=patience_s, computing=computing)
        if isinstance(params, str):
            row.ends[params] += 1
        elif fate == "left":
            row.ends["never pulled"] += 1
        else:
            kind = KINDS[computing]
            pull = asyncio.create_task(self.chaos.pulled(self.chaos.survivor, number, params, num_blocks, kind))
            if fate == "revoked":
                await self.node.revoke(number)
            row.ends[await pull] += 1

    async def attempt(self):
        """Use every slot at once."""
        ends = await asyncio.gather(*(self.chaos.moves(self.node, self.chaos.survivor) for _ in range(LEASE_SLOTS)))
        return RIGHT if set(ends) == {RIGHT} else "not all"
