"""A server in a process of its own, to be stopped and killed. Run as a script: ``processes.py BIND SECRET``."""

import asyncio
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import handshake


class ServerProcess:
    """A running server process."""

    def __init__(self, process: asyncio.subprocess.Process, endpoint: str, incarnation: str) -> None:
        self.endpoint = endpoint
        self.incarnation = incarnation
        self._process = process

    def stop(self) -> None:
        """Let it hang: its kernel answers, it does not."""
        self._process.send_signal(signal.SIGSTOP)

    async def kill(self) -> None:
        """End it without a word."""
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def server_process(bind: str, secret: str) -> AsyncIterator[ServerProcess]:
    """Start a server and wait until it listens."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, bind, secret, stdout=asyncio.subprocess.PIPE, cwd=Path(handshake.__file__).parents[1],
        env={"PYTHONPATH": "."},
    )  # fmt: skip
    assert process.stdout is not None
    server = ServerProcess(process, *(await process.stdout.readline()).decode().split())
    try:
        yield server
    finally:
        await server.kill()


async def serve(bind: str, secret: str) -> None:
    identity = handshake.Identity(
        engine_id="prefill-0", rank=0, num_ranks=1, incarnation=secrets.token_hex(16), role="prefill"
    )
    async with handshake.open_server(
        bind=bind,
        identity=identity,
        publication=handshake.Publication.of(b"of a process"),
        security=handshake.ClusterSecurity.from_secret(secret),
        on_event=lambda _key, _event: None,
    ) as server:
        sys.stdout.write(f"{server.endpoint} {identity.incarnation}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(*sys.argv[1:]))
