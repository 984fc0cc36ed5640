"""kvflow, and the client of the page, read and write the vectors of the wire, which are frozen."""

import ctypes
import hashlib
import importlib.util
import json
from collections import deque
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from zmq.utils import z85

from handshake import codec
from handshake.connection import Conversation
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import SUPPORTED, ConnectionFailed, Publication
from handshake.security import ClusterSecurity, verify
from handshake.states import Role
from kvflow.errors import FailureCode, KvflowError
from kvflow.ids import ReaderId, pass_of
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.layout.tracks import Track, tracks_of
from kvflow.leases import tickets
from kvflow.reads.backend import decode_envelope
from kvflow.reads.bounds import OutOfBounds
from kvflow.reads.tcp import opening, wire
from kvflow.reads.tcp.connection import Question, answers_of
from kvflow.reads.tcp.runs import ServedGroup
from kvflow.reads.tcp.stream import rows_of
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import decode
from tests.helpers.loops import looped
from tests.unit.handshake.helpers import EXAMPLES, PRODUCED, PRODUCER, frames_of
from tests.wire.vectors import ASKED, FILES, GOLDEN, PASS_KEY, meant, written

ROOT = Path(__file__).parents[2]

VERSIONS = {"ticket": "kvf3", "control channel": 2, "manifest": 4, "TCP plane": "kvftcp02"}

FROZEN = {
    "contents.json": "4ba83641eb7353bbeb7e5b3f91398c1483a5de9b187fe02f9649223c2e0ad23e",
    "envelopes.json": "2e1a4ee15f4127977af28ab56741d77d11bfaae9e4365698da1b866ab0a3f899",
    "keys.json": "db2c6f7fdc9c6a5abb17ac3cbf874a2653b2c0dc10e00c2cc24501159ea493bd",
    "manifests.json": "032aa906adfeeffdc033f5daa0a728fd1f107007d0db1fa724bbe081f8d991e1",
    "proofs.json": "54b89ad75863f3f1522434e2cc39b4c2294f59338c90823add9487b6745007aa",
    "questions.json": "81bf3ffac2a8b75e603a4855b7cd558470661e0f292247c56354f299baa66f77",
    "refusals.json": "8158ccdbf2eac5db86419ef7593cf15b48d9efe7224c52dd8731ae88b13e547b",
    "tcp.json": "ebbff3774f360186289dc40e51785fd62c5493b6639e4c2cf8bcfedccfef97e4",
    "tickets.json": "2c3b224d718d5a36b5f563e5ad621cf7c6d500d27a7ee1ced71249ed3b8d71d9",
}
"""The SHA-256 of each file, at these versions."""


def load(file):
    return json.loads((GOLDEN / file).read_text())


def cases(file):
    return [pytest.param(each, id=str(each.get("what", each.get("model", at)))) for at, each in enumerate(load(file))]


def unhexed(vector, name):
    return bytes.fromhex(vector[f"{name}_hex"])


def client():
    """Return the client of the page as a module."""
    spec = importlib.util.spec_from_file_location("reader", ROOT / "docs" / "examples" / "reader" / "reader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = client()


def test_the_vectors_are_frozen():
    ours = {
        "ticket": tickets.FORMAT,
        "control channel": SUPPORTED.highest,
        "manifest": MANIFEST_SCHEMA,
        "TCP plane": opening.MAGIC.decode(),
    }
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(GOLDEN.glob("*.json"))}
    assert (ours, found) == (VERSIONS, FROZEN), (
        "A vector, or a version, has changed. Programs in other languages are written against these bytes: to change "
        "them is to change the version of that format, in code, in docs/reference/wire.md and in VERSIONS here. Then "
        "write the vectors again with `python -m tests.wire.vectors`, and their digests into FROZEN."
    )


@looped("file", FILES)
def test_kvflow_writes_each_vector_again(file):
    assert written(FILES[file]()) == (GOLDEN / file).read_text()


def test_kvflow_writes_what_is_to_be_refused_again():
    from tests.wire.refusals import refusals

    assert written(refusals()) == (GOLDEN / "refusals.json").read_text()
    assert len(refusals()) >= 20


