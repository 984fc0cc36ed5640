"""An engine that keeps what its requests leave: its own work is the same, and no lease outlives the bytes."""

import itertools
import threading
from dataclasses import replace

import pytest

from .engines import PREFILL_PARAMS, Options
from .pairs import FULL, LEASE_S
from .prompts import prompt_of

BLOCKS = 40
TOKENS = 8
KEEPS = {"lease_s": LEASE_S, "keep": True}
ANSWERS = {"prefix_cache_retention_interval": 32}  # which keeps the windows of answers
KEEPER = Options(
    "llama",
    block_size=32,
    prefix_caching=True,
    extra=KEEPS,
    llm={"num_gpu_blocks_override": BLOCKS},
    served="tests.vllm.keeping_engine",
)
ENGINES = {
    "llama": KEEPER,
    "llama-2-ranks": replace(KEEPER, ranks=2),
    "gptoss": replace(KEEPER, model="gptoss", llm={"num_gpu_blocks_override": 2 * BLOCKS} | ANSWERS),
}


def pool_of(engine):
    """Return the order of the free blocks, and what each rank says of what it keeps."""
    answer = engine.obey("pool")
    return answer["order"], answer["ranks"]


@pytest.fixture(scope="module", params=list(ENGINES) if FULL else ["llama-2-ranks", "gptoss"])
def keeper(request, pairs):
    """An engine of the role that decodes, which keeps."""
    with pairs.engine(ENGINES[request.param], "kv_consumer", "keeper") as keeper:
        yield keeper.wait_ready()


def kept_by_all(keeper):
    """Return what every rank keeps."""
    first, *others = [rank["kept"] for rank in pool_of(keeper)[1]]
    assert all(each == first for each in others)
    return first


def name_of(keeper, answer):
    """Return the name of the lease of a request, which vLLM has given some more digits."""
    found = [name for name in kept_by_all(keeper) if name.startswith(f"kept:{answer['id']}")]
    assert len(found) <= 1
    return found


def test_leases_end_on_every_rank_before_a_step_writes_into_a_block(keeper):
    names = []
    for number in range(24):
        answer = keeper.generate(prompt_of(60 + 32 * (number % 5), f"kept {number}"), max_tokens=TOKENS)
        names += name_of(keeper, answer)
    assert len(names) == 24
    ranks = pool_of(keeper)[1]
    ended = [[name for name, _, _ in rank["ended"] if name in names] for rank in ranks]
    assert all(each == ended[0] for each in ended)
    assert len(ended[0]) > 10
    assert {*ended[0], *ranks[0]["kept"]}.issuperset(names)
    for name, was_intact, is_intact in itertools.chain(*[rank["ended"] for rank in ranks]):
        assert (was_intact, is_intact) == (True, False), name


def test_an_aborted_request_is_kept(keeper):
    begun = threading.Event()
    request = keeper.submit(prompt_of(90, "aborted"), max_tokens=500, progress=lambda _: begun.set())
    assert begun.wait(120)
    request.abort()
    assert request.wait()["finish_reason"] == "abort"
    assert name_of(keeper, {"id": request.request_id})


def test_of_two_that_end_together_the_longer_is_kept_alone(keeper):
    if keeper.options.model != "llama":
        pytest.skip("its windows have moved on")
    for number in range(8):
        busy = keeper.submit(prompt_of(300, f"busy {number}"), max_tokens=1)  # meanwhile both come, most times
        prompt = prompt_of(140, f"together {number}")
        short, longer = keeper.submit(prompt[:70], max_tokens=1), keeper.submit(prompt, max_tokens=1)
        for request in (busy, short, longer):
            request.wait()
        assert not name_of(keeper, {"id": short.request_id})
        assert name_of(keeper, {"id": longer.request_id})


def test_a_reset_of_the_prefix_cache_ends_all(keeper):
    for number in range(3):
        keeper.generate(prompt_of(90, f"reset {number}"), max_tokens=TOKENS)
    assert kept_by_all(keeper)
    pool_of(keeper)
    assert keeper.reset_prefix_cache()
    ranks = keeper.obey("kept")["ranks"]
    assert [rank["kept"] for rank in ranks] == [[]] * len(ranks), "though no step has followed"
    keeper.generate(prompt_of(90, "after"), max_tokens=TOKENS)
    assert len(kept_by_all(keeper)) == 1


def test_what_one_rank_refuses_is_kept_by_none(keeper):
    if len(pool_of(keeper)[1]) == 1:
        pytest.skip("this engine has one rank")
    keeper.obey("refuse")
    refused = keeper.generate(prompt_of(90, "refused by one"), max_tokens=TOKENS)
    after = keeper.generate(prompt_of(90, "kept by all"), max_tokens=TOKENS)  # whose steps tell the other rank
    assert not name_of(keeper, refused)
    assert name_of(keeper, after)


@pytest.mark.parametrize("name", list(ENGINES) if FULL else ["gptoss"])
def test_neither_free_blocks_nor_the_order_of_eviction_change(pairs, name):
    extra = {"lease_s": 0.5}
    with (
        pairs.engine(replace(ENGINES[name], extra=extra | {"keep": True}), "kv_producer", "keeps") as keeps,
        pairs.engine(replace(ENGINES[name], extra=extra), "kv_producer", "frees") as frees,
    ):
        engines = [each.wait_ready() for each in (keeps, frees)]
        for number in range(20):
            prompt = [*prompt_of(64, f"system {number % 3}"), *prompt_of(20 + 13 * (number % 7), f"order {number}")]
            params = PREFILL_PARAMS if number % 4 == 0 else None
            answers = [each.generate(prompt, params, max_tokens=TOKENS) for each in engines]
            assert answers[0]["tokens"] == answers[1]["tokens"]
            assert answers[0]["cached_tokens"] == answers[1]["cached_tokens"]
            (order, ranks), (other, _) = map(pool_of, engines)
            assert order == other
            assert ranks[0]["kept"]
