# ruff: noqa: T201 - a script prints what it finds
"""Run a pair of engines by hand: is what they make together what one makes alone?

From the root of the repository, with the interpreter of an environment that has vLLM (``make test-vllm`` makes
``.venv-vllm``)::

    python -m tests.vllm.pair llama --connector KVFlowConnector
    python -m tests.vllm.pair gptoss --connector NixlConnector --lengths 40 150 333
    python -m tests.vllm.pair llama --layout BLHNC --decode-layout LBHNC --block-size 32 --decode-block-size 128
    python -m tests.vllm.pair llama --extra '{"lease_s": 5}' --ask     # then generate, abort, ... from a Python prompt

Logs of the engines are under ``out/vllm/logs``; the last lines say which. Exits 1 if any tokens differ.
"""

import argparse
import code
import json
import sys
import time
from dataclasses import replace
from typing import Any

from .engines import KVFLOW, OUT, Nursery, Options, Pair
from .prompts import PROMPT_LENGTHS, prompt_of
from .tiny_models import CONFIGS, make


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm.pair", description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=CONFIGS)
    parser.add_argument("--connector", default=KVFLOW)
    parser.add_argument("--lengths", type=int, nargs="*", default=PROMPT_LENGTHS, help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated")
    parser.add_argument(
        "--chunk", action="store_true", help="alone, compute the last token of a prompt in its own step"
    )
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--policy", default="fail", choices=["fail", "recompute"])
    parser.add_argument("--layout", default="")
    parser.add_argument("--decode-layout")
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--decode-block-size", type=int)
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel")
    parser.add_argument("--decode-ranks", type=int)
    parser.add_argument("--dtype", default="")
    parser.add_argument("--extra", type=json.loads, default={}, help="kv_connector_extra_config, JSON")
    parser.add_argument("--llm", type=json.loads, default={}, help="further arguments of vllm.LLM, JSON")
    parser.add_argument("--ask", action="store_true", help="afterwards open a Python prompt with `pair`")
    return parser.parse_args()


def options_of(chosen: argparse.Namespace) -> tuple[Options, Options]:
    prefill = Options(
        model=chosen.model,
        connector=chosen.connector,
        block_size=chosen.block_size,
        layout=chosen.layout,
        prefix_caching=chosen.prefix_caching,
        failure_policy=chosen.policy,
        ranks=chosen.ranks,
        dtype=chosen.dtype,
        extra=chosen.extra,
        llm=chosen.llm,
    )
    layout = chosen.layout if chosen.decode_layout is None else chosen.decode_layout
    block_size = chosen.block_size if chosen.decode_block_size is None else chosen.decode_block_size
    ranks = chosen.ranks if chosen.decode_ranks is None else chosen.decode_ranks
    return prefill, replace(prefill, layout=layout, block_size=block_size, ranks=ranks)


def show(pair: Pair, length: int, chosen: argparse.Namespace) -> bool:
    """Compare one prompt, print a line, and return whether the tokens are equal."""
    prompt = prompt_of(length)
    last_alone = {"chunk": length - 1} if chosen.chunk else {}
    alone = pair.monolithic(prompt, max_tokens=chosen.tokens, **last_alone)
    pair.decode.state()
    started = time.monotonic()
    params: Any = pair.ticket(prompt)
    prefilled = time.monotonic()
    answer = pair.decode.generate(prompt, params, max_tokens=chosen.tokens)
    ended = time.monotonic()
    together = answer.get("tokens")
    equal = alone == together
    state = pair.decode.state()
    print(
        f"{length:4} tokens  {'equal' if equal else 'DIFFERENT'}  prefill {prefilled - started:.2f} s,"
        f" decode {ended - prefilled:.2f} s  descriptors {state['descriptors']}  {answer['finish_reason']}"
    )
    if not equal:
        print(f"  alone    {alone}\n  together {together}\n  {answer.get('error', '')}")
    return equal


def main() -> int:
    chosen = arguments()
    folder = make(chosen.model, OUT / "models")
    started = time.monotonic()
    with Nursery() as nursery, Pair(folder, *options_of(chosen), nursery=nursery) as pair:
        print(f"ready in {time.monotonic() - started:.1f} s; {pair.prefill.log} {pair.decode.log}")
        print("prefill", pair.prefill.state(), "\ndecode ", pair.decode.state())
        outcomes = [show(pair, length, chosen) for length in chosen.lengths]
        if chosen.ask:
            code.interact(local={"pair": pair, "prompt_of": prompt_of})
        for engine in (pair.prefill, pair.decode):
            state = engine.wait_state(lambda state: state["held"] == 0)
            print(f"{engine.name}: {state['free_blocks']} of {state['blocks']} blocks are free again")
    print(f"{sum(outcomes)} of {len(outcomes)} equal")
    return 0 if all(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
