"""What a plan says of itself: how many runs, what ended them, what is missing."""

import pytest
from msgspec.structs import replace

from kvflow.layout.specs import MLA, Mamba, State
from kvflow.planning.plan import plan_transfer
from tests.helpers.loops import looped

from .helpers import full, manifest_of

ATTENTION = {name: full(num_kv_heads=8, head_size=128) for name in ("a", "b")}
LATENTS = {name: MLA(block_size=16, head_size=64, dtype="float16") for name in ("a", "b")}


def states(conv_shape, shard_axis):
    conv = State("conv", conv_shape, "bfloat16", shard_axis=shard_axis)
    return {"m": Mamba(block_size=16, states=(conv, State("ssm", (8, 64, 64), "float32", shard_axis=0)))}


def said(source, target):
    return plan_transfer(source, target).explain().splitlines()


@looped(
    "source, target, words",
    [
        ({}, {}, "1 run of 131,072 bytes for each unit of 16 tokens (1 per source block, 1 per target block)"),
        ({}, {}, "all that moves lies together on both sides; 1 of 1 merge over consecutive blocks"),
        (
            {"layout": "LBNHC"},
            {"layout": "LBNHC"},
            "stops at layers, which lie apart on the source and the target; 2 of 2",
        ),
        ({"layout": "LBNHC"}, {"layout": "BLNHC"}, "stops at layers, which lie apart on the source; 0 of 2"),
        (
            {"kv": "split"},
            {"layout": "LBHNC", "kv": "split"},
            "the components of a layer, which lie apart on the target",
        ),
        (
            {"layout": "BLNHC", "tp": (0, 2)},
            {"layout": "BLNHC", "tp": (1, 4)},
            "merging stops at tokens, which are 2,048 bytes apart on the source and 1,024 on the target; 0 of 32",
        ),
        (
            {"layout": "LBNHC"},
            {"layout": "LBHNC"},
            "merging stops at tokens, which are 4,096 bytes apart on the source and 512 on the target",
        ),
        (
            {"layout": "LBHNC"},
            {"layout": "LBNHC"},
            "merging stops at heads, which are 8,192 bytes apart on the source and 512 on the target",
        ),
        ({"layout": "BHLNC", "tp": (0, 4)}, {"layout": "BHLNC", "tp": (0, 2)}, "all that moves lies together"),
    ],
)
def test_a_plan_says_what_ends_its_runs(source, target, words):
    assert words in "\n".join(said(manifest_of(ATTENTION, **source), manifest_of(ATTENTION, **target)))


def test_layers_that_touch_may_still_differ_from_block_to_block():
    """Adopted tensors: the second layer begins where block 0 of the first ends, but its blocks are further apart."""
    source = manifest_of({"a": full(), "b": full()}, layout="LBNHC", num_blocks=1)
    group, page = source.groups[0], source.groups[0].layers[0].components[0].block_stride
    first, second = group.layers
    wider = [replace(part, block_stride=2 * page) for part in second.components]
    source = replace(source, groups=(replace(group, layers=(first, replace(second, components=tuple(wider)))),))
    assert said(source, source)[1].startswith(
        "  merging stops at layers, which have strides of their own; 1 of 2 merge"
    )


@pytest.mark.parametrize(
    ("specs", "words", "missing"),
    [
        (
            states((512, 3), 0),
            "stops at the components of a layer, which lie apart on the target",
            ["not transferred: slices 128 to 255 of m.conv", "not transferred: slices 2 to 3 of m.ssm"],
        ),
        (
            states((3, 512), 1),
            "stops at the slices along axis 0 of conv, which are 256 bytes apart on the source and 512 on the target",
            ["not transferred: slices 128 to 255 of m.conv", "not transferred: slices 2 to 3 of m.ssm"],
        ),
        (ATTENTION, "stops at layers", ["not transferred: heads 2 to 3 of a.k and of 3 more components"]),
    ],
)
def test_parts_that_are_missing_are_called_what_they_are(specs, words, missing):
    unit, stop, proven, *rest = said(manifest_of(specs, tp=(0, 4)), manifest_of(specs, tp=(0, 2)))
    assert unit.startswith("source group 0 -> target group 0: ")
    assert ("for each state" in unit) == ("m" in specs)
    assert words in stop
    assert proven.startswith("proven: ")
    assert rest == missing


def test_a_latent_that_is_missing_is_missing_as_a_whole():
    lines = said(manifest_of({"a": LATENTS["a"]}), manifest_of(LATENTS))
    assert lines[-2:] == [
        "proven: 2,048 of 4,096 bytes of the target page are written exactly once",
        "not transferred: all of b.latent",
    ]


def test_many_kinds_of_gaps_stay_a_few_lines():
    specs = {f"layers.{heads}": full(num_kv_heads=heads) for heads in (2, 4, 8, 16, 32, 64)}
    lines = said(manifest_of(specs, tp=(0, 2), layout="BLHNC"), manifest_of(specs, layout="BLHNC"))
    gaps = [line for line in lines if line.startswith("not transferred")]
    assert gaps[0] == "not transferred: heads 1 to 1 of layers.2.k and of 1 more components"
    assert gaps[-1] == "not transferred: other parts of 4 components"
    assert len(gaps) == 5
