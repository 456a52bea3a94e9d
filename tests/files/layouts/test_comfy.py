"""ComfyUI's layout: what is stored, what is found again, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxcli.backends.cpu import Cpu
from mxcli.errors import InputError
from mxcli.files.layouts import LAYOUTS, InputScale, OnDisk, Weight, find_layout, layout_of_dialect, quantized_from
from mxcli.files.layouts.comfy import HIGH_FIRST
from mxcli.files.layouts.layout import Misfits, Unread
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.formats import FORMATS
from mxcli.numerics.scheme import resolve

COMFY = LAYOUTS["comfy"]
Described = dict[str, tuple[str, tuple[int, ...]]]

NVFP4: Described = {
    "a.weight": ("U8", (144, 32)),
    "a.weight_scale": ("F8_E4M3", (256, 4)),
    "a.weight_scale_2": ("F32", ()),
}
MXFP8: Described = {"a.weight": ("F8_E4M3", (160, 96)), "a.weight_scale": ("F8_E8M0", (256, 4))}
SCALED: Described = {"a.weight": ("F8_E4M3", (33, 40)), "a.weight_scale": ("F32", ())}
OLD: Described = {"a.weight": ("F8_E4M3", (33, 40)), "a.scale_weight": ("F32", ()), "scaled_fp8": ("F8_E4M3", (2,))}


def on_disk(tensors: Described, texts: Mapping[str, object] = {}, layers: object = None) -> OnDisk:
    """A file of these tensors, with markers of these contents (bytes as they are, else as JSON), and of a header."""
    infos = {name: TensorInfo(name, dtype, shape, "codes", Path("m"), 0, 0) for name, (dtype, shape) in tensors.items()}
    contents = {name: text if isinstance(text, bytes) else json.dumps(text).encode() for name, text in texts.items()}
    for name, text in contents.items():
        shape = tensors.get(name, ("U8", (len(text),)))[1]
        infos[name] = TensorInfo(name, tensors.get(name, ("U8", ()))[0], shape, "buffer", Path("m"), 0, len(text))
    metadata = {} if layers is None else {"_quantization_metadata": json.dumps({"layers": layers})}
    return OnDisk(infos, {}, metadata=metadata, bytes_of=lambda info: contents.get(info.name))


def marked(format: str, **more: object) -> dict[str, object]:
    return {"a.comfy_quant": {"format": format, **more}}


def found(disk: OnDisk) -> list[tuple[str, tuple[int, ...], str, str]]:
    return [(each.name, each.shape, each.format.name, each.variant) for each in COMFY.weights(disk)]


def test_its_names() -> None:
    assert find_layout("comfyui") is COMFY
    assert layout_of_dialect("comfyui") is COMFY
    assert layout_of_dialect("comfy-fp8") is COMFY


@pytest.mark.parametrize(
    ("format", "shape", "expected"),
    [
        ("nvfp4", (144, 64), {**NVFP4, "a.comfy_quant": ("U8", (19,))}),
        ("nvfp4", (16, 80), {**NVFP4, "a.weight": ("U8", (16, 40)), "a.weight_scale": ("F8_E4M3", (128, 8))}),
        ("mxfp8", (160, 96), {**MXFP8, "a.comfy_quant": ("U8", (19,))}),
        ("fp8_e4m3", (33, 40), {**SCALED, "a.comfy_quant": ("U8", (27,))}),
        ("fp8_e5m2", (33, 40), {**SCALED, "a.weight": ("F8_E5M2", (33, 40)), "a.comfy_quant": ("U8", (25,))}),
    ],
)
def test_what_is_stored(format: str, shape: tuple[int, ...], expected: Described) -> None:
    contents = COMFY.contents(Weight("a.weight", shape, resolve(format), "BF16"))
    entries = {each.entry.name: (each.entry.dtype, each.entry.shape) for each in contents}
    assert entries == {"a.comfy_quant": ("U8", (19,)), **expected}


@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3"])
def test_a_scale_of_inputs_is_the_one_that_scales_back(format: str) -> None:
    assert format in COMFY.input_scales
    scale = InputScale(amax=6.0, decode=0.25, encode=4.0)
    (content,) = (
        each
        for each in COMFY.contents(Weight("a.weight", (16, 16), resolve(format), "BF16", input_scale=scale))
        if each.entry.name == "a.input_scale"
    )
    assert (content.entry.dtype, content.entry.shape) == ("F32", ())
    record = Cpu().quantize(np.ones((16, 16), np.float32), "F32", resolve(format))
    assert content.of(record) == np.float32(0.25)


def test_the_header_states_every_layer() -> None:
    weights = [Weight(f"{at}.weight", (64, 64), resolve(at), "BF16") for at in ("nvfp4", "mxfp8", "fp8_e4m3")]
    assert json.loads(COMFY.metadata(weights, [])["_quantization_metadata"]) == {
        "format_version": "1.0",
        "layers": {
            "nvfp4": {"format": "nvfp4"},
            "mxfp8": {"format": "mxfp8"},
            "fp8_e4m3": {"format": "float8_e4m3fn"},
        },
    }
    assert COMFY.settings(weights, ["lm_head"]) == {}


@pytest.mark.parametrize(
    ("format", "shape", "why"),
    [
        ("nvfp4", (100, 64), "it stores no padding, and 100 rows are not a multiple of 16"),
        ("mxfp8", (48, 64), "it stores no padding, and 48 rows are not a multiple of 32"),
        ("mxfp8", (64, 48), "it stores no padding, and 48 is not a multiple of 32"),
        ("mxfp4", (64, 64), "it has no mxfp4_e2m1"),
        ("fp8_e4m3", (3, 64, 64), "it holds matrices only, not 3 dimensions"),
    ],
)
def test_what_it_cannot_hold(format: str, shape: tuple[int, ...], why: str) -> None:
    assert COMFY.refusal(Weight("a.weight", shape, resolve(format), "BF16")) == why


def test_the_even_element_is_in_the_high_bits() -> None:
    stored = np.array([[0x12, 0x3F, 0x80]], np.uint8)
    loaded = HIGH_FIRST.load(stored, FORMATS["nvfp4"], (1, 6))["packed"]
    assert loaded.tolist() == [[0x21, 0xF3, 0x08]]


def test_every_scale_of_nvfp4_is_at_its_place() -> None:
    (weight,) = COMFY.weights(on_disk(NVFP4, marked("nvfp4")))
    tiles = np.arange(1024, dtype=np.int64).reshape(256, 4)
    arrays: dict[str, Any] = {
        "a.weight": np.full((144, 32), 0x12, np.uint8),
        "a.weight_scale": (tiles % 251).astype(np.uint8),
        "a.weight_scale_2": np.array(0.5, np.float32),
        "a.comfy_quant": np.zeros(19, np.uint8),
    }
    record = quantized_from(weight, [(part, arrays[part.entry.name]) for part in COMFY.contents(weight)])
    # Rows 0, 1, 32 and 128 of four blocks: 16 bytes a row of a tile, 4 rows next to each other, 512 bytes a tile.
    assert record.scales.shape == (144, 4)
    assert record.scales[0].tolist() == [0, 1, 2, 3]
    assert record.scales[1].tolist() == [16, 17, 18, 19]
    assert record.scales[32].tolist() == [4, 5, 6, 7]
    assert record.scales[128].tolist() == [512 % 251, 513 % 251, 514 % 251, 515 % 251]
    assert record.tensor_scale == 0.5
    assert record.packed[0].tolist() == [0x21] * 32


@pytest.mark.parametrize(
    ("tensors", "texts", "layers", "expected"),
    [
        (NVFP4, marked("nvfp4"), None, ((144, 64), "nvfp4", "")),
        (NVFP4, marked("nvfp4"), {"a": {"format": "nvfp4"}}, ((144, 64), "nvfp4", "")),
        (NVFP4, {}, {"a": {"format": "nvfp4"}, "gone": {"format": "x"}}, ((144, 64), "nvfp4", "unmarked")),
        (NVFP4, marked("nvfp4", full_precision_matrix_mult=True), None, ((144, 64), "nvfp4", "unmarked")),
        (NVFP4, marked("nvfp4", group_size=16, convrot=False), None, ((144, 64), "nvfp4", "unmarked")),
        (NVFP4, marked("nvfp4", orig_shape=[144, 64]), None, ((144, 64), "nvfp4", "unmarked")),
        (
            {**NVFP4, "a.weight_scale": ("U8", (256, 4)), "a.bias": ("BF16", (144,))},
            marked("nvfp4"),
            None,
            ((144, 64), "nvfp4", "bytes"),
        ),
        (MXFP8, marked("mxfp8"), None, ((160, 96), "mxfp8_e4m3", "")),
        ({**MXFP8, "a.weight_scale": ("U8", (256, 4))}, marked("mxfp8"), None, ((160, 96), "mxfp8_e4m3", "")),
        (SCALED, marked("float8_e4m3fn"), None, ((33, 40), "fp8_e4m3", "")),
        ({**SCALED, "a.weight_scale": ("F32", (1,))}, marked("float8_e4m3fn"), None, ((33, 40), "fp8_e4m3", "vector")),
        ({**SCALED, "a.weight": ("F8_E5M2", (33, 40))}, marked("float8_e5m2"), None, ((33, 40), "fp8_e5m2", "")),
        (OLD, {}, None, ((33, 40), "fp8_e4m3", "unmarked old")),
        ({**OLD, "a.weight": ("F8_E5M2", (8, 4, 3))}, {}, None, ((8, 4, 3), "fp8_e5m2", "unmarked old")),
    ],
)
def test_a_weight_is_what_its_marker_or_header_states(
    tensors: Described, texts: Mapping[str, object], layers: object, expected: tuple[tuple[int, ...], str, str]
) -> None:
    disk = on_disk(tensors, texts, layers)
    assert found(disk) == [("a.weight", *expected)]
    stored = {part.entry.name for part in COMFY.contents(COMFY.weights(disk)[0])}
    assert stored <= disk.tensors.keys()


def test_layers_of_a_file_differ() -> None:
    tensors: Described = {}
    for name, described in (("n", NVFP4), ("m", MXFP8), ("f", SCALED)):
        tensors |= {key.replace("a.", f"{name}.", 1): value for key, value in described.items()}
    texts = {"n.comfy_quant": {"format": "nvfp4"}, "f.comfy_quant": {"format": "float8_e4m3fn"}}
    disk = on_disk({**tensors, "p.weight": ("BF16", (4, 4))}, texts, {"m": {"format": "mxfp8"}})
    assert [(name, format) for name, _, format, _ in found(disk)] == [
        ("n.weight", "nvfp4"),
        ("m.weight", "mxfp8_e4m3"),
        ("f.weight", "fp8_e4m3"),
    ]


@pytest.mark.parametrize(
    ("tensors", "texts", "layers", "fault"),
    [
        (NVFP4, {}, None, "is U8, and neither a.comfy_quant nor _quantization_metadata states its format."),
        (NVFP4, marked("nvfp4"), {"a": {"format": "mxfp8"}}, "a.comfy_quant states nvfp4, and _quantization_metadata"),
        (NVFP4, marked("mxfp8"), None, "is U8 [144, 32]; mxfp8 needs a matrix of F8_E4M3."),
        (MXFP8, marked("float8_e5m2"), None, "is F8_E4M3 [160, 96]; float8_e5m2 needs a matrix of F8_E5M2."),
        (SCALED, marked("mxfp8"), None, "is [33, 40], which mxfp8 cannot have: it stores no padding, and 40 is not a"),
        ({**MXFP8, "a.weight_scale": ("F32", ())}, marked("mxfp8"), None, "is F32 []; mxfp8 needs F8_E8M0 [256, 4]."),
        ({**NVFP4, "a.weight_scale": ("F8_E4M3", (144, 4))}, marked("nvfp4"), None, "nvfp4 needs F8_E4M3 [256, 4]."),
        ({"a.weight": ("F8_E4M3", (4, 4))}, marked("float8_e4m3fn"), None, "a.weight_scale is missing (float8_e4m3fn)"),
        ({"a.weight": ("BF16", (4, 4))}, marked("float8_e4m3fn"), None, "is BF16 [4, 4]; float8_e4m3fn needs a matrix"),
        ({}, marked("nvfp4"), None, "a.weight: is missing, though its scale or marker is there."),
        (NVFP4, {"a.comfy_quant": b"{"}, None, "a.comfy_quant is not JSON that states its format."),
        (NVFP4, {"a.comfy_quant": b"\xff\xfe"}, None, "a.comfy_quant is not JSON that states its format."),
        (NVFP4, {"a.comfy_quant": [1]}, None, "a.comfy_quant is not JSON that states its format."),
        (NVFP4, {"a.comfy_quant": {"x": 1}}, None, "describes it without a format."),
        (NVFP4, {}, {"a": "nvfp4"}, "_quantization_metadata states nvfp4; it must be an object with a format."),
        ({**OLD, "a.weight": ("I8", (4, 4))}, {}, None, "is I8 [4, 4]; expected F8_E4M3 or F8_E5M2."),
    ],
)
def test_what_does_not_fit(tensors: Described, texts: Mapping[str, object], layers: object, fault: str) -> None:
    with pytest.raises(Misfits) as caught:
        COMFY.weights(on_disk(tensors, texts, layers))
    assert fault in caught.value.message
    assert caught.value.message.startswith("a.weight: ")


@pytest.mark.parametrize(
    ("tensors", "texts", "why"),
    [
        (NVFP4, marked("int8_tensorwise"), "its marker states int8_tensorwise, which mxcli does not read"),
        (NVFP4, marked("nvfp4", convrot=True), "its marker states convrot True, which mxcli does not read"),
        (NVFP4, marked("nvfp4", group_size=32), "its marker states group_size 32, which mxcli does not read"),
        (
            {**NVFP4, "a.bias": ("BF16", (140,))},
            marked("nvfp4"),
            "[144, 64] is padded (its bias has 140), and mxcli does not read padded layers of ComfyUI",
        ),
        (NVFP4, marked("nvfp4", orig_shape=[144, 60]), "[144, 64] is padded (the layer is [144, 60]), and mxcli does"),
    ],
)
def test_what_is_not_read(tensors: Described, texts: Mapping[str, object], why: str) -> None:
    with pytest.raises(Unread) as caught:
        COMFY.weights(on_disk(tensors, texts))
    assert why in caught.value.message


@pytest.mark.parametrize("text", ["{", "[]", '{"layers": []}', "1", "null"])
def test_a_header_that_cannot_be_read_is_an_error(text: str) -> None:
    disk = OnDisk({}, {}, metadata={"_quantization_metadata": text})
    with pytest.raises(InputError, match=r"_quantization_metadata: of the file's __metadata__ must be JSON"):
        COMFY.weights(disk)
    assert COMFY.transforms(disk).note is None


def test_plain_weights_of_an_older_file_may_have_a_scale_of_1() -> None:
    one, two = np.float32(1).tobytes(), np.float32(2).tobytes()
    tensors: Described = {
        **OLD,
        "b.weight": ("BF16", (4, 4)),
        "b.scale_weight": ("F32", ()),
        "b.scale_input": ("F32", ()),
    }
    disk = on_disk(tensors, {"b.scale_weight": one, "b.scale_input": one})
    assert [name for name, *_ in found(disk)] == ["a.weight"]
    assert COMFY.markers(disk) == {"scaled_fp8", "b.scale_weight", "b.scale_input"}
    for other in (two, one + one):
        with pytest.raises(Misfits, match=r"b.weight: is BF16, not quantized, and b.scale_weight is not 1"):
            COMFY.weights(on_disk(tensors, {"b.scale_weight": other}))


@pytest.mark.parametrize(
    ("tensors", "texts", "layers", "expected"),
    [
        (NVFP4, marked("nvfp4"), None, None),
        (NVFP4, marked("nvfp4", full_precision_matrix_mult=True), None, "1 layers ('a', …) state full_precision"),
        (NVFP4, {}, {"a": {"format": "nvfp4", "full_precision_matrix_mult": True}}, "1 layers ('a', …) state full"),
        (OLD, {}, None, "1 layers ('a', …) state full_precision_matrix_mult"),
        ({**OLD, "scaled_fp8": ("F8_E4M3", (0,))}, {}, None, None),
    ],
)
def test_products_of_plain_inputs_are_noted(
    tensors: Described, texts: Mapping[str, object], layers: object, expected: str | None
) -> None:
    transforms = COMFY.transforms(on_disk(tensors, texts, layers))
    assert transforms.refusal is None
    assert (transforms.note is None) if expected is None else (transforms.note or "").startswith(expected)
