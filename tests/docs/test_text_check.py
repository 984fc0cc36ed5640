"""The check of texts, which ``make lint`` runs, finds what it looks for."""

from tests.helpers.loops import looped

from .text_check import (
    TERMS,
    anchors_of,
    find_dead_links,
    find_dead_paths,
    find_terms,
    prose_of_python,
    read_terms,
    without_code,
)

LIST = read_terms(TERMS.read_text())


def found_in(prose):
    return [(complaint.line, complaint.text.split("'")[1]) for complaint in find_terms("page.md", prose, LIST)]


def test_every_term_has_an_alternative():
    assert len(LIST) > 20
    assert all(advice for _, advice in LIST)


@looped(
    "text, found",
    [
        ("Whoever asks", "Whoever"),
        ("it is not used any\nmore.", "any more"),
        ("- nobody lets\n  go of it", "lets go of"),
        ("the cause of that, and", "of that"),
        ("what its words are", "words"),
    ],
)
def test_a_term_is_found(text, found):
    assert found_in(f"One line.\n{text}") == [(2, found)]


def test_other_terms_are_left_alone():
    assert found_in("keywords, harmless, the part of that file, 8-byte words, indoors, by itself-made") == [
        (1, "by itself")
    ]


def test_code_in_pages_is_not_checked():
    page = "Text `whoever` here.\n```python\nwhoever = 1\n```\n\nAfter [a link](harm.md), whoever.\n"
    assert found_in(without_code(page)) == [(6, "whoever")]


def test_comments_and_strings_of_python_are_checked():
    source = '"""Doc ``harm``.\n\nWhoever.\n"""\nharm = 1  # anew\nname = f"any more {harm}"\n'
    assert sorted(found_in(prose_of_python(source))) == [(3, "Whoever"), (5, "anew"), (6, "any more")]


def test_anchors_are_those_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A `b.c`: d\n```\n# no heading\n```\n## Two-way [link](x.md)\n## Same\n## Same\n")
    assert anchors_of(page) == {"a-bc-d", "two-way-link", "same", "same-1"}


def test_dead_links_and_paths_are_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Here\n[a](#here) [b](#there)\n[c](no.md) [d](https://example.org)\n[e](page.md#here)\n")
    assert [complaint.line for complaint in find_dead_links(page, tmp_path)] == [2, 3]
    source, missing = tmp_path / "source.py", "docs/" + "page.md"
    source.write_text(f"# {missing}\n")
    assert [complaint.text for complaint in find_dead_paths(source, tmp_path)] == [f"{missing} does not exist"]
