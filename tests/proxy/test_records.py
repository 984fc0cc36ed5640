"""The record that a proxy writes of each request, and what ``kvflow trace`` shows of it."""

import asyncio
import json
import re
import time
from pathlib import Path

import aiohttp
import pytest

from kvflow.tools.cli import main
from kvflow.tools.proxy.completions import ERROR_CHARACTERS_MAX, REMEDIES, EndCause, shown_error
from kvflow.tools.trace.joining import read_trace
from kvflow.tools.trace.text import waterfall_lines
from tests.helpers.waiting import until

from .test_floods import connected
from .test_server import ASKED, open_rig
from .upstream import DECODED, PREFILLED, hang, hang_up, stream, text

CLI_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "cli.md"
ENDS = ("request.answered", "request.failed")
WHOLE = b'{"id":"cmpl-1","choices":[{"text":"b"}]}'
ROUNDING_S = 2e-6


def told(path):
    """Return the records of requests so far."""
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["event"] in ENDS]


async def only(path):
    """Return the record of the one request, which may end after its client."""
    [record] = await several(path, 1)
    return record


async def several(path, number):
    """Return the records of requests once there are so many."""
    return await until(lambda: len(found := told(path)) >= number and found)


def shown(path):
    """Return the request of a log, with all lines of its waterfall."""
    [request] = read_trace([path]).requests
    assert request.total_s == pytest.approx(sum(phase.seconds for phase in request.phases))
    return request, "\n".join(waterfall_lines(request))


async def test_the_record_of_an_answer_names_client_and_servers(log):
    async with open_rig() as rig:
        assert await rig.send() == (200, WHOLE)
        record = await only(log)
    assert record["event"] == "request.answered"
    assert (record["status"], record["prefilled"], record["phase"]) == (200, True, "answer")
    assert (record["prefill_server"], record["decode_server"]) == (rig.prefill[0].url, rig.decode[0].url)
    assert (record["failed_attempts"], record["sent_bytes"]) == ([], len(WHOLE))
    assert re.fullmatch(r"127\.0\.0\.1:\d+", record["client"])
    assert "code" not in record
    request, lines = shown(log)
    assert (request.outcome, request.failure, request.router.failure) == ("answered", None, None)
    assert f"prefill server {rig.prefill[0].url}, decode server {rig.decode[0].url}, {len(WHOLE)} B of" in lines


async def test_the_record_names_the_servers_that_failed_and_why(log):
    prefill = [None, text("{}", 503), hang_up, text('{"kv_transfer_params": null}')]
    async with open_rig(prefill=prefill, decode=[None, DECODED]) as rig:
        assert (await rig.send())[0] == 200
        record = await only(log)
    attempts = record["failed_attempts"]
    assert [each["role"] for each in attempts] == ["prefill"] * 4 + ["decode"]
    assert [each["server"] for each in attempts[1:4]] == [server.url for server in rig.prefill[1:]]
    for attempt, error in zip(attempts, ("refused", "HTTP 503", "Disconnected", "no ticket", "refused"), strict=True):
        assert error in attempt["error"]
    assert (record["prefilled"], record["prefill_server"]) == (False, "")
    assert record["decode_server"] == rig.decode[1].url
    request, lines = shown(log)
    assert request.outcome == "answered"
    assert f"prefill server {rig.prefill[1].url} failed: HTTP 503" in lines


async def ask(rig, name, read, **fields):
    """Send a request; return when its first bytes had come."""
    async with rig.post(headers={"X-Request-Id": name}, **fields) as answer:
        await answer.content.readany()
        seen_at = time.time()
        read.set()
        await answer.read()
    return seen_at


async def test_the_first_bytes_of_a_stream_come_before_its_end(log):
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


async def test_a_whole_answer_tells_no_first_token(log):
    async with open_rig(decode=[DECODED]) as rig:
        await ask(rig, "whole", asyncio.Event())
    (request,) = read_trace([log]).requests
    assert request.first_token_s is None
    assert request.title.startswith("answered ")


async def speak_no_http(request):
    request.transport.write(b"\0\1 kvflow\r\n")
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("behavior", "said"),
    [
        (None, "it refused the connection: nothing listens there"),
        (hang, "it gave no answer in time"),
        (speak_no_http, "it does not speak HTTP: is this the port of its API? Bad status line: "),
    ],
)
async def test_one_sentence_says_what_is_wrong_with_a_server(behavior, said, log):
    async with open_rig(prefill=[behavior], prefill_timeout_s=0.5 if behavior is hang else 60.0) as rig:
        assert (await rig.send())[0] == 200
        assert json.loads(rig.decode[0].bodies[0]) == ASKED
        [attempt] = (await only(log))["failed_attempts"]
    assert attempt["error"].startswith(said)
    assert "RequestInfo" not in attempt["error"]


