"""Both servers asked at once, as docs/howto/read-while-computing.md says.

A prompt is read while it is computed, in small steps. The answers are those of one server. ``vllm-router`` drops every
ticket, so each of its prompts is found by its content.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import product
from operator import itemgetter

import openai
import pytest

from tests.helpers.waiting import wait_until
from tests.stopping import stopped

from .clients import LEASES, RELEASED, TRANSFERS, said, text_of
from .engines import free_port, records
from .howto import DECODE_PORT, PREFILL_PORT, SOURCE_PORT, command, members
from .pairs import FULL, await_all, model_folder
from .prompts import prompt_of
from .routers import STARTS
from .servers import USAGE, WAITING, Deployment

FRONTS = ("kvflow proxy", "vllm-router")
ASKED = list(product(FRONTS, (False, True))) if FULL else list(zip(FRONTS, (False, True), strict=True))
"""Fronts, and whether they stream."""
FLAGS = " --dtype float32 --max-num-batched-tokens 128"
"""In bfloat16, a part of a prompt computed alone differs from the whole where two tokens are equally likely."""

LENGTHS = (500, 1500, 4000) if FULL else (500, 4000)
PREFILLED = max(LENGTHS) + 16
"""The longest prompt that the prefill server computes."""
AT_ONCE = 6
PROMPTS_MAX = 5  # until one is read while it is computed


class Both(Deployment):
    """A prefill server that offers prompts when they arrive, a decode server that finds them, and a proxy."""

    def start(self):
        self.ports[SOURCE_PORT] = free_port()
        self.start_prefill()
        # A busy machine is slow, and the model is small.
        finds = f'{members("rendezvous_from")}, "rendezvous_s": 60, "follow_bytes_min": 1'
        self.decode = self.start_side("decode", "kv_consumer", finds, DECODE_PORT)
        alone = f"vllm serve {self.model} --port {self.alone_port}{FLAGS}"
        self.alone = self.serve("alone", alone, self.alone_port)
        port, proxy = free_port(), f"kvflow proxy --prefill {self.prefill.url} --decode {self.decode.url}"
        shell = f"{proxy} --dispatch concurrent --log proxy.jsonl --listen 127.0.0.1:{port}"
        self.proxy = self.serve("proxy", shell, port)
        return self.prefill, self.decode, self.alone, self.proxy

    def start_prefill(self):
        self.prefill = self.start_side("prefill", "kv_producer", members("dispatch"), PREFILL_PORT)

    def start_side(self, name, role, settings, port):
        """Start the server of a role; that which prefills knows shorter prompts than the other."""
        length = f" --max-model-len {PREFILLED}" if name == "prefill" else ""
        shell = command("vllm serve", role).replace('_config": {', f'_config": {{{settings}, ')
        return self.serve(name, self.fitted(shell) + FLAGS + length, self.ports[port])

    def reads(self, begun):
        """Return the records of all reads but the first ones, in order."""
        ended = [each for each in self.records("decode") if each["event"].startswith("transfer.")]
        return sorted(ended, key=itemgetter("timestamp"))[begun:]


@pytest.fixture(scope="module", params=["llama-chat", *(["gptoss-chat"] if FULL else [])])
def both(request, pairs, tmp_path_factory):
    pairs.stop()
    with Both(model_folder(request.param), tmp_path_factory.mktemp("both")) as both:
        yield both


@pytest.fixture(scope="module")
def fronts(both):
    """All that stands before the servers, each of which knows the prefill server from a first answer."""
    fronts = {name: STARTS[name](both) for name in FRONTS}
    for name, front in fronts.items():
        first = text_of(100, name)
        assert said(both, front, first) == said(both, both.alone, first)
    return fronts


@pytest.fixture
def settled(both):
    yield both
    both.settle()


def follows(both, front, length, name, **asked):
    """Check that a prompt is read while it is computed, and that its answer is that of one server.

    On a busy machine a prompt may be computed before the decode server has asked for it; then the next one is read.
    """
    ranges = []
    while not ranges or (max(ranges) == 1 and len(ranges) < PROMPTS_MAX):
        prompt = prompt_of(length, f"{name} {len(ranges)}")
        begun, alone = len(both.reads(0)), said(both, both.alone, prompt, **asked)
        assert said(both, front, prompt, **asked) == alone
        [read] = await_all(lambda begun=begun: both.reads(begun))
        assert read["event"] == "transfer.completed"
        ranges.append(read.get("ranges", 1))  # a prompt that was computed before is read as a whole
    assert max(ranges) > 1, read


@pytest.mark.parametrize(("name", "stream"), ASKED)
def test_a_prompt_is_read_while_it_is_computed(settled, fronts, name, stream):
    for length in LENGTHS:
        follows(settled, fronts[name], length, f"{name} {stream}", stream=stream)


@pytest.mark.parametrize("name", FRONTS)
def test_concurrent_prompts_find_each_its_own_cache(settled, fronts, name):
    prompts = [prompt_of(length, f"{name} at once") for length in range(700, 700 + AT_ONCE)]
    prompts.append(prompts[0])  # the same prompt again, for which there is a second offer
    alone = [said(settled, settled.alone, prompt) for prompt in prompts]
    moved = settled.decode.metric(TRANSFERS), settled.prefill.metric(LEASES, **RELEASED)
    with ThreadPoolExecutor(len(prompts)) as threads:
        assert list(threads.map(lambda prompt: said(settled, fronts[name], prompt), prompts)) == alone
    assert settled.decode.metric(TRANSFERS) - moved[0] >= AT_ONCE
    settled.prefill.wait_metric(moved[1] + len(prompts), LEASES, **RELEASED)


def test_an_address_that_the_settings_do_not_name_is_refused(settled):
    params = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": 9}
    asked = {"extra_body": {"kv_transfer_params": params}}
    with pytest.raises(openai.InternalServerError):
        said(settled, settled.decode, prompt_of(300, "elsewhere"), **asked)
    assert "rendezvous_from does not name tcp://127.0.0.1:9" in settled.decode.log.read_text()


def test_the_proxy_has_asked_both_at_once(both, fronts):
    del fronts
    answered = records(both.folder / "proxy.jsonl", "request.answered")
    assert len(answered) > len(LENGTHS)
    assert all(each["prefilled"] and not each["failed_attempts"] for each in answered)


def test_a_prompt_that_the_prefill_server_refuses_ends_on_both(settled, fronts):
    """The decode server would take it, and waits for who computes it until the proxy hangs up."""
    prompt = prompt_of(PREFILLED + 16, "refused")
    with ThreadPoolExecutor(1) as thread:
        with stopped(settled.prefill.pid):  # not its engine, which says that it has no such prompt
            asked = thread.submit(said, settled, fronts["kvflow proxy"], prompt)
            settled.decode.wait_metric(1, WAITING)
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            asked.result()
    settled.decode.wait_metric(0, WAITING)
    assert "has not offered this prompt" not in settled.decode.log.read_text(), "the request was not ended"
    follows(settled, fronts["kvflow proxy"], LENGTHS[0], "after a refusal")


@pytest.mark.skipif(not FULL, reason="one more server starts")
def test_a_prefill_server_that_is_killed_in_mid_prompt_costs_nothing(settled, fronts):
    front, prompt = fronts["kvflow proxy"], prompt_of(max(LENGTHS), "killed")
    begun, alone = len(settled.reads(0)), said(settled, settled.alone, prompt)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(said, settled, front, prompt)
        wait_until(lambda: settled.decode.metric(USAGE) > 0)  # it has begun to read
        settled.prefill.kill()
        assert asked.result() == alone
    [read] = await_all(lambda: settled.reads(begun))
    assert read["event"] == "transfer.failed"
    settled.restart_prefill()
    first = prompt_of(100, "after the kill")  # of which the proxy learns that both can be asked at once again
    assert said(settled, front, first) == said(settled, settled.alone, first)
    follows(settled, front, LENGTHS[0], "after the kill")
