"""A few of the tries that ``python -m tests.world.readers`` does by hundreds, and that it sees what must not be."""

import os
import signal

import pytest

from . import readers
from .network import missing
from .readers import ABORTED, SCENARIOS, SURVIVED, Pair, run, table

pytestmark = [pytest.mark.nixl, pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Wait less than where hundreds of tries share a machine."""
    monkeypatch.setattr(readers, "LEASE_S", 4.0)
    monkeypatch.setattr(readers, "HANG_S", 0.5)
    monkeypatch.setattr(readers, "CUT_S", 4.0)


async def tried(tmp_path, *words, **settings):
    """Do tries with small pulls; return their rows, and lines of text."""
    options = readers.arguments(["--tries", "1", "--mib", "64", *words])
    said = []
    rows = await run(options, {"transport": options.transport, **settings}, {}, tmp_path, said.append)
    return list(rows.values()), "\n".join([*said, *table(rows)])


@pytest.mark.parametrize("plane", ["auto", "tcp", "tls"])
async def test_a_producer_survives_whatever_its_readers_do(tmp_path, plane):
    transport, settings = ("tcp", {"tcp_encryption": "tls"}) if plane == "tls" else (plane, {})
    # Without RDMA, only TCP notices a cut network: within a host NIXL copies from process to process.
    cut = transport == "tcp" and not missing()
    scenarios = [each for each in SCENARIOS if each != "cut" or cut]
    words = ("--transport", transport, "--paused", "0,0.2", "--scenario", *scenarios)
    rows, text = await tried(tmp_path, *words, **settings)
    assert len(rows) == 2 * len(scenarios)
    assert all(row.ends == {SURVIVED: 1} for row in rows), text
    assert all(row.carriers == {"tcp": 1} for row in rows) == (transport == "tcp"), text
    assert all(set(row.leases) <= {"released", "expired"} for row in rows), text
    assert list(tmp_path.iterdir()) == []


async def test_a_producer_that_is_aborted_is_counted(tmp_path, monkeypatch):
    goes_on = Pair._go_on

    async def aborted(self, stopped_s):
        os.kill(self._producer.process.pid, signal.SIGABRT)
        await goes_on(self, stopped_s)

    monkeypatch.setattr(Pair, "_go_on", aborted)
    (row,), text = await tried(tmp_path, "--paused", "0.2", "--scenario", "closes")
    assert row.ends == {ABORTED: 1}, text
    assert "status -6" in row.failures[0]["detail"]
    assert len(list(tmp_path.iterdir())) == 3


async def test_a_reader_that_stays_is_seen(tmp_path, monkeypatch):
    async def stays(self, params):
        await self._reader.ask("begin", params=params, producer=0, happens="cut")
        pull, _ = await self._reader.ask("finish")
        return pull

    monkeypatch.setattr(Pair, "_disturb", stays)
    monkeypatch.setattr(readers, "SILENCE_S", 0.5)
    (row,), text = await tried(tmp_path, "--transport", "tcp", "--paused", "0", "--scenario", "closes")
    assert row.ends == {"leak": 1}, text
