"""Harm done to real engines: requests end in time, with an error or with the right tokens, and all blocks come back.

What happens happens to two decode engines at once, of which one fails what it could not read, and the other computes
it. After each test every engine lives, has all its blocks, and serves.
"""

import asyncio
import json
import subprocess
import threading
from contextlib import ExitStack, contextmanager

import pytest

from tests.fuzz.listener import Attacked, be_raw
from tests.stopping import stopped

from .asking import LENGTH, LONG, PATIENCE_S, Asked, serves
from .engines import PREFILL_PARAMS, PYTHON, ROOT, EngineFailed
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .tiny_models import CONTEXT
from .victims import BLOCK_SIZE, LEASE_S, SETTINGS, Cluster

GONE = {"peer_lost", "peer_unavailable", "stale_lease"}
"""Why a read may fail whose prefill engine has ended, or was started again."""
SILENT = {"peer_lost", "peer_unavailable", "deadline_exceeded"}
"""Why a read may fail whose prefill engine does not answer."""
MUTATED = 20_000 if FULL else 3_000
"""Messages of a flood that are mutated; there are many more that are not."""
RAW = 300
"""Connections of a flood by strangers."""
ANSWERED = 3
"""Requests that are answered during a flood, at least."""

full = pytest.mark.skipif(not FULL, reason="make test-vllm-full has it")


@pytest.fixture(scope="module", params=["llama", "gptoss"] if FULL else ["llama"])
def engines(request, pairs):
    """Two engines that prefill and two that decode, of one model, for all tests."""
    pairs.stop()
    with Cluster(model_folder(request.param), request.param, pairs.nursery) as cluster:
        for prefill in (cluster.first, cluster.second):
            serves(cluster, prefill)
        yield cluster


@pytest.fixture
def cluster(engines):
    """The engines; after the test they are as they were before."""
    yield engines
    for prefill in (engines.first, engines.second):
        serves(engines, prefill)
    engines.settle()


@pytest.mark.proves("restart of prefill", engine="real")
@pytest.mark.parametrize("at", ["data", "fence"])
def test_a_prefill_engine_is_killed_and_started_again(cluster, at):
    # Those whose read is over go on, those in the middle of one and those before it do not.
    after = Asked(cluster, cluster.first, "after", max_tokens=LONG).submit().wait_begun()
    before = Asked(cluster, cluster.first, "before")
    during = Asked(cluster, cluster.first, "during")
    with during.held(at):
        cluster.first.kill()
        during.count()
    before.submit()
    elsewhere = Asked(cluster, cluster.second, "elsewhere").submit()
    during.expect_policy(GONE, SETTINGS["fence_s"])
    before.expect_policy(GONE, SETTINGS["connect_s"])
    elsewhere.expect_right()
    after.expect_right()
    cluster.restart("first", engine_id="" if at == "data" else f"{cluster.prefix}-another")
    again = Asked(cluster, cluster.first, "before", tickets=before.tickets).submit()
    again.expect_policy(GONE, SETTINGS["handshake_s"])


def test_a_connected_prefill_engine_that_stops_affects_only_its_readers(cluster):
    # In shared memory most reads do not need it: neither for the data, nor to see that the lease is held. But UCX waits
    # for it now and then, and then the deadlines decide.
    asked = Asked(cluster, cluster.first, "frozen")
    elsewhere = Asked(cluster, cluster.second, "elsewhere")
    cluster.first.generate(asked.prompt, max_tokens=1)  # a lease is admitted in the step after its ticket's
    with stopped(cluster.first.pid):
        asked.submit()
        elsewhere.submit().expect_right()
        asked.expect_policy({"", *SILENT}, SETTINGS["wire_s"])


@full
def test_a_prefill_engine_stopped_before_connecting_fails_its_readers(cluster):
    old = Asked(cluster, cluster.first, "old")
    cluster.first.stop()  # in order: nobody dials it again until there is a ticket
    cluster.restart("first")
    old.submit().expect_policy(GONE, SETTINGS["handshake_s"])
    asked = Asked(cluster, cluster.first, "frozen")
    elsewhere = Asked(cluster, cluster.second, "elsewhere")
    with stopped(cluster.first.pid):
        asked.submit()
        elsewhere.submit().expect_right()
        asked.expect_policy(SILENT, SETTINGS["handshake_s"])


