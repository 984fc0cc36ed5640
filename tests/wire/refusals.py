"""What a receiver must refuse, and with which code: part of the vectors."""

import hashlib
from typing import Any

import msgspec

from handshake.codec import FORMAT
from handshake.messages import WIRE_VERSION
from handshake.security import sign
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.reads.tcp import wire
from tests.simulation.tickets import damage, forge
from tests.wire.vectors import OFFER, OTHER, SECRETS, SECURITY, manifest, meant, ticket

EPOCH = OFFER.epoch
IDENTITY = {"engine_id": "decode-0", "rank": 0, "num_ranks": 1, "incarnation": 32 * "0", "role": "decode"}
LEASE = {"slot": 3, "epoch": EPOCH}


def message(kind: str, **fields: Any) -> bytes:
    """Return a frame that says anything."""
    return FORMAT + msgspec.msgpack.encode({"type": kind, **fields})


def hello(lowest: int = WIRE_VERSION, highest: int = WIRE_VERSION, **changes: Any) -> bytes:
    """Return a hello."""
    return message("hello", version_min=lowest, version_max=highest, identity=IDENTITY | changes)


def publish(payload: bytes, digest: bytes) -> bytes:
    """Return a publication of a reader."""
    return message("publish", publication={"schema": MANIFEST_SCHEMA, "digest": digest, "payload": payload})


VIOLATION = "protocol_violation"
FRESH: dict[str, tuple[list[bytes], str]] = {
    "no frame that begins with c1": ([b"\xc0" + hello()[1:]], VIOLATION),
    "two frames": ([hello(), b""], VIOLATION),
    "a hello with bytes behind it": ([hello() + b"\0"], VIOLATION),
    "a message of an unknown type": ([message("bribe")], VIOLATION),
    "only versions that this side does not speak": ([hello(WIRE_VERSION + 1, WIRE_VERSION + 7)], "version_unsupported"),
    "a lowest version above the highest": ([hello(WIRE_VERSION, WIRE_VERSION - 1)], VIOLATION),
    "a rank that its engine does not have": ([hello(rank=1)], VIOLATION),
    "an incarnation in capital letters": ([hello(incarnation=32 * "A")], VIOLATION),
    "no engine id": ([hello(engine_id="")], VIOLATION),
    "a release before the hello": ([message("release", leases=[LEASE], read=True)], VIOLATION),
}
"""What the first message to a server may not be."""

PUBLISHED: dict[str, tuple[list[bytes], str]] = {
    "a publication that does not match its digest": ([publish(b"", bytes(32))], VIOLATION),
    "a question before the publication": ([message("ask", nonce=1, question=b"")], VIOLATION),
}
"""What may not follow the hello."""

READY: dict[str, tuple[list[bytes], str]] = {
    "a second hello": ([hello()], VIOLATION),
    "an answer of a client": ([message("answer", nonce=1, answer=b"")], VIOLATION),
    "a release of no lease": ([message("release", leases=[], read=False)], VIOLATION),
    "a nonce of 64 bits": ([message("ping", nonce=2**63)], VIOLATION),
}
"""What may not follow both publications."""


def _signed(payload: bytes) -> bytes:
    return sign(SECURITY.ticket_key, payload)


def _changed(**changes: Any) -> dict[str, Any]:
    """Return the parameters of an offer that says something else, signed again."""
    return forge(ticket(OFFER).to_params(), lambda grant: grant.update(changes), sign=_signed)


def _text(change: Any) -> dict[str, Any]:
    return {"kvflow": change(ticket(OFFER).to_params()["kvflow"])}


def _with_another_mark(signed: bytes) -> bytes:
    payload = b"\x04" + signed[33:]
    return _signed(payload) + payload


TICKETS = {
    "another epoch under the old MAC": (
        forge(ticket(OFFER).to_params(), lambda grant: grant.update(epoch=EPOCH + 2)),
        "ticket_invalid",
    ),
    "signed with another secret": (ticket(OFFER, by=OTHER).to_params(), "ticket_invalid"),
    "the format of another release": (_text(lambda text: f"kvf2{text[4:]}"), "release_mismatch"),
    "no format": (_text(lambda text: f"text{text[4:]}"), "ticket_invalid"),
    "no grant": (_text(lambda text: text[:4]), "ticket_invalid"),
    "a character that base64url does not have": (_text(lambda text: f"{text[:-1]}!"), "ticket_invalid"),
    "another byte after the MAC": (
        damage(ticket(OFFER).to_params(), _with_another_mark),
        "ticket_invalid",
    ),
    "a kind that is not known": (_changed(kind="lent"), "release_mismatch"),
    "an epoch that is text": (_changed(epoch=str(EPOCH)), "ticket_invalid"),
    "a run without its first block": (_changed(block_ids=[[-3], [17]]), "ticket_invalid"),
    "fewer numbers of tokens than groups": (_changed(num_tokens=[24]), "ticket_invalid"),
    "no ranks": (_changed(ranks=[]), "ticket_invalid"),
    "one rank in two grants": (
        {"kvflow": ticket(OFFER).to_params()["kvflow"] + "." + ticket(OFFER).to_params()["kvflow"][5:]},
        "ticket_invalid",
    ),
}


def publications() -> list[dict[str, Any]]:
    """Return what is wrong with publications, each a change of the first manifest."""
    good = manifest("Llama: full attention, layer by layer")
    return [
        _publication("another schema", good, "release_mismatch", schema=MANIFEST_SCHEMA + 1),
        _publication("a region that is too short", good, VIOLATION, region_nbytes=4096),
        _publication("a layer that is named twice", good, VIOLATION, layer="layers.1"),
        _publication("elements that share bytes", good, VIOLATION, stride=2),
        _publication("a TCP plane without an address", good, VIOLATION, data_endpoint=""),
        _publication("an epoch table that is cut", good, VIOLATION, epochs_nbytes=12),
    ]


