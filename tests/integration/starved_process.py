"""Producers of a host that gives the door of the TCP plane a tenth of a core, however many cores there are."""

import time

from kvflow.reads.tcp.access import Access

from . import producer_process

SHARE = 0.1


async def main():
    """Host producers; the thread that lets readers in rests after each step, nine times as long as it took."""
    go_on = Access._go_on

    def starved(access, place):
        before = time.thread_time()
        go_on(access, place)
        time.sleep((time.thread_time() - before) * (1 / SHARE - 1))

    Access._go_on = starved
    await producer_process.main()
