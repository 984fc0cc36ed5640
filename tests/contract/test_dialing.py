"""Who is dialed, how often, and who is met: clients of a modeled network, whatever its servers do, on virtual time."""

import asyncio
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from handshake.client import (
    ADDRESSES_AT_ONCE,
    ADDRESSES_MAX,
    BACKOFF_S_MAX,
    BACKOFF_S_MIN,
    CUTS_MAX,
    open_client,
)
from handshake.connection import Conversation
from handshake.errors import Closed, ConnectionLost, ConnectionRefused, TimedOut, Unauthenticated, WrongServer
from handshake.limits import Limits
from handshake.messages import ConnectionClosed, Identity, PeerReady, Publication
from handshake.sockets import Delivery, LinkEvent, ZeroMqNetwork
from handshake.states import Role
from tests.fakes import Process, World
from tests.fakes.process import bury

NAME = "tcp://prefill.invalid:9"
CONNECT_S, HANDSHAKE_S = 5.0, 6.0
LIMITS = Limits(connect_s=CONNECT_S, handshake_s=HANDSHAKE_S)
RIGHT = Identity(engine_id="right", rank=0, num_ranks=1, incarnation="0" * 31 + "1", role="prefill", software="1")
WRONG = Identity(engine_id="wrong", rank=0, num_ranks=1, incarnation="0" * 31 + "2", role="prefill", software="1")
CLIENT = Identity(engine_id="decode", rank=0, num_ranks=1, incarnation="0" * 31 + "3", role="decode", software="1")
NOTHING = Publication.of(b"")
TURNS_S = 0.02  # what takes no time takes some iterations of the loop

KINDS = ("right", "late", "wrong", "busy", "nobody", "cut", "hung", "silent")
"""What answers at an address: ``late`` is right, but takes its time; ``hung`` accepts and says nothing; ``silent`` does
not even accept; ``nobody`` refuses; ``cut`` has another secret."""


class Dialed:
    """One connection."""

    def __init__(self, network, address, kind):
        self.network, self.address, self.kind = network, address, kind
        self.down, self.greeted, self.said = asyncio.Queue(), None, asyncio.Event()
        self.answers = True
        identity = WRONG if kind == "wrong" else RIGHT
        self.server = Conversation(Role.SERVER, identity, NOTHING, limits=LIMITS, now=network.now())

    def dial(self):
        self.network.dialed.append((self.address, self.network.now()))

    def send(self, frames):
        self.said.set()
        if self.answers and self.kind in ("right", "late", "wrong", "busy"):
            if self.kind == "busy":
                self.server.refuse("busy", "there is no place", self.network.now())
            else:
                self.server.receive(frames, self.network.now())
            self.flush()
        return Delivery.QUEUED

    def flush(self):
        for frames in self.server.take_outgoing():
            self.down.put_nowait(frames)

    async def read(self, on_frames):
        if self.kind == "late":
            await asyncio.sleep(self.network.late_s)
        while True:
            on_frames(await self.down.get())

    async def watch(self, on_link):
        match self.kind:
            case "nobody":
                on_link(LinkEvent.UNREACHABLE)
            case "cut":
                on_link(LinkEvent.CUT)
            case "silent":
                pass
            case "given up":
                on_link(LinkEvent.ACCEPTED)
                await self.said.wait()  # the client greets when it is secured: this is its last word
                on_link(LinkEvent.SECURED)
            case _:
                on_link(LinkEvent.ACCEPTED)
                on_link(LinkEvent.SECURED)
        await asyncio.Event().wait()


class Played(ZeroMqNetwork):
    """A name and its addresses, which can be looked up so often.

    ``kind_of``: what answers, by the address and how often it was dialed before.
    """

    def __init__(self, process, addresses, kind_of, late_s, lookups):
        self.now, self.wall, self.addresses, self.kind_of, self.late_s = (
            process.time,
            process.wall,
            addresses,
            kind_of,
            late_s,
        )
        self.dialed, self.open, self.most = [], [], 0
        self.lookups = lookups

    def draw(self):
        return 0.5

    async def resolve(self, endpoint):
        if not self.lookups:
            await asyncio.Event().wait()
        self.lookups -= 1
        return self.addresses

    @asynccontextmanager
    async def open_dialer(self, endpoint, security, limits):
        dialed = Dialed(self, endpoint, self.kind_of(endpoint, sum(each == endpoint for each, _ in self.dialed)))
        self.open.append(dialed)
        self.most = max(self.most, len(self.open))
        try:
            yield dialed
        finally:
            self.open.remove(dialed)

    @property
    def times(self):
        """When each connection was dialed, from the first on."""
        return [at - self.dialed[0][1] for _, at in self.dialed]

    @property
    def counts(self):
        """How often each address was dialed."""
        every = [address for address, _ in self.dialed]
        return {address: every.count(address) for address in every}


