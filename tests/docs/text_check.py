"""``python -m tests.docs.text_check``: check the texts of the repository for avoided terms and for dead links.

The terms are in ``avoided_terms.txt``. In Markdown the check reads prose; in Python it reads comments and strings. It
skips code blocks and code in backquotes. A link must lead to a file that exists, and its anchor to a heading of that
file. A page that a source file names by its path must exist.
"""

import io
import re
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
TERMS = Path(__file__).with_name("avoided_terms.txt")

PAGES = ("*.md", "docs/**/*.md")
SOURCES = ("kvflow/**/*.py", "handshake/**/*.py", "docs/examples/**/*.py")
NAMING_PAGES = (*SOURCES, "tests/**/*.py", "docker/*", "Makefile", "pyproject.toml")

PROSE_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


class Complaint(NamedTuple):
    """One finding, with the line where it is."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def read_terms(text: str) -> list[tuple[re.Pattern[str], str]]:
    """Return the patterns of a list of terms, each with what to write instead."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    split = [line.rpartition(" | ") for line in lines]
    return [(re.compile(rf"\b(?:{term.strip()})(?!\w)", re.IGNORECASE), advice.strip()) for term, _, advice in split]


def _blank(found: re.Match[str]) -> str:
    """Return as many lines as a match has, without their text."""
    return "\n" * found[0].count("\n") + " "


def without_code(text: str) -> str:
    """Return a Markdown page, or a docstring, without its code; lines keep their numbers."""
    text = re.sub(r"^( *)```.*?^\1```", _blank, text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", _blank, text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", text)


def prose_of_python(source: str) -> str:
    """Return the comments and strings of a module, each at its line, and nothing else."""
    lines: list[str] = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in PROSE_TOKENS:
            formatted = token.type == tokenize.STRING and "f" in token.string.partition(token.string[-1])[0].lower()
            string = re.sub(r"\{[^{}]*\}", _blank, token.string) if formatted else token.string
            for number, text in enumerate(string.splitlines(), start=token.start[0]):
                lines[number] += f" {text}"
    return without_code("\n".join(lines[1:]))


def find_terms(path: str, prose: str, terms: list[tuple[re.Pattern[str], str]]) -> Iterator[Complaint]:
    """Yield the avoided terms of a text. A term may continue on the next line."""
    lines = [line.strip(" #>") for line in prose.splitlines()]
    starts = list(accumulate((len(line) + 1 for line in lines), initial=0))
    joined = " ".join(lines)
    for pattern, advice in terms:
        for found in pattern.finditer(joined):
            yield Complaint(path, bisect_right(starts, found.start()), f"avoid {found[0]!r}; write: {advice}")


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.*?)\s*#*$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = sum(name == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", name) is not None for name in found)
        found.append(f"{anchor}-{again}" if again else anchor)
    return frozenset(found)


def find_dead_links(page: Path, root: Path = ROOT) -> Iterator[Complaint]:
    """Yield the links of a page to files, or to headings, that do not exist."""
    text = re.sub(r"^( *)```.*?^\1```", _blank, page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for found in re.finditer(r"\]\(([^)\s]+)\)", text):
        target = found[1]
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        line = text.count("\n", 0, found.start()) + 1
        name = str(page.relative_to(root))
        if not linked.exists():
            yield Complaint(name, line, f"the link to {target} leads to no file")
        elif anchor and anchor not in (anchors_of(linked) if linked.suffix == ".md" else frozenset()):
            yield Complaint(name, line, f"the link to {target} leads to no heading")


def find_dead_paths(path: Path, root: Path = ROOT) -> Iterator[Complaint]:
    """Yield the pages that a file names by their paths, and that do not exist."""
    for line, text in enumerate(path.read_text().splitlines(), start=1):
        for named in re.findall(r"(?<![\w/])docs/[\w/-]+\.md", text):
            if not (root / named).exists():
                yield Complaint(str(path.relative_to(root)), line, f"{named} does not exist")


def files(patterns: tuple[str, ...]) -> list[Path]:
    """Return the files of patterns, in order."""
    return sorted({path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()})


def check() -> list[Complaint]:
    """Return what is wrong with the texts of the repository."""
    terms = read_terms(TERMS.read_text())
    complaints: list[Complaint] = []
    for path in files((*PAGES, *SOURCES)):
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        prose = without_code(text) if path.suffix == ".md" else prose_of_python(text)
        complaints += find_terms(name, prose, terms)
    for page in files(PAGES):
        complaints += find_dead_links(page)
    for path in files(NAMING_PAGES):
        complaints += find_dead_paths(path)
    return complaints


def main() -> int:
    """Print what is wrong."""
    complaints = check()
    for complaint in complaints:
        print(complaint)  # noqa: T201
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
