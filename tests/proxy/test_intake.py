"""What clients of a proxy may hold while they send."""

import asyncio

import pytest

from kvflow.tools.proxy.intake import FILES_SPARE, Bodies, Connections, ProxyConfig, RequestRefused, within_files


def config(**settings):
    return ProxyConfig(prefill=("http://p",), decode=("http://d",), **settings)


class Sender:
    """A body on its way: what is put is a chunk, None is its end."""

    def __init__(self, bodies):
        self.chunks = asyncio.Queue()
        self.bodies = bodies
        self.task = asyncio.create_task(self.receive())

    async def receive(self):
        with self.bodies.hold() as holding:
            return await self.bodies.receive(self.read(), holding)

    async def read(self):
        while (chunk := await self.chunks.get()) is not None:
            yield chunk
            self.chunks.task_done()
        self.chunks.task_done()

    async def send(self, *chunks):
        """Put chunks, and wait until they are taken."""
        for chunk in chunks:
            self.chunks.put_nowait(chunk)
        taken = asyncio.create_task(self.chunks.join())
        await asyncio.wait([taken, self.task], return_when=asyncio.FIRST_COMPLETED)
        taken.cancel()
        return self


async def ends(task):
    async with asyncio.timeout(60):
        return await task


async def test_a_body_is_read_as_it_came():
    bodies = Bodies(config())
    sender = await Sender(bodies).send(b"a", b"", b"bc", None)
    assert await ends(sender.task) == b"abc"


async def test_a_body_may_have_as_many_bytes_as_is_said():
    bodies = Bodies(config(body_bytes_max=4))
    assert await ends((await Sender(bodies).send(b"ab", b"cd", None)).task) == b"abcd"
    with pytest.raises(RequestRefused, match="more than 4 bytes") as refused:
        await ends((await Sender(bodies).send(b"ab", b"cde")).task)
    assert refused.value.status == 413


@pytest.mark.parametrize("sent", [b"", b"a"])
async def test_a_body_that_does_not_come_is_given_up(sent):
    bodies = Bodies(config(body_timeout_s=0.05))
    with pytest.raises(RequestRefused, match=rf"^{len(sent)} bytes of the body came in") as refused:
        await ends((await Sender(bodies).send(sent)).task)
    assert refused.value.status == 408


async def test_a_body_that_comes_fast_enough_has_longer():
    bodies = Bodies(config(body_timeout_s=0.5, body_rate_min=1))
    sender = await Sender(bodies).send(b"x" * 3600)  # which buys an hour
    await asyncio.sleep(0.7)
    await sender.send(b"y", None)
    assert len(await ends(sender.task)) == 3601


async def test_a_large_and_slow_body_makes_room_for_a_newcomer():
    bodies = Bodies(config(held_bytes_max=10))
    small, large = await Sender(bodies).send(b"aa"), await Sender(bodies).send(b"b" * 7)
    await asyncio.sleep(0.01)  # so that all are older than nothing
    newcomer = await Sender(bodies).send(b"c" * 8, None)  # larger, and not slow
    assert await ends(newcomer.task) == b"c" * 8
    with pytest.raises(RequestRefused, match="try again") as refused:
        await ends(large.task)
    assert refused.value.status == 503
    await small.send(b"a" * 8, None)  # nothing else is held
    assert len(await ends(small.task)) == 10


async def test_a_body_is_refused_that_is_the_largest_and_slowest_itself():
    bodies = Bodies(config(held_bytes_max=10))
    large, small = await Sender(bodies).send(b"b" * 7), await Sender(bodies).send(b"aaa")
    await asyncio.sleep(0.01)  # so that all are older than nothing
    with pytest.raises(RequestRefused, match="try again"):
        await ends((await large.send(b"b")).task)
    await small.send(None)
    assert await ends(small.task) == b"aaa"


