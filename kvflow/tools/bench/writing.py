"""Replace a file atomically: a process that reads it meanwhile finds the old content."""

import os
from pathlib import Path


def try_to_write(path: Path) -> None:
    """Check that ``replace_file`` can write a file, before minutes of measuring.

    Raises:
        OSError: its folder is missing or not ours to write to, or something stands there that is no regular file.
    """
    draft = _draft_of(path)
    draft.open("xb").close()
    draft.unlink()


def replace_file(path: Path, text: bytes) -> None:
    """Write a file beside the path, and give it that name when it is complete.

    Raises:
        OSError: see ``try_to_write``; or the disk is full. What was there still is.
    """
    draft = _draft_of(path)
    try:
        with draft.open("xb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # before the name: a crash must not leave an empty file under it
        draft.replace(path.resolve())
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _draft_of(path: Path) -> Path:
    """Return where the file is written first: in the folder of what a link leads to, so that the link stays."""
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is no regular file")  # a device would be replaced by one
    return path.with_name(f".{path.name}.{os.getpid()}.part")
