from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.files.roles import role_of
from mxcli.files.tensors import TensorInfo
from mxcli.flows.write.ignored import ignored_modules

BLOCK = "model.layers.0"


def kept(name: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, "BF16", shape, role_of(name, shape, "BF16"), Path("m.safetensors"), 0, 0)


@pytest.mark.parametrize(
    ("name", "shape", "listed"),
    [
        ("lm_head.weight", (64, 32), "lm_head"),
        (f"{BLOCK}.mlp.gate.weight", (4, 32), f"{BLOCK}.mlp.gate"),
        (f"{BLOCK}.mlp.down_proj.weight", (32, 64), f"{BLOCK}.mlp.down_proj"),
        (f"{BLOCK}.mlp.experts.down_proj", (4, 32, 64), f"{BLOCK}.mlp.experts"),
        (f"{BLOCK}.mlp.experts.gate_up_proj", (4, 128, 32), f"{BLOCK}.mlp.experts"),
        ("mtp.layers.0.mlp.experts.down_proj", (4, 32, 64), "mtp.layers.0.mlp.experts"),
        ("model.embed_tokens.weight", (64, 32), None),
        ("model.norm.weight", (32,), None),
        (f"{BLOCK}.mlp.down_proj.bias", (32,), None),
        (f"{BLOCK}.mixer.conv1d.weight", (64, 1, 4), None),
        ("patch_embedding.weight", (32, 16, 1, 2, 2), None),
        ("blocks.0.modulation", (1, 6, 32), None),
        ("head.modulation", (1, 2, 32), None),
        ("transformer_blocks.0.scale_shift_table", (6, 32), None),
        ("scale_shift_table", (2, 32), None),
        ("model.embed_tokens_extend.image_embed.glb_GN", (1, 1, 32), None),
        (f"{BLOCK}.moe.shift", (1, 6, 32), None),
        (f"{BLOCK}.self_attn.q_proj.lora_A.speech.weight", (8, 32), None),
        (f"{BLOCK}.self_attn.k_scale", (), None),
    ],
)
def test_the_list_has_linear_layers_only(name: str, shape: tuple[int, ...], listed: str | None) -> None:
    assert ignored_modules([kept(name, *shape)], {}, []) == (() if listed is None else (listed,))


def test_tied_heads_are_listed_and_tied_tables_are_not() -> None:
    tied = {
        "lm_head.weight": "shared.weight",
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
    }
    assert ignored_modules([], tied, []) == ("lm_head",)


def test_a_module_with_a_quantized_weight_is_not_listed() -> None:
    stack = kept(f"{BLOCK}.mlp.experts.down_proj", 4, 32, 64)
    assert ignored_modules([stack], {}, [f"{BLOCK}.mlp.experts.0.up_proj.weight"]) == ()
    assert ignored_modules([stack], {}, [f"{BLOCK}.mlp.gate_proj.weight"]) == (f"{BLOCK}.mlp.experts",)
    assert ignored_modules([], {"lm_head.weight": "wte.weight"}, ["lm_head.weight"]) == ()
