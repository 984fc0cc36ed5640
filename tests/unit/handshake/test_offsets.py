import pytest
from hypothesis import given
from hypothesis import strategies as st

from handshake.rates import SAMPLES_MAX, ClockOffset, OffsetFilter

DELAYS = st.floats(0, 10)


def test_nothing_is_known_before_the_first_round_trip():
    assert OffsetFilter().best is None


@given(ahead_s=st.floats(-1e6, 1e6), trips=st.lists(st.tuples(DELAYS, DELAYS), min_size=1, max_size=SAMPLES_MAX))
def test_the_truth_is_within_the_error_whatever_the_delays(ahead_s, trips):
    offsets, at = OffsetFilter(), 1e6
    for there_s, back_s in trips:
        offsets.add(asked_at=at, answered_at=at + there_s + back_s, clock_s=at + there_s + ahead_s)
        at += 60
    best = offsets.best
    assert abs(best.ahead_s - ahead_s) <= best.error_s + 1e-6
    assert best.error_s == pytest.approx(min(sum(trip) for trip in trips) / 2, abs=1e-6)


def test_the_shortest_of_the_last_round_trips_counts():
    offsets = OffsetFilter()
    offsets.add(asked_at=0.0, answered_at=0.002, clock_s=5.001)
    offsets.add(asked_at=10.0, answered_at=11.0, clock_s=15.9)
    assert offsets.best == ClockOffset(pytest.approx(5.0), pytest.approx(0.001))
    for _ in range(SAMPLES_MAX):  # clocks drift: what was measured long ago is forgotten
        offsets.add(asked_at=20.0, answered_at=20.01, clock_s=26.005)
    assert offsets.best.ahead_s == pytest.approx(6.0)
