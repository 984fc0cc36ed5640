"""The connector in the order in which vLLM calls it on GPUs; ``second_runner`` says what is vLLM's own."""

import time

import pytest

from kvflow.integrations.vllm.engine import BRIEF_WAIT

from .pairs import model_folder
from .prompts import prompt_of

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported

PATIENCE_S = 120.0
OFFER = {"do_remote_decode": True, "do_remote_prefill": False}


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
    prefill.ask(name, prompt, OFFER)
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
    prefill.ask("p", prompt, OFFER)
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
    assert decode.rank._load_wait == BRIEF_WAIT
    prefill.device.work()
    step_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)


# With a host buffer.


@pytest.fixture
def copies(engines, monkeypatch):
    """Copies to host memory and back, which run on threads of their own."""
    from . import second_runner

    held = second_runner.Copies(monkeypatch)
    yield held
    held.let("save", "load")


def work_until(condition, *engines):
    """Step engines in turns until something is so; their devices do all that they are given."""

    def worked():
        for engine in engines:
            engine.device.work()
        return condition()

    step_until(worked, *engines)


def require_free(*engines):
    """All blocks of the host buffers are free."""
    for engine in engines:
        host = engine.core.scheduler.get_kv_connector()._scheduler._host
        assert sorted(host._free) == list(range(host.num_blocks))
        assert host.num_blocks


@pytest.mark.parametrize("host_blocks", [(16, 16), (16, 0), (0, 16)], ids=["both", "prefill", "decode"])
def test_blocks_pass_through_host_memory(engines, copies, host_blocks):
    prefill = engines("kv_producer", host_blocks=host_blocks[0])
    decode = engines("kv_consumer", host_blocks=host_blocks[1])
    for number in range(3):
        prompt = prompt_of(70 + number, f"host {number}")
        params = ticket(prefill, prompt, f"p{number}")
        prefill.device.work()
        decode.ask(f"d{number}", prompt, params, max_tokens=3)
        work_until(lambda: finished(decode, f"d{number}"), prefill, decode)  # noqa: B023
    assert copies.ended.count("save") == 3 * bool(host_blocks[0])
    assert copies.ended.count("load") == 3 * bool(host_blocks[1])
    settle(prefill, decode)
    require_free(*[engine for engine, count in zip((prefill, decode), host_blocks, strict=True) if count])


def test_a_lease_waits_for_the_copy_and_the_copy_for_the_device(engines, copies):
    copies.hold("save")
    prefill, decode = engines("kv_producer", host_blocks=16), engines("kv_consumer", host_blocks=16)
    prompt = prompt_of(70, "copied")
    params = ticket(prefill, prompt)
    assert not prefill.device.is_idle, "the draft model has not written yet"
    decode.ask("d", prompt, params, max_tokens=3)
    for _ in range(20):
        prefill.step()
        decode.step()
    assert copies.begun == []
    prefill.device.work()
    work_until(lambda: copies.begun == ["save"], prefill, decode)
    for _ in range(20):
        prefill.step()
        decode.step()
        assert leases(prefill) == 0
    assert not finished(decode, "d")
    copies.let("save")
    work_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)
    require_free(prefill, decode)


