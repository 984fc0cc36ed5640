"""A rank executes commands and reports ended transfers once."""

import itertools
import logging
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import pytest

from kvflow import Finished, TicketMint, TransferReport, Tuning, WorkerConfig, run_worker
from kvflow.errors import (
    CapacityExceeded,
    LayoutMismatch,
    PeerLost,
    StaleLease,
    TicketInvalid,
    TransferCancelled,
    WorkerClosed,
    WorkerSuspended,
)
from kvflow.events import PrefixFetched
from kvflow.integrations.vllm import logs
from kvflow.integrations.vllm import worker as worker_module
from kvflow.integrations.vllm.engine import BRIEF_WAIT, LOAD_WAIT, NO_WAIT, load_wait, writes_late
from kvflow.integrations.vllm.messages import (
    Cancel,
    End,
    Fail,
    GiveBack,
    Hold,
    KeepBlocks,
    Load,
    RenewLeases,
    Reset,
    add_counters,
    empty_counters,
    is_empty,
    summary,
)
from kvflow.integrations.vllm.runtime import RankRuntime
from kvflow.integrations.vllm.worker import RankWorker
from kvflow.observability.logs import REPEATS_S, Repeats
from tests.helpers.loops import looped
from tests.helpers.waiting import wait_until

from .vllm_like import PATIENCE_S, SECRET, Device, new_mint, new_ticket, small_cache

STEP = 4  # the last one that has ended
TICKET = new_ticket()
PULL = Load("r", TICKET, ((1, 2, 3),))
REPORT = TransferReport(
    request_id="request-1", nbytes=1 << 20, descriptors=12, reads=1, timings_s={"total": 0.5, "wire": 0.4}
)


class FakeWorker:
    """A worker that does what a test says."""

    def __init__(self, rank=0):
        self.futures = {}
        self.batches = []
        self.released = []
        self.kept = []
        self.rank_address = SimpleNamespace(rank=rank)
        self.ends = []
        self.admitted = []
        self.digests = []
        self.revoked = []
        self.void = []
        self.waited = []
        self.while_waiting = lambda: None
        self.refusal = None
        self.refused = []

    def record_refusal(self, code, detail, *, remedy, local_request_id):
        if self.refusal:
            raise self.refusal
        self.refused.append((code, detail, remedy, local_request_id))

    def admit(self, grant, digests=None):
        if self.refusal:
            raise self.refusal
        self.admitted.append(grant)
        self.digests.append(digests)

    def revoke(self, request_id, grant=None):
        self.revoked.append(request_id)
        self.void += [grant] if grant is not None else []
        return False

    def pull_many(self, items):
        items = list(items)
        self.batches.append([name for _, _, name in items])
        if self.refusal:
            raise self.refusal
        return [self.futures.setdefault(name, Future()) for _, _, name in items]

    def hold(self, ticket, *, local_request_id):
        if self.refusal:
            raise self.refusal
        self.kept.append(ticket)
        done = Future()
        done.set_exception(StaleLease("nobody holds it"))
        return done

    def release(self, ticket, *, local_request_id):
        if self.refusal:
            raise self.refusal
        self.released.append(ticket)
        done = Future()
        done.set_exception(StaleLease("gone"))
        return done

    def suspend(self):
        self.refusal = WorkerSuspended("suspended")

    def finished(self):
        ends, self.ends = self.ends, []
        return ends

    def wait_finished(self, timeout_s, *, at_least=1):
        self.waited.append(at_least)
        self.while_waiting()
        return len(self.ends) >= at_least

    def end(self, request_id="r", error=None):
        outcome, report = ("failed", None) if error else ("completed", REPORT)
        self.ends.append(
            Finished("request-1", "consumer", outcome, report=report, error=error, local_request_id=request_id)
        )


def told(*commands, refusal=None, rank=0):
    fake = FakeWorker(rank)
    fake.refusal = refusal
    rank = RankWorker(fake)
    rank.end_step(STEP)
    rank.execute(commands)
    return fake, rank


PREFIX = PrefixFetched("kept:1", "r", "tcp://decode-0:5600", 4096, 1024, 0.25)


