"""A consumer reaches the rank that the ticket names, in the life that it names, or learns why not."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from handshake.errors import Closed
from handshake.messages import LEASES_MAX, Release, Renew
from kvflow.cache.leases import Reader
from kvflow.errors import AuthenticationFailed, DeadlineExceeded, PeerLost, StaleLease
from kvflow.ids import peer_id
from kvflow.rendezvous.dialer import Link, open_link
from kvflow.rendezvous.listener import open_listener

from .helpers import INCARNATION, address, advertisement, side

PATIENCE_S = 30.0
OURS = side(engine_id="decode-0", incarnation="b" * 32)


class Keeper:
    """Tells a waiting test what it was told."""

    def __init__(self):
        self.told = asyncio.Queue()

    def on_release(self, leases, reader):
        self.told.put_nowait(("release", list(leases), reader))
        return ["ended"] * len(leases)

    def on_renew(self, leases):
        self.told.put_nowait(("renew", list(leases)))
        return ["held"] * len(leases), 30.0


@asynccontextmanager
async def listening(**settings):
    keeper = Keeper()
    ours = side(**settings)
    async with open_listener(bind="tcp://127.0.0.1:0", ours=ours, keeper=keeper, report=lambda event: None) as server:
        yield server.endpoint, keeper


def linked(
    endpoint, *, rank=0, incarnation=INCARNATION, engine_id="prefill-0", ours=OURS, on_ended=lambda code, detail: None
):
    return open_link(engine_id, address(endpoint, rank, incarnation), ours=ours, on_ended=on_ended)


async def test_a_link_knows_its_peer_and_speaks_of_leases():
    async with listening() as (endpoint, keeper), linked(endpoint) as link:
        assert (link.peer, link.endpoint) == (peer_id("prefill-0", 0, INCARNATION), endpoint)
        assert link.advertisement == advertisement()
        link.renew([(3, 33)])
        link.release([(3, 33), (4, 2**62)])
        async with asyncio.timeout(PATIENCE_S):
            assert await keeper.told.get() == ("renew", [(3, 33)])
            assert await keeper.told.get() == ("release", [(3, 33), (4, 2**62)], Reader("decode-0", 0, 1))


@pytest.mark.parametrize(
    ("expected", "error"),
    [
        ({"engine_id": "prefill-1"}, PeerLost),
        ({"rank": 1}, PeerLost),
        ({"incarnation": "c" * 32}, StaleLease),
    ],
)
async def test_whoever_else_answers_is_not_read_from(expected, error):
    async with listening() as (endpoint, _):
        with pytest.raises(error) as caught:
            async with linked(endpoint, **expected):
                pytest.fail("it was taken for someone else")
        assert caught.value.peer == endpoint


async def test_an_end_is_told_once_with_its_reason():
    ends = asyncio.Queue()
    async with listening() as (endpoint, _):
        link = linked(endpoint, on_ended=lambda *end: ends.put_nowait(end))
        opened = await link.__aenter__()
    try:
        async with asyncio.timeout(PATIENCE_S):
            code, _ = await ends.get()
        assert code == "peer_closed"
        opened.release([(1, 1)])  # nobody hears it, and nothing happens
        opened.renew([(1, 1)])
    finally:
        await link.__aexit__(None, None, None)
    assert ends.empty()


async def test_another_secret_is_told_at_once():
    async with listening() as (endpoint, _):
        stranger = side(engine_id="decode-0", cluster_secret="another secret, long enough")
        with pytest.raises(AuthenticationFailed, match=endpoint):
            async with linked(endpoint, ours=stranger):
                pytest.fail("it was let in")


async def test_nobody_at_all_is_a_lost_peer_or_a_deadline():
    async with listening() as (endpoint, _):
        pass
    with pytest.raises((PeerLost, DeadlineExceeded)):
        async with linked(endpoint, ours=side(engine_id="decode-0", connect_s=0.2)):
            pytest.fail("nobody is there")


class Client:
    """Keeps what is sent, or is closed."""

    def __init__(self, *, closed=False):
        self.sent = []
        self._closed = closed

    def send(self, message):
        if self._closed:
            raise Closed("gone")
        self.sent.append(message)


def test_many_leases_travel_in_messages_of_bounded_size():
    client = Client()
    link = Link(client, "p", "tcp://127.0.0.1:5000", advertisement())
    leases = [(index, index + 100) for index in range(2 * LEASES_MAX + 1)]
    link.release(leases)
    link.renew(leases[:LEASES_MAX])
    assert [(type(message), len(message.leases)) for message in client.sent] == [
        (Release, LEASES_MAX),
        (Release, LEASES_MAX),
        (Release, 1),
        (Renew, LEASES_MAX),
    ]
    assert [(ref.slot, ref.epoch) for message in client.sent[:3] for ref in message.leases] == leases


def test_nothing_happens_when_the_producer_is_gone():
    link = Link(Client(closed=True), "p", "tcp://127.0.0.1:5000", advertisement())
    link.release([(1, 1)])
    link.renew([(1, 1)])
