"""What takes bytes from outside, alone and at full speed: each target takes anything, and raises nothing.

A target returns a word for what became of the input. Its own errors are caught; whatever else is raised is a finding.
"""

import json
import logging
import time
from contextlib import suppress
from functools import partial

import msgspec
import numpy as np

from handshake import Publication, codec
from handshake.connection import Conversation
from handshake.errors import RemoteProtocolError
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import Ask, ConnectionFailed
from handshake.states import Progress, Role
from kvflow.errors import KvflowError, PlanUnsound, ProtocolViolation
from kvflow.integrations.vllm.messages import Fail, Load
from kvflow.integrations.vllm.params import ticket_chars_max
from kvflow.layout.component import Region
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.layout.tracks import Track
from kvflow.leases.blocks import check_block_ids
from kvflow.leases.table import LeaseReader, LeaseState
from kvflow.leases.tickets import FORMAT, HEAD_BYTES, MAC_BYTES, MARK, LeaseName, RankAddress, Ticket
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import plan_transfer
from kvflow.reads.backend import Envelope, decode_envelope, encode_envelope
from kvflow.reads.bounds import OutOfBounds, check_rows
from kvflow.reads.nixl.metadata import inspect
from kvflow.reads.tcp import wire as tcp_wire
from kvflow.reads.tcp.runs import ServedGroup, SourceList
from kvflow.rendezvous import questions
from kvflow.rendezvous.endpoint import Advertisement, decode
from kvflow.rendezvous.questions import (
    AnswerHeld,
    AnswerKept,
    AnswerSettled,
    AskHeld,
    AskKept,
    AskSettled,
    NoRoom,
    Settled,
)
from kvflow.routing import read_params
from kvflow.tools.cli.inspect import lines_of as report_lines
from kvflow.worker.connections import PeerState
from kvflow.worker.destinations import Quarantined
from kvflow.worker.snapshot import Snapshot, decode_inspection, encode_inspection
from tests.integration.shapes import Shape
from tests.simulation.tickets import packed, payload_of
from tests.unit.handshake.helpers import CONSUMED, CONSUMER
from tests.unit.kvflow.integrations.vllm_like import (
    TOKENS_MAX,
    FullAttentionSpec,
    SlidingWindowSpec,
    blocks_of,
    new_request,
    side,
)
from tests.unit.kvflow.worker.helpers import PULL

from .corpus import AGENT, METADATA
from .frames import EVERY, SEEDS
from .liar import TEXTS
from .mutations import Mutator

logging.getLogger("vllm").addHandler(logging.NullHandler())  # each refusal is a line, and nobody reads thousands

MANIFEST = Shape().build().manifest()
PLAN = plan_transfer(MANIFEST, MANIFEST)
ADVERTISED = msgspec.msgpack.encode(
    Advertisement(
        manifest=MANIFEST,
        epochs=Region(address=4096, nbytes=512),
        planes={"nixl": encode_envelope(Envelope("nixl", AGENT, METADATA))},
    )
)
REPORT = encode_inspection(
    "open",
    9.0,
    lambda limit: Snapshot(
        leases=1,
        pulls=1,
        quarantined=(Quarantined(1, "peer_lost", 2.0, 3),),
        rejected={"key_unknown": 1},
        open_pulls=(PULL,)[:limit],
        held_leases=(
            LeaseState(
                request_id="r",
                age_s=1.0,
                expires_in_s=2.0,
                num_blocks=3,
                readers=(LeaseReader(engine_id="d", num_ranks=2, released=1),),
            ),
        ),
        producers=(PeerState(name="prefill-0/0/a", state="connected", software="kvflow", transport="tcp"),),
        readers=(PeerState(name="decode-0/0/a", state="connected", rtt_s=0.1),),
    ),
)
ADDRESS = RankAddress(rank=0, incarnation="a" * 32, endpoint="tcp://127.0.0.1:1", slots=8)


def take_frame(data):
    """Decode, then say it to both ends of a connection in every state that a peer can bring about."""
    try:
        codec.decode([data], DEFAULT_LIMITS.frame_bytes_max)
        word = "valid"
    except RemoteProtocolError:
        word = "invalid"
    for role, said in _BEFORE:
        connection = Conversation(role, CONSUMER, CONSUMED, limits=DEFAULT_LIMITS, now=0.0)
        if role is Role.CLIENT:
            connection.greet(0.0)
        for frame in said:
            connection.receive([frame], 0.0)
        if (role, connection.state) == (Role.CLIENT, Progress.READY):
            connection.send(Ask(nonce=7, question=b"a question"))
        assert connection.state is not Progress.CLOSED
        connection.receive([data], 1.0)
        for frames in connection.take_outgoing():
            codec.decode(frames, DEFAULT_LIMITS.frame_bytes_max)
        failed = isinstance(connection.ending, ConnectionFailed)
        assert failed or word == "valid", f"{role} took what cannot be decoded"
        deadline = connection.next_deadline()
        connection.handle_deadline(1.0 if deadline is None else deadline)
    return word


