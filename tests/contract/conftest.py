"""Two ends of a transport, in one process or in two, and an oracle that copies bytes one descriptor at a time.

Each kind of transport runs the suite, and those that can read inline run it once more doing so whenever they may. NIXL
runs it with and without a progress thread at the reader.

``KVFLOW_TEST_MEMORY=VRAM`` runs the NIXL part of the suite on a GPU.
"""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import uuid

import msgspec
import numpy as np
import pytest

from kvflow.layout.region import Region
from kvflow.transfer.bind import Bound
from kvflow.transfer.pairs import FEW, UnitPairs
from kvflow.transfer.requests import LeaseName, Part, RankRead, ReadEnded
from kvflow.transport.base import PeerAdded, PeerAddress, PeerFailed, Program, Published, ReaderReset
from tests.contract.kinds import KINDS, credentials, serving
from tests.stopping import stop_process

MEMORY = os.environ.get("KVFLOW_TEST_MEMORY", "DRAM")
PATIENCE_S = 60.0
SLOTS = 64


FIRST_READ = 1 << 40
"""Ids of the reads and programs that a world makes for itself, from here on."""


def key_of(event):
    """What an event is about: ("read", 7), ("peer", "p") or ("reset",)."""
    match event:
        case ReadEnded():
            return ("read", event.read_id)
        case PeerAdded() | PeerFailed():
            return ("peer", event.peer)
        case ReaderReset():
            return ("reset",)


class Recorder:
    """A sink that remembers, can be waited on, and can hold the owner thread at a chosen event."""

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
        """Call a function on the owner thread when the event is passed."""
        self._hooks[key] = hook

    @contextlib.contextmanager
    def holding(self, key):
        """Hold the owner thread at the next such event, until the block ends."""
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

    def order(self):
        return [key_of(event) for event in self.events]


class Buffer:
    """Memory of the kind under test."""

    def __init__(self, content, memory):
        self._keep = content = np.ascontiguousarray(content, dtype=np.uint8)
        self.region = Region(content.ctypes.data, content.nbytes)
        if memory == "VRAM":
            import torch

            self._keep = torch.from_numpy(content).cuda()
            torch.cuda.synchronize()
            self.region = Region(self._keep.data_ptr(), content.nbytes, "VRAM", self._keep.device.index)

    def bytes(self):
        if isinstance(self._keep, np.ndarray):
            return self._keep.copy()
        return self._keep.cpu().numpy()


class End:
    """One transport with a cache and an epoch table."""

    def __init__(self, kind, content, memory, staging_bytes=0, slots=SLOTS, **options):
        self.kind = kind
        self.name = f"{kind}-{uuid.uuid4().hex}"
        self.cache = Buffer(content, memory)
        self.region = self.cache.region
        self.epochs = np.zeros(slots, dtype=np.uint64)
        self.epochs_region = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        self.sink = Recorder()
        self.transport = KINDS[kind](self.name, self.sink, staging_bytes, **options)

    def start(self):
        self.transport.start([self.cache.region], self.epochs_region, serving(self.cache.region, self.epochs))
        return self

    def address(self, peer, **changed):
        return address_of(peer, self.transport.published(), self.epochs_region, **changed)

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

    def go(self):
        self.transport.close()


def address_of(peer, published, epochs, /, **changed):
    """The address of an exporter as its worker tells it, but for what is changed."""
    told = {"planes": published.planes, "data_endpoint": published.data_endpoint, "credentials": credentials()}
    return PeerAddress(**{"peer": peer, "epochs": epochs} | told | changed)


