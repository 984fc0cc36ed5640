"""What a misconfiguration is shown with: workers, children, commands and namespaces, of one scene for each row."""

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

import kvflow
from handshake.sockets import ZeroMqNetwork
from kvflow.config import VARIABLES
from kvflow.worker.environment import PRODUCTION
from tests.helpers.limits import allowed
from tests.unit.kvflow.tools.doctor import faces
from tests.world.forked import ROOT
from tests.world.node import Node

from .misconfigured_worker import misconfigured
from .producing import SECRET
from .saying import Said, Sayings
from .shapes import Shape

MAIN = "import sys; from kvflow.tools.cli import main; sys.exit(main())"
BLOCKS = [[0, 1], [2, 3]]
NUM_TOKENS = 8
TINY = Shape(num_blocks=8, layers=2)
HOUR_S = 3600.0
COMMAND_S = 330.0


class HourAhead(ZeroMqNetwork):
    """The network of a host whose clock is an hour ahead."""

    def wall(self):
        return super().wall() + HOUR_S


class Scene:
    """What one row needs. What it opens is closed with it.

    Args:
        stack: closes what is opened.
        folder: an empty folder.
        heard: takes what is said.

    Attributes:
        heard: what has been said.
    """

    def __init__(self, stack: AsyncExitStack, folder: Path, heard: Sayings):
        self._stack = stack
        self.folder = folder
        self.heard = heard

    # Workers of this process.

    async def worker(self, engine_id="prefill-0", *, shape=TINY, environment=PRODUCTION, **settings):
        """Open a worker."""
        config = kvflow.WorkerConfig.read(
            {"engine_id": engine_id, "cluster_secret": SECRET, "transport": "loopback", **settings}
        )
        opened = kvflow.open_worker(config, shape.build(), environment=environment)
        return await self._stack.enter_async_context(opened)

    async def refuses_to_open(self, **settings):
        """Open a worker, which must fail."""
        await self.fails(self.worker(**settings))

    async def fails(self, work):
        """Await what must fail."""
        try:
            await work
        except kvflow.errors.KvflowError as error:
            self.heard.add_error(error)
        else:
            pytest.fail("it did not fail")

    async def pair(self, source=None, target=None):
        """Open two workers whose settings may differ."""
        return await self.worker(**(source or {})), await self.worker("decode-0", **(target or {}))

    async def fails_to_pull(self, source=None, target=None, *, change=None):
        """Have one worker offer a request, and another one fail to pull it; return what a router has brought."""
        producer, consumer = await self.pair(source, target)
        params = producer.offer("request-1", BLOCKS, NUM_TOKENS).to_params()
        params = change(params) if change else params
        await self.fails_with(consumer, params)
        return params

    async def fails_with(self, consumer, params):
        """Have a worker fail to pull what a router brought."""

        async def pull():
            await consumer.pull(kvflow.Ticket.from_params(params), BLOCKS)

        await self.fails(pull())

    # Other processes.

    async def child(self, *, settings=None, shape=TINY, before=(), forked=True, site=None, **environment):
        """Open a worker in a process with these variables; return the process and the worker's endpoint."""
        environment = {VARIABLES["cluster_secret"]: SECRET, **environment}
        if site is not None:
            environment |= {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "PYTHONNOUSERSITE": "1"}
            forked = False
        options = () if site is None else ("-S",)
        child = Node(forked=forked, before=before, options=options, **environment)
        self._stack.callback(child.go)
        await child.open(misconfigured, shape, settings or {})
        self.heard.said += [Said(*each) for each in await child.said()]
        return child, child.endpoint

    async def fails_to_pull_from(self, child, **settings):
        """Have a worker here fail to pull what a child offers."""
        consumer = await self.worker("decode-0", **settings)
        params = await child.offer(BLOCKS, NUM_TOKENS)
        await self.fails_with(consumer, params)

    async def command(self, *arguments, before=(), site=None, who="", **environment):
        """Run a command of kvflow in a process with these variables, and take what it found."""
        environment = {VARIABLES["cluster_secret"]: SECRET, **environment}
        if before or site:
            printed = await asyncio.to_thread(self._run, arguments, before, site, environment)
        else:
            child = Node(**environment)
            self._stack.callback(child.go)
            await child.open(misconfigured, TINY, None)
            printed = await child.command([*arguments, "--json"])
        self.heard.said += findings(who or f"kvflow {arguments[0]}", json.loads(printed))

    def _run(self, arguments, before, site, environment):
        """Run a command in a process that imports everything for itself, and return what it prints."""
        path = [str(ROOT)] if site is None else [str(site), str(ROOT)]
        options = ["-S"] if site is not None else []
        done = subprocess.run(
            [*before, sys.executable, *options, "-c", MAIN, *arguments, "--json"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert done.stdout, done.stderr
        return done.stdout

    async def examine(self, endpoint, **environment):
        """Have the doctor examine the path to a worker."""
        await self.command("doctor", endpoint.removeprefix("tcp://"), who="kvflow doctor ENDPOINT", **environment)

    async def examine_router(self, behavior):
        """Have the doctor send a request through a router that does something wrong."""
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        metrics = faces.metrics_class(patch)
        prefill, decode = faces.Face(metrics), faces.Face(metrics)
        decode.lessor = prefill
        await self._stack.enter_async_context(faces.opened(prefill, decode))
        router = faces.Router(prefill, decode, behavior)
        url = await self._stack.enter_async_context(faces.serving(router.routes()))
        await self.command("doctor", "--live", prefill.url, decode.url, url, who="kvflow doctor --live")

    # What surrounds a process.

    @contextlib.contextmanager
    def listener(self):
        """Listen at a port and answer nothing; yield its endpoint."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"tcp://127.0.0.1:{server.getsockname()[1]}"

    def silent(self):
        """Return the endpoint of a port that answers nothing, for as long as the scene lasts."""
        return self._stack.enter_context(self.listener())

    def site_without(self, *prefixes):
        """Return a folder with the installed packages, but without those whose names have a prefix."""
        installed = Path(msgspec.__file__).parents[1]
        site = self.folder / "site-packages"
        site.mkdir()
        for entry in installed.iterdir():
            if not entry.name.startswith(prefixes):
                (site / entry.name).symlink_to(entry)
        return site

    def namespaces(self, *kinds):
        """Return the words that start a process in namespaces of its own. The row is skipped if that is not allowed."""
        return allowed("unshare", *kinds, "--kill-child", "--fork")


def findings(command, printed):
    """Return what a command found, from its JSON."""
    found = printed.get("findings", [])
    found = [each for each in found if each.get("status", "failed") in ("failed", "warning", "note")]
    found += [each for each in (printed.get("error"), printed.get("failure")) if each]
    return [
        Said(command, each["code"], each.get("message") or each.get("evidence"), each.get("remedy") or "")
        for each in found
    ]


STABLE = (
    (r"(?<=:)[1-9]\d{3,4}\b", "PORT"),
    (r"\bport \d+ is in use by .*", "port PORT is in use by ..."),
    (r"\b[0-9a-f]{12,}\b", "..."),
    (r"/tmp/[\w./-]+", "..."),
    (r"\bpid:\[\d+\]", "pid:[...]"),
    (r"\b[\d,]+\.\d+ s\b", "... s"),
    (r"; that matters with RDMA.*", ""),
    (r"(?<=RLIMIT_NOFILE\): the limit is )\d+", "..."),
    (r"(?<=UCX_TLS=tcp leaves out ).*", "..."),
    (r"(?<=Known are ).*(?=\.)", "..."),
    (r" *\n *", " "),
)
"""What differs from run to run -> what ``tests/data/misconfigurations.json`` has instead."""


def stable(text):
    """Return a text without ports, folders, times and ids."""
    for pattern, instead in STABLE:
        text = re.sub(pattern, instead, text)
    return text
