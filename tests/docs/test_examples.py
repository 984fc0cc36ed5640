"""The examples of the documentation run as they are printed, and links lead somewhere."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def run(tmp_path, source):
    """Run a program in a process of its own, and return what it printed."""
    program = tmp_path / "program.py"
    program.write_text(source)
    done = subprocess.run(
        [sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.nixl
@pytest.mark.processes
def test_tutorial_runs_as_printed(tmp_path):
    [program] = blocks("docs/tutorial/first-transfer.md", "python")
    [printed] = blocks("docs/tutorial/first-transfer.md", "text")
    assert len(program.splitlines()) < 40
    assert sorted(run(tmp_path, program)) == sorted(printed.splitlines())


@pytest.mark.nixl
def test_readme_runs_as_printed(tmp_path):
    [program] = blocks("README.md", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    promised = program.rpartition("  # ")[2].strip()
    assert run(tmp_path, program) == [promised]


def test_readme_says_on_its_first_screen_what_it_is():
    screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:45])
    for phrase in ("**It is**", "**It is not**", "make demo", "make test", "```python"):
        assert phrase in screen


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_is_python(page):
    for block in blocks(page, "python"):
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if linked.suffix == ".md" else []
        assert not anchor or anchor in {heading.lower().replace(" ", "-") for heading in headings}, target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES[1:]:
        relative = page.relative_to(ROOT / "docs")
        assert relative.name == "index.md" or f"({relative})" in index, relative
