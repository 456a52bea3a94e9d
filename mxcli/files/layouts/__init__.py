"""The table of layouts: how quantized weights are stored for each consumer."""

from __future__ import annotations

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.files.layouts.auto_round import AUTO_ROUND
from mxcli.files.layouts.casts import CASTS
from mxcli.files.layouts.comfy import COMFY
from mxcli.files.layouts.compressed_tensors import COMPRESSED_TENSORS
from mxcli.files.layouts.fp8 import FP8
from mxcli.files.layouts.gguf import GGUF
from mxcli.files.layouts.gpt_oss import GPT_OSS
from mxcli.files.layouts.layout import (
    QUANTIZATION_CONFIG,
    Content,
    Entry,
    ForeignWeight,
    InputScale,
    Layout,
    OnDisk,
    Weight,
    quantized_from,
    refusal,
)
from mxcli.files.layouts.mistral import MISTRAL
from mxcli.files.layouts.mlx import MLX
from mxcli.files.layouts.modelopt import MODELOPT
from mxcli.files.layouts.mxcli import MXCLI
from mxcli.files.layouts.quark import QUARK
from mxcli.files.layouts.torchao import TORCHAO, TORCHAO_PLAIN
from mxcli.numerics.blocks import COLUMN, ROW

__all__ = [
    "COLUMN",
    "LAYOUTS",
    "MXCLI",
    "PREFERRED",
    "QUANTIZATION_CONFIG",
    "ROW",
    "Content",
    "Entry",
    "ForeignWeight",
    "InputScale",
    "Layout",
    "OnDisk",
    "Weight",
    "find_layout",
    "layout_of_dialect",
    "quantized_from",
    "refusal",
]

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        COMPRESSED_TENSORS,
        MODELOPT,
        FP8,
        GPT_OSS,
        QUARK,
        AUTO_ROUND,
        TORCHAO,
        TORCHAO_PLAIN,
        COMFY,
        GGUF,
        MLX,
        MXCLI,
    )
}
PREFERRED = COMPRESSED_TENSORS
"""The default layout if it holds the format and most of the weights; else MXCLI."""
_BY_NAME = {name: layout for layout in LAYOUTS.values() for name in (layout.name, *layout.aliases)}


def find_layout(name: str) -> Layout:
    """Return the layout called `name`. Raises UsageError for an unknown name."""
    layout = _BY_NAME.get(name.strip().lower())
    if layout is None:
        raise UsageError(
            f"unknown layout '{printable(name)}': known are {', '.join(LAYOUTS)}.{did_you_mean(name, _BY_NAME)}"
        )
    return layout


def layout_of_dialect(dialect: str | None) -> Layout | None:
    """Return the layout that reads files of a dialect; None without one."""
    return next((layout for layout in (*LAYOUTS.values(), CASTS, MISTRAL) if dialect in layout.dialects), None)
