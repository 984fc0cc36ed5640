"""Questions to a worker of this process, as members ask them."""

import asyncio

from kvflow.leases.table import Reader
from kvflow.leases.tickets import MAC_BYTES, LeaseName
from kvflow.rendezvous.questions import AnswerSettled, AskHeld, AskSettled, Settled
from tests.helpers.waiting import patiently

from .helpers import lease_of

LONG_MS = 86_400_000
ASKER = Reader("decode-0", 0, 1, "its key")
OTHER = Reader("decode-1", 0, 1, "another key")


def chain(*tokens):
    """Return a digest for each block that covers those before."""
    return [f"{tokens[:end]}".encode() for end in range(1, len(tokens) + 1)]


class Asked:
    """One question, and its answers; ``takes``: whether its connection takes them."""

    def __init__(self, worker, question, key="connection", reader=ASKER, nonce=0, *, takes=True):
        self.answers = []
        self._takes = takes
        self._come = asyncio.Event()
        worker._leases.answers.ask(key, question, reader, self._take, nonce)

    def _take(self, answer):
        self.answers.append(answer)
        self._come.set()
        return self._takes

    async def answer(self):
        await patiently(self._come.wait())
        (answer,) = self.answers
        return answer


def mac_of(ticket):
    """Return the MAC of a ticket of one grant."""
    return ticket.signed[0][:MAC_BYTES]


def named(ticket, mac=None):
    """Return the name of the lease of a ticket of one grant, with its MAC or another."""
    return LeaseName(*lease_of(ticket), mac_of(ticket) if mac is None else mac)


def answered(*args, **how):
    """Return an answer about one lease."""
    return AnswerSettled((Settled(*args, **how),))


def settled(worker, ticket, *known, above=0, wait_ms=LONG_MS, **how):
    ask = AskSettled((named(ticket),), known=known, above=above, wait_ms=wait_ms)
    return Asked(worker, ask, **how)


async def settled_of(asked):
    """Wait for what is answered about the only lease."""
    (answer,) = (await asked.answer()).leases
    return answer


def held(worker, digests, *, at_least=0, wait_ms=LONG_MS, **how):
    return Asked(worker, AskHeld(digests=tuple(digests), at_least=at_least, wait_ms=wait_ms), **how)
