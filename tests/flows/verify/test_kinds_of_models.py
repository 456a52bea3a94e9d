"""Models whose layers differ, or are counted, in ways of their own, where transformers cannot build them: their sources
are complete, and what they lose is found."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from planted import source
from tiny_models import noise

from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.verify.checks import expected
from mxcli.flows.verify.incomplete import refuse_incomplete

NORM = ("norm.weight", (32,))
WEIGHTS = [("mlp.up_proj.weight", (64, 32)), ("mlp.down_proj.weight", (32, 64)), NORM]
EXPANDED = [(f"expansion.expand_bn.{name}", (32,)) for name in ("weight", "bias", "running_mean")]
IDENTITY = [(f"identity.{name}", (32,)) for name in ("weight", "bias", "running_mean")]
GATE = [(f"k_message_gate.{name}_proj.weight", (32, 32)) for name in ("down", "message_gate")]
SHORTCUT = [("nin_shortcut.weight", (32, 32)), ("nin_shortcut.bias", (32,))]
QUERY = [("attention_input.query", (32,))]

Part = tuple[str, tuple[int, ...]]


@pytest.fixture(autouse=True)
def _without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "parameters_of", lambda subject: "transformers and torch are not installed")


def layers(stack: str, parts: list[list[Part]]) -> dict[str, Any]:
    return {
        f"{stack}.{number}.{name}": noise(*shape, seed=number)
        for number, each in enumerate(parts)
        for name, shape in each
    }


def check(folder: Path, tensors: Mapping[str, Any], config: Mapping[str, object]) -> None:
    refuse_incomplete(open_checkpoint(source(folder, tensors, config)))


BLOCKS = {
    "efficientnet": ("encoder.blocks", EXPANDED, 2, 6),
    "align": ("vision_model.encoder.blocks", EXPANDED, 2, 6),
    "align_vision_model": ("encoder.blocks", EXPANDED, 1, 4),
    "janus": ("model.vqmodel.encoder.down.2.block", SHORTCUT, 1, 4),
    "efficientloftr": ("backbone.stages.2.blocks", IDENTITY, 1, 4),
    "inkling2": ("language_model.layers", QUERY, 1, 4),
    "inkling2_text": ("layers", QUERY, 1, 4),
    "inkling2_loop": ("language_model.layers", [*QUERY, *GATE], 1, 4),
    "inkling2_loop_text": ("layers", GATE, 1, 6),
}


@pytest.mark.parametrize("model_type", BLOCKS)
def test_first_layers_that_lack_a_part_by_design(tmp_path: Path, model_type: str) -> None:
    stack, part, lacking, count = BLOCKS[model_type]
    parts = [WEIGHTS] * lacking + [[*WEIGHTS, *part]] * (count - lacking)
    check(tmp_path / "m", layers(stack, parts), {"model_type": model_type})


@pytest.mark.parametrize("model_type", BLOCKS)
def test_what_such_layers_lost_is_found(tmp_path: Path, model_type: str) -> None:
    stack, part, lacking, count = BLOCKS[model_type]
    parts = [WEIGHTS] * lacking + [[*WEIGHTS, *part]] * (count - lacking)
    tensors = layers(stack, parts)
    del tensors[f"{stack}.{count - 2}.norm.weight"]
    with pytest.raises(InputError, match=rf"{stack}\.{count - 2}\.norm\.weight: missing"):
        check(tmp_path / "m", tensors, {"model_type": model_type})


def counted(whole: int, text: int) -> dict[str, object]:
    return {"num_hidden_layers": whole, "text_config": {"num_hidden_layers": text}}


@pytest.mark.parametrize("config", [counted(1, 3), counted(5, 3), {"num_hidden_layers": 3, "text_config": {}}])
def test_layers_of_the_text_part_are_those_that_it_counts(tmp_path: Path, config: dict[str, object]) -> None:
    tensors = layers("text_model.encoder.layer", [WEIGHTS] * 3)
    check(tmp_path / "m", tensors, {"model_type": "clap", **config})


def test_layers_that_the_text_part_lost_are_found(tmp_path: Path) -> None:
    tensors = layers("text_model.encoder.layer", [WEIGHTS] * 3)
    with pytest.raises(InputError, match="num_hidden_layers is 4, and 3 layers are here: 1 missing"):
        check(tmp_path / "m", tensors, {"model_type": "bridgetower", **counted(3, 4)})


@pytest.mark.parametrize("part", ["depth_decoder.model", "protein_encoder.model.embeddings"])
def test_tables_of_other_parts_have_other_rows(tmp_path: Path, part: str) -> None:
    tensors = {
        "model.embed_tokens.weight": noise(64, 32),
        f"{part}.embed_tokens.weight": noise(96, 32),
        **layers("model.layers", [WEIGHTS] * 2),
    }
    check(tmp_path / "m", tensors, {"model_type": "csm", "vocab_size": 64, "num_hidden_layers": 2})


def test_models_that_count_in_their_own_way(tmp_path: Path) -> None:
    tensors = layers("backbone.layers", [WEIGHTS] * 2)
    check(tmp_path / "m", tensors, {"model_type": "dory", "num_hidden_layers": 4})
    experts = {f"model.layers.1.mlp.experts.{number}.up_proj.weight": noise(64, 32) for number in range(4)}
    check(tmp_path / "e", experts, {"model_type": "ernie4_5_vl_moe", "moe_num_experts": 2})
    with pytest.raises(InputError, match="4 experts; needed: 2"):
        check(tmp_path / "f", experts, {"model_type": "ernie4_5_moe", "moe_num_experts": 2})


def test_a_table_of_several_vocabularies(tmp_path: Path) -> None:
    tensors = {"embed_tokens.embed_tokens.weight": noise(96, 32), **layers("layers", [WEIGHTS] * 2)}
    check(tmp_path / "m", tensors, {"model_type": "kyutai_speech_to_text", "vocab_size": 64, "num_hidden_layers": 2})
    with pytest.raises(InputError, match=r"has shape \[96, 32\]"):
        check(tmp_path / "o", tensors, {"model_type": "llama", "vocab_size": 64, "num_hidden_layers": 2})


def stacked(width: int) -> dict[str, Any]:
    """Experts as mlx-lm writes them."""
    at = "model.layers.0.mlp.switch_mlp"
    return {
        f"{at}.{name}_proj.weight": noise(3, *shape, seed=seed)
        for seed, (name, shape) in enumerate({"gate": (width, 32), "up": (width, 32), "down": (32, width)}.items())
    }


def test_a_stack_of_matrices_has_the_shape_of_each(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "hidden_size": 32, "moe_intermediate_size": 64, "num_experts": 3}
    check(tmp_path / "m", stacked(64), config)
    with pytest.raises(InputError, match=r"down_proj\.weight: has shape \[32, 96\]"):
        check(tmp_path / "other", stacked(96), config)
