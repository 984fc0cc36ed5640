"""The oracle: each error needs what was done to explain it, and nothing else does."""

from typing import get_args

import pytest

from kvflow import errors
from tests.fakes.troubles import Trouble, Troubles
from tests.simulation.oracle import EXPLAINED, Circumstances, explains

NOTHING = {
    "forged": False,
    "occupied": False,
    "crowded": False,
    "draining": False,
    "closing": False,
    "over": False,
    "troubles": set(),
}

REASONS = {
    errors.TicketInvalid("x"): {"forged": True},
    errors.BlockIdsInvalid("x"): {"occupied": True},
    errors.CapacityExceeded("pulls", 1): {"crowded": True},
    errors.WorkerDraining("x"): {"draining": True},
    errors.WorkerClosed("x"): {"closing": True},
    errors.TransferCancelled("x"): {"closing": True},
    errors.StaleLease("x"): {"over": True},
    errors.PeerRefused("closing", "x"): {"troubles": {"left"}},
    errors.ProtocolViolation("x"): {"troubles": {"doubled"}},
    errors.PeerLost("x"): {"troubles": {"parted"}},
    errors.PeerUnavailable("x"): {"troubles": {"killed"}},
    errors.DeadlineExceeded("x"): {"troubles": {"waited"}},
    errors.TransferFailed("x"): {"troubles": {"failed"}},
}
"""Error -> the one thing of all these that explains it."""


def kind(error):
    return type(error).__name__


@pytest.mark.parametrize("error", REASONS, ids=kind)
def test_an_error_needs_its_own_reason(error):
    assert not explains(Circumstances(**NOTHING), error)
    assert explains(Circumstances(**NOTHING | REASONS[error]), error)


@pytest.mark.parametrize("error", REASONS, ids=kind)
def test_another_reason_does_not_explain_it(error):
    others = [reason for reason in REASONS.values() if "troubles" not in reason and reason != REASONS[error]]
    for reason in others:
        assert not explains(Circumstances(**NOTHING | reason), error), reason


def test_no_fault_explains_an_error_that_blames_the_caller():
    everything = {name: True for name in NOTHING if name != "troubles"}
    troubles = {*get_args(Trouble)}
    done = Circumstances(**everything, troubles=troubles)
    for error in (
        errors.BlockRangeMismatch("x"),
        errors.LayoutMismatch("a", 1, 2),
        errors.PlanUnsound("x"),
        errors.AuthenticationFailed("x"),
        errors.ArgumentInvalid("x", "text", 1),
        errors.KvflowError("x"),
    ):
        assert not explains(done, error), error


def test_every_way_in_which_a_transfer_fails_is_judged():
    kinds, unseen = set(), [errors.TransferFailed]
    while unseen:
        kinds.add(unseen[-1])
        unseen += unseen.pop().__subclasses__()
    ours = {each for each in kinds if each.__module__ == errors.__name__}
    assert ours - {errors.PeerUnavailable} <= EXPLAINED.keys()  # a kind of PeerLost


def test_troubles_are_those_of_both_hosts_and_between_them():
    troubles = Troubles()
    troubles.note("stopped", "b")
    troubles.note("cut", "a", "b")
    troubles.note("parted", "b", "c")
    assert troubles.between("a", ["b"]) == {"stopped", "cut"}
    assert troubles.between("b", ["a", "c"]) == {"stopped", "cut", "parted"}
    assert troubles.between("a", ["c"]) == set()
    troubles.note("slow")
    assert troubles.between("a", ["c"]) == {"slow"}
