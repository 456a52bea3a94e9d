"""Which layers must share a tensor scale, by the model that a quantized checkpoint is of."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planted import Tensors, changed, found, quantized, source, verified
from tiny_models import noise

from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options

WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]}
CROSS, SELF = "model.decoder.layers.0.encoder_attn", "model.decoder.layers.0.self_attn"


def _scales(folder: Path, config: dict, alone: dict[str, str], names: tuple[str, ...], at: str) -> dict[str, list[str]]:
    """Return what is found in an output whose layers were quantized as another model, with scales of its own sets."""
    tensors = {f"{at}.{name}.weight": noise(64, 64, seed=seed) for seed, name in enumerate(names)}
    out = quantized(source(folder / "m", tensors, alone), folder / "q", Options("nvfp4"))
    settings = (out / "config.json").read_text()
    for key, value in alone.items():
        settings = settings.replace(f'"{key}": "{value}"', f'"{key}": "{config[key]}"')
    (out / "config.json").write_text(settings)
    (out / "mxcli.json").unlink()
    result = found(verified(out))
    return {name: where for name, where in result.items() if name.startswith(("fused", "some_fused"))}


@pytest.mark.parametrize(
    ("config", "alone", "names", "at", "expected"),
    [
        ("minicpm3", "minicpm3", ("q_a_proj", "kv_a_proj_with_mqa"), SELF, None),
        ("deepseek_v3", "minicpm3", ("q_a_proj", "kv_a_proj_with_mqa"), SELF, f"{SELF}.q_a_proj+kv_a_proj_with_mqa"),
        ("exaone", "exaone", ("c_fc_0", "c_fc_1"), "h.0.mlp", None),
        ("qwen", "mixtral", ("w1", "w2"), "h.0.mlp", "h.0.mlp.w2+w1"),
        ("mixtral", "mixtral", ("w1", "w2"), "h.0.mlp", None),
        ("whisper", "whisper", ("q_proj", "k_proj", "v_proj"), CROSS, None),
        ("whisper", "whisper", ("q_proj", "k_proj", "v_proj"), SELF, None),
    ],
)
def test_scales_of_sets_of_the_model_must_be_equal(
    tmp_path: Path, config: str, alone: str, names: tuple[str, ...], at: str, expected: str | None
) -> None:
    result = _scales(tmp_path, {"model_type": config}, {"model_type": alone}, names, at)
    assert result == ({} if expected is None else {"fused_tensor_scale": [expected]})


def _one_scale_larger(tensors: Tensors) -> None:
    ends = ("_global_scale", "_scale_2", "_per_tensor_scale")
    dtype, scale = tensors[first := min(name for name in tensors if name.endswith(ends))]
    tensors[first] = (dtype, scale * np.float32(1.25))


@pytest.mark.parametrize(
    ("config", "names", "at", "layout"),
    [
        ("t5", "qkv", "decoder.block.0.layer.0.SelfAttention", "compressed-tensors"),
        ("bart", ("q_proj", "k_proj", "v_proj"), SELF, "compressed-tensors"),
        ("my_model", ("gate_proj", "up_proj"), "h.0.mlp", "torchao"),
        ("my_model", ("gate_proj", "up_proj"), "h.0.mlp", "modelopt"),
        ("llama", ("gate_proj", "up_proj"), "h.0.mlp", "compressed-tensors"),
        ("gemma3", "qkv", "h.0.attn", "modelopt"),
        ("llama", ("gate_proj", "up_proj"), "h.0.mlp", "torchao"),
    ],
)
def test_scales_of_a_model_that_no_engine_has_are_a_note(
    tmp_path: Path, config: str, names: tuple[str, ...], at: str, layout: str
) -> None:
    """The sets are then taken by their names; the same file of a model that engines have is at fault."""
    tensors = {f"{at}.{name}.weight": noise(64, 64, seed=seed) for seed, name in enumerate(names)}
    model = source(tmp_path / "m", tensors, {"model_type": config})
    out = changed(quantized(model, tmp_path / "q", Options("nvfp4", layout=layout)), tmp_path / "c", _one_scale_larger)
    result, known = verified(out), config in ("llama", "gemma3")
    name = {"torchao": "some_fused_tensor_scale"}.get(layout, "fused_tensor_scale") if known else "perhaps_fused_scale"
    assert [each for each in found(result) if "fused" in each] == [name]
    assert result.is_sound is (name != "fused_tensor_scale")
    if not known:
        (finding,) = next(each.findings for each in result.results if each.name == name)
        assert finding.value.startswith("scales differ: ")
        assert f"The layers that engines join in '{config}' are not known" in finding.need


def _apart(tensors: Tensors) -> None:
    """Give every member of a set a tensor scale of its own."""
    scales = sorted(name for name in tensors if name.endswith("up_proj.weight_global_scale"))
    for name in scales:
        tensors[name] = ("F32", tensors[name][1] * np.float32(1.25))


def _one_apart(tensors: Tensors) -> None:
    name = max(name for name in tensors if name.endswith("up_proj.weight_global_scale"))
    tensors[name] = ("F32", tensors[name][1] * np.float32(1.25))


SOME, ALL = ["some_fused_tensor_scale"], ["fused_tensor_scale"]


@pytest.mark.parametrize(
    ("config", "layers", "change", "engines", "expected", "sound"),
    [
        ("falcon_h1", 3, _apart, (), SOME, True),
        ("llama", 2, _apart, (), SOME, True),
        ("llama", 3, _apart, ("transformers",), SOME, True),
        ("llama", 3, _apart, ("vllm",), ALL, False),
        ("llama", 3, _apart, ("transformers", "sglang"), ALL, False),
        ("llama", 3, _one_apart, (), ALL, False),
        ("llama", 3, _one_apart, ("transformers",), ALL, False),
        ("llama", 1, _apart, (), ALL, False),
        ("gemma2", 2, _apart, (), SOME, True),
    ],
)
def test_a_producer_that_keeps_layers_apart_is_wrong_for_engines_that_join_them(
    tmp_path: Path, config: str, layers: int, change: object, engines: tuple[str, ...], expected: list[str], sound: bool
) -> None:
    """transformers reads each layer as it is; scales that differ in one set of several are damage."""
    tensors = {
        f"model.layers.{layer}.mlp.{name}_proj.weight": noise(64, 64, seed=2 * layer + seed)
        for layer in range(layers)
        for seed, name in enumerate(("gate", "up"))
    }
    model = source(tmp_path / "m", tensors, {"model_type": config, "num_hidden_layers": layers})
    out = changed(quantized(model, tmp_path / "q", Options("nvfp4")), tmp_path / "c", change)
    (out / "mxcli.json").unlink(missing_ok=True)
    result = verified(out, engines=engines)
    assert [each for each in found(result) if "fused" in each] == expected
    assert result.is_sound is sound
    if sound:
        (finding, *_) = next(each.findings for each in result.results if each.name == SOME[0])
        assert "one tensor scale for vLLM and SGLang, which would use one of them for the set" in finding.need
        assert "transformers keeps the layers apart" in finding.need


def test_experts_whose_scales_differ_are_wrong_for_all(tmp_path: Path) -> None:
    """transformers drops the tensor scales of experts, so that no engine reads them as they are."""
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{name}_proj.weight": noise(64, 64, seed=layer + seed)
        for layer in range(2)
        for expert in range(2)
        for seed, name in enumerate(("gate", "up"))
    }
    model = source(tmp_path / "m", tensors, {"model_type": "qwen3_moe"})
    out = changed(quantized(model, tmp_path / "q", Options("nvfp4")), tmp_path / "c", _apart)
    assert "fused_tensor_scale" in found(verified(out))


def test_the_query_of_cross_attention_may_be_plain(tmp_path: Path) -> None:
    tensors = {
        f"{at}.{name}_proj.weight": noise(64, 64, seed=seed) for at in (CROSS, SELF) for seed, name in enumerate("qkv")
    }
    model = source(tmp_path / "m", tensors, WHISPER)
    kept = Options("mxfp8", overrides=(Override(f"{CROSS}.q_proj", keep=True), Override(f"{SELF}.q_proj", keep=True)))
    result = found(verified(quantized(model, tmp_path / "q", kept)))
    assert result.get("fused_in_part") == [f"{SELF}.q_proj+k_proj+v_proj"]
