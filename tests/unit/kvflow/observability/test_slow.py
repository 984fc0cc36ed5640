"""Slow pulls are found by a limit and by the usual rate of their producer, and warnings are few."""

import asyncio

import pytest

import kvflow
from kvflow.errors import ConfigInvalid
from kvflow.events import OnlyEvents, TransferCompleted, TransferSlow
from kvflow.observability.slow import MOVING_S_MIN, PAUSE_S, PEERS_MAX, USUAL_MIN, SlowTransfers
from kvflow.report import TransferReport

from .test_pages import PATIENCE_S, cache, config

MIB = 1 << 20


class Watched:
    """A detector, its clock, and the events that it has reported."""

    def __init__(self, slow_s=None, factor=None):
        self.now, self.events = 100.0, []
        self.detector = SlowTransfers(slow_s, factor, lambda: self.now)
        self.detector.report = self.events.append
        (self.hook,) = self.detector.hooks()

    def pull(self, wire_s, *, nbytes=64 * MIB, engine="p", total_s=None):
        timings_s = {"queue": 0.001, "post": 0.0, "wire": wire_s, "total": total_s or wire_s + 0.001}
        report = TransferReport(request_id="r", nbytes=nbytes, descriptors=1, reads=1, timings_s=timings_s)
        self.hook(TransferCompleted(1, "r", report, "mine", engine))


def test_a_pull_above_the_limit_is_slow():
    watched = Watched(slow_s=2.0)
    watched.pull(1.9)
    assert watched.events == []
    watched.pull(0.1, total_s=2.5)
    (event,) = watched.events
    assert (event.setting, event.remote_engine_id, event.total_s) == ("slow_transfer_s", "p", 2.5)
    assert (event.longest_phase, event.local_request_id, event.usual_bytes_per_s) == ("wire", "mine", 0.0)


def test_a_pull_much_slower_than_usual_is_slow():
    watched = Watched(factor=10)
    for _ in range(USUAL_MIN):
        watched.pull(0.01)
    watched.pull(0.09)
    assert watched.events == []
    watched.pull(0.2)
    (event,) = watched.events
    assert event.setting == "slow_transfer_factor"
    assert event.bytes_per_s == pytest.approx(64 * MIB / 0.2)
    assert event.usual_bytes_per_s == pytest.approx(64 * MIB / 0.01, rel=0.1)


def test_a_few_pulls_make_no_rate_usual():
    watched = Watched(factor=10)
    for _ in range(USUAL_MIN - 1):
        watched.pull(0.01)
    watched.pull(5.0)
    assert watched.events == []


def test_short_pulls_are_not_compared_with_long_ones():
    watched = Watched(factor=10)
    for _ in range(2 * USUAL_MIN):
        watched.pull(0.01, nbytes=1024 * MIB)
        watched.pull(0.1, nbytes=MIB)
    assert watched.events == []


def test_a_quick_pull_is_never_compared():
    watched = Watched(factor=2)
    for _ in range(USUAL_MIN):
        watched.pull(0.0001)
    watched.pull(MOVING_S_MIN)
    assert watched.events == []


def test_what_stays_slow_becomes_usual():
    watched = Watched(factor=10)
    for _ in range(100):
        watched.pull(0.01)
    for _ in range(100):
        watched.now += PAUSE_S
        watched.pull(0.11)
    assert 1 <= len(watched.events) <= 40


def test_warnings_of_one_producer_are_few_and_count_the_others():
    watched = Watched(slow_s=1.0)
    for _ in range(5):
        watched.pull(2.0)
    watched.pull(2.0, engine="q")
    assert [event.remote_engine_id for event in watched.events] == ["p", "q"]
    watched.now += PAUSE_S
    watched.pull(2.0)
    assert watched.events[-1].omitted == 4


def test_the_state_is_bounded():
    watched = Watched(slow_s=1.0, factor=10)
    for number in range(3 * PEERS_MAX):
        for power in range(60):
            watched.pull(0.1, engine=f"engine-{number}", nbytes=1 << power)
    producers = watched.detector._producers
    assert len(producers) == PEERS_MAX + 1
    assert max(len(producer.usual) for producer in producers.values()) <= 31


def test_without_limits_no_events_are_asked_for():
    assert SlowTransfers(None, None, lambda: 0.0).hooks() == []


def test_an_empty_pull_is_not_slow():
    watched = Watched(factor=10)
    for _ in range(2 * USUAL_MIN):
        watched.pull(0.0, nbytes=0)
    assert watched.events == []


async def test_a_worker_warns_of_slow_pulls(caplog):
    slow = []
    settings = config("decode-0", slow_transfer_s=1e-9, slow_transfer_factor=10.0)
    async with (
        asyncio.timeout(PATIENCE_S),
        kvflow.open_worker(config("prefill-0"), cache()) as producer,
        kvflow.open_worker(settings, cache(), hooks=[OnlyEvents(TransferSlow, slow.append)]) as consumer,
    ):
        await consumer.pull(producer.offer("request-1", [[0, 1]], num_tokens=32), [[4, 5]])
    (event,) = slow
    assert (event.request_id, event.remote_engine_id) == ("request-1", "prefill-0")
    (record,) = [record for record in caplog.records if record.msg["event"] == "transfer.slow"]
    assert record.levelname == "WARNING"
    assert "explain-a-transfer" in str(record.msg)


@pytest.mark.parametrize(
    "settings", [{"slow_transfer_s": 0}, {"slow_transfer_factor": 1}, {"slow_transfer_factor": 2000}]
)
def test_limits_that_mean_nothing_are_refused(settings):
    with pytest.raises(ConfigInvalid, match=next(iter(settings))):
        config("p", **settings).check()
