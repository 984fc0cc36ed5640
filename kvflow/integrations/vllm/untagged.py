"""Requests of which no router has said anything: an engine that gets no others computes every prompt itself."""

import logging
from collections import Counter

from kvflow.integrations.vllm.params import is_tagged, wants_transfer
from kvflow.integrations.vllm.settings import Settings

logger = logging.getLogger("vllm.kvflow")  # vLLM shows what stands below its own name

UNTAGGED_MAX = 20
"""Requests that an engine takes before it says that none has carried parameters."""

CAUSE = (
    "Most likely the router does not know that it has prefill and decode engines before it. vllm-router needs "
    "--vllm-pd-disaggregation; smg needs the label kv_connector=NixlConnector on its prefill workers; Ray Serve LLM "
    "needs kvflow.integrations.ray.build_pd_openai_app; kvflow proxy needs nothing. "
)
"""And what to do about it."""

ALWAYS = 'With a router that cannot be told, set offer to "always" in kv_connector_extra_config. '


class Untagged:
    """Counts the requests of one engine that are computed as if there were no other engine.

    Args:
        settings: of the connector.

    Attributes:
        counts: requests since the last ``take``, by what their parameters say.

    Thread: the scheduler's.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.counts: Counter[str] = Counter()
        self._absent = 0
        self._told = False
        self._told_further = False
        self._tagged = settings.offers_always  # such an engine does not need to be asked

    def note(self, params: object) -> None:
        """Count a request.

        Args:
            params: its ``kv_transfer_params``, as the client sent them.
        """
        if not is_tagged(params):
            self.counts["absent"] += 1
            self._absent += 1
            self._tell_absent()
            return
        if not wants_transfer(params):
            self.counts["decline"] += 1
        if self._told and not self._tagged:
            logger.info("kvflow: the first request with kv_transfer_params has come, after %d without", self._absent)
        self._tagged = True

    def note_further_prompt(self) -> None:
        """Count a prompt behind the first one of a call: the ticket that it brings is the first one's."""
        self.counts["another_prompt"] += 1
        if not self._told_further:
            self._told_further = True
            logger.info(
                "kvflow: a request has several prompts, and one ticket, of the first: the others are computed here. "
                "Send one prompt in a request. This is said once."
            )

    def take(self) -> dict[str, int]:
        """Return the counts since the last call, by what the parameters say.

        ``absent``, ``decline``, or ``another_prompt`` for a ticket that is another prompt's of the same call.
        """
        counts, self.counts = self.counts, Counter()
        return dict(counts)

    def _tell_absent(self) -> None:
        if self._told or self._tagged or self._absent < UNTAGGED_MAX:
            return
        self._told = True
        logger.warning("kvflow: %s %sThis is said once.", self._finding(), self._remedy())

    def _finding(self) -> str:
        lacks = []
        if self._settings.produces:
            lacks.append("asked for a ticket")
        if self._settings.consumes:
            lacks.append("brought a ticket")
        return (
            f"none of the first {UNTAGGED_MAX} requests has {' or '.join(lacks)} (kv_transfer_params): nothing is "
            "transferred, and prompts are computed twice where two engines get them."
        )

    def _remedy(self) -> str:
        return CAUSE + (ALWAYS if self._settings.produces and not self._settings.consumes else "")
