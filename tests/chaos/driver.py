"""Does harm to many at the same time, as a seed says, and sees that nobody else notices and that all get well again.

What is done to each victim, and in which order, depends on the seed alone, and so do sizes and pauses. In which moment
of a read the harm comes is up to the machine: real processes cannot be replayed.
"""

import asyncio
import random
import time
import traceback
from collections import Counter
from contextlib import AsyncExitStack

from . import faults, network
from .cramped import Cramped
from .engine import HELD, RIGHT, engine
from .nodes import NodeDied, NodeFailed
from .record import Record
from .victims import PATIENCE_S, Chaos, DoomedProducer, DoomedReader, Numbers, Served

TCP = {"UCX_TLS": "tcp"}
SURVIVOR = {"wire_s": 3.0, "quarantine_s_max": 4.0, "handshake_s": 4.0}
"""Settings of whoever pulls from victims: who hangs is found out within seconds, and its blocks are freed."""
SLOTS = 32
"""Pulls that the survivor may have open: the load of every victim, and what hangs meanwhile."""
SILENCE_S = 40.0
"""Connections whose other end is gone are given up after 27 s."""
PAUSE_S = 0.02
NEVER_S = 3600.0
"""A lease that ends by a release or not at all: one that nobody releases is still held in the end."""


class Until:
    """When it is enough: after so many rounds of each victim, or so many seconds after everybody is ready."""

    def __init__(self, *, rounds=None, seconds=0.0):
        self.rounds = rounds
        self._seconds = seconds
        self._began_s = time.monotonic()

    def begin(self):
        self._began_s = time.monotonic()

    def more(self, number):
        if self.rounds is not None:
            return number < self.rounds
        return time.monotonic() < self._began_s + self._seconds


async def run(seed, until, folder, names=None):
    """Do it; return the record.

    Args:
        seed: of what is done.
        until: when it is enough.
        folder: for what processes say last.
        names: of the victims; all of them if None.
    """
    record = Record()
    try:
        async with AsyncExitStack() as life:
            survivor = await life.enter_async_context(engine("survivor", 0, SLOTS, **SURVIVOR))
            chaos = Chaos(survivor, Numbers(), record, folder)
            life.callback(chaos.end_all)
            await _run(chaos, seed, until, life, names)
    except Exception:  # noqa: BLE001 - what was done until then is told in every case
        record.complain(traceback.format_exc())
    return record


async def _run(chaos, seed, until, life, names):
    steady, served = Served(chaos, "steady", lease_s=NEVER_S), Served(chaos, "served")
    served_over_tcp = Served(chaos, "served over TCP", **TCP)
    every = [
        (DoomedProducer(chaos, "producer", faults.OF_PROCESSES), []),
        (DoomedProducer(chaos, "producer over TCP", faults.OF_PROCESSES, **TCP), []),
        (DoomedProducer(chaos, "control channel", faults.OF_CONTROL, proxied=True), []),
        (DoomedReader(chaos, "reader", faults.OF_PROCESSES, served), []),
        (DoomedReader(chaos, "reader over TCP", faults.OF_PROCESSES, served_over_tcp, **TCP), [served_over_tcp]),
        (Cramped(chaos, "lease table", faults.OF_TABLES), []),
        *([] if network.missing() else [(network.Netted(chaos, "network", seed), [])]),
    ]
    chosen = [each for each in every if names is None or each[0].name in names]
    victims, others = [victim for victim, _ in chosen], [other for _, needed in chosen for other in needed]
    witnesses = [steady, served]
    await asyncio.gather(*(producer.restart() for producer in [*witnesses, *others]))
    await asyncio.gather(*(life.enter_async_context(victim.living()) for victim in victims))
    await _recover(chaos, victims)
    await chaos.moves(steady.node, chaos.survivor)
    calm = await _descriptors(chaos, witnesses)
    over = asyncio.Event()
    until.begin()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_beside(chaos, steady, over))
        async with asyncio.TaskGroup() as harm:
            for victim in victims:
                harm.create_task(_torment(victim, random.Random(f"{seed} {victim.name}"), until))
        await _recover(chaos, victims)
        over.set()
    await _converge(chaos, witnesses, [*victims, *others], calm)


async def _torment(victim, rng, until):
    """Do one harm after the other, each kind once before any comes again."""
    number, waiting = 0, []
    kinds = [fault for fault in victim.faults if fault.brief or until.rounds is None]
    while until.more(number):
        if not waiting:
            waiting = rng.sample(kinds, len(kinds))
        await victim.suffer(waiting.pop(), rng)
        number += 1


async def _beside(chaos, steady, over):
    """Pull from somebody whom nobody harms, until all is over; each of these pulls must succeed, at every time."""
    while not over.is_set():
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                end = await chaos.moves(steady.node, chaos.survivor)
        except TimeoutError:
            chaos.record.complain(f"an undisturbed offer or pull has not ended within {PATIENCE_S:.0f} s")
            return
        if end != RIGHT:
            chaos.record.complain(f"an undisturbed pull ended with {end}")
        chaos.record.beside.append(time.monotonic() - begun_s)
        await asyncio.sleep(PAUSE_S)


async def _recover(chaos, victims):
    """Wait until new pulls of all victims succeed."""
    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(victim.recover(chaos.record.row(victim.name, "in the end")) for victim in victims))


async def _descriptors(chaos, witnesses):
    """List the file descriptors of everybody who is to live on, once nothing is held."""
    audits = [await chaos.survivor.at_rest(PATIENCE_S)]
    audits += [await witness.node.at_rest(PATIENCE_S) for witness in witnesses]
    return [audit["descriptors"] for audit in audits]


async def _leaked(chaos, witnesses, calm):
    """Wait until nobody has more file descriptors than at first; return what is left too many."""
    deadline = time.monotonic() + SILENCE_S
    while True:
        leaked = {}
        now = await _descriptors(chaos, witnesses)
        for name, before, after in zip(("survivor", "steady", "served"), calm, now, strict=True):
            if len(after) > len(before):
                leaked[name] = sorted((Counter(after) - Counter(before)).elements())
        if not leaked or time.monotonic() > deadline:
            return leaked
        await asyncio.sleep(0.2)


async def _converge(chaos, witnesses, victims, calm):
    """See that nothing is held, nothing was leaked and nobody has died."""
    complain = chaos.record.complain
    for name, leaked in (await _leaked(chaos, witnesses, calm)).items():
        complain(f"{name} has more file descriptors than before, among {leaked}")
    nodes = [each.node for each in [*witnesses, *victims]]
    for name, held in [("survivor", chaos.survivor), *((node.name, node) for node in nodes)]:
        try:
            audit = await held.at_rest(PATIENCE_S)
            overwritten = await held.overwritten()
            logged = await held.logged()
        except (NodeDied, NodeFailed, AssertionError) as error:
            complain(f"{name}: {error!r}")
            continue
        for what in HELD:
            if audit[what]:
                complain(f"{name} still holds {audit[what]} {what}")
        for text in overwritten:
            complain(f"{name}, in blocks that nobody may write to: {text}")
        for text in logged:
            complain(f"{name} has logged an error: {text}")
