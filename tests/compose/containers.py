"""Containers of the Compose file, and the programs that handle them."""

import os
import secrets
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND_S = 180


def run(*command, timeout=COMMAND_S, check=True, **options):
    """Run a program and return how it ended; with ``check``, fail with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)
    if check:
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done


def docker(*arguments, **options):
    return run("docker", *arguments, **options).stdout.strip()


def compose_command():
    """Return how Compose is called here: version 2, or docker-compose 1.29."""
    plugin = run("docker", "compose", "version", check=False)
    return ["docker", "compose"] if plugin.returncode == 0 else ["docker-compose"]


def left_of(project):
    """Return every container, network and volume whose name says that it belongs to a project."""
    kinds = {"ps": ("--all", "{{.Names}}"), "network": ("ls", "{{.Name}}"), "volume": ("ls", "{{.Name}}")}
    return [
        name
        for kind, (flag, form) in kinds.items()
        for name in docker(kind, flag, "--filter", f"name={project}", "--format", form).split()
    ]


class Project:
    """One profile of the Compose file, under a name of its own."""

    def __init__(self, name, profile, environment=()):
        self.name = name
        self._environment = {**os.environ, **dict(environment)}
        self.profile = profile
        self.prefill, self.decode, self.driver = (f"{role}-{profile}" for role in ("prefill", "decode", "driver"))

    def compose(self, *arguments, **options):
        file = str(ROOT / "docker" / "compose.yaml")
        options_first = ["--file", file, "--project-name", self.name, "--profile", self.profile]
        command = [*compose_command(), *options_first, *arguments]
        return run(*command, env=self._environment, **options).stdout.strip()

    def container(self, service):
        """Return the id of a service's container."""
        return self.compose("ps", "--quiet", service)

    def spare(self, service, name, *command):
        """Start one more container of a service, with another command; return its name, at which peers reach it."""
        name = f"{self.name}-{name}"
        self.compose("run", "--detach", "--name", name, service, *command)
        return name


@contextmanager
def running(profile, environment=()):
    """Start both engines of a profile, and wait until they are healthy; afterwards nothing is left of them."""
    project = Project(f"kvflow-test-{secrets.token_hex(4)}", profile, environment)
    try:
        project.compose("up", "--detach", project.prefill, project.decode)
        wait_until_healthy(project.container(project.prefill), project.container(project.decode))
        yield project
    finally:
        project.compose("down", "--volumes", "--remove-orphans")
    assert left_of(project.name) == []


def wait_until_healthy(*containers):
    """Wait until the health checks of all succeed; Docker runs one every five seconds."""
    deadline = time.monotonic() + COMMAND_S
    for container in containers:
        while docker("inspect", "--format", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, docker("logs", "--tail", "40", container)