@pytest.mark.parametrize("vector", cases("keys.json"))
def test_both_derive_the_keys(vector):
    secret = unhexed(vector, "secret").decode("utf-8", "surrogatepass")
    security, found = ClusterSecurity.from_secret(secret), reader.derive(secret)
    assert security.server.public_key == vector["server_public_hex"]
    assert found.server_public == security.server.public == vector["server_public_z85"].encode()
    assert z85.decode(found.client_private).hex() == vector["client_private_hex"]
    assert z85.decode(found.client_public).hex() == vector["client_public_hex"]
    assert found.ticket == unhexed(vector, "ticket_key")
    assert z85.decode(zmq.curve_public(z85.encode(unhexed(vector, "server_private")))) == unhexed(
        vector, "server_public"
    )


@pytest.mark.parametrize("vector", cases("proofs.json"))
def test_both_prove_the_pass(vector):
    who = msgspec.msgpack.decode(unhexed(vector, "reader"), type=ReaderId)
    pass_ = pass_of(PASS_KEY, who.public_key, who.engine_id, who.rank, who.incarnation, certificate=who.certificate)
    hello = unhexed(vector, "hello")
    found = opening.decode_hello(hello[: opening.HELLO_BYTES])
    assert pass_ == unhexed(vector, "pass")
    assert hello[opening.HELLO_BYTES :] == unhexed(vector, "reader")
    assert (found.digest, found.nbytes) == (
        hashlib.sha256(unhexed(vector, "reader")).digest(),
        len(unhexed(vector, "reader")),
    )
    nonces, certificate = (unhexed(vector, "greeting")[8:], found.nonce), unhexed(vector, "certificate")
    for role, proof in (("reader", found.proof), ("exporter", unhexed(vector, "welcome"))):
        assert opening.proof_of(pass_, role, nonces, certificate) == proof
        assert reader.prove(pass_, role.encode(), b"".join(nonces), certificate) == proof


@looped("vector", cases("tickets.json"))
def test_both_read_a_ticket(vector):
    secret = unhexed(vector, "secret").decode()
    security, params = ClusterSecurity.from_secret(secret), vector["kv_transfer_params"]
    ticket = tickets.Ticket.from_params(params, verify=security.verifies)
    assert ticket.to_params() == params
    theirs = reader.read_ticket(params["kvflow"], reader.derive(secret))
    for grant, told, found in zip(ticket.grants, vector["grants"], theirs, strict=True):
        assert verify(security.ticket_key, unhexed(told, "payload"), unhexed(told, "mac"))
        assert grant.block_ids == tuple(map(tuple, told["block_ids"]))
        assert (grant.slot, grant.epoch, grant.kind) == (told["says"][4], told["says"][5], told["says"][0])
        assert (found.mac, found.slot, found.epoch, found.admitted) == (
            *(unhexed(told, "mac"), grant.slot, grant.epoch, grant.admitted),
        )
        assert found.block_ids == told["block_ids"]


@pytest.mark.parametrize("vector", cases("contents.json"))
def test_digests_of_content_are_chained_as_the_page_says(vector):
    digest, found = hashlib.blake2b(b"kvflow content 1", digest_size=16).digest(), []
    for first in range(0, len(vector["tokens"]), vector["block_size"]):
        tokens = np.array(vector["tokens"][first : first + vector["block_size"]], "<u4").tobytes()
        key = unhexed(vector, "content_key")
        digest = hashlib.blake2b(digest + tokens, digest_size=16, key=key, person=b"tokens").digest()
        found.append(digest.hex())
    assert found == vector["digests_hex"]


@looped("vector", cases("manifests.json"))
def test_both_find_each_element_where_the_engine_has_it(vector):
    publication = Publication.of(unhexed(vector, "payload"), schema=vector["schema"])
    assert publication.digest == unhexed(vector, "digest")
    advertisement = decode(publication, peer="")
    manifest, said = advertisement.manifest, reader.read_publication(msgspec.structs.asdict(publication))["manifest"]
    parts = {
        (index, name, part.role): (part, group.kernel_blocks)
        for index, group in enumerate(manifest.groups)
        for name, part in group.components
    }
    theirs = {
        (index, name, each[0]): reader.Component(*each)
        for index, group in enumerate(said["groups"])
        for name, _, _, components in group["layers"]
        for each in components
    }
    for each in vector["addresses"]:
        key = each["group"], each["layer"], each["role"]
        part, kernel_blocks = parts[key]
        base = manifest.regions[part.region].address
        inner = sum(index * stride for index, stride in zip(each["element"], part.strides, strict=True))
        of_blocks = each["block"] * part.block_stride + each["kernel_block"] * part.kernel_stride
        assert base + part.offset + of_blocks + inner == each["address"], each
        starts, nbytes, stride, times = theirs[key].pieces(kernel_blocks)
        pieces = [start + index * stride for start in starts for index in range(times)]
        number = np.ravel_multi_index((each["kernel_block"], *each["element"]), (kernel_blocks, *part.extents))
        piece, byte = divmod(int(number) * part.item_bytes, nbytes)
        assert base + each["block"] * part.block_stride + pieces[piece] + byte == each["address"], each


