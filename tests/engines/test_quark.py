"""transformers loads the layout quark with AMD Quark's own layers, on a CPU, and each computes what its weights are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import LAYOUTS
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint

pytestmark = [pytest.mark.slow, needs("accelerate", "quark", "torch", "transformers")]
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")
safetensors_torch: Any = Lazy("safetensors.torch")


@pytest.fixture(scope="module", params=["Llama", "Qwen2", "Qwen3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = getattr(transformers, f"{request.param}Config")(
        hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    getattr(transformers, f"{request.param}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
    return Path(folder)


def largest_error(source: Path, output: Path, options: Options) -> float:
    """Return the largest relative error of a quantized layer, as an identity matrix shows its weights."""
    checkpoint = open_checkpoint(source)
    plan = make_plan(checkpoint, options)
    quantize_checkpoint(checkpoint, plan, output / "q", backend=Cpu())
    dequantize_checkpoint(open_checkpoint(output / "q"), output / "plain", backend=Cpu())
    expected = safetensors_torch.load_file(output / "plain" / "model.safetensors")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        output / "q", dtype="auto", output_loading_info=True
    )
    assert {key: found for key, found in info.items() if found} == {}
    layers = {name: layer for name, layer in model.named_modules() if type(layer).__name__ == "QParamsLinear"}
    assert {f"{name}.weight" for name in layers} == {step.tensor.name for step in plan.quantized}
    errors = []
    with torch.no_grad():
        assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
        for name, layer in layers.items():
            weight = expected[f"{name}.weight"].float()
            bias = 0 if layer.bias is None else layer.bias
            seen = (layer(torch.eye(weight.shape[1], dtype=torch.bfloat16)) - bias).T.float()
            errors.append(((seen - weight).norm() / weight.norm()).item())
    return max(errors)


@pytest.mark.parametrize("format", LAYOUTS["quark"].formats)
def test_every_layer_is_what_it_was_dequantized_to(source: Path, tmp_path: Path, format: str) -> None:
    within = 0.01 if format.startswith("fp8") else 0  # their inputs are rounded too
    assert largest_error(source, tmp_path, Options(format, layout="quark")) <= within


def test_mixed_formats_and_kept_layers(source: Path, tmp_path: Path) -> None:
    overrides = (Override("*.mlp.*", "mxfp6_e2m3"), Override("*layers.1.self_attn.*", keep=True))
    assert largest_error(source, tmp_path, Options("mxfp4", overrides=overrides, layout="quark")) == 0
