"""The difference of two checkpoints as text, as JSON and as CSV."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from mxcli.errors import printable
from mxcli.flows.verify.diff import AXIS, TRANSFORM, Diff, Difference
from mxcli.flows.verify.diff_blocks import Explanation
from mxcli.flows.verify.errors import Distance
from mxcli.numerics.hadamard import Hadamard, signs_text
from mxcli.output.difference_words import MOST_STEPS, conclusion, percent
from mxcli.output.export import csv_text, json_text
from mxcli.output.inspection import source_line
from mxcli.output.numbers import ABSENT, counted, significant
from mxcli.output.screen import Screen, bold, folded_lines
from mxcli.output.table import Column, Row, aligned

SHOWN = 20
"""Tensors that the text shows unless told otherwise."""
_COLUMNS = (
    Column("tensor", right=False),
    Column("in A", right=False, drop=4),
    Column("in B", right=False, drop=4),
    Column("differs in", right=False, drop=1),
    Column("codes\n% of elements"),
    Column("blocks\n% with codes", drop=3),
    Column("scales\n% of blocks"),
    Column("steps\nfrom A to B", right=False, drop=2),
    Column("relative\ndifference"),
)
RECORD_KEYS = (
    "name",
    "in_a",
    "in_b",
    "shape_a",
    "shape_b",
    "differs",
    "elements",
    "blocks",
    "codes",
    "codes_percent",
    "codes_sign_of_zero",
    "codes_one_step",
    "blocks_with_codes",
    "scales",
    "scales_percent",
    "scale_steps",
    "tensor_scale_a",
    "tensor_scale_b",
    "relative_difference",
    "max_abs_difference",
    "nan_scales",
    "axis_a",
    "axis_b",
    "hadamard_signs_a",
    "hadamard_signs_b",
)


def difference_text(result: Diff, screen: Screen, top: int | None = None) -> str:
    """Both sides, the tensors that differ, the most first, and in words in what and by which rule."""
    lines = [line for at in (0, 1) for line in folded_lines(_headline(result, at), screen)]
    lines = [bold(line, screen) for line in lines]
    ranked = sorted(result.differing, key=_rank)
    shown = ranked[: SHOWN if top is None else top]
    if ranked:
        lines += ["", *aligned(_COLUMNS, [_row(each) for each in shown], screen)] if shown else [""]
        if len(shown) < len(ranked):
            lines += folded_lines(f"{len(shown):,} of {counted(len(ranked), 'tensor')} shown, the most first", screen)
    lines.append("")
    for sentence in conclusion(result):
        first, *rest = folded_lines(sentence, screen, "  ")
        lines += [bold(first, screen), *(bold(line, screen) for line in rest)]
    return "\n".join(lines)


def difference_json(result: Diff) -> str:
    """All of it as one object; tensors that are equal too."""
    content: dict[str, object] = {
        "a": _side_record(result, 0),
        "b": _side_record(result, 1),
        "same": not result.differing,
        "counts": dict(result.counts),
        "conclusion": conclusion(result),
        "rules": [_rule_record(row, told) for row, told in result.explanations.items()],
        "tensors": [_record(each) for each in result.tensors],
    }
    return json_text("diff", content)


def difference_csv(result: Diff) -> str:
    """One row per tensor under the names of the JSON records."""
    return csv_text(map(_record, result.tensors), RECORD_KEYS)


def _headline(result: Diff, at: int) -> str:
    side = result.sides[at]
    layout = "not quantized" if side.layout is None else f"quantized ({side.layout})"
    return f"{'AB'[at]}: {source_line(side.name, side.total, side.by_dtype)}; {layout}"


def _rank(each: Difference) -> tuple[bool, float, float]:
    """What lacks or is something else comes first, then the largest difference in values, then in codes."""
    measured = each.distance
    if measured is None:
        return False, 0.0, 0.0
    error = measured.relative_error
    share = each.blocks.codes / each.blocks.elements if each.blocks is not None and each.blocks.elements else 0.0
    return True, -(math.inf if error is None and measured.noise else error or 0.0), -share


def _row(each: Difference) -> Row:
    blocks = each.blocks
    return [
        printable(each.name),
        _kind(each, 0),
        _kind(each, 1),
        ", ".join(each.differs),
        ABSENT if blocks is None else percent(blocks.codes, blocks.elements),
        ABSENT if blocks is None else percent(blocks.blocks_in_codes, blocks.blocks),
        ABSENT if blocks is None else percent(blocks.scales, blocks.blocks),
        "" if blocks is None else _steps(blocks.steps),
        _relative(each.distance),
    ]


def _kind(each: Difference, at: int) -> str:
    """The format or dtype on one side, with the axis and the transform where they are not the other's."""
    words = [each.kinds[at] or ABSENT]
    if each.treatments is not None and AXIS in each.differs:
        words.append(f"by {each.treatments[at].axis}")
    if (
        each.treatments is not None
        and TRANSFORM in each.differs
        and (hadamard := each.treatments[at].hadamard) is not None
    ):
        words.append(hadamard.name)
    return " ".join(words)


