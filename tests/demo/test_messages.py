"""What a demo engine takes from its port."""

import json

import msgspec
import pytest

from kvflow.tools.demo.engine import answer_completion
from kvflow.tools.demo.messages import OfferedPrompt, PromptRequest
from tests.helpers.loops import looped

REQUEST = {"prompt": [97, 98, 99], "max_tokens": 2, "kv_transfer_params": {}}


def test_a_request_is_read_as_it_was_written():
    request = PromptRequest(prompt=(97, 255, 0), max_tokens=2, kv_transfer_params={"kvflow": {}})
    assert msgspec.json.decode(msgspec.json.encode(request), type=PromptRequest) == request


@looped(
    "change",
    [
        {"prompt": []},
        {"prompt": [256]},
        {"prompt": [-1]},
        {"prompt": "text"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 2**60},
        {"kv_transfer_params": {str(number): 1 for number in range(65)}},
    ],
)
def test_numbers_that_no_demo_needs_are_refused(change):
    assert msgspec.convert(REQUEST, PromptRequest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(json.dumps({**REQUEST, **change}), type=PromptRequest)


@looped("token", [256, -1, "1", 1.5])
def test_a_first_token_that_is_none_is_refused(token):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kvflow": "a ticket", "first_token": token}, OfferedPrompt)


@pytest.mark.parametrize("body", [b"", b"\xff", b'{"prompt": "\xff"}', b'{"x": ' + b"[" * 100_000, b"[]", b"{}"])
async def test_what_is_no_request_is_answered(body):
    answer = await answer_completion(None, "r", body)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["message"]


async def test_a_name_of_a_request_that_is_too_long_is_refused():
    answer = await answer_completion(None, "x" * 257, json.dumps(REQUEST).encode())
    assert answer.status == 400
    assert "X-Request-Id" in json.loads(answer.body)["error"]["message"]
