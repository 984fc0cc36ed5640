"""The worker of a rank, from the registration of its cache to the end of the engine."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvflow import WorkerConfig, run_worker
from kvflow.integrations.vllm.admission import reachable
from kvflow.integrations.vllm.engine import LOAD_WAIT, LoadWait
from kvflow.integrations.vllm.messages import Admit, Command
from kvflow.integrations.vllm.worker import Passed, RankWorker

if TYPE_CHECKING:
    from kvflow import KVCache  # loads torch

logger = logging.getLogger("vllm.kvflow")  # vLLM shows the records of loggers below its own name


class RankRuntime:
    """Owns the worker of a rank, from the registration of its cache to the end of the engine. Thread: the engine's.

    Attributes:
        rank: executes commands.
        contact: channel over which the scheduler's side reaches the rank between steps.
    """

    def __init__(
        self,
        config: WorkerConfig,
        cache: "KVCache",
        *,
        apart: bool = False,
        mark: Callable[[], Passed] | None = None,
        load_wait: LoadWait = LOAD_WAIT,
    ) -> None:
        """Open the worker.

        Args:
            config: of the worker.
            cache: of the rank.
            apart: whether the scheduler's side may be in another process.
            mark: see ``RankWorker``.
            load_wait: see ``RankWorker``.

        Raises:
            ConfigInvalid, SpecInvalid, TransportUnavailable: see ``kvflow.open_worker``.
        """
        self._stack = ExitStack()
        self._cache = cache
        self._worker = self._stack.enter_context(run_worker(config, cache))
        self._asleep = False
        self._on_device = mark is not None
        self.rank = RankWorker(self._worker, mark, load_wait)
        self.contact = self._stack.enter_context(reachable(self.rank, apart=apart))

    def divide(self, commands: Sequence[Command]) -> tuple[Sequence[Command], Sequence[Command]]:
        """Return the commands to execute before the model runs, and those for after its launch on a device."""
        if not self._on_device:
            return commands, ()
        return [each for each in commands if isinstance(each, Admit)], [
            each for each in commands if not isinstance(each, Admit)
        ]

    def suspend(self) -> None:
        """Revoke every lease, cancel every pull, and deregister the memory until ``resume``."""
        self._asleep = True
        self.rank.suspend()

    def resume(self) -> None:
        """Serve the cache again if it was suspended. Its memory must have its old address.

        Raises:
            ConfigInvalid, TransportUnavailable: see ``kvflow.open_worker``; it stays suspended.
        """
        if self._asleep:
            self._worker.resume(self._cache)
            self._asleep = False
            logger.info("kvflow: the engine is awake; this rank is at %s", self.rank.address.endpoint)

    def close(self) -> None:
        """Revoke every lease, cancel every pull, and deregister the memory."""
        self.rank.stop()
        self._stack.close()
