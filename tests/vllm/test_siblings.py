"""Other connectors that take vLLM's block pool, beside kvflow under vLLM's own ``MultiConnector``."""

import pytest

from kvflow.errors import ConfigInvalid
from kvflow.integrations.vllm import versions

from .pairs import model_folder

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's, when it is imported

DISK = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
HOST = {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"}
HOST |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20}}


def keeper(**extra):
    from . import second_runner

    own = {"cluster_secret": second_runner.SECRET, "transport": "loopback", "keep": True, **extra}
    return {
        "kv_connector": "KVFlowConnector",
        "kv_connector_module_path": "kvflow.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": own,
    }


def nested(*children):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": children},
    }


@pytest.fixture
def scheduler(monkeypatch, tmp_path):
    """Returns a call that makes vLLM's own scheduler with ``MultiConnector`` and these children."""
    from vllm.config import KVTransferConfig, set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
    from vllm.v1.structured_output import StructuredOutputManager

    from .second_runner import BLOCK_SIZE, SPEC

    made = []

    def make(*children):
        arguments = EngineArgs(
            model=str(model_folder("llama")),
            max_model_len=512,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            disable_hybrid_kv_cache_manager=True,
            kv_transfer_config=KVTransferConfig(kv_load_failure_policy="recompute", **nested(*children)),
        )
        config = arguments.create_engine_config()
        page = SPEC.page_size_bytes
        tensors = [KVCacheTensor(page * 64, ["layers.0"], layer_stride=page * 64, block_stride=page)]
        caches = KVCacheConfig(64, tensors, [KVCacheGroupSpec(["layers.0"], SPEC)], hash_block_size=BLOCK_SIZE)
        config.cache_config.num_gpu_blocks = 64
        with set_current_vllm_config(config):
            made.append(Scheduler(config, caches, StructuredOutputManager(config), BLOCK_SIZE))
        return made[-1]

    yield make
    for each in made:
        each.connector.shutdown()


@pytest.mark.parametrize(
    "children",
    [
        lambda: [keeper(), HOST],
        lambda: [HOST, keeper()],
        lambda: [nested(keeper(), DISK), HOST],
        lambda: [HOST, nested(DISK, keeper())],
        lambda: [DISK, keeper(), nested(HOST)],
    ],
    ids=["first", "last", "inside, first", "inside, last", "beside one inside"],
)
def test_keep_is_refused_beside_a_connector_that_takes_the_block_pool(scheduler, children):
    with pytest.raises(ConfigInvalid, match="keep is set beside SimpleCPUOffloadConnector, but") as refused:
        scheduler(*children())
    assert refused.value.remedy == (
        "Remove keep, or remove SimpleCPUOffloadConnector from connectors of MultiConnector."
    )


def test_two_that_keep_are_refused(scheduler):
    with pytest.raises(ConfigInvalid, match="keep is set beside KVFlowConnector, but"):
        scheduler(keeper(), keeper())


@pytest.mark.parametrize(
    "children",
    [
        lambda: [keeper(), DISK],
        lambda: [nested(DISK, keeper())],
        lambda: [keeper(keep=False), HOST],
    ],
    ids=["a disk", "inside", "not kept"],
)
def test_other_children_are_not_refused(scheduler, children):
    found = scheduler(*children())
    assert found.connector is not None


def test_a_reset_of_the_prefix_cache_reaches_a_child_of_a_child(scheduler, monkeypatch):
    from kvflow.integrations.vllm.connector import KVFlowConnector

    told = []
    monkeypatch.setattr(KVFlowConnector, "reset_before", lambda self, scheduler, *, forced: told.append(forced))
    found = scheduler(DISK, nested(DISK, keeper()))
    assert found.reset_prefix_cache()
    assert told == [False]


@pytest.mark.parametrize(
    ("name", "takes"),
    [
        ("SimpleCPUOffloadConnector", True),
        ("MooncakeStoreConnector", True),
        ("ExampleConnector", False),
        ("OffloadingConnector", False),
        ("NixlConnector", False),
        ("LMCacheConnectorV1", False),
    ],
)
def test_which_of_vllms_connectors_take_the_block_pool(name, takes):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        found = KVConnectorFactory.get_connector_class_by_name(name)
    except ImportError as error:
        pytest.skip(f"{name} needs {error.name}")
    assert versions._takes_pool(object.__new__(found)) is takes