def address_of(number):
    return f"tcp://10.0.0.{number}:9"


class Visit:
    """A client that dials, and stays for a while. It has ``met`` somebody or an ``error``, and hears ``events``."""

    def __init__(self, addresses, kind_of, *, late_s=0.0, first="", stay=None, lookups=1000):
        world = World(1)
        process = Process(world, "client", "10.0.0.99", began_s=1.0, skew_s=0.0)
        self.network = Played(process, addresses, kind_of, late_s, lookups)
        self.met = self.error = None
        self.events, self.stay, self.first = [], stay, first
        try:
            task = process.create_task(self.run(), name="drive the client")
            ended = world.run(task.done, 100.0)
            if world.violation is not None:
                raise world.violation
            assert ended, "it never ends"
            task.result()
        finally:
            bury(world)

    async def run(self):
        began = self.network.now()
        try:
            async with open_client(
                NAME,
                identity=CLIENT,
                security=None,
                on_event=self.events.append,
                limits=LIMITS,
                network=self.network,
                why_not=lambda server: "" if server == RIGHT else server.engine_id,
                first=self.first,
            ) as client:
                self.took_s = self.network.now() - began
                self.met = client
                if self.stay is not None:
                    await self.stay(self, client)
                else:
                    await asyncio.sleep(1.0)
        except (ConnectionLost, ConnectionRefused, TimedOut, Unauthenticated) as error:
            assert self.met is None
            self.took_s, self.error = self.network.now() - began, error


ERRORS = {
    "wrong": WrongServer,
    "busy": ConnectionRefused,
    "nobody": ConnectionLost,
    "hung": TimedOut,
    "silent": TimedOut,
}


@settings(max_examples=60)
@given(st.lists(st.sampled_from(("busy", "nobody", "cut")), max_size=6), st.sampled_from(("right", *ERRORS)))
def test_one_address_is_dialed_until_it_answers_or_will_not(outcomes, last):
    """What may pass is dialed again, after pauses that grow; two cuts in a row mean another secret."""
    outcomes = [*outcomes, last]
    visit = Visit((address_of(1),), lambda _, before: outcomes[min(before, len(outcomes) - 1)])
    cuts, expected = 0, None
    for number, outcome in enumerate(outcomes, 1):
        cuts = cuts + 1 if outcome == "cut" else 0
        if cuts == CUTS_MAX:
            expected = number, Unauthenticated
            break
        if outcome in ("right", "wrong", "hung"):
            expected = number, ERRORS.get(outcome)
    times = visit.network.times
    pauses = [later - earlier for earlier, later in pairwise(times)]
    for number, pause_s in enumerate(pauses):
        assert pause_s == pytest.approx(0.75 * min(BACKOFF_S_MAX, BACKOFF_S_MIN * 2**number), abs=TURNS_S / 4)
    if expected is not None:
        assert (len(times), visit.error and type(visit.error)) == expected
    elif last == "silent" and len(outcomes) == 1:
        assert isinstance(visit.error, TimedOut)
        assert visit.took_s == pytest.approx(CONNECT_S, abs=TURNS_S)
    else:
        assert visit.error is not None
        assert CONNECT_S - BACKOFF_S_MAX - TURNS_S < visit.took_s < CONNECT_S + TURNS_S
    assert [type(event) for event in visit.events] == ([PeerReady, ConnectionClosed] if visit.met else [])


several = st.one_of(
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=ADDRESSES_MAX + 4),
    st.lists(st.sampled_from(KINDS[2:]), min_size=ADDRESSES_MAX - 1, max_size=ADDRESSES_MAX + 4),
)


