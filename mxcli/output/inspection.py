"""An inspection as text and as a JSON record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from mxcli.errors import printable
from mxcli.flows.measure.inspect import Captured, Inspection, Total
from mxcli.output.numbers import byte_size, counted, quantity, shape_text
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

_COLUMNS = (
    Column("tensor", right=False),
    Column("dtype", right=False),
    Column("shape", right=False),
    Column("role", right=False),
    Column("size", drop=1),
)
_CAPTURED = (Column("layer", right=False, drop=3), Column("step", drop=2), Column("rank", drop=2))
"""Columns that a source of captures has besides, where there is something in them."""
_TOTALS = (Column("", right=False), Column("tensors"), Column("elements"), Column("size"))


def inspection_text(inspection: Inspection, screen: Screen) -> str:
    """Headline, one line per tensor, totals by dtype and role, ties and notes."""
    layout = f"quantized ({inspection.dialect})" if inspection.dialect else "not quantized"
    source = source_line(inspection.source, inspection.total, inspection.by_dtype, len(inspection.files))
    headline = f"{source}; {layout}"
    lines = [bold(line, screen) for line in folded_lines(headline, screen)]
    if inspection.captured:
        lines += folded_lines(captured_line(inspection.captured), screen)
    lines.append("")
    told = [column for column in _CAPTURED if any(column.title in record for record in inspection.captures.values())]
    rows: list[Row] = [
        [
            *(printable(info.name), info.type_name, shape_text(info.shape), info.role),
            *(printable(inspection.captures.get(info.name, {}).get(column.title, "-")) for column in told),
            byte_size(info.nbytes),
        ]
        for info in inspection.tensors
    ]
    lines += [*aligned((*_COLUMNS[:-1], *told, _COLUMNS[-1]), rows, screen), ""]
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


def captured_line(captured: Captured) -> str:
    """`captures of 29 layers at 3 steps (0 to 200) on 2 ranks: 174 activations, 174 gradients`."""
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
    """The source, how much it holds and in which types."""
    spread = "" if files == 1 else f" in {counted(files, 'file')}"
    return (
        f"{printable(source)}: {quantity(total.elements)} elements, {counted(total.tensors, 'tensor')}, "
        f"{byte_size(total.bytes)}{spread}; {dtype_mix(by_dtype)}"
    )


def dtype_mix(by_dtype: Mapping[str, Total]) -> str:
    """`BF16`, or `BF16 97.1%, F32 2.9%` by bytes."""
    if len(by_dtype) == 1:
        return next(iter(by_dtype))
    whole = sum(total.bytes for total in by_dtype.values()) or 1
    return ", ".join(f"{dtype} {100 * total.bytes / whole:.1f}%" for dtype, total in by_dtype.items())


def inspection_record(inspection: Inspection) -> dict[str, object]:
    """Everything about the source for JSON."""
    return {
        "source": inspection.source,
        "kind": inspection.kind,
        "files": [{"name": str(path), "bytes": size} for path, size in inspection.files.items()],
        "index": str(inspection.index) if inspection.index else None,
        "dialect": inspection.dialect,
        "total": asdict(inspection.total),
        "by_dtype": {key: asdict(total) for key, total in inspection.by_dtype.items()},
        "by_role": {key: asdict(total) for key, total in inspection.by_role.items()},
        "tied": dict(inspection.tied),
        "captured": asdict(inspection.captured) if inspection.captured else None,
        "notes": list(inspection.notes),
        "tensors": [
            {
                "name": info.name,
                "dtype": info.dtype,
                "block_type": info.block_type or None,
                "shape": list(info.shape),
                "role": info.role,
                "elements": info.elements,
                "bytes": info.nbytes,
                "file": info.file.name,
                "capture": inspection.captures.get(info.name),
            }
            for info in inspection.tensors
        ],
    }


def _rows(totals: Mapping[str, Total]) -> list[Row]:
    return [_row(key, total) for key, total in totals.items()]


def _row(key: str, total: Total) -> Row:
    return [key, f"{total.tensors:,}", f"{total.elements:,}", byte_size(total.bytes)]
