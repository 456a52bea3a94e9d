"""transformers loads a trained model that we quantized, and the model still knows what it knew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from models.measuring import run
from models.store import Models

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
pytestmark = [pytest.mark.network, pytest.mark.slow, needs("accelerate", "compressed_tensors", "torch", "transformers")]

# "The largest planet in our solar system is" and "The capital of France is": the answers are " Jupiter" and " Paris".
PLANET = ([504, 3995, 3925, 281, 653, 3693, 817, 314], 14713)
CAPITAL = ([504, 3575, 282, 4649, 314], 7042)


def test_a_language_model(tmp_path: Path, models: Models) -> None:
    run("quantize", models.smollm2("bf16"), "--format", "mxfp8", "-o", tmp_path / "q", "-q")
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "q", dtype="auto", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    assert not told["mismatched_keys"]
    for prompt, answer in (PLANET, CAPITAL):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits
        assert logits.shape == (1, len(prompt), 49152)
        assert torch.isfinite(logits).all()
        assert logits[0, -1].argmax() == answer
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_it_says_the_same_quantized_and_scaled_back(tmp_path: Path, models: Models) -> None:
    run("quantize", models.smollm2("bf16"), "--format", "nvfp4", "-o", tmp_path / "q", "-q")
    run("dequantize", tmp_path / "q", "-o", tmp_path / "d", "-q")
    said = []
    for folder in (tmp_path / "q", tmp_path / "d"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
        prompt = torch.tensor([CAPITAL[0]])
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False)
        said.append(tokens[0, len(CAPITAL[0]) :].tolist())
    assert said[0] == said[1]
    assert len(set(said[0])) > 4
