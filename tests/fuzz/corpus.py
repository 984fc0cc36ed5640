"""Inputs that are kept: each was found by this fuzzer, or is a valid one that it begins with.

``corpus/TARGET.txt`` has the findings of the target of that name, one a line, in hexadecimal; a test gives them to it
again. Those of ``metadata`` ended the process that gave them to NIXL.
"""

from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"

METADATA = bytes.fromhex((CORPUS / "metadata-valid.txt").read_text())
"""What NIXL 1.5.1 has published of two regions."""

AGENT = METADATA[24:36].decode()
"""Whose that was."""


def kept(targets):
    """Return every finding of these targets, with its target."""
    paths = [path for name in targets if (path := CORPUS / f"{name}.txt").exists()]
    return [(path.stem, bytes.fromhex(line)) for path in paths for line in path.read_text().split()]
