"""What NIXL publishes is read to its end; what it cannot have published is refused, whatever it is."""

import random
import re
import struct
from pathlib import Path

import pytest

from kvflow.reads.backend import Envelope
from kvflow.reads.contract import Carrier
from kvflow.reads.nixl import backend as nixl
from kvflow.reads.nixl.metadata import (
    Exported,
    Interface,
    _checksum,
    carrier_between,
    difference,
    inspect,
    is_within_a_host,
)
from tests.helpers.loops import looped

CORPUS = Path(__file__).parents[4] / "fuzz" / "corpus"
VALID = bytes.fromhex((CORPUS / "metadata-valid.txt").read_text())
AGENT = VALID[24:36].decode()
ADDRESS_AT = 81  # of the UCX address
KIND_AT = VALID.index(b"nixlSDList|t") + len(b"nixlSDList|t") + 8
KEY_AT = KIND_AT + 31 + 24  # of the first region's key


def changed(at, new):
    return VALID[:at] + new + VALID[at + len(new) :]


def test_what_nixl_has_published_is_taken():
    inspect(VALID, AGENT)


def test_no_beginning_of_it_is_taken():
    for at in range(len(VALID)):
        with pytest.raises(ValueError, match="invalid "):
            inspect(VALID[:at], AGENT)


IMPOSSIBLE = {
    "bytes after the end": (VALID + b"|", "too many"),
    "another name": (changed(24, b"x"), "is not that of"),
    "two connections": (changed(VALID.index(b"Conns") + 13, b"\2"), "one connection"),
    "a length beyond all memory": (changed(16, b"\xff" * 8), "left"),
    "a length that wraps around": (changed(VALID.index(b"|c") + 2, (2**64 - 90).to_bytes(8, "little")), "left"),
    "another version of addresses": (changed(ADDRESS_AT, b"\x22"), "header"),
    "a flag that no worker has": (changed(ADDRESS_AT, b"\x60"), "header"),
    "a bandwidth that is no number": (changed(ADDRESS_AT + 17, b"\x00\x00\xc0\x7f"), "figures"),
    "a device without an address": (changed(ADDRESS_AT + 11, b"\x47\x8b"), "addresses of 0 and 8 bytes"),
    "endpoints": (changed(ADDRESS_AT + 29, b"\xc8"), "endpoints"),
    "a kind of memory beyond the table": (changed(KIND_AT, b"\xff"), "kind 255"),
    "regions without end": (changed(KIND_AT + 4 + 2 + 8, (2**62).to_bytes(8, "little")), "regions"),
    "no regions": (changed(KIND_AT + 4 + 2 + 8, bytes(8)), "regions"),
    "a region beyond all addresses": (changed(KEY_AT - 16, b"\xff" * 8), "bytes at"),
    "a device that nobody has": (changed(KEY_AT - 8, b"\xff" * 8), "device"),
    "a type of memory beyond the table": (changed(KEY_AT + 8, b"\x09"), "type 9"),
    "a key of more domains than it has": (changed(KEY_AT, b"\xff" * 8), "left"),
    "a key without its end": (changed(KEY_AT + 10, b"\0"), "left"),
}


@looped("name", IMPOSSIBLE)
def test_what_cannot_be_is_refused(name):
    blob, why = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=why):
        inspect(blob, AGENT)


@looped("line", (CORPUS / "metadata.txt").read_text().split())
def test_what_has_crashed_nixl_is_refused(line):
    blob = bytes.fromhex(line)
    with pytest.raises(ValueError, match="invalid "):
        inspect(blob, blob[24:36].decode())


def test_bytes_from_nothing_raise_only_value_error():
    draw = random.Random(0)
    for _ in range(2000):
        at = draw.randrange(len(VALID))
        with pytest.raises(ValueError, match="invalid "):
            inspect(VALID[:at] + draw.randbytes(draw.randrange(600)), AGENT)


def test_checksums_of_transports_are_those_of_ucx():
    for name in ("self", "tcp", "sysv", "posix", "cma"):
        assert _checksum(name).to_bytes(2, "little") in VALID


def exported(*names, device=b"the host", namespace=b"", on_device=False, flags=0):
    pid = b"1234"
    interfaces = [
        Interface(
            name,
            device + (bytes([flags]) if name == "cuda_ipc" and flags else b""),
            pid + (namespace if name in ("cma", "cuda_ipc") else b""),
        )
        for name in names
    ]
    return Exported(tuple(interfaces), on_device)


