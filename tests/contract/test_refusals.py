"""Every transport: whatever a caller or a peer gets wrong is an event, and everybody else goes on."""

import logging
from itertools import count, product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvflow.errors import TransportUnavailable
from kvflow.layout.component import Region
from kvflow.layout.tracks import Track
from kvflow.leases.tickets import LeaseName
from kvflow.planning.bind import Bound
from kvflow.planning.pairs import UnitPairs
from kvflow.reads.contract import Part, PeerAdded, PeerFailed, RankRead
from tests.contract.conftest import BLOCK, TCP_KINDS
from tests.contract.kinds import serving

FAR = 1 << 62
NUMBERS = count()


def all_blocks(world, reader, exporter, number=1, peer="p"):
    return world.dense(number, peer, exporter.region, reader.region, block=BLOCK, count=64)


def still_works(world, reader, exporter, peer="p", number=1000):
    prepared_list = reader.prepare(all_blocks(world, reader, exporter, number, peer))
    answer = reader.answer(world.read(number, prepared_list, range(64), range(64)))
    assert answer.verdict == "held", answer
    assert np.array_equal(reader.cache.bytes(), exporter.cache.bytes())


OUTSIDE = [  # offset, bytes, stride, count
    (0, 0, BLOCK, 1),
    (0, BLOCK, BLOCK, 0),
    (0, BLOCK, BLOCK - 1, 2),
    (0, BLOCK, BLOCK, 65),
    (-1, BLOCK, BLOCK, 1),
    (63 * BLOCK + 1, BLOCK, BLOCK, 1),
    (0, BLOCK, FAR, 2),
    (0, BLOCK, FAR, 8),
    (0, BLOCK, 2**63 - 1, 2**31 - 1),
    (0, BLOCK, BLOCK, 2**62),
    (0, 2**63 - 1, 2**63 - 1, 1),
    (0, -BLOCK, BLOCK, 1),
    (0, BLOCK, -BLOCK, 2),
    (0, BLOCK, BLOCK, -1),
]


def test_rows_outside_the_memory_break_their_prepared_list(world, pair):
    reader, exporter = pair
    good = {"source": exporter.cache.region, "target": reader.cache.region}
    rows = {name: world.rows(region, (0, BLOCK, BLOCK, 2)) for name, region in good.items()}
    for number, (side, row) in enumerate(product(good, OUTSIDE), start=2):
        prepared_list = world.prepared_list(number, "p", **rows)
        reader.transport.prepare(replace(prepared_list, **{f"{side}_rows": world.rows(good[side], row)}))
        assert reader.answer(world.read(number, prepared_list, [0], [0])).code == "bounds", (side, row)
        assert not reader.cache.bytes().any(), (side, row)
    still_works(world, reader, exporter)


NO_ROWS = [np.zeros((0, 5), np.int64), np.ones((2, 3), np.int64), np.ones((2, 5), np.uint64)]


@pytest.mark.parametrize("change", [{"binding": None}, *({"source_rows": table} for table in NO_ROWS)])
def test_a_list_without_a_binding_or_rows_is_broken(world, pair, change):
    reader, exporter = pair
    prepared_list = all_blocks(world, reader, exporter, 2)
    reader.transport.prepare(replace(prepared_list, **change))
    assert reader.answer(world.read(1, prepared_list, [0], [0])).code == "bounds"
    still_works(world, reader, exporter)


INT64 = np.int64
UNITS = {
    "a negative unit of the source": ([-1, 0], [0, 1], INT64),
    "a unit behind the source": ([0, 64], [0, 1], INT64),
    "a unit that is too large for a descriptor's number": ([0, (1 << 32) + 1], [0, 1], INT64),
    "a unit behind the target": ([0, 1], [0, 2**31 - 1], INT64),
    "fewer units of the target": ([0, 1], [0], INT64),
    "no units": ([], [], INT64),
    "units of another type": ([0, 1], [0, 1], np.int32),
    "units in rows": ([[0, 1]], [[0, 1]], INT64),
}


