"""Replayed routers whose engines are started in another way: under another connector's name, or with two connectors."""

import json
import re
import shlex

import pytest

from .clients import TWO_SAMPLES, Moved
from .pairs import model_folder
from .prompts import prompt_of
from .replaying import facts
from .servers import Deployment
from .test_replayed import agree, behind, chat, completion

ENGINES = {name: known["engines"] for name, known in facts().items() if "engines" in known}


class Otherwise(Deployment):
    """The servers of the how-to, with a ``--kv-transfer-config`` that is made of the page's."""

    def fitted(self, text, *further):
        fitted = super().fitted(text, *further)
        return re.sub(r"(?<=--kv-transfer-config )'([^']*)'", lambda found: self._rewrite(found[1]), fitted)

    def _rewrite(self, config):
        return shlex.quote(json.dumps(self.configured(json.loads(config))))


class Named(Otherwise):
    """The connector has the name and the module that Dynamo wants."""

    def configured(self, config):
        return config | ENGINES["dynamo"]


class Several(Otherwise):
    """The connector is a child of ``MultiConnector``, as in a sample of KServe; the other keeps blocks on a disk."""

    def configured(self, config):
        wrapper, beside = ENGINES["kserve"]["wrapper"], ENGINES["kserve"]["beside"]
        disk = {"kv_connector_extra_config": {"shared_storage_path": f"{self.folder}/{config['kv_role']}"}}
        return wrapper | {"kv_connector_extra_config": {"connectors": [config, beside | disk]}}


@pytest.fixture(scope="module")
def deployment(request, pairs, tmp_path_factory):
    pairs.stop()
    with request.param(model_folder("llama"), tmp_path_factory.mktemp(request.param.__name__)) as deployment:
        yield deployment


@pytest.mark.parametrize("deployment", [Named], indirect=True)
def test_under_the_name_of_another_connector_the_same_moves(settled):
    assert "kv_connector='NixlConnector'" in settled.decode.log.read_text()
    with Moved(settled) as moved:
        for length, further in ((40, {}), (333, {"stream": True}), (200, TWO_SAMPLES)):
            agree(settled, behind(settled, "dynamo"), *completion(settled, prompt_of(length, "named"), **further))
            moved.prompts.append(length)


@pytest.mark.parametrize("deployment", [Several], indirect=True)
def test_beside_another_connector_the_same_moves(settled):
    assert "kv_connector='MultiConnector'" in settled.decode.log.read_text()
    with Moved(settled) as moved:
        for length, further in ((40, {}), (333, {"stream": True})):
            agree(settled, behind(settled, "llm-d"), *completion(settled, prompt_of(length, "beside"), **further))
            moved.prompts.append(length)
        for stream in (False, True):
            asked = chat(settled, f"Who is beside you? {stream}", stream=stream)
            moved.prompts.append(agree(settled, behind(settled, "llm-d"), *asked).prompt_tokens())
