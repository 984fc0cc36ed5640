"""The worker that is fuzzed.

What is said of a pull or an offer is ``done`` or the code of its error; an error that has none is a finding, and ends
what was asked with its traceback.
"""

import logging
from contextlib import asynccontextmanager
from types import SimpleNamespace

import kvflow
from handshake import codec, connection
from kvflow import errors
from tests.integration.producing import configured
from tests.integration.shapes import Shape
from tests.world.process import logged_errors

BOUNDS = {"connect_s": 5.0, "handshake_s": 5.0, "queue_s": 5.0, "wire_s": 2.0, "fence_s": 2.0}
"""As short as they may be: some of what is fuzzed ends by time alone."""

QUARANTINE_S = 10.0
"""A well-formed lie may lead a read to where nobody answers. Nothing but the end of the reader ends that, and soon."""


class Counted:
    """The codec, which counts what this process was sent."""

    def __init__(self):
        self.received = {"valid": 0, "invalid": 0}
        connection.codec = SimpleNamespace(encode=codec.encode, decode=self.decode)

    def decode(self, frames, nbytes_max):
        try:
            message = codec.decode(frames, nbytes_max)
        except Exception:
            self.received["invalid"] += 1
            raise
        self.received["valid"] += 1
        return message


class Fuzzed:
    """One worker that listens and dials."""

    def __init__(self, worker, counted):
        self.worker = worker
        self.endpoint = worker.endpoint
        self.counted = counted
        self.requests = 0

    async def counts(self):
        return self.counted.received

    async def left(self):
        """What nothing of may be left when nobody is fuzzed any more."""
        snapshot = self.worker.snapshot()
        return {"pulls": snapshot.pulls, "quarantined": len(snapshot.quarantined), "defects": logged_errors()[:10]}

    async def pull(self, params, block_ids):
        """Pull whatever a router brought."""
        try:
            await self.worker.pull(kvflow.Ticket.from_params(params), block_ids)
        except errors.KvflowError as error:
            return error.code
        return "done"

    async def offer(self, block_ids, num_tokens):
        """Offer whatever an engine says, and take it back."""
        self.requests += 1
        request = f"offer {self.requests}"
        try:
            self.worker.offer(request, block_ids, num_tokens)
        except errors.KvflowError as error:
            return error.code
        assert self.worker.revoke(request)
        return "done"


@asynccontextmanager
async def fuzzed(transport, secret):
    """Open one."""
    for name in ("kvflow", "handshake", "asyncio"):
        logging.getLogger(name).setLevel(logging.ERROR)
    counted = Counted()
    config = configured("fuzzed", cluster_secret=secret, transport=transport, quarantine_s_max=QUARANTINE_S, **BOUNDS)
    async with kvflow.open_worker(config, Shape().build()) as worker:
        yield Fuzzed(worker, counted)
