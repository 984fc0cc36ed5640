"""The example of docs/examples/transformers and vLLM: each reads what the other computes, and says what one says alone.

All in float32, and greedy. vLLM has blocks of 32 tokens, the engines of transformers pages of 32, 16 and 128.
"""

import itertools
import json
import os
import queue
import subprocess
import threading
from concurrent.futures import Future

import pytest

from kvflow import Ticket
from tests.ports import free_port

from .engines import ANSWER_S, ENVIRONMENT, OUT, PREFILL_PARAMS, ROOT, Options, look
from .pairs import SECRET, model_folder
from .prompts import prompt_of

PYTHON = ROOT / ".venv-transformers" / "bin" / "python"
LENGTHS = (1, 3, 40, 257, 600)
TOKENS = 16
LEASE_S = 300.0  # no lease ends unless its ticket is given back
CHUNK = 128  # tokens of a batch: longer prompts are read while they are computed


class Transformers:
    """A child process with one engine: see ``transformers_process``."""

    def __init__(self, name, page_size, **transfers):
        settings = {
            "model": str(model_folder("llama")),
            "config": {"engine_id": name, "cluster_secret": SECRET, "lease_s": LEASE_S},
            "batching": {"page_size": page_size, "max_batch_tokens": CHUNK},
            "transfers": transfers,
        }
        self.page_size = page_size
        self.log = OUT / "logs" / f"{name}.log"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [PYTHON, "-m", "tests.vllm.transformers_process", json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
            )
        self._ids = itertools.count()
        self._answers = {}
        self._ready = Future()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
            self._process.wait()
            self._reader.join()
            self._process.stdout.close()

    def wait_ready(self):
        self.endpoint = self._ready.result(ANSWER_S)
        return self

    def submit(self, prompt, params=None, max_tokens=TOKENS):
        """Start a request; return its name."""
        return self._send("generate", prompt=prompt, kv_transfer_params=params, max_tokens=max_tokens)

    def wait(self, name, *fields):
        """Return the answer of a request, once it has these fields."""
        answer = {}
        while not answer.keys() >= {*fields}:
            answer |= self._answers[name].get(timeout=ANSWER_S)
        return answer

    def generate(self, prompt, params=None):
        """Return the tokens of a prompt, and how many of it were read."""
        answer = self.wait(self.submit(prompt, params), "tokens", "kv_transfer_params")
        assert answer["error"] is None
        return answer["tokens"], self.state()["read"]

    def offer(self, prompt):
        """Return the parameters with which a prompt is read, as soon as they are there."""
        return self.wait(self.submit(prompt, PREFILL_PARAMS, 1), "kv_transfer_params")["kv_transfer_params"]

    def state(self):
        return self.wait(self._send("state"), "free")

    def zero(self):
        self.wait(self._send("zero"), "id")

    def settle(self):
        """Wait until all of its cache is free."""
        look(self.state, lambda state: state["free"] == 1.0, lambda state: f"{self.log} is still at {state}")

    def _send(self, op, **fields):
        name = f"{op}-{next(self._ids)}"
        self._answers[name] = queue.SimpleQueue()
        self._process.stdin.write(json.dumps({"op": op, "id": name} | fields) + "\n")
        self._process.stdin.flush()
        return name

    def _read(self):
        for line in self._process.stdout:
            answer = json.loads(line)
            if "id" in answer:
                self._answers[answer["id"]].put(answer)
            else:
                self._ready.set_result(answer["endpoint"])


@pytest.fixture(scope="module")
def engines(pairs):
    """vLLM, and three of transformers: one that offers early and finds, one that keeps, one with large pages."""
    port = free_port()
    options = Options(
        "llama",
        block_size=32,
        dtype="float32",
        prefix_caching=True,
        extra={"lease_s": LEASE_S, "dispatch": "concurrent", "keep": True, "bind": f"tcp://127.0.0.1:{port}"},
        llm={"max_num_batched_tokens": CHUNK},
    )
    with (
        pairs.engine(options, "kv_both", "beside-transformers") as vllm,
        Transformers("transformers-16", 16, keep=True) as keeper,
        Transformers("transformers-128", 128) as large,
    ):
        keeper.wait_ready()
        sources = [keeper.endpoint, f"tcp://127.0.0.1:{port}"]
        with Transformers("transformers-32", 32, early=True, sources=sources) as early:
            vllm.port = port
            yield [each.wait_ready() for each in (vllm, early, keeper, large)]


