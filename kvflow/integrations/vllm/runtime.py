"""Owns the worker of one rank while its engine lives, awake or asleep."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvflow import WorkerConfig, run_worker
from kvflow.integrations.vllm.admission import reachable
from kvflow.integrations.vllm.engine import LOAD_WAIT, LoadWait
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Command, KeepBlocks, Ordered, Reset
from kvflow.integrations.vllm.worker import Passed, RankWorker
from kvflow.observability.logs import EventLog

if TYPE_CHECKING:
    from kvflow import KVCache  # loads torch


class RankRuntime:
    """Owns the worker of a rank, from the registration of its cache to the end of the engine. Thread: the engine's.

    The scheduler's side, which may be a process ``apart``, reaches ``rank`` between steps over ``contact``. What is
    kept can be read for ``drain_s`` after the engine has computed its last step.

    Raises:
        ConfigInvalid, SpecInvalid, TransportUnavailable: as ``kvflow.open_worker`` does.
    """

    def __init__(
        self,
        config: WorkerConfig,
        cache: "KVCache",
        *,
        apart: bool = False,
        mark: Callable[[], Passed] | None = None,
        load_wait: LoadWait = LOAD_WAIT,
        drain_s: float = 0.0,
    ) -> None:
        self._stack = ExitStack()
        self._cache = cache
        self._worker = self._stack.enter_context(run_worker(config, cache))
        self._asleep = False
        self._on_device, self._apart = mark is not None, apart
        log = EventLog(engine_id=config.engine_id, rank=config.rank)
        self.rank = RankWorker(self._worker, mark, load_wait, log)
        self.contact = self._stack.enter_context(reachable(self.rank, apart=apart))
        if drain_s:
            self._stack.callback(self._drain, drain_s)

    def divide(self, commands: Sequence[Command]) -> tuple[Sequence[Command], Sequence[Command]]:
        """Return the commands to execute before the model runs, and those for after its launch, or its end on a CPU.

        While a CPU computes, ``admission`` holds the leases of a scheduler in this process.
        """
        if not self._on_device and (self._apart or any(isinstance(each, Reset) for each in commands)):
            return commands, ()
        admissions = [each for each in commands if isinstance(each, Ordered | KeepBlocks)]
        others = [each for each in commands if not isinstance(each, Ordered | KeepBlocks)]
        return (admissions, others) if self._on_device else (others, admissions)

    def suspend(self) -> None:
        """Revoke every lease, cancel every pull, and deregister the memory until ``resume``."""
        self._asleep = True
        self.rank.suspend()

    def resume(self) -> None:
        """Serve a suspended cache again, at its old address. If ``kvflow.open_worker`` raises, it stays suspended."""
        if self._asleep:
            self._worker.resume(self._cache)
            self._asleep = False
            logger.info("kvflow: the engine is awake; this rank is at %s", self.rank.address.endpoint)

    def close(self) -> None:
        """Drain, revoke every lease, cancel every pull, and deregister the memory."""
        self.rank.stop()
        self._stack.close()

    def _drain(self, drain_s: float) -> None:
        if not self._asleep:
            self._worker.drain(drain_s).result()
