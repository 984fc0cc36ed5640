"""What the demo's engines take and answer over HTTP: a part of OpenAI's completions API, as vLLM has it.

Tokens are bytes. ``kv_transfer_params`` pass through the router unread.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from kvflow.report import TransferReport

COMPLETIONS = "/v1/completions"
DRAIN = "/drain"
HEALTH = "/health"
REQUEST_ID = "X-Request-Id"

MAX_TOKENS = 32  # generated for each prompt of the demo

Token = Annotated[int, Meta(ge=0, le=255)]
PromptTokens = Annotated[int, Meta(ge=1, le=1 << 20)]  # the pool refuses what is more than it has


class PromptRequest(Struct, frozen=True, kw_only=True):
    """The body of a request.

    Attributes:
        kv_transfer_params: ``do_remote_decode``: compute the prompt and offer its cache. With a ticket: pull that
            cache and continue. None: compute and continue.
    """

    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=1 << 20)]
    max_tokens: PromptTokens = 16
    kv_transfer_params: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


class OfferedPrompt(Struct, frozen=True, kw_only=True):
    """What the demo reads in ``kv_transfer_params``; ``Ticket.from_params`` reads and bounds the rest."""

    do_remote_decode: bool = False  # True in what a router sends to a prefill engine
    first_token: Token | None = None  # computed by the prefill engine, which adds it to its ticket


class GeneratedTokens(Struct, frozen=True, kw_only=True):
    """One of the ``choices`` of an answer."""

    token_ids: list[int]
    text: str = ""
    index: int = 0
    finish_reason: str = "length"


class PromptAnswer(Struct, frozen=True, kw_only=True):
    """The answer to a request; ``kv_transfer_params``: of a prefill engine, for a decode engine."""

    id: str
    choices: tuple[GeneratedTokens]
    object: str = "text_completion"
    model: str = "kvflow-demo"
    kv_transfer_params: dict[str, Any] | None = None
    report: TransferReport | None = None  # of the pull, if there was one


class Drained(Struct, frozen=True, kw_only=True):
    """What an engine still holds when no request is open, and it should hold nothing."""

    blocks_used: int = 0  # not returned to the free list
    leases_held: int = 0  # offers that have not ended
    blocks_quarantined: int = 0  # target blocks that a transfer may still write to

    @property
    def clean(self) -> bool:
        """Whether nothing is left."""
        return self == Drained()
