"""The connector in the order in which vLLM calls it on GPUs; ``second_runner`` says what is vLLM's own."""

import time

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import engine as connector_engine

from .engines import PREFILL_PARAMS
from .pairs import model_folder
from .prompts import prompt_of

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported

PATIENCE_S = 120.0


@pytest.fixture
def engines(monkeypatch):
    """Starts engines with a role; at the end all are closed."""
    from . import second_runner

    second_runner.prepare(monkeypatch)
    started = []

    def start(role, **limits):
        started.append(second_runner.Engine(model_folder("llama"), role, **limits))
        return started[-1]

    yield start
    for engine in started:
        engine.close()


def step_until(condition, *engines):
    """Step engines in turns until something is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        for engine in engines:
            if engine.has_work:
                engine.step()
        time.sleep(0.001)


def ticket(prefill, prompt, name="p"):
    """Prefill a prompt, and return what is sent to the decode engine."""
    prefill.ask(name, prompt, PREFILL_PARAMS)
    step_until(lambda: prefill.outputs[name].finished is not None, prefill)
    assert prefill.outputs[name].params["do_remote_prefill"]
    return prefill.outputs[name].params


def leases(engine):
    return engine.rank._worker.snapshot().leases


def settle(*engines):
    """Let engines go on until they have nothing to do; check their free blocks, and what was read."""

    def rest():
        for engine in engines:
            engine.device.work()
        return not any(engine.has_work for engine in engines)

    step_until(rest, *engines)
    for engine in engines:
        assert engine.free_blocks == engine.blocks
        assert engine.worker.wrong == []


def finished(engine, name):
    return engine.outputs[name].finished is not None


def test_a_lease_waits_for_what_the_draft_model_writes(engines):
    prefill, decode = engines("kv_producer"), engines("kv_consumer")
    prompt = prompt_of(70, "draft")
    params = ticket(prefill, prompt)
    assert not prefill.device.is_idle, "the draft model has not written yet"
    decode.ask("d", prompt, params, max_tokens=3)
    for _ in range(20):
        prefill.step()
        decode.step()
        assert leases(prefill) == 0
    assert not finished(decode, "d")
    prefill.device.work()
    step_until(lambda: finished(decode, "d"), prefill, decode)
    assert len(decode.outputs["d"].tokens) == 3
    settle(prefill, decode)


def test_a_lease_does_not_wait_for_the_step_in_flight(engines):
    prefill, decode = engines("kv_producer", max_num_batched_tokens=96), engines("kv_consumer")
    prompt = prompt_of(70, "first")
    prefill.ask("p", prompt, PREFILL_PARAMS)
    prefill.ask("other", prompt_of(200, "other"))
    prefill.step()
    prefill.step()
    assert finished(prefill, "p")
    assert len(prefill.core.batch_queue) == 1, "a step is in flight"
    assert leases(prefill) == 0
    prefill.device.work_once()  # what the draft model writes in the step of "p"
    step_until(lambda: leases(prefill) == 1)
    assert not prefill.device.is_idle
    decode.ask("d", prompt, prefill.outputs["p"].params)
    step_until(lambda: finished(decode, "d"), decode)
    settle(prefill, decode)


def test_blocks_of_a_load_that_is_aborted_serve_the_next_load(engines):
    prefill, decode = engines("kv_producer"), engines("kv_consumer", num_blocks=8)
    prompts = [prompt_of(70, name) for name in ("aborted", "next")]
    params = [ticket(prefill, prompt, f"p{number}") for number, prompt in enumerate(prompts)]
    decode.ask("aborted", prompts[0], params[0])
    step_until(lambda: decode.rank._pulls, decode)
    decode.ask("next", prompts[1], params[1])
    decode.abort("aborted")
    prefill.device.work()
    step_until(lambda: finished(decode, "next"), prefill, decode)
    settle(prefill, decode)


def test_a_load_waits_for_the_step_that_still_writes_into_its_blocks(engines):
    prefill, decode = engines("kv_producer"), engines("kv_consumer", num_blocks=8)
    prompt = prompt_of(70, "load")
    params = ticket(prefill, prompt)
    prefill.device.work()
    decode.ask("aborted", prompt_of(80, "aborted"), max_tokens=20)
    step_until(lambda: len(decode.outputs["aborted"].tokens) >= 2, decode)
    assert len(decode.core.batch_queue) == 1, "a step is in flight"
    assert not decode.device.is_idle
    decode.abort("aborted")
    decode.ask("d", prompt, params)
    for _ in range(20):
        decode.step()
    assert decode.free_blocks < decode.blocks, "the load has its blocks"
    assert not decode.device.is_idle, "the draft model has not written into them yet"
    assert decode.rank._pulls == {}
    decode.device.work()
    step_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)


def test_blocks_of_a_load_are_not_zeroed(engines, monkeypatch):
    from . import second_runner

    second_runner.zero_new_blocks(monkeypatch)
    prefill, decode = engines("kv_producer"), engines("kv_consumer")
    prompt = prompt_of(70, "zeroed")
    params = ticket(prefill, prompt)
    prefill.device.work()
    decode.ask("d", prompt, params, max_tokens=30)  # more than its last block holds, so that vLLM zeroes others
    step_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)


def test_a_load_starts_after_the_launch_of_its_step(engines, monkeypatch):
    prefill, decode = engines("kv_producer"), engines("kv_consumer")
    prompt = prompt_of(70, "launch")
    params = ticket(prefill, prompt)
    prefill.device.work()
    order, worker = decode.worker.order, decode.rank._worker
    pull_many = worker.pull_many
    monkeypatch.setattr(worker, "pull_many", lambda items: order.append("pull") or pull_many(items))
    decode.ask("beside", prompt_of(40, "beside"), max_tokens=20)
    step_until(lambda: decode.outputs["beside"].tokens, decode)
    decode.ask("d", prompt, params)
    order.clear()
    step_until(lambda: "pull" in order, decode)
    assert order[0] == "launch"
    step_until(lambda: finished(decode, "d") and finished(decode, "beside"), prefill, decode)
    settle(prefill, decode)


def test_an_idle_step_starts_its_load_and_waits_briefly(engines):
    prefill, decode = engines("kv_producer"), engines("kv_consumer")
    prompt = prompt_of(70, "idle")
    decode.ask("d", prompt, ticket(prefill, prompt))
    decode.step()
    assert list(decode.rank._pulls) == ["d"]
    assert decode.rank._load_wait == connector_engine.BRIEF_WAIT
    prefill.device.work()
    step_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("runner", ["first", "second"])
def test_the_chunks_of_a_preempted_answer_sample_nothing_before_its_end(engines, runner, drafts):
    from . import orders, second_runner

    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 2, "executor": orders.EXECUTORS[runner]}
    engine = engines("kv_both", num_blocks=12, drafts=drafts, **limits)
    names = ("one", "other")
    for name in names:  # of 8 blocks each when they end; 11 are there
        engine.ask(name, prompt_of(20, name), max_tokens=100)
    requests = [engine.scheduler.requests[name] for name in names]
    step_until(lambda: all(finished(engine, name) for name in names), engine)
    assert sum(request.num_preemptions for request in requests) > 0
    for name in names:
        assert engine.outputs[name].tokens == [second_runner.token_at(at) for at in range(20, 120)]
    settle(engine)


def test_both_sides_of_the_connector_ask_for_amx_before_the_first_step(engines, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    order, make = [], KVConnectorBase_V1.__init__

    def note(self, config, role, caches):
        order.append(role.name)
        make(self, config, role, caches)

    monkeypatch.setattr(KVConnectorBase_V1, "__init__", note)
    monkeypatch.setattr(connector_engine, "AMX", "processor")  # every CPU has this
    monkeypatch.setattr(connector_engine, "_request_feature", lambda number: order.append(number) or 0)
    engines("kv_consumer")
    assert order in (["SCHEDULER", 18, "WORKER", 18], ["WORKER", 18, "SCHEDULER", 18])


def test_a_buffer_on_another_device_is_refused_at_the_start(engines):
    with pytest.raises(ConfigInvalid, match="kv_buffer_device is cuda, but the cache is on cpu"):
        engines("kv_producer", transfer={"kv_buffer_device": "cuda"})