def test_a_fetched_prefix_has_a_record():
    records = []
    fake = FakeWorker()
    rank = RankWorker(fake, log=records.append)
    rank.execute([Load("r", TICKET, ((1, 2, 3),), PREFIX), Load("s", TICKET, ((4, 5, 6),))])
    fake.end("s")
    fake.end()
    assert rank.collect().received == {"r", "s"}
    assert records == [msgspec.structs.replace(PREFIX, seconds=0.5, nbytes=1 << 20)]


def test_a_prefix_that_was_reused_before_it_was_read_is_counted_once(caplog):
    for number in (0, 1):
        fake, rank = told(Load("r", TICKET, ((1, 2, 3),), PREFIX), rank=number)
        fake.end(error=StaleLease("the engine has reused its blocks"))
        assert rank.collect().failed == {"r"}
        counters = rank.take_counters()
        assert counters["failed"] == {"stale_lease": 1}
        assert counters["prefixes"] == ({} if number else {"stale": 1})
    assert caplog.records == []  # nobody has done anything wrong
    fake, rank = told(Load("r", TICKET, ((1, 2, 3),), PREFIX))
    fake.end(error=PeerLost("gone"))
    assert rank.collect().failed == {"r"}
    assert rank.take_counters()["prefixes"] == {}
    assert "the load of request r" in caplog.text


def test_a_pull_is_reported_when_it_has_ended_and_once():
    fake, rank = told(PULL)
    assert not rank.collect().received
    fake.end()
    results = rank.collect()
    assert (results.received, results.failed) == ({"r"}, set())
    assert not rank.collect().received
    assert fake.released == []


def test_a_step_with_nothing_to_compute_waits_only_for_a_load():
    fake, rank = told()
    rank.collect(idle=True)
    assert fake.waited == []  # no load is open
    rank.execute([PULL])
    rank.collect()
    assert fake.waited == []  # the step has something to compute
    rank.execute([Fail("other", "ticket_invalid", "")])
    assert rank.collect(idle=True).failed == {"other"}
    assert fake.waited == []  # there is something to report
    rank.collect(idle=True)
    assert fake.waited == [1]


def test_a_step_that_waits_is_woken_once_when_all_loads_have_ended():
    fake, rank = told(PULL, Load("s", TICKET, ((4, 5, 6),)))
    fake.while_waiting = lambda: (fake.end("r"), fake.end("s"))
    assert rank.collect(idle=True).received == {"r", "s"}
    assert fake.waited == [2]


def test_a_step_that_waits_in_vain_tells_of_what_has_ended():
    fake, rank = told(PULL, Load("s", TICKET, ((4, 5, 6),)))
    ends = ["s"]
    fake.while_waiting = lambda: ends and fake.end(ends.pop())
    assert rank.collect(idle=True).received == {"s"}
    assert fake.waited == [2, 1]  # it goes on while loads end
    fake.end("r")
    assert rank.collect().received == {"r"}


def test_a_step_that_waits_gives_up_in_the_end(monkeypatch):
    pulls = [Load(str(number), TICKET, ((4, 5, 6),)) for number in range(100)]
    fake, rank = told(*pulls)
    now = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(now) * LOAD_WAIT.all_s / 8)
    monkeypatch.setattr("kvflow.integrations.vllm.worker.time", clock)
    names = map(str, range(100))
    fake.while_waiting = lambda: fake.end(next(names))
    assert 1 < len(rank.collect(idle=True).received) < 10


@looped(
    "parallel, asynchronous, waits",
    [(1, False, LOAD_WAIT), (1, None, LOAD_WAIT), (1, True, BRIEF_WAIT), (2, False, NO_WAIT), (2, True, NO_WAIT)],
)
def test_a_step_waits_less_where_others_wait_for_it(parallel, asynchronous, waits):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=parallel),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
    )
    assert load_wait(config) == waits
    assert BRIEF_WAIT.all_s <= 0.0005
    fake = FakeWorker()
    rank = RankWorker(fake, load_wait=waits)
    rank.execute([PULL])
    rank.collect(idle=True)
    assert fake.waited == ([] if waits is NO_WAIT else [1])


