"""Examine this host without starting anything: what is installed, limits, and what the kernel offers."""

import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import NAME
from kvflow.integrations.vllm.versions import check_release, installed_release
from kvflow.reads.reach import ROOT, network_cards, pid_namespace
from kvflow.tools.doctor.codes import Finding, failure, found, note, ok
from kvflow.version import __version__

TESTED_PYTHON = (3, 11)

PACKAGES = {
    "pyzmq": ("26", "27.3.0"),
    "msgspec": ("0.19", "0.22.0"),
    "numpy": ("1.26", "2.4.6"),
    "torch": ("2.5", "2.13.0"),
    "uvloop": ("0.20", "0.23.0"),
    "structlog": ("24.1", "26.1.0"),
    "nixl": ("1.5", "1.5.1"),
}
"""Package that kvflow needs -> the oldest release, and the one that is tested."""

_REMEDY_OF_UNTESTED = "Look at docs/reference/compatibility.md. If something fails, install the release that is tested."

VARIANTS = ("nixl-cu13", "nixl-cu12", "nixl-rocm", "nixl")
"""Distributions of NIXL. The last one has no library: it depends on one of the others."""

PLUGINS = "vllm.general_plugins"

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def examine_software(*, on_gpu: bool) -> Iterator[Finding]:
    """Yield findings about the software.

    Args:
        on_gpu: whether caches of this host may lie on a GPU.
    """
    release = platform.python_version()
    evidence = f"{release}, {sys.executable}"
    is_tested = sys.version_info[:2] == TESTED_PYTHON
    yield ok("Python", evidence) if is_tested else note("Python", evidence, remedy=_REMEDY_OF_UNTESTED)
    yield ok("kvflow", f"{__version__}, {Path(__file__).parents[1]}")
    for name, (least, tested) in PACKAGES.items():
        if name != "nixl":  # its variants have other names
            yield check_package(name, least, tested)
    yield _curve()
    yield _nixl()
    yield from _vllm()
    yield from _allocator(on_gpu=on_gpu)


def check_package(name: str, least: str, tested: str) -> Finding:
    """Compare the installed release of a package with the releases that kvflow runs with."""
    release = _release(name)
    if not release:
        return found("package_missing", name, f"not installed; kvflow needs {least} or later")
    if _numbers(release) < _numbers(least):
        remedy = f"Install {name} {least} or later."
        return found("release_unsupported", name, f"{release}; kvflow needs {least} or later", remedy=remedy)
    if _numbers(release)[:2] != _numbers(tested)[:2]:
        return note(name, f"{release}; tests run with {tested}", remedy=_REMEDY_OF_UNTESTED)
    return ok(name, release)


def _curve() -> Finding:
    try:
        from kvflow.rendezvous.issuer import draw_pair  # noqa: PLC0415 - ZeroMQ may be missing

        draw_pair()
    except ImportError as error:
        return found("package_missing", "ZeroMQ", f"it cannot be imported: {error}")
    except Exception as error:  # noqa: BLE001 - ZeroMQ's errors have no name here
        return found("curve_missing", "ZeroMQ", f"it draws no keys: {error}")
    return ok("ZeroMQ", "encrypts with CURVE")


def _nixl() -> Finding:
    installed = {name: release for name in VARIANTS if (release := _release(name))}
    modules = [name for name in ("nixl_cu13", "nixl_cu12", "nixl_rocm", "nixl") if _is_there(name)]
    shown = ", ".join(f"{name} {release}" for name, release in installed.items())
    if not modules:
        return found("nixl_missing", "NIXL", f"installed: {shown or 'nothing'}; no module of NIXL is found")
    if modules == ["nixl"] and list(installed) == ["nixl"]:
        return found("nixl_missing", "NIXL", f"{shown} is installed without the variant that has its library")
    least, tested = PACKAGES["nixl"]
    judged = [check_package(name, least, tested) for name in installed]
    wrong = [each for each in judged if each.status != "ok"]
    if wrong:
        return replace(wrong[0], subject="NIXL", evidence=f"{wrong[0].subject} {wrong[0].evidence}")
    return ok("NIXL", shown or f"module {modules[0]}, not installed by pip")


def _vllm() -> Iterator[Finding]:
    release = installed_release()
    if not release:
        return
    try:
        check_release(release)
    except ConfigInvalid as error:
        yield failure(error, "vLLM")
        return
    plugins = importlib.metadata.entry_points(group=PLUGINS)
    if not any(each.value.startswith("kvflow.") for each in plugins):
        yield found("vllm_plugin_missing", "vLLM", f"{release}; no entry point of kvflow in the group {PLUGINS}")
        return
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "kvflow" not in allowed.split(","):
        remedy = "Add kvflow to VLLM_PLUGINS, or unset it."
        evidence = f"{release}; VLLM_PLUGINS is {allowed!r}, which leaves kvflow out"
        yield found("vllm_plugin_missing", "vLLM", evidence, remedy=remedy)
        return
    yield ok("vLLM", f"{release}, with {NAME}")


def _allocator(*, on_gpu: bool) -> Iterator[Finding]:
    for name in ALLOCATOR_VARIABLES:
        value = os.environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE):
            yield found("expandable_segments", name, repr(value), status="failed" if on_gpu else "warning")