def test_a_copy_that_ends_between_steps_needs_no_further_step(engines, copies):
    prefill = engines("kv_producer", host_blocks=16)
    prompt = prompt_of(70, "no step")
    copies.hold("save")
    ticket(prefill, prompt)
    prefill.device.work()
    deadline = time.monotonic() + PATIENCE_S
    while copies.begun != ["save"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert leases(prefill) == 0
    copies.let("save")
    while leases(prefill) == 0:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_request_runs_when_its_blocks_are_on_the_device(engines, copies):
    prefill, decode = engines("kv_producer", host_blocks=16), engines("kv_consumer", host_blocks=16)
    prompt = prompt_of(70, "landed")
    params = ticket(prefill, prompt)
    prefill.device.work()
    copies.hold("load")
    decode.ask("d", prompt, params, max_tokens=3)
    work_until(lambda: "load" in copies.begun, prefill, decode)
    for _ in range(20):
        decode.step()
        assert decode.outputs["d"].tokens == []
    copies.let("load")
    work_until(lambda: finished(decode, "d"), prefill, decode)
    settle(prefill, decode)
    require_free(prefill, decode)


def test_an_aborted_load_keeps_its_blocks_until_its_copy_has_ended(engines, copies):
    prefill, decode = engines("kv_producer", host_blocks=16), engines("kv_consumer", num_blocks=8, host_blocks=16)
    prompts = [prompt_of(70, name) for name in ("aborted", "next")]
    params = [ticket(prefill, prompt, f"p{number}") for number, prompt in enumerate(prompts)]
    prefill.device.work()
    copies.hold("load")
    decode.ask("aborted", prompts[0], params[0])
    work_until(lambda: "load" in copies.begun, prefill, decode)
    decode.abort("aborted")
    decode.ask("next", prompts[1], params[1])
    for _ in range(20):
        prefill.step()
        decode.step()
    assert copies.begun.count("load") == 1
    assert decode.free_blocks < decode.blocks, "the copy still writes into the blocks"
    copies.let("load")
    work_until(lambda: finished(decode, "next"), prefill, decode)
    settle(prefill, decode)
    require_free(prefill, decode)


def test_an_aborted_load_whose_copy_has_not_begun_is_never_copied(engines, copies):
    prefill, decode = engines("kv_producer", host_blocks=32), engines("kv_consumer", num_blocks=13, host_blocks=16)
    prompts = [prompt_of(70, name) for name in ("first", "aborted", "next")]
    params = [ticket(prefill, prompt, f"p{number}") for number, prompt in enumerate(prompts)]
    prefill.device.work()
    copies.hold("load")
    decode.ask("first", prompts[0], params[0])
    work_until(lambda: "load" in copies.begun, prefill, decode)
    decode.ask("aborted", prompts[1], params[1])
    work_until(lambda: len(decode.rank._landing) == 2, prefill, decode)
    free = decode.free_blocks
    decode.abort("aborted")
    work_until(lambda: decode.free_blocks > free, prefill, decode)
    decode.ask("next", prompts[2], params[2])
    work_until(lambda: len(decode.rank._landing) == 2, prefill, decode)
    copies.let("load")
    work_until(lambda: finished(decode, "first") and finished(decode, "next"), prefill, decode)
    assert copies.ended.count("load") == 2
    settle(prefill, decode)
    require_free(prefill, decode)


def test_loads_wait_for_room_in_the_host_buffer(engines, copies):
    prefill, decode = engines("kv_producer", host_blocks=32), engines("kv_consumer", host_blocks=8)
    prompts = [prompt_of(70 + number, f"room {number}") for number in range(4)]
    params = [ticket(prefill, prompt, f"p{number}") for number, prompt in enumerate(prompts)]
    prefill.device.work()
    copies.hold("load")
    for number, prompt in enumerate(prompts):
        decode.ask(f"d{number}", prompt, params[number], max_tokens=2)
    work_until(lambda: "load" in copies.begun, prefill, decode)
    for _ in range(20):
        prefill.step()
        decode.step()
    assert list(decode.rank._landing) == ["d0"]
    copies.let("load")
    work_until(lambda: all(finished(decode, f"d{number}") for number in range(4)), prefill, decode)
    assert copies.ended.count("load") == 4
    settle(prefill, decode)
    require_free(prefill, decode)


def test_what_has_no_room_is_computed(engines, copies):
    prefill, decode = engines("kv_producer", host_blocks=6), engines("kv_consumer", host_blocks=3)
    prompt = prompt_of(70, "large")
    params = ticket(prefill, prompt)
    decode.ask("d", prompt, params, max_tokens=2)  # never fits into the host buffer of the decode engine
    prefill.ask("p2", prompt_of(70, "second"), OFFER)  # the first offer has nearly all of that of the prefill engine
    work_until(lambda: finished(prefill, "p2") and finished(decode, "d"), prefill, decode)
    assert not prefill.outputs["p2"].params["do_remote_prefill"]
    assert "load" not in copies.begun
    settle(prefill, decode)
    require_free(prefill, decode)


@pytest.mark.parametrize("name", ["save", "load"])
def test_a_copy_that_fails_fails_its_request_alone(engines, copies, name):
    prefill, decode = engines("kv_producer", host_blocks=16), engines("kv_consumer", host_blocks=16)
    prompt = prompt_of(70, "fails")
    params = ticket(prefill, prompt)
    copies.failing = RuntimeError("the device is lost")
    copies.hold("load" if name == "save" else "save")
    if name == "load":
        copies.failing = None
        copies.let("save")
        prefill.device.work()
        work_until(lambda: leases(prefill) == 1, prefill)
        copies.failing = RuntimeError("the device is lost")
    prefill.device.work()
    decode.ask("d", prompt, params, max_tokens=2)
    work_until(lambda: finished(decode, "d"), prefill, decode)
    assert len(decode.outputs["d"].tokens) == 2, "vLLM has computed it"
    copies.failing = None
    copies.let("save", "load")
    prompt = prompt_of(71, "after")
    params = ticket(prefill, prompt, "p2")
    prefill.device.work()
    decode.ask("d2", prompt, params, max_tokens=2)
    work_until(lambda: finished(decode, "d2"), prefill, decode)
    assert copies.ended[-2:] == ["save", "load"]
    settle(prefill, decode)
    require_free(prefill, decode)
