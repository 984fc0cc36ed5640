"""The constants of the cost model come out of measurements as they went in."""

import numpy as np
import pytest

from kvflow.tools.bench.constants import COPIES, _copies, copy_memory, fit


@pytest.fixture(scope="module")
def memory():
    return copy_memory()


@pytest.mark.parametrize(
    "costs",
    [(5e-6, 2e-6, 3e-10), (0.0, 4e-6, 1e-10), (1e-3, 0.0, 2e-10), (1e-5, 1e-6, 0.0)],
)
def test_what_measurements_were_made_of_is_found_again(costs):
    rows = [(1, n, n * size) for n in (64, 512, 2048) for size in (256, 4096, 65536)]
    seconds = [float(np.dot(row, costs)) for row in rows]
    assert fit(rows, seconds) == pytest.approx(costs, rel=1e-6, abs=1e-15)


def test_noise_makes_nothing_cost_less_than_nothing():
    rng = np.random.default_rng(0)
    rows = [(1, n, n * size) for n in (64, 512, 2048) for size in (256, 4096, 65536)]
    for _ in range(50):
        found = fit(rows, [float(np.dot(row, (0.0, 1e-6, 1e-10)) * rng.uniform(0.5, 2)) for row in rows])
        assert min(found) >= 0
        assert 1e-7 < found[1] < 1e-5


@pytest.mark.parametrize(("pieces", "nbytes"), COPIES)
def test_copies_are_counted_and_take_time(memory, pieces, nbytes):
    copies, units, seconds = _copies(memory, pieces, nbytes, 1, np.random.default_rng(0))
    assert 1 <= copies <= units
    assert 0 < seconds < 60
