"""Examine software, limits, what the kernel offers, and addresses: our own, and those that this host dials."""

import ctypes
import errno
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from msgspec.structs import replace

from kvflow.addresses import host_and_port
from kvflow.config import WILDCARD_HOSTS, Tuning, is_loopback
from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import NAME
from kvflow.integrations.vllm.settings import is_here
from kvflow.integrations.vllm.versions import check_release, installed_release
from kvflow.reads.reach import ROOT, network_cards, pid_namespace
from kvflow.rendezvous.endpoint import files_wanted
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
    """Yield findings about the software. ``on_gpu``: whether caches of this host may lie on a GPU."""
    release = platform.python_version()
    evidence = f"{release}, {sys.executable}"
    is_tested = sys.version_info[:2] == TESTED_PYTHON
    yield ok("Python", evidence) if is_tested else note("Python", evidence, remedy=_REMEDY_OF_UNTESTED)
    yield ok("kvflow", f"{__version__}, {Path(__file__).parents[2]}")
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
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _is_there(module: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False


def _numbers(release: str) -> tuple[int, ...]:
    """Return the leading numbers of a release, such as ``2.13.0+cpu``."""
    found_here = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(each) for each in found_here[0].split(".")) if found_here else ()


MEMLOCK_MIN = 1 << 30
"""Registered memory is locked, and a cache has gigabytes. Containers have 64 KiB or 8 MiB unless told otherwise."""

SHARED_MEMORY_MIN = 256 << 20
"""Containers have 64 MiB unless told otherwise, which the processes of one engine can fill."""

HOST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel gives its first PID namespace this number."""

UNSYNCHRONIZED = 0x40
"""STA_UNSYNC among the flags of the clock: nothing adjusts it."""

_REMEDY_OF_NAMESPACE = "Processes in other PID namespaces cannot read this one's memory: see docs/howto/deploy.md."


def examine_machine(root: Path = ROOT) -> Iterator[Finding]:
    """Yield findings about the host that need nothing started. ``root``: where the file systems of the kernel are."""
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
        return ok("memlock", f"{shown_size(soft)} may be locked")
    if needs_pinning:
        return found("memlock_low", "memlock", f"only {shown_size(soft)} may be locked")
    evidence = (
        f"only {shown_size(soft)} may be locked; that matters with RDMA, and this host has no RDMA device and no GPU"
    )
    return found("memlock_low", "memlock", evidence, status="note")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    evidence = f"{soft:,} may be open, and up to {hard:,} if the process asks"
    enough = soft == resource.RLIM_INFINITY or soft >= files_wanted(Tuning().peers_max)
    return ok("open files", evidence) if enough else found("open_files_low", "open files", evidence)


def _shared_memory(path: Path) -> Finding:
    try:
        told = os.statvfs(path)
    except OSError as error:
        return found("shared_memory_small", "shared memory", f"{path}: {error.strerror}")
    size, free = told.f_frsize * told.f_blocks, told.f_frsize * told.f_bavail
    evidence = f"{path} has {shown_size(size)}, {shown_size(free)} of it free"
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
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""


def shown_size(nbytes: int) -> str:
    """Return a number of bytes in binary units, with four digits."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:,.4g} {name}"
    return f"{nbytes} bytes"


CONNECT_S = 3.0
"""A host in reach accepts or refuses within milliseconds. One that answers nothing has had two tries by then."""

