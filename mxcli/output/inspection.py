"""An inspection as text and as a JSON record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from mxcli.errors import printable
from mxcli.files.roles import reason_of
from mxcli.output.fields import (
    COUNT,
    TEXT,
    TEXT_OR_NULL,
    TOTAL,
    Field,
    Fields,
    array,
    attributes,
    mapping,
    record_of,
    records,
    records_by_name,
)
from mxcli.output.numbers import ABSENT, byte_size, counted, quantity, shape_text
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

if TYPE_CHECKING:
    from pathlib import Path

    from mxcli.files.tensors import TensorInfo
    from mxcli.flows.measure.inspect import Captured, Inspection, Total


@dataclass(frozen=True, slots=True)
class _Listed:
    """A tensor with the record of its capture (None: not captured)."""

    info: TensorInfo
    capture: Mapping[str, object] | None


def _captured(key: str, listed: _Listed) -> object:
    return ABSENT if listed.capture is None else listed.capture.get(key, ABSENT)


_ONLY_CAPTURED = ("layer", "step", "rank")
"""Columns of captures, shown if some tensor has them."""
_TENSOR: Fields[_Listed] = Fields(
    Field("name", lambda each: each.info.name, TEXT, "tensor", right=False),
    Field("dtype", lambda each: each.info.dtype, TEXT, "dtype", right=False, cell=lambda each: each.info.type_name),
    Field("block_type", lambda each: each.info.block_type or None, TEXT_OR_NULL),
    Field("shape", lambda each: list(each.info.shape), array(COUNT), "shape", right=False,
          cell=lambda each: shape_text(each.info.shape)),
    Field("role", lambda each: each.info.role, TEXT, "role", right=False),
    Field("reason", lambda each: reason_of(each.info), TEXT, "why", right=False, drop=4,
          cell=lambda each: reason_of(each.info) or ABSENT),
    Field("layer", partial(_captured, "layer"), title="layer", right=False, drop=3),
    Field("step", lambda each: str(_captured("step", each)), title="step", drop=2),
    Field("rank", lambda each: str(_captured("rank", each)), title="rank", drop=2),
    Field("elements", lambda each: each.info.elements, COUNT),
    Field("bytes", lambda each: each.info.nbytes, COUNT, "size", drop=1,
          cell=lambda each: byte_size(each.info.nbytes)),
    Field("file", lambda each: each.info.file.name, TEXT),
    Field("capture", lambda each: each.capture, {"type": ["object", "null"]}),
)  # fmt: skip
_FILE: Fields[tuple[Path, int]] = Fields(
    Field("name", lambda file: str(file[0]), TEXT),
    Field("bytes", lambda file: file[1], COUNT),
)
INSPECTION: Fields[Inspection] = Fields(
    attributes(TEXT, "source", "kind"),
    records("files", lambda inspection: inspection.files.items(), _FILE),
    Field("index", lambda inspection: str(inspection.index) if inspection.index else None, TEXT_OR_NULL),
    attributes(TEXT_OR_NULL, "dialect"),
    Field("model", lambda inspection: inspection.model.title, TEXT_OR_NULL),
    Field("model_source", lambda inspection: inspection.model.source or None, TEXT_OR_NULL),
    record_of("total", lambda inspection: inspection.total, TOTAL),
    records_by_name("by_dtype", lambda inspection: inspection.by_dtype, TOTAL),
    records_by_name("by_role", lambda inspection: inspection.by_role, TOTAL),
    Field("tied", lambda inspection: dict(inspection.tied), mapping(TEXT)),
    Field(
        "captured",
        lambda inspection: asdict(inspection.captured) if inspection.captured else None,
        {"type": ["object", "null"]},
    ),
    Field("notes", lambda inspection: list(inspection.notes), array(TEXT)),
    records("tensors", lambda inspection: _listed(inspection), _TENSOR),
)
_TOTALS = (Column("", right=False), Column("tensors"), Column("elements"), Column("size"))


def inspection_text(inspection: Inspection, screen: Screen) -> str:
    """Return a headline, a line per tensor, totals by dtype and role, ties and notes."""
    layout = f"quantized ({inspection.dialect})" if inspection.dialect else "not quantized"
    source = source_line(inspection.source, inspection.total, inspection.by_dtype, len(inspection.files))
    lines = [bold(line, screen) for line in folded_lines(f"{source}; {layout}", screen)]
    if inspection.captured is None:
        lines += folded_lines(inspection.model.words, screen)
    if inspection.captured:
        lines += folded_lines(captured_line(inspection.captured), screen)
    records_there = inspection.captures.values()
    hidden = [key for key in _ONLY_CAPTURED if not any(key in record for record in records_there)]
    fields = _TENSOR.without(*hidden, *(["reason"] if inspection.captured else []))
    lines += ["", *aligned(fields.columns(), [*map(fields.cells, _listed(inspection))], screen), ""]
    totals = [
        *_rows(inspection.by_dtype),
        None,
        *_rows(inspection.by_role),
        None,
        _row("total", inspection.total),
    ]
    lines += aligned(_TOTALS, totals, screen)
    if inspection.tied:
        lines += ["", *(f"tied: {printable(a)} is {printable(b)}" for a, b in inspection.tied.items())]
    if inspection.notes:
        lines.append("")
        lines += [line for note in inspection.notes for line in folded_lines(f"note: {note}", screen, indent="  ")]
    return "\n".join(lines)


def inspection_record(inspection: Inspection) -> dict[str, object]:
    """Return the inspection for JSON."""
    return INSPECTION.record(inspection)


def _listed(inspection: Inspection) -> list[_Listed]:
    return [_Listed(info, inspection.captures.get(info.name)) for info in inspection.tensors]


def captured_line(captured: Captured) -> str:
    """Return `captures of 29 layers at 3 steps (0 to 200) on 2 ranks: 174 activations, 174 gradients`."""
    places = ""
    if captured.steps:
        first, last = captured.steps[0], captured.steps[-1]
        places += (
            f" at step {first:,}" if first == last else f" at {len(captured.steps):,} steps ({first:,} to {last:,})"
        )
    if captured.ranks:
        first, last = captured.ranks[0], captured.ranks[-1]
        places += f" on rank {first:,}" if first == last else f" on {len(captured.ranks):,} ranks"
    roles = ", ".join(counted(count, role) for role, count in captured.roles.items())
    return f"captures of {counted(captured.layers, 'layer')}{places}: {roles}"


def source_line(source: str, total: Total, by_dtype: Mapping[str, Total], files: int = 1) -> str:
    """Return the source, its size and its dtypes."""
    spread = "" if files == 1 else f" in {counted(files, 'file')}"
    return (
        f"{printable(source)}: {quantity(total.elements)} elements, {counted(total.tensors, 'tensor')}, "
        f"{byte_size(total.bytes)}{spread}; {dtype_mix(by_dtype)}"
    )


def dtype_mix(by_dtype: Mapping[str, Total]) -> str:
    """Return `BF16`, or `BF16 97.1%, F32 2.9%` by bytes."""
    if len(by_dtype) == 1:
        return next(iter(by_dtype))
    whole = sum(total.bytes for total in by_dtype.values()) or 1
    return ", ".join(f"{dtype} {100 * total.bytes / whole:.1f}%" for dtype, total in by_dtype.items())


def _rows(totals: Mapping[str, Total]) -> list[Row]:
    return [_row(key, total) for key, total in totals.items()]


def _row(key: str, total: Total) -> Row:
    return [key, f"{total.tensors:,}", f"{total.elements:,}", byte_size(total.bytes)]
