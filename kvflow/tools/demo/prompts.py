"""Prompts: pieces of the text that is at hand, of very different lengths."""

from collections.abc import Sequence
from pathlib import Path

PROMPT_BYTES_MIN = 5
PROMPT_BYTES_MAX = 2000


def read_texts(folder: Path) -> bytes:
    """Return the README and the documentation of a repository as one text.

    Raises:
        FileNotFoundError: they are not long enough for one prompt of the greatest length.
    """
    paths = [folder / "README.md", *sorted((folder / "docs").rglob("*.md"))]
    text = b"\n".join(path.read_bytes() for path in paths if path.is_file())
    if len(text) < PROMPT_BYTES_MAX:
        raise FileNotFoundError(
            f"README.md and docs/ of {folder.resolve()} have {len(text)} bytes: run it in a checkout"
        )
    return text


def cut_prompts(text: bytes, count: int) -> Sequence[bytes]:
    """Cut ``count`` >= 2 pieces, shortest and longest included, lengths in geometric steps, long and short in turn.

    Args:
        text: at least ``PROMPT_BYTES_MAX`` bytes; pieces start evenly spread over it.
        count: of prompts.
    """
    ratio = PROMPT_BYTES_MAX / PROMPT_BYTES_MIN
    sizes = [round(PROMPT_BYTES_MIN * ratio ** (step / (count - 1))) for step in range(count)]
    mixed = [sizes.pop(0 if step % 2 else -1) for step in range(count)]
    starts = [(len(text) - size) * step // (count - 1) for step, size in enumerate(mixed)]
    return [text[start : start + size] for start, size in zip(starts, mixed, strict=True)]
