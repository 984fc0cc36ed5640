"""The replays of routers send what the routers' own code sent when it was run by hand, with servers like these."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.vllm.replaying import Replay, facts

RECORDED = [(name, index) for name, known in facts().items() for index in range(len(known.get("recorded", ())))]
COMPARED = {"go": bytes, "python": bytes, "sonic": json.loads}
"""How bodies are compared: those of sonic were recorded with encoding/json in its place."""

POLL_S = 0.02
"""Between two looks at whether a server is told to end."""


class Recorder(BaseHTTPRequestHandler):
    """Answers every request with the same, and keeps its body."""

    def do_POST(self):
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps(self.server.answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    """Start servers that answer what they are told."""
    started = []

    def start(answer):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
        server.answer, server.bodies, server.url = answer, [], f"http://localhost:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(POLL_S,)).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(("name", "index"), RECORDED)
def test_a_replay_sends_what_the_router_sent(name, index, server):
    known = facts()[name]
    recorded, compared = known["recorded"][index], COMPARED[known["transcript"]["json"]["codec"]]
    prefill, decode = server(recorded["answer"]), server({"choices": []})
    answer = Replay(known["transcript"], prefill=prefill.url, decode=decode.url).ask(recorded["path"], recorded["body"])
    assert answer.status == recorded["status"]
    bodies = {"prefill": prefill.bodies, "decode": decode.bodies}
    assert {side: list(map(compared, sent)) for side, sent in bodies.items() if sent} == {
        side: [compared(text.encode())] for side, text in recorded["sent"].items()
    }
