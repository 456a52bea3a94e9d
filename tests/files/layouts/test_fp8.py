from __future__ import annotations

from pathlib import Path

import pytest

from mxcli.errors import InputError, RefusedError
from mxcli.files.layouts import LAYOUTS, OnDisk, Weight, find_layout, layout_of_dialect
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import Rules, resolve

FP8 = LAYOUTS["fp8"]
Described = dict[str, tuple[str, tuple[int, ...]]]


def weight(format: str, shape: tuple[int, ...] = (192, 320), name: str = "a.weight", rule: str | None = None) -> Weight:
    return Weight(name, shape, resolve(format, Rules(scale_rounding=rule)), "BF16")


def on_disk(tensors: Described, **settings: object) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return OnDisk(infos, {"dtype": "bfloat16", "quantization_config": settings} if settings else {})


def found(tensors: Described, **settings: object) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(each.name, each.format.name, each.shape) for each in FP8.weights(on_disk(tensors, **settings))]


@pytest.mark.parametrize(
    ("format", "scales"),
    [
        ("fp8_e4m3_128x128", ("F32", (2, 3))),
        ("e4m3:e8m0:128x128", ("F8_E8M0", (2, 3))),
        ("mxfp8", ("U8", (192, 10))),
        ("fp8_e4m3", ("F32", ())),
    ],
)
def test_what_is_stored(format: str, scales: tuple[str, tuple[int, ...]]) -> None:
    contents = FP8.contents(weight(format))
    assert {each.entry.name: (each.entry.dtype, each.entry.shape) for each in contents} == {
        "a.weight": ("F8_E4M3", (192, 320)),
        "a.weight_scale_inv": scales,
    }


