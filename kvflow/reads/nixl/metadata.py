"""Read NIXL's metadata before NIXL does: refuse what would crash the process, and name the transports.

NIXL and UCX read a peer's metadata without checking where it ends. Of randomly changed metadata, 1 to 10 % ended the
process with SIGSEGV or SIGABRT. A digest does not help, because a malicious peer computes a matching digest. So this
module first checks each length, count and index.

The metadata has three nested formats, all little-endian and undocumented:

- NIXL's: fields of a tag, a length (u64), the bytes, and a bar;
- the address of a UCX worker, version 1, with a device for each network and in it an interface for each transport;
- UCX's key of one region, for each region.

Source: NIXL 1.5.1 ``serdes.cpp``, ``nixl_descriptors.cpp``; UCX 1.23 ``ucp/wireup/address.c``, ``ucp/core/ucp_rkey.c``.
"""

import logging
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import NamedTuple, NoReturn

from kvflow.layout.component import ADDRESS_MAX
from kvflow.reads.backend import Envelope
from kvflow.reads.contract import UNKNOWN_CARRIER, Carrier
from kvflow.reads.reach import RDMA, TRANSPORTS, WITHIN_A_HOST

_logger = logging.getLogger(__name__)

REGIONS_MAX = 20_000  # as many as fit into the largest metadata that is published

_ADDRESS_VERSION = 0  # what UCX calls version 1, in the low half of the first byte
_HAS_UUID = 2  # the only flag that the addresses of workers have, in the high half of the first byte

_INTERFACES_MAX = 128  # as many as UCX has room for
_DEVICE_INDEX_MAX = 1023
_MEMORY_TYPE_MAX = 8  # an index into UCX's tables

_LAST, _SECOND, _THIRD = 0x80, 0x40, 0x20
"""Flags above a length: the last of its kind; then, of an interface, endpoints follow; of a device, a number of paths
follows, and the device of the system."""

_NO_SYSTEM_DEVICE = 0xFF  # also the end of a list of distances

_LENGTHS_MIN = {
    "self": (0, 8),
    "tcp": (6, 2),
    "sysv": (8, 8),
    "posix": (8, 8),
    "cma": (8, 4),
    "cuda_copy": (0, 8),
    "cuda_ipc": (8, 4),
}
"""Transport -> bytes that its device's address and its own have at least. UCX takes an empty one for a null pointer,
and these transports follow it. In containers they are longer."""


class Interface(NamedTuple):
    """One transport of a UCX worker, on one of its devices.

    Attributes:
        transport: UCX's name of it; ``unknown-`` and its checksum if we do not know the name.
        device: address of the device; for shared memory and GPUs it names the host; for GPUs flags may follow.
        address: of the interface; for ``cma`` and ``cuda_ipc`` the process, then the PID namespace of a container.
    """

    transport: str
    device: bytes
    address: bytes

    @property
    def flags(self) -> int:
        """What ``cuda_ipc`` can do beyond its host and namespace, if its device address has flags."""
        return self.device[_HOST_BYTES] if len(self.device) > _HOST_BYTES else 0


class Exported(NamedTuple):
    """What an exporter's metadata says. ``on_device``: whether some of its memory is a GPU's."""

    interfaces: tuple[Interface, ...]
    on_device: bool

    @property
    def has_network(self) -> bool:
        """Whether it may be read from over a network card."""
        return any(each.transport not in WITHIN_A_HOST for each in self.interfaces)


