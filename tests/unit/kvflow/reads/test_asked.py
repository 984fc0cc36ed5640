"""A read that was asked for inline and alone is answered without the lanes, which take over whatever is unusual."""

import math

import pytest

from kvflow.reads.backend import BackendError, Cause
from kvflow.reads.contract import CancelReads
from kvflow.reads.core import PostReads, RemovePeer, ResetReader

from .test_core import Bench, ScriptedWork, a_read


class AskedWork(ScriptedWork):
    """Its end shows at the descriptor of the backend, as over TCP."""

    polled = False


@pytest.fixture
def bench():
    """Posts are requests, and both peers were read before."""
    bench = Bench(at_once=True)
    for read_id, peer in ((91, "p"), (92, "q")):
        bench.post(read_id, peer=peer)
        bench.serve()
    bench.seen()
    bench.backend.calls.clear()
    bench.backend.at_once = False
    bench.backend.ends_at_once = lambda peer: True

    def fly(answer):
        bench.backend.all_posted.append(AskedWork(answer))
        return bench.backend.all_posted[-1]

    bench.backend._fly = fly
    return bench


def ask(bench, read_id=1, **how):
    """Ask for a read inline; return it."""
    read = a_read(read_id, **how)
    bench.now += 1.0
    assert bench.core.post_inline([read], 1.0) == []
    assert [call[0] for call in bench.backend.calls[-1:]] == ["post"]
    assert bench.core.in_flight
    assert not bench.core.must_poll
    return read


def fence_at_once(bench, epoch=0):
    bench.backend.post_check = lambda peer, first, last, reads, *, fence: [epoch]


@pytest.mark.parametrize(("epoch", "verdict"), [(0, "held"), (1, "stale")])
def test_it_is_answered_with_its_bytes_and_times(bench, epoch, verdict):
    fence_at_once(bench, epoch)
    read = ask(bench)
    assert (read.phase, read.since, read.outstanding.since) == ("wire", 1.0, 1.0)
    assert not bench.core._lanes.reads
    assert not bench.core.step()
    bench.now = 3.0
    bench.land()
    [ended] = bench.events
    assert (ended.read_id, ended.verdict, ended.nbytes, ended.chunks, ended.phase) == (1, verdict, 1, 1, "fence")
    assert (ended.started_at, ended.arrived_at, ended.fence_s) == (1.0, 3.0, 0.0)
    assert read.outstanding.since == math.inf
    assert not bench.core.in_flight
    bench.seen()
    ask(bench, 2)


def test_a_fence_that_flies_is_left_to_the_lanes(bench):
    ask(bench)
    bench.land()
    assert bench.backend.calls[-1][0] == "fence"
    bench.serve()
    assert bench.seen() == ["1 held"]


def test_its_chunk_is_traced(bench):
    fence_at_once(bench)
    read = a_read(1)
    read.arrived = []
    bench.now = 1.0
    assert bench.core.post_inline([read], 1.0) == []
    bench.now = 2.0
    bench.land()
    assert [(each.posted_at, each.arrived_at, each.read_bytes) for each in read.arrived] == [(1.0, 2.0, 1)]


UNUSUAL = {
    "another read": (lambda bench: bench.post(2, peer="q"), "1 held"),
    "a read of its peer": (lambda bench: bench.post(2), "1 held"),
    "it is cancelled": (lambda bench: bench.core.handle(CancelReads((1,))), "1 held"),
    "its peer is removed": (lambda bench: bench.core.handle(RemovePeer("p")), "1 cancelled"),
    "a reset": (lambda bench: bench.core.handle(ResetReader()), "1 held"),
    "the end": (lambda bench: bench.core.begin_close(), "1 cancelled"),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_whatever_comes_meanwhile_finds_it_in_the_lanes(bench, name):
    read = ask(bench)
    act, word = UNUSUAL[name]
    act(bench)
    assert read.outstanding.since < math.inf
    bench.serve()
    assert word in bench.seen()
    assert not bench.core.in_flight
    assert not bench.core._lanes.reads


def test_a_second_post_waits_for_the_thread(bench):
    ask(bench)
    assert bench.core.post_inline([a_read(2)], 1.0) is None
    bench.core.handle(PostReads((a_read(2),)))
    bench.serve()
    assert sorted(bench.seen()) == ["1 held", "2 held"]


def test_what_the_exporter_refuses_ends_it_alone(bench):
    ask(bench)
    bench.backend.all_posted[0].refused = {1: Cause("bounds", "refused")}
    bench.land()
    bench.serve()
    assert bench.seen() == ["1 bounds"]
    assert not bench.core.in_flight


def test_bytes_that_were_not_sent_are_read_again(bench):
    ask(bench)
    bench.backend.all_posted[0].unheld = {(3, 0)}
    bench.land()
    bench.serve()
    [ended] = [event for event in bench.events if event.read_id == 1]
    assert ended.unserved


def test_its_failure_is_that_of_its_peer(bench):
    ask(bench)
    bench.land(BackendError("peer_lost", "gone"))
    assert sorted(bench.seen()) == ["1 peer_lost", "PeerFailed peer_lost"]
    assert not bench.core.in_flight


@pytest.mark.parametrize("error", [BackendError("peer_lost", "gone"), ZeroDivisionError("a defect")], ids=repr)
def test_a_fence_that_cannot_be_posted_ends_it(bench, error):
    bench.backend.raising["fence"] = error
    ask(bench)
    bench.land()
    bench.serve()
    assert [word for word in bench.seen() if word.startswith("1 ")]
    assert not bench.core.in_flight
