"""What a mint cannot know, and what is no message: refused, nothing is left behind, and the next pull works."""

import pytest

from handshake import codec
from handshake.limits import DEFAULT_LIMITS
from handshake.messages import Refuse
from kvflow import errors
from tests.helpers.loops import named
from tests.unit.handshake.helpers import raw_dealer

from .consuming import works
from .producing import minting
from .strangers import SECURITY

BLOCKS = [[0, 1], [2, 3]]


async def test_a_minted_ticket_with_one_block_in_two_groups_is_refused(world):
    """A mint does not know which groups share bytes."""
    async with world.producing() as producer, world.consuming() as consumer:
        mint = await minting(producer)
        ticket, grant = mint.offer("r", block_ids=[[0, 1], [2, 1]], num_tokens=8)
        assert "block 1 is in groups 0 and 1" in await producer.refusal(grant)
        with pytest.raises(errors.TicketInvalid, match="block 1 is in groups 0 and 1"):
            await consumer.pull(ticket.to_params(), BLOCKS)
        consumer.at_rest()
        consumer.untouched()
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