def inspect(blob: bytes, agent: str) -> Exported:
    """Check that NIXL can read the metadata of an exporter of this name, and return its contents.

    Raises:
        ValueError: says what is wrong. NIXL must not read this metadata.
    """
    cursor = _Cursor(blob, "metadata")
    cursor.require(cursor.take(11) == b"nixlSerDes|", "it is not NIXL's")
    cursor.require(cursor.field(b"Agent") == agent.encode(), f"it is not that of {agent!r}")
    cursor.require(cursor.number(b"Conns") == 1, "it has not one connection")
    cursor.require(cursor.field(b"t") == b"UCX", "its connection is not one of UCX")
    interfaces = _inspect_address(_Cursor(cursor.field(b"c"), "UCX address"))
    cursor.require(cursor.field(b"") == b"MemSection", "it has no memory")
    kinds: set[int] = set()
    for _ in range(cursor.number(b"nixlSecElms")):
        cursor.require(cursor.field(b"bknd") == b"UCX", "its memory is not registered with UCX")
        cursor.require(cursor.field(b"nixlDList") == b"nixlSDList", "its memory is not a list of regions")
        kind = cursor.number(b"t", nbytes=4)
        cursor.require(kind in _KINDS and kind not in kinds, f"memory of kind {kind}")
        kinds.add(kind)
        regions = cursor.number(b"n")
        cursor.require(1 <= regions <= REGIONS_MAX, f"{regions} regions")
        for _ in range(regions):
            _inspect_region(_Cursor(cursor.field(b""), "region"))
    cursor.require(bool(kinds), "it has no memory")
    cursor.end()
    return Exported(interfaces, _VRAM in kinds)


def renamed(blob: bytes, agent: str, name: str) -> bytes:
    """Rename the agent of metadata that ``inspect`` has accepted."""
    before = b"nixlSerDes|Agent"
    new = name.encode()
    return before + len(new).to_bytes(8, "little") + new + blob[len(before) + 8 + len(agent.encode()) :]


def inspect_own(ours: Envelope, *, on_device: bool) -> Exported | None:
    """Read our own metadata; None if this NIXL writes another form than the one that we know.

    Then nobody knows what would carry the bytes, and only ``transport`` nixl reads over NIXL, without a check of what
    peers publish. ``on_device``: whether our cache is in device memory, which the metadata of a consumer does not say.
    """
    try:
        return inspect(ours.blob, ours.agent)._replace(on_device=on_device)
    except ValueError as error:
        said = (
            "NIXL writes metadata in an unknown form, so that transport auto reads over TCP, and transport nixl gives"
        )
        _logger.warning("%s it the metadata of peers unread; install NIXL 1.5: %s", said, error)
        return None


_DRAM, _VRAM = _KINDS = (0, 1)  # as NIXL numbers them


def carrier_between(ours: Exported, theirs: Exported, may_copy_from: Callable[[int], bool]) -> Carrier | None:
    """Return what carries the bytes of a read; None if the other process would have to help.

    UCX chooses when it connects, and does not tell NIXL. It can choose only what both addresses have and what reaches
    the other side. If all of these need the other process to read remote memory, UCX has it send the bytes.
    ``may_copy_from``: whether the kernel lets us copy the memory of the process with this number.
    """
    names = {each.transport for each in ours.interfaces} & {each.transport for each in theirs.interfaces}
    found, unknown = names & RDMA, {name for name in names if name.startswith(_UNKNOWN)}
    if unknown and not found:
        return UNKNOWN_CARRIER  # a transport that we cannot name may be the one that is chosen
    near = any(may_copy_from(pid) for pid in _reached(ours, theirs))
    if ours.on_device and theirs.on_device and (near or found) and _maps(ours, theirs):
        found |= {"cuda_ipc"}  # and one of the others reads the epochs
    if near and not ours.on_device and not theirs.on_device:
        found |= {"cma"}
    if not found:
        return None
    candidates = sorted(found) + ["unknown"] * bool(unknown)
    return Carrier("|".join(candidates), "addresses" if len(candidates) == 1 else "candidates")


def is_within_a_host(ours: Exported, theirs: Exported, may_copy_from: Callable[[int], bool]) -> bool:
    """Return whether both are on this host: our kernel knows the peer's process, or their GPUs have one host."""
    hosts = (
        {here.device[:_HOST_BYTES], there.device[:_HOST_BYTES]} for here, there in _pairs(ours, theirs, "cuda_ipc")
    )
    return any(map(may_copy_from, _reached(ours, theirs))) or any(len(each) == 1 for each in hosts)


