"""What a layout is: how a quantized weight is named, typed and shaped in a file, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mxcli.errors import printable
from mxcli.files.tensors import Array, TensorInfo, byte_count
from mxcli.numerics.blocks import Quantized, grid_shape
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.recipe import Recipe

ROW, COLUMN = "row", "column"
CODES, SCALES, ENCODE, DECODE = "codes", "scales", "encode", "decode"
QUANTIZATION_CONFIG = "quantization_config"

Config = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Weight:
    """A matrix, or stack of matrices, that is quantized as one.

    `name` and `dtype` are those of the plain tensor, `shape` is as quantized: blocks run along its last
    dimension, so with `axis` COLUMN the last two dimensions are those of the plain tensor exchanged.
    """

    name: str
    shape: tuple[int, ...]
    recipe: Recipe
    dtype: str
    axis: str = ROW

    @property
    def format(self) -> BlockFormat:
        """The block format of its codes."""
        return self.recipe.format


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor to be written, as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it occupies."""
        return byte_count(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class Content:
    """An entry and what it holds of a quantized weight: CODES, SCALES, or the tensor scale as ENCODE or DECODE
    scale.
    """

    entry: Entry
    holds: str


@dataclass(frozen=True, slots=True)
class Layout:
    """One way to store quantized weights.

    `formats` names the rows it can hold, `refusal(weight)` says why it cannot hold one (None: it can), `contents`
    what is stored of it. `settings(weights, ignored modules)` is the quantization_config; `weights(tensors,
    config)` finds the weights again from the tensors and config.json, and raises InputError where they do not
    fit.
    """

    name: str
    meaning: str
    source: str
    formats: tuple[str, ...]
    refusal: Callable[[Weight], str | None]
    contents: Callable[[Weight], tuple[Content, ...]]
    settings: Callable[[Sequence[Weight], Sequence[str]], dict[str, object]]
    weights: Callable[[Mapping[str, TensorInfo], Config], list[Weight]]
    aliases: tuple[str, ...] = ()


def stored(quantized: Quantized, content: Content) -> Array:
    """The array of an entry; only bytes are renamed here, so a scale must be exact in the entry's dtype."""
    if content.holds == CODES:
        return np.asarray(quantized.packed)
    if content.holds == SCALES:
        scales: Array = quantized.scales
        return _bfloat16_bits(scales) if content.entry.dtype == "BF16" else scales
    scale = quantized.tensor_encode if content.holds == ENCODE else quantized.tensor_scale
    return np.full(content.entry.shape, scale, np.float32)


def quantized_from(weight: Weight, arrays: Mapping[str, Array]) -> Quantized:
    """The record of a weight from its arrays by what they hold; a scale that is not stored is 1."""
    scales = arrays[SCALES]
    if weight.format.scale.bits == 32 and scales.dtype == np.uint16:
        scales = (scales.astype(np.uint32) << 16).view(np.float32)
    tensor_scale = float(arrays[DECODE].reshape(())) if DECODE in arrays else None
    return Quantized(
        recipe=weight.recipe,
        shape=weight.shape,
        packed=arrays[CODES].view(np.uint8),
        scales=scales.reshape(grid_shape(weight.format, weight.shape)),
        tensor_scale=tensor_scale,
        tensor_encode=float(arrays[ENCODE].reshape(())) if ENCODE in arrays else 1.0,
        stats=None,
        per_block=None,
    )


def check_fit(contents: Sequence[Content], tensors: Mapping[str, TensorInfo], format: str) -> None:
    """Raise ValueError unless every entry is among the tensors with its dtype and shape; E8M0 scales may be typed as
    what they are, or as bytes."""
    for entry in (content.entry for content in contents):
        there = tensors.get(entry.name)
        if there is None:
            raise ValueError(f"{printable(entry.name)} is missing ({format})")
        same_bytes = there.dtype == entry.dtype or {there.dtype, entry.dtype} == {"U8", "F8_E8M0"}
        if not same_bytes or there.shape != entry.shape:
            raise ValueError(
                f"{printable(entry.name)} is {there.dtype} {list(there.shape)}; {format} needs {entry.dtype} "
                f"{list(entry.shape)}"
            )


def scale_shape(weight: Weight) -> tuple[int, ...]:
    """The grid of scales; one scale for the whole tensor has the shape [1]."""
    return (1,) if weight.format.block == (None, None) else grid_shape(weight.format, weight.shape)


def _bfloat16_bits(scales: Array) -> Array:
    bits = np.ascontiguousarray(scales, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "scales of this recipe are bfloat16 values"
    return (bits >> 16).astype(np.uint16)
