"""What the demo says if an engine fails: the router before them hides no failure."""

import json
import re

import pytest
from aiohttp import web

from kvflow.tools.demo.messages import MAX_TOKENS
from kvflow.tools.demo.results import Scenario
from kvflow.tools.demo.run import DemoRun, EngineFailed, Engines, open_client
from tests.proxy.upstream import open_upstream, text

from .test_elsewhere import NOBODY, Silent

TOKENS = list(range(MAX_TOKENS))
REPORT = {"request_id": "r", "nbytes": 9, "descriptors": 1, "reads": 1, "timings_s": {"post": 0.1, "wire": 0.1}}
TICKET = {"do_remote_prefill": True, "do_remote_decode": False, "first_token": 0, "kvflow": "a ticket"}


def answer(**fields):
    return text(json.dumps({"id": "r", "choices": [{"token_ids": TOKENS}], **fields}))


def failure(status, message):
    return text(json.dumps({"error": {"message": message}}), status)


PREFILLED = answer(kv_transfer_params=TICKET)
PULLED = answer(report=REPORT)
ALONE = answer()
"""A decode server without a ticket computes the prompt."""


async def run(prefill, decode, **left):
    """Send one prompt through a router before two engines."""

    async def drain(request):
        return web.json_response(left)

    drains = [web.post("/drain", drain)]
    async with (
        open_upstream(prefill, drains) as source,
        open_upstream(decode, drains) as target,
        open_client() as client,
    ):
        engines = Engines(prefill=source.url.removeprefix("http://"), decode=target.url.removeprefix("http://"))
        return await DemoRun(client, [b"a prompt"], [TOKENS], Silent()).send(engines, Scenario(name="two fakes"))


async def test_the_same_tokens_that_were_pulled_pass():
    result = await run(PREFILLED, PULLED)
    assert result.passed
    assert (result.failures, result.nbytes) == ([], 9)


@pytest.mark.parametrize(
    ("prefill", "decode", "said"),
    [
        (failure(409, "[capacity_exceeded] no room"), PULLED, r"HTTP 409 .*\[capacity_exceeded\] no room"),
        (failure(500, "crashed"), ALONE, "the prefill engine failed, so nothing was pulled"),
        (PREFILLED, ALONE, "the prefill engine failed, so nothing was pulled"),
        (PREFILLED, failure(409, "[stale_lease] it has ended"), r"HTTP 409 .*\[stale_lease\] it has ended"),
        (PREFILLED, failure(500, "crashed"), "HTTP 500 .*crashed"),
        (PREFILLED, text("<html>", 503), "HTTP 503 "),
        (PREFILLED, text("{}"), "no answer of an engine"),
    ],
    ids=["offer refused", "prefill crashed", "ticket not used", "stale", "decode crashed", "no message", "no choices"],
)
async def test_a_failure_of_an_engine_is_shown_and_fails_the_demo(prefill, decode, said):
    result = await run(prefill, decode)
    assert not result.passed
    [shown] = result.failures
    assert re.search(said, shown)


async def test_what_is_left_fails_the_demo():
    assert not (await run(PREFILLED, PULLED, leases_held=1)).passed


async def test_an_engine_that_is_gone_is_named():
    async def drain(request):
        return web.json_response({})

    async with open_upstream(ALONE, [web.post("/drain", drain)]) as decode, open_client() as client:
        engines = Engines(prefill=NOBODY, decode=decode.url.removeprefix("http://"))
        with pytest.raises(EngineFailed, match=f"{NOBODY}/drain cannot be reached"):
            await DemoRun(client, [b"a"], [TOKENS], Silent()).send(engines, Scenario(name="gone"))
