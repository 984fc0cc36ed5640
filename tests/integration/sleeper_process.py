"""An engine that sleeps, told what to do by lines of JSON on standard input: a threaded worker and its cache.

``{"op": "open", "shape": {...}, "settings": {...}}`` opens it, every other ``op`` is a method of ``Sleeper``. Each line
is answered by one line. ``stop``, or the end of the input, ends it.
"""

import ctypes
import json
import mmap
import sys
from contextlib import ExitStack

import msgspec
import uvloop

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

    def __init__(self, stack, shape, settings):
        self._shape = shape
        self._caches = [shape.build()]
        self._worker = stack.enter_context(kvflow.run_worker(configured(**settings), self._caches[-1]))

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

    def admit(self, grant):
        """Hold a lease that a mint has signed; return the code of the error if it cannot."""
        try:
            self._worker.admit(msgspec.convert(grant, Grant))
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


async def main():
    """Obey; the loop is not used, an engine that is not asyncio has none."""
    with ExitStack() as stack:
        for line in sys.stdin:
            command = json.loads(line)
            match command.pop("op"):
                case "open":
                    sleeper = Sleeper(stack, msgspec.convert(command["shape"], Shape), command["settings"])
                    answer = None
                case "stop":
                    return
                case op:
                    answer = getattr(sleeper, op)(**command)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
