"""Engines as processes: what a router gets from them, and how they end."""

import asyncio
import json
import signal
import sys

import pytest

from kvflow.tools.demo.messages import MAX_TOKENS, Drained, GeneratedTokens, PromptAnswer, PromptRequest
from kvflow.tools.demo.results import PromptResult, Scenario
from kvflow.tools.demo.run import EngineFailed, engine_environment, open_client, open_process, send_all

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("measured_processes")]

MONOLITHIC = "alone", "monolithic", Scenario(name="alone", layout="BLHNC", kv="content")


async def send_raw(address, data):
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    try:
        return await reader.read()
    finally:
        writer.close()


def request_of(prompt, **fields):
    return PromptRequest(prompt=tuple(prompt), max_tokens=3, **fields)


async def test_an_engine_survives_whatever_it_is_asked(tmp_path):
    async with open_client() as client:
        async with open_process(*MONOLITHIC, tmp_path, engine_environment()) as address:
            assert b" 400 " in (await send_raw(address, b"not HTTP\r\n\r\n"))[:20]
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            assert (await send_raw(address, head + b"Content-Length: 2\r\n\r\n{}")).startswith(b"HTTP/1.1 400 ")
            long = head + b"Content-Length: 1048577\r\n\r\n" + b" " * 1_048_577
            assert (await send_raw(address, long)).startswith(b"HTTP/1.1 413 ")
            with pytest.raises(EngineFailed, match=r"HTTP 400 from .*this engine has no worker"):
                await client.complete(address, "r", request_of(b"x", kv_transfer_params={"do_remote_decode": True}))
            with pytest.raises(EngineFailed, match=r"HTTP 500 from .*blocks are wanted"):
                await client.complete(address, "r", request_of(bytes(20_000)))
            answer = await client.complete(address, "r", request_of(b"hello"))
            assert len(answer.choices[0].token_ids) == 3
            assert await client.drain(address) == Drained()
        with pytest.raises(EngineFailed, match="cannot be reached"):
            await client.drain(address)
    events = [json.loads(line)["event"] for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    assert events[0] == "engine.started"
    assert "completion.crashed" in events
    assert events[-1] == "engine.stopped"


async def test_an_engine_that_does_not_start_says_why(tmp_path):
    command = "odd", "monolithic", Scenario(name="odd", layout="XYZ", kv="content")
    with pytest.raises(EngineFailed, match=r"(?s)the odd engine did not start.*spec_invalid"):
        async with open_process(*command, tmp_path, engine_environment()):
            pytest.fail("it started")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_engine_stops_when_it_is_told_to(number):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvflow.tools.demo", "monolithic"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert (await process.stdout.readline()).startswith(b"listening at 127.0.0.1:")
    process.send_signal(number)
    _, complaints = await process.communicate()
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in complaints.splitlines()] == ["engine.started", "engine.stopped"]


class Answers:
    """A client that asks nobody."""

    async def complete(self, address, request_id, request):
        if bytes(request.prompt) == b"bad":
            raise EngineFailed("no such luck")
        assert request.max_tokens == MAX_TOKENS
        return PromptAnswer(id=request_id, choices=(GeneratedTokens(token_ids=[len(request.prompt)]),))


async def test_a_failed_request_ends_alone():
    answered = []
    prompts = [b"a", b"bad", b"ccc"]
    answers = await send_all(Answers(), "nowhere", "prompt", prompts, lambda: answered.append(1), pulled=False)
    assert answers == [PromptResult([1]), PromptResult(failure="no such luck"), PromptResult([3])]
    assert len(answered) == 3
