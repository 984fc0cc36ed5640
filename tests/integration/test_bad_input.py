"""Bad input of every kind: a typed error with a code and a remedy, nothing left behind, and the next pull works."""

import socket
import time

import msgspec
import pytest

import handshake
import kvflow
from handshake import codec
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import Refuse
from handshake.states import Role
from kvflow import errors
from kvflow.leases.tickets import MAC_BYTES, RankAddress
from tests.helpers.loops import named
from tests.simulation import tickets
from tests.unit.handshake.helpers import raw_dealer

from .consuming import works
from .producing import SECRET
from .strangers import IDENTITY, SECURITY, connection_of_newer_release, publishing, ticket_to

BLOCKS = [[0, 1], [2, 3]]
OTHER_SECRET = "the secret of another cluster"

TARGETS = {
    "above the pool": ([[0, 1], [2, 32]], errors.BlockIdsInvalid),
    "far above the pool": ([[0, 1], [2, 1 << 70]], errors.BlockIdsInvalid),
    "below absent": ([[0, -2], [2, 3]], errors.BlockIdsInvalid),
    "twice in a group": ([[0, 0], [2, 3]], errors.BlockIdsInvalid),
    "twice in groups that share bytes": ([[0, 1], [2, 1]], errors.BlockIdsInvalid),
    "a group too few": ([[0, 1]], errors.BlockIdsInvalid),
    "a group too many": ([[0, 1], [2, 3], []], errors.BlockIdsInvalid),
    "not a number": ([[0, 1.5], [2, 3]], errors.BlockIdsInvalid),
    "not a list": ([0, 1], errors.BlockIdsInvalid),
    "before the first token": ([[0, 1, 4], [2, 3]], errors.BlockRangeMismatch),
}
OFFERS = {
    "above the pool": ([[0, 32], [2, 3]], 8, errors.BlockIdsInvalid),
    "below absent": ([[0, -2], [2, 3]], 8, errors.BlockIdsInvalid),
    "a group too few": ([[0, 1]], 8, errors.BlockIdsInvalid),
    "one block in groups that share bytes": ([[0, 1], [2, 1]], 8, errors.BlockIdsInvalid),
    "no token": (BLOCKS, 0, errors.BlockIdsInvalid),
    "token counts for another number of groups": (BLOCKS, [8, 8, 8], errors.BlockIdsInvalid),
}


def forge(params, **changes):
    """Return parameters whose grant says something else than what was signed."""
    return tickets.forge(params, lambda grant: grant.update(changes))


def elsewhere(grant):
    grant["ranks"][0]["endpoint"] = "tcp://127.0.0.1:9"


def new_mac(params, mac):
    """Return parameters with another MAC."""
    return tickets.damage(params, lambda signed: mac + signed[MAC_BYTES:])


def new_text(params, change):
    """Return parameters with another text for a ticket."""
    return params | {"kvflow": change(params["kvflow"])}


FORGERIES = {
    "other blocks": lambda params: forge(params, block_ids=[[0, 1], [2, 4]]),
    "other tokens": lambda params: forge(params, num_tokens=[7, 8]),
    "another slot": lambda params: forge(params, slot=5),
    "another epoch": lambda params: forge(params, epoch=77),
    "another engine": lambda params: forge(params, engine_id="prefill-1"),
    "another request": lambda params: forge(params, request_id="another"),
    "a longer lease": lambda params: forge(params, lease_ms=86_400_000),
    "another endpoint": lambda params: tickets.forge(params, elsewhere),
    "a signature of another grant": lambda params: new_mac(params, bytes(MAC_BYTES)),
    "no signature": lambda params: new_mac(params, b""),
    "half a surrogate": lambda params: new_text(params, lambda text: text + "\ud800"),
    "text for a number": lambda params: forge(params, slot="0"),
    "a field too few": lambda params: tickets.forge(params, lambda grant: grant.pop("block_ids")),
    "no text": lambda params: new_text(params, lambda text: {"text": text}),
    "no grant": lambda params: new_text(params, lambda text: text.split(".")[0]),
    "a grant too many": lambda params: new_text(params, lambda text: f"{text}.{text.split('.')[1]}"),
    "no format": lambda params: new_text(params, lambda text: f"text{text[4:]}"),
    "nine megabytes": lambda params: new_text(params, lambda text: text + "A" * (9 << 20)),
    "nothing": lambda _params: {},
    "no dictionary": lambda _params: None,
    "another's parameters": lambda _params: {"do_remote_prefill": True},
}


