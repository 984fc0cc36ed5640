"""The demo from start to end: one process alone, then two that share the work, once per layout."""

import asyncio
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import msgspec
import uvloop
from msgspec import Struct
from rich.console import Console

import kvflow
from kvflow.config import SECRET_VARIABLE
from kvflow.observability.logs import record_logger
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
from kvflow.tools.demo.results import (
    PromptResult,
    Scenario,
    ScenarioResult,
    StageProgress,
    print_verdict,
    show_progress,
)
from kvflow.tools.proxy import ProxyConfig
from kvflow.tools.proxy.server import open_proxy

PER_LAYER = Scenario(name="per-layer", layout="LBNHC", kv="split")
PACKED = Scenario(name="packed", layout="BHLNC", kv="content")

PROMPT_BYTES_MIN = 5
PROMPT_BYTES_MAX = 2000
IN_FLIGHT = 6  # requests at once: enough for pulls, prefills and decodes to overlap

START_S = 60.0  # importing torch from a cold disk takes ten seconds, NIXL's first agent another one
STOP_S = 15.0  # a worker says goodbye within five seconds
REQUEST_S = 60.0  # timeout of one request, far above what the longest takes on a busy machine
RETRY_S = 0.2  # between attempts to reach an engine that is starting

LISTENING_AT = b"listening at "  # begins the line in which an engine prints its address
ERROR_CHARACTERS_MAX = 500

_log = record_logger("kvflow.demo")


def read_texts(folder: Path | None) -> bytes:
    """Return README.md and docs/ of a folder, or kvflow's own source; ``FileNotFoundError`` if it is too short."""
    if folder is None:
        paths = sorted(Path(kvflow.__file__).parent.rglob("*.py"))
    else:
        paths = [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]
    text = b"\n".join(path.read_bytes() for path in paths if path.is_file())
    if len(text) < PROMPT_BYTES_MAX:
        raise FileNotFoundError(f"README.md and docs/ of {folder} have {len(text)} bytes: leave --texts out")
    return text


