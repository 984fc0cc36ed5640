"""The core driven by hand over a backend that does what the test says."""

import logging
from collections import deque

import numpy as np
import pytest

from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import Backend, BackendError, PostedWork
from kvflow.reads.contract import (
    RESET_DRAIN_S,
    CancelReads,
    Carrier,
    Part,
    PeerAddress,
    PeerFailed,
    PreparedList,
    RankRead,
    ReadEnded,
)
from kvflow.reads.core import PostReads, ReadCore, RemovePeer, ResetReader
from kvflow.reads.prepared import POST_S, READ_S

from .lane_reads import Units

MEMORY = Region(4096, 4096)
EPOCHS = Region(8192, 64)


class ScriptedWork(PostedWork):
    """In flight until the script lets it land."""

    def __init__(self, answer):
        self.outcome = None
        self.answer = answer


class ScriptedBackend(Backend):
    """Posts what it is told; flies for ever unless ``land`` is called."""

    metadata = b""

    def __init__(self):
        self.calls = []
        self.all_posted = deque()
        self.raising = {}
        self.at_once = False
        self.ends = None  # posts that end at once from here on; None: ``at_once`` decides

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
        self._call("prepare", prepared.prepared_list.list_id)

    def post(self, chunk):
        self._call("post", *(share.read_id for share in chunk.portion.shares))
        return self._fly(lambda value: value)

    def post_check(self, peer, first, last, reads, *, fence):
        self._call("fence" if fence else "check", peer, first, last, *(read_id for read_id, _ in reads))
        return self._fly(lambda value: [value] * (last + 1 - first))

    def ends_at_once(self, peer):
        return self.at_once

    def poll(self, posted):
        if isinstance(posted.outcome, Exception):
            raise posted.outcome
        return posted.outcome

    def reset(self):
        self._call("reset")
        self.all_posted.clear()

    def close(self):
        self._call("close")

    def _fly(self, answer):
        if self.ends is not None:
            self.ends -= 1
        if self.at_once if self.ends is None else self.ends >= 0:
            return answer(0)
        self.all_posted.append(ScriptedWork(answer))
        return self.all_posted[-1]


class Bench:
    def __init__(self, *, at_once=False):
        self.backend = ScriptedBackend()
        self.backend.at_once = at_once
        self.events = []
        self.now = 0.0
        self.core = ReadCore(self.backend, [MEMORY], self.events.append, lambda: self.now)
        self.core.handle(PeerAddress("p", {}, EPOCHS))
        self.core.handle(PeerAddress("q", {}, EPOCHS))
        for number, peer in enumerate("pq"):
            self.core.handle(a_list(number, peer))
        assert self.seen() == ["PeerAdded", "PeerAdded"]

    def post(self, *read_ids, peer="p", list_id=None, **how):
        number = "pq".find(peer) if list_id is None else list_id
        self.core.handle(PostReads(tuple(a_read(read_id, peer, number, **how) for read_id in read_ids)))

    def land(self, outcome=0):
        posted = self.backend.all_posted.popleft()
        posted.outcome = outcome if isinstance(outcome, Exception) else posted.answer(outcome)
        self.core.step()

    def serve(self, outcome=0):
        """Let everything that is posted arrive until there is nothing more to do."""
        while self.core.step() or self.backend.all_posted:
            if self.backend.all_posted:
                self.land(outcome)

    def seen(self):
        """The events since the last look, as words."""
        words = []
        for event in self.events:
            if isinstance(event, ReadEnded):
                words.append(f"{event.read_id} {event.code or event.verdict}")
            else:
                about = [str(getattr(event, name)) for name in ("code", "ended") if hasattr(event, name)]
                words.append(" ".join([type(event).__name__, *about]))
        self.events.clear()
        return words


def a_list(number, peer):
    rows = np.array([[4096, 1, 0, 1, 8]])
    return PreparedList(number, peer, rows, rows, binding=Units(8))


