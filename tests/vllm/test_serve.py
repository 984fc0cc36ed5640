"""``vllm serve`` on both sides of a proxy, as docs/howto/vllm.md starts it, is to its clients what one server is.

The last test takes a server away: what comes behind it gets new ones, or comes before it.
"""

import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout

import openai
import pytest

from .howto import PROXY_PORT, blocks, command
from .pairs import FULL, model_folder
from .prompts import prompt_of
from .servers import Deployment

BLOCK_TOKENS = 128
BLOCK_BYTES = 4 * 2 * 2 * BLOCK_TOKENS * 64 * 2
"""Of llama: layers, keys and values, heads, tokens, elements of a head, bytes of one."""

LENGTHS = (3, 128, 150, 333, 512, 700)
TOKENS = 32
RUNNING, USAGE, ENDED = "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:request_success_total"
RELEASED = {"outcome": "released"}


@pytest.fixture(scope="module", params=["llama", "gptoss"] if FULL else ["llama"])
def deployment(request, pairs, tmp_path_factory):
    """The servers of the page; the engines of other tests are stopped first."""
    pairs.stop()
    with Deployment(model_folder(request.param), tmp_path_factory.mktemp("serve")) as deployment:
        yield deployment


@pytest.fixture
def settled(deployment):
    """The same; after the test nothing runs, and no block is taken."""
    yield deployment
    for server in (deployment.prefill, deployment.decode):
        server.wait_metric(0, RUNNING)
        server.wait_metric(0, USAGE)


def client_of(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def tokens_of(deployment, server, prompt, *, name=None):
    """Return the tokens that a server streams for a prompt."""
    with client_of(server) as client:
        streamed = client.completions.create(
            model=deployment.model,
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"return_token_ids": True},
            extra_headers={"X-Request-Id": name} if name else None,
        )
        return [token for chunk in streamed for choice in chunk.choices for token in choice.token_ids or ()]


def completed(deployment, server, **asked):
    """Return what a server answers as a whole."""
    usual = {"model": deployment.model, "max_tokens": TOKENS, "temperature": 0}
    with client_of(server) as client:
        return client.completions.create(**usual | asked, extra_body={"return_token_ids": True}).choices


def moved(deployment):
    """Return how many transfers there were, their bytes and descriptors, and the leases that ended well."""
    names = ("transfer_seconds_count", "transfer_bytes_sum", "transfer_descriptors_sum")
    read = [deployment.decode.metric(f"vllm:kvflow_{name}") for name in names]
    return [*read, deployment.prefill.metric("vllm:kvflow_leases_ended_total", **RELEASED)]


def said_by(program, port):
    """Run the page's Python against another server, and return what it printed."""
    printed, names = io.StringIO(), {}
    with redirect_stdout(printed):
        exec(compile(program.replace(f":{PROXY_PORT}/", f":{port}/"), "vllm.md", "exec"), names)
    names["client"].close()
    return printed.getvalue()


def test_the_commands_of_the_page_say_what_one_server_says(settled):
    asking = command("curl")
    text = json.loads(settled.run(asking))["choices"][0]["text"]
    alone = json.loads(settled.run(asking.replace(f":{PROXY_PORT}/", f":{settled.alone_port}/")))["choices"][0]["text"]
    assert text == alone
    assert len(text) > TOKENS
    [program] = blocks("python")
    program = program.replace("MODEL", settled.model)
    said = said_by(program, settled.ports[PROXY_PORT])
    assert said == said_by(program, settled.alone_port)
    assert len(said) > TOKENS
    settled.decode.wait_metric(2, "vllm:kvflow_transfer_seconds_count")
    for server in (settled.prefill, settled.decode):
        assert re.search(r"kvflow: rank 0 of 1 of engine \S+ is at tcp://127.0.0.1:\d+: ", server.log.read_text())


