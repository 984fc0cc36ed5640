"""Calls from other threads: every future ends, whatever is cancelled and whenever the loop does."""

import asyncio
from concurrent.futures import CancelledError

import pytest

from kvflow.errors import RequestUnknown, WorkerClosed
from kvflow.worker.threaded import open_calls

from .helpers import PATIENCE_S


def opened():
    return open_calls(asyncio.get_running_loop())


async def answer(value):
    await asyncio.sleep(0)
    return value


async def fail():
    raise RequestUnknown("r")


async def test_results_and_errors_come_through():
    async with opened() as calls:
        async with asyncio.timeout(PATIENCE_S):
            assert await asyncio.wrap_future(calls.submit(answer(7))) == 7
            with pytest.raises(RequestUnknown):
                await asyncio.wrap_future(calls.submit(fail()))


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_call_ends_at_whatever_moment(turns):
    async with opened() as calls:
        unwanted = []
        known = asyncio.all_tasks()
        future = calls.submit(answer(7), on_unwanted=unwanted.append)
        for _ in range(turns):
            await asyncio.sleep(0)
        cancelled = future.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert asyncio.all_tasks() == known
        assert cancelled or future.result() == 7
        assert unwanted in ([], [7] if cancelled else [])
        with pytest.raises(CancelledError) if cancelled else pytest.MonkeyPatch.context():
            future.result(PATIENCE_S)


async def test_a_task_that_is_cancelled_before_its_first_step_ends_too():
    async with opened() as calls:
        begun = []

        async def work():
            begun.append(True)

        known = asyncio.all_tasks()
        future = calls.submit(work())
        while not (tasks := asyncio.all_tasks() - known):
            # Only the loop itself is between the creation of a task and its first step.
            asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - known])
            await asyncio.sleep(0)
        await asyncio.wait(tasks)
        assert begun == []
        with pytest.raises(CancelledError):
            future.result(PATIENCE_S)


async def test_a_result_that_meets_its_cancellation_goes_to_the_undo_function():
    async with opened() as calls:
        unwanted, gate = [], asyncio.Event()

        async def work():
            await gate.wait()
            future.cancel()
            return 7

        future = calls.submit(work(), on_unwanted=unwanted.append)
        gate.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert future.cancelled()
        assert unwanted == [7]


async def test_closing_waits_for_what_was_submitted_and_takes_no_more():
    async with opened() as calls:
        future = calls.submit(answer(7))
    assert future.result(0) == 7
    with pytest.raises(WorkerClosed):
        calls.submit(answer(8))


async def test_what_is_called_and_what_is_asked_happens_in_order():
    """A ticket that is kept and then pulled must not be kept after its pull has begun."""
    async with opened() as calls:
        order = []
        asked = [calls.ask(lambda: order.append("kept") or 1)]
        calls.call(lambda: order.append("pulled"))
        asked.append(calls.ask(lambda: order.append("asked") or 2))
        failing = calls.ask(lambda: 1 / 0)
        unwanted = calls.ask(lambda: order.append("unwanted"))
        assert unwanted.cancel()
        assert [await asyncio.wrap_future(each) for each in asked] == [1, 2]
        with pytest.raises(ZeroDivisionError):
            await asyncio.wrap_future(failing)
        await asyncio.sleep(0)
        assert order == ["kept", "pulled", "asked"]
    with pytest.raises(WorkerClosed):
        calls.ask(list)
