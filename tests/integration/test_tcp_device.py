"""Device memory over the TCP plane, against a device that no address reaches; ``KVFLOW_TEST_MEMORY=VRAM``: a GPU."""

import itertools
import logging
import queue
import threading

import numpy as np
import pytest
import torch

import kvflow
from kvflow.config import TcpSettings
from kvflow.ids import Credentials, PeerId, pass_of
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.backend import CheckedList, Chunk, Portion, Share
from kvflow.reads.bounds import check_rows
from kvflow.reads.contract import Part, PeerAdded, PeerAddress, PreparedList, RankRead, ReadEnded, Serving
from kvflow.reads.device import PORTION_BYTES
from kvflow.reads.staging import StagingMemory
from kvflow.reads.tcp.backend import TcpBackend
from kvflow.reads.thread import ThreadedTransport
from kvflow.worker import runtime
from tests.devices import StandInCache, Watched, cache_of
from tests.helpers.blocks import Blocks

PATIENCE_S = 60.0
KEY = bytes(range(32))
READER = ("ab" * 32, "reader", 0, "1" * 32)
SOURCE = PeerId("source", 0, "0" * 32, "tcp://127.0.0.1:1", "")
BLOCK = 24 << 10  # portions end within blocks
BLOCKS = 230  # five portions and a rest
SEEN, OLD, REUSED = 0x5A, 0xAB, 0xEE


class End:
    """A cache, its leases, and a backend; threaded for readers that are not driven by hand."""

    def __init__(self, memory, content, *, block=BLOCK, encryption="off", threaded=True, reaches_device=True):
        self.cache = cache_of(memory, content)
        self.device = Watched(self.cache.device_memory) if self.cache.device_memory and reaches_device else None
        self.block, self.count = block, len(content) // block
        self.epochs = np.zeros(16, np.uint64)
        self.leases = {}
        region = self.cache.region
        track = Track(region.address, block, block, self.count, region.memory, region.device)
        serving = Serving(
            ((track,),),
            lambda *lease: self.leases.get(lease),
            lambda key: key == READER[0],
            KEY,
            device_memory=self.device,
        )
        local = "tcp://127.0.0.1:0"
        settings = TcpSettings(bind=local, advertise=local, connections=2, encryption=encryption)
        self.events = queue.SimpleQueue()
        self.read_ids = itertools.count(1)
        self.waiting = []

        def make(regions, epochs, serving):
            self.backend = TcpBackend("agent", settings, regions, epochs, serving)
            return self.backend

        epochs = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        if threaded:
            self.transport = ThreadedTransport("tcp", {"tcp": make}, self.events.put, StagingMemory(0))
            self.transport.start([region], epochs, serving)
            self.close = self.transport.close
        else:
            make([region], epochs, serving)
            self.close = self.backend.close

    def lease(self, slot, epoch, blocks):
        self.epochs[slot] = epoch
        self.leases[slot, epoch] = (list(blocks),)

    def end_lease(self, slot, epoch):
        """End a lease and write over its blocks, as an engine may."""
        self.epochs[slot] = epoch + 1
        for block in self.leases.pop((slot, epoch))[0]:
            self.cache.write(block * self.block, np.full(self.block, REUSED, np.uint8))

    def blocks(self):
        return self.cache.bytes().reshape(self.count, self.block)

    def address(self, reader):
        """Return what a reader needs to know of this end."""
        epochs = Region(self.epochs.ctypes.data, self.epochs.nbytes)
        planes = {"tcp": self.backend.metadata}
        pass_ = pass_of(KEY, *READER, certificate=reader.backend.certificate)
        who = Credentials(*READER, pass_, self.backend.certificate)
        return PeerAddress(SOURCE, planes, epochs, None, self.backend.data_endpoint, who)

    def rows(self):
        return np.array([[self.cache.region.address, self.block, self.cache.region.device, self.block, self.count]])

    def prepared_list(self, source):
        kinds = {"source_memory": source.cache.region.memory, "target_memory": self.cache.region.memory}
        return PreparedList(1, SOURCE, source.rows(), self.rows(), **kinds, binding=Blocks(self.block, 256))

    def meet(self, source):
        self.transport.add_peer(source.address(self))
        assert isinstance(self.next(PeerAdded), PeerAdded)
        self.transport.prepare(self.prepared_list(source))
        return self

    def meet_by_hand(self, source):
        """The same with a backend that has no thread."""
        self.backend.add(source.address(self))
        prepared_list = self.prepared_list(source)
        rows = [check_rows(each) for each in (prepared_list.source_rows, prepared_list.target_rows)]
        self.backend.prepare(CheckedList(prepared_list, *rows))
        return self

    def read(self, pairs, slot, epoch):
        """Read pairs of blocks, and return how that ended."""
        return self.read_all((pairs, slot, epoch))[0]

    def read_all(self, *reads):
        """Post reads together, and return how they ended."""
        self.post(*reads)
        ended = {event.read_id: event for event in (self.next(ReadEnded) for _ in reads)}
        return [ended[read_id] for read_id in sorted(ended)]

    def post(self, *reads):
        made = []
        for pairs, slot, epoch in reads:
            units = UnitPairs(*(tuple(map(int, column)) for column in zip(*pairs, strict=True)))
            made.append(RankRead(next(self.read_ids), SOURCE, LeaseName(slot, epoch), (Part(1, units),)))
        assert self.transport.post(made) == []

    def next(self, *kinds):
        """Return the first event of these kinds; others wait for their turn."""
        for event in self.waiting:
            if isinstance(event, kinds):
                self.waiting.remove(event)
                return event
        while not isinstance(event := self.events.get(timeout=PATIENCE_S), kinds):
            self.waiting.append(event)
        return event


