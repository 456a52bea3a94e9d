"""mlx-lm loads the layout mlx on a CPU, every layer is what it was dequantized to, and what it converts is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lazy import Lazy, needs
from planted import found, quantized, verified

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options
from mxcli.flows.write.dequantize import dequantize_checkpoint

pytestmark = [pytest.mark.slow, needs("mlx", "mlx_lm", "torch", "transformers")]
mx: Any = Lazy("mlx.core")
lm: Any = Lazy("mlx_lm.utils")
torch: Any = Lazy("torch")
transformers: Any = Lazy("transformers")

NVFP4 = "e2m1:e4m3:1x16"
SIZES = {
    "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip
OF_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Gemma2": {"tie_word_embeddings": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, **OF_EXPERTS},
    "Qwen3Moe": {"num_experts": 4, "decoder_sparse_step": 1, **OF_EXPERTS},
    "DeepseekV3": {
        "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1,
        "topk_group": 1, **OF_EXPERTS,
    },
}  # fmt: skip
LIKE_FILES = {"num_experts": 4, "rope_theta": 10000.0}
"""Settings of published configurations that transformers no longer writes and mlx-lm needs."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    def model(name: str) -> Path:
        folder = Path(tmp_path_factory.getbasetemp()) / f"mlx-{name}"
        if not folder.exists():
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**{**SIZES, **MODELS[name]})
            getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16).save_pretrained(folder)
            stated = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps({**LIKE_FILES, **stated}))
        return folder

    return model


@pytest.fixture(autouse=True)
def _on_a_cpu() -> None:
    mx.set_default_device(mx.cpu)


def dequantized(folder: Path) -> Path:
    plain = folder.with_name(f"{folder.name}-plain")
    dequantize_checkpoint(open_checkpoint(folder), plain, backend=Cpu())
    return plain


def converted(source: Path, output: Path, mode: str, choose: Callable[..., Any] | None = None, **more: Any) -> Path:
    """What mlx_lm.convert writes of a model, without its tokenizer."""
    model, config = lm.load_model(source)
    model, config = lm.quantize_model(model, config, None, None, mode, quant_predicate=choose, **more)
    output.mkdir()
    lm.save_model(output, model)
    lm.save_config(config, output / "config.json")
    return output


def values_of_mlx(folder: Path) -> Iterator[tuple[str, Any]]:
    """Each quantized weight of a checkpoint, by name, as mx.dequantize decodes it in the mode stated for it."""
    tensors = mx.load(str(folder / "model.safetensors"))
    stated = json.loads((folder / "config.json").read_text())["quantization"]
    for name in tensors:
        if name.endswith(".scales"):
            module = name.removesuffix(".scales")
            own = {key: stated.get(module, stated)[key] for key in ("group_size", "bits", "mode")}
            codes = tensors[f"{module}.weight"]
            yield f"{module}.weight", mx.dequantize(codes, tensors[name], None, **own, dtype=mx.bfloat16)


def assert_equal_values(folder: Path, plain: Path) -> int:
    """Compare the values of all weights bit by bit, and return how many there are."""
    ours, count = mx.load(str(plain / "model.safetensors")), 0
    for name, values in values_of_mlx(folder):
        found = ours[name] if name in ours else mx.stack(list(experts_of(ours, name)))
        assert found.dtype == mx.bfloat16
        assert mx.array_equal(found.view(mx.uint16), values.view(mx.uint16)).item(), name
        count += 1
    return count


def experts_of(tensors: Any, stack: str) -> Iterator[Any]:
    """The matrices of a stack of mlx-lm in a checkpoint that holds them one by one."""
    layer, part = stack.removesuffix(".weight").split(".switch_mlp.")
    part = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}[part] if "block_sparse_moe" in layer else part
    number = 0
    while (matrix := tensors.get(f"{layer}.experts.{number}.{part}.weight")) is not None:
        yield matrix
        number += 1


def difference_of_outputs(one: Path, other: Path) -> float:
    """Load two checkpoints in mlx-lm, and return how much their outputs differ in binary32."""
    outputs = []
    for folder in (one, other):
        model, _ = lm.load_model(folder)
        model.set_dtype(mx.float32)
        outputs.append(model(mx.array([[1, 2, 3, 4, 5]])))
    return float(mx.linalg.norm(outputs[0] - outputs[1]) / mx.linalg.norm(outputs[1]))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", NVFP4])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Mixtral", "Qwen2Moe"])
def test_mlx_lm_computes_what_the_weights_are(
    models: Callable[[str], Path], tmp_path: Path, name: str, format: str
) -> None:
    folder = quantized(models(name), tmp_path / "q", Options(format, layout="mlx"))
    plain = dequantized(folder)
    assert assert_equal_values(folder, plain) >= 14
    assert difference_of_outputs(folder, plain) < 1e-5
    result = verified(folder, models(name))
    assert result.is_sound
    assert found(result) == {}


