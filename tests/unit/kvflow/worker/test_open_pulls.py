"""Every call of ``pull`` ends in one record, whatever ended it, wherever it was; and the record says how far it was."""

import asyncio
import gc
import inspect
import time
import weakref

import msgspec
import pytest

from kvflow import errors
from kvflow.events import PullFailed, TransferCompleted
from kvflow.layout.groups import Group
from kvflow.rendezvous.dialer import Link
from kvflow.report import TransferReport
from kvflow.worker import open_pulls
from kvflow.worker.open_pulls import KEPT_BYTES_MAX, OpenPulls, PullHandle
from kvflow.worker.peers import PeerPool
from kvflow.worker.prepared import Route
from tests.helpers.waiting import patiently

from .helpers import PATIENCE_S, SPECS, Clock, Reports, cache_of, futures_left
from .pulling import awaiting, failure, issued_before, opened

MADE = {
    errors.ArgumentInvalid: ("ticket", "a Ticket", None),
    errors.RequestUnknown: ("r",),
    errors.ReleaseMismatch: ("the ticket", "ticket format", "kvf2", "kvf3"),
    errors.LayoutMismatch: ("dtype", "float16", "bfloat16"),
    errors.CapacityExceeded: ("open pulls", 1),
    errors.PeerRefused: ("version_unsupported", "too old"),
}
"""Errors that take more than a message."""
KNOWN = {errors.StaleLease: {"ended_by": "gone"}, errors.DeadlineExceeded: {"phase": "connect"}}
KINDS = [kind for kind in vars(errors).values() if inspect.isclass(kind) and issubclass(kind, errors.KvflowError)]
OTHERS = [RuntimeError("a defect"), MemoryError(), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]


async def failing(world, kind, **how):
    """Return the error of the only pull, and its record."""
    error = await failure(world.start(**how))
    assert type(error) is kind
    record = await world.record()
    assert isinstance(record, PullFailed)
    return error, record


def unmeetable(monkeypatch, error):
    """Have no peer be met."""

    async def connect(self, member):
        raise error

    monkeypatch.setattr(PeerPool, "connect", connect)


async def test_a_long_name_of_a_request_is_cut_in_its_records(world):
    name = "x" * 100_000
    await world.pull(local_request_id=name)
    assert (await world.record()).local_request_id == name[:256]
    world.events.clear()
    await failure(world.consumer.start_pull({"a": 1}, [[1]], local_request_id=name))
    assert (await world.record()).local_request_id == name[:256]


async def test_every_kind_of_error_is_one_record(world, monkeypatch):
    ticket = world.ticket()
    for kind in KINDS:
        told = kind(*MADE.get(kind, ("what happened",)), **KNOWN.get(kind, {}))
        unmeetable(monkeypatch, told)
        error, record = await failing(world, kind, ticket=ticket, local_request_id="ours")
        assert error is told
        assert (record.code, record.detail, record.remedy) == (kind.code, error.message, kind.default_remedy)
        assert (record.request_id, record.local_request_id) == ("request-1", "ours")
        phase = "connect" if kind is errors.DeadlineExceeded else "handshake"
        assert (record.phase, record.peer) == (phase, f"prefill-0/0/{world.producer.incarnation}")
        world.events.clear()


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
async def test_what_is_no_error_of_ours_is_one_record_too(error):
    reports = Reports()
    ending = OpenPulls(pool=None, clock=Clock(), wall=Clock(), report=reports, cancel=lambda _: None)
    call = ending.begin(None, "ours")
    ending.fail(call, error)
    ending.fail(call, error)
    (record,) = reports.events
    cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
    assert record.code == ("transfer_cancelled" if cancelled else "transfer_failed")
    assert record.detail
    assert call.handle.exception().code == record.code


async def test_a_defect_of_ours_is_a_record_and_the_cause_of_the_error(world, monkeypatch):
    def divide(self, peers):
        raise ZeroDivisionError("by zero")

    monkeypatch.setattr("kvflow.worker.prepared.PreparedTable.shares", divide)
    error, record = await failing(world, errors.TransferFailed)
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert (record.code, record.phase) == ("transfer_failed", "handshake")
    assert "ZeroDivisionError: by zero" in record.detail


