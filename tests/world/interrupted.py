"""Producers whose readers leave, die, hang or are cut off in the middle of a large pull: they must survive it.

Each time a new reader begins the pull, and something happens to it while the producer runs, or stands still. Then the
producer must live, serve an honest reader the right bytes, hold no lease, file descriptor or thread of the old one, and
in the end leave in order.
"""

import asyncio
import signal
import time
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from kvflow.errors import StaleLease
from tests.stopping import state_of

from .engine import HELD, RIGHT, engine
from .faults import LOST, Fault
from .network import wired
from .node import NodeDied, NodeFailed
from .victims import FEW, OFFERED, Victim
from .wire import DEVICE, address

HANG_S = 2.0
CUT_S = 5.0
"""Longer than the reader waits for bytes."""
PAUSES_S = (0.2, 5.0, 60.0)
"""Of a producer that stands still; the last is longer than connections without another end live."""
LEASE_S = 8.0
PATIENT = {"connect_s": 20.0, "handshake_s": 30.0, "wire_s": 60.0, "fence_s": 60.0}
"""Settings of honest readers: many processes share few cores."""
IMPATIENT = {**PATIENT, "wire_s": 3.0}
"""Settings of a reader that is cut off."""
PATIENCE_S = 60.0
"""For what must come about."""
SILENCE_S = 60.0
"""For file descriptors; connections whose other end is gone are given up after 27 s."""
FILES_SPARE = 1
"""Over NIXL: a socket that UCX may keep of a reader that is gone, for more than a minute. Over TCP: the second
connection of the honest reader, which opens it only when the first is busy."""
SHAPE = {"heads": 8, "head_size": 128}
"""Of caches: 128 KiB for each block of a group."""
MISSES_MAX = 5
DEATH_S = 2.0
"""From the last word of a process to its end."""
LOOK_S = 0.05
ATTEMPTS = 3
"""Offers to an honest reader that is not given the machine in time."""
MISSED = "too early"
"""The pull was over before anything has happened."""

HAPPENS = ("closes", "killed", "hangs", "cut")
"""To the reader: it leaves; gets SIGKILL; is stopped for a while, then leaves; or no packet arrives, either way."""


class WrongError(Exception):
    """Something that must not be."""


def interrupting(happens, pause_s):
    """Return the fault of this happening to a reader, while the producer stands still for so long."""
    ends = LOST | {"killed", "cancelled", "deadline_exceeded", "worker_closed", "transfer_cancelled", MISSED}
    name = f"{happens}, producer stopped {pause_s:g} s" if pause_s else happens
    strike = partial(Interrupted.interrupt, happens=happens, pause_s=pause_s)
    return Fault(name=name, strike=strike, ends=ends, brief=pause_s < 1.0)


