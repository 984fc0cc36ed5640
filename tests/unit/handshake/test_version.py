from handshake.messages import SUPPORTED, WIRE_VERSION, VersionRange, choose
from tests.helpers.loops import looped


@looped(
    "ours, theirs, chosen",
    [
        ((1, 1), (1, 1), 1),
        ((1, 3), (2, 5), 3),
        ((2, 5), (1, 3), 3),
        ((1, 9), (4, 4), 4),
        ((1, 1), (2, 3), None),
        ((2, 3), (1, 1), None),
        ((1, 1), (99, 99), None),
    ],
)
def test_the_highest_common_version_is_chosen(ours, theirs, chosen):
    assert choose(VersionRange(*ours), VersionRange(*theirs)) == chosen


def test_this_release_speaks_its_own_version():
    assert SUPPORTED.highest == WIRE_VERSION
    assert str(SUPPORTED) == "2..2"
