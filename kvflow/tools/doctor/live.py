"""Send requests to running engines, directly and through their router, and conclude what each hop did.

Counters of both servers are read before and after each request. If other requests moved them, only what holds for all
of them is concluded. Everything that a server answers is bounded and checked.
"""

import asyncio
import os
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec
from msgspec import Raw, Struct

from kvflow.tools.doctor.codes import Finding, found, note, ok
from kvflow.tools.doctor.hops import (
    TOLD_ERROR,
    Counted,
    Exchange,
    HttpAnswer,
    Probe,
    ServerCounts,
    direct_findings,
    read_counters,
    router_findings,
    subject_of,
)
from kvflow.tools.proxy.completions import NULL, OFFER, PARAMS, UNREADABLE, read_params
from kvflow.tools.trace.text import printable

ANSWER_BYTES_MAX: Final = 16 << 20
"""Of an answer. The longest ticket takes a few MiB."""

METRICS_BYTES_MAX: Final = 32 << 20
"""Of ``/metrics``. A server with 64 engines has some MiB."""

MODELS_MAX: Final = 4096
CONNECT_S: Final = 10.0
PAUSE_S: Final = 0.2
"""Between two looks at the counters: vLLM counts a request some steps after its end."""

QUIET_S: Final = 2.0
"""Without a change of the counters, when nothing more can come: the decode server computed the prompt."""

ATTEMPTS: Final = 3
"""Requests that are sent until no other one interferes."""

ANSWER_TOKENS: Final = 4
TOKENS_OF_WORD: Final = 8
"""At most, where each letter is a token."""

PATH: Final = "/v1/completions"
TEXT: Final = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said an each she which do their time if will"
)
WORDS: Final = tuple(TEXT.split())


class Targets(Struct, frozen=True, kw_only=True):
    """What is examined, by base URLs, and how. ``settle_s``: how long counters may take to show a request."""

    prefill: str
    decode: str
    router: str
    prompt_tokens: int = 512
    api_key: str = ""
    timeout_s: float = 120.0
    settle_s: float = 5.0


class _Model(Struct, frozen=True):
    id: str
    max_model_len: Any = None


class _Models(Struct, frozen=True):
    data: list[_Model]


class _Chunk(Struct, frozen=True):
    error: Raw = NULL


class _Unusable(Exception):
    """Nothing more can be examined; the finding says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.evidence)
        self.finding = finding


async def examine(targets: Targets) -> AsyncIterator[Finding]:
    """Examine two servers and their router. Cancellation: ends the request that is on its way."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        try:
            async for finding in _Examination(targets, session).run():
                yield finding
        except _Unusable as error:
            yield error.finding


