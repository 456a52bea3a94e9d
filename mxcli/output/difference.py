"""The difference of two checkpoints as text, as JSON and as CSV."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict

from mxcli.errors import printable
from mxcli.flows.diff import EQUAL, Diff, Difference
from mxcli.flows.diff_blocks import BlockDifference
from mxcli.flows.diff_rules import Explanation, rules_of
from mxcli.flows.soundness.errors import Distance
from mxcli.numerics.formats import find_format
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
_WORDS = {1: "one", 2: "two", 3: "three"}
_MOST_STEPS = 3
_SURE = "`mxcli verify --against SOURCE` tells which made either."
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


def conclusion(result: Diff) -> list[str]:
    """In what the two differ, and why, in words."""
    sentences = [*_code_sentences(result), *_scale_sentences(result), *_tensor_scale_sentences(result)]
    sentences += [sentence for row, told in result.explanations.items() for sentence in _rule_sentences(row, told)]
    return [*sentences, *_layout_sentences(result), outcome(result)]


def outcome(result: Diff) -> str:
    """Whether they are the same, in a sentence."""
    a, b = (printable(side.name) for side in result.sides)
    every, differing = len(result.tensors), len(result.differing)
    if not differing:
        return f"{a} and {b} are the same: {counted(every, 'tensor')}."
    words = ", ".join(f"{word} {count:,}" for word, count in result.counts.items() if word != EQUAL)
    return f"{a} and {b} differ in {differing:,} of {counted(every, 'tensor')}: {words}."


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
        each.kinds[0] or ABSENT,
        each.kinds[1] or ABSENT,
        ", ".join(each.differs),
        ABSENT if blocks is None else _percent(blocks.codes, blocks.elements),
        ABSENT if blocks is None else _percent(blocks.blocks_in_codes, blocks.blocks),
        ABSENT if blocks is None else _percent(blocks.scales, blocks.blocks),
        "" if blocks is None else _steps(blocks.steps),
        _relative(each.distance),
    ]


def _percent(part: int, whole: int) -> str:
    return significant(100.0 * part / whole if whole else 0.0)


def _steps(steps: Mapping[int, int]) -> str:
    most = sorted(steps.items(), key=lambda item: -item[1])
    shown = [f"{step:+d}: {count:,}" for step, count in most[:_MOST_STEPS]]
    return ", ".join(shown + (["…"] if len(most) > _MOST_STEPS else []))


def _relative(measured: Distance | None) -> str:
    if measured is None:
        return ABSENT
    if not measured.noise and not measured.unmatched:
        return "0"
    return significant(measured.relative_error)


def _blocks(result: Diff) -> list[BlockDifference]:
    return [each.blocks for each in result.tensors if each.blocks is not None]


def _code_sentences(result: Diff) -> Iterator[str]:
    parts = _blocks(result)
    codes, elements = sum(part.codes for part in parts), sum(part.elements for part in parts)
    if not codes:
        return
    blocks = sum(part.blocks_in_codes for part in parts)
    zeros, steps = sum(part.zero_signs for part in parts), sum(part.one_step for part in parts)
    sentence = (
        f"Codes: {codes:,} of {elements:,} differ ({_percent(codes, elements)} %), in {blocks:,} of "
        f"{sum(part.blocks for part in parts):,} blocks; {steps:,} by one step, {zeros:,} in the sign of a zero only."
    )
    if not any(part.scales or part.tensor_scales for part in parts):
        sentence += (
            " The scales are the same: only signs of zeros are treated differently."
            if zeros == codes
            else " The scales are the same, so the elements were rounded or divided in another way."
        )
    yield sentence


def _scale_sentences(result: Diff) -> Iterator[str]:
    """Differing scales by format: how many, and by how many steps."""
    by_format: dict[str, list[BlockDifference]] = {}
    for each in result.tensors:
        if each.blocks is not None and each.blocks.scales and each.kinds[0] is not None:
            by_format.setdefault(each.kinds[0], []).append(each.blocks)
    for name, parts in by_format.items():
        steps = sum((Counter(part.steps) for part in parts), Counter[int]())
        scales, blocks = sum(steps.values()), sum(part.blocks for part in parts)
        row = find_format(name).scale
        unit = "code" if row.bits == 8 and row.mantissa_bits else "binade" if row.mantissa_bits else "step"
        told = ", ".join(_told(step, count, unit) for step, count in steps.most_common(_MOST_STEPS))
        more = f" and {len(steps) - _MOST_STEPS:,} other distances" if len(steps) > _MOST_STEPS else ""
        yield f"Scales ({name}): {scales:,} of {blocks:,} differ ({_percent(scales, blocks)} %): {told}{more}."


def _told(step: int, count: int, unit: str) -> str:
    if not step:
        return f"{count:,} within a {unit}"
    many = _WORDS.get(abs(step), f"{abs(step):,}")
    return f"{count:,} {many} {unit}{'' if abs(step) == 1 else 's'} {'lower' if step > 0 else 'higher'} in A"


def _tensor_scale_sentences(result: Diff) -> Iterator[str]:
    scales = [part.tensor_scales for part in _blocks(result) if part.tensor_scales is not None]
    ratios = [two / one for one, two in scales if 0 < one < math.inf and 0 < two < math.inf]
    if ratios:
        low, high = min(ratios), max(ratios)
        times = f"{low:.4g}" if math.isclose(low, high, rel_tol=1e-6) else f"{low:.4g} to {high:.4g}"
        yield f"Tensor scales: {counted(len(ratios), 'weight')} differ; B's are {times} times A's."
    for at, count in enumerate(result.fused):
        if count:
            one, other = "AB"[at], "BA"[at]
            sets = "a fused set shares its" if count == 1 else f"{count:,} fused sets (q, k, v; gate, up) share their"
            yield f"Tensor scales: in {one} {sets} tensor scale, in {other} not."


def _rule_sentences(row: str, told: Explanation) -> Iterator[str]:
    """The rules that explain the scales of a format, as far as that can be told."""
    pairs = told.pairs
    if pairs:
        one, other = (_either(rules_of(pairs, at)) for at in (0, 1))
        unsure = "" if len(pairs) == 1 else f" They do not tell these rules apart; {_SURE}"
        yield f"Rules ({row}): {one} in A and {other} in B explain all {told.blocks:,} scales tried.{unsure}"
        return
    best = told.best
    if best is None:
        return
    (first, second), count = best
    yield (
        f"Rules ({row}): undecided, for no two rules explain all scales tried. {first} in A and {second} in B explain "
        f"{count:,} of {told.blocks:,}; the rest may be of a rule that searches (best), of elements rounded otherwise, "
        f"or of other weights{_contradiction(told)}. {_SURE[0].upper()}{_SURE[1:]}"
    )


def _contradiction(told: Explanation) -> str:
    if not told.contradictory:
        return ""
    return f"; {told.contradictory:,} blocks cannot both be the same weights rounded to nearest"


def _either(rules: Sequence[str]) -> str:
    return rules[0] if len(rules) == 1 else f"{', '.join(rules[:-1])} or {rules[-1]}"


def _layout_sentences(result: Diff) -> Iterator[str]:
    """How far values are apart where the parts are the same and the layouts are not."""
    layouts = [side.layout for side in result.sides]
    if layouts[0] == layouts[1]:
        return
    same = [each for each in result.tensors if each.blocks is not None and each.is_equal and each.distance is not None]
    if not same:
        return
    apart = [error for each in same if each.distance is not None and (error := each.distance.relative_error)]
    values = f"values differ by up to {significant(max(apart))} (relative)" if apart else "so have the values"
    yield (
        f"Layouts: {layouts[0]} and {layouts[1]}; {counted(len(same), 'weight')} have the same codes and scales, "
        f"{values}."
    )


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
        }
    if measured is not None:
        record |= {"relative_difference": measured.relative_error, "max_abs_difference": measured.max_abs_error}
    return record
