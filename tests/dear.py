"""Cases of parametrized tests that take long: a few of each kind by default, the others with `-m slow`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases with all but `kept`, which must be among them, marked as slow."""
    listed = list(cases)
    missing = [case for case in kept if case not in listed]
    if missing:
        raise ValueError(f"{missing} are not among the cases")
    return [case if case in kept else _slow(case) for case in listed]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
