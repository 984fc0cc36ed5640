"""What the tests of a worker share: small caches, a clock that stands still, and a data plane that only remembers."""

import asyncio
import gc
import threading
import weakref
from contextlib import asynccontextmanager
from functools import partial

from kvflow.layout.specs import FullAttention
from kvflow.memory.cache import allocate
from kvflow.observability.logs import LEVELS, EventLog, Reporter
from kvflow.worker import threaded
from kvflow.worker.snapshot import PullState

SECRET = "a secret of the tests, long enough"
PATIENCE_S = 30.0
SPECS = {name: FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16") for name in ("a", "b")}
PULL = PullState(
    pull_id=1,
    request_id="r",
    local_request_id="ours",
    phase="wire",
    peer="prefill-0/0/a",
    num_peers=1,
    age_s=0.5,
    nbytes=1,
    nbytes_wanted=2,
    transport="tcp",
    plane="tcp",
)


def cache_of(num_blocks=8, specs=None, **how):
    return allocate(specs or SPECS, num_blocks=num_blocks, layout="BLHNC", **how)


def lease_of(ticket):
    """Return slot and epoch of a ticket of one grant."""
    (grant,) = ticket.grants
    return grant.slot, grant.epoch


async def turns(count):
    """Let the loop turn so many times."""
    for _ in range(count):
        await asyncio.sleep(0)


class Clock:
    """Time that passes when it is told to."""

    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


class Reports(Reporter):
    """Events with their context, as a worker reports them."""

    def __init__(self):
        super().__init__(EventLog(), [])
        self.is_logged = {kind: partial(self.wants, kind) for kind in LEVELS}
        self.events = []
        self.contexts = []

    def __call__(self, event, **context):
        self.events.append(event)
        self.contexts.append(context)

    def wants(self, kind):
        return True

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


async def futures_left(call, monkeypatch):
    """Wait for a call and give up, a few times over; return how many futures are kept of that."""
    loop, made = asyncio.get_running_loop(), []
    create = loop.create_future

    def remembered():
        future = create()
        made.append(weakref.ref(future))
        return future

    with monkeypatch.context() as patch:
        patch.setattr(loop, "create_future", remembered)
        for _ in range(3):
            impatient = asyncio.ensure_future(call())
            await asyncio.sleep(0)
            impatient.cancel()
            await asyncio.wait([impatient])
    assert len(made) >= 3
    del impatient
    await asyncio.sleep(0)  # this very turn of the loop holds the future that it was woken by
    gc.collect()
    return sum(future() is not None for future in made)


def make_mortal(monkeypatch):
    """Have the loops of threaded workers die as soon as they are open; return what is set when one has."""
    open_worker, run, died = threaded.open_worker, threaded.uvloop.run, threading.Event()

    async def fail():
        raise ZeroDivisionError("what it died of")

    @asynccontextmanager
    async def open_mortal(*args, **how):
        async with open_worker(*args, **how) as worker, asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
            yield worker

    def run_and_tell(living):
        try:
            run(living)
        finally:
            died.set()

    monkeypatch.setattr(threaded, "open_worker", open_mortal)
    monkeypatch.setattr(threaded.uvloop, "run", run_and_tell)
    return died
