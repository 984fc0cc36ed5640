"""The outputs of doctor.md are those of the doctor, but for figures, addresses and ports."""

import asyncio
import re

import pytest

from kvflow.config import KEY_VARIABLE, SECRET_VARIABLE, WorkerConfig
from kvflow.errors import FailureCode
from kvflow.tools.cli.entry import main
from kvflow.tools.doctor.codes import CODES
from kvflow.tools.doctor.listening import listening

from .pages import ROOT, blocks

PATIENCE_S = 330.0
SECRET = "a secret of the tests, long enough"
PAGE = "docs/howto/doctor.md"
ALONE, NEAR, APART, REFUSED = blocks(PAGE, "")
MARKS = "ok|note|WARNING|FAILED"
KNOWN = {*CODES, *map(str, FailureCode)}


def shape(text):
    """Return an output without what differs from run to run."""
    text = re.sub(r"ahead of|behind", "beside", text)
    text = re.sub(r"here, '[^']*'|this host, '[^']*'", "this host", text)
    return re.sub(r"\d[\d.,]*(e[-+]\d+)?", "#", text).strip()


@pytest.fixture
def printed(monkeypatch, capsys):
    """Run the doctor at a worker that offers probes; return what it prints."""
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    monkeypatch.delenv("UCX_TLS", raising=False)

    async def run(secret):
        config = WorkerConfig(engine_id="doctor", cluster_secret=secret)
        async with asyncio.timeout(PATIENCE_S), listening(config) as worker:
            await asyncio.to_thread(main, ["doctor", worker.endpoint])
        return capsys.readouterr().out

    return run


@pytest.mark.nixl
@pytest.mark.processes
async def test_the_path_within_a_host_is_shown_as_it_is(printed):
    assert shape(await printed(SECRET)) == shape(NEAR)


async def test_another_secret_is_shown_as_it_is(printed):
    assert shape(await printed("another secret, long enough")) == shape(REFUSED)


@pytest.mark.parametrize("text", [ALONE, NEAR, APART, REFUSED])
def test_findings_are_shown_with_codes_and_remedies_that_exist(text):
    lines = [line for line in text.strip().splitlines() if line]
    assert re.fullmatch(r"\d+ findings?: \d+ failed, \d+ warnings?", lines.pop())
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith(("WARNING", "FAILED")):
            code = re.search(r"\[(\w+)\]$", line)[1]
            assert code in KNOWN
            assert re.match(r" {9}\S.*\.$", after), f"{line} has no remedy"
        else:
            assert re.match(rf"({MARKS}) +\S| {{9}}\S", line)


@pytest.mark.parametrize("text", [NEAR, APART, REFUSED])
def test_whole_outputs_count_their_findings(text):
    lines = text.strip().splitlines()
    marks = [match[0] for line in lines[:-1] if (match := re.match(MARKS, line))]
    counts = [int(each) for each in re.findall(r"\d+", lines[-1])]
    assert counts == [len(marks), marks.count("FAILED"), marks.count("WARNING")]


def test_codes_of_the_table_exist():
    [table] = re.findall(r"\| what is wrong \| code \|\n((?:\|.*\n)+)", (ROOT / PAGE).read_text())
    named = re.findall(r"`(\w+)`", table)
    assert len(named) >= 10
    assert set(named) <= KNOWN