_HELLO, _WELCOME, _PUBLISH = (SEEDS[name] for name in ("hello", "welcome", "publish"))
_BEFORE = (
    (Role.SERVER, ()),
    (Role.SERVER, (_HELLO,)),
    (Role.SERVER, (_HELLO, _PUBLISH)),
    (Role.CLIENT, ()),
    (Role.CLIENT, (_WELCOME,)),
    (Role.CLIENT, (_WELCOME, _PUBLISH)),
)


def take_manifest(data):
    """Read a publication, plan with it, and read its metadata. That a plan is unsound is a defect of the planner."""
    try:
        theirs = decode(Publication.of(data, schema=MANIFEST_SCHEMA), peer="a liar")
        decode_envelope(theirs.planes.get("nixl", b""), transport="nixl", agent=AGENT)
        plan_transfer(theirs.manifest, MANIFEST)
    except PlanUnsound:
        raise
    except (KvflowError, ValueError) as error:
        return type(error).__name__
    return "planned"


def take_report(data):
    """Read what a worker has told about itself, and show it as ``kvflow inspect`` does."""
    try:
        inspection = decode_inspection(data, peer="a liar")
    except KvflowError as error:
        return type(error).__name__
    for line in report_lines(inspection):
        assert line.isprintable(), f"a terminal would obey {line!r}"
    return "taken"


def take_metadata(data):
    """Read what NIXL would be given."""
    for encoded in (data, encode_envelope(Envelope("nixl", AGENT, data))):
        try:
            envelope = decode_envelope(encoded, transport="nixl")
            inspect(envelope.blob, envelope.agent)
        except ValueError:
            continue
        return "taken"
    return "refused"


def take_ticket(data):
    """Read what a router brought, as if the cluster had signed it."""
    try:
        ticket = Ticket.from_params(json.loads(data), verify=lambda _payload, _mac: True)
        list(ticket.members())
    except (KvflowError, ValueError) as error:  # what is no JSON does not reach us
        return type(error).__name__
    return "signed"


def take_request(data):
    """Take a request of vLLM's through its life: of a client that nobody has let in, of a member, and of one that lies.

    A member's ticket is signed; a liar's is believed to hold the request's own tokens, too.
    """
    try:
        params = json.loads(data)
    except (ValueError, RecursionError):  # what is no JSON does not reach us
        return "no JSON"
    words = []
    for signed, believed in ((False, False), (True, False), (True, True)):
        engine = side(FullAttentionSpec(), SlidingWindowSpec(block_size=32))
        limit = ticket_chars_max([16, 32], TOKENS_MAX)
        if signed:
            engine._read_params = partial(
                read_params, read=partial(Ticket.from_params, verify=lambda _payload, _mac: True), chars_max=limit
            )
        if believed:
            engine._contents.require = lambda _request, _ticket, chains: None
        words.append(_live(engine, new_request(params, 64)))
    assert words[0] != "loads", "nobody has signed it"
    return words[2]


