"""Packages that take seconds to import, imported when a test first uses them: collecting tests stays fast."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest


class Lazy:
    """A module that is imported when an attribute of it is first used; the test is skipped if it is not installed."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(pytest.importorskip(self._name), attribute)


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a marker that skips tests if one of the packages is not installed, without importing any."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")