@looped("vector", cases("manifests.json"))
def test_each_element_lies_in_the_stretch_that_the_client_asks_for(vector):
    advertisement = decode(Publication.of(unhexed(vector, "payload"), schema=vector["schema"]), peer="")
    layout = decode_envelope(advertisement.planes["tcp"], transport="tcp").blob
    assert layout == wire.encode_layout(tracks_of(advertisement.manifest))
    groups = [ServedGroup(tracks) for tracks in tracks_of(advertisement.manifest)]
    manifest = meant(vector["says"])["manifest"]
    for each in vector["addresses"]:
        rows = vector["layout"][1][each["group"]]
        layers = {layer[0]: layer[3] for layer in manifest["groups"][each["group"]]["layers"]}
        (part,) = [reader.Component(*found) for found in layers[each["layer"]] if found[0] == each["role"]]
        region = manifest["regions"][part.region]
        start = each["address"] - region["address"] - each["block"] * part.block_stride
        stretch, offset = reader.stretch_of(rows, region, start, part.item_bytes)
        run = wire.RUN.pack(stretch, each["block"], 1, offset, part.item_bytes, 0, 1)
        assert groups[each["group"]].resolve(run).starts == [each["address"]]


@looped("vector", cases("envelopes.json"))
def test_a_message_is_read_and_written_again(vector):
    frame = unhexed(vector, "frame")
    found = codec.decode([frame], DEFAULT_LIMITS.frame_bytes_max)
    assert found == EXAMPLES[vector["what"]]
    assert codec.encode(found, DEFAULT_LIMITS.frame_bytes_max) == [frame]
    assert msgspec.msgpack.decode(frame[1:]) == meant(vector["says"])


@looped("vector", cases("questions.json"))
def test_a_question_and_an_answer_are_read_and_written_again(vector):
    kind = questions.PeerQuestion | questions.PeerAnswer
    found = msgspec.msgpack.decode(unhexed(vector, "encoded"), type=kind)
    assert found == ASKED[vector["what"]]
    assert questions.encode(found) == unhexed(vector, "encoded")
    assert msgspec.msgpack.decode(unhexed(vector, "encoded")) == meant(vector["says"])


@pytest.mark.parametrize("vector", load("tcp.json")["requests"], ids=lambda vector: vector["what"])
def test_a_request_over_tcp_is_read_and_written_again(vector):
    frame, said = unhexed(vector, "frame"), vector["says"]
    found = wire.decode_request(frame)
    assert (found.slot, found.epoch, found.group) == (said["slot"], said.get("epoch", 0), said.get("group", 0))
    assert len(frame) == wire.REQUEST.size + found.nbytes
    body = frame[wire.REQUEST.size :]
    assert body == unhexed(said, "mac") if found.kind == wire.LEASE else True
    assert [list(run) for run in wire.RUN.iter_unpack(body)] == said["runs"] if found.kind == wire.READ else True


class Answered:
    """A connection that awaits the answer to one read; ``said``: what it has been told."""

    def __init__(self, nbytes, epoch):
        self.frame, self.begun, self.said = bytearray(wire.ANSWER.size), False, []
        self.frame_row = rows_of(self.frame).rows().copy()
        target = bytearray(nbytes)
        self.owed = deque([Question(b"", self.answered, epoch, targets=lambda: iter([rows_of(target)]), nbytes=nbytes)])
        self._answers = answers_of(self)
        next(self._answers)

    def answered(self, value, failure=None):
        self.owed.popleft()
        self.said.append((value, failure))

    def hear(self, frame):
        self.frame[:] = frame[: wire.ANSWER.size]
        filling = next(self._answers)
        if filling is not None and len(frame) > wire.ANSWER.size:
            address, nbytes = filling.rows()[0].tolist()
            ctypes.memmove(address, frame[wire.ANSWER.size :], nbytes)
            next(self._answers)


def test_answers_over_tcp_are_understood():
    answers = {each["what"]: each for each in load("tcp.json")["answers"]}
    held = answers["DONE"]["value"]
    whole = Answered(answers["PIECE"]["value"], held)
    whole.hear(unhexed(answers["PIECE"], "frame"))
    whole.hear(unhexed(answers["DONE"], "frame"))
    ended, refused = Answered(16, held), Answered(16, held)
    ended.hear(unhexed(answers["ENDED"], "frame"))
    refused.hear(unhexed(answers["REFUSED"], "frame"))
    assert (whole.said, ended.said) == ([(held, None)], [(answers["ENDED"]["value"], None)])
    ((_, failure),) = refused.said
    assert failure.reason.detail == answers["REFUSED"]["value"]


