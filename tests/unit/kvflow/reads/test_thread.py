"""The thread around a backend: what it says when the library does not return."""

import os
import queue
import select
import threading
from pathlib import Path

import pytest

from kvflow.layout.component import Region
from kvflow.reads import thread as threaded
from kvflow.reads.backend import Backend
from kvflow.reads.contract import (
    SERVES_NOTHING,
    TURN_S_MAX,
    CancelReads,
    Serving,
)
from kvflow.reads.core import PostReads, RemovePeer
from kvflow.reads.staging import StagingMemory
from kvflow.reads.thread import ThreadedTransport
from tests.preemption import every_preemption

PATIENCE_S = 60


class StuckBackend(Backend):
    """A library whose agents cannot be destroyed before it is let go."""

    metadata = b"how to read me"
    data_endpoint = ""

    def __init__(self):
        self.closing, self.let_go = threading.Event(), threading.Event()

    def close(self):
        self.closing.set()
        assert self.let_go.wait(PATIENCE_S)


def test_closing_waits_for_a_call_that_hangs_and_says_so(monkeypatch):
    monkeypatch.setattr(threaded, "HANGS_S", 0.01)
    backend = StuckBackend()
    transport = ThreadedTransport("stuck", {"stuck": lambda *_given: backend}, lambda _event: None, StagingMemory(0))
    transport.start([Region(4096, 64)], Region(8192, 64))
    told, words = threading.Event(), []

    def error(text, *values):
        words.append(text % values)
        told.set()

    monkeypatch.setattr(threaded._logger, "error", error)
    closing = threading.Thread(target=transport.close)
    closing.start()
    assert backend.closing.wait(PATIENCE_S)
    assert told.wait(PATIENCE_S)
    assert "a call into stuck that does not return" in words[0]
    assert closing.is_alive(), "the memory may not be freed yet"
    backend.let_go.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


class EventBackend(StuckBackend):
    """Has news when a test says so."""

    def __init__(self):
        super().__init__()
        self.let_go.set()
        self.news = os.eventfd(0)

    def fileno(self):
        return self.news


class Idle:
    """An owner that has nothing to do."""

    in_flight = must_poll = False

    def __init__(self, backend, steps, ended):
        self._backend, self._steps, self.ended = backend, steps, ended

    def step(self):
        if select.select([self._backend.news], [], [], 0)[0]:
            os.eventfd_read(self._backend.news)
        self._steps.put("step")
        return False

    def begin_close(self):
        pass

    def end_close(self):
        self.ended.set()


def test_a_backend_descriptor_ends_the_pause_of_its_thread(monkeypatch):
    steps, given, backend = queue.Queue(), [], EventBackend()

    def open_backend(*values):
        given.append(values)
        return backend

    monkeypatch.setattr(threaded, "ReadCore", lambda *_given: Idle(backend, steps, threading.Event()))
    transport = ThreadedTransport("idle", {"idle": open_backend}, lambda _event: None, StagingMemory(0))
    regions, epochs = (Region(4096, 64),), Region(8192, 64)
    serving = Serving((), lambda _slot, _epoch: None, lambda _public_key: True, bytes(32))
    transport.start(regions, epochs, serving)
    assert given == [(regions, epochs, serving)]
    for _ in range(3):
        steps.get(timeout=PATIENCE_S)
        os.eventfd_write(backend.news, 1)  # without it the thread has nothing to wait for, and sleeps for ever
    steps.get(timeout=PATIENCE_S)
    transport.close()
    os.close(backend.news)


class Asked:
    """A lock that notes that somebody waits for it."""

    def __init__(self):
        self._lock = threading.Lock()
        self.waited_for = False

    def __enter__(self):
        self.waited_for = self._lock.locked()
        self._lock.acquire()

    def __exit__(self, *_error):
        self._lock.release()


def test_the_thread_closes_no_descriptor_that_a_command_may_write_to(monkeypatch):
    steps, ended, backend, still_open, write = queue.Queue(), threading.Event(), EventBackend(), [], os.eventfd_write

    def late(descriptor, value):
        """The caller waits between its look and its write, and the thread is woken by its backend."""
        write(backend.news, 1)
        while not (ended.is_set() or transport._lock.waited_for):
            select.select([], [], [], 0.001)
        still_open.append(Path(f"/proc/self/fd/{descriptor}").exists())
        write(descriptor, value)

    monkeypatch.setattr(threaded, "ReadCore", lambda *_given: Idle(backend, steps, ended))
    transport = ThreadedTransport("idle", {"idle": lambda *_given: backend}, lambda _event: None, StagingMemory(0))
    transport.start((Region(4096, 64),), Region(8192, 64))
    steps.get(timeout=PATIENCE_S)
    while not transport._bell._waiting:
        select.select([], [], [], 0.001)
    transport._lock = Asked()
    monkeypatch.setattr(os, "eventfd_write", late)
    transport.close()
    assert still_open == [True], "another file may have its number by now"
    assert ended.is_set()
    os.close(backend.news)


