import pytest

from handshake.limits import LEASES_MAX, Limits
from handshake.rates import Allowance, pause_s

NOW = 100.0


def test_messages_and_leases_are_counted_apart():
    allowance = Allowance(Limits(messages_per_s_max=2.0, leases_per_s_max=LEASES_MAX), NOW)
    assert [allowance.messages.take(1, NOW) for _ in range(3)] == [True, True, False]
    assert allowance.leases.take(LEASES_MAX, NOW)
    assert not allowance.leases.take(1, NOW)


def test_the_largest_message_fits_every_allowance():
    with pytest.raises(ValueError, match="leases_per_s_max"):
        Limits(leases_per_s_max=LEASES_MAX - 1)


def test_pauses_double_and_half_of_each_is_random():
    assert [pause_s(attempt, 1.0, 5.0, 0.0) for attempt in (-1, 0, 1, 2, 3, 10**6)] == [0.5, 0.5, 1.0, 2.0, 2.5, 2.5]
    assert [pause_s(0, 1.0, 5.0, draw) for draw in (0.0, 0.5, 1.0)] == [0.5, 0.75, 1.0]
    assert [pause_s(attempt, 0.005, 0.5) for attempt in (0, 1, 7)] == [0.005, 0.01, 0.5]
