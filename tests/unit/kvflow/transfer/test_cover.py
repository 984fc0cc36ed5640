"""Which source ranks a pull reads: one that has everything, or several that share the target without overlap."""

import pytest

from kvflow.errors import LayoutMismatch
from kvflow.transfer.cover import choose_sources
from kvflow.transfer.plan import plan_transfer

from .helpers import full, manifest_of

SPECS = {"a": full(num_kv_heads=4), "b": full(num_kv_heads=4)}


def chosen(sources, target=(0, 1), specs=SPECS):
    to = manifest_of(specs, tp=target)
    return choose_sources(to, [plan_transfer(manifest_of(specs, tp=source), to) for source in sources])


@pytest.mark.parametrize(
    ("sources", "target", "expected"),
    [
        ([(0, 1)], (0, 1), (0,)),
        ([(0, 2), (1, 2)], (0, 2), (0,)),
        ([(0, 2), (1, 2)], (1, 2), (1,)),
        ([(0, 2), (1, 2)], (0, 1), (0, 1)),
        ([(1, 2), (0, 2)], (0, 1), (0, 1)),
        ([(0, 2), (1, 2)], (3, 4), (1,)),
        ([(0, 4), (1, 4), (2, 4), (3, 4)], (1, 2), (2, 3)),
        ([(0, 4), (0, 1)], (0, 1), (1,)),
        ([(0, 2), (0, 3), (1, 2)], (0, 1), (0, 2)),  # the second has nothing that the first has not
    ],
)
def test_sources(sources, target, expected):
    assert chosen(sources, target) == expected


def test_pipeline_stages_complete_each_other():
    to = manifest_of(SPECS)
    stages = [plan_transfer(manifest_of({name: SPECS[name]}), to) for name in ("b", "a")]
    assert choose_sources(to, stages) == (0, 1)


def test_what_no_rank_has_is_named():
    with pytest.raises(LayoutMismatch, match=r"a\.k differs: source has 'absent', target has 'head 2 is needed'"):
        chosen([(0, 2)])


def test_replicated_heads_are_read_once():
    few = {"a": full(num_kv_heads=2)}
    assert chosen([(rank, 4) for rank in range(4)], specs=few) == (0, 2)


def test_ranks_that_overlap_in_part_are_named():
    many = {"a": full(num_kv_heads=6)}
    with pytest.raises(LayoutMismatch, match="held by several ranks") as caught:
        chosen([(0, 2), (1, 3), (2, 3)], specs=many)
    assert caught.value.field == "a.k.head 2"
