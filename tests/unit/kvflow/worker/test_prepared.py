"""From a ticket and our blocks to what each rank must give, group by group."""

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from kvflow.errors import BlockRangeMismatch, ContentMismatch, TicketInvalid
from kvflow.layout.component import Region
from kvflow.layout.groups import Group
from kvflow.leases.issuer import Issuer
from kvflow.leases.tickets import RankAddress, block_ends
from kvflow.planning.plan import plan_transfer
from kvflow.worker.prepared import Source, parts_of, require_content
from tests.properties.caches import bindings

from .helpers import SPECS, cache_of

ADDRESS = RankAddress(0, "0" * 32, "tcp://127.0.0.1:5000", 0, 4)
EPOCHS = Region(8192, 64)
TWO_GROUPS = tuple(Group((name,), "full", 4) for name in SPECS)


def lists_of(source, target):
    return tuple(enumerate(bindings(plan_transfer(source, target), source, target), 10))


def ticket_of(block_ids, num_tokens):
    mint = Issuer("prefill-0", [ADDRESS], sign=lambda payload: bytes(32), lease_s=30.0)
    return mint.offer("request-1", block_ids=block_ids, num_tokens=num_tokens)[0]


def demanded(block_ids, num_tokens, *targets, target_groups=TWO_GROUPS):
    source = cache_of(groups=TWO_GROUPS).manifest()
    target = cache_of(groups=target_groups).manifest()
    member = next(ticket_of(block_ids, num_tokens).members())
    lists = [np.array(ids, np.int64) for ids in targets]
    found = parts_of(member.grant, peer_of(member, source), lists_of(source, target), lists)
    return {part.list_id: list(zip(part.pairs.source, part.pairs.target, strict=True)) for part in found}


