"""Logs of real workers, joined by request."""

import asyncio
import json
import logging
from datetime import datetime, timedelta

import pytest

from kvflow.errors import PeerLost
from kvflow.tools.trace.export import perfetto
from kvflow.tools.trace.joining import read_trace
from kvflow.tools.trace.text import waterfall_lines
from tests.helpers.waiting import until
from tests.unit.kvflow.worker.helpers import PATIENCE_S
from tests.unit.kvflow.worker.pulling import failure, opened

PULL = ["handshake", "queue", "bind", "post", "wire", "fence", "deliver"]


def router_line(request_id, called_at, **times):
    """Return a record as ``kvflow proxy`` writes it."""
    record = {"event": "request.answered", "request_id": request_id, "called_at": called_at, **times}
    return json.dumps({"timestamp": "2026-01-01T00:00:00Z", "level": "info", **record}) + "\n"


def records(path, event):
    return [record for record in map(json.loads, path.read_text().splitlines()) if record["event"] == event]


def only(path, *more, request_id="request-1"):
    """Return the request of a name in some logs."""
    (found,) = [request for request in read_trace([path, *more]).requests if request.request_id == request_id]
    return found


async def released(world):
    """Wait for the releases, which the consumer sends later."""
    await until(lambda: not any(each.snapshot().leases for each in world.producers))


def forget_handshakes(log):
    """Leave out how clocks compare. Workers of one log have one clock, of which a busy handshake is less sure."""
    lines = [line for line in log.read_text().splitlines(keepends=True) if "peer.connected" not in line]
    log.write_text("".join(lines))


def adds_up(request):
    """Check that phases follow each other without a gap and add up to the whole."""
    at = 0.0
    for phase in request.phases:
        assert phase.start_s == pytest.approx(at, abs=1e-6)
        assert phase.seconds >= 0.0
        at = phase.start_s + phase.seconds
    assert request.total_s == pytest.approx(at, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2])
async def test_both_sides_of_a_pull_are_one_request(log, ranks):
    async with opened(ranks=ranks, inline_s_max=0.0) as world:
        await world.pull(local_request_id="mine")
        await released(world)
    request = only(log)
    adds_up(request)
    assert [phase.name for phase in request.phases] == ["ticket", *PULL]
    assert [offer.outcome for offer in request.offers] == ["released"] * ranks
    (pull,) = request.pulls
    assert (pull.local_request_id, pull.transport, pull.failure) == ("mine", "loopback", None)
    (told,) = records(log, "transfer.completed")
    assert (request.nbytes, request.reads) == (told["nbytes"], told["reads"]) != (0, 0)
    assert pull.total_s == told["total_s"]
    assert request.title.startswith("cache delivered ")
    assert request.clock_error_s is not None


async def test_chunks_and_blocks_are_those_of_the_pull(log):
    async with opened(ranks=2, inline_s_max=0.0) as world:
        await world.pull(world.ticket(blocks=(2, 3, 6)), blocks=(4, 5, 0))
    (pull,) = only(log).pulls
    assert pull.traced
    assert len(pull.peers) == len(pull.groups) == 2
    assert sum(chunk[3] for chunk in pull.chunks) == pull.nbytes
    assert sum(group.descriptors for group in pull.groups) == pull.descriptors
    for group in pull.groups:
        assert (group.source_units, group.target_units) == (1, 1)
        assert group.pairs == ((2, 4, 2), (6, 0, 1))
    for _, posted_s, arrived_s, _, _ in pull.chunks:
        assert 0.0 < posted_s <= arrived_s <= pull.total_s


