# ruff: noqa: T201 - a script prints what it finds
"""Does a second thread that copies bring the first token sooner, also while the decode engine computes?

Two pairs of real engines, with ``copy_threads`` 1 and 2, in turns, as in ``beside_vllm``. While the decode engine is
busy, it decodes another request. From the root of the repository::

    .venv-vllm/bin/python -m tests.benchmarks.copying --models wide llama
"""

import argparse
import itertools
import statistics
import sys
from contextlib import ExitStack

from tests.benchmarks import beside_vllm
from tests.benchmarks.beside_vllm import PROMPTS, SERVED, Side, fresh_prompt, requests_of, settle
from tests.vllm.engines import KVFLOW, Nursery, Options, Pair
from tests.vllm.pairs import model_folder

THREADS = (1, 2)
BUSY_PROMPT, BUSY_TOKENS = 40, 40
"""Of the request that the decode engine decodes meanwhile."""
Found = tuple[float, float]
"""Median milliseconds to the first token, and milliseconds of CPU of a request on the decode side."""


def burst(side: Side, in_flight: int, *, busy: bool) -> Found:
    """Measure requests that arrive together, and whose prompts are computed by then."""
    prompts = [fresh_prompt(side._length) for _ in range(in_flight)]
    with side.awake():
        requests = requests_of(prompts, side._tickets(prompts))
        names = {each["id"] for each in requests}
        if busy:
            [other] = requests_of([fresh_prompt(BUSY_PROMPT)], [None])
            requests = [other | {"max_tokens": BUSY_TOKENS}, *requests]
        side._decode.take()
        answer = side._ask_burst(requests)
        cpu_s = answer["connector_s"] + side._decode.take()
        settle(side._pair.prefill)
    first_s = statistics.median(each["ttft_s"] for each in answer["requests"] if each["id"] in names)
    return first_s * 1e3, cpu_s * 1e3 / in_flight


def turns(sides: tuple[Side, Side], number: int, in_flight: int, *, busy: bool) -> tuple[Found, Found]:
    """Measure both sides, the second one first in every other round."""
    found = {}
    for side in sides if number % 2 == 0 else sides[::-1]:
        found[side.name] = burst(side, in_flight, busy=busy)
        for other in sides:
            if other is not side:
                other.breathe()
    return found[sides[0].name], found[sides[1].name]


def measure(model: str, chosen: argparse.Namespace, nursery: Nursery) -> None:
    with ExitStack() as stack:
        sides = []
        for threads in THREADS:
            options = Options(model, connector=KVFLOW, served=SERVED, extra={"copy_threads": threads})
            pair = stack.enter_context(Pair(model_folder(model), options, nursery=nursery))
            side = Side(str(threads), pair, PROMPTS[model])
            side.signal(beside_vllm.signal.SIGSTOP)
            stack.callback(side.signal, beside_vllm.signal.SIGCONT)
            sides.append(side)
        one, two = sides
        for number, busy in itertools.product(range(2), (False, True)):  # the first requests warm everything up
            turns((one, two), number, 2, busy=busy)
        for in_flight, busy in itertools.product(chosen.in_flight, (False, True)):
            rounds = [turns((one, two), number, in_flight, busy=busy) for number in range(chosen.rounds)]
            cells = [shown(rounds, at) for at in range(2)]
            name = f"{model}, {in_flight} in flight, {'busy' if busy else 'idle'}"
            print(f"{name}: first token, ms {cells[0]}; CPU of a request, ms {cells[1]}", flush=True)


def shown(rounds: list[tuple[Found, Found]], at: int) -> str:
    """Return the medians with one thread and with two, and the median of their ratios."""
    one, two = (statistics.median(each[side][at] for each in rounds) for side in range(2))
    ratio = statistics.median(after[at] / before[at] for before, after in rounds)
    return f"{one:.2f} -> {two:.2f} (x{ratio:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.copying", description=__doc__.split("\n")[1])
    parser.add_argument("--models", nargs="+", default=["wide", "llama"], choices=PROMPTS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 4])
    with Nursery() as nursery:
        chosen = parser.parse_args()
        for model in chosen.models:
            measure(model, chosen, nursery)
    return 0


if __name__ == "__main__":
    sys.exit(main())
