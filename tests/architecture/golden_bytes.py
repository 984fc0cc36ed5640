"""Tickets, and the bytes of one connection over TCP, as ``golden_lists`` writes and tests of both formats read them."""

import hashlib
import hmac
import json

import msgspec

from kvflow.ids import ABSENT, ReaderId
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import FINGERPRINT_BYTES, Content, Grant, RankAddress, Ticket
from kvflow.reads.backend import Envelope, encode_envelope
from kvflow.reads.tcp import opening, wire
from tests.unit.kvflow.reads.tcp.peers import EPOCH, block, credentials, frame, piece

FINGERPRINT = bytes(range(FINGERPRINT_BYTES))
RANK = RankAddress(0, 32 * "0", "tcp://host:5555")
KEYED = RankAddress(1, 32 * "1", "tcp://[fd00::1]:5556", epoch_base=4096, slots=64, public_key=64 * "a")
OFFER = Grant(
    engine_id="engine",
    request_id="request",
    ranks=(RANK,),
    slot=3,
    epoch=7,
    block_ids=((1, 2),),
    num_tokens=(8,),
    lease_ms=30_000,
    admitted=True,
)
LONG = msgspec.structs.replace(
    OFFER,
    ranks=(RANK, KEYED),
    block_ids=((*range(7, 107), 3, 2), (ABSENT, 4), (5,)),
    num_tokens=(1632, 32, 32),
    admitted=False,
    issued_ms=1_700_000_000_000,
    contents=(Content(16, (b"d" * 16,)), Content(16, (b"", b"e" * 16)), Content(0, (b"e" * 16,))),
    traceparent=f"00-{32 * '1'}-{16 * '2'}-01",
)
GRANTS = {
    "offer": OFFER,
    "runs, two ranks and every field": LONG,
    "kept": msgspec.structs.replace(OFFER, kind="kept"),
    "open": msgspec.structs.replace(OFFER, kind="open", num_tokens=(64,), contents=(Content(4, (b"f" * 16,)),)),
}


def sign(payload: bytes) -> bytes:
    """Return a MAC as members of a cluster compute it."""
    return hmac.digest(b"k" * 32, payload, "sha256")


def tickets() -> str:
    """Return a ticket of each kind, as a router carries it."""
    made = {
        name: Ticket(grants=(grant,), signed=(grant.signed(sign, FINGERPRINT),)).to_params()
        for name, grant in GRANTS.items()
    }
    return json.dumps(made, indent=2) + "\n"


BLOCKS, BLOCK_BYTES, SLOT, HELD = 8, 32, 3, EPOCH + 1
NONCES = b"t" * opening.NONCE_BYTES, b"o" * opening.NONCE_BYTES
"""The exporter's, and the reader's."""


def tcp() -> str:
    """Return what a producer publishes, and what is said over one connection: by whom, what it is, and the bytes."""
    who = credentials()
    reader = msgspec.msgpack.encode(ReaderId(who.public_key, who.engine_id, who.rank, who.incarnation, b""))
    proofs = [opening.proof_of(who.pass_, role, NONCES, b"") for role in ("reader", "exporter")]
    digest = hashlib.sha256(reader).digest()
    tracks = ((Track(1 << 20, BLOCK_BYTES, BLOCK_BYTES, BLOCKS),), (Track(1 << 21, 8, 16, BLOCKS),))
    refusal = f"block 5 of group 0 is not one of the lease in slot {SLOT}".encode()
    said = [
        ("producer", "publication", encode_envelope(Envelope("tcp", "producer", wire.encode_layout(tracks)))),
        ("exporter", "greeting", opening.MAGIC + NONCES[0]),
        ("reader", "hello", opening._HELLO.pack(NONCES[1], digest, proofs[0], len(reader)) + reader),
        ("exporter", "welcome", proofs[1]),
        ("reader", "EPOCH", wire.encode_epoch(SLOT)),
        ("exporter", "DONE", frame(wire.DONE, HELD)),
        ("reader", "LEASE", wire.encode_lease(SLOT, HELD, b"")),
        ("reader", "READ of two blocks", wire.encode_read(0, SLOT, HELD, [block(1, 2, nbytes=BLOCK_BYTES)])),
        ("exporter", "PIECE", piece(bytes(range(BLOCK_BYTES, 3 * BLOCK_BYTES)))),
        ("exporter", "DONE", frame(wire.DONE, HELD)),
        ("reader", "READ of a block that is not leased", wire.encode_read(0, SLOT, HELD, [block(5, nbytes=32)])),
        ("exporter", "REFUSED", frame(wire.REFUSED, len(refusal)) + refusal),
        ("reader", "LEASE that has ended", wire.encode_lease(SLOT, EPOCH, b"")),
        ("reader", "READ", wire.encode_read(0, SLOT, EPOCH, [block(1, nbytes=BLOCK_BYTES)])),
        ("exporter", "ENDED", frame(wire.ENDED, HELD)),
    ]
    return json.dumps([(*about, content.hex()) for *about, content in said], indent=2) + "\n"
