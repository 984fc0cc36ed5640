"""``make compose-demo``: both profiles give the tokens of the monolithic run, and nothing is left behind."""

# ruff: noqa: T201  # the tables are shown

import re
import secrets

import pytest

from .containers import ROOT, left_of, run


@pytest.mark.timeout(900)
def test_both_profiles_agree_with_one_process_and_leave_nothing(image, capsys):
    name = f"kvflow-test-{secrets.token_hex(4)}"
    done = run(str(ROOT / "docker" / "demo.sh"), name, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert left_of(name) == []
    assert re.findall(r"^prefill-(\w+):8000 to decode-\1:8000 *$", done.stdout, re.MULTILINE) == ["tcp", "shm"]
    assert len(re.findall(r"tokens equal +│ +768 of 768 ", done.stdout)) == 2
    assert done.stdout.count("tokens equal those of one process. Nothing was left leased or quarantined.") == 2
    with capsys.disabled():
        print(done.stdout)
