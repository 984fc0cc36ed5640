"""``kvflow doctor`` between real processes: over NIXL and TCP, in other namespaces, with a NIXL that is not whole."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvflow.config import SECRET_VARIABLE
from kvflow.reads.reach import PREFIXES
from kvflow.tools.doctor import apart, path
from kvflow.tools.doctor.codes import FailureFigures
from tests.helpers.limits import allowed
from tests.ports import free_port
from tests.vllm.hosts import Hosts

pytestmark = pytest.mark.processes

PATIENCE_S = 330.0
KVFLOW = (sys.executable, "-c", "import sys; from kvflow.tools.cli import main; sys.exit(main())", "doctor")
PIDS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
WEAK = ("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace")
"""A process of root that may not copy the memory of another one, which may do more than it."""
OWN_BOOT = 'echo "$0" > "$1" && mount --bind "$1" /proc/sys/kernel/random/boot_id && shift && exec "$@"'
"""Has a command believe that it runs on a host of its own. UCX believes it, too."""


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """What all processes of a test have."""
    monkeypatch.setenv(SECRET_VARIABLE, "a secret of these tests, long enough")
    for name in [name for name in os.environ if name.startswith(PREFIXES)]:  # tests before this one loaded NIXL
        monkeypatch.delenv(name)


@asynccontextmanager
async def offering(*arguments, before=(), listen="127.0.0.1:0"):
    """Run ``kvflow doctor --listen``, and yield its endpoint."""
    process = await asyncio.create_subprocess_exec(
        *before, *KVFLOW, "--listen", listen, "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            text = await process.stdout.readuntil(b"}\n")
        yield json.loads(text)["endpoint"].removeprefix("tcp://")
    finally:
        (process.kill if before else process.terminate)()  # the first process of a namespace takes no other signal
        async with asyncio.timeout(PATIENCE_S):
            await process.wait()


async def examined(endpoint, *arguments, before=()):
    """Run ``kvflow doctor ENDPOINT``; return its status, and what it finds by code or subject."""
    process = await asyncio.create_subprocess_exec(
        *before, *KVFLOW, endpoint, "--json", *arguments, stdout=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(PATIENCE_S):
        printed, _ = await process.communicate()
    return process.returncode, {each["code"] or each["subject"]: each for each in json.loads(printed)["findings"]}


@pytest.mark.nixl
async def test_two_processes_of_a_host_read_over_shared_memory():
    async with offering() as endpoint:
        status, found = await examined(endpoint)
    assert status == 0, found
    assert found["data plane"]["evidence"] == "NIXL carries the bytes, over cma (known by addresses)"
    assert "over cma (nixl)" in found["large reads"]["evidence"]
    assert found["location"]["evidence"].endswith("and the same PID namespace")


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("before", "words", "remedy"),
    [
        (PIDS, "the PID namespaces differ", "--pid=host"),
        (WEAK, "the kernel does not let this process copy", "SYS_PTRACE"),
    ],
    ids=["another PID namespace", "without the right to copy"],
)
async def test_what_keeps_two_processes_from_shared_memory_is_named(before, words, remedy):
    before = allowed(*before)
    async with offering() as endpoint:
        status, found = await examined(endpoint, "--strict", before=before)
    slow = found["data_plane_slow"]
    assert (status, slow["status"]) == (1, "warning")
    assert words in slow["evidence"]
    assert remedy in slow["remedy"]
    assert "over tcp (tcp)" in found["large reads"]["evidence"]


@pytest.mark.nixl
async def test_ucx_that_is_restricted_on_one_side_is_named(monkeypatch):
    async with offering() as endpoint:
        monkeypatch.setenv("UCX_TLS", "tcp")
        status, found = await examined(endpoint)
    assert status == 0, found
    assert "UCX_TLS is 'tcp' here, which leaves out cma" in found["data_plane_slow"]["evidence"]


@pytest.mark.nixl
async def test_ucx_that_is_set_otherwise_on_one_side_is_named_in_nixls_words(monkeypatch):
    async with offering() as endpoint:
        monkeypatch.setenv("UCX_PROTO_ENABLE", "n")
        _, found = await examined(endpoint)
    assert "UCX_PROTO_ENABLE is 'n' here and not set at the peer" in found["data_plane_slow"]["evidence"]


async def test_two_hosts_are_told_from_one(tmp_path):
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("networks cannot be made here")
    try:
        hosts = Hosts(["near", "far"], tmp_path).__enter__()
    except subprocess.CalledProcessError:
        pytest.skip("networks cannot be made here")
    try:
        near, far = (
            ("sh", "-c", f'exec {hosts.command(name, ["sh", "-c", OWN_BOOT, name, str(tmp_path / name)])} "$@"', "sh")
            for name in ("near", "far")
        )
        address = f"{hosts.addresses['far']}:{free_port()}"
        async with offering(before=far, listen=address) as endpoint:
            assert endpoint == address
            status, found = await examined(endpoint, before=near)
    finally:
        hosts.__exit__(None, None, None)
    assert status == 0, found
    assert found["location"]["evidence"] == "another host, 'far'; this one is 'near'"
    assert found["data plane"]["status"] == "note"
    assert "the TCP plane carries the bytes, between two hosts: no RDMA device here" in found["data plane"]["evidence"]
    assert "large reads" in found


def codes(findings):
    return {finding.code or finding.subject: finding for finding in findings}


@pytest.mark.nixl
async def test_a_nixl_that_is_whole_starts_and_reads():
    found = codes([each async for each in path.check_nixl()])
    assert set(found) == {"NIXL", "UCX"}
    assert "cma" in found["UCX"].evidence
    read = await path.check_reads("nixl")
    assert (read.status, "over cma" in read.evidence) == ("ok", True)


async def test_two_processes_read_over_tcp():
    read = await path.check_reads("tcp")
    assert (read.status, "over tcp (tcp)" in read.evidence) == ("ok", True)


@pytest.mark.nixl
async def test_what_a_variable_of_ucx_leaves_out_is_found(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")
    first, *others = [each async for each in path.check_nixl()]
    assert "UCX_TLS=tcp" in first.evidence
    found = codes(others)
    assert found["ucx_restricted"].status == "warning"
    assert "UCX_TLS=tcp leaves out cma" in found["ucx_restricted"].evidence
    read = await path.check_reads("nixl")
    assert read.code == "shared_memory_unused"
    assert "UCX_TLS is 'tcp' here, which leaves out cma" in read.evidence
    assert "UCX_TLS" in read.remedy


BROKEN = {
    "missing": ("raise ImportError('there is no NIXL here')", "nixl_missing", "there is no NIXL here"),
    "crashing": ("import os\nos.abort()", "nixl_agent_failed", "was ended by SIGABRT"),
    "ending": ("raise SystemExit('no such symbol')", "nixl_agent_failed", "no such symbol"),
}


def broken(folder, program):
    """Return the folder of a machine whose NIXL does something else."""
    for name in ("nixl", "nixl_cu12", "nixl_cu13", "nixl_rocm"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "_bindings.py").write_text(program)
    return str(folder)


@pytest.mark.parametrize("how", BROKEN)
async def test_a_nixl_that_is_broken_does_not_end_the_doctor(monkeypatch, tmp_path, how):
    program, code, words = BROKEN[how]
    monkeypatch.syspath_prepend(broken(tmp_path, program))
    found = codes([each async for each in path.check_nixl()])
    assert list(found) == [code]
    assert words in found[code].evidence
    assert found[code].remedy


async def test_a_nixl_that_hangs_is_ended(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(broken(tmp_path, "import threading\nthreading.Event().wait()"))
    ended = await apart.run(apart.start_agent, limit_s=3.0)
    assert isinstance(ended, apart.ChildEnded)
    assert ended.how == "did not answer within 3 s"


async def test_a_reader_that_is_refused_names_the_error():
    answer = await apart.run(partial(apart.read, f"tcp://127.0.0.1:{free_port()}", "tcp"))
    assert isinstance(answer, FailureFigures)
    assert answer.code == "peer_lost"
