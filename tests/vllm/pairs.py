"""The pairs of engines that tests talk about, by name, and one of them running at a time."""

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .engines import DISK, KVFLOW, NIXL, OUT, Engine, EngineFailed, Nursery, Options, Pair, look, run_with_vllm
from .tiny_models import CONFIGS, DRAFT, folder_of

SECRET = "of engines without a pair, long enough"
NUMBERS = itertools.count()
FULL = os.environ.get("KVFLOW_TEST_VLLM") == "full"

LEASE_S = 15.0
"""A test that lets a lease run out waits for it."""

RENEWED_S = 6.0
"""Of engines that renew their open leases: what nobody reads runs out after each test."""

# gpt-oss computes what it could not read, the others fail: both policies are met without further engines.
LLAMA = Options("llama", extra={"lease_s": LEASE_S})
GPTOSS = Options("gptoss", extra={"lease_s": LEASE_S}, failure_policy="recompute")
GRANITE, QWEN3_NEXT = Options("granite"), Options("qwen3next")

MODELS = {
    "llama": LLAMA,
    "gptoss": GPTOSS,
    "granite": GRANITE,
    "gemma3": Options("gemma3"),
    "qwen3next": QWEN3_NEXT,
}
"""The usual pair of each model: both sides alike, and as vLLM would have them."""
USUAL = ("llama", "gptoss", "granite")

RANKS_LOG = OUT / "logs" / "ranks.jsonl"
"""Records of all ranks of all engines that have several or read them."""


def await_all(find: Callable[[], list[Any]], number: int = 1) -> list[Any]:
    """Wait until a search finds so many records, and return them: they are written after what they tell of."""
    return look(find, lambda found: len(found) >= number, lambda found: f"{len(found)} of {number} records")


def _variants(model: str, options: Options) -> dict[str, tuple[Options, Options]]:
    """Return the pairs of a model whose sides keep their caches in other ways.

    What cannot be read fails: an engine that computes it instead would say the same.
    """
    options = replace(options, failure_policy="fail")
    packed = replace(options, layout="BLHNC")
    heads_first = replace(options, layout="BHLNC")
    small, large = replace(options, block_size=32), replace(options, block_size=128)
    cached = replace(options, prefix_caching=True)
    return {
        f"{model}-packed": (packed, packed),
        f"{model}-packed-heads-first": (heads_first, heads_first),
        f"{model}-packed-to-layers": (packed, options),
        f"{model}-layers-to-packed": (options, packed),
        f"{model}-32-to-128": (small, large),
        f"{model}-128-to-32": (large, small),
        f"{model}-cached": (cached, cached),
        f"{model}-cached-32": (replace(cached, block_size=32),) * 2,
    }


def _ranks(options: Options, prefill: int, decode: int) -> tuple[Options, Options]:
    """Return a pair whose sides divide the heads among so many ranks.

    Two ranks add what one adds in another order, which shows in the tokens of a small model in bfloat16. In float32 it
    does not: there, one engine alone says the same whatever its ranks. Leases outlast every patience, so that none ends
    unless it is given back.
    """
    dtype = "" if options is QWEN3_NEXT else "float32"  # on CPUs vLLM has its linear attention in bfloat16 only
    options = replace(options, dtype=dtype, extra={"lease_s": 300.0, "log_file": str(RANKS_LOG)})
    return replace(options, ranks=prefill), replace(options, ranks=decode)