@pytest.fixture(autouse=True)
def settled(engines):
    """After every test: nothing is held, and every block is free."""
    yield
    for each in engines:
        each.settle()


def alone(vllm, prompt):
    """Return what vLLM says by itself. The salt hides from all others what it computes for that."""
    return vllm.generate(prompt, salt="alone", max_tokens=TOKENS)["tokens"]


def whole(length, size):
    """Return how many tokens of a prompt are read: whole pages, without the last token."""
    return (length - 1) // size * size


@pytest.mark.parametrize("length", LENGTHS)
def test_transformers_reads_what_vllm_has_computed(engines, length):
    vllm, _, keeper, _ = engines
    prompt = prompt_of(length, "vllm to transformers")
    params = vllm.generate(prompt, PREFILL_PARAMS, max_tokens=1)["kv_transfer_params"]
    assert keeper.generate(prompt, params) == (alone(vllm, prompt), whole(length, 16))


def test_transformers_reads_while_vllm_computes(engines):
    vllm, _, keeper, _ = engines
    prompt = prompt_of(600, "while vllm computes")
    at = {"do_remote_prefill": True, "do_remote_decode": False, "remote_host": "127.0.0.1", "remote_port": vllm.port}
    request = vllm.submit(prompt, PREFILL_PARAMS, max_tokens=1)
    assert keeper.generate(prompt, at) == (alone(vllm, prompt), whole(600, 16))
    request.wait()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("producer", ["while it computes", "when it has computed"])
def test_vllm_reads_what_transformers_computes(engines, producer, length):
    vllm, early, keeper, _ = engines
    prompt = prompt_of(length, f"transformers to vllm {producer}")
    params = (early if producer == "while it computes" else keeper).offer(prompt)
    assert Ticket.from_params(params).grants[0].is_open == (producer == "while it computes")
    answer = vllm.generate(prompt, params, max_tokens=TOKENS)
    assert not vllm.reason(answer["id"])
    assert answer["tokens"] == alone(vllm, prompt)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("sizes", [(32, 16), (16, 32), (16, 128), (32, 128)], ids="{0[0]} to {0[1]}".format)
def test_transformers_reads_what_transformers_computes(engines, sizes, length):
    vllm, *others = engines
    producer, consumer = ({each.page_size: each for each in others}[size] for size in sizes)
    prompt = prompt_of(length, f"{sizes}")
    read = consumer.generate(prompt, producer.offer(prompt))
    assert read == (alone(vllm, prompt), whole(length, sizes[1]))


@pytest.mark.parametrize("keeper", ["vllm", "transformers"])
def test_the_next_turn_is_read_from_who_keeps_the_last(engines, keeper):
    vllm, early, other, _ = engines
    prompt = prompt_of(370, f"kept by {keeper}")
    if keeper == "vllm":
        tokens = vllm.generate(prompt, max_tokens=TOKENS)["tokens"]
    else:
        tokens, _ = other.generate(prompt)
    turn = prompt + tokens + prompt_of(60, "next turn")
    assert early.generate(turn) == (alone(vllm, turn), whole(370 + TOKENS, 32))


def test_what_was_kept_is_not_read_when_its_blocks_have_been_reused(engines):
    vllm, early, keeper, _ = engines
    prompt = prompt_of(370, "reused")
    tokens, _ = keeper.generate(prompt)
    for number in range(24):  # more than its cache has, each with fewer blocks than were kept
        keeper.generate(prompt_of(200, f"reuses {number}"))
    turn = prompt + tokens
    assert early.generate(turn) == (alone(vllm, turn), 0)


def test_a_block_that_is_zeroed_changes_the_tokens(engines):
    vllm, early, keeper, _ = engines
    prompt = prompt_of(257, "zeroed")
    keeper.zero()
    tokens, read = keeper.generate(prompt, early.offer(prompt))
    assert read == 256
    assert tokens != alone(vllm, prompt)


def test_a_ticket_of_another_prompt_is_given_back_and_the_prompt_computed(engines):
    vllm, _, keeper, large = engines
    prompt = prompt_of(257, "asked for")
    assert large.generate(prompt, keeper.offer(prompt_of(257, "offered"))) == (alone(vllm, prompt), 0)
