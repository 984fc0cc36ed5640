"""No load arrives in a block that a step in flight still writes, and nothing on offer is written: at random orders.

``KVFLOW_ORDER_STEPS`` is the number of steps in all, by default some thousands.
"""

import os

import pytest

from .pairs import model_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported

STEPS = int(os.environ.get("KVFLOW_ORDER_STEPS", "6000"))
STEPS_OF_WORLD = 5000  # then another one begins
RUNNERS, ROLES = ("first", "second"), ("kv_producer", "kv_consumer", "kv_both")
HOWS = ({}, {"drafts": True}, {"stages": 2}, {"states": True}, {"states": True, "stages": 2})
WORLDS = [(role, how) for how in HOWS for role in ROLES if not (how.get("states") and role == "kv_producer")]
KINDS = len(RUNNERS) * len(WORLDS)
FAULT_STEPS = 3000  # within which an injected fault shows


@pytest.fixture
def world(monkeypatch):
    """Starts worlds; at the end the last one is closed."""
    from . import orders, second_runner

    second_runner.prepare(monkeypatch)
    started = []

    def start(*args, **named):
        while started:
            started.pop().close()
        started.append(orders.World(*args, **named))
        return started[-1]

    yield start
    while started:
        started.pop().close()


def run(world, steps, *kind, **named):
    """Run worlds of a kind one after the other, and return what has happened."""
    happened, seed = {}, 0
    while happened.get("step", 0) < steps:
        each = world(*kind, seed, **named)
        waits = each.writes_behind or not each.engine.scheduler.defer_block_free
        assert [worker.connector._writes_late for worker in each.engine.workers] == [waits] * len(each.engine.workers)
        each.run(min(steps - happened.get("step", 0), STEPS_OF_WORLD))
        assert each.faults == [], (kind, named, seed, each.happened)
        each.settle()
        assert each.faults == [], (kind, named, seed, each.happened)
        assert [engine.free_blocks for engine in each.engines] == [engine.blocks for engine in each.engines]
        happened["settled"] = happened.get("settled", 0) + each.held[-1].settled
        for name, count in each.happened.items():
            happened[name] = happened.get(name, 0) + count
        seed += 1
    return happened


def has_all(happened, *names):
    """Return whether all of these have happened, and in a long run preemptions, too."""
    rare = ("preempted",) if happened["step"] >= STEPS_OF_WORLD else ()
    return min(happened.get(name, 0) for name in (*names, *rare)) > 0


def named(part):
    """Return the name of a part of a kind."""
    return part if isinstance(part, str) else "-".join(part) or "plain"


@pytest.mark.proves("pipeline stages of models with states", engine="stand-in")
@pytest.mark.parametrize(("role", "how"), WORLDS, ids=named)
@pytest.mark.parametrize("runner", RUNNERS)
def test_every_cell_that_a_step_reads_is_what_it_must_be(world, runner, role, how):
    happened = run(world, STEPS // KINDS, runner, role, **how)
    assert has_all(happened, "read", "aborted")


@pytest.mark.parametrize(("clears", "stages"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_on_offer_is_neither_cleared_nor_written(world, monkeypatch, runner, clears, stages):
    from . import second_runner

    if clears:
        second_runner.zero_new_blocks(monkeypatch)
    happened = run(world, STEPS // KINDS, runner, "kv_producer", stages=stages, opens=True)
    assert has_all(happened, "offered", "aborted")
    assert bool(happened["settled"]) is not (runner == "second" and clears)


@pytest.mark.parametrize(
    ("runner", "role", "how"),
    [(runner, "kv_producer", how) for runner in RUNNERS for how in ({}, {"stages": 2})]
    + [("second", "kv_both", how) for how in ({"drafts": True}, {"states": True})],
    ids=named,
)
def test_a_load_that_waits_for_no_step_is_seen(world, monkeypatch, runner, role, how):
    monkeypatch.setattr("kvflow.integrations.vllm.connector.writes_late", lambda _: False)
    for seed in range(3):
        found = world(runner, role, seed, **how)
        found.run(FAULT_STEPS)
        if any(worker.wrong for worker in found.engine.workers):
            return
    pytest.fail("every cell was right")


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_step_clears_no_block_of_a_prompt_that_it_preempts(world, monkeypatch, runner):
    from . import orders, second_runner

    second_runner.zero_new_blocks(monkeypatch)
    changed, settled = orders.crowded(runner)
    assert changed == []
    assert bool(settled) is not (runner == "second")


def test_a_block_that_is_cleared_before_its_lease_ends_is_seen(world, monkeypatch):
    from . import orders, second_runner

    second_runner.zero_new_blocks(monkeypatch)
    monkeypatch.setattr("kvflow.integrations.vllm.scheduler.clears_first", lambda *_: False)
    changed, settled = orders.crowded("second")
    assert settled
    assert changed == ["offered"]


def test_loads_wait_exactly_where_steps_overlap_and_vllm_does_not_defer(monkeypatch):
    from .deferral import require_waits, rows

    require_waits(rows(str(model_folder("llama")), monkeypatch.setattr))
