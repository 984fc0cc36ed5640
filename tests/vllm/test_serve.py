"""A proxy and two servers, as docs/howto/vllm.md starts them, answer clients as a single server does."""

import io
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.docs.scraping import labels_asked_for, queries_shown, renamed, rules

from .clients import (
    BLOCK_BYTES,
    ENDED,
    LEASES,
    RELEASED,
    TOKENS,
    TRANSFERS,
    UNTAGGED,
    asked,
    blocks_of,
    client_of,
    hang_up,
    text_of,
    ticket_of,
    tokens_of,
    totals,
)
from .engines import ANSWER_S, PREFILL_PARAMS
from .howto import PROXY_PORT, blocks, log_line
from .prompts import prompt_of
from .servers import RUNNING, USAGE, fetch

LENGTHS = (3, 128, 150, 333, 512, 700)

FAILED = "vllm:kvflow_failed_transfers_total"

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""What Prometheus 2.42 accepts."""

NEVER_COUNTED = {
    "vllm:kvflow_defects_total": "kvflow raises no exception of its own",
    "vllm:kvflow_prefixes_total": "neither server has sources",
}
"""Series of vLLM that the servers of the page name and have no sample of -> why."""


@pytest.fixture(scope="module", autouse=True)
def before(deployment):
    """Return what went wrong before these tests."""
    return wrong(deployment)


def wrong(deployment):
    """Return how many transfers failed, how many leases ended unread, and how many records tell of trouble."""
    records = deployment.records("decode") + deployment.records("prefill")
    return (
        deployment.decode.metric("vllm:kvflow_failed_transfers_total"),
        deployment.prefill.metric(LEASES) - deployment.prefill.metric(LEASES, **RELEASED),
        sum(each["level"] != "info" for each in records),
    )


def said_by(program, port):
    """Run the page's Python against another server, and return what it printed."""
    printed, names = io.StringIO(), {}
    with redirect_stdout(printed):
        exec(compile(program.replace(f":{PROXY_PORT}/", f":{port}/"), "vllm.md", "exec"), names)
    names["client"].close()
    return printed.getvalue()


def test_the_commands_of_the_page_work_in_its_order(settled):
    """It installs (only read, in tests/docs/test_vllm_page.py), starts servers, asks them, and reads the records."""
    _chat, _install, *started, asking, records, _resets = blocks("sh")
    assert settled.ran == [block.strip() for block in started]
    for server in (settled.prefill, settled.decode):
        assert log_line("is at tcp://").search(server.log.read_text())
    transfers, released = settled.decode.metric(TRANSFERS), settled.prefill.metric(LEASES, **RELEASED)
    text = json.loads(settled.run(asking))["choices"][0]["text"]
    alone = json.loads(settled.run(asking.replace(f":{PROXY_PORT}/", f":{settled.alone_port}/")))["choices"][0]["text"]
    assert text == alone
    assert len(text) > TOKENS
    [program] = blocks("python")
    program = program.replace("MODEL", settled.model)
    said = said_by(program, settled.ports[PROXY_PORT])
    assert said == said_by(program, settled.alone_port)
    assert len(said) > TOKENS
    settled.decode.wait_metric(transfers + 2, TRANSFERS)
    settled.prefill.wait_metric(released + 2, LEASES, **RELEASED)
    found = [json.loads(line)["event"] for line in settled.run(records).splitlines()]
    assert min(found.count("transfer.completed"), found.count("lease.ended")) >= 2
    assert set(found) == {"transfer.completed", "lease.ended"}


