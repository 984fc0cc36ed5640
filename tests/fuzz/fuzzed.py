"""The worker that is fuzzed, in a process of its own: told what to do by lines of JSON, answered in any order.

Each line is ``{"id": 1, "op": ..., ...}``, each answer ``{"id": 1, "said": ...}``. What is said of a pull or an offer
is ``done`` or the code of its error; an error that has none is a finding, and is said with its traceback. The end of
the input ends it.
"""

import asyncio
import json
import logging
import sys
import traceback
from types import SimpleNamespace

import uvloop

import kvflow
from handshake import codec, connection
from kvflow import errors
from tests.integration.producing import configured
from tests.integration.shapes import Shape

FINDING = "FINDING "

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


class Defects(logging.Handler):
    """Keeps what is logged as an error: a worker survives its own defects, and says so there only."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.told = []

    def emit(self, record):
        if len(self.told) < 10:
            self.told.append(self.format(record))


class Fuzzed:
    """One worker that listens and dials."""

    def __init__(self, worker, counted, defects):
        self.worker = worker
        self.counted = counted
        self.defects = defects
        self.requests = 0

    async def endpoint(self):
        return self.worker.endpoint

    async def counts(self):
        return self.counted.received

    async def left(self):
        """What nothing of may be left when nobody is fuzzed any more."""
        snapshot = self.worker.snapshot()
        return {"pulls": snapshot.pulls, "quarantined": len(snapshot.quarantined), "defects": self.defects.told}

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


async def answer(fuzzed, command):
    number, op = command.pop("id"), command.pop("op")
    try:
        said = await getattr(fuzzed, op)(**command)
    except Exception:  # noqa: BLE001 - whatever it is, it is a finding
        said = FINDING + traceback.format_exc()
    sys.stdout.write(json.dumps({"id": number, "said": said}) + "\n")
    sys.stdout.flush()


async def main(transport, secret):
    defects = Defects()
    for name in ("kvflow", "handshake", "asyncio"):
        logging.getLogger(name).addHandler(defects)
        logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger(name).propagate = False
    counted = Counted()
    loop, commands = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    config = configured("fuzzed", cluster_secret=secret, transport=transport, quarantine_s_max=QUARANTINE_S, **BOUNDS)
    async with kvflow.open_worker(config, Shape().build()) as worker, asyncio.TaskGroup() as group:
        fuzzed = Fuzzed(worker, counted, defects)
        while line := await commands.readline():
            group.create_task(answer(fuzzed, json.loads(line)))


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:]))
