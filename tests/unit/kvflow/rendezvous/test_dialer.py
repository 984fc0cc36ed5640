"""A consumer reaches the rank that the ticket names, in the life that it names, or learns why not."""

import asyncio
import time
from contextlib import asynccontextmanager

import msgspec
import pytest

from handshake import ClockOffset, ClusterSecurity, CurveKeys
from handshake.errors import Closed
from handshake.limits import LEASES_MAX
from handshake.messages import LeaseAnswer, Release, Renew
from handshake.network import ZEROMQ, ZeroMqNetwork
from kvflow.cache.leases import Reader
from kvflow.cache.mint import Mint
from kvflow.errors import AuthenticationFailed, DeadlineExceeded, PeerLost, StaleLease
from kvflow.ids import Credentials, agent_name, pass_of
from kvflow.rendezvous.dialer import LeaseEnd, Link, Questions, open_link
from kvflow.rendezvous.listener import open_listener

from .helpers import CREDENTIALS, INCARNATION, SECURITY, address, advertisement, peer, side

PATIENCE_S = 30.0
OURS = side(engine_id="decode-0", incarnation="b" * 32)


class Keeper:
    """Tells a waiting test what it was told."""

    def __init__(self):
        self.told = asyncio.Queue()
        self.answer = "held"
        self.read = []
        self.ends = {}

    def on_release(self, leases, reader, *, read=False):
        self.told.put_nowait(("release", list(leases), reader))
        self.read.append(read)
        return ["ended"] * len(leases)

    def on_renew(self, leases):
        self.told.put_nowait(("renew", list(leases)))
        return [self.answer] * len(leases), 30.0

    def past(self, lease):
        return self.ends.get(lease)


@asynccontextmanager
async def listening(network=ZEROMQ, **settings):
    keeper = Keeper()
    ours = msgspec.structs.replace(side(**settings), network=network)
    async with open_listener(bind="tcp://127.0.0.1:0", ours=ours, keeper=keeper, report=lambda event: None) as server:
        yield server.endpoint, keeper


def linked(
    endpoint, *, rank=0, incarnation=INCARNATION, engine_id="prefill-0", ours=OURS, on_ended=lambda code, detail: None
):
    named = peer(endpoint, rank, incarnation, engine_id=engine_id)
    return open_link(named, ours=ours, on_ended=on_ended)


async def test_a_link_knows_its_peer_and_speaks_of_leases():
    async with listening() as (endpoint, keeper), linked(endpoint) as link:
        assert link.peer == peer(endpoint)
        assert link.agent == agent_name(f"prefill-0/0/{INCARNATION}", SECURITY.server.public_key)
        assert link.advertisement == advertisement()
        link.renew([(3, 33)])
        link.release([(3, 33), (4, 2**62)], read=True)
        async with asyncio.timeout(PATIENCE_S):
            assert await keeper.told.get() == ("renew", [(3, 33)])
            assert await keeper.told.get() == ("release", [(3, 33), (4, 2**62)], Reader("decode-0", 0, 1))
        assert keeper.read == [True]


PASS_KEY = bytes(range(32))
OTHER_SECRET = "the secret that comes next"


async def test_a_producer_gives_each_reader_its_pass():
    reader = ("decode-0", 0, "b" * 32)
    async with listening(pass_key=PASS_KEY) as (endpoint, _), linked(endpoint) as link:
        key = SECURITY.client.public_key
        assert link.credentials == Credentials(key, *reader, pass_of(PASS_KEY, key, *reader))
    async with listening() as (endpoint, _), linked(endpoint) as link:
        assert link.credentials.pass_ == b""


async def test_a_reader_shows_the_key_that_it_has_dialled_with():
    theirs = ClusterSecurity.from_secret(OTHER_SECRET)
    ours = side(engine_id="decode-0", incarnation="b" * 32, cluster_secret_accepted=OTHER_SECRET)
    async with listening(pass_key=PASS_KEY, cluster_secret=OTHER_SECRET) as (endpoint, _):
        named = peer(endpoint, public_key=theirs.server.public_key)
        async with open_link(named, ours=ours, on_ended=lambda code, detail: None) as link:
            _shows(link, theirs.client.public_key)
    producer, reader = (CurveKeys.from_private(bytes.fromhex(each * 32)) for each in ("12", "34"))
    ours = side(
        engine_id="decode-0",
        incarnation="b" * 32,
        private_key=reader.private_key,
        allowed_keys=(producer.public_key,),
    )
    settings = {"private_key": producer.private_key, "allowed_keys": (reader.public_key,)}
    async with listening(pass_key=PASS_KEY, **settings) as (endpoint, _):
        named = peer(endpoint, public_key=producer.public_key)
        async with open_link(named, ours=ours, on_ended=lambda code, detail: None) as link:
            _shows(link, reader.public_key)


