"""What the machine allows a test: open files, and namespaces. Where it allows too little, the test is skipped."""

import resource
import shutil
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pytest


def open_files():
    """Count the file descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def files_limited(most):
    """Let this process have so many files open meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def many_files(count):
    """Let this process have as many files open as it may; skip the test if those are fewer than ``count``."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < count:
        pytest.skip(f"{hard} open files are too few")
    with files_limited(hard):
        yield


def allowed(*before):
    """Return what goes before a command; skip the test if no command can be started so."""
    if shutil.which(before[0]) is None or subprocess.run([*before, "true"], check=False).returncode:
        pytest.skip(f"{before[0]} is not allowed here")
    return before
