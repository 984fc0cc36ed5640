"""Releases of vLLM, alone and in pairs of two: the same tokens, the bytes that they take, and every failure."""

from contextlib import ExitStack
from dataclasses import dataclass, replace

import pytest

from .checks import abort_prefills, abort_reads, expect_policy, failed, reason_of, records_of, serves
from .engines import PYTHON, ROOT, Nursery, Options, Pair, run_with_vllm
from .pairs import GPTOSS, GRANITE, LEASE_S, LLAMA, QWEN3_NEXT, RANKS_LOG, await_all, model_folder
from .prompts import prompt_of
from .tampering import of_other_blocks
from .test_contents import ALIKE
from .tiny_models import WINDOW

OLDER = ("0.29", "0.30", "0.31")
PYTHONS = {release: str(ROOT / f".venv-vllm-{release}/bin/python") for release in OLDER} | {"0.32": PYTHON}
"""Release of vLLM -> the interpreter of its environment: ``make test-vllm-full`` builds them."""

BLOCK = 128
BLOCK_BYTES = 2 * 2 * 64 * 2 * BLOCK
"""Keys and values of two heads of 64 elements in bfloat16, of one layer."""
LAYERS = 4

# One group, as a release has it whose scheduler is not told of failures by the request.
ONE_GROUP = {"disable_hybrid_kv_cache_manager": True}


