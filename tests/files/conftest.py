"""Writes whole model directories for the tests of reading."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from raw_checkpoint import safetensors_bytes


@pytest.fixture
def model(tmp_path: Path) -> Callable[..., Path]:
    """Writes a directory from file name to bytes, text, JSON-able object or mapping of entries."""

    def write(files: Mapping[str, Any], root: str = "model") -> Path:
        folder = tmp_path / root
        for name, content in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif isinstance(content, str):
                path.write_text(content, encoding="utf-8")
            elif name.endswith(".safetensors"):
                path.write_bytes(safetensors_bytes(content, {"format": "pt"}))
            else:
                path.write_text(json.dumps(content), encoding="utf-8")
        return folder

    return write