def _shows(link, key):
    shown = link.credentials
    assert shown.public_key == key
    assert shown.pass_ == pass_of(PASS_KEY, key, shown.engine_id, shown.rank, shown.incarnation)


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
        opened.release([(1, 1)], read=True)  # nobody hears it, and nothing happens
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
    link = Link(client, "p", "agent of p", advertisement(), questions=Questions("p"), credentials=CREDENTIALS)
    leases = [(index, index + 100) for index in range(2 * LEASES_MAX + 1)]
    link.release(leases, read=False)
    link.renew(leases[:LEASES_MAX])
    assert [(type(message), len(message.leases)) for message in client.sent] == [
        (Release, LEASES_MAX),
        (Release, LEASES_MAX),
        (Release, 1),
        (Renew, LEASES_MAX),
    ]
    assert [(ref.slot, ref.epoch) for message in client.sent[:3] for ref in message.leases] == leases


def test_nothing_happens_when_the_producer_is_gone():
    link = Link(
        Client(closed=True), "p", "agent of p", advertisement(), questions=Questions("p"), credentials=CREDENTIALS
    )
    link.release([(1, 1)], read=True)
    link.renew([(1, 1)])


class Skewed(ZeroMqNetwork):
    """Another host's wall clock."""

    def __init__(self, ahead_s=0.0):
        self.ahead_s = ahead_s

    def wall(self):
        return super().wall() + self.ahead_s


def granted(age_s, lease_s=30.0, ahead_s=0.0):
    """A grant that was signed some time ago, by a clock that is ahead of this machine's."""
    mint = Mint(
        "prefill-0",
        [address()],
        sign=lambda payload: bytes(32),
        lease_s=lease_s,
        wall_clock=lambda: time.time() + ahead_s - age_s,
    )
    return mint.offer("r", block_ids=[[1]], num_tokens=1)[1]


async def asked(link, keeper, grant):
    """Tell whether the producer was asked about a grant; ``StaleLease`` is passed on."""
    try:
        await link.require_held(grant, within_s=PATIENCE_S)
    finally:
        link.release([(99, 99)], read=False)  # whatever was asked was asked before
        async with asyncio.timeout(PATIENCE_S):
            told = [await keeper.told.get()]
            while told[-1][0] != "release":
                told.append(await keeper.told.get())
    return [each[:2] for each in told[:-1]] == [("renew", [(grant.slot, grant.epoch_value)])]


@pytest.mark.parametrize("ours_ahead_s", [0.0, 3600.0, -3600.0])
@pytest.mark.parametrize("theirs_ahead_s", [0.0, 7200.0])
async def test_a_ticket_is_asked_about_when_its_time_is_up_however_far_the_clocks_are_apart(
    ours_ahead_s, theirs_ahead_s
):
    ours = msgspec.structs.replace(OURS, network=Skewed(ours_ahead_s))
    async with listening(network=Skewed(theirs_ahead_s)) as (endpoint, keeper), linked(endpoint, ours=ours) as link:
        assert link.clock_offset.ahead_s == pytest.approx(theirs_ahead_s - ours_ahead_s, abs=1.0)
        assert not await asked(link, keeper, granted(age_s=10.0, ahead_s=theirs_ahead_s))
        old = granted(age_s=60.0, ahead_s=theirs_ahead_s)
        assert await asked(link, keeper, old)  # another reader has renewed it
        keeper.answer = "unknown"
        assert await asked(link, keeper, old)  # it may still be admitted
        keeper.answer = "ended"
        assert not await asked(link, keeper, granted(age_s=10.0, ahead_s=theirs_ahead_s))
        with pytest.raises(StaleLease, match="has ended") as caught:
            await asked(link, keeper, old)
        assert caught.value.request_id == "r"


async def test_a_ticket_that_does_not_say_when_it_was_signed_is_never_asked_about():
    grant = msgspec.structs.replace(granted(age_s=1e6), issued_ms=msgspec.UNSET)
    async with listening() as (endpoint, keeper), linked(endpoint) as link:
        keeper.answer = "ended"
        assert not await asked(link, keeper, grant)


