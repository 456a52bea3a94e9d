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
_REFUSED = "nvfp4 is refused for transformers, which the row does not state"
OPEN = {
    "FalconForCausalLM": _REFUSED,
    "MambaForCausalLM": _REFUSED,
    "RwkvForCausalLM": _REFUSED,
    "NomicBertModel": _REFUSED,
    "GraniteSpeechForConditionalGeneration": "verify expects in every layer what only every second has",
}
"""Architectures that are not right yet, with the reason."""


def marked(row: Architecture, *more: object) -> Any:
    """A parameter, expected to fail if its architecture is open."""
    marks = [pytest.mark.xfail(reason=OPEN[row.name])] if row.name in OPEN else []
    return pytest.param(row, *more, marks=marks, id="-".join([str(row), *map(str, more)]))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The source of an architecture; removed after its last format."""
    folder = tmp_path_factory.mktemp("model")
    yield sweep.source(request.param, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", list(map(marked, ARCHITECTURES)), indirect=True, scope="module")
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


DENSE = [marked(row, format) for row in ARCHITECTURES for format in row.dense]


@pytest.mark.parametrize(("model", "format"), DENSE, indirect=["model"], scope="module")
def test_some_models_load_from_compressed_tensors_when_dequantized(model: Any, format: str, tmp_path: Path) -> None:
    outcome = sweep.judge(model, format, tmp_path, "--layout", "compressed-tensors", dense=True)
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert not outcome.faults
    assert outcome.verdicts == ["refuses", "refuses"]
    assert sweep.load(model.row, tmp_path / "q").faults


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


EXPERTS_ONE_BY_ONE = [row for row in ARCHITECTURES if row.kind == EXPERTS]


@pytest.mark.parametrize("model", EXPERTS_ONE_BY_ONE, ids=str, indirect=True, scope="module")
def test_transformers_loads_experts_in_mxfp4(model: Any, tmp_path: Path) -> None:
    outcome = sweep.judge(model, "mxfp4", tmp_path, "--for", "transformers")
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert any(".experts." in name for name in outcome.weights)
    assert not outcome.faults
    assert all(verdict in LOADS for verdict in outcome.verdicts), outcome.verdicts


@pytest.mark.parametrize(("format", "verdict"), [("mxfp8", "refuses"), ("nvfp4", "loads wrongly")])
@pytest.mark.parametrize("model", EXPERTS_ONE_BY_ONE[:3], ids=str, indirect=True, scope="module")
def test_verify_says_what_transformers_does_not_load(model: Any, format: str, verdict: str, tmp_path: Path) -> None:
    """The default layout is for other engines too, so that experts are written as they read them."""
    outcome = sweep.judge(model, format, tmp_path)
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert any(".experts." in name for name in outcome.weights)
    assert outcome.faults
    assert outcome.verdicts == [verdict, verdict]
