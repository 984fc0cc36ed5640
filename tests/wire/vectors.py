"""``python -m tests.wire.vectors``: write the vectors of the wire, ``tests/golden/wire/*.json``.

They are frozen: other programs are written against them. To write them again is to change a version of the wire, which
``test_vectors.py`` explains. Bytes are hexadecimal, in fields whose names end with ``_hex``, and in ``{"hex": ...}``
where a value of MessagePack is told.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

import kvflow
from handshake import codec
from handshake.messages import PUBLICATION_BYTES_MAX
from handshake.security import ClusterSecurity, sign
from kvflow.contents import Contents, TokenIds
from kvflow.ids import ABSENT, ReaderId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.manifest import Manifest
from kvflow.layout.tracks import tracks_of
from kvflow.leases.tickets import MAC_BYTES, Content, Grant, LeaseName, RankAddress, Ticket, join_tickets
from kvflow.reads.backend import Envelope, encode_envelope
from kvflow.reads.tcp import opening, wire
from kvflow.reads.tcp.certificates import draw_identity
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import Advertisement, encode
from tests.unit.handshake.helpers import EXAMPLES

GOLDEN = Path(__file__).parents[1] / "golden" / "wire"
SECRETS = (
    "the secret of the vectors",
    "sixteen letters.",
    "nicht geheim: ä, ö, ü, 鍵",
    "not utf-8: \udcff\udc80, from the environment",
)
SECURITY = ClusterSecurity.from_secret(SECRETS[0])
OTHER = ClusterSecurity.from_secret(SECRETS[1])


def told(value: Any) -> Any:
    """Return a value of MessagePack as JSON has it."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if isinstance(value, dict):
        return {key: told(each) for key, each in value.items()}
    return [told(each) for each in value] if isinstance(value, list | tuple) else value


def meant(value: Any) -> Any:
    """Return what ``told`` was given, with lists for tuples."""
    if isinstance(value, dict):
        return bytes.fromhex(value["hex"]) if set(value) == {"hex"} else {key: meant(value[key]) for key in value}
    return [meant(each) for each in value] if isinstance(value, list) else value


def fields_of(encoded: bytes) -> Any:
    """Return what MessagePack says."""
    return told(msgspec.msgpack.decode(encoded))


# --- keys ---


def keys() -> list[dict[str, Any]]:
    """Return what follows from each secret."""
    return [keys_of(secret) for secret in SECRETS]


def keys_of(secret: str) -> dict[str, Any]:
    """Return what follows from one secret."""
    security = ClusterSecurity.from_secret(secret)
    return {
        "secret_hex": secret.encode("utf-8", "surrogatepass").hex(),
        "server_private_hex": security.server.private_key,
        "server_public_hex": security.server.public_key,
        "server_public_z85": security.server.public.decode(),
        "client_private_hex": security.client.private_key,
        "client_public_hex": security.client.public_key,
        "ticket_key_hex": security.ticket_key.hex(),
        "content_key_hex": security.content_key.hex(),
        "fingerprint_hex": security.fingerprint.hex(),
    }


# --- proofs of the TCP plane ---

NONCES = bytes(range(32)), bytes(range(32, 64))
PASS_KEY = bytes(range(64, 96))


def proofs() -> list[dict[str, Any]]:
    """Return an opening without encryption, and with each of two certificates of the exporter, as both sides say it.

    The certificates are drawn once: the ones that are in the file stay.
    """
    file = GOLDEN / "proofs.json"
    drawn = [each["certificate_hex"] for each in json.loads(file.read_text())] if file.exists() else []
    certificates = drawn or ["", *(draw_identity().certificate.hex() for _ in range(2))]
    return [proof(bytes.fromhex(each), bytes.fromhex(certificates[-1])) for each in certificates]


def proof(certificate: bytes, of_reader: bytes) -> dict[str, Any]:
    """Return what both sides say. The reader's certificate is stated only if the exporter has one."""
    key = SECURITY.client.public_key
    reader = ReaderId(key, "decode-0", 3, 32 * "a", of_reader if certificate else b"")
    encoded = msgspec.msgpack.encode(reader)
    pass_ = pass_of(PASS_KEY, key, reader.engine_id, reader.rank, reader.incarnation, certificate=reader.certificate)
    reader_proof, exporter_proof = (
        opening.proof_of(pass_, role, NONCES, certificate) for role in ("reader", "exporter")
    )
    hello = opening._HELLO.pack(NONCES[1], hashlib.sha256(encoded).digest(), reader_proof, len(encoded))
    return {
        "certificate_hex": certificate.hex(),
        "reader": told(msgspec.to_builtins(reader, builtin_types=(bytes,))),
        "reader_hex": encoded.hex(),
        "pass_hex": pass_.hex(),
        "greeting_hex": (opening.MAGIC + NONCES[0]).hex(),
        "hello_hex": (hello + encoded).hex(),
        "reader_proof_hex": reader_proof.hex(),
        "welcome_hex": exporter_proof.hex(),
    }


