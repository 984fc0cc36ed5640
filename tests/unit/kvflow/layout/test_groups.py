"""Groups are those of vLLM's planner, figure for figure, and window blocks are those that the next token reads."""

import json

import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.groups import Group, check_groups, plan_groups, window_blocks

from .helpers import full, model, sliding

FULL_EVERY = {"gpt-2": 1, "gemma-3-4b-it": 6, "gemma-2-2b": 2, "gpt-oss-20b": 2}


@pytest.mark.parametrize("name", FULL_EVERY)
def test_published_models_have_the_published_groups(name, repository):
    figures = json.loads((repository / "tests/data/figures.json").read_text())["tensors_after_grouping"]
    figure = next(row for row in figures if row["model"] == name)
    specs = model(layers=figure["layers"], full_every=FULL_EVERY[name])
    kinds = [spec.kind for spec in specs.values()]
    assert (kinds.count("full"), kinds.count("sliding")) == (figure["full"], figure["sliding"])
    groups = plan_groups(specs)
    assert len(groups) == figure.get("groups", 1)
    assert max(len(group.layers) for group in groups) == figure["tensors"]
    assert sorted(layer for group in groups for layer in group.layers) == sorted(specs)


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "sizes"),
    [
        (4, 5, [4, 5]),  # 5 < 1.5 * 4: padding is cheaper than cutting
        (4, 6, [4, 3, 3]),  # 6 is not: buckets are cut at the shorter one's length
        (3, 7, [3, 3, 2, 2]),
        (1, 3, [1, 1, 1, 1]),
        (5, 0, [5]),
    ],
)
def test_buckets_are_cut_when_they_are_much_longer(num_full, num_sliding, sizes):
    specs = {f"f{index}": full() for index in range(num_full)} | {
        f"s{index}": sliding() for index in range(num_sliding)
    }
    assert [len(group.layers) for group in plan_groups(specs)] == sizes


def test_a_cut_bucket_deals_its_layers_out_in_turn():
    specs = {"f": full()} | {f"s{index}": sliding() for index in range(3)} | {"g": full()}
    assert [group.layers for group in plan_groups(specs)] == [("f", "g"), ("s0", "s2"), ("s1",)]


def test_groups_carry_what_their_layers_have_in_common():
    groups = plan_groups({"a": full(block_size=32, head_size=8), "b": sliding(block_size=16, head_size=16, window=7)})
    assert groups == (Group(("a",), "full", 32, 0), Group(("b",), "sliding", 16, 7))


def test_windows_of_different_lengths_are_different_groups():
    groups = plan_groups({"a": sliding(window=7), "b": sliding(window=8)})
    assert [group.window for group in groups] == [7, 8]


def test_pages_of_different_sizes_are_refused_by_name():
    with pytest.raises(SpecInvalid, match=r"'a' has 2048 bytes, 'b' has 4096"):
        plan_groups({"a": full(head_size=8), "b": full(head_size=16)})


@pytest.mark.parametrize(
    ("window", "num_tokens", "expected"),
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
def test_window_blocks(window, num_tokens, expected):
    group = Group(("a",), "sliding", 16, window)
    in_all = -(-num_tokens // 16)
    read = {token // 16 for token in range(max(0, num_tokens - window + 1), num_tokens)}
    assert window_blocks(group, num_tokens) == expected
    assert read <= set(range(in_all - expected, in_all))


def test_other_kinds_need_every_block():
    assert window_blocks(Group(("a",), "full", 16), 33) == 3


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ((Group(("a",), "full", 16),), r"\['b'\]"),
        ((Group(("a", "b", "c"), "full", 16),), r"\['c'\]"),
        ((Group(("a", "b"), "full", 16), Group(("a",), "full", 16)), r"\['a'\]"),
        ((Group(("a",), "sliding", 16, 8), Group(("b",), "full", 16)), "layer 'a'"),
        ((Group(("a", "b"), "full", 32),), "layer 'a'"),
        ((Group(("a", "b"), "full", 16, 5),), "layer 'a'"),
        ((Group(("a", "b"), "full", 16), Group((), "full", 16)), "no layers"),
        ((), r"\['a', 'b'\]"),
    ],
)
def test_groups_that_do_not_fit_the_specs_are_refused(groups, words):
    with pytest.raises(SpecInvalid, match=words):
        check_groups({"a": full(), "b": full()}, groups)
