"""What ranks refuse to keep reaches the scheduler's side the way vLLM carries it, also under ``MultiConnector``."""

import pickle
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported


def rank(*refused):
    """Return the worker's side of a connector whose rank has refused these, and nothing else."""
    from kvflow.integrations.vllm.connector import KVFlowConnector

    connector, names = object.__new__(KVFlowConnector), list(refused)
    taken = SimpleNamespace(take_refused=lambda: [names.pop() for _ in refused if names])
    connector._runtime, connector._scheduler = SimpleNamespace(rank=taken), None
    return connector


def scheduler():
    from kvflow.integrations.vllm.connector import KVFlowConnector

    connector, heard = object.__new__(KVFlowConnector), []
    side = SimpleNamespace(on_refused=heard.append, on_reported=lambda *_: None)
    connector._scheduler, connector._runtime = side, None
    return connector, heard


def multi(*children):
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    connector = object.__new__(MultiConnector)
    connector._connectors = list(children)
    return connector


def silent():
    """Return another child, which has nothing to say."""
    return SimpleNamespace(build_connector_worker_meta=lambda: None, update_connector_output=lambda _: None)


def carried(*connectors):
    """Return what vLLM hands to its scheduler of the outputs of these ranks, which come from other processes."""
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

    outputs = [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(kv_connector_worker_meta=each.build_connector_worker_meta()),
        )
        for each in connectors
    ]
    aggregator = KVOutputAggregator(len(connectors))
    return aggregator.aggregate(pickle.loads(pickle.dumps(outputs))).kv_connector_output


@pytest.mark.parametrize(
    ("refused", "heard"),
    [
        ([[], []], []),
        ([["kept:a"], []], [["kept:a"]]),
        ([[], ["kept:a"]], [["kept:a"]]),
        ([["kept:a"], [], ["kept:b"]], [["kept:a", "kept:b"]]),
    ],
    ids=["none", "first", "second", "two of three"],
)
@pytest.mark.parametrize("beside", [None, "first", "last", "inside"])
def test_a_refusal_of_one_rank_reaches_the_scheduler(refused, heard, beside):
    def within(connector):
        match beside:
            case None:
                return connector
            case "first":
                return multi(connector, silent())
            case "last":
                return multi(silent(), connector)
            case _:
                return multi(silent(), multi(connector))

    side, told = scheduler()
    ranks = [within(rank(*names)) for names in refused]
    within(side).update_connector_output(carried(*ranks))
    assert told == heard
    within(side).update_connector_output(carried(*ranks))
    assert told == heard, "once"
