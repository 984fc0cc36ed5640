"""Every code block of the documentation runs as it is printed, or the registry names how it is checked instead."""

import ast
import inspect
import io
import re
import sys
from contextlib import AsyncExitStack, redirect_stdout
from pathlib import Path

import pytest

from tests.helpers.loops import looped

from .block_checks import CHECKS, LANGUAGES, PREPARATIONS, CheckedBy, Output, Parsed, Program, Shell, Step
from .commands import check_commands
from .pages import NAMES, ROOT, blocks, fenced, require_test
from .running import run, run_shell, unmeasured

PRINTED = [page for page, checks in CHECKS.items() if not isinstance(checks, CheckedBy)]
RUN = [page for page in PRINTED if any(isinstance(check, Program | Step | Shell) for check in CHECKS[page])]
PARSED = [page for page in PRINTED if any(isinstance(check, Parsed) for check in CHECKS[page])]


def checked(page):
    """Return the blocks of a page, each with its check."""
    return list(zip(fenced(page), CHECKS[page], strict=True))


@looped("page", NAMES)
def test_each_block_has_a_check_for_its_language(page):
    found, checks = fenced(page), CHECKS.get(page, [])
    if isinstance(checks, CheckedBy):
        checks = [checks] * len(found)
    assert len(found) == len(checks), f"list every block of {page} in tests/docs/block_checks.py, in order"
    for block, check in zip(found, checks, strict=True):
        assert block.language in LANGUAGES[type(check)], f"{block} is {block.language!r}, but its check is {check}"


def test_the_registry_names_existing_pages_only():
    assert sorted(CHECKS.keys() - set(NAMES)) == []
    assert PREPARATIONS.keys() <= set(RUN)


@looped("page", [page for page in NAMES if CHECKS.get(page)])
def test_tests_that_read_a_page_name_it(page):
    checks = CHECKS[page]
    for check in {checks} if isinstance(checks, CheckedBy) else set(checks):
        if isinstance(check, CheckedBy):
            if "::" in check.path:
                require_test(check.path)
                continue
            assert re.search(rf'{Path(page).name}|"{Path(page).stem}"', (ROOT / check.path).read_text()), check
            for path in re.findall(r"tests/[\w/]+\.py", check.why):
                assert (ROOT / path).exists(), path


@looped("page", NAMES)
def test_python_is_python(page):
    for block in blocks(page, "python"):
        compile(block, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


@looped("page", sorted((ROOT / "docs").rglob("*.md")))
def test_every_page_is_in_the_index(page):
    relative = page.relative_to(ROOT / "docs")
    assert relative.name == "index.md" or f"({relative})" in (ROOT / "docs" / "index.md").read_text()


@looped("page", PARSED)
def test_commands_that_are_not_run_are_understood(page):
    for block, check in checked(page):
        if isinstance(check, Parsed):
            check_commands(block)


@pytest.mark.nixl
@pytest.mark.processes
@pytest.mark.parametrize("page", RUN)
async def test_blocks_run_in_the_order_of_the_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    PREPARATIONS.get(page, lambda folder: None)(tmp_path)
    async with AsyncExitStack() as stack:
        names, printed = {"stack": stack}, ""
        for block, check in checked(page):
            match check:
                case Program():
                    printed = run_program(block.text)
                case Shell():
                    printed = run_shell(block.text, check)
                case Step():
                    await execute(check.before, block, names)
                    printed = await execute("\n" * (block.line - 1) + block.text, block, names)
                    await execute(check.after, block, names)
                case Output():
                    require_printed(block, printed, check)


@pytest.mark.nixl
def test_readme_runs_as_printed(tmp_path, monkeypatch):
    [program] = blocks("README.md", "python")
    assert len([line for line in program.splitlines() if line.strip()]) <= 20
    promised = program.rpartition("  # ")[2].strip()
    monkeypatch.chdir(tmp_path)
    assert run_program(program).splitlines() == [promised]


def run_program(text):
    """Run a Python program in the current folder, and return what it printed."""
    Path("program.py").write_text(text)
    return run([sys.executable, "program.py"])


async def execute(source, block, names):
    """Execute Python that may await, and return what it printed."""
    code = compile(source, str(ROOT / block.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    with redirect_stdout(io.StringIO()) as printed:
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
    return printed.getvalue()


def require_printed(block, printed, check):
    """Check that a block shows the lines that were printed. Processes print theirs in any order, commands in one."""
    shown, found = (unmeasured(block.text), unmeasured(printed)) if check.measured else (block.text, printed)
    expected = [re.escape(line).replace(r"\.\.\.", ".*") for line in shown.rstrip("\n").split("\n")]
    lines = found.rstrip("\n").split("\n")
    if check.part:
        starts = [number for number, line in enumerate(lines) if re.fullmatch(expected[0], line)]
        candidates = [lines[start : start + len(expected)] for start in starts]
    elif check.measured:
        candidates = [lines]
    else:
        expected, candidates = sorted(expected), [sorted(lines)]
    assert any(len(found) == len(expected) and all(map(re.fullmatch, expected, found)) for found in candidates), (
        f"{block} differs from what was printed:\n{printed}"
    )
