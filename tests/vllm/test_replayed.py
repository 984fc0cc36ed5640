"""Routers that cannot run here, by their transcripts, before real engines: equal tokens, and the bytes that moved.

A router that computes everything twice says the same tokens: each test counts transfers and bytes as well.
"""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from .clients import TWO_SAMPLES, UNTAGGED, Moved
from .prompts import prompt_of
from .replaying import Answer, Replay, post, transcripts

TRANSCRIPTS = transcripts()
ROUTERS = list(TRANSCRIPTS)
CHATS = [name for name, transcript in TRANSCRIPTS.items() if "/v1/chat/completions" in transcript["apis"]]
LEAVES_MIN_TOKENS = ("production-stack",)
TOKENS = 16
ANOTHER_LOOPBACK = "127.0.0.2"
"""A pod's address that is not what the prefill engine advertises."""


def prefill_url(deployment):
    return deployment.prefill.url.replace("127.0.0.1", ANOTHER_LOOPBACK)


def behind(deployment, router, **named):
    """Return a router before the pair, which knows the prefill server by another address than the ticket."""
    usual = {"prefill": prefill_url(deployment), "decode": deployment.decode.url}
    return Replay(TRANSCRIPTS[router], **usual | named)


def completion(deployment, prompt, *, stream=False, **further):
    """Return the path and the body of a client's request for a prompt of tokens."""
    asked = {"model": deployment.model, "prompt": prompt, **streaming(stream)}
    return "/v1/completions", {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **asked, **further}