def test_mixed_modes_and_kept_layers(models: Callable[[str], Path], tmp_path: Path) -> None:
    overrides = (
        Override("*.mlp.*", "mxfp8"), Override("*.o_proj", NVFP4), Override("*layers.1.self_attn.*", keep=True)
    )  # fmt: skip
    folder = quantized(models("Llama"), tmp_path / "q", Options("mxfp4", overrides=overrides, layout="mlx"))
    plain = dequantized(folder)
    assert assert_equal_values(folder, plain) == 10
    assert difference_of_outputs(folder, plain) < 1e-5
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"]["mode"] == "mxfp8"
    assert config["quantization"]["model.layers.0.self_attn.o_proj"]["mode"] == "nvfp4"


def test_experts_that_mlx_lm_stacks_without_their_scales(models: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized(models("Qwen3Moe"), tmp_path / "q", Options("mxfp4", layout="mlx"))
    with pytest.raises(ValueError, match=r"(?s)Received 24 parameters not in model:.*experts\.0\.down_proj\.scales"):
        lm.load_model(folder)
    keep = (Override("*.experts.*", keep=True),)
    folder = quantized(models("Qwen3Moe"), tmp_path / "kept", Options("mxfp4", overrides=keep, layout="mlx"))
    assert difference_of_outputs(folder, dequantized(folder)) < 1e-5


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Mixtral"])
def test_what_it_converts_is_read(models: Callable[[str], Path], tmp_path: Path, name: str, mode: str) -> None:
    folder = converted(models(name), tmp_path / "c", mode)
    assert assert_equal_values(folder, dequantized(folder)) == {"Llama": 16, "Qwen2": 15, "Mixtral": 18}[name]
    result = verified(folder, models(name))
    assert result.is_sound
    assert all(each.distance is not None for each in result.weights)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_a_projection_that_it_divides_is_compared(models: Callable[[str], Path], tmp_path: Path, mode: str) -> None:
    """Latent attention: mlx-lm stores the keys and the values of kv_b_proj by heads, the keys transposed."""
    source = models("DeepseekV3")
    folder = converted(source, tmp_path / "c", mode)
    plain = dequantized(folder)
    assert assert_equal_values(folder, plain) >= 20
    assert difference_of_outputs(folder, plain) < 1e-5
    result = verified(folder, source)
    assert not {"missing", "extra", "shape"} & found(result).keys()
    assert all(each.distance is not None for each in result.weights)
    assert {each.name for each in result.weights} >= {
        f"model.layers.{layer}.self_attn.{part}.weight" for layer in range(2) for part in ("embed_q", "unembed_out")
    }
    keep = (Override("*.kv_b_proj", keep=True),)
    ours = quantized(source, tmp_path / "q", Options(NVFP4 if mode == "nvfp4" else mode, overrides=keep, layout="mlx"))
    assert difference_of_outputs(ours, dequantized(ours)) < 1e-5


def test_mixed_conversions_are_read_and_their_rules_are_found(models: Callable[[str], Path], tmp_path: Path) -> None:
    modes = {"down_proj": (32, 8, "mxfp8"), "o_proj": (16, 4, "nvfp4")}

    def choose(path: str, module: Any) -> Any:
        group, bits, mode = modes.get(path.rpartition(".")[2], (32, 4, "mxfp4"))
        return {"group_size": group, "bits": bits, "mode": mode} if "lm_head" not in path else False

    folder = converted(models("Llama"), tmp_path / "c", "mxfp4", choose)
    assert assert_equal_values(folder, dequantized(folder)) == 15
    result = verified(folder, models("Llama"))
    assert result.is_sound
    schemes = {each.format: each.provenance for each in result.weights}
    assert {name: one is not None and one.exact and one.scheme.dialect.name for name, one in schemes.items()} == {
        "mxfp4_e2m1": "mlx-cpu",
        "mxfp8_e4m3": "mlx",
        NVFP4: "mlx-cpu",
    }


def test_what_is_not_read_is_refused_by_name(models: Callable[[str], Path], tmp_path: Path) -> None:
    affine = converted(models("Llama"), tmp_path / "affine", "affine")
    with pytest.raises(InputError, match=r"\(and 15 more\): its mode is affine, integers with a scale and a bias"):
        dequantized(affine)
    scaled = converted(models("Mixtral"), tmp_path / "scaled", "nvfp4", global_scale=True)
    with pytest.raises(InputError, match="its nvfp4 has a tensor scale for each expert"):
        dequantized(scaled)
