"""Load NIXL: the only place that imports it.

It is the compiled binding that is used, not NIXL's Python classes around it. Those spin their progress thread at
100 % of a core (they fix its delay at 0) and log to standard output; the binding leaves both to us.
"""

import ctypes
import errno
import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvflow.errors import TransportUnavailable
from kvflow.layout.region import Region

_PROGRESS_DELAY_US = 50_000
"""How long the progress thread sleeps when no socket wakes it: 0.2 % of a core instead of 100 %, and nothing is served
later, because whatever arrives wakes it."""

_ENGINE_CONFIG = ",".join((
    # Over TCP, UCX emulates remote reads with messages from the exporter's process, and aborts that process where such
    # a message meets a connection that is gone.
    "TLS=^tcp",
    # Without TCP, UCX sends the few messages that it needs through shared memory. It does so only if it may watch over
    # the other process: an exporter that may not crashes when a reader asks for that.
    "MM_ERROR_HANDLING=y",
    # Without NVLink, UCX would have the exporter's process send what a GPU holds.
    "CUDA_IPC_ENABLE_GET_ZCOPY=y",
))  # fmt: skip
"""Of UCX, for our agents alone. NIXL cuts it at each comma, and each variable of the environment wins over it."""

_MUST_AGREE = ("UCX_UNIFIED_MODE", "UCX_PROTO_ENABLE", "UCX_ADDRESS_VERSION")
"""They change the form of addresses or messages."""

_SIZES_MUST_AGREE = ("_FIFO_SIZE", "_FIFO_ELEM_SIZE", "_SEG_SIZE", "_ERROR_HANDLING")
"""Ends of the names of variables, one of each for several transports: each side takes its own value for the other's
queues and buffers, too."""

_PUBLISHED_MAX, _PUBLISHED_CHARACTERS = 32, 64
"""Settings that are published, and characters of each."""

_NOBODY: list[int] = []
"""Backends that are asked for: any."""

_creating = threading.Lock()
"""Held while an agent is created, because that changes the environment for a moment."""


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


def published_settings(binding: ModuleType, environment: Mapping[str, str]) -> dict[str, str]:
    """Return what must be equal on both sides of a pair: the release of NIXL, and variables that UCX reads."""
    found = {
        name: environment[name][:_PUBLISHED_CHARACTERS]
        for name in sorted(environment)
        if name in _MUST_AGREE
        or (name.startswith("UCX_") and not name.startswith("UCX_TCP_") and name.endswith(_SIZES_MUST_AGREE))
    }
    bounded = {name: value for name, value in found.items() if len(name) <= _PUBLISHED_CHARACTERS}
    try:
        release = importlib.metadata.version(binding.__name__.partition(".")[0])
    except importlib.metadata.PackageNotFoundError:  # built from its sources; what it writes is read before it is used
        release = ""
    # Its metadata has no version of its own.
    return {"NIXL": ".".join(release.split(".")[:2]), **dict(list(bounded.items())[: _PUBLISHED_MAX - 1])}


def without_tcp(transports: str) -> str:
    """Return a value of ``UCX_TLS`` with TCP taken out. Shared memory then carries UCX's own messages."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^"):
        return f"{transports},tcp"
    if "all" in names:
        return "^tcp"
    kept = [name for name in names if name.lstrip("\\").partition(":")[0] != "tcp"]
    return ",".join(kept if len(kept) == len(names) else [*kept, "posix"])


def may_copy_from(pid: int) -> bool:
    """Tell whether the kernel may let us copy another process's memory: UCX's ``cma`` does nothing else.

    A process that is gone counts as one that may be copied from.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = (ctypes.c_size_t * 2)(0, 1)  # a vector of one byte at address 0: the kernel asks for permission first
    outcome = libc.process_vm_readv(ctypes.c_int(pid), nowhere, 1, nowhere, 1, 0)
    return outcome >= 0 or ctypes.get_errno() != errno.EPERM


@contextmanager
def _tcp_taken_out() -> Iterator[None]:
    """Take TCP out of the operator's ``UCX_TLS`` for a moment, since NIXL prefers that to what we ask for."""
    with _creating:
        transports = os.environ.get("UCX_TLS")
        if transports is None:
            yield
            return
        os.environ["UCX_TLS"] = without_tcp(transports)
        try:
            yield
        finally:
            os.environ["UCX_TLS"] = transports


class Agent:
    """One NIXL agent with the UCX backend and without TCP, which only reads.

    Calls raise the exceptions of ``error_types``. Handles and lists are ints, and must be released.

    Args:
        binding: from ``load_binding``.
        name: unique per incarnation.
        progress: True runs a progress thread, which serves peers while nobody calls the agent. False leaves all
            progress to the thread that calls it. Either way, calls may come from several threads, but only one at a
            time: NIXL takes no lock for us. UCX locks itself against the progress thread and, without one, runs as
            ``UCS_THREAD_MODE_SERIALIZED``: two calls at a time would then crash the process.
        connects: True has UCX exchange messages with the peers that it reads from, and watch over them: network cards
            need that. False reads without a word to the other process. An exporter connects to no peer; it needs True
            to start where a reader may connect to it.
    """

    def __init__(self, binding: ModuleType, name: str, *, progress: bool, connects: bool = True) -> None:
        config = binding.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = binding.NIXL_THREAD_SYNC_NONE
        self._binding = binding
        self._agent = binding.nixlAgent(name, config)
        parameters = {"engine_config": _ENGINE_CONFIG, "ucx_error_handling_mode": "peer" if connects else "none"}
        with _tcp_taken_out():
            self._agent.createBackend("UCX", parameters)
        self._memories = {"DRAM": binding.DRAM_SEG, "VRAM": binding.VRAM_SEG}
        # Looked up once: a small read takes 10 us.
        self._read, self._done = binding.NIXL_READ, binding.NIXL_SUCCESS
        self._make, self._post = self._agent.makeXferReq, self._agent.postXferReq
        self.release: Callable[[int], object] = self._agent.releaseXferReq

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
        handle: int = self._make(self._read, local, local_index, remote, remote_index, "", _NOBODY, False)
        return handle

    def post(self, handle: int) -> bool:
        """Start a read; True if all of it has arrived."""
        done: bool = self._post(handle, "") == self._done
        return done

    def poll(self, handle: int) -> bool:
        """Make progress; True if all of a posted read has arrived."""
        done: bool = self._agent.getXferStatus(handle) == self._done
        return done

    def destroy(self) -> None:
        """Destroy the agent by dropping all references to it: nothing writes after that. It cannot be used again."""
        del self._agent, self._make, self._post, self.release
