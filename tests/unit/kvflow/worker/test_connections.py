"""The states of a connection: every state meets every event, and real workers walk the table."""

from typing import get_args

import msgspec
import pytest

from kvflow import errors
from kvflow.events import PeerDropped
from kvflow.ids import IllegalTransition
from kvflow.leases.issuer import Issuer
from kvflow.leases.tickets import RankAddress
from kvflow.worker.connections import TRANSITIONS, Connection, ConnectionEvent, ConnectionState
from kvflow.worker.runtime import open_worker

from .helpers import SPECS, cache_of
from .pulling import config, failure, opened

PAIRS = [(state, event) for state in get_args(ConnectionState) for event in get_args(ConnectionEvent)]
HAS = {
    "dialing": set(),
    "linked": {"link"},
    "attached": {"link", "carrier"},
    "connected": {"link", "carrier", "peer"},
    "unreadable": {"link", "error"},
}
"""What a connection has in each state, as the table in the module's docstring says."""


def connection_in(state):
    address = RankAddress(0, "0" * 32, "tcp://127.0.0.1:5000", 0, 4)
    issuer = Issuer("prefill-0", [address], sign=lambda payload: bytes(32), lease_s=30.0)
    (member,) = issuer.offer("r", block_ids=[[1]], num_tokens=1)[0].members()
    return Connection(member, 0.0, state)


@pytest.mark.parametrize(("state", "event"), PAIRS)
async def test_a_state_takes_an_event_or_refuses_it_unchanged(state, event):
    connection = connection_in(state)
    change = connection.change()
    change.send(None)  # wait for the next change
    waiting = connection._changed
    after = TRANSITIONS.get((state, event))
    if after is None:
        with pytest.raises(IllegalTransition, match=f"a connection that is {state} cannot be {event}"):
            connection.advance(event)
    else:
        connection.advance(event)
    assert connection.state == (after or state)
    assert waiting.done() is (after is not None), "a task that waits is woken by a change, and by nothing else"
    change.close()


@pytest.fixture
def walked(monkeypatch):
    """Note each event of every connection, and what the connection has afterwards."""
    events, advance = [], Connection.advance

    def noted(self, event):
        advance(self, event)
        has = {name for name in ("link", "carrier", "peer", "error") if getattr(self, name) is not None}
        if self.state in HAS:
            assert has == HAS[self.state]
        events.append(event)

    monkeypatch.setattr(Connection, "advance", noted)
    return events


async def test_a_lost_peer_is_dropped_and_connected_again(walked):
    async with opened() as world:
        await world.pull()
        world.faults.failing[0] = "peer_lost"
        assert isinstance(await failure(world.start(world.ticket("lost"))), errors.PeerLost)
        await world.heard(PeerDropped)
        world.faults.heal()
        await world.pull(world.ticket("again"))
        assert walked == ["linked", "attached", "connected", "dropped", "closed", "linked", "attached", "connected"]


async def test_a_cache_that_does_not_fit_is_unreadable(walked):
    specs = {name: msgspec.structs.replace(spec, dtype="bfloat16") for name, spec in SPECS.items()}
    async with opened() as world, open_worker(config("decode-1"), cache_of(specs=specs)) as other:
        ticket = world.ticket()
        assert isinstance(await failure(other.start_pull(ticket, [[1, 2]])), errors.LayoutMismatch)
        assert walked == ["linked", "unreadable"]
        await other.release(ticket)
        assert await world.producer.wait_offer("request-1") == "released"
    assert walked == ["linked", "unreadable", "dropped", "closed"]
