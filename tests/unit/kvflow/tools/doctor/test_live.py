"""``kvflow doctor --live`` before servers with the connector's metrics, and routers that do right or wrong."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kvflow.errors import FailureCode
from kvflow.tools.cli import main
from kvflow.tools.doctor import live
from kvflow.tools.doctor.codes import CODES
from kvflow.tools.doctor.hops import TOLD_ERROR
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.server import open_proxy
from tests.proxy.test_server import closed_url
from tests.proxy.upstream import serving

from .faces import NBYTES, Face, Router, metrics_class, opened

pytest.importorskip("prometheus_client")
PATIENCE_S = 60.0
RIGHT_DIRECT = ["ok"] * 6  # the connector in both servers, the ticket, the cache, the prompt, the lease
RIGHT_ROUTED = ["ok"] * 6  # the answer, a router that asks and carries, the cache, the prompt, the lease
SERVERS = ["ok"] * 4  # their health, and the model


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    """Count a request before it is answered, as these servers do: there is nothing to wait for."""
    monkeypatch.setattr(live, "PAUSE_S", 0.01)


@pytest.fixture
def metrics(monkeypatch):
    return metrics_class(monkeypatch)


@pytest.fixture
def faces(metrics):
    prefill, decode = Face(metrics), Face(metrics)
    decode.lessor = prefill
    return prefill, decode


async def examined(prefill, decode, router, **settings):
    """Return the findings; a server or its URL is given."""
    urls = [getattr(each, "url", each) for each in (prefill, decode, router)]
    named = dict(zip(("prefill", "decode", "router"), urls, strict=True))
    targets = live.Targets(**{"timeout_s": PATIENCE_S, "settle_s": 0.05, "prompt_tokens": 64, **settings}, **named)
    async with asyncio.timeout(PATIENCE_S):
        return [finding async for finding in live.examine(targets)]


@asynccontextmanager
async def routed(prefill, decode, behavior):
    async with opened(prefill, decode), serving(Router(prefill, decode, behavior).routes()) as url:
        yield url


async def found_behind(*pair, behavior="carries", **settings):
    """Return the findings about two servers behind a router."""
    async with routed(*pair, behavior) as url:
        return await examined(*pair, url, **settings)


def codes(findings):
    for finding in findings:
        assert finding.evidence
        assert finding.code in CODES or finding.code in set(FailureCode) or finding.status in ("ok", "note")
        assert bool(finding.remedy) or finding.status in ("ok", "note")
        assert all(each.isprintable() for each in (finding.subject, finding.evidence, finding.remedy))
    return [finding.code or finding.status for finding in findings]


def only(findings, code):
    [finding] = [each for each in findings if each.code == code]
    return finding


async def test_the_proxy_asks_and_carries(faces):
    prefill, decode = faces
    async with opened(*faces):
        config = ProxyConfig(prefill=(prefill.url,), decode=(decode.url,))
        async with open_proxy(config, "127.0.0.1", 0) as address:
            findings = await examined(*faces, f"http://{address}", settle_s=PATIENCE_S)
    assert codes(findings) == SERVERS + RIGHT_DIRECT + RIGHT_ROUTED
    assert {finding.status for finding in findings} == {"ok"}
    carried = findings[12].evidence
    assert "vllm:kvflow_transfer_seconds_count of the decode server: 1 before, 2 after" in carried
    moved = [findings[7].evidence, findings[13].evidence]
    assert moved[1].startswith("524 kB in 1 transfer, 4 descriptors, 2 ms, 0.26 GB/s; vllm:kvflow_transfer_bytes_sum")
    assert f"{NBYTES} before, {2 * NBYTES} after" in moved[1]
    prompts = [fields["prompt"] for fields in prefill.asked]
    assert len(set(prompts)) == 2
    assert [len(prompt.split()) for prompt in prompts] == [64, 64]
    names = [headers["X-Request-Id"] for headers in prefill.headers]
    assert names == [headers["X-Request-Id"] for headers in decode.headers]
    assert f"request {names[1]}" in findings[10].evidence


ROUTERS = {
    "does_not_ask": ["ok", "router_does_not_ask"],
    "declines": ["ok", "router_does_not_ask"],
    "skips_prefill": ["ok", "router_does_not_ask"],
    "skips_decode": ["ok", "router_skips_decode", "lease_held"],
    "skips_both": ["ok", "router_skips_prefill", "router_skips_decode"],
    "drops_the_ticket": ["ok", "router_drops_ticket", "lease_held"],
    "changes_the_ticket": [
        "ok",
        "router_changes_ticket",
        "ticket_invalid",
        "prompt_recomputed",
        "lease_held",
    ],
    "carries": RIGHT_ROUTED,
    "cuts_the_stream": ["answer_broken", *RIGHT_ROUTED[1:]],
    "ends_the_stream_early": ["answer_broken"],
    "streams_an_error": ["request_failed"],
    "fails": ["request_failed"],
}


@pytest.mark.parametrize("behavior", ROUTERS)
async def test_each_router_is_told_from_the_others_and_from_its_servers(behavior, faces):
    findings = await found_behind(*faces, behavior=behavior)
    assert codes(findings) == SERVERS + RIGHT_DIRECT + ROUTERS[behavior]
    if behavior == "streams_an_error":  # nobody closed a connection, and the stream has its end
        evidence = only(findings, "request_failed").evidence
        assert '{"error": ' in evidence
        assert "\ufffd" not in evidence
        assert TOLD_ERROR in evidence


@pytest.mark.parametrize("other", [0, 1], ids=["prefill", "decode"])
async def test_a_router_before_another_server_is_found(other, faces, metrics):
    behind = list(faces)
    behind[other] = stranger = Face(metrics)
    stranger.lessor = behind[0]
    async with opened(*faces, stranger), serving(Router(*behind, "carries").routes()) as url:
        findings = await examined(*faces, url)
    if other == 0:
        assert "another server" in only(findings, "router_skips_prefill").evidence
    else:
        assert codes(findings)[-3:] == ["ok", "router_skips_decode", "ok"]


@pytest.mark.parametrize(
    ("behavior", "said"), [("hangs", "nothing more within 2 s"), ("says_too_much", "more than 1000 bytes")]
)
async def test_a_router_that_hangs_or_says_too_much_is_given_up(behavior, said, faces, monkeypatch):
    if behavior == "says_too_much":
        monkeypatch.setattr(live, "ANSWER_BYTES_MAX", 1000)
        monkeypatch.setattr(live, "read_params", lambda answer: None)
    timeout_s = 2.0 if behavior == "hangs" else PATIENCE_S
    findings = await found_behind(*faces, behavior=behavior, timeout_s=timeout_s)
    assert any(said in finding.evidence for finding in findings if finding.status == "failed")


async def test_a_transfer_that_fails_has_its_code_on_both_paths(faces):
    faces[1].failing = "layout_mismatch"
    findings = await found_behind(*faces)
    path = ["layout_mismatch", "prompt_recomputed", "lease_held"]
    start = ["ok"] * 3
    assert codes(findings) == [*SERVERS, *start, *path, "ok", *path]
    assert findings[7].remedy.startswith("Pair engines that serve the same model")


async def test_an_unknown_code_and_a_defect_are_reported(faces):
    decode = faces[1]
    decode.failing = "from \x1b[2J the future"
    transfer, decode.act = decode.act, lambda *given: (decode.end("defects", "get_finished"), transfer(*given))[1]
    findings = await found_behind(*faces)
    assert codes(findings).count("transfer_failed") == codes(findings).count("connector_defect") == 2


@pytest.mark.parametrize("role", [0, 1], ids=["prefill", "decode"])
async def test_a_server_without_the_connector_is_found(role, faces, metrics):
    pair = list(faces)
    pair[role] = Face(None)
    pair[1].lessor = pair[0]
    findings = await found_behind(*pair)
    assert only(findings, "connector_missing").subject.startswith(("prefill", "decode")[role])
    assert "router_drops_ticket" not in codes(findings)


@pytest.mark.parametrize(("role", "code"), [(0, "ticket_unanswered"), (1, "ticket_unused")])
async def test_a_server_in_the_wrong_role_is_found(role, code, faces):
    faces[role].mute = True
    findings = await found_behind(*faces)
    assert code in codes(findings)
    assert "router_drops_ticket" not in codes(findings)
    assert not [each for each in findings if each.status == "ok" and "transfer" in each.evidence]


async def test_a_lease_that_is_not_released_or_runs_out_is_found(faces):
    faces[1].keeps = True
    assert codes(await found_behind(*faces)).count("lease_held") == 2
    finish, faces[1].finish = faces[1].finish, lambda: (faces[0].end("leases", "expired"), finish())
    findings = await found_behind(*faces)
    assert codes(findings).count("lease_lost") == 2


async def test_servers_that_do_not_answer_end_the_examination(faces):
    prefill, decode = faces
    async with routed(*faces, "carries") as url:
        for given in ((closed_url(), decode, url), (prefill, closed_url(), url), (prefill, decode, closed_url())):
            findings = await examined(*given)
            assert codes(findings).count("server_unreachable") == 1
            assert only(findings, "server_unreachable").evidence == "Connection refused"
            assert codes(findings)[-1] == "note"
    assert not prefill.asked


async def test_a_server_that_is_not_healthy_is_named(faces):
    decode = faces[1]

    async def unhealthy(request):
        return web.Response(status=503, text="loading")

    decode.health = unhealthy
    findings = await found_behind(*faces)
    assert only(findings, "server_unhealthy").evidence == "/health answers HTTP 503: loading"


async def test_servers_of_different_models_are_refused(metrics):
    pair = Face(metrics), Face(metrics, model="other")
    findings = await found_behind(*pair)
    assert findings[-1].evidence == "the prefill server serves tiny, the decode server other"
    assert findings[-1].code == "model_differs"


@pytest.mark.parametrize("key", ["", "wrong", "secret"])
async def test_the_key_reaches_every_server(key, metrics):
    pair = Face(metrics, key="secret"), Face(metrics, key="secret")
    pair[1].lessor = pair[0]
    async with opened(*pair):
        config = ProxyConfig(prefill=(pair[0].url,), decode=(pair[1].url,))
        async with open_proxy(config, "127.0.0.1", 0) as address:
            findings = await examined(*pair, f"http://{address}", api_key=key)
    found = [finding for finding in findings if finding.code == "request_failed"]
    assert bool(found) is (key != "secret")
    assert all("HTTP 401" in finding.evidence for finding in found)


HOSTILE_MODELS = [b"", b"[]", b"\xff" * 100, b'{"data": []}', b'{"data": [{"id": 7}]}', b'{"data": ' + b"[" * 100_000]


@pytest.mark.parametrize("content", HOSTILE_MODELS, ids=lambda content: repr(content[:20]))
async def test_what_is_no_list_of_models_is_refused(content, faces):
    async def models(request):
        return web.Response(body=content, content_type="application/json")

    faces[0].models = models
    findings = await found_behind(*faces)
    assert codes(findings)[-1] == "models_unknown"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"<html>",
        b"vllm",
        b"python_gc_objects_collected_total 1.0\n" * 1000,
    ],
    ids=lambda content: repr(content[:20]),
)
async def test_a_server_without_metrics_of_vllm_is_refused(content, faces):
    faces[1].exposition = lambda: content
    findings = await found_behind(*faces)
    assert codes(findings)[-1] == "metrics_missing"
    assert not faces[0].asked


async def test_a_server_that_was_started_again_is_found(faces, metrics):
    decode = faces[1]
    async with routed(*faces, "carries") as url:
        assert codes(await examined(*faces, url))[-1] == "ok"
        transfer = decode.transfer

        def and_restart():
            transfer()
            decode.exposition = Face(metrics).exposition

        decode.transfer = and_restart
        findings = await examined(*faces, url)
    assert codes(findings)[-1] == "server_restarted"


async def test_requests_of_others_that_move_too_do_not_hide_that_all_is_right(faces):
    prefill, decode = faces
    transfer = decode.transfer

    def also_for_another():
        for face in faces:
            face.finish()
        transfer()
        transfer()

    decode.transfer = also_for_another
    findings = await found_behind(*faces)
    found = codes(findings)
    assert found.count("others_interfered") == 2
    assert found[-6:] == ["others_interfered", *RIGHT_ROUTED[1:]]
    assert "failed" not in {finding.status for finding in findings}
    assert len(prefill.asked) == 2 * live.ATTEMPTS


async def test_nothing_is_concluded_from_what_another_request_may_have_done(faces):
    decode = faces[1]
    act = decode.act

    def also_for_another(params, request_id):
        decode.finish()
        decode.end("untagged", "absent")
        return act(params, request_id)

    decode.act = also_for_another
    findings = await found_behind(*faces)
    assert codes(findings)[4:] == [*["ok"] * 3, *["others_interfered"] * 2]
    assert "kvflow-doctor-" in findings[-1].evidence


async def test_servers_that_compute_for_others_are_asked_again(faces):
    prefill, decode = faces
    decode.run(3)
    act = decode.act

    def until_quiet(params, request_id):
        if len(prefill.asked) > 1:
            decode.run(0)
        return act(params, request_id)

    decode.act = until_quiet
    findings = await found_behind(*faces)
    assert codes(findings) == SERVERS + RIGHT_DIRECT + RIGHT_ROUTED
    assert len(prefill.asked) > 2


@pytest.mark.parametrize(("behavior", "status"), [("carries", 0), ("drops_the_ticket", 1)])
async def test_the_command_prints_findings_and_ends_with_a_status(behavior, status, faces, capsys):
    async with routed(*faces, behavior) as url:
        urls = [f"{each}/" for each in (faces[0].url, faces[1].url, url)]
        command = ["doctor", "--live", *urls, "--settle-s", "0.05", "--json"]
        assert await asyncio.to_thread(main, command) == status
    told = json.loads(capsys.readouterr().out)
    assert ("router_drops_ticket" in {each["code"] for each in told["findings"]}) is bool(status)
    assert told["failed"] == status


@pytest.mark.parametrize(
    "arguments",
    [
        ["--live", "http://127.0.0.1:1", "http://127.0.0.1:2"],
        ["--live", "127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:3"],
        ["--live", *["http://127.0.0.1:1"] * 3, "--prompt-tokens", "0"],
        ["--live", *["http://127.0.0.1:1"] * 3, "--timeout-s", "nan"],
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *arguments])
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(("module", "extra"), [("aiohttp", "proxy"), ("prometheus_client", "metrics")])
def test_a_library_that_is_missing_is_named_with_its_extra(module, extra, monkeypatch, capsys):
    monkeypatch.setattr("kvflow.tools.cli.arguments.find_spec", lambda name: None if name == module else name)
    assert main(["doctor", "--live", *["http://127.0.0.1:1"] * 3]) == 2
    assert f"Install it with pip install 'kvflow[{extra}]'" in capsys.readouterr().err
