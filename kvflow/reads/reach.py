"""Decide and explain which carrier reaches a peer's memory, from facts that both sides publish.

The addresses of UCX have the last word (``nixl.metadata.carrier_between``), because facts can promise too much: for
example RDMA between hosts whose port is down. Such a peer is read over the TCP plane, and ``unreached`` says why.
``judge_rate`` says why a carrier between two GPUs is slow.
"""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from kvflow.events import PeerMeasured, PeerSlow
from kvflow.reads.contract import Carrier, RateLearned

ROOT = Path("/")

RDMA = frozenset({"rc_verbs", "rc_mlx5", "dc_mlx5", "gga_mlx5", "srd"})
"""Transports of UCX over network cards that read remote memory without the other process."""

WITHIN_A_HOST = frozenset({"self", "sysv", "posix", "cma", "xpmem", "knem", "cuda_copy", "cuda_ipc", "gdr_copy"})

TRANSPORTS = (
    *sorted(WITHIN_A_HOST | RDMA),
    *("tcp", "ud_verbs", "ud_mlx5", "rc_gda", "rc_gdp", "rocm_ipc", "rocm_copy", "ze_ipc", "ze_copy"),
)
"""Every transport that UCX 1.23 may be built with. Over ``rc_gda`` and ``rc_gdp`` only kernels of a GPU communicate."""

_SHARED_MEMORY = ("posix", "sysv", "xpmem", "knem", "cma")
_STANDS_FOR: dict[str, tuple[str, ...]] = {
    "all": TRANSPORTS,
    "mm": _SHARED_MEMORY[:3],
    "sm": _SHARED_MEMORY,
    "shm": _SHARED_MEMORY,
    "ib": (*sorted(RDMA), "ud_verbs", "ud_mlx5", "rc_gda"),
    "rc": ("rc_mlx5", "rc_verbs"),
    "rc_x": ("rc_mlx5",),
    "rc_v": ("rc_verbs",),
    "dc": ("dc_mlx5",),
    "dc_x": ("dc_mlx5",),
    "gga": ("gga_mlx5",),
    "ud": ("ud_mlx5", "ud_verbs"),
    "ud_x": ("ud_mlx5",),
    "ud_v": ("ud_verbs",),
    "cuda": ("cuda_copy", "cuda_ipc", "gdr_copy"),
    "rocm": ("rocm_copy", "rocm_ipc"),
    "ze": ("ze_copy", "ze_ipc"),
}

PREFIXES = ("UCX_", "NIXL_")
FACT_CHARACTERS_MAX, VARIABLES_MAX, DEVICES_MAX = 256, 32, 64

_NOBODY_COPIES = "3"  # what Yama says if no process may copy another one's memory

UCX_REMEDY = "Unset UCX_TLS on both sides, or name the transport in it."
CARDS_REMEDY = "Both hosts need RDMA devices for more than TCP carries."
CONTAINERS = "See docs/howto/deploy.md."
PTRACE_REMEDY = f"Set /proc/sys/kernel/yama/ptrace_scope to 0, or give both containers SYS_PTRACE. {CONTAINERS}"

# Between two GPUs. PCIe 3 and a network card of 100 Gbit/s carry 12 GB/s, TCP through host memory 1 to 2 GB/s.
SLOW_BYTES_PER_S: Final = 2e9

_BY_TCP = "the bytes pass through host memory and TCP, because NIXL does not reach the peer's memory"
REACH_IT = (
    "On two hosts, check that both have RDMA devices that kvflow may use. On one host, check that both processes see "
    "both GPUs, and share the IPC and PID namespaces."
)
_BY_CUDA_IPC = "GPUs of one host without NVLink, whose reads UCX sends through the other process"
_ALLOW_COPIES = (
    "Check that nothing sets CUDA_IPC_ENABLE_GET_ZCOPY to n, in nixl_backend_params or as a variable of UCX, and that "
    "nvidia-smi topo -p2p r says OK."
)
_BY_NETWORK = "the network card does not reach the GPU's memory directly, or is far from it, or the pieces are small"
_REACH_DIRECTLY = (
    "Load nvidia-peermem or use a kernel with dmabuf, choose the nearest card with UCX_NET_DEVICES, and compare "
    "nbytes with descriptors in transfer.completed."
)

