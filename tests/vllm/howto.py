"""What pages under docs/howto tell their reader to do, cut out of the pages."""

import re
from pathlib import Path

HOWTO = Path(__file__).parents[2] / "docs" / "howto"
PAGE = HOWTO / "vllm.md"
ROUTERS_PAGE = HOWTO / "routers.md"
OFFLOADING = HOWTO / "offloading.md"

PREFILL_PORT, DECODE_PORT, PROXY_PORT = 8100, 8200, 8000
"""As the page has them; 8000 is the default of ``kvflow proxy``."""


def blocks(language: str, page: Path = PAGE) -> list[str]:
    """Return the blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def command(*words: str, page: Path = PAGE) -> str:
    """Return the one block of shell commands that begins with the first and has all of these words."""
    [found] = [
        block for block in blocks("sh", page) if block.startswith(words[0]) and all(word in block for word in words[1:])
    ]
    return found
