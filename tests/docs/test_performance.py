"""The page of figures: its picture and its tables show the run that lies beside them."""

from xml.etree import ElementTree as ET

import pytest

from tests.docs import performance
from tests.docs.performance import LEFT, PICTURE, ROOT, WIDTH, drawn, picture, run

PAGE = ROOT / "docs" / "explanation" / "performance.md"


def test_the_picture_is_current():
    """If it differs: ``python -m tests.docs.reference_tables``."""
    assert PICTURE.read_text() == picture()


def test_the_parts_of_a_bar_fill_it_in_proportion():
    boxes = [box for box in ET.fromstring(PICTURE.read_text()) if len(box)]
    for at, (_, _, parts) in enumerate(drawn()):
        bar = boxes[len(parts) * at : len(parts) * (at + 1)]
        widths = [float(box.get("width")) for box in bar]
        assert sum(widths) == pytest.approx(WIDTH, abs=1)
        assert float(bar[0].get("x")) == LEFT
        assert [box[0].text.partition(":")[0] for box in bar] == list(parts)
        assert widths == pytest.approx([WIDTH * spent / sum(parts.values()) for spent in parts.values()], abs=0.1)


def test_the_page_shows_each_goal_of_the_run_and_is_short():
    text = PAGE.read_text()
    assert len(performance.judged()) >= 30
    for row in performance.judged():
        assert row[4].endswith((": met", ": missed"))
        if not performance.LARGE.fullmatch(row[0]):
            assert f"| {row[0]} |" in text
    assert len(text.split()) <= 1500


def test_the_run_was_long_enough_and_compared_everybody():
    assert int(run().name.rpartition(" ")[2]) >= 15
    assert "Mooncake over TCP" in {row[0] for table in run().tables if "in turns" in table.title for row in table.rows}
