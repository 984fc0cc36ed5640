"""A ticket serves the prompt that was prefilled and no other, whatever vLLM's prefix cache makes of it."""

import random
from types import SimpleNamespace

import pytest

from kvflow.contents import Contents
from kvflow.integrations.vllm.versions import extra_keys

from .pairs import LEASE_S
from .prompts import prompt_of

SYSTEM = prompt_of(256, "system")
"""The beginning of many prompts: two whole blocks of vLLM's for CPUs."""
CACHED = pytest.mark.parametrize("pair", ["llama-cached"], indirect=True)


def refused(pair, prompt, params, **named):
    """Check that a request is refused for what its ticket holds, and that the ticket is given back at once."""
    answer = pair.decode.generate(prompt, params, **named)
    assert answer["finish_reason"] == "error", answer
    assert pair.decode.reason(answer["id"]) == "content_mismatch"
    pair.prefill.wait_state(lambda state: state["held"] == 0, LEASE_S / 2)  # long before the lease runs out


@CACHED
def test_a_ticket_of_another_prompt_does_not_poison_the_prefix_cache(pair):
    honest = [*SYSTEM, *prompt_of(9, "question")]
    alone = pair.monolithic(honest)
    refused(pair, SYSTEM, pair.ticket(prompt_of(len(SYSTEM), "a stranger's own prompt")))
    assert pair.decode.generate(honest)["tokens"] == alone
    assert pair.disaggregated(honest) == alone


@CACHED
@pytest.mark.parametrize(
    "asked",
    [
        prompt_of(256, "as long"),
        [*SYSTEM[:-1], SYSTEM[-1] ^ 1],
        [SYSTEM[0] ^ 1, *SYSTEM[1:]],
        SYSTEM[:-1],
        SYSTEM[:128],
        [*SYSTEM[:200], *prompt_of(200, "longer")],
    ],
    ids=["as long", "another last token", "another first token", "a token less", "half", "longer"],
)
def test_a_ticket_is_refused_for_another_prompt(pair, asked):
    refused(pair, asked, pair.ticket(SYSTEM))
    assert pair.disaggregated(asked) == pair.monolithic(asked)


@CACHED
@pytest.mark.parametrize(("theirs", "ours"), [("", "mine"), ("theirs", ""), ("theirs", "mine")])
def test_a_ticket_is_refused_for_another_salt(pair, theirs, ours):
    refused(pair, SYSTEM, pair.ticket(SYSTEM, salt=theirs), salt=ours)
    ticket = pair.ticket(SYSTEM, salt=ours)
    assert pair.decode.generate(SYSTEM, ticket, salt=ours)["tokens"] == pair.monolithic(SYSTEM)


@CACHED
def test_a_prompt_that_goes_on_behind_its_ticket_is_right(pair):
    conversation = [*SYSTEM, *prompt_of(77, "goes on")]
    answer = pair.decode.generate(conversation, pair.ticket(SYSTEM))
    assert not pair.decode.reason(answer["id"])
    assert answer["tokens"] == pair.monolithic(conversation)


# What vLLM hashes beside the tokens, by its own function and in requests of its own.


def vllm_request(seed, *, adapter="", path="", pictures=(), salt=None, embeddings=0):
    """A request as vLLM's scheduler has it."""
    import torch
    from vllm import SamplingParams
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.request import Request

    tokens = [random.Random(seed).randrange(1000) for _ in range(100)]
    torch.manual_seed(embeddings)
    return Request(
        "request",
        None if embeddings else tokens,
        SamplingParams(max_tokens=1),
        None,
        prompt_embeds=torch.randn(100, 8) if embeddings else None,
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset=offset, length=20))
            for offset, name in pictures
        ],
        lora_request=SimpleNamespace(lora_name=adapter, lora_path=path) if adapter else None,
        cache_salt=salt,
    )


def digests(request, block_size=16):
    ids = range(-(-100 // (block_size or 100)))
    return Contents({b"": b"key"}, extra_keys()).digests(request, [ids], [block_size], 100)[0]


ALIKE = [
    {},
    {"adapter": "sql"},
    {"pictures": [(5, "a cat"), (40, "a dog")]},
    {"salt": "mine"},
    {"embeddings": 1},
    {"adapter": "sql", "pictures": [(14, "a cat")], "salt": "mine"},
]


IMPORTS_VLLM = pytest.mark.filterwarnings("ignore")
"""Its modules warn when they are loaded."""


@IMPORTS_VLLM
@pytest.mark.parametrize("block_size", [16, 32, 0])
@pytest.mark.parametrize("named", ALIKE, ids=str)
def test_two_engines_make_the_same_digests_of_one_request(named, block_size):
    # Each engine has an adapter where it likes.
    one, other = (digests(vllm_request(1, path=path, **named), block_size) for path in ("/one", "/other"))
    assert one == other
    assert one != digests(vllm_request(2, **named), block_size) or "embeddings" in named


@IMPORTS_VLLM
@pytest.mark.parametrize(
    ("one", "other", "first"),
    [
        ({}, {"adapter": "sql"}, 0),
        ({"adapter": "xml"}, {"adapter": "sql"}, 0),
        ({}, {"salt": "mine"}, 0),
        ({"salt": "theirs"}, {"salt": "mine"}, 0),
        ({}, {"pictures": [(40, "a cat")]}, 2),
        ({"pictures": [(40, "a dog")]}, {"pictures": [(40, "a cat")]}, 2),
        ({"pictures": [(41, "a cat")]}, {"pictures": [(40, "a cat")]}, 2),
        ({"pictures": [(40, "a cat")]}, {"pictures": [(40, "a cat"), (70, "a dog")]}, 4),
        ({"pictures": [(5, "a cat"), (70, "a bird")]}, {"pictures": [(5, "a cat"), (70, "a dog")]}, 4),
        ({"pictures": [(5, "a cat"), (71, "a dog")]}, {"pictures": [(5, "a cat"), (70, "a dog")]}, 4),
        ({"embeddings": 1}, {"embeddings": 2}, 0),
    ],
    ids=str,
)
def test_what_vllm_tells_apart_has_other_digests(one, other, first):
    found, expected = digests(vllm_request(1, **one)), digests(vllm_request(1, **other))
    assert [a == b for a, b in zip(found, expected, strict=True)] == [index < first for index in range(7)]