def portion_of(pairs, shares, block):
    """Pairs of blocks of several reads; each share is its read, slot, epoch and pairs."""
    source, target = (np.array(column, np.int32) for column in zip(*pairs, strict=True))
    shares = tuple(Share(read_id, LeaseName(slot, epoch), count) for read_id, slot, epoch, count in shares)
    return Portion(SOURCE, 1, source, target, np.array([0, len(source)]), len(source) * block, shares)


@pytest.fixture
def ends():
    """Make ends, and close them, the last one first."""
    made = []

    def make(*args, **kwargs):
        made.append(End(*args, **kwargs))
        return made[-1]

    yield make
    for end in reversed(made):
        end.close()


def content_of(count, block=BLOCK, seed=1):
    # No byte is zero or one of the marks, so that each is told from them.
    return np.random.default_rng(seed).integers(1, SEEN, count * block, dtype=np.uint8)


def blank(count, block=BLOCK):
    return np.full(count * block, OLD, np.uint8)


@pytest.mark.parametrize(
    ("block", "count", "encryption"),
    [
        (7, 3000, "off"),
        (BLOCK, BLOCKS, "off"),
        (BLOCK, BLOCKS, "tls"),
        ((5 << 19) + 1, 3, "tls"),
        (9 << 20, 2, "off"),
    ],
)
@pytest.mark.parametrize("memories", ["VRAM to DRAM", "DRAM to VRAM", "VRAM to VRAM"])
def test_every_byte_that_is_asked_for_and_no_other(ends, memories, block, count, encryption):
    source, target = memories.split(" to ")
    producer = ends(source, content_of(count, block), block=block, encryption=encryption)
    consumer = ends(target, blank(count + 2, block), block=block, encryption=encryption).meet(producer)
    rng = np.random.default_rng(2)
    pairs = list(zip(rng.permutation(count), rng.permutation(count + 2), strict=False))
    producer.lease(4, 9, range(count))
    ended = consumer.read(pairs, 4, 9)
    assert (ended.verdict, ended.observed, ended.nbytes) == ("held", 9, count * block)
    expected = blank(count + 2, block).reshape(count + 2, block)
    for here, there in pairs:
        expected[there] = producer.blocks()[here]
    np.testing.assert_array_equal(consumer.blocks(), expected)
    if source == "VRAM":
        assert producer.device.fetches >= count * block / PORTION_BYTES
    if target == "VRAM":
        assert consumer.device.stores >= count * block / PORTION_BYTES


