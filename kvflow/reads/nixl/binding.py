"""Load NIXL. No other module imports it.

This module uses the compiled binding, not NIXL's Python classes. Those spin their progress thread at 100 % of a core
(they fix its delay at 0) and log to standard output. The binding lets us choose both.
"""

import ctypes
import errno
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType

import numpy as np
import numpy.typing as npt

from kvflow.config import engine_settings
from kvflow.errors import FailureCode, TransportUnavailable
from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError
from kvflow.reads.reach import named

_logger = logging.getLogger(__name__)

_PROGRESS_DELAY_US = 50_000
"""How long the progress thread sleeps when no socket wakes it: 0.2 % of a core instead of 100 %."""

_ENGINE_CONFIG = {
    # Over TCP, UCX emulates remote reads with messages from the exporter's process, and aborts that process where such
    # a message meets a connection that is gone.
    "TLS": "^tcp",
    # Without TCP, UCX sends the few messages that it needs through shared memory. It does so only if it may watch over
    # the other process: an exporter that may not crashes when a reader asks for that.
    "MM_ERROR_HANDLING": "y",
    # Without NVLink, UCX would have the exporter's process send what a GPU holds.
    "CUDA_IPC_ENABLE_GET_ZCOPY": "y",
}
"""Settings of UCX for our agents only. NIXL splits them at commas. Users' parameters take precedence, and environment
variables take precedence over both."""

_ASLEEP_CONFIG = {"RCACHE_ENABLE": "n"}
"""The same for a cache whose memory is freed while its worker lives: UCX must not take an earlier registration."""

_MUST_AGREE = ("UCX_UNIFIED_MODE", "UCX_PROTO_ENABLE", "UCX_ADDRESS_VERSION")
"""Variables that change the form of addresses or messages."""

_SIZES_MUST_AGREE = ("_FIFO_SIZE", "_FIFO_ELEM_SIZE", "_SEG_SIZE", "_ERROR_HANDLING")
"""Suffixes of variables whose value each side uses for the other's queues and buffers, too."""

_PUBLISHED_MAX, _PUBLISHED_CHARACTERS = 32, 64

_ANY_BACKEND: list[int] = []

QUIET, DEVICE = "FATAL", "WARN"
"""Log levels of NIXL for a cache in host memory and on a device. We report every error as an event. But only a warning
says that UCX was built without CUDA, or takes device memory for host memory; reads are then slow or fail."""

MOVING = {
    "nixlRemoteDisconnectError": FailureCode.PEER_LOST,
    # NIXL forgets a peer at its first endpoint error; it then finds nothing else of the peer.
    "nixlNotFoundError": FailureCode.PEER_LOST,
}
ADDING = {
    "nixlRemoteDisconnectError": FailureCode.PEER_LOST,
    "nixlBackendError": FailureCode.PEER_LOST,  # connecting to a process that is gone
    "nixlInvalidParamError": FailureCode.METADATA_INVALID,
    "nixlMismatchError": FailureCode.METADATA_INVALID,
    "nixlNotFoundError": FailureCode.METADATA_INVALID,
}
PREPARING = {
    "nixlNotFoundError": FailureCode.BOUNDS,  # not within what the peer registered
    "nixlInvalidParamError": FailureCode.BOUNDS,
}
"""Name of NIXL's exception -> our code. Every other exception is a ``transport_error``."""

SAME_NIXL = (
    "Install NIXL 1.5 on both sides, with equal settings. transport nixl also reads over transports that kvflow does "
    "not know."
)
UCX_TELLS = "UCX_LOG_LEVEL=info shows what UCX finds on this host."
RESTART = f"Let UCX reach the peer, then restart this worker or the peer. {UCX_TELLS}"
REMEDIES = {
    "NIXL_PLUGIN_DIR": "Unset NIXL_PLUGIN_DIR, or set it to a folder that has libplugin_UCX.so.",
    "UCX_TLS": "Unset UCX_TLS, or add tcp to it, and cuda on a host with GPUs.",
}
"""Variable with which NIXL may fail to start -> what to do about it."""

DEVICE_REMEDY = (
    "Check that the NIXL variant named above was built for this GPU's CUDA or ROCm; that UCX_TLS, if set, allows cuda "
    "or rocm; that the kernel lets a network card reach GPU memory (nvidia-peermem or dmabuf); and that `ulimit -l` is "
    f"unlimited. {UCX_TELLS}"
)