def test_a_step_waits_longer_for_prompts_that_are_still_computed(monkeypatch):
    monkeypatch.setattr("kvflow.integrations.vllm.worker.time", SimpleNamespace(monotonic=lambda: 0.0))
    ticket, _ = new_mint().offer_progressive("request-1", [[]], 40)
    fake, waits = FakeWorker(), []
    fake.wait_finished = lambda timeout_s, **_: waits.append(timeout_s > BRIEF_WAIT.each_s)
    rank = RankWorker(fake, load_wait=BRIEF_WAIT)
    rank.execute([Load("r", ticket, ((1, 2, 3),))])
    for _ in range(3):
        rank.collect(idle=True)
    assert waits == [False, True, True]  # the first one may follow a step whose output is on its way
    rank.collect()
    rank.collect(idle=True)
    assert waits[3:] == [False]
    rank.collect(idle=True)
    rank.execute([Load("s", TICKET, ((4, 5, 6),))])
    rank.collect(idle=True)
    assert waits[4:] == [True, False]  # the other one is read at once


def test_loads_wait_in_order_for_the_steps_before_them():
    fake, done = FakeWorker(), []
    rank = RankWorker(fake, lambda: lambda: bool(done))
    rank.end_step(6)
    rank.execute_written([PULL], step=6)
    rank.execute_written([Cancel("r"), Load("s", TICKET, ((4, 5, 6),))], step=6)
    rank.collect()
    assert fake.batches == []
    done.append(True)
    rank.execute_written([GiveBack("t", TICKET)], step=7)
    assert fake.batches == [["r"], ["s"]]
    assert fake.futures["r"].cancelled()
    assert fake.released == [], "step 7 has not ended"
    rank.end_step(7)
    rank.collect()
    assert fake.released == [TICKET]
    rank.stop()


def test_steps_that_have_ended_meanwhile_are_all_seen_at_once():
    fake = FakeWorker()
    rank = RankWorker(fake, lambda: lambda: True)
    for step in range(3):
        rank.end_step(step)
    rank.execute_written([GiveBack("t", TICKET)], step=2)
    assert fake.released == [TICKET]
    rank.stop()


@looped("consumes", [True, False])
@looped("batches", [1, 2, 3])
@looped("draft, hybrid", [(None, False), (object(), False), (None, True)])
def test_a_load_waits_for_steps_where_vllm_does_not(draft, hybrid, batches, consumes):
    config = SimpleNamespace(
        speculative_config=draft,
        model_config=SimpleNamespace(is_hybrid=hybrid),
        kv_transfer_config=SimpleNamespace(is_kv_consumer=consumes),
        max_concurrent_batches=batches,
    )
    vllm_waits = batches > 1 and consumes  # as its scheduler does
    assert writes_late(config) is (bool(draft) or hybrid or (batches > 1 and not vllm_waits))


def test_the_loads_of_a_step_are_one_batch():
    pulls = [Load(name, TICKET, ((4, 5, 6),)) for name in "abc"]
    fake, _ = told(*pulls)
    assert fake.batches == [["a", "b", "c"]]


def test_a_load_that_is_canceled_in_the_step_that_orders_it_is_canceled():
    fake, rank = told(PULL, Cancel("r"), Load("s", TICKET, ((4, 5, 6),)))
    assert fake.batches == [["r"], ["s"]]
    assert fake.futures["r"].cancelled()
    assert not fake.futures["s"].cancelled()
    assert not rank.collect().received


@looped(
    "error, released",
    [(LayoutMismatch("layers.0.k.head_size", 64, 128), [TICKET]), (TicketInvalid("a ticket of nobody"), [])],
)
def test_a_failed_pull_is_reported_as_failed_and_releases_its_ticket(error, released):
    fake, rank = told(PULL)
    fake.end(error=error)
    results = rank.collect()
    assert results.received == results.failed == {"r"}
    assert fake.released == released


