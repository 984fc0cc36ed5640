"""One test for many cases of one kind: they are a loop in it, and a report counts them once."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

Test = Callable[..., None]
NAMED = type(pytest.param())


def looped(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with each case in turn; the first that fails is named. For tests that leave nothing behind.

    Args:
        names: of its arguments, with commas between them, as of ``pytest.mark.parametrize``.
        cases: at least one; each is a value, or as many as there are names, or either in ``pytest.param``.
    """
    known, cases = [name.strip() for name in names.split(",")], list(cases)

    def loop(test: Test) -> Test:
        assert not inspect.iscoroutinefunction(test)

        @functools.wraps(test)
        def all_cases(**given: Any) -> None:
            assert cases, f"no case of {names}"
            for case in cases:
                several = case.values if isinstance(case, NAMED) else case if len(known) > 1 else (case,)
                values = dict(zip(known, several, strict=True))
                try:
                    test(**given, **values)
                except BaseException as error:
                    error.add_note(", ".join(f"{name} = {value!r}" for name, value in values.items()))
                    raise

        left = [kept for name, kept in inspect.signature(test).parameters.items() if name not in known]
        all_cases.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        return all_cases

    return loop
