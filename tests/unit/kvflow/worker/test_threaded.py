"""The same worker for an engine that is not asyncio: futures, and a list of what has ended and is quiescent."""

import logging
import threading
from collections import deque
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from kvflow.errors import (
    BlockIdsInvalid,
    ConfigInvalid,
    DeadlineExceeded,
    RequestUnknown,
    TicketInvalid,
    TransferCancelled,
    TransferFailed,
    WorkerClosed,
)
from kvflow.worker import threaded
from kvflow.worker.peers import PeerPool
from kvflow.worker.threaded import Finished, _FinishedQueue, run_worker

from .helpers import PATIENCE_S, cache_of, make_mortal
from .pulling import Faults, config, with_faults


def test_pull_release_and_what_has_finished():
    source, target = cache_of(), cache_of()
    source.views["b"][3].fill_(7.0)
    with run_worker(config(), source) as producer, run_worker(config("decode-0"), target) as consumer:
        waiting = producer.offer("request-1", [[3]], 4) and producer.wait_offer("request-1")
        ticket = producer.offer("request-2", [[3, 4]], 8)
        assert producer.finished() == []
        report = consumer.pull(ticket, [[5, 6]]).result(PATIENCE_S)
        assert bool((target.views["b"][5] == 7.0).all())
        assert producer.wait_offer("request-2").result(PATIENCE_S) == "released"
        assert producer.revoke("request-1")
        assert waiting.result(PATIENCE_S) == "revoked"
        ends = [(end.request_id, end.side, end.outcome) for end in producer.finished()]
        assert ends == [("request-2", "producer", "released"), ("request-1", "producer", "revoked")]
        (pulled,) = consumer.finished()
        assert (pulled.request_id, pulled.side, pulled.outcome, pulled.report) == (
            "request-2",
            "consumer",
            "completed",
            report,
        )
        assert producer.finished() == consumer.finished() == []
        assert (producer.snapshot().leases, consumer.snapshot().pulls) == (0, 0)


def test_an_engine_that_has_nothing_to_do_can_wait_for_an_end():
    """Also when an end that was told before has released whoever waits."""
    with run_worker(config(), cache_of()) as worker:
        for request_id in ("first", "second"):
            assert not worker.wait_finished(0.0)
            worker.offer(request_id, [[1]], 4)
            revoked = threading.Timer(0.0, worker.revoke, [request_id])
            revoked.start()
            assert worker.wait_finished(60.0)
            assert worker.wait_finished(0.0)  # nobody has drained it
            assert [end.request_id for end in worker.finished()] == [request_id]
            revoked.join()


def test_an_end_between_the_look_and_the_wait_of_a_caller_wakes_it():
    """Also if the caller before had waited for more ends."""
    queue, late, released = _FinishedQueue(), [Finished("late", "producer", "revoked")], []
    assert not queue.wait(0.0, at_least=2)

    class Ends(deque):
        def __len__(self):
            found = super().__len__()
            if late:
                queue.put(late.pop())
            return found

    lock = queue._arrived
    queue._ends = Ends()
    queue._arrived = SimpleNamespace(
        acquire=lock.acquire, locked=lock.locked, release=lambda: (lock.release(), released.append(True))
    )
    assert queue.wait(0.0, at_least=1)
    assert released == [True]


def test_an_engine_can_wait_for_several_ends_at_once():
    names = ["first", "second", "third"]
    with run_worker(config(), cache_of()) as worker:
        for request_id in names:
            worker.offer(request_id, [[1]], 4)
        worker.revoke("first")
        assert worker.wait_finished(60.0)
        assert not worker.wait_finished(0.0, at_least=2)
        revoked = threading.Timer(0.0, lambda: [worker.revoke(name) for name in names[1:]])
        revoked.start()
        assert worker.wait_finished(60.0, at_least=3)
        assert [end.request_id for end in worker.finished()] == names
        revoked.join()
        worker.offer("fourth", [[1]], 4)
        worker.revoke("fourth")
        assert worker.wait_finished(60.0)  # one is enough again


def test_the_end_of_a_pull_wakes_an_engine_that_waits_for_something_else():
    with run_worker(config(), cache_of()) as producer, run_worker(config("decode-0"), cache_of()) as consumer:
        woken = SimpleQueue()
        consumer.pull(producer.offer("r", [[3]], 4), [[5]]).add_done_callback(lambda _: woken.put(consumer.finished()))
        (end,) = woken.get(timeout=PATIENCE_S)
        assert (end.request_id, end.side, end.outcome) == ("r", "consumer", "completed")