class _Examination:
    """One examination."""

    def __init__(self, targets: Targets, session: aiohttp.ClientSession) -> None:
        self._targets = targets
        self._session = session
        self._random = random.SystemRandom()
        self._model = ""
        self._num_words = targets.prompt_tokens

    async def run(self) -> AsyncIterator[Finding]:
        """Examine the servers, then the path between them, then the router."""
        async for finding in self._find_servers():
            yield finding
        yield await self._find_model()
        direct = await self._probe(self._send_directly)
        for finding in direct_findings(direct):
            yield finding
        routed = await self._probe(self._send_through_router)
        for finding in router_findings(routed, direct, self._targets.router):
            yield finding

    async def _find_servers(self) -> AsyncIterator[Finding]:
        targets, lost = self._targets, False
        for name, url in (("prefill", targets.prefill), ("decode", targets.decode), ("router", targets.router)):
            answer = await self._get(f"{url}/health")
            subject = subject_of(name, url)
            if not answer.status:
                yield found("server_unreachable", subject, answer.error)
            elif answer.status >= 500:
                yield found("server_unhealthy", subject, f"/health answers {answer}")
            else:
                yield ok(subject, f"/health answers HTTP {answer.status}")
            lost = lost or not answer.status
        if lost:
            missing = "what does not answer cannot be examined; no request was sent"
            raise _Unusable(note("requests", missing))

    async def _find_model(self) -> Finding:
        listed = [await self._models(name, getattr(self._targets, name)) for name in ("prefill", "decode")]
        common = [model for model in listed[0] if model.id in {each.id for each in listed[1]}]
        if not common:
            names = [", ".join(printable(model.id, 80) for model in side[:4]) or "none" for side in listed]
            evidence = f"the prefill server serves {names[0]}, the decode server {names[1]}"
            raise _Unusable(found("model_differs", "model", evidence))
        model = common[0]
        self._model = model.id
        if type(model.max_model_len) is int and model.max_model_len > 0:
            self._num_words = max(1, min(self._num_words, model.max_model_len // TOKENS_OF_WORD))
        return ok("model", f"both servers serve {printable(model.id, 120)}")

    async def _models(self, name: str, url: str) -> list[_Model]:
        answer = await self._get(f"{url}/v1/models")
        try:
            models = msgspec.json.decode(answer.content, type=_Models).data if answer.sound else []
        except UNREADABLE:
            models = []
        if not models:
            raise _Unusable(found("models_unknown", subject_of(name, url), f"/v1/models answers {answer}"))
        return models[:MODELS_MAX]

    async def _probe(self, send: Callable[[], Awaitable[Exchange]]) -> Probe:
        """Send a request and read the counters before and after, if need be again until no other one interferes."""
        for _ in range(ATTEMPTS):
            before = await self._count("prefill"), await self._count("decode")
            sent = await send()
            probe = await self._settle(sent, before)
            if (side := probe.restarted) is not None:
                shrunk = [name for (name, _), number in side.grown.numbers.items() if number < 0]
                raise _Unusable(found("server_restarted", subject_of(side.name, side.url), side.told(shrunk[0])))
            if probe.quiet:
                break
        return probe

    async def _settle(self, sent: Exchange, before: tuple[Counted, Counted]) -> Probe:
        """Wait until the counters show a request, or show nothing new for long enough."""
        changed_at, previous = monotonic(), None
        deadline = changed_at + self._targets.settle_s
        while True:
            after = await self._count("prefill"), await self._count("decode")
            sides = [
                ServerCounts(name, getattr(self._targets, name), before[at], after[at])
                for at, name in enumerate(("prefill", "decode"))
            ]
            probe = Probe(sent, *sides)
            now = monotonic()
            changed_at = changed_at if after == previous else now
            if probe.restarted or now >= deadline or (probe.settled and after == previous):
                return probe
            if probe.computed and now >= changed_at + QUIET_S:
                return probe
            previous = after
            await asyncio.sleep(PAUSE_S)

    async def _count(self, name: str) -> Counted:
        url = getattr(self._targets, name)
        answer = await self._get(f"{url}/metrics", METRICS_BYTES_MAX)
        found_there = read_counters(answer.content.decode(errors="replace")) if answer.sound else Counted({})
        if not found_there.vllm:
            told = f"{len(answer.content)} bytes without a metric of vLLM" if answer.sound else str(answer)
            raise _Unusable(found("metrics_missing", subject_of(name, url), f"/metrics answers {told}"))
        return found_there

    async def _send_directly(self) -> Exchange:
        """Ask the prefill server for a ticket, and give it to the decode server, as a router must."""
        asked, request_id = self._request(), _name()
        first = {**asked, "max_tokens": 1, PARAMS: OFFER}
        offered = await self._post(self._targets.prefill, first, request_id)
        params = read_params(offered.content) if offered.sound else None
        if params is None:
            return Exchange(request_id, offered, offered)
        answer = await self._post(self._targets.decode, {**asked, PARAMS: params}, request_id)
        return Exchange(request_id, answer, offered, ticket=True)

    async def _send_through_router(self) -> Exchange:
        request_id = _name()
        streamed = {**self._request(), "stream": True}
        answer = await self._post(self._targets.router, streamed, request_id)
        if answer.sound:
            answer = msgspec.structs.replace(answer, error=_fault(answer.content))
        return Exchange(request_id, answer)

    def _request(self) -> dict[str, Any]:
        """Return a request whose prompt no cache has."""
        prompt = " ".join(self._random.choices(WORDS, k=self._num_words))
        return {"model": self._model, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0}

    async def _get(self, url: str, nbytes_max: int = ANSWER_BYTES_MAX) -> HttpAnswer:
        return await self._ask("GET", url, None, {}, nbytes_max)

    async def _post(self, server: str, fields: dict[str, Any], request_id: str) -> HttpAnswer:
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        return await self._ask("POST", f"{server}{PATH}", msgspec.json.encode(fields), headers, ANSWER_BYTES_MAX)

    async def _ask(self, method: str, url: str, body: bytes | None, headers: dict[str, str], most: int) -> HttpAnswer:
        timeout = aiohttp.ClientTimeout(total=self._targets.timeout_s, sock_connect=CONNECT_S)
        headers = {**headers, "Accept-Encoding": "identity"}
        if self._targets.api_key:
            headers["Authorization"] = f"Bearer {self._targets.api_key}"
        status, content = 0, bytearray()
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                status = answer.status
                async for chunk in answer.content.iter_any():
                    content += chunk
                    if len(content) > most:
                        return HttpAnswer(status, bytes(content[:most]), f"more than {most} bytes")
        except TimeoutError:
            return HttpAnswer(status, bytes(content), f"nothing more within {self._targets.timeout_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            cause = getattr(error, "os_error", error)  # aiohttp's own text is a repr of its objects
            number = getattr(cause, "errno", None) or 0
            reason = os.strerror(number) if number > 0 else str(cause) or type(cause).__name__
            return HttpAnswer(status, bytes(content), printable(reason))
        return HttpAnswer(status, bytes(content))


def _fault(content: bytes) -> str:
    """Return what is wrong with an answer; empty for a stream with its end and without an error, or one object."""
    ended = False
    lines = content.splitlines()
    events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
    for event in events or [content]:
        if event == b"[DONE]":
            ended = True
            continue
        try:
            chunk = msgspec.json.decode(event, type=_Chunk)
        except UNREADABLE:
            return "it ends without data: [DONE]"
        if bytes(chunk.error) != bytes(NULL):
            return TOLD_ERROR
    return "" if ended or not events else "it ends without data: [DONE]"


def _name() -> str:
    return f"kvflow-doctor-{secrets.token_hex(6)}"
