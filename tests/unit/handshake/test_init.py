import itertools
import subprocess
import sys
import tokenize
from pathlib import Path

import handshake
from tests.helpers.loops import looped

PACKAGE = Path(handshake.__file__).parent
PURE = ["messages", "codec", "states", "connection", "limits", "errors"]


def test_all_is_what_is_there():
    assert sorted(handshake.__all__) == sorted(set(handshake.__all__))
    assert all(hasattr(handshake, name) for name in handshake.__all__)


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, check=True, capture_output=True, text=True
    ).stdout


def test_importing_handshake_imports_nothing_heavy():
    code = "import sys, handshake; print(*{name.partition('.')[0] for name in sys.modules})"
    assert not {"torch", "nixl", "numpy", "kvflow", "structlog"} & set(run_python(code).split())


def imported_words(path):
    """Return the names that follow ``import`` and ``from`` in a module."""
    with path.open("rb") as source:
        words = [token.string for token in tokenize.tokenize(source.readline)]
    return {after for word, after in itertools.pairwise(words) if word in ("import", "from")}


@looped("name", PURE)
def test_the_core_does_no_io_and_keeps_no_time(name):
    assert not {"asyncio", "zmq", "time", "threading", "socket"} & imported_words(PACKAGE / f"{name}.py")


def test_zmq_is_imported_in_three_places():
    importers = {path.stem for path in PACKAGE.glob("*.py") if "zmq" in imported_words(path)}
    assert importers == {"intake", "security", "sockets"}
