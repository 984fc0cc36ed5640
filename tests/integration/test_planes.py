"""Which data plane a pair takes, what is told about it, and pairs that have none."""

import asyncio
import contextlib
import os
import sys
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from kvflow import errors
from kvflow.events import PeerConnected, PlaneOmitted, TransferCompleted
from kvflow.leases.tickets import MAC_BYTES, lease_name
from kvflow.reads.reach import host_facts
from kvflow.rendezvous.issuer import draw_pair
from tests.helpers.limits import allowed
from tests.ports import free_port

from .consuming import consuming, dialing_once, reading, until, works
from .producing import producing
from .shapes import Shape

BLOCKS = [[0, 1], [2, 3]]
LARGE = Shape(num_blocks=1024, block_size=16, heads=8, head_size=128)
MOST_BLOCKS = [list(range(1000)), []]
MOST_TOKENS = 1000 * 16
PRODUCER, READER, ANOTHER = (draw_pair() for _ in range(3))


async def pulled(producer, consumer, heard):
    """Pull, compare every byte, and return the plane and what carried the bytes: all who tell of it say the same."""
    report = await consumer.pull(await producer.offer("r", BLOCKS, 8), BLOCKS)
    consumer.has("r", BLOCKS, 8)
    consumer.untouched(but=BLOCKS)
    await until(lambda: heard.of(TransferCompleted))  # the record comes after the caller's turn
    (met,), (completed,) = heard.of(PeerConnected), heard.of(TransferCompleted)
    told = {(each.plane, each.transport) for each in (report, met, completed.report)}
    assert len(told) == 1, told
    return told.pop()


@pytest.fixture(scope="session")
def without_nixl(tmp_path_factory):
    """The variables of a machine on which no NIXL can be imported."""
    folder = tmp_path_factory.mktemp("without-nixl")
    for name in ("nixl", "nixl_cu12", "nixl_cu13"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise ImportError('there is no NIXL here')\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "settings", "chosen"),
    [
        ({}, {}, ("nixl", "cma")),
        ({}, {"transport": "tcp"}, ("tcp", "tcp")),
        ({"UCX_TLS": "tcp"}, {}, ("tcp", "tcp")),
        ({"UCX_TLS": "posix,self"}, {}, ("tcp", "tcp")),
    ],
    ids=["as it is", "by the setting", "UCX with TCP only", "UCX without cma"],
)
async def test_bytes_go_over_the_best_plane_that_both_have(spawn, heard, environment, settings, chosen):
    async with (
        spawn(**environment).producing(Shape(), **settings) as producer,
        consuming(hooks=[heard]) as ours,
    ):
        assert await pulled(producer, ours, heard) == chosen


@pytest.fixture
def apart():
    """What starts a process in namespaces of its own, as a container would."""
    return allowed("unshare", "--pid", "--ipc", "--fork", "--kill-child")


@pytest.mark.nixl
@pytest.mark.processes
async def test_a_producer_in_other_namespaces_is_not_read_over_shared_memory(spawn, heard, apart):
    async with (
        spawn(forked=False, before=apart).producing(Shape()) as producer,
        consuming(hooks=[heard]) as ours,
    ):
        assert await pulled(producer, ours, heard) == ("tcp", "tcp")


@pytest.mark.processes
async def test_a_machine_without_nixl_is_read_over_tcp(spawn, heard, without_nixl):
    async with (
        spawn(forked=False, **without_nixl).producing(Shape()) as producer,
        consuming(hooks=[heard]) as ours,
    ):
        assert await pulled(producer, ours, heard) == ("tcp", "tcp")


async def test_a_reader_without_nixl_says_so_once_and_reads_over_tcp(monkeypatch, heard):
    def none(_log_level):
        raise errors.TransportUnavailable("there is no NIXL here")

    async with producing(Shape()) as producer:
        monkeypatch.setattr("kvflow.reads.nixl.backend.load_binding", none)
        async with consuming(hooks=[heard]) as ours:
            assert await pulled(producer, ours, heard) == ("tcp", "tcp")
            (omitted,) = heard.of(PlaneOmitted)
            assert omitted.plane == "nixl"
            assert "there is no NIXL here" in omitted.detail
        with pytest.raises(errors.TransportUnavailable, match="there is no NIXL here"):
            async with consuming(transport="nixl"):
                pass


