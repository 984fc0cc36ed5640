"""Producers of a host that gives the door of the TCP plane a tenth of a core, however many cores there are."""

import time
from contextlib import asynccontextmanager

import pytest

from kvflow.reads.tcp.access import Access

from .producing import producing
from .shapes import Shape

SHARE = 0.1


@asynccontextmanager
async def starving(shape: Shape, **settings):
    """Open a producer; the thread that lets readers in rests after each step, nine times as long as it took."""
    go_on = Access._go_on

    def starved(access, place):
        before = time.thread_time()
        go_on(access, place)
        time.sleep((time.thread_time() - before) * (1 / SHARE - 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Access, "_go_on", starved)
        async with producing(shape, **settings) as producer:
            yield producer