def a_read(read_id, peer="p", list_id=0, *, slot=3, epoch=0, unit=0, **rest):
    pairs = UnitPairs((unit,), (unit,))
    return RankRead(read_id, peer, LeaseName(slot, epoch), (Part(list_id, pairs),), **rest)


@pytest.fixture
def bench():
    return Bench()


@pytest.fixture
def quick():
    """Posts end at once, and both peers were read before."""
    bench = Bench(at_once=True)
    for read_id, peer in ((91, "p"), (92, "q")):
        bench.post(read_id, peer=peer)
        bench.serve()
    assert bench.seen() == ["91 held", "92 held"]
    bench.backend.calls.clear()
    return bench


def test_a_step_posts_one_chunk_and_tells_whether_anything_changed(bench):
    assert not bench.core.step()
    bench.post(1, priority=-1)
    bench.post(2)
    assert bench.core.step()
    assert bench.backend.calls[-1] == ("post", 1)
    assert bench.core.step()
    assert bench.backend.calls[-1] == ("post", 2)
    assert not bench.core.step()
    assert bench.core.in_flight
    bench.land()
    assert bench.seen() == []
    assert bench.core.step()
    assert bench.backend.calls[-1] == ("fence", "p", 3, 3, 1)
    bench.backend.all_posted.rotate(1)
    bench.land()
    assert bench.seen() == ["1 held"]
    bench.serve()
    assert bench.seen() == ["2 held"]
    assert not bench.core.in_flight


def test_a_lost_peer_is_removed_when_its_last_read_has_ended(bench):
    for read_id in (1, 2, 3):
        bench.post(read_id)
        bench.core.step()
    bench.land(BackendError("peer_lost", "reset"))
    assert bench.seen() == ["1 peer_lost", "3 peer_lost", "PeerFailed peer_lost"]
    assert ("remove", "p") not in bench.backend.calls
    bench.core.handle(PeerAddress("p", {}, EPOCHS))
    assert bench.backend.calls.count(("add", "p")) == 1
    bench.land(BackendError("peer_lost", "reset"))
    assert bench.seen() == ["2 peer_lost", "PeerAdded"]
    assert bench.backend.calls[-2:] == [("remove", "p"), ("add", "p")]


def test_peers_that_share_an_exporter_are_lost_together(bench):
    for peer in ("a", "b"):
        bench.core.handle(PeerAddress(peer, {}, EPOCHS, agent="one worker"))
    bench.core.handle(PeerAddress("c", {}, EPOCHS, agent="another worker"))
    bench.core.handle(a_list(7, "a"))
    bench.seen()
    bench.post(1, peer="a", list_id=7)
    bench.core.step()
    bench.land(BackendError("peer_lost", "reset"))
    assert {event.peer for event in bench.events if isinstance(event, PeerFailed)} == {"a", "b"}


@pytest.mark.parametrize("words", [(True,), (False, True)], ids=["said at once", "said later"])
def test_a_backend_learns_that_a_removed_peer_never_comes_again(bench, words):
    for gone in words:
        bench.core.handle(RemovePeer("p", gone))
    assert bench.backend.calls[-1] == ("remove", "p", "gone")
    assert len([call for call in bench.backend.calls if call[0] == "remove"]) == len(words)


def test_a_gone_peer_is_forgotten_once_nothing_of_it_is_in_flight(bench):
    bench.post(1)
    bench.core.step()
    bench.core.handle(RemovePeer("p", gone=True))
    assert bench.backend.calls[-1] == ("post", 1)
    bench.land()
    assert bench.seen() == ["1 cancelled"]
    assert bench.backend.calls[-1] == ("remove", "p", "gone")


def test_removing_a_peer_that_waits_to_be_added_again_tells_so(bench):
    bench.post(1)
    bench.core.step()
    bench.core.handle(RemovePeer("p"))
    bench.core.handle(PeerAddress("p", {}, EPOCHS))
    bench.core.handle(RemovePeer("p"))
    assert bench.seen() == ["PeerFailed peer_lost"]
    bench.land()
    assert bench.seen() == ["1 cancelled"]
    assert bench.backend.calls.count(("add", "p")) == 1


