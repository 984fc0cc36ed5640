"""What requests of vLLM say of transfers beside ``kvflow.routing``: samples, streams, traces.

``Untagged`` counts the requests that come without such parameters.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import islice

from kvflow import is_traceparent
from kvflow.integrations.vllm.logs import logger
from kvflow.integrations.vllm.messages import Tally
from kvflow.integrations.vllm.settings import Settings
from kvflow.routing import is_tagged, wants_transfer

TICKET_CHARS_BASE = 1 << 17  # characters of a ticket without its blocks: enough for 400 ranks with long names
CHARS_PER_BLOCK = 8  # a block id takes at most 5 bytes of msgpack, which are 7 characters of base64

FINEST_BLOCK = 16
"""Tokens of the smallest block that a producer may have, unless this engine has smaller ones: vLLM's default."""

SAMPLE = re.compile(r"\d+_(?P<prompt>.+)", re.DOTALL)
"""vLLM's name of a sample: its number, then the name of the request. Other requests have no number in front."""


def is_streamed(request: object) -> bool:
    """Return whether vLLM gives the answer to a request token by token."""
    kind = getattr(getattr(request, "sampling_params", None), "output_kind", None)
    return getattr(kind, "name", "") == "DELTA"


def traceparent_of(headers: object) -> str:
    """Return the W3C trace context of a request's ``trace_headers``, which a client may choose; empty if malformed."""
    given = headers.get("traceparent") if isinstance(headers, Mapping) else None
    return given if is_traceparent(given) else ""


def ticket_chars_max(block_sizes: Sequence[int], tokens_max: int) -> int:
    """Return the length of the longest ticket that an engine can use, in characters; 0 is the block size of states."""
    smallest = min([FINEST_BLOCK, *filter(None, block_sizes)])
    groups = max(4, 2 * len(block_sizes))  # the producer may have more groups than this engine
    return TICKET_CHARS_BASE + groups * CHARS_PER_BLOCK * -(-tokens_max // smallest)


UNTAGGED_MAX = 20  # first requests without parameters after which an engine logs that none of them had any
UNTAGGED_ROW = 100  # the same, in a row, of an engine that has seen parameters: its router may have been restarted

FOREIGN_MAX = 8  # keys of one request that are named
FOREIGN_CHARACTERS_MAX = 40  # of each: a client may choose them

UNTAGGED_CODE = "untagged_requests"  # the metric ``vllm:kvflow_untagged_requests`` counts the same requests

CAUSE = (
    "Most likely the router does not know which engines prefill and which decode. Start vllm-router with "
    "--vllm-pd-disaggregation; label the prefill workers of smg with kv_connector=NixlConnector; build the application "
    "of Ray Serve LLM with kvflow.integrations.ray.build_pd_openai_app. kvflow proxy needs no setting."
)

ALWAYS = ' If the router has no such setting, set "offer": "always" in kv_connector_extra_config.'


class Untagged:
    """Counts the requests of one engine that involve no other engine. Thread: the scheduler's."""

    def __init__(self, settings: Settings, tally: Tally) -> None:
        self._settings = settings
        self._tally = tally  # ``absent``, ``decline`` (no transfer wanted), ``another_prompt``
        self._absent = 0  # in a row
        self._told = False
        self._told_further = False
        self._told_streamed = False
        self._tagged = False
        self._foreign = ""  # keys of one of these requests, such as the roles of another protocol

    def note(self, params: object) -> None:
        """Count a request by its ``kv_transfer_params``, as the client sent them."""
        if not is_tagged(params):
            self._tally.count("untagged", "absent")
            self._absent += 1
            if isinstance(params, dict):
                self._foreign = ", ".join(
                    [repr(str(key)[:FOREIGN_CHARACTERS_MAX]) for key in islice(params, FOREIGN_MAX)]
                )
            self._tell_absent()
            return
        if not wants_transfer(params):
            self._tally.count("untagged", "decline")
        if self._told:
            logger.info("kvflow: a request with kv_transfer_params has arrived, after %d without", self._absent)
        self._tagged, self._told, self._absent, self._foreign = True, False, 0, ""

    def note_further_prompt(self) -> None:
        """Count a second or later prompt of a call: its ticket is that of the first prompt."""
        self._tally.count("untagged", "another_prompt")
        if not self._told_further:
            self._told_further = True
            logger.info(
                "kvflow: a request has several prompts and one ticket. The ticket covers the first prompt, and this "
                "engine computes the others. Send one prompt in each request. This message is not repeated."
            )

    def note_streamed(self, request_id: str) -> None:
        """Say of the first request for a ticket that is streamed why its client may get none."""
        if not self._told_streamed:
            self._told_streamed = True
            logger.info(
                "kvflow: request %s asks for a ticket, and its answer is streamed. vLLM's own server streams no "
                "kv_transfer_params: the ticket is lost, and the blocks stay until the lease ends. If the request came "
                'through it, have the router send "stream": false to prefill engines. This message is not repeated.',
                request_id,
            )

    def _tell_absent(self) -> None:
        row = UNTAGGED_ROW if self._tagged else UNTAGGED_MAX
        if self._told or self._absent < row or self._settings.offer == "always":  # which need not be asked
            return
        self._told = True
        produces, consumes = self._settings.produces, self._settings.consumes
        wanted = {"asked for a ticket": produces, "brought a ticket": consumes}
        remedy = CAUSE if consumes or not produces else CAUSE + ALWAYS
        text = (
            "kvflow: none of the last %d requests has %s (kv_transfer_params%s). This engine transfers nothing, and a "
            "prompt that two engines get is computed twice. [%s] " + remedy
        )
        asked = " or ".join(words for words, is_meant in wanted.items() if is_meant)
        foreign = f"; one of them had other keys: {self._foreign}" if self._foreign else ""
        logger.warning(text, row, asked, foreign, UNTAGGED_CODE)