def test_loads_that_fail_alike_are_told_once_and_in_one_line_each(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(logs, "_repeats", Repeats(lambda: now[0]))
    names = [f"\x1b[2J{number}\n" for number in range(200)]
    fake, rank = told(*[Load(name, TICKET, ((1, 2, 3),)) for name in names])
    with caplog.at_level(logging.INFO, "vllm.kvflow"):
        for name in names:
            fake.end(name, error=PeerLost("it is gone", peer="prefill-0/0/ab"))
        assert rank.collect().failed == set(names)
        now[0] += REPEATS_S
        rank.execute([PULL])
        fake.end(error=PeerLost("it is gone", peer="prefill-0/0/ab"))
        rank.collect()
    lines = [(each.levelname, each.getMessage()) for each in caplog.records if "failed" in each.getMessage()]
    assert [level for level, _ in lines] == ["WARNING", *["INFO"] * 199, "WARNING"]
    assert lines[-1][1].endswith("(199 more like this since the last message)")
    assert all(text.isprintable() for _, text in lines)
    assert r"\x1b[2J7\n" in lines[7][1]


@pytest.mark.parametrize(("rank", "kept"), [(0, [TICKET]), (1, [])])
def test_one_rank_keeps_a_ticket_for_all(rank, kept):
    fake, _ = told(RenewLeases("r", TICKET), rank=rank)
    assert fake.kept == kept


def test_a_ticket_that_cannot_be_kept_is_the_affair_of_its_pull():
    _, ours = told(RenewLeases("r", TICKET), refusal=WorkerClosed("closed"))
    assert not ours.collect().received


def test_the_log_says_which_ticket_is_not_held(caplog):
    with caplog.at_level("INFO", logger="vllm.kvflow"):
        told(RenewLeases("r", TICKET))
    assert "the ticket of request r is not renewed: nobody holds it" in caplog.text


def test_a_cancel_that_comes_late_does_nothing():
    fake, rank = told(PULL)
    fake.end()
    rank.collect()
    rank.execute([Cancel("r")])
    assert not rank.collect().received


@pytest.mark.parametrize("refusal", [WorkerClosed("closed"), MemoryError(), RuntimeError("a defect")], ids=repr)
def test_pulls_that_the_worker_refuses_have_failed(refusal):
    _, rank = told(PULL, Load("s", TICKET, ((4, 5, 6),)), refusal=refusal)
    results = rank.collect()
    assert results.received == results.failed == {"r", "s"}
    assert rank.take_counters()["failed"] == {getattr(refusal, "code", "defect_found"): 2}


def test_loads_not_reported_before_the_engine_sleeps_have_failed():
    fake, rank = told(PULL, Load("s", TICKET, ((4, 5, 6),)))
    fake.end("r")
    rank.suspend()
    fake.end("s", error=WorkerClosed("it ended with the worker"))
    results = rank.collect()
    assert results.received == results.failed == {"r", "s"}
    assert fake.released == []


def test_orders_that_come_while_the_engine_sleeps_end_at_once():
    grant = new_mint().offer("request-2", block_ids=[[1]], num_tokens=3)[1]
    _, rank = told()
    rank.suspend()
    rank.execute([PULL, Cancel("r"), Hold("request-2", grant, number=1), GiveBack("t", TICKET)])
    results = rank.collect()
    assert (results.received, results.failed, results.sent) == ({"r"}, {"r"}, {"request-2"})


def test_a_rank_that_has_slept_is_served_as_another_incarnation():
    config = WorkerConfig(engine_id="engine", cluster_secret=SECRET, transport="loopback")
    runtime = RankRuntime(config, small_cache())
    try:
        addresses = [runtime.rank.address]
        runtime.resume()  # it does not sleep
        assert runtime.rank.address == addresses[0]
        for _ in range(2):
            runtime.suspend()
            runtime.suspend()
            with pytest.raises(WorkerSuspended):
                _ = runtime.rank.address
            runtime.resume()
            addresses.append(runtime.rank.address)
        assert len({address.incarnation for address in addresses}) == 3
        runtime.suspend()
    finally:
        runtime.close()


@pytest.mark.parametrize("asleep", [True, False])
def test_what_a_rank_keeps_is_read_while_its_engine_shuts_down(asleep):
    configs = [
        WorkerConfig(engine_id=name, cluster_secret=SECRET, transport="loopback", tuning=Tuning(drain_s=PATIENCE_S))
        for name in ("engine", "reader")
    ]
    source, target = (small_cache() for _ in configs)
    source.views["a"][3].fill_(7.0)
    runtime = RankRuntime(configs[0], source, drain_s=PATIENCE_S)
    endpoint = runtime.rank.address.endpoint
    if asleep:
        runtime.suspend()
        runtime.close()  # at once
        return
    runtime._worker.keep("kept", [[3]], 4, [[b"content"]])
    closing = threading.Thread(target=runtime.close)
    closing.start()
    with run_worker(configs[1], target) as reader:
        ticket, count = reader.find(endpoint, [b"content"]).result(PATIENCE_S)
        reader.pull(ticket, [[5]]).result(PATIENCE_S)
    assert count == 1
    assert bool((target.views["a"][5] == 7.0).all())
    assert closing.is_alive()
    runtime._worker.revoke("kept")
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_a_refused_request_is_reported_as_failed():
    fake, rank = told(Fail("r", "ticket_invalid", "forged", "Ask again."))
    results = rank.collect()
    assert results.received == results.failed == {"r"}
    assert fake.refused == [("ticket_invalid", "forged", "Ask again.", "r")]
    assert rank.take_counters()["failed"] == {"ticket_invalid": 1}


@pytest.mark.parametrize(
    "command", [Fail("r", "ticket_invalid", "forged"), GiveBack("r", TICKET), RenewLeases("r", TICKET)]
)
def test_an_order_that_cannot_be_carried_out_does_not_end_the_engine(command):
    _, rank = told(command, refusal=MemoryError())
    assert rank.collect().failed == ({"r"} if isinstance(command, Fail) else set())
    rank.execute([Fail("s", "ticket_invalid", "forged")])
    assert rank.collect().failed == {"s"}


def test_the_end_of_a_withdrawn_lease_is_not_that_of_the_next():
    first, second = (new_mint().offer("r", block_ids=[[block]], num_tokens=3)[1] for block in (1, 2))
    fake, rank = told(Hold("r", first, number=1))
    rank.execute([End(("r",), number=2), Hold("r", second, number=3)])
    assert (fake.admitted, fake.revoked) == ([first, second], ["r"])
    fake.ends.append(Finished("r", "producer", "revoked"))
    assert rank.collect().sent == set(), "peers may read the second"
    fake.ends.append(Finished("r", "producer", "released"))
    assert rank.collect().sent == {"r"}


@pytest.mark.parametrize("refusal", [CapacityExceeded("leases", 8), MemoryError()], ids=repr)
def test_a_grant_that_is_refused_gives_its_blocks_back_at_once(refusal):
    grant = new_mint().offer("request-2", block_ids=[[1]], num_tokens=3)[1]
    _, rank = told(Hold("request-2", grant, number=1), refusal=refusal)
    assert rank.collect().sent == {"request-2"}


DIGESTS = ((b"1", b"2", b"3"),)
KEPT = KeepBlocks("kept:r", TICKET.grants[0], DIGESTS, step=STEP)


@pytest.fixture
def on_device():
    """Returns a call that makes a rank with a device that has been given a step; at the end each rank is stopped."""
    made = []

    def make(fake):
        device = Device()
        made.append(RankWorker(fake, device.mark))
        made[-1].end_step(STEP)
        return device, made[-1]

    yield make
    for rank in made:
        rank.stop()


def test_a_kept_lease_is_held_at_once_where_no_device_writes_late():
    fake, rank = told(KEPT)
    assert (fake.admitted, fake.digests) == ([KEPT.grant], [DIGESTS])
    rank.revoke(["kept:r"])
    assert fake.revoked == ["kept:r"]


def test_a_kept_lease_is_held_once_written_though_no_step_follows(on_device):
    fake = FakeWorker()
    held = threading.Event()
    fake.admit = lambda *_: held.set()
    device, rank = on_device(fake)
    rank.execute([KEPT])
    assert device.asked.acquire(timeout=PATIENCE_S)
    assert not held.is_set()
    device.done = 1
    assert held.wait(PATIENCE_S)


def test_a_kept_lease_that_ends_before_it_is_written_is_never_held(on_device):
    fake = FakeWorker()
    device, rank = on_device(fake)
    rank.execute([KEPT])
    rank.revoke(["kept:r"])
    device.done = 1
    rank.take()
    assert (fake.admitted, fake.revoked, fake.void) == ([], ["kept:r"], [KEPT.grant])


def test_a_thousand_requests_that_end_start_no_thread(on_device, monkeypatch):
    """One looks for all, however often."""
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda thread: (started.append(thread), start(thread)))
    held = threading.Semaphore(0)
    fake = FakeWorker()
    fake.admit = lambda *_: held.release()
    device, rank = on_device(fake)
    assert started == [rank._watch]
    for _ in range(20):
        rank.end_step(STEP)
        rank._written = 0
        rank.execute([msgspec.structs.replace(KEPT, request_id=f"kept:{at}") for at in range(50)])
        for _ in range(3):
            assert device.asked.acquire(timeout=PATIENCE_S)
        device.done = device.given
        for _ in range(50):
            assert held.acquire(timeout=PATIENCE_S)
    assert started == [rank._watch]