@pytest.mark.parametrize("phase", ["prefill", "decode", "answer"])
async def test_a_client_that_hangs_up_ends_its_request_where_it_is(phase, log):
    given = b"data: 1\n\n"
    servers = {
        "prefill": {"prefill": [hang], "decode": [hang]},
        "decode": {"decode": [hang]},
        "answer": {"decode": [stream(given, asyncio.Event())]},
    }[phase]
    async with open_rig(**servers) as rig:
        server = (rig.prefill if phase == "prefill" else rig.decode)[0]
        if phase == "answer":
            async with rig.post(stream=True) as answer:
                assert await answer.content.readany() == given
                answer.close()
        else:
            asking = asyncio.create_task(rig.send(stream=True))
            await server.asked.wait()
            assert not server.cancelled.is_set()
            asking.cancel()
        await server.cancelled.wait()
        assert len(rig.decode[0].bodies) == (phase != "prefill")
        assert await rig.serves()
        record = await only(log)
    assert (record["event"], record["code"], record["phase"]) == ("request.failed", "client_lost", phase)
    assert (record["level"], record["detail"]) == ("info", "the client hung up")
    assert record["sent_bytes"] == (len(given) if phase == "answer" else 0)
    assert (record["prefill_s"] is None) is (phase == "prefill")
    assert (record["first_bytes_s"] is None) is (phase != "answer")
    assert record["elapsed_s"] > 0.0
    assert record[f"{'prefill' if phase == 'prefill' else 'decode'}_server"] == server.url
    assert record["client"].startswith("127.0.0.1:")
    request, lines = shown(log)
    assert (request.outcome, request.failure.code, request.failure.phase) == ("failed", "client_lost", phase)
    assert request.title.startswith("failed ")
    assert f"client_lost in {phase}" in request.title
    assert request.title.endswith(REMEDIES[EndCause.CLIENT_LOST])
    assert REMEDIES[EndCause.CLIENT_LOST][:150] in lines


@pytest.mark.parametrize(
    "last",
    [
        b"data: [DONE]\n\n",
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'event: response.completed\ndata: {"response":{}}\n\n',
    ],
)
async def test_a_client_that_hangs_up_after_the_last_event_has_its_answer(last, log):
    async with open_rig(decode=[stream(b"data: 1\n\n", last, asyncio.Event())]) as rig:
        async with rig.post(stream=True) as answer:
            while not (await answer.content.readany()).endswith(last):
                pass
            answer.close()
        record = await only(log)
    assert (record["event"], record["phase"]) == ("request.answered", "answer")


async def test_a_client_that_takes_nothing_is_recorded(log):
    rig_that_streams = open_rig(decode=[stream(*[b"x" * (1 << 20)] * 32, asyncio.Event())], write_timeout_s=0.2)
    async with rig_that_streams as rig, rig.post(stream=True) as answer:
        answer.connection.transport.pause_reading()
        record = await only(log)
    assert (record["code"], record["phase"]) == ("client_lost", "answer")
    assert record["detail"] == "it took nothing for 0.2 s"
    assert 0 < record["sent_bytes"] < 32 << 20


async def test_a_stream_that_breaks_off_is_recorded_with_server_and_bytes(log):
    read = asyncio.Event()
    async with open_rig(decode=[stream(b"data: 1\n\n", read, b"data: 2\n\n", None)]) as rig:
        async with rig.post(stream=True) as answer:
            got = await answer.content.readany()
            read.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        assert await rig.serves()
        record = await only(log)
    assert (record["event"], record["code"], record["phase"]) == ("request.failed", "stream_broken", "answer")
    assert (record["level"], record["decode_server"]) == ("warning", rig.decode[0].url)
    assert got == b"data: 1\n\n"
    assert record["sent_bytes"] == 18
    assert "ClientPayloadError" in record["detail"]
    request, lines = shown(log)
    assert (request.outcome, request.failure.peer) == ("failed", rig.decode[0].url)
    assert [phase.name for phase in request.phases] == ["prefill", "decode step", "answer"]
    assert request.total_s == pytest.approx(record["elapsed_s"])
    assert f"{record['sent_bytes']} B of the answer, stream_broken in answer" in request.title
    assert f"stream_broken in answer at {rig.decode[0].url}" in lines


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("/v1/completions", b'data: {"error": {"message": "load failed", "code": 500}}\n\n'),
        ("/v1/chat/completions", b'data: {"error": {"message": "load failed", "code": 500}}\n\n'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"message":"load failed"}}\n\n'),
        ("/v1/responses", b'event: response.failed\ndata: {"response":{"error":{"message":"load failed"}}}\n\n'),
    ],
)
async def test_a_stream_with_an_error_has_failed(path, error, log):
    async with open_rig(decode=[stream(b"data: 1\n\n", error, b"data: [DONE]\n\n")]) as rig:
        status, body = await rig.send(path, stream=True)
        record = await only(log)
    assert (status, body) == (200, b"data: 1\n\n" + error + b"data: [DONE]\n\n")
    assert (record["event"], record["level"], record["code"]) == ("request.failed", "warning", "decode_failed")
    assert "load failed" in record["detail"]
    assert record["decode_server"] == rig.decode[0].url


