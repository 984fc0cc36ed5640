"""A calibration replaces another whole or not at all."""

import pytest

from kvflow.tools.bench.writing import replace_file, try_to_write


def test_a_file_is_replaced_behind_its_link_and_nothing_else_is_left(tmp_path):
    path, link = tmp_path / "there" / "calibration.json", tmp_path / "link"
    path.parent.mkdir()
    link.symlink_to(path)
    for text in (b"old", b"new"):
        try_to_write(link)
        replace_file(link, text)
        assert path.read_bytes() == text
    assert link.is_symlink()
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    path.write_bytes(b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("path", "words"), [("folder", "is no regular file"), ("missing/file", "No such file"), ("/dev/null", "no regular")]
)
def test_what_cannot_be_written_is_told_before(tmp_path, path, words):
    (tmp_path / "folder").mkdir()
    for write in (try_to_write, lambda there: replace_file(there, b"new")):
        with pytest.raises(OSError, match=words):
            write(tmp_path / path)
