"""ComfyUI's files of diffusion models: FP8, MXFP8 and NVFP4, each layer in its own format.

A marker, the tensor X.comfy_quant, holds JSON that states the format of X.weight; `_quantization_metadata` in the
header states the same of several layers, and ComfyUI makes markers of it. In the older form the file holds
`scaled_fp8`, and each FP8 weight has X.scale_weight. Block scales are in the 128x4 order, and NVFP4 has the even
element in the high bits; it scales back by `codes * (block scale * weight_scale_2)`. ComfyUI pads MXFP8 and NVFP4
layers to multiples of 32 and 16 rows and takes the true size from the model: padded layers are neither written nor
read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from mxcli.errors import InputError, printable
from mxcli.files.dialect import FP8 as FP8_DTYPES
from mxcli.files.dialect import MARKED, MARKER, OLD_MARKED, QUANTIZATION_METADATA
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    Layout,
    OnDisk,
    Transforms,
    UnreadFormat,
    Weight,
    check_fit,
    matrix_refusal,
    module_of,
    weights_of,
)
from mxcli.files.layouts.parts import CODES, DECODE, SCALES, SWIZZLED_SCALES, Part, Shape, constant
from mxcli.files.packing import TILE_COLUMNS, TILE_ROWS
from mxcli.files.tensors import Array, TensorInfo
from mxcli.numerics.blocks import Quantized, grid_shape, packed_columns
from mxcli.numerics.formats import FORMATS, BlockFormat
from mxcli.numerics.scheme import Rules, resolve

OLD_SCALE, OLD_INPUT_SCALE, OLD_MARKER = ".scale_weight", ".scale_input", "scaled_fp8"
"""Endings of names of the older form, and the tensor that marks its files."""
MATRIX_MULT = "full_precision_matrix_mult"
UNMARKED, OLD, VECTOR, BYTES = "unmarked", "old", "vector", "bytes"
"""Words of variants, which are read only: without the marker as written here, with the names of the older form, with a
scale of shape [1], and with FP8 scales of dtype U8."""
_WITHOUT_EFFECT = frozenset({"format", MATRIX_MULT, "orig_dtype"})
"""Keys of markers that do not change what codes and scales mean."""
_DECODING = Rules(dialect="modelopt")
"""The dialect that scales back by `codes * (scale * tensor scale)`."""
Stated = Mapping[str, object]


def _swapped(packed: Array) -> Array:
    """Return bytes of two 4-bit codes, each with its codes exchanged."""
    return packed << 4 | packed >> 4


def _store_high_first(quantized: Quantized, dtype: str) -> Array:
    return _swapped(np.asarray(quantized.packed))


def _load_high_first(array: Array, fmt: BlockFormat, shape: Shape) -> Mapping[str, object]:
    return {"packed": _swapped(CODES.load(array, fmt, shape)["packed"])}


def _store_marker(quantized: Quantized, dtype: str) -> Array:
    return np.frombuffer(_marker_text(KINDS[quantized.format.name]), np.uint8)


HIGH_FIRST = Part("codes", _store_high_first, _load_high_first)
"""4-bit codes packed row by row, element 0 in the high bits."""
STATED = Part("marker", _store_marker, lambda array, fmt, shape: {})
"""The text that states the format."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A format of ComfyUI: its name in markers, our format, the dtypes of codes and scales, the parts that store them,
    and the number that rows are rounded up to a multiple of."""

    name: str
    block_format: str
    codes: str
    scales: str
    codes_part: Part = CODES
    scales_part: Part = SCALES
    rows: int = 1

    @property
    def format(self) -> BlockFormat:
        """Return our format."""
        return FORMATS[self.block_format]

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of the stored scales of a weight of that shape."""
        if self.scales_part is SCALES:
            return ()
        down, across = grid_shape(self.format, shape)
        return -(-down // TILE_ROWS) * TILE_ROWS, -(-across // TILE_COLUMNS) * TILE_COLUMNS


KINDS: dict[str, Kind] = {
    kind.block_format: kind
    for kind in (
        Kind("nvfp4", "nvfp4", "U8", "F8_E4M3", HIGH_FIRST, SWIZZLED_SCALES, rows=16),
        Kind("mxfp8", "mxfp8_e4m3", "F8_E4M3", "F8_E8M0", scales_part=SWIZZLED_SCALES, rows=32),
        Kind("float8_e4m3fn", "fp8_e4m3", "F8_E4M3", "F32"),
        Kind("float8_e5m2", "fp8_e5m2", "F8_E5M2", "F32"),
    )
}
_BY_NAME = {kind.name: kind for kind in KINDS.values()}
_OLD_KINDS = {kind.codes: kind for kind in KINDS.values() if kind.scales_part is SCALES}
"""The kind of an older file by the dtype of its codes."""


def _marker_text(kind: Kind) -> bytes:
    return json.dumps({"format": kind.name}).encode()


def _refusal(weight: Weight) -> str | None:
    kind = KINDS.get(weight.format.name)
    if kind is None:
        return f"it has no {weight.format.name}"
    fault = matrix_refusal(weight)
    if fault is None and weight.shape[0] % kind.rows:
        return f"it stores no padding, and {weight.shape[0]} rows are not a multiple of {kind.rows}"
    return fault


def _contents(weight: Weight) -> tuple[Content, ...]:
    kind, words = KINDS[weight.format.name], weight.variant.split()
    module = module_of(weight)
    codes = Entry(weight.name, kind.codes, (*weight.shape[:-1], packed_columns(weight.format, weight.shape[-1])))
    scales = Entry(
        module + OLD_SCALE if OLD in words else weight.name + "_scale",
        "U8" if BYTES in words else kind.scales,
        (1,) if VECTOR in words else kind.scale_shape(weight.shape),
    )
    found = [Content(codes, kind.codes_part), Content(scales, kind.scales_part)]
    if weight.format.tensor_scale is not None:
        found.append(Content(Entry(weight.name + "_scale_2", "F32", ()), DECODE))
    if weight.input_scale is not None:
        found.append(Content(Entry(f"{module}.input_scale", "F32", ()), constant(weight.input_scale.decode)))
    if UNMARKED not in words:
        found.append(Content(Entry(module + MARKER, "U8", (len(_marker_text(kind)),)), STATED))
    return tuple(found)


def _metadata(weights: Sequence[Weight], names: Sequence[str]) -> dict[str, str]:
    layers = {module_of(weight): {"format": KINDS[weight.format.name].name} for weight in weights}
    return {QUANTIZATION_METADATA: json.dumps({"format_version": "1.0", "layers": layers})}


def _weights(disk: OnDisk) -> list[Weight]:
    layers = _layers(disk)
    names = dict.fromkeys(name for info in disk.tensors.values() for name in _claimed(info, layers))
    return weights_of(names, lambda name: _weight(name, layers, disk))


def _layers(disk: OnDisk) -> Mapping[str, object]:
    """Return the layers that the header describes, by module; empty without any. Raises InputError if it cannot be
    read."""
    text = disk.metadata.get(QUANTIZATION_METADATA)
    if text is None:
        return {}
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    layers = parsed.get("layers") if isinstance(parsed, Mapping) else None
    if not isinstance(layers, Mapping):
        raise InputError(
            f"{QUANTIZATION_METADATA}: of the file's __metadata__ must be JSON with the formats of its layers; use the "
            "file as it was published."
        )
    return layers


def _claimed(info: TensorInfo, layers: Mapping[str, object]) -> Iterator[str]:
    """Yield the name of the weight that a tensor belongs to, if it is one of the tensors that only quantized ones
    have."""
    module, _, last = info.name.rpartition(".")
    if f".{last}" in (MARKER, OLD_SCALE):
        yield module + WEIGHT
    elif last == "weight" and (module in layers or info.dtype in ("U8", "I8") or info.dtype in FP8_DTYPES):
        yield info.name
    elif last in ("weight_scale", "weight_scale_2"):
        yield f"{module}{WEIGHT}"


def _weight(name: str, layers: Mapping[str, object], disk: OnDisk) -> Weight | None:
    """Return the weight called `name`; None if it is plain. Raises ValueError if its tensors are not what is stated."""
    module, codes = name.removesuffix(WEIGHT), disk.tensors.get(name)
    if codes is None:
        raise ValueError("is missing, though its scale or marker is there")
    old, stated = module + OLD_SCALE in disk.tensors, _stated(module, layers, disk)
    if stated is None and old:
        if _is_plain(codes):
            _check_one(codes, disk.tensors[module + OLD_SCALE], disk)
            return None
        kind = _OLD_KINDS.get(codes.dtype)
    elif stated is None:
        raise ValueError(
            f"is {codes.dtype}, and neither {printable(module + MARKER)} nor {QUANTIZATION_METADATA} states its format"
        )
    else:
        kind = _kind(module, stated)
    if kind is None or codes.dtype != kind.codes or len(codes.shape) < 2:
        needs = f"{kind.name} needs a matrix of {kind.codes}" if kind else f"expected {' or '.join(_OLD_KINDS)}"
        raise ValueError(f"is {codes.dtype} {list(codes.shape)}; {needs}")
    weight = _described(name, kind, old, disk)
    _check_shape(weight, kind, stated or {}, disk)
    check_fit(_contents(weight), disk.tensors, kind.name)
    return weight


def _is_plain(info: TensorInfo) -> bool:
    return info.dtype in ("BF16", "F16", "F32")


def _check_one(weight: TensorInfo, scale: TensorInfo, disk: OnDisk) -> None:
    """Raise ValueError unless the scale of a plain weight is 1."""
    if scale.dtype != "F32" or disk.bytes_of(scale) != np.float32(1).tobytes():
        raise ValueError(
            f"is {weight.dtype}, not quantized, and {printable(scale.name)} is not 1: loaders differ in whether they "
            "apply it"
        )


def _stated(module: str, layers: Mapping[str, object], disk: OnDisk) -> Stated | None:
    """Return what the marker or the header states of a layer; None if neither does. Raises ValueError if they
    differ."""
    marker = disk.tensors.get(module + MARKER)
    listed = _as_stated(layers[module], QUANTIZATION_METADATA) if module in layers else None
    text = None if marker is None else disk.bytes_of(marker)
    if marker is None or (text is None and listed is not None):
        return listed
    try:
        parsed = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{printable(marker.name)} is not JSON that states its format")
    if listed is not None and listed.get("format") != parsed.get("format"):
        raise ValueError(
            f"{printable(marker.name)} states {printable(parsed.get('format'))}, and {QUANTIZATION_METADATA} states "
            f"{printable(listed.get('format'))}"
        )
    return parsed


def _as_stated(value: object, where: str) -> Stated:
    if isinstance(value, Mapping):
        return value
    raise ValueError(f"{printable(where)} states {printable(value)}; it must be an object with a format")


def _kind(module: str, stated: Stated) -> Kind:
    """Return the kind that is stated. Raises ValueError if none is, UnreadFormat for others and for settings that
    change what they mean."""
    name = stated.get("format")
    if not isinstance(name, str):
        raise ValueError(f"{printable(module + MARKER)} or {QUANTIZATION_METADATA} describes it without a format")
    kind = _BY_NAME.get(name)
    if kind is None:
        raise UnreadFormat(f"its marker states {printable(name)}, which mxcli does not read")
    expected = {"group_size": kind.format.block[1]}
    others = [
        key
        for key, value in stated.items()
        if key not in _WITHOUT_EFFECT and key != "orig_shape" and value and value != expected.get(key)
    ]
    if others:
        raise UnreadFormat(
            f"its marker states {printable(others[0])} {printable(stated[others[0]])}, which mxcli does not read"
        )
    return kind


def _described(name: str, kind: Kind, old: bool, disk: OnDisk) -> Weight:
    """Return a weight of a kind in the variant that the file has."""
    module, codes = name.removesuffix(WEIGHT), disk.tensors[name]
    scales, marker = disk.tensors.get(name + "_scale"), disk.tensors.get(module + MARKER)
    old = old and scales is None
    scales = disk.tensors.get(module + OLD_SCALE) if old else scales
    text = _marker_text(kind)
    usual = marker is not None and marker.shape == (len(text),) and disk.bytes_of(marker) in (text, None)
    words = [
        (UNMARKED, not usual),
        (OLD, old),
        (VECTOR, scales is not None and kind.scale_shape(codes.shape) == () and scales.shape == (1,)),
        (BYTES, scales is not None and scales.dtype == "U8" and kind.scales == "F8_E4M3"),
    ]
    shape = (*codes.shape[:-1], codes.shape[-1] * 8 // kind.format.element.stored_bits)
    variant = " ".join(word for word, applies in words if applies)
    return Weight(name, shape, resolve(kind.format, _DECODING), disk.dtype, variant=variant)


def _check_shape(weight: Weight, kind: Kind, stated: Stated, disk: OnDisk) -> None:
    """Raise ValueError for a shape that the kind cannot have, UnreadFormat for one with padding."""
    if kind.scales_part is SWIZZLED_SCALES and (fault := matrix_refusal(weight)) is not None:
        raise ValueError(f"is {list(weight.shape)}, which {kind.name} cannot have: {fault}")
    bias, size = disk.tensors.get(f"{module_of(weight)}.bias"), stated.get("orig_shape")
    rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else weight.shape[0]
    if rows != weight.shape[0] or (isinstance(size, list) and tuple(size) != weight.shape):
        smaller = f"its bias has {rows}" if rows != weight.shape[0] else f"the layer is {printable(size)}"
        raise UnreadFormat(
            f"{list(weight.shape)} is padded ({smaller}), and mxcli does not read padded layers of ComfyUI"
        )


def _markers(disk: OnDisk) -> frozenset[str]:
    """Return the tensors of an older file that only describe others: its marker, and the scales of plain weights and
    inputs."""
    names = disk.tensors.keys()
    old = {name.removesuffix(OLD_SCALE) for name in names if name.endswith(OLD_SCALE)}
    of_plain = {module for module in old if module + WEIGHT in names and _is_plain(disk.tensors[module + WEIGHT])}
    return frozenset(
        {name for name in names if name.rpartition(".")[2] == OLD_MARKER}
        | {module + OLD_SCALE for module in of_plain}
        | {name for module in old if (name := module + OLD_INPUT_SCALE) in names}
    )


def _transforms(disk: OnDisk) -> Transforms:
    """Return a note on layers whose products ComfyUI computes from dequantized weights."""
    try:
        layers = _layers(disk)
    except InputError:
        layers = {}
    found = set[str]()
    for module in {name.removesuffix(MARKER) for name in disk.tensors if name.endswith(MARKER)} | layers.keys():
        # What cannot be read is a fault of its weight.
        with suppress(ValueError):
            if (_stated(module, layers, disk) or {}).get(MATRIX_MULT):
                found.add(module)
    if any(name.rpartition(".")[2] == OLD_MARKER and info.elements == 2 for name, info in disk.tensors.items()):
        found |= {name.removesuffix(OLD_SCALE) for name in disk.tensors if name.endswith(OLD_SCALE)}
    if not found:
        return Transforms()
    return Transforms(
        note=f"{len(found):,} layers ('{printable(min(found))}', …) state {MATRIX_MULT}: ComfyUI multiplies their "
        "dequantized weights by inputs that are not quantized."
    )


COMFY = Layout(
    name="comfy",
    meaning="ComfyUI's single file, with a marker for each layer",
    source="ComfyUI's comfy/ops.py, quant_ops.py and utils.py (read); comfy-kitchen's CPU functions (run)",
    formats=tuple(KINDS),
    refusal=_refusal,
    contents=_contents,
    settings=lambda weights, ignored: {},
    weights=_weights,
    aliases=("comfyui",),
    dialects=(MARKED, OLD_MARKED),
    metadata=_metadata,
    transforms=_transforms,
    marked={kind.name: kind.codes for kind in KINDS.values()},
    markers=_markers,
    fuses=False,
    sole_file=True,
    input_scales=("nvfp4", "fp8_e4m3"),
)
