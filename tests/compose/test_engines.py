"""Two engines in containers, over TCP and over shared memory: rights, health, speed, and a producer that is killed."""

# ruff: noqa: T201  # figures are shown, not judged

import json
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from .containers import docker, run, running, wait_until_healthy

pytestmark = pytest.mark.timeout(600)  # containers start within seconds, engines within tens of them

TRAFFIC = ("python", "-c", (Path(__file__).parent / "traffic.py").read_text())

TYPED = {"peer_lost", "peer_unavailable", "stale_lease", "deadline_exceeded"}
"""Codes that a pull may end with when its producer dies."""

ENDED_S = 20.0
"""From the kill on, within this everything that was in flight has ended: before a deadline of 30 s could end it."""

TICKETS = 6

PLANES = {"tcp": "tcp", "shm": "nixl"}
"""Profile -> the data plane that its engines choose."""

REACHABLE = """
import socket, time
deadline = time.monotonic() + 60
while True:
    try:
        socket.create_connection(("127.0.0.1", 8300)).close()
        break
    except OSError:
        if time.monotonic() > deadline:
            raise
        time.sleep(0.01)
"""


@pytest.fixture(scope="module")
def client(project):
    """A container on the private network, to send requests from."""
    return project.spare(project.driver, "client", "sleep", "infinity")


def test_the_engines_share_a_secret_that_only_they_know(project, client):
    secret, same = (docker("exec", container, "cat", "/run/kvflow/secret") for container in engines(project))
    assert secret == same
    assert len(secret) >= 40
    for container in engines(project):
        assert docker("exec", container, "stat", "--format", "%a %U", "/run/kvflow/secret") == "600 kvflow"
        assert secret not in docker("inspect", container)
    assert run("docker", "exec", client, "cat", "/run/kvflow/secret", check=False).returncode == 1


def test_the_engines_run_with_few_rights(project):
    for container in engines(project):
        assert docker("exec", container, "id", "--user") == "1000"
        limits = json.loads(docker("inspect", "--format", "{{json .HostConfig}}", container))
        assert limits["ReadonlyRootfs"]
        assert limits["CapDrop"] == ["ALL"]
        assert limits["CapAdd"] == (["SYS_PTRACE"] if project.profile == "shm" else None)
    assert docker("network", "inspect", "--format", "{{.Internal}}", f"{project.name}_private") == "true"


def test_an_engine_that_does_not_answer_is_unhealthy(project):
    container = project.container(project.decode)
    docker("exec", container, "healthy.py")
    with stopped(container):
        assert run("docker", "exec", container, "healthy.py", check=False).returncode == 1


def test_a_killed_prefill_ends_what_it_owed_and_serves_again(project, client):
    expected = serve(client)
    tickets = docker("exec", client, *TRAFFIC, "prefill", str(2 * TICKETS)).splitlines()
    prefill = project.container(project.prefill)

    # Stopped first, so that what is in flight stays so until the kill.
    docker("kill", "--signal", "STOP", prefill)
    with decoding(client, tickets[:TICKETS]) as lines:
        assert next(lines)["in_flight"] > 0
        killed = time.monotonic()
        docker("kill", prefill)
        *pulls, late = sorted(lines, key=lambda line: line["request"] == "late")
        assert time.monotonic() - killed < ENDED_S
    assert late["tokens"] is None, "a prompt was prefilled by a stopped engine"
    assert len(pulls) == TICKETS
    for pull in pulls:
        # With a shared PID namespace the kernel copies without the producer's help, and that is a success.
        assert pull.get("code") in TYPED or (project.profile == "shm" and pull["tokens"])

    asked = time.monotonic()
    with decoding(client, tickets[TICKETS:]) as lines:
        assert {line.get("code", "none") for line in lines if line.get("request", "late") != "late"} <= TYPED
    assert time.monotonic() - asked < ENDED_S

    docker("start", prefill)
    wait_until_healthy(prefill)
    assert serve(client) == expected


def test_bytes_go_over_the_plane_of_the_profile(project, client):
    serve(client)
    assert planes_in(docker_logs(project.container(project.decode))) == {PLANES[project.profile]}


def test_the_tcp_plane_encrypts_if_it_is_told_to(image):
    encrypted = {"KVFLOW_DEMO_TCP_ENCRYPTION": "tls"}
    with running("tcp", environment=encrypted) as project:
        for container in engines(project):
            assert "KVFLOW_DEMO_TCP_ENCRYPTION=tls" in docker("inspect", container)
        serve(project.spare(project.driver, "client", "sleep", "infinity"))
        assert planes_in(docker_logs(project.container(project.decode))) == {"tcp"}


def test_a_pull_keeps_up_with_what_else_could_move_it(project, capsys):
    """What keeping up means in numbers is for people to judge: a machine that is shared decides it otherwise."""
    source = project.spare(
        project.prefill, "source", "python", "-m", "kvflow.tools.bench.source", "--listen", "0.0.0.0:8300"
    )
    measure = ["kvflow", "bench", "pull", "--rounds", "8", "--json", "--source", f"{source}:8300"]
    try:
        docker("exec", source, "python", "-c", REACHABLE)
        tables = json.loads(project.compose("run", "--rm", "-T", project.decode, *measure))["tables"]
    finally:
        docker("rm", "--force", source)
    columns, *rows = tables[0]["columns"], *tables[0]["rows"]
    figures = [dict(zip(columns, row, strict=True)) for row in rows]
    with capsys.disabled():
        print(f"\n{project.profile}: GB/s of a pull, and of plain TCP or bare NIXL; the median of their paired ratios")
        other, ratio = ("streams GB/s", "of streams") if project.profile == "tcp" else ("bare NIXL GB/s", "of bare")
        for row in figures:
            print(f"{row['size']:>8} {row['GB/s']:6.2f} {row[other]:6.2f} {row[ratio]:6.2f}")
    # The kernel copies between the processes of one PID namespace, and nowhere else; so NIXL reaches no other.
    for name in ("readv GB/s", "bare NIXL GB/s"):
        assert all((row[name] is not None) == (project.profile == "shm") for row in figures)
    assert all(row["GB/s"] > 0 for row in figures)


def docker_logs(container):
    """Return what a container has written to its standard error."""
    return run("docker", "logs", container).stderr


def planes_in(log):
    """Return the data planes of the peers that were met, as records say."""
    records = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    return {record["plane"] for record in records if record["event"] == "peer.connected"}


def engines(project):
    return [project.container(project.prefill), project.container(project.decode)]


def serve(client):
    """Send requests through both engines; return their tokens, once nothing is held any more."""
    lines = docker("exec", client, *TRAFFIC, "serve", "2").splitlines()
    *outcomes, decode, prefill = map(json.loads, lines)
    assert all(outcome["tokens"] for outcome in outcomes), outcomes
    for left in (decode, prefill):
        assert {left["blocks_used"], left["leases_held"], left["blocks_quarantined"]} == {0}
    return [outcome["tokens"] for outcome in outcomes]


@contextmanager
def decoding(client, tickets):
    """Have tickets decoded; enter with the lines that come of it, as they come."""
    command = ["docker", "exec", "--interactive", client, *TRAFFIC, "decode"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdin.write("".join(f"{ticket}\n" for ticket in tickets))
        process.stdin.close()
        try:
            yield map(json.loads, process.stdout)
        finally:
            process.kill()


@contextmanager
def stopped(container):
    """Stop the processes of a container, as one that hangs; let them go on afterwards."""
    docker("kill", "--signal", "STOP", container)
    try:
        yield
    finally:
        docker("kill", "--signal", "CONT", container)
