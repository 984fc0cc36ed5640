"""Released routers before real servers say what one server alone says, and the cache of every prompt travels.

The last test takes the prefill server away and starts it again.
"""

import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .clients import (
    BLOCK_TOKENS,
    LEASES,
    RELEASED,
    TOKENS,
    TRANSFERS,
    TWO_SAMPLES,
    UNTAGGED,
    Moved,
    Said,
    hang_up,
    said,
    text_of,
    totals,
)
from .engines import ANSWER_S, PAUSE_S
from .pairs import FULL
from .prompts import prompt_of
from .routers import STARTS

PROXY = "kvflow proxy"
RELEASED_ROUTERS = ["vllm-router", *(["smg"] if FULL else [])]
WORDS = 200
AT_ONCE = 8
CLIENTS = 2
"""That ask each front when the prefill server dies."""

FAILED = "vllm:kvflow_failed_transfers_total"
GONE = {"peer_lost", "peer_unavailable", "deadline_exceeded"}
"""What a transfer from a server that is gone may fail with."""


@pytest.fixture(scope="module")
def fronts(deployment):
    """All that stands before the same servers."""
    return {name: STARTS[name](deployment) for name in (PROXY, *RELEASED_ROUTERS)}


@pytest.fixture(params=RELEASED_ROUTERS)
def front(request, fronts):
    return fronts[request.param]


