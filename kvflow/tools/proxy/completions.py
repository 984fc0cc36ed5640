"""What a proxy makes of a client's request: one for a prefill server, one for a decode server. Pure.

A field that is not read here keeps the very bytes in which it came, and so does the ticket.
"""

import re
from typing import Any, Final

import msgspec
from msgspec import Raw, Struct

PARAMS = "kv_transfer_params"

OFFER = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a prefill server is told: keep the cache of this prompt, and say where it is."""

ONE_AT_MOST = ("max_tokens", "max_completion_tokens", "min_tokens", "n")
"""Numbers of tokens and samples: a prefill request ends when the prompt is computed."""

NULL, FALSE, ONE, OFFERED = (Raw(msgspec.json.encode(value)) for value in (None, False, 1, OFFER))

LONG: Final = ("prompt", "messages", "prompt_embeds")
"""Fields whose values are not read here, however long they are."""

OTHERS_BYTES_MAX: Final = 1 << 20
"""Of all other fields, with their names: tools and schemas are some hundred KiB. Each takes a microsecond or more to
read, and while they are read nobody else is served."""

LIST_OF_PROMPTS: Final = re.compile(rb"\s*\[\s*[^\s\d\]-]")
"""How a list begins that is not one of token ids: such a list is a single prompt."""

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are no JSON of the expected kind."""


class RequestMalformed(Exception):
    """A client's request cannot be sent to anyone; the message says why."""


class Completion(Struct, frozen=True):
    """A client's request.

    Attributes:
        fields: of its JSON object, each as it was sent.
        alone: why no prefill server is asked; empty if one is.
    """

    fields: dict[str, Raw]
    alone: str = ""


class _LongFields(Struct, frozen=True):
    prompt: Raw = NULL
    messages: Raw = NULL
    prompt_embeds: Raw = NULL


class _PrefillAnswer(Struct, frozen=True):
    kv_transfer_params: Raw = NULL


class _TransferParams(Struct, frozen=True):
    do_remote_prefill: bool | None = None


def read_completion(body: bytes) -> Completion:
    """Read the body of a request for a completion.

    Raises:
        RequestMalformed: it is no JSON object, brings ``kv_transfer_params`` of its own, or fields that are too long.
    """
    try:
        # As text: msgspec looks at no character of a field that it is not asked for.
        text = body.decode()
        known = msgspec.json.decode(text, type=_LongFields)
        others = len(body) - sum(len(getattr(known, name)) for name in LONG)
        if others > OTHERS_BYTES_MAX:
            raise RequestMalformed(f"the fields beside {', '.join(LONG)} have more than {OTHERS_BYTES_MAX} bytes")
        fields = msgspec.json.decode(text, type=dict[str, Raw])
        if _value(fields, PARAMS) is not None:
            raise RequestMalformed(f"{PARAMS} is what the servers tell each other: leave it out")
        return Completion(fields, alone=_why_alone(fields))
    except UNREADABLE as error:
        raise RequestMalformed(f"the body is not a JSON object that can be read: {error}") from error


def prefill_body(completion: Completion) -> bytes:
    """Return what a prefill server is sent: the same prompt, one token, and the wish that its cache be kept.

    What is wrong stays wrong, so that the prefill server refuses it: if only the decode server did, nobody would read
    the cache that is kept.
    """
    fields = {name: _one_at_most(name, value) for name, value in completion.fields.items()}
    if _value(fields, "max_tokens") is None:
        fields["max_tokens"] = ONE
    if _value(fields, "stream") is True:
        fields.pop("stream_options", None)  # refused without a stream
        fields["stream"] = FALSE
    return msgspec.json.encode({**fields, PARAMS: OFFERED})


def decode_body(completion: Completion, params: Raw | None) -> bytes:
    """Return what a decode server is sent: the request, with the ticket of a prefill server if there is one."""
    fields = {name: value for name, value in completion.fields.items() if name != PARAMS}
    return msgspec.json.encode(fields if params is None else {**fields, PARAMS: params})


def read_params(answer: bytes) -> Raw | None:
    """Return the ticket in a prefill server's answer, as it was sent; None if there is none that could be read."""
    try:
        params = msgspec.json.decode(answer, type=_PrefillAnswer).kv_transfer_params
        told = msgspec.json.decode(params, type=_TransferParams | None)
    except UNREADABLE:
        return None
    return params if told is not None and told.do_remote_prefill else None


def without_params(answer: bytes, *, failed: bool) -> bytes:
    """Return a decode server's answer without what the servers tell each other.

    Args:
        answer: a JSON object, or whatever it is.
        failed: it is an error, whose text may quote the request.
    """
    name = PARAMS.encode()
    if name not in answer:
        return answer
    try:
        fields = msgspec.json.decode(answer, type=dict[str, Raw])
    except UNREADABLE:
        fields = {}
    fields.pop(PARAMS, None)
    kept = msgspec.json.encode(fields)
    return error_body("the decode server refused the request") if failed and name in kept else kept


def error_body(message: str, kind: str = "server_error") -> bytes:
    """Return an error as OpenAI's clients expect it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": None}})


def _why_alone(fields: dict[str, Raw]) -> str:
    """Say why the decode server must compute the prompt.

    A server answers one ticket for all prompts of a request, and it is that of the first.
    """
    if bytes(fields.get("prompt_embeds", NULL)) != bytes(NULL):
        return "prompt_embeds may be a prompt beside another one"
    prompt = fields.get("prompt", NULL)
    if LIST_OF_PROMPTS.match(prompt):
        try:
            msgspec.json.decode(prompt, type=tuple[Raw])  # ends at a second element
        except msgspec.ValidationError:
            return "there are several prompts, and one ticket"
    return ""


def _one_at_most(name: str, value: Raw) -> Raw:
    if name not in ONE_AT_MOST:
        return value
    number = msgspec.json.decode(value)
    return ONE if type(number) is int and number > 1 else value


def _value(fields: dict[str, Raw], name: str) -> Any:
    return msgspec.json.decode(fields.get(name, NULL))