HERE = exported("self", "tcp", "sysv", "posix", "cma")
CARDS = ("self", "tcp", "sysv", "posix", "cma", "rc_mlx5")
CUDA = (*CARDS[:5], "cuda_copy", "cuda_ipc")
NEW = "unknown-0001"
NEAR = [
    (HERE, HERE, Carrier("cma", "addresses")),
    (exported(*CARDS), exported(*CARDS), Carrier("cma|rc_mlx5", "candidates")),
    (exported(*CUDA, on_device=True), exported(*CUDA, on_device=True), Carrier("cuda_ipc", "addresses")),
    (exported(*CUDA), exported(*CUDA), Carrier("cma", "addresses")),
]
FAR = [
    (exported(*CARDS), exported(*CARDS, device=b"elsewher"), Carrier("rc_mlx5", "addresses")),
    (exported(*CARDS, on_device=True), exported(*CARDS), Carrier("rc_mlx5", "addresses")),
    (exported("tcp", NEW), exported("tcp", NEW), Carrier("unknown", "nothing")),
    (exported("cma", NEW, device=b"elsewher"), exported("cma", NEW), Carrier("unknown", "nothing")),
    (exported("rc_mlx5", NEW), exported("rc_mlx5", NEW), Carrier("rc_mlx5|unknown", "candidates")),
    (exported("rc_mlx5", NEW), exported("rc_mlx5", "unknown-0002"), Carrier("rc_mlx5", "addresses")),
]
MNNVL, FABRIC = 1, 2
CUDA_AND_CARDS = (*CUDA, "rc_mlx5")


def on_gpu(**place):
    return exported(*CUDA_AND_CARDS, on_device=True, **place)


ELSEWHERE = {"device": b"elsewher"}
POD = {"namespace": b"a pod of"}
BY_FLAGS = [
    ({"flags": MNNVL}, {"flags": MNNVL, **ELSEWHERE}, "cuda_ipc|rc_mlx5"),
    ({"flags": MNNVL}, {"flags": FABRIC, **ELSEWHERE}, "rc_mlx5"),
    ({}, {"flags": MNNVL, **ELSEWHERE}, "rc_mlx5"),
    ({"flags": FABRIC}, {"flags": FABRIC, **POD}, "cuda_ipc|rc_mlx5"),
    ({"flags": MNNVL}, {"flags": MNNVL, **POD}, "rc_mlx5"),
    ({"flags": MNNVL}, {"flags": MNNVL | FABRIC, **ELSEWHERE, **POD}, "rc_mlx5"),
    ({"flags": MNNVL | FABRIC}, {"flags": MNNVL | FABRIC, **ELSEWHERE, **POD}, "cuda_ipc|rc_mlx5"),
    ({"flags": FABRIC}, {}, "cuda_ipc|rc_mlx5"),  # one host and namespace need no flag
]


@looped("ours, theirs, carrier", BY_FLAGS)
def test_nvlink_between_hosts_and_pods_follows_from_flags(ours, theirs, carrier):
    near = {**theirs, **ours}.keys() <= {"flags"}  # then cma reaches the peer, too
    found = carrier_between(on_gpu(**ours), on_gpu(**theirs), lambda _: near)
    assert found == Carrier(carrier, "candidates" if "|" in carrier else "addresses")


def test_a_gpu_that_is_reached_alone_does_not_do_for_its_epochs():
    gpus = [exported("cuda_ipc", on_device=True, flags=MNNVL, device=host) for host in (b"the host", b"elsewher")]
    assert carrier_between(*gpus, lambda _: True) is None


NEVER = {
    "another host": (HERE, exported("tcp", "posix", "cma", device=b"elsewher")),
    "another PID namespace": (HERE, exported("tcp", "posix", "cma", namespace=b"9876")),
    "no cma there": (HERE, exported("tcp", "posix")),
    "no cma here": (exported("tcp", "posix"), HERE),
    "kernels of a GPU alone use the card": (exported("rc_gda"), exported("rc_gda", device=b"elsewher")),
    "another card": (exported(*CARDS), exported("tcp", "rc_verbs")),
    "a GPU's memory here alone": (exported(*CUDA, on_device=True), exported(*CUDA)),
    "a GPU's memory there alone": (exported(*CUDA), exported(*CUDA, on_device=True)),
    "GPUs of two hosts": (exported(*CUDA, on_device=True), exported(*CUDA, on_device=True, device=b"elsewher")),
    "no transport in common": (HERE, exported("dc_mlx5", device=b"elsewher")),
}


@looped("ours, theirs, carrier", [*NEAR, *FAR])
def test_what_carries_the_bytes_follows_from_what_both_have(ours, theirs, carrier):
    assert carrier_between(ours, theirs, lambda _: True) == carrier


@looped("name", NEVER)
def test_what_the_other_process_would_have_to_send_is_carried_by_nothing(name):
    assert carrier_between(*NEVER[name], lambda _: True) is None


