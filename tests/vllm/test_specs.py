"""vLLM says of a few models what the tables of ``tests/data`` say it does; it is asked in a process of its own."""

import json

import pytest

from .engines import ROOT, run_with_vllm
from .pairs import FULL

DATA = ROOT / "tests" / "data"
SAMPLE = ["openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3.2", "nvidia/Nemotron-H-56B-Base-8K"]
"""Of kinds that differ; each takes vLLM some seconds to look at, the first time."""
if FULL:
    SAMPLE += ["meta-llama/Meta-Llama-3.1-8B", "XiaomiMiMo/MiMo-V2-Flash", "zai-org/GLM-5.2", "cohere2", "falcon"]


def rows_of(path):
    return {row["model"]: row for row in json.loads(path.read_text())["models"] if row["model"] in SAMPLE}


def test_the_recorded_answers_are_vllms(tmp_path):
    table, answers = DATA / "vllm_specs.json", tmp_path / "answers.json"
    run_with_vllm("tests/vllm/specs_oracle.py", str(table), "--output", str(answers), "--only", *SAMPLE)
    assert rows_of(answers) == rows_of(table)
    assert set(rows_of(table)) == set(SAMPLE)


@pytest.mark.skipif(not FULL, reason="the answers change with a release of vLLM alone")
def test_the_recorded_groups_are_vllms(tmp_path):
    table, answers = DATA / "vllm_groups.json", tmp_path / "answers.json"
    run_with_vllm("tests/vllm/groups_oracle.py", str(table), "--output", str(answers))
    assert json.loads(answers.read_text()) == json.loads(table.read_text())
