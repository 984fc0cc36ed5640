"""A publication is hostile until it is decoded and checked: whatever it says, the answer is quick and typed."""

import time
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handshake import Publication
from handshake.limits import PUBLICATION_BYTES_MAX
from kvflow.errors import ProtocolViolation, ReleaseMismatch, SpecInvalid
from kvflow.layout.component import METADATA_BYTES_MAX, Component, Region
from kvflow.layout.manifest import COMPONENTS_MAX, MANIFEST_BYTES_MAX, MANIFEST_SCHEMA, Layer
from kvflow.rendezvous.endpoint import decode, encode
from tests.helpers.loops import looped

from .helpers import DENSE, advertisement

METADATA = {"loopback": b"how to read me"}
HONEST = msgspec.to_builtins(advertisement(planes={})) | {"planes": METADATA}
REGION = ("manifest", "regions", 0)
GROUP = ("manifest", "groups", 0)
LAYER = (*GROUP, "layers", 0)
PART = (*LAYER, "components", 0)
AT = {field: index for kind in (Layer, Component) for index, field in enumerate(kind.__struct_fields__)}
"""Layers and components travel as arrays: where each of their fields stands."""
BUDGET_S = 5.0
"""Of CPU, for what takes milliseconds: a few hundred times less than what quadratic work on 4 MiB takes."""


def published(value, schema=MANIFEST_SCHEMA):
    return Publication.of(msgspec.msgpack.encode(value), schema=schema)


def with_(path, value):
    """The honest advertisement with one thing replaced."""
    changed = msgspec.json.decode(msgspec.json.encode(HONEST | {"planes": None})) | {"planes": dict(METADATA)}
    holder = changed
    for key in path[:-1]:
        holder = holder[place_in(holder, key)]
    holder[place_in(holder, path[-1])] = value
    return changed


def place_in(holder, key):
    """Return where a field stands: in an array by its number."""
    return AT[key] if isinstance(holder, list) and isinstance(key, str) else key


def dense(**changes):
    """A component as it travels."""
    return list((DENSE | changes).values())


def refused(value):
    started = time.process_time()
    with pytest.raises(ProtocolViolation, match="invalid manifest") as caught:
        decode(published(value), peer="p/0/x")
    assert time.process_time() - started < BUDGET_S
    assert caught.value.peer == "p/0/x"
    return caught.value


def test_what_is_encoded_is_decoded():
    assert decode(encode(advertisement()), peer="p") == advertisement()
    assert decode(published(HONEST), peer="p") == advertisement()


@looped(
    "path, value",
    [
        ((*PART, "region"), 1),
        ((*PART, "region"), -1),
        ((*PART, "region"), 2**31),
        ((*PART, "offset"), 2**63),
        ((*PART, "offset"), -1),
        ((*PART, "kernel_stride"), -1),
        ((*PART, "kernel_stride"), 2**63),
        ((*PART, "strides"), [64, 2**62, 2]),
        ((*PART, "strides"), [64, 2**63 - 1, 2]),
        ((*PART, "strides"), [64, 16, 2**63]),
        ((*PART, "strides"), []),
        ((*PART, "extents"), [1, 4, 8.5]),
        ((*PART, "extents"), []),
        ((*PART, "extents"), [1] * 9),
        ((*PART, "shard_axis"), -2),
        ((*PART, "total"), 0),
        ((*PART, "first"), 2**62),
        ((*PART, "token_axis"), -2),
        ((*PART, "role"), ""),
        ((*PART, "role"), "k" * 65),
        ((*PART, "dtype"), None),
        ((*PART, "dtype"), "float4"),
        (PART, DENSE),
        (PART, dense()[:7]),
        ((*GROUP, "stripe"), [-1, 2, 1]),
        ((*GROUP, "stripe"), [0, 0, 1]),
        ((*GROUP, "stripe"), None),
        ((*GROUP, "block_size"), 0),
        ((*LAYER, "window"), -1),
        ((*LAYER, "window"), 2**41),
        ((*LAYER, "kind"), ""),
        ((*LAYER, "kind"), "x" * 33),
        ((*GROUP, "layers"), []),
        ((*GROUP, "layers", 1, "name"), ""),
        ((*GROUP, "layers", 1, "name"), "x" * 257),
        ((*LAYER, "components"), []),
        ((*LAYER, "components"), [dense(role=str(index)) for index in range(COMPONENTS_MAX + 1)]),
        (("manifest", "groups"), []),
        ((*REGION, "nbytes"), 2**63),
        ((*REGION, "address"), 2**63),
        ((*REGION, "memory"), "DISK"),
        ((*REGION, "device"), 2**31),
        (("epochs", "memory"), "VRAM"),
        (("epochs", "nbytes"), 63),
        (("epochs", "nbytes"), 0),
        (("planes",), {}),
        (("planes",), {"": b""}),
        (("planes",), {"x" * 33: b""}),
        (("planes",), {7: b""}),
        (("planes",), {"nixl": "text"}),
        (("planes",), {"nixl": b"x" * (METADATA_BYTES_MAX + 1)}),
        (("planes",), {"nixl": bytes(METADATA_BYTES_MAX), "loopback": b"one more"}),
        (("planes",), dict.fromkeys("abcde", b"")),
        (("planes",), {"tcp": b""}),  # and no endpoint
        (("data_endpoint",), "tcp://node-7:5700"),  # and no such plane
        (("tcp_encryption",), "x" * 33),
        (("tcp_encryption",), None),
        (("manifest",), None),
        (("manifest",), []),
    ],
)
def test_a_lie_is_a_violation(path, value):
    refused(with_(path, value))


