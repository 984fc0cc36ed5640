"""The record of a completed pull that a file keeps is the one that any other log gets, and nothing is lost."""

import asyncio
import json
import logging
from contextlib import asynccontextmanager
from datetime import datetime

import pytest

from kvflow.errors import StaleLease
from kvflow.events import TransferCompleted
from kvflow.layout.groups import Group
from kvflow.observability.logs import configure_logging, event_fields
from kvflow.worker import open_pulls
from tests.helpers.waiting import until

from .helpers import SPECS, cache_of
from .pulling import opened

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A file of JSON lines, in which only a flush writes what is kept."""
    monkeypatch.setattr(open_pulls, "KEPT_S", 3600.0)
    leases = logging.getLogger("kvflow.lease")
    leases.setLevel(logging.CRITICAL)
    yield tmp_path / "log.jsonl"
    leases.setLevel(logging.NOTSET)


@asynccontextmanager
async def logged(path, **how):
    """Open a world whose only log is a file. Opening it imports what puts handlers of its own in place."""
    async with opened(**how) as world:
        configure_logging(path)
        yield world


def completed(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["event"] == "transfer.completed"]


@pytest.fixture
def contexts(monkeypatch):
    """What a log that keeps nothing gets beside the event of each pull that ends."""
    found, complete = [], open_pulls.OpenPulls.complete

    def noted(self, pull, *how):
        found.append(pull.context(self._wall() - self._clock()))
        return complete(self, pull, *how)

    monkeypatch.setattr(open_pulls.OpenPulls, "complete", noted)
    return found


async def check(world, path, context):
    """Compare the only kept record with what other logs get."""
    event = await world.record()
    assert isinstance(event, TransferCompleted)
    assert completed(path) == []
    logging.getLogger("kvflow").handlers[0].flush()
    (line,) = completed(path)
    worker = {"engine_id": "decode-0", "rank": 0, "incarnation": world.consumer.incarnation}
    wanted = worker | context | event_fields(event) | {"event": "transfer.completed", "level": "info"}
    ended_at = datetime.fromisoformat(line.pop("timestamp")).timestamp()
    called_at = line["called_at"]
    assert called_at == pytest.approx(context["called_at"], abs=1.0)
    assert ended_at == pytest.approx(called_at + line["total_s"], abs=1e-5), "the time is not that of the completion"
    assert list(line.items()) == list((wanted | {"called_at": called_at}).items())
    assert {key: type(value) for key, value in line.items()} == {
        key: type(value) for key, value in json.loads(json.dumps(wanted)).items()
    }


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_a_kept_record_is_the_one_of_any_other_log(path, contexts, ranks, inline):
    how = {} if inline else {"inline_s_max": 0.0}
    async with logged(path, ranks=ranks, **how) as world:
        await world.pull(world.ticket(traceparent=TRACEPARENT), local_request_id="ours" + "x" * 1000)
        await check(world, path, *contexts)
    assert b"x" * 257 not in path.read_bytes()


async def test_a_record_of_several_groups(path, contexts):
    groups = tuple(Group((name,), SPECS[name].kind, SPECS[name].block_size) for name in "ab")
    async with logged(path, sources=[cache_of(groups=groups)], target=cache_of(groups=groups)) as world:
        await world.consumer.pull(world.producer.offer("r", [[1, 2], [-1, 3]], 8), [[3, 4], [5]])
        await check(world, path, *contexts)


async def test_a_record_of_an_open_offer(path, contexts):
    async with logged(path) as world:
        offer = world.producer.offer_progressive("request-1", [[3, 4]], 8)
        pull = world.start(offer.ticket)
        offer.seal()
        assert (await pull).ranges > 0
        await check(world, path, *contexts)
    (line,) = completed(path)
    assert {"ranges", "seal_s"} <= line.keys()


async def test_a_record_of_a_pull_of_nothing(path, contexts):
    async with logged(path) as world:
        await world.pull(blocks=(-1, -1))
        await check(world, path, *contexts)


@pytest.mark.parametrize("kept", [True, False])
async def test_one_in_so_many_pulls_has_a_record_and_says_so(path, contexts, kept):
    async with logged(path, log_every=3) as world:
        if not kept:
            logging.getLogger("kvflow").handlers[0].setLevel(logging.INFO)  # so that it gets each record by itself
        for number in range(7):
            await world.pull(world.ticket(str(number)))
        await world.records(7)  # hooks take each pull
        stale = world.ticket("stale")
        world.producer.revoke("stale")
        with pytest.raises(StaleLease):
            await world.pull(stale)
        await world.records(8)
    assert '"transfer.failed"' in path.read_text()
    assert [(line["request_id"], line["log_every"]) for line in completed(path)] == [("0", 3), ("3", 3), ("6", 3)]


async def test_a_worker_that_closes_has_written_everything(path):
    silent = logging.getLogger("kvflow.worker")
    try:
        async with logged(path) as world:
            await world.pull()
            await world.record()
            silent.setLevel(logging.CRITICAL)
            assert completed(path) == []
    finally:
        silent.setLevel(logging.NOTSET)
    assert len(completed(path)) == 1


async def test_records_are_written_soon_if_nothing_else_is(path, monkeypatch):
    monkeypatch.setattr(open_pulls, "KEPT_S", 0.001)
    async with logged(path) as world:
        await world.pull(world.ticket("soon"))
        lines = await until(lambda: completed(path))  # a timer of the loop writes it
        assert [line["request_id"] for line in lines] == ["soon"]


async def test_a_handler_that_is_added_gets_the_next_record(path):
    heard, handler = [], logging.Handler()
    handler.emit = heard.append
    async with logged(path) as world:
        await world.pull(world.ticket("before"))
        logging.getLogger("kvflow").addHandler(handler)
        await world.pull(world.ticket("after"))
        await world.records(2)
    assert [each.msg["request_id"] for each in heard if each.msg["event"] == "transfer.completed"] == ["after"]
    assert [line["request_id"] for line in completed(path)] == ["before", "after"]


async def test_a_lower_level_traces_pulls_although_records_are_kept(path, monkeypatch):
    monkeypatch.setattr(open_pulls, "KEPT_S", 0.001)
    async with logged(path) as world:
        logging.getLogger("kvflow").setLevel(logging.DEBUG)
        number = 0
        while "transfer.traced" not in path.read_text():
            await world.pull(world.ticket(f"number {number}"))
            await asyncio.sleep(0.001)
            number += 1