def _parallel() -> dict[str, tuple[Options, Options]]:
    """Return the pairs of which at least one side has several ranks."""
    one_head = replace(LLAMA, model="llama-one-head")
    twice = replace(LLAMA, ranks=2)
    small, large = replace(LLAMA, block_size=32, layout="BLHNC"), replace(LLAMA, block_size=128)
    return {
        "llama-ranks-2-to-1": _ranks(LLAMA, 2, 1),
        "llama-ranks-1-to-2": _ranks(LLAMA, 1, 2),
        "llama-ranks-2-to-2": (twice, twice),  # alike, so that bfloat16 will do; leases end
        "gptoss-ranks-1-to-2": _ranks(GPTOSS, 1, 2),
        "gptoss-ranks-2-to-1": _ranks(replace(GPTOSS, failure_policy="fail"), 2, 1),
        "gptoss-ranks-2-to-2": _ranks(replace(GPTOSS, failure_policy="fail"), 2, 2),
        "llama-one-head-ranks-1-to-2": _ranks(one_head, 1, 2),
        "llama-one-head-ranks-2-to-1": _ranks(one_head, 2, 1),
        "llama-ranks-2-to-1-packed-32-to-128": (_ranks(small, 2, 1)[0], _ranks(large, 2, 1)[1]),
        "granite-ranks-2-to-2": _ranks(GRANITE, 2, 2),
        "granite-ranks-2-to-1": _ranks(GRANITE, 2, 1),
        "granite-ranks-1-to-2-turned": (_ranks(GRANITE, 1, 2)[0], turned(_ranks(GRANITE, 1, 2)[1])),
        "granite-ranks-2-to-4": _ranks(GRANITE, 2, 4),
        "qwen3next-ranks-2-to-2": (replace(QWEN3_NEXT, ranks=2),) * 2,
        "qwen3next-ranks-1-to-2": _ranks(QWEN3_NEXT, 1, 2),
        "qwen3next-ranks-2-to-1-turned": (turned(_ranks(QWEN3_NEXT, 2, 1)[0]), _ranks(QWEN3_NEXT, 2, 1)[1]),
        "qwen3next-ranks-2-to-4": _ranks(QWEN3_NEXT, 2, 4),
        "llama-stages-2-to-1": _stages(_ranks(LLAMA, 1, 1), 2, 1),
        "gemma3-stages-1-to-2": _stages(_ranks(Options("gemma3"), 1, 1), 1, 2),
        "gptoss-stages-2-to-2": _stages(_ranks(replace(GPTOSS, failure_policy="fail"), 1, 1), 2, 2),
        "llama-stages-2-ranks-2-to-1": _stages(_ranks(LLAMA, 2, 1), 2, 2),
        "llama-stages-2-ranks-2-to-one": _stages(_ranks(LLAMA, 2, 1), 2, 1),
        "llama-stages-4-to-1": _stages(_ranks(LLAMA, 1, 1), 4, 1),
        "llama-stages-1-to-4": _stages(_ranks(LLAMA, 1, 1), 1, 4),
        "llama-stages-4-to-2": _stages(_ranks(LLAMA, 1, 1), 4, 2),
        "llama-stages-2-to-4": _stages(_ranks(LLAMA, 1, 1), 2, 4),
    }


def _stages(sides: tuple[Options, Options], prefill: int, decode: int) -> tuple[Options, Options]:
    """Return a pair whose sides divide the layers among so many stages."""
    return replace(sides[0], stages=prefill), replace(sides[1], stages=decode)


def turned(options: Options) -> Options:
    """Return the same engine with convolution states that lie channels last: on CPUs vLLM does not by itself."""
    return replace(options, variables={"VLLM_SSM_CONV_STATE_LAYOUT": "SD"})


def _with_nixl(options: Options) -> tuple[Options, Options]:
    """Return the same pair with vLLM's own connector."""
    return (replace(options, connector=NIXL, extra={}),) * 2


PAIRS: dict[str, tuple[Options, Options]] = {name: (options, options) for name, options in MODELS.items()}
PAIRS |= {
    # The policy that the model's usual pair has not.
    "llama-recompute": (replace(LLAMA, failure_policy="recompute"),) * 2,
    "gptoss-fail": (replace(GPTOSS, failure_policy="fail"),) * 2,
}
VARIANTS = _variants("llama", LLAMA) | _variants("gptoss", GPTOSS)
PAIRS |= VARIANTS
# Blocks of a hybrid model are as large as a state, or larger: 256 tokens of this one.
PAIRS["granite-1024-to-512"] = replace(GRANITE, block_size=1024), replace(GRANITE, block_size=512)
PARALLEL = _parallel()
USUAL_PARALLEL = ("llama-ranks-2-to-1", "gptoss-ranks-1-to-2", "granite-ranks-2-to-1", "gemma3-stages-1-to-2")
E4M3 = replace(LLAMA, dtype="float32", llm={"kv_cache_dtype": "fp8_e4m3"})
E5M2 = replace(LLAMA, dtype="float32", llm={"kv_cache_dtype": "fp8_e5m2"})
# On CPUs only AVX-512 and AMX have fp8 caches. In float32 both have the same kernel.
FLOAT8 = {"llama-fp8-e4m3": (E4M3, E4M3), "llama-fp8-e5m2": (E5M2, E5M2)}
USUAL_FLOAT8 = "llama-fp8-e4m3"
PAIRS |= FLOAT8
REFUSED_FLOAT8 = {"llama-fp8-e4m3-to-e5m2": (E4M3, E5M2)}
"""A byte of one fp8 means another number in the other."""
REFUSED = {"lfm2-ranks-2-to-1": _ranks(Options("lfm2"), 2, 1)}
"""Nobody knows how ranks divide these states: such engines do not read each other. More are behind ``DRAFTS``."""
PAIRS |= PARALLEL | REFUSED | REFUSED_FLOAT8
CACHED = [name for name in VARIANTS if "-cached" in name]
PACKED = ("llama-packed", "llama-packed-heads-first", "gptoss-packed")
BESIDE = {f"{name}-nixl": _with_nixl(PAIRS[name][0]) for name in (*MODELS, *PACKED)}
PAIRS |= BESIDE


