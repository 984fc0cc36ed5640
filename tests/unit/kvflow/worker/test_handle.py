"""A handle of a pull: awaited by any number of tasks, cancelled, asked, and forgotten."""

import asyncio
import gc
import weakref

import pytest

from kvflow.errors import StaleLease, TransferCancelled
from kvflow.transfer.report import TransferReport
from kvflow.worker.handle import PullHandle

from .helpers import PATIENCE_S, futures_left

REPORT = TransferReport(request_id="r", nbytes=1, descriptors=1, reads=1, timings_s={})


class Book:
    """What the worker does for a handle."""

    def __init__(self):
        self.cancelled = []
        self.handle = PullHandle(7, self.cancelled.append)


@pytest.fixture
async def book():
    return Book()


async def waiting(awaitable):
    """Start to await something."""
    task = asyncio.ensure_future(awaitable)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_pull_that_is_open_has_neither_result_nor_error(book):
    assert not book.handle.done()
    for ask in (book.handle.result, book.handle.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()
    assert repr(book.handle) == "<PullHandle 7: open>"


async def test_every_task_that_awaits_a_handle_gets_its_report(book):
    tasks = [await waiting(book.handle) for _ in range(3)]
    book.handle.complete(REPORT)
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*tasks) == [REPORT] * 3
        assert await book.handle is REPORT
        await book.handle.quiesced()
    assert (book.handle.done(), book.handle.exception()) == (True, None)
    assert repr(book.handle) == "<PullHandle 7: completed>"
    assert book.cancelled == []


async def test_a_failure_is_raised_as_often_as_it_is_awaited_and_quiescence_comes_later(book):
    task, quiet = await waiting(book.handle), await waiting(book.handle.quiesced())
    error = TransferCancelled("given up")
    book.handle.fail(error)
    for each in (task, book.handle, book.handle):
        with pytest.raises(TransferCancelled):
            await each
    assert book.handle.exception() is error
    assert repr(book.handle) == "<PullHandle 7: transfer_cancelled, quarantined>"
    assert not quiet.done()
    book.handle.settle()
    async with asyncio.timeout(PATIENCE_S):
        await quiet
    assert repr(book.handle) == "<PullHandle 7: transfer_cancelled>"


async def test_cancelling_an_await_cancels_the_pull_for_all_who_await_it(book):
    impatient, patient = await waiting(book.handle), await waiting(book.handle)
    impatient.cancel()
    with pytest.raises(asyncio.CancelledError):
        await impatient
    assert book.cancelled == [7]
    book.handle.fail(TransferCancelled("given up"))
    with pytest.raises(TransferCancelled):
        await patient


async def test_cancelling_a_pull_that_is_done_does_nothing(book):
    book.handle.complete(REPORT)
    book.handle.cancel()
    assert book.cancelled == []


async def test_giving_up_waiting_for_quiescence_does_not_cancel_the_pull(book):
    quiet = await waiting(book.handle.quiesced())
    quiet.cancel()
    await asyncio.wait([quiet])
    assert book.cancelled == []


async def wait_for(handle):
    return await handle


@pytest.mark.parametrize("wait", [PullHandle.quiesced, wait_for], ids=["quiesced", "await"])
async def test_a_caller_that_gives_up_waiting_is_forgotten(book, wait, monkeypatch):
    assert await futures_left(lambda: wait(book.handle), monkeypatch) == 0
    patient = [await waiting(wait(book.handle)) for _ in range(2)]
    assert await futures_left(lambda: wait(book.handle), monkeypatch) == 0
    assert not any(task.done() for task in patient)
    book.handle.complete(REPORT)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*patient)


@pytest.mark.parametrize("before", [True, False])
async def test_a_settled_pull_is_told_once_whenever_it_was_asked_for(book, before):
    told = []
    if before:
        book.handle.on_settled(told.append)
    book.handle.fail(StaleLease("it ended"))
    assert told == []
    book.handle.settle()
    if not before:
        book.handle.on_settled(told.append)
    assert told == [book.handle]


async def test_a_handle_that_is_done_keeps_nothing_of_those_who_awaited_it(book):
    class Callback:
        def __call__(self, handle):
            pass

    callback = Callback()
    book.handle.on_settled(callback)
    remembered = weakref.ref(callback)
    book.handle.complete(REPORT)
    del callback
    gc.collect()
    assert remembered() is None
