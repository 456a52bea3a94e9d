"""A source without layers or experts that its configuration counts is refused before anything is written."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from planted import source
from tiny_models import LLAMA, llama, noise

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.verify.incomplete import refuse_incomplete

SIZES = {
    **LLAMA,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "vocab_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
EXPERTS = {**SIZES, "model_type": "mixtral", "num_local_experts": 4}


def experts(*numbers: int) -> Mapping[str, object]:
    return {
        f"model.layers.{layer}.block_sparse_moe.experts.{number}.{part}.weight": noise(128, 64)
        for layer in range(2)
        for number in numbers
        for part in ("w1", "w3")
    }


def refusal(folder: Path, tensors: Mapping[str, object], config: Mapping[str, object]) -> str:
    with pytest.raises(InputError) as error:
        refuse_incomplete(open_checkpoint(source(folder / "m", tensors, config)))
    return str(error.value).replace(str(folder), "")


def test_layers_that_the_configuration_counts(tmp_path: Path) -> None:
    assert refusal(tmp_path, llama(2), {**SIZES, "num_hidden_layers": 4}) == (
        "/m: the source is not the model that its config.json states (with --no-verify it is quantized as it is): "
        "config.json: num_hidden_layers is 4, and 2 layers are here: 2 missing (model.layers.2, …); needed: as many "
        "layers as the configuration states. Restore the config.json of this checkpoint, or the tensors."
    )


def test_experts_that_the_configuration_counts(tmp_path: Path) -> None:
    assert "model.layers.1.block_sparse_moe.experts: 3 experts, without 2; needed: 4, as config.json states" in (
        refusal(tmp_path, {**llama(2), **experts(0, 1, 3)}, EXPERTS)
    )


@pytest.mark.parametrize(
    ("config", "refused"),
    [
        ({"vocab_size": 40}, "model.embed_tokens.weight: has shape [32, 64]"),
        ({"hidden_size": 32}, "needed: [32] by hidden_size of config.json"),
        ({"intermediate_size": 256}, "model.layers.0.mlp.down_proj.weight: has shape [64, 128]"),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight: has shape [32, 64]"),
    ],
)
def test_shapes_that_contradict_the_configuration(tmp_path: Path, config: dict[str, int], refused: str) -> None:
    assert refused in refusal(tmp_path, llama(2), {**SIZES, **config})


@pytest.mark.parametrize("part", ["input_layernorm.weight", "mlp.down_proj.weight", "self_attn.v_proj.weight"])
def test_a_layer_that_lacks_what_the_others_have(tmp_path: Path, part: str) -> None:
    name = f"model.layers.2.{part}"
    tensors = {key: tensor for key, tensor in llama(4).items() if key != name}
    assert f"{name}: missing" in refusal(tmp_path, tensors, {**SIZES, "num_hidden_layers": 4})


@pytest.mark.parametrize(
    ("more", "config"),
    [
        ({}, SIZES),
        ({}, {key: value for key, value in SIZES.items() if key != "num_hidden_layers"}),
        (experts(0, 1, 2, 3), EXPERTS),
    ],
    ids=["whole", "nothing counted", "experts"],
)
def test_whole_models_pass(tmp_path: Path, more: Mapping[str, object], config: Mapping[str, object]) -> None:
    refuse_incomplete(open_checkpoint(source(tmp_path / "m", {**llama(2), **more}, config)))


def test_one_of_several_shards_passes(tmp_path: Path) -> None:
    whole = source(tmp_path / "m", llama(1), {**SIZES, "num_hidden_layers": 4}) / "model.safetensors"
    shard = whole.rename(whole.with_name("model-00001-of-00002.safetensors"))
    shard.with_name("model-00002-of-00002.safetensors").write_bytes(shard.read_bytes())
    refuse_incomplete(open_checkpoint(shard))


def test_arrays_without_a_configuration_pass(tmp_path: Path) -> None:
    alone = (source(tmp_path / "m", llama(1), SIZES) / "model.safetensors").rename(tmp_path / "alone.safetensors")
    refuse_incomplete(open_checkpoint(alone))