@settings(max_examples=150)
@given(several, st.sampled_from((None, None, "nobody", "wrong", "right", "silent")))
def test_of_several_addresses_the_right_one_is_met_once_and_heard_alone(kinds, first):
    """Whatever is at the others. Four are dialed at a time, sixteen in all; each that is silent has its share."""
    by_address = {address_of(number): kind for number, kind in enumerate(kinds)}
    addresses = tuple(by_address)
    if first is not None:
        by_address[address_of(250)] = first
    ways = [address_of(250)] * (first is not None) + [*addresses]
    tried = ways[:ADDRESSES_MAX]
    several_times = sum(by_address[each] == "cut" for each in tried)
    late_s = 0.8 * HANDSHAKE_S / -(-(len(tried) + several_times) // ADDRESSES_AT_ONCE)
    visit = Visit(
        addresses, lambda address, _: by_address[address], late_s=late_s, first=address_of(250) if first else ""
    )
    network, at = visit.network, [by_address[each] for each in tried]
    assert network.most <= ADDRESSES_AT_ONCE
    assert set(network.counts) <= set(tried)
    assert network.dialed[0][0] == ways[0]
    for address, count in network.counts.items():
        assert count <= {"nobody": 100, "busy": 100, "cut": CUTS_MAX}.get(by_address[address], 1)
    if "right" in at or "late" in at:
        assert visit.met is not None, visit.error
        assert by_address[visit.met.address] in ("right", "late")
        assert [type(event) for event in visit.events] == [PeerReady, ConnectionClosed]
        assert visit.events[0].identity == RIGHT
    else:
        assert visit.events == []
        assert isinstance(visit.error, WrongServer) or "wrong" not in at
        assert set(network.counts) == set(tried), "each was tried"
        assert visit.took_s < HANDSHAKE_S + LIMITS.closing_s + TURNS_S
        if set(at) <= {"wrong"}:
            assert visit.took_s < TURNS_S, "who has answered answers the same again"


@pytest.mark.parametrize("lookups", [1, 1000], ids=["looked up", "dialed"])
def test_a_late_attempt_does_not_hide_why_the_earlier_one_failed(lookups):
    visit = Visit((address_of(1),), lambda _, before: "silent" if before else "nobody", lookups=lookups)
    assert type(visit.error) is ConnectionLost
    assert len(visit.network.dialed) == min(2, lookups)
    assert visit.took_s == pytest.approx(CONNECT_S, abs=TURNS_S)


def test_silent_addresses_have_equal_shares_of_all_of_the_time():
    """Four at a time, until the handshake has no more time."""
    addresses = tuple(map(address_of, range(12)))
    visit = Visit(addresses, lambda *_: "silent")
    assert isinstance(visit.error, TimedOut)
    assert tuple(address for address, _ in visit.network.dialed) == addresses
    shares = [number // ADDRESSES_AT_ONCE * HANDSHAKE_S / 3 for number in range(12)]
    assert visit.network.times == pytest.approx(shares, abs=TURNS_S)
    assert visit.took_s == pytest.approx(HANDSHAKE_S, abs=TURNS_S)


def test_of_a_hundred_addresses_sixteen_are_tried_and_the_error_says_so():
    addresses = tuple(map(address_of, range(100)))
    visit = Visit(addresses, lambda address, _: "wrong" if address == addresses[0] else "nobody")
    assert (type(visit.error), visit.error.answered) == (WrongServer, None)
    beginning = f"{NAME} has 100 addresses. 16 were tried, and none leads to the server that is wanted: "
    assert visit.error.message.startswith(beginning)
    assert visit.error.message.endswith("; ...")
    assert len(visit.network.counts) == ADDRESSES_MAX == 16
    assert visit.network.counts[addresses[0]] == 1, "who has answered is not asked again"
    assert visit.network.most == ADDRESSES_AT_ONCE


def test_one_reason_at_every_address_is_the_reason():
    kinds = {address_of(1): "cut", address_of(2): "nobody"}
    assert type(Visit(tuple(kinds), lambda *_: "cut").error) is Unauthenticated
    error = Visit(tuple(kinds), lambda address, _: kinds[address]).error
    assert type(error) is ConnectionLost
    assert "does not share our cluster secret" in error.message
    assert f"nobody listens at {address_of(2)}" in error.message


@pytest.mark.parametrize("dead", ["nobody", "cut", "silent"])
def test_a_name_that_has_moved_is_not_sought_at_its_old_address(dead):
    """The earlier address is tried once, and who answers at the name's only one is told."""
    old, new = address_of(250), address_of(1)
    visit = Visit((new,), lambda address, _: dead if address == old else "wrong", first=old)
    assert type(visit.error) is WrongServer
    assert visit.error.answered == WRONG
    assert {address for address, _ in visit.network.dialed} == {old, new}
    assert visit.network.counts[new] == 1
    assert dead == "silent" or visit.took_s < TURNS_S


def test_a_connection_that_is_secured_after_the_deadline_changes_nothing():
    visit = Visit((address_of(1),), lambda *_: "given up")
    assert (type(visit.error), visit.error.phase) == (TimedOut, "handshake")
    assert visit.events == []


@pytest.mark.parametrize("report", [False, True])
def test_a_question_ends_with_its_connection(report):
    async def ask_who_leaves(visit, client):
        (dialed,) = visit.network.open
        dialed.answers = False
        asking = asyncio.ensure_future(client.ask(report=report))
        await asyncio.sleep(0.1)
        assert not asking.done()
        dialed.server.close("it leaves", visit.network.now())
        dialed.flush()
        with pytest.raises(Closed):
            await asyncio.wait_for(asking, 10.0)

    visit = Visit((address_of(1),), lambda *_: "right", stay=ask_who_leaves)
    assert [type(event) for event in visit.events] == [PeerReady, ConnectionClosed]
