"""What people see of workers, tickets, plans, reports, handles and errors in a debugger: short, and without secrets."""

import pytest
from msgspec.structs import replace

import kvflow
from kvflow.errors import KvflowError, StaleLease, counted, quoted
from kvflow.leases.tickets import MAC_BYTES

SECRET = "a secret of thirty-two characters"
LONG = "request-" + "x" * 100_000 + "-1"
LENGTH_MAX = 500


def cache(layout="LBHNC"):
    specs = {
        f"layers.{index}": kvflow.FullAttention(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
        for index in range(40)
    }
    return kvflow.allocate(specs, num_blocks=8, layout=layout)


def config(engine_id):
    return kvflow.WorkerConfig(
        engine_id=engine_id, bind="tcp://127.0.0.1:0", cluster_secret=SECRET, transport="loopback"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("request-1", "'request-1'"),
        ("it's\n", '"it\'s\\n"'),
        ("a" * 81, f"'{'a' * 38}...{'a' * 38}'"),
        ("a" * 80, f"'{'a' * 80}'"),
    ],
)
def test_names_are_quoted_and_shortened(text, expected):
    assert quoted(text) == expected


def test_numbers_have_a_noun():
    assert [counted(number, "block") for number in (0, 1, 2000)] == ["0 blocks", "1 block", "2,000 blocks"]


def test_caches_manifests_and_plans():
    source, target = cache(), cache("BLHNC")
    plan = kvflow.plan_transfer(source.manifest(), target.manifest())
    assert repr(source) == "<KVCache: 40 layers in 1 group, 8 blocks of 81,920 bytes on cpu>"
    assert repr(source.manifest()) == "<Manifest: 40 layers in 1 group, 8 blocks>"
    assert repr(plan.groups[0].runs) == f"<RunTable: {counted(len(plan.groups[0].runs), 'run')}>"
    runs = counted(len(plan.groups[0].runs), "run")
    assert repr(plan) == f"<TransferPlan: {runs} in 1 pair of groups>"
    assert repr(plan.groups[0]) == f"<GroupPlan: source group 0 to target group 0, {runs}, read directly>"


async def test_workers_tickets_handles_reports_and_errors():
    async with (
        kvflow.open_worker(config("prefill-0"), cache()) as producer,
        kvflow.open_worker(config("decode-0"), cache()) as consumer,
    ):
        where = f"'prefill-0' rank 0 at {producer.endpoint}, incarnation {producer.incarnation[:8]}"
        assert repr(producer) == f"<Worker {where}>"
        ticket = producer.offer("request-1", [[0, 1, 2]], num_tokens=48)
        assert repr(ticket) == "<Ticket 'request-1' of 'prefill-0': 1 rank, 3 blocks in 1 group, 48 tokens>"
        grant = "1 rank, 3 blocks in 1 group, 48 tokens, slot 0, 30 s"
        assert repr(ticket.grants[0]) == f"<Grant 'request-1' of 'prefill-0': {grant}>"
        ranks = [producer.rank_address, replace(producer.rank_address, rank=1)]
        mint = kvflow.TicketMint("prefill-0", ranks, cluster_secret=SECRET)
        assert repr(mint) == "<TicketMint of 'prefill-0': 2 ranks>"
        pull = consumer.start_pull(ticket, [[5, 6, 7]])
        assert repr(pull) == f"<PullHandle {pull.id}: open>"
        report = await pull
        assert repr(pull) == f"<PullHandle {pull.id}: completed>"
        assert repr(report).startswith("<TransferReport 'request-1': 245,760 bytes in ")
        reads = f"{counted(report.descriptors, 'descriptor')}, {counted(report.reads, 'read')}"
        assert repr(report).endswith(f" ms over loopback (loopback), {reads}>")
        assert await producer.wait_offer("request-1") == "released"
        late = consumer.start_pull(ticket, [[5, 6, 7]])
        with pytest.raises(StaleLease) as caught:
            await late
        await late.quiesced()
        assert repr(late) == f"<PullHandle {late.id}: stale_lease>"
        assert repr(caught.value).startswith("StaleLease(\"request 'request-1': ")


async def test_long_names_are_shortened_and_secrets_left_out():
    async with (
        kvflow.open_worker(config("p" * 200), cache()) as producer,
        kvflow.open_worker(config("d" * 200), cache()) as consumer,
    ):
        ticket = producer.offer("r" * 200, [[0, 1, 2]], num_tokens=48)
        report = await consumer.pull(ticket, [[5, 6, 7]])
        mint = kvflow.TicketMint("p" * 200, [producer.rank_address], cluster_secret=SECRET)
        key = kvflow.TicketKey.of(config("prefill-0"))
        shown = [producer, consumer, ticket, ticket.grants[0], report, mint, key, producer.rank_address]
        for value in [*shown, KvflowError(LONG), config("prefill-0")]:
            assert len(repr(value)) <= LENGTH_MAX, type(value)
            assert SECRET not in repr(value)
            assert ticket.signed[0][:MAC_BYTES].hex() not in repr(value)
            assert repr(ticket.signed[0][:MAC_BYTES])[2:-1] not in repr(value)


def test_threaded_workers():
    with kvflow.run_worker(config("prefill-0"), cache()) as worker:
        assert repr(worker) == f"<ThreadedWorker 'prefill-0' rank 0 at {worker.endpoint}: open>"
        worker.suspend()
        assert repr(worker).endswith(": suspended>")
    assert repr(worker).endswith(": closed>")
