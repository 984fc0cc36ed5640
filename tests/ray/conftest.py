"""These tests need Ray, vLLM and minutes: ``make test-ray`` runs them, ``make test`` leaves them out."""

import os

if "KVFLOW_TEST_RAY" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
