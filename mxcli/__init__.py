"""Block-scaled low-precision formats, bit for bit: quantize, measure and compare tensors and checkpoints.

The names below are for notebooks and scripts. Importing this module imports nothing else; torch and numpy are
imported when a name is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxcli.api import (
        QuantizedTensor,
        capture,
        emulate,
        evaluate,
        measure,
        quantize,
        quantize_both,
        quantize_dequantize,
        swizzle,
    )
    from mxcli.numerics.formats import FORMATS as formats  # noqa: N811 - the public name is lower case

__version__ = "0.1.0"
__all__ = [
    "QuantizedTensor",
    "__version__",
    "capture",
    "emulate",
    "evaluate",
    "formats",
    "measure",
    "quantize",
    "quantize_both",
    "quantize_dequantize",
    "swizzle",
]


def __getattr__(name: str) -> Any:
    if name == "formats":
        from mxcli.numerics.formats import FORMATS

        return FORMATS
    if name in __all__:
        from mxcli import api

        return getattr(api, name)
    raise AttributeError(f"module 'mxcli' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
