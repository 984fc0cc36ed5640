"""What cannot be planned is refused by name, at once: nothing of it reaches NumPy, and nothing costs memory."""

import time
import tracemalloc

import pytest
from msgspec.structs import replace

from kvflow.errors import CapacityExceeded, KvflowError, LayoutMismatch, PlanUnsound, SpecInvalid
from kvflow.layout.component import ADDRESS_MAX, Component, Region
from kvflow.layout.manifest import COMPONENTS_MAX, GROUPS_MAX, Layer, Manifest, ManifestGroup, Provenance
from kvflow.layout.shards import Stripe
from kvflow.layout.specs import MLA, ChunkedLocal, Mamba, State
from kvflow.planning.plan import PlanLimits, plan_transfer
from tests.helpers.loops import looped

from .helpers import full, manifest_of, sliding

BUDGET_S = 10.0
"""Of CPU, for what takes a second at most: a machine may be slow, but a loop over 2**62 is not only slow."""
MEMORY_MAX = 512 << 20

TOO_LARGE = f"out of bounds: .* must be an integer from .*, not {2**62}"
TOO_SMALL = "out of bounds: .* must be an integer from 1 to .*, not 0"

HONEST = manifest_of({"a": full(), "b": full()})
EMPTY_ROOM = (Region(0, ADDRESS_MAX),)


def refused(source, target, error):
    """Plan what cannot be planned, and give what is said of it."""
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(error) as caught:
            plan_transfer(source, target)
        assert time.process_time() - started < BUDGET_S
        assert tracemalloc.get_traced_memory()[1] < MEMORY_MAX
    finally:
        tracemalloc.stop()
    assert isinstance(caught.value, KvflowError)
    assert caught.value.remedy
    return caught.value


def states(shape, **fields):
    return Mamba(block_size=16, states=(State("ssm", shape, "float32", **fields),))


def latent(**fields):
    return MLA(block_size=16, head_size=8, dtype="float16", **fields)


def chunked(chunk):
    return ChunkedLocal(block_size=16, num_kv_heads=2, head_size=8, dtype="float16", chunk=chunk)


def of_model(**fields):
    return replace(HONEST, identity=Provenance(**fields))


DISAGREEMENTS = {
    "model": (of_model(model="a"), of_model(model="b"), "model", ("a", "b")),
    "revision": (of_model(revision="1"), of_model(revision="2"), "revision", ("1", "2")),
    "model's dtype": (of_model(dtype="bfloat16"), of_model(dtype="float16"), "model_dtype", ("bfloat16", "float16")),
    "dtype": (full(), full(dtype="bfloat16"), "a.k.dtype", ("float16", "bfloat16")),
    "dtype of one size": (full(dtype="int8"), full(dtype="uint8"), "a.k.dtype", ("int8", "uint8")),
    "scales": (
        full(dtype="float8_e4m3fn"),
        full(dtype="float8_e4m3fn", quantization="fp8_per_token_head"),
        "a.components",
        (["k", "v"], ["k", "k_scale", "v", "v_scale"]),
    ),
    "head size": (full(head_size=8), full(head_size=16), "a.k.head_size", (8, 16)),
    "head size of values": (full(head_size_v=4), full(head_size_v=6), "a.v.head_size", (4, 6)),
    "heads": (full(num_kv_heads=2), full(num_kv_heads=4), "a.k.num_kv_heads", (2, 4)),
    "kind": (full(), sliding(), "a.kind", ("full", "sliding")),
    "window": (sliding(window=64), sliding(window=32), "a.window", (64, 32)),
    "chunk": (chunked(64), chunked(32), "a.window", (64, 32)),
    "window of a latent": (latent(sliding_window=8), latent(), "a.window", (8, 0)),
    "state's shape": (states((4, 3)), states((4, 2)), "a.ssm.shape[1]", (3, 2)),
    "state's extent": (states((4, 3)), states((5, 3)), "a.ssm.shape[0]", (4, 5)),
    "state's axis": (states((4, 4)), states((4, 4), shard_axis=1), "a.ssm.axes", ((2, 0, -1), (2, 1, -1))),
    "state's axes": (states((4, 3)), states((4, 3, 1)), "a.ssm.axes", ((2, 0, -1), (3, 0, -1))),
    "state that is divided": (states((4, 3)), states((4, 3), shard_axis=None), "a.ssm.axes", ((2, 0, -1), (2, -1, -1))),
    "state for tokens": (states((4, 3)), full(), "a.kind", ("mamba", "full")),
    "latent without rope": (latent(), latent(rope_size=2), "a.components", (["latent"], ["latent", "rope"])),
    "layers": (manifest_of({"a": full()}), manifest_of({"b": full()}), "layers", (["a"], ["b"])),
    "kind of one layer": (
        manifest_of({"a": full(), "b": full()}),
        manifest_of({"a": full(), "b": sliding()}),
        "b.kind",
        ("full", "sliding"),
    ),
}


@looped("name", DISAGREEMENTS)
def test_a_disagreement_names_the_field_and_both_values_from_either_side(name):
    one, other, field, values = DISAGREEMENTS[name]
    source, target = (each if isinstance(each, Manifest) else manifest_of({"a": each}) for each in (one, other))
    for there, here, expected in ((source, target, values), (target, source, values[::-1])):
        error = refused(there, here, LayoutMismatch)
        assert (error.field, (error.source, error.target)) == (field, expected)
        assert all(words in str(error) for words in (field, *map(repr, expected)))