Fact = Annotated[str, Meta(max_length=FACT_CHARACTERS_MAX)]


class HostFacts(Struct, frozen=True, kw_only=True):
    """What decides which transports reach a process.

    Attributes:
        host: name of the host.
        boot_id: equal for all processes of one host until it starts again; empty if the kernel has none.
        pid_namespace: equal for processes that see each other's numbers.
        pid: of the process.
        ptrace_scope: who may copy a process's memory, as Yama numbers it; empty without Yama.
        network_cards: RDMA devices.
        variables: those of UCX and NIXL that are set.
        on_device: whether the cache is in memory of a device.
    """

    host: Fact
    boot_id: Fact
    pid_namespace: Fact
    pid: Annotated[int, Meta(ge=0, le=1 << 31)]
    ptrace_scope: Fact
    network_cards: Annotated[tuple[Fact, ...], Meta(max_length=DEVICES_MAX)]
    variables: Annotated[dict[Fact, Fact], Meta(max_length=VARIABLES_MAX)]
    on_device: bool = False


class Obstacle(NamedTuple):
    """Why a carrier does not reach a peer, and what to do about it."""

    text: str
    remedy: str


class Reach(NamedTuple):
    """The carrier that facts promise: ``cma``, ``cuda_ipc``, ``rdma`` or ``tcp``; and why none that is nearer."""

    carrier: str
    why: tuple[Obstacle, ...] = ()


def host_facts(*, on_device: bool = False, prefixes: tuple[str, ...] = PREFIXES, root: Path = ROOT) -> HostFacts:
    """Return the facts of this process, with variables of these prefixes. ``root``: where the kernel's files are."""
    variables = [each for each in sorted(os.environ.items()) if each[0].startswith(prefixes)]
    return HostFacts(
        host=_short(socket.gethostname()),
        boot_id=_short(_text(root / "proc/sys/kernel/random/boot_id")),
        pid_namespace=_short(pid_namespace(root)),
        pid=os.getpid(),
        ptrace_scope=_short(_text(root / "proc/sys/kernel/yama/ptrace_scope")),
        network_cards=tuple(map(_short, network_cards(root)[:DEVICES_MAX])),
        variables={_short(name): _short(value) for name, value in variables[:VARIABLES_MAX]},
        on_device=on_device,
    )


def reach(ours: HostFacts, theirs: HostFacts) -> Reach:
    """Return what should carry the bytes of a read, and what keeps nearer carriers from it. Pure."""
    sides = (("here", ours), ("there", theirs))
    far = [*_left_out(sides, RDMA, "rc")]
    far += [Obstacle(f"no RDMA device {where}", CARDS_REMEDY) for where, facts in sides if not facts.network_cards]
    if not one_host(ours, theirs):
        return Reach("tcp", tuple(far)) if far else Reach("rdma")
    near = [*_left_out(sides, frozenset({"cma"}), "cma")]
    if ours.on_device and theirs.on_device:
        near += _left_out(sides, frozenset({"cuda_ipc"}), "cuda_ipc")
    if ours.pid_namespace != theirs.pid_namespace:
        remedy = f"Put both containers into one PID namespace (--pid=host, --pid=container:NAME). {CONTAINERS}"
        text = f"the PID namespaces differ: {theirs.pid_namespace} there, {ours.pid_namespace} here"
        near.append(Obstacle(text, remedy))
    if theirs.ptrace_scope == _NOBODY_COPIES:
        near.append(Obstacle("ptrace_scope is 3: no process may copy another one's memory", PTRACE_REMEDY))
    if ours.on_device != theirs.on_device:
        remedy = "Give both caches the same kind of memory, or use hosts with RDMA devices."
        near.append(Obstacle("one cache is in memory of a device, and the other in host memory", remedy))
    if not near:
        return Reach("cuda_ipc" if ours.on_device else "cma")
    return Reach("tcp" if far else "rdma", tuple(near))