def test_nobody_looks_while_nothing_waits_for_a_device(on_device):
    fake = FakeWorker()
    device, rank = on_device(fake)
    device.done = 1
    rank.execute([KEPT])
    assert fake.admitted == [KEPT.grant]
    assert not rank._awaited.is_set()
    assert RankWorker(fake)._watch.ident is None, "the end of a step executes everything where no device writes late"


def test_a_look_waits_while_the_engine_has_the_rank(on_device):
    fake = FakeWorker()
    device, rank = on_device(fake)
    rank.execute([KEPT])
    assert device.asked.acquire(timeout=PATIENCE_S)
    with rank._lock:
        device.done = 1
        assert fake.admitted == []
        assert rank._watch.is_alive()
        rank.revoke(["kept:r"])
    rank.execute([msgspec.structs.replace(KEPT, request_id="kept:s")])
    assert fake.admitted == [KEPT.grant], "not that of r"


def test_a_look_that_lasts_keeps_no_event_loop_waiting():
    """What a look holds may have thousands of blocks. Who is asked meanwhile answers from the loop."""
    entered, left = threading.Event(), threading.Event()
    config = WorkerConfig(engine_id="engine", cluster_secret=SECRET, transport="loopback")
    with run_worker(config, small_cache()) as worker:
        device, admit = Device(), worker.admit
        worker.admit = lambda *given: (entered.set(), left.wait(PATIENCE_S), admit(*given))
        rank = RankWorker(worker, device.mark)
        rank.end_step(STEP)
        mint = TicketMint("engine", [worker.rank_address], cluster_secret=SECRET, block_sizes=(4,))
        rank.execute([Hold("a", mint.offer("a", block_ids=[[1]], num_tokens=4)[1], STEP, number=1)])
        device.done = 1
        assert entered.wait(PATIENCE_S)
        assert worker.snapshot().leases == 0, "the loop has answered"
        left.set()
        wait_until(lambda: worker.snapshot().leases)
        rank.stop()