LOGGED = replace(LLAMA, extra={"lease_s": LEASE_S, "log_file": str(RANKS_LOG)})
BESIDE_DISK = replace(LOGGED, beside={DISK: {}})
MULTI = {
    f"llama-multi-{place}-{policy}": (replace(BESIDE_DISK, last=place == "last", failure_policy=policy),) * 2
    for policy in ("fail", "recompute")
    for place in ("first", "last")
}
"""Pairs of ``MultiConnector``, in which kvflow stands before or behind a connector that keeps prompts on a disk."""
USUAL_MULTI = ("llama-multi-first-fail", "llama-multi-last-recompute")
ALIASED = {
    "llama-alias": (
        replace(LOGGED, connector=NIXL, module_path="kvflow.integrations.vllm"),
        replace(LOGGED, connector=KVFLOW, module_path="kvflow.integrations.vllm"),
    )
}
"""The connector by another name, and by the path of its module."""
PAIRS |= MULTI | ALIASED

# In float32, so that a step of several drafted tokens computes what steps of one do.
ALONE = replace(LOGGED, model="llama-drafted", dtype="float32")
SPECULATIVE = {
    "method": "eagle",
    "model": str(folder_of("llama-drafted", OUT / "models") / DRAFT),
    "num_speculative_tokens": 2,
}
DRAFTING = replace(ALONE, llm={"speculative_config": SPECULATIVE, "disable_log_stats": False})
DRAFTS = {
    "llama-drafts-both": (DRAFTING, DRAFTING),
    "llama-drafts-decode": (ALONE, DRAFTING),
    "llama-drafts-prefill": (DRAFTING, ALONE),
}
"""Pairs of which at least one side has a draft model."""
REFUSED["llama-drafts-never"] = ALONE, replace(DRAFTING, extra={"rebuild_layers": "never"})
PAIRS |= DRAFTS | REFUSED


def chosen(*names: str) -> list[str]:
    """Return those of the pairs that this run starts: all, or only the usual ones."""
    return [name for name in names if FULL or name in (*USUAL, *USUAL_PARALLEL, *USUAL_MULTI, USUAL_FLOAT8)]


def model_folder(name: str) -> Path:
    """Return a model's folder, and make the model first if nobody has."""
    folder = folder_of(name, OUT / "models")
    if not folder.exists():
        # All at once: half a minute is mostly imports.
        names = list(CONFIGS) if FULL else sorted({*USUAL, name})
        run_with_vllm("-m", "tests.vllm.tiny_models", str(folder.parent), *names)
    return folder


class Pairs:
    """Starts pairs by name; the last one runs until another is asked for."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.name = ""
        self.running: Pair | None = None
        self.broken: dict[str, str] = {}

    def get(self, name: str) -> Pair:
        """Return a running pair.

        Raises:
            EngineFailed: it did not start, now or when it was asked for before.
        """
        if name == self.name and self.running is not None and self.running.alive:
            return self.running
        if name in self.broken:
            raise EngineFailed(f"{name} did not start: {self.broken[name]}")
        self.stop()
        prefill, decode = PAIRS[name]
        try:
            self.running = Pair(model_folder(prefill.model), prefill, decode, nursery=self.nursery).start()
        except EngineFailed as error:
            self.broken[name] = str(error)
            raise
        self.name = name
        return self.running

    def pair(self, prefill: Options, decode: Options | None = None) -> Pair:
        """Return a pair without a name, to be started; none other runs."""
        self.stop()
        return Pair(model_folder(prefill.model), prefill, decode, nursery=self.nursery)

    def engine(self, options: Options, role: str, name: str) -> Engine:
        """Return an engine without a pair, which starts; no pair runs, and all such engines share ``SECRET``."""
        self.stop()
        name = f"{name}-{next(NUMBERS)}"
        folder = model_folder(options.model)
        return Engine(options, folder, role=role, name=name, secret=SECRET, nursery=self.nursery)

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()
        self.running = None
