"""The commands and log lines of pages under docs/howto, cut out of the pages."""

import re
from pathlib import Path

from tests.docs import pages

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = HOWTO / "vllm.md"
ROUTERS_PAGE = HOWTO / "routers.md"
READING_PAGE = HOWTO / "read-while-computing.md"
SHARING_PAGE = HOWTO / "share-prefixes.md"

PREFILL_PORT, DECODE_PORT, PROXY_PORT, SOURCE_PORT = 8100, 8200, 8000, 5600
"""As the page has them; 8000 is the default of ``kvflow proxy``."""


def blocks(language: str, page: Path = PAGE) -> list[str]:
    """Return the blocks of a language, in order."""
    return pages.blocks(str(page), language)


def members(key: str, page: Path = READING_PAGE) -> str:
    """Return what stands between the braces of the one block of JSON that has a key."""
    [found] = [block.strip()[1:-1] for block in blocks("json", page) if f'"{key}"' in block]
    return found


def log_line(part: str, page: Path = PAGE) -> re.Pattern[str]:
    """Return a pattern for the one log line of a page that has a part: with any numbers, names and omissions."""
    [line] = [block.strip() for block in blocks("text", page) if part in block]
    pieces = re.split(r"(cmpl-\d+|\b6b2f\.\.\.|\bLBHNC|\.\.\.|\d+)", line)
    return re.compile("".join(map(_matching, pieces)))


def _matching(piece: str) -> str:
    if piece == "...":
        return ".*"
    if piece in ("6b2f...", "LBHNC") or piece.startswith("cmpl-"):
        return r"\S+?"
    return r"\d+" if piece.isdigit() else re.escape(piece)


def command(*words: str, page: Path = PAGE) -> str:
    """Return the one block of shell commands that begins with the first and has all of these words."""
    [found] = [
        block for block in blocks("sh", page) if block.startswith(words[0]) and all(word in block for word in words[1:])
    ]
    return found.strip()
