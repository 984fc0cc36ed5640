"""What NIXL publishes is read to its end; what it cannot have published is refused, whatever it is."""

import random
import re
from pathlib import Path

import pytest

from kvflow.reads.backend import Envelope
from kvflow.reads.contract import Carrier
from kvflow.reads.nixl import backend as nixl
from kvflow.reads.nixl.metadata import Exported, Interface, _checksum, carrier_between, difference, inspect

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


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_cannot_be_is_refused(name):
    blob, why = IMPOSSIBLE[name]
    with pytest.raises(ValueError, match=why):
        inspect(blob, AGENT)


@pytest.mark.parametrize("line", (CORPUS / "metadata.txt").read_text().split())
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


def exported(*names, device=b"a host", namespace=b"", on_device=False):
    pid = b"1234"
    interfaces = [Interface(name, device, pid + (namespace if name == "cma" else b"")) for name in names]
    return Exported(tuple(interfaces), on_device)


HERE = exported("self", "tcp", "sysv", "posix", "cma")
CARDS = ("self", "tcp", "sysv", "posix", "cma", "rc_mlx5")
CUDA = (*CARDS[:5], "cuda_copy", "cuda_ipc")
NEAR = [
    (HERE, HERE, Carrier("cma", "addresses")),
    (exported(*CARDS), exported(*CARDS), Carrier("cma|rc_mlx5", "candidates")),
    (exported(*CUDA, on_device=True), exported(*CUDA, on_device=True), Carrier("cuda_ipc", "addresses")),
    (exported(*CUDA), exported(*CUDA), Carrier("cma", "addresses")),
]
FAR = [
    (exported(*CARDS), exported(*CARDS, device=b"another"), Carrier("rc_mlx5", "addresses")),
    (exported(*CARDS, on_device=True), exported(*CARDS), Carrier("rc_mlx5", "addresses")),
    (exported("tcp", ""), exported("tcp", ""), Carrier("unknown", "nothing")),
]
NEVER = {
    "another host": (HERE, exported("tcp", "posix", "cma", device=b"another")),
    "another PID namespace": (HERE, exported("tcp", "posix", "cma", namespace=b"9876")),
    "no cma there": (HERE, exported("tcp", "posix")),
    "no cma here": (exported("tcp", "posix"), HERE),
    "another card": (exported(*CARDS), exported("tcp", "rc_verbs")),
    "a GPU's memory here alone": (exported(*CUDA, on_device=True), exported(*CUDA)),
    "a GPU's memory there alone": (exported(*CUDA), exported(*CUDA, on_device=True)),
    "GPUs of two hosts": (exported(*CUDA, on_device=True), exported(*CUDA, on_device=True, device=b"another")),
    "no transport in common": (HERE, exported("dc_mlx5", device=b"another")),
}


@pytest.mark.parametrize(("ours", "theirs", "carrier"), [*NEAR, *FAR])
def test_what_carries_the_bytes_follows_from_what_both_have(ours, theirs, carrier):
    assert carrier_between(ours, theirs, lambda _: True) == carrier


@pytest.mark.parametrize("name", NEVER)
def test_what_the_other_process_would_have_to_send_is_carried_by_nothing(name):
    assert carrier_between(*NEVER[name], lambda _: True) is None


@pytest.mark.parametrize(("ours", "theirs", "carrier"), NEAR)
def test_memory_that_the_kernel_protects_is_not_near(ours, theirs, carrier):
    asked = []
    found = carrier_between(ours, theirs, asked.append)
    assert found in (None, Carrier("rc_mlx5", "addresses"))
    assert found != carrier
    assert asked == [int.from_bytes(b"1234", "little")]


def test_a_process_id_in_a_namespace_has_a_flag_outside_the_number():
    asked = []
    side = Exported((Interface("cma", b"a host", (7 | 1 << 31).to_bytes(4, "little") + b"namespace"),), False)
    carrier_between(side, side, asked.append)
    assert asked == [7]


def test_only_a_network_card_reaches_beyond_the_host():
    assert not exported(*CUDA[:1], *CUDA[2:]).has_network
    assert exported(*CARDS[:1], "rc_mlx5").has_network
    assert exported("").has_network, "nobody knows what it is"


SETTINGS = {"NIXL": "1.5", "UCX_POSIX_FIFO_SIZE": "64"}


@pytest.mark.parametrize(
    ("theirs", "words"),
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


def test_a_nixl_that_publishes_in_another_form_is_said_once_and_used(caplog):
    assert nixl.inspect_own(Envelope("nixl", AGENT, b"nixlSerDes 2.0|"), on_device=False) is None
    assert "unknown form" in caplog.text
    assert nixl.inspect_own(Envelope("nixl", AGENT, VALID), on_device=False) is not None
