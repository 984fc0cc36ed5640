"""A producer and a reader in network namespaces, with a bad wire between them, and what is done to that."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from .faults import HARMLESS, HUNG, Fault
from .node import environment_of_children
from .victims import BRIEF_LEASE_S, LOAD, OFFERED, PATIENCE_S, Victim
from .wire import address, namespaces

PORT = 5555
PATIENT = {"wire_s": 10.0, "handshake_s": 10.0, "connect_s": 5.0, "quarantine_s_max": 12.0}
"""Settings of the reader: who loses packets is slow and not dead."""


def missing():
    """Say why there can be no namespaces here; empty if there can be."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if shutil.which("ip") is None:
        return "there is no ip (iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return ""


@asynccontextmanager
async def bad(victim, rng):
    """A wire that loses, delays and doubles packets, and has them overtake each other."""
    with victim.wire_being(
        loss=rng.choice([0.001, 0.01, 0.03]), delay_s=rng.uniform(0, 0.01), jitter_s=rng.uniform(0, 0.003), double=0.01
    ):
        yield
        await asyncio.sleep(1.0)


@asynccontextmanager
async def slow(victim, rng):
    with victim.wire_being(delay_s=rng.uniform(0.01, 0.05)):
        yield
        await asyncio.sleep(1.0)


@asynccontextmanager
async def parted(victim, rng):
    """No packet arrives, for less and for more than a read may take."""
    with victim.wire_being(loss=1.0):
        yield
        await asyncio.sleep(rng.choice([0.5, 2.0, 15.0]))


OF_WIRES = (
    Fault(name="packets lost, late, doubled, out of order", strike=bad, ends=HARMLESS | {"stale_lease"}),
    Fault(name="packets late", strike=slow, ends=HARMLESS | {"stale_lease"}),
    Fault(name="parted", strike=parted, ends=HUNG, brief=False),
)


class Wired:
    """Two namespaces, and the wire between them.

    Attributes:
        namespaces: their names.
    """

    def __init__(self, process):
        self._process = process
        self.namespaces = namespaces(process.pid)

    def be(self, **how):
        """Treat packets like this from now on; see ``wire.Wire.be``."""
        self._process.stdin.write(json.dumps(how) + "\n")
        self._process.stdin.flush()


@asynccontextmanager
async def wired(seed):
    """Make a wire; it and its namespaces end with this."""
    process = subprocess.Popen(  # noqa: ASYNC220 - it takes milliseconds
        [sys.executable, "-m", "tests.world.wire", str(seed)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment_of_children(),
    )
    try:
        assert await asyncio.to_thread(process.stdout.readline) == "ready\n", "there is no wire"
        yield Wired(process)
    finally:
        process.stdin.close()
        await asyncio.to_thread(process.wait, PATIENCE_S)
        process.stdout.close()


class Netted(Victim):
    """A pair in namespaces; both bytes and control traffic go over the wire."""

    def __init__(self, chaos, name, seed):
        super().__init__(chaos, name, OF_WIRES)
        self._seed = seed
        self._wire = None
        self._producer = None
        self.node = None

    @asynccontextmanager
    async def living(self):
        async with wired(self._seed) as self._wire:
            await asyncio.gather(self._restart_producer(), self._restart_reader())
            yield self

    @contextmanager
    def wire_being(self, **how):
        """Have the wire be bad for a while."""
        self._wire.be(**how)
        try:
            yield
        finally:
            self._wire.be()

    def pair(self):
        return self._producer, self.node

    async def restart_one(self, node):
        await (self._restart_producer() if node is self._producer else self._restart_reader())

    async def _restart_producer(self):
        how = {"num_offered": OFFERED, "bind": f"tcp://{address(0)}:{PORT}", "lease_s": 2 * BRIEF_LEASE_S}
        self._producer = await self._restarted(self._producer, "far producer", 0, **how)

    async def _restart_reader(self):
        how = {"num_slots": 4 * LOAD, "follow_bytes_min": 1, **PATIENT}
        self.node = await self._restarted(self.node, "far reader", 1, **how)

    def _restarted(self, node, name, side, **how):
        return self.chaos.restarted(node, name, namespace=self._wire.namespaces[side], transport="tcp", **how)
