"""--against of checkpoints whose producer stacked experts, divided a projection by heads, or wrote names of memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted import Tensors, changed, found, quantized, source, verified
from tiny_models import noise

from mxcli.flows.plan.overrides import Override
from mxcli.flows.plan.plan import Options

EXPERTS, HEADS, LATENT, NOPE, VALUE = 3, 2, 32, 32, 16
MIXTURE = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def _moved(tensors: Tensors, module: str, stack: str, names: dict[str, str], order: tuple[int, ...]) -> None:
    """Stack the experts of a module as mlx-lm does, in an order."""
    for part, name in names.items():
        for ending in ("weight", "scales"):
            each = [tensors.pop(f"{module}.experts.{number}.{name}.{ending}") for number in range(EXPERTS)]
            tensors[f"{stack}.{part}.{ending}"] = (each[0][0], np.stack([each[number][1] for number in order]))


def _experts(
    folder: Path, layer: str, names: dict[str, str], order: tuple[int, ...] = (0, 1, 2)
) -> tuple[Path, Path, Callable[[Tensors], None]]:
    """A model with experts, its output, and the change that stacks them."""
    shapes = {"gate_proj": (64, 32), "up_proj": (64, 32), "down_proj": (32, 64)}
    tensors = {
        f"{layer}.experts.{number}.{name}.weight": noise(*shapes[part], seed=10 * number + len(part))
        for number in range(EXPERTS)
        for part, name in names.items()
    }
    model = source(folder / "m", tensors, {"model_type": "mixtral"})
    out = quantized(model, folder / "q", Options("mxfp8", layout="mlx"))
    return model, out, lambda each: _moved(each, layer, f"{layer}.switch_mlp", names, order)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ("model.layers.0.block_sparse_moe", MIXTURE),
        ("model.layers.0.mlp", {part: part for part in MIXTURE}),
        ("language_model.model.layers.0.mlp", {part: part for part in MIXTURE}),
    ],
)
def test_stacks_are_compared_with_the_experts(tmp_path: Path, layer: str, names: dict[str, str]) -> None:
    model, out, stack = _experts(tmp_path, layer, names)
    result = verified(_unrecorded(changed(out, tmp_path / "c", stack)), model)
    assert not {"missing", "extra", "shape", "far", "swapped"} & found(result).keys()
    assert len(result.compared) == 3
    assert all(each.provenance is not None and each.provenance.exact for each in result.weights)


def test_experts_in_another_order_are_other_values(tmp_path: Path) -> None:
    model, out, stack = _experts(tmp_path, "model.layers.0.mlp", {part: part for part in MIXTURE}, (0, 2, 1))
    result = verified(_unrecorded(changed(out, tmp_path / "c", stack)), model)
    assert not result.is_sound
    assert not any(each.provenance is not None and each.provenance.exact for each in result.weights)


def test_a_stack_that_is_lost_is_missing(tmp_path: Path) -> None:
    model, out, stack = _experts(tmp_path, "model.layers.0.mlp", {part: part for part in MIXTURE})

    def lose(tensors: Tensors) -> None:
        stack(tensors)
        for ending in ("weight", "scales"):
            del tensors[f"model.layers.0.mlp.switch_mlp.up_proj.{ending}"]

    names = [f"model.layers.0.mlp.experts.{number}.up_proj.weight" for number in range(EXPERTS)]
    assert found(verified(_unrecorded(changed(out, tmp_path / "c", lose)), model))["missing"] == names


def _of_heads(tensors: Tensors) -> None:
    dtype, whole = tensors.pop("model.layers.0.self_attn.kv_b_proj.weight")
    by_head = whole.reshape(HEADS, NOPE + VALUE, LATENT)
    tensors["model.layers.0.self_attn.embed_q.weight"] = (dtype, by_head[:, :NOPE].swapaxes(1, 2).copy())
    tensors["model.layers.0.self_attn.unembed_out.weight"] = (dtype, by_head[:, NOPE:].copy())


def _damaged(tensors: Tensors) -> None:
    _of_heads(tensors)
    tensors["model.layers.0.self_attn.unembed_out.weight"][1][1, 3, 5] ^= 0x4000


def _half(tensors: Tensors) -> None:
    _of_heads(tensors)
    del tensors["model.layers.0.self_attn.unembed_out.weight"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_of_heads, {}),
        (_damaged, {"damaged": ["model.layers.0.self_attn.unembed_out.weight"]}),
        (
            _half,
            {
                "missing": ["model.layers.0.self_attn.kv_b_proj.weight"],
                "extra": ["model.layers.0.self_attn.embed_q.weight"],
            },
        ),
    ],
)
def test_a_projection_of_all_heads_may_be_two(
    tmp_path: Path, change: Callable[[Tensors], None], expected: dict[str, list[str]]
) -> None:
    at = "model.layers.0.self_attn"
    tensors = {
        f"{at}.kv_b_proj.weight": noise(HEADS * (NOPE + VALUE), LATENT, seed=1),
        f"{at}.o_proj.weight": noise(64, 32, seed=2),
    }
    model = source(tmp_path / "m", tensors, {"model_type": "deepseek_v3"})
    keep = (Override("*.kv_b_proj", keep=True),)
    out = quantized(model, tmp_path / "q", Options("mxfp8", layout="mlx", overrides=keep))
    result = found(verified(_unrecorded(changed(out, tmp_path / "c", change)), model))
    assert {name: where for name, where in result.items() if name in ("missing", "extra", "damaged")} == expected


@pytest.mark.parametrize(
    ("stored", "called", "config"),
    [
        ("embed_out.weight", "lm_head.weight", "gpt_neox"),
        ("model.layers.0.self_attn.g_proj.weight", "model.layers.0.self_attn.gate_proj.weight", "dory"),
        ("model.layers.0.attention.wo.weight", "model.layers.0.self_attn.o_proj.weight", "molmo2"),
        ("encoder.layer.0.intermediate.dense.weight", "encoder.layers.0.mlp.fc1.weight", "vit"),
    ],
)
def test_layers_may_have_their_names_in_memory(tmp_path: Path, stored: str, called: str, config: str) -> None:
    tensors = {"model.layers.0.mlp.up_proj.weight": noise(64, 32, seed=1), stored: noise(64, 32, seed=2)}
    model = source(tmp_path / "m", tensors, {"model_type": config})
    keep = (Override(stored.removesuffix(".weight"), keep=True),)
    out = quantized(model, tmp_path / "q", Options("mxfp4", layout="quark", overrides=keep))

    def renamed(tensors: Tensors) -> None:
        tensors[called] = tensors.pop(stored)

    result = found(verified(_unrecorded(changed(out, tmp_path / "c", renamed)), model))
    assert not {"missing", "extra"} & result.keys()


def _unrecorded(folder: Path) -> Path:
    (folder / "mxcli.json").unlink(missing_ok=True)
    return folder
