"""llm-compressor's files of whole models, by model_free_ptq and by oneshot, are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("llmcompressor", "compressed_tensors", "torch", "transformers")]
transformers: Any = Lazy("transformers")
llmcompressor: Any = Lazy("llmcompressor")
modifiers: Any = Lazy("llmcompressor.modifiers.quantization")
KEPT = ["re:.*lm_head", "re:.*embed_tokens"]


def model_free(source: Path, output: Path, scheme: str) -> Path:
    """What model_free_ptq writes of a checkpoint."""
    llmcompressor.model_free_ptq(
        str(source), str(output), scheme=scheme, ignore=KEPT, max_workers=1, device="cpu"
    )
    return output


def oneshot(source: Path, output: Path, scheme: str) -> Path:
    """What oneshot makes of a loaded model, without data."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    recipe = modifiers.QuantizationModifier(targets=["Linear"], scheme=scheme, ignore=["lm_head"])
    llmcompressor.oneshot(model=model, recipe=recipe)
    model.save_pretrained(output, save_compressed=True)
    return output
