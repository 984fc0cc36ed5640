"""The picture of a block shows every byte where it lies."""

import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from kvflow.layout.describe import plan_cache
from kvflow.layout.groups import plan_groups
from kvflow.layout.placement import AXIS_ORDERS
from kvflow.layout.shards import Shard
from kvflow.layout.specs import MLA, FullAttention, Mamba, State
from kvflow.models import load, names
from kvflow.tools.cli import layout_map, layout_report
from kvflow.tools.cli.entry import main
from kvflow.tools.cli.layout_pieces import pieces

SVG = "{http://www.w3.org/2000/svg}"
HEADS, LAYERS = 3, 2


def planned(specs, layout="BLHNC", kv="content"):
    return plan_cache(specs, plan_groups(specs, layout=layout), layout=layout, kv=kv, shard=Shard(), num_blocks=1)


def drawn(specs, layout="BLHNC", kv="content", model="model"):
    plan = planned(specs, layout, kv)
    report = layout_report.summarize(
        plan, model, layout=layout, kv=kv, enlarged=False, peer=layout_report.PeerFigures(1, 1)
    )
    return layout_map.draw(plan, report)


def attention(**changes):
    spec = FullAttention(block_size=4, num_kv_heads=HEADS, head_size=8, dtype="bfloat16", **changes)
    return {f"layers.{index}": spec for index in range(LAYERS)}


@pytest.mark.parametrize(("layout", "kv"), AXIS_ORDERS)
def test_pieces_are_dense_and_cover_the_block_once(layout, kv):
    plan = planned(attention(), layout, kv)
    found = sorted(piece for name in plan.layers for piece in pieces(plan.layers[name].components, 4))
    assert found[0].start == 0
    assert all(before.end == after.start for before, after in pairwise(found))
    assert found[-1].end == plan.bytes_per_block
    assert len(found) == (LAYERS * HEADS if layout == "BHLNC" else LAYERS)
    assert {piece.interleaved for piece in found} == {kv == "content"}


def test_a_piece_names_the_bytes_of_each_component():
    states = (State("conv_x", (3, 2), "bfloat16"), State("ssm", (2, 2), "float32"))
    plan = planned({"layers.0": Mamba(block_size=4, states=states, page_bytes=64)})
    [piece] = pieces(plan.layers["layers.0"].components, 4)
    assert piece.parts == (("conv_x", 0, 12, 12), ("ssm", 12, 28, 16))


def test_a_gap_between_components_belongs_to_neither():
    states = (State("conv_x", (3,), "bfloat16"), State("ssm", (2,), "float32"))
    plan = planned({"layers.0": Mamba(block_size=4, states=states)})
    assert [(piece.start, piece.end) for piece in pieces(plan.layers["layers.0"].components, 4)] == [(0, 6), (8, 16)]


def test_kernel_blocks_are_part_of_the_page():
    plan = planned(attention(kernel_block_size=2))
    [piece] = pieces(plan.layers["layers.1"].components, 4)
    assert (piece.start, piece.end) == (plan.bytes_per_block // 2, plan.bytes_per_block)


@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_a_picture_is_well_formed_and_the_same_each_time(layout):
    picture = drawn(attention(), layout)
    assert ET.fromstring(picture).tag == f"{SVG}svg"
    assert picture == drawn(attention(), layout)


def test_boxes_are_where_the_bytes_are():
    root = ET.fromstring(drawn(attention(), "BLHNC"))
    boxes = [(group.find(f"{SVG}title").text, group.findall(f"{SVG}rect")[-1].attrib) for group in root.iter(f"{SVG}g")]
    width = layout_map.WIDTH - layout_map.LEFT - layout_map.RIGHT
    assert [title for title, _ in boxes] == ["layers.0: bytes 0 to 384", "layers.1: bytes 384 to 768"]
    assert [float(box["x"]) for _, box in boxes] == [layout_map.LEFT, layout_map.LEFT + width / 2]
    assert {float(box["width"]) for _, box in boxes} == {width / 2}


def test_there_is_a_lane_per_group_and_all_start_at_byte_0():
    root = ET.fromstring(drawn(load("gemma-3-4b")))
    lanes = [box.attrib for box in root.findall(f"{SVG}rect") if box.get("fill") == "url(#padding)"][1:]
    assert len(lanes) == 7
    assert {lane["x"] for lane in lanes} == {str(layout_map.LEFT)}
    titles = [text.text for text in root.findall(f"{SVG}text") if (text.text or "").startswith("group ")]
    assert titles == [*(f"group {index}: sliding" for index in range(6)), "group 6: full"]


def test_the_legend_has_every_role_and_stripes_only_where_there_are_some():
    specs = {"layers.0": MLA(block_size=4, head_size=8, dtype="uint8", scale_bytes=4)}
    assert {">latent<", ">scale<", ">padding<"} <= set(re.findall(r">\w+<", drawn(specs)))
    assert "stripes" in drawn(specs)
    assert "stripes" not in drawn(attention(), "LBNHC", "split")


def test_a_role_without_a_color_of_its_own_gets_one():
    states = (State("novel", (4,), "float32"), State("newer", (4,), "float32"))
    picture = drawn({"layers.0": Mamba(block_size=4, states=states)})
    assert all(color in picture for color in layout_map.OTHER_COLORS[:2])


def test_names_cannot_break_the_picture():
    spec = MLA(block_size=4, head_size=8, dtype="uint8")
    root = ET.fromstring(drawn({"<layer> & \"7'": spec}, model="<b>&</b>"))
    assert [title.text.partition(":")[0] for title in root.iter(f"{SVG}title")][-1] == "<layer> & \"7'"
    assert "<b>&</b>" in [text.text for text in root.findall(f"{SVG}text")]


def test_labels_appear_only_where_all_of_them_fit():
    def labels(count):
        spec = MLA(block_size=4, head_size=8, dtype="uint8")
        root = ET.fromstring(drawn({f"layers.{index}": spec for index in range(count)}))
        return [text.text for group in root.iter(f"{SVG}g") for text in group.findall(f"{SVG}text")]

    assert labels(12) == [str(index) for index in range(12)]
    assert labels(400) == []


@pytest.mark.parametrize("nbytes", [1, 100, 1 << 10, 3 << 20, 5 << 30])
def test_the_ruler_has_a_few_round_ticks(nbytes):
    spec = Mamba(block_size=1, states=(State("ssm", (1,), "uint8"),), page_bytes=nbytes)
    ticks = re.findall(r'fill="#444">(\d[\d.e+]*) (B|KiB|MiB)<', drawn({"layers.0": spec}))
    assert 1 < len(ticks) <= layout_map.TICKS_MAX + 1
    assert ticks[0] == ("0", "B")


@pytest.mark.parametrize("model", names())
def test_every_bundled_model_can_be_drawn(tmp_path, model):
    path = tmp_path / "map.svg"
    assert main(["layout", model, "--svg", str(path)]) == 0
    assert ET.parse(path).getroot().tag == f"{SVG}svg"
