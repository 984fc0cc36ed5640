"""What a world is made of: time, processes that stop and die, and a network that keeps its promises and no others."""

import asyncio
import contextlib

import pytest

from handshake.limits import Limits
from handshake.sockets import Delivery, LinkEvent
from tests.fakes import NetworkFaults, Process, Wires, World, bury
from tests.fakes.network import SimulatedNetwork

SERVER = "tcp://10.0.0.1:5000"
LIMITS = Limits()


@pytest.fixture
def world():
    """A world whose processes unwind when the test is over: what is left of none is for the garbage collector."""
    world = World(1)
    yield world
    bury(world)
    assert not any(each.pending() for each in world.processes)


def process(world, name, host):
    return Process(world, name, host, began_s=0.0, skew_s=0.0)


def pass_time(world, seconds):
    world.run(lambda: False, world.now + seconds)
    assert world.violation is None


def test_things_happen_in_order_of_time_and_then_of_asking(world):
    seen = []
    for delay_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        world.after(delay_s, seen.append, name)
    world.after(1.5, seen.append, "never").cancel()
    assert not world.run(lambda: len(seen) == 3, 1.7)
    assert (seen, world.now) == (["a", "b"], 1.7)
    assert world.run(lambda: len(seen) == 3, 10.0)
    assert (seen, world.now) == (["a", "b", "c"], 2.0)


def test_what_never_ends_is_a_violation(world):
    def again():
        world.after(0.0, again)

    again()
    assert not world.run(lambda: False, 1.0)
    assert "is in a loop" in str(world.violation)


def test_a_host_that_hangs_is_not_woken_and_may_be_killed(world):
    seen = []
    one = process(world, "one", "10.0.0.1")
    one.create_task(count_seconds(seen), name="drive counting")
    pass_time(world, 1.5)
    one.hang()
    one.resume()
    pass_time(world, 10.0)
    assert (len(seen), one.hung, one.alive) == (1, True, True)
    one.kill()
    assert (one.hung, one.alive) == (False, False)


def test_the_time_that_a_process_is_stopped_is_counted(world):
    one = process(world, "one", "10.0.0.1")
    world.after(100.0, one.kill)  # something is left to happen, or time would not pass
    for seconds in (1.0, 2.0):
        one.stop()
        pass_time(world, seconds)
        one.resume()
        pass_time(world, 5.0)
    assert one.stopped_s == pytest.approx(3.0)


async def count_seconds(seen):
    while True:
        await asyncio.sleep(1.0)
        seen.append(asyncio.get_running_loop().time())


def test_a_stopped_process_goes_on_later_and_a_killed_one_never(world):
    seen = []
    one = process(world, "one", "10.0.0.1")
    one.create_task(count_seconds(seen), name="drive counting")
    pass_time(world, 2.5)
    assert len(seen) == 2
    one.stop()
    pass_time(world, 10.0)
    assert len(seen) == 2
    one.resume()
    pass_time(world, 0.1)
    assert len(seen) == 3
    one.kill()
    one.resume()
    pass_time(world, 10.0)
    assert len(seen) == 3


def test_a_defect_in_a_process_is_a_violation(world):
    process(world, "one", "10.0.0.1").call_soon(lambda: 1 // 0)
    world.run(lambda: False, 1.0)
    assert "ZeroDivisionError" in str(world.violation)


async def wait_through_every_cancellation(ended):
    try:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.get_running_loop().create_future()
    finally:
        ended.append(True)


@pytest.mark.parametrize("life", ["running", "stopped", "killed"])
def test_a_buried_process_has_ended_whatever_it_waits_for(world, life):
    ended = []
    one = process(world, "one", "10.0.0.1")
    one.create_task(count_seconds([]), name="drive counting")
    one.create_task(wait_through_every_cancellation(ended), name="drive waiting")
    pass_time(world, 1.0)
    one.life = life
    bury(world)
    assert ended == [True]


class Meeting:
    """A client and a server on two hosts."""

    def __init__(self, world, faults):
        self.wires = Wires(world, faults)
        self.server, self.client = process(world, "server", "10.0.0.1"), process(world, "client", "10.0.0.2")
        self.heard, self.links, self.ends = [], [], []
        self.server.create_task(self._serve(), name="drive server")
        pass_time(world, 0.01)
        self.client.create_task(self._dial(), name="drive client")
        pass_time(world, 0.5)

    async def _serve(self):
        network = SimulatedNetwork(self.wires, self.server)
        async with network.open_listener(SERVER, None, LIMITS) as listener:
            await listener.read(lambda frames, key: self.heard.append(frames[1]))

    async def _dial(self):
        network = SimulatedNetwork(self.wires, self.client)
        async with network.open_dialer(SERVER, None, LIMITS) as self.channel:
            self.channel.dial()
            await self.channel.watch(self.links.append)

    def say(self, *messages):
        for message in messages:
            assert self.channel.send([message]) is Delivery.QUEUED


def numbered(count):
    return [str(number).encode() for number in range(count)]


def test_messages_of_one_connection_arrive_in_order_with_any_delays(world):
    meeting = Meeting(world, NetworkFaults(delay_s=0.05, clogged=0.1, clog_s=0.5))
    assert meeting.links == [LinkEvent.ACCEPTED, LinkEvent.SECURED]
    meeting.say(*numbered(50))
    pass_time(world, 60.0)
    assert meeting.heard == numbered(50)


def test_a_partition_holds_messages_back_until_it_is_over(world):
    meeting = Meeting(world, NetworkFaults())
    meeting.wires.part("10.0.0.1", "10.0.0.2")
    meeting.say(*numbered(3))
    pass_time(world, 60.0)
    assert meeting.heard == []
    meeting.wires.join()
    pass_time(world, 1.0)
    assert meeting.heard == numbered(3)


def test_a_message_may_come_twice(world):
    meeting = Meeting(world, NetworkFaults(duplicated=0.5))
    meeting.say(*numbered(20))
    pass_time(world, 1.0)
    assert sorted({*meeting.heard}, key=int) == numbered(20)
    assert len(meeting.heard) > 20


def test_what_is_on_its_way_is_lost_with_a_process_that_is_killed(world):
    meeting = Meeting(world, NetworkFaults(delay_s=0.05))
    meeting.say(*numbered(3))
    meeting.server.kill()
    meeting.wires.hang_up(meeting.server)
    pass_time(world, 10.0)
    assert meeting.heard == []
    assert meeting.links[-1] is LinkEvent.LOST


def test_nobody_answers_where_nobody_listens(world):
    wires, client = Wires(world, NetworkFaults()), process(world, "client", "10.0.0.2")
    links = []

    async def dial():
        async with SimulatedNetwork(wires, client).open_dialer(SERVER, None, LIMITS) as channel:
            channel.dial()
            await channel.watch(links.append)

    client.create_task(dial(), name="drive client")
    pass_time(world, 1.0)
    assert links == [LinkEvent.UNREACHABLE]
