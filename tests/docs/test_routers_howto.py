"""The commands of docs/howto/routers.md are understood; with vLLM, tests/vllm/test_routers.py runs them."""

import json
import re
import shlex
from pathlib import Path

from kvflow.tools.cli.entry import build_parser

from .test_examples import blocks

ROOT = Path(__file__).parents[2]
PAGE = "docs/howto/routers.md"
REQUIRED = ROOT / "tests" / "vllm" / "requirements-routers.txt"


def commands(program):
    return [shlex.split(block) for block in blocks(PAGE, "sh") if block.startswith(f"{program} ")]


def test_the_page_and_the_reference_name_the_releases_that_tests_run():
    required = re.findall(r"^[a-z-]+==[0-9.]+$", REQUIRED.read_text(), re.MULTILINE)
    assert [words[-1] for words in commands("pip install")] == required
    for name, release in (each.split("==") for each in required):
        told = json.loads((ROOT / "tests" / "data" / "routers" / f"{name}.json").read_text())
        assert (told["router"], told["version"]) == (name, release)


def test_the_proxy_understands_its_arguments():
    [words] = commands("kvflow proxy")
    build_parser().parse_args(words[1:])