def test_concurrent_streams_are_the_tokens_of_one_server_and_every_transfer_is_accounted_for(settled):
    prompts = {f"stream-{length}": prompt_of(length, "serve") for length in LENGTHS}
    alone = {name: tokens_of(settled, settled.alone, prompt) for name, prompt in prompts.items()}
    assert all(len(set(tokens)) > TOKENS // 4 for tokens in alone.values())
    before = moved(settled)
    with ThreadPoolExecutor(len(prompts)) as threads:
        streams = {
            name: threads.submit(tokens_of, settled, settled.proxy, prompt, name=name)
            for name, prompt in prompts.items()
        }
    assert {name: stream.result() for name, stream in streams.items()} == alone

    settled.decode.wait_metric(before[0] + len(prompts), "vllm:kvflow_transfer_seconds_count")
    settled.prefill.wait_metric(before[3] + len(prompts), "vllm:kvflow_leases_ended_total", **RELEASED)
    transfers, nbytes, descriptors, _ = (now - then for now, then in zip(moved(settled), before, strict=True))
    pulls = [each for each in settled.records("decode") if each.get("local_request_id", "").startswith("cmpl-stream-")]
    assert len(pulls) == transfers
    assert sum(each["nbytes"] for each in pulls) == nbytes
    assert sum(each["descriptors"] for each in pulls) == descriptors
    if "llama" in settled.model:  # which keeps every token
        assert nbytes == sum(-(-length // BLOCK_TOKENS) for length in LENGTHS) * BLOCK_BYTES

    leases = {each["request_id"]: each for each in settled.records("prefill") if each["event"] == "lease.ended"}
    for name in prompts:
        [pull] = [each for each in pulls if each["local_request_id"].startswith(f"cmpl-{name}-0-")]
        assert pull["event"] == "transfer.completed"
        assert pull["request_id"].startswith(f"cmpl-{name}-0-")
        assert leases[pull["request_id"]]["outcome"] == "released"


def test_several_prompts_in_one_request_are_continued_as_by_one_server(settled):
    prompts = [prompt_of(40, "one"), prompt_of(150, "another")]
    said = [completed(settled, server, prompt=prompts) for server in (settled.alone, settled.proxy)]
    assert [choice.token_ids for choice in said[0]] == [choice.token_ids for choice in said[1]]
    assert len(said[0]) == 2


def test_every_sample_of_a_prompt_is_made(settled):
    for number in range(3):
        made = completed(settled, settled.proxy, prompt=prompt_of(200, f"samples {number}"), n=4, temperature=1)
        assert [(choice.finish_reason, len(choice.token_ids)) for choice in made] == [("length", TOKENS)] * 4


def test_a_client_that_hangs_up_in_the_middle_leaves_nothing_behind(settled):
    made, ended = (settled.decode.metric(name) for name in ("vllm:generation_tokens_total", ENDED))
    with client_of(settled.proxy) as client:
        streamed = client.completions.create(
            model=settled.model, prompt=prompt_of(200, "left"), max_tokens=800, temperature=0, stream=True
        )
        for _ in range(3):
            next(streamed)
        settled.decode.wait_metric(1, RUNNING)
        streamed.close()
    settled.decode.wait_metric(0, RUNNING)
    assert settled.decode.metric(ENDED) == ended, "vLLM counts what ends by itself"
    assert 3 <= settled.decode.metric("vllm:generation_tokens_total") - made < 800
    prompt = prompt_of(200, "next")
    assert tokens_of(settled, settled.proxy, prompt) == tokens_of(settled, settled.alone, prompt)


@pytest.mark.parametrize("fields", [{"max_tokens": 5000}, {"max_tokens": 5, "n": 0}, {"temperature": -1}], ids=str)
def test_a_request_that_is_refused_is_refused_in_the_same_words_and_keeps_no_blocks(settled, fields):
    asked = {"model": settled.model, "prompt": prompt_of(150, str(fields)), "max_tokens": 5, **fields}
    errors = []
    for server in (settled.alone, settled.proxy):
        with client_of(server) as client, pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked)
        errors.append(refused.value.body)
    assert errors[0] == errors[1]


def test_nothing_failed_and_no_lease_ran_out(deployment):
    assert deployment.decode.metric("vllm:kvflow_failed_transfers_total") == 0
    assert deployment.prefill.metric("vllm:kvflow_leases_ended_total") == moved(deployment)[3]
    assert {each["level"] for each in deployment.records("decode") + deployment.records("prefill")} == {"info"}


def test_without_a_prefill_server_the_proxy_still_answers_and_ends_when_it_is_told_to(deployment):
    deployment.prefill.kill()
    prompt = prompt_of(200, "without")
    assert tokens_of(deployment, deployment.proxy, prompt) == tokens_of(deployment, deployment.alone, prompt)
    assert '"prefill.failed"' in deployment.proxy.log.read_text()
    assert deployment.proxy.stop() == 0
