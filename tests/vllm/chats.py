"""Chats of several turns over three engines, which docs/howto/share-prefixes.md starts, with a small prefill cache."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from .clients import client_of
from .engines import free_port
from .howto import DECODE_PORT, PREFILL_PORT, SHARING_PAGE, SOURCE_PORT, command
from .pairs import FULL
from .prompts import prompt_of
from .servers import Deployment, Server
from .tiny_models import CHAT_WINDOW

TURNS = 6 if FULL else 4
ANSWER = 300  # tokens
WORDS = 60  # of what a user says
TOKENS_MAX = 3072
"""Tokens of the longest prompt with its answer, for which the cache of a prefill engine has just enough blocks."""
COMPUTED = "vllm:request_prefill_kv_computed_tokens_sum"
SEARCHES = "vllm:kvflow_prefixes_total"

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Kind:
    """What the engines have: the prefill engines ask, and the decode engine keeps.

    Attributes:
        model: a name of ``tiny_models``.
        asks: block size of the prefill engines.
        keeps: block size of the decode engine.
        asking_ranks: of each prefill engine.
        keeping_ranks: of the decode engine.
    """

    model: str
    asks: int
    keeps: int
    asking_ranks: int = 1
    keeping_ranks: int = 1

    def __str__(self) -> str:
        return f"{self.model}-{self.keeps}x{self.keeping_ranks}-to-{self.asks}x{self.asking_ranks}"

    @property
    def has_windows(self) -> bool:
        return self.model.startswith("gptoss")

    @property
    def num_blocks(self) -> int:
        """Blocks of a prefill engine's cache; vLLM starts with no fewer."""
        groups = 2 if self.has_windows else 1
        return groups * (TOKENS_MAX // self.asks + 1)


@dataclass(frozen=True)
class Turn:
    """A prompt and its answer, in tokens and as text."""

    prompt: list[int]
    answer: list[int]
    text: str


class Chats(Deployment):
    """Two prefill engines with small caches, one decode engine that keeps, one server alone, and a proxy.

    Attributes:
        words: tokens that are a whole word each, so that an answer as text has the same tokens again.
    """

    def __init__(self, kind: Kind, model: Path, folder: Path) -> None:
        super().__init__(model, folder)
        self.kind = kind
        self.ports[SOURCE_PORT] = free_port()
        tokenizer = Tokenizer.from_file(f"{model}/tokenizer.json")
        known = {token: number for token, number in tokenizer.get_vocab().items() if re.fullmatch("Ġ[a-z]{3,}", token)}
        self.words = [number for token, number in known.items() if tokenizer.encode(f" {token[1:]}").ids == [number]]

    def start(self) -> Sequence[Server]:
        """See ``Together.start``."""
        kind = self.kind
        # In bfloat16, a part of a prompt computed alone differs from the whole where two tokens are equally likely.
        usual = f" --dtype float32 --max-model-len {TOKENS_MAX}"
        self.keeping_flags = f"{usual} --block-size {kind.keeps} --tensor-parallel-size {kind.keeping_ranks}"
        if kind.has_windows:
            self.keeping_flags += f" --prefix-cache-retention-interval {kind.keeps}"
        asking = f"{usual} --block-size {kind.asks} --num-gpu-blocks-override {kind.num_blocks}"
        asking += f" --tensor-parallel-size {kind.asking_ranks}"
        self.start_keeping()
        self.prefill = self.start_asking("prefill", self.ports[PREFILL_PORT], asking)
        self.second = self.start_asking("second", free_port(), asking)
        alone = f"vllm serve {self.model} --port {self.alone_port} --enable-prefix-caching{usual}"
        self.alone = self.serve("alone", f"{alone} --block-size {kind.asks}", self.alone_port)
        port, proxy = free_port(), f"kvflow proxy --prefill {self.prefill.url} --prefill {self.second.url}"
        proxy += f" --decode {self.decode.url} --keeper {self.decode.url}=tcp://127.0.0.1:{self.ports[SOURCE_PORT]}"
        self.proxy = self.serve("proxy", f"{proxy} --listen 127.0.0.1:{port}", port)
        return self.decode, self.prefill, self.second, self.alone, self.proxy

    def start_keeping(self) -> None:
        """Start the decode engine, for the first time or again; it is not ready yet."""
        shell = command("vllm serve", "kv_consumer", page=SHARING_PAGE)
        self.decode = self.serve("decode", self.fitted(shell) + self.keeping_flags, self.ports[DECODE_PORT])

    def start_asking(self, name: str, port: int, flags: str) -> Server:
        """Start a prefill engine, whose records are in a file of its name; it is not ready yet."""
        shell = command("vllm serve", "kv_producer", page=SHARING_PAGE)
        shell = shell.replace("prefill.jsonl", f"{name}.jsonl")
        return self.serve(name, self.fitted(shell, {PREFILL_PORT: port}) + flags, port)

    def settle(self) -> None:
        """Wait until all servers are idle."""
        super().settle()
        self.second.wait_idle()

    def crowd_out(self, name: str) -> None:
        """Have both prefill engines compute what needs more blocks than they have."""
        self.settle()
        for server in (self.prefill, self.second):
            with client_of(server) as client:
                # Where layers have windows, a prompt may leave blocks that it does not need to the end.
                for part in range(2 if self.kind.has_windows else 1):
                    prompt = prompt_of(TOKENS_MAX - 1, f"{name} {server.name} {part}")
                    client.completions.create(model=self.model, prompt=prompt, max_tokens=1)
        self.settle()

    def computed(self) -> float:
        """Return how many tokens of prompts the prefill engines have computed."""
        return self.prefill.metric(COMPUTED) + self.second.metric(COMPUTED)

    def late(self) -> float:
        """Return for how many prompts the decode engine has not answered the prefill engines in time."""
        return sum(each.metric(SEARCHES, outcome="late") for each in (self.prefill, self.second))

    def ignored(self) -> float:
        """Return how many hints named no source."""
        return sum(each.metric(SEARCHES, outcome="hint_ignored") for each in (self.prefill, self.second))

    def fetched(self) -> list[dict[str, Any]]:
        """Return the records of all prefixes that were fetched, in the order of time."""
        records = [*self.records("prefill"), *self.records("second")]
        return sorted((each for each in records if each["event"] == "prefix.fetched"), key=itemgetter("timestamp"))

    def say(self, server: Server, messages: Messages) -> Turn:
        """Return the turn that a server streams."""
        prompt: list[int] = []
        answer: list[int] = []
        text = ""
        extra = {"return_token_ids": True, "allowed_token_ids": self.words, "ignore_eos": True}
        asked = {"model": self.model, "max_tokens": ANSWER, "temperature": 0, "stream": True, "extra_body": extra}
        with client_of(server) as client:
            if self.kind.has_windows:  # vLLM writes the chats of this model with a vocabulary from the network
                streamed = client.completions.create(prompt=rendered(messages), **asked)
            else:
                streamed = client.chat.completions.create(messages=messages, **asked)
            for chunk in streamed:
                for part in (chunk, *chunk.choices):
                    prompt = prompt or list(getattr(part, "prompt_token_ids", None) or ())
                for choice in chunk.choices:
                    text += choice.text if self.kind.has_windows else choice.delta.content or ""
                    answer += getattr(choice, "token_ids", None) or ()
        return Turn(prompt, answer, text)

    def held(self, turns: Sequence[Turn], prompt: Sequence[int]) -> int:
        """Return how many first tokens of a prompt the decode engine holds after some turns, for the engines that ask.

        With windows, they end where a whole window is there: at the end of a turn, or before it, such as at the end of
        the turn's prompt, if vLLM has freed a block of the last window.
        """
        size, found = self.kind.keeps, 0
        for turn in turns:
            computed = [*turn.prompt, *turn.answer[:-1]]
            end = len(computed) // size * size
            shared = min(common(computed[:end], prompt), len(prompt) - 1) // size * size
            if self.kind.has_windows:
                ends = whole_ends(len(turn.prompt), len(computed), size)
                parts = [each for each in ends if each == ends[-1] or not each % self.kind.asks]
                shared = max([each for each in parts if each <= shared], default=0)
            found = max(found, shared)
        return found


def whole_ends(prompt: int, computed: int, size: int) -> list[int]:
    """Return after how many tokens of a turn a whole window is there.

    Its last one is, as far as vLLM has freed no block; and that of its prompt, which was there when the answer began.
    """

    def is_there(block: int) -> bool:
        of_prompt = (prompt - CHAT_WINDOW) // size <= block < prompt // size
        return of_prompt or (block + 1) * size > computed - CHAT_WINDOW + 1

    ends = range(size, computed + 1, size)
    return [end for end in ends if all(map(is_there, range(max(0, end - CHAT_WINDOW + 1) // size, end // size)))]


def rendered(messages: Messages) -> str:
    """Return a chat as the template of ``tiny_models`` writes it."""
    return "".join(f"{each['role']}: {each['content']}\n" for each in messages) + "assistant:"


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many first tokens two lists share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
