"""Who has been told what sources keep asks the one that has most of a prompt, and nobody if none has any."""

import itertools

import pytest

from kvflow import Told
from kvflow.integrations.vllm import finder as finder_module
from kvflow.integrations.vllm import told
from kvflow.leases import told as leases_told
from kvflow.worker.askers import PrefixReader

from .test_vllm_finder import FIRST, SECOND, THIRD, Source, finders, sought  # noqa: F401 - a fixture
from .vllm_like import counted, new_request, wait_until

TELLS = {"tell": True}


def source(num_tokens, number=0, **how):
    return Source(num_tokens, f"decode-{number}", **{**TELLS, **how})


def known(finder):
    return {each.endpoint for each in list(finder._sources.values()) if each is not None and finder._told.knows(each)}


def test_both_sides_cut_digests_and_prompts_alike():
    assert (told.END_BYTES, told.STRIDE_TOKENS) == (leases_told.END_BYTES, leases_told.STRIDE_TOKENS)


def opened(finders, **sources):  # noqa: F811
    """Open a finder that has been told what all of these sources keep."""
    by_endpoint = dict(zip((FIRST, SECOND, THIRD), sources.values(), strict=False))
    finder = finders(by_endpoint)
    wait_until(lambda: known(finder) == set(by_endpoint))
    return finder


def test_a_prompt_that_nobody_holds_asks_nobody(finders):  # noqa: F811
    finder = opened(finders, first=source(0), second=source(160, 1))
    assert sought(finder, new_request(None, range(1000, 1400))) is None
    assert finders.asked == []
    assert counted(finder._tally, "prefixes") == {"not_held": 1}


def test_the_source_that_has_told_most_is_asked_alone_and_exactly(finders):  # noqa: F811
    finder = opened(finders, first=source(160), second=source(320, 1), third=source(96, 2))
    found = sought(finder, new_request(None, 400))
    assert (found.source, found.num_tokens) == (SECOND, 320)
    assert finders.asked == [SECOND]


def test_what_is_kept_later_and_what_has_gone_is_told(finders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(finder_module, "TELL_S", 0.001)
    first, second = source(320), source(160, 1)
    finder = opened(finders, first=first, second=second)
    first.worker.revoke("kept:1")
    ends = finder._told._ends
    wait_until(lambda: not ends[finder._sources[FIRST]])
    assert sought(finder, new_request(None, 400)).source == SECOND
    assert finders.asked == [SECOND]


def test_a_source_that_does_not_tell_is_asked_and_a_few_of_many_are(finders, monkeypatch):  # noqa: F811
    monkeypatch.setattr(finder_module, "ASKED_MAX", 1)
    finder = finders({FIRST: source(320), SECOND: source(160, 1, tell=False), THIRD: source(160, 2, tell=False)})
    wait_until(lambda: known(finder) == {FIRST})
    assert sought(finder, new_request(None, 400)).source == FIRST
    assert len(finders.asked) == 2, "one that has told, and one of those that have not"
    for number in range(40):
        sought(finder, new_request(None, 400, str(number)))
    assert set(finders.asked) == {FIRST, SECOND, THIRD}


def test_a_source_that_told_what_it_does_not_hold_is_asked_last(finders):  # noqa: F811
    liar, honest = source(320), source(160, 1)
    finder = opened(finders, first=liar, second=honest)
    index, false = finder._told, finder._sources[FIRST]
    wait_until(lambda: index._ends[false])
    liar.worker.revoke("kept:1")
    wait_until(lambda: not index._ends[false])
    honest_ends = {*index._ends[finder._sources[SECOND]]}
    index.take(false, Told(tuple(honest_ends), (), is_anew=False, is_all=True))
    for number in range(20):
        assert sought(finder, new_request(None, 400, str(number))).source == SECOND
    assert finders.asked.count(FIRST) <= 1
    assert finders.asked.count(SECOND) == 20


@pytest.mark.parametrize("lost", ["link", "told too much"])
def test_a_source_is_unknown_until_it_has_told_all_again(finders, monkeypatch, lost):  # noqa: F811
    monkeypatch.setattr(finder_module, "LOOK_S", 0.05)
    monkeypatch.setattr(finder_module, "FAILED_S", 0.0)
    first = source(160)
    finder = opened(finders, first=first)
    if lost == "link":
        first.close()
        wait_until(lambda: known(finder) == set())
        first.open(FIRST)
    else:
        finder._told.drop(finder._sources[FIRST])
        first.worker.keep("kept:2", [[60]], 16, [[b"another digest"]])
    wait_until(lambda: known(finder) == {FIRST})
    names = map(str, itertools.count())  # on a busy host an answer may be late
    wait_until(lambda: (found := sought(finder, new_request(None, 400, next(names)))) and found.source == FIRST)


def test_a_source_of_another_model_is_not_followed(finders, monkeypatch):  # noqa: F811
    followed, follow = [], PrefixReader.follow_kept
    monkeypatch.setattr(PrefixReader, "follow_kept", lambda reader, end: followed.append(end) or follow(reader, end))
    finder = finders({FIRST: source(160, model="another"), SECOND: source(160, 1)})
    wait_until(lambda: known(finder) == {SECOND})
    assert followed == [SECOND]