@pytest.mark.parametrize("encryption", ["off", "tls"])
@pytest.mark.parametrize("target", ["DRAM", "VRAM"])
def test_no_byte_of_a_lease_that_ends_in_the_middle_is_read_after_its_end(ends, target, encryption):
    producer = ends("VRAM", content_of(BLOCKS), encryption=encryption)
    consumer = ends(target, blank(BLOCKS), encryption=encryption, threaded=False).meet_by_hand(producer)
    before = producer.blocks()
    half = BLOCKS // 2
    producer.lease(1, 5, range(half))
    producer.lease(2, 6, range(half, BLOCKS))
    # Within a copy: the epochs that were compared before it still held.
    producer.device.on_fetch = lambda number: number == 2 and producer.end_lease(1, 5)
    # Blocks of both leases in turn: each read of the chunk has its own answer.
    pairs = [(block, block) for pair in zip(range(half), range(half, BLOCKS), strict=True) for block in pair]
    leases = ((1, 1, 5), (2, 2, 6))
    portion = portion_of(pairs, [(*lease, 1) for _ in range(half) for lease in leases], BLOCK)
    posted = consumer.backend.post(Chunk(portion, 0, BLOCKS))
    while consumer.backend.poll(posted) is None:
        consumer.backend.progress()
    reads = [(read_id, LeaseName(slot, epoch)) for read_id, slot, epoch in leases]
    assert consumer.backend.post_check(SOURCE, 1, 2, reads, fence=True) == [6, 6]
    after = consumer.blocks()
    np.testing.assert_array_equal(after[half:], before[half:])
    ended = after[:half]
    # What was promised before the end is filled with zeros, and nothing follows it.
    assert ((ended == before[:half]) | (ended == 0) | (ended == OLD)).all()  # and never REUSED
    assert (ended != before[:half])[-1].all(), "what was fetched after the end is not sent"


def test_a_lease_that_is_admitted_during_another_read_of_its_chunk_is_read(ends):
    producer = ends("VRAM", content_of(BLOCKS))
    consumer = ends("VRAM", blank(BLOCKS)).meet(producer)
    producer.lease(1, 5, range(10))
    producer.device.on_fetch = lambda number: number == 1 and producer.lease(2, 6, range(10, 20))
    reads = ([(block, block) for block in blocks] for blocks in (range(10), range(10, 20)))
    held, other = consumer.read_all((next(reads), 1, 5), (next(reads), 2, 6))
    assert held.verdict == "held"
    np.testing.assert_array_equal(consumer.blocks()[:10], producer.blocks()[:10])
    if other.verdict == "held":  # its request came after the fetch
        np.testing.assert_array_equal(consumer.blocks()[:20], producer.blocks()[:20])
    else:
        assert (other.verdict, other.observed < 6) == ("early", True), "the reader must come again"
        assert (consumer.blocks()[10:20] == OLD).all()


def test_nothing_is_stored_of_a_read_whose_leases_are_not_held(ends):
    producer = ends("VRAM", content_of(4))
    consumer = ends("VRAM", blank(4)).meet(producer)
    producer.epochs[1] = 8
    ended = consumer.read([(0, 0), (1, 1)], 1, 7)
    assert (ended.verdict, ended.observed) == ("stale", 8)
    assert (producer.device.fetches, consumer.device.stores) == (0, 0)
    assert (consumer.blocks() == OLD).all()


def test_nothing_is_stored_for_a_peer_that_was_removed(ends):
    producer = ends("VRAM", content_of(BLOCKS))
    consumer = ends("VRAM", blank(BLOCKS)).meet(producer)
    producer.lease(1, 5, range(BLOCKS))
    fetching, go_on = threading.Event(), threading.Event()

    def hold(number):
        if number == 3:
            fetching.set()
            assert go_on.wait(PATIENCE_S)

    producer.device.on_fetch = hold
    consumer.post(([(block, block) for block in range(BLOCKS)], 1, 5))
    assert fetching.wait(PATIENCE_S)
    consumer.transport.remove_peer(SOURCE)
    assert consumer.next(ReadEnded).code == "cancelled"
    stores, after = consumer.device.stores, consumer.blocks()
    go_on.set()
    producer.close()  # on return its sender has sent what it would
    assert consumer.device.stores == stores <= 2
    np.testing.assert_array_equal(consumer.blocks(), after)


@pytest.mark.parametrize("encryption", ["off", "tls"])
def test_a_reader_that_takes_nothing_keeps_no_other_waiting(ends, encryption):
    count = 96 << 20 >> 14  # far more than two sockets hold
    producer = ends("VRAM", content_of(count, 1 << 14), block=1 << 14, encryption=encryption)
    producer.lease(1, 5, range(count))
    stuck = ends("DRAM", blank(count, 1 << 14), block=1 << 14, encryption=encryption, threaded=False)
    stuck.meet_by_hand(producer)
    every = [(block, block) for block in range(count)]
    fetched = threading.Event()
    producer.device.on_fetch = lambda number: fetched.set()
    stuck.backend.post(Chunk(portion_of(every, [(1, 1, 5, count)], 1 << 14), 0, count))
    while not fetched.is_set():  # until its answer is begun, and then never again
        stuck.backend.progress()
    consumer = ends("VRAM", blank(count, 1 << 14), block=1 << 14, encryption=encryption).meet(producer)
    assert consumer.read(every, 1, 5).verdict == "held"
    np.testing.assert_array_equal(consumer.blocks(), producer.blocks())
    assert producer.device.fetches < 2 * 96, "the one that is stuck has fetched all of it: this proves nothing"


