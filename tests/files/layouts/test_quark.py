from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxcli.errors import InputError
from mxcli.files.layouts import LAYOUTS, OnDisk, Weight, layout_of_dialect
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import Rules, resolve

QUARK = LAYOUTS["quark"]
Described = dict[str, tuple[str, tuple[int, ...]]]


def weight(format: str, name: str = "a.weight", dtype: str = "BF16", rule: str | None = None) -> Weight:
    return Weight(name, (48, 64), resolve(format, Rules(scale_rounding=rule)), dtype)


def on_disk(tensors: Described, settings: Any) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return OnDisk(infos, {"dtype": "bfloat16", "quantization_config": settings})


@pytest.mark.parametrize(
    ("described", "codes", "scales"),
    [
        (weight("mxfp4"), ("U8", (48, 32)), ("U8", (48, 2))),
        (weight("mxfp6_e2m3"), ("U8", (48, 48)), ("U8", (48, 2))),
        (weight("mxfp6_e3m2"), ("U8", (48, 48)), ("U8", (48, 2))),
        (weight("fp8_e4m3"), ("F8_E4M3", (48, 64)), ("F32", ())),
        (weight("fp8_e4m3", rule="amax-bf16-scale"), ("F8_E4M3", (48, 64)), ("BF16", ())),
    ],
)
def test_what_is_stored(described: Weight, codes: tuple[str, Any], scales: tuple[str, Any]) -> None:
    entries = {each.entry.name: (each.entry.dtype, each.entry.shape) for each in QUARK.contents(described)}
    assert entries == {"a.weight": codes, "a.weight_scale": scales}
    settings = QUARK.settings([described], [])
    (again,) = QUARK.weights(on_disk(entries, settings))
    assert (again.format, again.shape) == (described.format, described.shape)
    assert [each.entry for each in QUARK.contents(again)] == [each.entry for each in QUARK.contents(described)]


def test_fp8_states_activations_per_token_and_mx_none() -> None:
    fp8: Any = QUARK.settings([weight("fp8_e4m3")], ["lm_head"])
    assert fp8["exclude"] == ["lm_head"]
    said = fp8["global_quant_config"]
    assert [said["weight"][key] for key in ("dtype", "qscheme", "group_size", "is_dynamic")] == [
        "fp8_e4m3",
        "per_tensor",
        None,
        False,
    ]
    assert [said["input_tensors"][key] for key in ("dtype", "qscheme", "ch_axis", "is_dynamic")] == [
        "fp8_e4m3",
        "per_channel",
        1,
        True,
    ]
    assert QUARK.remarks([weight("fp8_e4m3", dtype="F32")]) == [
        "Loaders quantize the activations of Quark's FP8 layers, dynamically per token."
    ]
    assert QUARK.remarks([weight("fp8_e4m3")])[1].startswith("FP8 scales are binary32")
    mx: Any = QUARK.settings([weight("mxfp4")], [])
    assert mx["global_quant_config"]["input_tensors"] is None
    assert QUARK.remarks([weight("mxfp4", rule="even")]) == []
    (remark,) = QUARK.remarks([weight("mxfp4", rule="floor")])
    assert "these were rounded by floor, which loaders do not need to know" in remark


def test_what_most_layers_have_is_global_and_the_rest_by_name() -> None:
    weights = [weight("mxfp4"), weight("mxfp6_e3m2", "b.weight"), weight("mxfp4", "c.weight")]
    settings: Any = QUARK.settings(weights, [])
    assert settings["global_quant_config"]["weight"]["dtype"] == "fp4"
    assert {name: said["weight"]["dtype"] for name, said in settings["layer_quant_config"].items()} == {"b": "fp6_e3m2"}
    entries = {each.entry.name: each.entry for weight in weights for each in QUARK.contents(weight)}
    disk = on_disk({name: (entry.dtype, entry.shape) for name, entry in entries.items()}, settings)
    assert [(each.name, each.format.name) for each in QUARK.weights(disk)] == [
        ("a.weight", "mxfp4_e2m1"),
        ("b.weight", "mxfp6_e3m2"),
        ("c.weight", "mxfp4_e2m1"),
    ]


STORED: Described = {"l.0.up.weight": ("U8", (48, 48)), "l.0.up.weight_scale": ("U8", (48, 2))}


def said(format: str) -> dict[str, Any]:
    found: Any = QUARK.settings([weight(format)], [])["global_quant_config"]
    return found


@pytest.mark.parametrize(
    ("settings", "format"),
    [
        ({"global_quant_config": said("mxfp6_e2m3")}, "mxfp6_e2m3"),
        (
            {"global_quant_config": said("mxfp4"), "layer_quant_config": {"*.up": said("mxfp6_e3m2")}},
            "mxfp6_e3m2",
        ),
        (
            {"global_quant_config": said("mxfp4"), "layer_type_quant_config": {"Linear": said("mxfp6_e3m2")}},
            "mxfp6_e3m2",
        ),
        (
            {"global_quant_config": said("mxfp6_e2m3"), "layer_quant_config": {"*.kv": {"output_tensors": {}}}},
            "mxfp6_e2m3",
        ),
    ],
)
def test_the_configuration_states_the_format(settings: dict[str, Any], format: str) -> None:
    (found,) = QUARK.weights(on_disk(STORED, settings))
    assert (found.format.name, found.shape) == (format, (48, 64))


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"a.weight": ("U8", (48, 32))}, "a.weight: is U8, but its scale a.weight_scale is missing."),
        ({"a.weight_scale": ("U8", (48, 2))}, "a.weight: has the scale a.weight_scale, but is missing itself."),
        (
            {"a.weight": ("U8", (48, 32)), "a.weight_scale": ("U8", (48, 4))},
            "a.weight: a.weight_scale is U8 [48, 4]; fp4 needs U8 [48, 2].",
        ),
        (
            {"a.weight": ("F8_E4M3", (48, 32)), "a.weight_scale": ("U8", (48, 2))},
            "a.weight: a.weight is F8_E4M3 [48, 32]; fp4 needs U8 [48, 32].",
        ),
        (
            {"a.weight": ("U8", (48, 8)), "a.weight_scale": ("U8", (48, 1))},
            "a.weight: [48, 8] is not a shape of fp4 codes: it stores no padding, and 16 is not a multiple of 32.",
        ),
        (
            {"a.weight": ("U8", (48,)), "a.weight_scale": ("U8", (48, 2))},
            "a.weight: [48] is not the shape of a matrix of codes (fp4).",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_reported_in_a_sentence(tensors: Described, fault: str) -> None:
    with pytest.raises(InputError) as refused:
        QUARK.weights(on_disk(tensors, QUARK.settings([weight("mxfp4")], [])))
    assert fault in (*refused.value.details, str(refused.value))


def test_a_module_without_a_spec_is_reported_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"l\.0\.up\.weight: .* the configuration does not cover its module"):
        QUARK.weights(on_disk(STORED, {"layer_quant_config": {"other": said("mxfp4")}}))


@pytest.mark.parametrize("args", [{"dtype": "int4"}, [said("mxfp4")["weight"], said("fp8_e4m3")["weight"]], "fp4"])
def test_weights_of_unknown_meaning_are_an_error(args: object) -> None:
    with pytest.raises(InputError, match=r"cannot read the weights of 'x\.\*' .* it reads fp4, .* each quantized once"):
        QUARK.weights(on_disk({}, {"layer_quant_config": {"x.*": {"weight": args}}}))


def test_its_dialect() -> None:
    assert layout_of_dialect("quark") is QUARK
    assert QUARK.needs_config