class Elsewhere:
    """An exporter in another process."""

    def __init__(self, kind, content_seed, nbytes, memory, env):
        arguments = {"kind": kind, "name": uuid.uuid4().hex, "nbytes": nbytes, "slots": SLOTS, "seed": content_seed}
        options = [f"--{key}={value}" for key, value in (arguments | {"memory": memory}).items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.contract.exporter_process", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        )
        about = msgspec.msgpack.decode(bytes.fromhex(self.process.stdout.readline()))
        self.published = msgspec.convert(about["published"], Published)
        self.epochs_region = msgspec.convert(about["epochs"], Region)
        self.region = msgspec.convert(about["cache"], Region)
        self.content = np.random.default_rng(content_seed).integers(0, 256, nbytes, dtype=np.uint8)

    def address(self, peer):
        return address_of(peer, self.published, self.epochs_region)

    def set_epoch(self, slot, value):
        self.process.stdin.write(f"epoch {slot} {value}\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "ok\n"

    def stop(self):
        stop_process(self.process.pid)

    def resume(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)

    def go(self):
        """End politely, and return when the process is gone."""
        if self.process.poll() is None:
            self.resume()
            self.process.communicate("close\n", PATIENCE_S)
        self.process.stdin.close()
        self.process.stdout.close()


class Descriptors:
    """The binding of a program whose units are its descriptors, cut after so many if the budgets allow that many.

    Attributes:
        on_bind: called before anything is bound, on the thread that posts.
    """

    unit_descriptors = 1

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
        nbytes = int(self._lengths[pairs.source].sum())
        return Bound(np.array(pairs.source, np.int32), np.array(pairs.target, np.int32), cuts, nbytes)


def units(numbers):
    """Numbers of units as pairs have them: few as a list, many as an array."""
    numbers = list(map(int, numbers))
    return numbers if len(numbers) <= FEW else np.array(numbers, np.int64)


class StagedUnits:
    """The binding of a staged program: whole units, a full buffer to a chunk.

    Args:
        unit_bytes: that one unit fills.
        read_bytes: that are read for it.
        slots: units of a buffer.
    """

    unit_descriptors = 1

    def __init__(self, unit_bytes, read_bytes, slots):
        self.unit_bytes, self.read_bytes, self._slots = unit_bytes, read_bytes, slots

    def bind(self, pairs, *, chunk_bytes, chunk_descriptors):
        count = len(pairs.source)
        cuts = np.array([*range(0, count, self._slots), count])
        source, target = (np.array(side, np.int32) for side in (pairs.source, pairs.target))
        return Bound(source, target, cuts, count * self.unit_bytes)


class World:
    """The ends of one test; all are closed when it ends, readers first."""

    def __init__(self, kind, inline=False, progress=False):
        self.kind = kind
        self.inline = inline
        self._options = {"reader_progress": True} if progress else {}
        self.memory = MEMORY if kind == "nixl" else "DRAM"
        # Reads are posted in order. Others may leave one in flight, and then a later one can end before it.
        self.in_order = kind == "loopback"
        # Whether the exporter compares leases before it sends bytes, or peers read its memory by themselves.
        self.serves = kind == "tcp"
        self.patience_s = PATIENCE_S
        self.Recorder = Recorder
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
        end = End(self.kind, content, self.memory, **{"inline_s_max": inline_s_max} | self._options | options)
        self._ends.insert(0, end)
        return end.start() if start else end

    def elsewhere(self, nbytes, *, seed, env=None):
        end = Elsewhere(self.kind, seed, nbytes, self.memory, env or {})
        self._ends.append(end)
        return end

    def connect(self, reader, exporter, peer):
        """Add a peer. Where reads are inline it is also met: the first read of a connection never is."""
        reader.transport.add_peer(exporter.address(peer))
        (added,) = reader.sink.wait(("peer", peer))
        assert (type(added), added.peer) == (PeerAdded, peer)
        if self.inline:
            number = next(self._numbers)
            program = self.program(number, peer, *(self.rows(end.region, (0, 1, 1, 1)) for end in (exporter, reader)))
            reader.transport.prepare(program)
            reader.post(self.read(number, program, [0], [0], epoch=(1 << 63) - 1, check_first=True))
            assert reader.sink.wait(("read", number))[0].verdict == "early"
            reader.sink.forget(("read", number))

    @contextlib.contextmanager
    def holding(self, reader):
        """Hold the owner thread of a reader until the block ends: what is posted meanwhile waits."""
        with reader.sink.holding(("peer", "nobody")):
            reader.transport.add_peer(reader.nobody())
            reader.sink.wait(("peer", "nobody"))
            reader.sink.forget(("peer", "nobody"))
            yield

    def rows(self, region, *rows):
        """Rows from (offset, nbytes, stride, count) in a region."""
        table = [(region.address + offset, nbytes, region.device, *rest) for offset, nbytes, *rest in rows]
        return np.array(table, dtype=np.int64).reshape(-1, 5)

    def program(self, program_id, peer, source, target, *, chunk=1 << 30):
        """A program whose units are descriptors, so many in a chunk at most."""
        binding = Descriptors(source, chunk)
        return Program(program_id, peer, source, target, self.memory, self.memory, binding=binding)

    def dense(self, program_id, peer, source, target, *, block, count, **options):
        """``count`` blocks, from the start of one region to the start of another."""
        sides = [self.rows(region, (0, block, block, count)) for region in (source, target)]
        return self.program(program_id, peer, *sides, **options)

    def read(self, read_id, program, source_index, target_index, *, slot=0, epoch=0, **rest):
        """A read of one part, under the lease that slot 0 has in the beginning if none is named."""
        return self.read_of(read_id, [(program, source_index, target_index)], slot=slot, epoch=epoch, **rest)

    def read_of(self, read_id, parts, *, slot=0, epoch=0, **rest):
        """A read of several parts: program, numbers of the source, numbers of the target."""
        made = tuple(Part(program.program_id, UnitPairs(*map(units, sides))) for program, *sides in parts)
        return RankRead(read_id, parts[0][0].peer, LeaseName(slot, epoch), made, **rest)

    def oracle(self, exporter, reader, program, read):
        """What the reader's cache must look like: each descriptor copied by itself into what was there before."""
        content, expected = exporter.cache.bytes(), reader.cache.bytes()
        source_at, target_at = starts(program.source_rows), starts(program.target_rows)
        (part,) = read.parts
        for i, j in zip(part.pairs.source, part.pairs.target, strict=True):
            nbytes = lengths(program.source_rows)[i]
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
        """Return once the owner has served everything that was commanded before."""
        reader.transport.add_peer(reader.nobody())
        reader.sink.wait(("peer", "nobody"))
        reader.sink.forget(("peer", "nobody"))

    def close_all(self):
        """Close every end. The world can go on with new ones."""
        while self._ends:
            self._ends.pop(0).go()


def starts(rows):
    return np.concatenate([address + np.arange(count) * stride for address, _, _, stride, count in rows])


def lengths(rows):
    return np.concatenate([np.full(count, nbytes) for _, nbytes, _, _, count in rows])


KINDS_HERE = [
    "loopback",
    "loopback inline",
    pytest.param("nixl", marks=pytest.mark.nixl),
    pytest.param("nixl inline", marks=pytest.mark.nixl),
    pytest.param("nixl progress", marks=pytest.mark.nixl),
    pytest.param("nixl inline progress", marks=pytest.mark.nixl),
    "tcp",
]


INLINE_KINDS = [KINDS_HERE[at] for at in (1, 3, 5)]


def world_of(name):
    kind, *options = name.split()
    world = World(kind, inline="inline" in options, progress="progress" in options)
    yield world
    world.close_all()


@pytest.fixture(params=KINDS_HERE)
def world(request):
    yield from world_of(request.param)


@pytest.fixture(params=KINDS_HERE[2:])
def far_world(request):
    """With exporters in other processes."""
    yield from world_of(request.param)
