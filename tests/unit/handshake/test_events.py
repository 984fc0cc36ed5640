from typing import get_args

from handshake.messages import ConnectionClosed, ConnectionFailed, Ending, HandshakeEvent
from tests.helpers.loops import looped

PARTICIPLES = ("Ready", "Received", "Answered", "Asked", "Closed", "Failed")


@looped("kind", get_args(HandshakeEvent))
def test_an_event_is_frozen_and_named_for_what_has_happened(kind):
    assert kind.__struct_config__.frozen
    assert kind.__name__.endswith(PARTICIPLES)


def test_a_connection_ends_in_one_of_two_ways():
    assert set(get_args(Ending)) == {ConnectionClosed, ConnectionFailed}
    assert set(get_args(Ending)) < set(get_args(HandshakeEvent))