PART = HONEST.groups[0].layers[0].components[0]


def with_part(manifest=HONEST, **changes):
    """The manifest with one component changed."""
    (group,) = manifest.groups
    first, *others = group.layers
    parts = (replace(first.components[0], **changes), *first.components[1:])
    return replace(manifest, groups=(replace(group, layers=(replace(first, components=parts), *others)),))


def with_group(**changes):
    return replace(HONEST, groups=(replace(HONEST.groups[0], **changes),))


CONTRADICTIONS = {
    "tokens overlap": (with_part(strides=(PART.strides[0], 15, 2)), r"16 elements or blocks 15 bytes apart.* has 16"),
    "a stride of 2**62": (with_part(strides=(2**62, *PART.strides[1:])), r"a\.k: reaches byte 46116860184273"),
    "a stride of tokens of 2**62": (with_part(strides=(PART.strides[0], 2**62, 2)), r"a\.k: .* are too many"),
    "2**62 tokens": (with_part(extents=(2, 2**62, 8)), TOO_LARGE),
    "2**31 - 1 blocks": (replace(HONEST, num_blocks=2**31 - 1), r"a\.k: reaches byte \d+ of a region of \d+"),
    "2**62 ranks of tokens": (with_group(stripe=Stripe(0, 2**62, 1)), TOO_LARGE),
    "no tokens in a row": (with_group(stripe=Stripe(0, 2, 0)), TOO_SMALL),
    "no layers": (with_group(layers=()), "names no layer"),
    "a region that is not there": (with_part(region=1), r"a\.k: region 1 does not exist"),
    "a text for a number": (with_part(offset="0"), "out of bounds: .*offset must be an integer from .*, not '0'"),
}
"""Some of what a manifest must not say: ``layout/test_manifest.py`` has all of it."""


@looped("name", CONTRADICTIONS)
def test_a_manifest_that_cannot_be_is_refused_on_either_side(name):
    manifest, words = CONTRADICTIONS[name]
    for sides in ((manifest, HONEST), (HONEST, manifest)):
        with pytest.raises(SpecInvalid, match=words):
            plan_transfer(*sides)
        refused(*sides, SpecInvalid)


def test_layers_that_lie_over_each_other_in_one_block_are_refused():
    """Each is possible, but both cannot be written."""
    (group,) = HONEST.groups
    first, second = group.layers
    target = with_group(layers=(first, replace(second, components=first.components)))
    refused(HONEST, target, PlanUnsound)


def many(groups, layers, roles, *, tokens=4, heads=1):
    """A manifest of very many components, each possible, all of different bytes."""
    nbytes = heads * tokens * 2
    block = groups * layers * roles * nbytes
    return Manifest(
        1,
        EMPTY_ROOM,
        tuple(
            ManifestGroup("full", tokens, tuple(
                Layer(f"{group}.{layer}", "full", 0, tuple(
                    Component(
                        f"role{role}", "float16", 0, ((group * layers + layer) * roles + role) * nbytes, block, 0,
                        (heads, tokens, 1), (tokens * 2, 2, 2), 0, 0, heads,
                    )
                    for role in range(roles)
                ))
                for layer in range(layers)
            ))
            for group in range(groups)
        ),
    )  # fmt: skip


def test_thousands_of_components_are_planned():
    manifest = many(64, 32, 2)
    started = time.process_time()
    plan = plan_transfer(manifest, manifest)
    assert time.process_time() - started < BUDGET_S
    assert plan.certificate.complete
    assert [len(group.runs) for group in plan.groups] == [1] * 64


def test_more_components_than_a_model_has_are_refused():
    """Of all layers and groups together: each by itself is small."""
    layers = COMPONENTS_MAX // GROUPS_MAX
    plan_transfer(many(GROUPS_MAX, layers, 1), many(1, 1, 1))
    manifest = many(GROUPS_MAX, layers + 1, 1)
    assert refused(manifest, manifest, SpecInvalid).message.startswith("the layers have more than 4096 components")


def test_pieces_and_runs_are_bounded_for_all_groups_together():
    source, target = many(8, 2, 1, heads=4), many(8, 2, 1, heads=4)
    assert len(plan_transfer(source, target).groups) == 8
    for limits in (PlanLimits(fragments_max=8 * 2 * 4 * 4 - 1), PlanLimits(runs_max=7)):
        with pytest.raises(CapacityExceeded):
            plan_transfer(source, target, limits=limits)


def test_blocks_of_more_bytes_than_a_machine_has_are_refused():
    manifest = many(1, 3, 1, tokens=1 << 24, heads=1 << 16)
    assert refused(manifest, manifest, CapacityExceeded).resource == "bytes in one block of a plan"


def test_pieces_beyond_number_are_refused_before_they_cost_memory():
    source, target = (many(1, 1, 1, tokens=1 << 22, heads=2) for _ in range(2))
    tokens_first = replace(target.groups[0].layers[0].components[0], strides=(2, 4, 2))
    layer = replace(target.groups[0].layers[0], components=(tokens_first,))
    target = replace(target, groups=(replace(target.groups[0], layers=(layer,)),))
    assert refused(source, target, CapacityExceeded).resource == "fragments in one plan"
