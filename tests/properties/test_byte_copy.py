"""Any engine to any engine: what plans move is what a copy by coordinates moves, byte for byte.

The oracle writes the model's bytes through the sources' views, and what should become of them through the target's.
Every wanted byte must arrive once and be right, and nothing else of the target's memory may have been written.
"""

import random
from collections import Counter
from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from .caches import thorough, thoroughly
from .engines import (
    KV_FORMS,
    LAYOUTS,
    MEMORIES,
    SPECS,
    TARGETS,
    generate_case,
    generate_model,
    generate_stage,
)
from .moves import require_right_bytes
from .oracle import Pool
from .pools import open_cache

PAIRS = 600
"""Of a source engine and a rank of a target engine: one example has ``TARGETS``. ``make test-exhaustive`` has
many more."""
many = thoroughly(PAIRS // TARGETS)
seeds = st.integers(0, 2**32)


choices = st.binary(min_size=176, max_size=176)
"""What Hypothesis chooses, a byte each: one draw takes as long as a single one of 176 would."""


def picker(chosen):
    """Pick by the next byte, so that a failing case shrinks towards the first of all options."""
    rest = iter(chosen)
    return lambda options: options[next(rest, 0) % len(options)]


@st.composite
def cases(draw):
    return generate_case(picker(draw(choices)), draw(seeds))


@st.composite
def stages(draw):
    pick = picker(draw(choices))
    model = generate_model(pick)
    return generate_stage(pick, model, list(model.layers), 1)


@many
@given(cases())
def test_every_wanted_byte_arrives_once_and_nothing_else_changes(case):
    require_right_bytes(case)


@thorough
@given(stages(), seeds)
def test_the_oracle_assigns_each_byte_to_one_layer_of_a_group(stage, seed):
    """The oracle itself stands on this: layers of a group, roles and blocks have bytes of their own."""
    cache, memory = open_cache(stage, 0, 2, np.random.default_rng(seed))
    pool = Pool(stage, 0, cache, memory, [])
    for group in stage.groups:
        memory[:] = 0
        counted = 0
        for cells in all_cells(pool, group):
            np.add(cells, 1, out=cells)
            counted += cells.size
        assert memory.max() == 1
        assert memory.sum() == counted


def all_cells(pool, group):
    """Everything that one group keeps, as arrays of bytes."""
    for layer in group.layers:
        kind = pool.stage.layers[layer]
        if kind.tokens:
            yield from (cells for _, cells in pool.cells(layer))
        else:
            yield from (pool.state(layer, index) for index in range(len(kind.states)))


def test_every_kind_of_engine_is_generated():
    """A generator that never makes something leaves it unproven without anyone noticing."""
    choose = random.Random(0)
    cases = [generate_case(choose.choice, seed) for seed in range(800)]
    stages = {id(stage): stage for case in cases for stage, _ in (*case.sources, *case.targets)}.values()
    specs = [spec for stage in stages for spec in stage.specs.values()]
    assert {spec.kind for spec in specs} == set(SPECS)
    assert {(stage.layout, stage.kv, stage.memory) for stage in stages} == {*product(LAYOUTS, KV_FORMS, MEMORIES)}
    sizes = {(case.sources[0][0].tp_size, stage.tp_size) for case in cases for stage, _ in case.targets}
    assert sizes == {*product(range(1, 9), range(1, 9))}
    sizes = {(case.sources[0][0].dcp_size, stage.dcp_size) for case in cases for stage, _ in case.targets}
    assert sizes == {*product(range(1, 5), range(1, 5))}
    assert {stage.nested for stage in stages if stage.dcp_size > 1} == {False, True}
    assert any(stage.dcp_size > 1 and stage.interleave > 1 for stage in stages)
    assert all(
        any(map(holds, specs))
        for holds in (
            lambda spec: spec.kernel_block_size not in (0, spec.block_size),
            lambda spec: getattr(spec, "quantization", None) == "nvfp4",
            lambda spec: getattr(spec, "quantization", None) == "fp8_per_token_head",
            lambda spec: getattr(spec, "head_size_v", 0) not in (0, getattr(spec, "head_size", 0)),
            lambda spec: spec.kind == "mla" and spec.rope_size and spec.scale_bytes and spec.window,
            lambda spec: spec.kind == "mamba" and any(state.shard_axis for state in spec.states),
        )
    )
    kinds = Counter()
    for stage in stages:
        kinds.update(group.kind for group in stage.groups)
        kinds["padded"] += any(group.page_bytes for group in stage.groups)
    assert kinds["mixed"]
    assert kinds["padded"]
