"""Read a cache from a producer that speaks kvflow's wire. Written from docs/reference/wire.md; it imports no kvflow.

``reader.py read`` takes ``kv_transfer_params`` as JSON, one line on standard input, and writes what it reads to
``--out``: for each layer and role one uint8 array [block, head, token, byte of the content], of all ranks together.
``reader.py find ENDPOINT DIGEST...`` asks a producer for what it keeps of chained digests in hexadecimal.
The secret is the variable KVFLOW_CLUSTER_SECRET. Each line of the output is a JSON object.
"""

import argparse
import base64
import hashlib
import hmac
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

import msgpack
import numpy as np
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

TICKET_FORMAT, SCHEMA, GREETING = "kvf3", 4, b"kvftcp02"
REQUEST, RUN, ANSWER = struct.Struct("<BBHIIIQ"), struct.Struct("<7q"), struct.Struct("<BBHIQ")
LEASE, READ, EPOCH, PIECE, DONE, ENDED, REFUSED = 1, 2, 3, 1, 2, 3, 4
PIECES_MAX, PIECE_BYTES_MAX, PATIENCE_S = 8192, 2 << 20, 10.0
BLOCKS_MAX, COMPONENTS_MAX = 2 << 20, 4096
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}  # all other types have one byte


class Failed(Exception):
    """The read ends here: a code, as kvflow names it, and why."""


class Keys(NamedTuple):
    """What follows from the cluster secret. CURVE keys are Z85, as ZeroMQ takes them."""

    server_public: bytes
    client_public: bytes
    client_private: bytes
    ticket: bytes


def derive(secret: str) -> Keys:
    """Derive the keys: HKDF with SHA-256, one block of output for each label."""
    pseudorandom = hmac.digest(b"handshake cluster secret v1", secret.encode("utf-8", "surrogatepass"), "sha256")
    labels = (b"curve server", b"curve client", b"ticket")
    server, client, ticket = (hmac.digest(pseudorandom, label + b"\x01", "sha256") for label in labels)
    private = z85.encode(client)
    return Keys(zmq.curve_public(z85.encode(server)), zmq.curve_public(private), private, ticket)


class Grant(NamedTuple):
    """One signed promise of a ticket; a rank is a list: rank, incarnation, endpoint, and what may follow."""

    mac: bytes
    engine_id: str
    request_id: str
    ranks: list[list[Any]]
    slot: int
    epoch: int
    block_ids: list[list[int]]
    admitted: bool


def read_ticket(text: str, keys: Keys) -> list[Grant]:
    """Verify every grant of a ticket before anything of it is decoded."""
    head, *parts = text.split(".")
    if head != TICKET_FORMAT:
        known = head[:3] == "kvf" and head[3:].isdigit()
        raise Failed("release_mismatch" if known else "ticket_invalid", f"the ticket begins with {head[:16]!r}")
    if not 1 <= len(parts) <= 1024 or len(text) > 8 << 20:
        raise Failed("ticket_invalid", "the ticket has no grant, or too many")
    try:
        signed = [base64.b64decode(part + "=" * (-len(part) % 4), b"-_", validate=True) for part in parts]
        if not all(hmac.compare_digest(each[:32], hmac.digest(keys.ticket, each[32:], "sha256")) for each in signed):
            raise Failed("ticket_invalid", "the ticket has a wrong signature")
        return [read_grant(each) for each in signed]
    except (ValueError, TypeError, IndexError) as error:
        raise Failed("ticket_invalid", f"the ticket is malformed: {error}") from error


def read_grant(signed: bytes) -> Grant:
    """Decode one grant, whose MAC is right."""
    if signed[32:33] != b"\x03":
        raise Failed("ticket_invalid", "the ticket is malformed")
    kind, engine, request, ranks, slot, epoch, lists, _tokens, _lease_ms, admitted = msgpack.unpackb(signed[41:])[:10]
    if kind not in ("offer", "kept", "open"):
        raise Failed("release_mismatch", f"the ticket is of the kind {kind!r}")
    return Grant(signed[:32], engine, request, ranks, slot, epoch, [*map(expand, lists)], admitted)


