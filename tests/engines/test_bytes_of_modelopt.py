"""ModelOpt's exported checkpoints of whole models are ours, byte for byte."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("modelopt", "torch", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
quantization: Any = Lazy("modelopt.torch.quantization")
exporting: Any = Lazy("modelopt.torch.export")


def produced(source: Path, output: Path, config: str) -> Path:
    """What ModelOpt exports of a model that it quantized with one of its configurations."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")

    def calibrate(model: Any) -> None:
        model(input_ids=torch.arange(3, 19)[None])

    model = quantization.quantize(model, copy.deepcopy(getattr(quantization, f"{config}_CFG")), calibrate)
    with torch.no_grad():
        exporting.export_hf_checkpoint(model, dtype=model.dtype, export_dir=str(output))
    return output
