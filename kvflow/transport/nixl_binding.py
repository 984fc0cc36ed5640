"""Load NIXL: the only place that imports it.

It is the compiled binding that is used, not NIXL's Python classes around it. Those spin their progress thread at
100 % of a core (they fix its delay at 0) and log to standard output; the binding leaves both to us.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvflow.errors import TransportUnavailable
from kvflow.layout.region import Region

_PROGRESS_DELAY_US = 50_000
"""How long the progress thread sleeps when no socket wakes it: 0.2 % of a core instead of 100 %, and nothing is served
later, because whatever arrives wakes it."""


def load_binding() -> ModuleType:
    """Import the binding of an installed NIXL, quietly.

    Only one of the CUDA variants can be loaded into a process, so one that is loaded already wins; then the
    one of torch's CUDA, if torch is there. The ``nixl`` package would import torch to find that out.

    Raises:
        TransportUnavailable: none can be imported.
    """
    # UCX writes its log to standard output, which belongs to the program that embeds us.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # NIXL repeats every error that we report as an event; below FATAL it would be told twice.
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    variants = ["nixl_cu13", "nixl_cu12", "nixl"]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda is not None and cuda.startswith("12."):
        variants = ["nixl_cu12", "nixl_cu13", "nixl"]
    loaded = [variant for variant in variants if f"{variant}._bindings" in sys.modules]
    failures: list[str] = []
    for variant in loaded or variants:
        try:
            return importlib.import_module(f"{variant}._bindings")
        except ImportError as error:
            failures.append(str(error))
    raise TransportUnavailable(f"NIXL cannot be imported: {'; '.join(failures)}")


def error_types(binding: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL raises. They have no common base, and what C++ throws is a RuntimeError."""
    found = [value for name, value in vars(binding).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*found, RuntimeError)


class Agent:
    """One NIXL agent with the UCX backend, which only reads.

    Calls raise the exceptions of ``error_types``. Handles and lists are ints, and must be released.

    Args:
        binding: from ``load_binding``.
        name: unique per incarnation.
        progress: True runs a progress thread, which serves peers while nobody calls the agent. False leaves all
            progress to the one thread that calls it; a second one would crash the process.
    """

    def __init__(self, binding: ModuleType, name: str, *, progress: bool) -> None:
        config = binding.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = binding.NIXL_THREAD_SYNC_NONE
        self._binding = binding
        self._agent = binding.nixlAgent(name, config)
        self._agent.createBackend("UCX", {})
        self._memories = {"DRAM": binding.DRAM_SEG, "VRAM": binding.VRAM_SEG}

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory, in one call per kind: a thousand single calls take 29 ms, one takes 4."""
        for memory, kind in self._memories.items():
            rows = [(region.address, region.nbytes, region.device, "") for region in regions if region.memory == memory]
            if rows:
                self._agent.registerMem(self._binding.nixlRegDList(kind, rows), [])

    def metadata(self) -> bytes:
        """Return what another agent must load to read from this one."""
        blob: bytes = self._agent.getLocalMD()
        return blob

    def add_remote(self, metadata: bytes) -> str:
        """Load another agent's metadata and return its name. Bytes that were altered can crash the process."""
        name: bytes = self._agent.loadRemoteMD(metadata)
        return name.decode()

    def remove_remote(self, name: str) -> None:
        """Forget another agent."""
        self._agent.invalidateRemoteMD(name)

    def prepare_local(self, rows: npt.NDArray[np.int64], memory: str) -> int:
        """Prepare strided rows of our own memory."""
        return self.prepare_remote(self._binding.NIXL_INIT_AGENT, rows, memory)

    def prepare_remote(self, name: str, rows: npt.NDArray[np.int64], memory: str) -> int:
        """Prepare strided rows of another agent's memory."""
        prepared: int = self._agent.prepXferDlist(name, self._memories[memory], rows, [])
        return prepared

    def release_list(self, prepared: int) -> None:
        """Release a prepared list. Handles made from it live on."""
        self._agent.releasedDlistH(prepared)

    def make_read(
        self, local: int, local_index: npt.NDArray[np.int32], remote: int, remote_index: npt.NDArray[np.int32]
    ) -> int:
        """Make the handle of a read, which nothing moves for yet."""
        handle: int = self._agent.makeXferReq(
            self._binding.NIXL_READ, local, local_index, remote, remote_index, "", [], False
        )
        return handle

    def post(self, handle: int) -> bool:
        """Start a read; True if all of it has arrived."""
        done: bool = self._agent.postXferReq(handle, "") == self._binding.NIXL_SUCCESS
        return done

    def poll(self, handle: int) -> bool:
        """Make progress; True if all of a posted read has arrived."""
        done: bool = self._agent.getXferStatus(handle) == self._binding.NIXL_SUCCESS
        return done

    def release(self, handle: int) -> None:
        """Release a handle. One that is in flight goes on writing."""
        self._agent.releaseXferReq(handle)

    def destroy(self) -> None:
        """Destroy the agent by dropping its only reference: nothing writes after that. It cannot be used again."""
        del self._agent
