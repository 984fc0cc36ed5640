"""``run_worker``: the same worker for an engine that is not asyncio."""

import concurrent.futures
import threading
import time

import pytest

import kvflow
from kvflow import errors
from kvflow.events import PullFailed
from kvflow.worker.threaded import Finished

from .producing import configured
from .shapes import Shape, write, wrong

BLOCKS = [[0, 1], [2, 3]]
OTHER_BLOCKS = [[4, 5], [6, 7]]
PATIENCE_S = 60.0
HASTE = (errors.DeadlineExceeded, errors.PeerLost)
"""How a pull ends whose budget is used up, and the next ones if its peer is left alone for a moment."""


class Pair:
    """A producer and a consumer of one engine process, each on a thread of its own."""

    def __init__(self, source, producer, target, consumer):
        self.source = source
        self.producer = producer
        self.target = target
        self.consumer = consumer

    def offer(self, request, blocks=BLOCKS):
        write(self.source, request, blocks, 8)
        return self.producer.offer(request, blocks, 8)

    def works(self, request="good", blocks=OTHER_BLOCKS):
        self.consumer.pull(self.offer(request, blocks), blocks).result(PATIENCE_S)
        assert wrong(self.target, request, blocks, 8) == []

    def works_at_last(self):
        """Pull again after a deadline, which is shorter than a machine may stall."""
        ticket, deadline = self.offer("good"), time.monotonic() + PATIENCE_S
        while isinstance(error := self.consumer.pull(ticket, BLOCKS).exception(PATIENCE_S), HASTE):
            assert time.monotonic() < deadline, error
        assert error is None
        assert wrong(self.target, "good", BLOCKS, 8) == []


class Notice:
    """A hook that can be waited on."""

    def __init__(self):
        self.failed = threading.Event()

    def __call__(self, event):
        if isinstance(event, PullFailed):
            self.failed.set()


@pytest.fixture
def notice():
    return Notice()


@pytest.fixture(params=["loopback", pytest.param("nixl", marks=pytest.mark.nixl)])
def pair(request, notice):
    yield from opened(request.param, notice)


@pytest.fixture
def near_pair(notice):
    yield from opened("loopback", notice)


@pytest.fixture
def hasty_pair(notice):
    """A pair whose consumer waits for bytes for a short time only."""
    yield from opened("loopback", notice, wire_s=0.2)


def opened(transport, notice, **settings):
    source, target = Shape().build(), Shape(layout="LBNHC", kv="split").build()
    with (
        kvflow.run_worker(configured("prefill-0", transport=transport), source) as producer,
        kvflow.run_worker(configured("decode-0", transport=transport, **settings), target, hooks=[notice]) as consumer,
    ):
        yield Pair(source, producer, target, consumer)


def take(worker, count):
    """Poll ``finished`` as an engine does between its steps."""
    taken = []
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        taken += worker.finished()
        if len(taken) >= count:
            break
        pause.wait(0.005)
    return taken


def test_pull_and_finished(pair):
    ticket = pair.offer("r")
    report = pair.consumer.pull(ticket, BLOCKS).result(PATIENCE_S)
    assert wrong(pair.target, "r", BLOCKS, 8) == []
    assert pair.producer.wait_offer("r").result(PATIENCE_S) == "released"
    assert take(pair.consumer, 1) == [Finished("r", "consumer", "completed", report=report)]
    assert take(pair.producer, 1) == [Finished("r", "producer", "released")]
    assert pair.consumer.finished() == []

    pair.offer("revoked")
    assert pair.producer.revoke("revoked") is True
    assert take(pair.producer, 1) == [Finished("revoked", "producer", "revoked")]
    pair.consumer.release(pair.offer("given back")).result(PATIENCE_S)
    assert take(pair.producer, 1) == [Finished("given back", "producer", "released")]
    assert pair.producer.snapshot().leases == 0


