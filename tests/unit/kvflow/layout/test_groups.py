"""Groups have the published figures, window blocks are those that the next token needs, odd groups are refused."""

import json
from pathlib import Path

import msgspec
import pytest

from kvflow.errors import ArgumentInvalid, SpecInvalid
from kvflow.layout.groups import (
    Group,
    check_groups,
    plan_groups,
    resolve_layout,
    stripe_of,
    whole_tokens,
    window_blocks,
)
from kvflow.layout.placement import LAYOUTS
from kvflow.layout.shards import ALL_TOKENS, Shard
from kvflow.layout.specs import MLA, Mamba, Opaque, State
from tests.helpers.loops import looped

from .helpers import full, model, sliding

FIGURES = json.loads((Path(__file__).parents[4] / "tests/data/figures.json").read_text())["tensors_after_grouping"]
FULL_EVERY = {"gpt-2": 1, "gemma-3-4b-it": 6, "gemma-2-2b": 2, "gpt-oss-20b": 2}

LATENT = MLA(block_size=16, head_size=32, dtype="float16")
INDEX = MLA(block_size=16, head_size=12, dtype="float16")
STATE = Mamba(block_size=16, states=(State("ssm", (1000,), "float16", None),))


@looped("figure", FIGURES)
@looped("layout", LAYOUTS)
def test_published_models_have_the_published_groups(figure, layout):
    specs = model(layers=figure["layers"], full_every=FULL_EVERY[figure["model"]])
    kinds = [spec.kind for spec in specs.values()]
    assert (kinds.count("full"), kinds.count("sliding")) == (figure["full"], figure["sliding"])
    groups = plan_groups(specs, layout=layout)
    assert len(groups) == figure.get("groups", 1)
    assert max(len(group.layers) for group in groups) == figure["tensors"]


def test_groups_carry_what_their_layers_have_in_common():
    groups = plan_groups({"a": full(block_size=32, head_size=8), "b": sliding(block_size=16, head_size=16, window=7)})
    assert groups == (Group(("a",), "full", 32, 0), Group(("b",), "sliding", 16, 7))


@looped(
    "specs, expected",
    [
        ([full()], "LBNHC"),
        ([full(), sliding()], "LBNHC"),
        ([full(), full(head_size=16)], "LBNHC"),  # pages differ, but there is no MLA
        ([LATENT], "LBNHC"),
        ([LATENT, STATE], "LBNHC"),  # one page of attention; a state can be padded to it
        ([LATENT, INDEX], "BLHNC"),
        ([LATENT, full()], "BLHNC"),
        ([MLA(block_size=16, head_size=64, dtype="float16"), full()], "LBNHC"),
    ],
)
def test_auto_packs_compounds_and_whatever_it_is_asked_to(specs, expected):
    named = {f"layers.{index}": spec for index, spec in enumerate(specs)}
    assert resolve_layout(named, "auto") == expected
    assert resolve_layout(named, "auto", enable_cross_layers_blocks=True) == "BLHNC"


def test_auto_compares_the_pages_of_a_rank():
    specs = {"a": MLA(block_size=16, head_size=32, dtype="float16"), "b": full()}
    assert resolve_layout(specs, "auto") == "BLHNC"
    assert resolve_layout(specs, "auto", shard=Shard(tp_rank=1, tp_size=2)) == "LBNHC"


@looped("switch", ["True", "false", "", 1, None, 0.5])
def test_a_switch_that_is_no_bool_is_refused(switch):
    with pytest.raises(ArgumentInvalid, match="enable_cross_layers_blocks must be a bool, not"):
        resolve_layout({"a": full()}, "LBNHC", enable_cross_layers_blocks=switch)


@looped("layout", LAYOUTS)
def test_a_layout_that_is_named_is_taken(layout):
    assert resolve_layout({"a": LATENT, "b": INDEX}, layout, enable_cross_layers_blocks=True) == layout


@pytest.mark.parametrize("layout", ["NHD", "", "lbnhc", "BNHLC"])
def test_an_unknown_layout_is_refused(layout):
    for ask in (resolve_layout, lambda specs, name: plan_groups(specs, layout=name)):
        with pytest.raises(SpecInvalid, match="is unknown"):
            ask({"a": full()}, layout)


@pytest.mark.parametrize("specs", [{}, {"a": 7}, {"a": full(head_size=0)}])
def test_specs_are_checked_first(specs):
    for ask in (plan_groups, lambda specs: resolve_layout(specs, "auto")):
        with pytest.raises(SpecInvalid):
            ask(specs)


