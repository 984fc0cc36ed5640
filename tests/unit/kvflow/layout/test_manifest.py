"""A manifest is trusted only after its check, and its digests tell exactly what they should."""

import time
from functools import partial

import msgspec
import pytest

from kvflow.errors import SpecInvalid
from kvflow.layout.component import ADDRESS_MAX, Region
from kvflow.layout.manifest import COMPONENTS_MAX, Layer, Manifest, ManifestGroup
from kvflow.layout.shards import Shard, Stripe
from kvflow.layout.specs import Mamba, State
from kvflow.memory.cache import allocate
from tests.helpers.loops import looped

from .helpers import ROOMY, component, full, manifest, model, state


def striped(stripe, *components, **fields):
    """A group of which ranks divide the tokens."""
    whole = manifest(*components, **fields)
    return msgspec.structs.replace(whole, groups=(msgspec.structs.replace(whole.groups[0], stripe=stripe),))


def layers_of(*kinds):
    """One group whose layers are of these kinds."""
    whole = manifest(state(), names=map(str, range(len(kinds))))
    layers = zip(whole.groups[0].layers, kinds, strict=True)
    layers = tuple(msgspec.structs.replace(layer, kind=kind) for layer, kind in layers)
    return msgspec.structs.replace(whole, groups=(ManifestGroup("mixed", 4, layers),))


HUGE = (Region(0, ADDRESS_MAX),)