def test_errors_come_through_the_future_and_finished(pair):
    ticket = pair.offer("r")
    pair.producer.revoke("r")
    future = pair.consumer.pull(ticket, BLOCKS)
    with pytest.raises(errors.StaleLease):
        future.result(PATIENCE_S)
    (end,) = take(pair.consumer, 1)
    assert (end.request_id, end.side, end.outcome) == ("r", "consumer", "failed")
    assert end.error is future.exception()
    with pytest.raises(errors.BlockIdsInvalid):
        pair.consumer.pull(pair.offer("again"), [[0, 0], [1, 2]]).result(PATIENCE_S)
    pair.works()


def test_a_failure_is_reported_only_when_nothing_writes_any_more(hasty_pair, gate, notice):
    future = hasty_pair.consumer.pull(hasty_pair.offer("r"), BLOCKS)
    assert notice.failed.wait(PATIENCE_S)
    assert hasty_pair.consumer.snapshot().quarantined  # also a round trip through the loop
    assert not future.done()
    assert hasty_pair.consumer.finished() == []
    gate.open()
    with pytest.raises(errors.DeadlineExceeded):
        future.result(PATIENCE_S)
    (end,) = take(hasty_pair.consumer, 1)
    assert end.outcome == "failed"
    assert hasty_pair.consumer.snapshot().quarantined == ()
    hasty_pair.works_at_last()


def test_a_cancelled_pull_is_finished_when_nothing_writes_any_more(near_pair, gate, notice):
    future = near_pair.consumer.pull(near_pair.offer("r"), BLOCKS)
    assert gate.reached.wait(PATIENCE_S)
    assert future.cancel()
    assert notice.failed.wait(PATIENCE_S)
    assert near_pair.consumer.snapshot().quarantined
    assert near_pair.consumer.finished() == []
    gate.open()
    (end,) = take(near_pair.consumer, 1)
    assert (end.request_id, end.side, end.outcome) == ("r", "consumer", "failed")
    assert isinstance(end.error, errors.TransferCancelled)
    assert near_pair.consumer.snapshot().quarantined == ()
    near_pair.works(blocks=BLOCKS)


def test_leaving_with_pulls_open(gate, notice):
    pairs = opened("loopback", notice)
    pair = next(pairs)
    future = pair.consumer.pull(pair.offer("r"), BLOCKS)
    assert gate.reached.wait(PATIENCE_S)
    threading.Thread(target=lambda: notice.failed.wait(PATIENCE_S) and gate.open()).start()
    with pytest.raises(StopIteration):
        next(pairs)
    with pytest.raises(errors.TransferCancelled):
        future.result(PATIENCE_S)
    (end,) = pair.consumer.finished()
    assert end.outcome == "failed"


def test_after_leaving_everything_says_so(notice):
    pairs = opened("loopback", notice)
    pair = next(pairs)
    ticket = pair.offer("r")
    with pytest.raises(StopIteration):
        next(pairs)
    for call in (
        lambda: pair.consumer.pull(ticket, BLOCKS).result(PATIENCE_S),
        lambda: pair.consumer.release(ticket).result(PATIENCE_S),
        lambda: pair.producer.wait_offer("r").result(PATIENCE_S),
        pair.consumer.snapshot,
        lambda: pair.producer.offer("another", BLOCKS, 8),
    ):
        with pytest.raises(errors.WorkerClosed):
            call()
    assert pair.producer.revoke("r") is False
    assert pair.producer.finished() == [Finished("r", "producer", "revoked")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvflow")]


def test_offers_from_many_threads(pair):
    """The engine's threads offer and revoke while another pulls."""
    pair.works()

    def engine_thread(number):
        for turn in range(25):
            request = f"t{number}/{turn}"
            pair.producer.offer(request, BLOCKS, 8)
            assert pair.producer.revoke(request)

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        busy = [threads.submit(engine_thread, number) for number in range(4)]
        for number in range(25):
            pair.works(f"pulled {number}")
        for future in busy:
            future.result(PATIENCE_S)
    assert pair.producer.wait_offer(f"pulled {number}").result(PATIENCE_S) == "released"
    assert pair.producer.snapshot().leases == 0


def test_an_error_on_opening_is_raised_here():
    cache = Shape().build()
    with pytest.raises(errors.ConfigInvalid), kvflow.run_worker(configured("x", cluster_secret="short"), cache):
        pytest.fail("a short secret was accepted")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvflow")]
