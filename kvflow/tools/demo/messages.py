"""What the demo's engines take and answer over HTTP: what they need of OpenAI's completions API, as vLLM has it.

Tokens are bytes. ``kv_transfer_params`` pass through the router unread.
"""

from typing import Annotated, Any

from msgspec import Meta, Struct

from kvflow.report import TransferReport

COMPLETIONS = "/v1/completions"
DRAIN = "/drain"
HEALTH = "/health"
REQUEST_ID = "X-Request-Id"

MAX_TOKENS = 32
"""Generated for each prompt of the demo."""

Token = Annotated[int, Meta(ge=0, le=255)]
NumTokens = Annotated[int, Meta(ge=1, le=1 << 20)]
"""More than the blocks of any demo hold; the pool refuses what is more than it has."""


class PromptRequest(Struct, frozen=True, kw_only=True):
    """The body of a request.

    Attributes:
        prompt: token ids.
        max_tokens: to be generated.
        kv_transfer_params: ``do_remote_decode``: compute the prompt and offer its cache. With a ticket: pull that
            cache and continue. Without them: compute and continue.
    """

    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=1 << 20)]
    max_tokens: NumTokens = 16
    kv_transfer_params: Annotated[dict[str, Any], Meta(max_length=64)] | None = None


class OfferedPrompt(Struct, frozen=True, kw_only=True):
    """What the demo reads in ``kv_transfer_params``; ``Ticket.from_params`` reads and bounds the rest.

    Attributes:
        do_remote_decode: True in what a router sends to a prefill engine.
        first_token: computed by the prefill engine, whose ticket has it as one more entry.
    """

    do_remote_decode: bool = False
    first_token: Token | None = None


class GeneratedTokens(Struct, frozen=True, kw_only=True):
    """One of the ``choices`` of an answer."""

    token_ids: list[int]
    text: str = ""
    index: int = 0
    finish_reason: str = "length"


class PromptAnswer(Struct, frozen=True, kw_only=True):
    """The answer to a request.

    Attributes:
        id: of the request.
        choices: one.
        kv_transfer_params: of a prefill engine, for a decode engine.
        report: what the pull moved; None if nothing was pulled.
    """

    id: str
    choices: tuple[GeneratedTokens]
    object: str = "text_completion"
    model: str = "kvflow-demo"
    kv_transfer_params: dict[str, Any] | None = None
    report: TransferReport | None = None


class Drained(Struct, frozen=True, kw_only=True):
    """What an engine still holds when no request is open, and it should hold nothing.

    Attributes:
        blocks_used: not returned to the free list.
        leases_held: offers that have not ended.
        blocks_quarantined: destination blocks that a transfer may still write to.
    """

    blocks_used: int = 0
    leases_held: int = 0
    blocks_quarantined: int = 0

    @property
    def clean(self) -> bool:
        """True if nothing is left."""
        return self == Drained()
