"""Sends prompts to an engine, or to a router before two engines, several at a time, and keeps what comes back."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
from msgspec import Struct

from kvflow.report import TransferReport
from kvflow.tools.demo.messages import (
    COMPLETIONS,
    DRAIN,
    HEALTH,
    MAX_TOKENS,
    REQUEST_ID,
    Drained,
    PromptAnswer,
    PromptRequest,
)

IN_FLIGHT = 6
"""Requests on the way at once: enough for pulls, prefills and decodes to overlap."""

REQUEST_S = 60.0
"""Timeout of one request, far above what the longest takes on a busy machine."""

RETRY_S = 0.2
"""Between attempts to reach an engine that is starting."""

ERROR_CHARACTERS_MAX = 500


class EngineFailed(Exception):
    """An engine answered with a failure, or not at all."""


class PromptResult(Struct, frozen=True):
    """What became of one prompt.

    Attributes:
        tokens: generated.
        report: what the pull moved; None if nothing was pulled.
        failure: why the request failed, or empty.
    """

    tokens: list[int] = []
    report: TransferReport | None = None
    failure: str = ""


class _ErrorText(Struct):
    message: str


class _ErrorAnswer(Struct):
    error: _ErrorText


class Client:
    """Asks engines and routers over HTTP, by ``host:port``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(self, address: str, request_id: str, request: PromptRequest) -> PromptAnswer:
        """Have a prompt computed and continued.

        Raises:
            EngineFailed: there is no answer, or it is a failure.
        """
        content = await self._post(address + COMPLETIONS, msgspec.json.encode(request), {REQUEST_ID: request_id})
        try:
            return msgspec.json.decode(content, type=PromptAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFailed(f"no answer of an engine came from {address}: {error}") from error

    async def drain(self, address: str) -> Drained:
        """Return what an engine still holds once no request is open.

        Raises:
            EngineFailed: it does not answer.
        """
        return msgspec.json.decode(await self._post(address + DRAIN), type=Drained)

    async def wait_until_healthy(self, address: str, timeout_s: float) -> None:
        """Wait until an engine serves, whose name may not be known yet either.

        Raises:
            EngineFailed: it does not within ``timeout_s``.
        """
        reason = "no attempt was answered"
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        async with self._session.get(f"http://{address}{HEALTH}", raise_for_status=True):
                            return
                    except aiohttp.ClientError as error:
                        reason = str(error)
                        await asyncio.sleep(RETRY_S)
        raise EngineFailed(f"the engine at {address} cannot be reached within {timeout_s:.0f} s: {reason}")

    async def _post(self, place: str, body: bytes = b"", headers: dict[str, str] | None = None) -> bytes:
        try:
            async with self._session.post(f"http://{place}", data=body, headers=headers) as answer:
                content = await answer.read()
        except TimeoutError as error:
            raise EngineFailed(f"{place} did not answer within {REQUEST_S:.0f} s") from error
        except aiohttp.ClientConnectorError as error:
            raise EngineFailed(f"{place} cannot be reached: {error}") from error
        except aiohttp.ClientError as error:
            raise EngineFailed(f"{place} hung up; its log says why: {error!r}") from error
        if answer.status >= 400:
            raise EngineFailed(f"HTTP {answer.status} from {place}: {_error_text(content)}")
        return content


def _error_text(content: bytes) -> str:
    with suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(content, type=_ErrorAnswer).error.message
    return content[:ERROR_CHARACTERS_MAX].decode(errors="replace")


@asynccontextmanager
async def open_client() -> AsyncIterator[Client]:
    """Enter with a client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
        yield Client(session)


async def send_all(
    client: Client, address: str, name: str, prompts: Sequence[bytes], on_answer: Callable[[], None], *, pulled: bool
) -> list[PromptResult]:
    """Send every prompt, ``IN_FLIGHT`` at a time; a failure ends only its own request.

    Args:
        client: sends.
        address: ``host:port`` of an engine or a router.
        name: that the ids of the requests begin with.
        prompts: tokens are bytes.
        on_answer: called after each.
        pulled: whether an answer without a pull is a failure. A router asks the decode engine alone if no prefill
            engine can be asked.
    """
    room = asyncio.Semaphore(IN_FLIGHT)

    async def send_one(index: int, prompt: bytes) -> PromptResult:
        request = PromptRequest(prompt=tuple(prompt), max_tokens=MAX_TOKENS)
        async with room:
            try:
                answer = await client.complete(address, f"{name}-{index}", request)
            except EngineFailed as error:
                result = PromptResult(failure=str(error))
            else:
                result = PromptResult(answer.choices[0].token_ids, answer.report)
        on_answer()
        if pulled and not result.failure and result.report is None:
            return PromptResult(failure="the prefill engine failed, so nothing was pulled; driver.jsonl says why")
        return result

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_one(index, prompt)) for index, prompt in enumerate(prompts)]
    return [task.result() for task in tasks]
