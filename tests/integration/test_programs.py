"""Programs that end in an unusual way, as processes of their own."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvflow.integrations.vllm.admission import Contact, EarlyAdmission
from kvflow.integrations.vllm.messages import Hold
from kvflow.tools.cli import PIPE_CLOSED
from tests.unit.kvflow.integrations.vllm_like import new_ticket

PROGRAM = (sys.executable, "-c", "import sys; from kvflow.tools.cli import main; sys.exit(main())")
COMMAND = Hold("r", new_ticket().grants[0], number=1)

UNCLOSED = """
import kvflow
spec = kvflow.FullAttention(block_size=4, num_kv_heads=2, head_size=8, dtype="float16")
secret = "a secret of the tests, long enough"
config = kvflow.WorkerConfig(engine_id="decode-0", cluster_secret=secret, transport="loopback")
opened = kvflow.run_worker(config, kvflow.allocate({"a": spec}, num_blocks=8))
print(opened.__enter__().endpoint)
"""


CLOSED_LATE = "import atexit\natexit.register(opened.__exit__, None, None, None)"


@pytest.mark.parametrize("ending", ["", CLOSED_LATE], ids=["never", "at exit"])
def test_a_program_that_closes_its_worker_too_late_ends(ending):
    done = subprocess.run([sys.executable, "-c", UNCLOSED + ending], capture_output=True, timeout=100, check=True)
    assert done.stdout.startswith(b"tcp://")
    assert b"Error" not in done.stderr


RANK_PROCESS = """
import sys
from kvflow.integrations.vllm.admission import reachable

class Rank:
    def take(self, commands):
        print(commands[0].request_id, flush=True)

with reachable(Rank(), apart=True) as contact:
    print(contact.name, contact.endpoint, contact.key.hex(), flush=True)
    sys.stdin.read()
"""


def test_a_rank_that_is_killed_costs_the_scheduler_nothing():
    with subprocess.Popen(
        [sys.executable, "-c", RANK_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        name, endpoint, key = process.stdout.readline().split()
        early = EarlyAdmission()
        early.meet([Contact(name, endpoint, bytes.fromhex(key))])
        arrived = threading.Event()
        threading.Thread(target=lambda: process.stdout.readline() and arrived.set(), daemon=True).start()
        while not arrived.wait(0.01):
            early.send(COMMAND)
        process.send_signal(signal.SIGSTOP)
        ticket = new_ticket(num_tokens=16 * 4096, block_ids=(tuple(range(4096)),))
        large = Hold("large", ticket.grants[0], number=2)
        for _ in range(1000):  # more than its queues keep
            early.send(large)
        process.kill()
        process.wait()
        for _ in range(1000):
            early.send(COMMAND)
        early.close()
    Path(endpoint.removeprefix("ipc://")).unlink()
    Path(endpoint.removeprefix("ipc://")).parent.rmdir()


@pytest.mark.processes
def test_a_pipe_whose_reader_leaves_ends_the_command_quietly():
    with subprocess.Popen(
        [*PROGRAM, "layout", "gpt-oss-20b", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        command.stdout.close()
        said = command.stderr.read()
    assert (command.wait(), said) == (PIPE_CLOSED, b"")
