"""The owner driven by hand over a mover that does what the test says."""

import logging
from collections import deque

import numpy as np
import pytest

from kvflow.layout.region import Region
from kvflow.transport.base import (
    RENEWAL_DRAIN_S,
    Carrier,
    Fence,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    Program,
    Read,
    ReadCompleted,
)
from kvflow.transport.mover import Flight, MoveFailed, Mover
from kvflow.transport.owner import CancelReads, Look, Owner, RemovePeer, RenewReader

MEMORY = Region(4096, 4096)
EPOCHS = Region(8192, 64)


class ScriptedFlight(Flight):
    """In flight until the script lets it land."""

    def __init__(self):
        self.outcome = None


class ScriptedMover(Mover):
    """Posts what it is told; flies for ever unless ``land`` is called."""

    metadata = b""

    def __init__(self):
        self.calls = []
        self.flights = deque()
        self.raising = {}

    def _call(self, name, *args):
        self.calls.append((name, *args))
        if error := self.raising.get(name):
            raise error

    def add(self, address):
        self._call("add", address.peer)
        return Carrier("fake", "kind")

    def remove(self, peer, *, gone):
        self._call("remove", peer, *(["gone"] if gone else []))

    def prepare(self, prepared):
        self._call("prepare", prepared.program.program_id)

    def post(self, chunk):
        self._call("post", chunk.read.read_id)
        return self._fly()

    def post_fence(self, peer, fence, after):
        self._call("post_fence", peer, fence.slot, after)
        return self._fly()

    def poll(self, flight):
        if isinstance(flight.outcome, Exception):
            raise flight.outcome
        return flight.outcome

    def renew(self):
        self._call("renew")
        self.flights.clear()

    def close(self):
        self._call("close")

    def _fly(self):
        self.flights.append(ScriptedFlight())
        return self.flights[-1]


class Bench:
    def __init__(self):
        self.mover = ScriptedMover()
        self.events = []
        self.now = 0.0
        self.owner = Owner(self.mover, [MEMORY], self.events.append, lambda: self.now)
        self.owner.handle(PeerAddress("p", {}, EPOCHS))
        self.owner.handle(PeerAddress("q", {}, EPOCHS))
        rows = np.array([[4096, 64, 0, 64, 8]])
        for number, peer in enumerate("pq"):
            self.owner.handle(Program(number, peer, rows, rows))
        assert self.seen() == ["PeerAdded", "PeerAdded"]

    def post(self, read_id, peer="p", fences=(), looks=()):
        index = np.array([0], dtype=np.int32)
        program = "pq".index(peer)
        self.owner.handle(Read(read_id, peer, program, index, index, np.array([0, 1]), 64, fences=fences, looks=looks))

    def land(self, outcome=0):
        self.mover.flights.popleft().outcome = outcome
        self.owner.step()

    def seen(self):
        """The events since the last look, as words."""
        words = []
        for event in self.events:
            about = [
                str(getattr(event, name)) for name in ("read_id", "fence_id", "code", "ended") if hasattr(event, name)
            ]
            words.append(" ".join([type(event).__name__, *about]))
        self.events.clear()
        return words


@pytest.fixture
def bench():
    return Bench()


def test_a_step_posts_one_piece_and_tells_whether_anything_changed(bench):
    assert not bench.owner.step()
    bench.post(1, fences=(Fence(5, 3, 0, (1,)),))
    bench.post(2)
    assert bench.owner.step()
    assert bench.mover.calls[-1] == ("post", 1)
    assert bench.owner.step()
    assert not bench.owner.step()
    assert bench.owner.in_flight
    bench.land()
    assert bench.seen() == ["ReadCompleted 1"]
    assert bench.owner.step()
    assert bench.mover.calls[-1] == ("post_fence", "p", 3, frozenset({1}))
    bench.land()
    bench.land(77)
    assert bench.seen() == ["ReadCompleted 2", "FenceJudged 5"]
    assert not bench.owner.in_flight


def test_a_lost_peer_is_removed_when_its_last_flight_has_ended(bench):
    for read_id in (1, 2, 3):
        bench.post(read_id)
        bench.owner.step()
    bench.land(MoveFailed("peer_lost", "reset"))
    assert bench.seen() == ["ReadFailed 1 peer_lost", "ReadFailed 3 peer_lost", "PeerFailed peer_lost"]
    assert ("remove", "p") not in bench.mover.calls
    bench.owner.handle(PeerAddress("p", {}, EPOCHS))
    assert bench.mover.calls.count(("add", "p")) == 1
    bench.land(MoveFailed("peer_lost", "reset"))
    assert bench.seen() == ["ReadFailed 2 peer_lost", "PeerAdded"]
    assert bench.mover.calls[-2:] == [("remove", "p"), ("add", "p")]


