"""A server or a client in a process of its own, to be stopped, killed and measured.

Run as a script: ``processes.py serve BIND SECRET`` or ``processes.py dial ENDPOINT SECRET``; no secret, no encryption.
"""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import handshake
from handshake.messages import ANSWER_BYTES_MAX


class Child:
    """A running process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def stop(self) -> None:
        """Let it hang: its kernel answers, it does not."""
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """End it without a word."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()

    async def line(self) -> str:
        """Return the next line that it says."""
        assert self._process.stdout is not None
        return (await self._process.stdout.readline()).decode()

    def peak_mib(self) -> int:
        """Return the most resident memory that it ever had."""
        (line,) = [
            line
            for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
            if line.startswith("VmHWM:")
        ]
        return int(line.split()[1]) >> 10


class ServerProcess(Child):
    """A running server process."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str, incarnation: str) -> None:
        super().__init__(process)
        self.endpoint = endpoint
        self.incarnation = incarnation


async def _spawn(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, __file__, *arguments, stdout=asyncio.subprocess.PIPE,
        cwd=Path(handshake.__file__).parents[1], env={"PYTHONPATH": "."},
    )  # fmt: skip


@asynccontextmanager
async def server_process(bind: str, secret: str) -> AsyncIterator[ServerProcess]:
    """Start a server and wait until it listens."""
    process = await _spawn("serve", bind, secret)
    assert process.stdout is not None
    server = ServerProcess(process, *(await process.stdout.readline()).decode().split())
    try:
        yield server
    finally:
        await server.kill()


@asynccontextmanager
async def client_process(endpoint: str, secret: str) -> AsyncIterator[Child]:
    """Start a client, which says ``dialing``, and in the end how its connection ended."""
    client = Child(await _spawn("dial", endpoint, secret))
    try:
        assert await client.line() == "dialing\n"
        yield client
    finally:
        await client.kill()


def identity(engine_id: str, role: str) -> handshake.Identity:
    return handshake.Identity(engine_id=engine_id, rank=0, num_ranks=1, incarnation=secrets.token_hex(16), role=role)


def say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


async def serve(bind: str, secret: str) -> None:
    """Answer each question with the longest answer, and say how connections fail."""
    ours = identity("prefill-0", "prefill")

    def on_event(key: handshake.PeerKey, event: handshake.HandshakeEvent) -> None:
        if isinstance(event, handshake.Asked):
            server.send(key, handshake.Answer(nonce=event.nonce, answer=bytes(ANSWER_BYTES_MAX)))
        if isinstance(event, handshake.ConnectionFailed):
            say(event.code)

    async with handshake.open_server(
        bind=bind,
        identity=ours,
        publication=handshake.Publication.of(b"of a process"),
        security=handshake.ClusterSecurity.from_secret(secret) if secret else None,
        on_event=on_event,
    ) as server:
        say(f"{server.endpoint} {ours.incarnation}")
        await asyncio.Event().wait()


async def dial(endpoint: str, secret: str) -> None:
    say("dialing")
    try:
        async with handshake.open_client(
            endpoint,
            identity=identity("decode-0", "decode"),
            security=handshake.ClusterSecurity.from_secret(secret) if secret else None,
            on_event=lambda _event: None,
            limits=handshake.Limits(handshake_s=60.0),
        ) as client:
            ending = await client.wait_closed()
            say(getattr(ending, "code", "closed"))
    except handshake.HandshakeError as error:
        say(error.code)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run({"serve": serve, "dial": dial}[sys.argv[1]](*sys.argv[2:]))
