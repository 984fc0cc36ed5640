"""One life of a worker on a thread of its own: from the registration of a cache until nothing touches it any more.

Whoever is not asyncio has a ``ThreadedWorker``, which lives once, or as often as it is suspended and resumed. Each life
has an event loop, a worker with an incarnation of its own, and a bridge to it.
"""

import asyncio
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

import uvloop

from kvflow.config import WorkerConfig
from kvflow.observability.logs import Hook
from kvflow.worker.bridge import Bridge
from kvflow.worker.runtime import Cache, open_worker
from kvflow.worker.worker import Worker

Opened = tuple[Worker, Bridge]


@dataclass(frozen=True, slots=True)
class Life:
    """A worker that was opened, and the way to its loop.

    Attributes:
        worker: closed when ``end`` has returned; what it then refuses, it refuses by its own errors.
        bridge: to its loop.

    Thread: any but its own.
    """

    worker: Worker
    bridge: Bridge
    _end: Callable[[], None]

    def end(self) -> None:
        """Close the worker, and wait until nothing touches its cache any more; also the second time it is called.

        Raises:
            BaseException: what its loop had died of, once.
        """
        self._end()


BeginLife = Callable[[WorkerConfig, Cache, Sequence[Hook]], Life]
"""Opens a worker, and returns when it is open."""


class _Ending:
    """How a life is ended, whatever state it is in."""

    def __init__(self, thread: threading.Thread, left: "Future[None]", ended: "Future[None]") -> None:
        self._thread = thread
        self._left = left
        self._ended = ended
        self._told = False

    def run(self) -> None:
        # Whatever interrupted us, in whatever state the loop is: a thread that is not told lives for ever.
        if not self._left.done():
            self._left.set_result(None)
        if self._thread.is_alive() and not sys.is_finalizing():  # by then the thread does not run any more
            self._thread.join()
        if self._ended.done() and not self._told:
            self._told = True
            self._ended.result()


def begin_life(config: WorkerConfig, cache: Cache, hooks: Sequence[Hook]) -> Life:
    """Open a worker on a thread of its own.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: see ``open_worker``.

    Cancellation: Ctrl-C while it opens closes it as soon as it is open.
    """
    opened: Future[Opened] = Future()
    left: Future[None] = Future()
    ended: Future[None] = Future()

    def live() -> None:
        try:
            uvloop.run(_live(config, cache, hooks, opened=opened, left=left))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread, also if there is no loop at all
            (ended if opened.done() else opened).set_exception(error)

    # A daemon: an engine that ends without leaving this block must not wait for a thread that waits for it.
    thread = threading.Thread(target=live, name=f"kvflow-{config.engine_id}", daemon=True)
    ending = _Ending(thread, left, ended)
    try:
        thread.start()
        worker, bridge = opened.result()
    except BaseException:
        ending.run()
        raise
    return Life(worker, bridge, ending.run)


async def _live(
    config: WorkerConfig,
    cache: Cache,
    hooks: Sequence[Hook],
    *,
    opened: "Future[Opened]",
    left: "Future[None]",
) -> None:
    loop, leaving = asyncio.get_running_loop(), asyncio.Event()
    bridge = Bridge(loop)

    def leave(_: "Future[None]") -> None:
        with suppress(RuntimeError):  # the loop has died, of an error that ``ended`` tells
            loop.call_soon_threadsafe(leaving.set)

    try:
        async with open_worker(config, cache, hooks=hooks) as worker:
            opened.set_result((worker, bridge))
            left.add_done_callback(leave)
            await leaving.wait()
    finally:
        await bridge.close()
