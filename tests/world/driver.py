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
from itertools import cycle

from . import faults, network
from .cramped import Cramped
from .engine import HELD, RIGHT, engine
from .interrupted import Interrupted
from .node import NodeDied, NodeFailed
from .record import Record
from .victims import KINDS, PATIENCE_S, Chaos, DoomedProducer, DoomedReader, Numbers, Served

TCP = {"transport": "tcp"}
TLS = {**TCP, "tcp_encryption": "tls"}
SURVIVOR = {"wire_s": 3.0, "quarantine_s_max": 4.0, "handshake_s": 4.0, "follow_bytes_min": 1}
"""Settings of whoever pulls from victims: who hangs is found out within seconds, and its blocks are freed."""
SLOTS = 32
"""Pulls that the survivor may have open: the load of every victim, and what hangs meanwhile."""
SILENCE_S = 40.0
"""Connections whose other end is gone are given up after 27 s."""
PAUSE_S = 0.02
SURVIVORS = "the survivors"
"""They share a process."""
MIB = 64
"""Of a pull that is interrupted."""
TCP_PEERS = 4
"""Peers that the survivors read over TCP."""
SPARE = 1
"""Data connections that a reader may open to a peer later, beside its first: when it asks for more at the same time."""
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
            survivor = await life.enter_async_context(engine("survivor", num_slots=SLOTS, **SURVIVOR))
            encrypted = await life.enter_async_context(engine("encrypted survivor", num_slots=SLOTS, **SURVIVOR, **TLS))
            chaos = Chaos(survivor, encrypted, Numbers(), record, folder)
            life.callback(chaos.end_all)
            await _run(chaos, seed, until, life, names)
    except Exception:  # noqa: BLE001 - what was done until then is told in every case
        record.complain(traceback.format_exc())
    return record


async def _run(chaos, seed, until, life, names):
    steady = [Served(chaos, "steady", lease_s=NEVER_S), Served(chaos, "steady over TCP", lease_s=NEVER_S, **TCP)]
    served = [Served(chaos, "served"), Served(chaos, "served over TCP", **TCP)]
    data = {"proxied": "tcp_advertise"}
    every = [
        DoomedProducer(chaos, "producer", faults.OF_PROCESSES),
        DoomedProducer(chaos, "producer over TCP", faults.OF_PROCESSES, **TCP),
        DoomedProducer(chaos, "control channel", faults.OF_CONTROL, proxied="advertise"),
        DoomedProducer(chaos, "data connections", faults.OF_DATA, **data, **TCP),
        DoomedProducer(
            chaos, "encrypted data", faults.OF_ENCRYPTED_DATA, reader=chaos.encrypted_survivor, **data, **TLS
        ),
        DoomedReader(chaos, "reader", faults.OF_PROCESSES, served[0]),
        DoomedReader(chaos, "reader over TCP", faults.OF_PROCESSES, served[1]),
        Cramped(chaos, "lease table", faults.OF_TABLES),
        Interrupted(chaos, "interrupted", MIB),
        Interrupted(chaos, "interrupted over TCP", MIB, **TCP),
        Interrupted(chaos, "interrupted, encrypted", MIB, **TLS),
    ]
    if not network.missing():
        every += [network.Netted(chaos, "network", seed), Interrupted(chaos, "cut off", MIB, is_cut=True, **TCP)]
    victims = [victim for victim in every if names is None or victim.name in names]
    witnesses = [*steady, *served]
    await asyncio.gather(*(producer.restart() for producer in witnesses))
    await asyncio.gather(*(life.enter_async_context(victim.living()) for victim in victims))
    await _recover(victims)
    for producer in steady:
        await chaos.moves_all(producer.node, chaos.survivor)
    calm = await _descriptors(chaos, witnesses)
    over = asyncio.Event()
    until.begin()
    async with asyncio.TaskGroup() as tasks:
        for producer in steady:
            tasks.create_task(_beside(chaos, producer, over))
        async with asyncio.TaskGroup() as harm:
            for victim in victims:
                harm.create_task(_torment(victim, random.Random(f"{seed} {victim.name}"), until))
        await _recover(victims)
        over.set()
    await _converge(chaos, witnesses, victims, calm)


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
    for kind in cycle(KINDS):
        if over.is_set():
            return
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(PATIENCE_S):
                end = await chaos.moves(steady.node, chaos.survivor, kind)
        except TimeoutError:
            chaos.record.complain(f"an offer of {steady.name}, or its pull, has not ended within {PATIENCE_S:.0f} s")
            return
        if end != RIGHT:
            chaos.record.complain(f"a pull from {steady.name} ended with {end}; it was {kind}")
        chaos.record.beside.append(time.monotonic() - begun_s)
        await asyncio.sleep(PAUSE_S)


async def _recover(victims):
    """Wait until new pulls of all victims succeed."""
    async with asyncio.timeout(2 * PATIENCE_S):
        await asyncio.gather(*(victim.recover() for victim in victims))


async def _descriptors(chaos, witnesses):
    """List the file descriptors of everybody who is to live on, once nothing is held."""
    audits = {SURVIVORS: await chaos.survivor.at_rest(PATIENCE_S)}
    await chaos.encrypted_survivor.at_rest(PATIENCE_S)
    audits |= {witness.name: await witness.node.at_rest(PATIENCE_S) for witness in witnesses}
    return {name: audit["descriptors"] for name, audit in audits.items()}


async def _leaked(chaos, witnesses, calm):
    """Wait until nobody has more file descriptors than at first; return what is left too many."""
    deadline = time.monotonic() + SILENCE_S
    while True:
        leaked = {}
        now = await _descriptors(chaos, witnesses)
        for name, before in calm.items():
            peers = TCP_PEERS if name == SURVIVORS else 1
            if len(now[name]) > len(before) + SPARE * peers:
                leaked[name] = sorted((Counter(now[name]) - Counter(before)).elements())
        if not leaked or time.monotonic() > deadline:
            return leaked
        await asyncio.sleep(0.2)


async def _converge(chaos, witnesses, victims, calm):
    """See that nothing is held, nothing was leaked and nobody has died."""
    complain = chaos.record.complain
    for name, leaked in (await _leaked(chaos, witnesses, calm)).items():
        complain(f"{name} has more file descriptors than before, among {leaked}")
    survivors = {"survivor": chaos.survivor, "encrypted survivor": chaos.encrypted_survivor}
    for name, held in {**survivors, **{each.name: each.node for each in [*witnesses, *victims]}}.items():
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
