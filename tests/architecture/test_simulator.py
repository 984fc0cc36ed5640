"""The simulator runs what is shipped: it drives the production classes and decides nothing of their business itself."""

import ast
import sys

import pytest

from tests.helpers.loops import looped
from tests.helpers.sources import ROOT, tree_of
from tests.simulation.scenario import simulate

FAKES = sorted((ROOT / "tests" / "fakes").glob("*.py"))

DRIVEN = (
    "handshake/client.py",
    "handshake/codec.py",
    "handshake/connection.py",
    "handshake/driver.py",
    "handshake/server.py",
    "handshake/states.py",
    "kvflow/leases/blocks.py",
    "kvflow/worker/destinations.py",
    "kvflow/leases/epochs.py",
    "kvflow/leases/table.py",
    "kvflow/leases/issuer.py",
    "kvflow/leases/tickets.py",
    "kvflow/rendezvous/dialer.py",
    "kvflow/rendezvous/listener.py",
    "kvflow/rendezvous/issuer.py",
    "kvflow/planning/bind.py",
    "kvflow/planning/pairs.py",
    "kvflow/reads/pulls.py",
    "kvflow/reads/scheduler.py",
    "kvflow/reads/lanes.py",
    "kvflow/reads/core.py",
    "kvflow/reads/prepared.py",
    "kvflow/reads/staging.py",
    "kvflow/worker/consumer.py",
    "kvflow/worker/connections.py",
    "kvflow/worker/open_pulls.py",
    "kvflow/worker/peers.py",
    "kvflow/worker/prepared.py",
    "kvflow/worker/producer.py",
    "kvflow/worker/renewals.py",
    "kvflow/worker/runtime.py",
    "kvflow/worker/threaded.py",
)
"""Where scheduling, leases, handshake, quarantine and their glue are decided."""

NOT_ITS_BUSINESS = {
    "handshake.connection",  # what is said when
    "handshake.states",
    "kvflow.worker.destinations",  # quarantine
    "kvflow.leases.epochs",
    "kvflow.reads.pulls",
    "kvflow.reads.scheduler",
}
"""What the simulator must not even import: it can only be driven from above, through a worker."""


def defined_in(path, kind):
    """Return the names of the functions, or of the classes, of a module."""
    return {node.name for node in ast.walk(tree_of(path)) if isinstance(node, kind)}


@pytest.fixture(scope="module")
def functions_run():
    """The functions that two scenarios run, by module: one with faults, and a calm one."""
    found = {}

    def note(frame, event, argument):
        if event == "call":
            code = frame.f_code
            found.setdefault(code.co_filename, set()).add(code.co_name)

    sys.setprofile(note)
    try:
        assert simulate(2).violation == ""
        assert simulate(0, calm=True).violation == ""
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("module", DRIVEN)
def test_a_scenario_runs_the_production_code(module, functions_run):
    run = functions_run.get(str(ROOT / module), set())
    assert run & defined_in(ROOT / module, ast.FunctionDef), f"nothing of {module} is run"


@looped("path", FAKES)
def test_the_simulator_defines_no_class_of_the_library_again(path):
    shipped = set().union(*(defined_in(ROOT / module, ast.ClassDef) for module in DRIVEN))
    assert len(shipped) > 30
    assert not defined_in(path, ast.ClassDef) & shipped


@looped("path", FAKES)
def test_the_simulator_imports_nothing_that_decides(path):
    imported = {node.module for node in ast.walk(tree_of(path)) if isinstance(node, ast.ImportFrom)}
    assert not imported & NOT_ITS_BUSINESS
