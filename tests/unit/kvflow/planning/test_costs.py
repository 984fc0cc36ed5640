"""The cost model, and the file its constants come from."""

import msgspec
import pytest

from kvflow.errors import ConfigInvalid
from kvflow.planning.costs import Calibration, Costs, Work, decode_calibration, encode_calibration

COSTS = Costs(descriptor_s=4e-6, read_byte_s=2e-10, copy_s=3e-6, piece_s=1e-8, copied_byte_s=1e-10)
CALIBRATION = Calibration(
    schema=1, machine="a machine", transport="nixl", source="same machine", date="2026-01-01T00:00:00Z", costs=COSTS
)


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (Work(0, 0), 0.0),
        (Work(3, 0), 12e-6),
        (Work(0, 1000), 2e-7),
        (Work(0, 0, copies=2), 6e-6),
        (Work(0, 0, pieces=100), 1e-6),
        (Work(0, 0, copied_bytes=10_000), 1e-6),
        (Work(3, 1000, 2, 100, 10_000), 12e-6 + 2e-7 + 6e-6 + 1e-6 + 1e-6),
    ],
)
def test_work_costs_the_sum_of_its_parts(work, seconds):
    assert COSTS.seconds(work) == pytest.approx(seconds)


def test_a_calibration_survives_its_file():
    text = encode_calibration(CALIBRATION)
    assert text.count(b"\n") > 10, "people read it, too"
    assert decode_calibration(text, name="x", planes=("nixl",)) == CALIBRATION


def changed(**fields):
    return msgspec.json.encode({**msgspec.to_builtins(CALIBRATION), **fields})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "truncated"),
        (b"\xff\xfe", "invalid"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field"),
        (b" " * 70_000, "more than 65536"),
        (changed(schema=2), r"\$.schema"),
        (changed(schema="1"), r"\$.schema"),
        (changed(transport="loopback"), "measured over transport 'loopback', but the worker's is 'nixl'"),
        (changed(costs={}), r"\$.costs"),
        (changed(costs={**msgspec.to_builtins(COSTS), "copy_s": -1e-6}), r"\$.costs.copy_s"),
        (changed(costs={**msgspec.to_builtins(COSTS), "copy_s": 2.0}), r"\$.costs.copy_s"),
        (changed(costs={**msgspec.to_builtins(COSTS), "copy_s": None}), r"\$.costs.copy_s"),
        (changed(costs={**msgspec.to_builtins(COSTS), "color_s": 1e-6}), "unknown field `color_s`"),
        (changed(surprise=1), "unknown field `surprise`"),
        (changed(machine="m" * 1000), r"\$.machine"),
        (encode_calibration(CALIBRATION).replace(b"4e-6", b"NaN").replace(b"4e-06", b"NaN"), "malformed"),
    ],
)
def test_a_file_that_is_no_calibration_is_refused_by_name_and_field(text, words):
    with pytest.raises(ConfigInvalid, match=words) as caught:
        decode_calibration(text, name="/etc/kvflow.json", planes=("nixl",))
    assert "calibration /etc/kvflow.json" in caught.value.message
    assert "--calibrate" in caught.value.remedy
