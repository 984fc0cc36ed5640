"""Those that are harmed, each with the pulls that are under way meanwhile, and how it is seen to be well again."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from tests.ports import free_port

from .engine import BLOCKS_MAX, RIGHT, engine
from .node import Node, NodeDied
from .proxy import proxy

LOAD = 4
"""Pulls that are under way when harm is done; half of them begin before."""
KINDS = ("computed", "computing", "sought")
"""Of offers: made when all is computed; made before, and followed; or likewise, and found by who asked before."""
FEW = 2
"""Blocks of the pull that shows that all is well again."""
OFFERED = 512
PATIENCE_S = 60.0
RETRY_S = 0.02
BRIEF_LEASE_S = 4.0
"""Of those whose readers die: what they have not released is free again after that."""


class Numbers:
    """Numbers of requests and marks; none twice in a run."""

    def __init__(self):
        self._last = 0

    def take(self):
        self._last += 1
        return self._last


class Chaos:
    """What all victims share.

    Attributes:
        survivor: engine that pulls, in this process; nobody harms it.
        encrypted_survivor: the same of a cluster whose TCP data plane is encrypted.
        numbers: see ``Numbers``.
        record: what happens.
        folder: for what processes say last.
    """

    def __init__(self, survivor, encrypted_survivor, numbers, record, folder):
        self.survivor = survivor
        self.encrypted_survivor = encrypted_survivor
        self.numbers = numbers
        self.record = record
        self.folder = folder
        self.nodes = []

    def start(self, name, **options):
        """Start a process; it ends with the run."""
        words = self.folder / f"{name.replace(' ', '-')}-{len(self.nodes)}.txt"
        words.touch()
        self.nodes.append(Node(name, words=words, **options))
        return self.nodes[-1]

    async def restarted(self, node, name, *, namespace="", **settings):
        """Start an engine in a process of its own; anew, and end the old process, if there is one."""
        if node is not None:
            self.end(node)
        started = self.start(name, namespace=namespace)
        await started.open(engine, name, **settings)
        return started

    def end(self, node):
        """End a process, and forget it."""
        self.nodes.remove(node)
        node.go()

    def kill(self, node):
        """End a process without a word, and forget it."""
        self.nodes.remove(node)
        node.end()

    def end_all(self):
        """End all processes."""
        for node in list(self.nodes):
            self.end(node)

    async def moves(self, producer, consumer, kind="computed", *, endpoint=None):
        """Offer and pull once; return how that ended. ``endpoint``: where content is sought, if not at its own."""
        number = self.numbers.take()
        if kind == "sought":
            return await self.sought(producer, endpoint or producer.endpoint, consumer, number, FEW)
        params = await producer.offer(number, self.numbers.take(), FEW, computing=kind == "computing")
        if isinstance(params, str):
            return params
        return await self.pulled(consumer, number, params, FEW, kind)

    async def moves_all(self, producer, consumer, *, endpoint=None):
        """Offer and pull once for each kind; return how the first ended that was not right."""
        ends = [await self.moves(producer, consumer, kind, endpoint=endpoint) for kind in KINDS]
        return next((end for end in ends if end != RIGHT), RIGHT)

    async def sought(self, producer, endpoint, consumer, number, num_blocks):
        """Ask for a request, have it offered meanwhile, and follow it; return how that ended."""
        asking = asyncio.create_task(self.pulled(consumer, number, endpoint, num_blocks, "sought"))
        with suppress(NodeDied):  # who asks hears of it
            await producer.offer(number, self.numbers.take(), num_blocks, computing=True)
        return await asking

    async def pulled(self, consumer, number, params, num_blocks, kind="computed"):
        """Pull; complain of a wrong byte; return how it ended."""
        end, wrong = await consumer.pull(number, self.numbers.take(), params, num_blocks)
        self.record.kinds[kind][end] += 1
        for text in wrong:
            self.record.complain(f"wrong byte: {text}")
        return end


class Victim:
    """One that is harmed.

    Args:
        chaos: what all share.
        name: of it.
        faults: that are done to it.
    """

    def __init__(self, chaos, name, faults):
        self.chaos = chaos
        self.name = name
        self.faults = faults

    async def suffer(self, fault, rng):
        """Do harm once while there is load, and wait until all is well."""
        row = self.chaos.record.row(self.name, fault.name)
        row.times += 1
        offers = await self._offers([(rng.randint(1, BLOCKS_MAX), rng.choice(KINDS)) for _ in range(LOAD)])
        pulls = [asyncio.create_task(self._pull(*offer)) for offer in offers[: LOAD // 2]]
        await asyncio.sleep(rng.choice([0, 0.001, 0.003, 0.01, 0.03]))  # a moment of the reads, by chance
        async with fault.strike(self, rng):
            pulls += [asyncio.create_task(self._pull(*offer)) for offer in offers[LOAD // 2 :]]
            await asyncio.sleep(rng.uniform(0, 0.1))
        over_s = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self.recover()
                row.recovery_s = max(row.recovery_s, time.monotonic() - over_s)
                ends = await asyncio.gather(*pulls)
        except TimeoutError:
            self.chaos.record.complain(f"{self.name}: not well again {PATIENCE_S:.0f} s after it was {fault.name}")
            for pull in pulls:
                pull.cancel()
            return
        row.ends.update(ends)
        for end in set(ends) - fault.ends - {"died"}:
            self.chaos.record.complain(f"{self.name}: a pull ended with {end} because it was {fault.name}")

    async def _offers(self, sizes_and_kinds):
        """Offer what is pulled during the harm."""
        while True:
            try:
                return [await self._offer(*each) for each in sizes_and_kinds]
            except NodeDied:  # of what was done before
                await self.recover()

    async def _offer(self, num_blocks, kind):
        source, _ = self.pair()
        number, params = self.chaos.numbers.take(), None
        if kind != "sought":
            successor = self.chaos.numbers.take()
            params = await source.offer(number, successor, num_blocks, computing=kind == "computing")
        return number, params, num_blocks, kind

    async def _pull(self, number, params, num_blocks, kind):
        source, reader = self.pair()
        try:
            if kind == "sought":
                return await self.chaos.sought(source, self.endpoint(), reader, number, num_blocks)
            return await self.chaos.pulled(reader, number, params, num_blocks, kind)
        except NodeDied:
            return "died"

    def endpoint(self):
        """Return where questions for content go."""
        source, _ = self.pair()
        return source.endpoint

    def pair(self):
        """Return who is read from and who reads, as they are now: either may have been started anew."""
        raise NotImplementedError

    async def recover(self):
        """Wait until a new pull succeeds."""
        while (end := await self.attempt()) != RIGHT:
            assert end != "wrong"
            await asyncio.sleep(RETRY_S)

    async def attempt(self):
        """Try new pulls, one of each kind; who has died is started again."""
        producer, reader = self.pair()
        try:
            return await self.chaos.moves_all(producer, reader, endpoint=self.endpoint())
        except NodeDied as died:
            await self.crashed(died.node)
            await self.restart_one(died.node)
            return "died"

    async def restart_one(self, _node):
        """Start a process again that has died."""
        await self.restart()

    async def crashed(self, node):
        """Complain of a process that nobody has killed, and that has ended."""
        await asyncio.to_thread(node.process.wait, PATIENCE_S)
        self.chaos.record.complain(f"{node.name} crashed, signal {node.crashed()}: {node.last_words()}")


class DoomedProducer(Victim):
    """A producer that is harmed while a survivor reads from it.

    Args:
        chaos: what all share.
        name: of it.
        faults: that are done to it.
        proxied: which of its addresses is a proxy's: ``advertise`` or ``tcp_advertise``; none if empty.
        reader: the survivor; the one that all share if None.
        settings: of its worker.
    """

    def __init__(self, chaos, name, faults, *, proxied="", reader=None, **settings):
        super().__init__(chaos, name, faults)
        self._settings = {"bind": "tcp://127.0.0.1:0", **settings}
        self._ticket = self._outlived = None
        self._proxied = proxied
        self._reader = reader or chaos.survivor
        self.node = None
        self.proxy = None

    @asynccontextmanager
    async def living(self):
        """Start it."""
        async with AsyncExitStack() as life:
            if self._proxied:
                port = free_port()
                self.proxy = await life.enter_async_context(proxy(port))
                bound = self._proxied.replace("advertise", "bind")
                self._settings |= {bound: f"tcp://127.0.0.1:{port}", self._proxied: self.proxy.endpoint}
            await self.restart()
            if self._proxied != "advertise":
                self._settings["bind"] = self.node.endpoint
            yield self

    async def restart(self):
        """Start it again, at the same address; a ticket of its earlier life remains."""
        if self.node is not None:
            self._outlived, self._ticket = self._ticket, None
        how = {"num_offered": OFFERED, "lease_s": BRIEF_LEASE_S, **self._settings}
        self.node = await self.chaos.restarted(self.node, self.name, **how)

    def pair(self):
        return self.node, self._reader

    def endpoint(self):
        return self.proxy.endpoint if self._proxied == "advertise" else self.node.endpoint

    async def recover(self):
        await super().recover()
        if self._outlived is not None:
            end = await self.chaos.pulled(self._reader, *self._outlived)
            self._outlived = None
            if end != "stale_lease":
                self.chaos.record.complain(f"{self.name}: a ticket of an earlier life ended with {end}")
        self._ticket = await self.unread_ticket()

    async def unread_ticket(self):
        """Offer what nobody reads; return number, ticket and blocks."""
        number = self.chaos.numbers.take()
        return number, await self.node.offer(number, self.chaos.numbers.take(), FEW), FEW


class DoomedReader(Victim):
    """A consumer that is harmed while it reads from a producer that must survive."""

    def __init__(self, chaos, name, faults, producer):
        super().__init__(chaos, name, faults)
        self._producer = producer
        self.node = None

    @asynccontextmanager
    async def living(self):
        await self.restart()
        yield self

    async def restart(self):
        self.node = await self.chaos.restarted(self.node, self.name, num_slots=2 * LOAD, follow_bytes_min=1)

    async def restart_one(self, node):
        await (self._producer if node is self._producer.node else self).restart()

    def pair(self):
        return self._producer.node, self.node


class Served:
    """A producer whose readers are harmed.

    Attributes:
        name: of it.
        node: its process.
    """

    def __init__(self, chaos, name, *, lease_s=BRIEF_LEASE_S, **settings):
        self._chaos = chaos
        self.name = name
        self._settings = {"lease_s": lease_s, **settings}
        self.node = None

    async def restart(self):
        """Start it, or start it anew."""
        self.node = await self._chaos.restarted(self.node, self.name, num_offered=OFFERED, **self._settings)
