"""What docs/howto/vllm.md tells its reader to do, cut out of the page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "vllm.md"

PREFILL_PORT, DECODE_PORT, PROXY_PORT = 8100, 8200, 8000
"""As the page has them; 8000 is the default of ``kvflow proxy``."""


def blocks(language: str) -> list[str]:
    """Return the blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def command(*words: str) -> str:
    """Return the one block of shell commands that begins with the first and has all of these words."""
    [found] = [
        block for block in blocks("sh") if block.startswith(words[0]) and all(word in block for word in words[1:])
    ]
    return found
