from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from planted import Tensors, changed, found, quantized, source, values, verified
from tiny_models import LLAMA, bf16, llama, noise

from mxcli.flows.plan.plan import Options

HIDDEN, WIDE, WORDS = 64, 128, 32


def norms(*names: str) -> Iterator[tuple[str, Any]]:
    for name in names:
        yield f"{name}.weight", noise(HIDDEN, seed=len(name))
        yield f"{name}.bias", noise(HIDDEN, seed=1 + len(name))


def linear(module: str, rows: int, columns: int) -> dict[str, Any]:
    return {f"{module}.weight": noise(rows, columns, seed=crc32(module.encode()))}


def bart_layer(at: str, *, crossed: bool = False) -> dict[str, Any]:
    tensors = dict(norms(f"{at}.self_attn_layer_norm", f"{at}.final_layer_norm"))
    for part in ("q", "k", "v", "out"):
        tensors |= linear(f"{at}.self_attn.{part}_proj", HIDDEN, HIDDEN)
        if crossed:
            tensors |= linear(f"{at}.encoder_attn.{part}_proj", HIDDEN, HIDDEN)
    tensors |= linear(f"{at}.fc1", WIDE, HIDDEN) | linear(f"{at}.fc2", HIDDEN, WIDE)
    return tensors | (dict(norms(f"{at}.encoder_attn_layer_norm")) if crossed else {})


def opt() -> tuple[dict[str, Any], dict[str, Any]]:
    tensors = {
        "model.decoder.embed_tokens.weight": noise(WORDS, HIDDEN, seed=1),
        "model.decoder.embed_positions.weight": noise(18, HIDDEN, seed=2),
        **dict(norms("model.decoder.final_layer_norm")),
    }
    for number in range(3):
        tensors |= bart_layer(f"model.decoder.layers.{number}")
    sizes = {"num_hidden_layers": 3, "hidden_size": HIDDEN, "ffn_dim": WIDE, "word_embed_proj_dim": HIDDEN}
    return tensors, {"model_type": "opt", "architectures": ["OPTForCausalLM"], **sizes}