def _steps(steps: Mapping[int, int]) -> str:
    most = sorted(steps.items(), key=lambda item: -item[1])
    shown = [f"{step:+d}: {count:,}" for step, count in most[:MOST_STEPS]]
    return ", ".join(shown + (["…"] if len(most) > MOST_STEPS else []))


def _relative(measured: Distance | None) -> str:
    if measured is None:
        return ABSENT
    if not measured.noise and not measured.unmatched:
        return "0"
    if not measured.noise:
        return "not finite"
    return significant(measured.relative_error)


def _side_record(result: Diff, at: int) -> dict[str, object]:
    side = result.sides[at]
    return {
        "source": side.name,
        "layout": side.layout,
        "elements": side.total.elements,
        "bytes": side.total.bytes,
        "by_dtype": {dtype: asdict(part) for dtype, part in side.by_dtype.items()},
    }


def _rule_record(row: str, told: Explanation) -> dict[str, object]:
    best = told.best
    return {
        "format": row,
        "blocks": told.blocks,
        "explained_by": [{"a": one, "b": other} for one, other in told.pairs],
        "nearest": None if best is None else {"a": best[0][0], "b": best[0][1], "blocks": best[1]},
        "contradictory_blocks": told.contradictory,
    }


def _record(each: Difference) -> dict[str, object]:
    record: dict[str, object] = {
        "name": each.name,
        "in_a": each.kinds[0],
        "in_b": each.kinds[1],
        "shape_a": None if each.shapes[0] is None else list(each.shapes[0]),
        "shape_b": None if each.shapes[1] is None else list(each.shapes[1]),
        "differs": list(each.differs),
    }
    blocks, measured = each.blocks, each.distance
    if blocks is not None:
        scales = blocks.tensor_scales or (None, None)
        record |= {
            "elements": blocks.elements,
            "blocks": blocks.blocks,
            "codes": blocks.codes,
            "codes_percent": 100.0 * blocks.codes / blocks.elements if blocks.elements else 0.0,
            "codes_sign_of_zero": blocks.zero_signs,
            "codes_one_step": blocks.one_step,
            "blocks_with_codes": blocks.blocks_in_codes,
            "scales": blocks.scales,
            "scales_percent": 100.0 * blocks.scales / blocks.blocks if blocks.blocks else 0.0,
            "scale_steps": {str(step): count for step, count in blocks.steps.items()},
            "tensor_scale_a": scales[0],
            "tensor_scale_b": scales[1],
            "nan_scales": blocks.nan_scales,
        }
    if measured is not None:
        record |= {"relative_difference": measured.relative_error, "max_abs_difference": measured.max_abs_error}
    for side, treated in zip("ab", each.treatments or (), strict=False):
        record |= {f"axis_{side}": treated.axis, f"hadamard_signs_{side}": _signs(treated.hadamard)}
    return record


def _signs(hadamard: Hadamard | None) -> str | None:
    return None if hadamard is None else signs_text(hadamard)
