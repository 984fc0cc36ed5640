"""A unit test waits for events, and sleeps only for a moment between two looks."""

import ast

from tests.helpers.loops import looped

MOMENT_S = 0.01


def sleeps(source):
    """Yield line and argument of every sleep that is longer than a moment, or whose length the module does not say."""
    tree = ast.parse(source)
    known = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as value)):
                known[name] = value
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "sleep" or not call.args:
            continue
        parts = list(ast.walk(call.args[0]))
        lengths = [part.value for part in parts if isinstance(part, ast.Constant)]
        lengths += [known.get(part.id, 0) for part in parts if isinstance(part, ast.Name)]
        if not lengths or max(lengths) > MOMENT_S or (max(lengths) == 0 and not isinstance(parts[0], ast.Constant)):
            yield call.lineno, ast.unparse(call.args[0])


@looped(
    "source, found",
    [
        ("time.sleep(0.2)", [(1, "0.2")]),
        ("await asyncio.sleep(2 * SWEEP_S)", [(1, "2 * SWEEP_S")]),
        ("await asyncio.sleep(SWEEP_S)", [(1, "SWEEP_S")]),
        ("D = 0.1\ntime.sleep(D)", [(2, "D")]),
        ("D = 0.01\ntime.sleep(D)", []),
        ("await asyncio.sleep(draw.choice((0, 0.002)))", []),
        ("await asyncio.sleep(0)", []),
    ],
)
def test_long_sleeps_are_found(source, found):
    assert list(sleeps(source)) == found


def test_unit_tests_wait_no_real_seconds(repository):
    found = {
        f"{path.relative_to(repository)}:{line}": length
        for path in sorted((repository / "tests" / "unit").rglob("*.py"))
        if "sleep" in (source := path.read_text())
        for line, length in sleeps(source)
    }
    assert found == {}, "wait for an event, or give the clock as an argument"
