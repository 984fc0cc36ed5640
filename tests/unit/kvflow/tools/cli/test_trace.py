"""``kvflow trace`` over the log of real workers."""

import asyncio
import json
import logging
from itertools import count

import pytest

import kvflow
from kvflow.tools.cli import main
from tests.helpers.settings import flat_config
from tests.unit.kvflow.worker.pulling import failure, opened

HOSTILE = "</script><script>alert(1)</script>\x1b[2J"


async def make_log(path):
    async with opened() as world:
        await world.pull(local_request_id="mine")
        await world.pull(world.ticket(HOSTILE))
        world.faults.failing[0] = "peer_lost"
        await failure(world.start(world.ticket("lost")))
        world.faults.heal()
    return path


@pytest.fixture
def workers(log):
    return asyncio.run(make_log(log))


def test_each_request_has_a_line(workers, capsys):
    assert main(["trace", str(workers)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert [line.split()[0] for line in lines[:1]] == ["request-1"]
    assert "cache delivered " in lines[0]
    assert "peer_lost in wire" in lines[2]
    assert "3 requests in " in printed
    assert "\x1b" not in printed
    assert "clock of prefill-0/0/" in printed


SPECS = {"layers.0": kvflow.FullAttention(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")}


def embedded(engine_id):
    """Open a worker as an engine without asyncio does."""
    settings = {"bind": "tcp://127.0.0.1:0", "transport": "loopback"}
    config = flat_config(engine_id=engine_id, cluster_secret="a secret of thirty-two characters", **settings)
    return kvflow.run_worker(config, kvflow.allocate(SPECS, num_blocks=8))


def pull_until_traced(producer, consumer, path):
    """Pull others, for a new level counts only when the records that are kept have been written."""
    others = count()
    while "transfer.traced" not in path.read_text():
        ticket = producer.offer(f"another-{next(others)}", [[0, 1]], num_tokens=32)
        consumer.pull(ticket, [[4, 5]]).result(timeout=60)


@pytest.mark.parametrize(
    ("level", "of_logger", "traced"),
    [
        (logging.INFO, logging.NOTSET, [False, False, False]),
        (logging.DEBUG, logging.NOTSET, [True, True, True]),
        (logging.INFO, logging.DEBUG, [False, None, True]),  # soon
    ],
)
def test_embedded_workers_trace_reads_as_the_howto_says(tmp_path, capsys, level, of_logger, traced):
    path = tmp_path / "embedded.jsonl"
    kvflow.configure_logging(path, level=level)
    logger = logging.getLogger("kvflow.transfer")
    try:
        with embedded("prefill-0") as producer, embedded("decode-0") as consumer:
            for number in range(3):
                if number == 1:
                    logger.setLevel(of_logger)
                ticket = producer.offer(f"request-{number}", [[0, 1]], num_tokens=32)
                consumer.pull(ticket, [[4, 5]]).result(timeout=60)
                if number and traced[number + 1 :] == [True]:
                    pull_until_traced(producer, consumer, path)
    finally:
        logger.setLevel(logging.NOTSET)
        logging.getLogger("kvflow").handlers[0].close()
    for number, is_traced in enumerate(traced):
        assert main(["trace", str(path), "--request", f"request-{number}"]) == 0
        found = "group 0 of prefill-0/0/" in capsys.readouterr().out
        assert is_traced in (found, None)


@pytest.mark.parametrize("name", ["request-1", "mine"])
def test_one_request_is_a_waterfall(workers, capsys, name):
    assert main(["trace", str(workers), "--request", name]) == 0
    printed = capsys.readouterr().out
    for row in ("ticket", "handshake", "wire", "fence", "whole"):
        assert any(line.startswith(row) and line.endswith(" ms") for line in printed.splitlines())
    assert "group 0 of prefill-0/0/" in printed
    assert "2 units in 1 run" in printed


def test_json_has_everything(workers, capsys):
    assert main(["trace", str(workers), "--json"]) == 0
    trace = json.loads(capsys.readouterr().out)
    assert [request["outcome"] for request in trace["requests"]] == ["completed", "completed", "failed"]
    assert trace["requests"][1]["request_id"] == HOSTILE
    assert trace["requests"][0]["pulls"][0]["groups"][0]["pairs"] == [[3, 1, 2]]


def test_a_page_and_a_trace_for_perfetto_are_written(workers, tmp_path, capsys):
    page, perfetto = tmp_path / "trace.html", tmp_path / "trace.json"
    assert main(["trace", str(workers), "--html", str(page), "--perfetto", str(perfetto)]) == 0
    assert f"written: {page}\nwritten: {perfetto}\n" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(perfetto.read_text())["traceEvents"]


def test_a_request_that_is_not_there(workers, capsys):
    assert main(["trace", str(workers), "--request", "other"]) == 1
    assert "has no request 'other'" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--perfetto"])
def test_an_output_that_cannot_be_written(workers, tmp_path, capsys, flag):
    assert main(["trace", str(workers), flag, str(tmp_path / "none" / "out")]) == 2
    assert "No such file" in capsys.readouterr().err