@looped(
    "wrong, words",
    [
        (manifest(names=("a", "b", "a")), "layer 'a' is named twice"),
        (msgspec.structs.replace(manifest(), rebuilt=("z",)), "rebuilt names a layer that .* does not have: 'z'"),
        (msgspec.structs.replace(manifest(), rebuilt=("z" * 4096,)), r"out of bounds: .*rebuilt"),
        (manifest(component(), component()), "a: role 'k' is named twice"),
        (manifest(component(region=1)), "a.k: region 1 does not exist"),
        (manifest(block_size=6), "a.k: 4 tokens do not divide blocks of 6"),
        (manifest(block_size=3), "a.k: 4 tokens do not divide blocks of 3"),
        (manifest(component(), component(role="v", extents=(1, 2, 8))), "a.v: 2 tokens in kernel blocks of 4"),
        (manifest(component(), state()), "a.ssm: 0 tokens in kernel blocks of 4"),
        (manifest(state(), component()), "a.k: 4 tokens in kernel blocks of 0"),
        (manifest(component(strides=(64, 16))), "a.k: 3 extents, 2 strides"),
        (manifest(component(extents=(1, 4), strides=(64, 16, 2))), "a.k: 2 extents, 3 strides"),
        (manifest(component(shard_axis=3)), "a.k: 3 extents, 3 strides and its axes do not fit"),
        (manifest(component(token_axis=3)), "a.k: 3 extents, 3 strides and its axes do not fit"),
        (manifest(component(shard_axis=1)), "a.k: shard_axis must not be the token axis, 1"),
        (manifest(component(first=1)), "a.k: holds"),
        (manifest(component(extents=(2, 4, 8))), "a.k: holds"),
        (manifest(state(total=2)), "a.ssm: holds"),
        (manifest(state(shard_axis=-1, first=3)), "a.ssm: holds"),
        (manifest(regions=(Region(4096, 127),)), "reaches byte 128 of a region of 127"),
        (manifest(state(), regions=(Region(4096, 111),)), "reaches byte 112 of a region of 111"),
        (manifest(component(offset=1), regions=(Region(4096, 128),)), "reaches byte 129"),
        (manifest(component(block_stride=1 << 62)), "a.k: reaches byte"),
        (manifest(component(offset=1 << 62)), "a.k: reaches byte"),
        (manifest(component(extents=(1, 4, 1 << 31))), "a.k: reaches byte"),
        (manifest(num_blocks=(1 << 31) - 1), "a.k: reaches byte"),
        (manifest(component(extents=(1 << 31, 4, 8), total=1 << 31)), "a.k: reaches byte"),
        (manifest(component(kernel_stride=64), block_size=8, regions=(Region(4096, 191),)), "reaches byte 192"),
        (manifest(component(kernel_stride=1 << 62), block_size=8, regions=HUGE), "2 kernel blocks of"),
        (manifest(component(kernel_stride=0), block_size=8), "2 kernel blocks of one block, but no stride"),
        (striped(Stripe(2, 2, 1)), "group 0: stripe.rank is 2, but stripe.size is 2"),
        (striped(Stripe(1, 1, 1)), "group 0: stripe.rank is 1, but stripe.size is 1"),
        (striped(Stripe(0, 2, 3)), "group 0: stripe.width 3 does not divide blocks of 4"),
        (striped(Stripe(0, 2, 8)), "group 0: stripe.width 8 does not divide blocks of 4"),
        (striped(Stripe(0, 2, 1), state()), "group 0: tokens divided among 2 ranks, but it keeps none"),
        (
            striped(Stripe(0, 2**62, 1)),
            r"out of bounds: groups\[0\].stripe.size must be .* to 1024, not 46116",
        ),
        (striped(Stripe(0, 2, 0)), r"out of bounds: groups\[0\].stripe.width must be .* from 1 to 16777216, not 0"),
        (layers_of("mamba", "opaque"), "group 0: pages of an unknown kind share a block table with"),
        (manifest(component(extents=(0, 4, 8))), "out of bounds: .* must be an integer .*, not 0"),
        (
            manifest(component(extents=(1, 4, 2**62))),
            "out of bounds: .* must be an integer .*, not 46116",
        ),
        (manifest(component(strides=(64, -16, 2))), r"out of bounds: .*strides\[1\] must be an integer .*, not -16"),
        (manifest(component(offset=2**64)), "out of bounds"),
        (manifest(component(total=2**62)), "out of bounds: .* must be an integer .*, not 46116"),
        (manifest(component(strides=(2**64, 16, 2))), "out of bounds"),
        (striped(Stripe(0, 2, 2**62)), r"out of bounds: groups\[0\].stripe.width must be .*, not 46116"),
        (manifest(component(block_stride=-64)), "out of bounds: .*block_stride must be an integer .*, not -64"),
        (manifest(num_blocks=2**62), "out of bounds: .* must be an integer .*, not 46116"),
        (manifest(num_blocks=0), "out of bounds: .* must be an integer .*, not 0"),
        (manifest(block_size=2**62), "out of bounds: .* must be an integer .*, not 46116"),
        (manifest(regions=(Region(4096, 0),)), "out of bounds: .* must be an integer .*, not 0"),
        (manifest(regions=()), "out of bounds: regions must be a list of 1 to .* entries, .*, not \\(\\)"),
        (manifest(num_blocks=1.5), "out of bounds: num_blocks must be an integer .*, not 1.5"),
        (manifest(num_blocks=object()), "out of bounds"),
        (manifest(component(block_stride=63)), "a.k: 2 elements or blocks 63 bytes apart, but each has 64 bytes"),
        (manifest(component(block_stride=0)), "a.k: 2 elements or blocks 0 bytes apart, but each has 2 bytes"),
        (manifest(component(strides=(64, 15, 2))), "a.k: 4 elements or blocks 15 bytes apart, but each has 16 bytes"),
        (manifest(component(strides=(64, 2, 2))), "a.k: 8 elements or blocks 2 bytes apart"),
        (manifest(component(strides=(64, 16, 0))), "a.k: 8 elements or blocks 0 bytes apart, but each has 2 bytes"),
        (manifest(component(kernel_stride=64), block_size=8), "a.k: 2 elements or blocks 64 bytes apart"),
        (manifest(regions=(Region(ADDRESS_MAX, 128),)), "region 0 reaches beyond"),
        (manifest(regions=(Region(4096, 128), Region(1 << 62, 1 << 62))), "region 1 reaches beyond"),
        (manifest(regions=(Region(4096, 128), Region(1 << 20, 4096))), "region 1 is memory of no layer"),
        (
            manifest(component(extents=(1, 2, 8), strides=(0, 1 << 62, 2)), block_size=2, num_blocks=1, regions=HUGE),
            "are too many",
        ),
        (
            manifest(
                component(extents=(1 << 40, 1 << 24, 8), strides=(0, 0, 0), total=1 << 40),
                block_size=1 << 24,
                regions=HUGE,
            ),
            "are too many",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(wrong, words):
    with pytest.raises(SpecInvalid, match=words):
        wrong.check()


@looped(
    "right, nbytes",
    [
        (manifest, 128),
        (partial(manifest, component(kernel_stride=64, block_stride=128), block_size=8), 256),
        (partial(manifest, component(kernel_stride=128), block_size=8), 256),  # blocks and kernel blocks in turns
        (partial(manifest, state()), 112),
        (partial(manifest, state(shard_axis=-1, total=1)), 112),
        (partial(manifest, state(extents=(2, 4), first=1, total=3)), 96),
    ],
)
def test_a_manifest_that_fits_to_the_byte_passes(right, nbytes):
    right(regions=(Region(4096, nbytes),)).check()
    with pytest.raises(SpecInvalid, match=f"reaches byte {nbytes} of a region of {nbytes - 1}"):
        right(regions=(Region(4096, nbytes - 1),)).check()


def test_a_name_given_twice_is_found_as_fast_as_one_given_once():
    names = [f"{index:x}" for index in range(COMPONENTS_MAX - 1)]
    names.append(names[-1])
    (group,) = manifest(names=names).groups
    started = time.process_time()
    with pytest.raises(SpecInvalid, match="'ffe' is named twice"):
        Manifest(2, ROOMY, (group,)).check()
    assert time.process_time() - started < 1  # of CPU, for what takes milliseconds


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
    odd = described(shard=Shard(dcp_rank=1, dcp_size=2))
    for changed in (described(num_blocks=4), described(layout="BLNHC"), described(kv="split"), odd):
        assert changed.geometry_digest() != one.geometry_digest()


def test_what_must_agree_is_named_as_a_person_configured_it():
    """Also of a peer's component with tokens whose axes are not those of attention: it passes the check."""
    odd = component(extents=(1, 4, 2, 4), strides=(64, 16, 8, 2))
    assert fields_of(component(total=5)) == {"num_kv_heads": 5, "head_size": 8, "axes": (3, 0, 1)}
    assert fields_of(state(total=9)) == {"shape[0]": 9, "shape[1]": 4, "axes": (2, 0, -1)}
    assert fields_of(odd) == {"shape[0]": 1, "shape[2]": 2, "shape[3]": 4, "axes": (4, 0, 1)}
    described = manifest(odd)
    described.check()


def fields_of(part):
    """What must agree of one component, except its dtype."""
    layer = Layer("a", "full", 0, (part,))
    named = {path.removeprefix(f"{part.role}."): value for path, value in layer.must_agree()}
    return {name: value for name, value in named.items() if name not in ("kind", "window", "components", "dtype")}


def test_a_manifest_survives_the_wire():
    original = described()
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=Manifest)
    decoded.check()
    assert decoded == original


def group_at(name, offset, region=0):
    return ManifestGroup("full", 4, (Layer(name, "full", 0, (component(offset=offset, region=region),)),))


@looped(
    "places, classes",
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
    numbers = Manifest(1, regions, groups).aliases
    assert tuple(numbers.index(number) for number in numbers) == classes


def test_a_hybrid_of_a_hundred_layers_fits_64_kib():
    conv = [
        State(f"conv_{name}", (channels, 3), "bfloat16") for name, channels in (("x", 8192), ("B", 1024), ("C", 1024))
    ]
    states = (*conv, State("ssm", (128, 64, 128), "float32"))
    attention = {f"model.layers.{index}.self_attn.attn": full() for index in range(0, 100, 4)}
    recurrent = {
        f"model.layers.{index}.mixer": Mamba(block_size=16, states=states) for index in range(100) if index % 4
    }
    for layout in ("LBNHC", "BHLNC"):
        cache = allocate(attention | recurrent, num_blocks=100_000, layout=layout, device="meta")
        assert len(msgspec.msgpack.encode(cache.manifest())) < 64 << 10
