from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.errors import InputError, UsageError
from mxcli.files.layouts import COLUMN, LAYOUTS, Layout, OnDisk, Weight, find_layout
from mxcli.files.layouts.layout import Misfits
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import Rules, resolve

CT, OWN = LAYOUTS["compressed-tensors"], LAYOUTS["mxcli"]


def weight(format: str, shape: tuple[int, ...] = (130, 256), name: str = "a.weight", **more: str) -> Weight:
    return Weight(name, shape, resolve(format, Rules(**more)), "BF16")


def stored(layout: Layout, described: Weight) -> dict[str, tuple[str, tuple[int, ...], str]]:
    return {
        content.entry.name: (content.entry.dtype, content.entry.shape, content.holds.name)
        for content in layout.contents(described)
    }


def in_file(layout: Layout, weights: list[Weight]) -> dict[str, TensorInfo]:
    entries = [content.entry for each in weights for content in layout.contents(each)]
    return {
        entry.name: TensorInfo(entry.name, entry.dtype, entry.shape, "codes", Path("m"), 0, entry.nbytes)
        for entry in entries
    }


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        (
            "nvfp4",
            {
                "a.weight_packed": ("U8", (130, 128), "codes"),
                "a.weight_scale": ("F8_E4M3", (130, 16), "scales"),
                "a.weight_global_scale": ("F32", (1,), "encode"),
            },
        ),
        (
            "mxfp4",
            {"a.weight_packed": ("U8", (130, 128), "codes"), "a.weight_scale": ("U8", (130, 8), "scales")},
        ),
        (
            "mxfp6",
            {"a.weight_packed": ("U8", (130, 192), "codes"), "a.weight_scale": ("U8", (130, 8), "scales")},
        ),
        (
            "mxfp8",
            {"a.weight": ("F8_E4M3", (130, 256), "codes"), "a.weight_scale": ("U8", (130, 8), "scales")},
        ),
        (
            "fp8_e4m3",
            {"a.weight": ("F8_E4M3", (130, 256), "codes"), "a.weight_scale": ("F32", (1,), "scales")},
        ),
        (
            "fp8_e4m3_channel",
            {"a.weight": ("F8_E4M3", (130, 256), "codes"), "a.weight_scale": ("F32", (130, 1), "scales")},
        ),
        (
            "fp8_e4m3_128x128",
            {"a.weight": ("F8_E4M3", (130, 256), "codes"), "a.weight_scale": ("F32", (2, 2), "scales")},
        ),
    ],
)
def test_what_compressed_tensors_stores(format: str, expected: dict[str, tuple[str, tuple[int, ...], str]]) -> None:
    assert stored(CT, weight(format)) == expected


def test_scales_that_a_rule_rounds_to_bfloat16_are_stored_as_it() -> None:
    assert stored(CT, weight("fp8_e4m3", scale_rounding="amax-bf16"))["a.weight_scale"] == ("BF16", (1,), "scales")
    assert stored(OWN, weight("fp8_e4m3", scale_rounding="amax-bf16"))["a.weight_scale"] == ("F32", (1,), "scales")


@pytest.mark.parametrize(
    ("format", "shape", "expected"),
    [
        ("mxint8", (3, 64), {"a.weight": ("I8", (3, 64), "codes"), "a.weight_scale": ("U8", (3, 2), "scales")}),
        (
            "mxfp8_e5m2",
            (3, 64),
            {"a.weight": ("F8_E5M2", (3, 64), "codes"), "a.weight_scale": ("U8", (3, 2), "scales")},
        ),
        (
            "mxfp6_e3m2",
            (3, 66),
            {"a.weight_packed": ("U8", (3, 51), "codes"), "a.weight_scale": ("U8", (3, 3), "scales")},
        ),
        (
            "nvfp4_2d",
            (2, 32, 48),
            {
                "a.weight_packed": ("U8", (2, 32, 24), "codes"),
                "a.weight_scale": ("F8_E4M3", (2, 2, 3), "scales"),
                "a.weight_global_scale": ("F32", (1,), "encode"),
                "a.weight_scale_2": ("F32", (), "decode"),
            },
        ),
        (
            "e3m4:e5m2:1x16",
            (2, 32),
            {"a.weight": ("U8", (2, 32), "codes"), "a.weight_scale": ("F8_E5M2", (2, 2), "scales")},
        ),
        (
            "int4:fp32:channel",
            (2, 5),
            {"a.weight_packed": ("U8", (2, 3), "codes"), "a.weight_scale": ("F32", (2, 1), "scales")},
        ),
    ],
)
def test_what_our_own_layout_stores(
    format: str, shape: tuple[int, ...], expected: dict[str, tuple[str, tuple[int, ...], str]]
) -> None:
    assert stored(OWN, weight(format, shape)) == expected


