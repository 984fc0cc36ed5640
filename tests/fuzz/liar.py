"""A producer that is a member and lies: it publishes manifests and metadata that are wrong, in right digests, and signs
tickets that are wrong. A real worker dials it, and must live."""

from contextlib import AsyncExitStack

import msgspec
import numpy as np

import handshake
from handshake import Publication
from kvflow.ids import agent_name, worker_name
from kvflow.layout.component import Region
from kvflow.layout.manifest import MANIFEST_SCHEMA
from kvflow.leases.tickets import FORMAT, MARK, RankAddress
from kvflow.reads.backend import Envelope, decode_envelope, encode_envelope
from kvflow.reads.nixl.backend import NixlBackend, exporter_name
from kvflow.reads.nixl.metadata import inspect
from kvflow.rendezvous.endpoint import Advertisement
from kvflow.rendezvous.issuer import TicketKey
from tests.integration.shapes import Shape
from tests.simulation.tickets import grants_of, packed, payload_of

from .mutations import HOSTILE, Mutator
from .processes import SECRET, Died, asked

ENGINE = "liar"
BLOCKS = [[0, 1], [2, 3]]
"""Of the liar."""

TOKENS = 8
TEXTS = (*(each for each in HOSTILE if not isinstance(each, bytes)), "\ud800", 10**30, {"kvflow": 1}, [2**31 - 1] * 5)
"""What JSON can carry."""

SLOTS = 64
SECURITY = handshake.ClusterSecurity.from_secret(SECRET)
KEY = TicketKey(SECURITY)


def incarnation_of(number):
    return f"{number:032x}"


def agent_of(number):
    return agent_name(worker_name(ENGINE, 0, incarnation_of(number)), SECURITY.server.public_key)


class Truth:
    """What an honest producer would publish: a cache, an exporter of it, and how it names itself.

    One exporter serves all lies: each bears the name of the incarnation that tells it.
    """

    def __init__(self):
        self._cache = Shape().build()
        self._manifest = self._cache.manifest()
        self._table = np.zeros(SLOTS, np.uint64)
        self._epochs = Region(self._table.ctypes.data, self._table.nbytes)
        self._backend = NixlBackend(agent_of(0), self._manifest.regions, self._epochs)
        self._blob = decode_envelope(self._backend.metadata, transport="nixl").blob

    def close(self):
        self._backend.close()

    def blob(self, number):
        """What NIXL publishes, in the name of an incarnation."""
        return self._blob.replace(incarnation_of(0).encode(), incarnation_of(number).encode())

    def advertisement(self, number, blob):
        """What a worker publishes, around a blob."""
        name = exporter_name(agent_of(number))
        encoded = encode_envelope(Envelope("nixl", name, blob, self._backend._settings))
        return Advertisement(manifest=self._manifest, epochs=self._epochs, planes={"nixl": encoded})

    def honest(self, number):
        """What a worker publishes, encoded."""
        return msgspec.msgpack.encode(self.advertisement(number, self.blob(number)))


def mutated_manifest(truth, seed, number):
    """Draw what is published with honest metadata."""
    honest = truth.honest(number)
    return Mutator(f"{seed}/manifest/{number}").of_packed(honest, honest)


def mutated_blob(truth, seed, number):
    """Draw what is published with an honest manifest: half of the blobs are still what NIXL might publish."""
    mutator = Mutator(f"{seed}/blob/{number}")
    honest = truth.blob(number)
    blob = _changed(mutator, honest)
    if mutator.draw.random() < 0.5:
        for _ in range(200):
            try:
                inspect(blob, exporter_name(agent_of(number)))
            except ValueError:
                blob = _changed(mutator, honest)
            else:
                break
    return msgspec.msgpack.encode(truth.advertisement(number, blob))