@pytest.mark.parametrize(
    ("kind", "phase", "how"),
    [
        (errors.ArgumentInvalid, "check", {"priority": "urgent"}),
        (errors.BlockIdsInvalid, "check", {"blocks": (8,)}),
        (errors.BlockRangeMismatch, "plan", {"blocks": (1, 2, 3)}),
    ],
)
async def test_a_call_that_cannot_be_carried_out(world, kind, phase, how):
    _, record = await failing(world, kind, **how)
    assert (record.code, record.phase, record.nbytes_wanted) == (kind.code, phase, 0)
    assert record.timings_s.keys() == ({"total"} if phase == "check" else {"handshake", "total"})
    assert record.transport == ("" if phase == "check" else "loopback")


async def test_what_is_no_ticket(world):
    error = await failure(world.consumer.start_pull({"a": 1}, [[1]], local_request_id=7))
    assert isinstance(error, errors.ArgumentInvalid)
    record = await world.record()
    assert (record.phase, record.request_id, record.local_request_id) == ("check", "", "7")
    assert record.ticket_age_s is None


async def test_the_age_of_a_ticket_is_by_the_clock_of_its_producer(world, monkeypatch):
    """Nobody was met at first, so that the age is by our own clock."""
    began_s = time.time()

    async def is_aged(seconds):
        passed_s = time.time() - began_s
        assert seconds - 0.01 <= (await world.record()).ticket_age_s <= seconds + passed_s + 0.01

    ticket = issued_before(world.ticket(), 10.0)
    error = await failure(world.start(ticket, (8,)))
    assert isinstance(error, errors.BlockIdsInvalid)
    await is_aged(10.0)
    await world.connect()
    (member,) = ticket.members()
    offset = world.consumer._consumer.peers.link(member.peer).clock_offset
    monkeypatch.setattr(Link, "clock_offset", property(lambda _: msgspec.structs.replace(offset, ahead_s=100.0)))
    world.events.clear()
    await failure(world.start(ticket, (8,)))  # which names no peer
    await is_aged(10.0)
    world.events.clear()
    world.faults.failing[0] = "bounds"
    await failure(world.start(ticket))
    await is_aged(110.0)


async def test_of_several_peers_that_cannot_be_met_the_first_is_named(monkeypatch):
    first_failed = asyncio.Event()

    async def connect(self, member):
        if member.address.rank == 0:
            await first_failed.wait()
        first_failed.set()
        raise errors.PeerRefused("busy", "later")

    monkeypatch.setattr(PeerPool, "connect", connect)
    async with opened(ranks=2) as world:
        _, record = await failing(world, errors.PeerRefused)
        assert record.peer == f"prefill-0/1/{world.producers[1].incarnation}"


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("revoked", "the producer revoked it"),
        ("used", "it was used before, and released"),
        ("expired", "it expired"),
    ],
)
async def test_of_a_stale_lease_the_producer_is_asked(end, words, monkeypatch):
    monkeypatch.setattr(open_pulls, "EXPLAIN_S", PATIENCE_S)
    async with opened() as world:
        if end == "expired":
            world.minted.add(0)
        await world.connect()
        if end == "expired":
            ticket, admit = world.early(lease_s=0.1)
            admit()
        else:
            ticket = world.ticket()
        if end == "revoked":
            world.producer.revoke("request-1")
        elif end == "used":
            await world.pull(ticket)
            await world.record()
            world.events.clear()
        await patiently(world.producer.wait_offer("request-1"))
        error, record = await failing(world, errors.StaleLease, ticket=ticket)
        assert words in str(error)
        assert (record.code, record.lease_ended_by) == ("stale_lease", end)
        assert record.lease_ended_s >= 0.0
        assert (error.ended_by, error.ended_s) == (record.lease_ended_by, record.lease_ended_s)
        assert words in record.detail


