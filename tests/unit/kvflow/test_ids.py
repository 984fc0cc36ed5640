"""A peer is who answers at this endpoint with this key, and not any worker that claims its name."""

import msgspec
import pytest

from kvflow.ids import PeerId, agent_name, worker_name

PEER = PeerId("prefill-0", 3, "ab" * 16, "tcp://127.0.0.1:5000", "12" * 32)


@pytest.mark.parametrize(
    "change",
    [
        {"engine_id": "prefill-1"},
        {"rank": 4},
        {"incarnation": "cd" * 16},
        {"endpoint": "tcp://127.0.0.1:5001"},
        {"public_key": "34" * 32},
        {"public_key": ""},
    ],
    ids=str,
)
def test_whatever_differs_it_is_another_peer(change):
    other = msgspec.structs.replace(PEER, **change)
    assert other != PEER
    assert len({PEER, other, msgspec.structs.replace(PEER)}) == 2


def test_people_read_engine_rank_and_incarnation():
    assert str(PEER) == f"{PEER}" == worker_name("prefill-0", 3, "ab" * 16) == "prefill-0/3/" + "ab" * 16


def test_a_transport_is_named_by_its_key_too():
    assert agent_name(str(PEER), "12" * 32) != agent_name(str(PEER), "34" * 32)
