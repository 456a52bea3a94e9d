"""transformers loads what we write, and holds the very weights that we scale back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from tiny_models import read_raw

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.recommend.candidates import BITS, Target
from mxcli.flows.recommend.recommend import plan_candidates, recommend
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.input_scales import with_input_scales
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
safetensors_torch: Any = Lazy("safetensors.torch")
pytestmark = needs("accelerate", "compressed_tensors", "torch", "transformers")

HIDDEN, WIDE = 128, 256
"""Multiples of 128, the group of activations in FP8 block checkpoints."""


def saved_llama(folder: Path, dtype: torch.dtype) -> Path:
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=WIDE,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HIDDEN // 2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_llama(tmp_path_factory.mktemp("llama"), torch.bfloat16)


def quantized(source: Path, output: Path, options: Options) -> None:
    checkpoint = open_checkpoint(source)
    quantize_checkpoint(checkpoint, make_plan(checkpoint, options), output, backend=Cpu())


def loaded_weights(folder: Path) -> dict[str, Any]:
    """The state of the model after one forward pass, with which compressed layers are decompressed."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert torch.isfinite(logits).all()
    state: dict[str, Any] = model.state_dict()
    return state


def assert_loads_as_we_decode(folder: Path, plain: Path) -> None:
    dequantize_checkpoint(open_checkpoint(folder), plain, backend=Cpu())
    state = loaded_weights(folder)
    for name, (dtype, shape, content) in read_raw(plain / "model.safetensors").items():
        tensor = state[name]
        assert list(tensor.shape) == shape
        kind, bits = (torch.bfloat16, torch.int16) if dtype == "BF16" else (torch.float32, torch.int32)
        assert tensor.to(kind).view(bits).numpy().tobytes() == content, name


@pytest.mark.parametrize("format", LAYOUTS["compressed-tensors"].formats)
def test_transformers_loads_every_format(tmp_path: Path, source: Path, format: str) -> None:
    quantized(source, tmp_path / "q", Options(format))
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


# Only these: compressed-tensors decodes FP4, FP6 and MX codes in bfloat16 whatever the model's dtype.
@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e4m3_channel", "fp8_e4m3_128x128"])
def test_transformers_loads_binary32_models(tmp_path: Path, format: str) -> None:
    quantized(saved_llama(tmp_path / "m", torch.float32), tmp_path / "q", Options(format))
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


def test_transformers_loads_mixed_formats(tmp_path: Path, source: Path) -> None:
    overrides = (Override("*.mlp.*", "mxfp8"), Override("*layers.1.mlp.down_proj", keep=True))
    quantized(source, tmp_path / "q", Options("nvfp4", overrides=overrides))
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


@pytest.mark.parametrize(
    ("format", "rule"),
    [
        ("fp8_e4m3_128x128", None),
        ("fp8_e4m3_128x128", "rceil"),
        ("e4m3:e8m0:128x128", None),
        ("mxfp8", None),
        ("fp8_e4m3", None),
    ],
)
def test_transformers_loads_its_own_fp8(tmp_path: Path, source: Path, format: str, rule: str | None) -> None:
    quantized(source, tmp_path / "q", Options(format, Rules(scale_rounding=rule, nonfinite="error"), layout="fp8"))
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


def test_transformers_loads_stacks_of_gpt_oss(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=64, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    quantized(tmp_path / "m", tmp_path / "q", Options("mxfp4", layout="gpt-oss"))
    written = read_raw(tmp_path / "q" / "model.safetensors")
    stack = "model.layers.1.mlp.experts."
    assert written[stack + "gate_up_proj_blocks"][:2] == ("U8", [4, 192, 2, 16])
    assert written[stack + "down_proj_scales"][:2] == ("U8", [4, 64, 3])
    assert written["model.layers.1.self_attn.q_proj.weight"][0] == "BF16"
    settings = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == ["lm_head", "model.layers.*.mlp.router", "model.layers.*.self_attn"]
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


def test_transformers_loads_what_was_recommended(tmp_path: Path, source: Path) -> None:
    checkpoint = open_checkpoint(source)
    options = Options("mxfp4", on_indivisible="keep")
    candidates = plan_candidates(checkpoint, ["mxfp4", "mxfp8", "nvfp4"], options, Target(BITS, 9.0))
    result = recommend("x", checkpoint, candidates, backend=Cpu())
    assert {choice.option.name for choice in result.choices} > {"mxfp8_e4m3"}
    quantized(source, tmp_path / "q", result.recipe)
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")


@pytest.mark.parametrize("stacked", [False, True])
def test_transformers_loads_experts(tmp_path: Path, stacked: bool) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, intermediate_size=128, moe_intermediate_size=96, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    if stacked:
        from safetensors.torch import save_file

        save_file(model.state_dict(), tmp_path / "m" / "model.safetensors")
    quantized(tmp_path / "m", tmp_path / "q", Options("mxfp4"))
    names = set(read_raw(tmp_path / "q" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight_packed" in names
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "plain", backend=Cpu())
    state, plain = loaded_weights(tmp_path / "q"), loaded_weights(tmp_path / "plain")
    assert state.keys() >= plain.keys()
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_transformers_loads_experts_of_its_own_fp8(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        hidden_size=128, intermediate_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=64, vocab_size=64,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "m")
    quantized(tmp_path / "m", tmp_path / "q", Options("fp8_e4m3_128x128", layout="fp8"))
    names = set(read_raw(tmp_path / "q" / "model.safetensors"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight_scale_inv" in names
    assert "model.layers.0.mlp.gate.weight_scale_inv" not in names
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "plain", backend=Cpu())
    state, plain = loaded_weights(tmp_path / "q"), loaded_weights(tmp_path / "plain")
    assert all(torch.equal(state[name], plain[name]) for name in plain)


def test_transformers_loads_a_tied_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "tied")
    quantized(tmp_path / "tied", tmp_path / "q", Options("nvfp4"))
    state = loaded_weights(tmp_path / "q")
    assert torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])


def test_transformers_loads_what_was_scaled_back(tmp_path: Path, source: Path) -> None:
    quantized(source, tmp_path / "q", Options("mxint8"))
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "plain", backend=Cpu())
    assert set(loaded_weights(tmp_path / "plain")) == set(open_checkpoint(source).tensors)


@pytest.mark.parametrize(
    ("format", "ending", "scale"), [("nvfp4", "input_global_scale", 2688 / 8), ("fp8_e4m3", "input_scale", 8 / 448)]
)
def test_transformers_loads_scales_of_inputs(
    tmp_path: Path, source: Path, format: str, ending: str, scale: float
) -> None:
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, Options(format))
    inputs = {
        f"{step.tensor.name.removesuffix('.weight')}.activation": torch.linspace(-8, 8, step.shape[-1])[None]
        for step in plan.quantized
    }
    captures = tmp_path / "captures.safetensors"
    safetensors_torch.save_file(inputs, captures)
    plan = with_input_scales(checkpoint, plan, open_checkpoint(captures), backend=Cpu())
    quantize_checkpoint(checkpoint, plan, tmp_path / "q", backend=Cpu())
    assert_loads_as_we_decode(tmp_path / "q", tmp_path / "plain")
    state = loaded_weights(tmp_path / "q")
    found = {name: tensor for name, tensor in state.items() if name.endswith(ending)}
    assert len(found) == len(plan.quantized)
    assert all(tensor.float().item() == pytest.approx(scale, rel=2**-8) for tensor in found.values())