@pytest.mark.nixl
async def test_a_port_that_is_down_leaves_hosts_with_rdma_to_tcp(monkeypatch, heard):
    """The addresses of UCX have the last word: without a port that is up, UCX has none of a network card."""
    hosts = iter(("one", "another"))

    def facts(**how):
        cards = ("mlx5_0",)
        return msgspec.structs.replace(host_facts(**how), boot_id=next(hosts), network_cards=cards, variables={})

    monkeypatch.setattr("kvflow.reads.nixl.backend.host_facts", facts)
    monkeypatch.setattr("kvflow.reads.nixl.backend.may_copy_from", lambda _pid: False)  # as of another host
    async with producing(Shape()) as producer, consuming(hooks=[heard]) as ours:
        assert await pulled(producer, ours, heard) == ("tcp", "tcp")
    (met,) = heard.of(PeerConnected)
    assert met.passed_over.startswith(
        "nixl: neither shared memory nor RDMA reaches the peer's memory; rdma is expected"
    )
    assert "is a port down?" in met.passed_over
    assert met.remedy, "so that the record is a warning"


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize(
    ("environment", "theirs", "ours", "field"),
    [
        ({"UCX_TLS": "posix,self"}, {"transport": "nixl"}, {"transport": "nixl"}, "transport"),
        ({"UCX_TLS": "posix,self"}, {"transport": "nixl"}, {}, "transport"),
        ({}, {"transport": "tcp"}, {"transport": "nixl"}, "transport"),
        ({}, {"transport": "nixl"}, {"transport": "tcp"}, "transport"),
        ({}, {"transport": "tcp"}, {"transport": "tcp", "tcp_encryption": "tls"}, "tcp_encryption"),
        ({}, {"transport": "tcp", "tcp_encryption": "tls"}, {}, "tcp_encryption"),
        ({"UCX_TLS": "posix,self"}, {"tcp_encryption": "tls"}, {}, "tcp_encryption"),
    ],
    ids=[
        "nixl without reads of memory",
        "nixl without reads of memory, to auto",
        "tcp to nixl",
        "nixl to tcp",
        "plain to encrypted",
        "encrypted to plain",
        "encrypted to plain, as nixl does not fit",
    ],
)
async def test_a_pair_without_a_plane_is_refused_by_name_before_its_first_read(
    spawn, heard, *, environment, theirs, ours, field
):
    async with spawn(**environment).producing(Shape(), **theirs) as producer:
        async with consuming(hooks=[heard], **ours) as consumer:
            params = await producer.offer("r", BLOCKS, 8)
            for _ in range(2):
                with pytest.raises(errors.LayoutMismatch) as caught:
                    await consumer.pull(params, BLOCKS)
                assert caught.value.field == field
                assert caught.value.remedy
            await consumer.worker.quiesced("nobody there")
            consumer.untouched()
            consumer.at_rest()
            assert not heard.of(PeerConnected)
        assert await producer.held() == ["r"]


@pytest.mark.nixl
@pytest.mark.processes
async def test_encryption_of_a_plane_that_is_not_taken_need_not_agree(elsewhere, heard):
    async with (
        elsewhere.producing(Shape(), tcp_encryption="tls") as producer,
        consuming(hooks=[heard]) as consumer,
    ):
        assert await pulled(producer, consumer, heard) == ("nixl", "cma")


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("side", ["producer", "consumer"])
async def test_required_encryption_allows_nixl_within_a_host_only(elsewhere, heard, monkeypatch, side):
    theirs, ours = ({"require_encryption": True} if side == each else {} for each in ("producer", "consumer"))
    near = [each | {"transport": "nixl"} for each in (theirs, ours)]
    async with elsewhere.producing(Shape(), **near[0]) as producer:
        async with consuming(hooks=[heard], **near[1]) as consumer:
            assert await pulled(producer, consumer, heard) == ("nixl", "cma")
        monkeypatch.setattr("kvflow.reads.nixl.backend.is_within_a_host", lambda *_: False)
        async with consuming(hooks=[heard], **near[1]) as consumer:
            params = await producer.offer("far", BLOCKS, 8)
            with pytest.raises(errors.LayoutMismatch, match="does not encrypt between hosts") as caught:
                await consumer.pull(params, BLOCKS)
            assert caught.value.field == "require_encryption"
            assert "tcp_encryption" in caught.value.remedy
            consumer.untouched()


@pytest.mark.processes
@pytest.mark.parametrize("connections", [1, 3])
async def test_every_byte_of_a_large_pull_arrives_encrypted(elsewhere, heard, connections):
    settings = {"transport": "tcp", "tcp_encryption": "tls", "tcp_connections": connections}
    shape = msgspec.structs.replace(LARGE, num_blocks=96)
    lists = [list(range(40)), list(range(41, 81))]
    async with elsewhere.producing(shape, **settings) as producer, consuming(shape, **settings) as consumer:
        for turn in range(3):
            sources = [ids[::-1] if turn % 2 else ids for ids in lists]
            await works(producer, consumer, f"r{turn}", lists, 40 * 16, sources=sources)
        consumer.untouched(but=lists)
        consumer.at_rest()


async def test_a_reader_whose_key_is_removed_reads_no_further_over_tcp():
    def key(pair, *trusted):
        return {"private_key": pair[0], "allowed_keys": tuple(public for _, public in trusted), "transport": "tcp"}

    async with (
        producing(LARGE, **key(PRODUCER, READER, ANOTHER)) as producer,
        consuming(LARGE, **key(READER, PRODUCER)) as reader,
        consuming(LARGE, engine_id="decode-1", **key(ANOTHER, PRODUCER)) as another,
    ):
        pull, params = await reading(producer, reader, MOST_BLOCKS, MOST_TOKENS)
        producer.worker.allow_keys([ANOTHER[1]])
        with pytest.raises(errors.PeerLost):
            await pull
        await reader.worker.quiesced("r")
        reader.at_rest()
        with pytest.raises(errors.AuthenticationFailed):
            await reader.pull(params, MOST_BLOCKS)
        await another.pull(params, MOST_BLOCKS)
        assert (another.cache.backing == producer.cache.backing).float().mean() > 0.9


