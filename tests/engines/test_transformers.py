"""transformers loads what mxcli writes, architecture by architecture: nothing missing, the weights that mxcli scales
back, and outputs within the error of the format; and verify says the same of each."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.architectures import ARCHITECTURES, BOTH, ENCODER_DECODER, EXPERTS, MASKED, TEXT, Architecture

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


WIDE = {"hidden_size": 128, "intermediate_size": 256}
"""Whole blocks of 128 rows and columns."""
SOME = (
    Architecture(TEXT, "LlamaForCausalLM", WIDE),
    Architecture(TEXT, "Qwen3ForCausalLM", {"tie_word_embeddings": True, **WIDE}),
    Architecture(TEXT, "GPTNeoXForCausalLM", WIDE),
    Architecture(EXPERTS, "Qwen3MoeForCausalLM", {**WIDE, "moe_intermediate_size": 128}),
    Architecture(EXPERTS, "MixtralForCausalLM", WIDE),
    Architecture(ENCODER_DECODER, "T5ForConditionalGeneration", {"d_model": 128, "d_ff": 256}, BOTH, draws=False),
    Architecture(MASKED, "BertForMaskedLM", WIDE),
)


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        ("fp8", "fp8_e4m3_128x128"),
        ("fp8", "mxfp8"),
        ("torchao", "mxfp8"),
        ("torchao", "nvfp4"),
        ("torchao", "fp8_e4m3_channel"),
    ],
)
@pytest.mark.parametrize("model", SOME, ids=str, indirect=True, scope="module")
def test_transformers_loads_other_layouts(model: Any, layout: str, format: str, tmp_path: Path) -> None:
    outcome = sweep.judge(model, format, tmp_path, "--layout", layout, "--for", "transformers")
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert not outcome.faults
    assert all(verdict in LOADS for verdict in outcome.verdicts), outcome.verdicts


SEPARATE = [row for row in ARCHITECTURES if row.kind == EXPERTS and list(row.refused) == ["nvfp4"]]
"""Models whose experts are stored one by one and stacked by transformers."""


@pytest.mark.parametrize("model", SEPARATE, ids=str, indirect=True, scope="module")
def test_transformers_loads_experts_in_mxfp4(model: Any, tmp_path: Path) -> None:
    outcome = sweep.judge(model, "mxfp4", tmp_path, "--for", "transformers")
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert any(".experts." in name for name in outcome.weights)
    assert not outcome.faults
    assert all(verdict in LOADS for verdict in outcome.verdicts), outcome.verdicts
