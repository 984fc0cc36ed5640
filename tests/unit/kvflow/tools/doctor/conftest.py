"""What the tests of the doctor share."""

import pytest


@pytest.fixture(autouse=True)
def _member(cluster_member):
    """Examine as a member of the cluster does."""