_creating = threading.Lock()  # held while an agent is created, because that changes environment variables temporarily


def load_binding(log_level: str = QUIET) -> ModuleType:
    """Import the binding of an installed NIXL, quietly. Raises ``TransportUnavailable`` if there is none.

    A process can load one CUDA variant: one that is loaded already wins; then that of torch's CUDA, if torch is there.
    NIXL reads ``log_level`` once for a process, unless the environment has one.
    """
    # UCX writes its log to standard output, which belongs to the process that embeds us.
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    os.environ.setdefault("NIXL_LOG_LEVEL", log_level)
    variants = ["nixl_cu13", "nixl_cu12", "nixl"]
    cuda = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if cuda is not None and cuda.startswith("12."):
        variants = ["nixl_cu12", "nixl_cu13", "nixl"]
    if getattr(getattr(sys.modules.get("torch"), "version", None), "hip", None) is not None:
        variants = ["nixl_rocm", "nixl"]
    loaded = [variant for variant in variants if f"{variant}._bindings" in sys.modules]
    failures: list[str] = []
    for variant in loaded or variants:
        try:
            return importlib.import_module(f"{variant}._bindings")
        except ImportError as error:
            failures.append(str(error))
    raise TransportUnavailable(f"NIXL cannot be imported: {'; '.join(failures)}")


def error_types(binding: ModuleType) -> tuple[type[Exception], ...]:
    """Return the exceptions that NIXL raises. They have no common base. An exception of C++ becomes a RuntimeError."""
    found = [value for name, value in vars(binding).items() if name.startswith("nixl") and name.endswith("Error")]
    return (*found, RuntimeError)


def failure_of(codes: Mapping[str, FailureCode], error: Exception) -> BackendError:
    """Return what an exception of NIXL means, by a table of codes."""
    return BackendError(codes.get(type(error).__name__, FailureCode.TRANSPORT_ERROR), words_of(error))


def words_of(error: Exception) -> str:
    """Return the name and the text of an exception."""
    return f"{type(error).__name__}: {error}"


def backend_parameters(given: Mapping[str, str], *, connects: bool, sleeps: bool = False) -> dict[str, str]:
    """Return the parameters of the UCX backend: ours, and ``WorkerConfig.nixl_backend_params``, which win."""
    engine = {**_ENGINE_CONFIG, **(_ASLEEP_CONFIG if sleeps else {}), **engine_settings(given)}
    return {
        **given,
        "engine_config": ",".join(f"{name}={value}" for name, value in engine.items()),
        "ucx_error_handling_mode": "peer" if connects else "none",
    }


