"""A member of the cluster that looks at a worker and reads nothing from it: ``kvflow inspect`` and the doctor."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec import UnsetType

from handshake import HandshakeClient, Identity, Limits, open_client
from handshake.errors import Closed, HandshakeError
from kvflow.config import WorkerConfig
from kvflow.errors import DeadlineExceeded, PeerLost
from kvflow.rendezvous.endpoint import ZEROMQ, Network, as_kvflow_error, security_of
from kvflow.rendezvous.publication import READER, Advertisement, decode
from kvflow.version import __version__


class Visit:
    """A connection to a worker that is ready. Thread: the event loop.

    Attributes:
        manifest_schema: of what it publishes, which this release may not understand.
    """

    def __init__(self, client: HandshakeClient, endpoint: str, answer_s: float) -> None:
        self._client = client
        self._answer_s = answer_s
        self.endpoint = endpoint
        self.identity: Identity = client.identity
        self.wire_version = client.version
        self.manifest_schema = client.publication.schema

    @property
    def clock_ahead_s(self) -> float | None:
        """Seconds by which the worker's wall clock is ahead of ours; None if it is unknown."""
        offset = self._client.clock_offset
        return None if offset is None else offset.ahead_s

    async def read_manifest(self) -> Advertisement:
        """Return what the worker publishes, checked.

        Raises:
            ReleaseMismatch: it writes another version of the manifest.
            ProtocolViolation: what it publishes is invalid.
        """
        software = self.identity.software
        return await asyncio.to_thread(decode, self._client.publication, peer=self.endpoint, software=software)

    async def ping(self) -> float:
        """Return the seconds of one round trip. Raises ``DeadlineExceeded`` or ``PeerLost``."""
        return (await self._ask(report=False))[0]

    async def ask_report(self) -> bytes:
        """Return what the worker reports about itself, at most 64 KiB; empty if its release reports nothing.

        Raises:
            DeadlineExceeded, PeerLost: there was no answer.
        """
        return (await self._ask(report=True))[1]

    async def _ask(self, *, report: bool) -> tuple[float, bytes]:
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await self._client.ask(report=report)
        except TimeoutError:
            message = f"{self.endpoint} did not answer within {self._answer_s:g} s"
            raise DeadlineExceeded(message, phase="handshake", peer=self.endpoint) from None
        except Closed as error:
            raise PeerLost(f"{self.endpoint}: {error.message}", peer=self.endpoint) from error
        return answer.rtt_s, b"" if isinstance(answer.report, UnsetType) else answer.report


@asynccontextmanager
async def open_visit(
    endpoint: str, config: WorkerConfig, *, server_key: str = "", network: Network = ZEROMQ
) -> AsyncIterator[Visit]:
    """Dial a worker as a reader does, and leave with a goodbye. Cancellation: safe.

    Args:
        endpoint: ``tcp://HOST:PORT`` of the worker's control endpoint.
        config: gives the secret, the keys and the budgets.
        server_key: public key of the worker, needed if it has its own.
        network: where the worker is dialed.

    Raises:
        ConfigInvalid: there is no usable secret, or the endpoint is malformed.
        AuthenticationFailed, PeerRefused, PeerLost, ProtocolViolation, DeadlineExceeded: it cannot be reached.
    """
    identity = Identity(
        engine_id=config.engine_id,
        rank=0,
        num_ranks=1,
        incarnation=secrets.token_hex(16),
        role="decode",
        software=f"kvflow {__version__}",
    )
    budgets = config.tuning
    try:
        async with open_client(
            endpoint,
            identity=identity,
            publication=READER,
            security=security_of(config),
            on_event=lambda _: None,
            limits=Limits(connect_s=budgets.connect_s, handshake_s=budgets.handshake_s),
            network=network,
            server_key=server_key,
        ) as client:
            yield Visit(client, endpoint, budgets.handshake_s)
    except HandshakeError as error:
        raise as_kvflow_error(error, peer=endpoint) from error
