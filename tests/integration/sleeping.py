"""An engine that sleeps: a threaded worker and its cache."""

import ctypes
import mmap
from contextlib import contextmanager

import msgspec

import kvflow
from kvflow.leases.tickets import Grant

from .producing import configured
from .shapes import Shape, whole, write

SLEEPING = 0x5A
"""What lies in the memory of an engine that sleeps, where it is still there."""
PROT_NONE = 0
"""Source: mprotect(2)."""


class Sleeper:
    """One engine that offers what it holds, and whose cache goes away and comes back elsewhere."""

    def __init__(self, worker, shape, cache):
        self._worker = worker
        self._shape = shape
        self._caches = [cache]

    def offer(self, request, block_ids, num_tokens):
        """Write the tags of a request and offer it; return what a router carries."""
        write(self._caches[-1], request, block_ids, num_tokens)
        return self.offer_as_is(request, block_ids, num_tokens)

    def offer_as_is(self, request, block_ids, num_tokens):
        lists = whole(self._caches[-1], block_ids, num_tokens)
        return self._worker.offer(request, lists, num_tokens).to_params()

    def fill(self, byte):
        self._caches[-1].backing.fill_(byte)

    def address(self):
        return msgspec.to_builtins(self._worker.rank_address)

    def admit(self, grant: Grant):
        """Hold a lease that a mint has signed; return the code of the error if it cannot."""
        try:
            self._worker.admit(grant)
        except kvflow.errors.KvflowError as error:
            return error.code
        return None

    def outcome(self, request):
        return self._worker.wait_offer(request).result()

    def suspend(self, memory):
        """Suspend the worker; the memory is ``overwritten`` or ``unmapped`` as soon as it may be."""
        self._worker.suspend()
        if memory == "overwritten":
            self.fill(SLEEPING)
        else:
            make_inaccessible(self._caches[-1].backing)

    def resume(self):
        """Come back with other memory; the old one stays where it is, so that nothing else can lie there."""
        self._caches.append(self._shape.build())
        self._worker.resume(self._caches[-1])
        return self._worker.endpoint


def make_inaccessible(backing):
    """Have every access to the whole pages of a tensor fail, as if nothing were mapped there."""
    first = -(-backing.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    nbytes = (backing.data_ptr() + backing.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), PROT_NONE) == 0, ctypes.get_errno()


@contextmanager
def sleeper(shape: Shape, *, engine_id="prefill-0", **settings):
    """Open one."""
    cache = shape.build()
    with kvflow.run_worker(configured(engine_id, **settings), cache) as worker:
        yield Sleeper(worker, shape, cache)