def expand(runs: list[int]) -> list[int]:
    """Return block ids: a number below -1 is one less than minus the ids that follow the one before it."""
    ids: list[int] = []
    for each in runs:
        if len(ids) - min(each, -1) > BLOCKS_MAX:
            raise Failed("ticket_invalid", f"the ticket has more than {BLOCKS_MAX} blocks")
        ids += [each] if each >= -1 else range(ids[-1] + 1, ids[-1] - each)
    return ids


class Control:
    """A connection to a producer's control endpoint, from hello to bye."""

    def __init__(self, endpoint: str, keys: Keys, version: int) -> None:
        self._nonce = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger, self._socket.reconnect_ivl, self._socket.rcvtimeo = 200, -1, int(PATIENCE_S * 1000)
        self._socket.curve_serverkey = keys.server_public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.client_public, keys.client_private
        monitor = self._socket.get_monitor_socket()
        self._socket.connect(endpoint)
        self._await_secured(monitor)
        me = {"engine_id": "reader", "rank": 0, "num_ranks": 1, "incarnation": secrets.token_hex(16), "role": "decode"}
        self.me = [z85.decode(keys.client_public).hex(), me["engine_id"], me["rank"], me["incarnation"], b""]
        self.send("hello", version_min=version, version_max=version, identity=me)
        self.identity = self.receive("welcome")["identity"]
        nothing = {"schema": SCHEMA, "digest": hashlib.sha256(b"").digest(), "payload": b""}
        self.send("publish", publication=nothing, clock_s=time.time())
        self.published = self.receive("publish")

    def _await_secured(self, monitor: "zmq.Socket[bytes]") -> None:
        """Wait until CURVE has succeeded: a producer of another secret just closes the connection."""
        while monitor.poll(int(PATIENCE_S * 1000)):
            event = recv_monitor_message(monitor)["event"]
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                self._socket.disable_monitor()
                return
            if event not in (zmq.Event.CONNECTED, zmq.Event.CONNECT_DELAYED):
                lost = event == zmq.Event.CLOSED
                raise Failed("peer_lost" if lost else "authentication_failed", "nobody listens, or has this secret")
        raise Failed("deadline_exceeded", "the producer does not answer")

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message: the format byte, and a map."""
        self._socket.send(b"\xc1" + msgpack.packb({"type": kind, **fields}))

    def receive(self, kind: str) -> dict[str, Any]:
        """Return the next message of a kind; answer pings, and skip others, which may come between."""
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                raise Failed("deadline_exceeded", f"no {kind} has come") from None
            if len(frames) != 1 or frames[0][:1] != b"\xc1":
                raise Failed("protocol_violation", "a message is one frame, which begins with c1")
            message: dict[str, Any] = msgpack.unpackb(frames[0][1:])
            if message["type"] == kind:
                return message
            if message["type"] in ("refuse", "bye"):
                self.close()
                raise Failed(message.get("code", "peer_closed"), message.get("reason", ""))
            if message["type"] == "ping":
                self.send("pong", nonce=message["nonce"], clock_s=time.time())

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        """Ask a question; return its answer. There is none if the producer does not know it, or has no room for it."""
        self._nonce += 1
        self.send("ask", nonce=self._nonce, question=msgpack.packb({"type": kind, **fields}))
        answer = self.receive("answer")["answer"]
        said: dict[str, Any] = msgpack.unpackb(answer) if answer else {"type": "unknown"}
        if said["type"] != kind.removeprefix("ask_"):
            raise Failed("capacity_exceeded" if said["type"] == "no_room" else "release_mismatch", said)
        return said

    def release(self, grant: Grant) -> None:
        """Release a lease, and wait until the producer has counted it: it processes messages in order."""
        self.send("release", leases=[{"slot": grant.slot, "epoch": grant.epoch}], read=True)
        self.send("ping", nonce=0)
        self.receive("pong")

    def close(self) -> None:
        """Say goodbye."""
        self.send("bye")
        self._context.destroy()


def read_publication(publication: dict[str, Any]) -> dict[str, Any]:
    """Check the digest and the schema of a publication, and return what it says."""
    if hashlib.sha256(publication["payload"]).digest() != publication["digest"]:
        raise Failed("protocol_violation", "the publication does not match its digest")
    if publication["schema"] != SCHEMA:
        raise Failed("release_mismatch", f"the manifest has schema {publication['schema']}")
    said: dict[str, Any] = msgpack.unpackb(publication["payload"])
    check(said["manifest"])
    return said


def check(manifest: dict[str, Any]) -> None:
    """Refuse a manifest whose components leave their regions; the page lists more that others must refuse."""
    named = [
        (group, layer[0], Component(*each[:12]))
        for group in manifest["groups"]
        for layer in group["layers"]
        for each in layer[3]
    ]
    if len(named) > COMPONENTS_MAX or len({(layer, part.role) for _, layer, part in named}) < len(named):
        raise Failed("protocol_violation", "the manifest has too many components, or one twice")
    for group, layer, part in named:
        axes = [(manifest["num_blocks"], part.block_stride), *zip(part.extents, part.strides, strict=True)]
        is_sound = part.offset >= 0 and all(extent == 1 or (extent > 1 and step > 0) for extent, step in axes)
        if is_sound:
            axes.append((part.kernel_blocks(group["block_size"]), part.kernel_stride))
        end = part.offset + sum((extent - 1) * step for extent, step in axes) + part.item_bytes
        if not is_sound or end > manifest["regions"][part.region]["nbytes"]:
            raise Failed("protocol_violation", f"{part.role} of {layer} leaves its region")


class Component(NamedTuple):
    """One named tensor inside the pages of a layer, as a manifest has it."""

    role: str
    dtype: str
    region: int
    offset: int
    block_stride: int
    kernel_stride: int
    extents: list[int]
    strides: list[int]
    shard_axis: int = 0
    first: int = 0
    total: int = 1
    token_axis: int = 1

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return ITEM_BYTES.get(self.dtype, 1)

    def kernel_blocks(self, block_size: int) -> int:
        """Return into how many kernel blocks a block is divided."""
        return block_size // self.extents[self.token_axis] if self.token_axis >= 0 else 1

    def pieces(self, kernel_blocks: int) -> tuple[list[int], int, int, int]:
        """Return where the pieces of block 0 begin, in canonical order; and bytes, stride and times of each."""
        axes = [(kernel_blocks, self.kernel_stride), *zip(self.extents, self.strides, strict=True)]
        nbytes, times, stride = self.item_bytes, 1, 0
        while axes and (axes[-1][0] == 1 or axes[-1][1] == nbytes):
            nbytes *= axes.pop()[0]
        if axes and axes[-1][0] <= PIECES_MAX:
            times, stride = axes.pop()
        steps = [[index * step for index in range(extent)] for extent, step in axes]
        return [self.offset + sum(each) for each in product(*steps)], nbytes, stride, times


class Plane:
    """A connection to a producer's TCP plane: it is open when both sides have proven the pass."""

    def __init__(self, endpoint: str, control: Control) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), PATIENCE_S)
        greeting = self._receive(40)
        if greeting[:8] != GREETING:
            raise Failed("protocol_violation", f"the greeting is {greeting[:8]!r}")
        nonces = greeting[8:] + (nonce := secrets.token_bytes(32))
        mine, expected = (prove(control.published["pass"], role, nonces, b"") for role in (b"reader", b"exporter"))
        me = msgpack.packb(control.me)
        self._socket.sendall(nonce + hashlib.sha256(me).digest() + mine + struct.pack("<H", len(me)) + me)
        if not hmac.compare_digest(self._receive(32), expected):
            raise Failed("authentication_failed", "the producer does not accept the pass, or has not proven its own")

    def _receive(self, nbytes: int) -> bytes:
        received = bytearray()
        while len(received) < nbytes:
            part = self._socket.recv(nbytes - len(received))
            if not part:
                raise Failed("peer_lost", "the producer has closed the connection")
            received += part
        return bytes(received)

    def show(self, grant: Grant) -> None:
        """Show a lease, which has no answer."""
        self._socket.sendall(REQUEST.pack(LEASE, 0, 0, 0, grant.slot, 0, grant.epoch) + grant.mac)

    def epoch(self, slot: int) -> int:
        """Return what a slot holds."""
        self._socket.sendall(REQUEST.pack(EPOCH, 0, 0, 0, slot, 0, 0))
        return self._answer(0)[1]

    def read(self, group: int, grant: Grant, runs: Sequence[tuple[int, ...]]) -> bytes:
        """Return the bytes of runs. The lease was held after the last of them was copied, or this raises."""
        missing = sum(blocks * nbytes * times for _, _, blocks, _, nbytes, _, times in runs)
        head = REQUEST.pack(READ, 0, group, len(runs), grant.slot, 0, grant.epoch)
        self._socket.sendall(head + b"".join([RUN.pack(*run) for run in runs]))
        content, epoch = self._answer(missing, grant.epoch)
        if epoch != grant.epoch:
            raise Failed("stale_lease" if epoch > grant.epoch else "not_admitted", f"the slot holds {epoch}")
        return content

    def _answer(self, missing: int, epoch: int | None = None) -> tuple[bytes, int]:
        content = b""
        while True:
            kind, *zeros, value = ANSWER.unpack(self._receive(ANSWER.size))
            if kind == REFUSED and not content and 0 < value <= 256:
                raise Failed("bounds", self._receive(value).decode(errors="replace"))
            wrong = {PIECE: not 0 < value <= min(missing, PIECE_BYTES_MAX), ENDED: value == epoch}
            wrong[DONE] = missing > 0 or epoch not in (None, value)
            if any(zeros) or wrong.get(kind, True):
                raise Failed("protocol_violation", f"an answer of the kind {kind} and {value}")
            if kind != PIECE:
                return content, value
            content += self._receive(value)
            missing -= value


