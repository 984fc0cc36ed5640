"""Hooks take typed events of real workers. Those that kvflow could not call are refused before anything starts."""

import functools

import pytest

import kvflow
from kvflow.errors import ConfigInvalid
from kvflow.events import LeaseEnded, OnlyEvents, TransferCompleted, WorkerOpened, WorkerStopped
from kvflow.observability.logs import check_hooks
from tests.helpers.loops import looped

from .test_pages import cache, config


async def takes_time(_event):
    """Take an event."""


class TakesTime:
    """A hook whose call is a coroutine."""

    async def __call__(self, event):
        """Take an event."""


@looped(
    "hook",
    [
        takes_time,
        functools.partial(takes_time),
        TakesTime(),
        TakesTime().__call__,
        OnlyEvents(TransferCompleted, takes_time),
    ],
    ids=["function", "partial", "object", "method", "only"],
)
def test_coroutine_functions_are_refused_as_hooks(hook):
    with pytest.raises(ConfigInvalid, match="is a coroutine function, which kvflow never awaits"):
        check_hooks([print, hook])


def test_hooks_must_be_callable():
    check_hooks([print, OnlyEvents(TransferCompleted, print)])
    with pytest.raises(ConfigInvalid, match="hook 'print' cannot be called"):
        check_hooks(["print"])


class NeverAsked:
    """A cache that must not be registered."""

    def manifest(self):
        """Fail."""
        raise AssertionError("the hooks were not checked first")


async def test_workers_refuse_coroutine_functions_before_they_start():
    with pytest.raises(ConfigInvalid, match="coroutine function"):
        async with kvflow.open_worker(config("prefill-0"), NeverAsked(), hooks=[takes_time]):
            pass
    with (
        pytest.raises(ConfigInvalid, match="coroutine function"),
        kvflow.run_worker(config("prefill-0"), NeverAsked(), hooks=[takes_time]),
    ):
        pass


async def test_hooks_take_the_events_of_their_worker():
    produced, consumed, completed = [], [], []
    only = OnlyEvents(TransferCompleted, completed.append)
    async with (
        kvflow.open_worker(config("prefill-0"), cache(), hooks=[produced.append]) as producer,
        kvflow.open_worker(config("decode-0"), cache(), hooks=[only, consumed.append]) as consumer,
    ):
        ticket = producer.offer("request-1", [[0, 1]], num_tokens=32)
        report = await consumer.pull(ticket, [[4, 5]], local_request_id="mine")
        assert await producer.wait_offer("request-1") == "released"
    assert [event.report for event in completed] == [report]
    assert completed[0] == TransferCompleted(1, "request-1", report, "mine", "prefill-0")
    assert completed[0] in consumed
    assert type(produced[0]) is type(consumed[0]) is WorkerOpened
    assert type(produced[-1]) is type(consumed[-1]) is WorkerStopped
    (ended,) = [event for event in produced if isinstance(event, LeaseEnded)]
    assert (ended.request_id, ended.outcome) == ("request-1", "released")
