"""The messages of the TCP data plane: frames, their bounds, and the proofs of identity. Pure.

Opening, before any request. ``pass`` is the secret that the producer gave this reader over the control channel::

    reader                                    exporter
                      <-  GREETING            magic, nonce
    HELLO         ->                          magic, nonce, public key, identity, proof
                      <-  WELCOME             a proof of its own, or zeros: the reader is not let in

Both proofs are HMACs with the pass over both nonces and, if the connection is encrypted, over its unique binding. So a
proof cannot be relayed to another worker or by an attacker in the middle.

Then requests and answers, in order. Every number is little-endian. A request is a header of 16 bytes and a body::

    PROGRAM   number, group, rows             rows of 5 x int64: address, nbytes, device, stride, count
    READ      number, leases, descriptors     leases of slot u32, epoch u64 and the MAC of the
                                              ticket, 32 bytes; descriptor numbers int32,
                                              and, with two leases or more, the lease of each descriptor, uint16
    EPOCH     slot                            nothing

An answer is a header of 16 bytes, a body, and what the slots of the leases held after the body had been copied::

    DONE      nbytes                          of a READ: the bytes, then a u64 for each lease; of an EPOCH: the u64
    NOT_HELD                                  of a READ whose leases are not held: a u64 for each lease
    REFUSED   nbytes                          why, as text

Every size is checked before memory is allocated for it. A size out of bounds ends the connection.
"""

import hashlib
import hmac
import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvflow.ids import Credentials
from kvflow.reads.contract import LeaseName
from kvflow.reads.tcp.wire import BadFrame

MAGIC = b"kvftcp01"
NONCE_BYTES = 32
PROOF_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
WELCOME_BYTES = PROOF_BYTES

ENGINE_BYTES_MAX = 1024
"""A name has at most 256 characters, of at most four bytes."""

HEADER = struct.Struct("<BBHIII")
"""Header of a request: kind, 0, group or leases, number or slot, rows or descriptors, bytes of the body."""

ANSWER = struct.Struct("<BBHIQ")
"""Header of an answer: status, 0, leases, 0, bytes of the body without the epochs."""

PROGRAM, READ, EPOCH = 1, 2, 3
DONE, NOT_HELD, REFUSED = 0, 1, 2

ROW_BYTES = 40
MAC_BYTES = 32
LEASE = struct.Struct(f"<IQ{MAC_BYTES}s")
EPOCH_VALUE = struct.Struct("<Q")

ROWS_MAX = 1 << 15
"""Most rows of one prepared list: eight rows for each component of 4,096 layers."""

LISTS_MAX = 4096
"""Most lists of one connection: 64 groups of 64 divisions among ranks."""

LEASES_MAX = 1024
DESCRIPTORS_MAX = 1 << 16
"""Most descriptors of one read. A reader divides a chunk that has more."""

DETAIL_BYTES_MAX = 512
BODY_BYTES_MAX = max(ROWS_MAX * ROW_BYTES, LEASES_MAX * LEASE.size + DESCRIPTORS_MAX * 6)

_HELLO = struct.Struct(f"<{len(MAGIC)}s{NONCE_BYTES}s32s16sIH{PROOF_BYTES}s")
HELLO_BYTES = _HELLO.size
"""The fixed part of a hello; the engine's name follows."""


def nonce_of(greeting: bytes) -> bytes:
    """Return the nonce of a greeting. Raises: BadFrame."""
    if not greeting.startswith(MAGIC):
        raise BadFrame(f"the peer's greeting is {greeting[: len(MAGIC)]!r}, not {MAGIC!r}")
    return greeting[len(MAGIC) :]


def proof_of_reader(secret: bytes, exporter_nonce: bytes, reader_nonce: bytes, binding: bytes) -> bytes:
    """Return the proof of a reader, which needs the pass, for this connection."""
    return _proof(secret, b"kvflow tcp reader\0", exporter_nonce, reader_nonce, binding)


def proof_of_exporter(secret: bytes, exporter_nonce: bytes, reader_nonce: bytes, binding: bytes) -> bytes:
    """Return the proof of the exporter that issued the pass, for this connection."""
    return _proof(secret, b"kvflow tcp exporter\0", exporter_nonce, reader_nonce, binding)


def encode_hello(who: Credentials, exporter_nonce: bytes, nonce: bytes, binding: bytes) -> bytes:
    """Return a reader's hello."""
    engine = who.engine_id.encode()
    proof = proof_of_reader(who.pass_, exporter_nonce, nonce, binding)
    key, incarnation = bytes.fromhex(who.public_key), bytes.fromhex(who.incarnation)
    return _HELLO.pack(MAGIC, nonce, key, incarnation, who.rank, len(engine), proof) + engine


def encode_list(number: int, group: int, rows: npt.NDArray[np.int64]) -> bytes:
    """Return the request that announces a prepared list."""
    body = np.ascontiguousarray(rows, "<i8").tobytes()
    return HEADER.pack(PROGRAM, 0, group, number, len(rows), len(body)) + body


def encode_read(
    number: int,
    leases: Sequence[LeaseName],
    index: npt.NDArray[np.int32],
    lease_of: npt.NDArray[np.uint16] | None,
) -> bytes:
    """Return the request for descriptors of a prepared list; ``lease_of``: the lease of each, None if there is one."""
    parts = [LEASE.pack(lease.slot, lease.epoch, lease.mac) for lease in leases]
    parts.append(np.ascontiguousarray(index, "<i4").tobytes())
    if len(leases) > 1:
        assert lease_of is not None
        parts.append(np.ascontiguousarray(lease_of, "<u2").tobytes())
    body = b"".join(parts)
    return HEADER.pack(READ, 0, len(leases), number, len(index), len(body)) + body


def encode_epoch(slot: int) -> bytes:
    """Return the request for the value of a slot."""
    return HEADER.pack(EPOCH, 0, 0, slot, 0, 0)


def _proof(secret: bytes, role: bytes, exporter_nonce: bytes, reader_nonce: bytes, binding: bytes) -> bytes:
    return hmac.digest(secret, role + exporter_nonce + reader_nonce + hashlib.sha256(binding).digest(), "sha256")