async def test_a_question_without_an_answer_has_a_deadline():
    client = Client()
    client.clock_offset = ClockOffset(0.0, 0.0)
    questions = Questions("p")
    link = Link(client, "p", "agent of p", advertisement(), questions=questions, credentials=CREDENTIALS)
    grant = granted(age_s=60.0)
    patient = asyncio.ensure_future(link.require_held(grant, within_s=PATIENCE_S))
    with pytest.raises(DeadlineExceeded) as caught:
        await link.require_held(grant, within_s=0.01)
    assert caught.value.phase == "handshake"
    (waiting,) = questions._waiting.values()
    assert len(waiting) == 1, "who waits no more is forgotten, and who waits is not"
    questions.answer([LeaseAnswer(slot=grant.slot, epoch=grant.epoch_value, outcome="held")])
    await patient
    assert questions._waiting == {}
    with pytest.raises(DeadlineExceeded):
        await link.require_held(grant, within_s=0.01)
    assert questions._waiting == {}


async def test_a_question_ends_with_its_connection():
    ours = msgspec.structs.replace(OURS, network=Skewed())
    old = granted(age_s=60.0)
    async with asyncio.timeout(PATIENCE_S):
        async with listening() as (endpoint, keeper):
            keeper.on_renew = lambda leases: (
                keeper.told.put_nowait("asked") or ([], 0.0)
            )  # and no answer: the connection ends
            ended = asyncio.Event()
            async with linked(endpoint, ours=ours, on_ended=lambda code, detail: ended.set()) as link:
                question = asyncio.ensure_future(link.require_held(old, within_s=1000.0))
                await keeper.told.get()
            await ended.wait()
            with pytest.raises(PeerLost, match="before it was said"):
                await question
            with pytest.raises(PeerLost, match="before it was said"):
                await link.require_held(old, within_s=1000.0)


@pytest.mark.parametrize(
    ("end", "known", "words"),
    [
        (("expired", 12.5), ("expired", 12.5), "it expired 12.500 s ago"),
        (("revoked", 0.25), ("revoked", 0.25), "the producer revoked it 0.250 s ago"),
        (("used", 3.0), ("used", 3.0), "it was used before, and released 3.000 s ago"),
        (("released", 3.0), ("released", 3.0), "a reader released it 3.000 s ago"),
        (("of_a_newer_release", 3.0), ("of_a_newer_release", 3.0), "of_a_newer_release 3.000 s ago"),
        (None, ("unknown", None), "it ended, reason unknown"),
    ],
)
async def test_a_producer_is_asked_how_a_lease_has_ended(end, known, words):
    async with listening() as (endpoint, keeper), linked(endpoint) as link:
        keeper.answer, keeper.ends = "ended", {} if end is None else {(3, 33): end}
        ends = await asyncio.gather(*(link.ask_end((3, 33), within_s=PATIENCE_S) for _ in range(3)))
        assert [(end.ended_by, end.ended_s, end.words) for end in ends] == 3 * [(*known, words)]
        assert keeper.told.get_nowait() == ("renew", [(3, 33)])
        assert keeper.told.empty(), "questions of one turn travel together, and each once"


async def test_where_nobody_answers_the_reason_is_unknown():
    questions = Questions("p")
    client = Client()
    link = Link(client, "p", "tcp://127.0.0.1:5000", advertisement(), questions=questions, credentials=CREDENTIALS)
    assert await link.ask_end((3, 33), within_s=0.01) == LeaseEnd("unknown", None)
    assert [type(message) for message in client.sent] == [Renew]
    questions.lose("it died")
    assert await link.ask_end((3, 33), within_s=PATIENCE_S) == LeaseEnd("unknown", None)
    assert questions._waiting == {}


async def test_an_older_producer_says_no_more_than_that_a_lease_has_ended():
    questions = Questions("p")
    link = Link(Client(), "p", "tcp://127.0.0.1:5000", advertisement(), questions=questions, credentials=CREDENTIALS)
    asking = asyncio.ensure_future(link.ask_end((3, 33), within_s=PATIENCE_S))
    await asyncio.sleep(0)
    questions.answer([LeaseAnswer(slot=3, epoch=33, outcome="ended")])
    assert await asking == LeaseEnd("unknown", None)