def peer_of(member, manifest):
    """A rank that is connected, as far as this is about its cache."""
    advertisement = SimpleNamespace(manifest=manifest, num_slots=EPOCHS.nbytes // 8)
    return Source(SimpleNamespace(peer=member.peer, advertisement=advertisement))


def test_each_group_is_paired_by_itself():
    assert demanded([[3, 4], [5]], [8, 4], [1, 2], [7]) == {10: [(3, 1), (4, 2)], 11: [(5, 7)]}
    assert demanded([[3], [5, 6]], [4, 8], [1], [7, 0]) == {10: [(3, 1)], 11: [(5, 7), (6, 0)]}


def test_groups_that_need_nothing_are_left_out():
    assert demanded([[3, 4], [5]], [8, 4], [], [7]) == {11: [(5, 7)]}
    assert demanded([[3, 4], [5]], [8, 4], [-1, -1], []) == {}


def test_each_side_has_its_own_order_of_groups():
    reversed_groups = TWO_GROUPS[::-1]
    found = demanded([[3], [5]], [4, 4], [1], [2], target_groups=reversed_groups)
    assert sorted(found.values()) == [[(3, 2)], [(5, 1)]]


def test_the_tokens_of_a_group_are_those_of_the_source_group():
    one_group = (Group(tuple(SPECS), "full", 4),)
    found = demanded([[3, 4], [5, 6]], [8, 5], [1, 2], target_groups=one_group)
    assert sorted(found.values()) == [[(3, 1), (4, 2)], [(5, 1), (6, 2)]]


def test_a_ticket_with_one_block_in_overlapping_groups_is_refused():
    """Its producer has refused the grant, so that its lease would be waited for in vain."""
    with pytest.raises(TicketInvalid, match="block 3 is in groups 0 and 1"):
        demanded([[3], [3]], [4, 4], [1], [2])


def test_each_part_comes_with_the_binding_that_reads_it():
    source = cache_of(groups=TWO_GROUPS).manifest()
    member = next(ticket_of([[3], [5]], 4).members())
    prepared_lists, lists = lists_of(source, source), [np.array([1], np.int64), np.array([2], np.int64)]
    found = parts_of(member.grant, peer_of(member, source), prepared_lists, lists)
    assert [part.list_id for part in found] == [list_id for list_id, _ in prepared_lists]
    assert [part.binding for part in found] == [binding for _, binding in prepared_lists]


@pytest.mark.parametrize("block_ids", [[[8], [1]], [[1]], [[1], [2], [3]]])
def test_a_ticket_that_does_not_fit_the_peers_cache_is_invalid(block_ids):
    with pytest.raises(TicketInvalid, match="does not fit its cache") as caught:
        demanded(block_ids, 4, [1], [2])
    assert "prefill-0/0/" in caught.value.message


def test_tokens_that_the_ticket_lacks_are_refused():
    with pytest.raises(BlockRangeMismatch):
        demanded([[3], [5]], [8, 4], [1, 2], [7])


TOKENS = {4: b"four", 8: b"eight", 6: b"six"}
"""End of a block -> the digest of what stands before it."""


def told(block_ids, num_tokens, digests, block_sizes=(4, 4)):
    mint = Issuer("prefill-0", [ADDRESS], sign=lambda payload: bytes(32), lease_s=30.0, block_sizes=block_sizes)
    return mint.offer("request-1", block_ids=block_ids, num_tokens=num_tokens, digests=digests)[1]


def compared(grant, expected, *, source=None, target=None):
    source, target = source or cache_of(groups=TWO_GROUPS).manifest(), target or cache_of(groups=TWO_GROUPS).manifest()
    require_content(grant, lists_of(source, target), target, expected)


def test_equal_content_is_held_and_other_content_is_not():
    grant = told([[3, 4], [5]], [8, 4], [[b"four", b"eight"], [b"four"]])
    compared(grant, [(b"four", b"eight"), (b"four",)])
    compared(grant, [(b"eight",), (b"four",)])  # a shorter list means the last blocks
    compared(grant, [(b"", b"eight"), ()])  # nothing is expected of these
    for expected in ([(b"four", b"other"), (b"four",)], [(b"other", b"eight"), (b"four",)], [(), (b"eight",)]):
        with pytest.raises(ContentMismatch) as caught:
            compared(grant, expected)
        assert caught.value.group == (1 if not expected[0] else 0)


def test_a_ticket_without_digests_is_refused_where_content_is_expected():
    with pytest.raises(ContentMismatch, match="does not say"):
        compared(ticket_of([[3], [5]], 4).grants[0], [(b"four",), (b"four",)])


def test_a_block_that_the_producer_left_out_is_not_compared():
    grant = told([[-1, 4], [5]], [8, 4], [[b"", b"eight"], [b"four"]])
    compared(grant, [(b"anything", b"eight"), (b"four",)])


def manifest_of(block_size):
    specs = {name: msgspec.structs.replace(spec, block_size=block_size) for name, spec in SPECS.items()}
    return cache_of(specs=specs, groups=(Group(tuple(specs), "full", block_size),)).manifest()


@pytest.mark.parametrize(("theirs", "ours"), [(4, 8), (8, 4)])
def test_blocks_of_different_sizes_are_compared_where_they_end_together(theirs, ours):
    sides = {"source": manifest_of(theirs), "target": manifest_of(ours)}
    given, wanted = ([TOKENS[end] for end in block_ends(-(-6 // size), size, 6)] for size in (theirs, ours))
    ids = [[3, 4][: len(given)]]
    grant = told(ids, [6], [given], block_sizes=(theirs,))
    compared(grant, [wanted], **sides)
    with pytest.raises(ContentMismatch):
        compared(grant, [[*wanted[:-1], b"other"]], **sides)
    nowhere = told([[-1] * len(given)], [6], [[b""] * len(given)], block_sizes=(theirs,))
    with pytest.raises(ContentMismatch):  # nothing is left that could be compared
        compared(nowhere, [wanted], **sides)
