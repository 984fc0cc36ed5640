"""A worker that dials producers that lie, and is handed tickets and lists of blocks that are wrong."""

import asyncio
import itertools
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress

from msgspec import Struct

from tests.world.measuring import sample

from .liar import Truth, mutated_blob, mutated_blocks, mutated_manifest, mutated_ticket, open_liars, ticket
from .processes import PATIENCE_S, WARM, Died, asked

AT_ONCE = 6
NOTHING = {"pulls": 0, "quarantined": 0, "defects": []}
KINDS = ("manifests", "blobs", "tickets", "blocks")


class Lied(Struct):
    """What came of it."""

    said: dict[str, Counter[str]]  # of each kind of lie, how often it ended how
    seconds: float = 0.0  # that it took
    rss_warm: int = 0  # resident bytes after the first fifth
    rss_end: int = 0  # at the end


class Lies:
    """What is told to one worker."""

    def __init__(self, worker, truth, seed):
        self._worker = worker
        self._truth = truth
        self._seed = seed

    async def tell(self, liar, kind, number):
        """Tell one lie, and return what the worker said; every lie is that of another incarnation."""
        number = number * len(KINDS) + KINDS.index(kind) + 1
        match kind:
            case "manifests":
                return await liar.lie(self._worker, mutated_manifest(self._truth, self._seed, number), number)
            case "blobs":
                return await liar.lie(self._worker, mutated_blob(self._truth, self._seed, number), number)
            case "tickets":
                params, blocks = mutated_ticket(liar.endpoint, self._seed, number), liar.blocks
            case _:
                blocks, tokens = mutated_blocks(self._seed, number)
                params = ticket(liar.endpoint, number)
        liar.tell(self._truth.honest(number), number)
        try:
            said = await asked(self._worker.pull(params, blocks))
            if kind == "blocks":
                said += ", " + await asked(self._worker.offer(blocks, tokens))
        except Died as died:
            raise Died(f"{died}\n{kind} {number}: {params!r} {blocks!r}") from died
        finally:
            liar.let_go()
        return said

    async def end(self, liar, number):
        """Make sure that the worker still pulls from whoever tells the truth, and has nothing left."""
        number = number * len(KINDS) + len(KINDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                while (left := await asked(self._worker.left())) != NOTHING:  # noqa: ASYNC110 - it is another process
                    await asyncio.sleep(0.2)  # blocks leave quarantine by themselves
        said = await liar.lie(self._worker, self._truth.honest(number), number)
        if said != "done" or left != NOTHING:
            raise Died(f"after all that, an honest pull ended as {said}, and {left} is left")


async def lie(worker, count, seed, *, first=0, tell=lambda *_: None):
    """Tell so many lies of each kind to a worker that dials.

    Raises:
        Died: the worker has, or has logged a defect; says the input.
    """
    lied = Lied({kind: Counter() for kind in KINDS})
    told = itertools.count(1)
    async with AsyncExitStack() as stack:
        truth = Truth()
        stack.callback(truth.close)
        lies = Lies(worker, truth, seed)
        liars = await open_liars(stack, AT_ONCE, truth)
        begun_at = time.monotonic()
        numbers = iter(range(first, first + count))

        async def be(liar):
            for number in numbers:
                for kind in KINDS:  # in turns, so that memory is judged after some of each
                    lied.said[kind][await lies.tell(liar, kind, number)] += 1
                so_far = next(told)
                if not lied.rss_warm and so_far >= count * WARM:
                    lied.rss_warm = sample(worker.pid).rss
                tell(so_far, count)

        async with asyncio.TaskGroup() as group:
            for liar in liars:
                group.create_task(be(liar))
        lied.seconds = time.monotonic() - begun_at
        await lies.end(liars[0], first + count)
        lied.rss_end = sample(worker.pid).rss
    return lied
