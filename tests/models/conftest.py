"""Trained models for a session."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from models.store import Models


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    """Gigabytes, so gone after the session."""
    folder = tmp_path_factory.mktemp("models")
    yield Models(folder)
    shutil.rmtree(folder)
