"""The layout mlx: what MLX's modes store, what mlx_lm.convert writes, and bytes that mx.quantize made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.checkpoint import open_checkpoint
from mxcli.files.layouts import COLUMN, LAYOUTS, OnDisk, Weight, layout_of_dialect, quantized_from
from mxcli.files.layouts.known_settings import unknown_settings
from mxcli.files.layouts.layout import Misfits, Unread, refusal
from mxcli.files.tensors import Array, TensorInfo
from mxcli.numerics.hadamard import find_hadamard
from mxcli.numerics.scheme import Rules, resolve

MLX = LAYOUTS["mlx"]
NVFP4 = "e2m1:e4m3:1x16"
MODES: dict[str, dict[str, Any]] = {
    "mxfp4": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    "mxfp8": {"group_size": 32, "bits": 8, "mode": "mxfp8"},
    NVFP4: {"group_size": 16, "bits": 4, "mode": "nvfp4"},
}
Q, O, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"
Described = dict[str, tuple[str, tuple[int, ...]]]


def weight(format: str, name: str = "a.weight", shape: tuple[int, ...] = (48, 64), axis: str = "row") -> Weight:
    return Weight(name, shape, resolve(format), "BF16", axis)


def on_disk(tensors: Described, settings: Any, **more: Any) -> OnDisk:
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    keys = {} if settings is None else {"quantization": settings, "quantization_config": settings}
    return OnDisk(infos, {"torch_dtype": "bfloat16", **keys, **more})


def module(name: str, codes: tuple[int, ...], scales: tuple[int, ...], dtype: str = "U8") -> Described:
    return {f"{name}.weight": ("U32", codes), f"{name}.scales": (dtype, scales)}


def faults(disk: OnDisk) -> dict[str, str]:
    with pytest.raises(Misfits) as caught:
        MLX.weights(disk)
    return dict(caught.value.faults)


def hazards(disk: OnDisk) -> list[tuple[str, str, bool]]:
    return [(each.where, each.value, each.certain) for each in MLX.hazards(disk, MLX.weights(disk))]


# --- What is written ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "codes", "scales"),
    [("mxfp4", (48, 8), (48, 2)), ("mxfp8", (48, 16), (48, 2)), (NVFP4, (48, 8), (48, 4))],
)
def test_what_is_stored(format: str, codes: tuple[int, ...], scales: tuple[int, ...]) -> None:
    entries = {each.entry.name: (each.entry.dtype, each.entry.shape) for each in MLX.contents(weight(format))}
    assert entries == {"a.weight": ("U32", codes), "a.scales": ("U8", scales)}
    settings = MLX.settings([weight(format)], ["lm_head"])
    assert settings == MODES[format]
    (again,) = MLX.weights(on_disk(entries, settings))
    assert (again.name, again.shape, again.format, again.dtype) == ("a.weight", (48, 64), weight(format).format, "BF16")
    assert MLX.metadata([again], []) == {"format": "mlx"}


def test_the_mode_of_most_layers_is_stated_for_all_and_the_rest_by_path() -> None:
    weights = [weight("mxfp4", f"{Q}.weight"), weight("mxfp8", f"{DOWN}.weight"), weight(NVFP4, f"{O}.weight")]
    weights += [weight("mxfp4", "lm_head.weight")]
    settings = MLX.settings(weights, [])
    assert settings == {**MODES["mxfp4"], DOWN: MODES["mxfp8"], O: MODES[NVFP4]}
    tensors = {each.entry.name: each.entry for one in weights for each in MLX.contents(one)}
    disk = on_disk({name: (entry.dtype, entry.shape) for name, entry in tensors.items()}, settings)
    found = {each.name: each.format for each in MLX.weights(disk)}
    assert found == {each.name: each.format for each in weights}
    assert MLX.hazards(disk, weights) == []


@pytest.mark.parametrize(
    ("held", "why"),
    [
        (weight("mxfp4"), None),
        (weight("nvfp4"), "it has no nvfp4"),
        (weight("mxfp8_e5m2"), "it has no mxfp8_e5m2"),
        (weight("mxfp4", shape=(4, 48, 64)), "it holds matrices only, not 3 dimensions"),
        (weight("mxfp4", "a.experts.gate_up_proj"), "it names the weights of modules only (MODULE.weight)"),
        (weight("mxfp4", axis=COLUMN), "it holds layers stored [out, in] only"),
        (weight("mxfp4", shape=(48, 72)), "it stores no padding, and 72 is not a multiple of 32"),
        (weight(NVFP4, shape=(48, 72)), "it stores no padding, and 72 is not a multiple of 16"),
        (weight(NVFP4, shape=(48, 80)), None),
    ],
)
def test_what_it_can_hold(held: Weight, why: str | None) -> None:
    assert refusal(MLX, held) == why


def test_transformed_weights_are_not_for_mlx() -> None:
    rotated = Weight("a.weight", (48, 64), resolve("mxfp4", Rules(hadamard=find_hadamard(16, 1))), "BF16")
    assert "its loaders do not support the hadamard" in str(refusal(MLX, rotated)).lower()


def test_what_is_lost_without_a_tensor_scale_is_said() -> None:
    assert MLX.remarks([weight("mxfp4"), weight("mxfp8")]) == []
    (remark,) = MLX.remarks([weight("mxfp4"), weight(NVFP4)])
    assert remark.startswith("nvfp4 of MLX has no tensor scale: its block scales reach down to 2^-9")


# --- What mlx_lm.convert writes ----------------------------------------------------------------------------


def test_layers_in_several_modes_embeddings_and_plain_ones_are_found() -> None:
    tensors = {
        **module("model.embed_tokens", (256, 16), (256, 4)),
        **module(Q, (128, 16), (128, 4)),
        **module(DOWN, (128, 96), (128, 12)),
        **module(O, (128, 16), (128, 8)),
        f"{Q}.bias": ("BF16", (128,)),
        "lm_head.weight": ("BF16", (256, 128)),
    }
    settings = {**MODES["mxfp4"], "lm_head": False, DOWN: MODES["mxfp8"], O: MODES[NVFP4]}
    found = {
        each.name.removesuffix(".weight"): (each.format.name, each.shape)
        for each in MLX.weights(on_disk(tensors, settings))
    }
    assert found == {
        "model.embed_tokens": ("mxfp4_e2m1", (256, 128)),
        Q: ("mxfp4_e2m1", (128, 128)),
        DOWN: ("mxfp8_e4m3", (128, 384)),
        O: (NVFP4, (128, 128)),
    }
    assert hazards(on_disk(tensors, settings)) == []


@pytest.mark.parametrize(
    ("codes", "scales", "format", "shape"),
    [
        ((4, 192, 16), (4, 192, 4), "mxfp4_e2m1", (4, 192, 128)),
        ((4, 128, 48), (4, 128, 6), "mxfp8_e4m3", (4, 128, 192)),
        ((8, 64, 16), (8, 64, 8), NVFP4, (8, 64, 128)),
    ],
)
def test_stacks_of_experts_are_read(codes: Any, scales: Any, format: str, shape: tuple[int, ...]) -> None:
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    mode = MODES[{"mxfp4_e2m1": "mxfp4", "mxfp8_e4m3": "mxfp8"}.get(format, format)]
    (found,) = MLX.weights(on_disk(module(name, codes, scales), mode))
    assert (found.name, found.format.name, found.shape) == (f"{name}.weight", format, shape)


def test_a_model_with_settings_in_a_part_of_its_configuration_is_read() -> None:
    disk = on_disk(module("a", (48, 8), (48, 2)), None, text_config={"quantization": MODES["mxfp4"]})
    assert [each.format.name for each in MLX.weights(disk)] == ["mxfp4_e2m1"]


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_the_mode_affine_is_refused_by_name(dtype: str) -> None:
    affine = {**module(DOWN, (128, 72), (128, 6), dtype), f"{DOWN}.biases": (dtype, (128, 6))}
    tensors = {**module(Q, (128, 16), (128, 4)), **affine}
    with pytest.raises(
        Unread, match=f"{DOWN}: its mode is affine with bits 6, integers with a scale and a bias"
    ) as caught:
        MLX.weights(on_disk(tensors, {**MODES["mxfp4"], DOWN: {"group_size": 64, "bits": 6}}))
    assert [each.name for each in caught.value.sound] == [f"{Q}.weight"]
    with pytest.raises(Unread, match="its mode is affine, integers"):
        MLX.weights(on_disk(affine, {"group_size": 64, "bits": 6, "mode": "affine"}))


def test_tensor_scales_of_experts_are_refused_by_name() -> None:
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    tensors = {**module(name, (4, 64, 16), (4, 64, 8)), f"{name}.global_scale": ("F32", (4,))}
    with pytest.raises(InputError, match="its nvfp4 has a tensor scale for each expert"):
        MLX.weights(on_disk(tensors, MODES[NVFP4]))


# --- What does not fit -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "settings", "fault"),
    [
        ({"a.scales": ("U8", (48, 2))}, MODES["mxfp4"], "has scales, but a.weight is missing (mlx)."),
        (
            module("a", (48, 8), (48, 3)),
            MODES["mxfp4"],
            "weight U32 [48, 8] with scales U8 [48, 3] fits no mode of MLX: a matrix, or a stack of them, has 4 to a "
            "scale in mxfp4, 8 to a scale in mxfp8, 2 to a scale in nvfp4.",
        ),
        (module("a", (8,), (2,)), MODES["mxfp4"], "weight U32 [8] with scales U8 [2] fits no mode"),
        (module("a", (48, 0), (48, 0)), MODES["mxfp4"], "weight U32 [48, 0] with scales U8 [48, 0] fits no mode"),
        (module("a", (48, 8), (47, 2)), MODES["mxfp4"], "a.scales is U8 [47, 2]; mxfp4 needs U8 [48, 2]."),
        (module("a", (48, 8), (48, 2), "I32"), MODES["mxfp4"], "a.scales is I32 [48, 2]; mxfp4 needs U8 [48, 2]."),
        (
            module("a", (48, 8), (48, 2)),
            {**MODES["mxfp4"], "a": False},
            "has scales, but the configuration states it as plain (false).",
        ),
        (
            module("a", (48, 8), (48, 2)),
            {**MODES["mxfp4"], "a": MODES["mxfp8"]},
            "the configuration states mode mxfp8, bits 8 for it; its tensors are mxfp4, with mode mxfp4, bits 4.",
        ),
        (
            module("a", (48, 8), (48, 2)),
            {**MODES["mxfp4"], "a": {"group_size": 32, "bits": 4}},
            "the configuration states mode affine for it; its tensors are mxfp4, with mode mxfp4.",
        ),
        (
            module("a", (48, 8), (48, 2)),
            {**MODES["mxfp4"], "group_size": 64},
            "the configuration states group_size 64 for it; its tensors are mxfp4, with group_size 32.",
        ),
        (
            module("a", (48, 8), (48, 1)),
            {**MODES["mxfp4"], "b": MODES["mxfp8"]},
            "the configuration states mode mxfp4, bits 4 for it; its tensors are mxfp8, with mode mxfp8, bits 8.",
        ),
        (
            module("a", (48, 8), (48, 2)),
            {"group_size": 64, "bits": 4},
            "the configuration states mode affine, group_size 64 for it; its tensors are mxfp4, with mode mxfp4, group",
        ),
        (
            module("a", (48, 8), (48, 4)),
            {**MODES[NVFP4], "bits": 8},
            "the configuration states bits 8 for it; its tensors are nvfp4, with bits 4.",
        ),
    ],
)
def test_tensors_that_are_not_what_is_stated(tensors: Described, settings: Any, fault: str) -> None:
    found = faults(on_disk(tensors, settings))
    assert list(found) == ["a"]
    assert found["a"].startswith(fault)


def test_settings_that_loaders_do_not_read_as_the_weights_are() -> None:
    tensors = {**module("a", (48, 8), (48, 2)), **module("b", (48, 16), (48, 2)), "c.weight": ("BF16", (48, 64))}
    assert hazards(on_disk(tensors, None)) == [("config.json", "no quantization", True)]
    assert hazards(on_disk(tensors, {**MODES["mxfp4"], "b": MODES["mxfp8"]})) == []
    stated = {**MODES["mxfp4"], "b": MODES["mxfp8"], "c": MODES["mxfp8"], "d": MODES["mxfp8"]}
    assert hazards(on_disk(tensors, stated)) == [("c", "plain, and stated as mxfp8", True)]


def test_the_two_copies_of_the_settings_must_be_equal() -> None:
    tensors = module("a", (48, 8), (48, 2))
    alone = on_disk(tensors, None, quantization_config=MODES["mxfp4"])
    assert hazards(alone) == [("config.json", "quantization_config alone", True)]
    differ = on_disk(tensors, None, quantization=MODES["mxfp4"], quantization_config=MODES["mxfp8"])
    assert hazards(differ) == [("config.json", "quantization and quantization_config differ", False)]
    assert hazards(on_disk(tensors, None, quantization=MODES["mxfp4"])) == []


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({**MODES["mxfp4"], "mode": "mxfp5"}, "mode"),
        ({**MODES["mxfp4"], "a": {**MODES["mxfp8"], "mode": "fp8"}}, "a.mode"),
        ({**MODES["mxfp4"], "bits": 7}, "bits"),
        ({**MODES["mxfp4"], "group_size": 8}, "group_size"),
    ],
)
def test_values_that_mlx_does_not_know(settings: Any, path: str) -> None:
    found = unknown_settings({"config.json": settings}, MLX.known_settings, {"mxfp4_e2m1"})
    assert [each.path for each in found] == [path]
    assert not list(unknown_settings({"config.json": {**MODES["mxfp4"], Q: MODES["mxfp8"]}}, MLX.known_settings, ()))


# --- Bytes that mx.quantize made on a CPU (mlx 0.32.4) --------------------------------------------------------

MADE = {
    "mxfp4": (
        "0000401ca5d2390cb4512a9dc4402ba5d3401cb5d2390cb4512a9dc4401ba5d3"
        "491cb5d2390cc4512a9dc3401ba5d3490cb5d23a0cc4512a9dc3401ba5d2490c",
        "7d7d7b7b",
    ),
    "mxfp8": (
        "0080b030dc78f7667bf270fcea76f90079f66a7cf072fbe677f85c7af46d7cee"
        "74fae078f8647bf270fceb75fad079f6697cf172fbe876f9587af46c7cef73fa"
        "e278f8627af36ffcec74fad879f6687bf271fce976f9507af56b7cf072fbe478"
        "f8607af46efced74fadc78f7667bf270fcea76f90079f66a7cf072fbe677f85c",
        "76767474",
    ),
    NVFP4: (
        "0000692ec7f45a0ed6724cafe6613db7f5691ed7f45b0ed6724cafe6603dc7f5"
        "691ed7f45b0ee6724cafe5603dc7f5691ed7f35b9ee6724cafe5602dc7f46a1e",
        "2020202010101010",
    ),
}
VALUES = {
    "mxfp4": [-0.03125, 0.125, -0.125, 0.03125, 0.1875, -0.09375, 0.0625, -0.1875],
    "mxfp8": [-0.01953125, 0.125, -0.125, 0.01953125, 0.15625, -0.0859375, 0.05859375, -0.1875],
    NVFP4: [-0.015625, 0.125, -0.125, 0.015625, 0.1875, -0.09375, 0.0625, -0.1875],
}
"""The beginnings of the second rows, as mx.dequantize returns them."""


def given() -> Array:
    """Numbers of 7 bits, exact in bfloat16, many of them halfway between two codes, and zeros of both signs."""
    index = np.arange(128).reshape(2, 64)
    x = ((index * 37 % 101 - 50) / np.array([[64], [256]])).astype(np.float32)
    x[0, :4] = 0, -0.0, -1e-3, 1e-3
    return x


@pytest.mark.parametrize("format", MADE)
def test_codes_and_scales_of_mlx(format: str) -> None:
    q = Cpu().quantize(given(), "F32", resolve(format, Rules(dialect="mlx-cpu")))
    assert (q.packed.tobytes().hex(), q.scales.tobytes().hex()) == MADE[format]


@pytest.mark.parametrize("format", MADE)
def test_values_of_mlx(format: str) -> None:
    held = weight(format, shape=(2, 64))
    codes, scales = (np.frombuffer(bytes.fromhex(text), np.uint8) for text in MADE[format])
    made = {"a.weight": codes.view("<u4").reshape(2, -1), "a.scales": scales.reshape(2, -1)}
    contents = MLX.contents(held)
    stored = quantized_from(held, [(content, made[content.entry.name]) for content in contents])
    assert Cpu().dequantize(stored, "F32")[1, :8].tolist() == VALUES[format]
    for content in contents:
        assert content.of(stored).tobytes() == made[content.entry.name].tobytes()


def test_a_file_of_mlx_is_recognized(tmp_path: Path) -> None:
    assert layout_of_dialect("mlx") is MLX
    tensors = {"a.weight": ("U32", [2, 8], MADE["mxfp4"][0]), "a.scales": ("U8", [2, 2], MADE["mxfp4"][1])}
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    data = b""
    for name, (dtype, shape, text) in tensors.items():
        content = bytes.fromhex(text)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    note = "No quantization_config; mlx is recognized by the names and dtypes of the tensors."
    assert (open_checkpoint(tmp_path).dialect, open_checkpoint(tmp_path).notes) == ("mlx", (note,))
    for key in ("quantization", "quantization_config"):
        (tmp_path / "config.json").write_text(json.dumps({key: MODES["mxfp4"]}))
        assert (open_checkpoint(tmp_path).dialect, open_checkpoint(tmp_path).notes) == ("mlx", ())
