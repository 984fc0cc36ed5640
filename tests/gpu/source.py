"""A worker that offers blocks of a cache on a device."""

import threading
import time
from contextlib import contextmanager

import msgspec

import kvflow
from kvflow.leases.epochs import EPOCH_BITS
from kvflow.rendezvous.issuer import TicketMint
from kvflow.tools.doctor.probe import Geometry

from .memory import SECRET, LateWrite, build, fill, pattern, placed, settle, write

REWRITES = 20
"""Kernels that write blocks again and again once their lease has ended."""


class Source:
    """A worker, and the commands that it obeys."""

    def __init__(self, worker, cache):
        self._worker, self._cache = worker, cache
        # Grants of a mint are admitted when the test says so; nothing else takes slots of this worker.
        address = msgspec.structs.replace(worker.rank_address, epoch_base=2**EPOCH_BITS)
        self._mint = TicketMint("source", [address], cluster_secret=SECRET)
        self._late = None

    def pattern(self):
        """Write the pattern that the tests expect."""
        backing = self._cache.backing
        backing.copy_(pattern(backing.numel()))
        settle(self._cache)

    def fill(self, blocks, value):
        fill(self._cache, blocks, value)

    def offer(self, request, blocks, num_tokens):
        ticket, grant = self._mint.offer(request, block_ids=[blocks], num_tokens=num_tokens)
        self._worker.admit(grant)
        return ticket.to_params()

    def offer_late(self, request, blocks, num_tokens, value, behind_event):
        """Queue a write of the blocks, and admit their offer behind it, or at once."""
        self._late = late = LateWrite(self._cache, blocks, value)
        ticket, grant = self._mint.offer(request, block_ids=[blocks], num_tokens=num_tokens)

        def admit():
            while not late.is_over():
                time.sleep(1e-3)
            self._worker.admit(grant)

        if behind_event:
            threading.Thread(target=admit, daemon=True).start()
        else:
            self._worker.admit(grant)
        return ticket.to_params()

    def release(self):
        """Let a late write on the host happen."""
        self._late.release()

    def recycle(self, request, blocks, value, delay_s):
        """Revoke a lease after a time, and have kernels write its blocks at once."""
        index = placed(self._cache, blocks)
        time.sleep(delay_s)
        self._worker.revoke(request)
        for number in range(REWRITES):
            write(self._cache, index, 0x80 + number)
        write(self._cache, index, value)
        settle(self._cache)


@contextmanager
def opened_source(geometry: Geometry, device):
    """Open one in the memory of a device."""
    cache = build(geometry, device)
    config = kvflow.WorkerConfig(engine_id="source", cluster_secret=SECRET, transport="nixl")
    with kvflow.run_worker(config, cache) as worker:
        yield Source(worker, cache)