# What is refused.


def refused_control(vector):
    """Return the code of the refusal that a server sends."""
    server = Conversation(Role.SERVER, PRODUCER, PRODUCED, limits=DEFAULT_LIMITS, now=0.0)
    for before in {"nothing": [], "hello": ["hello"], "publish": ["hello", "publish"]}[vector["after"]]:
        server.receive(frames_of(EXAMPLES[before]), 0.0)
    server.receive([bytes.fromhex(each) for each in vector["frames_hex"]], 0.0)
    assert isinstance(server.ending, ConnectionFailed)
    last = codec.decode(server.take_outgoing()[-1], DEFAULT_LIMITS.frame_bytes_max)
    assert last.code == server.ending.code
    return last.code


def refused_ticket(vector):
    security = ClusterSecurity.from_secret(unhexed(vector, "secret").decode())
    with pytest.raises(KvflowError) as caught:
        tickets.Ticket.from_params(vector["kv_transfer_params"], verify=security.verifies)
    return caught.value.code


def refused_publication(vector):
    publication = Publication.of(unhexed(vector, "payload"), schema=vector["schema"])
    assert publication.digest == unhexed(vector, "digest")
    with pytest.raises(KvflowError) as caught:
        decode(publication, peer="")
    return caught.value.code


def refused_question(vector):
    with pytest.raises(KvflowError) as caught:
        questions.decode_question(unhexed(vector, "encoded"), peer="")
    return caught.value.code


def refused_layout(vector):
    with pytest.raises(ValueError):  # noqa: PT011 - the backend maps all of them
        wire.decode_layout(unhexed(vector, "encoded"))
    return FailureCode.METADATA_INVALID


def refused_request(vector):
    frame = unhexed(vector, "frame")
    try:
        wire.decode_request(frame)
    except wire.BadFrame:
        return "closed"
    (address, _, _, span, stride, _) = vector["stretches"][0]
    group = ServedGroup([Track(address, stride, span, vector["num_blocks"])])
    with pytest.raises(OutOfBounds):
        group.resolve(frame[wire.REQUEST.size :])
    return "refused"


def refused_answer(vector):
    with pytest.raises(wire.BadFrame):
        Answered(vector["nbytes"], vector["epoch"]).hear(unhexed(vector, "frame"))
    return "protocol_violation"


@looped("vector", cases("refusals.json"))
def test_what_must_be_refused_is_refused_with_its_code(vector):
    assert globals()[f"refused_{vector['where']}"](vector) == vector["code"]


SIGNED_BY_A_MEMBER = {
    "an epoch that is text",
    "fewer numbers of tokens than groups",
    "no ranks",
    "one rank in two grants",
}
"""What the client does not check: it needs the secret to be made."""


@looped(
    "vector",
    [each for each in load("refusals.json") if each["where"] == "ticket" and each["what"] not in SIGNED_BY_A_MEMBER],
)
def test_the_client_refuses_tickets_as_kvflow_does(vector):
    with pytest.raises(reader.Failed) as caught:
        reader.read_ticket(vector["kv_transfer_params"]["kvflow"], reader.derive(unhexed(vector, "secret").decode()))
    assert caught.value.args[0] == vector["code"]


UNCHECKED = {"elements that share bytes", "a TCP plane without an address", "an epoch table that is cut"}
"""What the client takes from a producer: it harms its own read."""


@pytest.mark.parametrize(
    "vector",
    [each for each in load("refusals.json") if each["where"] == "publication" and each["what"] not in UNCHECKED],
    ids=lambda each: each["what"],
)
def test_the_client_refuses_publications_as_kvflow_does(vector):
    said = {"schema": vector["schema"], "payload": unhexed(vector, "payload"), "digest": unhexed(vector, "digest")}
    with pytest.raises(reader.Failed) as caught:
        reader.read_publication(said)
    assert caught.value.args[0] == vector["code"]


def test_the_client_expands_no_more_blocks_than_a_ticket_may_have():
    assert reader.expand([7, -100]) == list(range(7, 107))
    with pytest.raises(reader.Failed, match="more than 2097152 blocks"):
        reader.expand([7, -(2**31)])
