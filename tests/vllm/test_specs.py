"""vLLM says of a few models what ``tests/data/vllm_specs.json`` says it does; it is asked in a process of its own."""

import json
import os
import subprocess

from .engines import PYTHON, ROOT

TABLE = ROOT / "tests" / "data" / "vllm_specs.json"
SAMPLE = (
    "meta-llama/Meta-Llama-3.1-8B", "openai/gpt-oss-20b", "deepseek-ai/DeepSeek-V3.2", "XiaomiMiMo/MiMo-V2-Flash",
    "zai-org/GLM-5.2", "nvidia/Nemotron-H-56B-Base-8K", "cohere2", "falcon",
)  # fmt: skip
"""Of kinds that differ; each takes vLLM some seconds to look at, the first time."""
PATIENCE_S = 480


def rows_of(path):
    return {row["model"]: row for row in json.loads(path.read_text())["models"] if row["model"] in SAMPLE}


def test_the_recorded_answers_are_vllms(tmp_path):
    answers = tmp_path / "answers.json"
    command = [PYTHON, "tests/vllm/specs_oracle.py", str(TABLE), "--output", str(answers), "--only", *SAMPLE]
    ran = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert rows_of(answers) == rows_of(TABLE)
    assert set(rows_of(TABLE)) == set(SAMPLE)
