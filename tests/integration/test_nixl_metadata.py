"""The inspection of NIXL's metadata beside the installed NIXL."""

from pathlib import Path

import numpy as np
import pytest

from kvflow.layout.component import Region
from kvflow.reads.backend import BackendError, Envelope, decode_envelope, encode_envelope
from kvflow.reads.contract import PeerAddress
from kvflow.reads.nixl.backend import NixlBackend
from kvflow.reads.nixl.metadata import inspect

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


@pytest.fixture
def exporter():
    memory = [np.zeros(4096 * size, np.uint8) for size in (1, 2, 3)]
    *regions, epochs = (Region(each.ctypes.data, each.nbytes) for each in memory)
    backend = NixlBackend("an engine", regions, epochs)
    yield backend, epochs
    backend.close()


@pytest.mark.nixl
def test_the_installed_nixl_publishes_what_is_understood(exporter):
    backend, _ = exporter
    envelope = decode_envelope(backend.metadata, transport="nixl", agent="an engine/exporter")
    found = inspect(envelope.blob, envelope.agent)
    assert all(each.transport for each in found.interfaces), "a transport of this UCX has a name that we do not know"
    assert backend._ours is not None
    assert "tcp" not in {each.transport for each in found.interfaces}
    assert "cma" in {each.transport for each in found.interfaces}


@pytest.mark.nixl
def test_the_reader_refuses_metadata_that_crashes_it_or_has_another_name(exporter):
    backend, epochs = exporter
    for line in (CORPUS / "metadata.txt").read_text().split():
        blob = bytes.fromhex(line)
        encoded = encode_envelope(Envelope("nixl", blob[24:36].decode(), blob, backend._settings))
        with pytest.raises(BackendError, match="metadata_invalid"):
            backend.add(PeerAddress("p", {"nixl": encoded}, epochs))
    with pytest.raises(BackendError, match="not of 'another engine/exporter'"):
        backend.add(PeerAddress("p", {"nixl": backend.metadata}, epochs, agent="another engine"))