class Interrupted(Victim):
    """A producer, an honest reader, and one reader after the other to which something happens.

    Args:
        chaos: what all share.
        name: of it.
        mib: of the large pull.
        is_cut: whether readers are cut off, and live beyond a wire; else all else happens to them.
        settings: of all workers.
    """

    def __init__(self, chaos, name, mib, *, is_cut=False, **settings):
        happens = HAPPENS[3:] if is_cut else HAPPENS[:3]
        faults = [interrupting(each, pause_s) for each in happens for pause_s in (0.0, *PAUSES_S)]
        super().__init__(chaos, name, faults)
        self._num_blocks = mib * 4
        self._is_cut = is_cut
        self._settings = settings
        self._wire = self._honest = self.node = None

    @asynccontextmanager
    async def living(self):
        async with AsyncExitStack() as life:
            if self._is_cut:
                self._wire = await life.enter_async_context(wired(self.name))
            await self.restart()
            yield self
            self.chaos.end(self.node)
            if status := self.node.process.poll():
                self.chaos.record.complain(f"{self.name}: the producer has left with status {status}")

    async def restart(self):
        """Start both again."""
        for node in (self.node, self._honest):
            if node is not None:
                self.chaos.kill(node)
        self.node, self._honest = self._start("producer", 0), self._start("honest reader", 1)
        bind = {"bind": f"tcp://{address(0)}:0"} if self._wire else {}
        room = {"num_offered": 2 * self._num_blocks + OFFERED, **SHAPE}
        await self.node.open(engine, self.node.name, lease_s=LEASE_S, **room, **self._settings, **bind)

    def _start(self, part, side):
        there = {"namespace": self._wire.namespaces[side], "UCX_NET_DEVICES": DEVICE} if self._wire else {}
        return self.chaos.start(f"{self.name} {part}", **there)

    async def suffer(self, fault, rng):
        """Do harm once, and see that the producer is well afterwards."""
        row = self.chaos.record.row(self.name, fault.name)
        row.times += 1
        try:
            async with asyncio.timeout(PATIENCE_S * len(HAPPENS) + PAUSES_S[-1]):
                for _ in range(MISSES_MAX):
                    end = await fault.strike(self, rng)
                    row.ends[end] += 1
                    if end != MISSED:
                        break
        except (NodeDied, NodeFailed, WrongError, TimeoutError) as error:
            if isinstance(error, NodeDied):
                await asyncio.to_thread(self.node.process.join, DEATH_S)  # if it is the one
            if self.node.lives:
                self.chaos.record.complain(f"{self.name}, {fault.name}: {error!r}")
            else:
                row.ends["aborted"] += 1
                await self.crashed(self.node)
            await self.restart()
        for end in set(row.ends) - fault.ends - {"aborted"}:
            self.chaos.record.complain(f"{self.name}: a pull ended with {end} because its reader {fault.name}")

    async def recover(self):
        """See that an honest reader is served."""
        await self._read()

    async def interrupt(self, rng, *, happens, pause_s):
        """Let something happen to a new reader; return how its pull ended."""
        begun_s = time.monotonic()
        await self._read()
        before = await self.node.at_rest(PATIENCE_S)
        await self._honest.close()
        reader, numbers = self._start("reader", 1), self.chaos.numbers
        try:
            patience = IMPATIENT if happens == "cut" else PATIENT
            room = {"num_slots": 1, "blocks_max": self._num_blocks, **SHAPE}
            await reader.open(engine, reader.name, **room, **patience, **self._settings)
            number, num_blocks = numbers.take(), self._num_blocks
            params = await self.node.offer(number, numbers.take(), num_blocks)
            pull = (number, numbers.take(), params, num_blocks)
            end = await self._disturb(reader, pull, happens, pause_s, is_cut_longer=rng.random() < 0.5)
        finally:
            self.node.resume()
            self.chaos.kill(reader)
        await self._read()
        audit = await self.node.at_rest(LEASE_S + PATIENCE_S)
        if held := {name: audit[name] for name in HELD if audit[name]}:
            raise WrongError(f"it still holds {held}")
        await self._return_to(before)
        row = self.chaos.record.row(self.name, f"{happens}, producer stopped {pause_s:g} s" if pause_s else happens)
        row.recovery_s = max(row.recovery_s, time.monotonic() - begun_s - pause_s)
        return end

    async def _read(self):
        """Check that an honest reader with a new worker gets the right bytes."""
        room = {"num_slots": 1, "blocks_max": FEW, **SHAPE}
        await self._honest.open(engine, self._honest.name, **room, **PATIENT, **self._settings)
        for _ in range(ATTEMPTS):
            end = await self.chaos.moves(self.node, self._honest)
            if end != StaleLease.code:  # of a reader that was not given the machine in time
                break
        carriers = await self._honest.carriers()
        if end != RIGHT or (carriers == ["tcp"]) != (self._settings.get("transport") == "tcp"):
            raise WrongError(f"an honest reader: {end} over {carriers}")

    async def _disturb(self, reader, pull, happens, pause_s, *, is_cut_longer):
        """Begin the large pull, do to its reader what is to happen, and return how the pull ended."""
        stopped = self.node.pid if pause_s else 0
        begun = asyncio.wrap_future(reader.begin("pull_to_the_middle", *pull, stopped, happens))
        try:
            await self._until(lambda: not stopped or begun.done() or state(stopped) in "TX", "no middle")
            resumed_s = time.monotonic() + pause_s
            if happens == "cut":
                return await self._cut(reader, begun, resumed_s, is_cut_longer)
            if happens == "hangs":
                await self._until(lambda: begun.done() or state(reader.pid) == "T", "no middle")
                await asyncio.sleep(0 if begun.done() else HANG_S)
                reader.resume()
            end = await self._end_of(reader, begun, happens)
            await self._go_on(resumed_s)
            return end
        finally:
            begun.cancel()

    async def _end_of(self, reader, begun, happens):
        """Let a reader leave that has not died; return how its pull ended."""
        try:
            if not await begun:
                return MISSED
            ended = asyncio.wrap_future(reader.begin("finish"))
            await reader.close()
            end, _ = await ended
        except NodeDied:
            await asyncio.to_thread(reader.process.join, DEATH_S)
            if happens != "killed" or reader.process.poll() != -signal.SIGKILL:
                raise
            return "killed"
        return MISSED if end == RIGHT else end

    async def _cut(self, reader, begun, resumed_s, is_cut_longer):
        """Drop all packets for a while; a producer that is stopped goes on after that, or before."""
        if not await begun:
            return MISSED
        self._wire.be(loss=1.0)
        cut_s = time.monotonic()
        steps = [self._reconnect, partial(self._go_on, resumed_s)]
        for step in reversed(steps) if is_cut_longer else steps:
            await step()
        end, ended_s = await reader.finish()
        await reader.close()
        return end if ended_s > cut_s else MISSED

    async def _reconnect(self):
        await asyncio.sleep(CUT_S)
        self._wire.be()

    async def _go_on(self, resumed_s):
        """Resume the producer once it was stopped long enough."""
        await asyncio.sleep(resumed_s - time.monotonic())
        with suppress(ProcessLookupError):  # that it has ended is seen elsewhere
            self.node.resume()

    async def _until(self, reached, otherwise):
        """Poll a condition that no event reports."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            if self.node.crashed() is not None:
                raise NodeDied(self.node)
            if time.monotonic() > deadline_s:
                raise WrongError(otherwise)
            await asyncio.sleep(LOOK_S)

    async def _return_to(self, before):
        """Wait until the producer has no more file descriptors and threads than before."""
        deadline_s = time.monotonic() + SILENCE_S
        while True:
            after = await self.node.audit()
            more = {what: Counter(after[what]) - Counter(before[what]) for what in ("descriptors", "threads")}
            files, threads = (len(after[what]) - len(before[what]) for what in more)
            if files <= FILES_SPARE and threads <= 0:
                return
            if time.monotonic() > deadline_s:
                raise WrongError(f"leak of {files} file descriptors and {threads} threads, among {more}")
            await asyncio.sleep(LOOK_S)


def state(pid):
    """Return the letter of a process's state."""
    return state_of(Path(f"/proc/{pid}"))
