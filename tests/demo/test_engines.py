"""The engines, in one process over the loopback transport: same tokens, and nothing left behind."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest
import torch

import kvflow
from kvflow.tools.demo.decode import DecodeEngine
from kvflow.tools.demo.engine import Engine
from kvflow.tools.demo.messages import Decode, Drain, Drained, Failed, Generate, Generated, Prefill, Prefilled
from kvflow.tools.demo.monolithic import MonolithicEngine
from kvflow.tools.demo.prefill import PrefillEngine
from tests.simulation.tickets import forge

PROMPTS = [b"short", b"The cache of this prompt fills several blocks. " * 5]
MAX_TOKENS = 8
SECRET = "a secret of this test"
REQUEST = Decode(request_id="r", num_prompt_tokens=1, token=0, max_tokens=1, kv_transfer_params={})


@pytest.fixture
def executor():
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as executor:
        yield executor


def make_engine(executor, seed, layout="BHLNC", kv="content"):
    return Engine(layout=layout, kv=kv, seed=seed, executor=executor, num_blocks=64)


def config(engine_id):
    return kvflow.WorkerConfig(engine_id=engine_id, transport="loopback", cluster_secret=SECRET)


@asynccontextmanager
async def open_pair(executor, layout="BHLNC", kv="content"):
    """Enter with a prefill and a decode engine."""
    source, target = (make_engine(executor, seed, layout, kv) for seed in (1, 2))
    async with (
        kvflow.open_worker(config("prefill"), source.cache) as producer,
        kvflow.open_worker(config("decode"), target.cache) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        prefill = PrefillEngine(source, producer, tasks)
        yield prefill, DecodeEngine(target, consumer)
        prefill.revoke_offers()


def decode_request(index, prompt, prefilled, **changes):
    fields = {"token": prefilled.token, "kv_transfer_params": prefilled.kv_transfer_params} | changes
    return Decode(request_id=f"r{index}", num_prompt_tokens=len(prompt), max_tokens=MAX_TOKENS, **fields)


async def run_pair(prefill, decode):
    async def run(index, prompt):
        prefilled = await prefill.answer(Prefill(request_id=f"r{index}", prompt=prompt))
        return await decode.answer(decode_request(index, prompt, prefilled))

    return await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(PROMPTS)))


@pytest.mark.parametrize(("layout", "kv"), [("LBNHC", "split"), ("BLHNC", "content")])
async def test_two_engines_generate_what_one_does(executor, layout, kv):
    alone = MonolithicEngine(make_engine(executor, seed=3))
    expected = [
        await alone.answer(Generate(request_id="r", prompt=prompt, max_tokens=MAX_TOKENS)) for prompt in PROMPTS
    ]
    async with open_pair(executor, layout, kv) as (prefill, decode):
        answers = await run_pair(prefill, decode)
        assert [await engine.answer(Drain()) for engine in (alone, decode, prefill)] == [Drained()] * 3
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    assert all(answer.report.nbytes > 0 for answer in answers)


async def test_a_wrong_byte_in_the_offered_cache_shows(executor):
    """The negative control: the comparison that the demo makes can fail."""
    async with open_pair(executor) as (prefill, decode):
        expected = await run_pair(prefill, decode)
        prompt = PROMPTS[1]
        prefilled = await prefill.answer(Prefill(request_id="again", prompt=prompt))
        ticket = kvflow.Ticket.from_params(prefilled.kv_transfer_params)
        cache = prefill._engine.cache
        for layer in cache.groups[0].layers:
            page = cache.component(layer, "v")[ticket.grants[0].block_ids[0][-1]]
            page.copy_(page.roll(1, -1))
        corrupted = await decode.answer(decode_request(9, prompt, prefilled))
        assert isinstance(corrupted, Generated)
        assert corrupted.tokens[0] == expected[1].tokens[0]
        assert corrupted.tokens != expected[1].tokens


async def test_blocks_of_an_offer_stay_until_it_has_ended(executor):
    async with open_pair(executor) as (prefill, decode):
        prefilled = await prefill.answer(Prefill(request_id="r0", prompt=PROMPTS[1]))
        assert isinstance(prefilled, Prefilled)
        assert prefill._engine.pool.num_used == sum(
            map(len, kvflow.Ticket.from_params(prefilled.kv_transfer_params).grants[0].block_ids)
        )
        prefill.revoke_offers()
        assert await prefill.answer(Drain()) == Drained()
        with pytest.raises(kvflow.errors.StaleLease):
            await decode.answer(decode_request(0, PROMPTS[1], prefilled))
        assert await decode.answer(Drain()) == Drained()


async def test_a_forged_ticket_leaves_nothing_behind(executor):
    async with open_pair(executor) as (prefill, decode):
        prefilled = await prefill.answer(Prefill(request_id="r0", prompt=PROMPTS[0]))
        params = prefilled.kv_transfer_params
        params = forge(params, lambda grant: grant.update(slot=grant["slot"] + 1))
        with pytest.raises(kvflow.errors.TicketInvalid):
            await decode.answer(decode_request(0, PROMPTS[0], prefilled, kv_transfer_params=params))
        assert await decode.answer(Drain()) == Drained()


async def test_each_engine_serves_its_own_kind_of_request(executor):
    generate = Generate(request_id="r", prompt=b"x", max_tokens=1)
    async with open_pair(executor) as (prefill, decode):
        answers = [
            await prefill.answer(REQUEST),
            await decode.answer(generate),
            await MonolithicEngine(make_engine(executor, seed=3)).answer(REQUEST),
        ]
    assert [(type(answer), answer.code) for answer in answers] == [(Failed, "unsupported")] * 3