def unreached(ours: HostFacts, theirs: HostFacts | None) -> Obstacle:
    """Say why UCX could read from a peer over TCP alone. ``theirs``: None if the peer published none."""
    said = "neither shared memory nor RDMA reaches the peer's memory"
    if theirs is None:
        return Obstacle(said, "")
    carrier, why = reach(ours, theirs)
    reasons = [each.text for each in why]
    if carrier != "tcp":
        reasons.append(f"{carrier} is expected, but the addresses of UCX do not allow it; is a port down?")
    remedy = " ".join(dict.fromkeys(each.remedy for each in why)) or REACH_IT
    return Obstacle("; ".join([said, *reasons]), remedy if expects_more(ours, theirs) else "")


def expects_more(ours: HostFacts, theirs: HostFacts | None) -> bool:
    """Return whether a pair should do better than TCP: both caches are on devices, or both hosts have RDMA."""
    if theirs is None:
        return False
    return (ours.on_device and theirs.on_device) or bool(ours.network_cards and theirs.network_cards)


def judge_rate(rate: RateLearned, carrier: Carrier) -> Iterator[PeerMeasured | PeerSlow]:
    """Yield what to report of a peer's rate: a warning if a GPU reads from a GPU more slowly than PCIe or RDMA do."""
    bytes_per_s = rate.nbytes / max(rate.busy_s, 1e-9)
    gb_per_s, peer = round(bytes_per_s / 1e9, 3), str(rate.peer)
    memories = rate.source_memory, rate.target_memory
    yield PeerMeasured(peer, gb_per_s, rate.nbytes, *memories, carrier.name, carrier.plane)
    if memories == ("VRAM", "VRAM") and bytes_per_s < SLOW_BYTES_PER_S:
        by_nixl = (_BY_CUDA_IPC, _ALLOW_COPIES) if "cuda_ipc" in carrier.name else (_BY_NETWORK, _REACH_DIRECTLY)
        cause, remedy = (_BY_TCP, REACH_IT) if carrier.plane == "tcp" else by_nixl
        yield PeerSlow(peer, gb_per_s, carrier.name, carrier.plane, cause, f"{remedy} See docs/howto/gpus.md.")


def one_host(ours: HostFacts, theirs: HostFacts) -> bool:
    """Return whether both processes run on one host."""
    return bool(ours.boot_id) and ours.boot_id == theirs.boot_id


def named(name: str) -> tuple[str, ...]:
    """Return the transports that one name in ``UCX_TLS`` stands for."""
    plain = name.strip().lstrip("\\").partition(":")[0]
    return _STANDS_FOR.get(plain, (plain,))


def allows(transports: str, wanted: frozenset[str]) -> bool:
    """Return whether a value of ``UCX_TLS`` leaves at least one of some transports in."""
    names = {each for name in transports.removeprefix("^").split(",") for each in named(name)}
    return bool(wanted - names if transports.startswith("^") else wanted & names)


def network_cards(root: Path = ROOT) -> list[str]:
    """Return the RDMA devices that the kernel knows, by name."""
    return sorted(each.name for each in (root / "sys/class/infiniband").glob("*"))


def pid_namespace(root: Path = ROOT) -> str:
    """Return the PID namespace of this process; empty if the kernel does not say."""
    try:
        return str((root / "proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _left_out(sides: tuple[tuple[str, HostFacts], ...], wanted: frozenset[str], names: str) -> list[Obstacle]:
    values = [(where, facts.variables.get("UCX_TLS", "")) for where, facts in sides]
    return [
        Obstacle(f"UCX_TLS is {value!r} {where}, which leaves out {names}", UCX_REMEDY)
        for where, value in values
        if value and not allows(value, wanted)
    ]


def _short(text: str) -> str:
    return text[:FACT_CHARACTERS_MAX]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