def test_a_transport_serves_nothing_unless_it_is_told_what():
    given = []
    transport = ThreadedTransport(
        "refusing", {"refusing": lambda *values: given.append(values) or 1 / 0}, lambda _event: None, StagingMemory(0)
    )
    with pytest.raises(ZeroDivisionError):
        transport.start([Region(4096, 64)], Region(8192, 64))
    assert given[0][2] is SERVES_NOTHING
    assert SERVES_NOTHING.tracks == ()
    assert SERVES_NOTHING.blocks_of(0, 0) is None
    assert not SERVES_NOTHING.admits("0" * 64)


def idle_transport(kind=ThreadedTransport, descriptor=-1):
    """A transport whose read thread is played by the test."""
    transport = kind("played", {}, lambda _event: None, StagingMemory(0))
    transport._bell.watch(descriptor)
    return transport


@pytest.fixture(params=["lock", "descriptor"])
def descriptor(request):
    """What pauses wait for beside commands: nothing, or a descriptor that is never readable."""
    if request.param == "lock":
        yield -1
    else:
        silent = os.eventfd(0)
        yield silent
        os.close(silent)


def taken_after_a_pause(transport, pause_s):
    """Pause, and take what was commanded, as the read thread does."""
    transport._bell.wait(pause_s)
    return transport._take()


def sleeps_on(transport):
    """Tell whether the core would go to sleep although a command waits: it does so while nobody has woken it."""
    return bool(transport._commands) and not has_rung(transport._bell)


def has_rung(bell):
    """Tell whether the next pause would end at once."""
    rung = bell._silent.acquire(blocking=False)
    return rung or (bell._epoll is not None and bool(bell._epoll.poll(0)))


def unheard_commands(kind, within, descriptor=-1):
    """Return the moments, bytecode by bytecode, at which a command waits until another one comes."""
    unheard = []
    for moment, preemption in enumerate(every_preemption()):
        transport, taken = idle_transport(kind, descriptor), []
        transport.remove_peer("first")
        # The core is woken, and takes what is there.
        preemption.interrupt(
            lambda transport=transport, taken=taken: taken.extend(taken_after_a_pause(transport, -1)),
            lambda transport=transport: transport.remove_peer("second"),
            within=within,
        )
        if not preemption.happened:
            transport.remove_peer("second")
        if sleeps_on(transport):
            unheard.append(moment)
        else:
            taken += taken_after_a_pause(transport, 0.0)
            assert taken == [RemovePeer("first"), RemovePeer("second")]
        transport._bell.close()
    return unheard


def test_a_command_wakes_the_owner_whenever_it_comes(descriptor):
    assert unheard_commands(ThreadedTransport, threaded.__file__, descriptor) == []


def test_a_command_that_wakes_only_an_empty_queue_is_not_heard():
    class Careless(ThreadedTransport):
        def _put(self, command):
            if not self._commands:
                super()._put(command)
            else:
                self._commands.append(command)

    assert unheard_commands(Careless, threaded.__file__)


def test_a_command_that_is_interrupted_by_the_owner_wakes_it_again(descriptor):
    for preemption in every_preemption():
        transport, taken = idle_transport(descriptor=descriptor), []
        preemption.interrupt(
            lambda transport=transport: transport.remove_peer("only"),
            lambda transport=transport, taken=taken: taken.extend(taken_after_a_pause(transport, 0.0)),
            within=threaded.__file__,
        )
        assert not sleeps_on(transport)
        taken += taken_after_a_pause(transport, 0.0)
        assert taken == [RemovePeer("only")]
        transport._bell.close()


class Sleepless:
    """The epoll of a bell. It does not wait: another thread calls a function, and pauses that nothing ends count."""

    def __init__(self, epoll, meanwhile):
        self._epoll, self._meanwhile, self.slept_on = epoll, meanwhile, 0

    def poll(self, pause_s):
        del pause_s
        other = threading.Thread(target=self._meanwhile)
        other.start()
        other.join(PATIENCE_S)
        ready = self._epoll.poll(0)
        self.slept_on += not ready
        return ready

    def close(self):
        self._epoll.close()