def test_a_look_that_fails_is_told_and_the_next_command_looks_again(on_device, caplog):
    failures = threading.Semaphore(1)
    fake = FakeWorker()
    device, rank = on_device(fake)
    rank._marks.clear()

    def passed():
        if threading.current_thread() is rank._watch and failures.acquire(blocking=False):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return device.done

    rank._marks.append((STEP, passed))
    rank.execute([KEPT])
    wait_until(lambda: "what the device has written failed" in caplog.text)
    assert "unspecified launch failure" in caplog.text
    held = threading.Event()
    fake.admit = lambda *_: held.set()
    rank.take()
    device.done = 1
    assert held.wait(PATIENCE_S)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_kept_lease_that_a_reset_ends_is_never_held(on_device, when):
    fake = FakeWorker()
    device, rank = on_device(fake)
    if when == "meanwhile":
        rank.execute([KEPT])
    assert rank.reset(["kept:r"])
    if when == "before":
        rank.execute([KEPT])
    device.done = 1
    assert set(fake.revoked) == {"kept:r"}
    assert fake.void == [KEPT.grant], "another rank may hold it, and have told a reader"
    rank.execute([Reset(("kept:r",))])
    rank.execute([KEPT])
    assert fake.admitted == [KEPT.grant], "only after the reset"


def test_a_kept_lease_that_is_refused_costs_nothing_but_itself(caplog):
    caplog.set_level(logging.INFO)
    fake, rank = told(KEPT, refusal=CapacityExceeded("leases", 8))
    assert not any(rank.collect())
    assert (fake.revoked, fake.void) == (["kept:r"], [KEPT.grant]), "its readers need not wait"
    assert (rank.take_refused(), rank.take_refused()) == (["kept:r"], [])
    assert any("kept:r are not kept" in record.getMessage() for record in caplog.records)


