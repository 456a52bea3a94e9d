"""transformers loads what mxcli writes, architecture by architecture: nothing missing, the weights that mxcli scales
back, and outputs within the error of the format; and verify says the same of each."""

from __future__ import annotations

import json
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


def identified(row: Architecture, *more: object) -> Any:
    """A parameter with a readable name."""
    return pytest.param(row, *more, id="-".join([str(row), *map(str, more)]))


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The source of an architecture; removed after its last format."""
    folder = tmp_path_factory.mktemp("model")
    yield sweep.source(request.param, folder)
    shutil.rmtree(folder)


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", list(map(identified, ARCHITECTURES)), indirect=True, scope="module")
def test_transformers_loads(model: Any, format: str, tmp_path: Path) -> None:
    row: Architecture = model.row
    outcome = sweep.judge(model, format, tmp_path, "--for", "transformers")
    if format in row.refused:
        assert outcome.quantized.code == 4
        assert row.refused[format] in outcome.quantized.err
        assert not (tmp_path / "q").exists()
    else:
        assert_loaded(outcome)


def assert_loaded(outcome: Any) -> None:
    """Transformers loads an output, and verify says so."""
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert not outcome.faults
    assert outcome.weights
    assert all(verdict in LOADS for verdict in outcome.verdicts), outcome.verdicts
    assert outcome.exit_for_engine == 0


def assert_condemned(outcome: Any, verdict: str | None = None) -> None:
    """Transformers does not load an output, and verify says so, with the rule's sentence."""
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert outcome.faults
    assert set(outcome.verdicts) <= ({"refuses", "loads wrongly"} if verdict is None else {verdict}), outcome.verdicts
    assert outcome.exit_for_engine == 5
    assert any("transformers 5.24.0 " in sentence for sentence in outcome.sentences), outcome.sentences


REFUSED = [identified(row, format) for row in ARCHITECTURES for format in row.refused]


@pytest.mark.parametrize(("model", "format"), REFUSED, indirect=["model"], scope="module")
def test_verify_condemns_what_is_refused(model: Any, format: str, tmp_path: Path) -> None:
    """The same in the default layout, which is written without naming an engine."""
    outcome = sweep.judge(model, format, tmp_path)
    if outcome.quantized.code == 4:
        assert "nothing to quantize" in outcome.quantized.err
        return
    assert_condemned(outcome)


DENSE = [identified(row, format) for row in ARCHITECTURES for format in row.dense]


@pytest.mark.parametrize(("model", "format"), DENSE, indirect=["model"], scope="module")
def test_some_models_load_from_compressed_tensors_when_dequantized(model: Any, format: str, tmp_path: Path) -> None:
    outcome = sweep.judge(model, format, tmp_path, "--layout", "compressed-tensors", dense=True)
    assert outcome.quantized.code == 0, outcome.quantized.err
    assert not outcome.faults
    assert set(outcome.verdicts) == {"refuses"}
    assert outcome.exit_for_engine == 5
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
    assert_loaded(sweep.judge(model, format, tmp_path, "--layout", layout, "--for", "transformers"))


EXPERTS_ONE_BY_ONE = [row for row in ARCHITECTURES if row.kind == EXPERTS]


@pytest.mark.parametrize("model", EXPERTS_ONE_BY_ONE, ids=str, indirect=True, scope="module")
def test_transformers_loads_experts_in_mxfp4(model: Any, tmp_path: Path) -> None:
    outcome = sweep.judge(model, "mxfp4", tmp_path, "--for", "transformers")
    assert_loaded(outcome)
    assert any(".experts." in name for name in outcome.weights)


@pytest.mark.parametrize(("format", "verdict"), [("mxfp8", "refuses"), ("nvfp4", "loads wrongly")])
@pytest.mark.parametrize("model", EXPERTS_ONE_BY_ONE[:3], ids=str, indirect=True, scope="module")
def test_verify_says_what_transformers_does_not_load(model: Any, format: str, verdict: str, tmp_path: Path) -> None:
    """The default layout is for other engines too, so that experts are written as they read them."""
    outcome = sweep.judge(model, format, tmp_path)
    assert_condemned(outcome, verdict)
    assert any(".experts." in name for name in outcome.weights)


VARIOUS = {
    "GraniteSpeechForConditionalGeneration": r"qformer.*layer\.0\.crossattention.*LayerNorm\.weight",
    "Idefics2ForConditionalGeneration": r"perceiver_resampler\.layers\.1\.input_latents_norm\.weight",
    "SegformerForSemanticSegmentation": r"encoder\.block\.2\..*self\.layer_norm\.weight",
    "LongcatFlashForCausalLM": r"layers\.1\.mlp\.router",
    "FSMTForConditionalGeneration": r"decoder\.layers\.1\.final_layer_norm\.weight",
    "MoshiForCausalLM": r"layers\.1\.input_layernorm\.weight",
    "ViTForImageClassification": r"layer\.1\.layernorm_before\.weight",
}
"""Models whose layers are of several kinds, or have other names in memory, with a tensor that each must have."""


@pytest.mark.parametrize(
    ("model", "lost"),
    [pytest.param(row, VARIOUS[row.name], id=row.name) for row in ARCHITECTURES if row.name in VARIOUS],
    indirect=["model"],
)
def test_verify_finds_what_a_model_of_various_layers_lost(model: Any, lost: str, tmp_path: Path) -> None:
    assert sweep.mxcli("quantize", model.folder, "--format", "mxfp8", "-o", tmp_path / "q", "--threads", 1).code == 0
    (tmp_path / "q" / "mxcli.json").unlink()
    assert sweep.mxcli("verify", tmp_path / "q", "--deep").code == 0
    name = sweep.without_tensor(tmp_path / "q" / "model.safetensors", lost)
    said = sweep.mxcli("verify", tmp_path / "q", "--deep", "--json")
    assert said.code == 5
    assert name in {each["where"] for each in json.loads(said.out)["findings"] if each["severity"] == "problem"}


APART = [identified(row) for row in ARCHITECTURES if row.name == "Llama4ForCausalLM"]


@pytest.mark.parametrize("format", ["mxfp8", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("model", APART, indirect=True, scope="module")
def test_experts_that_are_loaded_one_by_one(model: Any, format: str, tmp_path: Path) -> None:
    assert_loaded(sweep.judge(model, format, tmp_path, "--layout", "compressed-tensors"))


@pytest.mark.parametrize("model", APART, indirect=True, scope="module")
def test_stacks_that_are_looked_for_as_experts(model: Any, tmp_path: Path) -> None:
    plain = ("--layout", "compressed-tensors", "--exclude", "*.experts.*")
    assert_condemned(sweep.judge(model, "mxfp8", tmp_path, *plain), "loads wrongly")
