"""The router: sends prompts through the engines, several at a time, and keeps what comes back."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from msgspec import Struct

from kvflow.clock import monotonic
from kvflow.observability.logs import record_logger
from kvflow.tools.demo.channel import EngineFailed, call
from kvflow.tools.demo.messages import Decode, Drain, Drained, Generate, Generated, Prefill, Prefilled

T = TypeVar("T")

_log = record_logger("kvflow.demo")

MAX_TOKENS = 32
IN_FLIGHT = 6
"""Requests on the way at once: enough for pulls, prefills and decodes to overlap."""

REQUEST_S = 60.0
"""Budget of one request, far above what the longest takes on a busy machine."""


class Answer(Struct, frozen=True):
    """What became of one prompt.

    Attributes:
        generated: tokens and report; None if the request failed.
        failure: why, or empty.
    """

    generated: Generated | None = None
    failure: str = ""


Send = Callable[[str, bytes], Awaitable[Generated]]
"""Sends one request, by id and prompt."""


async def send_all(name: str, prompts: Sequence[bytes], send: Send, on_answer: Callable[[], None]) -> list[Answer]:
    """Send every prompt, ``IN_FLIGHT`` at a time; a failure ends its own request only.

    Args:
        name: that the ids of the requests begin with.
        prompts: tokens are bytes.
        send: sends one.
        on_answer: called after each.
    """
    room = asyncio.Semaphore(IN_FLIGHT)

    async def send_one(index: int, prompt: bytes) -> Answer:
        async with room:
            try:
                async with asyncio.timeout(REQUEST_S):
                    answer = Answer(await send(f"{name}-{index}", prompt))
            except (EngineFailed, TimeoutError) as error:
                answer = Answer(failure=str(error) or f"no answer within {REQUEST_S:.0f} s")
        on_answer()
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(index, prompt)) for index, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]


def through_one(address: str) -> Send:
    """Return how to send a prompt to a monolithic engine."""

    async def send(request_id: str, prompt: bytes) -> Generated:
        request = Generate(request_id=request_id, prompt=prompt, max_tokens=MAX_TOKENS)
        return _expect(Generated, await call(address, request))

    return send


def through_two(prefill: str, decode: str) -> Send:
    """Return how to send a prompt to a prefill engine, and its cache on to a decode engine."""

    async def send(request_id: str, prompt: bytes) -> Generated:
        called_at, started = time.time(), monotonic()
        prefilled = _expect(Prefilled, await call(prefill, Prefill(request_id=request_id, prompt=prompt)))
        prefill_s = monotonic() - started
        request = Decode(
            request_id=request_id,
            num_prompt_tokens=len(prompt),
            token=prefilled.token,
            max_tokens=MAX_TOKENS,
            kv_transfer_params=prefilled.kv_transfer_params,
        )
        generated = _expect(Generated, await call(decode, request))
        # As kvflow proxy writes it.
        _log.info(
            "request.answered",
            request_id=request_id,
            called_at=round(called_at, 6),
            prefill_s=round(prefill_s, 6),
            elapsed_s=round(monotonic() - started, 6),
        )
        return generated

    return send


async def drain(address: str) -> Drained:
    """Ask an engine what it still holds.

    Raises:
        EngineFailed: it does not answer.
    """
    async with asyncio.timeout(REQUEST_S):
        return _expect(Drained, await call(address, Drain()))


def _expect(kind: type[T], reply: object) -> T:
    if not isinstance(reply, kind):
        raise EngineFailed(f"the engine answered {type(reply).__name__}, not {kind.__name__}")
    return reply
