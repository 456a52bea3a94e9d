"""The layouts as rows: how quantized weights are stored for one consumer."""

from __future__ import annotations

from mxcli.errors import UsageError, did_you_mean, printable
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
from mxcli.files.layouts.modelopt import MODELOPT
from mxcli.files.layouts.own import OWN
from mxcli.files.layouts.quark import QUARK
from mxcli.files.layouts.torchao import TORCHAO, TORCHAO_PLAIN
from mxcli.numerics.blocks import COLUMN, ROW

__all__ = [
    "COLUMN",
    "LAYOUTS",
    "OWN",
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
    row.name: row for row in (COMPRESSED_TENSORS, MODELOPT, FP8, GPT_OSS, QUARK, TORCHAO, TORCHAO_PLAIN, GGUF, OWN)
}
PREFERRED = COMPRESSED_TENSORS
"""The layout taken where none is named and it holds the format and most of the weights; else OWN."""
_BY_NAME = {name: row for row in LAYOUTS.values() for name in (row.name, *row.aliases)}


def find_layout(name: str) -> Layout:
    """The layout called `name`; raises UsageError for an unknown name."""
    row = _BY_NAME.get(name.strip().lower())
    if row is None:
        raise UsageError(
            f"unknown layout '{printable(name)}': known are {', '.join(LAYOUTS)}.{did_you_mean(name, _BY_NAME)}"
        )
    return row


def layout_of_dialect(dialect: str | None) -> Layout | None:
    """The layout that reads files of a dialect; None where none does."""
    return next((row for row in LAYOUTS.values() if dialect in row.dialects), None)