@pytest.mark.parametrize(
    ("described", "why"),
    [
        (weight("mxint8"), "it has no mxint8"),
        (weight("mxfp4", name="gate_up_proj"), "it names the weights of modules only (MODULE.weight)"),
        (weight("mxfp4", (2, 4, 64)), "it holds matrices only, not 3 dimensions"),
        (weight("mxfp4", (4, 100)), "it stores no padding, and 100 is not a multiple of 32"),
        (
            Weight("a.weight", (4, 64), resolve("mxfp4"), "BF16", COLUMN),
            "it holds layers stored [out, in] only",
        ),
    ],
)
def test_what_compressed_tensors_cannot_hold(described: Weight, why: str) -> None:
    assert CT.refusal(described) == why


def test_the_configuration_of_nvfp4_is_complete() -> None:
    assert CT.settings([weight("nvfp4")], ["lm_head"]) == {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "version": "0.20.0",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": [r"re:(.*\.)?a$"],
                "format": "nvfp4-pack-quantized",
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "strategy": "tensor_group",
                    "group_size": 16,
                    "symmetric": True,
                    "dynamic": False,
                    "scale_dtype": "torch.float8_e4m3fn",
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def test_several_formats_name_their_modules() -> None:
    settings = CT.settings([weight("nvfp4", name="b.weight"), weight("mxfp8", name="a.weight")], [])
    groups = settings["config_groups"]
    assert settings["format"] == "mixed-precision"
    assert isinstance(groups, dict)
    assert {name: (group["targets"], group["format"]) for name, group in groups.items()} == {
        "group_0": ([r"re:(.*\.)?a$"], "mxfp8-quantized"),
        "group_1": ([r"re:(.*\.)?b$"], "nvfp4-pack-quantized"),
    }


@pytest.mark.parametrize("format", CT.formats)
def test_compressed_tensors_accepts_the_configuration(format: str) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    for weights in ([weight(format)], [weight(format), weight("mxfp4", name="b.weight")]):
        settings = CT.settings(weights, ["lm_head"])
        parsed = quantization.QuantizationConfig.model_validate(settings)
        assert parsed.quantization_status.value == "compressed"
        groups = settings["config_groups"]
        assert isinstance(groups, dict)
        assert parsed.config_groups.keys() == groups.keys()


def test_our_own_configuration_states_the_usual_once_and_then_exceptions() -> None:
    usual, other = weight("mxint8", (4, 64)), weight("mxfp6_e3m2", (4, 66), name="b.weight", dialect="ocp")
    turned = Weight("c.weight", (64, 4, 32), resolve("mxint8"), "F32", COLUMN)
    assert OWN.settings([usual, turned, other, weight("mxint8", (4, 64), name="d.weight")], ["lm_head"]) == {
        "quant_method": "mxcli",
        "version": 1,
        "format": "mxint8",
        "scale_rounding": "rceil",
        "rounding": "nearest-even",
        "dialect": "mxcli",
        "nonfinite": "saturate",
        "dtype": "BF16",
        "ignore": ["lm_head"],
        "tensors": {
            "b.weight": {"format": "mxfp6_e3m2", "scale_rounding": "floor", "dialect": "ocp", "columns": 66},
            "c.weight": {"dtype": "F32", "axis": "column"},
        },
    }


@pytest.mark.parametrize(
    ("layout", "format"),
    [
        (layout, name)
        for layout in LAYOUTS.values()
        for name in layout.formats
        if layout.refusal(weight(name, (128, 256))) is None
    ],
)
def test_weights_are_found_again(layout: Layout, format: str) -> None:
    weights = [weight(format, (128, 256)), weight(format, (256, 384), name="b.0.weight")]
    config = {"dtype": "bfloat16", "quantization_config": layout.settings(weights, [])}
    found = layout.weights(OnDisk(in_file(layout, weights), config, metadata=layout.metadata(weights, [])))
    assert [(each.name, each.shape, each.format.name, each.dtype) for each in found] == [
        ("a.weight", (128, 256), format, "BF16"),
        ("b.0.weight", (256, 384), format, "BF16"),
    ]


def test_exceptions_are_found_again() -> None:
    weights = [
        weight("mxfp4", (3, 101)),
        Weight("c", (64, 4, 32), resolve("e3m2:e8m0:1x16"), "F32", COLUMN),
        weight("nvfp4", name="b.weight", dialect="torchao"),
    ]
    config = {"quantization_config": OWN.settings(weights, [])}
    assert OWN.weights(OnDisk(in_file(OWN, weights), config)) == weights


def test_mixed_weights_are_found_again_in_their_groups() -> None:
    weights = [weight("nvfp4", name="b.weight"), weight("fp8_e4m3_channel", name="a.weight")]
    config = {"quantization_config": CT.settings(weights, [])}
    found = CT.weights(OnDisk(in_file(CT, weights), config))
    assert [(each.name, each.format.name) for each in found] == [
        ("b.weight", "nvfp4"),
        ("a.weight", "fp8_e4m3_channel"),
    ]


def test_scales_may_be_typed_as_the_powers_of_two_that_they_are() -> None:
    weights = [weight("mxfp4")]
    tensors = in_file(CT, weights)
    scale = tensors["a.weight_scale"]
    tensors["a.weight_scale"] = TensorInfo(scale.name, "F8_E8M0", scale.shape, "scale", scale.file, 0, 1)
    assert [each.name for each in CT.weights(OnDisk(tensors, {"quantization_config": CT.settings(weights, [])}))] == [
        "a.weight"
    ]


def test_tensors_that_do_not_fit_their_configuration_are_all_named() -> None:
    weights = [weight("mxfp4"), weight("mxfp4", name="b.weight")]
    tensors = in_file(CT, weights)
    del tensors["a.weight_packed"]
    wrong = tensors["b.weight_scale"]
    tensors["b.weight_scale"] = TensorInfo(wrong.name, "F32", wrong.shape, "scale", wrong.file, 0, 1)
    with pytest.raises(InputError) as refused:
        CT.weights(OnDisk(tensors, {"quantization_config": CT.settings(weights, [])}))
    assert refused.value.details == (
        "a: has a weight_scale, but a.weight_packed is missing (mxfp4-pack-quantized).",
        "b: b.weight_scale is F32 [130, 8]; mxfp4-pack-quantized needs U8 [130, 8].",
    )


def test_a_group_of_unknown_meaning_is_an_error() -> None:
    config = {"quantization_config": {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 4}}}}}
    with pytest.raises(InputError, match="config group g: its weights match none of the schemes"):
        CT.weights(OnDisk({}, config))


