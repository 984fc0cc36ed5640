"""Engines as processes: what the router gets from them, and how they end."""

import asyncio
import json
import signal
import sys

import pytest

from kvflow.tools.demo.channel import EngineFailed, call
from kvflow.tools.demo.messages import Drain, Drained, Generate, Generated, Prefill
from kvflow.tools.demo.processes import EngineCommand, engine_environment, open_process
from kvflow.tools.demo.router import Answer, send_all

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("measured_processes")]

MONOLITHIC = EngineCommand(name="alone", role="monolithic", layout="BLHNC", kv="content")


async def send_raw(address, data):
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    try:
        return await reader.read()
    finally:
        writer.close()


async def test_an_engine_survives_whatever_it_is_asked(tmp_path):
    async with open_process(MONOLITHIC, tmp_path, engine_environment()) as address:
        assert json.loads(await send_raw(address, b"not JSON\n"))["code"] == "request_malformed"
        assert await send_raw(address, b"") == b""
        with pytest.raises(EngineFailed, match="does not serve Prefill"):
            await call(address, Prefill(request_id="r", prompt=b"x"))
        with pytest.raises(EngineFailed, match="blocks are wanted"):
            await call(address, Generate(request_id="r", prompt=bytes(20_000), max_tokens=1))
        answer = await call(address, Generate(request_id="r", prompt=b"hello", max_tokens=3))
        assert isinstance(answer, Generated)
        assert len(answer.tokens) == 3
        assert await call(address, Drain()) == Drained()
    with pytest.raises(EngineFailed, match="cannot be reached"):
        await call(address, Drain())
    events = [json.loads(line)["event"] for line in (tmp_path / "alone.jsonl").read_text().splitlines()]
    assert events[0] == "engine.started"
    assert "request.crashed" in events
    assert events[-1] == "engine.stopped"


async def test_an_engine_that_does_not_start_says_why(tmp_path):
    command = EngineCommand(name="odd", role="monolithic", layout="XYZ", kv="content")
    with pytest.raises(EngineFailed, match=r"(?s)the odd engine did not start.*spec_invalid"):
        async with open_process(command, tmp_path, engine_environment()):
            pytest.fail("it started")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_engine_stops_when_it_is_told_to(number):
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvflow.tools.demo", "monolithic"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    assert "address" in json.loads(await process.stdout.readline())
    process.send_signal(number)
    _, complaints = await process.communicate()
    assert process.returncode == 0
    assert [json.loads(line)["event"] for line in complaints.splitlines()] == ["engine.started", "engine.stopped"]


async def test_a_failed_request_ends_alone():
    answered = []

    async def send(request_id, prompt):
        if prompt == b"bad":
            raise EngineFailed("no such luck")
        return Generated(tokens=[len(prompt)])

    answers = await send_all("prompt", [b"a", b"bad", b"ccc"], send, lambda: answered.append(1))
    assert answers == [Answer(Generated(tokens=[1])), Answer(failure="no such luck"), Answer(Generated(tokens=[3]))]
    assert len(answered) == 3
