"""What clients ask of servers, and what the servers of a deployment have counted meanwhile."""

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import openai

from .servers import RUNNING, Deployment, Server

TOKENS = 32
LONG = 600
"""Tokens of an answer that takes long enough for a client to hang up."""
TRIES = 10
BLOCK_TOKENS = 128
BLOCK_BYTES = 4 * 2 * 2 * BLOCK_TOKENS * 64 * 2
"""Of llama: layers, keys and values, heads, tokens, elements of a head, bytes of one."""

ENDED = "vllm:request_success_total"
TRANSFERS, LEASES = "vllm:kvflow_transfer_seconds_count", "vllm:kvflow_leases_ended_total"
BYTES = "vllm:kvflow_transfer_bytes_sum"
GENERATED = "vllm:generation_tokens_total"
UNTAGGED = "vllm:kvflow_untagged_requests_total"
RELEASED = {"outcome": "released"}

GREEDY_ENOUGH = 0.01
"""The least temperature that vLLM does not take for greedy sampling, which it refuses for several samples."""
TWO_SAMPLES = {"n": 2, "temperature": GREEDY_ENOUGH, "seed": 7}
"""Without a seed the samples differ from run to run where two tokens are equally likely."""

WORDS = ["once", "upon", "a", "time", "there", "cache", "that", "wanted", "to", "travel", "from", "where"]


def text_of(words: int, name: str) -> str:
    """Return a text that is another one for each name from its first word on, so that no cache has its beginning."""
    draw = random.Random(name)
    return f"{name}: " + " ".join(draw.choice(WORDS) for _ in range(words))


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def tokens_of(deployment: Deployment, server: Server, prompt: Sequence[int], *, name: str = "") -> list[int]:
    """Return the tokens that a server streams for a prompt."""
    headers = {"X-Request-Id": name} if name else None
    return said(deployment, server, prompt, stream=True, extra_headers=headers).tokens[0]


def asked(
    deployment: Deployment,
    server: Server,
    params: Mapping[str, Any] | None = None,
    *,
    chat: bool = False,
    salt: str = "",
    **named: Any,
) -> Any:
    """Return what a server answers as a whole, with these ``kv_transfer_params`` as a router sends them."""
    usual = {"model": deployment.model, "max_tokens": TOKENS, "temperature": 0}
    extra = {"return_token_ids": True} | ({"kv_transfer_params": params} if params is not None else {})
    extra |= {"cache_salt": salt} if salt else {}
    with client_of(server) as client:
        create = client.chat.completions.create if chat else client.completions.create
        return create(**usual | named, extra_body=extra)


def ticket_of(answer: Any) -> Any:
    """Return the ``kv_transfer_params`` of an answer."""
    return answer.model_extra.get("kv_transfer_params")


@dataclass(frozen=True)
class Said:
    """What a server has said.

    Attributes:
        texts: of each sample.
        tokens: of each sample.
        reasons: why each ended.
        prompt_tokens: how many the prompt had.
    """

    texts: list[str]
    tokens: list[list[int]]
    reasons: list[str]
    prompt_tokens: int


def said(deployment: Deployment, server: Server, prompt: str | list[Any], *, chat: bool = False, **asked: Any) -> Said:
    """Return what a server says to a prompt, as a completion or as a chat, whole or streamed."""
    asked = {
        "model": deployment.model,
        "max_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"return_token_ids": True},
        **asked,
    }
    if asked.get("stream"):
        asked["stream_options"] = {"include_usage": True}
    with client_of(server) as client:
        if chat:
            answer = client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **asked)
        else:
            answer = client.completions.create(prompt=prompt, **asked)
        return _joined(answer if asked.get("stream") else [answer])


def _joined(parts: Iterable[Any]) -> Said:
    """Return an answer of which each part has a piece of each sample, or of some."""
    texts, tokens, reasons, prompt_tokens = {}, {}, {}, 0
    for part in parts:
        prompt_tokens = part.usage.prompt_tokens if part.usage else prompt_tokens
        for choice in part.choices:
            piece = getattr(choice, "message", None) or getattr(choice, "delta", None)
            text = (piece.content or "") if piece else choice.text
            texts[choice.index] = texts.get(choice.index, "") + text
            tokens[choice.index] = tokens.get(choice.index, []) + list(getattr(choice, "token_ids", None) or ())
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    command = sorted(texts)
    return Said(*([found[index] for index in command] for found in (texts, tokens, reasons)), prompt_tokens)


def hang_up(deployment: Deployment, server: Server, prompt: str | list[int]) -> None:
    """Close a stream after its third part, and require that the decode server ends the request without an answer.

    A fast engine may finish the whole answer before it hears of the end, and a slow one may count the request before
    this one late: then the client tries again. vLLM counts as ended what ends by itself.
    """
    for _ in range(TRIES):
        made, ended = (deployment.decode.metric(name) for name in (GENERATED, ENDED))
        with client_of(server) as client:
            streamed = client.completions.create(
                model=deployment.model, prompt=prompt, max_tokens=LONG, temperature=0, stream=True
            )
            for _ in range(3):
                next(streamed)
            streamed.close()
        deployment.decode.wait_metric(0, RUNNING)
        generated = deployment.decode.metric(GENERATED) - made
        assert generated >= 3
        if generated < LONG and deployment.decode.metric(ENDED) == ended:
            return
        deployment.decode.wait_metric(ended + 1, ENDED)
    raise AssertionError(f"the decode server finished each of {TRIES} answers that nobody read")


def totals(deployment: Deployment) -> list[float]:
    """Return how many transfers there were, their bytes and descriptors, and the leases that ended well."""
    read = [deployment.decode.metric(name) for name in (TRANSFERS, BYTES, "vllm:kvflow_transfer_descriptors_sum")]
    return [*read, deployment.prefill.metric(LEASES, **RELEASED)]


class Moved:
    """Checks how many transfers a block of code causes, and that their bytes are those of its prompts.

    Use it as a context manager.

    Attributes:
        prompts: lengths of the prompts that must have moved, to be added to.
    """

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self.prompts: list[int] = []

    def __enter__(self) -> Self:
        self._before = totals(self._deployment)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        transfers, nbytes, _, leases = self._before
        self._deployment.decode.wait_metric(transfers + len(self.prompts), TRANSFERS)
        self._deployment.prefill.wait_metric(leases + len(self.prompts), LEASES, **RELEASED)
        moved = self._deployment.decode.metric(BYTES) - nbytes
        assert bool(moved) == bool(self.prompts)
        if "llama" in self._deployment.model:  # which keeps every token
            assert moved == sum(map(blocks_of, self.prompts)) * BLOCK_BYTES


def blocks_of(tokens: int) -> int:
    """Return how many blocks of llama so many tokens have."""
    return -(-tokens // BLOCK_TOKENS)