def prove(pass_: bytes, role: bytes, nonces: bytes, certificate: bytes) -> bytes:
    """Return the proof of a role. The nonces are the exporter's and the reader's, in this order."""
    return hmac.digest(pass_, b"kvftcp02 " + role + b"\0" + nonces + hashlib.sha256(certificate).digest(), "sha256")


def read_rank(grant: Grant, rank: list[Any], keys: Keys, options: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, the component and the canonical bytes of each tensor of a rank, and release the lease."""
    number, incarnation, endpoint = rank[:3]
    if len(rank) > 5 and rank[5] not in (None, z85.decode(keys.server_public).hex()):
        raise Failed("authentication_failed", "the ticket names another key than that of this secret")
    control = Control(endpoint, keys, options.version)
    they = control.identity
    if (they["engine_id"], they["rank"], they["incarnation"]) != (grant.engine_id, number, incarnation):
        raise Failed("wrong_server", f"{they['engine_id']} rank {they['rank']} answers there")
    said = read_publication(control.published["publication"])
    manifest, groups = said["manifest"], said["manifest"]["groups"]
    say(met=they["engine_id"], rank=number)
    if said["tcp_encryption"] != "off" or any(group["stripe"][1] > 1 for group in groups):
        raise Failed("layout_mismatch", "this reader speaks no TLS, and joins no tokens of several ranks")
    if len(groups) != len(grant.block_ids) or max([-1, *chain(*grant.block_ids)]) >= manifest["num_blocks"]:
        raise Failed("protocol_violation", "the ticket names groups or blocks that the producer does not have")
    lease = {"slot": grant.slot, "epoch": grant.epoch, "mac": grant.mac}
    [settled] = control.ask("ask_settled", leases=[lease], known=[])["leases"]
    say(asked=settled["num_tokens"], sealed=settled["sealed"], ended=settled["ended"])
    plane = Plane(said["data_endpoint"], control)
    layout = msgpack.unpackb(msgpack.unpackb(said["planes"]["tcp"])["blob"])
    until = time.monotonic() + PATIENCE_S
    while not grant.admitted and plane.epoch(grant.slot) < grant.epoch and time.monotonic() < until:
        time.sleep(0.005)
    plane.show(grant)
    for at, group in enumerate(groups):
        for name, part in [(layer[0], Component(*each[:12])) for layer in group["layers"] for each in layer[3]]:
            region, ids = manifest["regions"][part.region], [block for block in grant.block_ids[at] if block >= 0]
            kernel_blocks = part.kernel_blocks(group["block_size"])
            starts, nbytes, stride, times = part.pieces(kernel_blocks)
            reach = stride * (times - 1) + nbytes
            places = [stretch_of(layout[1][at], region, start, reach) for start in starts]
            runs = [(stretch, block, 1, offset, nbytes, stride, times) for block in ids for stretch, offset in places]
            each = max(1, PIECES_MAX // times)
            chunks = [plane.read(at, grant, runs[first : first + each]) for first in range(0, len(runs), each)]
            shape = len(ids), kernel_blocks, *part.extents, part.item_bytes
            content, axis = np.frombuffer(b"".join(chunks), np.uint8).reshape(shape), max(0, part.token_axis)
            extents = [extent * (kernel_blocks if index == axis else 1) for index, extent in enumerate(part.extents)]
            extents[-1] *= part.item_bytes
            yield f"{name}.{part.role}", part, np.moveaxis(content, 1, axis + 1).reshape(len(ids), *extents)
    control.release(grant)
    say(released=grant.request_id)
    control.close()


def stretch_of(rows: list[list[int]], region: dict[str, Any], start: int, reach: int) -> tuple[int, int]:
    """Return the number of the stretch that has these bytes of block 0, and the offset in it."""
    device = region["device"] if region["memory"] == "VRAM" else -1
    address, number = region["address"] + start, 0
    for first, step, times, span, _, there in rows:
        index = min(max(0, (address - first) // step), times - 1) if step else 0
        offset = address - first - index * step
        if there == device and 0 <= offset <= span - reach:
            return number + index, offset
        number += times
    raise Failed("bounds", "the producer does not serve these bytes")


def say(**facts: Any) -> int:
    """Print one line; return the exit status of a line that is the last."""
    print(json.dumps(facts), flush=True)
    return int("error" in facts)


def find(options: argparse.Namespace, keys: Keys) -> None:
    """Ask for what a producer keeps."""
    endpoint, *digests = options.about
    control = Control(endpoint, keys, options.version)
    held = control.ask("ask_held", digests=[bytes.fromhex(each) for each in digests])
    control.close()
    say(kvflow=held["ticket"], count=held["count"])


def read(options: argparse.Namespace, keys: Keys) -> None:
    """Read all that a ticket promises."""
    shares: dict[str, dict[int, Any]] = {}
    axes: dict[str, int] = {}
    for grant in read_ticket(json.loads(sys.stdin.readline())["kvflow"], keys):
        for rank in grant.ranks:
            for name, part, content in read_rank(grant, rank, keys, options):
                shares.setdefault(name, {})[part.first] = content
                axes[name] = 1 + max(0, part.shard_axis)
                if options.step:
                    say(step=name)
                    sys.stdin.readline()
    whole = {name: np.concatenate([each[at] for at in sorted(each)], axes[name]) for name, each in shares.items()}
    np.savez(options.out, **whole)  # type: ignore[arg-type]
    say(read=sorted(shares))


def main() -> None:
    """Run one command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=2, help="the wire version to offer")
    parser.add_argument("--out", default="read.npz", help="where the arrays go")
    parser.add_argument("--step", action="store_true", help="after each tensor, wait for a line of standard input")
    parser.add_argument("command", choices=["read", "find"])
    parser.add_argument("about", nargs="*", help="of find: the endpoint, and digests")
    options = parser.parse_intermixed_args()
    try:
        {"read": read, "find": find}[options.command](options, derive(os.environ["KVFLOW_CLUSTER_SECRET"]))
    except (Failed, OSError, LookupError, TypeError, ValueError) as error:  # the last three: malformed
        other = "peer_lost" if isinstance(error, OSError) else "protocol_violation", repr(error)
        code, why = error.args if isinstance(error, Failed) else other
        sys.exit(say(error=code, why=str(why)))


if __name__ == "__main__":
    main()