@pytest.mark.parametrize(
    ("decode", "code", "status"),
    [
        (hang_up, "decode_failed", 502),
        (text('{"error": {}}', 500), "decode_failed", 500),
        (None, "decode_unreachable", 502),
        (text(json.dumps({"x": "x" * 5000})), "decode_failed", 502),
    ],
    ids=["hangs up", "fails", "does not listen", "says too much"],
)
async def test_a_decode_server_that_fails_is_recorded(decode, code, status, log):
    async with open_rig(decode=[decode], body_bytes_max=4000) as rig:
        assert (await rig.send())[0] == status
        record = await only(log)
    assert (record["event"], record["code"], record["level"]) == ("request.failed", code, "warning")
    assert record["status"] == status
    assert record["detail"]
    assert record["remedy"] == REMEDIES[EndCause(code)]
    assert shown(log)[0].failure.code == code


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_request_that_a_server_refuses_is_answered(side, log):
    async with open_rig(**{side: [text('{"error": {}}', 404)]}) as rig:
        assert (await rig.send())[0] == 404
        record = await only(log)
    assert (record["event"], record["status"]) == ("request.answered", 404)
    assert [each["error"] for each in record["failed_attempts"]] == (["HTTP 404"] if side == "prefill" else [])
    assert shown(log)[0].outcome == "answered"


async def test_a_proxy_that_stops_says_so(log, monkeypatch):
    monkeypatch.setattr("kvflow.tools.proxy.server.GRACE_S", 0.05)
    async with aiohttp.ClientSession() as session, open_rig(decode=[hang]) as rig:
        asking = asyncio.create_task(session.post(f"{rig.url}/v1/completions", json=ASKED))
        await rig.decode[0].asked.wait()
        [decode] = rig.decode
    record = await only(log)
    assert (record["code"], record["phase"]) == ("proxy_stopped", "decode")
    assert record["decode_server"] == decode.url
    with pytest.raises(aiohttp.ClientError):
        await asking


async def test_the_command_lists_them_among_the_failures(log, tmp_path, capsys):
    async with open_rig(decode=[stream(b"data: 1\n\n", None), DECODED]) as rig:
        for name in ("broken", "fine"):
            async with rig.post(headers={"X-Request-Id": name}, stream=True) as answer:
                await asyncio.gather(answer.read(), return_exceptions=True)
        await several(log, 2)
    page = tmp_path / "trace.html"
    perfetto = tmp_path / "trace.json"
    assert main(["trace", str(log), "--json", "--html", str(page), "--perfetto", str(perfetto)]) == 0
    requests = {request["request_id"]: request for request in json.loads(capsys.readouterr().out)["requests"]}
    assert requests["broken"]["router"]["failure"]["code"] == "stream_broken"
    assert requests["fine"]["router"]["failure"] is None
    assert '"code":"stream_broken"' in page.read_text()
    [span] = [
        each
        for each in json.loads(perfetto.read_bytes())["traceEvents"]
        if each.get("args", {}).get("code") is not None
    ]
    assert (span["name"], span["args"]["code"]) == ("broken", "stream_broken")


async def test_a_server_that_is_down_is_warned_of_once_and_in_every_record(log):
    async with open_rig(prefill=[None], decode=[text('{"error": {"message": "no"}}', 500)]) as rig:
        for _ in range(20):
            await rig.send()
        await several(log, 20)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for event, number in (("prefill.failed", 20), ("request.failed", 20)):
        found = [record["level"] for record in records if record["event"] == event]
        assert found == ["warning", *["info"] * (number - 1)]
    assert all(record["failed_attempts"] for record in records if record["event"] == "request.failed")


async def test_what_is_no_http_is_refused_without_a_traceback(log, caplog):
    async with open_rig() as rig:
        for sent in (b"GET / HTTP/1.1\r\nHost: x\r\na\x1b: b\r\n\r\n", b"GET / HTTP/9\r\n\r\n"):
            async with connected(rig.url, sent) as [(reader, _)]:
                assert b" 400 Bad Request" in await reader.read()
        assert (await rig.send())[0] == 200
        await only(log)
    assert "Traceback" not in caplog.text + log.read_text()
    assert "Error handling" not in caplog.text + log.read_text()


async def test_requests_in_parallel_have_their_own_records(log):
    async with open_rig(prefill=[None, PREFILLED]) as rig:
        await asyncio.gather(*(rig.send() for _ in range(10)))
        records = await several(log, 10)
    attempts = sorted(len(record["failed_attempts"]) for record in records)
    assert attempts == [0] * 5 + [1] * 5


def test_every_code_has_a_remedy_and_stands_in_the_reference():
    page = CLI_PAGE.read_text()
    for outcome in EndCause:
        assert bool(REMEDIES[outcome]) is (outcome is not EndCause.ANSWERED)
        assert outcome is EndCause.ANSWERED or f"- `{outcome}`: " in page


def test_errors_of_servers_are_cut():
    assert shown_error("x" * 1000) == "x" * (ERROR_CHARACTERS_MAX - 3) + "..."
    assert shown_error(TimeoutError()) == "TimeoutError()"
