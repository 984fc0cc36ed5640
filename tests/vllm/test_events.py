"""vLLM's own events about its cache tell a router what a decode engine has read: only with ``make test-vllm-full``."""

import time
from dataclasses import replace

import msgspec
import pytest
import zmq

from .engines import ANSWER_S, Options
from .pairs import FULL
from .prompts import prompt_of

pytestmark = pytest.mark.skipif(not FULL, reason="make test-vllm-full has it")

SIZE = 32
"""Tokens of a block."""
WHOLE = 10 * SIZE
LENGTH = WHOLE + 7
CHECK_MS = 200


class Events:
    """What an engine publishes from now on."""

    def __init__(self, socket, pair):
        self._socket = socket
        deadline = time.monotonic() + ANSWER_S
        while not socket.poll(CHECK_MS):  # until the publisher knows us
            assert time.monotonic() < deadline
            pair.decode.generate(prompt_of(SIZE + 1, f"introduction at {time.monotonic()}"))
        self.take(lambda found: True)

    def take(self, enough):
        """Return events, once there are enough."""
        found, deadline = [], time.monotonic() + ANSWER_S
        while not enough(found) or self._socket.poll(CHECK_MS):
            assert time.monotonic() < deadline, found
            if self._socket.poll(CHECK_MS):
                _, _, batch = self._socket.recv_multipart()
                found += msgspec.msgpack.decode(batch)[1]
        return found


@pytest.fixture(scope="module")
def telling(pairs):
    """A pair whose decode engine publishes events, and these."""
    prefill = Options("llama", block_size=SIZE, prefix_caching=True)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        socket.subscribe(b"")
        endpoint = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"  # vLLM connects, as it has no *
        decode = replace(prefill, llm={"kv_events_config": {"enable_kv_cache_events": True, "endpoint": endpoint}})
        with pairs.pair(prefill, decode) as pair:
            yield pair, Events(socket, pair)


@pytest.mark.proves("KV events", engine="real")
def test_what_was_read_is_told_like_what_was_computed(telling):
    pair, events = telling
    prompt, told = prompt_of(LENGTH, "told"), []
    for read in (True, False):
        answer = pair.decode.generate(prompt, pair.ticket(prompt) if read else None)
        assert answer["finish_reason"] == "length", answer
        found = events.take(lambda found: sum(len(each.get("token_ids", ())) for each in found) >= WHOLE)
        stored = [each for each in found if each["type"] == "BlockStored"]
        assert [token for each in stored for token in each["token_ids"]][:WHOLE] == prompt[:WHOLE]
        told.append([digest for each in stored for digest in each["block_hashes"]])
        assert pair.decode.reset_prefix_cache()  # told with the next step
    assert found[0]["type"] == "AllBlocksCleared"
    assert told[0] == told[1]
