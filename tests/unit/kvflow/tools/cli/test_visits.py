"""``kvflow inspect``: dials real workers, and names every failure with its code and remedy."""

import asyncio
import json
import re
from contextlib import asynccontextmanager

import msgspec
import pytest

from handshake.sockets import ZeroMqNetwork
from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE
from kvflow.errors import PeerLost
from kvflow.rendezvous.dialer import open_asker
from kvflow.rendezvous.issuer import draw_pair
from kvflow.tools.cli import inspect, main
from kvflow.worker.environment import PRODUCTION
from kvflow.worker.runtime import open_worker
from tests.helpers.settings import flat_config
from tests.unit.kvflow.worker.helpers import PATIENCE_S, SECRET, cache_of

pytestmark = pytest.mark.usefixtures("cluster_member")


def config(engine_id="prefill-0", **settings):
    return flat_config(**{"engine_id": engine_id, "cluster_secret": SECRET, "transport": "loopback"} | settings)


@asynccontextmanager
async def working(engine_id="prefill-0", environment=PRODUCTION, **settings):
    settings = config(engine_id, **settings)
    async with asyncio.timeout(PATIENCE_S), open_worker(settings, cache_of(), environment=environment) as worker:
        yield worker


@pytest.fixture
def command(capsys):
    """Run a command beside the loop; return its status, what it printed, and its errors."""

    async def run(*arguments):
        status = await asyncio.to_thread(main, list(arguments))
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


async def test_a_worker_says_who_it_is_and_what_it_has(command):
    async with working(model="a model") as worker:
        status, out, _ = await command("inspect", worker.endpoint.removeprefix("tcp://"), "--json")
    figures = json.loads(out)
    assert status == 0
    assert figures["worker"]["engine_id"] == "prefill-0"
    assert figures["worker"]["incarnation"] == worker.incarnation
    assert (figures["worker"]["wire_version"], figures["worker"]["manifest_schema"]) == (2, 4)
    assert figures["cache"]["model"] == "a model"
    assert figures["cache"]["groups"] == [{"kind": "full", "layers": 2, "block_size": 4}]
    assert figures["cache"]["planes"] == ["loopback"]
    assert figures["rtt_s"] > 0


@pytest.mark.parametrize(("endpoint", "secret"), [("nonsense", SECRET), ("127.0.0.1:1", "")])
async def test_what_the_user_gives_wrong_has_its_own_status(command, monkeypatch, endpoint, secret):
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    status, _, err = await command("inspect", endpoint)
    assert (status, "[config_invalid]" in err) == (2, True)


async def test_a_worker_with_a_key_of_its_own_is_dialed_by_that_key(command, monkeypatch):
    (private, public), (ours, our_public) = draw_pair(), draw_pair()
    monkeypatch.setenv(KEY_VARIABLE, ours)
    async with working(private_key=private, allowed_keys=(our_public,)) as worker:
        status, _, _ = await command("inspect", worker.endpoint, "--key", public)
        assert status == 0
        _, out, _ = await command("inspect", worker.endpoint, "--key", our_public, "--json")
        assert json.loads(out)["error"]["code"] == "authentication_failed"


async def test_a_running_worker_lists_its_peers_and_leases(command):
    async with working() as producer, working("decode-0") as consumer:
        await consumer.pull(producer.offer("done", [[3]], 4), [[5]])
        await producer.wait_offer("done")
        producer.offer("held", [[1, 2]], 8)
        status, out, _ = await command("inspect", producer.endpoint, "--json")
        held = json.loads(out)["inspection"]["snapshot"]
        assert (status, held["leases"]) == (0, 1)
        assert [lease["request_id"] for lease in held["held_leases"]] == ["held"]
        assert {peer["name"].partition("/")[0] for peer in held["readers"]} == {"decode-0", "kvflow"}

        status, out, _ = await command("inspect", consumer.endpoint)
        assert status == 0
        assert f"'prefill-0/0/{producer.incarnation}': 'connected' over 'loopback'" in out
        assert "stage        'open'\n" in out
        assert "open pulls: 0\n" in out
        assert re.search(r"^round trip   \d+\.\d{3} ms$", out, re.MULTILINE)


async def test_a_running_worker_lists_what_it_keeps_and_was_asked_for(command):
    async with working() as producer, working("decode-0") as consumer:
        producer.offer("held", [[1, 2]], 8)
        producer.keep("kept", [[4]], 4, [[b"content"]])
        producer.offer_progressive("open", [[5]], 8)
        assert (await consumer.find(producer.endpoint, [b"content"]))[1] == 1
        assert await consumer.find(producer.endpoint, [b"another"]) == (None, 0)
        status, out, _ = await command("inspect", producer.endpoint)
        assert status == 0
        assert re.search(r"^  'held': 2 blocks, \d+\.\d{3} s old, expires in ", out, re.MULTILINE)
        assert re.search(r"^  'kept': 1 blocks, \d+\.\d{3} s old, kept$", out, re.MULTILINE)
        assert re.search(r"^  'open': 1 blocks, \d+\.\d{3} s old, open, expires in ", out, re.MULTILINE)
        assert "questions for content since the start: 1 found, 1 not held\n" in out


async def test_watching_goes_on_until_it_is_interrupted(capsys, monkeypatch):
    seen = []

    def enough(figures, *, as_json):
        seen.append(figures.inspection.snapshot.leases)
        if len(seen) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "_show", enough)
    monkeypatch.setattr(inspect, "WATCH_S", 0.3)
    async with working() as worker:
        assert await asyncio.to_thread(main, ["inspect", worker.endpoint, "--watch"]) == 0
    assert seen == [0, 0]


async def in_turn(awaitables):
    """Await each after the other; close those that are left when one fails."""
    try:
        for each in awaitables:
            await each
    finally:
        for each in awaitables:
            each.close()


async def test_a_member_that_asks_too_often_is_refused_and_others_are_not():
    network = ZeroMqNetwork()
    network.now = lambda: 1000.0  # all is asked within one second, however long the answers take
    async with working(environment=msgspec.structs.replace(PRODUCTION, network=network)) as worker:
        async with open_asker(worker.endpoint, config("flood")) as flood:
            answers = [flood.ping(report=True) for _ in range(20)]
            with pytest.raises(PeerLost, match="questions for a report per second"):
                await in_turn(answers)
        async with open_asker(worker.endpoint, config("other")) as other:
            assert (await other.ping(report=True))[1]
        assert worker.snapshot().rejected == {"rate_exceeded": 1}
