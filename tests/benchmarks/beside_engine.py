"""An engine that measures its connector, whichever it is: what ``beside_vllm`` starts in place of ``engine_process``.

Everything is measured at vLLM's own seams, so that all connectors are measured alike: the scheduler's ``schedule``, the
public methods of the connector, and the outputs of a step. Two commands more than ``engine_process`` knows:

=====  ==============================================  ==============================================================
op     fields                                          answer
=====  ==============================================  ==============================================================
burst  id, requests: each with id, prompt, max_tokens  id, requests: for each ``ttft_s`` and ``steps``; step_s, idle,
       and kv_transfer_params                          idle_s, connector_s
meter  id                                              id, connector_s since the last one, thread ids that are neither
                                                       the engine's nor a connector's
=====  ==============================================  ==============================================================

The requests of a burst arrive together. ``ttft_s`` of one is from just before it is added to the step that returns its
first token; ``steps`` are those from the one that orders its load to that, both counted. ``step_s`` are the steps
that compute one token of all requests, ``idle`` and ``idle_s`` the number of steps that computed nothing and the
seconds that passed in them, the engine's own pause after each included. ``connector_s`` is CPU time of the engine's
thread inside the connector's methods.
"""

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

from tests.vllm import engine_process
from tests.vllm.engine_process import IDLE_S, LISTENER


class Meter:
    """CPU time of the calling thread inside the outermost of wrapped methods."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self._depth = 0

    def wrap(self, target: Any) -> None:
        """Measure every public method of an object, which stays the same object."""
        for name in dir(type(target)):
            if not name.startswith("_") and inspect.isfunction(getattr(type(target), name)):
                setattr(target, name, self._measured(getattr(target, name)))

    def take(self) -> float:
        """Return the seconds since the last call."""
        spent, self.spent_s = self.spent_s, 0.0
        return spent

    def _measured(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def measured(*args: Any, **named: Any) -> Any:
            if self._depth:
                return method(*args, **named)
            self._depth, started = 1, time.thread_time()
            try:
                return method(*args, **named)
            finally:
                self.spent_s += time.thread_time() - started
                self._depth = 0

        return measured


@dataclass
class Burst:
    """What is known of requests that arrived together.

    Attributes:
        added: request -> when.
        ordered: request -> the step that ordered its load.
        first: request -> seconds to its first token.
        steps: request -> steps to it.
    """

    added: dict[str, float] = field(default_factory=dict)
    ordered: dict[str, int] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    idle: int = 0
    idle_s: float = 0.0


class Served(engine_process.Served):
    """An engine that tells where the time of its requests went."""

    ops = engine_process.Served.ops | {"burst", "meter"}

    def __init__(self, settings: dict[str, Any], answers: TextIO) -> None:
        super().__init__(settings, answers)
        from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

        self.meter_of_connector = Meter()
        self.burst_now = Burst()
        self.scheduled = 0
        self.watch_schedule()
        if has_kv_transfer_group():
            self.watch_orders(self.scheduler.connector)
            for side in (self.scheduler.connector, get_kv_transfer_group()):
                self.meter_of_connector.wrap(side)

    def watch_schedule(self) -> None:
        """Note of every step how many tokens it computes."""
        schedule = self.scheduler.schedule

        def scheduled(*args: Any, **named: Any) -> Any:
            output = schedule(*args, **named)
            self.scheduled = output.total_num_scheduled_tokens
            return output

        self.scheduler.schedule = scheduled

    def watch_orders(self, connector: Any) -> None:
        """Note of every request in which step it got blocks to be loaded into."""
        allocated = connector.update_state_after_alloc

        def noted(request: Any, blocks: Any, num_external_tokens: int) -> Any:
            if num_external_tokens:
                self.burst_now.ordered.setdefault(request.request_id.rpartition("-")[0], self.steps)
            return allocated(request, blocks, num_external_tokens)

        connector.update_state_after_alloc = noted

    def meter(self, command: dict[str, Any]) -> None:
        """Answer what the connector has taken of this thread, and which threads are not to be counted beside it."""
        listeners = [thread.native_id for thread in threading.enumerate() if thread.name == LISTENER]
        self.answer(id=command["id"], connector_s=self.meter_of_connector.take(), not_counted=[os.getpid(), *listeners])

    def burst(self, command: dict[str, Any]) -> None:
        """Run requests that arrive together to their ends, as vLLM's own loop does."""
        burst = self.burst_now = Burst()
        self.meter_of_connector.take()
        for request in command["requests"]:
            burst.added[request["id"]] = time.perf_counter()
            self.generate(request)
        while open_requests := burst.added.keys() & self.requests.keys():
            self.step_of(burst, len(open_requests))
        self.answer(
            id=command["id"],
            requests=[
                {"ttft_s": burst.first.get(name), "steps": burst.steps.get(name), "id": name} for name in burst.added
            ],
            step_s=burst.step_s,
            idle=burst.idle,
            idle_s=burst.idle_s,
            connector_s=self.meter_of_connector.take(),
        )

    def step_of(self, burst: Burst, open_requests: int) -> None:
        """Take one step and note what it has brought."""
        started = time.perf_counter()
        outputs = self.engine.step()
        ended = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if name in burst.added and name not in burst.first and output.outputs[0].token_ids:
                burst.first[name] = ended - burst.added[name]
                burst.steps[name] = self.steps - burst.ordered.get(name, self.steps) + 1
            if output.finished:
                self.requests.pop(name, None)
        self.steps += 1
        if self.scheduled == open_requests:
            burst.step_s.append(ended - started)
        if not self.scheduled:
            time.sleep(IDLE_S)
            burst.idle += 1
            burst.idle_s += time.perf_counter() - started