@pytest.mark.parametrize(("source", "target"), [("VRAM", "DRAM"), ("DRAM", "VRAM")])
def test_a_worker_that_does_not_reach_its_device_refuses(ends, source, target):
    producer = ends(source, content_of(2), reaches_device=False)
    consumer = ends(target, blank(2), reaches_device=False).meet(producer)
    producer.lease(1, 5, range(2))
    failed = consumer.read([(0, 0)], 1, 5)
    assert failed.code == "bounds"
    assert "does not reach the memory" in failed.detail
    assert (consumer.blocks() == OLD).all()


def fail(_number):
    raise RuntimeError("the device is gone")


def test_a_device_that_fails_at_the_source_fails_one_read(ends):
    producer = ends("VRAM", content_of(2))
    consumer = ends("DRAM", blank(2)).meet(producer)
    producer.lease(1, 5, range(2))
    producer.device.on_fetch = fail  # each time: a reader asks once again where nothing of an answer has come
    assert consumer.read([(0, 0)], 1, 5).code == "peer_lost"
    assert (consumer.blocks() == OLD).all()
    producer.device.on_fetch = lambda number: None
    consumer.transport.add_peer(producer.address(consumer))
    consumer.next(PeerAdded)
    consumer.transport.prepare(consumer.prepared_list(producer))
    assert consumer.read([(0, 0)], 1, 5).verdict == "held"
    np.testing.assert_array_equal(consumer.blocks()[0], producer.blocks()[0])


def test_a_device_that_fails_at_the_target_fails_the_read(ends):
    producer = ends("VRAM", content_of(2))
    consumer = ends("VRAM", blank(2)).meet(producer)
    producer.lease(1, 5, range(2))
    consumer.device.on_store = fail
    assert consumer.read([(0, 0)], 1, 5).verdict == "failed"
    assert (consumer.blocks() == OLD).all()


@pytest.mark.parametrize(
    ("source", "target", "transport"),
    [("VRAM", "VRAM", "tcp"), ("VRAM", "DRAM", "tcp"), ("DRAM", "VRAM", "tcp"), ("VRAM", "VRAM", "auto")],
)
async def test_workers_whose_caches_lie_on_a_device_pull_over_tcp(monkeypatch, caplog, source, target, transport):
    """The device of the source has number 1 and that of the target 0, as where each process sees other devices."""
    spec = kvflow.FullAttention(block_size=16, num_kv_heads=4, head_size=64, dtype="bfloat16")
    made = [kvflow.allocate({"layers.0": spec, "layers.1": spec}, num_blocks=40) for _ in range(2)]
    for seed, cache in enumerate(made):
        cache.backing.copy_(torch.from_numpy(content_of(1, cache.backing.nbytes, seed)))
    caches = [
        StandInCache(cache, device) if kind == "VRAM" else cache
        for cache, kind, device in zip(made, (source, target), (1, 0), strict=True)
    ]
    devices = {cache.device.region: cache.device for cache in caches if isinstance(cache, StandInCache)}
    monkeypatch.setattr(runtime, "device_memory_of", lambda regions: devices.get(regions[0]))
    secret = "a secret of this test"
    configs = [
        kvflow.WorkerConfig(engine_id=name, cluster_secret=secret, transport=transport) for name in ("source", "target")
    ]
    async with kvflow.open_worker(configs[0], caches[0]) as producer, kvflow.open_worker(configs[1], caches[1]) as us:
        ticket = producer.offer("request", block_ids=[[3, 4, 9]], num_tokens=48)
        report = await us.pull(ticket, block_ids=[[7, 8, 1]])
    assert report.transport == "tcp"
    records = [record for record in caplog.records if record.levelno >= logging.WARNING]
    warned = [record.getMessage() for record in records if "peer.connected" in record.getMessage()]
    assert len(warned) == (transport == "auto"), "two GPUs are not read over TCP in silence"
    assert all("nixl: it did not start here: " in each for each in warned)
    assert all("remedy=" in each for each in warned)
    for layer in ("layers.0", "layers.1"):
        for role in ("k", "v"):
            here, there = (cache.component(layer, role) for cache in made)
            assert torch.equal(here[[3, 4, 9]], there[[7, 8, 1]])
