"""Meeting a peer again that was lost while it was in use, so that the next pull finds it met."""

import asyncio
from collections.abc import Awaitable, Callable

from kvflow.cache.tickets import Member
from kvflow.errors import DeadlineExceeded, KvflowError, PeerLost, PeerUnavailable
from kvflow.rendezvous.failures import NotDialled
from kvflow.worker.breaker import pause_s

REDIALS_MAX = 6
"""Attempts in the background, some twenty seconds with their own time: whoever takes longer to come back is met by the
first pull that wants it."""

PAUSE_S = 0.1
PAUSE_S_MAX = 5.0
"""Pause before each attempt, doubled each time: a process is replaced in a tenth of a second at best."""


async def redial(meet: Callable[[Member], Awaitable[object]], member: Member, draw: Callable[[], float]) -> None:
    """Meet a lost peer again, or learn that it is gone; gives up in the end, and never raises an error of kvflow.

    Args:
        meet: meets a peer; knows what to do when another incarnation answers.
        member: the peer.
        draw: returns a random number in [0, 1).

    Cancellation: safe.
    """
    for attempt in range(REDIALS_MAX):
        await asyncio.sleep(pause_s(attempt, PAUSE_S, PAUSE_S_MAX, draw()))
        try:
            await meet(member)
        except PeerUnavailable as error:
            await asyncio.sleep(error.retry_after_s)
        except (PeerLost, DeadlineExceeded, NotDialled):
            continue
        except KvflowError:
            return  # it has answered, and said why not
        else:
            return
