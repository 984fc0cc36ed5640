"""What a report says of the time of a pull, and that it is computed when it is read."""

import copy
import pickle

import msgspec
import pytest

from kvflow.leases.tickets import LeaseName
from kvflow.planning.pairs import UnitPairs
from kvflow.reads import pulls
from kvflow.reads.contract import Part, RankRead, ReadEnded
from kvflow.report import PHASES, TransferReport
from tests.helpers.loops import looped


@pytest.mark.parametrize(
    ("timings_s", "gb_per_s"),
    [
        ({"post": 1.0, "wire": 1.0, "queue": 100.0}, 1.0),
        ({"post": 0.5}, 4.0),
        ({"post": 0.0, "wire": 0.0}, 0.0),
        ({}, 0.0),
    ],
)
def test_rate(timings_s, gb_per_s):
    report = TransferReport(request_id="r", nbytes=2 * 10**9, descriptors=1, reads=1, timings_s=timings_s)
    assert report.gb_per_s == gb_per_s


class Binding:
    """A binding of units of 3 descriptors each, of which every pair of pairs merges one; says how often it is asked."""

    unit_descriptors = 3
    read_bytes = 200

    def __init__(self):
        self.asked = 0

    def count_merged(self, pairs):
        self.asked += 1
        return 3 * len(pairs.source) - 1


def report_of(*ended, binding=None):
    """Report a pull that was called at 0.5, submitted at 1.0 and completed at 9.0."""
    given = [Part(1, UnitPairs((1, 2), (3, 4)), binding or Binding())] if ended else []
    reads = [RankRead(1, "p", LeaseName(0, 7), tuple(given))]
    pull = pulls.Pull(1, "r", 1.0, reads, 100, early=2, early_bytes=30, ended=ended)
    report = pulls.report_of("r", 100, (pull,), (0.5, 1.0, 9.0))
    report.transport, report.plane = "cma", "nixl"
    return report


def test_a_report_says_what_was_given_and_how_it_was_read():
    report = report_of(ReadEnded(0, "held", chunks=2), ReadEnded(1, "held", chunks=1))
    assert (report.request_id, report.nbytes, report.early, report.early_bytes) == ("r", 100, 2, 30)
    assert (report.transport, report.plane) == ("cma", "nixl")
    assert (report.descriptors, report.read_bytes, report.reads) == (5, 400, 3)
    assert report.merged == pytest.approx(1 / 6)


def test_the_phases_of_several_ranks_are_those_of_the_slowest():
    shares = {"bind_s": 0.25, "post_s": 0.5, "scatter_s": 0.125}
    report = report_of(
        ReadEnded(0, "held", started_at=2.0, arrived_at=6.0, fence_s=0.5, **shares),
        ReadEnded(1, "held", started_at=3.0, arrived_at=5.0, fence_s=0.75, **shares),
    )
    assert report.timings_s == {
        "handshake": 0.5,
        "total": 8.5,
        "queue": 1.0,
        "bind": 0.5,
        "post": 1.0,
        "wire": 2.25,
        "scatter": 0.25,
        "fence": 0.5,
        "deliver": 2.5,
    }
    assert report.timings_s.keys() == {*PHASES, "total"}


def test_an_offer_that_is_followed_waits_between_its_ranges():
    ended = [
        ReadEnded(1, "held", started_at=2.25, arrived_at=2.75, fence_s=0.125),
        ReadEnded(2, "held", started_at=6.5, arrived_at=7.5, post_s=0.25),
    ]
    ranges = [
        pulls.TokenRange(1, "r", 2.0, (), 80, first=0, end=16, completed_at=3.0, ended=ended[:1], early=1),
        pulls.TokenRange(1, "r", 6.0, (), 20, first=16, end=20, completed_at=8.0, ended=ended[1:], early=2),
    ]
    report = pulls.report_of("r", 100, ranges, (0.5, 1.0, 9.0), sealed_at=7.0)
    assert (report.ranges, report.seal_s, report.early) == (2, 2.0, 3)
    assert report.timings_s == {
        "handshake": 0.5,
        "total": 8.5,
        "queue": 0.25 + 0.5 + (8.0 - 1.0 - 2.0),
        "bind": 0.0,
        "post": 0.25,
        "wire": 0.5 + 0.75,
        "scatter": 0.0,
        "fence": 0.125,
        "deliver": 0.125 + 0.5,
    }
    assert sum(report.timings_s.values()) == 2 * 8.5
    assert report_of().ranges == report_of().seal_s == 0


def test_a_copy_that_takes_all_the_time_leaves_none_for_the_wire():
    ended = ReadEnded(0, "held", started_at=2.0, arrived_at=2.5, post_s=0.75)
    assert report_of(ended).timings_s["wire"] == 0.0


def test_a_pull_that_moved_nothing_has_neither_descriptors_nor_phases():
    report = report_of()
    assert (report.descriptors, report.merged, report.reads) == (0, 0.0, 0)
    assert report.timings_s == {"handshake": 0.5, "total": 8.5}


@looped(
    "read",
    [
        repr,
        copy.copy,
        pickle.dumps,
        lambda report: report.merged,
        lambda report: report.gb_per_s,
        lambda report: report == report_of(ReadEnded(0, "held")),
        lambda report: msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=TransferReport),
    ],
    ids=["repr", "copy", "pickle", "merged", "rate", "equality", "msgspec"],
)
def test_what_is_not_read_is_not_computed_and_what_is_read_only_once(read):
    binding = Binding()
    report = report_of(ReadEnded(0, "held"), binding=binding)
    assert (report.nbytes, binding.asked) == (100, 0)
    for _ in range(2):
        read(report)
        assert binding.asked == 1


def test_a_report_that_is_not_computed_equals_its_copies():
    report = report_of(ReadEnded(0, "held", chunks=1, started_at=2.0, arrived_at=3.0))
    assert copy.copy(report) == pickle.loads(pickle.dumps(report)) == report
    assert msgspec.json.decode(msgspec.json.encode(report), type=TransferReport) == report
    with pytest.raises(AttributeError):
        _ = report.nothing
