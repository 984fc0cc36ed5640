"""``kvflow bench fence`` measures what it says: three workers, and the one without a fence says so."""

import pytest

from kvflow.bench import fence

pytestmark = [pytest.mark.nixl, pytest.mark.processes]


async def test_it_compares_pulls_with_fence_and_release_to_pulls_without(monkeypatch):
    monkeypatch.setattr(fence, "SIZES", {"64 KiB": (1, 2)})
    shown = []
    (table,) = await fence.run(1, 0, shown.append)
    assert [row[:3] for row in table.rows] == [("64 KiB", "fence", 10), ("64 KiB", "fence and release", 10)]
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert all(value > 0 for row in table.rows for value in row[3:7])
    assert shown == ["fence, 64 KiB"]