def test_units_out_of_range_fail_their_read_alone(world, pair):
    reader, exporter = pair
    prepared_list = reader.prepare(all_blocks(world, reader, exporter, 2))
    for number, (kind, (source, target, dtype)) in enumerate(UNITS.items(), start=1):
        pairs = UnitPairs(np.array(source, dtype), np.array(target, dtype))
        good = world.read(2 * number, prepared_list, [5], [5])
        bad = RankRead(2 * number + 1, "p", good.lease, (*good.parts, Part(2, pairs)))
        reader.post(bad, good)
        first, second = reader.sink.wait(("read", 2 * number + 1), ("read", 2 * number))
        assert (first.verdict, first.code, second.verdict) == ("failed", "bounds", "held"), kind
        assert set(np.flatnonzero(reader.cache.bytes()) // BLOCK) == {5}, kind
    still_works(world, reader, exporter)


def test_a_read_of_nothing_is_refused(world, pair):
    reader, exporter = pair
    assert reader.answer(RankRead(1, "p", LeaseName(0, 0), ())).code == "bounds"
    still_works(world, reader, exporter)


BOUND = {"source_index": [0, 1], "target_index": [0, 1], "cuts": [0, 2], "nbytes": 2 * BLOCK}
KINDS = {"source_index": np.int32, "target_index": np.int32, "cuts": np.int64}
CHANGES = [
    {"source_index": [-1, 0]},
    {"source_index": [0, 64]},
    {"target_index": [0, 2**31 - 1]},
    {"target_index": [0]},
    {"source_index": [], "target_index": [], "cuts": [0]},
    {"source_index": [], "target_index": [], "cuts": [0, 0]},
    {"source_index": [0], "target_index": [0], "cuts": [0, 1]},
    {"cuts": [0, 1]},
    {"cuts": [0, 2, 1, 2]},
    {"cuts": [0, 1, 1, 2]},
    {"cuts": [1, 2]},
    {"cuts": [2]},
    {"nbytes": 2 * BLOCK + 1},
]


def test_what_a_binding_makes_of_good_units_is_checked(world, pair):
    reader, exporter = pair
    prepared_list = reader.prepare(all_blocks(world, reader, exporter, 2))
    bind = prepared_list.binding.bind
    for number, change in enumerate(CHANGES, start=1):
        parts = BOUND | change
        arrays = {name: np.array(parts[name], dtype=kind) for name, kind in KINDS.items()}
        made = Bound(nbytes=parts["nbytes"], **arrays)
        prepared_list.binding.bind = lambda *_, made=made, **__: made
        answer = reader.answer(world.read(number, prepared_list, [0, 1], [0, 1]))
        assert (answer.verdict, answer.code) == ("failed", "bounds"), change
        assert not reader.cache.bytes().any(), change
    prepared_list.binding.bind = bind
    assert reader.answer(world.read(100, prepared_list, [0, 1], [0, 1])).verdict == "held"


def test_descriptors_of_different_lengths_do_not_pair(world, pair):
    reader, exporter = pair
    source = world.rows(exporter.cache.region, (0, 512, 512, 4), (BLOCK, 1024, 1024, 4))
    prepared_list = world.prepared_list(2, "p", source, world.rows(reader.cache.region, (0, 512, 512, 4)))
    reader.transport.prepare(prepared_list)
    assert reader.answer(world.read(1, prepared_list, [0, 4], [0, 1])).code == "bounds"
    still_works(world, reader, exporter)


def test_a_list_must_be_prepared_and_belong_to_the_peer(world, pair):
    reader, exporter = pair
    other = world.exporter(64 * BLOCK, seed=2)
    world.connect(reader, other, "q")
    prepared_list = reader.prepare(all_blocks(world, reader, other, 2, "q"))
    wrong_peer = all_blocks(world, reader, exporter, 2)
    reader.post(world.read(1, wrong_peer, [0], [0]))
    reader.post(world.read(2, replace(prepared_list, list_id=9), [0], [0]))
    reader.post(world.read(3, replace(prepared_list, peer="nobody"), [0], [0]))
    events = reader.sink.wait(("read", 1), ("read", 2), ("read", 3))
    assert [event.code for event in events] == ["program_unknown", "program_unknown", "peer_lost"]
    still_works(world, reader, exporter)


def test_removing_a_peer_cancels_what_waits_and_it_can_come_back(world, pair):
    reader, exporter = pair
    other = world.exporter(64 * BLOCK, seed=2)
    world.connect(reader, other, "q")
    prepared_list = reader.prepare(all_blocks(world, reader, exporter))
    with world.holding(reader):
        reader.post(world.read(1, prepared_list, [1], [1]))
        reader.transport.remove_peer("p")
        reader.transport.remove_peer("p")
        reader.transport.remove_peer("nobody else")
        reader.post(world.read(2, prepared_list, [2], [2]))
    waiting, late = reader.sink.wait(("read", 1), ("read", 2))
    assert (waiting.code, late.code) == ("cancelled", "peer_lost")
    still_works(world, reader, other, "q", 1001)
    world.connect(reader, exporter, "p")
    assert reader.answer(world.read(3, prepared_list, [3], [3])).code == "program_unknown"
    still_works(world, reader, exporter)


def test_adding_a_peer_twice_is_harmless(world, pair):
    reader, exporter = pair
    prepared_list = reader.prepare(all_blocks(world, reader, exporter))
    with reader.sink.holding(("peer", "p")):
        reader.transport.add_peer(exporter.address("p"))
        reader.post(world.read(1, prepared_list, [1], [1]))
    assert reader.sink.wait(("read", 1))[0].verdict == "held"
    one, other = (event for event in reader.sink.events if isinstance(event, PeerAdded))
    assert one == other


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_metadata_that_was_damaged_is_refused_and_the_good_one_still_works(world, data):
    reader, exporter = world.shared(64 * BLOCK)
    good = exporter.published.planes[world.kind]
    at = data.draw(st.integers(0, len(good) - 1))
    flip = good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :]
    malformed = [good[:at], good + b"\0", good[at + 1 :], data.draw(st.binary(max_size=600))]
    bad = data.draw(st.sampled_from([flip, *malformed]))
    number = next(NUMBERS)
    reader.transport.add_peer(exporter.address(f"bad-{number}", planes={world.kind: bad}))
    (event,) = reader.sink.wait(("peer", f"bad-{number}"))
    if bad in malformed:
        assert isinstance(event, PeerFailed)
        assert event.code == "metadata_invalid"
    elif isinstance(event, PeerAdded):  # well-formed, and false: the digest of the publication covers it on its way
        reader.transport.remove_peer(f"bad-{number}")
    world.connect(reader, exporter, f"good-{number}")
    reader.transport.remove_peer(f"good-{number}")