def chat(deployment, text, *, stream=False):
    """Return the path and the body of a client's question; its characters are escaped by some routers."""
    asked = {"model": deployment.model, "messages": [{"role": "user", "content": text}], **streaming(stream)}
    return "/v1/chat/completions", {"max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **asked}


def streaming(stream):
    return {"stream": True, "stream_options": {"include_usage": True}} if stream else {}


def agree(deployment, replay, path, body):
    """Check that a client behind a router gets what one server says; return what it got."""
    expected = Answer(*post(deployment.alone.url, path, (), json.dumps(body).encode()), "")
    answer = replay.ask(path, body)
    assert (answer.status, expected.status) == (200, 200), (answer.body, expected.body)
    assert answer.tokens() == expected.tokens()
    assert all(len(sample) == TOKENS for sample in answer.tokens())
    return answer


@pytest.mark.parametrize("router", ROUTERS)
def test_completions_are_those_of_one_server(settled, router):
    with Moved(settled) as moved:
        for length in (3, 128, 333):
            agree(settled, behind(settled, router), *completion(settled, prompt_of(length, router)))
            moved.prompts.append(length)


@pytest.mark.parametrize("router", ROUTERS)
def test_streams_are_those_of_one_server(settled, router):
    with Moved(settled) as moved:
        prompt = prompt_of(200, f"streamed {router}")
        agree(settled, behind(settled, router), *completion(settled, prompt, stream=True))
        moved.prompts.append(len(prompt))
        if router in CHATS:
            asked = chat(settled, f"Does {router} stream?", stream=True)
            moved.prompts.append(agree(settled, behind(settled, router), *asked).prompt_tokens())


@pytest.mark.parametrize("router", CHATS)
def test_chats_are_those_of_one_server(settled, router):
    with Moved(settled) as moved:
        for text in (f"Why does {router} carry a ticket?", f"{router}: is 2 < 3 & 3 > 2? Grüße, 東京\u2028" * 9):
            moved.prompts.append(agree(settled, behind(settled, router), *chat(settled, text)).prompt_tokens())


@pytest.mark.parametrize("router", ROUTERS)
def test_two_samples_are_those_of_one_server(settled, router):
    with Moved(settled) as moved:
        asked = completion(settled, prompt_of(200, f"samples {router}"), **TWO_SAMPLES)
        assert len(agree(settled, behind(settled, router), *asked).tokens()) == 2
        moved.prompts.append(200)


@pytest.mark.parametrize("router", ROUTERS)
def test_a_least_number_of_tokens_is_no_matter_of_prefill(settled, router):
    """A router that leaves ``min_tokens`` above ``max_tokens``, which is 1 then, has vLLM refuse the request."""
    with Moved(settled) as moved:
        asked = completion(settled, prompt_of(200, f"least {router}"), min_tokens=4)
        if router in LEAVES_MIN_TOKENS:
            answer = behind(settled, router).ask(*asked)
            assert answer.status == 400
            assert list(answer.sent) == ["prefill"]
        else:
            agree(settled, behind(settled, router), *asked)
            moved.prompts.append(200)


@pytest.mark.parametrize("router", ROUTERS)
def test_concurrent_requests_are_those_of_one_server(settled, router):
    lengths = (31, 40, 150, 257, 512)
    with Moved(settled) as moved, ThreadPoolExecutor(len(lengths)) as threads:
        asked = [completion(settled, prompt_of(length, f"at once {router}")) for length in lengths]
        list(threads.map(lambda request: agree(settled, behind(settled, router), *request), asked))
        moved.prompts += lengths


@pytest.mark.parametrize("router", ROUTERS)
def test_both_servers_know_a_request_by_one_name(settled, router):
    with Moved(settled) as moved:
        answer = agree(settled, behind(settled, router), *completion(settled, prompt_of(40, f"name {router}")))
        moved.prompts.append(40)
    [pull] = [each for each in settled.records("decode") if answer.request_id in each.get("local_request_id", "")]
    assert pull["event"] == "transfer.completed"
    assert answer.request_id in pull["request_id"]
    assert pull["nbytes"] > 0


@pytest.mark.parametrize("router", ROUTERS)
def test_a_failed_prefill_ends_the_request(settled, router):
    """The prefill server is one that only decodes: kvflow refuses to offer there, and vLLM answers HTTP 500."""
    with Moved(settled):
        replay = behind(settled, router, prefill=settled.decode.url)
        answer = replay.ask(*completion(settled, prompt_of(40, f"failed {router}")))
        told = TRANSCRIPTS[router]["prefill_error"]["status"]
        assert answer.status == (500 if told == "its own" else told)
        assert list(answer.sent) == ["prefill"]
    assert "the kv_role of this engine is kv_consumer" in settled.decode.log.read_text()


@pytest.mark.parametrize("router", ROUTERS)
def test_without_a_ticket_nothing_moves(settled, router):
    """The prefill server has no connector: its ``kv_transfer_params`` are null."""
    asked = completion(settled, prompt_of(200, f"no ticket {router}"))
    with Moved(settled):
        replay = behind(settled, router, prefill=settled.alone.url)
        if TRANSCRIPTS[router]["copied"]["null"] == "error":
            answer = replay.ask(*asked)
            assert answer.status == TRANSCRIPTS[router]["prefill_error"]["status"]
            assert list(answer.sent) == ["prefill"]
        else:
            before = settled.decode.metric(UNTAGGED)
            agree(settled, replay, *asked)
            settled.decode.wait_metric(before + 1, UNTAGGED)


def test_further_keys_beside_the_wish_change_nothing(settled):
    variants = [(name, variant) for name, transcript in TRANSCRIPTS.items() for variant in transcript["variants"]]
    assert variants
    with Moved(settled) as moved:
        for router, variant in variants:
            asked = completion(settled, prompt_of(200, variant))
            answer = agree(settled, behind(settled, router, variant=variant), *asked)
            assert b"remote_kv_source" in answer.sent["prefill"]
            moved.prompts.append(200)


def doubled(value):
    """Return a JSON value with a double for every integer, as protobuf's Struct has it."""
    if isinstance(value, dict):
        return {key: doubled(each) for key, each in value.items()}
    if isinstance(value, list):
        return [doubled(each) for each in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


REWRITTEN = {
    "another host": lambda params: params | {"remote_host": "prefill.example"},
    "another port": lambda params: params | {"remote_port": 1},
    "another engine": lambda params: params | {"remote_engine_id": "x", "remote_request_id": "y"},
    "other numbers": lambda params: params | {"tp_size": 8, "remote_num_tokens": 1, "pp_size": 2},
    "other blocks": lambda params: params | {"remote_block_ids": [[0]]},
    "fields of other types": lambda params: params | {"remote_port": "5600", "tp_size": None, "remote_block_ids": {}},
    "unknown fields": lambda params: params | {"transfer_id": "tx1", "remote_dp_rank": 3, "nested": {"a": [1]}},
    "doubles for integers": doubled,
    "keys in another order": lambda params: dict(reversed(params.items())),
    "the ticket alone": lambda params: {name: params[name] for name in ("kvflow", "do_remote_prefill")},
}


@pytest.mark.parametrize("what", REWRITTEN)
def test_what_is_rewritten_beside_the_ticket_changes_nothing(settled, what):
    with Moved(settled) as moved:
        replay = behind(settled, "production-stack", tamper=REWRITTEN[what])
        agree(settled, replay, *completion(settled, prompt_of(200, what)))
        moved.prompts.append(200)
    assert "a router has rewritten remote_host in kv_transfer_params" in settled.decode.log.read_text()
