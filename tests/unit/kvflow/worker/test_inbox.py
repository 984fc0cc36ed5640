"""Events cross from the read thread to the loop: in order, all of them, with few wake-ups."""

import asyncio
import threading

import pytest

from kvflow.reads.contract import PeerAdded
from kvflow.worker import runtime as module
from kvflow.worker.runtime import Inbox
from tests.helpers.waiting import patiently
from tests.preemption import every_preemption


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
    await patiently(done.wait())
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


class RecordingLoop:
    """A loop that keeps what it is to call."""

    is_closed = staticmethod(lambda: False)

    def __init__(self):
        self.calls = []

    def call_soon_threadsafe(self, call):
        self.calls.append(call)

    def turn(self):
        while self.calls:
            self.calls.pop(0)()


def lost_events(make_inbox, within):
    """Return the moments of a drain, bytecode by bytecode, at which an event of the other thread is lost."""
    lost = []
    for moment, preemption in enumerate(every_preemption()):
        loop, seen = RecordingLoop(), []
        inbox = make_inbox(loop)
        inbox.connect(seen.append)
        inbox.put(PeerAdded("first"))
        (drain,) = loop.calls
        loop.calls.clear()
        preemption.interrupt(drain, lambda put=inbox.put: put(PeerAdded("second")), within=within)
        if not preemption.happened:
            inbox.put(PeerAdded("second"))
        loop.turn()
        if [event.peer for event in seen] != ["first", "second"]:
            lost.append(moment)
    return lost


def test_no_event_waits_for_another_whenever_it_comes():
    assert lost_events(Inbox, module.__file__) == []


def test_a_flag_that_is_cleared_after_the_look_loses_events():
    class Careless(Inbox):
        def drain(self):
            while self._handler is not None and self._events:
                self._handler(self._events.popleft())
            self._woken = False

    assert lost_events(Careless, __file__)


@pytest.mark.parametrize("events", [1, 2])
def test_a_put_that_is_interrupted_by_the_loop_wakes_it_again(events):
    for preemption in every_preemption():
        loop, seen = RecordingLoop(), []
        inbox = Inbox(loop)
        inbox.connect(seen.append)
        for number in range(events - 1):
            inbox.put(PeerAdded(str(number)))
        last = PeerAdded(str(events - 1))
        preemption.interrupt(lambda put=inbox.put, last=last: put(last), loop.turn, within=module.__file__)
        loop.turn()
        assert [event.peer for event in seen] == [str(number) for number in range(events)]