async def test_a_stale_lease_is_explained_only_as_far_as_its_producer_answers(world, monkeypatch):
    await world.connect()
    monkeypatch.setattr("kvflow.worker.open_pulls.EXPLAIN_S", 0.01)
    monkeypatch.setattr(Link, "_send_queries", lambda self: None)
    ticket = world.ticket()
    world.producer.revoke("request-1")
    error, record = await failing(world, errors.StaleLease, ticket=ticket)
    assert (error.ended_by, record.lease_ended_by, record.phase) == ("unknown", "unknown", "fence")
    assert "reason unknown" in record.detail


async def test_a_pull_canceled_during_the_lease_query_records_a_stale_lease(world, monkeypatch):
    asked, answer, ask = asyncio.Event(), asyncio.Event(), Link.ask_end

    async def ask_late(self, lease, *, within_s):
        asked.set()
        await answer.wait()
        return await ask(self, lease, within_s=within_s)

    await world.connect()
    monkeypatch.setattr(open_pulls, "EXPLAIN_S", PATIENCE_S)
    monkeypatch.setattr(Link, "ask_end", ask_late)
    ticket = world.ticket()
    world.producer.revoke("request-1")
    task = asyncio.ensure_future(world.consumer.pull(ticket, [[1, 2]]))
    await patiently(asked.wait())
    task.cancel()
    assert isinstance(await failure(task), asyncio.CancelledError)
    await world.pull(world.ticket("the same blocks"))
    answer.set()
    record = (await world.records(2))["request-1"]
    assert (record.code, record.lease_ended_by) == ("stale_lease", "revoked")


async def test_a_caller_that_goes_when_its_pull_is_complete_leaves_one_record(world):
    await world.connect()
    handle = world.start()
    task = asyncio.ensure_future(wait_for(handle))
    handle.on_quiesced(lambda _: task.cancel())
    await failure(task)
    assert isinstance(await world.record(), TransferCompleted)


async def wait_for(handle):
    return await handle


async def test_what_nobody_listens_to_is_not_written():
    class Deaf(Reports):
        def wants(self, kind):
            return False

    reports = Deaf()
    ending = OpenPulls(pool=None, clock=Clock(), wall=Clock(), report=reports, cancel=lambda _: None)
    call = ending.begin(None, "")
    call.route, call.submitted_at = Route((), (), "loopback", "loopback"), call.called_at
    assert ending.complete(call).nbytes == 0
    await asyncio.sleep(0)
    assert reports.events == []


async def test_the_record_has_what_operators_look_for(world):
    ticket = world.ticket()
    call = world.consumer._consumer.pulls.begin(ticket, "")
    assert call.engine_id == "prefill-0"
    issued_at = ticket.grants[0].issued_at
    assert call.context(1e9) == {
        "called_at": pytest.approx(1e9 + call.called_at, rel=0, abs=1.1e-6),
        "issued_at": issued_at,
        "remote_endpoint": world.producer.endpoint,
        "num_remote_blocks": 2,
    }
    call.targets = [[1, 2, 5]]
    assert call.context(1e9)["num_local_blocks"] == 3


def lone_handle():
    """Return the handle of a pull that no worker carries out."""
    pulls = OpenPulls(pool=None, clock=Clock(), wall=Clock(), report=Reports(), cancel=lambda _: None)
    return pulls.begin(None, "").handle


async def hung(world):
    """Start a pull whose chunk does not end before the data plane is healed."""
    world.faults.hung.add(0)
    handle = world.start()
    await world.faults.strike()
    return handle


async def test_every_task_that_awaits_a_handle_gets_its_report(world):
    handle = await hung(world)
    tasks = [await awaiting(wait_for(handle)) for _ in range(3)]
    assert not handle.done()
    for ask in (handle.result, handle.exception):
        with pytest.raises(asyncio.InvalidStateError):
            ask()
    assert repr(handle) == f"<PullHandle {handle.id}: open>"
    quiet = await awaiting(handle.quiesced())
    quiet.cancel()  # the pull goes on
    world.faults.heal()
    async with asyncio.timeout(PATIENCE_S):
        reports = await asyncio.gather(*tasks)
        await handle.quiesced()
    assert reports == [await handle] * 3
    assert (handle.done(), handle.exception(), handle.result()) == (True, None, reports[0])
    assert repr(handle) == f"<PullHandle {handle.id}: completed>"
    handle.cancel()
    assert isinstance(await world.record(), TransferCompleted)