def test_metadata_over_a_mebibyte_is_refused(world, pair):
    reader, exporter = pair
    reader.transport.add_peer(exporter.address("q", planes={world.kind: bytes((1 << 20) + 1)}))
    assert reader.sink.wait(("peer", "q"))[0].code == "metadata_invalid"


def test_the_metadata_of_another_transport_is_refused(world, pair):
    reader, exporter = pair
    other = type(world)({"nixl": "loopback", "loopback": "tcp", "tcp": "nixl", "async": "tcp"}[world.kind])
    try:
        end = other.end(BLOCK)
        reader.transport.add_peer(end.address("q"))
        assert reader.sink.wait(("peer", "q"))[0].code == "plane_unfit"
        lie = {world.kind: end.published.planes[other.kind]}
        reader.transport.add_peer(exporter.address("r", planes=lie))
        assert reader.sink.wait(("peer", "r"))[0].code == "metadata_invalid"
    finally:
        other.close_all()


def test_an_epoch_table_that_cannot_be_one_is_refused(world, pair):
    reader, exporter = pair
    at = exporter.epochs_region.address
    tables = [
        Region(at + 1, 8),
        Region(at, 12),
        Region((1 << 63) - 8, 64),
        Region(at, 8, "VRAM"),
    ]
    if not world.serves:  # an exporter that serves looks into its own table, wherever that is
        tables.append(Region(at & ~0xFFF, 1 << 40))
    for number, table in enumerate(tables):
        reader.transport.add_peer(exporter.address(f"q{number}", epochs=table))
        assert reader.sink.wait(("peer", f"q{number}"))[0].code == "metadata_invalid", table
    still_works(world, reader, exporter)


def test_a_sink_that_raises_loses_its_event_and_nothing_else(world, pair, caplog):
    reader, exporter = pair
    prepared_list = reader.prepare(all_blocks(world, reader, exporter))

    def explode():
        raise RuntimeError("loop is closed")

    reader.sink.on(("read", 1), explode)
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"):
        with world.holding(reader):  # the read thread answers, not the caller
            reader.post(world.read(1, prepared_list, [0], [0]))
        still_works(world, reader, exporter)


