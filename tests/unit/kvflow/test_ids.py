"""A peer is who answers at this endpoint with this key, and not any worker that claims its name."""

import msgspec

from kvflow.ids import Credentials, PeerId, agent_name, pass_of, worker_name
from tests.helpers.loops import looped

PEER = PeerId("prefill-0", 3, "ab" * 16, "tcp://127.0.0.1:5000", "12" * 32)


@looped(
    "change",
    [
        {"engine_id": "prefill-1"},
        {"rank": 4},
        {"incarnation": "cd" * 16},
        {"endpoint": "tcp://127.0.0.1:5001"},
        {"public_key": "34" * 32},
        {"public_key": ""},
    ],
)
def test_whatever_differs_it_is_another_peer(change):
    other = msgspec.structs.replace(PEER, **change)
    assert other != PEER
    assert len({PEER, other, msgspec.structs.replace(PEER)}) == 2


def test_people_read_engine_rank_and_incarnation():
    assert str(PEER) == f"{PEER}" == worker_name("prefill-0", 3, "ab" * 16) == "prefill-0/3/" + "ab" * 16


def test_a_transport_is_named_by_its_key_too():
    assert agent_name(str(PEER), "12" * 32) != agent_name(str(PEER), "34" * 32)


READER = ("12" * 32, "decode-0", 1, "cd" * 16)


def test_a_pass_belongs_to_one_key_and_one_reader():
    own = pass_of(bytes(32), *READER)
    assert len(own) == 32
    assert own == pass_of(bytes(32), *READER)
    others = [
        ("34" * 32, *READER[1:]),
        (READER[0], "decode-1", *READER[2:]),
        (*READER[:2], 2, READER[3]),
        (*READER[:3], "ef" * 16),
        ("12" * 32 + "d", "ecode-0", 1, "cd" * 16),  # the same characters, divided in another way
        ("12" * 32, "decode-0\0", 1, "cd" * 16),
        ("", "12" * 32 + "decode-0", 1, "cd" * 16),
    ]
    passes = {own, pass_of(bytes(31) + b"1", *READER), *(pass_of(bytes(32), *other) for other in others)}
    passes.add(pass_of(bytes(32), *READER, certificate=b"its own"))
    assert len(passes) == len(others) + 3


def test_credentials_do_not_show_their_pass():
    shown = Credentials(*READER, b"of nobody else")
    text = repr(shown) + f"{shown} {[shown]}" + repr(shown.__rich_repr__())
    assert "decode-0" in text
    assert "of nobody else" not in text
