"""What Python executes on all threads: calls, functions, modules, bytecodes, and records that are made."""

import ast
import dis
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec

OURS = str(Path(__file__).parent)
"""Functions of the benchmarks do not count."""

Place = tuple[int | None, ...]
"""First and last line, first and last column."""


@dataclass
class Calls:
    """What was executed. A coroutine that is resumed counts as a call.

    Attributes:
        calls: of Python functions.
        functions: module and name of each function -> instructions of the interpreter.
        records: Structs, dataclasses and named tuples that a call of their class, or ``replace``, has made, by class.
    """

    calls: int = 0
    functions: Counter[tuple[str, str]] = field(default_factory=Counter)
    records: Counter[str] = field(default_factory=Counter)

    @staticmethod
    def watch_threads() -> None:
        """Make ``count_calls`` count also on threads that start from now on, except the function that they wait in."""
        threading.settrace(_enter)

    @property
    def bytecodes(self) -> int:
        """Instructions of all functions."""
        return self.functions.total()

    @property
    def modules(self) -> int:
        """How many modules the functions are of."""
        return len({path for path, _ in self.functions})


_counting: list[Calls] = []


@contextmanager
def count_calls() -> Iterator[Calls]:
    """Count what this thread executes in the block, and what watched threads execute meanwhile."""
    calls = Calls()
    _counting.append(calls)
    sys.settrace(_enter)
    try:
        yield calls
    finally:
        sys.settrace(None)
        _counting.clear()


def _enter(frame: FrameType, event: str, arg: Any) -> Any:
    del event, arg
    if not _counting or frame.f_code.co_filename.startswith(OURS):
        return None  # tracing would slow a thread down, and what it posts is measured
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    for calls in _counting:
        calls.calls += 1
    return _step


def _step(frame: FrameType, event: str, arg: Any) -> Any:
    del arg
    if event == "opcode":
        for calls in _counting:
            code = frame.f_code
            calls.functions[code.co_filename, code.co_qualname] += 1
            if (called := _called(code).get(frame.f_lasti)) and (name := _record(called, frame)):
                calls.records[name] += 1
    return _step


def _record(called: CodeType, frame: FrameType) -> str:
    """Return the name of the class of which a call makes a record; nothing for any other call."""
    with suppress(Exception):  # a name that is not there yet
        value = eval(called, frame.f_globals, frame.f_locals)
        if value is msgspec.structs.replace:
            return "replace"
        named_tuple = isinstance(value, type) and issubclass(value, tuple) and hasattr(value, "_fields")
        if isinstance(value, type) and (named_tuple or issubclass(value, msgspec.Struct) or is_dataclass(value)):
            return value.__name__
    return ""


@cache
def _called(code: CodeType) -> dict[int, CodeType]:
    """Return what each instruction that calls something calls: an expression without a side effect."""
    expressions = _expressions(code.co_filename)
    found = {}
    for instruction in dis.get_instructions(code):
        at = instruction.positions
        if instruction.opname.startswith("CALL") and at is not None:
            place = (at.lineno, at.end_lineno, at.col_offset, at.end_col_offset)
            if place in expressions:
                found[instruction.offset] = expressions[place]
    return found


@cache
def _expressions(filename: str) -> dict[Place, CodeType]:
    try:
        tree = ast.parse(Path(filename).read_text())
    except (OSError, SyntaxError):  # no source: frozen modules
        return {}
    return {
        (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset): compile(
            ast.Expression(node.func), filename, "eval"
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and _is_name(node.func)
    }


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))
