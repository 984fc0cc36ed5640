"""A member of the cluster that lies, in a process of its own: many short conversations with one listener.

Conversation ``i`` is drawn from ``seed/i``. ``python -m tests.fuzz.attacker ENDPOINT SECRET SEED`` lies without end,
and prints what it has told.
"""

import asyncio
import json
import sys
import time
from contextlib import contextmanager
from itertools import count

import zmq

import handshake

from .frames import conversation

AT_ONCE = 12
"""Conversations: far below what a listener takes at once, so that it turns none away unheard."""

PATIENCE_S = 60.0
PRINTED = 100
"""Mutated messages from one line that is printed to the next."""


class Attack:
    """The conversations of one process.

    Attributes:
        told: mutated messages so far, and connections.
    """

    def __init__(self, endpoint, secret, seed, numbers):
        self._endpoint = endpoint
        self._security = handshake.ClusterSecurity.from_secret(secret)
        self._seed = seed
        self._numbers = numbers
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._under_way = {}
        self.told = {"said": 0, "conversations": 0, "unanswered": 0}

    def begin(self):
        number = next(self._numbers)
        said = conversation(f"{self._seed}/{number}")
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        dealer.reconnect_ivl = -1
        dealer.curve_serverkey = self._security.server.public
        dealer.curve_publickey = self._security.client.public
        dealer.curve_secretkey = self._security.client.private
        dealer.connect(self._endpoint)
        for message in said.messages:
            dealer.send_multipart(message)
        self._poller.register(dealer, zmq.POLLIN)
        self._under_way[dealer] = (number, time.monotonic(), said)

    def step(self):
        """Hear what was answered; a conversation is over with the listener's last word."""
        for dealer, _ in self._poller.poll(100):
            while dealer in self._under_way:
                try:
                    answer = dealer.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if b"\xa4type\xa3bye" in answer or b"\xa4type\xa6refuse" in answer:
                    self._end(dealer)
        late = time.monotonic() - PATIENCE_S
        for dealer, (_, begun_at, _) in tuple(self._under_way.items()):
            if begun_at < late:
                self.told["unanswered"] += 1
                self._leave(dealer)

    def _leave(self, dealer):
        _, _, said = self._under_way.pop(dealer)
        self._poller.unregister(dealer)
        dealer.close()
        return said

    def _end(self, dealer):
        said = self._leave(dealer)
        self.told["said"] += said.mutated
        self.told["conversations"] += 1

    def tell(self):
        """Return what was said so far."""
        return self.told | {"under_way": [number for number, *_ in [*self._under_way.values()]]}

    async def run(self, goal):
        """Say so many mutated messages."""
        await asyncio.to_thread(self.say, goal)

    def say(self, goal):
        """Do so on the calling thread."""
        while self.told["said"] < goal:
            while len(self._under_way) < AT_ONCE:
                self.begin()
            self.step()


@contextmanager
def attacking(endpoint, secret, seed, first, step):
    """Open one, whose conversations have these numbers."""
    yield Attack(endpoint, secret, seed, count(first, step))


def main(endpoint, secret, seed):
    attack = Attack(endpoint, secret, seed, count())
    for goal in count(PRINTED, PRINTED):
        attack.say(goal)
        sys.stdout.write(json.dumps(attack.told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
