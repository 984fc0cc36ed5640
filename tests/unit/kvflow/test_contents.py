"""Digests of requests that token ids alone determine; ``test_vllm_contents`` has those of vLLM's requests."""

import pytest

from kvflow import TicketKey, WorkerConfig
from kvflow.contents import Contents, TokenIds
from kvflow.errors import ContentMismatch
from tests.unit.kvflow.integrations.vllm_like import SECRET, new_contents, new_request, new_ticket

CONTENTS = Contents(TicketKey.of(WorkerConfig(engine_id="another", cluster_secret=SECRET)).content_keys())


def test_token_ids_have_the_digests_of_a_vllm_request():
    request, block_ids = new_request(None, 50), [[1, 2, 3], [1, 2]]
    expected = new_contents().digests(request, block_ids, [16, 32], 48)
    assert CONTENTS.digests(TokenIds(request.all_token_ids), block_ids, [16, 32], 48) == expected


def test_a_ticket_is_compared_with_token_ids():
    ticket, prompt = new_ticket(48), list(new_request(None, 48).all_token_ids)
    CONTENTS.require(TokenIds([*prompt, 1, 2]), ticket)
    for other in (prompt[:40], [*prompt[:-1], 7]):
        with pytest.raises(ContentMismatch):
            CONTENTS.require(TokenIds(other), ticket)