def test_an_engine_asks_for_the_block_size_of_a_source():
    with run_worker(config(), cache_of()) as producer, run_worker(config("decode-0"), cache_of()) as consumer:
        manifest = consumer.read_manifest(producer.endpoint).result(PATIENCE_S)
        assert [group.block_tokens for group in manifest.groups] == [4]


def test_two_pulls_of_one_ticket_are_distinguished_by_the_callers_names():
    with run_worker(config(), cache_of()) as producer, run_worker(config("decode-0"), cache_of()) as consumer:
        ticket = producer.offer("r", [[3]], 4)
        consumer.pull(ticket, [[5]], local_request_id="first").result(PATIENCE_S)
        with pytest.raises(BlockIdsInvalid):
            consumer.pull(ticket, [[5, 5]], local_request_id="second").result(PATIENCE_S)
        ends = {end.local_request_id: (end.request_id, end.outcome) for end in consumer.finished()}
        assert ends == {"first": ("r", "completed"), "second": ("r", "failed")}


def test_a_pull_that_ends_with_an_error_of_anybody_else_is_an_entry(monkeypatch):
    def fail(self, ticket):
        raise ZeroDivisionError("nobody foresaw it")

    monkeypatch.setattr(PeerPool, "route", fail)
    with run_worker(config(), cache_of()) as worker:
        future = worker.pull(worker.offer("r", [[3]], 4), [[5]])
        error = future.exception(PATIENCE_S)
        (end,) = worker.finished()
    assert (end.request_id, end.outcome, end.error) == ("r", "failed", error)
    assert type(error) is TransferFailed
    assert "ZeroDivisionError: nobody foresaw it" in str(error)
    assert type(error.__cause__) is ZeroDivisionError


@contextmanager
def workers_with_faults(monkeypatch, **settings):
    """A producer, and a consumer whose data plane fails as the test says."""
    faults = Faults()
    monkeypatch.setattr(threaded, "open_worker", partial(threaded.open_worker, environment=with_faults(faults, 0.0)))
    with (
        run_worker(config(), cache_of(16)) as producer,
        run_worker(config("decode-0", **settings), cache_of(16)) as consumer,
    ):
        try:
            yield producer, consumer, faults
        finally:
            faults.heal()


@pytest.mark.parametrize("how", ["cancelled", "late"])
def test_a_pull_that_has_failed_is_told_when_its_blocks_may_be_reused(monkeypatch, how):
    with workers_with_faults(monkeypatch, wire_s=0.2 if how == "late" else 30.0) as (producer, consumer, faults):
        faults.hung.add(0)
        future = consumer.pull(producer.offer("r", [[3]], 4), [[5]])
        assert faults.busy.acquire(timeout=PATIENCE_S)
        if how == "cancelled":
            assert future.cancel()
        while not consumer.snapshot().quarantined:
            pass  # until the worker's loop has had its turns
        assert consumer.finished() == []
        assert future.done() == (how == "cancelled")
        faults.heal()
        assert consumer.wait_finished(PATIENCE_S)
        (end,) = consumer.finished()
        kinds = {"cancelled": TransferCancelled, "late": DeadlineExceeded}
        assert (end.request_id, end.outcome, type(end.error)) == ("r", "failed", kinds[how])
        assert consumer.snapshot().quarantined == ()
        with pytest.raises(CancelledError if how == "cancelled" else DeadlineExceeded):
            future.result(PATIENCE_S)


def test_a_batch_is_started_together_and_each_of_its_ends_is_told(monkeypatch):
    with workers_with_faults(monkeypatch) as (producer, consumer, faults):
        consumer.pull(producer.offer("first", [[0]], 4), [[0]]).result(PATIENCE_S)
        assert [end.request_id for end in consumer.finished()] == ["first"]
        faults.calls.clear()
        items = [(producer.offer(f"r{at}", [[at]], 4), [[at]], f"ours {at}") for at in range(1, 7)]
        futures = consumer.pull_many(items, priority=1)
        reports = [future.result(PATIENCE_S) for future in futures]
        assert [report.request_id for report in reports] == [f"r{at}" for at in range(1, 7)]
        assert [len(reads) for reads in faults.batches] == [6]
        ends = consumer.finished()
        assert sorted((end.local_request_id, end.outcome) for end in ends) == [
            (f"ours {at}", "completed") for at in range(1, 7)
        ]
        assert {end.request_id: end.report for end in ends} == {report.request_id: report for report in reports}