def _pairs(ours: Exported, theirs: Exported, transport: str) -> Iterator[tuple[Interface, Interface]]:
    here, there = ([each for each in side.interfaces if each.transport == transport] for side in (ours, theirs))
    return product(here, there)


def _reached(ours: Exported, theirs: Exported) -> set[int]:
    """Return the processes that the peer's ``cma`` names, and that are on our host and in our PID namespace."""
    return {
        int.from_bytes(there.address[:_PID_BYTES], "little") & _PID_MAX
        for here, there in _pairs(ours, theirs, "cma")
        if (here.device, here.address[_PID_BYTES:]) == (there.device, there.address[_PID_BYTES:])
    }


def _maps(ours: Exported, theirs: Exported) -> bool:
    """Return whether our GPU can map the peer's memory, as UCX decides it: by host, PID namespace, and flags."""
    for here, there in _pairs(ours, theirs, "cuda_ipc"):
        flags = here.flags & there.flags
        on_one_host = here.device[:_HOST_BYTES] == there.device[:_HOST_BYTES]
        in_one_namespace = here.address[_PID_BYTES:] == there.address[_PID_BYTES:]
        if (on_one_host or flags & _BETWEEN_HOSTS) and (in_one_namespace or flags & _BETWEEN_NAMESPACES):
            return True
    return False


def difference(ours: Mapping[str, str], theirs: Mapping[str, str] | None) -> str:
    """Return the first setting that differs but must be equal on both sides; empty if there is none."""
    if theirs is None:
        return "the peer does not say how its NIXL is set up; run the same kvflow release on both sides"
    for name in sorted({*ours, *theirs}):
        here, there = (repr(side[name]) if name in side else "not set" for side in (ours, theirs))
        if here != there:
            remedy = "install the same release" if name == "NIXL" else "set the same value"
            return f"{name} is {here} here and {there} at the peer; {remedy} on both sides"
    return ""


_PID_BYTES = 4  # of the addresses of ``cma`` and ``cuda_ipc``; in a container the PID namespace follows
_PID_MAX = 2**31 - 1  # the bit above says that a PID namespace follows

_HOST_BYTES = 8  # of a device address of ``cuda_ipc``; then a byte of flags, if one is set
_BETWEEN_HOSTS, _BETWEEN_NAMESPACES = 1, 2  # MNNVL, FABRIC handles

_UNKNOWN = "unknown-"


class _Cursor:
    """A position in bytes that never passes their end. Errors have the ``name`` of the bytes."""

    def __init__(self, data: bytes, name: str) -> None:
        self._data = data
        self._name = name
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def refuse(self, complaint: str) -> NoReturn:
        raise ValueError(f"invalid {self._name}: {complaint}")

    def require(self, condition: bool, complaint: str) -> None:
        """Refuse unless the condition holds. Checks of each region call ``refuse``, which formats no unused message."""
        if not condition:
            self.refuse(complaint)

    def take(self, nbytes: int) -> bytes:
        end = self._at + nbytes
        if end > len(self._data):
            self.refuse(f"{nbytes} bytes where {self.left} are left")
        taken = self._data[self._at : end]
        self._at = end
        return taken

    def unsigned(self, nbytes: int) -> int:
        return int.from_bytes(self.take(nbytes), "little")

    def field(self, tag: bytes) -> bytes:
        """Return the value of the next of NIXL's fields."""
        known = self.take(len(tag)) == tag
        value = self.take(self.unsigned(8)) if known else b""
        if not known or self.take(1) != b"|":
            self.refuse(f"no field {tag.decode()!r}")
        return value

    def number(self, tag: bytes, *, nbytes: int = 8) -> int:
        """Return the value of the next of NIXL's fields, which is a number of ``nbytes``."""
        value = self.field(tag)
        self.require(len(value) == nbytes, f"{len(value)} bytes for the number {tag.decode()!r}")
        return int.from_bytes(value, "little")

    def end(self) -> None:
        self.require(self.left == 0, f"{self.left} bytes too many")


