"""An emulated model computes what the model with the weights of its quantized checkpoint computes, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_transformers import tiny, tokens

import mxcli
from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.plan.recipe_file import options_from, parse_recipe
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules


def as_quantized(model: Any, folder: Path, options: Options, layout: str | None = None) -> Any:
    """The model with the weights that `mxcli quantize` writes and `mxcli dequantize` reads back."""
    model.save_pretrained(folder / "plain")
    source = open_checkpoint(folder / "plain")
    quantize_checkpoint(source, make_plan(source, options), folder / "quantized", backend=Cpu(1), layout=layout)
    dequantize_checkpoint(open_checkpoint(folder / "quantized"), folder / "back", backend=Cpu(1), dtype="F32")
    found = type(model).from_pretrained(folder / "back", dtype=torch.float32)
    found.set_experts_implementation("eager") if "experts" in str(found) else None
    return found.eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(tokens()).logits
    return found


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("llama", "nvfp4"),
        ("llama", "mxfp4"),
        ("tied", "mxfp8"),
        ("gpt2", "nvfp4"),
        ("bert", "fp8_e4m3_channel"),
        ("mixtral", "nvfp4"),
        ("qwen3_moe", "mxfp8"),
        ("llama4", "nvfp4"),
        ("gpt_oss", "nvfp4"),
    ],
)
def test_weights_are_those_of_the_quantized_checkpoint(tmp_path: Path, name: str, format: str) -> None:
    model = tiny(name)
    layout = "mxcli" if "nvfp4" in format else None  # others store one of the two scales, which rounds the other
    quantized = as_quantized(model, tmp_path, Options(format, Rules(nonfinite="error")), layout)
    with mxcli.emulate(model, format=format, activations="none", layout=layout):
        emulated = logits(model)
    assert torch.equal(emulated, logits(quantized))
    assert not torch.equal(emulated, logits(model))


RECIPE = """
format = "mxfp4"
exclude = ["*.o_proj"]

[[override]]
select = "*.down_proj"
format = "nvfp4"

[[override]]
select = "model.layers.1.mlp.up_proj"
keep = true
"""


def test_a_recipe(tmp_path: Path) -> None:
    model = tiny("llama")
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    options = options_from(parse_recipe(RECIPE, "recipe"), {}, (), defaults={"nonfinite": "error"})
    quantized = as_quantized(model, tmp_path, options, "mxcli")
    with mxcli.emulate(model, recipe=path, activations="none") as emulation:
        emulated = logits(model)
    assert torch.equal(emulated, logits(quantized))
    assert len(emulation.layers) == 11
    assert emulation.layers["model.layers.0.mlp.down_proj"] == "weights nvfp4, inputs as they are"
    assert emulation.layers["model.layers.0.mlp.up_proj"] == "weights mxfp4_e2m1, inputs as they are"
    assert emulation.kept["model.layers.1.mlp.up_proj.weight"] == "kept: weight, kept by the recipe"
    assert emulation.kept["model.layers.1.self_attn.o_proj.weight"] == "kept: excluded by --exclude *.o_proj"
    with mxcli.emulate(model, recipe=parse_recipe(RECIPE, "recipe"), activations="none"):
        assert torch.equal(logits(model), emulated)
    with mxcli.emulate(model, recipe=path, format="mxfp8", exclude="*.q_proj") as emulation:
        assert emulation.layers["model.layers.0.self_attn.k_proj"] == "weights mxfp8_e4m3, inputs mxfp8_e4m3"
        assert "model.layers.0.self_attn.q_proj" not in emulation.layers


def test_names_are_those_of_files() -> None:
    """Selectors match what the model's files hold: each expert of Mixtral by itself, as w1, w2 and w3."""
    model = tiny("mixtral")
    with mxcli.emulate(model, format="nvfp4", exclude="*.experts.2.*", activations="none") as emulation:
        some = logits(model)
    assert "model.layers.0.block_sparse_moe.experts.2.w1.weight" in emulation.kept
    assert "model.layers.0.block_sparse_moe.experts.1.w1.weight" not in emulation.kept
    with mxcli.emulate(model, format="nvfp4", activations="none"):
        assert not torch.equal(logits(model), some)


def test_a_tied_head_follows_its_embedding() -> None:
    model = tiny("tied")
    with mxcli.emulate(model, format="mxfp8", activations="none", include=["@embedding", "@weight"]) as emulation:
        emulated = logits(model)
    assert (
        emulation.layers["model.embed_tokens"]
        == emulation.layers["lm_head"]
        == "weights mxfp8_e4m3, inputs as they are"
    )
    other = tiny("tied")
    with torch.no_grad():
        found: Any = mxcli.quantize(other.lm_head.weight, "mxfp8").dequantize()
        other.lm_head.weight.copy_(found)
    assert other.model.embed_tokens.weight is other.lm_head.weight
    with mxcli.emulate(other, format="mxfp8", activations="none"):
        assert torch.equal(logits(other), emulated)


def test_inputs_share_no_scale_with_other_tokens() -> None:
    """A token's output does not depend on the tokens before and after it, except under a scale of the whole tensor."""
    layer = torch.nn.Linear(64, 32, bias=False)
    x = torch.randn(8, 64)
    x[3] *= 100
    for format, alone in (("mxfp4", True), ("fp8_e4m3_channel", True), ("fp8_e4m3_128x128", True), ("fp8_e4m3", False)):
        with mxcli.emulate(layer, format=format):
            assert torch.allclose(layer(x)[2], layer(x[2:3])[0], atol=1e-5) == alone, format
