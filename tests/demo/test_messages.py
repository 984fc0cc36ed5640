"""What a demo engine takes from its port."""

import json

import msgspec
import pytest

from kvflow.tools.demo.channel import _answer
from kvflow.tools.demo.messages import Decode, Failed, Prefill, request_from_line, to_line

DECODE = {
    "type": "decode",
    "request_id": "r",
    "num_prompt_tokens": 3,
    "token": 1,
    "max_tokens": 2,
    "kv_transfer_params": {},
}


def test_a_request_is_read_as_it_was_written():
    for request in (
        Prefill(request_id="r", prompt=b"abc"),
        Decode(request_id="r", num_prompt_tokens=3, token=255, max_tokens=2, kv_transfer_params={"kvflow": {}}),
    ):
        assert request_from_line(to_line(request)) == request


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": -(2**60)},
        {"num_prompt_tokens": 2**60},
        {"max_tokens": -1},
        {"max_tokens": 2**60},
        {"token": 256},
        {"token": -1},
        {"request_id": ""},
        {"request_id": "x" * 257},
        {"kv_transfer_params": {str(number): 1 for number in range(65)}},
    ],
    ids=str,
)
def test_numbers_that_no_demo_needs_are_refused(change):
    assert request_from_line(json.dumps(DECODE).encode())
    with pytest.raises(msgspec.ValidationError):
        request_from_line(json.dumps({**DECODE, **change}).encode())


@pytest.mark.parametrize(
    "line", [b"\xff", b'{"type": "\xff"}', b'{"type": "drain", "x": ' + b"[" * 100_000, b"[]", b"{}"]
)
async def test_what_is_no_request_is_answered(line):
    assert isinstance(await _answer(line, None), Failed)
