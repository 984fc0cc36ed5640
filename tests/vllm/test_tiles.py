"""Each side of the connector asks Linux for AMX before vLLM computes anything."""

import pytest

from kvflow.integrations.vllm import engine as connector_engine

from .pairs import model_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported


def test_both_sides_of_the_connector_ask_for_amx_before_the_first_step(monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    from . import second_runner

    order, make = [], KVConnectorBase_V1.__init__

    def note(self, config, role, caches):
        order.append(role.name)
        make(self, config, role, caches)

    second_runner.prepare(monkeypatch)
    monkeypatch.setattr(KVConnectorBase_V1, "__init__", note)
    monkeypatch.setattr(connector_engine, "AMX", "processor")  # every CPU has this
    monkeypatch.setattr(connector_engine, "_request_feature", lambda number: order.append(number) or 0)
    engine = second_runner.Engine(model_folder("llama"), "kv_consumer")
    try:
        assert order in (["SCHEDULER", 18, "WORKER", 18], ["WORKER", 18, "SCHEDULER", 18])
    finally:
        engine.close()
