"""The verdict: one wrong token, one missing answer or one block that is left fails the demo."""

import pytest

from kvflow.report import PHASES, TransferReport
from kvflow.tools.demo.messages import MAX_TOKENS, Drained
from kvflow.tools.demo.results import PromptResult, ScenarioResult
from kvflow.tools.demo.run import PACKED

TOKENS = list(range(MAX_TOKENS))


def answer(tokens=TOKENS, *, wire=0.001):
    timings = {
        "total": 0.001 + wire,
        "queue": 0.0,
        "handshake": 0.0,
        "bind": 0.0,
        "post": 0.001,
        "wire": wire,
        "fence": 0.0,
    }
    report = TransferReport(request_id="r", nbytes=1000, descriptors=3, reads=1, timings_s=timings)
    return PromptResult(list(tokens), report)


def result(*answers, left=None):
    return ScenarioResult(
        scenario=PACKED, answers=answers, expected=[TOKENS] * len(answers), left=left or {"decode": Drained()}
    )


def test_equal_tokens_pass():
    outcome = result(answer(), answer())
    assert outcome.passed
    assert (outcome.tokens_equal, outcome.tokens_total) == (64, 64)
    assert (outcome.nbytes, outcome.descriptors) == (2000, 6)


def test_figures_for_a_program_are_those_of_the_tables():
    outcome = result(answer(), answer([*TOKENS[:-1], 99]))
    figures = outcome.figures
    assert (figures["passed"], figures["tokens"], figures["requests"]) == (False, (63, 64), (2, 2))
    assert set(figures["phases_ms"]) == {"total", *PHASES}
    assert figures["phases_ms"]["wire"] == outcome.phase_ms("wire") == (1.0, 1.0)


def test_one_wrong_token_fails():
    outcome = result(answer(), answer([*TOKENS[:-1], 99]))
    assert outcome.tokens_equal == 63
    assert not outcome.passed


def test_too_few_tokens_fail():
    assert not result(answer(TOKENS[:-1])).passed


def test_a_failed_request_fails():
    outcome = result(answer(), PromptResult(failure="the engine hung up"))
    assert not outcome.passed
    assert outcome.failures == ["the engine hung up"]


@pytest.mark.parametrize("field", ["blocks_used", "leases_held", "blocks_quarantined"])
def test_what_is_left_fails(field):
    assert not result(answer(), left={"prefill": Drained(), "decode": Drained(**{field: 1})}).passed


def test_rates_and_quantiles_are_over_the_time_on_the_way():
    outcome = result(*(answer(wire=wire / 1000) for wire in range(101)))
    assert outcome.phase_ms("wire") == pytest.approx((50, 100))
    assert outcome.gb_per_s == pytest.approx(101 * 1000 / (5.05 + 0.101) / 1e9)


def test_phases_are_those_of_one_pull_and_add_up_to_it():
    outcome = result(*(answer(wire=wire / 1000) for wire in (7, 1, 100, 3)))
    for pull in (0, 1):
        assert sum(outcome.phase_ms(phase)[pull] for phase in PHASES) == pytest.approx(outcome.phase_ms("total")[pull])
    assert outcome.phase_ms("total") == pytest.approx((4, 101))


def test_nothing_moved_has_no_rate():
    outcome = result(PromptResult(failure="x"))
    assert outcome.gb_per_s == 0
    assert outcome.phase_ms("total") == (0, 0)