def _release(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _numbers(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release, such as ``2.13.0+cpu``."""
    found_here = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(each) for each in found_here[0].split(".")) if found_here else ()


MEMLOCK_MIN = 1 << 30
"""Registered memory is locked, and a cache has gigabytes. Containers have 64 KiB or 8 MiB unless told otherwise."""

OPEN_FILES_MIN = 1024
"""Each peer takes some files. An engine of a few dozen peers runs with this."""

SHARED_MEMORY_MIN = 256 << 20
"""Containers have 64 MiB unless told otherwise, which the processes of one engine can fill."""

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives its first PID namespace this number."""

UNSYNCHRONIZED = 0x40
"""STA_UNSYNC among the flags of the clock: nothing adjusts it."""

_REMEDY_OF_NAMESPACE = "Processes in other PID namespaces cannot read this one's memory: see docs/howto/deploy.md."


def examine_machine(root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings about the host that need nothing started.

    Args:
        root: where the file systems of the kernel are looked for.
    """
    needs_pinning = bool(network_cards(root)) or has_gpu(root)
    yield _memlock(needs_pinning=needs_pinning)
    yield _open_files()
    yield _shared_memory(root / "dev/shm")
    yield _huge_pages(root)
    yield _clock()
    yield _container(root)
    yield _pid_namespace(root)
    yield _network_cards(root)
    if has_gpu(root) and network_cards(root):
        yield _peer_memory(root)


def has_gpu(root: Path = ROOT) -> bool:
    """Return whether a driver shows a GPU."""
    return any((root / "dev").glob("nvidia[0-9]*")) or (root / "dev/kfd").exists()


def _memlock(*, needs_pinning: bool) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    if soft >= MEMLOCK_MIN:
        return ok("memlock", f"{_size(soft)} may be locked")
    if needs_pinning:
        return found("memlock_low", "memlock", f"only {_size(soft)} may be locked")
    evidence = f"only {_size(soft)} may be locked; that matters with RDMA, and this host has no RDMA device and no GPU"
    return found("memlock_low", "memlock", evidence, status="note")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    evidence = f"{soft:,} may be open, and up to {hard:,} if the process asks"
    return ok("open files", evidence) if soft >= OPEN_FILES_MIN else found("open_files_low", "open files", evidence)


def _shared_memory(path: Path) -> Finding:
    try:
        told = os.statvfs(path)
    except OSError as error:
        return found("shared_memory_small", "shared memory", f"{path}: {error.strerror}")
    size, free = told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail
    evidence = f"{path} has {_size(size)}, {_size(free)} of it free"
    if size >= SHARED_MEMORY_MIN:
        return ok("shared memory", evidence)
    return found("shared_memory_small", "shared memory", evidence)


def _huge_pages(root: Path) -> Finding:
    setting = re.search(r"\[(\w+)\]", _text(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    if setting is None:
        return note("huge pages", "the kernel has no transparent huge pages")
    gets = "gets no huge pages, and reads over shared memory are slower" if setting[1] == "never" else "gets huge pages"
    return note("huge pages", f"transparent_hugepage is {setting[1]}: a cache in host memory {gets}")


class _Timex(ctypes.Structure):
    """What ``adjtimex`` fills in: the first fields of the kernel's struct, and room for all others."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_char * 256),
    )


def _clock() -> Finding:
    told = _Timex()  # modes 0 changes nothing, and needs no right
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.adjtimex(ctypes.byref(told)) < 0:
        reason = os.strerror(ctypes.get_errno())
        return note("clock", f"the kernel does not say whether it is synchronized: {reason}")
    if told.status & UNSYNCHRONIZED:
        return found("clock_unsynchronized", "clock", "the kernel says that nothing synchronizes it (STA_UNSYNC)")
    return ok("clock", f"synchronized, with an error of at most {told.maxerror / 1e3:,.0f} ms")


def _container(root: Path) -> Finding:
    signs = [f"/{name}" for name in (".dockerenv", "run/.containerenv") if (root / name).exists()]
    signs += [name for name in ("KUBERNETES_SERVICE_HOST", "container") if os.environ.get(name)]
    if signs:
        return note("container", f"yes, as {' and '.join(signs)} shows")
    return ok("container", "no sign of one")


def _pid_namespace(root: Path) -> Finding:
    own = pid_namespace(root)
    if not own:
        return note("PID namespace", "the kernel does not say")
    if own == HOST_PID_NAMESPACE:
        return ok("PID namespace", f"that of the host, {own}")
    evidence = f"{own}, not that of the host: shared memory reaches only processes of this namespace"
    return note("PID namespace", evidence, remedy=_REMEDY_OF_NAMESPACE)


def _network_cards(root: Path) -> Finding:
    cards = network_cards(root)
    if not cards:
        return note("RDMA", "/sys/class/infiniband has no device")
    shown = ", ".join(f"{card} ({_state(root, card)})" for card in cards)
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    if not any(os.access(each, os.R_OK | os.W_OK) for each in verbs):
        return found("network_cards_hidden", "RDMA", f"{shown}, and no /dev/infiniband/uverbs that may be opened")
    return ok("RDMA", shown)


def _state(root: Path, card: str) -> str:
    ports = sorted((root / "sys/class/infiniband" / card / "ports").glob("*"))
    states = [_text(port / "state").partition(": ")[2] or "unknown" for port in ports]
    return ", ".join(f"port {port.name} {state}" for port, state in zip(ports, states, strict=True)) or "no port"


def _peer_memory(root: Path) -> Finding:
    modules = {line.partition(" ")[0] for line in _text(root / "proc/modules").splitlines()}
    loaded = sorted(modules & {"nvidia_peermem", "nv_peer_mem", "gdrdrv", "amdgpu"})
    is_open = "Open Kernel Module" in _text(root / "proc/driver/nvidia/version")
    if set(loaded) - {"gdrdrv"} or is_open:
        signs = [*loaded, *(["dmabuf of NVIDIA's open modules"] if is_open else [])]
        return ok("peer memory", f"by {', '.join(signs)}")
    return found("peer_memory_missing", "peer memory", "no nvidia_peermem in /proc/modules, and no open NVIDIA modules")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.4g} {name}"
    return f"{nbytes} bytes"
