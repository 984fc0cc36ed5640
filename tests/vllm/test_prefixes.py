"""Chats of several turns over three engines, as docs/howto/share-prefixes.md starts them, with a small prefill cache.

From the second turn on the prefill engines compute only what no engine holds, and the answers are those of one server.
"""

import re
from dataclasses import dataclass
from operator import itemgetter

import pytest
from tokenizers import Tokenizer

from .clients import RUNNING, USAGE, client_of, text_of
from .engines import free_port
from .howto import DECODE_PORT, PREFILL_PORT, SHARING_PAGE, SOURCE_PORT, command
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .routers import STARTS
from .servers import Deployment

TURNS = 6
ANSWER = 300  # tokens
WORDS = 60  # of what a user says
TOKENS_MAX = 3072
"""Tokens of the longest prompt with its answer, and of the whole cache of a prefill engine."""
COMPUTED, PREFIXES = "vllm:request_prefill_kv_computed_tokens_sum", "vllm:kvflow_prefixes_total"
FRONTS = ("kvflow proxy", "vllm-router")


@dataclass(frozen=True)
class Kind:
    """What the engines have."""

    model: str
    block_size: int
    ranks: int = 1

    def __str__(self) -> str:
        return f"{self.model}-{self.block_size}-{self.ranks}"


KINDS = [Kind("llama-chat", 32)]
if FULL:
    KINDS += [Kind("llama-chat", 128), Kind("llama-chat", 32, ranks=2)]


class Chats(Deployment):
    """Two prefill engines with small caches, one decode engine that keeps, one server alone, and a proxy."""

    def __init__(self, kind, folder):
        super().__init__(model_folder(kind.model), folder)
        self.kind = kind
        self.ports[SOURCE_PORT] = free_port()

    def start(self):
        kind, prefill = self.kind, command("vllm serve", "kv_producer", page=SHARING_PAGE).strip()
        # In bfloat16, a part of a prompt computed alone differs from the whole where two tokens are equally likely.
        usual = f" --dtype float32 --block-size {kind.block_size} --max-model-len {TOKENS_MAX}"
        small = f"{usual} --num-gpu-blocks-override {TOKENS_MAX // kind.block_size + 1}"
        # On a busy machine no answer comes within five milliseconds.
        prefill = prefill.replace('"sources"', '"find_s": 1, "sources"') + small
        self._decode = command("vllm serve", "kv_consumer", page=SHARING_PAGE).strip() + usual
        self._decode += f" --tensor-parallel-size {kind.ranks}"
        self.start_decode()
        self.prefill = self.serve("first", self.fitted(prefill), self.ports[PREFILL_PORT])
        port = free_port()
        second = prefill.replace("prefill.jsonl", "second.jsonl")
        self.second = self.serve("second", self.fitted(second, {PREFILL_PORT: port}), port)
        alone = f"vllm serve {self.model} --port {self.alone_port} --enable-prefix-caching{usual}"
        self.alone = self.serve("alone", alone, self.alone_port)
        port, proxy = free_port(), f"kvflow proxy --prefill {self.prefill.url} --prefill {self.second.url}"
        self.proxy = self.serve("proxy", f"{proxy} --decode {self.decode.url} --listen 127.0.0.1:{port}", port)
        return self.decode, self.prefill, self.second, self.alone, self.proxy

    def start_decode(self):
        """Start the decode engine, for the first time or again; it is not ready yet."""
        self.decode = self.serve("decode", self.fitted(self._decode), self.ports[DECODE_PORT])

    def settle(self):
        """Wait until no request runs and no lease of an offer is held."""
        for server in (self.prefill, self.second, self.decode):
            server.wait_metric(0, RUNNING)
            server.wait_metric(0, USAGE)

    def crowd_out(self, name):
        """Have both prefill engines compute something that needs all of their blocks."""
        self.settle()
        for server in (self.prefill, self.second):
            with client_of(server) as client:
                prompt = prompt_of(TOKENS_MAX - 1, f"{name} {server.name}")
                client.completions.create(model=self.model, prompt=prompt, max_tokens=1)
        self.settle()

    def computed(self):
        """Return how many tokens of prompts the prefill engines have computed."""
        return self.prefill.metric(COMPUTED) + self.second.metric(COMPUTED)

    def fetched(self):
        """Return the records of all prefixes that were fetched, in the order of time."""
        records = [*self.records("prefill"), *self.records("second")]
        return sorted((each for each in records if each["event"] == "prefix.fetched"), key=itemgetter("timestamp"))


