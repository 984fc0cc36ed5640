"""The glossary has every technical term of public names, settings, events, log fields and codes."""

import inspect
import re
from collections import Counter

import handshake.errors
import kvflow
import kvflow.models
from handshake.limits import Limits
from kvflow.config import SETTINGS
from kvflow.errors import FailureCode, KvflowError
from kvflow.integrations.vllm.settings import OWN_KEYS
from kvflow.observability.logs import LEVELS
from kvflow.report import TransferReport
from tests.helpers.loops import looped

from .pages import ROOT

PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text()

PLAIN = set(
    re.findall(
        r"\w+",
        """
        provenance tuning stopped every ports router capabilities
        accepted access asked control advertise align backend client component cross dtype environment event finding
        frame handle hook layer local match merge number opaque outcome ping priority probe protocol queue reachability
        rebuild remote report request revision role run server side sleep mode snapshot transfer view whole kv cache
        flight loopback address age ahead allowed argument authentication bounds by bytes cancelled
        capacity cause clock close closed closing code compare compared comparison completed
        config configure copy connect connected connection connections d deadline detail enable
        encryption ended error errors exceeded exhausted explain failed field failures file finished found from
        factor gb get grace guess heads held hf http id identity ids ignored incoming interval invalid item join
        kind known keep kvflow leave left level limits list load log logging longest loop lost make max measured
        memory messages min mismatch missing model models name names nbytes nixl num omitted opened out outgoing
        over params passed path pending per private process public range remedy removed require retried retry runtime s
        is seconds sequence setting silence size slow sockets source started table tcp time timed timings total
        tokens type unauthenticated unavailable unknown
        unsound use usual value values version violation waited wanted warning wrong
        """,
    )
)
"""Plain English, units and names of other projects: no entry is needed."""


def rows():
    """Return the terms of the glossary."""
    return re.findall(r"\*\*([^*]+)\*\*", PAGE)


def split(identifier):
    """Return the words of a name, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", identifier)]


def stem(word):
    """Return a word without the endings of plurals, participles and the like."""
    for ending, instead in (
        ("ies", "y"),
        ("sses", "ss"),
        ("iced", "ice"),
        ("nned", "n"),  # codespell:ignore nned
        ("tted", "t"),
        ("pped", "p"),
    ):
        if word.endswith(ending):
            return word.removesuffix(ending) + instead
    for ending in ("ings", "ing", "ers", "er", "ed", "es", "s", "e", "al"):
        if word.endswith(ending) and len(word) - len(ending) > 2 and not word.endswith("ss"):
            return word.removesuffix(ending)
    return word


def identifiers():
    """Return every public name: names, models, settings, events, fields, codes and errors."""
    found = {*kvflow.__all__, *kvflow.models.__all__, *OWN_KEYS, *FailureCode}
    found |= {*SETTINGS, *Limits.__struct_fields__, *inspect.signature(TransferReport).parameters}
    for event in LEVELS:
        found |= {event.__name__, *event.__struct_fields__}
    for module, base in ((kvflow.errors, KvflowError), (handshake.errors, handshake.errors.HandshakeError)):
        found |= {name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}
    return found


KNOWN = {stem(word) for term in rows() for word in re.findall(r"[a-z]+", term.lower())} | {stem(word) for word in PLAIN}


@looped("identifier", sorted(identifiers()))
def test_every_term_of_a_public_name_is_explained(identifier):
    """If a word is missing: add the term to docs/reference/glossary.md, or to ``PLAIN`` if it is plain English."""
    assert [word for word in split(identifier) if stem(word) not in KNOWN] == []


def test_every_term_has_one_entry():
    assert [term for term, count in Counter(rows()).items() if count > 1] == []


def test_common_words_with_a_meaning_of_their_own_are_explained():
    words = {"told", "kept", "settled", "open", "meet", "source", "route", "sample", "asker", "reader", "trace", "bind"}
    assert words - set(rows()) == set()


def test_every_term_is_in_use():
    texts = [path.read_text() for folder in ("kvflow", "handshake") for path in (ROOT / folder).rglob("*.py")]
    texts += [path.read_text() for path in (ROOT / "docs").rglob("*.md") if path.name != "glossary.md"]
    used = " ".join(" ".join(texts).lower().replace("_", " ").replace("-", " ").split())
    assert [term for term in rows() if term.lower().replace("-", " ") not in used] == []
