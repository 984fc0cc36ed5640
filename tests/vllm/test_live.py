"""``kvflow doctor --live`` and ``kvflow trace`` over running servers: each hop of one real request is told."""

import json

import pytest

from .clients import TOKENS, TRANSFERS, tokens_of
from .engines import ANSWER_S, free_port, records
from .howto import PROXY_PORT, command
from .prompts import prompt_of
from .routers import STARTS

DIRECT = ["ok"] * 6  # the connector in both servers, the ticket, the cache, the prompt, the lease
ROUTED = ["ok"] * 6  # the answer, a router that asks and carries, the cache, the prompt, the lease
SERVERS = ["ok"] * 4  # their health, and the model


def examined(deployment, router):
    """Return what the doctor finds, and its exit status."""
    urls = f"{deployment.prefill.url} {deployment.decode.url} {router.url}"
    before = deployment.decode.metric(TRANSFERS)
    shell = f"kvflow doctor --live {urls} --settle-s {ANSWER_S} --timeout-s {ANSWER_S} --json || true"
    findings = json.loads(deployment.run(shell))
    moved = sum(" in 1 transfer, " in each["evidence"] for each in findings["findings"])
    assert deployment.decode.metric(TRANSFERS) == before + moved
    return findings


def codes(findings):
    return [each["code"] or each["status"] for each in findings["findings"]]


@pytest.mark.parametrize("router", ["kvflow proxy", "vllm-router"])
def test_the_doctor_finds_that_a_router_asks_and_carries(settled, router):
    front = STARTS[router](settled)
    findings = examined(settled, front)
    assert codes(findings) == SERVERS + DIRECT + ROUTED
    assert (findings["failed"], findings["warnings"]) == (0, 0)
    if front is not settled.proxy:
        front.stop()


def test_the_doctor_finds_that_a_router_does_not_ask(settled):
    findings = examined(settled, settled.decode)
    assert codes(findings) == [*SERVERS, *DIRECT, "ok", "router_does_not_ask"]
    assert findings["failed"] == 1
    assert "params" not in findings["findings"][-1]["evidence"]
    assert "--vllm-pd-disaggregation" in findings["findings"][-1]["remedy"]


def test_the_doctor_tells_a_server_without_the_connector(settled):
    urls = f"{settled.alone.url} {settled.decode.url} {settled.proxy.url}"
    findings = json.loads(settled.run(f"kvflow doctor --live {urls} --settle-s 2 --json || true"))
    assert "connector_missing" in codes(findings)
    assert not [each for each in findings["findings"] if "a ticket for request" in each["evidence"]]


def test_the_logs_of_proxy_and_servers_are_one_request(settled):
    """As docs/howto/debug.md says: ``log_file`` of each engine, and ``kvflow proxy --log FILE``."""
    port = free_port()
    shell = settled.fitted(f"{command('kvflow proxy')} --listen 127.0.0.1:8000", {PROXY_PORT: port})
    proxy = settled.serve("proxy-logged", f"{shell} --log router.jsonl", port)
    proxy.wait_ready()
    transfers = settled.decode.metric(TRANSFERS)
    try:
        assert len(tokens_of(settled, proxy, prompt_of(300, "traced"), name="traced-1")) == TOKENS
        settled.decode.wait_metric(transfers + 1, TRANSFERS)
        settled.prefill.wait_metric(0, "vllm:kv_cache_usage_perc")  # so the end of the lease is in the log
    finally:
        proxy.stop()
    files = "router.jsonl prefill.jsonl decode.jsonl"
    trace = json.loads(settled.run(f"kvflow trace {files} --json"))
    [request] = [each for each in trace["requests"] if each["request_id"].startswith("cmpl-traced-1-")]
    assert (request["outcome"], len(request["pulls"]), len(request["offers"])) == ("completed", 1, 1)
    router, [pull], [offer] = request["router"], request["pulls"], request["offers"]
    assert (router["prefill_server"], router["decode_server"]) == (settled.prefill.url, settled.decode.url)
    assert (router["status"], router["failure"], router["failed_attempts"]) == (200, None, [])
    assert router["sent_bytes"] > 0
    assert pull["local_request_id"].startswith("cmpl-traced-1-")
    assert (offer["outcome"], pull["failure"]) == ("released", None)
    names = [phase["name"] for phase in request["phases"]]
    assert names[:2] == ["prefill", "ticket"]
    assert names[-1] == "decode step"
    assert {"queue", "wire", "fence", "deliver"} <= set(names[2:-1])
    assert request["first_token_s"] == pytest.approx(router["first_bytes_s"])
    assert request["total_s"] == pytest.approx(sum(phase["seconds"] for phase in request["phases"]), rel=0.01)
    assert request["clock_error_s"] is not None
    assert request["title"].startswith("first token ")
    told = settled.run(f"kvflow trace {files} --request {request['request_id']}")
    for part in (*names, settled.prefill.url, settled.decode.url):
        assert part in told


def test_the_doctor_follows_a_proxy_whose_prefill_server_is_gone(settled):
    """The proxy has the decode server compute the prompt: the doctor says so, and the log names the server."""
    port = free_port()
    gone = f"http://127.0.0.1:{free_port()}"
    shell = f"kvflow proxy --prefill {gone} --decode {settled.decode.url} --listen 127.0.0.1:{port} --log gone.jsonl"
    proxy = settled.serve("proxy-gone", shell, port)
    proxy.wait_ready()
    try:
        findings = examined(settled, proxy)
    finally:
        proxy.stop()
    assert codes(findings)[-1] == "router_does_not_ask"
    record = records(settled.folder / "gone.jsonl")[-1]
    assert record["event"] == "request.answered"
    assert [(each["role"], each["server"]) for each in record["failed_attempts"]] == [("prefill", gone)]
