# ruff: noqa: T201 - a script prints what it finds
"""``python -m tests.world.readers``: does a producer survive whatever its readers do? See docs/contributing/faults.md.

A try is a producer and a reader, each a process with a real worker, and one thing that happens to the reader in the
middle of a large pull, while the producer runs or is stopped. Afterwards the producer must live, serve a new reader the
right bytes, hold no lease, file descriptor or thread of the old one, and end in order when it is told to.
"""

import argparse
import asyncio
import json
import os
import shlex
import signal
import sys
import time
import typing
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody loads torch, whose threads spin

import msgspec
from msgspec import Struct

from kvflow.config import WorkerConfig
from kvflow.errors import StaleLease

from .engine import RIGHT
from .network import missing, wired
from .nodes import Node, NodeDied, NodeFailed
from .wire import DEVICE, address

LOG = Path("out/chaos/readers")
SCENARIOS = {
    "closes": "the reader leaves open_worker",
    "killed": "the reader gets SIGKILL",
    "hangs": "the reader is stopped for a while, then leaves open_worker",
    "cut": "no packet arrives for a while, either way; the reader gives up, then leaves open_worker",
}
HANG_S = 2.0
CUT_S = 5.0
"""Longer than the reader waits for bytes."""
LEASE_S = 8.0
PATIENT = {"connect_s": 20.0, "handshake_s": 30.0, "wire_s": 60.0, "fence_s": 60.0}
"""Settings of honest readers: many tries share few cores."""
IMPATIENT = {**PATIENT, "wire_s": 3.0}
"""Settings of a reader that is cut off."""
PATIENCE_S = 60.0
"""For what must come about."""
SILENCE_S = 60.0
"""For file descriptors; connections whose other end is gone are given up after 27 s."""
FILES_SPARE = 1
"""Over NIXL: a socket that UCX may keep of a reader that is gone, for more than a minute. Over TCP: the second
connection of the honest reader, which opens it only when the first is busy."""
TRY_S = 600.0
"""For a whole try, beside its pause."""
LOOK_S = 0.05
MISSES_MAX = 5
BUSY_MAX = 2 * (os.cpu_count() or 1)
"""Tries at the same time that do more than wait."""
DEATH_S = 2.0
"""From the last word of a process to its end."""
LAST_LINES = 4
LARGE, BEFORE, AFTER = 0, range(1, 4), range(4, 7)
"""Numbers of the requests of a try; those of honest readers are for so many attempts."""
SURVIVED, ABORTED, MISSED = "survived", "aborted", "missed"

HEADER = (
    *("reader", "producer", "tries", "survived", "aborted", "otherwise"),
    *("too early", "files left", "over", "pulls", "leases"),
)


class Try(Struct, frozen=True):
    """What is done once."""

    scenario: str
    paused_s: float
    number: int


class Ended(Struct, frozen=True):
    """What came of it.

    Attributes:
        end: ``survived``, ``missed`` if the pull was over too early, or what went wrong.
        detail: what was seen.
        pull: how the large pull ended, if its reader could tell.
        lease: how its lease ended.
        carrier: what carried the bytes of the honest reader, before it.
        more_files: file descriptors that the producer has more than before.
    """

    end: str
    detail: str = ""
    pull: str = ""
    lease: str = ""
    carrier: str = ""
    more_files: int = 0


@dataclass
class Row:
    """All tries of one scenario and pause.

    Attributes:
        missed: tries that were done again, because the pull was over too early.
        ends: how tries ended.
        pulls: how large pulls ended, as far as their readers could tell.
        leases: how their leases ended.
        carriers: what carried the bytes.
        more_files: file descriptors that producers have more than before, of all tries.
        failures: every try that its producer did not survive as it should.
    """

    missed: int = 0
    ends: Counter = field(default_factory=Counter)
    pulls: Counter = field(default_factory=Counter)
    leases: Counter = field(default_factory=Counter)
    carriers: Counter = field(default_factory=Counter)
    more_files: int = 0
    failures: list = field(default_factory=list)


class Wrong(Exception):
    """Something that must not be."""

    def __init__(self, end, detail=""):
        super().__init__(f"{end}: {detail}")
        self.ended = Ended(end, detail)