def _live(engine, request):
    engine.on_new_request(request)
    wanted, waits = engine.matched(request, 0)
    assert 0 <= wanted <= request.num_prompt_tokens
    assert waits is bool(wanted)
    room = -(-wanted // 16)
    engine.allocated(request, blocks_of(range(1, room + 1), range(room + 1, 2 * room + 1)), wanted)
    orders = engine.take_commands()
    engine.on_finished(request, ([1], [2]))
    assert not (engine.take_counters() or {}).get("defects"), "an exception that nobody has foreseen"
    named = [block for order in orders if isinstance(order, Load) for ids in order.block_ids for block in ids]
    assert len(named) <= 2 * (TOKENS_MAX // 16)
    found = [order for order in orders if isinstance(order, Fail | Load)]
    assert len(found) == bool(wanted), "vLLM waits for a request until it is reported, and for no other"
    return found[0].code if found and isinstance(found[0], Fail) else "loads" if found else "nothing"


def take_blocks(data):
    """Check lists of blocks and pair their units."""
    try:
        lists = json.loads(data)
    except (ValueError, RecursionError):
        return "no JSON"
    try:
        ids = check_block_ids(lists, num_blocks=MANIFEST.num_blocks, aliases=(0, 0), unique=True)
        for group, target in zip(PLAN.groups, ids, strict=True):
            pair_units(group, target, target, num_tokens=8)
    except KvflowError as error:
        return type(error).__name__
    return "paired"


TCP_TRACKS = tuple(Track((1 << 40) + at * 256, 512, 256, 64) for at in range(2))
TCP_RUN = [0, 0, 2, 0, 256, 0, 1]
TCP_FRAMES = (
    tcp_wire.encode_lease(3, 7, b"m" * tcp_wire.MAC_BYTES),
    tcp_wire.encode_read(0, 3, 7, [TCP_RUN]),
    tcp_wire.encode_read(0, 3, 7, [[1, 5, 3, 16, 8, 32, 4]] * 40),
    tcp_wire.encode_epoch(3),
)
TCP_LAYOUT = tcp_wire.encode_layout([TCP_TRACKS, TCP_TRACKS[:1]])
TCP_LIST = check_rows(np.array([[(1 << 40) + at * 256, 256, 0, 512, 64] for at in range(2)]))


def take_tcp(data):
    """Read what a reader says to the TCP data plane, as the exporter does before it sends a byte."""
    size = tcp_wire.REQUEST.size
    try:
        request = tcp_wire.decode_request(data[:size].ljust(size, b"\0"))
        assert request.nbytes <= tcp_wire.FRAME_BYTES_MAX
        if len(data) < size + request.nbytes:
            return "half"
        if request.kind == tcp_wire.READ:
            found = ServedGroup(TCP_TRACKS).resolve(data[size : size + request.nbytes])
            starts, lengths, blocks = (np.array(each) for each in (found.starts, found.lengths, found.blocks))
            first, last = int(starts.min()), int((starts + lengths).max())
            assert TCP_TRACKS[0].address + 512 * int(blocks.min()) <= first
            assert last <= TCP_TRACKS[0].address + 512 * (int(blocks.max()) + 1)
    except (tcp_wire.BadFrame, OutOfBounds) as error:
        return type(error).__name__
    return "served"


def take_layout(data):
    """Read what a producer publishes, and look up a list in it, as a reader does."""
    try:
        layout = tcp_wire.decode_layout(data)
        SourceList(TCP_LIST, layout.groups[0] if layout.groups else (), layout.num_blocks, "DRAM")
    except (ValueError, OutOfBounds) as error:
        return type(error).__name__
    return "found"


def _json(value):
    return json.dumps(value).encode()


_HEAD = MARK.ljust(HEAD_BYTES, b"f")
_TICKET = {
    "kind": "offer",
    "engine_id": "e",
    "request_id": "r",
    "ranks": [msgspec.structs.asdict(ADDRESS)],
    "slot": 1,
    "epoch": 77,
    "block_ids": [[0, 1], [2, 3]],
    "num_tokens": [8, 8],
    "lease_ms": 30_000,
    "admitted": True,
    "issued_ms": 1,
    "contents": [{"block_size": 4, "digests": [b"a", b"b"]}, {"block_size": 4, "digests": [b"b"]}],
    "traceparent": None,
}
_RUNS = {"block_ids": [[0, -65], [70, -64, -1]], "num_tokens": [260, 260]}


def _draw_frame(mutator):
    frame = mutator.draw.choice(EVERY)
    return frame[:1] + mutator.of_packed(frame[1:], mutator.draw.choice(EVERY)[1:])


def _draw_metadata(mutator):
    return mutator.of_bytes(METADATA, METADATA)


def _draw_ticket(mutator):
    """Change what is signed, or the text around it, or the JSON around that."""
    signed = _draw_signed(mutator, _TICKET | (_RUNS if mutator.draw.random() < 0.3 else {}), 0.8)
    text = ".".join([FORMAT, *[packed(bytes(MAC_BYTES) + signed)] * mutator.draw.choice((1, 1, 2))])
    if mutator.draw.random() < 0.1:
        text = mutator.of_bytes(text.encode(), text.encode()).decode("latin-1")
    value = {"kvflow": text}
    drawn = _json(value if mutator.draw.random() < 0.9 else mutator.of_value(value, TEXTS))
    return drawn if mutator.draw.random() < 0.95 else mutator.of_bytes(drawn, drawn)


def _draw_signed(mutator, fields, share):
    """Draw a payload: changed, in such a share of the cases."""
    payload = payload_of(fields, _HEAD)[HEAD_BYTES:]
    if mutator.draw.random() < share:
        payload = mutator.of_packed(payload, payload)
    return _HEAD + payload


def _draw_request(mutator):
    """A ticket that is changed as above, often in its numbers, and what stands beside it."""
    fields = dict(_TICKET)
    extremes = (0, 1, 2, 63, 64, 65, TOKENS_MAX, TOKENS_MAX + 1, 2**20, 2**31 - 1, 2**40, 2**63, -1, -(2**20))
    for name in ("num_tokens", "block_ids", "contents"):
        drawn = [mutator.draw.choice(extremes) for _ in range(mutator.draw.choice((1, 2, 2, 2, 300)))]
        if mutator.draw.random() < 0.3:
            fields[name] = [drawn] * len(drawn) if name == "block_ids" else drawn
    if mutator.draw.random() < 0.3:
        fields["num_tokens"] = [mutator.draw.choice(extremes)] * 2
    if mutator.draw.random() < 0.3:
        size = mutator.draw.choice(extremes)
        fields["contents"] = [{"block_size": size, "digests": [b"a" * 16, b"b" * 16]}] * 2
    signed = _draw_signed(mutator, fields, 0.3)
    params = {"do_remote_prefill": True, "kvflow": f"{FORMAT}.{packed(bytes(MAC_BYTES) + signed)}"}
    beside = {"remote_port": 5000, "remote_host": "10.0.0.1", "remote_block_ids": [[1, 2]], "tp_size": 1}
    return _json(mutator.of_value(params | beside, TEXTS) if mutator.draw.random() < 0.3 else params)


def take_question(data):
    """Read what a member asks, and what a worker answers."""
    with suppress(ProtocolViolation):
        question = questions.decode_question(data, peer="a liar")
        if question is None:
            return "of a newer release"
        assert questions.decode_question(questions.encode(question), peer="a liar") == question
        return "asked"
    try:
        questions.decode_answer(data, peer="a liar")
    except KvflowError:
        try:
            questions.decode_settled(data, peer="a liar")
        except KvflowError:
            try:
                questions.decode_kept(data, peer="a liar")
            except KvflowError as error:
                return type(error).__name__
    return "answered"


QUESTIONS = (
    questions.encode(AskHeld(digests=(b"x" * 16, b"y" * 16, b"z"), wait_ms=5, at_least=1)),
    questions.encode(AnswerHeld(ticket="kvf3.AAAA", count=2)),
    questions.encode(AskSettled((LeaseName(1, 7, b"m" * 32), LeaseName(2, 9)), known=(3, 0), above=64, wait_ms=5)),
    questions.encode(AnswerSettled((Settled(64, ((1, 2), ()), sealed=True), Settled(ended="revoked")))),
    questions.encode(AskKept(since=1 << 40, begun=7, wait_ms=5)),
    questions.encode(AnswerKept(1 << 40, 7, b"n" * 16, b"g" * 8, is_all=True)),
    questions.encode(NoRoom(limit=1 << 26)),
)

TARGETS = {
    "frame": (take_frame, _draw_frame),
    "question": (take_question, lambda mutator: mutator.of_packed(*mutator.draw.sample(QUESTIONS, 2))),
    "manifest": (take_manifest, lambda mutator: mutator.of_packed(ADVERTISED, ADVERTISED)),
    "report": (take_report, lambda mutator: mutator.of_packed(REPORT, REPORT)),
    "metadata": (take_metadata, _draw_metadata),
    "ticket": (take_ticket, _draw_ticket),
    "request": (take_request, _draw_request),
    "tcp": (
        take_tcp,
        lambda mutator: mutator.of_bytes(mutator.draw.choice(TCP_FRAMES), mutator.draw.choice(TCP_FRAMES)),
    ),
    "layout": (take_layout, lambda mutator: mutator.of_packed(TCP_LAYOUT, TCP_LAYOUT)),
    "blocks": (take_blocks, lambda mutator: _json(mutator.of_value([[0, 1], [2, 3]], TEXTS))),
}
"""Name -> what takes the bytes, and what draws them."""


def drawn(name, seed, number):
    """Draw one input of a target."""
    return TARGETS[name][1](Mutator(f"{seed}/{name}/{number}"))


class Finding(Exception):
    """A target raised something else than its own errors."""


def run(name, seed, numbers):
    """Give a target its inputs; return how often it said what, and the seconds that it took.

    Raises:
        Finding: says the input, and how to draw it again.
    """
    take, words, begun_at = TARGETS[name][0], {}, time.monotonic()
    for number in numbers:
        data = drawn(name, seed, number)
        try:
            word = take(data)
        except Exception as error:
            again = f"python -m tests.fuzz --seed {seed} --target {name} --number {number}"
            raise Finding(f"{name}: {error!r} for {data.hex()}\nagain: {again}") from error
        words[word] = words.get(word, 0) + 1
    return words, time.monotonic() - begun_at
