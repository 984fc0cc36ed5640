"""Calls from other threads: every future ends, whatever is cancelled and whenever the loop does."""

import asyncio
import threading
from concurrent.futures import CancelledError

import pytest

from kvflow.errors import RequestUnknown, WorkerClosed
from kvflow.worker.bridge import Bridge

from .helpers import PATIENCE_S


@pytest.fixture
async def bridge():
    bridge = Bridge(asyncio.get_running_loop())
    yield bridge
    await bridge.close()


async def answer(value):
    await asyncio.sleep(0)
    return value


async def fail():
    raise RequestUnknown("r")


async def test_results_and_errors_come_through(bridge):
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.wrap_future(bridge.submit(answer(7))) == 7
        with pytest.raises(RequestUnknown):
            await asyncio.wrap_future(bridge.submit(fail()))


async def test_a_future_can_be_waited_for_on_another_thread(bridge):
    found = []
    thread = threading.Thread(target=lambda: found.append(bridge.submit(answer(7)).result(PATIENCE_S)))
    thread.start()
    await asyncio.to_thread(thread.join, PATIENCE_S)
    assert found == [7]


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancelled_call_ends_at_whatever_moment(bridge, turns):
    unwanted = []
    known = asyncio.all_tasks()
    future = bridge.submit(answer(7), on_unwanted=unwanted.append)
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


async def test_a_task_that_is_cancelled_before_its_first_step_ends_too(bridge):
    begun = []

    async def work():
        begun.append(True)

    known = asyncio.all_tasks()
    future = bridge.submit(work())
    while not (tasks := asyncio.all_tasks() - known):
        # Only the loop itself is between the creation of a task and its first step.
        asyncio.get_running_loop().call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() - known])
        await asyncio.sleep(0)
    await asyncio.wait(tasks)
    assert begun == []
    with pytest.raises(CancelledError):
        future.result(PATIENCE_S)


async def test_a_result_that_comes_with_its_cancellation_is_handed_to_whoever_can_undo_it(bridge):
    unwanted, gate = [], asyncio.Event()

    async def work():
        await gate.wait()
        future.cancel()
        return 7

    future = bridge.submit(work(), on_unwanted=unwanted.append)
    gate.set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert future.cancelled()
    assert unwanted == [7]


async def test_closing_waits_for_what_was_submitted_and_takes_no_more():
    bridge = Bridge(asyncio.get_running_loop())
    future = bridge.submit(answer(7))
    await bridge.close()
    assert future.result(0) == 7
    with pytest.raises(WorkerClosed):
        bridge.submit(answer(8))


async def test_what_is_called_and_what_is_asked_happens_in_order(bridge):
    """A ticket that is kept and then pulled must not be kept after its pull has begun."""
    order = []
    asked = [bridge.ask(lambda: order.append("kept") or 1)]
    bridge.call(lambda: order.append("pulled"))
    asked.append(bridge.ask(lambda: order.append("asked") or 2))
    failing = bridge.ask(lambda: 1 / 0)
    unwanted = bridge.ask(lambda: order.append("unwanted"))
    assert unwanted.cancel()
    assert [await asyncio.wrap_future(each) for each in asked] == [1, 2]
    with pytest.raises(ZeroDivisionError):
        await asyncio.wrap_future(failing)
    await asyncio.sleep(0)
    assert order == ["kept", "pulled", "asked"]
    await bridge.close()
    with pytest.raises(WorkerClosed):
        bridge.ask(list)
