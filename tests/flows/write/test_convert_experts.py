"""Stacks of experts carried to layouts with single experts and back, and single experts to stacks: the same bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clean_outputs import assert_clean
from conversions import MOE, converted, moe, raw, refusals
from planted import verified
from tiny_models import LLAMA, Raw, Tensor, llama, noise, write_model

from mxcli.backends.cpu import Cpu
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options, make_plan
from mxcli.flows.write.dequantize import dequantize_checkpoint
from mxcli.flows.write.quantize import quantize_checkpoint
from mxcli.numerics.scheme import Rules

DATA = Path(__file__).parents[2] / "data" / "layouts"
OSS = "model.layers.0.mlp.experts"
MIXTRAL = {**LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 2}


def mixtral() -> dict[str, Tensor]:
    """A model with two experts, whose layers are called w1, w2 and w3."""
    tensors = {name: each for name, each in llama().items() if ".mlp." not in name}
    tensors["model.layers.0.block_sparse_moe.gate.weight"] = noise(2, 64, seed=70)
    for expert in range(2):
        for seed, (part, shape) in enumerate({"w1": (128, 64), "w2": (64, 128), "w3": (128, 64)}.items()):
            name = f"model.layers.0.block_sparse_moe.experts.{expert}.{part}.weight"
            tensors[name] = noise(*shape, seed=80 + 10 * expert + seed)
    return tensors


def quantized(folder: Path, tensors: dict[str, Tensor], config: Any, options: Options) -> Path:
    source = open_checkpoint(write_model(folder.with_name(f"{folder.name}-plain"), tensors, config))
    quantize_checkpoint(source, make_plan(source, options), folder, backend=Cpu())
    return folder


def array(stored: Raw) -> np.ndarray:
    return np.frombuffer(stored[2], np.uint8).reshape(*stored[1][:-1], -1)


def stacked_by_mlx(folder: Path, source: Path, module: str, names: dict[str, str], config: Any) -> Path:
    """A checkpoint of MLX in which matrices are the stacks that mlx_lm.convert writes; without a record."""
    tensors: dict[str, Tensor] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, (dtype, shape, content) in raw(source).items():
        values = np.frombuffer(content, {"U32": np.uint32, "U8": np.uint8, "BF16": np.uint16}[dtype]).reshape(shape)
        own = name.removeprefix(f"{module}.experts.").split(".")
        if own[0].isdecimal():
            stacks.setdefault(f"{module}.switch_mlp.{names[own[1]]}.{own[2]}", []).append(values)
        else:
            tensors[name] = (dtype, values)
    tensors |= {name: ("U32" if name.endswith("weight") else "U8", np.stack(each)) for name, each in stacks.items()}
    settings = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    return write_model(folder, tensors, {**config, "quantization": settings, "quantization_config": settings})


@pytest.mark.parametrize("between", [("ct",), ("mlx",), ("ct", "mlx"), ("mlx", "ct"), ("modelopt", "mlx", "mxcli")])
def test_gpt_oss_returns_every_byte(tmp_path: Path, between: tuple[str, ...]) -> None:
    source = DATA / "gptoss-mxfp4"
    for number, layout in enumerate((*between, "gpt-oss")):
        converted(source, tmp_path / str(number), layout)
        source = tmp_path / str(number)
    assert raw(source) == raw(DATA / "gptoss-mxfp4")
    settings = json.loads((source / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "mxfp4"


def test_single_experts_return_every_byte_from_gpt_oss(tmp_path: Path) -> None:
    converted(DATA / "gptoss-mxfp4", tmp_path / "ct", "ct")
    converted(tmp_path / "ct", tmp_path / "oss", "gpt-oss")
    converted(tmp_path / "oss", tmp_path / "back", "ct")
    assert raw(tmp_path / "back") == raw(tmp_path / "ct")


def test_gate_and_up_of_gpt_oss_are_every_second_row(tmp_path: Path) -> None:
    converted(DATA / "gptoss-mxfp4", tmp_path / "ct", "ct")
    stack, single = raw(DATA / "gptoss-mxfp4"), raw(tmp_path / "ct")
    blocks = array(stack[f"{OSS}.gate_up_proj_blocks"]).reshape(4, 64, 32)
    for place, part in enumerate(("gate_proj", "up_proj")):
        assert single[f"{OSS}.3.{part}.weight_packed"][:2] == ("U8", [32, 32])
        np.testing.assert_array_equal(array(single[f"{OSS}.3.{part}.weight_packed"]), blocks[3, place::2])
        scales = array(stack[f"{OSS}.gate_up_proj_scales"])[3, place::2]
        np.testing.assert_array_equal(array(single[f"{OSS}.3.{part}.weight_scale"]), scales)
        bias = np.frombuffer(stack[f"{OSS}.gate_up_proj_bias"][2], np.uint16).reshape(4, 64)[3, place::2]
        assert single[f"{OSS}.3.{part}.bias"] == ("BF16", [32], bias.tobytes())
    down = array(stack[f"{OSS}.down_proj_blocks"]).reshape(4, 64, 16)
    np.testing.assert_array_equal(array(single[f"{OSS}.1.down_proj.weight_packed"]), down[1])
    assert not any(name.startswith(f"{OSS}.down_proj") for name in single)


@pytest.mark.parametrize("layout", ["ct", "mlx", "mxcli"])
def test_their_values_are_those_of_the_stacks(tmp_path: Path, layout: str) -> None:
    converted(DATA / "gptoss-mxfp4", tmp_path / "q", layout)
    dequantize_checkpoint(open_checkpoint(tmp_path / "q"), tmp_path / "d", backend=Cpu())
    assert_clean(tmp_path / "d")
    dequantize_checkpoint(open_checkpoint(DATA / "gptoss-mxfp4"), tmp_path / "direct", backend=Cpu())
    assert raw(tmp_path / "d") == raw(tmp_path / "direct")


def test_mlx_has_the_names_that_mlx_lm_loads(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", moe(), MOE, Options("mxfp4", layout="ct"))
    converted(first, tmp_path / "mlx", "mlx")
    single, stacks = raw(first), raw(tmp_path / "mlx")
    layer = "model.layers.0.mlp"
    assert {name for name in stacks if "mlp." in name} == {
        f"{layer}.gate.weight",
        *(f"{layer}.switch_mlp.{part}_proj.{end}" for part in ("gate", "up", "down") for end in ("weight", "scales")),
    }
    assert stacks[f"{layer}.switch_mlp.gate_proj.weight"][:2] == ("U32", [2, 128, 8])
    codes = b"".join(single[f"{layer}.experts.{expert}.gate_proj.weight_packed"][2] for expert in range(2))
    assert stacks[f"{layer}.switch_mlp.gate_proj.weight"][2] == codes


@pytest.mark.parametrize(
    ("tensors", "config", "module", "parts"),
    [
        (moe, MOE, "model.layers.0.mlp", {name: name for name in ("gate_proj", "up_proj", "down_proj")}),
        (
            mixtral,
            MIXTRAL,
            "model.layers.0.block_sparse_moe",
            {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"},
        ),
    ],
)
def test_stacks_of_mlx_are_read_as_single_experts(
    tmp_path: Path, tensors: Any, config: Any, module: str, parts: dict[str, str]
) -> None:
    first = quantized(tmp_path / "q", tensors(), config, Options("mxfp4", layout="ct"))
    single = quantized(tmp_path / "single", tensors(), config, Options("mxfp4", layout="mlx"))
    theirs = stacked_by_mlx(tmp_path / "theirs", single, module, parts, config)
    converted(theirs, tmp_path / "ct", "ct")
    assert raw(tmp_path / "ct") == raw(first)
    dequantize_checkpoint(open_checkpoint(theirs), tmp_path / "d", backend=Cpu())
    assert_clean(tmp_path / "d")
    dequantize_checkpoint(open_checkpoint(first), tmp_path / "direct", backend=Cpu())
    assert raw(tmp_path / "d") == raw(tmp_path / "direct")


def without_record(folder: Path, *names: str) -> Path:
    """A copy of a checkpoint without some tensors and without a record."""
    kept = {name: each for name, each in raw(folder).items() if name not in names}
    kinds = {"U8": np.uint8, "BF16": np.uint16, "F8_E4M3": np.uint8}
    tensors = {
        name: (dtype, np.frombuffer(content, kinds[dtype]).reshape(shape))
        for name, (dtype, shape, content) in kept.items()
    }
    config = json.loads((folder / "config.json").read_text())
    return write_model(folder.with_name(f"{folder.name}-cut"), tensors, config)


def test_an_expert_that_is_missing_is_no_stack(tmp_path: Path) -> None:
    converted(DATA / "gptoss-mxfp4", tmp_path / "ct", "ct")
    gone = [f"{OSS}.3.down_proj.weight_{part}" for part in ("packed", "scale")]
    (reason,) = refusals(without_record(tmp_path / "ct", *gone), "gpt-oss")
    assert reason.startswith(f"{OSS}.0.down_proj.weight and ")
    assert "it holds the stacks of experts only (MODULE.mlp.experts.gate_up_proj and down_proj)" in reason


def test_experts_with_tensor_scales_of_their_own_make_no_stack(tmp_path: Path) -> None:
    first = quantized(tmp_path / "q", moe(), MOE, Options("nvfp4", layout="ct"))
    converted(first, tmp_path / "own", "mxcli")
    assert any(".experts.1.up_proj." in name for name in raw(tmp_path / "own"))
    assert raw(converted(tmp_path / "own", tmp_path / "back", "ct").folder) == raw(first)


def recorded(folder: Path) -> dict[str, dict[str, Any]]:
    tensors: dict[str, dict[str, Any]] = json.loads((folder / "mxcli.json").read_text())["tensors"]
    return tensors


@pytest.mark.parametrize("layout", ["mlx", "gguf"])
def test_the_record_has_the_stacks_with_the_rules_of_their_experts(tmp_path: Path, layout: str) -> None:
    config = {**MOE, "norm_topk_prob": True, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"intermediate_size": 128, "moe_intermediate_size": 128, "vocab_size": 32, "max_position_embeddings": 64}
    config |= {"num_experts_per_tok": 1, "head_dim": 32, "rms_norm_eps": 1e-5}
    options = Options("mxfp4", Rules(scale_rounding="even", nonfinite="error"), layout="ct")
    first = quantized(tmp_path / "q", moe(), config, options)
    converted(first, tmp_path / "c", layout)
    assert verified(tmp_path / "c").is_sound
    place = "switch_mlp" if layout == "mlx" else "experts"
    stack = recorded(tmp_path / "c")[f"model.layers.0.mlp.{place}.up_proj.weight"]
    assert (stack["decision"], stack["scale_rounding"], stack["shape"]) == ("quantized", "even", [2, 128, 64])
    assert not any(".experts.0." in name for name in recorded(tmp_path / "c"))
    converted(tmp_path / "c", tmp_path / "back", "ct")
    assert verified(tmp_path / "back").is_sound
    single = recorded(tmp_path / "back")["model.layers.0.mlp.experts.1.up_proj.weight"]
    assert (single["decision"], single["scale_rounding"], single["shape"]) == ("quantized", "even", [128, 64])


@pytest.mark.parametrize("between", ["ct", "mlx"])
def test_the_record_of_stacks_of_gpt_oss_is_of_what_is_stored(tmp_path: Path, between: str) -> None:
    dequantize_checkpoint(open_checkpoint(DATA / "gptoss-mxfp4"), tmp_path / "plain", backend=Cpu())
    source = open_checkpoint(tmp_path / "plain")
    options = Options("mxfp4", Rules(scale_rounding="even", nonfinite="error"), layout="gpt-oss")
    quantize_checkpoint(source, make_plan(source, options), tmp_path / "q", backend=Cpu())
    converted(tmp_path / "q", tmp_path / "c", between)
    name = f"{OSS}.2.gate_proj.weight" if between == "ct" else f"{OSS}.gate_proj.weight"
    assert recorded(tmp_path / "c")[name]["scale_rounding"] == "even"
    assert f"{OSS}.gate_up_proj" not in recorded(tmp_path / "c")
    converted(tmp_path / "c", tmp_path / "back", "gpt-oss")
    assert raw(tmp_path / "back") == raw(tmp_path / "q")
    assert recorded(tmp_path / "back")[f"{OSS}.gate_up_proj"]["scale_rounding"] == "even"
    for folder in ("c", "back"):
        assert verified(tmp_path / folder).is_sound
