"""``kvflow bench descriptors`` compares two ways of reading, or nothing."""

from types import SimpleNamespace

import pytest

from kvflow.tools.bench import descriptors


@pytest.mark.parametrize(("direct_s", "staged_s"), [(0.0, 0.0), (1e-3, 1e-3), (1e-3, 0.0)])
def test_two_ways_of_reading_are_compared_or_nothing(direct_s, staged_s):
    reports = tuple(SimpleNamespace(timings_s={"scatter": scatter_s}) for scatter_s in (direct_s, staged_s))
    with pytest.raises(AssertionError, match="read directly and staged"):
        descriptors._require_both(SimpleNamespace(reports=reports))
