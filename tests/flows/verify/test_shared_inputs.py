"""Tensor scales that ModelOpt shares among all layers with one input, in several modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from planted import Tensors, changed, found, quantized, source, verified
from tiny_models import noise

from mxcli.flows.plan.plan import Options
from mxcli.numerics.scheme import Rules

PHI = {
    "h.0.x.q_proj": "model.layers.0.self_attn.q_proj",
    "h.0.x.k_proj": "model.layers.0.self_attn.k_proj",
    "h.0.x.v_proj": "model.layers.0.self_attn.v_proj",
    "h.0.x.fc1": "model.layers.0.mlp.fc1",
    "h.0.x.fc2": "model.layers.0.mlp.fc2",
    "h.0.x.dense": "model.layers.0.self_attn.dense",
}
T5 = {
    "h.0.x.q_proj": "decoder.block.0.layer.1.EncDecAttention.k",
    "h.0.x.k_proj": "decoder.block.0.layer.1.EncDecAttention.v",
    "h.0.x.v_proj": "decoder.block.1.layer.1.EncDecAttention.k",
    "h.0.x.fc1": "decoder.block.1.layer.1.EncDecAttention.v",
    "h.0.x.fc2": "decoder.block.0.layer.1.EncDecAttention.o",
    "h.0.x.dense": "decoder.block.1.layer.1.EncDecAttention.o",
}
FUSE = "q_proj+k_proj+v_proj+fc1"


def sides(folder: Path, names: dict[str, str], model: str, fuse: str | None = FUSE) -> tuple[Path, Path]:
    """Return a model's source, and its weights quantized with one tensor scale for the set."""
    sizes = {name: 0.1 * (3 + seed) for seed, name in enumerate(names)}
    tensors = {name: noise(64, 64, seed=seed, scale=sizes[name]) for seed, name in enumerate(names)}
    named = {f"{called}.weight": tensors[name] for name, called in names.items()}
    plain = source(folder / "plain", named, {"model_type": model})
    joined = source(folder / "m", {f"{name}.weight": each for name, each in tensors.items()}, {"model_type": model})

    def rename(stored: Tensors) -> None:
        kept = dict(stored)
        stored.clear()
        for name, each in kept.items():
            module, _, parameter = name.rpartition(".")
            stored[f"{names[module]}.{parameter}"] = each

    options = Options("nvfp4", Rules(dialect="modelopt"), layout="modelopt", fuse=fuse)
    return plain, changed(quantized(joined, folder / "q", options), folder / "c", rename, ignore=[])


@pytest.mark.parametrize(("names", "model"), [(PHI, "phi"), (T5, "t5")])
def test_a_scale_of_all_layers_with_one_input_is_that_of_the_source(
    tmp_path: Path, names: dict[str, str], model: str
) -> None:
    plain, out = sides(tmp_path, names, model)
    result = verified(out, plain)
    assert {name for name in found(result) if name in ("other_bytes", "far_from_source")} == set()
    assert all(weight.provenance is not None and weight.provenance.exact for weight in result.weights)


def _larger(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        dtype, scale = tensors[f"{name}.weight_scale_2"]
        tensors[f"{name}.weight_scale_2"] = (dtype, scale * np.float32(1.0625))

    return change


def _of(other: str, name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{name}.weight_scale_2"] = tensors[f"{other}.weight_scale_2"]

    return change


FC2, DENSE = PHI["h.0.x.fc2"], PHI["h.0.x.dense"]


@pytest.mark.parametrize("change", [_larger(FC2), _of(DENSE, FC2), _of(PHI["h.0.x.fc1"], FC2)])
def test_a_scale_of_another_layer_alone_is_other_bytes(tmp_path: Path, change: Callable[[Tensors], None]) -> None:
    """The scale is found in the file too, but the codes are not those that it gives."""
    plain, out = sides(tmp_path, PHI, "phi")
    result = verified(changed(out, tmp_path / "d", change), plain)
    assert [where.removesuffix("_scale_2") for where in found(result)["other_bytes"]] == [f"{FC2}.weight"]
