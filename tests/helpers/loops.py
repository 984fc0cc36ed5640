"""One test for many cases of one kind: they are a loop in it, and a report counts them once."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Test = Callable[..., None]
NAMED = type(pytest.param())


@contextmanager
def named(title: Any, values: dict[str, Any]) -> Iterator[None]:
    """Add to whatever fails in the body which case it is; of one that does not fail, nobody asks what it looks like."""
    try:
        yield
    except BaseException as error:
        words = ", ".join(f"{name} = {value!r}" for name, value in values.items())
        error.add_note(f"{title}: {words}" if title else words)
        raise


def looped(names: str, cases: Iterable[Any], ids: Iterable[Any] = ()) -> Callable[[Test], Test]:
    """Call a test with each case in turn; the first that fails is named. For tests that leave nothing behind.

    Args:
        names: of its arguments, with commas between them, as of ``pytest.mark.parametrize``.
        cases: at least one; each is a value, or as many as there are names, or either in ``pytest.param``.
        ids: what the cases are called, in a word, if their arguments do not tell.
    """
    known, cases, ids = [name.strip() for name in names.split(",")], list(cases), list(ids)

    def each() -> Iterator[tuple[Any, dict[str, Any]]]:
        assert cases, f"no case of {names}"
        for case, called in zip(cases, ids or [None] * len(cases), strict=True):
            several = case.values if isinstance(case, NAMED) else case if len(known) > 1 else (case,)
            values = dict(zip(known, several, strict=True))
            yield case.id if isinstance(case, NAMED) else called, values

    def loop(test: Test) -> Test:
        assert not inspect.iscoroutinefunction(test)

        @functools.wraps(test)
        def all_cases(**given: Any) -> None:
            for title, values in each():
                with named(title, values):
                    test(**given, **values)

        left = [kept for name, kept in inspect.signature(test).parameters.items() if name not in known]
        all_cases.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return all_cases

    return loop