def _publication(
    what: str, good: dict[str, Any], code: str, *, schema: int = MANIFEST_SCHEMA, **changes: Any
) -> dict[str, Any]:
    said = meant(good["says"])
    for name, value in changes.items():
        match name:
            case "region_nbytes":
                said["manifest"]["regions"][0]["nbytes"] = value
            case "layer":
                said["manifest"]["groups"][0]["layers"][0][0] = value
            case "stride":  # of tokens, of the first component of the first layer
                said["manifest"]["groups"][0]["layers"][0][3][0][7][1] = value
            case "epochs_nbytes":
                said["epochs"]["nbytes"] = value
            case _:
                said[name] = value
    payload = msgspec.msgpack.encode(said)
    found = {"schema": schema, "digest_hex": hashlib.sha256(payload).hexdigest(), "payload_hex": payload.hex()}
    return {"where": "publication", "what": what, **found, "code": code}


QUESTIONS = {
    "no lease to ask about": {"type": "ask_settled", "leases": [], "known": []},
    "a digest without bytes": {"type": "ask_held", "digests": [b""]},
}

LAYOUTS = {
    "more stretches than there may be": [6, [[[4096, 64, 1 << 16, 64, 1 << 20, -1]]]],
    "a stretch beyond the address space": [6, [[[1 << 62, 1 << 62, 3, 64, 1 << 20, -1]]]],
}

STRETCHES = [[4096, 0, 1, 256, 256, -1]]
"""Rows of the group that is asked for: one stretch of 256 bytes in each of six blocks."""

REQUESTS = {
    "a request of an unknown kind": (wire.REQUEST.pack(9, 0, 0, 0, 3, 0, EPOCH), "closed"),
    "a lease with a group": (wire.REQUEST.pack(wire.LEASE, 0, 1, 0, 3, 0, EPOCH) + bytes(32), "closed"),
    "a read of nothing": (wire.REQUEST.pack(wire.READ, 0, 0, 0, 3, 0, EPOCH), "closed"),
    "a read with 8,193 runs": (wire.REQUEST.pack(wire.READ, 0, 0, 8193, 3, 0, EPOCH), "closed"),
    "a number that is not zero": (wire.REQUEST.pack(wire.EPOCH, 1, 0, 0, 3, 0, 0), "closed"),
    "a run that leaves its stretch": (wire.encode_read(0, 3, EPOCH, [(0, 0, 1, 192, 128, 0, 1)]), "refused"),
    "a run of a stretch that is not there": (wire.encode_read(0, 3, EPOCH, [(1, 0, 1, 0, 1, 0, 1)]), "refused"),
    "a run that leaves the blocks": (wire.encode_read(0, 3, EPOCH, [(0, 5, 2, 0, 64, 0, 1)]), "refused"),
    "a run of no bytes": (wire.encode_read(0, 3, EPOCH, [(0, 0, 1, 0, 0, 0, 1)]), "refused"),
}

EXPECTED = 256
"""Bytes of the read that these answer, under ``EPOCH``."""

ANSWERS = {
    "an end with bytes missing": wire.ANSWER.pack(wire.DONE, 0, 0, 0, EPOCH),
    "the end of a lease that holds": wire.ANSWER.pack(wire.ENDED, 0, 0, 0, EPOCH),
    "more bytes than were asked for": wire.ANSWER.pack(wire.PIECE, 0, 0, 0, EXPECTED + 1),
    "a piece of nothing": wire.ANSWER.pack(wire.PIECE, 0, 0, 0, 0),
    "a reason that is too long": wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, 257),
    "a header that is not zero": wire.ANSWER.pack(wire.PIECE, 0, 1, 0, EXPECTED),
}


def refusals() -> list[dict[str, Any]]:
    """Return everything that is to be refused: where, what, the bytes, and the code."""
    control = [
        {"where": "control", "after": after, "what": what, "frames_hex": [each.hex() for each in frames], "code": code}
        for after, found in (("nothing", FRESH), ("hello", PUBLISHED), ("publish", READY))
        for what, (frames, code) in found.items()
    ]
    secret = SECRETS[0].encode().hex()
    of_tickets = [
        {"where": "ticket", "what": what, "secret_hex": secret, "kv_transfer_params": params, "code": code}
        for what, (params, code) in TICKETS.items()
    ]
    asked = [
        {"where": "question", "what": what, "encoded_hex": msgspec.msgpack.encode(said).hex(), "code": VIOLATION}
        for what, said in QUESTIONS.items()
    ]
    layouts = [
        {"where": "layout", "what": what, "encoded_hex": msgspec.msgpack.encode(said).hex(), "code": "metadata_invalid"}
        for what, said in LAYOUTS.items()
    ]
    requests = [
        {
            "where": "request",
            "what": what,
            "stretches": STRETCHES,
            "num_blocks": 6,
            "frame_hex": frame.hex(),
            "code": code,
        }
        for what, (frame, code) in REQUESTS.items()
    ]
    answers = [
        {
            "where": "answer",
            "what": what,
            "nbytes": EXPECTED,
            "epoch": EPOCH,
            "frame_hex": frame.hex(),
            "code": VIOLATION,
        }
        for what, frame in ANSWERS.items()
    ]
    return [*control, *of_tickets, *publications(), *asked, *layouts, *requests, *answers]
