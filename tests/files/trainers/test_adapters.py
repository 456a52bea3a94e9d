"""PEFT adapters with whole modules are refused with the way to merge them; plain LoRA adapters are read as such."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raw_checkpoint import zeros

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint

Writer = Callable[..., Path]
LORA = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": zeros("F32", 2, 8),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": zeros("F32", 8, 2),
    "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": zeros("F32", 8),
}
HEAD = {"base_model.model.lm_head.weight": zeros("F32", 16, 8)}


@pytest.mark.parametrize(
    ("config", "tensors", "what"),
    [
        (
            {
                "peft_type": "LORA",
                "modules_to_save": ["lm_head", "embed_tokens"],
                "base_model_name_or_path": "org/base",
            },
            LORA | HEAD,
            "whole modules next to its matrices (modules_to_save: lm_head, embed_tokens); "
            "merge it into its base model (org/base) first: ",
        ),
        (
            {"peft_type": "LORA", "modules_to_save": ["score"]},
            LORA,
            "whole modules next to its matrices (modules_to_save: score); merge it into its base model first: ",
        ),
        (
            {"peft_type": "LORA", "modules_to_save": None},
            LORA | HEAD,
            "more than LoRA matrices (base_model.model.lm_head.weight); merge it into its base model first: ",
        ),
        (
            {},
            LORA | HEAD,
            "more than LoRA matrices (base_model.model.lm_head.weight); merge it into its base model first: ",
        ),
        (
            {"peft_type": "IA3"},
            {"base_model.model.model.layers.0.self_attn.q_proj.ia3_l": zeros("F32", 8, 1)},
            "more than LoRA matrices (base_model.model.model.layers.0.self_attn.q_proj.ia3_l); merge it into its base "
            "model first: ",
        ),
    ],
)
def test_whole_modules_must_be_merged(
    model: Writer, config: dict[str, Any], tensors: dict[str, Any], what: str
) -> None:
    root = model({"adapter_config.json": config, "adapter_model.safetensors": tensors})
    for source in (root, root / "adapter_model.safetensors"):
        with pytest.raises(InputError) as caught:
            open_checkpoint(source)
        assert str(caught.value) == (
            f"{root}: a PEFT adapter with {what}"
            f"PeftModel.from_pretrained(base, '{root}').merge_and_unload().save_pretrained(OUT)."
        )
        assert caught.value.exit_code == 3


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_model_that_is_not_merged(tmp_path: Path, prefix: str) -> None:
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    state = {
        f"{prefix}{layer}.base_layer.weight": torch.ones(8, 8),
        f"{prefix}{layer}.lora_A.default.weight": torch.ones(2, 8),
    }
    for saved in (state, {"model": state, "optimizer": {"x": torch.ones(2)}}):
        torch.save(saved, tmp_path / "x.pt")
        with pytest.raises(InputError) as caught:
            open_checkpoint(tmp_path / "x.pt")
        assert str(caught.value) == (
            f"{tmp_path}/x.pt: '{layer}.base_layer.weight' is of a model that PEFT has wrapped, with an adapter next "
            "to it; save what merge_and_unload() returns."
        )


@pytest.mark.parametrize("whole", ["score.weight", "model.layers.0.self_attn.q_proj.weight"])
def test_an_adapter_without_its_configuration(model: Writer, whole: str) -> None:
    layer = "base_model.model.model.layers.0.mlp.up_proj"
    tensors = {f"{layer}.lora_A.weight": zeros("BF16", 2, 8), f"{layer}.lora_B.weight": zeros("BF16", 8, 2)}
    assert open_checkpoint(model({"x.safetensors": tensors})).notes[0].startswith("LoRA adapter: all 2 tensors")
    root = model({"x.safetensors": {**tensors, f"base_model.model.{whole}": zeros("BF16", 8, 8)}})
    with pytest.raises(InputError, match=rf"'base_model\.model\.{whole}' is stored whole next to the LoRA matrices"):
        open_checkpoint(root)


def test_an_adapter_saved_by_pytorch(model: Writer) -> None:
    root = model({"adapter_config.json": {"modules_to_save": ["lm_head"]}})
    torch.save({"base_model.model.lm_head.weight": torch.ones(16, 8)}, root / "adapter_model.bin")
    with pytest.raises(InputError, match=r"with whole modules next to its matrices \(modules_to_save: lm_head\)"):
        open_checkpoint(root)


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING"])
def test_adapters_of_inputs(model: Writer, kind: str) -> None:
    entries = {"prompt_embeddings": zeros("F32", 20, 8)}
    root = model({"adapter_config.json": {"peft_type": kind}, "adapter_model.safetensors": entries})
    with pytest.raises(
        InputError, match=rf"a PEFT adapter of type {kind}, which adds inputs and has no weights of layers;"
    ):
        open_checkpoint(root)


@pytest.mark.parametrize("config", [{}, {"peft_type": "LORA", "modules_to_save": None}, {"modules_to_save": []}])
def test_plain_adapters_are_read(model: Writer, config: dict[str, Any]) -> None:
    root = model({"adapter_config.json": config, "adapter_model.safetensors": LORA})
    checkpoint = open_checkpoint(root)
    assert {info.role for info in checkpoint.tensors.values()} == {"lora"}
    assert checkpoint.notes == ("LoRA adapter: all 3 tensors belong to it; it is not a model by itself.",)


def test_an_adapter_next_to_its_model_is_left(model: Writer) -> None:
    config = {"modules_to_save": ["lm_head"]}
    entries = {"model.layers.0.self_attn.q_proj.weight": zeros("BF16", 8, 8)}
    root = model(
        {"adapter_config.json": config, "adapter_model.safetensors": LORA | HEAD, "model.safetensors": entries}
    )
    assert list(open_checkpoint(root).tensors) == list(entries)


def test_a_broken_configuration_is_named(model: Writer) -> None:
    root = model({"adapter_config.json": "[1]", "adapter_model.safetensors": LORA})
    with pytest.raises(InputError, match=r"adapter_config\.json: the top of the JSON is list, not an object"):
        open_checkpoint(root)
