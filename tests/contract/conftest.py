"""Two ends of a transport, in one process or in two, and an oracle that copies bytes one descriptor at a time.

Each kind of transport runs the suite, and those that can read inline run it once more doing so whenever they may. NIXL
runs it with and without a progress thread at the reader, and with a helper that reads pieces of every chunk. The TCP
plane runs it once more over TLS, each end with its certificate, and once more with every cache in memory of a device,
which ``tests.devices`` stands in for: an address that no process has, so that a test or a data plane that touches it
with the processor ends the process.

``KVFLOW_TEST_MEMORY=VRAM`` runs it with every cache on a GPU instead, for the planes that reach one: NIXL and TCP.
"""

import base64
import contextlib
import itertools
import threading
import uuid

import msgspec
import numpy as np
import pytest

from kvflow.ids import FEW_IDS
from kvflow.layout.component import Region
from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import (
    Part,
    PeerAdded,
    PeerAddress,
    PeerFailed,
    PreparedList,
    Published,
    RankRead,
    RateLearned,
    ReadEnded,
    ResetDone,
)
from tests.contract.exporting import exporting
from tests.contract.kinds import KINDS, credentials, serving
from tests.devices import REAL, cache_of
from tests.helpers.copying import copied_in_small_pieces
from tests.world.node import Node

PATIENCE_S = 60.0
SLOTS = 64
BLOCK = 4096

FIRST_READ = 1 << 40
"""Ids of the reads and prepared lists that a world makes for itself, from here on."""


def key_of(event):
    """What an event is about: ("read", 7), ("peer", "p"), ("rate", "p") or ("reset",)."""
    match event:
        case ReadEnded():
            return ("read", event.read_id)
        case PeerAdded() | PeerFailed():
            return ("peer", event.peer)
        case RateLearned():
            return ("rate", event.peer)
        case ResetDone():
            return ("reset",)


class Recorder:
    """A sink that remembers, can be waited on, and can hold the read thread at a chosen event."""

    def __init__(self):
        self.events = []
        self._changed = threading.Condition()
        self._gates = {}
        self._hooks = {}

    def __call__(self, event):
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()
        key = key_of(event)
        if hook := self._hooks.get(key):
            hook()
        if gate := self._gates.pop(key, None):
            assert gate.wait(PATIENCE_S)

    def on(self, key, hook):
        """Call a function on the read thread when the event is passed."""
        self._hooks[key] = hook

    @contextlib.contextmanager
    def holding(self, key):
        """Hold the read thread at the next such event, until the block ends."""
        self._gates[key] = gate = threading.Event()
        try:
            yield
        finally:
            gate.set()

    def forget(self, *keys):
        """Drop what was recorded about these keys, to wait for news."""
        with self._changed:
            self.events = [event for event in self.events if key_of(event) not in keys]

    def wait(self, *keys):
        """Return the events about these keys once each has one, in the order of the keys."""

        def found():
            return set(keys) <= set(self.order())

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE_S), f"waited for {keys}, got {self.events}"
            latest = {key_of(event): event for event in self.events}
        return [latest[key] for key in keys]

    def failed(self, peer):
        """Return the event that says that a peer failed, once there is one: it may have been added before."""
        with self._changed:
            failures = self._changed.wait_for(lambda: self._failures(peer), PATIENCE_S)
        assert failures, f"waited for {peer} to fail, got {self.events}"
        return failures[-1]

    def _failures(self, peer):
        return [event for event in self.events if isinstance(event, PeerFailed) and event.peer == peer]

    def order(self):
        return [key_of(event) for event in self.events]


class End:
    """One transport with a cache and an epoch table."""

    def __init__(self, kind, content, memory, staging_bytes=0, slots=SLOTS, **options):
        self.kind = kind.split()[0]
        self.name = f"{self.kind}-{uuid.uuid4().hex}"
        self.cache = cache_of(memory, content)
        self.region = self.cache.region
        self.epochs = np.zeros(slots, dtype=np.uint64)
        self.epochs_region = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        self.sink = Recorder()
        self.transport = KINDS[kind](self.name, self.sink, staging_bytes, **options)

    def start(self):
        self.transport.start([self.cache.region], self.epochs_region, serving(self.cache, self.epochs))
        return self

    @property
    def published(self):
        return self.transport.published()

    def address(self, peer, **changed):
        return address_of(peer, self.published, self.epochs_region, **changed)

    def nobody(self):
        """An address that no transport accepts."""
        return PeerAddress("nobody", {self.kind: b""}, self.epochs_region)

    def set_epoch(self, slot, value):
        self.epochs[slot] = value

    def post(self, *reads):
        """Post reads as one batch. Answers that are known at once are recorded like those that come later."""
        answers = self.transport.post(reads)
        for answer in answers:
            self.sink(answer)
        return answers

    def prepare(self, prepared_list):
        """Prepare a list, and return it."""
        self.transport.prepare(prepared_list)
        return prepared_list

    def answer(self, read):
        """Post one read, and return its answer."""
        self.post(read)
        return self.sink.wait(("read", read.read_id))[0]

    def go(self):
        self.transport.close()


