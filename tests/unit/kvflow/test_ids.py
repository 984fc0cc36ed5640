"""A restarted worker is another peer."""

from kvflow.ids import peer_id


def test_a_peer_is_named_by_engine_rank_and_incarnation():
    assert peer_id("prefill-0", 3, "ab" * 16) == "prefill-0/3/" + "ab" * 16
    assert peer_id("prefill-0", 3, "ab" * 16) != peer_id("prefill-0", 3, "cd" * 16)