# --- tickets ---

RANK = RankAddress(0, 32 * "0", "tcp://192.0.2.1:5555")
KEYED = RankAddress(1, 32 * "1", "tcp://[2001:db8::1]:5556", 2**62, 64, SECURITY.server.public_key)
OFFER = Grant(
    engine_id="prefill-0",
    request_id="request-1",
    ranks=(RANK,),
    slot=3,
    epoch=2**61 + 7,
    block_ids=((1, 2), (17,)),
    num_tokens=(24, 24),
    lease_ms=30_000,
    admitted=True,
)
DIGESTS = tuple(hashlib.sha256(bytes([number])).digest()[:16] for number in range(4))
CHAINED = (Content(16, DIGESTS[:2]), Content(0, DIGESTS[2:3]))


def of(**changes: Any) -> Grant:
    """Return the offer with other fields."""
    return msgspec.structs.replace(OFFER, **changes)


GRANTS = {
    "offer": OFFER,
    "offer of two ranks that a mint has signed, with every field": of(
        ranks=(RANK, KEYED),
        admitted=False,
        issued_ms=1_700_000_000_000,
        contents=CHAINED,
        traceparent=f"00-{32 * '1'}-{16 * '2'}-01",
    ),
    "offer with runs and absent blocks": of(
        block_ids=((*range(7, 107), 3, 2), (ABSENT, *range(200, 299))), num_tokens=(1632, 1600)
    ),
    "kept": of(kind="kept", contents=CHAINED),
    "open": of(
        kind="open", num_tokens=(64, 64), block_ids=((), ()), contents=(Content(16, DIGESTS[3:]), Content(0, ()))
    ),
}


def ticket(*grants: Grant, by: ClusterSecurity = SECURITY) -> Ticket:
    """Return a ticket of these grants."""
    signed = tuple(grant.signed(lambda payload: sign(by.ticket_key, payload), by.fingerprint) for grant in grants)
    return Ticket(grants=grants, signed=signed)


def tickets() -> list[dict[str, Any]]:
    """Return a ticket of each kind, and one that joins those of two ranks."""
    made = {what: ticket(grant) for what, grant in GRANTS.items()}
    made["joined offers of two ranks"] = join_tickets([ticket(OFFER), ticket(of(ranks=(KEYED,), slot=4))])
    return [
        {
            "what": what,
            "secret_hex": SECRETS[0].encode().hex(),
            "kv_transfer_params": each.to_params(),
            "grants": [
                {
                    "mac_hex": signed[:MAC_BYTES].hex(),
                    "payload_hex": signed[MAC_BYTES:].hex(),
                    "says": fields_of(signed[MAC_BYTES + 9 :]),
                    "block_ids": grant.block_ids,
                }
                for grant, signed in zip(each.grants, each.signed, strict=True)
            ],
        }
        for what, each in made.items()
    ]


# --- digests of content ---