@pytest.fixture(scope="module", params=KINDS, ids=str)
def chats(request, pairs, tmp_path_factory):
    pairs.stop()
    with Chats(request.param, tmp_path_factory.mktemp("chats")) as chats:
        yield chats


@pytest.fixture(scope="module")
def fronts(chats):
    return {"kvflow proxy": chats.proxy, "vllm-router": STARTS["vllm-router"](chats, chats.second)}


@pytest.fixture(scope="module")
def words(chats):
    """Tokens that are a whole word each, so that an answer as text has the same tokens again."""
    tokenizer = Tokenizer.from_file(f"{chats.model}/tokenizer.json")
    known = {token: number for token, number in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{3,}", token)}
    return [number for token, number in known.items() if tokenizer.encode(f" {token[1:]}").ids == [number]]


@dataclass(frozen=True)
class Turn:
    prompt: list[int]
    answer: list[int]
    text: str


def say(chats, server, messages, words):
    """Return the turn that a server streams."""
    prompt, answer, text = [], [], ""
    with client_of(server) as client:
        streamed = client.chat.completions.create(
            model=chats.model,
            messages=messages,
            max_tokens=ANSWER,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True, "allowed_token_ids": words, "ignore_eos": True},
        )
        for chunk in streamed:
            prompt = prompt or list(getattr(chunk, "prompt_token_ids", None) or ())
            for choice in chunk.choices:
                text += choice.delta.content or ""
                answer += getattr(choice, "token_ids", None) or ()
    return Turn(prompt, answer, text)


def common(one, other):
    """Return how many first tokens two lists share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def held_of(kind, before, prompt):
    """Return how many tokens of a prompt the decode engine holds after a turn."""
    kept = [*before.prompt, *before.answer[:-1]]  # the last token was never computed
    shared = min(common(kept, prompt), len(prompt) - 1)
    return shared // kind.block_size * kind.block_size


def grown(chats, computed, prompt, held):
    """Require that the prefill engines have computed the rest of a prompt."""
    chats.settle()
    assert chats.computed() == computed + len(prompt) - held


@pytest.mark.parametrize("name", FRONTS)
def test_a_chat_computes_only_what_no_engine_holds(chats, fronts, words, name):
    front, messages, before = fronts[name], [], None
    for number in range(TURNS):
        messages.append({"role": "user", "content": text_of(WORDS, f"{name} {number}")})
        alone = say(chats, chats.alone, messages, words)
        chats.crowd_out(f"{name} {number}")
        computed, fetched = chats.computed(), len(chats.fetched())
        turn = say(chats, front, messages, words)
        held = held_of(chats.kind, before, alone.prompt) if before else 0
        assert bool(held) == bool(before)
        grown(chats, computed, alone.prompt, held)
        assert [each["tokens"] for each in chats.fetched()[fetched:]] == ([held] if before else [])
        assert turn.answer == alone.answer
        assert len(turn.answer) == ANSWER
        messages.append({"role": "assistant", "content": alone.text.strip()})
        before = Turn(alone.prompt, turn.answer, turn.text)


def test_the_records_are_those_that_the_page_looks_for(chats):
    shown = chats.run(command("grep", page=SHARING_PAGE)).splitlines()
    assert len(shown) == sum(each["event"] == "prefix.fetched" for each in chats.records("prefill")) > 0


def test_what_died_with_the_decode_engine_is_computed_again(chats, fronts, words):
    messages = [{"role": "user", "content": text_of(WORDS, "killed")}]
    first = say(chats, chats.proxy, messages, words)
    assert first.answer == say(chats, chats.alone, messages, words).answer
    chats.crowd_out("killed")
    chats.decode.kill()
    chats.start_decode()
    chats.decode.wait_ready()
    messages += [
        {"role": "assistant", "content": first.text.strip()},
        {"role": "user", "content": text_of(WORDS, "again")},
    ]
    computed, alone = chats.computed(), say(chats, chats.alone, messages, words)
    assert say(chats, chats.proxy, messages, words).answer == alone.answer
    grown(chats, computed, alone.prompt, 0)
