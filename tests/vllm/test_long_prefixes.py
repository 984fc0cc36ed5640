"""A prompt of 24,000 tokens that another engine keeps is read, with the settings of docs/howto/share-prefixes.md."""

import json

import pytest

from .chats import SEARCHES
from .clients import asked
from .howto import DECODE_PORT, PREFILL_PORT, SHARING_PAGE, SOURCE_PORT, command
from .pairs import model_folder
from .prompts import prompt_of
from .servers import Deployment, free_port

KEPT = 24_000  # tokens, a multiple of the block size
NEXT = 500
PROMPTS_MAX = 4  # until one is read
FLAGS = (
    " --dtype float32 --block-size 32 --max-model-len 24576 "
    """--hf-overrides '{"max_position_embeddings": 24576}' --max-num-seqs 4"""
)


class Engines(Deployment):
    """One engine that keeps, and one that asks it."""

    def start(self):
        """See ``Together.start``."""
        self.ports[SOURCE_PORT] = free_port()
        for name, role, port in (("decode", "kv_consumer", DECODE_PORT), ("prefill", "kv_producer", PREFILL_PORT)):
            shell = command("vllm serve", role, page=SHARING_PAGE)
            setattr(self, name, self.serve(name, self.fitted(shell) + FLAGS, self.ports[port]))
        return self.decode, self.prefill

    def complete(self, server, prompt):
        """Return the one token that a server answers with."""
        return asked(self, server, prompt=prompt, max_tokens=1).choices[0].token_ids

    def answered(self):
        """Return how many questions for content the decode engine has answered."""
        told = json.loads(self.run(f"kvflow inspect 127.0.0.1:{SOURCE_PORT} --json"))["inspection"]["snapshot"]
        return told["found"] + told["not_held"]


@pytest.fixture
def engines(pairs, tmp_path):
    pairs.stop()
    with Engines(model_folder("llama"), tmp_path) as engines:
        engines.prefill.wait_logged("is engine")
        yield engines


def test_a_long_prompt_that_another_engine_keeps_is_read(engines):
    """On a busy machine an answer may come too late, and the prompt is computed; then the next one is asked for."""
    fetched = []
    for number in range(PROMPTS_MAX):
        prompt = prompt_of(KEPT + NEXT, str(number))
        engines.complete(engines.decode, prompt[:KEPT])
        assert engines.complete(engines.prefill, prompt) == engines.complete(engines.decode, prompt)
        fetched = [each["tokens"] for each in engines.records("prefill") if each["event"] == "prefix.fetched"]
        if fetched:
            break
    assert fetched == [KEPT], engines.prefill.counted(SEARCHES, "outcome")

    answered, searches = engines.answered(), engines.prefill.metric(SEARCHES, outcome="not_held")
    engines.complete(engines.prefill, prompt_of(NEXT, "nobody keeps it"))
    assert engines.answered() == answered > 0, "the decode engine has told that it keeps none of it"
    assert engines.prefill.metric(SEARCHES, outcome="not_held") == searches + 1