@pytest.mark.parametrize(("ours", "theirs", "carrier"), NEAR)
def test_memory_that_the_kernel_protects_is_not_near(ours, theirs, carrier):
    asked = []
    found = carrier_between(ours, theirs, asked.append)
    assert found in (None, Carrier("rc_mlx5", "addresses"))
    assert found != carrier
    assert asked == [int.from_bytes(b"1234", "little")]


@pytest.mark.parametrize(("ours", "theirs", "carrier"), NEAR)
def test_what_is_within_a_host_needs_no_encryption(ours, theirs, carrier):
    assert is_within_a_host(ours, theirs, lambda _: True)
    gpus = any(each.transport == "cuda_ipc" for each in (*ours.interfaces, *theirs.interfaces))
    assert gpus or not is_within_a_host(ours, theirs, lambda _: False)


@looped("ours, theirs, carrier", FAR)
def test_what_is_between_hosts_needs_encryption(ours, theirs, carrier):
    assert not is_within_a_host(ours, theirs, lambda _: False)


def test_a_process_id_in_a_namespace_has_a_flag_outside_the_number():
    asked = []
    side = Exported((Interface("cma", b"a host", (7 | 1 << 31).to_bytes(4, "little") + b"namespace"),), False)
    carrier_between(side, side, asked.append)
    assert asked == [7]


def test_only_a_network_card_reaches_beyond_the_host():
    assert not exported(*CUDA[:1], *CUDA[2:]).has_network
    assert exported(*CARDS[:1], "rc_mlx5").has_network
    assert exported(NEW).has_network, "nobody knows what it is"


SETTINGS = {"NIXL": "1.5", "UCX_POSIX_FIFO_SIZE": "64"}


@looped(
    "theirs, words",
    [
        (SETTINGS, "^$"),
        ({**SETTINGS, "NIXL": "1.6"}, "^NIXL is '1.5' here and '1.6' at the peer; install the same release on both"),
        ({"NIXL": "1.5"}, "^UCX_POSIX_FIFO_SIZE is '64' here and not set at the peer; set the same value on both"),
        ({**SETTINGS, "UCX_UNIFIED_MODE": "y"}, "^UCX_UNIFIED_MODE is not set here and 'y' at the peer"),
        (None, "same kvflow release"),
    ],
)
def test_a_setting_that_differs_is_named_with_both_values(theirs, words):
    assert re.search(words, difference(SETTINGS, theirs))


def test_the_transports_of_a_worker_are_named():
    found = inspect(VALID, AGENT)
    assert {each.transport for each in found.interfaces} == {"self", "tcp", "sysv", "posix", "cma"}
    assert not found.on_device


def address_of(*interfaces):
    """Return the address of a UCX worker, as UCX 1.23 writes it: each interface on a device of its own."""
    written = bytearray(VALID[ADDRESS_AT : ADDRESS_AT + 9])
    for name, device, address in interfaces:
        written += bytes([0, len(device)]) + device
        written += _checksum(name).to_bytes(2, "little") + struct.pack("<fff", 1e-6, 1e9, 1e-6) + bytes(4)
        written += bytes([0x80 | len(address)]) + address
    return bytes(written) + b"\x80\x80"


def blob_of(*interfaces):
    """Return VALID with another address."""
    address, at = address_of(*interfaces), ADDRESS_AT - 8
    nbytes = int.from_bytes(VALID[at:ADDRESS_AT], "little")
    return VALID[:at] + len(address).to_bytes(8, "little") + address + VALID[ADDRESS_AT + nbytes :]


PID, NAMESPACE = (4711).to_bytes(4, "little"), (4026531836).to_bytes(8, "little")


@pytest.mark.parametrize("flags", [b"", b"\0", bytes([MNNVL]), bytes([MNNVL | FABRIC])])
def test_the_addresses_of_a_gpu_are_read_with_their_flags(flags):
    found = inspect(blob_of(("cuda_ipc", b"the host" + flags, PID + NAMESPACE), ("rc_mlx5", b"gid", b"qp")), AGENT)
    assert [each.transport for each in found.interfaces] == ["cuda_ipc", "rc_mlx5"]
    assert [each.flags for each in found.interfaces] == [flags[0] if flags else 0, 0]


def test_a_transport_of_a_later_ucx_is_told_by_its_checksum():
    (found,) = inspect(blob_of(("rc_next", b"gid", b"qp")), AGENT).interfaces
    assert found.transport == f"unknown-{_checksum('rc_next'):04x}"


def test_a_nixl_that_publishes_in_another_form_is_said_once_and_used(caplog):
    assert nixl.inspect_own(Envelope("nixl", AGENT, b"nixlSerDes 2.0|"), on_device=False) is None
    assert "unknown form" in caplog.text
    assert nixl.inspect_own(Envelope("nixl", AGENT, VALID), on_device=False) is not None
