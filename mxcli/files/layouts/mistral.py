"""Mistral's own FP8 checkpoints, consolidated.safetensors with params.json: `qscale_weight` scales the codes back, and
`qscale_act` is the static scale of a layer's inputs.

They are only read: a scale of the whole tensor, or one per row.
"""

from __future__ import annotations

from mxcli.errors import printable
from mxcli.files.layouts.layout import (
    WEIGHT,
    Content,
    Entry,
    Layout,
    OnDisk,
    Unread,
    Weight,
    check_fit,
    found_weights,
    matrix_refusal,
    module_of,
)
from mxcli.files.layouts.parts import CODES, SCALES
from mxcli.numerics.scheme import Rules, resolve

DIALECT = "mistral"
SCALE, INPUT_SCALE = ".qscale_weight", ".qscale_act"
SCALE_DTYPES = ("F32", "BF16", "F16")
_OF_ROWS = "column"
"""The variant of one scale per row as a matrix of one column."""


def _contents(weight: Weight) -> tuple[Content, ...]:
    rows, (dtype, *others) = weight.shape[0], weight.variant.split()
    shape: tuple[int, ...] = () if weight.format.block == (None, None) else (rows,)
    if _OF_ROWS in others:
        shape = (*(shape or (1,)), 1)
    elif others:
        shape = (1,)
    codes = Entry(weight.name, "F8_E4M3", weight.shape)
    return Content(codes, CODES), Content(Entry(module_of(weight) + SCALE, dtype, shape), SCALES)


def _weights(disk: OnDisk) -> list[Weight]:
    other = next(
        (info for info in disk.tensors.values() if info.name.endswith(WEIGHT) and info.dtype == "F8_E5M2"), None
    )
    if other is not None:
        raise Unread(f"{printable(other.name)}: is {other.dtype}, which mxcli does not read of Mistral's checkpoints.")
    return found_weights(disk, SCALE, lambda module: _weight(module, disk))


def _weight(module: str, disk: OnDisk) -> Weight:
    """Return the weight of a module. Raises ValueError if its tensors are not what Mistral stores."""
    codes, scales = disk.tensors.get(module + WEIGHT), disk.tensors[module + SCALE]
    if codes is None:
        raise ValueError(f"has {SCALE[1:]}, but {printable(module + WEIGHT)} is missing (mistral)")
    if scales.dtype not in SCALE_DTYPES or len(codes.shape) != 2:
        raise ValueError(
            f"is {codes.dtype} {list(codes.shape)} with {SCALE[1:]} {scales.dtype} {list(scales.shape)}; expected a "
            f"matrix of F8_E4M3 with scales of {', '.join(SCALE_DTYPES)}"
        )
    format = "fp8_e4m3" if scales.elements == 1 else "fp8_e4m3_channel"
    rule = "amax-bf16-scale" if scales.dtype == "BF16" else None
    form = {0: "", 1: "vector" if format == "fp8_e4m3" else "", 2: _OF_ROWS}.get(len(scales.shape), "")
    scheme = resolve(format, Rules(scale_rounding=rule))
    weight = Weight(module + WEIGHT, codes.shape, scheme, disk.dtype, variant=f"{scales.dtype} {form}".strip())
    if (fault := matrix_refusal(weight)) is not None:
        raise ValueError(fault)
    check_fit(_contents(weight), disk.tensors, format)
    return weight


MISTRAL = Layout(
    name=DIALECT,
    meaning="Mistral's own FP8 checkpoints, read under the names of Hugging Face",
    source="vLLM 0.32, models/mistral.py (read)",
    formats=(),
    refusal=lambda weight: "it is only read",
    contents=_contents,
    settings=lambda weights, ignored: {},
    weights=_weights,
    dialects=(DIALECT,),
)
