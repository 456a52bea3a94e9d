"""Selection of the cases that run by default; the others are marked slow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def slow_except(chosen: Sequence[Any], every: Sequence[Any]) -> list[Any]:
    """Return all cases for `parametrize`, those that are not chosen marked slow."""
    unknown = [case for case in chosen if case not in every]
    assert not unknown, f"not among the cases: {unknown}"
    return [case if case in chosen else _slow(case) for case in every]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
