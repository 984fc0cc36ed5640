"""A worker that is called from where it does not live: from a forked child, from another event loop, from none."""

import json
import subprocess
import sys

import pytest

from tests.world.node import PATIENCE_S, environment_of_children

TOLD = 3 * PATIENCE_S


def told_by(module, *arguments):
    """Run a process to its end, and return what it says."""
    command = [sys.executable, "-m", f"tests.integration.{module}", *arguments]
    done = subprocess.run(
        command, env=environment_of_children(), stdout=subprocess.PIPE, timeout=TOLD, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("end", ["_exit", "exit"])
@pytest.mark.parametrize("shell", ["threads", "asyncio"])
def test_a_forked_child_is_refused_and_its_parent_goes_on(shell, end):
    """Both would sign the same slot and epoch; and whatever the child closes is the parent's."""
    told = told_by("forking_process", shell, end)
    for refused in told["refused"]:
        assert set(refused.values()) == {"forked_process"}, refused
        assert {"offer", "admit", "pull", "mint.offer"} <= refused.keys()
    assert told["status"] == 0
    assert told["outcomes"] == ["released", "released"]
    assert told["held"] == 1, "what the parent has on offer is still held"


@pytest.mark.processes
def test_a_worker_refuses_calls_on_another_loop():
    told = told_by("looping_process")
    for place in ("another loop", "another thread", "no loop"):
        assert set(told[place].values()) == {"wrong_event_loop, see run_worker"}, (place, told[place])
        assert {"pull", "start_pull", "pull_many", "release", "quiesced", "wait_offer", "hold", "drain"} <= told[
            place
        ].keys()
    # One for each pull of three places and three ways to call it, however early it was refused.
    assert told["records"] == ["wrong_event_loop"] * 9
    assert told["threads left"] == []