async def test_what_was_read_is_beside_what_was_computed_meanwhile(log):
    async with opened(follow_bytes_min=1) as world:
        offer = world.producer.offer_progressive("request-1", [[]], 16)
        pull = world.start(offer.ticket, (1, 2, 3, 4))
        for tokens in (4, 12):
            offer.advance(tokens, [[5, 6, 7][tokens // 8 : tokens // 4]])
            await until(lambda: sum(each.nbytes for each in world.consumer.snapshot().open_pulls) >= 128 * tokens)  # noqa: B023
        offer.seal([[0]])
        report = await asyncio.wait_for(pull, PATIENCE_S)
        await released(world)
    forget_handshakes(log)
    request = only(log)
    adds_up(request)
    ((offered,), (read,)) = request.offers, request.pulls
    assert [tokens for _, tokens in offered.advances] == [4, 12, 16]
    assert [(first, end) for first, end, _, _ in read.ranges] == [(0, 4), (4, 12), (12, 16)]
    assert (read.traced, len(read.groups), len(read.chunks)) == (True, 1, 3)
    assert sum(chunk[3] for chunk in read.chunks) == read.nbytes == report.nbytes
    (record,) = records(log, "transfer.completed")
    assert (record["ranges"], record["seal_s"]) == (3, report.seal_s)
    bars = [line for line in waterfall_lines(request) if line.startswith(("computed", "read"))]
    shown = [line[:22].strip() for line in bars]
    assert sorted(shown) == sorted(f"{verb} to {tokens}" for verb in ("computed", "read") for tokens in (4, 12, 16))
    assert shown.index("read to 4") < shown.index("computed to 16")
    names = {event["name"] for event in json.loads(perfetto(read_trace([log])))["traceEvents"]}
    assert {"to token 4", "to token 12", "to token 16"} <= names


@pytest.mark.parametrize("inline_s_max", [0.0, 60.0])
async def test_a_pull_is_traced_however_it_is_posted(log, inline_s_max):
    async with opened(inline_s_max=inline_s_max) as world:
        for number in range(3):
            await world.pull(world.ticket(f"r{number}"))
    for number in range(3):
        (pull,) = only(log, request_id=f"r{number}").pulls
        assert pull.traced
        assert sum(chunk[3] for chunk in pull.chunks) == pull.nbytes


async def test_a_level_that_is_raised_is_seen_and_nothing_is_traced_without(log):
    async with opened() as world:
        await world.pull(world.ticket("detailed"))
        logging.getLogger("kvflow.transfer").setLevel(logging.INFO)
        try:
            for name in ("last", "plain"):
                await world.pull(world.ticket(name))
                await asyncio.sleep(0)
            assert only(log, request_id="detailed").pulls[0].traced
            assert not only(log, request_id="plain").pulls[0].traced
            assert only(log, request_id="plain").nbytes
        finally:
            logging.getLogger("kvflow.transfer").setLevel(logging.NOTSET)


async def test_a_failure_has_its_code_its_remedy_and_its_phase(log):
    async with opened() as world:
        await world.connect()
        world.faults.failing[0] = "peer_lost"
        assert isinstance(await failure(world.start()), PeerLost)
        world.faults.heal()
    request = only(log)
    adds_up(request)
    assert request.outcome == "failed"
    assert request.failure.code == "peer_lost"
    assert request.failure.remedy
    assert "peer_lost in wire" in request.title
    assert request.failure.remedy in request.title


async def test_a_refused_ticket_is_a_request_too(log):
    async with opened() as world:
        await failure(world.start(blocks=(1, 2, 3)))
    request = only(log)
    adds_up(request)
    assert request.failure.code == "block_range_mismatch"


async def test_an_offer_that_nobody_reads_is_told(log):
    async with opened() as world:
        world.ticket()
        world.producer.revoke("request-1")
    assert only(log).outcome == "offered"
    assert "revoked, and no pull is recorded" in only(log).title


@pytest.mark.parametrize("name", ["request-1", "cmpl-request-1-0", "cmpl-request-1-0-0a1b2c3d", "chatcmpl-request-1"])
async def test_a_router_is_the_start_and_the_end_of_a_request(log, tmp_path, name):
    async with opened() as world:
        await world.pull(world.ticket(name))
        await released(world)
    (told,) = records(log, "transfer.completed")
    router = tmp_path / "router.jsonl"
    times = {"prefill_s": 0.5, "first_bytes_s": 120.0, "elapsed_s": 122.0}  # the pull is real, and takes its time
    router.write_text(router_line("request-1", told["called_at"] - 0.5, **times))
    request = only(log, router, request_id=name)
    adds_up(request)
    assert [phase.name for phase in request.phases] == ["prefill", "ticket", *PULL, "decode step"]
    assert request.total_s == pytest.approx(120.0)
    assert request.title.startswith("first token 120000 ms after the request: ")


@pytest.mark.parametrize("ahead_s", [-3600.0, 0.0, 7.0])
async def test_the_clock_of_a_router_follows_from_the_order_of_events(log, tmp_path, ahead_s):
    async with opened() as world:
        await world.pull()
        await released(world)
    (told,) = records(log, "transfer.completed")
    (offered,) = records(log, "offer.admitted")
    offered_at = datetime.fromisoformat(offered["timestamp"]).timestamp()
    prefilled_at = (offered_at + told["called_at"]) / 2  # after the offer, before the pull
    times = {"prefill_s": 0.5, "elapsed_s": 120.0}  # as above, for as long as it takes
    router = tmp_path / "router.jsonl"
    router.write_text(router_line("request-1", prefilled_at - 0.5 + ahead_s, **times))
    trace = read_trace([log, router])
    (request,) = trace.requests
    (clock,) = [clock for clock in trace.clocks if clock.basis == "order"]
    assert clock.ahead_s == pytest.approx(ahead_s, abs=clock.error_s + 1e-3)
    assert request.clock_error_s >= clock.error_s
    adds_up(request)
    assert {phase.name: phase.seconds for phase in request.phases}["prefill"] == pytest.approx(
        0.5, abs=0.1 + request.clock_error_s
    )


def divided(log, ahead_s):
    """Write what each engine has logged into a file of its own, as if the clock of the producer was ahead."""
    lines = {"prefill-0": [], "decode-0": []}
    for record in map(json.loads, log.read_text().splitlines()):
        if record["engine_id"] == "prefill-0":
            moved = datetime.fromisoformat(record["timestamp"]) + timedelta(seconds=ahead_s)
            record["timestamp"] = moved.isoformat()
        for name in {"issued_at", "clock_ahead_s"} & record.keys():
            record[name] += ahead_s
        lines[record["engine_id"]].append(json.dumps(record))
    for engine, its in lines.items():
        log.with_name(f"{engine}.jsonl").write_text("\n".join(its))
    return [log.with_name(f"{engine}.jsonl") for engine in lines]


@pytest.mark.parametrize("ahead_s", [-5.0, 86400.0])
async def test_two_clocks_are_one_by_the_handshake(log, ahead_s):
    async with opened() as world:
        await world.pull()
        await released(world)
    (before,) = read_trace(divided(log, 0.0)).requests
    trace = read_trace(divided(log, ahead_s))
    (after,) = trace.requests
    (clock,) = [clock for clock in trace.clocks if clock.basis == "handshake"]
    assert clock.ahead_s == pytest.approx(ahead_s, abs=clock.error_s)
    assert after.clock_error_s == pytest.approx(clock.error_s)
    assert [phase.name for phase in after.phases] == [phase.name for phase in before.phases]
    for phase, same in zip(after.phases, before.phases, strict=True):
        assert phase.seconds == pytest.approx(same.seconds, abs=1e-5)


async def test_clocks_that_were_never_compared_are_said_to_be(log):
    async with opened() as world:
        await world.pull()
        await released(world)
    forget_handshakes(log)
    (request,) = read_trace(divided(log, 0.0)).requests
    assert request.clock_error_s is None


async def test_requests_without_any_transfer_are_listed(tmp_path):
    router = tmp_path / "router.jsonl"
    router.write_text(router_line("alone", 1e9, prefill_s=0.0, elapsed_s=0.25))
    request = only(router, request_id="alone")
    assert (request.outcome, request.title) == ("answered", "answered 250 ms after the request: 250 decode")
