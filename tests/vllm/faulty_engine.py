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
from types import SimpleNamespace
from typing import Any, TextIO

from . import engine_process

DATA_DESCRIPTORS_MIN = 8
"""A read of several blocks has more, that of a single pair of blocks, with which kvflow looks whether a lease is
admitted, has fewer, and the fence has one."""


class Gate:
    """Holds one post of NIXL's, so that a read is in the middle for as long as a test likes.

    Thread: any; whichever thread posts is the one that is held.
    """

    def __init__(self) -> None:
        self._at = ""
        self._tell: Callable[[], None] | None = None
        self._data_seen = False
        self._descriptors: dict[Any, int] = {}
        self._open: queue.SimpleQueue[None] = queue.SimpleQueue()  # a signal may interrupt its own handler in ``put``

    def watch(self) -> None:
        """See every read from now on; NIXL may not be loaded yet."""
        from nixl_cu12 import _bindings

        agent = _bindings.nixlAgent
        make, post = agent.makeXferReq, agent.postXferReq

        def made(self_: Any, operation: Any, local: Any, indices: Any, *rest: Any, **named: Any) -> Any:
            handle = make(self_, operation, local, indices, *rest, **named)
            self._descriptors[handle] = len(indices)
            return handle

        def posted(self_: Any, handle: Any, *rest: Any, **named: Any) -> Any:
            self._pass(self._descriptors.get(handle, 0))
            return post(self_, handle, *rest, **named)

        agent.makeXferReq, agent.postXferReq = made, posted
        signal.signal(signal.SIGUSR1, lambda *_: self._open.put(None))

    def hold(self, at: str, tell: Callable[[], None]) -> None:
        """Hold the next post of this kind, and call ``tell`` when there it is."""
        self._open = queue.SimpleQueue()
        self._at, self._data_seen, self._tell = at, False, tell

    def _pass(self, descriptors: int) -> None:
        is_data = descriptors >= DATA_DESCRIPTORS_MIN
        awaited = is_data if self._at == "data" else self._data_seen and not is_data
        self._data_seen |= is_data
        if self._tell is None or not awaited:
            return
        tell, self._tell = self._tell, None
        tell()
        self._open.get()


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
