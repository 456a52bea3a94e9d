"""The words of a plan: why a tensor is kept, what does not fit, and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mxcli.errors import printable
from mxcli.files.dialect import UNKNOWN
from mxcli.files.layouts import LAYOUTS, MXCLI, layout_of_dialect
from mxcli.files.selection import Decision
from mxcli.files.tensors import DTYPES, TensorInfo
from mxcli.numerics.formats import BlockFormat
from mxcli.numerics.hadamard import Hadamard


def why_kept(info: TensorInfo, decision: Decision, fmt: BlockFormat | None) -> str | None:
    """Return why a tensor is not quantized, for any lengths; None if it is. `fmt` None keeps it on request."""
    if not decision.taken:
        excluded = decision.rule is not None and not decision.rule.include
        return f"excluded by {decision.rule}" if excluded else decision.reason.removeprefix("kept: ")
    if not info.elements:
        return f"{info.role}, without elements"
    if len(info.shape) < 2:
        return f"{info.role}, {len(info.shape)} dimension(s); blocks need two"
    if not DTYPES[info.dtype].is_float or DTYPES[info.dtype].bits < 16:
        return f"{info.dtype} is not a float of more than 8 bits"
    return f"{info.role}, kept by the recipe" if fmt is None else None


def misfit(fmt: BlockFormat, shape: Sequence[int]) -> str:
    """Return which length of a shape blocks do not divide."""
    rows, columns = fmt.block
    if columns is not None and shape[-1] % columns:
        return f"last dimension {shape[-1]} is not a multiple of {columns} ({fmt.name})"
    return f"dimension {len(shape) - 2}, {shape[-2]}, is not a multiple of {rows} ({fmt.name})"


def refused_length(info: TensorInfo, fmt: BlockFormat, shape: Sequence[int]) -> str:
    """Return the refusal of a tensor whose shape as quantized blocks do not divide."""
    name = printable(info.name)
    transposed = f" (blocks run along dimension {len(shape) - 2})" if tuple(shape) != info.shape else ""
    return (
        f"{name} {list(info.shape)}{transposed}: {misfit(fmt, shape)}. Use --exclude '{name}', or --on-indivisible pad "
        "or keep."
    )


def refused_groups(info: TensorInfo, why: str) -> str:
    """Return the refusal of a tensor that a transform does not divide."""
    name = printable(info.name)
    return f"{name} {list(info.shape)}: {why}. Use --exclude '{name}', another --hadamard, or --on-indivisible keep."


def already_quantized(where: object, dialect: str, tensors: Iterable[TensorInfo] = ()) -> str:
    """Return the refusal of a source that holds codes, with a way out; the first of its tensors that does if nothing
    says which codes they are."""
    way_out = (
        "Use --requantize to dequantize it first, or `mxcli dequantize` to write the values."
        if layout_of_dialect(dialect)
        else f"Use the checkpoint it was made from: of quantized ones only {', '.join(LAYOUTS)} are read back."
    )
    codes = (info for info in tensors if info.role == "codes")
    first = next(codes, None) if dialect == UNKNOWN else None
    by = dialect if first is None else f"{dialect}: '{printable(first.name)}' is {first.dtype}, as codes are"
    return f"{printable(where)}: already quantized ({by}); quantizing codes again would lose their scales. {way_out}"


def requantized(layout: str) -> str:
    """Return the note on a source that was quantized before."""
    return (
        f"The source is already quantized ({layout}): errors are measured against its dequantized values. The error of "
        "that first quantization comes on top; measuring it needs the original."
    )


def transformed(hadamard: Hadamard) -> str:
    """Return the note on a measurement under a transform."""
    return (
        f"All metrics are computed on values under the {hadamard.name} transform: SQNR, relative error, cosine and "
        "shrunk_percent hold for the original values too; amax, bias, largest errors and non-finite counts do not."
    )


def nothing_to_quantize(
    where: object, infos: Sequence[TensorInfo], reasons: Sequence[str], *, in_other_layout: bool = False
) -> str:
    """Return the refusal of a source without a tensor to quantize; `in_other_layout`: another layout holds some."""
    if all(info.role == "lora" for info in infos):
        return f"{printable(where)}: a LoRA adapter, not a model; merge it into its model and quantize that."
    listed = "; ".join(f"{count:,} {reason}" for reason, count in Counter(reasons).most_common(3))
    way_out = f"Use another --layout, such as {MXCLI.name}" if in_other_layout else "Name some with --include"
    return f"{printable(where)}: nothing to quantize among {len(infos):,} tensors ({listed}). {way_out}."
