"""What a proxy sends to whom, and what of it a client may see."""

import json
import tracemalloc

import msgspec
import pytest

from kvflow.tools.proxy.completions import (
    ONE_TOKEN,
    OTHERS_BYTES_MAX,
    PARAMS,
    RequestMalformed,
    StreamErrors,
    decode_body,
    error_message,
    prefill_body,
    read_completion,
    read_params,
    without_params,
)
from tests.helpers.loops import looped

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


def prefilled(path="/v1/completions", **fields):
    return json.loads(prefill_body(read_completion(json.dumps(fields).encode()), path))


@looped(
    "asked, sent",
    [
        ({}, {"max_tokens": 1}),
        ({"max_tokens": None}, {"max_tokens": 1}),
        ({"max_tokens": 1}, {"max_tokens": 1}),
        ({"max_tokens": 64, "min_tokens": 8, "n": 4}, {"max_tokens": 1, "n": 1}),
        ({"max_completion_tokens": 64}, {"max_completion_tokens": 1, "max_tokens": 1}),
        ({"stream": True, "stream_options": {"include_usage": True}}, {"stream": False, "max_tokens": 1}),
        ({"stream": False}, {"stream": False, "max_tokens": 1}),
        ({"temperature": 0.7, "stop": ["a"]}, {"temperature": 0.7, "stop": ["a"], "max_tokens": 1}),
        ({"kv_transfer_params": None}, {"max_tokens": 1}),
    ],
)
def test_a_prefill_server_is_asked_for_one_token_and_its_cache(asked, sent):
    assert prefilled(prompt="a", **asked) == {"prompt": "a", **sent, PARAMS: OFFER}


@looped("value", ["500", 5e2, 500, 3.0, "true", True, 1, 0, -1, None, [], {"a": 1}])
@looped("path", ONE_TOKEN)
def test_no_type_of_json_makes_a_prefill_server_do_more(path, value):
    """A server may take a text for a number: whatever the client sends is replaced, not read."""
    trimmed = ("max_tokens", "max_output_tokens", "max_completion_tokens", "n", "stream", "background", "store")
    sent = prefilled(path, **dict.fromkeys((*trimmed, "min_tokens", "stream_options"), value))
    asked = dict.fromkeys(ONE_TOKEN[path], 1) | {
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        "background": False,
    }
    asked |= {"store": False} if path == "/v1/responses" else {}
    assert {name: sent[name] for name in asked} == asked
    assert all(type(sent[name]) is type(asked[name]) for name in asked)
    assert not {"min_tokens", "stream_options"} & sent.keys()


@pytest.mark.parametrize(
    ("path", "limit"),
    [("/v1/responses", {"max_output_tokens": 1, "store": False}), ("/v1/messages", {"max_tokens": 1})],
)
def test_each_api_names_its_limit_of_tokens(path, limit):
    assert prefilled(path, input="a", system="b") == {"input": "a", "system": "b", **limit, PARAMS: OFFER}


ERRORS = [
    b'data: {"error": {"message": "no"}}\n\n',
    b'data: {"error":{"message":"no"}}\r\n\r\n',
    b'event: error\ndata: {"type": "error", "error": {"message": "no"}}\n\n',
    b'event: response.failed\ndata: {"response": {"error": {"message": "no"}}}\n\n',
]
NO_ERRORS = [
    b'data: {"error": null, "text": "x"}\n\n',
    b'data: {"text": "data: {\\"error\\": {}}\\nevent: error"}\n\n',
    b'event: message_delta\ndata: {"text": "event: error"}\n\n',
]