def published_settings(binding: ModuleType, environment: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Return what must be equal on both sides of a pair: the release of NIXL, and settings of UCX.

    Variables of the environment win over ``given``, which is ``WorkerConfig.nixl_backend_params``.
    """
    environment = {**{f"UCX_{name}": value for name, value in engine_settings(given).items()}, **environment}
    found = {
        name: environment[name][:_PUBLISHED_CHARACTERS]
        for name in sorted(environment)
        if name in _MUST_AGREE
        or (name.startswith("UCX_") and not name.startswith("UCX_TCP_") and name.endswith(_SIZES_MUST_AGREE))
    }
    bounded = {name: value for name, value in found.items() if len(name) <= _PUBLISHED_CHARACTERS}
    from importlib import metadata  # noqa: PLC0415 - loads a parser of messages, and only readers over NIXL need it

    try:
        release = metadata.version(binding.__name__.partition(".")[0])
    except metadata.PackageNotFoundError:  # built from its sources; what it writes is read before it is used
        release = ""
    # Its metadata has no version.
    return {"NIXL": ".".join(release.split(".")[:2]), **dict(list(bounded.items())[: _PUBLISHED_MAX - 1])}


def without(transports: str, refused: Sequence[str]) -> str:
    """Return a value of ``UCX_TLS`` without some transports. Without TCP, UCX's own messages take shared memory."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^"):
        return ",".join([transports, *refused])
    if "all" in names:
        return "^" + ",".join(refused)
    if "cuda_ipc" in refused:
        names = [part for name in names for part in (named(name) if name == "cuda" else (name,))]
    plain = [name.lstrip("\\").partition(":")[0] for name in names]
    kept = [name for name, known_as in zip(names, plain, strict=True) if known_as not in refused]
    return ",".join([*kept, "posix"] if "tcp" in plain else kept)


def may_copy_from(pid: int) -> bool:
    """Return whether the kernel may let us copy a process's memory, as UCX's ``cma`` does. True if it is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    nowhere = (ctypes.c_size_t * 2)(0, 1)  # a vector of one byte at address 0: the kernel asks for permission first
    outcome = libc.process_vm_readv(ctypes.c_int(pid), nowhere, 1, nowhere, 1, 0)
    return outcome >= 0 or ctypes.get_errno() != errno.EPERM


@contextmanager
def _taken_out(refused: Sequence[str]) -> Iterator[None]:
    """Remove transports from the operator's ``UCX_TLS`` temporarily. NIXL prefers this variable to our setting."""
    with _creating:
        transports = os.environ.get("UCX_TLS")
        if transports is None and len(refused) == 1:  # NIXL cuts what we ask for at each comma, so that it names one
            yield
            return
        os.environ["UCX_TLS"] = without("all" if transports is None else transports, refused)
        try:
            yield
        finally:
            if transports is None:
                del os.environ["UCX_TLS"]
            else:
                os.environ["UCX_TLS"] = transports


class Agent:
    """One NIXL agent with the UCX backend and without TCP, which only reads.

    Calls raise the exceptions of ``error_types``. Handles and lists are ints, and must be released. Calls may come from
    several threads, but only one at a time: without a progress thread, two calls at a time crash the process.

    Args:
        binding: from ``load_binding``.
        name: unique per incarnation.
        progress: whether a progress thread serves peers while nothing calls the agent.
        connects: whether UCX exchanges messages with the peers that it reads from, which network cards need. An
            exporter connects to no peer, but needs True to start where a reader may connect to it.
        params: ``WorkerConfig.nixl_backend_params``.
        delay_us: how long the progress thread sleeps when nothing wakes it.
        sleeps: whether memory that it registers is freed and comes again while processes of peers live. It then does
            without ``cuda_ipc``, with which a reader maps the memory, and the GPU keeps what is mapped.
    """

    def __init__(
        self,
        binding: ModuleType,
        name: str,
        *,
        progress: bool,
        connects: bool = True,
        params: Mapping[str, str] | None = None,
        delay_us: int = _PROGRESS_DELAY_US,
        sleeps: bool = False,
    ) -> None:
        config = binding.nixlAgentConfig()
        config.useProgThread = progress
        config.useListenThread = False
        config.pthrDelay = delay_us
        config.syncMode = binding.NIXL_THREAD_SYNC_NONE
        self._binding = binding
        self._name = name
        self._agent = binding.nixlAgent(name, config)
        with _taken_out(("tcp", "cuda_ipc") if sleeps else ("tcp",)):
            self._agent.createBackend("UCX", backend_parameters(params or {}, connects=connects, sleeps=sleeps))
        self._memories = {"DRAM": binding.DRAM_SEG, "VRAM": binding.VRAM_SEG}
        # Looked up once: a small read takes 10 us.
        self._read, self._done = binding.NIXL_READ, binding.NIXL_SUCCESS
        self._make, self._post = self._agent.makeXferReq, self._agent.postXferReq
        self.release: Callable[[int], object] = self._agent.releaseXferReq

    def register(self, regions: Sequence[Region]) -> None:
        """Register memory, in one call per kind: a thousand single calls take 29 ms, one takes 4."""
        started = time.perf_counter()
        for memory, kind in self._memories.items():
            rows = [(region.address, region.nbytes, region.device, "") for region in regions if region.memory == memory]
            if rows:
                self._agent.registerMem(self._binding.nixlRegDList(kind, rows), [])
        took, mib = time.perf_counter() - started, sum(region.nbytes for region in regions) / (1 << 20)
        _logger.info("kvflow.reads: NIXL registered %.1f MiB in %.3f s as %s", mib, took, self._name)

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
        handle: int = self._make(self._read, local, local_index, remote, remote_index, "", _ANY_BACKEND, False)
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
