"""Routers that cannot run here, acted out: what one sends to a prefill and to a decode server, by its transcript.

A transcript is a file of ``tests/data/routers``. It says what the router changes in a client's request for either
server, with the lines of the router's source that do so, and in which way the router reads and writes JSON.
"""

import copy
import http.client
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

FOLDER = Path(__file__).parents[1] / "data" / "routers"
ANSWER_S = 120.0
FLOAT_DIGITS_END = 1e21
"""From here on Go writes a number with an exponent."""
GO_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}

Body = dict[str, Any]


def facts() -> dict[str, dict[str, Any]]:
    """Return what is known of each router, by the name of its file."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def transcripts() -> dict[str, dict[str, Any]]:
    """Return the transcripts, by router."""
    return {name: known["transcript"] for name, known in facts().items() if "transcript" in known}


def as_go_number(number: float) -> int | float:
    """Return a float64 as Go writes it: whole numbers without a fraction, the shortest digits that mean it."""
    if number.is_integer() and abs(number) < FLOAT_DIGITS_END:
        return int(Decimal(repr(number)))
    return number


def _each(value: Any, change: Callable[[Any], Any], command: Callable[[Iterable[str]], Iterable[str]]) -> Any:
    """Return a JSON value with its scalars changed and its keys in another order."""
    if isinstance(value, dict):
        return {key: _each(value[key], change, command) for key in command(value)}
    if isinstance(value, list):
        return [_each(each, change, command) for each in value]
    return change(value)


def read(codec: str, text: bytes | str) -> Any:
    """Return what a router has in its memory when it has read a JSON text."""
    return json.loads(text, parse_int=float) if codec in ("go", "sonic") else json.loads(text)


def write(codec: str, value: Any) -> bytes:
    """Return the JSON text that a router makes of what it has in its memory."""
    if codec == "python":
        return json.dumps(value).encode()
    if codec == "serde_json":
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    # Go's maps have no order. encoding/json sorts their keys, and sonic does not: reversed is another order than came.
    command: Callable[[Iterable[str]], Iterable[str]] = sorted if codec == "go" else lambda keys: reversed(list(keys))
    shown = _each(value, lambda each: as_go_number(each) if isinstance(each, float) else each, command)
    text = json.dumps(shown, ensure_ascii=False, separators=(",", ":"))
    if codec == "go":
        for character, escape in GO_ESCAPES.items():
            text = text.replace(character, escape)
    return text.encode()


def changed(body: Body, changes: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> Body:
    """Return a copy of a body with a transcript's changes made, one after the other.

    Args:
        body: as it came.
        changes: each with ``set`` and ``to``, or with ``remove``; fields of fields are named with a dot between.
        names: what ``{request_id}`` and its like stand for.
    """

    def named(value: Any) -> Any:
        return names.get(value, value) if isinstance(value, str) else value

    body = copy.deepcopy(body)
    for change in changes:
        *outer, name = (change.get("set") or change["remove"]).split(".")
        place = body
        for each in outer:
            place = place[each]
        if "remove" in change:
            place.pop(name, None)
        elif change.get("if") != "present" or name in place:
            place[name] = _each(change["to"], named, list)
    return body


@dataclass(frozen=True)
class Answer:
    """What a client gets, and what the servers got.

    Attributes:
        status: of HTTP.
        body: whole; of a stream, all of its events.
        request_id: that the router gave.
        sent: bodies, by server.
    """

    status: int
    body: bytes
    request_id: str
    sent: dict[str, bytes] = field(default_factory=dict)

    def parts(self) -> list[dict[str, Any]]:
        """Return the answer's one JSON object, or those of all events of a stream."""
        if not self.body.startswith(b"data:"):
            return [json.loads(self.body)]
        events = [line[5:].strip() for line in self.body.splitlines() if line.startswith(b"data:")]
        return [json.loads(event) for event in events if event != b"[DONE]"]

    def tokens(self) -> list[list[int]]:
        """Return the tokens of each sample."""
        samples: dict[int, list[int]] = {}
        for part in self.parts():
            for choice in part["choices"]:
                samples.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
        return [samples[index] for index in sorted(samples)]

    def prompt_tokens(self) -> int:
        """Return the length of the prompt, as the server counts it."""
        return max(part["usage"]["prompt_tokens"] for part in self.parts() if part.get("usage"))


def post(url: str, path: str, headers: Iterable[tuple[str, str]], body: bytes) -> tuple[int, bytes]:
    """Send a request and return the status and the whole body of the answer. Headers may come twice."""
    server = urlsplit(url)
    connection = http.client.HTTPConnection(server.hostname or "", server.port, timeout=ANSWER_S)
    try:
        connection.putrequest("POST", path)
        for name, value in (*headers, ("Content-Type", "application/json"), ("Content-Length", str(len(body)))):
            connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class Replay:
    """A router, by its transcript, before two servers; ``tamper`` changes what it has made of the parameters."""

    def __init__(
        self,
        transcript: Mapping[str, Any],
        *,
        prefill: str,
        decode: str,
        variant: str = "",
        tamper: Callable[[Any], Any] = lambda params: params,
    ) -> None:
        self.transcript = transcript
        self.prefill = prefill
        self.decode = decode
        self._further = transcript["variants"][variant] if variant else []
        self._tamper = tamper

    def ask(self, path: str, body: Body, headers: Mapping[str, str] | None = None) -> Answer:
        """Answer a client's request as the router does."""
        codec, copied = self.transcript["json"]["codec"], self.transcript["copied"]
        request_id = str(uuid.uuid4())
        names = {"{request_id}": request_id, "{prefill_host}": urlsplit(self.prefill).hostname or ""}
        passed = self._headers(headers or {}, names)
        client = read(codec, json.dumps(body))
        sent = {"prefill": write(codec, changed(client, [*self.transcript["prefill"], *self._further], names))}
        status, answer = post(self.prefill, path, passed, sent["prefill"])
        if status != http.client.OK:
            error = self.transcript["prefill_error"]["status"]
            return Answer(status if error == "its own" else error, answer, request_id, sent)
        prefilled = read(codec, answer)
        name = copied["field"]
        forward, changes = client, self.transcript["decode"]
        if prefilled.get(name) is not None:
            forward = client | {name: self._tamper(prefilled[name])}
        else:
            outcome = copied["null" if name in prefilled else "absent"]
            if outcome == "error":
                return Answer(self.transcript["prefill_error"]["status"], answer, request_id, sent)
            forward, changes = client | ({name: None} if outcome == "null" else {}), []
        sent["decode"] = write(codec, changed(forward, changes, names))
        return Answer(*post(self.decode, path, passed, sent["decode"]), request_id, sent)

    def _headers(self, headers: Mapping[str, str], names: Mapping[str, str]) -> list[tuple[str, str]]:
        told = self.transcript["headers"]
        made = {name.lower(): names.get(value, value) for name, value in told.get("set", {}).items()}
        passed = headers.items() if told["client"] == "forwarded" else ()
        kept = [(name, value) for name, value in passed if name.lower() not in made]
        return [*kept, *made.items(), *((name, names.get(value, value)) for name, value in told.get("add", {}).items())]