def bart(model_type: str, name: str, *ends: str, shared: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {} if not shared else {"model.shared.weight": noise(WORDS, HIDDEN, seed=1)}
    tensors |= dict(norms(*(f"model.{side}.{end}" for side in ("encoder", "decoder") for end in ends)))
    if not shared:
        tensors["model.decoder.embed_tokens.weight"] = noise(WORDS, HIDDEN, seed=1)
        tensors["model.encoder.conv1.weight"] = noise(HIDDEN, 8, 3, seed=9)
    for side, count in (("encoder", 2), ("decoder", 3)):
        tensors[f"model.{side}.embed_positions.weight"] = noise(18, HIDDEN, seed=len(side))
        for number in range(count):
            tensors |= bart_layer(f"model.{side}.layers.{number}", crossed=side == "decoder")
    sizes = {"encoder_layers": 2, "decoder_layers": 3, "num_hidden_layers": 2, "d_model": HIDDEN}
    sizes |= {"encoder_ffn_dim": WIDE, "decoder_ffn_dim": WIDE}
    return tensors, {"model_type": model_type, "architectures": [name], "is_encoder_decoder": True, **sizes}


def t5() -> tuple[dict[str, Any], dict[str, Any]]:
    tensors: dict[str, Any] = {"shared.weight": noise(WORDS, HIDDEN, seed=1)}
    for side in ("encoder", "decoder"):
        tensors[f"{side}.final_layer_norm.weight"] = noise(HIDDEN, seed=3)
        for number in range(2):
            attentions = ("SelfAttention", "EncDecAttention")[: 1 + (side == "decoder")]
            for at, attention in enumerate(attentions):
                place = f"{side}.block.{number}.layer.{at}"
                tensors[f"{place}.layer_norm.weight"] = noise(HIDDEN, seed=4)
                for part in "qkvo":
                    tensors |= linear(f"{place}.{attention}.{part}", HIDDEN, HIDDEN)
            if number == 0:
                bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
                tensors[bias] = noise(32, 4, seed=7)
            place = f"{side}.block.{number}.layer.{len(attentions)}"
            tensors[f"{place}.layer_norm.weight"] = noise(HIDDEN, seed=6)
            tensors |= linear(f"{place}.DenseReluDense.wi", WIDE, HIDDEN)
            tensors |= linear(f"{place}.DenseReluDense.wo", HIDDEN, WIDE)
    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": HIDDEN, "d_ff": WIDE, "d_kv": 16, "num_heads": 4}
    return tensors, {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        **sizes,
    }


MODELS = {
    "opt": opt(),
    "bart": bart("bart", "BartForConditionalGeneration", "layernorm_embedding"),
    "mbart": bart("mbart", "MBartForConditionalGeneration", "layernorm_embedding", "layer_norm"),
    "marian": bart("marian", "MarianMTModel"),
    "whisper": bart("whisper", "WhisperForConditionalGeneration", "layer_norm", shared=False),
    "t5": t5(),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Each family in MXFP8 without a record, as of another producer."""
    found = {}
    for name, (tensors, config) in MODELS.items():
        folder = tmp_path_factory.mktemp(name)
        settings = {"dtype": "bfloat16", "vocab_size": WORDS, "tie_word_embeddings": True, **config}
        found[name] = quantized(source(folder / "m", tensors, settings), folder / "q", Options("mxfp8"))
        (found[name] / "mxcli.json").unlink()
    return found


@pytest.mark.parametrize("family", MODELS)
def test_sound_models_of_other_families_are_sound(folders: Mapping[str, Path], family: str) -> None:
    assert found(verified(folders[family])) == {}


@pytest.mark.parametrize(
    ("family", "removed", "check", "where"),
    [
        ("opt", "model.decoder.embed_tokens", "model_ends", "model.decoder.embed_tokens.weight"),
        ("opt", "model.decoder.embed_positions", "model_ends", "decoder.embed_positions.weight"),
        ("opt", "model.decoder.final_layer_norm", "model_ends", "decoder.final_layer_norm.weight"),
        ("opt", "model.decoder.layers.1.", "layers", "config.json"),
        ("opt", "model.decoder.layers.2.", "layers", "config.json"),
        ("bart", "model.shared", "model_ends", "shared.weight"),
        ("bart", "model.encoder.layernorm_embedding", "model_ends", "encoder.layernorm_embedding.weight"),
        ("bart", "model.encoder.layers.1.", "layers", "config.json"),
        ("bart", "model.decoder.layers.0.", "layers", "config.json"),
        ("bart", "model.encoder.layers.", "layers", "config.json"),
        ("mbart", "model.decoder.layer_norm", "model_ends", "decoder.layer_norm.weight"),
        ("mbart", "model.decoder.layers.2.", "layers", "config.json"),
        ("marian", "model.decoder.layers.1.", "layers", "config.json"),
        ("marian", "model.decoder.layers.", "layers", "config.json"),
        ("whisper", "model.decoder.embed_tokens", "model_ends", "shared.weight"),
        ("whisper", "model.encoder.layer_norm", "model_ends", "encoder.layer_norm.weight"),
        ("whisper", "model.encoder.layers.0.", "layers", "config.json"),
        ("t5", "shared.", "model_ends", "shared.weight"),
        ("t5", "decoder.final_layer_norm", "model_ends", "decoder.final_layer_norm.weight"),
        ("t5", "encoder.block.1.", "layers", "config.json"),
        ("t5", "decoder.block.1.", "layers", "config.json"),
    ],
)
def test_parts_that_are_missing_are_found(
    tmp_path: Path, folders: Mapping[str, Path], family: str, removed: str, check: str, where: str
) -> None:
    def without(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(removed)]:
            del tensors[name]

    assert where in found(verified(changed(folders[family], tmp_path / "q", without)))[check]


@pytest.mark.parametrize(
    ("family", "settings", "check", "value"),
    [
        ("opt", {"num_hidden_layers": 4}, "layers", "1 missing (model.decoder.layers.3)"),
        ("opt", {"num_hidden_layers": 2}, "layers", "1 too many (model.decoder.layers.2)"),
        ("opt", {"hidden_size": 128}, "model_shape", "has shape [64, 64]"),
        ("opt", {"ffn_dim": 64}, "model_shape", "has shape [128, 64]"),
        ("opt", {"vocab_size": 64}, "model_shape", "has shape [32, 64]"),
        ("bart", {"encoder_layers": 3}, "layers", "1 missing (model.encoder.layers.2)"),
        ("bart", {"decoder_layers": 2}, "layers", "1 too many (model.decoder.layers.2)"),
        ("bart", {"d_model": 32}, "model_shape", "has shape [64, 64]"),
        ("mbart", {"decoder_ffn_dim": 64}, "model_shape", "has shape [128, 64]"),
        ("marian", {"d_model": 128}, "model_shape", "has shape [32, 64]"),
        ("whisper", {"encoder_layers": 1}, "layers", "1 too many (model.encoder.layers.1)"),
        ("whisper", {"vocab_size": 30}, "model_shape", "has shape [32, 64]"),
        ("t5", {"num_layers": 3}, "layers", "1 missing (encoder.block.2)"),
        ("t5", {"num_decoder_layers": 1}, "layers", "1 too many (decoder.block.1)"),
        ("t5", {"d_kv": 32}, "model_shape", "has shape [64, 64]"),
        ("t5", {"d_ff": 64}, "model_shape", "has shape [128, 64]"),
    ],
)
def test_a_config_of_another_model_is_found(
    tmp_path: Path, folders: Mapping[str, Path], family: str, settings: dict[str, object], check: str, value: str
) -> None:
    output = shutil.copytree(folders[family], tmp_path / "q")
    config = json.loads((output / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | settings))
    assert any(value in each for each in values(verified(output), check))


def test_an_encoder_of_images_does_not_count_as_layers_of_text(tmp_path: Path) -> None:
    tensors, config = MODELS["opt"]
    others = {f"qformer.encoder.layer.{number}.attention.weight": noise(32, 32, seed=number) for number in range(5)}
    named = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    text = {**config, "vocab_size": WORDS}
    settings = {"model_type": "blip-2", "dtype": "bfloat16", "text_config": text, "architectures": ["Blip2Model"]}
    output = quantized(source(tmp_path / "m", named | others, settings), tmp_path / "q", Options("mxfp8"))
    (output / "mxcli.json").unlink()
    assert found(verified(output)) == {}


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text", "qwen3_next", "llama"])
def test_norms_that_add_one_begin_as_zeros(tmp_path: Path, model_type: str) -> None:
    tensors = {name: bf16([0.0] * HIDDEN) if name.endswith("norm.weight") else each for name, each in llama().items()}
    config = {**LLAMA, "model_type": model_type}
    output = quantized(source(tmp_path / "m", tensors, config), tmp_path / "q", Options("mxfp8"))
    (output / "mxcli.json").unlink()
    zeros = ["model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"]
    expected = {"zero_plain": [f"{name}.weight" for name in zeros]} if model_type == "llama" else {}
    assert found(verified(output)) == expected


@pytest.mark.parametrize("layout", ["mxcli", "compressed-tensors"])
@pytest.mark.parametrize("model_type", ["gpt2", "gptj", "gpt_neo", "gpt_neox", "bloom", "falcon", "mpt", "opt", "t5"])
def test_a_model_type_with_other_names_is_found(tmp_path: Path, model_type: str, layout: str) -> None:
    output = quantized(source(tmp_path / "m"), tmp_path / "q", Options("mxfp4", layout=layout))
    (output / "mxcli.json").unlink()
    config = json.loads((output / "config.json").read_text())
    config = {"model_type": model_type, "quantization_config": config["quantization_config"]}
    (output / "config.json").write_text(json.dumps(config))
    result = verified(output)
    assert found(result)["model_type"] == ["config.json"]
    (value,) = values(result, "model_type")
    assert value.startswith(
        f"model_type is {model_type}, and the tensors have the names of other models: model.layers.0.self_attn."
    )


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gpt2", "gpt_neox", "bart"])
@pytest.mark.parametrize("family", ["opt", "t5"])
def test_other_families_are_told_apart(
    tmp_path: Path, folders: Mapping[str, Path], family: str, model_type: str
) -> None:
    output = shutil.copytree(folders[family], tmp_path / "q")
    config = json.loads((output / "config.json").read_text())
    config = {"model_type": model_type, "quantization_config": config["quantization_config"]}
    (output / "config.json").write_text(json.dumps(config))
    # Layers of OPT have the names of a decoder of BART.
    expected = [] if (family, model_type) == ("opt", "bart") else ["config.json"]
    assert found(verified(output)).get("model_type", []) == expected


def test_names_of_no_known_family_are_no_problem(tmp_path: Path) -> None:
    tensors = {name.replace("self_attn", "mixer"): each for name, each in llama().items()}
    output = quantized(source(tmp_path / "m", tensors), tmp_path / "q", Options("mxfp4"))
    (output / "mxcli.json").unlink()
    assert "model_type" not in found(verified(output))
