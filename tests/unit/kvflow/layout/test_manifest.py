"""A manifest is trusted only after its check, and its digests tell exactly what they should."""

import time

import msgspec
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.manifest import Layer, Manifest, ManifestGroup, alias_classes
from kvflow.layout.region import ADDRESS_MAX, Region
from kvflow.memory.cache import allocate

from .helpers import component, manifest, model

HUGE = (Region(0, ADDRESS_MAX),)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (manifest(names=("a", "b", "a")), "layer 'a' is named twice"),
        (manifest(component(), component()), "a: role 'k' is named twice"),
        (manifest(component(region=1)), "a.k: region 1 does not exist"),
        (manifest(block_size=8), "a.k: 4 tokens in blocks of 8"),
        (manifest(component(first_head=1)), "a.k: holds"),
        (manifest(component(num_heads=2)), "a.k: holds"),
        (manifest(regions=(Region(4096, 127),)), "reaches byte 128 of a region of 127"),
        (manifest(component(offset=1), regions=(Region(4096, 128),)), "reaches byte 129"),
        (manifest(component(block_stride=1 << 62)), "a.k: reaches byte"),
        (manifest(component(offset=1 << 62)), "a.k: reaches byte"),
        (manifest(component(content_bytes=1 << 31)), "a.k: reaches byte"),
        (manifest(num_blocks=(1 << 31) - 1), "a.k: reaches byte"),
        (manifest(component(num_heads=1 << 31, total_heads=1 << 31)), "a.k: reaches byte"),
        (manifest(regions=(Region(ADDRESS_MAX, 128),)), "region 0 reaches beyond"),
        (manifest(regions=(Region(4096, 128), Region(1 << 62, 1 << 62))), "region 1 reaches beyond"),
        (manifest(component(num_tokens=2, token_stride=1 << 62), block_size=2, num_blocks=1, regions=HUGE), "spans 2"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(wrong, words):
    with pytest.raises(SpecInvalid, match=words):
        wrong.check()


def test_a_manifest_that_fits_to_the_byte_passes():
    manifest(regions=(Region(4096, 128),)).check()


def test_a_name_given_twice_is_found_as_fast_as_one_given_once():
    names = [f"{index:x}" for index in range(30_000)]
    started = time.process_time()
    with pytest.raises(SpecInvalid, match="'752f' is named twice"):
        manifest(names=(*names, names[-1])).check()
    assert time.process_time() - started < 5  # every pair compared would take some 20 s of CPU


SPECS = model(layers=4, full_every=2)


def cache_of(**changes):
    return allocate(SPECS, **{"num_blocks": 3, "layout": "BLHNC"} | changes)


def described(**changes):
    return cache_of(**changes).manifest()


def test_the_geometry_digest_forgets_addresses_only():
    caches = [cache_of(), cache_of()]  # both are alive, and so at different addresses
    one, other = (cache.manifest() for cache in caches)
    assert one.regions != other.regions
    assert one.geometry_digest() == other.geometry_digest()
    for changed in (described(num_blocks=4), described(layout="BLNHC"), described(kv="split")):
        assert changed.geometry_digest() != one.geometry_digest()


def test_the_compatibility_digest_forgets_what_a_plan_can_convert():
    digest = described().compatibility_digest()
    for converted in (described(num_blocks=4), described(layout="LBNHC"), described(kv="split")):
        assert converted.compatibility_digest() == digest
    other_blocks = allocate(model(layers=4, full_every=2, block_size=32), num_blocks=3).manifest()
    assert other_blocks.compatibility_digest() == digest
    for changes in ({"head_size": 16}, {"dtype": "bfloat16"}, {"num_kv_heads": 2}):
        changed = allocate(model(layers=4, full_every=2, **changes), num_blocks=3).manifest()
        assert changed.compatibility_digest() != digest


def test_a_manifest_survives_the_wire():
    original = described()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=Manifest)
    decoded.check()
    assert decoded == original


def group_at(name, offset, region=0):
    return ManifestGroup("full", 4, 0, (Layer(name, (component(offset=offset, region=region),)),))


@pytest.mark.parametrize(
    ("places", "classes"),
    [
        ([(0, 0), (0, 0)], (0, 0)),
        ([(0, 0), (64, 0)], (0, 1)),
        ([(0, 0), (63, 0)], (0, 0)),
        ([(0, 0), (0, 1)], (0, 1)),
        ([(0, 0), (200, 0), (0, 0)], (0, 1, 0)),
        ([(0, 0), (96, 0), (48, 0)], (0, 0, 0)),  # the third overlaps both, which do not overlap each other
    ],
)
def test_groups_that_share_bytes_are_of_one_class(places, classes):
    groups = tuple(group_at(f"layer{index}", offset, region) for index, (offset, region) in enumerate(places))
    regions = (Region(4096, 1 << 20), Region(1 << 30, 1 << 20))
    numbers = alias_classes(Manifest(1, regions, groups))
    assert tuple(numbers.index(number) for number in numbers) == classes