def test_commands_that_break_the_contract_fail_reads_not_the_transport(world, pair, caplog):
    reader, exporter = pair
    prepared_list = all_blocks(world, reader, exporter)
    with caplog.at_level(logging.CRITICAL, "kvflow.reads.core"), world.holding(reader):
        reader.transport.prepare(prepared_list)
        reader.post(world.read(1, prepared_list, [1], [1]))
        reader.transport.prepare(prepared_list)  # its id is taken
    assert reader.sink.wait(("read", 1))[0].code == "transport_error"
    assert reader.sink.failed("p").code == "transport_error"
    world.connect_again(reader, exporter, "p")
    still_works(world, reader, exporter)


def test_close_ends_pending_reads_once_and_further_calls_do_nothing(world, pair):
    reader, exporter = pair
    prepared_list = reader.prepare(all_blocks(world, reader, exporter))
    with world.holding(reader):
        reader.post(*(world.read(number, prepared_list, [number], [number]) for number in (1, 2, 3)))
        closers = world.threads(3, reader.transport.close)
    world.join(closers)
    reader.transport.close()
    ended = len(reader.sink.events)
    answers = reader.sink.wait(("read", 1), ("read", 2), ("read", 3))
    assert [answer.code for answer in answers] == ["cancelled"] * 3
    reader.post(world.read(9, prepared_list, [0], [0]))
    reader.transport.add_peer(exporter.address("q"))
    reader.transport.cancel([9])
    assert len(reader.sink.events) == ended
    assert len(set(reader.sink.order())) == ended


@pytest.mark.parametrize("world", TCP_KINDS, indirect=True)
def test_blocks_that_are_not_leased_are_refused_where_the_exporter_serves(world):
    reader, exporter = world.end(64 * BLOCK), world.end(64 * BLOCK, seed=1, start=False)
    region = exporter.region
    tracks = (Track(region.address, BLOCK, BLOCK, 64, region.memory, region.device),)
    leased = {(1, 7): (range(10),), (2, 9): (range(20, 30),)}
    exporter.epochs[1], exporter.epochs[2] = 7, 9
    everything = serving(exporter.cache, exporter.epochs)
    given = replace(everything, tracks=(tracks,), blocks_of=lambda slot, epoch: leased.get((slot, epoch)))
    exporter.transport.start([exporter.region], exporter.epochs_region, given)
    world.connect(reader, exporter, "p")
    prepared_list = reader.prepare(all_blocks(world, reader, exporter))
    one, other = {"slot": 1, "epoch": 7}, {"slot": 2, "epoch": 9}
    cases = [([10], one), ([9, 19], one), ([29, 0], other), ([63], other)]
    for read_id, (blocks, lease) in enumerate(cases):
        assert reader.answer(world.read(read_id, prepared_list, blocks, blocks, **lease)).code == "bounds", blocks
    assert not reader.cache.bytes().any()
    # Of one batch, whose reads share a chunk, those are refused that name what is not leased to them.
    batch = {9: ([9], one), 10: ([10], one), 20: ([20], other), 30: ([30], other)}
    with world.holding(reader):
        for read_id, (blocks, lease) in batch.items():
            reader.post(world.read(read_id, prepared_list, blocks, blocks, **lease))
    answers = dict(zip(batch, reader.sink.wait(*(("read", read_id) for read_id in batch)), strict=True))
    assert {read_id: answer.code or answer.verdict for read_id, answer in answers.items()} == {
        9: "held",
        10: "bounds",
        20: "held",
        30: "bounds",
    }
    content, got = (end.cache.bytes().reshape(64, BLOCK) for end in (exporter, reader))
    assert np.array_equal(got[[9, 20]], content[[9, 20]])
    assert not np.delete(got, [9, 20], axis=0).any()


def test_close_before_start_is_fine(world):
    end = world.end(BLOCK, start=False)
    end.transport.close()
    end.transport.close()


def test_a_failed_start_says_what_to_do_and_can_be_closed(world):
    # Over TCP memory of devices is only not served; what fails is to listen.
    options = {"bind": "tcp://192.0.2.1:1"} if world.kind == "tcp" else {}
    end = world.end(BLOCK, start=False, **options)
    with pytest.raises(TransportUnavailable) as caught:
        end.transport.start([Region(1 << 40, BLOCK, "VRAM", 1000)], end.epochs_region)
    assert caught.value.remedy
    end.transport.close()
    end.transport.close()