def contents() -> list[dict[str, Any]]:
    """Return the digests at the ends of the blocks of prompts of tokens alone."""
    of_tokens = Contents({SECURITY.fingerprint: SECURITY.content_key})
    tokens = [7, 0, 2**32 - 1, *range(1000, 1037)]
    return [
        {
            "content_key_hex": SECURITY.content_key.hex(),
            "tokens": tokens,
            "block_size": size,
            "digests_hex": [
                each.hex()
                for each in of_tokens.digests(TokenIds(tokens), [range(-(-len(tokens) // size))], [size], len(tokens))[
                    0
                ]
            ],
        }
        for size in (16, 8, 64)
    ]


# --- manifests ---

BASE = 0x7F0000000000
"""Where the first region of each manifest begins; the others follow at 256 GiB each."""

COMMON = {"block_size": 16, "num_kv_heads": 8, "head_size": 16, "dtype": "bfloat16"}
MLA = kvflow.MLA(block_size=64, head_size=576, dtype="bfloat16")
SSM = (
    kvflow.State("conv_x", (512, 3), "bfloat16", shard_axis=0),
    kvflow.State("ssm", (8, 16, 32), "float32", shard_axis=0),
)

MODELS: dict[str, dict[str, Any]] = {
    "Llama: full attention, layer by layer": {
        "specs": {f"layers.{layer}": kvflow.FullAttention(**COMMON) for layer in range(2)},
        "layout": "LBNHC",
    },
    "gpt-oss: sliding windows, packed, rank 1 of 4": {
        "specs": {
            "layers.0": kvflow.SlidingWindow(**COMMON, window=32),
            "layers.1": kvflow.FullAttention(**COMMON),
        },
        "layout": "BLHNC",
        "shard": kvflow.Shard(tp_rank=1, tp_size=4),
    },
    "DeepSeek-V3: latent vectors, tokens of rank 1 of 2": {
        "specs": {f"layers.{layer}": MLA for layer in range(2)},
        "layout": "BLNHC",
        "shard": kvflow.Shard(tp_rank=1, tp_size=2, dcp_rank=1, dcp_size=2, dcp_interleave=1),
    },
    "Nemotron-H: states beside attention, rank 0 of 2": {
        "specs": {
            "layers.0": kvflow.Mamba(block_size=16, states=SSM),
            "layers.1": kvflow.FullAttention(**COMMON),
        },
        "layout": "BLHNC",
        "shard": kvflow.Shard(tp_rank=0, tp_size=2),
    },
    "Llama 4: chunks, float8, keys and values apart, heads outside of tokens": {
        "specs": {
            "layers.0": kvflow.ChunkedLocal(**COMMON | {"dtype": "float8_e4m3fn"}, chunk=64),
            "layers.1": kvflow.FullAttention(**COMMON | {"dtype": "float8_e4m3fn"}),
        },
        "layout": "LBHNC",
        "kv": "split",
    },
    "Gemma 3: kernel blocks of 16 in blocks of 32": {
        "specs": {
            "layers.0": kvflow.SlidingWindow(**COMMON | {"block_size": 32}, kernel_block_size=16, window=64),
            "layers.1": kvflow.FullAttention(**COMMON | {"block_size": 32}, kernel_block_size=16),
        },
        "layout": "LBNHC",
    },
}


def manifests() -> list[dict[str, Any]]:
    """Return what workers of six models publish, and where some elements of their caches lie."""
    return [manifest(model) for model in MODELS]


def manifest(model: str) -> dict[str, Any]:
    """Return one publication. The addresses are those of elements of the views that an engine writes into."""
    cache = kvflow.allocate(num_blocks=6, **MODELS[model])
    here = cache.manifest()
    regions = tuple(
        msgspec.structs.replace(region, address=BASE + (number << 38)) for number, region in enumerate(here.regions)
    )
    there = Manifest(
        here.num_blocks,
        regions,
        here.groups,
        kvflow.Provenance(model=model.partition(":")[0], engine_id="prefill-0", incarnation=32 * "0"),
    )
    layout = wire.encode_layout(tracks_of(there))
    advertisement = Advertisement(
        manifest=there,
        epochs=Region(BASE + (1 << 44), 8 * 64),
        planes={
            "tcp": encode_envelope(Envelope("tcp", f"prefill-0/0/{32 * '0'}/{SECURITY.server.public_key}", layout))
        },
        data_endpoint="tcp://192.0.2.1:6000",
    )
    publication = encode(advertisement)
    return {
        "model": model,
        "schema": publication.schema,
        "digest_hex": publication.digest.hex(),
        "payload_hex": publication.payload.hex(),
        "says": fields_of(publication.payload),
        "layout": fields_of(layout),
        "addresses": [each for index in range(len(here.groups)) for each in addresses(cache, here, there, index)],
    }


def addresses(cache: kvflow.KVCache, here: Manifest, there: Manifest, index: int) -> list[dict[str, Any]]:
    """Return where the first, a middle and the last element of each component of a group lie, in two blocks."""
    found = []
    group = here.groups[index]
    for name, part in group.components:
        view = cache.component(name, part.role)
        kernel_blocks = group.kernel_blocks
        for block, kernel_block in ((0, 0), (5, kernel_blocks - 1)):
            # Kernel blocks count as blocks, or are an axis behind them.
            of_block = (
                view[block, kernel_block]
                if view.dim() > len(part.extents) + 1
                else view[block * kernel_blocks + kernel_block]
            )
            for element in (
                [0] * len(part.extents),
                [each // 2 for each in part.extents],
                [each - 1 for each in part.extents],
            ):
                offset = of_block[tuple(element)].data_ptr() - here.regions[part.region].address
                found.append(
                    {
                        "group": index,
                        "layer": name,
                        "role": part.role,
                        "block": block,
                        "kernel_block": kernel_block,
                        "element": element,
                        "address": there.regions[part.region].address + offset,
                    }
                )
    return found


# --- messages ---


def envelopes() -> list[dict[str, Any]]:
    """Return a frame of each message of the control channel."""
    return [
        {"what": what, "says": fields_of(frame[1:]), "frame_hex": frame.hex()}
        for what, message in EXAMPLES.items()
        for frame in codec.encode(message, PUBLICATION_BYTES_MAX)
    ]


ASKED = {
    "ask_held": questions.AskHeld(DIGESTS, wait_ms=1500, at_least=2),
    "ask_settled": questions.AskSettled((LeaseName(3, 2**61 + 7, bytes(range(32))),), (2, 0), above=48, wait_ms=10_000),
    "ask_kept": questions.AskKept(since=17, begun=3, wait_ms=30_000),
    "withdraw": questions.Withdraw(5),
    "held": questions.AnswerHeld(ticket(GRANTS["kept"]).to_params()["kvflow"], 2),
    "held: nothing": questions.AnswerHeld(),
    "settled": questions.AnswerSettled(
        (
            questions.Settled(48, ((3, 4, 5), ()), sealed=False),
            questions.Settled(49, ((6,), (17, ABSENT)), sealed=True),
            questions.Settled(ended="expired"),
        )
    ),
    "kept": questions.AnswerKept(21, 3, new=DIGESTS[0][:8] + DIGESTS[1][:8], gone=DIGESTS[2][:8], is_all=True),
    "no_room": questions.NoRoom(64 << 20),
}


def asked() -> list[dict[str, Any]]:
    """Return each question and answer."""
    encoded = {what: questions.encode(each) for what, each in ASKED.items()}
    return [{"what": what, "says": fields_of(each), "encoded_hex": each.hex()} for what, each in encoded.items()]


# --- the TCP plane ---

RUNS = ((0, 3, 2, 0, 4096, 0, 1), (5, 4, 1, 128, 64, 256, 16))
REQUESTS = {
    "LEASE": ({"slot": 3, "epoch": 2**61 + 7, "mac_hex": bytes(range(32)).hex()}, (3, 2**61 + 7, bytes(range(32)))),
    "READ": ({"group": 1, "slot": 3, "epoch": 2**61 + 7, "runs": RUNS}, (1, 3, 2**61 + 7, RUNS)),
    "EPOCH": ({"slot": 3}, (3,)),
}
ENCODERS = {"LEASE": wire.encode_lease, "READ": wire.encode_read, "EPOCH": wire.encode_epoch}
ANSWERS = {"PIECE": (wire.PIECE, 9216), "DONE": (wire.DONE, 2**61 + 7), "ENDED": (wire.ENDED, 2**61 + 8)}
WHY = b"block 5 of group 0 is not one of the lease in slot 3"


def tcp() -> dict[str, Any]:
    """Return requests, headers of answers, and where the runs of a request lie by one of the manifests."""
    answers = [
        {"what": what, "value": value, "frame_hex": wire.ANSWER.pack(kind, 0, 0, 0, value).hex()}
        for what, (kind, value) in ANSWERS.items()
    ]
    refused = wire.ANSWER.pack(wire.REFUSED, 0, 0, 0, len(WHY)) + WHY
    return {
        "requests": [
            {"what": what, "says": said, "frame_hex": ENCODERS[what](*arguments).hex()}
            for what, (said, arguments) in REQUESTS.items()
        ],
        "answers": [*answers, {"what": "REFUSED", "value": WHY.decode(), "frame_hex": refused.hex()}],
    }


FILES = {
    "keys.json": keys,
    "proofs.json": proofs,
    "tickets.json": tickets,
    "contents.json": contents,
    "manifests.json": manifests,
    "envelopes.json": envelopes,
    "questions.json": asked,
    "tcp.json": tcp,
}


def written(vectors: Any) -> str:
    """Return the text of a file of vectors: one a line."""
    if isinstance(vectors, dict):
        return json.dumps(vectors, indent=1) + "\n"
    return "[\n" + ",\n".join(json.dumps(each) for each in vectors) + "\n]\n"


if __name__ == "__main__":
    from tests.wire.refusals import refusals

    GOLDEN.mkdir(exist_ok=True)
    for file, make in {**FILES, "refusals.json": refusals}.items():
        (GOLDEN / file).write_text(written(make()))
