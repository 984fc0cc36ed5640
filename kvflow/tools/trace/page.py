"""A trace as one page for a browser, which loads nothing. Names in it come from outside: data, never markup."""

import base64
import hashlib
import re
from importlib.resources import files
from typing import Final

import msgspec
from msgspec.structs import replace

from kvflow.tools.trace.records import PullTrace, RequestTrace, Trace

REQUESTS_MAX: Final = 2000
"""Requests of a page: failed ones first, then the slowest."""

DETAILS_MAX: Final = 400_000
"""Chunks and runs of blocks of a page, some 10 MiB. Requests beyond have none."""

ESCAPES: Final = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that JSON may escape and that mean something to a browser."""


def render(trace: Trace) -> str:
    """Return the page."""
    template = files("kvflow.tools.trace").joinpath("page.html").read_text(encoding="utf-8")
    hashes = [f"{tag}-src {_hashes(template, tag)}" for tag in ("script", "style")]
    policy = "; ".join(["default-src 'none'", *hashes])
    before, _, rest = template.partition("POLICY")
    middle, _, after = rest.partition("DATA")
    return f"{before}{policy}{middle}{_data(trace)}{after}"


def _hashes(template: str, tag: str) -> str:
    """Return the hashes of our scripts or styles: a browser refuses all others."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", template, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _data(trace: Trace) -> str:
    """Return the trace as JSON in which no character ends a script."""
    order = sorted(trace.requests, key=lambda request: (request.outcome != "failed", -request.total_s))
    shown = {id(request) for request in order[:REQUESTS_MAX]}
    remaining = DETAILS_MAX
    requests: list[RequestTrace] = []
    for request in trace.requests:
        if id(request) in shown:
            details = sum(map(_num_details, request.pulls))
            requests.append(request if details <= remaining else _without_details(request))
            remaining -= details if details <= remaining else 0
    text = msgspec.json.encode(replace(trace, requests=requests)).decode()
    omitted = len(trace.requests) - len(requests)
    data = f'{{"omitted":{omitted},"trace":{text}}}'
    return re.sub("[<>&\u2028\u2029]", lambda found: ESCAPES[found[0]], data)


def _without_details(request: RequestTrace) -> RequestTrace:
    return replace(request, pulls=[replace(pull, groups=(), chunks=()) for pull in request.pulls])


def _num_details(pull: PullTrace) -> int:
    return len(pull.chunks) + sum(len(group.pairs) for group in pull.groups)