@dataclass(frozen=True)
class Sides:
    """A pair of engines by release.

    Attributes:
        prefill: release of vLLM of the one side.
        decode: that of the other.
        options: of both.
        grouped: whether the layers with windows are in a group of their own, and most of their blocks stay behind.
        readable: whether one can read the other.
    """

    prefill: str
    decode: str
    options: Options
    grouped: bool = False
    readable: bool = True

    def __str__(self):
        cached = "-cached" if self.options.prefix_caching else ""
        policy = self.options.failure_policy
        return f"{self.options.model}{cached}-{policy}-{self.prefill}-to-{self.decode}"

    def options_of(self, release):
        """Return what an engine of a release is started with."""
        alone = self.options.model == "gptoss" and not self.grouped and self.readable and release != "0.29"
        return replace(
            self.options, extra={"lease_s": LEASE_S, "log_file": str(RANKS_LOG)}, llm=ONE_GROUP if alone else {}
        )

    def nbytes(self, length):
        """Return how many bytes a prompt takes."""
        if not self.grouped:
            return BLOCK_BYTES * LAYERS * -(-length // BLOCK)
        computed = length - 1  # the decode engine computes the last token
        blocks = -(-computed // BLOCK)
        seen = blocks - max(0, computed + 1 - WINDOW) // BLOCK
        return BLOCK_BYTES * LAYERS // 2 * (blocks + seen)


LLAMA_CACHED = replace(LLAMA, prefix_caching=True, failure_policy="recompute")
PAIRS = [
    Sides("0.29", "0.29", LLAMA),
    Sides("0.29", "0.29", LLAMA_CACHED),
    Sides("0.29", "0.29", GPTOSS),
    Sides("0.30", "0.30", LLAMA),
    Sides("0.30", "0.30", GPTOSS, grouped=True),
    Sides("0.31", "0.31", LLAMA),
    Sides("0.31", "0.31", GPTOSS, grouped=True),
    Sides("0.32", "0.32", LLAMA),
    Sides("0.32", "0.32", GPTOSS, grouped=True),
    Sides("0.29", "0.32", LLAMA),
    Sides("0.32", "0.31", LLAMA_CACHED),
    Sides("0.31", "0.29", LLAMA),
    Sides("0.32", "0.31", GPTOSS, grouped=True),
    Sides("0.29", "0.32", GPTOSS),
]
HYBRIDS = [Sides(release, release, options) for release in ("0.30", "0.31") for options in (GRANITE, QWEN3_NEXT)]
"""With states of Mamba 2 and of gated delta nets; ``test_tokens`` has those of the newest release."""
GROUPED_AND_NOT = [Sides("0.29", "0.32", replace(GPTOSS, failure_policy="fail"), readable=False)]
EACH = pytest.mark.parametrize("pair_of", PAIRS, ids=str, indirect=True)


@pytest.fixture(scope="module")
def nurseries():
    """What forks engines of each release."""
    with ExitStack() as stack:
        yield {release: stack.enter_context(Nursery(python)) for release, python in PYTHONS.items()}


@pytest.fixture(scope="module")
def pair_of(request, nurseries):
    """Two engines of the releases that a test asks for, and what they are."""
    sides = request.param
    prefill, decode = sides.options_of(sides.prefill), sides.options_of(sides.decode)
    folder = model_folder(sides.options.model)
    started = Pair(folder, prefill, decode, nursery=nurseries[sides.prefill], decode_nursery=nurseries[sides.decode])
    with started as pair:
        yield pair, sides


@pytest.fixture
def pair(pair_of):
    """After every test both engines live, and every block of both is free again."""
    pair, _ = pair_of
    yield pair
    pair.settle()


@pytest.fixture
def sides(pair_of):
    """What the engines are."""
    return pair_of[1]


def moved(pair, answer):
    """Return the bytes of the transfers that the decode engine has recorded for a request."""
    found = records_of(pair.decode, answer["id"])
    return [record["nbytes"] for record in found if record["event"] == "transfer.completed"]


@EACH
def test_each_side_runs_the_release_that_it_should(pair, sides):
    for engine, release in ((pair.prefill, sides.prefill), (pair.decode, sides.decode)):
        assert f"(v{release}." in engine.log.read_text(errors="replace")


@pytest.mark.parametrize("pair_of", [*PAIRS, *HYBRIDS], ids=str, indirect=True)
@pytest.mark.parametrize("length", [3, 128, 150, 333, 700])
def test_releases_say_what_one_engine_says_and_move_the_prompt(pair, sides, length):
    prompt = prompt_of(length)
    alone = pair.monolithic(prompt)
    assert len(set(alone)) > len(alone) // 4, "a model that repeats itself would prove nothing"
    assert pair.alone(pair.decode, prompt_of(length, "another")) == pair.monolithic(prompt_of(length, "another"))
    answer = pair.decode.generate(prompt, pair.ticket(prompt))
    assert answer["tokens"] == alone
    found = await_all(lambda: moved(pair, answer))
    assert len(found) == 1
    assert found == [sides.nbytes(length)] or sides in HYBRIDS


@pytest.mark.parametrize("pair_of", HYBRIDS, ids=str, indirect=True)
def test_a_ticket_for_other_blocks_changes_the_tokens_of_a_hybrid(pair):
    prompt = prompt_of(333)
    answer = pair.decode.generate(prompt, of_other_blocks(pair.ticket(prompt), pair.secret))
    assert answer["finish_reason"] == "length", answer
    assert answer["tokens"] != pair.monolithic(prompt)


@EACH
def test_releases_fail_or_recompute_what_they_cannot_read(pair):
    prompt = prompt_of(333, "used")
    alone = pair.monolithic(prompt)
    ticket = pair.ticket(prompt)
    assert pair.decode.generate(prompt, ticket)["tokens"] == alone
    pair.settle()
    longer = [*prompt, *prompt_of(200, "longer")]  # the prefix cache may have the beginning, and no more
    answer = pair.decode.generate(longer, ticket)
    expect_policy(pair, answer, pair.monolithic(longer), {"stale_lease"})
    assert not moved(pair, answer)
    serves(pair)


@EACH
def test_a_failed_request_of_a_release_disturbs_no_other(pair):
    prompts = [prompt_of(length, "several") for length in (40, 150, 333, 700)]
    alone = [pair.monolithic(prompt) for prompt in prompts]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    other = prompt_of(400, "refused")
    own = pair.monolithic(other)
    requests = [pair.decode.submit(prompt, ticket) for prompt, ticket in zip(prompts, tickets, strict=True)]
    refused = pair.decode.submit(other, {"do_remote_prefill": True, "kvflow": "kvf3.forged"})
    assert [request.wait()["tokens"] for request in requests] == alone
    answer = refused.wait()
    assert reason_of(pair, answer) == "ticket_invalid"
    assert failed(answer) or answer["tokens"] == own


@EACH
def test_requests_of_a_release_are_aborted_at_any_stage(pair):
    abort_reads(pair)
    abort_prefills(pair)
    serves(pair)


@EACH
def test_releases_name_the_salt_of_a_prompt_alike(pair):
    prompt = prompt_of(300, "salted")
    answer = pair.decode.generate(prompt, pair.ticket(prompt, salt="mine"), salt="mine")
    assert not reason_of(pair, answer)
    assert len(await_all(lambda: moved(pair, answer))) == 1
    refused = pair.decode.generate(prompt, pair.ticket(prompt, salt="mine"), salt="another")
    assert reason_of(pair, refused) == "content_mismatch"


DIGESTS = """
from tests.vllm.test_contents import ALIKE, digests, vllm_request
for named in ALIKE:
    print(named, b"".join(digests(vllm_request(1, path="/here", **named))).hex())
"""


def test_every_release_makes_the_same_digests_of_a_request():
    made = {}
    for release, python in PYTHONS.items():
        said = run_with_vllm("-c", DIGESTS, python=python)
        made[release] = [line for line in said.splitlines() if line.startswith("{")]
    assert len(set(made["0.32"])) == len(ALIKE)
    assert all(lines == made["0.32"] for lines in made.values()), made


@pytest.mark.parametrize("release", PYTHONS)
def test_loads_wait_where_the_scheduler_of_a_release_does_not_defer(release):
    from .deferral import require_waits, rows_of

    require_waits(rows_of(PYTHONS[release]))


@pytest.mark.parametrize("pair_of", GROUPED_AND_NOT, ids=str, indirect=True)
def test_an_engine_of_one_group_and_one_of_several_refuse_each_other(pair):
    prompt = prompt_of(333)
    answer = pair.decode.generate(prompt, pair.ticket(prompt))
    assert reason_of(pair, answer) == "layout_mismatch"
    assert failed(answer), answer