@full
def test_a_prefill_engine_that_hangs_during_a_tcp_read_costs_no_blocks(pairs):
    # Over TCP the reader needs it, and its blocks are free again only when the agent that reads is destroyed.
    pairs.stop()
    settings = SETTINGS | {"transport": "tcp", "wire_s": 4.0, "fence_s": 4.0, "quarantine_s_max": 2.0}
    bound_s = settings["wire_s"] + settings["quarantine_s_max"]
    with Cluster(model_folder("llama"), "llama", pairs.nursery, settings=settings) as cluster:
        for prefill in (cluster.first, cluster.second):
            serves(cluster, prefill)
        asked = Asked(cluster, cluster.first, "hanging")
        with ExitStack() as stack:
            with asked.held("data"):
                stack.enter_context(stopped(cluster.first.pid))
                asked.count()
            elsewhere = Asked(cluster, cluster.second, "elsewhere").submit()
            asked.expect_policy(SILENT, bound_s)
            elsewhere.expect_right()
            cluster.first.kill()  # awake again it may be aborted by UCX: see the known limits
        cluster.restart("first")
        serves(cluster, cluster.first)
        cluster.settle()


def test_a_decode_engine_is_killed_with_requests_in_flight(cluster):
    decoding = Asked(cluster, cluster.first, "decoding", max_tokens=LONG).submit().wait_begun()
    prompt = prompt_of(LENGTH, "reading")
    unread = cluster.first.ticket(prompt)
    with cluster.failing.held("data") as read:
        reading = cluster.failing.submit(prompt, unread)
        read.reached()
        cluster.failing.kill()
    killed, alive = decoding.requests
    for request in (killed, reading):
        with pytest.raises(EngineFailed):
            request.wait()
    assert alive.wait()["tokens"] == decoding.alone
    other = cluster.recomputing.submit(prompt, cluster.first.ticket(prompt))
    assert other.wait()["tokens"] == cluster.second.generate(prompt)["tokens"]
    assert not cluster.recomputing.reason(other.request_id)
    cluster.first.wait_state(lambda state: state["held"] == 0, LEASE_S + PATIENCE_S)
    assert cluster.first.lease_end(unread) == "expired"
    cluster.restart("failing")


@pytest.mark.proves("leases, renewed", engine="real")
@pytest.mark.parametrize("late", ["failing", "recomputing"] if FULL else ["recomputing"])
def test_an_expired_lease_frees_its_blocks_unless_a_read_renews_it(cluster, late):
    # Both reads take longer than a lease. What one engine says of that gets through, what the other says does not.
    late, other = sorted(cluster.decodes, key=lambda decode: decode is not cluster.engines[late])
    stale = Asked(cluster, cluster.second, "stale", decodes=[late])
    renewed = Asked(cluster, cluster.first, "renewed", decodes=[other])
    with renewed.held("data"), cluster.wire.stalled():
        with stale.held("data"):
            unused = Asked(
                cluster, cluster.first, "unused", tickets=[cluster.first.ticket(prompt_of(LENGTH, "unused"))] * 2
            )
            cluster.second.wait_state(lambda state: state["held"] == 0, LEASE_S + PATIENCE_S)
            cluster.first.wait_state(lambda state: state["held"] == 1, LEASE_S + PATIENCE_S)
            cluster.second.overwrite()
        stale.count().expect_policy({"stale_lease"}, 1.0)
        assert [cluster.second.lease_end(params) for params in stale.tickets] == ["expired"]
        assert [cluster.first.lease_end(params) for params in unused.tickets] == ["expired"] * 2
    renewed.expect_right()
    unused.submit().expect_policy({"stale_lease"}, SETTINGS["handshake_s"])


@pytest.mark.proves("leases, renewed", engine="real")
def test_a_request_that_waits_for_room_keeps_its_lease(cluster):
    with ExitStack() as stack:
        for decode in cluster.decodes:
            stack.enter_context(decode.paused())
            for number in range(3):  # the last of them waits, too, and before ours
                filler = decode.submit(prompt_of(CONTEXT - 2 * BLOCK_SIZE, f"filler {number}"), max_tokens=BLOCK_SIZE)
                stack.callback(filler.abort)
            decode.step(3)
        asked = Asked(cluster, cluster.first, "waiting").submit()
        for decode in cluster.decodes:
            decode.step(2)  # what comes now, kvflow does by itself
            assert decode.stages()[-1] == "WAITING"
        unused = cluster.first.ticket(prompt_of(LENGTH, "unused"))
        cluster.first.wait_state(lambda state: state["held"] == 2, LEASE_S + PATIENCE_S)
        assert cluster.first.lease_end(unused) == "expired"
    asked.expect_right()


def test_engines_that_are_flooded_with_garbage_answer_right(cluster, tmp_path):
    ends = {"second": cluster.endpoint("second"), "failing": cluster.endpoint("failing")}
    with ExitStack() as stack:
        reports = [stack.enter_context(flooded(end, cluster.secret, tmp_path / name)) for name, end in ends.items()]
        answered = 0
        while answered < ANSWERED or not all(report() >= MUTATED for report in reports):
            Asked(cluster, cluster.second, f"flooded {answered}").submit().expect_right()
            answered += 1