def test_peers_that_share_an_exporter_are_lost_together(bench):
    for peer in ("a", "b"):
        bench.owner.handle(PeerAddress(peer, {}, EPOCHS, agent="one worker"))
    bench.owner.handle(PeerAddress("c", {}, EPOCHS, agent="another worker"))
    bench.seen()
    rows = np.array([[4096, 64, 0, 64, 8]])
    bench.owner.handle(Program(7, "a", rows, rows))
    index = np.array([0], dtype=np.int32)
    bench.owner.handle(Read(1, "a", 7, index, index, np.array([0, 1]), 64))
    bench.owner.step()
    bench.land(MoveFailed("peer_lost", "reset"))
    assert {event.peer for event in bench.events if isinstance(event, PeerFailed)} == {"a", "b"}


@pytest.mark.parametrize("words", [(True,), (False, True)], ids=["said at once", "said later"])
def test_the_mover_is_told_that_a_removed_peer_never_comes_again(bench, words):
    for gone in words:
        bench.owner.handle(RemovePeer("p", gone))
    assert bench.mover.calls[-1] == ("remove", "p", "gone")
    assert len([call for call in bench.mover.calls if call[0] == "remove"]) == len(words)


def test_a_peer_that_is_in_use_and_gone_is_forgotten_when_nothing_of_it_is_in_flight(bench):
    bench.post(1)
    bench.owner.step()
    bench.owner.handle(RemovePeer("p", gone=True))
    assert bench.mover.calls[-1] == ("post", 1)
    bench.land()
    assert bench.mover.calls[-1] == ("remove", "p", "gone")


def test_removing_a_peer_that_waits_to_be_added_again_tells_so(bench):
    bench.post(1)
    bench.owner.step()
    bench.owner.handle(RemovePeer("p"))
    bench.owner.handle(PeerAddress("p", {}, EPOCHS))
    bench.owner.handle(RemovePeer("p"))
    assert bench.seen() == ["PeerFailed peer_lost"]
    bench.land()
    assert bench.seen() == ["ReadCompleted 1"]
    assert bench.mover.calls.count(("add", "p")) == 1


def test_bounds_blame_a_program_and_leave_the_peer(bench):
    bench.mover.raising["post"] = MoveFailed("bounds", "no")
    bench.post(1)
    bench.owner.step()
    assert bench.seen() == ["ReadFailed 1 bounds"]
    del bench.mover.raising["post"]
    bench.post(2)
    bench.owner.step()
    bench.land()
    assert bench.seen() == ["ReadCompleted 2"]


