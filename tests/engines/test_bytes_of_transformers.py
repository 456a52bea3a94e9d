"""transformers' own FP8, quantized while a whole model is loaded: its files are ours, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("accelerate", "torch", "transformers")]
transformers: Any = Lazy("transformers")
finegrained: Any = Lazy("transformers.quantizers.quantizer_finegrained_fp8")


def produced(source: Path, output: Path, **settings: Any) -> Path:
    """What transformers saves of a model that it quantized; its check for a GPU is left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finegrained.FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *args, **more: None)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            source, dtype="auto", device_map="cpu", quantization_config=transformers.FineGrainedFP8Config(**settings)
        )
        model.save_pretrained(output)
    return output
