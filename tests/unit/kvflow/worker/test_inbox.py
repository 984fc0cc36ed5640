"""Events cross from the owner thread to the loop: in order, all of them, with few wake-ups."""

import asyncio
import threading

from kvflow.transport.base import PeerAdded
from kvflow.worker.inbox import Inbox

from .helpers import PATIENCE_S


async def test_events_of_another_thread_arrive_in_order_on_the_loop():
    inbox = Inbox(asyncio.get_running_loop())
    seen, threads, done = [], set(), asyncio.Event()

    def handle(event):
        seen.append(event.peer)
        threads.add(threading.get_ident())
        if len(seen) == 1000:
            done.set()

    inbox.connect(handle)
    thread = threading.Thread(target=lambda: [inbox.put(PeerAdded(str(index))) for index in range(1000)])
    thread.start()
    async with asyncio.timeout(PATIENCE_S):
        await done.wait()
    thread.join()
    assert seen == [str(index) for index in range(1000)]
    assert threads == {threading.get_ident()}


async def test_many_events_wake_the_loop_once():
    loop = asyncio.get_running_loop()
    wakes = []

    class Counting:
        is_closed = staticmethod(lambda: False)

        def call_soon_threadsafe(self, call):
            wakes.append(call)
            loop.call_soon_threadsafe(call)

    inbox, seen = Inbox(Counting()), []
    inbox.connect(seen.append)
    for round_ in range(1, 3):
        for index in range(10):
            inbox.put(PeerAdded(str(index)))
        await asyncio.sleep(0)
        assert (len(seen), len(wakes)) == (10 * round_, round_)


async def test_what_waited_is_handed_out_when_someone_listens():
    inbox, seen = Inbox(asyncio.get_running_loop()), []
    inbox.put(PeerAdded("p"))
    await asyncio.sleep(0)
    inbox.connect(seen.append)
    assert seen == [PeerAdded("p")]


def test_a_closed_loop_is_not_woken_and_nothing_is_lost():
    loop = asyncio.new_event_loop()
    loop.close()
    inbox, seen = Inbox(loop), []
    inbox.connect(seen.append)
    inbox.put(PeerAdded("p"))
    assert seen == []
    inbox.drain()
    assert seen == [PeerAdded("p")]