def address_of(peer, published, epochs, /, **changed):
    """The address of an exporter as its worker tells it, but for what is changed."""
    told = {"planes": published.planes, "data_endpoint": published.data_endpoint}
    told["credentials"] = credentials(of_exporter=published.certificate)
    return PeerAddress(**{"peer": peer, "epochs": epochs} | told | changed)


class RemoteCache:
    """The cache of an exporter in another process."""

    def __init__(self, exporter):
        self.region, self._exporter = exporter.region, exporter

    def bytes(self):
        return np.frombuffer(base64.b64decode(self._exporter.content_now()), np.uint8)


class RemoteEpochs:
    """The epoch table of an exporter in another process, as an array whose changes are passed on."""

    def __init__(self, slots, set_epoch):
        self._values, self._set = np.zeros(slots, np.uint64), set_epoch

    def __getitem__(self, at):
        return self._values[at]

    def __setitem__(self, at, values):
        before = self._values.copy()
        self._values[at] = values
        for slot in np.flatnonzero(self._values != before):
            self._set(slot, self._values[slot])


class Elsewhere(Node):
    """An exporter in another process. It has the attributes of an ``End`` that is only read from."""

    def __init__(self, kind, seed, nbytes, slots, memory, env):  # noqa: PLR0917
        super().__init__(**env)
        name = uuid.uuid4().hex
        self.open_now(exporting, kind, name, nbytes=nbytes, slots=slots, seed=seed, memory=memory)
        about = self.about_now()
        self.published = msgspec.convert(about["published"], Published)
        self.epochs_region = msgspec.convert(about["epochs"], Region)
        self.region = msgspec.convert(about["cache"], Region)
        self.content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        self.cache = RemoteCache(self)
        self.epochs = RemoteEpochs(slots, self.set_epoch)

    def address(self, peer, **changed):
        return address_of(peer, self.published, self.epochs_region, **changed)

    def set_epoch(self, slot, value):
        self.set_epoch_now(int(slot), int(value))