def test_concurrent_streams_match_one_server_and_transfers_are_counted(settled):
    prompts = {f"stream-{length}": prompt_of(length, "serve") for length in LENGTHS}
    alone = {name: tokens_of(settled, settled.alone, prompt) for name, prompt in prompts.items()}
    assert all(len(set(tokens)) > TOKENS // 4 for tokens in alone.values())
    before = totals(settled)
    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = {
            name: threads.submit(tokens_of, settled, settled.proxy, prompt, name=name)
            for name, prompt in prompts.items()
        }
    assert {name: stream.result() for name, stream in streams.items()} == alone

    settled.decode.wait_metric(before[0] + len(prompts), "vllm:kvflow_transfer_seconds_count")
    settled.prefill.wait_metric(before[3] + len(prompts), "vllm:kvflow_leases_ended_total", **RELEASED)
    transfers, nbytes, descriptors, _ = (now - then for now, then in zip(totals(settled), before, strict=True))
    pulls = [each for each in settled.records("decode") if each.get("local_request_id", "").startswith("cmpl-stream-")]
    assert len(pulls) == transfers
    assert sum(each["nbytes"] for each in pulls) == nbytes
    assert sum(each["descriptors"] for each in pulls) == descriptors
    if "llama" in settled.model:  # which keeps every token
        assert nbytes == sum(map(blocks_of, LENGTHS)) * BLOCK_BYTES

    leases = {each["request_id"]: each for each in settled.records("prefill") if each["event"] == "lease.ended"}
    for name in prompts:
        [pull] = [each for each in pulls if each["local_request_id"].startswith(f"cmpl-{name}-0-")]
        assert pull["event"] == "transfer.completed"
        assert pull["request_id"].startswith(f"cmpl-{name}-0-")
        assert leases[pull["request_id"]]["outcome"] == "released"


APIS = {
    "/v1/responses": ("input", "max_output_tokens", {"include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "/v1/messages": ("messages", "max_tokens", {}),
}
"""Path -> the fields of the prompt and of the limit, and further ones that show each token."""


def talked(deployment, server, path, prompt, **fields):
    """Return the text of an answer of another API, its tokens if it names them, and how many there were."""
    asking, limit, extra = APIS[path]
    said = [{"role": "user", "content": prompt}] if asking == "messages" else prompt
    asked = {"model": deployment.model, asking: said, limit: TOKENS, "temperature": 0, **extra, **fields}
    request = urllib.request.Request(
        server.url + path, json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
        content = answer.read()
    if not asked.get("stream"):
        answer = json.loads(content)
        parts = answer["content"] if asking == "messages" else answer["output"][0]["content"]
        tokens = [each["bytes"] for part in parts for each in part.get("logprobs") or ()]
        assert answer.get("kv_transfer_params") is None
        return "".join(part["text"] for part in parts), tokens, answer["usage"]["output_tokens"]
    events = [json.loads(line[5:]) for line in content.splitlines() if line.startswith(b"data: {")]
    deltas = [event["delta"] for event in events if "delta" in event]
    return "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)


@pytest.mark.parametrize("path", APIS)
def test_the_other_apis_say_through_the_proxy_what_one_server_says(settled, path):
    prompt = text_of(300, f"api {path}")
    before = totals(settled)
    alone = talked(settled, settled.alone, path, prompt)
    _, tokens, number = alone
    assert number == TOKENS
    assert len(tokens) == (TOKENS if path == "/v1/responses" else 0)
    assert talked(settled, settled.proxy, path, prompt) == alone
    assert talked(settled, settled.proxy, path, text_of(300, f"api {path}, again"), stream=True) == talked(
        settled, settled.alone, path, text_of(300, f"api {path}, again"), stream=True
    )
    settled.decode.wait_metric(before[0] + 2, TRANSFERS)
    settled.prefill.wait_metric(before[3] + 2, LEASES, **RELEASED)


def test_what_needs_no_cache_is_answered_by_the_decode_server(settled):
    transfers = settled.decode.metric(TRANSFERS)
    assert fetch(f"{settled.proxy.url}/version") == fetch(f"{settled.decode.url}/version")
    counted = []
    for server in (settled.decode, settled.proxy):
        for path, fields in (
            ("/tokenize", {"prompt": "a cache that travels"}),
            ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a cache"}]}),
        ):
            body = json.dumps({"model": settled.model, **fields}).encode()
            request = urllib.request.Request(server.url + path, body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
                counted.append(json.loads(answer.read()))
    assert counted[:2] == counted[2:]
    assert settled.decode.metric(TRANSFERS) == transfers


def test_several_prompts_in_one_request_are_continued_as_by_one_server(settled):
    prompts = [prompt_of(40, "one"), prompt_of(150, "another")]
    said = [asked(settled, server, prompt=prompts).choices for server in (settled.alone, settled.proxy)]
    assert [choice.token_ids for choice in said[0]] == [choice.token_ids for choice in said[1]]
    assert len(said[0]) == 2


def test_every_sample_of_a_prompt_is_made(settled):
    for number in range(3):
        made = asked(settled, settled.proxy, prompt=prompt_of(200, f"samples {number}"), n=4, temperature=1)
        assert [(choice.finish_reason, len(choice.token_ids)) for choice in made.choices] == [("length", TOKENS)] * 4


def taken(server):
    """Return the share of a server's blocks that are taken, when nothing runs there."""
    server.wait_metric(0, RUNNING)
    return server.metric(USAGE)


def expect_pulled(deployment, answer, ask):
    """Check that a prefill server's answer has the only ticket, by which the other server says what one alone does."""
    held = taken(deployment.prefill)
    before, ended = totals(deployment), deployment.prefill.metric("vllm:kvflow_leases_ended_total")
    said = asked(deployment, deployment.decode, ticket_of(answer), **ask)
    alone = asked(deployment, deployment.alone, None, **ask)
    assert [choice.token_ids for choice in said.choices] == [choice.token_ids for choice in alone.choices]
    deployment.prefill.wait_metric(ended + 1, "vllm:kvflow_leases_ended_total")
    deployment.decode.wait_metric(before[0] + 1, "vllm:kvflow_transfer_seconds_count")
    deployment.prefill.wait_idle()
    transfers, nbytes, _, released = (now - then for now, then in zip(totals(deployment), before, strict=True))
    assert (transfers, released) == (1, 1)
    return held, nbytes


@pytest.mark.parametrize(("n", "max_tokens"), [(2, 1), (4, 5)])
def test_samples_of_a_prompt_are_answered_with_one_ticket(settled, n, max_tokens):
    found = []
    for samples in (1, n):
        ask = {"prompt": prompt_of(300, f"{samples} of {n}, {max_tokens}")}
        drawn = {"n": samples, "temperature": 1, "max_tokens": 1 if samples == 1 else max_tokens}
        answer = asked(settled, settled.prefill, PREFILL_PARAMS, **ask, **drawn)
        assert len(answer.choices) == samples
        found.append(expect_pulled(settled, answer, ask))
    assert found[0] == found[1], "as many blocks are taken, and bytes moved, as of one sample"
    assert min(found[0]) > 0


def test_samples_of_a_chat_are_answered_with_one_ticket(settled):
    ask = {"messages": [{"role": "user", "content": "Why does a cache travel three times? " * 20}], "chat": True}
    answer = asked(settled, settled.prefill, PREFILL_PARAMS, n=3, temperature=1, **ask | {"max_tokens": 1})
    assert len(answer.choices) == 3
    held, nbytes = expect_pulled(settled, answer, ask)
    assert min(held, nbytes) > 0


def test_several_prompts_are_answered_with_the_ticket_of_the_first(settled):
    prompts = [prompt_of(300, f"{name} of several") for name in ("first", "second", "third")]
    answer = asked(settled, settled.prefill, PREFILL_PARAMS, prompt=prompts, max_tokens=1, n=2, temperature=1)
    assert len(answer.choices) == 6
    held, nbytes = expect_pulled(settled, answer, {"prompt": prompts[0]})
    assert min(held, nbytes) > 0


LEGS = {
    "max_tokens": ("/completions", {"prompt": "TEXT", "max_tokens": 8}),
    "no limit": ("/completions", {"prompt": "TEXT"}),
    "chat": ("/chat/completions", {"messages": [{"role": "user", "content": "TEXT"}]}),
    "responses": ("/responses", {"input": "TEXT", "max_tokens": 1}),  # its own name is max_output_tokens
}


@pytest.mark.parametrize("leg", LEGS)
def test_a_prefill_that_asks_for_more_than_one_token_makes_one(settled, leg):
    path, asked = LEGS[leg]
    asked = {**asked, "model": settled.model, "temperature": 0}
    asked = json.loads(json.dumps(asked).replace("TEXT", f"How does a cache travel in {leg}? " * 9))
    limit = {"max_output_tokens" if leg == "responses" else "max_tokens": TOKENS}
    transfers = settled.decode.metric(TRANSFERS)

    def answer(server, **further):
        with client_of(server) as client:
            return client.post(path, body=asked | further, cast_to=dict[str, object])

    made = answer(settled.prefill, kv_transfer_params=PREFILL_PARAMS)
    assert 1 in made["usage"].values()
    read = answer(settled.decode, kv_transfer_params=made["kv_transfer_params"], **limit)
    alone = answer(settled.alone, **limit)
    assert texts_of(read) == texts_of(alone) != []
    settled.decode.wait_metric(transfers + 1, TRANSFERS)


def texts_of(answer):
    """Return what an answer says, whatever its API."""
    said = answer.get("choices") or [part for item in answer["output"] for part in item["content"]]
    return [each["message"]["content"] if "message" in each else each["text"] for each in said]


def test_a_request_without_parameters_is_counted(settled):
    for server in (settled.prefill, settled.decode):
        absent, decline = (server.metric(UNTAGGED, params=params) for params in ("absent", "decline"))
        ended = server.metric(ENDED)
        asked(settled, server, None, prompt=prompt_of(30), max_tokens=2)
        server.wait_metric(absent + 1, UNTAGGED, params="absent")
        asked(settled, server, {"do_remote_prefill": False}, prompt=prompt_of(30), max_tokens=2)
        server.wait_metric(decline + 1, UNTAGGED, params="decline")
        server.wait_metric(ended + 2, ENDED)  # the next test counts what ends


def test_a_client_that_hangs_up_in_the_middle_leaves_nothing_behind(settled):
    hang_up(settled, settled.proxy, prompt_of(200, "left"))
    prompt = prompt_of(200, "next")
    assert tokens_of(settled, settled.proxy, prompt) == tokens_of(settled, settled.alone, prompt)


@pytest.mark.parametrize("fields", [{"max_tokens": 5000}, {"max_tokens": 5, "n": 0}, {"temperature": -1}], ids=str)
def test_a_refused_request_has_the_same_message_and_keeps_no_blocks(settled, fields):
    asked = {"model": settled.model, "prompt": prompt_of(150, str(fields)), "max_tokens": 5, **fields}
    errors = []
    for server in (settled.alone, settled.proxy):
        with client_of(server) as client, pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked)
        errors.append(refused.value.body)
    assert errors[0] == errors[1]


def test_nothing_failed_and_no_lease_ran_out(deployment, before):
    assert wrong(deployment) == before


def test_the_resets_of_the_page_succeed_while_a_ticket_is_out(settled):
    ask = {"prompt": prompt_of(300, "before an update")}
    old = ticket_of(asked(settled, settled.prefill, PREFILL_PARAMS, **ask | {"max_tokens": 1}))
    assert settled.run(blocks("sh")[-1]) == '{"success":true}' * 2
    with pytest.raises(openai.InternalServerError):
        asked(settled, settled.decode, old, **ask)
    assert "[stale_lease]" in settled.decode.log.read_text()
    assert tokens_of(settled, settled.proxy, ask["prompt"]) == tokens_of(settled, settled.alone, ask["prompt"])


def queries_of_vllm():
    """Return all queries of the rules and of the dashboard for vLLM servers."""
    return [each["expr"] for each in rules("vllm")] + queries_shown("vllm")


@pytest.mark.parametrize("path", ["/metrics", "/metrics/"])
def test_prometheus_stores_what_alerts_and_the_dashboard_ask_for(settled, path):
    """With the slash, Prometheus 2 is answered with other names, which the job of docs/howto/monitor.md gives back."""
    ask = {"prompt": prompt_of(300, f"scraped {path}")}
    transfers, failed = settled.decode.metric(TRANSFERS), settled.decode.metric(FAILED, code="stale_lease")
    untagged, released = settled.decode.metric(UNTAGGED), settled.prefill.metric(LEASES, **RELEASED)
    params = ticket_of(asked(settled, settled.prefill, PREFILL_PARAMS, **ask | {"max_tokens": 1}))
    asked(settled, settled.decode, params, **ask)
    settled.prefill.wait_metric(released + 1, LEASES, **RELEASED)
    with pytest.raises(openai.InternalServerError):
        asked(settled, settled.decode, params, **ask)
    asked(settled, settled.decode, None, **ask)
    settled.decode.wait_metric(transfers + 1, TRANSFERS)
    settled.decode.wait_metric(failed + 1, FAILED, code="stale_lease")
    settled.decode.wait_metric(untagged + 1, UNTAGGED)

    named, labels = set(), {}
    for server in (settled.prefill, settled.decode):
        scrape = urllib.request.Request(server.url + path, headers={"Accept": PROMETHEUS_2})
        for family in text_string_to_metric_families(fetch(scrape).decode()):
            named.add(renamed(f"{family.name}_total"))
            labels |= {renamed(sample.name): set(sample.labels) for sample in family.samples}
    wanted = {name for query in queries_of_vllm() for name in labels_asked_for(query)}
    assert wanted - labels.keys() == NEVER_COUNTED.keys()
    assert NEVER_COUNTED.keys() <= named
    for query in queries_of_vllm():
        for name, those in labels_asked_for(query).items():
            assert name in NEVER_COUNTED or those <= labels[name], query
