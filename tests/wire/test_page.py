"""The page of the wire shows vectors, names the versions, and is short enough to be read."""

import re
from pathlib import Path
from typing import get_args

from handshake import limits, messages
from handshake.errors import CloseCode
from handshake.limits import DEFAULT_LIMITS
from kvflow.layout import manifest, tracks
from kvflow.layout.specs import ITEM_BYTES
from kvflow.leases import tickets
from kvflow.reads.tcp import access, exporter, opening, wire
from kvflow.rendezvous import questions
from tests.docs.pages import fenced
from tests.helpers.loops import looped
from tests.wire.test_vectors import VERSIONS
from tests.wire.vectors import GOLDEN

PAGE = "docs/reference/wire.md"
TEXT = (Path(__file__).parents[2] / PAGE).read_text()
WORDS_MAX = 5000
VECTORS = "".join(file.read_text() for file in sorted(GOLDEN.glob("*.json")))
SECTIONS = ["control channel", "manifest", "ticket", "Leases and epochs", "Questions", "TCP plane"]


def examples():
    """Yield the bytes of each example: lines of hexadecimal digits, each with a remark after three spaces or more."""
    for block in fenced(PAGE):
        for example in block.text.split("\n\n"):
            columns = [re.split(r" {3,}", line.strip())[0].replace(" ", "") for line in example.splitlines()]
            if all(re.fullmatch("[0-9a-f]{4,}", column) for column in columns):
                yield "".join(columns)


@looped("example", list(examples()))
def test_an_example_is_a_vector(example):
    assert example in VECTORS


def test_each_section_has_an_example():
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    for name in SECTIONS:
        [section] = [each for each in sections if name in each.partition("\n")[0]]
        assert "\nExample" in section, name
    assert len([*examples()]) >= 12


def test_it_names_the_versions():
    for name, version in VERSIONS.items():
        assert re.search(rf"^\| {name} \| `?{version}`? \|", TEXT, re.MULTILINE), name


def test_it_names_every_file_of_vectors():
    assert [file.name for file in GOLDEN.glob("*.json") if f"`{file.name}`" not in TEXT] == []


BOUNDS = [
    DEFAULT_LIMITS.client_frame_bytes_max,
    DEFAULT_LIMITS.frame_bytes_max,
    messages.QUESTION_BYTES_MAX,
    messages.ANSWER_BYTES_MAX,
    messages.REPORT_BYTES_MAX,
    messages.CERTIFICATE_BYTES_MAX,
    limits.LEASES_MAX,
    limits.QUESTIONS_MAX,
    int(DEFAULT_LIMITS.messages_per_s_max),
    int(DEFAULT_LIMITS.leases_per_s_max),
    int(DEFAULT_LIMITS.questions_per_s_max),
    manifest.MANIFEST_BYTES_MAX,
    manifest.REGIONS_MAX,
    manifest.COMPONENTS_MAX,
    tickets.TICKET_CHARS_MAX,
    tickets.BLOCKS_MAX,
    tickets.GRANTS_MAX,
    questions.ASKED_MAX,
    wire.RUNS_MAX,
    wire.ROWS_MAX,
    wire.PIECE_BYTES_MAX,
    tracks.TRACKS_MAX,
    opening.READER_BYTES_MAX,
]
SECONDS = [
    DEFAULT_LIMITS.handshake_s,
    DEFAULT_LIMITS.ping_interval_s,
    DEFAULT_LIMITS.silence_s_max,
    access.STRANGER_S_MAX,
    access.OPENING_S_MAX,
    exporter.STALLED_S_MAX,
    exporter.HALF_S_MAX,
]


def test_it_has_the_bounds_of_the_code():
    assert [each for each in BOUNDS if not re.search(rf"(?<![\d,]){each:,}(?![\d,])", TEXT)] == []
    assert [each for each in SECONDS if f" {each:g} s" not in TEXT] == []


NEVER_SENT = {CloseCode.KEY_UNKNOWN, CloseCode.UNAUTHENTICATED, CloseCode.OVERFLOWED, CloseCode.CONNECTION_LOST}
"""ZeroMQ closes these connections, or this side has found it out."""


def test_it_has_every_code_and_message():
    codes = {*CloseCode} - NEVER_SENT
    named = {kind.__struct_config__.tag for kind in get_args(messages.AnyMessage)}
    named |= {kind.__struct_config__.tag for kind in get_args(questions.PeerQuestion | questions.PeerAnswer)}
    named |= {*get_args(messages.LeaseOutcome), *get_args(tickets.Kind), *ITEM_BYTES}
    assert [name for name in sorted({*codes, *named}) if f"`{name}`" not in TEXT] == []


def test_it_is_short():
    assert len(TEXT.split()) <= WORDS_MAX