def _inspect_address(cursor: _Cursor) -> tuple[Interface, ...]:
    """Go through the address of a UCX worker as UCX does, and return its interfaces."""
    header = cursor.unsigned(1)
    cursor.require(header == _HAS_UUID << 4 | _ADDRESS_VERSION, f"header {header:#x}")
    cursor.take(8)
    interfaces: list[Interface] = []
    while True:
        domain, flags = cursor.unsigned(1), cursor.unsigned(1)
        if domain & _LAST:  # an empty device, which only the end has: it tells UCX's release
            cursor.require(flags == _LAST, f"a device without interfaces, and flags {flags:#x}")
            cursor.end()
            return tuple(interfaces)
        cursor.require(not flags & _LAST, "an end without a release")
        cursor.require(domain < 64, f"memory domain {domain}")
        cursor.take(bool(flags & _SECOND) + bool(flags & _THIRD))
        device = cursor.take(flags & (_THIRD - 1))
        last = False
        while not last:
            interface, last = _inspect_interface(cursor, device)
            interfaces.append(interface)
            cursor.require(len(interfaces) <= _INTERFACES_MAX, "too many interfaces")


def _inspect_interface(cursor: _Cursor, device: bytes) -> tuple[Interface, bool]:
    """Go through one interface of a device, and return it; True if it is the last one there."""
    checksum = cursor.unsigned(2)
    figures = struct.unpack("<fff", cursor.take(12))  # overhead, bandwidth, latency
    cursor.require(all(math.isfinite(each) for each in figures), f"figures {figures}")
    cursor.take(4)
    flags = cursor.unsigned(1)
    cursor.require(not flags & _SECOND, "endpoints of an interface")
    address = cursor.take(flags & (_SECOND - 1))
    name = _NAMES_BY_CHECKSUM.get(checksum, f"{_UNKNOWN}{checksum:04x}")
    device_min, length_min = _LENGTHS_MIN.get(name, (0, 0))
    short = len(device) < device_min or len(address) < length_min
    cursor.require(not short, f"addresses of {len(device)} and {len(address)} bytes")
    return Interface(name, device, address), bool(flags & _LAST)


def _inspect_region(cursor: _Cursor) -> None:
    """Go through one region and its key, whose end UCX is not told."""
    address, nbytes, device, domains, memory_type = _REGION.unpack(cursor.take(_REGION.size))
    if not 0 < nbytes <= ADDRESS_MAX - address:
        cursor.refuse(f"{nbytes} bytes at {address:#x}")
    if device > _DEVICE_INDEX_MAX or memory_type > _MEMORY_TYPE_MAX:
        cursor.refuse(f"device {device}, memory of type {memory_type}")
    for _ in range(domains.bit_count()):
        cursor.take(cursor.unsigned(1))
    if domains and cursor.unsigned(1) != _NO_SYSTEM_DEVICE:
        while cursor.unsigned(1) != _NO_SYSTEM_DEVICE:
            cursor.take(2)  # latency and bandwidth to that device
    cursor.end()


_REGION = struct.Struct("<QQQQB")
"""Address, length, device; then the key: a bit for each memory domain, and the type of memory."""


def _checksum(name: str) -> int:
    """Return what stands for a transport's name in an address: CRC-16/X-25."""
    remainder = 0xFFFF
    for byte in name.encode():
        remainder ^= byte
        for _ in range(8):
            remainder = remainder >> 1 ^ (0x8408 if remainder & 1 else 0)
    return remainder ^ 0xFFFF


_NAMES_BY_CHECKSUM = {_checksum(name): name for name in TRANSPORTS}