@looped("size", [1, 7, 1000])
@looped("error", ERRORS)
def test_an_error_in_a_stream_is_found_however_it_is_cut(error, size):
    found = StreamErrors()
    text = b"".join(NO_ERRORS) + error + b"data: [DONE]\n\n"
    pieces = [text[begin : begin + size] for begin in range(0, len(text), size)]
    assert [each for each in map(found.find, pieces) if each]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_words_in_a_stream_are_no_error(size):
    found = StreamErrors()
    text = b"".join(NO_ERRORS) + b"data: " + b"x" * 5000 + b'"error": 1\n\n'
    assert not any(found.find(text[begin : begin + size]) for begin in range(0, len(text), size))


@looped(
    "answer, message",
    [
        (b'{"error": {"message": "out of memory", "code": 500}}', "out of memory"),
        (b"<html>", "<html>"),
        (b"\xff" * 2, "\ufffd\ufffd"),
        (b'{"error": "x"}', '{"error": "x"}'),
        (b"x" * 9000, "x" * 500),
        (b'{"error": {"message": "kv_transfer_params: {mac: 5a}"}}', ""),
    ],
    ids=["vLLM", "HTML", "bytes", "text", "long", "a ticket"],
)
def test_what_a_server_says_of_its_failure_is_short_and_no_ticket(answer, message):
    assert error_message(answer) == message


def test_fields_and_ticket_reach_the_decode_server_byte_for_byte():
    completion = read_completion(
        b'{"prompt": [1, 2,3], "temperature":1.50, "x":123456789012345678901234567890, "y":"\\u00e9"}'
    )
    params = read_params(b'{"id": 1, "kv_transfer_params": {"do_remote_prefill" : true, "epoch": 1e2, "e": "\\u0041"}}')
    assert decode_body(completion, params) == (
        b'{"prompt":[1, 2,3],"temperature":1.50,"x":123456789012345678901234567890,"y":"\\u00e9",'
        b'"kv_transfer_params":{"do_remote_prefill" : true, "epoch": 1e2, "e": "\\u0041"}}'
    )
    assert PARAMS.encode() not in decode_body(completion, None)


def test_a_null_for_a_ticket_is_no_ticket():
    assert decode_body(read_completion(b'{"prompt": "a", "kv_transfer_params": null}'), None) == b'{"prompt":"a"}'


@looped(
    "answer",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"kv_transfer_params": null}',
        b'{"kv_transfer_params": "text"}',
        b'{"kv_transfer_params": {}}',
        b'{"kv_transfer_params": {"do_remote_prefill": false}}',
        b'{"kv_transfer_params": {"do_remote_prefill": "true"}}',
        b'{"kv_transfer_params": {"do_remote_prefill": true}',
        b'{"kv_transfer_params": ' + b"[" * 100_000,
    ],
)
def test_an_answer_without_a_ticket_has_none(answer):
    assert read_params(answer) is None


@looped(
    "fields, alone",
    [
        ({"prompt": "one"}, False),
        ({"prompt": ["one"]}, False),
        ({"prompt": [1, 2, 3]}, False),
        ({"prompt": [[1, 2, 3]]}, False),
        ({"prompt": []}, False),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}, False),
        ({"prompt": ["one", "two"]}, True),
        ({"prompt": [[1], [2]]}, True),
        ({"prompt": "one", "prompt_embeds": "AAAA"}, True),
        ({"input": "one"}, False),
        ({"input": [{"role": "user", "content": "a"}], "previous_response_id": None}, False),
        ({"input": "one", "previous_response_id": "resp_1"}, True),
    ],
)
def test_only_one_prompt_can_have_a_ticket(fields, alone):
    assert bool(read_completion(json.dumps(fields).encode()).alone) is alone