def cut_prompts(text: bytes, count: int) -> Sequence[bytes]:
    """Cut ``count`` >= 2 pieces, with lengths in geometric steps from least to greatest, long and short in turn."""
    ratio = PROMPT_BYTES_MAX / PROMPT_BYTES_MIN
    sizes = [round(PROMPT_BYTES_MIN * ratio ** (step / (count - 1))) for step in range(count)]
    mixed = [sizes.pop(0 if step % 2 else -1) for step in range(count)]
    starts = [(len(text) - size) * step // (count - 1) for step, size in enumerate(mixed)]
    return [text[start : start + size] for start, size in zip(starts, mixed, strict=True)]


class EngineFailed(Exception):
    """An engine answered with a failure, or not at all."""


class Client:
    """Asks engines and routers over HTTP, by ``host:port``."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(self, address: str, request_id: str, request: PromptRequest) -> PromptAnswer:
        """Have a prompt computed and continued; ``EngineFailed`` if there is no answer, or a failure."""
        content = await self._post(address + COMPLETIONS, msgspec.json.encode(request), {REQUEST_ID: request_id})
        try:
            return msgspec.json.decode(content, type=PromptAnswer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineFailed(f"no answer of an engine came from {address}: {error}") from error

    async def drain(self, address: str) -> Drained:
        """Return what an engine still holds once no request is open; ``EngineFailed`` if it does not answer."""
        return msgspec.json.decode(await self._post(address + DRAIN), type=Drained)

    async def wait_until_healthy(self, address: str, timeout_s: float) -> None:
        """Wait until an engine serves, whose name need not resolve yet; ``EngineFailed`` after ``timeout_s``."""
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
    with suppress(msgspec.DecodeError, UnicodeDecodeError, LookupError, TypeError):
        return str(msgspec.json.decode(content)["error"]["message"])
    return content[:ERROR_CHARACTERS_MAX].decode(errors="replace")


@asynccontextmanager
async def open_client() -> AsyncIterator[Client]:
    """Open a client."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=REQUEST_S)) as session:
        yield Client(session)


async def send_all(
    client: Client, address: str, name: str, prompts: Sequence[bytes], on_answer: Callable[[], None], *, pulled: bool
) -> list[PromptResult]:
    """Send every prompt, ``IN_FLIGHT`` at a time; a failure ends only its own request.

    With ``pulled``, an answer for which nothing was pulled is a failure, which a router would hide.
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


def engine_environment() -> dict[str, str]:
    """Return an environment for engines that belong together: a cluster secret drawn now, and one core each."""
    return os.environ | {SECRET_VARIABLE: secrets.token_urlsafe(32), "OMP_NUM_THREADS": "1"}


@asynccontextmanager
async def open_process(
    name: str, role: str, cache: Scenario, logs: Path, environment: dict[str, str]
) -> AsyncIterator[str]:
    """Start an engine, enter with its address when it serves, and end it on leaving; ``EngineFailed`` if it never does.

    Its log is ``NAME.jsonl`` in ``logs``, and its standard error ``NAME.stderr``.
    """
    complaints = logs / f"{name}.stderr"
    flags = {"layout": cache.layout, "kv": cache.kv, "log": str(logs / f"{name}.jsonl")}
    arguments = [f"--{flag}={value}" for flag, value in flags.items()]
    with complaints.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvflow.tools.demo", role, *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=environment,
        )
    assert process.stdout is not None
    try:
        yield await _address(process.stdout, name, complaints)
    finally:
        await _stop(process)


async def _address(stdout: asyncio.StreamReader, name: str, complaints: Path) -> str:
    with suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            async for line in stdout:
                if line.startswith(LISTENING_AT):
                    return line.removeprefix(LISTENING_AT).decode().strip()
    raise EngineFailed(f"the {name} engine did not start; the end of {complaints}:\n{_tail(complaints)}")


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-8:])


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Ask a process to end, and make it end."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        async with asyncio.timeout(STOP_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


class Engines(Struct, frozen=True, kw_only=True):
    """``host:port`` of two engines."""

    prefill: str
    decode: str


async def run_demo(
    prompts: Sequence[bytes], logs: Path, progress: StageProgress, engines: Engines | None = None
) -> list[ScenarioResult]:
    """Run the model alone, then in two engines: those given, or per layout in two processes; one result for each.

    Raises:
        EngineFailed: an engine did not start, or the monolithic run, in which nothing is moved, failed.
    """
    async with open_client() as client:
        expected = await _run_alone(client, prompts, logs, progress)
        run = DemoRun(client, prompts, expected, progress)
        if engines is not None:
            return [await run.elsewhere(engines)]
        return [await run.here(scenario, logs) for scenario in (PER_LAYER, PACKED)]


async def _run_alone(client: Client, prompts: Sequence[bytes], logs: Path, progress: StageProgress) -> list[list[int]]:
    progress.begin("monolithic")
    async with open_process("monolithic", "monolithic", PER_LAYER, logs, engine_environment()) as address:
        answers = await send_all(client, address, "monolithic", prompts, progress.advance, pulled=False)
    for answer in answers:
        if answer.failure:
            raise EngineFailed(f"the monolithic run failed: {answer.failure}")
    return [answer.tokens for answer in answers]


class DemoRun:
    """Prompts, and what one process makes of them."""

    def __init__(
        self, client: Client, prompts: Sequence[bytes], expected: Sequence[Sequence[int]], progress: StageProgress
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._expected = expected
        self._progress = progress

    async def here(self, scenario: Scenario, logs: Path) -> ScenarioResult:
        """Run with two processes of this machine."""
        name, environment = scenario.name, engine_environment()
        async with (
            open_process(f"{name}-prefill", "prefill", scenario, logs, environment) as prefill,
            open_process(f"{name}-decode", "decode", scenario, logs, environment) as decode,
        ):
            return await self.send(Engines(prefill=prefill, decode=decode), scenario)

    async def elsewhere(self, engines: Engines) -> ScenarioResult:
        """Run with engines that were started elsewhere."""
        await self._client.wait_until_healthy(engines.prefill, START_S)
        await self._client.wait_until_healthy(engines.decode, START_S)
        return await self.send(engines, Scenario(name=f"{engines.prefill} to {engines.decode}"))

    async def send(self, engines: Engines, scenario: Scenario) -> ScenarioResult:
        """Send the prompts through a router before both engines."""
        self._progress.begin(scenario.name)
        client, name = self._client, scenario.name.replace(" ", "-")
        config = ProxyConfig(prefill=(f"http://{engines.prefill}",), decode=(f"http://{engines.decode}",))
        async with open_proxy(config, "127.0.0.1", 0) as router:
            answers = await send_all(client, router, name, self._prompts, self._progress.advance, pulled=True)
        left = {"decode": await client.drain(engines.decode), "prefill": await client.drain(engines.prefill)}
        result = ScenarioResult(scenario=scenario, answers=answers, expected=self._expected, left=left)
        _log.info(
            "scenario.completed",
            scenario=scenario.name,
            passed=result.passed,
            tokens_equal=result.tokens_equal,
            tokens_total=result.tokens_total,
            nbytes=result.nbytes,
            descriptors=result.descriptors,
        )
        self._progress.show(result)
        return result


def _program() -> str:
    """Return how a shell calls kvflow: by its name, or by its path where that is not on ``PATH``."""
    path = os.path.relpath(Path(sys.executable).with_name("kvflow"))
    return "kvflow" if shutil.which("kvflow") else shlex.quote(path)


def run_and_show(
    texts: Path | None, num_prompts: int, logs: Path, engines: Engines | None = None, *, as_json: bool = False
) -> int:
    """Run the demo on a terminal or off it, and return its exit status.

    Args:
        texts: folder with README.md and docs/, where prompts are taken from; None: kvflow's own source.
        num_prompts: at least 2.
        logs: existing folder for the logs of all processes that are started.
        engines: that run already; None starts some.
        as_json: print the figures as JSON, and nothing else on standard output.
    """
    console = Console(stderr=as_json)
    try:
        prompts = cut_prompts(read_texts(texts), num_prompts)
        with show_progress(Console(quiet=True) if as_json else console, num_prompts) as progress:
            results = uvloop.run(run_demo(prompts, logs, progress, engines))
    except (EngineFailed, FileNotFoundError) as error:
        console.print(str(error), style="red", markup=False, soft_wrap=True)
        return 1
    passed = all(result.passed for result in results)
    if as_json:
        figures = {"passed": passed, "logs": str(logs), "scenarios": [result.figures for result in results]}
        print(msgspec.json.format(msgspec.json.encode(figures), indent=2).decode())  # noqa: T201 - as a command does
        return 0 if passed else 1
    print_verdict(console, results)
    if engines is None:  # engines elsewhere keep their own logs
        folder = shlex.quote(str(logs))
        console.print(f"logs of all processes: {logs}/*.jsonl", highlight=False, soft_wrap=True)
        command = f"{_program()} trace {folder}/*.jsonl --html {folder}/trace.html"
        console.print(f"where the time went: {command}", markup=False, highlight=False, soft_wrap=True)
    return 0 if passed else 1
