"""llm-compressor's files of whole models, by model_free_ptq and by oneshot, are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from engines.originals import EDGES, differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("llmcompressor", "compressed_tensors", "torch", "transformers")]
transformers: Any = Lazy("transformers")
llmcompressor: Any = Lazy("llmcompressor")
modifiers: Any = Lazy("llmcompressor.modifiers.quantization")
KEPT = ["re:.*lm_head", "re:.*embed_tokens"]


def model_free(source: Path, output: Path, scheme: str) -> Path:
    """What model_free_ptq writes of a checkpoint."""
    llmcompressor.model_free_ptq(str(source), str(output), scheme=scheme, ignore=KEPT, max_workers=1, device="cpu")
    return output


def oneshot(source: Path, output: Path, scheme: str) -> Path:
    """What oneshot makes of a loaded model, without data."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    recipe = modifiers.QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])
    llmcompressor.oneshot(model=model, recipe=recipe)
    model.save_pretrained(output, save_compressed=True)
    return output


SCHEMES = {
    "NVFP4A16": "nvfp4", "MXFP4A16": "mxfp4", "MXFP4": "mxfp4", "MXFP6A16": "mxfp6_e2m3", "MXFP8A16": "mxfp8",
    "MXFP8": "mxfp8", "FP8_DYNAMIC": "fp8_e4m3_channel", "FP8_BLOCK": "fp8_e4m3_128x128",
}  # fmt: skip
DIALECTS = {"BF16": "compressed-tensors-bf16", "F32": "compressed-tensors"}


@pytest.mark.parametrize("dtype", DIALECTS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("way", "without"), [(model_free, ()), (oneshot, ("negative zeros",))])
def test_every_byte(tmp_path: Path, way: Any, without: tuple[str, ...], scheme: str, dtype: str) -> None:
    assert EDGES.keys() >= set(without)
    source = llama(tmp_path / "m", dtype, without=without)
    expected = theirs(way(source, tmp_path / "theirs", scheme))
    found = ours(source, tmp_path / "ours", SCHEMES[scheme], "compressed-tensors", DIALECTS[dtype])
    assert differing(expected, found) == {}


@pytest.mark.parametrize("scheme", ["MXFP8", "FP8_BLOCK"])
def test_oneshot_clears_the_sign_of_zeros(tmp_path: Path, scheme: str) -> None:
    source = llama(tmp_path / "m", without=("tiny",))
    expected = theirs(oneshot(source, tmp_path / "theirs", scheme))
    found = ours(source, tmp_path / "ours", SCHEMES[scheme], "compressed-tensors", DIALECTS["BF16"])
    names = differing(expected, found)
    assert len(names) == 7
    for name in names:
        pairs = zip(expected[name][2], found[name][2], strict=True)
        assert {pair for pair in pairs if pair[0] != pair[1]} == {(0x00, 0x80)}
