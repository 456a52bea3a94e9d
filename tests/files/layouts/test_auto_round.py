"""The layout auto-round: what its exporter stores and states, how settings of single layers are found, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mxcli.errors import RefusedError
from mxcli.files.layouts import COLUMN, LAYOUTS, InputScale, OnDisk, Weight, layout_of_dialect
from mxcli.files.layouts.auto_round import settings_of
from mxcli.files.layouts.known_settings import unknown_settings
from mxcli.files.layouts.layout import Misfits, Unread, refusal
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.scheme import Rules, resolve

AUTO_ROUND = LAYOUTS["auto-round"]
Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
Described = dict[str, tuple[str, tuple[int, ...]]]
# The settings that auto-round 0.16.1 wrote for a Llama with two layers, without those of its calibration.
MXFP4: dict[str, Any] = {
    "act_bits": 4,
    "act_data_type": "mx_fp",
    "act_dynamic": True,
    "act_group_size": 32,
    "act_sym": True,
    "autoround_version": "0.16.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "mx_fp",
    "group_size": 32,
    "packing_format": "auto_round:llm_compressor",
    "quant_method": "auto-round",
    "sym": True,
}
MXFP8 = {**MXFP4, "bits": 8, "act_bits": 8}
NVFP4 = {
    **MXFP4,
    "group_size": 16,
    "act_group_size": 16,
    "data_type": "nv_fp",
    "act_data_type": "nv_fp4_with_static_gs",
}
FP8_BLOCK = {
    **MXFP8,
    "act_data_type": "fp",
    "act_group_size": 128,
    "activation_scheme": "dynamic",
    "data_type": "fp",
    "fmt": "e4m3",
    "group_size": [128, 128],
    "packing_format": "auto_round:fp8",
    "weight_block_size": [128, 128],
}
FP8_STATIC = {
    **MXFP8,
    "act_data_type": "fp",
    "act_dynamic": False,
    "act_group_size": 0,
    "activation_scheme": "static",
    "data_type": "fp",
    "fmt": "e4m3",
    "group_size": -1,
    "packing_format": "auto_round:fp8_static",
}


def weight(
    format: str, name: str = f"{Q}.weight", shape: tuple[int, ...] = (256, 128), rule: str | None = None
) -> Weight:
    inputs = InputScale(6.0, 0.5, 448.0) if format == "nvfp4" else None
    return Weight(name, shape, resolve(format, Rules(scale_rounding=rule)), "BF16", input_scale=inputs)


def on_disk(tensors: Described, settings: Any) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return OnDisk(infos, {"dtype": "bfloat16", "quantization_config": settings})


def entries(*weights: Weight) -> Described:
    stored = [each.entry for one in weights for each in AUTO_ROUND.contents(one)]
    return {entry.name: (entry.dtype, entry.shape) for entry in stored}


def module(name: str, codes: tuple[str, tuple[int, ...]], scales: tuple[str, tuple[int, ...]]) -> Described:
    packed = "_packed" if codes[0] == "U8" else ""
    return {f"{name}.weight{packed}": codes, f"{name}.weight_scale": scales}


@pytest.mark.parametrize(
    ("described", "settings", "stored"),
    [
        (weight("mxfp4"), MXFP4, {"weight_packed": ("U8", (256, 64)), "weight_scale": ("U8", (256, 4))}),
        (weight("mxfp8"), MXFP8, {"weight": ("F8_E4M3", (256, 128)), "weight_scale": ("U8", (256, 4))}),
        (
            weight("nvfp4"),
            NVFP4,
            {
                "weight_packed": ("U8", (256, 64)),
                "weight_scale": ("F8_E4M3", (256, 8)),
                "weight_global_scale": ("F32", (1,)),
                "input_global_scale": ("F32", (1,)),
            },
        ),
        (
            weight("fp8_e4m3_128x128", rule="amax-bf16-scale"),
            FP8_BLOCK,
            {"weight": ("F8_E4M3", (256, 128)), "weight_scale_inv": ("BF16", (2, 1))},
        ),
        (
            weight("fp8_e4m3_128x128"),
            FP8_BLOCK,
            {"weight": ("F8_E4M3", (256, 128)), "weight_scale_inv": ("F32", (2, 1))},
        ),
    ],
)
def test_names_and_settings_are_those_of_the_exporter(described: Weight, settings: Any, stored: Described) -> None:
    assert entries(described) == {f"{Q}.{name}": each for name, each in stored.items()}
    assert AUTO_ROUND.settings([described], []) == settings
    disk = on_disk(entries(described), settings)
    (again,) = AUTO_ROUND.weights(disk)
    assert (again.name, again.shape, again.format, again.dtype) == (
        f"{Q}.weight",
        (256, 128),
        described.format,
        "BF16",
    )
    documents = {"config.json": dict(disk.settings)}
    assert list(unknown_settings(documents, AUTO_ROUND.known_settings, {described.format.name})) == []
    assert AUTO_ROUND.hazards(disk, [again]) == []


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F16"])
def test_one_scale_per_row_is_read(dtype: str) -> None:
    tensors = {f"{Q}.weight": ("F8_E4M3", (64, 32)), f"{Q}.weight_scale": (dtype, (64,))}
    tensors[f"{Q}.input_scale"] = ("BF16", (1,))
    (found,) = AUTO_ROUND.weights(on_disk(tensors, FP8_STATIC))
    assert (found.format.name, found.shape) == ("fp8_e4m3_channel", (64, 32))
    assert entries(found) == {name: each for name, each in tensors.items() if "input" not in name}
    assert refusal(AUTO_ROUND, found) == "it has no fp8_e4m3_channel"


def test_layers_of_other_settings_and_plain_ones_are_listed_by_path() -> None:
    weights = [weight("mxfp4"), weight("mxfp8", f"{DOWN}.weight"), weight("mxfp4", "lm_head.weight")]
    weights += [weight("mxfp4", "model.layers.1.mlp.up_proj.weight")]
    settings: Any = AUTO_ROUND.settings(weights, ["model.layers.0.mlp.gate", "model.visual.0"])
    assert settings == {
        **MXFP4,
        "extra_config": {
            "lm_head": {
                key: value for key, value in MXFP4.items() if key.startswith(("act_", "bits", "data", "g", "sym"))
            },
            "model.layers.0.mlp.gate": {"act_bits": 16, "bits": 16},
            DOWN: {"act_bits": 8, "bits": 8},
            "model.visual.0": {"act_bits": 16, "bits": 16},
        },
    }
    disk = on_disk(entries(*weights), settings)
    assert {each.name: each.format for each in AUTO_ROUND.weights(disk)} == {each.name: each.format for each in weights}
    ignored = AUTO_ROUND.ignored(disk)
    assert ignored is not None
    assert ignored.entries == ("model.layers.0.mlp.gate", "model.visual.0")
    assert [ignored.targeted(name) for name in (Q, "model.visual.0", "lm_head")] == [True, False, False]


@pytest.mark.parametrize(
    ("key", "found"),
    [(Q, True), ("q_proj", True), ("self_attn.q_proj", True), (r".*q_proj.*", True), ("attn", False),
     ("layers.0", False), (r"layers\.\d+\.self", True), (r"^q_proj$", False)],
)  # fmt: skip
def test_settings_of_a_layer_by_path_by_its_end_and_by_expression(key: str, found: bool) -> None:
    settings = {**MXFP4, "extra_config": {key: {"bits": 16}}}
    assert settings_of(Q, settings)["bits"] == (16 if found else 4)


def test_the_path_of_a_layer_goes_before_expressions() -> None:
    by_layer = {r".*q_proj.*": {"bits": 16, "act_bits": 16}, Q: {"bits": 8}}
    assert settings_of(Q, {**MXFP4, "extra_config": by_layer})["bits"] == 8


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"data_type": "nvfp4_v2", "group_size": 16}, "data_type nvfp4_v2, bits 4, group_size 16"),
        ({"data_type": "mx_int"}, "data_type mx_int, bits 4, group_size 32"),
        ({"data_type": "int"}, "data_type int, bits 4, group_size 32"),
        ({"bits": 6}, "data_type mx_fp, bits 6, group_size 32"),
        ({"group_size": 64}, "data_type mx_fp, bits 4, group_size 64"),
        ({"bits": None}, "data_type mx_fp, bits None, group_size 32"),
    ],
)
def test_other_settings_are_named(changed: dict[str, object], why: str) -> None:
    tensors = module(Q, ("U8", (64, 32)), ("U8", (64, 2)))
    with pytest.raises(Unread) as refused:
        AUTO_ROUND.weights(on_disk(tensors, {**MXFP4, **changed}))
    assert str(refused.value).startswith(f"{Q}: its settings are {why}, which mxcli does not read; it reads mxfp4_e2m1")


def test_integers_are_named() -> None:
    tensors = {f"{Q}.qweight": ("I32", (4, 64)), f"{Q}.qzeros": ("I32", (1, 8)), f"{Q}.scales": ("F16", (1, 64))}
    settings = {"bits": 4, "group_size": 128, "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    with pytest.raises(Unread, match=rf"^{Q}\.qweight: the quantization_config states data_type int, bits 4: integers"):
        AUTO_ROUND.weights(on_disk(tensors, settings))


@pytest.mark.parametrize(
    ("tensors", "settings", "fault"),
    [
        ({f"{Q}.weight_packed": ("U8", (64, 32))}, MXFP4, f"{Q}.weight_scale is missing (mxfp4_e2m1, as its settings"),
        ({f"{Q}.weight_scale": ("U8", (64, 2))}, MXFP4, f"{Q}.weight_packed is missing (mxfp4_e2m1, as its settings"),
        ({f"{Q}.weight": ("F8_E4M3", (64, 64))}, MXFP8, f"{Q}.weight_scale is missing (mxfp8_e4m3, as its settings"),
        (module(Q, ("U8", (64, 32)), ("U8", (64, 3))), MXFP4, f"{Q}.weight_scale is U8 [64, 3]; mxfp4_e2m1 needs U8 "),
        (module(Q, ("U8", (64, 32)), ("U8", (64, 2))), MXFP8, f"{Q}.weight is missing (mxfp8_e4m3, as its settings"),
        (module(Q, ("U8", (64, 32)), ("F8_E4M3", (64, 4))), NVFP4, f"{Q}.weight_global_scale is missing (nvfp4)"),
        (module(Q, ("U8", (2, 64, 32)), ("U8", (64, 2))), MXFP4, "[2, 64, 32] is not the shape of a matrix of codes"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors: Described, settings: Any, fault: str) -> None:
    with pytest.raises(Misfits) as refused:
        AUTO_ROUND.weights(on_disk(tensors, settings))
    assert refused.value.faults[Q].startswith(fault)


def test_an_expression_that_may_not_end_is_a_fault() -> None:
    settings = {**MXFP4, "extra_config": {"(a*)*": {"bits": 16}}}
    with pytest.raises(Misfits, match="repeats what is repeated"):
        AUTO_ROUND.weights(on_disk(module(Q, ("U8", (64, 32)), ("U8", (64, 2))), settings))


def test_rotations_of_activations_are_refused() -> None:
    disk = on_disk({}, {**MXFP4, "rotation_config": {"hadamard_type": "hadamard"}})
    assert AUTO_ROUND.transforms(disk).refusal == (
        "its rotation_config states rotations that loaders apply to activations: its weights alone are other ones"
    )
    assert AUTO_ROUND.transforms(on_disk({}, MXFP4)).refusal is None


def test_two_packings_are_refused() -> None:
    with pytest.raises(RefusedError, match=r"the layout auto-round states one packing for a whole model"):
        AUTO_ROUND.settings([weight("mxfp8"), weight("fp8_e4m3_128x128", f"{DOWN}.weight")], [])


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (weight("mxfp6_e2m3"), "it has no mxfp6_e2m3"),
        (weight("mxfp4", shape=(2, 64, 64)), "it holds matrices only, not 3 dimensions"),
        (weight("mxfp4", shape=(64, 48)), "it stores no padding, and 48 is not a multiple of 32"),
        (Weight("a.weight", (64, 64), resolve("mxfp4"), "BF16", COLUMN), "it holds layers stored [out, in] only"),
        (weight("mxfp4"), None),
    ],
)
def test_what_it_cannot_hold(held: Weight, why: str | None) -> None:
    assert refusal(AUTO_ROUND, held) == why


def test_it_is_the_layout_of_its_dialect() -> None:
    assert layout_of_dialect("auto-round") is AUTO_ROUND
    assert AUTO_ROUND.remarks([weight("mxfp4"), weight("mxfp8")]) == [
        "auto-round's settings state inputs of 4 bits for mxfp4_e2m1: its loaders quantize them too.",
        "auto-round's settings state inputs of 8 bits for mxfp8_e4m3: its loaders quantize them too.",
    ]
