"""transformers loads models whose head is tied, renamed or in a tower's shade, with the values that we scale back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
pytestmark = needs("accelerate", "compressed_tensors", "torch", "transformers")

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "word_embed_proj_dim": 64, "ffn_dim": 128,
    "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "pad_token_id": 0, "num_experts": 4,
    "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
CAUSAL, MASKED, PAIRED = "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM"
SLOW = pytest.mark.slow
MODELS = [
    ("gpt_neox", CAUSAL, "mxfp8"),
    ("modernbert", MASKED, "mxfp8"),
    pytest.param("llama", CAUSAL, "nvfp4", marks=SLOW),
    pytest.param("opt", CAUSAL, "mxfp8", marks=SLOW),
    pytest.param("phi", CAUSAL, "mxfp8", marks=SLOW),
    pytest.param("gemma3_text", CAUSAL, "mxfp8", marks=SLOW),
    pytest.param("bert", MASKED, "mxfp8", marks=SLOW),
    pytest.param("t5", PAIRED, "mxfp8", marks=SLOW),
    pytest.param("qwen3_moe", CAUSAL, "mxfp4", marks=SLOW),
    pytest.param("mixtral", CAUSAL, "mxfp4", marks=SLOW),
]


def saved(folder: Path, model_type: str, kind: str) -> Any:
    """A tiny random model, saved, and as it is."""
    usual = transformers.AutoConfig.for_model(model_type)
    sizes = {key: size for key, size in SIZES.items() if hasattr(usual, key)}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    model = getattr(transformers, kind).from_config(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    return model


def logits(model: Any, kind: str) -> Any:
    words = torch.arange(1, 17).reshape(1, 16)
    more = {"decoder_input_ids": words} if kind == PAIRED else {}
    with torch.no_grad():
        return model(input_ids=words, **more).logits.float()


@pytest.mark.parametrize(("model_type", "kind", "format"), MODELS)
def test_quantized_models_compute_what_their_values_do(tmp_path: Path, model_type: str, kind: str, format: str) -> None:
    original = logits(saved(tmp_path / "m", model_type, kind), kind)
    checkpoint = open_checkpoint(tmp_path / "m")
    plan = make_plan(checkpoint, Options(format, layout="compressed-tensors"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu())
    load = getattr(transformers, kind).from_pretrained
    model, info = load(tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True)
    assert (sorted(info["missing_keys"]), sorted(info["unexpected_keys"])) == ([], [])
    found = logits(model, kind)
    assert torch.isfinite(found).all()
    assert torch.equal(found, logits(load(tmp_path / "d", dtype=torch.bfloat16), kind))
    error = float((found - original).norm() / original.norm())
    assert error < (0.3 if format in ("mxfp4", "nvfp4") else 0.1)


def test_a_tower_that_stays_plain_is_not_targeted(tmp_path: Path) -> None:
    """Both parts have the same names, and transformers puts other ones before them."""
    text = {key: SIZES[key] for key in list(SIZES)[:8] if key not in ("vocab_size", "num_key_value_heads", "head_dim")}
    vision = {**text, "image_size": 32, "patch_size": 8}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **text, "vocab_size": 128},
        vision_config={"model_type": "clip_vision_model", **vision},
    )
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    plan = make_plan(checkpoint, Options("mxfp8", layout="compressed-tensors"))
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    settings = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert any(entry.startswith("vision_tower.") for entry in settings["ignore"])
    model, info = transformers.LlavaForConditionalGeneration.from_pretrained(
        tmp_path / "q", dtype=torch.bfloat16, output_loading_info=True
    )
    assert (sorted(info["missing_keys"]), sorted(info["unexpected_keys"])) == ([], [])
    schemed = {name for name, module in model.named_modules() if hasattr(module, "quantization_scheme")}
    assert not [name for name in schemed if "vision_tower" in name]
    assert "model.language_model.layers.1.self_attn.q_proj" in schemed