@pytest.fixture
def vllm_router(fronts):
    return fronts["vllm-router"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_an_answer_is_that_of_one_server_and_its_prompt_travels(settled, front, chat, stream):
    prompt = text_of(WORDS, f"{front.name} {chat} {stream}")
    alone = said(settled, settled.alone, prompt, chat=chat, stream=stream)
    assert alone.prompt_tokens > BLOCK_TOKENS
    assert [len(tokens) for tokens in alone.tokens] == [TOKENS]
    with Moved(settled) as moved:
        assert said(settled, front, prompt, chat=chat, stream=stream) == alone
        moved.prompts.append(alone.prompt_tokens)


def test_concurrent_answers_match_one_server_and_every_prompt_moves(settled, front):
    asked = [
        {"prompt": text_of(WORDS, f"{front.name} at once {number}"), "chat": number % 2 == 0, "stream": number % 4 > 1}
        for number in range(AT_ONCE)
    ]
    alone = [said(settled, settled.alone, **each) for each in asked]
    with Moved(settled) as moved, ThreadPoolExecutor(AT_ONCE) as threads:
        assert list(threads.map(lambda each: said(settled, front, **each), asked)) == alone
        moved.prompts += [each.prompt_tokens for each in alone]


def test_samples_of_a_prompt_behind_vllm_router_take_one_ticket(settled, vllm_router):
    prompt = text_of(WORDS, "samples")
    alone = said(settled, settled.alone, prompt, **TWO_SAMPLES)
    assert len(alone.texts) == 2
    with Moved(settled) as moved:
        assert said(settled, vllm_router, prompt, **TWO_SAMPLES) == alone
        moved.prompts.append(alone.prompt_tokens)


def test_token_ids_behind_vllm_router_are_a_prompt(settled, vllm_router):
    prompt = prompt_of(300, "vllm-router")
    alone = said(settled, settled.alone, prompt)
    with Moved(settled) as moved:
        assert said(settled, vllm_router, prompt) == alone
        moved.prompts.append(len(prompt))


def test_a_client_that_hangs_up_leaves_nothing_behind(settled, front):
    hang_up(settled, front, text_of(WORDS, f"{front.name} left"))


def test_a_request_that_the_decode_server_refuses_gives_its_blocks_back(settled, front):
    transfers, _, _, released = totals(settled)
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        said(settled, front, text_of(WORDS, f"{front.name} refused"), max_tokens=5000)
    settled.prefill.wait_metric(released + 1, LEASES, **RELEASED)
    assert settled.decode.metric(TRANSFERS) == transfers


def test_of_several_prompts_in_one_request_the_first_travels(settled, front):
    prompts = [text_of(WORDS, f"{front.name} {name}") for name in ("first", "second", "third")]
    alone = said(settled, settled.alone, prompts)
    first = said(settled, settled.alone, prompts[0])
    computed = settled.decode.metric(UNTAGGED, params="another_prompt")
    with Moved(settled) as moved:
        answer = said(settled, front, prompts)
        moved.prompts.append(first.prompt_tokens)
    assert answer == alone
    assert answer.tokens[0] == first.tokens[0]
    settled.decode.wait_metric(computed + 2, UNTAGGED, params="another_prompt")


class Client:
    """Asks a front one prompt after the other, until it is told of an error or the prefill server is gone.

    Attributes:
        answers: prompt -> what was said.
        error: what it was told; None if nothing.
    """

    def __init__(self, deployment, front, name, *, gone, answered):
        self.answers: dict[str, Said] = {}
        self.error: openai.APIStatusError | None = None
        self._deployment, self._front, self._name = deployment, front, name
        self._gone, self._answered = gone, answered

    def ask(self):
        for number in itertools.count():
            prompt, last = text_of(WORDS, f"{self._name} {number}"), self._gone.is_set()
            try:
                self.answers[prompt] = said(self._deployment, self._front, prompt)
            except openai.APIStatusError as error:
                self.error = error
                return
            self._answered.release()
            if last:
                return


def test_a_prefill_server_dies_and_comes_back_and_no_answer_is_wrong(deployment, fronts):
    codes = deployment.decode.counted(FAILED, "code")
    gone, answered = threading.Event(), threading.Semaphore(0)
    clients = {
        name: [Client(deployment, front, f"{name} {number}", gone=gone, answered=answered) for number in range(CLIENTS)]
        for name, front in fronts.items()
    }
    everyone = [client for asking in clients.values() for client in asking]
    with ThreadPoolExecutor(len(everyone)) as threads:
        asked = [threads.submit(client.ask) for client in everyone]
        for _ in range(3 * len(everyone)):
            assert answered.acquire(timeout=ANSWER_S)
        assert not any(client.error for client in everyone)
        deployment.prefill.kill()
        gone.set()
        for each in asked:
            each.result()

    told = {name: [client.error and client.error.status_code for client in asking] for name, asking in clients.items()}
    assert all(status in (500, 502, 503) for name in RELEASED_ROUTERS for status in told[name]), told
    assert all(status in (None, 500) for status in told[PROXY]), told  # 500 if it had the ticket, and not yet the cache
    prompt = text_of(WORDS, "without")
    assert said(deployment, fronts[PROXY], prompt) == said(deployment, deployment.alone, prompt)
    assert '"prefill.failed"' in fronts[PROXY].log.read_text()
    for client in everyone:
        for prompt, answer in client.answers.items():
            assert answer == said(deployment, deployment.alone, prompt)
    deployment.decode.wait_idle()
    assert deployment.decode.counted(FAILED, "code") - codes <= GONE

    deployment.restart_prefill()
    for name, front in fronts.items():
        require_transfers_again(deployment, name, front)
    deployment.prefill.wait_idle()


def require_transfers_again(deployment, name, front):
    """Ask until a prompt travels again, and check what is said to each prompt."""
    deadline = time.monotonic() + ANSWER_S
    for number in itertools.count():
        prompt, before = text_of(WORDS, f"{name} again {number}"), deployment.decode.metric(TRANSFERS)
        try:
            answer = said(deployment, front, prompt)
        except openai.APIStatusError:
            answer = None
        if answer:
            assert answer == said(deployment, deployment.alone, prompt)
            if deployment.decode.metric(TRANSFERS) > before:
                return
        assert time.monotonic() < deadline, f"{name} does not use a prefill server that has come back"
        time.sleep(PAUSE_S)
