"""A server and a client of handshake, for processes of their own whose memory is measured."""

import asyncio
import secrets
from contextlib import asynccontextmanager
from pathlib import Path

import handshake
from handshake.messages import ANSWER_BYTES_MAX


class Measured:
    """Something in this process, and what it says.

    Attributes:
        endpoint: where it listens.
    """

    def __init__(self, endpoint="", incarnation=""):
        self.endpoint = endpoint
        self.codes = asyncio.Queue()
        self._incarnation = incarnation

    def incarnation(self):
        return self._incarnation

    async def failure(self):
        """Return how the next connection has failed or ended."""
        return await self.codes.get()

    def peak_mib(self):
        """Return the most resident memory that this process ever had."""
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) >> 10


def identity(engine_id, role):
    return handshake.Identity(engine_id=engine_id, rank=0, num_ranks=1, incarnation=secrets.token_hex(16), role=role)


def security(secret):
    return handshake.ClusterSecurity.from_secret(secret) if secret else None


@asynccontextmanager
async def serving_apart(bind, secret):
    """Answer each question with the longest answer; no secret, no encryption."""
    ours = identity("prefill-0", "prefill")

    def on_event(key, event):
        if isinstance(event, handshake.Asked):
            server.send(key, handshake.Answer(nonce=event.nonce, answer=bytes(ANSWER_BYTES_MAX)))
        if isinstance(event, handshake.ConnectionFailed):
            measured.codes.put_nowait(event.code)

    async with handshake.open_server(
        bind=bind,
        identity=ours,
        publication=handshake.Publication.of(b"of a process"),
        security=security(secret),
        on_event=on_event,
    ) as server:
        measured = Measured(server.endpoint, ours.incarnation)
        yield measured


@asynccontextmanager
async def dialing_apart(endpoint, secret):
    """Begin to dial."""
    measured = Measured()

    async def dial():
        try:
            async with handshake.open_client(
                endpoint,
                identity=identity("decode-0", "decode"),
                security=security(secret),
                on_event=lambda _event: None,
                limits=handshake.Limits(handshake_s=60.0),
            ) as client:
                ending = await client.wait_closed()
                measured.codes.put_nowait(getattr(ending, "code", "closed"))
        except handshake.HandshakeError as error:
            measured.codes.put_nowait(error.code)

    dialing = asyncio.create_task(dial())
    yield measured
    dialing.cancel()
    await asyncio.wait([dialing])
