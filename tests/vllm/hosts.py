"""Hosts on one machine: each has its own network, processes, shared memory and name, and all are on one wire.

It takes root, ``ip`` and ``unshare``. What a host runs shares with the other hosts its files, and nothing else.
"""

import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from .engines import ROOT, SERVERS_ENVIRONMENT
from .pairs import model_folder
from .servers import LOGS, Server, Together

CONTROL_PORT = 5600
"""Of the first rank of an engine."""

FIRST = "198.18.16"
"""Network of the hosts. Source: RFC 2544, addresses for tests of networks; ``tests.world.wire`` has others of them."""
NAMESPACES = ("--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc")
BOOT = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && mount --bind "$1" /etc/hosts && shift && exec "$@"'


class Hosts:
    """Hosts with the addresses ``198.18.16.1`` and so on, which this process reaches, too; by address, not by name.

    Use it as a context manager: leaving it removes the hosts. They know each other by ``names``.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.addresses = {name: f"{FIRST}.{number}" for number, name in enumerate(names, 1)}
        self._names = folder / "hosts"
        self._names.write_text("".join(f"{address} {name}\n" for name, address in self.addresses.items()))
        self._prefix = f"kvf{os.getpid()}"
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        wire, own = f"{self._prefix}w", f"{self._prefix}v"
        with self._stack as making:
            # A network of its own: a container engine on this machine forbids bridges of ours to forward.
            ip("netns", "add", wire)
            making.callback(ip, "netns", "del", wire)
            ip("-n", wire, "link", "add", "wire", "type", "bridge")
            ip("-n", wire, "link", "set", "wire", "up")
            ip("link", "add", own, "type", "veth", "peer", "name", own, "netns", wire)
            making.callback(ip, "link", "del", own)
            ip("-n", wire, "link", "set", own, "master", "wire", "up")
            ip("addr", "add", f"{FIRST}.254/24", "dev", own)
            ip("link", "set", own, "up")
            for address in self.addresses.values():
                self._make(address, wire, making)
            self._stack = making.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _make(self, address: str, wire: str, making: ExitStack) -> None:
        name = self._name(address)
        ip("netns", "add", name)
        making.callback(ip, "netns", "del", name)
        ip("-n", wire, "link", "add", f"{name}v", "type", "veth", "peer", "name", "eth0", "netns", name)
        making.callback(ip, "-n", wire, "link", "del", f"{name}v")  # a namespace may outlive its name for a moment
        ip("-n", wire, "link", "set", f"{name}v", "master", "wire", "up")
        ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            ip("-n", name, "link", "set", device, "up")
        ip("-n", name, "route", "add", "default", "via", f"{FIRST}.254")

    def _name(self, address: str) -> str:
        return f"{self._prefix}h{address.rpartition('.')[2]}"

    def command(self, name: str, words: Sequence[str]) -> str:
        """Return the shell command that runs another command on a host."""
        network = self._name(self.addresses[name])
        boot = ["ip", "netns", "exec", network, "unshare", *NAMESPACES, "sh", "-c", BOOT, name, str(self._names)]
        return shlex.join([*boot, *words])


class FarServer(Server):
    """A server on one of the hosts; ``name`` is that of the host."""

    def __init__(
        self,
        hosts: Hosts,
        name: str,
        *,
        command: Sequence[str],
        port: int,
        variables: Mapping[str, str],
        folder: Path,
    ) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **SERVERS_ENVIRONMENT, **variables}
        super().__init__(name, hosts.command(name, command), port, environment, folder)
        self.url = f"http://{hosts.addresses[name]}:{port}"

    def stop(self) -> int:
        """End the processes of the host at once: their first one takes no other signal."""
        return self.kill()


class FarServers(Together):
    """Servers on hosts of their own; ``folder`` is for programs, records and lists of names."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.hosts = Hosts(names, folder)
        self.model = str(model_folder("llama"))
        self.secret = secrets.token_urlsafe(32)

    def __enter__(self) -> Self:
        self._stack.enter_context(self.hosts)
        return super().__enter__()

    def serve(self, name: str, *, command: Sequence[str], port: int, variables: Mapping[str, str]) -> FarServer:
        """Start a server on a host; see ``FarServer``."""
        server = FarServer(self.hosts, name, command=command, port=port, variables=variables, folder=ROOT)
        self._stack.callback(server.stop)
        return server

    def require_advertised(self, server: FarServer, name: str, rank: int = 0, num_ranks: int = 1) -> None:
        """Require that a server says once that its rank is at a host, and does not doubt it."""
        said = server.log.read_text()
        address = f"tcp://{self.hosts.addresses[name]}:{CONTROL_PORT + rank}"
        assert len(re.findall(f"rank {rank} of {num_ranks} of engine \\S+ is at {address}: ", said)) == 1, said
        assert "no address of this host" not in said


def ip(*words: str) -> None:
    """Run ``ip``."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert not done.returncode, f"ip {' '.join(words)}: {done.stderr}. These tests need root and network namespaces."