class Pair:
    """The processes of one try.

    Args:
        one: what is done.
        start: starts a process: its name, and the side of the wire that it is on.
        settings: of all workers.
        mib: of the large pull.
        wire: between them; None if they are not cut off from each other.
        busy: held while the machine is needed.
    """

    def __init__(self, one, start, *, settings, mib, wire, busy):
        self._one = one
        self._wire = wire
        self._busy = busy
        self._mib = mib
        self._settings = settings
        self._producer = start("producer", 0)
        self._reader = start("reader", 1)
        self._honest = start("honest reader", 1)

    async def run(self):
        """Do the try; return its result. The processes may still live."""
        try:
            async with asyncio.timeout(TRY_S + self._one.paused_s):
                return await self._run()
        except (NodeDied, NodeFailed, Wrong, TimeoutError) as error:
            if isinstance(error, NodeDied):
                await asyncio.to_thread(self._producer.process.join, DEATH_S)  # if it is the one
            if (status := self._producer.process.poll()) is not None:
                return Ended(ABORTED if status < 0 else "ended", f"status {status}: {self._last_words()}")
            return error.ended if isinstance(error, Wrong) else Ended("failed", f"{error!r} {self._last_words()}")

    async def _run(self):
        await self._open()
        carrier = await self._read(BEFORE)
        before = await self._producer.ask("level")
        await self._honest.ask("leave")
        params = await self._producer.ask("offer", number=LARGE)
        pull = await self._disturb(params)
        if pull == MISSED:
            self._producer.resume()
            await self._producer.ask("audit")  # that it lives
            return Ended(MISSED)
        await self._read(AFTER)
        async with self._waiting(), asyncio.timeout(LEASE_S + PATIENCE_S):
            lease = await self._producer.ask("ended", number=LARGE)
        if held := await self._producer.ask("audit"):
            raise Wrong("leases held", f"{held} of them")
        async with self._waiting():
            more_files = await self._return_to(before)
        await asyncio.to_thread(self._producer.go)
        if status := self._producer.process.poll():
            raise Wrong("closed badly", f"status {status}: {self._last_words()}")
        return Ended(SURVIVED, pull=pull, lease=lease, carrier=carrier, more_files=more_files)

    async def _open(self):
        bind = {"bind": f"tcp://{address(0)}:0"} if self._wire else {}
        cut = IMPATIENT if self._wire else PATIENT
        large, small = {"mib": self._mib, **self._settings}, {"mib": 0, **self._settings}
        await asyncio.gather(
            self._producer.open_as("producer", lease_s=LEASE_S, **large, **bind),
            self._reader.open_as("reader", **{**cut, **large}),
            self._honest.open_as("reader", **{**PATIENT, **small}),
        )

    async def _read(self, numbers):
        """Check that a new honest reader gets the right bytes; return what carried them."""
        end, why = StaleLease.code, ""
        for number in numbers:
            if end == StaleLease.code:  # of a reader that was not given the machine in time
                params = await self._producer.ask("offer", number=number)
                end, why = await self._honest.ask("read", number=number, params=params)
                await self._producer.ask("ended", number=number)
        if end != RIGHT:
            raise Wrong("honest reader", f"{'before' if numbers is BEFORE else 'after'} it: {end} {why}")
        return why

    async def _disturb(self, params):
        """Begin the large pull, do to its reader what the scenario says, and return how the pull ended."""
        producer = self._producer.process.pid if self._one.paused_s else 0
        arguments = {"params": params, "producer": producer, "happens": self._one.scenario}
        begun = asyncio.create_task(self._reader.ask("begin", **arguments))
        try:
            await self._until(lambda: not producer or begun.done() or state(producer) in "TX", "no middle")
            stopped_s = time.monotonic()
            match self._one.scenario:
                case "cut":
                    return await self._cut(begun, stopped_s)
                case "hangs":
                    await self._until(lambda: begun.done() or state(self._reader.process.pid) == "T", "no middle")
                    await asyncio.sleep(0 if begun.done() else HANG_S)
                    self._reader.resume()
            try:
                if not await begun:
                    return MISSED
                pull, _ = await self._reader.ask("finish")
            except NodeDied:
                await asyncio.to_thread(self._reader.process.join, DEATH_S)
                if self._one.scenario != "killed" or self._reader.process.poll() != -signal.SIGKILL:
                    raise
                pull = "killed"
            await self._go_on(stopped_s)
            return pull
        finally:
            begun.cancel()

    async def _cut(self, begun, stopped_s):
        """Drop all packets for a while; a producer that is stopped goes on after that or before it, in turn."""
        if not await begun:
            return MISSED
        self._wire.be(loss=1.0)
        cut_s = time.monotonic()
        steps = [self._reconnect, partial(self._go_on, stopped_s)]
        for step in steps if self._one.number % 2 else reversed(steps):
            await step()
        pull, ended_s = await self._reader.ask("finish")
        await self._reader.ask("leave")
        return pull if ended_s > cut_s else MISSED

    async def _reconnect(self):
        async with self._waiting():
            await asyncio.sleep(CUT_S)
        self._wire.be()

    async def _go_on(self, stopped_s):
        """Resume the producer once it was stopped long enough."""
        async with self._waiting():
            await asyncio.sleep(stopped_s + self._one.paused_s - time.monotonic())
        with suppress(ProcessLookupError):  # that it has ended is seen elsewhere
            self._producer.resume()

    @asynccontextmanager
    async def _waiting(self):
        """Count this try as waiting meanwhile, so that another one may be busy."""
        self._busy.release()
        try:
            yield
        finally:
            await self._busy.acquire()

    async def _until(self, reached, otherwise):
        """Poll a condition that no event reports."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not reached():
            if self._producer.ended() is not None:
                raise NodeDied(self._producer.name)
            if time.monotonic() > deadline_s:
                raise Wrong(otherwise)
            await asyncio.sleep(LOOK_S)

    async def _return_to(self, before):
        """Wait until the producer has no more file descriptors and threads than before; return how many more it has."""
        deadline_s = time.monotonic() + SILENCE_S
        while True:
            after = await self._producer.ask("level")
            files, threads = (len(now) - len(then) for now, then in zip(after, before, strict=True))
            if files <= FILES_SPARE and threads <= 0:
                return max(files, 0)
            if time.monotonic() > deadline_s:
                new = [
                    sorted((Counter(now) - Counter(then)).elements()) for now, then in zip(after, before, strict=True)
                ]
                raise Wrong("leak", f"{files} file descriptors and {threads} threads, among {new}")
            await asyncio.sleep(LOOK_S)

    def _last_words(self):
        return " | ".join(Path(self._producer.words).read_text().splitlines()[-LAST_LINES:])


def state(pid):
    """Return the letter of a process's state; X if it is gone. Source: proc(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


