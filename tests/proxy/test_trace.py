"""What a proxy logs of a request is the beginning and the end of its trace."""

import asyncio
import json
import time

import pytest

from kvflow.tools.trace.joining import read_trace
from tests.unit.kvflow.tools.trace.conftest import log  # noqa: F401 - a fixture

from .test_server import ASKED, open_rig
from .upstream import DECODED, stream

ROUNDING_S = 2e-6


async def ask(rig, name, read, **fields):
    """Send a request; return when its first bytes had come."""
    headers = {"X-Request-Id": name}
    async with rig.session.post(f"{rig.url}/v1/completions", json={**ASKED, **fields}, headers=headers) as answer:
        await answer.content.readany()
        seen_at = time.time()
        read.set()
        await answer.read()
    return seen_at


async def test_the_first_bytes_of_a_stream_come_before_its_end(log):  # noqa: F811
    read = asyncio.Event()
    async with open_rig(decode=[stream(b"data: 1\n\n", read, b"data: [DONE]\n\n")]) as rig:
        seen_at = await ask(rig, "mine", read, stream=True)
    (told,) = [record for record in map(json.loads, log.read_text().splitlines()) if record["request_id"] == "mine"]
    assert 0.0 < told["prefill_s"] <= told["first_bytes_s"] <= told["elapsed_s"]
    assert told["called_at"] + told["first_bytes_s"] <= seen_at + ROUNDING_S
    assert seen_at <= told["called_at"] + told["elapsed_s"] + ROUNDING_S
    (request,) = read_trace([log]).requests
    assert request.first_token_s == told["first_bytes_s"] == pytest.approx(request.total_s)
    assert [phase.name for phase in request.phases] == ["prefill", "decode step"]
    assert request.title.startswith("first token ")


async def test_a_whole_answer_tells_no_first_token(log):  # noqa: F811
    async with open_rig(decode=[DECODED]) as rig:
        await ask(rig, "whole", asyncio.Event())
    (request,) = read_trace([log]).requests
    assert request.first_token_s is None
    assert request.title.startswith("answered ")