@looped("kind", ["sliding", "mla"])
@looped(
    "window, num_tokens, expected",
    [
        (16, 1, 1),
        (16, 16, 1),  # tokens 1 to 15 of block 0
        (16, 17, 2),  # tokens 2 to 16
        (16, 31, 1),  # tokens 16 to 30
        (16, 32, 1),
        (16, 33, 2),
        (17, 32, 1),  # tokens 16 to 31
        (18, 32, 2),  # token 15 as well
        (1024, 100, 7),
        (33, 64, 2),
        (34, 64, 3),
        (1, 16, 0),  # a window of one token sees only the token that is being computed
        (1, 17, 1),
    ],
)
def test_window_blocks(kind, window, num_tokens, expected):
    group = Group(("a",), kind, 16, window)
    in_all = -(-num_tokens // 16)
    read = {token // 16 for token in range(max(0, num_tokens - window + 1), num_tokens)}
    assert window_blocks(group, num_tokens) == expected
    assert read <= set(range(in_all - expected, in_all))


@looped(
    "chunk, num_tokens, expected",
    [
        (32, 1, 1),
        (32, 31, 2),
        (32, 32, 0),  # the next token begins a chunk, and a block
        (32, 33, 1),
        (32, 64, 0),
        (32, 79, 1),
        (32, 81, 2),
        (24, 24, 1),  # it begins a chunk, but in a block that is still to be filled
        (24, 33, 2),  # token 24 on, in block 1
        (8192, 100, 7),
    ],
)
def test_a_chunk_needs_the_blocks_from_its_first_token_on(chunk, num_tokens, expected):
    read = {token // 16 for token in range(num_tokens // chunk * chunk, num_tokens)}
    assert window_blocks(Group(("a",), "chunked", 16, chunk), num_tokens) == expected
    in_all = -(-num_tokens // 16)
    assert read <= set(range(in_all - expected, in_all))


@looped("kind", ["full", "mla", "cross", "opaque", "mixed"])
def test_other_kinds_need_every_block(kind):
    assert window_blocks(Group(("a",), kind, 16), 33) == 3


@pytest.mark.parametrize("num_tokens", [1, 16, 1000])
def test_a_state_is_one_block(num_tokens):
    assert window_blocks(Group(("a",), "mamba", 16), num_tokens) == 1


SPECS = {"a": full(), "b": full(), "c": sliding(window=8), "d": STATE, "e": Opaque(block_size=16, nbytes=9)}
GROUPS = (
    Group(("a", "b"), "full", 16),
    Group(("c",), "sliding", 16, 8),
    Group(("d",), "mamba", 16),
    Group(("e",), "opaque", 16),
)


@looped(
    "index, changes",
    [
        (0, {}),
        (0, {"block_size": 48}),
        (0, {"kind": "mixed"}),
        (1, {"page_bytes": 4096}),
        (2, {"block_size": 1}),  # a state is the same for any number of tokens
        (2, {"block_size": 1056}),
    ],
)
def test_groups_that_fit_the_specs_are_taken(index, changes):
    groups = [*GROUPS]
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    check_groups(SPECS, groups)


def test_layers_of_several_kinds_may_share_a_mixed_group():
    specs = {"a": full(), "b": sliding(), "c": LATENT}
    check_groups(specs, [Group(tuple(specs), "mixed", 16)])


@looped(
    "index, changes, words",
    [
        (0, {"layers": ("a",)}, r"\['b'\]"),
        (0, {"layers": ("a", "b", "x")}, r"\['x'\]"),
        (0, {"layers": ("a", "b", "c")}, r"\['c'\]"),
        (0, {"layers": ()}, r"\['a', 'b'\]"),
        (0, {"kind": "sliding"}, "layer 'a': kind is 'sliding'"),
        (0, {"window": 5}, "layer 'a': window is 5"),
        (0, {"kind": "mixed", "window": 5}, "window is 5.*expected 0"),
        (0, {"block_size": 8}, "layer 'a': block_size is 8"),
        (0, {"block_size": 24}, "layer 'a': block_size is 24"),
        (0, {"block_size": 0}, "layer 'a': block_size is 0"),
        (1, {"window": 0}, "layer 'c': window is 0"),
        (2, {"kind": "full"}, "layer 'd': kind is 'full'"),
        (3, {"block_size": 32}, "layer 'e': block_size is 32"),
    ],
)
def test_groups_that_do_not_fit_the_specs_are_refused(index, changes, words):
    groups = [*GROUPS]
    groups[index] = msgspec.structs.replace(groups[index], **changes)
    with pytest.raises(SpecInvalid, match=words):
        check_groups(SPECS, groups)


def test_layers_whose_kernels_take_other_blocks_are_groups_of_their_own():
    specs = {"a": full(block_size=64), "b": msgspec.structs.replace(full(block_size=64), kernel_block_size=16)}
    assert [group.layers for group in plan_groups(specs)] == [("a",), ("b",)]


HALF = Shard(dcp_rank=1, dcp_size=2, dcp_interleave=8)


@looped(
    "group, divided",
    [
        (Group(("a",), "full", 16), True),
        (Group(("a",), "mla", 16), True),
        (Group(("a",), "mixed", 16), True),
        (Group(("a",), "mla", 16, 64), False),
        (Group(("a",), "sliding", 16, 64), False),
        (Group(("a",), "chunked", 16, 64), False),
        (Group(("a",), "cross", 16), False),
        (Group(("a",), "mamba", 16), False),
    ],
)
def test_ranks_divide_tokens_where_every_block_is_kept(group, divided):
    assert stripe_of(group, HALF) == (HALF.stripe if divided else ALL_TOKENS)
    assert stripe_of(group, Shard()) == ALL_TOKENS
    assert window_blocks(group, 33) == (1 if group.kind == "mamba" else 3)
    assert window_blocks(group, 33, shard=HALF) == (2 if divided else window_blocks(group, 33))


@pytest.mark.parametrize(
    ("specs", "group", "words"),
    [
        ({"a": full()}, Group(("a",), "full", 20), "dcp_interleave is 8: expected a divisor of the 20 tokens"),
        ({"e": Opaque(block_size=16, nbytes=9)}, Group(("e",), "opaque", 16), "'opaque' and dcp_size is 2"),
        ({"d": STATE}, Group(("d",), "mixed", 16), "kind 'mixed' and keeps states, but dcp_size is 2"),
    ],
)
def test_what_ranks_cannot_divide_is_refused(specs, group, words):
    specs = {name: msgspec.structs.replace(spec, block_size=group.block_size) for name, spec in specs.items()}
    check_groups(specs, [group])
    with pytest.raises(SpecInvalid, match=words):
        check_groups(specs, [group], HALF)


@pytest.mark.parametrize("other", [STATE, full()], ids=["states", "tokens"])
def test_pages_of_an_unknown_kind_share_no_block_table(other):
    """Of one block id a request has one state, or some tokens: which it is of theirs, nobody knows."""
    specs = {"a": other, "e": Opaque(block_size=16, nbytes=9)}
    with pytest.raises(SpecInvalid, match="layers of kind 'opaque' share a block table"):
        check_groups(specs, [Group(("a", "e"), "mixed", 16)])
    with pytest.raises(SpecInvalid, match="layers of kind 'opaque' share a block table"):
        check_groups(specs, [Group(("e", "a"), "mixed", 16)])
    check_groups({"e": specs["e"]}, [Group(("e",), "mixed", 16)])


@looped("kind", ["full", "mla", "sliding", "chunked", "cross", "mamba", "opaque", "mixed"])
def test_blocks_settle_early_if_every_token_is_kept_where_it_was_written(kind):
    assert Group(("a",), kind, 16).settles == (kind in ("full", "mla"))


FULL, SLIDING, CHUNKED, STATES = (
    Group((), kind, 16, window) for kind, window in (("full", 0), ("sliding", 33), ("chunked", 32), ("mamba", 0))
)
WIDE = Group((), "sliding", 32, 33)


@looped(
    "reaches, lists, most, expected",
    [
        ([[FULL]], [[1, 2, 3]], 48, [48, 32, 16]),
        ([[FULL]], [[1, 2, 3]], 47, [47, 32, 16]),
        ([[SLIDING]], [[1, 2, 3]], 47, [47, 32, 16]),
        ([[SLIDING]], [[-1, 2, 3, 4]], 63, [63, 48]),
        ([[SLIDING]], [[-1, 2, -1]], 47, []),
        ([[FULL]], [[-1, 2, 3]], 48, [48, 32, 16]),  # of windows only
        ([[SLIDING]], [[1, 2, 3, 4, 5]], 80, [80, 64, 48, 32, 16]),
        ([[SLIDING]], [[1, 2, -1, 4, 5]], 80, [80, 32, 16]),
        ([[SLIDING]], [[4, 5]], 80, [80]),
        ([[SLIDING]], [[5]], 80, []),
        ([[SLIDING]], [[3, 4, 5]], 80, [80, 64]),
        ([[SLIDING]], [[]], 80, []),
        ([[SLIDING]], [[1, 2, 3, 4, -1]], 80, [64, 48, 32, 16]),
        ([[SLIDING]], [[-1, 2, 3, 4, 5]], 80, [80, 64, 48]),
        ([[CHUNKED]], [[-1, -1, 3, -1, 5]], 80, [80, 64, 48, 32]),
        ([[SLIDING, FULL]], [[4, 5]], 80, [80]),
        ([[FULL], [SLIDING], [STATES]], [[1, 2, 3], [2, 3], [9]], 48, [48]),
        ([[SLIDING], [WIDE]], [[3, 4, 5, 6], [1, 2, 3]], 96, [96, 64]),
        ([[SLIDING], [WIDE]], [[1, 2, 3, 4, 5, 6], [2, 3]], 96, [96, 64]),
        ([[SLIDING], [WIDE]], [[1, 2, 3, 4, 5, 6], [1, -1, 3]], 96, [96, 32]),
    ],
)
def test_whole_counts(reaches, lists, most, expected):
    assert list(whole_tokens(reaches, lists, [most] * len(reaches), most)) == expected
