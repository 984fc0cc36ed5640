"""Peers that kvflow did not write: of another release, of another cluster, hostile, or not a peer at all."""

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import zmq
import zmq.asyncio

import handshake
import kvflow
from handshake.connection import Conversation
from handshake.limits import DEFAULT_LIMITS
from handshake.states import Role

from .producing import SECRET

SECURITY = handshake.ClusterSecurity.from_secret(SECRET)
NEWER = handshake.VersionRange(7, 9)
IDENTITY = handshake.Identity(engine_id="prefill-0", rank=0, num_ranks=1, incarnation="ab" * 16, role="prefill")


def ticket_to(endpoint, block_ids=((0, 1), (2, 3)), num_tokens=8, *, secret=SECRET, incarnation=IDENTITY.incarnation):
    """A ticket that is signed and names this endpoint; what a router brings."""
    address = kvflow.RankAddress(rank=0, incarnation=incarnation, endpoint=endpoint, slots=64)
    mint = kvflow.TicketMint(IDENTITY.engine_id, [address], cluster_secret=secret)
    ticket, _ = mint.offer("from a stranger", block_ids=block_ids, num_tokens=num_tokens)
    return ticket.to_params()


@asynccontextmanager
async def publishing(publication, *, security=SECURITY):
    """Serve any publication as ``prefill-0``; yields the endpoint."""
    async with handshake.open_server(
        bind="tcp://127.0.0.1:0",
        identity=IDENTITY,
        publication=publication,
        security=security,
        on_event=lambda _key, _event: None,
    ) as server:
        yield server.endpoint


@asynccontextmanager
async def of_newer_release():
    """Serve wire versions that this release does not speak."""
    async with AsyncExitStack() as stack:
        context = stack.enter_context(zmq.asyncio.Context())
        router = context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt(zmq.CURVE_SECRETKEY, SECURITY.server.private)
        router.bind("tcp://127.0.0.1:0")

        async def serve():
            publication, connections = handshake.Publication.of(b"of the future"), {}
            newer = partial(Conversation, Role.SERVER, IDENTITY, publication, limits=DEFAULT_LIMITS, versions=NEWER)
            while True:
                name, *frames = await router.recv_multipart()
                connection = connections.setdefault(name, newer(now=time.monotonic()))
                connection.receive(frames, time.monotonic())
                for answer in connection.take_outgoing():
                    await router.send_multipart([name, *answer])

        async with asyncio.TaskGroup() as group:
            task = group.create_task(serve())
            yield router.get_string(zmq.LAST_ENDPOINT)
            task.cancel()
        router.close()
