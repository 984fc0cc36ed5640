"""Earlier releases of kvflow as they are in the history: their own workers, in processes of their own."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from .elsewhere import Child

ROOT = Path(__file__).parents[2]


def unpack(commit, folder):
    """Put an earlier commit into a folder. The test is skipped in a copy of the repository without that commit."""
    git = ["git", "-c", "safe.directory=*", "-C", str(ROOT)]
    known = subprocess.run([*git, "cat-file", "-e", commit], capture_output=True, check=False)
    if known.returncode:
        pytest.skip(
            f"commit {commit} is not here: {known.stderr.decode().strip()}. This test needs the history of the "
            "repository: clone it whole, or run git fetch --unshallow"
        )
    found = subprocess.run([*git, "archive", commit, "kvflow", "handshake", "tests"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def child_of(folder, module):
    """Start a module of an earlier commit's integration tests, which imports nothing of this one."""
    # The current folder is this repository, and must not be looked at.
    return Child(module, forked=False, PYTHONPATH=f"{folder}:{folder / 'tests'}", PYTHONSAFEPATH="1")