async def test_what_is_with_a_server_makes_no_room():
    bodies = Bodies(config(held_bytes_max=10))
    with bodies.hold() as served:
        bodies.add(served, 8)
        with pytest.raises(RequestRefused):
            await ends((await Sender(bodies).send(b"bbb")).task)
        with pytest.raises(RequestRefused):
            bodies.add(served, 3)  # an answer that is too much
    with bodies.hold() as served:
        bodies.add(served, 10)


@pytest.mark.parametrize("end", ["whole", "hung up", "too long", "no room"])
async def test_every_byte_that_was_held_is_given_back(end):
    bodies = Bodies(config(held_bytes_max=10, body_bytes_max=8))
    sender = await Sender(bodies).send(b"bbbb")
    other = await Sender(bodies).send(b"aa")
    await asyncio.sleep(0.01)  # so that all are older than nothing
    if end == "hung up":
        sender.task.cancel()
    else:
        await sender.send(*{"whole": [None], "too long": [b"bbbbb"], "no room": [b"bb", b"b"]}[end])
    if end == "no room":
        await other.send(b"aa")
    await asyncio.wait([sender.task])
    other.task.cancel()
    await asyncio.gather(sender.task, other.task, return_exceptions=True)
    with bodies.hold() as holding:
        bodies.add(holding, 10)
        with pytest.raises(RequestRefused):
            bodies.add(holding, 1)


class Wire(asyncio.Transport):
    """A connection; the protocol hears of its end in the next turn of the loop, as asyncio's does."""

    def __init__(self, connections, said):
        super().__init__()
        self.said = said
        self.closed = asyncio.Event()
        self.protocol = connections.watched(self)
        self.protocol.connection_made(self)

    def connection_made(self, transport):
        self.said.append(("made", self))

    def connection_lost(self, exc):
        self.said.append(("lost", self))

    def is_closing(self):
        return self.closed.is_set()

    def abort(self):
        if not self.closed.is_set():
            self.closed.set()
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


async def test_the_one_that_waits_for_longest_makes_room_for_a_newcomer():
    said = []
    connections = Connections(3, 3600)
    first, second, third = (Wire(connections, said) for _ in range(3))
    connections.on_headers(first)
    connections.on_headers(second)
    connections.on_request(first)
    fourth = Wire(connections, said)
    assert second.closed.is_set()
    connections.begin(first)  # it has its answer
    fifth = Wire(connections, said)
    assert third.closed.is_set()
    assert not any(wire.closed.is_set() for wire in (first, fourth, fifth))
    await asyncio.sleep(0)
    sixth = Wire(connections, said)  # the ends of closed ones count once
    assert fourth.closed.is_set()
    assert not any(wire.closed.is_set() for wire in (first, fifth, sixth))


async def test_a_newcomer_is_closed_when_all_others_are_served():
    connections = Connections(1, 3600)
    served = Wire(connections, [])
    connections.on_request(served)
    assert Wire(connections, []).closed.is_set()
    assert not served.closed.is_set()
    served.abort()
    await asyncio.sleep(0)
    assert not Wire(connections, []).closed.is_set()


async def test_headers_have_a_deadline_and_what_has_been_heard_has_none():
    connections = Connections(10, 0.02)
    silent, heard, served = (Wire(connections, []) for _ in range(3))
    connections.on_headers(heard)
    connections.on_request(served)
    async with asyncio.timeout(60):
        await silent.closed.wait()
    assert not heard.closed.is_set()
    connections.begin(served)
    async with asyncio.timeout(60):
        await served.closed.wait()
    assert not heard.closed.is_set()


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (-1, (1024, 4096)),
        (1 << 16, (1024, 4096)),
        (FILES_SPARE + 4096, (1024, 3072)),
        (1024, (320, 640)),
        (10, (1, 2)),
    ],
)
def test_few_files_are_shared_by_clients_and_servers(files, found):
    assert within_files(config(), files) == found
    requests, connections = found
    assert requests + connections <= max(files - FILES_SPARE, 3) or files < 0


def test_half_of_the_connections_may_always_be_closed():
    assert within_files(config(requests_max=100, connections_max=10), 1 << 16) == (5, 10)
