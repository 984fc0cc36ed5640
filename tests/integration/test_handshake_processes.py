"""Servers in processes of their own that are killed, or hang."""

import msgspec
import pytest

from handshake.errors import Closed
from tests.helpers.waiting import patiently
from tests.ports import free_port
from tests.unit.handshake.helpers import EXAMPLES, PATIENT, SECRET, Recorder, connected
from tests.world.node import hosted

from .handshaking import serving_apart

DEAF = msgspec.structs.replace(PATIENT, ping_interval_s=300, silence_s_max=600)


async def test_a_killed_server_is_reported_and_its_successor_needs_a_new_client():
    recorder, bind = Recorder(), f"tcp://127.0.0.1:{free_port()}"  # which stays free while nobody listens
    async with (
        hosted(serving_apart, bind, SECRET) as first,
        connected(first.endpoint, on_event=recorder, limits=DEAF) as client,
    ):
        assert client.identity.incarnation == await first.incarnation()
        first.kill()
        ending = await patiently(client.wait_closed())  # the monitor told: a ping comes much later
        assert (ending.code, ending.refused) == ("connection_lost", False)
        assert recorder.seen[-1] == (ending,)
        async with hosted(serving_apart, bind, SECRET) as second:
            with pytest.raises(Closed):
                client.send(EXAMPLES["release"])
            async with connected(second.endpoint) as successor:
                assert successor.identity.incarnation == await second.incarnation() != client.identity.incarnation


async def test_a_server_that_hangs_is_given_up_after_silence():
    recorder = Recorder()
    limits = msgspec.structs.replace(PATIENT, ping_interval_s=0.1, silence_s_max=0.5, closing_s=0.05)
    async with (
        hosted(serving_apart, "tcp://127.0.0.1:0", SECRET) as server,
        connected(server.endpoint, on_event=recorder, limits=limits) as client,
    ):
        server.stop()
        ending = await patiently(client.wait_closed())
        assert (ending.code, ending.refused) == ("silent", False)