@looped(
    "endpoint",
    [
        *("node-7:5700", "tcp://node-7", "tcp://node-7:0", "tcp://node-7:65536", "tcp://:5700", "tcp://a/b:5700"),
        *("tcp://node-7:5700\n", f"tcp://{'n' * 300}:5700", "ipc:///tmp/x", 7, None),
    ],
)
def test_a_tcp_plane_that_nobody_can_dial_is_a_violation(endpoint):
    refused(HONEST | {"planes": {"tcp": b""}, "data_endpoint": endpoint})


@pytest.mark.parametrize("endpoint", ["tcp://node-7:5700", "tcp://[fd00::1]:65535", f"tcp://{'n' * 253}:1"])
def test_a_tcp_plane_is_published_with_its_endpoint(endpoint):
    planes = {"nixl": b"how to read me", "tcp": b""}
    told = advertisement(planes=planes, data_endpoint=endpoint, tcp_encryption="tls")
    assert decode(encode(told), peer="p") == told


def of_layers(names):
    """The honest advertisement with a layer of each name."""
    layers = [[name, "full", 0, [dense()]] for name in names]
    return with_(("manifest", "groups"), [HONEST["manifest"]["groups"][0] | {"layers": layers}])


def test_the_largest_manifest_with_one_name_twice_is_refused_as_quickly():
    names = [f"{index:x}".rjust(24) for index in range(COMPONENTS_MAX - 1)]
    lie = of_layers([*names, names[-1]])
    assert 0.9 * MANIFEST_BYTES_MAX < len(msgspec.msgpack.encode(lie["manifest"])) < MANIFEST_BYTES_MAX
    assert "named twice" in refused(lie).message


def test_a_larger_manifest_is_refused_before_it_is_decoded():
    lie = of_layers([7])  # which no decoder would take
    lie["manifest"]["padding"] = bytes(MANIFEST_BYTES_MAX)
    assert "more than 262144" in refused(lie).message


def test_a_manifest_of_ours_that_nobody_would_read_is_not_published():
    group = advertisement().manifest.groups[0]
    names = [str(index).rjust(100) for index in range(COMPONENTS_MAX)]
    layers = tuple(msgspec.structs.replace(group.layers[0], name=name) for name in names)
    manifest = msgspec.structs.replace(
        advertisement().manifest, groups=(msgspec.structs.replace(group, layers=layers),)
    )
    with pytest.raises(SpecInvalid, match="more than 262144"):
        encode(advertisement(manifest=manifest))


@looped(
    "payload",
    [b"", b"\xc1", b"\x81", b"\x91" * 100_000, b"\x81\xa1\xff\x01", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff"],
)
def test_bytes_that_are_no_message_are_a_violation(payload):
    with pytest.raises(ProtocolViolation):
        decode(Publication.of(payload, schema=MANIFEST_SCHEMA), peer="p")


@settings(max_examples=150)
@given(st.data())
def test_a_flipped_byte_is_a_violation_or_another_manifest(data):
    payload = bytearray(msgspec.msgpack.encode(HONEST))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= data.draw(st.integers(1, 255))
    with suppress(ProtocolViolation):
        decode(Publication.of(bytes(payload), schema=MANIFEST_SCHEMA), peer="p").check()


@pytest.mark.parametrize("schema", [3, 5])
def test_another_schema_is_a_mismatch_before_anything_is_decoded(schema):
    with pytest.raises(ReleaseMismatch) as caught:
        decode(Publication.of(b"\xc1", schema=schema), peer="p", software="kvflow 9")
    error = caught.value
    assert (error.what, error.theirs, error.ours) == ("manifest schema", str(schema), "4")
    assert "kvflow 9" in str(error)


def test_a_group_without_layers_is_published_and_read():
    whole = advertisement()
    groups = (*whole.manifest.groups, msgspec.structs.replace(whole.manifest.groups[0], layers=()))
    stage = msgspec.structs.replace(whole, manifest=msgspec.structs.replace(whole.manifest, groups=groups))
    assert decode(encode(stage), peer="p").manifest.groups[-1].layers == ()


def test_the_largest_manifest_and_metadata_fit_a_publication():
    assert MANIFEST_BYTES_MAX + METADATA_BYTES_MAX + (64 << 10) < PUBLICATION_BYTES_MAX


def test_what_a_newer_release_adds_is_ignored():
    assert decode(published(HONEST | {"note": [1, 2]}), peer="p") == advertisement()


def test_an_advertisement_of_ours_is_checked_too():
    wrong = advertisement(epochs=Region(4096, 12))
    with pytest.raises(ProtocolViolation, match="not an array of u64"):
        decode(encode(wrong), peer="p")
