"""The words of a plan: why a tensor is kept, what does not fit, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from mxcli.errors import printable
from mxcli.files.layouts import LAYOUTS, MXCLI, layout_of_dialect
from mxcli.files.selection import Decision
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.hadamard import Hadamard


def why_kept(info: TensorInfo, choice: Decision, row: BlockFormat | None) -> str | None:
    """Return why a tensor is not quantized whatever its lengths; None: it is. `row` None keeps it on request."""
    if not choice.taken:
        excluded = choice.rule is not None and not choice.rule.include
        return f"excluded by {choice.rule}" if excluded else choice.reason.removeprefix("kept: ")
    if not info.elements:
        return f"{info.role}, without elements"
    if len(info.shape) < 2:
        return f"{info.role}, {len(info.shape)} dimension(s); blocks need two"
    if not DTYPES[info.dtype].is_float or DTYPES[info.dtype].bits < 16:
        return f"{info.dtype} is no float of more than 8 bits"
    return f"{info.role}, kept by the recipe" if row is None else None


def misfit(row: BlockFormat, shape: Sequence[int]) -> str:
    """Return which length of a shape blocks do not divide."""
    rows, columns = row.block
    if columns is not None and shape[-1] % columns:
        return f"last dimension {shape[-1]} is not a multiple of {columns} ({row.name})"
    return f"dimension {len(shape) - 2}, {shape[-2]}, is not a multiple of {rows} ({row.name})"


def refused_length(info: TensorInfo, row: BlockFormat, shape: Sequence[int]) -> str:
    """Return the refusal of a tensor whose shape as quantized blocks do not divide."""
    name = printable(info.name)
    turned = f" (blocks run along dimension {len(shape) - 2})" if tuple(shape) != info.shape else ""
    return (
        f"{name} {list(info.shape)}{turned}: {misfit(row, shape)}. Use --exclude '{name}', or --on-indivisible pad "
        "or keep."
    )


def refused_groups(info: TensorInfo, why: str) -> str:
    """Return the refusal of a tensor that a transform does not divide."""
    name = printable(info.name)
    return f"{name} {list(info.shape)}: {why}. Use --exclude '{name}', another --hadamard, or --on-indivisible keep."


def already_quantized(where: object, dialect: str) -> str:
    """Return the refusal of a source that holds codes, with a way out that is one."""
    way_out = (
        "Use --requantize to take the values they stand for, or `mxcli dequantize` to write those."
        if layout_of_dialect(dialect)
        else f"Take the checkpoint it was made from: of quantized ones only {', '.join(LAYOUTS)} are read back."
    )
    return (
        f"{printable(where)}: already quantized ({dialect}); quantizing codes again would lose their scales. {way_out}"
    )


def requantized(layout: str) -> str:
    """Return what is said of a source that was quantized before."""
    return (
        f"The source is quantized already ({layout}): errors are measured against the values its codes stand for, and "
        "what was lost in making them comes on top, which only the original can tell."
    )


def transformed(hadamard: Hadamard) -> str:
    """Return what is said of a measurement under a transform."""
    return (
        f"Under the {hadamard.name} transform everything is measured of transformed values: SQNR, relative error, "
        "cosine and shrunk_percent are those of the values too; amax, bias, largest errors and non-finite counts are "
        "not."
    )


def nothing_to_quantize(
    where: object, infos: Sequence[TensorInfo], reasons: Sequence[str], *, in_other_layout: bool = False
) -> str:
    """Return the refusal of a source of which every tensor is kept; `in_other_layout` says that some are for the layout
    alone, so that another holds them."""
    if all(info.role == "lora" for info in infos):
        return f"{printable(where)}: a LoRA adapter, no model by itself; merge it into its model and quantize that."
    listed = "; ".join(f"{count:,} {reason}" for reason, count in Counter(reasons).most_common(3))
    way_out = f"Use another --layout, such as {MXCLI.name}" if in_other_layout else "Name some with --include"
    return f"{printable(where)}: nothing to quantize among {len(infos):,} tensors ({listed}). {way_out}."
