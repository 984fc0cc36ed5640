"""A steady pull executes at most 3 % more than at the commit of tests/golden/hot_path.json: counted, not timed."""

import secrets

import pytest

from kvflow.config import SECRET_VARIABLE

from .hot_path import CALLS, KIB, executed, known_figures, least, packed
from .hot_path_children import Child
from .hot_path_sides import open_readers

ROUNDS_MAX = 60
"""On a busy machine something else may come between. In one of these rounds nothing does."""

COMPARED = ("calls", "bytecodes", "records")

MORE_MAX = 1.03
"""Room for a clearer form. What adds up beyond it is looked at with paired timings."""

COMMIT, FIGURES = known_figures()


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.skipif(not FIGURES, reason="figures of another version of Python")
def test_a_steady_pull_executes_hardly_more_than_before(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, secrets.token_hex(32))
    wanted = {what: {name: int(FIGURES[what][name] * MORE_MAX) for name in COMPARED} for what in CALLS}
    rounds, found = [], {}
    with Child(open_readers, ["pull, traced"], *2 * [packed(1 << 8, 32 * KIB)]) as readers:
        for turn in range(ROUNDS_MAX):
            rounds.append(readers.ask("each", "calls", turn, 2)["pull, traced"])
            counted = {what: executed(least(each[at] for each in rounds)) for at, what in enumerate(CALLS)}
            found = {what: {name: counted[what][name] for name in COMPARED} for what in CALLS}
            if all(found[what][name] <= wanted[what][name] for what in CALLS for name in COMPARED):
                return
    pytest.fail(
        f"a steady pull executes more than at {COMMIT}: found {found}, wanted at most {wanted}. "
        "python -m tests.benchmarks.hot_path --only calls names the functions."
    )
