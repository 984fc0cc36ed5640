"""Frames of the TCP data plane: what is in them, and what is out of bounds."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.ids import Credentials
from kvflow.reads.contract import LeaseName
from kvflow.reads.tcp01 import wire
from kvflow.reads.tcp01.wire import BadFrame, RequestHeader

WHO = Credentials("ab" * 32, "décodeur", 7, "0123456789abcdef" * 2, b"s" * 32)
NONCES = (b"t" * 32, b"o" * 32, b"binding")
U32, U16 = (1 << 32) - 1, (1 << 16) - 1
LEASE = wire.LEASE.size


def request(kind, few, number, units, nbytes, *, zero=0):
    return wire.HEADER.pack(kind, zero, few, number, units, nbytes)


def test_a_greeting_has_its_nonce():
    said = wire.greeting(b"x" * wire.NONCE_BYTES)
    assert len(said) == wire.GREETING_BYTES
    assert wire.nonce_of(said) == b"x" * wire.NONCE_BYTES


@pytest.mark.parametrize("said", [b"", bytes(40), b"kvftcp02" + bytes(32), b"HTTP/1.1 400 Bad Request"])
def test_another_protocols_first_words_are_refused(said):
    with pytest.raises(BadFrame, match="greeting"):
        wire.nonce_of(said)


def test_a_hello_says_who_it_is():
    said = wire.encode_hello(WHO, *NONCES)
    hello = wire.decode_hello(said[: wire.HELLO_BYTES])
    proof = wire.proof_of_reader(WHO.pass_, *NONCES)
    assert hello == (NONCES[1], WHO.public_key, WHO.incarnation, WHO.rank, len("décodeur".encode()), proof)
    assert said[wire.HELLO_BYTES :].decode() == WHO.engine_id


@pytest.mark.parametrize(
    ("magic", "engine_bytes", "valid"),
    [
        (wire.MAGIC, 1, True),
        (wire.MAGIC, wire.ENGINE_BYTES_MAX, True),
        (wire.MAGIC, 0, False),
        (wire.MAGIC, wire.ENGINE_BYTES_MAX + 1, False),
        (wire.MAGIC, U16, False),
        (b"kvftcp00", 1, False),
    ],
)
def test_a_hello_is_bounded(magic, engine_bytes, valid):
    said = struct.pack("<8s32s32s16sIH32s", magic, b"n", b"k", b"i", U32, engine_bytes, b"p")
    assert len(said) == wire.HELLO_BYTES
    if valid:
        assert wire.decode_hello(said).engine_bytes == engine_bytes
    else:
        with pytest.raises(BadFrame):
            wire.decode_hello(said)


def test_the_longest_name_that_a_worker_may_have_fits():
    assert len(("\U0001f600" * 256).encode()) <= wire.ENGINE_BYTES_MAX


def test_proofs_differ_by_role_secret_nonces_and_binding():
    proofs = [
        prove(secret, *nonces, binding)
        for prove in (wire.proof_of_reader, wire.proof_of_exporter)
        for secret in (b"s" * 32, b"t" * 32)
        for nonces in ((b"a" * 32, b"b" * 32), (b"b" * 32, b"a" * 32))
        for binding in (b"", b"x", b"y")
    ]
    assert len({*proofs}) == len(proofs)
    assert {len(proof) for proof in proofs} == {wire.PROOF_BYTES}


@given(st.lists(st.tuples(*[st.integers(-(1 << 63), (1 << 63) - 1)] * 5), min_size=1, max_size=20), st.integers(0, U16))
def test_a_list_is_decoded_as_it_was_encoded(rows, group):
    frame = wire.encode_list(5, group, np.array(rows, np.int64))
    head = wire.decode_request(frame[: wire.HEADER.size])
    assert head == RequestHeader(wire.PROGRAM, group, 5, len(rows), len(frame) - wire.HEADER.size)
    assert wire.decode_rows(frame[wire.HEADER.size :]).tolist() == [[*row] for row in rows]


leases = st.tuples(st.integers(0, U32), st.integers(0, (1 << 64) - 1))


int32s = st.integers(-(1 << 31), (1 << 31) - 1)


@given(st.lists(leases, min_size=1, max_size=9), st.lists(int32s, min_size=1), st.data())
def test_a_read_is_read_as_it_was_written(named, numbers, data):
    named = [(slot, epoch, epoch.to_bytes(8, "little") * 4) for slot, epoch in named]
    shares = [LeaseName(slot, epoch, mac) for slot, epoch, mac in named]
    owners = data.draw(st.lists(st.integers(0, len(named) - 1), min_size=len(numbers), max_size=len(numbers)))
    lease_of = np.array(owners, np.uint16) if len(named) > 1 else None
    frame = wire.encode_read(3, shares, np.array(numbers, np.int32), lease_of)
    head = wire.decode_request(frame[: wire.HEADER.size])
    assert head == RequestHeader(wire.READ, len(named), 3, len(numbers), len(frame) - wire.HEADER.size)
    seen, index, seen_of = wire.decode_read(head, frame[wire.HEADER.size :])
    assert (seen, index.tolist()) == (named, numbers)
    assert (seen_of is None) if lease_of is None else seen_of.tolist() == owners


@pytest.mark.parametrize("owner", [2, 3, U16])
def test_a_descriptor_of_a_lease_that_is_not_there_is_refused(owner):
    shares = [LeaseName(slot, 1) for slot in range(2)]
    frame = wire.encode_read(0, shares, np.arange(3, dtype=np.int32), np.array([0, owner, 1], np.uint16))
    head = wire.decode_request(frame[: wire.HEADER.size])
    with pytest.raises(BadFrame, match=f"lease {owner} of 2"):
        wire.decode_read(head, frame[wire.HEADER.size :])


@pytest.mark.parametrize(
    "said",
    [
        request(wire.PROGRAM, 0, 0, 1, 40),
        request(wire.PROGRAM, U16, U32, wire.ROWS_MAX, wire.ROWS_MAX * 40),
        request(wire.READ, 1, 0, 1, LEASE + 4),
        request(wire.READ, 1, U32, wire.DESCRIPTORS_MAX, LEASE + wire.DESCRIPTORS_MAX * 4),
        request(wire.READ, 2, 0, 1, 2 * LEASE + 6),
        request(
            wire.READ,
            wire.LEASES_MAX,
            0,
            wire.DESCRIPTORS_MAX,
            wire.LEASES_MAX * LEASE + wire.DESCRIPTORS_MAX * 6,
        ),
        request(wire.EPOCH, 0, U32, 0, 0),
    ],
)
def test_the_largest_and_the_smallest_requests_are_taken(said):
    assert wire.HEADER.pack(said[0], 0, *wire.decode_request(said)[1:]) == said
    assert wire.decode_request(said).nbytes <= wire.BODY_BYTES_MAX


@pytest.mark.parametrize(
    "said",
    [
        request(0, 0, 0, 0, 0),
        request(4, 0, 0, 0, 0),
        request(255, 1, 0, 1, 16),
        request(wire.PROGRAM, 0, 0, 1, 40, zero=1),
        request(wire.READ, 1, 0, 1, LEASE + 4, zero=255),
        request(wire.EPOCH, 0, 0, 0, 0, zero=1),
        request(wire.PROGRAM, 0, 0, 0, 0),
        request(wire.PROGRAM, 0, 0, 1, 39),
        request(wire.PROGRAM, 0, 0, 1, 41),
        request(wire.PROGRAM, 0, 0, wire.ROWS_MAX + 1, (wire.ROWS_MAX + 1) * 40),
        request(wire.PROGRAM, 0, 0, U32, U32),
        request(wire.READ, 0, 0, 1, 4),
        request(wire.READ, 1, 0, 0, LEASE),
        request(wire.READ, 1, 0, 1, LEASE + 6),
        request(wire.READ, 2, 0, 1, 2 * LEASE + 4),
        request(wire.READ, 1, 0, wire.DESCRIPTORS_MAX + 1, LEASE + (wire.DESCRIPTORS_MAX + 1) * 4),
        request(wire.READ, wire.LEASES_MAX + 1, 0, 1, (wire.LEASES_MAX + 1) * wire.LEASE.size + 6),
        request(wire.READ, 1, 0, U32, U32),
        request(wire.EPOCH, 1, 0, 0, 0),
        request(wire.EPOCH, 0, 0, 1, 0),
        request(wire.EPOCH, 0, 0, 0, 1),
    ],
)
def test_requests_out_of_bounds_are_refused(said):
    with pytest.raises(BadFrame, match="out of bounds"):
        wire.decode_request(said)


numbers = st.integers(0, U32) | st.sampled_from([0, 1, 2, 16, 40, wire.ROWS_MAX, wire.DESCRIPTORS_MAX, 12, U32])
headers = st.builds(
    request,
    st.integers(0, 5),
    st.integers(0, U16) | st.integers(0, 3),
    numbers,
    numbers,
    numbers,
    zero=st.sampled_from([0, 0, 0, 1]),
)


@given(st.binary(min_size=16, max_size=16) | headers)
def test_any_16_bytes_are_a_request_within_bounds_or_refused(said):
    try:
        head = wire.decode_request(said)
    except BadFrame:
        return
    assert head.kind in {wire.PROGRAM, wire.READ, wire.EPOCH}
    assert head.nbytes <= wire.BODY_BYTES_MAX
    assert head.units <= max(wire.ROWS_MAX, wire.DESCRIPTORS_MAX)
    assert head.kind == wire.PROGRAM or head.few <= wire.LEASES_MAX
    body = bytes(head.nbytes)
    if head.kind == wire.READ:
        named, index, lease_of = wire.decode_read(head, body)
        assert (len(named), len(index)) == (head.few, head.units)
        assert (lease_of is None) == (head.few == 1)
    elif head.kind == wire.PROGRAM:
        assert wire.decode_rows(body).shape == (head.units, 5)


@given(st.binary(min_size=wire.HELLO_BYTES, max_size=wire.HELLO_BYTES), st.booleans())
def test_any_bytes_are_a_hello_within_bounds_or_refused(said, begins):
    try:
        hello = wire.decode_hello(wire.MAGIC + said[len(wire.MAGIC) :] if begins else said)
    except BadFrame:
        return
    assert 1 <= hello.engine_bytes <= wire.ENGINE_BYTES_MAX
    assert (len(hello.public_key), len(hello.incarnation)) == (64, 32)