async def test_a_caller_that_gives_up_waiting_is_forgotten(world, monkeypatch):
    handle = await hung(world)
    patient = [await awaiting(handle.quiesced()) for _ in range(2)]
    assert await futures_left(handle.quiesced, monkeypatch) == 0
    assert not any(task.done() for task in patient)
    world.faults.heal()
    await patiently(asyncio.gather(*patient))


async def test_a_failure_does_not_say_that_nothing_writes():
    """Both wake whoever waits for the end of the writes: the failure first, the end of the last write later."""
    handle = lone_handle()
    quiet = [await awaiting(handle.quiesced()) for _ in range(2)]
    handle.fail(errors.TransferCancelled("as the test says"))
    late = await awaiting(handle.quiesced())  # by then, those before it have been woken
    assert not any(task.done() for task in quiet)
    handle.quiesce()
    await patiently(asyncio.gather(*quiet, late))


@pytest.mark.parametrize("before", [True, False])
async def test_a_settled_pull_is_told_once_whenever_it_was_asked_for(world, before):
    told = []

    class Callback:
        def __call__(self, handle):
            told.append(handle)

    callback = Callback()
    kept = weakref.ref(callback)
    handle = await hung(world)
    if before:
        handle.on_quiesced(callback)
    handle.cancel()
    await failure(handle)
    assert told == []
    world.faults.heal()
    await patiently(handle.quiesced())
    if not before:
        handle.on_quiesced(callback)
    assert told == [handle]
    del callback
    gc.collect()
    assert kept() is None, "a handle that is done keeps nothing of those who asked"


async def test_a_callback_that_fails_keeps_no_other_from_being_told():
    told, error = [], ZeroDivisionError()

    def fail(_):
        raise error

    handle = lone_handle()
    handle.on_quiesced(fail)
    handle.on_quiesced(told.append)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    handle.fail(errors.TransferCancelled("as the test says"))
    handle.quiesce()
    assert told == [error, handle]


async def test_a_block_of_groups_that_share_bytes_is_one_target():
    groups = tuple(Group((name,), SPECS[name].kind, SPECS[name].block_size) for name in "ab")
    async with opened(sources=[cache_of(groups=groups)], target=cache_of(groups=groups)) as world:

        def start(name, *targets):
            ticket = world.producer.offer(name, [[1], [2]], 4)
            return world.consumer.start_pull(ticket, targets)

        world.faults.hung.add(0)
        first = start("first", [3], [4])
        await world.faults.strike()
        for name, targets, group in (("b", ([4], [-1]), 0), ("c", ([5], [3]), 1)):
            error = await failure(start(name, *targets))
            assert isinstance(error, errors.BlockIdsInvalid)
            assert "still the target of another pull" in error.message
            assert error.group == group
        free = [
            start("d", [5], [-1]),
            start("e", [-1], [6]),
        ]  # absent blocks are nobody's, and a refused pull took none
        world.consumer.check()
        world.faults.heal()
        await patiently(asyncio.gather(first, *free))


@pytest.mark.parametrize(
    ("nbytes", "order"), [(KEPT_BYTES_MAX, ["woken"]), (KEPT_BYTES_MAX + 1, ["woken", "computed"])]
)
async def test_a_large_report_is_computed_after_the_caller_wakes(nbytes, order):
    happened = []
    report = object.__new__(TransferReport)
    report.nbytes, report.deferred = nbytes, (lambda *_: happened.append("computed"), ())
    handle = PullHandle(1, lambda _: None)

    async def call():
        await handle
        happened.append("woken")

    calling = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    handle.complete(report)
    await calling
    assert happened == order
    assert (report.deferred is None) == ("computed" in order)
