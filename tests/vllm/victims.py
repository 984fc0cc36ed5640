"""Engines that are killed, stopped and held: two that prefill and two that decode, which share one secret."""

import asyncio
import os
import secrets
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from tests.world.proxy import proxy

from .engines import ANSWER_S, KVFLOW, STOP_S, Engine, Nursery, Options, free_port
from .prompts import prompt_of
from .tiny_models import CONTEXT

BLOCK_SIZE = 32
BLOCKS = {"llama": 64, "gptoss": 96}
"""A pool that tests can fill: two requests of the longest kind. That of several groups must hold them for each."""

LEASE_S = 6.0
HANDSHAKE_S = 5.0
SETTINGS: Mapping[str, Any] = {
    "lease_s": LEASE_S,  # tests wait for it to run out, and ask within it otherwise
    "connect_s": 1.5,  # the usual
    "handshake_s": HANDSHAKE_S,  # what is found out of a peer that is stopped before it is met
    "wire_s": 30.0,  # longer than any test holds a read
    "fence_s": 10.0,
}


class Victim(Engine):
    """An engine that can be stopped, and held at one point; see ``faulty_engine``."""

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take no step meanwhile, but those of ``step``."""
        self.obey("pause")
        try:
            yield
        finally:
            self.obey("resume")

    @contextmanager
    def held(self, at: str) -> Iterator["Held"]:
        """Hold the next read at its ``data`` or at its ``fence``: before that is posted."""
        held = Held(self, at)
        try:
            yield held
        finally:
            held.let_go()

    def overwrite(self) -> None:
        """Compute other prompts until every block of the pool has been used again."""
        length = CONTEXT - BLOCK_SIZE
        for number in range(-(-self.state()["blocks"] * BLOCK_SIZE // length)):
            self.generate(prompt_of(length, f"overwrite {number}"), max_tokens=1)

    def step(self, count: int) -> None:
        """Take so many steps, while paused."""
        self.obey("step", count=count)

    def stages(self) -> list[str]:
        """Return the status of each request, as vLLM names them."""
        stages: list[str] = self.obey("stages")["stages"]
        return stages

    def preemptions(self) -> int:
        """Return how often a request was preempted so far."""
        return int(self.obey("stages")["preemptions"])

    def lease_end(self, params: Mapping[str, Any]) -> str:
        """Return how the lease of a ticket has ended, as seen by its engine; empty if it has not."""
        return str(self.obey("leases")["leases"].get(params["remote_request_id"], ""))

    def disconnect(self, params: Mapping[str, Any]) -> None:
        """Abort a request that has ended and was offered."""
        self.obey("disconnect", request=params["remote_request_id"])

    def reject(self, params: Mapping[str, Any]) -> None:
        """Do what vLLM's server does with a ticket whose request it turns down."""
        self.obey("reject", kv_transfer_params=params)


class Held:
    """One read that will be held."""

    def __init__(self, engine: Victim, at: str) -> None:
        self._engine = engine
        self._reached = engine._command("hold", f"hold-{next(engine._ids)}", at=at)

    def reached(self) -> None:
        """Wait until it is."""
        self._engine._await(self._reached, ANSWER_S)

    def let_go(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._engine.pid, signal.SIGUSR1)


class Wire:
    """The control connections to a port of this host, which can be held back and cut; see ``tests.world.proxy``.

    Attributes:
        endpoint: what stands for the port.
    """

    def __init__(self, backend: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="wire", daemon=True)
        self._thread.start()
        self._opened = proxy(backend)
        self._proxy = self._run(self._opened.__aenter__())
        self.endpoint: str = self._proxy.endpoint

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Hold everything back; at the end break what was connected."""
        self._loop.call_soon_threadsafe(self._proxy.stall)
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(self._proxy.cut)
            self._loop.call_soon_threadsafe(self._proxy.flow)

    def close(self) -> None:
        self._run(self._opened.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(STOP_S)


class Cluster:
    """Four engines of one model. Use it as a context manager.

    ``first`` prefills, and is what tests do harm to; ``second`` prefills, too, and is reached over ``wire``.
    ``failing`` and ``recomputing`` decode, and differ in what they do with a cache that they could not read.
    """

    def __init__(
        self,
        folder: Path,
        model: str,
        nursery: Nursery,
        *,
        connector: str = KVFLOW,
        settings: Mapping[str, Any] = SETTINGS,
        prefix_caching: bool = False,
    ) -> None:
        self.folder = folder
        self.secret = secrets.token_hex(32)
        self.prefix = f"{model}-{secrets.token_hex(2)}"
        self.nursery = nursery
        self.ports = {name: free_port() for name in ("first", "second", "failing", "recomputing")}
        self.wire = Wire(self.ports["second"])
        self.engines: dict[str, Victim] = {}
        self._usual = Options(
            model,
            connector,
            block_size=BLOCK_SIZE,
            prefix_caching=prefix_caching,
            extra=settings,
            llm={"num_gpu_blocks_override": BLOCKS[model]},
            served="tests.vllm.faulty_engine",
        )

    def __enter__(self) -> Self:
        try:
            for name in self.ports:
                self.begin(name)
            for engine in self.engines.values():
                engine.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def first(self) -> Victim:
        return self.engines["first"]

    @property
    def second(self) -> Victim:
        return self.engines["second"]

    @property
    def failing(self) -> Victim:
        return self.engines["failing"]

    @property
    def recomputing(self) -> Victim:
        return self.engines["recomputing"]

    @property
    def decodes(self) -> tuple[Victim, Victim]:
        return self.failing, self.recomputing

    def endpoint(self, name: str) -> str:
        """Return where an engine's worker listens, without any wire between."""
        return f"tcp://127.0.0.1:{self.ports[name]}"

    def begin(self, name: str, engine_id: str = "") -> None:
        """Start an engine at its place: at the same port, and under the same id unless it gets another."""
        port = self.ports[name]
        options = replace(
            self._usual,
            failure_policy="recompute" if name == "recomputing" else "fail",
            variables={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)},
        )
        if options.connector == KVFLOW:
            at = {"bind": self.endpoint(name)} | ({"advertise": self.wire.endpoint} if name == "second" else {})
            options = replace(options, extra=options.extra | at)
        self.engines[name] = Victim(
            options,
            self.folder,
            role="kv_producer" if name in ("first", "second") else "kv_consumer",
            name=engine_id or f"{self.prefix}-{name}",
            secret=self.secret,
            nursery=self.nursery,
        )

    def restart(self, name: str, engine_id: str = "") -> Victim:
        """Start an engine that has ended again, and wait until it is ready."""
        self.begin(name, engine_id)
        self.engines[name].wait_ready()
        return self.engines[name]

    def settle(self) -> None:
        """Wait until no engine keeps a request, and every block is free that was free at the start."""
        for engine in self.engines.values():
            engine.settle()

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.kill()
        self.wire.close()
