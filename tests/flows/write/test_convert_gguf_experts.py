"""Experts in GGUF files, one stack for all of a layer: put together and divided again, the same bytes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_outputs import assert_clean
from conversions import converted, raw, refusals
from raw_gguf import F32, Q8_0, gguf_bytes
from tiny_models import LLAMA, Tensor, bf16, floats, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.errors import RefusedError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.gguf import read_settings
from mxcli.files.layouts import find_layout
from mxcli.files.selection import Rule
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.arrange import arrange
from mxcli.flows.write.convert import plan_conversion
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

pytest.importorskip("gguf")
CONFIG: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32,
}
EXPERTS = "model.layers.0.mlp.experts"


def model(wide: int = 32) -> dict[str, Tensor]:
    tensors = {name: each for name, each in llama().items() if ".mlp." not in name}
    for name in ("q_norm", "k_norm"):
        tensors[f"model.layers.0.self_attn.{name}.weight"] = noise(32, seed=60)
    tensors["model.layers.0.mlp.gate.weight"] = noise(3, 64, seed=70)
    for expert in range(3):
        for seed, (part, shape) in enumerate({"gate": (wide, 64), "up": (wide, 64), "down": (64, wide)}.items()):
            tensors[f"{EXPERTS}.{expert}.{part}_proj.weight"] = noise(*shape, seed=80 + 10 * expert + seed)
    return tensors


def quantized(folder: Path, options: Options | None = None, wide: int = 32, **changed: Any) -> Path:
    source = write_model(folder.with_name(f"{folder.name}-plain"), model(wide), {**CONFIG, **changed})
    checkpoint = open_checkpoint(source)
    chosen = options or Options("mxfp4", Rules(nonfinite="error"), layout="ct")
    quantize_checkpoint(checkpoint, make_plan(checkpoint, chosen), folder, backend=Cpu())
    return folder


def dequantized(source: Path, output: Path) -> Path:
    dequantize_checkpoint(open_checkpoint(source), output, backend=Cpu())
    assert_clean(output)
    return output


def test_gguf_and_back_returns_every_byte(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q")
    converted(first, tmp_path / "g", "gguf")
    converted(tmp_path / "g", tmp_path / "back", "ct")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
    assert (tmp_path / "back" / "config.json").read_text() == (first / "config.json").read_text()


@pytest.mark.parametrize("between", [("mlx", "gguf"), ("gguf", "mlx"), ("modelopt", "gguf", "quark")])
def test_other_layouts_between_return_every_byte(tmp_path: Path, between: tuple[str, ...]) -> None:
    first = source = quantized(tmp_path / "q")
    for number, layout in enumerate((*between, "ct")):
        converted(source, tmp_path / str(number), layout)
        source = tmp_path / str(number)
    assert raw(source) == raw(first)


def test_names_shapes_and_settings_are_those_of_the_architecture(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q")
    converted(first, tmp_path / "g", "gguf")
    file = open_checkpoint(tmp_path / "g")
    stacks = {name: (info.block_type, info.shape) for name, info in file.tensors.items() if "ffn_" in name}
    # 17 bytes hold a block of 32 values.
    assert stacks == {
        "blk.0.ffn_gate_inp.weight": ("", (3, 64)),
        "blk.0.ffn_gate_exps.weight": ("MXFP4", (3, 32, 34)),
        "blk.0.ffn_up_exps.weight": ("MXFP4", (3, 32, 34)),
        "blk.0.ffn_down_exps.weight": ("MXFP4", (3, 64, 17)),
        "blk.0.ffn_norm.weight": ("", (64,)),
    }
    settings = read_settings(tmp_path / "g" / "model.gguf")
    assert {key: value for key, value in settings.items() if "expert" in key} == {
        "qwen3moe.expert_count": 3,
        "qwen3moe.expert_used_count": 2,
        "qwen3moe.expert_feed_forward_length": 32,
    }


def test_each_expert_has_its_rows_of_the_stack(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q")
    converted(first, tmp_path / "g", "gguf")
    info = open_checkpoint(tmp_path / "g").tensors["blk.0.ffn_up_exps.weight"]
    content = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
    blocks = np.frombuffer(content, np.uint8).reshape(3, 32, 2, 17)
    for expert in range(3):
        _, shape, scales = raw(first)[f"{EXPERTS}.{expert}.up_proj.weight_scale"]
        np.testing.assert_array_equal(blocks[expert, ..., 0], np.frombuffer(scales, np.uint8).reshape(shape))
        _, shape, codes = raw(first)[f"{EXPERTS}.{expert}.up_proj.weight_packed"]
        packed = np.frombuffer(codes, np.uint8).reshape(32, 2, 16)
        low, high = packed & 15, packed >> 4
        elements = np.stack([low, high], axis=-1).reshape(32, 2, 32)
        np.testing.assert_array_equal(blocks[expert, ..., 1:] & 15, elements[..., :16])
        np.testing.assert_array_equal(blocks[expert, ..., 1:] >> 4, elements[..., 16:])


@pytest.mark.parametrize("with_config", [True, False])
def test_dequantized_under_the_names_of_hugging_face(tmp_path: Path, with_config: bool) -> None:
    first = quantized(tmp_path / "q")
    converted(first, tmp_path / "g", "gguf")
    source = tmp_path / "g"
    if not with_config:
        source = tmp_path / "some-name.gguf"
        shutil.copy(tmp_path / "g" / "model.gguf", source)
    found = raw(dequantized(source, tmp_path / "d"))
    expected = raw(dequantized(first, tmp_path / "direct"))
    assert found.keys() == expected.keys()
    assert {name: floats(each).tolist() for name, each in found.items()} == {
        name: floats(each).tolist() for name, each in expected.items()
    }
    config = json.loads((tmp_path / "d" / "config.json").read_text())
    assert {
        key: config[key] for key in ("model_type", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
    } == {
        "model_type": "qwen3_moe",
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    }


def test_plain_experts_are_put_together_too(tmp_path: Path) -> None:
    options = Options("mxfp4", selection=(Rule(False, "*.experts.*"),), layout="ct")
    first = quantized(tmp_path / "q", options)
    converted(first, tmp_path / "g", "gguf")
    stack = open_checkpoint(tmp_path / "g").tensors["blk.0.ffn_down_exps.weight"]
    assert (stack.dtype, stack.shape, stack.block_type) == ("BF16", (3, 64, 32), "")
    content = stack.file.read_bytes()[stack.offset : stack.offset + stack.nbytes]
    assert content == b"".join(raw(first)[f"{EXPERTS}.{expert}.down_proj.weight"][2] for expert in range(3))
    converted(tmp_path / "g", tmp_path / "back", "ct")
    assert raw(tmp_path / "back") == raw(first)


def test_stacks_in_other_block_types_are_decoded_expert_by_expert(tmp_path: Path) -> None:
    converted(quantized(tmp_path / "q"), tmp_path / "g", "gguf")
    tensors = []
    for name, info in open_checkpoint(tmp_path / "g").tensors.items():
        if name.endswith("_exps.weight"):
            rows, columns = info.shape[1], 64 if "down" not in name else 32
            # A Q8_0 block is a binary16 scale and 32 bytes: 0.5 times the number of the expert.
            values = [np.full((rows, columns // 32, 32), expert, np.int8) for expert in range(3)]
            block = b"".join(
                np.float16(0.5).tobytes() + each.tobytes() for expert in values for each in expert.reshape(-1, 32)
            )
            tensors.append((name, (3, rows, columns), Q8_0, block))
        else:
            shape = info.shape if not info.block_type else (*info.shape[:-1], info.shape[-1] // 17 * 32)
            tensors.append((name, shape, F32, np.zeros(shape, np.float32).tobytes()))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(gguf_bytes(tensors))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    found = raw(dequantized(folder, tmp_path / "d"))
    assert found[f"{EXPERTS}.2.down_proj.weight"] == ("BF16", [64, 32], bf16(np.full((64, 32), 1.0))[1].tobytes())
    assert found[f"{EXPERTS}.1.gate_proj.weight"] == ("BF16", [32, 64], bf16(np.full((32, 64), 0.5))[1].tobytes())
    assert len([name for name in found if ".experts." in name]) == 9


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (
            {"norm_topk_prob": False},
            "config.json: norm_topk_prob is False; qwen3moe divides the weights of the chosen ",
        ),
        ({"mlp_only_layers": [0]}, "config.json: some layers have no experts; all layers of qwen3moe have some"),
        ({"decoder_sparse_step": 2}, "config.json: some layers have no experts; all layers of qwen3moe have some"),
        ({"model_type": "mixtral"}, "config.json: the layout gguf cannot write 'mixtral' models; it writes llama, "),
    ],
)
def test_other_experts_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    reasons = refusals(quantized(tmp_path / "q", **changed), "gguf")
    assert any(reason.startswith(why) for reason in reasons), reasons


def test_experts_with_tensor_scales_of_their_own_are_refused_by_name(tmp_path: Path) -> None:
    options = Options("nvfp4", Rules(nonfinite="error"), layout="ct")
    reasons = refusals(quantized(tmp_path / "q", options, wide=64, moe_intermediate_size=64), "gguf")
    (reason,) = (reason for reason in reasons if ".experts." in reason)
    assert reason.startswith(f"{EXPERTS}.0.gate_proj.weight and 8 more: loaders of the layout take one stack of all ")
    assert "or each has a tensor scale of its own. Use another --layout, such as compressed-tensors." in reason


def test_quantizing_single_experts_to_gguf_is_refused_with_the_way_out(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_model(tmp_path / "m", model(), CONFIG))
    plan = make_plan(checkpoint, Options("mxfp4", Rules(nonfinite="error"), layout="gguf"))
    with pytest.raises(RefusedError, match="quantize to another layout, and use mxcli convert"):
        arrange(checkpoint, plan)


@pytest.mark.parametrize("layout", ["gguf", "mlx", "ct"])
def test_the_memory_of_a_conversion_is_known(tmp_path: Path, layout: str) -> None:
    conversion = plan_conversion(open_checkpoint(quantized(tmp_path / "q")), find_layout(layout))
    assert conversion.need.peak_bytes > 0


def test_a_stack_without_one_of_its_experts_is_refused_by_name(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q")
    gone = {f"{EXPERTS}.1.up_proj.weight_{part}" for part in ("packed", "scale")}
    kinds = {"U8": np.uint8, "BF16": np.uint16}
    tensors = {
        name: (dtype, np.frombuffer(content, kinds[dtype]).reshape(shape))
        for name, (dtype, shape, content) in raw(first).items()
        if name not in gone
    }
    config = json.loads((first / "config.json").read_text())
    for layout in ("gguf", "mlx"):
        (reason,) = refusals(write_model(tmp_path / layout, tensors, config), layout)
        assert reason.startswith(f"{EXPERTS}.0.up_proj.weight and 1 more: loaders of the layout take one stack of all ")


@pytest.mark.slow
def test_transformers_loads_what_is_dequantized(tmp_path: Path) -> None:
    transformers: Any = pytest.importorskip("transformers")
    first = quantized(tmp_path / "q")
    converted(first, tmp_path / "g", "gguf")
    for name, source in (("d", tmp_path / "g"), ("direct", first)):
        dequantized(source, tmp_path / name)
    models = []
    for name in ("d", "direct"):
        load = transformers.AutoModelForCausalLM.from_pretrained
        model, info = load(tmp_path / name, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        models.append(model.state_dict())
    assert all((models[0][name] == values).all() for name, values in models[1].items())
