"""A threaded worker that is suspended refuses by its own error, and lives again under the same settings."""

import socket
import threading

import pytest

from kvflow.errors import ConfigInvalid, SpecInvalid, TransferCancelled, TransferFailed, WorkerClosed, WorkerSuspended
from kvflow.events import TransferRetried
from kvflow.worker import threaded
from kvflow.worker.threaded import run_worker
from tests.ports import free_port

from .helpers import PATIENCE_S, cache_of, make_mortal
from .pulling import config, not_admitted

KEYS = {"private_key": "01" * 32, "allowed_keys": ("02" * 32,)}


class Broken:
    """A cache that cannot be described."""

    bytes_per_block = 0

    def manifest(self):
        raise SpecInvalid("its memory is not there")


@pytest.fixture
def worker():
    with run_worker(config(), cache_of()) as worker:
        yield worker


def test_a_suspended_worker_refuses_and_tells_only_of_what_was(worker):
    ticket = worker.offer("r", [[3]], 4)
    endpoint = worker.endpoint
    worker.suspend()
    for call in (
        lambda: worker.offer("s", [[3]], 4),
        lambda: worker.offer_when_possible("s", [[3]], 4),
        lambda: worker.pull(ticket, [[5]]),
        lambda: worker.hold(ticket),
        lambda: worker.release(ticket),
        lambda: worker.wait_offer("r"),
        lambda: worker.drain(1.0),
        lambda: worker.rank_address,
        worker.snapshot,
    ):
        with pytest.raises(WorkerSuspended) as caught:
            call()
        assert caught.value.code == "worker_suspended"
        assert caught.value.remedy
    assert worker.endpoint == endpoint
    assert not worker.revoke("r")
    assert [(end.request_id, end.outcome) for end in worker.finished()] == [("r", "revoked")]


def test_whoever_waits_for_something_hears_that_it_has_ended(worker):
    held = worker.offer("held", [[3]], 4) and worker.wait_offer("held")
    retried = threading.Event()

    def notice(event):
        if isinstance(event, TransferRetried):
            retried.set()

    with run_worker(config("decode-0"), cache_of(), hooks=[notice]) as consumer:
        pull = consumer.pull(not_admitted(worker)[0], [[5]])
        assert retried.wait(PATIENCE_S)
        consumer.suspend()
        with pytest.raises(TransferCancelled):
            pull.result(PATIENCE_S)
        assert [(end.request_id, end.outcome) for end in consumer.finished()] == [("r", "failed")]
    worker.suspend()
    assert held.result(PATIENCE_S) == "revoked"


def test_a_resumed_worker_is_another_incarnation_and_serves_other_memory(worker):
    before = worker.rank_address
    old = worker.offer("old", [[3]], 4)
    cache = cache_of()
    cache.views["b"][3].fill_(7.0)
    worker.suspend()
    worker.resume(cache)
    assert worker.rank_address.incarnation != before.incarnation
    target = cache_of()
    with run_worker(config("decode-0", connect_s=5.0), target) as consumer:  # nobody listens where the old one did
        with pytest.raises(TransferFailed):
            consumer.pull(old, [[5]]).result(PATIENCE_S)
        consumer.pull(worker.offer("new", [[3]], 4), [[5]]).result(PATIENCE_S)
    assert bool((target.views["b"][5] == 7.0).all())


def test_to_suspend_twice_and_to_resume_what_runs(worker):
    worker.suspend()
    worker.suspend()
    worker.resume(cache_of())
    ticket = worker.offer("r", [[3]], 4)
    first = worker.rank_address
    worker.resume(cache_of())
    assert worker.rank_address.incarnation != first.incarnation
    assert not worker.revoke(ticket.request_id)


def test_what_cannot_be_resumed_stays_suspended(worker):
    worker.suspend()
    with pytest.raises(SpecInvalid, match="its memory is not there"):
        worker.resume(Broken())
    with pytest.raises(WorkerSuspended):
        worker.snapshot()
    worker.resume(cache_of())
    assert worker.snapshot().leases == 0


def test_it_comes_back_where_it_was_or_waits_until_it_can():
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with run_worker(config(bind=endpoint), cache_of()) as worker:
        worker.suspend()
        with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))):
            with pytest.raises(ConfigInvalid, match="already in use"):
                worker.resume(cache_of())
            with pytest.raises(WorkerSuspended):
                worker.snapshot()
        worker.resume(cache_of())
        assert worker.endpoint == endpoint
        assert worker.rank_address.endpoint == endpoint


def test_a_closed_worker_is_neither_suspended_nor_resumed(worker):
    worker.close()
    for call in (worker.suspend, lambda: worker.resume(cache_of()), worker.snapshot):
        with pytest.raises(WorkerClosed) as caught:
            call()
        assert caught.value.code == "worker_closed"


@pytest.mark.parametrize("resumed", [False, True])
def test_no_thread_is_left(resumed):
    before = threading.active_count()
    with run_worker(config(), cache_of()) as worker:
        worker.suspend()
        assert threading.active_count() <= before
        if resumed:
            worker.resume(cache_of())
    assert threading.active_count() <= before


def test_allowed_keys_are_those_that_were_given_last():
    given = "03" * 32
    with run_worker(config(**KEYS), cache_of()) as worker:
        worker.allow_keys([given])
        worker.resume(cache_of())
        assert allowed(worker, KEYS["allowed_keys"][0], given) == [False, True]
        worker.suspend()
        with pytest.raises(ConfigInvalid):
            worker.allow_keys(["no key"])
        worker.allow_keys(["04" * 32])
        worker.resume(cache_of())
        assert allowed(worker, given, "04" * 32) == [False, True]


def allowed(worker, *keys):
    """Tell of each key whether the worker's present life allows it."""
    return [key in worker._thread.worker._shared.local.security.allowed for key in keys]


def test_the_error_of_a_loop_is_reported_once_and_it_can_resume(monkeypatch):
    open_worker, died = threaded.open_worker, make_mortal(monkeypatch)
    with run_worker(config(), cache_of()) as worker:
        assert died.wait(PATIENCE_S)
        with pytest.raises(ExceptionGroup) as caught:
            worker.suspend()
        assert caught.group_contains(ZeroDivisionError, match="what it died of")
        monkeypatch.setattr(threaded, "open_worker", open_worker)
        worker.resume(cache_of())
        assert worker.snapshot().leases == 0
