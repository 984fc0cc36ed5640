"""The model of a fleet, tests.benchmarks.fleet, with two engines of each kind."""

import pytest

from tests.benchmarks import fleet
from tests.benchmarks.fleet import Model
from tests.benchmarks.fleet_time import Clock, Loop


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr(fleet, "WARM_S", 60.0)


def test_the_same_seed_gives_the_same_figures():
    first, again, other = [Model("product", seed, 2).run() for seed in (1, 1, 2)]
    assert first == again
    assert first != other


def test_the_product_computes_less_than_a_fleet_that_does_not_share():
    alone, shares = Model("none", 1, 2), Model("product", 1, 2)
    figures = alone.run(), shares.run()
    assert figures[1]["computed"] < 0.5 * figures[0]["computed"]
    assert figures[1]["questions"] >= 0.5
    assert figures[0]["questions"] == 0
    assert shares.outcomes["held"] > 50


def test_a_callback_that_computes_delays_its_own_loop_alone():
    clock = Clock()
    busy, idle, ran = Loop(clock), Loop(clock), []
    busy.call_soon(busy.compute, 3.0)
    for name, loop in (("busy", busy), ("idle", idle)):
        loop.call_at(1.0, lambda name=name: ran.append((name, clock.now)))
    clock.run(10.0)
    assert ran == [("idle", 1.0), ("busy", 3.0)]
