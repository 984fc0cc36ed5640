"""``kvflow demo`` as a user runs it, with fewer prompts."""

import json
import re
import subprocess

import pytest

from kvflow.tools.cli import main
from kvflow.tools.demo.run import run_and_show
from kvflow.tools.trace.joining import read_trace


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(300)  # five engines start one after the other, and every one imports torch
def test_every_token_is_equal_and_packed_needs_few_descriptors(repository, tmp_path, capfd):
    (tmp_path / "stale.jsonl").write_text("of an earlier run")
    status = main(["demo", "--texts", str(repository), "--prompts", "4", "--out", str(tmp_path)])
    printed = capfd.readouterr()
    assert (status, printed.err) == (0, ""), printed.out
    assert printed.out.count("4 of 4") == 2
    assert printed.out.count("128 of 128") == 2
    for phase in ("pull", "queue", "handshake", "bind", "post", "wire", "fence"):
        assert len(re.findall(rf"│ +{phase} +│ +[0-9.]+ ms │ +[0-9.]+ ms │", printed.out)) == 2
    per_layer, packed = re.search(r"descriptors: ([\d,]+) per-layer, ([\d,]+) packed", printed.out).groups()
    assert int(per_layer.replace(",", "")) >= 6 * int(packed.replace(",", "")) > 0
    roles = {"driver", "monolithic"} | {
        f"{run}-{role}" for run in ("per-layer", "packed") for role in ("prefill", "decode")
    }
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == roles
    pulls = [json.loads(line) for line in (tmp_path / "packed-decode.jsonl").read_text().splitlines()]
    assert sum(record["event"] == "transfer.completed" for record in pulls) == 4
    page = tmp_path / "page.html"
    (command,) = re.findall("where the time went: (.*)\n", printed.out)
    subprocess.run(["bash", "-c", command.replace("trace.html", page.name)], check=True, capture_output=True)
    assert page.exists()
    check_trace(tmp_path)


def check_trace(logs):
    """Check that the logs of a demo are one request for each prompt of both layouts, from the router to a token."""
    assert main(["trace", *map(str, sorted(logs.glob("*.jsonl"))), "--html", str(logs / "trace.html")]) == 0
    trace = read_trace(sorted(logs.glob("*.jsonl")))
    assert trace.reading.broken == 0
    assert {request.request_id for request in trace.requests} == {
        f"{name}-{number}" for name in ("per-layer", "packed") for number in range(4)
    }
    for request in trace.requests:
        names = [phase.name for phase in request.phases]
        assert [names[0], names[1], names[-1]] == ["prefill", "ticket", "decode step"]
        assert sum(phase.seconds for phase in request.phases) == pytest.approx(request.first_token_s, rel=0.01)
        assert request.clock_error_s is not None
        assert request.title.startswith("first token ")
        assert f"{request.request_id}" in (logs / "trace.html").read_text()
        (pull,) = request.pulls
        assert sum(chunk[3] for chunk in pull.chunks) == pull.nbytes > 0
        assert sum(group.descriptors for group in pull.groups) == pull.descriptors
        pieces = {group.unit_descriptors for group in pull.groups}
        assert pieces == ({1} if request.request_id.startswith("packed") else {16})


def test_one_prompt_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["demo", "--prompts", "1"])
    assert exit_status.value.code == 2
    assert "give 2 or more" in capsys.readouterr().err


def test_a_folder_without_text_is_refused(tmp_path, capsys):
    assert run_and_show(texts=tmp_path, num_prompts=2, logs=tmp_path) == 1
    assert "leave --texts out" in capsys.readouterr().out
