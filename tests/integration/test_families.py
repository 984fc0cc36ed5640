"""Workers on two hosts, network namespaces here, whose wire has IPv4, IPv6, or both."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from ipaddress import ip_address

import pytest

from kvflow import errors
from kvflow.config import SECRET_VARIABLE
from kvflow.integrations.vllm.settings import HOST_VARIABLE
from tests.docs.manifests import transfer_config
from tests.world.node import environment_of_children

from .consuming import consuming, dialing_once
from .producing import SECRET
from .shapes import Shape

pytestmark = pytest.mark.processes

BLOCKS = [[0, 1], [2, 3]]
WIRE = ip_address("198.19.0.0") + 4 * (os.getpid() % (1 << 14))
"""A network for each process of tests, because our end of the wire is in the namespace of all. Source: RFC 2544."""
HERE = {4: str(WIRE + 1), 6: f"fd00:32:{os.getpid() >> 16:x}:{os.getpid() & 0xFFFF:x}::1"}
THERE = {4: str(WIRE + 2), 6: HERE[6][:-1] + "2"}
LENGTH = {4: "30", 6: "64"}


def ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def wired():
    """Return a function that makes another host, and the wire to it; of the words that run a command there."""
    name = f"kvf{os.getpid()}f"
    if shutil.which("ip") is None or subprocess.run(["ip", "netns", "add", name], check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    with ExitStack() as removing:
        removing.callback(ip, "netns", "del", name)

        def wire(*families):
            ip("link", "add", f"{name}a", "type", "veth", "peer", "name", f"{name}b", "netns", name)
            for family in families:
                for words, device, address in (((), f"{name}a", HERE), (("-n", name), f"{name}b", THERE)):
                    at_once = ("nodad",) if family == 6 else ()
                    ip(*words, "address", "add", f"{address[family]}/{LENGTH[family]}", "dev", device, *at_once)
            ip("link", "set", f"{name}a", "up")
            for device in ("lo", f"{name}b"):
                ip("-n", name, "link", "set", device, "up")
            return ("ip", "netns", "exec", name)

        yield wire


def settings_there(before, address):
    """Return what the manifest for prefill comes to on a host with this address."""
    extra = json.dumps(transfer_config("prefill")["kv_connector_extra_config"])
    told = subprocess.run(
        [*before, sys.executable, "-m", "kvflow", "config", "--vllm", extra, "--json"],
        check=True,
        capture_output=True,
        text=True,
        env=environment_of_children() | {HOST_VARIABLE: address, SECRET_VARIABLE: SECRET},
    )
    values = {each["name"]: each["value"] for each in json.loads(told.stdout)["settings"]}
    return {name: values[name] for name in ("bind", "tcp_bind")}


async def read(producer, consumer, name="r"):
    await consumer.pull(await producer.offer(name, BLOCKS, 8), BLOCKS)
    consumer.has(name, BLOCKS, 8)


@pytest.mark.parametrize("families", [(4,), (6,), (4, 6), (6, 4)], ids=["IPv4", "IPv6", "IPv4 first", "IPv6 first"])
async def test_the_manifests_serve_pods_of_each_family(spawn, wired, families):
    before = wired(*families)
    settings = settings_there(before, THERE[families[0]])
    assert THERE[families[0]] in settings["bind"]
    async with spawn(forked=False, before=before).producing(Shape(), transport="tcp", **settings) as producer:
        assert THERE[families[0]] in producer.endpoint
        async with consuming(transport="tcp") as consumer:
            await read(producer, consumer)


@pytest.mark.parametrize("listens", [4, 6, None], ids=["at IPv4", "at IPv6", "at both"])
async def test_a_name_with_addresses_of_both_families_is_reached(spawn, wired, listens, monkeypatch):
    async def both(_host, port, **_):
        return [(0, 0, 0, "", (THERE[family], port)) for family in (6, 4)]

    host = {4: "0.0.0.0", 6: f"[{THERE[6]}]", None: "[::]"}[listens]
    settings = {
        name: f"tcp://{at}:{port}"
        for port, prefix in ((5600, ""), (5700, "tcp_"))
        for name, at in ((f"{prefix}bind", host), (f"{prefix}advertise", "pod.invalid"))
    }
    before = wired(4, 6)
    async with spawn(forked=False, before=before).producing(Shape(), transport="tcp", **settings) as producer:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
        async with consuming(transport="tcp") as consumer:
            await read(producer, consumer)


@pytest.mark.parametrize("family", [4, 6])
async def test_a_data_port_that_is_closed_is_named(spawn, wired, family):
    host = f"[{THERE[6]}]" if family == 6 else THERE[4]
    closed = f"tcp://{host}:5799"
    settings = {"bind": f"tcp://{host}:5600", "tcp_advertise": closed}
    async with (
        spawn(forked=False, before=wired(family)).producing(Shape(), transport="tcp", **settings) as producer,
        dialing_once(transport="tcp") as consumer,
    ):
        with pytest.raises(errors.PeerLost) as caught:
            await consumer.pull(await producer.offer("r", BLOCKS, 8), BLOCKS)
        assert closed in caught.value.message
        assert "tcp_advertise" in caught.value.message
        assert "tcp_advertise" in caught.value.remedy
        await consumer.worker.quiesced("r")