@contextmanager
def flooded(end, secret, path):
    """Have a member of the cluster and strangers send garbage; yield what tells how much of the former was answered."""
    command = [PYTHON, "-m", "tests.fuzz.attacker", end, secret, "faults"]
    strangers = threading.Thread(target=asyncio.run, args=(be_raw(end, "faults", RAW, Attacked()),))
    strangers.start()
    with path.open("wb") as said, subprocess.Popen(command, cwd=ROOT, stdout=said) as member:

        def mutated():
            assert member.poll() is None
            return max(
                (json.loads(line)["said"] for line in path.read_text().splitlines(keepends=True)[:-1]), default=0
            )

        try:
            yield mutated
        finally:
            member.kill()
    strangers.join()


@pytest.mark.proves("aborted requests", engine="real")
@pytest.mark.parametrize("stage", ["waiting", "loading"])
def test_a_decode_request_is_aborted(cluster, stage):
    prompt, decode = prompt_of(LENGTH, "aborted"), cluster.failing
    params = cluster.second.ticket(prompt)
    if stage == "waiting":
        with decode.paused():
            request = decode.submit(prompt, params)
            assert decode.stages() == ["WAITING"]
            request.abort()
    else:
        with decode.held("data") as read:
            request = decode.submit(prompt, params)
            read.reached()
            assert decode.stages() == ["WAITING_FOR_REMOTE_KVS"]
            request.abort()
            assert request.wait()["finish_reason"] == "abort"
            assert decode.state()["held"] == 1, "its blocks may still be written to"
    assert request.wait()["finish_reason"] == "abort"
    cluster.second.wait_state(lambda state: state["held"] == 0)
    assert cluster.second.lease_end(params) == "released"


def test_a_prefill_request_is_aborted_while_it_waits_and_while_it_runs(cluster):
    with cluster.first.paused():
        waiting, running = (
            cluster.first.submit(prompt_of(LENGTH, name), PREFILL_PARAMS, max_tokens=1, chunk=100)
            for name in ("waiting", "running")
        )
        assert cluster.first.stages() == ["WAITING", "WAITING"]
        waiting.abort()
        cluster.first.step(2)
        assert cluster.first.stages() == ["RUNNING"]
        running.abort()
    assert [request.wait()["finish_reason"] for request in (waiting, running)] == ["abort", "abort"]
    cluster.first.wait_state(lambda state: state["held"] == 0)


def test_a_prefill_request_aborted_after_its_offer_is_still_read(cluster):
    # Its client has hung up when the answer was on the way: the router may have it all the same.
    asked = Asked(cluster, cluster.first, "offered")
    for params in asked.tickets:
        cluster.first.disconnect(params)
    asked.submit().expect_right()


def test_requests_that_do_not_fit_wait_and_are_preempted(cluster):
    prompts = [prompt_of(200, f"crowd {number}") for number in range(6)]
    alone = [cluster.second.submit(prompt, max_tokens=250) for prompt in prompts]
    alone = [request.wait()["tokens"] for request in alone]
    tickets = [cluster.second.ticket(prompt) for prompt in prompts]
    before = cluster.failing.preemptions()
    requests = [
        cluster.failing.submit(prompt, params, max_tokens=250) for prompt, params in zip(prompts, tickets, strict=True)
    ]
    assert [request.wait()["tokens"] for request in requests] == alone
    assert not any(cluster.failing.reason(request.request_id) for request in requests)
    assert cluster.failing.preemptions() > before


def test_a_request_rejected_before_its_admission_releases_its_ticket(cluster):
    params = cluster.second.ticket(prompt_of(LENGTH, "rejected"))
    cluster.failing.reject(params)
    cluster.second.wait_state(lambda state: state["held"] == 0)
    assert cluster.second.lease_end(params) == "released"
    assert cluster.failing.stages() == []


@pytest.mark.parametrize("ended", ["loading", "aborted", "waiting"])
def test_a_reset_drops_a_load_in_flight_and_its_prompt_is_computed(cluster, ended):
    """Whatever ``kv_load_failure_policy`` says."""
    for decode in cluster.decodes:
        prompt = prompt_of(LENGTH, f"reset during {ended}")
        alone = cluster.second.generate(prompt)["tokens"]
        given = cluster.first.ticket(prompt)
        with decode.held("data") as read:
            request = decode.submit(prompt, given)
            read.reached()
            with decode.paused():
                if ended == "aborted":
                    request.abort()
                if ended == "waiting":
                    read.let_go()
                reset = decode._command("reset", f"reset-{ended}", running=True, external=True)
                read.let_go()
                assert decode._await(reset, 60.0)["reset"]
                assert decode.state()["free_blocks"] == decode.free_blocks
            answer = request.wait()
        assert answer["tokens"] == ([] if ended == "aborted" else alone)
        assert decode.generate(prompt, cluster.first.ticket(prompt))["tokens"] == alone
