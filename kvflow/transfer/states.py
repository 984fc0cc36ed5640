"""The life of one leg of a pull, as a table: everything that changes its state is here.

=============  =====================================================  ==========================
state          what holds                                             deadline
=============  =====================================================  ==========================
``queued``     nothing is posted; blocks are receiving                ``Budgets.queue_s``, or ``Budgets.fence_s``
                                                                      while its lease is not admitted
``reading``    at least one batch was dispatched                      ``Budgets.wire_s``
``fencing``    every byte has arrived; the epoch is being read        ``Budgets.fence_s``
``delivered``  the fence was held                                     none
``draining``   the pull has failed; posted batches may still write    none: only the transport ends it
``dead``       the pull has failed and nothing will write             none
=============  =====================================================  ==========================
"""

from typing import Literal

LegState = Literal["queued", "reading", "fencing", "delivered", "draining", "dead"]
LegEvent = Literal[
    "dispatched", "bytes_arrived", "fence_held", "look_early", "fence_early", "lease_found", "failed", "drained"
]

TRANSITIONS: dict[tuple[LegState, LegEvent], LegState] = {
    ("queued", "dispatched"): "reading",
    ("reading", "dispatched"): "reading",
    ("reading", "bytes_arrived"): "fencing",
    ("reading", "look_early"): "queued",  # and nothing of it was read
    ("fencing", "fence_held"): "delivered",
    ("fencing", "fence_early"): "queued",
    ("fencing", "lease_found"): "queued",  # held, and only from here on its bytes are worth reading
    ("queued", "failed"): "draining",
    ("reading", "failed"): "draining",
    ("fencing", "failed"): "draining",
    ("delivered", "failed"): "draining",  # another leg of the same pull failed
    ("draining", "drained"): "dead",
}


class IllegalTransition(Exception):
    """An event that this state does not know: a defect of the scheduler. Nothing was changed."""


def advance(state: LegState, event: LegEvent) -> LegState:
    """Return the next state.

    Raises:
        IllegalTransition: the table has no such entry.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalTransition(f"a leg that is {state} cannot be {event}") from None