def test_a_chunk_whose_post_has_a_defect_may_write_until_the_agents_are_gone(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        bench.mover.raising["post"] = ZeroDivisionError("a defect")
        bench.post(1)
        bench.owner.step()
        assert bench.seen() == ["PeerFailed transport_error", "PeerFailed transport_error"]
    bench.owner.begin_close()
    assert bench.seen() == []
    bench.owner.end_close()
    assert bench.seen() == ["ReadFailed 1 cancelled"]


def test_a_look_alone_reads_one_slot_and_needs_its_peer(bench):
    bench.owner.handle(Look("p", Fence(5, 3, 7, ())))
    assert bench.owner.step()
    assert bench.mover.calls[-1] == ("post_fence", "p", 3, frozenset())
    bench.land(6)
    assert bench.seen() == ["FenceJudged 5"]
    bench.owner.handle(Look("nobody", Fence(6, 3, 7, ())))
    assert bench.seen() == ["FenceFailed 6 peer_lost"]


def test_a_read_is_not_posted_when_its_look_finds_no_lease(bench):
    bench.post(1, looks=(Fence(5, 3, 7, ()),))
    assert bench.owner.step()
    bench.land(6)
    assert bench.seen() == ["FenceJudged 5", "ReadFailed 1 lease_not_held"]
    assert not bench.owner.step()


def test_a_read_waits_for_its_look(bench):
    bench.post(1, looks=(Fence(5, 3, 7, ()),))
    assert bench.owner.step()
    assert bench.mover.calls[-1] == ("post_fence", "p", 3, frozenset())
    assert not bench.owner.step()
    bench.land(7)
    assert bench.seen() == ["FenceJudged 5"]
    assert bench.owner.step()
    assert bench.mover.calls[-1] == ("post", 1)
    bench.land()
    assert bench.seen() == ["ReadCompleted 1"]


def test_a_defect_while_posting_a_fence_fails_everything_and_serving_goes_on(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        bench.post(1, fences=(Fence(5, 0, 0, (1,)),))
        bench.post(2, "q")
        bench.mover.raising["post_fence"] = ZeroDivisionError("a defect")
        for _ in range(5):
            bench.owner.step()
            while bench.mover.flights:
                bench.land()
    words = bench.seen()
    assert words.count("PeerFailed transport_error") == 2
    assert {word.split()[1] for word in words if word.startswith("Read")} == {"1", "2"}
    assert sum(word.startswith("Fence") for word in words) == 1
    bench.mover.raising.clear()
    bench.owner.handle(PeerAddress("p", {}, EPOCHS))
    assert bench.seen() == ["PeerAdded"]


def test_a_defect_while_polling_leaves_the_read_open_until_the_agents_are_gone(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        bench.post(1)
        bench.owner.step()
        bench.land(ZeroDivisionError("a defect"))
        assert bench.seen() == ["PeerFailed transport_error", "PeerFailed transport_error"]
        assert bench.owner.in_flight
        assert not bench.owner.step()
    bench.owner.begin_close()
    assert bench.seen() == []
    bench.owner.end_close()
    assert bench.mover.calls[-1] == ("close",)
    assert bench.seen() == ["ReadFailed 1 cancelled"]


def test_a_defect_while_adding_or_admitting_still_answers(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        bench.mover.raising["add"] = ZeroDivisionError("a defect")
        bench.owner.handle(PeerAddress("r", {}, EPOCHS))
        assert bench.seen()[0] == "PeerFailed transport_error"
        bench.mover.raising.clear()
        bench.owner.handle(PeerAddress("p", {}, EPOCHS))
        bench.owner.handle(Program(0, "p", *[np.array([[4096, 64, 0, 64, 8]])] * 2))
        bench.seen()
        scalar = np.array(0, dtype=np.int32)
        bench.owner.handle(Read(1, "p", 0, scalar, scalar, "no array", 64, fences=(Fence(5, 0, 0, ()),)))
        assert {"ReadFailed 1 bounds", "FenceFailed 5 bounds"} <= set(bench.seen())
        index = np.array([0], dtype=np.int32)
        bench.owner.handle(Read(2, "p", 0, index, index, "no array", 64, fences=(Fence(6, 0, 0, ()),)))
        assert {"ReadFailed 2 transport_error", "FenceFailed 6 transport_error"} <= set(bench.seen())


def test_close_reports_what_was_in_flight_only_after_the_agents_are_destroyed(bench):
    order = []
    bench.mover.close = lambda: order.append("destroyed")
    bench.owner._sink = lambda event: order.append(type(event).__name__)
    for read_id in (1, 2, 3):
        bench.post(read_id)
        bench.owner.step()
    bench.owner.handle(CancelReads((1,)))
    bench.owner.begin_close()
    assert order == ["ReadFailed"]
    bench.owner.end_close()
    assert order == ["ReadFailed", "destroyed", "ReadFailed", "ReadFailed"]


@pytest.fixture
def hung(bench):
    """One peer that was given up, with a read in flight, and one that is well, with one in flight and one waiting."""
    for read_id, peer in ((1, "p"), (2, "p"), (3, "q")):
        bench.post(read_id, peer)
        bench.owner.step()
    bench.owner.handle(RemovePeer("p"))
    bench.post(4, "q", fences=(Fence(5, 3, 0, (3, 4)),))
    assert bench.seen() == []
    return bench


def test_a_renewal_waits_for_peers_that_were_not_given_up_and_posts_no_chunk_meanwhile(hung):
    hung.owner.handle(RenewReader())
    hung.owner.handle(RenewReader())
    assert not hung.owner.step()
    assert hung.mover.calls[-1] == ("post", 3)
    hung.mover.flights[2].outcome = 0
    assert hung.owner.step()
    renewal = hung.mover.calls.index(("renew",))
    assert hung.mover.calls[renewal:] == [("renew",), ("add", "q"), ("prepare", 1), ("remove", "p")]
    assert hung.seen() == ["ReadCompleted 3", "ReadFailed 1 peer_lost", "ReadFailed 2 peer_lost", "RenewalEnded 2"]
    assert not hung.owner.in_flight


def test_reads_that_wait_go_on_with_the_next_reader(hung):
    hung.owner.handle(RenewReader())
    hung.mover.flights[2].outcome = 0
    hung.owner.step()
    hung.seen()
    hung.owner.step()
    hung.land()
    hung.owner.step()
    hung.land()
    assert hung.seen() == ["ReadCompleted 4", "FenceJudged 5"]


def test_who_does_not_land_in_time_is_lost_with_all_it_has(hung):
    hung.owner.handle(RenewReader())
    hung.now = RENEWAL_DRAIN_S - 0.001
    assert not hung.owner.step()
    hung.now = RENEWAL_DRAIN_S
    assert hung.owner.step()
    assert hung.seen() == [
        "ReadFailed 1 peer_lost",
        "ReadFailed 2 peer_lost",
        "ReadFailed 3 peer_lost",
        "FenceFailed 5 peer_lost",
        "ReadFailed 4 peer_lost",
        "PeerFailed peer_lost",
        "RenewalEnded 3",
    ]
    hung.owner.handle(PeerAddress("q", {}, EPOCHS))
    assert hung.seen() == ["PeerAdded"]


def test_a_hung_peer_that_waits_to_be_added_again_is_added_to_the_next_reader(hung):
    hung.owner.handle(PeerAddress("p", {}, EPOCHS))
    hung.owner.handle(RenewReader())
    hung.mover.flights[2].outcome = 0
    hung.owner.step()
    assert hung.seen()[-2:] == ["RenewalEnded 2", "PeerAdded"]


def test_a_reader_with_nothing_in_flight_is_kept(bench):
    bench.owner.handle(RenewReader())
    assert bench.seen() == ["RenewalEnded 0"]
    bench.post(1)
    bench.owner.step()
    bench.owner.handle(RenewReader())
    bench.land()
    assert bench.seen() == ["ReadCompleted 1", "RenewalEnded 0"]
    assert ("renew",) not in bench.mover.calls


def test_what_nobody_can_ask_about_ends_with_a_renewal(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        bench.mover.raising["post"] = ZeroDivisionError("a defect")
        bench.post(1)
        bench.owner.step()
    bench.seen()
    bench.owner.handle(RenewReader())
    assert bench.seen() == ["ReadFailed 1 peer_lost", "RenewalEnded 1"]


@pytest.mark.parametrize("call", ["renew", "add", "prepare"])
def test_whom_the_next_reader_does_not_take_is_lost(hung, call):
    hung.mover.raising[call] = MoveFailed("transport_error", "no")
    if call == "renew":
        hung.mover.raising["add"] = MoveFailed("transport_error", "no reader")
    hung.owner.handle(RenewReader())
    hung.mover.flights[2].outcome = 0
    hung.owner.step()
    words = hung.seen()
    assert words[-4:] == ["ReadFailed 4 peer_lost", "FenceFailed 5 peer_lost", "PeerFailed peer_lost", "RenewalEnded 2"]
    assert not hung.owner.in_flight


def test_closing_ends_a_renewal(hung):
    hung.owner.handle(RenewReader())
    hung.owner.begin_close()
    hung.now = RENEWAL_DRAIN_S
    assert not hung.owner.step()
    hung.owner.end_close()
    assert ("renew",) not in hung.mover.calls
    assert hung.seen()[-1] == "ReadFailed 3 cancelled"


def test_a_defect_while_renewing_leaves_open_what_may_still_be_written(hung, caplog):
    hung.mover.raising["renew"] = ZeroDivisionError("a defect")
    hung.mover.flights[2].outcome = 0
    with caplog.at_level(logging.CRITICAL, "kvflow.transport.owner"):
        hung.owner.handle(RenewReader())
        hung.owner.step()
    assert not {"ReadFailed 1 peer_lost", "ReadFailed 2 peer_lost"} & set(hung.seen())
    assert hung.owner.in_flight


def test_the_events_are_the_contracts_own(bench):
    bench.post(1)
    bench.owner.step()
    bench.mover.flights[0].outcome = 0
    bench.owner.step()
    assert isinstance(bench.events[0], ReadCompleted)
    assert {PeerAdded, PeerFailed}.isdisjoint(map(type, bench.events))
