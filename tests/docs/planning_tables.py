"""The tables of docs/explanation/planning.md: descriptors of bundled models, counted by pairing and binding block ids.

    python -m tests.docs.planning_tables

writes them into the page.
"""

import re
from functools import cache
from pathlib import Path

import numpy as np

from kvflow.layout.component import Region
from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups, window_blocks
from kvflow.layout.shards import Shard
from kvflow.models import align_states, load
from kvflow.planning.assignment import assign_sources
from kvflow.planning.bind import Binding
from kvflow.planning.pairs import pair_units
from kvflow.planning.plan import plan_transfer

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "planning.md"
APART = "LBNHC split"
LAYOUTS = {
    APART: ("LBNHC", "split"),
    "LBHNC": ("LBHNC", "content"),
    "BLHNC": ("BLHNC", "content"),
    "BHLNC": ("BHLNC", "content"),
}
TP_PAIRS = ((1, 1), (4, 2), (3, 2))
MODELS = ("deepseek-v3", "gpt-oss-20b", "llama-3.1-8b", "qwen3-next")
TOKENS = (16, 10240)
"""Prompts of 1 and 640 blocks of 16 tokens."""

HEADS = ("model", "layout", *(str(tokens // 16) for tokens in TOKENS), "640 in order", "vLLM 0.33, 640")
EXAMPLE = ("llama-3.1-8b", APART)


@cache
def specs_of(name, tp_size):
    return align_states(load(name), shard=Shard(tp_size=tp_size))


@cache
def groups_of(name, layout, tp_size):
    return plan_groups(specs_of(name, tp_size), layout=layout, shard=Shard(tp_size=tp_size))


@cache
def is_divided(name):
    """Whether ranks hold different parts of the cache; latents they hold whole."""
    return any(part.shape[part.shard_axis] > 1 for spec in load(name).values() for part in spec.components)


def manifest_of(name, form, tp_rank, tp_size):
    return _manifest_of(name, form, tp_rank, tp_size) if is_divided(name) else _manifest_of(name, form, 0, 1)


@cache
def _manifest_of(name, form, tp_rank, tp_size):
    """One rank's cache of twice as many blocks as the longest list, so that ids can be apart."""
    layout, kv = LAYOUTS[form]
    specs, groups = specs_of(name, tp_size), groups_of(name, layout, tp_size)
    num_blocks = 2 * max(blocks_of(groups, TOKENS[-1]))
    shard = Shard(tp_rank=tp_rank, tp_size=tp_size)
    plan = plan_cache(specs, groups, layout=layout, kv=kv, shard=shard, num_blocks=num_blocks)
    return plan.manifest(Region(1 << 30, plan.nbytes))


def blocks_of(groups, num_tokens):
    """How many blocks of each group a decode worker needs: windows end, and a state is one block."""
    return [window_blocks(group, num_tokens) for group in groups]


def counted(name, form, source_tp, target_tp):
    """Descriptors that the last target rank reads of all sources: by prompt, ids apart; then the longest, in order."""
    target = manifest_of(name, form, target_tp - 1, target_tp)
    sources = [manifest_of(name, form, rank, source_tp) for rank in range(source_tp)]
    bindings = [
        (group, binding_of(group, sources[share.source], target))
        for share in assign_sources(target, sources)
        for group in plan_transfer(sources[share.source], target, head_ranges=share.head_ranges).groups
    ]
    layout = LAYOUTS[form][0]
    sides = groups_of(name, layout, source_tp), groups_of(name, layout, target_tp)

    def total(num_tokens, step):
        source_blocks, target_blocks = (blocks_of(groups, num_tokens) for groups in sides)
        return sum(
            binding.count_merged(
                pair_units(
                    group,
                    np.arange(source_blocks[group.source_group]) * step,
                    np.arange(target_blocks[group.target_group]) * step,
                    num_tokens=num_tokens,
                )
            )
            for group, binding in bindings
        )

    return [*(total(num_tokens, 2) for num_tokens in TOKENS), total(TOKENS[-1], 1)]


def binding_of(group, source, target):
    return Binding(group, source, target)


def vllm(name, form, source_tp, target_tp):
    """What vLLM 0.33 needs for the longest prompt, ids apart: a formula, or in words why there is none."""
    groups = groups_of(name, "LBHNC", target_tp)
    latent, states = groups[0].kind == "mla", any(group.kind == "mamba" for group in groups)
    unequal = source_tp != target_tp and not latent
    cases = {
        "TP must divide": source_tp % target_tp and target_tp % source_tp,
        "none": form == APART,
        "no states": form == "BHLNC" and states,
        "equal TP only": form == "BHLNC" and unequal,
        "unknown": (unequal and (states or form == "BLHNC"))
        or (states and form == "BLHNC")
        or (form == "BHLNC" and len(groups) > 1),
    }
    reason = next((words for words, holds in cases.items() if holds), "")
    if reason:
        return reason
    counts = zip(groups, blocks_of(groups, TOKENS[-1]), strict=True)
    pieces = sum(4 if group.kind == "mamba" else count for group, count in counts)
    # A row is one region for latents, and for heads first if a rank has two heads or more, as all of these have.
    rows = form == "BHLNC" or (latent and form == "BLHNC")
    regions = 1 if rows else max(len(group.layers) for group in groups)
    sources = max(1, source_tp // target_tp) if unequal else 1
    return f"{regions * pieces * sources:,}"


def row(name, form, source_tp, target_tp):
    counts = [f"{count:,}" for count in counted(name, form, source_tp, target_tp)]
    return (name, form, *counts, vllm(name, form, source_tp, target_tp))


def table(source_tp, target_tp):
    """Return one table: every model in every layout, but in the last table only models whose counts differ."""
    rules = ("---", "---", *["---:"] * (len(TOKENS) + 1), "---")
    cases = [(name, form) for name in MODELS for form in LAYOUTS if is_divided(name) or form != APART]
    made = [row(name, form, source_tp, target_tp) for name, form in cases]
    if (source_tp, target_tp) == TP_PAIRS[-1]:
        known = {row(name, form, *TP_PAIRS[-2])[:-1] for name, form in cases}
        differing = {cells[0] for cells in made if cells[:-1] not in known}
        made = [cells for cells in made if cells[0] in differing]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (HEADS, rules, *made))


def example():
    """Return what a plan says of itself."""
    source, target = (manifest_of(*EXAMPLE, 0, tp_size) for tp_size in (4, 2))
    return f"```text\n{plan_transfer(source, target).explain()}\n```"


def with_tables(text):
    """Return a page with what stands between its marks made anew."""
    made = {f"TP {source_tp} to {target_tp}": table(source_tp, target_tp) for source_tp, target_tp in TP_PAIRS}
    for mark, lines in {"explain": example(), **made}.items():
        text, found = re.subn(
            f"<!-- {mark} -->\n.*?<!-- end -->",
            lambda _, mark=mark, lines=lines: f"<!-- {mark} -->\n{lines}\n<!-- end -->",
            text,
            flags=re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"{PAGE.name} has {found} places for {mark!r}, expected 1")
    return text


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