def test_a_batch_that_its_worker_cannot_take_leaves_a_record_for_each_pull(caplog):
    with run_worker(config(), cache_of()) as producer:
        items = [(producer.offer(name, [[3]], 4), [[5]]) for name in ("a", "b")]
        with run_worker(config("decode-0"), cache_of()) as consumer:
            pass
    caplog.clear()
    with pytest.raises(WorkerClosed), caplog.at_level(logging.INFO, "kvflow"):
        consumer.pull_many(items)
    refused = [record.msg for record in caplog.records if "worker_closed" in str(record.msg)]
    assert [record["request_id"] for record in refused] == ["a", "b"]
    assert [record["level"] for record in refused] == ["warning", "info"]  # one failure, told once


def test_every_pull_is_reported_however_early_it_is_canceled_or_closed():
    calls = 40
    with run_worker(config(), cache_of()) as producer:
        tickets = [producer.offer(f"r{index}", [[3]], 4) for index in range(calls)]
        with run_worker(config("decode-0"), cache_of()) as consumer:
            futures = [consumer.pull(ticket, [[5]]) for ticket in tickets]
            for future in futures[::2]:
                future.cancel()
        assert all(future.done() for future in futures), "whoever waits for one would wait for ever"
    ended = [end.request_id for end in consumer.finished()]
    assert sorted(ended) == sorted(ticket.request_id for ticket in tickets)


def test_a_ticket_of_a_stranger_is_not_kept():
    stranger = config(cluster_secret="another secret of the tests")
    with run_worker(stranger, cache_of()) as producer, run_worker(config("decode-0"), cache_of()) as consumer:
        held = consumer.hold(producer.offer("r", [[3]], 4))
        with pytest.raises(TicketInvalid):
            held.result(PATIENCE_S)


def test_a_ticket_can_be_given_back_unread():
    with run_worker(config(), cache_of()) as producer, run_worker(config("decode-0"), cache_of()) as consumer:
        ticket = producer.offer("r", [[3]], 4)
        consumer.release(ticket).result(PATIENCE_S)
        assert producer.wait_offer("r").result(PATIENCE_S) == "released"
        with pytest.raises(RequestUnknown):
            producer.wait_offer("never offered").result(PATIENCE_S)


def test_what_cannot_be_opened_raises_where_it_was_asked_for():
    with pytest.raises(ConfigInvalid), run_worker(config(rank=9), cache_of()):
        pytest.fail("it runs")


def test_what_is_raised_inside_comes_out_and_the_thread_ends():
    before = threading.active_count()
    with pytest.raises(KeyError), run_worker(config(), cache_of()):
        raise KeyError
    assert threading.active_count() <= before


def test_an_interruption_while_it_opens_ends_it(monkeypatch):
    class Interrupted(Future):
        def result(self, timeout=None):
            raise KeyboardInterrupt

    seen, before = [], set(threading.enumerate())

    def engine():
        try:
            with run_worker(config(), cache_of()):
                pytest.fail("it runs")
        except KeyboardInterrupt as interruption:
            seen.append(interruption)

    monkeypatch.setattr(threaded, "Future", Interrupted)
    thread = threading.Thread(target=engine, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert seen, "it hangs"
    assert set(threading.enumerate()) <= before


def test_a_loop_that_cannot_be_made_raises_where_it_was_asked_for(monkeypatch):
    def run(living):
        living.close()
        raise OSError("too many open files")

    monkeypatch.setattr("kvflow.worker.threaded.uvloop.run", run)
    with pytest.raises(OSError, match="too many"), run_worker(config(), cache_of()):
        pytest.fail("it runs")


def test_what_a_loop_died_of_is_raised_on_leaving(monkeypatch):
    died = make_mortal(monkeypatch)
    with pytest.raises(ExceptionGroup) as caught, run_worker(config(), cache_of()):
        assert died.wait(PATIENCE_S)
    assert caught.group_contains(ZeroDivisionError, match="what it died of")


def test_a_closed_worker_refuses_by_its_own_error():
    with run_worker(config(), cache_of()) as producer:
        ticket = producer.offer("r", [[3]], 4)
    for call in (
        lambda: producer.pull(ticket, [[5]]),
        lambda: producer.release(ticket),
        lambda: producer.wait_offer("r"),
        producer.snapshot,
        lambda: producer.offer("s", [[3]], 4),
    ):
        with pytest.raises(WorkerClosed):
            call()
    assert not producer.revoke("r")
    assert [(end.request_id, end.outcome) for end in producer.finished()] == [("r", "revoked")]