def test_a_chunk_that_fails_leaves_the_window_of_its_peer(bench):
    bench.backend.chunk_descriptors = lambda _peer: 4
    for read_id, outcome in ((1, 0), (2, BackendError("bounds", "not there"))):
        bench.post(read_id)
        bench.core.step()
        pace = bench.core._lanes._lanes["p"].pace
        assert pace.bytes_in_flight == 1
        bench.land(outcome)
        assert pace.bytes_in_flight == 0
        bench.serve()
    assert bench.seen() == ["1 held", "2 bounds"]


def test_a_chunk_whose_post_failed_may_write_until_the_agents_are_gone(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.backend.raising["post"] = ZeroDivisionError("a defect")
        bench.post(1)
        bench.core.step()
        assert bench.seen() == ["PeerFailed transport_error", "PeerFailed transport_error"]
    bench.core.begin_close()
    assert bench.seen() == []
    bench.core.end_close()
    assert bench.seen() == ["1 transport_error"]


@pytest.mark.parametrize("call", ["check", "fence"])
def test_a_defect_while_posting_a_check_fails_all_reads_but_not_serving(bench, caplog, call):
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.post(1, check_first=call == "check")
        bench.post(2, peer="q")
        bench.backend.raising[call] = ZeroDivisionError("a defect")
        for _ in range(5):
            bench.core.step()
            while bench.backend.all_posted:
                bench.land()
    words = bench.seen()
    assert words.count("PeerFailed transport_error") == 2
    assert {"1 transport_error", "2 transport_error"} <= set(words)
    bench.backend.raising.clear()
    bench.core.handle(PeerAddress("p", {}, EPOCHS))
    assert bench.seen() == ["PeerAdded"]


def test_a_defect_while_polling_leaves_the_read_open_until_the_close(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.post(1)
        bench.core.step()
        bench.land(ZeroDivisionError("a defect"))
        assert bench.seen() == ["PeerFailed transport_error", "PeerFailed transport_error"]
        assert bench.core.in_flight
        assert not bench.core.step()
    bench.core.begin_close()
    assert bench.seen() == []
    bench.core.end_close()
    assert bench.backend.calls[-1] == ("close",)
    assert bench.seen() == ["1 transport_error"]


def test_a_defect_while_adding_or_admitting_ends_every_read_of_the_batch(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.backend.raising["add"] = ZeroDivisionError("a defect")
        bench.core.handle(PeerAddress("r", {}, EPOCHS))
        assert bench.seen()[0] == "PeerFailed transport_error"
        bench.backend.raising.clear()
        bench.core.handle(PeerAddress("p", {}, EPOCHS))
        bench.core.handle(a_list(0, "p"))
        bench.seen()
        broken = RankRead(3, "p", LeaseName(0, 0), (Part(0, "no pairs"),))
        bench.core.handle(PostReads((a_read(1, slot=99), a_read(2), broken, a_read(4))))
    told = [word for word in bench.seen() if not word.startswith("Peer")]
    assert sorted(told) == ["1 bounds", "2 transport_error", "3 transport_error", "4 transport_error"]


def test_close_reports_reads_in_flight_after_the_agents_are_destroyed(bench):
    order = []
    bench.backend.close = lambda: order.append("destroyed")
    bench.core._sink = lambda event: order.append(event.read_id)
    for read_id in (1, 2, 3):
        bench.post(read_id)
        bench.core.step()
    bench.core.handle(CancelReads((1,)))
    bench.core.begin_close()
    assert order == [3]
    bench.core.end_close()
    assert order == [3, "destroyed", 1, 2]


@pytest.fixture
def hung(bench):
    """One peer that was given up, with reads in flight, and one that is well, with one in flight and one waiting."""
    for read_id, peer in ((1, "p"), (2, "p"), (3, "q")):
        bench.post(read_id, peer=peer)
        bench.core.step()
    bench.core.handle(RemovePeer("p"))
    bench.post(4, peer="q")
    assert bench.seen() == []
    return bench


def test_a_reset_waits_for_healthy_peers_and_posts_no_chunk_meanwhile(hung):
    hung.core.handle(ResetReader())
    hung.core.handle(ResetReader())
    assert not hung.core.step()
    assert hung.backend.calls[-1] == ("post", 3)
    hung.backend.all_posted[2].outcome = 0
    assert hung.core.step()
    reset = hung.backend.calls.index(("reset",))
    assert hung.backend.calls[reset:] == [("reset",), ("add", "q"), ("prepare", 1), ("remove", "p")]
    assert hung.seen() == ["1 cancelled", "2 cancelled", "ResetDone 2"]
    assert not hung.core.in_flight


def test_what_has_not_arrived_in_time_is_lost_with_all_of_its_peer(hung):
    hung.core.handle(ResetReader())
    hung.now = RESET_DRAIN_S - 0.001
    assert not hung.core.step()
    hung.now = RESET_DRAIN_S
    assert hung.core.step()
    assert hung.seen() == [
        "1 cancelled",
        "2 cancelled",
        "3 peer_lost",
        "4 peer_lost",
        "PeerFailed peer_lost",
        "ResetDone 3",
    ]
    hung.core.handle(PeerAddress("q", {}, EPOCHS))
    assert hung.seen() == ["PeerAdded"]


def test_who_asks_for_a_reset_again_does_not_put_it_off(hung):
    hung.core.handle(ResetReader())
    hung.now = RESET_DRAIN_S - 0.001
    hung.core.handle(ResetReader())
    hung.now = RESET_DRAIN_S
    assert hung.core.step()
    assert hung.seen()[-1] == "ResetDone 3"


def test_a_hung_peer_waiting_to_be_added_is_added_to_the_next_reader(hung):
    hung.core.handle(PeerAddress("p", {}, EPOCHS))
    hung.core.handle(ResetReader())
    hung.backend.all_posted[2].outcome = 0
    hung.core.step()
    assert hung.seen()[-2:] == ["ResetDone 2", "PeerAdded"]


@pytest.mark.parametrize("polled", [0, 1])
def test_one_chunk_that_only_polling_shows_keeps_the_thread_polling(bench, polled):
    for read_id, peer in ((1, "p"), (2, "q")):
        bench.post(read_id, peer=peer)
        bench.core.step()
    for number, work in enumerate(bench.backend.all_posted):
        work.polled = number == polled
    assert bench.core.must_poll
    for work in bench.backend.all_posted:
        work.polled = False
    assert not bench.core.must_poll


def test_a_reader_with_nothing_in_flight_is_kept(bench):
    bench.core.handle(ResetReader())
    assert bench.seen() == ["ResetDone 0"]
    bench.post(1)
    bench.core.step()
    bench.core.handle(ResetReader())
    bench.land()
    assert bench.seen() == ["ResetDone 0"]
    bench.serve()
    assert bench.seen() == ["1 held"]
    assert ("reset",) not in bench.backend.calls


def test_what_nobody_can_ask_about_ends_with_a_reset(bench, caplog):
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        bench.backend.raising["post"] = ZeroDivisionError("a defect")
        bench.post(1)
        bench.core.step()
    bench.seen()
    bench.core.handle(ResetReader())
    assert bench.seen() == ["1 transport_error", "ResetDone 1"]


@pytest.mark.parametrize("call", ["reset", "add", "prepare"])
def test_a_peer_that_the_next_reader_does_not_take_is_lost(hung, call):
    hung.backend.raising[call] = BackendError("transport_error", "no")
    if call == "reset":
        hung.backend.raising["add"] = BackendError("transport_error", "no reader")
    hung.core.handle(ResetReader())
    hung.backend.all_posted[2].outcome = 0
    hung.core.step()
    assert hung.seen()[-4:] == ["3 peer_lost", "4 peer_lost", "PeerFailed peer_lost", "ResetDone 2"]
    assert not hung.core.in_flight


def test_closing_ends_a_reset(hung):
    hung.core.handle(ResetReader())
    hung.core.begin_close()
    hung.now = RESET_DRAIN_S
    assert not hung.core.step()
    hung.core.end_close()
    assert ("reset",) not in hung.backend.calls
    assert hung.seen()[-1] == "3 cancelled"


def test_a_defect_while_resetting_leaves_open_what_may_still_be_written(hung, caplog):
    hung.backend.raising["reset"] = ZeroDivisionError("a defect")
    hung.backend.all_posted[2].outcome = 0
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        hung.core.handle(ResetReader())
        hung.core.step()
    assert not [word for word in hung.seen() if word[0] in "12"]
    assert hung.core.in_flight


def test_a_read_is_inline_only_if_none_is_open_and_its_peer_is_known(bench):
    bench.backend.at_once = True
    bench.core.handle(PeerAddress("r", {}, EPOCHS))
    bench.core.handle(a_list(5, "r"))
    bench.seen()

    def fits(*reads, within_s=1.0):
        answers = bench.core.post_inline(reads, within_s)
        assert answers is None or [answer.verdict for answer in answers] == ["held"] * len(reads)
        return answers is not None

    first = a_read(1, "r", 5)
    assert not fits(first), "the first read of a connection connects, and takes as long as that does"
    bench.post(1, peer="r", list_id=5)
    bench.serve()
    assert bench.seen() == ["1 held"]
    assert fits(a_read(2, "r", 5))
    assert not fits(a_read(2, "r", 5), within_s=1e-9)
    assert not fits(a_read(2, "r", 99))
    assert not fits(a_read(2, "nobody", 5))
    assert not fits(a_read(2, "r", 5), a_read(3, "p")), "posts for it do not end at once"
    bench.post(4, peer="r", list_id=5)
    assert not fits(a_read(2, "r", 5)), "another one waits"
    bench.serve()
    bench.backend.at_once = False
    bench.post(5, peer="p")
    bench.core.step()
    assert not fits(a_read(2, "r", 5)), "something is in flight"
    bench.core.handle(ResetReader())
    bench.serve()
    bench.core.handle(RemovePeer("r"))
    assert not fits(a_read(2, "r", 5)), "it was removed"


def test_the_reads_of_a_batch_share_the_time_of_the_loop(quick):
    """Each fits alone; the loop waits for all of them."""
    cost = READ_S + POST_S
    within_s = 2.5 * cost
    assert quick.core.post_inline([a_read(each) for each in (1, 2, 3)], within_s) is None
    assert quick.backend.calls == []
    assert ends_of(quick.core.post_inline([a_read(each) for each in (1, 2)], within_s)) == {1: "held", 2: "held"}
    quick.core._peers["p"].costs.ratio = 1.0  # it has learned that nothing takes time
    many_parts = a_read(3)
    many_parts.parts = many_parts.parts * 3
    assert quick.core.post_inline([many_parts], READ_S + 2.5 * POST_S) is None
    assert ends_of(quick.core.post_inline([a_read(3)], READ_S + 2.5 * POST_S)) == {3: "held"}


def test_after_a_reset_the_first_read_of_each_peer_is_not_made_inline(quick):
    quick.backend.at_once = False
    quick.post(1)
    quick.core.step()
    quick.core.handle(RemovePeer("p"))
    quick.core.handle(ResetReader())
    assert "ResetDone 1" in quick.seen()
    quick.backend.at_once = True
    assert quick.core.post_inline([a_read(2, "q", 1)], 1.0) is None
    quick.post(3, peer="q")
    quick.serve()
    assert ends_of(quick.core.post_inline([a_read(4, "q", 1)], 1.0)) == {4: "held"}


def ends_of(answers):
    return {answer.read_id: answer.code or answer.verdict for answer in answers}


def test_a_read_alone_is_posted_and_fenced_part_by_part(quick):
    two_parts = a_read(1)
    two_parts.parts = two_parts.parts * 2
    (ended,) = quick.core.post_inline([two_parts], 1.0)
    assert quick.backend.calls == [("post", 1), ("post", 1), ("fence", "p", 3, 3, 1)]
    assert (ended.verdict, ended.chunks, ended.nbytes, ended.phase) == ("held", 2, 2, "fence")
    assert ends_of(quick.core.post_inline([a_read(2, epoch=5)], 1.0)) == {2: "early"}
    assert ends_of(quick.core.post_inline([a_read(3, slot=8)], 1.0)) == {3: "bounds"}
    assert ends_of(quick.core.post_inline([a_read(4, unit=8)], 1.0)) == {4: "bounds"}
    assert not quick.core.in_flight
    assert quick.seen() == []


@pytest.mark.parametrize("ended", range(3))
def test_a_read_alone_goes_on_by_steps_from_what_did_not_end_at_once(quick, ended):
    read = a_read(1)
    read.parts = read.parts * 2
    quick.backend.ends = ended
    assert quick.core.post_inline([read], 1.0) == []
    assert quick.core.in_flight
    assert len(quick.backend.calls) == max(2, ended + 1)  # a second chunk follows a first that flies
    assert quick.core.post_inline([a_read(2)], 1.0) is None
    quick.backend.ends = None
    quick.backend.at_once = False
    quick.serve()
    assert quick.seen() == ["1 held"]
    assert [call[0] for call in quick.backend.calls] == ["post", "post", "fence"]
    quick.backend.at_once = True
    assert ends_of(quick.core.post_inline([a_read(2)], 1.0)) == {2: "held"}


@pytest.mark.parametrize("call", ["post", "fence"])
def test_a_failure_inline_ends_its_reads_and_tells_the_sink_of_the_peer(quick, call):
    quick.backend.raising[call] = BackendError("peer_lost", "gone")
    for reads in ([a_read(1)], [a_read(2, "q", 1), a_read(3, "q", 1)]):
        answers = quick.core.post_inline(reads, 1.0)
        assert ends_of(answers) == dict.fromkeys((read.read_id for read in reads), "peer_lost")
        assert quick.seen() == ["PeerFailed peer_lost"]
        assert quick.backend.calls[-1] == ("remove", reads[0].peer)


@pytest.mark.parametrize("others", [[], [2]])
def test_a_defect_inline_answers_every_read(quick, caplog, others):
    quick.backend.raising["fence"] = ZeroDivisionError("a defect")
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        answers = quick.core.post_inline([a_read(1), *(a_read(read_id, unit=99) for read_id in others)], 1.0)
    assert ends_of(answers) == {1: "transport_error"} | dict.fromkeys(others, "bounds")
    assert quick.seen() == ["PeerFailed transport_error"] * 2


def test_what_a_defect_has_posted_inline_ends_with_the_agents(quick, caplog):
    quick.backend.raising["post"] = ZeroDivisionError("a defect")
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        assert quick.core.post_inline([a_read(1)], 1.0) == []
    assert quick.seen() == ["PeerFailed transport_error"] * 2
    assert quick.core.in_flight
    quick.core.begin_close()
    quick.core.end_close()
    assert quick.seen() == ["1 transport_error"]


@pytest.mark.parametrize(("shared_bytes_min", "learns"), [(1, False), (1 << 20, True)])
def test_a_shared_chunk_says_nothing_of_inline_posts(monkeypatch, shared_bytes_min, learns):
    monkeypatch.setattr("kvflow.reads.core.SHARED_BYTES_MIN", shared_bytes_min)
    bench = Bench(at_once=True)
    bench.core.handle(PostReads((a_read(1),)))
    bench.core.step()
    assert (bench.core._peers["p"].costs.ratio != 1.0) == learns