def test_targets_by_pattern_come_before_targets_by_class() -> None:
    weights = [weight("mxfp8", name="l.0.up.weight"), weight("mxfp8", name="l.0.down.weight")]
    groups = CT.settings([weights[0], weight("fp8_e4m3", name="x.weight")], [])["config_groups"]
    assert isinstance(groups, dict)
    fp8, mxfp8 = groups["group_0"] | {"targets": ["Linear"]}, groups["group_1"] | {"targets": ["re:.*(up|down)"]}
    config = {"quantization_config": {"config_groups": {"a": fp8, "b": mxfp8}}}
    found = CT.weights(OnDisk(in_file(CT, [*weights, weight("fp8_e4m3", name="l.0.o.weight")]), config))
    assert [each.format.name for each in found] == ["mxfp8_e4m3", "mxfp8_e4m3", "fp8_e4m3"]
    config["quantization_config"]["config_groups"]["b"]["targets"] = ["re:("]
    with pytest.raises(InputError, match=r"the target 're:\(' is not a regular expression"):
        CT.weights(OnDisk(in_file(CT, weights[:1]), config))


@pytest.mark.parametrize(
    ("name", "own", "told"),
    [
        ("a.weight", "column", "its entry in the 'tensors' of its quantization_config is \"column\", not an object."),
        ("a.weight", [], "its entry in the 'tensors' of its quantization_config is [], not an object."),
        (
            "a.weight",
            {"axes": "column"},
            "its entry in the 'tensors' of its quantization_config has axes; it may have",
        ),
        ("a.weight", {"axis": "diagonal"}, "axis diagonal of its quantization_config is invalid."),
        ("a.weight", {"rounding": "stochastik"}, "half-toward-zero, stochastic. Did you mean stochastic?"),
        ("b.weight", {}, "in the 'tensors' of its quantization_config, but is not a quantized weight here."),
    ],
)
def test_exceptions_of_our_own_layout_that_say_nothing_are_misfits(name: str, own: object, told: str) -> None:
    weights = [weight("mxint8", (4, 64)), weight("mxint8", (4, 64), name="c.weight")]
    settings = {**OWN.settings(weights, []), "tensors": {name: own}}
    with pytest.raises(Misfits) as misfits:
        OWN.weights(OnDisk(in_file(OWN, weights), {"quantization_config": settings}))
    assert list(misfits.value.faults) == [name]
    assert told in misfits.value.faults[name]
    assert not misfits.value.faults[name].endswith("..")
    assert [each.name for each in misfits.value.sound] == [each for each in ("a.weight", "c.weight") if each != name]


def test_a_future_version_of_our_own_layout_is_an_error() -> None:
    with pytest.raises(InputError, match="version 2; this program reads 1"):
        OWN.weights(OnDisk({}, {"quantization_config": {"quant_method": "mxcli", "version": 2}}))


def test_unknown_layouts_are_usage_errors() -> None:
    assert find_layout("CT") is CT
    with pytest.raises(UsageError, match="Did you mean compressed-tensors"):
        find_layout("compresed-tensors")


def test_every_named_format_has_a_layout() -> None:
    assert set(OWN.formats) == set(FORMATS)


def test_settings_that_are_common_together_are_stated_not_those_common_one_by_one() -> None:
    weights = [
        *(weight("mxfp6", name=f"a{number}.weight") for number in range(3)),
        *(weight("nvfp4", name=f"b{number}.weight") for number in range(2)),
        *(weight("nvfp4_2d", (128, 256), name=f"c{number}.weight") for number in range(2)),
    ]
    settings = OWN.settings(weights, [])
    assert (settings["format"], settings["scale_rounding"]) == ("mxfp6_e2m3", "rceil")
    found = OWN.weights(OnDisk(in_file(OWN, weights), {"quantization_config": settings}))
    assert {each.name: each.format.name for each in found} == {each.name: each.format.name for each in weights}
