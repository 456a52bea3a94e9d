"""GGUF, as llama.cpp and transformers' loader of GGUF files read it.

Codes and scales lie together in blocks; NVFP4's tensor scale is a tensor beside them, `x.scale`. Names are those of the
file. Tensors of block types that are no format of ours (Q4_0, Q6_K, …) are decoded by the package gguf.
"""

from __future__ import annotations

from collections.abc import Sequence

from mxcli.errors import InputError, printable, together
from mxcli.files.directory import GGUF as KIND
from mxcli.files.gguf_file import SCALE
from mxcli.files.gguf_package import decoded, is_decoded, shape_of_blocks
from mxcli.files.layouts.gguf_blocks import BLOCK_TYPES, BY_FORMAT
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    ForeignWeight,
    Layout,
    OnDisk,
    Weight,
    check_fit,
    matrix_refusal,
    weights_of,
)
from mxcli.files.layouts.parts import DECODE
from mxcli.files.tensors import TensorInfo
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.recipe import resolve

_BY_NAME = {format.name: row for row in BLOCK_TYPES.values() for format in (row.format, row.alone)}


def _refusal(weight: Weight) -> str | None:
    row = BY_FORMAT.get(weight.format.name)
    if row is None:
        return f"it has no {weight.format.name}"
    if weight.recipe.nonfinite != "error":
        return "its readers take NaN scales for numbers, which --nonfinite error excludes"
    refusal = matrix_refusal(weight)
    if refusal is None and weight.shape[-1] % row.elements:
        return (
            f"it stores no padding, and {weight.shape[-1]} is not a multiple of {row.elements}, a block of {row.name}"
        )
    return refusal


def _contents(weight: Weight) -> tuple[Content, ...]:
    row = _BY_NAME[weight.format.name]
    blocks = Content(Entry(weight.name, "U8", row.bytes_shape(weight.shape), row.name), row.part)
    if weight.format.tensor_scale is None:
        return (blocks,)
    return (blocks, Content(Entry(_scale_name(weight.name), "F32", (1,)), DECODE))


def _scale_name(name: str) -> str:
    return name.removesuffix(WEIGHT) + SCALE


def _weights(disk: OnDisk) -> list[Weight]:
    def weight_of(name: str) -> Weight:
        info = disk.tensors[name]
        row = BLOCK_TYPES[info.block_type]
        format = row.format if _scale_name(name) in disk.tensors else row.alone
        shape = shape_of_blocks(info.block_type, info.shape)
        weight = Weight(name, shape, resolve(format, dialect=_DECODING[row.name]), _dtype(disk))
        check_fit(_contents(weight), disk.tensors, row.name)
        return weight

    return weights_of((name for name, info in disk.tensors.items() if info.block_type in BLOCK_TYPES), weight_of)


_DECODING = {"MXFP4": "gguf", "NVFP4": "modelopt"}
"""Dialects that scale back by `codes * (scale * tensor scale)`."""


def _foreign(disk: OnDisk) -> list[ForeignWeight]:
    """Every tensor of a block type that the package decodes; raises InputError for the types that it does not."""
    others = {name: info for name, info in disk.tensors.items() if info.block_type not in ("", *BLOCK_TYPES)}
    unknown = sorted(kind for kind in {info.block_type for info in others.values()} if not is_decoded(kind))
    if unknown:
        problems = [
            f"{printable(name)}: the installed package gguf does not decode {info.block_type}."
            for name, info in others.items()
            if info.block_type in unknown
        ]
        raise together(InputError, "Tensors of GGUF types that cannot be decoded", problems)
    return [_decoded(info, _dtype(disk)) for info in others.values()]


def _decoded(info: TensorInfo, dtype: str) -> ForeignWeight:
    plain = Entry(info.name, dtype, shape_of_blocks(info.block_type, info.shape))
    return ForeignWeight(plain, lambda blocks, dtype: decoded(blocks, info.block_type, dtype))


def _dtype(disk: OnDisk) -> str:
    """What config.json says, else what GGUF decodes to."""
    return disk.stated_dtype or "F32"


def _remarks(weights: Sequence[Weight]) -> list[str]:
    kinds = sorted({BY_FORMAT[weight.format.name].name for weight in weights})
    if "NVFP4" not in kinds:
        return []
    return [
        "NVFP4 keeps a weight's tensor scale beside it (x.scale): llama.cpp multiplies by it, transformers 5.24 leaves "
        "it out and gets wrong weights."
    ]


GGUF = Layout(
    name="gguf",
    meaning="one GGUF file for llama.cpp: codes and scales in blocks, the model's settings and tokenizer in its header",
    source="gguf 0.19, transformers 5.24; llama.cpp (read)",
    formats=tuple(BY_FORMAT),
    refusal=_refusal,
    contents=_contents,
    settings=lambda weights, ignored: {},
    weights=_weights,
    foreign=_foreign,
    dialects=("gguf",),
    remarks=_remarks,
    kind=KIND,
)


def file_type(weights: Sequence[Weight]) -> int:
    """The number by which a header says what most of its weights are."""
    formats: list[BlockFormat] = [weight.format for weight in weights]
    most = max(BY_FORMAT.values(), key=lambda row: formats.count(row.format))
    return most.file_type