def test_what_was_counted_is_added_up_and_told_in_a_line():
    fake, rank = told(PULL, Load("s", TICKET, ((4, 5, 6),)))
    fake.end("r")
    fake.end("s", error=StaleLease("gone"))
    assert rank.collect() == (set(), {"r", "s"}, {"s"})
    counters = rank.take_counters()
    assert (counters["total_s"], counters["wire_s"], counters["nbytes"], counters["descriptors"]) == (
        [0.5],
        [0.4],
        [1 << 20],
        [12],
    )
    both = empty_counters()
    for _ in range(2):
        add_counters(both, counters)
    assert both["failed"] == {"stale_lease": 2}
    line = summary(both)
    assert (line["Num successful transfers"], line["Num failed transfers"]) == (2, 2)
    assert line["Throughput (MB/s)"] == 2.0
    assert rank.take_counters() is None
    assert is_empty(empty_counters())
    assert summary(empty_counters())["Num successful transfers"] == 0


def test_a_load_that_a_reset_ends_does_not_count_as_failed():
    fake, rank = told(PULL)
    fake.while_waiting = lambda: fake.end(error=TransferCancelled("reset"))
    assert rank.reset(("r",))
    assert fake.futures["r"].cancelled()
    assert fake.released == [TICKET]
    rank.execute([Reset(("r",))])
    assert rank.collect() == (set(), {"r"}, set())
    fake.end()
    assert rank.collect() == (set(), set(), set())


def test_a_load_that_is_on_its_way_to_a_rank_at_a_reset_is_not_begun():
    fake, rank = told()
    assert rank.reset(("r",))
    rank.execute([PULL, Load("s", TICKET, ((4, 5, 6),)), Fail("t", "code", "why"), Reset(("r",))])
    assert fake.batches == [["s"]]
    assert fake.released == [TICKET]
    assert rank.collect() == (set(), {"r", "t"}, {"t"})
    rank.execute([PULL])
    assert fake.batches == [["s"], ["r"]], "the name is free again"


def test_a_failure_before_a_reset_is_not_reported_after_it():
    _, rank = told(PULL, refusal=WorkerClosed("closed"))
    rank.execute([Reset(("r",))])
    assert rank.collect() == (set(), {"r"}, set())


def test_a_reset_does_not_end_before_the_last_write(monkeypatch):
    monkeypatch.setattr(worker_module, "RESET_WAIT_S", 0.0)
    fake, rank = told(PULL)
    assert not rank.reset(("r",))
    fake.end(error=TransferCancelled("reset"))
    rank.collect()
    assert rank.reset(("r",))


ADMIT, RESET = Hold("a", new_mint().offer("a", block_ids=[[1]], num_tokens=3)[1], number=1), Reset(("a",))


@pytest.mark.parametrize("ending", ["reset before", "reset after", "revoked", "refused"])
def test_a_lease_that_will_not_be_held_is_void(ending):
    fake, rank = told()
    later = msgspec.structs.replace(ADMIT, step=STEP + 1)
    match ending:
        case "reset before":
            rank.reset(("a",))
            rank.take([ADMIT], with_step=True)
        case "reset after":
            rank.take([later])
            rank.reset(("a",))
            rank.end_step(STEP + 1)
            rank.take()
        case "revoked":
            rank.take([later])
            rank.take([End(("a",), number=2)])
        case _:
            fake.refusal = WorkerClosed("closed")
            rank.take([ADMIT])
    assert (fake.admitted, fake.void) == ([], [ADMIT.grant])


@pytest.mark.parametrize(
    ("apart", "device", "commands", "at_once"),
    [
        (False, False, [ADMIT, PULL], [PULL]),  # another thread holds the lease while the CPU computes
        (False, False, [ADMIT, PULL, RESET], [ADMIT, PULL, RESET]),  # a reset is behind what it ends
        (True, False, [ADMIT, PULL], [ADMIT, PULL]),
        (False, True, [PULL, ADMIT, KEPT, RESET], [ADMIT, KEPT]),
    ],
)
def test_only_what_cannot_wait_is_done_before_the_model_runs(apart, device, commands, at_once):
    config = WorkerConfig(engine_id="e", cluster_secret=SECRET, transport="loopback")
    runtime = RankRuntime(config, small_cache(), apart=apart, mark=(lambda: lambda: True) if device else None)
    try:
        before, after = runtime.divide(commands)
        assert list(before) == at_once
        assert list(after) == [each for each in commands if each not in at_once]
    finally:
        runtime.close()
