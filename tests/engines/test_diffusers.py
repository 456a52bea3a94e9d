"""diffusers loads transformers of image and video models that mxcli writes, with the weights that mxcli scales back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs

torch: Any = Lazy("torch")
diffusers: Any = Lazy("diffusers")
sweep: Any = Lazy("engines.sweep")
pytestmark = [pytest.mark.slow, needs("accelerate", "diffusers", "torch", "torchao")]

WORDS = {"encoder_hidden_states": (1, 8, 64)}
POOLED = {**WORDS, "pooled_projections": (1, 64)}


@dataclass(frozen=True, slots=True)
class Transformer:
    """A class of diffusers, the configuration of a tiny model, and its inputs: shapes (tuples) or values (lists)."""

    name: str
    config: dict[str, Any]
    inputs: dict[str, Any]

    def __str__(self) -> str:
        return self.name


TRANSFORMERS = (
    Transformer(
        "FluxTransformer2DModel",
        {
            "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 64,
            "num_attention_heads": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64,
            "axes_dims_rope": (16, 24, 24), "guidance_embeds": True,
        },
        {
            "hidden_states": (1, 16, 64), **POOLED, "timestep": [0.5], "guidance": [1.0],
            "img_ids": [[0.0, 0.0, 0.0]] * 16, "txt_ids": [[0.0, 0.0, 0.0]] * 8,
        },
    ),
    Transformer(
        "SD3Transformer2DModel",
        {
            "sample_size": 16, "in_channels": 16, "num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 2,
            "joint_attention_dim": 64, "caption_projection_dim": 128, "pooled_projection_dim": 64, "out_channels": 16,
            "pos_embed_max_size": 16,
        },
        {"hidden_states": (1, 16, 16, 16), **POOLED, "timestep": [1.0]},
    ),
    Transformer(
        "WanTransformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 64, "in_channels": 16, "out_channels": 16, "text_dim": 64,
            "freq_dim": 64, "ffn_dim": 128, "num_layers": 2, "rope_max_seq_len": 32,
        },
        {"hidden_states": (1, 16, 2, 8, 8), **WORDS, "timestep": [1]},
    ),
)  # fmt: skip


def save(row: Transformer, folder: Path) -> None:
    """A model in BF16 whose every linear layer keeps the size of its inputs."""
    torch.manual_seed(0)
    model = getattr(diffusers, row.name)(**row.config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.normal_(0, module.in_features**-0.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def load(row: Transformer, folder: Path) -> Any:
    """The model, and its output for the inputs of the row."""
    kind = getattr(diffusers, row.name)
    model, info = kind.from_pretrained(folder, torch_dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values()), info
    torch.manual_seed(1)
    inputs = {
        name: torch.randn(value).to(torch.bfloat16) if isinstance(value, tuple) else torch.tensor(value)
        for name, value in row.inputs.items()
    }
    with torch.inference_mode():
        output = model.eval()(**inputs).sample.float()
    assert torch.isfinite(output).all()
    return model, output


# MX layers of torchao quantize their inputs too, which the output shows and the weights do not.
@pytest.mark.parametrize(("format", "inputs"), [("mxfp8", True), ("nvfp4", False), ("fp8_e4m3_channel", False)])
@pytest.mark.parametrize("row", TRANSFORMERS, ids=str)
def test_diffusers_loads(row: Transformer, format: str, inputs: bool, tmp_path: Path) -> None:
    source, q, plain = (tmp_path / name for name in ("source", "q", "plain"))
    save(row, source)
    words = ("quantize", source, "--format", format, "--for", "diffusers", "-o", q, "--threads", 1, "--json")
    said = sweep.mxcli(*words)
    assert said.code == 0, said.err
    assert sweep.mxcli("dequantize", q, "-o", plain).code == 0
    for against in ([], ["--against", source]):
        assert sweep.verdict(sweep.mxcli("verify", q, *against, "--json"), "diffusers") == "loads"
    (model, output), (reference, expected), (_, original) = (load(row, folder) for folder in (q, plain, source))
    state = model.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert torch.equal(sweep.values_of(state[name]).to(value.dtype), value), name
    weight_error, weights = sweep.measured(said)
    bound = sweep.allowed_error(weight_error, weights)
    assert weights
    assert sweep.relative_error(output, original) <= bound
    assert sweep.relative_error(output, expected) <= (bound if inputs else sweep.BF16_ROUNDING)


@pytest.mark.parametrize("layout", ["compressed-tensors", "fp8", "modelopt", "quark"])
def test_layouts_that_diffusers_does_not_load_are_refused(layout: str, tmp_path: Path) -> None:
    row, formats = TRANSFORMERS[1], {"fp8": "fp8_e4m3_128x128", "quark": "mxfp4"}
    save(row, tmp_path / "source")
    words = ("quantize", tmp_path / "source", "--format", formats.get(layout, "nvfp4"), "--layout", layout)
    said = sweep.mxcli(*words, "--for", "diffusers", "-o", tmp_path / "refused")
    assert said.code == 4
    assert "diffusers" in said.err
    assert not (tmp_path / "refused").exists()
    assert sweep.mxcli(*words, "-o", tmp_path / "q").code == 0
    with pytest.raises((ValueError, TypeError, ImportError)):
        getattr(diffusers, row.name).from_pretrained(tmp_path / "q", torch_dtype=torch.bfloat16)
