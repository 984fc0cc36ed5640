"""What the doctor finds on hosts with limits and namespaces of their own."""

import json
import subprocess
import sys

from kvflow.tools.doctor import facts
from kvflow.tools.doctor.codes import Finding
from tests.helpers.limits import allowed

LIMITED = """
import json, resource, sys
import msgspec
resource.setrlimit(getattr(resource, sys.argv[1]), (int(sys.argv[2]),) * 2)
from kvflow.tools.doctor import facts
print(msgspec.json.encode(list(facts.examine_machine())).decode())
"""


def in_a_child(limit, value, before=()):
    """Return what a child finds that has a limit."""
    done = subprocess.run(
        [*before, sys.executable, "-c", LIMITED, limit, str(value)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return {each["subject"]: Finding(**each) for each in json.loads(done.stdout)}


def test_little_memory_that_may_be_locked_is_noticed():
    found = in_a_child("RLIMIT_MEMLOCK", 64 << 10)["memlock"]
    assert found.code == "memlock_low"
    assert "64 KiB" in found.evidence


def test_few_files_that_may_be_open_are_noticed():
    found = in_a_child("RLIMIT_NOFILE", 256)["open files"]
    assert (found.code, found.status) == ("open_files_low", "warning")
    assert "256" in found.evidence


def test_another_pid_namespace_is_noticed():
    before = allowed("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    found = in_a_child("RLIMIT_CORE", 0, before)["PID namespace"]
    assert (found.code, found.status) == ("", "note")
    assert facts.HOST_PID_NAMESPACE not in found.evidence
    assert "shared memory" in found.evidence


def test_a_host_without_a_route_is_told_from_one_that_is_silent():
    program = (
        "from kvflow.tools.doctor.facts import dial; print([each.code for each in dial('tcp://192.0.2.7:7000')[1]])"
    )
    done = subprocess.run(
        [*allowed("unshare", "--net"), sys.executable, "-c", program],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "['host_unreachable']"