@pytest.mark.parametrize("bind", ["tcp://[::1]:0", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("encryption", ["off", "tls"])
async def test_addresses_of_both_kinds(bind, encryption, heard):
    settings = {"transport": "tcp", "tcp_encryption": encryption, "bind": bind}
    async with producing(Shape(), **settings) as producer, consuming(hooks=[heard], **settings) as consumer:
        assert ("[::1]" in producer.endpoint) == ("[::1]" in bind)
        assert await pulled(producer, consumer, heard) == ("tcp", "tcp")


async def test_at_most_a_thread_per_core_serves_tcp_and_one_lets_readers_in():
    async with AsyncExitStack() as stack:
        readers = [
            await stack.enter_async_context(consuming(engine_id=f"decode-{number}", transport="tcp"))
            for number in range(4)
        ]
        before = set(threading.enumerate())
        producer = await stack.enter_async_context(producing(Shape(), transport="tcp"))
        for turn in range(2):
            await asyncio.gather(
                *(
                    works(producer, reader, f"{turn} {number}", [[8 * number], [8 * number + 1]], 4)
                    for number, reader in enumerate(readers)
                )
            )
        names = [each.name for each in set(threading.enumerate()) - before if each.name.startswith("kvflow-tcp")]
        members = [name for name in names if name.removeprefix("kvflow-tcp-").isdecimal()]
        assert 1 <= len(members) <= os.cpu_count()
        assert sorted({*names} - {*members}) == ["kvflow-tcp", "kvflow-tcp-access"], "the first one reads"


def listening(port):
    """Tell where this process's host listens at a port, by the kernel's own table."""
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), Path("/proc/net", table).open() as lines:
            rows = [line.split() for line in lines][1:]
            found |= {row[1].split(":")[0] for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    return found


@pytest.mark.parametrize(
    ("settings", "at"),
    [
        ({"tcp_bind": "tcp://127.0.0.1:{port}"}, {"0100007F"}),
        ({"tcp_bind": "tcp://127.0.0.1:{port}", "tcp_advertise": "tcp://localhost:{port}"}, {"0100007F"}),
        ({"tcp_bind": "tcp://*:{port}", "tcp_advertise": "tcp://127.0.0.1:{port}"}, {"00000000"}),
        ({"tcp_bind": "tcp://[::1]:{port}"}, {"0" * 24 + "01000000"}),
        ({"tcp_bind": "tcp://*:{port}"}, {"00000000"}),
    ],
    ids=["an address", "another name", "every address", "IPv6 beside IPv4", "every address, as bind is reached"],
)
async def test_the_plane_listens_where_it_is_told_and_is_found_where_it_says(settings, at, heard):
    port = free_port()
    settings = {name: value.format(port=port) for name, value in settings.items()}
    async with (
        producing(Shape(), transport="tcp", **settings) as producer,
        consuming(hooks=[heard], transport="tcp") as consumer,
    ):
        assert listening(port) == at
        assert await pulled(producer, consumer, heard) == ("tcp", "tcp")
    assert listening(port) == set()


@pytest.mark.parametrize("advertised", ["tcp://127.0.0.1:{port}", "tcp://no-such-host.invalid:{port}"])
@pytest.mark.nixl
@pytest.mark.processes
async def test_a_tcp_plane_that_is_not_reached_is_not_needed_where_nixl_fits(elsewhere, heard, advertised):
    wrong = advertised.format(port=free_port())
    async with elsewhere.producing(Shape(), tcp_advertise=wrong) as producer:
        async with consuming(hooks=[heard]) as ours:
            assert await pulled(producer, ours, heard) == ("nixl", "cma")
        async with dialing_once(transport="tcp") as consumer:
            params = await producer.offer("nobody there", BLOCKS, 8)
            with pytest.raises(errors.PeerLost) as caught:
                await consumer.pull(params, BLOCKS)
            assert caught.value.remedy
            await consumer.worker.quiesced("nobody there")
            consumer.untouched()
            consumer.at_rest()


async def test_a_lease_is_read_over_tcp_with_its_own_ticket_only(monkeypatch):
    """Slots and epochs can be found out by asking; what was signed cannot."""

    def with_another_mac(ticket, at):
        return msgspec.structs.replace(lease_name(ticket, at), mac=bytes(MAC_BYTES))

    async with producing(Shape(), transport="tcp") as producer, consuming(transport="tcp") as consumer:
        ticket = await producer.offer("r", BLOCKS, 8)
        with monkeypatch.context() as patched:
            patched.setattr("kvflow.worker.consumer.lease_name", with_another_mac)
            with pytest.raises(errors.PeerLost):  # no honest reader does so: its connection is closed
                await consumer.pull(ticket, BLOCKS)
        await consumer.worker.quiesced("r")
        consumer.untouched()
        await consumer.pull(ticket, BLOCKS)
        consumer.has("r", BLOCKS, 8)