class Descriptors:
    """The binding of a prepared list whose units are its descriptors, cut after so many if the budgets allow that many.

    Attributes:
        on_bind: called before anything is bound, on the thread that posts.
    """

    unit_descriptors = 1
    number = None

    def __init__(self, source_rows, chunk=1 << 30):
        self._lengths = lengths(source_rows)
        self._chunk = chunk
        self.unit_bytes = self.read_bytes = int(self._lengths.max())
        self.on_bind = lambda: None

    def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
        self.on_bind()
        count = len(pairs.source)
        step = min(self._chunk, chunk_descriptors, max(1, chunk_bytes // self.read_bytes))
        cuts = np.array([*range(0, count, step), count])
        nbytes = int(self._lengths[np.asarray(pairs.source)].sum())
        return Bound(np.array(pairs.source, np.int32), np.array(pairs.target, np.int32), cuts, nbytes)


def units(numbers):
    """Numbers of units as pairs have them: few as a tuple, many as an array."""
    numbers = tuple(map(int, numbers))
    return numbers if len(numbers) <= FEW_IDS else np.array(numbers, np.int64)


class StagedUnits:
    """The binding of a staged list: whole units, a full buffer to a chunk.

    Args:
        unit_bytes: that one unit fills.
        read_bytes: that are read for it.
        slots: units of a buffer.
    """

    unit_descriptors = 1
    number = None

    def __init__(self, unit_bytes, read_bytes, slots):
        self.unit_bytes, self.read_bytes, self._slots = unit_bytes, read_bytes, slots

    def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
        count = len(pairs.source)
        cuts = np.array([*range(0, count, self._slots), count])
        source, target = (np.array(side, np.int32) for side in (pairs.source, pairs.target))
        return Bound(source, target, cuts, count * self.unit_bytes)


class World:
    """The ends of one test; all are closed when it ends, readers first."""

    def __init__(self, kind, *, inline=False, progress=False, copying=False, apart=False, tls=False, memory="DRAM"):
        self.kind = kind
        self._made = f"{kind} tls" if tls else kind
        self.inline = inline
        self._apart = apart
        self._options = {"reader_progress": True} if progress else {"copy_threads": 2} if copying else {}
        self.memory = memory
        # Reads are posted in order. Others may leave one in flight, and then a later one can end before it.
        self.in_order = kind == "loopback"
        # Whether the exporter compares leases before it sends bytes, or peers read its memory by themselves.
        self.serves = kind == "tcp"
        self.patience_s = PATIENCE_S
        self._numbers = itertools.count(FIRST_READ)
        self._ends = []
        self._shared = []

    def end(self, nbytes, *, seed=None, start=True, **options):
        """An end whose cache is zero, or random for a seed."""
        content = np.zeros(nbytes, dtype=np.uint8)
        if seed is not None:
            content = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
        # Inline, however long it takes: these tests are of what happens, and not of how fast.
        inline_s_max = PATIENCE_S if self.inline else 0.0
        end = End(self._made, content, self.memory, **{"inline_s_max": inline_s_max} | self._options | options)
        self._ends.insert(0, end)
        return end.start() if start else end

    def exporter(self, nbytes, *, seed, slots=SLOTS):
        """An end with random bytes that is only read from: in a process of its own where exporters are apart."""
        if self._apart:
            return self.elsewhere(nbytes, seed=seed, slots=slots)
        return self.end(nbytes, seed=seed, slots=slots)

    def elsewhere(self, nbytes, *, seed, slots=SLOTS, env=None):
        """An exporter in a process of its own."""
        end = Elsewhere(self._made, seed, nbytes, slots, self.memory, env or {})
        self._ends.append(end)
        return end

    def connect(self, reader, exporter, peer):
        """Add a peer. Where reads are inline it is also met: the first read of a connection never is."""
        reader.transport.add_peer(exporter.address(peer))
        (added,) = reader.sink.wait(("peer", peer))
        assert (type(added), added.peer) == (PeerAdded, peer)
        if self.inline:
            number = next(self._numbers)
            prepared_list = self.prepared_list(
                number, peer, *(self.rows(end.region, (0, 1, 1, 1)) for end in (exporter, reader))
            )
            reader.transport.prepare(prepared_list)
            reader.post(self.read(number, prepared_list, [0], [0], epoch=(1 << 63) - 1, check_first=True))
            assert reader.sink.wait(("read", number))[0].verdict == "early"
            reader.sink.forget(("read", number))

    @contextlib.contextmanager
    def holding(self, reader):
        """Hold the read thread of a reader until the block ends: what is posted meanwhile waits."""
        with reader.sink.holding(("peer", "nobody")):
            reader.transport.add_peer(reader.nobody())
            reader.sink.wait(("peer", "nobody"))
            reader.sink.forget(("peer", "nobody"))
            yield

    def rows(self, region, *rows):
        """Rows from (offset, nbytes, stride, count) in a region."""
        table = [(region.address + offset, nbytes, region.device, *rest) for offset, nbytes, *rest in rows]
        return np.array(table, dtype=np.int64).reshape(-1, 5)

    def prepared_list(self, list_id, peer, source, target, *, chunk=1 << 30):
        """A prepared list whose units are descriptors, so many in a chunk at most."""
        binding = Descriptors(source, chunk)
        return PreparedList(list_id, peer, source, target, self.memory, self.memory, binding=binding)

    def dense(self, list_id, peer, source, target, *, block, count, **options):
        """``count`` blocks, from the start of one region to the start of another."""
        sides = [self.rows(region, (0, block, block, count)) for region in (source, target)]
        return self.prepared_list(list_id, peer, *sides, **options)

    def read(self, read_id, prepared_list, source_index, target_index, *, slot=0, epoch=0, **rest):
        """A read of one part, under the lease that slot 0 has in the beginning if none is named."""
        return self.read_of(read_id, [(prepared_list, source_index, target_index)], slot=slot, epoch=epoch, **rest)

    def read_of(self, read_id, parts, *, slot=0, epoch=0, **rest):
        """A read of several parts: prepared list, numbers of the source, numbers of the target."""
        made = tuple(Part(prepared_list.list_id, UnitPairs(*map(units, sides))) for prepared_list, *sides in parts)
        return RankRead(read_id, parts[0][0].peer, LeaseName(slot, epoch), made, **rest)

    def oracle(self, exporter, reader, prepared_list, read):
        """What the reader's cache must look like: each descriptor copied by itself into what was there before."""
        content, expected = exporter.cache.bytes(), reader.cache.bytes()
        source_at, target_at = starts(prepared_list.source_rows), starts(prepared_list.target_rows)
        (part,) = read.parts
        for i, j in zip(part.pairs.source, part.pairs.target, strict=True):
            nbytes = lengths(prepared_list.source_rows)[i]
            a, b = source_at[i] - exporter.cache.region.address, target_at[j] - reader.cache.region.address
            expected[b : b + nbytes] = content[a : a + nbytes]
        return expected

    def connect_again(self, reader, exporter, peer):
        """Add a peer after it failed."""
        reader.sink.forget(("peer", peer))
        self.connect(reader, exporter, peer)

    def shared(self, nbytes):
        """The same connected pair at every call."""
        if not self._shared:
            self._shared += [self.end(nbytes), self.end(nbytes, seed=1)]
        return self._shared

    def threads(self, count, target):
        threads = [threading.Thread(target=target) for _ in range(count)]
        for thread in threads:
            thread.start()
        return threads

    def join(self, threads):
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def flush_commands(self, reader):
        """Return once the core has served everything that was commanded before."""
        reader.transport.add_peer(reader.nobody())
        reader.sink.wait(("peer", "nobody"))
        reader.sink.forget(("peer", "nobody"))

    def until_inline(self, reader, prepared_list):
        """Return once the read thread rests, and posts are made inline: it may tell something before it rests."""
        for number in itertools.islice(self._numbers, 10_000):
            if reader.post(self.read(number, prepared_list, [0], [0], epoch=(1 << 63) - 1, check_first=True)):
                return
            reader.sink.wait(("read", number))
            reader.sink.forget(("read", number))
        raise AssertionError("no post was inline")

    def close_all(self):
        """Close every end. The world can go on with new ones."""
        while self._ends:
            self._ends.pop(0).go()


def starts(rows):
    return np.concatenate([address + np.arange(count) * stride for address, _, _, stride, count in rows])


def lengths(rows):
    return np.concatenate([np.full(count, nbytes) for _, nbytes, _, _, count in rows])


def kinds(*names):
    """Kinds of worlds as parameters: a kind of transport, and what is special about it."""
    marks = {name: [pytest.mark.nixl] for name in names if name.startswith("nixl")}
    if "nixl inline progress" in names:  # as a worker has it: it does what each of these does
        for name in {"nixl", "nixl inline", "nixl progress"} & {*names}:
            marks[name].append(pytest.mark.slow)
    return [pytest.param(name, marks=marks.get(name, ()), id=name) for name in names]


ON_HOST = ("loopback", "loopback inline", "nixl", "nixl inline", "nixl progress", "nixl inline progress", "tcp")
ON_HOST += ("nixl copying", "tcp inline", "async", "async inline progress", "tcp device", "tcp tls")
ON_GPU = ("nixl device apart", "tcp device")
"""``apart`` has each exporter in another process: within one, UCX maps no memory of a GPU. Nothing is read inline from
a device, and the other kinds reach memory of the host only."""

NAMES = ON_GPU if REAL else ON_HOST
STAGING_NAMES = tuple(name for name in NAMES if "device" not in name)
"""What is staged lies in memory of the host."""

KINDS_HERE = kinds(*NAMES)
WITH_APART = kinds(*NAMES, *(() if REAL else ("nixl apart", "tcp device apart")))
"""On the host it is enough to run a few tests with exporters in other processes."""

INLINE_KINDS = kinds(*(name for name in NAMES if "inline" in name and name.startswith(("loopback", "nixl"))))
"""Those whose posts may have ended when they return."""
FAR_KINDS = kinds(*(name.removesuffix(" apart") for name in NAMES if name.startswith(("nixl", "tcp"))))
"""For tests that start exporters in other processes themselves."""

TCP_KINDS = kinds(*(name for name in NAMES if name in ("tcp", "tcp device", "tcp tls")))
NIXL_KIND = kinds(FAR_KINDS[0].id)


def world_of(name):
    kind, *options = name.split()
    memory = "VRAM" if "device" in options else "DRAM"
    made = {option: option in options for option in ("inline", "progress", "copying", "apart", "tls")}
    world = World(kind, memory=memory, **made)
    with copied_in_small_pieces() if "copying" in options else contextlib.nullcontext():
        yield world
        world.close_all()


@pytest.fixture(params=KINDS_HERE)
def world(request):
    yield from world_of(request.param)


@pytest.fixture(params=FAR_KINDS)
def far_world(request):
    """With exporters in other processes."""
    yield from world_of(request.param)


@pytest.fixture
def pair(world):
    """A reader with an empty cache, and an exporter of random bytes: 64 blocks each."""
    reader, exporter = world.end(64 * BLOCK), world.exporter(64 * BLOCK, seed=1)
    world.connect(reader, exporter, "p")
    return reader, exporter