def test_a_command_on_the_way_to_sleep_wakes_the_owner():
    silent, slept = os.eventfd(0), 0
    for moment, preemption in enumerate(every_preemption()):
        transport, taken = idle_transport(descriptor=silent), []

        def command_if_none(transport=transport):
            if not transport._commands:  # otherwise the owner must not sleep
                transport.remove_peer("while it slept")

        bell = transport._bell
        bell._epoll = Sleepless(bell._epoll, command_if_none)
        preemption.interrupt(
            lambda transport=transport, taken=taken: taken.extend(taken_after_a_pause(transport, -1)),
            lambda transport=transport: transport.remove_peer("on the way"),
            within=threaded.__file__,
        )
        assert not bell._epoll.slept_on, f"a command at moment {moment} wakes nobody"
        assert not sleeps_on(transport), f"a command at moment {moment} waits for the next one"
        slept += RemovePeer("while it slept") in taken
        bell.close()
    assert slept > 10, "the owner does not get to sleep"
    os.close(silent)


def test_a_command_beside_the_end_of_a_pause_wakes_the_owner_again():
    silent = os.eventfd(0)
    for preemption in every_preemption():
        transport, taken = idle_transport(descriptor=silent), []
        bell = transport._bell
        bell._epoll = Sleepless(bell._epoll, lambda: None)
        preemption.interrupt(
            lambda transport=transport: transport.remove_peer("only"),
            lambda transport=transport, taken=taken: taken.extend(
                taken_after_a_pause(transport, threaded.IDLE_PROGRESS_S)
            ),
            within=threaded.__file__,
        )
        assert not sleeps_on(transport)
        bell.close()
    os.close(silent)


def test_each_command_wakes_an_owner_that_sleeps(descriptor):
    transport = idle_transport(descriptor=descriptor)
    for number in range(3):
        transport.remove_peer(str(number))
        assert has_rung(transport._bell), "the core sleeps on"
        assert taken_after_a_pause(transport, 0.0) == [RemovePeer(str(number))]


class InlineCore:
    """Answers every post at once."""

    def __init__(self):
        self.posted = []

    def post_inline(self, reads, within_s):
        self.posted += reads
        return list(reads)


def test_an_inline_post_never_overtakes_a_queued_command():
    transport = idle_transport()
    transport._core = core = InlineCore()
    assert transport.post(["first"]) == ["first"]
    transport.cancel([7])
    assert transport.post(["second"]) == [], "the core has not cancelled yet"
    assert transport._take() == [CancelReads((7,)), PostReads(("second",), TURN_S_MAX / 2)]
    assert transport.post(["third"]) == ["third"]
    assert core.posted == ["first", "third"]


class PlayedCore:
    """Changes something, or says what it waits for, step by step; then it closes the transport."""

    def __init__(self, transport, script):
        self._transport, self._script, self._state = transport, list(script), "idle"

    def step(self):
        self._state = self._script.pop(0)
        if not self._script:
            self._transport._commands.append(None)
        return self._state == "changed"

    @property
    def must_poll(self):
        return self._state in {"polls", "rests"}

    @property
    def in_flight(self):
        return self._state != "idle"

    def rest_s(self):
        return 3e-4 if self._state == "rests" else 0.0


def test_pauses_grow_while_nothing_happens_and_begin_again():
    script = {
        "changed": [0.0],
        "polls": [2e-5, 4e-5, 8e-5, 16e-5, 32e-5, 64e-5, 1e-3, 1e-3],
        "rests": [3e-4],
        " polls": [2e-5, 4e-5],
        " changed": [0.0],
        "  polls": [2e-5, 4e-5],
        "flies": [threaded.IDLE_PROGRESS_S],
        "idle": [-1.0],
    }
    transport, pauses = idle_transport(), []
    transport._bell.wait = pauses.append
    transport._serve(PlayedCore(transport, [state.strip() for state, paused in script.items() for _ in paused]))
    assert pauses == pytest.approx([0.0, *(pause for paused in script.values() for pause in paused)])


def test_an_idle_thread_looks_at_deadlines_behind_its_descriptor():
    """A connection that opens has a deadline, though no read waits for it."""
    silent = os.eventfd(0)
    transport, pauses = idle_transport(descriptor=silent), []
    transport._bell.wait = pauses.append
    transport._serve(PlayedCore(transport, ["idle", "idle"]))
    assert pauses == [0.0, threaded.IDLE_PROGRESS_S, threaded.IDLE_PROGRESS_S]
    transport._bell.close()
    os.close(silent)


def test_a_ring_ends_one_pause_and_not_the_next_as_well():
    silent = os.eventfd(0)
    bell = idle_transport(descriptor=silent)._bell
    os.eventfd_write(bell._event, 1)  # as a ring while it polls
    bell.wait(PATIENCE_S)
    assert not has_rung(bell)
    bell.close()
    os.close(silent)