class Tries:
    """Does tries, many at the same time.

    Args:
        options: of the command line.
        settings: of all workers.
        environment: of all processes.
        folder: for what processes say last.
    """

    def __init__(self, options, settings, environment, folder):
        self._mib = options.mib
        self._settings = settings
        self._environment = environment
        self._folder = folder
        self._parallel = asyncio.Semaphore(options.parallel)
        self._busy = asyncio.Semaphore(BUSY_MAX)

    async def met(self, one):
        """Do one try, again if the pull was over too early; return what came of it, and how often that was so."""
        async with self._parallel, self._busy:
            for misses in range(MISSES_MAX + 1):
                ended = await self._once(one, f"{one.scenario}-{one.paused_s:g}-{one.number}-{misses}")
                if ended.end != MISSED:
                    break
        return ended, misses

    async def _once(self, one, name):
        environment, nodes = dict(self._environment), []

        def start(part, side):
            words = self._folder / f"{name}-{part.replace(' ', '-')}.txt"
            words.write_text("")
            namespace = {"namespace": wire.namespaces[side]} if wire else {}
            nodes.append(Node(f"{part} {name}", words, **namespace, **environment))
            return nodes[-1]

        async with AsyncExitStack() as life:
            wire = None
            if one.scenario == "cut":
                wire = await life.enter_async_context(wired(one.number))
                environment["UCX_NET_DEVICES"] = DEVICE
            try:
                ended = await Pair(one, start, settings=self._settings, mib=self._mib, wire=wire, busy=self._busy).run()
            finally:
                for node in nodes:
                    await asyncio.to_thread(node.end)
        if ended.end in (SURVIVED, MISSED):
            for node in nodes:
                node.words.unlink()
        return ended


