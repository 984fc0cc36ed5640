"""A listening worker and members that lie to it; beside them, somebody honest."""

import asyncio
import random
import time
from contextlib import suppress

from msgspec import Struct

import handshake
from tests.unit.handshake.helpers import connected
from tests.world.measuring import sample

from .attacker import attacking
from .mutations import Mutator
from .processes import SECRET, Died, asked, attacked

RAW_AT_ONCE = 50
BETWEEN_HONEST_S = 0.1


class Attacked(Struct):
    """What came of it."""

    mutated: int = 0  # messages that were mutated, as the attackers counted those that were answered
    received: int = 0  # messages that the worker has decoded, or refused to
    invalid: int = 0  # those that it refused
    conversations: int = 0  # connections of the attackers
    unanswered: int = 0  # those that had no last word within a minute
    raw: int = 0  # connections that were no members, or no ZeroMQ
    seconds: float = 0.0  # that it took
    honest: list[float] = []  # seconds of each honest handshake meanwhile
    rss_warm: int = 0  # resident bytes after the first fifth
    rss_end: int = 0  # at the end


async def attack(worker, messages, seed, *, raw=2000, first=0, tell=lambda *_: None):
    """Send so many mutated messages to a listening worker, and shake hands with it honestly meanwhile.

    Raises:
        Died: the worker has, or has logged a defect; says how to draw again what was sent last.
    """
    found = Attacked()
    await _shake_hands(worker.endpoint)
    begun_at = time.monotonic()

    async def warm():
        found.rss_warm = sample(worker.pid).rss

    async with asyncio.TaskGroup() as group:
        honest = group.create_task(_be_honest(worker.endpoint, found))
        strangers = group.create_task(be_raw(worker.endpoint, seed, raw, found))
        told = await attacked(worker, (attacking, worker.endpoint, SECRET, seed), messages, first, warm=warm, tell=tell)
        await strangers
        honest.cancel()
    found.seconds = time.monotonic() - begun_at
    await _shake_hands(worker.endpoint)
    received = await asked(worker.counts())
    found.received, found.invalid = sum(received.values()), received["invalid"]
    if defects := (await asked(worker.left()))["defects"]:
        raise Died("\n".join(defects))
    found.rss_end = sample(worker.pid).rss
    found.mutated, found.conversations, found.unanswered = told["said"], told["conversations"], told["unanswered"]
    return found


async def _shake_hands(endpoint):
    begun_at = time.monotonic()
    security = handshake.ClusterSecurity.from_secret(SECRET)
    limits = handshake.Limits(connect_s=60.0, handshake_s=60.0)
    async with connected(endpoint, security=security, limits=limits):
        return time.monotonic() - begun_at


async def _be_honest(endpoint, attacked):
    while True:
        attacked.honest.append(await _shake_hands(endpoint))
        await asyncio.sleep(BETWEEN_HONEST_S)


async def be_raw(endpoint, seed, connections, attacked):
    """Connect without CURVE, and say what may resemble a greeting of ZeroMQ."""
    host, port = endpoint.removeprefix("tcp://").split(":")
    greeting = (
        b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(48) + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
    )
    draw = random.Random(f"{seed}/raw")
    room = asyncio.Semaphore(RAW_AT_ONCE)

    async def one(number):
        async with room:  # drawn one by one: all at once would keep the loop of the honest for a second
            mutator = Mutator(f"{seed}/raw/{number}")
            more = mutator.draw.randbytes(mutator.draw.choice((0, 9, 5000)))
            words = mutator.of_bytes(greeting, draw.randbytes(64)) + more
            with suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    reader, writer = await asyncio.open_connection(host, int(port))
                try:
                    writer.write(words)
                    async with asyncio.timeout(0.05):
                        await reader.read()
                finally:
                    writer.close()
            attacked.raw += 1

    async with asyncio.TaskGroup() as group:
        for number in range(connections):
            group.create_task(one(number))