@pytest.mark.parametrize(
    ("weights", "stated"),
    [
        ([weight("fp8_e4m3_128x128")], {"quant_method": "fp8", "weight_block_size": [128, 128]}),
        (
            [weight("fp8_e4m3_128x128", rule="rceil"), weight("e4m3:e8m0:128x128")],
            {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        ),
        (
            [weight("fp8_e4m3_128x128"), weight("e4m3:e8m0:128x128")],
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
        ),
        ([weight("mxfp8")], {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}),
        ([weight("fp8_e4m3")], {"quant_method": "fp8", "weight_block_size": None}),
    ],
)
def test_the_configuration(weights: list[Weight], stated: dict[str, object]) -> None:
    assert FP8.settings(weights, ["lm_head", "b"]) == {
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["b", "lm_head"],
        **stated,
    }


def test_a_configuration_states_one_block_only() -> None:
    with pytest.raises(RefusedError, match=r"a\.weight is fp8_e4m3_128x128 and b\.weight mxfp8_e4m3: .* one block"):
        FP8.settings([weight("fp8_e4m3_128x128"), weight("mxfp8", name="b.weight")], [])


def test_what_it_cannot_hold() -> None:
    assert FP8.refusal(weight("mxfp4")) == "it has no mxfp4_e2m1"
    assert FP8.refusal(weight("fp8_e4m3_128x128", (2, 128, 128))) == "it holds matrices only, not 3 dimensions"
    assert FP8.refusal(weight("fp8_e4m3_128x128", (1, 200))) is None
    assert FP8.refusal(weight("e4m3:e8m0:128x128", (576, 200))) is None
    assert FP8.refusal(weight("mxfp8", (1, 200))) == "it stores no padding, and 200 is not a multiple of 32"


@pytest.mark.parametrize(
    ("scales", "block", "format"),
    [
        (("F32", (2, 3)), [128, 128], "fp8_e4m3_128x128"),
        (("BF16", (2, 3)), [128, 128], "fp8_e4m3_128x128"),
        (("F32", (2, 3)), None, "fp8_e4m3_128x128"),
        (("F8_E8M0", (2, 3)), [128, 128], "e4m3:e8m0:128x128"),
        (("U8", (2, 3)), [128, 128], "e4m3:e8m0:128x128"),
        (("F32", (3, 5)), [64, 64], "e4m3:fp32:64x64"),
        (("U8", (192, 10)), [1, 32], "mxfp8_e4m3"),
        (("F8_E8M0", (192, 10)), None, "mxfp8_e4m3"),
        (("F32", (192, 3)), None, "fp8_e4m3_1x128"),
        (("F32", (192, 1)), None, "fp8_e4m3_channel"),
        (("F32", (1, 1)), None, "fp8_e4m3"),
        (("F32", ()), [128, 128], "fp8_e4m3"),
        (("BF16", (1,)), None, "fp8_e4m3"),
    ],
)
@pytest.mark.parametrize("scale", ["a.weight_scale_inv", "a.weight_scale", "a.scale"])
def test_every_way_it_is_stored_is_read(
    scale: str, scales: tuple[str, tuple[int, ...]], block: list[int] | None, format: str
) -> None:
    tensors: Described = {"a.weight": ("F8_E4M3", (192, 320)), scale: scales, "norm.scale": ("F32", (192,))}
    disk = on_disk(tensors, quant_method="fp8", weight_block_size=block, scale_fmt="ue8m0")
    (weight,) = FP8.weights(disk)
    assert (weight.name, weight.format.name, weight.shape, weight.dtype) == ("a.weight", format, (192, 320), "BF16")
    assert [content.entry.name for content in FP8.contents(weight)] == ["a.weight", scale]


def test_experts_may_be_stacked_or_of_four_bits() -> None:
    tensors: Described = {
        "experts.up": ("F8_E4M3", (4, 192, 320)),
        "experts.up_scale_inv": ("F32", (4, 2, 3)),
        "experts.0.w1.weight": ("I8", (192, 160)),
        "experts.0.w1.scale": ("F8_E8M0", (192, 10)),
        "e5m2.weight": ("F8_E5M2", (192, 320)),
        "e5m2.weight_scale_inv": ("F32", (2, 3)),
    }
    assert found(tensors, quant_method="fp8", weight_block_size=[128, 128]) == [
        ("experts.up", "fp8_e4m3_128x128", (4, 192, 320)),
        ("experts.0.w1.weight", "mxfp4_e2m1", (192, 320)),
        ("e5m2.weight", "fp8_e5m2_128x128", (192, 320)),
    ]


CODES = ("F8_E4M3", (192, 320))
SCALES = ("F32", (2, 3))


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({"a.weight": CODES}, "a.weight: is F8_E4M3, but its scale a.weight_scale_inv is missing."),
        ({"a.weight_scale_inv": SCALES}, "a.weight: has the scale a.weight_scale_inv, but is missing itself."),
        ({"a.scale": ("F8_E8M0", (2, 3))}, "a.weight: has the scale a.scale, but is missing itself."),
        (
            {"a.weight": CODES, "a.weight_scale_inv": SCALES, "a.scale": SCALES},
            "a.weight: has two scales, a.weight_scale_inv and a.scale; it is ambiguous which one applies.",
        ),
        (
            {"a.weight": CODES, "a.weight_scale_inv": ("F32", (2, 2))},
            "a.weight: is [192, 320], so blocks of 128x128 have [2, 3] scales; a.weight_scale_inv is [2, 2].",
        ),
        (
            {"a.weight": CODES, "a.weight_scale_inv": ("F64", (2, 3))},
            "a.weight: its scale a.weight_scale_inv is F64; expected BF16, F16, F32, F8_E8M0, U8.",
        ),
        (
            {"a.weight": ("BF16", (192, 320)), "a.weight_scale_inv": SCALES},
            "a.weight: is BF16 [192, 320] with a scale, not quantized: the scale was never computed, and loaders "
            "apply it.",
        ),
        (
            {"a.weight": ("F8_E4M3", (192,)), "a.weight_scale_inv": SCALES},
            "a.weight: is F8_E4M3 [192] with a scale; expected a matrix of F8_E4M3, F8_E5M2, I8.",
        ),
        (
            {"a.weight": ("F8_E4M3FNUZ", (192, 320)), "a.weight_scale_inv": SCALES},
            "a.weight: is F8_E4M3FNUZ [192, 320] with a scale; expected a matrix of F8_E4M3, F8_E5M2, I8.",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_reported_in_a_sentence(tensors: Described, fault: str) -> None:
    for settings in ({}, {"quant_method": "fp8", "weight_block_size": [128, 128]}):
        with pytest.raises(InputError) as refused:
            FP8.weights(on_disk(tensors, **settings))
        assert fault in (*refused.value.details, str(refused.value))


@pytest.mark.parametrize("block", ["128", [128], [128, 0], [128, 1 << 20], [True, 32], {}])
def test_an_invalid_block_is_reported_in_a_sentence(block: object) -> None:
    with pytest.raises(InputError, match=r"weight_block_size .* must be two numbers from 1 to 65536"):
        FP8.weights(on_disk({"a.weight": CODES, "a.weight_scale_inv": SCALES}, weight_block_size=block))


def test_scales_of_another_dtype_are_named() -> None:
    assert [len(FP8.remarks([weight(name, (128, 128))])) for name in FP8.formats] == [0, 1, 0, 0]
    (remark,) = FP8.remarks([weight("e4m3:e8m0:128x128", (576, 128))])
    assert remark.startswith("Scales are F8_E8M0; fp8_e4m3_128x128 with --scale-rounding rceil stores the same ones")


def test_what_readers_mistake_in_silence() -> None:
    tensors: Described = {"a.weight": ("F8_E4M3", (192, 256)), "a.weight_scale_inv": ("U8", (2, 2))}
    disk = on_disk(tensors, quant_method="fp8", weight_block_size=[128, 128], modules_to_not_convert=["lm_head"])
    hazards = FP8.hazards(disk, FP8.weights(disk))
    assert [(hazard.where, hazard.value, hazard.certain) for hazard in hazards] == [
        ("a.weight_scale_inv", "powers of two as U8", False),
    ]
    bytes_allowed = on_disk({"a.weight": CODES, "a.weight_scale_inv": ("U8", (192, 10))}, quant_method="mxfp8")
    assert FP8.hazards(bytes_allowed, FP8.weights(bytes_allowed)) == []
    ignored = FP8.ignored(disk)
    assert ignored is not None
    assert [ignored.by(module) for module in ("lm_head", "model.lm_head2")] == ["lm_head", None]


def test_names_and_dialects() -> None:
    assert find_layout("deepseek") is find_layout("fp8-block") is FP8
    assert layout_of_dialect("fp8-block") is layout_of_dialect("mxfp8") is FP8