async def run(options, settings, environment, folder, tell=print):
    """Do all tries; return a row for each scenario and pause, and every failure."""
    tries = Tries(options, settings, environment, folder)
    paused = sorted(options.paused, reverse=True)  # those that wait longest come first
    rows = {(scenario, pause_s): Row() for scenario in options.scenario for pause_s in paused}

    async def do(one):
        ended, misses = await tries.met(one)
        row = rows[one.scenario, one.paused_s]
        row.missed += misses
        row.ends[ended.end] += 1
        row.pulls[ended.pull] += 1
        row.leases[ended.lease] += 1
        row.carriers[ended.carrier] += 1
        row.more_files += ended.more_files
        if ended.end != SURVIVED:
            row.failures.append({"try": one.number, "end": ended.end, "detail": ended.detail})
            tell(f"{one.scenario}, paused {one.paused_s:g} s, try {one.number}: {ended.end}: {ended.detail}")

    async with asyncio.TaskGroup() as tasks:
        for pause_s in paused:
            for number in range(options.tries):
                for scenario in options.scenario:
                    tasks.create_task(do(Try(scenario, pause_s, number)))
    return rows


def table(rows):
    """Return the lines of a table."""

    def counted(counter):
        return ", ".join(f"{number} {what}" for what, number in counter.most_common() if what)

    lines = [HEADER]
    for (scenario, pause_s), row in rows.items():
        others = Counter({end: number for end, number in row.ends.items() if end not in (SURVIVED, ABORTED)})
        counts = (row.ends.total(), row.ends[SURVIVED], row.ends[ABORTED], counted(others) or 0)
        counts += (row.missed, row.more_files)
        producer = f"paused {pause_s:g} s" if pause_s else "running"
        told = map(counted, (row.carriers, row.pulls, row.leases))
        lines.append((scenario, producer, *map(str, counts), *told))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def arguments(words=None):
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.world.readers", description=__doc__)
    of_config = typing.get_args(WorkerConfig.__annotations__["transport"])
    transports = [name for name in of_config if name != "loopback"]  # which moves bytes within a process only
    parser.add_argument("--transport", choices=transports, default=WorkerConfig(engine_id="any").transport)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="more settings of all workers")
    parser.add_argument("--env", nargs="*", default=[], metavar="KEY=VALUE", help="variables of all processes")
    parser.add_argument("--scenario", nargs="+", choices=[*SCENARIOS, "all"], default=["all"])
    parser.add_argument("--paused", type=seconds, default=[0.0, 5.0, 60.0], metavar="S,S,...", help="of the producer")
    parser.add_argument("--tries", type=int, default=100, help="of each scenario and pause")
    parser.add_argument(
        "--parallel", type=int, default=16, help="tries at the same time, of twice --mib of memory each"
    )
    parser.add_argument("--mib", type=int, default=400, help="of the pull")
    parser.add_argument("--report", type=Path, help="JSON file to write")
    options = parser.parse_args(words)
    if "all" in options.scenario:
        options.scenario = list(SCENARIOS)
    return options


def seconds(text):
    return [float(each) for each in text.split(",")]


def value(text):
    """Return a number, or what else JSON knows; any other text as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def main():
    options = arguments()
    environment = dict(each.split("=", 1) for each in options.env)
    more = {name: value(text) for name, text in (each.split("=", 1) for each in options.set)}
    settings = {"transport": options.transport, **more}
    if "cut" in options.scenario and (reason := missing()):
        sys.exit(f"there is no cut without network namespaces: {reason}")
    LOG.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    rows = asyncio.run(run(options, settings, environment, LOG, lambda text: print(text, flush=True)))
    print("\n".join(table(rows)))
    if options.report:
        told = [
            {"scenario": scenario, "paused_s": pause_s, **msgspec.to_builtins(row)}
            for (scenario, pause_s), row in rows.items()
        ]
        about = {"command": shlex.join(sys.argv), "mib": options.mib, "settings": settings, "environment": environment}
        report = {**about, "took_s": round(time.monotonic() - began_s, 1), "rows": told}
        options.report.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(row.failures for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
