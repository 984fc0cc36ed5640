"""The engines, in one process over the loopback transport: same tokens, and nothing left behind."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import pytest
import torch

import kvflow
from kvflow.tools.demo.engine import CompletionService, Engine, answer_completion
from kvflow.tools.demo.messages import Drained, PromptRequest
from kvflow.tools.proxy.completions import OFFER, PARAMS, decode_body, prefill_body, read_completion, read_params
from tests.simulation.tickets import forge

PROMPTS = [b"short", b"The cache of this prompt fills several blocks. " * 5]
MAX_TOKENS = 8
SECRET = "a secret of this test"


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
    ):
        prefill = CompletionService(source, producer)
        yield prefill, CompletionService(target, consumer)
        await prefill.revoke_offers()


def ask(service, name, prompt, params=None):
    """Have a service answer a prompt."""
    request = PromptRequest(prompt=tuple(prompt), max_tokens=MAX_TOKENS, kv_transfer_params=params)
    return service.complete(name, request)


async def offer(service, name, prompt):
    """Have a prefill engine compute a prompt; return its parameters for a decode engine."""
    return (await ask(service, name, prompt, OFFER)).kv_transfer_params


def tokens_of(answer):
    return answer.choices[0].token_ids


async def run_pair(prefill, decode):
    async def run(index, prompt):
        return await ask(decode, f"r{index}", prompt, await offer(prefill, f"r{index}", prompt))

    return await asyncio.gather(*(run(index, prompt) for index, prompt in enumerate(PROMPTS)))


@pytest.mark.parametrize(("layout", "kv"), [("LBNHC", "split"), ("BLHNC", "content")])
async def test_two_engines_generate_what_one_does(executor, layout, kv):
    alone = CompletionService(make_engine(executor, seed=3))
    expected = [await ask(alone, "r", prompt) for prompt in PROMPTS]
    async with open_pair(executor, layout, kv) as (prefill, decode):
        answers = await run_pair(prefill, decode)
        assert [await service.drain() for service in (alone, decode, prefill)] == [Drained()] * 3
    assert list(map(tokens_of, answers)) == list(map(tokens_of, expected))
    assert all(answer.report.nbytes > 0 for answer in answers)


async def test_engines_understand_what_a_proxy_makes_of_a_request(executor):
    body = msgspec.json.encode({"prompt": list(PROMPTS[1]), "max_tokens": MAX_TOKENS})
    completion = read_completion(body)
    async with open_pair(executor) as (prefill, decode):
        prefilled = await answer_completion(prefill, "r", prefill_body(completion, "/v1/completions"))
        params = read_params(prefilled.body)
        assert params is not None
        answered = await answer_completion(decode, "r", decode_body(completion, params))
        alone = await answer_completion(decode, "r2", body)
    assert [answer.status for answer in (prefilled, answered, alone)] == [200] * 3
    answered, alone = (json.loads(answer.body) for answer in (answered, alone))
    assert answered["choices"] == alone["choices"]
    assert answered["report"]["nbytes"] > 0
    assert answered[PARAMS] is alone[PARAMS] is alone["report"] is None


async def test_a_wrong_byte_in_the_offered_cache_shows(executor):
    """The negative control: the comparison that the demo makes can fail."""
    async with open_pair(executor) as (prefill, decode):
        expected = await run_pair(prefill, decode)
        prompt = PROMPTS[1]
        params = await offer(prefill, "again", prompt)
        ticket = kvflow.Ticket.from_params(params)
        cache = prefill._engine.cache
        for layer in cache.groups[0].layers:
            page = cache.component(layer, "v")[ticket.grants[0].block_ids[0][-1]]
            page.copy_(page.roll(1, -1))
        corrupted = await ask(decode, "r9", prompt, params)
        assert tokens_of(corrupted)[0] == tokens_of(expected[1])[0]
        assert tokens_of(corrupted) != tokens_of(expected[1])


async def test_blocks_of_an_offer_stay_until_it_has_ended(executor):
    async with open_pair(executor) as (prefill, decode):
        params = await offer(prefill, "r0", PROMPTS[1])
        grant = kvflow.Ticket.from_params(params).grants[0]
        assert prefill._engine.pool.num_used == sum(map(len, grant.block_ids))
        await prefill.revoke_offers()
        assert await prefill.drain() == Drained()
        with pytest.raises(kvflow.errors.StaleLease):
            await ask(decode, "r0", PROMPTS[1], params)
        assert await decode.drain() == Drained()


async def test_a_forged_ticket_leaves_nothing_behind(executor):
    async with open_pair(executor) as (prefill, decode):
        params = await offer(prefill, "r0", PROMPTS[0])
        params = params | forge(params, lambda grant: grant.update(slot=grant["slot"] + 1))
        with pytest.raises(kvflow.errors.TicketInvalid):
            await ask(decode, "r0", PROMPTS[0], params)
        assert await decode.drain() == Drained()


async def test_a_failure_is_answered_so_that_a_proxy_shows_it(executor):
    async with open_pair(executor) as (prefill, decode):
        params = await offer(prefill, "r0", PROMPTS[0])
        again = await answer_completion(prefill, "r0", body_of(PROMPTS[0], OFFER))
        await prefill.revoke_offers()
        stale = await answer_completion(decode, "r0", body_of(PROMPTS[0], params))
        assert [answer.status for answer in (again, stale)] == [409, 409]
        assert "[stale_lease]" in json.loads(stale.body)["error"]["message"]
        too_long = await answer_completion(decode, "r1", body_of(bytes(20_000)))
        assert too_long.status == 500
        assert "blocks are wanted" in json.loads(too_long.body)["error"]["message"]
        assert await decode.drain() == await prefill.drain() == Drained()


@pytest.mark.parametrize("params", [{}, {"first_token": 1}, {"kvflow": "kvf1"}, OFFER, {"kvflow": "kvf1", **OFFER}])
async def test_what_an_engine_cannot_do_is_refused(executor, params):
    alone = CompletionService(make_engine(executor, seed=3))
    assert (await answer_completion(alone, "r", body_of(PROMPTS[0], params))).status == 400
    async with open_pair(executor) as (_, decode):
        if not params.get("do_remote_decode"):
            assert (await answer_completion(decode, "r", body_of(PROMPTS[0], params))).status in (400, 409)
        assert await decode.drain() == Drained()


def body_of(prompt, params=None):
    return msgspec.json.encode(PromptRequest(prompt=tuple(prompt), max_tokens=MAX_TOKENS, kv_transfer_params=params))