GREETING_BYTES = 64
"""How long the greeting of ZeroMQ is, by RFC 37: a signature, a version, the name of a mechanism."""

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""The beginning of ours. After it the other side names its mechanism, and it has not seen yet that we name none."""

_LISTENING = "0A"


def examine_addresses(bind: str | None, advertise: str | None) -> Iterator[Finding]:
    """Yield findings about our own addresses: to listen on, and as peers reach us (``HOST:PORT``, or a host)."""
    yield _own_name()
    if bind is not None:
        yield check_bind(bind)
        if advertise is None and host_and_port(bind)[0] in WILDCARD_HOSTS:
            evidence = f"{bind} is a wildcard, which no peer can dial, and no address is advertised"
            yield found("advertise_unreachable", "advertised address", evidence)
    if advertise is not None:
        yield check_advertised(advertise)


def check_bind(address: str) -> Finding:
    """Listen on an address for a moment."""
    host, port = host_and_port(address)
    subject = f"bind {address}"
    try:
        family, *_, place = socket.getaddrinfo(
            "0.0.0.0" if host == "*" else host.strip("[]"),  # noqa: S104 - as the worker does
            port,
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            probe.bind(place)
            probe.listen()
    except (OSError, UnicodeError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            return found("port_taken", subject, f"port {port} is in use{_by_whom(port)}")
        return found("bind_impossible", subject, str(error))
    return ok(subject, "this host can listen there")


def check_advertised(address: str) -> Finding:
    """Look at an address as a peer would."""
    host, port = host_and_port(address) if ":" in address.replace("tcp://", "").rpartition("]")[2] else (address, None)
    subject = f"advertise {address}"
    if host in WILDCARD_HOSTS or port == 0:
        reason = "a wildcard" if host in WILDCARD_HOSTS else "port 0, which stands for any port"
        return found("advertise_unreachable", subject, f"this is {reason}")
    try:
        resolved = _resolved(host)
    except (OSError, UnicodeError) as error:
        return found("advertise_unreachable", subject, f"the name does not resolve here: {error}")
    shown = f"resolves to {', '.join(resolved)}"
    if all(is_loopback(each) for each in resolved):
        return found("advertise_loopback", subject, f"{shown}, reachable only from this host")
    if not any(is_here(ip_address(each)) for each in resolved):
        return found("advertise_foreign", subject, f"{shown}, which no interface of this host has")
    return ok(subject, f"{shown}, an address of this host")


def dial(endpoint: str) -> tuple[str, list[Finding]]:
    """Connect to ``tcp://HOST:PORT``, and read how what listens there greets.

    Returns:
        The address that accepted, empty if none did, and what was found on the way.
    """
    host, port = host_and_port(endpoint)
    try:
        resolved = _resolved(host)
    except (OSError, UnicodeError) as error:
        return "", [found("name_unresolved", "address", f"{host} does not resolve here: {error}")]
    failures = []
    for address in resolved:
        try:
            connection = socket.create_connection((address, port), timeout=CONNECT_S)
        except OSError as error:
            failures.append(_not_reached(f"{address} port {port}", error))
            continue
        with connection:
            own, greeted = connection.getsockname()[0], _greeting(connection)
        reached = ok("address", f"{address} port {port} accepts connections, from {own}")
        return address, [reached, *_judge(greeted)]
    return "", failures


def accepts(endpoint: str) -> str:
    """Return why ``tcp://HOST:PORT`` accepts no connection; empty if it does."""
    try:
        host, port = host_and_port(endpoint, port_min=1)
        socket.create_connection((host.strip("[]"), port), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:  # a name that no resolver would take is a ValueError
        return str(error) or type(error).__name__
    return ""


def own_address() -> str:
    """Return the address of the interface that leads out, as vLLM finds it; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("8.8.8.8", 80))
        except OSError:
            return "0.0.0.0"  # noqa: S104 - it is refused
        return str(probe.getsockname()[0])


def _resolved(host: str) -> list[str]:
    found_here = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(each[4][0]) for each in found_here))


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        resolved = _resolved(name)
    except OSError as error:
        return found("host_unresolved", f"host name {name}", str(error))
    evidence = f"resolves to {', '.join(resolved)}"
    if all(is_loopback(each) for each in resolved):
        return note(f"host name {name}", f"{evidence}, reachable only from this host: advertise an address instead")
    return ok(f"host name {name}", evidence)


def _not_reached(where: str, error: OSError) -> Finding:
    if isinstance(error, TimeoutError):
        return found("connection_timed_out", "address", f"{where} did not answer within {CONNECT_S:g} s")
    if isinstance(error, ConnectionRefusedError):
        return found("connection_refused", "address", f"{where} refuses connections")
    return found("host_unreachable", "address", f"{where}: {error.strerror or error}")


def _greeting(connection: socket.socket) -> bytes:
    """Greet as ZeroMQ does, and return the answer, or as much of it as came."""
    answer = b""
    with suppress(OSError):
        connection.settimeout(CONNECT_S)
        connection.sendall(GREETING)
        while len(answer) < GREETING_BYTES and (more := connection.recv(GREETING_BYTES - len(answer))):
            answer += more
    return answer


def _judge(greeted: bytes) -> Iterator[Finding]:
    """Yield what is wrong with a greeting, if something is."""
    if len(greeted) == GREETING_BYTES and greeted[0] == GREETING[0] and greeted[9] == GREETING[9]:
        mechanism = greeted[12:32].rstrip(b"\0").decode("ascii", "replace")
        if mechanism != "CURVE":
            yield found("no_encryption", "address", f"ZeroMQ answers with the mechanism {mechanism!r} instead of CURVE")
        return
    said = greeted[:40].decode("latin-1")
    evidence = f"it answers {said!r}, which is not ZeroMQ" if said else "it sends nothing, or hangs up"
    yield found("no_handshake", "address", evidence)


def _by_whom(port: int) -> str:
    """Return who listens on a port, as far as /proc shows it to this user."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(str(each.readlink()) in inodes for each in (process / "fd").iterdir()):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f" by process {process.name}: {command[:120]}"
    return ""