@looped("name", ["prompt", "messages", "prompt_embeds", "input", "instructions", "system"])
def test_what_the_model_is_given_may_be_long(name):
    assert read_completion(json.dumps({name: "x" * (OTHERS_BYTES_MAX + 1)}).encode()).fields


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": "a", "stream": [[]] * OTHERS_BYTES_MAX}),
        json.dumps({f"{number:09}": 1 for number in range(OTHERS_BYTES_MAX // 9)}),
        '{"prompt": "a", "prompt": "' + "x" * OTHERS_BYTES_MAX + '", "prompt": "a"}',
    ],
    ids=["a field", "many fields", "a field again"],
)
def test_what_the_proxy_reads_may_not(body):
    with pytest.raises(RequestMalformed, match=f"more than {OTHERS_BYTES_MAX} bytes"):
        read_completion(body.encode())


def test_a_body_takes_no_more_memory_than_the_page_says():
    """Of its long fields four times as much with the body itself; of all others 24 MiB."""
    params = msgspec.Raw(b"{}")
    bodies = {
        "long": (json.dumps({"prompt": "x" * (8 << 20)}).encode(), 3),
        "others": (json.dumps({f"{number:05}": 1 for number in range(OTHERS_BYTES_MAX // 12)}).encode(), 24),
    }
    for name, (body, times) in bodies.items():
        tracemalloc.start()
        try:
            completion = read_completion(body)
            prefill_body(completion, "/v1/completions")
            if name == "long":
                decode_body(completion, params)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(body) / 2 < most < times * len(body), name


def test_a_long_list_of_prompts_makes_no_objects():
    body = b'{"prompt": [' + b"[[[]]], " * 200_000 + b"1]}"
    tracemalloc.start()
    try:
        assert read_completion(body).alone
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3 * len(body)  # 200,000 lists of lists take thirty times as much


@looped(
    "body, reason",
    [
        (b"", "truncated"),
        (b"prompt=a", "malformed"),
        (b"[]", "Expected `object`"),
        (b'"text"', "Expected `object`"),
        (b'{"prompt": "a"', "truncated"),
        (b'{"prompt": "a"} {"prompt": "b"}', "trailing"),
        (b'{"prompt": NaN}', "malformed"),
        (b'{"prompt": "\xff"}', "utf-8"),
        (b'{"prompt": "a", "user": "\xff"}', "utf-8"),
        (b'{"prompt": "\\ud800"}', "truncated"),
        (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "recursion"),
        (b'{"prompt": "a", "kv_transfer_params": {}}', "clients must not send"),
        (b'{"prompt": "a", "kv_transfer_params": {"do_remote_prefill": true}}', "clients must not send"),
        (b'{"prompt": "a", "kv_transfer_params": null, "kv_transfer_params": {}}', "clients must not send"),
        (b'{"prompt": "a", "kv_transfer_p\\u0061rams": 0}', "clients must not send"),
    ],
)
def test_a_body_that_cannot_be_sent_on_is_refused_with_a_reason(body, reason):
    with pytest.raises(RequestMalformed, match=reason):
        read_completion(body)


@looped("failed", [False, True])
@looped("answer", [b"", b'{"id": 1}', b'{"id" : "\\u0041"}', b'{"error": {"message": "no such model"}}', b"<html>"])
def test_an_answer_that_does_not_speak_of_tickets_stays_as_it_is(answer, failed):
    assert without_params(answer, failed=failed) == answer


@pytest.mark.parametrize("params", ["null", '{"kvflow": {"mac": "abc"}}'])
def test_tickets_are_cut_out_of_an_answer(params):
    answer = b'{"id" : "\\u0041","kv_transfer_params":%b,"text":"of kv_transfer_params"}' % params.encode()
    assert without_params(answer, failed=False) == b'{"id":"\\u0041","text":"of kv_transfer_params"}'


@pytest.mark.parametrize(
    "answer",
    [
        b"{\"error\": {\"message\": \"1 validation error: {'input': {'kv_transfer_params': {'mac': 'abc'}}}\"}}",
        b'kv_transfer_params: {"mac": "abc"}',
    ],
)
def test_an_error_that_quotes_a_ticket_is_replaced(answer):
    kept = without_params(answer, failed=True)
    assert b"abc" not in kept
    assert "message" in msgspec.json.decode(kept).get("error", {"message": ""})
