"""The page: what clients and peers have named is data in it, and nothing else."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace

from kvflow.tools.trace import export
from kvflow.tools.trace.joining import read_trace
from tests.unit.kvflow.worker.pulling import failure, opened

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "<img src=x onerror=alert(1)>",
    "a\u2028b",
    "]]>",
    "&lt;",
]


class Elements(HTMLParser):
    """What a browser makes of a page: its elements with their attributes, and the content of each script."""

    def __init__(self, text):
        super().__init__()
        self.found, self.contents = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data):
        if self.found and self.found[-1][0] in {"script", "style"} and data.strip():
            self.contents.append((*self.found[-1], data))

    def data(self):
        (data,) = [text for _, attributes, text in self.contents if attributes.get("type") == "application/json"]
        return json.loads(data)

    def policy(self):
        return next(each["content"] for _, each in self.found if each.get("http-equiv") == "Content-Security-Policy")


@pytest.fixture
async def trace(log):
    async with opened() as world:
        for name in HOSTILE:
            await world.pull(world.ticket(name), local_request_id=name)
        world.faults.failing[0] = HOSTILE[0]
        await failure(world.start(world.ticket("lost")))
        world.faults.heal()
    return read_trace([log])


async def test_names_from_outside_are_data(trace):
    plain = Elements(export.page(replace(trace, requests=[])))
    elements = Elements(export.page(trace))
    assert [tag for tag, _ in elements.found] == [tag for tag, _ in plain.found]
    requests = elements.data()["trace"]["requests"]
    assert [request["request_id"] for request in requests] == [*HOSTILE, "lost"]


async def test_the_page_may_load_nothing_and_run_its_own_script_alone(trace):
    elements = Elements(export.page(trace))
    links = {"src", "href", "action", "srcset"}
    assert not [attributes for _, attributes in elements.found if links & attributes.keys()]
    hashes = {
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for _, attributes, text in elements.contents
        if "type" not in attributes
    }
    assert set(re.findall(r"sha256-([^']+)", elements.policy())) == hashes
    assert len(hashes) == 2
    assert elements.policy().startswith("default-src 'none'; ")
    assert "unsafe" not in elements.policy()


def test_the_script_makes_no_markup_of_text():
    template = export.files("kvflow.tools.trace").joinpath("page.html").read_text()
    for name in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "Function(", "fetch(", "http:"):
        assert name not in template.replace("http://www.w3.org/2000/svg", "")


async def test_a_page_keeps_failures_and_the_slowest(trace, monkeypatch):
    monkeypatch.setattr(export, "REQUESTS_MAX", 2)
    data = Elements(export.page(trace)).data()
    kept = data["trace"]["requests"]
    slowest = max(trace.requests[:-1], key=lambda request: request.total_s)
    assert {request["request_id"] for request in kept} == {"lost", slowest.request_id}
    assert data["omitted"] == len(HOSTILE) - 1


async def test_a_page_has_no_more_details_than_its_limit(trace, monkeypatch):
    monkeypatch.setattr(export, "DETAILS_MAX", 4)  # a pull has one chunk and one run
    requests = Elements(export.page(trace)).data()["trace"]["requests"]
    details = [len(pull["chunks"]) + len(pull["groups"]) for request in requests for pull in request["pulls"]]
    assert sum(details) == 4
    assert [pull.chunks for request in trace.requests[:-1] for pull in request.pulls if not pull.chunks] == []
