# ruff: noqa: T201 - a script prints what it finds
"""What does it bring to share prefixes, and what does it cost the engine that keeps them?

``turns`` streams the last turn of a chat through ``kvflow proxy``, a prefill engine and a decode engine that keeps the
chat so far, as docs/howto/share-prefixes.md starts them. Each round has the turn with its prefix fetched, and its new
tokens as a prompt of their own; for comparison also the turn with its prefix in the prefill engine's own cache, and
computed whole. ``steps`` times every step of one engine, in pairs of rounds that differ in one thing: whether it keeps
what its requests leave. Its cache is so small that it reuses all of it::

    .venv-vllm/bin/python -m tests.benchmarks.shared_prefixes turns --rounds 15
    .venv-vllm/bin/python -m tests.benchmarks.shared_prefixes turns --model llama-long --prefix 32000 --whole-rounds 1
    .venv-vllm/bin/python -m tests.benchmarks.shared_prefixes steps --rounds 40
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvflow.tools.bench import quantile
from tests.vllm import engine_process
from tests.vllm.chats import Chats, Kind
from tests.vllm.clients import client_of
from tests.vllm.engines import ANSWER_S, OUT, Engine, Nursery, Options, free_port
from tests.vllm.howto import PREFILL_PORT
from tests.vllm.prompts import prompt_of
from tests.vllm.servers import Server
from tests.vllm.tiny_models import CHAT_CONTEXT, CONFIGS, make

# For each token these have the same bytes and the same share of attention as all 32 layers: ratios are the same.
CONFIGS["two-layers"] = (
    "llama",
    {
        "num_hidden_layers": 2,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": CHAT_CONTEXT,
    },
)
"""Two of the 32 layers of a model of eight billion weights."""
LONG_CONTEXT = 1 << 17
CONFIGS["llama-long"] = (CONFIGS["llama-chat"][0], CONFIGS["llama-chat"][1] | {"max_position_embeddings": LONG_CONTEXT})
"""Computes a prompt of 32,000 tokens within minutes."""

PREFIX, NEW = 2240, 150  # tokens of turn six of the chat of tests/vllm/test_prefixes.py: held, and new
BLOCK = 32
FETCHED, CACHED, ALONE, WHOLE = (
    "turn six, its prefix fetched",
    "turn six, its prefix in the own cache",
    "its new tokens alone",
    "turn six, computed whole",
)

REQUESTS = 16  # of a round of steps
KEEPER = Options(
    "llama",
    block_size=BLOCK,
    prefix_caching=True,
    extra={"keep": True},
    llm={"num_gpu_blocks_override": 160, "max_num_seqs": 8},
    served="tests.benchmarks.shared_prefixes",
)


class Turns(Chats):
    """One prefill engine that asks, one decode engine that keeps, and a proxy.

    Args:
        kind: of the engines.
        model: its folder.
        folder: for logs and records.
        prefix: tokens that are kept of the chat.
        whole_rounds: first rounds in which the turn is computed whole, too: that takes the longest.
    """

    def __init__(self, kind: Kind, model: Path, folder: Path, prefix: Sequence[int], whole_rounds: int) -> None:
        super().__init__(kind, model, folder)
        self.prefix, self.whole_rounds = prefix, whole_rounds

    def start(self) -> Sequence[Server]:
        """See ``Together.start``."""
        self.keeping_flags = flags = f" --block-size {BLOCK} --max-model-len {len(self.prefix) + 2 * NEW}"
        self.start_keeping()
        self.prefill = self.start_asking("prefill", self.ports[PREFILL_PORT], flags)
        port, proxy = free_port(), f"kvflow proxy --prefill {self.prefill.url} --decode {self.decode.url}"
        self.proxy = self.serve("proxy", f"{proxy} --listen 127.0.0.1:{port}", port)
        return self.decode, self.prefill, self.proxy

    def first_token_s(self, server: Server, prompt: Sequence[int]) -> float:
        """Return the seconds to the first token of an answer."""
        self.settle()
        with client_of(server) as client:
            started = time.perf_counter()
            with client.completions.create(model=self.model, prompt=prompt, max_tokens=2, stream=True) as streamed:
                next(iter(streamed))
                first_s = time.perf_counter() - started
                for _ in streamed:
                    pass
        return first_s

    def settle(self) -> None:
        """Wait until both servers are idle."""
        self.prefill.wait_idle()
        self.decode.wait_idle()

    def forget(self) -> None:
        """Have the prefill engine forget what it has computed and read."""
        self.settle()
        with urllib.request.urlopen(f"{self.prefill.url}/reset_prefix_cache", data=b"", timeout=ANSWER_S):
            pass

    def turn_six(self, number: int) -> dict[str, float]:
        """Return the seconds to the first token, by what is measured."""
        self.forget()
        took = {}
        names = ((FETCHED, CACHED, ALONE), (ALONE, FETCHED, CACHED))[number % 2]
        for name in (*names, WHOLE) if 0 < number <= self.whole_rounds else names:
            new = prompt_of(NEW, f"{name} {number}")
            other = prompt_of(len(self.prefix), f"whole {number}") if name == WHOLE else self.prefix
            prompt = new if name == ALONE else [*other, *new]
            took[name] = self.first_token_s(self.proxy, prompt)
        return took


class Served(engine_process.Served):
    """An engine that keeps, or does not; see ``engine_process``.

    =====  ==================  =================================================================================
    op     fields              answer
    =====  ==================  =================================================================================
    round  id, keep, requests  id, steps_s: of each step that ran the model; ended_s: of those of them in which a
                               request ended; cpu_s: CPU time of the engine's thread in each; kept: number of
                               leases that began
    =====  ==================  =================================================================================
    """

    ops = engine_process.Served.ops | {"round"}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._keeping = self.scheduler.connector._scheduler_side.keeping
        self._pool = self._keeping.pool

    def round(self, command: dict[str, Any]) -> None:
        """Run requests to their ends."""
        while not self.engine.reset_prefix_cache():  # which ends all that is kept
            self.engine.step()
        self._keeping.pool = self._pool if command["keep"] else None
        steps_s: list[float] = []
        ended_s: list[float] = []
        cpu_s: list[float] = []
        kept: set[str] = set()
        for request in command["requests"]:
            self.generate(request)
        while self.scheduler.has_requests():
            started, before = time.perf_counter(), time.thread_time()
            outputs = self.engine.step()
            took_s, spent_s = time.perf_counter() - started, time.thread_time() - before
            kept.update(self._keeping._entries)
            if outputs:
                steps_s.append(took_s)
                cpu_s.append(spent_s)
                ended_s += [took_s] * any(each.finished for each in outputs)
        self.requests.clear()
        self.answer(id=command["id"], steps_s=steps_s, ended_s=ended_s, cpu_s=cpu_s, kept=len(kept))


def measure_turns(chosen: argparse.Namespace) -> None:
    """Print times to first tokens, and their ratios."""
    kind, model = Kind(chosen.model, BLOCK, BLOCK), make(chosen.model, OUT / "models")
    prefix = prompt_of(chosen.prefix, "so far")
    with (
        tempfile.TemporaryDirectory() as folder,
        Turns(kind, model, Path(folder), prefix, chosen.whole_rounds) as turns,
    ):
        computed_s = turns.first_token_s(turns.decode, [*prefix, *prompt_of(BLOCK, "kept")])
        print(f"the decode engine has computed {len(prefix)} tokens in {computed_s:.1f} s", flush=True)
        rounds = [turns.turn_six(number) for number in range(chosen.rounds + 1)][1:]  # the first one warms up
        records = [each for each in turns.records("prefill") if each["event"] == "prefix.fetched"]
        assert [each["tokens"] for each in records] == [len(prefix)] * (chosen.rounds + 1)
    for name in (FETCHED, CACHED, ALONE, WHOLE):
        show(f"{name}, ms", [1e3 * each[name] for each in rounds if name in each])
    for name, other in ((FETCHED, ALONE), (CACHED, ALONE), (FETCHED, CACHED), (WHOLE, FETCHED)):
        show(f"{name} / {other}", [each[name] / each[other] for each in rounds if name in each])
    show("the fetch, ms", [1e3 * each["seconds"] for each in records[1:]])


def measure_steps(chosen: argparse.Namespace) -> None:
    """Print times of steps with and without ``keep``, and their ratios."""
    folder, rounds = make(KEEPER.model, OUT / "models"), []
    with (
        Nursery() as nursery,
        Engine(
            KEEPER, folder, role="kv_consumer", name="keeper", secret="of one engine alone", nursery=nursery
        ) as engine,
    ):
        engine.wait_ready()
        for number in range(chosen.rounds + 1):
            requests, found = requests_of(number, chosen.answers), {}
            for keep in (True, False) if number % 2 else (False, True):
                answer = engine._command("round", f"round-{number}-{keep}", keep=keep, requests=requests)
                found[keep] = engine._await(answer, ANSWER_S)
                assert found[keep]["kept"] == (REQUESTS if keep else 0)
            rounds.append(found)
    for name, figure in {
        "p50 of steps": lambda found: statistics.median(found["steps_s"]),
        "p99 of steps": lambda found: quantile(sorted(found["steps_s"]), 0.99),
        "mean of steps": lambda found: statistics.fmean(found["steps_s"]),
        "p50 of steps in which a request ends": lambda found: statistics.median(found["ended_s"]),
        "p50 of the CPU of steps": lambda found: statistics.median(found["cpu_s"]),
        "mean of the CPU of steps": lambda found: statistics.fmean(found["cpu_s"]),
    }.items():
        kept, freed = (
            [figure(found[keep]) for found in rounds[1:]] for keep in (True, False)
        )  # the first one warms up
        show(f"{name}, ms, with keep", [1e3 * each for each in kept])
        show(f"{name}, ms, without", [1e3 * each for each in freed])
        show(f"{name}, ratio of a pair", [a / b for a, b in zip(kept, freed, strict=True)])


def requests_of(number: int, answers: int) -> list[dict[str, Any]]:
    """Return the requests of a round, which end one after the other."""
    draw = random.Random(number)
    return [
        {
            "id": f"{number}-{each}",
            "prompt": prompt_of(draw.randrange(40, 200), f"{number} {each}"),
            "max_tokens": draw.randrange(answers // 2, 3 * answers // 2),
        }
        for each in range(REQUESTS)
    ]


def show(name: str, values: Sequence[float]) -> None:
    low, middle, high = (quantile(sorted(values), share) for share in (0.25, 0.5, 0.75))
    print(f"{name:78} {middle:9.4f}   quartiles {low:.4f} to {high:.4f} of {len(values)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.shared_prefixes", description=__doc__)
    parser.add_argument("what", choices=("turns", "steps"))
    parser.add_argument(
        "--model", choices=("two-layers", "llama-chat", "llama-long"), default="two-layers", help="of turns"
    )
    parser.add_argument("--prefix", type=int, default=PREFIX, help=f"tokens of the chat so far, in blocks of {BLOCK}")
    parser.add_argument("--whole-rounds", type=int, default=3, help="in which the turn is computed whole, too")
    parser.add_argument("--answers", type=int, default=60, help="mean tokens of an answer, of steps")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    print("load average:", *os.getloadavg())
    (measure_turns if chosen.what == "turns" else measure_steps)(chosen)
    print("load average:", *os.getloadavg())
    return 0


if __name__ == "__main__":
    sys.exit(main())