def explains(caught, kind):
    """Assert that an error is exactly of this kind and says what to do."""
    error = caught.value
    assert type(error) is kind
    assert error.code == kind.code
    assert error.remedy
    assert str(error).endswith(error.remedy)
    return error


async def test_targets_that_cannot_be_used(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        for case, (targets, kind) in TARGETS.items():
            with named("targets", {"case": case}):
                with pytest.raises(kind) as caught:
                    await consumer.pull(params, targets)
                explains(caught, kind)
                consumer.at_rest()
                consumer.untouched()
        await works(producer, consumer)


async def test_tokens_that_the_ticket_does_not_cover(world):
    async with world.producing() as producer, world.consuming() as consumer:
        for name, sources in {"absent": [[-1, 1], [2, 3]], "all absent": [[-1, -1], [2, 3]]}.items():
            params = await producer.offer(name, sources, 8)
            with pytest.raises(errors.BlockRangeMismatch) as caught:
                await consumer.pull(params, BLOCKS)
            assert explains(caught, errors.BlockRangeMismatch).group == 0
            consumer.at_rest()
            consumer.untouched()
        await works(producer, consumer)


async def test_a_ticket_for_other_content_is_given_back_unread(near_world):
    """A client may bring the ticket of one prompt with another one: the reader says what it expects."""
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        digests = [[b"a0", b"a1"], [b"a0", b"a1"]]
        told = producer.worker.offer("r", BLOCKS, 8, digests=digests).to_params()
        untold = producer.worker.offer("s", BLOCKS, 8).to_params()
        for params, request in ((told, "r"), (untold, "s")):
            with pytest.raises(errors.ContentMismatch) as caught:
                await consumer.pull(params, BLOCKS, expected_digests=[[b"a0", b"b1"], [b"a0", b"b1"]])
            explains(caught, errors.ContentMismatch)
            assert await producer.outcome(request) == "released"
            consumer.at_rest()
            consumer.untouched()
        producer._write("t", BLOCKS, 8)
        params = producer.worker.offer("t", BLOCKS, 8, digests=digests).to_params()
        await consumer.pull(params, BLOCKS, expected_digests=digests)
        consumer.has("t", BLOCKS, 8)


async def test_offers_that_cannot_be_made(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        for case, (blocks, num_tokens, kind) in OFFERS.items():
            with named("an offer", {"case": case}):
                with pytest.raises(kind) as caught:
                    producer.worker.offer("r", blocks, num_tokens)
                explains(caught, kind)
                assert producer.worker.snapshot().leases == 0
        await works(producer, consumer, request="r")


async def test_a_minted_ticket_with_one_block_in_two_groups_is_refused(world):
    """A mint does not know which groups share bytes."""
    async with world.producing() as producer, world.consuming() as consumer:
        address = msgspec.convert(await producer.address(), RankAddress)
        mint = kvflow.TicketMint("prefill-0", [address], cluster_secret=SECRET)
        ticket, grant = mint.offer("r", block_ids=[[0, 1], [2, 1]], num_tokens=8)
        assert "block 1 is in groups 0 and 1" in await producer.refusal(grant)
        with pytest.raises(errors.TicketInvalid, match="block 1 is in groups 0 and 1"):
            await consumer.pull(ticket.to_params(), BLOCKS)
        consumer.at_rest()
        consumer.untouched()
        await works(producer, consumer)


async def test_a_request_on_offer_cannot_be_offered_again_and_stays_on_offer(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        with pytest.raises(errors.BlockIdsInvalid) as caught:
            producer.worker.offer("r", BLOCKS, 8)
        explains(caught, errors.BlockIdsInvalid)
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)


UNREADABLE = {
    "an object": (lambda params: new_text(params, lambda text: {"grants": [text]}), errors.TicketInvalid),
    "another format": (lambda params: new_text(params, lambda text: f"kvf1{text[4:]}"), errors.ReleaseMismatch),
    **{name: (change, errors.TicketInvalid) for name, change in FORGERIES.items()},
}


async def test_tickets_that_are_forged_truncated_or_of_another_release(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        params = await producer.offer("r", BLOCKS, 8)
        for case, (change, error) in UNREADABLE.items():
            with named("a ticket", {"case": case}):
                with pytest.raises(error) as caught:
                    await consumer.pull(change(params), BLOCKS)
                explains(caught, error)
                consumer.at_rest()
                consumer.untouched()
        await consumer.pull(params, BLOCKS)
        consumer.has("r", BLOCKS, 8)


async def test_a_producer_without_encryption(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        async with publishing(handshake.Publication.of(b"in clear"), security=None) as endpoint:
            with pytest.raises(errors.AuthenticationFailed) as caught:
                await consumer.pull(ticket_to(endpoint), BLOCKS)
            explains(caught, errors.AuthenticationFailed)
        consumer.at_rest()
        await works(producer, consumer)


@pytest.mark.parametrize("security", [None, handshake.ClusterSecurity.from_secret(OTHER_SECRET)], ids=str)
async def test_a_reader_without_our_secret(near_world, security):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        with pytest.raises(handshake.Unauthenticated):
            async with handshake.open_client(
                producer.endpoint,
                identity=IDENTITY,
                publication=handshake.Publication.of(b"of a stranger"),
                security=security,
                on_event=lambda _event: None,
            ):
                pytest.fail("a stranger was let in")
        await works(producer, consumer)


async def test_a_reader_of_another_release_is_told_so(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        newer = connection_of_newer_release(Role.CLIENT)
        newer.greet(time.monotonic())
        async with raw_dealer(producer.endpoint, SECURITY) as dealer:
            for frames in newer.take_outgoing():
                await dealer.send_multipart(frames)
            answer = codec.decode(await dealer.recv_multipart(), DEFAULT_LIMITS.frame_bytes_max)
        assert isinstance(answer, Refuse)
        assert answer.code == "version_unsupported"
        assert answer.remedy
        await works(producer, consumer)


GARBAGE = {
    "no frame format": [b"garbage"],
    "an empty frame": [b""],
    "several frames": [b"\xc1\x80", b"more"],
    "truncated": [b"\xc1\x85\xa4type"],
    "bad text": [b"\xc1\x81\xa4type\xa2\xff\xff"],
    "nested": [b"\xc1" + b"\x91" * 60_000],
    "large": [b"\xc1" + bytes(DEFAULT_LIMITS.client_frame_bytes_max - 1)],
    "out of turn": [b"\xc1\x82\xa4type\xa4ping\xa5nonce\x01"],
}


async def test_garbage_on_the_listener(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        for case, frames in GARBAGE.items():
            with named("frames", {"case": case}):
                async with raw_dealer(producer.endpoint, SECURITY) as dealer:
                    await dealer.send_multipart(frames)
                    answer = codec.decode(await dealer.recv_multipart(), DEFAULT_LIMITS.frame_bytes_max)
                assert isinstance(answer, Refuse)
                assert answer.code == "protocol_violation"
        await works(producer, consumer)


async def test_bytes_that_are_not_even_zeromq(near_world):
    async with near_world.producing() as producer, near_world.consuming() as consumer:
        host, port = producer.endpoint.removeprefix("tcp://").split(":")
        for nonsense in (b"GET / HTTP/1.1\r\n\r\n", bytes(64), b"\xff" * 4096):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(nonsense)
                await works(producer, consumer)
