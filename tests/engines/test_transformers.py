"""transformers loads what mxcli writes, architecture by architecture: nothing missing, the weights that mxcli scales
back, and outputs within the error of the format; and verify says the same of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.architectures import ARCHITECTURES, Architecture

sweep: Any = Lazy("engines.sweep")
pytestmark = [pytest.mark.slow, needs("accelerate", "compressed_tensors", "torch", "transformers")]

LOADS = ("loads", "loads at a loss")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The source of an architecture; removed after its last format."""
    folder = tmp_path_factory.mktemp("model")
    yield sweep.source(request.param, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", ARCHITECTURES, ids=str, indirect=True, scope="module")
def test_transformers_loads(model: Any, format: str, tmp_path: Path) -> None:
    row: Architecture = model.row
    outcome = sweep.judge(model, format, tmp_path, "--for", "transformers")
    if format in row.refused:
        assert outcome.quantized.code == 4
        assert row.refused[format] in outcome.quantized.err
        assert not (tmp_path / "q").exists()
        if not row.plain:
            return
        outcome = sweep.judge(model, format, tmp_path, "--for", "transformers", "--exclude", row.plain)
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert not outcome.faults
    assert outcome.weights
    assert all(verdict in LOADS for verdict in outcome.verdicts), outcome.verdicts
    if format in row.dense:
        assert sweep.load(row, tmp_path / "q").faults, "it loads without dequantize=True too: correct the row"
