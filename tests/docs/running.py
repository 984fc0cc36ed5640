"""``python -m tests.docs.running``: run the commands of pages whose output has times and ids, and write that output.

A block changes only if its output differs in something else than times, rates, ids and ports.
"""

import re
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from .block_checks import CHECKS, PREPARATIONS, CheckedBy, Output, Shell
from .commands import without_prompts
from .pages import ROOT, fenced

RUN_S = 300

PHASES = "prefill|ticket|queue|handshake|bind|post|wire|scatter|fence|deliver|decode step|decode"
MEASURED = (
    (r"\b[0-9a-f]{32}\b", "ID"),
    (r"\bincarnation [0-9a-f]{8}\b", "incarnation ID"),
    (r"\bepoch \d+", "epoch NUMBER"),
    (r"tcp://127\.0\.0\.1:\d+", "ENDPOINT"),
    (rf"[\d.]+ (?:{PHASES})(?: \([^)]*\))?(?:, )?", "PHASE "),
    (r"(?:PHASE )+", "PHASES "),
    (r"[+-]?\d[\d.]* (?=ms|s\b|GB/s)", "TIME "),
    (r"\b\d+ (?=reads? |chunks?\b|lines of )", "SOME "),
    (r"^ +\d+ (?=\")", "SOME "),
    (r"[ █▏▎▍▌▋▊▉]{2,}", " "),
)
"""What differs from run to run, and what stands for it in a comparison."""


def unmeasured(text: str) -> str:
    """Return an output without its times, rates, ids and ports."""
    for pattern, instead in MEASURED:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def run(command: list[str], *, status: int = 0, environment: tuple[tuple[str, str], ...] = ()) -> str:
    """Run a command in the current folder, and return what it printed.

    Args:
        command: the command with its arguments.
        status: exit status that it must have. If it is not 0, standard error counts as output.
        environment: more variables.
    """
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(Path.cwd()), **dict(environment)}
    errors = subprocess.STDOUT if status else subprocess.PIPE
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=errors, text=True, timeout=RUN_S, check=False, env=variables
    )
    assert done.returncode == status, done.stderr or done.stdout
    return done.stdout


def run_shell(text: str, check: Shell) -> str:
    """Run the commands of a block, and return what they printed."""
    command = ["bash", "-euo", "pipefail", "-c", without_prompts(text)]
    return run(command, status=check.status, environment=check.environment)


def measured_pages() -> list[str]:
    """Return the pages with outputs that are measured. All their commands are those of a shell."""
    found = [page for page, checks in CHECKS.items() if not isinstance(checks, CheckedBy)]
    return [page for page in found if any(isinstance(check, Output) and check.measured for check in CHECKS[page])]


def with_outputs(page: str) -> str:
    """Return a page with its outputs as its commands print them now, in a folder that is prepared for them."""
    text = (ROOT / page).read_text()
    checked = list(zip(fenced(page), CHECKS[page], strict=True))
    for (block, check), (shown, _) in pairwise(checked):
        if isinstance(check, Shell):
            printed = run_shell(block.text, check)
            if unmeasured(printed) != unmeasured(shown.text):
                text = text.replace(
                    f"{block.text}```\n\n```text\n{shown.text}", f"{block.text}```\n\n```text\n{printed}"
                )
    return text


def main() -> None:
    """Write all pages."""
    import os

    for page in measured_pages():
        with tempfile.TemporaryDirectory() as folder:
            PREPARATIONS[page](Path(folder))
            os.chdir(folder)
            text = with_outputs(page)
            os.chdir(ROOT)
        (ROOT / page).write_text(text)


if __name__ == "__main__":
    main()
