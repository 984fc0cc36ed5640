"""Tracks against every byte of every component, one by one: all of a block's bytes, and none of another's."""

from collections import defaultdict
from itertools import product

import pytest

from kvflow.layout import tracks as module
from kvflow.layout.component import Component, Region
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup
from kvflow.layout.tracks import Track, tracks_of

BASE = 1 << 20


def part(offset, block_stride, *, role="k", heads=(1, 0), tokens=(1, 0), content=4, kernel_stride=0, region=0):
    """A component of bytes: heads and tokens as (extent, stride)."""
    extents, strides = (heads[0], tokens[0], content), (heads[1], tokens[1], 1)
    return Component(
        role, "uint8", region, offset, block_stride, kernel_stride, extents, strides, total=extents[0], token_axis=1
    )


def cache(*groups, num_blocks=3, regions=None, kernel_blocks=1):
    """A manifest of groups, each of which is a list of components of one layer each."""
    made = [
        ManifestGroup(
            "full",
            components[0].num_tokens * kernel_blocks,
            tuple(Layer(f"{index}.{at}", "full", 0, (each,)) for at, each in enumerate(components)),
        )
        for index, components in enumerate(groups)
    ]
    return Manifest(num_blocks, regions or (Region(BASE, 4096),), tuple(made))


def owners(manifest):
    """Address -> {(group, block)} of every byte of every element."""
    found = defaultdict(set)
    for index, group in enumerate(manifest.groups):
        for each in (each for layer in group.layers for each in layer.components):
            first = manifest.regions[each.region].address + each.offset
            places = product(range(manifest.num_blocks), range(group.kernel_blocks), *map(range, each.extents))
            for block, kernel, *element in places:
                at = first + block * each.block_stride + kernel * each.kernel_stride
                at += sum(step * stride for step, stride in zip(element, each.strides, strict=True))
                for byte in range(each.item_bytes):
                    found[at + byte].add((index, block))
    return found


def require_right(manifest):
    """All bytes of a block are served with it; what else is served is no one's, or may have the same block id."""
    bytes_of = owners(manifest)
    for group, tracks in enumerate(tracks_of(manifest)):
        served = defaultdict(set)
        for track in tracks:
            assert track.count == manifest.num_blocks
            for block in range(track.count):
                first = track.address + block * track.stride
                for at in range(first, first + track.span):
                    served[at].add(block)
        mine = {at: {block for owner, block in found if owner == group} for at, found in bytes_of.items()}
        if tracks:
            assert all(blocks <= served[at] for at, blocks in mine.items())
        for at, blocks in served.items():
            for block in blocks - mine.get(at, set()):
                for owner, other in bytes_of.get(at, ()):
                    assert manifest.aliases[owner] == manifest.aliases[group]
                    assert other == block
    return tracks_of(manifest)


def test_layers_side_by_side_are_one_track():
    packed = cache([part(0, 64), part(4, 64), part(8, 64), part(16, 64)])
    assert require_right(packed) == ((Track(BASE, 64, 12, 3), Track(BASE + 16, 64, 4, 3)),)


def test_keys_and_values_that_take_turns_are_one_track():
    keys, values = part(0, 32, tokens=(4, 8)), part(4, 32, tokens=(4, 8))
    assert require_right(cache([keys, values])) == ((Track(BASE, 32, 32, 3),),)


def test_each_head_outside_of_blocks_has_a_track():
    found = require_right(cache([part(0, 16, heads=(3, 100), tokens=(4, 4))]))
    assert found == (tuple(Track(BASE + head * 100, 16, 16, 3) for head in range(3)),)


def test_kernel_blocks_are_inside_of_blocks_or_outside():
    inside = cache([part(0, 32, tokens=(4, 4), kernel_stride=16)], kernel_blocks=2)
    assert require_right(inside) == ((Track(BASE, 32, 32, 3),),)
    outside = cache([part(0, 16, tokens=(4, 4), kernel_stride=64)], kernel_blocks=2)
    assert require_right(outside) == ((Track(BASE, 16, 16, 3), Track(BASE + 64, 16, 16, 3)),)


@pytest.mark.parametrize("stride", [0, 3, 1000])
def test_a_pool_of_one_block_has_tracks_whatever_its_stride(stride):
    one = cache([part(0, stride, heads=(2, 16), tokens=(4, 4))], num_blocks=1)
    assert require_right(one) == ((Track(BASE, 0, 32, 1),),)


def test_regions_are_apart_even_where_they_touch():
    regions = (Region(BASE, 12), Region(BASE + 12, 12, "VRAM", 3))
    found = require_right(cache([part(0, 4), part(0, 4, region=1)], regions=regions))
    assert found == ((Track(BASE, 4, 4, 3), Track(BASE + 12, 4, 4, 3, "VRAM", 3)),)


def test_a_gap_with_another_group_s_next_block_is_not_served():
    """The pages of block 0 do not interleave, so the groups share no block ids; those of later blocks do."""
    gapped, other = part(0, 40, tokens=(2, 20)), part(48, 40)
    manifest = cache([gapped], [other])
    assert manifest.aliases == (0, 1)
    found = require_right(manifest)
    assert found == ((Track(BASE, 40, 4, 3), Track(BASE + 20, 40, 4, 3)), (Track(BASE + 48, 40, 4, 3),))


def test_a_gap_with_the_same_group_s_next_block_is_not_served():
    found = require_right(cache([part(0, 40, tokens=(2, 20)), part(48, 40, tokens=(2, 12))]))
    assert len(found[0]) == 4


def test_a_gap_with_a_group_that_shares_block_ids_is_served():
    gapped, other = part(0, 40, tokens=(2, 20)), part(8, 40)
    manifest = cache([gapped], [other])
    assert manifest.aliases == (0, 0)
    assert require_right(manifest) == ((Track(BASE, 40, 24, 3),), (Track(BASE + 8, 40, 4, 3),))


def test_a_group_of_too_many_tracks_is_not_served_and_the_others_are(monkeypatch):
    monkeypatch.setattr(module, "TRACKS_MAX", 4)
    outside, other = part(0, 4, heads=(5, 40)), part(1000, 4)
    manifest = cache([outside], [other])
    assert require_right(manifest) == ((), (Track(BASE + 1000, 4, 4, 3),))


def test_gaps_in_which_a_group_lies_that_is_not_served_are_not_served(monkeypatch):
    monkeypatch.setattr(module, "TRACKS_MAX", 4)
    outside, gapped = part(48, 40, heads=(5, 200)), part(0, 40, tokens=(2, 20))
    assert require_right(cache([outside], [gapped])) == ((), (Track(BASE, 40, 4, 3), Track(BASE + 20, 40, 4, 3)))
