"""An engine whose steps and reads can be held, for tests that need a request at one stage; see ``victims``.

Commands beside those of ``engine_process``:

==========  ======================  ====================================================================================
op          fields                  answer
==========  ======================  ====================================================================================
pause       id                      id; from now on no step is taken
step        id, count               id; so many steps were taken
resume      id                      id; steps are taken as usual again
hold        id, at                  id, when the next post of ``data`` or of its ``fence`` is held, until SIGUSR1 comes
stages      id                      id; stages: status of each request, in order; preemptions so far
leases      id                      id; leases: how each lease of this engine has ended, by request
disconnect  id, request             id; vLLM's core was told to abort a request, under its own name of it
reject      id, kv_transfer_params  id; vLLM was told what its server tells of a request that it turns down
==========  ======================  ====================================================================================
"""

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, TextIO

from . import engine_process

DATA_DESCRIPTORS_MIN = 8
"""A read of several blocks has more, that of a single pair of blocks, with which kvflow looks whether a lease is
admitted, has fewer, and the fence has one."""


class Gate:
    """Holds one post of NIXL's, so that a read is in the middle for as long as a test likes.

    Nobody waits in it: until the gate opens, a read that is held is one that takes long. Thread: any.
    """

    def __init__(self) -> None:
        self._at = ""
        self._tell: Callable[[], None] | None = None
        self._data_seen = False
        self._is_open = False
        self._descriptors: dict[Any, int] = {}
        self._held: dict[Any, Callable[[], Any]] = {}

    def watch(self) -> None:
        """See every read from now on; NIXL may not be loaded yet."""
        from nixl_cu12 import _bindings

        agent = _bindings.nixlAgent
        make, post, poll = agent.makeXferReq, agent.postXferReq, agent.getXferStatus

        def made(self_: Any, operation: Any, local: Any, indices: Any, *rest: Any, **named: Any) -> Any:
            handle = make(self_, operation, local, indices, *rest, **named)
            self._descriptors[handle] = len(indices)
            self._held.pop(handle, None)  # of a read that was given up
            return handle

        def posted(self_: Any, handle: Any, *rest: Any, **named: Any) -> Any:
            if (tell := self._holder(self._descriptors.get(handle, 0))) is None:
                return post(self_, handle, *rest, **named)
            self._held[handle] = partial(post, self_, handle, *rest, **named)
            tell()
            return _bindings.NIXL_IN_PROG

        def polled(self_: Any, handle: Any) -> Any:
            if handle not in self._held:
                return poll(self_, handle)
            return self._held.pop(handle)() if self._is_open else _bindings.NIXL_IN_PROG

        agent.makeXferReq, agent.postXferReq, agent.getXferStatus = made, posted, polled
        signal.signal(signal.SIGUSR1, lambda *_: setattr(self, "_is_open", True))

    def hold(self, at: str, tell: Callable[[], None]) -> None:
        """Hold the next post of this kind, and call ``tell`` when there it is."""
        self._is_open = False
        self._at, self._data_seen, self._tell = at, False, tell

    def _holder(self, descriptors: int) -> Callable[[], None] | None:
        """Return what to call if this post is the one to hold."""
        is_data = descriptors >= DATA_DESCRIPTORS_MIN
        awaited = is_data if self._at == "data" else self._data_seen and not is_data
        self._data_seen |= is_data
        if not awaited:
            return None
        tell, self._tell = self._tell, None
        return tell


class Served(engine_process.Served):
    """An engine that can be held."""

    ops = engine_process.Served.ops | {"pause", "step", "resume", "hold", "stages", "leases", "disconnect", "reject"}

    def __init__(self, settings: dict[str, Any], answers: TextIO) -> None:
        self.gate = Gate()
        self.gate.watch()
        self.paused = False
        self.preemptions = 0
        self.ended: dict[str, str] = {}
        self._answering = threading.Lock()
        super().__init__(settings, answers)
        self._watch_preemptions()
        self._watch_leases()

    def answer(self, **fields: Any) -> None:
        with self._answering:  # a thread that is held answers, too
            super().answer(**fields)

    def pending(self, commands: "queue.Queue[dict[str, Any]]") -> Iterator[dict[str, Any]]:
        while True:
            try:
                yield commands.get(block=self.paused or not self.scheduler.has_requests())
            except queue.Empty:
                yield {}

    def pause(self, command: dict[str, Any]) -> None:
        self.paused = True
        self.answer(id=command["id"])

    def resume(self, command: dict[str, Any]) -> None:
        self.paused = False
        self.answer(id=command["id"])

    def step(self, command: dict[str, Any] | None = None) -> None:
        for _ in range(command["count"] if command else 1):
            super().step()
        if command:
            self.answer(id=command["id"])

    def hold(self, command: dict[str, Any]) -> None:
        self.gate.hold(command["at"], lambda: self.answer(id=command["id"]))

    def stages(self, command: dict[str, Any]) -> None:
        stages = [request.status.name for request in self.scheduler.requests.values()]
        self.answer(id=command["id"], stages=stages, preemptions=self.preemptions)

    def leases(self, command: dict[str, Any]) -> None:
        self.answer(id=command["id"], leases=self.ended)

    def disconnect(self, command: dict[str, Any]) -> None:
        self.core.abort_requests([command["request"]])
        self.answer(id=command["id"])

    def reject(self, command: dict[str, Any]) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM

        async def add_request_async(request: Any) -> None:
            self.engine.engine_core.add_request(request)

        # The method of vLLM's server, with nothing of it but the way to its core.
        server = SimpleNamespace(engine_core=SimpleNamespace(add_request_async=add_request_async))
        params = command["kv_transfer_params"]
        asyncio.run(AsyncLLM.notify_kv_transfer_request_rejected(server, command["id"], params))  # type: ignore[arg-type]
        self.answer(id=command["id"])

    def _watch_preemptions(self) -> None:
        preempt = self.scheduler._preempt_request

        def counted(*arguments: Any, **named: Any) -> None:
            self.preemptions += 1
            preempt(*arguments, **named)

        self.scheduler._preempt_request = counted

    def _watch_leases(self) -> None:
        from kvflow.integrations.vllm.messages import Tally

        count_ends = Tally.count_ends

        def noted(tally: Tally, ends: Any) -> None:
            self.ended |= {end.request_id: end.outcome for end in ends if end.side == "producer"}
            count_ends(tally, ends)

        Tally.count_ends = noted
