"""Under ``MultiConnector``, kvflow beside a connector that keeps prompts on a disk: hits and failures of each child.

Each engine has a disk of its own. The order of the children decides: vLLM loads a prompt from the first child that has
some of it, and tells the others that they load nothing.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .checks import LENGTH, abort_prefills, abort_reads, expect_policy, records_of
from .clients import BLOCK_BYTES, BLOCK_TOKENS
from .engines import records
from .pairs import MULTI, RANKS_LOG, await_all, chosen
from .prompts import prompt_of

ON_DISK = LENGTH // BLOCK_TOKENS * BLOCK_TOKENS
"""Whole blocks alone are kept."""
LENGTHS = (40, 128, 150, 333, 700)
ALL = chosen(*MULTI)
KILLED = {"peer_lost", "peer_unavailable"}


def computed_alone(pair, prompt):
    """Return the tokens that the prefill engine makes of a prompt when no disk helps, and leave nothing on it."""
    pair.prefill.forget()
    tokens = pair.monolithic(prompt)
    pair.prefill.forget()
    return tokens


def injections(engine):
    """Return how often an engine has loaded a prompt from its disk."""
    return engine.log.read_text(errors="replace").count("Inject KV cache of")


def expect_read(pair, prompt, answer, ticket):
    """Check that a request has read all blocks of its prompt, and that the lease has ended well."""
    [record] = await_all(lambda: records_of(pair.decode, answer["id"]))
    assert record["event"] == "transfer.completed"
    assert record["nbytes"] == -(-len(prompt) // BLOCK_TOKENS) * BLOCK_BYTES
    expect_released(pair, ticket)


def expect_released(pair, ticket):
    """Check that a ticket was given back or read, and did not run out."""
    pair.prefill.wait_state(lambda state: state["held"] == 0)
    assert lease_of(pair, ticket)["outcome"] == "released"


def lease_of(pair, ticket):
    """Return the record of a lease that has ended."""

    def ended():
        return [each for each in records(RANKS_LOG, "lease.ended") if each["request_id"] == ticket["remote_request_id"]]

    return await_all(ended)[0]


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_prompts_that_no_disk_has_are_read_from_the_prefill_engine(pair):
    prompts = {length: prompt_of(length, "no disk") for length in LENGTHS}
    alone = {length: computed_alone(pair, prompt) for length, prompt in prompts.items()}
    tickets = {length: pair.ticket(prompt) for length, prompt in prompts.items()}
    loaded = [injections(engine) for engine in (pair.prefill, pair.decode)]
    requests = {length: pair.decode.submit(prompt, tickets[length]) for length, prompt in prompts.items()}
    answers = {length: request.wait() for length, request in requests.items()}
    assert {length: answer["tokens"] for length, answer in answers.items()} == alone
    for length, prompt in prompts.items():
        expect_read(pair, prompt, answers[length], tickets[length])
    assert [injections(engine) for engine in (pair.prefill, pair.decode)] == loaded


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_a_prompt_from_the_disk_of_the_prefill_engine_is_offered(pair):
    prompt = prompt_of(LENGTH, "prefill disk")
    alone = pair.monolithic(prompt)  # leaves it on the disk
    loaded = injections(pair.prefill)
    ticket = pair.ticket(prompt)
    assert injections(pair.prefill) == loaded + 1
    answer = pair.decode.generate(prompt, ticket)
    assert answer["tokens"] == alone
    expect_read(pair, prompt, answer, ticket)


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_what_was_read_from_the_prefill_engine_is_kept_on_disk(pair):
    prompt = prompt_of(LENGTH, "kept")
    alone = computed_alone(pair, prompt)
    first = pair.decode.generate(prompt, pair.ticket(prompt))
    loaded = injections(pair.decode)
    second = pair.decode.generate(prompt)  # without a ticket
    assert first["tokens"] == second["tokens"] == alone
    assert injections(pair.decode) == loaded + 1
    assert second["cached_tokens"] == ON_DISK
    assert records_of(pair.decode, second["id"]) == []


@pytest.mark.proves("`MultiConnector`", engine="real", pairs="-multi-last-")
@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_the_first_child_that_has_a_prompt_loads_it(pair):
    prompt = prompt_of(LENGTH, "both")
    alone = computed_alone(pair, prompt)
    pair.decode.generate(prompt, pair.ticket(prompt))
    loaded = injections(pair.decode)
    ticket = pair.ticket(prompt)
    answer = pair.decode.generate(prompt, ticket)
    assert answer["tokens"] == alone
    if pair.decode.options.last:
        assert injections(pair.decode) == loaded + 1
        assert records_of(pair.decode, answer["id"]) == []
        expect_released(pair, ticket)  # unread
    else:
        assert injections(pair.decode) == loaded
        expect_read(pair, prompt, answer, ticket)


def used_up(pair, name):
    """Read a prompt, and return it with its tokens and the ticket, which is of no more use."""
    prompt = prompt_of(LENGTH, name)
    alone = computed_alone(pair, prompt)
    ticket = pair.ticket(prompt)
    assert pair.decode.generate(prompt, ticket)["tokens"] == alone
    pair.settle()
    return prompt, alone, ticket


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_a_ticket_that_is_used_up_fails_or_is_recomputed(pair):
    prompt, alone, ticket = used_up(pair, "used up")
    pair.decode.forget()
    loaded = injections(pair.decode)
    expect_policy(pair, pair.decode.generate(prompt, ticket), alone, {"stale_lease"})
    assert injections(pair.decode) == loaded


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_a_disk_has_what_a_ticket_that_is_used_up_has_not(pair):
    prompt, alone, ticket = used_up(pair, "used up and kept")
    loaded = injections(pair.decode)
    answer = pair.decode.generate(prompt, ticket)
    if pair.decode.options.last:  # nobody looks at the ticket
        assert answer["tokens"] == alone
        assert pair.decode.reason(answer["id"]) == ""
        assert injections(pair.decode) == loaded + 1
    else:
        expect_policy(pair, answer, alone, {"stale_lease"})
        recomputed = pair.decode.options.failure_policy == "recompute"
        assert injections(pair.decode) == loaded + recomputed


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_a_ticket_of_another_prompt_fails_or_is_recomputed(pair):
    prompt = prompt_of(LENGTH, "asked")
    alone = computed_alone(pair, prompt)
    ticket = pair.ticket(prompt_of(LENGTH, "prefilled"))
    expect_policy(pair, pair.decode.generate(prompt, ticket), alone, {"content_mismatch"})
    expect_released(pair, ticket)


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_requests_are_aborted_before_and_while_they_load(pair):
    abort_reads(pair)
    pair.settle()
    reads_again(pair)


@pytest.mark.parametrize("pair", ALL, indirect=True)
def test_prefill_requests_are_aborted(pair):
    abort_prefills(pair)
    pair.settle()
    reads_again(pair)


def reads_again(pair):
    """Check that a new prompt is read from the prefill engine."""
    prompt = prompt_of(LENGTH, "again")
    pair.decode.forget()
    alone = computed_alone(pair, prompt)
    ticket = pair.ticket(prompt)
    answer = pair.decode.generate(prompt, ticket)
    assert answer["tokens"] == alone
    expect_read(pair, prompt, answer, ticket)


@pytest.mark.parametrize("pair", ALL)  # by its name: no fixture waits for the engine that is gone
def test_requests_of_a_killed_prefill_engine_fail_or_are_recomputed(pairs, pair):
    pair = pairs.get(pair)
    prompts = [prompt_of(LENGTH, "before the kill"), prompt_of(LENGTH, "after the kill")]
    alone = [computed_alone(pair, prompt) for prompt in prompts]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    assert pair.decode.generate(prompts[0], tickets[0])["tokens"] == alone[0]
    pair.prefill.kill()
    expect_policy(pair, pair.decode.generate(prompts[1], tickets[1]), alone[1], KILLED)
    pair.decode.forget()
    assert pair.decode.generate(prompts[0])["tokens"] == alone[0]
    pair.decode.settle()


@pytest.mark.parametrize("pair", ["llama-alias"], indirect=True)
def test_the_connector_works_as_nixl_connector_and_by_its_module_path(pair):
    prompts = [prompt_of(length, "alias") for length in LENGTHS]
    alone = [pair.monolithic(prompt) for prompt in prompts]
    tickets = [pair.ticket(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(pair.decode.generate, prompts, tickets))
    assert [answer["tokens"] for answer in answers] == alone
    for prompt, answer, ticket in zip(prompts, answers, tickets, strict=True):
        expect_read(pair, prompt, answer, ticket)
