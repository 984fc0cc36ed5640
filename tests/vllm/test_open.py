"""A prefill engine that offers prompts when they arrive: what has settled is not written again while it is on offer."""

from dataclasses import replace

import pytest

from tests.helpers.waiting import wait_until

from .engines import PREFILL_PARAMS, Options
from .pairs import FULL, RENEWED_S, await_all
from .prompts import prompt_of

CHUNK = 128  # tokens of a step
PREFILL = Options(
    "llama",
    block_size=32,
    extra={"lease_s": RENEWED_S, "dispatch": "concurrent"},
    prefix_caching=True,
    llm={"max_num_batched_tokens": CHUNK},
    served="tests.vllm.open_engine",
)
ENGINES = {
    "llama": PREFILL,
    "llama-2-ranks": replace(PREFILL, ranks=2),
    "gptoss": replace(PREFILL, model="gptoss"),
    "granite": replace(PREFILL, model="granite", prefix_caching=False, block_size=0),
}


@pytest.fixture(scope="module", params=list(ENGINES) if FULL else ["llama-2-ranks"])  # others: test_meeting.py
def engine(request, pairs):
    with pairs.engine(ENGINES[request.param], "kv_producer", "opener") as engine:
        yield engine.wait_ready()


def opened(engine):
    """Return what each rank says of its open leases."""
    return engine.obey("opened")["ranks"]


def ends_of(engine, request_id):
    """Return how the leases of a request were left, on every rank alike: how, and how often something had settled."""

    def found():
        ends = [
            [(how, count) for name, how, count, _ in rank["ended"] if name.startswith(f"{request_id}-")]
            for rank in opened(engine)
        ]
        return ends if all(ends) else []

    first, *others = await_all(found)  # a rank may learn of it with a later step
    assert all(each == first for each in others)
    return first


@pytest.fixture(autouse=True)
def intact(engine):
    """After every test: nothing that had settled was written again, and every lease and block is free in the end."""
    yield
    engine.obey("preempt", times=0)
    engine.obey("halt", tokens=0)
    for rank in opened(engine):
        assert [each for each in rank["ended"] if not each[3]] == []
    assert engine.reset_prefix_cache(external=True)  # nobody reads what is on offer
    engine.settle()
    wait_until(lambda: all(rank["held"] == [] for rank in opened(engine)))


def test_each_chunk_of_a_prompt_settles(engine):
    engine.obey("gather", number=1)
    answer = engine.generate(prompt_of(700, "chunks"), PREFILL_PARAMS, max_tokens=1)
    assert answer["kv_transfer_params"]["transfer_mode"] == "push"
    [(how, count)] = ends_of(engine, answer["id"])
    assert how == "sealed"
    assert count == 6 or not engine.options.block_size
    assert all(kind == "open" for rank in opened(engine) for _, kind in rank["held"])


def test_a_prefix_that_is_being_written_settles_later(engine):
    """Both prompts are computed in one step, and vLLM counts what they share as computed at once."""
    shared, own = prompt_of(64, "shared"), [prompt_of(24, name) for name in ("first", "second")]
    engine.obey("gather", number=2)
    requests = [engine.submit(shared + each, PREFILL_PARAMS, max_tokens=1) for each in own]
    answers = [request.wait() for request in requests]
    for answer in answers:
        assert [how for how, _ in ends_of(engine, answer["id"])] == ["sealed"]


@pytest.mark.parametrize("times", [1, 12])
def test_a_prompt_that_is_preempted_is_offered_again(engine, times):
    engine.obey("preempt", times=times)
    engine.obey("gather", number=3)
    prompts = [prompt_of(300, f"preempted {times} {number}") for number in range(3)]
    requests = [engine.submit(each, PREFILL_PARAMS, max_tokens=1) for each in prompts]
    answers = [request.wait() for request in requests]
    ends = [ends_of(engine, answer["id"]) for answer in answers]
    assert any(how == "withdrawn" for each in ends for how, _ in each)
    assert all(answer["kv_transfer_params"]["do_remote_prefill"] for answer in answers)


def test_a_prompt_that_is_aborted_ends_its_lease_though_no_step_follows(engine):
    engine.obey("halt", tokens=2 * CHUNK)
    started = engine.submit(prompt_of(1000, "aborted"), PREFILL_PARAMS, max_tokens=1)
    wait_until(lambda: all(rank["held"] for rank in opened(engine)))  # before that, no lease has to end
    started.abort()
    assert started.wait()["finish_reason"] == "abort"
    assert [how for how, _ in ends_of(engine, started.request_id)] == ["withdrawn"]


def test_prompts_that_are_computed_at_once_settle_apart(engine):
    lengths = [3, 31, 40, 128, 150, 257, 333, 512]
    prompts = [prompt_of(length, "at once") for length in lengths]
    engine.obey("gather", number=len(prompts))
    requests = [engine.submit(each, PREFILL_PARAMS, max_tokens=1) for each in prompts]
    for request in requests:
        assert [how for how, _ in ends_of(engine, request.wait()["id"])] == ["sealed"]
