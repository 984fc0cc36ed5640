"""``kvflow demo`` as a user runs it, with fewer prompts."""

import json
import re
import subprocess
import sys

import pytest

from kvflow.cli import main
from kvflow.demo.display import run_and_show

KVFLOW = [sys.executable, "-c", "import sys; from kvflow.cli import main; sys.exit(main())"]


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.timeout(300)  # five engines start one after the other, and every one imports torch
def test_every_token_is_equal_and_packed_needs_few_descriptors(repository, tmp_path):
    (tmp_path / "stale.jsonl").write_text("of an earlier run")
    done = subprocess.run(
        [*KVFLOW, "demo", "--prompts", "4", "--out", str(tmp_path)],
        cwd=repository,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert done.stdout.count("4 of 4") == 2
    assert done.stdout.count("128 of 128") == 2
    for phase in ("pull", "queue", "handshake", "bind", "post", "wire", "fence"):
        assert len(re.findall(rf"│ +{phase} +│ +[0-9.]+ ms │ +[0-9.]+ ms │", done.stdout)) == 2
    per_layer, packed = re.search(r"descriptors: ([\d,]+) per-layer, ([\d,]+) packed", done.stdout).groups()
    assert int(per_layer.replace(",", "")) >= 6 * int(packed.replace(",", "")) > 0
    roles = {"driver", "monolithic"} | {
        f"{run}-{role}" for run in ("per-layer", "packed") for role in ("prefill", "decode")
    }
    assert {path.stem for path in tmp_path.glob("*.jsonl")} == roles
    pulls = [json.loads(line) for line in (tmp_path / "packed-decode.jsonl").read_text().splitlines()]
    assert sum(record["event"] == "transfer.completed" for record in pulls) == 4


def test_one_prompt_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_status:
        main(["demo", "--prompts", "1"])
    assert exit_status.value.code == 2
    assert "give 2 or more" in capsys.readouterr().err


def test_a_folder_without_text_is_refused(tmp_path, capsys):
    assert run_and_show(texts=tmp_path, num_prompts=2, logs=tmp_path) == 1
    assert "run it in a checkout" in capsys.readouterr().out
