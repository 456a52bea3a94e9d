"""Block formats: an element, a scale, the block that shares one, and sometimes a scale for the whole tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from mxcli.errors import UsageError, did_you_mean, printable
from mxcli.numerics.floats import (
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    ELEMENTS,
    FP32,
    INT8,
    SCALES,
    FloatFormat,
    element_format,
)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """An element, a scale, the block (rows, columns) over the last two dimensions (None: the whole length), and a scale
    for the whole tensor, if any."""

    name: str
    element: FloatFormat
    scale: FloatFormat
    block: tuple[int | None, int | None]
    tensor_scale: FloatFormat | None = None
    aliases: tuple[str, ...] = ()

    @property
    def block_name(self) -> str:
        """As `ELEMENT:SCALE:BLOCK` spells it: `1x32`, `channel`, `tensor`."""
        rows, columns = self.block
        if columns is None:
            return "tensor" if rows is None else "channel"
        return f"{rows}x{columns}"

    @property
    def spelling(self) -> str:
        """The free spelling that means this format."""
        parts = [self.element.name, self.scale.name, self.block_name]
        return ":".join(parts + ([self.tensor_scale.name] if self.tensor_scale else []))

    @property
    def bits_per_element(self) -> float:
        """Stored bits of an element with its share of the block's scale; a scale per row or tensor counts as none."""
        rows, columns = self.block
        shared = 0.0 if rows is None or columns is None else self.scale.bits / (rows * columns)
        return self.element.stored_bits + shared

    @property
    def has_power_of_two_scales(self) -> bool:
        """True if the scale format holds powers of two only."""
        return self.scale.mantissa_bits == 0

    @property
    def scales_whole_tensor(self) -> bool:
        """True if some scale is of the whole tensor: next to those of its blocks, or as its only one."""
        return self.tensor_scale is not None or self.block == (None, None)


_FP8_BLOCKS: dict[str, tuple[int | None, int | None]] = {
    "": (None, None),
    "_channel": (1, None),
    "_1x128": (1, 128),
    "_128x128": (128, 128),
}

FORMATS: dict[str, BlockFormat] = {
    row.name: row
    for row in (
        BlockFormat("mxfp8_e4m3", E4M3, E8M0, (1, 32), aliases=("mxfp8",)),
        BlockFormat("mxfp8_e5m2", E5M2, E8M0, (1, 32)),
        BlockFormat("mxfp6_e2m3", E2M3, E8M0, (1, 32), aliases=("mxfp6",)),
        BlockFormat("mxfp6_e3m2", E3M2, E8M0, (1, 32)),
        BlockFormat("mxfp4_e2m1", E2M1, E8M0, (1, 32), aliases=("mxfp4",)),
        BlockFormat("mxint8", INT8, E8M0, (1, 32)),
        BlockFormat("nvfp4", E2M1, E4M3, (1, 16), FP32),
        BlockFormat("nvfp4_2d", E2M1, E4M3, (16, 16), FP32),
        *(
            BlockFormat(f"fp8_{element.name}{suffix}", element, FP32, block)
            for element in (E4M3, E5M2)
            for suffix, block in _FP8_BLOCKS.items()
        ),
    )
}

_BY_NAME: dict[str, BlockFormat] = {
    name: row for row in FORMATS.values() for name in (row.name, *row.aliases, row.spelling)
}


def find_format(name: str) -> BlockFormat:
    """Return the row called `name`, or the format that `ELEMENT:SCALE:BLOCK[:TENSOR_SCALE]` spells out.

    A spelling that equals a row is that row. Raises UsageError for anything else, with suggestions.
    """
    wanted = name.strip().lower()
    if wanted in _BY_NAME:
        return _BY_NAME[wanted]
    if ":" not in wanted:
        raise UsageError(
            f"unknown format '{printable(name)}': `mxcli formats` lists the named ones, any other is spelled "
            f"ELEMENT:SCALE:BLOCK[:TENSOR_SCALE], for instance e3m2:e8m0:1x16.{did_you_mean(wanted, _BY_NAME)}"
        )
    row = _spelled(name, wanted.split(":"))
    return _BY_NAME.get(row.spelling, row)


def _spelled(name: str, parts: list[str]) -> BlockFormat:
    if len(parts) not in (3, 4):
        raise UsageError(
            f"format '{printable(name)}' has {len(parts)} parts; it needs ELEMENT:SCALE:BLOCK[:TENSOR_SCALE]"
        )
    element, scale, block = element_format(parts[0]), SCALES.get(parts[1]), _block(parts[2])
    if element is None:
        raise UsageError(
            f"format '{printable(name)}': element '{printable(parts[0])}' is none of {', '.join(ELEMENTS)} "
            "nor eXmY of 2 to 8 bits"
        )
    if scale is None:
        raise UsageError(f"format '{printable(name)}': scale '{printable(parts[1])}' is none of {', '.join(SCALES)}")
    if block is None:
        raise UsageError(
            f"format '{printable(name)}': block '{printable(parts[2])}' is not ROWSxCOLUMNS (1 to 65536), "
            "channel or tensor"
        )
    tensor_scale = None
    if len(parts) == 4 and parts[3] != "none":
        if parts[3] != FP32.name:
            raise UsageError(f"format '{printable(name)}': tensor scale '{printable(parts[3])}' is not {FP32.name}")
        if scale in (E8M0, FP32):
            raise UsageError(
                f"format '{printable(name)}': a tensor scale serves block scales of narrow range; {scale.name} "
                "needs none, leave it out"
            )
        tensor_scale = FP32
    if element.stored_bits < 8 and block[1] is not None and block[1] % 4:
        raise UsageError(
            f"format '{printable(name)}': blocks of packed codes begin on a byte, so columns must be a multiple of 4"
        )
    row = BlockFormat("", element, scale, block, tensor_scale)
    return replace(row, name=row.spelling)


def _block(text: str) -> tuple[int | None, int | None] | None:
    if text in ("channel", "tensor"):
        return (1, None) if text == "channel" else (None, None)
    sizes = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
    if not sizes or not all(1 <= int(size) <= 65536 for size in sizes.groups()):
        return None
    return int(sizes[1]), int(sizes[2])
