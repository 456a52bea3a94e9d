from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import SHARD, UP, Tensors, changed, found, quantized, source, values, verified
from tiny_models import LLAMA, bf16, layer, llama, noise, write_model

from mxcli.flows.plan.plan import Options

SIZES = {
    **LLAMA,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SAMPLES = Path(__file__).parents[2] / "data" / "layouts"


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four layers in MXFP8 without its record, as of another producer."""
    folder = tmp_path_factory.mktemp("model")
    output = quantized(source(folder / "m", llama(4), SIZES), folder / "q", Options("mxfp8"))
    (output / "mxcli.json").unlink()
    return output


def with_config(folder: Path, output: Path, **settings: object) -> Path:
    shutil.copytree(folder, output)
    config = json.loads((folder / "config.json").read_text())
    (output / "config.json").write_text(json.dumps(config | settings))
    return output


def test_a_model_without_a_record_is_checked_by_values(bare: Path) -> None:
    result = verified(bare)
    assert found(result) == {}
    assert (result.coverage.by_record, result.coverage.by_values) == (0, 28)
    assert result.coverage.proof == "not proven: there is no mxcli.json"


@pytest.mark.parametrize(
    ("settings", "check", "value"),
    [
        ({"num_hidden_layers": 5}, "layers", "1 missing (model.layers.4)"),
        ({"num_hidden_layers": 3}, "layers", "1 too many (model.layers.3)"),
        ({"hidden_size": 128}, "model_shape", "has shape [32, 64]"),
        ({"intermediate_size": 64}, "model_shape", "has shape [128, 64] (and 3 more of its kind)"),
        ({"vocab_size": 33}, "model_shape", "has shape [32, 64]"),
        ({"num_attention_heads": 8, "head_dim": 16}, "model_shape", "has shape [64, 64] (and 3 more of its kind)"),
        ({"num_key_value_heads": 4}, "model_shape", "has shape [32, 64] (and 3 more of its kind)"),
        ({"tie_word_embeddings": True}, "model_ends", "tie_word_embeddings is true"),
        ({"dtype": "float16"}, "model_dtype", "states float16, and plain tensors are BF16"),
    ],
)
def test_a_config_of_another_model_is_found(
    tmp_path: Path, bare: Path, settings: dict[str, object], check: str, value: str
) -> None:
    result = verified(with_config(bare, tmp_path / "q", **settings))
    assert any(value in each for each in values(result, check))


def without(*names: str) -> Any:
    def change(tensors: Tensors) -> None:
        for name in [each for each in tensors if each.startswith(names)]:
            del tensors[name]

    return change


def replaced(name: str, tensor: Any) -> Any:
    return lambda tensors: tensors.update({name: tensor})


def renamed(tensors: Tensors) -> None:
    tensors["model.layers.1.post_attn_norm.weight"] = tensors.pop("model.layers.1.post_attention_layernorm.weight")


def exchanged(tensors: Tensors) -> None:
    name = "model.layers.{}.mlp.up_proj.weight"
    tensors[name.format(2)][1][:] = tensors[name.format(1)][1]


NORM = "model.layers.2.input_layernorm.weight"
DAMAGES: dict[str, tuple[Any, dict[str, list[str]]]] = {
    "a layer": (without("model.layers.2."), {"layers": ["config.json"]}),
    "the last layer": (without("model.layers.3."), {"layers": ["config.json"]}),
    "a norm": (without(NORM), {"incomplete_layer": [NORM]}),
    "a weight": (without("model.layers.1.mlp.up_proj"), {"incomplete_layer": ["model.layers.1.mlp.up_proj.weight"]}),
    "the embedding": (without("model.embed_tokens"), {"model_ends": ["model.embed_tokens.weight"]}),
    "the head": (without("lm_head"), {"model_ends": ["lm_head.weight"]}),
    "the last norm": (without("model.norm"), {"model_ends": ["model.norm.weight"]}),
    "a name": (renamed, {"incomplete_layer": ["model.layers.1.post_attention_layernorm.weight"]}),
    "codes written over others": (exchanged, {"copied_codes": ["model.layers.2.mlp.up_proj.weight"]}),
    "a NaN norm": (replaced(NORM, ("BF16", np.full(64, 0x7FC0, np.uint16))), {"nan_plain": [NORM]}),
    "a zero norm": (
        replaced(NORM, ("BF16", np.zeros(64, np.uint16))),
        {"zero_plain": [NORM], "zero_norm": [NORM]},
    ),
    "an integer norm": (
        replaced(NORM, ("I16", np.ones(64, np.int16))),
        {"odd_type": [NORM], "odd_header": [NORM]},
    ),
    "a zero head": (
        replaced("lm_head.weight", ("BF16", np.zeros((32, 64), np.uint16))),
        {"zero_words": ["lm_head.weight"]},
    ),
    "an infinite head": (
        replaced("lm_head.weight", ("BF16", np.full((32, 64), 0x7F80, np.uint16))),
        {"nan_plain": ["lm_head.weight"]},
    ),
    "a huge embedding": (
        replaced("model.embed_tokens.weight", noise(32, 64, scale=2.0**20)),
        {"huge_plain": ["model.embed_tokens.weight"]},
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_lost_or_overwritten_is_found_without_a_record(tmp_path: Path, bare: Path, damage: str) -> None:
    change, places = DAMAGES[damage]
    assert places.items() <= found(verified(changed(bare, tmp_path / "q", change))).items()


def test_constant_norms_of_one_are_fine(tmp_path: Path, bare: Path) -> None:
    def ones(tensors: Tensors) -> None:
        for name, (dtype, array) in tensors.items():
            if name.endswith("norm.weight"):
                tensors[name] = (dtype, np.full_like(array, 0x3F80))

    assert found(verified(changed(bare, tmp_path / "q", ones))) == {}


def test_a_part_of_the_embedding_that_is_zero_is_found(tmp_path: Path) -> None:
    words = {**llama(), "model.embed_tokens.weight": noise(4096, 64, seed=3)}
    folder = quantized(source(tmp_path / "m", words), tmp_path / "q", Options("mxfp4"))
    (folder / "mxcli.json").unlink()

    def piece(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][1].reshape(-1)[40_010:60_000] = 0

    def end(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][1][4080:] = 0

    assert found(verified(changed(folder, tmp_path / "a", piece))) == {"zeros_within": ["model.embed_tokens.weight"]}
    assert found(verified(changed(folder, tmp_path / "b", end))) == {}


def test_experts_are_counted(tmp_path: Path) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{number}.{part}_proj.weight": noise(*shape, seed=number)
        for number in range(4)
        for part, shape in (("gate", (48, 32)), ("up", (48, 32)), ("down", (32, 48)))
    }
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 48, "num_experts": 4}
    tensors = {**experts, "model.layers.0.mlp.gate.weight": noise(4, 32)}
    folder = quantized(source(tmp_path / "m", tensors, config), tmp_path / "q", Options("nvfp4", layout="ct"))
    (folder / "mxcli.json").unlink()
    assert found(verified(folder)).keys() == {"some_loader"}  # transformers drops the tensor scales of experts
    result = verified(changed(folder, tmp_path / "lost", without("model.layers.0.mlp.experts.2.")))
    assert found(result)["experts"] == ["model.layers.0.mlp.experts"]
    assert values(result, "experts") == ["3 experts, without 2"]


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        (6, "4 experts, without 4"),
        (10**12, "4 experts, without 4"),
        (10**400, "4 experts, without 4"),
        (3, "4 experts"),
    ],
)
def test_numbers_of_experts_of_any_size_are_compared_at_once(tmp_path: Path, stated: int, value: str) -> None:
    experts = {
        f"model.layers.0.mlp.experts.{number}.{part}_proj.weight": noise(32, 32, seed=number)
        for number in range(4)
        for part in ("gate", "up", "down")
    }
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4}
    folder = quantized(source(tmp_path / "m", experts, config), tmp_path / "q", Options("nvfp4", layout="ct"))
    (folder / "mxcli.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": stated}))
    assert values(verified(folder), "experts") == [value]


@pytest.mark.parametrize(
    ("last", "stated", "value"),
    [
        (10**11, 2, "1 too many (model.layers.100000000000)"),
        (10**11, 10**12, "999,999,999,997 missing (model.layers.2, model.layers.3, model.layers.4, …)"),
        (9, 10**12, "999,999,999,997 missing (model.layers.2, model.layers.3, model.layers.4, …)"),
    ],
)
def test_numbers_of_layers_of_any_size_are_compared_at_once(tmp_path: Path, last: int, stated: int, value: str) -> None:
    layers = {f"model.layers.{number}.mlp.up_proj.weight": noise(32, 32, seed=number % 99) for number in (0, 1, last)}
    folder = quantized(source(tmp_path / "m", layers, {"num_hidden_layers": 3}), tmp_path / "q", Options("mxfp4"))
    (folder / "mxcli.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": stated}))
    (found_value,) = values(verified(folder), "layers")
    assert found_value.endswith(f"3 layers are here: {value}")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"num_hidden_layers": 10**500}, "config.json states num_hidden_layers more than 2^64, which is not built"),
        ({"num_hidden_layers": 300}, "config.json states num_hidden_layers 300, which is not built"),
        ({"text_config": {"num_experts": 10**6}}, "config.json states num_experts 1,000,000, which is not built"),
        ({"num_labels": 10**9}, "config.json states num_labels 1,000,000,000, which is not built"),
    ],
)
def test_a_model_of_very_many_parts_is_not_built(tmp_path: Path, change: dict[str, object], reason: str) -> None:
    pytest.importorskip("transformers")
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.verify.checks.parameters import parameters_of
    from mxcli.flows.verify.subject import subject_of

    folder = quantized(source(tmp_path / "m"), tmp_path / "q", Options("nvfp4"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    assert parameters_of(subject_of(open_checkpoint(folder))) == reason


@pytest.mark.slow
def test_names_and_shapes_are_compared_with_the_model_that_transformers_builds(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from mxcli.backends.cpu import Cpu
    from mxcli.files.checkpoint import open_checkpoint
    from mxcli.flows.verify.subject import subject_of
    from mxcli.flows.verify.verify import verify_subject

    sample = SAMPLES / "llama64-ct-nvfp4a16"
    sound = verify_subject("s", subject_of(open_checkpoint(sample)), backend=Cpu(), deep=True)
    assert sound.coverage.model == "LlamaForCausalLM of transformers"
    assert sound.is_sound
    folder = changed(sample, tmp_path / "q", without("model.layers.0.post_attention", "model.layers.1.post_attention"))
    result = verify_subject("q", subject_of(open_checkpoint(folder)), backend=Cpu(), deep=True)
    assert found(result)["missing_parameter"] == [
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    ]


def test_a_format_that_is_not_read_is_not_the_fault_of_the_file(tmp_path: Path) -> None:
    spec = {"dtype": "fp8_e4m3", "qscheme": "per_row", "group_size": None, "ch_axis": 0, "is_dynamic": False}
    settings = {
        "quant_method": "quark",
        "exclude": ["lm_head"],
        "global_quant_config": {"weight": spec | {"dtype": "x"}},
    }
    tensors: dict[str, Any] = {"model.embed_tokens.weight": noise(32, 64)}
    for name, (_, array) in layer().items():
        tensors[name] = ("F8_E4M3", array.astype(np.uint8)) if array.ndim == 2 else ("BF16", array)
        if array.ndim == 2:
            tensors[f"{name}_scale"] = ("F32", np.ones(len(array), np.float32))
    result = verified(write_model(tmp_path / "q", tensors, {**LLAMA, "quantization_config": settings}))
    assert result.counts == {}
    assert not result.is_sound
    assert result.coverage.is_empty
    assert result.coverage.unchecked == 7
    assert result.coverage.unread is not None
    assert "cannot read the weights of '*'" in result.coverage.unread


def test_codes_of_a_page_that_are_lost_are_found(tmp_path: Path, bare: Path) -> None:
    def zeros(tensors: Tensors) -> None:
        tensors[UP][1].reshape(-1)[1000:5096] = 0

    def ones(tensors: Tensors) -> None:
        tensors[UP][1].reshape(-1)[1024:4096] = 0x77

    assert found(verified(changed(bare, tmp_path / "z", zeros)))["emptied_blocks"] == [UP]
    assert found(verified(changed(bare, tmp_path / "o", ones)))["constant_codes"] == [UP]


def test_scales_that_no_rule_gives_are_found(tmp_path: Path, bare: Path) -> None:
    scales = f"{UP}_scale"

    def smallest(tensors: Tensors) -> None:
        tensors[scales][1][:8] = 0

    def farthest(tensors: Tensors) -> None:
        tensors[scales][1][3, 1] += 20

    assert found(verified(changed(bare, tmp_path / "s", smallest)))["odd_scales"] == [scales]
    assert found(verified(changed(bare, tmp_path / "f", farthest)))["odd_scales"] == [scales]


def test_shards_and_documents_are_looked_for(tmp_path: Path, bare: Path) -> None:
    folder = shutil.copytree(bare, tmp_path / "q")
    for content in ('{"a": [1, 2', "", "9" * 5000):
        (folder / "tokenizer.json").write_text(content)
        assert found(verified(folder)) == {"document": ["tokenizer.json"]}
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/proc/kmsg")  # waits for its reader
    assert set(found(verified(folder))) <= {"document"}
    (folder / "tokenizer.json").unlink()
    (folder / SHARD).rename(folder / "model-00001-of-00002.safetensors")
    write_model(tmp_path / "two", {"lm_head2.weight": noise(32, 64)})
    shutil.copy(tmp_path / "two" / SHARD, folder / "model-00002-of-00002.safetensors")
    assert "shards" in found(verified(folder))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers whose rows differ in size, as in trained weights, without a record."""
    tensors = llama(5)
    for place, (name, (_, array)) in enumerate(tensors.items()):
        if array.ndim == 2:
            sizes = 2.0 ** np.random.default_rng(place).standard_normal((len(array), 1))
            values = np.random.default_rng(1000 + place).standard_normal(array.shape) * sizes
            tensors[name] = bf16(values)
    folder = tmp_path_factory.mktemp("rows")
    output = quantized(source(folder / "m", tensors, {**SIZES, "num_hidden_layers": 5}), folder / "q", Options("nvfp4"))
    (output / "mxcli.json").unlink()
    return output


def test_scales_out_of_order_are_found_among_siblings(tmp_path: Path, rows: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight_scale"

    def shuffled(tensors: Tensors) -> None:
        np.random.default_rng(1).shuffle(tensors[name][1].reshape(-1))

    def larger(tensors: Tensors) -> None:
        tensors["model.layers.2.self_attn.o_proj.weight_global_scale"][1][:] /= 2**9

    assert found(verified(rows)) == {}
    result = verified(changed(rows, tmp_path / "l", larger))
    assert found(result)["odd_magnitude"] == ["model.layers.2.self_attn.o_proj.weight"]
    assert found(verified(changed(rows, tmp_path / "s", shuffled))) == {"odd_order": [name]}