def _changed(mutator, blob):
    """Change the bytes anywhere, or those of one field, whose length is then made right."""
    if mutator.draw.random() < 0.4:
        return mutator.of_bytes(blob, blob)
    tag, skipped = mutator.draw.choice(((b"|c", 0), (b"|c", 0), (b"|#", 24), (b"|#", 0)))
    places = [at for at in range(len(blob)) if blob.startswith(tag, at)]
    at = mutator.draw.choice(places)
    at += 2 if tag == b"|c" else 1
    end = at + 8 + int.from_bytes(blob[at : at + 8], "little")
    if end > len(blob):
        return mutator.of_bytes(blob, blob)
    begin = at + 8 + skipped
    value = blob[at + 8 : begin] + mutator.of_bytes(blob[begin:end], blob[begin:end])
    return blob[:at] + len(value).to_bytes(8, "little") + value + blob[end:]


def ticket(endpoint, number, **changes):
    """Sign a ticket, whatever it says."""
    address = RankAddress(rank=0, incarnation=incarnation_of(number), endpoint=endpoint, slots=SLOTS)
    fields = {
        "kind": "offer",
        "engine_id": ENGINE,
        "request_id": f"lie {number}",
        "ranks": [msgspec.structs.asdict(address)],
        "slot": 0,
        "epoch": 0,
        "block_ids": BLOCKS,
        "num_tokens": (TOKENS, TOKENS),
        "lease_ms": 30_000,
        "admitted": True,
        "issued_ms": None,
        "contents": None,
        "traceparent": None,
        **changes,
    }
    try:
        payload = payload_of(fields, MARK + KEY.fingerprint)
    except (TypeError, OverflowError, UnicodeEncodeError):  # nobody can sign that
        payload = b"\xc0"
    return {"kvflow": f"{FORMAT}.{packed(KEY.sign(payload) + payload)}"}


def mutated_ticket(endpoint, seed, number):
    """Draw a ticket that a router changed, or one that says nonsense and is signed."""
    mutator = Mutator(f"{seed}/ticket/{number}")
    if mutator.draw.random() < 0.5:
        return mutator.of_value(ticket(endpoint, number), TEXTS)
    field = mutator.draw.choice(("slot", "epoch", "block_ids", "num_tokens", "lease_ms", "ranks", "request_id"))
    honest = grants_of(ticket(endpoint, number))[0]
    return ticket(endpoint, number, **{field: mutator.of_value(honest[field], TEXTS)})


def mutated_blocks(seed, number):
    """Draw lists of blocks, and a number of tokens."""
    mutator = Mutator(f"{seed}/blocks/{number}")
    return mutator.of_value(BLOCKS, TEXTS), mutator.of_value(TOKENS, TEXTS)


class Liar:
    """One listener that tells each dialer what it was last told to.

    Attributes:
        endpoint: where it listens.
        blocks: where its dialer is to put what it reads: nobody else's.
    """

    def __init__(self, server, number):
        self._server = server
        self.endpoint = server.endpoint
        self.blocks = [[4 * number, 4 * number + 1], [4 * number + 2, 4 * number + 3]]

    def tell(self, payload, number):
        self._server._identity = _identity(number)
        self._server._publication = Publication.of(payload, schema=MANIFEST_SCHEMA)

    def let_go(self):
        """Say goodbye on whatever connection is left: nobody dials again who heard it, and the next is another's."""
        for driver in tuple(self._server._drivers.values()):
            driver.close("a lie is over")

    async def lie(self, worker, payload, number):
        """Have the worker pull from us; return what it said.

        Raises:
            Died: it has, or it answered with anything but an error of its own.
        """
        self.tell(payload, number)
        try:
            return await asked(worker.pull(ticket(self.endpoint, number), self.blocks))
        except Died as died:
            raise Died(f"{died}\nlie {number}: {payload.hex()}") from died
        finally:
            self.let_go()


def _identity(number):
    return handshake.Identity(engine_id=ENGINE, rank=0, num_ranks=1, incarnation=incarnation_of(number), role="prefill")


async def open_liars(stack: AsyncExitStack, count, truth):
    """Open so many listeners."""
    liars = []
    for number in range(count):
        server = await stack.enter_async_context(
            handshake.open_server(
                bind="tcp://127.0.0.1:0",
                identity=_identity(0),
                publication=Publication.of(truth.honest(0)),
                security=SECURITY,
                on_event=lambda _key, _event: None,
            )
        )
        liars.append(Liar(server, number))
    return liars
