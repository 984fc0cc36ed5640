"""Pulls that are not over: whoever waits for their end is told, and is forgotten if it gives up."""

import asyncio

import pytest

from kvflow.worker.unsettled import Unsettled

from .helpers import PATIENCE_S, futures_left


@pytest.mark.parametrize("wait", [lambda pulls: pulls.quiesced("r"), Unsettled.wait_idle], ids=["quiesced", "idle"])
async def test_whoever_gives_up_waiting_is_forgotten(wait, monkeypatch):
    pulls = Unsettled()
    pulls.begin(1, "r")
    assert await futures_left(lambda: wait(pulls), monkeypatch) == 0
    patient = [asyncio.ensure_future(wait(pulls)) for _ in range(2)]
    await asyncio.sleep(0)
    assert await futures_left(lambda: wait(pulls), monkeypatch) == 0
    assert not any(task.done() for task in patient)
    pulls.end(1)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*patient)


async def test_a_request_is_quiescent_when_all_of_its_pulls_are():
    pulls = Unsettled()
    for pull_id, request_id in enumerate("rrs"):
        pulls.begin(pull_id, request_id)
    waiting = asyncio.ensure_future(pulls.quiesced("r"))
    await asyncio.sleep(0)
    pulls.end(0)
    await asyncio.sleep(0)
    assert not waiting.done()
    pulls.end(1)
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert pulls.requests() == ("s",)


async def test_the_end_of_one_pull_is_not_compared_with_all_others():
    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__
        compared = 0

        def __eq__(self, other):
            Name.compared += 1
            return str(self) == str(other)

    pulls = Unsettled()
    for pull_id in range(500):
        pulls.begin(pull_id, Name(pull_id))
    for pull_id in range(500):
        pulls.end(pull_id)
    assert Name.compared < 500
    assert len(pulls) == 0
