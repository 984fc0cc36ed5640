"""Each test on a GPU has stand-ins on a CPU, by one table."""

import ast

import pytest

from .proven import PARTS


def functions(repository, path):
    """The functions of a file of ``tests``, with their decorators."""
    tree = ast.parse((repository / "tests" / path).read_text())
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def needs_a_gpu(node):
    """Whether a test runs on a GPU, or nowhere else."""
    names = {each.arg for each in node.args.args} & {"device", "devices"}
    return bool(names) or any("is_available" in ast.unparse(each) for each in node.decorator_list)


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_part_names_tests_that_are_there(repository, part):
    assert part.on_gpu
    for test in (*part.on_gpu, *part.stand_ins):
        path, name = test.split("::")
        assert name in functions(repository, path), test


def test_every_test_on_a_gpu_has_a_stand_in(repository):
    named = {test for part in PARTS for test in part.on_gpu if part.stand_ins}
    path = "gpu/test_pulls.py"
    found = {name for name, node in functions(repository, path).items() if needs_a_gpu(node)}
    assert {f"{path}::{name}" for name in found if name.startswith("test_")} <= named
