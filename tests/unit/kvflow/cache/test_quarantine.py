"""When the last resort is due: at a number of bytes that have been there for a while, or at an age."""

import pytest

from kvflow.cache.destinations import Standing
from kvflow.cache.quarantine import DUE_AFTER_S, STARVED_S_MAX, Demand, LastResort
from kvflow.config import QuarantineLimits
from kvflow.transport.base import RESET_DRAIN_S

BLOCK = 1000


@pytest.fixture
def resort():
    return LastResort(QuarantineLimits(quarantine_bytes_max=10 * BLOCK, quarantine_s_max=60.0), BLOCK)


def standing(*blocks_and_since, now=60.0):
    return Standing(
        num_blocks=sum(blocks for blocks, _ in blocks_and_since),
        lasting_blocks=sum(blocks for blocks, since in blocks_and_since if now - since > DUE_AFTER_S),
        since=min((since for _, since in blocks_and_since), default=None),
    )


@pytest.mark.parametrize(
    ("held", "setting"),
    [
        ([], None),
        ([(10, 0.0)], None),
        ([(6, 0.0), (4, 50.0)], None),
        ([(6, 0.0), (5, 54.9)], "quarantine_bytes_max"),
        ([(6, 0.0), (5, 55.0)], None),
        ([(1000, 59.9)], None),
        ([(11, 0.0), (5, 60.0)], "quarantine_bytes_max"),
        ([(1, -0.5), (1, 59.0)], "quarantine_s_max"),
        ([(11, -0.5)], "quarantine_bytes_max"),
    ],
)
def test_it_is_due_above_a_limit_and_not_at_it(resort, held, setting):
    assert resort.due(standing(*held), 60.0) == (setting is not None)
    if setting:
        assert resort.ended() == Demand(setting, sum(blocks for blocks, _ in held))


def test_it_is_due_when_peers_have_waited_too_long_for_staging_buffers(resort):
    held = standing((2, 0.0))
    assert not resort.due(held, 1.0, starved=True)
    assert not resort.due(held, 1.0 + STARVED_S_MAX, starved=True)
    assert not resort.due(held, 1.5 + STARVED_S_MAX)  # a buffer came back: the wait begins anew
    assert not resort.due(held, 2.0 + STARVED_S_MAX, starved=True)
    assert not resort.due(held, 2.0 + 2 * STARVED_S_MAX, starved=True)
    assert resort.due(held, 2.5 + 2 * STARVED_S_MAX, starved=True)
    assert resort.ended() == Demand("staging_bytes", 2)


def test_a_pull_that_was_cancelled_has_longer_to_end_than_a_renewal_would_give_it():
    assert DUE_AFTER_S > RESET_DRAIN_S


def test_it_is_demanded_once_at_a_time(resort):
    held = standing((11, 0.0))
    assert resort.due(held, 6.0)
    assert not resort.due(held, 6.1)
    resort.ended()
    assert resort.due(held, 6.2)


def test_an_answer_that_nobody_asked_for_is_a_defect(resort):
    with pytest.raises(AssertionError):
        resort.ended()
