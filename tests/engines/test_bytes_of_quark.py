"""AMD Quark's exported checkpoints of whole models are ours, byte for byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from originals import differing, llama, ours, theirs

pytestmark = [pytest.mark.slow, needs("quark", "torch", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
quark: Any = Lazy("quark.torch")


def produced(source: Path, output: Path, scheme: str) -> Path:
    """What Quark exports of a model that it quantized with one of its schemes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto").eval()
    template = quark.LLMTemplate(
        model_type="llama", kv_layers_name=None, q_layer_name=None, exclude_layers_name=["lm_head"]
    )
    data = torch.utils.data.DataLoader([torch.arange(3, 19)], batch_size=1)
    quantizer = quark.ModelQuantizer(template.get_config(scheme=scheme))
    model = quantizer.freeze(quantizer.quantize_model(model, data))
    with torch.no_grad():
        quark.export_safetensors(model, str(output))
    return output
