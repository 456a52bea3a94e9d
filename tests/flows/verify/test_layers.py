"""Layers that lack what others have: damage, or another kind of layer by the design of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planted import changed, found, quantized, source, verified
from tiny_models import noise

from mxcli.files.checkpoint import open_checkpoint
from mxcli.flows.plan.plan import Options
from mxcli.flows.verify.checks.expected import Expected
from mxcli.flows.verify.checks.layers import LAYER_CHECKS, Layers
from mxcli.flows.verify.checks.parameters import Parameters
from mxcli.flows.verify.subject import subject_of

UNKNOWN = {"model_type": "not_known", "architectures": ["NotKnownModel"], "dtype": "bfloat16"}
NORM, WEIGHT = ("norm.weight", (32,)), ("mlp.up_proj.weight", (64, 32))
CROSS = [(f"cross.{part}.weight", (32, 32)) for part in "qkv"] + [("cross.norm.weight", (32,))]
INCOMPLETE = "incomplete_layer"


def model(path: Path, stack: str, layers: list[list[tuple[str, tuple[int, ...]]]]) -> Path:
    """A quantized model of a type that is not known, without its record, whose layers have these tensors."""
    tensors = {
        f"{stack}.{number}.{name}": noise(*shape, seed=10 * number + place)
        for number, parts in enumerate(layers)
        for place, (name, shape) in enumerate(parts)
    }
    output = quantized(source(path / "m", tensors, UNKNOWN), path / "q", Options("mxfp8"))
    (output / "mxcli.json").unlink()
    return output


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


ALL = [NORM, WEIGHT, *CROSS]


@pytest.mark.parametrize(
    "layers",
    [
        [ALL, [NORM, WEIGHT]],
        [ALL, [NORM, WEIGHT], ALL, [NORM, WEIGHT]],
        [ALL, ALL, ALL, [NORM, WEIGHT, *CROSS[:3]], ALL, ALL, ALL, [NORM, WEIGHT, *CROSS[:3]]],
        [[NORM, WEIGHT], ALL, ALL, ALL, [NORM, WEIGHT], ALL, ALL, ALL],
    ],
    ids=["one of two", "every second", "every fourth lacks a norm", "every fourth, the first"],
)
def test_layers_of_another_kind_are_complete(tmp_path: Path, layers: list[Any]) -> None:
    assert INCOMPLETE not in found(verified(model(tmp_path, "decoder.layers", layers)))


@pytest.mark.parametrize(
    ("layers", "lost"),
    [
        ([ALL, ALL], "decoder.layers.1.norm.weight"),
        ([ALL, ALL], "decoder.layers.0.cross.norm.weight"),
        ([ALL, ALL, ALL, ALL], "decoder.layers.3.cross.norm.weight"),
        ([ALL, [NORM, WEIGHT], ALL, [NORM, WEIGHT], ALL], "decoder.layers.2.cross.norm.weight"),
        ([ALL] * 8, "decoder.layers.4.norm.weight"),
    ],
)
def test_what_a_layer_lost_is_found(tmp_path: Path, layers: list[Any], lost: str) -> None:
    folder = model(tmp_path, "decoder.layers", layers)
    assert INCOMPLETE not in found(verified(folder))
    assert found(verified(changed(folder, tmp_path / "lost", without(lost))))[INCOMPLETE] == [lost]


def test_stages_are_not_compared_with_each_other(tmp_path: Path) -> None:
    reduced = [("0.attention.sr.weight", (32, 32)), ("0.norm.weight", (32,)), ("0.mlp.up_proj.weight", (64, 32))]
    stages = [reduced] * 3 + [reduced[1:]]
    assert INCOMPLETE not in found(verified(model(tmp_path, "encoder.block", stages)))


def test_the_last_stage_may_lack_a_module(tmp_path: Path) -> None:
    stage = [(f"blocks.{layer}.{name}", shape) for layer in range(2) for name, shape in ALL]
    reduced = [*stage, *[(f"downsample.{name}", shape) for name, shape in CROSS]]
    assert INCOMPLETE not in found(verified(model(tmp_path, "encoder.layers", [reduced] * 3 + [stage])))


def test_the_first_layer_of_modernbert_has_no_norm_before_its_attention(tmp_path: Path) -> None:
    attention = ("attn_norm.weight", (32,))
    folder = model(tmp_path, "model.layers", [ALL, *[[attention, *ALL]] * 5])
    assert found(verified(folder))[INCOMPLETE] == ["model.layers.0.attn_norm.weight"]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "modernbert"}))
    assert INCOMPLETE not in found(verified(folder))


def test_layers_of_one_stage_are_compared(tmp_path: Path) -> None:
    stages = [[(f"{layer}.{name}", shape) for layer in range(4) for name, shape in ALL] for _ in range(2)]
    folder, lost = model(tmp_path, "encoder.block", stages), "encoder.block.1.2.norm.weight"
    assert INCOMPLETE not in found(verified(folder))
    assert found(verified(changed(folder, tmp_path / "lost", without(lost))))[INCOMPLETE] == [lost]


@pytest.mark.parametrize("by_design", [True, False])
def test_a_known_model_decides(tmp_path: Path, by_design: bool) -> None:
    lost = "decoder.layers.3.norm.weight"
    folder = model(tmp_path, "decoder.layers", [ALL] * 5)
    subject = subject_of(open_checkpoint(changed(folder, tmp_path / "lost", without(lost))))
    expected = Expected(subject)
    names = {f"decoder.layers.{number}.{name}": ("weight", shape) for number in range(5) for name, shape in ALL}
    known = {name: each for name, each in names.items() if not (by_design and name == lost)}
    vars(expected)["parameters"] = Parameters("NotKnownModel", known, {})
    findings = [each.where for check in LAYER_CHECKS for each in check.find(Layers(subject, expected))]
    assert findings == ([] if by_design else [lost])


def test_a_model_answers_in_the_names_of_the_checkpoint(tmp_path: Path) -> None:
    subject = subject_of(open_checkpoint(model(tmp_path, "decoder.layers", [ALL] * 2)))
    expected = Expected(subject)
    weight = "decoder.layers.1.mlp.up_proj.weight"
    vars(expected)["parameters"] = Parameters("NotKnownModel", {weight: ("weight", (64, 32))}, {})
    assert expected.is_known
    assert expected.has_shape(weight, (64, 32))
    assert not expected.has_shape(weight, (32, 64))
    assert expected.lacks("decoder.layers.0.mlp.up_proj.weight")
    assert expected.numbers("decoder.layers") == {1}
    assert expected.lacks_all(roles={"lm_head"})


def test_nothing_is_known_of_a_usual_model(tmp_path: Path) -> None:
    subject = subject_of(open_checkpoint(model(tmp_path, "decoder.layers", [ALL] * 2)))
    expected = Expected(subject, frozenset({"not_known"}))
    assert expected.is_usual
    assert not expected.is_known
    assert not expected.lacks("anything")
    assert not expected.has_shape("anything", (1,))
    assert expected.numbers("decoder.layers") is None
