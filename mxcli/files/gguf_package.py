"""The package gguf, imported where it is needed: its table of block types, its decoders, its writer of headers."""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from mxcli.errors import EnvironmentFailure
from mxcli.files.tensors import Array

DTYPES = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "F64": np.float64}


@lru_cache(maxsize=1)
def gguf_package() -> ModuleType:
    """The module; raises EnvironmentFailure where it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise EnvironmentFailure(
            "GGUF files need the package gguf, which cannot be imported: pip install 'mxcli[gguf]'."
        ) from error
    module: ModuleType = gguf
    return module


@lru_cache(maxsize=1)
def block_sizes() -> dict[int, tuple[str, int, int]]:
    """Name, elements of a block and bytes of a block of every tensor type, by its number."""
    sizes = gguf_package().GGML_QUANT_SIZES
    return {int(kind): (kind.name, elements, nbytes) for kind, (elements, nbytes) in sizes.items()}


def shape_of_blocks(name: str, stored: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor of a block type whose bytes have the shape `stored`."""
    _, elements, nbytes = next(row for row in block_sizes().values() if row[0] == name)
    return (*stored[:-1], stored[-1] // nbytes * elements)


def is_decoded(name: str) -> bool:
    """Whether the package has a decoder for a block type."""
    _, _, nbytes = next(row for row in block_sizes().values() if row[0] == name)
    try:
        gguf_package().dequantize(np.zeros((1, nbytes), np.uint8), _type(name))
    except NotImplementedError:
        return False
    return True


def decoded(blocks: Array, name: str, dtype: str) -> Array:
    """Values of blocks as the package decodes them, in binary32, or rounded once to a dtype of DTYPES."""
    values = gguf_package().dequantize(blocks, _type(name))
    if dtype == "F64":
        return np.asarray(values, np.float64)
    rounded = values if dtype == "F32" else gguf_package().quantize(values, _type(dtype))
    return np.ascontiguousarray(rounded).view(DTYPES[dtype]).reshape(values.shape)


def _type(name: str) -> Any:
    return gguf_package().GGMLQuantizationType[name]
