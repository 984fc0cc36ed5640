"""Metadata of a data plane: what is no envelope, too large, or of another agent is refused."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.ids import agent_name, worker_name
from kvflow.layout.component import METADATA_BYTES_MAX
from kvflow.reads.backend import Envelope, decode_envelope, encode_envelope
from kvflow.reads.nixl.backend import exporter_name
from kvflow.reads.reach import host_facts

GOOD = Envelope("nixl", "agent", b"blob" * 50)


@given(st.text(min_size=1, max_size=255), st.binary(max_size=2000))
def test_what_was_sealed_comes_out(agent, blob):
    envelope = Envelope("nixl", agent, blob)
    assert decode_envelope(encode_envelope(envelope), transport="nixl") == envelope


@given(st.binary(max_size=300))
def test_any_bytes_raise_only_value_error(junk):
    with pytest.raises(ValueError):  # noqa: PT011 - each layer words it for itself
        decode_envelope(junk, transport="nixl")


def test_limits_hold_on_both_sides():
    with pytest.raises(ValueError, match="limit"):
        encode_envelope(Envelope("nixl", "agent", bytes(METADATA_BYTES_MAX)))
    with pytest.raises(ValueError, match="limit"):
        decode_envelope(bytes(METADATA_BYTES_MAX + 1), transport="nixl")
    body = msgspec.msgpack.encode({"transport": "nixl", "agent": "x" * 513, "blob": b""})
    with pytest.raises(msgspec.ValidationError):
        decode_envelope(body, transport="nixl")


def test_facts_that_another_release_publishes_are_ignored():
    facts = host_facts()
    told = msgspec.to_builtins(facts) | {"gpus": ["GPU-1"], "unheard_of": 1}
    body = msgspec.msgpack.encode({"transport": "nixl", "agent": "agent", "blob": b"", "facts": told})
    assert decode_envelope(body, transport="nixl").facts == facts


def test_metadata_of_another_agent_is_refused():
    assert decode_envelope(encode_envelope(GOOD), transport="nixl", agent="agent") == GOOD
    with pytest.raises(ValueError, match="'agent', not of 'another'"):
        decode_envelope(encode_envelope(GOOD), transport="nixl", agent="another")


def test_the_longest_name_of_an_engine_fits():
    name = agent_name(worker_name("e" * 256, 65535, "f" * 32), "a" * 64)
    envelope = Envelope("nixl", exporter_name(name), b"")
    assert decode_envelope(encode_envelope(envelope), transport="nixl") == envelope


def test_another_transport_is_named():
    with pytest.raises(ValueError, match=r"'nixl'.*'loopback'"):
        decode_envelope(encode_envelope(GOOD), transport="loopback")
